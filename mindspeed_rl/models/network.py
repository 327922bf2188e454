"""What a language model looks like, in Megatron's words and without importing torch or Megatron."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the length the model was first trained on.

    ``linear`` divides every frequency by ``factor``; ``llama3`` divides the low ones and blends the middle ones
    (Llama 3.1); ``yarn`` is arXiv:2309.00071.
    """

    type: Literal["linear", "llama3", "yarn"]
    factor: float
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True


@dataclass(frozen=True)
class Network:
    """Shape facts of one model; the names are Megatron's, so they can be compared with a training script.

    ``num_layers`` counts real decoder layers only: neither no-op layers of a pipeline layout nor multi-token-prediction
    layers. ``padded_vocab_size`` is the number of embedding rows in Megatron, ``vocab_size`` the number in HF.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    vocab_size: int
    padded_vocab_size: int
    max_position_embeddings: int
    untie_embeddings_and_output_weights: bool
    add_qkv_bias: bool = False
    qk_layernorm: bool = False
    normalization: Literal["RMSNorm"] = "RMSNorm"
    norm_epsilon: float = 1e-6
    layernorm_zero_centered_gamma: bool = False
    post_norm: bool = False
    activation: Literal["silu", "gelu_tanh"] = "silu"
    head: Literal["lm", "reward"] = "lm"

    rotary_base: float = 10000.0
    rotary_percent: float = 1.0
    rotary_interleaved: bool = False
    rope_scaling: RopeScaling | None = None

    sliding_window: int | None = None
    sliding_window_layers: tuple[int, ...] = ()
    query_scale: float | None = None
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    embedding_scale: float | None = None

    num_moe_experts: int | None = None
    moe_layers: tuple[int, ...] = ()
    moe_ffn_hidden_size: int | None = None
    moe_router_topk: int = 0
    moe_router_pre_softmax: bool = False
    moe_router_score_function: Literal["softmax", "sigmoid"] = "softmax"
    moe_router_enable_expert_bias: bool = False
    moe_router_num_groups: int | None = None
    moe_router_group_topk: int | None = None
    moe_router_topk_scaling_factor: float | None = None
    moe_shared_expert_intermediate_size: int | None = None
    moe_shared_expert_gate: bool = False
    moe_aux_loss_coeff: float = 0.0

    multi_latent_attention: bool = False
    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None
    qk_head_dim: int | None = None
    qk_pos_emb_head_dim: int | None = None
    v_head_dim: int | None = None

    mtp_num_layers: int = 0

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_query_groups:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of num_query_groups {self.num_query_groups}"
            )
        if self.padded_vocab_size < self.vocab_size:
            raise ValueError(f"padded_vocab_size {self.padded_vocab_size} is below vocab_size {self.vocab_size}")

    def padded(self, make_vocab_size_divisible_by: int = 1, tp_size: int = 1) -> Network:
        """The same network with its vocabulary padded to a multiple of ``make_vocab_size_divisible_by`` x ``tp_size``."""
        multiple = make_vocab_size_divisible_by * tp_size
        return replace(self, padded_vocab_size=math.ceil(self.vocab_size / multiple) * multiple)

    def with_head(self, head: Literal["lm", "reward"]) -> Network:
        """The same network that ends in vocabulary logits (``lm``) or in one score per token (``reward``)."""
        return replace(self, head=head)

    def is_moe_layer(self, layer: int) -> bool:
        """Whether the decoder layer with this global number (from 0) holds experts."""
        return layer in self.moe_layers


REWARD_HEAD_CLASS_SUFFIX = "ForSequenceClassification"


def require(hf_config: Mapping[str, Any], key: str) -> Any:
    """The value of a key that config.json must have; ValueError naming the key otherwise."""
    if hf_config.get(key) is None:
        raise ValueError(f"config.json has no {key!r}; a {hf_config.get('model_type', 'model')} checkpoint needs it")
    return hf_config[key]


def read_rope(hf_config: Mapping[str, Any], default_base: float = 10000.0) -> dict[str, Any]:
    """``rotary_base``, ``rotary_percent`` and ``rope_scaling`` of a config.json, old or new spelling.

    transformers 5 writes one ``rope_parameters`` mapping; earlier releases write ``rope_theta``, ``rope_scaling`` and
    ``partial_rotary_factor`` at the top level.

    Raises:
        ValueError: the scaling type is not one that Megatron's rotary embedding can express.
    """
    new = hf_config.get("rope_parameters") or {}
    scaling = dict(hf_config.get("rope_scaling") or {}) or dict(new)
    base = new.get("rope_theta") or hf_config.get("rope_theta") or default_base
    percent = new.get("partial_rotary_factor") or hf_config.get("partial_rotary_factor") or 1.0
    return {
        "rotary_base": float(base),
        "rotary_percent": float(percent),
        "rope_scaling": _read_scaling(scaling, int(hf_config.get("max_position_embeddings", 0))),
    }


def _read_scaling(scaling: Mapping[str, Any], max_positions: int) -> RopeScaling | None:
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling("linear", float(scaling["factor"]))
    original = int(scaling.get("original_max_position_embeddings") or max_positions)
    if kind == "llama3":
        return RopeScaling(
            "llama3",
            float(scaling["factor"]),
            original,
            low_freq_factor=float(scaling["low_freq_factor"]),
            high_freq_factor=float(scaling["high_freq_factor"]),
        )
    if kind == "yarn":
        return RopeScaling(
            "yarn",
            float(scaling["factor"]),
            original,
            beta_fast=float(scaling.get("beta_fast") or 32),
            beta_slow=float(scaling.get("beta_slow") or 1),
            mscale=scaling.get("mscale"),
            mscale_all_dim=scaling.get("mscale_all_dim"),
            attention_factor=scaling.get("attention_factor"),
            truncate=bool(scaling.get("truncate", True)),
        )
    raise ValueError(f"config.json asks for rope type {kind!r}; supported are default, linear, llama3 and yarn")


def read_common(hf_config: Mapping[str, Any], architecture: str, *, tied_by_default: bool = False) -> dict[str, Any]:
    """The Network fields that nearly every decoder-only config.json spells the same way."""
    hidden, heads = int(require(hf_config, "hidden_size")), int(require(hf_config, "num_attention_heads"))
    vocab = int(require(hf_config, "vocab_size"))
    names = hf_config.get("architectures") or []
    return {
        "architecture": architecture,
        "num_layers": int(require(hf_config, "num_hidden_layers")),
        "hidden_size": hidden,
        "ffn_hidden_size": int(require(hf_config, "intermediate_size")),
        "num_attention_heads": heads,
        "num_query_groups": int(hf_config.get("num_key_value_heads") or heads),
        "kv_channels": int(hf_config.get("head_dim") or hidden // heads),
        "vocab_size": vocab,
        "padded_vocab_size": vocab,
        "max_position_embeddings": int(hf_config.get("max_position_embeddings") or 2048),
        "untie_embeddings_and_output_weights": not hf_config.get("tie_word_embeddings", tied_by_default),
        "norm_epsilon": float(hf_config.get("rms_norm_eps", 1e-6)),
        "head": "reward" if any(name.endswith(REWARD_HEAD_CLASS_SUFFIX) for name in names) else "lm",
        **read_rope(hf_config),
    }


def require_activation(hf_config: Mapping[str, Any], allowed: tuple[str, ...] = ("silu",)) -> None:
    """Raise ValueError unless the MLP activation is one the architecture is defined with."""
    activation = hf_config.get("hidden_activation") or hf_config.get("hidden_act") or allowed[0]
    if activation not in allowed:
        raise ValueError(f"config.json has activation {activation!r}; this architecture is built with {' or '.join(allowed)}")
