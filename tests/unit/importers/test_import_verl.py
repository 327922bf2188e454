"""Commands of verl as run files: what is trained is what verl trains, or the command is refused by the feature's name."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from mindspeed_rl.config import ConfigError
from mindspeed_rl.importers.importer import import_command
from mindspeed_rl.importers.result import Import, ImportSettings
from mindspeed_rl.importers.translators import note_remote_code
from mindspeed_rl.importers.verl import PROJECT
from mindspeed_rl.importers.verl_options import TABLES
from mindspeed_rl.rewards import REWARDS

A, R, M = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
BASE = (
    "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=~/data/gsm8k/train.parquet "
    f"data.train_batch_size=64 {A}.ppo_mini_batch_size=16 {M}.path=models/base {R}.n=8 {R}.name=vllm trainer.n_gpus_per_node=8"
)

PREDICTION = f"model_engine=megatron {M}.mtp.enable=True {M}.mtp.enable_train=True"


def imported(changes: str = "", base: str = BASE, **settings) -> Import:
    return import_command(PROJECT, f"{base} {changes}", ImportSettings(rewards=REWARDS, **settings))


def refusal(changes: str, base: str = BASE, **settings) -> str:
    with pytest.raises(ConfigError) as caught:
        imported(changes, base, **settings)
    return "\n".join(caught.value.errors)


def values(run: Import, *paths: str) -> list[object]:
    return [run.get(path) for path in paths]


def test_prompts_are_written_by_the_tokenizers_chat_template() -> None:
    assert imported().get("megatron_training.prompt_type") == "hf"


# --- what the issue of silent changes named


def test_gspo_stays_gspo_with_its_narrow_clip() -> None:
    run = imported(
        f"{A}.policy_loss.loss_mode=gspo {A}.loss_agg_mode=seq-mean-token-mean {A}.clip_ratio_low=3e-4 {A}.clip_ratio_high=4e-4"
    )
    keys = ("loss_type", "importance_sampling_level", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c")
    # verl's GSPO has no dual clip
    assert values(run, *(f"rl_config.{key}" for key in keys)) == ["gspo", "sequence_token", 3e-4, 4e-4, None]


def test_the_other_stages_share_the_layers_that_first_and_last_do_not_have(tmp_path: Path) -> None:
    config = f"{A}.megatron.override_transformer_config"
    words = f"model_engine=megatron {A}.megatron.pipeline_model_parallel_size=4 {M}.path={tmp_path} "
    both = f"+{config}.num_layers_in_first_pipeline_stage=5 +{config}.num_layers_in_last_pipeline_stage=3"
    key = "megatron_training.num_layer_list"
    elsewhere = imported(f"{words} {both}")
    assert elsewhere.get(key) is None
    assert any("write num_layer_list" in text for text in elsewhere.without_effect.values())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "num_hidden_layers": 20}))
    assert imported(f"{words} {both}").get(key) == "5,6,6,3"
    assert imported(f"{words} +{config}.num_layers_in_last_pipeline_stage=2").get(key) == "6,6,6,2"
    assert "20 layers of config.json over 4 stages" in refusal(f"{words} +{config}.num_layers_in_first_pipeline_stage=4")


def test_the_learning_rate_is_constant_and_decays_only_where_it_is_written() -> None:
    assert imported().get("megatron_training.lr_decay_style") == "constant"
    run = imported(
        f"{A}.optim.lr=2e-6 {A}.optim.lr_scheduler_type=cosine {A}.optim.min_lr_ratio=0.1 {A}.optim.lr_warmup_steps=5 "
        "trainer.total_training_steps=40"
    )
    assert run.plans is not None
    # at rollout 10 of 40, 5 of them warm-up; the schedule of the last one ends at rollout 39
    expected = [2e-6 * (0.1 + 0.9 * (1 + math.cos(math.pi * (step - 5) / 35)) / 2) for step in (10, 39)]
    for plan in run.plans:
        assert [plan.lr_first, plan.lr_10, plan.lr_last] == pytest.approx([0.0, *expected], rel=1e-6)


def test_states_that_the_host_updates_are_a_share_where_they_are_on() -> None:
    option, key = f"{A}.optim.override_optimizer_config.", "optimizer_offload_fraction"
    cases: dict[str, object] = {
        f"+{option}optimizer_cpu_offload=True +{option}optimizer_offload_fraction=0.4": 0.4,
        f"+{option}optimizer_cpu_offload=True": 0.0,  # the default of Megatron's class
        f"+{option}optimizer_cpu_offload=False +{option}optimizer_offload_fraction=1": None,
        f"+{option}optimizer_offload_fraction=1": None,
    }
    for words, expected in cases.items():
        assert imported(words).get(f"megatron_training.{key}") == expected
    critic = f"+critic.optim.override_optimizer_config.optimizer_cpu_offload=True {option}optimizer_cpu_offload=False"
    critic += " +critic.optim.override_optimizer_config.optimizer_offload_fraction=1"
    run = imported(f"algorithm.adv_estimator=gae critic.model.path=models/base {critic}")
    assert values(run, f"critic_config.{key}", f"megatron_training.{key}") == [1, None]


def test_gradients_in_bf16_are_the_actors() -> None:
    option, key = f"+{A}.megatron.override_ddp_config.grad_reduce_in_fp32", "megatron_training.grad_reduce_in_fp32"
    assert imported(f"{option}=False").get(key) is False
    assert imported("").get(key) is None


def test_muon_is_the_actors_with_verls_defaults_and_the_critics_where_it_is_written() -> None:
    run = imported(
        f"{A}.optim.optimizer=muon {A}.optim.muon_momentum=0.9 {A}.optim.muon_nesterov=True "
        f"{A}.optim.muon_coefficient_type=quintic"
    )
    names = ("optimizer", "muon_momentum", "muon_use_nesterov", "muon_tp_mode")
    assert values(run, *(f"megatron_training.{name}" for name in names)) == ["muon", 0.9, True, "blockwise"]
    assert imported(f"{A}.optim.optimizer=AdamW").get("megatron_training.optimizer") is None
    for name, value in (("muon_coefficient_type", "polar_express"), ("muon_match_adamw_update_rms", True)):
        assert name in refusal(f"{A}.optim.optimizer=muon {A}.optim.{name}={value}")
    critic = "critic.optim.optimizer=muon critic.optim.muon_num_ns_steps=7"
    run = imported(f"algorithm.adv_estimator=gae critic.model.path=models/base {critic}")
    assert values(run, "critic_config.optimizer", "critic_config.muon_num_ns_steps", "megatron_training.optimizer") == [
        "muon",
        7,
        None,
    ]


def test_the_profilers_folder_is_not_that_of_checkpoints() -> None:
    profiled = (
        "global_profiler.tool=npu global_profiler.steps=[2,4] global_profiler.save_path=traces "
        f"{A}.profiler.enable=True {A}.profiler.ranks=[1,2] {A}.profiler.tool_config.npu.level=level1 "
        f"{A}.profiler.tool_config.npu.contents=[npu,cpu,stack] {A}.profiler.tool_config.npu.analysis=False"
    )
    run = imported(f"{profiled} trainer.default_local_dir=checkpoints")
    assert run.get("actor_config.save") == "checkpoints"
    names = "profile stage profile_save_path profile_level profile_step_start profile_step_end profile_ranks profile_analysis"
    names += " profile_with_module"
    assert values(run, *(f"profiler_config.integrated.{name}" for name in names.split())) == [
        True, ["actor_update", "actor_compute_log_prob"], "traces", "level1", 2, 5, [1, 2], False, True
    ]  # fmt: skip
    assert imported("global_profiler.save_path=traces").get("actor_config.save") is None


def test_expert_parallelism_and_megatrons_arguments_are_kept() -> None:
    m = f"{A}.megatron"
    run = imported(
        f"model_engine=megatron {m}.tensor_model_parallel_size=2 {m}.expert_model_parallel_size=4 "
        f"{m}.expert_tensor_parallel_size=1 +{m}.override_transformer_config.moe_permute_fusion=True "
        f"{m}.override_transformer_config.recompute_granularity=selective {R}.expert_parallel_size=4 "
        f"{R}.data_parallel_size=2 {R}.checkpoint_engine.update_weights_bucket_megabytes=4096"
    )
    t = "megatron_training"
    assert values(run, f"{t}.expert_model_parallel_size", f"{t}.use_fused_moe_token_permute_and_unpermute") == [4, True]
    assert values(run, f"{t}.sequence_parallel", f"{t}.recompute_granularity", f"{t}.recompute_method") == [
        True,
        "selective",
        None,
    ]
    g = "generate_config"
    assert values(run, f"{g}.enable_expert_parallel", f"{g}.infer_expert_parallel_size") == [True, 2]
    assert run.get(f"{g}.update_weights_bucket_mb") == 4096
    assert run.plans is not None and (run.plans[1].ep, run.plans[1].dp) == (4, 4)


def test_a_data_parallel_group_without_experts_is_so_many_replicas() -> None:
    run = imported(f"{R}.data_parallel_size=2 {R}.tensor_model_parallel_size=2")
    assert "each of them is a replica here" in run.same[f"{R}.data_parallel_size"]
    assert values(run, "generate_config.infer_tensor_parallel_size", "generate_config.enable_expert_parallel") == [2, None]
    model = "actor_rollout_ref.model.path=Qwen/Qwen3-30B-A3B"
    assert "without expert parallelism, of a model with experts" in refusal(f"{R}.data_parallel_size=2 {model}")


def test_the_penalty_of_long_responses_is_the_reward_managers() -> None:
    k = "+reward_model.reward_kwargs"
    buffer = f"{k}.overlong_buffer_cfg.enable=True {k}.overlong_buffer_cfg.len=128 {k}.overlong_buffer_cfg.penalty_factor=0.5"
    buffer += f" {k}.max_resp_len=1024 data.max_response_length=1024"
    run = imported(f"reward_model.reward_manager=dapo {buffer}")
    keys = ("overlong_buffer_enable", "overlong_buffer", "overlong_buffer_penalty_factor", "rollout_max_tokens")
    assert values(run, *(f"rl_config.{key}" for key in keys)) == [True, 128, 0.5, 1024]
    # the plain manager of verl does not read them
    assert imported(buffer).get("rl_config.overlong_buffer_enable") is None


def test_prompts_need_not_divide_by_the_replicas_where_responses_do() -> None:
    run = imported("data.train_batch_size=6 actor_rollout_ref.actor.ppo_mini_batch_size=3 actor_rollout_ref.rollout.n=8")
    assert run.plans is not None
    for plan in run.plans:
        # 48 responses on 8 replicas, two steps of 24
        assert (plan.rollout_prompts, plan.rollout_completions, plan.step_samples, plan.dp) == (6, 48, 24, 8)
    assert "must be divisible by" in refusal(
        "data.train_batch_size=5 actor_rollout_ref.actor.ppo_mini_batch_size=5 actor_rollout_ref.rollout.n=3"
    )


# --- objectives

#: estimator of verl -> ours, its divisor, gamma
ESTIMATORS = {
    "grpo": ("group_norm", "group", None),
    "grpo_vectorized": ("group_norm", "group", None),
    "grpo_passk": ("pass_at_k", "group", None),
    "rloo": ("rloo", None, None),
    "rloo_vectorized": ("rloo", None, None),
    "opo": ("opo", None, None),
    "gpg": ("gpg", None, None),
    "reinforce_plus_plus": ("reinforce_plus_plus", None, 0.9),
    "reinforce_plus_plus_baseline": ("reinforce_plus_plus_baseline", None, None),
    "remax": ("remax", None, 1.0),
    "optimal_token_baseline": ("optimal_token_baseline", None, None),
    "tir_optimal_token_baseline": ("optimal_token_baseline", None, None),
}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_an_estimator_is_its_like_here(name: str) -> None:
    run = imported(f"algorithm.adv_estimator={name} algorithm.gamma=0.9")
    assert run.plans is not None
    for plan in run.plans:
        assert (plan.advantage, plan.advantage_scale, plan.gamma) == ESTIMATORS[name]


@pytest.mark.parametrize("name", ["gdpo", "never_heard_of"])
def test_an_estimator_that_is_not_here_is_refused_by_name(name: str) -> None:
    assert f"algorithm.adv_estimator={name}: not available here" in refusal(f"algorithm.adv_estimator={name}")


#: loss_mode of verl -> loss, level, aggregation with token-mean, dual clip
LOSSES = {
    "vanilla": ("grpo", "token", "token", 3.0),
    "gspo": ("grpo", "sequence_token", "sequence", None),
    "cispo": ("cispo", "token", "token", None),
    "sapo": ("sapo", "token", "sequence", None),
    "geo_mean": ("gmpo", "token", "sequence", None),
    "gpg": ("gpg", "token", "token", None),
    "dppo_tv": ("dppo_tv", "token", "token", 3.0),
    "dppo_kl": ("dppo_kl", "token", "token", 3.0),
    "dro": ("dro", "token", "token", None),
    "clip_cov": ("clip_cov", "token", "token", None),
    "kl_cov": ("kl_cov", "token", "token", None),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_policy_loss_is_its_like_here(name: str) -> None:
    run = imported(f"{A}.policy_loss.loss_mode={name} {A}.policy_loss.dro_beta=0.3 {A}.tau_pos=1.1")
    assert run.plans is not None
    there = replace(run.plans[0], aggregation="sequence") if name == "gspo" else run.plans[0]
    for plan in (there, run.plans[1]):
        assert (plan.loss, plan.level, plan.aggregation, plan.clip_c) == LOSSES[name]
    assert run.get("rl_config.dro_beta") == (0.3 if name == "dro" else None)
    assert run.get("rl_config.tau_pos") == (1.1 if name == "sapo" else None)


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-sum-norm"])
@pytest.mark.parametrize(("name", "loss"), [("gspo", "gspo"), ("sapo", "sapo"), ("geo_mean", "gmpo")])
def test_a_loss_whose_aggregation_is_its_own_keeps_it(name: str, loss: str, aggregation: str) -> None:
    changes = f"{A}.policy_loss.loss_mode={name} {A}.loss_agg_mode={aggregation}"
    run = imported(changes)
    assert run.plans is not None and run.plans[1].aggregation == "sequence"
    assert run.plans[0].aggregation.startswith("sequence (main), " if name == "gspo" else "sequence")
    assert run.get("rl_config.loss_type") == loss
    # the KL and the entropy of the same loss are averaged as loss_agg_mode has it
    for term in (f"{A}.use_kl_loss=True", f"{A}.entropy_coeff=0.01"):
        assert f"next to the mean of sequences of {loss}" in refusal(f"{changes} {term}")
        assert imported(f"{changes} {A}.loss_agg_mode=seq-mean-token-mean {term}").plans is not None


@pytest.mark.parametrize(
    ("aggregation", "loss", "average"),
    [
        ("token-mean", "dapo", "token"),
        ("seq-mean-token-mean", "grpo", "sequence"),
        ("seq-mean-token-sum-norm", "dr_grpo", "constant"),
    ],
)
def test_gspo_of_release_0_9_1_averages_as_its_option_says(aggregation: str, loss: str, average: str) -> None:
    changes = f"{A}.policy_loss.loss_mode=gspo {A}.loss_agg_mode={aggregation} {A}.use_kl_loss=True"
    run = imported(changes, variables={"VERL_RELEASE": "0.9.1"})
    assert run.plans is not None
    for plan in run.plans:
        assert (plan.loss, plan.level, plan.aggregation, plan.clip_c) == ("grpo", "sequence_token", average, None)
    assert run.get("rl_config.loss_type") == loss
    assert "must be 0.9.1 or main" in refusal(changes, variables={"VERL_RELEASE": "0.8"})


def test_the_plan_has_both_averages_of_gspo() -> None:
    text = imported(f"{A}.policy_loss.loss_mode=gspo").summarize()
    assert "sequence (main), token (0.9.1)" in text and "--set VERL_RELEASE=0.9.1 takes the release's" in text
    assert "(0.9.1)" not in imported(f"{A}.policy_loss.loss_mode=gspo {A}.loss_agg_mode=seq-mean-token-mean").summarize()


# --- the supervised trainer of releases before 0.9

EARLIER = (
    "torchrun --nnodes=1 --nproc_per_node=4 -m verl.trainer.fsdp_sft_trainer data.train_files=/data/rows.parquet "
    "data.prompt_key=question model.partial_pretrain=Qwen/Qwen2.5-0.5B trainer.total_epochs=2 ulysses_sequence_parallel_size=2 "
    "use_remove_padding=true data.micro_batch_size_per_gpu=8"
)
DIFFERENT = frozenset(("aggregation", "sample_borders"))


def test_the_earlier_supervised_trainer_has_its_own_defaults() -> None:
    run = imported("", EARLIER, accepted=DIFFERENT, rows=2560)
    assert run.plans is not None
    for plan in run.plans:
        # 2560 rows in batches of 256, twice; int(0.1 * 20) steps of warm-up
        assert (plan.total_steps, plan.step_samples, plan.lr_warmup_steps, plan.cp, plan.dp) == (20, 256, 2, 2, 2)
    keys = {
        "actor_config.lr": 1e-5,
        "megatron_training.lr_decay_style": "cosine",
        "megatron_training.adam_beta2": 0.95,
        "megatron_training.micro_batch_size": 8,
        "megatron_training.num_npus": 4,
        "megatron_training.seed": 1,
    }
    assert {path: run.get(path) for path in keys} == keys
    assert '"prompt": "question", "query": "", "response": "answer"' in run.translated["data.train_files"]


def test_what_the_earlier_supervised_trainer_has_otherwise_is_accepted_by_name() -> None:
    text = refusal("", EARLIER)
    assert "--accept aggregation" in text and "--accept sample_borders" in text
    # conversations end as the template has it
    conversations = f"{EARLIER} data.multiturn.enable=true data.multiturn.messages_key=talk"
    run = imported("", conversations, accepted=frozenset(("aggregation",)))
    assert '"messages": "talk"' in run.translated["data.train_files"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ("'data.prompt_dict_keys=[question]'", "columns inside of a column"),
        ("'data.prompt_key=[a,b]'", "several columns, a, b"),
        ("optim.lr_scheduler=wsd", "cosine is"),
        ("trainer.total_training_steps=10", "a run that ends before its cosine"),
        ("data.truncation=left", "rows that are cut"),
    ],
)
def test_the_earlier_supervised_trainer_is_refused_by_name(changes: str, message: str) -> None:
    assert message in refusal(changes, EARLIER, accepted=DIFFERENT)


def test_what_verl_saves_goes_into_its_own_folder_and_random_rows_are_named() -> None:
    assert imported("trainer.save_freq=20").get("actor_config.save") == "checkpoints/verl_examples/gsm8k"
    names = "trainer.project_name=p trainer.experiment_name=e"
    assert imported(f"trainer.save_freq=20 {names}").get("actor_config.save") == "checkpoints/p/e"
    # without an interval verl writes no checkpoint
    assert imported(names).get("actor_config.save") is None
    run = imported("data.train_max_samples=100")
    assert "draws as many at random" in run.translated["data.train_files"]
    assert "at random" not in imported("data.train_max_samples=100 data.shuffle=False").translated["data.train_files"]


TOOLS = f"{R}.multi_turn.enable=True {R}.multi_turn.tool_config_path=tools.yaml"
_CALLS = ("max_parallel_calls", "max_tool_response_characters", "tool_response_truncate_side", "max_turns")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ("", [1, 256, "middle", None]),
        (f"{R}.multi_turn.max_parallel_calls=3 {R}.multi_turn.max_tool_response_length=1000", [3, 1000, "middle", None]),
        # since 0.8 left is the side that verl cuts
        (f"{R}.multi_turn.tool_response_truncate_side=left", [1, 256, "right", None]),
        (f"{R}.multi_turn.tool_response_truncate_side=right", [1, 256, "left", None]),
        # after two turns of the tools the third of the model is the last one
        (f"{R}.multi_turn.max_user_turns=2", [1, 256, "middle", 3]),
        (f"{R}.multi_turn.max_user_turns=4 {R}.multi_turn.max_assistant_turns=3", [1, 256, "middle", 3]),
        (f"{R}.multi_turn.max_user_turns=null {R}.multi_turn.max_assistant_turns=3", [1, 256, "middle", 3]),
    ],
)
def test_tools_have_verls_limits_which_count_characters(changes: str, expected: list[object]) -> None:
    run = imported(f"{TOOLS} {changes}")
    assert values(run, *(f"rl_config.{name}" for name in _CALLS)) == expected
    assert run.get("rl_config.max_tool_response_length") is None


def test_the_loop_of_tools_is_on_where_it_is_the_default_loop() -> None:
    run = imported(f"{R}.agent.default_agent_loop=tool_agent {R}.multi_turn.tool_config_path=tools.yaml")
    assert values(run, "rl_config.multi_turn_enable", *(f"rl_config.{name}" for name in _CALLS[:2])) == [True, 1, 256]


def test_a_run_of_one_turn_has_no_limits_of_tools() -> None:
    assert values(imported(f"{R}.multi_turn.max_parallel_calls=3"), *(f"rl_config.{name}" for name in _CALLS)) == [None] * 4
    assert "left, middle or right" in refusal(f"{TOOLS} {R}.multi_turn.tool_response_truncate_side=both")


def test_numbers_of_the_covariance_losses_are_those_of_the_command_or_verl_s_defaults() -> None:
    run = imported(f"{A}.policy_loss.loss_mode=kl_cov {A}.policy_loss.kl_cov_ratio=0.002")
    assert (run.get("rl_config.kl_cov_ratio"), run.get("rl_config.ppo_kl_coef")) == (0.002, 0.1)
    run = imported(f"{A}.policy_loss.loss_mode=clip_cov {A}.policy_loss.clip_cov_ub=9")
    numbers = [run.get(f"rl_config.clip_cov_{name}") for name in ("ratio", "lb", "ub")]
    assert numbers == [0.0002, 1.0, 9]


def test_weights_of_a_correction_in_the_token_baseline_are_refused() -> None:
    changes = "algorithm.adv_estimator=optimal_token_baseline algorithm.rollout_correction.rollout_is=token"
    assert "weights of the correction in the baseline" in refusal(changes)


def test_a_policy_loss_that_is_not_here_is_refused_by_name() -> None:
    assert "loss_mode=bypass_mode: not available here" in refusal(f"{A}.policy_loss.loss_mode=bypass_mode")


def test_long_prompts_are_left_out_or_cut_as_verls_rollout_does() -> None:
    for words, kind in (
        ("", "cut_left"),  # filter_overlong_prompts is false unless it is set, and the rollout cuts text at its start
        ("data.truncation=middle", "cut_left"),
        ("data.filter_overlong_prompts=True", "drop_longer"),
        ("data.filter_overlong_prompts=True data.truncation=left", "drop_longer"),
    ):
        assert imported(words).get("rl_config.long_prompts") == kind


def test_aggregations_are_those_of_verl() -> None:
    expected = {
        "token-mean": "token",
        "seq-mean-token-mean": "sequence",
        "seq-mean-token-sum-norm": "constant",
        "seq-mean-token-sum": "summed",
    }
    for name, aggregation in expected.items():
        run = imported(f"{A}.loss_agg_mode={name}")
        assert run.plans is not None and run.plans[1].aggregation == aggregation
    assert "token-sum" in refusal(f"{A}.loss_agg_mode=token-sum")
    assert "another divisor" in refusal(f"{A}.loss_agg_mode=seq-mean-token-sum-norm {A}.loss_scale_factor=7")
    assert "cispo" in refusal(f"{A}.policy_loss.loss_mode=cispo {A}.loss_agg_mode=seq-mean-token-mean")


def test_the_clip_is_that_of_both_sides_whose_defaults_are_numbers() -> None:
    run = imported(f"{A}.clip_ratio=0.3")
    assert values(run, "rl_config.clip_ratio_low", "rl_config.clip_ratio_high") == [0.2, 0.2]
    run = imported(f"{A}.clip_ratio=0.3 {A}.clip_ratio_low=null {A}.clip_ratio_high=0.4")
    assert values(run, "rl_config.clip_ratio_low", "rl_config.clip_ratio_high") == [0.3, 0.4]


def test_the_kl_has_one_place() -> None:
    run = imported(f"{A}.use_kl_loss=True {A}.kl_loss_coef=0.002 {A}.kl_loss_type=k3+")
    assert values(run, "rl_config.init_kl_coef", "rl_config.kl_penalty", "rl_config.use_kl_in_reward") == [0.002, "k3+", False]
    run = imported("algorithm.use_kl_in_reward=True")
    assert values(run, "rl_config.init_kl_coef", "rl_config.kl_penalty", "rl_config.use_kl_in_reward") == [0.001, "kl", True]
    assert imported().get("rl_config.init_kl_coef") == 0.0
    assert "the KL has one place here" in refusal(f"algorithm.use_kl_in_reward=True {A}.use_kl_loss=True")
    assert "kl_loss_type=full: not available here" in refusal(f"{A}.use_kl_loss=True {A}.kl_loss_type=full")


def test_rollout_corrections() -> None:
    prefix = "algorithm.rollout_correction"
    keys = ("mode", "threshold", "threshold_min")
    for option, expected in (
        (f"{prefix}.rollout_is=token", ["token_truncate", 2.0, None]),
        (f"{prefix}.rollout_is=sequence {prefix}.rollout_is_threshold=5.0", ["sequence_truncate", 5.0, None]),
        (f"{prefix}.rollout_is=token {prefix}.rollout_is_threshold=0.5_2.0", ["token_mask", 2.0, 0.5]),
    ):
        assert values(imported(option), *(f"rl_config.rollout_importance_sampling_{key}" for key in keys)) == expected
    # in its decoupled form verl takes rejected tokens out of the mean too
    decoupled = f"{prefix}.rollout_rs=token_k1 {prefix}.rollout_rs_threshold=2.0"
    assert "leave policy loss, KL and entropy, and their means in verl; --accept rejected_tokens" in refusal(decoupled)
    run = imported(decoupled, accepted=frozenset(("rejected_tokens",)))
    expected = ["token_rejection_mask", 2.0, 0.5]
    assert values(run, *(f"rl_config.rollout_importance_sampling_{key}" for key in keys)) == expected
    recorded = imported(f"{prefix}.bypass_mode=True {prefix}.rollout_is=token")
    assert recorded.get("rl_config.old_log_probs") == "rollout" and recorded.get("rl_config.old_log_probs_fallback") == "warn"
    assert recorded.get("rl_config.rollout_importance_sampling_mode") is None  # verl measures these weights only
    bypass = f"{prefix}.bypass_mode=True"
    assert "bypass_mode; leave it out" in refusal(f"{bypass} {A}.policy_loss.loss_mode=gspo")
    assert "weights whose mean is 1" in refusal(f"{prefix}.rollout_is=token {prefix}.rollout_is_batch_normalize=True")
    # logged there, as the ratio is to the rollout engine
    assert imported(f"{bypass} {prefix}.rollout_is=token {prefix}.rollout_is_batch_normalize=True").plans is not None


@pytest.mark.parametrize(
    ("options", "expected", "note"),
    [
        ("do_sample=True V.n=16 V.temperature=0.6 V.top_p=0.7 V.top_k=40", [False, 16, 0.6, 0.7, 40], ""),
        ("do_sample=True V.temperature=1.0 V.top_p=1.0", [False, None, None, None, None], "as in training"),
        # verl's default temperature of an evaluation is 0
        ("do_sample=True V.n=4 V.top_p=0.7", [True, None, None, None, None], "the evaluation is greedy"),
        ("do_sample=False V.n=4 V.temperature=1.0 V.top_p=1", [True, None, None, None, None], "the evaluation is greedy"),
    ],
)
def test_evaluations_are_sampled_as_there(options: str, expected: list[object], note: str) -> None:
    prefix = "actor_rollout_ref.rollout.val_kwargs."
    run = imported(f"{prefix}{options.replace('V.', prefix)}")
    names = ("n_samples", "temperature", "top_p", "top_k")
    assert values(run, "rl_config.eval_greedy", *(f"megatron_training.eval_{name}" for name in names)) == expected
    assert note in run.without_effect.get(f"{prefix}top_p", "")
    if "n=4" in options:
        assert "greedy ones are all the same" in run.without_effect[f"{prefix}n"]


def test_bypass_with_reinforce_is_the_plain_policy_gradient_with_weights() -> None:
    prefix, key = "algorithm.rollout_correction", "rl_config.rollout_importance_sampling_mode"
    reinforce = f"{prefix}.bypass_mode=True {prefix}.loss_type=reinforce"
    run = imported(f"{reinforce} {prefix}.rollout_is=sequence")
    assert values(run, "rl_config.loss_type", "rl_config.old_log_probs", key) == ["gpg", "rollout", "sequence_truncate"]
    assert values(imported(reinforce), "rl_config.loss_type", key) == ["gpg", None]
    assert "with seq-mean-token-mean" in refusal(f"{reinforce} {A}.loss_agg_mode=seq-mean-token-mean")
    both = f"{prefix}.rollout_is=token {prefix}.rollout_rs=token_k1 {prefix}.rollout_rs_threshold=2"
    assert "rollout_rs: not available here: with weights of rollout_is" in refusal(f"{reinforce} {both}")
    # read only in bypass_mode
    assert imported(f"{prefix}.loss_type=reinforce").get("rl_config.loss_type") == "dapo"


@pytest.mark.parametrize(
    ("rejection", "bounds", "expected"),
    [  # verl bounds mu / pi, and here pi / mu is bounded
        ("seq_mean_k1", "0.999_1.001", ("geometric_rejection_mask", 1 / 0.999, 1 / 1.001)),
        ("seq_sum_k1", "2.0", ("sequence_rejection_mask", 2.0, 0.5)),
        ("token_k1", "0.5_4.0", ("token_rejection_mask", 2.0, 0.25)),
        # log(w)^2 / 2 <= 0.02 is |log w| <= 0.2
        ("token_k2", "0.02", ("token_rejection_mask", math.exp(0.2), math.exp(-0.2))),
    ],
)
def test_rejection_in_bypass_mode_is_a_mask(rejection: str, bounds: str, expected: tuple[str, float, float]) -> None:
    prefix = "algorithm.rollout_correction"
    run = imported(f"{prefix}.bypass_mode=True {prefix}.rollout_rs={rejection} {prefix}.rollout_rs_threshold={bounds}")
    keys = ("mode", "threshold", "threshold_min")
    mode, high, low = values(run, *(f"rl_config.rollout_importance_sampling_{key}" for key in keys))
    assert (mode, high, low) == (expected[0], pytest.approx(expected[1]), pytest.approx(expected[2]))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("rollout_rs=seq_max_k2 P.rollout_rs_threshold=2", "rollout_rs=seq_max_k2: not available here"),
        ("rollout_rs='token_k1,seq_mean_k1' P.rollout_rs_threshold='2,2'", "rollout_rs=token_k1,seq_mean_k1: not available"),
        ("rollout_rs=token_k1", "rollout_rs_threshold is None"),
        ("rollout_rs=token_k1 P.rollout_rs_threshold=2.0_0.5", "rollout_rs_threshold is 2.0_0.5"),
        ("rollout_rs=token_k1 P.rollout_rs_threshold=0.5", "rejects all tokens"),
        ("rollout_rs=token_k2 P.rollout_rs_threshold=0.5_2.0", "rollout_rs_threshold is 0.5_2.0"),
        (f"rollout_rs=token_k1 P.rollout_rs_threshold=2 {A}.loss_agg_mode=seq-mean-token-mean", "leave the mean of a sequence"),
    ],
)
def test_other_rejections_are_refused_by_name(options: str, reason: str) -> None:
    prefix = "algorithm.rollout_correction"
    assert reason in refusal(f"{prefix}.bypass_mode=True {prefix}.{options.replace('P.', f'{prefix}.')}")


def test_sequences_are_rejected_with_any_mean() -> None:
    # a rejected sequence counts in the mean of sequences in both projects
    prefix = "algorithm.rollout_correction"
    rejection = f"{prefix}.bypass_mode=True {prefix}.rollout_rs=seq_mean_k1 {prefix}.rollout_rs_threshold=1.1"
    run = imported(f"{rejection} {A}.loss_agg_mode=seq-mean-token-mean")
    assert run.get("rl_config.rollout_importance_sampling_mode") == "geometric_rejection_mask"


def test_the_fully_asynchronous_trainer_is_trainer_mode_async() -> None:
    # verl: a step takes ppo_mini_batch_size x require_batches prompts; a version of the weights is trigger steps, and at most
    # staleness_threshold of its prompts are ahead; tests and checkpoints are counted in versions
    command = (
        "python3 -m verl.experimental.fully_async_policy.fully_async_main --config-name fully_async_ppo_trainer.yaml "
        "data.train_files=/d/gsm8k.parquet data.train_batch_size=0 data.gen_batch_size=1 algorithm.adv_estimator=grpo "
        f"actor_rollout_ref.model.path=/m {A}.ppo_mini_batch_size=32 actor_rollout_ref.rollout.n=4 "
        "trainer.nnodes=1 trainer.n_gpus_per_node=4 rollout.nnodes=1 rollout.n_gpus_per_node=4 trainer.test_freq=5 "
        "rollout.total_rollout_steps=6400 async_training.staleness_threshold=0.5 async_training.trigger_parameter_sync_step=4 "
        "async_training.require_batches=2 async_training.partial_rollout=True data.val_files=/d/test.parquet "
    )
    run = import_command(PROJECT, command, ImportSettings(rewards=REWARDS))
    assert run.get("rl_config.old_log_probs") == "rollout"
    names = "trainer_mode max_off_policy_threshold parameter_sync_step partial_rollout mini_batch_size".split()
    assert values(run, *(f"rl_config.{name}" for name in names)) == ["async", 0.5, 4, True, 32]
    batch = ("global_batch_size", "train_iters", "eval_interval")
    assert values(run, *(f"megatron_training.{name}" for name in batch)) == [64, 100, 20]
    assert run.get("rl_config.rollout_resource.num_npus") == 4 and run.get("rl_config.actor_resource.num_npus") == 4
    correction = "algorithm.rollout_correction.bypass_mode=False "
    with pytest.raises(ConfigError, match="old_policy would be actor here, but is synced actor in verl"):
        import_command(PROJECT, command + correction, ImportSettings(rewards=REWARDS))
    equal = f"{command}{correction}async_training.trigger_parameter_sync_step=1"
    assert import_command(PROJECT, equal, ImportSettings(rewards=REWARDS)).plans is not None
    for word, sentence in (
        ("algorithm.filter_groups.enable=True", "filtered while rollouts run ahead"),
        ("async_training.use_dynamic_resource_scheduling=True", "devices that move"),
        ("rollout.total_rollout_steps=10", "at least the 64 prompts"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            import_command(PROJECT, f"{command}{word}", ImportSettings(rewards=REWARDS))


def test_ppo_has_a_critic_with_its_own_rate() -> None:
    run = imported(
        "algorithm.adv_estimator=gae critic.model.path=c critic.optim.lr=2e-5 "
        "trainer.critic_warmup=3 critic.cliprange_value=0.4"
    )
    assert values(run, *(f"critic_config.{name}" for name in ("load", "lr", "lr_decay_style"))) == ["c", 2e-5, "constant"]
    assert values(run, "megatron_training.stage", "rl_config.critic_warmup", "rl_config.lam") == ["ray_ppo", 3, 1.0]
    assert run.plans is not None and (run.plans[1].value_clip, run.plans[1].critic_lr) == (0.4, 2e-5)
    assert "critic.model.path is missing" in refusal("algorithm.adv_estimator=gae")
    assert "next to a critic" in refusal(f"algorithm.adv_estimator=gae critic.model.path=c {A}.use_kl_loss=True")
    # what a critic would have does not matter without one
    assert "critic_config" not in imported("critic.optim.lr=3e-5 critic.fsdp.param_offload=True trainer.critic_warmup=0").tree


# --- data, rewards, models, length


def test_the_reward_follows_the_source_of_the_data() -> None:
    assert imported().get("rl_config.verifier_function") == ["verl_gsm8k"]
    file = "data.train_files=data/dapo-math-17k.parquet"
    assert imported(file).get("rl_config.verifier_function") == ["verl_math_dapo"]
    run = imported("data.train_files=mine.parquet")
    # only the rows say it
    assert run.get("rl_config.verifier_function") == ["verl_default"]
    assert run.get("megatron_training.dataset_additional_keys") == ["labels", "data_source"]
    run = imported("data.train_files=mine.parquet", variables={"data_source": "openai/gsm8k"})
    assert run.get("rl_config.verifier_function") == ["verl_gsm8k"]
    error = refusal("data.train_files=mine.parquet", variables={"data_source": "codecontests"})
    assert "verl's reward for the data_source codecontests" in error
    run = imported("custom_reward_function.path=rewards/mine.py custom_reward_function.name=score")
    assert run.get("rl_config.verifier_function") == ["rewards.mine:score"]
    run = imported("custom_reward_function.path=/x/mine.py")
    assert run.get("rl_config.verifier_function") == ["mine:compute_score"]
    assert "PYTHONPATH=/x" in run.translated["custom_reward_function.path"]
    assert "not a Python file" in refusal("custom_reward_function.path=mine")


def test_veomni_has_ulysses_experts_and_a_cosine_of_its_own() -> None:
    words = f"model_engine=veomni {A}.veomni.ulysses_parallel_size=2 {A}.veomni.expert_parallel_size=4 {A}.optim.lr=1e-6 "
    run = imported(words + f"{A}.veomni.router_replay.mode=R2 {A}.optim.lr_min=1e-7 {A}.grad_clip=0.3")
    training = run.tree["megatron_training"]
    assert (training["context_parallel_size"], training["expert_model_parallel_size"]) == (2, 4)
    # config/optim/veomni.yaml: cosine, clip_grad 1.0; the engine reads only optim.clip_grad
    assert (training["lr_decay_style"], training["min_lr"], training["clip_grad"]) == ("cosine", 1e-7, 1.0)
    assert run.get("rl_config.router_replay.mode") == "R2"
    assert run.plans is not None and (run.plans[0].cp, run.plans[0].ep, run.plans[0].dp) == (2, 4, 4)
    assert "a decay that ends before the run" in refusal(words + f"{A}.optim.lr_decay_ratio=0.5")
    assert imported(words + f"{A}.optim.lr_scheduler_type=constant").tree["megatron_training"]["lr_decay_style"] == "constant"


def test_a_group_of_one_response_has_the_reward_for_its_advantage() -> None:
    # core_algos.compute_grpo_outcome_advantage: mean 0 and deviation 1 where a prompt has one response
    run = imported(f"{R}.n=1 algorithm.gamma=0.9")
    rl = run.tree["rl_config"]
    assert (rl["adv_estimator"], rl["advantage_whiten"], rl.get("gamma", 1.0)) == ("reinforce_plus_plus", False, 1.0)
    assert "must be at least 2" in refusal(f"{R}.n=1 algorithm.use_kl_in_reward=True")


def test_several_files_are_read_one_after_another_with_the_reward_of_each_row() -> None:
    run = imported("data.train_files=[gsm8k/a.parquet,math/b.parquet] data.val_files=[gsm8k/c.parquet,math/d.parquet]")
    assert run.get("megatron_training.data_path") == "gsm8k/a.parquet,math/b.parquet"
    assert run.get("megatron_training.eval_data_path") == "gsm8k/c.parquet,math/d.parquet"
    assert run.get("rl_config.verifier_function") == ["verl_default"]
    # both are of one source
    run = imported("data.train_files=[gsm8k/a.parquet,gsm8k/b.parquet]")
    assert run.get("rl_config.verifier_function") == ["verl_gsm8k"]


def test_models_of_images_are_those_that_there_are() -> None:
    assert "models of images but Qwen2.5-VL and Qwen3-VL" in refusal(f"{M}.path=Qwen/Qwen2-VL-7B-Instruct")
    run = imported(f"{M}.path=Qwen/Qwen2.5-VL-7B-Instruct data.image_key=images")
    assert run.get("actor_config.load") == "Qwen/Qwen2.5-VL-7B-Instruct"


def test_the_tower_trains_where_verl_trains_it() -> None:
    model, freeze = f"{M}.path=Qwen/Qwen3-VL-8B-Instruct", "actor_rollout_ref.actor.freeze_vision_tower"
    keys = ("megatron_training.freeze_vit", "megatron_training.freeze_aligner")
    assert values(imported(model), *keys) == [False, False]
    assert values(imported(f"{model} {freeze}=True"), *keys) == [True, True]
    adapters = f"{M}.lora_rank=8 {M}.lora_alpha=16 {M}.exclude_modules='.*visual.*'"
    assert values(imported(f"{model} {adapters}"), *keys) == [True, True]
    assert values(imported(f"{freeze}=True"), *keys) == [None, None]
    limit = "+actor_rollout_ref.rollout.engine_kwargs.vllm.limit_mm_per_prompt"
    assert imported(f"{model} {limit}.image=5").get("generate_config.limit_mm_image_per_prompt") == 5
    videos = imported(f"{model} {limit}.video=2 data.video_key=video")
    assert values(videos, "generate_config.limit_mm_video_per_prompt", "generate_config.limit_mm_image_per_prompt") == [2, None]
    assert "sound" in refusal(f"{model} {limit}.audio=1")
    assert "the columns videos and video are read" in refusal(f"{model} data.video_key=clips")


def test_the_length_is_verls() -> None:
    # 1,000 rows are 15 batches of 64, of which 40 are left over
    run = imported("trainer.total_epochs=3", rows=1000)
    assert values(run, "megatron_training.train_iters", "megatron_training.train_epochs") == [45, None]
    assert run.plans is not None and run.plans[0].total_steps == 45 * 4
    assert imported("trainer.total_epochs=3").get("megatron_training.train_epochs") == 3
    run = imported("trainer.total_epochs=3 trainer.total_training_steps=20 data.train_max_samples=640 data.shuffle=False")
    assert values(run, "megatron_training.train_iters", "megatron_training.data_path") == [20, "~/data/gsm8k/train.parquet#640"]


@pytest.mark.parametrize(
    ("option", "feature"),
    [
        ("distillation.enabled=True", "teacher_model.model_path is missing"),
        ("algorithm.use_pf_ppo=True", "PF-PPO"),
        (f"{A}.optim.optimizer=sgd", "the optimizer sgd"),
        (f"{A}.qat.enable=True", "quantization-aware training"),
        (f"{M}.mtp.enable=True {M}.mtp.enable_rollout=True {M}.mtp.method=eagle3", "as drafts by the method eagle3"),
        (f"{A}.megatron.override_transformer_config.mtp_num_layers=2", "another number of prediction layers"),
        ("algorithm.adv_estimator=gae critic.model.path=m critic.model.mtp.enable_train=True", "prediction layers of a critic"),
        (f"{A}.strategy=torchtitan", "the training engine torchtitan; fsdp, veomni, megatron are"),
        ("trainer.v1.trainer_mode=other", "sync, colocate_async, separate_async are"),
        ("reward_model.reward_manager=prime", "the reward manager prime"),
        (f"{M}.external_lib=mine", "modules that are imported"),
        ("data.custom_cls.path=mine.py", "your own dataset class"),
        (f"{R}.do_sample=False", "greedy rollouts"),
        ("trainer.unheard_of=3", "no option of verl 0.9.1"),
    ],
)
def test_what_changes_the_run_and_is_not_here_is_refused_by_name(option: str, feature: str) -> None:
    assert feature in refusal(option)


def test_a_harmless_value_of_a_refused_feature_is_none() -> None:
    run = imported(
        f"distillation.enabled=False {M}.mtp.enable=False algorithm.use_pf_ppo=false {M}.external_lib=null {R}.do_sample=True"
    )
    assert "distillation.enabled" in run.same


def test_prediction_layers_train_with_verls_weight_and_their_drafts_are_those_of_vllm(tmp_path: Path) -> None:
    keys = [f"megatron_training.mtp_{name}" for name in ("num_layers", "loss_scaling_factor", "detach_heads")]
    assert values(imported(PREDICTION), *keys) == [1, 0.1, False]
    run = imported(f"{PREDICTION} {M}.mtp.detach_encoder=True {M}.mtp.mtp_loss_scaling_factor=0.3")
    assert values(run, *keys) == [1, 0.3, True]
    assert "does not reach the head here" in run.translated[f"{M}.mtp.enable_train"]
    factor = f"{A}.megatron.override_transformer_config.mtp_loss_scaling_factor=0.2"
    assert values(imported(f"{PREDICTION} {factor}"), *keys) == [1, 0.2, False]
    (tmp_path / "config.json").write_text('{"text_config": {"mtp_num_hidden_layers": 2}}')
    assert values(imported(f"{PREDICTION} {M}.path={tmp_path}"), *keys) == [2, 0.1, False]
    drafts = f"{M}.mtp.enable_rollout=True {M}.mtp.num_speculative_tokens=2"
    key = "generate_config.speculative_config"
    assert imported(f"{PREDICTION} {drafts}").get(key) == {"method": "mtp", "num_speculative_tokens": 2}
    assert imported(f"{PREDICTION} {drafts}", BASE.replace("vllm", "sglang")).get(key) == {
        "method": "mtp",
        "num_speculative_tokens": 3,
    }
    # FSDP trains none, and layers that are only kept do not train
    for options in (PREDICTION.replace("megatron", "fsdp"), f"model_engine=megatron {M}.mtp.enable=True"):
        run = imported(f"{options} {factor}")
        assert values(run, *keys, key) == [None] * 4 and f"{M}.mtp.enable" in run.without_effect
        # what is dropped is named
        name = factor.partition("=")[0]
        assert name not in run.translated and "reads megatron_training.mtp_loss_scaling_factor" in run.without_effect[name]


def test_a_quantized_rollout_has_the_format_that_verl_syncs_and_other_formats_are_refused_by_name(tmp_path: Path) -> None:
    corrected = {"importance_sampling"}  # by default here, and not there
    assert "importance_sampling would be token_truncate" in refusal(f"{R}.quantization=ascend")
    # verl calls npu_dynamic_mx_quant for the weights of an engine in "ascend"
    assert imported(f"{R}.quantization=ascend", accepted=corrected).get("generate_config.quantization") == "mxfp8"
    assert imported(f"{R}.quantization=null").get("generate_config.quantization") is None
    # verl itself takes fp8, torchao and ascend
    for name in ("fp8", "torchao", "int8", "mxfp8"):
        assert f"a rollout engine in {name}; ascend is available" in refusal(f"{R}.quantization={name}")
    assert "a rollout engine in w4afp8: int4 weights with activations in fp8" in refusal(f"{R}.quantization=w4afp8")
    vllm = f"+{R}.engine_kwargs.vllm."
    run = imported(f"{vllm}quantization=ascend {vllm}kv_cache_dtype=fp8", accepted=corrected)
    assert values(run, "generate_config.quantization", "generate_config.kv_cache_dtype") == ["mxfp8", "fp8"]
    assert "a rollout engine in fp8" in refusal(f"{vllm}quantization=fp8")


@pytest.mark.parametrize("eager", [None, True, False])
def test_graphs_are_the_choice_of_the_command_whatever_the_order_of_its_options(eager: bool | None) -> None:
    options = [f"{R}.quantization=ascend", *([] if eager is None else [f"{R}.enforce_eager={eager}"])]
    for words in (options, options[::-1]):
        run = imported(" ".join(words), accepted={"importance_sampling"})
        # false by default in verl
        assert values(run, "generate_config.quantization", "generate_config.enforce_eager") == ["mxfp8", bool(eager)]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}, "rollouts in fp8, which own has"),
        ({"quantization_config": {"quant_method": "mxfp8"}}, "rollouts in mxfp8, which own has"),
        ({"quantization_config": {}}, ""),
        ({}, ""),
    ],
)
def test_rollouts_in_the_format_of_a_quantized_folder_are_a_difference(tmp_path: Path, config: dict, message: str) -> None:
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    model = f"{M}.path={folder}"
    if not message:
        assert imported(model).get("generate_config.quantization") is None
        return
    assert f"weights would be float32 here, but is {message} in verl" in refusal(model)
    assert imported(model, accepted={"weights"}).get("generate_config.quantization") is None
    if "in fp8" in message:
        assert "two formats of the rollout engine: the folder is in fp8" in refusal(f"{model} {R}.quantization=ascend")


QUANTIZED = {"model.layers.0.self_attn.q_proj": "W8A8_MXFP8"}


@pytest.mark.parametrize(
    ("matrices", "message"),
    [
        (QUANTIZED | {"model.layers.0.self_attn.kv_b_proj": "FLOAT", "lm_head": "FLOAT"}, ""),
        (QUANTIZED | {"model.visual.blocks.0.attn.q_proj": "FLOAT", "model.layers.0.linear_attn.in_proj_a": "FLOAT"}, ""),
        ({"model.layers.0.self_attn.q_proj": "W8A8_DYNAMIC"}, "matrices in W8A8_DYNAMIC; W8A8_MXFP8 is available"),
        (
            QUANTIZED | {"model.layers.0.self_attn.o_proj": "FLOAT"},
            "1 matrices that stay in dtype there and are quantized here, such as model.layers.0.self_attn.o_proj",
        ),
        (
            QUANTIZED | {"model.layers.0.mlp.experts.1.w2": "FLOAT"},
            "1 matrices that stay in dtype there and are quantized here, such as model.layers.0.mlp.experts.1.w2",
        ),
        *(
            (QUANTIZED | {name: "W8A8_MXFP8"}, f"1 matrices that are quantized there and stay in dtype here, such as {name}")
            for name in ("lm_head", "model.layers.0.self_attn.kv_b_proj", "visual.blocks.0.attn.qkv", "model.embed_tokens")
        ),
        ({}, "a description without a matrix in W8A8_MXFP8"),
        ({"lm_head": "FLOAT"}, "a description without a matrix in W8A8_MXFP8"),
        ("none", "a rollout engine whose matrices a file describes: .* has no q.json"),
        ("[", "q.json is not valid JSON"),
        ("[]", "a rollout engine whose matrices a file describes"),
    ],
)
def test_a_description_of_quantized_matrices_is_read(tmp_path: Path, matrices: dict[str, str] | str, message: str) -> None:
    path = tmp_path / "q.json"
    if isinstance(matrices, dict):
        described = {f"{name}.weight": kind for name, kind in matrices.items()}
        path.write_text(json.dumps({"quant_method": "ascend"} | described))
    elif matrices != "none":
        path.write_text(matrices)
    options = f"{R}.quantization=ascend {R}.quantization_config_file={path}"
    if message:
        assert re.search(message, refusal(options))
    else:
        run = imported(options, accepted={"importance_sampling"})
        assert run.get("generate_config.quantization") == "mxfp8"
        assert "its matrices are those" in run.without_effect[f"{R}.quantization_config_file"]


def test_a_description_is_read_only_next_to_ascend(tmp_path: Path) -> None:
    # verl: `if quantization is not None and self.config.quantization_config_file is not None`
    for words in ("", f"{R}.quantization=null"):
        run = imported(f"{words} {R}.quantization_config_file={tmp_path}/absent.json")
        assert run.get("generate_config.quantization") is None
        assert run.without_effect[f"{R}.quantization_config_file"] == "it is read with quantization"
    for name in ("int8", "fp8"):
        words = f"{R}.quantization={name} {R}.quantization_config_file={tmp_path}/absent.json"
        assert f"a rollout engine in {name}; ascend is available" in refusal(words)


def test_an_unknown_option_may_be_left_out_by_the_user() -> None:
    run = imported("trainer.unheard_of=3", allow_unknown=True)
    assert "left out as --allow-unknown requests" in run.without_effect["trainer.unheard_of"]


def test_options_of_open_groups_are_translated_one_by_one() -> None:
    vllm = f"{R}.engine_kwargs.vllm"
    run = imported(
        f"+{vllm}.compilation_config.cudagraph_mode=FULL_DECODE_ONLY +{vllm}.block_size=32 "
        "+data.apply_chat_template_kwargs.enable_thinking=False"
    )
    assert run.get("generate_config.compilation_config") == {"cudagraph_mode": "FULL_DECODE_ONLY"}
    assert run.get("generate_config.engine_kwargs") == {"block_size": 32}
    assert run.get("megatron_training.enable_thinking") is False
    # one by one, or as a mapping
    kwargs = "data.apply_chat_template_kwargs"
    for words in (f"+{kwargs}.preserve_thinking=True +{kwargs}.model_identity=Bot",
                  f"{kwargs}='{{enable_thinking: true, preserve_thinking: true, model_identity: Bot}}'"):  # fmt: skip
        run = imported(words)
        expected = {"preserve_thinking": True, "model_identity": "Bot"}
        assert run.get("megatron_training.chat_template_kwargs") == expected, words
        assert run.get("megatron_training.enable_thinking") is (True if "enable" in words else None)
    assert "no option of verl" in refusal(f"+{A}.megatron.override_transformer_config.never_heard_of=1")


def test_the_recipe_of_dapo_filters_groups() -> None:
    recipe = BASE.replace("verl.trainer.main_ppo", "recipe.dapo.main_dapo")
    options = (
        "data.gen_batch_size=96 data.train_batch_size=32 algorithm.filter_groups.enable=True "
        "algorithm.filter_groups.metric=acc "
        "algorithm.filter_groups.max_num_gen_batches=10 reward_model.reward_manager=dapo "
        "reward_model.overlong_buffer.enable=True "
        "reward_model.overlong_buffer.len=64 trainer.total_training_steps=20 hydra.run.dir=out"
    )
    run = imported(options, recipe)
    keys = ("enable", "metric", "max_batches", "train_batch_size")
    assert values(run, *(f"rl_config.filter_groups_{key}" for key in keys)) == [True, "verl_gsm8k", 10, 32]
    assert values(run, "rl_config.overlong_buffer", "rl_config.rollout_max_tokens") == [64, 512]
    assert run.plans is not None
    for plan in run.plans:
        # 96 prompts are sampled, 32 train, in two steps of 16 prompts
        assert (plan.rollout_prompts, plan.step_samples, plan.steps_per_rollout, plan.total_steps) == (96, 128, 2, 40)
    assert "filtered by seq_reward" in refusal(options.replace("metric=acc", "metric=seq_reward"), recipe)


# --- the supervised trainer

SFT = (
    "torchrun --standalone --nnodes=1 --nproc_per_node=4 -m verl.trainer.sft_trainer data.train_files=chat/train.parquet "
    "data.train_batch_size=96 model.path=models/base optim.lr=1e-5 trainer.total_epochs=2 trainer.n_gpus_per_node=4"
)


def test_the_supervised_trainer_is_stage_sft() -> None:
    run = imported("optim.lr_scheduler_type=cosine optim.lr_warmup_steps_ratio=0.1 optim.min_lr_ratio=0.1", SFT, rows=1000)
    t = "megatron_training"
    # 10 batches of 96 a pass
    assert values(run, f"{t}.stage", f"{t}.global_batch_size", f"{t}.train_iters", f"{t}.seq_length") == ["sft", 96, 20, 1024]
    assert values(run, f"{t}.num_npus", f"{t}.data_path", f"{t}.seed") == [4, "chat/train", 1]
    assert run.plans is not None and run.plans[0].total_steps == 20 and run.plans[0].dp == 4
    assert "mindspeed-rl preprocess --input chat/train.parquet" in run.translated["data.train_files"]
    assert "OpenAIInstructionHandler" in run.translated["data.train_files"]


@pytest.mark.parametrize(("options", "shares"), [(f"{A}.use_kl_loss=true", True), (f"{A}.use_kl_loss=false", None)])
def test_training_of_an_adapter_continues_and_the_reference_is_its_base(options: str, shares: bool | None) -> None:
    run = imported(f"{M}.lora_adapter_path=sft/adapter {M}.lora_rank=32 {options}")
    t = "megatron_training"
    assert values(run, f"{t}.load", f"{t}.base_model", f"{t}.lora_r") == ["sft/adapter", "models/base", None]
    assert run.get("rl_config.share_backbone") is shares and len(values(run, f"{t}.lora_target_modules")[0]) == 4
    assert run.without_effect[f"{M}.lora_rank"] == "the adapter that training continues has its own"


def test_layers_and_dropout_are_those_of_an_adapter_that_is_here(tmp_path: Path) -> None:
    config = tmp_path / "adapter_config.json"
    config.write_text('{"r": 4, "target_modules": ["self_attn.q_proj", "o_proj"], "lora_dropout": 0.1}')
    run = imported(f"model.lora_adapter_path={tmp_path}", SFT, rows=1000)
    t = "megatron_training"
    assert values(run, f"{t}.lora_target_modules", f"{t}.lora_dropout") == [["linear_qkv", "linear_proj"], 0.1]
    config.write_text('{"target_modules": ["router"]}')
    assert "adapts router, no projection of attention or MLP" in refusal(f"model.lora_adapter_path={tmp_path}", SFT, rows=1000)
    config.write_text("{")
    assert "adapter_config.json is not JSON" in refusal(f"model.lora_adapter_path={tmp_path}", SFT, rows=1000)


def test_a_path_of_no_adapter_changes_nothing() -> None:
    run = imported(f"{M}.lora_adapter_path=null {M}.lora_rank=8")
    assert values(run, "megatron_training.load", "megatron_training.base_model") == ["models/base", None]
    assert run.get("megatron_training.lora_r") == 8


def test_adapters_have_their_rank_and_layers() -> None:
    run = imported("model.lora_rank=32 model.lora_alpha=16 model.target_modules=all-linear", SFT, rows=1000)
    t = "megatron_training"
    assert values(run, f"{t}.lora_r", f"{t}.lora_alpha") == [32, 16]
    assert run.get(f"{t}.lora_target_modules") == ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]


@pytest.mark.parametrize(
    ("script", "sentence"),
    [
        ("echo nothing", "there is no command of verl"),
        ("python3 -m verl.trainer.main_eval data.path=x", "not available here: evaluation"),
        (f"{BASE}\n{BASE}", "several commands of verl, in lines 1, 2"),
        ("python3 -m verl.trainer.main_ppo data.train_files=gsm8k.parquet", "names no model"),
        (f"python3 -m verl.trainer.main_ppo {M}.path=m", "names no data"),
        (f"if test_gpu; then {BASE}; fi", "decides whether the command"),
        (f"{BASE} trainer.nnodes=$NODES", "the value of NODES is not in the script"),
        (f"{BASE} $EXTRA", "the value of EXTRA is not in the script"),
    ],
)
def test_a_script_that_cannot_be_imported_is_one_clear_error(script: str, sentence: str) -> None:
    assert sentence in refusal("", script)


def test_keys_alone_are_a_command_of_main_ppo() -> None:
    keys = BASE.split(maxsplit=3)[3].replace(" ", "\n")
    assert imported("", keys).tree == imported().tree


def test_no_record_of_verl_has_an_empty_table() -> None:
    assert {name: len(table) > 300 for name, table in TABLES.items()} == {"ppo": True, "sft": True}


def test_a_teacher_of_verl_keeps_its_loss_its_devices_and_its_temperature() -> None:
    run = imported(
        "distillation.enabled=True distillation.n_gpus_per_node=4 distillation.nnodes=1 "
        "distillation.teacher_models.teacher_model.model_path=models/teacher "
        "distillation.distillation_loss.loss_mode=forward_kl_topk distillation.distillation_loss.topk=64 "
        "distillation.distillation_loss.use_task_rewards=False distillation.distillation_loss.loss_max_clamp=10.0 "
        f"{R}.temperature=0.7"
    )
    key = "rl_config.distillation"
    names = ("enabled", "teacher_models", "loss_mode", "topk", "use_task_rewards", "loss_max_clamp", "teacher_temperature")
    expected = [True, ["models/teacher"], "forward_kl_topk", 64, False, 10.0, 1.0]
    assert values(run, *(f"{key}.{name}" for name in names)) == expected
    assert run.get("rl_config.teacher_resource.num_npus") == 4


def test_named_teachers_of_verl_judge_the_rows_of_their_keys() -> None:
    def name(teacher: str, key: str) -> str:
        prefix = f"+distillation.teacher_models.{teacher}"
        return f"{prefix}.key={key} {prefix}.model_path=models/{teacher} {prefix}.num_replicas=2 {prefix}.inference.name=vllm "

    front = "distillation.enabled=True distillation.n_gpus_per_node=4 distillation.nnodes=1 "
    run = imported(f"{front}{name('one', 'openai/gsm8k')}{name('two', 'math_dapo')}")
    keys = [f"rl_config.distillation.{key}" for key in ("teacher_models", "teacher_key", "teacher_keys")]
    assert values(run, *keys) == [["models/one", "models/two"], "data_source", ["openai/gsm8k", "math_dapo"]]
    assert run.get("megatron_training.dataset_additional_keys") == ["labels", "data_source"]
    # an entry of another name takes the place of teacher_model
    alone = imported(f"{front}distillation.teacher_models.teacher_model.model_path=old {name('one', 'k')}")
    assert values(alone, *keys) == [["models/one"], None, None]
    assert "a key of its own" in refusal(f"{front}{name('one', 'k')}{name('two', 'k')}")
    assert "model_path is missing" in refusal(front)


def test_a_run_of_supervised_verl_saves_where_verl_does() -> None:
    command = (
        "torchrun --nproc_per_node=2 -m verl.trainer.sft_trainer data.train_files=/d/a.parquet model.path=/m "
        "trainer.total_training_steps=4 trainer.save_freq=2 "
    )
    settings = ImportSettings(rewards=REWARDS)
    for words, folder in (
        ("", "checkpoints/gsm8k-sft/test"),
        ("trainer.project_name=p trainer.experiment_name=e", "checkpoints/p/e"),
        ("trainer.default_local_dir=/x", "/x"),
        ("trainer.save_freq=-1", None),
    ):
        assert import_command(PROJECT, command + words, settings).get("megatron_training.save") == folder


def test_a_layout_that_does_not_fit_is_named_with_what_would_fit(tmp_path: Path) -> None:
    # 32 billion parameters: the bfloat16 weights have 61 GiB, on each of 8 devices without a split
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 5120, "intermediate_size": 25600,
        "num_hidden_layers": 64, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
        "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False,
        "hidden_act": "silu", "attention_bias": False, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    run = imported("model_engine=megatron", BASE.replace("models/base", str(tmp_path)))
    assert run.memory.startswith("The layout does not fit") and "tensor_model_parallel_size" in run.memory
    assert "# The layout does not fit" in run.render("x") and run.memory in run.summarize()
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2, "hidden_size": 512}))
    assert not imported(base=BASE.replace("models/base", str(tmp_path))).memory


# --- the engine that trains


def engine_of(run: Import) -> tuple[object, str]:
    """Return the engine of the run file, and the reason in the plan where it is not the source's."""
    return run.get("megatron_training.engine"), run.reasons.get("engine", "")


