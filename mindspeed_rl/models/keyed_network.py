"""The network that a role's keys describe, for plans of models whose config.json is not on this machine."""

from __future__ import annotations

from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.models import find_architecture
from mindspeed_rl.models.architecture import Architecture
from mindspeed_rl.models.layout import noop_layers
from mindspeed_rl.models.network import Network


def network_of_keys(config: MegatronConfig) -> tuple[Architecture, Network]:
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
            f"model: the network keys {', '.join(missing)} are not set, and no folder of the model with a config.json is here; "
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
    network = Network(
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
    return find_architecture(network.architecture), network


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
