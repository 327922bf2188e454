"""A simulated NPU: the unmodified torch_npu wheel on the fake CANN runtime of `tests/npu_sim/cann`.

Allocation, views, storages, streams, the caching allocator, random generators, autograd and ProcessGroupHCCL are the real
torch_npu C++. What is replaced are kernels: every aten operator that has one for the device, and the fused `npu::`
operators our stack uses, compute on a CPU view of the same bytes. An operator that is neither fails in torch_npu itself
("aclnnXxx ... not in libopapi.so"), so nothing is quietly skipped.

`install()` must run once per process before the device is used; `calls` counts operators by name.
"""

from __future__ import annotations

import warnings
from collections import Counter

warnings.filterwarnings("ignore", message=".*(verriding|ASCEND_HOME|internal format).*")

#: operator name -> number of calls since the process started or since `calls.clear()`
calls: Counter[str] = Counter()

_installed = False


def install() -> None:
    """Gives every operator of the npu device a CPU kernel; a second call changes nothing."""
    global _installed
    import torch  # loads torch_npu, after which the hook of `site` has called this function already

    if _installed:
        return
    from simulator import aten, fused, graphs, rollout

    aten.install()
    fused.install()
    rollout.install()
    graphs.install()
    _installed = True
