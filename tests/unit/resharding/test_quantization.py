"""Weights in int8: a scale for each full row, whatever part of it a rank has; the proof covers elements and scales."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from engine_model import EngineModel, EngineRank

from mindspeed_rl.resharding.bit_sums import MASK, bit_sum
from mindspeed_rl.resharding.copies import Copies
from mindspeed_rl.resharding.destinations import read_destinations
from mindspeed_rl.resharding.exchange import Exchange
from mindspeed_rl.resharding.layouts import Slice, full_slice
from mindspeed_rl.resharding.proof import WeightDeliveryError
from mindspeed_rl.resharding.push import WeightPush
from mindspeed_rl.resharding.quantization import quantize_side, quantize_tensors, stored_dtypes
from mindspeed_rl.resharding.trained_weights import TrainedWeights

UP, DOWN = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.down_proj.weight"
NORM = "model.layers.0.input_layernorm.weight"
SHAPES: dict[str, tuple[int, ...]] = {UP: (600, 40), DOWN: (40, 300), NORM: (40,), "model.embed_tokens.weight": (64, 40)}


@pytest.fixture(scope="module")
def group(single_process_world: None) -> None:
    """A process group of only this process."""
    torch.distributed.init_process_group("gloo")


class Held:
    """HF tensors that this process holds in two parts each: of rows, or of columns where a layer is split by its input."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def read(self, name: str, tensor_slice: Slice, out: torch.Tensor, copies: Copies | None = None) -> None:
        out.copy_(self.tensors[name][tuple(slice(*side) for side in tensor_slice)])

    def views(self, name: str, tensor_slice: Slice) -> Iterator[tuple[Slice, torch.Tensor]]:
        yield tensor_slice, self.tensors[name][tuple(slice(*side) for side in tensor_slice)]

    def forget_merged(self) -> None:
        pass


def split(name: str) -> list[Slice]:
    rows, *columns = full_slice(SHAPES[name])
    if name == DOWN:
        return [(rows, (0, 100)), (rows, (100, 300))]
    return [((0, 25), *columns), ((25, rows[1]), *columns)]


def pushed(
    tensors: dict[str, torch.Tensor], dtype: torch.dtype = torch.float32, quantization: str = "int8"
) -> tuple[WeightPush, EngineModel]:
    held = {name: {part: [0] for part in split(name)} for name in SHAPES}
    side = quantize_side(TrainedWeights(held, SHAPES, Held(tensors), torch.device("cpu"), 1 << 14), quantization)
    engine = EngineModel(side.shapes, EngineRank(1, 0, quantization=quantization), dtype)
    stored = stored_dtypes(side.quantized, quantization)
    result = read_destinations(engine, engine.load_weights, side.shapes, dtype, stored=stored)
    push = WeightPush(side, result, Exchange.from_world())
    push.write(engine)
    return push, engine


