"""What one conversation must be, going by the acknowledgements alone.

Knows no sockets. A session that is read back is held against it with `compare`.
"""

from __future__ import annotations

from typing import NamedTuple

from chatserve.bench.chaos.mirror import Mirror, demand


class Promised(NamedTuple):
    """A message that was acknowledged. `text` is None of an answer, which nobody knows beforehand."""

    parent: str | None
    role: str
    text: str | None


class Ledger:
    """One session's acknowledged changes."""

    def __init__(self, title: str | None) -> None:
        self.title = title
        """None: the server's own choice."""
        self.messages: dict[str, Promised] = {}

    def asked(self, message: str, parent: str | None, text: str, reply: str) -> None:
        """A question and its answer were promised."""
        self.messages[message] = Promised(parent, "user", text)
        self.answered(reply, message)

    def answered(self, reply: str, question: str) -> None:
        """One more answer was promised."""
        demand(reply not in self.messages, f"{reply} was acknowledged as new twice")
        self.messages[reply] = Promised(question, "assistant", None)

    def deleted(self, root: str, count: int) -> None:
        """A subtree was deleted, of `count` messages as the server says."""
        gone = [root]
        for message in gone:
            gone += [m for m, promised in self.messages.items() if promised.parent == message]
        demand(len(gone) == count, f"{count} messages were deleted with {root}, and {len(gone)} stood there")
        for message in gone:
            del self.messages[message]

    def forked(self, source: Mirror, message: str, copy: Mirror, title: str | None) -> None:
        """A new session holds the path of `source` to `message`."""
        path, copied = source.path(message), list(copy.messages.values())
        self.title = title
        demand([m["role"] for m in copied] == [m["role"] for m in path], f"a fork at {message} holds other messages")
        for old, new in zip(path, copied, strict=True):
            # An answer that was continued just before may be ahead of what this client has seen of it.
            same = new["text"] == old["text"] or (old is path[-1] and new["text"].startswith(old["text"]))
            demand(same, f"a fork at {message} says {new['text']!r} for {old['text']!r}")
        for found in copied:
            text = found["text"] if found["role"] == "user" else None
            self.messages[found["message"]] = Promised(found["parent"], found["role"], text)

    def compare(self, session: str, stored: Mirror) -> None:
        """Every message that was acknowledged is there, once, and nothing else is."""
        lost, extra = self.messages.keys() - stored.messages.keys(), stored.messages.keys() - self.messages.keys()
        demand(not lost, f"lost from {session}: {[(m, self.messages[m]) for m in lost]}")
        demand(not extra, f"in {session}, and never acknowledged: {[stored.messages[m] for m in extra]}")
        for message, promised in self.messages.items():
            found = stored.messages[message]
            where = (found["parent"], found["role"])
            demand(where == (promised.parent, promised.role), f"{message} of {session} is not where it was put")
            if promised.text is not None:
                demand(found["text"] == promised.text, f"{message} of {session} is not what was sent: {found}")
        if self.title is not None:
            demand(stored.title == self.title, f"{session} is called {stored.title!r}, not {self.title!r}")
