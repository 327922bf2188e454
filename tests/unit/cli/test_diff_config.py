"""`diff train rollout --run` builds the engine of a run with servers beside the trainer, whatever its mode."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from mindspeed_rl.cli.diff import _config
from mindspeed_rl.config import build_run_config
from mindspeed_rl.run.draft import draft
from mindspeed_rl.run.rules.validation import validate

MODES: dict[str, dict[str, Any]] = {
    "async": {"trainer_mode": "async"},
    "elastic": {"trainer_mode": "async", "elastic_rollout": True, "elastic_rollout_high": 2.0},
    "elastic training": {"trainer_mode": "async", "elastic_training_devices": 2, "elastic_training_wait": 0.3},
    "spare": {"trainer_mode": "async", "spare_samples_per_prompt": 2, "keep_spare_samples": True},
    "one step off": {"trainer_mode": "one_step_off"},
    "one step off, in ms-swift's word": {"async_generate": True},
}


def read(folder: Path, config: dict[str, Any]) -> Any:
    (folder / "report.json").write_text(json.dumps({"config_set": build_run_config(config).as_written()}))
    return _config(Namespace(run=folder, overrides=[]))


@pytest.mark.parametrize("mode", MODES)
def test_the_engine_of_a_run_with_servers_is_built_beside_the_trainer(mode: str, tmp_path: Path) -> None:
    config = {
        "megatron_training": {
            "stage": "ray_grpo",
            "global_batch_size": 32,
            "seq_length": 2048,
            "num_layers": 28,
            "num_attention_heads": 28,
            "group_query_attention": True,
            "num_query_groups": 4,
            "ffn_hidden_size": 18944,
            "padded_vocab_size": 152064,
        },
        "actor_config": {"micro_batch_size": 4},
        "rl_config": {
            "use_integrated_worker": False,
            "actor_resource": {"num_npus": 2},
            "rollout_resource": {"num_npus": 4},
            "n_samples_per_prompt": 8,
            "mini_batch_size": 32,
            "max_prompt_length": 2048,
            **MODES[mode],
        },
        "generate_config": {
            "infer_tensor_parallel_size": 1,
            "max_model_len": 4096,
            "sampling_config": {"max_tokens": 2048},
        },
    }
    run = draft(read(tmp_path, config))
    assert not run.placement.disaggregated and run.rl.trainer_mode == "sync"
    assert [violation.message for violation in validate(run)] == []


@pytest.mark.parametrize("group", ["megatron_training", "actor_config"])
def test_the_newest_checkpoint_is_compared_wherever_the_run_file_names_its_folder(group: str, tmp_path: Path) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    (tmp_path / "iter_0000003").mkdir()
    config: dict[str, Any] = {"megatron_training": {"stage": "sft", "train_iters": 3}}
    config.setdefault(group, {})["save"] = str(tmp_path)
    assert read(tmp_path, config).actor_config.load == str(tmp_path)


def test_a_supervised_run_is_read_and_refused_later(tmp_path: Path) -> None:
    assert read(tmp_path, {"megatron_training": {"stage": "sft", "train_iters": 1}}).is_supervised
