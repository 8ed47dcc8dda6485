"""What was computed for a draft: worth less than all else until it is sent, and gone when it is not."""

from __future__ import annotations

from chatserve.types import UserId
from tests.cache.conversations import PROMPT
from tests.cache.token_storage import Cache, Running


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
