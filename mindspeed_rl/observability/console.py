"""What the console shows around a run: a table of its plan before, one summary behind."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from mindspeed_rl.observability.history import History

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


# What the line shows, in this order, where the run has it: metric, label, format.
HEADLINES: tuple[tuple[str, str, str], ...] = (
    ("eval/accuracy", "eval", ".1%"),
    ("eval/reward", "eval_reward", ".3f"),
    ("eval/loss", "eval_loss", ".4f"),
    ("grpo/score/mean", "reward", ".3f"),
    ("dapo/score/mean", "reward", ".3f"),
    ("critic/score/mean", "reward", ".3f"),
    ("train/loss", "loss", ".4f"),
    ("train/rewards/accuracies", "acc", ".3f"),
    ("actor/pg_loss", "loss", ".4f"),
    ("actor/kl_loss", "kl", ".4f"),
    ("actor/entropy", "entropy", ".3f"),
    ("actor/pg_clipfrac", "clip", ".3f"),
    ("actor/grad_norm", "grad", ".3f"),
    ("train/grad_norm", "grad", ".3f"),
    ("critic/vf_loss", "vf_loss", ".4f"),
    ("response_length/mean", "length", ".1f"),
    ("rollout/log_probs_diff_max", "rollout_diff", ".1e"),
    ("actor/lr", "lr", ".1e"),
    ("train/lr", "lr", ".1e"),
    ("train/tokens_per_s", "tok/s", ",.0f"),
    ("timing/all", "s", ".2f"),
)

# Phases whose seconds stand in brackets behind those of the iteration.
PHASES: tuple[tuple[str, str], ...] = (
    ("timing/rollout", "rollout"),
    ("timing/old_log_p", "old_log_p"),
    ("timing/reference_model", "ref"),
    ("timing/update", "update"),
    ("timing/update_weights", "push"),
)


def metric_line(iteration: int, total: int, metrics: Mapping[str, float], eta_s: float | None = None) -> str:
    """The iteration on one line: "iteration 12/250 | reward 0.71 | ... | 0.31 s (rollout 0.12, update 0.1) | 1:02 left"."""
    parts = [f"iteration {iteration:>{len(str(total))}}/{total}"]
    shown: set[str] = set()
    for name, label, spec in HEADLINES:
        if name not in metrics or label in shown:
            continue
        shown.add(label)
        value = format(metrics[name], spec)
        parts.append(f"{value} s{_phases(metrics)}" if label == "s" else f"{label} {value}")
    if eta_s is not None:
        parts.append(f"{clock(eta_s)} left")
    return " | ".join(parts)


def clock(seconds: float) -> str:
    """Seconds as m:ss or h:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _phases(metrics: Mapping[str, float]) -> str:
    phases = [f"{label} {metrics[name]:.2f}" for name, label in PHASES if name in metrics]
    return f" ({', '.join(phases)})" if phases else ""


class IterationProgress:
    """Shows a run's iterations; use as a context manager.

    Args:
        total: iterations of the run.
        title: stands before the bar, e.g. "grpo".
        start: iterations done before (a resumed run).
        stream: where to write; a bar is drawn only on a terminal.
        every: shows every so many lines; the last one always.
        now_s: seconds from a monotonic clock.
    """

    def __init__(
        self,
        total: int,
        title: str = "train",
        *,
        start: int = 0,
        stream: TextIO | None = None,
        every: int = 1,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total = total
        self._first = start
        self._every = every
        self._now_s = now_s
        self._started_s = now_s()
        self._stream = stream if stream is not None else sys.stdout
        self._bar: Progress | None = None
        if self._stream.isatty():
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self._bar = Progress(*columns, TimeRemainingColumn(), console=Console(file=self._stream), transient=True)
            self._task = self._bar.add_task(title, total=total, completed=start)

    def __enter__(self) -> IterationProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Iteration number `iteration` (the first is 1) is done: its line is shown, the bar moves on."""
        if iteration % self._every == 0 or iteration == self.total or any(name.startswith("eval/") for name in metrics):
            self.note(metric_line(iteration, self.total, metrics, self._eta_s(iteration)))
        if self._bar is not None:
            self._bar.update(self._task, completed=iteration)

    def note(self, text: str) -> None:
        """A line of its own."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            print(text, file=self._stream, flush=True)

    def _eta_s(self, iteration: int) -> float | None:
        # iterations before a resume took none of this time
        done, left = iteration - self._first, self.total - iteration
        if done <= 0 or left <= 0:
            return None
        return (self._now_s() - self._started_s) / done * left


class StartSteps:
    """Times the steps of a start.

    Args:
        show: takes each line; prints it unless said otherwise.
        clock: seconds.
    """

    def __init__(
        self, show: Callable[[str], None] = lambda line: print(line, flush=True), clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.show = show
        self._clock = clock
        self._begun = self._last = clock()

    def done(self, what: str) -> None:
        """Shows that a step is through, when, and how long it took."""
        now = self._clock()
        self.show(f"  {now - self._begun:5.1f} s  {what} ({now - self._last:.1f} s)")
        self._last = now
