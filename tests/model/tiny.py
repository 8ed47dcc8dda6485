"""Tiny random models of several families, and packed batches over shuffled block tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from chatserve.model.attention import PackedBatch, TorchAttention
from chatserve.model.kv_storage import KVStorage
from chatserve.model.shapes import KVShape

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from chatserve.model.shapes import CausalModel

VOCAB = 97
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

OUR_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama-biased": {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "head_dim": 16},
    "llama-llama3-rope": {
        "model_type": "llama",
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "llama-linear-rope": {
        "model_type": "llama",
        "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    },
    "llama-yarn-rope": {
        "model_type": "llama",
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "smollm-tied": {
        "model_type": "llama",
        "tie_word_embeddings": True,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
    },
    "mistral-window": {"model_type": "mistral", "sliding_window": 9, "head_dim": 8},
    "mistral": {"model_type": "mistral", "sliding_window": None},
    "qwen2": {"model_type": "qwen2"},
    "qwen2-some-windows": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 7,
        "max_window_layers": 1,
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
}

OTHER_FAMILIES: dict[str, dict[str, Any]] = {
    "gemma2": {"model_type": "gemma2", "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 9},
    "gemma3": {"model_type": "gemma3_text", "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 9},
    "gpt_neox": {"model_type": "gpt_neox", "num_key_value_heads": None},
    "phi": {"model_type": "phi"},
}


def make_model(directory: Path, fields: dict[str, Any]) -> Any:
    """Write a random model of a family to a directory, with a tokenizer file; returns transformers' eager model."""
    merged = {**_COMMON, **fields}
    if merged["num_key_value_heads"] is None:
        del merged["num_key_value_heads"]
    config = AutoConfig.for_model(**merged)
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases are constants otherwise, and would hide mistakes
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(directory)
    (directory / "tokenizer.json").write_text("{}")
    return model


def add_kv_scales(directory: Path, scales: Sequence[tuple[float, float]]) -> None:
    """Add what each layer's 8-bit keys and values are to be multiplied by to a model's weights, as llm-compressor does:
    one number each, under `self_attn.k_scale` and `v_scale`."""
    (path,) = directory.glob("*.safetensors")
    tensors = load_file(path)
    for layer, pair in enumerate(scales):
        for side, scale in zip("kv", pair, strict=True):
            tensors[f"model.layers.{layer}.self_attn.{side}_scale"] = torch.tensor([scale])
    save_file(tensors, path, metadata={"format": "pt"})


def reference_logits(model: Any, ids: Sequence[int]) -> torch.Tensor:
    """[num_tokens, vocab_size]"""
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0]
    return logits


class Paged:
    """A model over a small pool filled with NaN; rows are given as (ids so far, number of new tokens)."""

    def __init__(
        self,
        model: CausalModel,
        *,
        num_blocks: int = 96,
        block_size: int = 4,
        seed: int = 0,
        kv_dtype: torch.dtype = torch.float32,
    ) -> None:
        info = model.info
        shape = KVShape(
            num_layers=info.num_layers,
            num_kv_heads=info.num_kv_heads,
            head_dim=info.head_dim,
            block_size=block_size,
        )
        self.model = model
        self.storage = KVStorage(
            shape,
            num_blocks=num_blocks,
            num_host_blocks=8,
            dtype=kv_dtype,
            device=torch.device("cpu"),
            compute_dtype=torch.float32,
            scales=info.kv_scales,
        )
        self.storage.device_pool.fill_(torch.nan)
        self.storage.host_pool.fill_(torch.nan)
        self.backend = TorchAttention(self.storage)
        self.free = list(np.random.default_rng(seed).permutation(num_blocks))
        self.tables: dict[str, list[int]] = {}

    def leave(self, name: str) -> None:
        """Its blocks are free, whatever they hold."""
        self.free += self.tables.pop(name)

    def step(
        self, rows: Sequence[tuple[str, Sequence[int], int]], logit_rows: list[int] | None = None
    ) -> list[torch.Tensor]:
        """Compute the last `n` tokens of each row; returns each row's logits of them, [n, vocab_size].

        With `logit_rows`, one tensor with those tokens' logits.
        """
        block_size = self.storage.shape.block_size
        for name, ids, _ in rows:
            table = self.tables.setdefault(name, [])
            while len(table) * block_size < len(ids):
                table.append(int(self.free.pop()))
        starts = np.array([len(ids) - count for _, ids, count in rows])
        lengths = np.array([count for *_, count in rows])
        width = max(len(self.tables[name]) for name, *_ in rows)
        # Padding of the tables names a block that does not exist: reading it would fail.
        tables = np.array([self.tables[name] + [10**6] * (width - len(self.tables[name])) for name, *_ in rows])
        ids = np.concatenate([np.array(ids[len(ids) - count :]) for _, ids, count in rows])
        positions = np.concatenate([np.arange(len(ids) - count, len(ids)) for _, ids, count in rows])
        logits = self.model.forward(
            torch.from_numpy(ids),
            torch.from_numpy(positions),
            self.backend.prepare(PackedBatch(starts, lengths, tables)),
            torch.arange(len(ids)) if logit_rows is None else torch.tensor(logit_rows),
        )
        return [logits] if logit_rows is not None else list(logits.split(lengths.tolist()))
