"""`mindspeed-rl rejection-sample`: data of the supervised stages from the saved rollouts of a run, by reward."""

from __future__ import annotations

import argparse
from pathlib import Path

from mindspeed_rl import registry
from mindspeed_rl.cli.options import report_failure

_STAGES = {"sft": "sft", "pairs": "dpo (simpo, cpo, orpo, orm)", "unpaired": "kto"}


def main(argv: list[str]) -> int:
    """Write the columns of the selected responses; return 0, 1 after a failure, 2 for wrong arguments."""
    parser = argparse.ArgumentParser(
        prog="mindspeed-rl rejection-sample",
        description="Select responses of saved rollouts (rl_config.save_rollouts_interval) by their rewards, and write them as "
        "data of a supervised stage, with the token ids of the rollout.",
    )
    parser.add_argument("--input", nargs="+", required=True, type=Path, help="folders of runs, or of saved rollouts")
    parser.add_argument("--output-prefix", required=True, type=Path, help="data_path of the run that learns from the data")
    parser.add_argument("--kind", choices=list(_STAGES), default="sft",
        help="sft: the best responses; pairs: best and worst, for dpo; unpaired: all with a judgement, for kto")  # fmt: skip
    parser.add_argument("--best", type=int, default=1, help="kind sft: responses of a prompt; default 1")
    parser.add_argument("--threshold", type=float, help="least reward of a good response; default: any")
    parser.add_argument("--margin", type=float, default=0.0,
        help="kind pairs: rewards of best and worst differ by more than this; default 0")  # fmt: skip
    parser.add_argument("--seq-length", type=int, help="longest sequence in tokens; default: any")
    parser.add_argument("--iterations", default=":", help="FIRST:LAST, counted from 1; default: all")
    parser.add_argument("--keep-duplicates", action="store_true", help="equal responses to a prompt stay")
    parser.add_argument("--keep-truncated", action="store_true", help="responses that hit the length limit stay")
    arguments = parser.parse_args(argv)
    first, colon, last = arguments.iterations.partition(":")
    if not colon or not (first or "1").isdecimal() or not (last or "1").isdecimal():
        parser.error(f"--iterations {arguments.iterations} must be FIRST:LAST, such as 10:20 or 10:")
    try:
        settings = registry.load("mindspeed_rl.data.selection:SelectionSettings", "rejection-sample")(
            kind=arguments.kind,
            threshold=arguments.threshold,
            best=arguments.best,
            margin=arguments.margin,
            seq_length=arguments.seq_length,
            keeps_duplicates=arguments.keep_duplicates,
            keeps_truncated=arguments.keep_truncated,
            iterations=(int(first) if first else None, int(last) if last else None),
        )
        write = registry.load("mindspeed_rl.data.selection:write_selection", "rejection-sample")
        prefix = arguments.output_prefix.expanduser()
        print(write([path.expanduser() for path in arguments.input], prefix, settings))
        print(f"train on it: stage {_STAGES[arguments.kind]}, megatron_training.data_path: {prefix}")
        return 0
    except (ValueError, KeyboardInterrupt, RuntimeError, OSError) as error:
        return report_failure(error)
