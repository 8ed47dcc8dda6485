"""A user's sessions in Redis, page by page, and those of them in which a text stands.

Owns the order, the cursors and the search; reads only. A search reads as many sessions as it takes to fill a page, a
few at a time and of each only so much at once, so that neither side holds more than that.
"""

from __future__ import annotations

import base64
import math
from contextlib import aclosing
from itertools import chain
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

KEYS_OF_TEXTS: Final = ("order", "texts", "generating", "log", "tail")

_cursor_decoder: Final = msgspec.json.Decoder(tuple[float, SessionId])


class SessionListing:
    """The reading end of the index."""

    def __init__(self, link: RedisLink) -> None:
        self._link = link
        self._page, self._titles, self._texts = (
            Script.read("page"),
            Script.read("titles"),
            Script.read("texts", "chunk"),
        )

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
            args = (size, repr(updated_at).encode(), last.encode())
            rows = await self._link.script("list sessions", self._page, Call((keys.of("index"),), args))
            page = [(SessionId(session.decode()), float(changed_at)) for session, changed_at in rows]
            names = chain.from_iterable(keys.session(session, "session", "order") for session, _ in page)
            titles = await self._link.script("list titles", self._titles, Call(tuple(names), ())) if page else []
            batch = [
                SessionSummary(session, row[0].decode(), changed_at, row[1])
                for (session, changed_at), row in zip(page, titles, strict=True)
                if row is not None  # not deleted in between
            ]
            if wanted:
                matching = await self._matching(user, batch, wanted)
                yield [summary for summary in batch if summary.session in matching]
            else:
                yield batch
            if len(page) < size:
                return
            last, updated_at = page[-1]
            place = updated_at, last

    async def _matching(self, user: UserId, batch: Sequence[SessionSummary], wanted: str) -> set[SessionId]:
        """The sessions of a batch in whose title or texts `wanted` (casefolded) stands."""
        keys = Keys(user)
        matching = {summary.session for summary in batch if wanted in summary.title.casefold()}
        places = {summary.session: 0 for summary in batch if summary.session not in matching}
        while places:
            calls = [
                (self._texts, Call(keys.session(session, *KEYS_OF_TEXTS), (place, SEARCH_BYTES)))
                for session, place in places.items()
            ]
            replies = await self._link.scripts("search", calls)
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
