"""What a run that was measured says of the seconds that are predicted for others."""

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
from mindspeed_rl.observability.run_files import read_metrics
from mindspeed_rl.planner.chips import Chip
from mindspeed_rl.planner.samples import SampleMeans, longest_response
from mindspeed_rl.planner.seconds import plan_time


@dataclass(frozen=True)
class Measured:
    """A run folder.

    Attributes:
        medians: of every metric over the later half of the iterations.
        cfg: its run file.
    """

    folder: Path
    medians: dict[str, float]
    cfg: RunConfig


def read_measured(folder: str | Path) -> Measured:
    """Return what a run folder holds.

    Raises:
        ValueError: there is no metrics.jsonl with iterations, or no report.json that says what ran.
    """
    path = Path(folder)
    try:
        history = read_metrics(path / "metrics.jsonl")
        report = json.loads((path / "report.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"--calibrate: {path} is no folder of a run that wrote a report: {error}.") from None
    medians = later_medians(history)
    if "timing/all" not in medians and "timing/update" not in medians:
        raise ValueError(f"--calibrate: {path / 'metrics.jsonl'} has no iteration with timings.")
    return Measured(path, medians, _config(report))


def later_medians(history: History) -> dict[str, float]:
    """Return the median of every metric over the later half of the iterations; the first half has what is made once."""
    return {name: statistics.median(half.y) for name, half in history.later_half().items()}


def _config(report: Mapping[str, Any]) -> RunConfig:
    """The run file, from what the report keeps of it; shapes of the model included."""
    whole = report.get("config", {})
    written = report.get("config_set") or {group: whole[group] for group in TOP_LEVEL if whole.get(group)}
    return build_run_config(run_tree(whole, written), config_name=str(report.get("title", "run")))


def run_tree(whole: Mapping[str, Any], written: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run file's groups and model blocks.

    Args:
        whole: all values of all groups.
        written: those that the run file sets.
    """
    tree: dict[str, Any] = {group: dict(values) for group, values in written.items()}
    tree |= tree.pop("run", {"platform": whole.get("platform", "auto")})
    tree.pop("sampling_config", None)
    shape = {field.name for field in dataclasses.fields(ModelKeys)} | {"padded_vocab_size"}
    blocks = {}
    for role in ("megatron_training", *ROLE_GROUPS):
        values = whole.get(role) or {}
        if values.get("model") and values.get("num_layers") is not None:
            blocks[values["model"]] = {name: value for name, value in values.items() if name in shape and value is not None}
    tree["model"] = blocks
    return tree


def factors(measured: Measured, chip: Chip) -> dict[str, float]:
    """Return measured over predicted seconds by phase; "all" for phases that the run does not have."""
    # a folder does not say how many machines it ran on, which no second depends on
    plan = plan_time(measured.cfg, chip, samples=measured_samples(measured.cfg, measured.medians))
    found = {}
    for name, seconds in plan.phases.items():
        if (real := measured.medians.get(f"timing/{name}", 0.0)) > 0 and seconds > 0:
            found[name] = real / seconds
    if found:
        known = sum(plan.phases[name] for name in found)
        found["all"] = sum(plan.phases[name] * factor for name, factor in found.items()) / known
    return found


def measured_samples(cfg: RunConfig, medians: Mapping[str, float]) -> SampleMeans:
    """Return what a run measured of its samples."""
    response, prompt = medians.get("response_length/mean"), medians.get("prompt_length/mean")
    if response is not None and cfg.generate_config is not None:
        response = min(response, longest_response(cfg))
    return SampleMeans(response or None, prompt or None, medians.get("turns/mean"), medians.get("tool_seconds/mean"))
