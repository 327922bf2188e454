"""`mindspeed-rl plan memory`: whether a run fits, before a device is booked. Needs no device and no torch."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from typing import Any

from mindspeed_rl.config.errors import ConfigError
from mindspeed_rl.config.loader import build_run_config
from mindspeed_rl.config.run import RunConfig
from mindspeed_rl.config.run_files import compose, locate
from mindspeed_rl.config.validation import validate
from mindspeed_rl.planner.advice import changes_to_fit
from mindspeed_rl.planner.chips import CHIPS, Chip, chip_of
from mindspeed_rl.planner.memory import plan_memory
from mindspeed_rl.planner.text import memory_json, memory_text


def main(argv: list[str]) -> int:
    """Print a plan; return 0 when the run fits or may fit, 1 when it does not, 2 for a mistake.

    Args:
        argv: the arguments behind `plan`, for example ["memory", "--config-name", "grpo_qwen3_8b_A3"].
    """
    parser = argparse.ArgumentParser(
        prog="mindspeed-rl plan", description="Memory and time of a run before a device is booked; shapes and formulas alone."
    )
    kinds = parser.add_subparsers(dest="kind", required=True)
    memory = kinds.add_parser("memory", help="bytes of a die by owner and phase, and what to change to fit")
    _add_run(memory)
    arguments = parser.parse_intermixed_args(argv) if not argv else _parse(parser, argv)
    try:
        return _memory(arguments)
    except ConfigError as error:
        print("error: " + "\nerror: ".join(error.errors), file=sys.stderr)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
    return 2


def _parse(parser: argparse.ArgumentParser, argv: list[str]) -> argparse.Namespace:
    """Overrides may stand between the flags."""
    arguments, rest = parser.parse_known_args(argv)
    if wrong := [item for item in rest if item.startswith("-") or "=" not in item]:
        parser.error(f"unrecognized arguments: {' '.join(wrong)}")
    arguments.overrides = [*arguments.overrides, *rest]
    return arguments


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config-name", required=True, help="run file, with or without .yaml")
    parser.add_argument("--config-dir", default=None, help="folder of the run file; default: the project's configs/")
    parser.add_argument("--nodes", type=int, default=1, help="machines the devices are spread over")
    parser.add_argument("--chip", choices=[*CHIPS], default=None, help="device kind; by the run file's platform and name")
    parser.add_argument("--memory-gib", type=float, default=None, help="memory of a die, where it is not the chip's usual one")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides, as for training")


def _read(arguments: argparse.Namespace) -> tuple[Mapping[str, Any], RunConfig, Chip]:
    """The run file, composed and read, and the chip.

    Raises:
        ConfigError: the run file has mistakes, or breaks a rule.
    """
    if arguments.nodes < 1:
        raise ValueError(f"--nodes: {arguments.nodes} must be at least 1.")
    directory, name = locate(arguments.config_name, arguments.config_dir)
    tree = compose(directory, name, arguments.overrides)
    cfg = build_run_config(tree, config_name=name, config_dir=str(directory))
    if broken := validate(cfg, arguments.nodes):
        raise ConfigError(str(violation) for violation in broken)
    return tree, cfg, chip_of(cfg, arguments.chip, arguments.memory_gib)


def _memory(arguments: argparse.Namespace) -> int:
    tree, cfg, chip = _read(arguments)
    plan = plan_memory(cfg, chip, arguments.nodes)
    changes = changes_to_fit(tree, cfg, plan, chip, arguments.nodes)
    shown = json.dumps(memory_json(plan, changes), indent=2) if arguments.json else memory_text(plan, changes)
    print(shown, flush=True)
    return 1 if plan.verdict == "does not fit" else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
