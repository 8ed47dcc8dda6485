"""Any order of submits, forks, decode steps, cancels, preemptions, evictions, swaps, hints and releases."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from chatserve.types import RequestId, UserId
from tests.cache.token_storage import Cache, Running

USERS = st.sampled_from(["ann", "bob"])


def num_common(one: list[int], other: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


class KVMachine(RuleBasedStateMachine):
    """The model: all sequences ever computed. What is found of a new one can only come from those its user may see."""

    def __init__(self) -> None:
        super().__init__()
        self.known: list[Running] = []
        self.num_submitted = 0

    @initialize(
        num_blocks=st.integers(8, 14),
        num_host_blocks=st.sampled_from([0, 1, 3, 8, 30]),
        low=st.integers(0, 3),
        block_size=st.sampled_from([1, 2, 4]),
    )
    def start(self, num_blocks: int, num_host_blocks: int, low: int, block_size: int) -> None:
        self.cache = Cache(num_blocks, num_host_blocks, block_size, low_watermark=low, high_watermark=2 * low)
        self.max_tokens = num_blocks * block_size
        self.planned: dict[str, int] = {}

    # --- requests -----------------------------------------------------------------------------------------------------

    def draw_sequence(self, data: st.DataObject) -> tuple[list[int], str, int]:
        """A fresh sequence, or one that goes on from any point of a known one."""
        token_ids = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=4 * self.cache.block_size))
        user, shared = data.draw(USERS), data.draw(st.sampled_from([0, 0, 3, 5, 8]))
        if self.known and data.draw(st.integers(0, 3)):
            base = data.draw(st.sampled_from(self.known))
            cut = data.draw(st.sampled_from([len(base.token_ids), len(base.token_ids) - 1, 5, 9]))
            token_ids = base.token_ids[:cut] + token_ids
            if data.draw(st.booleans()):
                user, shared = base.user, base.num_shared
        token_ids = token_ids[: self.max_tokens]
        return token_ids, user, min(shared, len(token_ids))

    def admit(self, data: st.DataObject) -> str | None:
        token_ids, user, shared = self.draw_sequence(data)
        name = f"r{self.num_submitted}"
        self.num_submitted += 1
        is_hint = data.draw(st.integers(0, 3)) == 0
        running = self.cache.admit(name, token_ids, user, shared, ahead=data.draw(st.booleans()), is_hint=is_hint)
        if running is None:
            return None
        may_be_found = 0
        for other in self.known:
            in_common = num_common(token_ids, other.token_ids)
            may_be_found = max(may_be_found, in_common if other.user == user else min(in_common, other.num_shared))
        assert running.num_matched <= may_be_found, "found what nobody computed for this user"
        self.known.append(running)
        return name

    @rule(data=st.data())
    def submit(self, data: st.DataObject) -> None:
        self.admit(data)

    @rule(data=st.data())
    def whole_turn(self, data: st.DataObject) -> None:
        """A request that runs from its admission to its end while the others wait: fills the pool quickly."""
        if self.cache.under_way is not None:
            self.cache.land()
        name = self.admit(data)
        if name is None:
            return
        running = self.cache.running[name]
        self.fetch(name)
        if self.cache.grow(name, len(running.token_ids)):
            self.planned[name] = len(running.token_ids) - running.num_computed
        self.launch(execute=True)
        self.cache.land()
        self.cache.finish(name)

    @precondition(lambda self: self.cache.running)
    @rule(token_id=st.integers(0, 2))
    def whole_step(self, token_id: int) -> None:
        """All that run take part in one step."""
        if self.cache.under_way is not None:
            self.cache.land()
        for name in self.cache.running:
            self.fetch(name)
            self.plan(name, 100, token_id)
        self.launch(execute=True)
        self.cache.land()

    def fetch(self, name: str) -> None:
        """Let the copies that a request waits for come to their end."""
        if self.cache.kv.is_resident(RequestId(name)):
            return
        if self.cache.under_way is not None:
            self.cache.land()
        self.launch(execute=True)
        self.cache.land()
        for copying in tuple(self.cache.copying):
            self.cache.end_copying(copying)
        assert self.cache.kv.is_resident(RequestId(name))

    def plan(self, name: str, chunk: int, token_id: int) -> None:
        running = self.cache.running[name]
        if not self.cache.kv.is_resident(RequestId(name)):
            return
        if name in self.planned or (self.cache.under_way and name in self.cache.under_way.rows):
            return
        if running.num_computed == len(running.token_ids):
            if len(running.token_ids) == self.max_tokens:
                return
            running.token_ids.append(token_id)
        num_tokens = min(chunk, len(running.token_ids) - running.num_computed)
        if self.cache.grow(name, running.num_computed + num_tokens):
            self.planned[name] = num_tokens

    @precondition(lambda self: self.cache.running)
    @rule(data=st.data(), chunk=st.integers(1, 9), token_id=st.integers(0, 2))
    def plan_row(self, data: st.DataObject, chunk: int, token_id: int) -> None:
        """The next chunk of a prompt, or one decoded token."""
        self.plan(data.draw(st.sampled_from(sorted(self.cache.running))), chunk, token_id)

    @precondition(lambda self: self.cache.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.cache.running)))
        running = self.cache.running[name]
        keep = data.draw(st.one_of(st.none(), st.integers(0, len(running.token_ids))))
        self.planned.pop(name, None)
        self.cache.finish(name, keep)

    @precondition(lambda self: self.cache.running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.cache.running)))
        self.planned.pop(name, None)
        if self.cache.running[name].is_hint:
            self.cache.finish(name)
        else:
            self.cache.preempt(name)

    # --- steps --------------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.cache.under_way is None)
    @rule(execute=st.booleans(), write_through=st.booleans())
    def launch(self, execute: bool, write_through: bool = False) -> None:
        self.cache.launch(self.planned, write_through=write_through)
        self.planned = {}
        if execute:
            self.cache.execute()
            self.cache.expect_true_blocks()

    @precondition(lambda self: self.cache.under_way is not None)
    @rule(commit_first=st.booleans())
    def land(self, commit_first: bool) -> None:
        self.cache.land(commit_first=commit_first)

    # --- background ---------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.cache.copying)
    @rule(data=st.data(), end=st.booleans())
    def copy(self, data: st.DataObject, end: bool) -> None:
        copying = data.draw(st.sampled_from(self.cache.copying))
        self.cache.copy(copying)
        if end:
            self.cache.end_copying(copying)

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def release_hint(self, data: st.DataObject) -> None:
        known = data.draw(st.sampled_from(self.known))
        num_kept = data.draw(st.sampled_from([0, 0, 1, 5, len(known.token_ids)]))
        self.cache.kv.release_hint(known.token_ids, UserId(known.user), num_kept)

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        known = data.draw(st.sampled_from(self.known))
        num_kept = data.draw(st.sampled_from([0, 0, 1, 5, len(known.token_ids)]))
        before = self.cache.match([*known.token_ids[:num_kept], 0], known.user)
        self.cache.kv.release(known.token_ids, UserId(known.user), num_kept)
        assert self.cache.match([*known.token_ids[:num_kept], 0], known.user) == before, "lost what was to be kept"

    # --- what must hold -----------------------------------------------------------------------------------------------

    @invariant()
    def every_invariant_holds(self) -> None:
        kv = self.cache.kv
        kv.check()
        device, host = kv.counts()
        for counts in (device, host):
            assert counts.free + counts.cached + counts.private + counts.transit == counts.total
        block_map = kv.block_map()
        assert block_map.lower().count("f") == device.free
        assert block_map.lower().count("t") == device.transit
        assert sum(letter.isupper() for letter in block_map) == device.pinned
        ends = len(self.cache.running) + sum(node.num_tokens < kv.block_size for node in kv._tree.walk())
        room = sum(len(r.table) * kv.block_size - r.num_computed for r in self.cache.running.values())
        assert 0 <= kv.wasted_slots() <= ends * (kv.block_size - 1) + room

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        if self.cache.under_way is not None:
            self.cache.land()
        for name in list(self.cache.running):
            self.cache.finish(name)
        for _ in range(3):  # hints that are planned; what the page daemon does about them; what it finds next
            self.cache.step()
        self.cache.expect_idle()
        for known in self.known:
            for cut in range(len(known.token_ids), 0, -1):
                self.cache.kv.release(known.token_ids[:cut], UserId(known.user))
                self.cache.kv.check()
        assert all(node.is_public for node in self.cache.kv._tree.walk()), "a private block outlived all its sessions"


KVMachine.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestKVMachine = KVMachine.TestCase
