"""Placement of experts on devices, so that all receive about as many tokens: `mindspeed-rl plan experts`.

Every expert is on one device, as a weight sync needs it, and every device has as many. The busiest expert that is not placed
yet goes to the device with the fewest tokens that has room (longest processing time first).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

#: the experts of each device
_ExpertMap = list[list[int]]


@dataclass(frozen=True)
class _LayerPlan:
    """One layer with experts.

    Attributes:
        devices: the experts of each device, in order.
        before, after: tokens of the busiest device over the mean of the devices, with experts in order and as placed.
    """

    devices: _ExpertMap
    before: float
    after: float


def place_experts(counts: Sequence[Sequence[int]], num_devices: int) -> list[_LayerPlan]:
    """Place the experts of each layer.

    Args:
        counts: [layers, experts] tokens.
        num_devices: number of devices of an expert group.

    Raises:
        ValueError: the number of devices does not divide the experts.
    """
    num_experts = len(counts[0])
    if num_devices < 1 or num_experts % num_devices:
        raise ValueError(f"--devices: {num_devices} does not divide the {num_experts} experts of a layer.")
    return [_place_layer(layer, num_devices) for layer in counts]


def _place_layer(counts: Sequence[int], num_devices: int) -> _LayerPlan:
    room = len(counts) // num_devices
    in_order = [list(range(first, first + room)) for first in range(0, len(counts), room)]
    placed: _ExpertMap = [[] for _ in range(num_devices)]
    tokens = [0] * num_devices
    for expert in sorted(range(len(counts)), key=lambda index: (-counts[index], index)):
        device = min(
            (index for index in range(num_devices) if len(placed[index]) < room), key=lambda index: (tokens[index], index)
        )
        placed[device].append(expert)
        tokens[device] += counts[expert]
    before, after = (_imbalance(counts, devices) for devices in (in_order, placed))
    # where it is not better, the usual order stays
    if after >= before:
        return _LayerPlan(in_order, before, before)
    return _LayerPlan([sorted(experts) for experts in placed], before, after)


def _imbalance(counts: Sequence[int], devices: _ExpertMap) -> float:
    tokens = [sum(counts[expert] for expert in experts) for experts in devices]
    return max(tokens) * len(tokens) / sum(tokens) if sum(tokens) else 1.0


def format_experts(layers: Sequence[_LayerPlan]) -> str:
    """Return a line for each layer and one for their mean."""
    lines = ["tokens of the busiest device, in means over the devices", "layer   in order   as placed"]
    lines += [f"{index:5d} {layer.before:10.2f} {layer.after:11.2f}" for index, layer in enumerate(layers)]
    before, after = (sum(getattr(layer, name) for layer in layers) / len(layers) for name in ("before", "after"))
    return "\n".join([*lines, f" mean {before:10.2f} {after:11.2f}"])
