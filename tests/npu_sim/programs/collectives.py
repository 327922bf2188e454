"""Every collective our stack uses, through the real ProcessGroupHCCL; each rank reports what it received."""

from __future__ import annotations

import ctypes
import datetime
import os

import simulator
import torch
import torch.distributed as dist
import torch_npu  # noqa: F401
from ranks import rank_settings, report

from mindspeed_rl import platform
from mindspeed_rl.observability.process_status import _describe_last_collective

simulator.install()
settings = rank_settings()
device_kind = platform.select("npu")
os.environ.update(device_kind.recorder_env)
timeout = datetime.timedelta(seconds=60)
options = device_kind.process_group_options("default", settings["buffer_size_mib"])
dist.init_process_group("hccl", timeout=timeout, pg_options=options)
rank, size = dist.get_rank(), dist.get_world_size()
device_kind.set_device(rank)
device = device_kind.device(rank)
results: dict[str, object] = {}


def values(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """1, 2, 3 ... plus 100 for each rank: tells origin and position apart."""
    count = torch.Size(shape).numel()
    return (torch.arange(1, count + 1) + 100 * rank).reshape(shape).to(dtype).to(device)


for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8):
    tensor = torch.full((5,), rank + 1, dtype=dtype, device=device)
    dist.all_reduce(tensor)
    results[f"all_reduce {dtype}"] = tensor.tolist()
flag = torch.tensor([rank == 0, False, True], device=device)
dist.all_reduce(flag, op=dist.ReduceOp.MAX)
results["all_reduce bool max"] = flag.tolist()
tensor = values(3)
dist.all_reduce(tensor, op=dist.ReduceOp.MIN)
results["all_reduce min"] = tensor.tolist()
tensor = values(4)
dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
results["all_reduce avg"] = tensor.tolist()
tensor = values(4)
dist.broadcast(tensor, src=size - 1)
results["broadcast"] = tensor.tolist()
tensor = values(2)
dist.reduce(tensor, dst=0)
results["reduce"] = tensor.tolist()
gathered = torch.empty(2 * size, device=device)
dist.all_gather_into_tensor(gathered, values(2))
results["all_gather_into_tensor"] = gathered.tolist()
parts = [torch.empty(3, device=device) for _ in range(size)]
dist.all_gather(parts, values(3))
results["all_gather"] = [part.tolist() for part in parts]
scattered = torch.empty(2, device=device)
dist.reduce_scatter_tensor(scattered, values(2 * size))
results["reduce_scatter_tensor"] = scattered.tolist()
received = torch.empty(size, device=device)
dist.all_to_all_single(received, values(size))
results["all_to_all_single"] = received.tolist()
send_counts = [index + 1 for index in range(size)]
receive_counts = [rank + 1] * size
received = torch.empty(sum(receive_counts), device=device)
dist.all_to_all_single(received, values(sum(send_counts)), receive_counts, send_counts)
results["all_to_all_v"] = received.tolist()
left, right = (rank - 1) % size, (rank + 1) % size
received = torch.empty(3, device=device)
operations = [dist.P2POp(dist.irecv, received, left), dist.P2POp(dist.isend, values(3), right)]
for work in dist.batch_isend_irecv(operations):
    work.wait()
results["batch ring"] = received.tolist()
if rank == 0:
    dist.send(values(2), 1)
elif rank == 1:
    received = torch.empty(2, device=device)
    dist.recv(received, 0)
    results["recv"] = received.tolist()
pairs = [dist.new_group([first, first + 1], group_desc="PAIR") for first in range(0, size, 2)]
tensor = values(2)
dist.all_reduce(tensor, group=pairs[rank // 2])
results["pair all_reduce"] = tensor.tolist()
objects: list[object] = [None] * size
dist.all_gather_object(objects, {"rank": rank})
results["objects"] = objects
gloo = dist.new_group(backend="gloo", group_desc="GLOO")
host = torch.tensor([rank + 1])
dist.all_reduce(host, group=gloo)
results["gloo"] = host.tolist()
dist.barrier()
library = ctypes.CDLL("libhccl.so")
small = dist.new_group(list(range(size)), pg_options=device_kind.process_group_options("small", 64), group_desc="SMALL")
dist.all_reduce(values(1), group=small)
results["buffer of the last group"] = library.npu_sim_last_buffer_mib()
record = device_kind.collective_record()
results["last"] = _describe_last_collective(record)
results["recorded"] = sorted({record["groups"][str(entry["process_group"][0])]["name"] for entry in record["entries"]})
# beside the default group and those made of it, as for a push to servers
own = device_kind.process_group(dist.PrefixStore("own", dist.distributed_c10d._get_default_store()), rank, size, 30.0)
tensor = values(2)
own.allreduce([tensor]).wait()
results["group of its own"] = tensor.tolist()
report(results)
