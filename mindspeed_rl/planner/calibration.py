"""What a run that was measured says of the seconds and bytes that were predicted for it."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_rl.config.loader import TOP_LEVEL, build_run_config
from mindspeed_rl.config.network import NetworkKeys
from mindspeed_rl.config.run import RunConfig
from mindspeed_rl.planner.chips import GIB, Chip
from mindspeed_rl.planner.memory import plan_memory
from mindspeed_rl.planner.seconds import TimePlan, plan_time

_LATER = 0.5  # the first half of the iterations has what is made once


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

    @property
    def num_nodes(self) -> int:
        """Of the plan; a run folder does not say more than the devices."""
        return 1


def read_measured(folder: str | Path) -> Measured:
    """Return what a run folder holds.

    Raises:
        ValueError: there is no metrics.jsonl with iterations, or no report.json that says what ran.
    """
    path = Path(folder)
    try:
        lines = (path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        report = json.loads((path / "report.json").read_text(encoding="utf-8"))
        records = [json.loads(line) for line in lines if line.strip()]
    except (OSError, ValueError) as error:
        raise ValueError(f"--calibrate: {path} is no folder of a run that wrote a report: {error}.") from None
    medians = later_medians(records)
    if "timing/all" not in medians and "timing/update" not in medians:
        raise ValueError(f"--calibrate: {path / 'metrics.jsonl'} has no iteration with timings.")
    return Measured(path, medians, _config(report))


def later_medians(records: list[dict[str, Any]]) -> dict[str, float]:
    """Return the median of every metric over the later half of the iterations."""
    later = records[int(len(records) * _LATER) :]
    values: dict[str, list[float]] = {}
    for record in later:
        for name, value in record.items():
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                values.setdefault(name, []).append(float(value))
    return {name: statistics.median(found) for name, found in values.items()}


def _config(report: Mapping[str, Any]) -> RunConfig:
    """The run file, from what the report keeps of it; shapes of the model included."""
    whole = report.get("config", {})
    written = report.get("config_set") or {group: whole[group] for group in TOP_LEVEL if whole.get(group)}
    tree: dict[str, Any] = {group: dict(values) for group, values in written.items()}
    tree |= tree.pop("run", {"platform": whole.get("platform", "auto")})
    tree.pop("sampling_config", None)
    shape = {field.name for field in dataclasses.fields(NetworkKeys)} | {"padded_vocab_size"}
    blocks = {}
    for role in ("megatron_training", "actor_config", "ref_config", "reward_config", "critic_config"):
        values = whole.get(role) or {}
        if values.get("model") and values.get("num_layers") is not None:
            blocks[values["model"]] = {name: value for name, value in values.items() if name in shape and value is not None}
    tree["model"] = blocks
    return build_run_config(tree, config_name=str(report.get("title", "run")))


def factors(measured: Measured, chip: Chip) -> dict[str, float]:
    """Return measured over predicted seconds by phase; "all" for phases that the run does not have."""
    plan = predicted(measured, chip)
    found = {}
    for name, seconds in plan.phases.items():
        if (real := measured.medians.get(f"timing/{name}", 0.0)) > 0 and seconds > 0:
            found[name] = real / seconds
    if found:
        known = sum(plan.phases[name] for name in found)
        found["all"] = sum(plan.phases[name] * factor for name, factor in found.items()) / known
    return found


def predicted(measured: Measured, chip: Chip) -> TimePlan:
    """Return the uncalibrated plan of a run that was measured, with the lengths that it had."""
    response, prompt = measured.medians.get("response_length/mean"), measured.medians.get("prompt_length/mean")
    generate = measured.cfg.generate_config
    if response is not None and generate is not None:
        response = min(response, float(generate.sampling_config.max_tokens))
    return plan_time(measured.cfg, chip, measured.num_nodes, mean_response=response, mean_prompt=prompt)


def comparison(cfg: RunConfig, chip: Chip, num_nodes: int, medians: Mapping[str, float]) -> dict[str, Any]:
    """Return predicted beside measured, as a run's report shows it: seconds by phase, GiB by phase and owner.

    Args:
        medians: of the run's metrics.
    """
    generate = cfg.generate_config
    response, prompt = medians.get("response_length/mean"), medians.get("prompt_length/mean")
    if response is not None and generate is not None:
        response = min(response, float(generate.sampling_config.max_tokens))
    plan = plan_time(cfg, chip, num_nodes, mean_response=response or None, mean_prompt=prompt or None)
    seconds = {
        name: {
            "predicted": value,
            "low": plan.bounds(value)[0],
            "high": plan.bounds(value)[1],
            "measured": medians.get(f"timing/{name}"),
        }
        for name, value in plan.phases.items()
    }
    memory = plan_memory(cfg, chip, num_nodes)
    phases = {phase.name: phase for phase in memory.fullest.phases}
    gib = {}
    for name, metric in (("generate", "memory/generate_gib"), ("update", "memory/peak_gib")):
        if name in phases:
            low, high = phases[name].range
            gib[name] = {
                "predicted": phases[name].total / GIB,
                "low": low / GIB,
                "high": high / GIB,
                "measured": medians.get(metric),
                "owners": {owner: count / GIB for owner, count in phases[name].owners.items()},
            }
    return {"chip": chip.name, "seconds": seconds, "gib": gib, "spread": plan.efficiency.spread}
