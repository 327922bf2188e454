"""Products fused with a collective of the tensor parallel group.

| stand-in | in place of |
|---|---|
| `npu::npu_all_gather_base_mm` | aclnnAllGatherMatmul |
| `npu::npu_mm_reduce_scatter_base` | aclnnMatmulReduceScatter |

Both get the name of a communicator, which is looked up at each call, and compute what the two operators one after the other do.
What the operators' documents exclude is an error: other types than float16 and bfloat16, fewer than 256 or more than 65,534
columns of the left matrix, a left matrix that is a transposed view, rows that do not divide, groups of other sizes.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from simulator.mc2 import Communicator

Tensor = torch.Tensor
#: HCCL's numbers of types and of the sum
_TYPES, _SUM = {torch.float16: 3, torch.bfloat16: 11}, 0
_SIZES = (2, 4, 8, 16)


def _find_group(
    operator: str, left: Tensor, right: Tensor, hcom: str, world_size: int, settings: dict[str, Any]
) -> Communicator:
    refused = {name: value for name, value in settings.items() if value not in (None, 0, True, "sum")}
    if refused or left.dtype not in _TYPES or right.dtype != left.dtype or left.dim() != 2 or right.dim() != 2:
        raise RuntimeError(f"{operator}: {left.dtype} {tuple(left.shape)}, {right.dtype} {tuple(right.shape)}, {refused}")
    fits = 256 <= left.shape[1] < 65535 and left.shape[1] == right.shape[0] and left.is_contiguous()
    if not fits or world_size not in _SIZES:
        raise RuntimeError(f"{operator}: [m, k] {tuple(left.shape)} times {tuple(right.shape)} on {world_size} devices")
    library = ctypes.CDLL("libhccl.so")
    handle, rank = ctypes.c_void_p(), ctypes.c_uint32()
    if not library.HcomGetCommHandleByGroup(hcom.encode(), ctypes.byref(handle)):
        library.HcclGetRankId(handle, ctypes.byref(rank))
    return Communicator(operator, hcom, world_size, rank.value)


def _all_gather_product(input: Tensor, x2: Tensor, hcom: str, world_size: int, **settings: Any) -> tuple[Tensor, Tensor]:
    """Returns all devices' rows times x2, and these rows."""
    group = _find_group("npu_all_gather_base_mm", input, x2, hcom, world_size, settings)
    gathered = input.new_empty(world_size * len(input), input.shape[1])
    addresses = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (input, gathered))
    kind = _TYPES[input.dtype]
    group.check(group.library.HcclAllGather(*addresses, ctypes.c_uint64(input.numel()), kind, group.handle, None))
    return gathered @ x2, gathered


def _product_reduce_scatter(self: Tensor, x2: Tensor, hcom: str, world_size: int, **settings: Any) -> Tensor:
    """Returns this device's rows of the sum of all devices' products."""
    group = _find_group("npu_mm_reduce_scatter_base", self, x2, hcom, world_size, settings)
    if len(self) % world_size:
        raise RuntimeError(f"npu_mm_reduce_scatter_base: {len(self)} rows on {world_size} devices")
    product = (self @ x2).contiguous()
    share = product.new_empty(len(self) // world_size, product.shape[1])
    addresses = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (product, share))
    kind = _TYPES[self.dtype]
    group.check(group.library.HcclReduceScatter(*addresses, ctypes.c_uint64(share.numel()), kind, _SUM, group.handle, None))
    return share


KERNELS = {"npu_all_gather_base_mm": _all_gather_product, "npu_mm_reduce_scatter_base": _product_reduce_scatter}
