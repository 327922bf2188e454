"""Layouts whose ranks do not all compute the same rows, and transformers' modules under FSDP2, in float32.

On simulated devices they have the numbers of one process on the CPU, and resume with all of them. The jobs are the ones of
tests/dist.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import run_ranks
from safetensors.numpy import load_file

sys.path.append(str(Path(__file__).parents[1] / "dist"))  # which has a module `ranks` too

SOURCE = os.environ.get("MINDSPEED_SRC")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not SOURCE, reason="MINDSPEED_SRC does not point to a checkout of MindSpeed core_r0.16.0"),
]

MEGATRON = ("checkpoint_jobs:save_then_train", "checkpoint_jobs:load_then_train")
FSDP = ("fsdp_jobs:save", "fsdp_jobs:resume")
#: losses of the routers, of each sequence
_BALANCED = {"moe_aux_loss_coeff": 0.1, "moe_router_load_balancing_type": "seq_aux_loss", "moe_z_loss_coeff": 0.05}
_BIASED = {"moe_aux_loss_coeff": 0.0, "moe_router_bias_update_rate": 0.01}


@dataclass(frozen=True)
class Case:
    """A layout.

    Attributes:
        family: of the model.
        size: ranks.
        layout: keys of the layout.
        keys: keys of the process on the CPU too.
        jobs: what saves and what resumes.
        token_budget: tokens of a micro-batch.
    """

    family: str
    size: int
    layout: dict[str, Any]
    keys: dict[str, Any]
    jobs: tuple[str, str]
    token_budget: int | None = None


LAYOUTS: dict[str, Case] = {
    "FSDP2, experts in two groups of copies, rows on two ranks": Case(
        "qwen3_moe", 4, {"fsdp_size": 2, "context_parallel_size": 2}, {"engine": "fsdp", **_BALANCED}, FSDP
    ),
    # rows of up to 20 tokens are on two of the ranks, longer ones on four
    "rows on as many ranks as they need, in a ring": Case(
        "qwen3",
        4,
        {
            "context_parallel_size": 4,
            "context_parallel_algo": "megatron_cp_algo",
            "dynamic_context_parallel": True,
            "min_dynamic_context_parallel_size": 2,
        },
        {},
        MEGATRON,
        token_budget=40,
    ),
    "FSDP2, experts with biases, only copies, layers recomputed, a swapped optimizer": Case(
        "deepseek_v3",
        2,
        {"fsdp_size": 1, "recompute_granularity": "full", "swap_optimizer": True},
        {"engine": "fsdp", **_BIASED},
        FSDP,
    ),
    "FSDP2, half of the optimizer's states on the host": Case(
        "qwen3_moe", 2, {"optimizer_offload_fraction": 0.5}, {"engine": "fsdp", "moe_aux_loss_coeff": 0.0}, FSDP
    ),
    "FSDP2, gradients on the host": Case(
        "qwen3_moe", 2, {"offload_gradients": True}, {"engine": "fsdp", "moe_aux_loss_coeff": 0.0}, FSDP
    ),
    "FSDP2, gradients and half of the optimizer's states on the host, only copies": Case(
        "qwen3_moe",
        2,
        {"offload_gradients": True, "optimizer_offload_fraction": 0.5, "fsdp_size": 1},
        {"engine": "fsdp", **_BALANCED},
        FSDP,
    ),
    "experts, rows on one rank or on two, which exchange heads": Case(
        "qwen3_moe",
        2,
        {"context_parallel_size": 2, "dynamic_context_parallel": True, "expert_model_parallel_size": 2},
        {"moe_aux_loss_coeff": 0.0},
        MEGATRON,
        token_budget=30,
    ),
}


def run(mode: str, job: str, case: Case, model: Path, tmp_path: Path, **arguments: Any) -> Any:
    """The reports of the ranks, and the weights at the end."""
    on_cpu, weights = mode == "cpu", tmp_path / f"{mode}_{job.partition(':')[2]}.safetensors"
    setting = {"folder": str(model), "keys": case.keys if on_cpu else case.keys | case.layout}
    if not on_cpu:
        setting["token_budget"] = case.token_budget
    settings = {"mode": mode, "job": job, "setting": setting, "weights": str(weights), "arguments": arguments}
    return run_ranks("jobs", 1 if on_cpu else case.size, settings), load_file(weights)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_trains_saves_and_resumes_with_the_numbers_of_one_process_on_the_cpu(name: str, tmp_path: Path) -> None:
    import tiny_families

    case = LAYOUTS[name]
    save, resume = case.jobs
    model = tiny_families.save(case.family, tmp_path / "model")
    steps = dict(zip(("before", "after") if case.jobs is MEGATRON else ("steps", "more"), (2, 2)))
    (expected, *_), want = run("cpu", save, case, model, tmp_path, folder=str(tmp_path / "on_cpu"), **steps)
    reports, weights = run("mindspeed", save, case, model, tmp_path, folder=str(tmp_path / "saved"), **steps)
    for report in reports:
        assert report["grad_norm"] == pytest.approx(expected["grad_norm"], rel=2e-5) and report["lr"] == expected["lr"]
    assert weights.keys() == want.keys()
    for key, value in want.items():
        assert np.abs(weights[key] - value).max() <= 2e-5 * max(np.abs(value).max(), 1e-30), key
    left = {"steps": 2} if case.jobs is MEGATRON else {"more": 2}
    resumed, after = run("mindspeed", resume, case, model, tmp_path, folder=str(tmp_path / "saved"), **left)
    assert [report["grad_norm"] for report in resumed] == [report["grad_norm"] for report in reports]
    assert resumed[0]["loaded"]["iteration"] == 2 and resumed[0]["loaded"]["random_restored"]
    assert all(np.array_equal(after[key], value) for key, value in weights.items())


_NOT_BALANCED = {"moe_aux_loss_coeff": 0.0, "moe_router_bias_update_rate": 0.0}
_BY = {"megatron": MEGATRON, "fsdp": FSDP}


def close(ours: dict[str, Any], theirs: dict[str, Any], rel: float) -> None:
    """No tensor is farther from the other than this part of its largest number."""
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        assert np.abs(ours[key] - value).max() <= rel * max(np.abs(value).max(), 1e-30), key


@pytest.mark.parametrize(("saved", "resumed"), [("megatron", "fsdp"), ("fsdp", "megatron")])
def test_a_checkpoint_of_one_engine_starts_the_other(saved: str, resumed: str, tmp_path: Path) -> None:
    import tiny_families

    model, cases = tiny_families.save("qwen3_moe", tmp_path / "model"), {}
    for name, layout in (("megatron", {"expert_model_parallel_size": 2}), ("fsdp", {"fsdp_size": 2})):
        cases[name] = Case("qwen3_moe", 2, layout, {"engine": name, **_NOT_BALANCED}, _BY[name])
    folder, (save, _), (_, resume) = str(tmp_path / "saved"), _BY[saved], _BY[resumed]
    counts = dict(zip(("before", "after") if saved == "megatron" else ("steps", "more"), (2, 2)))
    (expected, *_), want = run("mindspeed", save, cases[saved], model, tmp_path, folder=folder, **counts)
    left = {"steps" if resumed == "megatron" else "more": 2}
    (report, *_), weights = run("mindspeed", resume, cases[resumed], model, tmp_path, folder=folder, **left)
    assert report["loaded"]["iteration"] == 2 and not report["loaded"]["random_restored"]
    assert report["grad_norm"] == pytest.approx(expected["grad_norm"], rel=2e-5) and report["lr"] == expected["lr"]
    close(weights, want, 2e-5)


def test_moments_in_bfloat16_are_rounded_by_chance_and_resumed_with_all_bits(tmp_path: Path) -> None:
    import tiny_families

    model, folder = tiny_families.save("qwen3_moe", tmp_path / "model"), str(tmp_path / "saved")
    keys = {"engine": "fsdp", "moe_aux_loss_coeff": 0.0}
    plain = Case("qwen3_moe", 2, {}, keys, FSDP)
    half = Case("qwen3_moe", 2, {"optimizer_state_dtype": "bfloat16"}, keys, FSDP)
    save, resume = FSDP
    (expected, *_), want = run("mindspeed", save, plain, model, tmp_path, folder=str(tmp_path / "plain"), steps=2, more=2)
    (report, *_), weights = run("mindspeed", save, half, model, tmp_path, folder=folder, steps=2, more=2)
    # a moment has 2^-7 of itself more or less, and a step in proportion: 2e-3 at most, of weights of about 0.1
    norms, exact = report["grad_norm"], expected["grad_norm"]
    assert norms == pytest.approx(exact, rel=1e-2) and norms != exact
    close(weights, want, 2e-3)
    (again, *_), after = run("mindspeed", resume, half, model, tmp_path, folder=folder, more=2)
    assert again["grad_norm"] == report["grad_norm"] and again["loaded"]["random_restored"]
    assert all(np.array_equal(after[key], value) for key, value in weights.items())
