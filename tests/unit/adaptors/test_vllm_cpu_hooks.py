"""What the CPU hooks do with the KV cache between rollouts, and which patches vLLM's CPU build still needs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

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


def test_every_patch_is_still_needed() -> None:
    program = Path(__file__).with_name("unadapted_vllm.py")
    result = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    needed = json.loads(result.stdout.splitlines()[-1])
    assert {patch for patch, is_needed in needed.items() if not is_needed} == set()
