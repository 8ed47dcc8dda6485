"""Sharing, forking, eviction, swapping and ending, each read back from a storage that holds token ids."""

from __future__ import annotations

import gc
import random
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatserve.cache import search
from chatserve.types import RequestId, UserId
from tests.cache.token_storage import Cache, Running

SYSTEM = list(range(1000, 1010))
"""A shared prefix of two and a half blocks."""
PROMPT = list(range(14))


# --- matching and sharing ---------------------------------------------------------------------------------------------


@given(st.integers(1, 17), st.integers(0, 17), st.lists(st.integers(90, 99), max_size=6))
def test_a_match_reaches_the_last_common_token_short_of_the_last(stored: int, cut: int, new: list[int]) -> None:
    cache = Cache(20)
    cache.chat(PROMPT[:stored])
    wanted = PROMPT[: min(cut, stored)] + new
    if wanted:
        assert cache.match(wanted) == min(len(wanted) - 1, cut, stored, len(PROMPT))


def test_matching_changes_nothing_not_even_what_is_evicted_next() -> None:
    cache = Cache(8, 4)
    cache.chat(PROMPT[:8])
    cache.chat([50, 51, 52, 53, 54])
    tree = cache.kv._tree

    def state() -> list[object]:
        return [
            (node.key, node.last_used, node.standing, node.num_pins, node.block_id, node.host_block_id)
            for node in tree.walk()
        ]

    before, victim = state(), cache.kv._pager.victim()
    for token_ids in (PROMPT[:8], PROMPT[:6], [50, 51, 9], [77]):
        cache.match(token_ids)
        cache.match(token_ids, user="nobody seen before")
    assert state() == before
    assert cache.kv._pager.victim() is victim
    assert not cache.kv.take_transfers()


def test_ten_sessions_under_one_system_prompt_hold_it_once() -> None:
    cache = Cache(40)
    for index in range(10):
        running = cache.admit(f"r{index}", [*SYSTEM, 500 + index, 600], f"user {index}", len(SYSTEM))
        assert running is not None
        assert running.num_cached == (len(SYSTEM) if index else 0)
        assert cache.grow(f"r{index}", 12)
        cache.step({f"r{index}": 12 - running.num_computed})
        cache.step()
    device, _ = cache.kv.counts()
    # Two full blocks and the frozen end once, and a third block a session.
    assert device.total - device.free == 2 + 1 + 10


def test_the_end_of_a_shared_prefix_can_be_used_in_the_step_that_copies_it() -> None:
    cache = Cache(20)
    cache.admit("first", [*SYSTEM, *PROMPT], "ann", len(SYSTEM))
    assert cache.grow("first", 24)
    cache.step({"first": 24})
    for user in ("bob", "eve"):
        running = cache.admit(user, [*SYSTEM, 70], user, len(SYSTEM))
        assert running is not None
        assert running.num_cached == len(SYSTEM)
    cache.finish("first", keep=0)
    cache.launch()
    assert cache.under_way is not None
    assert len(cache.under_way.transfers.copies) == 3
    cache.land()
    cache.expect_true_blocks()
    cache.read_back()


def test_what_lies_past_the_shared_prefix_is_found_by_its_user_alone() -> None:
    cache = Cache(20)
    cache.chat([*SYSTEM, *PROMPT], user="ann", shared=len(SYSTEM))
    assert cache.match([*SYSTEM, *PROMPT], user="ann") == len(SYSTEM) + len(PROMPT) - 1
    assert cache.match([*SYSTEM, *PROMPT], user="bob") == len(SYSTEM)
    assert cache.match(PROMPT, user="ann") == 0


def test_a_prompt_that_nobody_declared_shared_is_private() -> None:
    cache = Cache(20)
    cache.chat(PROMPT, user="ann")
    assert cache.match(PROMPT, user="bob") == 0


def test_an_idle_tail_is_extended_where_it_stands() -> None:
    cache = Cache(8)
    first = cache.chat(PROMPT[:6])
    second = cache.chat(PROMPT[:8])
    assert second.num_cached == 6
    assert second.table == first.table
    assert cache.kv.counters["copies"] == 0


