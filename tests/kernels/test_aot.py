"""Whatever can be launched is compiled for a Hopper GPU, without one, and decode's kernels keep to their registers."""

from __future__ import annotations

import ast
import functools
import itertools
import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from chatserve_kernels.aot import calls, cover
from chatserve_kernels.aot.__main__ import main
from chatserve_kernels.aot.record import recording
from chatserve_kernels.configs import HEAD_DIMS, MAX_GROUP, default_configs
from hypothesis import given
from hypothesis import strategies as st

KERNELS = Path(__file__).parents[2] / "kernels"
PACKAGE = KERNELS / "chatserve_kernels"
ONE_VALUE = {
    "WIDEN": "the interpreter's",
    "DEPENDS": "a Hopper GPU's launches wait; where others run a kernel too, its family says so",
}


def aot(path: Path, *arguments: str) -> list[dict]:
    """In a process of its own, since this one may have chosen the interpreter."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": str(KERNELS)}
    command = [sys.executable, "-W", "ignore", "-m", "chatserve_kernels.aot", *arguments, "--json", str(path)]
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def listed(tmp_path_factory) -> list[dict]:
    return aot(tmp_path_factory.mktemp("aot") / "listed.json", "--list")


@functools.cache
def jit_functions() -> dict[str, ast.FunctionDef]:
    """Whatever the package has for Triton's compilers."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(each) for each in node.decorator_list):
                found[node.name] = node
    return found


@functools.cache
def kernels() -> dict[str, ast.FunctionDef]:
    """Those that no other one calls: they can only be launched."""
    functions = jit_functions()
    called = {
        node.id
        for function in functions.values()
        for node in ast.walk(function)
        if isinstance(node, ast.Name) and node.id != function.name
    }
    return {name: function for name, function in functions.items() if name not in called}


def test_every_kernel_is_in_the_list(listed):
    assert {row["kernel"] for row in listed} == set(kernels())


def test_every_option_of_every_kernel_takes_all_its_values(listed):
    seen = defaultdict(set)
    for row in listed:
        for name, value in row["constants"].items():
            seen[row["kernel"], name].add(value)
        for argument in kernels()[row["kernel"]].args.args:
            if argument.arg not in row["constants"]:
                seen[row["kernel"], argument.arg].add("given")
    for (kernel, name), values in seen.items():
        if any(isinstance(value, bool) for value in values) and name not in ONE_VALUE:
            assert {True, False} <= values, f"{kernel}: {name} is always {values}"
    for kernel, function in kernels().items():
        for node in ast.walk(function):
            if isinstance(node, ast.Compare) and ast.unparse(node).endswith("is not None"):
                assert {"given", None} <= seen[kernel, ast.unparse(node.left)]
    for kernel in ("attend_kernel", "attend_hopper_kernel", "merge_kernel"):
        assert set(range(1, MAX_GROUP + 1)) <= seen[kernel, "GROUP"]
    assert set(HEAD_DIMS) <= seen["attend_kernel", "HEAD_DIM"]
    assert {head_dim for head_dim in HEAD_DIMS if head_dim <= 128} <= seen["attend_hopper_kernel", "HEAD_DIM"]
    assert {1, 2} <= seen["attend_kernel", "DEPENDS"] & seen["attend_hopper_kernel", "DEPENDS"]
    assert {False, True} <= seen["chunk_kernel", "DEPENDS"]


def test_the_list_holds_the_tiles_of_every_batch():
    for head_dim, is_half in itertools.product(HEAD_DIMS, (False, True)):
        known = [
            default_configs(head_dim, is_half=is_half, max_rows=max_rows)
            for max_rows in (calls.FEW_ROWS, calls.MANY_ROWS)
        ]
        tiles = {tile for configs in known for tile in (configs.alone, configs.beside, configs.wide)}
        for max_rows in range(1, 1025):
            configs = default_configs(head_dim, is_half=is_half, max_rows=max_rows)
            assert {configs.alone, configs.beside, configs.wide} <= tiles, max_rows


def most_stack_bytes(row: dict) -> int | None:
    """What a decode kernel may spill: None is anything."""
    options = row["options"]
    queries, kv = options["elements"]
    if options["strides"] == "odd":
        return None  # every element is loaded by itself, at an address of its own
    if queries == "float32" and kv != "as queries":
        return None  # sums of products without tensor cores, and elements to widen
    if row["kernel"] == "attend_hopper_kernel":
        return 32 if options["softcap"] else 0  # arguments, read once an item
    if options["step"] == "few rows" and options["head_dim"] <= 64:
        return 48  # in 128 registers
    if options["head_dim"] == 256 and kv != "as queries":
        return 72
    return 0


@pytest.mark.timeout(900)  # some minutes of processor time on the first run; Triton keeps what it has compiled
def test_what_is_launched_compiles_and_decode_keeps_to_its_registers(tmp_path):
    rows = aot(tmp_path / "built.json", "--cover", "values", "--quiet", "--processes", "2")
    assert {row["kernel"] for row in rows} == set(kernels())
    for row in rows:
        label = row["label"]
        assert row["shared_bytes"] <= 227 * 1024, f"{label} does not fit"
        is_attention = row["family"].startswith("attention")
        if not is_attention:
            assert row["stack_bytes"] <= (8 if row["kernel"] == "choose_kernel" else 0), f"{label} spills"
        elif row["options"]["step"] != "prefill":
            most = most_stack_bytes(row)
            assert most is None or row["stack_bytes"] <= most, f"{label} spills {row['stack_bytes']} bytes"
        if row["kernel"] == "attend_hopper_kernel" and row["constants"]["WARPGROUPS"] == 1:
            assert 2 * row["registers"] * 256 <= 65_536, f"two of {label} do not fit a multiprocessor"
            assert 2 * (row["shared_bytes"] + 1024) <= 228 * 1024, f"two of {label} do not fit a multiprocessor"


AXES = st.lists(st.integers(1, 5), min_size=1, max_size=6).map(
    lambda sizes: {f"axis {index}": [f"{index}.{value}" for value in range(size)] for index, size in enumerate(sizes)}
)


def held(choices: list[dict], strength: int) -> set[tuple]:
    return {each for choice in choices for each in itertools.combinations(choice.items(), strength)}


@given(AXES)
def test_covers_hold_what_they_say(axes):
    everything = list(cover.product(axes))
    for choose, strength in ((cover.pairs, 2), (cover.triples, 3)):
        chosen = list(choose(axes))
        assert chosen == list(choose(axes)), "the same each time"
        assert held(chosen, min(strength, len(axes))) == held(everything, min(strength, len(axes)))
        assert len(chosen) <= len(everything)
    first = next(iter(axes))
    with_first = [pair for pair in held(everything, min(2, len(axes))) if pair[0][0] == first]
    assert set(with_first) <= held(list(cover.values(axes)), min(2, len(axes)))


def test_pairs_are_few():
    axes = {"a": range(10), "b": range(9), "c": range(3), "d": range(3), "e": range(2), "f": range(2)}
    assert len(list(cover.pairs(axes))) <= 100


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")
def test_interpreted_kernels_are_not_recorded():
    with pytest.raises(RuntimeError, match="got interpreted ones"), recording((9, 0)):
        pass


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--where", "group=17"], "group to be one of 1, 2, "),
        (["--only", "nothing"], "family to be one of attention, "),
        (["--where", "depth=1"], "option to be one of step, "),
        (["--where", "group"], "OPTION=VALUE, got group"),
        (["--processes", "0"], "at least 1 process, got 0"),
    ],
)
def test_wrong_options_are_told(arguments, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["aot", *arguments])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert said in capsys.readouterr().err
