"""The least that Megatron needs on an NPU when there is no MindSpeed: for tests of the engine on machines that lack it.

torch.cuda means torch.npu and the device's tensor types have a GPU's names (as MindSpeed does both), and the engine uses its
own norm. Attention is the fused one, rotation of packed sequences the suite's.
"""

from __future__ import annotations

from typing import Any


def install() -> None:
    """Patches this process; must run before megatron.core is imported."""
    import torch
    from torch_npu.contrib import transfer_to_npu  # noqa: F401

    from mindspeed_rl import adaptors
    from mindspeed_rl.adaptors import megatron_cpu, packed_rope
    from mindspeed_rl.platform.npu import NpuPlatform

    torch.cuda.get_device_capability = lambda device=None: (0, 0)  # torch's broadcast asks for it
    NpuPlatform.megatron_kernels = False
    adaptors._KERNELS.pop(("npu", "transformer_settings"), None)
    torch.compile = lambda function=None, **settings: function if function is not None else lambda inner: inner
    real_type = torch.Tensor.type

    def type_named_as_on_cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = real_type(self, *args, **kwargs)
        return result.replace("torch.npu.", "torch.cuda.") if isinstance(result, str) else result

    torch.Tensor.type = type_named_as_on_cuda
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    megatron_cpu._optimizer_package(optimizer)
    distrib_optimizer.Adam, distrib_optimizer.HAVE_APEX_OR_TE, distrib_optimizer.USING_APEX_OPTIMIZER = (
        megatron_cpu.AdamW, True, True,
    )  # fmt: skip
    packed_rope.apply()
