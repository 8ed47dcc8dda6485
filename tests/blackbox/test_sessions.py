"""Sessions: create, list, search, update, delete, fork; who sees what."""

from __future__ import annotations

import asyncio
import uuid

import pytest
import redis

from tests.blackbox.client import RequestFailedError
from tests.blackbox.conftest import Connect
from tests.blackbox.server import ON_EITHER_STORE
from tests.blackbox.test_stop import idle


async def test_a_new_session_is_empty_and_holds_what_it_was_given(connect: Connect) -> None:
    async with connect() as client:
        system = "  Be\tbrief.\n\x00🙂 "
        session, mirror = await client.started_session(title=" T ", system=system, params={"temperature": 0, "seed": 7})
        assert mirror.messages == {}
        assert mirror.leaf is None
        assert (mirror.title, mirror.system) == (" T ", system)
        assert mirror.params == {"temperature": 0, "seed": 7}
        listed = await client.request("session.list", limit=1)
        assert [s["session"] for s in listed["sessions"]] == [session]
        assert listed["sessions"][0]["messages"] == 0


async def test_paging_visits_every_session_once_newest_first(connect: Connect) -> None:
    async with connect() as client:
        mark = uuid.uuid4().hex
        made = [await client.create(title=f"{mark} {n}") for n in range(7)]
        seen: list[str] = []
        cursor = None
        for _ in range(10):
            fields = {"cursor": cursor} if cursor else {}
            page = await client.request("session.list", limit=3, query=mark.upper(), **fields)
            seen += [s["session"] for s in page["sessions"]]
            cursor = page.get("cursor")
            if not cursor:
                break
        assert seen == made[::-1]


async def test_search_finds_a_part_of_a_text_and_ignores_case(connect: Connect) -> None:
    async with connect() as client:
        mark = uuid.uuid4().hex
        session, _ = await client.started_session(title="plain")
        await client.turn(session, f"Straße {mark} ÄPFEL", max_tokens=1)
        for query in (f"{mark} äpfel", mark[3:20].upper()):
            found = await client.request("session.list", query=query)
            assert [s["session"] for s in found["sessions"]] == [session]
        assert (await client.request("session.list", query=mark + "x"))["sessions"] == []


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"limit": 0}, "limit"),
        ({"limit": 101}, "limit"),
        ({"limit": "5"}, "limit"),
        ({"limit": True}, "limit"),
        ({"limit": 1.5}, "limit"),
        ({"cursor": "no cursor of ours"}, "cursor"),
    ],
)
async def test_bad_list_fields_are_named(connect: Connect, fields: dict[str, object], named: str) -> None:
    async with connect() as client:
        with pytest.raises(RequestFailedError, match="bad_params") as failed:
            await client.request("session.list", **fields)
        assert named in failed.value.frame["detail"]


async def test_an_update_reaches_every_tab_and_the_list(connect: Connect) -> None:
    async with connect() as one, connect() as two:
        session, here = await one.started_session(title="before")
        there = await two.watch(session)
        first = await one.request("session.update", session=session, title="after", system="S", params={"top_k": 3})
        second = await one.request("session.update", session=session, system=None)
        assert second["version"] > first["version"]
        await one.settle()
        await two.until(lambda: there.seq == here.seq and there.title == "after" and there.system is None)
        assert there.tree() == here.tree()
        assert here.params == {"top_k": 3}
        await two.until(lambda: any(f["type"] == "sessions.changed" and f.get("title") == "after" for f in two.frames))


@ON_EITHER_STORE
async def test_delete_stops_generations_first_is_the_last_event_and_for_good(connect: Connect) -> None:
    async with connect() as client:
        session, mirror = await client.started_session()
        _, first = await client.turn(session, "a", max_tokens=2)
        replies = [(await client.say(session, t, first, max_tokens=4000))[1] for t in ("b", "c")]
        await client.request("session.delete", session=session)
        await client.until(lambda: mirror.deleted)
        for reply in replies:
            assert [end["reason"] for end in mirror.ended[reply]] == ["cancelled"]
        with pytest.raises(RequestFailedError, match="not_found"):
            await client.request("session.open", session=session)
        with pytest.raises(RequestFailedError, match="not_found"):
            await client.say(session, "late")
        await idle(connect.server)  # whatever was still to be written has been
        await client.settle()
        assert mirror.log[-1]["type"] == "session.deleted"
        assert session not in {row["session"] for row in (await client.request("session.list"))["sessions"]}
        with redis.Redis.from_url(connect.server.store_url) as store:
            kept = {key.split(b":")[2]: store.ttl(key) for key in store.scan_iter(f"*{session}*")}
        assert set(kept) <= {b"session", b"writes"}, "no late write has made it anew"
        assert all(ttl_s > 0 for ttl_s in kept.values()), "that it was there is known for a while"


