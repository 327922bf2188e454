"""Files and launchers of ms-swift and TRL: ENV, groups of a run under Ray, accelerate; devices and placement of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from mindspeed_rl.config import ConfigError
from mindspeed_rl.importers.command import PROJECTS
from mindspeed_rl.importers.importer import import_command
from mindspeed_rl.importers.result import Import, ImportSettings
from mindspeed_rl.rewards import REWARDS

WORDS = (
    "--rlhf_type grpo --model /m/Qwen3-4B --dataset /d/x.jsonl --reward_funcs accuracy --num_generations 8 "
    "--per_device_train_batch_size 8 --tuner_type full --max_length 512"
)
TRL = (
    "--model_name_or_path /m/Q --dataset_name /d/x.jsonl --reward_funcs accuracy_reward --num_generations 8 "
    "--per_device_train_batch_size 8 --loss_type dr_grpo --scale_rewards none"
)


def imported(text: str, folder: Path | None = None, project: str = "swift") -> Import:
    return import_command(PROJECTS[project], text, ImportSettings(rewards=REWARDS, folder=folder))


def refusal(text: str, folder: Path | None = None, project: str = "swift") -> str:
    with pytest.raises(ConfigError) as caught:
        imported(text, folder, project)
    return "\n".join(caught.value.errors)


def devices(run: Import) -> object:
    return run.get("rl_config.actor_resource.num_npus")


def test_the_variables_of_a_file_are_those_of_the_command_unless_it_has_them(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        yaml.safe_dump({"ENV": {"NPROC_PER_NODE": 4, "MAX_PIXELS": "1003520"}, "model": "/m/Q", "rlhf_type": "grpo"})
    )
    words = WORDS.replace("--rlhf_type grpo --model /m/Qwen3-4B ", "")
    run = imported(f"swift rlhf run.yaml {words}", tmp_path)
    assert (devices(run), run.get("megatron_training.max_pixels")) == (4, 1003520)
    assert devices(imported(f"NPROC_PER_NODE=8 swift rlhf --config run.yaml {words}", tmp_path)) == 8
    assert "elsewhere.yaml is not here" in refusal(f"swift rlhf elsewhere.yaml {words}", tmp_path)


RAY = {
    "rlhf_type": "grpo", "model": "/m/Q", "dataset": "/d/x.jsonl", "reward_funcs": ["accuracy"], "micro_batch_size": 2,
    "global_batch_size": 32, "num_generations": 8, "steps_per_generation": 4, "train_iters": 100, "lr": 5e-5, "max_length": 512,
    "use_vllm": True, "lr_warmup_fraction": 0.0,
    "train": {"gpus": 4, "tuner_type": "lora", "lora_rank": 4, "tensor_model_parallel_size": 2},
    "rollout": {"gpus": 2, "vllm_tensor_parallel_size": 2, "vllm_max_model_len": 2048},
}  # fmt: skip


def test_groups_of_a_run_under_ray_are_devices_and_options_of_their_programs(tmp_path: Path) -> None:
    path = tmp_path / "ray.yaml"
    path.write_text(yaml.safe_dump(RAY))
    command = f"megatron rlhf --use_ray true --config {path}"
    run = imported(command)
    assert (devices(run), run.get("rl_config.rollout_resource.num_npus")) == (4, 2)
    assert run.get("rl_config.use_integrated_worker") is False
    names = ("megatron_training.tensor_model_parallel_size", "megatron_training.lora_r", "generate_config.max_model_len")
    assert [run.get(name) for name in names] == [2, 4, 2048]
    assert run.get("generate_config.infer_tensor_parallel_size") == 2
    path.write_text(yaml.safe_dump(RAY | {"colocate_groups": [["train", "rollout"]]}))
    run = imported(command)
    assert (devices(run), run.get("rl_config.rollout_resource")) == (4, None)
    path.write_text(yaml.safe_dump(RAY | {"teacher": {"gpus": 2}}))
    assert "the group teacher" in refusal(command)
    path.write_text(yaml.safe_dump(RAY | {"device_groups": {"nproc_per_node": 4}}))
    assert "device_groups" in refusal(command)


@pytest.mark.parametrize(
    ("launcher", "expected"),
    [
        ("accelerate launch --num_processes 8", 8),
        ("accelerate launch --num_processes=8 --num_machines 2", 8),
        ("accelerate launch --config_file zero3.json", 6),
        ("accelerate launch --config_file zero3.json --num_processes 2", 2),
        # accelerate starts the script, which does not start torchrun again
        ("NPROC_PER_NODE=3 accelerate launch --config_file zero3.json", 6),
        ("CUDA_VISIBLE_DEVICES=0,1,2,3 accelerate launch", 4),
        ("torchrun --nproc_per_node 8 --nnodes 2", 16),
    ],
)
def test_the_launcher_of_a_script_has_the_number_of_devices(tmp_path: Path, launcher: str, expected: int) -> None:
    (tmp_path / "zero3.json").write_text(json.dumps({"num_processes": 6, "num_machines": 1}))
    assert devices(imported(f"{launcher} swift/cli/rlhf.py {WORDS}", tmp_path)) == expected
    assert devices(imported(f"{launcher} trl/scripts/grpo.py {TRL}", tmp_path, "trl")) == expected


SCRIPTS = [("swift", f"swift/cli/rlhf.py {WORDS}"), ("trl", f"trl/scripts/grpo.py {TRL}")]


@pytest.mark.parametrize(("project", "script"), SCRIPTS)
def test_a_file_of_accelerate_that_is_not_here_is_asked_for(project: str, script: str) -> None:
    assert "is in mine/zero3.yaml, which is not here" in refusal(
        f"accelerate launch --config_file mine/zero3.yaml {script}", project=project
    )


@pytest.mark.parametrize(
    "program", ["swift rlhf", "python -m swift.cli.main rlhf", "python3 -m swift.cli.rlhf", "python swift/cli/main.py rlhf"]
)
def test_every_way_to_start_a_program_is_the_same_run(program: str) -> None:
    assert imported(f"NPROC_PER_NODE=8 {program} {WORDS}").tree == imported(f"NPROC_PER_NODE=8 swift rlhf {WORDS}").tree


def test_engines_next_to_the_training_processes_have_devices_of_their_own() -> None:
    base = f"NPROC_PER_NODE=7 swift rlhf {WORDS} --per_device_train_batch_size 8 --use_vllm true --num_infer_workers 1"
    run = imported(base)
    keys = ("actor_resource.num_npus", "rollout_resource.num_npus", "use_integrated_worker", "trainer_mode")
    assert [run.get(f"rl_config.{key}") for key in keys] == [7, 1, False, None]
    run = imported(f"{base} --async_generate true")
    assert [run.get(f"rl_config.{key}") for key in keys] == [7, 1, False, "one_step_off"]
    # as many engines as processes: each shares the device of one
    run = imported(f"NPROC_PER_NODE=8 swift rlhf {WORDS} --num_infer_workers 8")
    assert [run.get(f"rl_config.{key}") for key in keys] == [8, None, None, None]


def test_the_address_of_a_server_is_the_mode_server() -> None:
    run = imported(f"NPROC_PER_NODE=8 swift rlhf {WORDS} --use_vllm true --vllm_server_host 10.0.0.2 --vllm_server_port 8001")
    assert [run.get(f"generate_config.vllm_server_{name}") for name in ("host", "port")] == ["10.0.0.2", 8001]
    assert "next to the address of a server" in refusal(
        f"NPROC_PER_NODE=8 swift rlhf {WORDS} --vllm_mode colocate --vllm_server_host 10.0.0.2"
    )


def test_pixels_of_an_image_are_those_of_its_tokens() -> None:
    words = WORDS.replace("/m/Qwen3-4B", "/m/Qwen3-VL-4B")
    run = imported(f"IMAGE_MAX_TOKEN_NUM=1024 NPROC_PER_NODE=8 swift rlhf {words}")
    # a token of Qwen3-VL is 2 x 2 patches of 16 x 16 pixels, one of Qwen2.5-VL 2 x 2 of 14 x 14
    assert run.get("megatron_training.max_pixels") == 1024 * 32 * 32
    words = words.replace("Qwen3-VL-4B", "Qwen2.5-VL-3B")
    run = imported(f"IMAGE_MIN_TOKEN_NUM=16 NPROC_PER_NODE=8 swift rlhf {words}")
    assert run.get("megatron_training.min_pixels") == 16 * 28 * 28


def test_rows_of_a_supervised_stage_without_a_limit_have_that_of_the_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "max_position_embeddings": 40960}))
    words = "--dataset /d/x.jsonl --tuner_type full --per_device_train_batch_size 2"
    run = imported(f"NPROC_PER_NODE=8 swift sft --model {tmp_path} {words}")
    assert run.get("megatron_training.seq_length") == 40960
    run = imported(f"NPROC_PER_NODE=8 swift sft --model {tmp_path} {words} --max_length 512")
    assert run.get("megatron_training.seq_length") == 512
    # without config.json no row is left out, and packs and samples of documents need a number
    elsewhere = "NPROC_PER_NODE=8 swift {} --model /m/elsewhere " + words
    run = imported(elsewhere.format("sft"))
    assert run.get("megatron_training.seq_length") is None
    assert "above the model's limit are left out" in run.added["megatron_training.seq_length"]
    for command in (elsewhere.format("sft") + " --packing true", elsewhere.format("pt") + " --max_steps 3"):
        assert "config.json of /m/elsewhere is not here; --set MAX_LENGTH=TOKENS" in refusal(command)
    run = imported("MAX_LENGTH=4096 " + elsewhere.format("sft") + " --packing true")
    assert run.get("megatron_training.seq_length") == 4096


def test_the_file_of_a_system_prompt_is_looked_for_from_the_folder_of_the_script_upwards(tmp_path: Path) -> None:
    (tmp_path / "examples" / "grpo").mkdir(parents=True)
    (tmp_path / "examples" / "prompt.txt").write_text("Think.\n")
    command = f"NPROC_PER_NODE=8 swift rlhf {WORDS} --use_vllm true --vllm_mode colocate --system examples/prompt.txt"
    run = imported(command, tmp_path / "examples" / "grpo")
    assert run.get("megatron_training.system_prompt") == "Think."
    assert "there is no file examples/prompt.txt here" in refusal(command)


def test_long_prompts_and_rows_are_cut_or_left_out_as_there() -> None:
    rollout = f"NPROC_PER_NODE=8 swift rlhf {WORDS} --use_vllm true --vllm_mode colocate "
    key = "rl_config.long_prompts"
    assert imported(rollout).get(key) == imported(f"{rollout}--truncation_strategy left").get(key) == "cut_left"
    assert imported(f"{rollout}--truncation_strategy delete").get(key) == "drop_longer"
    assert "rollouts have left and delete" in refusal(f"{rollout}--truncation_strategy right")
    rows = "NPROC_PER_NODE=8 swift sft --model /m/Q --dataset /d/x.jsonl --max_length 512 --num_train_epochs 1 "
    assert imported(f"{rows}--truncation_strategy delete").get("megatron_training.seq_length") == 512
    for strategy in ("left", "right"):
        assert "rows that are cut" in refusal(f"{rows}--truncation_strategy {strategy}")


def test_a_server_of_an_earlier_release_has_the_options_of_its_engine() -> None:
    earlier = imported("swift rollout --model m --tensor_parallel_size 2 --gpu_memory_utilization 0.8").tree
    today = "swift rollout --model m --vllm_tensor_parallel_size 2 --vllm_gpu_memory_utilization 0.8"
    assert earlier == imported(today).tree
