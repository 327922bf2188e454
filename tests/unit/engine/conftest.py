"""A world of one process with Megatron's groups, and tiny engines in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from mindspeed_rl.checkpoint.hf import HfFolder
from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.engine import parallel
from mindspeed_rl.engine.build import batch_shape, build_model
from mindspeed_rl.engine.train_engine import TrainEngine
from mindspeed_rl.engine.weights import load_weights
from mindspeed_rl.models.plan import plan_model


@pytest.fixture(scope="module")
def training_world(single_process_world: None) -> None:
    """Process groups of only this process."""
    parallel.init_process_group(parallel.RankInfo(0, 1, 0), 60)
    parallel._init_model_parallel(MegatronConfig(), 1, 60)


@pytest.fixture(scope="module")
def make_engine(training_world: None, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., TrainEngine]:
    """(keys of MegatronConfig) -> an engine in training on a random two-layer Qwen2, always with the same weights.

    `model`, of transformers, takes its place.
    """
    torch.manual_seed(0)
    hf = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=67,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=True,
        )
    )
    tiny = tmp_path_factory.mktemp("tiny")
    hf.save_pretrained(tiny)

    def make(*, steps_per_iteration: int = 1, model: PreTrainedModel | None = None, **keys: Any) -> TrainEngine:
        folder = tiny
        if model is not None:
            folder = tmp_path_factory.mktemp("other")
            model.save_pretrained(folder)
        config = MegatronConfig(**{"bf16": False, "lr": 1e-2, "train_iters": 10, "lr_decay_style": "constant", **keys})
        parallel._seed_all(1)
        built = build_model(config, plan_model(config, folder), trainable=True)
        load_weights(built, HfFolder(folder))
        engine = TrainEngine(config, built, batch_shape(config, packed=True, pad_id=0))
        engine.start_training(steps_per_iteration)
        return engine

    return make
