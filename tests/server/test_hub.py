"""The hub: each subscriber sees each event once, in order, from where it started, however slow it is."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatserve.chat.events import AnyEvent, BranchSelected, GenerationDelta, SessionDeleted
from chatserve.chat.store import MessageRecord, SessionRecord, SessionState
from chatserve.errors import NotFoundError, StoreUnavailableError
from chatserve.server.hub import Hub
from chatserve.server.outbox import Outbox
from chatserve.server.topics import Socket
from chatserve.types import MessageId, SessionId, UserId

ADA, BOB = UserId("ada"), UserId("bob")
S, T = SessionId("s"), SessionId("t")


class Reader:
    """A store of one user's sessions, each a list of events whose text is the truth."""

    def __init__(self) -> None:
        self.events: dict[SessionId, list[AnyEvent]] = {S: [], T: []}
        self.trimmed: dict[SessionId, int] = {}
        self.gate = asyncio.Event()
        self.gate.set()
        self.fail: Exception | None = None
        self.reads = 0

    def add(self, session: SessionId, *, text: str | None = None) -> AnyEvent:
        seq = len(self.events[session]) + 1
        event: AnyEvent
        if text is None:
            event = BranchSelected(session=session, seq=seq, leaf=MessageId(str(seq)))
        else:
            event = GenerationDelta(session=session, seq=seq, message=MessageId("m"), text=text)
        self.events[session].append(event)
        return event

    def text(self, session: SessionId, upto: int | None = None) -> str:
        return "".join(e.text for e in self.events[session][:upto] if isinstance(e, GenerationDelta))

    async def _read(self, user: UserId, session: SessionId) -> list[AnyEvent]:
        self.reads += 1
        if self.fail is not None:
            raise self.fail
        if user != ADA or session not in self.events:
            raise NotFoundError("no such session")
        seen = list(self.events[session])
        # What was read stays as it was, however long the answer is under way.
        await asyncio.sleep(0)
        await self.gate.wait()
        return seen

    async def follow(self, user: UserId, session: SessionId) -> None:
        pass

    async def snapshot(self, user: UserId, session: SessionId) -> SessionState:
        seen = await self._read(user, session)
        record = SessionRecord(
            session=session,
            user=user,
            title="t",
            system=None,
            params={},
            leaf=None,
            version=1,
            created_at=1,
            updated_at=1,
        )
        text = "".join(e.text for e in seen if isinstance(e, GenerationDelta))
        message = MessageRecord(
            message=MessageId("m"), parent=None, role="assistant", text=text, status="generating", created_at=1
        )
        return SessionState(record=record, seq=len(seen), messages=(message,))

    async def replay(self, user: UserId, session: SessionId, after: int) -> list[AnyEvent] | None:
        seen = await self._read(user, session)
        if after > len(seen) or after < self.trimmed.get(session, 0):
            return None
        return seen[after:]


class Client:
    """Reads a socket and holds each frame against the rules."""

    def __init__(self, hub: Hub, user: UserId = ADA, max_bytes: int = 1 << 20) -> None:
        self.outbox = Outbox(max_bytes)
        self.socket: Socket = hub.attach(user, self.outbox)
        self.seqs: dict[str, int] = {}
        self.texts: dict[str, str] = {}
        self.frames: list[dict[str, Any]] = []

    async def read_one(self) -> None:
        if not len(self.outbox):
            return
        text = await self.outbox.next_frame()
        assert text is not None
        frame = json.loads(text)
        self.frames.append(frame)
        session = frame.get("session")
        if frame["type"] == "snapshot":
            assert frame["seq"] >= self.seqs.get(session, 0), "a snapshot never goes back"
            self.seqs[session] = frame["seq"]
            self.texts[session] = frame["messages"][0]["text"]
        elif "seq" in frame:
            assert frame.get("from_seq", frame["seq"]) == self.seqs[session] + 1, "neither gap nor repeat"
            self.seqs[session] = frame["seq"]
            self.texts[session] = self.texts.get(session, "") + frame.get("text", "")

    async def read_all(self) -> list[dict[str, Any]]:
        start = len(self.frames)
        while len(self.outbox):
            await self.read_one()
        return self.frames[start:]


