"""The store on a cluster of three nodes, and behind sentinels that promote a replica."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import redis

from chatserve.chat.feed import Letter, Missed, News
from chatserve.chat.redis_clients import open_clients
from chatserve.chat.redis_feed import RedisFeed
from chatserve.chat.redis_link import RedisLink
from chatserve.chat.redis_store import RedisStore, open_store
from chatserve.chat.store import LeaseLostError, OwnedElsewhereError
from chatserve.chat.workers import Owner, Standing
from chatserve.errors import StartupError, StoreUnavailableError
from chatserve.supervisor.network import ping_redis
from chatserve.types import UserId
from tests.store.records import SESSION, change, create, delta, generating, selected
from tests.store.test_leases import listening, owner

SERVER = shutil.which("redis-server")
CLI = shutil.which("redis-cli")

pytestmark = pytest.mark.skipif(SERVER is None or CLI is None, reason="no redis-server and redis-cli on this machine")

START_S = 30.0


class Servers:
    """Redis processes on ports of 127.0.0.1."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, port: int, *options: str) -> None:
        assert SERVER is not None
        directory = self._directory / str(port)
        directory.mkdir()
        common = ["--port", str(port), "--bind", "127.0.0.1", "--dir", str(directory), "--save", ""]
        if "--sentinel" in options:
            config = directory / "sentinel.conf"
            config.write_text("\n".join(["port " + str(port), "bind 127.0.0.1", f"dir {directory}", *options[1:]]))
            argv = [SERVER, str(config), "--sentinel"]
        else:
            argv = [SERVER, *common, *options]
        log = (directory / "log").open("wb")
        with log:
            self.processes[port] = subprocess.Popen(argv, stdout=log, stderr=log, cwd=directory)
        self.until(lambda: bool(self.client(port).ping()))

    def client(self, port: int) -> redis.Redis:
        return redis.Redis(port=port, socket_timeout=5, decode_responses=True)

    @staticmethod
    def until(condition: Callable[[], bool]) -> None:
        """Servers tell nobody when they are ready."""
        give_up_at = time.monotonic() + START_S
        while True:
            with contextlib.suppress(redis.RedisError):
                if condition():
                    return
            assert time.monotonic() < give_up_at, "not ready in time"
            time.sleep(0.02)

    def end(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    started = Servers(tmp_path_factory.mktemp("servers"))
    yield started
    started.end()


@pytest.fixture(scope="module")
def cluster(servers: Servers, unused_tcp_port_factory: Callable[[], int]) -> list[int]:
    ports: list[int] = []
    while len(ports) < 3:
        port = unused_tcp_port_factory()
        if port + 10_000 < 65_536:  # the nodes' own talk
            ports.append(port)
    for port in ports:
        servers.start(port, "--cluster-enabled", "yes", "--cluster-node-timeout", "2000")
    addresses = [f"127.0.0.1:{port}" for port in ports]
    subprocess.run([CLI or "", "--cluster", "create", *addresses, "--cluster-yes"], check=True, capture_output=True)
    for port in ports:
        servers.until(lambda port=port: servers.client(port).cluster("info")["cluster_state"] == "ok")
    return ports


async def test_a_cluster_keeps_each_user_in_one_slot_and_all_of_them_somewhere(
    cluster: list[int], servers: Servers
) -> None:
    url = f"redis+cluster://127.0.0.1:{cluster[0]},127.0.0.1:{cluster[1]}"
    await ping_redis(url)
    one, two = await asyncio.gather(*(open_store(url, event_history=100) for _ in range(2)))
    users = [UserId(f"user {i} {uuid.uuid4()}") for i in range(12)]
    a, b = owner(), owner()
    try:
        async with listening(two, b) as (feed, ear):
            await one.workers.join(a)
            for user in users:
                await one.workers.note(a, user, SESSION)
                made = create(user, SESSION, generating("m1"), title="t")
                await one.commit(msgspec.structs.replace(made, owner=a, fence=1))
                await feed.follow(user, SESSION)
            step = [delta(user, "m1", 0, f"of {user}", fence=1) for user in users]
            assert await one.append(step) == [1] * len(users)
            assert await one.append(step) == [1] * len(users), "a repeat"
            news = await ear.until(len(users))
            assert {heard.user for heard in news if isinstance(heard, News)} == set(users)
            assert await one.unfinished(await two.workers.noted(a)) == sorted((user, SESSION) for user in users)
            assert await two.workers.standings([a, b]) == [Standing.ALIVE, Standing.GONE]
            for user in users:
                state = await two.load(user, SESSION)
                assert state.messages[0].text == f"of {user}"
                assert len(await two.events(user, SESSION, 0)) == 1
                page = await two.list_sessions(user, 5, None, f"of {user}")
                assert [found.session for found in page.sessions] == [SESSION]
                with pytest.raises(OwnedElsewhereError):
                    await two.acquire(user, SESSION, b)
                assert (await two.acquire(user, SESSION, b, instead_of=a)).fence == 2
                with pytest.raises(LeaseLostError):
                    await one.commit(change(user, events=(selected(),), fence=1))
            assert await feed.num_followers(users[0], SESSION) == 1
            assert await one.workers.beat(a) is Standing.ALIVE
            assert await feed.send(b, b"hello")
            heard = (await ear.until(len(users) + 1))[-1]
            assert heard == Letter(b"hello")
        held = [servers.client(port).dbsize() for port in cluster]
        assert all(held), "every node has some"
    finally:
        await one.close()
        await two.close()


async def test_a_letter_counts_as_heard_whichever_node_of_a_cluster_its_reader_is_at(
    cluster: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await open_store(f"redis+cluster://127.0.0.1:{cluster[0]}", event_history=100)
    reader, user = owner(), UserId(uuid.uuid4().hex)
    try:
        for port in cluster:
            monkeypatch.setattr(
                "chatserve.chat.redis_clients.random.choice",
                lambda nodes, port=port: next(node for node in nodes if node.port == port),
            )
            async with listening(store, reader) as (feed, ear):
                await feed.follow_user(user)  # then it reads its letters, too
                monkeypatch.undo()
                for number in range(3):
                    assert await feed.send(reader, b"%d" % number)
                assert await ear.until(3) == [Letter(b"%d" % number) for number in range(3)]
            assert not await feed.send("nobody/1", b"")
    finally:
        await store.close()


@pytest.fixture(scope="module")
def sentinels(servers: Servers, unused_tcp_port_factory: Callable[[], int]) -> tuple[int, int, list[int]]:
    primary, replica, *watching = (unused_tcp_port_factory() for _ in range(5))
    servers.start(primary, "--appendonly", "yes")
    servers.start(replica, "--appendonly", "yes", "--replicaof", f"127.0.0.1 {primary}")
    for port in watching:
        servers.start(
            port,
            "--sentinel",
            f"sentinel monitor chats 127.0.0.1 {primary} 2",
            "sentinel down-after-milliseconds chats 500",
            "sentinel failover-timeout chats 3000",
        )
    for port in watching:
        servers.until(
            lambda port=port: (
                servers.client(port).sentinel_master("chats")["num-other-sentinels"] == 2
                and servers.client(port).sentinel_master("chats")["num-slaves"] == 1
            )
        )
    return primary, replica, watching


async def test_behind_sentinels_the_new_primary_is_found_and_goes_on(
    sentinels: tuple[int, int, list[int]], servers: Servers
) -> None:
    primary, replica, watching = sentinels
    url = "redis+sentinel://" + ",".join(f"127.0.0.1:{port}" for port in watching) + "/chats"
    await ping_redis(url)
    store = await open_store(url, event_history=100)
    user = UserId(f"user {uuid.uuid4()}")
    try:
        async with listening(store, Owner("p/1")) as (feed, ear):
            await store.commit(create(user, SESSION, generating("m1")))
            await feed.follow(user, SESSION)
            assert await store.append([delta(user, "m1", 0, "before ")]) == [1]
            await ear.until(1)
            await asyncio.to_thread(
                servers.until, lambda: servers.client(replica).info("replication")["master_link_status"] == "up"
            )
            await asyncio.to_thread(lambda: servers.client(primary).wait(1, 5000))
            servers.processes[primary].send_signal(signal.SIGKILL)
            await asyncio.to_thread(
                servers.until, lambda: servers.client(replica).info("replication")["role"] == "master"
            )
            number = await _persistently(store, user)
            assert number == [2]
            state = await store.load(user, SESSION)
            assert state.messages[0].text == "before and after"
            await feed.follow(user, SESSION)
            assert Missed() in ear.heard
    finally:
        await store.close()


async def _persistently(store: RedisStore, user: UserId) -> list[int | None]:
    async with asyncio.timeout(START_S):
        while True:
            with contextlib.suppress(StoreUnavailableError):
                return await store.append([delta(user, "m1", 1, "and after")])
            await asyncio.sleep(0.05)


async def test_a_cluster_none_of_whose_nodes_answers_is_away_and_no_bug_of_ours() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # and nobody listens
        link = RedisLink(f"redis+cluster://127.0.0.1:{closed.getsockname()[1]}")
        with pytest.raises(StoreUnavailableError):
            await link.command("answer a ping", "PING")
        feed = RedisFeed(link, owner())
        hearing = asyncio.create_task(anext(feed.heard()))
        with pytest.raises(StoreUnavailableError):
            await feed.num_followers(UserId("u"), SESSION)
        done, _ = await asyncio.wait([hearing], timeout=0.2)
        assert not done, "it tries again"
        hearing.cancel()
        await asyncio.gather(hearing, return_exceptions=True)
        await feed.close()
        await link.close()


@pytest.mark.parametrize(
    "url",
    ["redis+sentinel://h:26379", "redis+sentinel:///name", "redis+cluster://", "http+cluster://h", "redis+other://h"],
)
async def test_an_address_of_no_known_kind_is_refused_in_one_line(url: str) -> None:
    with pytest.raises(StartupError) as failed:
        await ping_redis(url)
    assert "\n" not in str(failed.value)


def test_passwords_and_several_addresses_are_taken_from_the_url() -> None:
    clients = open_clients("rediss+cluster://me:p%40ss@one:7000,[::1]:7001,three", 1.0)
    assert clients.is_cluster
    nodes = clients.main.nodes_manager.startup_nodes.values()
    assert [(node.host, node.port) for node in nodes] == [("one", 7000), ("::1", 7001), ("three", 6379)]
    assert clients.main.connection_kwargs["username"] == "me"
    assert clients.main.connection_kwargs["password"] == "p@ss"


@pytest.mark.parametrize(
    "url", ["redis+cluster://127.0.0.1:1", "redis+sentinel://127.0.0.1:1/one", "redis://127.0.0.1:1"]
)
async def test_a_store_of_which_nothing_answers_is_away_whatever_kind_it_is(url: str) -> None:
    link = RedisLink(url)
    try:
        with pytest.raises(StoreUnavailableError, match="the store could not answer") as told:
            await link.command("answer", "PING")
    finally:
        await link.close()
    assert len(told.value.detail) < 300, "no insides of a client"
