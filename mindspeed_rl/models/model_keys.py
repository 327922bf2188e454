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
from mindspeed_rl.models import find_architecture
from mindspeed_rl.models.architecture import Architecture
from mindspeed_rl.models.layout import noop_layers
from mindspeed_rl.models.model_config import ModelConfig, RopeScaling


def described(config: MegatronConfig, model_config: ModelConfig, path: Path, written: frozenset[str]) -> MegatronConfig:
    """Return the role with every network key that nobody wrote as the model has it.

    A role without network keys (no model block, nothing written) stays without them.

    Args:
        model_config: of the config.json at `path`.
        written: keys that the run file or an override sets for this role, model blocks not included.

    Raises:
        ValueError: a written key contradicts the model; all of them are named.
    """
    expected, optional = _expected(config, model_config), _expected_where_set(config, model_config)
    held = {name: value for name, value in expected.items() if name in written}
    held |= {name: value for name, value in optional.items() if name in written and getattr(config, name) is not None}
    _refuse(held, config, path)
    if config.num_layers is None:
        return config
    changes = {name: _as_key(value) for name, value in (expected | optional).items() if name not in written}
    if not model_config.multi_latent_attention and not written & {"group_query_attention", "num_query_groups"}:
        grouped = model_config.num_query_groups != model_config.num_attention_heads
        changes |= {"group_query_attention": grouped, "num_query_groups": model_config.num_query_groups}
    if "padded_vocab_size" not in written and (config.padded_vocab_size or 0) < model_config.vocab_size:
        changes["padded_vocab_size"] = None
    return dataclasses.replace(config, **changes)


def without_model_keys(config: MegatronConfig) -> MegatronConfig:
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
        config = without_model_keys(config)  # which say what the group's own weights are
        config.load, config.pretrained_checkpoint = cfg.rl_config.reward_model, None
        if cfg.reward_config is None:
            config.tokenizer_name_or_path = None
        config.load_iteration = None
    config.finetune, config.save, config.lora_target_modules = True, None, None
    return config


def check_model_keys(config: MegatronConfig, model_config: ModelConfig, path: Path) -> None:
    """Raises ValueError when a role's keys describe another model than config.json; a role without them is right.

    Keys whose unset value means "as the model has it" are compared only where they are set.
    """
    if config.num_layers is None:
        return
    optional = _expected_where_set(config, model_config)
    set_ones = {key: value for key, value in optional.items() if getattr(config, key) is not None}
    _refuse(_expected(config, model_config) | set_ones, config, path)


def _refuse(expected: dict[str, Any], config: MegatronConfig, path: Path) -> None:
    wrong = [
        f"{key}: {getattr(config, key)} (there {value})" for key, value in expected.items() if getattr(config, key) != value
    ]
    if wrong:
        raise ValueError(f"model: the run file's model keys do not describe the model of {path}: {'; '.join(wrong)}.")


def _as_key(value: Any) -> Any:
    """A number as the schema has it: the base of the frequencies is a whole one."""
    return int(value) if isinstance(value, float) and value == int(value) and abs(value) >= 1 else value


