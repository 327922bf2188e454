"""What a run will need, take and cost, said before it starts: memory by phase, seconds, hours, price, disk, expected curve."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mindspeed_rl.config.errors import ConfigError
from mindspeed_rl.config.loader import build_run_config
from mindspeed_rl.config.run_files import apply_values
from mindspeed_rl.observability.expected_curve import ExpectedCurve
from mindspeed_rl.planner.calibration import plan_by_earlier_runs
from mindspeed_rl.planner.devices import GIB, Device, find_device
from mindspeed_rl.planner.efficiency import GIB_ERRORS
from mindspeed_rl.planner.memory import MemoryPlan, Phase, plan_memory
from mindspeed_rl.planner.samples import SampleMeans
from mindspeed_rl.planner.seconds import TimePlan, format_number, plan_time
from mindspeed_rl.planner.trial import plan_by_trial
from mindspeed_rl.run import Run
from mindspeed_rl.run.draft import draft
from mindspeed_rl.run.rules.validation import is_valid, unavailable
from mindspeed_rl.run.rules.violation import format_value

_HOUR = 3600.0
#: units of a time, by the hours from which it is given in them
_UNITS = ((3.0, 1.0, "hours"), (0.05, 60.0, "minutes"), (0.0, _HOUR, "seconds"))
#: a neighbour saves at least this fraction, or it is none
_SAVES = 0.03
#: iterations that no run file states are not promised
_VERDICTS = MemoryPlan.VERDICTS[:2]


@dataclass(frozen=True)
class PhaseMargin:
    """The fullest devices of a phase.

    Attributes:
        high: bytes, if all modelled ones are at the upper end of their range.
    """

    name: str
    total: int
    high: int


@dataclass(frozen=True)
class Neighbour:
    """Another layout of the same run.

    Attributes:
        values: keys that differ, by dotted name.
        devices: number of devices.
    """

    values: Mapping[str, object]
    verdict: str
    devices: int
    time: TimePlan

    @property
    def device_hours(self) -> float:
        """Device-hours of an iteration."""
        return self.time.total * self.devices / _HOUR


@dataclass(frozen=True)
class Promise:
    """What a run will need, take, cost and look like.

    Attributes:
        run: draft of the run.
        iterations: length of the run; None where its data decides it.
        price: price of a device-hour, in the user's currency; None where none is given.
        cheaper, faster: nearest layouts that take fewer device-hours, or less time; None where none was found or searched.
        bands: expected curves of earlier runs and recipes.
        planned: the run as its seconds are planned.
    """

    run: Run
    memory: MemoryPlan
    time: TimePlan
    iterations: int | None
    price: float | None = None
    cheaper: Neighbour | None = None
    faster: Neighbour | None = None
    bands: Sequence[ExpectedCurve] = field(default=())
    planned: Run | None = None

    @property
    def is_kept(self) -> bool:
        """True where the run fits as it is computed."""
        return self.memory.verdict in _VERDICTS

    @property
    def margins(self) -> tuple[PhaseMargin, ...]:
        """The fullest devices of each phase, in order."""
        fullest: dict[str, Phase] = {}
        for phase in (phase for group in self.memory.groups for phase in group.phases):
            if phase.name not in fullest or phase.total > fullest[phase.name].total:
                fullest[phase.name] = phase
        return tuple(PhaseMargin(name, phase.total, phase.range[1]) for name, phase in fullest.items())

    @property
    def first_checkpoint(self) -> int | None:
        """The iteration after which the first checkpoint is written; None where none is."""
        actor = self.run.config.actor_config
        if not actor.save:
            return None
        interval = actor.save_interval or self.iterations
        return interval if interval is None or self.iterations is None else min(interval, self.iterations)

    @property
    def disk(self) -> int:
        """Most bytes of checkpoints at a time, without a device's optimizer file."""
        host, actor = self.memory.host, self.run.config.actor_config
        if host is None or not actor.save:
            return 0
        interval = actor.save_interval or self.iterations or 1
        written = -(-(self.iterations or interval) // interval)
        return host.checkpoint * (written if host.kept is None else min(written, host.kept + 1))

    def bound_hours(self, iterations: int, scale: float = 1.0) -> tuple[float, float]:
        """Return the bounds of the hours of so many iterations, times `scale`."""
        low, high = self.time.bounds(self.time.total * iterations / _HOUR * scale)
        return low, high

    def list_lines(self) -> Iterator[str]:
        """Yield the promise as lines of a page."""
        time, capacity = self.time, self.memory.capacity
        figures = time.efficiency.find_error().figures
        yield (
            f"{self.memory.verdict}: {time.devices} x {time.device}, {time.format_bounds(time.total)} s an iteration; two of "
            f"three runs are within a range, of {figures} measured runs"
        )
        runs = f"; {GIB_ERRORS[self.memory.device]}" if self.memory.device in GIB_ERRORS else ""
        yield f"  memory of the fullest device, GiB of {capacity / GIB:.0f}{runs}"
        for margin in self.margins:
            left, least = ((capacity - count) / GIB for count in (margin.total, margin.high))
            yield f"    {margin.name:<20}{margin.total / GIB:>7.1f}   margin {left:.1f} ({least:.1f} at worst)"
        for problem in self.memory.problems:
            yield f"    - {problem}"
        yield "  seconds of an iteration"
        for name, seconds in time.phases.items():
            runs = time.efficiency.find_error(name).figures
            yield f"    {name:<20}{time.format_bounds(seconds, name):>16}   of {runs} measured runs"
        yield from self._list_totals()
        for name, neighbour in (("cheaper", self.cheaper), ("faster", self.faster)):
            if neighbour is not None:
                yield f"  {name}: {_describe_neighbour(neighbour, self)}"
        for band in self.bands:
            ends = dict.fromkeys((band.windows[0], band.windows[-1]))
            text = ", ".join(f"{window.low:.3g} to {window.high:.3g} in {window}" for window in ends)
            yield f"  curve: {band.metric} {text} (source: {band.source})"
        for note in time.notes:
            yield f"  assumed: {note}"

    def _list_totals(self) -> Iterator[str]:
        """Yield length, price, tokens, disk and the first checkpoint."""
        time, iterations = self.time, self.iterations
        if iterations is None:
            yield "  the data decides the number of iterations (train_epochs): hours, tokens and disk are known once it is here"
        else:
            devices = _format_range(self.bound_hours(iterations, time.devices))
            cost = f"{_format_hours(self.bound_hours(iterations))}, {devices} device-hours"
            if self.price is not None:
                low, high = self.bound_hours(iterations, time.devices * self.price)
                cost += f", a price of {_format_range((low, high))} at {self.price:g} a device-hour"
            yield f"  {iterations} iterations: {cost}"
            yield f"  {_format_count(time.tokens * iterations)} tokens of prompts and responses"
        if (first := self.first_checkpoint) is not None:
            yield f"  first checkpoint after {_format_hours(self.bound_hours(first))} of training (iteration {first})"
        if self.disk:
            yield f"  {format_number(self.disk / GIB)} GiB of checkpoints on disk at most"

    def format(self) -> str:
        """Return the page as text."""
        return "\n".join([f"{self.run.config.config_name} promises", *self.list_lines()])

    def encode(self) -> dict[str, Any]:
        """Return the promise as a JSON object."""
        time, iterations = self.time, self.iterations
        hours = None if iterations is None else self.bound_hours(iterations)
        return {
            "verdict": self.memory.verdict,
            "chip": time.device,
            "devices": time.devices,
            "capacity": self.memory.capacity,
            "memory": [dataclasses.asdict(margin) for margin in self.margins],
            "problems": list(self.memory.problems),
            "seconds": {"all": list(time.bounds(time.total))}
            | {name: list(time.bounds(seconds, name)) for name, seconds in time.phases.items()},
            "measured_runs": {name: time.efficiency.find_error(name).figures for name in ("all", *time.phases)},
            "iterations": iterations,
            "hours": None if hours is None else list(hours),
            "device_hours": None if hours is None else [bound * time.devices for bound in hours],
            "price": None if hours is None or self.price is None else [bound * time.devices * self.price for bound in hours],
            "tokens": None if iterations is None else time.tokens * iterations,
            "disk": self.disk,
            "first_checkpoint": self.first_checkpoint,
            "cheaper": _encode_neighbour(self.cheaper),
            "faster": _encode_neighbour(self.faster),
            "curves": [band.encode() for band in self.bands],
            "assumed": list(time.notes),
        }


def _format_range(bounds: tuple[float, float]) -> str:
    return f"{format_number(bounds[0])} to {format_number(bounds[1])}"


def _format_hours(bounds: tuple[float, float]) -> str:
    """Return a range of hours in the largest unit in which it is not a small fraction."""
    scale, unit = next((scale, unit) for least, scale, unit in _UNITS if bounds[0] >= least)
    return f"{_format_range((bounds[0] * scale, bounds[1] * scale))} {unit}"


def _format_count(count: float) -> str:
    """Return a large number in two digits with its unit."""
    for unit, name in ((1e12, " trillion"), (1e9, " billion"), (1e6, " million"), (1e3, " thousand")):
        if count >= unit:
            return f"{format_number(count / unit)}{name}"
    return format_number(count)


def _describe_neighbour(neighbour: Neighbour, promise: Promise) -> str:
    keys = " ".join(f"{name}={format_value(value)}" for name, value in neighbour.values.items())
    seconds = neighbour.time.total / promise.time.total
    hours = neighbour.device_hours / (promise.time.total * promise.time.devices / _HOUR)
    return (
        f"{keys}: {neighbour.devices} devices, {neighbour.time.format_bounds(neighbour.time.total)} s an iteration "
        f"({seconds:.2f} x the time, {hours:.2f} x the device-hours; {neighbour.verdict})"
    )


def _encode_neighbour(neighbour: Neighbour | None) -> dict[str, Any] | None:
    if neighbour is None:
        return None
    time = neighbour.time
    return {
        "values": dict(neighbour.values),
        "verdict": neighbour.verdict,
        "devices": neighbour.devices,
        "seconds": list(time.bounds(time.total)),
    }


def make_promise(
    run: Run,
    *,
    device: Device | None = None,
    samples: SampleMeans | None = None,
    price: float | None = None,
    bands: Sequence[ExpectedCurve] = (),
    tree: Mapping[str, object] | None = None,
) -> Promise:
    """Promise what a run will need and take.

    Args:
        run: the run, or its draft.
        device: kind of its devices; by the run file's platform and name where it is left out.
        samples: means that are known, of its data for example.
        price: price of a device-hour; the run file's by default.
        bands: curves of earlier runs and recipes.
        tree: the run file as `compose` gives it; with it cheaper and faster layouts are searched.

    Raises:
        ValueError: the run cannot be planned; the message says why.
    """
    actor = run.config.actor_config
    device = device or find_device(run)
    memory, (time, planned) = plan_memory(run, device), _plan_seconds(run, device, samples)
    iterations = actor.train_iters if actor.train_epochs is None or run.models else None
    price = actor.device_hour_price if price is None else price
    promise = Promise(run, memory, time, iterations, price, bands=tuple(bands), planned=planned)
    if tree is None:
        return promise
    found = list(_find_neighbours(tree, run, device, samples))
    cheapest = min(found, key=lambda neighbour: neighbour.device_hours, default=None)
    fastest = min(found, key=lambda neighbour: neighbour.time.total, default=None)
    if cheapest is not None and cheapest.device_hours > (1 - _SAVES) * time.total * time.devices / _HOUR:
        cheapest = None
    if fastest is not None and fastest.time.total > (1 - _SAVES) * time.total:
        fastest = None
    return replace(promise, cheaper=cheapest, faster=fastest)


def _plan_seconds(run: Run, device: Device, samples: SampleMeans | None) -> tuple[TimePlan, Run]:
    """Return the seconds, and the run as they are planned."""
    # earlier runs are planned without the kernel of attention that they chose
    plain = replace(run, attention=None)
    plan = plan_time(plain, device, samples=samples)
    corrected = plan_by_earlier_runs(plan, plain, device)
    if corrected is not plan:
        return corrected, plain
    return plan_by_trial(plan_time(run, device, samples=samples), run, device, samples), run


def _find_neighbours(tree: Mapping[str, object], run: Run, device: Device, samples: SampleMeans | None) -> Iterator[Neighbour]:
    """Yield the sound layouts that fit and are one change away from the run's."""
    names = {"config_name": run.config.config_name, "config_dir": run.config.config_dir}
    for values in _list_changes(run):
        try:
            other = draft(build_run_config(apply_values(tree, values), **names), run.num_nodes)
            if not is_valid(other) or unavailable(other):
                continue
            memory = plan_memory(other, device)
            if memory.verdict not in _VERDICTS:
                continue
            time, _ = _plan_seconds(other, device, samples)
        except (ConfigError, ValueError):
            continue
        yield Neighbour(values, memory.verdict, time.devices, time)


def _list_changes(run: Run) -> Iterator[dict[str, object]]:
    """Yield single changes of the number of devices, of the layout, and of what saves memory for time."""
    cfg = run.config
    actor, rl, generate = cfg.actor_config, cfg.rl_config, cfg.generate_config
    if rl is not None and not cfg.is_supervised:
        count, key = rl.actor_resource.num_npus, "rl_config.actor_resource.num_npus"
    else:
        count, key = run.placement.world_size, "megatron_training.num_npus"
    for factor in (2.0, 0.5, 4.0, 0.25):
        if count and count * factor == int(count * factor):
            yield {key: int(count * factor)}
    if not actor.computes_by_module:
        for name in ("tensor_model", "pipeline_model", "context", "expert_model"):
            size = getattr(actor, f"{name}_parallel_size")
            for changed in (2 * size, size // 2):
                if changed >= 1 and not (name == "expert_model" and not actor.num_experts):
                    yield {f"actor_config.{name}_parallel_size": changed}
    if actor.recompute_granularity == "full":
        nothing = ("recompute_granularity", "recompute_method", "recompute_num_layers")
        yield {f"actor_config.{name}": None for name in nothing}
    if actor.swap_optimizer:
        yield {"actor_config.swap_optimizer": False}
    if actor.offload_gradients:
        yield {"actor_config.offload_gradients": False}
    for fraction in (0.0, 0.5):
        if fraction < actor.optimizer_offload_fraction:
            yield {"actor_config.optimizer_offload_fraction": fraction}
    if rl is not None and not cfg.is_supervised and rl.use_dynamic_bsz:
        yield {"rl_config.max_packing_token_size": 2 * (rl.update_max_packing_token_size or 4096)}
    elif (actor.micro_batch_size or 1) >= 1:
        yield {"actor_config.micro_batch_size": 2 * (actor.micro_batch_size or 1)}
    if generate is not None and not cfg.is_supervised:
        size = generate.infer_tensor_parallel_size
        yield {"generate_config.infer_tensor_parallel_size": 2 * size}
        if size > 1:
            yield {"generate_config.infer_tensor_parallel_size": size // 2}
        yield {"generate_config.max_num_seqs": 2 * generate.max_num_seqs}
        if generate.enforce_eager and cfg.platform != "cpu":
            yield {"generate_config.enforce_eager": False}
        offloaded = [f"offload_train_{part}" for part in ("optimizer", "grad", "param")]
        if any(getattr(generate, name) for name in offloaded):
            yield {f"generate_config.{name}": False for name in offloaded}
