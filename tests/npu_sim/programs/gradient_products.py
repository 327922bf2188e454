"""Sums of gradients that matrix products and norms add to; each beside the sum in float64."""

from __future__ import annotations

import types

import simulator
import torch
from ranks import rank_settings, report

from mindspeed_rl import platform
from mindspeed_rl.adaptors import gradient_products

simulator.install()
rank_settings()
device_kind = platform.select("npu")
device_kind.set_device(0)
device = device_kind.device(0)
torch.manual_seed(3)
results: dict[str, dict[str, float]] = {}


def measure(name: str, total: torch.Tensor, want: torch.Tensor) -> None:
    error = (total.cpu().double() - want).abs().max().item()
    operator = "npu::npu_grouped_matmul_add_"
    results[name] = {"error": error, "size": want.abs().max().item(), "calls": simulator.calls[operator]}
    simulator.calls[operator] = 0


for name, rows, width, out in (
    ("some rows", 37, 24, 40),
    ("no rows", 0, 24, 40),
    ("as wide as may be", 3, 65535, 2),
    ("wider", 3, 65536, 2),
):
    before = torch.randn(out, width)
    total, want = before.to(device), before.double()
    for _ in range(2):
        inputs, upstream = torch.randn(rows, width).bfloat16(), torch.randn(rows, out).bfloat16()
        want = want + upstream.double().t() @ inputs.double()
        gradient_products.add_linear_gradient(inputs.to(device), upstream.to(device), total)
    measure(name, total, want)

# an expert in the middle and one at the end have no rows
counts, width, out = [5, 0, 9, 0], 24, 16
before = torch.randn(width, len(counts) * out)
inputs, upstream = torch.randn(sum(counts), width).bfloat16(), torch.randn(sum(counts), out).bfloat16()
parts = [left.double().t() @ right.double() for left, right in zip(inputs.split(counts), upstream.split(counts))]
want = before.double().view(len(counts), width, out) + torch.stack(parts)
total = before.to(device)
ends = torch.tensor(counts).cumsum(0).to(device)
gradient_products._add_groups(inputs.to(device), upstream.to(device), ends, total)
measure("experts", total.view(len(counts), width, out), want)

# a norm, in two backward passes: the gradient of its weight beside torch's in float64
norm = types.SimpleNamespace(
    config=types.SimpleNamespace(gradient_accumulation_fusion=True, layernorm_zero_centered_gamma=False),
    weight=torch.nn.Parameter(torch.rand(48).bfloat16().to(device)),
    eps=1e-6,
)
norm.weight.main_grad = torch.zeros(48, device=device)
run = gradient_products._build_norm(None)  # pyrefly: ignore[bad-argument-type]  (the plain form is not called)
weight = norm.weight.detach().cpu().double().requires_grad_()
for _ in range(2):
    x, upstream = torch.randn(37, 1, 48).bfloat16(), torch.randn(37, 1, 48).bfloat16()
    mine, theirs = x.to(device).requires_grad_(), x.double().requires_grad_()
    run(norm, mine).backward(upstream.to(device))
    torch.nn.functional.rms_norm(theirs, (48,), weight, 1e-6).backward(upstream.double())
    error = (mine.grad.cpu().double() - theirs.grad).abs().max().item()
    results["norm, inputs"] = {"error": error, "size": theirs.grad.abs().max().item(), "calls": 0}
assert norm.weight.grad_added_to_main_grad
measure("norm", norm.weight.main_grad, weight.grad)
report(results)
