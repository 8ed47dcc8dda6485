from __future__ import annotations

from pathlib import Path

import pytest

from chatserve.chat.prompt import PromptEncoder
from tests.chat.models import make_model_dir


@pytest.fixture(scope="session")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PromptEncoder]:
    """By kind of template, made when first asked for."""
    return _Encoders(tmp_path_factory.mktemp("models"))


class _Encoders(dict[str, PromptEncoder]):
    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root = root

    def __missing__(self, kind: str) -> PromptEncoder:
        encoder = self[kind] = PromptEncoder(make_model_dir(self.root / kind, kind))
        return encoder
