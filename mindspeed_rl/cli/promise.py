"""`mindspeed-rl promise`: what a run will need, take and cost, before it starts; of a run folder, how it was kept."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from mindspeed_rl.cli.bands import find_bands
from mindspeed_rl.cli.options import RunParser, add_run, take_run
from mindspeed_rl.config.errors import ConfigError
from mindspeed_rl.config.loader import build_run_config
from mindspeed_rl.config.run_files import compose, locate
from mindspeed_rl.observability.run_files import read_run
from mindspeed_rl.planner.devices import DEVICES, choose_platform, find_device
from mindspeed_rl.planner.promise import make_promise
from mindspeed_rl.planner.promise_check import format_kept
from mindspeed_rl.planner.samples import SampleMeans
from mindspeed_rl.planner.server import plan_server
from mindspeed_rl.run.draft import draft
from mindspeed_rl.run.rules.validation import validate


def main(argv: list[str]) -> int:
    """Print a promise; return 0, 1 with `--strict` where it is not kept, 2 for a user's error.

    Args:
        argv: the arguments after `promise`, for example ["grpo_qwen3_8b_A3", "--price", "1.5"].
    """
    parser = RunParser(
        prog="mindspeed-rl promise",
        description="What a run will need, take and cost; of the folder of a run: promised, measured, and the cause.",
    )
    add_run(parser, "run file, with or without .yaml, or the folder of a run")
    parser.add_argument("--config-dir", default=None, help="folder of the run file; default: the project's configs/")
    parser.add_argument("--nodes", type=int, default=1, help="machines the devices are spread over")
    parser.add_argument("--chip", choices=[*DEVICES], default=None, help="device kind; by the run file's platform and name")
    parser.add_argument("--memory-gib", type=float, default=None, help="memory of a device, where it differs from the default")
    parser.add_argument("--price", type=float, default=None, help="price of a device-hour; default: device_hour_price")
    for name, text in (("response", "tokens of a response"), ("prompt", "tokens of a prompt"), ("turns", "turns of a sample")):
        parser.add_argument(f"--mean-{name}", type=float, default=None, help=f"mean {text}")
    parser.add_argument("--tool-seconds", type=float, default=None, help="seconds that a sample waits for tools")
    parser.add_argument("--strict", action="store_true", help="return 1 where the run does not fit, or a promise was broken")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides, as for training")
    arguments = parser.parse_intermixed_args(argv)
    take_run(parser, arguments)
    try:
        folder = Path(arguments.run)
        is_folder = folder.is_dir() and any((folder / name).is_file() for name in ("report.json", "metrics.jsonl"))
        return _print_kept(folder, arguments) if is_folder else _print_promise(arguments)
    except ConfigError as error:
        print("error: " + "\nerror: ".join(error.errors), file=sys.stderr)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
    return 2


def _print_promise(arguments: argparse.Namespace) -> int:
    if arguments.nodes < 1:
        raise ValueError(f"--nodes: {arguments.nodes} must be at least 1.")
    if arguments.price is not None and not 0 <= arguments.price < float("inf"):
        raise ValueError(f"--price: {arguments.price:g} must be a price of a device-hour from 0.")
    directory, name = locate(arguments.run, arguments.config_dir)
    tree = compose(directory, name, arguments.overrides)
    cfg = build_run_config(tree, config_name=name, config_dir=str(directory))
    run = draft(choose_platform(cfg) if arguments.chip is None else cfg, arguments.nodes)
    if violations := validate(run):
        raise ConfigError(map(str, violations))
    device = find_device(run, arguments.chip, arguments.memory_gib)
    if run.config.serve_config is not None:  # its clients make the loops: nothing has seconds
        server = plan_server(run, device)
        print(json.dumps(server.encode()) if arguments.json else server.describe(), flush=True)
        return int(arguments.strict and not server.fits)
    promise = make_promise(
        run,
        device=device,
        samples=SampleMeans(arguments.mean_response, arguments.mean_prompt, arguments.mean_turns, arguments.tool_seconds),
        price=arguments.price,
        bands=find_bands(run),
        tree=tree,
    )
    print(json.dumps(promise.encode(), indent=2, ensure_ascii=False) if arguments.json else promise.format(), flush=True)
    return int(arguments.strict and not promise.is_kept)


def _print_kept(folder: Path, arguments: argparse.Namespace) -> int:
    """Print promised and measured figures of a run folder, and the cause where they differ."""
    plan = read_run(folder).report.get("plan", {})
    rows = plan.get("kept")
    if rows is None:
        raise ValueError(f"{folder / 'report.json'} has no promise: the run was not planned, or an earlier version wrote it.")
    print(json.dumps(rows, indent=2, ensure_ascii=False) if arguments.json else format_kept(rows), flush=True)
    return int(arguments.strict and any(row["broken"] for row in rows))
