"""What distinguishes one model family: how its config.json maps and how its tensors are called.

One ``Recipe`` per family lives in its own file; ``registry.py`` lists them. Everything else
(decoder, loader, checkpoint) is shared by all families.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from coterie.attention.models.hf_config import HFConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertNames:
    """Where a MoE layer keeps its tensors; templates with ``{layer}`` and maybe ``{expert}``.

    Either the three ``gate, up, down`` templates are set (one tensor per expert), or the two
    ``fused_*`` (all experts of a layer in one tensor).
    """

    router: str
    """``[num_experts, hidden_size]``."""
    gate: str | None = None
    """``[intermediate, hidden]``."""
    up: str | None = None
    """``[intermediate, hidden]``."""
    down: str | None = None
    """``[hidden, intermediate]``."""
    fused_gate_up: str | None = None
    """``[num_experts, 2 * intermediate, hidden]``, gate rows first."""
    fused_down: str | None = None
    """``[num_experts, hidden, intermediate]``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightNames:
    """Tensor names; those of layers are templates and lack ``.weight`` or ``.bias``."""

    embed_tokens: str = "model.embed_tokens.weight"
    norm: str = "model.norm.weight"
    lm_head: str = "lm_head.weight"
    input_norm: str = "model.layers.{layer}.input_layernorm"
    post_attention_norm: str = "model.layers.{layer}.post_attention_layernorm"
    q_proj: str = "model.layers.{layer}.self_attn.q_proj"
    k_proj: str = "model.layers.{layer}.self_attn.k_proj"
    v_proj: str = "model.layers.{layer}.self_attn.v_proj"
    o_proj: str = "model.layers.{layer}.self_attn.o_proj"
    q_norm: str = "model.layers.{layer}.self_attn.q_norm"
    k_norm: str = "model.layers.{layer}.self_attn.k_norm"
    gate_proj: str = "model.layers.{layer}.mlp.gate_proj"
    up_proj: str = "model.layers.{layer}.mlp.up_proj"
    down_proj: str = "model.layers.{layer}.mlp.down_proj"
    experts: ExpertNames | None = None
    """None for dense families."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """One model family."""

    family: str
    architecture: str
    """Entry of ``architectures`` in config.json."""
    model_type: str
    """``model_type`` in config.json; decides when ``architectures`` is absent."""
    map_config: Callable[[HFConfig], dict[str, Any]]
    """Fields of ModelConfig but those that are read the same way for all (see config.py)."""
    names: WeightNames


def common_fields(
    hf: HFConfig,
    *,
    rope_theta: float = 10000.0,
    rms_norm_eps: float = 1e-6,
    max_position_embeddings: int = 2048,
) -> dict[str, Any]:
    """Fields of ModelConfig that all families spell alike; the arguments are family defaults."""
    hidden_size = hf.integer("hidden_size")
    num_heads = hf.integer("num_attention_heads")
    head_dim = hf.integer("head_dim", hidden_size // num_heads)
    max_positions = hf.integer("max_position_embeddings", max_position_embeddings)
    theta, rope_scaling = hf.rope(max_positions, rope_theta)
    return {
        "vocab_size": hf.integer("vocab_size"),
        "hidden_size": hidden_size,
        "num_layers": hf.integer("num_hidden_layers"),
        "num_heads": num_heads,
        "num_kv_heads": hf.integer("num_key_value_heads", num_heads),
        "head_dim": head_dim,
        "intermediate_size": hf.integer("intermediate_size"),
        "rms_norm_eps": hf.number("rms_norm_eps", rms_norm_eps),
        "rope_theta": theta,
        "rope_scaling": rope_scaling,
        "max_position_embeddings": max_positions,
        "tie_word_embeddings": hf.boolean("tie_word_embeddings", False),
        "attention_scale": head_dim**-0.5,
    }
