"""Bytes of activations on a device: a model, not a count.

For each token of a layer backward needs (arXiv:2205.05198, without dropout and with attention that saves no scores): the
inputs of both norms and of both first projections (4 hidden; divided by TP with sequence parallelism), query, key, value and
the output of attention (divided by TP), and three widths of the gated MLP (divided by TP). An expert layer saves, for each
token that its rank receives, the input of its expert and four of the expert's widths. Recomputed layers save their input alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.models.model_config import ModelConfig
from mindspeed_rl.models.plan import ModelPlan

#: tokens of the busiest expert rank over those of an even split: in one layer, and over the layers of a stage
EXPERT_IMBALANCE = 1.5
MEAN_EXPERT_IMBALANCE = 1.2


@dataclass(frozen=True)
class _LayerBytes:
    """Bytes of a layer.

    Attributes:
        saved: for backward of a micro-batch, in a layer that is not recomputed.
        input: saved by a recomputed layer.
    """

    saved: float
    input: float


def compute_layer_bytes(config: MegatronConfig, model_config: ModelConfig, tokens: float, *, has_experts: bool) -> _LayerBytes:
    """Compute the bytes of a layer for this many tokens of a replica."""
    tp, itemsize = config.tensor_model_parallel_size, 2 if config.bf16 else 4
    tokens /= config.context_parallel_size
    split = tp if config.sequence_parallel and tp > 1 else 1
    hidden = model_config.hidden_size / split
    heads, width = model_config.num_attention_heads, model_config.kv_channels
    if model_config.multi_latent_attention:
        values = heads * (model_config.v_head_dim or width)
        ranks = (model_config.q_lora_rank or 0) + (model_config.kv_lora_rank or 0)
        attention = (2 * heads * width + 2 * values) / tp + 2 * ranks
    else:
        attention = (2 * heads + 2 * model_config.num_query_groups) * width / tp
        if model_config.qk_layernorm:
            attention += (heads + model_config.num_query_groups) * width / tp
    recomputed = set(config.recompute_modules or ["core_attn"]) if config.recompute_granularity == "selective" else set()
    statistics = heads / tp * 64 / itemsize  # the running maximum and sum of fused attention, eight float32 each
    widths = 2 if config.recompute_activation_function or recomputed & {"moe_act", "mlp"} else 3
    if has_experts:
        # an expert rank receives its part of the replica's tokens
        _, inner = config.expert_sizes
        assert model_config.moe_ffn_hidden_size is not None
        expert = model_config.hidden_size
        if "moe" not in recomputed:
            expert += (widths + 1) * model_config.moe_ffn_hidden_size / inner
        mlp = 2 * hidden + model_config.moe_router_topk * inner / split * expert
        mlp += widths * (model_config.moe_shared_expert_intermediate_size or 0) / tp
    else:
        mlp = 2 * hidden + (0 if "mlp" in recomputed else widths * model_config.ffn_hidden_size / tp)
    saved = 2 * hidden + attention + statistics + mlp
    if "core_attn" in recomputed:
        saved -= heads * width / tp  # its output
    return _LayerBytes(saved * tokens * itemsize, hidden * tokens * itemsize)


def compute_stage_activations(config: MegatronConfig, plan: ModelPlan, tokens: float, micro_batches: int, stage: int) -> float:
    """Compute the bytes on a device of a stage at the fullest moment of an update.

    Args:
        config: keys of the role.
        plan: of the model.
        tokens: of a micro-batch of one replica.
        micro_batches: of an optimizer step on one replica; the schedule limits how many of them a stage has in flight.
        stage: index of the pipeline stage.
    """
    layout, model_config = plan.layout, plan.model_config
    total, working = 0.0, 0.0
    for chunk in range(layout.vpp):
        for index, layer in enumerate(layout.chunk_layers(stage, chunk)):
            if layer is None:
                continue
            moe = layer in model_config.moe_layers
            one = compute_layer_bytes(config, model_config, tokens, has_experts=moe)
            is_uneven = moe and layout.num_expert_groups > 1
            working = max(working, one.saved * (EXPERT_IMBALANCE if is_uneven else 1.0))
            saved = one.saved * (MEAN_EXPERT_IMBALANCE if is_uneven else 1.0)
            if config.recompute_granularity == "full":
                num_layers = config.recompute_num_layers or 1
                if config.recompute_method != "block":
                    saved = one.input / num_layers
                elif index < num_layers:
                    saved = one.input
            total += saved
    if layout.pp == 1:
        in_flight = 1.0
    elif layout.vpp == 1:
        in_flight = min(micro_batches, layout.pp - stage)
    else:  # the interleaved schedule warms up by chunks
        warm = (layout.pp - stage - 1) * 2 + (layout.vpp - 1) * layout.pp + 1
        in_flight = min(micro_batches * layout.vpp, warm) / layout.vpp
    return total * in_flight + working


def compute_forward_bytes(config: MegatronConfig, plan: ModelPlan, tokens: float) -> float:
    """Compute the bytes of a forward pass without backward: the largest layer and its input."""
    moe = bool(plan.model_config.moe_layers)
    one = compute_layer_bytes(config, plan.model_config, tokens, has_experts=moe)
    return one.saved * (EXPERT_IMBALANCE if moe and plan.layout.num_expert_groups > 1 else 1.0) + one.input


def compute_head_bytes(config: MegatronConfig, model_config: ModelConfig, tokens: float, *, trains: bool) -> float:
    """Compute the bytes of the head: logits of a chunk of tokens, and in training the head's gradient in float32."""
    itemsize = 2 if config.bf16 else 4
    rows = model_config.padded_vocab_size / config.tensor_model_parallel_size
    tokens /= config.context_parallel_size
    hidden = tokens * model_config.hidden_size * itemsize * (2 if trains else 1)
    if model_config.head == "reward":
        return hidden
    chunk = min(config.loss_chunk_size, tokens) * rows
    # forward: product in the model's format, float32 logits, shifted ones, their exponentials; backward: two more of them
    logits = chunk * (itemsize + 4 * (5 if trains else 3))
    gradient = rows * model_config.hidden_size * (4 + itemsize) if trains else 0.0
    return hidden + logits + gradient
