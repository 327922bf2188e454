"""Models with gated delta nets train alike under every layout, packing and prefix sharing, and as transformers' do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import prefix_jobs
import pytest
import tiny_hf
import torch
import training_jobs as jobs
from comparison import assert_same_training, losses
from ranks import Ranks
from slow_layouts import EP, MOE_RECOMPUTE, PP, RECOMPUTE, RING, SP, ULYSSES, marked
from training_jobs import TEMPERATURE, Setting

ZERO = {"use_distributed_optimizer": True}
LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "padded": ("hybrid", 1, {"packed": False}),
    "micro-batch 8": ("hybrid", 1, {"micro_batch_size": 8}),
    "token budget, recomputed": ("hybrid", 1, {"token_budget": 30, "keys": RECOMPUTE}),
    "recompute selective": ("hybrid", 1, {"keys": {"recompute_granularity": "selective"}}),
    "recompute experts": ("hybrid_moe", 1, {"keys": MOE_RECOMPUTE}),
    "TP2": ("hybrid", 2, {"keys": {"tensor_model_parallel_size": 2}}),
    "TP2 SP distributed optimizer": ("hybrid", 2, {"keys": SP | ZERO}),
    "TP2 SP padded": ("hybrid", 2, {"keys": SP, "packed": False}),
    "PP2": ("hybrid", 2, {"keys": PP}),
    "CP2 Ulysses": ("hybrid", 2, {"keys": ULYSSES}),
    "CP2 Ulysses padded": ("hybrid", 2, {"keys": ULYSSES, "packed": False}),
    "CP2 ring": ("hybrid", 2, {"keys": RING}),
    "EP2": ("hybrid_moe", 2, {"keys": EP}),
    "TP2 SP ETP1": ("hybrid_moe", 2, {"keys": SP | {"expert_tensor_parallel_size": 1}}),
    "PP2 CP2": ("hybrid", 4, {"keys": PP | RING}),
}
_QUICK = ("padded", "token budget, recomputed", "TP2 SP distributed optimizer", "PP2", "CP2 Ulysses", "CP2 ring", "EP2")
_Report = Callable[[str], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def single_process(ranks: Callable[[int], Ranks], models: dict[str, Path]) -> _Report:
    """(model name) -> what one process reports with packed micro-batches of two rows."""
    known: dict[str, list[dict[str, Any]]] = {}

    def report(name: str) -> list[dict[str, Any]]:
        if name not in known:
            known[name] = ranks(1).run(jobs.train, setting=Setting(str(models[name])))
        return known[name]

    return report


@pytest.mark.parametrize(("name", "size", "changes"), marked(LAYOUTS, LAYOUTS.keys() - _QUICK))
def test_every_layout_trains_as_one_process_does(
    ranks: Callable[[int], Ranks],
    single_process: _Report,
    models: dict[str, Path],
    name: str,
    size: int,
    changes: dict[str, Any],
) -> None:
    reports = ranks(size).run(jobs.train, setting=Setting(str(models[name]), **changes), timeout_s=240)
    assert_same_training(reports, single_process(name), tolerance=2e-5)


@pytest.mark.parametrize(
    ("name", "size", "keys"),
    [pytest.param("hybrid", 1, RECOMPUTE, marks=pytest.mark.slow), ("hybrid_moe", 2, SP)],
    ids=["one process", "experts TP2 SP"],
)
def test_a_prompt_that_is_computed_once_trains_as_one_for_each_row(
    ranks: Callable[[int], Ranks], models: dict[str, Path], name: str, size: int, keys: dict[str, Any]
) -> None:
    separate = ranks(1).run(prefix_jobs.train, setting=Setting(str(models[name]), micro_batch_size=10))
    setting = Setting(str(models[name]), keys, shares_prefixes=True, token_budget=50)
    assert_same_training(ranks(size).run(prefix_jobs.train, setting=setting), separate, tolerance=2e-5)


@pytest.mark.parametrize("name", ["hybrid", "hybrid_moe"])
def test_log_probs_of_packed_rows_are_those_of_transformers(
    ranks: Callable[[int], Ranks], models: dict[str, Path], name: str
) -> None:
    (ours,) = ranks(1).run(prefix_jobs.forward, setting=Setting(str(models[name]), shares_prefixes=True, token_budget=50))
    model, rows = tiny_hf.build(name), prefix_jobs.grouped_rows()
    for actual, ids, prompt in zip(ours, rows.input_ids, rows.prompt_lengths, strict=True):
        with torch.no_grad():
            log_softmax = (model(ids[None]).logits[0] / TEMPERATURE).log_softmax(-1)[prompt - 1 : -1]
        np.testing.assert_allclose(actual, log_softmax.gather(1, ids[prompt:, None])[:, 0].numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_half_precision_stays_close_to_full_precision(
    ranks: Callable[[int], Ranks], single_process: _Report, models: dict[str, Path]
) -> None:
    reports = ranks(2).run(jobs.train, setting=Setting(str(models["hybrid"]), SP | ZERO | {"bf16": True}))
    # later steps follow from the rounding of those before
    assert reports[0]["grad_norm"][0] == pytest.approx(single_process("hybrid")[0]["grad_norm"][0], rel=0.02)
    assert losses(reports)[0] == pytest.approx(losses(single_process("hybrid"))[0], rel=0.01)
    assert losses(reports)[-1] < losses(reports)[0] / 2