def test_a_tail_with_a_writer_is_copied() -> None:
    cache = Cache(8)
    cache.chat(PROMPT[:6])
    one = cache.admit("one", [*PROMPT[:6], 70, 71])
    two = cache.admit("two", [*PROMPT[:6], 80, 81])
    assert one is not None
    assert two is not None
    assert one.num_cached == two.num_cached == 6
    assert one.table[0] == two.table[0]
    assert one.table[1] != two.table[1]
    assert cache.grow("one", 8)
    assert cache.grow("two", 8)
    cache.step({"one": 2, "two": 2})
    assert cache.kv.counters["copies"] == 1


def test_a_fork_in_a_running_requests_tail_sees_committed_tokens_only() -> None:
    cache = Cache(8)
    cache.admit("one", PROMPT[:7])
    assert cache.grow("one", 7)
    cache.step({"one": 6})
    cache.launch({"one": 1})
    assert cache.match(PROMPT) == 6
    two = cache.admit("two", [*PROMPT[:6], 99])
    assert two is not None
    assert two.num_cached == 6
    cache.land()
    assert cache.match(PROMPT) == 7
    cache.step()


def test_a_fork_in_mid_block_copies_one_block_and_both_sides_go_on() -> None:
    cache = Cache(16)
    cache.chat(PROMPT[:12])
    fork = cache.admit("fork", [*PROMPT[:10], 90, 91, 92])
    assert fork is not None
    assert fork.num_cached == 10
    whole = cache.admit("whole", [*PROMPT[:12], 80])
    assert whole is not None
    assert whole.num_cached == 12
    for name in ("fork", "whole"):
        assert cache.grow(name, 13)
    cache.step({"fork": 3, "whole": 1})
    assert cache.kv.counters["copies"] == 1


def test_requests_that_compute_the_same_at_once_share_it_without_moving_their_tables() -> None:
    cache = Cache(16)
    for name in ("one", "two"):
        cache.admit(name, PROMPT[:9])
        assert cache.grow(name, 9)
    tables = [list(cache.running[name].table) for name in ("one", "two")]
    for num_tokens in (3, 3, 3):
        cache.step({"one": num_tokens, "two": num_tokens})
    assert [cache.running[name].table for name in ("one", "two")] == tables
    device, _ = cache.kv.counts()
    assert (device.cached, device.private) == (3, 3)
    cache.finish("two")
    device, _ = cache.kv.counts()
    assert (device.cached, device.private) == (3, 0)
    cache.finish("one")
    cache.expect_idle()
    assert cache.match([*PROMPT[:9], 5]) == 9


# --- room -------------------------------------------------------------------------------------------------------------


def test_admission_and_growth_take_all_they_need_or_nothing() -> None:
    cache = Cache(8)
    cache.admit("one", PROMPT)
    assert cache.grow("one", 20)
    cache.chat(list(range(50, 58)))
    before = cache.kv.block_map()
    assert not cache.grow("one", 36)
    assert cache.kv.block_map() == before
    assert cache.grow("one", 32)
    assert cache.admit("two", [70]) is not None
    assert not cache.grow("two", 1)
    assert len(cache.running["one"].table) == 8


def test_a_request_that_fills_the_pool_can_be_regenerated() -> None:
    cache = Cache(8)
    token_ids = list(range(32))
    cache.chat(token_ids)
    # The block to copy from and the copy do not fit together: the last block is computed again instead.
    running = cache.chat(token_ids)
    assert running.num_matched == 28


@pytest.mark.parametrize("num_host_blocks", [0, 3, 100])
def test_with_any_host_pool_what_is_read_is_right_and_all_blocks_come_back(num_host_blocks: int) -> None:
    """CASES: conversations resident, swapped, forked and cold, under a pool of a few blocks."""
    cache = Cache(8, num_host_blocks)
    rng = random.Random(3)
    conversations = [[index] for index in range(6)]
    for _ in range(120):
        conversation = rng.choice(conversations)
        if rng.random() < 0.2 or len(conversation) > 24:
            del conversation[rng.randint(1, 20) :]
        conversation += [rng.randrange(3) for _ in range(rng.randint(1, 6))]
        running = cache.chat(conversation, chunk=5)
        assert running.num_cached + running.num_swapped_in < len(conversation)
    cache.expect_idle()
    swapped_in = cache.kv.counters["swapped_in_blocks"]
    assert (swapped_in > 0) == (num_host_blocks > 0)


