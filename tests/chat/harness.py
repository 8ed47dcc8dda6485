"""A chat service on a real engine with a fake runner and a store in memory, and a client's view of it.

`Mirror` keeps what a subscribed client would know from events alone, and checks each as it comes: numbers without a
gap, roles, one end for each generation. `Harness.call` sends a request and checks that its answer comes before its
events.
"""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import Callable, Sequence
from typing import Any, Self

from chatserve.chat.dependencies import Dependencies
from chatserve.chat.events import (
    AnyEvent,
    BranchSelected,
    GenerationDelta,
    GenerationEnd,
    GenerationQueued,
    GenerationStarted,
    MessageAdded,
    MessageDeleted,
    MessageUpdated,
    SessionDeleted,
    SessionUpdated,
)
from chatserve.chat.prompt import PromptEncoder
from chatserve.chat.service import ChatService
from chatserve.chat.store import SessionState, Store
from chatserve.chat.workers import owner_name
from chatserve.config import Limits
from chatserve.engine.engine import Engine
from chatserve.errors import ChatError
from chatserve.types import MessageId, SessionId, UserId
from tests.fakes.engines import make_engine
from tests.fakes.fake_runner import FakeRunner
from tests.fakes.inline_engine import InlineEngineClient
from tests.fakes.memory_store import MemoryStore

Encoders = dict[str, PromptEncoder]
"""By kind of template."""
ANN = UserId("ann")
BOB = UserId("bob")


class Mirror:
    """A session as its events tell it."""

    def __init__(self) -> None:
        self.seq = 0
        self.messages: dict[str, dict[str, Any]] = {}
        self.leaf: str | None = None
        self.title = ""
        self.deleted = False
        self.log: list[AnyEvent] = []
        self.ends: dict[str, list[GenerationEnd]] = {}
        self.starts: dict[str, list[GenerationStarted]] = {}

    def take(self, event: AnyEvent) -> None:
        assert event.seq == self.seq + 1, f"a gap or a repeat: {event} after {self.seq}"
        assert not self.deleted, "session.deleted is the last"
        self.seq = event.seq
        self.log.append(event)
        match event:
            case MessageAdded():
                assert event.message not in self.messages
                assert event.parent is None or self.messages[event.parent]["role"] != event.role
                self.messages[event.message] = {
                    "parent": event.parent,
                    "role": event.role,
                    "text": event.text,
                    "status": event.status,
                }
            case MessageUpdated():
                self.messages[event.message]["status"] = event.status
            case MessageDeleted():
                gone = {event.message}
                for message, fields in self.messages.items():
                    if fields["parent"] in gone:
                        gone.add(message)
                assert len(gone) == event.deleted
                for message in gone:
                    assert self.messages.pop(message)["status"] != "generating", "it ends before it goes"
            case BranchSelected():
                assert event.leaf != self.leaf, "only changes are told"
                self.leaf = event.leaf
            case SessionUpdated():
                if isinstance(event.title, str):
                    self.title = event.title
            case SessionDeleted():
                assert all(m["status"] != "generating" for m in self.messages.values())
                self.deleted = True
            case GenerationQueued():
                assert self.messages[event.message]["status"] == "generating"
            case GenerationStarted():
                assert self.messages[event.message]["status"] == "generating"
                total = event.cached_tokens + event.swapped_in_tokens + event.computed_tokens
                assert event.prompt_tokens == total
                self.starts.setdefault(event.message, []).append(event)
            case GenerationDelta():
                assert event.text
                assert self.messages[event.message]["status"] == "generating", "no text after the end"
                self.messages[event.message]["text"] += event.text
            case GenerationEnd():
                assert self.messages[event.message]["status"] == "generating", "one end a generation"
                self.messages[event.message]["status"] = event.status
                self.ends.setdefault(event.message, []).append(event)

    def view(self) -> tuple[int, str | None, str, list[tuple[Any, ...]]]:
        rows = [(k, m["parent"], m["role"], m["text"], m["status"]) for k, m in self.messages.items()]
        return self.seq, self.leaf, self.title, rows


def view_of(state: SessionState) -> tuple[int, str | None, str, list[tuple[Any, ...]]]:
    rows: list[tuple[Any, ...]] = [(m.message, m.parent, m.role, m.text, m.status) for m in state.messages]
    return state.seq, state.record.leaf, state.record.title, rows


class Talkative(FakeRunner):
    """Never ends an answer by itself."""

    def __init__(self, encoder: PromptEncoder, *, num_blocks: int = 256, **options: Any) -> None:
        super().__init__(vocab_size=encoder.vocab_size, num_blocks=num_blocks, **options)
        self._never = frozenset(encoder.stop_token_ids)

    def _sample(self, sequence: Any) -> int:
        token = super()._sample(sequence)
        return token + 1 if token in self._never else token


