"""Runs of distillation: where teachers are changes no figure, a student comes closer to its teacher, bad input ends at once."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from grpo_command import ONE_PROCESS, finished
from measured_figures import select_computed
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

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


def measure_gkd(task: Path, temperature: float) -> tuple[float, float]:
    """Means over the tokens of the data's responses: JSD(teacher, student) and -log q, by transformers.

    The data is one row; both models have the same weights, and the teacher's logits are divided by the temperature.
    """
    model, tokenizer = (kind.from_pretrained(task / "model") for kind in (AutoModelForCausalLM, AutoTokenizer))
    row = json.loads((task / "train.jsonl").read_text().splitlines()[0])
    prompt, answer = (tokenizer(row[name], add_special_tokens=False)["input_ids"] for name in ("prompt", "labels"))
    answer = torch.tensor([*answer, tokenizer.eos_token_id])
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1].double()
    log_q, log_p = logits.log_softmax(-1), (logits / temperature).log_softmax(-1)
    mixture = (0.5 * log_q.exp() + 0.5 * log_p.exp()).log()
    sides = [functional.kl_div(mixture, side, reduction="none", log_target=True).sum(-1) for side in (log_p, log_q)]
    return float((0.5 * sides[0] + 0.5 * sides[1]).mean()), float(functional.cross_entropy(logits, answer))


@pytest.mark.slow
def test_a_mixture_trains_on_the_data_s_responses_by_the_formula_and_goes_on_after_a_resume(task: Path, tmp_path: Path) -> None:
    row = (task / "train.jsonl").read_text().splitlines()[0] + "\n"
    (tmp_path / "rows.jsonl").write_text(row * 8)
    common = [
        *ONE_PROCESS,
        *keys(
            teacher_models=f"[{task / 'model'}]",
            teacher_temperature=2.0,
            loss_mode="jsd_topk",
            topk=128,  # the vocabulary
            use_task_rewards="false",
            on_policy_fraction=0.5,
            supervised_coef=0.1,
        ),
        f"megatron_training.data_path={tmp_path / 'rows.jsonl'}",
        "rl_config.rule_reward=false",
        "rl_config.n_samples_per_prompt=1",
        "rl_config.scale_rewards=none",
        "actor_config.micro_batch_size=8",
        "actor_config.bf16=false",
        "actor_config.lr_decay_style=constant",
        "actor_config.lr_warmup_fraction=null",
        "megatron_training.seed=0",
    ]
    # Random(0) gives 0.84 and Random(1) 0.13: the data's responses first, then the student's
    assert [random.Random(seed).random() < 0.5 for seed in range(4)] == [False, True, False, True]
    whole = finished(task, tmp_path / "whole", *common, "megatron_training.train_iters=4")
    assert [record["distillation/on_policy"] for record in whole.metrics] == [0.0, 1.0, 0.0, 1.0]
    first = whole.metrics[0]
    divergence, cross_entropy = measure_gkd(task, 2.0)
    assert divergence > 0.001
    assert first["distillation/divergence"] == pytest.approx(divergence, rel=1e-3)
    assert first["distillation/supervised_loss"] == pytest.approx(cross_entropy, rel=1e-3)
    assert "rollout/log_probs_diff_mean" not in first and "rollout/log_probs_diff_mean" in whole.metrics[1]
    assert first["response_length/mean"] == 3.0  # two digits and the end
    save = [f"actor_config.save={tmp_path / 'save'}", f"actor_config.load={tmp_path / 'save'}"]
    finished(task, tmp_path / "resumed", *common, *save, "megatron_training.train_iters=2")
    resumed = finished(task, tmp_path / "resumed", *common, *save, "megatron_training.train_iters=4")
    assert [select_computed(record) for record in resumed.metrics[-2:]] == [
        select_computed(record) for record in whole.metrics[-2:]
    ]
