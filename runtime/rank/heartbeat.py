"""Signs of progress, sent twice a second by a thread that touches nothing else of the rank."""

import contextlib
import socket
import threading
from dataclasses import dataclass
from typing import Protocol

from coterie.runtime.messages import Heartbeat
from coterie.runtime.rpc import codec

PERIOD_S = 0.5


class RouterVitals(Protocol):
    """Plain numbers that move while the rank is inside a step or serves others."""

    @property
    def step(self) -> int: ...
    @property
    def layer(self) -> int: ...
    @property
    def tick(self) -> int: ...


@dataclass(slots=True)
class Vitals:
    """Plain values written by the main loop and read, unlocked, by the heartbeat thread."""

    seat: int
    epoch: int = 0
    tick: int = 0
    """Main loop turns."""
    state: str = "joining"
    """joining, warming, idle, stepping, serving, stopping or failed."""
    router: RouterVitals | None = None
    """Numbers of the router, once there is one."""

    def beat(self) -> Heartbeat:
        router = self.router
        return Heartbeat(
            seat=self.seat,
            epoch=self.epoch,
            step=router.step if router is not None else 0,
            layer=router.layer if router is not None else 0,
            tick=self.tick + (router.tick if router is not None else 0),
            state=self.state,
        )


class HeartbeatThread:
    """Sends ``Vitals`` over the newest heartbeat connection."""

    def __init__(self, vitals: Vitals) -> None:
        self._vitals = vitals
        self._sock: socket.socket | None = None
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def attach(self, sock: socket.socket) -> None:
        """Send to ``sock`` from now on; the previous connection is closed."""
        sock.settimeout(PERIOD_S)
        with self._lock:
            old, self._sock = self._sock, sock
        if old is not None:
            old.close()

    def close(self) -> None:
        """Blocks: for the beat being sent, at most a period."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(2 * PERIOD_S)
        if self._sock is not None:
            self._sock.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            with self._lock:
                sock = self._sock
            if sock is not None:
                self._beat(sock)
            self._stop.wait(PERIOD_S)

    def _beat(self, sock: socket.socket) -> None:
        beat = self._vitals.beat()
        try:
            sock.sendall(codec.encode(beat))
        except OSError:
            # A partial frame may be out, so this connection is over; the engine opens another.
            with self._lock, contextlib.suppress(OSError):
                sock.close()
                if self._sock is sock:
                    self._sock = None
