"""Splits of a model over devices: which there are, the plan of a run with one, and which of two plans is better.

The search for a model's layout (`fit.py`) and for the layout on the devices that are left of a run (`shrink.py`) differ in what
else they may change; what a split is, whether a run with it is sound and fits, and how plans are ordered is decided here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from mindspeed_rl.planner.devices import Device
from mindspeed_rl.planner.efficiency import Efficiency
from mindspeed_rl.planner.memory import MemoryPlan, plan_memory
from mindspeed_rl.planner.run_shape import RunShape, read_shape
from mindspeed_rl.planner.samples import SampleMeans
from mindspeed_rl.planner.seconds import TimePlan, plan_time
from mindspeed_rl.run import Run
from mindspeed_rl.run.rules.validation import is_valid, unavailable

#: parallel sizes of a split, in the order of its fields
SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size", "expert_model_parallel_size")
#: verdicts of layouts that may be taken
ACCEPTED = ("fits", "tight")
#: layouts whose seconds differ by less than this share are equally fast
_CLOSE = 0.05


@dataclass(frozen=True)
class Split:
    """Division of a model: parallel sizes, and the layers of each stage where these are uneven."""

    tensor: int
    pipeline: int
    context: int
    expert: int
    layers: str | None = None

    @property
    def sizes(self) -> dict[str, int]:
        """The parallel sizes by the names of their keys."""
        return dict(zip(SIZES, (self.tensor, self.pipeline, self.context, self.expert), strict=True))


def list_splits(
    num_devices: int,
    *,
    layers: int | None,
    experts: int,
    tensors: Iterable[int],
    pipelines: Iterable[int],
    contexts: Iterable[int],
    expert_sizes: Iterable[int],
) -> Iterator[Split]:
    """Yield each split over so many devices that leaves whole replicas, whole layers and whole experts.

    Args:
        layers: of the model; None where config.json has them, which is not here.
        experts: of a layer; 0 for a dense model.
        tensors, pipelines, contexts, expert_sizes: parallel sizes to try.
    """
    expert_sizes = list(expert_sizes)
    for tensor, pipeline, context in itertools.product(tensors, pipelines, contexts):
        if num_devices % (tensor * pipeline * context) or (layers is not None and pipeline > layers):
            continue
        stages = divide_layers(layers, pipeline) if layers is not None and layers % pipeline else None
        for expert in expert_sizes if experts else (1,):
            # the devices of a stage share its experts
            if not experts % expert and not num_devices // pipeline % expert:
                yield Split(tensor, pipeline, context, expert, stages)


def divide_layers(layers: int, stages: int) -> str:
    """Return `num_layer_list` of so many layers: stages in the middle have one more, the first and the last have other work."""
    more = layers % stages
    first = (stages - more) // 2
    return ",".join(str(layers // stages + (first <= stage < first + more)) for stage in range(stages))


@dataclass(frozen=True)
class SoundRun:
    """A run that breaks no rule, with its bytes; its seconds are planned where they are asked for."""

    run: Run
    shape: RunShape
    memory: MemoryPlan

    def plan_time(self, efficiency: Efficiency | None = None, samples: SampleMeans | None = None) -> TimePlan | None:
        """Return the seconds; None where a layout does not suit its model."""
        try:
            return plan_time(self.run, self.shape.device, samples=samples, efficiency=efficiency, shape=self.shape)
        except ValueError:
            return None


def plan_sound_memory(run: Run, device: Device) -> SoundRun | None:
    """Plan the bytes of a run; None where it breaks a rule, or where a layout does not suit its model."""
    if not is_valid(run) or unavailable(run):
        return None
    try:
        shape = read_shape(run, device)
        return SoundRun(run, shape, plan_memory(run, device, shape=shape))
    except ValueError:
        return None


def plan_sound(
    run: Run, device: Device, efficiency: Efficiency | None = None, samples: SampleMeans | None = None
) -> tuple[MemoryPlan, TimePlan] | None:
    """Plan a run; None where it breaks a rule, or where a layout does not suit its model."""
    sound = plan_sound_memory(run, device)
    time = None if sound is None else sound.plan_time(efficiency, samples)
    return None if sound is None or time is None else (sound.memory, time)


def rank_plans(memory: MemoryPlan, time: TimePlan, *ties: float) -> tuple[float, ...]:
    """Return the sorting key of a layout: verdict, class of seconds, ties within the class, seconds."""
    return MemoryPlan.VERDICTS.index(memory.verdict), round(math.log(time.total) / _CLOSE), *ties, time.total
