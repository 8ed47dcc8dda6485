"""Carries out one request of a socket: from its typed frame to its one `ack` or `error`.

Owns the mapping of frames to the service's methods. Knows nothing of how frames arrive or leave.
"""

from __future__ import annotations

import logging
from typing import Any, assert_never

import msgspec
from msgspec import UNSET

from chatserve.errors import ChatError, InternalError
from chatserve.server import frames
from chatserve.server.context import SERVER_NAME, Context
from chatserve.server.frames import AnyRequest
from chatserve.server.outbox import encode, frame_of
from chatserve.server.reading import error_text
from chatserve.server.topics import Socket, Subscription
from chatserve.types import MessageId, SessionId

_log = logging.getLogger(__name__)


class Answer:
    """The one answer of a request, queued on the socket that asked."""

    def __init__(self, socket: Socket, request: AnyRequest) -> None:
        self._socket = socket
        self._request = request
        self.given = False

    def ack(self, fields: dict[str, Any]) -> None:
        assert not self.given, "a request is answered once"
        self.given = True
        self._socket.outbox.put(encode({"type": "ack", "id": self._request.id, **fields}))

    def error(self, error: ChatError) -> None:
        assert not self.given, "a request is answered once"
        self.given = True
        self._socket.outbox.put(frame_of(error_text(error, msgspec.structs.asdict(self._request))))


def begin(context: Context, socket: Socket, request: AnyRequest) -> Subscription | None:
    """What must happen in the order of the frames, before the request runs as a task of its own."""
    match request:
        case frames.SessionOpen(session=session):
            return context.hub.topics.reserve(socket, SessionId(session))
        case frames.SessionClose(session=session):
            context.hub.topics.unsubscribe(socket, SessionId(session))
            return None
        case _:
            return None


async def perform(
    context: Context, socket: Socket, request: AnyRequest, subscription: Subscription | None = None
) -> None:
    """Do it and answer it, whatever happens."""
    answer = Answer(socket, request)
    code = "ok"
    try:
        await _perform(context, socket, request, answer, subscription)
        assert answer.given, f"{type(request).__name__} was done without an answer"
    except ChatError as error:
        code = error.code
        if answer.given:
            _log.warning("%s failed after its ack: %s", type(request).__name__, error)
        else:
            answer.error(error)
    except Exception:  # noqa: BLE001 - whatever went wrong, the client gets its one answer
        code = InternalError.code
        _log.exception("%s failed", type(request).__name__)
        if not answer.given:
            answer.error(InternalError("the server failed to do this; its log says why"))
    context.metrics.request(str(request.__struct_config__.tag), code)


async def _perform(  # noqa: C901, PLR0912 - a table with a row for each frame type
    context: Context, socket: Socket, request: AnyRequest, answer: Answer, subscription: Subscription | None
) -> None:
    service, user, ack = context.service, socket.user, answer.ack
    match request:
        case frames.SessionList(limit=limit, cursor=cursor, query=query):
            page = await service.list_sessions(user, limit=50 if limit is None else limit, cursor=cursor, query=query)
            fields: dict[str, Any] = {"sessions": page.sessions}
            if page.cursor is not None:
                fields["cursor"] = page.cursor
            ack(fields)
        case frames.SessionOpen():
            assert subscription is not None
            await context.hub.topics.open(subscription, service, None, lambda: ack({}))
        case frames.SessionClose():
            ack({})
        case frames.SessionCreate(id=id_, title=title, system=system, params=params):
            await service.create_session(user, id_, title=title, system=system, params=params, answer=ack)
        case frames.SessionUpdate(id=id_, session=session):
            given = {name: getattr(request, name) for name in ("title", "params")}
            changes = {name: value for name, value in given.items() if value is not None}
            if request.system is not UNSET:
                changes["system"] = request.system
            await service.update_session(user, id_, session=SessionId(session), **changes, answer=ack)
        case frames.SessionDelete(id=id_, session=session):
            await service.delete_session(user, id_, session=SessionId(session), answer=ack)
        case frames.SessionFork(id=id_, session=session, message=message):
            await service.fork_session(user, id_, session=SessionId(session), message=MessageId(message), answer=ack)
        case frames.MessageSend(id=id_, session=session, parent=parent, text=text, params=params):
            await service.send_message(
                user,
                id_,
                session=SessionId(session),
                parent=None if parent is None else MessageId(parent),
                text=text,
                params=params,
                answer=ack,
            )
        case frames.MessageEdit(id=id_, session=session, message=message, text=text, params=params):
            await service.edit_message(
                user, id_, session=SessionId(session), message=MessageId(message), text=text, params=params, answer=ack
            )
        case frames.MessageRegenerate(id=id_, session=session, message=message, params=params):
            await service.regenerate_message(
                user, id_, session=SessionId(session), message=MessageId(message), params=params, answer=ack
            )
        case frames.MessageContinue(id=id_, session=session, message=message, params=params):
            await service.continue_message(
                user, id_, session=SessionId(session), message=MessageId(message), params=params, answer=ack
            )
        case frames.MessageDelete(id=id_, session=session, message=message):
            await service.delete_message(user, id_, session=SessionId(session), message=MessageId(message), answer=ack)
        case frames.BranchSelect(id=id_, session=session, message=message):
            await service.select_branch(user, id_, session=SessionId(session), message=MessageId(message), answer=ack)
        case frames.GenerationStop(id=id_, session=session, message=message):
            await service.stop_generation(user, id_, session=SessionId(session), message=MessageId(message), answer=ack)
        case _:
            assert_never(request)


def welcome(context: Context, socket: Socket) -> None:
    """The answer to `hello`, and what is degraded just now."""
    info = context.engine_info()
    frame = frames.Welcome(
        protocol=frames.PROTOCOL,
        server=SERVER_NAME,
        model=info.model if info else context.settings.model,
        context_tokens=info.context_tokens if info else 0,
        user=socket.user,
        limits=context.settings.limits,
    )
    socket.outbox.put(encode(frame))
    context.hub.send_health(socket)


async def resume(context: Context, socket: Socket, wishes: list[tuple[Subscription, int]]) -> None:
    """Bring each of `hello.resume` up to date; one that cannot be had does not hold up the others."""
    for subscription, after in wishes:
        if socket.outbox.ended:
            return  # nobody is left to read the store for
        try:
            await context.hub.topics.open(subscription, context.service, after)
        except ChatError as error:
            text = error_text(error, session=subscription.session)
            socket.outbox.put(frame_of(text))
        except Exception:  # noqa: BLE001 - one session that fails does not hold up the others
            _log.exception("resuming a session failed")
            text = error_text(InternalError("the session could not be resumed"), session=subscription.session)
            socket.outbox.put(frame_of(text))
