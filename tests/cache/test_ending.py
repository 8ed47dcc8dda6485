"""How requests and conversations end: what is kept is found again, and nothing leaks."""

from __future__ import annotations

import pytest

from chatserve.types import UserId
from tests.cache.conversations import PROMPT, SYSTEM, swapped_out
from tests.cache.token_storage import Cache


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
