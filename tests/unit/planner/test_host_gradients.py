"""Gradients of the second engine in host memory: when a search moves them there, and what that takes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mindspeed_rl.config.loader import build_run_config
from mindspeed_rl.config.run_files import apply_values, compose, locate
from mindspeed_rl.planner.devices import DEVICES, GIB
from mindspeed_rl.planner.efficiency import NPU, Efficiency
from mindspeed_rl.planner.fit import FitRequest, FitResult, fit, fit_run
from mindspeed_rl.planner.run_files import read_block
from mindspeed_rl.planner.seconds import TimePlan, plan_time
from mindspeed_rl.run.draft import draft

#: parameters of Qwen3-8B; of embedding, head and last norm; of one of its 36 layers
COUNT, ENDS = 8_190_735_360, 2 * 151936 * 4096 + 4096
LAYER = (COUNT - ENDS) // 36


def _find(memory_gib: int) -> FitResult:
    """The fastest layout of GRPO of Qwen3-8B on one device with so much memory."""
    block = read_block("qwen3_8b", None)
    request = FitRequest("qwen3_8b", block, 1, 1024, 1024, prompts=16, samples=4, stage="GRPO", engine="fsdp")
    return fit(request, replace(DEVICES["A2"], memory=memory_gib * GIB))[0]


def test_a_search_moves_gradients_to_the_host_only_where_they_do_not_fit() -> None:
    found = _find(64)
    assert found.memory.verdict == "fits"
    assert found.values["actor_config.offload_gradients"] is True
    assert found.values["actor_config.optimizer_offload_fraction"] == 1.0
    (group,) = found.memory.groups
    update = next(phase for phase in group.phases if phase.name == "update").owners
    # float32 weights; gradients of two layers and of what is in none; moments on the host, and all gradients
    assert update["weights"] == 4 * COUNT
    assert update["gradients"] == 4 * (2 * LAYER + ENDS) and "optimizer" not in update
    assert found.memory.host is not None
    assert found.memory.host.owners["gradients"] == 4 * COUNT and found.memory.host.owners["optimizer"] == 8 * COUNT
    # with them on the device weights and gradients are 61 GiB, next to activations and what the driver has
    roomy = _find(100)
    assert roomy.memory.verdict == "fits" and "actor_config.offload_gradients" not in roomy.values
    assert roomy.time.total < found.time.total


def test_a_search_tries_the_savers_that_keep_the_rules_where_the_leanest_one_breaks_one() -> None:
    values = {
        "actor_config.engine": "fsdp",
        "actor_config.tensor_model_parallel_size": 1,
        "actor_config.pipeline_model_parallel_size": 1,
        "rl_config.actor_resource.num_npus": 1,
        "rl_config.init_kl_coef": 0.0,
        "generate_config.infer_tensor_parallel_size": 1,
        "actor_config.optimizer_state_dtype": "bfloat16",  # excludes optimizer_offload_fraction
    }
    tree = apply_values(compose(*locate("grpo_qwen3_8b_A3", None), []), values)
    run = draft(build_run_config(tree))
    # weights, gradients and two moments of 4 + 4 + 2 + 2 bytes are 92 GiB
    found = fit_run(tree, run, replace(DEVICES["A3"], memory=80 * GIB))[0]
    assert found.memory.verdict == "fits"
    assert found.values["actor_config.swap_optimizer"] is True and found.values["actor_config.offload_gradients"] is True


def _plan(efficiency: Efficiency, **keys: object) -> TimePlan:
    """An iteration of Qwen3-8B on the second engine."""
    values = {
        "actor_config.engine": "fsdp",
        "actor_config.tensor_model_parallel_size": 1,
        "actor_config.pipeline_model_parallel_size": 1,
        "rl_config.actor_resource.num_npus": 8,
        "rl_config.init_kl_coef": 0.0,
        **{f"actor_config.{name}": value for name, value in keys.items()},
    }
    cfg = build_run_config(apply_values(compose(*locate("grpo_qwen3_8b_A3", None), []), values))
    return plan_time(draft(cfg), DEVICES["A3"], efficiency=efficiency)


@pytest.mark.parametrize("fraction", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("processors", [NPU["fsdp"].host_adamw, 1e15])
def test_gradients_leave_in_each_micro_batch_and_come_back_for_the_moments_of_the_device(
    fraction: float, processors: float
) -> None:
    efficiency = replace(NPU["fsdp"], host_adamw=processors)
    here, there = (
        _plan(efficiency, optimizer_offload_fraction=fraction, offload_gradients=moved).parts["update"]
        for moved in (False, True)
    )
    link, shard = DEVICES["A3"].host * NPU["fsdp"].host, 4 * COUNT / 8
    # 32 samples of a device, one in a micro-batch
    copied = (32 + 1 - fraction) * shard / link
    assert there["gradients"] == pytest.approx(32 * here["gradients"] + copied, rel=1e-3)
    if not fraction:
        assert "optimizer on the host" not in there
        return
    # the host's processors read two moments of its share; gradients and weights of this share move, or weights alone
    computed = fraction * 8 * COUNT / 8 / processors
    for parts, moved in ((here, 2 * fraction * shard / link), (there, fraction * shard / link)):
        assert parts["optimizer on the host"] == pytest.approx(max(computed, moved), rel=1e-3)
