"""In which order idle leaves give up their blocks.

The policy is a pure key function from a node to (segment, order): lower segments go first, and within one the lower
order. The evictor only keeps the leaves that the tree tells it of sorted by that key: O(log n) an operation, never a
walk. It frees nothing itself.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeAlias

if TYPE_CHECKING:
    from chatserve.cache.node import Node

HINTED: Final = 0
"""Computed for a draft that may never be sent: goes first, and is not worth a place on the host."""
PREEMPTED: Final = 1
"""Blocks of a request that was put aside to make room: they go next."""
PROBATION: Final = 2
"""Used by one path so far."""
PROTECTED: Final = 3
"""Used by paths that part below it, such as a system prompt: goes last, as long as its kind fits half the pool."""

EvictionKey: TypeAlias = "Callable[[Node], tuple[int, int]]"


def segmented_lru(node: Node) -> tuple[int, int]:
    """Device blocks: by standing, then least recently used (segmented LRU, Karedla et al., 1994)."""
    return node.standing, node.last_used


def host_lru(node: Node) -> tuple[int, int]:
    """Host blocks: a preempted request is about to come back, so that here its blocks are like any other's."""
    return max(node.standing, PROBATION), node.last_used


class Evictor:
    """A set of nodes from which the one to evict next can be read.

    One heap a standing. A node that leaves, or whose key changes, stays behind in its heap as a stale entry, known by
    its serial number; stale entries are dropped when they reach the top, or all at once when they outnumber the live.
    """

    __slots__ = ("_heaps", "_key", "_num_stale", "_serial", "_serial_of")

    def __init__(self, key: EvictionKey) -> None:
        self._key = key
        self._heaps: tuple[list[tuple[int, int, Node]], ...] = ([], [], [], [])
        self._serial = 0
        self._serial_of: dict[Node, int] = {}
        self._num_stale = 0

    def __len__(self) -> int:
        return len(self._serial_of)

    def __contains__(self, node: Node) -> bool:
        return node in self._serial_of

    def add(self, node: Node) -> None:
        """Add a node, or move it to where its key now belongs."""
        self.discard(node)
        segment, order = self._key(node)
        self._serial += 1
        self._serial_of[node] = self._serial
        heapq.heappush(self._heaps[segment], (order, self._serial, node))

    def discard(self, node: Node) -> None:
        if self._serial_of.pop(node, None) is None:
            return
        self._num_stale += 1
        if self._num_stale > len(self._serial_of) + 64:
            self._drop_stale()

    def victim(self, *, protect: bool) -> Node | None:
        """The node to evict next; it stays in the set.

        Without `protect` (its kind has outgrown its share) the protected segment competes with probation by age.
        """
        hinted, preempted, probation, protected = (self._top(heap) for heap in self._heaps)
        first = hinted or preempted
        if first is not None:
            return first[2]
        if probation is None or protected is None:
            entry = probation or protected
            return None if entry is None else entry[2]
        return probation[2] if protect else min(probation, protected)[2]

    def check(self) -> None:
        live = {entry[1]: entry[2] for heap in self._heaps for entry in heap if self._is_live(entry)}
        assert live == {serial: node for node, serial in self._serial_of.items()}, "a live node is in no heap"
        num_entries = sum(len(heap) for heap in self._heaps)
        assert num_entries == len(self._serial_of) + self._num_stale, "stale entries were counted wrongly"

    def _is_live(self, entry: tuple[int, int, Node]) -> bool:
        return self._serial_of.get(entry[2]) == entry[1]

    def _top(self, heap: list[tuple[int, int, Node]]) -> tuple[int, int, Node] | None:
        while heap and not self._is_live(heap[0]):
            heapq.heappop(heap)
            self._num_stale -= 1
        return heap[0] if heap else None

    def _drop_stale(self) -> None:
        for heap in self._heaps:
            heap[:] = [entry for entry in heap if self._is_live(entry)]
            heapq.heapify(heap)
        self._num_stale = 0
