"""What the CPU hooks do with the KV cache between rollouts, and which patches vLLM's CPU build still needs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from patience import patient
from vllm_program import run_program

from mindspeed_rl.adaptors.vllm_cpu import VllmCpuHooks


def engine_with_cache(cache: torch.Tensor) -> SimpleNamespace:
    """The path from vLLM's LLM object to its model runner's caches."""
    runner = SimpleNamespace(kv_caches=[cache], model=torch.nn.Module())
    worker = SimpleNamespace(worker=SimpleNamespace(model_runner=runner))
    core = SimpleNamespace(engine_core=SimpleNamespace(model_executor=SimpleNamespace(driver_worker=worker)))
    return SimpleNamespace(llm_engine=SimpleNamespace(engine_core=core))


def test_a_released_cache_holds_no_memory_and_comes_back_zero_even_on_recycled_memory() -> None:
    # 0 * NaN is NaN: a single NaN in an unused slot of a recycled block changed the tokens of whole batches
    cache = torch.ones(1 << 14)
    hooks, llm = VllmCpuHooks(), engine_with_cache(cache)
    for _ in range(20):
        hooks.release(llm)
        assert cache.untyped_storage().size() == 0
        junk = [torch.full((1 << 14,), float("nan")) for _ in range(20)]
        del junk
        hooks.restore_cache(llm)
        assert torch.equal(cache, torch.zeros(1 << 14))


def test_releasing_or_restoring_twice_changes_nothing() -> None:
    cache = torch.ones(64)
    hooks, llm = VllmCpuHooks(), engine_with_cache(cache)
    hooks.restore_cache(llm)
    assert torch.equal(cache, torch.ones(64))
    hooks.release(llm)
    hooks.release(llm)
    hooks.restore_cache(llm)
    cache.fill_(2.0)
    hooks.restore_cache(llm)
    assert torch.equal(cache, torch.full((64,), 2.0))


PACKED = """
import torch
from torch import nn
from types import SimpleNamespace
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts import cpu_moe
from mindspeed_rl.adaptors import vllm_cpu_experts
from mindspeed_rl.adaptors.vllm_cpu import VllmCpuHooks

vllm_cpu_experts.apply()
torch.manual_seed(0)


class Kernel(cpu_moe.CPUUnquantizedExperts):
    def __init__(self, intermediate, isa, activation):
        self.isa, self.output_alignment, self.reduction_alignment = isa, 32, 32
        self.moe_config = SimpleNamespace(intermediate_size_per_partition=intermediate, activation=activation)

    @classmethod
    def _intermediate_alignment(cls):
        return 32


def check(isa, dtype, hidden, intermediate, activation):
    layer, kernel = nn.Module(), Kernel(intermediate, isa, activation)
    layer.quant_method = SimpleNamespace(moe_kernel=SimpleNamespace(fused_experts=kernel))
    loaded = {
        "w13_weight": torch.randn(2, 2 * intermediate, hidden).to(dtype),
        "w2_weight": torch.randn(2, hidden, intermediate).to(dtype),
    }
    bias = {"w13_bias": torch.randn(2, 2 * intermediate)}
    for name, value in (loaded | bias).items():
        layer.register_parameter(name, nn.Parameter(value.clone(), requires_grad=False))
    kernel.process_weights_after_loading(layer)
    unpack = VllmCpuHooks().unpack(layer)
    assert set(unpack) == set(loaded)
    for name, value in loaded.items():
        packed = layer.get_parameter(name).data
        assert not torch.equal(packed.flatten()[: value.numel()], value.flatten())
        for expert in range(2):
            matrix, expected = unpack[name](packed[expert]), value[expert]
            assert torch.equal(matrix[: expected.size(0), : expected.size(1)], expected), (isa, dtype, hidden, name)
            # what was added is at the end, and 0
            assert torch.count_nonzero(matrix) == torch.count_nonzero(expected)
    for name, value in bias.items():
        padded = layer.get_parameter(name).data
        if activation == MoEActivation.SWIGLUOAI:
            assert torch.equal(padded[:, : 2 * intermediate], value) and not padded[:, 2 * intermediate :].any()
    # the loader gets what it loaded, so a load may write a part of it, or nothing
    hooks, packed = VllmCpuHooks(), {name: layer.get_parameter(name).data.clone() for name in loaded | bias}
    for _ in range(2):
        hooks.before_load(layer)
        hooks.before_load(layer)  # again after a load that failed
        for name, value in (loaded | bias).items():
            assert torch.equal(layer.get_parameter(name), value), (isa, dtype, hidden, name)
        hooks.after_load(layer)
        for name, value in packed.items():
            assert torch.equal(layer.get_parameter(name), value), (isa, dtype, hidden, name)


