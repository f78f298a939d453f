"""``Rank``: one seat of a deployment as a plain class; one process, one compute thread.

Launched by Ray or as a plain process. After ``start`` everything is driven by messages of the
engine on the rank's own thread: Join -> Load -> Serve, then requests, until Stop or until the
engine has been gone for the orphan grace.
"""

import contextlib
import gc
import logging
import os
import select
import shutil
import socket
import sys
import threading
import time
from collections import deque

import psutil
import torch

from coterie import errors
from coterie.attention.models.config import ModelConfig
from coterie.errors import EngineDead, EpochChanged, RankDied
from coterie.router.token_router import TokenRouter
from coterie.router.transports.base import Transport
from coterie.runtime.messages import (
    Abort,
    Acknowledge,
    Assign,
    Failed,
    Join,
    Joined,
    Load,
    Loaded,
    Message,
    Progress,
    QueryStatus,
    SeatAddress,
    Serve,
    Stop,
)
from coterie.runtime.rank.engine_link import EngineLink, EngineMessage
from coterie.runtime.rank.epoch import make_transport
from coterie.runtime.rank.heartbeat import HeartbeatThread, Vitals
from coterie.runtime.rank.hold import hold
from coterie.runtime.rank.model_runner import LocalModel
from coterie.runtime.rank.peers import Listener, anyone_listens, connect_peers
from coterie.runtime.rank.status import rank_status
from coterie.runtime.rank.step_loop import StepLoop
from coterie.runtime.rank.warming import load
from coterie.runtime.spec import RankSpec

IDLE_S = 0.5
"""Longest sleep of the main loop."""
BACKLOG_IDLE_S = 0.02
"""The same while the engine has not read everything."""
FIRST_ATTACH_S = 60.0
"""What a new rank waits at least for its first engine, which attaches once all ranks listen."""
_log = logging.getLogger("coterie.rank")


