"""Commands of ms-swift and verl as run files: what becomes of each option, and that `explain` accepts the result."""

import json
from pathlib import Path

import pytest
import yaml

from mindspeed_rl.cli import explain as explain_command
from mindspeed_rl.cli import train
from mindspeed_rl.cli.import_run import main
from mindspeed_rl.config import ConfigError
from mindspeed_rl.config.compat.swift import from_swift
from mindspeed_rl.config.compat.verl import from_verl
from mindspeed_rl.rewards import REWARDS

#: every option that the guides' commands have; numbers are ours
FULL = """\\
CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 \\
NPROC_PER_NODE=8 \\
swift rlhf \\
    --rlhf_type grpo \\
    --model models/base-1.5b \\
    --reward_funcs accuracy format soft_overlong \\
    --reward_weights 1.0 0.25 0.5 \\
    --soft_cache_length 500 \\
    --soft_max_length 3000 \\
    --cosine_min_len_value_wrong -0.4 \\
    --cosine_max_len_value_wrong 0.1 \\
    --cosine_min_len_value_correct 0.9 \\
    --cosine_max_len_value_correct 0.6 \\
    --cosine_max_len 2500 \\
    --repetition_n_grams 4 \\
    --repetition_max_penalty -0.75 \\
    --epsilon 0.15 \\
    --epsilon_high 0.3 \\
    --dynamic_sample true \\
    --max_resample_times 5 \\
    --overlong_filter true \\
    --num_iterations 2 \\
    --loss_type bnpo \\
    --beta 0.01 \\
    --use_vllm true \\
    --vllm_device auto \\
    --vllm_gpu_memory_utilization 0.55 \\
    --vllm_max_model_len 6000 \\
    --vllm_max_num_seqs 128 \\
    --vllm_enforce_eager false \\
    --vllm_enable_prefix_caching true \\
    --vllm_limit_mm_per_prompt '{"image": 1}' \\
    --vllm_server_host 127.0.0.1 \\
    --vllm_server_port 8123 \\
    --vllm_server_timeout 90 \\
    --num_infer_workers 8 \\
    --sleep_level 1 \\
    --offload_model true \\
    --offload_optimizer true \\
    --gc_collect_after_offload true \\
    --move_model_batches 16 \\
    --async_generate false \\
    --ds3_gather_for_generation false \\
    --multi_turn_func mine \\
    --train_type full \\
    --torch_dtype bfloat16 \\
    --dataset 'AI-MO/NuminaMath-TIR#500' \\
    --dataset_shuffle false \\
    --max_length 2000 \\
    --max_completion_length 3000 \\
    --num_train_epochs 3 \\
    --per_device_train_batch_size 4 \\
    --per_device_eval_batch_size 4 \\
    --gradient_accumulation_steps 2 \\
    --learning_rate 2e-6 \\
    --warmup_ratio 0.1 \\
    --eval_steps 300 \\
    --save_steps 301 \\
    --save_total_limit 3 \\
    --logging_steps 5 \\
    --output_dir out/run \\
    --dataloader_num_workers 4 \\
    --dataset_num_proc 4 \\
    --num_generations 8 \\
    --temperature 0.8 \\
    --top_p 0.95 \\
    --system 'Think first.' \\
    --deepspeed zero2 \\
    --report_to tensorboard wandb \\
    --log_completions true
"""

LORA = (
    "swift rlhf --rlhf_type grpo --model models/base --reward_funcs accuracy --lora_rank 16 --lora_alpha 64 --target_modules "
    "q_proj v_proj down_proj --dataset mine.jsonl#100 --num_generations 4 --per_device_train_batch_size 4 --num-train-epochs=1"
)

VERL = """
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=data/train.parquet
    data.val_files=data/test.parquet data.train_batch_size=64
    data.max_prompt_length=512 data.max_response_length=1024 data.filter_overlong_prompts=True
    data.truncation='error' actor_rollout_ref.model.path=models/base actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.model.use_remove_padding=True actor_rollout_ref.actor.ppo_mini_batch_size=32
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 actor_rollout_ref.actor.use_kl_loss=True
    actor_rollout_ref.actor.kl_loss_coef=0.002 actor_rollout_ref.actor.kl_loss_type=low_var_kl
    actor_rollout_ref.actor.entropy_coeff=0 actor_rollout_ref.model.enable_gradient_checkpointing=True
    actor_rollout_ref.actor.clip_ratio_low=0.2 actor_rollout_ref.actor.clip_ratio_high=0.28
    actor_rollout_ref.actor.loss_agg_mode=token-mean
    actor_rollout_ref.actor.fsdp_config.param_offload=False actor_rollout_ref.actor.fsdp_config.optimizer_offload=True
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8 actor_rollout_ref.rollout.tensor_model_parallel_size=2
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.gpu_memory_utilization=0.6 actor_rollout_ref.rollout.n=8
    actor_rollout_ref.rollout.val_kwargs.temperature=0 actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=8
    actor_rollout_ref.ref.fsdp_config.param_offload=True algorithm.use_kl_in_reward=False trainer.critic_warmup=0
    trainer.logger='["console","wandb"]' trainer.project_name=mine trainer.experiment_name=first trainer.n_gpus_per_node=4
    trainer.nnodes=2 trainer.save_freq=20 trainer.test_freq=5 trainer.total_epochs=15
    +actor_rollout_ref.actor.somewhere.unheard_of=3
"""


