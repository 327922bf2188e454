"""A cluster of a run's own has the services that a run uses, and no other."""

import functools
import inspect
import re
import subprocess
import sys
import time

import pytest
from patience import patient
from ray._private import node, parameter

from mindspeed_rl.adaptors import ray_services

PROGRAM = """
import os
from mindspeed_rl.runtime.fork_server import build_local_ray_environment
os.environ.update(build_local_ray_environment(os.environ))
import psutil, ray
from ray._private import node, parameter
from mindspeed_rl.adaptors.ray_services import left_out
from ray._private import services
before = parameter.RayParams, node.Node.start_api_server, services.ConsolePopen, services.get_node
with left_out():
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
print((parameter.RayParams, node.Node.start_api_server, services.ConsolePopen, services.get_node) == before)

@ray.remote
class Counter:
    def add(self, number):
        return number + 1

print(ray.get(Counter.remote().add.remote(41)))
for child in psutil.Process().children(recursive=True):
    print("process", " ".join(child.cmdline())[:400])
ray.shutdown()
"""


def test_a_cluster_has_no_process_that_nobody_asks() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=patient(120))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:2] == ["True", "42"]
    processes = "\n".join(line for line in lines if line.startswith("process"))
    assert "gcs_server" in processes and "raylet" in processes and "ray::Counter" in processes
    assert "adaptors/ray_agent.py" in processes
    for name in ("monitor.py", "dashboard.py", "ray::IDLE", "DashboardAgent"):
        assert name not in processes


def test_ray_has_what_is_patched() -> None:
    """Ray still has no argument of `ray.init` for these; once it has, or the names are gone, the adaptor is to be looked at."""
    assert ray_services._LEFT_OUT.keys() <= inspect.signature(parameter.RayParams).parameters.keys()
    assert "include_dashboard" in inspect.signature(node.Node.start_api_server).parameters
    import ray

    assert not ray_services._LEFT_OUT.keys() & inspect.signature(ray.init).parameters.keys()
    assert re.search(r"raylet_start_wait_time_s = 30\b.*services\.get_node\(", inspect.getsource(node.Node), re.DOTALL)


def test_a_node_that_registers_late_is_waited_for_while_all_processes_live() -> None:
    asked: list[tuple[str, str]] = []

    def find(*names: str) -> str:
        asked.append(names)
        if len(asked) % 3:
            raise RuntimeError("no such node")
        return "the node"

    with subprocess.Popen(["sleep", "600"]) as service:
        wait = functools.partial(ray_services._wait_for_node, find, [service])
        assert wait(time.monotonic() + 60, "address", "id") == "the node" and asked == [("address", "id")] * 3
        with pytest.raises(RuntimeError, match="no such node"):  # the limit
            wait(time.monotonic() - 1, "address", "id")
        service.kill()
        service.wait()
        asked.clear()
        with pytest.raises(RuntimeError, match="no such node"):
            wait(time.monotonic() + 60, "address", "id")
        assert len(asked) == 1
