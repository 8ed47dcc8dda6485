"""What `Store` promises of sessions and their changes, on every server that we support."""

from __future__ import annotations

import asyncio

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
from chatserve.chat.store import Idempotency, Transaction
from chatserve.errors import ConflictError, NotFoundError
from chatserve.supervisor.embedded_store import EmbeddedStore
from chatserve.types import MessageId, SessionId, UserId
from tests.store.records import SESSION, change, create, delta, generating, message, record, selected

AWKWARD = "NUL \0, emoji 👩‍👩‍👧‍👦🇩🇪, combining e\u0301, CJK 漢字, CR\r\nLF, BOM \ufeff, last \U0010ffff "


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
