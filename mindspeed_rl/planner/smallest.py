"""The smallest machine on which each stage of a model trains, and the seconds that each halving of the devices costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mindspeed_rl.planner.devices import Device
from mindspeed_rl.planner.fit import STAGES, FitRequest, FitResult, fit
from mindspeed_rl.planner.samples import SampleMeans

#: devices above which no machine is searched
MAX_DEVICES = 1024
#: numbers of devices that are planned for a stage, from the smallest on
_STEPS = 3


@dataclass(frozen=True)
class StageMachines:
    """Machines on which a stage of a model trains.

    Attributes:
        layouts: (devices, best layout), the fewest devices first; empty where up to `MAX_DEVICES` are too few.
        reason: why half of the fewest are too few; "" where one is enough.
    """

    stage: str
    layouts: tuple[tuple[int, FitResult], ...]
    reason: str = ""


def find_smallest(request: FitRequest, device: Device, *, samples: SampleMeans | None = None) -> list[StageMachines]:
    """Search the fewest devices, a power of two, of every stage.

    Args:
        request: the model and its lengths; its stage and its number of devices do not matter.
        device: kind of the devices.
        samples: known means of the samples.
    """
    return [_search(replace(request, stage=stage), device, samples) for stage in STAGES]


def _search(request: FitRequest, device: Device, samples: SampleMeans | None) -> StageMachines:
    layouts: list[tuple[int, FitResult]] = []
    reason, count = "", 1
    while count <= MAX_DEVICES and len(layouts) < _STEPS:
        nodes = max(1, -(-count // device.devices_per_node))
        try:
            layouts.append((count, fit(replace(request, npus=count, num_nodes=nodes), device, samples=samples)[0]))
        except ValueError as error:
            if layouts:  # fewer are enough: these divide the batch, or the model, in no way
                break
            reason = str(error)
        count *= 2
    return StageMachines(request.stage, tuple(layouts), reason)


def list_costs(layouts: Sequence[tuple[int, FitResult]]) -> list[tuple[float, float]]:
    """Return the seconds that an iteration takes longer on each number of devices than on the next, and the ratio."""
    seconds = [result.time.total for _, result in layouts]
    return [(fewer - more, fewer / more) for fewer, more in zip(seconds, seconds[1:])]