def test_only_idle_leaves_are_evicted() -> None:
    cache = Cache(8)
    cache.admit("pinned", PROMPT[:8])
    assert cache.grow("pinned", 8)
    cache.step({"pinned": 8})
    for index in range(20):
        cache.chat([100 + index] * 12)
    assert cache.match([*PROMPT[:8], 1]) == 8
    cache.read_back()


@pytest.mark.parametrize("num_host_blocks", [0, 8])
def test_a_burst_of_one_off_chats_leaves_the_system_prompt(num_host_blocks: int) -> None:
    """1,000 distinct chats through a small pool: their system prompt is computed once."""
    cache = Cache(16, num_host_blocks)
    system = list(range(1000, 1012))
    for index in range(3):
        cache.chat([*system, index, 1, 2])
    for index in range(1000):
        cache.chat([5000 + index, 1, 2, 3, 4, 5])
    assert cache.kv.match([*system, 9], UserId("ann")).num_cached == len(system)


def test_chats_that_follow_one_another_under_a_system_prompt_compute_it_once() -> None:
    cache = Cache(8)
    system = list(range(1000, 1010))
    for index in range(1000):
        running = cache.chat([*system, 5000 + index, 1, 2, 3], user=f"user {index % 7}", shared=len(system))
        assert running.num_matched == (len(system) if index else 0)


def test_what_is_shared_may_not_take_more_than_half_the_pool() -> None:
    cache = Cache(8)
    for prompt in range(6):
        for tail in range(2):
            cache.chat([prompt] * 8 + [100 + tail])
    assert cache.kv._tree.num_protected <= 8 // 2 + 2
    recent = cache.chat([7, 8, 9, 10, 11, 12])
    assert cache.match([*recent.token_ids, 1]) == 6


# --- swapping ---------------------------------------------------------------------------------------------------------


def swapped_out(num_host_blocks: int = 20) -> Cache:
    """A conversation of `PROMPT` on the host alone."""
    cache = Cache(8, num_host_blocks)
    cache.chat(PROMPT)
    cache.chat(list(range(100, 130)))
    found = cache.kv.match(PROMPT, UserId("ann"))
    assert (found.num_cached, found.num_swapped) == (0, 13)
    return cache


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


def draft(cache: Cache, token_ids: list[int], num_settled: int, user: str = "ann") -> Running:
    """A hint from its admission to its end, alone."""
    running = cache.admit("hint", [*token_ids, 0], user, is_hint=True)
    assert running is not None
    assert cache.grow("hint", len(token_ids))
    cache.step({"hint": len(token_ids) - running.num_computed})
    cache.finish("hint", num_settled)
    cache.step()
    return running


def test_a_draft_goes_before_everything_else_and_is_not_worth_a_place_on_the_host() -> None:
    cache = Cache(8, 8)
    cache.chat(PROMPT)
    drafted = [*PROMPT, *range(40, 48)]
    draft(cache, drafted, len(PROMPT))
    assert cache.match([*drafted, 1]) == len(drafted)
    cache.chat(list(range(100, 116)))
    # The conversation's own end, which the draft goes on from, was copied and is what it was.
    assert cache.match([*drafted, 1]) == len(PROMPT) == cache.kv.match([*drafted, 1], UserId("ann")).num_cached
    assert cache.kv.counts()[1].cached == 0


def test_what_was_drafted_and_sent_is_a_path_like_any_other() -> None:
    cache = Cache(8, 8)
    cache.chat(PROMPT)
    drafted = [*PROMPT, *range(40, 48)]
    draft(cache, drafted, len(PROMPT))
    sent = cache.chat([*drafted, 50])
    assert sent.num_matched == len(drafted)
    cache.chat(list(range(100, 120)))
    assert cache.match([*drafted, 50, 1]) == len(drafted) + 1


def test_a_draft_that_goes_on_extends_what_it_has() -> None:
    cache = Cache(16)
    cache.chat(PROMPT)
    for end in range(41, 50):
        draft(cache, [*PROMPT, *range(40, end)], len(PROMPT))
    assert cache.kv.counters["copies"] == 1
    assert cache.kv.counts()[0].cached == 4 + 3


