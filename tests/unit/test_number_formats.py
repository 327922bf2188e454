"""Quantized numbers by their definitions: enumerated values, torch's own 8-bit floats, loops over single blocks in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from mindspeed_rl.config.quantized_formats import QUANTIZATIONS, QUANTIZED_FORMATS
from mindspeed_rl.number_formats import NUMBER_FORMATS, block_maxima


def e4m3(code: int) -> float:
    """OCP 8-bit floating point, section 5.2: sign, four bits of exponent with bias 7, three of mantissa; no infinity."""
    sign, exponent, mantissa = -1 if code & 128 else 1, code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


E4M3 = [e4m3(code) for code in range(256)]


def nearest_e4m3(value: float) -> float:
    """The nearest number, at a tie the one with an even code; numbers beyond the largest become it."""
    value = max(-448.0, min(448.0, value))
    return E4M3[min((c for c in range(256) if not math.isnan(E4M3[c])), key=lambda c: (abs(E4M3[c] - value), c & 1))]


def spread_values(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rows from tiny to huge numbers, with a block of zeros, a lonely outlier, and ties."""
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(7, 96, generator=generator) * torch.logspace(-30, 30, 7)[:, None]
    values[2, :32] = 0
    values[3, 40] = 900.0
    values[4, :32] = torch.arange(32) / 16 + 1.0  # ties of three bits of mantissa
    return values.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mxfp8_is_that_of_the_microscaling_specification(dtype: torch.dtype) -> None:
    values, numbers = spread_values(dtype), NUMBER_FORMATS["mxfp8"]
    scales = numbers.make_scales(block_maxima(values, 32), dtype)
    elements = numbers.encode(values, scales)
    assert elements.dtype == scales.dtype == torch.uint8 and scales.shape == (7, 3)
    # torch reads both types by itself
    read = elements.view(torch.float8_e4m3fn).double(), scales.view(torch.float8_e8m0fnu).double()
    assert torch.equal(numbers.decode(elements, scales).double(), read[0] * read[1].repeat_interleave(32, 1))
    for row, line in enumerate(values.double().tolist()):
        for block in range(3):
            part = line[32 * block : 32 * block + 32]
            largest = max(map(abs, part))
            scale = 2.0 ** (math.floor(math.log2(largest)) - 8) if largest else 2.0**-127
            assert read[1][row, block] == scale
            wanted = [nearest_e4m3(value / scale) for value in part]
            assert read[0][row, 32 * block : 32 * block + 32].tolist() == wanted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "largest", "block"), [("int8", 127, 96), ("w4a8", 7, 32)])
