"""What one engine step does, decided in pure Python and executed elsewhere.

The scheduler makes a frozen `StepPlan` that depends on its state alone; a `Runner` launches it and answers with a
`StepResult`. Neither torch nor the block tree is visible here. Runners keep the rows of the batch between steps, so a
plan names only what is new: a plain decode step of 256 sessions carries 256 small `Row`s and no tables. What comes by
the hundred a step (`gc=False`) can be part of no reference cycle, and the garbage collector need not look at it.

A runner may be behind: up to `max_in_flight` steps are launched and not waited for, so that the device goes on while
its last tokens are read. On the device, plans run in the order of their launches.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from chatserve.types import BlockId, HostBlockId, RequestId, SamplingParams


class BlockCopy(msgspec.Struct, frozen=True, gc=False):
    """Copy-on-write: the first `num_tokens` slots of `src` are copied to `dst`, both on the device."""

    src: BlockId
    dst: BlockId
    num_tokens: int


class SwapOut(msgspec.Struct, frozen=True, gc=False):
    """A whole block from device to host."""

    src: BlockId
    dst: HostBlockId


class SwapIn(msgspec.Struct, frozen=True, gc=False):
    """A whole block from host to device."""

    src: HostBlockId
    dst: BlockId


class Transfers(msgspec.Struct, frozen=True):
    """Copies of blocks: all swaps out, then all swaps in, then all copies."""

    swap_out: tuple[SwapOut, ...] = ()
    swap_in: tuple[SwapIn, ...] = ()
    copies: tuple[BlockCopy, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.swap_out or self.swap_in or self.copies)


class Admitted(msgspec.Struct, frozen=True):
    """A request that joins the batch, with all that the runner must know of it.

    `token_ids` are all ids known so far (prompt, and output of an earlier run); KV of the first `num_computed` of them
    stands in `block_ids` once the step's transfers are done. Output tokens start at index `num_prompt_tokens`, for the
    penalties. `sampling.seed` is set. The plan has a row of the request.
    """

    request_id: RequestId
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    num_computed: int
    block_ids: tuple[BlockId, ...]
    sampling: SamplingParams


class Row(msgspec.Struct, frozen=True, gc=False):
    """One request's share of a step: compute KV of tokens `start` to `start + num_tokens`, exclusive.

    `new_block_ids` extend the request's block table first. If `sample`, the last token's logits give the next token,
    which the runner appends to the ids that it keeps for the request when it launches the row: the next plan may have a
    row that computes KV of that token, though nobody on the CPU knows it yet.
    """

    request_id: RequestId
    start: int
    num_tokens: int
    new_block_ids: tuple[BlockId, ...]
    sample: bool


class StepPlan(msgspec.Struct, frozen=True):
    """One step: forget `removed`, make `transfers`, take in `admitted`, run `rows` in order.

    Nothing in the step waits for `background`: swaps out ahead of need, swaps in for requests that have no row yet.
    They begin when all that was launched before and this plan's `transfers` are done, and run beside its rows and those
    of later plans. Nobody writes or frees what they read, nor reads or frees what they write, before
    `Runner.poll_background` has named the step; only slots of a source block past its own tokens may be written.
    """

    step: int
    removed: tuple[RequestId, ...]
    transfers: Transfers
    admitted: tuple[Admitted, ...]
    rows: tuple[Row, ...]
    background: Transfers = Transfers()

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)

    def __bool__(self) -> bool:
        return bool(self.rows or self.transfers or self.removed or self.background)


class StepResult(msgspec.Struct, frozen=True):
    """The sampled token of every row with `sample`, in the order of the plan's rows."""

    step: int
    token_ids: tuple[int, ...]


class PendingStep(Protocol):
    """A step that was launched."""

    def is_done(self) -> bool:
        """Whether `wait` returns at once."""
        ...

    def wait(self) -> StepResult:
        """Wait for the sampled tokens. Called once, in the order of the launches.

        Raises:
            StepFailedError: see there.
        """
        ...


class Runner(Protocol):
    """Executes plans. Device and host blocks are addressed by index alone.

    What `launch` and `wait` raise, except `TransfersFailedError`, concerns the plan's rows alone: `removed` is
    forgotten, transfers are made or under way, `admitted` is known, and the next plan may come.
    """

    max_in_flight: int
    """Steps that may be launched and not waited for. 1: a step is computed before the next one is planned."""

    def launch(self, plan: StepPlan) -> PendingStep:
        """Start one step. Forgetting a request that is not known does nothing.

        Raises:
            StepFailedError: see there.
            TransfersFailedError: see there.
        """
        ...

    def poll_background(self) -> tuple[int, ...]:
        """Steps, by their plans' numbers, whose background transfers have ended since the last call."""
        ...


class CompletedStep:
    """A step that was computed when it was launched."""

    __slots__ = ("_result",)

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def is_done(self) -> bool:
        return True

    def wait(self) -> StepResult:
        return self._result


class StepFailedError(Exception):
    """Raised by a runner that can go on though it could not compute the step's rows: out of memory, for example.

    The rows' requests are ended; what they computed in this step is garbage and is dropped.
    """


class TransfersFailedError(Exception):
    """The step's transfers could not be made. What stands in the blocks is unknown, and nothing can go on."""
