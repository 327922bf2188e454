"""`mindspeed-rl explain`: print the plan of a run without claiming a device."""

from __future__ import annotations

import argparse
import json
import os
import sys

from mindspeed_rl.config.errors import ConfigError
from mindspeed_rl.config.explain.effects import describe_learning_rate
from mindspeed_rl.config.explain.key_reference import find_entries
from mindspeed_rl.config.explain.plan_page import explain, render, report_failure
from mindspeed_rl.config.loader import build_run_config
from mindspeed_rl.config.resolve import resolve
from mindspeed_rl.config.run import RunConfig
from mindspeed_rl.config.run_files import compose, locate
from mindspeed_rl.observability.logging import build_quiet_environment
from mindspeed_rl.rewards.static_check import check_reward_functions


def main(argv: list[str]) -> int:
    """Print the plan of a run file; return 0 when it is valid and 2 when it is not.

    A valid file that lacks keys, or needs a feature that this version does not have, ends in "not ready" and returns 0: rules
    can be checked before the last path is known.

    Args:
        argv: the arguments after `explain`, for example ["--config-name", "grpo_tiny_cpu", "rl_config.epochs=2"].
    """
    parser = argparse.ArgumentParser(
        prog="mindspeed-rl explain",
        description="Print the plan of a run file: batch sizes, devices, loss formula, keys without effect.",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--config-name", help="run file, with or without .yaml")
    source.add_argument("--keys", metavar="TEXT", help="print the keys with TEXT in their name or meaning, as in docs/keys.md")
    parser.add_argument("--config-dir", default=None, help="folder of the run file; default: the project's configs/")
    parser.add_argument("--nodes", type=int, default=1, help="machines the devices are spread over")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides, as for training")
    arguments = parser.parse_intermixed_args(argv)
    if arguments.keys is not None:
        return _print_keys(arguments.keys)
    if arguments.nodes < 1:
        parser.error(f"--nodes is {arguments.nodes}, but must be at least 1")

    try:
        directory, name = locate(arguments.config_name, arguments.config_dir)
        tree = compose(directory, name, arguments.overrides)
        cfg = build_run_config(tree, config_name=name, config_dir=str(directory))
        report = explain(cfg, arguments.nodes)
        if cfg.rl_config is not None and not cfg.is_supervised:
            report["errors"] += check_reward_functions(cfg.rl_config)
            report["valid"] = not report["errors"]
            if cfg.actor_config.train_epochs is not None and report["valid"] and not report["missing"] + report["unavailable"]:
                report |= _length(cfg, arguments.nodes)
    except ConfigError as error:
        report = report_failure(error.errors)
    try:
        print(json.dumps(report, indent=2, ensure_ascii=False) if arguments.json else render(report), flush=True)
    except BrokenPipeError:  # a pager or `head` has ended; the output that Python still buffers is discarded
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0 if report["valid"] else 2


def _length(cfg: RunConfig, num_nodes: int) -> dict[str, str]:
    """Return the part of the report that depends on the number of prompts, as a run would read them."""
    os.environ.update(build_quiet_environment(os.environ))
    # they import torch and Ray, which no other plan needs
    from mindspeed_rl.trainers.prompt_loader import count_prompts, resolve_length

    run = resolve(cfg, num_nodes, platform=cfg.platform)
    epochs = cfg.actor_config.train_epochs
    try:
        count = count_prompts(run)
    except ValueError as error:
        return {"length": f"{epochs:g} passes over prompts that could not be counted: {error}"}
    run = resolve_length(run, count)
    each = run.plan.num_prompts
    return {
        "length": f"{run.plan.train_iters} iterations: {epochs:g} passes over {count} prompts, {each} an iteration",
        "learning_rate": describe_learning_rate(run.config),
    }


def _print_keys(text: str) -> int:
    """Print the reference of the keys that match; return 2 when none does."""
    entries = find_entries(text)
    for entry in entries:
        default = f", default {entry.default}" if entry.default else ""
        print(f"{entry.path}  [{entry.kind}{default}]\n    {entry.meaning}".replace("`", "").replace("**", ""))
    if not entries:
        print(f"error: no key has {text!r} in its name or meaning", file=sys.stderr)
    return 0 if entries else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
