"""Groups of gloo share the transports of their process, and are otherwise what torch makes."""

import subprocess
import sys

import pytest
from patience import patient

PROGRAM = """
import os, sys
from datetime import timedelta
from pathlib import Path
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from mindspeed_rl.adaptors import gloo_devices

def threads():
    return len(list(Path("/proc/self/task").iterdir()))

def group(seconds=7):
    return dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=seconds))

before = threads()
alone = [group() for _ in range(3)]
of_their_own = threads() - before
constructor = dist.ProcessGroupGloo.__init__
gloo_devices.apply()
applied = dist.ProcessGroupGloo.__init__
gloo_devices.apply()
before = threads()
groups = [group() for _ in range(3)]
shared = threads() - before
value = torch.tensor([3.0])
groups[2].allreduce([value]).wait()
os.environ["GLOO_SOCKET_IFNAME"] = "lo,lo"
named = group(11)
print(of_their_own - shared, applied is dist.ProcessGroupGloo.__init__)
print(groups[0].options._timeout, named.options._timeout, len(named.options._devices), named.options._threads, value.item())
options = dist.ProcessGroupGloo._Options()
options._devices = [dist.ProcessGroupGloo.create_device(interface="lo")]
print(dist.ProcessGroupGloo(dist.HashStore(), 0, 1, options).options._devices[0] is not None)
sys.stdout.flush()
child = os.fork()
if child == 0:  # none of the parent's threads are here
    print(os.getpid() in {process for process, _ in gloo_devices._TRANSPORTS}, threads() == 1)
    group()
    print(os.getpid() in {process for process, _ in gloo_devices._TRANSPORTS}, threads() > 1)
    sys.stdout.flush()
    os._exit(0)
sys.exit(os.waitpid(child, 0)[1])
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts threads in /proc, which only Linux has")
def test_groups_share_the_transports_of_their_process() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=patient(120))
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    # a transport is one thread, and three groups have one instead of three; once torch shares them, the adaptor can go
    assert lines[0] == ["2", "True"], lines
    assert lines[1] == ["0:00:07", "0:00:11", "2", "4", "3.0"]
    assert lines[2] == ["True"]
    assert lines[3] == ["False", "True"] and lines[4] == ["True", "True"]
