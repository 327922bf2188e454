"""Every socket that a run on one machine binds is bound to loopback, and docs/security.md lists them all."""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
import struct
from pathlib import Path

import psutil
import pytest
from grpo_command import Command, running

PAGE = Path(__file__).parents[2] / "docs" / "security.md"
#: what the command line of a process holds -> its name in the table
KINDS = {
    "gcs_server": "Ray: control service (gcs_server)",
    "raylet/raylet": "Ray: raylet",
    "RuntimeEnvAgent": "Ray: runtime environment agent",
    "WorkerProcess": "device worker",
    "RewardWorker": "reward worker",
    "TransferDock": "data plane",
    "ray::": "Ray: idle worker",
    "mindspeed_rl.cli.main": "driver",
}


#: Ray's side processes, some of which open their sockets when the run is long under way
LATE = {name for name in KINDS.values() if name.startswith("Ray: ")} - {"Ray: control service (gcs_server)", "Ray: raylet"}


def kind_of(process: psutil.Process) -> str:
    words = " ".join(process.cmdline())
    return next((name for part, name in KINDS.items() if part in words), words[:120])


def doors(command: Command) -> dict[str, set[str]]:
    """Kind of process -> the addresses it listens on: 127.0.0.1, any, or the address of an interface."""
    results: dict[str, set[str]] = {}
    for process in command.processes():
        with contextlib.suppress(psutil.Error):
            for connection in process.net_connections("inet"):
                bound = connection.type == socket.SOCK_DGRAM or connection.status == psutil.CONN_LISTEN
                if bound and not connection.raddr:
                    address = ipaddress.ip_address(connection.laddr.ip)
                    address = getattr(address, "ipv4_mapped", None) or address
                    shown = "loopback" if address.is_loopback else "any" if address.is_unspecified else "an interface"
                    results.setdefault(kind_of(process), set()).add(shown)
    return results


def serves_store(port: int) -> bool:
    """Whether torch's store answers at a port, which asks nobody for a secret: its protocol is a magic number, then a ping."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=3) as door:
        door.settimeout(1)
        door.sendall(b"\x00" + struct.pack("<I", 0x3C85F7CE) + b"\x0d" + struct.pack("<I", 77))
        return door.recv(4) == struct.pack("<I", 77)
    return False


def ports(command: Command) -> set[int]:
    """The ports of the run's workers."""
    found = set[int]()
    for process in command.processes():
        with contextlib.suppress(psutil.Error):
            listening = [c for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]
            found |= {c.laddr.port for c in listening} if kind_of(process) == "device worker" else set()
    return found


def documented() -> dict[str, set[str]]:
    """The table of the page."""
    rows = re.findall(r"^\| ([^|]+?) +\| (loopback|any|an interface)[^|]*\|", PAGE.read_text(), re.MULTILINE)
    table: dict[str, set[str]] = {}
    for kind, address in rows:
        table.setdefault(kind, set()).add(address)
    return table


@pytest.mark.slow
def test_every_door_is_on_loopback_and_in_the_table(task: Path, tmp_path: Path) -> None:
    before = set(Path("/tmp").glob("ray-*"))
    with running(task, tmp_path, "megatron_training.train_iters=100000", "actor_config.save=null") as command:
        command.wait_until(lambda: len(command.metrics) > 1)
        result = doors(command)
        assert not [port for port in ports(command) if serves_store(port)]
        own = {str(path) for path in set(Path("/tmp").glob("ray-*")) - before}
        command.process.terminate()
        assert command.wait(90) == 143
        # files of runs beside this one may come and go
        assert not [path for path in own if f"{path}/" in command.output]
    table = documented()
    assert result.items() <= table.items()
    assert table.keys() - result.keys() <= LATE
