"""Saved rollouts of a run become the data of the next stage."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from grpo_command import ONE_PROCESS, finished

from mindspeed_rl import adaptors, platform
from mindspeed_rl.algorithms.rollout_file import RolloutBatch
from mindspeed_rl.cli.main import main
from mindspeed_rl.config import load_run_config
from mindspeed_rl.run.resolve import resolve

# the dataset imports Megatron into this process, which trains afterwards
platform.select("cpu")
adaptors.apply("train")

from mindspeed_rl.data.datasets import InstructionDataset  # noqa: E402  (Megatron must be imported after the adaptor)


@pytest.mark.slow
def test_the_best_responses_of_a_run_train_the_stage_sft(single_process_world: None, task: Path, tmp_path: Path) -> None:
    from mindspeed_rl.run.models import plan_models
    from mindspeed_rl.workers.supervised_worker import SupervisedWorker

    keys = ["rl_config.save_rollouts_interval=1", "megatron_training.train_iters=2"]
    run = finished(task, tmp_path / "sample", *ONE_PROCESS, *keys)
    prefix = tmp_path / "best"
    words = ["rejection-sample", "--input", str(run.folder / "run"), "--output-prefix", str(prefix)]
    assert main([*words, "--keep-truncated"]) == 0
    dataset = InstructionDataset(prefix)
    best: dict[bytes, tuple[float, list[int]]] = {}
    for path in sorted((run.folder / "run" / "rollouts").glob("*.safetensors")):
        columns = RolloutBatch.load(path).columns
        read = [columns[name] for name in ("input_ids", "lengths", "prompt_lengths", "rewards")]
        for ids, length, prompt, reward in zip(*read):
            key = ids[:prompt].numpy().tobytes()
            if key not in best or reward.item() > best[key][0]:
                best[key] = reward.item(), ids[:length].tolist()
    assert [dataset[index]["input_ids"].tolist() for index in range(len(dataset))] == [ids for _, ids in best.values()]
    values = {"load": task / "model", "tokenizer_name_or_path": task / "model", "data_path": prefix, "save": tmp_path / "sft"}
    values |= {"num_npus": 1, "tensor_model_parallel_size": 1, "global_batch_size": 8, "micro_batch_size": 8}
    values |= {"split": "100,0,0"}
    cfg = load_run_config(
        "sft_tiny_cpu", None, ["model.tiny_qwen25.num_layers=null", *(f"megatron_training.{k}={v}" for k, v in values.items())]
    )
    worker = SupervisedWorker(plan_models(resolve(cfg, platform="cpu")), rank=0)
    losses = [worker.train().metrics.results()["train/loss"] for _ in range(6)]
    assert np.isfinite(losses).all() and losses[-1] < losses[0]
