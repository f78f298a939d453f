"""How many bytes a weight is stored in, from a config.json's quantization_config.

Used by families.py alone. Methods that are not known are refused rather than guessed.
"""

import fnmatch
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from coterie.errors import ModelError

_EXAMPLES = {
    "attention": "model.layers.{layer}.self_attn.o_proj",
    "mlp": "model.layers.{layer}.mlp.down_proj",
    "shared_experts": "model.layers.{layer}.mlp.shared_experts.down_proj",
    "experts": "model.layers.{layer}.mlp.experts.0.down_proj",
}
"""One module of each part that quantizers touch; embeddings, heads, gates and norms stay."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantization:
    """Storage of the quantized matrices."""

    label: str
    """float8, int8, int4, mxfp4, nvfp4, ..."""
    bytes_each: Fraction
    """Of one element, its share of the scales included."""
    ignored: tuple[str, ...] = ()
    """Module names or patterns that keep the model's dtype."""

    def applies(self, part: str, layer: int) -> bool:
        """Whether the matrices of ``part`` in ``layer`` are stored quantized."""
        example = _EXAMPLES.get(part)
        if example is None:
            return False
        name = example.format(layer=layer)
        return not any(_matches(pattern, name) for pattern in self.ignored)


def _matches(pattern: str, name: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern[3:], name) is not None
    if "*" in pattern:
        return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name, pattern + ".*")
    return name == pattern or name.startswith(pattern + ".") or pattern in name.split(".")


def _grouped(bits: int, group: int, scale_bytes: Fraction | int) -> Fraction:
    """``bits`` an element, and one scale for each ``group`` (0 or less: one a row, negligible)."""
    return Fraction(bits, 8) + (Fraction(scale_bytes) / group if group > 0 else 0)


def read_quantization(values: Mapping[str, Any] | None) -> Quantization | None:
    """Interpret ``quantization_config``.

    Raises:
        ModelError: a method whose bytes are not known.
    """
    if not values:
        return None
    method = str(values.get("quant_method") or values.get("quant_algo") or "").lower()
    ignored = tuple(
        str(name)
        for key in ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules")
        for name in values.get(key) or ()
    )
    label, size = _storage(method, values)
    return Quantization(label=label, bytes_each=size, ignored=ignored)


def _storage(method: str, values: Mapping[str, Any]) -> tuple[str, Fraction]:
    if method in ("fp8", "fbgemm_fp8"):
        block = values.get("weight_block_size")
        # Block scales are float32; scales by tensor or by row are too few to matter.
        return "float8", _grouped(8, block[0] * block[1] if block else 0, 4)
    if method == "mxfp4":
        return "mxfp4", _grouped(4, 32, 1)
    if method in ("gptq", "awq"):
        bits = int(values.get("bits", values.get("w_bit", 4)))
        group = int(values.get("group_size", values.get("q_group_size", 128)))
        return f"int{bits}", _grouped(bits, group, 2 + Fraction(bits, 8))
    if method == "compressed-tensors":
        return _compressed_tensors(values)
    if method in ("modelopt", "modelopt_fp4", "nvfp4", "fp8_pb_wo"):
        algorithm = str(values.get("quant_algo", method)).lower()
        if "fp4" in algorithm:
            return "nvfp4", _grouped(4, 16, 1)
        if "fp8" in algorithm:
            return "float8", Fraction(1)
    if method in ("bitsandbytes", "bnb"):
        if values.get("load_in_4bit"):
            return "int4", _grouped(4, 64, 1)
        return "int8", Fraction(1)
    raise ModelError(
        f"config.json: quantization method {method or values!r} is not known, so its bytes cannot "
        "be counted; known: fp8, fbgemm_fp8, mxfp4, gptq, awq, compressed-tensors, modelopt, "
        "bitsandbytes; or give --dtype to plan with unquantized weights"
    )


def _compressed_tensors(values: Mapping[str, Any]) -> tuple[str, Fraction]:
    groups = list((values.get("config_groups") or {}).values())
    weights = groups[0].get("weights") if len(groups) == 1 else None
    if not weights:
        raise ModelError(
            "config.json: compressed-tensors with other than one config group is not known; give "
            "--dtype to plan with unquantized weights"
        )
    bits, group = int(weights["num_bits"]), int(weights.get("group_size") or 0)
    block = weights.get("block_structure")
    if block:
        group = int(block[0]) * int(block[1])
    kind = "float" if weights.get("type") == "float" else "int"
    scale_bytes = 1 if (kind, bits) == ("float", 4) else 2
    return f"{kind}{bits}", _grouped(bits, group, scale_bytes)
