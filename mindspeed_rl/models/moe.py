"""Mixture-of-experts families whose attention is Llama's: Mixtral, Qwen2-MoE, Qwen3-MoE share this."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindspeed_rl.models.architecture import (
    ExpertPacking,
    attention_ops,
    dense_mlp_ops,
    expert_ops,
    gated_mlp_ops,
    mlp_norm_op,
    router_ops,
)
from mindspeed_rl.models.model_config import ModelConfig, read_size, read_sizes
from mindspeed_rl.models.weights import WeightOp

#: No layer has as many; a larger number in config.json is a mistake that would take hours to go through.
_MOST_EXPERTS = 10_000


def read_sparse_layers(hf_config: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Which layers have experts, from Qwen's ``decoder_sparse_step`` and ``mlp_only_layers``."""
    step = read_size(hf_config, "decoder_sparse_step", 1)
    dense = set(read_sizes(hf_config, "mlp_only_layers"))
    return tuple(layer for layer in range(num_layers) if layer not in dense and (layer + 1) % step == 0)


def read_num_experts(hf_config: Mapping[str, Any]) -> int:
    """The number of experts, whatever the config calls it; ValueError if it is missing."""
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        if hf_config.get(key):
            return read_size(hf_config, key, most=_MOST_EXPERTS)
    raise ValueError("config.json has none of num_experts, num_local_experts, n_routed_experts; a MoE checkpoint needs one")


def qwen_moe_layer_ops(model_config: ModelConfig, layer: int, packing: ExpertPacking) -> list[WeightOp]:
    """A Qwen MoE decoder layer: routed experts, and Qwen2-MoE's shared expert with its gate."""
    if not model_config.is_moe_layer(layer):
        return [*attention_ops(model_config, layer), *dense_mlp_ops(model_config, layer)]
    mcore, hf = f"decoder.layers.{layer}.mlp", f"model.layers.{layer}.mlp"
    ops = [
        *attention_ops(model_config, layer),
        mlp_norm_op(model_config, layer),
        *router_ops(model_config, layer, f"{hf}.gate"),
    ]
    ops += expert_ops(model_config, layer, f"{hf}.experts", packing)
    if model_config.moe_shared_expert_intermediate_size:
        size = model_config.moe_shared_expert_intermediate_size
        ops += gated_mlp_ops(f"{mcore}.shared_experts", f"{hf}.shared_expert", layer, model_config.hidden_size, size)
    if model_config.moe_shared_expert_gate:
        gate = (f"{hf}.shared_expert_gate.weight",)
        ops.append(WeightOp(f"{mcore}.shared_experts.gate_weight", gate, ((1, model_config.hidden_size),), layer=layer))
    return ops
