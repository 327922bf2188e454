"""MindSpeed's Triton kernel of the gated delta rule under Triton's interpreter, against torch's operators in float64.

The interpreter computes on the host; it reads bfloat16 as whole numbers, so that the kernel runs in float16 here. Prints the
relative errors of output and gradients as JSON.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
from typing import Any

import torch
import triton.language as tl
from triton.runtime import autotuner

from mindspeed_rl import adaptors, platform

platform.select("cpu")
adaptors.apply("train")

from mindspeed.core.ssm.chunk_gated_delta_rule import chunk_gated_delta_rule  # noqa: E402

from mindspeed_rl.adaptors.mindspeed import _run_delta_rule  # noqa: E402
from mindspeed_rl.engine.gated_delta import gated_delta_rule  # noqa: E402
from mindspeed_rl.engine.sequence_layout import ChunkPlan  # noqa: E402

CPU, HEADS, RATIO = torch.device("cpu"), 1, 2
LENGTHS = [30, 64, 1, 100]


def fit_interpreter() -> None:
    """Give Triton what it finds on a device: a stopwatch, the device of torch, and functions that are not names of its own."""
    tuner, host, functions = autotuner.Autotuner, torch.cpu, ("exp", "log")
    setattr(tuner, "do_bench", staticmethod(lambda call, quantiles=None: (call(), [0.0] * 3)[1]))  # noqa: B010
    setattr(host, "device", lambda index: contextlib.nullcontext())  # noqa: B010
    for name, module in list(sys.modules.items()):
        for function in functions if name.startswith("mindspeed.ops.triton") else ():
            if hasattr(module, function):
                setattr(module, function, lambda x, function=function: getattr(tl, function)(x))


def errors(size: int) -> list[float]:
    generator = torch.Generator().manual_seed(0)
    plan, tokens = ChunkPlan.build(LENGTHS, 4, CPU), sum(LENGTHS)
    shapes = [(tokens, HEADS, size)] * 2 + [(tokens, HEADS * RATIO, size)] + [(tokens, HEADS * RATIO)] * 2
    q, k, v, g, beta = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    q, k = (torch.nn.functional.normalize(tensor, dim=-1) for tensor in (q, k))
    values = [q.half() * size**-0.5, k.half(), v.half(), -g.abs().float(), beta.sigmoid().float()]
    ours = [value.requires_grad_() for value in values]
    theirs = [value.detach().double().requires_grad_() for value in values]
    kernel: Any = functools.partial(_run_delta_rule, chunk_gated_delta_rule)
    pairs = [(gated_delta_rule(*ours, plan, kernel).double(), gated_delta_rule(*theirs, plan))]  # pyrefly: ignore
    weights = torch.randn(pairs[0][0].shape, generator=generator, dtype=torch.float64)
    result, expected = (
        torch.autograd.grad((out * weights).sum(), leaves) for out, leaves in zip(pairs[0], (ours, theirs), strict=True)
    )
    pairs += zip(result, expected, strict=True)
    return [float((mine.double() - other).abs().max() / other.abs().max()) for mine, other in pairs]


if __name__ == "__main__":
    fit_interpreter()
    print(json.dumps({size: errors(size) for size in (64, 128)}))
