"""Captured CUDA graphs that share one memory pool, and the shapes of step that are worth one.

All replays are on one stream, one after the other, so that what one graph leaves in the pool is dead when the next one
runs; whatever outlives a replay lies outside. Must not know what is captured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

MOST_TOKENS = 512
"""Of a step that is replayed; longer ones keep the device busy for longer than their launches take."""
_DECODE_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 128, 160, 192, 224, 256)
_MIXED_ROWS = (1, 16, 64, 128, 256)
_PROMPT_TOKENS = (16, 32, 48, 80, 128, 160, 192, 256, 384, 512)
"""A little above round numbers of new tokens: the last token of an answer is computed with the turn after it."""
_MOST_PROMPTS = 64


class GraphShape(NamedTuple):
    """So many rows of one token, and tokens of so many other rows."""

    max_rows: int
    max_tokens: int = 0
    max_prompts: int = 0

    @property
    def num_tokens(self) -> int:
        return self.max_rows + self.max_tokens


def row_classes(max_rows: int) -> list[int]:
    """Numbers of rows that are padded to, the largest last."""
    classes = [rows for rows in _DECODE_ROWS if rows < max_rows]
    beyond = range(_DECODE_ROWS[-1] * 2, max_rows, _DECODE_ROWS[-1])
    return [*classes, *beyond, max_rows]


def step_shapes(max_rows: int, max_tokens: int) -> list[GraphShape]:
    """Shapes for up to `max_rows` rows and `max_tokens` in a step, the largest first: it sets the pool's size."""
    decode = [GraphShape(rows) for rows in row_classes(max_rows)]
    mixed = [
        GraphShape(rows, tokens, min(_MOST_PROMPTS, max_rows, tokens // 2))
        for rows in sorted({min(rows, max_rows) for rows in _MIXED_ROWS})
        for tokens in _PROMPT_TOKENS
        if tokens + (rows if rows > 1 else 0) <= min(MOST_TOKENS, max_tokens)
    ]
    return sorted(decode + mixed, key=lambda shape: -shape.num_tokens)


class Replays(Protocol):
    """Launches under a key, to be made again and again."""

    def capture(self, key: Hashable, launch: Callable[[], None]) -> None:
        """`launch` puts work on the current stream; it reads and writes what lies at fixed addresses."""
        ...

    def replay(self, key: Hashable) -> None: ...


class CapturedGraphs:
    """One CUDA graph a key."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}

    def capture(self, key: Hashable, launch: Callable[[], None]) -> None:
        launch()  # compiles kernels and makes workspaces, neither of which belongs into a graph
        graph = torch.cuda.CUDAGraph()
        # Another thread may be pinning memory, which this one's capture must not mind.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"
        ):
            launch()
        self._graphs[key] = graph

    def replay(self, key: Hashable) -> None:
        self._graphs[key].replay()


class PlainLaunches:
    """The same launches, made anew each time: for devices without graphs, and to look for faults."""

    def __init__(self) -> None:
        self._launches: dict[Hashable, Callable[[], None]] = {}

    def capture(self, key: Hashable, launch: Callable[[], None]) -> None:
        launch()
        self._launches[key] = launch

    def replay(self, key: Hashable) -> None:
        self._launches[key]()
