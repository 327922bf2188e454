"""Adapters in an engine are compared where its kernels read them; split, repeated and full matrices pass, others do not."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn

from mindspeed_rl.resharding.adapters import BaseLoader, find_differing_adapters
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


def engine(columns: slice, rows: slice) -> Any:
    """A tensor rank's engine: B of k and v split by rows, A of o by columns; the scale of 2 is in B."""
    kv = Wrapped(*((a, 2.0 * b[rows]) for a, b in (K, V)))
    return Model(kv_proj=kv, o_proj=Wrapped((O[0][:, columns], 2.0 * O[1])))


def differing(model: Any, rank: int = 0, num_ranks: int = 1, file: dict[str, torch.Tensor] = FILE) -> list[str]:
    return find_differing_adapters(model, file, 2.0, torch.float32, rank=rank, num_ranks=num_ranks)[0]


HALVES = [(slice(0, 2), slice(0, 3)), (slice(2, 4), slice(3, 6))]


def test_ranks_have_an_adapter_in_full_or_their_slices_or_those_of_repeated_heads() -> None:
    full = engine(slice(None), slice(None))
    assert find_differing_adapters(full, FILE, 2.0, torch.float32) == ([], 6)
    assert [differing(full, rank, 2) for rank in range(2)] == [[], []]
    assert [differing(engine(*half), rank, 2) for rank, half in enumerate(HALVES)] == [[], []]
    # vLLM repeats the heads of a slice on consecutive ranks
    assert [differing(engine(*HALVES[rank // 2]), rank, 4) for rank in range(4)] == [[]] * 4


def test_slices_of_other_ranks_are_found() -> None:
    everything = ["attn.k_proj", "attn.v_proj", "attn.o_proj"]
    assert [differing(engine(*half), rank, 2) for rank, half in enumerate(HALVES[::-1])] == [everything] * 2
    assert differing(engine(*HALVES[0]), 0, 1) == everything


CHANGES: dict[str, Any] = {
    "one bit": lambda slot, pick: slot.view(torch.int32)[0, pick.randrange(2)].bitwise_xor_(1 << pick.randrange(31)),
    "two rows": lambda slot, pick: slot[:2].copy_(slot[[1, 0]]),
    "two columns": lambda slot, pick: slot[:, :2].copy_(slot[:, [1, 0]]),
    "not scaled": lambda slot, pick: slot.mul_(0.5),
    "another sign": lambda slot, pick: slot[0, 0].neg_(),
    "beyond the rank": lambda slot, pick: slot[-1, -1].add_(1e-30),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_and_permutation_is_named(change: str) -> None:
    pick = random.Random(0)
    for _ in range(20):
        model = engine(slice(None), slice(None))
        matrix = pick.choice([model.attn["kv_proj"].lora_a_stacked, model.attn["kv_proj"].lora_b_stacked])
        CHANGES[change](matrix[1][0, 0], pick)
        assert differing(model) == ["attn.v_proj"]


def test_exchanged_missing_and_foreign_adapters_are_named() -> None:
    model = engine(slice(None), slice(None))
    stacked = model.attn["kv_proj"].lora_a_stacked
    model.attn["kv_proj"].lora_a_stacked = stacked[::-1]
    assert differing(model) == ["attn.k_proj", "attn.v_proj"]
    fewer = {name: tensor for name, tensor in FILE.items() if "o_proj" not in name}
    assert differing(engine(slice(None), slice(None)), file=fewer) == ["attn.o_proj"]
    assert differing(Model(), file=fewer) == ["attn.k_proj", "attn.v_proj"]


def test_the_weights_of_wrapped_layers_are_loaded_as_if_they_were_not_wrapped() -> None:
    model = Model(kv_proj=Wrapped(K, V), o_proj=Wrapped(O))
    before = [name for name, _ in model.named_parameters()]
    BaseLoader(model)((name, torch.zeros(1)) for name in ("attn.k_proj.weight", "attn.o_proj.weight", "norm.weight"))
    assert list(model.got) == ["attn.k_proj.weight", "attn.o_proj.weight", "norm.weight"]
    assert model.held_then == ["attn.kv_proj.weight", "attn.o_proj.weight", "norm.weight"]
    assert [name for name, _ in model.named_parameters()] == before and "attn.kv_proj.base_layer.weight" in before


@pytest.mark.parametrize(("rank", "room"), [(1, 8), (8, 8), (9, 16), (200, 256), (512, 512)])
def test_an_engine_has_room_for_the_next_larger_rank(rank: int, room: int) -> None:
    assert _build_adapter_arguments(rank, 1) == {"enable_lora": True, "max_loras": 1, "max_lora_rank": room}


def test_projections_that_an_engine_joins_keep_adapters_of_their_own() -> None:
    from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM

    model: Any = Model(qkv_proj=Wrapped(*((a, 2.0 * b) for a, b in (O, K, V))))
    model.packed_modules_mapping = Qwen2ForCausalLM.packed_modules_mapping
    model.hf_to_vllm_mapper = getattr(Qwen2ForCausalLM, "hf_to_vllm_mapper", None)
    file = {key.replace("o_proj", "q_proj"): tensor for key, tensor in FILE.items()}
    assert differing(model, file=file) == []
    file["base_model.model.attn.q_proj.lora_A.weight"] = K[0]
    assert differing(model, file=file) == ["attn.q_proj"]
