"""The numbers by which a command and its run file are compared: learning rates come from the scheduler."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from sample_runs import prompt_level

from mindspeed_rl.importers.source_plan import Schedule, SourcePlan, find_differences, plan_run, render_plans

PLAN = SourcePlan(
    stage="sft",
    step_samples=8,
    total_steps=100,
    lr_first=0.0,
    lr_10=1e-5,
    lr_last=1e-6,
    lr_warmup_steps=10,
    loss="cross_entropy",
)


@pytest.mark.parametrize("warmup", [0, 7])
@pytest.mark.parametrize("style", ["constant", "linear", "cosine", "inverse-square-root", "WSD"])
def test_a_learning_rate_is_that_of_the_scheduler_at_every_step(style: str, warmup: int) -> None:
    decay = 60
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.0)
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=1e-7,
        max_lr=3e-4,
        min_lr=2e-5,
        lr_warmup_steps=warmup,
        lr_decay_steps=decay,
        lr_decay_style=style,
        start_wd=0.1,
        end_wd=0.1,
        wd_incr_steps=0,
        wd_incr_style="constant",
        wsd_decay_steps=decay // 10 if style == "WSD" else None,
        lr_wsd_decay_style="linear" if style == "WSD" else None,
    )
    schedule = Schedule(3e-4, style, decay, warmup, start=1e-7, floor=2e-5)
    for step in range(decay + 5):
        assert schedule.rate(step) == pytest.approx(scheduler.get_lr({}), rel=1e-9), step
        scheduler.step(1)


def test_rates_are_compared_at_the_first_step_of_rollouts() -> None:
    rates = Schedule(1.0, "linear", 120).over(120, steps_per_rollout=4)
    # rollouts 0, 10 and 29 of 30: steps 0, 40 and 116
    assert rates.rates == pytest.approx((1.0, 1 - 40 / 120, 1 - 116 / 120))
    assert Schedule(1.0, "linear", 4).over(4).rates == pytest.approx((1.0, 0.25, 0.25))


def test_the_plan_of_a_run_file_has_the_numbers_of_its_batch() -> None:
    run = prompt_level(
        megatron_training={
            "global_batch_size": 32,
            "train_epochs": 2,
            "train_iters": None,
            "lr": 1e-6,
            "lr_decay_style": "constant",
        },
        rl_config={"mini_batch_size": 16, "n_samples_per_prompt": 8, "epochs": 2},
    )
    plan = plan_run(run, rows=100)
    # 200 prompts are 7 rollouts, the last of them with 8; each has 32 / 16 x 2 steps
    assert (plan.rollout_prompts, plan.rollout_completions, plan.step_samples) == (32, 256, 128)
    assert (plan.steps_per_rollout, plan.total_steps) == (4, 28)
    assert (plan.lr_first, plan.lr_10, plan.lr_last) == (1e-6, 1e-6, 1e-6)
    assert (plan.loss, plan.level, plan.aggregation, plan.advantage) == ("grpo", "token", "token", "group_norm")


def test_a_difference_is_named_and_rounding_is_none() -> None:
    assert find_differences(PLAN, PLAN) == {}
    other = dataclasses.replace(PLAN, total_steps=101, loss="ranking", lr_10=1e-5 * (1 + 1e-9))
    assert find_differences(PLAN, other) == {"total_steps": (100, 101), "loss": ("cross_entropy", "ranking")}
    # a warm-up of one step more, and the rates that it moves
    assert find_differences(PLAN, dataclasses.replace(PLAN, lr_warmup_steps=11, lr_10=1e-5 * 10 / 11)) == {}
    assert set(find_differences(PLAN, dataclasses.replace(PLAN, lr_warmup_steps=12))) == {"lr_warmup_steps"}
    # only one side has a number
    assert set(find_differences(PLAN, dataclasses.replace(PLAN, beta=0.1))) == {"beta"}


def test_the_table_marks_differences_and_leaves_out_what_neither_has() -> None:
    table = render_plans("verl", PLAN, dataclasses.replace(PLAN, total_steps=101, loss="x"), frozenset({"loss"}))
    rows = {line.split()[0]: line.split()[1:] for line in table.splitlines()[1:]}
    assert rows["total_steps"] == ["100", "101", "differs"] and rows["loss"] == ["cross_entropy", "x", "accepted"]
    assert "clip_low" not in rows and rows["step_samples"] == ["8", "8"]
