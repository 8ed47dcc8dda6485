"""Sequences that the engine remembers, so that a next turn sends only what is new.

A rope: a path holds a reference to the path it continues, how much of it it keeps, and its own new ids. Branches of
one conversation share their past. Bounded in tokens and in number; the least recently used handle is forgotten first,
and a client that names it is asked for all ids again. Owns handles and ids; knows nothing of KV, which comes and goes
by itself.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from chatserve.types import UserId

MAX_TOKENS: Final = 32_000_000
"""Four bytes each."""
MAX_PATHS: Final = 250_000
"""Some four hundred bytes each, whatever its length: many short paths weigh more than their tokens."""


class UnknownPathError(Exception):
    """The handle is of another process, was forgotten, is another user's, or is shorter than asked."""


class _Path:
    """`parent`'s first `num_inherited` tokens, then `own`. `num_users` counts the table's entry and the children."""

    __slots__ = ("num_inherited", "num_users", "own", "parent", "user")

    def __init__(self, user: UserId, parent: _Path | None, num_inherited: int, own: array[int]) -> None:
        self.user = user
        self.parent = parent
        self.num_inherited = num_inherited
        self.own = own
        self.num_users = 1

    @property
    def num_tokens(self) -> int:
        return self.num_inherited + len(self.own)


class PathTable:
    """Handles of paths, least recently used first."""

    def __init__(self, max_tokens: int = MAX_TOKENS, max_paths: int = MAX_PATHS) -> None:
        self._max_tokens = max_tokens
        self._max_paths = max_paths
        self._paths: OrderedDict[int, _Path] = OrderedDict()
        self._next_handle = 1
        self._num_tokens = 0
        """Ids held by paths in the table and by those that they continue."""
        self._num_paths = 0
        """How many paths these are."""

    def __len__(self) -> int:
        return len(self._paths)

    def __contains__(self, handle: int) -> bool:
        return handle in self._paths

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    def add(
        self,
        user: UserId,
        token_ids: Sequence[int],
        *,
        base: int | None = None,
        num_inherited: int = 0,
    ) -> int:
        """Remember `token_ids` and return their handle.

        If `base` is still known, `token_ids` must begin with its first `num_inherited` tokens, and only the rest is
        stored. The newest path is kept even where it is larger than the bounds alone.
        """
        parent = None if base is None else self._paths.get(base)
        num_inherited = 0 if parent is None else num_inherited
        while parent is not None and num_inherited <= parent.num_inherited:  # continue the path that holds the ids
            parent = parent.parent
        path = _Path(user, parent, num_inherited, array("I", token_ids[num_inherited:]))
        if parent is not None:
            parent.num_users += 1
        self._num_tokens += len(path.own)
        self._num_paths += 1
        handle = self._next_handle
        self._next_handle += 1
        self._paths[handle] = path
        while self._is_over_bounds and len(self._paths) > 1:
            self.forget(next(iter(self._paths)))
        return handle

    def read(self, user: UserId, handle: int, num_tokens: int) -> list[int]:
        """The first `num_tokens` ids under `handle`, as a list that the caller may keep.

        Raises:
            UnknownPathError: see there.
        """
        path = self._find(user, handle, num_tokens)
        parts: list[array[int]] = []
        node: _Path | None = path
        left = num_tokens
        while node is not None:
            parts.append(node.own[: max(0, left - node.num_inherited)])
            left = min(left, node.num_inherited)
            node = node.parent
        token_ids: list[int] = []
        for part in reversed(parts):
            token_ids.extend(part)
        assert len(token_ids) == num_tokens
        return token_ids

    def forget(self, handle: int) -> None:
        """Drop a handle, if it is known. Its ids stay as long as another path continues them."""
        node: _Path | None = self._paths.pop(handle, None)
        while node is not None:
            node.num_users -= 1
            if node.num_users:
                return
            self._num_tokens -= len(node.own)
            self._num_paths -= 1
            node = node.parent

    @property
    def _is_over_bounds(self) -> bool:
        return self._num_tokens > self._max_tokens or self._num_paths > self._max_paths

    def _find(self, user: UserId, handle: int, num_tokens: int) -> _Path:
        path = self._paths.get(handle)
        if path is None or path.user != user or not 0 <= num_tokens <= path.num_tokens:
            raise UnknownPathError
        self._paths.move_to_end(handle)
        return path

    def check(self) -> None:
        """Assert that what is counted is what is held, and that only the newest may pass the bound."""
        live: dict[int, _Path] = {}
        users: dict[int, int] = {}
        for path in self._paths.values():
            users[id(path)] = users.get(id(path), 0) + 1
            node: _Path | None = path
            while node is not None and id(node) not in live:
                live[id(node)] = node
                node = node.parent
        for node in live.values():
            if node.parent is not None:
                users[id(node.parent)] = users.get(id(node.parent), 0) + 1
                assert node.num_inherited <= node.parent.num_tokens
            else:
                assert node.num_inherited == 0
        assert sum(len(node.own) for node in live.values()) == self._num_tokens
        assert len(live) == self._num_paths
        assert all(users[key] == node.num_users for key, node in live.items())
        assert not self._is_over_bounds or len(self._paths) <= 1