async def settle() -> None:
    for _ in range(8):
        await asyncio.sleep(0)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - the loop itself is what is waited for
            await asyncio.sleep(0)


def open_task(
    hub: Hub, client: Client, reader: Reader, session: SessionId, after: int | None = None
) -> asyncio.Task[None]:
    subscription = hub.topics.reserve(client.socket, session)
    return asyncio.create_task(hub.topics.open(subscription, reader, after))


async def test_a_snapshot_then_what_comes_live() -> None:
    hub, reader = Hub(), Reader()
    client = Client(hub)
    reader.add(S, text="he")
    await open_task(hub, client, reader, S)
    hub.topics.publish(ADA, S, [reader.add(S, text="llo")])
    assert [frame["type"] for frame in await client.read_all()] == ["snapshot", "generation.delta"]
    assert client.texts == {"s": "hello"}
    hub.check()


async def test_what_is_published_during_the_read_is_neither_lost_nor_repeated() -> None:
    hub, reader = Hub(), Reader()
    client = Client(hub)
    reader.gate.clear()
    opening = open_task(hub, client, reader, S)
    await until(lambda: reader.reads == 1)
    hub.topics.publish(ADA, S, [reader.add(S, text="a")])
    # The read has not seen it; a read that has seen what is published later is the other case.
    late = reader.add(S, text="b")
    again = open_task(hub, client, reader, S)
    await settle()
    hub.topics.publish(ADA, S, [late])
    hub.check()
    reader.gate.set()
    await asyncio.gather(opening, again)
    await client.read_all()
    assert client.texts == {"s": "ab"}
    assert client.seqs == {"s": 2}
    hub.check()


async def test_a_replay_is_sent_where_it_can_be_and_a_snapshot_where_not() -> None:
    hub, reader = Hub(), Reader()
    for text in "abcdef":
        reader.add(S, text=text)
    reader.trimmed[S] = 2
    for after, kinds in (
        (3, ["generation.delta"]),
        (6, []),
        (1, ["snapshot"]),
        (7, ["snapshot"]),
        (2**60, ["snapshot"]),
    ):
        client = Client(hub)
        client.seqs["s"], client.texts["s"] = min(after, 6), reader.text(S, after)
        await open_task(hub, client, reader, S, after)
        assert [frame["type"] for frame in await client.read_all()] == kinds
        assert client.texts == {"s": "abcdef"}
        hub.topics.publish(ADA, S, [])
        hub.check()


async def test_after_a_close_nothing_comes_even_if_the_open_was_under_way() -> None:
    hub, reader = Hub(), Reader()
    client = Client(hub)
    reader.gate.clear()
    opening = open_task(hub, client, reader, S)
    await until(lambda: reader.reads == 1)
    hub.topics.unsubscribe(client.socket, S)
    hub.topics.publish(ADA, S, [reader.add(S)])
    hub.check()
    reader.gate.set()
    await opening
    assert await client.read_all() == []
    await open_task(hub, client, reader, S)
    hub.topics.unsubscribe(client.socket, S)
    await client.read_all()
    hub.topics.publish(ADA, S, [reader.add(S)])
    assert await client.read_all() == []
    hub.check()


async def test_an_open_after_a_close_that_came_in_between_wins() -> None:
    hub, reader = Hub(), Reader()
    client = Client(hub)
    reader.gate.clear()
    first = open_task(hub, client, reader, S)
    await until(lambda: reader.reads == 1)
    hub.topics.unsubscribe(client.socket, S)
    second = open_task(hub, client, reader, S)
    reader.gate.set()
    await asyncio.gather(first, second)
    hub.topics.publish(ADA, S, [reader.add(S, text="x")])
    assert [frame["type"] for frame in await client.read_all()] == ["snapshot", "generation.delta"]
    hub.check()