@pytest.mark.parametrize("strategy", ["", f"{A}.strategy=fsdp", f"{A}.strategy=fsdp2", "model_engine=dp"])
def test_a_dense_model_under_fsdp_keeps_its_engine(strategy: str) -> None:
    run = imported(f"{strategy} {A}.fsdp_config.fsdp_size=4 {A}.fsdp_config.param_offload=True")
    assert engine_of(run) == ("fsdp", "")
    assert run.plans is not None
    assert [plan.engine for plan in run.plans] == ["fsdp", "fsdp"]
    # gradient checkpointing is on in verl, and whole layers are what the engine computes again
    assert run.get("megatron_training.recompute_granularity") == "full"
    assert run.get("generate_config.offload_train_param") is True


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (f"{A}.ulysses_sequence_parallel_size=2 {M}.path=Qwen/Qwen3-Next-80B-A3B-Instruct", "layers that compute whole rows"),
        (f"{A}.strategy=fsdp_turbo", "fsdp_turbo spreads experts or sequences"),
        (f"{A}.strategy=veomni", "veomni spreads experts or sequences"),
        (f"{M}.lora_rank=8 {M}.path=Qwen/Qwen3-30B-A3B", "Qwen3-30B-A3B has experts, whose layers are"),
        (f"{M}.path=/m/llava-1.5-7b-hf", "by its name /m/llava-1.5-7b-hf has images of another kind than Qwen's"),
    ],
)
def test_what_the_fsdp_engine_lacks_is_megatrons_with_the_reason_in_the_plan(changes: str, reason: str) -> None:
    run = imported(changes)
    engine, row = engine_of(run)
    assert engine is None and row.startswith("megatron, as ") and reason in row
    assert reason in run.summarize()


