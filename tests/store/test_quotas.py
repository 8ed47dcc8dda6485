"""What a user may have is counted by the store, whoever writes, and given back to the last byte."""

from __future__ import annotations

import msgspec
import pytest

from chatserve.chat.quotas import Quota
from chatserve.chat.redis_layout import SCHEMA, Keys
from chatserve.chat.redis_store import RedisStore, open_store
from chatserve.chat.store import Idempotency, Transaction
from chatserve.errors import QuotaExceededError, RateLimitedError
from chatserve.supervisor.embedded_store import EmbeddedStore
from chatserve.types import SessionId, UserId
from tests.store.records import SESSION, change, create, delta, generating, message
from tests.store.test_store_faults import own_server  # noqa: F401 - a fixture

OTHER = SessionId("s2")


def limited(transaction: Transaction, **quota: int) -> Transaction:
    return msgspec.structs.replace(transaction, quota=Quota(**quota))


async def usage(store: RedisStore, user: UserId) -> tuple[int, int]:
    """Bytes and answers."""
    found = await store._link.command("count", "HMGET", Keys(user).of("usage"), "bytes", "generating")
    return int(found[0] or 0), int(found[1] or 0)


async def test_sessions_are_limited_and_a_deleted_one_makes_room(store: RedisStore, user: UserId) -> None:
    await store.commit(create(user, SESSION))
    await store.commit(create(user, OTHER))
    third = limited(create(user, SessionId("s3")), sessions=2)
    with pytest.raises(QuotaExceededError, match="you have 2 conversations, and at most 2 are allowed") as caught:
        await store.commit(third)
    assert caught.value.fields == {"quota": "sessions", "used": 2, "limit": 2}
    assert await store.load(user, SessionId("s3")) is None
    await store.commit(limited(change(user, puts=(message("m"),)), sessions=2))
    await store.commit(limited(create(UserId(f"{user}'s neighbour")), sessions=1))
    await store.commit(change(user, delete=True))
    await store.commit(third)


async def test_bytes_are_limited_and_what_is_deleted_makes_room(store: RedisStore, user: UserId) -> None:
    await store.commit(create(user, SESSION, message("m1", text="x" * 1000)))
    (used, _) = await usage(store, user)
    assert used > 1000
    more = limited(change(user, puts=(message("m2", text="y" * 1000),)), stored_bytes=2000)
    with pytest.raises(QuotaExceededError, match=f"take {used} bytes") as caught:
        await store.commit(more)
    assert caught.value.fields == {"quota": "bytes", "used": used, "limit": 2000}
    assert await usage(store, user) == (used, 0), "nothing was changed"
    await store.commit(change(user, deletes=("m1",)))
    await store.commit(more)


async def test_answers_at_once_are_limited_over_all_sessions(store: RedisStore, user: UserId) -> None:
    await store.commit(create(user, SESSION, generating("a1")))
    await store.commit(create(user, OTHER, generating("b1")))
    third = limited(change(user, OTHER, puts=(generating("b2"),)), generations=2)
    with pytest.raises(RateLimitedError, match="2 answers of yours are being generated; at most 2 at once") as caught:
        await store.commit(third)
    assert caught.value.fields["retry_after_s"] > 0
    await store.commit(change(user, puts=(message("a1", role="assistant", status="stopped"),)))
    await store.commit(third)
    assert (await usage(store, user))[1] == 2


async def test_an_answers_end_is_bound_by_nothing(store: RedisStore, user: UserId) -> None:
    await store.commit(create(user, SESSION, generating("m1")))
    await store.append([delta(user, "m1", 0, "z" * 5000)])
    before, _ = await usage(store, user)
    await store.commit(change(user, puts=(message("m1", role="assistant", text="z" * 5000),)))
    after, running = await usage(store, user)
    assert after - before > 4900
    assert running == 0


async def test_a_refused_request_may_be_sent_again_and_a_done_one_is_done(store: RedisStore, user: UserId) -> None:
    idempotency = Idempotency("r1", "digest", b"{}")
    await store.commit(create(user, SESSION))
    turn = msgspec.structs.replace(change(user, puts=(generating("m1"),)), idempotency=idempotency, write_id="w1")
    with pytest.raises(RateLimitedError):
        await store.commit(limited(turn, generations=0))
    assert (await store.commit(limited(turn, generations=1))).answer is None
    full = limited(msgspec.structs.replace(turn, write_id="w2"), generations=0)
    assert (await store.commit(full)).answer == b"{}"


async def test_nothing_is_left_of_a_user_who_deletes_everything(store: RedisStore, user: UserId) -> None:
    await store.commit(create(user, SESSION, message("m1", token_ids=(1, 2, 3)), generating("m2")))
    await store.append([delta(user, "m2", 0, "text")])
    await store.commit(create(user, OTHER, message("m3")))
    await store.commit(change(user, delete=True))
    assert (await usage(store, user))[1] == 0
    await store.commit(change(user, OTHER, delete=True))
    assert await usage(store, user) == (0, 0)
    assert not await store._link.command("look", "EXISTS", Keys(user).of("usage"))


async def test_what_was_stored_before_there_were_quotas_is_counted_at_the_next_start(
    own_server: EmbeddedStore,  # noqa: F811 - a fixture
    user: UserId,
) -> None:
    store = await open_store(own_server.url, event_history=10)
    await store.commit(create(user, SESSION, message("m1", text="x" * 100, token_ids=(1, 2)), generating("m2")))
    await store.commit(create(user, OTHER, message("m3", text="é" * 50)))
    counted = await usage(store, user)
    await store.close()
    with own_server._client() as client:  # as version 2 left it
        client.set("chatserve:schema", 2)
        client.delete(Keys(user).of("usage"))
        for session in (SESSION, OTHER):
            client.hdel(Keys(user).session(session, "session")[0], "bytes")
    again = await open_store(own_server.url, event_history=10)
    assert await usage(again, user) == counted
    assert await again._link.command("get", "GET", "chatserve:schema") == str(SCHEMA).encode()
    for session in (SESSION, OTHER):
        await again.commit(change(user, session, delete=True))
    assert await usage(again, user) == (0, 0)
    await again.close()
