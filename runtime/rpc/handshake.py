"""Mutual proof of the deployment token, and the version check, before anything else is read.

    listener -> Hello(nonce)          who listens, and its versions
    caller   -> Attach(mac, nonce)    who calls, its versions, proof over the listener's nonce
    listener -> Welcome(mac)          proof over the caller's nonce, or Refused(detail)

Pure functions over messages; blocking (ranks) and asyncio (engine) ends share them. The token
never travels. ``mac = HMAC-SHA256(token, label | nonce | seat)``.
"""

import hashlib
import hmac
import secrets

from coterie.errors import HandshakeError
from coterie.runtime.messages import Message

NONCE_BYTES = 32


class Hello(Message, tag=64):
    seat: int
    nonce: bytes
    versions: dict[str, str]


class Attach(Message, tag=65):
    purpose: str
    """"engine", "heartbeat" or "peer"."""
    seat: int
    """Seat of a peer, -1 for an engine."""
    epoch: int
    """Epoch of a peer link; generation of an engine: a rank obeys only the newest."""
    nonce: bytes
    mac: bytes
    versions: dict[str, str]


class Welcome(Message, tag=66):
    mac: bytes


class Refused(Message, tag=67):
    detail: str


HANDSHAKE = Hello | Attach | Welcome | Refused


def nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


def _mac(token: bytes, label: bytes, challenge: bytes, seat: int) -> bytes:
    return hmac.new(token, label + challenge + str(seat).encode(), hashlib.sha256).digest()


def attach(
    hello: Hello, *, token: bytes, purpose: str, seat: int, epoch: int, versions: dict[str, str]
) -> Attach:
    """The caller's answer to ``hello``."""
    return Attach(
        purpose=purpose,
        seat=seat,
        epoch=epoch,
        nonce=nonce(),
        mac=_mac(token, b"attach", hello.nonce, seat),
        versions=versions,
    )


def check_attach(hello: Hello, message: Attach, token: bytes) -> Welcome:
    """Verify a caller.

    Raises:
        HandshakeError: wrong token, or a version field differs; names both seats and the field.
    """
    if not hmac.compare_digest(message.mac, _mac(token, b"attach", hello.nonce, message.seat)):
        raise HandshakeError(f"seat {hello.seat}: caller (seat {message.seat}) has a wrong token")
    compare_versions(hello.seat, hello.versions, message.seat, message.versions)
    return Welcome(mac=_mac(token, b"welcome", message.nonce, hello.seat))


def check_welcome(
    hello: Hello, sent: Attach, reply: Welcome | Refused | Hello | Attach, token: bytes
) -> None:
    """Verify the listener.

    Raises:
        HandshakeError: it refused, or it does not know the token.
    """
    if isinstance(reply, Refused):
        raise HandshakeError(reply.detail)
    if not isinstance(reply, Welcome) or not hmac.compare_digest(
        reply.mac, _mac(token, b"welcome", sent.nonce, hello.seat)
    ):
        raise HandshakeError(f"seat {hello.seat} did not prove the deployment token")


def compare_versions(seat: int, mine: dict[str, str], other: int, theirs: dict[str, str]) -> None:
    """Both ends must agree on every field that both know.

    Raises:
        HandshakeError: names both seats, the field and both values.
    """
    for field in sorted(mine.keys() & theirs.keys()):
        if mine[field] != theirs[field]:
            raise HandshakeError(
                f"seat {seat} and seat {other} differ in {field}: "
                f"{mine[field]!r} against {theirs[field]!r}"
            )
