"""Experts of a layer in one tensor, as gpt-oss is stored; elsewhere each expert has its own matrices, as in other families.

Qwen3-VL-MoE is published and written so too, without biases and with gate and up as halves (hf.py reads it), because
transformers' class reads stacks only.

    model.layers.0.mlp.experts.gate_up_proj        [experts, inputs, 2 x outputs], gate and up in alternate columns
    model.layers.0.mlp.experts.gate_up_proj_bias   [experts, 2 x outputs]
    model.layers.0.mlp.experts.down_proj           [experts, inputs, outputs], and down_proj_bias

Published weights are in MXFP4 (OCP Microscaling Formats 1.0): 4-bit floats, of which 32 along the inputs share a power of two.
They are read as bfloat16, exactly: ``gate_up_proj_blocks`` [experts, 2 x outputs, inputs / 32, 16] has two numbers a byte, the
first one in the low half, and ``gate_up_proj_scales`` [experts, 2 x outputs, inputs / 32] the exponents plus 127.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mindspeed_rl.adaptors.vllm_stacked_experts import find_stack, join_parts
from mindspeed_rl.checkpoint.tensor_record import TensorRecord

_STORED = re.compile(r"^(.+\.mlp\.experts)\.(gate_up|down)_proj(_bias|_blocks|_scales)?$")
#: the 4-bit floats in the order of their bits: sign, two bits of exponent, one of mantissa
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
#: numbers that share a scale
_BLOCK = 32


@dataclass(frozen=True)
class _PartRecord(TensorRecord):
    """A matrix [outputs, inputs] or bias of one expert in a stack; to be read, not written.

    Args:
        stored: the expert's share of the stack.
        first, step: its columns there.
    """

    stored: TensorRecord
    first: int
    step: int

    def read(self, dim: int = 0, start: int = 0, stop: int | None = None) -> Tensor:
        tensor = self.stored.read().t()[self.first :: self.step]
        return tensor if stop is None else tensor.narrow(dim, start, stop - start)


@dataclass(frozen=True)
class _Mxfp4Record(_PartRecord):
    """The same in MXFP4.

    Args:
        scales: scales of `stored`, whose rows are outputs.
    """

    scales: TensorRecord

    def read(self, dim: int = 0, start: int = 0, stop: int | None = None) -> Tensor:
        blocks, scales = (record.read()[self.first :: self.step] for record in (self.stored, self.scales))
        if stop is not None and dim == 0:
            blocks, scales = blocks[start:stop], scales[start:stop]
        values = torch.tensor([*_FP4, *(-value for value in _FP4)], dtype=torch.bfloat16)
        halves = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2)
        tensor = torch.ldexp(values[halves.int()], (scales.int() - 127)[..., None]).to(torch.bfloat16).flatten(1)
        return tensor.narrow(dim, start, stop - start) if stop is not None and dim == 1 else tensor


def is_stack(name: str) -> bool:
    """Return whether a stored tensor has the experts of a layer, or their scales."""
    return _STORED.match(name) is not None


def separate_stacks(records: Mapping[str, TensorRecord]) -> tuple[dict[str, TensorRecord], frozenset[str]]:
    """Return the matrices of single experts, and the stored tensors that they are taken from.

    Raises:
        ValueError: a tensor in MXFP4 has no scales, or they are of another shape.
    """
    separate: dict[str, TensorRecord] = {}
    stored: set[str] = set()
    for name, record in records.items():
        match = _STORED.match(name)
        if match is None or len(record.shape) < 2:
            continue
        stored.add(name)
        block, stem, kind = match.groups()
        if kind == "_scales":
            continue
        parts = ("gate", "up") if stem == "gate_up" else ("down",)
        scales = None
        if kind == "_blocks":
            scales = records.get(name.removesuffix("blocks") + "scales")
            if scales is None or (*scales.shape, _BLOCK // 2) != record.shape:
                actual, expected = None if scales is None else list(scales.shape), list(record.shape[:3])
                raise ValueError(f"{name} of shape {list(record.shape)} has scales of shape {actual}; expected {expected}")
        for expert in range(record.shape[0]):
            share = record.rows(expert, expert + 1).reshaped(*record.shape[1:])
            for first, part in enumerate(parts):
                if scales is not None:
                    shape: tuple[int, ...] = (record.shape[1] // len(parts), record.shape[2] * _BLOCK)
                    its_scales = scales.rows(expert, expert + 1).reshaped(*scales.shape[1:])
                    matrix: TensorRecord = _Mxfp4Record(
                        record.path, share.offset, shape, torch.bfloat16, share, first, len(parts), its_scales
                    )
                else:
                    shape = (share.shape[-1] // len(parts), *share.shape[:-1])
                    matrix = _PartRecord(record.path, share.offset, shape, record.dtype, share, first, len(parts))
                separate[f"{block}.{expert}.{part}_proj.{'bias' if kind == '_bias' else 'weight'}"] = matrix
    return separate, frozenset(stored)


def stack_shapes(
    entries: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return the same tensors with the experts of each layer in one, in the place of the first."""
    counts: dict[str, int] = {}
    stacked: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for name, (dtype, shape) in entries.items():
        place = find_stack(name)
        if place is None:
            stacked[name] = dtype, shape
            continue
        stack, expert, part = place
        counts[stack] = max(counts.get(stack, 0), expert + 1)
        outputs, *inputs = shape
        stacked[stack] = dtype, (counts[stack], *inputs, outputs if part == "down" else 2 * outputs)
    return stacked


@dataclass(frozen=True)
class StackTarget:
    """The share of one expert in a stack of an HF folder.

    Args:
        name: name of the stack.
        record: the share.
        hf: the matrices of the expert that it is made of.
        alternate: as of `join_parts`.
    """

    name: str
    record: TensorRecord
    hf: tuple[str, ...]
    alternate: bool = True

    @property
    def num_bytes(self) -> int:
        return self.record.num_bytes

    def write(self, tensors: Mapping[str, Tensor]) -> bool:
        parts = {_find_part(name): tensors[name] for name in self.hf}
        return self.record.write(join_parts(parts, alternate=self.alternate).contiguous())


def _find_part(name: str) -> str:
    place = find_stack(name)
    assert place is not None, name
    return place[2]


def list_targets(
    records: Mapping[str, TensorRecord], names: Sequence[str], *, alternate: bool = True
) -> list[StackTarget]:
    """Return what fills the stacks in an HF folder.

    Args:
        records: records of the stored tensors.
        names: names of all tensors of the model, each expert by itself.
        alternate: as of `join_parts`.
    """
    shares: dict[tuple[str, int], list[str]] = {}
    for name in names:
        place = find_stack(name)
        if place is not None and place[0] in records:
            shares.setdefault(place[:2], []).append(name)
    targets = []
    for (stack, expert), parts in shares.items():
        record = records[stack].rows(expert, expert + 1).reshaped(*records[stack].shape[1:])
        targets.append(StackTarget(stack, record, tuple(parts), alternate))
    return targets
