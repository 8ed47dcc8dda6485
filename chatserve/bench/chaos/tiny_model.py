"""A model that is small enough to be started hundreds of times, behind a real tokenizer and chat template.

Its weights are random, so what it says is as wild as Unicode allows, and so wide that rounding turns no greedy choice.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Final

from chatserve.errors import StartupError
from chatserve.model import catalog

CONTEXT_TOKENS: Final = 4096
_SOURCE: Final = "smollm2-135m"
_KEPT_FILES: Final = ("tokenizer", "special_tokens", "chat_template", "generation_config")
_SHAPE: Final[dict[str, Any]] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": CONTEXT_TOKENS,
}


def make_tiny_model(target: Path, cache_dir: Path, *, seed: int = 0) -> Path:
    """Write the model to the directory `target` and return it.

    Raises:
        StartupError: the default model, whose tokenizer it takes, is not there.
    """
    import torch  # noqa: PLC0415 - nothing else here needs it
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415
    from transformers.utils.logging import disable_progress_bar  # noqa: PLC0415

    disable_progress_bar()  # type: ignore[no-untyped-call]
    source = catalog.resolve(_SOURCE, cache_dir)
    if source is None:
        raise StartupError(f"{_SOURCE} is not here yet; `chatserve model pull {_SOURCE}` fetches it")
    target.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.name.startswith(_KEPT_FILES):
            shutil.copy(file, target)
    config = AutoConfig.from_pretrained(source)
    config.update(_SHAPE)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.4)
    model.save_pretrained(target)
    return target
