"""`mindspeed-rl explain`: print the plan of a run without claiming a device."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from mindspeed_rl import registry
from mindspeed_rl.cli.bands import find_bands
from mindspeed_rl.cli.options import RunParser
from mindspeed_rl.cli.train import prepare_environment
from mindspeed_rl.config.errors import ConfigError
from mindspeed_rl.config.loader import build_run_config
from mindspeed_rl.config.run import RunConfig
from mindspeed_rl.config.run_files import compose, locate
from mindspeed_rl.hub import NotFetchedError
from mindspeed_rl.observability.logging import clean_text
from mindspeed_rl.rewards.static_check import check_reward_functions
from mindspeed_rl.run import Run
from mindspeed_rl.run.draft import draft
from mindspeed_rl.run.explain.effects import describe_learning_rate
from mindspeed_rl.run.explain.key_reference import find_entries
from mindspeed_rl.run.explain.plan_page import Report, explain, render, report_failure
from mindspeed_rl.run.formula import formula
from mindspeed_rl.run.hub_models import Hubs

#: keys in the line of the overview that has what was left open
_MAX_CHOSEN = 5

if TYPE_CHECKING:
    from mindspeed_rl.data.card import DataCard  # with numpy, which a plan of keys does without


def main(argv: list[str]) -> int:
    """Print the plan of a run file; return 0 when it is valid and 2 when it is not.

    Where a file that the run names is on this machine, or in the cache of its hub, all checks of `train` run, and what it
    would refuse is an error. Elsewhere, for example on a laptop, only keys are checked: a file that lacks keys, or needs a
    feature that this version does not have, then ends in "not ready" and returns 0. `--validate` checks as `train` does in
    any case.

    Args:
        argv: the arguments after `explain`, for example ["--config-name", "grpo_tiny_cpu", "rl_config.epochs=2"].
    """
    parser = RunParser(
        prog="mindspeed-rl explain",
        description="Print the plan of a run file: batch sizes, devices, loss formula, keys without effect.",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--config-name", "--config", help="run file, with or without .yaml")
    source.add_argument("--keys", metavar="TEXT", help="print the keys with TEXT in their name or meaning, as in docs/keys.md")
    parser.add_argument("--config-dir", default=None, help="folder of the run file; default: the project's configs/")
    parser.add_argument("--nodes", type=int, default=1, help="machines the devices are spread over")
    parser.add_argument("--validate", action="store_true", help="print only what train would refuse on this machine")
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
        report = build_report(cfg, arguments.nodes, checks_files=arguments.validate)
    except ConfigError as error:
        report = report_failure(error.errors)
    if arguments.validate and not arguments.json:
        warnings = "".join(f"\nwarning: {warning}" for warning in report["warnings"])
        unchecked = f", apart from what cannot be checked yet: {report['unchecked']}" if report.get("unchecked") else ""
        text = "\n".join(f"error: {error}" for error in report["errors"]) or f"valid{unchecked}{warnings}"
    else:
        text = json.dumps(report, indent=2, ensure_ascii=False) if arguments.json else render(report)
    try:
        print(text if arguments.json else clean_text(text), flush=True)
    except BrokenPipeError:  # a pager or `head` has ended; the output that Python still buffers is discarded
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0 if report["valid"] else 2


def build_report(cfg: RunConfig, num_nodes: int, *, checks_files: bool) -> Report:
    """Return the plan of a run, with what `train` would refuse.

    Args:
        checks_files: also where none of the files that the run names is on this machine.
    """
    registry.search_folders(cfg.plugin_folders)
    run, mean_prompt = draft(cfg, num_nodes), None
    report = explain(run)
    if cfg.serve_config is not None:
        report["unchecked"] = "files: serve checks them before it listens"
        if not report["errors"]:
            report["promise"] = [_describe_memory(run)]
        return report
    if cfg.rl_config is not None and not cfg.is_supervised:
        report["errors"] += check_reward_functions(cfg.rl_config)
    if not report["errors"] and (checks_files or cfg.has_files_here or cfg.has_cached_models):
        run, mean_prompt = _check_files(cfg, num_nodes, report, checks_hub=checks_files) or (run, None)
    elif not report["errors"]:
        report["unchecked"] = "files: none that the run names is on this machine; --validate checks as train does"
    report["valid"] = not report["errors"]
    if report["valid"]:
        report["promise"] = _promise(run, mean_prompt)
    return report


def _promise(run: Run, mean_prompt: float | None) -> list[str]:
    """Return the lines of a promise; why there is none in a line. `mindspeed-rl promise` also searches other layouts.

    Args:
        mean_prompt: mean tokens of a prompt; None where they were not read.
    """
    # by name: the planner reads models, which a plan of keys does without
    make_promise, means = (
        registry.load(f"mindspeed_rl.planner.{name}", "explain") for name in ("promise:make_promise", "samples:SampleMeans")
    )
    try:
        return list(make_promise(_with_data(run), samples=means(prompt=mean_prompt), bands=find_bands(run)).list_lines())
    except ValueError as error:
        return [f"nothing: {error}"]


def _with_data(run: Run) -> Run:
    """Return the run with the prefixes of rows that it wrote itself."""
    return replace(run, config=replace(run.config, actor_config=run.data_config))


def _describe_memory(run: Run) -> str:
    """Return the memory of a server in a line."""
    # by name, as above
    find_device = registry.load("mindspeed_rl.planner.devices:find_device", "explain")
    plan_server = registry.load("mindspeed_rl.planner.server:plan_server", "explain")
    try:
        return plan_server(run, find_device(run)).describe()
    except ValueError as error:
        return f"nothing: {error}"


def _check_files(cfg: RunConfig, num_nodes: int, report: Report, *, checks_hub: bool) -> tuple[Run, float | None] | None:
    """Run both stages of the checks of `train`, and add what they find to the report.

    Returns the run with its length, and the mean tokens of its prompts; None in supervised stages, whose rows the planner reads
    itself. Returns None where a check fails, or something is not here.

    Args:
        checks_hub: a hub that cannot be reached, for a model that is not in its cache, is an error.
    """
    prepare_environment()
    # imports torch and Ray, which no other plan needs
    check = "sft_setup:check_supervised" if cfg.is_supervised else "rl_setup:check_rl"
    try:
        check_machine = registry.load(f"mindspeed_rl.trainers.{check}", "explain")
        resolve_run = registry.load("mindspeed_rl.run.models:resolve_run", "explain")
    except ValueError as error:  # a machine without torch, only for plans
        report["unchecked"] = f"files and this machine: {error}; install the environment of a device kind (envs/)"
        if checks_hub:
            report["errors"].append(report["unchecked"])
        return None
    notes = io.StringIO()
    try:
        with contextlib.redirect_stdout(notes):
            run = resolve_run(cfg, num_nodes, hubs=Hubs(downloads=False))
            inputs = check_machine(run)
    except NotFetchedError as error:
        report["unchecked"] = str(error)
        try:
            if checks_hub:
                error.check_hub()
        except ValueError as unreachable:
            report["errors"].append(str(unreachable))
        return None
    except (ValueError, RuntimeError, OSError) as error:
        report["errors"] += error.errors if isinstance(error, ConfigError) else [str(error)]
        return None
    finally:
        report["warnings"] += [line.removeprefix("warning: ") for line in notes.getvalue().splitlines()]
    report["data"] = "\n".join(map(str, inputs.cards))
    run, epochs = inputs.run, cfg.actor_config.train_epochs
    if inputs.images:
        report["samples"] = "\n  ".join(filter(None, [report["samples"], inputs.images]))
    # with what the models' config.json says of the loss
    report["formula"] = formula(run)
    report["derived"] |= {name: {"value": item.value, "from": item.source} for name, item in run.config.derived.items()}
    if epochs is not None:
        each, unit = run.plan.num_prompts, "rows" if cfg.is_supervised else "prompts"
        count = inputs.num_rows if cfg.is_supervised else len(inputs.prompts)
        report["length"] = f"{run.plan.train_iters} iterations: {epochs:g} passes over {count} {unit}, {each} an iteration"
        report["learning_rate"] = describe_learning_rate(run.config)
    mean_prompt = None if cfg.is_supervised else float(inputs.prompts.lengths.mean())
    report["overview"] = _summarize(run, inputs.cards[0], mean_prompt) | {"chosen": _list_chosen(run, cfg.platform)}
    return run, mean_prompt


def _summarize(run: Run, card: DataCard, mean_prompt: float | None) -> dict[str, str]:
    """Return what a run is, in a few lines: model, data, steps, memory and time, what `auto` became.

    Args:
        mean_prompt: mean tokens of a prompt; None in supervised stages, whose rows the planner reads itself.
    """
    actor, cfg = run.config.actor_config, run.config
    # by name: the planner reads models, which a plan of keys does without
    predict = registry.load("mindspeed_rl.planner.prediction:predict", "explain")
    unit = "rows" if cfg.is_supervised else "prompts"
    saves = f", saved every {actor.save_interval}" if actor.save and actor.save_interval else ""
    return {
        "model": str(run.models["actor"].source.weights),
        "rows": card.rows.get("rows") or card.rows.get("documents", ""),
        "lengths": card.rows.get("lengths", ""),
        "steps": f"{run.plan.train_iters} iterations of {run.plan.num_prompts} {unit}{saves}",
        "planned": predict(_with_data(run), mean_prompt).summary,
    }


def _list_chosen(run: Run, platform: str) -> str:
    """Return what became of the platform and of keys that the run file leaves open.

    Args:
        platform: value of the run file.
    """
    values = {name.rpartition(".")[2]: item.value for name, item in run.config.derived.items()}
    short = [f"{name} {value}" for name, value in values.items() if isinstance(value, (bool, int, float, str))]
    more = [f"and {len(short) - _MAX_CHOSEN} more below"] if len(short) > _MAX_CHOSEN else []
    return ", ".join([*([f"platform {run.platform}"] if platform == "auto" else []), *short[:_MAX_CHOSEN], *more])


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
