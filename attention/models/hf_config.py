"""Reads values out of a config.json and says plainly what is wrong with it.

Recipes use this reader; nothing outside ``attention/models`` sees a Hugging Face key.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from coterie.errors import ModelError

SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeScaling:
    """How inverse frequencies are changed for longer contexts (see attention/rope.py)."""

    rope_type: str
    """linear or llama3."""
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


class HFConfig:
    """A config.json with checked access; ``null`` counts as absent."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def has(self, key: str) -> bool:
        return self._values.get(key) is not None

    def get(self, key: str, default: Any = None) -> Any:
        value = self._values.get(key)
        return default if value is None else value

    def integer(self, key: str, default: int | None = None, minimum: int = 1) -> int:
        """An integer of at least ``minimum``.

        Raises:
            ModelError: missing without a default, not an integer, or too small.
        """
        value = self._required(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise ModelError(f"config.json: {key} must be an integer >= {minimum}, got {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number.

        Raises:
            ModelError: missing without a default, not a number, or not positive.
        """
        value = self._required(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise ModelError(f"config.json: {key} must be a positive number, got {value!r}")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise ModelError(f"config.json: {key} must be true or false, got {value!r}")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        """A token id or a list of them; empty if absent."""
        value = self.get(key, [])
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            raise ModelError(
                f"config.json: {key} must be a token id or a list of them, got {value!r}"
            )
        return tuple(ids)

    def rope(
        self, max_position_embeddings: int, default_theta: float
    ) -> tuple[float, RopeScaling | None]:
        """``rope_theta`` and the scaling, from the old keys or from ``rope_parameters``.

        Raises:
            ModelError: a rope type other than default, linear or llama3, or partial rotation.
        """
        parameters = self.get("rope_parameters") or self.get("rope_scaling") or {}
        if not isinstance(parameters, dict):
            raise ModelError(f"config.json: rope parameters must be an object, got {parameters!r}")
        reader = HFConfig(parameters)
        theta = reader.number("rope_theta", self.number("rope_theta", default_theta))
        partial = reader.get("partial_rotary_factor", self.get("partial_rotary_factor", 1.0))
        if partial != 1.0:
            raise ModelError(
                f"config.json: partial_rotary_factor {partial!r} is not supported, only 1.0"
            )
        rope_type = reader.get("rope_type", reader.get("type", "default"))
        if rope_type not in SUPPORTED_ROPE_TYPES:
            raise ModelError(
                f"config.json: rope type {rope_type!r} is not supported; "
                f"supported: {', '.join(SUPPORTED_ROPE_TYPES)}"
            )
        if rope_type == "default":
            return theta, None
        if rope_type == "linear":
            return theta, RopeScaling(rope_type=rope_type, factor=reader.number("factor"))
        scaling = RopeScaling(
            rope_type=rope_type,
            factor=reader.number("factor"),
            low_freq_factor=reader.number("low_freq_factor"),
            high_freq_factor=reader.number("high_freq_factor"),
            original_max_position_embeddings=reader.integer(
                "original_max_position_embeddings", max_position_embeddings
            ),
        )
        if scaling.low_freq_factor == scaling.high_freq_factor:
            raise ModelError("config.json: low_freq_factor and high_freq_factor must differ")
        return theta, scaling

    def _required(self, key: str, default: Any) -> Any:
        value = self.get(key, default)
        if value is None:
            raise ModelError(f"config.json: {key} is missing")
        return value
