"""The GPU's way through a step says what the CPU's does: padded shapes, fused kernels, sampling on the device.

Where there is a GPU the steps are captured graphs; elsewhere the very same launches are interpreted. Pools are full of
NaN where nobody has written.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from chatserve.config import EngineSettings
from chatserve.model.block_tables import BlockTables
from chatserve.model.kv_dtype import choose_kv_dtype
from chatserve.model.kv_storage import KVStorage
from chatserve.model.loader import load_model
from chatserve.model.rows import BatchRows
from chatserve.model.runner import ModelRunner, build_runner
from chatserve.model.shapes import KVShape
from chatserve.sched.plan import Admitted, Row, StepPlan, Transfers
from chatserve.types import BlockId, RequestId, SamplingParams
from tests.model.tiny import OUR_FAMILIES, VOCAB, add_kv_scales, make_model

triton_attention = pytest.importorskip("chatserve.model.triton_attention", reason="Triton is made for Linux only")

from chatserve.model.device_executor import DeviceExecutor  # noqa: E402 - after the check that it can be imported
from chatserve.model.graphs import CapturedGraphs, GraphShape, PlainLaunches, row_classes, step_shapes  # noqa: E402
from chatserve.model.ops import FusedOps  # noqa: E402

# Random numbers are 64-bit products, which wrap; NumPy warns of it where kernels are interpreted.
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered"),
    # What attention gives padding is unspecified, and may be no number.
    pytest.mark.filterwarnings("ignore:invalid value encountered"),
]

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BLOCK = 4
NUM_BLOCKS = 80
MAX_ROWS = 4
SHAPES = [GraphShape(4, 16, 2), GraphShape(4), GraphShape(1)]
GREEDY = SamplingParams(temperature=0.0, seed=0)


@pytest.fixture(scope="module")
def llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    make_model(path, {**OUR_FAMILIES["llama"], "num_hidden_layers": 2, "head_dim": 16})
    return path


def device_runner(
    directory: Path, shapes: list[GraphShape], precision: str = "float32", kv_cache_dtype: str = "auto"
) -> ModelRunner:
    """A runner around a `DeviceExecutor` on whatever device there is."""
    model, dtype = load_model(directory, DEVICE, "llama", precision)
    info = model.info
    shape = KVShape(
        num_layers=info.num_layers, num_kv_heads=info.num_kv_heads, head_dim=info.head_dim, block_size=BLOCK
    )
    storage = KVStorage(
        shape,
        num_blocks=NUM_BLOCKS,
        num_host_blocks=0,
        dtype=choose_kv_dtype(kv_cache_dtype, dtype, DEVICE),
        device=DEVICE,
        compute_dtype=dtype,
        scales=info.kv_scales,
    )
    backend = triton_attention.TritonAttention(storage, info.num_heads)
    model.ops = FusedOps(model.rope, info.context_tokens)  # type: ignore[attr-defined]
    rows = BatchRows(BlockTables(MAX_ROWS, 40, DEVICE))
    replays = CapturedGraphs() if DEVICE.type == "cuda" else PlainLaunches()
    stream = torch.cuda.stream(torch.cuda.Stream()) if DEVICE.type == "cuda" else None
    with torch.inference_mode():
        if stream is not None:
            stream.__enter__()
        executor = DeviceExecutor(model, backend, rows, shapes, replays)
        executor.capture()
        if stream is not None:
            torch.cuda.synchronize()
            stream.__exit__(None, None, None)
    storage.device_pool.fill_(torch.nan)
    return ModelRunner(storage, executor, context_tokens=160)


def host_runner(directory: Path, kv_cache_dtype: str = "auto") -> ModelRunner:
    runner = build_runner(
        EngineSettings(
            model_dir=directory,
            model_name="tiny",
            device="cpu",
            block_size=BLOCK,
            kv_cache_memory=f"{NUM_BLOCKS}blocks",
            host_cache_memory="0",
            threads=1,
            dtype="float32",
            kv_cache_dtype=kv_cache_dtype,
        )
    )
    runner.storage.device_pool.fill_(torch.nan)
    return runner


def script(seed: int, params: list[SamplingParams], num_steps: int) -> list[StepPlan]:
    """Requests come in chunks, decode beside each other, leave in mid-answer, and others take their slots."""
    rng = random.Random(seed)
    free = list(range(NUM_BLOCKS))
    rng.shuffle(free)
    running: dict[str, dict[str, Any]] = {}
    plans = []
    for step in range(num_steps):
        removed, admitted, rows = [], [], []
        for name in [name for name, its in running.items() if its["left"] == 0]:
            free.extend(running.pop(name)["blocks"])
            removed.append(RequestId(name))
        while len(running) < MAX_ROWS and rng.random() < 0.7:
            name = f"r{step}.{len(running)}"
            prompt = [rng.randrange(3, VOCAB) for _ in range(rng.choice([1, 2, 7, 13, 22]))]
            its = {"prompt": len(prompt), "done": 0, "blocks": [], "left": rng.randint(1, 5)}
            running[name] = its
            sampling = params[rng.randrange(len(params))]
            admitted.append(Admitted(RequestId(name), tuple(prompt), len(prompt), 0, (), sampling))
        for name, its in running.items():
            known = its["prompt"] if its["done"] < its["prompt"] else its["done"] + 1
            count = min(known - its["done"], rng.choice([1, 5, 9]))
            if its["done"] and its["done"] < its["prompt"] and rng.random() < 0.2:
                continue
            end = its["done"] + count
            new = [free.pop() for _ in range(-(-end // BLOCK) - len(its["blocks"]))]
            its["blocks"] += new
            sample = end == known
            its["left"] -= sample
            rows.append(Row(RequestId(name), its["done"], count, tuple(map(BlockId, new)), sample=sample))
            its["done"] = end
        plans.append(StepPlan(step, tuple(removed), Transfers(), tuple(admitted), tuple(rows)))
    return plans


def play(runner: ModelRunner, plans: list[StepPlan]) -> dict[str, list[int]]:
    """Two steps in flight all the time: nobody looks at an id before the next step is launched."""
    texts: dict[str, list[int]] = {}
    launched: list[Any] = []

    def read(plan: StepPlan, step: Any) -> None:
        tokens = iter(step.wait().token_ids)
        for row in plan.rows:
            if row.sample:
                texts.setdefault(row.request_id, []).append(next(tokens))
        assert next(tokens, None) is None

    for plan in plans:
        launched.append((plan, runner.launch(plan)))
        runner.check()
        if len(launched) > 1:
            read(*launched.pop(0))
    for each in launched:
        read(*each)
    return texts


DRAWN = [
    GREEDY,
    SamplingParams(temperature=1.0, seed=5, top_p=1.0),
    SamplingParams(temperature=0.7, seed=9, top_p=0.9, top_k=20),
    SamplingParams(temperature=1.0, seed=2, presence_penalty=0.7, repetition_penalty=1.3, frequency_penalty=0.2),
]


def test_any_mixture_of_steps_says_what_a_cpu_says(llama_dir: Path) -> None:
    plans = script(1, DRAWN, 9)
    assert play(device_runner(llama_dir, SHAPES), plans) == play(host_runner(llama_dir), plans)


def test_steps_of_prompts_alone_between_mixed_ones(llama_dir: Path) -> None:
    """A plan of no decoding rows is not sent again, and is not taken for one when there are some."""
    ids = tuple(range(5, 29))
    first, second = RequestId("a"), RequestId("b")
    admitted = [Admitted(name, ids, 24, 0, tuple(map(BlockId, range(at, at + 8))), GREEDY) for name, at in
                ((first, 0), (second, 40))]  # fmt: skip
    steps = [
        ((admitted[0],), (Row(first, 0, 12, (), sample=False),)),
        ((), (Row(first, 12, 12, (), sample=True),)),
        ((admitted[1],), (Row(first, 24, 1, (), sample=True), Row(second, 0, 9, (), sample=False))),
        ((), (Row(second, 9, 8, (), sample=False),)),
        ((), (Row(second, 17, 7, (), sample=True),)),
        ((), (Row(first, 25, 1, (), sample=True), Row(second, 24, 1, (), sample=True))),
    ]
    plans = [StepPlan(number, (), Transfers(), new, rows) for number, (new, rows) in enumerate(steps)]
    assert play(device_runner(llama_dir, [GraphShape(4, 16, 2)]), plans) == play(host_runner(llama_dir), plans)


@pytest.mark.parametrize("family", ["mistral-window", "qwen3"])
def test_windows_and_norms_of_heads_are_replayed_too(family: str, tmp_path: Path) -> None:
    make_model(tmp_path, {**OUR_FAMILIES[family], "num_hidden_layers": 2, "head_dim": 16})
    plans = script(2, [GREEDY], 6)
    assert play(device_runner(tmp_path, SHAPES), plans) == play(host_runner(tmp_path), plans)


def test_steps_that_fit_no_graph_run_eagerly_and_agree(llama_dir: Path) -> None:
    plans = script(3, [GREEDY], 6)
    assert play(device_runner(llama_dir, []), plans) == play(host_runner(llama_dir), plans)


def test_8_bit_kv_is_scaled_as_the_checkpoint_says_on_both_ways(llama_dir: Path, tmp_path: Path) -> None:
    """Kernels rotate keys and round them on their way into the pool; the CPU does one after the other."""
    scaled = shutil.copytree(llama_dir, tmp_path / "scaled")
    scales = ((0.015625, 0.00390625), (0.03125, 0.0078125))
    add_kv_scales(scaled, scales)
    plans = script(4, [GREEDY], 5)
    by_device = device_runner(scaled, SHAPES, kv_cache_dtype="fp8")
    assert by_device.storage.scales == by_device.model.info.kv_scales == scales
    assert play(by_device, plans) == play(host_runner(scaled, "fp8"), plans)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_random_scripts_on_a_gpu(llama_dir: Path, dtype: str) -> None:
    """In float32 the texts are the CPU's; in 16 bits, those of the same steps without padding."""
    for seed in range(20):
        plans = script(seed, DRAWN if dtype == "float32" else [GREEDY], 25)
        got = play(device_runner(llama_dir, SHAPES, dtype), plans)
        expected = play(host_runner(llama_dir) if dtype == "float32" else device_runner(llama_dir, [], dtype), plans)
        differing = sum(got[name] != expected[name] for name in expected)
        assert differing <= (0 if dtype == "float32" else len(expected) // 10), f"seed {seed}"


@pytest.mark.parametrize("max_rows", [1, 3, 8, 100, 256, 300, 1024])
def test_every_number_of_rows_has_a_class_and_few_are_padded_much(max_rows: int) -> None:
    classes = row_classes(max_rows)
    assert classes == sorted(set(classes))
    assert classes[-1] == max_rows
    for rows in range(1, max_rows + 1):
        padded = next(each for each in classes if each >= rows)
        assert padded <= max(2 * rows, 8)
        assert padded - rows < 256


@pytest.mark.parametrize("max_rows", [1, 5, 64, 256])
def test_shapes_hold_every_decode_batch_and_no_step_past_the_limit(max_rows: int) -> None:
    shapes = step_shapes(max_rows, 8192)
    assert shapes == sorted(shapes, key=lambda shape: -shape.num_tokens)
    assert max(shape.max_rows for shape in shapes) == max_rows
    assert all(shape.num_tokens <= 513 for shape in shapes)
    assert any(shape.max_rows == 1 and shape.max_tokens == 512 for shape in shapes)
