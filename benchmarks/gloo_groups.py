"""What idle gloo groups cost, with a transport each (torch) and with one for all (`adaptors/gloo_devices.py`).

    python benchmarks/gloo_groups.py [--groups 60] [--seconds 10]

Two processes make the groups, use each once, then sleep; the figure is the processor time that one of them took while it slept.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from headline import Headline

from mindspeed_rl.adaptors import gloo_devices
from mindspeed_rl.runtime.process import find_free_port


def measure(rank: int, port: int, shared: bool, groups: int, seconds: float, shares: Any) -> None:
    if shared:
        gloo_devices.apply()
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    made = [dist.new_group([0, 1]) for _ in range(groups)]
    for group in made:
        dist.all_reduce(torch.ones(1), group=group)
    before, started = time.process_time(), time.monotonic()
    time.sleep(seconds)
    share = (time.process_time() - before) / (time.monotonic() - started)
    if rank == 0:
        threads = len(os.listdir("/proc/self/task"))
        print(
            f"{'one transport' if shared else 'a transport each':17s} {threads:4d} threads  {share:6.1%} of a core while idle"
        )
        shares.put(share)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=10.0)
    options = parser.parse_args()
    shares = multiprocessing.get_context("spawn").SimpleQueue()
    for shared in (False, True):
        multiprocessing.spawn(measure, (find_free_port("127.0.0.1"), shared, options.groups, options.seconds, shares), nprocs=2)
    each, one = shares.get(), shares.get()
    what = f"{options.groups} idle gloo groups with one transport, share of a core"
    Headline(what, f"{one:.1%}", "a transport each", f"{each:.1%}", each / one).say()


if __name__ == "__main__":
    main()
