"""A small `chat.v1` server in memory that answers by repeating the question word by word, and drops connections when
told to. Enough of the protocol for the terminal client; shares no code with it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from typing import Any, Self

from websockets.asyncio.server import Server, ServerConnection, serve


class FakeServer:
    """`async with FakeServer() as server`, then `server.url`."""

    def __init__(self, *, token: str | None = None) -> None:
        self.token = token
        self.sessions: dict[str, dict[str, Any]] = {}
        self.requests: list[dict[str, Any]] = []
        self.hellos: list[dict[str, Any]] = []
        self.cut_after_events: list[int] = []
        """After so many event frames on a connection it is cut; one entry a connection, in order."""
        self.word_gate: asyncio.Event | None = None
        """If set: answers stop before their last word until this is set."""
        self.waiting = asyncio.Event()
        """An answer has come to the gate."""
        self._ids = itertools.count(1)
        self._sockets: dict[ServerConnection, set[str]] = {}
        self._cuts: dict[ServerConnection, int] = {}
        self._answered: dict[str, dict[str, Any]] = {}
        self._added_events: dict[str, asyncio.Event] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: Server | None = None

    async def __aenter__(self) -> Self:
        self._server = await serve(self._handle, "127.0.0.1", 0, subprotocols=["chat.v1"])  # type: ignore[list-item]
        port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        for task in self._tasks:
            task.cancel()
        self._server.close()
        await self._server.wait_closed()

    async def _handle(self, socket: ServerConnection) -> None:
        hello = json.loads(await socket.recv())
        self.hellos.append(hello)
        if self.token is not None and hello.get("token") != self.token:
            await socket.close(4001, "a token is needed")
            return
        self._sockets[socket] = set()
        if self.cut_after_events:
            self._cuts[socket] = self.cut_after_events.pop(0)
        try:
            await self._send(socket, {"type": "welcome", "protocol": "chat.v1", "model": "echo", "limits": {}})
            for each in hello.get("resume", []):
                self._sockets[socket].add(each["session"])
                for event in self.sessions[each["session"]]["events"][each["after"] :]:
                    await self._send(socket, event)
            async for data in socket:
                frame = json.loads(data)
                if "id" in frame:
                    self.requests.append(frame)
                    await self._answer(socket, frame)
        finally:
            del self._sockets[socket]

    async def _answer(self, socket: ServerConnection, frame: dict[str, Any]) -> None:
        after: list[dict[str, Any]] = []
        if frame["id"] not in self._answered:
            method = getattr(self, "_" + frame["type"].replace(".", "_"), None)
            if method is None:
                self._answered[frame["id"]] = {"type": "error", "code": "unknown_type", "detail": "what is that?"}
            else:
                try:
                    self._answered[frame["id"]] = {"type": "ack", **method(frame, socket, after)}
                except KeyError as error:
                    detail = f"there is no {error}"
                    self._answered[frame["id"]] = {"type": "error", "code": "not_found", "detail": detail}
        await self._send(socket, {**self._answered[frame["id"]], "id": frame["id"]})
        for event in after:
            await self._publish(frame.get("session", ""), event)
        if frame["type"] == "session.open":
            await self._send(socket, self._snapshot(frame["session"]))

    async def _publish(self, session: str, event: dict[str, Any]) -> None:
        held = self.sessions[session]
        event = {**event, "session": session, "seq": len(held["events"]) + 1}
        held["events"].append(event)
        match event["type"]:
            case "message.added":
                held["messages"][event["message"]] = {
                    name: event[name] for name in ("message", "parent", "role", "text", "status")
                } | {"created_at": 0}
                if event["message"] in self._added_events:
                    self._added_events[event["message"]].set()
            case "message.updated":
                held["messages"][event["message"]]["status"] = event["status"]
            case "branch.selected":
                held["leaf"] = event["leaf"]
            case "generation.delta":
                held["messages"][event["message"]]["text"] += event["text"]
            case "generation.end":
                held["messages"][event["message"]]["status"] = event["status"]
        for socket, open_sessions in list(self._sockets.items()):
            if session in open_sessions:
                await self._send(socket, event)

    async def _send(self, socket: ServerConnection, frame: dict[str, Any]) -> None:
        if "seq" in frame and frame["type"] != "snapshot" and socket in self._cuts:
            if self._cuts[socket] == 0:
                socket.transport.abort()
                return
            self._cuts[socket] -= 1
        with contextlib.suppress(Exception):  # a dropped client is the test's doing
            await socket.send(json.dumps(frame))

    def _snapshot(self, session: str) -> dict[str, Any]:
        held = self.sessions[session]
        return {
            "type": "snapshot",
            "session": session,
            "seq": len(held["events"]),
            "version": 1,
            **{name: held[name] for name in ("title", "system", "params", "leaf")},
            "messages": list(held["messages"].values()),
            "part": 0,
            "last": True,
        }

    # --- requests: each returns its ack's fields and may add events ---

    def _session_create(self, frame: dict[str, Any], _socket: ServerConnection, _after: list[Any]) -> dict[str, Any]:
        session = f"s{next(self._ids)}"
        self.sessions[session] = {
            "session": session,
            "title": frame.get("title", ""),
            "system": "",
            "params": {},
            "leaf": None,
        }
        self.sessions[session] |= {"messages": {}, "events": []}
        return {"session": session}

    def _session_open(self, frame: dict[str, Any], socket: ServerConnection, _after: list[Any]) -> dict[str, Any]:
        self._sockets[socket].add(self.sessions[frame["session"]]["session"])
        return {}

    def _session_close(self, frame: dict[str, Any], socket: ServerConnection, _after: list[Any]) -> dict[str, Any]:
        self._sockets[socket].discard(frame["session"])
        return {}

    def _session_list(self, _frame: dict[str, Any], _socket: ServerConnection, _after: list[Any]) -> dict[str, Any]:
        return {
            "sessions": [
                {"session": name, "title": held["title"], "updated_at": 0, "messages": len(held["messages"])}
                for name, held in self.sessions.items()
            ]
        }

    def _session_update(self, frame: dict[str, Any], _socket: ServerConnection, after: list[Any]) -> dict[str, Any]:
        changed = {name: frame[name] for name in ("title", "system", "params") if name in frame}
        self.sessions[frame["session"]].update(changed)
        after.append({"type": "session.updated", **changed})
        return {"version": 2}

    def _message_send(self, frame: dict[str, Any], _socket: ServerConnection, after: list[Any]) -> dict[str, Any]:
        asked = f"m{next(self._ids)}"
        after.append(self._added(asked, frame["parent"], "user", frame["text"]))
        return {"message": asked, "reply": self._reply(frame["session"], asked, frame["text"], after)}

    def _message_edit(self, frame: dict[str, Any], socket: ServerConnection, after: list[Any]) -> dict[str, Any]:
        parent = self.sessions[frame["session"]]["messages"][frame["message"]]["parent"]
        return self._message_send({**frame, "parent": parent}, socket, after)

    def _message_regenerate(self, frame: dict[str, Any], _socket: ServerConnection, after: list[Any]) -> dict[str, Any]:
        messages = self.sessions[frame["session"]]["messages"]
        asked = messages[messages[frame["message"]]["parent"]]
        return {"reply": self._reply(frame["session"], asked["message"], "again " + asked["text"], after)}

    def _message_continue(self, frame: dict[str, Any], _socket: ServerConnection, after: list[Any]) -> dict[str, Any]:
        message = frame["message"]
        after.append({"type": "message.updated", "message": message, "status": "generating"})
        after.append({"type": "generation.delta", "message": message, "text": " and on"})
        after.append(self._ended(message, "stop", "done"))
        return {"reply": message}

    def _branch_select(self, frame: dict[str, Any], _socket: ServerConnection, after: list[Any]) -> dict[str, Any]:
        after.append({"type": "branch.selected", "leaf": frame["message"]})
        return {}

    def _generation_stop(self, frame: dict[str, Any], _socket: ServerConnection, after: list[Any]) -> dict[str, Any]:
        for task in self._tasks:
            task.cancel()
        after.append(self._ended(frame["message"], "cancelled", "stopped"))
        return {}

    @staticmethod
    def _added(message: str, parent: str | None, role: str, text: str, status: str = "done") -> dict[str, Any]:
        fields = {"message": message, "parent": parent, "role": role, "text": text, "status": status}
        return {"type": "message.added", **fields}

    @staticmethod
    def _ended(message: str, reason: str, status: str) -> dict[str, Any]:
        return {
            "type": "generation.end",
            "message": message,
            "reason": reason,
            "status": status,
            "usage": {},
            "seed": 1,
        }

    def _reply(self, session: str, parent: str, text: str, after: list[Any]) -> str:
        reply = f"m{next(self._ids)}"
        after.append(self._added(reply, parent, "assistant", "", "generating"))
        after.append({"type": "branch.selected", "leaf": reply})

        async def generate() -> None:
            await self._added_events[reply].wait()
            words = text.split(" ")
            for index, word in enumerate(words):
                if self.word_gate is not None and index == len(words) - 1:
                    self.waiting.set()
                    await self.word_gate.wait()
                piece = word if index == 0 else f" {word}"
                await self._publish(session, {"type": "generation.delta", "message": reply, "text": piece})
                await asyncio.sleep(0)
            await self._publish(session, self._ended(reply, "stop", "done"))

        self._added_events[reply] = asyncio.Event()
        self._tasks.add(asyncio.create_task(generate()))
        return reply
