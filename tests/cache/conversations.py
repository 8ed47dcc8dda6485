"""A prompt, a shared prefix, and how a conversation comes to be on the host alone."""

from __future__ import annotations

from chatserve.types import UserId
from tests.cache.token_storage import Cache

SYSTEM = list(range(1000, 1010))
"""A shared prefix of two and a half blocks."""

PROMPT = list(range(14))


def swapped_out(num_host_blocks: int = 20) -> Cache:
    """A conversation of `PROMPT` on the host alone."""
    cache = Cache(8, num_host_blocks)
    cache.chat(PROMPT)
    cache.chat(list(range(100, 130)))
    found = cache.kv.match(PROMPT, UserId("ann"))
    assert (found.num_cached, found.num_swapped) == (0, 13)
    return cache
