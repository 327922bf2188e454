"""Dumps of different layouts hold the same tensors once the parts of their ranks are put together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dump_jobs import dump_update
from ranks import Ranks
from training_jobs import Setting

from mindspeed_rl.dumps.comparison import Dump, compare

pytestmark = pytest.mark.slow

LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "tensor": ("tied", {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "pipeline": ("tied", {"pipeline_model_parallel_size": 2}),
    "data": ("tied", {"use_distributed_optimizer": True}),
    "experts": ("moe", {"expert_model_parallel_size": 2}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_two_ranks_dump_what_one_does(
    name: str, ranks: Callable[[int], Ranks], models: dict[str, Path], tmp_path: Path
) -> None:
    model, keys = LAYOUTS[name]
    for task in ("tensor", "statistics"):
        result, two = tmp_path / f"one_{task}", tmp_path / f"two_{task}"
        ranks(1).run(dump_update, setting=Setting(str(models[model])), folder=str(result), task=task)
        ranks(2).run(dump_update, setting=Setting(str(models[model]), keys), folder=str(two), task=task)
        findings = compare(Dump.open(result), Dump.open(two))
        assert not findings.differences, str(findings.differences[0])
        has_other_rows = name in ("data", "experts")
        assert len(findings.notes) == has_other_rows, findings.notes
        gradients = {key[3] for key in Dump.open(result).entries if ".gradients." in key[3]}
        assert findings.compared >= len(gradients) + (0 if has_other_rows else 20)


def test_a_changed_weight_shows_first_where_it_is_used(
    ranks: Callable[[int], Ranks], models: dict[str, Path], tmp_path: Path
) -> None:
    """Across layouts: the second layer's feed-forward network, in the first micro-batch."""
    keys = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    ranks(1).run(dump_update, setting=Setting(str(models["tied"])), folder=str(tmp_path / "one"), scale=1.01)
    ranks(2).run(dump_update, setting=Setting(str(models["tied"]), keys), folder=str(tmp_path / "two"))
    findings = compare(Dump.open(tmp_path / "one"), Dump.open(tmp_path / "two"))
    assert findings.differences[0].name == "update_0.micro_0.layers.1.mlp"
