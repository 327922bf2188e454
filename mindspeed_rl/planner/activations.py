"""What a micro-batch keeps on a die: a model, not a count.

For each token of a layer backward needs (arXiv:2205.05198, without dropout and with attention that keeps no scores): the
inputs of both norms and of both first projections (4 hidden; divided by TP with sequence parallelism), query, key, value and
the output of attention (divided by TP), and three widths of the gated MLP (divided by TP). An expert layer keeps, for each
token that its rank receives, the input of its expert and four of the expert's widths. Recomputed layers keep their input alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.models.model_config import ModelConfig
from mindspeed_rl.models.plan import ModelPlan

#: the busiest expert rank gets so many times the tokens of an even split: in one layer, and over the layers of a stage
EXPERT_IMBALANCE = 1.5
MEAN_EXPERT_IMBALANCE = 1.2


@dataclass(frozen=True)
class LayerBytes:
    """Attributes:
    kept: what backward needs of a micro-batch, of one layer that is not recomputed.
    input: what a recomputed layer keeps.
    """

    kept: float
    input: float


def layer_bytes(config: MegatronConfig, model_config: ModelConfig, tokens: float, *, has_experts: bool) -> LayerBytes:
    """Bytes of a layer for this many tokens of a replica."""
    tp, itemsize = config.tensor_model_parallel_size, 2 if config.bf16 else 4
    tokens /= config.context_parallel_size
    across = tp if config.sequence_parallel and tp > 1 else 1
    hidden = model_config.hidden_size / across
    heads, width = model_config.num_attention_heads, model_config.kv_channels
    if model_config.multi_latent_attention:
        values = heads * (model_config.v_head_dim or width)
        ranks = (model_config.q_lora_rank or 0) + (model_config.kv_lora_rank or 0)
        attention = (2 * heads * width + 2 * values) / tp + 2 * ranks
    else:
        attention = (2 * heads + 2 * model_config.num_query_groups) * width / tp
    if model_config.qk_layernorm and not model_config.multi_latent_attention:
        attention += (heads + model_config.num_query_groups) * width / tp
    recomputed = set(config.recompute_modules or ["core_attn"]) if config.recompute_granularity == "selective" else set()
    statistics = heads / tp * 64 / itemsize  # the running maximum and sum of fused attention, eight float32 each
    widths = 2 if config.recompute_activation_function or recomputed & {"moe_act", "mlp"} else 3
    mlp = 2 * hidden + (0 if "mlp" in recomputed else widths * model_config.ffn_hidden_size / tp)
    if has_experts:
        mlp = 2 * hidden + _experts(config, model_config, across, widths + 1 if "moe" not in recomputed else 0)
        mlp += widths * (model_config.moe_shared_expert_intermediate_size or 0) / tp
    kept = 2 * hidden + attention + statistics + mlp
    if "core_attn" in recomputed:
        kept -= heads * width / tp  # its output is computed again
    return LayerBytes(kept * tokens * itemsize, hidden * tokens * itemsize)


def _experts(config: MegatronConfig, model_config: ModelConfig, across: int, widths: int) -> float:
    """Elements for each token of the replica that an expert rank keeps, where it gets its share of them."""
    _, inner = config.expert_sizes
    received = model_config.moe_router_topk * inner / across
    assert model_config.moe_ffn_hidden_size is not None
    return received * (model_config.hidden_size + widths * model_config.moe_ffn_hidden_size / inner)


def stage_activations(config: MegatronConfig, plan: ModelPlan, tokens: float, micro_batches: int, stage: int) -> float:
    """Bytes a die of a stage keeps at the fullest moment of an update.

    Args:
        tokens: of a micro-batch of one replica.
        micro_batches: of an optimizer step on one replica; a stage holds no more of them than its place in the pipeline asks.
    """
    layout, model_config = plan.layout, plan.model_config
    full, working = 0.0, 0.0
    for chunk in range(layout.vpp):
        for place, layer in enumerate(layout.chunk_layers(stage, chunk)):
            if layer is None:
                continue
            moe = model_config.is_moe_layer(layer)
            one = layer_bytes(config, model_config, tokens, has_experts=moe)
            uneven = moe and layout.num_expert_groups > 1
            working = max(working, one.kept * (EXPERT_IMBALANCE if uneven else 1.0))
            kept = one.kept * (MEAN_EXPERT_IMBALANCE if uneven else 1.0)
            full += _after_recompute(config, one, kept, place)
    if layout.pp == 1:
        held = 1.0
    elif layout.vpp == 1:
        held = min(micro_batches, layout.pp - stage)
    else:  # the interleaved schedule warms up by chunks
        warm = (layout.pp - stage - 1) * 2 + (layout.vpp - 1) * layout.pp + 1
        held = min(micro_batches * layout.vpp, warm) / layout.vpp
    return full * held + working


def _after_recompute(config: MegatronConfig, layer: LayerBytes, kept: float, place: int) -> float:
    if config.recompute_granularity != "full":
        return kept
    several = config.recompute_num_layers or 1
    if config.recompute_method == "block":
        return layer.input if place < several else kept
    return layer.input / several


def forward_bytes(config: MegatronConfig, plan: ModelPlan, tokens: float) -> float:
    """Bytes of a forward pass that keeps nothing: the largest layer and its input."""
    moe = bool(plan.model_config.moe_layers)
    one = layer_bytes(config, plan.model_config, tokens, has_experts=moe)
    return one.kept * (EXPERT_IMBALANCE if moe and plan.layout.num_expert_groups > 1 else 1.0) + one.input


def head_bytes(config: MegatronConfig, model_config: ModelConfig, tokens: float, *, trains: bool) -> float:
    """Bytes of the last stage's head: logits of a chunk of tokens, and in training the head's gradient in float32."""
    itemsize = 2 if config.bf16 else 4
    tp = config.tensor_model_parallel_size
    rows, tokens = model_config.padded_vocab_size / tp, tokens / config.context_parallel_size
    hidden = tokens * model_config.hidden_size * itemsize * (2 if trains else 1)
    if model_config.head == "reward":
        return hidden
    chunk = min(config.loss_chunk_size, tokens) * rows
    # forward: product in the model's format, float32 logits, shifted ones, their exponentials; backward: two more of them
    logits = chunk * (itemsize + 4 * (5 if trains else 3))
    gradient = rows * model_config.hidden_size * (4 + itemsize) if trains else 0.0
    return hidden + logits + gradient
