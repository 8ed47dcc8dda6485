"""How one specialisation of the attention kernels is compiled: plain numbers, which planners and launches share."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HopperTile:
    """How `attend_hopper_kernel` computes a tile, if keys and values are such as it takes."""

    stages: int
    registers: int
    """A thread of the second warpgroup that multiplies: the first one has as many, and the warps that fetch, 40."""
    max_registers: int | None = None
    """A thread at launch, on average; None: all that a program alone on a multiprocessor can have."""

    @property
    def options(self) -> dict[str, int]:
        """Triton's launch options."""
        limit = {} if self.max_registers is None else {"maxnreg": self.max_registers}
        return {"num_warps": 4, **limit}


@dataclass(frozen=True, slots=True)
class TileConfig:
    """How one specialisation is compiled. `programs` a multiprocessor run at a time, in `max_registers` a thread."""

    query_rows: int
    key_tokens: int
    warps: int
    stages: int
    programs: int
    max_registers: int | None = None
    hopper: HopperTile | None = None
    """For tiles of 64 or 128 rows; the numbers above are for what it does not take."""

    @property
    def options(self) -> dict[str, int]:
        """Triton's launch options."""
        limit = {} if self.max_registers is None else {"maxnreg": self.max_registers}
        return {"num_warps": self.warps, "num_stages": self.stages, **limit}


@dataclass(frozen=True, slots=True)
class Pace:
    """How long tiles take, in microseconds, so that wide and small ones can be given their shares of the chip.

    A program takes `wide_tile` a tile, or `small_tile` beside as many others as fit a multiprocessor. Small programs
    beyond `saturating` of those that the chip holds only wait for memory. Programs of either kind take `start` to begin
    and to end.
    """

    wide_tile: float
    small_tile: float
    saturating: float
    start: float
