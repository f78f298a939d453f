"""Which layouts there are for a number of devices, and which of them cannot be.

Pure. A layout that a model's sizes rule out is kept, with the sentence that names the nearest
sizes that work. Called by plan.py.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from coterie.runtime.planner.shape import ModelShape

DISAGGREGATED_SHARES = ((1, 4), (1, 2), (3, 4))
"""Shares of the devices that become attention ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """One way to spread a model. World size = tp * pp * dp, plus expert-only ranks."""

    tp: int
    """Ranks that split one replica's attention and dense MLPs."""
    pp: int = 1
    """Stages of one replica."""
    dp: int = 1
    """Replicas of the attention."""
    ep: int = 1
    """Parts the experts of a stage are dealt into, whole experts each."""
    expert_shards: int = 1
    """Ranks that split every expert of a part between them."""
    expert_ranks: int = 0
    """Ranks with experts, over all stages and copies; 0 for a dense model."""
    disaggregated: bool = False
    """Expert ranks are not attention ranks."""

    @property
    def attention_ranks(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def world_size(self) -> int:
        return self.attention_ranks + (self.expert_ranks if self.disaggregated else 0)

    @property
    def ranks_per_replica(self) -> int:
        """Of what one request needs: a group that shares experts is one replica's business."""
        return self.tp * self.pp

    @property
    def expert_copies(self) -> int:
        """Times that all experts exist."""
        return self.expert_ranks // (self.pp * self.ep * self.expert_shards)

    @property
    def is_routed(self) -> bool:
        """Tokens are sent to experts of other ranks, not just split like a dense MLP."""
        return self.expert_ranks > 0 and (
            self.disaggregated or self.ep > 1 or self.expert_shards != self.tp
        )

    def describe(self) -> dict[str, int | bool]:
        """The ``layout`` object of ``coterie plan --json``."""
        return {
            "tp": self.tp,
            "pp": self.pp,
            "dp": self.dp,
            "ep": self.ep,
            "attention_ranks": self.attention_ranks,
            "expert_ranks": self.expert_ranks,
            "expert_shards": self.expert_shards,
            "disaggregated": self.disaggregated,
        }

    def label(self) -> str:
        """As people say it: TP4 x PP2, DP8 + EP8, 4A:4E."""
        parts = [
            f"{name}{size}"
            for name, size in (("TP", self.tp), ("PP", self.pp), ("DP", self.dp))
            if size > 1
        ]
        name = " x ".join(parts) or "1 rank"
        if self.disaggregated:
            name = f"{self.attention_ranks}A:{self.expert_ranks}E" + (
                f" (TP{self.tp})" if self.tp > 1 else ""
            )
        elif self.ep > 1:
            name += f" + EP{self.ep}"
        if self.expert_shards > 1:
            name += f" + {self.expert_shards} shards"
        return name


def enumerate_layouts(shape: ModelShape, devices: int) -> list[Layout]:
    """Every layout that is considered for ``devices`` devices; all of them, or one replica."""
    found: dict[Layout, None] = {}
    for tp in _sizes(devices):
        for pp in _sizes(devices // tp):
            for dp in dict.fromkeys((devices // (tp * pp), 1)):
                for layout in _with_experts(shape, tp, pp, dp):
                    found[layout] = None
    if shape.is_moe:
        for layout in _disaggregated(devices):
            found[layout] = None
    return list(found)


def _sizes(limit: int) -> list[int]:
    """Divisors and powers of two up to ``limit``."""
    return [n for n in range(1, limit + 1) if limit % n == 0 or n & (n - 1) == 0]


def _with_experts(shape: ModelShape, tp: int, pp: int, dp: int) -> Iterator[Layout]:
    if shape.experts is None:
        yield Layout(tp=tp, pp=pp, dp=dp)
        return
    ranks = tp * dp
    # Each replica has all experts of its stage, split like its dense MLPs.
    whole = Layout(tp=tp, pp=pp, dp=dp, expert_shards=tp, expert_ranks=ranks * pp)
    yield whole
    if ranks == 1:
        return
    # A shard of every expert on every rank would be the layout above if there is one replica.
    shards = [s for s in _sizes(ranks) if ranks % s == 0 and (s < ranks or dp > 1)]
    for s in shards if pp == 1 and tp == 1 else shards[:1]:
        yield dataclasses.replace(whole, ep=ranks // s, expert_shards=s)


def _disaggregated(devices: int) -> Iterator[Layout]:
    counts = {devices * a // b for a, b in DISAGGREGATED_SHARES}
    for attention in sorted(c for c in counts if 0 < c < devices):
        for tp in (n for n in _sizes(attention) if attention % n == 0):
            yield Layout(
                tp=tp,
                dp=attention // tp,
                ep=devices - attention,
                expert_ranks=devices - attention,
                disaggregated=True,
            )


def why_invalid(shape: ModelShape, layout: Layout) -> str | None:
    """The sentence that says why the model cannot be cut like this, or None."""
    heads = shape.attention.num_heads
    if layout.tp > heads:
        return _nearest("tensor-parallel size", layout.tp, f"{heads} query heads", heads)
    width = shape.intermediate_size
    if width and layout.tp > width:
        return _nearest("tensor-parallel size", layout.tp, f"{width} MLP columns", width)
    if layout.pp > shape.num_layers:
        return _nearest("pipeline size", layout.pp, f"{shape.num_layers} layers", shape.num_layers)
    if shape.experts is None:
        return None
    count, columns = shape.experts.num_experts, shape.experts.intermediate_size
    if layout.ep > count:
        return _nearest("expert-parallel size", layout.ep, f"{count} experts", count)
    if columns % layout.expert_shards:
        sizes = [s for s in range(1, columns + 1) if columns % s == 0]
        below = max(s for s in sizes if s < layout.expert_shards)
        above = min(s for s in sizes if s > layout.expert_shards)
        return (
            f"{layout.expert_shards} shards do not divide an expert's {columns} columns evenly: "
            f"the nearest valid sizes are {below} and {above}"
        )
    return None


def _nearest(what: str, size: int, there: str, valid: int) -> str:
    return (
        f"{what} {size} needs as many parts, but there are {there}: the nearest valid size is "
        f"{valid}"
    )
