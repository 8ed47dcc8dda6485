"""Our own definition of the Llama family: Llama, SmolLM, Mistral, Qwen2, Qwen3.

One pre-norm decoder over a packed batch: query, key and value come from one merged product, gate and up from another;
what happens between the products is a device's business (`ops`). Numerically it is transformers' model of the same
configuration (checked on random ones). Knows nothing of requests, blocks or sampling: KV goes through the backend.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from chatserve.errors import StartupError
from chatserve.model.kv_dtype import is_scale
from chatserve.model.linear import Linear, make_linear
from chatserve.model.ops import Rope, TorchOps
from chatserve.model.shapes import ModelInfo

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedConfig

    from chatserve.model.attention import StepAttention
    from chatserve.model.loader import TensorSource
    from chatserve.model.ops import Ops, RotaryAttention

_MODEL_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
_STATIC_ROPE = frozenset({"default", "linear", "llama3", "yarn"})
"""Scalings whose frequencies do not depend on the length of the sequence."""


def why_not(config: PreTrainedConfig) -> str | None:
    """Why this definition cannot run a configuration; None: it can."""
    if config.model_type not in _MODEL_TYPES:
        return f"model_type {config.model_type} is none of {', '.join(sorted(_MODEL_TYPES))}"
    if config.hidden_act != "silu":
        return f"hidden_act is {config.hidden_act}, not silu"
    if (rope := config.rope_parameters["rope_type"]) not in _STATIC_ROPE:
        return f"rope_type is {rope}, none of {', '.join(sorted(_STATIC_ROPE))}"
    if config.rope_parameters.get("partial_rotary_factor", 1.0) != 1.0:
        return "only a part of each head is rotated"
    return None


class _Layer(NamedTuple):
    input_norm: torch.Tensor
    qkv: Linear
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    output: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear
    window: int | None


class LlamaModel:
    """A loaded model. `forward` is inference only, and touches no memory but its weights and the backend's."""

    def __init__(self, config: PreTrainedConfig, weights: TensorSource) -> None:
        reason = why_not(config)
        if reason is not None:
            raise StartupError(f"the llama definition cannot run this model: {reason}; use --model-impl hf")
        heads: int = config.num_attention_heads
        head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // heads
        windows = [_window(config, index) for index in range(config.num_hidden_layers)]
        self.info = ModelInfo(
            num_layers=config.num_hidden_layers,
            num_heads=heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=head_dim,
            vocab_size=config.vocab_size,
            context_tokens=config.max_position_embeddings,
            impl="llama",
            windows=tuple(dict.fromkeys(windows)),
            kv_scales=_kv_scales(weights, config.num_hidden_layers),
        )
        self._eps: float = config.rms_norm_eps
        self._scale = head_dim**-0.5
        hidden: int = config.hidden_size
        self._embeddings = weights.take("model.embed_tokens.weight", (config.vocab_size, hidden))
        self._layers = [_load_layer(config, self.info, weights, index) for index in range(self.info.num_layers)]
        self._final_norm = weights.take("model.norm.weight", (hidden,))
        if config.tie_word_embeddings:
            weights.ignore("lm_head.weight")
            self._head = make_linear(self._embeddings)
        else:
            self._head = make_linear(weights.take("lm_head.weight", (config.vocab_size, hidden)))
        frequencies, factor = _rope_frequencies(config, head_dim)
        self.rope = Rope(frequencies.to(self._embeddings.device), factor)
        self.ops: Ops = TorchOps(self.rope, self._embeddings.dtype)
        """What runs between the products; may be set to another set of the same operations."""

    @torch.inference_mode()
    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, attention: StepAttention, logit_rows: torch.Tensor
    ) -> torch.Tensor:
        return self.logits(self.features(input_ids, positions, attention, logit_rows)).float()

    @torch.inference_mode()
    def features(
        self, input_ids: torch.Tensor, positions: torch.Tensor, attention: StepAttention, logit_rows: torch.Tensor
    ) -> torch.Tensor:
        ops, eps = self.ops, self._eps
        rotary = ops.rotary(attention, positions)
        residual = F.embedding(input_ids, self._embeddings)
        normed = ops.rms_norm(residual, self._layers[0].input_norm, eps)
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            attended = self._attend(index, layer, normed, rotary)
            if index == last:  # nothing past the last attention is of use to other tokens
                attended, residual = attended[logit_rows], residual[logit_rows]
            residual, normed = ops.add_norm(layer.output, attended, residual, layer.mlp_norm, eps)
            activated = ops.gated(layer.gate_up, normed)
            next_norm = self._final_norm if index == last else self._layers[index + 1].input_norm
            residual, normed = ops.add_norm(layer.down, activated, residual, next_norm, eps)
        return normed

    @torch.inference_mode()
    def logits(self, features: torch.Tensor) -> torch.Tensor:
        return self._head(features)

    def _attend(self, index: int, layer: _Layer, normed: torch.Tensor, rotary: RotaryAttention) -> torch.Tensor:
        """[num_tokens, num_heads * head_dim]"""
        info = self.info
        num_tokens = normed.shape[0]
        rotated = info.num_heads + info.num_kv_heads
        heads = layer.qkv(normed).view(num_tokens, rotated + info.num_kv_heads, info.head_dim)
        query_key, value = heads[:, :rotated], heads[:, rotated:]
        if layer.query_norm is not None and layer.key_norm is not None:
            query = self.ops.rms_norm(heads[:, : info.num_heads], layer.query_norm, self._eps)
            key = self.ops.rms_norm(heads[:, info.num_heads : rotated], layer.key_norm, self._eps)
            query_key = torch.cat((query, key), dim=1)
        attended = rotary.attend(
            index, query_key, value, num_heads=info.num_heads, scale=self._scale, window=layer.window
        )
        return attended.reshape(num_tokens, -1)


