"""What the store costs: commands a second, time a step of appends, bytes a session and a message, and what part of the
engine's step that is.

Runs against a server of its own in a temporary directory, or against `--url` (where it leaves nothing behind but a few
tombstones that expire). One process measures both ends, so the times are what a web worker waits for on this machine.
The engine's step is that of as many sessions as the step of appends has; it is timed first, alone.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
import uuid
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import redis
from rich.console import Console
from rich.table import Column, Table

from chatserve.bench._engine_step import time_step
from chatserve.chat.events import GenerationStarted, MessageAdded
from chatserve.chat.redis_store import RedisStore, open_store
from chatserve.chat.store import Delta, MessageRecord, SessionRecord, Transaction
from chatserve.model import catalog
from chatserve.supervisor.embedded_store import EmbeddedStore
from chatserve.types import MessageId, SessionId, UserId

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

NUM_SESSIONS = 256
NUM_STEPS = 100
NUM_MESSAGES = 20
ANSWER = "An answer of about four hundred characters, as a small model gives them. " * 6
ANSWER_TOKENS = tuple(range(1000, 1100))
_OUTSIDE_SCRIPTS = {"cmdstat_evalsha", "cmdstat_info", "cmdstat_script|load"}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="chatserve bench store", description=__doc__)
    parser.add_argument("--url", help="a Redis or Valkey server; by default one of our own")
    parser.add_argument("--fsync", choices=["everysec", "always"], default="everysec", help="of our own server")
    parser.add_argument("--model", default=catalog.DEFAULT_MODEL, help="whose step it is compared with")
    parser.add_argument("--device", default="cpu", help="where the model runs")
    parser.add_argument("--step-ms", type=float, help="compare with a step of this length instead of timing one")
    options = parser.parse_args(argv)
    step_s = options.step_ms and options.step_ms / 1e3
    if step_s is None:
        step_s = time_step(NUM_SESSIONS, options.model, options.device)
    if step_s <= 0:
        parser.error(f"--step-ms {options.step_ms}: a step takes longer than nothing")
    with _server(options.url, options.fsync) as url:
        table = asyncio.run(_measure(url, step_s))
    Console().print(table)
    return 0


@contextmanager
def _server(url: str | None, fsync: str) -> Iterator[str]:
    if url is not None:
        yield url
        return
    with tempfile.TemporaryDirectory(prefix="chatserve-bench-") as made:
        embedded = EmbeddedStore(Path(made), Path(made) / "s.sock", fsync="always" if fsync == "always" else "everysec")
        embedded.start()
        try:
            yield embedded.url
        finally:
            embedded.stop()


async def _measure(url: str, step_s: float) -> Table:
    table = Table(
        Column("measured", no_wrap=True), "value", "unit", title=f"the store, {NUM_SESSIONS} sessions of one user"
    )
    store = await open_store(url, event_history=4096)
    user = UserId(f"bench-{uuid.uuid4()}")
    sessions = [SessionId(f"session-{i:04}-{uuid.uuid4()}") for i in range(NUM_SESSIONS)]
    try:
        with redis.Redis.from_url(url) as client:
            await asyncio.gather(*(store.ping() for _ in range(200)))  # connections have buffers, too
            before = _used_bytes(client)
            await asyncio.gather(*(store.commit(_create(user, session)) for session in sessions))
            table.add_row("an empty session", f"{(_used_bytes(client) - before) / NUM_SESSIONS:.0f}", "bytes")

            before = _used_bytes(client)
            for first in range(0, NUM_MESSAGES, 2):
                await asyncio.gather(*(store.commit(_turn(user, session, first)) for session in sessions))
            per_message = (_used_bytes(client) - before) / NUM_SESSIONS / NUM_MESSAGES
            raw = len(ANSWER) + 4 * len(ANSWER_TOKENS)
            table.add_row(
                "a message, with its part of the events", f"{per_message:.0f}", f"bytes ({raw} of them text and ids)"
            )

            for name, value, unit in await _measure_calls(store, client, user, sessions, step_s):
                table.add_row(name, value, unit)
    finally:
        await asyncio.gather(
            *(store.commit(Transaction(user=user, session=s, delete=True)) for s in sessions), return_exceptions=True
        )
        await store.close()
    return table


async def _measure_calls(
    store: RedisStore, client: redis.Redis, user: UserId, sessions: Sequence[SessionId], step_s: float
) -> list[tuple[str, str, str]]:
    rows = []

    async def ping(_: int) -> None:
        await store.ping()

    async def commit_one(_: int) -> None:
        await store.commit(_touch(user, sessions[0]))

    async def commit_all(_: int) -> None:
        await asyncio.gather(*(store.commit(_touch(user, session)) for session in sessions))

    async def load(i: int) -> None:
        await store.load(user, sessions[i % len(sessions)])

    async def page(_: int) -> None:
        await store.list_sessions(user, 50, None, None)

    async def search(_: int) -> None:
        await store.list_sessions(user, 50, None, "nowhere")

    rows.append(("ping, one after another", f"{1 / (await _cost(ping, 500)).wall_s:,.0f}", "a second"))
    rows.append(("commit, one after another", f"{1 / (await _cost(commit_one, 500)).wall_s:,.0f}", "a second"))
    rows.append(("commit, 256 at once", f"{NUM_SESSIONS / (await _cost(commit_all, 5)).wall_s:,.0f}", "a second"))
    for number, (num_rows, num_tokens) in enumerate(((1, 1), (16, 1), (NUM_SESSIONS, 1), (NUM_SESSIONS, 3))):
        rows += await _measure_appends(store, client, user, sessions[:num_rows], number, num_tokens, step_s)
    rows.append((f"load, {NUM_MESSAGES + 3} messages", f"{(await _cost(load, 200)).wall_s * 1e3:.2f}", "ms"))
    rows.append(("list 50 sessions", f"{(await _cost(page, 200)).wall_s * 1e3:.2f}", "ms"))
    num_bytes = NUM_SESSIONS * NUM_MESSAGES * len(ANSWER)
    speed = num_bytes / (await _cost(search, 3)).wall_s / 1e6
    rows.append(("a search that finds nothing", f"{speed:.0f}", "MB of text a second"))
    return rows


async def _measure_appends(
    store: RedisStore,
    client: redis.Redis,
    user: UserId,
    sessions: Sequence[SessionId],
    number: int,
    num_tokens: int,
    step_s: float,
) -> list[tuple[str, str, str]]:
    """Of a new message in each session, so many tokens at once."""
    await asyncio.gather(*(store.commit(_generate(user, session, number)) for session in sessions))

    async def append(i: int) -> None:
        await store.append(_deltas(user, sessions, num_tokens * i, number, num_tokens))

    before = _server_cost(client)
    cost = await _cost(append, NUM_STEPS)
    server_s, log_bytes, calls, commands = (
        (after - b) / (NUM_STEPS + 1)  # one came first, to make connections
        for after, b in zip(_server_cost(client), before, strict=True)
    )
    total = len(sessions) * num_tokens
    together = "" if num_tokens == 1 else f", {num_tokens} tokens at once"
    rows = [
        (f"append, {len(sessions)} sessions{together}", f"{cost.wall_s * 1e3:.2f}", "ms"),
        ("    a token: until answered", f"{cost.wall_s * 1e6 / total:.1f}", "µs"),
        ("    a token: CPU of the caller", f"{cost.cpu_s * 1e6 / total:.1f}", "µs"),
        ("    a token: CPU of the server", f"{server_s * 1e6 / total:.1f}", "µs"),
    ]
    if log_bytes > 0:  # else the server has just written its file anew
        rows.append(("    a token: append-only file", f"{log_bytes / total:.0f}", "bytes"))
    if len(sessions) == NUM_SESSIONS:
        steps_s = step_s * num_tokens
        used_s = cost.cpu_s + server_s
        rows += [
            ("    calls, and commands in them", f"{calls:.0f}, {commands:,.0f}", "an append"),
            ("    the same beside the engine", f"{calls / steps_s:,.1f}, {commands / steps_s:,.0f}", "a second"),
            (f"    of the engine's {step_s * 1e3:,.0f} ms a step", f"{cost.wall_s / steps_s:.2%}", "until answered"),
            ("    of the same", f"{used_s / steps_s:.2%}", "CPU of both"),
        ]
    return rows


class _Cost(NamedTuple):
    """Means of one call."""

    wall_s: float
    cpu_s: float


async def _cost(call: Callable[[int], Awaitable[None]], times: int) -> _Cost:
    await call(0)  # connections and scripts
    started, cpu = time.perf_counter(), time.process_time()
    for i in range(1, times + 1):
        await call(i)
    return _Cost((time.perf_counter() - started) / times, (time.process_time() - cpu) / times)


def _server_cost(client: redis.Redis) -> tuple[float, int, int, int]:
    """CPU seconds of the server, bytes that it wrote to its append-only file, script calls, and commands that scripts
    gave, since it was started.
    """
    cpu, log = client.info("cpu"), client.info("persistence")
    calls = {name: int(found["calls"]) for name, found in client.info("commandstats").items()}
    num_commands = sum(count for name, count in calls.items() if name not in _OUTSIDE_SCRIPTS)
    return (
        float(cpu["used_cpu_user"]) + float(cpu["used_cpu_sys"]),
        int(log.get("aof_current_size", 0)),
        calls.get("cmdstat_evalsha", 0),
        num_commands,
    )


def _used_bytes(client: redis.Redis) -> int:
    return int(client.info("memory")["used_memory"])


def _create(user: UserId, session: SessionId) -> Transaction:
    record = SessionRecord(
        session=session,
        user=user,
        title="A title of thirty characters..",
        system=None,
        params={},
        leaf=None,
        version=1,
        created_at=time.time(),
        updated_at=time.time(),
    )
    return Transaction(user=user, session=session, create=True, record=record)


def _message(number: int, status: str) -> MessageRecord:
    done = status == "done"
    return MessageRecord(
        message=_id(number),
        parent=_id(number - 1) if number else None,
        role="assistant" if number % 2 else "user",
        text=ANSWER if done else "",
        status=status,
        created_at=time.time(),
        token_ids=ANSWER_TOKENS if done else (),
    )


def _id(number: int) -> MessageId:
    return MessageId(f"message-{number:04}-0123456789abcdef01234567")


def _turn(user: UserId, session: SessionId, first: int) -> Transaction:
    puts = (_message(first, "done"), _message(first + 1, "done"))
    events = tuple(
        MessageAdded(
            session=session, message=put.message, parent=put.parent, role=put.role, text=put.text, status="done"
        )
        for put in puts
    )
    return Transaction(user=user, session=session, puts=puts, events=events)


def _generate(user: UserId, session: SessionId, number: int) -> Transaction:
    return Transaction(user=user, session=session, puts=(_message(1000 + number, "generating"),))


def _touch(user: UserId, session: SessionId) -> Transaction:
    started = GenerationStarted(
        session=session, message=_id(0), prompt_tokens=1, cached_tokens=0, swapped_in_tokens=0, computed_tokens=1
    )
    return Transaction(user=user, session=session, events=(started,))


def _deltas(user: UserId, sessions: Sequence[SessionId], first_token: int, number: int, num_tokens: int) -> list[Delta]:
    return [
        Delta(
            user=user,
            session=session,
            message=_id(1000 + number),
            attempt=0,
            first_token=first_token,
            token_ids=tuple(range(num_tokens)),
            text=" word" * num_tokens,
        )
        for session in sessions
    ]
