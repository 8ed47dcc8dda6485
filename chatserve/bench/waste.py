"""How much KV memory is wasted, and how many conversations fit, against reserving memory ahead.

Pure bookkeeping: the KV manager of the engine on a pool without storage. Lengths are log-normal with a mean of 1,000
tokens (sigma 1), cut at the model's maximum. Reservations of the maximum length, of the next power of two and of the
exact length are those of "Efficient Memory Management for Large Language Model Serving with PagedAttention" (2023).
"""

from __future__ import annotations

import argparse
import math
import random
from typing import TYPE_CHECKING, Any

from chatserve.cache.kv_manager import KVManager
from chatserve.types import RequestId, UserId

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

MEAN_TOKENS = 1_000
SIGMA = 1.0
USER = UserId("bench")


def lengths(rng: random.Random, max_tokens: int) -> Iterator[int]:
    mu = math.log(MEAN_TOKENS) - SIGMA**2 / 2
    while True:
        yield max(1, min(max_tokens, round(rng.lognormvariate(mu, SIGMA))))


def fill(num_blocks: int, block_size: int, max_tokens: int, shared: int, seed: int) -> tuple[int, float]:
    """Admit whole conversations until one does not fit; how many ran at once, and the share of slots unused."""
    kv = KVManager(num_blocks=num_blocks, num_host_blocks=0, block_size=block_size)
    rng = random.Random(seed)
    system = [rng.randrange(1, 50_000) for _ in range(shared)]
    for running, length in enumerate(lengths(rng, max_tokens)):
        own = [rng.randrange(1, 50_000) for _ in range(length)]
        tokens = system + own
        request = RequestId(str(running))
        admission = kv.admit(request, tokens, USER, shared)
        if admission is None or kv.grow(request, len(tokens)) is None:
            device, _ = kv.counts()
            used = (device.total - device.free) * block_size
            return running, kv.wasted_slots() / used
        kv.transfers_done(kv.take_transfers())
        kv.commit(request, tokens[admission.num_cached + admission.num_swapped_in :])
    raise AssertionError


def reserved(num_tokens: int, max_tokens: int, shared: int, size: Callable[[int], int], seed: int) -> int:
    """How many conversations fit where each reserves `size(length)` tokens for itself alone."""
    rng = random.Random(seed)
    for _ in range(shared):
        rng.randrange(1, 50_000)
    room = num_tokens
    for running, length in enumerate(lengths(rng, max_tokens)):
        for _ in range(length):
            rng.randrange(1, 50_000)
        room -= size(min(length + shared, max_tokens))
        if room < 0:
            return running
    raise AssertionError


def waste_at(length: int, num_sequences: int, block_size: int) -> float:
    """Share of allocated slots that hold nothing, for sequences of about `length` tokens."""
    kv = KVManager(num_blocks=num_sequences * (2 * length // block_size + 2), num_host_blocks=0, block_size=block_size)
    rng = random.Random(length)
    for n in range(num_sequences):
        tokens = [rng.randrange(1, 50_000) for _ in range(length + rng.randrange(block_size))]
        request = RequestId(str(n))
        admission = kv.admit(request, tokens, USER, 0)
        assert admission is not None
        assert kv.grow(request, len(tokens)) is not None
        kv.commit(request, tokens)
    device, _ = kv.counts()
    return kv.wasted_slots() / ((device.total - device.free) * block_size)


def waste_bound(length: int, block_size: int) -> float:
    """The most that may be unused: all but one slot of each sequence's last block."""
    return (block_size - 1) / (length + block_size - 1)


def run(num_blocks: int = 8192, block_size: int = 16, max_tokens: int = 8192, seed: int = 0) -> dict[str, Any]:
    """All figures as one mapping."""
    num_tokens = num_blocks * block_size
    results: dict[str, Any] = {"kv_tokens": num_tokens, "max_tokens": max_tokens, "block_size": block_size}
    for name, shared in (("alone", 0), ("shared_400", 400)):
        paged, unused = fill(num_blocks, block_size, max_tokens, shared, seed)
        results[name] = {
            "paged": paged,
            "unused": unused,
            "reserve_max": reserved(num_tokens, max_tokens, shared, lambda _: max_tokens, seed),
            "reserve_pow2": reserved(num_tokens, max_tokens, shared, lambda n: 1 << (n - 1).bit_length(), seed),
            "reserve_exact": reserved(num_tokens, max_tokens, shared, lambda n: n, seed),
        }
    results["waste"] = {length: waste_at(length, 64, block_size) for length in (100, 400, 1_000, 4_000)}
    return results


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="chatserve bench waste", description=__doc__)
    parser.add_argument("--blocks", type=int, default=8192)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=8192, help="the model's maximum length")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    results = run(options.blocks, options.block_size, options.max_tokens, options.seed)
    print(f"{results['kv_tokens']:,} tokens of KV, lengths log-normal with mean {MEAN_TOKENS:,}")
    for name, label in (("alone", "sharing off"), ("shared_400", "a shared system prompt of 400 tokens")):
        row = results[name]
        print(
            f"  {label}: {row['paged']} conversations at once ({row['unused']:.1%} of slots unused); reserving "
            f"the maximum {row['reserve_max']} ({row['paged'] / row['reserve_max']:.1f} times fewer), the next power "
            f"of two {row['reserve_pow2']}, the exact length {row['reserve_exact']}"
        )
    for length, waste in results["waste"].items():
        print(f"  unused slots at {length} tokens a sequence: {waste:.2%}")
