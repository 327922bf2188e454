"""`mindspeed-rl teacher-log-probs`: store a teacher's most probable tokens for each predicted token of supervised data."""

from __future__ import annotations

import argparse

from mindspeed_rl import registry
from mindspeed_rl.cli.options import report_failure
from mindspeed_rl.cli.train import prepare_environment
from mindspeed_rl.config import load_run_config


def main(argv: list[str]) -> int:
    """Write `<data_path>_teacher.bin` and its index; return 0, 1 after a failure, 2 for wrong arguments."""
    parser = argparse.ArgumentParser(
        prog="mindspeed-rl teacher-log-probs",
        description="Ask a server with vLLM's completions for the log-probs of all tokens that a run of stage sft learns, and "
        "store its most probable tokens next to the data, for sft_loss_type forward_kl or reverse_kl.",
    )
    parser.add_argument("--config-name", "--config", required=True, help="run file of stage sft, with or without .yaml")
    parser.add_argument("--config-dir", default=None, help="folder of the run file; default: the project's configs/")
    parser.add_argument("--server", required=True, help="address of the teacher: http://host:port/v1")
    parser.add_argument("--topk", type=int, default=64, help="tokens that are stored for each position; default 64")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides, as for training")
    arguments = parser.parse_intermixed_args(argv)
    if arguments.topk < 1:
        parser.error(f"--topk {arguments.topk} must be at least 1")
    if not arguments.server.startswith(("http://", "https://")):
        parser.error(f"--server {arguments.server} must look like http://host:port/v1")
    try:
        # the data are read as by a run that learns from their labels
        overrides = [*arguments.overrides, "++megatron_training.sft_loss_type=nll"]
        cfg = load_run_config(arguments.config_name, arguments.config_dir, overrides)
        if cfg.stage != "sft":
            raise ValueError(f"megatron_training.stage: {cfg.stage}; log-probs of a teacher are for stage sft")
        prepare_environment()
        store = registry.load("mindspeed_rl.workers.stages.teacher_store:store_log_probs", "teacher-log-probs")
        store(cfg.actor_config, arguments.server, arguments.topk)
        return 0
    except (ValueError, KeyboardInterrupt, RuntimeError, OSError) as error:
        return report_failure(error)
