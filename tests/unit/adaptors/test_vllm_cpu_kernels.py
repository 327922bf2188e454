"""vLLM's kernels for the CPU stand in the place of Triton's from the start, and a worker does not look for them again."""

from __future__ import annotations

import json
import subprocess
import sys

PROGRAM = """
import json, os, sys, types
os.environ.update(RANK="0", LOCAL_RANK="0", VLLM_LOGGING_LEVEL="ERROR")
from mindspeed_rl import adaptors, platform

class Watched(types.ModuleType):
    looks = 0

    def __getattribute__(self, name):
        if name == "__dict__":
            Watched.looks += 1
        return super().__getattribute__(name)

sys.modules["watched"] = Watched("watched")
platform.select("cpu")
adaptors.apply("rollout")
looks = Watched.looks

from vllm.platforms import current_platform
from vllm.triton_utils.dispatcher import _registry
current_platform.register_triton_kernel_overrides()
import vllm.v1.sample.rejection_sampler as drawn, vllm.v1.worker.block_table as table
replaced = [type(found).__name__ for found in (table.ComputeSlotMappingKernel.kernel, drawn.expand_kernel)]
print(json.dumps([looks > 0, Watched.looks - looks, replaced, len(_registry) > 2]))
"""


def test_kernels_are_replaced_once() -> None:
    result = subprocess.run([sys.executable, "-W", "ignore", "-c", PROGRAM], capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout.splitlines()[-1]) == [True, 0, ["KernelOverride", "KernelOverride"], True]
