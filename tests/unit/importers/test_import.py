"""`mindspeed-rl import`: what becomes of each option, and that `explain` accepts the run file that is written."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
import yaml

from mindspeed_rl.cli import explain as explain_command
from mindspeed_rl.cli import train
from mindspeed_rl.config import ConfigError
from mindspeed_rl.importers.command import PROJECTS, main
from mindspeed_rl.importers.importer import import_command
from mindspeed_rl.importers.result import ImportSettings
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
ROLLOUT=(actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=${N:-8}
    actor_rollout_ref.rollout.tensor_model_parallel_size=2)
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=$DATA/gsm8k/train.parquet \\
    data.train_batch_size=64 data.max_prompt_length=512 data.max_response_length=1024 \\
    actor_rollout_ref.model.path=models/base actor_rollout_ref.actor.ppo_mini_batch_size=32 \\
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=$((2 * 2)) actor_rollout_ref.actor.use_kl_loss=True \\
    actor_rollout_ref.actor.kl_loss_coef=0.002 trainer.n_gpus_per_node=4 trainer.nnodes=2 trainer.save_freq=20 \\
    trainer.total_epochs=15 "${ROLLOUT[@]}" $@ 2>&1 | tee log.txt
"""


LINE = (
    "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=data/gsm8k/train.parquet "
    "data.train_batch_size=64 actor_rollout_ref.model.path=models/base actor_rollout_ref.actor.ppo_mini_batch_size=32 "
    "actor_rollout_ref.rollout.n=8 trainer.n_gpus_per_node=8"
)


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