class Scripted:
    """A model that says what it is told: `texts` in turn, one for each prompt, then a stop token."""

    def __init__(
        self, encoder: PromptEncoder, *texts: str, split: Callable[[str], Sequence[int]] | None = None
    ) -> None:
        split = split or encoder.encode_continuation
        self._opening = encoder.encode_turn("")[-3:]
        self._answers = [tuple(split(text)) for text in texts]
        self._stop = encoder.stop_token_ids[0]

    def __call__(self, token_ids: Sequence[int]) -> int:
        ids, opening = list(token_ids), list(self._opening)
        starts = [i for i in range(len(ids) - 2) if ids[i : i + 3] == opening]
        answer = self._answers[(len(starts) - 1) % len(self._answers)]
        said = len(ids) - starts[-1] - 3
        return answer[said] if said < len(answer) else self._stop


class Harness:
    def __init__(
        self,
        encoder: PromptEncoder,
        *,
        store: Store | None = None,
        runner: FakeRunner | None = None,
        limits: Limits | None = None,
        orphan_grace_s: float = 60.0,
        engine_patience_s: float = 60.0,
        engine_silence_s: float = 60.0,
        place: str | None = None,
        resumes: bool = True,
        beat_s: float = 1.0,
        expiry_s: float = 0.0,
        **engine: Any,
    ) -> None:
        self.encoder = encoder
        self.runner = runner or Talkative(encoder)
        self.engine_options = engine
        self.client = InlineEngineClient(self.make_engine())
        self.store = store or MemoryStore()
        self.limits = limits or Limits()
        self.orphan_grace_s = orphan_grace_s
        self.engine_patience_s = engine_patience_s
        self.engine_silence_s = engine_silence_s
        self.owner = owner_name(place or uuid.uuid4().hex, uuid.uuid4().hex)
        self.resumes = resumes
        self.beat_s = beat_s
        self.expiry_s = expiry_s
        self.crashed = False
        self.crashes: list[str] = []
        self.mirrors: dict[str, Mirror] = {}
        self.changed: list[tuple[str, str | None, bool]] = []
        self.health: list[tuple[str, bool]] = []
        self.broken_off: list[str] = []
        self.news = asyncio.Event()
        self._ids = itertools.count(1)
        self.now: float | None = None
        """What the service's clock says; None: a second more each time."""
        self.service = self._make_service()

    def _make_service(self) -> ChatService:
        given = Dependencies(
            store=self.store,
            engine=self.client,
            encoder=self.encoder,
            limits=self.limits,
            publish=self._publish,
            publish_relayed=self._publish_relayed,
            break_off=lambda user, session: self.broken_off.append(session),
            owner=self.owner,
            resumes=self.resumes,
            beat_s=self.beat_s,
            expiry_s=self.expiry_s,
            publish_changed=self._publish_changed,
            publish_health=self._publish_health,
            orphan_grace_s=self.orphan_grace_s,
            engine_patience_s=self.engine_patience_s,
            engine_silence_s=self.engine_silence_s,
            on_crash=lambda: self.crashes.append("crash"),
            clock=lambda: float(next(self._ids)) if self.now is None else self.now,
        )
        return ChatService(given)

    def make_engine(self, runner: FakeRunner | None = None) -> Engine:
        return make_engine(runner or self.runner, **self.engine_options)

    async def __aenter__(self) -> Self:
        await self.client.connect()
        await self.service.start()
        await self.until(lambda: self.client.info is not None)
        return self

    async def __aexit__(self, *error: object) -> None:
        if self.crashed:
            return
        self.client.resume()
        self.service.check()
        await self.service.close()
        await self.client.close()
        assert not self.crashes

    async def crash(self) -> None:
        """The web process dies without a word; its engine requests die with it."""
        self.crashed = True
        runtime = self.service._runtime
        tasks = [*runtime._tasks, *runtime._settling, *self.service._core.generations.ends._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await runtime.orphans.close()
        await self.service._core.following.close()
        await runtime.health.close()
        await runtime.feed.close()
        await self.client.close()

    # --- what the server would do -------------------------------------------------------------------------------------

    def _publish(self, user: UserId, session: SessionId, events: Sequence[AnyEvent]) -> None:
        assert events
        if (mirror := self.mirrors.get(session)) is None:
            return  # nobody watches
        for event in events:
            assert event.session == session
            mirror.take(event)
        self.news.set()

    def _publish_relayed(self, user: UserId, session: SessionId, events: Sequence[AnyEvent]) -> None:
        """As the hub does, drop what is known."""
        mirror = self.mirrors.get(session)
        if mirror is not None and (new := [event for event in events if event.seq > mirror.seq]):
            self._publish(user, session, new)

    def _publish_changed(self, user: UserId, session: SessionId, title: str | None, *, deleted: bool) -> None:
        self.changed.append((session, title, deleted))

    def _publish_health(self, component: str, since: float | None) -> None:
        self.health.append((component, since is None))
        self.news.set()

    async def until(self, condition: Callable[[], Any], timeout_s: float = 10.0) -> None:
        """Wait for what events bring about; what is not told by events is looked at again every turn of the loop."""
        async with asyncio.timeout(timeout_s):
            while not condition():
                self.news.clear()
                await asyncio.sleep(0)

    # --- requests -----------------------------------------------------------------------------------------------------

    async def call(self, name: str, *, user: UserId = ANN, id_: str | None = None, **fields: Any) -> dict[str, Any]:
        answers: list[dict[str, Any]] = []
        events_then = self._num_events_of(fields.get("session"))
        seen: list[int] = []

        def answer(acked: dict[str, Any]) -> None:
            answers.append(acked)
            seen.append(self._num_events_of(fields.get("session")))

        request = getattr(self.service, name)
        await request(user, id_ or uuid.uuid4().hex, answer=answer, **fields)
        assert len(answers) == 1, "exactly one answer"
        if name in {"send_message", "edit_message"} and "message" in answers[0]:
            log = self.mirrors[fields["session"]].log if fields["session"] in self.mirrors else []
            earlier = [e for e in log[events_then : seen[0]] if getattr(e, "message", "") == answers[0]["reply"]]
            assert id_ is not None or not earlier, "the answer comes before the events"
        return answers[0]

    def _num_events_of(self, session: str | None) -> int:
        return len(self.mirrors[session].log) if session in self.mirrors else 0

    async def create(self, *, user: UserId = ANN, **fields: Any) -> SessionId:
        """A session that somebody watches."""
        session = SessionId((await self.call("create_session", user=user, **fields))["session"])
        self.mirrors[session] = Mirror()
        self.mirrors[session].title = fields.get("title") or ""
        await self.service.follow(user, session)
        self.service.set_subscribers(session, 1)
        return session

    async def fork(self, session: SessionId, message: str) -> tuple[SessionId, list[MessageId]]:
        fork = SessionId((await self.call("fork_session", session=session, message=MessageId(message)))["session"])
        state = await self.service.snapshot(ANN, fork)
        self.watch_from(state)
        return fork, [m.message for m in state.messages]

    def watch_from(self, state: SessionState) -> Mirror:
        mirror = self.mirrors[state.record.session] = Mirror()
        mirror.seq, mirror.leaf, mirror.title = state.seq, state.record.leaf, state.record.title
        for m in state.messages:
            mirror.messages[m.message] = {"parent": m.parent, "role": m.role, "text": m.text, "status": m.status}
        self.service.set_subscribers(state.record.session, 1)
        return mirror

    async def follow(self, session: SessionId, *, user: UserId = ANN) -> Mirror:
        """Open a session as a socket does."""
        await self.service.follow(user, session)
        return self.watch_from(await self.service.snapshot(user, session))

    async def unfollow(self, session: SessionId, *, user: UserId = ANN) -> None:
        self.service.unfollow(user, session)
        self.service.set_subscribers(session, 0)
        del self.mirrors[session]

    async def say(
        self, session: SessionId, text: str, parent: str | None = None, *, user: UserId = ANN, **params: Any
    ) -> tuple[MessageId, MessageId]:
        ack = await self.call("send_message", user=user, session=session, parent=parent, text=text, params=params)
        return MessageId(ack["message"]), MessageId(ack["reply"])

    async def turn(
        self, session: SessionId, text: str, parent: str | None = None, **params: Any
    ) -> tuple[MessageId, MessageId]:
        message, reply = await self.say(session, text, parent, **params)
        await self.ended(session, reply)
        return message, reply

    async def ended(self, session: SessionId, reply: str, times: int = 1) -> GenerationEnd:
        ends = self.mirrors[session].ends
        await self.until(lambda: len(ends.get(reply, [])) >= times)
        assert len(ends[reply]) == times
        return ends[reply][-1]

    async def regenerate(self, session: SessionId, message: str, **params: Any) -> MessageId:
        ack = await self.call("regenerate_message", session=session, message=message, params=params)
        return MessageId(ack["reply"])

    def text(self, session: SessionId, message: str) -> str:
        text: str = self.mirrors[session].messages[message]["text"]
        return text

    def started(self, session: SessionId, message: str) -> GenerationStarted:
        return self.mirrors[session].starts[message][-1]

    async def writing(self, session: SessionId, reply: str, num_chars: int = 1) -> None:
        await self.until(lambda: len(self.text(session, reply)) >= num_chars)

    async def idle(self) -> None:
        """Nothing runs; then no block may be pinned."""
        engine = self.client.engine
        assert engine is not None
        await self.until(lambda: self.service.num_generations == 0 and not engine.has_work)
        report = await self.client.inspect()
        assert report.device.pinned == report.device.transit == report.device.private == 0
        assert report.running == report.waiting == 0

    async def check(self) -> None:
        """What events told is what a snapshot and the store say."""
        self.service.check()
        for session, mirror in self.mirrors.items():
            if mirror.deleted:
                continue
            state = await self.service.snapshot(ANN, SessionId(session))
            assert view_of(state) == mirror.view()


async def refused(awaitable: Any) -> ChatError:
    """The error that a request is answered with."""
    try:
        await awaitable
    except ChatError as error:
        return error
    raise AssertionError("the request was done")
