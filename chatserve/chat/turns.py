"""Turns: requests that add messages and have them answered, and those that remove, choose or stop them.

Each checks everything first, then makes one atomic change (`tree_commits`): a new question and its reply appear
together or not at all.
"""

from __future__ import annotations

import secrets
from itertools import chain
from typing import TYPE_CHECKING, Any

import msgspec

from chatserve.chat.events import (
    AnyEvent,
    MessageDeleted,
    MessageUpdated,
    Usage,
)
from chatserve.chat.generation import GENERATING
from chatserve.chat.live_session import LiveSession
from chatserve.chat.store import MessageRecord, Transaction
from chatserve.chat.tree import ASSISTANT, USER
from chatserve.chat.tree_commits import TreeCommits
from chatserve.errors import (
    BadParamsError,
    BusyError,
    ConflictError,
    ContextOverflowError,
    TooLargeError,
)
from chatserve.types import FinishReason, MessageId, SamplingParams, SessionId, UserId, validate_params

if TYPE_CHECKING:
    from collections.abc import Sequence

    from chatserve.chat.core import Core
    from chatserve.chat.requests import Request


class Turns:
    """The message requests of `chat.v1`."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._commits = TreeCommits(core)

    async def send(
        self, request: Request, user: UserId, session: SessionId, parent: MessageId | None, text: str, params: object
    ) -> None:
        given = validate_params(params)
        self._core.check_text("text", text)
        async with self._core.sessions.changing(user, session) as live:
            if parent is not None:
                self._named(live, parent, ASSISTANT, "parent")
                self._refuse_busy(live, parent)
            await self._ask(request, live, parent, text, given)

    async def edit(
        self, request: Request, user: UserId, session: SessionId, message: MessageId, text: str, params: object
    ) -> None:
        given = validate_params(params)
        self._core.check_text("text", text)
        async with self._core.sessions.changing(user, session) as live:
            old = self._named(live, message, USER, "message")
            if old.parent is not None:
                self._refuse_busy(live, old.parent)
            await self._ask(request, live, old.parent, text, given)

    async def regenerate(
        self, request: Request, user: UserId, session: SessionId, message: MessageId, params: object
    ) -> None:
        given = validate_params(params)
        async with self._core.sessions.changing(user, session) as live:
            record = live.tree.get(message)
            self._refuse_busy(live, message)
            question = record.message if record.role == USER else record.parent
            assert question is not None
            self._check_room(live, 1)
            encoded = await self._encode_path(live, live.tree.path(question))
            reply = self._new_reply(live, question, given)
            await self._commits.turn(request, live, (reply,), encoded, {"reply": reply.message})

    async def continue_(
        self, request: Request, user: UserId, session: SessionId, message: MessageId, params: object
    ) -> None:
        given = validate_params(params)
        async with self._core.sessions.changing(user, session) as live:
            record = self._named(live, message, ASSISTANT, "message")
            self._refuse_busy(live, message)
            if live.tree.children(message):
                raise ConflictError("only an answer that nothing follows can be continued", message=message)
            self._check_room(live, 0)
            encoded = await self._encode_path(live, live.tree.path(message))
            fields = self._reply_fields(live, given)
            old = encoded.get(message, record)
            again = msgspec.structs.replace(
                old,
                status=GENERATING,
                attempt=old.attempt + 1,
                num_kept_tokens=len(old.token_ids),
                usage=Usage(),
                **fields,
            )
            encoded.pop(message, None)
            select = live.tree.select(message)
            puts = {r.message: r for r in chain(encoded.values(), select.puts, [again])}
            change = msgspec.structs.replace(select, puts=tuple(puts.values()))
            events: list[AnyEvent] = [MessageUpdated(session=session, message=message, status=GENERATING)]
            await self._commits.change(request, live, change, events, {"reply": message}, start=again)

    async def delete(self, request: Request, user: UserId, session: SessionId, message: MessageId) -> None:
        core = self._core
        while True:
            async with core.sessions.changing(user, session) as live:
                gone = live.tree.subtree(message)
                running = [live.generations[m] for m in gone if m in live.generations]
                if not running:
                    change = live.tree.delete(message)
                    left = live.tree.path(live.tree.get(message).parent)
                    events: list[AnyEvent] = [MessageDeleted(session=session, message=message, deleted=len(gone))]
                    branches = live.branches(gone)
                    await self._commits.change(request, live, change, events, {"deleted": len(gone)})
                    num_kept = sum(len(m.token_ids) for m in left)
                    core.forgetting.forget(user, live.forget_paths(gone), branches, num_kept)
                    return
            await core.generations.stop_and_wait(running)

    async def select(self, request: Request, user: UserId, session: SessionId, message: MessageId) -> None:
        async with self._core.sessions.changing(user, session) as live:
            await self._commits.change(request, live, live.tree.select(message), [], {})

    async def stop(self, request: Request, user: UserId, session: SessionId, message: MessageId) -> None:
        core = self._core
        live = await core.sessions.get(user, session)
        record = live.tree.get(message)
        if record.role != ASSISTANT:
            raise BadParamsError("message must be an assistant message, not a user message", field="message")
        if (generation := live.generations.get(message)) is not None:
            await core.generations.stop_and_wait([generation])
        change = Transaction(user=user, session=session, idempotency=request.idempotency({}))
        await core.sessions.commit(live, change, lambda: None)
        request.answer({})

    def stop_unheard(self, user: UserId, session: SessionId, message: MessageId) -> None:
        """Stop without an answer, for when the store is away."""
        live = self._core.sessions.peek(user, session)
        if live is not None and (generation := live.generations.get(message)) is not None:
            self._core.generations.stop(generation, FinishReason.CANCELLED)

    # --- inside -------------------------------------------------------------------------------------------------------

    async def _ask(
        self, request: Request, live: LiveSession, parent: MessageId | None, text: str, params: dict[str, Any]
    ) -> None:
        """A new user message with a reply to be generated."""
        core = self._core
        self._check_room(live, 2)
        question = MessageRecord(
            message=core.new_message_id(), parent=parent, role=USER, text=text, status="done", created_at=core.clock()
        )
        encoded = await self._encode_path(live, [*live.tree.path(parent), question])
        question = encoded.pop(question.message)
        reply = self._new_reply(live, question.message, params)
        fields = {"message": question.message, "reply": reply.message}
        await self._commits.turn(request, live, (question, reply), encoded, fields)

    def _new_reply(self, live: LiveSession, parent: MessageId, params: dict[str, Any]) -> MessageRecord:
        return MessageRecord(
            message=self._core.new_message_id(),
            parent=parent,
            role=ASSISTANT,
            text="",
            status=GENERATING,
            created_at=self._core.clock(),
            **self._reply_fields(live, params),
        )

    def _reply_fields(self, live: LiveSession, params: dict[str, Any]) -> dict[str, Any]:
        merged = {**live.record.params, **params}
        seed = SamplingParams.merge(merged).seed
        # Whole in JavaScript too, so that a client can send back the seed it was told.
        return {"params": merged, "seed": secrets.randbits(53) if seed is None else seed}

    async def _encode_path(self, live: LiveSession, path: Sequence[MessageRecord]) -> dict[MessageId, MessageRecord]:
        """Encode what was not yet on a path to a reply, and check that the prompt leaves room for one.

        Raises:
            ContextOverflowError: it does not.
            EngineUnavailableError: nobody can say.
        """
        core = self._core
        context_tokens = core.link.info().context_tokens
        encoded = await core.encode(live.user, live.record.system, path)
        num_tokens = sum(len(encoded.get(m.message, m).token_ids) for m in path)
        if num_tokens >= context_tokens:
            raise ContextOverflowError.of(num_tokens, context_tokens)
        return encoded

    def _named(self, live: LiveSession, message: MessageId, role: str, field: str) -> MessageRecord:
        record = live.tree.get(message)
        if record.role != role:
            article = {USER: "a user message", ASSISTANT: "an assistant message"}
            raise BadParamsError(f"{field} must be {article[role]}, not {article[record.role]}", field=field)
        return record

    def _refuse_busy(self, live: LiveSession, message: MessageId) -> None:
        if message in live.generations:
            raise BusyError("this message is being generated; wait for its end or stop it", message=message)

    def _check_room(self, live: LiveSession, num_new: int) -> None:
        """Raises what keeps one more generation out."""
        core = self._core
        most = core.limits.max_messages_per_session
        if len(live.tree) + num_new > most:
            raise TooLargeError(f"a session holds at most {most} messages; fork it to go on", field="session")
        core.check_load(live.user)
