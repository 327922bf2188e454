"""Experts in int8 on the CPU: sums over the experts of a rank; `test_int8_rollout.py` has the numbers of the kernel."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mindspeed_rl.adaptors.vllm_cpu_int8_experts import compute_experts


class Product:
    """A product of int8 rows with their scales, in float32."""

    def multiply(self, x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: None) -> torch.Tensor:
        return x @ (weight.float() * scales).t()


def test_a_token_has_the_weighted_sum_of_those_of_its_experts_that_are_here() -> None:
    torch.manual_seed(0)
    layer: Any = SimpleNamespace(
        w13_weight=torch.randint(-9, 9, (3, 8, 6), dtype=torch.int8),
        w2_weight=torch.randint(-9, 9, (3, 6, 4), dtype=torch.int8),
        w13_weight_scale=torch.rand(3, 8, 1),
        w2_weight_scale=torch.rand(3, 6, 1),
    )
    x, weights = torch.randn(5, 6), torch.rand(5, 2)
    ids = torch.tensor([[0, 2], [2, -1], [-1, -1], [1, 0], [2, 1]])  # negative: an expert of another rank
    products: Any = [Product() for _ in range(3)]

    def activate(wide: torch.Tensor) -> torch.Tensor:
        gate, up = wide.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up

    found = compute_experts(x, layer, products, products, weights, ids, activate)
    for token in range(5):
        expected = torch.zeros(6)
        for choice in range(2):
            if (expert := int(ids[token, choice])) >= 0:
                wide = (layer.w13_weight[expert].float() * layer.w13_weight_scale[expert]) @ x[token]
                inner = torch.nn.functional.silu(wide[:4]) * wide[4:]
                out = (layer.w2_weight[expert].float() * layer.w2_weight_scale[expert]) @ inner
                expected += weights[token, choice] * out
        torch.testing.assert_close(found[token], expected)


def test_vllm_still_packs_experts_in_place() -> None:
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vllm is not installed")
    path = Path(spec.origin).parent / "model_executor" / "layers" / "fused_moe" / "experts" / "cpu_moe.py"
    if not path.is_file():
        pytest.skip("vllm is a part of it, or of another release")
    text = "w13 = torch.ops._C.convert_weight_packed(layer.w13_weight)"
    assert text in path.read_text(), "adaptors/vllm_cpu_int8_experts.py can go"
