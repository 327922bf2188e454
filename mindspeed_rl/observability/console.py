"""What the console shows around a run: a table of its plan before, one summary behind."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path

from mindspeed_rl.observability.history import History
from mindspeed_rl.observability.progress import clock

#: figures of the summary, the first of a line that the run has: label, metrics, format
_FIGURES: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("accuracy, held out", ("eval/accuracy",), ".1%"),
    ("reward, held out", ("eval/reward",), ".3f"),
    ("loss, held out", ("eval/loss",), ".4f"),
    ("reward", ("grpo/score/mean", "dapo/score/mean", "critic/score/mean"), ".3f"),
    ("loss", ("actor/pg_loss", "train/loss"), ".4f"),
    ("preferences right", ("train/rewards/accuracies",), ".1%"),
    ("KL", ("actor/kl_loss",), ".4f"),
    ("response, tokens", ("response_length/mean",), ".1f"),
)


def table(title: str, rows: Mapping[str, str]) -> str:
    """Title and aligned rows; rows without a text are left out."""
    shown = {name: text for name, text in rows.items() if text}
    width = max(map(len, shown), default=0)
    return "\n".join([title, *(f"  {name:<{width}}  {text}" for name, text in shown.items())])


def summary(
    history: History,
    *,
    outcome: str,
    seconds: float,
    planned: int | None,
    report: Path,
    before: Mapping[str, float] | None = None,
) -> str:
    """The end of a run in one table: iterations, time, first and last figures, memory, speed, where the report is.

    Args:
        history: what the iterations measured; empty for a run that ended before its first.
        outcome: how it ended, as the report says it.
        seconds: of this part of the run.
        planned: iterations that the run was to have.
        before: figures of the evaluation before the first iteration.
    """
    done = history.iterations[-1] if history else 0
    rows = {"iterations": f"{done}{'' if planned is None else f' of {planned}'} in {clock(seconds)}"}
    for label, names, spec in _FIGURES:
        for name in names:
            values = list(history.finite(name).y)
            if (start := (before or {}).get(name)) is not None:
                values = [start, *values]
            if values:
                first = f" (first {values[0]:{spec}})" if len(values) > 1 else ""
                rows[label] = f"{values[-1]:{spec}}{first}"
                break
    if memory := history.finite("memory/peak_gib").y:
        rows["memory"] = f"{max(memory):.2f} GiB at most, of the worker that has most"
    speed = [f"{statistics.fmean(times):.2f} s an iteration"] if (times := history.finite("timing/all").y) else []
    if tokens := history.finite("e2e_tps").y:
        speed.append(f"{statistics.fmean(tokens):,.0f} tokens/s and device")
    elif tokens := history.finite("train/tokens_per_s").y:
        speed.append(f"{statistics.fmean(tokens):,.0f} tokens/s")
    rows["speed"] = ", ".join(speed)
    rows["report"] = str(report)
    return table(f"{outcome.partition(':')[0]}:", rows)
