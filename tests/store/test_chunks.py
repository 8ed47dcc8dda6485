"""Deltas in chunks: what is appended the short way, the long way, and in between, on every server that we support."""

from __future__ import annotations

import msgspec
import pytest
import redis

from chatserve.chat import redis_append
from chatserve.chat.events import BranchSelected, GenerationDelta
from chatserve.chat.redis_chunks import pack_tokens
from chatserve.chat.redis_layout import SCHEMA, Keys
from chatserve.chat.redis_link import Call, RedisLink, Script
from chatserve.chat.redis_schema import bring_up_to_date
from chatserve.chat.redis_store import RedisStore, open_store
from chatserve.chat.store import Delta
from chatserve.chat.workers import Owner
from chatserve.errors import StoreUnavailableError
from chatserve.supervisor.embedded_store import EmbeddedStore
from chatserve.types import SessionId, UserId
from tests.store.proxy import Proxy
from tests.store.records import SESSION, change, create, delta, generating, message, selected
from tests.store.test_quotas import usage
from tests.store.test_store_faults import own_server as own_server  # noqa: PLC0414 - a fixture
from tests.store.test_store_faults import proxied as proxied  # noqa: PLC0414 - a fixture
from tests.store.test_store_faults import proxy as proxy  # noqa: PLC0414 - a fixture

PIECES = [f"{i}é\0" for i in range(300)]


def step(user: UserId, i: int, name: str = "m1", **changes: object) -> Delta:
    return delta(user, name, i, PIECES[i], **changes)


async def test_a_long_answer_is_whole_wherever_it_lies(store: RedisStore, server: EmbeddedStore, user: UserId) -> None:
    """In the tail, in the log, in both; read by whoever loads, resumes or searches."""
    await store.commit(create(user, SESSION, generating("m1", text="So far: ", token_ids=(7,))))
    other = await open_store(server.url, event_history=4096)
    for i in range(300):
        assert await store.append([step(user, i)]) == [i + 1]
        if i % 37 == 0 or i == 299:
            state = await other.load(user, SESSION)
            assert state.seq == i + 1
            assert state.messages[0].text == "So far: " + "".join(PIECES[: i + 1])
            assert state.messages[0].token_ids == (7, *range(i + 1))
            page = await other.list_sessions(user, 1, None, "".join(PIECES[max(i - 1, 0) : i + 1]))
            assert len(page.sessions) == 1
    for after in (0, 1, 63, 64, 65, 200, 298, 299, 300):
        later = await other.events(user, SESSION, after)
        assert [(e.seq, e.text) for e in later] == [(i + 1, PIECES[i]) for i in range(after, 300)]
    await other.close()


async def test_a_session_whose_state_somebody_has_lost_stays_writable(
    store: RedisStore, server: EmbeddedStore, user: UserId
) -> None:
    """As by an eviction, which no store should do: it costs that answer, and neither the session nor the others."""
    damaged, whole = SessionId("damaged"), SessionId("whole")
    for session in (damaged, whole):
        await store.commit(create(user, session, generating("m1")))
    assert await store.append([step(user, 0, session=session) for session in (damaged, whole)]) == [1, 1]
    with redis.Redis.from_url(server.url) as client:
        client.delete(*Keys(user).session(damaged, "generating"))
    other = await open_store(server.url, event_history=4096)  # knows nothing of either, as a heir does
    assert await other.append([step(user, 1, session=session) for session in (damaged, whole)]) == [None, 2]
    await other.commit(change(user, damaged, events=(BranchSelected(session=damaged, leaf=None),), seq=1))
    assert [event.seq for event in await other.events(user, damaged, 0)] == [1, 2]
    await other.close()


async def test_a_running_answer_takes_one_call_and_three_commands_a_session(
    store: RedisStore, server: EmbeddedStore, user: UserId
) -> None:
    sessions = [SessionId(f"s{i}") for i in range(redis_append.DELTAS_A_CALL)]
    for session in sessions:
        await store.commit(create(user, session, generating("m1")))
    await store.append([step(user, 0, session=session) for session in sessions])
    with server._client() as client:
        client.config_resetstat()
        for i in range(1, 11):
            assert await store.append([step(user, i, session=session) for session in sessions]) == [i + 1] * 64
        calls = {name: found["calls"] for name, found in client.info("commandstats").items()}
    calls = {name.removeprefix("cmdstat_"): count for name, count in calls.items() if "config" not in name}
    assert calls == {"evalsha": 10, "get": 640, "append": 640, "publish": 640}


