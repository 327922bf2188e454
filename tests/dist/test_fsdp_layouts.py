"""Groups of copies, and tokens divided over ranks: each layout of FSDP2 computes and trains as one rank does."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import fsdp_jobs
import numpy as np
import prefix_jobs
import pytest
import tiny_families
from ranks import Ranks
from test_fsdp import FAMILIES
from training_jobs import Setting

from mindspeed_rl.models import find_architecture

_UNBALANCED = {"moe_aux_loss_coeff": 0.0, "moe_router_bias_update_rate": 0.0}
_COPIES, _ULYSSES = {"fsdp_size": 2}, {"context_parallel_size": 2}
#: ranks and keys of each layout
_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ulysses": (2, _ULYSSES),
    "copies": (4, _COPIES),
    "only copies": (2, {"fsdp_size": 1}),
    "all ranks by name": (2, _COPIES),
    "ulysses over all": (4, {"context_parallel_size": 4}),
    "both": (4, _COPIES | _ULYSSES),
    "recomputed": (4, _COPIES | _ULYSSES | {"recompute_granularity": "full", "swap_optimizer": True}),
}
_QUICK = ("ulysses",)


def _relative(actual: Any, expected: Any) -> float:
    return float(np.abs(actual - expected).max() / max(np.abs(expected).max(), 1e-30))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Name of a family -> the folder of its tiny model."""
    return cache(lambda name: str(tiny_families.save(name, tmp_path_factory.mktemp(name))))


@pytest.fixture(scope="module")
def on_one_rank(ranks: Callable[[int], Ranks], folders: Callable[[str], str]) -> Callable[[str], tuple[Any, Any]]:
    """Name of a family -> log-probs and entropies by row, and the report of three steps."""

    def run(name: str) -> tuple[Any, Any]:
        setting = Setting(folders(name), _UNBALANCED)
        return ranks(1).run(fsdp_jobs.forward, setting=setting)[0], ranks(1).run(fsdp_jobs.train, setting=setting, steps=3)[0]

    return cache(run)


def _check(group: Ranks, setting: Setting, expected: tuple[Any, Any]) -> None:
    computed, trained = expected
    rows = {row: values for part in group.run(fsdp_jobs.forward, setting=setting) for row, values in part.items()}
    for row, (log_probs, entropy) in computed.items():
        np.testing.assert_allclose(rows[row][0], log_probs, atol=1e-5)
        np.testing.assert_allclose(rows[row][1], entropy, atol=1e-5)
    first, *_ = group.run(fsdp_jobs.train, setting=setting, steps=3)
    assert first["grad_norm"] == pytest.approx(trained["grad_norm"], rel=1e-5)
    largest = max(np.abs(gradient).max() for gradient in trained["gradients"].values())
    for name, gradient in trained["gradients"].items():
        gap = np.abs(first["gradients"][name] - gradient).max()
        # some gradients are 0 but for rounding
        assert gap <= 1e-5 * max(np.abs(gradient).max(), 1e-3 * largest), name
    for name, weight in trained["weights"].items():
        assert _relative(first["weights"][name], weight) < 2e-5, name


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in _QUICK else pytest.mark.slow) for name in _LAYOUTS])
def test_a_layout_computes_and_trains_as_one_rank(
    ranks: Callable[[int], Ranks], folders: Callable[[str], str], on_one_rank: Callable[[str], tuple[Any, Any]], name: str
) -> None:
    size, keys = _LAYOUTS[name]
    _check(ranks(size), Setting(folders("qwen3"), keys), on_one_rank("qwen3"))


#: windows, caps, sinks, latent attention, fewer keys than ranks, biases, experts
_ATTENTIONS = ["gemma2", "gemma3", "olmo3", "deepseek_v3", "qwen3_moe", "qwen2", "phi3", "glm4", "mixtral"]


#: the other families of the support table that take packed rows
_OTHERS = tuple(name for name in FAMILIES if find_architecture(name).packs and name not in (*_ATTENTIONS, "qwen3"))
_EXTRA = [pytest.param(name, 2, marks=pytest.mark.extra) for name in _OTHERS]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size"), [*((name, size) for name in _ATTENTIONS for size in (2, 4)), *_EXTRA])
def test_every_form_of_attention_exchanges_its_heads(
    ranks: Callable[[int], Ranks],
    folders: Callable[[str], str],
    on_one_rank: Callable[[str], tuple[Any, Any]],
    name: str,
    size: int,
) -> None:
    _check(ranks(size), Setting(folders(name), _UNBALANCED | {"context_parallel_size": size}), on_one_rank(name))


