"""The predicted bytes and seconds of a run, their comparison with what it measured, and factors that correct other plans."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mindspeed_rl.config import RunConfig
from mindspeed_rl.config.keys import ROLE_GROUPS
from mindspeed_rl.config.keys.model import ModelKeys
from mindspeed_rl.config.loader import TOP_LEVEL, build_run_config
from mindspeed_rl.observability.expected_curve import ExpectedCurve
from mindspeed_rl.observability.history import History
from mindspeed_rl.observability.run_files import read_lines
from mindspeed_rl.planner.advice import find_relieving_changes
from mindspeed_rl.planner.assumptions import list_memory_assumptions, list_time_assumptions
from mindspeed_rl.planner.devices import GIB, Device, find_device
from mindspeed_rl.planner.memory import MemoryPlan, Phase
from mindspeed_rl.planner.promise import Promise, make_promise
from mindspeed_rl.planner.promise_check import Assumed, Promised, PromiseWatch, compare_with
from mindspeed_rl.planner.samples import SampleMeans, max_response_len
from mindspeed_rl.planner.seconds import TimePlan, plan_time
from mindspeed_rl.run import Run
from mindspeed_rl.run.draft import draft

#: totals that a run measures, by phase
_TOTALS = {"generate": "memory/generate_gib", "update": "memory/peak_gib"}
_MAX_SETTINGS = 3

_Row = dict[str, str | float | None]


@dataclass(frozen=True)
class _Range:
    """A predicted value and the bounds between which the measured one is expected; equal where it is counted."""

    predicted: float
    low: float
    high: float


@dataclass(frozen=True)
class _Prediction:
    """The plan of a run, an advisor of `trainers.launch.launch`.

    Attributes:
        promise: what the run will need and take; None where nothing is predicted.
        is_strict: a broken promise ends the run.
        device: kind of device that it is made for.
        summary: verdict, peak and seconds of an iteration in a line, or why nothing is predicted.
        seconds: by phase.
        gib: memory of the fullest device in GiB, by phase and owner.
        totals: total memory of the fullest device by phase, as far as the run measures it.
        assumed: sentences about the numbers that are taken as given.
        missing: why nothing is predicted; empty where something is.
    """

    run: Run
    promise: Promise | None = None
    is_strict: bool = False
    device: str = ""
    summary: str = ""
    seconds: dict[str, _Range] = field(default_factory=dict)
    gib: dict[str, dict[str, _Range]] = field(default_factory=dict)
    totals: dict[str, _Range] = field(default_factory=dict)
    assumed: tuple[str, ...] = ()
    missing: str = ""

    def compare(self, history: History) -> dict[str, object]:
        """Return predicted next to measured values, as a run's report shows them: {"chip", "rows", ...}, or {"missing": why}.

        A row has `unit` (s or GiB), `name`, `predicted` before the run, `with_lengths` (seconds with the lengths that the
        responses had; None for bytes), `low` and `high` (bounds of the measured value, with these lengths) and `measured` (None
        where the run does not measure it).
        """
        if self.missing:
            return {"missing": self.missing}
        device, medians = find_device(self.run.config), _compute_later_medians(history)
        try:
            plan = plan_time(self.run, device, samples=_measure_samples(self.run.config, medians))
        except ValueError as error:
            return {"missing": str(error)}
        kept = compare_with(self._list_promised(), self._describe_assumed(), history)
        rows = [
            _row("s", name, self.seconds[name].predicted, now, medians.get(f"timing/{name}"), with_lengths=now.predicted)
            for name, now in _ranges_of_seconds(plan).items()
        ]
        for phase, total in self.totals.items():
            if phase in _TOTALS:
                rows.append(_row("GiB", f"{phase}, all owners", total.predicted, total, medians.get(_TOTALS[phase])))
        for phase, owners in self.gib.items():
            for owner, count in owners.items():
                # a process on the CPU does not return memory to the system, so that later iterations do not show peaks
                if owner not in Phase.EXACT and not device.sleeps:
                    continue
                names = [f"memory/{phase}/{owner}_gib"]
                if phase == "update":  # supervised stages measure it only under the owner's name
                    names.append(f"memory/{owner}_gib")
                names = [name.replace(" ", "_").lower() for name in names]  # as `runtime/device_memory.py` names them
                measured = next((medians[name] for name in names if name in medians), None)
                if measured is not None:
                    rows.append(_row("GiB", f"{phase}: {owner}", count.predicted, count, measured))
        return {
            "chip": self.device,
            "summary": self.summary,
            "rows": rows,
            "kept": [row.encode() for row in kept],
            "assumed": list(self.assumed),
        }

    @property
    def fits(self) -> bool:
        """False where the run is predicted not to fit; True where nothing is predicted."""
        return self.promise is None or self.promise.is_kept

    @property
    def lines(self) -> Sequence[str]:
        """The promise as lines, for the console before devices are claimed; none where nothing is predicted."""
        return () if self.promise is None else tuple(self.promise.list_lines())

    def watch(self, history: History, show: Callable[[str], None]) -> PromiseWatch:
        """Return an observer that checks the promise while the run goes.

        Args:
            history: iterations before a resume.
            show: takes a line.
        """
        promised = self._list_promised()
        return PromiseWatch(promised, self._describe_assumed(), show, history, is_strict=self.is_strict)

    def _list_promised(self) -> list[Promised]:
        """Return the figures that a run measures, with their ranges."""
        if self.promise is None:
            return []
        time = self.promise.time
        figures = [Promised(name, "s", f"timing/{name}", seconds.low, seconds.high) for name, seconds in self.seconds.items()]
        figures.insert(0, Promised("all", "s", "timing/all", *time.bounds(time.total)))
        totals = (f for f in self.totals.items() if f[0] in _TOTALS)
        return figures + [Promised(f"memory: {name}", "GiB", _TOTALS[name], total.low, total.high) for name, total in totals]

    def _describe_assumed(self) -> Assumed:
        """Return what the promise assumed of samples and engine."""
        generate, samples = self.run.config.generate_config, SampleMeans()
        if self.promise is None or generate is None or self.run.config.is_supervised:
            return Assumed(samples.response or math.inf, samples.prompt or math.inf, math.inf, True, False, False)
        lengths, prompt = self.promise.time.lengths, self.promise.time.prompt
        return Assumed(
            lengths.mean,
            prompt,
            lengths.limit,
            generate.enforce_eager,
            generate.offload_train_optimizer or generate.offload_train_param,
            self.run.placement.disaggregated,
        )

    def suggest_settings(self, phase: str) -> str:
        """Return the nearest settings with more room in a phase that ran out of memory, in a sentence."""
        cfg = self.run.config
        tree = _build_run_tree(dataclasses.asdict(cfg), cfg.as_written())
        try:
            changes = find_relieving_changes(tree, self.run, phase, find_device(cfg))
        except ValueError as error:
            return f"What would fit cannot be said: {error}"
        settings = [
            f"{', '.join(f'{key}: {json.dumps(value)}' for key, value in change.values.items())} ({change.costs})"
            for change in changes[:_MAX_SETTINGS]
        ]
        if not settings:
            return "No single setting leaves much more room."
        return f"Nearest settings with more room: {'; '.join(settings)}."


def predict(
    run: Run, samples: SampleMeans | None = None, *, bands: Sequence[ExpectedCurve] = (), is_strict: bool = False
) -> _Prediction:
    """Predict bytes and seconds of a run; the prediction of a run that cannot be planned has the reason.

    Args:
        samples: means that are known, of its data for example.
        bands: curves of earlier runs and recipes.
        is_strict: a broken promise ends the run.
    """
    cfg = run.config
    try:
        device = find_device(cfg)
        promise = make_promise(run, device=device, samples=samples, bands=bands)
        memory, time = promise.memory, promise.time
        assumed = (*list_memory_assumptions(cfg, device), *list_time_assumptions(cfg, device, time))
    except ValueError as error:
        return _Prediction(run, summary=f"nothing: {error}", missing=str(error))
    return _Prediction(
        run,
        promise,
        is_strict,
        device=device.name,
        summary=_summarize(memory, time),
        seconds=_ranges_of_seconds(time),
        gib={
            phase.name: {
                owner: _Range(count / GIB, count * (1 - error) / GIB, count * (1 + error) / GIB)
                for owner, count in phase.owners.items()
                for error in [0.0 if owner in Phase.EXACT else Phase.MODEL_ERROR]
            }
            for phase in memory.fullest.phases
        },
        totals={phase.name: _predict_total(phase, counts_all=not device.sleeps) for phase in memory.fullest.phases},
        assumed=tuple(map(str, assumed)),
    )


def _summarize(memory: MemoryPlan, time: TimePlan) -> str:
    peak = memory.fullest.peak
    return (
        f"{memory.verdict}: {peak.total / GIB:.1f} of {memory.capacity / GIB:.0f} GiB in {peak.name}, "
        f"{time.format_bounds(time.total)} s an iteration on {memory.device}"
    )


def _ranges_of_seconds(time: TimePlan) -> dict[str, _Range]:
    return {name: _Range(seconds, *time.bounds(seconds, name)) for name, seconds in time.phases.items()}


def _predict_total(phase: Phase, *, counts_all: bool) -> _Range:
    """Return the bytes that a run measures: torch counts only its own allocations, and the CPU counts the process."""
    owners = {name: count for name, count in phase.owners.items() if counts_all or name not in Phase.FIXED}
    measured = Phase(phase.name, owners)
    return _Range(measured.total / GIB, *(bound / GIB for bound in measured.range))


def _row(
    unit: str, name: str, predicted: float, expected: _Range, measured: float | None, *, with_lengths: float | None = None
) -> _Row:
    return {
        "unit": unit,
        "name": name,
        "predicted": predicted,
        "with_lengths": with_lengths,
        "low": expected.low,
        "high": expected.high,
        "measured": measured,
    }


# ---------------------------------------------------------------------- calibration


@dataclass(frozen=True)
class _Measured:
    """The measurements of a run folder.

    Attributes:
        medians: medians of every metric over the later half of the iterations.
        run: the draft of its run file; the folder does not record the number of machines, on which no second depends.
    """

    folder: Path
    medians: dict[str, float]
    run: Run


def read_measured(folder: str | Path) -> _Measured:
    """Read the measurements of a run folder.

    Raises:
        ValueError: the folder has no metrics.jsonl with iterations, or no report.json with its run file.
    """
    path = Path(folder)
    try:
        history = History(read_lines(path / "metrics.jsonl"))
        report = json.loads((path / "report.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"--calibrate: {path} is not a folder of a run that wrote a report: {error}.") from None
    medians = _compute_later_medians(history)
    if "timing/all" not in medians and "timing/update" not in medians:
        raise ValueError(f"--calibrate: {path / 'metrics.jsonl'} has no iteration with timings.")
    values = report.get("config", {})
    written = report.get("config_set") or {group: values[group] for group in TOP_LEVEL if values.get(group)}
    cfg = build_run_config(_build_run_tree(values, written), config_name=str(report.get("title", "run")))
    return _Measured(path, medians, draft(cfg))


def _compute_later_medians(history: History) -> dict[str, float]:
    """Return the median of every metric over the later half of the iterations; the first half includes one-time work."""
    return {name: statistics.median(half.y) for name, half in history.later_half().items()}


def _build_run_tree(values: Mapping[str, Any], written: Mapping[str, Any]) -> dict[str, Any]:
    """Build a run file's groups and model blocks.

    Args:
        values: values of all keys of all groups.
        written: values that the run file sets, by group.
    """
    tree: dict[str, Any] = {group: dict(keys) for group, keys in written.items()}
    tree |= tree.pop("run", {"platform": values.get("platform", "auto")})
    tree.pop("sampling_config", None)
    shape = {field.name for field in dataclasses.fields(ModelKeys)} | {"padded_vocab_size"}
    blocks = {}
    for role in ("megatron_training", *ROLE_GROUPS):
        keys = values.get(role) or {}
        if keys.get("model") and keys.get("num_layers") is not None:
            blocks[keys["model"]] = {name: value for name, value in keys.items() if name in shape and value is not None}
    tree["model"] = blocks
    return tree


def compute_factors(measured: _Measured, device: Device) -> dict[str, float]:
    """Compute measured over predicted seconds by phase; "all" for phases that the run does not have."""
    plan = plan_time(measured.run, device, samples=_measure_samples(measured.run.config, measured.medians))
    factors = {}
    for name, seconds in plan.phases.items():
        if (real := measured.medians.get(f"timing/{name}", 0.0)) > 0 and seconds > 0:
            factors[name] = real / seconds
    if factors:
        known = sum(plan.phases[name] for name in factors)
        factors["all"] = sum(plan.phases[name] * factor for name, factor in factors.items()) / known
    return factors


def _measure_samples(cfg: RunConfig, medians: Mapping[str, float]) -> SampleMeans:
    """Return the means of the samples that a run measured."""
    response, prompt = medians.get("response_length/mean"), medians.get("prompt_length/mean")
    if cfg.is_supervised and medians.get("train/tokens") and medians.get("train/samples"):
        # a pair has two sequences
        rows = medians["train/samples"] * (2 if cfg.stage in ("dpo", "simpo", "cpo", "orpo", "orm") else 1)
        return SampleMeans(min(medians["train/tokens"] / rows, float(cfg.actor_config.seq_length or 4096)))
    if response is not None and cfg.generate_config is not None:
        response = min(response, max_response_len(cfg))
    return SampleMeans(response or None, prompt or None, medians.get("turns/mean"), medians.get("tool_seconds/mean"))
