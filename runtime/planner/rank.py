"""Which layout is better, and the one sentence that says why.

The order is by known rules first, in the order of ``_Judgement``'s fields, and by estimated
throughput among layouts that the rules do not tell apart. Called by plan.py.
"""

import math
from dataclasses import dataclass

from coterie.runtime.planner.layouts import Layout
from coterie.runtime.planner.memory import Ledger
from coterie.runtime.planner.roofline import Estimates
from coterie.runtime.planner.shape import ModelShape
from coterie.runtime.planner.workload import Cluster, Workload

GIB = 1 << 30
TP_EP_UP_TO = 128
"""Requests at once up to which splitting attention wins; from DP_EP_FROM on, replicating it."""
DP_EP_FROM = 512
SPARSE_DENSITY = 0.01
"""Below this share of experts per token, spreading them over few cards costs more than it saves."""
FEW_CARDS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Sized:
    """A valid layout with its figures."""

    layout: Layout
    ledger: Ledger
    estimates: Estimates
    requests: int
    """That fit into one replica."""
    total_requests: int
    fits: bool


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class _Judgement:
    """Smaller is better, earlier fields first."""

    unfit: bool
    shortfall: int
    targets_missed: int
    crosses_domain: bool
    """A TP group spans domains."""
    capacity_lost: int
    """Tenths of the concurrency that find no room."""
    idle_devices: int
    uneven_heads: bool
    rule: int
    """0: what the rules name first for this model and concurrency."""
    replica_size: int
    ms_per_token: float
    ranks: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """What is known of a model on a cluster before any layout is looked at."""

    shape: ModelShape
    cluster: Cluster
    workload: Workload
    one_card: bool
    """One device holds the model and at least a request."""
    most_held: int
    """Most requests that any layout holds, up to the concurrency."""

    def key(self, sized: Sized) -> _Judgement:
        """Orders layouts, the best first."""
        layout = sized.layout
        by_size = not self.shape.is_moe and self._by_rules and self._all_busy
        return _Judgement(
            unfit=not sized.fits,
            shortfall=0 if sized.fits else max(1, sized.ledger.shortfall),
            targets_missed=len(self.missed(sized)),
            crosses_domain=self.crosses(layout),
            capacity_lost=self._capacity_lost(sized),
            idle_devices=self.cluster.num_devices - layout.world_size,
            uneven_heads=self._by_rules and not self.shape.attention.is_even(layout.tp),
            rule=self.rule(layout)[0],
            replica_size=layout.ranks_per_replica if by_size else 0,
            ms_per_token=1e3 / sized.estimates.tokens_per_s,
            ranks=layout.world_size,
        )

    def _capacity_lost(self, sized: Sized) -> int:
        concurrency = self.workload.concurrency
        held = min(sized.total_requests, concurrency)
        if not self.shape.is_moe:
            return 10 - 10 * held // concurrency
        # Where nothing holds all, the rules may cost up to half of what could be held.
        enough = self.most_held if self.most_held == concurrency else self.most_held / 2
        return 0 if held >= enough else math.ceil(math.log2(enough / max(held, 1)) + 1e-9)

    @property
    def _all_busy(self) -> bool:
        """Enough requests for replicas of one card each."""
        return self.workload.concurrency >= self.cluster.num_devices

    @property
    def _by_rules(self) -> bool:
        # The rules come from clusters of GPUs; cores of one host go by their figures.
        return self.cluster.device.kind == "gpu"

    def crosses(self, layout: Layout) -> bool:
        return layout.tp > 1 and self.cluster.crosses(layout.tp, layout.world_size)

    def missed(self, sized: Sized) -> list[str]:
        """Targets that the estimates do not meet."""
        missed = []
        tpot, ttft = self.workload.slo_tpot_ms, self.workload.slo_ttft_s
        if tpot is not None and sized.estimates.tpot_ms > tpot:
            missed.append(f"TPOT {sized.estimates.tpot_ms:.1f} ms, asked for {tpot:g}")
        if ttft is not None and sized.estimates.ttft_s > ttft:
            missed.append(f"TTFT {sized.estimates.ttft_s:.2f} s, asked for {ttft:g}")
        return missed

    def rule(self, layout: Layout) -> tuple[int, str]:
        """How the known rules see a layout that fits: class, and the sentence."""
        if not self._by_rules:
            return 0, "on CPUs estimates decide"
        if not self.shape.is_moe:
            return self._dense_rule(layout)
        if layout.disaggregated:
            return 3, (
                "attention and experts on separate ranks gain only at the right ratio: measure "
                "before choosing it"
            )
        if layout.pp > 1:
            return 2, "stages with experts of their own: for models or links that allow no less"
        if self.one_card:
            if layout.tp > 1:
                return 1, "one card holds the model: splitting attention only adds messages"
            if layout.is_routed:
                return 1, "one card holds the model: spread experts leave more room, for messages"
            return 0, "one card holds the model: replicas need no traffic between them"
        return self._moe_rule(layout)

    def _dense_rule(self, layout: Layout) -> tuple[int, str]:
        kv_heads = self.shape.attention.num_kv_heads
        if layout.ranks_per_replica == 1:
            return 0, "one card holds the model: replicas need no traffic between them"
        if layout.tp > kv_heads:
            return 0, (
                f"TP{layout.tp} is beyond the {kv_heads} KV heads: their KV is copied, not split"
            )
        if layout.pp > 1 and not self.shape.attention.is_even(layout.ranks_per_replica):
            return 0, "the heads do not divide evenly over so many ranks: stages instead of TP"
        if layout.pp > 1 and self.cluster.crosses(layout.ranks_per_replica, layout.world_size):
            return 0, "TP inside the fast link's domain, stages across: they send least"
        if layout.pp > 1:
            return 1, "stages send little, but a token passes through them one after the other"
        return 0, f"TP{layout.tp} inside the fast link's domain: every card reads 1/{layout.tp}"

    def _moe_rule(self, layout: Layout) -> tuple[int, str]:
        experts = self.shape.experts
        assert experts is not None
        concurrency, few = self.workload.concurrency, self.cluster.num_devices <= FEW_CARDS
        if experts.density < SPARSE_DENSITY and few:
            sentence = f"a token uses {100 * experts.density:.2f} % of the experts, on few cards"
            if layout.is_routed:
                return 1, f"{sentence}: spreading them costs more than it saves"
            return 0, f"{sentence}: experts split like dense MLPs, not spread"
        if not layout.is_routed:
            return (
                2,
                "experts split like dense MLPs: every rank reads a part of each, in thin slices",
            )
        if layout.expert_shards > 1:
            return 1, f"shards balance any load, for {layout.expert_shards} times the messages"
        if self.shape.attention.latent and concurrency >= layout.world_size:
            if layout.tp == 1:
                return 0, "latent KV has no heads to split: data-parallel attention stores it once"
            return 1, f"latent KV has no heads to split: TP{layout.tp} stores it {layout.tp} times"
        if layout.tp == 1:
            return 2 * (concurrency <= TP_EP_UP_TO), (
                f"DP attention with spread experts is for about {DP_EP_FROM} requests at once and "
                f"more, TP + EP for up to {TP_EP_UP_TO}; asked for {concurrency}"
            )
        useful = self._useful_tp()
        behind = concurrency >= DP_EP_FROM or (concurrency <= TP_EP_UP_TO and layout.tp != useful)
        return int(behind), (
            f"TP attention with spread experts is for up to about {TP_EP_UP_TO} requests at once "
            f"(TP{useful} here: more leaves the domain or copies KV), DP + EP from {DP_EP_FROM} "
            f"on; asked for {concurrency}"
        )

    def _useful_tp(self) -> int:
        """The largest TP inside the domain that splits heads evenly and copies no KV."""
        attention, domain = self.shape.attention, self.cluster.domain
        most = domain if attention.latent else min(domain, attention.num_kv_heads)
        sizes = (n for n in range(1, most + 1) if self.cluster.num_devices % n == 0)
        return max(n for n in sizes if attention.is_even(n))

    def reason(self, sized: Sized) -> str:
        """One sentence on where the layout stands."""
        layout, ledger, workload = sized.layout, sized.ledger, self.workload
        if ledger.shortfall:
            return (
                f"does not fit: {ledger.shortfall / GIB:.1f} GiB a rank are missing before any KV; "
                f"the largest line is {_largest(ledger)}"
            )
        if not sized.fits:
            return (
                f"does not fit: room for {ledger.kv_tokens} tokens of KV, less than one request "
                f"of {workload.context}"
            )
        missed = self.missed(sized)
        if missed:
            return f"misses the target: {'; '.join(missed)}"
        if self.crosses(layout):
            return (
                f"TP{layout.tp} reaches beyond the fast link's domain of {self.cluster.domain}: "
                "two all-reduces a layer over the network"
            )
        if self._by_rules and not self.shape.attention.is_even(layout.tp):
            return (
                f"heads do not divide evenly by {layout.tp}: the fullest rank sets the pace and "
                "the room; stages do not care"
            )
        sentence = self.rule(layout)[1]
        if not self._by_rules:
            made = sized.estimates
            sentence += (
                f": of a step of {made.tpot_ms:.0f} ms, weights take {made.weights_ms:.0f}, KV "
                f"{made.kv_ms:.0f}, computing {made.compute_ms:.0f}, messages "
                f"{made.communication_ms:.1f}"
            )
        if sized.total_requests < workload.concurrency:
            sentence += f"; holds {sized.total_requests} of {workload.concurrency} requests"
        if workload.concurrency < layout.dp:
            sentence += f"; {workload.concurrency} requests leave replicas without one"
        idle = self.cluster.num_devices - layout.world_size
        if idle:
            sentence += f"; leaves {idle} of {self.cluster.num_devices} devices idle"
        return sentence


def _largest(ledger: Ledger) -> str:
    lines = {k: v for k, v in ledger.lines.items() if k not in ("budget", "kv_per_token")}
    expert = {f"{k} of an expert rank": v for k, v in ledger.expert_lines.items() if k != "budget"}
    held = sum(lines.values()) > sum(expert.values())
    line, size = max((lines if held else expert).items(), key=lambda item: item[1])
    return f"{line}, {size / GIB:.1f} GiB"
