"""A session as its events tell it: what a strict client of `chat.v1` rebuilds from the wire alone.

Written against the protocol's description; knows nothing of the server. Every frame is checked as it is taken in, and
what breaks the protocol raises `ProtocolViolationError` with what came.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, Final

Frame = dict[str, Any]

EVENT_TYPES: Final = {
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
STATUSES: Final = {"done", "generating", "stopped", "interrupted", "failed"}
STATUS_OF_REASON: Final = {
    "stop": "done",
    "length": "done",
    "cancelled": "stopped",
    "orphaned": "stopped",
    "interrupted": "interrupted",
    "error": "failed",
}


class ProtocolViolationError(AssertionError):
    """The server did what `chat.v1` forbids."""


def demand(holds: object, says: str) -> None:
    """Raises:
    ProtocolViolationError: `says`, unless it holds.
    """
    if not holds:
        raise ProtocolViolationError(says)


class Mirror:
    """One session. `keeps_log` keeps every event in `log`, for as long as the mirror lives."""

    def __init__(self, *, keeps_log: bool = True) -> None:
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
        self.num_events = 0
        """Of the numbered events that were taken in, each counted once however many a frame stood for."""
        self._keeps_log = keeps_log
        self._parts: list[Frame] = []

    # --- snapshots ----------------------------------------------------------------------------------------------------

    def load(self, part: Frame) -> bool:
        """Take one frame of a snapshot; True once it is whole."""
        demand(part["part"] == len(self._parts), f"snapshot part {part['part']} came after {len(self._parts)} others")
        self._parts.append(part)
        if not part["last"]:
            return False
        self.seq, self.title, self.system = part["seq"], part["title"], part["system"]
        self.params, self.leaf = part["params"], part["leaf"]
        self.messages = {}
        for frame in self._parts:
            demand(frame["seq"] == self.seq, f"parts of one snapshot have seq {frame['seq']} and {self.seq}")
            for message in frame["messages"]:
                if message.get("append"):  # the rest of a message that fits no frame
                    self.messages[message["message"]]["text"] += message["text"]
                    continue
                parent = message["parent"]
                demand(parent is None or parent in self.messages, f"{message['message']} came before its parent")
                demand(message["status"] in STATUSES, f"an unknown status: {message['status']}")
                self.messages[message["message"]] = dict(message)
        self._parts = []
        self.check()
        return True

    def replace(self, loaded: Mirror) -> None:
        """Go on from a later snapshot. Whatever was shown is still there: a message's text only grows."""
        demand(loaded.seq >= self.seq, f"a snapshot of seq {loaded.seq} came after event {self.seq}")
        for message, known in self.messages.items():
            text = loaded.messages.get(message, known)["text"]
            demand(text.startswith(known["text"]), f"{message} was {known['text']!r} and is {text!r} in the snapshot")
        for name in ("seq", "title", "system", "params", "leaf", "messages"):
            setattr(self, name, getattr(loaded, name))

    # --- events -------------------------------------------------------------------------------------------------------

    def apply(self, event: Frame) -> None:
        """Take in one event."""
        first = event.get("from_seq", event["seq"])
        demand(first == self.seq + 1, f"after seq {self.seq} came {first}: {event}")
        demand(event["seq"] >= first, f"it ends before it begins: {event}")
        demand(not self.deleted, f"an event after session.deleted: {event}")
        self.num_events += event["seq"] - self.seq
        self.seq = event["seq"]
        if self._keeps_log:
            self.log.append(event)
        if event["type"].startswith("generation."):
            self._apply_generation(event)
        else:
            self._apply_change(event)

    def _apply_change(self, event: Frame) -> None:
        match event["type"]:
            case "message.added":
                demand(event["message"] not in self.messages, f"added twice: {event}")
                kept = ("message", "parent", "role", "text", "status")
                self.messages[event["message"]] = {name: event[name] for name in kept}
            case "message.updated":
                self._known(event)["status"] = event["status"]
            case "message.deleted":
                gone = self.subtree(event["message"])
                demand(len(gone) == event["deleted"], f"{len(gone)} messages went: {event}")
                for message in gone:
                    ended = self.messages[message]["status"] != "generating"
                    demand(ended, f"{message} was deleted before its generation ended")
                    del self.messages[message]
            case "branch.selected":
                self.leaf = event["leaf"]
            case "session.updated":
                self.title = event.get("title", self.title)
                self.system = event.get("system", self.system)
                self.params = event.get("params", self.params)
            case "session.deleted":
                running = [m for m, record in self.messages.items() if record["status"] == "generating"]
                demand(not running, f"the session was deleted before {running} ended")
                self.deleted = True

    def _apply_generation(self, event: Frame) -> None:
        message = self._known(event)
        match event["type"]:
            case "generation.queued":
                demand(event["position"] >= 0, f"{event}")
            case "generation.started":
                self.started_times[event["message"]] += 1
                _check_parts(event)
                demand(event["computed_tokens"] >= 1, f"nothing was computed: {event}")
            case "generation.delta":
                demand(message["status"] == "generating", f"a delta for a message that is {message['status']}: {event}")
                demand(event["text"], f"an empty delta: {event}")
                message["text"] += event["text"]
            case "generation.end":
                demand(event["status"] == STATUS_OF_REASON[event["reason"]], f"{event}")
                demand(message["status"] == "generating", f"an end for a message that is {message['status']}: {event}")
                if event["usage"]:
                    _check_parts(event["usage"])
                message["status"] = event["status"]
                self.ended[event["message"]].append(event)

    def _known(self, event: Frame) -> Frame:
        demand(event["message"] in self.messages, f"of a message that is not there: {event}")
        return self.messages[event["message"]]

    # --- reading ------------------------------------------------------------------------------------------------------

    def subtree(self, root: str) -> list[str]:
        """A message and all below it."""
        found = [root]
        for message in found:
            found += self.children(message)
        return found

    def path(self, message: str | None) -> list[Frame]:
        """From the root to a message."""
        path: list[Frame] = []
        while message is not None:
            path.append(self.messages[message])
            message = self.messages[message]["parent"]
        return path[::-1]

    def children(self, parent: str | None) -> list[str]:
        return [m for m, record in self.messages.items() if record["parent"] == parent]

    def status(self, message: str) -> str | None:
        """Of a message; None where it is not there (yet)."""
        found = self.messages.get(message)
        return None if found is None else str(found["status"])

    def has_ended(self, message: str) -> bool:
        return self.status(message) not in {None, "generating"}

    @property
    def is_quiet(self) -> bool:
        """Nothing is being generated."""
        return all(record["status"] != "generating" for record in self.messages.values())

    def check(self) -> None:
        """What holds of every session between two events."""
        demand((self.leaf is None) == (not self.messages), "an empty session alone has no leaf")
        for record in self.messages.values():
            if record["parent"] is None:
                demand(record["role"] == "user", f"a root that is no question: {record}")
            else:
                roles = {record["role"], self.messages[record["parent"]]["role"]}
                demand(roles == {"user", "assistant"}, f"roles do not alternate at {record}")

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


def _check_parts(tokens: Frame) -> None:
    parts = tokens["cached_tokens"] + tokens["swapped_in_tokens"] + tokens["computed_tokens"]
    demand(tokens["prompt_tokens"] == parts, f"a prompt's parts do not add up: {tokens}")
