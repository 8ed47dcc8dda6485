"""Attention by our kernels equals the torch implementation: interpreted on a CPU, compiled on a GPU.

Mixed batches over a pool full of NaN, in which rows share blocks as forked sessions do; then a whole chat.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import pytest
import torch

from chatserve.config import EngineSettings
from chatserve.engine.build import build_engine
from chatserve.engine.messages import PathRef
from chatserve.errors import StartupError
from chatserve.model import backends
from chatserve.model.attention import AttentionBackend, PackedBatch, TorchAttention
from chatserve.model.backends import choose_backend
from chatserve.model.kv_dtype import FP8
from chatserve.model.kv_storage import KVStorage
from chatserve.model.runner import build_runner
from chatserve.model.shapes import KVShape
from tests.fakes.engines import Transcript, make_submit, run_until_idle
from tests.model.tiny import OUR_FAMILIES, VOCAB, make_model

triton_attention = pytest.importorskip("chatserve.model.triton_attention", reason="Triton is made for Linux only")

if TYPE_CHECKING:
    from pathlib import Path

    from chatserve.engine.engine import Engine

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LAYERS = 2
SHARED_BLOCKS = 3
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


class Heads(NamedTuple):
    num_kv_heads: int = 2
    group: int = 3
    head_dim: int = 16
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None
    """None: as `dtype`."""


class RowSpec(NamedTuple):
    start: int
    length: int
    is_fork: bool = False
    """Its first blocks are those that all forks share."""


def storage_of(heads: Heads, num_blocks: int) -> KVStorage:
    shape = KVShape(
        num_layers=LAYERS, num_kv_heads=heads.num_kv_heads, head_dim=heads.head_dim, block_size=heads.block_size
    )
    return KVStorage(
        shape,
        num_blocks=num_blocks,
        num_host_blocks=0,
        dtype=heads.kv_dtype or heads.dtype,
        device=DEVICE,
        compute_dtype=heads.dtype,
        scales=[(0.4, 1.7), (0.02, 0.001)],  # the last is so small that values saturate
    )


def share_always() -> object:
    """A cost model by which the few tokens of a test are worth sharing."""
    from chatserve_kernels.forest import CostModel

    return CostModel(min_tokens=1, partial_tokens=0.0)


class World:
    """Rows with a history, and two pools of the same KV, one for each backend."""

    def __init__(self, rows: list[RowSpec], heads: Heads, seed: int) -> None:
        self.rows, self.heads = rows, heads
        size = heads.block_size
        counts = [-(-(row.start + row.length) // size) for row in rows]
        num_blocks = sum(counts) + SHARED_BLOCKS
        self.generator = torch.Generator().manual_seed(seed)
        self.torch, self.triton = storage_of(heads, num_blocks), storage_of(heads, num_blocks)
        self.torch.device_pool.fill_(torch.nan)
        blocks = np.random.default_rng(seed).permutation(num_blocks).tolist()
        shared = [blocks.pop() for _ in range(SHARED_BLOCKS)]
        self.tables = np.full((len(rows), max(counts)), 10**6)
        for row, table, count in zip(rows, self.tables, counts, strict=True):
            own = [blocks.pop() for _ in range(count)]
            if row.is_fork:
                assert row.start >= SHARED_BLOCKS * size
                own[:SHARED_BLOCKS] = shared
            table[:count] = own
            for index, block in enumerate(own):
                written = min(size, row.start - index * size)
                if written > 0:
                    part = self.torch.device_pool[block, :, :, :, :written]
                    part.copy_(self.random(*part.shape))
        self.triton.device_pool.copy_(self.torch.device_pool)
        self.backends: list[AttentionBackend] = [
            TorchAttention(self.torch),
            triton_attention.TritonAttention(self.triton, heads.num_kv_heads * heads.group, cost=share_always()),
        ]

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.heads.dtype).to(DEVICE)

    def check(
        self, *, windows: tuple[int | None, ...], softcap: float | None | tuple[float | None, ...] = None
    ) -> None:
        """One step, in whose layers the windows differ, and soft caps if there is one for each."""
        softcaps = softcap if isinstance(softcap, tuple) else (softcap,) * len(windows)
        heads = self.heads
        batch = PackedBatch(
            np.array([row.start for row in self.rows]), np.array([row.length for row in self.rows]), self.tables
        )
        num_tokens = int(batch.lengths.sum())
        steps = [backend.prepare(batch) for backend in self.backends]
        for index, (window, cap) in enumerate(zip(windows, softcaps, strict=True)):
            layer = index % LAYERS
            query = self.random(num_tokens, heads.num_kv_heads * heads.group, heads.head_dim)
            key, value = (self.random(num_tokens, heads.num_kv_heads, heads.head_dim) for _ in range(2))
            expected, got = (
                step.attend(layer, query, key, value, scale=0.3, window=window, softcap=cap) for step in steps
            )
            error = (got.double() - expected.double()).norm() / expected.double().norm()
            assert float(error) < TOLERANCE[heads.dtype], f"layer {index}, window {window}, soft cap {cap}"
        pools = (storage.device_pool.to(heads.dtype).nan_to_num(7.0) for storage in (self.torch, self.triton))
        assert torch.equal(*pools)


DECODES = [RowSpec(0, 1), RowSpec(15, 1), RowSpec(16, 1), RowSpec(70, 1)]
FORKS = [RowSpec(48 + 5 * number, 1, is_fork=True) for number in range(7)]
PROMPTS = [RowSpec(0, 19), RowSpec(17, 2), RowSpec(50, 33, is_fork=True)]
MIXED = [PROMPTS[0], FORKS[0], DECODES[1], PROMPTS[2], FORKS[3], DECODES[3], PROMPTS[1]]


@pytest.mark.parametrize(
    ("rows", "softcap"),
    [(DECODES, None), (FORKS, None), (PROMPTS, None), (MIXED, None), (MIXED, 2.0), ([*FORKS, *PROMPTS], None)],
    ids=["decode", "forks", "prefill", "mixed", "mixed with soft cap", "in turn"],
)
def test_equals_torch(rows: list[RowSpec], softcap: float | None) -> None:
    World(rows, Heads(), seed=len(rows)).check(windows=(None, 9), softcap=softcap)


HEADS = [
    Heads(num_kv_heads=1, group=1, head_dim=8, block_size=1),
    Heads(num_kv_heads=1, group=1, head_dim=16),
    Heads(num_kv_heads=3, group=1, head_dim=64, block_size=4),
    Heads(num_kv_heads=1, group=16, head_dim=80),
    Heads(num_kv_heads=1, group=7, head_dim=96, block_size=64),
    Heads(num_kv_heads=1, group=4, head_dim=128),
    Heads(num_kv_heads=1, group=2, head_dim=256),
]
DTYPES = [torch.float16, torch.float32, torch.bfloat16]
# Compiled code differs by every head size and type; what the interpreter does, hardly.
EVERY_KIND = [
    heads._replace(dtype=dtype)
    for index, heads in enumerate(HEADS)
    for dtype in (DTYPES if DEVICE.type == "cuda" else [DTYPES[index % 3]])
]


def test_every_head_size_that_is_served_is_tested() -> None:
    assert {heads.head_dim for heads in HEADS} == set(triton_attention.HEAD_DIMS)


@pytest.mark.parametrize("heads", EVERY_KIND, ids=lambda heads: f"{heads.group}x{heads.head_dim}-{heads.dtype}")
def test_equals_torch_for_heads_of_any_size(heads: Heads) -> None:
    rows = MIXED if heads.block_size <= 16 else [row._replace(is_fork=False) for row in MIXED]
    World(rows, heads, seed=heads.head_dim).check(windows=(None, 20))


def test_random_batches_one_after_another_equal_torch() -> None:
    """One step's plan goes where the last one's was."""
    rng = np.random.default_rng(4)
    rows = [RowSpec(48 + int(rng.integers(40)), 1, is_fork=bool(rng.integers(2))) for _ in range(9)]
    world = World([*rows, *PROMPTS], Heads(), seed=9)
    for _ in range(2):
        world.rows = world.rows[2:]
        world.tables = world.tables[2:]
        world.check(windows=(5, None))


@pytest.mark.parametrize(
    ("rows", "softcap", "dtype"),
    [(FORKS, None, torch.float32), (MIXED, 2.0, torch.float32), (MIXED, None, torch.bfloat16)],
    ids=["forks", "mixed with soft cap", "mixed"],
)
def test_8_bit_kv_equals_torch(rows: list[RowSpec], softcap: float | None, dtype: torch.dtype) -> None:
    """Both keep the same bytes."""
    World(rows, Heads(dtype=dtype, kv_dtype=FP8), seed=len(rows)).check(windows=(None, 9), softcap=softcap)


@pytest.mark.parametrize(
    ("rows", "softcap", "kv_dtype"),
    [
        ([RowSpec(0, 40)], None, None),
        ([RowSpec(50, 37, is_fork=True)], None, None),
        ([*DECODES, *PROMPTS], None, None),
        (MIXED, None, None),
        ([RowSpec(20, 40)], 2.0, None),
        ([RowSpec(0, 40)], None, FP8),
        (MIXED, None, FP8),
    ],
    ids=["all of it", "one", "in turn", "mixed", "soft cap", "all of it in 8 bits", "mixed in 8 bits"],
)
def test_long_prompts_equal_torch(
    rows: list[RowSpec], softcap: float | None, kv_dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some go to a dense kernel, in part or whole, in the layers whose window hides nothing."""
    from chatserve_kernels import dense_prefill

    from chatserve.model import step_parts

    seen: list[int] = []

    def dense(query: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        seen.append(len(query))
        return dense_prefill.dense_prefill(query, *arguments, **options)

    monkeypatch.setattr(step_parts, "dense_prefill", dense)
    for name, value in (("MIN_TOKENS", 8), ("MIN_PREFIX", 16), ("SQUARE_UNIT", 8)):
        monkeypatch.setattr(dense_prefill, name, value)
    dtype = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
    windows = (None, 20) if softcap is None else (500,)
    heads = Heads(head_dim=64, dtype=dtype, kv_dtype=kv_dtype)
    World(rows, heads, seed=len(rows)).check(windows=windows, softcap=softcap)
    long = [row.length for row in rows if row.length >= 8]
    assert len(seen) == (len(long) if softcap is None else 0), "in the first layer alone"
    assert all(some <= whole for some, whole in zip(seen, long, strict=False))


def test_layers_with_and_without_soft_cap_take_turns_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those with one compute all tokens by pages, the others the last ones; both plans are of one size and window."""
    from chatserve_kernels import dense_prefill

    for name, value in (("MIN_TOKENS", 8), ("MIN_PREFIX", 16), ("SQUARE_UNIT", 8)):
        monkeypatch.setattr(dense_prefill, name, value)
    dtype = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
    world = World([RowSpec(0, 15)], Heads(head_dim=64, dtype=dtype), seed=3)
    world.check(windows=(None, None, None, None), softcap=(None, 2.0, None, 2.0))


@pytest.mark.parametrize(
    ("setting", "heads", "words"),
    [
        ("triton", Heads(head_dim=24), "heads of .*, not 24; choose auto or torch"),
        ("triton", Heads(group=17), "16 query heads a KV head, not 17"),
        ("triton", Heads(block_size=5), "power of two, not 5"),
    ],
)
def test_a_backend_that_cannot_be_had_is_one_line(setting: str, heads: Heads, words: str) -> None:
    with pytest.raises(StartupError, match=words) as caught:
        choose_backend(setting, storage_of(heads, 2), heads.num_kv_heads * heads.group)
    assert "\n" not in str(caught.value)


def test_auto_takes_the_kernels_on_a_gpu_and_torch_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels_or_torch = triton_attention.TritonAttention if DEVICE.type == "cuda" else TorchAttention
    assert isinstance(choose_backend("auto", storage_of(Heads(), 2), 6), kernels_or_torch)
    assert isinstance(choose_backend("torch", storage_of(Heads(), 2), 6), TorchAttention)
    assert isinstance(choose_backend("auto", storage_of(Heads(block_size=5), 2), 6), TorchAttention)
    on_cpu = KVStorage(
        storage_of(Heads(), 2).shape,
        num_blocks=2,
        num_host_blocks=0,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(StartupError, match="needs a CUDA device, not cpu"):
        choose_backend("triton", on_cpu, 6)


def test_a_gpu_that_has_to_do_without_the_kernels_says_why_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    on_a_gpu = cast("KVStorage", SimpleNamespace(device_pool=SimpleNamespace(device=torch.device("cuda"))))
    monkeypatch.setattr(triton_attention, "why_not", lambda _storage, _num_heads: "it needs another shape")
    monkeypatch.setattr(backends, "TorchAttention", lambda storage: storage)
    backends._say_once.cache_clear()
    for _ in range(2):
        assert choose_backend("auto", on_a_gpu, 6) is on_a_gpu
    assert caplog.text.count("slower than our kernels: it needs another shape") == 1


class Chat:
    """An engine over a real model, and what was said in it."""

    def __init__(self, directory: Path, attention: str) -> None:
        settings = EngineSettings(
            model_dir=directory,
            model_name="tiny",
            dtype="float32",
            kv_cache_memory="64blocks",
            host_cache_memory="0blocks",
            attention=attention,
        )
        runner = build_runner(settings)
        runner.storage.device_pool.fill_(torch.nan)
        self.engine: Engine = build_engine(settings, runner)
        self.transcript = Transcript()
        self.asked: dict[str, list[int]] = {}
        self._ids = itertools.count()

    def ask(self, prompt: list[int], base: PathRef | None = None) -> str:
        name = f"r{next(self._ids)}"
        self.asked[name] = prompt
        new = prompt if base is None else prompt[base.num_tokens :]
        self.engine.handle(make_submit(name, new, base=base, max_tokens=4))
        return name

    def said(self, name: str) -> list[int]:
        return self.asked[name] + self.transcript.text(name)

    def converse(self) -> list[list[int]]:
        """Two sessions under one system prompt, a second turn of the first, and a fork of it inside a block."""
        system = np.random.default_rng(1).integers(3, VOCAB, 21).tolist()
        first, second = self.ask([*system, 5, 6, 7]), self.ask([*system, 8, 9])
        run_until_idle(self.engine, self.transcript)
        base = self.transcript.finished[first].path
        assert base is not None
        fork = PathRef(base.epoch, base.handle, base.num_tokens - 2)
        names = [
            first,
            second,
            self.ask([*self.said(first), 11, 12], base),
            self.ask([*self.said(first)[: fork.num_tokens], 13], fork),
        ]
        run_until_idle(self.engine, self.transcript)
        return [self.transcript.text(name) for name in names]


def test_a_whole_chat_says_the_same(tmp_path: Path) -> None:
    make_model(tmp_path, OUR_FAMILIES["mistral-window"])
    by_torch, by_kernels = (Chat(tmp_path, attention).converse() for attention in ("torch", "triton"))
    assert by_kernels == by_torch
    assert all(len(text) == 4 for text in by_torch)
