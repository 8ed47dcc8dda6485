"""What happens to callers when the way to the store, or the store, breaks."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from chatserve.chat.events import BranchSelected
from chatserve.chat.redis_clients import MAX_CONNECTIONS, MAX_READ_CONNECTIONS
from chatserve.chat.redis_layout import SCHEMA
from chatserve.chat.redis_link import RedisLink
from chatserve.chat.redis_store import RedisStore, open_store
from chatserve.chat.store import Delta, Idempotency, MessageRecord, SessionRecord, Transaction
from chatserve.chat.workers import Owner
from chatserve.errors import NotFoundError, StartupError, StoreUnavailableError
from chatserve.supervisor.embedded_store import EmbeddedStore
from chatserve.types import MessageId, SessionId, UserId
from tests.store.proxy import Proxy

USER = UserId("u")


def create(user: UserId, session: str, text: str = "") -> Transaction:
    record = SessionRecord(
        session=SessionId(session),
        user=user,
        title=session,
        system=None,
        params={},
        leaf=None,
        version=1,
        created_at=1.0,
        updated_at=1.0,
    )
    message = MessageRecord(
        message=MessageId("m"), parent=None, role="assistant", text=text, status="generating", created_at=1.0
    )
    return Transaction(user=user, session=SessionId(session), create=True, record=record, puts=(message,))


def select(user: UserId, session: str, **fields: object) -> Transaction:
    event = BranchSelected(session=SessionId(session), leaf=None)
    return Transaction(user=user, session=SessionId(session), events=(event,), **fields)


def delta(user: UserId, session: str, first_token: int, text: str) -> Delta:
    return Delta(
        user=user,
        session=SessionId(session),
        message=MessageId("m"),
        attempt=0,
        first_token=first_token,
        token_ids=(first_token,),
        text=text,
    )


@pytest.fixture
async def proxy(server: EmbeddedStore, tmp_path: Path) -> AsyncIterator[Proxy]:
    async with Proxy(server.socket_path, tmp_path / "proxy.sock") as opened:
        yield opened


@pytest.fixture
async def proxied(proxy: Proxy) -> AsyncIterator[RedisStore]:
    opened = await open_store(proxy.url, event_history=4096)
    yield opened
    await opened.close()


@pytest.fixture
def own_server(binary: Path, tmp_path: Path) -> Iterator[EmbeddedStore]:
    """A server that the test may break."""
    embedded = EmbeddedStore(tmp_path, tmp_path / "store.sock", binary=binary)
    embedded.start()
    yield embedded
    embedded.stop()


@contextmanager
def frozen(server: EmbeddedStore) -> Iterator[None]:
    assert server.pid is not None
    os.kill(server.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.pid, signal.SIGCONT)


async def test_killed_connections_lose_and_double_nothing(
    store: RedisStore, server: EmbeddedStore, user: UserId
) -> None:
    await store.commit(create(user, "s"))
    numbers: list[int | None] = []
    with server._client() as client:
        for i in range(60):
            if i % 6 == 0:
                client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            numbers += await store.append([delta(user, "s", i, f"{i},")])
            numbers.append((await store.commit(select(user, "s"))).first_seq)
    assert numbers == list(range(1, 121))
    state = await store.load(user, SessionId("s"))
    assert state is not None
    assert state.messages[0].text == "".join(f"{i}," for i in range(60))
    assert state.seq == 120


async def test_connections_killed_in_mid_command_lose_and_double_nothing(
    proxied: RedisStore, store: RedisStore, proxy: Proxy, user: UserId
) -> None:
    await proxied.commit(create(user, "s"))
    proxy.replies_pass.clear()

    async def write(i: int) -> int:
        return (await proxied.commit(select(user, "s"))).first_seq

    writes = [asyncio.create_task(write(i)) for i in range(20)]
    async with asyncio.timeout(20):
        while (await store.load(user, SessionId("s"))).seq == 0:
            pass  # no reply has come back, and some of the writes have been done
    proxy.cut()
    proxy.replies_pass.set()
    assert sorted(await asyncio.gather(*writes)) == list(range(1, 21))


async def test_connections_that_fell_silent_are_replaced_together(proxy: Proxy, user: UserId) -> None:
    store = RedisStore(RedisLink(proxy.url, timeout_s=0.1), event_history=10)
    await store.commit(create(user, "s"))
    await asyncio.gather(*(store.ping() for _ in range(10)), *(store.load(user, SessionId("s")) for _ in range(10)))
    assert proxy.num_connections >= 10
    proxy.stall()
    assert (await store.commit(select(user, "s"))).first_seq == 1
    await asyncio.gather(*(store.ping() for _ in range(10)), *(store.load(user, SessionId("s")) for _ in range(10)))
    assert proxy.num_ignored == 1
    await store.close()


async def test_a_lost_reply_is_asked_for_again_and_the_work_not_done_again(
    proxied: RedisStore, proxy: Proxy, user: UserId
) -> None:
    await proxied.commit(create(user, "s"))
    request = Idempotency("r", "digest", b"answer")
    proxy.lose_replies = 2
    committed = await proxied.commit(select(user, "s", idempotency=request))
    assert (committed.first_seq, committed.answer) == (1, None)
    proxy.lose_replies = 2
    assert await proxied.append([delta(user, "s", 0, "a"), delta(user, "s", 1, "b")]) == [2, 3]
    proxy.lose_replies = 1
    await proxied.commit(create(user, "s2"))
    proxy.lose_replies = 1
    await proxied.commit(select(user, "s2", delete=True))
    state = await proxied.load(user, SessionId("s"))
    assert state is not None
    assert (state.seq, state.messages[0].text) == (3, "ab")


async def test_a_store_that_is_loading_is_waited_for_a_moment(proxied: RedisStore, proxy: Proxy, user: UserId) -> None:
    await proxied.commit(create(user, "s"))
    loading = b"-LOADING the dataset is being read into memory\r\n"
    proxy.say_instead = [loading, loading]
    assert await proxied.load(user, SessionId("s")) is not None
    proxy.say_instead = [loading] * 100
    with pytest.raises(StoreUnavailableError, match=r"read a session: .*the dataset is being read"):
        await proxied.load(user, SessionId("s"))
    assert proxy.say_instead  # it was not the proxy that gave up
    proxy.say_instead = []


async def test_a_server_that_forgot_the_scripts_is_given_them_again(
    store: RedisStore, server: EmbeddedStore, user: UserId
) -> None:
    await store.commit(create(user, "s"))
    with server._client() as client:
        client.script_flush()
        assert await store.append([delta(user, "s", 0, "a"), delta(user, "s", 1, "b")]) == [1, 2]
        client.script_flush()
        assert await store.load(user, SessionId("s")) is not None


async def test_a_cancelled_command_never_hands_its_reply_to_another(
    proxied: RedisStore, proxy: Proxy, user: UserId
) -> None:
    sessions = [f"s{i}" for i in range(20)]
    await asyncio.gather(*(proxied.commit(create(user, session, f"text of {session}")) for session in sessions))
    proxy.delay_s = 0.1
    chance = random.Random(34)

    async def read(session: str) -> str:
        state = await proxied.load(user, SessionId(session))
        assert state is not None
        assert state.record.session == session
        assert state.messages[0].text == f"text of {session}"
        page = await proxied.list_sessions(user, 100, None, f"text of {session}")
        assert session in {summary.session for summary in page.sessions}
        return session

    async def disturbed(session: str) -> None:
        task = asyncio.create_task(read(session))
        await asyncio.wait({task}, timeout=chance.uniform(0, 0.25))
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled():
            assert task.result() == session

    for _ in range(4):
        await asyncio.gather(*(disturbed(chance.choice(sessions)) for _ in range(60)))
    proxy.delay_s = 0.0
    assert await asyncio.gather(*map(read, sessions)) == sessions
    assert proxy.num_connections <= MAX_CONNECTIONS + MAX_READ_CONNECTIONS


async def test_a_cancelled_write_is_done_whole(
    proxied: RedisStore, proxy: Proxy, store: RedisStore, user: UserId
) -> None:
    await proxied.commit(create(user, "s"))
    proxy.delay_s = 0.05
    writing = asyncio.create_task(proxied.append([delta(user, "s", i, f"{i},") for i in range(50)]))
    await asyncio.sleep(0)
    writing.cancel()
    await asyncio.wait({writing})
    assert writing.cancelled()
    await proxied.close()  # waits for it
    state = await store.load(user, SessionId("s"))
    assert state is not None
    assert state.messages[0].text == "".join(f"{i}," for i in range(50))


async def test_a_store_that_does_not_answer_is_unavailable_in_bounded_time(server: EmbeddedStore, user: UserId) -> None:
    store = RedisStore(RedisLink(server.url, timeout_s=0.1), event_history=10)
    try:
        await store.commit(create(user, "s"))
        started = time.monotonic()
        with frozen(server), pytest.raises(StoreUnavailableError, match="save a change"):
            await store.commit(select(user, "s"))
        assert time.monotonic() - started < 3 * 0.2 + 0.35 + 0.5
        # What was sent may have been done; whatever it was, the numbers go on without a gap.
        state = await store.load(user, SessionId("s"))
        assert state is not None
        assert (await store.commit(select(user, "s"))).first_seq == state.seq + 1
    finally:
        await store.close()


async def test_every_call_to_a_store_that_is_gone_fails_as_unavailable(own_server: EmbeddedStore) -> None:
    store = await open_store(own_server.url, event_history=10)
    await store.commit(create(USER, "s"))
    own_server.stop()
    calls: list[Callable[[], Awaitable[object]]] = [
        lambda: store.commit(select(USER, "s")),
        lambda: store.commit(create(USER, "s2")),
        lambda: store.append([delta(USER, "s", 0, "a")]),
        lambda: store.answer(USER, "r"),
        lambda: store.load(USER, SessionId("s")),
        lambda: store.events(USER, SessionId("s"), 0),
        lambda: store.list_sessions(USER, 10, None, None),
        lambda: store.list_sessions(USER, 10, None, "query"),
        lambda: store.unfinished([(USER, SessionId("s"))]),
        lambda: store.acquire(USER, SessionId("s"), Owner("p/n")),
        lambda: store.release(USER, SessionId("s"), 1),
        lambda: store.workers.join(Owner("p/n")),
        lambda: store.workers.beat(Owner("p/n")),
        store.workers.known,
        lambda: store.workers.standings([Owner("p/n")]),
        store.ping,
    ]
    results = await asyncio.gather(*(call() for call in calls), return_exceptions=True)
    assert [type(result) for result in results] == [StoreUnavailableError] * len(calls)
    own_server.start()
    assert await store.load(USER, SessionId("s")) is not None
    await store.close()


async def test_acknowledged_writes_survive_a_kill_of_the_server(own_server: EmbeddedStore) -> None:
    store = await open_store(own_server.url, event_history=4096)
    await store.commit(create(USER, "s"))
    await store.commit(create(USER, "doomed"))
    acknowledged, many = 0, asyncio.Event()

    async def write() -> None:
        nonlocal acknowledged
        for i in range(100_000):
            assert await store.append([delta(USER, "s", i, f"{i},")]) == [i + 1]
            acknowledged = i + 1
            if acknowledged == 50:
                many.set()

    writing = asyncio.create_task(write())
    await store.commit(select(USER, "doomed", delete=True))
    await many.wait()
    assert own_server.pid is not None
    os.kill(own_server.pid, signal.SIGKILL)
    with pytest.raises(StoreUnavailableError):
        await writing

    own_server.stop()
    own_server.start()

    state = await store.load(USER, SessionId("s"))
    assert state is not None
    assert state.seq >= acknowledged
    assert state.messages[0].text == "".join(f"{i}," for i in range(state.seq))
    assert len(await store.events(USER, SessionId("s"), 0) or []) == state.seq
    assert await store.load(USER, SessionId("doomed")) is None
    with pytest.raises(NotFoundError):
        await store.commit(create(USER, "doomed"))
    assert await store.append([delta(USER, "s", state.seq, "!")]) == [state.seq + 1]
    pairs = [(USER, SessionId("s")), (USER, SessionId("doomed"))]
    assert await store.unfinished(pairs) == pairs[:1]
    await store.close()


async def test_a_short_restart_goes_unnoticed(own_server: EmbeddedStore) -> None:
    store = await open_store(own_server.url, event_history=10)
    await store.commit(create(USER, "s"))
    own_server.stop()
    writing = asyncio.create_task(store.commit(select(USER, "s")))
    await asyncio.sleep(0)
    await asyncio.to_thread(own_server.start)
    assert (await writing).first_seq == 1
    await store.close()


async def test_a_full_store_refuses_writes_whole_and_still_reads(own_server: EmbeddedStore) -> None:
    store = await open_store(own_server.url, event_history=10)
    await store.commit(create(USER, "s", "kept"))
    with own_server._client() as client:
        client.config_set("maxmemory", 1)
        with pytest.raises(StoreUnavailableError, match="maxmemory"):
            await store.commit(select(USER, "s", idempotency=Idempotency("r", "d", b"")))
        with pytest.raises(StoreUnavailableError, match="maxmemory"):
            await store.append([delta(USER, "s", 0, "a")])
        state = await store.load(USER, SessionId("s"))
        assert state is not None
        assert (state.seq, state.messages[0].text) == (0, "kept")
        client.config_set("maxmemory", 0)
    assert await store.append([delta(USER, "s", 0, "a")]) == [1]
    await store.close()


async def test_a_newer_schema_is_refused_at_start(own_server: EmbeddedStore) -> None:
    store = await open_store(own_server.url, event_history=10)
    await store.close()
    with own_server._client() as client:
        client.set("chatserve:schema", SCHEMA + 1)
        with pytest.raises(StartupError, match=rf"schema {SCHEMA + 1} .*knows {SCHEMA}: upgrade"):
            await open_store(own_server.url, event_history=10)
        assert client.get("chatserve:schema") == str(SCHEMA + 1).encode()


async def test_tcp_with_a_password_works_and_is_kept_out_of_messages(
    own_server: EmbeddedStore, unused_tcp_port: int
) -> None:
    with own_server._client() as client:
        client.config_set("port", unused_tcp_port)
        client.config_set("requirepass", "se:cr@t")
    address = f"127.0.0.1:{unused_tcp_port}"
    store = await open_store(f"redis://:se%3Acr%40t@{address}/0", event_history=10)
    await store.commit(create(USER, "s"))
    await store.close()
    for url in (f"redis://:wr%40ng@{address}/0", f"redis://{address}"):
        with pytest.raises(StartupError) as failed:
            await open_store(url, event_history=10)
        assert address in str(failed.value)
        assert "\n" not in str(failed.value)
        assert "wr" not in str(failed.value).replace("WRONGPASS", "").replace("wrong", "")


@pytest.mark.parametrize("url", ["", "localhost:6379", "http://localhost", "redis://localhost:port"])
async def test_a_url_that_is_none_is_refused_in_one_line(url: str) -> None:
    with pytest.raises(StartupError) as failed:
        await open_store(url, event_history=10)
    assert "\n" not in str(failed.value)


async def test_each_scheme_has_its_kind_of_connection() -> None:
    for url, kind in (("redis://h", "Connection"), ("rediss://h", "SSLConnection"), ("unix:///s", "Unix")):
        link = RedisLink(url)
        assert link._clients.main.connection_pool.connection_class.__name__.startswith(kind)
        await link.close()


async def test_no_server_is_a_start_up_error_in_one_line(tmp_path: Path, unused_tcp_port: int) -> None:
    for url in (f"unix://{tmp_path}/none.sock", f"redis://127.0.0.1:{unused_tcp_port}"):
        with pytest.raises(StartupError, match="no store at") as failed:
            await open_store(url, event_history=10)
        assert "\n" not in str(failed.value)


async def test_a_server_that_is_being_started_is_waited_for(own_server: EmbeddedStore) -> None:
    own_server.stop()
    opening = asyncio.create_task(open_store(own_server.url, event_history=10, patience_s=20))
    done, _ = await asyncio.wait({opening}, timeout=0.6)  # past the connection's own retries
    assert not done
    await asyncio.to_thread(own_server.start)
    store = await opening
    await store.ping()
    await store.close()