def test_drafting_protects_nothing() -> None:
    cache = Cache(16)
    cache.chat(PROMPT)
    for n in range(3):
        draft(cache, [*PROMPT, 60 + n, 70], len(PROMPT))
    cache.chat([*PROMPT, 50])
    assert cache.kv._tree.num_protected == 0


def test_a_draft_that_is_given_up_is_gone_but_for_what_is_kept() -> None:
    cache = Cache(16)
    cache.chat(PROMPT)
    drafted = [*PROMPT, *range(40, 52)]
    draft(cache, drafted, len(PROMPT))
    cache.kv.release_hint(drafted, UserId("bob"))
    assert cache.match([*drafted, 1]) == len(drafted)
    cache.kv.release_hint(drafted, UserId("ann"), len(PROMPT) + 4)
    assert cache.match([*drafted, 1]) == 20
    cache.kv.release_hint(drafted, UserId("ann"))
    assert cache.match([*drafted, 1]) == len(PROMPT)
    assert cache.match([*PROMPT, 1]) == len(PROMPT)


def test_a_draft_is_its_users_alone() -> None:
    cache = Cache(16)
    draft(cache, list(range(40, 60)), 0)
    assert cache.match([*range(40, 60), 1], "bob") == 0
    assert cache.match([*range(40, 60), 1]) == 20


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


# --- ending -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["planned", "taken", "executed"])
@pytest.mark.parametrize("how", ["swap in", "fork from host", "fork", "swap out"])
def test_a_cancel_during_a_copy_leaks_nothing(how: str, when: str) -> None:
    cache = swapped_out()
    token_ids = {
        "swap in": [*PROMPT, 50],
        "fork from host": [*PROMPT[:6], 50],
        "fork": [*range(100, 110), 50],
        "swap out": list(range(400, 420)),
    }[how]
    running = cache.admit("gone", token_ids)
    assert running is not None
    assert cache.grow("gone", len(token_ids))
    if when == "planned":
        cache.finish("gone")
        cache.launch()
    else:
        cache.launch({"gone": len(token_ids) - running.num_computed})
        if when == "executed":
            cache.execute()
        cache.finish("gone")
        # While the copy is under way another request takes what it can: none of it may be what is being copied.
        cache.admit("next", list(range(500, 508)))
        cache.grow("next", 8)
    cache.land()
    if "next" in cache.running:
        cache.step({"next": 8})
        cache.finish("next")
    cache.step()
    cache.expect_true_blocks()
    cache.expect_idle()


def test_a_turn_cancelled_while_it_extends_a_shared_tail_leaves_its_siblings_alone() -> None:
    cache = Cache(16)
    cache.chat(PROMPT[:10])
    cache.admit("gone", [*PROMPT[:10], 70, 71])
    cache.admit("stays", [*PROMPT[:10], 80, 81, 82])
    assert cache.grow("gone", 12)
    assert cache.grow("stays", 13)
    cache.step({"gone": 1, "stays": 1})
    cache.launch({"gone": 1, "stays": 1})
    cache.finish("gone", keep=10)
    cache.land()
    cache.step({"stays": 1})
    cache.finish("stays")
    assert cache.match([*PROMPT[:10], 80, 81, 82, 83]) == 13
    assert cache.match([*PROMPT[:10], 70, 71]) == 10
    cache.chat([*PROMPT[:10], 90, 91, 92])
    cache.expect_idle()


