"""Quantized matrices of vllm-ascend between two layouts: as they are loaded, and as the kernels read them."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn

from mindspeed_rl.adaptors import vllm_ascend, vllm_ascend_quantized
from mindspeed_rl.resharding.destinations import read_destinations

EXPERTS, ROWS, COLUMNS = 3, 4, 128


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


@pytest.mark.parametrize(("quantization", "message"), [("w4a8", "not available in this engine"), ("mxfp8", "Ascend 950")])
def test_a_format_that_the_device_does_not_have_is_refused(quantization: str, message: str) -> None:
    with pytest.raises(ValueError, match=rf"generate_config.quantization \({quantization}\) .*{message}"):
        vllm_ascend_quantized.describe_model(quantization, {})
