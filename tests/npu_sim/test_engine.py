"""The training engine on the simulated NPU against the same engine on the CPU: losses, gradients, memory, checkpoints.

In fp32 the two must agree to the fifth digit in every layout: the suite's loss does not depend on the layout, and the
simulated kernels compute what the CPU computes. These tests do without MindSpeed; `test_mindspeed.py` does not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks

#: GiB of the compressed causal mask that attention keeps on the device
MASK_GIB = 4 / 1024


def losses(reports: list[dict[str, Any]]) -> list[tuple[float, float]]:
    """(loss, gradient norm) of every step, summed over the ranks that hand results out."""
    results = []
    for step in zip(*(report["steps"] for report in reports)):
        results.append((sum(rank["loss"] for rank in step) / sum(rank["count"] for rank in step), step[0]["grad_norm"]))
    return results


@pytest.fixture(scope="module")
def expected() -> list[tuple[float, float]]:
    """Four steps on the CPU in fp32."""
    return losses(run_ranks("engine", 1, {"mode": "cpu", "steps": 4}))


LAYOUTS = {
    "one process": (1, {}),
    "TP2 with sequence parallelism": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "PP2": (2, {"pipeline_model_parallel_size": 2}),
    "DP2 with distributed optimizer": (2, {}),
    "CP2 ring": (2, {"context_parallel_size": 2, "context_parallel_algo": "megatron_cp_algo"}),
    "CP2 Ulysses": (2, {"context_parallel_size": 2, "context_parallel_algo": "ulysses_cp_algo"}),
}


#: the others take half a minute each
SHORT = ("one process", "TP2 with sequence parallelism")


@pytest.mark.parametrize("name", [name if name in SHORT else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS])
def test_training_on_the_npu_equals_training_on_the_cpu(name: str, expected: list[tuple[float, float]]) -> None:
    size, layout = LAYOUTS[name]
    reports = run_ranks("engine", size, {"mode": "npu", "steps": 4, "layout": layout})
    for got, want in zip(losses(reports), expected, strict=True):
        assert got == pytest.approx(want, rel=2e-5)
    assert [report["devices"] for report in reports] == [[f"npu:{rank}"] for rank in range(size)]
    assert all(report["fused"]["npu::npu_fusion_attention"] > 0 for report in reports)


def test_padded_batches_equal_packed_ones(expected: list[tuple[float, float]]) -> None:
    reports = run_ranks("engine", 1, {"mode": "npu", "steps": 4, "packed": False})
    assert losses(reports) == [pytest.approx(step, rel=2e-5) for step in expected]


def test_a_prompt_that_is_computed_once_for_two_samples_changes_no_number() -> None:
    settings = {"steps": 2, "pairs": True}
    reference = losses(run_ranks("engine", 1, {"mode": "cpu", **settings}))
    shared = run_ranks("engine", 1, {"mode": "npu", "shares_prefixes": True, **settings})
    for got, want in zip(losses(shared), reference, strict=True):
        assert got == pytest.approx(want, rel=2e-5)


def test_offloading_frees_the_training_state_and_changes_no_number(expected: list[tuple[float, float]]) -> None:
    (report,) = run_ranks("engine", 1, {"mode": "npu", "steps": 4, "offload": True})
    before, during, after = (gib - MASK_GIB for gib in report["memory"])
    assert during < 0.05 * before and after == pytest.approx(before)
    beside, with_others = report["copies"]
    assert beside > 0 and with_others == 0  # all of them on another stream than what computes
    assert losses([report]) == [pytest.approx(step, rel=2e-5) for step in expected]


def test_a_checkpoint_continues_under_another_layout(tmp_path: Path, expected: list[tuple[float, float]]) -> None:
    layout = {"tensor_model_parallel_size": 2}
    first = run_ranks("engine", 2, {"mode": "npu", "steps": 2, "layout": layout, "save": str(tmp_path)})
    assert [report["processes"] for report in first] == [0, 0]  # none keeps the results of the writers
    second = run_ranks("engine", 2, {"mode": "npu", "steps": 4, "load": str(tmp_path)})
    assert losses(first) + losses(second) == [pytest.approx(step, rel=2e-5) for step in expected]


@pytest.mark.parametrize(
    "layout",
    [
        {"tensor_model_parallel_size": 2},
        pytest.param({"pipeline_model_parallel_size": 2}, marks=pytest.mark.slow),
    ],
)
def test_weights_gathered_over_hccl_are_bit_equal_to_what_was_loaded(layout: dict[str, int]) -> None:
    for report in run_ranks("engine", 2, {"mode": "npu", "steps": 0, "stream": True, "bf16": True, "layout": layout}):
        assert report["stream"] == {"names": True, "wrong": []}
