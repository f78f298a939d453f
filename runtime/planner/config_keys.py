"""Reading the sizes of a decoder from a config.json by its keys, whatever the family.

Called by families.py, which says what a family does without a key.
"""

import dataclasses
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

from coterie.attention.models.hf_config import HFConfig
from coterie.errors import ModelError
from coterie.runtime.planner.quantization import Quantization
from coterie.runtime.planner.shape import Attention, Experts, LayerKind, Weight
from coterie.runtime.planner.weights import AttentionDims, LayerDims, layer_weights


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What a family does without a key in its config.json."""

    qkv_bias: bool = False
    """Always, whatever attention_bias says."""
    output_bias: bool = True
    """attention_bias means the output projection too."""
    qk_norm: Literal["head", "full", "by_key"] | None = None
    expert_bias: bool = False
    sinks: bool = False
    shared_gate: bool = False
    correction_bias: bool = False
    """One more number per expert beside the gate."""
    moe: bool = True


def read_experts(hf: HFConfig) -> Experts | None:
    """The routed experts, or None for a dense model.

    Raises:
        ModelError: experts without the number of those that a token uses.
    """
    keys = ("n_routed_experts", "num_experts", "num_local_experts")
    count = next((hf.integer(key, minimum=0) for key in keys if hf.has(key)), 0)
    if count == 0:
        return None
    if not hf.has("num_experts_per_tok") and not hf.has("experts_per_token"):
        raise ModelError(f"config.json: {count} experts, but num_experts_per_tok is missing")
    width_key = next(
        (k for k in ("moe_intermediate_size", "expert_hidden_dim") if hf.has(k)),
        "intermediate_size",
    )
    top_k = hf.integer("num_experts_per_tok", hf.get("experts_per_token"))
    if top_k > count:
        raise ModelError(f"config.json: num_experts_per_tok {top_k} exceeds {count} experts")
    return Experts(num_experts=count, top_k=top_k, intermediate_size=hf.integer(width_key))


def _moe_layers(hf: HFConfig, num_layers: int) -> frozenset[int]:
    first = hf.integer("first_k_dense_replace", 0, minimum=0)
    every = hf.integer("moe_layer_freq", 1) if isinstance(hf.get("moe_layer_freq", 1), int) else 1
    step = hf.integer("decoder_sparse_step", 1)
    dense = set(hf.get("mlp_only_layers") or ())
    if isinstance(hf.get("moe_layers"), list):
        return frozenset(hf.get("moe_layers"))
    interleave = hf.integer("interleave_moe_layer_step", 1)
    return frozenset(
        i
        for i in range(num_layers)
        if i >= first
        and i % every == 0
        and i not in dense
        and (i + 1) % step == 0
        and (i + 1) % interleave == 0
    )


def _attention(hf: HFConfig, facts: Facts) -> tuple[Attention, AttentionDims]:
    hidden, heads = hf.integer("hidden_size"), hf.integer("num_attention_heads")
    bias = facts.qkv_bias or hf.boolean("attention_bias", False)
    dims = AttentionDims(
        hidden_size=hidden,
        num_heads=heads,
        qkv_bias=bias,
        output_bias=bias and facts.output_bias,
        sinks=facts.sinks,
    )
    if hf.has("kv_lora_rank"):
        rank, rope = hf.integer("kv_lora_rank"), hf.integer("qk_rope_head_dim")
        dims = dataclasses.replace(
            dims,
            kv_lora_rank=rank,
            rope_dim=rope,
            nope_dim=hf.integer("qk_nope_head_dim"),
            v_dim=hf.integer("v_head_dim"),
            q_lora_rank=hf.get("q_lora_rank") or 0,
        )
        flops = 2 * heads * (rank + rope) + 2 * heads * rank
        return Attention(
            num_heads=heads,
            num_kv_heads=1,
            kv_width=rank + rope,
            flops_per_position=flops,
            latent=True,
        ), dims
    kv_heads = hf.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise ModelError(
            f"config.json: num_attention_heads {heads} must be a multiple of "
            f"num_key_value_heads {kv_heads}"
        )
    head_dim = hf.integer("head_dim", hidden // heads)
    by_key: Literal["head"] | None = "head" if hf.get("use_qk_norm") or hf.get("qk_norm") else None
    dims = dataclasses.replace(
        dims,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        qk_norm=by_key if facts.qk_norm == "by_key" else facts.qk_norm,
    )
    return Attention(
        num_heads=heads,
        num_kv_heads=kv_heads,
        kv_width=2 * head_dim,
        flops_per_position=4 * heads * head_dim,
    ), dims


def read_layers(
    hf: HFConfig,
    facts: Facts,
    experts: Experts | None,
    stored: Fraction,
    plain: Fraction,
    quantization: Quantization | None,
) -> dict[str, Any]:
    """The fields of ModelShape that follow from sizes.

    Args:
        stored: bytes of one element of a matrix that is not quantized.
        plain: the same of embeddings, norms, biases and gates.
    """
    hidden, vocab, num_layers = (
        hf.integer(key) for key in ("hidden_size", "vocab_size", "num_hidden_layers")
    )
    attention, attention_dims = _attention(hf, facts)
    moe_layers = _moe_layers(hf, num_layers) if experts else frozenset()
    all_moe = len(moe_layers) == num_layers
    dense_width = 0 if all_moe else hf.integer("intermediate_size")
    dims = LayerDims(
        attention=attention_dims,
        dense_width=dense_width,
        mlp_bias=hf.boolean("mlp_bias", False),
        experts=experts,
        shared_width=_shared_width(hf, experts),
        shared_gate=facts.shared_gate,
        correction_bias=facts.correction_bias or hf.get("topk_method") == "noaux_tc",
        expert_bias=facts.expert_bias,
    )
    kinds: dict[LayerKind, int] = {}
    kind_of_layer = []
    for layer in range(num_layers):

        def size(part: str, layer: int = layer) -> Fraction:
            quantized = quantization is not None and quantization.applies(part, layer)
            return quantization.bytes_each if quantized and quantization else stored

        kind = layer_weights(dims, layer in moe_layers, size, plain)
        kind_of_layer.append(kinds.setdefault(kind, len(kinds)))
    tied = hf.boolean("tie_word_embeddings", False)
    embedding = Weight(
        part="embedding", numel=vocab * hidden, split="columns", bytes_each=plain, matrix=False
    )
    norm = Weight(part="norms", numel=hidden, split="all", bytes_each=plain, matrix=False)
    head = Weight(part="lm_head", numel=vocab * hidden, split="columns", bytes_each=plain)
    return {
        "hidden_size": hidden,
        "intermediate_size": dense_width,
        "vocab_size": vocab,
        "attention": attention,
        "kinds": tuple(kinds),
        "kind_of_layer": tuple(kind_of_layer),
        "first": (embedding,),
        "last": (norm,) if tied else (norm, head),
        "tied": tied,
    }


def _shared_width(hf: HFConfig, experts: Experts | None) -> int:
    if experts is None:
        return 0
    for key in ("shared_expert_intermediate_size", "shared_intermediate_size"):
        if hf.has(key):
            return hf.integer(key, minimum=0)
    return hf.integer("n_shared_experts", 0, minimum=0) * experts.intermediate_size
