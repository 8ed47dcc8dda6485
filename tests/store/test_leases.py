"""Leases, the processes that hold them, and what they hear of each other, on every server that we support."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from chatserve.chat.events import BranchSelected, GenerationDelta, SessionDeleted
from chatserve.chat.feed import Announced, Feed, Heard, Letter, Missed, News
from chatserve.chat.letters import LeaseTaken, decode_letter
from chatserve.chat.redis_layout import SCHEMA, Keys
from chatserve.chat.redis_link import RedisLink
from chatserve.chat.redis_schema import Migration, bring_up_to_date
from chatserve.chat.redis_store import RedisStore, open_store
from chatserve.chat.redis_workers import RedisWorkers
from chatserve.chat.store import Idempotency, LeaseLostError, OwnedElsewhereError
from chatserve.chat.workers import Owner, Standing, owner_name
from chatserve.errors import NotFoundError, StartupError, StoreUnavailableError
from chatserve.supervisor.embedded_store import EmbeddedStore
from chatserve.types import MessageId, SessionId, UserId
from tests.store.proxy import Proxy
from tests.store.records import SESSION, change, create, delta, generating, message, selected
from tests.store.test_store_faults import own_server as own_server  # noqa: PLC0414 - a fixture

A, B = Owner("place-a/1"), Owner("place-b/1")


def owner() -> Owner:
    return owner_name(uuid.uuid4().hex, "1")


class Ear:
    """Everything that a feed hears, in order."""

    def __init__(self, feed: Feed) -> None:
        self.heard: list[Heard] = []
        self._feed = feed
        self._news = asyncio.Event()

    async def listen(self) -> None:
        async for heard in self._feed.heard():
            self.heard.append(heard)
            self._news.set()

    async def until(self, count: int) -> list[Heard]:
        async with asyncio.timeout(10):
            while len(self.heard) < count:
                self._news.clear()
                await self._news.wait()
        assert len(self.heard) == count, self.heard
        return self.heard


async def eventually(ask: Callable[[], Awaitable[object]], wanted: object) -> None:
    """The server tells nobody of its own doing, so it is asked again and again."""
    async with asyncio.timeout(10):
        while await ask() != wanted:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


@contextlib.asynccontextmanager
async def listening(store: RedisStore, name: Owner) -> AsyncIterator[tuple[Feed, Ear]]:
    feed = store.open_feed(name)
    ear = Ear(feed)
    task = asyncio.create_task(ear.listen())
    try:
        yield feed, ear
    finally:
        await feed.close()
        await task


async def test_one_owner_has_a_lease_until_it_is_released_or_known_to_be_dead(store: RedisStore, user: UserId) -> None:
    with pytest.raises(NotFoundError):
        await store.acquire(user, SESSION, A)
    await store.commit(create(user))
    assert (await store.acquire(user, SESSION, A)).fence == 1
    assert (await store.acquire(user, SESSION, A)).fence == 1, "it has it"
    for instead_of in (None, Owner("place-c/1"), B):
        with pytest.raises(OwnedElsewhereError) as held:
            await store.acquire(user, SESSION, B, instead_of=instead_of)
        assert held.value.owner == A
    await store.release(user, SESSION, 0)
    with pytest.raises(OwnedElsewhereError):
        await store.acquire(user, SESSION, B)
    await store.release(user, SESSION, 1)
    assert (await store.acquire(user, SESSION, B)).fence == 2
    assert (await store.acquire(user, SESSION, A, instead_of=B)).fence == 3
    assert (await store.load(user, SESSION)).fence == 3


async def test_numbers_of_lost_events_are_not_used_again(store: RedisStore, user: UserId) -> None:
    await store.commit(msgspec.structs.replace(create(user), owner=A, fence=1))
    await store.commit(change(user, events=(selected(), selected()), fence=1))
    await store.release(user, SESSION, 1, lost_up_to=2)  # nothing was lost
    assert (await store.acquire(user, SESSION, A)).seq == 2
    await store.release(user, SESSION, 2, lost_up_to=7)
    lease = await store.acquire(user, SESSION, B)
    assert lease.seq == 8
    assert (await store.commit(change(user, events=(selected(),), fence=lease.fence))).first_seq == 9
    for known in range(8):
        assert await store.events(user, SESSION, known) is None, "whoever knows less than the hole starts afresh"
    assert len(await store.events(user, SESSION, 8)) == 1


async def test_a_stale_owner_can_write_nothing(store: RedisStore, user: UserId) -> None:
    await store.commit(msgspec.structs.replace(create(user, SESSION, generating("m1")), owner=A, fence=1))
    assert await store.append([delta(user, "m1", 0, "a", fence=1)]) == [1]
    assert (await store.acquire(user, SESSION, B, instead_of=A)).fence == 2
    assert await store.append([delta(user, "m1", 1, "stale", fence=1)]) == [None]
    for stale in (change(user, events=(selected(),), fence=1), change(user, delete=True, fence=1)):
        with pytest.raises(LeaseLostError):
            await store.commit(stale)
    assert await store.append([delta(user, "m1", 1, "b", fence=2)]) == [2]
    done = change(user, puts=(message("m1", role="assistant", text="ab"),), events=(selected(),), fence=2)
    assert (await store.commit(done)).first_seq == 3
    state = await store.load(user, SESSION)
    assert (state.seq, state.messages[0].text) == (3, "ab")


async def test_a_stale_owners_retry_of_what_it_had_written_gets_its_result(store: RedisStore, user: UserId) -> None:
    await store.commit(msgspec.structs.replace(create(user), owner=A, fence=1))
    request = Idempotency("r", "digest", b"{}")
    write = change(user, events=(selected(),), fence=1, write_id="w", idempotency=request)
    first = await store.commit(write)
    await store.acquire(user, SESSION, B, instead_of=A)
    assert await store.commit(write) == first
    again = await store.commit(msgspec.structs.replace(write, write_id="another"))
    assert again.answer == b"{}"


async def test_followers_hear_each_write_once_with_the_request_that_it_answered(
    store: RedisStore, user: UserId
) -> None:
    async with listening(store, owner()) as (feed, ear):
        await store.commit(create(user, SESSION, generating("m1")))
        await feed.follow(user, SESSION)
        text = "NUL \0 and 👩‍👩‍👧"
        await store.append([delta(user, "m1", 0, text), delta(user, "m1", 1, "b")])
        await store.commit(
            change(user, events=(selected("m1"), selected()), idempotency=Idempotency("r\0é", "d", b'{"a":1}'))
        )
        await store.commit(change(user))  # no event, no news
        await store.commit(change(user, delete=True, events=(SessionDeleted(session=SESSION),)))
        plain = {"user": user, "session": SESSION}
        name = MessageId("m1")
        assert await ear.until(4) == [
            News(events=(GenerationDelta(session=SESSION, seq=1, message=name, text=text),), **plain),
            News(events=(GenerationDelta(session=SESSION, seq=2, message=name, text="b"),), **plain),
            News(
                events=(
                    BranchSelected(session=SESSION, seq=3, leaf=name),
                    BranchSelected(session=SESSION, seq=4, leaf=None),
                ),
                request_id="r\0é",
                answer=b'{"a":1}',
                **plain,
            ),
            News(events=(SessionDeleted(session=SESSION, seq=5),), **plain),
        ]
        assert await feed.num_followers(user, SESSION) == 1
        await feed.unfollow(user, SESSION)
        await eventually(lambda: feed.num_followers(user, SESSION), 0)


async def test_announcements_and_letters_reach_whom_they_are_for(store: RedisStore, user: UserId) -> None:
    a, b = owner(), owner()
    async with listening(store, a) as (feed_a, ear_a), listening(store, b) as (feed_b, ear_b):
        await feed_a.follow_user(user)
        await feed_b.follow_user(UserId(f"not {user}"))
        await store.commit(msgspec.structs.replace(create(user), announcement=b"\0made", owner=a, fence=1))
        assert await feed_a.send(b, b"\0hello")
        assert not await feed_a.send("nobody/1", b"")
        await store.acquire(user, SESSION, b, instead_of=a)
        announced, letter = await ear_a.until(2)
        assert announced == Announced(user, b"\0made")
        assert isinstance(letter, Letter)
        assert decode_letter(letter.body) == LeaseTaken(user, SESSION)
        assert await ear_b.until(1) == [Letter(b"\0hello")]


async def test_a_feed_that_was_cut_off_comes_back_with_all_that_it_followed(
    store: RedisStore, server: EmbeddedStore, user: UserId, tmp_path: Path
) -> None:
    await store.commit(create(user, SESSION, generating("m1")))
    async with Proxy(server.socket_path, tmp_path / "proxy.sock") as proxy:
        through = await open_store(proxy.url, event_history=10)
        async with listening(through, owner()) as (feed, ear):
            await feed.follow(user, SESSION)
            proxy.cut()
            assert await ear.until(1) == [Missed()]
            await feed.follow(user, SESSION)  # confirmed anew
            await store.append([delta(user, "m1", 0, "a")])
            assert isinstance((await ear.until(2))[1], News)
        await through.close()


async def test_whoever_waits_for_what_is_unfollowed_meanwhile_has_met_no_store_that_is_away(
    server: EmbeddedStore, user: UserId, tmp_path: Path
) -> None:
    """As where sockets of a user come and go: one that has gone must not count as a store that does not answer."""
    async with Proxy(server.socket_path, tmp_path / "proxy.sock") as proxy:
        through = await open_store(proxy.url, event_history=10)
        async with listening(through, owner()) as (feed, _):
            await feed.follow(user, SESSION)  # it is connected
            proxy.replies_pass.clear()
            waiting = asyncio.ensure_future(feed.follow_user(user))
            await asyncio.sleep(0)
            await feed.unfollow_user(user)
            await waiting
            proxy.replies_pass.set()
            await feed.follow_user(user)
        await through.close()


async def test_whoever_follows_again_at_once_waits_for_the_second_confirmation(
    store: RedisStore, server: EmbeddedStore, user: UserId, tmp_path: Path
) -> None:
    other = SessionId("other")
    for session in (SESSION, other):
        await store.commit(create(user, session, generating("m1")))
    async with Proxy(server.socket_path, tmp_path / "proxy.sock") as proxy:
        through = await open_store(proxy.url, event_history=10)
        async with listening(through, owner()) as (feed, ear), listening(store, owner()) as (direct, _):
            await feed.follow(user, other)
            proxy.replies_pass.clear()
            first = asyncio.ensure_future(feed.follow(user, SESSION))
            await eventually(lambda: direct.num_followers(user, SESSION), 1)
            first.cancel()
            proxy.requests_pass.clear()
            await feed.unfollow(user, SESSION)
            second = asyncio.ensure_future(feed.follow(user, SESSION))
            proxy.replies_pass.set()
            await store.append([msgspec.structs.replace(delta(user, "m1", 0, "a"), session=other)])
            await ear.until(1)  # after the first confirmation
            assert not second.done()
            proxy.requests_pass.set()
            await second
            await store.append([delta(user, "m1", 0, "heard")])
            assert isinstance((await ear.until(2))[1], News)
        await through.close()


async def test_a_feed_without_a_server_says_so_and_waits(own_server: EmbeddedStore, user: UserId) -> None:
    store = await open_store(own_server.url, event_history=10)
    async with listening(store, owner()) as (feed, ear):
        await feed.follow(user, SESSION)
        own_server.stop()
        with pytest.raises(StoreUnavailableError):
            await feed.follow(user, SessionId("s2"))
        await asyncio.to_thread(own_server.start)
        assert await ear.until(1) == [Missed()]
        await store.commit(create(user, SESSION, generating("m1")))
        await feed.follow(user, SESSION)
        await store.append([delta(user, "m1", 0, "a")])
        await ear.until(2)
    await store.close()


async def test_who_lives_who_is_silent_and_who_is_gone(server: EmbeddedStore) -> None:
    link = RedisLink(server.url)
    brief, workers = RedisWorkers(link, ttl_s=0.001), RedisWorkers(link)
    place = uuid.uuid4().hex
    first, second = owner_name(place, "1"), owner_name(place, "2")
    assert await workers.standings([first]) == [Standing.GONE]
    await workers.join(first)
    assert await workers.standings([first, second]) == [Standing.ALIVE, Standing.GONE]
    assert first in await workers.known()
    await workers.note(first, UserId("u\0"), SessionId("s1"))
    await workers.note(first, UserId("u\0"), SessionId("s2"))
    await workers.unnote(first, [(UserId("u\0"), SessionId("s1"))])
    assert await workers.noted(first) == [("u\0", "s2")]
    await brief.join(first)
    await eventually(lambda: workers.standings([first]), [Standing.SILENT])
    assert await workers.beat(first) is Standing.ALIVE
    await workers.join(second)
    assert await workers.standings([first, second]) == [Standing.GONE, Standing.ALIVE]
    assert await workers.beat(first) is Standing.GONE, "and it takes nothing away"
    assert await workers.standings([second]) == [Standing.ALIVE]
    await workers.forget(first)
    assert await workers.noted(first) == []
    assert await workers.standings([second]) == [Standing.ALIVE]
    await workers.forget(second)
    assert await workers.beat(second) is Standing.SILENT, "the others took it for dead"
    await workers.join(second)
    await workers.leave(second)
    assert await workers.standings([second]) == [Standing.GONE]
    await workers.forget(second)
    assert not {first, second} & set(await workers.known())
    await link.close()


async def test_a_store_of_version_1_is_brought_up_to_date_with_its_unfinished_answers(
    own_server: EmbeddedStore, user: UserId
) -> None:
    store = await open_store(own_server.url, event_history=10)
    await store.commit(create(user, SESSION, generating("m1")))
    await store.close()
    with own_server._client() as client:  # as version 1 left it
        client.set("chatserve:schema", 1)
        client.sadd(Keys(user).of("unfinished"), SESSION)
        client.hset(Keys(user).session(SESSION, "session")[0], "seq", 1)
        client.set(Keys(user).of("live-text:", f"{SESSION}:m1"), "kept ")
        client.set(Keys(user).of("live-tokens:", f"{SESSION}:m1"), b"\0\0\0\0")
        client.hset(Keys(user).session(SESSION, "generating")[0], "m1", "0 0")
    one, two = await asyncio.gather(*(open_store(own_server.url, event_history=10) for _ in range(2)))
    (dead,) = await one.workers.known()
    noted = await one.workers.noted(dead)
    assert await two.unfinished(noted) == [(user, SESSION)]
    assert await one.workers.standings([dead]) == [Standing.SILENT]
    lease = await two.acquire(user, SESSION, A)
    assert lease.seq == 1
    assert await two.append([delta(user, "m1", 1, "and more", fence=lease.fence)]) == [2]
    state = await one.load(user, SESSION)
    assert state.messages[0].text == "kept and more"
    with own_server._client() as client:
        assert client.get("chatserve:schema") == str(SCHEMA).encode()
        assert not client.exists(Keys(user).of("unfinished"))
    await one.close()
    await two.close()


async def test_steps_run_in_order_once_and_again_after_a_death_in_the_middle(own_server: EmbeddedStore) -> None:
    link = RedisLink(own_server.url)
    ran: list[int] = []

    def step(before: int, fails: bool = False) -> Migration:
        async def run(link: RedisLink, renew: object) -> None:
            ran.append(before)
            if fails and ran.count(before) == 1:
                raise StoreUnavailableError("it died in the middle")

        return Migration(before, run)

    await bring_up_to_date(link)
    steps = (step(SCHEMA), step(SCHEMA + 1, fails=True))
    with pytest.raises(StoreUnavailableError):
        await bring_up_to_date(link, steps)
    await asyncio.gather(*(bring_up_to_date(link, steps) for _ in range(3)))
    assert ran == [SCHEMA, SCHEMA + 1, SCHEMA + 1]
    assert await link.command("get", "GET", "chatserve:schema") == str(SCHEMA + 2).encode()
    await link.close()


@pytest.mark.parametrize("renews", [True, False])
async def test_who_stood_still_in_a_step_undoes_nothing_of_what_others_did_meanwhile(
    own_server: EmbeddedStore, renews: bool
) -> None:
    link = RedisLink(own_server.url)
    went_on: list[int] = []

    async def slow(link: RedisLink, renew: Callable[[], Awaitable[None]]) -> None:
        await renew()
        await link.command("lock", "SET", "chatserve:schema-lock", "another's")  # after ours had expired
        await link.command("mark", "SET", "chatserve:schema", SCHEMA + 2)
        if renews:
            await renew()
            went_on.append(SCHEMA)

    async def never(link: RedisLink, renew: Callable[[], Awaitable[None]]) -> None:
        went_on.append(SCHEMA + 1)

    await bring_up_to_date(link)
    await bring_up_to_date(link, (Migration(SCHEMA, slow), Migration(SCHEMA + 1, never)))
    assert went_on == []
    assert await link.command("get", "GET", "chatserve:schema") == str(SCHEMA + 2).encode()
    assert await link.command("get", "GET", "chatserve:schema-lock") == b"another's"
    await link.close()


async def test_a_schema_that_no_step_begins_at_is_refused_in_one_line(own_server: EmbeddedStore) -> None:
    link = RedisLink(own_server.url)
    await link.command("mark", "SET", "chatserve:schema", 0)
    with pytest.raises(StartupError, match=rf"schema 0, and this version can bring schemas 1 to {SCHEMA - 1}"):
        await bring_up_to_date(link)
    await link.close()
