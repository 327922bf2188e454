"""Bit sums add up over chunks and move with every bit; the check names what was not delivered."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast

import pytest
import torch
from engine_model import EngineModel, EngineRank

from mindspeed_rl.resharding.bit_sums import bit_sum, sum_groups
from mindspeed_rl.resharding.destinations import read_destinations
from mindspeed_rl.resharding.exchange import Exchange
from mindspeed_rl.resharding.layouts import Slice, full_slice
from mindspeed_rl.resharding.proof import DeliveryProof, WeightDeliveryError
from mindspeed_rl.resharding.push import TrainedWeights, WeightPush
from mindspeed_rl.resharding.transfer import Sources


def test_the_sum_is_that_of_a_function_of_the_bit_patterns_modulo_two_to_the_64() -> None:
    def by_hand(*patterns: int) -> int:
        return sum(x * (x + 0x9E3779B97F4A7C15) for x in patterns) % 2**64

    assert bit_sum(torch.tensor([1.0, 1.0])) == by_hand(0x3F800000, 0x3F800000)
    assert bit_sum(torch.tensor([-0.0])) == by_hand(-(2**31))
    assert bit_sum(torch.tensor([1.0, -3.0], dtype=torch.bfloat16)) == by_hand(0x3F80, 0xC040 - 2**16)
    assert bit_sum(torch.zeros(5)) == 0


def test_changes_that_move_bit_patterns_up_and_down_alike_do_not_cancel() -> None:
    pair = torch.tensor([0.75, -0.75])
    moved = (pair + 0.125).view(torch.int32) - pair.view(torch.int32)
    assert moved.sum() == 0
    assert bit_sum(pair + 0.125) != bit_sum(pair)


def test_large_tensors_are_summed_in_pieces() -> None:
    tensor = torch.randn((1 << 22) + 3)
    chunks = (tensor[:1000], tensor[1000:])
    assert bit_sum(tensor) == sum(map(bit_sum, chunks)) % 2**64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_order_cuts_and_zero_padding_do_not_matter(dtype: torch.dtype) -> None:
    tensor = torch.randn(12, 8).to(dtype)
    whole = bit_sum(tensor)
    assert bit_sum(tensor.t()) == whole == bit_sum(tensor.flatten()[torch.randperm(96)])
    assert sum(bit_sum(part) for part in tensor.chunk(3, dim=1)) % 2**64 == whole
    assert bit_sum(torch.cat([tensor, torch.zeros(4, 8, dtype=dtype)])) == whole


def test_every_single_bit_matters() -> None:
    tensor = torch.randn(4)
    for element in range(4):
        for bit in range(32):
            bits = tensor.clone().view(torch.int32)
            bits[element] ^= torch.tensor(1 << bit if bit < 31 else -(1 << 31), dtype=torch.int32)
            assert bit_sum(bits.view(torch.float32)) != bit_sum(tensor)


def test_an_ordered_sum_sees_what_a_bit_sum_does_not() -> None:
    tensor = torch.randn(5, 4)
    swapped = tensor.clone()
    swapped[0, 0], swapped[3, 2] = tensor[3, 2], tensor[0, 0]
    assert bit_sum(swapped) == bit_sum(tensor)
    groups = [[tensor], [swapped], [tensor[:2], tensor[2:]], [tensor[2:], tensor[:2]]]
    one, other, cut, turned = sum_groups(groups, ordered=True).tolist()
    assert one == cut and len({one, other, turned}) == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "view", [lambda x: x[:, 2:5], lambda x: x[1:3], lambda x: x.t(), lambda x: x[::2, ::3], lambda x: x[:, :0], lambda x: x[0]]
)
def test_a_view_is_summed_as_its_elements_are(dtype: torch.dtype, view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    part = view(torch.randn(6, 9).to(dtype))
    integers = torch.int32 if dtype == torch.float32 else torch.int16
    patterns = [int(x) for x in part.clone().view(integers).flatten()]
    constant = 0x9E3779B97F4A7C15
    assert bit_sum(part) == sum(x * (x + constant) for x in patterns) % 2**64
    ordered = sum(x * (x + constant) * (2 * place * constant + 1) for place, x in enumerate(patterns)) % 2**64
    assert [int(value) % 2**64 for value in sum_groups([[part]], ordered=True)] == [ordered]


@pytest.fixture(scope="module")
def group(one_process_world: None) -> None:
    """A process group of this process alone."""
    torch.distributed.init_process_group("gloo")


@dataclass(frozen=True)
class Held:
    """HF tensors that this process holds whole."""

    tensors: dict[str, torch.Tensor]

    def read(self, name: str, tensor_slice: Slice, out: torch.Tensor) -> None:
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


def pushed(trained: dict[str, torch.Tensor]) -> tuple[WeightPush, EngineModel]:
    """An engine that fuses, pads, stacks and transposes, filled from these tensors."""
    shapes = {name: tuple(tensor.shape) for name, tensor in trained.items()}
    engine = EngineModel(shapes, EngineRank(1, 0, num_experts=3, transposed=True))
    held = {name: {full_slice(shape): [0]} for name, shape in shapes.items()}
    sources = cast(Sources, Held(trained))
    push = WeightPush(
        TrainedWeights(held, shapes, sources, torch.device("cpu"), 1 << 20),
        read_destinations(engine, engine.load_weights, shapes, torch.float32),
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
    found = read_destinations(engine, engine.load_weights, shapes, torch.float32)
    held = {name: {full_slice(shape): [0]} for name, shape in shapes.items()}
    side = TrainedWeights(held, shapes, cast(Sources, Held(trained)), torch.device("cpu"), 1 << 20)
    with pytest.raises(WeightDeliveryError, match=r"no parameter for 1 tensors, for example embed_tokens\.weight"):
        WeightPush(side, found, Exchange.from_world())
    engine = EngineModel(shapes, EngineRank(1, 0, num_experts=3))
    fewer = {name: shape for name, shape in shapes.items() if name != "embed_tokens.weight"}
    side = TrainedWeights(held, fewer, cast(Sources, Held(trained)), torch.device("cpu"), 1 << 20)
    found = read_destinations(engine, engine.load_weights, fewer, torch.float32)
    with pytest.raises(WeightDeliveryError, match=r"1 parameters .* got no tensor, for example embed_tokens\.weight"):
        WeightPush(side, found, Exchange.from_world())
