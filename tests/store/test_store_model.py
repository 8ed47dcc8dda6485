"""The real store and the model in tests/fakes say the same after any sequence of calls."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Coroutine
from typing import Any, ClassVar

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from chatserve.chat import redis_append
from chatserve.chat.events import AnyEvent, BranchSelected, MessageUpdated, SessionUpdated
from chatserve.chat.quotas import Quota
from chatserve.chat.redis_layout import Keys
from chatserve.chat.redis_store import open_store
from chatserve.chat.store import Delta, Idempotency, Lease, MessageRecord, SessionRecord, Store, Transaction
from chatserve.chat.workers import Owner
from chatserve.errors import ChatError
from chatserve.supervisor.embedded_store import EmbeddedStore
from chatserve.types import MessageId, SessionId, UserId
from tests.fakes.memory_store import MemoryStore

sessions = st.sampled_from([SessionId(s) for s in ("s1", "s2", "s\n3é")])
messages = st.sampled_from([MessageId(m) for m in ("m1", "m2", "m:3", "m 4")])
texts = st.one_of(st.sampled_from(["", "Straße", "STRASSE", "\0", "👩‍👩‍👧"]), st.text(max_size=8))
attempts = st.integers(0, 1)
owners = st.sampled_from([Owner(o) for o in ("a/1", "b/2", "b/3")])
ages = st.sampled_from([0, 0, 0, 0, 1])
"""Of a fence: how many leases ago it was given."""
records = st.builds(
    SessionRecord,
    session=st.just(SessionId("")),
    user=st.just(UserId("")),
    title=texts,
    system=st.one_of(st.none(), texts),
    params=st.sampled_from([{}, {"temperature": 0.5}, {"stop": ["\0", "é"]}]),
    leaf=st.one_of(st.none(), messages),
    version=st.integers(0, 3),
    created_at=st.just(1.0),
    updated_at=st.sampled_from([1.0, 2.0, 1e9 + 1 / 3]),
)
puts = st.lists(
    st.builds(
        MessageRecord,
        message=messages,
        parent=st.one_of(st.none(), messages),
        role=st.just("assistant"),
        text=texts,
        status=st.sampled_from(["generating", "generating", "done", "interrupted"]),
        created_at=st.just(1.0),
        token_ids=st.lists(st.integers(0, 2**31 - 1), max_size=3).map(tuple),
        attempt=attempts,
    ),
    max_size=3,
    unique_by=lambda put: put.message,
).map(tuple)
events = st.lists(
    st.one_of(
        st.builds(BranchSelected, session=st.just(SessionId("")), leaf=st.one_of(st.none(), messages)),
        st.builds(MessageUpdated, session=st.just(SessionId("")), message=messages, status=texts),
        st.builds(SessionUpdated, session=st.just(SessionId("")), title=texts, system=st.one_of(st.none(), texts)),
    ),
    max_size=3,
).map(tuple)
idempotencies = st.one_of(
    st.none(),
    st.builds(Idempotency, st.sampled_from(["r1", "r2", "r:3"]), st.sampled_from(["d1", "d2"]), st.binary(max_size=4)),
)


quotas = st.one_of(
    st.just(Quota()),
    st.builds(
        Quota,
        sessions=st.one_of(st.none(), st.integers(0, 3)),
        stored_bytes=st.one_of(st.none(), st.integers(0, 600)),
        generations=st.one_of(st.none(), st.integers(0, 3)),
    ),
)


class StoreMachine(RuleBasedStateMachine):
    server: ClassVar[EmbeddedStore]

    @initialize()
    def open(self) -> None:
        self.runner = asyncio.Runner()
        self.user = UserId(f"u{{}}{uuid.uuid4()}")
        self.real = self.runner.run(open_store(self.server.url, event_history=4096))
        self.model = MemoryStore(event_history=4096)
        self.appended: list[Delta] = []
        self.writes: list[Transaction] = []
        self.fences: dict[SessionId, int] = {}
        self.live: dict[SessionId, list[AnyEvent]] = {}
        """Each session's events as somebody who never disconnected gets them."""

    def teardown(self) -> None:
        if hasattr(self, "runner"):
            self.runner.run(self.real.close())
            self.runner.close()

    def both(self, call: Callable[[Store], Coroutine[Any, Any, Any]]) -> Any:
        outcomes = []
        for store in (self.real, self.model):
            try:
                outcomes.append(self.runner.run(call(store)))
            except ChatError as error:
                outcomes.append(type(error))
        assert outcomes[0] == outcomes[1]
        return outcomes[0]

    def commit(self, change: Transaction) -> Any:
        return self.both(lambda store: store.commit(change))

    @rule(
        session=sessions,
        create=st.booleans(),
        record=records,
        keeps_record=st.booleans(),
        puts=puts,
        deletes=st.lists(messages, max_size=2, unique=True).map(tuple),
        events=events,
        idempotency=idempotencies,
        owner=st.one_of(st.just(Owner("")), owners),
        age=ages,
        quota=quotas,
    )
    def change(
        self,
        session: SessionId,
        create: bool,
        record: SessionRecord,
        keeps_record: bool,
        puts: tuple[MessageRecord, ...],
        deletes: tuple[MessageId, ...],
        events: tuple[AnyEvent, ...],
        idempotency: Idempotency | None,
        owner: Owner,
        age: int,
        quota: Quota,
    ) -> None:
        named = msgspec.structs.replace(record, session=session, user=self.user)
        change = Transaction(
            user=self.user,
            session=session,
            create=create,
            record=None if keeps_record and not create else named,
            puts=puts,
            deletes=deletes,
            events=tuple(msgspec.structs.replace(event, session=session) for event in events),
            idempotency=idempotency,
            write_id=uuid.uuid4().hex,
            owner=owner,
            quota=quota,
            fence=int(bool(owner)) if create else self.fences.get(session, 0) - age,
        )
        committed = self.commit(change)
        if create and not isinstance(committed, type) and committed.answer is None:
            self.fences[session] = change.fence
        self.writes.append(change)
        touched = {put.message for put in puts} | set(deletes)
        self.appended = [d for d in self.appended if d.session != session or d.message not in touched]

    @precondition(lambda self: self.writes)
    @rule(data=st.data())
    def retry_a_write_that_was_done(self, data: st.DataObject) -> None:
        self.commit(data.draw(st.sampled_from(self.writes[-5:])))

    @rule(session=sessions, idempotency=idempotencies)
    def delete(self, session: SessionId, idempotency: Idempotency | None) -> None:
        self.commit(
            Transaction(
                user=self.user,
                session=session,
                delete=True,
                idempotency=idempotency,
                write_id=uuid.uuid4().hex,
                fence=self.fences.get(session, 0),
            )
        )
        self.live.pop(session, None)

    @rule(places=st.lists(st.tuples(sessions, messages, attempts, texts, st.integers(0, 2)), min_size=1, max_size=6))
    def append(self, places: list[tuple[SessionId, MessageId, int, str, int]]) -> None:
        step = []
        for number, (session, message, attempt, text, num_tokens) in enumerate(places):
            in_step = sum(len(d.token_ids) for d in step if (d.session, d.message) == (session, message))
            first_token = self.model.num_appended(self.user, session, message) + in_step + (number == 4)
            step.append(
                Delta(
                    user=self.user,
                    session=session,
                    message=message,
                    attempt=attempt,
                    first_token=first_token,
                    token_ids=tuple(range(num_tokens)),
                    text=text,
                    fence=self.fences.get(session, 0) - (1 if number == 5 else 0),
                )
            )
        numbers = self.both(lambda store: store.append(step))
        self.appended += [delta for delta, seq in zip(step, numbers, strict=True) if seq is not None]

    @rule(num_steps=st.integers(1, 8), num_tokens=st.integers(1, 2), text=texts)
    def stream(self, num_steps: int, num_tokens: int, text: str) -> None:
        """Each session's first answer goes on, as long as nothing else happens."""
        for _ in range(num_steps):
            step = [
                Delta(
                    user=self.user,
                    session=session,
                    message=next(iter(found.live)),
                    attempt=next(iter(found.live.values()))[0],
                    first_token=next(iter(found.live.values()))[1],
                    token_ids=tuple(range(num_tokens)),
                    text=text,
                    fence=found.fence,
                )
                for (_, session), found in self.model._sessions.items()
                if found.live
            ]
            assert None not in self.both(lambda store, step=step: store.append(step))
            self.appended += step

    @precondition(lambda self: self.appended)
    @rule(data=st.data())
    def retry_deltas_that_were_appended(self, data: st.DataObject) -> None:
        first = data.draw(st.integers(0, len(self.appended) - 1))
        self.both(lambda store: store.append(self.appended[first : first + 4]))

    @rule(session=sessions, after=st.integers(0, 12))
    def replay(self, session: SessionId, after: int) -> None:
        self.both(lambda store: store.events(self.user, session, after))

    @rule(limit=st.integers(1, 3), query=st.one_of(st.none(), texts))
    def page(self, limit: int, query: str | None) -> None:
        cursor = None
        while True:
            page = self.both(lambda store: store.list_sessions(self.user, limit, cursor, query))
            if (cursor := page.cursor) is None:
                break

    @rule(request_id=st.sampled_from(["r1", "r2", "r:3"]))
    def look_up(self, request_id: str) -> None:
        self.both(lambda store: store.answer(self.user, request_id))

    @invariant()
    def sessions_are_equal_and_events_go_on_where_they_stood(self) -> None:
        if not hasattr(self, "runner"):
            return
        for session in ("s1", "s2", "s\n3é"):
            name = SessionId(session)
            state = self.both(lambda store, name=name: store.load(self.user, name))
            if state is None:
                continue
            seen = self.live.setdefault(name, [])
            later = self.both(lambda store, name=name, seen=seen: store.events(self.user, name, len(seen)))
            assert later is not None
            seen += later
            assert [event.seq for event in seen] == list(range(1, state.seq + 1))

    @invariant()
    def what_a_user_has_is_what_is_there(self) -> None:
        if not hasattr(self, "runner"):
            return
        key = Keys(self.user).of("usage")
        counted = self.runner.run(self.real._link.command("count", "HMGET", key, "bytes", "generating"))
        assert tuple(int(number or 0) for number in counted) == self.model.usage(self.user)

    @rule()
    def list_what_is_unfinished(self) -> None:
        pairs = [(self.user, SessionId(session)) for session in ("s1", "s2", "s\n3é")]
        self.both(lambda store: store.unfinished(pairs))

    @rule(session=sessions, owner=owners, instead_of=st.one_of(st.none(), owners))
    def acquire(self, session: SessionId, owner: Owner, instead_of: Owner | None) -> None:
        lease = self.both(lambda store: store.acquire(self.user, session, owner, instead_of=instead_of))
        if isinstance(lease, Lease):
            assert lease.fence >= self.fences.get(session, 0)
            self.fences[session] = lease.fence

    @rule(session=sessions, age=st.integers(0, 1))
    def release(self, session: SessionId, age: int) -> None:
        self.both(lambda store: store.release(self.user, session, self.fences.get(session, 0) - age))


@pytest.mark.timeout(300)
def test_the_store_equals_its_model(server: EmbeddedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_append, "MAX_TAIL_DELTAS", 5)
    machine = type("Machine", (StoreMachine,), {"server": server})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=15,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )
