"""Runs of one device, and checkpoints as far as the driver reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mindspeed_rl.checkpoint.model_source import ModelSource
from mindspeed_rl.config import build_run_config
from mindspeed_rl.run import Run
from mindspeed_rl.run.resolve import resolve


def run(
    stage: str,
    *,
    iters: int = 10,
    rl_config: dict[str, Any] | None = None,
    critic_config: Any = None,
    megatron_training: dict[str, Any] | None = None,
    **actor: Any,
) -> Run:
    """A run of one device with these keys of the actor."""
    training: dict[str, Any] = {"stage": stage, "global_batch_size": 8, "micro_batch_size": 8}
    training |= {"train_iters": iters, "seq_length": 64}
    training |= megatron_training or {}
    tree: dict[str, Any] = {"platform": "cpu", "megatron_training": training, "actor_config": {}}
    tree["actor_config" if stage.startswith("ray") else "megatron_training"] |= actor
    if stage.startswith("ray"):
        tree["rl_config"] = {"actor_resource": {"num_npus": 1}, "mini_batch_size": 8, "n_samples_per_prompt": 4}
        tree["rl_config"]["max_prompt_length"] = 32
        tree["generate_config"] = {"infer_tensor_parallel_size": 1, "sampling_config": {"max_tokens": 8}}
        tree["rl_config"] |= rl_config or {}
    if critic_config is not None:
        tree["critic_config"] = critic_config
    return resolve(build_run_config(tree, config_name="test"), platform="cpu")


def checkpoint(folder: Path, iteration: int, state: dict[str, Any], stage: str | None) -> ModelSource:
    """A training checkpoint as far as the driver reads it."""
    (folder / f"iter_{iteration:07d}").mkdir(parents=True)
    record = {"iteration": iteration, "run_state": state} | ({} if stage is None else {"stage": stage})
    (folder / f"iter_{iteration:07d}" / "run_state.json").write_text(json.dumps(record))
    (folder / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    return ModelSource(folder, folder, "training")
