"""Given experts under FSDP2: transformers' routers send each token where Megatron's do, and weigh it by the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import fsdp_jobs
import numpy as np
import pytest
import tiny_families
from ranks import Ranks
from training_jobs import Setting

#: families with experts
_FAMILIES = tiny_families.EXPERTS
#: balancing counts the given experts, and its losses read the routers' own scores
_KEYS = {
    **{"moe_aux_loss_coeff": 0.1, "moe_router_load_balancing_type": "seq_aux_loss"},
    "moe_router_bias_update_rate": 0.01,
}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def expected(ranks: Callable[[int], Ranks], folders: Callable[[str], str]) -> Callable[[str], dict[str, Any]]:
    """Name of a family -> the report of Megatron's engine on one rank."""

    @cache
    def train(name: str) -> dict[str, Any]:
        (report,) = ranks(1).run(fsdp_jobs.replay_megatron, setting=Setting(folders(name), _KEYS))
        return report

    return train


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Name of a family -> the folder of its tiny model."""
    return cache(lambda name: str(tiny_families.save(name, tmp_path_factory.mktemp(name))))


def _check(reports: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    log_probs = {row: values for report in reports for row, values in report["log_probs"].items()}
    assert sorted(log_probs) == list(range(len(expected["log_probs"])))
    for row, values in log_probs.items():
        np.testing.assert_allclose(values, expected["log_probs"][row], rtol=0, atol=1e-5)
    for report in reports:
        assert report["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
    for name, gradient in expected["gradients"].items():
        gap = np.abs(reports[0]["gradients"][name] - gradient).max()
        # a decay of a delta net sums over all pairs of tokens of a chunk
        assert gap <= (1e-4 if ".linear_attn." in name else 1e-5) * max(np.abs(gradient).max(), 1e-30), name
    for name, weight in expected["weights"].items():
        gap = np.abs(reports[0]["weights"][name] - weight).max()
        assert gap <= 2e-5 * max(np.abs(weight).max(), 1e-30), name
    chosen = {row: experts for report in reports for row, experts in report["chosen"].items()}
    assert chosen == expected["chosen"]


def _sum(reports: list[dict[str, Any]]) -> tuple[int, int]:
    agreed, compared = (sum(report["agreement"][part] for report in reports) for part in (0, 1))
    return agreed, compared


@pytest.mark.parametrize("name", _FAMILIES)
def test_given_experts_train_as_on_megatron(
    ranks: Callable[[int], Ranks], folders: Callable[[str], str], expected: Callable[[str], dict[str, Any]], name: str
) -> None:
    reports = ranks(1).run(fsdp_jobs.replay_fsdp, setting=Setting(folders(name), _KEYS))
    _check(reports, expected(name))
    assert _sum(reports) == _sum([expected(name)])
    agreed, compared = _sum(reports)
    assert 0 < agreed < compared


#: family, ranks, keys of the layout, other settings
_LAYOUTS: list[tuple[str, int, dict[str, Any], dict[str, Any]]] = [
    ("qwen3_moe", 1, {"recompute_granularity": "full"}, {"micro_batch_size": 1}),
    ("qwen3_moe", 2, {}, {"token_budget": 40}),
    ("qwen3_moe", 2, {"context_parallel_size": 2}, {}),
    ("deepseek_v3", 2, {"context_parallel_size": 2, "recompute_granularity": "full"}, {"packed": False}),
    ("deepseek_v3", 3, {}, {"packed": False, "micro_batch_size": 4}),
    ("qwen3_next", 2, {"recompute_granularity": "full"}, {}),
    ("mixtral", 4, {"fsdp_size": 2, "context_parallel_size": 2}, {"micro_batch_size": 4}),
]


@pytest.mark.parametrize(("name", "size", "keys", "changes"), _LAYOUTS)
def test_the_replay_does_not_depend_on_the_layout(
    ranks: Callable[[int], Ranks],
    folders: Callable[[str], str],
    expected: Callable[[str], dict[str, Any]],
    name: str,
    size: int,
    keys: dict[str, Any],
    changes: dict[str, Any],
) -> None:
    # balanced by sequence: the other loss depends on the micro-batches
    reports = ranks(size).run(fsdp_jobs.replay_fsdp, setting=Setting(folders(name), _KEYS | keys, **changes))
    _check(reports, expected(name))
    # ranks that divide a row's tokens each compare their own
    assert _sum(reports) == _sum([expected(name)])


@pytest.mark.parametrize(("name", "size", "keys"), [("qwen3_moe", 1, {}), ("deepseek_v3", 2, {"context_parallel_size": 2})])
def test_prompts_that_rows_share_have_their_experts_once(
    ranks: Callable[[int], Ranks], folders: Callable[[str], str], name: str, size: int, keys: dict[str, Any]
) -> None:
    setting = Setting(folders(name), _KEYS, token_budget=90)
    (expected,) = ranks(1).run(fsdp_jobs.replay_megatron, setting=setting, grouped=True)
    setting = Setting(folders(name), _KEYS | keys, token_budget=90, shares_prefixes=True)
    reports = ranks(size).run(fsdp_jobs.replay_fsdp, setting=setting, grouped=True)
    _check(reports, expected)
    # a shared token is compared once
    assert _sum(reports)[1] < _sum([expected])[1]
