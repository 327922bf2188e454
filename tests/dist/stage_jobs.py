"""A job that trains a supervised stage as its worker does, in a world of its own."""

from __future__ import annotations

import gc
import os
from typing import Any

import torch.distributed as dist

from mindspeed_rl import adaptors, platform

platform.select("cpu")
adaptors.apply("train")

from megatron.core import parallel_state  # noqa: E402  (Megatron must be imported after the adaptor)

from mindspeed_rl.config import build_run_config  # noqa: E402
from mindspeed_rl.observability.metrics import Metrics  # noqa: E402
from mindspeed_rl.run.models import plan_models  # noqa: E402
from mindspeed_rl.run.resolve import resolve  # noqa: E402
from mindspeed_rl.workers.supervised_worker import SupervisedWorker  # noqa: E402


def train_stage(training: dict[str, Any], rl_config: dict[str, Any] | None, steps: int) -> list[Metrics]:
    """This rank's metrics of each step, and of an evaluation at the end where there is something to evaluate on.

    With `save` set there is a checkpoint of the end.
    """
    tree = {"platform": "cpu", "megatron_training": training} | ({"rl_config": rl_config} if rl_config else {})
    cfg = build_run_config(tree, config_name="test")
    try:
        worker = SupervisedWorker(plan_models(resolve(cfg, platform="cpu")), rank=int(os.environ["RANK"]))
        metrics = [worker.train().metrics for _ in range(steps)]
        if worker.held_out is not None:
            metrics.append(worker.evaluate().metrics)
        if training.get("save"):
            worker.save(steps)
            worker.finish()
        dist.barrier()
        return metrics
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        gc.collect()
