"""The check of a weight push names what was not delivered: changed bits, and elements in another position."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast

import pytest
import torch
from engine_model import EngineModel, EngineRank

from mindspeed_rl.resharding.copies import Copies
from mindspeed_rl.resharding.destinations import read_destinations
from mindspeed_rl.resharding.exchange import Exchange
from mindspeed_rl.resharding.layouts import Slice, full_slice
from mindspeed_rl.resharding.proof import DeliveryProof, WeightDeliveryError
from mindspeed_rl.resharding.push import WeightPush
from mindspeed_rl.resharding.trained_weights import TrainedWeights
from mindspeed_rl.resharding.transfer import Sources


@pytest.fixture(scope="module")
def group(single_process_world: None) -> None:
    """A process group of only this process."""
    torch.distributed.init_process_group("gloo")


@dataclass(frozen=True)
class Held:
    """HF tensors that this process holds whole."""

    tensors: dict[str, torch.Tensor]

    def read(self, name: str, tensor_slice: Slice, out: torch.Tensor, copies: Copies | None = None) -> None:
        for _, view in self.views(name, tensor_slice):
            out.copy_(view)

    def views(self, name: str, tensor_slice: Slice) -> Iterator[tuple[Slice, torch.Tensor]]:
        yield tensor_slice, self.tensors[name][tuple(slice(*side) for side in tensor_slice)]

    def forget_merged(self) -> None:
        pass


def trained_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"q_proj": (8, 8), "k_proj": (4, 8), "v_proj": (4, 8)}
    names = {f"layers.{n}.{part}.weight": shape for n in range(2) for part, shape in shapes.items()}
    names |= {"layers.0.norm.weight": (8,), "embed_tokens.weight": (10, 8)}
    for expert in range(3):
        names |= {f"layers.0.experts.{expert}.{part}.weight": (6, 8) for part in ("gate_proj", "up_proj")}
        names[f"layers.0.experts.{expert}.down_proj.weight"] = (8, 6)
    return {name: torch.randn(shape, generator=generator) for name, shape in names.items()}


def pushed(
    trained: dict[str, torch.Tensor], dtype: torch.dtype = torch.float32, **layout: bool
) -> tuple[WeightPush, EngineModel]:
    """An engine that fuses, pads, stacks and transposes, filled from these tensors."""
    shapes = {name: tuple(tensor.shape) for name, tensor in trained.items()}
    engine = EngineModel(shapes, EngineRank(1, 0, num_experts=3, **{"transposed": True} | layout), dtype)
    held = {name: {full_slice(shape): [0]} for name, shape in shapes.items()}
    sources = cast(Sources, Held(trained))
    push = WeightPush(
        TrainedWeights(held, shapes, sources, torch.device("cpu"), 1 << 20),
        read_destinations(engine, engine.load_weights, shapes, dtype),
        Exchange.from_world(),
    )
    push.write(engine)
    return push, engine


NAMES = ("layers.0.qkv_proj.weight", "layers.1.qkv_proj.weight", "layers.0.norm.weight", "embed_tokens.weight",
         "layers.0.experts.w13_weight", "layers.0.experts.w2_weight")  # fmt: skip


def test_fused_padded_and_transposed_weights_pass(group: None) -> None:
    push, engine = pushed(trained_tensors())
    assert push.prove(engine) == DeliveryProof(num_parameters=6, num_tensors=len(trained_tensors()), differing={})
    assert {name for name, _ in engine.named_parameters()} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_one_damaged_element_is_named(group: None, name: str) -> None:
    push, engine = pushed(trained_tensors())
    flat = dict(engine.named_parameters())[name].data.view(-1)
    flat[3] = torch.nextafter(flat[3], torch.tensor(9.0))
    with pytest.raises(WeightDeliveryError, match=rf"1 parameters .* differ from those trained: {name}\."):
        push.prove(engine)


def test_a_swap_between_layers_is_named_on_both_sides(group: None) -> None:
    push, engine = pushed(trained_tensors())
    first, second = NAMES[:2]
    parameters = dict(engine.named_parameters())
    kept = parameters[first].data.clone()
    parameters[first].data.copy_(parameters[second].data)
    parameters[second].data.copy_(kept)
    with pytest.raises(WeightDeliveryError, match=f"{first}, {second}"):
        push.prove(engine)


def test_a_stale_tensor_is_named(group: None) -> None:
    trained = trained_tensors()
    push, engine = pushed(trained)
    trained["layers.0.norm.weight"].add_(1e-3)
    with pytest.raises(WeightDeliveryError, match=r"layers\.0\.norm\.weight"):
        push.prove(engine)


def test_a_tensor_without_a_place_and_a_place_without_a_tensor_are_named(group: None) -> None:
    trained = trained_tensors()
    shapes = {name: tuple(tensor.shape) for name, tensor in trained.items()}
    engine = EngineModel({k: v for k, v in shapes.items() if k != "embed_tokens.weight"}, EngineRank(1, 0, num_experts=3))
    result = read_destinations(engine, engine.load_weights, shapes, torch.float32)
    held = {name: {full_slice(shape): [0]} for name, shape in shapes.items()}
    side = TrainedWeights(held, shapes, cast(Sources, Held(trained)), torch.device("cpu"), 1 << 20)
    with pytest.raises(WeightDeliveryError, match=r"no parameter for 1 tensors, for example embed_tokens\.weight"):
        WeightPush(side, result, Exchange.from_world())
    engine = EngineModel(shapes, EngineRank(1, 0, num_experts=3))
    fewer = {name: shape for name, shape in shapes.items() if name != "embed_tokens.weight"}
    side = TrainedWeights(held, fewer, cast(Sources, Held(trained)), torch.device("cpu"), 1 << 20)
    result = read_destinations(engine, engine.load_weights, fewer, torch.float32)
    with pytest.raises(WeightDeliveryError, match=r"1 parameters .* got no tensor, for example embed_tokens\.weight"):
        WeightPush(side, result, Exchange.from_world())


# ---------------------------------------------------------------------- adversarial


def _square(count: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Tensors of which an engine makes every kind of parameter; small integers in one, so that many values are alike."""
    generator = torch.Generator().manual_seed(count)
    shapes = {"layers.0.q_proj.weight": (16, 16), "layers.0.k_proj.weight": (8, 16), "layers.0.v_proj.weight": (8, 16),
              "layers.0.o_proj.weight": (16, 16), "layers.1.o_proj.weight": (16, 16), "layers.0.norm.weight": (16,),
              "embed_tokens.weight": (50, 16)}  # fmt: skip
    for expert in range(3):
        shapes |= {f"layers.0.experts.{expert}.{part}.weight": (8, 16) for part in ("gate_proj", "up_proj")}
        shapes[f"layers.0.experts.{expert}.down_proj.weight"] = (16, 8)
    results = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
    results["layers.1.o_proj.weight"] = torch.randint(-2, 3, (16, 16), generator=generator).to(dtype)
    return results


