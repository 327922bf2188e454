"""`mindspeed-rl npu-cost`: count the device work of an iteration: ours, plain Megatron's, and the minimum."""

from __future__ import annotations

import argparse
import sys

from mindspeed_rl import registry
from mindspeed_rl.cli.options import report_failure
from mindspeed_rl.config import load_run_config


def main(argv: list[str]) -> int:
    """Print the counts; return 0, 1 when a rank failed, 2 for a user's error or without a device to count on.

    Args:
        argv: the arguments after `npu-cost`, for example ["--config-name", "grpo_tiny_cpu", "--layers", "2"].
    """
    parser = argparse.ArgumentParser(
        prog="mindspeed-rl npu-cost",
        description="Kernels, collectives, copies, waits and memory of one iteration of a rank and of plain Megatron; needs "
        "an NPU or the simulated one (tests/npu_sim/run.sh --run mindspeed-rl npu-cost ...).",
    )
    parser.add_argument("--config-name", "--config", required=True, help="run file, with or without .yaml")
    parser.add_argument("--config-dir", default=None, help="folder of the run file; default: the project's configs/")
    parser.add_argument("--layers", type=int, default=2, help="layers of the model that is counted, in place of all")
    parser.add_argument("--rows", type=int, default=4, help="rows of an update on one rank")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of a row, half of them a response")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides, as for training")
    arguments = parser.parse_intermixed_args(argv)
    try:
        for name, minimum in (("layers", 1), ("rows", 1), ("tokens", 2)):
            if getattr(arguments, name) < minimum:
                raise ValueError(f"--{name}: {getattr(arguments, name)} must be at least {minimum}.")
        cfg = load_run_config(arguments.config_name, arguments.config_dir, arguments.overrides)
        # by name: it imports torch, which --help does not need
        count = registry.load("mindspeed_rl.diagnostics.cost_iteration:count", "npu-cost")
        print(
            count(cfg, arguments.config_name, arguments.layers, arguments.rows, arguments.tokens, as_json=arguments.json),
            flush=True,
        )
    except (ValueError, RuntimeError, KeyboardInterrupt) as error:
        return report_failure(error)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
