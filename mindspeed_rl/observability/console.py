"""Console output of a run: steps of the start, tables of plan and result, a progress bar and a line of metrics an iteration."""

from __future__ import annotations

import io
import statistics
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TextIO

from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from rich.text import Text

from mindspeed_rl.observability.completions import Completion, choose_group
from mindspeed_rl.observability.history import History
from mindspeed_rl.observability.logging import clean_text

#: rows of the summary, each with the first of its metrics that the run has: label, metrics, format
_SUMMARY_ROWS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("accuracy, held out", ("eval/accuracy",), ".1%"),
    ("reward, held out", ("eval/reward",), ".3f"),
    ("loss, held out", ("eval/loss",), ".4f"),
    ("reward", ("grpo/score/mean", "dapo/score/mean", "critic/score/mean"), ".3f"),
    ("loss", ("actor/pg_loss", "train/loss"), ".4f"),
    ("preferences right", ("train/rewards/accuracies",), ".1%"),
    ("KL", ("actor/kl_loss",), ".4f"),
    ("divergence, teachers", ("distillation/divergence",), ".4f"),
    ("response, tokens", ("response_length/mean",), ".1f"),
)

#: columns of an iteration's line, in this order, where the run has them: metric, label, format
_COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("eval/accuracy", "eval", ".1%"),
    ("eval/reward", "eval_reward", ".3f"),
    ("eval/loss", "eval_loss", ".4f"),
    ("grpo/score/mean", "reward", ".3f"),
    ("dapo/score/mean", "reward", ".3f"),
    ("critic/score/mean", "reward", ".3f"),
    ("train/loss", "loss", ".4f"),
    ("train/rewards/accuracies", "acc", ".3f"),
    ("actor/pg_loss", "loss", ".4f"),
    ("distillation/divergence", "distill", ".4f"),
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

#: phases whose seconds follow the iteration's, in brackets: timer, label
_PHASES: tuple[tuple[str, str], ...] = (
    ("timing/rollout", "rollout"),
    ("timing/rule_reward", "reward"),
    ("timing/reward_model", "reward_model"),
    ("timing/old_log_p", "old_log_p"),
    ("timing/reference_model", "ref"),
    ("timing/teacher_model", "teacher"),
    ("timing/critic_model", "values"),
    ("timing/adv", "adv"),
    ("timing/update_critic", "update_critic"),
    ("timing/update", "update"),
    ("timing/update_weights", "push"),
    ("timing/save", "save"),
    ("timing/evaluate", "eval"),
)


#: responses of a table of completions, and lines of each
_MAX_RESPONSES, _MAX_LINES = 4, 2
#: columns of a table where the output is not a terminal
_PIPE_WIDTH = 100
#: seconds between two looks at how far an iteration is
_ACTIVITY_S = 1.0


def format_table(title: str, rows: Mapping[str, str]) -> str:
    """Return title and aligned rows; rows without a text are left out."""
    shown = {name: clean_text(text) for name, text in rows.items() if text}
    width = max(map(len, shown), default=0)
    return "\n".join([title, *(f"  {name:<{width}}  {text}" for name, text in shown.items())])