for isa in ("vec", "amx"):
    for dtype in (torch.bfloat16, torch.float32):
        for hidden, intermediate in ((64, 32), (64, 24), (32, 8), (96, 48)):
            check(isa, dtype, hidden, intermediate, None)
            check(isa, dtype, hidden, intermediate, MoEActivation.SWIGLUOAI)
"""

ROUTED = """
import torch
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import cpu_fused_moe
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

logits, bias = torch.randn(50, 8), torch.randn(8) / 4
for score, with_bias, scale in (("sigmoid", True, 1.0), ("sigmoid", False, 1.0), ("softmax", True, 2.5), ("softmax", False, 1)):
    router = CPURouter(
        3, 8, scoring_func=score, e_score_correction_bias=bias if with_bias else None, routed_scaling_factor=scale
    )
    weights, ids = router._compute_routing(torch.empty(0), logits, None)
    for row in range(50):
        scores = logits[row].sigmoid() if score == "sigmoid" else logits[row].softmax(0)
        chosen = sorted(range(8), key=lambda i: float(scores[i] + with_bias * bias[i]), reverse=True)[:3]
        total = sum(float(scores[i]) for i in chosen)
        found = dict(zip(ids[row].tolist(), weights[row].tolist()))
        assert set(found) == set(chosen) and ids.dtype == torch.int32
        assert all(abs(found[i] - scale * float(scores[i]) / total) < 1e-6 for i in chosen), (score, with_bias)

# alternate rows of gate and up, with zeros at the end: as the plain formula
x, gate, up = torch.randn(5, 32), torch.randn(2, 8, 33), torch.randn(2, 8, 33)
down, ids, weights = torch.randn(2, 32, 9), torch.tensor([[0, 1]] * 5, dtype=torch.int32), torch.rand(5, 2)
layer, kernel = nn.Module(), Kernel(8, "vec", MoEActivation.SWIGLUOAI)
for name, value in (
    ("w13_weight", torch.stack([gate, up], 2).flatten(1, 2)[..., :32]),
    ("w13_bias", torch.stack([gate, up], 2).flatten(1, 2)[..., 32]),
    ("w2_weight", down[..., :8]),
):
    layer.register_parameter(name, nn.Parameter(value.contiguous(), requires_grad=False))
kernel.process_weights_after_loading(layer)
out = torch.empty(5, 32)
bias2 = down[..., 8].contiguous()
cpu_fused_moe(
    out, x, layer.w13_weight, layer.w2_weight, layer.w13_bias, bias2, weights, ids, MoEActivation.SWIGLUOAI.value, "vec"
)
expected = torch.zeros(5, 32)
for token in range(5):
    for expert in range(2):
        g = (gate[expert, :, :32] @ x[token] + gate[expert, :, 32]).clamp(max=7.0)
        u = (up[expert, :, :32] @ x[token] + up[expert, :, 32]).clamp(-7.0, 7.0)
        inner = (u + 1) * g * torch.sigmoid(1.702 * g)
        expected[token] += weights[token, expert] * (down[expert, :, :8] @ inner + bias2[expert])
# the terms of a sum that cancels are as large as the largest output
torch.testing.assert_close(out, expected, rtol=1e-5, atol=2e-6 * float(expected.abs().max()))
print('"all compared"')
"""


def test_experts_are_read_back_as_they_were_loaded_and_chosen_by_the_rule_of_their_model() -> None:
    assert run_program(PACKED + ROUTED) == "all compared"


@pytest.mark.slow
def test_every_patch_is_still_needed() -> None:
    program = Path(__file__).with_name("unadapted_vllm.py")
    result = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=patient(300))
    assert result.returncode == 0, result.stderr[-3000:]
    needed = json.loads(result.stdout.splitlines()[-1])
    assert {patch for patch, is_needed in needed.items() if not is_needed} == set()
