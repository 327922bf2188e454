"""Runs with a moving average of the actor's weights: exported by its formula, evaluated, resumed to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from grpo_command import ONE_PROCESS, Command, finished
from safetensors.torch import load_file
from torch import Tensor

pytestmark = pytest.mark.slow
DECAY = 0.75
LAYOUTS = {
    "tensor parallel, swapped": [
        "+actor_config.swap_optimizer=true",
        "generate_config.offload_train_param=true",
        "generate_config.offload_train_optimizer=true",
    ],
    "fsdp": [
        "actor_config.tensor_model_parallel_size=1",
        "+megatron_training.engine=fsdp",
        "rl_config.use_prefix_grouper=false",
    ],
    "adapters": [*ONE_PROCESS, "+actor_config.lora_target_modules=[linear_qkv,linear_fc1]", "+actor_config.lora_r=4"],
}


def keys_of(task: Path) -> list[str]:
    return [
        f"+rl_config.ema_decay={DECAY}",
        f"megatron_training.eval_data_path={task / 'heldout.jsonl'}",
        "megatron_training.train_iters=3",
        "+actor_config.eval_interval=1",
        "+actor_config.eval_num_prompts=16",
    ]


def export(command: Command, name: str, iteration: int) -> dict[str, Tensor]:
    return load_file(command.folder / "save" / name / f"iter_{iteration:07d}" / "model.safetensors")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_average_is_exported_evaluated_and_resumed(layout: str, task: Path, tmp_path: Path) -> None:
    keys = [*keys_of(task), *LAYOUTS[layout]]
    whole = finished(task, tmp_path / "whole", *keys)
    figures = [{name: record[name] for name in record if name.startswith("eval_ema/")} for record in whole.metrics]
    assert all("eval_ema/reward" in step and "eval/reward" in record for step, record in zip(figures, whole.metrics))
    if layout != "adapters":  # whose matrices are averaged one by one, and not their products
        average = {name: weight.double() for name, weight in load_file(task / "model" / "model.safetensors").items()}
        for iteration in (1, 2, 3):
            weights = export(whole, "hf", iteration)
            average = {name: DECAY * old + (1 - DECAY) * weights[name].double() for name, old in average.items()}
            for name, value in export(whole, "hf_ema", iteration).items():
                torch.testing.assert_close(value.double(), average[name], rtol=1e-5, atol=1e-7)
    load = [f"actor_config.load={whole.folder / 'save'}", "+actor_config.load_iteration=2"]
    resumed = finished(task, tmp_path / "part", *keys, *load)
    for name in ("hf", "hf_ema"):
        ours, theirs = export(resumed, name, 3), export(whole, name, 3)
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in theirs)
    assert not all(torch.equal(value, theirs[key]) for key, value in export(whole, "hf", 3).items())
    last = resumed.metrics[-1]
    assert {name: value for name, value in last.items() if name.startswith("eval_ema/")} == figures[-1]


def test_an_evaluation_of_the_exported_average_has_its_figures(task: Path, tmp_path: Path) -> None:
    run = finished(task, tmp_path / "run", *keys_of(task), *ONE_PROCESS)
    average = run.folder / "save" / "hf_ema" / "latest"
    start = [f"actor_config.load={average}", "actor_config.finetune=true", "megatron_training.train_iters=1"]
    again = finished(task, tmp_path / "again", *keys_of(task), *ONE_PROCESS, *start)
    figures = {name.removeprefix("eval_ema/"): value for name, value in run.metrics[-1].items() if name.startswith("eval_ema/")}
    text = (again.folder / "run" / "metrics.jsonl").read_text()
    assert f'"eval/reward": {figures["reward"]}' in text
