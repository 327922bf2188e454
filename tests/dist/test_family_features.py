"""What saves memory or time, and how rows are put together, leaves the training of every family as it is."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import tiny_families
import training_jobs as jobs
from comparison import assert_same_training
from ranks import RankFailureError, Ranks
from slow_layouts import RECOMPUTE, SP, VPP
from training_jobs import Setting

pytestmark = [pytest.mark.slow, pytest.mark.extra]

_OVERLAP = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
#: ranks, keys, how rows become micro-batches
_FEATURES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "recomputed": (1, RECOMPUTE, {}),
    "attention recomputed": (1, {"recompute_granularity": "selective"}, {}),
    "activation recomputed": (1, {"recompute_activation_function": True}, {}),
    "padded": (1, {}, {"packed": False}),
    "token budget": (1, {}, {"token_budget": 48}),
    "half of the states on the host": (1, {"optimizer_offload_fraction": 0.5}, {}),
    "swapped states": (1, {"swap_optimizer": True}, {}),
    "VPP2 recomputed": (2, VPP | RECOMPUTE, {}),
    "TP2 SP recomputed padded": (2, SP | RECOMPUTE, {"packed": False}),
    "DP2 overlapped": (2, _OVERLAP, {}),
}
_REFUSED = {
    ("activation recomputed", "gpt_oss"): "recompute_activation_function: true cannot be used with gpt_oss",
    ("VPP2 recomputed", "glm5"): "begins a stage at decoder layer 1, which has no indexer",
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Name of a family -> the folder of its tiny model."""
    return cache(lambda name: str(tiny_families.save(name, tmp_path_factory.mktemp(name))))


@pytest.fixture(scope="module")
def plain(ranks: Callable[[int], Ranks], folders: Callable[[str], str]) -> Callable[[str], list[dict[str, Any]]]:
    """Name of a family -> what one process reports with packed micro-batches of two rows."""
    return cache(lambda name: ranks(1).run(jobs.train, setting=Setting(folders(name))))


@pytest.mark.parametrize("feature", _FEATURES)
@pytest.mark.parametrize("name", tiny_families.FAMILIES)
def test_training_is_as_without(
    ranks: Callable[[int], Ranks],
    folders: Callable[[str], str],
    plain: Callable[[str], list[dict[str, Any]]],
    name: str,
    feature: str,
) -> None:
    size, keys, batching = _FEATURES[feature]
    if "tensor_model_parallel_size" in keys:
        keys = keys | tiny_families.KEYS.get(name, {})
    setting = Setting(folders(name), keys, **batching)
    if (refusal := _REFUSED.get((feature, name))) is not None:
        with pytest.raises(RankFailureError, match=refusal):
            ranks(size).run(jobs.train, setting=setting)
        return
    assert_same_training(ranks(size).run(jobs.train, setting=setting, timeout_s=240), plain(name), tolerance=2e-5)
