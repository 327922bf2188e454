"""Number formats of quantized matrices in rollout engines (`generate_config.quantization`); `number_formats` computes them.

A value of the key is a format of that name, or another one on a device kind (`find_format`). A format of experts names the one
that all other matrices have next to it (`name_matrix_format` in `models.quantized_names`).
"""

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
        scale_bytes: bytes of a scale in an engine; None: as many as the engine's `dtype` has.
        is_emulated: the CPU has no kernel, and computes the products in float32 from dequantized copies.
        pairs_rows: elements that share a byte are those of a column in two consecutive rows, else those of a row in two
            consecutive columns.
        row_bytes: further bytes of a row in an engine.
        others: format of the matrices that do not belong to experts; None: the same.
        npu_devices: NPUs that have it, as a phrase; "" where all do.
        absent_npus: the planner's names of those that do not.
    """

    weights: str
    tokens: str
    element_bits: int
    block: int | None
    scale_bytes: int | None
    is_emulated: bool
    pairs_rows: bool = False
    row_bytes: int = 0
    others: str | None = None
    npu_devices: str = ""
    absent_npus: tuple[str, ...] = ()

    @property
    def elements_per_byte(self) -> int:
        """Elements that share a byte."""
        return 8 // self.element_bits

    @property
    def rows_per_byte(self) -> int:
        """Rows whose elements share a byte."""
        return self.elements_per_byte if self.pairs_rows else 1

    @property
    def columns_per_byte(self) -> int:
        """Columns whose elements share a byte."""
        return 1 if self.pairs_rows else self.elements_per_byte

    def count_scales(self, columns: int) -> int:
        """Return the number of scales of a row."""
        return 1 if self.block is None else columns // self.block

    def count_bytes(self, shapes: Iterable[tuple[int, int]], itemsize: int) -> int:
        """Return the bytes of matrices of these shapes, with their scales, where `dtype` has `itemsize` bytes."""
        scale = self.scale_bytes or itemsize
        return sum(
            math.ceil(rows * columns * self.element_bits / 8) + rows * (self.count_scales(columns) * scale + self.row_bytes)
            for rows, columns in shapes
        )


#: name -> format
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
        "int4, a scale per 32 elements of a row", "int8, a scale per token", *(4, 32, None), is_emulated=True
    ),
    # the only one of A2 and A3: their kernel takes groups of 256, scales in 8 bytes, and a float32 per row beside them
    "w4a8_dynamic": QuantizedFormat(
        "int4, a scale in float16 per 256 elements of a row",
        "int8, a scale per token",
        *(4, 256, 8),
        is_emulated=False,
        pairs_rows=True,
        row_bytes=4,
        others="int8",
    ),
}
#: value of `generate_config.quantization` -> device kind -> its format there
_FORMATS_OF_KINDS = {"w4a8": {"npu": "w4a8_dynamic"}}
#: elements of a row of an expert in MXFP8 whose scales engines on NPUs store together: of two blocks
PAIRED_EXPERTS = 64
#: values of `generate_config.quantization`
QUANTIZATIONS = ("int8", "mxfp8", "w4a8")


def find_format(quantization: str, kind: str) -> str:
    """Return the name of the format of a value of `generate_config.quantization` on a device kind."""
    return _FORMATS_OF_KINDS.get(quantization, {}).get(kind, quantization)
