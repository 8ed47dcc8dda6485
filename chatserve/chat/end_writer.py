"""Ends of generations, each stored by a task of its own, because it changes the tree and waits for the session's lock.

Owns these tasks, for as long as storing an end takes. What is to be stored is the generation's own to say.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec

from chatserve.chat.generation import Generation
from chatserve.chat.sessions import Sessions, with_tree
from chatserve.chat.store import LeaseLostError, OwnedElsewhereError, Transaction
from chatserve.engine.messages import PathRef
from chatserve.errors import NotFoundError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping

    from chatserve.chat.health import StoreHealth
    from chatserve.chat.live_session import LiveSession


class EndWriter:
    """Of the generations in `live`. `watch` is told of each task when it is done."""

    def __init__(
        self,
        sessions: Sessions,
        health: StoreHealth,
        live: Mapping[Generation, LiveSession],
        *,
        watch: Callable[[asyncio.Task[None]], None],
        clock: Callable[[], float],
    ) -> None:
        self._sessions = sessions
        self._health = health
        self._live = live
        self._watch = watch
        self._clock = clock
        self._tasks: set[asyncio.Task[None]] = set()
        self.on_ended: Callable[[LiveSession, Generation], None] = lambda _session, _generation: None
        """Called when the end is stored, before it is published."""
        self.on_gone: Callable[[Generation], None] = lambda _: None
        """Called when its message or session does not exist any more, or is another process's."""

    def begin(self, generation: Generation) -> None:
        """All its text is stored: store its end."""
        generation.is_finishing = True
        self.start(self._finish(generation), f"end of {generation.message}")

    def start(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Something else that comes after the end of a generation's text."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(self._watch)

    def abandon(self) -> None:
        """Cancel the tasks; whoever inherits what is left does their work."""
        for task in self._tasks:
            task.cancel()

    async def _finish(self, generation: Generation) -> None:
        """Store the end of a generation, for as long as that takes."""
        live = self._live[generation]
        while generation in self._live:
            try:
                await self._health.persist(lambda: self._finish_once(live, generation))
                return
            except (NotFoundError, OwnedElsewhereError):
                self.on_gone(generation)
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
                    _remember_path(live, generation, path)
                self.on_ended(live, generation)

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


def _remember_path(live: LiveSession, generation: Generation, path: PathRef) -> None:
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
