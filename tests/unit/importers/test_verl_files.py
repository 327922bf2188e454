"""Configuration files of verl: what Hydra would compose is what the run file has, and a file that is not here is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from mindspeed_rl.config import ConfigError
from mindspeed_rl.importers.importer import import_command
from mindspeed_rl.importers.result import Import, ImportSettings
from mindspeed_rl.importers.verl import PROJECT
from mindspeed_rl.rewards import REWARDS

REQUIRED = (
    "algorithm.adv_estimator=grpo data.train_files=/data/gsm8k/train.parquet actor_rollout_ref.model.path=models/base "
    "actor_rollout_ref.rollout.n=8 data.train_batch_size=64 actor_rollout_ref.actor.ppo_mini_batch_size=16"
)
MAIN = "python3 -m verl.trainer.main_ppo"
OWN = """
hydra:
  searchpath:
    - file://verl/trainer/config
defaults:
  - ppo_trainer
  - _self_
data:
  max_prompt_length: 1024
  max_response_length: 1e3
actor_rollout_ref:
  hybrid_engine: True
  rollout:
    name: sglang
    multi_turn:
      enable: True
      max_assistant_turns: 5
      tool_config_path: tools.yaml
"""


def write(folder: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def imported(text: str, folder: Path | None = None, variables: Mapping[str, str] | None = None) -> Import:
    return import_command(PROJECT, text, ImportSettings(rewards=REWARDS, folder=folder, variables=variables or {}))


def refusal(text: str, folder: Path | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        imported(text, folder)
    return "\n".join(caught.value.errors)


def values(run: Import, *names: str) -> list[object]:
    return [run.get(f"rl_config.{name}") for name in names]


@pytest.mark.parametrize(
    "words",
    [
        "--config-path=ROOT/own --config-name=own",
        "--config-path ROOT/own --config-name 'own.yaml'",
        "-cp ROOT/own -cn own",
        "--config-dir=ROOT/own --config-name=own",
    ],
)
def test_a_file_of_the_users_own_is_read_and_the_words_win(tmp_path: Path, words: str) -> None:
    write(tmp_path / "own", {"own.yaml": OWN})
    run = imported(f"{MAIN} {words.replace('ROOT', str(tmp_path))} {REQUIRED} data.max_prompt_length=512")
    assert values(run, "multi_turn_enable", "max_turns", "tool_config_path", "max_prompt_length") == [
        True,
        5,
        "tools.yaml",
        512,
    ]
    assert run.get("generate_config.sampling_config.max_tokens") == 1000


def test_relative_paths_start_from_the_folders_above_the_script_as_from_its_working_directory(tmp_path: Path) -> None:
    write(tmp_path / "examples" / "multi", {"config/own.yaml": OWN})
    lines = ['PROJECT_DIR="$(pwd)"', 'CONFIG="$PROJECT_DIR/examples/multi/config"']
    script = "\n".join([*lines, f'{MAIN} --config-path="$CONFIG" --config-name=own {REQUIRED}'])
    run = imported(script, tmp_path / "examples" / "multi", {"PWD": str(tmp_path)})
    assert values(run, "max_turns") == [5]
    relative = f"{MAIN} --config-path=examples/multi/config --config-name=own {REQUIRED}"
    assert values(imported(relative, tmp_path / "examples" / "multi"), "max_turns") == [5]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--config-path=/nowhere/config --config-name=own", "own.yaml in /nowhere/config"),
        ("--config-name=own", "own.yaml in verl's own folder"),
        ("--config-path=/nowhere/mine --config-name=ppo_trainer", "ppo_trainer.yaml in /nowhere/mine"),
    ],
)
def test_a_file_that_is_not_here_is_asked_for(words: str, named: str) -> None:
    assert named in refusal(f"{MAIN} {words} {REQUIRED}")


def test_the_releases_own_files_need_no_copy_and_choose_the_engine() -> None:
    run = imported(
        f"{MAIN} --config-path=config --config-name='ppo_megatron_trainer.yaml' {REQUIRED} "
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2"
    )
    assert run.get("megatron_training.tensor_model_parallel_size") == 2


def test_defaults_lists_are_followed_through_the_users_files_in_order(tmp_path: Path) -> None:
    actor = "actor_rollout_ref:\n  actor:\n"
    files = {
        "own.yaml": f"defaults:\n  - base\n  - lengths@data: short\n  - _self_\n{actor}    clip_ratio_high: 0.3\n",
        "base.yaml": f"defaults: [ppo_megatron_trainer]\n{actor}    clip_ratio_high: 0.28\n    clip_ratio_low: 0.1\n",
        "lengths/short.yaml": "max_prompt_length: 128\nmax_response_length: 256\n",
    }
    write(tmp_path, files)
    run = imported(f"{MAIN} --config-path={tmp_path} --config-name=own {REQUIRED}")
    assert values(run, "clip_ratio_low", "clip_ratio_high", "max_prompt_length") == [0.1, 0.3, 128]
    assert "Megatron" in run.same["model_engine"] and run.same["model_engine"].startswith("megatron")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("defaults: [ppo_trainer, elsewhere, _self_]\n", "elsewhere.yaml is not here"),
        ("defaults: [ppo_trainer, {reward: mine}, _self_]\n", "reward/mine.yaml is not here"),
        ("defaults: [_self_, ppo_trainer]\ndata: {max_prompt_length: 9}\n", "put _self_ last"),
        ("- a\n- b\n", "must hold names and values"),
        ("data: {max_prompt_length: '${data.max_prompt_length}'}\n", "refer to each other"),
        ("data: {train_batch_size: '${oc.decode:x}'}\n", "only names of other options"),
    ],
)
def test_what_a_file_refers_to_and_is_not_here_is_named(tmp_path: Path, text: str, named: str) -> None:
    write(tmp_path, {"own.yaml": text})
    command = f"{MAIN} --config-path={tmp_path} --config-name=own {REQUIRED.replace('data.train_batch_size=64 ', '')}"
    assert named in refusal(command)


def test_references_of_a_file_have_the_values_of_the_command(tmp_path: Path) -> None:
    text = """
