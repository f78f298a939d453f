"""The weights of one decoder layer, by part and by how a tensor-parallel group splits them.

Called by families.py with dimensions that are already read and checked.
"""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from coterie.runtime.planner.shape import Experts, LayerKind, Split, Weight

ByPart = Callable[[str], Fraction]
"""Bytes of one element of a part's matrices."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionDims:
    """Dimensions of the projections; those of latent attention are 0 for ordinary heads."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int = 0
    head_dim: int = 0
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: Literal["head", "full"] | None = None
    sinks: bool = False
    kv_lora_rank: int = 0
    q_lora_rank: int = 0
    """0: queries are projected in one step."""
    rope_dim: int = 0
    nope_dim: int = 0
    v_dim: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerDims:
    """Dimensions of a decoder layer of either kind."""

    attention: AttentionDims
    dense_width: int
    mlp_bias: bool
    experts: Experts | None
    shared_width: int
    shared_gate: bool
    correction_bias: bool
    expert_bias: bool


class _Layer:
    """Collects the weights of a layer, merging those that are alike."""

    def __init__(self, size: ByPart, plain: Fraction) -> None:
        self._size = size
        self._plain = plain
        self._numel: dict[tuple[str, Split, Fraction, bool], int] = {}

    def matrix(self, part: str, numel: int, split: Split) -> None:
        self._add(part, numel, split, self._size(part), True)

    def gate(self, numel: int) -> None:
        """A matrix that quantizers leave alone."""
        self._add("router", numel, "all", self._plain, True)

    def vector(self, part: str, numel: int, split: Split) -> None:
        self._add(part, numel, split, self._plain, False)

    def _add(self, part: str, numel: int, split: Split, size: Fraction, matrix: bool) -> None:
        if numel:
            key = (part, split, size, matrix)
            self._numel[key] = self._numel.get(key, 0) + numel

    def done(self, moe: bool) -> LayerKind:
        return LayerKind(
            weights=tuple(
                Weight(part=part, numel=numel, split=split, bytes_each=size, matrix=matrix)
                for (part, split, size, matrix), numel in self._numel.items()
            ),
            moe=moe,
        )


def layer_weights(dims: LayerDims, moe: bool, size: ByPart, plain: Fraction) -> LayerKind:
    """One layer.

    Args:
        size: bytes of one element of a part's matrices.
        plain: bytes of one element of norms, biases and gates.
    """
    layer = _Layer(size, plain)
    attention = dims.attention
    if attention.kv_lora_rank:
        _latent_attention(layer, attention)
    else:
        _grouped_attention(layer, attention)
    hidden = attention.hidden_size
    layer.vector("norms", 2 * hidden, "all")
    if moe:
        _moe(layer, dims, hidden)
    else:
        layer.matrix("mlp", 3 * hidden * dims.dense_width, "columns")
        if dims.mlp_bias:
            layer.vector("mlp", 2 * dims.dense_width, "columns")
            layer.vector("mlp", hidden, "all")
    return layer.done(moe)


def _grouped_attention(layer: _Layer, dims: AttentionDims) -> None:
    query, kv = dims.num_heads * dims.head_dim, dims.num_kv_heads * dims.head_dim
    layer.matrix("attention", 2 * dims.hidden_size * query, "heads")
    layer.matrix("attention", 2 * dims.hidden_size * kv, "kv_heads")
    if dims.qkv_bias:
        layer.vector("attention", query, "heads")
        layer.vector("attention", 2 * kv, "kv_heads")
    if dims.output_bias:
        layer.vector("attention", dims.hidden_size, "all")
    if dims.sinks:
        layer.vector("attention", dims.num_heads, "heads")
    if dims.qk_norm == "head":
        layer.vector("norms", 2 * dims.head_dim, "all")
    elif dims.qk_norm == "full":
        layer.vector("norms", query, "heads")
        layer.vector("norms", kv, "kv_heads")


def _latent_attention(layer: _Layer, dims: AttentionDims) -> None:
    hidden, heads, latent = dims.hidden_size, dims.num_heads, dims.kv_lora_rank + dims.rope_dim
    per_head = dims.nope_dim + dims.rope_dim
    if dims.q_lora_rank:
        layer.matrix("attention", hidden * dims.q_lora_rank, "all")
        layer.vector("norms", dims.q_lora_rank, "all")
        layer.matrix("attention", dims.q_lora_rank * heads * per_head, "heads")
    else:
        layer.matrix("attention", hidden * heads * per_head, "heads")
    layer.matrix("attention", hidden * latent, "all")
    layer.vector("norms", dims.kv_lora_rank, "all")
    layer.matrix("attention", dims.kv_lora_rank * heads * (dims.nope_dim + dims.v_dim), "heads")
    layer.matrix("attention", heads * dims.v_dim * hidden, "heads")
    if dims.qkv_bias:
        layer.vector("attention", dims.q_lora_rank + latent, "all")
    if dims.output_bias:
        layer.vector("attention", hidden, "all")


def _moe(layer: _Layer, dims: LayerDims, hidden: int) -> None:
    experts = dims.experts
    assert experts is not None, "a MoE layer without experts"
    count, width = experts.num_experts, experts.intermediate_size
    layer.gate(count * hidden)
    if dims.correction_bias:
        layer.vector("router", count, "all")
    layer.matrix("experts", 3 * count * hidden * width, "experts")
    if dims.expert_bias:
        layer.vector("router", count, "all")
        layer.vector("experts", count * (2 * width + hidden), "experts")
    layer.matrix("shared_experts", 3 * hidden * dims.shared_width, "columns")
    if dims.shared_gate:
        layer.gate(hidden)
