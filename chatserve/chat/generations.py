"""All answers being generated: started, written to the store step by step, stopped, ended.

Owns the writer, the one task through which generated text reaches the store: whatever has settled in all sessions since
its last write goes out in one pipelined `append`. While the store is away text gathers in memory, bounded a generation,
and is written when it is back. Ends are written one task each, because they change the tree and wait for the session's
lock.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

import msgspec

from chatserve.chat.beginning import make_generation
from chatserve.chat.engine_link import EngineLink
from chatserve.chat.events import AnyEvent, GenerationDelta
from chatserve.chat.generation import GENERATING, Generation
from chatserve.chat.health import StoreHealth
from chatserve.chat.live_session import LiveSession
from chatserve.chat.orphans import Orphans
from chatserve.chat.prompt import PromptEncoder
from chatserve.chat.sessions import Sessions, with_tree
from chatserve.chat.store import Delta, LeaseLostError, MessageRecord, OwnedElsewhereError, Store, Transaction
from chatserve.engine.messages import PathRef
from chatserve.errors import NotFoundError
from chatserve.types import FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

log = logging.getLogger(__name__)

MAX_UNSENT_TOKENS: Final = 16_384
"""Tokens of one generation that may wait for a store that is away; past it the generation is interrupted."""


FEW_GENERATIONS: Final = 8
REST: Final = 4.0
"""How many times as long as it took to write many the writer rests …"""
LONGEST_REST_S: Final = 0.03
"""… but no longer than a reader would notice."""


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
        self._store = store
        self._sessions = sessions
        self._link = link
        self._encoder = encoder
        self._health = health
        self._orphans = orphans
        self._resumes = resumes
        self._watch = watch
        self._clock = clock
        self._monotonic = monotonic
        self._dirty: dict[Generation, None] = {}
        self._wake = asyncio.Event()
        self._ending: set[asyncio.Task[None]] = set()
        self._live: dict[Generation, LiveSession] = {}
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

    # --- the writer ---------------------------------------------------------------------------------------------------

    async def write(self) -> None:
        """Write what the generations produce, for ever. One that writes alone is written at once; the more there are,
        the more of each is written together, so that the store and we have time for others.
        """
        loop = asyncio.get_running_loop()
        while True:
            await self._wake.wait()
            self._wake.clear()
            batch, self._dirty = list(self._dirty), {}
            began = loop.time()
            await self._write(batch)
            if len(batch) >= FEW_GENERATIONS:
                await asyncio.sleep(min(REST * (loop.time() - began), LONGEST_REST_S))

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

    def abandon(self) -> None:
        """Cancel the tasks that write ends; whoever inherits what is left does their work."""
        for task in self._ending:
            task.cancel()

    def _on_change(self, generation: Generation) -> None:
        if generation.is_cut:
            self.stop(generation, FinishReason.STOP)
        elif generation.num_unsent > MAX_UNSENT_TOKENS:
            self.stop(generation, FinishReason.INTERRUPTED)
        self._dirty[generation] = None
        self._wake.set()

    async def _write(self, batch: Sequence[Generation]) -> None:
        batch = [generation for generation in batch if generation in self._live]
        noticed = [generation for generation in batch if generation.notices]
        if noticed:
            await asyncio.gather(*map(self._write_notices, noticed))
        deltas = [(generation, delta) for generation in batch if (delta := generation.take_delta()) is not None]
        if deltas:
            seqs = await self._health.persist(lambda: self._store.append([delta for _, delta in deltas]))
            for (generation, delta), seq in zip(deltas, seqs, strict=True):
                if seq is not None and generation in self._live:
                    self._deliver(generation, delta, seq)
                else:
                    self._refused(generation)
        for generation in batch:
            # What came while we were writing is written first, in the next round: it has marked itself.
            if generation.is_ready_to_finish and generation in self._live:
                generation.is_finishing = True
                task = asyncio.create_task(self._finish(generation), name=f"end of {generation.message}")
                self._ending.add(task)
                task.add_done_callback(self._ending.discard)
                task.add_done_callback(self._watch)

    async def _write_notices(self, generation: Generation) -> None:
        events, generation.notices = tuple(generation.notices), []
        live = self._live.get(generation)
        if live is None:
            return
        number, generation.num_notice_writes = generation.num_notice_writes, generation.num_notice_writes + 1
        started = generation.take_started(live.tree.get(generation.message))
        change = Transaction(
            user=generation.user,
            session=generation.session,
            puts=() if started is None else (started,),
            events=events,
            write_id=f"notice:{generation.message}:{generation.attempt}.{generation.fence}:{number}",
            fence=generation.fence,
        )
        try:
            committed = await self._health.persist(lambda: self._store.commit(change))
        except NotFoundError:
            self._drop(generation)
            return
        except LeaseLostError:
            self._refused(generation)
            return

        def apply() -> None:
            if started is not None and started.message in live.tree:
                live.tree.apply(live.tree.replace(started))

        live.deliver(committed.first_seq, events, apply)

    def _deliver(self, generation: Generation, delta: Delta, seq: int) -> None:
        live = self._live[generation]
        event: AnyEvent = GenerationDelta(session=delta.session, message=delta.message, text=delta.text)
        live.deliver(seq, [event], lambda: generation.stored(delta))

    async def _finish(self, generation: Generation) -> None:
        """Store the end of a generation, for as long as that takes."""
        live = self._live[generation]
        while generation in self._live:
            try:
                await self._health.persist(lambda: self._finish_once(live, generation))
                return
            except (NotFoundError, OwnedElsewhereError):
                self._drop(generation)
            except LeaseLostError:
                continue  # it was dropped with the session, unless it has been taken back at once

    async def _finish_once(self, live: LiveSession, generation: Generation) -> None:
        async with self._sessions.changing(live.user, live.session) as current:
            if generation not in self._live:
                return  # lost while we waited
            assert current is live, "a session with a generation stays in memory"
            record, event, path = generation.finished(live.tree.get(generation.message))
            change = live.tree.replace(record)
            session = with_tree(live.record, leaf=change.leaf, root_child=change.root_child, now=self._clock())

            def apply() -> None:
                live.tree.apply(change)
                live.record = session
                if path is not None:
                    self._remember_path(live, generation, path)
                self._forget(live, generation)

            await self._sessions.commit(
                live,
                Transaction(
                    user=live.user,
                    session=live.session,
                    record=session,
                    puts=change.puts,
                    events=(event,),
                    write_id=f"end:{generation.message}:{generation.attempt}",
                ),
                apply,
            )

    def _remember_path(self, live: LiveSession, generation: Generation, path: PathRef) -> None:
        """The next turn starts from this answer, a regenerated one from its question."""
        run = generation.run
        parent = live.tree.get(generation.message).parent
        assert run is not None
        assert parent is not None
        question = live.tree.path(parent)
        root_ids = question[0].token_ids
        if run.prompt_ids[: len(root_ids)] != root_ids:
            return  # the system prompt was changed and the root encoded again meanwhile; no other message ever is
        num_tokens = sum(len(message.token_ids) for message in question)
        live.paths[generation.message] = path
        live.paths[parent] = msgspec.structs.replace(path, num_tokens=min(path.num_tokens, num_tokens))

    def _orphan(self, live: LiveSession) -> None:
        for generation in list(live.generations.values()):
            self.stop(generation, FinishReason.ORPHANED)

    def _refused(self, generation: Generation) -> None:
        """The store took no more of its text."""
        live = self._live.get(generation)
        self._drop(generation)
        if live is not None:
            task = asyncio.create_task(self._check_lease(live, generation), name="check a lease")
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)
            task.add_done_callback(self._watch)

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
