"""Out to the host and back: nothing moves twice, and nothing is read before it is there."""

from __future__ import annotations

from chatserve.cache import search
from chatserve.types import RequestId, UserId
from tests.cache.conversations import PROMPT, swapped_out
from tests.cache.token_storage import Cache


def test_a_conversation_comes_back_from_the_host_whole() -> None:
    cache = swapped_out()
    running = cache.chat([*PROMPT, 50, 51])
    assert (running.num_cached, running.num_swapped_in) == (0, 14)


def test_a_fork_from_the_host_needs_no_block_but_its_own() -> None:
    cache = swapped_out()
    fork = cache.admit("fork", [*PROMPT[:6], 99])
    assert fork is not None
    assert (fork.num_cached, fork.num_swapped_in) == (0, 6)
    transfers = cache.kv.take_transfers()
    assert len(transfers.swap_in) == 2
    assert not transfers.copies
    cache.storage.execute(transfers)
    cache.kv.transfers_done(transfers)
    cache.read_back()


def test_evicting_again_what_came_back_unchanged_moves_nothing() -> None:
    cache = swapped_out()
    cache.chat([*PROMPT[:12], 77])
    before = cache.kv.counters["swapped_out_blocks"]
    assert cache.admit("again", [*PROMPT[:12], 78])
    cache.step()
    cache.finish("again")
    for node in list(cache.kv._tree.retention.spare_copies):
        assert node.host_block_id is not None
    num_spare = len(cache.kv._tree.retention.spare_copies)
    assert num_spare >= 3
    cache.chat(list(range(200, 232)))
    moved = cache.kv.counters["swapped_out_blocks"] - before
    assert moved <= 8 - num_spare


def test_extending_a_tail_that_came_back_makes_its_host_copy_stale() -> None:
    cache = swapped_out()
    cache.chat([*PROMPT, 50])
    tail = search.find(cache.kv._tree, b"".join(i.to_bytes(4, "big") for i in [*PROMPT, 50]), "ann").fork  # type: ignore[arg-type]
    assert tail is not None
    assert tail.num_tokens == 3
    assert tail.host_block_id is None
    cache.chat(list(range(200, 230)))
    running = cache.chat([*PROMPT, 50, 51])
    assert running.num_swapped_in == 15


def test_a_full_host_pool_forgets_its_coldest_leaf() -> None:
    cache = swapped_out(num_host_blocks=4)
    cache.chat(list(range(200, 230)))
    assert cache.match(PROMPT) == 0
    _, host = cache.kv.counts()
    assert host.cached == host.total == 4
    # Of a path that is longer than the pool its beginning stays: without it the end would be worth nothing.
    assert cache.match(list(range(100, 130))) == 16


def test_the_page_daemon_copies_out_ahead_of_need_and_drops_nothing() -> None:
    cache = Cache(8, 8, low_watermark=2, high_watermark=4)
    cache.chat(PROMPT)
    assert not cache.kv.take_background(write_through=False)
    cache.chat(list(range(100, 114)))
    cache.step()
    assert cache.kv.counters["swapped_out_blocks"] == 4
    cache.step()
    assert cache.kv.counts()[0].free == 4
    assert cache.kv.counters["dropped_blocks"] == 0
    assert cache.match(PROMPT) == 13
    without_host = Cache(8, 0, low_watermark=2, high_watermark=4)
    without_host.chat(list(range(32)))
    assert not without_host.kv.take_background()
    assert without_host.kv.counts()[0].free == 0


def test_what_is_idle_is_written_through_and_then_leaves_at_no_cost() -> None:
    cache = Cache(8, 20)
    cache.chat(PROMPT)
    cache.step(write_through=True)
    assert cache.kv.counters["swapped_out_blocks"] == 4
    assert cache.kv.match(PROMPT, UserId("ann")).num_cached == 13
    assert not cache.kv.take_background(), "all of it is there already"
    running = cache.admit("large", list(range(100, 132)))
    assert running is not None
    assert cache.grow("large", 32)
    assert not cache.kv.take_transfers()
    cache.finish("large")
    assert cache.kv.match(PROMPT, UserId("ann")).num_swapped == 13


def test_writing_through_is_no_use_of_a_path_and_a_tail_that_grows_meanwhile_has_no_copy() -> None:
    cache = Cache(12, 20)
    cache.chat([7, 8, 9, 10])
    cache.chat(PROMPT)
    cache.launch(write_through=True)
    cache.execute()
    cache.admit("next", [*PROMPT, 50])
    cache.grow("next", len(PROMPT) + 1)
    cache.land()
    cache.step({"next": 1})
    assert not cache.copying
    tail = cache.kv._leases[RequestId("next")].tail
    assert tail is not None
    assert tail.num_tokens == len(PROMPT) % 4 + 1
    assert tail.host_block_id is None
    cache.finish("next")
    cache.chat(list(range(100, 132)))
    assert cache.kv.match([7, 8, 9, 10, 0], UserId("ann")).num_cached == 0, "the oldest goes first"
    assert cache.kv.match([*PROMPT, 50, 51], UserId("ann")).num_cached > 0


def test_who_needs_blocks_that_another_one_fetches_waits_for_the_same_copies() -> None:
    cache = swapped_out()
    cache.kv.release(list(range(100, 130)), UserId("ann"))
    first = cache.admit("first", [*PROMPT, 50], ahead=True)
    second = cache.admit("second", [*PROMPT, 60])
    fork = cache.admit("fork", [*PROMPT[:6], 70])
    assert first is not None
    assert second is not None
    assert fork is not None
    names = [RequestId(name) for name in ("first", "second", "fork")]
    assert not any(cache.kv.is_resident(name) for name in names)
    cache.launch()
    cache.land()
    assert not any(cache.kv.is_resident(name) for name in names)
    for copying in tuple(cache.copying):
        cache.end_copying(copying)
    assert all(cache.kv.is_resident(name) for name in names)
    cache.read_back()