def format_duration(seconds: float) -> str:
    """Return seconds as m:ss or h:mm:ss."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def format_summary(
    history: History,
    *,
    outcome: str,
    seconds: float,
    planned: int | None,
    report: Path,
) -> str:
    """Return the end of a run as one table: iterations, time, first and last metrics, memory, speed, path of the report.

    Args:
        history: metrics of the iterations; empty for a run that ended before its first.
        outcome: as in the report.
        seconds: duration of this part of the run.
        planned: iterations of a complete run.
        report: its path.
    """
    done = history.iterations[-1] if history.iterations else 0
    rows = {"iterations": f"{done}{'' if planned is None else f' of {planned}'} in {format_duration(seconds)}"}
    for label, names, spec in _SUMMARY_ROWS:
        for name in names:
            series = history.finite(name)
            if not series.y:
                continue
            first = [f"first {series.y[0]:{spec}}"] if len(series.y) > 1 else []
            best = max(series.y)
            if name in ("eval/accuracy", "eval/reward") and best > series.y[-1]:
                first.append(f"best {best:{spec}} at iteration {series.x[series.y.index(best)]}")
            rows[label] = f"{series.y[-1]:{spec}}" + (f" ({', '.join(first)})" if first else "")
            break
    if memory := history.finite("memory/peak_gib").y:
        rows["memory"] = f"{max(memory):.2f} GiB at most, of the worker that has most"
    speed = [f"{statistics.fmean(times):.2f} s per iteration"] if (times := history.finite("timing/all").y) else []
    if tokens := history.finite("e2e_tps").y:
        speed.append(f"{statistics.fmean(tokens):,.0f} tokens/s and device")
    elif tokens := history.finite("train/tokens_per_s").y:
        speed.append(f"{statistics.fmean(tokens):,.0f} tokens/s")
    rows["speed"] = ", ".join(speed)
    rows["report"] = str(report)
    return format_table(f"{outcome.partition(':')[0]}:", rows)


def _format_metrics(
    iteration: int, total: int, metrics: Mapping[str, float], eta_s: float | None = None, width: int | None = None
) -> str:
    """Return an iteration as a line: "iteration 2/250 | reward 0.71 | ... | 0.31 s (rollout 0.12, update 0.1) | 1:02 left".

    Args:
        width: columns of the terminal. A longer line becomes two, the seconds in the second one, each without what does
            not fit. None for any length.
    """
    columns = [f"iteration {iteration:>{len(str(total))}}/{total}"]
    shown: set[str] = set()
    for name, label, spec in _COLUMNS[:-1]:
        if name in metrics and label not in shown:
            shown.add(label)
            columns.append(f"{label} {metrics[name]:{spec}}")
    phases = [(metrics[timer], f"{phase} {metrics[timer]:.2f}") for timer, phase in _PHASES if timer in metrics]
    total_s = metrics.get("timing/all")
    left = [] if eta_s is None else [f"{format_duration(eta_s)} left"]

    def join_times() -> str:
        names = f" ({', '.join(text for _, text in phases)})" if phases else ""
        return " | ".join([*([] if total_s is None else [f"{total_s:.2f} s{names}"]), *left])

    line = " | ".join(part for part in (*columns, join_times()) if part)
    if width is None or len(line) <= width:
        return line
    indent = " " * (columns[0].find("/") - len(str(total)))
    while len(indent + join_times()) > width and phases:
        phases.remove(min(phases))  # the shortest one
    while len(" | ".join(columns)) > width and len(columns) > 1:
        columns.pop()
    return f"{' | '.join(columns)}\n{indent}{join_times()}"


def format_completions(completions: Sequence[Completion], width: int) -> str:
    """Return responses to one prompt as a table: the best and the worst of the first prompt whose rewards differ.

    Args:
        width: columns of the terminal.
    """
    group = choose_group(completions)
    if not group:
        return ""
    half = _MAX_RESPONSES // 2
    shown = group if len(group) <= _MAX_RESPONSES else [*group[:half], *group[-half:]]
    names = list(dict.fromkeys(name for completion in shown for name in completion.parts))
    names = names if len(names) > 1 else []  # one part is the reward
    table = Table(box=SIMPLE, show_edge=False, pad_edge=False, width=width)
    for name in ("reward", *names):
        table.add_column(Text(name), justify="right", no_wrap=True)
    table.add_column("response", ratio=1, overflow="fold")
    for completion in shown:
        numbers = [completion.reward, *(completion.parts.get(name) for name in names)]
        cells = ["-" if number is None else f"{number:.3g}" for number in numbers]
        table.add_row(*cells, Text(_cut(completion.response, _MAX_LINES * width)))
    output = io.StringIO()
    Console(file=output, width=width, color_system=None, legacy_windows=False).print(table)
    more = f" ({len(shown)} of {len(group)} responses)" if len(shown) < len(group) else ""
    lines = [f"prompt: {_cut(group[0].prompt, 2 * width - 40, keeps_end=True)}{more}", *output.getvalue().splitlines()]
    return "\n".join(line.rstrip() for line in lines)


def _cut(text: str, length: int, *, keeps_end: bool = False) -> str:
    """Return a text in one line, without what is longer than this: its end, or its start."""
    text = clean_text(text).replace("\n", " ").strip()
    if len(text) <= length:
        return text
    return f"...{text[-length:]}" if keeps_end else f"{text[:length]}..."


class StartSteps:
    """Show the steps before the first iteration, a line each with its seconds.

    Args:
        show: takes each line; prints it by default.
        clock: seconds.
    """

    def __init__(
        self, show: Callable[[str], None] = lambda line: print(line, flush=True), clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.show, self._clock = show, clock
        self._start_s = self._last_s = clock()

    def done(self, step: str) -> None:
        """Show that a step has ended, at which second, and how long it took."""
        now_s = self._clock()
        self.show(f"  {now_s - self._start_s:5.1f} s  {step} ({now_s - self._last_s:.1f} s)")
        self._last_s = now_s


class IterationProgress:
    """Show a run's iterations as a line each, or two on a narrow terminal, where a bar shows what happens; a context manager.

    Piped lines have no control characters.

    Args:
        total: iterations of the run.
        title: in front of the bar, e.g. "grpo".
        start: iterations before this part of the run (a resumed run).
        stream: output; a bar is drawn only on a terminal.
        every: iterations between two lines; the last one always has a line.
        now_s: seconds from a monotonic clock.
        activity: describes how far the iteration is, for the bar.
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
        activity: Callable[[], str] = str,
    ) -> None:
        self._activity, self._end = activity, threading.Event()
        self.total, self._first, self._every = total, start, every
        self._now_s, self._start_s = now_s, now_s()
        self._stream = stream if stream is not None else sys.stdout
        self._bar: Progress | None = None
        if self._stream.isatty():
            last = TextColumn("{task.fields[activity]}", table_column=Column(no_wrap=True, overflow="ellipsis"))
            columns = (TextColumn("{task.description}"), BarColumn(16), MofNCompleteColumn(), TimeElapsedColumn())
            times = TextColumn("{task.fields[left]}", table_column=Column(no_wrap=True))
            self._bar = Progress(*columns, times, last, console=Console(file=self._stream), transient=True)
            self._task = self._bar.add_task(title, total=total, completed=start, left="", activity="")

    def __enter__(self) -> IterationProgress:
        if self._bar is not None:
            self._bar.start()
            threading.Thread(target=self._follow, args=(self._bar,), name="activity", daemon=True).start()
        return self

    def _follow(self, bar: Progress) -> None:
        """Show how far the iteration is, until the end."""
        while not self._end.wait(_ACTIVITY_S):
            bar.update(self._task, activity=self._activity())

    def __exit__(self, *exception: object) -> None:
        self._end.set()
        if self._bar is not None:
            self._bar.stop()

    def update(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Show the line of an iteration (the first is 1) and advance the bar."""
        is_shown = iteration % self._every == 0 or iteration == self.total or any(name.startswith("eval/") for name in metrics)
        if not is_shown and self._bar is None:
            return
        # iterations before a resume took none of this time
        done, left = iteration - self._first, self.total - iteration
        eta_s = (self._now_s() - self._start_s) / done * left if done > 0 and left > 0 else None
        if self._bar is None:
            self.note(_format_metrics(iteration, self.total, metrics, eta_s))
            return
        if is_shown:  # the bar has the time that is left
            self.note(_format_metrics(iteration, self.total, metrics, width=self._bar.console.width))
        text = "" if eta_s is None else f"{format_duration(eta_s)} left"
        self._bar.update(self._task, completed=iteration, left=text, activity="")

    def show_completions(self, iteration: int, completions: Sequence[Completion]) -> None:
        """Show responses of an iteration as a table."""
        width = _PIPE_WIDTH if self._bar is None else self._bar.console.width
        if table := format_completions(completions, width):
            self.note(f"responses of iteration {iteration}\n{table}")

    def note(self, text: str) -> None:
        """Show a line of its own."""
        text = clean_text(text)
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            print(text, file=self._stream, flush=True)
