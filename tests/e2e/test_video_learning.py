"""GRPO learns from videos: which of two opposite directions a square moves in, which only the reward says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from moving_shapes import save_model, write_rows
from test_video_run import GRPO
from test_vision_run import command

KEYS = ["megatron_training.image_folder=null", "megatron_training.tokenizer_name_or_path=model"]
SFT = [
    "--config-name", "sft_tiny_vision_cpu", "run_dir=sft_run", "megatron_training.num_npus=1", "megatron_training.load=model",
    "megatron_training.data_path=start.jsonl", "megatron_training.prompt_type=hf", "megatron_training.global_batch_size=32",
    "megatron_training.map_keys={prompt: instruction, query: '', response: output}", "megatron_training.train_iters=200",
    "megatron_training.lr=2e-3", "megatron_training.save=sft", "megatron_training.save_interval=200",
]  # fmt: skip
LEARNING = [
    "run_dir=grpo_run", "actor_config.load=sft/hf/latest", "megatron_training.train_iters=25",
    "megatron_training.eval_interval=25",
    "megatron_training.eval_data_path=held_out.jsonl", "megatron_training.global_batch_size=32", "rl_config.mini_batch_size=32",
    "actor_config.lr=1e-3", "actor_config.lr_decay_style=constant",
    "rl_config.n_samples_per_prompt=8", "rl_config.verifier_function=[exact_match]", "actor_config.micro_batch_size=256",
    "rl_config.log_probs_diff_limit=1e-3",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.extra
def test_held_out_rewards_rise(tmp_path: Path) -> None:
    save_model(tmp_path / "model")
    # the warm start names either of two opposite directions: all that it can learn is right in half of the videos
    write_rows(tmp_path, "start", 512, 1, right=0.5)
    write_rows(tmp_path, "train", 256, 2)
    write_rows(tmp_path, "held_out", 64, 3)
    command("train", *SFT, *KEYS, folder=tmp_path)
    command("train", *GRPO, *KEYS, *LEARNING, folder=tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "grpo_run" / "metrics.jsonl").read_text().splitlines()]
    held_out = [line["eval/accuracy"] for line in lines if "eval/accuracy" in line]
    print(held_out)
    assert len(held_out) == 2 and held_out[0] < 0.65 and held_out[1] > 0.8, held_out
