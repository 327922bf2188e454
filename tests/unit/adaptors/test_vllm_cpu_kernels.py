"""vLLM's kernels for the CPU stand in the place of Triton's from the start, and a worker does not look for them again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from patience import patient

PROGRAM = """
import gc, json, os, sys, types
os.environ.update(RANK="0", LOCAL_RANK="0", VLLM_LOGGING_LEVEL="ERROR", TORCHDYNAMO_DISABLE="1")
from mindspeed_rl import adaptors, platform

class Watched(types.ModuleType):
    looks = 0

    def __getattribute__(self, name):
        if name == "__dict__":
            Watched.looks += 1
        return super().__getattribute__(name)

sys.modules["watched"] = Watched("watched")
platform.select("cpu")
searches = gc.get_stats()[2]["collections"]
adaptors.apply("rollout")
looks, searches = Watched.looks, gc.get_stats()[2]["collections"] - searches

from vllm.platforms import current_platform
from vllm.triton_utils.dispatcher import _registry
current_platform.register_triton_kernel_overrides()
import vllm.v1.sample.rejection_sampler as sampler, vllm.v1.worker.block_table as table
replaced = [type(found).__name__ for found in (table.ComputeSlotMappingKernel.kernel, sampler.expand_kernel)]
print(json.dumps([looks > 0, Watched.looks - looks, replaced, len(_registry) > 2]))
print(json.dumps(["torch._inductor.lowering" in sys.modules, searches < 4]))
"""


def test_kernels_are_replaced_once_and_nothing_is_imported_for_a_compiler() -> None:
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM], capture_output=True, text=True, timeout=patient(240)
    )
    assert result.returncode == 0, result.stderr
    kernels, imports = (json.loads(line) for line in result.stdout.splitlines()[-2:])
    assert kernels == [True, 0, ["KernelOverride", "KernelOverride"], True]
    # nothing is compiled here, and the modules of vLLM are not searched for garbage while they come
    assert imports == [False, True]


def test_a_release_of_vllm_that_needs_the_compiler_is_imported_with_it(tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("import vllm.first\nimport torch._inductor.lowering\n")
    (tmp_path / "vllm" / "first.py").write_text("print('first')\n")
    program = "import sys\nsys.path.insert(0, sys.argv[1])\nfrom mindspeed_rl.adaptors import vllm_cpu\n"
    program += "vllm_cpu._import_without_compiler()\nprint('torch._inductor.lowering' in sys.modules, 'vllm' in sys.modules)"
    environment = {**os.environ, "TORCHDYNAMO_DISABLE": "1"}
    command = [sys.executable, "-W", "ignore", "-c", program, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=patient(120))
    assert done.stdout.split() == ["first", "first", "True", "True"], done.stderr
