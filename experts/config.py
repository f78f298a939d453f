"""Static facts about the expert layers of a model."""

from dataclasses import dataclass
from typing import Literal

from coterie.errors import ModelError


@dataclass(frozen=True, kw_only=True, slots=True)
class MoEConfig:
    """Shape of every MoE layer of a model."""

    num_experts: int
    """Logical experts per layer."""
    top_k: int
    """Experts per token."""
    hidden_size: int
    intermediate_size: int
    """Width of one expert's MLP."""
    norm_topk_prob: bool = True
    """Renormalise the chosen probabilities to sum to 1."""
    scoring: Literal["softmax"] = "softmax"

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.num_experts:
            raise ModelError(
                f"top_k must be between 1 and num_experts={self.num_experts}, got {self.top_k}"
            )
