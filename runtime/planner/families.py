"""From a config.json to a ModelShape, for many families, the ones the engine refuses included.

One reader (config_keys.py) goes by keys, since families spell the same things alike; ``_FACTS``
holds what a family does without saying so. Called by the command line. No weights are read.
"""

import json
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any, Final

from coterie.attention.models.hf_config import HFConfig
from coterie.errors import ModelError
from coterie.runtime.planner.config_keys import Facts, read_experts, read_layers
from coterie.runtime.planner.quantization import read_quantization
from coterie.runtime.planner.shape import DTYPE_BYTES, ModelShape

_FACTS: Final[Mapping[str, Facts]] = {
    "llama": Facts(),
    "mistral": Facts(),
    "qwen2": Facts(qkv_bias=True, output_bias=False),
    "qwen3": Facts(qk_norm="head"),
    "mixtral": Facts(),
    "qwen2_moe": Facts(qkv_bias=True, output_bias=False, shared_gate=True),
    "qwen3_moe": Facts(qk_norm="head"),
    "granitemoe": Facts(),
    "olmoe": Facts(qk_norm="full"),
    "deepseek_v2": Facts(),
    "deepseek_v3": Facts(correction_bias=True),
    "kimi_k2": Facts(correction_bias=True),
    "gpt_oss": Facts(expert_bias=True, sinks=True),
    "glm4_moe": Facts(output_bias=False, qk_norm="by_key", correction_bias=True),
}
KNOWN_MODEL_TYPES: Final = tuple(_FACTS)
_FOREIGN = (
    "ssm_cfg",
    "mamba_d_state",
    "ssm_state_size",
    "linear_num_key_heads",
    "attn_layer_period",
)
_ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}


def read_shape(path: str | Path, dtype: str = "auto") -> ModelShape:
    """Read a folder with a config.json, or a config file itself.

    Args:
        dtype: "auto", or what all weights are stored in, whatever the file says.

    Raises:
        ModelError: not there, not JSON, or a model that cannot be planned; says why.
    """
    file = Path(path).expanduser()
    file = file / "config.json" if file.is_dir() else file
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise ModelError(f"{file} must hold a JSON object, not a {type(values).__name__}")
    name = file.parent.name if file.name == "config.json" else file.stem
    return shape_from_dict(values, name=name, dtype=dtype)


def shape_from_dict(
    values: Mapping[str, Any], *, name: str = "", dtype: str = "auto"
) -> ModelShape:
    """Interpret the contents of a config.json.

    Raises:
        ModelError: keys are missing, or the architecture is none the planner understands.
    """
    notes: list[str] = []
    text = values.get("text_config")
    if isinstance(text, dict):
        values = {**values, **text}
        notes.append("only the language model is counted, not the parts for images or sound")
    hf = HFConfig(values)
    model_type = str(hf.get("model_type", "unknown"))
    _refuse_foreign(hf, model_type)
    facts = _FACTS.get(model_type)
    if facts is None:
        facts = Facts(qk_norm="by_key")
        notes.append(
            f"model_type {model_type!r} is not known: read by its keys as a decoder with gated "
            "MLPs; biases and extra norms may be missing from the count"
        )
    dtype_name = _dtype(hf, dtype)
    quantization = None
    if dtype == "auto":
        quantization = read_quantization(hf.get("quantization_config"))
    elif hf.has("quantization_config"):
        notes.append(f"--dtype {dtype} replaces the checkpoint's quantization")
    # float8 is a storage format here: activations and KV stay in 16 bits.
    act_dtype = "bfloat16" if dtype_name == "float8" else dtype_name
    stored = Fraction(DTYPE_BYTES[dtype_name])
    experts = read_experts(hf)
    shape = read_layers(hf, facts, experts, stored, Fraction(DTYPE_BYTES[act_dtype]), quantization)
    notes += _notes(hf)
    return ModelShape(
        name=name or model_type,
        model_type=model_type,
        experts=experts,
        dtype=act_dtype,
        weights_dtype=quantization.label if quantization else dtype_name,
        max_position_embeddings=hf.get("max_position_embeddings"),
        assumptions=tuple(notes),
        known_family=model_type in _FACTS,
        **shape,
    )


def _refuse_foreign(hf: HFConfig, model_type: str) -> None:
    if hf.get("is_encoder_decoder"):
        raise ModelError(
            f"model_type {model_type!r} is an encoder-decoder; only decoders are planned"
        )
    others = set(hf.get("layer_types") or ()) - _ATTENTION_LAYERS
    foreign = [key for key in _FOREIGN if hf.has(key)]
    if others or foreign:
        raise ModelError(
            f"model_type {model_type!r} has layers other than attention and MLP "
            f"({', '.join(sorted(others) + foreign)}), whose state the planner cannot count"
        )


def _dtype(hf: HFConfig, asked: str) -> str:
    name = asked
    if asked == "auto":
        # float16 is read as bfloat16, as the engine does.
        name = str(hf.get("dtype", hf.get("torch_dtype", "bfloat16"))).removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise ModelError(f"dtype {name!r} is not known; one of {', '.join(DTYPE_BYTES)}")
    return "bfloat16" if name == "float16" else name


def _notes(hf: HFConfig) -> list[str]:
    notes = []
    if hf.get("num_nextn_predict_layers"):
        notes.append("layers for multi-token prediction are not counted")
    if "sliding_attention" in (hf.get("layer_types") or ()) or (
        hf.get("sliding_window") and hf.get("use_sliding_window", True)
    ):
        notes.append("sliding-window layers keep the KV of the whole context")
    if hf.has("index_topk"):
        notes.append("the index of sparse attention is not counted")
    return notes