@pytest.mark.parametrize("keep", range(15))
def test_a_path_is_cut_to_what_is_kept(keep: int) -> None:
    cache = Cache(8)
    cache.admit("one", PROMPT)
    assert cache.grow("one", 20)
    cache.step({"one": 14})
    cache.finish("one", keep)
    cache.expect_idle()
    kept_blocks = -(-keep // 4)
    assert cache.kv.counts()[0].cached == kept_blocks
    # A sealed block that the cut runs through stays whole.
    sealed_end = kept_blocks * 4 if kept_blocks <= 3 else keep
    assert cache.match([*PROMPT, 99]) == sealed_end


def test_a_cut_never_takes_what_another_path_uses() -> None:
    cache = Cache(8)
    cache.chat(PROMPT[:8])
    cache.admit("one", [*PROMPT[:8], 70])
    cache.finish("one", 0)
    assert cache.match([*PROMPT[:8], 1]) == 8


def test_a_preempted_requests_own_blocks_go_first_and_come_back() -> None:
    cache = Cache(8, 8)
    cache.chat(list(range(50, 58)))
    cache.admit("one", PROMPT[:12])
    assert cache.grow("one", 12)
    cache.step({"one": 12})
    cache.preempt("one")
    cache.chat(list(range(70, 86)))
    assert cache.kv.match(list(range(50, 59)), UserId("ann")).num_cached == 8
    found = cache.kv.match([*PROMPT[:12], 5], UserId("ann"))
    assert (found.num_cached, found.num_swapped) == (8, 4) or found.num_swapped > 0
    assert cache.chat([*PROMPT[:12], 5]).num_matched == 12
    assert cache.kv.counters["preemptions"] == 1


def test_a_deleted_sessions_own_blocks_are_freed_and_shared_ones_are_not() -> None:
    cache = Cache(20)
    shared = len(SYSTEM)
    cache.chat([*SYSTEM, *PROMPT], shared=shared)
    cache.chat([*SYSTEM, *PROMPT[:8], 90, 91, 92], shared=shared)
    cache.kv.release([*SYSTEM, *PROMPT, 99], UserId("ann"))
    assert cache.match([*SYSTEM, *PROMPT]) == shared + 8
    cache.kv.release([*SYSTEM, *PROMPT[:8], 90, 91, 92], UserId("bob"))
    assert cache.match([*SYSTEM, *PROMPT[:8], 90, 91, 92, 93]) == shared + 11
    cache.kv.release([*SYSTEM, *PROMPT[:8], 90, 91, 92], UserId("ann"))
    assert cache.match([*SYSTEM, *PROMPT]) == shared
    assert cache.kv.counts()[0].cached == 3
    cache.expect_idle()


@pytest.mark.parametrize("num_kept", [0, 1, 6, 8, 14])
def test_a_deleted_end_takes_nothing_from_the_conversation_that_it_hung_on(num_kept: int) -> None:
    cache = Cache(20)
    cache.chat(PROMPT)
    cache.kv.release(PROMPT, UserId("ann"), num_kept)
    cache.kv.check()
    assert cache.match([*PROMPT[:num_kept], 99]) == num_kept
    assert cache.kv.counts()[0].cached == -(-num_kept // 4)


def test_users_of_whom_nothing_is_cached_cost_nothing() -> None:
    cache = Cache(8)
    for index in range(50):
        cache.chat(PROMPT[:10], user=f"user {index}")
    cached = {node.tag for node in cache.kv._tree.walk()}
    assert len(cache.kv._tree.tags) == len(cached) < 8
    assert cache.match([*PROMPT[:10], 1], user="user 49") == 10
    assert cache.match([*PROMPT[:10], 1], user="user 0") == 0


def test_waste_is_the_last_block_of_each_sequence() -> None:
    cache = Cache(20)
    cache.admit("one", PROMPT[:6])
    assert cache.grow("one", 6)
    assert cache.kv.wasted_slots() == 8
    cache.step({"one": 5})
    assert cache.kv.wasted_slots() == 3
    cache.finish("one")
    cache.chat([90] * 9)
    assert cache.kv.wasted_slots() == 3 + 3


# --- cost -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_chats", "length"), [(4, 1600), (400, 20)])
def test_an_idle_block_costs_less_than_a_kilobyte(num_chats: int, length: int) -> None:
    cache = Cache(1000, block_size=16)
    kv, rng = cache.kv, random.Random(5)
    gc.collect()
    tracemalloc.start()
    try:
        for index in range(num_chats):
            name, token_ids = f"r{index}", [rng.randrange(50_000) for _ in range(length)]
            kv.admit(name, token_ids, UserId("ann"), 0)  # type: ignore[arg-type]
            kv.grow(name, length)  # type: ignore[arg-type]
            kv.commit(name, token_ids)  # type: ignore[arg-type]
            kv.finish(name)  # type: ignore[arg-type]
        del token_ids
        gc.collect()
        num_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert num_bytes / kv.counts()[0].cached < 1024
