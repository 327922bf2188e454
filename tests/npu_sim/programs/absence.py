"""Rank 1 sits out the second reduction."""

from __future__ import annotations

import os
import time

import simulator
import torch
import torch.distributed as dist
import torch_npu  # noqa: F401
from ranks import report

simulator.install()
rank = int(os.environ["RANK"])
torch.npu.set_device(rank)
dist.init_process_group("hccl")
dist.all_reduce(torch.ones(3, device=f"npu:{rank}"))
if rank == 1:
    time.sleep(10)
dist.all_reduce(torch.ones(3, device=f"npu:{rank}"))
torch.npu.synchronize()
report("not reached")