def values_of(tree: dict, prefix: str = "") -> dict[str, object]:
    found: dict[str, object] = {}
    for name, value in tree.items():
        found |= values_of(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found


def explained(path: Path, capsys) -> dict:
    capsys.readouterr()
    # a length in iterations: passes over the prompts would have to count what lies on a hub
    length = ["megatron_training.train_epochs=null", "megatron_training.train_iters=10"]
    assert explain_command.main(["--config-name", str(path), "--json", *length]) == 0
    return json.loads(capsys.readouterr().out)


def test_every_option_of_the_guides_has_its_key_or_its_reason(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["-o", "made.yaml", "swift", FULL]) == 0
    told = capsys.readouterr().out
    found = values_of(yaml.safe_load((tmp_path / "made.yaml").read_text()))
    expected = {
        "megatron_training.stage": "ray_grpo",
        "actor_config.load": "models/base-1.5b",
        "megatron_training.tokenizer_name_or_path": "models/base-1.5b",
        "megatron_training.global_batch_size": 8,  # prompts: 4 x 2 x 8 completions of an optimizer step / 8
        "megatron_training.micro_batch_size": 4,
        "megatron_training.data_path": "hf://AI-MO/NuminaMath-TIR#500",
        "megatron_training.map_keys.prompt": "problem",
        "megatron_training.no_shuffle": True,
        "actor_config.lr": 2e-6,
        "megatron_training.lr_warmup_fraction": 0.1,
        "megatron_training.train_epochs": 3,
        "megatron_training.eval_interval": 150,  # 300 optimizer steps, two of them a rollout
        "megatron_training.save_interval": 151,
        "megatron_training.keep_last": 3,
        "actor_config.save": "out/run/checkpoints",
        "run_dir": "out/run",
        "megatron_training.system_prompt": "Think first.",
        "megatron_training.use_distributed_optimizer": True,
        "megatron_training.bf16": True,
        "rl_config.actor_resource.num_npus": 8,
        "rl_config.n_samples_per_prompt": 8,
        "rl_config.mini_batch_size": 8,
        "rl_config.num_iterations": 2,
        "rl_config.reward_funcs": ["accuracy", "format", "soft_overlong"],
        "rl_config.reward_weights": [1.0, 0.25, 0.5],
        "rl_config.soft_cache_length": 500,
        "rl_config.soft_max_length": 3000,
        "rl_config.cosine_min_len_value_wrong": -0.4,
        "rl_config.cosine_max_len_value_wrong": 0.1,
        "rl_config.cosine_min_len_value_correct": 0.9,
        "rl_config.cosine_max_len_value_correct": 0.6,
        "rl_config.cosine_max_len": 2500,
        "rl_config.repetition_n_grams": 4,
        "rl_config.repetition_max_penalty": -0.75,
        "rl_config.clip_higher_enable": True,
        "rl_config.clip_ratio_low": 0.15,
        "rl_config.clip_ratio_high": 0.3,
        "rl_config.dynamic_sample": True,
        "rl_config.max_resample_times": 5,
        "rl_config.overlong_filter": True,
        "rl_config.loss_type": "bnpo",
        "rl_config.init_kl_coef": 0.01,
        "rl_config.max_prompt_length": 2000,
        "rl_config.report_to": ["tensorboard", "wandb"],
        "rl_config.log_completions": True,
        "generate_config.gpu_memory_utilization": 0.55,
        "generate_config.max_model_len": 6000,
        "generate_config.max_num_seqs": 128,
        "generate_config.enforce_eager": False,
        "generate_config.enable_prefix_caching": True,
        "generate_config.offload_train_param": True,
        "generate_config.offload_train_optimizer": True,
        "generate_config.sampling_config.max_tokens": 3000,
        "generate_config.sampling_config.temperature": 0.8,
        "generate_config.sampling_config.top_p": 0.95,
    }
    assert {path: found.get(path) for path in expected} == expected
    without = told.split("Options without an equivalent\n")[1].split("\n\n")[0]
    for name in (
        "use_vllm vllm_device vllm_limit_mm_per_prompt num_infer_workers "
        "sleep_level gc_collect_after_offload move_model_batches ds3_gather_for_generation multi_turn_func "
        "per_device_eval_batch_size dataloader_num_workers dataset_num_proc"
    ).split():
        assert f"  --{name} " in without, name
    assert "not known to this version" not in told
    for line in FULL.splitlines():
        if line.strip().startswith("--"):
            assert f"  {line.split()[0]} " in told, line
    assert explained(tmp_path / "made.yaml", capsys)["missing"] == []


def test_adapters_come_with_their_layers_and_are_the_default(tmp_path):
    made = from_swift(LORA, REWARDS)
    training = made.tree["megatron_training"]
    assert training["lora_target_modules"] == ["linear_qkv", "linear_fc2"]
    assert (training["lora_r"], training["lora_alpha"], training["data_path"]) == (16, 64, "mine.jsonl#100")
    assert made.tree["actor_config"]["lr"] == 1e-4  # what ms-swift takes for adapters
    bare = from_swift("swift rlhf --model m --reward_funcs accuracy --dataset a.jsonl --per_device_train_batch_size 8", REWARDS)
    training = bare.tree["megatron_training"]
    assert training["lora_target_modules"] == ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
    assert "lora_target_modules" not in from_swift(LORA + " --train_type full", REWARDS).tree["megatron_training"]


def test_sizes_that_do_not_divide_here_are_changed_and_told():
    # seven processes, one completion each, twice: two prompts for seven replicas
    command = (
        "NPROC_PER_NODE=7 swift rlhf --model m --train_type full --reward_funcs accuracy --dataset a.jsonl --num_generations 7 "
        "--per_device_train_batch_size 1 --gradient_accumulation_steps 2"
    )
    made = from_swift(command, REWARDS)
    size = made.tree["megatron_training"]["global_batch_size"]
    assert size % 7 == 0 and made.added["megatron_training.global_batch_size"].startswith(f"2 -> {size}, ")


def test_megatron_swift_counts_as_it_says():
    command = (
        "NPROC_PER_NODE=8 megatron rlhf --rlhf_type grpo --load m --dataset a.jsonl --reward_funcs accuracy "
        "--num_generations 8 --micro_batch_size 2 --global_batch_size 64 --steps_per_generation 2 "
        "--tensor_model_parallel_size 2 "
        "--pipeline_model_parallel_size 2 --train_iters 100 --sequence_parallel true"
    )
    made = from_swift(command, REWARDS)
    training = made.tree["megatron_training"]
    assert (training["global_batch_size"], training["micro_batch_size"], training["train_iters"]) == (64, 2, 50)
    assert (training["tensor_model_parallel_size"], training["pipeline_model_parallel_size"]) == (2, 2)
    assert made.tree["rl_config"]["steps_per_generation"] == 2 and "lora_target_modules" not in training


def test_a_system_prompt_may_stand_in_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompt.txt").write_text("Answer in <answer>.\n")
    made = from_swift(LORA + " --system prompt.txt", REWARDS)
    assert made.tree["megatron_training"]["system_prompt"] == "Answer in <answer>."
    assert "there is no file gone.txt" in from_swift(LORA + " --system gone.txt", REWARDS).omitted["--system"]


def test_rewards_and_options_that_nobody_knows_are_told():
    command = LORA.replace("--reward_funcs accuracy", "--reward_funcs accuracy external_thing") + " --never_heard_of 3"
    made = from_swift(command, REWARDS)
    assert made.tree["rl_config"]["reward_funcs"] == ["accuracy"]
    assert "no reward function of this name" in made.omitted["--reward_funcs external_thing"]
    assert "not known to this version" in made.omitted["--never_heard_of"]


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("swift sft --model m", "only 'swift rlhf' and 'megatron rlhf'"),
        ("swift rlhf --rlhf_type dpo --model m", "--rlhf_type is 'dpo', but only grpo"),
        ("swift rlhf --model 'm", "cannot be read: No closing quotation"),
        ("swift rlhf", "has no --options"),
        ("swift rlhf --model m --num_generations many", "--num_generations is 'many', but must be a whole number"),
        ("swift rlhf --model m --reward_funcs accuracy --reward_weights 1 2", "--reward_weights has 2 values for 1 rewards"),
        ("swift rlhf --model m --reward_funcs accuracy --dataset a.jsonl --temperature hot", "temperature is 'hot'"),
        ("NPROC_PER_NODE=x swift rlhf --model m", "NPROC_PER_NODE=x"),
    ],
)
def test_a_command_that_cannot_be_imported_is_one_clear_error(command, sentence, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["swift", command]) == 2
    assert sentence in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_dotted_keys_of_verl_become_a_run_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["verl", VERL]) == 0
    told = capsys.readouterr().out
    found = values_of(yaml.safe_load((tmp_path / "from_verl.yaml").read_text()))
    expected = {
        "megatron_training.stage": "ray_grpo",
        "megatron_training.data_path": "data/train.parquet",
        "megatron_training.eval_data_path": "data/test.parquet",
        "megatron_training.map_keys.prompt": "prompt",
        "megatron_training.global_batch_size": 64,
        "actor_config.load": "models/base",
        "actor_config.lr": 1e-6,
        "megatron_training.micro_batch_size": 4,
        "megatron_training.recompute_granularity": "full",
        "megatron_training.save_interval": 20,
        "megatron_training.eval_interval": 5,
        "megatron_training.train_epochs": 15,
        "rl_config.adv_estimator": "group_norm",
        "rl_config.max_prompt_length": 512,
        "rl_config.mini_batch_size": 32,
        "rl_config.n_samples_per_prompt": 8,
        "rl_config.init_kl_coef": 0.002,
        "rl_config.kl_penalty": "low_var_kl",
        "rl_config.entropy_coeff": 0,
        "rl_config.clip_higher_enable": True,
        "rl_config.clip_ratio_low": 0.2,
        "rl_config.clip_ratio_high": 0.28,
        "rl_config.loss_type": "dapo",
        "rl_config.use_remove_padding": True,
        "rl_config.actor_forward_micro_batch_size": 8,
        "rl_config.ref_forward_micro_batch_size": 8,
        "rl_config.report_to": ["wandb"],
        "rl_config.wandb_project": "mine",
        "rl_config.wandb_exp_name": "first",
        "rl_config.actor_resource.num_npus": 8,
        "generate_config.sampling_config.max_tokens": 1024,
        "generate_config.infer_tensor_parallel_size": 2,
        "generate_config.gpu_memory_utilization": 0.6,
        "generate_config.offload_train_optimizer": True,
    }
    assert {path: found.get(path) for path in expected} == expected
    assert found["generate_config.sampling_config.temperature"] == 1.0  # val_kwargs is not the rollout's
    assert "unheard_of  not known to this version" in told
    assert explained(tmp_path / "from_verl.yaml", capsys)["missing"] == []


