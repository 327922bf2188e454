"""Buffer sizes of single HCCL communicators, by Megatron's names of process groups.

| patch of ours | symbol | why |
|---|---|---|
| group options | megatron.core.parallel_state.get_nccl_options | Megatron asks it for every group it makes, and it knows NCCL's options only |

Each communicator holds two buffers on the device, of `rl_config.hccl_buffersize` MiB by default: with a dozen
groups that is gigabytes, and groups that exchange little can do with less. MindSpeed has the feature under the same key, but
imports `megatron.training` for it, which the megatron-core package does not have; once it does without, this file can go.

Run on the simulated NPU; not verified on NPU hardware.
"""  # noqa: E501

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from mindspeed_rl import platform


def apply(sizes: Mapping[str, int]) -> None:
    """Give groups that `initialize_model_parallel` makes from now on buffers of these sizes (MiB)."""
    from megatron.core import parallel_state

    theirs = parallel_state.get_nccl_options

    @functools.wraps(theirs)
    def options(pg_name: str, nccl_comm_cfgs: dict[str, object]) -> Any:
        if pg_name in sizes:
            return platform.current().process_group_options(pg_name, sizes[pg_name])
        return theirs(pg_name, nccl_comm_cfgs)

    parallel_state.get_nccl_options = options
