"""ModelShape: what the planner knows of a model - its weights by part, its KV, its experts.

Pure numbers, made from a config.json alone (see families.py), also for families that the engine
refuses. Every weight carries how a tensor-parallel group splits it and how many bytes it is stored
in, so that ledgers are sums over this.
"""

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Literal

Split = Literal["heads", "kv_heads", "columns", "all", "experts"]
"""heads, kv_heads: follows the attention heads; columns: any even split; all: a full copy on every
rank; experts: whole experts, or shards of them, on expert ranks."""

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8": 1}


@dataclass(frozen=True, kw_only=True, slots=True)
class Weight:
    """All tensors of one part of one layer that are split alike."""

    part: str
    """embedding, lm_head, attention, mlp, shared_experts, router, experts or norms."""
    numel: int
    split: Split
    bytes_each: Fraction
    """Stored bytes of one element, scales of quantized weights included."""
    matrix: bool = True
    """Multiplied with every token; norms, biases and the embedding are not."""

    @property
    def num_bytes(self) -> int:
        return -(-self.numel * self.bytes_each.numerator // self.bytes_each.denominator)


@dataclass(frozen=True, kw_only=True, slots=True)
class Attention:
    """Heads and what they leave in the KV cache."""

    num_heads: int
    num_kv_heads: int
    """1 for latent attention: one latent for all heads."""
    kv_width: int
    """Elements of one KV head of one token and layer: K and V, or the latent with its rope part."""
    flops_per_position: int
    """Of all heads, for one token attending to one position in one layer."""
    latent: bool = False
    """MLA."""

    def kv_heads_per_rank(self, tp: int) -> int:
        """KV heads of the fullest rank of a TP group; at least one, so beyond it they repeat."""
        return -(-self.num_kv_heads // tp)

    def heads_per_rank(self, tp: int) -> int:
        """Query heads of the fullest rank; ranks take whole KV groups while there are enough."""
        if self.latent:
            return -(-self.num_heads // tp)
        group = self.num_heads // self.num_kv_heads
        if tp <= self.num_kv_heads:
            return self.kv_heads_per_rank(tp) * group
        return -(-group // (tp // self.num_kv_heads))

    def is_even(self, tp: int) -> bool:
        """Whether all ranks of a TP group get the same heads."""
        if self.num_heads % tp:
            return False
        return self.latent or self.num_kv_heads % tp == 0 or tp % self.num_kv_heads == 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """The routed experts of every MoE layer."""

    num_experts: int
    top_k: int
    intermediate_size: int

    @property
    def density(self) -> float:
        """Share of the experts that one token uses."""
        return self.top_k / self.num_experts


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerKind:
    """Weights of one kind of decoder layer."""

    weights: tuple[Weight, ...]
    moe: bool

    @property
    def num_bytes(self) -> int:
        return sum(w.num_bytes for w in self.weights)


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """One model."""

    name: str
    model_type: str
    hidden_size: int
    intermediate_size: int
    """Of dense MLPs; 0 if there are none."""
    vocab_size: int
    attention: Attention
    experts: Experts | None
    kinds: tuple[LayerKind, ...]
    kind_of_layer: tuple[int, ...]
    """Index into ``kinds``, for each decoder layer."""
    first: tuple[Weight, ...]
    """Before the layers: the embedding."""
    last: tuple[Weight, ...]
    """Behind the layers: final norm and head. Empty of a matrix if the head is the embedding."""
    tied: bool
    dtype: str
    """Of activations and KV cache."""
    weights_dtype: str
    """As people call what the matrices are stored in: bfloat16, float8, mxfp4, int4, ..."""
    max_position_embeddings: int | None
    assumptions: tuple[str, ...] = ()
    known_family: bool = True

    @property
    def num_layers(self) -> int:
        return len(self.kind_of_layer)

    @cached_property
    def num_moe_layers(self) -> int:
        return sum(self.kinds[kind].moe for kind in self.kind_of_layer)

    @property
    def act_bytes(self) -> int:
        """Bytes of one element of activations on the wire and of the KV cache."""
        return DTYPE_BYTES[self.dtype]

    @property
    def is_moe(self) -> bool:
        return self.experts is not None

    def kinds_in(self, start: int, stop: int) -> dict[int, int]:
        """How many layers of each kind are in ``start .. stop - 1``."""
        counts: dict[int, int] = {}
        for kind in self.kind_of_layer[start:stop]:
            counts[kind] = counts.get(kind, 0) + 1
        return counts

    def all_weights(self) -> list[tuple[Weight, int]]:
        """Every weight with the number of layers that have it."""
        found = [(w, 1) for w in (*self.first, *self.last)]
        for kind, count in self.kinds_in(0, self.num_layers).items():
            found += [(w, count) for w in self.kinds[kind].weights]
        return found

    @cached_property
    def num_parameters(self) -> int:
        return sum(w.numel * count for w, count in self.all_weights())

    @cached_property
    def num_weight_bytes(self) -> int:
        return sum(w.num_bytes * count for w, count in self.all_weights())

    @cached_property
    def active_matrix_parameters(self) -> int:
        """Elements that one token is multiplied with: its top-k experts only, and the head."""
        total = self.first[0].numel if self.tied else 0
        for weight, count in self.all_weights():
            if not weight.matrix:
                continue
            numel = weight.numel
            if weight.split == "experts":
                assert self.experts is not None
                numel = numel * self.experts.top_k // self.experts.num_experts
            total += numel * count
        return total

    def kv_bytes_per_token_layer(self, tp: int = 1) -> int:
        """On the fullest rank of a TP group."""
        attention = self.attention
        return attention.kv_width * attention.kv_heads_per_rank(tp) * self.act_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        """Of one token over all layers, on one rank that has all heads."""
        return self.kv_bytes_per_token_layer() * self.num_layers
