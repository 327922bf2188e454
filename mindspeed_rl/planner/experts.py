"""Which device holds which experts, so that all are sent about as many tokens: `mindspeed-rl plan experts`.

Every expert lies on one device, as a weight push needs it, and every device holds as many. The busiest expert that is left goes
to the device with the fewest tokens that has room (longest processing time first).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Placement = list[list[int]]


@dataclass(frozen=True)
class LayerPlan:
    """One layer with experts.

    Attributes:
        devices: the experts of each device, in order.
        before, after: tokens of the busiest device in means over the devices, with experts in order and as placed.
    """

    devices: Placement
    before: float
    after: float


def place_experts(counts: Sequence[Sequence[int]], num_devices: int) -> list[LayerPlan]:
    """Places the experts of each layer.

    Args:
        counts: [layers, experts] tokens.

    Raises:
        ValueError: the devices do not share the experts out evenly.
    """
    num_experts = len(counts[0])
    if num_devices < 1 or num_experts % num_devices:
        raise ValueError(f"--devices: {num_devices} does not divide the {num_experts} experts of a layer.")
    return [_place(layer, num_devices) for layer in counts]


def _place(counts: Sequence[int], num_devices: int) -> LayerPlan:
    room = len(counts) // num_devices
    in_order = [list(range(first, first + room)) for first in range(0, len(counts), room)]
    placed: Placement = [[] for _ in range(num_devices)]
    tokens = [0] * num_devices
    for expert in sorted(range(len(counts)), key=lambda number: (-counts[number], number)):
        device = min((one for one in range(num_devices) if len(placed[one]) < room), key=lambda one: (tokens[one], one))
        placed[device].append(expert)
        tokens[device] += counts[expert]
    before, after = (_imbalance(counts, devices) for devices in (in_order, placed))
    # where it is no better, experts stay where everybody looks for them
    if after >= before:
        return LayerPlan(in_order, before, before)
    return LayerPlan([sorted(experts) for experts in placed], before, after)


def _imbalance(counts: Sequence[int], devices: Placement) -> float:
    tokens = [sum(counts[expert] for expert in experts) for experts in devices]
    return max(tokens) * len(tokens) / sum(tokens) if sum(tokens) else 1.0


def experts_text(layers: Sequence[LayerPlan]) -> str:
    """A line a layer and one for all."""
    lines = ["tokens of the busiest device, in means over the devices", "layer   in order   as placed"]
    lines += [f"{number:5d} {layer.before:10.2f} {layer.after:11.2f}" for number, layer in enumerate(layers)]
    before, after = (sum(getattr(layer, name) for layer in layers) / len(layers) for name in ("before", "after"))
    return "\n".join([*lines, f" mean {before:10.2f} {after:11.2f}"])
