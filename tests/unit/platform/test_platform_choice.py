"""Choosing a platform, and what the CPU one says of itself."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from patience import patient

from mindspeed_rl import platform
from mindspeed_rl.platform import ProfileSettings


def test_unknown_and_unusable_platforms_are_errors_that_say_what_there_is() -> None:
    with pytest.raises(ValueError, match="platform: 'tpu' is not one of auto, npu, cuda, cpu"):
        platform.select("tpu")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="platform: 'cuda' was requested, but no such device is usable"):
            platform.select("cuda")
    assert platform.current().name == "cpu"


def test_choosing_a_platform_imports_no_other_kinds_packages() -> None:
    code = (
        "import sys; from mindspeed_rl import platform; platform.select('cpu'); platform.current().set_device(1);"
        "print(sorted({'torch_npu', 'mindspeed', 'vllm', 'megatron', 'ray'} & set(sys.modules)))"
    )
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=patient(120))
    assert result.stdout.strip() == "[]", result.stderr


def test_the_cpu_platform_knows_its_memory_and_samples_with_torchs_generator() -> None:
    cpu = platform.select("cpu")
    stats = cpu.memory_stats()
    assert 0 < stats.allocated_gib <= stats.peak_gib
    state = cpu.rng_module.get_rng_state()
    first = torch.rand(3)
    cpu.rng_module.set_rng_state(state)
    assert torch.equal(torch.rand(3), first)
    cpu.rng_module.manual_seed(3)
    assert torch.equal(torch.rand(2), torch.rand(2, generator=torch.Generator().manual_seed(3)))


def test_deterministic_mode_can_be_switched_on_and_off() -> None:
    cpu = platform.select("cpu")
    try:
        cpu.set_deterministic(True)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        cpu.set_deterministic(False)
    assert not torch.are_deterministic_algorithms_enabled()


def test_workers_on_the_cpu_get_one_thread_each_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = platform.select("cpu")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert cpu.worker_env()["OMP_NUM_THREADS"] == "1"
    threads = str(random.randint(2, 9))
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    assert cpu.worker_env()["OMP_NUM_THREADS"] == threads


def test_products_of_many_lengths_do_not_add_up_in_a_worker_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled for each number of tokens, they took 660 MB in this program before."""
    for of_the_user in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
        monkeypatch.delenv(of_the_user, raising=False)
    program = """
import psutil, torch
torch.set_num_threads(1)
weights = [torch.ones(width, 512) for width in (512, 384, 256, 192)]
resident = []
for tokens in range(600, 900, 2):
    for weight in weights:
        torch.ops.mkldnn._linear_pointwise(torch.ones(tokens, weight.size(0)), weight.t(), None, "none", [], "")
    resident.append(psutil.Process().memory_info().rss >> 20)
print(resident[-1] - resident[0])
"""
    environment = {**os.environ, **platform.select("cpu").worker_env()}
    command = [sys.executable, "-c", program]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=patient(120))
    assert int(run.stdout) < 300


def test_a_profiled_block_leaves_a_trace(tmp_path: Path) -> None:
    with platform.select("cpu").profile(str(tmp_path), ProfileSettings()):
        torch.ones(4).sum()
    assert list(tmp_path.glob("*.json"))


def test_the_cpu_keeps_what_is_freed_for_the_next_pass() -> None:
    code = (
        "import resource, torch; from mindspeed_rl import platform\n"
        "platform.select('cpu').set_device(0)\n"
        "def faults(): return resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "def work(): tensors = [torch.ones(6 << 20) for _ in range(4)]\n"
        "for _ in range(8): work()  # holes of the right size are there after two or three rounds\n"
        "before = faults()\n"
        "for _ in range(5): work()\n"
        "print(faults() - before)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=patient(120), check=True)
    assert int(result.stdout) < 4 * (6 << 20) * 4 / os.sysconf("SC_PAGE_SIZE") / 10
