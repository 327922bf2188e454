"""`mindspeed-rl plan`: memory and time of a run, and its best layout. Needs no device and no torch."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mindspeed_rl import registry
from mindspeed_rl.config.errors import ConfigError
from mindspeed_rl.config.expert_map import write_expert_map
from mindspeed_rl.config.keys.megatron import ENGINES
from mindspeed_rl.config.loader import build_run_config
from mindspeed_rl.config.run import RunConfig
from mindspeed_rl.config.run_files import compose, locate
from mindspeed_rl.diagnostics.mode_simulation import PhaseTimes, simulate_modes
from mindspeed_rl.files import FileWriteError, write_file
from mindspeed_rl.hub import fetch_config, parse_hub_name
from mindspeed_rl.planner.advice import find_changes_to_fit
from mindspeed_rl.planner.assumptions import list_memory_assumptions, list_time_assumptions
from mindspeed_rl.planner.calibration import compute_factors, read_measured
from mindspeed_rl.planner.devices import DEVICES, Device, choose_platform, find_device, get_device
from mindspeed_rl.planner.experts import format_experts, place_experts
from mindspeed_rl.planner.fit import FitRequest, fit
from mindspeed_rl.planner.memory import plan_memory
from mindspeed_rl.planner.run_files import format_run_file, read_block, read_folder
from mindspeed_rl.planner.samples import SampleMeans
from mindspeed_rl.planner.seconds import ModeTime, TimePlan, calibrate, plan_time
from mindspeed_rl.planner.server import plan_server
from mindspeed_rl.planner.smallest import find_smallest
from mindspeed_rl.planner.text import FitReport, MemoryReport, SmallestReport, TimeReport
from mindspeed_rl.run import Run
from mindspeed_rl.run.draft import draft
from mindspeed_rl.run.rules.validation import validate

#: size of an iteration in the simulation of modes; larger numbers give the same ratios
_SIMULATED_PROMPTS, _SIMULATED_SAMPLES = 16, 8


def main(argv: list[str]) -> int:
    """Print a plan; return 0 when the run fits, 1 when it does not, 2 for a user's error.

    Args:
        argv: the arguments after `plan`, for example ["memory", "--config-name", "grpo_qwen3_8b_A3"].
    """
    parser = argparse.ArgumentParser(
        prog="mindspeed-rl plan", description="Memory and time of a run before a device is booked; only shapes and formulas."
    )
    kinds = parser.add_subparsers(dest="kind", required=True)
    memory = kinds.add_parser("memory", help="bytes of a device by owner and phase, and what to change to fit")
    _add_run(memory)
    time = kinds.add_parser("time", help="seconds of an iteration by phase, as ranges")
    _add_run(time)
    _add_lengths(time)
    fit_parser = kinds.add_parser("fit", help="layouts of a model on a number of devices, the fastest that fit")
    fit_parser.add_argument("--npus", type=int, required=True, help="devices, over all nodes")
    fit_parser.add_argument("--nodes", type=int, default=1, help="machines the devices are spread over")
    fit_parser.add_argument("--top", type=int, default=5, help="layouts to print")
    fit_parser.add_argument("--engine", choices=ENGINES, default="megatron", help="training engine of the layouts")
    fit_parser.add_argument("-o", "--output", default=None, metavar="FILE", help="run file to write, with the best layout")
    _add_model(fit_parser)
    smallest = kinds.add_parser("smallest", help="the smallest machine on which each stage of a model trains")
    _add_model(smallest)
    tune = kinds.add_parser("tune", help="run two iterations of the best layouts of a run, and write the fastest as a run file")
    _add_run(tune)
    _add_tune(tune)
    experts = kinds.add_parser("experts", help="assignment of experts to devices, from counts of a rollout")
    _add_experts(experts)
    both = kinds.add_parser("run", help="memory, then time: what `mindspeed-rl plan --config-name FILE` prints")
    _add_run(both)
    _add_lengths(both)
    # without a kind, the first word is an option of the run
    has_kind = not argv or not argv[0].startswith("--") or argv[0] == "--help"
    arguments = _parse(parser, argv if has_kind else ["run", *argv])
    try:
        return _PLANS[arguments.kind](arguments)
    except ConfigError as error:
        print("error: " + "\nerror: ".join(error.errors), file=sys.stderr)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
    return 2


def _parse(parser: argparse.ArgumentParser, argv: list[str]) -> argparse.Namespace:
    """Parse the arguments; overrides may be between the flags."""
    # argparse intermixes no subcommands
    arguments, rest = parser.parse_known_args(argv)
    if arguments.kind in ("fit", "smallest", "experts"):
        if rest:
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
        return arguments
    if wrong := [item for item in rest if item.startswith("-") or "=" not in item]:
        parser.error(f"unrecognized arguments: {' '.join(wrong)}")
    arguments.overrides = [*arguments.overrides, *rest]
    return arguments


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config-name", "--config", required=True, help="run file, with or without .yaml")
    parser.add_argument("--config-dir", default=None, help="folder of the run file; default: the project's configs/")
    parser.add_argument("--nodes", type=int, default=1, help="machines the devices are spread over")
    parser.add_argument("--chip", choices=[*DEVICES], default=None, help="device kind; by the run file's platform and name")
    parser.add_argument(
        "--memory-gib", type=float, default=None, help="memory of a device, where it differs from the device's default"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides, as for training")


def _add_lengths(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mean-response", type=float, default=None, help="mean tokens of a response; default: half the limit")
    parser.add_argument(
        "--mean-prompt", type=float, default=None, help="mean tokens of a prompt; default: a quarter of the limit"
    )
    parser.add_argument("--mean-turns", type=float, default=None, help="mean turns of the model in a sample; default: one")
    parser.add_argument(
        "--tool-seconds",
        type=float,
        default=None,
        help="seconds that a sample waits for tools or its environment; default: none",
    )
    parser.add_argument(
        "--calibrate", default=None, metavar="FOLDER", help="run folder whose measured seconds correct the plan"
    )


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        required=True,
        help="model block of configs/model, for example qwen3_32b; or a folder with config.json, or a model in a hub's cache",
    )
    parser.add_argument("--config-dir", default=None, help="folder that has model/<name>.yaml; default: the project's configs/")
    parser.add_argument("--prompt", type=_tokens, default=2048, help="longest prompt in tokens, like 2048 or 2k")
    parser.add_argument("--response", type=_tokens, default=8192, help="longest response in tokens, like 8192 or 8k")
    parser.add_argument("--prompts", type=int, default=64, help="prompts of an iteration")
    parser.add_argument("--samples", type=int, default=8, help="responses of a prompt")
    parser.add_argument("--mean-response", type=float, default=None, help="mean tokens of a response; default: half the limit")
    parser.add_argument("--chip", choices=[name for name in DEVICES if name != "cpu"], default="A3", help="device kind")
    parser.add_argument(
        "--memory-gib", type=float, default=None, help="memory of a device, where it differs from the device's default"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _add_tune(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--top", type=int, default=4, help="layouts to try, besides the run file as it is")
    parser.add_argument(
        "--vary",
        action="append",
        default=[],
        metavar="KEY=V1,V2",
        help="values of a key, in place of the layouts of `plan fit`: all combinations are planned, the best of them tried",
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="time box of all pilots; none starts after it")
    parser.add_argument("--pilot-minutes", type=float, default=15.0, help="minutes of a pilot: its start and two iterations")
    parser.add_argument("--mean-response", type=float, default=None, help="mean tokens of a response, for the order of pilots")
    parser.add_argument("-o", "--output", default=None, metavar="FILE", help="run file to write; default: NAME_tuned.yaml")
    parser.add_argument("--keep", default=None, metavar="FOLDER", help="keep the folders of the pilots in this empty folder")


def _add_experts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--counts",
        type=Path,
        required=True,
        metavar="FOLDER",
        help="folder in which a run wrote them (generate_config.eplb_token_save_path)",
    )
    parser.add_argument(
        "--devices", type=int, required=True, help="of an expert group: infer_expert_parallel_size x infer_tensor_parallel_size"
    )
    parser.add_argument(
        "-o", "--output", type=Path, default=None, metavar="FILE", help="JSON to write, for generate_config.expert_map_path"
    )


def _tokens(text: str) -> int:
    """Parse a number of tokens such as 2048 or 2k."""
    factor = 1024 if text.lower().endswith("k") else 1
    try:
        count = int(float(text.lower().removesuffix("k")) * factor)
    except ValueError:
        count = 0
    if count < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of tokens, like 2048 or 2k")
    return count


def _read(arguments: argparse.Namespace) -> tuple[Mapping[str, Any], Run, Device]:
    """Compose and read the run file, and find the device.

    Raises:
        ConfigError: the run file has mistakes, or breaks a rule.
    """
    if arguments.nodes < 1:
        raise ValueError(f"--nodes: {arguments.nodes} must be at least 1.")
    directory, name = locate(arguments.config_name, arguments.config_dir)
    tree = compose(directory, name, arguments.overrides)
    cfg = build_run_config(tree, config_name=name, config_dir=str(directory))
    run = draft(choose_platform(cfg) if arguments.chip is None else cfg, arguments.nodes)
    if violations := validate(run):
        raise ConfigError(map(str, violations))
    return tree, run, find_device(run, arguments.chip, arguments.memory_gib)


def _memory(arguments: argparse.Namespace) -> int:
    return _print_memory(arguments, *_read(arguments))


def _print_memory(arguments: argparse.Namespace, tree: Mapping[str, Any], run: Run, device: Device) -> int:
    plan = plan_memory(run, device)
    changes = find_changes_to_fit(tree, run, plan, device)
    assumed = list(list_memory_assumptions(run.config, device))
    server = None if run.config.serve_config is None else plan_server(run, device)
    _print(MemoryReport(plan, changes, assumed, server), arguments)
    return 0 if plan.verdict in ("fits", "tight") else 1


def _both(arguments: argparse.Namespace) -> int:
    tree, run, device = _read(arguments)
    fits = _print_memory(arguments, tree, run, device)
    if run.config.serve_config is not None:  # whose clients make the loops
        return fits
    if not arguments.json:
        print(flush=True)
    return max(fits, _print_time(arguments, run, device))


def _time(arguments: argparse.Namespace) -> int:
    _, run, device = _read(arguments)
    return _print_time(arguments, run, device)


def _print_time(arguments: argparse.Namespace, run: Run, device: Device) -> int:
    if run.config.serve_config is not None:
        raise ValueError(f"{arguments.config_name} is a server, whose clients make the loops: plan memory has its bytes.")
    known = SampleMeans(arguments.mean_response, arguments.mean_prompt, arguments.mean_turns, arguments.tool_seconds)
    measured = None if arguments.calibrate is None else read_measured(arguments.calibrate)
    plan = plan_time(run, device, samples=known)
    if measured is not None:
        measured_on = find_device(measured.run, arguments.chip, arguments.memory_gib)
        plan = calibrate(plan, compute_factors(measured, measured_on))
    # with a dedicated rollout the run file determines the mode, and the plan is of that mode
    modes = {} if run.config.is_supervised or run.placement.disaggregated else _modes(run.config, plan)
    assumed = list(list_time_assumptions(run.config, device, plan))
    _print(TimeReport(plan, modes, assumed), arguments)
    return 0


def _modes(cfg: RunConfig, plan: TimePlan) -> dict[str, ModeTime]:
    """Compute the seconds of an iteration by trainer_mode: the phases of the plan in the order of events of each mode."""
    assert cfg.rl_config is not None
    push = sum(plan.phases.get(name, 0.0) for name in ("resharding_to_infer", "offload"))
    generate = plan.phases["rollout"]
    max_ratio = plan.lengths.limit / plan.lengths.mean
    times = PhaseTimes("plan", generate, plan.total - generate - push, push, _SIMULATED_PROMPTS, _SIMULATED_SAMPLES, max_ratio)
    outcomes = simulate_modes(times)
    sync_s = outcomes["sync"][1].iteration_s
    return {
        name: ModeTime(
            plan.total * outcome.iteration_s / sync_s, mode.device_fraction, outcome.trainer_idle, outcome.engine_idle
        )
        for name, (mode, outcome) in outcomes.items()
    }


def _read_request(arguments: argparse.Namespace, npus: int = 1, nodes: int = 1, engine: str = "megatron") -> FitRequest:
    """Return the model and the run that it must fit.

    Raises:
        ValueError: a number is below 1, or the model has no block.
    """
    given = {"npus": npus, "nodes": nodes, "prompts": arguments.prompts, "samples": arguments.samples}
    for name, count in given.items():
        if count < 1:
            raise ValueError(f"--{name}: {count} must be at least 1.")
    lengths = arguments.prompt, arguments.response, arguments.prompts, arguments.samples
    folder = _find_folder(arguments.model)
    if folder is None:
        return FitRequest(arguments.model, read_block(arguments.model, arguments.config_dir), npus, *lengths, nodes)
    try:
        block = read_folder(folder, engine)
    except ValueError as error:
        raise ValueError(f"--model: {error}") from error
    name = None if (Path(arguments.model).expanduser() / "config.json").is_file() else parse_hub_name(arguments.model)
    model, named = (folder.resolve().name, None) if name is None else (name.name, arguments.model)
    return FitRequest(model, block, npus, *lengths, nodes, folder=str(folder.resolve()), named=named)


def _find_folder(model: str) -> Path | None:
    """Return the folder that `--model` names, as a path or as a name on a hub; None for the name of a model block.

    Raises:
        ValueError: it is a name on a hub whose files are not in the cache.
    """
    path = Path(model).expanduser()
    if (path / "config.json").is_file():
        return path
    if (name := parse_hub_name(model)) is not None:
        return fetch_config(name, "--model")
    return None


def _smallest(arguments: argparse.Namespace) -> int:
    request, device = _read_request(arguments), get_device(arguments.chip, arguments.memory_gib)
    stages = find_smallest(request, device, samples=SampleMeans(arguments.mean_response))
    _print(SmallestReport(request, device, stages), arguments)
    return 0


def _fit(arguments: argparse.Namespace) -> int:
    if arguments.top < 1:
        raise ValueError(f"--top: {arguments.top} must be at least 1.")
    request = _read_request(arguments, arguments.npus, arguments.nodes, arguments.engine)
    device = get_device(arguments.chip, arguments.memory_gib)
    request = replace(request, engine=arguments.engine)
    layouts = fit(request, device, samples=SampleMeans(arguments.mean_response))
    _print(FitReport(request, device, layouts[: arguments.top]), arguments)
    if arguments.output is not None:
        path = Path(arguments.output)
        _write(path, format_run_file(request, layouts[0]))
        print(f"wrote {path}; show it with: mindspeed-rl explain --config-name {path}", file=sys.stderr)
    return 0


def _experts(arguments: argparse.Namespace) -> int:
    # by name: it imports torch, which the other plans do not need
    sum_counts = registry.load("mindspeed_rl.rollout.expert_counts:sum_counts", "plan experts")
    layers = place_experts(sum_counts(arguments.counts), arguments.devices)
    print(format_experts(layers), flush=True)
    if arguments.output is not None:
        _write(arguments.output, write_expert_map([layer.devices for layer in layers]))
        print(f"wrote {arguments.output}, for generate_config.expert_map_path", file=sys.stderr)
    return 0


def _tune(arguments: argparse.Namespace) -> int:
    # by name: it starts processes, which no other plan needs
    return registry.load("mindspeed_rl.cli.tune:tune", "plan tune")(arguments)


def _print(report: MemoryReport | TimeReport | FitReport | SmallestReport, arguments: argparse.Namespace) -> None:
    text = json.dumps(report.encode(), indent=2) if arguments.json else report.format()
    print(text, flush=True)


def _write(path: Path, text: str) -> None:
    try:
        write_file(path, text)
    except FileWriteError as error:
        raise ValueError(f"--output: {error}.") from None


_PLANS = {
    "run": _both,
    "memory": _memory,
    "time": _time,
    "fit": _fit,
    "tune": _tune,
    "smallest": _smallest,
    "experts": _experts,
}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
