"""A role's network keys beside the config.json that its model is built from: what is written must agree, the rest follows.

A model block (`configs/model/<name>.yaml`) is a set of defaults: it stands in where no config.json is at hand, and gives way to
it elsewhere. Only what a run file or an override writes itself is held against the model.
"""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

from mindspeed_rl.config import MegatronConfig, RunConfig
from mindspeed_rl.models.layout import noop_layers
from mindspeed_rl.models.network import Network, RopeScaling


def described(config: MegatronConfig, network: Network, path: Path, written: frozenset[str]) -> MegatronConfig:
    """Return the role with every network key that nobody wrote as the model has it.

    A role without network keys (no model block, nothing written) stays without them.

    Args:
        network: of the config.json at `path`.
        written: keys that the run file or an override sets for this role, model blocks not included.

    Raises:
        ValueError: a written key contradicts the model; all of them are named.
    """
    expected, optional = _expected(config, network), _expected_where_set(config, network)
    held = {name: value for name, value in expected.items() if name in written}
    held |= {name: value for name, value in optional.items() if name in written and getattr(config, name) is not None}
    _refuse(held, config, path)
    if config.num_layers is None:
        return config
    changes = {name: _as_key(value) for name, value in (expected | optional).items() if name not in written}
    if not network.multi_latent_attention and not written & {"group_query_attention", "num_query_groups"}:
        grouped = network.num_query_groups != network.num_attention_heads
        changes |= {"group_query_attention": grouped, "num_query_groups": network.num_query_groups}
    if "padded_vocab_size" not in written and (config.padded_vocab_size or 0) < network.vocab_size:
        changes["padded_vocab_size"] = None
    return dataclasses.replace(config, **changes)


def without_network_keys(config: MegatronConfig) -> MegatronConfig:
    """Return the role as one whose shape config.json alone says; for weights of another model than the keys describe."""
    return dataclasses.replace(config, num_layers=None, padded_vocab_size=None)


def reward_model_config(cfg: RunConfig) -> MegatronConfig | None:
    """Keys of the reward model: those of reward_config, or the actor's with the weights of `rl_config.reward_model`.

    None when only functions score.
    """
    if cfg.rl_config is None or (cfg.reward_config is None and cfg.rl_config.reward_model is None):
        return None
    config = copy.copy(cfg.reward_config or cfg.actor_config)
    if cfg.rl_config.reward_model is not None:
        config = without_network_keys(config)  # which say what the group's own weights are
        config.load, config.pretrained_checkpoint = cfg.rl_config.reward_model, None
        if cfg.reward_config is None:
            config.tokenizer_name_or_path = None
        config.load_iteration = None
    config.finetune, config.save, config.lora_target_modules = True, None, None
    return config


def check_network_keys(config: MegatronConfig, network: Network, path: Path) -> None:
    """Raises ValueError when a role's keys describe another model than config.json; a role without them is right.

    Keys whose unset value means "as the model has it" are compared only where they are set.
    """
    if config.num_layers is None:
        return
    optional = _expected_where_set(config, network)
    set_ones = {key: value for key, value in optional.items() if getattr(config, key) is not None}
    _refuse(_expected(config, network) | set_ones, config, path)


def _refuse(expected: dict[str, Any], config: MegatronConfig, path: Path) -> None:
    wrong = [
        f"{key}: {getattr(config, key)} (there {value})" for key, value in expected.items() if getattr(config, key) != value
    ]
    if wrong:
        raise ValueError(f"model: the run file's network keys do not describe the model of {path}: {'; '.join(wrong)}.")


def _as_key(value: Any) -> Any:
    """A number as the schema has it: the base of the frequencies is a whole one."""
    return int(value) if isinstance(value, float) and value == int(value) and abs(value) >= 1 else value


def _expected(config: MegatronConfig, network: Network) -> dict[str, Any]:
    latent = network.multi_latent_attention
    expected = {
        # the key counts empty layers, as Megatron does
        "num_layers": network.num_layers + len(noop_layers(config)),
        "hidden_size": network.hidden_size,
        "num_attention_heads": network.num_attention_heads,
        # with latent attention the key may say either
        "qk_layernorm": network.qk_layernorm or latent and config.qk_layernorm,
        "num_experts": network.num_moe_experts,
        "untie_embeddings_and_output_weights": network.untie_embeddings_and_output_weights,
        "disable_bias_linear": True,
        "add_qkv_bias": network.add_qkv_bias,
        "swiglu": network.activation == "silu",
        "normalization": network.normalization,
        "norm_epsilon": network.norm_epsilon,
        "position_embedding_type": "rope",
        "rotary_base": network.rotary_base,
        "multi_latent_attention": latent,
        **_scaling_keys(network.rope_scaling),
    }
    if config.group_query_attention:
        expected["num_query_groups"] = network.num_query_groups
    elif not latent and network.num_query_groups != network.num_attention_heads:
        expected["group_query_attention"] = True
    if network.num_moe_experts is not None:
        expected |= {
            "moe_router_topk": network.moe_router_topk,
            "moe_router_score_function": network.moe_router_score_function,
            "moe_router_enable_expert_bias": network.moe_router_enable_expert_bias,
            # a softmax over the chosen experts equals one over all, renormalised over the chosen
            "norm_topk_prob": not network.moe_router_pre_softmax,
        }
    return expected


def _expected_where_set(config: MegatronConfig, network: Network) -> dict[str, Any]:
    expected: dict[str, Any] = {}
    if network.num_moe_experts is None:
        expected["ffn_hidden_size"] = network.ffn_hidden_size
    else:
        assert network.moe_ffn_hidden_size is not None  # every network with experts says it
        shared = network.moe_shared_expert_intermediate_size or 0
        expected |= {
            "moe_ffn_hidden_size": network.moe_ffn_hidden_size,
            "moe_router_num_groups": network.moe_router_num_groups,
            "moe_router_group_topk": network.moe_router_group_topk,
            "moe_router_topk_scaling_factor": network.moe_router_topk_scaling_factor,
            "n_shared_experts": shared // network.moe_ffn_hidden_size,
            "first_k_dense_replace": network.moe_layers[0] if network.moe_layers else network.num_layers,
        }
    if network.multi_latent_attention:
        names = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
        expected |= {name: getattr(network, name) for name in names}
    else:
        expected["kv_channels"] = network.kv_channels
    return expected


def _scaling_keys(scaling: RopeScaling | None) -> dict[str, str | float | None]:
    """The run file's words for how a network stretches its rotary frequencies."""
    if scaling is None:
        return {"rope_scaling_type": None}
    keys: dict[str, str | float | None] = {"rope_scaling_type": scaling.type, "rope_scaling_factor": scaling.factor}
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
