"""Adapters in an engine are summed where its kernels read them; cut, repeated and whole matrices pass, others do not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from mindspeed_rl.resharding.adapters import BaseLoader, find_differing_adapters, sum_loaded_adapters, sum_sent_adapters
from mindspeed_rl.workers.rollout_replica import _build_adapter_arguments


class Wrapped(nn.Module):
    """A layer as vLLM wraps it: one slot for an adapter, padded to rank 8."""

    def __init__(self, *pairs: tuple[torch.Tensor, torch.Tensor]) -> None:
        super().__init__()
        self.base_layer = nn.Linear(4, 2, bias=False)
        self.lora_a_stacked = tuple(nn.functional.pad(a, (0, 0, 0, 6))[None, None] for a, _ in pairs)
        self.lora_b_stacked = tuple(nn.functional.pad(b, (0, 6))[None, None] for _, b in pairs)


class Model(nn.Module):
    packed_modules_mapping = {"kv_proj": ["k_proj", "v_proj"]}

    def __init__(self, **layers: nn.Module) -> None:
        super().__init__()
        self.attn = nn.ModuleDict(layers)
        self.norm = nn.LayerNorm(4, bias=False)
        self.got: dict[str, Any] = {}
        self.held_then: list[str] = []

    def load_weights(self, named: Any) -> set[str]:
        self.got = dict(named)
        self.held_then = [name for name, _ in self.named_parameters()]
        return set()


def pair(seed: int, rows: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 4, generator=generator), torch.randn(rows, 2, generator=generator)


K, V, O = pair(1), pair(2), pair(3)
FILE = {
    f"base_model.model.attn.{name}.lora_{matrix}.weight": tensor
    for name, both in (("k_proj", K), ("v_proj", V), ("o_proj", O))
    for matrix, tensor in zip("AB", both)
}


def rank(columns: slice, rows: slice, fault: float = 0.0) -> Any:
    """What a tensor rank holds: B of k and v cut by rows, A of o by columns; the scale of 2 is in B."""
    kv = Wrapped(*((a, 2.0 * b[rows]) for a, b in (K, V)))
    kv.lora_b_stacked[1][0, 0, 0, 0] += fault
    return sum_loaded_adapters(Model(kv_proj=kv, o_proj=Wrapped((O[0][:, columns], 2.0 * O[1]))))


def test_two_ranks_hold_an_adapter_together_or_each_whole_or_with_repeated_heads() -> None:
    sent = sum_sent_adapters(FILE, 2.0, torch.float32)
    assert set(sent) == {"attn.k_proj", "attn.v_proj", "attn.o_proj"}
    half = [rank(slice(0, 2), slice(0, 3)), rank(slice(2, 4), slice(3, 6))]
    assert find_differing_adapters(half, sent) == []
    assert find_differing_adapters([rank(slice(None), slice(None))], sent) == []
    repeated = [rank(slice(0, 2), slice(0, 3)), rank(slice(2, 4), slice(3, 6))] * 2
    assert find_differing_adapters(repeated, sent) == []


@pytest.mark.parametrize("fault", [0.5, -1e-3])
def test_a_changed_missing_or_foreign_adapter_is_named(fault: float) -> None:
    sent = sum_sent_adapters(FILE, 2.0, torch.float32)
    half = [rank(slice(0, 2), slice(0, 3), fault), rank(slice(2, 4), slice(3, 6))]
    assert find_differing_adapters(half, sent) == ["attn.v_proj"]
    assert find_differing_adapters([rank(slice(0, 2), slice(0, 3))], sent) == ["attn.k_proj", "attn.v_proj", "attn.o_proj"]
    fewer = {name: sums for name, sums in sent.items() if name != "attn.o_proj"}
    assert find_differing_adapters([rank(slice(None), slice(None))], fewer) == ["attn.o_proj"]
    assert find_differing_adapters([{}], fewer) == ["attn.k_proj", "attn.v_proj"]


def test_the_weights_of_wrapped_layers_are_loaded_as_if_they_were_not_wrapped() -> None:
    model = Model(kv_proj=Wrapped(K, V), o_proj=Wrapped(O))
    before = [name for name, _ in model.named_parameters()]
    BaseLoader(model)((name, torch.zeros(1)) for name in ("attn.k_proj.weight", "attn.o_proj.weight", "norm.weight"))
    assert list(model.got) == ["attn.k_proj.weight", "attn.o_proj.weight", "norm.weight"]
    assert model.held_then == ["attn.kv_proj.weight", "attn.o_proj.weight", "norm.weight"]
    assert [name for name, _ in model.named_parameters()] == before and "attn.kv_proj.base_layer.weight" in before


@pytest.mark.parametrize(("rank", "room"), [(1, 8), (8, 8), (9, 16), (200, 256), (512, 512)])
def test_an_engine_has_room_for_the_next_larger_rank(rank: int, room: int) -> None:
    assert _build_adapter_arguments(rank) == {"enable_lora": True, "max_loras": 1, "max_lora_rank": room}
