"""The web application: opens what it needs, wires it together, and routes.

`build_app` is given settings and, in tests, another way to open a context. The lifespan owns the store's connection,
the engine client, the service and the hub; they are opened in that order and closed in the opposite one.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Final, TypedDict

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket

from chatserve.chat.dependencies import Dependencies
from chatserve.chat.events import AnyEvent
from chatserve.chat.prompt import PromptEncoder
from chatserve.chat.redis_store import open_store
from chatserve.chat.service import ChatService
from chatserve.chat.store import Store
from chatserve.chat.workers import Owner, owner_name
from chatserve.config import ServeSettings, WebSettings
from chatserve.engine.client import EngineClient
from chatserve.errors import EngineUnavailableError, InternalError, StartupError, StoreUnavailableError
from chatserve.server import api, openai
from chatserve.server.auth import Authenticator
from chatserve.server.connection import Connection
from chatserve.server.context import Context
from chatserve.server.http import SECURITY_HEADERS, GateMiddleware
from chatserve.server.hub import Hub
from chatserve.server.metrics import Metrics
from chatserve.server.origin import Gate, is_loopback
from chatserve.server.page import find_web_dir, page_routes
from chatserve.types import SessionId, UserId

ENGINE_CONNECT_TIMEOUT_S: Final = 0.5
STORE_PATIENCE_S: Final = 10.0
"""Whatever ended us may have ended the store too, which is then being started again."""
_START_PAUSE_S: Final = 0.2
LAST_REQUESTS_S: Final = 5.0
"""How long requests that were taken may go on when the server closes."""

OpenContext = Callable[[WebSettings], AbstractAsyncContextManager[Context]]


class _State(TypedDict):
    context: Context


def build_app(settings: WebSettings, open_context: OpenContext | None = None) -> Starlette:
    """The application, not started yet.

    Raises:
        StartupError: the server would be reachable from other machines without tokens.
    """
    serve = settings.serve
    if serve.tokens_file is None and not is_loopback(serve.host):
        raise StartupError(
            f"without tokens the server binds to this machine only, not to {serve.host}: "
            "make one with `chatserve token USER` and set --tokens-file (CHATSERVE_TOKENS_FILE)"
        )

    @contextlib.asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[_State]:
        async with (open_context or _open_context)(settings) as context:
            yield {"context": context}

    return Starlette(
        routes=[WebSocketRoute("/ws", _socket), *api.ROUTES, *openai.ROUTES, *page_routes(find_web_dir())],
        middleware=[
            Middleware(GateMiddleware, gate=Gate(serve.host, serve.allowed_hosts, serve.allowed_origins)),
        ],
        exception_handlers={**api.EXCEPTION_HANDLERS, Exception: _handle_bug},
        lifespan=lifespan,
    )


async def _socket(websocket: WebSocket) -> None:
    await Connection(websocket.state.context, websocket).run()


async def _handle_bug(request: Request, _error: Exception) -> Response:
    """The answer to whoever met a bug of ours. It is logged where it goes on to; its text is nobody's business."""
    error = InternalError("the server failed to do this; its log says why")
    if request.url.path.startswith("/v1/"):
        response = openai.error_response(error)
    else:
        response = await api.handle_chat_error(request, error)
    response.headers.update(SECURITY_HEADERS)  # what adds them otherwise is what the error has passed already
    return response


@contextlib.asynccontextmanager
async def _open_context(settings: WebSettings) -> AsyncIterator[Context]:
    serve = settings.serve
    authenticator = Authenticator(serve.tokens_file)
    encoder = PromptEncoder(settings.model_dir, operator_prompts=read_operator_prompts(serve.system_prompts_dir))
    if serve.context_tokens:
        encoder.check_context(serve.context_tokens)
    async with contextlib.AsyncExitStack() as stack:
        store = await open_store(settings.redis_url, event_history=serve.event_history, patience_s=STORE_PATIENCE_S)
        stack.push_async_callback(store.close)
        engine = EngineClient(settings.engine_socket)
        stack.push_async_callback(engine.close)
        # The model may load for minutes; until then everything but an answer is to be had.
        with contextlib.suppress(EngineUnavailableError):
            await engine.connect(ENGINE_CONNECT_TIMEOUT_S)
        owner = owner_name(settings.place or uuid.uuid4().hex, uuid.uuid4().hex)
        yield await stack.enter_async_context(running(serve, authenticator, store, engine, encoder, owner))


@contextlib.asynccontextmanager
async def running(
    serve: ServeSettings,
    authenticator: Authenticator,
    store: Store,
    engine: EngineClient,
    encoder: PromptEncoder,
    owner: Owner | None = None,
) -> AsyncIterator[Context]:
    """The hub and the service on top of an open store and engine, started and, at the end, closed."""
    hub = Hub()
    metrics = Metrics(hub)

    def publish(user: UserId, session: SessionId, events: Sequence[AnyEvent]) -> None:
        metrics.observe(events)
        hub.topics.publish(user, session, events)

    given = Dependencies(
        store=store,
        engine=engine,
        encoder=encoder,
        limits=serve.limits,
        publish=publish,
        publish_relayed=hub.topics.publish,
        publish_changed=hub.publish_changed,
        publish_health=hub.publish_health,
        break_off=hub.topics.break_off,
        owner=owner or owner_name(uuid.uuid4().hex, uuid.uuid4().hex),
        resumes=serve.on_restart == "resume",
        expiry_s=serve.session_expiry_days * 86400,
        orphan_grace_s=serve.orphan_grace_s,
        engine_silence_s=serve.engine_silence_s,
    )
    service = ChatService(given)
    hub.topics.on_subscribers = service.set_subscribers
    hub.topics.on_unfollowed = service.unfollow
    hub.on_user_came, hub.on_user_left = service.user_came, service.user_left
    context = Context(serve, authenticator, hub, metrics, store, engine, service)
    try:
        await _start(service)
        yield context
    finally:
        await context.background.finish(LAST_REQUESTS_S)
        await service.close()


async def _start(service: ChatService) -> None:
    """Start it, and wait a little for a store that goes away just then.

    Raises:
        StartupError: it stays away.
    """
    loop = asyncio.get_running_loop()
    give_up_at = loop.time() + STORE_PATIENCE_S
    while True:
        try:
            await service.start()
            return
        except StoreUnavailableError as error:
            if loop.time() >= give_up_at:
                raise StartupError(f"the store went away during the start: {error.detail}") from error
        await asyncio.sleep(_START_PAUSE_S)


def read_operator_prompts(folder: Path | None) -> list[str]:
    """The operator's system prompts: every text file of the folder.

    Raises:
        StartupError: the folder or a file in it cannot be read.
    """
    if folder is None:
        return []
    try:
        files = sorted(path for path in folder.iterdir() if path.suffix in {".txt", ".md"})
        return [path.read_text(encoding="utf-8") for path in files]
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"the system prompts in {folder} cannot be read: {error}") from error
