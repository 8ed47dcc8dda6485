"""A connection to `chat.v1` that stays: it reconnects, resumes every open conversation, and repeats what was not
answered.

Owns the socket, the requests under way and the `SessionView` of each open conversation. Prints nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from collections.abc import Callable, Mapping
from typing import Any, Final, Self

import msgspec
import websockets
from websockets.asyncio.client import ClientConnection, connect

from chatserve.terminal.view import SessionView

_NOT_AUTHENTICATED: Final = 4001
_FINAL_CLOSE_CODES: Final = frozenset({4000, _NOT_AUTHENTICATED, 4003})
_MAX_DELAY_S: Final = 10.0
_OPEN_TIMEOUT_S: Final = 10.0
_SILENCE_S: Final = 35.0
"""The server pings every 20 s; a link that is silent for longer is dead, whatever the operating system says of it."""
_FINAL_STATUSES: Final = frozenset({401, 403, 404})


class ServerError(Exception):
    """The server's answer to a request was an error. The message is its sentence for a person."""

    def __init__(self, frame: Mapping[str, Any]) -> None:
        self.retry_after_s: float | None = frame.get("retry_after_s")
        """When the same may work, as far as the server knows."""
        detail = frame.get("detail") or frame["code"]
        super().__init__(detail if self.retry_after_s is None else f"{detail}; try again in {self.retry_after_s:.0f} s")
        self.code: str = frame["code"]
        self.retryable = bool(frame.get("retryable"))


class NotConnectedError(Exception):
    """The server cannot be reached, or has closed the connection for good. `advice` says what a person can do."""

    def __init__(self, reason: str, *, advice: str = "") -> None:
        super().__init__(reason)
        self.advice = advice


class _Pending(msgspec.Struct):
    frame: Mapping[str, Any]
    answer: asyncio.Future[Mapping[str, Any]]


