"""How connections reach a rank: its listener, and the links between the ranks of an epoch.

The listener's thread does every handshake, so that a slow caller never holds up the step loop; the
main loop takes finished connections when ``wake_fd`` is readable. For each pair of seats the lower
one dials. Links end up blocking and are handed to a transport.
"""

import contextlib
import glob
import importlib.metadata
import os
import platform
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

import coterie
from coterie.errors import ConfigError, HandshakeError, ProtocolError, RankDied
from coterie.runtime.messages import Message, SeatAddress
from coterie.runtime.rpc import codec, handshake
from coterie.runtime.rpc.handshake import Attach, Hello, Refused, Welcome
from coterie.runtime.spec import RankSpec

HANDSHAKE_S = 5.0
_LONGEST_PATH_BYTES = 107
_GIVE_UP_CHECK_S = 0.2


class Ping(Message, tag=68, frozen=True):
    """First frame of a new peer link, sent back unchanged: the link carries data both ways."""

    stamp: int


_HANDSHAKE: msgspec.msgpack.Decoder[Hello | Attach | Welcome | Refused] = codec.decoder(
    handshake.HANDSHAKE
)
_PING: msgspec.msgpack.Decoder[Ping] = codec.decoder(Ping)


@dataclass(frozen=True, slots=True)
class Accepted:
    """A connection that proved the deployment's token. Blocking, without a timeout."""

    attach: Attach
    sock: socket.socket


def versions(spec: RankSpec) -> dict[str, str]:
    """What must be equal on both ends of every connection."""
    return {
        "coterie": coterie.__version__,
        "torch": importlib.metadata.version("torch"),
        "python": ".".join(platform.python_version_tuple()[:2]),
        "model": spec.model_hash,
        "layout": spec.layout_hash,
    }


def read_exactly(sock: socket.socket, count: int) -> bytes:
    """Blocks: up to the socket's timeout per piece."""
    data = bytearray()
    while len(data) < count:
        piece = sock.recv(count - len(data))
        if not piece:
            raise ConnectionError("closed by the other end")
        data += piece
    return bytes(data)


def read_body(sock: socket.socket) -> bytes:
    """One frame's body; never reads past it."""
    return read_exactly(sock, codec.body_length(read_exactly(sock, codec.HEADER.size)))


def anyone_listens(runtime_dir: str) -> bool:
    """Whether a rank of this deployment is alive; a killed one leaves its socket file behind."""
    for path in glob.glob(os.path.join(glob.escape(runtime_dir), "seat-*.sock")):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(HANDSHAKE_S)
            with contextlib.suppress(OSError):
                probe.connect(path)
                return True
    return False


