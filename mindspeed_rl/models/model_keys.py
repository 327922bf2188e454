"""A role's model keys and the config.json that its model is built from: written keys must agree, the others take its values.

A model block (`configs/model/<name>.yaml`) is a set of defaults: it is used where no config.json is available, and config.json
replaces it elsewhere. Only keys that a run file or an override sets are compared with the model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.models import find_architecture
from mindspeed_rl.models.architecture import Architecture
from mindspeed_rl.models.layout import parse_ints
from mindspeed_rl.models.model_config import LinearAttention, ModelConfig, RopeScaling

#: value of a model key, of a type for each key
_Value: TypeAlias = Any

#: keys without which no model block describes a model
_SIZES = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "padded_vocab_size")

#: keys of latent attention, under the same names in a model's shape
_LATENT_SIZES = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")


#: keys of gated delta nets, under the same names after `linear_` in a model's shape
_LINEAR_SIZES = ("conv_kernel_dim", "key_head_dim", "value_head_dim", "num_key_heads", "num_value_heads")


def fill_model_keys(config: MegatronConfig, model_config: ModelConfig, path: Path, written: frozenset[str]) -> MegatronConfig:
    """Return the role with the model's value for every model key that is not written.

    A role without model keys (no model block, nothing written) stays without them.

    Args:
        model_config: model config from the config.json at `path`.
        written: keys that the run file or an override sets for this role, model blocks not included.

    Raises:
        ValueError: a written key contradicts the model; all of them are named.
    """
    expected, optional = _expected(config, model_config), _expected_where_set(config, model_config)
    checked = {name: value for name, value in expected.items() if name in written}
    checked |= {name: value for name, value in optional.items() if name in written and getattr(config, name) is not None}
    _refuse(checked, config, path)
    if model_config.moe_aux_loss_coeff is not None and not written & {"moe_aux_loss_coeff", "seq_aux"}:
        config = dataclasses.replace(config, moe_aux_loss_coeff=model_config.moe_aux_loss_coeff, seq_aux=model_config.seq_aux)
    if config.num_layers is None:
        return config
    # numbers as the schema has them: the base of the frequencies is a whole one
    changes: dict[str, _Value] = {
        name: int(value) if isinstance(value, float) and value == int(value) and abs(value) >= 1 else value
        for name, value in (expected | optional).items()
        if name not in written
    }
    if not model_config.multi_latent_attention and not written & {"group_query_attention", "num_query_groups"}:
        grouped = model_config.num_query_groups != model_config.num_attention_heads
        changes |= {"group_query_attention": grouped, "num_query_groups": model_config.num_query_groups}
    if "padded_vocab_size" not in written and (config.padded_vocab_size or 0) < model_config.vocab_size:
        changes["padded_vocab_size"] = None
    return dataclasses.replace(config, **changes)


def check_model_keys(config: MegatronConfig, model_config: ModelConfig, path: Path) -> None:
    """Raise ValueError when a role's keys describe another model than config.json; a role without them passes.

    Keys whose default is the model's value are compared only where they are set.
    """
    if config.num_layers is None:
        return
    optional = _expected_where_set(config, model_config)
    set_values = {key: value for key, value in optional.items() if getattr(config, key) is not None}
    _refuse(_expected(config, model_config) | set_values, config, path)


def _refuse(expected: Mapping[str, _Value], config: MegatronConfig, path: Path) -> None:
    wrong = [
        f"{key}: {getattr(config, key)} (there {value})" for key, value in expected.items() if getattr(config, key) != value
    ]
    if wrong:
        raise ValueError(f"model: the run file's model keys do not describe the model of {path}: {'; '.join(wrong)}.")


def _expected(config: MegatronConfig, model_config: ModelConfig) -> dict[str, _Value]:
    latent = model_config.multi_latent_attention
    expected: dict[str, _Value] = {
        # the key counts empty layers, as Megatron does
        "num_layers": model_config.num_layers + len(parse_ints(config.noop_layers)),
        "hidden_size": model_config.hidden_size,
        "num_attention_heads": model_config.num_attention_heads,
        # with latent attention the key may have either value
        "qk_layernorm": model_config.qk_layernorm or latent and config.qk_layernorm,
        "num_experts": model_config.num_moe_experts,
        "untie_embeddings_and_output_weights": model_config.untie_embeddings_and_output_weights,
        "disable_bias_linear": not model_config.add_bias_linear,
        "add_qkv_bias": model_config.add_qkv_bias,
        "swiglu": model_config.activation != "gelu_tanh",
        "normalization": model_config.normalization,
        "norm_epsilon": model_config.norm_epsilon,
        "position_embedding_type": "rope",
        "rotary_base": model_config.rotary_base,
        "multi_latent_attention": latent,
        **_scaling_keys(model_config.rope_scaling),
    }
    if config.group_query_attention:
        expected["num_query_groups"] = model_config.num_query_groups
    elif not latent and model_config.num_query_groups != model_config.num_attention_heads:
        expected["group_query_attention"] = True
    if model_config.num_moe_experts is not None:
        expected |= {
            "moe_router_topk": model_config.moe_router_topk,
            "moe_router_score_function": model_config.moe_router_score_function,
            "moe_router_enable_expert_bias": model_config.moe_router_enable_expert_bias,
            # a softmax over the chosen experts equals one over all, renormalised over the chosen
            "norm_topk_prob": not model_config.moe_router_pre_softmax,
        }
    return expected


def _expected_where_set(config: MegatronConfig, model_config: ModelConfig) -> dict[str, _Value]:
    expected: dict[str, _Value] = {}
    if model_config.vision is not None or config.model_type is not None:
        expected["model_type"] = model_config.architecture
    if model_config.num_moe_experts is None:
        expected["ffn_hidden_size"] = model_config.ffn_hidden_size
    else:
        assert model_config.moe_ffn_hidden_size is not None  # set in every model with experts
        shared = model_config.moe_shared_expert_intermediate_size or 0
        expected |= {
            "moe_ffn_hidden_size": model_config.moe_ffn_hidden_size,
            "moe_router_num_groups": model_config.moe_router_num_groups,
            "moe_router_group_topk": model_config.moe_router_group_topk,
            "moe_router_topk_scaling_factor": model_config.moe_router_topk_scaling_factor,
            "n_shared_experts": shared // model_config.moe_ffn_hidden_size,
            "first_k_dense_replace": model_config.moe_layers[0] if model_config.moe_layers else model_config.num_layers,
        }
    expected["rotary_percent"] = model_config.rotary_percent
    expected["linear_attention_freq"] = _find_frequency(model_config)
    if (linear := model_config.linear_attention) is not None:
        expected |= {f"linear_{name}": getattr(linear, name) for name in _LINEAR_SIZES}
    if model_config.multi_latent_attention:
        expected |= {name: getattr(model_config, name) for name in _LATENT_SIZES}
    else:
        expected["kv_channels"] = model_config.kv_channels
    return expected


def _scaling_keys(scaling: RopeScaling | None) -> dict[str, _Value]:
    """Return the run file's keys for the stretching of rotary frequencies."""
    if scaling is None:
        return {"rope_scaling_type": None}
    keys: dict[str, _Value] = {"rope_scaling_type": scaling.type, "rope_scaling_factor": scaling.factor}
    if scaling.type == "llama3":
        keys |= {
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_position_embeddings,
        }
    elif scaling.type == "yarn":
        keys |= {
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
            "rope_scaling_mscale": 1.0 if scaling.mscale is None else scaling.mscale,
            "rope_scaling_mscale_all_dim": 0.0 if scaling.mscale_all_dim is None else scaling.mscale_all_dim,
            "rope_scaling_original_max_position_embeddings": scaling.original_max_position_embeddings,
        }
    return keys


