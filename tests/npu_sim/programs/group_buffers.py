"""Two tensor parallel pairs whose groups have buffers of 64 MiB; all other groups keep the default."""

from __future__ import annotations

import ctypes
import os

from ranks import report


def main() -> None:
    """Everything: the simulator and the stand-in for MindSpeed come before Megatron."""
    import simulator
    import without_mindspeed

    simulator.install()
    without_mindspeed.install()

    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state

    from mindspeed_rl import platform
    from mindspeed_rl.adaptors import hccl_buffers
    from mindspeed_rl.config import MegatronConfig
    from mindspeed_rl.config.keys.megatron import parse_group_buffers
    from mindspeed_rl.engine import parallel

    npu = platform.select("npu")
    npu.set_device(int(os.environ["RANK"]))
    hccl_buffers.apply(parse_group_buffers("tp:64"))
    parallel.init_process_group(parallel.RankInfo.from_env(), 60.0)
    parallel._init_model_parallel(MegatronConfig(tensor_model_parallel_size=2), 1, 60.0)
    library = ctypes.CDLL("libhccl.so")
    groups = {"dp": parallel_state.get_data_parallel_group(), "tp": parallel_state.get_tensor_model_parallel_group()}
    sizes = {}
    for name, group in groups.items():
        dist.all_reduce(torch.ones(1, device=npu.current_device()), group=group)  # a group joins at its first collective
        sizes[name] = library.npu_sim_last_buffer_mib()
    # rank 0 has the store by which groups meet: it ends when all have
    dist.all_reduce(torch.ones(1, device=npu.current_device()))
    report(sizes)


if __name__ == "__main__":
    main()
