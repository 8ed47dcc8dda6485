"""The real default model: our text is transformers' text."""

from __future__ import annotations

import pytest

from chatserve.bench import equality


@pytest.mark.model
@pytest.mark.timeout(600)
def test_five_prompts_of_sixteen_tokens_equal_transformers_generate() -> None:
    results = equality.run(num_prompts=5, num_tokens=16)
    assert results["passed"], results
    assert {row["impl"] for row in results["rows"]} == {"llama", "hf"}
    assert all(row["texts"] == 5 for row in results["rows"])
