"""The script that imports a checkout: what it counts, and the numbers that it compares with verl's own composition."""

from __future__ import annotations

from pathlib import Path

import importing
import pytest

VERL = (
    "python3 -m verl.trainer.main_ppo data.train_files=/d/gsm8k.parquet data.train_batch_size=8 "
    "algorithm.adv_estimator=grpo actor_rollout_ref.model.path=$MODEL actor_rollout_ref.actor.ppo_mini_batch_size=8 "
    "actor_rollout_ref.rollout.n=4 trainer.n_gpus_per_node=8 trainer.total_training_steps=4"
)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "valid.sh").write_text(f"{VERL}\n")
    (tmp_path / "refused.sh").write_text(f"{VERL} algorithm.adv_estimator=own\n")
    (tmp_path / "none.sh").write_text("pip install verl\n")
    return tmp_path


def test_a_checkout_is_counted_by_what_becomes_of_its_scripts(checkout: Path) -> None:
    outcomes = importing.judge_all("verl", checkout, 8)
    assert {outcome.path.name: outcome.kind for outcome in outcomes} == {
        "valid.sh": "valid", "refused.sh": "refused", "none.sh": "no command",
    }  # fmt: skip
    first, *rest = importing.describe(outcomes, each=True).splitlines()
    assert first == "3 files, 2 with a command: 1 valid (50%), of which 0 but for named numbers, 1 refused"
    assert any(line.startswith("      1 |     1 | algorithm.adv_estimator=own") for line in rest)
    assert "0 numbers differ without a word" in rest


def test_a_number_of_another_composition_is_named(checkout: Path) -> None:
    config = checkout / "verl" / "trainer" / "config"
    config.mkdir(parents=True)
    (config / "ppo_trainer.yaml").write_text(
        """
data: {train_files: null, train_batch_size: 1024, max_prompt_length: 512, max_response_length: 640}
algorithm: {adv_estimator: gae, use_kl_in_reward: false}
trainer: {n_gpus_per_node: 8, total_training_steps: null}
actor_rollout_ref:
  model: {path: null, lora_rank: 0}
  actor: {strategy: fsdp, ppo_mini_batch_size: 256, clip_ratio_low: 0.2, clip_ratio_high: 0.2, use_kl_loss: false,
    entropy_coeff: 0, policy_loss: {loss_mode: vanilla}, optim: {lr: 1.0e-6, weight_decay: 0.01, lr_scheduler_type: constant}}
  rollout: {n: 1, temperature: 1.0, top_p: 1, top_k: -1, tensor_model_parallel_size: 2}
"""
    )
    (found,) = [outcome for outcome in importing.judge_all("verl", checkout, 8) if outcome.kind == "valid"]
    assert found.different == ["response_length is 512 here, 640 in the composed configuration"]


#: dataclasses of EasyR1's form with the numbers that are compared
EASYR1 = """
@dataclass
class Lora:
    rank: int = 0
@dataclass
class Model:
    model_path: str = None
    lora: Lora = field(default_factory=Lora)
@dataclass
class Optim:
    lr: float = 1e-6
    weight_decay: float = 1e-2
    lr_scheduler_type: str = "constant"
    steps: int = field(default=-1, init=False)
@dataclass
class Actor:
    global_batch_size: int = 256
    ppo_epochs: int = 1
    ulysses_size: int = 1
    max_grad_norm: float = 1.0
    loss_type: str = "default"
    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.35
    clip_ratio_dual: float = 3.0
    model: Model = field(default_factory=Model)
    optim: Optim = field(default_factory=Optim)
@dataclass
class Rollout:
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    tensor_parallel_size: int = 2
    extra: dict = field(default_factory=dict)
@dataclass
class Worker:
    actor: Actor = field(default_factory=Actor)
    rollout: Rollout = field(default_factory=Rollout)
@dataclass
class Data:
    max_prompt_length: int = 512
    max_response_length: int = 512
    rollout_batch_size: int = 512
@dataclass
class Algorithm:
    disable_kl: bool = False
    use_kl_loss: bool = False
    kl_penalty: str = "kl"
    kl_coef: float = 1e-3
@dataclass
class Trainer:
    nnodes: int = 1
    n_gpus_per_node: int = 8
@dataclass
class PPOConfig:
    data: Data = field(default_factory=Data)
    worker: Worker = field(default_factory=Worker)
    algorithm: Algorithm = field(default_factory=Algorithm)
    trainer: Trainer = field(default_factory=Trainer)
"""


def test_numbers_of_easyr1_are_those_of_its_dataclasses_under_file_and_words(tmp_path: Path) -> None:
    (tmp_path / "verl" / "trainer").mkdir(parents=True)
    (tmp_path / "verl" / "trainer" / "config.py").write_text(EASYR1)
    (tmp_path / "own.yaml").write_text(
        "data: {train_files: rows.jsonl}\nworker: {actor: {model: {model_path: Qwen/Qwen2.5-7B}}, rollout: {n: 4}, "
        "reward: {reward_function: scores.py:own}}\ntrainer: {max_steps: 3}\n"
    )
    (tmp_path / "run.sh").write_text("python3 -m verl.trainer.main config=own.yaml data.rollout_batch_size=256\n")
    (outcome,) = importing.judge_all("easyr1", tmp_path, 8)
    # a release with another bound than the one that the importer knows
    assert (outcome.kind, outcome.different) == ("valid", ["clip_high is 0.3 here, 0.35 in the composed configuration"])


#: classes of AReaL's form with the numbers that are compared
AREAL = """
@dataclass
class Optimizer:
    lr: float = field(default=1e-3, metadata={})
@dataclass
class OptimizerConfig(Optimizer):
    lr_scheduler_type: str = "constant"
    weight_decay: float = field(default=0.02)
    gradient_clipping: float = field(default=1.0)
@dataclass
class Engine:
    optimizer: OptimizerConfig | None = field(default=None)
    use_lora: bool = field(default=False)
    lora_rank: int = field(default=32)
@dataclass
class DPOConfig:
    names: ClassVar[set] = {"a"}
    actor: Engine = field(default_factory=Engine)
"""


def test_numbers_of_areal_are_those_of_its_dataclasses_under_the_file(tmp_path: Path) -> None:
    (tmp_path / "areal" / "api").mkdir(parents=True)
    (tmp_path / "areal" / "api" / "cli_args.py").write_text(AREAL)
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "own.yaml").write_text(
        "actor: {backend: 'megatron:d8', path: Qwen/Qwen3-8B, optimizer: {lr: 1e-6}}\n"
        "train_dataset: {batch_size: 64, type: dpo, path: own/pairs, max_length: 512}\n"
    )
    (tmp_path / "examples" / "train.py").write_text("with DPOTrainer(config) as trainer:\n    trainer.train()\n")
    (outcome,) = importing.judge_all("areal", tmp_path, 8)
    # a release with another default than the one that the importer knows
    assert (outcome.kind, outcome.different) == ("valid", ["weight_decay is 0.01 here, 0.02 in the composed configuration"])
