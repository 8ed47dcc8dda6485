"""Paging's promises about memory, by the same figures that `chatserve bench waste` prints."""

from __future__ import annotations

from chatserve.bench import waste


def test_paging_holds_three_times_the_conversations_of_reserving_the_maximum() -> None:
    results = waste.run(num_blocks=4096, max_tokens=8192)
    for name in ("alone", "shared_400"):
        row = results[name]
        assert row["paged"] >= 3 * row["reserve_max"]
        assert row["paged"] >= row["reserve_pow2"]
    assert results["alone"]["paged"] >= 0.95 * results["alone"]["reserve_exact"]
    assert results["shared_400"]["paged"] > results["shared_400"]["reserve_exact"], "a shared prompt is held once"


def test_under_four_in_a_hundred_slots_are_unused_from_400_tokens_on() -> None:
    results = waste.run(num_blocks=4096, max_tokens=8192)
    for length, share in results["waste"].items():
        assert 0 < share <= waste.waste_bound(length, results["block_size"])
        if length >= 400:
            assert share < 0.04
