"""Quantized matrices of vllm-ascend between two layouts: as they are loaded, and as the kernels read them."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn

from mindspeed_rl.adaptors import vllm_ascend, vllm_ascend_quantized
from mindspeed_rl.adaptors.engine_hooks import DERIVED
from mindspeed_rl.resharding.destinations import read_destinations

EXPERTS, ROWS, COLUMNS = 3, 4, 128
DERIVED_ENDS = tuple(name.removeprefix(".") for name in DERIVED)


def parameter(values: Tensor) -> nn.Parameter:
    return nn.Parameter(values, requires_grad=False)


def build(kind: str) -> nn.Module:
    """A layer as vllm-ascend leaves it after its own load, with meaningless values."""
    layer = nn.Module()
    layer.weight_loader = None  # vLLM looks it up when experts are loaded
    stack = (EXPERTS,) if "experts" in kind else ()
    for name in ("w13_weight", "w2_weight") if stack else ("weight",):
        if "int8" in kind:
            layer.register_parameter(name, parameter(torch.ones(*stack, COLUMNS, ROWS, dtype=torch.int8)))
            layer.register_parameter(f"{name}_scale", parameter(torch.ones(*stack, ROWS, dtype=torch.bfloat16)))
            layer.register_parameter(f"{name}_offset", parameter(torch.ones(*stack, ROWS, dtype=torch.bfloat16)))
            setattr(layer, f"{name}_scale_fp32", torch.ones(*stack, ROWS))
        else:
            elements = torch.ones(*stack, ROWS, COLUMNS).to(torch.float8_e4m3fn).transpose(-1, -2)
            scales = torch.ones(*stack, ROWS, COLUMNS // 64, 2, dtype=torch.uint8).transpose(-2, -3)
            # of experts both are views of what was loaded
            layer.register_parameter(name, parameter(elements if stack else elements.contiguous()))
            layer.register_parameter(f"{name}_scale", parameter(scales if stack else scales.contiguous()))
    return layer


def fill(layer: nn.Module, seed: int) -> dict[str, Tensor]:
    """Write random bytes into what a loader sees, in the shapes of a checkpoint; returns them."""
    torch.manual_seed(seed)
    loaded = {}
    for name, value in layer.named_parameters():
        if name.endswith("_offset"):
            continue
        if value.dtype == torch.bfloat16:
            assert value.shape[-2:] == (ROWS, 1)
            loaded[name] = torch.rand(value.shape).bfloat16()
        else:
            assert value.shape[-2:] == ((ROWS, COLUMNS // 32) if name.endswith("_scale") else (ROWS, COLUMNS))
            loaded[name] = torch.randint(0, 120, value.shape).to(value.dtype)
        assert value.dtype != torch.float8_e4m3fn  # copies of bytes into such would convert them
        value.data.copy_(loaded[name])
    return loaded


def list_places(layer: nn.Module) -> dict[str, tuple[object, ...]]:
    """What captured graphs rely on, of the parameters and of the copies that kernels read."""
    copies = {name: value for name, value in vars(layer).items() if name.endswith("_fp32")}
    tensors = dict(layer.named_parameters()) | copies
    return {name: (value.data_ptr(), value.shape, value.stride(), value.dtype) for name, value in tensors.items()}


def build_int4(columns: int) -> nn.Module:
    """Experts in int4 as vllm-ascend leaves them after its own load, with meaningless values everywhere."""
    layer = nn.Module()
    layer.weight_loader = None
    for name, rows in (("w13", 16), ("w2", 8)):
        for end, values in {
            "weight": torch.full((EXPERTS, columns, rows // 8), 0x12345678, dtype=torch.int32),
            "weight_scale": torch.full((EXPERTS, columns // 256, rows), -1),
            "weight_offset": torch.ones(EXPERTS, rows, 1),
            "scale_bias": torch.ones(EXPERTS, rows),
        }.items():
            layer.register_parameter(f"{name}_{end}", parameter(values))
    return layer


@pytest.mark.parametrize("columns", [256, 512])
def test_kernels_see_int4_where_they_saw_it_first_and_the_sums_that_belong_to_it(columns: int) -> None:
    layer, hooks = build_int4(columns), vllm_ascend.VllmAscendHooks()
    model = nn.ModuleDict({"layer": layer})
    before = list_places(layer)
    for seed in range(2):
        hooks.before_load(model)
        generator = torch.Generator().manual_seed(seed)
        loaded: dict[str, Tensor] = {}
        for name, rows in (("w13", 16), ("w2", 8)):
            # as a checkpoint has them: two rows in a byte, a float16 for 256 columns
            loaded[f"{name}_weight"] = torch.randint(0, 256, (EXPERTS, rows // 2, columns), generator=generator).byte()
            scales = torch.rand(EXPERTS, rows, columns // 256, generator=generator)
            loaded[f"{name}_weight_scale"] = scales.half().float()
        for name, values in loaded.items():
            held = layer.get_parameter(name)
            assert (held.shape, held.dtype) == (values.shape, values.dtype)
            held.data.copy_(values)
        hooks.after_load(model)
        assert list_places(layer) == before
        for name, rows in (("w13", 16), ("w2", 8)):
            kernel, scales = layer.get_parameter(f"{name}_weight"), layer.get_parameter(f"{name}_weight_scale")
            assert not layer.get_parameter(f"{name}_weight_offset").any()
            for expert in range(EXPERTS):
                for row in range(rows):
                    total = 0.0
                    for column in range(columns):
                        byte = int(loaded[f"{name}_weight"][expert, row // 2, column])
                        number = byte >> 4 if row % 2 else byte & 15
                        assert (int(kernel[expert, column, row // 8]) >> 4 * (row % 8)) & 15 == number
                        scale = loaded[f"{name}_weight_scale"][expert, row, column // 256].item()
                        total += 8 * (number - 16 * (number > 7)) * scale
                    bias = layer.get_parameter(f"{name}_scale_bias")[expert, row].item()
                    assert bias == pytest.approx(total, rel=1e-6, abs=1e-3)
                    for index in range(columns // 256):  # the bits of a float32, and nothing above them
                        bits = loaded[f"{name}_weight_scale"][expert, row, index].view(torch.int32).item()
                        assert int(scales[expert, index, row]) == bits
        unpacks = hooks.unpack(model)
        assert set(unpacks) == {f"layer.{name}" for name in loaded}
        for name, values in loaded.items():
            read = torch.stack([unpacks[f"layer.{name}"](matrix) for matrix in layer.get_parameter(name)])
            assert torch.equal(read, values)
        # the proof sees another sum, and a bit above a scale's, in the row that has it
        for damaged, place in (("w13_scale_bias", (1, 3)), ("w13_weight_scale", (1, 0, 3))):
            held = layer.get_parameter(damaged).data
            held[place] += 1 << 40 if held.dtype == torch.int64 else 1
            wrong = hooks.unpack(model)["layer.w13_weight_scale"](layer.w13_weight_scale[1]).isnan()
            assert wrong.any(1).nonzero().flatten().tolist() == [3]
            held[place] -= 1 << 40 if held.dtype == torch.int64 else 1


def test_sleep_keeps_no_copy_of_int4_that_a_push_replaces() -> None:
    layer, shapes = build_int4(512), dict[str, tuple[int, ...]]()
    for expert in range(EXPERTS):
        for name, rows in (("w13", 16), ("w2", 8)):
            shapes |= {f"{name}_weight.{expert}": (rows // 2, 512), f"{name}_weight_scale.{expert}": (rows, 2)}

    def load(tensors: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            parameter_name, _, expert = name.rpartition(".")
            layer.get_parameter(parameter_name).data[int(expert)].copy_(tensor)

    stored = {name: torch.float32 if "scale" in name else torch.uint8 for name in shapes}
    vllm_ascend_quantized.before_load(layer)
    held = nn.ParameterDict({name: value for name, value in layer.named_parameters() if not name.endswith(DERIVED_ENDS)})
    result = read_destinations(held, load, shapes, torch.bfloat16, stored=stored)
    vllm_ascend_quantized.after_load(layer)
    unpacks = dict(vllm_ascend_quantized.list_unpacks(layer))
    parameters = {name: value.data for name, value in layer.named_parameters() if not name.endswith(DERIVED_ENDS)}
    replaced = {value.data_ptr() for value in result.list_replaced(parameters, {name.lstrip(".") for name in unpacks})}
    assert replaced == {value.data_ptr() for value in parameters.values()}


@pytest.mark.parametrize("kind", ["int8", "int8 experts", "MXFP8", "MXFP8 experts"])
def test_kernels_see_every_load_where_they_saw_the_first(kind: str) -> None:
    layer, hooks = build(kind), vllm_ascend.VllmAscendHooks()
    model = nn.ModuleDict({"layer": layer})
    before = list_places(layer)
    for seed in range(2):
        hooks.before_load(model)
        loaded = fill(layer, seed)
        hooks.after_load(model)
        assert list_places(layer) == before
        for name, values in loaded.items():
            kernel = layer.get_parameter(name)
            if not name.endswith("_scale"):
                assert torch.equal(kernel.transpose(-1, -2).view(values.dtype), values)
            elif values.dtype == torch.uint8:
                for row in range(ROWS):
                    for block in range(COLUMNS // 32):
                        assert torch.equal(kernel[..., block // 2, row, block % 2], values[..., row, block])
            else:
                assert torch.equal(kernel, values[..., 0])
                assert name == "w2_weight_scale" or torch.equal(getattr(layer, f"{name}_fp32"), values[..., 0].float())
        assert not any(value.any() for name, value in layer.named_parameters() if name.endswith("_offset"))
        # the proof of a weight sync reads all of it as it was loaded
        unpacks = hooks.unpack(model)
        assert set(unpacks) == {f"layer.{name}" for name in loaded}
        for name, values in loaded.items():
            kernel = layer.get_parameter(name)
            is_stack = kernel.dim() == values.dim() == 3
            unpack = unpacks[f"layer.{name}"]
            read = torch.stack([unpack(matrix) for matrix in kernel]) if is_stack else unpack(kernel)
            assert torch.equal(read, values)
            if (copy := vars(layer).get(f"{name}_fp32")) is not None and not name.startswith("w2"):
                copy[..., -1] += 1  # of the last row, which the proof then sees
                assert (unpack(kernel) != values)[..., 0].sum() == copy[..., -1].numel()


def test_an_odd_number_of_blocks_has_a_scale_that_is_zero() -> None:
    layer = nn.Module()
    layer.register_parameter("weight", parameter(torch.ones(32, ROWS).to(torch.float8_e4m3fn)))
    layer.register_parameter("weight_scale", parameter(torch.zeros(1, ROWS, 2, dtype=torch.uint8)))
    vllm_ascend_quantized.before_load(layer)
    assert layer.weight_scale.shape == (ROWS, 1)
    layer.weight_scale.data.copy_(torch.arange(ROWS)[:, None])
    vllm_ascend_quantized.after_load(layer)
    assert layer.weight_scale.tolist() == [[[row, 0] for row in range(ROWS)]]


def test_a_rank_with_an_odd_number_of_blocks_keeps_its_scales_in_sleep() -> None:
    # 3 blocks of 32: the kernel has 4 scales of a row, and the checkpoint 3
    rows, columns = 16, 96
    layer = nn.Module()
    layer.register_parameter("weight", parameter(torch.ones(columns, rows).to(torch.float8_e4m3fn)))
    layer.register_parameter("weight_scale", parameter(torch.zeros(2, rows, 2, dtype=torch.uint8)))
    shapes = {"weight": (rows, columns), "weight_scale": (rows, 3)}

    def load(tensors: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            layer.get_parameter(name).data.copy_(tensor)

    stored = dict.fromkeys(shapes, torch.uint8)
    vllm_ascend_quantized.before_load(layer)
    result = read_destinations(layer, load, shapes, torch.bfloat16, stored=stored)
    vllm_ascend_quantized.after_load(layer)
    unpacks = dict(vllm_ascend_quantized.list_unpacks(layer))
    parameters = {name: value.data for name, value in layer.named_parameters()}
    replaced = [value.data_ptr() for value in result.list_replaced(parameters, {name.lstrip(".") for name in unpacks})]
    assert replaced == [layer.weight.data_ptr()]


def test_a_description_names_each_matrix_and_the_experts_of_a_layer_once() -> None:
    names = {"model.embed_tokens.weight": False, "model.layers.0.self_attn.q_proj.weight": True}
    names |= {f"model.layers.0.mlp.experts.{expert}.up_proj.weight": True for expert in range(3)}
    names |= {"model.layers.0.mlp.gate.weight": False, "model.layers.0.mlp.gate.e_score_correction_bias": False}
    assert vllm_ascend_quantized.describe_model("int8", names) == {
        "quant_method": "ascend",
        "lm_head.weight": "FLOAT",  # also of a tied model, which has no such weights
        "model.embed_tokens.weight": "FLOAT",
        "model.layers.0.self_attn.q_proj.weight": "W8A8_DYNAMIC",
        "model.layers.0.mlp.experts.weight": "W8A8_DYNAMIC",
        "model.layers.0.mlp.experts.0.up_proj.weight": "W8A8_DYNAMIC",
        "model.layers.0.mlp.gate.weight": "FLOAT",
    }


def test_w4a8_is_described_as_int4_for_experts_and_int8_for_all_others() -> None:
    names = {"model.layers.0.self_attn.q_proj.weight": True, "model.layers.0.mlp.shared_experts.up_proj.weight": True}
    names |= {"model.layers.0.mlp.experts.0.up_proj.weight": True, "model.layers.0.mlp.gate.weight": False}
    assert vllm_ascend_quantized.describe_model("w4a8", names) == {
        "quant_method": "ascend",
        "version": "1.0.0",
        "group_size": 256,
        "lm_head.weight": "FLOAT",
        "model.layers.0.self_attn.q_proj.weight": "W8A8_DYNAMIC",
        "model.layers.0.mlp.shared_experts.up_proj.weight": "W8A8_DYNAMIC",
        "model.layers.0.mlp.experts.weight": "W4A8_DYNAMIC",
        "model.layers.0.mlp.experts.0.up_proj.weight": "W4A8_DYNAMIC",
        "model.layers.0.mlp.gate.weight": "FLOAT",
    }


@pytest.mark.parametrize(("quantization", "message"), [("int3", "not available in this engine"), ("mxfp8", "Ascend 950")])
def test_a_format_that_the_device_does_not_have_is_refused(quantization: str, message: str) -> None:
    with pytest.raises(ValueError, match=rf"generate_config.quantization \({quantization}\) .*{message}"):
        vllm_ascend_quantized.describe_model(quantization, {})
