"""What the engine is to forget, because it was deleted.

The engine may know a conversation by paths that this process still has, or only by its token ids: it was said before
the engine's or this process's last start, or elsewhere. While the engine is away what is deleted is kept in mind,
because a KV snapshot may bring back what it held.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

from chatserve.errors import EngineUnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from chatserve.chat.engine_client import EngineClient
    from chatserve.engine.messages import PathRef
    from chatserve.types import UserId

log = logging.getLogger(__name__)

MAX_WAITING_TOKENS: Final = 4_000_000
"""Past so many the first deleted ones stay in the engine's cache until something else needs the room."""


class Branch(NamedTuple):
    """A conversation up to one of its last messages."""

    path: PathRef | None
    """What an engine has of it, as far as it is known here."""
    token_ids: tuple[int, ...]


class _Deleted(NamedTuple):
    user: UserId
    token_ids: tuple[int, ...]
    num_kept_tokens: int


class Forgetting:
    """Of this process."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self._waiting: deque[_Deleted] = deque()
        self._num_waiting_tokens = 0

    def forget(
        self, user: UserId, paths: tuple[PathRef, ...], branches: Sequence[Branch], num_kept_tokens: int = 0
    ) -> None:
        """Have the engine forget the paths, and KV of all but the first tokens of them and of the branches, now or as
        soon as there is an engine.
        """
        info = self._engine.info
        epoch = None if info is None else info.epoch
        try:
            if paths:
                self._engine.release(user, paths, num_kept_tokens)
        except EngineUnavailableError:
            epoch = None  # what it knew is gone with it
        unknown = (branch for branch in branches if branch.path is None or branch.path.epoch != epoch)
        self._wait(_Deleted(user, branch.token_ids, num_kept_tokens) for branch in unknown if branch.token_ids)
        self.engine_came()

    def engine_came(self) -> None:
        """Tell it what it has not been told yet."""
        while self._waiting:
            deleted = self._waiting[0]
            try:
                self._engine.release(deleted.user, (), deleted.num_kept_tokens, deleted.token_ids)
            except EngineUnavailableError:
                log.debug("the engine is away: it will be told what was deleted when it is back")
                return
            self._drop_first()

    def _wait(self, deleted: Iterable[_Deleted]) -> None:
        for each in deleted:
            self._waiting.append(each)
            self._num_waiting_tokens += len(each.token_ids)
        while self._num_waiting_tokens > MAX_WAITING_TOKENS:
            self._drop_first()

    def _drop_first(self) -> None:
        self._num_waiting_tokens -= len(self._waiting.popleft().token_ids)
