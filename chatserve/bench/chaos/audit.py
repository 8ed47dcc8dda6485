"""After the storm: what must be there is, and nothing is left over.

Looks from outside only: sockets, HTTP, the store's keys, the processes. Everything it finds wrong is a sentence of its
own, so that one fault does not hide another.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from typing import TYPE_CHECKING, Final

from redis.asyncio import Redis

from chatserve.bench.chaos.client import ChatClient
from chatserve.bench.chaos.mirror import demand

if TYPE_CHECKING:
    from collections.abc import Sequence

    from chatserve.bench.chaos.person import Person
    from chatserve.bench.chaos.program import ProcessInfo, Program
    from chatserve.bench.chaos.tally import Tally

_QUIET_S: Final = 60.0
"""How long what was running may take to be gone."""
_ALARMS: Final = ("Traceback (most recent call last)", " CRITICAL ", "has crashed", "failed after its ack")
_KEY: Final = re.compile(r"chatserve:\{[^}]+\}:(?P<kind>[a-z-]+)(?::(?P<session>[^:]+))?(?::.*)?")
_OF_SESSION: Final = {"session", "metas", "texts", "tokens", "order", "log", "writes"}
_ONLY_WHILE_GENERATING: Final = {"generating", "tail"}
_OF_USER: Final = {"index", "usage"}
_OF_ALL: Final = {"chatserve:schema", "chatserve:users", "chatserve:workers"}


async def check_person(person: Person, url: str, tally: Tally) -> None:
    """A client that was never there before sees exactly what this user was promised, and what both tabs show.

    Raises:
        ProtocolViolationError: it does not.
    """
    demand(await person.listed() == person.ledgers.keys(), f"the list of {person.name} is not what was acknowledged")
    async with ChatClient(url, token=person.token, keeps_frames=False) as client:
        for session, ledger in person.ledgers.items():
            stored = await client.watch(session)
            ledger.compare(session, stored)
            seen = person.mirror(session)
            demand(seen.tree() == stored.tree(), f"what was streamed of {session} is not what is stored")
            tally.messages += len(stored.messages)
            for message in stored.messages.values():
                tally.characters += len(message["text"])
                if message["role"] == "assistant":
                    tally.ends[message["status"]] += 1
    for line in person.lines:
        tally.events += sum(mirror.num_events for mirror in line.mirrors.values())


async def check_idle(program: Program) -> list[str]:
    """With every client gone: no request, no pinned or private block, no socket."""
    deadline = time.monotonic() + _QUIET_S
    while wrong := await asyncio.to_thread(_busy, program):
        if time.monotonic() > deadline:
            return wrong
        await asyncio.sleep(0.2)
    return []


def _busy(program: Program) -> list[str]:
    try:
        status, body = program.get("/metrics")
    except OSError as error:
        return [f"{program.url} does not answer: {error}"]
    text = body.decode()
    found = {name: float(value) for name, value in re.findall(r"^(chatserve_\S+) (\S+)$", text, re.MULTILINE)}
    if status != 200 or not found.get("chatserve_engine_up"):
        return [f"{program.url}: the engine does not answer"]
    wrong = [
        f"{program.url}: {name} is {found[name]:g} with no client left"
        for name in ("chatserve_running_requests", "chatserve_queued_requests", "chatserve_sockets")
        if found[name]
    ]
    for tier in ("device", "host"):
        blocks = {
            state: found[f'chatserve_kv_blocks{{state="{state}",tier="{tier}"}}']
            for state in ("total", "free", "cached", "private", "transit", "pinned")
        }
        if blocks["pinned"] or blocks["private"] or blocks["transit"]:
            wrong.append(f"{program.url}: {tier} blocks are held by nobody: {blocks}")
        if blocks["free"] + blocks["cached"] != blocks["total"]:
            wrong.append(f"{program.url}: {tier} blocks do not add up: {blocks}")
    return wrong


def check_log(program: Program) -> list[str]:
    """Lines that no fault of another process excuses."""
    lines = program.log().splitlines()
    return [f"{program.log_path.name}: {line}" for line in lines if any(alarm in line for alarm in _ALARMS)]


async def check_store(url: str, people: Sequence[Person], num_workers: int) -> list[str]:
    """No key of anything that is over, none of a kind that is not known, and no owner of leases but those that live."""
    sessions = {session for person in people for session in person.ledgers}
    async with Redis.from_url(url, decode_responses=True) as client:
        found = [(key, await client.ttl(key)) async for key in client.scan_iter(count=1000)]
        counts = [(key, str(await client.hget(key, "generating"))) for key, _ in found if key.endswith(":usage")]
        owners = {str(owner) for owner in await client.smembers("chatserve:workers")}
    complaints = ((_complaint(key, expires=ttl_s >= 0, sessions=sessions, owners=owners), key) for key, ttl_s in found)
    wrong = [f"{complaint}: {key}" for complaint, key in complaints if complaint]
    wrong += [f"{key} counts {count} answers, and none is being generated" for key, count in counts if count != "0"]
    if len(owners) != num_workers:
        wrong.append(f"{num_workers} web workers live, and these may own leases: {sorted(owners)}")
    return wrong


def _complaint(key: str, *, expires: bool, sessions: set[str], owners: set[str]) -> str:
    """What is wrong with a key that is there when nothing is being done; empty where nothing is."""
    if (held := key.removeprefix("chatserve:held:")) != key:
        return "" if held in owners else "leases of a web worker that is gone"
    if (place := key.removeprefix("chatserve:worker:")) != key:
        is_taken = any(owner.startswith(f"{place}/") for owner in owners)
        return "" if is_taken or expires else "the place of a web worker that is gone"
    found = _KEY.fullmatch(key)
    if found is None:
        return "" if key in _OF_ALL else "a key of an unknown kind"
    return _complaint_of_user(found["kind"], found["session"], expires=expires, sessions=sessions)


def _complaint_of_user(kind: str, session: str | None, *, expires: bool, sessions: set[str]) -> str:
    if kind in _OF_SESSION:
        # Of a deleted session its tombstone and the ids of its last writes stay for a while.
        may_stay = session in sessions or (kind in {"session", "writes"} and expires)
        return "" if may_stay else "a key of a session that was deleted"
    if kind == "request":
        return "" if expires else "an answered request that is never forgotten"
    if kind in _ONLY_WHILE_GENERATING:
        return "a key of an answer that has ended"
    return "" if kind in _OF_USER else "a key of an unknown kind"


def check_ended(started: Sequence[ProcessInfo]) -> list[str]:
    """Nothing that the program started outlives it."""
    return [f"the {kind} process {pid} outlived the program" for kind, pid in started if _is_alive(pid)]


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
