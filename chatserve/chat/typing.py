"""What people are about to say: their unfinished messages, told to the engine so that it can get ahead of them.

One task for each user and session in which they type. It tells the engine of the latest text only, at most once in
`HINT_EVERY_S`, with the token ids that the finished message will begin with, however it goes on. Everything here is a
favour: what cannot be had (the store or the engine is away, the parent is still being generated) is left out.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
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
MAX_BASE_BYTES: Final = 32 << 20
"""Token ids of conversations that are kept in all, beside one; more are found again when their writers go on."""
MAX_TYPISTS_PER_USER: Final = 4
MAX_DRAFT_CHARS: Final = 16_384
"""The rest of a longer draft waits for the message: encoding all of it twice a second is worth less than it costs."""


class _Typist:
    """A user who types in a session."""

    __slots__ = ("base", "is_told", "latest", "num_shared_tokens", "parent", "system", "task")

    def __init__(self) -> None:
        self.latest: tuple[MessageId | None, str] | None = None
        """What is to be told next."""
        self.task: asyncio.Task[None] | None = None
        self.parent: MessageId | None = None
        self.base: array[int] | None = None
        """Ids up to and with `parent`, where they are known and there is room for them."""
        self.is_told = False
        """The engine knows of the draft."""
        self.num_shared_tokens = 0
        self.system: str | None = None


class Typing:
    """All drafts of this process's clients."""

    def __init__(self, core: Core, pause: Callable[[], Awaitable[None]] = lambda: asyncio.sleep(HINT_EVERY_S)) -> None:
        """`pause` is awaited between two hints of one session."""
        self._core = core
        self.pause = pause
        self._typists: OrderedDict[tuple[UserId, SessionId], _Typist] = OrderedDict()
        """Whoever typed last comes last. A user who names another's session is there too, for a moment."""
        self._num_base_bytes = 0

    def typed(self, user: UserId, session: SessionId, parent: MessageId | None, text: str | None) -> None:
        """A person's draft of a message after `parent` is now `text`; nothing: they are about to write one."""
        typist = self._typists.get((user, session))
        if typist is None:
            if not self._make_room(user):
                return
            typist = self._typists[user, session] = _Typist()
        self._typists.move_to_end((user, session))
        typist.latest = parent, (text or "")[:MAX_DRAFT_CHARS]
        if typist.task is None:
            typist.task = asyncio.create_task(self._tell(user, session, typist), name=f"typing in {session}")

    def sent(self, user: UserId, session: SessionId) -> None:
        """The user's draft has become a message, which the engine is told of by its turn."""
        if (typist := self._typists.get((user, session))) is not None:
            typist.latest = None

    def deleted(self, user: UserId, session: SessionId) -> None:
        """The user has asked for the session's end, whether or not it is theirs."""
        self._forget(user, session)

    def left(self, session: SessionId) -> None:
        """Nobody looks at the session any more: its draft is not worth having."""
        for user in [user for user, named in self._typists if named == session]:
            self._forget(user, session)

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
        own = [key for key in self._typists if key[0] == user]
        for rivals, most in ((own, MAX_TYPISTS_PER_USER), (list(self._typists), MAX_TYPISTS)):
            if len(rivals) >= most:
                silent = next((key for key in rivals if self._typists[key].task is None), None)
                if silent is None:
                    return False
                self._forget(*silent)
        return True

    def _forget(self, user: UserId, session: SessionId) -> None:
        typist = self._typists.pop((user, session), None)
        if typist is None:
            return
        if typist.task is not None:
            typist.task.cancel()
        self._keep(typist, None)
        self._send(Hint(user=user, key=session, base=None, token_ids=()))

    def _keep(self, typist: _Typist, base: array[int] | None) -> None:
        """Keep these ids for a typist, and of others' no more than there is room for: theirs are let go first who have
        typed least lately.
        """
        for each, kept in ((typist.base, -1), (base, 1)):
            if each is not None:
                self._num_base_bytes += kept * each.itemsize * len(each)
        typist.base = base
        if base is not None and self._num_base_bytes > MAX_BASE_BYTES:
            for other in self._typists.values():
                if other is not typist:
                    self._keep(other, None)
                if self._num_base_bytes <= MAX_BASE_BYTES:
                    return

    async def _tell(self, user: UserId, session: SessionId, typist: _Typist) -> None:
        """Tell the latest text, and whatever it has become a moment later, until it stays."""
        try:
            while typist.latest is not None:
                (parent, text), typist.latest = typist.latest, None
                hint = await self._hint(user, session, typist, parent, text)
                if hint is not None:
                    typist.is_told = True
                    self._send(hint)
                await self.pause()
        except ChatError as error:
            log.debug("no hint for %s: %s", session, error)
        except Exception:
            log.exception("a draft in %s could not be told of", session)  # a favour must not end the process
        finally:
            typist.task = None
            if not typist.is_told and self._typists.get((user, session)) is typist:
                del self._typists[user, session]

    async def _hint(
        self, user: UserId, session: SessionId, typist: _Typist, parent: MessageId | None, text: str
    ) -> Hint | None:
        """What the engine is to be told; None: nothing can be said of this parent."""
        if (typist.base is None or typist.parent != parent) and not await self._find_base(
            user, session, typist, parent
        ):
            return None
        core, base, system = self._core, typist.base, typist.system
        assert base is not None
        num_shared = typist.num_shared_tokens
        draft: tuple[int, ...] = ()
        if parent is None:
            num_chars = NUM_ENDINGS * (len(text) + len(system or ""))
            draft = await core.in_thread(user, num_chars, lambda: core.encoder.encode_root_draft(system, text))
            num_shared = core.encoder.num_shared_tokens(system, draft)
        elif text:
            draft = await core.in_thread(user, NUM_ENDINGS * len(text), lambda: core.encoder.encode_turn_draft(text))
        path = self._path(user, session, typist)
        return Hint(
            user=user,
            key=session,
            base=path,
            token_ids=draft if path is not None else (*base, *draft),
            num_shared_tokens=num_shared,
            num_draft_tokens=len(draft),
        )

    def _path(self, user: UserId, session: SessionId, typist: _Typist) -> PathRef | None:
        """What the engine that runs now holds of the conversation up to the parent, if that is all of it."""
        live = self._core.sessions.peek(user, session)
        info = self._core.link.engine.info
        path = None if live is None or typist.parent is None else live.paths.get(typist.parent)
        if path is None or info is None or path.epoch != info.epoch:
            return None
        return path if path.num_tokens == len(typist.base or ()) else None

    async def _find_base(self, user: UserId, session: SessionId, typist: _Typist, parent: MessageId | None) -> bool:
        """Find the ids of the conversation up to `parent`. False: it is not there, or not finished."""
        core = self._core
        live = core.sessions.peek(user, session)
        state = live.state() if live is not None else await core.store.load(user, session)
        path = None if state is None else _path_of({m.message: m for m in state.messages}, parent)
        if state is None or path is None:
            return False
        system = state.record.system
        encoded = await core.encode(user, system, path)
        path = [encoded.get(m.message, m) for m in path]
        typist.parent, typist.system = parent, system
        self._keep(typist, array("I", chain.from_iterable(m.token_ids for m in path)))
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
