"""What vLLM is asked for beside our engine, with a stand-in for its interface: our figures get their counterparts."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

import pytest

from chatserve.bench import _rival
from chatserve.bench._gpu_sections import DECODE_ROWS, SHARED_ROWS, work

if TYPE_CHECKING:
    from pathlib import Path

STAND_IN = """
class RequestOutputKind:
    DELTA = 1


class SamplingParams:
    def __init__(self, *, max_tokens, ignore_eos, detokenize, temperature, top_p=1.0, seed=None, output_kind=None):
        assert ignore_eos and not detokenize
        self.max_tokens = max_tokens


class _Completion:
    token_ids = (7,)


class _Output:
    def __init__(self, request_id):
        self.request_id, self.outputs = request_id, [_Completion()]


class _Engine:
    def __init__(self):
        self.left = {}

    def add_request(self, request_id, prompt, params):
        assert prompt["prompt_token_ids"] and request_id not in self.left
        self.left[request_id] = params.max_tokens

    def has_unfinished_requests(self):
        return bool(self.left)

    def step(self):
        outputs = [_Output(name) for name in self.left]
        self.left = {name: left - 1 for name, left in self.left.items() if left > 1}
        return outputs


class LLM:
    def __init__(self, *, model, max_model_len, **fields):
        assert open(model + "/config.json").read().startswith("{")
        self.llm_engine = _Engine()
        self._longest = max_model_len

    def generate(self, prompts, params, *, use_tqdm):
        assert all(len(each["prompt_token_ids"]) + params.max_tokens <= self._longest for each in prompts)
        for number in range(1000 * params.max_tokens):
            pass
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "packages" / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(STAND_IN)
    (package / "sampling_params.py").write_text("from vllm import RequestOutputKind\n")
    monkeypatch.setenv("PYTHONPATH", str(package.parent))


@pytest.mark.usefixtures("stand_in")
async def test_all_sections_come_with_our_names(tmp_path: Path) -> None:
    asked = {**work(1, 0.01), "mixed": (1, 10, 81, 0.05)}
    async with asyncio.timeout(100):
        theirs = await _rival.measure(type(tmp_path)(sys.executable), "tiny", asked, _rival.SECTIONS, tmp_path)
    assert set(theirs) == set(_rival.SECTIONS)
    assert len(theirs["decode"]) == len(DECODE_ROWS)
    assert len(theirs["shared"]) == len(SHARED_ROWS)
    assert {"p99_ms", "median_ms", "unmixed_median_ms", "first_token_ms"} <= set(theirs["mixed"])
    lines = list(_rival.comparison(theirs, theirs))
    assert len(lines) > len(DECODE_ROWS) + len(SHARED_ROWS)
    assert all(line.endswith(" 1.000") for line in lines)


@pytest.mark.usefixtures("stand_in")
async def test_a_rival_that_fails_costs_only_its_own_figures(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    asked = {**work(1, 0.01), "decode": [(1, 30_000)]}  # longer than it takes
    theirs = await _rival.measure(type(tmp_path)(sys.executable), "tiny", asked, ["turn", "decode"], tmp_path)
    assert set(theirs) == {"turn"}
    assert "vLLM ended with exit code 1" in capfd.readouterr().out
