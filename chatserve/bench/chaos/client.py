"""A client of `chat.v1` written against the protocol's description alone: it imports nothing of the server.

It is strict. Every frame is checked as it arrives: one answer a request, events numbered without gap or repeat, an
ack before the events of its own request, prompts whose parts add up. `Mirror` rebuilds each session from its events, so
that it can be held against a fresh snapshot.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Self

import websockets
from websockets.asyncio.client import ClientConnection, connect

from chatserve.bench.chaos.mirror import EVENT_TYPES, Frame, Mirror, ProtocolViolationError, demand

if TYPE_CHECKING:
    from collections.abc import Callable


class RequestFailedError(Exception):
    """The server answered with an `error` frame."""

    def __init__(self, frame: Frame) -> None:
        super().__init__(f"{frame['code']}: {frame['detail']}")
        self.frame = frame
        self.code: str = frame["code"]


class ChatClient:
    """One socket. Use as `async with ChatClient(url) as client`.

    `on_frame` is called with each frame once it has been taken in. `keeps_frames` keeps every frame in `frames`.
    """

    def __init__(
        self,
        ws_url: str,
        *,
        token: str | None = None,
        resume: list[Frame] | None = None,
        origin: str | None = None,
        keeps_frames: bool = True,
        on_frame: Callable[[Frame], None] = lambda _: None,
    ) -> None:
        self.ws_url = ws_url
        self.token = token
        self.resume = resume
        self.origin = origin
        self.welcome: Frame = {}
        self.sessions: dict[str, Mirror] = defaultdict(Mirror)
        self.snapshots: dict[str, int] = defaultdict(int)
        self.fault: BaseException | None = None
        """What the server did wrong, if a check failed while reading."""
        self.frames: list[Frame] = []
        self._keeps_frames = keeps_frames
        self._on_frame = on_frame
        self.socket: ClientConnection
        self._answers: dict[str, asyncio.Future[Frame]] = {}
        self._loading: dict[str, Mirror] = {}
        self._changed = asyncio.Condition()
        self._reader: asyncio.Task[None] | None = None
        self.close_code: int | None = None
        self._pongs = 0

    async def __aenter__(self) -> Self:
        await self.open()
        await self.hello()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def open(self) -> None:
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        self.socket = await connect(
            self.ws_url,
            subprotocols=[websockets.Subprotocol("chat.v1")],
            additional_headers=headers,
            origin=websockets.Origin(self.origin) if self.origin else None,
            max_size=None,
            ping_interval=None,
        )
        self._reader = asyncio.create_task(self._read())

    async def hello(self, **fields: Any) -> Frame:
        frame: Frame = {"type": "hello", "protocol": "chat.v1", **fields}
        if self.resume is not None:
            frame["resume"] = self.resume
        await self.send(frame)
        await self.until(lambda: bool(self.welcome))
        return self.welcome

    async def close(self) -> None:
        await self.socket.close()
        if self._reader is not None:
            await self._reader
        if self.fault is not None:
            raise self.fault

    def cut(self) -> None:
        """Drop the connection without a word, as a lost network does."""
        self.socket.transport.abort()

    async def send(self, frame: Frame | str | bytes) -> None:
        await self.socket.send(json.dumps(frame) if isinstance(frame, dict) else frame)

    async def request(self, type_: str, *, id: str | None = None, **fields: Any) -> Frame:  # noqa: A002 - the wire's name
        """Send one request and return its ack, or raise `RequestFailedError`."""
        return await (await self.begin(type_, id=id, **fields))

    async def begin(self, type_: str, *, id: str | None = None, **fields: Any) -> asyncio.Future[Frame]:  # noqa: A002
        """Send one request; the future holds its answer."""
        if self.close_code is not None:  # nobody reads any more
            raise ConnectionError(f"closed with {self.close_code}")
        request_id = id or str(uuid.uuid4())
        answer: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        answer.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._answers[request_id] = answer
        await self.send({"type": type_, "id": request_id, **fields})
        return answer

    async def until(self, ready: Any, timeout_s: float = 30.0) -> None:
        """Wait for a condition over what has arrived."""

        async def wait() -> None:
            async with self._changed:
                await self._changed.wait_for(lambda: ready() or self.close_code is not None)

        await asyncio.wait_for(wait(), timeout_s)
        if self.fault is not None:
            raise self.fault
        assert ready(), f"the socket closed with {self.close_code} first"

    async def closed(self, timeout_s: float = 30.0) -> int:
        """Wait for the socket to close and return the code."""
        assert self._reader is not None
        await asyncio.wait_for(asyncio.shield(self._reader), timeout_s)
        assert self.close_code is not None
        return self.close_code

    async def settle(self) -> None:
        """Wait until what the server had to say before now has arrived: a pong comes after it on the same socket."""
        pongs = self._pongs
        await self.send({"type": "ping"})
        await self.until(lambda: self._pongs > pongs)

    # --- conveniences over requests -----------------------------------------------------------------------------------

    async def create(self, **fields: Any) -> str:
        return str((await self.request("session.create", **fields))["session"])

    async def watch(self, session: str) -> Mirror:
        """Open a session and wait for its snapshot."""
        await self.request("session.open", session=session)
        await self.until(lambda: self.snapshots[session] > 0)
        return self.sessions[session]

    async def started_session(self, **fields: Any) -> tuple[str, Mirror]:
        session = await self.create(**fields)
        return session, await self.watch(session)

    async def say(self, session: str, text: str, parent: str | None = None, **params: Any) -> tuple[str, str]:
        """Send a message without waiting for the reply's end; (message, reply)."""
        ack = await self.request("message.send", session=session, parent=parent, text=text, params=params)
        return ack["message"], ack["reply"]

    async def turn(self, session: str, text: str, parent: str | None = None, **params: Any) -> tuple[str, str]:
        """Send a message and wait for the reply's end; (message, reply)."""
        message, reply = await self.say(session, text, parent, **params)
        await self.ended(session, reply)
        return message, reply

    async def ended(self, session: str, message: str, times: int = 1, timeout_s: float = 60.0) -> Frame:
        """Wait for a generation to end; its `generation.end`."""
        mirror = self.sessions[session]
        await self.until(lambda: len(mirror.ended[message]) >= times, timeout_s)
        return mirror.ended[message][times - 1]

    def text(self, session: str, message: str) -> str:
        return str(self.sessions[session].messages[message]["text"])

    def started(self, session: str, message: str) -> Frame:
        return next(
            e
            for e in reversed(self.sessions[session].log)
            if e["type"] == "generation.started" and e["message"] == message
        )

    def resume_point(self) -> list[Frame]:
        return [{"session": s, "after": m.seq} for s, m in self.sessions.items() if not m.deleted]

    # --- reading ------------------------------------------------------------------------------------------------------

    async def _read(self) -> None:
        try:
            async for raw in self.socket:
                demand(isinstance(raw, str), "a binary frame came")
                frame = json.loads(raw)
                await self._take(frame)
                self._on_frame(frame)
                async with self._changed:
                    self._changed.notify_all()
        except websockets.ConnectionClosed:
            pass
        except ProtocolViolationError as fault:
            self.fault = fault
        except (KeyError, TypeError, ValueError) as error:
            self.fault = ProtocolViolationError(f"a malformed frame: {error!r}")
        finally:
            self.close_code = self.socket.close_code if self.socket.close_code is not None else 1006
            for answer in self._answers.values():
                if not answer.done():
                    answer.set_exception(ConnectionError(f"closed with {self.close_code}"))
            async with self._changed:
                self._changed.notify_all()

    async def _take(self, frame: Frame) -> None:
        if self._keeps_frames:
            self.frames.append(frame)
        match frame["type"]:
            case "welcome":
                self.welcome = frame
            case "pong":
                self._pongs += 1
            case "ping":
                await self.send({"type": "pong"})
            case "ack" | "error":
                self._answered(frame)
            case "snapshot":
                self._snapshot(frame)
            case event if event in EVENT_TYPES:
                self.sessions[frame["session"]].apply(frame)
            case other:
                demand(other in {"sessions.changed", "degraded", "recovered"}, f"an unknown frame: {frame}")

    def _answered(self, frame: Frame) -> None:
        answer = self._answers.pop(frame["id"], None) if "id" in frame else None
        if frame["type"] == "error":
            demand(set(frame) >= {"code", "detail", "retryable"}, f"an error without its fields: {frame}")
            if answer is not None and not answer.done():
                answer.set_exception(RequestFailedError(frame))
            return
        demand(answer is not None, f"an ack nobody waits for: {frame}")
        assert answer is not None
        if not answer.done():
            answer.set_result(frame)

    def _snapshot(self, frame: Frame) -> None:
        session = frame["session"]
        loading = self._loading.setdefault(session, Mirror())
        if loading.load(frame):
            # Whoever holds the mirror sees the new state.
            self.sessions[session].replace(loading)
            del self._loading[session]
            self.snapshots[session] += 1
