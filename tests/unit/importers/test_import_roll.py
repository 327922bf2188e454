"""Files of ROLL's RLVR pipeline: numbers worked out by hand from the formulas of its pipeline."""

from __future__ import annotations

from pathlib import Path

import pytest

from mindspeed_rl.config import ConfigError
from mindspeed_rl.importers.command import PROJECTS
from mindspeed_rl.importers.importer import import_command
from mindspeed_rl.importers.result import Import, ImportSettings

FILE = """
hydra: {run: {dir: "${now:%Y}"}}
exp_name: small
logging_dir: ./logs/${now:%H}
seed: 7
rollout_batch_size: 32
num_return_sequences_in_group: 8
prompt_length: 512
response_length: 1024
max_steps: 50
save_steps: 10
adv_estimator: grpo
whiten_advantages: false
reward_clip: 10
advantage_clip: 10.0
dual_clip_loss: true
use_kl_loss: true
kl_loss_coef: 0.01
max_len_mask: false
difficulty_mask: false
pretrain: Qwen/Qwen3-8B
actor_train:
  model_args: {dtype: bf16, disable_gradient_checkpointing: false}
  training_args:
    learning_rate: 1.0e-6
    weight_decay: 0
    per_device_train_batch_size: 2
    gradient_accumulation_steps: 8
    warmup_steps: 20
  data_args: {file_name: [data/math.jsonl], messages: messages, domain_interleave_probs: {math_rule: 1.0}, template: qwen3}
  strategy_args: {strategy_name: megatron_train, strategy_config: {tensor_model_parallel_size: 2, sequence_parallel: true}}
  device_mapping: list(range(0,8))
actor_infer:
  generating_args: {max_new_tokens: "${response_length}", top_p: 0.99, top_k: 100, temperature: 0.9}
  strategy_args: {strategy_name: vllm, strategy_config: {tensor_parallel_size: 4}}
  device_mapping: list(range(0,8))
reference: {device_mapping: "list(range(0,8))"}
rewards:
  math_rule: {worker_cls: roll.pipeline.rlvr.rewards.math_rule_reward_worker.MathRuleRewardWorker, tag_included: [math]}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_import(changes: dict[str, str] | None = None, accepted: frozenset[str] = frozenset(), **variables: str) -> Import:
    text = FILE
    for before, after in (changes or {}).items():
        assert before in text
        text = text.replace(before, after)
    Path("own/rlvr.yaml").write_text(text)
    command = "python examples/start_rlvr_pipeline.py --config_path own --config_name rlvr"
    settings = ImportSettings(variables={"REWARD": "accuracy", **variables}, accepted=accepted)
    return import_command(PROJECTS["roll"], command, settings)


def test_a_file_has_the_numbers_of_the_pipeline(folder: Path) -> None:
    run = run_import()
    assert run.plans is not None
    there, here = run.plans
    # 32 prompts of 8 responses; 2 x 8 rows on each of 8 / 2 replicas are 64, so 4 steps a rollout; 1 + 2 x 0.2 is the dual clip
    expected = {
        "rollout_prompts": 32, "rollout_completions": 256, "step_samples": 64, "steps_per_rollout": 4, "total_steps": 200,
        "lr_warmup_steps": 20, "lr_first": 0.0, "loss": "grpo", "aggregation": "sequence", "clip_low": 0.2, "clip_high": 0.2,
        "clip_c": 1.4, "kl_coef": 0.01, "kl_estimator": "low_var_kl", "kl_place": "loss", "advantage": "group_norm",
        "advantage_scale": "group", "temperature": 0.9, "top_p": 0.99, "top_k": 100, "prompt_length": 512,
        "response_length": 1024, "tp": 2, "dp": 4, "infer_tp": 4, "weight_decay": 0.0, "engine": "megatron",
    }  # fmt: skip
    for plan in (there, here):
        assert {name: getattr(plan, name) for name in expected} == expected
    # linear: 1e-6 (200 - 40) / (200 - 20) at step 40, the first of rollout 10
    assert there.lr_10 == pytest.approx(1e-6 * 160 / 180)
    keys = {
        "rl_config.overlong_filter": False,
        "megatron_training.map_keys.prompt": "messages",
        "megatron_training.map_keys.response": "ground_truth",
        "megatron_training.seed": 7,
        "megatron_training.save_interval": 10,
        "rl_config.reward_funcs": ["accuracy"],
    }
    assert {path: run.get(path) for path in keys} == keys


def test_defaults_are_those_of_the_dataclasses(folder: Path) -> None:
    sampling = {"top_p: 0.99, top_k: 100, temperature: 0.9": "num_beams: 1", "use_kl_loss: true": "use_kl_loss: false"}
    run = run_import({**sampling, "dual_clip_loss: true": "gamma: 1", "seed: 7\n": ""})
    assert run.plans is not None
    there = run.plans[0]
    assert (there.temperature, there.top_p, there.top_k, there.kl_coef, there.clip_c) == (0.95, 0.7, 50, 0.0, None)
    assert run.get("megatron_training.seed") == 42


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"adv_estimator: grpo": "adv_estimator: reinforce", "whiten_advantages: false": "whiten_advantages: true",
          "advantage_clip: 10.0": "gamma: 1"}, {"advantage": "reinforce_plus_plus"}),
        ({"adv_estimator: grpo": "adv_estimator: grpo\nloss_agg_mode: token-mean"}, {"aggregation": "token"}),
        ({"adv_estimator: grpo": "adv_estimator: grpo\nimportance_sampling: seq"}, {"level": "sequence"}),
        ({"adv_estimator: grpo": "adv_estimator: grpo\nuse_pg_clip_range: true\npg_clip_high: 0.28"}, {"clip_high": 0.28}),
        ({"list(range(0,8))\nreference": "list(range(8,12)) + [12, 13, 14, 15]\nreference"}, {"infer_tp": 4}),
    ],
)  # fmt: skip
def test_objectives_and_devices(folder: Path, changes: dict[str, str], expected: dict[str, object]) -> None:
    run = run_import(changes)
    assert run.plans is not None
    for plan in run.plans:
        assert {name: getattr(plan, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("difficulty_mask: false", "difficulty_mask: true", "by the mean score of their group"),
        ("advantage_clip: 10.0", "advantage_clip: 2.0", "values that are clipped at 2"),
        ("adv_estimator: grpo", "adv_estimator: gae", "adv_estimator=gae.*not available here"),
        (
            "adv_estimator: grpo\nwhiten_advantages: false\nreward_clip: 10\nadvantage_clip: 10.0\ndual_clip_loss: true\n"
            "use_kl_loss: true\nkl_loss_coef: 0.01\nmax_len_mask: false",
            "adv_estimator: reinforce\nwhiten_advantages: true\nmax_len_mask: true",
            "whitened over the responses that train",
        ),
        ("max_steps: 50", "max_steps: 50\nasync_generation_ratio: 1", "rollouts that run ahead"),
        ("max_steps: 50", "max_steps: 50\nuse_topr_loss: true", "terms of TOPR"),
        ("max_steps: 50", "max_steps: 50\nno_such_key: 1", "no option of ROLL"),
        ("math_rule: 1.0}", "math_rule: 0.5, code: 0.5}", "say --set PROMPTS=FILE"),
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B", "ROLL's converter decides"),
        ("megatron_train", "deepspeed_train", "megatron_train and fsdp2_train are"),
        ("list(range(0,8))\nreference", "list(range(4,12))\nreference", "shares some of the actor's devices"),
        ("list(range(0,8))\nreference", "[0, x]\nreference", "must be a list of devices"),
        ("response_length: 1024", "response_length: ${absent}", "a reference has no value"),
        ("rollout_batch_size: 32", "rollout_batch_size: 20", "not whole optimizer steps"),
        ("use_kl_loss: true", "use_kl_loss: true\nadd_token_level_kl: true", "has one place here"),
    ],
)
def test_what_is_not_available_is_named(folder: Path, before: str, after: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run_import({before: after})


def test_the_mean_over_responses_that_train_is_accepted_by_name(folder: Path) -> None:
    changes = {"max_len_mask: false": "max_len_mask: true"}
    with pytest.raises(ConfigError, match="sequence, over the responses that train in ROLL; --accept aggregation"):
        run_import(changes)
    assert run_import(changes, frozenset(("aggregation",))).get("rl_config.overlong_filter") is True
    # a mean over tokens counts those that train here too
    run = run_import({**changes, "adv_estimator: grpo": "adv_estimator: grpo\nloss_agg_mode: token-mean"})
    assert run.plans is not None and run.plans[0].aggregation == "token"


def test_what_scores_is_said_by_the_user(folder: Path) -> None:
    run_import()
    with pytest.raises(ConfigError, match=r"classes of ROLL \(MathRuleRewardWorker\) score there.*--set REWARD=NAME"):
        import_command(PROJECTS["roll"], "own/rlvr.yaml", ImportSettings())


def test_weights_of_fsdp_in_bfloat16_are_accepted_by_name(folder: Path) -> None:
    changes = {"strategy_name: megatron_train, strategy_config: {tensor_model_parallel_size: 2, sequence_parallel: true}":
               "strategy_name: fsdp2_train, strategy_config: {param_dtype: bf16, fsdp_size: 8}",
               "gradient_accumulation_steps: 8": "gradient_accumulation_steps: 4"}  # fmt: skip
    with pytest.raises(ConfigError, match="--accept weights"):
        run_import(changes)
    assert run_import(changes, frozenset(("weights",))).get("megatron_training.engine") == "fsdp"


@pytest.mark.parametrize("program", ["start_agentic_pipeline", "start_dpo_pipeline", "start_sft_pipeline"])
def test_other_pipelines_are_named(folder: Path, program: str) -> None:
    with pytest.raises(ConfigError, match=f"{program} of ROLL; start_rlvr_pipeline is"):
        import_command(PROJECTS["roll"], f"python examples/{program}.py --config_path own --config_name x", ImportSettings())
