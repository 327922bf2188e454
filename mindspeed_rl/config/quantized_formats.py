"""Number formats of quantized matrices in rollout engines (`generate_config.quantization`); `number_formats` computes them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class QuantizedFormat:
    """Size of a matrix in one format.

    Attributes:
        weights: weights and their scales, as a phrase.
        tokens: activations and their scales, as a phrase.
        element_bits: bits of an element; elements below a byte share one.
        block: consecutive elements of a row that share a scale; None for a full row.
        scale_bytes: bytes of a scale; None: as many as the engine's `dtype` has.
        is_emulated: the CPU has no kernel, and computes the products in float32 from dequantized copies.
        absent_on_npu: reason why NPUs do not have it; "" where they do.
        npu_devices: NPUs that have it, as a phrase; "" where all do.
        absent_npus: the planner's names of those that do not.
    """

    weights: str
    tokens: str
    element_bits: int
    block: int | None
    scale_bytes: int | None
    is_emulated: bool
    absent_on_npu: str = ""
    npu_devices: str = ""
    absent_npus: tuple[str, ...] = ()

    @property
    def elements_per_byte(self) -> int:
        """Elements that share a byte."""
        return 8 // self.element_bits

    def count_scales(self, columns: int) -> int:
        """Return the number of scales of a row."""
        return 1 if self.block is None else columns // self.block

    def count_bytes(self, shapes: Iterable[tuple[int, int]], itemsize: int) -> int:
        """Return the bytes of matrices of these shapes, with their scales, where `dtype` has `itemsize` bytes."""
        scale = self.scale_bytes or itemsize
        return sum(
            rows * (math.ceil(columns * self.element_bits / 8) + self.count_scales(columns) * scale) for rows, columns in shapes
        )


#: value of `generate_config.quantization` -> its format
QUANTIZED_FORMATS: dict[str, QuantizedFormat] = {
    "int8": QuantizedFormat("int8, a scale per row", "int8, a scale per token", 8, None, None, is_emulated=False),
    "mxfp8": QuantizedFormat(
        "E4M3, a power of two per 32 elements of a row",
        "E4M3, a power of two per 32 elements of a token",
        *(8, 32, 1),
        is_emulated=True,
        npu_devices="an Ascend 950",
        absent_npus=("A2", "A3"),
    ),
    "w4a8": QuantizedFormat(
        "int4, a scale per 32 elements of a row",
        "int8, a scale per token",
        *(4, 32, None),
        is_emulated=True,
        absent_on_npu="vllm-ascend's W4A8_DYNAMIC is another number format: its linear layers multiply int4 weights by 16-bit "
        "activations, and its experts have scales in float16; int8 works",
    ),
}
