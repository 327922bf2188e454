"""Factors from the measurements of a run, which correct the predicted seconds of other runs."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_rl.config.keys import ROLE_GROUPS
from mindspeed_rl.config.keys.model import ModelKeys
from mindspeed_rl.config.loader import TOP_LEVEL, build_run_config
from mindspeed_rl.config.run import RunConfig
from mindspeed_rl.observability.history import History
from mindspeed_rl.observability.run_files import read_lines
from mindspeed_rl.planner.devices import Device
from mindspeed_rl.planner.samples import SampleMeans, max_response_len
from mindspeed_rl.planner.seconds import plan_time


@dataclass(frozen=True)
class _Measured:
    """The measurements of a run folder.

    Attributes:
        medians: of every metric over the later half of the iterations.
        cfg: its run file.
    """

    folder: Path
    medians: dict[str, float]
    cfg: RunConfig


def read_measured(folder: str | Path) -> _Measured:
    """Read the measurements of a run folder.

    Raises:
        ValueError: there is no metrics.jsonl with iterations, or no report.json with its run file.
    """
    path = Path(folder)
    try:
        history = History(read_lines(path / "metrics.jsonl"))
        report = json.loads((path / "report.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"--calibrate: {path} is no folder of a run that wrote a report: {error}.") from None
    medians = compute_later_medians(history)
    if "timing/all" not in medians and "timing/update" not in medians:
        raise ValueError(f"--calibrate: {path / 'metrics.jsonl'} has no iteration with timings.")
    values = report.get("config", {})
    written = report.get("config_set") or {group: values[group] for group in TOP_LEVEL if values.get(group)}
    cfg = build_run_config(build_run_tree(values, written), config_name=str(report.get("title", "run")))
    return _Measured(path, medians, cfg)


def compute_later_medians(history: History) -> dict[str, float]:
    """Return the median of every metric over the later half of the iterations; the first half includes one-time work."""
    return {name: statistics.median(half.y) for name, half in history.later_half().items()}


def build_run_tree(values: Mapping[str, Any], written: Mapping[str, Any]) -> dict[str, Any]:
    """Build a run file's groups and model blocks.

    Args:
        values: of all keys of all groups.
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
    # the folder does not record the number of machines, on which no second depends
    plan = plan_time(measured.cfg, device, samples=measure_samples(measured.cfg, measured.medians))
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
    if response is not None and cfg.generate_config is not None:
        response = min(response, max_response_len(cfg))
    return SampleMeans(response or None, prompt or None, medians.get("turns/mean"), medians.get("tool_seconds/mean"))