defaults: [ppo_trainer, _self_]
data: {train_batch_size: 32, gen_batch_size: "${data.train_batch_size}", max_response_length: "${oc.env:LENGTH,300}"}
actor_rollout_ref:
  actor: {ppo_mini_batch_size: "${oc.select:my.size,16}"}
  rollout: {n: 4, max_model_len: "${.max_len}", max_len: 2048}
trainer: {experiment_name: "run_${data.train_batch_size}"}
"""
    write(
        tmp_path,
        {"own.yaml": text.replace(", max_len: 2048", "").replace('"${.max_len}"', '"${.max_num_seqs}", max_num_seqs: 2048')},
    )
    required = "algorithm.adv_estimator=grpo data.train_files=/data/gsm8k/train.parquet actor_rollout_ref.model.path=m"
    run = imported(f"{MAIN} --config-path={tmp_path} --config-name=own {required} data.train_batch_size=64")
    assert values(run, "mini_batch_size", "n_samples_per_prompt", "wandb_exp_name") == [16, 4, "run_64"]
    assert run.get("megatron_training.global_batch_size") == 64
    assert [run.get(f"generate_config.{name}") for name in ("max_model_len", "sampling_config.max_tokens")] == [2048, 300]


def test_a_file_alone_is_a_run(tmp_path: Path) -> None:
    own = OWN.replace("data:", "algorithm: {adv_estimator: grpo}\ndata:\n  train_files: /data/gsm8k/train.parquet", 1)
    write(tmp_path, {"own.yaml": own.replace("  rollout:", "  model: {path: models/base}\n  rollout:\n    n: 4", 1)})
    assert values(imported(str(tmp_path / "own.yaml")), "max_turns", "n_samples_per_prompt") == [5, 4]
    assert "nowhere.yaml" in refusal(str(tmp_path / "nowhere.yaml"))


def test_mappings_of_the_command_line_are_the_options_in_them() -> None:
    run = imported(f"{MAIN} {REQUIRED} 'actor_rollout_ref.actor={{clip_ratio_high:0.28,use_kl_loss:True,kl_loss_coef:0.005}}'")
    assert values(run, "clip_ratio_high", "init_kl_coef") == [0.28, 0.005]


@pytest.mark.parametrize(
    ("word", "named"),
    [
        ("~algorithm.gamma", "takes away"),
        ("data.return_raw_chat", "not a key such as"),
        ("reward@reward=mine", "reward/mine.yaml is not here"),
        ("--multirun", "several runs"),
        ("--info", "no option of Hydra"),
    ],
)
def test_a_word_that_changes_the_configuration_is_never_skipped(word: str, named: str) -> None:
    assert named in refusal(f"{MAIN} {REQUIRED} {word}")


def test_a_word_takes_an_option_of_a_file_away(tmp_path: Path) -> None:
    write(tmp_path, {"own.yaml": OWN})
    run = imported(f"{MAIN} --config-path={tmp_path} --config-name=own {REQUIRED} ~actor_rollout_ref.rollout.multi_turn")
    assert values(run, "multi_turn_enable", "max_turns") == [None, None]
