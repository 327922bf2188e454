"""A tiny Qwen2.5 on disk, hand-made datasets, and supervised stages in a training world of this process alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from supervised_samples import EOS, NETWORK, PAD, text
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from mindspeed_rl.config import build_run_config
from mindspeed_rl.run.models import plan_models
from mindspeed_rl.run.resolve import resolve
from mindspeed_rl.workers.supervised_worker import SupervisedWorker


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder: random weights, and a tokenizer of single characters (`supervised_samples.text`)."""
    folder = tmp_path_factory.mktemp("tiny_qwen25")
    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config(**NETWORK)).save_pretrained(folder)
    characters = {text(number): number for number in range(3, 97)}
    tokenizer = Tokenizer(models.BPE({"<pad>": PAD, "<eos>": EOS, "<unk>": 2, **characters}, [], unk_token="<unk>"))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def start(one_process_world: None, tiny_model: Path) -> Callable[..., SupervisedWorker]:
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
