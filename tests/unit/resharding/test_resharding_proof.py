"""Bit sums add up over pieces and move with every bit; the check names what was not delivered."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mindspeed_rl.resharding.proof import WeightDeliveryError, bit_sum, check_delivery


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
    pieces = (tensor[:1000], tensor[1000:])
    assert bit_sum(tensor) == sum(map(bit_sum, pieces)) % 2**64


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


class Holder(nn.Module):
    """Parameters under dotted names, as an engine's modules hold them."""

    packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.tensors = {name: nn.Parameter(tensor) for name, tensor in tensors.items()}

    def named_parameters(self, *args: object, **kwargs: object):
        return iter(self.tensors.items())


def trained_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"q_proj": (8, 8), "k_proj": (4, 8), "v_proj": (4, 8)}
    names = {f"layers.{n}.{part}.weight": shape for n in range(2) for part, shape in shapes.items()}
    names |= {"layers.0.norm.weight": (8,), "embed.weight": (10, 8)}
    names |= {f"layers.0.experts.{e}.{part}.weight": (6, 8) for e in range(3) for part in ("gate_proj", "up_proj")}
    return {name: torch.randn(shape, generator=generator) for name, shape in names.items()}


def engine_tensors(trained: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same weights as an engine fuses, transposes and pads them."""
    engine = {
        f"layers.{n}.qkv_proj.weight": torch.cat([trained[f"layers.{n}.{part}_proj.weight"] for part in "qkv"])
        for n in range(2)
    }
    engine["layers.0.norm.weight"] = trained["layers.0.norm.weight"].clone()
    engine["embed.weight"] = torch.cat([trained["embed.weight"], torch.zeros(6, 8)])
    stacked = [trained[f"layers.0.experts.{e}.{part}.weight"] for e in range(3) for part in ("gate_proj", "up_proj")]
    engine["layers.0.experts.w13_weight"] = torch.stack(stacked).transpose(1, 2).contiguous()
    return engine


def check(engine: dict[str, torch.Tensor], trained: dict[str, torch.Tensor]) -> int:
    sums = {name: bit_sum(tensor) for name, tensor in trained.items()}
    return check_delivery(Holder(engine), sums, infer_tp_size=1, group=None, kv_heads=2).num_parameters


def test_fused_padded_and_transposed_weights_pass() -> None:
    trained = trained_tensors()
    assert check(engine_tensors(trained), trained) == 5


@pytest.mark.parametrize("name", list(engine_tensors(trained_tensors())))
def test_one_damaged_element_is_named(name: str) -> None:
    trained = trained_tensors()
    engine = engine_tensors(trained)
    flat = engine[name].view(-1)
    flat[3] = torch.nextafter(flat[3], torch.tensor(9.0))
    with pytest.raises(WeightDeliveryError, match=rf"1 parameters .* differ from those trained: {name}\."):
        check(engine, trained)


def test_a_swap_between_layers_is_named_on_both_sides() -> None:
    trained = trained_tensors()
    engine = engine_tensors(trained)
    first, second = "layers.0.qkv_proj.weight", "layers.1.qkv_proj.weight"
    engine[first], engine[second] = engine[second], engine[first]
    with pytest.raises(WeightDeliveryError, match=f"{first}, {second}"):
        check(engine, trained)


def test_a_stale_tensor_is_named() -> None:
    trained = trained_tensors()
    engine = engine_tensors(trained)
    trained["layers.0.norm.weight"] = trained["layers.0.norm.weight"] + 1e-3
    with pytest.raises(WeightDeliveryError, match=r"layers\.0\.norm\.weight"):
        check(engine, trained)


def test_a_lost_tensor_is_named_whether_the_engine_or_the_trainer_lacks_it() -> None:
    trained = trained_tensors()
    engine = engine_tensors(trained)
    without = {name: tensor for name, tensor in engine.items() if name != "embed.weight"}
    with pytest.raises(WeightDeliveryError, match=r"no parameter for 1 tensors, for example embed\.weight"):
        check(without, trained)
    fewer = {name: tensor for name, tensor in trained.items() if name != "embed.weight"}
    with pytest.raises(WeightDeliveryError, match=r"embed\.weight \(no trained tensor has this name\)"):
        check(engine, fewer)


def test_a_missing_part_of_a_fused_parameter_is_found() -> None:
    trained = trained_tensors()
    engine = engine_tensors(trained)
    engine["layers.1.qkv_proj.weight"][-4:] = 0.0  # the value projection never arrived
    with pytest.raises(WeightDeliveryError, match=r"layers\.1\.qkv_proj\.weight"):
        check(engine, trained)
