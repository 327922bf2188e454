"""The predicted bytes and seconds of a run, their comparison with what it measured, and factors that correct other plans."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mindspeed_rl.observability.expected_curve import ExpectedCurve
from mindspeed_rl.observability.history import History
from mindspeed_rl.planner.advice import find_relieving_changes
from mindspeed_rl.planner.assumptions import list_memory_assumptions, list_time_assumptions
from mindspeed_rl.planner.calibration import build_run_tree, compute_later_medians, measure_samples
from mindspeed_rl.planner.devices import GIB, find_device
from mindspeed_rl.planner.memory import MemoryPlan, Phase
from mindspeed_rl.planner.promise import Promise, make_promise
from mindspeed_rl.planner.promise_check import Assumed, Promised, PromiseWatch, compare_with
from mindspeed_rl.planner.samples import SampleMeans
from mindspeed_rl.planner.seconds import TimePlan, calibrate, plan_time
from mindspeed_rl.run import Run

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
        device, medians = find_device(self.run), compute_later_medians(history)
        try:
            planned = self.run if self.promise is None else self.promise.planned or self.run
            plan = plan_time(planned, device, samples=measure_samples(self.run.config, medians))
            if self.promise is not None and self.promise.time.factors:
                plan = calibrate(plan, self.promise.time.factors)
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
        tree = build_run_tree(dataclasses.asdict(cfg), cfg.as_written())
        try:
            changes = find_relieving_changes(tree, self.run, phase, find_device(self.run))
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
    run: Run, mean_prompt: float | None = None, *, bands: Sequence[ExpectedCurve] = (), is_strict: bool = False
) -> _Prediction:
    """Predict bytes and seconds of a run; the prediction of a run that cannot be planned has the reason.

    Args:
        mean_prompt: mean tokens of a prompt, where its data is read.
        bands: curves of earlier runs and recipes.
        is_strict: a broken promise ends the run.
    """
    cfg = run.config
    try:
        device = find_device(run)
        promise = make_promise(run, device=device, samples=SampleMeans(prompt=mean_prompt), bands=bands)
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
