"""What people are about to say: their unfinished messages, told to the engine so that it can get ahead of them.

One task for each session in which somebody types. It tells the engine of the latest text only, at most once in
`HINT_EVERY_S`, with the token ids that the finished message will begin with, however it goes on. Everything here is a
favour: what cannot be had (the store or the engine is away, the parent is still being generated) is left out.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from itertools import chain
from typing import TYPE_CHECKING, Final

from chatserve.chat.generation import GENERATING
from chatserve.chat.prompt import NUM_ENDINGS
from chatserve.chat.tree import ASSISTANT
from chatserve.engine.messages import Hint
from chatserve.errors import ChatError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from chatserve.chat.core import Core
    from chatserve.chat.store import MessageRecord
    from chatserve.engine.messages import PathRef
    from chatserve.types import MessageId, SessionId, UserId

log = logging.getLogger(__name__)

HINT_EVERY_S: Final = 0.5
MAX_TYPISTS: Final = 1024
"""Sessions of a process in which somebody may type at once; the one that has been silent longest is forgotten."""
MAX_TYPISTS_PER_USER: Final = 4
MAX_DRAFT_CHARS: Final = 16_384
"""The rest of a longer draft waits for the message: encoding all of it twice a second is worth less than it costs."""


class _Typist:
    """One session in which somebody types."""

    __slots__ = ("base", "latest", "num_shared_tokens", "parent", "system", "task", "user")

    def __init__(self, user: UserId) -> None:
        self.user = user
        self.latest: tuple[MessageId | None, str] | None = None
        """What is to be told next."""
        self.task: asyncio.Task[None] | None = None
        self.parent: MessageId | None = None
        self.base: tuple[int, ...] | None = None
        """Ids up to and with `parent`, once they are known."""
        self.num_shared_tokens = 0
        self.system: str | None = None


class Typing:
    """All drafts of this process's clients."""

    def __init__(self, core: Core, pause: Callable[[], Awaitable[None]] = lambda: asyncio.sleep(HINT_EVERY_S)) -> None:
        """`pause` is awaited between two hints of one session."""
        self._core = core
        self.pause = pause
        self._typists: OrderedDict[SessionId, _Typist] = OrderedDict()

    def typed(self, user: UserId, session: SessionId, parent: MessageId | None, text: str | None) -> None:
        """A person's draft of a message after `parent` is now `text`; nothing: they are about to write one."""
        typist = self._typists.get(session)
        if typist is None:
            if not self._make_room(user):
                return
            typist = self._typists[session] = _Typist(user)
        elif typist.user != user:
            return
        self._typists.move_to_end(session)
        typist.latest = parent, (text or "")[:MAX_DRAFT_CHARS]
        if typist.task is None:
            typist.task = asyncio.create_task(self._tell(session, typist), name=f"typing in {session}")

    def sent(self, user: UserId, session: SessionId) -> None:
        """The user's draft has become a message, which the engine is told of by its turn."""
        if (typist := self._typists.get(session)) is not None and typist.user == user:
            typist.latest = None

    def deleted(self, user: UserId, session: SessionId) -> None:
        """The user has asked for the session's end, whether or not it is theirs."""
        if (typist := self._typists.get(session)) is not None and typist.user == user:
            self.left(session)

    def left(self, session: SessionId) -> None:
        """Nobody looks at the session any more: its draft is not worth having."""
        typist = self._typists.pop(session, None)
        if typist is None:
            return
        if typist.task is not None:
            typist.task.cancel()
        self._send(Hint(user=typist.user, key=session, base=None, token_ids=()))

    async def close(self) -> None:
        """End every task."""
        tasks = [typist.task for typist in self._typists.values() if typist.task is not None]
        self._typists.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _make_room(self, user: UserId) -> bool:
        """Forget who has been silent longest, where one more would be too many. False: all of them type right now, and
        a client that names ever new sessions is not listened to.
        """
        own = [session for session, typist in self._typists.items() if typist.user == user]
        for rivals, most in ((own, MAX_TYPISTS_PER_USER), (list(self._typists), MAX_TYPISTS)):
            if len(rivals) >= most:
                silent = next((session for session in rivals if self._typists[session].task is None), None)
                if silent is None:
                    return False
                self.left(silent)
        return True

    async def _tell(self, session: SessionId, typist: _Typist) -> None:
        """Tell the latest text, and whatever it has become a moment later, until it stays."""
        try:
            while typist.latest is not None:
                (parent, text), typist.latest = typist.latest, None
                hint = await self._hint(session, typist, parent, text)
                if hint is not None:
                    self._send(hint)
                await self.pause()
        except ChatError as error:
            log.debug("no hint for %s: %s", session, error)
        except Exception:
            log.exception("a draft in %s could not be told of", session)  # a favour must not end the process
        finally:
            typist.task = None
            if typist.base is None and self._typists.get(session) is typist:
                del self._typists[session]

    async def _hint(self, session: SessionId, typist: _Typist, parent: MessageId | None, text: str) -> Hint | None:
        """What the engine is to be told; None: nothing can be said of this parent."""
        if (typist.base is None or typist.parent != parent) and not await self._find_base(session, typist, parent):
            return None
        core, base, system = self._core, typist.base, typist.system
        assert base is not None
        num_shared = typist.num_shared_tokens
        draft: tuple[int, ...] = ()
        if parent is None:
            num_chars = NUM_ENDINGS * (len(text) + len(system or ""))
            draft = await core.in_thread(typist.user, num_chars, lambda: core.encoder.encode_root_draft(system, text))
            num_shared = core.encoder.num_shared_tokens(system, draft)
        elif text:
            draft = await core.in_thread(
                typist.user, NUM_ENDINGS * len(text), lambda: core.encoder.encode_turn_draft(text)
            )
        path = self._path(session, typist)
        return Hint(
            user=typist.user,
            key=session,
            base=path,
            token_ids=draft if path is not None else (*base, *draft),
            num_shared_tokens=num_shared,
            num_draft_tokens=len(draft),
        )

    def _path(self, session: SessionId, typist: _Typist) -> PathRef | None:
        """What the engine that runs now holds of the conversation up to the parent, if that is all of it."""
        live = self._core.sessions.peek(typist.user, session)
        info = self._core.link.engine.info
        path = None if live is None or typist.parent is None else live.paths.get(typist.parent)
        if path is None or info is None or path.epoch != info.epoch:
            return None
        return path if path.num_tokens == len(typist.base or ()) else None

    async def _find_base(self, session: SessionId, typist: _Typist, parent: MessageId | None) -> bool:
        """Find the ids of the conversation up to `parent`. False: it is not there, or not finished."""
        core = self._core
        live = core.sessions.peek(typist.user, session)
        state = live.state() if live is not None else await core.store.load(typist.user, session)
        path = None if state is None else _path_of({m.message: m for m in state.messages}, parent)
        if state is None or path is None:
            return False
        system = state.record.system
        encoded = await core.encode(typist.user, system, path)
        path = [encoded.get(m.message, m) for m in path]
        typist.parent, typist.system = parent, system
        typist.base = tuple(chain.from_iterable(m.token_ids for m in path))
        typist.num_shared_tokens = core.encoder.num_shared_tokens(system, path[0].token_ids) if path else 0
        return True

    def _send(self, hint: Hint) -> None:
        try:
            self._core.link.engine.hint(hint)
        except ChatError:
            log.debug("the engine is away: it gets no hint")


def _path_of(messages: dict[MessageId, MessageRecord], parent: MessageId | None) -> list[MessageRecord] | None:
    """From the root to `parent`, which is a finished answer; None where there is no such path."""
    path: list[MessageRecord] = []
    at = parent
    while at is not None:
        record = messages.get(at)
        if record is None or record.status == GENERATING or (not path and record.role != ASSISTANT):
            return None
        path.append(record)
        at = record.parent
    return path[::-1]
