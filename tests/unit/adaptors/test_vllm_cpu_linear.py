"""Products of the CPU engine's linear layers: from packed copies, never from an outdated one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mindspeed_rl.adaptors import cpu_halves
from mindspeed_rl.adaptors.vllm_cpu import VllmCpuHooks
from mindspeed_rl.adaptors.vllm_cpu_block_formats import LiveBlockLinear
from mindspeed_rl.adaptors.vllm_cpu_linear import LiveLinear, forget_packed, live_layers, load_kernels
from mindspeed_rl.config.quantized_formats import QUANTIZED_FORMATS
from mindspeed_rl.number_formats import NUMBER_FORMATS, block_maxima


def weight_of(rows: int = 512, columns: int = 256, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows), dtype=torch.float32).to(dtype)


def is_packed(linear: LiveLinear, weight: torch.Tensor) -> bool:
    """True where there is a copy behind a product."""
    linear(torch.ones(2, weight.size(1), dtype=weight.dtype), weight, None)
    return linear.packed_bytes > 0


def by_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a processor without 16-bit instructions."""
    monkeypatch.setattr(cpu_halves, "is_worthwhile", lambda: True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows_of_input", [1, 7, 130])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("narrow", [False, True])
def test_products_are_those_in_double_precision(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, rows_of_input: int, has_bias: bool, narrow: bool
) -> None:
    if narrow:
        by_float32(monkeypatch)
    weight, x = weight_of(dtype=dtype), torch.randn(3, rows_of_input, 256).to(dtype)
    bias = torch.randn(512).to(dtype) if has_bias else None
    exact = x.double() @ weight.double().t() + (0.0 if bias is None else bias.double())
    linear = LiveLinear()
    for _ in range(2):
        result = linear(x, weight, bias)
        assert result.shape == (3, rows_of_input, 512) and result.dtype == dtype
        # 256 products of unit variance; bfloat16 rounds the sum to 8 bits
        torch.testing.assert_close(result.double(), exact, rtol=1e-5 if dtype == torch.float32 else 8e-3, atol=1e-4)


def test_a_copy_is_as_old_as_the_last_change_that_was_told() -> None:
    linear, weight, x = LiveLinear(), weight_of(), torch.eye(256)
    assert is_packed(linear, weight) and linear.packed_bytes == weight.nbytes
    linear.forget()
    assert linear.packed_bytes == 0
    weight.mul_(3.0)
    for _ in range(2):
        torch.testing.assert_close(linear(x, weight, None), weight.t())
    assert linear.packed_bytes == weight.nbytes


def test_a_copy_in_float32_counts_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    by_float32(monkeypatch)
    linear, weight = LiveLinear(), weight_of(dtype=torch.bfloat16)
    assert is_packed(linear, weight) and linear.packed_bytes == 2 * weight.nbytes


def test_small_matrices_are_not_packed() -> None:
    assert not is_packed(LiveLinear(), weight_of(64, 64))
    assert is_packed(LiveLinear(), weight_of(64, 128))


def test_inputs_of_another_format_than_the_weight_s_are_left_to_torch() -> None:
    linear, weight = LiveLinear(), weight_of(dtype=torch.bfloat16)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="dtype"):
            linear(torch.ones(2, 256), weight, None)
    assert linear.packed_bytes == 0


def test_a_load_of_weights_and_a_release_of_memory_drop_the_copies() -> None:
    model = nn.ModuleList([nn.Linear(256, 512), nn.Linear(256, 512), nn.Linear(8, 8)])
    for module in model:
        module.cpu_linear = LiveLinear()
    model.append(nn.Identity())
    model[3].cpu_linear = model[0].cpu_linear  # a tied head
    assert len(list(live_layers(model))) == 3
    hooks, weights = VllmCpuHooks(), [module.weight.detach() for module in model[:2]]

    def pack() -> None:
        for module, weight in zip(model, weights):
            assert is_packed(module.cpu_linear, weight)
        assert hooks.packed_bytes(model) == 2 * 256 * 512 * 4

    pack()
    hooks.before_load(model)
    assert hooks.packed_bytes(model) == 0
    pack()
    forget_packed(model)
    assert hooks.packed_bytes(model) == 0


@pytest.mark.parametrize("quantization", ["mxfp8", "w4a8"])
def test_block_formats_are_multiplied_without_onednn_too(monkeypatch: pytest.MonkeyPatch, quantization: str) -> None:
    numbers, block = NUMBER_FORMATS[quantization], QUANTIZED_FORMATS[quantization].block
    weight, x, bias = weight_of(48, 96), weight_of(5, 96), torch.randn(48)
    scales = numbers.make_scales(block_maxima(weight, block), torch.float32)
    elements = numbers.encode(weight, scales)
    rows, factors = numbers.quantize_tokens(x)
    exact = rows.double() @ numbers.decode(elements, scales).double().t() * (1.0 if factors is None else factors) + bias
    monkeypatch.setattr(load_kernels(), "_supports_onednn", False)
    monkeypatch.delattr(load_kernels(), "create_onednn_mm")
    found = LiveBlockLinear(quantization).multiply(x, elements, scales, bias)
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-4)
