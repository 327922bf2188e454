"""A row of several turns trains what was sampled and nothing else, and a split row equals its sequences computed separately."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_hf
import torch
import training_jobs
import turn_jobs as jobs
from ranks import Ranks
from training_jobs import Setting

from mindspeed_rl.observability.metrics import merge


@pytest.fixture(scope="module")
def reference(ranks: Callable[[int], Ranks], models: dict[str, Path]) -> dict[str, Any]:
    """One process, all rows in one packed micro-batch."""
    return ranks(1).run(jobs.update, setting=Setting(str(models["tied"]), micro_batch_size=8))[0]


def metrics(reports: list[dict[str, Any]]) -> dict[str, float]:
    return merge(report["metrics"][0] for report in reports).results()


def assert_same(reports: list[dict[str, Any]], reference: dict[str, Any]) -> None:
    assert metrics(reports) == pytest.approx(metrics([reference]), rel=1e-4, abs=1e-6)
    assert reports[0]["grad_norm"][0] == pytest.approx(reference["grad_norm"][0], rel=1e-4)
    for name, weight in reference["weights"].items():
        np.testing.assert_allclose(reports[0]["weights"][name], weight, rtol=1e-3, atol=2e-6)


def test_a_row_of_several_turns_equals_a_naive_loop_over_the_sampled_tokens(reference: dict[str, Any]) -> None:
    model = tiny_hf.build("tied")
    total, count, log_probs = torch.zeros(()), 0, []
    for trajectory, advantage in zip(jobs.trajectories(), jobs.ADVANTAGES):
        seen: list[float] = []
        for sequence in trajectory.sequences:
            context = list(sequence.prompt_ids)
            for segment in sequence.segments:
                for token in segment.token_ids:
                    logits = model(torch.tensor([context])).logits[0, -1] / training_jobs.TEMPERATURE
                    log_prob = logits.log_softmax(-1)[token]
                    seen.append(float(log_prob))
                    if segment.sampled:
                        total = total - advantage * log_prob
                        count += 1
                    context.append(token)
        log_probs.append(seen)
    (total / count).backward()
    squares = sum(float(parameter.grad.square().sum()) for parameter in model.parameters() if parameter.grad is not None)
    assert reference["grad_norm"][0] == pytest.approx(squares**0.5, rel=1e-4)
    for ours, theirs in zip(reference["before"][0], log_probs, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)
    num_sampled = sum(sum(trajectory.sampled) for trajectory in jobs.trajectories())
    assert count == num_sampled < sum(len(trajectory.token_ids) for trajectory in jobs.trajectories())


LAYOUTS: dict[str, dict[str, Any]] = {
    "micro-batch 1": {"micro_batch_size": 1},
    "micro-batch 2 padded": {"micro_batch_size": 2, "packed": False},
    "token budget": {"token_budget": 44},
    "token budget padded": {"token_budget": 60, "packed": False},
}


@pytest.mark.parametrize("changes", LAYOUTS.values(), ids=LAYOUTS)
def test_the_update_is_the_same_however_rows_are_laid_out(
    ranks: Callable[[int], Ranks], reference: dict[str, Any], models: dict[str, Path], changes: dict[str, Any]
) -> None:
    assert_same(ranks(1).run(jobs.update, setting=Setting(str(models["tied"]), **changes)), reference)


def test_a_split_trajectory_equals_its_sequences_computed_separately(
    ranks: Callable[[int], Ranks], reference: dict[str, Any], models: dict[str, Path]
) -> None:
    setting = Setting(str(models["tied"]), micro_batch_size=8)
    (separate,) = ranks(1).run(jobs.update, setting=setting, is_whole=False)
    joined = [value for part in separate["before"][0] for value in part]
    assert joined == pytest.approx([value for part in reference["before"][0] for value in part], abs=1e-6)
    assert_same([separate], reference)


SPREAD: dict[str, dict[str, Any]] = {
    "DP2": {"micro_batch_size": 2},
    "TP2": {"keys": {"tensor_model_parallel_size": 2}},
    "PP2 padded": {"keys": {"pipeline_model_parallel_size": 2}, "micro_batch_size": 1, "packed": False},
    "CP2 ring": {"keys": {"context_parallel_size": 2, "context_parallel_algo": "megatron_cp_algo"}},
}


@pytest.mark.slow
@pytest.mark.parametrize("changes", SPREAD.values(), ids=SPREAD)
def test_the_update_is_the_same_over_two_processes(
    ranks: Callable[[int], Ranks], reference: dict[str, Any], models: dict[str, Path], changes: dict[str, Any]
) -> None:
    assert_same(ranks(2).run(jobs.update, setting=Setting(str(models["tied"]), **changes)), reference)
