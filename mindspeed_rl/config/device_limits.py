"""Numbers of kernels and engines that planner, platforms and adaptors share."""

from __future__ import annotations

#: matrices of at least so many elements are stored a second time by the CPU's engine, packed for its kernel, while it generates
PACKED_ELEMENTS = 1 << 13
#: rows of a 16-bit head that are converted to float32 at a time (`Platform.float32_product`)
HEAD_ROWS = 8192

#: ranks of adapters that vLLM has room for
_ADAPTER_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)


def engine_adapter_rank(rank: int) -> int:
    """Return the rank of adapters that an engine is built for, where this rank is pushed (`lora_push: adapter`)."""
    return next(size for size in _ADAPTER_RANKS if size >= rank)