def test_ppo_of_verl_has_a_critic():
    command = "algorithm.adv_estimator=gae data.train_files=a.parquet actor_rollout_ref.model.path=m critic.optim.lr=1e-5 "
    command += "data.train_batch_size=8 actor_rollout_ref.actor.ppo_mini_batch_size=8 algorithm.use_kl_in_reward=True "
    command += "algorithm.kl_ctrl.kl_coef=0.003 trainer.total_training_steps=10 critic.model.path=m"
    tree = from_verl(command, REWARDS).tree
    assert tree["megatron_training"]["stage"] == "ray_ppo" and tree["critic_config"]["lr"] == 1e-5
    assert (tree["rl_config"]["use_kl_in_reward"], tree["rl_config"]["init_kl_coef"]) == (True, 0.003)


def test_two_places_for_the_kl_are_refused():
    command = "algorithm.use_kl_in_reward=True actor_rollout_ref.actor.use_kl_loss=True data.train_files=a.parquet"
    with pytest.raises(ConfigError, match="are both true, but the KL has one place here"):
        from_verl(command, REWARDS)


def test_a_run_file_of_somebody_is_not_written_over(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "from_swift.yaml").write_text("mine: true\n")
    assert main(["swift", LORA]) == 2
    assert "from_swift.yaml already exists" in capsys.readouterr().err
    assert main(["--force", "swift", LORA]) == 0
    assert main(["swift", LORA]) == 0  # the same again


def test_train_takes_the_command_and_writes_its_run_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert train.main(["--from-swift", LORA, "rl_config.clip_ratio=lots"]) == 2
    assert "clip_ratio is 'lots'" in capsys.readouterr().err
    assert yaml.safe_load((tmp_path / "from_swift.yaml").read_text())["rl_config"]["n_samples_per_prompt"] == 4
    with pytest.raises(SystemExit):
        train.main([])


def test_a_clip_range_of_zero_is_one_and_a_subset_is_not_dropped_in_silence() -> None:
    made = from_verl(VERL.replace("clip_ratio_low=0.2", "clip_ratio_low=0.0"), REWARDS)
    assert values_of(made.tree)["rl_config.clip_ratio_low"] == 0.0
    bare = "swift rlhf --rlhf_type grpo --model m --reward_funcs accuracy --dataset org/data:hard#5"
    assert any("org/data:hard" in option for option in from_swift(bare, REWARDS).omitted)
