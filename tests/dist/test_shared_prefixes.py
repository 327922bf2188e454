"""A prompt that is computed once for its samples: results equal those from rows with a prompt each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import prefix_jobs as jobs
import pytest
import tiny_hf
import torch
from comparison import assert_same_training
from ranks import Ranks
from slow_layouts import EP, PP, RECOMPUTE, SP, ULYSSES, VPP, marked
from training_jobs import TEMPERATURE, Setting

LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "one micro-batch": ("tied", 1, {"micro_batch_size": 10}),
    "micro-batch 3 recompute": ("tied", 1, {"micro_batch_size": 3, "keys": RECOMPUTE}),
    "token budget": ("tied", 1, {"token_budget": 30}),
    "latent attention": ("deepseek", 1, {"token_budget": 40}),
    "experts": ("moe_mixed", 1, {"micro_batch_size": 10}),
    "DP2 token budget": ("tied", 2, {"token_budget": 30}),
    "TP2 SP": ("tied", 2, {"keys": SP, "micro_batch_size": 5}),
    "VPP2": ("tied", 2, {"keys": VPP, "micro_batch_size": 5}),
    "EP2 allgather token budget": (
        "moe_mixed",
        2,
        {"keys": EP | {"moe_token_dispatcher_type": "allgather"}, "token_budget": 40},
    ),
    "CP2 token budget": ("tied", 2, {"keys": ULYSSES, "token_budget": 30}),
    "CP2 experts": ("moe_mixed", 2, {"keys": ULYSSES, "micro_batch_size": 5}),
    "CP2 latent attention": ("deepseek", 2, {"keys": ULYSSES, "micro_batch_size": 5}),
    "CP2 TP2 SP": ("moe_mixed", 4, {"keys": SP | ULYSSES, "micro_batch_size": 10}),
    "TP2 SP PP2": ("moe_mixed", 4, {"keys": SP | PP}),
}
_SLOW = ("TP2 SP PP2", "CP2 experts", "CP2 latent attention", "CP2 TP2 SP")
#: model, processes and setting of runs on trees
TREES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "one process": ("tied", 1, {}),
    "latent attention": ("deepseek", 1, {}),
    "TP2 SP": ("tied", 2, {"keys": SP}),
    "CP2": ("tied", 2, {"keys": ULYSSES}),
    "CP2 experts": ("moe_mixed", 2, {"keys": ULYSSES}),
    "TP2 SP latent attention": ("deepseek", 2, {"keys": SP}),
    "CP2 TP2 SP": ("tied", 4, {"keys": SP | ULYSSES}),
}
_SLOW_TREES = ("CP2 experts", "TP2 SP latent attention", "CP2 TP2 SP")


@pytest.fixture(scope="module")
def own_prompts(ranks: Callable[[int], Ranks], models: dict[str, Path]) -> Callable[[str], list[dict[str, Any]]]:
    """(name of a model) -> what one process reports whose rows each have their own prompt."""
    results: dict[str, list[dict[str, Any]]] = {}

    def of(name: str) -> list[dict[str, Any]]:
        if name not in results:
            results[name] = ranks(1).run(jobs.train, setting=Setting(str(models[name]), micro_batch_size=10))
        return results[name]

    return of


@pytest.mark.parametrize(("name", "size", "changes"), marked(LAYOUTS, _SLOW))
def test_training_is_that_of_rows_with_their_own_prompts(
    ranks: Callable[[int], Ranks],
    own_prompts: Callable[[str], list[dict[str, Any]]],
    models: dict[str, Path],
    name: str,
    size: int,
    changes: dict[str, Any],
) -> None:
    reports = ranks(size).run(jobs.train, setting=Setting(str(models[name]), shares_prefixes=True, **changes), timeout_s=240)
    assert_same_training(reports, own_prompts(name), tolerance=2e-5)


@pytest.mark.parametrize(("name", "size", "changes"), marked(TREES, _SLOW_TREES))
def test_training_on_a_tree_is_that_of_its_sequences_alone(
    ranks: Callable[[int], Ranks], models: dict[str, Path], name: str, size: int, changes: dict[str, Any]
) -> None:
    folder = str(models[name])
    alone = ranks(1).run(jobs.train, setting=Setting(folder, micro_batch_size=1), trees=True, timeout_s=240)
    setting = Setting(folder, micro_batch_size=3, shares_prefixes=True, **changes)
    tree = ranks(size).run(jobs.train, setting=setting, trees=True, timeout_s=240)
    assert_same_training(tree, alone, tolerance=1e-5)


@pytest.mark.parametrize("name", ["tied", "moe_mixed", "deepseek"])
def test_log_probs_are_those_of_transformers(ranks: Callable[[int], Ranks], models: dict[str, Path], name: str) -> None:
    (ours,) = ranks(1).run(jobs.forward, setting=Setting(str(models[name]), shares_prefixes=True, token_budget=50))
    model, rows = tiny_hf.build(name), jobs.grouped_rows()
    for actual, ids, prompt in zip(ours, rows.input_ids, rows.prompt_lengths, strict=True):
        with torch.no_grad():
            log_softmax = (model(ids[None]).logits[0] / TEMPERATURE).log_softmax(-1)[prompt - 1 : -1]
        np.testing.assert_allclose(actual, log_softmax.gather(1, ids[prompt:, None])[:, 0].numpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("size", "keys"), [(1, {}), (2, SP), (2, EP), (2, ULYSSES)], ids=["one process", "TP2 SP", "EP2", "CP2"]
)
def test_every_row_has_the_experts_of_a_prompt_that_was_computed_once(
    ranks: Callable[[int], Ranks], models: dict[str, Path], size: int, keys: dict[str, Any]
) -> None:
    plain = ranks(1).run(jobs.record, setting=Setting(str(models["moe_mixed"]), micro_batch_size=10))
    setting = Setting(str(models["moe_mixed"]), keys=keys, micro_batch_size=4, shares_prefixes=True)
    shared = ranks(size).run(jobs.record, setting=setting)
    results = {place: experts for report in shared for place, experts in report["routing"].items()}
    assert results == plain[0]["routing"]
    for report in shared:
        agreed, compared = report["agreement"]
        assert agreed == compared > 0
