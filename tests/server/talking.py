"""A protocol that has been opened, and one minimal request of each kind."""

from __future__ import annotations

import json
from typing import Any

from chatserve.config import Limits
from chatserve.server.protocol import ChatProtocol, Opened, Send
from chatserve.types import UserId

LIMITS = Limits(max_frame_bytes=1 << 20, max_text_bytes=1000, max_system_bytes=500, max_title_bytes=100)

HELLO = {"type": "hello", "protocol": "chat.v1"}

REQUESTS: dict[str, dict[str, Any]] = {
    "session.list": {},
    "session.create": {},
    "session.open": {"session": "s"},
    "session.close": {"session": "s"},
    "session.update": {"session": "s", "title": "t"},
    "session.delete": {"session": "s"},
    "session.fork": {"session": "s", "message": "m"},
    "message.send": {"session": "s", "parent": None, "text": "hi"},
    "message.edit": {"session": "s", "message": "m", "text": "hi"},
    "message.regenerate": {"session": "s", "message": "m"},
    "message.continue": {"session": "s", "message": "m"},
    "message.delete": {"session": "s", "message": "m"},
    "branch.select": {"session": "s", "message": "m"},
    "generation.stop": {"session": "s", "message": "m"},
}


def authenticate(token: str | None) -> UserId | None:
    return {"a": UserId("ada"), "b": UserId("bob"), None: UserId("nobody")}.get(token)


def fresh(bearer: str | None = None) -> ChatProtocol:
    return ChatProtocol(LIMITS, authenticate, 0.0, bearer)


def opened() -> ChatProtocol:
    protocol = fresh()
    assert isinstance(protocol.receive_text(json.dumps(HELLO), 1.0)[0], Opened)
    return protocol


def receive(protocol: ChatProtocol, frame: object, now: float = 2.0) -> Any:
    outputs = protocol.receive_text(frame if isinstance(frame, str) else json.dumps(frame), now)
    assert len(outputs) == 1
    return outputs[0]


def error(protocol: ChatProtocol, frame: object) -> dict[str, Any]:
    output = receive(protocol, frame)
    assert isinstance(output, Send)
    answer: dict[str, Any] = json.loads(output.text)
    assert answer["type"] == "error"
    assert answer["detail"]
    assert not protocol.closed
    return answer
