"""What a request finds of what others have computed, each read back from a storage that holds token ids."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.cache.conversations import PROMPT, SYSTEM
from tests.cache.token_storage import Cache


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
