"""Every policy loss gives the same update however rows are cut, packed and spread over ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import policy_jobs as jobs
import pytest
from ranks import Ranks
from slow_layouts import marked
from training_jobs import Setting

from mindspeed_rl.observability.metrics import merge


@pytest.fixture(scope="module")
def reference(ranks: Callable[[int], Ranks], models: dict[str, Path]) -> list[dict[str, Any]]:
    """One process, all rows in one packed micro-batch."""
    return ranks(1).run(jobs.update, setting=Setting(str(models["tied"]), micro_batch_size=8))


UNCLIPPED = ("sapo", "cispo_cap", "gpg", "vespo", "dro", "real", "online_dpo")
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "micro-batch 1": (1, {"micro_batch_size": 1}),
    "micro-batch 2 padded": (1, {"micro_batch_size": 2, "packed": False}),
    "token budget": (1, {"token_budget": 30}),
    "DP2": (2, {"micro_batch_size": 2}),
    "DP2 token budget": (2, {"token_budget": 30}),
    "TP2": (2, {"keys": {"tensor_model_parallel_size": 2}}),
    "CP2 Ulysses": (2, {"keys": {"context_parallel_size": 2, "context_parallel_algo": "ulysses_cp_algo"}}),
    "CP2 ring": (2, {"keys": {"context_parallel_size": 2, "context_parallel_algo": "megatron_cp_algo"}}),
}


@pytest.mark.parametrize(("size", "changes"), marked(LAYOUTS, ("micro-batch 2 padded", "token budget", "DP2", "CP2 ring")))
def test_every_policy_loss_gives_the_same_update(
    ranks: Callable[[int], Ranks],
    reference: list[dict[str, Any]],
    models: dict[str, Path],
    size: int,
    changes: dict[str, Any],
) -> None:
    reports = ranks(size).run(jobs.update, setting=Setting(str(models["tied"]), **changes))
    for step, settings in enumerate(jobs.UPDATES):
        ours, theirs = (merge(report["metrics"][step] for report in result).results() for result in (reports, reference))
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-5), settings
        assert reports[0]["grad_norm"][step] == pytest.approx(reference[0]["grad_norm"][step], rel=1e-3), settings
        assert theirs["actor/pg_clipfrac"] > 0.0 or settings.loss_type in UNCLIPPED
    for name, weight in reference[0]["weights"].items():
        np.testing.assert_allclose(reports[0]["weights"][name], weight, rtol=1e-3, atol=2e-5)
    squares = {tuple(ids): values for ids, values in reference[0]["squares"]}
    for report in reports:
        for ids, values in report["squares"]:
            np.testing.assert_allclose(values, squares[tuple(ids)], rtol=1e-3, atol=1e-5)