@pytest.mark.parametrize("error", [NotFoundError("no"), StoreUnavailableError("away")])
async def test_a_failed_open_leaves_an_older_subscription_as_it_was(error: Exception) -> None:
    counts: list[tuple[str, int]] = []
    hub, reader = Hub(), Reader()
    hub.topics.on_subscribers = lambda session, count: counts.append((session, count))
    client = Client(hub)
    await open_task(hub, client, reader, S)
    reader.fail = error
    with pytest.raises(type(error)):
        await open_task(hub, client, reader, S)
    hub.topics.publish(ADA, S, [reader.add(S, text="x")])
    await client.read_all()
    assert client.texts == {"s": "x"}
    assert counts == [("s", 1)]
    hub.check()


async def test_another_users_session_is_not_found_and_nothing_of_it_is_seen() -> None:
    hub, reader = Hub(), Reader()
    bob = Client(hub, BOB)
    with pytest.raises(NotFoundError):
        await open_task(hub, bob, reader, S)
    hub.topics.publish(ADA, S, [reader.add(S, text="secret")])
    hub.publish_changed(ADA, S, "secret", deleted=False)
    assert await bob.read_all() == []
    hub.check()


async def test_the_service_hears_how_many_follow_a_session() -> None:
    counts: list[tuple[str, int]] = []
    hub, reader = Hub(), Reader()
    hub.topics.on_subscribers = lambda session, count: counts.append((session, count))
    one, two = Client(hub), Client(hub)
    await open_task(hub, one, reader, S)
    await open_task(hub, one, reader, S)
    await open_task(hub, two, reader, S)
    await open_task(hub, two, reader, T)
    hub.topics.unsubscribe(one.socket, S)
    hub.detach(two.socket)
    hub.detach(one.socket)
    assert [count for session, count in counts if session == "s"] == [1, 2, 1, 0]
    assert [count for session, count in counts if session == "t"] == [1, 0]
    hub.check()


async def test_a_deleted_session_says_so_last_and_is_followed_no_more() -> None:
    counts: list[tuple[str, int]] = []
    hub, reader = Hub(), Reader()
    hub.topics.on_subscribers = lambda session, count: counts.append((session, count))
    client = Client(hub)
    await open_task(hub, client, reader, S)
    hub.topics.publish(ADA, S, [SessionDeleted(session=S, seq=1)])
    assert (await client.read_all())[-1] == {"type": "session.deleted", "session": "s", "seq": 1}
    assert counts == [("s", 1), ("s", 0)]
    assert not client.socket.subscriptions
    hub.check()


async def test_changes_and_health_reach_every_socket_they_concern() -> None:
    hub = Hub()
    one, two, bob = Client(hub), Client(hub), Client(hub, BOB)
    hub.publish_changed(ADA, S, "new", deleted=False)
    hub.publish_changed(ADA, S, None, deleted=True)
    changed = [
        {"type": "sessions.changed", "session": "s", "title": "new"},
        {"type": "sessions.changed", "session": "s", "deleted": True},
    ]
    assert await one.read_all() == await two.read_all() == changed
    assert await bob.read_all() == []
    hub.publish_health("store", 12.5)
    late = Client(hub, BOB)
    hub.send_health(late.socket)
    degraded = [{"type": "degraded", "component": "store", "since": 12.5}]
    assert await one.read_all() == await bob.read_all() == await late.read_all() == degraded
    hub.publish_health("store", None)
    hub.publish_health("store", None)
    assert await late.read_all() == [{"type": "recovered", "component": "store"}]


async def test_a_client_that_never_reads_is_ended_and_the_others_are_not_held_up() -> None:
    hub, reader = Hub(), Reader()
    slow, fast = Client(hub, max_bytes=20_000), Client(hub, max_bytes=20_000)
    await open_task(hub, slow, reader, S)
    await open_task(hub, fast, reader, S)
    for _ in range(500):
        hub.topics.publish(ADA, S, [reader.add(S), reader.add(S, text="word ")])
        assert slow.outbox.num_bytes <= 20_000
        await fast.read_all()
    assert slow.outbox.ended
    assert not fast.outbox.ended
    assert fast.texts == {"s": reader.text(S)}
    hub.check()


