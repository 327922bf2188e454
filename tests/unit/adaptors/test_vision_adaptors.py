"""torchvision next to a CPU build of torch, and buffers of an engine that starts with dummy weights."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from patience import patient

FOLDER = Path(sys.prefix) / "vision"


def run(program: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=patient(300), env=environment
    )


@pytest.mark.slow
@pytest.mark.skipif(not FOLDER.is_dir(), reason="envs/cpu/install.sh has not put torchvision into its folder")
def test_torchvision_still_needs_its_operators_declared_and_imports_with_them() -> None:
    plain = run(f"import sys; sys.path.append({str(FOLDER)!r}); import torchvision")
    assert plain.returncode != 0 and "torchvision::nms" in plain.stderr, "adaptors/torchvision_cpu.py can go"
    apply = "from mindspeed_rl.adaptors import torchvision_cpu; torchvision_cpu.apply(); import sys"
    resized = run(
        f"{apply}; import torch; from torchvision.transforms.v2 import functional as f;"
        "print(f.resize(torch.zeros(3, 4, 4, dtype=torch.uint8), [2, 2]).shape)",
        MINDSPEED_RL_VISION="1",
    )
    assert resized.stdout.strip() == "torch.Size([3, 2, 2])", resized.stderr[-1000:]
    # a run of text imports none of it
    assert run(f"{apply}; print('torchvision' in sys.modules, {str(FOLDER)!r} in sys.path)").stdout.strip() == "False False"


def test_dummy_weights_change_buffers_without_the_adaptor_and_parameters_alone_with_it() -> None:
    pytest.importorskip("vllm")
    program = """
import torch
from mindspeed_rl.adaptors import vllm_dummy_weights
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

def fill():
    model = torch.nn.Linear(4, 4)
    model.register_buffer("mean", torch.full((3,), 7.0))
    before = model.weight.detach().clone()
    with torch.no_grad():
        DummyModelLoader.load_weights(None, model, None)
    return not model.weight.equal(before), model.mean.tolist() == [7.0] * 3

plain = fill()
vllm_dummy_weights.apply()
vllm_dummy_weights.apply()
print(plain, fill())
"""
    result = run(program)
    assert result.stdout.strip().splitlines()[-1:] == ["(True, False) (True, True)"], result.stdout + result.stderr[-1500:]
