"""Bare sockets, for what the strict client would not do."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import websockets
from websockets.asyncio.client import connect

from tests.server.harness import Server

UPGRADE = (
    b"GET /ws HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)
HELLO = {"type": "hello", "protocol": "chat.v1"}


async def raw(server: Server, *frames: object) -> Any:
    """A socket that has said this."""
    socket = await connect(server.ws_url, max_size=None, ping_interval=None)
    for frame in frames:
        await socket.send(json.dumps(frame))
    return socket


async def close_code(socket: Any) -> int | None:
    """Read to the end, and what the server said there."""
    async with asyncio.timeout(30):
        with contextlib.suppress(websockets.ConnectionClosed):
            while True:
                await socket.recv()
    code: int | None = socket.close_code
    return code
