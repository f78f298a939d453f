"""ModelConfig: everything the rest of Coterie knows about a model, from its config.json alone.

The only place where Hugging Face keys are read (through the recipes). Used by the engine process
for checks and planning, and by every rank for loading.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import torch

from coterie.attention.kv_cache import PagedKVCache
from coterie.attention.models.hf_config import HFConfig, RopeScaling
from coterie.attention.models.registry import find_recipe
from coterie.errors import ModelError
from coterie.experts.config import MoEConfig

# There are no float16 kernels; bfloat16 covers its range.
_DTYPES: Final = {
    "bfloat16": torch.bfloat16,
    "float16": torch.bfloat16,
    "float32": torch.float32,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Immutable facts of one model."""

    family: str
    """llama, mixtral, qwen3_moe or granite_moe."""
    architecture: str
    """As in config.json, e.g. MixtralForCausalLM."""
    vocab_size: int
    hidden_size: int
    num_layers: int
    """Decoder layers."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    """Width of the MLP of dense layers; of an expert see ``moe``."""
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool = False
    """Biases on q, k, v and o projections."""
    mlp_bias: bool = False
    """Biases on the projections of dense layers."""
    qk_norm: bool = False
    """RMS norm of each query and key head before rotation."""
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    """Factor on what attention and MLP add to the residual stream."""
    attention_scale: float
    """Factor on query-key products."""
    logits_scale: float = 1.0
    """Factor on logits."""
    sliding_window: int | None = None
    """Attention beyond this distance would be cut; contexts up to it are exact without."""
    moe: MoEConfig | None = None
    """None for dense models."""
    moe_layers: tuple[int, ...] = ()
    """Decoder layers with experts; a router's layer is an index into this."""
    dtype: torch.dtype
    """bfloat16 or float32, what dtype "auto" means."""
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"config.json: num_attention_heads {self.num_heads} must be a multiple of "
                f"num_key_value_heads {self.num_kv_heads}"
            )
        if self.head_dim < 2 or self.head_dim % 2:
            raise ModelError(
                f"config.json: head_dim must be even and at least 2, got {self.head_dim}; "
                f"set head_dim, or make hidden_size {self.hidden_size} divisible by "
                f"num_attention_heads {self.num_heads}"
            )
        outside = [t for t in self.eos_token_ids if t >= self.vocab_size]
        if outside:
            raise ModelError(f"eos_token_id {outside} is not below vocab_size {self.vocab_size}")

    @staticmethod
    def from_hf(model_dir: str | Path) -> "ModelConfig":
        """Read ``config.json`` (and ``generation_config.json`` if there is one) of a folder.

        Raises:
            ModelError: no such folder or file, invalid JSON, unsupported or inconsistent.
        """
        folder = Path(model_dir)
        if not folder.is_dir():
            raise ModelError(f"{folder} is not a folder with a model in Hugging Face layout")
        if not (folder / "config.json").is_file():
            raise ModelError(f"{folder} has no config.json: is it a model in Hugging Face layout?")
        values = _read_json(folder / "config.json")
        generation: dict[str, Any] = {}
        if (folder / "generation_config.json").is_file():
            generation = _read_json(folder / "generation_config.json")
        return ModelConfig.from_dict(values, generation)

    @classmethod
    def from_dict(
        cls, values: Mapping[str, Any], generation: Mapping[str, Any] | None = None
    ) -> Self:
        """Interpret the contents of config.json and generation_config.json.

        Raises:
            ModelError: unsupported or inconsistent; says what to change.
        """
        hf = HFConfig(values)
        recipe = find_recipe(hf)
        if hf.has("quantization_config"):
            raise ModelError(
                "quantized checkpoints are not supported; use bfloat16, float16 or float32 weights"
            )
        activation = hf.get("hidden_act", "silu")
        if activation != "silu":
            raise ModelError(f"config.json: hidden_act {activation!r} is not supported, only silu")
        fields = recipe.map_config(hf)
        if not hf.has("head_dim") and fields["hidden_size"] % fields["num_heads"]:
            raise ModelError(
                f"config.json: hidden_size {fields['hidden_size']} must be a multiple of "
                f"num_attention_heads {fields['num_heads']} when head_dim is not given"
            )
        bos = hf.token_ids("bos_token_id")
        return cls(
            family=recipe.family,
            architecture=recipe.architecture,
            dtype=_dtype(hf),
            eos_token_ids=HFConfig(generation or {}).token_ids("eos_token_id")
            or hf.token_ids("eos_token_id"),
            bos_token_id=bos[0] if bos else None,
            **fields,
        )

    @property
    def max_context_len(self) -> int:
        """Most tokens of one context that this model can be served with."""
        if self.sliding_window is None:
            return self.max_position_embeddings
        return min(self.max_position_embeddings, self.sliding_window)

    def check_max_model_len(self, max_model_len: int) -> None:
        """Refuse contexts the model was not made for.

        Raises:
            ModelError: longer than the positions or than the sliding window.
        """
        if max_model_len > self.max_position_embeddings:
            raise ModelError(
                f"--max-model-len {max_model_len} exceeds the model's max_position_embeddings "
                f"{self.max_position_embeddings}"
            )
        if max_model_len > self.max_context_len:
            raise ModelError(
                f"--max-model-len {max_model_len} exceeds the model's sliding window "
                f"{self.sliding_window}, and sliding-window attention is not supported: use "
                f"--max-model-len {self.max_context_len} or less"
            )

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of K and V of one token over all layers, as they lie in the cache."""
        return PagedKVCache.bytes_per_block(
            self.num_layers, 1, self.num_kv_heads, self.head_dim, dtype
        )


def _dtype(hf: HFConfig) -> torch.dtype:
    name = str(hf.get("dtype", hf.get("torch_dtype", "float32"))).removeprefix("torch.")
    if name not in _DTYPES:
        raise ModelError(
            f"config.json: dtype {name!r} is not supported; one of {', '.join(_DTYPES)}"
        )
    return _DTYPES[name]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise ModelError(f"{path} must hold a JSON object, not a {type(values).__name__}")
    return values
