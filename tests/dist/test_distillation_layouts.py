"""A teacher judges rows, and a student learns from the judgements, alike under every layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import distillation_jobs as jobs
import numpy as np
import pytest
from ranks import Ranks
from training_jobs import Setting

from mindspeed_rl.observability.metrics import merge


@pytest.fixture(scope="module")
def reference(ranks: Callable[[int], Ranks], models: dict[str, Path]) -> list[dict[str, Any]]:
    """One process, all rows in one packed micro-batch."""
    return ranks(1).run(jobs.distill, setting=Setting(str(models["tied"]), micro_batch_size=8))


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "micro-batch 2 padded": (1, {"micro_batch_size": 2, "packed": False}),
    "DP2 token budget": (2, {"token_budget": 30}),
    "TP2": (2, {"keys": {"tensor_model_parallel_size": 2}}),
    "CP2 ring": (2, {"keys": {"context_parallel_size": 2, "context_parallel_algo": "megatron_cp_algo"}}),
}


@pytest.mark.parametrize(("size", "changes"), LAYOUTS.values(), ids=LAYOUTS)
def test_teachers_and_students_of_every_layout_agree(
    ranks: Callable[[int], Ranks],
    reference: list[dict[str, Any]],
    models: dict[str, Path],
    size: int,
    changes: dict[str, Any],
) -> None:
    reports = ranks(size).run(jobs.distill, setting=Setting(str(models["tied"]), **changes))
    expected = {tuple(ids): values for ids, *values in reference[0]["judged"]}
    for report in reports:
        for ids, log_probs, tokens, sampled in report["judged"]:
            best, chosen, at_sampled = expected[tuple(ids)]
            np.testing.assert_allclose(log_probs, best, rtol=1e-4, atol=1e-5)
            assert tokens == chosen
            np.testing.assert_allclose(sampled, at_sampled, rtol=1e-4, atol=1e-5)
    for step in range(3):
        ours, theirs = (merge(report["metrics"][step] for report in found).results() for found in (reports, reference))
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-5)
        assert theirs["distillation/divergence"] > 1e-3
        assert reports[0]["grad_norm"][step] == pytest.approx(reference[0]["grad_norm"][step], rel=1e-3)
    for name, weight in reference[0]["weights"].items():
        np.testing.assert_allclose(reports[0]["weights"][name], weight, rtol=1e-3, atol=2e-5)
