"""Files and commands of EasyR1: numbers worked out by hand from the formulas of its trainer."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from mindspeed_rl.config import ConfigError
from mindspeed_rl.importers.command import PROJECTS, main
from mindspeed_rl.importers.importer import import_command
from mindspeed_rl.importers.result import Import, ImportSettings

FILE = {
    "data": {
        "train_files": "rows.jsonl",
        "prompt_key": "question",
        "answer_key": "answer",
        "max_prompt_length": 1024,
        "max_response_length": 3072,
        "rollout_batch_size": 64,
        "format_prompt": None,
    },
    "algorithm": {"adv_estimator": "grpo", "use_kl_loss": True, "kl_penalty": "low_var_kl", "kl_coef": 0.02},
    "worker": {
        "actor": {
            "global_batch_size": 16,
            "max_grad_norm": 0.5,
            "model": {"model_path": "Qwen/Qwen2.5-7B-Instruct"},
            "optim": {"lr": 2.0e-6, "lr_warmup_ratio": 0.05},
        },
        "rollout": {"n": 8, "tensor_parallel_size": 1, "val_override_config": {"temperature": 0.5}},
        "reward": {"reward_function": "./scores.py:both"},
    },
    "trainer": {"max_steps": 40, "n_gpus_per_node": 4, "nnodes": 2, "save_freq": 10, "save_limit": -1, "logger": ["console"]},
}
SCORES = "def both(reward_inputs, weight=0.5):\n    return [{'overall': 1.0} for _ in reward_inputs]\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(FILE))
    (tmp_path / "scores.py").write_text(SCORES)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_import(words: str = "", accepted: frozenset[str] = frozenset(), **variables: str) -> Import:
    command = f"python3 -m verl.trainer.main config=own.yaml {words}"
    return import_command(PROJECTS["easyr1"], command, ImportSettings(variables=variables, accepted=accepted))


def test_code_of_a_model_folder_stays_off_and_the_keys_are_named(folder: Path) -> None:
    option = "worker.actor.model.trust_remote_code"
    run = run_import(f"{option}=true")
    assert "set megatron_training.trust_remote_code (engine: fsdp) and generate_config" in run.same[option]
    assert option in run_import(f"{option}=false").without_effect
    for group in ("megatron_training", "generate_config"):
        assert run.get(f"{group}.trust_remote_code") is None


def test_a_file_has_the_numbers_of_the_trainer(folder: Path) -> None:
    run = run_import()
    assert run.plans is not None
    there, here = run.plans
    # 64 prompts of 8 responses; steps of 16 prompts, so 4 a rollout; the warm-up is int(0.05 * 40) rollouts of 4 steps
    expected = {
        "rollout_prompts": 64, "rollout_completions": 512, "step_samples": 128, "steps_per_rollout": 4, "total_steps": 160,
        "lr_first": 0.0, "lr_10": 2e-6, "lr_last": 2e-6, "lr_warmup_steps": 8, "loss": "grpo", "aggregation": "token",
        "clip_low": 0.2, "clip_high": 0.3, "clip_c": 3.0, "kl_coef": 0.02, "kl_estimator": "low_var_kl", "kl_place": "loss",
        "advantage_scale": "group", "clip_grad": 0.5, "weight_decay": 0.01, "prompt_length": 1024, "response_length": 3072,
        "dp": 8, "infer_tp": 1, "engine": "fsdp", "rewards": ("scores:both",), "data": ("rows.jsonl",),
    }  # fmt: skip
    assert {name: getattr(there, name) for name in expected} == expected
    assert {name: getattr(here, name) for name in expected if not name.startswith("lr_")} == {
        name: value for name, value in expected.items() if not name.startswith("lr_")
    }
    keys = {
        "megatron_training.map_keys.prompt": "question",
        "megatron_training.map_keys.response": "answer",
        "megatron_training.prompt_type": "hf",
        "megatron_training.save": "checkpoints/easy_r1/demo",
        "megatron_training.save_interval": 10,
        "megatron_training.seed": 1,
        "rl_config.long_prompts": "drop_longer",
        "rl_config.adv_epsilon": 1e-6,
        "rl_config.actor_resource.num_npus": 8,
    }
    assert {path: run.get(path) for path in keys} == keys


def test_words_replace_values_of_the_file_and_defaults_are_those_of_the_dataclasses(folder: Path) -> None:
    run = run_import("data.rollout_batch_size=32 algorithm.disable_kl=True worker.rollout.val_override_config='{n: 2}'")
    assert run.plans is not None
    assert (run.plans[0].rollout_prompts, run.plans[0].kl_coef) == (32, 0.0)
    # a file of its own is a command, too
    assert import_command(PROJECTS["easyr1"], "own.yaml", ImportSettings()).get("rl_config.mini_batch_size") == 16


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("worker.actor.loss_type=gspo_token", {"level": "sequence_token", "aggregation": "token", "clip_c": 3.0}),
        ("worker.actor.loss_type=cispo worker.actor.clip_ratio_low=0 worker.actor.clip_ratio_high=4",
         {"loss": "cispo", "clip_low": 0.0, "clip_high": 4.0, "clip_c": None}),
        ("algorithm.adv_estimator=reinforce_plus_plus algorithm.use_kl_loss=false algorithm.kl_penalty=kl",
         {"advantage": "reinforce_plus_plus", "kl_place": "reward", "kl_estimator": "kl", "gamma": 1.0}),
        ("algorithm.adv_estimator=rloo", {"advantage": "rloo"}),
        ("worker.actor.optim.lr_scheduler_type=cosine worker.actor.optim.min_lr_ratio=0.1", {"lr_warmup_steps": 8}),
        ("worker.actor.ulysses_size=2", {"cp": 2, "dp": 4}),
    ],
)  # fmt: skip
def test_objectives_and_layouts(folder: Path, words: str, expected: dict[str, object]) -> None:
    run = run_import(words)
    assert run.plans is not None
    for plan in run.plans:
        assert {name: getattr(plan, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("words", "number"),
    [
        # means of sequences, which micro-batches weigh by their tokens
        ("worker.actor.loss_avg_mode=seq", "aggregation"),
        ("worker.actor.loss_type=sapo algorithm.disable_kl=true", "aggregation"),
        ("worker.actor.fsdp.torch_dtype=bf16", "weights"),
        ("worker.actor.optim.strategy=adamw_bf16", "weights"),
    ],
)
def test_what_differs_is_accepted_by_name(folder: Path, words: str, number: str) -> None:
    with pytest.raises(ConfigError, match=f"--accept {number} takes the difference"):
        run_import(words)
    assert run_import(words, frozenset((number,))).plans is not None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("algorithm.online_filtering=true", "bounds of their mean score"),
        ("data.filter_overlong_prompts=false", "of which the first tokens are kept"),
        ("worker.reward.reward_function_kwargs.weight=0.1", "arguments of the reward function"),
        ("worker.reward.reward_function=./scores.py:absent", "has no function absent"),
        ("algorithm.kl_type=adaptive", "the coefficient stays"),
        ("algorithm.adv_estimator=opo", "available are gae, grpo"),
        ("worker.actor.loss_type=cispo worker.actor.loss_avg_mode=seq", "not available here for cispo; token is"),
        ("worker.actor.global_batch_size=48", "must be a multiple of worker.actor.global_batch_size"),
        ("worker.rollout.n=1", "compares the responses of a prompt"),
        ("data.override_chat_template=chat.jinja", "another chat template"),
        ("data.format_prompt=math.jinja", "write them, and say --set PROMPTS=FILE"),
        ("data.train_files=a/b@hard", "its rows with the split hard"),
        ("worker.actor.optim.lr_scheduler_type=linear", "constant and cosine are"),
        ("worker.actor.no_such_key=1", "no option of EasyR1"),
        ("trainer.load_checkpoint_path=/x", "continues from a checkpoint of EasyR1"),
    ],
)
def test_what_is_not_available_is_named(folder: Path, words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run_import(words)


def test_a_file_that_is_not_here_is_asked_for(folder: Path) -> None:
    with pytest.raises(ConfigError, match="the file absent.yaml is not here"):
        import_command(PROJECTS["easyr1"], "python3 -m verl.trainer.main config=absent.yaml", ImportSettings())


def test_prompts_with_the_text_of_a_template_are_a_file_of_the_user(folder: Path) -> None:
    run = run_import("data.format_prompt=math.jinja", PROMPTS="/data/rendered.jsonl")
    assert run.get("megatron_training.data_path") == "/data/rendered.jsonl"


def test_a_reward_function_in_another_form_is_named(folder: Path) -> None:
    (folder / "scores.py").write_text("def both(answers):\n    return answers\n")
    with pytest.raises(ConfigError, match="the first parameter of both is answers.*call it reward_input or reward_inputs"):
        run_import()


def test_the_command_line_writes_a_run_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-o", "run.yaml", "easyr1", "own.yaml"]) == 0
    assert "the default of EasyR1" in capsys.readouterr().out
    assert yaml.safe_load((folder / "run.yaml").read_text())["rl_config"]["verifier_function"] == ["scores:both"]
