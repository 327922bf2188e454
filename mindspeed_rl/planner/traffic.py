"""Seconds that the trainer's collectives take: bytes of a rank over the link that its group has."""

from __future__ import annotations

from mindspeed_rl.planner.run_shape import RunShape


def pass_seconds(run: RunShape, tokens: float, *, link: float, network: float) -> float:
    """Seconds of a forward pass over this many tokens of a replica; a backward pass takes twice that.

    Tensor parallelism gathers and scatters the hidden states twice a layer, context parallelism exchanges query, key, value and
    output, experts get and return each token as often as it chose one, and a stage hands its output to the next.

    Args:
        link, network: bytes a second inside a node and between nodes.
    """
    config, plan = run.actor.config, run.actor.plan
    network_shape, layout = plan.network, plan.layout
    itemsize = 2 if config.bf16 else 4
    tp, cp = layout.tp, config.context_parallel_size
    layers = layout.num_slots / layout.pp
    local = tokens / cp * itemsize
    hidden = local * network_shape.hidden_size
    seconds = 0.0
    if tp > 1:
        seconds += layers * 4 * hidden * (tp - 1) / tp / _link(run, tp, link, network)
    if cp > 1:
        width = (2 * network_shape.num_attention_heads + 2 * network_shape.num_query_groups) * network_shape.kv_channels / tp
        seconds += layers * local * width * (cp - 1) / cp / _link(run, tp * cp, link, network)
    groups = layout.num_expert_groups if layout.num_experts else 1
    if groups > 1:
        across = tp if config.sequence_parallel else 1
        sent = 2 * hidden / across * network_shape.moe_router_topk * (groups - 1) / groups
        moe = len(network_shape.moe_layers) / layout.pp
        seconds += moe * sent / _link(run, groups * layout.expert_tp_size, link, network)
    if layout.pp > 1:
        handed = layout.vpp * hidden / (tp if config.sequence_parallel else 1)
        seconds += handed / _link(run, run.sizes.actor.num_npus, link, network)
    return seconds


def step_seconds(run: RunShape, *, link: float, network: float) -> float:
    """Seconds in which gradients are reduced and, with the distributed optimizer, weights are gathered again."""
    model = run.actor
    if model.dp <= 1:
        return 0.0
    gathers = model.config.use_distributed_optimizer
    held = max(model.gradients(one) + (model.weights(one) if gathers else 0) for one in model.elements)
    factor = 1 if gathers else 2
    return factor * held / _link(run, run.sizes.actor.num_npus, link, network)


def _link(run: RunShape, ranks: int, link: float, network: float) -> float:
    """Bytes a second of a group that spans so many neighbouring ranks."""
    return link if ranks <= run.chip.devices_per_node else network
