"""The server's loop and the client over a real Unix socket, in one process: a thread runs the loop."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from chatserve.engine.client import EngineClient
from chatserve.engine.engine import Engine
from chatserve.engine.framing import MAX_FRAME_BYTES, encode
from chatserve.engine.messages import (
    Cancel,
    EngineDown,
    EngineEvent,
    Finished,
    Hello,
    StepOutput,
)
from chatserve.engine.process import listen
from chatserve.engine.server import EngineServer
from chatserve.errors import EngineUnavailableError, StartupError
from chatserve.sched.plan import StepPlan
from tests.fakes.engines import Transcript, make_engine, make_submit
from tests.fakes.fake_runner import FakeRunner

TIMEOUT_S = 20.0


@pytest.fixture
def socket_path() -> Iterator[Path]:
    # Not tmp_path: a socket's path is at most 107 bytes long.
    with tempfile.TemporaryDirectory(prefix="cs") as directory:
        yield Path(directory) / "engine.sock"


class Gate:
    """Lets a runner do a step for each `allow`, or all of them once `open`."""

    def __init__(self) -> None:
        self._permits = threading.Semaphore(0)
        self._open = False
        self.arrived = threading.Event()

    def __call__(self, plan: StepPlan) -> None:
        self.arrived.set()
        if not self._open:
            assert self._permits.acquire(timeout=TIMEOUT_S)

    def allow(self, num_steps: int = 1) -> None:
        self._permits.release(num_steps)

    def open(self) -> None:
        self._open = True
        self._permits.release(1)


@contextmanager
def serving(
    engine: Engine, path: Path, *, max_out_bytes: int = 1 << 24, drain_s: float = 0.0
) -> Iterator[EngineServer]:
    """A server's loop in a thread; ends with it, and fails if the loop does."""
    server = EngineServer(engine, listen(path), max_out_bytes=max_out_bytes, drain_s=drain_s)
    errors: list[BaseException] = []

    def run() -> None:
        try:
            server.run()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join(TIMEOUT_S)
        path.unlink(missing_ok=True)
    assert not thread.is_alive()
    assert not errors, errors


@asynccontextmanager
async def connected(path: Path) -> AsyncIterator[EngineClient]:
    client = EngineClient(path)
    await client.connect(TIMEOUT_S)
    try:
        yield client
    finally:
        await client.close()


class Consumer:
    """Reads a client's events into a transcript, and wakes those who wait for something in it."""

    def __init__(self, client: EngineClient) -> None:
        self.transcript = Transcript()
        self.events: list[EngineEvent] = []
        self._news = asyncio.Condition()
        self._task = asyncio.create_task(self._read(client))

    async def _read(self, client: EngineClient) -> None:
        async for event in client.events():
            self.events.append(event)
            if isinstance(event, StepOutput):
                self.transcript.add(event)
            async with self._news:
                self._news.notify_all()

    async def until(self, done: Callable[[], bool]) -> None:
        async with asyncio.timeout(TIMEOUT_S), self._news:
            await self._news.wait_for(done)

    async def finished(self, request_id: str) -> Finished:
        await self.until(lambda: request_id in self.transcript.finished)
        return self.transcript.finished[request_id]

    def saw(self, kind: type) -> bool:
        return any(isinstance(event, kind) for event in self.events)


async def test_a_request_runs_over_the_socket_and_the_next_turn_sends_only_what_is_new(socket_path: Path) -> None:
    runner = FakeRunner()
    with serving(make_engine(runner), socket_path):
        async with connected(socket_path) as client:
            consumer = Consumer(client)
            client.submit(make_submit("a", range(20)))
            first = await consumer.finished("a")
            assert first.path is not None
            client.submit(make_submit("b", (5, 6, 7), base=first.path))
            await consumer.finished("b")
    text = consumer.transcript.text("a")
    sampling = make_submit("a").sampling
    assert text == runner.oracle(range(20), sampling, num_output_tokens=8)
    turn = [*range(20), *text, 5, 6, 7]
    assert consumer.transcript.text("b") == runner.oracle(turn, sampling, num_output_tokens=8)
    assert consumer.transcript.started["b"].prompt_tokens == len(turn)


async def test_each_client_gets_the_events_of_its_own_requests_only(socket_path: Path) -> None:
    with serving(make_engine(FakeRunner()), socket_path):
        async with connected(socket_path) as ann, connected(socket_path) as bob:
            of_ann, of_bob = Consumer(ann), Consumer(bob)
            for number in range(4):
                ann.submit(make_submit(f"a{number}", range(number, 30)))
                bob.submit(make_submit(f"b{number}", range(number, 30)))
            for number in range(4):
                await of_ann.finished(f"a{number}")
                await of_bob.finished(f"b{number}")
    assert set(of_ann.transcript.finished) == {f"a{number}" for number in range(4)}
    assert set(of_bob.transcript.finished) == {f"b{number}" for number in range(4)}


