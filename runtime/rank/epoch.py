"""What a rank sets up for one epoch: the transport to its peers."""

import socket
from collections.abc import Sequence

import torch

from coterie.attention.models.config import ModelConfig
from coterie.errors import ConfigError
from coterie.router.transports.base import RoundShape, Transport
from coterie.router.transports.distributed import DistributedTransport
from coterie.router.transports.local import LocalTransport
from coterie.router.transports.shared_memory import SharedMemoryTransport
from coterie.runtime.messages import SeatAddress
from coterie.runtime.spec import RankSpec


def transport_kind(spec: RankSpec, members: Sequence[SeatAddress]) -> str:
    """shared_memory or gloo: the user's choice, or what the members' hosts allow.

    Raises:
        ConfigError: shared memory was asked for between hosts.
    """
    kind = spec.config.parallel.transport
    one_host = len({member.node for member in members}) == 1
    if kind == "auto":
        return "shared_memory" if one_host else "gloo"
    if kind == "shared_memory" and not one_host:
        raise ConfigError("--transport shared_memory needs all ranks on one host; use gloo")
    return kind


def make_transport(
    spec: RankSpec,
    model: ModelConfig,
    dtype: torch.dtype,
    epoch: int,
    members: Sequence[SeatAddress],
    links: dict[int, socket.socket],
    deadline_s: float,
) -> Transport:
    """Connect the routers of an epoch.

    Args:
        links: proven links to all other members; the transport owns them from now on.

    Raises:
        HandshakeError, RankDied: from the transport.

    Blocks: up to ``deadline_s`` per peer.
    """
    max_rows = spec.config.scheduler.max_num_batched_tokens
    if model.moe is None or not links:
        for link in links.values():
            link.close()
        return LocalTransport(spec.seat, epoch, max_rows)
    shape = RoundShape(
        hidden_size=model.hidden_size, top_k=model.moe.top_k, dtype=dtype, max_rows=max_rows
    )
    if transport_kind(spec, members) == "shared_memory":
        return SharedMemoryTransport.create(
            seat=spec.seat,
            epoch=epoch,
            links=links,
            attention_seats=spec.attention_seats,
            expert_seats=spec.expert_seats,
            shape=shape,
            deadline_s=deadline_s,
        )
    return DistributedTransport.create(
        seat=spec.seat,
        epoch=epoch,
        links=links,
        attention_seats=spec.attention_seats,
        expert_seats=spec.expert_seats,
        shape=shape,
        deadline_s=deadline_s,
        store_dir=spec.runtime_dir,
    )