class ChatClient:
    """`async with ChatClient(url) as client`: connected, or `NotConnectedError`. From then on a lost connection is made
    again for as long as the client lives.
    """

    def __init__(self, url: str, *, token: str | None = None, silence_s: float = _SILENCE_S) -> None:
        scheme, _, rest = url.rstrip("/").rpartition("://")
        self._ws_url = f"{'wss' if scheme in {'https', 'wss'} else 'ws'}://{rest.removesuffix('/ws')}/ws"
        self._token = token
        self._silence_s = silence_s
        self._socket: ClientConnection | None = None
        self._pending: dict[str, _Pending] = {}
        self._changed = asyncio.Condition()
        self._task: asyncio.Task[None] | None = None
        self._welcome: Mapping[str, Any] = {}
        self._ended: NotConnectedError | None = None
        self.views: dict[str, SessionView] = {}
        """Open conversations."""

    @property
    def welcome(self) -> Mapping[str, Any]:
        """What the server said of itself at the last connection."""
        return self._welcome

    @property
    def connected(self) -> bool:
        return self._socket is not None

    async def __aenter__(self) -> Self:
        connected = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run(connected))
        try:
            await connected
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    # --- requests ---

    async def request(self, kind: str, **fields: Any) -> Mapping[str, Any]:
        """Ask, and wait for the answer over as many connections as it takes: repeating an id does its work once.

        Raises:
            ServerError: the server refused.
            NotConnectedError: the connection is gone for good.
        """
        if self._ended is not None:
            raise self._ended
        frame = {"type": kind, "id": str(uuid.uuid4()), **fields}
        pending = self._pending[frame["id"]] = _Pending(frame, asyncio.get_running_loop().create_future())
        try:
            if self._socket is not None:
                await self._send(self._socket, frame)
            answer = await pending.answer
        finally:
            del self._pending[frame["id"]]
        if answer["type"] == "error":
            raise ServerError(answer)
        return answer

    async def open(self, session: str) -> SessionView:
        """Subscribe, and wait for the snapshot."""
        view = self.views.setdefault(session, SessionView(session))
        try:
            await self.request("session.open", session=session)
        except ServerError:
            del self.views[session]
            raise
        await self.wait_for(lambda: view.seq >= 0 or view.deleted)
        return view

    async def leave(self, session: str) -> None:
        """Unsubscribe and forget."""
        self.views.pop(session, None)
        with contextlib.suppress(ServerError):
            await self.request("session.close", session=session)

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait until a frame has made `condition` true.

        Raises:
            NotConnectedError: none can come any more.
        """
        async with self._changed:
            await self._changed.wait_for(lambda: condition() or self._ended is not None)
        if self._ended is not None and not condition():
            raise self._ended

    # --- the connection ---

    async def _run(self, connected: asyncio.Future[None]) -> None:
        delay_s = 0.1
        try:
            while True:
                try:
                    async with connect(
                        self._ws_url,
                        subprotocols=[websockets.Subprotocol("chat.v1")],
                        max_size=None,
                        ping_interval=None,
                        open_timeout=_OPEN_TIMEOUT_S,
                    ) as socket:
                        async with asyncio.timeout(_OPEN_TIMEOUT_S):
                            await self._hello(socket)
                        delay_s = 0.1
                        if not connected.done():
                            connected.set_result(None)
                        await self._read(socket)
                except websockets.ConnectionClosed as closed:
                    if closed.rcvd is not None and closed.rcvd.code in _FINAL_CLOSE_CODES:
                        reason = closed.rcvd.reason or f"the server closed the connection with {closed.rcvd.code}"
                        advice = (
                            "give yours with --token or in CHATSERVE_TOKEN"
                            if closed.rcvd.code == _NOT_AUTHENTICATED
                            else ""
                        )
                        raise NotConnectedError(reason, advice=advice) from closed
                    if not connected.done():
                        raise NotConnectedError(f"{self._ws_url} closed the connection") from closed
                # A value error is an address that is none, or an answer that is no frame.
                except (OSError, TimeoutError, ValueError, OverflowError, websockets.WebSocketException) as error:
                    refused = isinstance(error, websockets.InvalidStatus) and (
                        error.response.status_code in _FINAL_STATUSES
                    )
                    if refused or not connected.done():
                        raise NotConnectedError(
                            f"cannot reach {self._ws_url} ({_reason(error)})",
                            advice="start a server with `chatserve serve`, or name yours with --url",
                        ) from error
                finally:
                    self._socket = None
                async with self._changed:
                    self._changed.notify_all()
                await asyncio.sleep(delay_s)
                delay_s = min(_MAX_DELAY_S, delay_s * 2)
        except NotConnectedError as error:
            await self._end(error)
            if not connected.done():
                connected.set_exception(error)

    async def _hello(self, socket: ClientConnection) -> None:
        hello: dict[str, Any] = {"type": "hello", "protocol": "chat.v1"}
        if self._token:
            hello["token"] = self._token
        resume = [{"session": view.session, "after": view.seq} for view in self.views.values() if view.seq >= 0]
        if resume:
            hello["resume"] = resume
        await self._send(socket, hello)
        first = json.loads(await socket.recv())
        while first["type"] != "welcome":
            if first["type"] == "error" and "session" not in first:
                raise NotConnectedError(first.get("detail") or first["code"])
            await self._take(socket, first)
            first = json.loads(await socket.recv())
        self._welcome = first
        self._socket = socket
        for pending in list(self._pending.values()):
            await self._send(socket, pending.frame)
        opening = {pending.frame.get("session") for pending in self._pending.values()}
        for view in self.views.values():
            if view.seq < 0 and view.session not in opening:  # a snapshot was cut short
                await self._send(socket, {"type": "session.open", "id": str(uuid.uuid4()), "session": view.session})

    async def _read(self, socket: ClientConnection) -> None:
        while True:
            async with asyncio.timeout(self._silence_s):
                received = await socket.recv()
            await self._take(socket, json.loads(received))

    async def _take(self, socket: ClientConnection, frame: Mapping[str, Any]) -> None:
        kind = frame["type"]
        if kind == "ping":
            await self._send(socket, {"type": "pong"})
            return
        if kind in {"ack", "error"} and frame.get("id") in self._pending:
            answer = self._pending[frame["id"]].answer
            if not answer.done():
                answer.set_result(frame)
            return
        view = self.views.get(frame.get("session", ""))
        if kind == "error" and view is not None and frame["code"] == "not_found":
            view.deleted = True
        elif view is not None and (kind == "snapshot" or "seq" in frame) and not view.apply(frame):
            return
        async with self._changed:
            self._changed.notify_all()

    @staticmethod
    async def _send(socket: ClientConnection, frame: Mapping[str, Any]) -> None:
        # A connection that is going away is noticed by the reader; the request is sent again on the next one.
        with contextlib.suppress(websockets.ConnectionClosed):
            await socket.send(json.dumps(frame, ensure_ascii=False))

    async def _end(self, error: NotConnectedError) -> None:
        self._ended = error
        for pending in self._pending.values():
            if not pending.answer.done():
                pending.answer.set_exception(error)
        async with self._changed:
            self._changed.notify_all()


def _reason(error: BaseException) -> str:
    if isinstance(error, websockets.InvalidStatus):
        return f"HTTP {error.response.status_code}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__
