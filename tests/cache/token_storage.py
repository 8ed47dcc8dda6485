"""A storage whose KV is the token ids themselves, so that any wrong block shows as wrong tokens.

`Cache` drives a `KVManager` on it as a scheduler and a runner would, one step at a time or with the next step planned
while one is under way. After every operation it calls `check()`; whenever transfers have run, it reads every running
request's tokens back through its block table, and every cached block of the tree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from chatserve.cache.kv_manager import KVManager
from chatserve.cache.siblings import TAG_BYTES, unpack
from chatserve.sched.plan import Transfers
from chatserve.types import BlockId, RequestId, UserId

GARBAGE = -1


class TokenStorage:
    """Executes transfers literally, and spoils what a step may not rely on: copies run last to first, and slots past a
    copy's length become garbage.
    """

    def __init__(self, num_blocks: int, num_host_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.device = [[GARBAGE] * block_size for _ in range(num_blocks)]
        self.host = [[GARBAGE] * block_size for _ in range(num_host_blocks)]

    def execute(self, transfers: Transfers) -> None:
        for out in transfers.swap_out:
            self.host[out.dst] = list(self.device[out.src])
        for swap in transfers.swap_in:
            self.device[swap.dst] = list(self.host[swap.src])
        for copy in reversed(transfers.copies):
            spoilt = [GARBAGE] * (self.block_size - copy.num_tokens)
            self.device[copy.dst] = self.device[copy.src][: copy.num_tokens] + spoilt

    def write(self, table: Sequence[BlockId], start: int, token_ids: Sequence[int]) -> None:
        for index, token_id in enumerate(token_ids, start):
            self.device[table[index // self.block_size]][index % self.block_size] = token_id

    def read(self, table: Sequence[BlockId], num_tokens: int) -> list[int]:
        return [self.device[table[i // self.block_size]][i % self.block_size] for i in range(num_tokens)]


@dataclass(eq=False)
class Running:
    user: str
    num_shared: int
    token_ids: list[int]
    table: list[BlockId]
    num_cached: int
    num_swapped_in: int
    is_hint: bool = False
    num_computed: int = 0

    def __post_init__(self) -> None:
        self.num_computed = self.num_matched

    @property
    def num_matched(self) -> int:
        return self.num_cached + self.num_swapped_in


@dataclass(eq=False)
class Step:
    transfers: Transfers
    present: dict[str, Running]
    """Requests that were admitted when the step was planned, and for which nothing was under way in the background."""
    rows: dict[str, tuple[Running, int]]
    """By request: how many tokens are computed."""
    writes: list[tuple[list[BlockId], int, list[int]]] = field(default_factory=list)
    spoils: list[BlockId] = field(default_factory=list)
    """Blocks that the background fills."""
    executed: bool = False


@dataclass(eq=False)
class Copying:
    """Transfers in the background: each block is read and written at some time before they are done."""

    transfers: Transfers
    after: Step
    executed: bool = False


class Cache:
    def __init__(
        self,
        num_blocks: int,
        num_host_blocks: int = 0,
        block_size: int = 4,
        low_watermark: int | None = None,
        high_watermark: int | None = None,
    ) -> None:
        self.kv = KVManager(
            num_blocks=num_blocks,
            num_host_blocks=num_host_blocks,
            block_size=block_size,
            low_watermark=low_watermark,
            high_watermark=high_watermark,
        )
        self.storage = TokenStorage(num_blocks, num_host_blocks, block_size)
        self.block_size = block_size
        self.running: dict[str, Running] = {}
        self.under_way: Step | None = None
        self.copying: list[Copying] = []

    # --- a request ----------------------------------------------------------------------------------------------------

    def match(self, token_ids: Sequence[int], user: str = "ann") -> int:
        found = self.kv.match(token_ids, UserId(user))
        self.kv.check()
        return found.num_cached + found.num_swapped

    def admit(
        self,
        name: str,
        token_ids: Sequence[int],
        user: str = "ann",
        shared: int = 0,
        *,
        ahead: bool = False,
        is_hint: bool = False,
    ) -> Running | None:
        matched = self.match(token_ids, user)
        admission = self.kv.admit(RequestId(name), token_ids, UserId(user), shared, ahead=ahead, is_hint=is_hint)
        self.kv.check()
        if admission is None:
            return None
        assert admission.num_computed <= matched < len(token_ids)
        table = list(admission.block_ids)
        assert len(table) == -(-admission.num_computed // self.block_size)
        running = Running(user, shared, list(token_ids), table, admission.num_cached, admission.num_swapped_in, is_hint)
        self.running[name] = running
        return running

    def grow(self, name: str, num_tokens: int) -> bool:
        running = self.running[name]
        new = self.kv.grow(RequestId(name), num_tokens)
        self.kv.check()
        if new is None:
            return False
        running.table.extend(new)
        assert num_tokens <= len(running.table) * self.block_size
        assert len(set(running.table)) == len(running.table)
        return True

    def finish(self, name: str, keep: int | None = None) -> Running:
        running = self.running.pop(name)
        if running.is_hint:
            self.kv.finish_hint(RequestId(name), max(keep or 0, running.num_shared))
        else:
            self.kv.finish(RequestId(name), keep)
        self.kv.check()
        return running

    def preempt(self, name: str) -> Running:
        running = self.running.pop(name)
        self.kv.preempt(RequestId(name))
        self.kv.check()
        return running

    # --- a step -------------------------------------------------------------------------------------------------------

    def launch(self, computes: Mapping[str, int] | None = None, *, write_through: bool = False) -> None:
        """Take the planned transfers, for a step that computes the next so many tokens of some requests."""
        assert self.under_way is None
        present = {name: running for name, running in self.running.items() if self.kv.is_resident(RequestId(name))}
        step = Step(self.kv.take_transfers(), present, {})
        self.kv.check()
        for name, num_tokens in (computes or {}).items():
            running = self.running[name]
            start = running.num_computed
            step.rows[name] = running, num_tokens
            step.writes.append((list(running.table), start, running.token_ids[start : start + num_tokens]))
        self.under_way = step
        background = self.kv.take_background(write_through=write_through)
        self.kv.check()
        if background:
            self.copying.append(Copying(background, step))
            for swap in background.swap_in:  # what stands in the block meanwhile is nothing to rely on
                step.spoils.append(swap.dst)

    def copy(self, copying: Copying) -> None:
        """What the device does in the background, at any time after the transfers of the step that it came with."""
        if not copying.after.executed:
            self.execute()
        if not copying.executed:
            copying.executed = True
            self.storage.execute(copying.transfers)

    def end_copying(self, copying: Copying) -> None:
        self.copy(copying)
        self.copying.remove(copying)
        self.kv.transfers_done(copying.transfers)
        self.kv.check()

    def execute(self) -> None:
        """What the device does with the step that is under way, at any time before it lands."""
        step = self.under_way
        assert step is not None
        if step.executed:
            return
        step.executed = True
        self.storage.execute(step.transfers)
        for block_id in step.spoils:
            self.storage.device[block_id] = [GARBAGE] * self.block_size
        for name, running in step.present.items():
            self._expect_own_tokens(name, running)
        for table, start, token_ids in step.writes:
            self.storage.write(table, start, token_ids)

    def land(self, *, commit_first: bool = False) -> None:
        """The step has finished. Requests that ended meanwhile commit nothing."""
        self.execute()
        step, self.under_way = self.under_way, None
        assert step is not None
        if not commit_first:
            self.kv.transfers_done(step.transfers)
            self.kv.check()
        for name, (running, num_tokens) in step.rows.items():
            if self.running.get(name) is not running:
                continue
            start = running.num_computed
            self.kv.commit(RequestId(name), running.token_ids[start : start + num_tokens])
            running.num_computed += num_tokens
            self.kv.check()
            self._expect_own_tokens(name, running)
        if commit_first:
            self.kv.transfers_done(step.transfers)
            self.kv.check()

    def step(self, computes: Mapping[str, int] | None = None, *, write_through: bool = False) -> None:
        self.launch(computes, write_through=write_through)
        self.execute()
        for copying in tuple(self.copying):
            self.end_copying(copying)
        self.expect_true_blocks()
        self.land()

    def chat(self, token_ids: Sequence[int], user: str = "ann", shared: int = 0, *, chunk: int = 1000) -> Running:
        """One request from admission to its end, alone."""
        running = self.admit("chat", token_ids, user, shared)
        assert running is not None
        while running.num_computed < len(token_ids):
            end = min(running.num_computed + chunk, len(token_ids))
            if not self.grow("chat", end):
                # The block that its last one is copied from cannot be had before the copy has been made.
                end = len(running.table) * self.block_size
                assert end > running.num_computed
            self.step({"chat": end - running.num_computed})
        self.finish("chat")
        self.step()
        return running

    # --- what must hold -----------------------------------------------------------------------------------------------

    def expect_true_blocks(self) -> None:
        """Every cached block holds its node's tokens. Only where nothing is planned for a step and not executed."""
        waiting = [copying.transfers for copying in self.copying if not copying.executed]
        absent = {swap.dst for transfers in waiting for swap in transfers.swap_in}
        absent |= set(self.kv._transfers._fetches)
        absent_on_host = {out.dst for transfers in waiting for out in transfers.swap_out}
        for node in self.kv._tree.walk():
            token_ids = unpack(node.key[TAG_BYTES:])
            if node.block_id is not None and node.block_id not in absent:
                assert self.storage.device[node.block_id][: len(token_ids)] == token_ids
            if node.host_block_id is not None and node.host_block_id not in absent_on_host:
                assert self.storage.host[node.host_block_id][: len(token_ids)] == token_ids

    def read_back(self) -> None:
        """Every running request reads its own tokens. Only where nothing planned concerns it."""
        for name, running in self.running.items():
            if self.kv.is_resident(RequestId(name)):
                self._expect_own_tokens(name, running)

    def expect_idle(self) -> None:
        """Nothing runs: no pin, no transit, nothing private, and all blocks add up."""
        assert not self.running
        for counts in self.kv.counts():
            assert counts.pinned == counts.private == counts.transit == 0, counts
            assert counts.free + counts.cached == counts.total
        self.kv.check()

    def _expect_own_tokens(self, name: str, running: Running) -> None:
        found = self.storage.read(running.table, running.num_computed)
        assert found == running.token_ids[: running.num_computed], f"{name} reads another's tokens"
