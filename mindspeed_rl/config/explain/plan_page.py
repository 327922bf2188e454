"""The plan of a run as a report and as text, before any device is claimed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mindspeed_rl.config.explain.effects import (
    describe_learning_rate,
    find_changed_keys,
    find_keys_without_effect,
    find_warnings,
)
from mindspeed_rl.config.explain.resources import describe_resources, shorten_groups
from mindspeed_rl.config.objective import formula
from mindspeed_rl.config.rules.validation import missing_for_training, unavailable, validate
from mindspeed_rl.config.run import RunConfig
from mindspeed_rl.config.sizes import batch_table, round_number

#: the report of `explain`, which `mindspeed-rl explain --json` prints
Report = dict[str, Any]


def explain(cfg: RunConfig, num_nodes: int = 1) -> Report:
    """Return all that follows from a run file.

    Keys: `valid`; `errors` (sentences) and `violations` (the same with separate keys and suggestions); `batch`;
    `dispatch_sizes`; `resources`; `formula`; `length` (of a run in passes over its prompts; the command fills it in);
    `samples` (of several turns); `learning_rate`; `derived` (keys that the file omits and that follow from it, each with its
    value and source); `earlier_names` (keys by deprecated names); `warnings` (settings that cost time or results);
    `changed_keys`; `keys_without_effect`; `unavailable` (switched on, but not in this version) and `missing` (needed to
    start). Numbers that are not whole are shown as fractions, so that an invalid plan can be read too.
    """
    violations = validate(cfg, num_nodes)
    sizes = None if cfg.sizes is None else replace(cfg.sizes, num_nodes=num_nodes)
    # all tables divide by these numbers; the errors name those below 1
    if sizes is not None and not sizes.can_divide:
        sizes = None
    rollout = None if sizes is None or sizes.counting == "samples" else sizes
    return {
        "valid": not violations,
        "errors": [str(violation) for violation in violations],
        "violations": [
            {
                "rule": item.rule,
                "keys": dict(item.keys),
                "message": item.message,
                "nearest": [dict(option) for option in item.suggestions],
            }
            for item in violations
        ],
        "run": {
            "config_name": cfg.config_name,
            "config_dir": cfg.config_dir,
            "stage": cfg.stage,
            "model": cfg.actor_config.model,
            "platform": cfg.platform,
        },
        "batch": {} if sizes is None else batch_table(sizes, cfg.actor_config.train_iters),
        "dispatch_sizes": (
            {} if rollout is None else {name: round_number(size) for name, size in rollout.dispatch_sizes().items()}
        ),
        "resources": {} if sizes is None else describe_resources(cfg, sizes),
        "formula": formula(cfg),
        "length": "",
        "samples": _describe_samples(cfg),
        "learning_rate": describe_learning_rate(cfg),
        "derived": {name: {"value": item.value, "from": item.source} for name, item in cfg.derived.items()},
        "earlier_names": {name: note for name, note in cfg.deprecated.items() if note.startswith("read as ")},
        "warnings": find_warnings(cfg),
        "changed_keys": find_changed_keys(cfg),
        "keys_without_effect": find_keys_without_effect(cfg),
        "unavailable": unavailable(cfg),
        "missing": missing_for_training(cfg),
    }


def report_failure(errors: list[str]) -> Report:
    """Return the report for a run file that cannot be read."""
    return {
        "valid": False,
        "errors": list(errors),
        "violations": [],
        "run": {},
        "batch": {},
        "dispatch_sizes": {},
        "resources": {},
        "formula": "",
        "length": "",
        "samples": "",
        "learning_rate": "",
        "derived": {},
        "earlier_names": {},
        "warnings": [],
        "changed_keys": {},
        "keys_without_effect": {},
        "unavailable": [],
        "missing": [],
    }


_UNITS = {
    "prompts": "prompts of one rollout (prompt-level counting)",
    "completions": "completions of one optimizer step (completion-level counting)",
    "samples": "samples of one optimizer step",
}


def render(report: Report) -> str:
    """Return the report as text for a terminal, where the last lines are seen first: errors or the verdict."""
    parts: list[str] = []
    run = report["run"]
    if run:
        parts.append(f"{run['config_name']}: stage {run['stage']}, model {run['model']}, platform {run['platform']}")
    if report["batch"]:
        batch = dict(report["batch"])
        counting = batch.pop("counting")
        parts.append(f"Batch; global_batch_size counts {_UNITS[counting]}\n" + _table(batch))
    if report["dispatch_sizes"]:
        parts.append("Rows that leave the data plane at once\n" + _table(report["dispatch_sizes"]))
    if report["resources"]:
        parts.append(_render_resources(report["resources"]))
    if report["formula"]:
        parts.append("Objective\n" + "\n".join(f"  {line}" for line in report["formula"].splitlines()))
    if report["length"]:
        parts.append(f"Length\n  {report['length']}")
    if report["samples"]:
        parts.append(f"Samples\n  {report['samples']}")
    if report["learning_rate"]:
        parts.append(f"Learning rate\n  {report['learning_rate']}")
    if report["derived"]:
        rows = {name: f"{_cell(item['value'])}  from {item['from']}" for name, item in report["derived"].items()}
        parts.append("Derived: keys that are not written\n" + _table(rows))
    if report["changed_keys"]:
        parts.append("Keys that differ from their defaults\n" + _table(report["changed_keys"]))
    if report["keys_without_effect"]:
        parts.append("Keys that are set but have no effect in this run\n" + _table(report["keys_without_effect"]))
    if report["unavailable"]:
        parts.append(
            "Not available in this version; training refuses to start\n"
            + "\n".join(f"  {line}" for line in report["unavailable"])
        )
    if report["missing"]:
        parts.append("Still needed to start training\n" + "\n".join(f"  {line}" for line in report["missing"]))
    if report["earlier_names"]:
        parts.append("Keys by names of earlier releases\n" + _table(report["earlier_names"]))
    if report["warnings"]:
        parts.append("Warnings\n" + "\n".join(f"  - {line}" for line in report["warnings"]))
    if report["errors"]:
        parts.append("INVALID\n" + "\n".join(f"  - {error}" for error in report["errors"]))
    if report["valid"]:
        reasons = ["this version lacks a requested feature"] if report["unavailable"] else []
        reasons += [f"{len(report['missing'])} key(s) are still needed"] if report["missing"] else []
        parts.append(f"not ready: {' and '.join(reasons)}; see above" if reasons else "valid")
    return "\n\n".join(parts)


def _table(rows: Mapping[str, object]) -> str:
    width = max(len(name) for name in rows)
    return "\n".join(f"  {name:<{width}}  {_cell(value)}" for name, value in rows.items())


def _cell(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return "null" if value is None else str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    return ", ".join(_cell(item) for item in value) if isinstance(value, list) else str(value)


def _render_resources(resources: Report) -> str:
    nodes = f"{resources['num_nodes']} node(s) with {resources['devices_per_node']} each"
    lines = [f"Devices: {resources['num_devices']} on {nodes}"]
    width = max(len(phase["phase"]) for phase in resources["phases"])
    devices = max(len(phase["devices"]) for phase in resources["phases"])
    lines += [f"  {phase['phase']:<{width}}  {phase['devices']:<{devices}}  {phase['holds']}" for phase in resources["phases"]]
    groups = resources.get("parallel_groups", {})
    if groups:
        lines.append("Parallel groups")
        listed = {axis: ranks for axis, ranks in groups.items() if len(ranks[0]) > 1 or axis == "rollout"}
        lines += [f"  {axis:<11}{shorten_groups(ranks)}" for axis, ranks in listed.items()]
    return "\n".join(lines)


def _describe_samples(cfg: RunConfig) -> str:
    """Return a sentence about samples of several turns; empty where each sample is one response."""
    rl = cfg.rl_config
    if rl is None or cfg.generate_config is None or rl.agent_loop_name == "single_turn":
        return ""
    loop = rl.agent_loop_name
    by = {"scheduler": rl.multi_turn_scheduler, "environment": rl.environment}.get(loop)
    tools = "" if rl.tool_config_path is None else f", tools of {rl.tool_config_path}"
    calls = f" with calls in the format {rl.tool_parser_format}" if tools and rl.tool_parser_format else ""
    limit = f", {rl.max_tool_calls} calls at most" if tools and rl.max_tool_calls else ""
    turns = "as many turns as fit" if rl.max_turns is None else f"at most {rl.max_turns} turns"
    one = cfg.generate_config.sampling_config.max_tokens
    return (
        f"{loop}{f' {by}' if by else ''}{tools}{calls}{limit}: {turns} of up to {one} tokens, "
        f"{cfg.response_limit} tokens after the prompt together"
    )
