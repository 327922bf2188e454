"""Commands of TRL, slime, OpenRLHF and MindSpeed-LLM: numbers worked out by hand from the formulas of those projects."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest
from rlxf_run_files import write_rlxf_run_file

from mindspeed_rl.config import ConfigError
from mindspeed_rl.importers.command import PROJECTS
from mindspeed_rl.importers.importer import import_command
from mindspeed_rl.importers.result import Import, ImportSettings
from mindspeed_rl.rewards import REWARDS

TRL = "trl grpo --model_name_or_path m --dataset_name d.jsonl --reward_funcs accuracy_reward "
SLIME = (
    "ray job submit --address x -- python3 train.py --actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate "
    "--hf-checkpoint m --prompt-data d.jsonl --rm-type math --rollout-batch-size 32 --n-samples-per-prompt 8 "
    "--rollout-max-response-len 1024 "
    "--rollout-num-gpus-per-engine 2 --attention-dropout 0 --hidden-dropout 0 "
)
OPENRLHF = (
    "python3 -m openrlhf.cli.train_ppo_ray --actor.num_gpus_per_node 8 --train.colocate_all --vllm.num_engines 8 "
    "--actor.model_name_or_path m --reward.model_name_or_path r --data.prompt_dataset d.jsonl --rollout.max_new_tokens 512 "
)
LLM = (
    "torchrun --nproc_per_node 8 --nnodes 2 posttrain_gpt.py --stage dpo --tensor-model-parallel-size 2 "
    "--pipeline-model-parallel-size 2 --micro-batch-size 1 --global-batch-size 64 --seq-length 4096 --train-iters 2000 "
    "--lr 1e-6 --bf16 --data-path ./pairs --load ./ckpt --tokenizer-name-or-path ./m --attention-dropout 0 --hidden-dropout 0 "
)


def take(project: str, command: str, *accepted: str, devices: int | None = None, rows: int = 8192) -> Import:
    return import_command(
        PROJECTS[project],
        command,
        ImportSettings(devices=devices, rewards=REWARDS, accepted=frozenset(accepted), rows=rows),
    )


def fail(project: str, command: str, match: str, devices: int | None = None) -> None:
    with pytest.raises(ConfigError, match=match):
        take(project, command, devices=devices)


def test_trl_counts_completions_of_all_processes() -> None:
    options = "--per_device_train_batch_size 4 --gradient_accumulation_steps 8 --steps_per_generation 16 --max_steps 100"
    run = take("trl", TRL + options + " --num_generations 16 --loss_type grpo", devices=8)
    # a step has 4 x 8 x 8 = 256 completions, a rollout 4 x 8 x 16 = 512 of 32 prompts: two steps each, 50 rollouts
    rl, training = run.tree["rl_config"], run.tree["megatron_training"]
    assert (rl["n_samples_per_prompt"], rl["mini_batch_size"], training["global_batch_size"]) == (16, 16, 32)
    assert training["train_iters"] == 50
    assert run.plans is not None and run.plans[0].total_steps == 100 and run.plans[0].steps_per_rollout == 2


def test_prompts_of_trl_that_are_messages_are_in_the_chat_template() -> None:
    run = take("trl", TRL + "--loss_type grpo", devices=8)
    assert run.get("megatron_training.prompt_type") == "hf"
    assert "a text as it is" in run.added["megatron_training.prompt_type"]


def test_trl_counts_the_epochs_of_its_sampler() -> None:
    # 8 x 1 x 8 completions of 8 prompts a rollout: 1000 / 8 = 125 rollouts an epoch, each trained on twice
    run = take("trl", TRL + "--num_train_epochs 2 --num_iterations 2 --loss_type grpo", devices=8, rows=1000)
    assert run.plans is not None and run.plans[0].total_steps == 2 * 125 * 2


def test_trl_divides_by_the_tokens_of_the_whole_rollout() -> None:
    options = "--gradient_accumulation_steps 1 --steps_per_generation 4 --max_steps 40"
    fail("trl", TRL + options, "aggregation would be token here, but is token of the rollout", devices=8)
    take("trl", TRL + options, "aggregation", devices=8)


def test_trl_corrects_log_probs_only_where_vllm_generates() -> None:
    assert "rollout_importance_sampling_mode" not in take("trl", TRL + "--max_steps 8", devices=8).tree["rl_config"]
    keys = take("trl", TRL + "--max_steps 8 --use_vllm", devices=8).tree["rl_config"]
    assert keys["rollout_importance_sampling_mode"] == "sequence_mask"
    assert keys["rollout_importance_sampling_threshold"] == 3.0


def test_a_file_of_options_says_its_trainer_by_its_options(tmp_path: Path) -> None:
    options = {"model_name_or_path": "m", "dataset_name": "d", "loss_type": "ipo", "beta": 0.2, "learning_rate": "1e-6"}
    path = tmp_path / "dpo.json"
    path.write_text(json.dumps(options | {"label_smoothing": 0.1, "precompute_ref_log_probs": True}))
    run = take("trl", str(path), devices=2)
    assert run.tree["megatron_training"]["stage"] == "dpo" and run.tree["megatron_training"]["dpo_loss_type"] == "ipo"
    assert run.tree["actor_config"]["lr"] == 1e-6


@pytest.mark.parametrize(
    ("options", "feature"),
    [
        ("--loss_type unheard_of", "the policy loss unheard_of"),
        ("--use_adaptive_entropy", "an adaptive entropy bonus"),
        ("--reward_funcs my.rewards.polite", "my/rewards.py is not here, and the function says which columns it reads"),
        ("--reward_funcs polite", "no reward function of TRL; it has accuracy_reward"),
        ("--lr_scheduler_type cosine_with_restarts", "its form"),
        ("--use_peft --model_name_or_path microsoft/phi-4", "PEFT's default layers"),
        ("--no_such_option 1", "no option of TRL 1.16.0"),
    ],
)
def test_trl_features_that_are_missing_are_named(options: str, feature: str) -> None:
    fail("trl", TRL + "--max_steps 8 " + options, feature, devices=8)


def test_sft_of_trl_asks_which_tokens_train() -> None:
    command = "trl sft --model_name_or_path m --dataset_name d --num_train_epochs 1"
    fail("trl", command, "trained_tokens would be the answers' here, but is the questions' too", devices=8)
    run = take("trl", command + " --assistant_only_loss true", devices=8)
    assert run.tree["megatron_training"]["train_epochs"] == 1
    assert "OpenAIInstructionHandler" in run.translated["--dataset_name"]


def test_slime_divides_a_rollout_into_steps_and_averages_sequences() -> None:
    run = take("slime", SLIME + "--num-rollout 10 --num-steps-per-rollout 4 --lr-warmup-iters 8 --eps-clip-high 0.28")
    rl, training = run.tree["rl_config"], run.tree["megatron_training"]
    assert (rl["mini_batch_size"], training["global_batch_size"], rl["n_samples_per_prompt"]) == (8, 32, 8)
    assert (training["lr_warmup_iters"], rl["loss_type"], rl["clip_ratio_high"]) == (2, "grpo", 0.28)
    assert run.plans is not None and run.plans[0].total_steps == 40
    assert training["no_shuffle"] is True  # slime shuffles only with --rollout-shuffle
    fail("slime", SLIME + "--num-rollout 10 --num-steps-per-rollout 4 --lr-warmup-iters 6", "not a whole number of rollouts")


@pytest.mark.parametrize(
    ("kind", "rules"),
    [
        ("math", "mathruler's rules for the last box"),
        ("deepscaler", "after </think>"),
        ("f1", "the F1 score"),
        ("dapo", "Minerva's rules, 1 or -1"),
    ],
)
def test_slime_rewards_are_described_by_their_rules(kind: str, rules: str) -> None:
    assert rules in take("slime", SLIME.replace("--rm-type math", f"--rm-type {kind}") + "--num-rollout 10").summarize()


def test_slime_without_colocation_has_servers_and_its_second_script_is_one_rollout_ahead() -> None:
    apart = SLIME.replace("--colocate", "--rollout-num-gpus 4") + "--num-rollout 10 --global-batch-size 256"
    assert "trainer_mode" not in take("slime", apart).tree["rl_config"]
    keys = take("slime", apart.replace("train.py", "train_async.py")).tree["rl_config"]
    assert keys["trainer_mode"] == "one_step_off" and keys["rollout_resource"] == {"num_npus": 4}
    assert keys["use_integrated_worker"] is False and keys["actor_resource"] == {"num_npus": 8}


@pytest.mark.parametrize(
    ("options", "feature"),
    [
        ("--use-opd --opd-type sglang", "a teacher on a server of SGLang"),
        ("--use-opd --opd-type megatron", "a teacher without a folder"),
        ("--advantage-estimator cispo", "CISPO as the mean of sequence means"),
        ("--normalize-advantages", "whitened over the batch as well"),
        ("--rollout-top-p 0.9", "log-probs over the sampled nucleus"),
        ("--enable-mtp-training", "it needs --mtp-num-layers"),
        ("--custom-generate-function-path a.b", "a function in slime's form"),
        ("--sglang-quantization fp8", "a rollout engine in fp8; w8a8_int8 and mxfp8 are available.*kv_cache_dtype"),
        ("--sglang-quantization w8a8_int8", "importance_sampling would be token_truncate"),
        ("--sglang-quantization w4afp8", "a rollout engine in w4afp8: int4 weights with activations in fp8"),
    ],
)
def test_slime_features_that_are_missing_are_named(options: str, feature: str) -> None:
    fail("slime", SLIME + "--num-rollout 10 --global-batch-size 256 " + options, feature)


def test_the_teacher_of_slime_is_in_the_advantages_next_to_the_rewards() -> None:
    command = SLIME + "--num-rollout 10 --global-batch-size 256 --use-opd --opd-type megatron --opd-kl-coef 0.5 "
    run = take("slime", command + "--opd-teacher-load /m/Qwen3-32B_torch_dist/")
    # advantage - coef * (log-prob of the student - the teacher's), after the division by the group's spread
    assert run.tree["rl_config"]["distillation"] == {
        "enabled": True,
        "teacher_models": ["/m/Qwen3-32B"],
        "loss_mode": "k1",
        "use_policy_gradient": True,
        "use_task_rewards": True,
        "distillation_loss_coef": 0.5,
    }
    assert "distillation" not in take("slime", SLIME + "--num-rollout 10 --opd-kl-coef 0.5").tree["rl_config"]


def test_tokens_that_end_a_response_of_slime_and_fp8_have_their_places() -> None:
    command = SLIME + "--num-rollout 10 --global-batch-size 256 "
    for words, expected in (("151329 151336", [151329, 151336]), ("151329", [151329])):
        run = take("slime", f"{command} --rollout-stop-token-ids {words}")
        assert run.get("generate_config.sampling_config.stop_token_ids") == expected
    match = r"weights would be float32 here, but is products in fp8 \(e4m3\) in slime; --accept weights"
    fail("slime", f"{command} --fp8-format e4m3 --fp8-recipe blockwise", match)


@pytest.mark.parametrize(("name", "ours"), [("w8a8_int8", "int8"), ("mxfp8", "mxfp8")])
def test_slime_s_quantized_engine_and_fp8_cache_are_keys_here(name: str, ours: str) -> None:
    engine = f"--sglang-quantization {name} --sglang-kv-cache-dtype fp8_e4m3"
    command = SLIME + "--num-rollout 10 --global-batch-size 256 " + engine
    keys = take("slime", command, "importance_sampling").tree["generate_config"]
    assert (keys["quantization"], keys["kv_cache_dtype"]) == (ours, "fp8_e4m3")


@pytest.mark.parametrize(
    ("folder", "config", "ours", "accept"),
    [
        ("/m/Qwen3-8B-FP8", None, None, "rollouts in fp8, which Qwen3-8B-FP8 has"),
        ("own", {"quant_method": "mxfp8"}, "mxfp8", ""),
        ("own", {"quant_method": "compressed-tensors"}, None, "rollouts in compressed-tensors"),
        ("own", {"quant_algo": "FP8"}, None, r"rollouts in a format without quant_method \(quant_algo\)"),
        ("own", {}, None, ""),
    ],
)
def test_the_folder_of_slime_decides_the_format_of_its_rollouts(
    folder: str, config: dict | None, ours: str | None, accept: str, tmp_path: Path
) -> None:
    if config is not None:
        folder = str(tmp_path)
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    command = name_folder(folder)
    settings = ImportSettings(rewards=REWARDS, rows=8192, variables={"BASE_MODEL": "/m/base"})
    if accept:
        with pytest.raises(ConfigError, match=f"weights would be float32 here, but is {accept}.*; --accept weights"):
            import_command(PROJECTS["slime"], command, settings)
    accepted = frozenset(["weights"] if accept else ["importance_sampling"] if ours else [])
    run = import_command(PROJECTS["slime"], command, replace(settings, accepted=accepted))
    assert run.get("generate_config.quantization") == ours and run.get("generate_config.enforce_eager") is None
    assert run.get("actor_config.load") == ("/m/base" if config or config is None else folder)
    assert run.get("megatron_training.tokenizer_name_or_path") == folder
    if config or config is None:
        other = f"{command} --sglang-quantization w8a8_int8"
        with pytest.raises(ConfigError, match="two formats of the rollout engine: the folder is in .*an option says int8"):
            import_command(PROJECTS["slime"], other, replace(settings, accepted=accepted))


def name_folder(folder: str, start: str = "") -> str:
    command = f"{SLIME}--num-rollout 10 --global-batch-size 256 {start}"
    return command.replace("--hf-checkpoint m ", f"--hf-checkpoint {folder} ")


@pytest.mark.parametrize("name", ["MXFP8", "INT4", "NVFP4", "w4a16", "AWQ"])
def test_training_of_slime_does_not_start_from_a_quantized_folder_that_is_not_read(name: str) -> None:
    for start in ("", "--ref-load /m/Qwen3-8B_torch_dist ", f"--ref-load /m/Qwen3-8B-{name}_torch_dist "):
        fail("slime", name_folder(f"/m/Qwen3-8B-{name}", start), f"is in {name.lower()}, .*write --set BASE_MODEL=FOLDER")
    # blocks of fp8 are read; a Megatron folder with another name is what training starts from
    for folder, start, load in (
        ("/m/Qwen3-8B-FP8", "/m/Qwen3-8B_torch_dist", "/m/Qwen3-8B-FP8"),
        (f"/m/Qwen3-8B-{name}", "/m/other_torch_dist", "/m/other_torch_dist"),
    ):
        run = take("slime", name_folder(folder, f"--ref-load {start} "), "weights", "importance_sampling")
        assert run.get("actor_config.load") == load


def test_supervised_training_of_slime_has_no_format_of_rollouts() -> None:
    words = "--loss-type sft_loss --disable-compute-advantages-and-returns --debug-train-only "
    command = name_folder("/m/Qwen3-8B-MXFP8", words)
    command = command.replace("--rm-type math ", "--input-key messages ")
    settings = ImportSettings(rewards=REWARDS, variables={"BASE_MODEL": "/m/base"}, accepted=frozenset(["aggregation"]))
    run = import_command(PROJECTS["slime"], command, settings)
    assert run.get("generate_config.quantization") is None and run.get("actor_config.load") == "/m/base"


def test_the_same_format_in_folder_and_option_is_one_format() -> None:
    command = name_folder("/m/Qwen3-8B-MXFP8") + "--sglang-quantization mxfp8"
    settings = ImportSettings(rewards=REWARDS, rows=8192, variables={"BASE_MODEL": "b"})
    run = import_command(PROJECTS["slime"], command, replace(settings, accepted=frozenset(["importance_sampling"])))
    assert run.get("generate_config.quantization") == "mxfp8"


def test_slime_trains_prediction_layers_apart_from_the_model() -> None:
    names = [f"mtp_{name}" for name in ("num_layers", "loss_scaling_factor", "detach_heads")]
    command = SLIME + "--num-rollout 10 --global-batch-size 256 --mtp-num-layers 1 "
    training = take("slime", command + "--enable-mtp-training").tree["megatron_training"]
    assert [training[name] for name in names] == [1, 0.2, True]
    training = take("slime", command + "--enable-mtp-training --mtp-loss-scaling-factor 0.5").tree["megatron_training"]
    assert [training[name] for name in names] == [1, 0.5, True]
    run = take("slime", command)
    assert not set(names) & set(run.tree["megatron_training"]) and "--mtp_num_layers" in run.without_effect


def test_mindspeed_llm_trains_prediction_layers_behind_the_last_norm() -> None:
    command = LLM.replace("--stage dpo", "--stage sft --calculate-per-token-loss") + "--mtp-num-layers 1 "
    training = take("mindspeed-llm", command + "--mtp-after-norm --mtp-loss-scaling-factor 0.3").tree["megatron_training"]
    assert (training["mtp_num_layers"], training["mtp_loss_scaling_factor"], training["mtp_detach_heads"]) == (1, 0.3, False)
    fail("mindspeed-llm", command, "but is before the last norm in MindSpeed-LLM; --accept prediction_states takes")
    fail("mindspeed-llm", LLM + "--num-nextn-predict-layers 1", "of release 2.0")
    fail("mindspeed-llm", LLM + "--mtp-num-layers 1 --mtp-after-norm", "in stages pretrain, sft and RL")


def test_slime_gets_shapes_from_config_json_and_skips_the_array_of_another_file() -> None:
    script = f"source models/x.sh\nARGS=(--num-rollout 4)\n{SLIME} ${{MODEL_ARGS[@]}} ${{ARGS[@]}} --global-batch-size 128"
    run = take("slime", script)
    assert "shapes of the model" in run.without_effect["--model_args"] and run.tree["megatron_training"]["train_iters"] == 4


def test_openrlhf_has_the_kl_in_the_reward_unless_use_loss() -> None:
    sizes = "--rollout.batch_size 64 --rollout.n_samples_per_prompt 4 --train.batch_size 128 "
    run = take("openrlhf", OPENRLHF + sizes + "--algo.advantage.estimator reinforce", rows=640)
    # 256 completions are two steps; 10 rollouts
    assert run.plans is not None and run.plans[0].total_steps == 20
    assert run.plans[0].kl_place == "reward" and run.tree["rl_config"]["kl_penalty"] == "k1"
    group = "--algo.advantage.estimator group_norm"
    fail("openrlhf", OPENRLHF + sizes + group, "kl_place would be reward here, but is reward after the baseline")
    run = take("openrlhf", OPENRLHF + sizes + "--algo.advantage.estimator dr_grpo --algo.kl.use_loss --algo.kl.estimator k3")
    assert run.tree["rl_config"]["scale_rewards"] == "none" and run.tree["rl_config"]["use_kl_in_reward"] is False


def test_ppo_of_openrlhf_has_a_critic_with_its_own_rate() -> None:
    run = take("openrlhf", OPENRLHF + "--rollout.batch_size 128 --train.batch_size 128 --critic.adam.lr 5e-6")
    assert run.tree["megatron_training"]["stage"] == "ray_ppo" and run.tree["critic_config"]["lr"] == 5e-6
    assert run.plans is not None and run.plans[0].value_clip == 0.5


def test_mindspeed_llm_takes_devices_from_torchrun_and_dropout_from_megatron() -> None:
    run = take("mindspeed-llm", LLM)
    assert run.tree["megatron_training"]["num_npus"] == 16 and run.plans is not None and run.plans[0].dp == 4
    assert take("mindspeed-llm", LLM.replace("--hidden-dropout 0 ", "")).tree["megatron_training"]["hidden_dropout"] == 0.1


#: option of MindSpeed that is off here -> words of what its absence costs, and of the key that saves as much
OFF_HERE = {
    "recompute_norm_num_layers 2": ("nothing", "all layers"),
    "moe_adaptive_recompute_activation": ("memory", "moe_router_topk x moe_ffn_hidden_size", "recompute_activation_function"),
    "moe_unperm2_mem_optim": ("memory", "moe_router_topk x hidden_size", "use_fused_moe_token_permute_and_unpermute: false"),
    "swap_modules mlp": ("memory", "swap_optimizer"),
    "layerzero": ("memory", "use_distributed_optimizer: true"),
    "moe_fb_overlap": ("time", "4 exchanges"),
    "moe_allgather_overlap_comm": ("time", "4 exchanges"),
    "schedules_method dualpipev": ("time", "pipeline_model_parallel_size - 1"),
    "balanced_moe_experts": ("time", "fullest device"),
    "ulysses_degree_in_cp 2": ("time", "full ring"),
    "tp_2d": ("memory and time", "whole activations"),
    "mtp_mem_efficient_logits": ("nothing", "loss_chunk_size"),
}


def test_mindspeed_llm_says_what_the_absence_of_its_features_costs() -> None:
    options = " ".join(f"--{option.replace('_', '-')}" for option in OFF_HERE)
    notes = take("mindspeed-llm", LLM + options).without_effect
    texts = {option.lstrip("-").replace("-", "_"): text for option, text in notes.items()}
    for option, words in OFF_HERE.items():
        text = texts[option.partition(" ")[0]]
        assert text.startswith(f"off here, for which the cost is {words[0]}: ") and all(word in text for word in words), option


@pytest.mark.parametrize(
    ("options", "modules", "activation"),
    [
        ("--recompute-norm", ["layernorm"], None),
        ("--recompute-granularity selective --recompute-norm", ["core_attn", "layernorm"], None),
        ("--recompute-norm --mla-zero-memory --moe-zero-memory level0", ["layernorm", "moe", "mla_up_proj"], None),
        ("--moe-zero-memory level1", None, True),
        ("--recompute-norm --moe-zero-memory level1 --recompute-mla-up-proj", ["layernorm", "mla_up_proj"], True),
        ("--moe-zero-memory disable", None, None),
        ("--recompute-granularity selective --recompute-modules core_attn", ["core_attn"], None),
        (
            "--recompute-norm --recompute-granularity selective --recompute-modules core_attn mlp",
            ["core_attn", "mlp", "layernorm"],
            None,
        ),
        ("--recompute-activations --recompute-norm", ["core_attn", "layernorm"], None),
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --recompute-norm", None, None),
    ],
)
def test_mindspeed_llm_computes_the_parts_of_layers_again(
    options: str, modules: list[str] | None, activation: bool | None
) -> None:
    granularity = "full" if "full" in options else None if modules is None else "selective"
    for order in permutations(f"--{option}" for option in options.removeprefix("--").split(" --")):
        keys = take("mindspeed-llm", f"{LLM} {' '.join(order)}").tree["megatron_training"]
        assert keys.get("recompute_modules") == modules and keys.get("recompute_activation_function") == activation, order
        assert keys.get("recompute_granularity") == granularity, order


def test_slime_computes_one_module_again() -> None:
    options = "--num-rollout 10 --recompute-modules core_attn --recompute-granularity selective"
    keys = take("slime", SLIME + options).tree
    assert keys["megatron_training"]["recompute_modules"] == ["core_attn"]


def test_mindspeed_llm_keeps_the_activation_that_adapters_of_grouped_experts_read() -> None:
    options = "--moe-zero-memory level1 --moe-grouped-gemm --lora-r 8 --lora-target-modules linear_fc1 linear_fc2"
    run = take("mindspeed-llm", f"{LLM} {options}")
    assert "recompute_activation_function" not in run.tree["megatron_training"]
    (note,) = (text for option, text in run.without_effect.items() if "zero" in option)
    assert "adapters of grouped experts" in note


def test_mindspeed_llm_averages_the_micro_batches_of_sft() -> None:
    command = LLM.replace("--stage dpo", "--stage sft")
    fail("mindspeed-llm", command, "aggregation would be null here, but is token of a micro-batch")
    take("mindspeed-llm", command + "--calculate-per-token-loss")


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    """A run file of ray_gpt.py with the groups of its GRPO."""
    return write_rlxf_run_file(tmp_path, "grpo")


def test_a_run_file_of_ray_gpt_has_roles_on_devices_of_their_own(run_file: Path) -> None:
    run = take("mindspeed-llm", f"python ray_gpt.py --config-name grpo --config-dir {run_file.parent}")
    rl = run.tree["rl_config"]
    resources = {role: rl[f"{role}_resource"]["num_npus"] for role in ("actor", "rollout", "reference", "reward")}
    assert resources == {"actor": 2, "rollout": 4, "reference": 2, "reward": 1}
    # a step has 8 completions on each of 2 replicas: 16 of 32, 4 prompts
    assert (rl["mini_batch_size"], run.tree["megatron_training"]["global_batch_size"]) == (4, 8)
    assert (rl["reward_model"], rl["rule_reward"], rl["init_kl_coef"], rl["kl_penalty"]) == ("./rm", False, 0.05, "k3")
    assert run.tree["generate_config"]["sampling_config"]["max_tokens"] == 256
    assert "its GRPO reads it in no place" in run.without_effect["algorithm.missing_eos_penalty"]


def test_whitened_advantages_and_cold_log_probs_of_ray_gpt_are_named(run_file: Path) -> None:
    overrides = "algorithm.advantage_whiten=true actor_rollout_ref.actor_rollout.temperature=0.7"
    command = f"python ray_gpt.py --config-name grpo --config-dir {run_file.parent} {overrides}"
    with pytest.raises(ConfigError) as caught:
        take("mindspeed-llm", command)
    assert "whitened over the batch" in str(caught.value) and "log-probs of temperature 1" in str(caught.value)
    run = take("mindspeed-llm", command, "advantage", "loss")
    assert run.tree["generate_config"]["sampling_config"]["temperature"] == 0.7


def test_rloo_of_trl_sums_a_response_and_multiplies_its_ratios() -> None:
    command = TRL.replace("trl grpo", "trl rloo") + "--max_steps 8 --per_device_train_batch_size 2"
    run = take("trl", command, devices=8)
    assert run.plans is not None and run.plans[0].aggregation == "summed" and run.plans[0].kl_place == "reward"
    fail("trl", command + " --num_iterations 2", "level would be token here", devices=8)


def test_arguments_of_the_chat_template_are_a_key() -> None:
    arguments = '{"enable_thinking": false, "reasoning_effort": "low"}'
    trl = take("trl", TRL + f"--per_device_train_batch_size 8 --max_steps 1 --chat_template_kwargs '{arguments}'", devices=8)
    slime = take("slime", SLIME + f"--num-rollout 1 --apply-chat-template --apply-chat-template-kwargs '{arguments}'")
    for run in (trl, slime):
        assert run.get("megatron_training.enable_thinking") is False
        assert run.get("megatron_training.chat_template_kwargs") == {"reasoning_effort": "low"}


@pytest.mark.parametrize(
    "front",
    [
        "OPEN_TRAINING_INT4_FAKE_QAT_FLAG=1 ",
        "export OPEN_TRAINING_INT4_FAKE_QAT_FLAG=1\n",
        """E='{"env_vars": {"OPEN_TRAINING_INT4_FAKE_QAT_FLAG": "1"}}'\nray job submit --runtime-env-json="$E" -- """,
        """ray job submit --runtime-env runtime.yaml -- """,
    ],
)
def test_a_variable_that_switches_training_is_refused_wherever_the_script_sets_it(tmp_path: Path, front: str) -> None:
    (tmp_path / "runtime.yaml").write_text("env_vars: {OPEN_TRAINING_INT4_FAKE_QAT_FLAG: '1'}")
    command = SLIME.partition(" -- ")[2] + "--num-rollout 10"
    settings = ImportSettings(rewards=REWARDS, folder=tmp_path)
    with pytest.raises(ConfigError, match="rounded to int4"):
        import_command(PROJECTS["slime"], front + command, settings)
    assert import_command(PROJECTS["slime"], f"OPEN_TRAINING_INT4_FAKE_QAT_FLAG=0 {command}", settings).plans is not None
    given = """ --train-env-vars '{"OPEN_TRAINING_INT4_FAKE_QAT_FLAG": "1"}'"""
    with pytest.raises(ConfigError, match="rounded to int4"):
        import_command(PROJECTS["slime"], command + given, settings)
    assert import_command(PROJECTS["slime"], command + given.replace('"1"', '"0"'), settings).plans is not None
    for wrong, sentence in (("[1]", "must hold names and values"), ("'{x'", "is not JSON")):
        with pytest.raises(ConfigError, match=sentence):
            import_command(PROJECTS["slime"], f"{command} --train-env-vars {wrong}", settings)


def test_tools_of_rows_are_in_the_prompts_of_slime() -> None:
    run = take("slime", SLIME + "--num-rollout 1 --tool-key functions --input-key messages")
    assert run.tree["megatron_training"]["map_keys"] == {"prompt": "messages", "tools": "functions"}


@pytest.mark.parametrize(
    ("front", "sentence"),
    [
        ("ray job submit --runtime-env other.yaml -- ", "--runtime-env: the file other.yaml is not here"),
        ("ray job submit --runtime-env=$HERE/other.yaml -- ", "say it with --set HERE=VALUE"),
    ],
)
def test_a_file_of_variables_that_is_not_here_is_asked_for(tmp_path: Path, front: str, sentence: str) -> None:
    command = SLIME.partition(" -- ")[2] + "--num-rollout 10"
    settings = ImportSettings(rewards=REWARDS, folder=tmp_path)
    with pytest.raises(ConfigError, match=sentence):
        import_command(PROJECTS["slime"], front + command, settings)


def test_a_checkpoint_format_dense_layers_and_balancing_of_mindspeed_llm_are_read() -> None:
    experts = "--num-experts 8 --moe-router-topk 2 --sequence-parallel "
    words = "--ckpt-format torch --first-k-dense-replace -1 --moe-router-load-balancing-type none --hccl-op-mode 1"
    run = take("mindspeed-llm", LLM.replace("--stage dpo", "--stage dpo " + experts) + words)
    training = run.tree["megatron_training"]
    assert training["first_k_dense_replace"] == 0 and training["moe_router_load_balancing_type"] == "none"
    assert "torch_dist" in run.without_effect["ckpt_format"] and "ckpt_format" not in training
    run = take("mindspeed-llm", LLM.replace("--stage dpo", "--stage dpo " + experts) + "--first-k-dense-replace 1")
    assert run.tree["megatron_training"]["first_k_dense_replace"] == 1


@pytest.mark.parametrize(
    ("kind", "threshold", "expected"),
    [("icepop", "0.5 5", ("token_mask", 5.0, 0.5)), ("seq-mask-tis", "0.5 2", ("token_geometric_mask", 2.0, 0.5)),
     ("tis", "0 2", ("token_truncate", 2.0, None))],
)  # fmt: skip
def test_corrections_of_openrlhf_have_their_names(kind: str, threshold: str, expected: tuple) -> None:
    words = "--algo.advantage.estimator reinforce --algo.advantage.is_correction_enable --algo.advantage.is_correction_type "
    run = take("openrlhf", f"{OPENRLHF} {words}{kind} --algo.advantage.is_correction_threshold {threshold}")
    keys = ("mode", "threshold", "threshold_min")
    assert tuple(run.tree["rl_config"].get(f"rollout_importance_sampling_{key}") for key in keys) == expected


def test_gspo_of_openrlhf_with_a_correction_has_its_ratio_to_the_sampler_and_no_weight() -> None:
    words = "--algo.advantage.estimator flash_reinforce --algo.kl.init_coef 0 --actor.policy_loss_type gspo "
    run = take("openrlhf", f"{OPENRLHF} {words} --algo.advantage.is_correction_level token")
    rl = run.tree["rl_config"]
    assert (rl["old_log_probs"], rl["importance_sampling_level"], rl["adv_estimator"]) == (
        "rollout",
        "sequence",
        "flash_reinforce",
    )
    assert "rollout_importance_sampling_mode" not in rl
    words = "--algo.advantage.estimator reinforce --algo.kl.use_loss --algo.kl.estimator k2 --algo.kl.unbiased_gradient"
    assert take("openrlhf", f"{OPENRLHF} {words}").tree["rl_config"]["use_bias_correction_kl"] is True


def test_a_lower_bound_of_the_weights_is_a_number_that_is_accepted_by_name() -> None:
    openrlhf = OPENRLHF + "--algo.advantage.estimator reinforce --algo.advantage.is_correction_enable "
    slime = SLIME + "--num-rollout 5 --use-tis --tis-clip 5 --tis-clip-low 0.5 "
    for project, command in (("openrlhf", openrlhf), ("slime", slime)):
        fail(project, command, "importance_sampling would be token_truncate 5 here, but is token_truncate 5, at least 0.5 in")
        assert take(project, command, "importance_sampling").tree["rl_config"]["rollout_importance_sampling_threshold"] == 5.0


def test_the_critic_of_openrlhf_has_an_optimizer_of_its_own() -> None:
    critic = take("openrlhf", OPENRLHF).tree["critic_config"]
    # cosine_with_min_lr ends at min_lr_ratio of the critic's rate; the critic starts from the reward model
    assert (critic["lr"], critic["min_lr"], critic["load"]) == (9e-6, pytest.approx(9e-7), "r")
    words = "--critic.adam.weight_decay 0.1 --critic.max_norm 0.5 --critic.adam.betas 0.8 0.9 --critic.lr_scheduler constant"
    critic = take("openrlhf", f"{OPENRLHF} {words}").tree["critic_config"]
    assert (critic["weight_decay"], critic["clip_grad"], critic["adam_beta1"], critic["adam_beta2"]) == (0.1, 0.5, 0.8, 0.9)
    assert critic["lr_decay_style"] == "constant"


def test_a_reward_function_of_openrlhf_is_a_module_that_replaces_the_model() -> None:
    command = OPENRLHF.replace("--reward.model_name_or_path r", "--reward.remote_url examples/mine.py")
    run = take("openrlhf", command)
    assert run.tree["rl_config"]["reward_funcs"] == ["examples.mine:reward_func"]
    assert "reward_model" not in run.tree["rl_config"] and run.tree["critic_config"]["load"] == "m"
    run = take("openrlhf", command.replace("examples/mine.py", "/x/mine.py"))
    assert run.tree["rl_config"]["reward_funcs"] == ["mine:reward_func"]
    assert "PYTHONPATH=/x" in run.translated["--reward.remote_url"]
    fail("openrlhf", command.replace("examples/mine.py", "http://10.0.0.1:5000/get_reward"), "is not a Python file")


def test_openrlhf_generates_until_there_are_enough_groups() -> None:
    words = "--algo.dynamic_filtering_enable --algo.advantage.estimator reinforce_baseline --rollout.n_samples_per_prompt 8 "
    rl = take("openrlhf", OPENRLHF + words + "--algo.kl.init_coef 0").tree["rl_config"]
    assert (rl["dynamic_sample"], rl["max_resample_times"]) == (True, 1_000_000)


def test_scores_that_openrlhf_normalizes_and_a_factor_of_truncated_ones_are_named() -> None:
    fail("openrlhf", OPENRLHF + "--reward.normalize_enable", "reward_scale would be as they are scored here, but is mean and")
    # 0 is the factor of a truncated response's reward, not "off"
    fail("openrlhf", OPENRLHF + "--reward.stop_properly_penalty_coef 0.0", "reward_scale would be as they are scored here")


def test_the_form_of_openrlhfs_scripts_is_a_document_of_a_variable() -> None:
    script = f"set -x\nread -r -d '' training_commands <<EOF\n{OPENRLHF.partition('-m ')[2]}\nEOF\n"
    run = take("openrlhf", script + 'if [[ ${1} != "slurm" ]]; then\n    deepspeed --module $training_commands\nfi')
    assert run.tree == take("openrlhf", OPENRLHF).tree


def test_what_trl_saves_goes_into_its_own_folder() -> None:
    run = take("trl", TRL + "--loss_type grpo", devices=8)
    assert run.tree["run_dir"] == "trainer_output" and run.tree["actor_config"]["save"] == "trainer_output/checkpoints"
    assert take("trl", TRL + "--loss_type grpo --output_dir mine", devices=8).tree["run_dir"] == "mine"


def test_the_first_rows_of_openrlhf_are_rows_of_the_preprocessing() -> None:
    command = "deepspeed --num_gpus 8 --module openrlhf.cli.train_sft --model.model_name_or_path m --data.dataset d.jsonl "
    run = take(
        "openrlhf", command + "--train.batch_size 64 --train.micro_batch_size 8 --data.max_samples 1000 --train.max_epochs 2"
    )
    assert "--max-samples 1000" in run.translated["--data.dataset"]
    # 1000 rows are 16 steps of 64, twice
    assert run.tree["megatron_training"]["train_iters"] == 32


def test_images_of_openrlhf_are_limited_and_their_tower_trains_unless_it_is_frozen() -> None:
    command = OPENRLHF + "--algo.advantage.estimator reinforce_baseline --algo.kl.init_coef 0 --rollout.n_samples_per_prompt 8 "
    names = ("megatron_training.freeze_vit", "megatron_training.freeze_aligner", "generate_config.limit_mm_image_per_prompt")
    images = command + "--data.max_images_per_prompt 2 --data.image_key images "
    assert [take("openrlhf", images, "aggregation").get(name) for name in names] == [False, False, 2]
    assert [take("openrlhf", images + "--actor.freeze_visual_encoder").get(name) for name in names] == [True, True, 2]
    # adapters are put into all layers, after the tower is frozen
    adapters = images + "--actor.freeze_visual_encoder --ds.lora.rank 8"
    assert take("openrlhf", adapters).get(names[0]) is False
    assert [take("openrlhf", command + "--actor.freeze_visual_encoder").get(name) for name in names] == [None] * 3
    fail("openrlhf", images.replace("key images", "key pictures"), "--data.image_key: not available here: pictures")


@pytest.mark.parametrize(("factor", "text"), [("0.0", "0 times theirs"), ("0.5", "0.5 times theirs"), ("-0.5", "-0.5")])
def test_rewards_of_truncated_responses_of_openrlhf_are_a_number_of_the_plan(factor: str, text: str) -> None:
    match = f"reward_scale would be as they are scored here, but is truncated responses have {text} in OpenRLHF"
    fail("openrlhf", f"{OPENRLHF} --reward.stop_properly_penalty_coef {factor}", match)


def test_a_sourced_file_has_the_words_behind_its_name_as_arguments(tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text(
        "read -r -d '' training_commands <<EOF\nopenrlhf.cli.train_sft --model.model_name_or_path m --data.dataset {}\nEOF\n"
        'if [[ ${1} != "slurm" ]]; then\n    deepspeed --module $training_commands\nfi\n'.replace("{}", "rows.jsonl")
    )
    script = (
        'readonly name=train.sh\nsource ./${name} slurm\nsrun --nodes 2 bash -c " cd /openrlhf; torchrun \\\n'
        '--nproc_per_node 8 --nnodes 2 -m ${training_commands}" &>> log\n'
    )
    settings = ImportSettings(rewards=REWARDS, folder=tmp_path)
    run = import_command(PROJECTS["openrlhf"], script, settings)
    assert run.get("megatron_training.num_npus") == 16
    # without the word both would train
    with pytest.raises(ConfigError):
        import_command(PROJECTS["openrlhf"], script.replace(" slurm", ""), settings)


@pytest.mark.parametrize(
    ("row", "options", "trained"),
    [
        ({"messages": []}, "", "the questions' too, unless rows have a completion"),
        ({"text": "a"}, "", "the questions' too, unless rows have a completion"),
        ({"prompt": "a", "completion": "b"}, "", None),
        ({"prompt": "a", "completion": "b"}, "--completion_only_loss false", "the questions' too"),
        ({"messages": []}, "--assistant_only_loss", None),
        ({"prompt": "a", "completion": "b"}, "--completion_only_loss true", None),
    ],
)
def test_trl_trains_completions_where_rows_have_some(row: dict, options: str, trained: str | None, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    command = f"trl sft --model_name_or_path m --dataset_name rows.jsonl --max_steps 4 {options}"
    settings = ImportSettings(devices=1, folder=tmp_path, accepted=frozenset({"trained_tokens"}))
    run = import_command(PROJECTS["trl"], command, settings)
    assert run.plans is not None and run.plans[0].trained_tokens == trained


@pytest.mark.parametrize(
    ("project", "command"),
    [
        ("trl", TRL),
        ("trl", TRL.replace("trl grpo", "accelerate launch trl/scripts/grpo.py")),
        ("swift", "accelerate launch swift/cli/sft.py --model m --dataset d.jsonl --max_length 512"),
    ],
)
def test_a_launcher_that_takes_all_devices_of_a_machine_asks_for_their_number(project: str, command: str) -> None:
    fail(project, command, "takes all devices of a machine, and nothing says how many there are; write --devices N")
    plans = take(project, f"ASCEND_RT_VISIBLE_DEVICES=4,5,6,7 {command}").plans
    assert plans is not None and (plans[0].dp, plans[1].dp) == (4, 4)


def test_a_program_by_itself_is_one_process() -> None:
    command = TRL.replace("trl grpo", "python trl/scripts/grpo.py") + "--per_device_train_batch_size 8"
    plans = take("trl", command).plans
    assert plans is not None and (plans[1].dp, plans[1].step_samples) == (1, 8)
