"""The gated delta rule on the device: the numbers of the host, and kernels only by the longest sequence."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from patience import patient
from test_fingerprints import Counted
from torch import Tensor

from mindspeed_rl.engine.gated_delta import causal_convolution, gated_delta_rule
from mindspeed_rl.engine.sequence_layout import ChunkPlan

KERNEL, HEADS, RATIO, SIZE = 4, 2, 2, 16


def run(device: str, lengths: Sequence[int]) -> tuple[list[Tensor], list[int]]:
    """Output and gradients of convolution and rule, on the host; kernels of the forward and of the backward pass."""
    generator, tokens = torch.Generator().manual_seed(0), sum(lengths)

    def sample(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device).requires_grad_()

    x, weight = sample(tokens, HEADS * SIZE), sample(HEADS * SIZE, KERNEL)
    k, v = sample(tokens, HEADS, SIZE), sample(tokens, HEADS * RATIO, SIZE)
    decay, beta = sample(tokens, HEADS * RATIO), sample(tokens, HEADS * RATIO)
    plan = ChunkPlan.build(list(lengths), KERNEL, torch.device(device))
    leaves, kernels = (x, weight, k, v, decay, beta), []
    with Counted() as forward:
        q = causal_convolution(x, weight, plan).unflatten(1, (HEADS, SIZE))
        out = gated_delta_rule(q / SIZE, torch.nn.functional.normalize(k, dim=-1), v, -decay.exp(), beta.sigmoid(), plan)
    kernels.append(forward.calls.total())
    with Counted() as backward:
        gradients = torch.autograd.grad(out.square().sum(), leaves)
    kernels.append(backward.calls.total())
    return [tensor.detach().cpu() for tensor in (out, *gradients)], kernels


@pytest.mark.parametrize("lengths", [[200], [64, 1, 130, 37]], ids=str)
def test_the_device_computes_the_rule_of_the_host(lengths: list[int]) -> None:
    for ours, expected in zip(run("npu", lengths)[0], run("cpu", lengths)[0]):
        assert torch.allclose(ours, expected, rtol=1e-4, atol=1e-5)


def test_kernels_follow_the_longest_sequence_and_not_the_tokens() -> None:
    (result, eight, longer) = (run("npu", lengths)[1] for lengths in ([256], [256] * 8, [512]))
    assert all(result) and result == eight
    # four more chunks of 64 tokens: the state is stored and read, decays and is written to; its gradient likewise
    assert [(after - before) / 4 for before, after in zip(result, longer)] == [4, 9]


def test_the_kernel_of_mindspeed_takes_sequences_and_no_float32() -> None:
    kernel = pytest.importorskip("mindspeed.core.ssm.chunk_gated_delta_rule", reason="MindSpeed is not installed")
    q, beta = torch.randn(1, 8, HEADS, SIZE), torch.rand(1, 8, HEADS)
    with pytest.raises(ValueError, match="does not support float32"):  # so that it computes no model in float32 here
        kernel.chunk_gated_delta_rule(q, q, q, -beta, beta, cu_seqlens=torch.tensor([0, 3, 8]))


@pytest.mark.slow
def test_the_kernel_of_mindspeed_is_the_rule_up_to_the_rounding_of_half_numbers() -> None:
    pytest.importorskip("mindspeed.core.ssm.chunk_gated_delta_rule", reason="MindSpeed is not installed")
    program = Path(__file__).parent / "programs" / "delta_rule.py"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run(
        [sys.executable, program], env=environment, capture_output=True, text=True, timeout=patient(600), check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    content = json.loads(done.stdout.splitlines()[-1])
    assert len(content) == 2 and all(max(errors) < 4e-3 for errors in content.values()), content
