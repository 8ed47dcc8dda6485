"""One session in memory: the tree, the number of the last event, and what is being generated.

A `LiveSession` is what its lease's holder knows of a session as of the last event it delivered. All changes go through
the store first; `deliver` then applies and publishes them in the order of their numbers, whichever write returned
first. So memory, snapshots and subscribers agree at every moment. Knows no prompts, and of the engine only the paths
that it holds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Final

import msgspec

from chatserve.chat.events import AnyEvent, GenerationDelta, GenerationEnd, GenerationQueued, GenerationStarted
from chatserve.chat.forgetting import Branch
from chatserve.chat.store import LeaseLostError, SessionState
from chatserve.chat.tree import Tree
from chatserve.engine.messages import PathRef
from chatserve.types import MessageId, SessionId, UserId

if TYPE_CHECKING:
    from chatserve.chat.generation import Generation

Publish = Callable[[UserId, SessionId, Sequence[AnyEvent]], None]

_TOLD_BY_WRITER: Final = (GenerationQueued, GenerationStarted, GenerationDelta)
"""Events that are written without a session's lock, again and again until their number is known."""


class LiveSession:
    """One session. Whoever plans a change of the tree holds `lock` until it is applied."""

    def __init__(self, state: SessionState, publish: Publish) -> None:
        self.fence: Final = state.fence
        self.record = state.record
        self.tree = _tree(state)
        self.seq = state.seq
        """Of the last event that was applied and published."""
        self.lock = asyncio.Lock()
        self.generations: dict[MessageId, Generation] = {}
        self.paths: dict[MessageId, PathRef] = {}
        """What the engine holds of the prompt up to and with a message, or of its beginning."""
        self.is_uncertain = False
        """A write failed in a way that leaves open whether it was done."""
        self.is_deleted = False
        self.is_lost = False
        """Its lease is another's: nothing here is true any more, and nothing can be written."""
        self.num_subscribers = 0
        self._committing: set[asyncio.Future[None]] = set()
        self._publish = publish
        self._early: dict[int, tuple[list[AnyEvent], Callable[[], None]]] = {}

    @property
    def session(self) -> SessionId:
        return self.record.session

    @property
    def user(self) -> UserId:
        return self.record.user

    @property
    def is_idle(self) -> bool:
        in_use = self.generations or self.num_subscribers or self.lock.locked()
        return not (in_use or self._early or self.is_uncertain)

    def state(self) -> SessionState:
        """The session as of `seq`, with the text generated so far."""
        messages = tuple(
            generation.as_stored(record)
            if (generation := self.generations.get(record.message)) and not generation.is_told
            else record
            for record in self.tree
        )
        return SessionState(record=self.record, seq=self.seq, messages=messages)

    def deliver(self, first_seq: int, events: Sequence[AnyEvent], apply: Callable[[], None]) -> None:
        """Apply and publish a stored change, as soon as every one before it has been. Where the lease is another's by
        now nothing is: who follows is told by what the store has.
        """
        if self.is_lost:
            return
        if not events:
            apply()
            return
        numbered = [msgspec.structs.replace(event, seq=first_seq + i) for i, event in enumerate(events)]
        self._early[first_seq] = numbered, apply
        self._catch_up()

    async def delivered(self, first_seq: int, events: Sequence[AnyEvent], apply: Callable[[], None]) -> None:
        """`deliver`, and wait until it has happened.

        Raises:
            LeaseLostError: it never will: events before it are another's, or were dropped with the lease.
        """
        if self.is_lost:
            raise LeaseLostError
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def apply_and_note() -> None:
            apply()
            if not done.done():
                done.set_result(None)

        self._committing.add(done)
        try:
            self.deliver(first_seq, events, apply_and_note)
            await done
        finally:
            self._committing.discard(done)

    def lose(self) -> None:
        """The lease is another's."""
        self.is_lost = True
        self._early.clear()
        for done in self._committing:
            if not done.done():
                done.set_exception(LeaseLostError())

    def _catch_up(self) -> None:
        while self._early and (first := min(self._early)) <= self.seq + 1:
            events, apply = self._early.pop(first)
            new = [event for event in events if event.seq > self.seq]
            self.seq = max(self.seq, events[-1].seq)
            apply()
            if new:
                self._publish(self.user, self.session, new)

    def reload(self, state: SessionState, missed: Sequence[AnyEvent] | None) -> None:
        """Take over the store's view after an uncertain write, and publish the events it turns out to have made.

        Text is left to its writer, who tries until it knows; what comes after it waits for it. The end of a generation
        is not: its writer needs the lock, which whoever waits for a later event would hold. `missed` is None where the
        store has trimmed them: whoever missed them gets a snapshot when it reconnects.
        """
        if missed is None:
            self.seq = max(self.seq, state.seq)
        for event in missed or ():
            if event.seq > self.seq and not isinstance(event, _TOLD_BY_WRITER):
                self._early.setdefault(event.seq, ([event], partial(self._note_told, event)))
        self.record = state.record
        self.tree = _tree(state)
        self._catch_up()
        self.is_uncertain = False

    def _note_told(self, event: AnyEvent) -> None:
        if isinstance(event, GenerationEnd) and (generation := self.generations.get(event.message)) is not None:
            generation.is_told = True

    def forget_paths(self, messages: Iterable[MessageId]) -> tuple[PathRef, ...]:
        """Take out what the engine holds of messages that are gone, and whatever else has the same handle."""
        gone = tuple(self.paths[message] for message in messages if message in self.paths)
        handles = {(path.epoch, path.handle) for path in gone}
        self.paths = {m: path for m, path in self.paths.items() if (path.epoch, path.handle) not in handles}
        return gone

    def branches(self, messages: Iterable[MessageId]) -> list[Branch]:
        """The conversation up to each of these messages that nothing follows."""
        return [
            Branch(self.paths.get(message), tuple(chain.from_iterable(m.token_ids for m in self.tree.path(message))))
            for message in messages
            if not self.tree.children(message)
        ]

    def check(self) -> None:
        self.tree.check()
        for message, generation in self.generations.items():
            assert message in self.tree
            assert generation.message == message
        assert all(seq > self.seq for seq in self._early)


def _tree(state: SessionState) -> Tree:
    return Tree(state.messages, leaf=state.record.leaf, root_child=state.record.root_child)
