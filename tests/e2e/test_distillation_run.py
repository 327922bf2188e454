"""Runs of distillation: where teachers are changes no figure, a student comes closer to its teacher, bad input ends at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from grpo_command import ONE_PROCESS, finished
from measured_figures import select_computed

ON = ["+rl_config.distillation.enabled=true", "rl_config.init_kl_coef=0", "actor_config.save=null"]


def keys(**values: object) -> list[str]:
    return [*ON, *(f"+rl_config.distillation.{name}={value}" for name, value in values.items())]


def with_sources(task: Path, folder: Path) -> list[str]:
    """Prompts whose column data_source alternates, and one with a hint."""
    rows = [json.loads(line) for line in (task / "train.jsonl").read_text().splitlines()]
    added = [
        row | {"data_source": "xy"[index % 2], "hint": f"{row['labels']};{row['prompt']}"} for index, row in enumerate(rows)
    ]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in added))
    return [
        f"megatron_training.data_path={folder / 'rows.jsonl'}",
        "megatron_training.dataset_additional_keys=[labels,data_source,hint]",
    ]


@pytest.mark.slow
def test_teachers_on_devices_of_their_own_give_the_figures_of_shared_ones(task: Path, tmp_path: Path) -> None:
    model = task / "model"
    common = [
        *ONE_PROCESS,
        *with_sources(task, tmp_path / "data"),
        *keys(
            teacher_models=f"[{model},{model}/.]",
            teacher_keys="[x,y]",
            teacher_temperature=2.0,  # nearer to uniform: what lies beyond the top 8 is not a rounding of 1 - their sum
            loss_mode="reverse_kl_topk",
            topk=8,
            topk_rest="lump",
            distillation_loss_coef=0.5,
        ),
        "megatron_training.train_iters=2",
    ]
    shared = finished(task, tmp_path / "shared", *common)
    other = ["+rl_config.teacher_resource.num_npus=2", "+teacher_config.tensor_model_parallel_size=2"]
    dedicated = finished(task, tmp_path / "separate", *common, *other, "+teacher_config.micro_batch_size=4")
    assert "starting 1 workers and 2 for the teachers" in dedicated.output
    for ours, theirs in zip(dedicated.metrics, shared.metrics, strict=True):
        result, expected = select_computed(ours), select_computed(theirs)
        assert result.keys() == expected.keys() and result["distillation/divergence"] > 0.001
        for name, value in expected.items():
            assert result[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name


@pytest.mark.slow
def test_a_student_without_rewards_learns_from_itself_with_a_hint(task: Path, tmp_path: Path) -> None:
    run = finished(
        task,
        tmp_path / "self",
        *ONE_PROCESS,
        *with_sources(task, tmp_path / "data"),
        *keys(
            teacher_models="[actor]",
            teacher_prompt="hint",
            loss_mode="k1",
            use_policy_gradient="true",
            use_task_rewards="false",
        ),
        "rl_config.rule_reward=false",
        "megatron_training.train_iters=2",
    )
    results = [select_computed(record) for record in run.metrics]
    assert len(results) == 2 and all(abs(metrics["distillation/divergence"]) > 1e-6 for metrics in results)
