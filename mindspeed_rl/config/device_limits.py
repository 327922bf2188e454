"""Numbers of kernels and engines that planner, platforms and adaptors share."""

from __future__ import annotations

#: matrices of at least so many elements are stored a second time by the CPU's engine, packed for its kernel, while it generates
PACKED_ELEMENTS = 1 << 13
#: rows of a 16-bit head that are converted to float32 at a time (`Platform.float32_product`)
HEAD_ROWS = 8192
#: float32 weights that a step of AdamW puts together at a time (`reuse_fp32_param`): buffers are small beside any model, and
#: kernels are many fewer than parameters
SPLIT_WINDOW = 16 << 20
#: bytes of these buffers for each number: the float32 weight, what it is rounded to, and ties as integers and as truth values
SPLIT_BUFFERS = 4 + 4 + 4 + 1

#: ranks of adapters that vLLM has room for
_ADAPTER_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)


def engine_adapter_rank(rank: int) -> int:
    """Return the rank of adapters that an engine is built for, where this rank is pushed (`lora_push: adapter`)."""
    return next(size for size in _ADAPTER_RANKS if size >= rank)
