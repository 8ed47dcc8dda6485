"""A client of `chat.v1` written against the protocol's description alone: it imports nothing of the server.

It is strict. Every frame is checked as it arrives: one answer a request, events numbered without gap or repeat, an
ack before the events of its own request, prompts whose parts add up. `Mirror` rebuilds each session from its events, so
that a test can hold it against a fresh snapshot.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections import defaultdict
from typing import Any, Self

import websockets
from websockets.asyncio.client import ClientConnection, connect

Frame = dict[str, Any]

EVENT_TYPES = {
    "message.added",
    "message.updated",
    "message.deleted",
    "branch.selected",
    "session.updated",
    "session.deleted",
    "generation.queued",
    "generation.started",
    "generation.delta",
    "generation.end",
}
STATUS_OF_REASON = {
    "stop": "done",
    "length": "done",
    "cancelled": "stopped",
    "orphaned": "stopped",
    "interrupted": "interrupted",
    "error": "failed",
}


class RequestFailedError(Exception):
    """The server answered with an `error` frame."""

    def __init__(self, frame: Frame) -> None:
        super().__init__(f"{frame['code']}: {frame['detail']}")
        self.frame = frame
        self.code = frame["code"]


class Mirror:
    """A session as its events tell it."""

    def __init__(self) -> None:
        self.seq = 0
        self.title: str | None = None
        self.system: str | None = None
        self.params: dict[str, Any] = {}
        self.leaf: str | None = None
        self.messages: dict[str, Frame] = {}
        self.deleted = False
        self.started_times: dict[str, int] = defaultdict(int)
        self.ended: dict[str, list[Frame]] = defaultdict(list)
        self.log: list[Frame] = []
        self._parts: list[Frame] = []

    def load(self, part: Frame) -> bool:
        """Take one frame of a snapshot; True once it is whole."""
        assert part["part"] == len(self._parts), "snapshot parts come in order"
        self._parts.append(part)
        if not part["last"]:
            return False
        self.seq, self.title, self.system = part["seq"], part["title"], part["system"]
        self.params, self.leaf = part["params"], part["leaf"]
        self.messages = {}
        for frame in self._parts:
            assert frame["seq"] == self.seq
            for message in frame["messages"]:
                if message.get("append"):  # the rest of a message that fits no frame
                    self.messages[message["message"]]["text"] += message["text"]
                    continue
                assert message["parent"] is None or message["parent"] in self.messages, "parents come before children"
                assert message["status"] in {"done", "generating", "stopped", "interrupted", "failed"}
                self.messages[message["message"]] = dict(message)
        self._parts = []
        self.check()
        return True

    def apply(self, event: Frame) -> None:
        first = event.get("from_seq", event["seq"])
        assert first == self.seq + 1, f"after seq {self.seq} came {first}: {event}"
        assert event["seq"] >= first
        assert not self.deleted, f"an event after session.deleted: {event}"
        self.seq = event["seq"]
        self.log.append(event)
        match event["type"]:
            case "message.added":
                assert event["message"] not in self.messages
                kept = ("message", "parent", "role", "text", "status")
                self.messages[event["message"]] = {name: event[name] for name in kept}
            case "message.updated":
                self.messages[event["message"]]["status"] = event["status"]
            case "message.deleted":
                gone = self.subtree(event["message"])
                assert len(gone) == event["deleted"]
                for message in gone:
                    assert self.messages[message]["status"] != "generating", "its generation ends before it is deleted"
                    del self.messages[message]
            case "branch.selected":
                self.leaf = event["leaf"]
            case "session.updated":
                self.title = event.get("title", self.title)
                self.system = event.get("system", self.system)
                self.params = event.get("params", self.params)
            case "session.deleted":
                assert all(m["status"] != "generating" for m in self.messages.values())
                self.deleted = True
            case "generation.started":
                self.started_times[event["message"]] += 1
                parts = event["cached_tokens"] + event["swapped_in_tokens"] + event["computed_tokens"]
                assert event["prompt_tokens"] == parts
                assert event["computed_tokens"] >= 1
            case "generation.delta":
                message = self.messages[event["message"]]
                assert message["status"] == "generating", f"a delta for a message that is {message['status']}"
                assert event["text"]
                message["text"] += event["text"]
            case "generation.end":
                message = self.messages[event["message"]]
                assert event["status"] == STATUS_OF_REASON[event["reason"]]
                assert message["status"] == "generating", "one generation.end a generation"
                usage = event["usage"]
                if usage:
                    parts = usage["cached_tokens"] + usage["swapped_in_tokens"] + usage["computed_tokens"]
                    assert usage["prompt_tokens"] == parts
                message["status"] = event["status"]
                self.ended[event["message"]].append(event)
            case "generation.queued":
                assert event["position"] >= 0

    def subtree(self, root: str) -> list[str]:
        found = [root]
        for message in found:
            found += [m for m, record in self.messages.items() if record["parent"] == message]
        return found

    def path(self, message: str | None) -> list[Frame]:
        path: list[Frame] = []
        while message is not None:
            path.append(self.messages[message])
            message = self.messages[message]["parent"]
        return path[::-1]

    def children(self, parent: str | None) -> list[str]:
        return [m for m, record in self.messages.items() if record["parent"] == parent]

    def check(self) -> None:
        assert (self.leaf is None) == (not self.messages), "an empty session alone has no leaf"
        for record in self.messages.values():
            if record["parent"] is None:
                assert record["role"] == "user"
            else:
                assert {record["role"], self.messages[record["parent"]]["role"]} == {"user", "assistant"}

    def tree(self) -> Frame:
        """What two views of one session must agree on."""
        return {
            "seq": self.seq,
            "title": self.title,
            "system": self.system,
            "params": self.params,
            "leaf": self.leaf,
            "messages": {m: {k: r[k] for k in ("parent", "role", "text", "status")} for m, r in self.messages.items()},
        }


class ChatClient:
    """One socket. Use as `async with ChatClient(url) as client`."""

    def __init__(
        self, ws_url: str, *, token: str | None = None, resume: list[Frame] | None = None, origin: str | None = None
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
                assert isinstance(raw, str), "text frames only"
                frame = json.loads(raw)
                await self._take(frame)
                async with self._changed:
                    self._changed.notify_all()
        except websockets.ConnectionClosed:
            pass
        except AssertionError as fault:
            self.fault = fault
        finally:
            self.close_code = self.socket.close_code if self.socket.close_code is not None else 1006
            for answer in self._answers.values():
                if not answer.done():
                    answer.set_exception(ConnectionError(f"closed with {self.close_code}"))
            async with self._changed:
                self._changed.notify_all()

    async def _take(self, frame: Frame) -> None:
        self.frames.append(frame)
        type_ = frame["type"]
        if type_ == "welcome":
            self.welcome = frame
        elif type_ == "pong":
            self._pongs += 1
        elif type_ == "ping":
            await self.send({"type": "pong"})
        elif type_ in {"ack", "error"}:
            answer = self._answers.pop(frame["id"], None) if "id" in frame else None
            if type_ == "error":
                assert set(frame) >= {"code", "detail", "retryable"}
                if answer is not None and not answer.done():
                    answer.set_exception(RequestFailedError(frame))
            else:
                assert answer is not None, f"an ack nobody waits for: {frame}"
                if not answer.done():
                    answer.set_result(frame)
        elif type_ == "snapshot":
            self._snapshot(frame)
        elif type_ in EVENT_TYPES:
            self.sessions[frame["session"]].apply(frame)
        else:
            assert type_ in {"sessions.changed", "degraded", "recovered"}, f"unknown frame {frame}"

    def _snapshot(self, frame: Frame) -> None:
        session = frame["session"]
        loading = self._loading.setdefault(session, Mirror())
        if loading.load(frame):
            # A later snapshot replaces what was known; whoever holds the mirror sees the new state.
            known = self.sessions[session]
            for name in ("seq", "title", "system", "params", "leaf", "messages"):
                setattr(known, name, getattr(loading, name))
            del self._loading[session]
            self.snapshots[session] += 1
