"""`POST /v1/chat/completions` and `GET /v1/models`, as OpenAI's own clients expect them.

Owns that API's answers, chunks and errors; `openai_request` reads its bodies. A client that hangs up cancels its
generation.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from chatserve.chat.events import Usage
from chatserve.errors import ChatError, InternalError, NotFoundError
from chatserve.server.http import context_of, error_headers, json_response, read_body, user_of
from chatserve.server.openai_request import parse_completion

if TYPE_CHECKING:
    from chatserve.chat.completion import Chunk

_T = TypeVar("_T")

_ERROR_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}
_ERROR_CODES: Final = {
    "context_overflow": "context_length_exceeded",
    "unauthorized": "invalid_api_key",
    "rate_limited": "rate_limit_exceeded",
}


# --- answers ----------------------------------------------------------------------------------------------------------


def error_response(error: ChatError) -> Response:
    return json_response({"error": _error_body(error)}, error.http_status, error_headers(error))


def _error_body(error: ChatError) -> dict[str, Any]:
    return {
        "message": error.detail,
        "type": _ERROR_TYPES.get(error.http_status, "server_error"),
        "param": error.fields.get("field"),
        "code": _ERROR_CODES.get(error.code, error.code),
    }


def usage_body(usage: Usage | None) -> dict[str, Any]:
    usage = usage or Usage()
    prompt, completion = _count(usage.prompt_tokens), _count(usage.completion_tokens)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        # Whatever was not computed again: on the device, or brought back from the host.
        "prompt_tokens_details": {"cached_tokens": _count(usage.cached_tokens) + _count(usage.swapped_in_tokens)},
    }


def _count(value: object) -> int:
    return value if isinstance(value, int) else 0


class _Stamp:
    """What every chunk of one answer repeats."""

    def __init__(self, model: str) -> None:
        self.id = f"chatcmpl-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.model = model

    def body(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}


async def chat_completions(request: Request) -> Response:
    try:
        context = context_of(request)
        user = user_of(request)
        limits = context.settings.limits
        wanted = parse_completion(await read_body(request, limits.max_frame_bytes), limits.max_text_bytes)
        # An asynchronous generator: closing it is what stops the generation.
        chunks = cast("AsyncGenerator[Chunk]", context.service.complete(user, wanted.messages, wanted.params))
        stamp = _Stamp(_model_name(request))
        if not wanted.stream:
            return await _whole(request, stamp, chunks)
        # The first piece decides between an error with its status and a stream that has begun.
        try:
            first = await _unless_gone(request, anext(chunks))
        except BaseException:
            await chunks.aclose()
            raise
        if first is None:
            await chunks.aclose()
            return Response(status_code=499)
        return _EventStream(stamp, first, chunks, include_usage=wanted.include_usage)
    except ChatError as error:
        return error_response(error)


async def _whole(request: Request, stamp: _Stamp, chunks: AsyncGenerator[Chunk]) -> Response:
    async def collect() -> tuple[str, Chunk]:
        texts: list[str] = []
        async for chunk in chunks:
            texts.append(chunk.text)
            if chunk.finish_reason is not None:
                return "".join(texts), chunk
        raise InternalError("the generation ended without saying why")

    async with contextlib.aclosing(chunks):
        result = await _unless_gone(request, collect())
    if result is None:
        return Response(status_code=499)
    text, last = result
    message = {"role": "assistant", "content": text, "refusal": None}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": last.finish_reason}
    return json_response({**stamp.body("chat.completion", [choice]), "usage": usage_body(last.usage)})


class _EventStream(StreamingResponse):
    """Whatever ends it, the generation behind it is ended too."""

    def __init__(self, stamp: _Stamp, first: Chunk, chunks: AsyncGenerator[Chunk], *, include_usage: bool) -> None:
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        super().__init__(
            _events(stamp, first, chunks, include_usage=include_usage), media_type="text/event-stream", headers=headers
        )
        self._chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with contextlib.aclosing(self._chunks):
            await super().__call__(scope, receive, send)


async def _events(
    stamp: _Stamp, first: Chunk, chunks: AsyncGenerator[Chunk], *, include_usage: bool
) -> AsyncIterator[bytes]:
    usage: Usage | None = None

    def piece(delta: dict[str, Any], finish_reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        body = stamp.body("chat.completion.chunk", [choice])
        return _sse({**body, "usage": None} if include_usage else body)

    yield piece({"role": "assistant", "content": ""})
    chunk: Chunk | None = first
    try:
        while chunk is not None:
            if chunk.text:
                yield piece({"content": chunk.text})
            if chunk.finish_reason is not None:
                usage = chunk.usage
                yield piece({}, chunk.finish_reason)
                break
            chunk = await anext(chunks, None)
    except ChatError as error:
        # The status has been sent; the clients look for this.
        yield _sse({"error": _error_body(error)})
        return
    if include_usage and usage is not None:
        yield _sse({**stamp.body("chat.completion.chunk", []), "usage": usage_body(usage)})
    yield b"data: [DONE]\n\n"


def _sse(body: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


async def _unless_gone(request: Request, work: Coroutine[Any, Any, _T]) -> _T | None:
    """The result of `work`, or None, and `work` cancelled, if the client hangs up first."""

    async def hung_up() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, gone = asyncio.create_task(work), asyncio.create_task(hung_up())
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


# --- models -----------------------------------------------------------------------------------------------------------


async def list_models(request: Request) -> Response:
    try:
        user_of(request)
        return json_response({"object": "list", "data": [_model_body(request)]})
    except ChatError as error:
        return error_response(error)


async def get_model(request: Request) -> Response:
    try:
        user_of(request)
        name = request.path_params["model"]
        if name != _model_name(request):
            raise NotFoundError(f"the model {name!r} does not exist here; this server runs {_model_name(request)!r}")
        return json_response(_model_body(request))
    except ChatError as error:
        return error_response(error)


def _model_name(request: Request) -> str:
    context = context_of(request)
    info = context.engine_info()
    return info.model if info else context.settings.model


def _model_body(request: Request) -> dict[str, Any]:
    context = context_of(request)
    info = context.engine_info()
    body: dict[str, Any] = {
        "id": _model_name(request),
        "object": "model",
        "created": context.started_at,
        "owned_by": "chatserve",
    }
    if info is not None:
        body["context_tokens"] = info.context_tokens
    return body


ROUTES: Final = (
    Route("/v1/chat/completions", chat_completions, methods=["POST"]),
    Route("/v1/models", list_models, methods=["GET"]),
    Route("/v1/models/{model:path}", get_model, methods=["GET"]),
)
