"""What a Ray launcher and its keeper say to each other: one JSON object a line, over pipes."""

import msgspec

from coterie.runtime.messages import SeatAddress
from coterie.runtime.spec import RankSpec


class KeeperMessage(msgspec.Struct, frozen=True, tag_field="op", kw_only=True):
    """Base of both directions."""


class StartRanks(KeeperMessage, frozen=True, kw_only=True, tag="start"):
    """First line to the keeper."""

    deployment: str
    runtime_dir: str
    ray_address: str | None
    """None: start an own Ray head."""
    specs: list[RankSpec]
    orphan_grace_s: float
    deadline_s: float


class KillRank(KeeperMessage, frozen=True, kw_only=True, tag="kill"):
    seat: int


class StopAll(KeeperMessage, frozen=True, kw_only=True, tag="stop"):
    """Give ranks until the deadline to end by themselves, then end everything."""

    deadline_s: float


class Started(KeeperMessage, frozen=True, kw_only=True, tag="started"):
    addresses: list[SeatAddress]
    """In the order of the specs."""


class StartFailed(KeeperMessage, frozen=True, kw_only=True, tag="failed"):
    detail: str


class RankGone(KeeperMessage, frozen=True, kw_only=True, tag="gone"):
    seat: int
    reason: str


def to_line(message: KeeperMessage) -> bytes:
    return msgspec.json.encode(message) + b"\n"


def to_keeper(line: bytes) -> StartRanks | KillRank | StopAll:
    """Decode what an engine sent."""
    return msgspec.json.decode(line, type=StartRanks | KillRank | StopAll)


def to_engine(line: bytes) -> Started | StartFailed | RankGone:
    """Decode what a keeper sent."""
    return msgspec.json.decode(line, type=Started | StartFailed | RankGone)
