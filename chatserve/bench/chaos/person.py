"""One simulated user: a seeded stream of everything that people do, each acknowledgement written down.

Owns a user's sessions, one line to act through and perhaps a second tab that only looks on. A request is done when it
is acknowledged; whatever then turns out otherwise is a fault of the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import TYPE_CHECKING, Any, Final

from chatserve.bench.chaos.client import RequestFailedError
from chatserve.bench.chaos.ledger import Ledger
from chatserve.bench.chaos.line import Line
from chatserve.bench.chaos.mirror import Frame, Mirror, ProtocolViolationError, demand

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from chatserve.bench.chaos.tally import Tally

_MOST_SESSIONS: Final = 4
_WORDS: Final = (
    "why",
    "do",
    "birds",
    "sing",
    "雨",
    "🌧️",
    "tell",
    "me",
    "<|im_end|>",
    "café",
    "👩\u200d👩\u200d👧",
    "again",
)
_SAMPLING: Final = {"temperature": 1.0, "top_p": 1.0}
"""Random, and without sorting the vocabulary for each token, which would take most of a small model's time."""
_WELL_TIMED: Final = {"busy", "conflict", "not_found", "context_overflow"}
"""Refusals that a user may meet who acts on what he saw a moment ago."""


class Person:
    """`live` acts until it is cancelled or told to `rest`; `settle` then waits for what is still being said."""

    def __init__(
        self, name: str, token: str, urls: Sequence[str], seed: str, tally: Tally, *, pause_s: float, watches: bool
    ) -> None:
        self.name = name
        self.token = token
        self._choose = random.Random(seed)
        self._tally = tally
        self._pause_s = pause_s
        self.line = Line(urls, token, random.Random(f"{seed} line"), tally)
        self.watcher = Line(urls, token, random.Random(f"{seed} watcher"), tally) if watches else None
        self.ledgers: dict[str, Ledger] = {}
        self._resting = False
        self._watching: set[asyncio.Task[Any]] = set()
        self._actions: tuple[tuple[int, Callable[[str, Mirror], Awaitable[None]]], ...] = (
            (10, self._send),
            (3, self._regenerate),
            (3, self._edit),
            (2, self._continue),
            (3, self._select),
            (2, self._rename),
            (2, self._fork),
            (2, self._delete_message),
            (1, self._delete_session),
            (2, self._type),
            (2, self._list),
            (1, self._hang_up),
        )

    @property
    def lines(self) -> tuple[Line, ...]:
        return (self.line,) if self.watcher is None else (self.line, self.watcher)

    def mirror(self, session: str) -> Mirror:
        return self.line.mirrors[session]

    async def live(self) -> None:
        """Act, one thing after the other, until told to rest.

        Raises:
            ProtocolViolationError: the server broke a promise.
        """
        await self._create()
        weights = [weight for weight, _ in self._actions]
        while not self._resting:
            await asyncio.sleep(self._choose.expovariate(1 / self._pause_s))
            session = self._choose.choice(list(self.ledgers)) if self.ledgers else None
            if session is None or (len(self.ledgers) < _MOST_SESSIONS and self._choose.random() < 0.1):
                await self._create()
                continue
            [(_, act)] = self._choose.choices(self._actions, weights)
            try:
                await act(session, self.mirror(session))
            except RequestFailedError as error:
                if error.code not in _WELL_TIMED:
                    raise ProtocolViolationError(f"{self.name}: {act.__name__} was refused: {error}") from error

    def rest(self) -> None:
        """End `live` after what is being done now."""
        self._resting = True

    async def settle(self) -> None:
        """Wait until every answer has ended and every tab has seen all of it."""
        await asyncio.gather(*self._watching)
        for session in self.ledgers:
            await self._settle(session)

    async def _settle(self, session: str) -> None:
        mirror = await self.line.open(session)
        await self.line.until(lambda: mirror.is_quiet, f"the end of an answer in {session}")
        if self.watcher is not None:
            seen = await self.watcher.open(session)
            await self.watcher.until(lambda: seen.seq >= mirror.seq, f"event {mirror.seq} of {session} in a second tab")
            demand(seen.tree() == mirror.tree(), f"two tabs of {self.name} differ in {session}")

    # --- what people do -----------------------------------------------------------------------------------------------

    async def _create(self) -> None:
        title = self._words(3) if self._choose.random() < 0.5 else ""
        system = self._words(8) if self._choose.random() < 0.3 else None
        ack = await self.line.request("session.create", title=title, system=system, params=_SAMPLING)
        session = ack["session"]
        self.ledgers[session] = Ledger(title or None)
        await self._follow(session)

    async def _follow(self, session: str) -> None:
        await self.line.open(session)
        if self.watcher is not None:
            task = asyncio.create_task(self._watch(self.watcher, session))
            self._watching.add(task)
            task.add_done_callback(self._watching.discard)

    async def _watch(self, watcher: Line, session: str) -> None:
        try:
            await watcher.open(session)
        except RequestFailedError as error:
            demand(session in watcher.gone, f"the second tab was refused: {error}")

    async def _send(self, session: str, mirror: Mirror) -> None:
        answers = [m for m, record in mirror.messages.items() if record["role"] == "assistant"]
        parent = mirror.leaf if self._choose.random() < 0.7 else self._choose.choice([None, *answers])
        if parent is not None and mirror.messages[parent]["role"] == "user":
            parent = None
        text = self._words(self._choose.randrange(1, 40))
        ack = await self.line.request("message.send", session=session, parent=parent, text=text, params=self._params())
        self.ledgers[session].asked(ack["message"], parent, text, ack["reply"])
        await self._attend(session, ack["reply"])

    async def _regenerate(self, session: str, mirror: Mirror) -> None:
        message = self._pick(mirror)
        if message is None:
            return
        question = message["message"] if message["role"] == "user" else message["parent"]
        ack = await self.line.request(
            "message.regenerate", session=session, message=message["message"], params=self._params()
        )
        self.ledgers[session].answered(ack["reply"], question)
        await self._attend(session, ack["reply"])

    async def _edit(self, session: str, mirror: Mirror) -> None:
        message = self._pick(mirror, role="user")
        if message is None:
            return
        text = self._words(self._choose.randrange(1, 10))
        ack = await self.line.request(
            "message.edit", session=session, message=message["message"], text=text, params=self._params()
        )
        self.ledgers[session].asked(ack["message"], message["parent"], text, ack["reply"])
        await self._attend(session, ack["reply"])

    async def _continue(self, session: str, mirror: Mirror) -> None:
        message = self._pick(mirror, role="assistant")
        if message is None:
            return
        reply = message["message"]
        ack = await self.line.request(
            "message.continue", session=session, message=reply, params={"max_tokens": self._choose.randrange(1, 40)}
        )
        demand(ack["reply"] == reply, f"another message is continued: {ack}")
        await self._attend(session, reply)

    async def _select(self, session: str, mirror: Mirror) -> None:
        message = self._pick(mirror)
        if message is not None:
            await self.line.request("branch.select", session=session, message=message["message"])

    async def _rename(self, session: str, _mirror: Mirror) -> None:
        title = self._words(3)
        await self.line.request("session.update", session=session, title=title)
        self.ledgers[session].title = title

    async def _fork(self, session: str, mirror: Mirror) -> None:
        ended = [m for m in mirror.messages.values() if m["role"] == "assistant" and m["status"] != "generating"]
        if not ended or len(self.ledgers) >= _MOST_SESSIONS:
            return
        message = self._choose.choice(ended)["message"]
        ack = await self.line.request("session.fork", session=session, message=message)
        forked, ledger = ack["session"], Ledger(None)
        self.ledgers[forked] = ledger
        await self._follow(forked)
        ledger.forked(mirror, message, self.mirror(forked), self.ledgers[session].title)

    async def _delete_message(self, session: str, mirror: Mirror) -> None:
        message = self._pick(mirror)
        if message is not None:
            ack = await self.line.request("message.delete", session=session, message=message["message"])
            self.ledgers[session].deleted(message["message"], ack["deleted"])

    async def _delete_session(self, session: str, _mirror: Mirror) -> None:
        for line in self.lines:
            line.gone.add(session)
        await self.line.request("session.delete", session=session)
        del self.ledgers[session]

    async def _type(self, session: str, mirror: Mirror) -> None:
        await self.line.notify("typing", session=session, parent=mirror.leaf, text=self._words(20))

    async def _list(self, _session: str, _mirror: Mirror) -> None:
        listed = await self.listed()
        demand(listed == self.ledgers.keys(), f"{self.name} has {set(self.ledgers)}, and the list says {listed}")

    async def listed(self) -> set[str]:
        """The sessions that the server says this user has. In one page: the order changes while answers end."""
        page = await self.line.request("session.list", limit=100)
        return {row["session"] for row in page["sessions"]}

    async def _hang_up(self, _session: str, _mirror: Mirror) -> None:
        self._choose.choice(self.lines).cut()

    async def _attend(self, session: str, reply: str) -> None:
        """See an answer through, stop it at some point, or go and do something else."""
        mood = self._choose.random()
        if mood < 0.4:
            mirror = self.mirror(session)
            await self.line.until(lambda: mirror.has_ended(reply), f"the end of {reply}")
        elif mood < 0.7:
            await asyncio.sleep(self._choose.random() * self._pause_s)
            with contextlib.suppress(RequestFailedError):
                await self.line.request("generation.stop", session=session, message=reply)

    # --- choices ------------------------------------------------------------------------------------------------------

    def _pick(self, mirror: Mirror, role: str | None = None) -> Frame | None:
        found = [m for m in mirror.messages.values() if role in {None, m["role"]}]
        return self._choose.choice(found) if found else None

    def _params(self) -> dict[str, Any]:
        params: dict[str, Any] = {"max_tokens": self._choose.choice((1, 4, 12, 40, 100))}
        if self._choose.random() < 0.5:
            params["seed"] = self._choose.getrandbits(31)
        if self._choose.random() < 0.2:
            params["stop"] = [self._choose.choice(("e", "the", " a", "。"))]
        return params

    def _words(self, count: int) -> str:
        return " ".join(self._choose.choices(_WORDS, k=count))
