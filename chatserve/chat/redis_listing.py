"""A user's sessions in Redis, page by page, and those of them in which a text stands.

Owns the order, the cursors and the search; reads only. A search reads as many sessions as it takes to fill a page, a
few at a time and of each only so much at once, so that neither side holds more than that.
"""

from __future__ import annotations

import base64
import math
from contextlib import aclosing
from typing import TYPE_CHECKING, Final

import msgspec

from chatserve.chat.redis_layout import Keys
from chatserve.chat.redis_link import Call, RedisLink, Script, raise_error
from chatserve.chat.store import SessionPage, SessionSummary
from chatserve.errors import BadParamsError
from chatserve.types import SessionId, UserId

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

SEARCH_SESSIONS: Final = 16
"""Sessions that a search reads at a time …"""
SEARCH_BYTES: Final = 256 * 1024
"""… and bytes of text of each."""

_cursor_decoder: Final = msgspec.json.Decoder(tuple[float, SessionId])


class SessionListing:
    """The reading end of the index."""

    def __init__(self, link: RedisLink) -> None:
        self._link = link
        self._page, self._texts = Script.read("page"), Script.read("texts")

    async def page(self, user: UserId, limit: int, cursor: str | None, query: str | None) -> SessionPage:
        """See `Store.list_sessions`."""
        assert limit > 0
        wanted = (query or "").casefold()
        kept: list[SessionSummary] = []
        async with aclosing(self._batches(user, limit, _parse_cursor(cursor), wanted)) as batches:
            async for batch in batches:
                kept += batch
                if len(kept) > limit:
                    break
        more, page = len(kept) > limit, kept[:limit]
        return SessionPage(tuple(page), _make_cursor(page[-1]) if more else None)

    async def untouched(self, before: float) -> AsyncGenerator[tuple[UserId, SessionId], None]:
        """See `Store.untouched`."""
        limit = f"({before!r}".encode()
        cursor = 0
        while True:
            next_cursor, names = await self._link.command("list users", "SSCAN", "chatserve:users", cursor)
            users = [UserId(name.decode()) for name in names]
            replies = await self._link.commands(
                "list old sessions",
                [("ZRANGEBYSCORE", Keys(user).of("index"), "-inf", limit) for user in users],
            )
            for user, reply in zip(users, replies, strict=True):
                raise_error(reply)
                for session in reply:
                    yield user, SessionId(session.decode())
            cursor = int(next_cursor)
            if cursor == 0:
                return

    async def _batches(
        self, user: UserId, limit: int, place: tuple[float, SessionId], wanted: str
    ) -> AsyncGenerator[list[SessionSummary], None]:
        size = SEARCH_SESSIONS if wanted else limit + 1
        while True:
            keys = Keys(user)
            updated_at, last = place
            args = (keys.of("session:"), keys.of("order:"), size, repr(updated_at).encode(), last.encode())
            rows = await self._link.script("list sessions", self._page, Call((keys.of("index"),), args))
            batch = [
                SessionSummary(SessionId(row[0].decode()), (row[2] or b"").decode(), float(row[1]), row[3])
                for row in rows
            ]
            if wanted:
                matching = await self._matching(user, batch, wanted)
                yield [summary for summary in batch if summary.session in matching]
            else:
                yield batch
            if len(batch) < size:
                return
            place = batch[-1].updated_at, batch[-1].session

    async def _matching(self, user: UserId, batch: Sequence[SessionSummary], wanted: str) -> set[SessionId]:
        """The sessions of a batch in whose title or texts `wanted` (casefolded) stands."""
        keys = Keys(user)
        matching = {summary.session for summary in batch if wanted in summary.title.casefold()}
        places = {summary.session: 0 for summary in batch if summary.session not in matching}
        while places:
            calls = [
                Call(
                    keys.session(session, "order", "texts", "generating"),
                    (keys.live(session)[0], place, SEARCH_BYTES),
                )
                for session, place in places.items()
            ]
            replies = await self._link.scripts("search", self._texts, calls)
            for session, reply in zip(tuple(places), replies, strict=True):
                raise_error(reply)
                place, *texts = reply
                if any(wanted in text.decode().casefold() for text in texts):
                    matching.add(session)
                    del places[session]
                elif place < 0:
                    del places[session]
                else:
                    places[session] = place
        return matching


def _make_cursor(last: SessionSummary) -> str:
    return base64.urlsafe_b64encode(msgspec.json.encode((last.updated_at, last.session))).decode()


def _parse_cursor(cursor: str | None) -> tuple[float, SessionId]:
    if cursor is None:
        return math.inf, SessionId("")
    try:
        return _cursor_decoder.decode(base64.urlsafe_b64decode(cursor.encode()))
    except (ValueError, msgspec.MsgspecError) as error:
        raise BadParamsError.of("cursor", cursor, "a cursor that session.list returned") from error
