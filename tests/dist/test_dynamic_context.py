"""Micro-batches on part of the context-parallel ranks give the update of one process and of the fixed size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_hf
import torch
import training_jobs as jobs
from comparison import assert_same_training
from ranks import Ranks
from slow_layouts import EP, PP, RECOMPUTE, RING, SP, ULYSSES, VPP, marked
from training_jobs import Setting

DYNAMIC = {"dynamic_context_parallel": True}
FOUR = {"context_parallel_size": 4}
#: rows have 2 to 21 tokens: with 2 ranks a budget of 30 leaves rows of up to 14 to one of them
LAYOUTS: dict[str, tuple[int, str, dict[str, Any], int]] = {
    "ring": (2, "tied", RING, 30),
    "Ulysses": (2, "tied", ULYSSES, 30),
    "all rows on one rank": (2, "tied", RING, 64),
    "all rows on both": (2, "tied", ULYSSES | {"min_dynamic_context_parallel_size": 2}, 64),
    "recompute": (2, "untied", RING | RECOMPUTE, 30),
    "gated delta nets": (2, "hybrid", ULYSSES, 30),
    "latent attention": (2, "deepseek", RING, 30),
    "experts": (2, "moe", RING | EP, 30),
    "4 ranks": (4, "tied", RING | FOUR, 32),
    "4 ranks Ulysses": (4, "tied", ULYSSES | FOUR, 24),
    "4 ranks from 2": (4, "tied", RING | FOUR | {"min_dynamic_context_parallel_size": 2}, 40),
    "PP2": (4, "tied", RING | PP, 30),
    "VPP2": (4, "untied", ULYSSES | VPP, 30),
    "TP2 SP": (4, "tied", ULYSSES | SP, 32),
    "DP2": (4, "tied", RING | {"use_distributed_optimizer": True}, 30),
}
SLOW = [name for name in LAYOUTS if name != "ring"]


@pytest.mark.parametrize(("size", "name", "keys", "budget"), marked(LAYOUTS, SLOW))
def test_layouts_train_as_one_process_does(
    ranks: Callable[[int], Ranks], models: dict[str, Path], size: int, name: str, keys: dict[str, Any], budget: int
) -> None:
    setting = Setting(str(models[name]), keys | DYNAMIC, token_budget=budget)
    reference = ranks(1).run(jobs.train, setting=Setting(str(models[name])), steps=3)
    assert_same_training(ranks(size).run(jobs.train, setting=setting, steps=3, timeout_s=240), reference)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "keys"), [(2, RING), (4, ULYSSES | FOUR), (4, RING | PP)], ids=["CP2", "CP4", "CP2 PP2"])
def test_log_probs_and_entropies_are_those_of_transformers(
    ranks: Callable[[int], Ranks], models: dict[str, Path], size: int, keys: dict[str, Any]
) -> None:
    rows, model = jobs.all_rows(), tiny_hf.build("untied")
    setting = Setting(str(models["untied"]), keys | DYNAMIC, token_budget=32)
    reports = [report for report in ranks(size).run(jobs.forward, setting=setting) if report]
    assert reports
    for report in reports:  # every rank of the last stage has the rows of all slices
        for row, (ids, prompt) in enumerate(zip(rows.input_ids, rows.prompt_lengths)):
            with torch.no_grad():
                log_softmax = (model(ids[None]).logits[0] / jobs.TEMPERATURE).log_softmax(-1)[prompt - 1 : -1]
            log_probs, entropy = (torch.tensor(values) for values in report[row])
            torch.testing.assert_close(log_probs, log_softmax.gather(1, ids[prompt:, None])[:, 0], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(entropy, -(log_softmax.exp() * log_softmax).sum(-1), rtol=1e-5, atol=1e-5)