def test_images_stacked_experts_and_shared_prompts_keep_the_engine() -> None:
    images = f"{M}.path=Qwen/Qwen2.5-VL-7B-Instruct {A}.freeze_vision_tower=True"
    for changes in (images, f"{M}.path=/m/gpt-oss-20b", f"{A}.use_prefix_grouper=True"):
        assert engine_of(imported(changes)) == ("fsdp", ""), changes


def test_names_of_dense_models_are_no_experts() -> None:
    for name in ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", "Qwen/Qwen3-8B-Base", "Qwen/Qwen2.5-Math-7B", "gemma-2-2b-it"):
        assert engine_of(imported(f"{M}.path={name}"))[0] == "fsdp", name


def test_the_shape_of_a_model_that_is_here_decides(tmp_path: Path) -> None:
    shape = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_hidden_layers": 2, "hidden_size": 64}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128, "num_experts": 8}
    shape |= {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "intermediate_size": 32, "rms_norm_eps": 1e-6}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    assert engine_of(imported(f"{M}.path={tmp_path}")) == ("fsdp", "")
    named = tmp_path / "llava-of-ours"  # whatever its name says
    named.mkdir()
    (named / "config.json").write_text(json.dumps(shape))
    assert engine_of(imported(f"{M}.path={named}"))[0] == "fsdp"