async def test_after_the_ack_of_close_no_event_of_the_session_follows(connect: Connect) -> None:
    async with connect() as watcher, connect() as client:
        session, _ = await client.started_session()
        await watcher.watch(session)
        _, reply = await client.say(session, "go on", max_tokens=200)
        await watcher.until(lambda: any(f["type"] == "generation.delta" for f in watcher.frames))
        await watcher.request("session.close", session=session)
        frames_then = len(watcher.frames)
        await client.ended(session, reply)
        await watcher.settle()
        late = [f for f in watcher.frames[frames_then:] if f.get("session") == session]
        assert [f["type"] for f in late if f["type"] != "sessions.changed"] == []


async def test_a_fork_holds_the_path_with_new_ids_and_lives_apart(connect: Connect) -> None:
    async with connect() as client:
        session, mirror = await client.started_session(title="trunk", system="S", params={"temperature": 0})
        _, one = await client.turn(session, "first", max_tokens=5)
        _, two = await client.turn(session, "second", one, max_tokens=5)
        await client.turn(session, "other branch", one, max_tokens=5)
        ack = await client.request("session.fork", session=session, message=two)
        fork = await client.watch(ack["session"])
        trunk = mirror.path(two)
        copy = fork.path(fork.leaf)
        assert [(m["role"], m["text"], m["status"]) for m in copy] == [
            (m["role"], m["text"], m["status"]) for m in trunk
        ]
        assert len(fork.messages) == 4
        assert not set(fork.messages) & set(mirror.messages)
        assert (fork.title, fork.system, fork.params) == ("trunk", "S", {"temperature": 0})
        await client.request("session.delete", session=session)
        await client.turn(ack["session"], "alone", fork.leaf, max_tokens=3)


@ON_EITHER_STORE
async def test_the_same_request_sent_three_times_over_two_sockets_does_its_work_once(connect: Connect) -> None:
    async with connect() as one, connect() as two:
        session, mirror = await one.started_session()
        body = {"session": session, "parent": None, "text": "click", "params": {"max_tokens": 3}}
        request = str(uuid.uuid4())
        pending = [
            await one.begin("message.send", id=request, **body),
            await two.begin("message.send", id=request, **body),
        ]
        acks = [await p for p in pending]
        acks.append(await one.request("message.send", id=request, **body))
        assert acks[0] == acks[1] == acks[2]
        await one.ended(session, acks[0]["reply"])
        assert len(mirror.messages) == 2
        with pytest.raises(RequestFailedError, match="conflict"):
            await two.request("message.send", id=request, **{**body, "text": "another body"})


@ON_EITHER_STORE
async def test_twenty_parallel_appends_and_edits_all_survive(connect: Connect) -> None:
    async with connect() as one, connect() as two:
        session, mirror = await one.started_session()
        root, reply = await one.turn(session, "root", max_tokens=1)
        sends = [
            one.request("message.send", session=session, parent=reply, text=f"s{n}", params={"max_tokens": 2})
            for n in range(10)
        ]
        edits = [
            two.request("message.edit", session=session, message=root, text=f"e{n}", params={"max_tokens": 2})
            for n in range(10)
        ]
        acks = await asyncio.gather(*sends, *edits)
        for ack in acks:
            await one.ended(session, ack["reply"])
        texts = {m["text"] for m in mirror.messages.values() if m["role"] == "user"}
        assert texts == {"root", *(f"s{n}" for n in range(10)), *(f"e{n}" for n in range(10))}
        fresh = await two.watch(session)
        assert fresh.tree() == mirror.tree()
