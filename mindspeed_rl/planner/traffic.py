"""Seconds that the trainer's collectives take: bytes of a rank over the link that its group has."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_rl.planner.chips import Chip
from mindspeed_rl.planner.run_shape import Model


@dataclass(frozen=True)
class Links:
    """What collectives get of a chip's links.

    Attributes:
        near, far: bytes a second inside a node and between nodes.
        devices_per_node: dies that `near` reaches.
    """

    near: float
    far: float
    devices_per_node: int

    @classmethod
    def of(cls, chip: Chip, share: float) -> Links:
        """That share of the chip's own figures."""
        return cls(chip.link * share, chip.network * share, chip.devices_per_node)

    def spanning(self, ranks: int) -> float:
        """Bytes a second of a group that spans so many neighbouring ranks."""
        return self.near if ranks <= self.devices_per_node else self.far


def pass_seconds(model: Model, tokens: float, links: Links) -> float:
    """Seconds of a forward pass over this many tokens of a replica; a backward pass takes twice that.

    Tensor parallelism gathers and scatters the hidden states twice a layer, context parallelism exchanges query, key, value and
    output, experts get and return each token as often as it chose one, and a stage hands its output to the next.
    """
    config, layout, model_config = model.config, model.plan.layout, model.plan.model_config
    tp, cp = layout.tp, config.context_parallel_size
    layers = layout.num_slots / layout.pp
    local = tokens / cp * model.itemsize
    hidden = local * model_config.hidden_size
    seconds = 0.0
    if tp > 1:
        seconds += layers * 4 * hidden * (tp - 1) / tp / links.spanning(tp)
    if cp > 1:
        width = (2 * model_config.num_attention_heads + 2 * model_config.num_query_groups) * model_config.kv_channels / tp
        seconds += layers * local * width * (cp - 1) / cp / links.spanning(tp * cp)
    groups = layout.num_expert_groups if layout.num_experts else 1
    if groups > 1:
        across = tp if config.sequence_parallel else 1
        sent = 2 * hidden / across * model_config.moe_router_topk * (groups - 1) / groups
        moe = len(model_config.moe_layers) / layout.pp
        seconds += moe * sent / links.spanning(groups * layout.expert_tp_size)
    if layout.pp > 1:
        handed = layout.vpp * hidden / (tp if config.sequence_parallel else 1)
        # in the usual order of ranks stages are the outermost axis, so the next one may be on another node
        seconds += handed / links.spanning(model.devices)
    return seconds


def step_seconds(model: Model, links: Links) -> float:
    """Seconds in which gradients are reduced and, with the distributed optimizer, weights are gathered again."""
    if model.dp <= 1:
        return 0.0
    gathers = model.config.use_distributed_optimizer
    # an all-reduce moves its bytes twice: it is a reduce-scatter and a gather, which the distributed optimizer does apart
    held = max(model.gradients(one) + (model.weights(one) if gathers else 0) for one in model.elements)
    return (1 if gathers else 2) * held / links.spanning(model.devices)