@pytest.mark.parametrize(
    "place",
    [
        lambda options, command: [*options, "swift", command],
        lambda options, command: ["swift", *options, command],
        lambda options, command: ["swift", command, *options],
        lambda options, command: [*options[:2], "swift", *options[2:], command],
        lambda options, command: ["swift", "--output=made.yaml", *options[2:], command],
        lambda options, command: ["swift", *options, "--", command],
    ],
)
def test_options_of_import_may_be_anywhere(place, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(place(["-o", "made.yaml", "--force", "--accept", "aggregation"], FULL)) == 0
    assert "written: made.yaml" in capsys.readouterr().out and (tmp_path / "made.yaml").is_file()


def test_every_option_of_the_guides_has_its_key_or_its_reason(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    # ms-swift averages bnpo inside each micro-batch
    assert main(["-o", "made.yaml", "--accept", "aggregation", "swift", FULL]) == 0
    printed = capsys.readouterr().out
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
        "megatron_training.train_iters": 186,  # three passes over 500 rows, 8 prompts a rollout, without the last 4 of a pass
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
        "rl_config.epochs": 2,
        # the format of ms-swift has nothing but thought and answer
        "rl_config.reward_funcs": ["swift_accuracy", "think_answer_alone", "swift_soft_overlong"],
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
    for line in FULL.splitlines():
        if line.strip().startswith("--"):
            name = line.split()[0].replace("--train_type", "--tuner_type")  # the name of this release
            assert f"  {name} " in printed, line
    assert explained(tmp_path / "made.yaml", capsys)["missing"] == []


def test_a_script_of_verl_is_read_and_its_unknown_variable_is_requested(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.sh").write_text(VERL)
    assert main(["verl", "run.sh"]) == 2
    assert "line 4: the value of DATA is not in the script; say it with --set DATA=VALUE" in capsys.readouterr().err
    assert main(["--set", "DATA=data", "verl", "run.sh"]) == 0
    printed = capsys.readouterr().out
    assert "show its plan: mindspeed-rl explain --config-name from_verl.yaml" in printed
    found = values_of(yaml.safe_load((tmp_path / "from_verl.yaml").read_text()))
    expected = {
        "megatron_training.stage": "ray_grpo",
        "megatron_training.data_path": "data/gsm8k/train.parquet",
        "megatron_training.map_keys.prompt": "prompt",
        "megatron_training.global_batch_size": 64,
        "megatron_training.micro_batch_size": 4,
        "megatron_training.save_interval": 20,
        "megatron_training.train_epochs": 15,
        "megatron_training.lr_decay_style": "constant",
        "actor_config.load": "models/base",
        "actor_config.lr": 1e-6,
        "rl_config.adv_estimator": "group_norm",
        "rl_config.mini_batch_size": 32,
        "rl_config.n_samples_per_prompt": 8,
        "rl_config.init_kl_coef": 0.002,
        "rl_config.kl_penalty": "low_var_kl",
        "rl_config.verifier_function": ["verl_gsm8k"],
        "rl_config.actor_resource.num_npus": 8,
        "generate_config.sampling_config.max_tokens": 1024,
        "generate_config.sampling_config.temperature": 1.0,
        "generate_config.infer_tensor_parallel_size": 2,
    }
    assert {path: found.get(path) for path in expected} == expected
    assert explained(tmp_path / "from_verl.yaml", capsys)["missing"] == []


def test_a_script_comes_from_standard_input(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO(VERL))
    assert main(["-o", "made", "--set", "DATA=data", "--set", "N=4", "verl", "-"]) == 0
    assert values_of(yaml.safe_load((tmp_path / "made.yaml").read_text()))["rl_config.n_samples_per_prompt"] == 4


def test_options_of_the_command_are_checked(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command = VERL.replace("$DATA", "data")
    assert main(["--accept", "batch", "verl", command]) == 2
    assert "--accept batch: no number of a plan; they are stage, rollout_prompts" in capsys.readouterr().err
    assert main(["verl", command.replace("$@", "trainer.unheard_of=1")]) == 2
    assert "trainer.unheard_of: not available here: no option of verl" in capsys.readouterr().err
    assert main(["--allow-unknown", "verl", command.replace("$@", "trainer.unheard_of=1")]) == 0
    text = (tmp_path / "from_verl.yaml").read_text()
    assert "# without effect here: trainer.unheard_of: not known in verl" in text
    with pytest.raises(SystemExit):
        main(["--set", "DATA", "verl", command])


@pytest.mark.parametrize(
    "place",
    [
        "front",
        "behind a script",
        "behind a command in quotes",
        "among the words",
        "before the words",
        "within the words",
        "after two dashes",
    ],
)
def test_options_of_import_stand_anywhere(place: str, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    text = VERL.replace("$DATA", "data").replace("$@", "")
    (tmp_path / "run.sh").write_text(text)
    words = {
        "front": ["-o", "made.yaml", "verl", "run.sh"],
        "behind a script": ["verl", "run.sh", "-o", "made.yaml", "--rows", "64"],
        "behind a command in quotes": ["verl", text, "-o", "made.yaml"],
        "among the words": ["verl", *LINE.split(), "-o", "made.yaml"],
        "before the words": ["verl", "-o", "made.yaml", *LINE.split()],
        "within the words": ["verl", *LINE.split()[:3], "-o", "made.yaml", *LINE.split()[3:]],
        "after two dashes": ["verl", "--", "run.sh", "-o", "made.yaml"],
    }
    assert main(words[place]) == 0
    assert (tmp_path / "made.yaml").is_file()


@pytest.mark.parametrize("path", ["nowhere.sh", "scripts/run", "config.yaml", "train.py"])
def test_a_path_that_is_not_here_is_named(path: str, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["verl", path]) == 2
    assert f"there is no script: '{path}' does not exist" in capsys.readouterr().err


def test_a_script_that_calls_one_that_is_not_here_names_it(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.sh").write_text("export A=1\nbash scripts/train.sh 8\n")
    assert main(["verl", "run.sh"]) == 2
    assert "line 2 calls scripts/train.sh, which is not here" in capsys.readouterr().err
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "train.sh").write_text(VERL.replace("$DATA", "data").replace("$@", ""))
    assert main(["verl", "run.sh"]) == 0


PROGRAM = """from trl import GRPOConfig, GRPOTrainer
args = GRPOConfig(output_dir="x", num_generations=8, beta=0.01)
trainer = GRPOTrainer(model="Qwen/Qwen3-4B", reward_funcs=f, args=args, train_dataset=ds)
trainer.train()
"""


@pytest.mark.parametrize("project", sorted(set(PROJECTS) - {"trl"}))
def test_a_python_program_is_refused_in_one_sentence(project: str) -> None:
    with pytest.raises(ConfigError, match="this is a Python program, whose arguments are in its code") as caught:
        import_command(PROJECTS[project], PROGRAM, ImportSettings())
    assert len(caught.value.errors) == 1


@pytest.mark.parametrize(
    "path", ["my_project/grpo_search.py", "src/open_r1/grpo.py", "examples/scripts/grpo_vlm.py", "sft_own.py"]
)
def test_a_program_of_its_own_is_no_script_of_trl(path: str) -> None:
    command = f"accelerate launch --num_processes 8 {path} --model_name_or_path m --dataset_name d.jsonl"
    with pytest.raises(ConfigError, match=f"{path} is a program of its own"):
        import_command(PROJECTS["trl"], command, ImportSettings(rewards=REWARDS))


def test_a_loop_says_which_of_its_runs_is_imported() -> None:
    loop = f"for n in 8 4; do\n{LINE} actor_rollout_ref.rollout.n=$n\ndone"
    run = import_command(PROJECTS["verl"], loop, ImportSettings(rewards=REWARDS))
    assert run.without_effect["the loop of the script"].startswith("run 1 of 2 of the loop over n in line 1: n=8")
    assert "# without effect here: the loop of the script: run 1 of 2" in run.render(loop)
    run = import_command(PROJECTS["verl"], loop, ImportSettings(rewards=REWARDS, variables={"n": "4"}))
    assert run.get("rl_config.n_samples_per_prompt") == 4 and "the loop of the script" not in run.without_effect


def test_a_command_that_cannot_be_imported_leaves_no_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["swift", "swift rlhf --model 'm"]) == 2
    assert "cannot be read: No closing quotation" in capsys.readouterr().err and not list(tmp_path.iterdir())


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
