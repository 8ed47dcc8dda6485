"""Which members of a product of options are tried: all, or few that hold every value, pair or triple of values.

An option's values are given by name. Must not know what they mean.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    Axes = Mapping[str, Sequence[object]]
    Choice = dict[str, object]


def product(axes: Axes) -> Iterator[Choice]:
    """Every member."""
    for values in itertools.product(*axes.values()):
        yield dict(zip(axes, values, strict=True))


def values(axes: Axes) -> Iterator[Choice]:
    """Members that together hold every value of the first axis with every value of each other one."""
    return _tuples(axes, 2, next(iter(axes)))


def pairs(axes: Axes) -> Iterator[Choice]:
    """Members that together hold every pair of values of two axes: pairwise testing."""
    return _tuples(axes, 2)


def triples(axes: Axes) -> Iterator[Choice]:
    """Members that together hold every three values of three axes."""
    return _tuples(axes, 3)


def _tuples(axes: Axes, strength: int, with_axis: str | None = None) -> Iterator[Choice]:
    """Greedy, and the same each time: a member begins with a tuple that none has held, and takes of each other axis the
    value that adds most such tuples, equal ones in turn."""
    if len(axes) < strength:
        yield from product(axes)
        return
    missing = {
        frozenset(zip(names, held, strict=True)): None
        for names in itertools.combinations(axes, strength)
        if with_axis in {None, *names}
        for held in itertools.product(*(axes[name] for name in names))
    }
    turn = 0
    while missing:
        choice: Choice = dict(next(iter(missing)))
        for name, candidates in axes.items():
            if name not in choice:
                turn += 1
                turned = [candidates[(turn + index) % len(candidates)] for index in range(len(candidates))]
                choice[name] = max(turned, key=lambda value: _gain((name, value), choice, strength, missing))
        for held in itertools.combinations(choice.items(), strength):
            missing.pop(frozenset(held), None)
        yield {name: choice[name] for name in axes}


def _gain(
    item: tuple[str, object], choice: Choice, strength: int, missing: Mapping[frozenset[tuple[str, object]], None]
) -> int:
    return sum(frozenset((item, *others)) in missing for others in itertools.combinations(choice.items(), strength - 1))