def infer_model_config(config: MegatronConfig) -> tuple[Architecture, ModelConfig]:
    """Return the family and shape of a model block, as far as weights and their split depend on it.

    Raises:
        ValueError: a key is missing that the shape needs.
    """
    _check_sizes(config)
    sizes = (config.num_layers, config.hidden_size, config.num_attention_heads, config.padded_vocab_size)
    num_layers, hidden, heads, vocab = (size or 0 for size in sizes)
    layers = num_layers - len(parse_ints(config.noop_layers))
    ffn = config.ffn_hidden_size or config.moe_ffn_hidden_size or 0
    family = _choose_family(config)
    shape: dict[str, _Value] = {
        "architecture": family,
        "num_layers": layers,
        "hidden_size": hidden,
        "ffn_hidden_size": ffn,
        "num_attention_heads": heads,
        "num_query_groups": config.num_query_groups if config.group_query_attention else heads,
        "kv_channels": config.kv_channels or hidden // heads,
        "vocab_size": vocab,
        "padded_vocab_size": vocab,
        "max_position_embeddings": 2048,  # no byte depends on it: rotary positions have no end
        "untie_embeddings_and_output_weights": config.untie_embeddings_and_output_weights,
        "add_qkv_bias": config.add_qkv_bias,
        "qk_layernorm": config.qk_layernorm,
        "norm_epsilon": config.norm_epsilon,
        "rotary_base": config.rotary_base,
        "rotary_percent": config.rotary_percent or 1.0,
    }
    if config.num_experts is not None:
        shape |= _infer_experts(config, layers, ffn)
    if config.multi_latent_attention:
        shape |= {name: getattr(config, name) for name in _LATENT_SIZES} | {
            "multi_latent_attention": True,
            "num_query_groups": heads,
            "kv_channels": (config.qk_head_dim or 0) + (config.qk_pos_emb_head_dim or 0),
            "qk_layernorm": True,
        }
    model_config = ModelConfig(**shape)
    if config.linear_attention_freq is not None:
        model_config = _add_delta_nets(config, model_config)
    if config.model_type is None or config.model_type == family:
        return find_architecture(family), model_config
    architecture = find_architecture(config.model_type)
    if architecture.add_published_tower is None:
        raise ValueError(f"model_type {config.model_type}: the other model keys describe a model of family {family}")
    return architecture, architecture.add_published_tower(model_config)