Bits = torch.Tensor


def _swap(bits: Bits, dim: int, pick: random.Random) -> None:
    result, other = pick.sample(range(bits.size(dim)), 2)
    order = list(range(bits.size(dim)))
    order[result], order[other] = other, result
    bits.copy_(bits.index_select(dim, torch.tensor(order)))


def _flip(bits: Bits, pick: random.Random, count: int) -> None:
    for place in pick.sample(range(bits.numel()), count):
        bit = pick.randrange(bits.element_size() * 8)
        bits.view(-1)[place] ^= torch.tensor(1 << bit if bit < bits.element_size() * 8 - 1 else -(1 << bit), dtype=bits.dtype)


def _move(bits: Bits, pick: random.Random) -> None:
    result, other = pick.sample(range(bits.numel()), 2)
    bits.view(-1)[result] += 1
    bits.view(-1)[other] -= 1


def _triple(bits: Bits, pick: random.Random) -> None:
    """Three that were 0, 4 and 5 above a multiple of 8 and are 1, 2 and 6 above it, wherever such are."""
    low = bits.view(-1) & 7
    for before, after in ((0, 1), (4, 2), (5, 6)):
        places = (low == before).nonzero().flatten().tolist()
        if places:
            bits.view(-1)[pick.choice(places)] += after - before


ATTACKS: dict[str, Callable[[Bits, random.Random], object]] = {
    "one bit": lambda bits, pick: _flip(bits, pick, 1),
    "several bits": lambda bits, pick: _flip(bits, pick, pick.randrange(2, 6)),
    "one up, one down": _move,
    "sums and squares kept": _triple,
    "two elements": lambda bits, pick: _swap(bits.view(-1), 0, pick),
    "two rows, columns or experts": lambda bits, pick: _swap(bits, pick.randrange(bits.dim()), pick),
    "rolled": lambda bits, pick: bits.copy_(bits.view(-1).roll(pick.randrange(1, bits.numel())).view_as(bits)),
    "shuffled": lambda bits, pick: bits.copy_(
        bits.view(-1)[torch.tensor(pick.sample(range(bits.numel()), bits.numel()))].view_as(bits)
    ),
    "halves": lambda bits, pick: bits.copy_(torch.cat(bits.chunk(2)[::-1])) if bits.size(0) % 2 == 0 else None,
    "turned over": lambda bits, pick: bits.copy_(bits.flip(pick.randrange(bits.dim()))),
    "transposed": lambda bits, pick: bits.copy_(bits.mT.contiguous().view_as(bits)) if bits.dim() > 1 else None,
    "signs": lambda bits, pick: bits.view(-1)[pick.sample(range(bits.numel()), 2)].neg_(),
}  # fmt: skip


def _count_missed(dtype: torch.dtype, tries: int, **layout: bool) -> dict[str, int]:
    push, engine = pushed(_square(tries, dtype), dtype, **layout)
    push.prove(engine)
    parameters = {name: value.data for name, value in engine.named_parameters()}
    kept = {name: value.clone() for name, value in parameters.items()}
    pick, missed, count = random.Random(tries), dict[str, int](), 0
    integers = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    while count < tries:
        kind, name = pick.choice([*ATTACKS, "across parameters"]), pick.choice([*parameters])
        others = [name]
        if kind == "across parameters":
            others.append(pick.choice([other for other in parameters if other != name]))
            result, other = (parameters[each].view(-1) for each in others)
            size = min(result.numel(), other.numel(), pick.choice([1, 16, 256]))
            result[:size], other[:size] = other[:size].clone(), result[:size].clone()
        else:
            ATTACKS[kind](parameters[name].view(integers), pick)
        if any(not torch.equal(parameters[each].view(integers), kept[each].view(integers)) for each in others):
            count += 1
            if not push.compare(engine).differing:
                missed[kind] = missed.get(kind, 0) + 1
            for each in others:
                parameters[each].copy_(kept[each])
    push.prove(engine)
    return missed


@pytest.mark.parametrize("layout", [{}, {"transposed": False}, {"dealt": True}], ids=["transposed", "plain", "dealt"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_change_and_no_permutation_is_missed(group: None, dtype: torch.dtype, layout: dict[str, bool]) -> None:
    assert _count_missed(dtype, 150, **layout) == {}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_change_and_no_permutation_is_missed_in_ten_thousand_tries(group: None, dtype: torch.dtype) -> None:
    assert _count_missed(dtype, 5_000) == {}