def _load_layer(config: PreTrainedConfig, info: ModelInfo, weights: TensorSource, index: int) -> _Layer:
    prefix = f"model.layers.{index}."
    hidden: int = config.hidden_size
    query_width, key_width = info.num_heads * info.head_dim, info.num_kv_heads * info.head_dim
    # Qwen2 has biases on these three and does not say so; the others say it.
    bias = config.model_type == "qwen2" or getattr(config, "attention_bias", False)
    output_bias = config.model_type != "qwen2" and getattr(config, "attention_bias", False)
    mlp_bias = getattr(config, "mlp_bias", False)
    normed = config.model_type == "qwen3"
    weights.ignore(f"{prefix}self_attn.rotary_emb.inv_freq")

    def merged(parts: Sequence[tuple[str, int]], width: int, *, bias: bool) -> Linear:
        weight = weights.take_merged([(f"{prefix}{name}.weight", rows) for name, rows in parts], width)
        biases = weights.take_merged([(f"{prefix}{name}.bias", rows) for name, rows in parts]) if bias else None
        return make_linear(weight, biases)

    return _Layer(
        input_norm=weights.take(f"{prefix}input_layernorm.weight", (hidden,)),
        qkv=merged(
            [("self_attn.q_proj", query_width), ("self_attn.k_proj", key_width), ("self_attn.v_proj", key_width)],
            hidden,
            bias=bias,
        ),
        query_norm=weights.take(f"{prefix}self_attn.q_norm.weight", (info.head_dim,)) if normed else None,
        key_norm=weights.take(f"{prefix}self_attn.k_norm.weight", (info.head_dim,)) if normed else None,
        output=merged([("self_attn.o_proj", hidden)], query_width, bias=output_bias),
        mlp_norm=weights.take(f"{prefix}post_attention_layernorm.weight", (hidden,)),
        gate_up=merged(
            [("mlp.gate_proj", config.intermediate_size), ("mlp.up_proj", config.intermediate_size)],
            hidden,
            bias=mlp_bias,
        ),
        down=merged([("mlp.down_proj", hidden)], config.intermediate_size, bias=mlp_bias),
        window=_window(config, index),
    )


def _kv_scales(weights: TensorSource, num_layers: int) -> tuple[tuple[float, float], ...]:
    """What llm-compressor calls `k_scale` and `v_scale`; empty where there are none.

    Raises:
        StartupError: some are missing, or one is not above 0.
    """
    names = [f"model.layers.{layer}.self_attn.{side}_scale" for layer in range(num_layers) for side in "kv"]
    found = {name: number for name in names if (number := weights.take_number(name)) is not None}
    if not found:
        return ()
    for name in names:
        if name not in found:
            raise StartupError(f"the model lacks the KV scale {name}, though it has others; is it a whole model?")
        if not is_scale(found[name]):
            raise StartupError(f"the KV scale {name} is {found[name]:g}; it must be finite and above 0")
    return tuple((found[key], found[value]) for key, value in zip(names[::2], names[1::2], strict=True))


def _window(config: PreTrainedConfig, layer: int) -> int | None:
    layer_types = getattr(config, "layer_types", None)
    sliding = layer_types is None or layer_types[layer] == "sliding_attention"
    return getattr(config, "sliding_window", None) if sliding else None


def _rope_frequencies(config: PreTrainedConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    """Radians a token, float32 [head_dim / 2], and the factor on cosines and sines."""
    rope_type: str = config.rope_parameters["rope_type"]
    if rope_type == "default":
        base: float = config.rope_parameters["rope_theta"]
        return 1.0 / (base ** (torch.arange(0, head_dim, 2, dtype=torch.float) / head_dim)), 1.0
    return ROPE_INIT_FUNCTIONS[rope_type](config)
