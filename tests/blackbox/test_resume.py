"""A client that drops its connection at any frame ends with what one that never did has."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

import pytest

from tests.blackbox.client import ChatClient, Mirror
from tests.blackbox.server import ON_EITHER_STORE, Server

Connect = Callable[..., ChatClient]


class Follower:
    """Follows one session over many sockets, keeping one mirror across them."""

    def __init__(self, make: Connect, session: str) -> None:
        self.make = make
        self.session = session
        self.mirror = Mirror()
        self.client: ChatClient | None = None

    async def attach(self) -> ChatClient:
        """Open the session on the first socket, resume where the mirror stands on the later ones."""
        if self.client is None:
            self.client = self.make()
            await self.client.open()
            await self.client.hello()
            self.mirror = await self.client.watch(self.session)
            return self.client
        self.client = self.make(resume=[{"session": self.session, "after": self.mirror.seq}])
        self.client.sessions[self.session] = self.mirror
        await self.client.open()
        await self.client.hello()
        return self.client


@pytest.mark.parametrize(
    ("connect", "seed"), [("server", 0), ("server", 1), ("server_on_redis", 2)], indirect=["connect"]
)
async def test_ten_reconnects_at_random_frames_lose_and_repeat_nothing(connect: Connect, seed: int) -> None:
    choose = random.Random(seed)
    async with connect() as steady:
        session, mirror = await steady.started_session(params={"temperature": 1.0, "seed": seed})
        follower = Follower(connect, session)
        _, reply = await steady.say(session, "a long story", max_tokens=400)
        for _ in range(10):
            client = await follower.attach()
            goal = follower.mirror.seq + choose.randrange(1, 12)
            await client.until(lambda goal=goal: follower.mirror.seq >= goal or follower.mirror.ended[reply])
            client.cut()
            await client.closed()
        client = await follower.attach()
        await client.ended(session, reply)
        await steady.ended(session, reply)
        await client.until(lambda: follower.mirror.seq >= mirror.seq)
        assert follower.mirror.tree() == mirror.tree()
        await client.close()
        again = await steady.request(
            "message.regenerate", session=session, message=reply, params={"max_tokens": 400, "seed": seed}
        )
        await steady.ended(session, again["reply"])
        assert steady.text(session, again["reply"]) == mirror.messages[reply]["text"], "the uninterrupted seeded run"


@ON_EITHER_STORE
async def test_a_late_joiner_starts_at_once_without_a_gap(connect: Connect) -> None:
    async with connect() as steady:
        session, mirror = await steady.started_session(params={"temperature": 1.0, "seed": 3})
        early = Follower(connect, session)
        await (await early.attach()).close()
        _, reply = await steady.say(session, "talk", max_tokens=1500)
        await steady.until(lambda: mirror.seq >= early.mirror.seq + 300)
        async with connect() as late:
            joined = await late.watch(session)
            back = await early.attach()
            await back.until(lambda: bool(early.mirror.messages.get(reply, {}).get("text")))
            for there in (joined, early.mirror):
                assert there.messages[reply]["status"] == "generating", "while it goes on"
                assert there.messages[reply]["text"]
            assert back.snapshots[session] == 0, "what it missed is still there: it need not begin anew"
            await steady.request("generation.stop", session=session, message=reply)
            for client, there in ((late, joined), (back, early.mirror)):
                await client.ended(session, reply)
                await client.settle()
                assert there.tree() == mirror.tree()
            await back.close()


async def test_a_trimmed_history_is_answered_with_a_snapshot(
    start_server: Callable[..., Server], store_options: dict[str, str]
) -> None:
    server = start_server(event_history=50, **store_options)
    async with ChatClient(server.ws_url) as steady:
        session, mirror = await steady.started_session()
        await steady.turn(session, "👩‍👩‍👧‍👦 talk", max_tokens=600)
        earlier = copy.deepcopy(mirror)
        await steady.request("session.update", session=session, title="news")
        await steady.settle()
        for after, snapshot in ((0, True), (mirror.seq + 5, True), (earlier.seq, False)):
            late = ChatClient(server.ws_url, resume=[{"session": session, "after": after}])
            if not snapshot:
                late.sessions[session] = copy.deepcopy(earlier)
            async with late:
                await late.until(lambda late=late: late.sessions[session].seq >= mirror.seq)
                assert late.snapshots[session] == int(snapshot)
                assert late.sessions[session].tree() == mirror.tree()


async def test_resuming_another_users_session_shows_nothing_of_it(
    start_server: Callable[..., Server], store_options: dict[str, str], tmp_path
) -> None:
    from chatserve.server.auth import add_token

    tokens = tmp_path / "tokens"
    secrets = {user: add_token(tokens, user) for user in ("ada", "bob")}
    server = start_server(tokens_file=tokens, **store_options)
    async with ChatClient(server.ws_url, token=secrets["ada"]) as ada:
        session, mirror = await ada.started_session(title="private title", system="private system")
        message, reply = await ada.turn(session, "private text", max_tokens=5)
        resume = [{"session": session, "after": 0}]
        async with ChatClient(server.ws_url, token=secrets["bob"], resume=resume) as bob:
            await bob.until(lambda: any(f["type"] == "error" for f in bob.frames))
            for request, fields in (
                ("session.open", {}),
                ("session.delete", {}),
                ("session.update", {"title": "mine"}),
                ("session.fork", {"message": message}),
                ("message.send", {"parent": reply, "text": "x"}),
                ("message.edit", {"message": message, "text": "x"}),
                ("message.regenerate", {"message": reply}),
                ("message.continue", {"message": reply}),
                ("message.delete", {"message": message}),
                ("branch.select", {"message": message}),
                ("generation.stop", {"message": reply}),
            ):
                answer = await bob.begin(request, session=session, **fields)
                with pytest.raises(Exception, match="not_found"):
                    await answer
            await bob.send({"type": "typing", "session": session, "parent": None, "text": "spy"})
            assert (await bob.request("session.list"))["sessions"] == []
            seen = repr([f for f in bob.frames if f["type"] != "error"])
            for secret in ("private", message, reply):
                assert secret not in seen
        status, _ = server.get(f"/api/sessions/{session}/export", {"Authorization": f"Bearer {secrets['bob']}"})
        assert status == 404
        assert mirror.title == "private title"


async def test_everything_survives_a_restart(start_server: Callable[..., Server]) -> None:
    server = start_server()
    async with ChatClient(server.ws_url) as client:
        session, mirror = await client.started_session(title="kept", system="S", params={"max_tokens": 6})
        _, one = await client.turn(session, "first")
        _, two = await client.turn(session, "second", one)
        await client.turn(session, "other", one)
        before = mirror.tree()
    assert server.stop() == 0
    server.start()
    async with ChatClient(server.ws_url, resume=[{"session": session, "after": before["seq"]}]) as client:
        fresh = await client.watch(session)
        assert fresh.tree() == before
        await client.turn(session, "third", two)
        assert len(fresh.messages) == 8