def _list_delta_nets(num_layers: int, frequency: int) -> tuple[int, ...]:
    """Return the layers with gated delta nets where every `frequency`-th has full attention."""
    return tuple(layer for layer in range(num_layers) if (layer + 1) % frequency)


def _find_frequency(model_config: ModelConfig) -> int | None:
    """Return how often a layer has full attention; None for a model without delta nets, or with another order of layers."""
    if model_config.linear_attention is None:
        return None
    layers = set(model_config.linear_attention.layers)
    count = model_config.num_layers
    frequency = next((layer + 1 for layer in range(count) if layer not in layers), count + 1)
    return frequency if frequency > 1 and layers == {*_list_delta_nets(count, frequency)} else None


def _add_delta_nets(config: MegatronConfig, model_config: ModelConfig) -> ModelConfig:
    """Return the model with gated delta nets between layers whose attention has an output gate."""
    assert config.linear_attention_freq is not None
    sizes = {name: getattr(config, f"linear_{name}") for name in _LINEAR_SIZES}
    return dataclasses.replace(
        model_config,
        qk_layernorm=True,
        layernorm_zero_centered_gamma=True,
        attention_output_gate=True,
        linear_attention=LinearAttention(_list_delta_nets(model_config.num_layers, config.linear_attention_freq), **sizes),
    )


def _check_sizes(config: MegatronConfig) -> None:
    missing = [name for name in _SIZES if getattr(config, name) is None]
    if config.num_experts and config.moe_ffn_hidden_size is not None:
        missing = [name for name in missing if name != "ffn_hidden_size"]
    if missing:
        raise ValueError(
            f"model: the model keys {', '.join(missing)} are not set, and no folder of the model with a config.json is here; "
            "list a model block under defaults: [{model: [...]}], or name the folder in load or tokenizer_name_or_path."
        )


def _choose_family(config: MegatronConfig) -> str:
    """Return the family whose weights have the names and shapes that these keys describe."""
    kind = "dense" if config.num_experts is None else "experts"
    kind = "latent" if config.multi_latent_attention else kind
    kind = "hybrid" if config.linear_attention_freq is not None else kind
    # the first whose condition holds
    families = {
        "hybrid": (
            (config.model_type == "qwen3_next", "qwen3_next"),
            (config.num_experts, "qwen3_5_moe"),
            (True, "qwen3_5"),
        ),
        "latent": ((config.moe_router_score_function == "sigmoid", "deepseek_v3"), (True, "deepseek_v2")),
        "experts": ((config.n_shared_experts, "qwen2_moe"), (config.qk_layernorm, "qwen3_moe"), (True, "mixtral")),
        "dense": ((config.qk_layernorm, "qwen3"), (config.add_qkv_bias, "qwen2"), (True, "llama")),
    }
    return next(family for is_met, family in families[kind] if is_met)


def _infer_experts(config: MegatronConfig, layers: int, ffn: int) -> dict[str, _Value]:
    expert_ffn = config.moe_ffn_hidden_size or ffn
    return {
        "num_moe_experts": config.num_experts,
        "moe_layers": tuple(range(config.first_k_dense_replace or 0, layers)),
        "moe_ffn_hidden_size": expert_ffn,
        "moe_router_topk": config.moe_router_topk,
        "moe_router_score_function": config.moe_router_score_function,
        "moe_router_enable_expert_bias": config.moe_router_enable_expert_bias,
        "moe_shared_expert_intermediate_size": config.n_shared_experts * expert_ffn if config.n_shared_experts else None,
        "moe_shared_expert_gate": bool(config.n_shared_experts) and not config.multi_latent_attention,
    }
