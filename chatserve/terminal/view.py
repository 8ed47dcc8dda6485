"""A conversation as a client of `chat.v1` sees it: a pure fold over frames.

Knows no sockets and prints nothing. The same frames give the same view, whether they came live, replayed after a
reconnect, or as a snapshot.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any


@dataclasses.dataclass(slots=True)
class Message:
    message: str
    parent: str | None
    role: str
    text: str
    status: str
    usage: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(slots=True)
class SessionView:
    """One conversation's tree and where the reader is in it. `seq` is the last event that it holds; -1: it holds no
    whole state (yet)."""

    session: str
    seq: int = -1
    title: str = ""
    system: str = ""
    params: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    leaf: str | None = None
    messages: dict[str, Message] = dataclasses.field(default_factory=dict)
    deleted: bool = False

    def apply(self, frame: Mapping[str, Any]) -> bool:
        """Take one frame of this session in; whether it changed anything. What is held already changes nothing."""
        if frame["type"] == "snapshot":
            self._apply_snapshot(frame)
            return True
        if self.seq < 0 or frame["seq"] <= self.seq:
            return False
        self.seq = frame["seq"]
        match frame["type"]:
            case "branch.selected":
                self.leaf = frame["leaf"]
            case "session.updated":
                self._apply_fields(frame)
            case "session.deleted":
                self.deleted = True
            case _:
                self._apply_to_message(frame)
        return True

    def _apply_to_message(self, frame: Mapping[str, Any]) -> None:
        match frame["type"]:
            case "message.added":
                self._add(frame)
            case "message.updated":
                self.messages[frame["message"]].status = frame["status"]
            case "message.deleted":
                above = self.messages[frame["message"]].parent
                for gone in list(self.subtree(frame["message"])):
                    del self.messages[gone]
                    if gone == self.leaf:
                        self.leaf = above  # until the server says, in its next event, where the path goes now
            case "generation.delta":
                self.messages[frame["message"]].text += frame["text"]
            case "generation.end":
                ended = self.messages[frame["message"]]
                ended.status = frame["status"]
                ended.usage = frame.get("usage") or {}
            case _:
                pass  # queued, started, and what later servers may add

    def _apply_snapshot(self, frame: Mapping[str, Any]) -> None:
        if frame["part"] == 0:
            self.messages.clear()
        # Half a snapshot is no state to resume from.
        self.seq = frame["seq"] if frame["last"] else -1
        self.leaf = frame["leaf"]
        self._apply_fields(frame)
        for each in frame["messages"]:
            if each.get("append"):  # a later piece of a message too long for one frame
                self.messages[each["message"]].text += each["text"]
            else:
                self._add(each)

    def _apply_fields(self, frame: Mapping[str, Any]) -> None:
        if "title" in frame:
            self.title = frame["title"] or ""
        if "system" in frame:
            self.system = frame["system"] or ""
        if "params" in frame:
            self.params = frame["params"] or {}

    def _add(self, fields: Mapping[str, Any]) -> None:
        self.messages[fields["message"]] = Message(
            message=fields["message"],
            parent=fields["parent"],
            role=fields["role"],
            text=fields["text"],
            status=fields["status"],
            usage=fields.get("usage") or {},
        )

    def path(self) -> list[Message]:
        """From the root to the active leaf."""
        found: list[Message] = []
        at = self.leaf
        while at is not None:
            found.append(self.messages[at])
            at = self.messages[at].parent
        return found[::-1]

    def siblings(self, message: str) -> list[Message]:
        """The message and its alternatives, oldest first."""
        parent = self.messages[message].parent
        return [each for each in self.messages.values() if each.parent == parent]

    def subtree(self, root: str) -> Iterator[str]:
        """`root` and all below it. Parents come before children in `messages`, so one pass finds them."""
        inside: set[str] = set()
        for each in self.messages.values():
            if each.message == root or each.parent in inside:
                inside.add(each.message)
                yield each.message

    def last(self, role: str) -> Message | None:
        """The message of that role nearest the active leaf."""
        return next((each for each in reversed(self.path()) if each.role == role), None)
