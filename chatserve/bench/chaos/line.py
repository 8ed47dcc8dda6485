"""A client that is never told to give up: connected again whenever it is lost, each request sent until it is answered.

Owns one user's socket and the mirrors that live on from socket to socket. What the server did wrong ends it, and stands
in `fault`.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
import uuid
from collections import defaultdict
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import websockets

from chatserve.bench.chaos.client import ChatClient, RequestFailedError
from chatserve.bench.chaos.mirror import Frame, Mirror, ProtocolViolationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from chatserve.bench.chaos.tally import Tally

PATIENCE_S: Final = 600.0
"""Longer than any storm: a request without an answer for so long will never have one."""
_HELLO_S: Final = 15.0
_FIRST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 1.0
_RETRY_S: Final = 0.3
_LOST: Final = (OSError, EOFError, TimeoutError, websockets.WebSocketException)


class Line:
    """`run` keeps it connected, to any of `urls`, until `close`."""

    def __init__(self, urls: Sequence[str], token: str, choose: random.Random, tally: Tally) -> None:
        self._urls = urls
        self._token = token
        self._choose = choose
        self._tally = tally
        self.mirrors: dict[str, Mirror] = defaultdict(lambda: Mirror(keeps_log=False))
        self.gone: set[str] = set()
        """Sessions that this user deletes or has deleted: `not_found` is right for them, and for no others."""
        self.fault: BaseException | None = None
        self.waits: dict[str, float] = {}
        """What is being waited for, and since when (of `time.monotonic`)."""
        self._client: ChatClient | None = None
        self._up = asyncio.Event()
        self._heard = asyncio.Event()
        self._closed = False
        self._lost_at: float | None = None

    # --- the connection -----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Connect, again and again. Returns after `close`, or when the server broke the protocol."""
        pause_s = _FIRST_PAUSE_S
        while not self._closed and self.fault is None:
            if await self._connect_once() > _LONGEST_PAUSE_S:
                pause_s = _FIRST_PAUSE_S
            if not self._closed:
                await asyncio.sleep(pause_s * (0.5 + self._choose.random()))
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        self._heard.set()
        self._up.set()

    async def _connect_once(self) -> float:
        """One connection from its beginning to its end; the seconds that it lasted."""
        # As a page does: what is being read again for lack of a whole answer is not resumed.
        resume = [
            {"session": session, "after": mirror.seq}
            for session, mirror in self.mirrors.items()
            if not mirror.deleted and session not in self.gone
        ]
        client = ChatClient(
            self._choose.choice(self._urls),
            token=self._token,
            resume=resume,
            keeps_frames=False,
            on_frame=lambda frame: self._take(client, frame),
        )
        client.sessions = self.mirrors
        try:
            async with asyncio.timeout(_HELLO_S):
                await client.open()
                await client.hello()
        except (*_LOST, AssertionError) as error:
            # One that closes in the middle of the greeting is lost too; one with a frame that breaks the rules is not.
            if isinstance(error, ProtocolViolationError):
                self.fault = error
            await _abort(client)
            return 0.0
        opened_at = time.monotonic()
        if self._lost_at is not None:
            self._tally.reconnected(opened_at - self._lost_at)
        self._client = client
        self._up.set()
        code = await client.closed(timeout_s=float("inf"))
        self._lost_at = time.monotonic()
        self._client = None
        self._tally.socket_closed(code)
        if client.fault is not None:
            self.fault = client.fault
        else:
            self._up.clear()
        await _abort(client)
        return self._lost_at - opened_at

    def _take(self, client: ChatClient, frame: Frame) -> None:
        self._heard.set()
        match frame["type"]:
            case "error" if "id" not in frame:
                self._not_resumed(client, frame)
            case "snapshot":
                self._tally.snapshots += frame["last"]

    def _not_resumed(self, client: ChatClient, frame: Frame) -> None:
        session = frame.get("session")
        if frame["code"] == "not_found" and session in self.gone:
            return
        if not frame["retryable"]:
            raise ProtocolViolationError(f"a session could not be resumed: {frame}")
        client.cut()  # and resume it again from where it stands

    def cut(self) -> None:
        """Lose the connection, as a network does."""
        if self._client is not None:
            self._client.cut()

    async def close(self) -> None:
        """Leave for good."""
        self._closed = True
        if self._client is not None:
            await self._client.socket.close()

    # --- requests -----------------------------------------------------------------------------------------------------

    async def request(self, type_: str, **fields: Any) -> Frame:
        """The ack of a request, sent under one id until it is there.

        Raises:
            RequestFailedError: the server refused it for good.
            ProtocolViolationError: there is no answer, or the server did something else wrong.
        """
        request_id = str(uuid.UUID(int=self._choose.getrandbits(128)))
        with self._waiting(f"the answer to {type_} {request_id}"):
            return await self._request(type_, request_id, fields)

    async def _request(self, type_: str, request_id: str, fields: Frame) -> Frame:
        started = time.monotonic()
        deadline = started + PATIENCE_S
        sent = 0
        while True:
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    await self._up.wait()
                    self.check()
                    client = self._client
                    if client is None:  # lost between two turns of the loop
                        await asyncio.sleep(0)
                        continue
                    sent += 1
                    ack = await asyncio.shield(await client.begin(type_, id=request_id, **fields))
                self._tally.answered(type_, time.monotonic() - started, sent)
                return ack
            except RequestFailedError as error:
                if not error.frame["retryable"]:
                    raise
                self._tally.refused(error.code)
                await asyncio.sleep(error.frame.get("retry_after_s") or _RETRY_S * (0.5 + self._choose.random()))
            except TimeoutError:
                age_s = time.monotonic() - started
                raise ProtocolViolationError(f"no answer to {type_} {fields} within {age_s:.0f} s") from None
            except _LOST:
                await asyncio.sleep(0)

    async def notify(self, type_: str, **fields: Any) -> None:
        """Send a frame that has no answer, or nothing while the connection is away."""
        if self._client is not None:
            with contextlib.suppress(*_LOST):
                await self._client.send({"type": type_, **fields})

    async def open(self, session: str) -> Mirror:
        """Subscribe, and the session once its snapshot is there."""
        while session not in self.mirrors:
            await self.request("session.open", session=session)
            client = self._client
            if client is not None:
                await self.until(partial(self._is_open_or_lost, session, client), f"the snapshot of {session}")
        return self.mirrors[session]

    def _is_open_or_lost(self, session: str, client: ChatClient) -> bool:
        return session in self.mirrors or client.close_code is not None

    async def until(self, ready: Callable[[], Any], what: str, timeout_s: float = PATIENCE_S) -> None:
        """Wait for what frames bring.

        Raises:
            ProtocolViolationError: they do not bring it in time.
        """
        with self._waiting(what):
            await self._until(ready, what, timeout_s)

    async def _until(self, ready: Callable[[], Any], what: str, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not ready():
            self.check()
            self._heard.clear()
            try:
                # A closed socket brings no frame, so look now and then all the same.
                async with asyncio.timeout(min(1.0, deadline - time.monotonic())):
                    await self._heard.wait()
            except TimeoutError:
                if time.monotonic() >= deadline:
                    raise ProtocolViolationError(f"{what} did not come within {timeout_s:.0f} s") from None

    @contextlib.contextmanager
    def _waiting(self, what: str) -> Iterator[None]:
        self.waits[what] = time.monotonic()
        try:
            yield
        finally:
            self.waits.pop(what, None)

    def check(self) -> None:
        """Raises:
        ProtocolViolationError: the server broke the protocol.
        """
        if self.fault is not None:
            raise self.fault


async def _abort(client: ChatClient) -> None:
    """Let go of a socket, whatever state it is in."""
    if not hasattr(client, "socket"):
        return
    client.cut()
    await client.closed()
