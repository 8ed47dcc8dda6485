"""What `Store` promises, on every server that we support."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from chatserve.chat.events import (
    BranchSelected,
    GenerationDelta,
    GenerationEnd,
    MessageAdded,
    SessionDeleted,
    SessionUpdated,
    Usage,
)
from chatserve.chat.redis_store import RedisStore, open_store
from chatserve.chat.store import Delta, Idempotency, LeaseLostError, MessageRecord, SessionRecord, Transaction
from chatserve.errors import BadParamsError, ConflictError, NotFoundError
from chatserve.supervisor.embedded_store import EmbeddedStore
from chatserve.types import MessageId, SessionId, UserId

SESSION = SessionId("s1")
AWKWARD = "NUL \0, emoji 👩‍👩‍👧‍👦🇩🇪, combining e\u0301, CJK 漢字, CR\r\nLF, BOM \ufeff, last \U0010ffff "


def record(user: UserId, session: SessionId = SESSION, **changes: object) -> SessionRecord:
    plain = SessionRecord(
        session=session,
        user=user,
        title="",
        system=None,
        params={},
        leaf=None,
        version=1,
        created_at=1.5,
        updated_at=1.5,
    )
    return msgspec.structs.replace(plain, **changes)


def message(name: str, **changes: object) -> MessageRecord:
    plain = MessageRecord(
        message=MessageId(name), parent=None, role="user", text=f"text of {name}", status="done", created_at=2.0
    )
    return msgspec.structs.replace(plain, **changes)


def generating(name: str, **changes: object) -> MessageRecord:
    return message(name, role="assistant", status="generating", **{"text": "", **changes})


def create(user: UserId, session: SessionId = SESSION, *puts: MessageRecord, **changes: object) -> Transaction:
    return Transaction(user=user, session=session, create=True, record=record(user, session, **changes), puts=puts)


def change(user: UserId, session: SessionId = SESSION, **fields: object) -> Transaction:
    return Transaction(user=user, session=session, **fields)


def delta(user: UserId, name: str, first_token: int, text: str, attempt: int = 0, **changes: object) -> Delta:
    plain = Delta(
        user=user,
        session=SESSION,
        message=MessageId(name),
        attempt=attempt,
        first_token=first_token,
        token_ids=(first_token,),
        text=text,
    )
    return msgspec.structs.replace(plain, **changes)


def selected(leaf: str | None = None) -> BranchSelected:
    return BranchSelected(session=SESSION, leaf=None if leaf is None else MessageId(leaf))


async def test_a_session_comes_back_as_it_was_put(store: RedisStore, user: UserId) -> None:
    first = message(
        "m1",
        text=AWKWARD,
        token_ids=(0, 1, 2**31 - 1, 49_151),
        encoded_for="template",
        child=MessageId("m2"),
        seed=2**63 - 1,
        params={"temperature": 0.25, "stop": ["\0"]},
        usage=Usage(prompt_tokens=3, ttft_ms=1.25),
    )
    second = message("m2", parent=MessageId("m1"), text="")
    kept = create(user, SESSION, first, second, title=AWKWARD, system=AWKWARD, params={"seed": 7}, leaf=MessageId("m2"))
    await store.commit(kept)

    state = await store.load(user, SESSION)

    assert state is not None
    assert state.record == kept.record
    assert state.messages == (first, second)
    assert state.seq == 0


async def test_what_does_not_exist_is_none_and_cannot_be_changed(store: RedisStore, user: UserId) -> None:
    assert await store.load(user, SESSION) is None
    assert await store.events(user, SESSION, 0) is None
    assert await store.answer(user, "r1") is None
    assert (await store.list_sessions(user, 10, None, None)).sessions == ()
    with pytest.raises(NotFoundError):
        await store.commit(change(user, record=record(user)))
    assert await store.append([delta(user, "m1", 0, "late")]) == [None]
    assert await store.load(user, SESSION) is None


async def test_a_session_is_its_users_alone(store: RedisStore, user: UserId) -> None:
    await store.commit(create(user, SESSION, message("m1", text="secret")))
    for other in (UserId(user + "x"), UserId(user[:-1]), UserId("}"), UserId("{" + user + "}")):
        assert await store.load(other, SESSION) is None
        assert await store.events(other, SESSION, 0) is None
        assert (await store.list_sessions(other, 10, None, "secret")).sessions == ()
        with pytest.raises(NotFoundError):
            await store.commit(change(other, deletes=(MessageId("m1"),)))


async def test_events_are_numbered_from_one_without_gaps_and_come_back_in_order(
    store: RedisStore, user: UserId
) -> None:
    await store.commit(create(user, SESSION, generating("m1")))
    added = MessageAdded(
        session=SESSION, message=MessageId("m1"), parent=None, role="user", text=AWKWARD, status="done"
    )
    updated = SessionUpdated(session=SESSION, system=None, params={"top_k": 4})
    assert (await store.commit(change(user, events=(added, updated)))).first_seq == 1
    assert await store.append([delta(user, "m1", 0, "Hé"), delta(user, "m1", 1, "👋")]) == [3, 4]
    end = GenerationEnd(session=SESSION, message=MessageId("m1"), reason="stop", status="done", usage=Usage(), seed=1)
    assert (await store.commit(change(user, events=(end,)))).first_seq == 5

    whole = await store.events(user, SESSION, 0)

    assert whole is not None
    expected = [
        added,
        updated,
        GenerationDelta(session=SESSION, message=MessageId("m1"), text="Hé"),
        GenerationDelta(session=SESSION, message=MessageId("m1"), text="👋"),
        end,
    ]
    assert whole == [msgspec.structs.replace(event, seq=seq) for seq, event in enumerate(expected, 1)]
    for after in range(6):
        assert await store.events(user, SESSION, after) == whole[after:]
    for after in (6, -1, 2**53, 10**30):
        assert await store.events(user, SESSION, after) is None


async def test_a_range_that_was_trimmed_is_none_and_never_a_part(server: EmbeddedStore, user: UserId) -> None:
    store = await open_store(server.url, event_history=100)
    try:
        await store.commit(create(user))
        for _ in range(30):
            await store.commit(change(user, events=(selected(),) * 20))
        kept = [after for after in range(601) if await store.events(user, SESSION, after) is not None]
        assert kept == list(range(kept[0], 601))
        assert 100 <= 600 - kept[0] <= 300
        assert [event.seq for event in await store.events(user, SESSION, kept[0]) or []] == kept[1:]
    finally:
        await store.close()


async def test_appended_text_is_whole_at_exactly_seq(store: RedisStore, user: UserId) -> None:
    await store.commit(create(user, SESSION, generating("m1", text="So far: ", token_ids=(9, 8), attempt=1)))
    pieces = [chr(0x1F600 + i % 70) + "\0" for i in range(200)]

    async def write() -> None:
        for first in range(0, 200, 4):
            deltas = [delta(user, "m1", i, pieces[i], attempt=1) for i in range(first, first + 4)]
            assert await store.append(deltas) == [first + 1, first + 2, first + 3, first + 4]

    writing = asyncio.create_task(write())
    while not writing.done():
        state = await store.load(user, SESSION)
        assert state is not None
        assert state.messages[0].text == "So far: " + "".join(pieces[: state.seq])
        assert state.messages[0].token_ids == (9, 8, *range(state.seq))
    await writing


async def test_a_repeated_delta_returns_its_first_number_and_changes_nothing(store: RedisStore, user: UserId) -> None:
    await store.commit(create(user, SESSION, generating("m1"), generating("m2")))
    step = [delta(user, "m1", 0, "a"), delta(user, "m2", 0, "b"), delta(user, "m1", 1, "")]
    assert await store.append(step) == [1, 2, 3]
    await store.commit(change(user, events=(selected(),)))
    assert await store.append(step) == [1, 2, 3]
    assert await store.append([delta(user, "m1", 2, "c"), *step]) == [5, 1, 2, 3]
    state = await store.load(user, SESSION)
    assert state is not None
    assert [m.text for m in state.messages] == ["ac", "b"]
    assert state.seq == 5


async def test_a_repeat_is_found_however_much_came_after_it(store: RedisStore, user: UserId) -> None:
    await store.commit(create(user, SESSION, generating("m1"), generating("m2")))
    first = delta(user, "m1", 0, "a")
    assert await store.append([first]) == [1]
    for start in (0, 40, 80):
        await store.append([delta(user, "m2", start + i, "b") for i in range(40)])
        assert await store.append([first]) == [1]


async def test_a_repeat_with_other_content_is_refused_and_its_neighbours_are_written(
    store: RedisStore, user: UserId
) -> None:
    await store.commit(create(user, SESSION, generating("m1"), generating("m2")))
    await store.append([delta(user, "m1", 0, "a")])
    assert await store.append([delta(user, "m1", 0, "ab"), delta(user, "m2", 0, "b")]) == [None, 2]
    state = await store.load(user, SESSION)
    assert state is not None
    assert [m.text for m in state.messages] == ["a", "b"]


async def test_only_the_generation_under_way_can_append(store: RedisStore, user: UserId) -> None:
    await store.commit(create(user, SESSION, generating("m1", attempt=1), message("m2")))
    gone = [
        delta(user, "m1", 0, "earlier attempt", attempt=0),
        delta(user, "m1", 0, "later attempt", attempt=2),
        delta(user, "m2", 0, "a finished message"),
        delta(user, "m3", 0, "no message"),
        delta(user, "m1", 0, "another session", attempt=1, session=SessionId("s2")),
    ]
    assert await store.append([*gone, delta(user, "m1", 0, "!", attempt=1)]) == [None] * len(gone) + [1]
    await store.commit(change(user, puts=(message("m1", text="final", attempt=1),)))
    assert await store.append([delta(user, "m1", 1, "late", attempt=1)]) == [None]
    state = await store.load(user, SESSION)
    assert state is not None
    assert [(m.text, m.status) for m in state.messages] == [("final", "done"), ("text of m2", "done")]
    assert state.seq == 1


async def test_putting_a_message_that_goes_on_generating_keeps_what_was_appended(
    store: RedisStore, user: UserId
) -> None:
    await store.commit(create(user, SESSION, generating("m1", text="Once ", token_ids=(1,))))
    await store.append([delta(user, "m1", 0, "upon")])
    await store.commit(change(user, puts=(generating("m1", text="stale", child=MessageId("c")),)))
    await store.append([delta(user, "m1", 1, " a")])
    state = await store.load(user, SESSION)
    assert state is not None
    assert state.messages[0] == generating("m1", text="Once upon a", token_ids=(1, 0, 1), child=MessageId("c"))


async def test_a_delta_that_does_not_follow_what_is_there_is_refused(store: RedisStore, user: UserId) -> None:
    """A store that lost its last writes must not get what came after them."""
    await store.commit(create(user, SESSION, generating("m1")))
    assert await store.append([delta(user, "m1", 1, "too early"), delta(user, "m1", 0, "a")]) == [None, 1]
    assert await store.append([delta(user, "m1", 2, "too early"), delta(user, "m1", 1, "b")]) == [None, 2]
    empty = delta(user, "m1", 2, "no token", token_ids=())
    assert await store.append([empty, empty, delta(user, "m1", 2, "c"), empty]) == [3, 3, 4, 3]
    state = await store.load(user, SESSION)
    assert (state.messages[0].text, state.messages[0].token_ids) == ("abno tokenc", (0, 1, 2))
    with pytest.raises(LeaseLostError):
        await store.commit(change(user, events=(selected(),), seq=5))
    assert (await store.commit(change(user, events=(selected(),), seq=4))).first_seq == 5


async def test_a_continued_message_starts_from_the_text_that_was_put(store: RedisStore, user: UserId) -> None:
    await store.commit(create(user, SESSION, generating("m1")))
    await store.append([delta(user, "m1", 0, "one")])
    await store.commit(change(user, puts=(generating("m1", text="one", token_ids=(0,), attempt=1),)))
    await store.append([delta(user, "m1", 0, ", two", attempt=1)])
    state = await store.load(user, SESSION)
    assert state is not None
    assert state.messages[0].text == "one, two"
    assert state.messages[0].token_ids == (0, 0)


async def test_messages_keep_the_order_in_which_they_were_first_put(store: RedisStore, user: UserId) -> None:
    names = [f"m{i}" for i in (7, 3, 9, 1)]
    await store.commit(create(user, SESSION, *map(message, names[:2])))
    await store.commit(change(user, puts=tuple(map(message, names[2:]))))
    await store.commit(change(user, puts=(message("m7", text="edited"),), deletes=(MessageId("m3"), MessageId("none"))))
    state = await store.load(user, SESSION)
    assert state is not None
    assert [(m.message, m.text) for m in state.messages] == [
        ("m7", "edited"),
        ("m9", "text of m9"),
        ("m1", "text of m1"),
    ]


async def test_parallel_commits_all_survive_with_distinct_numbers(store: RedisStore, user: UserId) -> None:
    await store.commit(create(user))
    results = await asyncio.gather(
        *(store.commit(change(user, puts=(message(f"m{i}"),), events=(selected(f"m{i}"),) * 3)) for i in range(20))
    )
    assert sorted(result.first_seq for result in results) == list(range(1, 61, 3))
    state = await store.load(user, SESSION)
    assert state is not None
    assert {m.message for m in state.messages} == {f"m{i}" for i in range(20)}
    events = await store.events(user, SESSION, 0)
    assert events is not None
    for i, result in enumerate(results):
        of_it = events[result.first_seq - 1 : result.first_seq + 2]
        assert [event.leaf for event in of_it if isinstance(event, BranchSelected)] == [f"m{i}"] * 3


async def test_a_write_id_makes_a_retry_return_the_first_result(store: RedisStore, user: UserId) -> None:
    await store.commit(create(user))
    once = change(user, events=(selected(), selected()), puts=(message("m1"),), write_id="w1")
    first = await store.commit(once)
    await store.commit(change(user, deletes=(MessageId("m1"),), events=(selected(),)))
    assert await store.commit(once) == first
    state = await store.load(user, SESSION)
    assert state is not None
    assert (state.seq, state.messages) == (3, ())


async def test_the_same_request_three_times_is_done_once_and_answered_alike(store: RedisStore, user: UserId) -> None:
    await store.commit(create(user))
    request = Idempotency("r1\n\0é", "digest", b'{"message":"m1"}')
    sends = [change(user, puts=(message(f"m{i}"),), events=(selected(),), idempotency=request) for i in range(3)]
    results = await asyncio.gather(*map(store.commit, sends))
    assert sorted((result.first_seq, result.answer) for result in results if result.answer is None) == [(1, None)]
    assert [result.answer for result in results if result.answer is not None] == [request.answer] * 2
    state = await store.load(user, SESSION)
    assert state is not None
    assert (state.seq, len(state.messages)) == (1, 1)
    assert await store.answer(user, request.request_id) == (request.digest, request.answer)
    assert await store.answer(UserId(user + "x"), request.request_id) is None


async def test_the_same_request_id_with_another_body_is_a_conflict(store: RedisStore, user: UserId) -> None:
    await store.commit(
        Transaction(
            user=user, session=SESSION, create=True, record=record(user), idempotency=Idempotency("r1", "d1", b"1")
        )
    )
    with pytest.raises(ConflictError):
        await store.commit(change(user, events=(selected(),), idempotency=Idempotency("r1", "d2", b"2")))
    state = await store.load(user, SESSION)
    assert state is not None
    assert state.seq == 0
    assert await store.answer(user, "r1") == ("d1", b"1")


async def test_a_request_with_a_write_id_gets_its_first_result_when_retried(store: RedisStore, user: UserId) -> None:
    """Who did the work must learn its number, or nobody would publish the events."""
    await store.commit(create(user))
    sent = change(user, events=(selected(),), idempotency=Idempotency("r1", "d", b"1"), write_id="w1")
    assert await store.commit(sent) == await store.commit(sent)
    assert (await store.commit(msgspec.structs.replace(sent, write_id="w2"))).answer == b"1"


async def test_a_refused_change_changes_nothing(store: RedisStore, user: UserId) -> None:
    await store.commit(create(user, SESSION, message("m1")))
    before = await store.load(user, SESSION)
    with pytest.raises(ConflictError):
        await store.commit(create(user, SESSION, message("m2"), title="again"))
    with pytest.raises(NotFoundError):
        await store.commit(
            change(user, SessionId("s2"), puts=(message("m1"),), idempotency=Idempotency("r9", "d", b"answer"))
        )
    assert await store.load(user, SESSION) == before
    assert await store.load(user, SessionId("s2")) is None
    assert await store.answer(user, "r9") is None


async def test_a_late_write_never_brings_a_deleted_session_back(store: RedisStore, user: UserId) -> None:
    await store.commit(create(user, SESSION, generating("m1"), title="doomed"))
    await store.append([delta(user, "m1", 0, "a")])
    deletion = change(user, delete=True, events=(SessionDeleted(session=SESSION),), write_id="w1")
    assert (await store.commit(deletion)).first_seq == 2

    assert await store.append([delta(user, "m1", 1, "b"), delta(user, "m1", 0, "a")]) == [None, None]
    late = [
        change(user, record=record(user), puts=(message("m1"),), events=(selected(),)),
        create(user, SESSION, message("m1")),
        change(user, delete=True),
    ]
    for write in late:
        with pytest.raises(NotFoundError):
            await store.commit(write)
    assert (await store.commit(deletion)).first_seq == 2
    assert await store.load(user, SESSION) is None
    assert await store.events(user, SESSION, 0) is None
    assert (await store.list_sessions(user, 10, None, None)).sessions == ()
    assert await store.unfinished([(user, SESSION)]) == []


async def test_a_deletion_leaves_no_keys_but_a_tombstone_that_expires(
    store: RedisStore, server: EmbeddedStore, user: UserId
) -> None:
    await store.commit(create(user, SESSION, generating("m1"), message("m2"), title="doomed"))
    await store.append([delta(user, "m1", 0, "a")])
    await store.commit(change(user, events=(selected(),), delete=True, idempotency=Idempotency("r", "d", b"")))
    with server._client() as client:
        left = {key: client.ttl(key) for key in client.scan_iter(match=f"*{user.split()[1]}*")}
    assert {key.split(b":")[2] for key in left} == {b"session", b"writes", b"request"}
    assert all(0 < ttl <= 24 * 3600 for ttl in left.values())


async def test_unfinished_names_exactly_the_sessions_that_are_generating(store: RedisStore, user: UserId) -> None:
    async def mine() -> list[str]:
        found = await store.unfinished([(user, three), (user, two), (user, one), (UserId("nobody"), one)])
        return sorted(session for _, session in found)

    one, two, three = (SessionId(f"s{i}") for i in (1, 2, 3))
    await store.commit(create(user, one, generating("m1"), generating("m2")))
    await store.commit(create(user, two, generating("m1")))
    await store.commit(create(user, three, message("m1")))
    assert await mine() == [one, two]
    await store.commit(change(user, one, puts=(message("m1"),)))
    await store.commit(change(user, two, puts=(message("m1", status="interrupted"),)))
    assert await mine() == [one]
    await store.commit(change(user, one, deletes=(MessageId("m2"),)))
    assert await mine() == []


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
