"""What `Store` promises of lists: each session once, newest first, found by its words."""

from __future__ import annotations

from typing import Any

import pytest

from chatserve.chat.redis_store import RedisStore
from chatserve.errors import BadParamsError
from chatserve.types import SessionId, UserId
from tests.store.records import SESSION, change, create, delta, generating, message, record


async def test_paging_shows_each_session_once_newest_first(store: RedisStore, user: UserId) -> None:
    # Equal times too: 40 sessions at 10 moments.
    expected = []
    for i in range(40):
        session, updated_at = SessionId(f"s{i * 7919 % 40}é"), 1e9 + (i % 10) / 3
        await store.commit(create(user, session, *map(message, "ab"[: i % 3]), title=f"t{i}", updated_at=updated_at))
        expected.append((updated_at, session, f"t{i}", min(i % 3, 2)))
    expected.sort(key=lambda row: (row[0], row[1].encode()), reverse=True)
    for limit in (1, 3, 7, 39, 40, 100):
        shown, cursor = [], None
        while True:
            page = await store.list_sessions(user, limit, cursor, None)
            shown += [(s.updated_at, s.session, s.title, s.messages) for s in page.sessions]
            assert len(page.sessions) == limit or page.cursor is None
            if (cursor := page.cursor) is None:
                break
        assert shown == expected


async def test_paging_is_stable_while_sessions_come_go_and_move(store: RedisStore, user: UserId) -> None:
    for i in range(20):
        await store.commit(create(user, SessionId(f"s{i:02}"), updated_at=float(i)))
    first = await store.list_sessions(user, 8, None, None)
    assert [s.session for s in first.sessions] == [f"s{i:02}" for i in range(19, 11, -1)]
    await store.commit(create(user, SessionId("new"), updated_at=99.0))
    await store.commit(change(user, SessionId("s12"), delete=True))  # the last one seen, where the cursor stands
    moved = SessionId("s05")
    await store.commit(change(user, moved, record=record(user, moved, updated_at=100.0)))
    rest = await store.list_sessions(user, 100, first.cursor, None)
    assert [s.session for s in rest.sessions] == [f"s{i:02}" for i in range(11, -1, -1) if i != 5]
    assert rest.cursor is None


async def test_a_session_that_is_deleted_while_a_page_is_read_is_left_out_and_no_other(
    store: RedisStore, user: UserId, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(6):
        await store.commit(create(user, SessionId(f"s{i}"), updated_at=float(i)))
    run = store._link.script

    async def script(what: str, *args: Any) -> Any:
        if what == "list titles":
            await store.commit(change(user, SessionId("s3"), delete=True))
            monkeypatch.undo()
        return await run(what, *args)

    monkeypatch.setattr(store._link, "script", script)
    first = await store.list_sessions(user, 3, None, None)
    rest = await store.list_sessions(user, 3, first.cursor, None)
    assert [s.session for s in (*first.sessions, *rest.sessions)] == ["s5", "s4", "s2", "s1", "s0"]
    assert rest.cursor is None


@pytest.mark.parametrize("cursor", ["", "x", "bm9wZQ==", "W251bGwsIDFd", "é", "\0", "WzEsMg=="])
async def test_a_cursor_that_is_not_ours_is_bad_params(store: RedisStore, user: UserId, cursor: str) -> None:
    with pytest.raises(BadParamsError, match="cursor"):
        await store.list_sessions(user, 10, cursor, None)


async def test_a_query_finds_titles_and_texts_whatever_their_case(store: RedisStore, user: UserId) -> None:
    await store.commit(create(user, SessionId("title"), title="Große STRASSE", updated_at=3.0))
    long = message("m2", text="x" * 300_000)
    await store.commit(create(user, SessionId("text"), message("m1"), long, message("m3", text="STRASSE")))
    await store.commit(create(user, SESSION, generating("m1", text="gro"), updated_at=1.0))
    await store.append([delta(user, "m1", 0, "sse Stra"), delta(user, "m1", 1, "ße")])
    await store.commit(create(user, SessionId("none"), message("m1", text="Strasbourg"), updated_at=5.0))

    async def found(query: str, limit: int = 10) -> list[str]:
        return [s.session for s in (await store.list_sessions(user, limit, None, query)).sessions]

    assert await found("straße") == ["title", "text", "s1"]
    assert await found("GROSSE s") == ["title", "s1"]
    assert await found("stra") == ["none", "title", "text", "s1"]
    assert await found("stra", limit=2) == ["none", "title"]
    assert await found("nowhere") == []
    assert await found("") == ["none", "title", "text", "s1"]


async def test_a_query_pages_through_many_sessions(store: RedisStore, user: UserId) -> None:
    for i in range(60):
        text = "needle" if i % 3 == 0 else "hay"
        await store.commit(create(user, SessionId(f"s{i:02}"), message("m", text=text), updated_at=float(i)))
    shown, cursor = [], None
    while True:
        page = await store.list_sessions(user, 7, cursor, "NEEDLE")
        shown += [s.session for s in page.sessions]
        if (cursor := page.cursor) is None:
            break
    assert shown == [f"s{i:02}" for i in range(57, -1, -3)]
