"""`WorkerRegistry` on Redis or Valkey: a key a place that expires, a set of owners, a set of sessions for each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from chatserve.chat.redis_link import Call, RedisLink, Script, raise_error
from chatserve.chat.workers import TTL_S, Owner, Standing, place_of
from chatserve.types import SessionId, UserId

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_WORKERS = "chatserve:workers"
_decoder = msgspec.msgpack.Decoder(tuple[UserId, SessionId])


def held_key(owner: Owner) -> bytes:
    return f"chatserve:held:{owner}".encode()


def pack_session(user: UserId, session: SessionId) -> bytes:
    return msgspec.msgpack.encode((user, session))


class RedisWorkers:
    """Implements `WorkerRegistry`."""

    def __init__(self, link: RedisLink, *, ttl_s: float = TTL_S) -> None:
        self._link = link
        self._ttl_ms = round(1000 * ttl_s)
        self._beat = Script.read("beat")

    async def join(self, owner: Owner) -> None:
        """See `WorkerRegistry.join`."""
        await self._link.command("note a worker", "SADD", _WORKERS, owner)
        await self._link.command("note a worker", "SET", _key(owner), _nonce(owner), "PX", self._ttl_ms)

    async def beat(self, owner: Owner) -> Standing:
        """See `WorkerRegistry.beat`."""
        call = Call((_key(owner).encode(),), (_nonce(owner).encode(), self._ttl_ms))
        if not await self._link.script("note a worker", self._beat, call):
            return Standing.GONE
        is_known = await self._link.command("note a worker", "SISMEMBER", _WORKERS, owner)
        return Standing.ALIVE if is_known else Standing.SILENT

    async def leave(self, owner: Owner) -> None:
        """See `WorkerRegistry.leave`."""
        await self._link.command("note a worker", "SET", _key(owner), "", "PX", self._ttl_ms)

    async def forget(self, owner: Owner) -> None:
        """See `WorkerRegistry.forget`. Its place's key, if there is one, expires by itself."""
        # In this order: one that lives after all finds out by the second, and notes anew what it then takes.
        await self._link.command("forget a worker", "DEL", held_key(owner))
        await self._link.command("forget a worker", "SREM", _WORKERS, owner)

    async def known(self) -> list[Owner]:
        """See `WorkerRegistry.known`."""
        names = await self._link.command("list workers", "SMEMBERS", _WORKERS)
        return sorted(Owner(name.decode()) for name in names)

    async def standings(self, owners: Sequence[Owner]) -> list[Standing]:
        """See `WorkerRegistry.standings`."""
        commands: list[tuple[bytes | str | int, ...]] = []
        for owner in owners:
            commands += [("GET", _key(owner)), ("SISMEMBER", _WORKERS, owner)]
        replies = await self._link.commands("tell which workers live", commands)
        for reply in replies:
            raise_error(reply)
        return [
            _standing(owner, nonce, is_known=bool(is_known))
            for owner, nonce, is_known in zip(owners, replies[::2], replies[1::2], strict=True)
        ]

    async def note(self, owner: Owner, user: UserId, session: SessionId) -> None:
        """See `WorkerRegistry.note`."""
        await self._link.command("note a session", "SADD", held_key(owner), pack_session(user, session))

    async def unnote(self, owner: Owner, sessions: Iterable[tuple[UserId, SessionId]]) -> None:
        """See `WorkerRegistry.unnote`."""
        packed = [pack_session(*pair) for pair in sessions]
        if packed:
            await self._link.command("forget sessions", "SREM", held_key(owner), *packed)

    async def noted(self, owner: Owner) -> list[tuple[UserId, SessionId]]:
        """See `WorkerRegistry.noted`."""
        packed = await self._link.command("list a worker's sessions", "SMEMBERS", held_key(owner))
        return sorted(map(_decoder.decode, packed))


def _standing(owner: Owner, nonce: bytes | None, *, is_known: bool) -> Standing:
    if not is_known or (nonce is not None and nonce.decode() != _nonce(owner)):
        return Standing.GONE
    return Standing.SILENT if nonce is None else Standing.ALIVE


def _key(owner: Owner) -> str:
    return f"chatserve:worker:{place_of(owner)}"


def _nonce(owner: Owner) -> str:
    return owner.partition("/")[2]
