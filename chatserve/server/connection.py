"""One socket's life: a task that reads, a task that writes, a timer for the heartbeat.

Owns the order of things on one connection. What a frame means is `protocol`'s, what a request does is `dispatch`'s,
what is owed to the socket is its outbox's. Reading never waits for a slow store or engine (a request runs as a task of
its own), and nobody ever waits for this socket's writer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Final, assert_never

from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from chatserve.server import dispatch
from chatserve.server.auth import bearer
from chatserve.server.context import Context
from chatserve.server.frames import PROTOCOL, AnyRequest, Typing
from chatserve.server.outbox import Outbox, frame_of
from chatserve.server.protocol import PING, ChatProtocol, Close, CloseCode, Opened, Output, Requested, Send, Typed
from chatserve.server.topics import Socket
from chatserve.types import MessageId, SessionId

_log = logging.getLogger(__name__)

MAX_REQUESTS_IN_FLIGHT: Final = 256
"""Of one socket; it is not read while it has that many."""
STALL_S: Final = 1.0
"""A heartbeat that comes so late itself proves nothing about the peer."""
LAST_WORDS_S: Final = 2.0
"""How long what waits may take to leave before a close."""


class Connection:
    def __init__(self, context: Context, websocket: WebSocket) -> None:
        self._context = context
        self._websocket = websocket
        self._loop = asyncio.get_running_loop()
        self._outbox = Outbox(context.settings.max_socket_queue_bytes)
        self._protocol = ChatProtocol(
            context.settings.limits,
            context.authenticator.user,
            self._loop.time(),
            bearer(websocket.headers.get("authorization")),
        )
        self._socket: Socket | None = None
        self._in_flight = asyncio.Semaphore(MAX_REQUESTS_IN_FLIGHT)
        self._paused = False
        self._timer: asyncio.TimerHandle | None = None
        self._close: Close | None = None

    async def run(self) -> None:
        """Serve the socket until either side closes it."""
        websocket = self._websocket
        subprotocol = PROTOCOL if PROTOCOL in websocket.scope.get("subprotocols", ()) else None
        await websocket.accept(subprotocol=subprotocol)
        self._set_timer()
        reader = asyncio.create_task(self._read(), name="socket reader")
        writer = asyncio.create_task(self._write(), name="socket writer")
        ended = asyncio.create_task(self._outbox.wait_ended(), name="socket end")
        tasks = (reader, writer, ended)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if self._close is not None and not self._outbox.ended and not writer.done():
                # The last words of an orderly close; a peer that does not take them is not waited for.
                await asyncio.wait((writer, ended), timeout=LAST_WORDS_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if self._timer is not None:
                self._timer.cancel()
            if self._socket is not None:
                self._context.hub.detach(self._socket)
            self._outbox.end()
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            for result in results:
                if isinstance(result, Exception):
                    _log.error("a connection failed", exc_info=result)
                    self._close = self._close or Close(CloseCode.INTERNAL, "the server failed")
            await self._say_goodbye()

    async def _say_goodbye(self) -> None:
        websocket = self._websocket
        if websocket.client_state is not WebSocketState.CONNECTED:
            return
        if websocket.application_state is not WebSocketState.CONNECTED:
            return
        close = self._close or Close(CloseCode.TOO_SLOW, "too much waited to be sent: reconnect and resume")
        self._context.metrics.socket_closed(close.code)
        with contextlib.suppress(WebSocketDisconnect, RuntimeError):
            await websocket.close(close.code, close.reason)

    # --- reading ------------------------------------------------------------------------------------------------------

    async def _read(self) -> None:
        while not self._protocol.closed:
            message = await self._websocket.receive()
            if message["type"] == "websocket.disconnect":
                self._outbox.end()
                return
            now = self._loop.time()
            match message:
                case {"text": str(text)}:
                    outputs = self._protocol.receive_text(text, now)
                case _:
                    outputs = self._protocol.receive_binary(now)
            for output in outputs:
                await self._handle(output)

    async def _handle(self, output: Output) -> None:
        match output:
            case Send() | Close():
                self._emit(output)
            case Opened():
                self._open(output)
            case Typed(typing=typing):
                self._typing(typing)
            case Requested(request=request):
                await self._request(request)
            case _:
                assert_never(output)

    def _emit(self, output: Send | Close) -> None:
        match output:
            case Send(text=text):
                frame = frame_of(text)
                if text == PING:
                    self._outbox.put_first(frame)
                else:
                    self._outbox.put(frame)
            case Close(code=code):
                self._close = output
                if code is CloseCode.TOO_SLOW:
                    self._outbox.end()
                else:
                    self._outbox.finish()
            case _:
                assert_never(output)

    def _open(self, opened: Opened) -> None:
        context = self._context
        if context.hub.count_sockets(opened.user) >= context.settings.limits.max_connections_per_user:
            for close in self._protocol.close(CloseCode.TOO_MANY, "too many connections of this user"):
                self._emit(close)
            return
        socket = self._socket = context.hub.attach(opened.user, self._outbox)
        dispatch.welcome(context, socket)
        wishes = [(context.hub.topics.reserve(socket, SessionId(wish.session)), wish.after) for wish in opened.resume]
        if wishes:
            context.background.start(dispatch.resume(context, socket, wishes), "resume")

    def _typing(self, typing: Typing) -> None:
        socket = self._socket
        assert socket is not None, "the handshake comes first"
        parent = None if typing.parent is None else MessageId(typing.parent)
        self._context.service.typing(socket.user, SessionId(typing.session), parent, typing.text)

    async def _request(self, request: AnyRequest) -> None:
        socket = self._socket
        assert socket is not None, "the handshake comes first"
        if self._in_flight.locked():
            self._paused = True
        await self._in_flight.acquire()
        self._paused = False
        subscription = dispatch.begin(self._context, socket, request)
        task = self._context.background.start(dispatch.perform(self._context, socket, request, subscription), "request")
        task.add_done_callback(lambda _task: self._in_flight.release())

    # --- writing ------------------------------------------------------------------------------------------------------

    async def _write(self) -> None:
        with contextlib.suppress(WebSocketDisconnect):
            while (text := await self._outbox.next_frame()) is not None:
                await self._websocket.send_text(text)

    # --- the heartbeat ------------------------------------------------------------------------------------------------

    def _set_timer(self) -> None:
        if not self._protocol.closed:
            self._timer = self._loop.call_at(self._protocol.deadline(), self._tick)

    def _tick(self) -> None:
        now = self._loop.time()
        if self._paused or now - self._protocol.deadline() > STALL_S:
            # It is we who did not listen: what it may have said is still in the socket.
            self._protocol.excuse(now)
        for output in self._protocol.tick(now):
            assert isinstance(output, Send | Close), "time makes no requests"
            self._emit(output)
        self._set_timer()
