"""The one task through which generated text reaches the store.

Whatever has settled in all sessions since the last write goes out in one pipelined `append`. While the store is away
text gathers in memory, bounded a generation, and is written when it is back. What the store has taken is shown. Which
generations there are, and what becomes of them, is for `generations` to say.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from chatserve.chat.events import AnyEvent, GenerationDelta
from chatserve.chat.generation import Generation
from chatserve.chat.store import Delta, LeaseLostError, Store, Transaction
from chatserve.errors import NotFoundError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from chatserve.chat.health import StoreHealth
    from chatserve.chat.live_session import LiveSession

FEW_GENERATIONS: Final = 8
REST: Final = 4.0
"""How many times as long as it took to write many the writer rests …"""
LONGEST_REST_S: Final = 0.03
"""… but no longer than a reader would notice."""


class TextWriter:
    """Of the generations in `live`, those that have been `mark`ed."""

    def __init__(self, store: Store, health: StoreHealth, live: Mapping[Generation, LiveSession]) -> None:
        self._store = store
        self._health = health
        self._live = live
        self._dirty: dict[Generation, None] = {}
        self._wake = asyncio.Event()
        self.on_written: Callable[[Generation], None] = lambda _: None
        """Called when all that it had to say is stored, and no more will come."""
        self.on_refused: Callable[[Generation], None] = lambda _: None
        """Called when the store took no more of its text."""
        self.on_gone: Callable[[Generation], None] = lambda _: None
        """Called when its message or session does not exist any more."""

    def mark(self, generation: Generation) -> None:
        """It has something to write, or has come to its end."""
        self._dirty[generation] = None
        self._wake.set()

    async def run(self) -> None:
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
                    self.on_refused(generation)
        for generation in batch:
            # What came while we were writing is written first, in the next round: it has marked itself.
            if generation.is_ready_to_finish and generation in self._live:
                self.on_written(generation)

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
            self.on_gone(generation)
            return
        except LeaseLostError:
            self.on_refused(generation)
            return

        def apply() -> None:
            if started is not None and started.message in live.tree:
                live.tree.apply(live.tree.replace(started))

        live.deliver(committed.first_seq, events, apply)

    def _deliver(self, generation: Generation, delta: Delta, seq: int) -> None:
        live = self._live[generation]
        event: AnyEvent = GenerationDelta(session=delta.session, message=delta.message, text=delta.text)
        live.deliver(seq, [event], lambda: generation.stored(delta))