def random_tensors(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_elements_and_scales_are_those_of_the_definition_for_every_row(group: None, dtype: torch.dtype) -> None:
    tensors = random_tensors(dtype)
    tensors[UP][7] = 0  # a row without a maximum
    push, engine = pushed(tensors, dtype)
    held = {name: parameter.data for name, parameter in engine.named_parameters()}
    for name, parameter in ((UP, UP.replace("up_proj", "gate_up_proj")), (DOWN, DOWN)):
        for row, ints, scale in zip(tensors[name].float(), held[parameter], held[f"{parameter}_scale"][:, 0]):
            largest = max(map(abs, row.tolist()))
            want = torch.tensor(largest) / 127 if largest else torch.tensor(1.0)
            assert scale == want and ints.tolist() == [round(value) for value in (row / want).tolist()]
            assert (row - ints * scale).abs().max() <= 0.5001 * scale
    assert held[NORM].dtype == held["model.embed_tokens.weight"].dtype == dtype
    assert push.prove(engine).num_tensors == 6


BLOCK_SHAPES = {UP: (600, 64), DOWN: (64, 320), NORM: (64,), "model.embed_tokens.weight": (64, 64)}


def pushed_blocks(
    quantization: str, tensors: dict[str, torch.Tensor], parts: list[Slice], bucket: int
) -> tuple[WeightPush, EngineModel]:
    """Push from shards whose down projection is in these parts, in messages of any size."""
    held = {name: {full_slice(shape): [0]} for name, shape in BLOCK_SHAPES.items()} | {DOWN: {part: [0] for part in parts}}
    trained = TrainedWeights(held, BLOCK_SHAPES, Held(tensors), torch.device("cpu"), bucket)
    side = quantize_side(trained, quantization)
    engine = EngineModel(side.shapes, EngineRank(1, 0, quantization=quantization))
    stored = stored_dtypes(side.quantized, quantization)
    result = read_destinations(engine, engine.load_weights, side.shapes, torch.float32, stored=stored)
    push = WeightPush(side, result, Exchange.from_world())
    push.write(engine)
    return push, engine


@pytest.mark.parametrize("quantization", ["mxfp8", "w4a8"])
def test_a_block_format_arrives_from_shards_of_columns_as_the_whole_is_quantized(group: None, quantization: str) -> None:
    generator = torch.Generator().manual_seed(2)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in BLOCK_SHAPES.items()}
    parts: list[Slice] = [((0, 64), (0, 128)), ((0, 64), (128, 320))]
    push, engine = pushed_blocks(quantization, tensors, parts, 1 << 12)
    held = {name: parameter.data for name, parameter in engine.named_parameters()}
    for name, parameter in ((UP, UP.replace("up_proj", "gate_up_proj")), (DOWN, DOWN)):
        rows, columns = BLOCK_SHAPES[name]
        blocks = tensors[name].double().view(rows, -1, 32)
        largest = blocks.abs().amax(-1)
        stored, scales = held[parameter], held[f"{parameter}_scale"]
        if quantization == "mxfp8":
            assert torch.equal(scales.double() - 127, largest.log2().floor() - 8)
            numbers = stored.view(torch.float8_e4m3fn).double().view(rows, -1, 32)
            # half a step of three bits of mantissa, or what is cut off above 448
            error = (numbers * 2.0 ** (scales.double() - 127)[..., None] - blocks).abs()
            within = error <= 2.0**-4 * blocks.abs() + 2.0 ** (scales.double() - 137)[..., None]
            assert (within | (numbers.abs() == 448)).all()
        else:
            assert stored.shape == (rows, columns // 2)
            assert torch.equal(scales, tensors[name].view(rows, -1, 32).abs().amax(-1) / 7)
            numbers = torch.stack([(stored & 15).double(), (stored >> 4).double()], -1).view(rows, -1, 32)
            numbers = torch.where(numbers > 7, numbers - 16, numbers)
            assert ((numbers * scales.double()[..., None] - blocks).abs() <= 0.5001 * scales.double()[..., None]).all()
    assert push.prove(engine).num_tensors == 6
    held[DOWN][5, 7] += 1
    with pytest.raises(WeightDeliveryError, match=f"1 parameters .* differ from those trained: {DOWN}"):
        push.prove(engine)
    held[DOWN][5, 7] -= 1
    held[f"{DOWN}_scale"][63, 9] += 1
    with pytest.raises(WeightDeliveryError, match=f"1 parameters .* differ from those trained: {DOWN}_scale"):
        push.prove(engine)


EXPERTS_SHAPES = {
    "model.layers.0.self_attn.o_proj.weight": (512, 512),
    **{f"model.layers.0.mlp.experts.{expert}.{kind}_proj.weight": (256, 512) for expert in range(2) for kind in ("gate", "up")},
    **{f"model.layers.0.mlp.experts.{expert}.down_proj.weight": (512, 256) for expert in range(2)},
    NORM: (512,),
}


def push_experts(tensors: dict[str, torch.Tensor], edge: int, bucket: int) -> tuple[WeightPush, EngineModel]:
    """Push from shards that each have the rows up to this edge of all matrices, or those behind it."""
    held: dict[str, dict[Slice, list[int]]] = {}
    for name, (rows, *others) in EXPERTS_SHAPES.items():
        columns = full_slice(tuple(others))
        held[name] = {((0, edge), *columns): [0], ((edge, rows), *columns): [0]}
    trained = TrainedWeights(held, EXPERTS_SHAPES, Held(tensors), torch.device("cpu"), bucket)
    side = quantize_side(trained, "w4a8_dynamic")
    engine = EngineModel(side.shapes, EngineRank(1, 0, num_experts=2, quantization="w4a8_dynamic"), torch.bfloat16)
    stored = stored_dtypes(side.quantized, "w4a8_dynamic")
    result = read_destinations(engine, engine.load_weights, side.shapes, torch.bfloat16, stored=stored)
    push = WeightPush(side, result, Exchange.from_world())
    push.write(engine)
    return push, engine


def test_experts_in_int4_and_other_matrices_in_int8_arrive_from_shards_of_rows(group: None) -> None:
    generator = torch.Generator().manual_seed(4)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in EXPERTS_SHAPES.items()}
    push, engine = push_experts(tensors, 100, 1 << 14)
    held = {name: parameter.data for name, parameter in engine.named_parameters()}
    for expert in range(2):
        for kind, parameter, first in (("gate", "w13", 0), ("up", "w13", 256), ("down", "w2", 0)):
            whole = tensors[f"model.layers.0.mlp.experts.{expert}.{kind}_proj.weight"].double()
            stored = held[f"model.layers.0.mlp.experts.{parameter}_weight"][expert]
            scales = held[f"model.layers.0.mlp.experts.{parameter}_weight_scale"][expert].double()
            assert stored.dtype == torch.uint8
            for row in range(0, len(whole), 37):
                for group_of_row, part in enumerate(whole[row].split(256)):
                    scale = float(np.float16(np.float32(part.abs().max()) / np.float32(7)))
                    assert scales[first + row, group_of_row] == scale
                    bytes_of_row = stored[(first + row) // 2, 256 * group_of_row : 256 * group_of_row + 256].int()
                    numbers = bytes_of_row >> 4 if row % 2 else bytes_of_row & 15
                    wanted = [round(max(-7.0, min(7.0, value / scale))) % 16 for value in part.tolist()]
                    assert numbers.tolist() == wanted
    attention = "model.layers.0.self_attn.o_proj.weight"
    assert held[attention].dtype == torch.int8 and held[f"{attention}_scale"].shape == (512, 1)
    largest = tensors[attention].abs().amax(1) / 127
    assert torch.equal(held[f"{attention}_scale"][:, 0].float(), largest.float())
    # matrices and scales of seven, and the norm
    assert push.prove(engine).num_tensors == 15
    for name, place in (("w2_weight", (1, 250, 3)), ("w13_weight_scale", (0, 511, 1)), ("w13_weight", (0, 0, 0))):
        flat = held[f"model.layers.0.mlp.experts.{name}"]
        flat[place] += 1
        with pytest.raises(WeightDeliveryError, match=f"1 parameters .* differ from those trained: .*{name}"):
            push.prove(engine)
        flat[place] -= 1
    # quantized in one piece, all of it is the same
    full = dict(quantize_tensors(tensors.items(), "w4a8_dynamic", torch.float32))
    name = "model.layers.0.mlp.experts.1.up_proj.weight"
    assert torch.equal(full[name], held["model.layers.0.mlp.experts.w13_weight"][1, 128:])
    assert torch.equal(full[f"{name}_scale"], held["model.layers.0.mlp.experts.w13_weight_scale"][1, 256:])


def test_a_byte_whose_rows_are_on_two_ranks_is_refused(group: None) -> None:
    tensors = {name: torch.zeros(shape) for name, shape in EXPERTS_SHAPES.items()}
    with pytest.raises(RuntimeError, match=r"rows 0 to 33 of .*experts.0.gate.*format w4a8_dynamic .*needs multiples of 2"):
        push_experts(tensors, 33, 1 << 14)


@pytest.mark.parametrize("quantization", ["mxfp8", "w4a8"])
def test_a_block_whose_elements_are_on_two_ranks_is_refused(group: None, quantization: str) -> None:
    tensors = {name: torch.zeros(shape) for name, shape in BLOCK_SHAPES.items()}
    with pytest.raises(RuntimeError, match=rf"columns 0 to 100 of {DOWN}, .*format {quantization} .*needs multiples of 32"):
        pushed_blocks(quantization, tensors, [((0, 64), (0, 100)), ((0, 64), (100, 320))], 1 << 14)


def test_an_engine_in_another_quantized_format_is_refused(group: None) -> None:
    held = {name: {full_slice(shape): [0]} for name, shape in BLOCK_SHAPES.items()}
    side = quantize_side(TrainedWeights(held, BLOCK_SHAPES, None, torch.device("cpu"), 1 << 14), "mxfp8")
    engine = EngineModel(side.shapes, EngineRank(1, 0), torch.bfloat16)
    stored = stored_dtypes(side.quantized, "mxfp8")
    with pytest.raises(RuntimeError, match="of the rollout engine are in the format int8, and the trainer sends mxfp8"):
        read_destinations(engine, engine.load_weights, side.shapes, torch.bfloat16, stored=stored)


@pytest.mark.parametrize(("served", "trained"), [("mxfp8", "w4a8"), ("w4a8", "mxfp8")])
def test_formats_whose_elements_have_one_type_are_told_apart(group: None, served: str, trained: str) -> None:
    held = {name: {full_slice(shape): [0]} for name, shape in BLOCK_SHAPES.items()}
    parts = TrainedWeights(held, BLOCK_SHAPES, None, torch.device("cpu"), 1 << 14)
    engine = EngineModel(quantize_side(parts, served).shapes, EngineRank(1, 0, quantization=served), torch.bfloat16)
    side = quantize_side(parts, trained)
    with pytest.raises(RuntimeError, match=f"engine are in the format {served}, and the trainer sends {trained}"):
        read_destinations(
            engine, engine.load_weights, side.shapes, torch.bfloat16, stored=stored_dtypes(side.quantized, trained)
        )


@pytest.mark.parametrize("name", [DOWN, f"{DOWN}_scale"])
def test_a_changed_element_or_scale_is_named(group: None, name: str) -> None:
    push, engine = pushed(random_tensors())
    flat = dict(engine.named_parameters())[name].data.view(-1)
    flat[3] = flat[3] + 1
    with pytest.raises(WeightDeliveryError, match=f"1 parameters .* differ from those trained: {name}"):
        push.prove(engine)


def test_a_weight_that_changes_after_it_was_sent_is_found_where_its_int8_changes(group: None) -> None:
    tensors = random_tensors()
    push, engine = pushed(tensors)
    tensors[DOWN][3, 5] *= -1
    with pytest.raises(WeightDeliveryError, match=DOWN):
        push.prove(engine)


def test_an_engine_whose_format_is_another_is_refused(group: None) -> None:
    held = {name: {full_slice(shape): [0]} for name, shape in SHAPES.items()}
    side = quantize_side(TrainedWeights(held, SHAPES, None, torch.device("cpu"), 1 << 14), "int8")
    plain = EngineModel(SHAPES, EngineRank(1, 0), torch.bfloat16)
    with pytest.raises(RuntimeError, match="of the rollout engine are in the format null, and the trainer sends int8"):
        read_destinations(plain, plain.load_weights, side.shapes, torch.bfloat16, stored=stored_dtypes(side.quantized, "int8"))
    small = EngineModel(side.shapes, EngineRank(1, 0), torch.bfloat16)
    with pytest.raises(RuntimeError, match="of the rollout engine are in the format int8, and the trainer sends null"):
        read_destinations(small, small.load_weights, SHAPES, torch.bfloat16)


#: published names of matrices: in int8, and in the format of the run
_IN_INT8 = (
    "self_attn.q_proj mlp.down_proj mlp.experts.0.up_proj mlp.shared_experts.gate_proj mlp.shared_expert.up_proj "
    "block_sparse_moe.experts.7.w2 self_attn.q_a_proj self_attn.q_b_proj self_attn.kv_a_proj_with_mqa "
    "linear_attn.in_proj_qkv linear_attn.in_proj_qkvz linear_attn.in_proj_z linear_attn.out_proj"
)
_AS_THEY_ARE = (
    "mlp.gate mlp.shared_expert_gate block_sparse_moe.gate self_attn.kv_b_proj linear_attn.in_proj_ba linear_attn.in_proj_b "
    "linear_attn.in_proj_a"
)


@pytest.mark.parametrize("layers", ["model.layers.0", "model.language_model.layers.11"])
def test_wide_matrices_of_the_language_model_are_quantized_and_nothing_else(layers: str) -> None:
    quantized = tuple(f"{layers}.{name}.weight" for name in _IN_INT8.split())
    others = [f"{layers}.{name}.weight" for name in _AS_THEY_ARE.split()]
    others += ["lm_head.weight", "model.embed_tokens.weight", "visual.blocks.0.mlp.gate_proj.weight", "mtp.layers.0.fc.weight"]
    shapes = {name: (8, 8) for name in (*others, *quantized)} | {f"{layers}.self_attn.q_proj.bias": (8,)}
    held = {name: {full_slice(shape): [0]} for name, shape in shapes.items()}
    side = quantize_side(TrainedWeights(held, shapes, None, torch.device("cpu"), 1 << 14), "int8")
    assert side.quantized == quantized


def test_fingerprints_of_bytes_are_sums_of_signed_elements_by_position() -> None:
    elements = torch.tensor([[1, -2, 3], [-128, 127, 0]], dtype=torch.int8)
    whole = bit_sum(elements)
    swapped = bit_sum(elements.flip(1))
    wide = bit_sum(elements.to(torch.int16).view(torch.bfloat16))
    assert whole == wide != swapped and 0 <= whole <= MASK
