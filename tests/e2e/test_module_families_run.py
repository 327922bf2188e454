"""`mindspeed-rl train` of families that Megatron refuses here: GRPO with rollout by transformers' own module, and SFT."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from grpo_command import ONE_PROCESS, Command, finished
from tiny_task import make_other_task
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.slow
FAMILIES = ["gpt-neox", "bloom", "phi3-long", "llama4", "nemotron-h", "deepseek-v4"]
#: the others learn in test_module_rollout.py
_REWARDED = FAMILIES[:4]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Name of a family -> the folder of its task."""
    return cache(lambda name: make_other_task(tmp_path_factory.mktemp(name), name))


def _read(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def _check_that_it_trained(folder: Path, start: Path) -> None:
    """Transformers loads what was saved, and most of its weights have moved."""
    before, after = (dict(_read(path).named_parameters()) for path in (start, folder))
    assert before.keys() == after.keys()
    assert sum(not torch.equal(before[name], after[name]) for name in before) > len(before) / 2
    assert all(value.isfinite().all() for value in after.values())


@pytest.mark.extra
@pytest.mark.parametrize("name", _REWARDED)
def test_a_family_that_only_transformers_computes_makes_two_iterations_of_grpo(
    tasks: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    keys = ["megatron_training.train_iters=2", "megatron_training.engine=fsdp", "rl_config.use_prefix_grouper=false"]
    # a model that gives up for every prompt of a small batch would have no advantage
    keys += ["rl_config.n_samples_per_prompt=8"]
    command = finished(tasks(name), tmp_path, *ONE_PROCESS, *keys)
    assert [record["rollout/weight_version"] for record in command.metrics] == [1, 2]
    # the trainer and the module that generates are the same model with the same weights
    assert max(record["rollout/log_probs_diff_max"] for record in command.metrics) < 1e-4
    assert all(record["actor/grad_norm"] > 0.0 and record["rollout/proven_parameters"] > 10 for record in command.metrics)
    assert "a response at a time: slow" in command.output
    _check_that_it_trained(tmp_path / "save/hf/latest", tasks(name) / "model")


class _Sft(Command):
    config = "sft_tiny_cpu"

    def keys(self, task: Path) -> list[str]:
        columns = "{prompt: prompt, query: '', response: labels, system: ''}"
        values = {
            **{"load": task / "model", "tokenizer_name_or_path": task / "model", "save": self.folder / "save"},
            **{"data_path": task / "train.jsonl", "+prompt_type": "empty", "+map_keys": columns},
            **{"num_npus": 1, "global_batch_size": 80, "micro_batch_size": 16, "train_iters": 2, "log_interval": 1},
            **{"+engine": "fsdp", "lr_warmup_fraction": 0.0, "lr": 1e-3},
        }
        words = (
            (f"+megatron_training.{key[1:]}" if key[0] == "+" else f"megatron_training.{key}", value)
            for key, value in values.items()
        )
        return [
            f"run_dir={self.folder / 'run'}",
            "model.tiny_qwen25.num_layers=null",
            *(f"{key}={value}" for key, value in words),
        ]


@pytest.mark.parametrize(
    "name", [name if name == "bloom" else pytest.param(name, marks=pytest.mark.extra) for name in FAMILIES]
)
def test_a_family_that_only_transformers_computes_is_fine_tuned(
    tasks: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    task = tasks(name)
    command = _Sft(task, tmp_path)
    assert command.wait(400.0) == 0, command.output[-4000:]
    losses = [record["train/loss"] for record in command.metrics]
    # all rows are in the first batch: the mean over the tokens of the answers, after which this template has no end
    model, total, count = _read(task / "model"), 0.0, 0
    for line in (task / "train.jsonl").read_text().splitlines():
        row = json.loads(line)
        ids = torch.tensor([[*map(ord, row["prompt"] + row["labels"])]])
        start = len(row["prompt"])
        with torch.no_grad():
            predicted = model(ids, use_cache=False).logits[0, start - 1 : -1].log_softmax(-1)
        total, count = total - float(predicted.gather(1, ids[0, start:, None]).sum()), count + ids.shape[1] - start
    assert losses[0] == pytest.approx(total / count, rel=1e-4) and losses[1] < losses[0]
    _check_that_it_trained(tmp_path / "save/hf/latest", task / "model")
