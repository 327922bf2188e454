"""CPU kernels for every aten operator that torch_npu implements for its device."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch_npu  # noqa: F401
from torch.utils._pytree import tree_map

from simulator import calls
from simulator.graphs import recorded
from simulator.memory import choose_seed, cpu_view, device_copy

#: operators whose torch_npu kernels only deal with memory and metadata: they stay real
KEPT = frozenset(
    "empty empty_strided as_strided view _reshape_alias unfold squeeze unsqueeze view_as_real view_as_complex set_ resize_ "
    "_to_copy to _pin_memory is_pinned record_stream contiguous is_set_to _resize_output_ npu_get_storage_size".split()
)


def _run(op: Callable, name: str, is_random: bool, args: tuple, kwargs: dict) -> Any:
    """Calls `op` on CPU views of the device arguments and returns device results."""
    calls[name] += 1
    device: torch.device | None = None
    generator: torch.Generator | None = None
    # id of the view -> (view, device tensor); a tensor of the host, such as the target of a copy, is its own view
    originals: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def to_cpu(value: Any) -> Any:
        nonlocal device, generator
        if isinstance(value, torch.Generator):
            generator = value
            return None
        if isinstance(value, torch.Tensor) and value.device.type == "npu":
            device = device or value.device
            view = cpu_view(value)
            originals[id(view)] = (view, value)
            return view
        if isinstance(value, torch.Tensor):
            originals[id(value)] = (value, value)
            return value
        if isinstance(value, torch.device) and value.type == "npu":
            device = device or value
            return torch.device("cpu")
        return value

    args = tree_map(to_cpu, args)
    kwargs = {key: None if key == "pin_memory" else tree_map(to_cpu, value) for key, value in kwargs.items()}
    if device is None or device.type != "npu":
        device = torch.device("npu", torch.npu.current_device())
    if is_random:
        with torch.random.fork_rng(devices=[]):
            # torch.manual_seed would give this seed to the device's generator too
            torch.default_generator.manual_seed(choose_seed(device, generator))
            result = op(*args, **kwargs)
    else:
        result = op(*args, **kwargs)
    for view, original in originals.values():  # out= and in-place operators may have resized their argument
        if view.size() != original.size():
            original.resize_(view.size())
            cpu_view(original).copy_(view)

    def to_device(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) in originals:
            return originals[id(value)][1]
        return device_copy(value, device) if value.device.type == "cpu" else value

    if isinstance(result, (tuple, list)):
        return type(result)(map(to_device, result)) if type(result) in (tuple, list) else tuple(map(to_device, result))
    return to_device(result)


#: what a captured graph cannot have: the host, or the shape of the result, needs values
_WAITS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


def _has_mask(values: torch.Tensor, indices: list[torch.Tensor | None]) -> bool:
    """True where the shape of `values[indices]` depends on values: with a boolean mask, not with integer indices."""
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


def _kernel(op: Any, name: str) -> Callable:
    is_random = torch.Tag.nondeterministic_seeded in op.tags
    waits = _has_mask if name == "aten::index.Tensor" else not _WAITS.isdisjoint(op.tags)
    return recorded(name, lambda *args, **kwargs: _run(op, name, is_random, args, kwargs), waits)


def _matmul_backward(grad: torch.Tensor, left: torch.Tensor, right: torch.Tensor, mask: list[bool]) -> tuple:
    """torch_npu's own matmul backward, which aten has no CPU kernel for."""
    calls["aten::matmul_backward"] += 1
    upstream, a, b = (cpu_view(tensor).float() for tensor in (grad, left, right))
    if b.dim() == 1:
        grad_a = upstream.unsqueeze(-1) * b
        grad_b = (a * upstream.unsqueeze(-1)).reshape(-1, b.shape[0]).sum(0)
    else:
        grad_a = (upstream @ b.transpose(-1, -2)).sum_to_size(a.shape)
        grad_b = (a.transpose(-1, -2) @ upstream).sum_to_size(b.shape)
    return device_copy(grad_a.to(left.dtype), grad.device), device_copy(grad_b.to(right.dtype), grad.device)


def _histc(values: torch.Tensor, bins: int = 100, min: float = 0, max: float = 0) -> torch.Tensor:
    """Counts in the type of the values, whole numbers too, which the CPU does not count."""
    calls["aten::histc"] += 1
    counts = torch.histc(cpu_view(values).float(), bins, min, max)
    return device_copy(counts.to(values.dtype), values.device)


def _attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """scaled_dot_product_attention by its mathematical decomposition (torch_npu sends it to a fused kernel)."""
    return torch.ops.aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
    )[0]


def _softmax(values: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """softmax by the operator that has a backward pass (torch_npu calls the kernel of a 950 before autograd)."""
    return torch.ops.aten._softmax(values if dtype is None else values.to(dtype), dim, False)


_library = torch.library.Library("aten", "IMPL")


def install() -> int:
    """Overrides the kernels and returns how many."""
    count = 0
    for full_name in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = full_name.partition("::")
        base, _, overload = rest.partition(".")
        if namespace != "aten" or base in KEPT or base in ("matmul_backward", "scaled_dot_product_attention"):
            continue
        if not torch._C._dispatch_has_kernel_for_dispatch_key(full_name, "PrivateUse1"):
            continue
        packet = getattr(torch.ops.aten, base, None)
        if packet is None or (overload or "default") not in packet.overloads():
            continue  # registered for TorchScript only: Python cannot reach it either
        op = getattr(packet, overload or "default")
        _library.impl(op, _kernel(op, full_name), "PrivateUse1", allow_override=True)
        count += 1
    _library.impl("histc", recorded("aten::histc", _histc), "PrivateUse1", allow_override=True)
    _library.impl("matmul_backward", recorded("aten::matmul_backward", _matmul_backward), "PrivateUse1", allow_override=True)
    one_hot = _kernel(torch.ops.aten.one_hot.default, "aten::one_hot")  # of whole numbers, which have no gradient
    for key in ("AutogradPrivateUse1", "PrivateUse1"):
        _library.impl("scaled_dot_product_attention", _attention, key, allow_override=True)
        _library.impl("one_hot", one_hot, key, allow_override=True)
        if os.environ.get("NPU_SIM_SOC", "").startswith("Ascend950"):
            _library.impl("softmax.int", _softmax, key, allow_override=True)
    return count
