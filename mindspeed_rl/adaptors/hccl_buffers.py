"""Buffer sizes of single HCCL communicators, by Megatron's names of process groups.

| patch of ours | symbol | why |
|---|---|---|
| group options | megatron.core.parallel_state.get_nccl_options | Megatron asks it for every group it makes, and it knows NCCL's options only |

Each communicator holds two buffers on the device, of `rl_config.hccl_buffersize` MiB unless told otherwise: with a dozen
groups that is gigabytes, and groups that exchange little can do with less. MindSpeed has the feature under the same key, but
imports `megatron.training` for it, which the megatron-core package does not have; once it does without, this file can go.

Run on the simulated NPU; not verified on NPU hardware.
"""  # noqa: E501

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from mindspeed_rl import platform

#: the groups that Megatron-core 0.16 makes, by the names it asks options for
GROUPS = (
    "cp", "dp", "dp_cp", "embd", "ep", "ep_dp", "ep_tp", "hcp", "inter_ep_dp", "intra_dist_opt_instance", "intra_dp_cp",
    "intra_ep_dp", "mp", "pos_embd", "pp", "tp", "tp_cp", "tp_dp", "tp_dp_cp", "tp_ep_mp", "tp_ep_pp",
)  # fmt: skip


def parse(text: str | None) -> dict[str, int]:
    """Group name -> MiB from a key like "tp:256;dp:64" (commas do too).

    Raises:
        ValueError: a part is not group:MiB, or Megatron has no such group.
    """
    sizes: dict[str, int] = {}
    for part in (text or "").replace(",", ";").split(";"):
        if not part.strip():
            continue
        name, _, size = (piece.strip() for piece in part.partition(":"))
        if not size.isdigit() or int(size) < 1:
            raise ValueError(f"hccl_group_buffer: '{part.strip()}' is not a group with its MiB, like tp:256.")
        if name not in GROUPS:
            raise ValueError(f"hccl_group_buffer: '{name}' is not one of Megatron's groups {', '.join(GROUPS)}.")
        sizes[name] = int(size)
    return sizes


def apply(sizes: Mapping[str, int]) -> None:
    """Gives groups that `initialize_model_parallel` makes from now on buffers of these sizes (MiB)."""
    from megatron.core import parallel_state

    theirs = parallel_state.get_nccl_options

    @functools.wraps(theirs)
    def options(pg_name: str, nccl_comm_cfgs: dict[str, Any]) -> Any:
        if pg_name in sizes:
            return platform.current().process_group_options(pg_name, sizes[pg_name])
        return theirs(pg_name, nccl_comm_cfgs)

    parallel_state.get_nccl_options = options