@pytest.mark.parametrize("option", [f"{M}.trust_remote_code", "data.trust_remote_code"])
def test_code_of_a_model_folder_stays_off_and_the_keys_are_named(option: str) -> None:
    run = imported(f"{option}=True")
    assert "set megatron_training.trust_remote_code (engine: fsdp) and generate_config" in run.same[option]
    written = imported("")
    note_remote_code(written, option, "1")  # as text, as some files have it
    assert written.same[option] == run.same[option]
    off = imported(f"{option}=False")
    assert off.without_effect[option] == "code of a model folder does not run"
    for group in ("megatron_training", "generate_config"):
        assert run.get(f"{group}.trust_remote_code") is off.get(f"{group}.trust_remote_code") is None


def test_offload_and_precision_of_fsdp_go_key_by_key() -> None:
    run = imported(f"{A}.strategy=fsdp2 {A}.fsdp_config.offload_policy=True")
    assert run.get("megatron_training.swap_optimizer") is True and run.get("megatron_training.offload_gradients") is True
    # FSDP1 does not read it
    assert imported(f"{A}.strategy=fsdp {A}.fsdp_config.offload_policy=True").get("megatron_training.swap_optimizer") is None
    precision = f"+{A}.fsdp_config.mixed_precision"
    assert imported(f"{precision}.param_dtype=fp32 {R}.dtype=float32").get("megatron_training.bf16") is False
    assert "trainer and rollout engine compute in the same format" in refusal(f"{precision}.param_dtype=fp32")
    assert imported(f"{precision}.param_dtype=bf16 {precision}.reduce_dtype=fp32").get("megatron_training.bf16") is True
    assert "fp16" in refusal(f"{precision}.param_dtype=fp16")


