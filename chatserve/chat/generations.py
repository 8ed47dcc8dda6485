"""All answers being generated: started, gone on with, stopped, ended.

Owns which there are and why each ends. `text_writer` brings their text to the store and `end_writer` their ends.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from chatserve.chat.beginning import make_generation
from chatserve.chat.end_writer import EndWriter
from chatserve.chat.engine_link import EngineLink
from chatserve.chat.generation import GENERATING, Generation
from chatserve.chat.health import StoreHealth
from chatserve.chat.live_session import LiveSession
from chatserve.chat.orphans import Orphans
from chatserve.chat.prompt import PromptEncoder
from chatserve.chat.sessions import Sessions
from chatserve.chat.store import MessageRecord, Store
from chatserve.chat.text_writer import TextWriter
from chatserve.types import FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

MAX_UNSENT_TOKENS: Final = 16_384
"""Tokens of one generation that may wait for a store that is away; past it the generation is interrupted."""


class Generations:
    """Every generation of this process whose message is stored."""

    def __init__(
        self,
        *,
        store: Store,
        sessions: Sessions,
        link: EngineLink,
        encoder: PromptEncoder,
        health: StoreHealth,
        orphans: Orphans,
        resumes: bool,
        watch: Callable[[asyncio.Task[None]], None],
        clock: Callable[[], float],
        monotonic: Callable[[], float],
    ) -> None:
        self._sessions = sessions
        self._link = link
        self._encoder = encoder
        self._health = health
        self._orphans = orphans
        self._resumes = resumes
        self._monotonic = monotonic
        self._live: dict[Generation, LiveSession] = {}
        self.text: Final = TextWriter(store, health, self._live)
        self.ends: Final = EndWriter(sessions, health, self._live, watch=watch, clock=clock)
        self.text.on_written = self.ends.begin
        self.text.on_refused = self._refused
        self.text.on_gone = self.ends.on_gone = self._drop
        self.ends.on_ended = self._forget
        orphans.stop = self._orphan

    def __len__(self) -> int:
        return len(self._live)

    def start(self, live: LiveSession, record: MessageRecord) -> None:
        """Generate a message that is in the tree with status generating and whose path is encoded, or go on with it."""
        generation = make_generation(live, record, self._encoder, on_change=self._on_change, monotonic=self._monotonic)
        assert generation.run is not None
        live.generations[record.message] = generation
        self._live[generation] = live
        self._link.start(generation.run)
        self._orphans.subscribers_changed(live)

    def adopt(self, live: LiveSession) -> None:
        """Start what a turn stored whose write was uncertain until now."""
        for record in live.tree:
            if record.status == GENERATING and record.message not in live.generations:
                self.start(live, record)

    def inherit(self, live: LiveSession) -> None:
        """Go on with what another process left unfinished, or, if we are told so, end it."""
        self.adopt(live)
        if not self._resumes:
            for generation in list(live.generations.values()):
                self.stop(generation, FinishReason.INTERRUPTED)

    def lose(self, live: LiveSession) -> None:
        """Another process has the session, and goes on with what is generated in it."""
        for generation in list(live.generations.values()):
            self._drop(generation)

    def stop(self, generation: Generation, reason: FinishReason) -> None:
        """Ask a generation to end; the first reason counts."""
        assert generation.run is not None
        if generation.reason is None and generation.end is None:
            generation.reason = reason
        self._link.cancel(generation.run, generation.num_kept)

    async def stop_and_wait(self, generations: Iterable[Generation]) -> None:
        """Stop and wait until their ends are published.

        Raises:
            StoreUnavailableError: they are being stopped, but the end cannot be stored now.
        """
        stopping = list(generations)
        for generation in stopping:
            self.stop(generation, FinishReason.CANCELLED)
        for generation in stopping:
            await self._health.while_up(generation.ended.wait())

    async def close(self) -> None:
        """Interrupt everything and wait a little for the ends to be stored."""
        running = list(self._live)
        for generation in running:
            self.stop(generation, FinishReason.INTERRUPTED)
        await asyncio.gather(*(self._health.while_up(g.ended.wait()) for g in running), return_exceptions=True)

    async def all_ended(self) -> None:
        """Wait until nothing is being generated."""
        while self._live:
            await next(iter(self._live)).ended.wait()

    def hand_over(self) -> None:
        """Leave what is being generated as it stands in the store, for others to go on with."""
        for generation in list(self._live):
            self._drop(generation)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _on_change(self, generation: Generation) -> None:
        if generation.is_cut:
            self.stop(generation, FinishReason.STOP)
        elif generation.num_unsent > MAX_UNSENT_TOKENS:
            self.stop(generation, FinishReason.INTERRUPTED)
        self.text.mark(generation)

    def _orphan(self, live: LiveSession) -> None:
        for generation in list(live.generations.values()):
            self.stop(generation, FinishReason.ORPHANED)

    def _refused(self, generation: Generation) -> None:
        """The store took no more of its text."""
        live = self._live.get(generation)
        self._drop(generation)
        if live is not None:
            self.ends.start(self._check_lease(live, generation), "check a lease")

    async def _check_lease(self, live: LiveSession, refused: Generation) -> None:
        await self._health.persist(lambda: self._sessions.tenure.check_lease(live))
        message = refused.message
        if message in live.tree and message not in live.generations and live.tree.get(message).status == GENERATING:
            # The lease is ours, and so was what came in between: a write from before the session was last loaded.
            self._sessions.tenure.read_again(live)

    def _drop(self, generation: Generation) -> None:
        """Its message or session is gone."""
        live = self._live.get(generation)
        if live is None:
            return
        assert generation.run is not None
        self._link.cancel(generation.run, generation.num_kept)
        self._forget(live, generation)

    def _forget(self, live: LiveSession, generation: Generation) -> None:
        if self._live.pop(generation, None) is None:
            return
        if live.generations.get(generation.message) is generation:
            del live.generations[generation.message]
        generation.ended.set()
        if not live.generations:
            self._orphans.forget(live)
