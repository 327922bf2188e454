"""`mindspeed-rl diff-dump`: the first tensor that differs between two accuracy dumps."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from mindspeed_rl import registry


def main(argv: list[str]) -> int:
    """Compares; returns 0 when nothing differs, 1 when something does or nothing could be compared, 2 for no dump."""
    parser = argparse.ArgumentParser(
        prog="mindspeed-rl diff-dump",
        description="Compare two dumps of msprobe_config and name the first tensor that differs, in the order of the "
        "computation. Parts of tensor-parallel, pipeline and expert ranks are put together.",
    )
    parser.add_argument("first", type=Path, metavar="A", help="dump_path of a run, or a folder below it")
    parser.add_argument("second", type=Path, metavar="B")
    parser.add_argument(
        "--tolerance",
        type=float,
        help="largest difference that counts as none, as a share of the tensor's largest number; default: 1e-4 for float32, "
        "4e-3 for float16, 3e-2 for bfloat16, 0 for whole numbers",
    )
    parser.add_argument("--most", type=int, default=10, help="differences that are shown; default 10")
    arguments = parser.parse_args(argv)
    if arguments.tolerance is not None and not arguments.tolerance >= 0:
        parser.error(f"--tolerance {arguments.tolerance:g} must be at least 0")
    # by name: it brings torch, which --help does without
    compare = registry.load("mindspeed_rl.dumps.comparison:compare_folders", "diff-dump")
    try:
        findings, lines = compare(
            arguments.first.expanduser(), arguments.second.expanduser(), arguments.tolerance, arguments.most
        )
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for line in lines:
        print(line)
    return 0 if findings.compared and not findings.differences else 1