def test_weights_in_bfloat16_are_a_difference_by_name() -> None:
    # model_dtype is the format of the trained weights, and of AdamW's moments with them
    assert "weights would be float32 here, but is bfloat16 in verl" in refusal(f"{A}.fsdp_config.model_dtype=bfloat16")
    run = imported(f"{A}.fsdp_config.model_dtype=bf16", accepted=frozenset({"weights"}))
    assert engine_of(run)[0] == "fsdp"
    critic = "critic.fsdp.model_dtype=bf16 critic.model.path=/m/critic critic.ppo_mini_batch_size=16"
    assert imported(critic).plans is not None  # there is none
    assert "weights would be float32" in refusal(f"{critic} algorithm.adv_estimator=gae")
    assert imported(f"{A}.fsdp_config.model_dtype=fp32 actor_rollout_ref.ref.fsdp_config.model_dtype=bf16").plans is not None


def test_the_supervised_trainer_keeps_fsdp_too() -> None:
    base = "torchrun --nproc_per_node=4 -m verl.trainer.sft_trainer data.train_files=/d/t.parquet model.path=/m/base "
    assert engine_of(imported("", base)) == ("fsdp", "")
    run = imported("engine.ulysses_sequence_parallel_size=2 engine.fsdp_size=2", base)
    assert engine_of(run) == ("fsdp", "")
    assert [run.get(f"megatron_training.{name}") for name in ("context_parallel_size", "fsdp_size")] == [2, 2]
    assert engine_of(imported("engine=megatron", base)) == (None, "")