def test_integers_are_the_rounded_quotients_by_the_scale_that_is_stored(
    name: str, largest: int, block: int, dtype: torch.dtype
) -> None:
    values, numbers = spread_values(dtype), NUMBER_FORMATS[name]
    scales = numbers.make_scales(block_maxima(values, QUANTIZED_FORMATS[name].block), dtype)
    elements, decoded = numbers.encode(values, scales), numbers.decode(numbers.encode(values, scales), scales)
    assert scales.dtype == dtype and elements.shape == (7, 96 if name == "int8" else 48)
    for row, line in enumerate(values.tolist()):
        for first in range(0, 96, block):
            part = line[first : first + block]
            top = max(map(abs, part))
            scale = (torch.tensor(top) / largest).to(dtype).item() if top else 1.0
            assert scales[row, first // block].item() == scale
            for column, value in enumerate(part, first):
                number = max(-largest, min(largest, round(float(torch.tensor(value) / torch.tensor(scale)))))
                assert decoded[row, column].item() == (torch.tensor(float(number)) * torch.tensor(scale)).item()
                byte = int(elements[row, column if name == "int8" else column // 2])
                # two's complement; the element with the even index is in the lower half
                stored = byte if name == "int8" else (byte >> 4 * (column % 2) & 15)
                assert stored == (number if name == "int8" else number % 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int4_in_pairs_of_rows_has_a_scale_in_float16_for_256_elements(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    # the last rows have scales that float16 has with fewer bits, none of them, and none at all
    values = torch.randn(8, 512, generator=generator) * torch.tensor([1, 30, 1e-2, 1e-3, 1e4, 3e-6, 1e-9, 1e6])[:, None]
    values[1, :256], values[2, 300] = 0, 5.0
    values, numbers = values.to(dtype), NUMBER_FORMATS["w4a8_dynamic"]
    scales = numbers.make_scales(block_maxima(values, QUANTIZED_FORMATS["w4a8_dynamic"].block), torch.float32)
    elements = numbers.encode(values, scales)
    decoded = numbers.decode(elements, scales).double()
    assert (elements.dtype, scales.dtype, elements.shape, scales.shape) == (torch.uint8, torch.float32, (4, 512), (8, 2))
    for row, line in enumerate(values.double().tolist()):
        for group in range(2):
            part = line[256 * group : 256 * group + 256]
            # numpy rounds by itself; the largest number of float16 stands for all above it, 1 for a scale that would be 0
            scale = float(np.float16(min(np.float32(max(map(abs, part))) / np.float32(7), 65504.0))) or 1.0
            assert scales[row, group].item() == scale
            for column, value in enumerate(part, 256 * group):
                number = max(-7, min(7, round(float(np.float32(value) / np.float32(scale)))))
                assert decoded[row, column].item() == number * scale
                byte = int(elements[row // 2, column])
                assert (byte >> 4 if row % 2 else byte & 15) == number % 16


def test_bytes_of_int4_experts_are_those_of_their_kernel() -> None:
    # half a byte of each element, 8 bytes of each scale, 4 of each row's sum
    assert QUANTIZED_FORMATS["w4a8_dynamic"].count_bytes([(8, 512), (2, 256)], 2) == 8 * 256 + 2 * 128 + 8 * (16 + 2) + 4 * 10


@pytest.mark.parametrize("name", QUANTIZATIONS)
def test_bytes_are_those_of_the_tensors(name: str) -> None:
    values, numbers, sizes = spread_values(torch.bfloat16), NUMBER_FORMATS[name], QUANTIZED_FORMATS[name]
    scales = numbers.make_scales(block_maxima(values, sizes.block), torch.bfloat16)
    assert sizes.count_bytes([(7, 96)], 2) == numbers.encode(values, scales).nbytes + scales.nbytes


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_block_with_a_number_that_is_none_stays_none(bad: float) -> None:
    values, numbers = torch.ones(1, 64), NUMBER_FORMATS["mxfp8"]
    values[0, 40] = bad
    scales = numbers.make_scales(block_maxima(values, 32), torch.float32)
    decoded = numbers.decode(numbers.encode(values, scales), scales)
    assert decoded[0, :32].tolist() == [1.0] * 32 and decoded[0, 32:].isnan().all()


def test_tokens_are_quantized_each_on_its_own() -> None:
    x = spread_values()
    for name in ("int8", "w4a8"):
        rows, factors = NUMBER_FORMATS[name].quantize_tokens(x)
        assert factors is not None
        assert rows.abs().amax(1).tolist() == [127.0] * 7 and ((rows * factors - x).abs() <= 0.5001 * factors).all()
    rows, none = NUMBER_FORMATS["mxfp8"].quantize_tokens(x)
    alone = torch.cat([NUMBER_FORMATS["mxfp8"].quantize_tokens(line[None])[0] for line in x])
    assert none is None and torch.equal(rows, alone)


@pytest.mark.parametrize("name", sorted(QUANTIZED_FORMATS))
def test_a_part_without_rows_is_quantized_to_one_without_rows(name: str) -> None:
    sizes, numbers = QUANTIZED_FORMATS[name], NUMBER_FORMATS[name]
    width = max(96, sizes.block or 0)
    values = torch.empty(0, width)
    scales = numbers.make_scales(block_maxima(values, sizes.block), torch.float32)
    elements = numbers.encode(values, scales)
    assert scales.shape == (0, width // (sizes.block or width))
    assert elements.shape == (0, width if sizes.pairs_rows else width * sizes.element_bits // 8)
    assert numbers.decode(elements, scales).shape == (0, width)
