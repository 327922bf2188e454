"""A teacher judges rows, and a student learns from the judgements, alike under every layout."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import distillation_jobs as jobs
import numpy as np
import pytest
from ranks import Ranks
from training_jobs import Setting

from mindspeed_rl.observability.metrics import merge


@pytest.fixture(scope="module")
def references(ranks: Callable[[int], Ranks], models: dict[str, Path]) -> Callable[[str], list[dict[str, Any]]]:
    """(model) -> one process, all rows in one packed micro-batch."""

    @cache
    def compute(name: str) -> list[dict[str, Any]]:
        return ranks(1).run(jobs.distill, setting=Setting(str(models[name]), micro_batch_size=8))

    return compute


LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "micro-batch 2 padded": ("tied", 1, {"micro_batch_size": 2, "packed": False}),
    "DP2 token budget": ("tied", 2, {"token_budget": 30}),
    "TP2": ("tied", 2, {"keys": {"tensor_model_parallel_size": 2}}),
    "CP2 ring": ("tied", 2, {"keys": {"context_parallel_size": 2, "context_parallel_algo": "megatron_cp_algo"}}),
    "PP2": ("tied", 2, {"keys": {"pipeline_model_parallel_size": 2}}),
    "EP2": ("moe", 2, {"keys": {"expert_model_parallel_size": 2}}),
    "PP2 of experts": ("moe", 2, {"keys": {"pipeline_model_parallel_size": 2}}),
}


@pytest.mark.parametrize(
    ("model", "size", "changes"),
    [pytest.param(*case, id=name, marks=[pytest.mark.slow] if case[0] == "moe" else []) for name, case in LAYOUTS.items()],
)
def test_teachers_and_students_of_every_layout_agree(
    ranks: Callable[[int], Ranks],
    references: Callable[[str], list[dict[str, Any]]],
    models: dict[str, Path],
    model: str,
    size: int,
    changes: dict[str, Any],
) -> None:
    reference = references(model)
    reports = ranks(size).run(jobs.distill, setting=Setting(str(models[model]), **changes))
    expected = {tuple(ids): values for ids, *values in reference[0]["judged"]}
    for report in reports:
        for ids, log_probs, tokens, sampled in report["judged"]:
            best, chosen, at_sampled = expected[tuple(ids)]
            np.testing.assert_allclose(log_probs, best, rtol=1e-4, atol=1e-5)
            assert tokens == chosen
            np.testing.assert_allclose(sampled, at_sampled, rtol=1e-4, atol=1e-5)
    for step in range(3):
        ours, theirs = (merge(report["metrics"][step] for report in result).results() for result in (reports, reference))
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-5)
        assert theirs["distillation/divergence"] > 1e-3
        assert reports[0]["grad_norm"][step] == pytest.approx(reference[0]["grad_norm"][step], rel=1e-3)
    for name, weight in reference[0]["weights"].items():
        np.testing.assert_allclose(reports[0]["weights"][name], weight, rtol=1e-3, atol=2e-5)
