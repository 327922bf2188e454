"""Runs that resume: with every role, and with another run file, between every two files that a save writes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from grpo_command import ONE_PROCESS, Command, finished
from measured_figures import select_computed
from patience import patient
from safetensors.torch import load_file
from shared_forks import shared

from mindspeed_rl.checkpoint.newest import TRACKER_NAME
from mindspeed_rl.runtime.fork_server import TRAINING

DROPOUT = [f"+actor_config.{key}=0.1" for key in ("hidden_dropout", "attention_dropout")]
ACTS = ["+rl_config.dropout_in_update=true", "rl_config.log_probs_diff_limit=null"]
DROPOUT += ACTS
LORA = ["+actor_config.lora_target_modules=[linear_qkv,linear_fc1]", "+actor_config.lora_r=4", "+actor_config.lora_dropout=0.1"]


def steps_of(command: Command) -> dict[int, dict[str, Any]]:
    """The figures of each iteration that do not depend on how fast the machine was; the last of each number counts."""
    return {record["iteration"]: select_computed(record) for record in command.metrics}


def critic_of(task: Path, save: Path) -> list[str]:
    critic = {"model": "tiny_qwen25", "tensor_model_parallel_size": 1, "micro_batch_size": 16, "lr": 1e-3, "finetune": "false"}
    critic |= {"pretrained_checkpoint": task / "model", "load": save, "save": save}
    keys = ["megatron_training.stage=ray_ppo", "rl_config.adv_estimator=gae"]
    return [*keys, *(f"critic_config.{name}={value}" for name, value in critic.items())]


def roles_of(task: Path, folder: Path, load: Path | None = None) -> dict[str, list[str]]:
    resumed = [] if load is None else [f"critic_config.load={load / 'critic'}", "+critic_config.load_iteration=1"]
    return {
        "reference": ["rl_config.init_kl_coef=0.1"],
        "reward model": [f"rl_config.reward_model={task / 'reward_model'}", "rl_config.init_kl_coef=0.1"],
        "critic": [*critic_of(task, folder / "critic"), *resumed],
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("role", "dropout"),
    [("reference", DROPOUT), ("critic", DROPOUT), ("reward model", [*LORA, *ACTS])],
    ids=str,
)
def test_a_resumed_run_with_dropout_is_the_uninterrupted_one(task: Path, tmp_path: Path, role: str, dropout: list[str]) -> None:
    keys = [*ONE_PROCESS, *dropout, "megatron_training.train_iters=2"]
    whole, part = tmp_path / "whole", tmp_path / "part"
    undisturbed = finished(task, whole, *keys, *roles_of(task, whole)[role])
    load = [f"actor_config.load={whole / 'save'}", "+actor_config.load_iteration=1"]
    resumed = finished(task, part, *keys, *roles_of(task, part, whole)[role], *load)
    assert steps_of(resumed)[2] == steps_of(undisturbed)[2]
    ours, theirs = (load_file(command.folder / "save/hf/iter_0000002/model.safetensors") for command in (resumed, undisturbed))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.slow
def test_one_run_goes_on_with_another_batch_mode_group_and_data(task: Path, tmp_path: Path) -> None:
    base = [*ONE_PROCESS, "+rl_config.log_completions=true", "+rl_config.log_completions_keep=1000"]
    disaggregated = ["rl_config.use_integrated_worker=false", "rl_config.rollout_resource.num_npus=1"]
    finished(task, tmp_path, *base, "megatron_training.train_iters=2")  # 16 prompts
    larger = ["megatron_training.global_batch_size=16", "rl_config.mini_batch_size=16"]
    finished(task, tmp_path, *base, *larger, "megatron_training.train_iters=4")  # 32 more
    run = finished(
        task, tmp_path, *base, *disaggregated, "rl_config.trainer_mode=async", "megatron_training.train_iters=5"
    )  # 8 more
    assert "actor_config.train_iters 4 -> 5: the learning rate follows the new curve" in run.output
    group = [*base, "rl_config.n_samples_per_prompt=2"]
    run = finished(task, tmp_path, *group, "megatron_training.train_iters=8")  # 24 more: those in flight first
    assert "rl_config.n_samples_per_prompt 4 -> 2, rl_config.trainer_mode" in run.output
    seen = Counter(
        record["prompt"]
        for line in (tmp_path / "run" / "completions.jsonl").read_text().splitlines()
        if (record := json.loads(line))["sample"] == 0
    )
    assert len(seen) == 80 and set(seen.values()) == {1}
    # other data begin with a pass of their own, and say so; LoRA is refused
    lines = (task / "train.jsonl").read_text().splitlines()
    (tmp_path / "other.jsonl").write_text("\n".join(lines[:40]) + "\n")
    other = [*group, f"megatron_training.data_path={tmp_path / 'other.jsonl'}"]
    run = finished(task, tmp_path, *other, "megatron_training.train_iters=9")
    assert 'other.jsonl": these are other data' in run.output
    lora = ["+actor_config.lora_target_modules=[linear_qkv]", "megatron_training.train_iters=10"]
    refused = Command(task, tmp_path, *group, *lora)
    assert refused.wait(120) == 2
    assert 'actor_config.lora_target_modules null -> ["linear_qkv"]; keep the value, or set' in refused.output


@pytest.mark.slow
def test_a_run_resumes_with_another_reward_function_and_every_prompt_trains_once(task: Path, tmp_path: Path) -> None:
    keys = [*ONE_PROCESS, "+rl_config.partial_rollout_max_split=2", "rl_config.guarantee_order=false"]
    keys += ["+rl_config.log_completions=true", "+rl_config.log_completions_keep=1000"]
    finished(task, tmp_path, *keys, "megatron_training.train_iters=2")
    (tmp_path / "plugin.py").write_text("def score(response):\n    return 0.25\n")
    changed = [f"+rl_config.external_plugins=[{tmp_path / 'plugin.py'}]", "rl_config.verifier_function=['plugin:score']"]
    run = finished(task, tmp_path, *keys, *changed, "megatron_training.train_iters=4")
    assert 'rl_config.verifier_function ["exact_match"] -> ["plugin:score"]' in run.output
    assert "responses that were being generated are dropped, and generated anew for the same prompts" in run.output
    records = [json.loads(line) for line in (tmp_path / "run" / "completions.jsonl").read_text().splitlines()]
    seen = Counter(record["prompt"] for record in records if record["sample"] == 0)
    assert len(seen) == 32 and set(seen.values()) == {1}
    scores = {iteration: step["grpo/score/mean"] for iteration, step in steps_of(run).items()}
    assert scores[3] == scores[4] == 0.25 and 0.25 not in (scores[1], scores[2])


@pytest.mark.slow
def test_a_resumable_run_starts_from_what_supervised_tuning_has_saved(task: Path, tmp_path: Path) -> None:
    lessons = [{"instruction": f"{index}=", "input": "", "output": f"{index}"} for index in range(10, 42)]
    (tmp_path / "lessons.jsonl").write_text("".join(json.dumps(lesson) + "\n" for lesson in lessons))
    program = [sys.executable, "-m", "mindspeed_rl.cli.main"]
    files = ["--input", tmp_path / "lessons.jsonl", "--output-prefix", tmp_path / "sft", "--workers", "1"]
    kind = ["--handler-name", "AlpacaStyleInstructionHandler", "--prompt-type", "empty"]
    kind += ["--tokenizer-type", "PretrainedFromHF", "--tokenizer-name-or-path", task / "model"]
    keys = {"load": task / "model", "tokenizer_name_or_path": task / "model", "data_path": tmp_path / "sft", "num_npus": 1}
    keys |= {"save": tmp_path / "tuned", "global_batch_size": 16, "micro_batch_size": 16, "train_iters": 2, "log_interval": 1}
    words = [f"megatron_training.{key}={value}" for key, value in keys.items()] + ["model.tiny_qwen25.num_layers=null"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **shared(TRAINING)}
    for command in (
        [*program, "preprocess", *files, *kind],
        [*program, "train", "--config-name", "sft_tiny_cpu", f"run_dir={tmp_path / 'sft_run'}", *words],
    ):
        ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=patient(400))
        assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    # steps that are too small for float32 leave the weights as they were
    grpo = [*ONE_PROCESS, f"actor_config.pretrained_checkpoint={tmp_path / 'tuned'}", "actor_config.lr=1e-30"]
    grpo += ["actor_config.min_lr=0.0"]
    first = finished(task, tmp_path / "rl", *grpo, "megatron_training.train_iters=1")
    assert f"starts from the weights of {tmp_path / 'tuned'}" in first.output
    second = finished(task, tmp_path / "rl", *grpo, "megatron_training.train_iters=2")
    assert sorted(steps_of(second)) == [1, 2]
    tuned, before = (
        load_file(path) for path in (tmp_path / "tuned/hf/latest/model.safetensors", task / "model/model.safetensors")
    )
    ours = load_file(tmp_path / "rl/save/hf/latest/model.safetensors")
    assert sorted(ours) == sorted(tuned) and all(torch.equal(ours[name], tuned[name]) for name in tuned)
    assert any(not torch.equal(tuned[name], before[name]) for name in before)


@pytest.mark.slow
def test_the_same_command_completes_a_save_that_was_cut_between_two_files(task: Path, tmp_path: Path) -> None:
    keys = [*ONE_PROCESS, "megatron_training.train_iters=2", "+actor_config.keep_last=1", "+critic_config.keep_last=1"]
    keys += critic_of(task, tmp_path / "critic")
    undisturbed = finished(task, tmp_path, *keys)
    save, critic, exported = tmp_path / "save", tmp_path / "critic", tmp_path / "save" / "hf"
    expected, weights = steps_of(undisturbed), load_file(exported / "iter_0000002" / "model.safetensors")
    for folder in (save, critic, exported):
        assert [path.name for path in sorted(folder.glob("iter_*"))] == ["iter_0000002"], folder
    # after the checkpoint, before its Hugging Face folder
    shutil.rmtree(exported / "iter_0000002")
    (exported / "latest").unlink()
    finished(task, tmp_path, *keys)
    assert (exported / "latest").resolve().name == "iter_0000002"
    ours = load_file(exported / "latest" / "model.safetensors")
    assert all(torch.equal(ours[name], weights[name]) for name in weights)
    # after the critic's first checkpoint, before the actor's
    shutil.rmtree(save)
    shutil.rmtree(tmp_path / "run")
    (critic / TRACKER_NAME).write_text("1")
    (critic / "iter_0000002").rename(critic / "iter_0000001")
    again = finished(task, tmp_path, *keys)
    assert steps_of(again) == expected
    ours = load_file(exported / "latest" / "model.safetensors")
    assert all(torch.equal(ours[name], weights[name]) for name in weights)
