"""What a language model looks like, in Megatron's words and without importing torch or Megatron."""

from __future__ import annotations

import json
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
class ModelConfig:
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
        if self.num_moe_experts is not None and self.moe_router_topk > self.num_moe_experts:
            raise ValueError(f"num_experts_per_tok {self.moe_router_topk} exceeds the {self.num_moe_experts} experts")
        if self.padded_vocab_size < self.vocab_size:
            raise ValueError(f"padded_vocab_size {self.padded_vocab_size} is below vocab_size {self.vocab_size}")

    def padded(self, make_vocab_size_divisible_by: int = 1, tp_size: int = 1) -> ModelConfig:
        """The same network with its vocabulary padded to a multiple of ``make_vocab_size_divisible_by`` x ``tp_size``.

        Raises:
            ValueError: ``make_vocab_size_divisible_by`` is below 1.
        """
        if make_vocab_size_divisible_by < 1:
            raise ValueError(f"make_vocab_size_divisible_by is {make_vocab_size_divisible_by}; it must be at least 1")
        multiple = make_vocab_size_divisible_by * tp_size
        return replace(self, padded_vocab_size=math.ceil(self.vocab_size / multiple) * multiple)

    def with_head(self, head: Literal["lm", "reward"]) -> ModelConfig:
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


def read_size(
    hf_config: Mapping[str, Any], key: str, default: int | None = None, *, least: int = 1, most: int = 2**31 - 1
) -> int:
    """A count or a length in config.json, where a missing key and null mean ``default``.

    Raises:
        ValueError: it is missing without a default, no whole number, or not from ``least`` to ``most``.
    """
    value = default if hf_config.get(key) is None and default is not None else require(hf_config, key)
    # JSON has one kind of number: a whole one may come as 4096.0
    whole = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value == int(value)
    if not whole or not least <= value <= most:
        raise _unfit(key, value, f"a whole number from {least} to {most}")
    return int(value)


