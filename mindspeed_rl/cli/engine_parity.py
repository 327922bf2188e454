"""`mindspeed-rl parity RUN --engines megatron,fsdp`: two steps of a run's actor by two training engines, compared."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from mindspeed_rl import platform, registry
from mindspeed_rl.cli.options import add_run, report_failure, take_run
from mindspeed_rl.cli.train import prepare_environment
from mindspeed_rl.config import load_run_config
from mindspeed_rl.config.errors import unknown_value
from mindspeed_rl.config.keys.megatron import ENGINES
from mindspeed_rl.files import write_file

#: lines of the table
_SHOWN = 12


def main(argv: list[str]) -> int:
    """Compare; return 0 where the engines agree, 1 where they do not or after a failure, 2 for wrong arguments."""
    parser = argparse.ArgumentParser(
        prog="mindspeed-rl parity",
        description="Give the same random rows to a run's actor on each engine, in float32 on one rank, and compare log-probs, "
        "loss, gradient norm, every weight and gradient by Hugging Face name, and the updates of two steps.",
    )
    add_run(parser, "run file, with or without .yaml")
    parser.add_argument("--engines", required=True, help="two or more of: " + ", ".join(ENGINES))
    parser.add_argument("--config-dir", default=None, help="folder of the run file; default: the project's configs/")
    parser.add_argument("--rows", type=int, default=8, help="rows; default 8")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of the longest row; default 64")
    parser.add_argument("--bound", type=float, default=1e-5, help="largest accepted difference; default 1e-5")
    parser.add_argument("--json", type=Path, help="also write all differences to this file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides, as for training")
    arguments = parser.parse_intermixed_args(argv)
    take_run(parser, arguments)
    engines = arguments.engines.split(",")
    for name in engines:
        if name not in ENGINES:
            parser.error(unknown_value("--engines", name, ENGINES))
    if len(set(engines)) < 2:
        parser.error(f"--engines {arguments.engines} must name two different engines")
    for name, least in (("rows", 1), ("tokens", 2)):
        if getattr(arguments, name) < least:
            parser.error(f"--{name} {getattr(arguments, name)} must be at least {least}")
    try:
        return _compare(arguments, engines)
    except (ValueError, KeyboardInterrupt, RuntimeError, OSError) as error:
        return report_failure(error)


def _compare(arguments: argparse.Namespace, engines: Sequence[str]) -> int:
    cfg = load_run_config(arguments.run, arguments.config_dir, arguments.overrides)
    prepare_environment()
    platform.select(platform.resolve_name(cfg.platform))
    # by name: the second imports Megatron, after the patches of the first
    registry.load("mindspeed_rl.adaptors:apply", "adaptors")("train")
    compare_engines = registry.load("mindspeed_rl.diagnostics.engine_parity:compare_engines", "parity")
    differences = compare_engines(cfg, engines, arguments.rows, arguments.tokens)
    width = max(len(difference.quantity) for difference in differences)
    print(f"largest differences between {' and '.join(engines)}; the bound is {arguments.bound:g}")
    for difference in differences[:_SHOWN]:
        print(f"  {difference.quantity:{width}}  {difference.value:8.1e}  {difference.place}")
    above = [difference for difference in differences if not difference.value <= arguments.bound]
    print(f"{len(above)} of {len(differences)} differences are above the bound")
    if arguments.json is not None:
        write_file(arguments.json, json.dumps([asdict(difference) for difference in differences], indent=1) + "\n")
    return 1 if above else 0
