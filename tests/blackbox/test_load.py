"""Many connections, and those who do not read: nothing piles up, nobody else is held up."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import psutil
import pytest

from tests.blackbox.client import ChatClient, RequestFailedError
from tests.blackbox.conftest import Connect
from tests.blackbox.server import ON_EITHER_STORE, Server

MIB = 1024 * 1024


async def sockets_become(server: Server, wanted: int) -> None:
    async with asyncio.timeout(20):
        while True:
            if await asyncio.to_thread(server.metric, "chatserve_sockets") == wanted:
                return


async def shout(client: ChatClient, session: str, text: str) -> None:
    """Cause a long event, unless the store is too busy to take it just now."""
    try:
        await client.request("session.update", session=session, system=text)
    except RequestFailedError as error:
        if error.code != "store_unavailable":
            raise


@pytest.mark.timeout(300)
@ON_EITHER_STORE
async def test_five_thousand_connects_and_drops_leave_nothing_behind(connect: Connect) -> None:
    server = connect.server
    web = psutil.Process(server.children()["web"])
    upgrade = (
        f"GET /ws HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
        "Sec-WebSocket-Protocol: chat.v1\r\n\r\n"
    ).encode()

    async def knock(number: int) -> None:
        """Connect and be gone again, at one point or another of the handshake."""
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(upgrade[: len(upgrade) // 2] if number % 4 == 0 else upgrade)
        if number % 4 > 1:
            await reader.readuntil(b"\r\n\r\n")
        writer.transport.abort()

    async def come_and_go(number: int) -> None:
        """Some say hello, some wait for the answer, some close and some are cut."""
        client = connect()
        await client.open()
        if number % 3:
            await client.send({"type": "hello", "protocol": "chat.v1"})
        if number % 3 == 2:
            await client.until(lambda: bool(client.welcome))
        if number % 2:
            client.cut()
        else:
            await client.socket.close()
        await client.closed()

    async def many(number: int) -> tuple[int, int]:
        for start in range(0, number, 50):
            await asyncio.gather(*(come_and_go(n) if n % 10 == 0 else knock(n) for n in range(start, start + 50)))
        await sockets_become(server, 0)
        async with asyncio.timeout(20):  # what was cut off in the handshake is noticed a moment later
            while await asyncio.to_thread(web.num_fds) > idle_fds + 2:
                pass
        return web.num_fds(), web.memory_info().rss

    idle_fds = web.num_fds()
    fds, rss = await many(1000)
    tasks = await asyncio.to_thread(server.metric, "chatserve_tasks")
    fds_later, rss_later = await many(4000)
    assert fds_later <= fds + 2
    async with asyncio.timeout(20):  # one that renews or flushes something may be at it just now
        while await asyncio.to_thread(server.metric, "chatserve_tasks") > tasks:
            pass
    assert rss_later - rss < 8 * MIB


@ON_EITHER_STORE
async def test_who_never_reads_costs_a_bounded_amount_and_holds_up_nobody(connect: Connect) -> None:
    server = connect.server
    web = psutil.Process(server.children()["web"])
    async with connect() as client, connect() as deaf:
        session, mirror = await client.started_session()
        await deaf.watch(session)
        deaf.socket.transport.pause_reading()
        before = web.memory_info().rss
        closes = 'chatserve_socket_closes_total{code="4008"}'
        async with asyncio.timeout(60):
            while closes.encode() not in (await asyncio.to_thread(server.get, "/metrics"))[1]:
                # What the kernel's buffers take comes on top of the server's own bound, and they are large.
                for n in range(40):
                    await shout(client, session, f"{n} " + "z" * 60_000)
        assert mirror.system is not None
        await client.turn((await client.started_session())[0], "not held up", max_tokens=3)
        assert web.memory_info().rss - before < 40 * MIB
        await sockets_become(server, 1)
        deaf.cut()


@ON_EITHER_STORE
async def test_a_megabyte_to_tokenise_keeps_fifty_idle_sockets_answered(server: Server, connect: Connect) -> None:
    async with AsyncExitStack() as stack:
        idle = [await stack.enter_async_context(connect()) for _ in range(50)]
        busy = await stack.enter_async_context(connect())
        session = await busy.create()
        text = "tokenise this, please. " * (250_000 // 23)
        sends = [
            asyncio.ensure_future(busy.request("message.send", session=session, parent=None, text=text))
            for _ in range(4)
        ]
        rounds = 0
        while not all(send.done() for send in sends):
            await asyncio.gather(*(client.settle() for client in idle))
            rounds += 1
        for send in sends:
            with pytest.raises(RequestFailedError, match="context_overflow"):
                await send
        assert rounds > 1, "they were answered while it was tokenised"
        await asyncio.gather(*(client.settle() for client in idle))
        assert all(client.close_code is None for client in idle)
