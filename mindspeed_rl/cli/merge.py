"""`mindspeed-rl merge`: one model of several, weight by weight.

    mindspeed-rl merge --method linear --models A B --weights 0.7 0.3 -o OUT
    mindspeed-rl merge --method slerp --models A B --t 0.4 -o OUT
    mindspeed-rl merge --method ties --base BASE --models A B C --density 0.2 -o OUT
    mindspeed-rl merge --method task_arithmetic --base BASE --models A B --scale 0.5 -o OUT

A model is a Hugging Face folder, a PEFT adapter (its base is the one that it names, or --base), or a name on a hub. Config,
tokenizer and chat template are the first model's; docs/checkpoint_conversion.md has the formulas.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from mindspeed_rl.checkpoint.options import ParamsDtype
from mindspeed_rl.cli.options import Parser, print_status, refuse_first, run_resumable

#: option -> the methods that read it
_READ_BY = {
    "weights": ("linear", "ties", "task_arithmetic"),
    "t": ("slerp",),
    "density": ("ties",),
    "scale": ("ties", "task_arithmetic"),
}
_METHODS = ("linear", "slerp", "ties", "task_arithmetic")
_WITH_BASE = ("ties", "task_arithmetic")


def make_parser() -> Parser:
    """Build the argument parser."""
    parser = Parser(
        prog="mindspeed-rl merge",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--method", choices=_METHODS, required=True)
    add("--models", type=Path, nargs="+", required=True, help="Hugging Face folders, PEFT adapters, or names on a hub")
    add("--base", type=Path, help="model that task vectors start from (ties, task_arithmetic), and base of adapters")
    add("--weights", type=float, nargs="+", help="a number per model; default 1 each. linear divides them by their sum")
    add("--t", type=float, help="slerp: 0 is the first model, 1 the second; default 0.5")
    add("--density", type=float, help="ties: fraction of each task vector that is kept; default 0.2")
    add("--scale", type=float, help="ties, task_arithmetic: factor of the merged task vector; default 1")
    add("-o", "--output", type=Path, required=True, help="Hugging Face folder to write")
    add("--params-dtype", choices=get_args(ParamsDtype), help="format of the result; default: the first model's")
    add("--mtp-num-layers", type=int, help="multi-token-prediction layers to merge too; default none")
    add("--max-shard-size", default="5GB", help="size of a weight file; default 5GB")
    add("--workers", type=int, default=1, help="processes that write")
    add("--verify", action="store_true", help="read the result back and compare every tensor bit for bit")
    add("--overwrite", action="store_true", help="replace a model that is at the destination")
    add("--dry-run", action="store_true", help="check the models, and write nothing")
    return parser


def _check(args: argparse.Namespace) -> None:
    method, count = args.method, len(args.models)
    for name, methods in _READ_BY.items():
        if vars(args)[name] is not None and method not in methods:
            raise ValueError(f"--{name} belongs to {' and '.join(methods)}; --method is {method}")
    given = [*(args.weights or ()), *(value for value in (args.t, args.density, args.scale) if value is not None)]
    refuse_first(
        (method == "slerp" and count != 2, f"--method slerp merges two models; --models names {count}"),
        (method == "linear" and count < 2, "--method linear needs two models or more; --models names 1"),
        (
            method in _WITH_BASE and args.base is None,
            f"--method {method} needs --base, the model that all of them were trained from",
        ),
        (
            args.weights is not None and len(args.weights) != count,
            f"--weights has {len(args.weights or ())} numbers for {count} models; give one per model, in their order",
        ),
        (not all(map(math.isfinite, given)), f"--weights, --t, --density and --scale must be finite numbers: {given}"),
        (
            method == "linear" and args.weights is not None and math.fsum(args.weights) == 0,
            "--weights sum to 0, by which linear divides; their sum must be another number",
        ),
        (
            method == "ties" and any(weight <= 0 for weight in args.weights or ()),
            f"--weights {args.weights}: the means of ties need weights above 0",
        ),
        (args.t is not None and not 0 <= args.t <= 1, f"--t is {args.t}; it must be from 0 to 1"),
        (
            args.density is not None and not 0 < args.density <= 1,
            f"--density is {args.density}; it must be above 0 and at most 1",
        ),
        (args.workers < 1, f"--workers is {args.workers}; it must be at least 1"),
    )
    written = args.output.resolve()
    for read in (*args.models, *(() if args.base is None else (args.base,))):
        folder = read.resolve()
        if written == folder or folder in written.parents or written in folder.parents:
            raise ValueError(f"-o {args.output} is in the place of {read}, which is read; choose another folder")


def _merge(args: argparse.Namespace) -> int:
    _check(args)
    # the options are checked before torch is imported, which takes seconds
    from mindspeed_rl.checkpoint import convert
    from mindspeed_rl.checkpoint.command import DTYPES, parse_size
    from mindspeed_rl.checkpoint.conversion_plan import Destination
    from mindspeed_rl.checkpoint.merge import open_model, plan_merge
    from mindspeed_rl.checkpoint.merge_methods import MergeSettings
    from mindspeed_rl.cli.convert import Bar, print_plan

    chosen = {name: vars(args)[name] for name in ("t", "density", "scale") if vars(args)[name] is not None}
    settings = MergeSettings(method=args.method, weights=tuple(args.weights or [1.0] * len(args.models)), **chosen)
    models = [open_model(path, args.base, args.mtp_num_layers) for path in args.models]
    base = open_model(args.base, None, args.mtp_num_layers) if args.method in _WITH_BASE else None
    destination = Destination(
        "hf",
        args.output.resolve() if args.output.is_symlink() else args.output,
        dtype=None if args.params_dtype is None else DTYPES[args.params_dtype],
        max_shard_bytes=parse_size(args.max_shard_size),
        overwrite=args.overwrite,
    )
    plan, notes = plan_merge(models, base, settings, destination)
    for note in notes:
        print_status(f"note: {note}")
    convert.check_destination(destination)
    if args.dry_run:
        print_plan(plan)
        return 0
    result = convert.run_plan(plan, workers=args.workers, verify=args.verify, progress=Bar())
    print_status(f"wrote {result}: {args.method} of {len(models)} models, {plan.num_bytes / 1e9:.2f} GB")
    return 0


def main(argv: Sequence[str]) -> int:
    """Merge models and return the exit status. Errors are one line on stderr."""
    return run_resumable(lambda: _merge(make_parser().parse_args(list(argv))))
