"""Rank 0 reduces three numbers, rank 1 four."""

from __future__ import annotations

import os

import simulator
import torch
import torch.distributed as dist
import torch_npu  # noqa: F401
from ranks import report

simulator.install()
rank = int(os.environ["RANK"])
torch.npu.set_device(rank)
dist.init_process_group("hccl")
dist.all_reduce(torch.ones(3 + rank, device=f"npu:{rank}"))
torch.npu.synchronize()
report("not reached")
