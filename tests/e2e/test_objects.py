"""Trainers that take objects learn as the commands do with the same run file, and evaluate, generate and save."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import transformers
from shared_forks import shared

from mindspeed_rl import (
    DistillationConfig,
    DistillationTrainer,
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    PPOConfig,
    PPOTrainer,
    Run,
    SFTConfig,
    SFTTrainer,
    TrainerCallback,
    train,
)
from mindspeed_rl.cli.new.tiny_model import save_tiny_model
from mindspeed_rl.observability.completions import Completion
from mindspeed_rl.runtime.fork_server import RL, TRAINING

pytestmark = pytest.mark.slow
PROMPTS = [{"prompt": f"Say {word}.\n", "answer": str(number)} for number, word in enumerate("one two three four".split() * 8)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_tiny_model(folder)
    return folder


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"OMP_NUM_THREADS": "1", **shared(RL, TRAINING)}.items():
        monkeypatch.setenv(name, value)


class Watch(TrainerCallback):
    """Keep what a run shows, and end it at a reward."""

    def __init__(self, enough: float = math.inf) -> None:
        self.enough, self.rewards, self.samples = enough, list[float](), list[Sequence[Completion]]()

    def on_samples(self, args: Any, state: Any, control: Any, *, samples: Sequence[Completion], **further: Any) -> None:
        self.samples.append(samples)

    def on_log(self, args: Any, state: Any, control: Any, *, logs: Mapping[str, float], **further: Any) -> None:
        if state.global_step:
            self.rewards.append(logs["rewards/total_mean"])
            control.should_training_stop = logs["rewards/total_mean"] >= self.enough


def test_grpo_learns_a_closure_and_does_all_that_a_trainer_does(model: Path, tmp_path: Path) -> None:
    letters = set("aeiou")

    def vowels(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
        assert {*answer} <= {str(number) for number in range(32)}
        return [sum(character in letters for character in text) / max(len(text), 8) for text in completions]

    watch = Watch(enough=0.5)
    args = GRPOConfig(
        output_dir=str(tmp_path / "out"),
        learning_rate=2e-3,
        max_steps=40,
        per_device_train_batch_size=128,
        max_completion_length=8,
        gradient_checkpointing=False,
        bf16=False,
        eval_steps=20,
    )
    trainer = GRPOTrainer(model, vowels, args, train_dataset=PROMPTS[:24], eval_dataset=PROMPTS[24:], callbacks=[watch])
    assert trainer.explain(shows=False)["errors"] == []
    before = trainer.evaluate()["eval/reward"]
    result = trainer.train()
    assert watch.rewards[0] < 0.25 and watch.rewards[-1] >= 0.5 and result.ended_early
    assert [line["rewards/total_mean"] for line in result.metrics] == watch.rewards
    assert trainer.state.log_history[0]["iteration"] == 0 and trainer.state.log_history[0]["eval/reward"] == before
    # samples are what was scored
    for sample in watch.samples[-1]:
        text = sample.response.replace("<eos>", "").replace("<pad>", "").replace("<unk>", "")
        assert sample.reward == pytest.approx(sum(character in letters for character in text) / max(len(text), 8))
    after = trainer.evaluate()["eval/reward"]
    assert after > before + 0.2
    assert (result.folder / "report.html").is_file() and (result.folder / "report.png").is_file()
    # greedy responses of the engine equal transformers'
    (answers,) = trainer.generate("Say one.\n", max_new_tokens=8)
    folder = trainer.save_model(tmp_path / "saved")
    trained = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)  # the automatic one drops blanks
    ids = tokenizer("Say one.\n", return_tensors="pt").input_ids
    tokens = trained.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.size(1) :]
    assert answers == [tokenizer.decode(tokens, skip_special_tokens=True)]
    sampled = trainer.generate(["Say one.\n", "Say two.\n"], max_new_tokens=2, num_return_sequences=3, temperature=1.0)
    assert [len(texts) for texts in sampled] == [3, 3]


def test_the_run_file_of_a_trainer_trains_the_same(model: Path, tmp_path: Path) -> None:
    def short(response: str) -> float:
        return 1.0 / (1 + len(response))

    args = GRPOConfig(
        output_dir=str(tmp_path / "out"), learning_rate=1e-3, max_steps=3, num_generations=4, bf16=False,
        per_device_train_batch_size=64, max_completion_length=6, save_steps=2,
    )  # fmt: skip
    trainer = GRPOTrainer(model, [short, "length"], args, train_dataset=PROMPTS)
    first = trainer.train()
    other = {"run_dir": str(tmp_path / "again"), "actor_config.save": str(tmp_path / "save")}
    second = train(Run.load(trainer.run_file, other | {"actor_config.load": str(tmp_path / "save")}))

    def figures(metrics: list[dict[str, float]]) -> list[float]:
        return [line[name] for line in metrics for name in ("rewards/total_mean", "short_rewards/mean", "actor/grad_norm")]

    assert figures(second.metrics) == figures(first.metrics) and len(first.metrics) == 3
    # a trainer of the same folder goes on from its checkpoint
    longer = GRPOConfig(**{**vars(args), "max_steps": 5})
    resumed = GRPOTrainer(model, [short, "length"], longer, train_dataset=PROMPTS).train(resume_from_checkpoint=True)
    assert [line["iteration"] for line in resumed.metrics] == [1, 2, 3, 4, 5]


def test_supervised_and_preference_training_learn_from_rows(model: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"{letter}\n", "completion": letter.upper() * 3} for letter in "abcdefgh"] * 8
    args = SFTConfig(
        output_dir=str(tmp_path / "sft"), learning_rate=3e-3, max_steps=60, per_device_train_batch_size=32, max_length=32,
        bf16=False, lr_scheduler_type="constant", logging_steps=20,
    )  # fmt: skip
    trainer = SFTTrainer(model, args, train_dataset=rows, eval_dataset=rows[:8])
    result = trainer.train()
    assert result.model is not None and trainer.evaluate()["eval/loss"] < 0.1
    assert trainer.generate(["a\n", "d\n"], max_new_tokens=6) == [["AAA"], ["DDD"]]
    pairs = [{"prompt": f"{letter}\n", "chosen": letter.upper(), "rejected": letter} for letter in "abcdefgh"] * 8
    settings = DPOConfig(
        output_dir=str(tmp_path / "dpo"), learning_rate=1e-3, max_steps=12, per_device_train_batch_size=32, max_length=32,
        bf16=False, logging_steps=1,
    )  # fmt: skip
    preferred = DPOTrainer(result.model, settings, train_dataset=pairs).train()
    first, last = preferred.metrics[0], preferred.metrics[-1]  # no pair is decided before the first step
    assert first["train/rewards/margins"] == pytest.approx(0.0, abs=1e-4) and "train/rewards/accuracies" not in first
    assert last["train/rewards/margins"] > 0.3 and last["train/rewards/accuracies"] == 1.0


def test_ppo_and_distillation_train(model: Path, tmp_path: Path) -> None:
    def vowels(completion: str) -> float:
        return sum(character in "aeiou" for character in completion) / max(len(completion), 8)

    numbers: dict[str, Any] = {"learning_rate": 1e-3, "max_steps": 3, "per_device_train_batch_size": 64, "bf16": False}
    numbers |= {"max_completion_length": 6}
    args = PPOConfig(output_dir=str(tmp_path / "ppo"), beta=0.01, **numbers)
    result = PPOTrainer(model, vowels, args, train_dataset=PROMPTS).train()
    assert len(result.metrics) == 3 and all("critic/vf_loss" in line for line in result.metrics)
    teacher = tmp_path / "teacher"
    save_tiny_model(teacher, seed=11, spread=0.3)
    settings = DistillationConfig(output_dir=str(tmp_path / "distilled"), **(numbers | {"max_steps": 8}))
    trainer = DistillationTrainer(model, teacher, settings, train_dataset=PROMPTS)
    divergence = [line["distillation/divergence"] for line in trainer.train().metrics]
    assert divergence[-1] < 0.9 * divergence[0]
    lines = (tmp_path / "distilled/completions.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(lines[0])["prompt"].startswith("Say ")
