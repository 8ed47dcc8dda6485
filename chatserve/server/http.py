"""What all HTTP routes share: who asks, how an error looks, how large a body may be, which headers go out.

Knows no route.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, Final

import msgspec
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from chatserve.errors import ChatError, TooLargeError
from chatserve.server.auth import bearer
from chatserve.server.context import Context
from chatserve.server.origin import Gate
from chatserve.types import UserId

OPEN_PATHS: Final = frozenset({"/healthz", "/readyz"})
"""Asked by probes under whatever name they know; they tell nothing."""

SECURITY_HEADERS: Final = {
    # For whatever is no page: nothing that comes from here may do anything by itself. The page has its own.
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=(), payment=(), usb=()",
}


class UnauthorizedError(ChatError):
    """Over HTTP alone; a socket is closed with 4001."""

    code = "unauthorized"
    http_status = 401


def context_of(request: Request) -> Context:
    context: Context = request.state.context
    return context


def user_of(request: Request) -> UserId:
    """Whose request it is.

    Raises:
        UnauthorizedError: there are tokens, and the request's is none of them.
    """
    user = context_of(request).authenticator.user(bearer(request.headers.get("authorization")))
    if user is None:
        raise UnauthorizedError("a valid token is needed, as `Authorization: Bearer TOKEN`")
    return user


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")


def error_headers(error: ChatError) -> dict[str, str]:
    headers: dict[str, str] = {}
    if isinstance(error, UnauthorizedError):
        headers["www-authenticate"] = "Bearer"
    if "retry_after_s" in error.fields:
        headers["retry-after"] = str(max(1, round(error.fields["retry_after_s"])))
    return headers


async def limited_stream(request: Request, max_bytes: int) -> AsyncGenerator[bytes]:
    """The body as it comes.

    Raises:
        TooLargeError: it is, or says that it will be, longer than `max_bytes`.
    """
    announced = request.headers.get("content-length", "0")
    if announced.isdecimal() and int(announced) > max_bytes:
        raise TooLargeError.of("the body", int(announced), max_bytes)
    received = 0
    async for chunk in request.stream():
        received += len(chunk)
        if received > max_bytes:
            raise TooLargeError.of("the body", received, max_bytes)
        yield chunk


async def read_body(request: Request, max_bytes: int) -> bytes:
    return b"".join([chunk async for chunk in limited_stream(request, max_bytes)])


class GateMiddleware:
    """Refuses foreign hosts and origins before anything else looks at a request, and sends the security headers."""

    def __init__(self, app: ASGIApp, gate: Gate) -> None:
        self._app = app
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in {"http", "websocket"}:
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        refusal = None
        if scope["path"] not in OPEN_PATHS:
            refusal = self._gate.refusal(headers.get("host"), headers.get("origin"))
        if scope["type"] == "websocket":
            if refusal is not None:
                await PlainTextResponse(refusal + "\n", 403)(scope, receive, send)
                return
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                out = MutableHeaders(scope=message)
                for name, value in SECURITY_HEADERS.items():
                    out.setdefault(name, value)
            await send(message)

        if refusal is not None:
            await PlainTextResponse(refusal + "\n", 403)(scope, receive, send_with_headers)
            return
        await self._app(scope, receive, send_with_headers)
