"""Requests on whole sessions: list, create, update, delete, fork, import, export."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET

from chatserve.chat import transfer
from chatserve.chat.events import SessionDeleted, SessionUpdated
from chatserve.chat.live_session import LiveSession
from chatserve.chat.quotas import Quota, quota_of
from chatserve.chat.requests import Request
from chatserve.chat.store import MessageRecord, SessionPage, SessionRecord, SessionState, Transaction
from chatserve.errors import BadParamsError, BusyError, ChatError
from chatserve.types import MessageId, SessionId, UserId, validate_params

if TYPE_CHECKING:
    from collections.abc import Sequence

    from chatserve.chat.core import Core

_FIRST_FENCE = 1
"""Of the lease that whoever creates a session has with it."""


class SessionRequests:
    """The session requests of `chat.v1`."""

    def __init__(self, core: Core) -> None:
        self._core = core

    async def page(self, user: UserId, *, limit: object, cursor: object, query: object) -> SessionPage:
        if type(limit) is not int or not 1 <= limit <= 100:
            raise BadParamsError.of("limit", limit, "a whole number from 1 to 100")
        for name, value in (("cursor", cursor), ("query", query)):
            if value is not None and not isinstance(value, str):
                raise BadParamsError.of(name, value, "a string")
        return await self._core.store.list_sessions(user, limit, cursor, query)  # type: ignore[arg-type]

    async def create(self, request: Request, user: UserId, *, title: object, system: object, params: object) -> None:
        given = validate_params(params)
        self._check(title="" if title is None else title, system=system)
        record = self._new_record(user, title=title or "", system=system, params=given)  # type: ignore[arg-type]
        await self._create(record, (), request)

    async def update(
        self, request: Request, user: UserId, session: SessionId, *, title: object, system: object, params: object
    ) -> None:
        """Change what is not UNSET."""
        given = UNSET if params is UNSET else validate_params(params)
        self._check(title=title, system=system)
        core = self._core
        async with core.sessions.changing(user, session) as live:
            old = live.record
            wanted: dict[str, Any] = {"title": title, "system": system, "params": given}
            changes = {k: v for k, v in wanted.items() if v is not UNSET and v != getattr(old, k)}
            record = old
            events: tuple[SessionUpdated, ...] = ()
            if changes:
                record = msgspec.structs.replace(old, version=old.version + 1, updated_at=core.clock(), **changes)
                events = (SessionUpdated(session=session, **changes),)
            fields = {"version": record.version}

            def apply() -> None:
                live.record = record
                request.answer(fields)

            change = Transaction(
                user=user,
                session=session,
                record=record,
                events=events,
                idempotency=request.idempotency(fields),
                quota=quota_of(core.limits) if changes.get("system") else Quota(),
                announcement=core.announce(session, record.title) if "title" in changes else b"",
            )
            earlier = await core.sessions.commit(live, change, apply)
            if earlier is not None:
                request.answer_earlier(earlier)
            elif "title" in changes:
                core.publish_changed(user, session, record.title, deleted=False)

    async def delete(self, request: Request, user: UserId, session: SessionId) -> None:
        core = self._core
        while True:
            async with core.sessions.changing(user, session) as live:
                running = tuple(live.generations.values())
                if not running:
                    await self._delete(request, live)
                    return
            await core.generations.stop_and_wait(running)

    async def expire(self, user: UserId, session: SessionId, before: float) -> bool:
        """Delete a session, unless it was changed since, or somebody here looks at it.

        Raises:
            NotFoundError, OwnedElsewhereError, LeaseLostError: it is not ours to delete.
        """
        async with self._core.sessions.changing(user, session) as live:
            if live.record.updated_at >= before or live.generations or live.num_subscribers:
                return False
            await self._delete(Request(user, f"expiry of {session}", ""), live)
            return True

    async def fork(self, request: Request, user: UserId, session: SessionId, message: MessageId) -> None:
        core = self._core
        async with core.sessions.changing(user, session) as live:
            if message in live.generations:
                raise BusyError("this message is being generated; wait for its end or stop it", message=message)
            copies = live.tree.fork(message, core.new_message_id)
            old = live.record
            paths = {
                copy.message: live.paths[m.message]
                for m, copy in zip(live.tree.path(message), copies, strict=True)
                if m.message in live.paths
            }
            record = self._new_record(
                user, title=old.title, system=old.system, params=old.params, leaf=copies[-1].message
            )
            forked = await self._create(record, copies, request)
            if forked is not None:
                forked.paths.update(paths)

    async def export(self, user: UserId, session: SessionId) -> dict[str, Any]:
        return transfer.export(await self._core.state(user, session))

    async def import_(self, user: UserId, data: bytes) -> list[SessionId]:
        """Create the sessions of an export; all of them or, if anything is wrong with it, none.

        Raises:
            BadParamsError, TooLargeError: what is wrong.
        """
        core = self._core
        found = await core.in_thread(user, len(data), lambda: transfer.parse(data))
        for conversation in found:
            self._check(title=conversation.title, system=conversation.system)
            for message in conversation.messages:
                core.check_text("text", message.text)
        all_params = [validate_params(conversation.params) for conversation in found]
        built = [transfer.build(c, core.limits, new_id=core.new_message_id, now=core.clock()) for c in found]
        created: list[SessionId] = []
        try:
            for conversation, params, (messages, leaf) in zip(found, all_params, built, strict=True):
                record = self._new_record(
                    user, title=conversation.title, system=conversation.system, params=params, leaf=leaf
                )
                await self._create(record, messages, None)
                created.append(record.session)
        except ChatError:
            for session in created:
                if (live := core.sessions.peek(user, session)) is not None:
                    core.sessions.remove(live)
                with contextlib.suppress(ChatError):
                    undo = core.announce(session, None, deleted=True)
                    gone = Transaction(user=user, session=session, delete=True, fence=_FIRST_FENCE, announcement=undo)
                    await core.store.commit(gone)
                    core.publish_changed(user, session, None, deleted=True)
            raise
        return created

    # --- inside -------------------------------------------------------------------------------------------------------

    def _check(self, *, title: object, system: object) -> None:
        if title is not UNSET:
            self._core.check_text("title", title)
        if system is not UNSET and system is not None:
            self._core.check_text("system", system)

    def _new_record(
        self,
        user: UserId,
        *,
        title: str,
        system: str | None,
        params: dict[str, Any],
        leaf: MessageId | None = None,
    ) -> SessionRecord:
        now = self._core.clock()
        return SessionRecord(
            session=self._core.new_session_id(),
            user=user,
            title=title,
            system=system,
            params=params,
            leaf=leaf,
            version=1,
            created_at=now,
            updated_at=now,
        )

    async def _create(
        self, record: SessionRecord, messages: Sequence[MessageRecord], request: Request | None
    ) -> LiveSession | None:
        core = self._core
        fields = {"session": record.session}
        change = Transaction(
            user=record.user,
            session=record.session,
            create=True,
            record=record,
            puts=tuple(messages),
            idempotency=None if request is None else request.idempotency(fields),
            owner=core.leases.owner,
            fence=_FIRST_FENCE,
            quota=quota_of(core.limits),
            announcement=core.announce(record.session, record.title),
        )
        await core.leases.note(record.user, record.session)
        committed = await core.store.commit(change)
        if committed.answer is not None:
            assert request is not None
            request.answer_earlier(committed.answer)
            return None
        state = SessionState(record=record, seq=0, messages=tuple(messages), fence=_FIRST_FENCE)
        live = core.sessions.add(state)
        if request is not None:
            request.answer(fields)
        core.publish_changed(record.user, record.session, record.title, deleted=False)
        return live

    async def _delete(self, request: Request, live: LiveSession) -> None:
        core = self._core
        user, session = live.user, live.session
        change = Transaction(
            user=user,
            session=session,
            delete=True,
            events=(SessionDeleted(session=session),),
            idempotency=request.idempotency({}),
            announcement=core.announce(session, None, deleted=True),
        )

        def apply() -> None:
            core.sessions.remove(live)
            request.answer({})

        earlier = await core.sessions.commit(live, change, apply)
        if earlier is not None:
            request.answer_earlier(earlier)
            return
        core.forgetting.forget(user, tuple(live.paths.values()), live.branches(m.message for m in live.tree))
        core.publish_changed(user, session, None, deleted=True)
