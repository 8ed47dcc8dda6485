from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from chatserve.chat import forwarding, leases, orphans
from chatserve.chat.prompt import PromptEncoder
from tests.chat.harness import Encoders, Harness
from tests.chat.models import make_model_dir


@pytest.fixture(scope="session")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> Encoders:
    """Each made when first asked for."""
    return _Encoders(tmp_path_factory.mktemp("models"))


@pytest.fixture
async def harness(encoders: Encoders) -> AsyncIterator[Harness]:
    """With nothing set; idle and as it should be at the end."""
    async with Harness(encoders["chatml"]) as harness:
        yield harness
        await harness.idle()
        await harness.check()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers that wait for each other a moment where they would wait for seconds."""
    monkeypatch.setattr(leases, "CONFIRM_S", 0.0)
    monkeypatch.setattr(orphans, "LEAST_PAUSE_S", 0.01)
    monkeypatch.setattr(forwarding, "ASK_AGAIN_S", 0.05)
    monkeypatch.setattr(forwarding, "UNHEARD_PAUSE_S", 0.01)


class _Encoders(Encoders):
    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root = root

    def __missing__(self, kind: str) -> PromptEncoder:
        encoder = self[kind] = PromptEncoder(make_model_dir(self.root / kind, kind))
        return encoder