async def test_a_client_that_never_reads_its_snapshot_is_ended_by_what_piles_up_behind_it() -> None:
    hub, reader = Hub(), Reader()
    client = Client(hub, max_bytes=100_000)
    for _ in range(10):
        reader.add(S, text="x" * 100_000)
    reader.trimmed[S] = 10
    opening = open_task(hub, client, reader, S, 0)
    await settle()
    assert not opening.done()
    for _ in range(1000):
        hub.topics.publish(ADA, S, [reader.add(S, text="y")])
    assert client.outbox.ended
    await opening
    hub.check()


async def test_a_hole_in_what_is_published_ends_the_socket_rather_than_reach_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    hub, reader = Hub(), Reader()
    client = Client(hub)
    await open_task(hub, client, reader, S)
    reader.add(S)
    hub.topics.publish(ADA, S, [reader.add(S)])
    assert client.outbox.ended
    assert "from event 0 to 2" in caplog.text


steps = st.lists(
    st.tuples(
        st.sampled_from(["open", "resume", "close", "publish", "note", "read", "turn", "shut", "lift", "lift", "drop"]),
        st.integers(0, 2),
        st.sampled_from([S, T]),
        st.integers(0, 6),
    ),
    max_size=60,
)


@settings(max_examples=200)
@given(steps, st.integers(0, 4))
async def test_any_history_ends_with_what_an_undisturbed_reader_has(
    history: list[tuple[str, int, SessionId, int]], trimmed: int
) -> None:
    """Random opens, resumes, closes, publishes, reads and slow stores: each subscriber ends with the exact range, and
    its text equals the truth.
    """
    counts: dict[str, int] = {}
    hub, reader = Hub(), Reader()
    hub.topics.on_subscribers = counts.__setitem__
    reader.trimmed = {S: trimmed, T: 0}
    clients = [Client(hub) for _ in range(3)]
    tasks: list[asyncio.Task[None]] = []
    # What the store has but has not been told to the hub yet, per session.
    unpublished: dict[SessionId, list[AnyEvent]] = {S: [], T: []}
    wanted: set[tuple[int, SessionId]] = set()
    for action, which, session, amount in history:
        client = clients[which]
        match action:
            case "open":
                tasks.append(open_task(hub, client, reader, session))
                wanted.add((which, session))
            case "resume":
                if (which, session) in wanted or client.socket.pending.get(session):
                    continue
                client.seqs.setdefault(session, 0)
                tasks.append(open_task(hub, client, reader, session, client.seqs[session]))
                wanted.add((which, session))
            case "close":
                hub.topics.unsubscribe(client.socket, session)
                await client.read_all()
                wanted.discard((which, session))
            case "note":
                unpublished[session] += [reader.add(session, text=f"{i} ") for i in range(amount)]
                if amount % 2:
                    unpublished[session].append(reader.add(session))
            case "publish":
                ready, unpublished[session] = unpublished[session], []
                hub.topics.publish(ADA, session, ready)
            case "read":
                await client.read_one()
            case "turn":
                await asyncio.sleep(0)
            case "shut":
                reader.gate.clear()
            case "lift":
                reader.gate.set()
                await settle()
            case _:
                hub.detach(client.socket)
                clients[which] = Client(hub)
                wanted -= {(which, S), (which, T)}
        hub.check()
    reader.gate.set()
    await asyncio.gather(*tasks)
    for session, ready in unpublished.items():
        hub.topics.publish(ADA, session, ready)
    hub.check()
    for which, client in enumerate(clients):
        assert not client.outbox.ended
        await client.read_all()
        following = {session for index, session in wanted if index == which}
        assert set(client.socket.subscriptions) == following
        for session in following:
            assert client.seqs.get(session, 0) == len(reader.events[session])
            assert client.texts.get(session, "") == reader.text(session)
    for session in (S, T):
        assert counts.get(session, 0) == sum(wanted_session == session for _, wanted_session in wanted)
