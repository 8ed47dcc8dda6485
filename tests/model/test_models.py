"""Both model implementations over paged KV equal transformers' eager model, whatever the batch looks like."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from chatserve.errors import StartupError
from chatserve.model import llama
from chatserve.model.loader import load_model, read_config
from tests.model.tiny import OTHER_FAMILIES, OUR_FAMILIES, VOCAB, Paged, make_model, reference_logits

if TYPE_CHECKING:
    from pathlib import Path

CPU = torch.device("cpu")
FAMILIES = {**OUR_FAMILIES, **OTHER_FAMILIES}
BOTH = [(family, "llama") for family in OUR_FAMILIES] + [(family, "hf") for family in FAMILIES]


class Case:
    def __init__(self, directory: Path, family: str) -> None:
        self.directory = directory / family
        self.directory.mkdir()
        self.oracle = make_model(self.directory, FAMILIES[family])

    def paged(self, impl: str, **kwargs: Any) -> Paged:
        return Paged(load_model(self.directory, CPU, impl)[0], **kwargs)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, Case] = {}
    root = tmp_path_factory.mktemp("models")

    def case(family: str) -> Case:
        if family not in made:
            made[family] = Case(root, family)
        return made[family]

    return case


def some_ids(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("family", "impl"), BOTH)
def test_prefill_chunks_and_decode_equal_the_oracle(cases: Any, family: str, impl: str) -> None:
    case = cases(family)
    paged = case.paged(impl)
    ids = some_ids(37)
    expected = reference_logits(case.oracle, ids)
    got = []
    done = 0
    for count in (11, 1, 13, 5):  # starts and ends in the middle of blocks
        got += paged.step([("a", ids[: done + count], count)])
        done += count
    while done < len(ids):
        done += 1
        got += paged.step([("a", ids[:done], 1)])
    close(torch.cat(got), expected)


@pytest.mark.parametrize(("family", "impl"), BOTH)
def test_a_mixed_batch_equals_each_row_alone(cases: Any, family: str, impl: str) -> None:
    case = cases(family)
    paged = case.paged(impl)
    lengths = {"long": 61, "short": 3, "middle": 18, "fresh": 9, "chunk": 30}
    ids = {name: some_ids(length, seed) for seed, (name, length) in enumerate(lengths.items())}
    for name in ("long", "short", "middle"):
        if len(ids[name]) > 1:
            paged.step([(name, ids[name][:-1], len(ids[name]) - 1)])
    paged.step([("chunk", ids["chunk"][:14], 14)])
    rows = [("long", 1), ("fresh", 9), ("short", 1), ("chunk", 16), ("middle", 1)]
    for (name, count), got in zip(rows, paged.step([(name, ids[name], count) for name, count in rows]), strict=True):
        close(got, reference_logits(case.oracle, ids[name])[-count:])


@pytest.mark.parametrize("impl", ["llama", "hf"])
def test_a_rows_result_does_not_depend_on_its_neighbours(cases: Any, impl: str) -> None:
    case = cases("llama")
    alone, crowded = case.paged(impl), case.paged(impl, seed=3)
    ids = some_ids(21)
    others = {f"n{index}": some_ids(5 + 3 * index, 10 + index) for index in range(7)}
    alone.step([("a", ids[:-1], 20)])
    crowded.step([("a", ids[:-1], 20), *((name, its[:-1], len(its) - 1) for name, its in others.items())])
    (expected,) = alone.step([("a", ids, 1)])
    got = crowded.step([*((name, its, 1) for name, its in others.items()), ("a", ids, 1)])[-1]
    close(got, expected)


def test_rows_may_share_the_blocks_of_a_prefix(cases: Any) -> None:
    case = cases("llama")
    paged = case.paged("llama")
    shared = some_ids(16)
    paged.step([("a", shared, 16)])
    paged.tables["b"] = list(paged.tables["a"])
    for name, seed in (("a", 1), ("b", 2)):
        ids = shared + some_ids(6, seed)
        (got,) = paged.step([(name, ids, 6)])
        close(got, reference_logits(case.oracle, ids)[-6:])


@pytest.mark.parametrize("impl", ["llama", "hf"])
def test_only_the_rows_asked_for_have_logits(cases: Any, impl: str) -> None:
    case = cases("qwen3")
    paged = case.paged(impl)
    ids = some_ids(8)
    got = paged.step([("a", ids, 8)], logit_rows=[6, 2])
    close(torch.cat(got), reference_logits(case.oracle, ids)[[6, 2]])


def test_the_first_implementation_that_fits_is_chosen(cases: Any) -> None:
    assert load_model(cases("qwen2").directory, CPU, "auto")[0].info.impl == "llama"
    assert load_model(cases("gemma2").directory, CPU, "auto")[0].info.impl == "hf"
    assert llama.why_not(read_config(cases("gemma2").directory)) is not None


def test_an_implementation_that_cannot_run_a_model_says_why(cases: Any) -> None:
    with pytest.raises(StartupError, match="model_type gemma2"):
        load_model(cases("gemma2").directory, CPU, "llama")


def test_both_implementations_report_the_same_shape(cases: Any) -> None:
    for family in OUR_FAMILIES:
        ours, theirs = (load_model(cases(family).directory, CPU, impl)[0].info for impl in ("llama", "hf"))
        for name in ("num_layers", "num_heads", "num_kv_heads", "head_dim", "vocab_size", "context_tokens"):
            assert getattr(ours, name) == getattr(theirs, name)
