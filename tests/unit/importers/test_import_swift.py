"""Commands of ms-swift as run files: they train what ms-swift trains, or are refused by the name of the feature."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from mindspeed_rl.config import ConfigError
from mindspeed_rl.importers.importer import import_command
from mindspeed_rl.importers.result import Import, ImportSettings
from mindspeed_rl.importers.swift import PROJECT
from mindspeed_rl.rewards import REWARDS

GRPO = (
    "NPROC_PER_NODE=8 swift rlhf --rlhf_type grpo --model models/base --tuner_type full --dataset prompts.jsonl "
    "--reward_funcs accuracy --use_vllm true --vllm_mode colocate"
)
MEGATRON = (
    "NPROC_PER_NODE=8 megatron rlhf --rlhf_type grpo --model models/base --dataset prompts.jsonl --reward_funcs accuracy "
    "--micro_batch_size 1 --global_batch_size 64 --vllm_mode colocate --num_train_epochs 1"
)


def imported(changes: str = "", base: str = GRPO, **settings) -> Import:
    return import_command(PROJECT, f"{base} {changes}", ImportSettings(rewards=REWARDS, **settings))


def test_an_empty_word_after_an_option_is_its_value() -> None:
    assert imported('--system "" --seed 3').tree["megatron_training"].get("system_prompt") is None
    assert imported('--seed 3 ""').get("megatron_training.seed") == 3
    with pytest.raises(ConfigError, match="the chat template of this model writes its own"):
        imported('--system ""', GRPO.replace("models/base", "Qwen/Qwen2.5-7B-Instruct"))


def test_a_quantized_rollout_is_quantized_from_the_trained_weights_and_other_formats_are_refused_by_name() -> None:
    for name in ("int8", "mxfp8"):
        run = imported(f"--vllm_quantization {name}", accepted={"importance_sampling"})
        assert run.get("generate_config.quantization") == name
    assert "a rollout engine in fp8; int8, ascend and mxfp8 are available" in refusal("--vllm_quantization fp8")
    assert "activations in dtype" in refusal("--vllm_quantization experts_int8")
    arguments = json.dumps({"quantization": "ascend", "kv_cache_dtype": "fp8", "scheduling_policy": "fcfs"})
    keys = imported(f"--vllm_engine_kwargs '{arguments}'", accepted={"importance_sampling"}).tree["generate_config"]
    assert [keys[name] for name in ("quantization", "kv_cache_dtype", "engine_kwargs")] == [
        "int8",
        "fp8",
        {"scheduling_policy": "fcfs"},
    ]
    assert "a rollout engine in awq" in refusal("""--vllm_engine_kwargs '{"quantization": "awq"}'""")


def refusal(changes: str, base: str = GRPO, **settings) -> str:
    with pytest.raises(ConfigError) as caught:
        imported(changes, base, **settings)
    return "\n".join(caught.value.errors)


def values(run: Import, *paths: str) -> list[object]:
    return [run.get(path) for path in paths]


def test_thinking_of_the_template_is_a_key_of_rollouts_and_an_option_of_preprocessing() -> None:
    run = imported("--enable_thinking false --preserve_thinking true")
    assert values(run, "megatron_training.enable_thinking", "megatron_training.chat_template_kwargs") == [
        False,
        {"preserve_thinking": True},
    ]
    sft = "NPROC_PER_NODE=8 megatron sft --model models/base --dataset rows.jsonl --micro_batch_size 1 --global_batch_size 64"
    run = imported("--num_train_epochs 1 --enable_thinking false --preserve_thinking true", base=sft)
    assert "enable_thinking" not in run.tree["megatron_training"]
    note = "\n".join([*run.translated.values(), *run.added.values()])
    assert """--prompt-type hf --enable-thinking false --chat-template-kwargs '{"preserve_thinking": true}'""" in note


# --- what changed silently before


@pytest.mark.parametrize(
    ("options", "feature"),
    [
        ("--teacher_adapters models/teacher", "a teacher with adapters"),
        ("--tuner_type lora --adapters a b", "several adapters at once"),
        ("--tuner_type full --adapters a", "adapters next to --tuner_type full"),
        ("--tuner_type lora --ref_adapters a", "adapters only of the reference"),
        ("--mcore_adapter a", "--adapters takes a PEFT folder"),
        ("--chord_sft_dataset a.jsonl", "CHORD"),
        ("--reward_funcs dummy", "no file in --external_plugins has it"),
        ("--model OpenGVLab/InternVL3-8B", "models of images but Qwen2.5-VL and Qwen3-VL"),
        ("--model Qwen/Qwen2.5-Omni-7B", "data with video or audio"),
        ("--reward_model models/a models/b", "several reward models"),
        ("--advantage_reweight rlsd", "RLSD"),
        ("--fp16 true", "fp16"),
        ("--multi_turn_scheduler thinking_tips_scheduler", "scheduler thinking_tips_scheduler; math_tip_trick is available"),
        ("--advantage_estimator rloo --scale_rewards group", "divided by the spread of the group"),
        ("--tuner_type full --mtp_shared_weights true", "one prediction layer that predicts several tokens"),
        ("--tuner_type full --mtp_decoder_input_detach true", "leaves out the embedding"),
        ("--tuner_type adalora", "lora and full are available"),
        ("--dataset org/data:hard#5", "a subset of a dataset"),
        ("--quantum_leap 3", "no option of ms-swift 4.6.0"),
        ("--num_generation 8", "did you mean --num_generations?"),
    ],
)
def test_what_is_not_available_is_refused_by_name(options: str, feature: str) -> None:
    assert feature in refusal(options)


def test_a_model_without_its_tower_is_one_here_too() -> None:
    assert imported("--language_model_only true").get("megatron_training.language_model_only") is True
    assert not imported("--language_model_only false").get("megatron_training.language_model_only")


def test_a_feature_that_is_off_is_no_feature() -> None:
    run = imported("--teacher_model None --async_generate false --dynamic_sample false --fp16 false --sync_ref_model false")
    assert run.get("rl_config.dynamic_sample") is False


def test_a_plug_in_file_and_its_functions_are_those_of_the_run() -> None:
    run = imported("--external_plugins my/plugin.py --reward_funcs dummy format --reward_weights 0.5 2")
    assert values(run, "rl_config.external_plugins", "rl_config.reward_funcs", "rl_config.reward_weights") == [
        ["my/plugin.py"],
        ["dummy", "think_answer_alone"],
        [0.5, 2],
    ]


def test_an_environment_and_a_scheduler_of_a_plug_in_file_are_named() -> None:
    bare = GRPO.replace("--reward_funcs accuracy", "")
    run = imported("--external_plugins p.py --gym_env lake --multi_turn_scheduler gym_scheduler --max_turns 4", bare)
    paths = ("environment", "multi_turn_enable", "rule_reward", "max_turns", "multi_turn_scheduler")
    assert values(run, *(f"rl_config.{name}" for name in paths)) == ["lake", True, False, 4, None]
    run = imported("--external_plugins p.py --multi_turn_scheduler tools --max_turns 2")
    assert run.get("rl_config.multi_turn_scheduler") == "tools"
    assert run.plans is not None and [plan.response_length for plan in run.plans] == [1024, 1024]
    assert "gym_scheduler" in refusal("--use_gym_env true", bare)


def test_a_generative_reward_model_is_the_judge_at_an_address_that_is_set() -> None:
    options = "--reward_funcs accuracy --reward_model models/judge --reward_model_plugin genrm --reward_weights 1 0.25"
    run = imported(options, variables={"JUDGE_URL": "http://host:1/v1"})
    assert values(run, "rl_config.judge_url", "rl_config.judge_model", "rl_config.judge_weight", "rl_config.reward_model") == [
        "http://host:1/v1",
        "models/judge",
        0.25,
        None,
    ]
    served = imported(options)  # without an address the run serves it
    assert values(served, "rl_config.judge_url", "rl_config.judge_model") == [None, "models/judge"]


def test_experts_stay_spread_and_have_no_balancing_loss() -> None:
    run = imported(
        "--model Qwen/Qwen3-30B-A3B --tensor_model_parallel_size 2 --expert_model_parallel_size 4 --router_replay_mode R3",
        MEGATRON,
    )
    assert values(run, "megatron_training.expert_model_parallel_size", "megatron_training.moe_aux_loss_coeff") == [4, 0.0]
    assert run.get("rl_config.router_replay.mode") == "R3"
    assert run.plans is not None and [plan.ep for plan in run.plans] == [4, 4]


def test_steps_there_are_optimizer_steps_and_iterations_here_are_rollouts() -> None:
    """4,000 steps, four of them on a rollout, are 1,000 rollouts; saved every 200 steps is every 50 rollouts."""
    run = imported(
        "--max_steps 4000 --per_device_train_batch_size 4 --gradient_accumulation_steps 2 --steps_per_generation 8 "
        "--save_steps 200"
    )
    assert values(run, "megatron_training.train_iters", "megatron_training.save_interval") == [1000, 50]
    assert run.plans is not None
    for plan in run.plans:
        # 4 x 8 devices x 2 completions of a step; 8 passes of 32 completions are one rollout, of 8 generations a prompt
        assert (plan.step_samples, plan.rollout_completions, plan.rollout_prompts) == (64, 256, 32)
        assert (plan.steps_per_rollout, plan.total_steps) == (4, 4000)


def test_one_step_on_policy_stays_one_where_prompts_do_not_divide_by_the_devices() -> None:
    base = GRPO.replace("NPROC_PER_NODE=8", "NPROC_PER_NODE=7")
    run = imported("--num_generations 14 --gradient_accumulation_steps 4 --max_steps 10", base)
    assert run.plans is not None
    for plan in run.plans:
        assert (plan.rollout_prompts, plan.rollout_completions, plan.steps_per_rollout, plan.dp) == (2, 28, 1, 7)


def test_several_rollouts_of_one_step_are_one_rollout_here() -> None:
    run = imported("--gradient_accumulation_steps 4 --steps_per_generation 1 --max_steps 3")
    assert run.plans is not None
    assert [(plan.rollout_completions, plan.steps_per_rollout, plan.total_steps) for plan in run.plans] == [(32, 1, 3)] * 2


@pytest.mark.parametrize(("written", "here"), [("none", "none"), ("group", "group"), ("batch", "batch"), ("false", "none")])
def test_the_spread_of_rewards_is_as_written(written: str, here: str) -> None:
    assert imported(f"--scale_rewards {written}").get("rl_config.scale_rewards") == here


def test_the_defaults_are_those_of_ms_swift_and_not_ours() -> None:
    run = imported()
    paths = {
        "rl_config.n_samples_per_prompt": 8,
        "rl_config.init_kl_coef": 0.04,
        "rl_config.adv_epsilon": 1e-4,
        "megatron_training.adam_beta2": 0.95,
        "megatron_training.weight_decay": 0.1,
        "megatron_training.train_epochs": 3.0,
        "megatron_training.save_interval": 500,
        "actor_config.lr": 1e-5,
        "generate_config.sampling_config.temperature": 0.9,
        "generate_config.sampling_config.max_tokens": 512,
        "run_dir": "output/base",
        "actor_config.save": "output/base/checkpoints",
    }
    assert values(run, *paths) == list(paths.values())
    adapters = imported("--tuner_type lora")
    assert values(adapters, "actor_config.lr", "megatron_training.lora_r", "megatron_training.lora_dropout") == [1e-4, 8, 0.05]
    assert adapters.get("rl_config.dropout_in_update") is True


def test_the_learning_rate_is_that_of_transformers() -> None:
    """Cosine over 100 steps after a warm-up of 10: at steps 0, 10 and 99."""
    run = imported("--max_steps 100 --warmup_ratio 0.1 --learning_rate 2e-6")
    assert run.plans is not None
    last = 2e-6 * (1 + math.cos(math.pi * 89 / 90)) / 2
    for plan in run.plans:
        assert [plan.lr_first, plan.lr_10, plan.lr_last] == pytest.approx([0.0, 2e-6, last], rel=1e-6)


def test_megatron_swift_counts_completions_and_ends_where_its_steps_end() -> None:
    """1,029 prompts of 8 responses, in whole passes of 8 devices: 1,024 x 8 / 64 steps, two of them on a rollout."""
    run = imported("--dataset org/data#1029 --steps_per_generation 2", MEGATRON)
    assert run.plans is not None
    assert [(plan.total_steps, plan.steps_per_rollout) for plan in run.plans] == [(128, 2)] * 2
    assert run.get("megatron_training.train_iters") == 64
    # 1,000 prompts are 125 steps, which end inside a rollout there
    sentence = refusal("--dataset org/data#1000 --steps_per_generation 2", MEGATRON)
    assert "total_steps would be 126 here, but is 125 in ms-swift; --accept total_steps takes the difference" in sentence


def test_servers_of_the_script_are_the_runs_own_and_ahead_of_the_update_is_one_step_off() -> None:
    script = (
        "CUDA_VISIBLE_DEVICES=7 swift rollout --model models/base\n"
        "CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6 NPROC_PER_NODE=7 swift rlhf --rlhf_type grpo --model models/base --tuner_type full "
        "--dataset prompts.jsonl --reward_funcs accuracy --use_vllm true --vllm_mode server --vllm_server_host 127.0.0.1 "
        "--num_generations 7 --async_generate true --sleep_level 1"
    )
    run = imported(base=script)
    paths = ("rl_config.actor_resource.num_npus", "rl_config.rollout_resource.num_npus", "rl_config.trainer_mode")
    assert values(run, *paths) == [7, 1, "one_step_off"]
    assert "gives its memory back" in run.without_effect["--sleep_level"]
    elsewhere = imported("--vllm_mode server --vllm_server_host a b --vllm_server_port 8001 8002")
    assert values(elsewhere, "generate_config.vllm_server_host", "generate_config.vllm_server_port") == [
        ["a", "b"],
        [8001, 8002],
    ]


# --- other stages


def test_dpo_has_its_loss_and_its_batch() -> None:
    base = (
        "NPROC_PER_NODE=4 swift rlhf --rlhf_type dpo --model models/base --tuner_type full --dataset pairs.jsonl --max_steps 50"
    )
    run = imported("--per_device_train_batch_size 2 --loss_type hinge --beta 0.3 --label_smoothing 0.1", base)
    paths = ("stage", "dpo_loss_type", "dpo_beta", "dpo_label_smoothing", "global_batch_size", "train_iters")
    # no accumulation is written: 16 / 2 / 4 passes, so that a step has 16 pairs
    assert values(run, *(f"megatron_training.{name}" for name in paths)) == ["dpo", "hinge", 0.3, 0.1, 16, 50]
    sentence = "answer_term would be mean of the tokens of a pair here, but is mean of the tokens of a pass in ms-swift"
    assert sentence in refusal("--per_device_train_batch_size 2 --rpo_alpha 0.1", base)
    accepted = imported("--per_device_train_batch_size 2 --rpo_alpha 0.1", base, accepted=frozenset({"answer_term"}))
    assert accepted.get("megatron_training.pref_ftx") == 0.1
    assert imported("--per_device_train_batch_size 1 --rpo_alpha 0.1", base).get("megatron_training.pref_ftx") == 0.1


def test_simpo_is_its_margin_over_beta() -> None:
    base = (
        "swift rlhf --rlhf_type simpo --model models/base --dataset pairs.jsonl --max_steps 5 --simpo_gamma 1.5 --cpo_alpha 0"
    )
    run = imported(base=base)
    assert values(run, "megatron_training.simpo_beta", "megatron_training.gamma_beta_ratio") == [2.0, 0.75]


def test_cpo_and_orpo_are_stages_without_a_reference() -> None:
    base = "swift rlhf --model models/base --dataset pairs.jsonl --max_steps 5"
    cpo = imported("--rlhf_type cpo --beta 0.3 --cpo_alpha 0.7", base)
    assert values(cpo, *(f"megatron_training.{name}" for name in ("stage", "cpo_beta", "cpo_alpha"))) == ["cpo", 0.3, 0.7]
    assert values(imported("--rlhf_type cpo", base), "megatron_training.cpo_beta", "megatron_training.cpo_alpha") == [0.1, 1.0]
    orpo = imported("--rlhf_type orpo --beta 0.4", base)
    assert values(orpo, "megatron_training.stage", "megatron_training.orpo_lambda") == ["orpo", 0.4]
    several = "--per_device_train_batch_size 2"
    assert "is mean of the tokens of a pass in ms-swift" in refusal(f"--rlhf_type orpo {several}", base)
    assert "is mean of the tokens of a pass in ms-swift" in refusal(f"--rlhf_type cpo {several}", base)
    assert imported(f"--rlhf_type cpo --cpo_alpha 0 {several}", base).get("megatron_training.cpo_alpha") == 0.0
    assert "--loss_type" in refusal("--rlhf_type cpo --loss_type hinge", base)
    assert "--label_smoothing" in refusal("--rlhf_type cpo --label_smoothing 0.1", base)


def test_states_that_the_host_updates_are_a_share_where_they_are_on() -> None:
    key = "megatron_training.optimizer_offload_fraction"
    base = "megatron sft --model models/base --dataset rows.jsonl --train_iters 5"
    cases = {
        "--optimizer_cpu_offload true": 1.0,
        "--optimizer_cpu_offload true --optimizer_offload_fraction 0.4": 0.4,
        "--optimizer_offload_fraction 0.4": None,
        "--optimizer_cpu_offload false": None,
    }
    for words, expected in cases.items():
        assert imported(words, base).get(key) == expected


def test_muon_has_the_defaults_of_megatron_swift() -> None:
    base = "megatron sft --model models/base --dataset rows.jsonl --train_iters 5"
    names = ("optimizer", "muon_momentum", "muon_tp_mode", "muon_scale_mode", "muon_num_ns_steps")
    run = imported("--optimizer muon --muon_scale_mode unit_rms_norm --muon_num_ns_steps 7", base)
    assert values(run, *(f"megatron_training.{name}" for name in names)) == ["muon", 0.9, "blockwise", "unit_rms_norm", 7]
    written = imported("--optimizer muon --muon_momentum 0.95 --muon_tp_mode duplicated", base)
    assert values(written, *(f"megatron_training.{name}" for name in names[:3])) == ["muon", 0.95, "duplicated"]
    assert "muon_lr" in refusal("--optimizer muon --muon_lr 1e-3", base)
    assert "--optimizer" in refusal("--optimizer sgd", base)


@pytest.mark.parametrize(
    ("written", "here"),
    [
        ("token_truncate", "token_truncate"),
        ("sequence_truncate", "geometric_truncate"),
        ("sequence_mask", "token_geometric_mask"),
    ],
)
def test_a_correction_of_sequences_is_by_their_geometric_mean(written: str, here: str) -> None:
    run = imported(f"--rollout_importance_sampling_mode {written} --rollout_importance_sampling_threshold 3 --beta 0")
    assert run.get("rl_config.rollout_importance_sampling_mode") == here
    assert run.plans is not None and [plan.importance_sampling for plan in run.plans] == [f"{here} 3"] * 2
    assert "weighs the KL too" in refusal(f"--rollout_importance_sampling_mode {written}")


@pytest.mark.parametrize(
    ("options", "base", "average"),
    [
        ("--loss_type bnpo", GRPO, "token of a micro-batch"),
        ("--loss_type dapo --steps_per_generation 2", GRPO, "token of the rollout"),
    ],
)
def test_an_average_that_is_not_of_a_step_is_a_difference_that_is_named(options: str, base: str, average: str) -> None:
    sentence = refusal(f"{options} --max_steps 4", base)
    assert f"aggregation would be token here, but is {average} in ms-swift; --accept aggregation" in sentence
    assert imported(f"{options} --max_steps 4", base, accepted=frozenset({"aggregation"})).plans is not None


def test_megatron_swift_averages_over_a_step() -> None:
    run = imported("--loss_type dapo --steps_per_generation 2 --dataset org/data#1024", MEGATRON)
    assert run.plans is not None and [plan.aggregation for plan in run.plans] == ["token", "token"]


def test_ppo_has_a_critic_from_the_reward_model_and_the_kl_in_the_reward() -> None:
    base = (
        "NPROC_PER_NODE=4 swift rlhf --rlhf_type ppo --model models/base --reward_model models/reward --tuner_type full "
        "--dataset prompts.jsonl#640 --num_train_epochs 1 --per_device_train_batch_size 4 --gradient_accumulation_steps 2 "
        "--num_ppo_epochs 2 --num_mini_batches 2 --missing_eos_penalty 1.0 --split_dataset_ratio 0.1"
    )
    run = imported(base=base, accepted=frozenset({"aggregation"}))
    paths = ("critic_config.load", "rl_config.adv_estimator", "rl_config.use_kl_in_reward", "rl_config.missing_eos_penalty")
    assert values(run, *paths) == ["models/reward", "gae", True, 1.0]
    data = ("megatron_training.data_path", "megatron_training.eval_data_path", "rl_config.rule_reward")
    assert values(run, *data) == ["prompts.jsonl[:576]", "prompts.jsonl[576:640]", False]
    assert run.plans is not None
    for plan in run.plans:
        # 4 x 2 x 4 devices x 2 parts: 64 prompts a rollout, twice two steps of 32 on it; 576 prompts are 9 rollouts
        assert (plan.rollout_prompts, plan.step_samples, plan.steps_per_rollout, plan.total_steps) == (64, 32, 4, 36)


def test_sft_of_megatron_and_of_a_file_of_options(tmp_path: Path) -> None:
    base = (
        "NPROC_PER_NODE=4 megatron sft --model models/base --dataset a.jsonl#900 b.jsonl#100 --tensor_model_parallel_size 2 "
        "--global_batch_size 8 --num_train_epochs 2 --split_dataset_ratio 0.2 --lr 1e-5 --min_lr 1e-6 "
        "--lr_warmup_fraction 0.05 --model_name me --sequence_parallel true"
    )
    run = imported(base=base)
    paths = ("stage", "global_batch_size", "train_iters", "split", "min_lr", "tensor_model_parallel_size")
    # 800 rows train, twice, 8 a step
    assert values(run, *(f"megatron_training.{name}" for name in paths)) == ["sft", 8, 200, "80,20,0", 1e-6, 2]
    assert "generate_config" not in run.tree and "--model_name" in run.without_effect
    file = tmp_path / "sft.yaml"
    file.write_text("model: models/base\ndataset:\n- rows.jsonl\nlearning_rate: 3e-5\nmax_length: 1024\n")
    run = imported(base=f"NPROC_PER_NODE=2 swift sft {file} --max_steps 7 --tuner_type full")
    assert values(run, "actor_config.lr", "megatron_training.seq_length", "megatron_training.train_iters") == [3e-5, 1024, 7]


def test_prediction_layers_train_in_sft_with_the_weight_of_their_loss() -> None:
    base = "NPROC_PER_NODE=4 megatron {} --model models/base --dataset a.jsonl --global_batch_size 8 --train_iters 9 --lr 1e-5"
    keys = [f"megatron_training.mtp_{name}" for name in ("num_layers", "loss_scaling_factor", "detach_heads")]
    assert values(imported("--mtp_num_layers 1", base.format("sft")), *keys) == [1, 0.1, False]
    accepted = frozenset({"documents"})
    run = imported("--mtp_num_layers 1 --mtp_loss_scaling_factor 0.3 --max_length 64", base.format("pt"), accepted=accepted)
    assert values(run, *keys) == [1, 0.3, False]
    run = imported("--mtp_num_layers 1 --tuner_type lora", base.format("sft"))
    assert values(run, *keys) == [1, 0.1, False] and "their adapters train" in run.translated["--mtp_num_layers"]
    assert "next to a preference loss" in refusal("--mtp_num_layers 1", base.format("rlhf --rlhf_type dpo"))
    assert "computes no loss" in imported("--mtp_num_layers 1").without_effect["--mtp_num_layers"]
    assert values(imported("--mtp_loss_scaling_factor 0.3", base.format("sft")), *keys) == [None] * 3


def test_serving_is_the_command_that_serves() -> None:
    run = imported(base="CUDA_VISIBLE_DEVICES=0,1 swift deploy --model models/base --infer_backend vllm --port 9000 "
                   "--served_model_name base --vllm_tensor_parallel_size 2 --vllm_max_model_len 4096")  # fmt: skip
    assert run.plans is None
    assert run.next_command == "mindspeed-rl rollout --model models/base --port 9000 --served-model-name base --config-name"
    assert values(run, "generate_config.infer_tensor_parallel_size", "generate_config.max_model_len") == [2, 4096]
    assert "rl_config" not in run.tree


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("swift rlhf --rlhf_type kto --model m", "--dataset is missing"),
        ("swift export --model m", "mindspeed-rl convert"),
        ("NPROC_PER_NODE=8 swift rlhf --rlhf_type grpo --model m --dataset a.jsonl", "names no reward"),
        ("NPROC_PER_NODE=8 swift rlhf --rlhf_type grpo --dataset a.jsonl --reward_funcs accuracy", "--model is missing"),
        ("NPROC_PER_NODE=8 swift rlhf --rlhf_type grpo --model m --reward_funcs accuracy", "--dataset is missing"),
        ("NPROC_PER_NODE=x swift sft --model m --dataset a.jsonl", "NPROC_PER_NODE=x"),
        ("swift sft --model m --dataset a.jsonl --max_steps many", "max_steps is 'many', but must be a number"),
        ("swift sft --model m --dataset $DATA", "line 1: the value of DATA is not in the script; say it with --set DATA=VALUE"),
        ("megatron pt --model m --dataset a.jsonl --num_train_epochs 1", "a length in epochs of documents"),
        ("megatron sft --model m --dataset a.jsonl", "says no length"),
        (f"{GRPO} --reward_weights 1 2", "2 values for 1 rewards"),
        (f"{GRPO} --system gone.txt", "there is no file gone.txt"),
        ("echo nothing", "there is no command of ms-swift"),
    ],
)
def test_a_command_that_cannot_be_imported_is_one_clear_error(command: str, sentence: str) -> None:
    assert sentence in refusal("", command)


def test_a_teacher_of_grpo_enters_the_advantage_next_to_the_rewards() -> None:
    run = imported("--teacher_model models/teacher --teacher_kl_coef 0.5")
    key = "rl_config.distillation"
    names = ("enabled", "teacher_models", "loss_mode", "use_policy_gradient", "use_task_rewards", "distillation_loss_coef")
    assert [run.get(f"{key}.{name}") for name in names] == [True, ["models/teacher"], "k1", True, True, 0.5]
    served = imported("--teacher_model_server http://host:8000")
    assert served.get(f"{key}.teacher_models") == ["http://host:8000/v1"]


def test_a_teacher_alone_trains_on_single_responses() -> None:
    alone = GRPO.replace(" --reward_funcs accuracy", "")
    run = imported("--teacher_model models/teacher --num_generations 1", alone)
    assert [run.get(f"rl_config.{name}") for name in ("n_samples_per_prompt", "scale_rewards")] == [1, "none"]
    with pytest.raises(ConfigError, match="must be at least 2"):
        imported("--teacher_model models/teacher --num_generations 1")


def test_images_in_preference_data_are_read() -> None:
    command = (
        "swift rlhf --rlhf_type dpo --model Qwen/Qwen2.5-VL-7B-Instruct --dataset swift/RLAIF-V-Dataset --max_length 2048 "
        "--max_steps 10 --per_device_train_batch_size 1"
    )
    run = imported("", command)
    assert run.get("megatron_training.stage") == "dpo"
    assert "AlpacaStylePairwiseHandler" in "\n".join([*run.translated.values(), *run.added.values()])


def test_rewards_of_an_environment_train_next_to_a_teacher() -> None:
    environment = "--gym_env frozen --external_plugins p.py --multi_turn_scheduler gym_scheduler"
    run = imported(f"--teacher_model models/teacher {environment}", GRPO.replace(" --reward_funcs accuracy", ""))
    assert run.get("rl_config.distillation.use_task_rewards") is True


def test_a_teacher_alone_needs_no_reward_function() -> None:
    run = imported("--teacher_model models/teacher", GRPO.replace(" --reward_funcs accuracy", ""))
    assert [run.get(f"rl_config.{name}") for name in ("rule_reward", "distillation.use_task_rewards")] == [False, False]


@pytest.mark.parametrize(
    ("options", "shares", "reference"),
    [("", True, None), ("--ref_adapters out/sft", None, None), ("--ref_adapters out/other", None, "out/other")],
)
def test_a_start_from_adapters_has_the_reference_of_ms_swift(options: str, shares: bool | None, reference: str | None) -> None:
    run = imported(f"--tuner_type lora --lora_rank 64 --adapters out/sft {options}")
    keys = ("actor_config.load", "megatron_training.base_model", "megatron_training.lora_r", "rl_config.share_backbone")
    assert values(run, *keys) == ["out/sft", "models/base", None, shares]
    assert run.get("rl_config.integrated_mode_config.ref_model_load_path") == reference


def test_generation_takes_adapters_and_a_server_does_not() -> None:
    run = imported("--adapters out/sft", "swift infer --model models/base")
    assert "--load models/base --lora-load out/sft" in run.next_command
    assert "a server that starts with adapters" in refusal("--adapters out/sft", "swift rollout --model models/base")
