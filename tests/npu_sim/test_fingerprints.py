"""The fingerprints of a weight sync on the device: the numbers of the host, and few kernels."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mindspeed_rl.resharding.bit_sums import sum_groups


class Counted(TorchDispatchMode):
    """Counts the calls that compute something on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not any(
            a.alias_info and not a.alias_info.is_write for a in function._schema.returns
        ):
            self.calls[function._schema.name.removeprefix("aten::")] += result.device.type == "npu"
        return result


def full(tensor: torch.Tensor) -> tuple[tuple[tuple[int, int], ...], torch.Tensor]:
    return tuple((0, size) for size in tensor.shape), tensor


def test_the_device_computes_the_fingerprints_of_the_host_with_few_kernels_for_many_tensors() -> None:
    generator = torch.Generator().manual_seed(0)
    experts = torch.randn(8, 2 * 24, 64, generator=generator).to(torch.bfloat16)
    host = [torch.randn(48, 64, generator=generator), torch.randn(64, generator=generator).to(torch.bfloat16)]

    def groups(device: str) -> list[list[Any]]:
        stacked, (matrix, vector) = experts.to(device), [tensor.to(device) for tensor in host]
        halves = [half for expert in stacked for half in expert.chunk(2)]
        return [[full(each)] for each in (matrix, matrix.t(), vector, *halves)]

    expected, parts = sum_groups(groups("cpu")), groups("npu")
    assert torch.equal(sum_groups(parts), expected)  # and the weights are on the device
    with Counted() as counted:
        assert torch.equal(sum_groups(parts), expected)
    # two matrices by themselves: bits as 64-bit integers, times the weights of columns, sum, times the weights of rows, sum;
    # the vector and all halves of all experts are copied below one another, as are their rows' weights, without the last sum
    assert +counted.calls == {"_to_copy": 3, "mul_": 6, "sum": 5, "cat": 3}
    # many more of them cost no more
    halves = [torch.randn(24, 64, generator=generator).to(torch.bfloat16) for _ in range(100)]
    on_device = [half.to("npu") for half in halves]
    with Counted() as counted:
        sums = sum_groups([full(half)] for half in on_device)
    assert torch.equal(sums, sum_groups([full(half)] for half in halves))
    assert +counted.calls == {"_to_copy": 1, "mul_": 2, "sum": 1, "cat": 3}
