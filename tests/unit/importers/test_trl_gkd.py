"""TRL's GKDTrainer as on-policy distillation: its script, and programs that call it."""

from __future__ import annotations

from pathlib import Path

import pytest

from mindspeed_rl.config import ConfigError
from mindspeed_rl.importers.importer import import_command
from mindspeed_rl.importers.result import Import, ImportSettings
from mindspeed_rl.importers.trl import PROJECT

GKD = (
    "accelerate launch --num_processes 4 examples/scripts/gkd.py --model_name_or_path models/base --dataset_name a/b "
    "--teacher_model_name_or_path models/teacher --per_device_train_batch_size 2 --max_steps 10 --output_dir out"
)
PROGRAM = """
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.experimental.gkd import GKDConfig, GKDTrainer

if __name__ == "__main__":
    trainer = GKDTrainer(
        model="models/base",
        teacher_model=AutoModelForCausalLM.from_pretrained("models/teacher", dtype="auto"),
        args=GKDConfig(output_dir="out", lmbda=0.25, beta=0.1, temperature=1.0, max_new_tokens=64, max_steps=10),
        processing_class=AutoTokenizer.from_pretrained("models/base"),
        train_dataset=load_dataset("json", data_files="rows.jsonl", split="train"),
    )
    trainer.train()
"""


def take(command: str, *accepted: str, folder: Path | None = None) -> Import:
    return import_command(PROJECT, command, ImportSettings(accepted=frozenset(accepted), folder=folder, devices=4))


def fail(command: str, folder: Path | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        take(command, folder=folder)
    return "\n".join(caught.value.errors)


def keys(run: Import, *names: str) -> list[object]:
    return [run.get(f"rl_config.distillation.{name}") for name in names]


def test_the_script_mixes_the_student_s_responses_with_the_last_messages_of_the_rows() -> None:
    run = take(GKD, "aggregation", "divergence")
    names = ("teacher_models", "loss_mode", "beta", "on_policy_fraction", "response_column", "use_task_rewards")
    assert keys(run, *names) == [["models/teacher"], "jsd_topk", 0.5, 0.5, "messages", False]
    assert run.get("generate_config.sampling_config") == {"temperature": 0.9, "max_tokens": 128}
    assert run.get("megatron_training.map_keys") == {"messages": "messages", "response": "messages"}
    assert run.plans is not None
    # 4 devices x 2 rows
    assert [(plan.step_samples, plan.rollout_completions, plan.total_steps, plan.lr_first) for plan in run.plans] == [
        (8, 8, 10, 2e-5)
    ] * 2
    assert run.get("megatron_training.weight_decay") == 0.0


def test_what_trl_computes_otherwise_is_named() -> None:
    text = fail(f"{GKD} --gradient_accumulation_steps 4")
    # its loss divides by the data's tokens, which are counted before the student's replace them
    assert "aggregation would be token here, but is token of the data's responses in TRL" in text
    # and its loss has no temperature
    assert "but is jsd 0.5 over the vocabulary at temperature 1 in TRL" in text
    assert "on the responses of the data, chosen for each of its 4 passes in TRL; --accept sampled_steps" in text
    assert "seq_kd: not available here: sequence distillation" in fail(f"{GKD} --seq_kd true")


def test_without_the_student_s_responses_every_step_is_on_the_data() -> None:
    run = take(f"{GKD} --lmbda 0 --temperature 1 --gradient_accumulation_steps 4", "divergence")
    assert keys(run, "on_policy_fraction") == [0.0]
    whole = take(f"{GKD} --lmbda 1 --gradient_accumulation_steps 4", "divergence", "aggregation")
    assert keys(whole, "on_policy_fraction", "response_column") == [None, None]


def test_a_program_that_calls_the_trainer_is_read(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(PROGRAM)
    (tmp_path / "rows.jsonl").write_text('{"messages": []}')
    run = take("python own.py", "aggregation", "divergence", folder=tmp_path)
    assert keys(run, "teacher_models", "beta", "on_policy_fraction") == [["models/teacher"], 0.1, 0.25]
    assert run.get("generate_config.sampling_config.max_tokens") == 64
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1?", "completion": "2"}')
    assert "rows of GKD without the column messages" in fail("python own.py", tmp_path)
    teacher = 'AutoModelForCausalLM.from_pretrained("models/teacher", dtype="auto")'
    (tmp_path / "own.py").write_text(PROGRAM.replace(teacher, "f()"))
    assert "write --set teacher_model_name_or_path=FOLDER" in fail("python own.py", tmp_path)