@pytest.mark.slow
@pytest.mark.parametrize(("packed", "budget"), [(False, None), (True, 48), (False, 64)])
def test_padded_rows_and_budgets_are_divided_too(
    ranks: Callable[[int], Ranks],
    folders: Callable[[str], str],
    on_one_rank: Callable[[str], tuple[Any, Any]],
    packed: bool,
    budget: int | None,
) -> None:
    setting = Setting(folders("qwen3"), _ULYSSES, packed=packed, token_budget=budget)
    for size in (2, 4):
        _check(ranks(size), setting, on_one_rank("qwen3"))


@pytest.mark.slow
def test_a_run_resumes_with_other_groups(ranks: Callable[[int], Ranks], folders: Callable[[str], str], tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    setting = Setting(folders("qwen3"), _COPIES | _ULYSSES)
    expected, *_ = ranks(4).run(fsdp_jobs.save, setting=setting, folder=folder, steps=2, more=2)
    same, *_ = ranks(4).run(fsdp_jobs.resume, setting=setting, folder=folder, more=2)
    assert same["loaded"]["random_restored"] and same["grad_norm"] == expected["grad_norm"]
    for name, weight in expected["weights"].items():
        np.testing.assert_array_equal(same["weights"][name], weight)
    for size, keys in ((1, {}), (2, _ULYSSES), (4, {}), (4, {"fsdp_size": 1})):
        other, *_ = ranks(size).run(fsdp_jobs.resume, setting=Setting(folders("qwen3"), keys), folder=folder, more=2)
        assert not other["loaded"]["random_restored"]
        for name, weight in expected["weights"].items():
            assert _relative(other["weights"][name], weight) < 2e-6, name


@pytest.mark.slow
@pytest.mark.parametrize(("size", "keys"), [(2, _ULYSSES), (4, _COPIES | _ULYSSES)])
def test_adapters_train_in_these_layouts(
    ranks: Callable[[int], Ranks], folders: Callable[[str], str], tmp_path: Path, size: int, keys: dict[str, Any]
) -> None:
    adapted = fsdp_jobs.ADAPTED
    folder = str(tmp_path / "adapter")
    (expected,) = ranks(1).run(fsdp_jobs.megatron_adapters, setting=Setting(folders("qwen3"), adapted), folder=folder)
    reports = ranks(size).run(fsdp_jobs.fsdp_adapters, setting=Setting(folders("qwen3"), adapted | keys), folder=folder)
    found = {row: values for report in reports for row, values in report["log_probs"].items()}
    for row, values in expected["log_probs"].items():
        np.testing.assert_allclose(found[row], values, atol=1e-5)
    assert reports[0]["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
    for matrix, gradient in expected["gradients"].items():
        assert _relative(reports[0]["gradients"][matrix], gradient) < 1e-5, matrix
    for tensor, weight in expected["weights"].items():
        assert _relative(reports[0]["weights"][tensor], weight) < 2e-5, tensor


#: family, branches of agents instead of samples of a prompt, ranks, keys
_SHARED: list[tuple[str, bool, int, dict[str, Any]]] = [
    ("qwen3", False, 1, {}),
    ("qwen3", True, 1, {"recompute_granularity": "full"}),
    ("gemma2", False, 1, {}),
    ("gemma3", True, 2, _ULYSSES),
    ("deepseek_v3", False, 2, _ULYSSES),
    ("qwen2", True, 2, {}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "trees", "size", "keys"), _SHARED)
def test_rows_that_begin_alike_train_as_each_by_itself(
    ranks: Callable[[int], Ranks], folders: Callable[[str], str], name: str, trees: bool, size: int, keys: dict[str, Any]
) -> None:
    setting = Setting(folders(name), _UNBALANCED, token_budget=300)
    (expected,) = ranks(1).run(prefix_jobs.train, setting=setting, trees=trees)
    setting = Setting(folders(name), _UNBALANCED | keys, token_budget=300, shares_prefixes=True)
    report, *_ = ranks(size).run(fsdp_jobs.train, setting=setting, steps=3, trees=trees)
    assert report["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
    for tensor, weight in expected["weights"].items():
        assert _relative(report["weights"][tensor], weight) < 2e-5, tensor
