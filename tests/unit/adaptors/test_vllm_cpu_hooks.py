"""What the CPU hooks do with the KV cache between rollouts, and which patches vLLM's CPU build still needs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from patience import patient

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
from vllm.model_executor.layers.fused_moe.experts import cpu_moe
from mindspeed_rl.adaptors.vllm_cpu import VllmCpuHooks


class Kernel(cpu_moe.CPUUnquantizedExperts):
    def __init__(self, intermediate, isa):
        self.isa, self.output_alignment, self.reduction_alignment = isa, 32, 32
        self.moe_config = SimpleNamespace(intermediate_size_per_partition=intermediate, activation=None)

    @classmethod
    def _intermediate_alignment(cls):
        return 32


for isa in ("vec", "amx"):
    for dtype in (torch.bfloat16, torch.float32):
        for hidden, intermediate in ((64, 32), (64, 24), (32, 8), (96, 48)):
            layer, kernel = nn.Module(), Kernel(intermediate, isa)
            layer.quant_method = SimpleNamespace(moe_kernel=SimpleNamespace(fused_experts=kernel))
            loaded = {
                "w13_weight": torch.randn(2, 2 * intermediate, hidden).to(dtype),
                "w2_weight": torch.randn(2, hidden, intermediate).to(dtype),
            }
            for name, value in loaded.items():
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
"""


def test_packed_experts_are_read_back_as_they_were_loaded_by_every_kernel() -> None:
    result = subprocess.run([sys.executable, "-c", PACKED], capture_output=True, text=True, timeout=patient(300))
    assert result.returncode == 0, result.stderr[-3000:]


def test_every_patch_is_still_needed() -> None:
    program = Path(__file__).with_name("unadapted_vllm.py")
    result = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=patient(300))
    assert result.returncode == 0, result.stderr[-3000:]
    needed = json.loads(result.stdout.splitlines()[-1])
    assert {patch for patch, is_needed in needed.items() if not is_needed} == set()
