"""Any transformers causal language model, run through our paged attention.

The library lets an attention function be registered by name and passes extra keyword arguments down to it, so the
model's own code runs unchanged over a packed `[1, num_tokens]` batch, with no mask and no cache of its own, and its
keys and values are written where ours are. Also the oracle that our own definitions must equal. Must not know about
requests.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.logging import disable_progress_bar

from chatserve.errors import StartupError
from chatserve.model.shapes import ModelInfo

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedConfig

    from chatserve.model.attention import StepAttention

ATTENTION_NAME = "chatserve_paged"
_LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})
_UNSUPPORTED = ("s_aux", "position_bias", "cu_seq_lens_q")
"""Arguments that change what attention computes, and that ours does not know."""


def _paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    chatserve_step: StepAttention,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """What the library calls in each layer.

    `query` [1, num_heads, num_tokens, head_dim], keys and values alike; returns [1, num_tokens, num_heads, head_dim].
    """
    assert attention_mask is None
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise _UnsupportedError(f"its attention uses {name}")
    if not getattr(module, "is_causal", True) or kwargs.get("is_causal") is False:
        raise _UnsupportedError("its attention is not causal")
    if key.shape != value.shape:
        raise _UnsupportedError(f"its keys {list(key.shape)} and values {list(value.shape)} differ in shape")
    layer = module.layer_idx
    assert isinstance(layer, int)
    out = chatserve_step.attend(
        layer,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
    )
    return out.unsqueeze(0), None


class _UnsupportedError(Exception):
    """The model asks for something that paged attention here does not do."""


class _Probe:
    """A `StepAttention` that only notes what each layer asks for."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int, int, int]] = []
        """(layer, num_heads, num_kv_heads, head_dim)"""
        self.windows: list[int | None] = []

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        del value, scale, softcap
        self.windows.append(window)
        self.calls.append((layer, query.shape[1], key.shape[1], key.shape[2]))
        return torch.zeros_like(query)


class HFModel:
    """A `CausalModel` around `AutoModelForCausalLM`."""

    def __init__(self, directory: Path, config: PreTrainedConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, _paged_attention)
        disable_progress_bar()  # type: ignore[no-untyped-call]  # a log is no place for one
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                directory,
                config=config,
                dtype=dtype,
                attn_implementation=ATTENTION_NAME,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
        except (ValueError, OSError, RuntimeError, ImportError) as error:
            raise StartupError(f"transformers cannot load {directory}: {_first_line(error)}") from error
        model, loading = loaded
        for problem in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
            if names := sorted(map(str, loading.get(problem) or ())):
                raise StartupError(
                    f"{directory}: {problem.replace('_', ' ')} among the weights: {', '.join(names[:4])}"
                )
        self._model = model.eval().to(device)
        parameters = inspect.signature(self._model.forward).parameters
        self._slices_logits = "logits_to_keep" in parameters
        if "position_ids" not in parameters:
            raise StartupError(f"{config.model_type} takes no position_ids, so that it cannot be run packed")
        self.info = self._measure(config, device)

    @torch.inference_mode()
    def features(
        self, input_ids: torch.Tensor, positions: torch.Tensor, attention: StepAttention, logit_rows: torch.Tensor
    ) -> torch.Tensor:
        """The logits themselves: what lies before them is each model's own affair."""
        if self._slices_logits:
            return self._call(input_ids, positions, attention, logits_to_keep=logit_rows)
        return self._call(input_ids, positions, attention)[logit_rows]

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        return features

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, attention: StepAttention, logit_rows: torch.Tensor
    ) -> torch.Tensor:
        return self.features(input_ids, positions, attention, logit_rows)

    def _call(
        self, input_ids: torch.Tensor, positions: torch.Tensor, attention: StepAttention, **kwargs: Any
    ) -> torch.Tensor:
        output = self._model(
            input_ids=input_ids[None],
            position_ids=positions[None],
            attention_mask=None,
            use_cache=False,
            chatserve_step=attention,
            **kwargs,
        )
        logits: torch.Tensor = output.logits[0].float()
        return logits

    def _measure(self, config: PreTrainedConfig, device: torch.device) -> ModelInfo:
        """Run two tokens to see every layer's attention, rather than trust what a configuration calls things."""
        text = config.get_text_config()
        probe = _Probe()
        ids = torch.zeros(2, dtype=torch.int64, device=device)
        try:
            logits = self.forward(ids, torch.arange(2, device=device), probe, torch.tensor([1], device=device))
        except (_UnsupportedError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise StartupError(f"{config.model_type} cannot be served: {_first_line(error)}") from error
        layers = [layer for layer, *_ in probe.calls]
        if layers != list(range(text.num_hidden_layers)):
            raise StartupError(
                f"{config.model_type} cannot be served: {len(layers)} of its {text.num_hidden_layers} layers keep KV"
            )
        shapes = {call[1:] for call in probe.calls}
        if len(shapes) != 1:
            raise StartupError(
                f"{config.model_type} cannot be served: its layers' KV differ in shape: {sorted(shapes)}"
            )
        num_heads, num_kv_heads, head_dim = shapes.pop()
        return ModelInfo(
            num_layers=len(layers),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            vocab_size=logits.shape[-1],
            context_tokens=_context_tokens(text),
            impl="hf",
            windows=tuple(dict.fromkeys(probe.windows)),
        )


def _context_tokens(config: PreTrainedConfig) -> int:
    """The longest sequence whose positions all mean the same whatever its length is."""
    longest = int(config.max_position_embeddings)
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
        if parameters.get("rope_type") in _LENGTH_DEPENDENT_ROPE:
            original = parameters.get("original_max_position_embeddings")
            original = original or getattr(config, "original_max_position_embeddings", None)
            longest = min(longest, int(original or longest))
    return longest


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
