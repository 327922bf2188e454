"""Models of images under FSDP2 compute and train as Megatron's engine and transformers do, in every layout."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import fsdp_jobs
import numpy as np
import pytest
import tiny_vision
import vision_jobs
from ranks import Ranks
from safetensors.torch import load_file
from test_vision_layouts import read_log_probs
from training_jobs import Setting

TRAINED = {"freeze_vit": False, "freeze_aligner": False}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Name of a tiny model -> its Hugging Face folder."""
    return cache(lambda name: str(tiny_vision.save(name, tmp_path_factory.mktemp(name))))


@pytest.fixture(scope="module")
def expected(ranks: Callable[[int], Ranks], folders: Callable[[str], str]) -> Callable[..., dict[str, Any]]:
    """(name, *keys of a role that are false) -> the report of Megatron's engine on one rank."""

    @cache
    def train(name: str, *thawed: str) -> dict[str, Any]:
        (report,) = ranks(1).run(fsdp_jobs.megatron_images, setting=Setting(folders(name), dict.fromkeys(thawed, False)))
        return report

    return train


def _check(reports: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    log_probs = {row: values for report in reports for row, values in report["log_probs"].items()}
    assert sorted(log_probs) == list(range(len(vision_jobs.all_rows())))
    for row, values in log_probs.items():
        np.testing.assert_allclose(values, expected["log_probs"][row], rtol=0, atol=1e-5)
    for report in reports:
        assert report["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
    assert reports[0]["gradients"].keys() == expected["gradients"].keys()
    largest = max(np.abs(gradient).max() for gradient in expected["gradients"].values())
    for name, gradient in expected["gradients"].items():
        gap = np.abs(reports[0]["gradients"][name] - gradient).max()
        # some are 0 but for rounding: biases of keys; a decay of a delta net sums over all pairs of tokens of a chunk
        bound = 1e-4 if ".linear_attn." in name else 1e-5
        assert gap <= bound * max(np.abs(gradient).max(), 1e-3 * largest), name
    assert reports[0]["weights"].keys() == expected["weights"].keys()
    for name, weight in expected["weights"].items():
        gap = np.abs(reports[0]["weights"][name] - weight).max()
        assert gap <= 2e-5 * max(np.abs(weight).max(), 1e-30), name


@pytest.mark.parametrize("name", tiny_vision.CONFIGS)
def test_log_probs_are_those_of_transformers(ranks: Callable[[int], Ranks], folders: Callable[[str], str], name: str) -> None:
    (report,) = ranks(1).run(fsdp_jobs.images, setting=Setting(folders(name)), steps=1)
    for row, values in enumerate(read_log_probs(tiny_vision.build(name))):
        np.testing.assert_allclose(report["log_probs"][row], values, rtol=1e-5, atol=1e-5)


_BOTH = ("freeze_vit", "freeze_aligner")
_PARTS = [(name, thawed) for name in tiny_vision.CONFIGS for thawed in ((), _BOTH)]


@pytest.mark.parametrize(("name", "thawed"), [*_PARTS, ("qwen2.5", ("freeze_vit",)), ("qwen3", ("freeze_aligner",))])
def test_each_part_trains_as_on_megatron(
    ranks: Callable[[int], Ranks],
    folders: Callable[[str], str],
    expected: Callable[..., dict[str, Any]],
    name: str,
    thawed: tuple[str, ...],
) -> None:
    keys = dict.fromkeys(thawed, False)
    reports = ranks(1).run(fsdp_jobs.images, setting=Setting(folders(name), keys))
    _check(reports, expected(name, *thawed))


#: model, ranks, keys, other settings
_LAYOUTS: list[tuple[str, int, dict[str, Any], dict[str, Any]]] = [
    ("qwen3", 2, {}, {"micro_batch_size": 1}),
    ("qwen3", 1, {"recompute_granularity": "full"}, {"packed": False, "micro_batch_size": 3}),
    ("qwen3", 2, {"context_parallel_size": 2}, {}),
    ("qwen2.5", 2, {"context_parallel_size": 2}, {"packed": False}),
    ("qwen3_moe", 4, {"fsdp_size": 2, "context_parallel_size": 2}, {"token_budget": 90}),
    ("qwen3.5", 2, {}, {}),
    ("qwen3", 1, {}, {"token_budget": 90, "shares_prefixes": True}),
    ("qwen2.5", 2, {"context_parallel_size": 2}, {"token_budget": 90, "shares_prefixes": True}),
]


@pytest.mark.parametrize(("name", "size", "keys", "changes"), _LAYOUTS)
def test_every_layout_trains_as_one_rank_of_megatron(
    ranks: Callable[[int], Ranks],
    folders: Callable[[str], str],
    expected: Callable[..., dict[str, Any]],
    name: str,
    size: int,
    keys: dict[str, Any],
    changes: dict[str, Any],
) -> None:
    reports = ranks(size).run(fsdp_jobs.images, setting=Setting(folders(name), TRAINED | keys, **changes))
    _check(reports, expected(name, *_BOTH))


@pytest.mark.parametrize(("name", "thawed", "size"), [("qwen2.5", _BOTH, 1), ("qwen3", (), 2)])
def test_adapters_train_as_on_megatron(
    ranks: Callable[[int], Ranks], folders: Callable[[str], str], name: str, thawed: tuple[str, ...], size: int
) -> None:
    keys = fsdp_jobs.ADAPTED | dict.fromkeys(thawed, False)
    (expected,) = ranks(1).run(fsdp_jobs.megatron_images, setting=Setting(folders(name), keys))
    report, *_ = ranks(size).run(fsdp_jobs.images, setting=Setting(folders(name), keys))
    assert report["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
    start = load_file(f"{folders(name)}/model.safetensors")
    moved = {tensor for tensor, weight in expected["weights"].items() if not np.array_equal(weight, start[tensor].numpy())}
    assert any("visual" in tensor for tensor in moved) == bool(thawed)
    for tensor, weight in expected["weights"].items():
        gap = np.abs(report["weights"][tensor] - weight).max()
        assert gap <= (2e-5 * np.abs(weight).max() if tensor in moved else 0.0), tensor


def test_parts_have_their_own_learning_rates(ranks: Callable[[int], Ranks], folders: Callable[[str], str]) -> None:
    keys = TRAINED | {"vit_lr": 1e-5, "aligner_lr": 1e-4}
    (expected,) = ranks(1).run(fsdp_jobs.megatron_images, setting=Setting(folders("qwen3"), keys))
    reports = ranks(1).run(fsdp_jobs.images, setting=Setting(folders("qwen3"), keys))
    _check(reports, expected)
