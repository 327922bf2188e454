"""A run whose length is said in epochs of its prompts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mindspeed_rl.cli import preprocess
from mindspeed_rl.cli.explain import main as explain
from mindspeed_rl.config import ConfigError, load_run_config
from mindspeed_rl.run.length import resolve_length
from mindspeed_rl.run.resolve import resolve


def test_epochs_become_iterations_once_the_prompts_are_counted() -> None:
    changes = ["megatron_training.train_iters=null", "megatron_training.train_epochs=1.5"]
    run = resolve(load_run_config("grpo_tiny_cpu", None, changes), platform="cpu")
    longer = resolve_length(run, 1000)  # 64 prompts an iteration: 1500 / 64 = 23.4
    assert longer.plan.train_iters == longer.config.actor_config.train_iters == 24
    assert longer.config.megatron_training.train_iters == 24 and run.plan.train_iters is None


def test_a_prompt_that_trains_as_two_groups_counts_twice() -> None:
    changes = ["megatron_training.train_iters=null", "megatron_training.train_epochs=1.5", "rl_config.guarantee_order=false"]
    changes += [
        f"rl_config.{key}" for key in ("partial_rollout_max_split=2", "spare_samples_per_prompt=1", "keep_spare_samples=true")
    ]
    run = resolve(load_run_config("grpo_tiny_cpu", None, changes), platform="cpu")
    assert resolve_length(run, 1000).plan.train_iters == 47  # 3000 / 64 = 46.9


def test_a_run_with_iterations_keeps_them() -> None:
    run = resolve(load_run_config("grpo_tiny_cpu"), platform="cpu")
    assert resolve_length(run, 1000) is run


def test_passes_that_were_begun_with_another_batch_are_completed() -> None:
    changes = ["megatron_training.train_iters=null", "megatron_training.train_epochs=1.5"]
    run = resolve(load_run_config("grpo_tiny_cpu", None, changes), platform="cpu")
    # 10 iterations of 32 prompts were done: 1180 of 1500 prompts are left, in batches of 64
    assert resolve_length(run, 1000, (10, 320)).plan.train_iters == 10 + 19


@pytest.mark.parametrize(
    ("name", "sentence"),
    [("grpo_tiny_cpu", "say the length of the run twice"), ("pretrain_tiny_cpu", "stage pretrain takes train_iters")],
)
def test_a_length_said_twice_or_over_documents_is_refused(name: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        resolve(load_run_config(name, None, ["megatron_training.train_epochs=1"]), platform="cpu")


def test_explain_counts_the_prompts_and_says_the_iterations(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [json.dumps({"prompt": text, "label": "2"}) for text in ["1+1="] * 100 + ["1" * 200]]
    (tmp_path / "prompts.jsonl").write_text("\n".join(rows))
    keys = {
        "train_iters": "null",
        "train_epochs": 2,
        "tokenizer_name_or_path": tiny_model,
        "data_path": tmp_path / "prompts.jsonl",
        "map_keys": "{prompt: prompt, query: '', response: label}",
        "prompt_type": "empty",
    }
    words = ["--config-name", "grpo_tiny_cpu", *(f"megatron_training.{key}={value}" for key, value in keys.items())]
    words += [f"actor_config.load={tiny_model}", "megatron_training.dataset_additional_keys=[]"]
    words.append("megatron_training.eval_data_path=null")
    assert explain(words) == 0  # 64 prompts an iteration; the last row is too long
    said = capsys.readouterr().out
    assert "4 iterations: 2 passes over 100 prompts, 64 an iteration" in said and said.strip().endswith("valid")
    assert explain([*words, f"megatron_training.data_path={tmp_path / 'nothing.jsonl'}"]) == 2
    assert "nothing.jsonl' is neither a raw file or folder" in capsys.readouterr().out


def test_epochs_of_a_supervised_stage_count_the_rows_of_its_training_share(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [json.dumps({"instruction": f"{number}+1=", "input": "", "output": str(number + 1)}) for number in range(100)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    files = ["--input", str(tmp_path / "rows.jsonl"), "--output-prefix", str(tmp_path / "sft"), "--workers", "1"]
    how = ["--tokenizer-name-or-path", str(tiny_model), "--handler-name", "AlpacaStyleInstructionHandler"]
    assert preprocess.main([*files, *how, "--prompt-type", "empty"]) == 0
    keys = {
        "train_iters": "null",
        "train_epochs": 3,
        "global_batch_size": 8,
        "micro_batch_size": 2,
        "split": "'90,10,0'",
        "tokenizer_name_or_path": tiny_model,
        "load": tiny_model,
        "data_path": tmp_path / "sft",
    }
    capsys.readouterr()
    assert explain(["--config-name", "sft_tiny_cpu", *(f"megatron_training.{key}={value}" for key, value in keys.items())]) == 0
    assert "34 iterations: 3 passes over 90 rows, 8 an iteration" in capsys.readouterr().out  # 270 / 8 = 33.75
