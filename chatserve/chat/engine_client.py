"""The engine as the chat layer sees it: verbs that send, facts, and one stream of events."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from chatserve.engine.messages import CacheReport, EngineEvent, EngineInfo, Hint, PathRef, Submit
    from chatserve.types import RequestId, UserId


class EngineClient(Protocol):
    """What is needed of `chatserve.engine.client.EngineClient`; the sending verbs raise `EngineUnavailableError`."""

    @property
    def info(self) -> EngineInfo | None: ...

    def submit(self, request: Submit, /) -> None: ...

    def cancel(self, request_id: RequestId, keep: int | None = None) -> None: ...

    def hint(self, hint: Hint, /) -> None: ...

    def release(
        self, user: UserId, paths: tuple[PathRef, ...], num_kept_tokens: int = 0, token_ids: tuple[int, ...] = ()
    ) -> None: ...

    async def inspect(self, *, with_map: bool = False) -> CacheReport: ...

    def events(self) -> AsyncIterator[EngineEvent]: ...