class Rank:
    """See the module. Not reusable: one ``start``, one end."""

    def __init__(self, spec: RankSpec, *, exit_process: bool = True) -> None:
        """Args:
        exit_process: end the whole process with the rank, so that an orphan cannot linger.
        """
        self.spec = spec
        self._exit_process = exit_process
        self._parent = os.getppid()
        self._hold = -1
        self._vitals = Vitals(seat=spec.seat)
        self._listener = Listener(spec)
        self._heartbeat = HeartbeatThread(self._vitals)
        self._link: EngineLink | None = None
        self._alone_since = 0.0
        self._inbox: deque[EngineMessage] = deque()
        self._members: list[SeatAddress] = []
        self._model: LocalModel | None = None
        self._transport: Transport | None = None
        self._router: TokenRouter | None = None
        self._loop: StepLoop | None = None
        self._serving = False
        self._stopping = False
        self._has_garbage = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rank", daemon=True)

    def start(self) -> SeatAddress:
        """Listen and start the main loop.

        Raises:
            ConfigError: the socket's path is too long.
        """
        self._hold = hold(self.spec.runtime_dir)
        self._listener.start()
        self._heartbeat.start()
        self._alone_since = time.monotonic()
        self._thread.start()
        return SeatAddress(
            seat=self.spec.seat,
            roles=list(self.spec.roles),
            address=f"unix:{self._listener.path}",
            node=socket.gethostname(),
            pid=os.getpid(),
        )

    def wait(self, timeout_s: float) -> bool:
        """Whether the rank has ended. Blocks: up to ``timeout_s``."""
        return self._ended.wait(timeout_s)

    def stop(self) -> None:
        """End at the next step boundary. From any thread, or a signal handler."""
        self._stopping = True
        self._listener.wake()

    def _run(self) -> None:
        code = 0
        try:
            self._prepare_thread()
            with torch.inference_mode():
                while not self._stopping:
                    self._turn()
        except BaseException:
            code = 1
            _log.exception("seat %d: the main loop failed", self.spec.seat)
        self._close()
        self._ended.set()
        if self._exit_process:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):
                    stream.flush()
            os._exit(code)

    def _prepare_thread(self) -> None:
        torch.set_num_threads(1)
        if self.spec.cpu is not None:
            try:
                # This thread only: listener and heartbeat may run wherever there is room.
                os.sched_setaffinity(0, {self.spec.cpu})
            except OSError as error:
                _log.warning("seat %d: not pinned: %s", self.spec.seat, error)

    def _close(self) -> None:
        self._vitals.state = "stopping"
        if self._link is not None:
            self._link.drain(1.0)
            self._link.close()
        if self._router is not None:
            self._router.close()
        elif self._transport is not None:
            self._transport.close()
        self._heartbeat.close()
        self._listener.close()
        os.close(self._hold)

    def _turn(self) -> None:
        """One turn of the main loop: messages, then a step, or rest."""
        self._vitals.tick += 1
        self._take_connections()
        link = self._link
        if link is not None:
            self._inbox += link.receive()
            while self._inbox:
                self._handle(self._inbox.popleft())
            link.flush()
        if self._stopping or self._is_orphan():
            return
        loop = self._loop
        if self._serving and loop is not None and loop.has_work and self._engine_here:
            self._vitals.state = "stepping"
            self._has_garbage = True
            if self._guarded(loop):
                return
        self._rest()

    def _guarded(self, loop: StepLoop) -> bool:
        """Run a step; a failure ends stepping, not the rank: the engine decides what follows."""
        try:
            return loop.step()
        except EpochChanged as error:
            _log.info("%s", error)
            self._serving = False
            self._vitals.state = "joining"
        except Exception as error:
            self._report_failure(error)
        return True

    def _rest(self) -> None:
        """Wait for messages; serve other ranks meanwhile."""
        link = self._link
        fds = [self._listener.wake_fd]
        timeout_s = IDLE_S
        if link is not None and not link.closed:
            fds.append(link.fd)
            if link.has_backlog:
                timeout_s = BACKLOG_IDLE_S
        if not self._serving or self._router is None:
            poll = select.poll()
            for fd in fds:
                poll.register(fd, select.POLLIN)
            poll.poll(timeout_s * 1000)
            return
        self._vitals.state = "idle" if self._loop is not None else "serving"
        try:
            woken = self._router.serve_until_wake(fds, timeout_s)
        except RankDied as error:
            # No step of this rank needs that peer now, and its death is for the engine to judge.
            _log.warning("%s", error)
        except EpochChanged as error:
            _log.info("%s", error)
            self._serving = False
            self._vitals.state = "joining"
        except Exception as error:
            self._report_failure(error)
        else:
            if not woken and self._has_garbage:
                self._has_garbage = False
                gc.collect()

    @property
    def _engine_here(self) -> bool:
        return self._link is not None and not self._link.closed

    def _take_connections(self) -> None:
        for accepted in self._listener.take():
            attach, sock = accepted.attach, accepted.sock
            if attach.purpose == "heartbeat":
                self._heartbeat.attach(sock)
                continue
            if self._link is not None:
                self._link.close()
            self._link = EngineLink(sock, attach.epoch)

    def _is_orphan(self) -> bool:
        """Pause while no engine is there, and end after the grace."""
        now = time.monotonic()
        if self._engine_here:
            self._alone_since = now
            return False
        grace_s = self.spec.config.timeouts.orphan_grace_s
        # The launcher that started it may take until the start deadline, if it lives.
        if self._link is None and os.getppid() == self._parent:
            grace_s = max(grace_s, FIRST_ATTACH_S, self.spec.config.timeouts.start_s)
        if now - self._alone_since < grace_s:
            return False
        _log.warning("seat %d: no engine for %.1f s, ending", self.spec.seat, grace_s)
        self._stopping = True
        self._listener.close()
        if not anyone_listens(self.spec.runtime_dir):
            # The last orphan; nobody else is left to remove the folder.
            shutil.rmtree(self.spec.runtime_dir, ignore_errors=True)
        return True

    def _is_unwanted(self) -> bool:
        """In the midst of joining or loading: whether there is no point in going on."""
        if self._link is not None:
            self._inbox += self._link.receive()
        return not self._engine_here or any(isinstance(m, Stop) for m in self._inbox)

    def _send(self, message: Message) -> None:
        if self._link is not None:
            self._link.send(message)

    def _report_failure(self, error: Exception) -> None:
        """Stop stepping and tell the engine why."""
        _log.error("seat %d: %s", self.spec.seat, error, exc_info=error)
        self._serving = False
        self._vitals.state = "failed"
        known = isinstance(error, errors.CoterieError)
        self._send(
            Failed(
                seat=self.spec.seat,
                epoch=self._vitals.epoch,
                step=self._router.step if self._router is not None else 0,
                kind=type(error).__name__ if known else "internal",
                detail=str(error) if known else f"{type(error).__name__}: {error}",
            )
        )

    def _handle(self, message: EngineMessage) -> None:
        match message:
            case Assign():
                self._assign(message)
            case Abort():
                if self._loop is not None:
                    self._loop.abort(message)
            case Acknowledge():
                if self._loop is not None:
                    self._loop.acknowledge(message)
            case QueryStatus():
                self._send(rank_status(self._vitals, self._model, self._router, self._loop))
            case Stop():
                self._vitals.state = "stopping"
                self._stopping = True
            case Join() | Load() | Serve():
                try:
                    self._advance(message)
                except Exception as error:
                    self._report_failure(error)

    def _assign(self, message: Assign) -> None:
        if self._loop is not None:
            self._loop.assign(message)
            return
        self._send(
            Failed(
                seat=self.spec.seat,
                epoch=self._vitals.epoch,
                step=0,
                kind="RankFault",
                detail="this rank takes no requests: it has no attention role or is not loaded",
                request_ids=[message.request_id],
            )
        )

    def _advance(self, message: Join | Load | Serve) -> None:
        match message:
            case Join():
                self._join(message)
            case Load():
                self._load()
            case Serve():
                if self._router is None or message.epoch != self._router.epoch:
                    raise EpochChanged(
                        f"seat {self.spec.seat} cannot serve epoch {message.epoch}: it is in epoch "
                        f"{self._vitals.epoch}"
                    )
                self._serving = True
                self._vitals.state = "idle" if self._loop is not None else "serving"

    def _join(self, message: Join) -> None:
        spec = self.spec
        self._serving = False
        self._vitals.state = "joining"
        self._vitals.epoch = message.epoch
        self._members = message.members
        self._listener.adopt_epoch(message.epoch)
        if self._model is None:
            self._model = LocalModel(spec, ModelConfig.from_hf(spec.model_dir))
        deadline_s = message.deadline_s
        links = connect_peers(
            spec, self._listener, message.epoch, message.members, deadline_s, self._is_unwanted
        )
        transport = make_transport(
            spec,
            self._model.config,
            self._model.dtype,
            message.epoch,
            message.members,
            links,
            deadline_s,
        )
        if self._router is not None:
            self._router.adopt(transport)
        elif self._transport is not None:
            self._transport.close()
        self._transport = transport
        self._send(Joined(spec.seat, message.epoch))

    def _load(self) -> None:
        spec, model, transport = self.spec, self._model, self._transport
        if model is None or transport is None or self._router is not None:
            raise errors.ProtocolError(f"seat {spec.seat}: Load must follow Join, once")
        self._vitals.state = "warming"
        start, rss_bytes = time.perf_counter(), psutil.Process().memory_info().rss
        router, self._loop = load(spec, model, transport, self._members, self._progress, self._send)
        self._router = self._vitals.router = router
        self._listener.on_newer_epoch = router.fence
        self._send(
            Loaded(
                seat=spec.seat,
                num_blocks=self._loop.runner.num_blocks if self._loop is not None else 0,
                weight_bytes=max(psutil.Process().memory_info().rss - rss_bytes, 0),
                load_s=time.perf_counter() - start,
            )
        )

    def _progress(self, stage: str, done: int, total: int) -> None:
        self._vitals.tick += 1
        self._send(Progress(self.spec.seat, stage, done, total))
        if self._is_unwanted() or self._is_orphan():
            raise EngineDead(f"seat {self.spec.seat}: nobody waits for it to load any more")