def test_ulysses_adapters_and_groups_of_copies_keep_fsdp() -> None:
    run = imported(f"{A}.ulysses_sequence_parallel_size=2 {A}.fsdp_config.fsdp_size=2 {M}.lora_rank=8 {M}.lora_alpha=16")
    assert engine_of(run) == ("fsdp", "")
    keys = ("context_parallel_size", "fsdp_size", "lora_r", "lora_alpha")
    assert [run.get(f"megatron_training.{name}") for name in keys] == [2, 2, 8, 16]
    for size in (-1, 8, 1024):
        assert imported(f"{A}.fsdp_config.fsdp_size={size}").get("megatron_training.fsdp_size") is None


def test_adapters_of_the_vision_tower_are_refused_unless_they_are_left_out() -> None:
    images = f"{M}.path=Qwen/Qwen2.5-VL-7B-Instruct {M}.lora_rank=8 {M}.target_modules=all-linear"
    assert "adapters in the vision tower" in refusal(images)
    assert imported(f"{images} {M}.exclude_modules='.*visual.*'").get("megatron_training.freeze_vit") is True
    assert "projections that adapters leave out" in refusal(f"{M}.lora_rank=8 {M}.exclude_modules='.*lm_head.*'")


# --- modes of the newer trainer

V1 = "trainer.v1.trainer_mode"
SEPARATE = (
    f"{V1}=separate_async trainer.v1.separate_async.parameter_sync_step=4 {R}.nnodes=1 {R}.n_gpus_per_node=4 "
    "algorithm.rollout_correction.bypass_mode=True"
)


