"""The engine's one loop, with its clients around it: drain the inbox, step, emit.

Synchronous, without threads or locks. Blocks in `select` while there is nothing to do. Each client gets the events of
its own requests only; one that goes away has them cancelled; one that does not read is dropped before its events fill
the memory, and never makes the loop wait. Owns connections and who submitted what; the engine owns everything else.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import signal
import socket
import time
from typing import TYPE_CHECKING, Any, Final

from chatserve.engine.connection import Connection, ConnectionLostError
from chatserve.engine.framing import MalformedFrameError
from chatserve.engine.messages import (
    AnyCommand,
    Cancel,
    Drain,
    Drained,
    EngineEvent,
    Hello,
    Inspect,
    Rejected,
    StepOutput,
    Submit,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from chatserve.engine.engine import Engine
    from chatserve.types import RequestId

_log: Final = logging.getLogger(__name__)

MAX_OUT_BYTES: Final = 16 * 1024 * 1024
"""Bytes waiting for one client before it is dropped."""
DRAIN_S: Final = 2.0
"""How long a terminated engine goes on for the sake of what runs."""
_BY_REQUEST: Final = ("rejected", "queued", "started", "deltas", "finished")


class EngineServer:
    """Runs `engine` for the clients of `listener` until `stop`, or until the pipe `parent_fd` closes at its far end."""

    def __init__(
        self,
        engine: Engine,
        listener: socket.socket,
        *,
        parent_fd: int | None = None,
        max_out_bytes: int = MAX_OUT_BYTES,
        drain_s: float = DRAIN_S,
        on_idle: Callable[[], None] | None = None,
    ) -> None:
        """`on_idle` is called before the loop goes to sleep until somebody wants something."""
        self._on_idle = on_idle
        self._engine = engine
        self._listener = listener
        self._parent_fd = parent_fd
        self._max_out_bytes = max_out_bytes
        self._drain_s = drain_s
        self._clients: dict[int, Connection] = {}
        self._num_accepted = 0
        self._owners: dict[RequestId, Connection] = {}
        """Of live requests. Those of a client that left have none, and their events are dropped."""
        self._orphans: set[RequestId] = set()
        """Requests of clients that left, until their ends have been said."""
        self._drainers: list[Connection] = []
        self._orphaned = False
        self._stop_at_s: float | None = None
        self._selector = selectors.DefaultSelector()
        self._wake_in, self._wake_out = socket.socketpair()
        for sock in (listener, self._wake_in, self._wake_out):
            sock.setblocking(False)
        self._watch(listener, self._accept)
        self._watch(self._wake_in, self._on_wake)
        if parent_fd is not None:
            self._watch(parent_fd, self._on_parent)

    # --- life ---------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """The loop. Raises what `Engine.step` raises, after which a new process has to take over."""
        try:
            while not self._is_over():
                patience_s = self._engine.patience_s
                if patience_s is None and self._on_idle is not None:
                    self._on_idle()
                for key, _ in self._selector.select(patience_s):
                    key.data()
                if self._engine.has_work:
                    output = self._engine.step()
                    if output is not None:
                        self._deliver(output)
                elif self._engine.has_background:
                    self._engine.background()
                if self._drainers and self._engine.is_drained:
                    drainers, self._drainers = self._drainers, []
                    for client in drainers:
                        self._send(client, Drained())
        finally:
            self._close()

    def stop(self) -> None:
        """Take no new requests, and end as soon as nothing runs, at the latest after `drain_s`.

        May be called from a signal handler and from another thread.
        """
        if self._stop_at_s is None:
            self._stop_at_s = time.monotonic() + self._drain_s
        with contextlib.suppress(OSError):  # full: it is awake; closed: it is over
            self._wake_out.send(b"\0")

    @property
    def was_stopped(self) -> bool:
        """Whether it was told to end, and not left by its parent."""
        return self._stop_at_s is not None

    def stop_on_signals(self) -> None:
        """SIGTERM and SIGINT stop. The signal wakes the loop, which may be asleep in `select`."""
        signal.set_wakeup_fd(self._wake_out.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self.stop())

    def _is_over(self) -> bool:
        if self._stop_at_s is None or self._orphaned:
            return self._orphaned
        self._engine.handle(Drain())
        return self._engine.is_drained or time.monotonic() >= self._stop_at_s

    def _close(self) -> None:
        for client in tuple(self._clients.values()):
            with contextlib.suppress(ConnectionLostError):
                client.flush()
            client.sock.close()
        self._clients.clear()
        self._selector.close()
        for sock in (self._listener, self._wake_in, self._wake_out):
            sock.close()

    # --- what the selector reports ------------------------------------------------------------------------------------

    def _watch(self, file: Any, ready: Callable[[], None]) -> None:
        self._selector.register(file, selectors.EVENT_READ, ready)

    def _on_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake_in.recv(4096):
                pass

    def _on_parent(self) -> None:
        assert self._parent_fd is not None
        if not os.read(self._parent_fd, 4096):
            _log.info("the parent process is gone")
            self._orphaned = True

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:  # gone again already, or out of file descriptors
            _log.warning("a connection could not be accepted: %s", error)
            return
        client = Connection(self._num_accepted, sock, max_out_bytes=self._max_out_bytes)
        self._num_accepted += 1
        self._clients[client.number] = client
        self._watch(sock, lambda: self._on_client(client))
        self._send(client, Hello(self._engine.info))

    def _on_client(self, client: Connection) -> None:
        """The client's socket has something to read, or room for what waits."""
        try:
            client.flush()
            for command in client.receive():
                self._handle(client, command)
        except ConnectionLostError as error:
            self._drop(client, str(error))
        except MalformedFrameError as error:
            _log.warning("client %d speaks another language: %s", client.number, error)
            self._drop(client, "dropped")
        else:
            self._watch_writing(client)

    # --- clients ------------------------------------------------------------------------------------------------------

    def _handle(self, client: Connection, command: AnyCommand) -> None:
        match command:
            case Submit(request_id=request_id):
                if request_id in self._owners or self._engine.is_taken(request_id):
                    detail = f"request {request_id} is running already"
                    rejected = Rejected(request_id=request_id, code="bad_params", detail=detail)
                    client.send(StepOutput(rejected=(rejected,)))
                else:
                    self._owners[request_id] = client
                    self._engine.handle(command)
            case Cancel(request_id):
                if self._owners.get(request_id) is client:
                    self._engine.handle(command)
            case Inspect():
                client.send(StepOutput(reports=(self._engine.report(command),)))
            case Drain():
                self._engine.handle(command)
                self._drainers.append(client)
            case _:
                self._engine.handle(command)

    def _deliver(self, output: StepOutput) -> None:
        """Give each client the events of its own requests."""
        if len(self._clients) == 1 and not self._orphans:  # as nearly always
            for event in output.rejected + output.finished:
                self._owners.pop(event.request_id, None)
            self._send(next(iter(self._clients.values())), output)
            return
        shares: dict[int, dict[str, list[Any]]] = {}
        for kind in _BY_REQUEST:
            for event in getattr(output, kind):
                owner = self._owners.get(event.request_id)
                if owner is not None:
                    shares.setdefault(owner.number, {}).setdefault(kind, []).append(event)
        for event in output.rejected + output.finished:
            self._owners.pop(event.request_id, None)
            self._orphans.discard(event.request_id)
        for number, share in shares.items():
            client = self._clients.get(number)
            if client is not None:
                self._send(client, StepOutput(**{kind: tuple(events) for kind, events in share.items()}))

    def _send(self, client: Connection, event: EngineEvent) -> None:
        if client.number not in self._clients:
            return
        try:
            client.send(event)
        except ConnectionLostError as error:
            self._drop(client, str(error))
        else:
            self._watch_writing(client)

    def _watch_writing(self, client: Connection) -> None:
        """Have the selector wait for room only while something is to be written."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.wants_to_write else 0)
        key = self._selector.get_key(client.sock)
        if key.events != events:
            self._selector.modify(client.sock, events, key.data)

    def _drop(self, client: Connection, why: str) -> None:
        """End a connection, and cancel what it had running."""
        mine = [request_id for request_id, owner in self._owners.items() if owner is client]
        _log.info("client %d: %s; %d requests cancelled", client.number, why, len(mine))
        self._selector.unregister(client.sock)
        client.sock.close()
        del self._clients[client.number]
        self._drainers = [drainer for drainer in self._drainers if drainer is not client]
        for request_id in mine:
            del self._owners[request_id]
            self._orphans.add(request_id)
            self._engine.handle(Cancel(request_id))
