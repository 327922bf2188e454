"""Supervised stages in a training world of only this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from mindspeed_rl.config import build_run_config
from mindspeed_rl.run.models import plan_models
from mindspeed_rl.run.resolve import resolve
from mindspeed_rl.workers.supervised_worker import SupervisedWorker


@pytest.fixture(scope="module")
def start(single_process_world: None, tiny_model: Path) -> Callable[..., SupervisedWorker]:
    """(stage, data prefix, keys of megatron_training, rl_config=...) -> its worker, ready to train in fp32."""

    def make(stage: str, data: Any, *, rl_config: Mapping[str, Any] | None = None, **keys: Any) -> SupervisedWorker:
        training = {
            "stage": stage,
            "bf16": False,
            "load": str(tiny_model),
            "tokenizer_name_or_path": str(tiny_model),
            "data_path": data if isinstance(data, list) else str(data),
            "global_batch_size": 8,
            "micro_batch_size": 4,
            "seq_length": 64,
            "no_pad_to_seq_lengths": True,
            "no_shuffle": True,
            "train_iters": 30,
            "lr": 1e-3,
            "lr_decay_style": "constant",
            "weight_decay": 0.01,
            "finetune": True,
            **keys,
        }
        tree = {"platform": "cpu", "megatron_training": training} | ({"rl_config": dict(rl_config)} if rl_config else {})
        cfg = build_run_config(tree, config_name="test")
        return SupervisedWorker(plan_models(resolve(cfg, platform="cpu")), rank=0)

    return make