def test_separate_async_is_trainer_mode_async() -> None:
    # verl: a step has 4 updates of 16 prompts; a batch is started ahead with the one of the step
    run = imported(f"{SEPARATE} trainer.total_training_steps=10 trainer.save_freq=5")
    names = "trainer_mode parameter_sync_step max_off_policy_threshold partial_rollout mini_batch_size".split()
    assert values(run, *(f"rl_config.{name}" for name in names)) == ["async", 4, 1.0, True, 16]
    counts = ("global_batch_size", "train_iters", "save_interval")
    assert values(run, *(f"megatron_training.{name}" for name in counts)) == [16, 40, 20]
    assert run.get("rl_config.rollout_resource.num_npus") == 4
    # 430,080 rows are 6,720 steps of 64 prompts
    run = imported(f"{SEPARATE} trainer.total_epochs=1", rows=64 * 7 + 63)
    assert run.get("megatron_training.train_iters") == 28
    assert "data.train_batch_size is 32, but separate_async needs" in refusal(f"{SEPARATE} data.train_batch_size=32")
    # the old policy is the one of the last sync there
    decoupled = SEPARATE.replace("bypass_mode=True", "bypass_mode=False")
    assert "old_policy would be actor here, but is synced actor in verl" in refusal(decoupled)
    ahead = imported(f"{SEPARATE} trainer.v1.separate_async.num_warmup_batches=3 trainer.v1.sampler.max_off_policy_threshold=3")
    assert ahead.get("rl_config.max_off_policy_threshold") == 2.0


