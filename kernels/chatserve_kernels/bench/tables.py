"""The registry of what is measured, and what a measured row says.

A *table* is a function from a `Bench` to rows, registered under a name by `@table`; `__main__` imports the modules that
register some. A row holds what was measured; rates, shares of the ceilings and ratios follow from that.
"""

from __future__ import annotations

import gc
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING

import torch
import triton

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Measure = Callable[["Bench"], Iterator["Row"]]

DTYPE = torch.bfloat16


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the machine reaches at its best, measured in the same run."""

    copy_bytes_per_s: float
    """Read and written."""
    matrix_flops_per_s: float
    """bfloat16."""

    @classmethod
    def measured(cls) -> Ceilings:
        ceilings = cls(_copy_bytes_per_s(), _matrix_flops_per_s())
        free()
        return ceilings


@dataclass(slots=True)
class Row:
    """One measurement: what was done, in how many microseconds."""

    table: str
    work: str
    us: float
    bytes: float = 0
    """That must move through device memory."""
    flops: float = 0
    """That must be computed by the tensor cores."""
    rivals: dict[str, float] = field(default_factory=dict)
    """Microseconds, by name, of what does the same."""
    more: dict[str, float] = field(default_factory=dict)
    """Other figures, by name and unit."""
    compare: dict[str, Callable[[], float]] = field(default_factory=dict)
    """What measures more rivals, by name, after all tables: what may have to be compiled keeps nothing waiting."""

    def derived(self, ceilings: Ceilings) -> dict[str, float]:
        """Rates; shares of the ceilings; the floor, which is the larger of what bytes and operations need at those;
        and how often the best rival's time holds ours."""
        figures = {}
        if self.bytes:
            figures["TB/s"] = self.bytes / self.us / 1e6
            figures["of copy"] = self.bytes / self.us * 1e6 / ceilings.copy_bytes_per_s
        if self.flops:
            figures["TFLOP/s"] = self.flops / self.us / 1e6
            figures["of matrix product"] = self.flops / self.us * 1e6 / ceilings.matrix_flops_per_s
        if self.bytes or self.flops:
            floor = max(self.bytes / ceilings.copy_bytes_per_s, self.flops / ceilings.matrix_flops_per_s) * 1e6
            figures["floor us"] = floor
            figures["times floor"] = self.us / floor
        if self.rivals:
            figures["best rival over ours"] = min(self.rivals.values()) / self.us
        return figures

    def line(self, ceilings: Ceilings) -> str:
        figures = {f"{name} us": us for name, us in self.rivals.items()} | self.derived(ceilings) | self.more
        return "  ".join(
            [
                f"{self.table:10} {self.work:34} {self.us:8.4g} us",
                *(f"{name} {value:.3g}" for name, value in figures.items()),
            ]
        )

    def as_json(self, ceilings: Ceilings) -> dict[str, object]:
        return asdict(replace(self, compare={})) | {"derived": self.derived(ceilings)}


@dataclass(frozen=True, slots=True)
class Bench:
    """How to measure."""

    milliseconds: int = 10
    """Of one graph, which is replayed ten times."""
    with_rivals: bool = True

    def us(self, fn: Callable[[], object]) -> float:
        """Median time of a call inside a replayed graph of many."""
        fn()
        torch.cuda.synchronize()
        return triton.testing.do_bench_cudagraph(fn, rep=self.milliseconds, return_mode="median") * 1e3

    def eager_us(self, fn: Callable[[], object]) -> float:
        """Median time of a call that cannot be captured."""
        return triton.testing.do_bench(fn, rep=self.milliseconds, return_mode="median") * 1e3


TABLES: dict[str, Measure] = {}


def table(name: str) -> Callable[[Measure], Measure]:
    """Register a function that measures the table `name`."""

    def register(measure: Measure) -> Measure:
        if name in TABLES:
            raise ValueError(f"there is a table {name} already")
        TABLES[name] = measure
        return measure

    return register


def free() -> None:
    """Give unused device memory back, so that the next table may have it."""
    gc.collect()
    torch.cuda.empty_cache()


def _copy_bytes_per_s() -> float:
    source = torch.randn(2**30, device="cuda", dtype=torch.float32)
    target = torch.empty_like(source)
    # Not a graph: in one, a copy becomes a node for a copy engine, which is slower than the kernel that runs otherwise.
    return 2 * source.nbytes / Bench().eager_us(lambda: target.copy_(source)) * 1e6


def _matrix_flops_per_s() -> float:
    size = 8192
    left, right = (torch.randn(size, size, device="cuda", dtype=DTYPE) for _ in range(2))
    out = torch.empty_like(left)
    return 2 * size**3 / Bench().eager_us(lambda: torch.mm(left, right, out=out)) * 1e6
