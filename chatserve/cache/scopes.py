"""The four bytes that stand for a scope in the keys of nodes.

A tag belongs to its scope for as long as a node or a lease uses it, and then to whoever comes next: what is kept grows
with the users that have something cached, not with all that ever came. Tags are numbers handed out, not hashes, so two
users never have the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from chatserve.cache.siblings import TAG_BYTES
from chatserve.types import PUBLIC, Scope

PUBLIC_TAG: Final = bytes(TAG_BYTES)


class ScopeTags:
    """Counts the uses of every tag but the public one, which is always there."""

    __slots__ = ("_num_made", "_num_uses", "_scope_of", "_spare", "_tag_of")

    def __init__(self) -> None:
        self._tag_of: dict[Scope, bytes] = {}
        self._scope_of: dict[bytes, Scope] = {}
        self._num_uses: dict[bytes, int] = {}
        self._spare: list[bytes] = []
        self._num_made = 0

    def __len__(self) -> int:
        return len(self._tag_of)

    def find(self, scope: Scope) -> bytes | None:
        """The scope's tag, if anything uses it."""
        return self._tag_of.get(scope)

    def scope_of(self, tag: bytes) -> Scope:
        """The scope of a tag that is in use."""
        return PUBLIC if tag == PUBLIC_TAG else self._scope_of[tag]

    def acquire(self, scope: Scope) -> bytes:
        """The scope's tag, with one use more."""
        assert scope != PUBLIC, "the public tag is nobody's"
        tag = self._tag_of.get(scope)
        if tag is None:
            tag = self._spare.pop() if self._spare else self._make()
            self._tag_of[scope] = tag
            self._scope_of[tag] = scope
            self._num_uses[tag] = 0
        self.hold(tag)
        return tag

    def hold(self, tag: bytes) -> None:
        """One use more of a tag that is in use."""
        if tag != PUBLIC_TAG:
            self._num_uses[tag] += 1

    def release(self, tag: bytes) -> None:
        """One use less."""
        if tag == PUBLIC_TAG:
            return
        self._num_uses[tag] -= 1
        if not self._num_uses[tag]:
            del self._num_uses[tag]
            del self._tag_of[self._scope_of.pop(tag)]
            self._spare.append(tag)

    def check(self, uses: Iterable[bytes]) -> None:
        """Assert that the tags counted are those of `uses`, each as often as it stands there."""
        counted: dict[bytes, int] = {}
        for tag in uses:
            if tag != PUBLIC_TAG:
                counted[tag] = counted.get(tag, 0) + 1
        assert counted == self._num_uses, "a scope's tag is lost, or kept for nobody"
        assert {tag: scope for scope, tag in self._tag_of.items()} == self._scope_of
        assert self._scope_of.keys() == self._num_uses.keys()
        assert len(self._spare) + len(self._tag_of) == self._num_made

    def _make(self) -> bytes:
        self._num_made += 1
        return self._num_made.to_bytes(TAG_BYTES, "big")
