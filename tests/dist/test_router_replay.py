"""Given routing: every layout sends each token to the same experts, in every pass and when it recomputes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import nudged_jobs
import numpy as np
import pytest
import replay_jobs as jobs
import tiny_hf
import torch
from comparison import assert_same_training
from ranks import Ranks
from slow_layouts import EP, MOE_RECOMPUTE, PP, RECOMPUTE, RING, SP, ULYSSES, VPP, marked
from training_jobs import TEMPERATURE, Setting, all_rows

_MODEL = "moe_mixed"

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "micro-batch 1 recompute": (1, {"micro_batch_size": 1, "keys": RECOMPUTE}),
    "micro-batch 4 padded": (1, {"micro_batch_size": 4, "packed": False}),
    "token budget, experts recomputed": (1, {"token_budget": 40, "keys": MOE_RECOMPUTE}),
    "DP2 token budget": (2, {"token_budget": 40}),
    "TP2 SP recompute": (2, {"keys": SP | RECOMPUTE}),
    "TP2 SP padded": (2, {"keys": SP, "packed": False}),
    "TP2 SP experts over TP": (2, {"keys": SP | {"moe_tp_extend_ep": True}}),
    "PP2 recompute": (2, {"keys": PP | RECOMPUTE, "micro_batch_size": 1}),
    "VPP2 recompute": (2, {"keys": VPP | RECOMPUTE}),
    "VPP2": (2, {"keys": VPP}),
    "PP2 empty layers": (2, {"keys": PP | {"noop_layers": "0,5"}}),
    "CP2 Ulysses": (2, {"keys": ULYSSES}),
    "CP2 ring padded": (2, {"keys": RING, "packed": False}),
    "EP2 grouped": (2, {"keys": EP | {"moe_grouped_gemm": True}}),
    "EP2 allgather token budget": (2, {"keys": EP | {"moe_token_dispatcher_type": "allgather"}, "token_budget": 40}),
    "TP2 SP CP2": (4, {"keys": SP | ULYSSES}),
    "TP2 SP PP2 VPP2 recompute": (4, {"keys": SP | VPP | RECOMPUTE}),
    "PP2 EP2": (4, {"keys": PP | EP}),
}
_SLOW = ("TP2 SP CP2",)


@pytest.fixture(scope="module")
def folder(models: dict[str, Path]) -> str:
    return str(models[_MODEL])


@pytest.fixture(scope="module")
def single_process(ranks: Callable[[int], Ranks], folder: str) -> list[dict[str, Any]]:
    return ranks(1).run(jobs.train_replayed, setting=Setting(folder, micro_batch_size=8))


def _send(model: torch.nn.Module, routing: torch.Tensor) -> None:
    """The gates of the model send the tokens of one sequence where `routing` [tokens, routed layers, 2] says."""
    for number, layer in enumerate(jobs.ROUTED_LAYERS):
        gate = model.model.layers[layer].mlp.gate
        chosen = routing[:, number].long()

        def forward(hidden: torch.Tensor, gate: Any = gate, chosen: torch.Tensor = chosen) -> Any:
            logits = torch.nn.functional.linear(hidden.reshape(-1, hidden.size(-1)), gate.weight)
            probabilities = logits.softmax(-1)
            own = probabilities.topk(jobs.TOPK, -1).indices
            indices = torch.where(chosen < 0, own, chosen)
            weights = probabilities.gather(1, indices)
            return logits, weights / weights.sum(-1, keepdim=True), indices

        gate.forward = forward


def test_log_probs_under_given_routing_are_those_of_transformers(ranks: Callable[[int], Ranks], folder: str) -> None:
    (ours,) = ranks(1).run(jobs.forward_replayed, setting=Setting(folder, micro_batch_size=3))
    model, rows = tiny_hf.build(_MODEL), all_rows()
    for row, (ids, prompt, routing) in enumerate(zip(rows.input_ids, rows.prompt_lengths, jobs.given_routing())):
        _send(model, routing)
        with torch.no_grad():
            log_softmax = (model(ids[None]).logits[0] / TEMPERATURE).log_softmax(-1)[prompt - 1 : -1]
        np.testing.assert_allclose(ours[row], log_softmax.gather(1, ids[prompt:, None])[:, 0].numpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("size", "changes"), marked(LAYOUTS, _SLOW))
def test_training_with_given_routing_equals_a_single_process(
    ranks: Callable[[int], Ranks], single_process: list[dict[str, Any]], folder: str, size: int, changes: dict[str, Any]
) -> None:
    reports = ranks(size).run(jobs.train_replayed, setting=Setting(folder, **changes), timeout_s=240)
    assert_same_training(reports, single_process)
    agreed, compared = (sum(report["agreement"][part] for report in reports) for part in (0, 1))
    expected = sum(length - 1 for length in all_rows().lengths) * len(jobs.ROUTED_LAYERS) * jobs.TOPK * 3
    assert compared == expected
    # two experts of four, drawn at random: half of them are the router's own, more or less
    assert 0.35 < agreed / compared < 0.65
    assert agreed / compared == pytest.approx(single_process[0]["agreement"][0] / expected, abs=0.01)


def _chosen_by_transformers() -> dict[tuple[int, int], list[list[int]]]:
    """(row, layer) -> experts of each token, in order."""
    model, rows = tiny_hf.build(_MODEL), all_rows()
    results: dict[tuple[int, int], list[list[int]]] = {}
    for row, ids in enumerate(rows.input_ids):
        for layer in jobs.ROUTED_LAYERS:

            def keep(module: Any, inputs: Any, output: Any, place: tuple[int, int] = (row, layer)) -> None:
                results[place] = jobs.sorted_experts(output[2])

            handle = model.model.layers[layer].mlp.gate.register_forward_hook(keep)
            with torch.no_grad():
                model(ids[None])
            handle.remove()
    return results


_RECORDED = ["micro-batch 4 padded", "DP2 token budget", "TP2 SP padded", "VPP2", "CP2 Ulysses", "CP2 ring padded"]
RECORDED = {name: LAYOUTS[name] for name in (*_RECORDED, "PP2 EP2", "TP2 SP CP2")}


@pytest.mark.parametrize(("size", "changes"), marked(RECORDED, _SLOW))
def test_what_a_pass_records_is_what_transformers_chooses_and_changes_nothing_when_replayed(
    ranks: Callable[[int], Ranks], folder: str, size: int, changes: dict[str, Any]
) -> None:
    reports = ranks(size).run(jobs.record, setting=Setting(folder, **changes), timeout_s=240)
    expected = _chosen_by_transformers()
    merged: dict[tuple[int, int], list[list[int]]] = {}
    for report in reports:
        for place, experts in report["routing"].items():
            assert merged.setdefault(place, experts) == experts, place
        replayed, plain = report["losses"]
        assert replayed == plain
        agreed, compared = report["agreement"]
        assert agreed == compared > 0
    assert merged == expected


def test_what_the_old_pass_chose_reaches_the_rows_of_the_update_in_whatever_order(
    ranks: Callable[[int], Ranks], folder: str
) -> None:
    (report,) = ranks(1).run(jobs.travel, setting=Setting(folder, micro_batch_size=3))
    assert report == _chosen_by_transformers()


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"packed": False}, id="padded", marks=pytest.mark.slow),
        pytest.param({"token_budget": 700}, id="token budget"),
    ],
)
def test_trainer_agrees_with_an_engine_whose_routing_was_nudged_only_by_replay(
    ranks: Callable[[int], Ranks], models: dict[str, Path], changes: dict[str, Any]
) -> None:
    alone = Ranks(1, "rollout")  # a process of its own: vLLM builds one engine in each
    try:
        (report,) = alone.run(nudged_jobs.agree, setting=Setting(str(models[_MODEL]), **changes), timeout_s=240)
    finally:
        alone.close()
    assert max(report["own"]) > 0.05
    assert max(report["replayed"]) < 1e-4, report["replayed"]
    assert 0.3 < report["metrics"]["router/agreement"] < 0.95
    # by agreement of a token's experts: whatever the routers would choose, replayed tokens are equal
    by_agreement = {name: value for name, value in report["metrics"].items() if name.startswith("mismatch/experts/")}
    assert len(by_agreement) > 1 and max(by_agreement.values()) < 1e-4
    # long prompts came from the cache of prefixes, with the experts of whoever computed them
    assert max(report["cached"]) > 100
    assert report["types"] == {"routed_lengths": "torch.int64", "routed_experts_0": "torch.uint8"}
