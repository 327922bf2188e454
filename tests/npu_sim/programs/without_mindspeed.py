"""The least that Megatron needs on an NPU when there is no MindSpeed: for tests of the engine on machines that lack it.

torch.cuda means torch.npu (as MindSpeed does it), Megatron's optimizer accepts the device's tensor types, and the engine
uses its own norm. Attention is the fused one.
"""

from __future__ import annotations


def install() -> None:
    """Patches this process; must run before megatron.core is imported."""
    import torch
    from torch_npu.contrib import transfer_to_npu  # noqa: F401

    from mindspeed_rl import adaptors
    from mindspeed_rl.adaptors import megatron_cpu
    from mindspeed_rl.platform.npu import NpuPlatform

    torch.cuda.get_device_capability = lambda device=None: (0, 0)  # torch's broadcast asks for it
    NpuPlatform.megatron_kernels = False
    adaptors.FUSED_MODULES.clear()
    torch.compile = lambda function=None, **settings: function if function is not None else lambda inner: inner
    megatron_cpu._TYPE_NAMES = {name: name.replace("cuda", "npu") for name in megatron_cpu._TYPE_NAMES}
    from megatron.core import optimizer
    from megatron.core.optimizer import clip_grads, distrib_optimizer
    from megatron.core.optimizer import optimizer as mixed_precision

    megatron_cpu._optimizer_package(optimizer)
    megatron_cpu._optimizer(mixed_precision)
    megatron_cpu._distributed_optimizer(distrib_optimizer)
    megatron_cpu._clip_grads(clip_grads)