def test_colocate_async_continues_responses_in_the_next_rollout() -> None:
    run = imported(f"{V1}=colocate_async")
    names = ("trainer_mode", "partial_rollout_max_split", "over_sample_rate", "rollout_resource")
    assert values(run, *(f"rl_config.{name}" for name in names)) == [None, 7, 1.0, None]


def test_modes_without_a_counterpart_name_their_parameter() -> None:
    assert "the mode other; sync, colocate_async, separate_async are" in refusal(f"{V1}=other")
    switch = "trainer.v1.separate_async.hybrid_rollout.enable_switch"
    assert "trainers' devices that generate, with several steps" in refusal(f"{SEPARATE} {switch}=True")
    each = SEPARATE.replace("sync_step=4", "sync_step=1") + " data.train_batch_size=16"
    assert imported(f"{each} {switch}=True").get("rl_config.elastic_rollout") is True
    assert imported(f"{each} {switch}=False").get("rl_config.elastic_rollout") is None
    assert "filtered while rollouts run ahead" in refusal(f"{SEPARATE} algorithm.filter_groups.enable=True")
    assert imported(f"trainer.use_v1=False {V1}=separate_async").get("rl_config.trainer_mode") is None


def test_a_condition_on_a_variable_asks_for_it() -> None:
    script = f'name=$(python3 q.py)\nif [ "$name" == "cuda" ]; then\n{BASE}\nelse\n{BASE} trainer.total_epochs=2\nfi'
    with pytest.raises(ConfigError, match=r"lines 3, 5; the condition of line 2 \(--set name=VALUE\) decides which one runs"):
        import_command(PROJECT, script, ImportSettings(rewards=REWARDS))
    run = import_command(PROJECT, script, ImportSettings(rewards=REWARDS, variables={"name": "npu"}))
    assert run.get("megatron_training.train_epochs") == 2