async def test_what_comes_between_two_deltas_has_its_place(store: RedisStore, user: UserId) -> None:
    await store.commit(create(user, SESSION, generating("m1"), generating("m2")))
    expected: list[object] = []
    for i in range(0, 40, 4):
        assert await store.append([step(user, i), step(user, i + 1)]) != [None, None]
        await store.append([step(user, i + 2)])
        await store.append([step(user, i // 4, "m2")])
        await store.append([step(user, i + 3)])
        await store.commit(change(user, events=(selected(str(i)),)))
        expected += ["m1", "m1", "m1", "m2", "m1", str(i)]
    events = await store.events(user, SESSION, 0)
    assert [e.leaf if isinstance(e, BranchSelected) else e.message for e in events] == expected
    assert [event.seq for event in events] == list(range(1, 61))
    of_first = [e.text for e in events if isinstance(e, GenerationDelta) and e.message == "m1"]
    assert of_first == PIECES[:40]
    state = await store.load(user, SESSION)
    assert [m.text for m in state.messages] == ["".join(PIECES[:40]), "".join(PIECES[:10])]


async def test_a_tail_takes_no_text_of_another_message(store: RedisStore, server: EmbeddedStore, user: UserId) -> None:
    """Two processes that both believe to have the tail, which ends at the same place."""
    await store.commit(create(user, SESSION, generating("m1"), generating("m2")))
    other = await open_store(server.url, event_history=4096)
    for i in range(3):
        await store.append([step(user, i)])
    for i in range(3):
        await other.append([step(user, i, "m2")])
    assert await store.append([step(user, 3)]) == [7]
    assert [m.text for m in (await store.load(user, SESSION)).messages] == ["".join(PIECES[:4]), "".join(PIECES[:3])]
    await other.close()


async def test_a_lease_that_is_taken_in_mid_answer_ends_the_writing_of_who_had_it(
    store: RedisStore, server: EmbeddedStore, user: UserId
) -> None:
    first, second = Owner("a/1"), Owner("b/1")
    await store.commit(create(user, SESSION, generating("m1")))
    fence = (await store.acquire(user, SESSION, first)).fence
    for i in range(5):
        assert await store.append([step(user, i, fence=fence)]) == [i + 1]
    other = await open_store(server.url, event_history=4096)
    lease = await other.acquire(user, SESSION, second, instead_of=first)
    assert lease.seq == 5
    assert await store.append([step(user, 5, fence=fence)]) == [None]
    for i in range(5, 9):
        assert await other.append([step(user, i, fence=lease.fence)]) == [i + 1]
        assert await store.append([step(user, i + 1, fence=fence)]) == [None]
    assert (await store.load(user, SESSION)).messages[0].text == "".join(PIECES[:9])
    assert await other.append([step(user, 9, fence=lease.fence)]) == [10]
    await other.release(user, SESSION, lease.fence, lost_up_to=20)
    assert (await other.load(user, SESSION)).seq == 21
    assert await other.append([step(user, 10, fence=lease.fence)]) == [22]
    await other.close()


@pytest.mark.parametrize("num_lost", [1, 2])
async def test_a_delta_whose_reply_was_lost_is_there_once(
    proxied: RedisStore, proxy: Proxy, user: UserId, num_lost: int
) -> None:
    await proxied.commit(create(user, SESSION, generating("m1"), message("m0")))
    for i in range(140):
        proxy.lose_replies = num_lost if i in {0, 1, 5, 64, 65, 66, 130} else 0
        assert await proxied.append([step(user, i)]) == [i + 1]
    assert [event.text for event in await proxied.events(user, SESSION, 0)] == PIECES[:140]
    assert await proxied.append([step(user, 130)]) == [131]
    assert await proxied.append([delta(user, "m1", 130, "other")]) == [None]


async def test_a_log_lets_go_of_events_and_never_of_unfinished_text(server: EmbeddedStore, user: UserId) -> None:
    store = await open_store(server.url, event_history=10)
    await store.commit(create(user, SESSION, generating("m1")))
    name = Keys(user).of("log:", SESSION)
    for i in range(300):
        await store.append([step(user, i)])
        await store.commit(change(user, events=(selected(),) * 3))
    with server._client() as client:
        assert client.ttl(name) == -1
        assert (await store.load(user, SESSION)).messages[0].text == "".join(PIECES)
        assert await store.append([step(user, 0)]) == [1], "a repeat is found, however late"
        await store.commit(change(user, puts=(message("m1", text="".join(PIECES)),), events=(selected(),)))
        assert client.xlen(name) < 300
        assert 0 < client.ttl(name) <= 24 * 3600
        assert not client.exists(Keys(user).of("tail:", SESSION))
    assert await store.events(user, SESSION, 0) is None
    await store.close()


async def test_a_full_store_that_holds_a_tail_still_reads(own_server: EmbeddedStore, user: UserId) -> None:
    store = await open_store(own_server.url, event_history=10)
    await store.commit(create(user, SESSION, generating("m1")))
    await store.append([step(user, 0)])
    await store.append([step(user, 1)])
    with own_server._client() as client:
        client.config_set("maxmemory", 1)
        with pytest.raises(StoreUnavailableError, match="maxmemory"):
            await store.append([step(user, 2)])
        assert (await store.load(user, SESSION)).messages[0].text == "".join(PIECES[:2])
        assert len(await store.events(user, SESSION, 0)) == 2
        client.config_set("maxmemory", 0)
    assert await store.append([step(user, 2)]) == [3]
    await store.close()


def as_schema_3(client: redis.Redis, user: UserId, text: str, token_ids: list[int]) -> None:
    """A session whose message m1 is being generated and got a delta a token, as version 3 had it."""
    keys = Keys(user)
    names = dict(zip(("session", "generating"), keys.session(SESSION, "session", "generating"), strict=True))
    client.set("chatserve:schema", 3)
    client.hset(names["session"], "seq", len(token_ids))
    client.hset(names["generating"], "m1", "1.0 -1")
    client.set(keys.of("live-text:", f"{SESSION}:m1"), text)
    client.set(keys.of("live-tokens:", f"{SESSION}:m1"), pack_tokens(token_ids))
    for seq in range(1, len(token_ids) + 1):
        client.xadd(keys.of("events:", SESSION), {"delta": "place", "text": "?"}, id=f"{seq}-0")


async def test_answers_that_version_3_left_unfinished_go_on(own_server: EmbeddedStore, user: UserId) -> None:
    store = await open_store(own_server.url, event_history=10)
    await store.commit(create(user, SESSION, generating("m1", text="Before: ", token_ids=(9,), attempt=1)))
    await store.close()
    with own_server._client() as client:
        as_schema_3(client, user, "one two", [0, 1])
    again = await open_store(own_server.url, event_history=10)
    with own_server._client() as client:
        client.set("chatserve:schema", 3)  # as if it had died before the version was raised
    await again.append([delta(user, "m1", 2, " three", attempt=1)])
    await again.close()
    again = await open_store(own_server.url, event_history=10)
    state = await again.load(user, SESSION)
    assert (state.seq, state.messages[0].text) == (3, "Before: one two three")
    assert state.messages[0].token_ids == (9, 0, 1, 2)
    assert await again.append([delta(user, "m1", 2, " three", attempt=1)]) == [3]
    assert await again.append([delta(user, "m1", 1, "?", attempt=1)]) == [None]
    assert await again.events(user, SESSION, 1) is None
    assert [event.seq for event in await again.events(user, SESSION, 2)] == [3]
    whole = generating("m1", text="Before: one two three", token_ids=(9, 0, 1, 2), attempt=1)
    await again.commit(change(user, puts=(msgspec.structs.replace(whole, status="done"),)))
    of_session = Keys(user).session(SESSION, "session", "metas", "texts", "tokens", "generating")
    measured = await again._link.script("measure", Script.read("measure"), Call(of_session, ()))
    assert await usage(again, user) == tuple(measured)
    await again.commit(change(user, delete=True))
    with own_server._client() as client:
        kinds = {key.split(b":")[2] for key in client.scan_iter(match=f"*{user.split()[1]}*")}
        assert client.get("chatserve:schema") == str(SCHEMA).encode()
    assert kinds == {b"session", b"writes"}
    await again.close()


async def test_a_migrator_that_stood_still_overwrites_no_usage(own_server: EmbeddedStore, user: UserId) -> None:
    """Also not right before it writes, when it has just renewed its lock."""
    store = await open_store(own_server.url, event_history=10)
    await store.commit(create(user, SESSION, message("m1", text="x" * 100)))
    counted = await usage(store, user)
    with own_server._client() as client:
        client.set("chatserve:schema", 2)
        link, stood_still = RedisLink(own_server.url), False

        async def script(what: str, *args: object, run: object = link.script) -> object:
            nonlocal stood_still
            if what == "note what a user has" and not stood_still:
                stood_still = True
                client.delete("chatserve:schema-lock")  # it expired
                other = await open_store(own_server.url, event_history=10)
                await other.commit(create(user, SessionId("later"), message("m2", text="y" * 50)))
                await other.close()
            return await run(what, *args)  # type: ignore[operator]

        link.script = script  # type: ignore[method-assign]
        await bring_up_to_date(link)
        assert stood_still
        await link.close()
        bytes_of = [int(client.hget(Keys(user).of("session:", s), "bytes")) for s in (SESSION, "later")]
        assert not client.exists(Keys(user).of("measuring"))
    assert await usage(store, user) == (sum(bytes_of), 0)
    assert sum(bytes_of) > counted[0]
    await store.close()
