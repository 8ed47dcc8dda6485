"""What one engine step does, decided in pure Python and executed elsewhere.

The scheduler makes a frozen `StepPlan` that depends on its state alone; a `Runner` executes it and answers with a
`StepResult`. Neither torch nor the block tree is visible here. Runners keep the rows of the batch between steps, so a
plan names only what is new: a plain decode step of 256 sessions carries 256 small `Row`s and no tables.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from chatserve.types import BlockId, HostBlockId, RequestId, SamplingParams


class BlockCopy(msgspec.Struct, frozen=True):
    """Copy-on-write: the first `num_tokens` slots of `src` are copied to `dst`, both on the device."""

    src: BlockId
    dst: BlockId
    num_tokens: int


class SwapOut(msgspec.Struct, frozen=True):
    """A whole block from device to host."""

    src: BlockId
    dst: HostBlockId


class SwapIn(msgspec.Struct, frozen=True):
    """A whole block from host to device."""

    src: HostBlockId
    dst: BlockId


class Transfers(msgspec.Struct, frozen=True):
    """Copies that a step makes before it computes: all swaps out, then all swaps in, then all copies."""

    swap_out: tuple[SwapOut, ...] = ()
    swap_in: tuple[SwapIn, ...] = ()
    copies: tuple[BlockCopy, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.swap_out or self.swap_in or self.copies)


class Admitted(msgspec.Struct, frozen=True):
    """A request that joins the batch, with all that the runner must know of it.

    `token_ids` are all ids known so far (prompt, and output of an earlier run); KV of the first `num_computed` of them
    stands in `block_ids` once the step's transfers are done. Output tokens start at index `num_prompt_tokens`, for the
    penalties. `sampling.seed` is set.
    """

    request_id: RequestId
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    num_computed: int
    block_ids: tuple[BlockId, ...]
    sampling: SamplingParams


class Row(msgspec.Struct, frozen=True):
    """One request's share of a step: compute KV of tokens `start` to `start + num_tokens`, exclusive.

    `new_block_ids` extend the request's block table first. If `sample`, the last token's logits give the next token,
    which the runner appends to the ids that it keeps for the request.
    """

    request_id: RequestId
    start: int
    num_tokens: int
    new_block_ids: tuple[BlockId, ...]
    sample: bool


class StepPlan(msgspec.Struct, frozen=True):
    """One step: forget `removed`, make `transfers`, take in `admitted`, run `rows` in order."""

    step: int
    removed: tuple[RequestId, ...]
    transfers: Transfers
    admitted: tuple[Admitted, ...]
    rows: tuple[Row, ...]

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)

    def __bool__(self) -> bool:
        return bool(self.rows or self.transfers or self.removed)


class StepResult(msgspec.Struct, frozen=True):
    """The sampled token of every row with `sample`, in the order of the plan's rows."""

    step: int
    token_ids: tuple[int, ...]


class Runner(Protocol):
    """Executes plans. Device and host blocks are addressed by index alone."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step to its end. Forgetting a request that is not known does nothing.

        Raises:
            StepFailedError: the rows could not be computed, and the next plan may come.
        """
        ...


class StepFailedError(Exception):
    """Raised by a runner that can go on though it could not compute the step's rows: out of memory, for example.

    The rows' requests are ended; what they computed in this step is garbage and is dropped.
    """
