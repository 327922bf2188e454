"""The least that a step of a rank could ask of its device: each part of the network one kernel, each byte moved once.

For a model without pipeline stages. A layer's kernels are its norms, matrix products, rotary embeddings, attention, gated
activation and residual sums; backward has two products for each of forward's. What no kernel library fuses further is not
modelled: casts, biases, the sums of gradients over micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.models.model_config import ModelConfig
from mindspeed_rl.models.plan import ModelPlan
from mindspeed_rl.planner.activations import layer_bytes
from mindspeed_rl.planner.shapes import stage_elements


@dataclass(frozen=True)
class Least:
    """Attributes:
    kernels: of a phase; by phase in the words of `CostLedger`.
    waits: of the host.
    copies: between host and device.
    collective_bytes: of the larger side of every call, over the ranks of other groups than the rank alone.
    peak_bytes: most that is allocated at a time; 0 where it is not modelled.
    """

    kernels: int = 0
    waits: int = 0
    copies: int = 0
    collective_bytes: int = 0
    peak_bytes: int = 0


def least_costs(plan: ModelPlan, config: MegatronConfig, *, rows: list[int], tokens: int, replicas: int) -> dict[str, Least]:
    """The least of each phase on a rank that holds a whole model.

    Args:
        rows: of each micro-batch.
        tokens: of a row.
        replicas: data-parallel ranks.
    """
    model_config, count = plan.model_config, len(rows)
    layers = range(model_config.num_layers)
    forward = sum(_forward(model_config, model_config.is_moe_layer(layer)) for layer in layers) + 2  # embedding, last norm
    backward = sum(_backward(model_config, model_config.is_moe_layer(layer)) for layer in layers) + 2
    tp, itemsize = config.tensor_model_parallel_size, 2 if config.bf16 else 4
    # two exchanges of activations a layer, one behind the embedding and one in front of the head
    exchanges = 2 * model_config.num_layers + 2
    if config.sequence_parallel:
        exchanges *= 2  # a gather in front of each product, a scattered sum behind it
    activations = sum(rows) * tokens * model_config.hidden_size * itemsize * exchanges if tp > 1 else 0
    parameters = stage_elements(plan, config)[0].parameters
    shared = parameters * (4 + itemsize) if replicas > 1 else 0  # gradients in float32, weights
    optimizer = parameters * 12 // (replicas if config.use_distributed_optimizer else 1)
    kept = sum(
        layer_bytes(config, model_config, max(rows) * tokens, has_experts=model_config.is_moe_layer(layer)).kept
        for layer in layers
    )
    weights = parameters * itemsize
    resident = weights + parameters * 4 + optimizer
    return {
        "log-probs": Least(count * (forward + 2), 1, 2 * count, activations, resident),
        "update": Least(count * (forward + backward + 5) + 2, 1, count + 1, 2 * activations + shared, resident + round(kept)),
        "update / forward": Least(count * forward, 0, 0, activations),
        "update / backward": Least(count * backward, 0, 0, activations),
        "update / head": Least(count * 2),  # the product, and all of the loss
        "update / head, backward": Least(count * 3),
        "update / optimizer": Least(2, 1, 0, parameters * itemsize if replicas > 1 else 0),
        "update / gradients": Least(0, 0, 0, parameters * 4 if replicas > 1 else 0),
        "update / micro-batches": Least(0, 0, count),
        "offload": Least(0, 1, 2),
        "onload": Least(0, 0, 2),
    }


def _attention(model_config: ModelConfig) -> tuple[int, int]:
    """(norms, matrix products) of an attention block."""
    if model_config.multi_latent_attention:
        return 3, 5 if model_config.q_lora_rank else 4
    return 3 if model_config.qk_layernorm else 1, 2


def _forward(model_config: ModelConfig, has_experts: bool) -> int:
    norms, products = _attention(model_config)
    # rotary embedding of query and key, attention, two residual sums, the norm in front of the MLP
    common = norms + products + 2 + 1 + 2 + 1
    # with experts: the router, its choice, tokens to their experts and back
    return common + (7 if has_experts else 3)


def _backward(model_config: ModelConfig, has_experts: bool) -> int:
    norms, products = _attention(model_config)
    common = norms + 2 * products + 2 + 1 + 2 + 1
    return common + (10 if has_experts else 5)
