"""A key or value by the name it has in another project is answered with what says it here."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from mindspeed_rl.cli.explain import main as explain
from mindspeed_rl.cli.train import main as train
from mindspeed_rl.config import ConfigError, build_run_config
from mindspeed_rl.config.compat import NO_EQUIVALENT, VALUES_ELSEWHERE
from mindspeed_rl.config.errors import unknown_value
from mindspeed_rl.config.keys import GROUPS, ROLE_GROUPS, collect_names
from mindspeed_rl.config.keys.schema import list_keys
from mindspeed_rl.run.explain.key_reference import _TOP, _list_entries

PATHS = {entry.path for entry in _list_entries()}
RENAMED = collect_names().elsewhere


def sentence_for(path: str, value: object = 1) -> str:
    tree: dict = {"megatron_training": {}}
    *groups, name = path.split(".")
    holder = tree
    for group in groups:
        holder = holder.setdefault(group, {})
    holder[name] = value
    with pytest.raises(ConfigError) as caught:
        build_run_config(tree)
    (error,) = caught.value.errors
    return error


def test_every_entry_names_keys_that_exist() -> None:
    for name, path in RENAMED.items():
        group, _, key = path.rpartition(".")
        shared = f"megatron_training.{key}" if group in ROLE_GROUPS else path
        assert shared in PATHS or path in _TOP, name
    written = re.compile(rf"\b(?:{'|'.join(GROUPS)})\.[a-z_0-9]+\b")
    for name, text in NO_EQUIVALENT.items():
        assert {path for path in written.findall(text) if path not in GROUPS} <= PATHS, name


def test_no_entry_hides_a_key_of_ours() -> None:
    ours = {name for schema in GROUPS.values() for name in list_keys(schema)}
    assert {name for name in (*RENAMED, *NO_EQUIVALENT) if name in ours} == set()
    assert set(RENAMED) & set(NO_EQUIVALENT) == set()


@pytest.mark.parametrize("key", [key for key in VALUES_ELSEWHERE if key not in ("platform", "lora_target_modules")])
def test_every_value_here_is_an_allowed_one(key: str) -> None:
    (kind,) = [entry.kind for entry in _list_entries() if entry.path.endswith(f".{key}") and "profiler" not in entry.path]
    allowed = set(re.findall(r"`([^`]+)`", kind))
    assert set(VALUES_ELSEWHERE[key].values()) <= allowed and not set(VALUES_ELSEWHERE[key]) & allowed


@pytest.mark.parametrize(
    ("written", "here"),
    [
        ("megatron_training.max_steps", "megatron_training.train_iters"),
        ("rl_config.max_steps", "megatron_training.train_iters"),
        ("actor_config.learning_rate", "actor_config.lr"),
        ("rl_config.learning_rate", "megatron_training.lr"),
        ("rl_config.per_device_train_batch_size", "megatron_training.micro_batch_size"),
        ("rl_config.epsilon", "rl_config.clip_ratio"),
        ("rl_config.epsilon_high", "rl_config.clip_ratio_high"),
        ("rl_config.kl_loss_coef", "rl_config.init_kl_coef"),
        ("rl_config.ppo_mini_batch_size", "rl_config.mini_batch_size"),
        ("rl_config.max_response_length", "generate_config.sampling_config.max_tokens"),
        ("generate_config.max_prompt_length", "rl_config.max_prompt_length"),
        ("generate_config.vllm_gpu_memory_utilization", "generate_config.gpu_memory_utilization"),
        ("generate_config.vllm-tensor-parallel-size", "generate_config.infer_tensor_parallel_size"),
        ("generate_config.num_generations", "rl_config.num_generations"),
        ("rl_config.lr", "megatron_training.lr"),
        ("rl_config.temperature", "generate_config.sampling_config.temperature"),
        ("generate_config.temperature", "generate_config.sampling_config.temperature"),
        ("max_steps", "megatron_training.train_iters"),
        ("rl_config.clip_ration", "rl_config.clip_ratio"),
    ],
)
def test_a_key_is_answered_with_its_name_here(written: str, here: str) -> None:
    assert f"the nearest known key is {here} (see docs/keys.md#" in sentence_for(written)


def test_a_group_of_verl_is_answered_key_by_key() -> None:
    rollout = {"n": 8, "name": "vllm", "tensor_model_parallel_size": 2}
    error = sentence_for("actor_rollout_ref", {"rollout": rollout, "actor": {"optim": {"lr": 1e-6}}})
    for part in (
        "actor_rollout_ref.rollout.n is rl_config.n_samples_per_prompt here (see docs/keys.md#rl_config.n_samples_per_prompt)",
        "actor_rollout_ref.rollout.name: generate_config.engine chooses the rollout engine, vllm or transformers",
        "actor_rollout_ref.rollout.tensor_model_parallel_size is generate_config.infer_tensor_parallel_size here",
        "actor_rollout_ref.actor.optim.lr is megatron_training.lr here",
    ):
        assert part in error
    assert "rl_config.rollout.n is rl_config.n_samples_per_prompt here" in sentence_for("rl_config.rollout", {"n": 8})


def test_a_key_without_a_counterpart_says_why() -> None:
    error = sentence_for("megatron_training.gradient_accumulation_steps")
    assert "is not a known key: it follows from rl_config.mini_batch_size" in error
    assert "see docs/keys.md#generate_config" in sentence_for("generate_config.qqqqq")


@pytest.mark.parametrize(
    ("key", "value", "here"),
    [
        ("rl_config.adv_estimator", "grpo", "group_norm"),
        ("megatron_training.lr_decay_style", "cosine_with_min_lr", "cosine"),
        ("generate_config.dtype", "bf16", "bfloat16"),
        ("platform", "gpu", "cuda"),
        ("rl_config.scale_rewards", True, "group"),
    ],
)
def test_a_value_is_answered_with_its_name_here(key: str, value: object, here: str) -> None:
    assert sentence_for(key, value).endswith(f"did you mean {here!r}?")


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("fp8", "only on processors with AMX, and vllm-ascend on devices after A2 and A3; set int8"),
        ("FP8_E4M3", "processors with AMX"),
        ("ascend", "what vllm-ascend names int8 with; set int8"),
    ],
)
def test_a_format_of_the_engine_that_is_not_available_is_answered_with_the_reason_and_the_one_that_is(value, reason) -> None:
    sentence = sentence_for("generate_config.quantization", value)
    assert sentence.startswith(f"generate_config.quantization is {value!r}, which is not available: ") and reason in sentence


def test_a_value_of_no_project_is_answered_by_spelling() -> None:
    assert unknown_value("rl_config.adv_estimator", "grop_norm", ["group_norm", "gae"]).endswith("did you mean 'group_norm'?")


@pytest.mark.parametrize(
    ("key", "written", "here"),
    [
        ("loss_type", "DAPO", "did you mean 'dapo'?"),
        ("loss_type", "Dr.GRPO", "did you mean 'dr_grpo'?"),
        ("loss_type", "rloo", "write rl_config.adv_estimator: rloo"),
        ("adv_estimator", "DAPO", "write megatron_training.stage: ray_dapo"),
        ("adv_estimator", "gspo", "write rl_config.loss_type: gspo"),
        ("stage", "gspo", "write rl_config.loss_type: gspo"),
        ("stage", "REINFORCE++", "write rl_config.adv_estimator: reinforce_plus_plus"),
        ("trainer_mode", "ASYNC", "did you mean 'async'?"),
    ],
)
def test_the_name_of_an_algorithm_is_answered_with_the_key_that_selects_it(key: str, written: str, here: str) -> None:
    sentence = sentence_for(f"{'megatron_training' if key == 'stage' else 'rl_config'}.{key}", written)
    assert sentence.endswith(here), sentence


def test_a_key_of_several_groups_is_answered_by_the_one_that_trains() -> None:
    for written in ("stage", "rl_config.stage"):
        assert "the nearest known key is megatron_training.stage" in sentence_for(written, "ray_dapo")


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["--config-name", "x", "--lr", "1e-5"], "written without dashes: megatron_training.lr=VALUE"),
        (["--config-name", "x", "--rl_config.clip-ratio=0.1"], "written without dashes: rl_config.clip_ratio=0.1"),
        (["grpo_tiny_cpu"], "did you mean --config-name grpo_tiny_cpu?"),
        (["--config_name", "x", "--config-name=x"], "the option is --config-name"),
    ],
)
@pytest.mark.parametrize("command", [train, explain])
def test_an_argument_in_the_wrong_form_is_answered_with_the_right_one(
    command: Callable[[list[str]], int], words: list[str], answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        command(words)
    assert answer in capsys.readouterr().err