def read_sizes(hf_config: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """A list of numbers from 0 in config.json, empty if there is none; ValueError if it is anything else."""
    values = hf_config.get(key) or []
    if not isinstance(values, list) or not all(isinstance(value, int) and value >= 0 for value in values):
        raise _unfit(key, values, "a list of whole numbers from 0")
    return tuple(values)


def read_number(hf_config: Mapping[str, Any], key: str, default: float) -> float:
    """A positive number in config.json, ``default`` where the key is missing or null; ValueError for anything else."""
    value = default if hf_config.get(key) is None else hf_config[key]
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not (math.isfinite(value) and value > 0):
        raise _unfit(key, value, "a number above 0")
    return float(value)


def read_optional_number(hf_config: Mapping[str, Any], key: str) -> float | None:
    """A positive number in config.json, None where the key is missing or null; ValueError for anything else."""
    return None if hf_config.get(key) is None else read_number(hf_config, key, 1.0)


def read_flag(hf_config: Mapping[str, Any], key: str, default: bool = False) -> bool:
    """A truth value in config.json, ``default`` where the key is missing or null; ValueError for anything else."""
    value = hf_config.get(key)
    # 1 and 0 equal True and False, and pass
    if value not in (None, True, False):
        raise _unfit(key, value, "true or false")
    return default if value is None else bool(value)


def read_optional_size(hf_config: Mapping[str, Any], key: str) -> int | None:
    """A length in config.json, None where the key is missing, null or 0; ValueError if it is anything else."""
    return read_size(hf_config, key, 0, least=0) or None


def read_layer_types(hf_config: Mapping[str, Any], num_layers: int) -> tuple[str, ...]:
    """What config.json calls each layer, empty if it does not say; ValueError unless there is a name for every layer."""
    types = hf_config.get("layer_types") or []
    if not isinstance(types, list) or not all(isinstance(kind, str) for kind in types):
        raise _unfit("layer_types", types, "a list of names")
    if types and len(types) != num_layers:
        raise ValueError(f"config.json has {len(types)} layer_types for num_hidden_layers {num_layers}")
    return tuple(types)


def read_group(hf_config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """A group of settings in config.json, empty if there is none; ValueError if it is not a JSON object."""
    group = hf_config.get(key) or {}
    if not isinstance(group, Mapping):
        raise _unfit(key, group, "a JSON object")
    return group


def read_quantization_block(hf_config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and columns of a weight that share a scale in config.json; None for weights that are not quantized.

    Raises:
        ValueError: they are quantized in a way that is not read here.
    """
    settings = read_group(hf_config, "quantization_config")
    if not settings:
        return None
    method, block = settings.get("quant_method"), settings.get("weight_block_size")
    whole = isinstance(block, list) and len(block) == 2 and all(isinstance(size, int) and size > 0 for size in block)
    if method != "fp8" or not whole:
        raise ValueError(
            f"config.json has a quantization_config with quant_method {method!r} and weight_block_size {block!r}; read are "
            "weights without one, and fp8 with a block of two sizes"
        )
    assert isinstance(block, list)
    return block[0], block[1]


def _unfit(key: str, value: Any, expected: str) -> ValueError:
    shown = json.dumps(value)
    return ValueError(f"config.json has {key} {shown if len(shown) <= 60 else shown[:60] + '...'}; expected {expected}")


#: No model has as many; a larger number in config.json is a mistake that would take hours to go through.
_MOST_LAYERS = 10_000


def read_rope(hf_config: Mapping[str, Any], default_base: float = 10000.0) -> dict[str, Any]:
    """``rotary_base``, ``rotary_percent`` and ``rope_scaling`` of a config.json, old or new spelling.

    transformers 5 writes one ``rope_parameters`` mapping; earlier releases write ``rope_theta``, ``rope_scaling`` and
    ``partial_rotary_factor`` at the top level.

    Raises:
        ValueError: the scaling type is not one that Megatron's rotary embedding can express.
    """
    new = read_group(hf_config, "rope_parameters")
    scaling = dict(read_group(hf_config, "rope_scaling")) or dict(new)
    base = read_number(new, "rope_theta", read_number(hf_config, "rope_theta", default_base))
    percent = read_number(new, "partial_rotary_factor", read_number(hf_config, "partial_rotary_factor", 1.0))
    return {
        "rotary_base": base,
        "rotary_percent": percent,
        "rope_scaling": _read_scaling(scaling, read_size(hf_config, "max_position_embeddings", 0, least=0)),
    }


def _read_scaling(scaling: Mapping[str, Any], max_positions: int) -> RopeScaling | None:
    # older configs say type, newer ones rope_type
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling("linear", _scale(scaling, "factor"))
    original = read_size(scaling, "original_max_position_embeddings", max_positions, least=0)
    if kind == "llama3":
        return RopeScaling(
            "llama3",
            _scale(scaling, "factor"),
            original,
            low_freq_factor=_scale(scaling, "low_freq_factor"),
            high_freq_factor=_scale(scaling, "high_freq_factor"),
        )
    if kind == "yarn":
        return RopeScaling(
            "yarn",
            _scale(scaling, "factor"),
            original,
            beta_fast=read_number(scaling, "beta_fast", 32),
            beta_slow=read_number(scaling, "beta_slow", 1),
            mscale=read_optional_number(scaling, "mscale"),
            mscale_all_dim=read_optional_number(scaling, "mscale_all_dim"),
            attention_factor=read_optional_number(scaling, "attention_factor"),
            truncate=read_flag(scaling, "truncate", True),
        )
    raise ValueError(f"config.json asks for rope type {kind!r}; supported are default, linear, llama3 and yarn")


def _scale(scaling: Mapping[str, Any], key: str) -> float:
    if scaling.get(key) is None:
        raise ValueError(f"config.json has no {key!r} among the settings of its rope type")
    return read_number(scaling, key, 1.0)


def read_common(hf_config: Mapping[str, Any], architecture: str, *, tied_by_default: bool = False) -> dict[str, Any]:
    """The ModelConfig fields that nearly every decoder-only config.json spells the same way."""
    hidden, heads = read_size(hf_config, "hidden_size"), read_size(hf_config, "num_attention_heads")
    vocab = read_size(hf_config, "vocab_size")
    names = hf_config.get("architectures") or []
    # the head size that follows would be 0
    if heads > hidden and not hf_config.get("head_dim"):
        raise ValueError(f"config.json has num_attention_heads {heads}, more than its hidden_size {hidden}")
    if "rms_norm_eps" in hf_config and hf_config["rms_norm_eps"] is None:
        raise _unfit("rms_norm_eps", None, "a number above 0")
    return {
        "architecture": architecture,
        "num_layers": read_size(hf_config, "num_hidden_layers", most=_MOST_LAYERS),
        "hidden_size": hidden,
        "ffn_hidden_size": read_size(hf_config, "intermediate_size"),
        "num_attention_heads": heads,
        "num_query_groups": read_size(hf_config, "num_key_value_heads", heads),
        "kv_channels": read_optional_size(hf_config, "head_dim") or hidden // heads,
        "vocab_size": vocab,
        "padded_vocab_size": vocab,
        "max_position_embeddings": read_optional_size(hf_config, "max_position_embeddings") or 2048,
        "untie_embeddings_and_output_weights": not read_flag(hf_config, "tie_word_embeddings", tied_by_default),
        "norm_epsilon": read_number(hf_config, "rms_norm_eps", 1e-6),
        "head": "reward" if any(name.endswith(REWARD_HEAD_CLASS_SUFFIX) for name in names) else "lm",
        **read_rope(hf_config),
    }


def require_activation(hf_config: Mapping[str, Any], allowed: tuple[str, ...] = ("silu",)) -> None:
    """Raise ValueError unless the MLP activation is one the architecture is defined with."""
    # Gemma 2 has both keys and computes with hidden_activation
    activation = hf_config.get("hidden_activation") or hf_config.get("hidden_act") or allowed[0]
    if activation not in allowed:
        raise ValueError(f"config.json has activation {activation!r}; this architecture is built with {' or '.join(allowed)}")
