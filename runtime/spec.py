"""What a launcher hands to one rank process: plain data, JSON on the wire."""

import msgspec

from coterie.experts.placement import ExpertPlacement
from coterie.runtime.config import EngineConfig


class RankSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Identity and duties of one seat."""

    deployment: str
    """Id of the deployment; part of every name."""
    seat: int
    roles: tuple[str, ...]
    """Of "attention" and "experts"; a dense replica has attention only."""
    attention_seats: tuple[int, ...]
    expert_seats: tuple[int, ...]
    """Empty for dense models."""
    placement: ExpertPlacement | None
    """None for dense models."""
    config: EngineConfig
    model_dir: str
    """Resolved model folder."""
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    runtime_dir: str
    """Private folder (0700) for this deployment's sockets."""
    token: bytes
    """Secret shared by the members of the deployment (HMAC handshake)."""
    cpu: int | None = None
    """Core to pin to, or None."""
    layout_hash: str = ""
    model_hash: str = ""
