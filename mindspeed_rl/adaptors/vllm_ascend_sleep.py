"""Sleep of vllm-ascend without a host copy of the weights that the next weight sync replaces.

vllm-ascend's sleep level 1 copies all memory of the weights to the host; level 2 drops it, also tensors that no checkpoint has
and no buffer registers: rotary tables, scales in float32, matrices that attention computes. Here the engine sleeps at level 2,
and the bytes of the weights' memory that no weight sync writes are kept, whatever tensors they belong to. What a sync writes
is read from its plan, and its proof finds everything that was not written.

| symbol of vllm_ascend.device_allocator.camem | use |
|---|---|
| CaMemAllocator.get_instance().pointer_to_data | address -> allocation, with `handle` (device, bytes, ...) and `tag` |
| memcpy | copies between addresses, pyACL's |

It can go when vllm-ascend's sleep takes the tensors that it need not keep.

Not verified on NPU hardware.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mindspeed_rl import platform

_ALLOCATOR = "vllm_ascend.device_allocator.camem"
_TAG = "weights"
_TO_DEVICE, _TO_HOST = 1, 2

#: first address, and the address after the last
_Range = tuple[int, int]


@dataclass(frozen=True)
class KeptMemory:
    """Content of an engine's memory while it sleeps.

    Attributes:
        copies: (address, its bytes in host memory).
    """

    copies: tuple[tuple[int, Tensor], ...]

    @classmethod
    def save(cls, replaced: Iterable[Tensor]) -> KeptMemory:
        """Copy the weights' memory to the host, without these tensors, each of which is dense in memory."""
        camem: Any = importlib.import_module(_ALLOCATOR)
        platform.current().synchronize()
        blocks = [
            (address, address + data.handle[1])
            for address, data in camem.CaMemAllocator.get_instance().pointer_to_data.items()
            if data.tag == _TAG
        ]
        taken = [(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in replaced]
        left = list(subtract_ranges(blocks, taken))
        sizes = [stop - start for start, stop in left]
        content = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=platform.current().pin_memory)
        copies = tuple((start, copy) for (start, _), copy in zip(left, content.split(sizes)))
        for address, copy in copies:
            _copy(copy.data_ptr(), address, copy.nbytes, _TO_HOST)
        return cls(copies)

    def restore(self) -> None:
        """Write the copies to where they were; the memory is mapped again."""
        for address, copy in self.copies:
            _copy(address, copy.data_ptr(), copy.nbytes, _TO_DEVICE)

    @property
    def num_bytes(self) -> int:
        """Bytes in host memory."""
        return sum(copy.nbytes for _, copy in self.copies)


def subtract_ranges(blocks: Iterable[_Range], taken: Iterable[_Range]) -> Iterator[_Range]:
    """Yield what is left of the blocks without the ranges, in order; ranges may overlap and be outside of all blocks."""
    ranges = sorted(taken)
    for start, stop in sorted(blocks):
        for first, last in ranges:
            if first >= stop:
                break
            if start < first:
                yield start, first
            start = max(start, last)
        if start < stop:
            yield start, stop


def _copy(target: int, source: int, size: int, kind: int) -> None:
    code = importlib.import_module(_ALLOCATOR).memcpy(target, size, source, size, kind)
    if code:
        raise RuntimeError(f"rollout engine: copying {size} bytes between host and device failed with error {code} of CANN.")
