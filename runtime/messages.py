"""Every message between the engine and its ranks. Tags are wire numbers and are never reused.

Frames are arrays ``[tag, field, ...]`` (array_like), so a field may be appended with a default.
"""

import msgspec

from coterie.runtime.request import SamplingParams, TokenLogprob


class Message(msgspec.Struct, frozen=True, array_like=True, tag_field="tag"):
    """Base of all wire messages."""


class SeatAddress(msgspec.Struct, frozen=True, array_like=True):
    seat: int
    roles: list[str]
    """Of "attention" and "experts"."""
    address: str
    """``unix:PATH`` or ``tcp:HOST:PORT`` where peers and the engine connect."""
    node: str
    """Host identity; equal = shared memory works."""
    pid: int


# Engine to rank


class Join(Message, tag=1):
    """Adopt an epoch: connect to all members (preflight), or fail naming both seats."""

    epoch: int
    members: list[SeatAddress]
    deadline_s: float


class Load(Message, tag=2):
    """Load weights, allocate the cache, compile kernels; answered by Loaded or Failed."""

    deadline_s: float


class Serve(Message, tag=3):
    """Enter the step loop."""

    epoch: int


class Assign(Message, tag=4):
    """Bind a request to this attention rank."""

    request_id: str
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    """Tokens already emitted (replay); empty for a new request."""
    sampling_params: SamplingParams
    """n is 1, seed is set, max_tokens is set."""
    choice: int = 0
    eos_token_ids: list[int] = []


class Abort(Message, tag=5):
    """Drop requests; unknown ids are ignored. Blocks return within one step."""

    request_ids: list[str]


class Acknowledge(Message, tag=6):
    """The engine has seen the end of these requests; the rank forgets their records."""

    request_ids: list[str]


class QueryStatus(Message, tag=7):
    """Answered by RankStatus."""


class Stop(Message, tag=8):
    """Leave the loop at the next step boundary and exit."""

    deadline_s: float


# Rank to engine


class Joined(Message, tag=32):
    seat: int
    epoch: int


class Progress(Message, tag=33):
    """Loading progress; counts as a sign of life while warming."""

    seat: int
    stage: str
    done: int
    total: int


class Loaded(Message, tag=34):
    seat: int
    num_blocks: int
    """KV blocks; 0 on an expert-only rank."""
    weight_bytes: int
    load_s: float


class Failed(Message, tag=35):
    """An exception of the rank, as text."""

    seat: int
    epoch: int
    step: int
    kind: str
    """Class name in coterie.errors, or "internal"."""
    detail: str
    request_ids: list[str] = []
    """Requests that caused it and that fail; empty = the rank itself is broken."""


class TokenOutput(msgspec.Struct, frozen=True, array_like=True):
    """Committed tokens of one request in one step."""

    request_id: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_token_id: int | None = None
    num_cached_tokens: int = 0
    logprobs: list[TokenLogprob] | None = None


class StepOutput(Message, tag=36):
    """Everything one committed step tells the engine, in one frame."""

    seat: int
    epoch: int
    step: int
    outputs: list[TokenOutput]
    num_running: int
    num_preempted: int
    """Bound requests without blocks right now."""
    kv_blocks_free: int
    """Free or evictable blocks, pending frees included."""
    step_s: float


class Heartbeat(Message, tag=37):
    """Progress, sent twice a second by a thread that touches nothing else."""

    seat: int
    epoch: int
    step: int
    layer: int
    tick: int
    """Main loop turns; a rank whose tick stands still is stuck."""
    state: str
    """joining, warming, idle, stepping, serving or stopping."""


class RankStatus(Message, tag=38):
    """Answer to QueryStatus."""

    seat: int
    pid: int
    epoch: int
    step: int
    state: str
    last_commit_age_s: float | None
    kv_blocks_free: int
    kv_blocks_total: int
    expert_layers: int
    """MoE layers whose experts this rank holds; 0 = none."""
    physical_ids: list[int]
    expert_tokens: list[int]
    """Real tokens computed so far by each of physical_ids, summed over layers."""
    counters: dict[str, float]
    """Cumulative; names ending in _s are seconds, the rest counts."""
    gate_tokens: list[int] = []
    """Real tokens per logical expert chosen by this rank's gates, summed over layers."""