def _expected(config: MegatronConfig, model_config: ModelConfig) -> dict[str, Any]:
    latent = model_config.multi_latent_attention
    expected = {
        # the key counts empty layers, as Megatron does
        "num_layers": model_config.num_layers + len(noop_layers(config)),
        "hidden_size": model_config.hidden_size,
        "num_attention_heads": model_config.num_attention_heads,
        # with latent attention the key may say either
        "qk_layernorm": model_config.qk_layernorm or latent and config.qk_layernorm,
        "num_experts": model_config.num_moe_experts,
        "untie_embeddings_and_output_weights": model_config.untie_embeddings_and_output_weights,
        "disable_bias_linear": True,
        "add_qkv_bias": model_config.add_qkv_bias,
        "swiglu": model_config.activation == "silu",
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


def _expected_where_set(config: MegatronConfig, model_config: ModelConfig) -> dict[str, Any]:
    expected: dict[str, Any] = {}
    if model_config.num_moe_experts is None:
        expected["ffn_hidden_size"] = model_config.ffn_hidden_size
    else:
        assert model_config.moe_ffn_hidden_size is not None  # every network with experts says it
        shared = model_config.moe_shared_expert_intermediate_size or 0
        expected |= {
            "moe_ffn_hidden_size": model_config.moe_ffn_hidden_size,
            "moe_router_num_groups": model_config.moe_router_num_groups,
            "moe_router_group_topk": model_config.moe_router_group_topk,
            "moe_router_topk_scaling_factor": model_config.moe_router_topk_scaling_factor,
            "n_shared_experts": shared // model_config.moe_ffn_hidden_size,
            "first_k_dense_replace": model_config.moe_layers[0] if model_config.moe_layers else model_config.num_layers,
        }
    if model_config.multi_latent_attention:
        names = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
        expected |= {name: getattr(model_config, name) for name in names}
    else:
        expected["kv_channels"] = model_config.kv_channels
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


def infer_model_config(config: MegatronConfig) -> tuple[Architecture, ModelConfig]:
    """Return the family and shape that a model block says, as far as weights and their cuts depend on it.

    Raises:
        ValueError: a key is missing that the shape cannot do without.
    """
    needed = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "padded_vocab_size")
    missing = [name for name in needed if getattr(config, name) is None]
    if config.num_experts and config.moe_ffn_hidden_size is not None:
        missing = [name for name in missing if name != "ffn_hidden_size"]
    if missing:
        raise ValueError(
            f"model: the model keys {', '.join(missing)} are not set, and no folder of the model with a config.json is here; "
            "list a model block under defaults: [{model: [...]}], or name the folder in load or tokenizer_name_or_path."
        )
    layers = _whole(config.num_layers) - len(noop_layers(config))
    hidden, heads = _whole(config.hidden_size), _whole(config.num_attention_heads)
    ffn = config.ffn_hidden_size or _whole(config.moe_ffn_hidden_size)
    latent = config.multi_latent_attention
    width = config.kv_channels or hidden // heads
    if latent:
        width = (config.qk_head_dim or 0) + (config.qk_pos_emb_head_dim or 0)
    experts, shared = config.num_experts, None
    expert_ffn = None if experts is None else config.moe_ffn_hidden_size or ffn
    if expert_ffn is not None and config.n_shared_experts:
        shared = config.n_shared_experts * expert_ffn
    model_config = ModelConfig(
        architecture=_family(config),
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        num_attention_heads=heads,
        num_query_groups=config.num_query_groups if config.group_query_attention and not latent else heads,
        kv_channels=width,
        vocab_size=_whole(config.padded_vocab_size),
        padded_vocab_size=_whole(config.padded_vocab_size),
        max_position_embeddings=2048,  # no byte depends on it: rotary positions have no end
        untie_embeddings_and_output_weights=config.untie_embeddings_and_output_weights,
        add_qkv_bias=config.add_qkv_bias,
        qk_layernorm=config.qk_layernorm or latent,
        norm_epsilon=config.norm_epsilon,
        rotary_base=config.rotary_base,
        num_moe_experts=experts,
        moe_layers=() if experts is None else tuple(range(config.first_k_dense_replace or 0, layers)),
        moe_ffn_hidden_size=expert_ffn,
        moe_router_topk=config.moe_router_topk if experts is not None else 0,
        moe_router_score_function=config.moe_router_score_function,
        moe_router_enable_expert_bias=config.moe_router_enable_expert_bias,
        moe_shared_expert_intermediate_size=shared,
        moe_shared_expert_gate=shared is not None and not latent,
        multi_latent_attention=latent,
        q_lora_rank=config.q_lora_rank if latent else None,
        kv_lora_rank=config.kv_lora_rank if latent else None,
        qk_head_dim=config.qk_head_dim if latent else None,
        qk_pos_emb_head_dim=config.qk_pos_emb_head_dim if latent else None,
        v_head_dim=config.v_head_dim if latent else None,
    )
    return find_architecture(model_config.architecture), model_config


def _family(config: MegatronConfig) -> str:
    """The family whose weights have these names and shapes."""
    if config.multi_latent_attention:
        return "deepseek_v3" if config.moe_router_score_function == "sigmoid" else "deepseek_v2"
    if config.num_experts is not None:
        return "qwen2_moe" if config.n_shared_experts else "qwen3_moe" if config.qk_layernorm else "mixtral"
    return "qwen3" if config.qk_layernorm else "qwen2" if config.add_qkv_bias else "llama"


def _whole(value: int | None) -> int:
    assert value is not None
    return value