class Listener:
    """The one socket of a rank, ``seat-N.sock`` in the deployment's private folder."""

    def __init__(self, spec: RankSpec) -> None:
        self.path = os.path.join(spec.runtime_dir, f"seat-{spec.seat}.sock")
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._spec = spec
        self._versions = versions(spec)
        self._stop_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._changed = threading.Condition()
        self.on_newer_epoch: Callable[[int], None] | None = None
        """Called on the listener's thread when a peer comes with an epoch not adopted yet."""
        self._epoch = 0
        self._generation = 0
        self._others: list[Accepted] = []
        self._peers: dict[tuple[int, int], socket.socket] = {}
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._thread = threading.Thread(target=self._run, name="listener", daemon=True)

    def start(self) -> None:
        """Bind and accept.

        Raises:
            ConfigError: the folder's path is too long for a socket.
        """
        if len(os.fsencode(self.path)) > _LONGEST_PATH_BYTES:
            raise ConfigError(
                f"socket path is too long, use a shorter temporary folder: {self.path}"
            )
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
        self._sock.bind(self.path)
        os.chmod(self.path, 0o600)
        self._sock.listen(64)
        self._thread.start()

    def take(self) -> list[Accepted]:
        """Engine and heartbeat connections since the last call, oldest first."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.wake_fd)
        with self._changed:
            taken, self._others = self._others, []
        return taken

    def wake(self) -> None:
        """Make ``wake_fd`` readable. From any thread or a signal handler, also after ``close``."""
        with contextlib.suppress(OSError):
            os.eventfd_write(self.wake_fd, 1)

    def adopt_epoch(self, epoch: int) -> None:
        """From now on refuse peers of older epochs and drop the links they had."""
        with self._changed:
            self._epoch = epoch
            for key in [key for key in self._peers if key[0] < epoch]:
                self._peers.pop(key).close()

    def wait_peers(
        self, epoch: int, seats: Sequence[int], deadline: float, give_up: Callable[[], bool]
    ) -> dict[int, socket.socket]:
        """Links that ``seats`` opened for ``epoch``.

        Blocks: until all are there, ``deadline`` (time.monotonic()) or ``give_up()``.

        Raises:
            RankDied: names the seats that did not come.
        """
        wanted = {(epoch, seat) for seat in seats}
        with self._changed:
            while not wanted <= self._peers.keys():
                left = deadline - time.monotonic()
                self._changed.wait(max(0.0, min(left, _GIVE_UP_CHECK_S)))
                if left <= 0 or give_up():
                    missing = sorted(seat for _, seat in wanted - self._peers.keys())
                    raise RankDied(
                        f"seat {self._spec.seat}: no link from seats {missing} for epoch {epoch}"
                    )
            return {seat: self._peers.pop((epoch, seat)) for seat in seats}

    def close(self) -> None:
        """Stop accepting and remove the socket file; idempotent."""
        if self._sock.fileno() < 0:
            return
        os.eventfd_write(self._stop_fd, 1)
        if self._thread.is_alive():
            self._thread.join(HANDSHAKE_S)
        self._sock.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
        for accepted in self.take():
            accepted.sock.close()
        self.adopt_epoch(1 << 62)
        wake_fd, self.wake_fd = self.wake_fd, -1
        os.close(wake_fd)
        os.close(self._stop_fd)

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        poll.register(self._stop_fd, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll()}
            if self._stop_fd in ready:
                return
            try:
                conn, _ = self._sock.accept()
            except OSError:
                continue  # The caller gave up, or there are no descriptors now.
            try:
                self._serve(conn)
            except (OSError, ProtocolError):
                conn.close()

    def _serve(self, conn: socket.socket) -> None:
        conn.settimeout(HANDSHAKE_S)
        hello = Hello(self._spec.seat, handshake.nonce(), self._versions)
        conn.sendall(codec.encode(hello))
        message = codec.decode(_HANDSHAKE, read_body(conn))
        try:
            if not isinstance(message, Attach):
                raise HandshakeError(f"seat {self._spec.seat}: expected Attach")
            welcome = handshake.check_attach(hello, message, self._spec.token)
            self._check_age(message)
        except HandshakeError as error:
            conn.sendall(codec.encode(Refused(str(error))))
            conn.close()
            return
        conn.sendall(codec.encode(welcome))
        if message.purpose == "peer":
            conn.sendall(codec.encode(codec.decode(_PING, read_body(conn))))
        conn.settimeout(None)
        with self._changed:
            if message.purpose == "peer":
                if message.epoch > self._epoch and self.on_newer_epoch is not None:
                    self.on_newer_epoch(message.epoch)
                old = self._peers.pop((message.epoch, message.seat), None)
                self._peers[message.epoch, message.seat] = conn
                if old is not None:
                    old.close()
            else:
                self._others.append(Accepted(message, conn))
                self.wake()
            self._changed.notify_all()

    def _check_age(self, message: Attach) -> None:
        seat = self._spec.seat
        if message.purpose == "peer":
            if message.epoch < self._epoch:
                raise HandshakeError(
                    f"seat {seat} is in epoch {self._epoch} and refuses seat {message.seat} of "
                    f"epoch {message.epoch}"
                )
        elif message.purpose in ("engine", "heartbeat"):
            if message.epoch < self._generation:
                raise HandshakeError(
                    f"seat {seat} obeys engine generation {self._generation} and refuses "
                    f"generation {message.epoch}"
                )
            self._generation = message.epoch
        else:
            raise HandshakeError(f"seat {seat}: unknown purpose {message.purpose!r}")


def dial(spec: RankSpec, member: SeatAddress, epoch: int, deadline: float) -> socket.socket:
    """Open the link to a higher seat.

    Blocks: until ``deadline`` (time.monotonic()).

    Raises:
        RankDied: the peer cannot be reached or does not answer.
        HandshakeError: it is not what this rank expects; names both seats.
    """
    scheme, _, path = member.address.partition(":")
    if scheme != "unix":
        raise ConfigError(
            f"seat {spec.seat} and seat {member.seat}: links between hosts do not exist, "
            f"run all ranks on one host (got {member.address})"
        )
    pair = f"seat {spec.seat} to seat {member.seat}, epoch {epoch}"
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(max(deadline - time.monotonic(), 0.001))
        sock.connect(path)
        hello = codec.decode(_HANDSHAKE, read_body(sock))
        if not isinstance(hello, Hello) or hello.seat != member.seat:
            raise HandshakeError(f"{pair}: somebody else listens at {path}")
        attach = handshake.attach(
            hello,
            token=spec.token,
            purpose="peer",
            seat=spec.seat,
            epoch=epoch,
            versions=versions(spec),
        )
        sock.sendall(codec.encode(attach))
        reply = codec.decode(_HANDSHAKE, read_body(sock))
        handshake.check_welcome(hello, attach, reply, spec.token)
        assert isinstance(reply, Welcome)
        ping = Ping(time.monotonic_ns())
        sock.sendall(codec.encode(ping))
        if codec.decode(_PING, read_body(sock)) != ping:
            raise HandshakeError(f"{pair}: the link does not carry data")
    except OSError as error:
        sock.close()
        raise RankDied(f"{pair}: {error or type(error).__name__}") from error
    except Exception:
        sock.close()
        raise
    sock.settimeout(None)
    return sock


def connect_peers(
    spec: RankSpec,
    listener: Listener,
    epoch: int,
    members: Sequence[SeatAddress],
    deadline_s: float,
    give_up: Callable[[], bool],
) -> dict[int, socket.socket]:
    """Preflight of an epoch: a proven link to every other member.

    Blocks: up to ``deadline_s``, or until ``give_up()``, which is asked now and then.

    Raises:
        RankDied, HandshakeError: name both seats.
    """
    deadline = time.monotonic() + deadline_s
    links: dict[int, socket.socket] = {}
    try:
        for member in sorted(members, key=lambda member: member.seat):
            if member.seat > spec.seat:
                links[member.seat] = dial(spec, member, epoch, deadline)
        lower = [member.seat for member in members if member.seat < spec.seat]
        links |= listener.wait_peers(epoch, lower, deadline, give_up)
    except Exception:
        for link in links.values():
            link.close()
        raise
    return links
