"""Outputs that are computed again, without TransformerEngine; the adaptor is needed as long as Megatron asks for it."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from megatron_release import RELEASE
from patience import patient
from torch import Tensor

from mindspeed_rl.adaptors import megatron_recompute

FAILS = RELEASE.startswith("0.16.")


@pytest.mark.skipif(not FAILS, reason=f"megatron-core {RELEASE} was not read")
def test_without_the_adaptor_the_default_is_a_format_in_8_bits() -> None:
    code = f"from {megatron_recompute._MODULE} import CheckpointWithoutOutput\nprint(CheckpointWithoutOutput().fp8)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=patient(120))
    assert result.stdout.split() == ["True"], result.stderr


def test_gradients_of_an_output_that_is_computed_again_are_the_plain_ones() -> None:
    from megatron.core.tensor_parallel.random import CheckpointWithoutOutput

    megatron_recompute.apply()
    megatron_recompute.apply()
    assert not CheckpointWithoutOutput().fp8 and not CheckpointWithoutOutput(fp8=None).fp8
    assert CheckpointWithoutOutput(fp8="e4m3").fp8

    def loss(x: Tensor, *, again: bool) -> Tensor:
        kept = CheckpointWithoutOutput()
        inner = kept.checkpoint(torch.tanh, x) if again else torch.tanh(x)
        outer = inner * inner
        if again:
            kept.discard_output_and_register_recompute(outer)
        return outer.sum()

    results = []
    for again in (False, True):
        x = torch.linspace(-1, 1, 8, requires_grad=True)
        loss(x, again=again).backward()
        results.append(x.grad)
    assert torch.equal(*results)
