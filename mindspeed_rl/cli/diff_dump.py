"""`mindspeed-rl diff-dump`: the first tensor that differs between two accuracy dumps."""

from __future__ import annotations

import argparse
from pathlib import Path

from mindspeed_rl import registry
from mindspeed_rl.cli.options import print_status


def main(argv: list[str]) -> int:
    """Compare; return 0 when nothing differs, 1 when a tensor does or nothing could be compared, 2 for no dump."""
    parser = argparse.ArgumentParser(
        prog="mindspeed-rl diff-dump",
        description="Compare two dumps of msprobe_config and name the first tensor that differs, in the order of the "
        "computation. Slices of tensor-parallel, pipeline and expert ranks are joined.",
    )
    parser.add_argument("first", type=Path, metavar="A", help="dump_path of a run, or a folder below it")
    parser.add_argument("second", type=Path, metavar="B")
    parser.add_argument(
        "--tolerance",
        type=float,
        help="largest difference that is ignored, as a fraction of the tensor's largest number; default: 1e-4 for float32, "
        "4e-3 for float16, 3e-2 for bfloat16, 0 for whole numbers",
    )
    parser.add_argument("--most", type=int, default=10, help="max number of differences to show; default 10")
    arguments = parser.parse_args(argv)
    if arguments.tolerance is not None and not arguments.tolerance >= 0:
        parser.error(f"--tolerance {arguments.tolerance:g} must be at least 0")
    # by name: it imports torch, which --help does not need
    compare = registry.load("mindspeed_rl.dumps.comparison:compare_folders", "diff-dump")
    try:
        findings, lines = compare(
            arguments.first.expanduser(), arguments.second.expanduser(), arguments.tolerance, arguments.most
        )
    except (OSError, ValueError) as error:
        print_status(f"error: {error}")
        return 2
    for line in lines:
        print(line)
    return 0 if findings.compared and not findings.differences else 1
