"""Turn a Llama GGUF file into a Hugging Face folder: weights, config, tokenizer, chat template.

Knows GGUF's names and its two peculiarities for Llama: block-quantized tensors, and q/k rows
permuted for interleaved rotary embedding. Called by ``runtime.model_store.pull`` only.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from coterie.errors import CheckpointError
from coterie.runtime.demo.fetch import Progress

_CONTROL_TOKEN = 3  # gguf.TokenType.CONTROL
_TOP_LEVEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert_gguf(gguf_path: Path, out_dir: Path, progress: Progress) -> None:
    """Write a complete Hugging Face folder in bfloat16 into the existing ``out_dir``.

    Raises:
        CheckpointError: the file is not a Llama model with a GPT-2 style tokenizer.
    """
    reader = gguf.GGUFReader(gguf_path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    architecture = fields.get("general.architecture")
    if architecture != "llama":
        raise CheckpointError(f"{gguf_path.name} holds a {architecture!r} model, expected 'llama'")
    config = llama_config(fields)
    tensors: dict[str, torch.Tensor] = {}
    for done, tensor in enumerate(reader.tensors):
        progress("convert", done, len(reader.tensors))
        name = hf_name(tensor.name)
        values = np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        if name.endswith(".q_proj.weight"):
            values = unpermute_rope_rows(values, config["num_attention_heads"])
        elif name.endswith(".k_proj.weight"):
            values = unpermute_rope_rows(values, config["num_key_value_heads"])
        tensors[name] = torch.from_numpy(values).to(torch.bfloat16).contiguous()
    config["tie_word_embeddings"] = "lm_head.weight" not in tensors
    save_file(tensors, out_dir / "model.safetensors", metadata={"format": "pt"})
    write_json(out_dir / "config.json", config)
    write_json(out_dir / "generation_config.json", generation_config(config))
    write_tokenizer(fields, out_dir)
    progress("convert", len(reader.tensors), len(reader.tensors))


def hf_name(name: str) -> str:
    """The Hugging Face name of a GGUF Llama tensor.

    Raises:
        CheckpointError: no such tensor in a Llama model.
    """
    if name in _TOP_LEVEL:
        return _TOP_LEVEL[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _IN_BLOCK and parts[3] == "weight":
        return f"model.layers.{parts[1]}.{_IN_BLOCK[parts[2]]}.weight"
    raise CheckpointError(f"unexpected tensor {name!r} in a Llama GGUF file")


def unpermute_rope_rows(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo GGUF's row order of q_proj and k_proj.

    GGUF rotates neighbouring rows (2i, 2i + 1) of a head; Hugging Face rotates row i with row
    i + head_dim / 2. ::

        GGUF head of 4 rows:  a0 b0 a1 b1    ->    Hugging Face:  a0 a1 b0 b1

    Args:
        weight: ``[num_heads * head_dim, hidden_size]``.

    Returns:
        Same shape, contiguous.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows, columns)


def llama_config(fields: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of a Llama GGUF file; readable by published and by current transformers."""
    rope_theta = float(fields["llama.rope.freq_base"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": fields["llama.vocab_size"],
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.rope.dimension_count"],
        "hidden_act": "silu",
        "max_position_embeddings": fields["llama.context_length"],
        # GGUF keeps it in float32: 1e-5 comes back as 9.999999747378752e-06.
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": rope_theta},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "initializer_range": 0.02,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }


def generation_config(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}


def write_tokenizer(fields: Mapping[str, Any], out_dir: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja from GGUF metadata.

    Raises:
        CheckpointError: not the SmolLM kind of byte-level BPE; another would be split wrongly.
    """
    kind = (fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise CheckpointError(
            f"GGUF tokenizer {kind} is not supported, expected ('gpt2', 'smollm')"
        )
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    types: list[int] = fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    # "smollm" means: every digit alone, then GPT-2's pattern on bytes.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    tokenizer.save(str(out_dir / "tokenizer.json"))

    template = fields["tokenizer.chat_template"]
    (out_dir / "chat_template.jinja").write_text(template)
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    write_json(
        out_dir / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_prefix_space": False,
            "add_bos_token": bool(fields["tokenizer.ggml.add_bos_token"]),
            "clean_up_tokenization_spaces": False,
            "model_max_length": fields["llama.context_length"],
            "chat_template": template,
            **{
                f"{ours}_token": tokens[fields[f"tokenizer.ggml.{theirs}_token_id"]]
                for ours, theirs in names.items()
            },
        },
    )


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
