"""Of several files that are not there each is named, before anything is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from mindspeed_rl.config import ConfigError, load_run_config
from mindspeed_rl.run.resolve import resolve
from mindspeed_rl.trainers.rl_setup import check_rl
from mindspeed_rl.trainers.sft_setup import check_supervised


def test_wrong_weights_hide_neither_tokenizer_nor_data_nor_rewards(tmp_path: Path) -> None:
    changes = [
        f"actor_config.load={tmp_path / 'no_weights'}",
        f"megatron_training.tokenizer_name_or_path={tmp_path / 'no_tokenizer'}",
        f"megatron_training.data_path={tmp_path / 'train.jsonl'}",
        f"megatron_training.eval_data_path={tmp_path / 'heldout.jsonl'}",
        "rl_config.verifier_function=[exact_mach]",
        "model.tiny_qwen25.num_layers=null",
    ]
    with pytest.raises(ConfigError) as caught:
        check_rl(resolve(load_run_config("grpo_tiny_cpu", None, changes), platform="cpu"))
    result = caught.value.errors
    assert len(result) == 5
    for part in ("exact_mach", "no_weights", "no_tokenizer", "train.jsonl", "heldout.jsonl"):
        assert sum(part in text for text in result) == 1, part


def test_a_supervised_stage_names_weights_tokenizer_and_data(tmp_path: Path) -> None:
    changes = [
        f"megatron_training.load={tmp_path / 'no_weights'}",
        f"megatron_training.tokenizer_name_or_path={tmp_path / 'no_tokenizer'}",
        f"megatron_training.data_path={tmp_path / 'lessons'}",
    ]
    with pytest.raises(ConfigError) as caught:
        check_supervised(resolve(load_run_config("sft_tiny_cpu", None, changes), platform="cpu"))
    assert len(caught.value.errors) == 3
