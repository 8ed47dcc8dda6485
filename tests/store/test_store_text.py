"""What `Store` promises of text that is being generated: appended once, in order, and whole."""

from __future__ import annotations

import asyncio

import pytest

from chatserve.chat.redis_store import RedisStore
from chatserve.chat.store import LeaseLostError
from chatserve.types import MessageId, SessionId, UserId
from tests.store.records import SESSION, change, create, delta, generating, message, selected


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
