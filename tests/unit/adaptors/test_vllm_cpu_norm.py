"""Norms by vLLM's compiled kernels are root mean squares to the last digit of their format, and nothing else changes."""

from __future__ import annotations

from vllm_program import run_program

PROGRAM = """
import json, os
os.environ.update(RANK="0", LOCAL_RANK="0", VLLM_LOGGING_LEVEL="ERROR")
import torch
from mindspeed_rl import adaptors, platform

platform.select("cpu")
adaptors.apply("rollout")
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.layernorm import RMSNorm

EPS = 1e-6


def exact(x, weight):
    x = x.double()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight.double()


def off(found, wanted):  # in units of the last digit of the greatest
    return ((found.double() - wanted).abs().max() / wanted.abs().max() / torch.finfo(found.dtype).eps).item()


def norm(size, dtype, **words):
    with set_current_vllm_config(VllmConfig()):
        layer = RMSNorm(size, eps=EPS, dtype=dtype, **words)
    if layer.has_weight:
        layer.weight.data = torch.rand(size, dtype=dtype) + 0.5
    return layer


torch.manual_seed(0)
errors, kept = {}, []
for dtype in (torch.float32, torch.bfloat16):
    for rows, size in ((1, 64), (7, 128), (33, 896)):
        layer = norm(size, dtype)
        x, residual = torch.randn(rows, size, dtype=dtype), torch.randn(rows, size, dtype=dtype)
        given = x.clone()
        errors[f"{dtype} {rows} x {size}"] = off(layer.forward_cpu(x), exact(x, layer.weight))
        kept.append(torch.equal(x, given))
        total = x + residual
        found, after = layer.forward_cpu(x, residual)
        errors[f"{dtype} {rows} x {size} with residual"] = off(found, exact(total, layer.weight))
        kept.append(torch.equal(after, total))
        apart = torch.randn(rows, 2, 2 * size, dtype=dtype)[..., :size].unbind(1)  # rows that do not lie one behind the other
        total = apart[0] + apart[1]
        found, after = layer.forward_cpu(*apart)
        errors[f"{dtype} {rows} x {size} with residual, apart"] = off(found, exact(total, layer.weight))
        kept.append(torch.equal(after, total))
    heads, layer = torch.randn(5, 3 * 64 + 8, dtype=dtype)[:, 4:196].unflatten(-1, (3, 64)), norm(64, dtype)
    errors[f"{dtype} heads"] = off(layer.forward_cpu(heads), exact(heads, layer.weight))
part, bare = norm(64, torch.float32, var_hidden_size=32), norm(64, torch.float32, has_weight=False)
mixed = norm(64, torch.float32)
x = torch.randn(4, 64)
others = {
    "part": torch.equal(part.forward_cpu(x), part.forward_native(x)),
    "no weight": torch.equal(bare.forward_cpu(x), bare.forward_native(x)),
    "other format": torch.equal(mixed.forward_cpu(x.bfloat16()), mixed.forward_native(x.bfloat16())),
}
print(json.dumps({"errors": errors, "kept": all(kept), "others": others}))
"""


def test_norms_are_exact_to_the_last_digit_and_what_the_kernels_do_not_know_stays() -> None:
    result = run_program(PROGRAM)
    assert max(result["errors"].values()) < 2, result["errors"]
    assert result["kept"] and all(result["others"].values()), result["others"]
