"""Quantized number formats: from matrices to stored elements and scales, and back (`config.quantized_formats` has their sizes).

| format | elements | scale |
|---|---|---|
| int8 | round(x / scale), -127 to 127 | max of the row / 127 |
| mxfp8 | E4M3 of x / scale, rounded half to even, at most 448 | 2^(floor(log2(max of 32)) - 8), as E8M0: exponent + 127 |
| w4a8 | round(x / scale), -7 to 7, two in a byte, the first one in its lower half | max of 32 / 7 |
| w4a8_dynamic | the same, of a column in two rows, the first row in the lower half | max of 256 / 7 in float16 |

MXFP8 is the format of the OCP Microscaling specification 1.0, sections 5.2 and 6.3. Scales of int8 and w4a8 are rounded to the
engine's type of scales first (of w4a8_dynamic to float16); elements are rounded with that scale, half to even.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from mindspeed_rl.config.quantized_formats import QUANTIZED_FORMATS

#: exponent of the largest power of two in E4M3, largest number in it, and the bias of E8M0, in which 255 is NaN
_E4M3_EXPONENT, _E4M3_MAX, _E8M0_BIAS, _E8M0_NAN = 8, 448.0, 127, 255
#: bits of a float32 below its exponent
_EXPONENT_BIT = 23

#: largest integer of int8 activations, whatever the integers of the weights are
_TOKEN_MAX = 127


class NumberFormat(Protocol):
    """One format; `values` are [rows, columns], `scales` [rows, scales of a row], and their columns are divided evenly."""

    def make_scales(self, maxima: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the stored scales for the largest absolute values that share one, float32.

        Args:
            maxima: [rows, scales of a row].
            dtype: type of the scales where the format has none of its own.
        """
        ...

    def encode(self, values: Tensor, scales: Tensor) -> Tensor:
        """Return the stored elements, [stored rows, stored columns]."""
        ...

    def decode(self, elements: Tensor, scales: Tensor) -> Tensor:
        """Return the represented values, float32."""
        ...

    def quantize_tokens(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return what a product of activations [tokens, columns] computes with: float32, and a factor per token or None."""
        ...


def block_maxima(values: Tensor, block: int | None) -> Tensor:
    """Return the largest absolute values that share a scale: [rows, columns] -> [rows, scales of a row] float32."""
    width = block or values.size(1)
    blocks = values.reshape(values.size(0), values.size(1) // width, width)
    # the larger of both ends: `abs` would copy the matrix
    low, high = blocks.aminmax(dim=2)
    return torch.maximum(-low, high).float()


class _Integers:
    """Symmetric integers with a scale for a row or for a block of one."""

    def __init__(self, largest: int) -> None:
        self._largest = largest

    def make_scales(self, maxima: Tensor, dtype: torch.dtype) -> Tensor:
        # zeros have any scale; one that underflows to 0 in `dtype` would divide by 0
        scales = torch.where(maxima > 0, maxima / self._largest, 1.0).to(dtype)
        return torch.where(scales == 0, torch.ones_like(scales), scales)

    def encode(self, values: Tensor, scales: Tensor) -> Tensor:
        scaled = _divide_columns(values, scales).float() / scales.float()[..., None]
        return scaled.round_().clamp_(-self._largest, self._largest).to(torch.int8).view(values.shape)

    def decode(self, elements: Tensor, scales: Tensor) -> Tensor:
        return (_divide_columns(elements, scales).float() * scales.float()[..., None]).view(elements.shape)

    def quantize_tokens(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        maxima = block_maxima(x, None)
        scales = torch.where(maxima > 0, maxima / _TOKEN_MAX, 1.0)
        return (x.float() / scales).round_().clamp_(-_TOKEN_MAX, _TOKEN_MAX), scales


class _Int4(_Integers):
    """Integers of four bits, two in a byte."""

    def encode(self, values: Tensor, scales: Tensor) -> Tensor:
        bits = super().encode(values, scales).view(torch.uint8) & 15
        return bits[:, ::2] | bits[:, 1::2] << 4

    def decode(self, elements: Tensor, scales: Tensor) -> Tensor:
        # shifted up and down again, which copies the sign
        low, high = (elements << 4).view(torch.int8) >> 4, elements.view(torch.int8) >> 4
        return super().decode(torch.stack([low, high], dim=-1).flatten(1), scales)


class _Int4Pairs(_Integers):
    """Integers of four bits, of two rows in a byte; by arithmetic, because NPUs shift no bytes."""

    def make_scales(self, maxima: Tensor, dtype: torch.dtype) -> Tensor:
        # vllm-ascend rounds what it is given to float16, whatever the type
        largest = torch.finfo(torch.float16).max * self._largest
        return super().make_scales(maxima.clamp(max=largest), torch.float16).to(dtype)

    def encode(self, values: Tensor, scales: Tensor) -> Tensor:
        numbers = super().encode(values, scales)
        low, high = numbers[::2], numbers[1::2]
        return (torch.where(low < 0, low + 16, low) + high * 16).view(torch.uint8)

    def decode(self, elements: Tensor, scales: Tensor) -> Tensor:
        return super().decode(torch.stack(split_pairs(elements), dim=1).flatten(0, 1), scales)


def split_pairs(elements: Tensor) -> tuple[Tensor, Tensor]:
    """Return the numbers in the lower and in the upper halves of bytes, in float32, each in the shape of the bytes."""
    numbers = elements.view(torch.int8).float()
    high = (numbers / 16).floor_()
    low = numbers - high * 16
    return torch.where(low > 7, low - 16, low), high


class _MicroscalingFp8:
    """E4M3 elements with a shared power of two."""

    def make_scales(self, maxima: Tensor, dtype: torch.dtype) -> Tensor:
        del dtype  # the format has its own
        # the exponent of a float32 has the bias of E8M0; numbers without one are below the smallest scale
        stored = ((maxima.view(torch.int32) >> _EXPONENT_BIT) - _E4M3_EXPONENT).clamp_(0, 2 * _E8M0_BIAS)
        stored = torch.where(maxima > 0, stored, 0)
        return torch.where(maxima.isfinite(), stored, _E8M0_NAN).to(torch.uint8)

    def encode(self, values: Tensor, scales: Tensor) -> Tensor:
        # multiplied by powers of two, exactly
        scaled = _divide_columns(values, scales).float() * _make_powers(2 * _E8M0_BIAS - scales.int())[..., None]
        return scaled.clamp_(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8).view(values.shape)

    def decode(self, elements: Tensor, scales: Tensor) -> Tensor:
        values = _divide_columns(elements.view(torch.float8_e4m3fn).float(), scales)
        factors = torch.where(scales == _E8M0_NAN, torch.nan, _make_powers(scales.int()))
        return (values * factors[..., None]).view(elements.shape)

    def quantize_tokens(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        scales = self.make_scales(block_maxima(x, QUANTIZED_FORMATS["mxfp8"].block), x.dtype)
        return self.decode(self.encode(x, scales), scales), None


def _make_powers(stored: Tensor) -> Tensor:
    """Return 2^(stored - 127) in float32, for numbers up to 254; NPUs have no `ldexp`.

    The smallest one has no exponent, but its first bit below that; a number below 0 stands for a scale that is NaN.
    """
    return torch.where(stored > 0, stored << _EXPONENT_BIT, 1 << (_EXPONENT_BIT - 1)).to(torch.int32).view(torch.float32)


def _divide_columns(matrix: Tensor, scales: Tensor) -> Tensor:
    """Return [rows, scales of a row, columns of a scale]."""
    return matrix.reshape(*scales.shape, matrix.size(1) // scales.size(1))


#: name of a format in `QUANTIZED_FORMATS` -> its numbers
NUMBER_FORMATS: dict[str, NumberFormat] = {
    "int8": _Integers(127),
    "mxfp8": _MicroscalingFp8(),
    "w4a8": _Int4(7),
    "w4a8_dynamic": _Int4Pairs(7),
}
