"""Measurements of earlier runs that correct plans: by `--calibrate`, and on the CPU by the runs beside a run folder.

Constants of NPUs are fitted to published runs. The CPU has constants of one core of one machine, which say nothing about the
cores, threads and other programs of another one; there, what earlier runs measured is the best guess, as it includes the
processes of a run. Where there is none, a trial measures the machine (trial.py).
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_rl.config import RunConfig
from mindspeed_rl.config.keys import ROLE_GROUPS
from mindspeed_rl.config.keys.model import ModelKeys
from mindspeed_rl.config.loader import TOP_LEVEL, build_run_config
from mindspeed_rl.observability.history import History
from mindspeed_rl.observability.run_files import read_lines
from mindspeed_rl.planner.devices import Device, find_device
from mindspeed_rl.planner.samples import SampleMeans, max_response_len
from mindspeed_rl.planner.seconds import TimePlan, calibrate, plan_time
from mindspeed_rl.run import Run
from mindspeed_rl.run.draft import draft

#: earlier runs that correct a plan, the newest ones
_MAX_EARLIER = 3


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
    medians = compute_later_medians(history)
    if "timing/all" not in medians and "timing/update" not in medians:
        raise ValueError(f"--calibrate: {path / 'metrics.jsonl'} has no iteration with timings.")
    values = report.get("config", {})
    written = report.get("config_set") or {group: values[group] for group in TOP_LEVEL if values.get(group)}
    cfg = build_run_config(build_run_tree(values, written), config_name=str(report.get("title", "run")))
    return _Measured(path, medians, draft(cfg))


def compute_later_medians(history: History) -> dict[str, float]:
    """Return the median of every metric over the later half of the iterations; the first half includes one-time work."""
    return {name: statistics.median(half.y) for name, half in history.later_half().items()}


def build_run_tree(values: Mapping[str, Any], written: Mapping[str, Any]) -> dict[str, Any]:
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
    plan = plan_time(measured.run, device, samples=measure_samples(measured.run.config, measured.medians))
    factors = {}
    for name, seconds in plan.phases.items():
        if (real := measured.medians.get(f"timing/{name}", 0.0)) > 0 and seconds > 0:
            factors[name] = real / seconds
    if factors:
        known = sum(plan.phases[name] for name in factors)
        factors["all"] = sum(plan.phases[name] * factor for name, factor in factors.items()) / known
    return factors


def measure_samples(cfg: RunConfig, medians: Mapping[str, float]) -> SampleMeans:
    """Return the means of the samples that a run measured."""
    response, prompt = medians.get("response_length/mean"), medians.get("prompt_length/mean")
    if cfg.is_supervised and medians.get("train/tokens") and medians.get("train/samples"):
        # a pair has two sequences
        rows = medians["train/samples"] * (2 if cfg.stage in ("dpo", "simpo", "cpo", "orpo", "orm") else 1)
        return SampleMeans(min(medians["train/tokens"] / rows, float(cfg.actor_config.seq_length or 4096)))
    if response is not None and cfg.generate_config is not None:
        response = min(response, max_response_len(cfg))
    return SampleMeans(response or None, prompt or None, medians.get("turns/mean"), medians.get("tool_seconds/mean"))


def plan_by_earlier_runs(plan: TimePlan, run: Run, device: Device) -> TimePlan:
    """Return a plan with the speed of this machine, by the newest finished runs beside its run folder.

    Only on the CPU. Each phase takes as many times as long as planned as it did in the median of these runs; all constants stay
    where there are none.
    """
    if device.sleeps:
        return plan
    try:
        folders = sorted(run.folder.parent.glob("*/report.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    except OSError:  # one was removed meanwhile
        folders = []
    factors: dict[str, list[float]] = {}
    used: list[str] = []
    for path in folders:
        if len(used) == _MAX_EARLIER:
            break
        try:
            if path.parent == run.folder or json.loads(path.read_text(encoding="utf-8")).get("outcome") != "finished":
                continue
            measured = read_measured(path.parent)
            other = find_device(measured.run)
            if measured.run.config.is_supervised != run.config.is_supervised or other.name != device.name:
                continue
            made = compute_factors(measured, device)
        except (OSError, ValueError, AttributeError):  # a damaged folder, or one of another version, is no earlier run
            continue
        for name, factor in made.items():
            factors.setdefault(name, []).append(factor)
        used += [path.parent.name] if made else []
    if not used:
        return plan
    note = f"the speed of this machine as in earlier runs: {', '.join(used)}"
    corrected = calibrate(plan, {name: statistics.median(values) for name, values in factors.items()})
    return dataclasses.replace(corrected, notes=(*plan.notes, note))
