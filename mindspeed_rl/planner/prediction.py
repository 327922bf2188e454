"""What is predicted for a run before it begins, and how a report sets it beside what was measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindspeed_rl.config import Run
from mindspeed_rl.config.prediction import Prediction, Range
from mindspeed_rl.planner.assumptions import of_memory, of_time
from mindspeed_rl.planner.calibration import measured_samples
from mindspeed_rl.planner.chips import GIB, chip_of
from mindspeed_rl.planner.memory import EXACT, FIXED, MODEL_ERROR, MemoryPlan, Phase, plan_memory
from mindspeed_rl.planner.seconds import TimePlan, plan_time
from mindspeed_rl.planner.text import seconds_range

#: totals that a run measures, by phase
_TOTALS = {"generate": "memory/generate_gib", "update": "memory/peak_gib"}


def predict(run: Run) -> Prediction:
    """Return what is predicted for a run; that there is nothing, and why, where it cannot be planned."""
    try:
        chip = chip_of(run.config)
        memory, time = plan_memory(run.config, chip, run.num_nodes), plan_time(run.config, chip, run.num_nodes)
        assumed = (*of_memory(run.config, chip), *of_time(run.config, chip, time))
    except Exception as error:  # a model of the user's own, for example: a plan that cannot be made ends no run
        return Prediction(missing=f"{error}")
    return Prediction(
        chip=chip.name,
        verdict=memory.verdict,
        summary=_summary(memory, time),
        seconds=_seconds(time),
        gib={
            phase.name: {owner: _gib(owner, count) for owner, count in phase.owners.items()} for phase in memory.fullest.phases
        },
        totals={phase.name: _total(phase, counts_all=not chip.sleeps) for phase in memory.fullest.phases},
        assumed=tuple(map(str, assumed)),
    )


def _summary(memory: MemoryPlan, time: TimePlan) -> str:
    peak = memory.fullest.peak
    return (
        f"{memory.verdict}: {peak.total / GIB:.1f} of {memory.capacity / GIB:.0f} GiB in {peak.name}, "
        f"{seconds_range(time, time.total)} s an iteration on {memory.chip}"
    )


def _seconds(time: TimePlan) -> dict[str, Range]:
    return {name: Range(seconds, *time.bounds(seconds)) for name, seconds in time.phases.items()}


def _gib(owner: str, count: int) -> Range:
    error = 0.0 if owner in EXACT else MODEL_ERROR
    return Range(count / GIB, count * (1 - error) / GIB, count * (1 + error) / GIB)


def _total(phase: Phase, *, counts_all: bool) -> Range:
    """On a device torch counts its own allocations alone; a process on the CPU is measured whole."""
    left = {name: count for name, count in phase.owners.items() if counts_all or name not in FIXED}
    mine = Phase(phase.name, left)
    return Range(mine.total / GIB, *(bound / GIB for bound in mine.range))


def comparison(run: Run, medians: Mapping[str, float]) -> dict[str, Any]:
    """Return predicted beside measured, as a run's report shows it: {"chip": ..., "rows": [...]}, or {"missing": why}.

    A row has `unit` (s or GiB), `name`, `predicted` before the run, `with_lengths` (seconds with the lengths that the responses
    had; None for bytes), `low` and `high` (between which the measured value is expected, with these lengths) and `measured`
    (None where the run does not say).

    Args:
        medians: of the run's metrics over its later half.
    """
    found = run.prediction
    if found is None or found.missing:
        return {"missing": "nothing was predicted" if found is None else found.missing}
    try:
        chip = chip_of(run.config)
        known = plan_time(run.config, chip, run.num_nodes, samples=measured_samples(run.config, medians))
    except Exception as error:  # as in `predict`: no report goes without its figures for it
        return {"missing": str(error)}
    rows = []
    for name, now in _seconds(known).items():
        before = found.seconds[name].predicted
        rows.append(_row("s", name, before, now, medians.get(f"timing/{name}"), with_lengths=now.predicted))
    for phase, total in found.totals.items():
        if phase in _TOTALS:
            rows.append(_row("GiB", f"{phase}, all owners", total.predicted, total, medians.get(_TOTALS[phase])))
    for phase, owners in found.gib.items():
        for owner, count in owners.items():
            # a process on the CPU keeps what came and went once, so that later iterations do not show it
            if owner not in EXACT and not chip.sleeps:
                continue
            measured = medians.get(f"memory/{_word(phase)}/{_word(owner)}_gib")
            if phase == "update" and measured is None:  # supervised stages measure it under the owner's name alone
                measured = medians.get(f"memory/{_word(owner)}_gib")
            if measured is not None:
                rows.append(_row("GiB", f"{phase}: {owner}", count.predicted, count, measured))
    return {"chip": found.chip, "summary": found.summary, "rows": rows, "assumed": list(found.assumed)}


def _word(name: str) -> str:
    """As names of metrics have it; see `runtime/device_memory.py`."""
    return name.replace(" ", "_").lower()


def _row(
    unit: str, name: str, predicted: float, expected: Range, measured: float | None, *, with_lengths: float | None = None
) -> dict[str, Any]:
    return {
        "unit": unit,
        "name": name,
        "predicted": predicted,
        "with_lengths": with_lengths,
        "low": expected.low,
        "high": expected.high,
        "measured": measured,
    }
