"""The HTTP routes beside the socket: sessions in and out, the cache, health, metrics.

Owns their paths and bodies. Errors are `{"error": {"code", "detail", "retryable", …}}` with the codes of `chat.v1`.
"""

from __future__ import annotations

import asyncio
from typing import Final

from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from chatserve.errors import BadFrameError, ChatError, EngineUnavailableError, StoreUnavailableError
from chatserve.server.http import context_of, error_headers, json_response, limited_stream, read_body, user_of
from chatserve.server.metrics import CONTENT_TYPE
from chatserve.types import SessionId

MAX_IMPORT_BYTES: Final = 256 * 1024 * 1024
PROBE_TIMEOUT_S: Final = 2.0
"""How long the store and the engine may take to answer a probe."""
INSPECT_TIMEOUT_S: Final = 8.0
"""A person who asks what is in the cache waits for the end of a long step."""


async def handle_chat_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, ChatError)
    body = {**error.fields, "code": error.code, "detail": error.detail, "retryable": error.retryable}
    return json_response({"error": body}, error.http_status, error_headers(error))


async def export_session(request: Request) -> Response:
    user = user_of(request)
    session = SessionId(request.path_params["session"])
    exported = await context_of(request).service.export(user, session)
    name = "".join(c for c in session if c.isascii() and (c.isalnum() or c in "-_"))
    headers = {"content-disposition": f'attachment; filename="chatserve-{name}.json"', "cache-control": "no-store"}
    return json_response(exported, headers=headers)


async def import_sessions(request: Request) -> Response:
    """A raw JSON body, or the first file of a form."""
    user = user_of(request)
    if request.headers.get("content-type", "").startswith("multipart/form-data"):
        data = await _first_file(request)
    else:
        data = await read_body(request, MAX_IMPORT_BYTES)
    sessions = await context_of(request).service.import_(user, data)
    return json_response({"sessions": sessions}, 201)


async def _first_file(request: Request) -> bytes:
    parser = MultiPartParser(request.headers, limited_stream(request, MAX_IMPORT_BYTES), max_files=1, max_fields=8)
    try:
        form = await parser.parse()
    except (MultiPartException, KeyError) as error:
        raise BadFrameError(f"the form cannot be read: {error}") from error
    try:
        for value in form.values():
            if not isinstance(value, str):
                return await value.read()
    finally:
        await form.close()
    raise BadFrameError("the form holds no file")


async def cache(request: Request) -> Response:
    user_of(request)
    try:
        async with asyncio.timeout(INSPECT_TIMEOUT_S):
            report = await context_of(request).engine.inspect(with_map=True)
    except TimeoutError:
        raise EngineUnavailableError(f"the engine did not answer within {INSPECT_TIMEOUT_S:g} s") from None
    return json_response(
        {
            "block_size": report.block_size,
            "device": report.device,
            "host": report.host,
            "running": report.running,
            "queued": report.waiting,
            "counters": report.counters,
            "map": report.block_map,
        },
        headers={"cache-control": "no-store"},
    )


async def healthz(_request: Request) -> Response:
    return json_response({"status": "alive"})


async def readyz(request: Request) -> Response:
    context = context_of(request)
    problems: dict[str, str] = {}
    if context.engine.info is None:
        problems["engine"] = "not connected: the model is loading, or the engine is being restarted"
    elif context.service.engine_is_silent:
        problems["engine"] = "no answer: it is stopped, or in a step that takes very long"
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            await context.store.ping()
    except (StoreUnavailableError, TimeoutError):
        problems["store"] = "no answer, or no writes"  # anybody may ask here, and the error names addresses
    if problems:
        return json_response({"status": "not ready", "problems": problems}, 503)
    return json_response({"status": "ready"})


async def metrics(request: Request) -> Response:
    context = context_of(request)
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            report = await context.engine.inspect()
    except (EngineUnavailableError, TimeoutError):
        report = None
    return Response(context.metrics.render(report), headers={"content-type": CONTENT_TYPE})


async def handle_disconnect(_request: Request, _error: Exception) -> Response:
    """The client left in the middle of its own body; nobody reads this."""
    return Response(status_code=400)


ROUTES: Final = (
    Route("/api/sessions/{session}/export", export_session, methods=["GET"]),
    Route("/api/sessions/import", import_sessions, methods=["POST"]),
    Route("/api/cache", cache, methods=["GET"]),
    Route("/healthz", healthz, methods=["GET"]),
    Route("/readyz", readyz, methods=["GET"]),
    Route("/metrics", metrics, methods=["GET"]),
)

EXCEPTION_HANDLERS: Final = {ChatError: handle_chat_error, ClientDisconnect: handle_disconnect}
