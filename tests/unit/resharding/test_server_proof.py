"""What the workers of a server hold adds up to what was trained, fused and cut as it may be, and to nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mindspeed_rl.resharding.bit_sums import bit_sum
from mindspeed_rl.resharding.server_proof import EngineSums, ServerDeliveryError, compare_sums

C = 0x9E3779B97F4A7C15


def naive(values: torch.Tensor) -> int:
    """The sum by Python's own integers."""
    patterns = [int(value) for value in values.view(torch.int32).flatten()]
    return sum(x * (x + C) for x in patterns) % (1 << 64)


class Engine(nn.Module):
    packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}

    def __init__(self, **parameters: torch.Tensor) -> None:
        super().__init__()
        self.a = nn.Module()
        for name, value in parameters.items():
            module = nn.Module()
            module.weight = nn.Parameter(value)
            setattr(self.a, name, module)


def test_the_sum_is_that_of_the_bits() -> None:
    values = torch.tensor([1.5, -2.0, 0.0, 3e-40])
    assert bit_sum(values) == naive(values)


def workers(q: torch.Tensor, kv: torch.Tensor, norm: torch.Tensor) -> list[EngineSums]:
    """Two workers: queries are cut, the one key/value head is repeated, the norm is whole on both."""
    halves = q.chunk(2)
    engines = [Engine(qkv_proj=torch.cat([half, kv, kv * 2]), norm=norm.clone()) for half in halves]
    return [EngineSums.from_json(EngineSums.of(engine).to_json()) for engine in engines]


def test_fused_cut_and_repeated_parameters_are_proven_and_a_changed_bit_is_named() -> None:
    q, kv, norm = torch.randn(4, 3), torch.randn(2, 3), torch.randn(3)
    trained = {f"a.{name}.weight": naive(value) for name, value in (("q_proj", q), ("k_proj", kv), ("v_proj", kv * 2))}
    trained["a.norm.weight"] = naive(norm)
    assert compare_sums(workers(q, kv, norm), trained, kv_heads=1) == 2
    broken = q.clone()
    broken[3, 2] += 1e-6
    with pytest.raises(ServerDeliveryError, match="1 parameters of the server differ from those trained: a.qkv_proj.weight"):
        compare_sums(workers(broken, kv, norm), trained, kv_heads=1)
    with pytest.raises(ServerDeliveryError, match="no parameter for 1 tensors, for example a.lost.weight"):
        compare_sums(workers(q, kv, norm), {**trained, "a.lost.weight": 5}, kv_heads=1)
    del trained["a.norm.weight"]
    with pytest.raises(ServerDeliveryError, match="no trained tensor has this name"):
        compare_sums(workers(q, kv, norm), trained, kv_heads=1)
