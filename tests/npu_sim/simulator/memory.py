"""CPU views of device tensors: the simulated device is host memory, so no byte moves; and seeds of its generators."""

from __future__ import annotations

import hashlib

import torch


def cpu_view(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor over the same bytes, shape and strides; it does not keep the device tensor alive."""
    storage = tensor.untyped_storage()
    size = storage.nbytes()
    if size == 0:
        alias = torch.UntypedStorage(0)
    else:
        alias = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), torch.device("cpu"), size)
    return torch.empty(0, dtype=tensor.dtype).set_(alias, tensor.storage_offset(), tensor.size(), tensor.stride())


def device_copy(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A device tensor with the values and, where they are dense, the strides of a CPU tensor."""
    if not tensor.is_contiguous() and not torch._prims_common.is_non_overlapping_and_dense_or_false(tensor):
        tensor = tensor.contiguous()
    copy = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
    if tensor.numel():
        cpu_view(copy).copy_(tensor)
    return copy


def choose_seed(device: torch.device, given: torch.Generator | None = None) -> int:
    """A CPU seed derived from a generator's state, the device's own where none is given; advances it as one kernel would."""
    generator = torch.npu.default_generators[device.index or 0] if given is None else given
    if generator.device.type != "npu":
        raise RuntimeError(f"a generator of {generator.device} cannot draw on the device")
    state = bytes(generator.get_state().tolist())
    offset = int.from_bytes(state[-8:], "little") + 4
    advanced = state[:-8] + offset.to_bytes(8, "little")
    generator.set_state(torch.tensor(list(advanced), dtype=torch.uint8))
    return int.from_bytes(hashlib.sha256(state).digest()[:6], "little")