async def test_a_request_can_be_cancelled_by_its_own_client_only(socket_path: Path) -> None:
    gate = Gate()
    with serving(make_engine(FakeRunner(gate=gate)), socket_path):
        async with connected(socket_path) as ann, connected(socket_path) as bob:
            of_ann, of_bob = Consumer(ann), Consumer(bob)
            ann.submit(make_submit("a", range(20), max_tokens=3))
            bob.cancel(make_submit("a").request_id)
            bob.submit(make_submit("a", range(20)))
            gate.open()
            assert (await of_ann.finished("a")).reason == "length"
            await of_bob.until(lambda: "a" in of_bob.transcript.rejected)
    assert of_bob.transcript.rejected["a"].code == "bad_params"


async def test_requests_of_a_client_that_goes_away_are_cancelled(socket_path: Path) -> None:
    gate = Gate()
    engine = make_engine(FakeRunner(num_blocks=256, gate=gate))
    with serving(engine, socket_path):
        async with connected(socket_path) as watcher:
            async with connected(socket_path) as client:
                client.submit(make_submit("a", range(20), max_tokens=None))
                client.submit(make_submit("b", range(40), max_tokens=None))
                assert await asyncio.to_thread(gate.arrived.wait, TIMEOUT_S)
                gate.allow(5)
            gate.open()
            async with asyncio.timeout(TIMEOUT_S):
                while (report := await watcher.inspect()).running + report.waiting:
                    pass
    assert report.device.pinned == 0
    assert report.counters["output_tokens"] < 500


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: engine\r\n\r\n",
        struct.pack(">I", MAX_FRAME_BYTES + 1),
        struct.pack(">I", 3) + b"\xc1\xc1\xc1",
        struct.pack(">I", 1) + b"\x80",
        struct.pack(">I", 7) + b"\x81\xa4type\xa1",
        struct.pack(">I", 0),
    ],
    ids=["another protocol", "too long", "no MessagePack", "no tag", "cut off", "empty"],
)
async def test_garbage_drops_its_sender_and_nobody_else(
    socket_path: Path, garbage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    gate = Gate()
    with caplog.at_level(logging.WARNING), serving(make_engine(FakeRunner(gate=gate)), socket_path):
        async with connected(socket_path) as client:
            consumer = Consumer(client)
            client.submit(make_submit("a", range(20)))
            with socket.socket(socket.AF_UNIX) as other:
                other.settimeout(TIMEOUT_S)
                other.connect(str(socket_path))
                other.sendall(encode(Cancel(make_submit("a").request_id)) + garbage)
                gate.open()
                await asyncio.to_thread(_read_to_end, other)
            assert (await consumer.finished("a")).reason == "length"
    assert "speaks another language" in caplog.text


def _read_to_end(sock: socket.socket) -> None:
    while sock.recv(65536):
        pass


async def test_a_client_that_does_not_read_is_dropped_and_nobody_waits_for_it(socket_path: Path) -> None:
    engine = make_engine(FakeRunner(num_blocks=1024, num_host_blocks=0), max_running=8)
    with serving(engine, socket_path, max_out_bytes=20_000), socket.socket(socket.AF_UNIX) as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        deaf.connect(str(socket_path))
        for number in range(4):
            deaf.sendall(encode(make_submit(f"deaf{number}", range(4), max_tokens=2_500)))
        async with connected(socket_path) as client:
            consumer = Consumer(client)
            client.submit(make_submit("a", range(20)))
            assert (await consumer.finished("a")).reason == "length"
            async with asyncio.timeout(TIMEOUT_S * 3):
                while (report := await client.inspect()).running:
                    pass
    assert report.counters["output_tokens"] < 4 * 2_500


async def test_the_client_sees_an_engine_die_and_the_next_one_come(socket_path: Path) -> None:
    gate = Gate()
    engine = make_engine(FakeRunner(gate=gate))
    client = EngineClient(socket_path)
    with pytest.raises(EngineUnavailableError):
        client.submit(make_submit("early", range(3)))
    with serving(engine, socket_path):
        await client.connect(TIMEOUT_S)
        consumer = Consumer(client)
        client.submit(make_submit("a", range(20), max_tokens=100))
        gate.allow(4)
        await consumer.until(lambda: len(consumer.transcript.text("a")) >= 2)
        gate.open()
    await consumer.until(lambda: consumer.saw(EngineDown))
    assert client.info is None
    with pytest.raises(EngineUnavailableError):
        client.submit(make_submit("b", range(20)))
    with pytest.raises(EngineUnavailableError):
        await client.inspect()
    successor = make_engine(FakeRunner())
    with serving(successor, socket_path):
        await consumer.until(lambda: isinstance(consumer.events[-1], Hello))
        assert client.info == successor.info
        client.submit(make_submit("c", range(20)))
        await consumer.finished("c")
    await client.close()
    hellos = [event.info.epoch for event in consumer.events if isinstance(event, Hello)]
    assert hellos == [engine.info.epoch, successor.info.epoch]


async def test_nobody_can_submit_to_an_engine_that_the_consumer_has_not_heard_of(socket_path: Path) -> None:
    """Or a request would be taken for one that died with the engine before, and be sent twice."""
    two_unread = asyncio.Event()

    class Watched(asyncio.Queue):  # type: ignore[type-arg]
        def _put(self, item: object) -> None:
            super()._put(item)
            if self.qsize() == 2:
                two_unread.set()

    client = EngineClient(socket_path)
    client._events = Watched()
    with serving(make_engine(FakeRunner()), socket_path):
        await client.connect(TIMEOUT_S)
        events = client.events()
        assert isinstance(await anext(events), Hello)
    with serving(make_engine(FakeRunner()), socket_path):
        await asyncio.wait_for(two_unread.wait(), TIMEOUT_S)  # EngineDown and the next Hello
        with pytest.raises(EngineUnavailableError):
            client.submit(make_submit("a", range(3)))
        assert isinstance(await anext(events), EngineDown)
        with pytest.raises(EngineUnavailableError):
            client.submit(make_submit("a", range(3)))
        assert isinstance(await anext(events), Hello)
        client.submit(make_submit("a", range(3)))
        await client.close()


async def test_connect_says_when_there_is_no_engine(socket_path: Path) -> None:
    client = EngineClient(socket_path)
    with pytest.raises(EngineUnavailableError):
        await client.connect(0.05)
    await client.close()


async def test_drain_refuses_what_is_new_and_waits_for_what_runs(socket_path: Path) -> None:
    gate = Gate()
    with serving(make_engine(FakeRunner(gate=gate)), socket_path):
        async with connected(socket_path) as client:
            consumer = Consumer(client)
            client.submit(make_submit("a", range(20)))
            assert await asyncio.to_thread(gate.arrived.wait, TIMEOUT_S)
            drained = asyncio.create_task(client.drain())
            await asyncio.sleep(0)
            client.submit(make_submit("b", range(20)))
            gate.open()
            await consumer.until(lambda: "b" in consumer.transcript.rejected)
            await asyncio.wait_for(drained, TIMEOUT_S)
            assert (await consumer.finished("a")).reason == "length"
    assert consumer.transcript.rejected["b"].code == "overloaded"


async def test_cancelling_whoever_waits_for_a_report_harms_nobody(socket_path: Path) -> None:
    gate = Gate()
    with serving(make_engine(FakeRunner(gate=gate)), socket_path):
        async with connected(socket_path) as client:
            consumer = Consumer(client)
            client.submit(make_submit("a", range(20)))
            assert await asyncio.to_thread(gate.arrived.wait, TIMEOUT_S)
            waiting = asyncio.create_task(client.inspect())
            await asyncio.sleep(0)
            waiting.cancel()
            gate.open()
            await consumer.finished("a")
            report = await client.inspect(with_map=True)
    assert len(report.block_map) == report.device.total


def test_the_socket_is_its_owners_alone(socket_path: Path) -> None:
    directory = socket_path.parent / "run"
    directory.mkdir(mode=0o755)
    with listen(directory / "engine.sock"):
        assert directory.stat().st_mode & 0o777 == 0o700
        assert (directory / "engine.sock").stat().st_mode & 0o777 == 0o600


def test_a_stale_socket_is_replaced_and_a_living_one_is_not(socket_path: Path) -> None:
    listen(socket_path).close()
    with listen(socket_path), pytest.raises(StartupError, match="another engine"):
        listen(socket_path, patience_s=0.0)


def test_a_socket_whose_process_is_on_its_way_out_is_waited_for(socket_path: Path) -> None:
    old = listen(socket_path)
    accepted: list[socket.socket] = []

    def end_once_asked() -> None:
        accepted.append(old.accept()[0])
        old.close()

    ending = threading.Thread(target=end_once_asked)
    ending.start()
    with listen(socket_path):
        ending.join()
    accepted[0].close()


def test_a_socket_path_that_is_too_long_is_said(socket_path: Path) -> None:
    with pytest.raises(StartupError, match="107 bytes"):
        listen(socket_path.parent / ("x" * 100) / "engine.sock")


def test_a_socket_is_not_put_where_others_can_reach(socket_path: Path) -> None:
    shared = socket_path.parent / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    with pytest.raises(StartupError, match="open to other users"):
        listen(shared / "engine.sock")
