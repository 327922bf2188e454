"""The store of a group listens where its address says, and nowhere else; a wait for members ends when one is not coming."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist
from patience import patient
from ports import find_free_port

from mindspeed_rl.platform.rendezvous import count_strangers, give_up, meet, naming_strangers, open_store, reach
from mindspeed_rl.runtime.process import ProcessSettings, WorkerProcess


def addresses(port: int) -> set[str]:
    return {
        c.laddr.ip for c in psutil.Process().net_connections("inet") if c.laddr.port == port and c.status == psutil.CONN_LISTEN
    }


def test_a_store_on_loopback_is_out_of_reach_of_other_machines() -> None:
    port = find_free_port()
    first = open_store("127.0.0.1", port, 2, serves=True, timeout_s=patient(10))
    second = open_store("127.0.0.1", port, 2, serves=False, timeout_s=patient(10))
    first.set("said", "by the first")
    assert second.get("said") == b"by the first"
    assert addresses(port) == {"127.0.0.1"}


def test_a_store_for_several_machines_is_in_reach() -> None:
    port = find_free_port()
    store = open_store("0.0.0.0", port, 1, serves=True, timeout_s=patient(10))
    store.set("said", "")
    assert addresses(port) & {"0.0.0.0", "::"}


def test_a_taken_port_is_an_error_at_once() -> None:
    port = find_free_port()
    store = open_store("127.0.0.1", port, 1, serves=True, timeout_s=patient(10))
    with pytest.raises(OSError, match="in use"):
        open_store("127.0.0.1", port, 1, serves=True, timeout_s=patient(10))
    del store


def test_a_member_that_finds_no_way_to_the_store_says_where_it_looked() -> None:
    port = find_free_port()
    with pytest.raises(ConnectionError, match=f"found no way to 127.0.0.1:{port}, where trainers wait, in 0.2 s"):
        reach("127.0.0.1", port, 0.2)


def test_a_wait_for_members_ends_with_the_reason_of_who_gave_up_or_with_the_ranks_that_are_missing() -> None:
    port = find_free_port()
    store = dist.PrefixStore("first", open_store("127.0.0.1", port, 3, serves=True, timeout_s=patient(10)))
    with pytest.raises(RuntimeError, match="rendezvous given up: ranks 1, 2 of 3 did not come within 0.2 s"):
        meet(store, 0, 3, 0.2)
    give_up("127.0.0.1", port, "first", "server 1 has died")
    with pytest.raises(RuntimeError, match="rendezvous given up: server 1 has died"):
        meet(store, 0, 3, 60.0)
    give_up("127.0.0.1", find_free_port(), "first", "no store listens here")


def test_processes_of_one_machine_meet_in_a_file_that_no_port_serves(tmp_path: Path) -> None:
    address = str(tmp_path / "store"), 0
    first, second = (open_store(*address, 2, serves=rank == 0, timeout_s=patient(10)) for rank in range(2))
    first.set("said", "by the first")
    assert second.get("said") == b"by the first" and second.add("count", 2) == 2
    assert not [c for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN and c.laddr.port == 0]
    reach(*address, 0.0)
    give_up(*address, "group", "server 1 has died")
    with pytest.raises(RuntimeError, match="rendezvous given up: server 1 has died"):
        meet(dist.PrefixStore("group", first), 0, 2, 60.0)
    alone = open_store(str(tmp_path / "other"), 0, 2, serves=True, timeout_s=0.2)
    with pytest.raises(RuntimeError, match="rendezvous given up: ranks 1 of 2 did not come within 0.2 s"):
        meet(alone, 0, 2, 0.2)
    with pytest.raises(RuntimeError, match="(?i)timeout"):
        alone.get("nothing")


def read_as_nobody(path: Path) -> str:
    """What a process of another user says that tries to read a file."""
    code = f"import os; os.setgid(65534); os.setuid(65534); print(open({str(path)!r}, 'rb').read(1))"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60).stderr


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act for another user")
def test_another_user_of_the_machine_cannot_open_the_store_of_the_ranks() -> None:
    process = WorkerProcess(ProcessSettings("x:Y", (), None, "cpu", 2, 1, Path("unused")), 0)
    path, port = process.address()
    store = open_store(path, port, 1, serves=True, timeout_s=patient(10))
    store.set("key", "value")
    assert port == 0 and "PermissionError" in read_as_nobody(Path(path))
    assert process.address()[0] != path  # each group has its own


def test_ranks_of_several_machines_and_servers_of_other_commands_meet_at_a_port() -> None:
    settings = ProcessSettings("x:Y", (), None, "cpu", 2, 1, Path("unused"))
    host, port = WorkerProcess(settings, 0).address(is_private=False)
    assert (host, port > 0) == ("127.0.0.1", True)


#: listening on 127.0.0.1:8000 (1F40); a connection of user 65534 and of user 1000 to it, one to another port, a closed one
TCP = """  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1F40 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 11 1 0 100 0 0 10 0
   1: 0100007F:9C40 0100007F:1F40 01 00000000:00000000 00:00000000 00000000 65534        0 12 1 0 20 4 30 10 -1
   2: 0100007F:9C41 0100007F:1F40 01 00000000:00000000 00:00000000 00000000  1000        0 13 1 0 20 4 30 10 -1
   3: 0100007F:9C42 0100007F:1F41 01 00000000:00000000 00:00000000 00000000 65534        0 14 1 0 20 4 30 10 -1
   4: 0100007F:9C43 0100007F:1F40 06 00000000:00000000 00:00000000 00000000     0        0 0 3 0 20 4 30 10 -1
   5: 0100007F:1F40 0100007F:9C40 01 00000000:00000000 00:00000000 00000000  1000        0 15 1 0 20 4 30 10 -1
"""


def test_connections_of_other_users_to_a_socket_of_this_process_are_counted() -> None:
    assert count_strangers([TCP], {"11", "15"}, 1000) == {65534: 1}
    assert count_strangers([TCP], {"15"}, 1000) == {}
    assert count_strangers(["", "sl\n", TCP, TCP], {"11"}, 1) == {65534: 2, 1000: 2}


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_the_error_of_a_group_that_is_not_complete_names_strangers() -> None:
    # what the connection imports, while the interpreter's folder can be read
    connect = "import encodings.idna, os, socket, sys; os.setuid(65534)\n"
    connect += "s = socket.create_connection(('127.0.0.1', int(sys.argv[1])))\n"
    connect += "print('here', flush=True); sys.stdin.read()"
    with socket.create_server(("127.0.0.1", 0)) as door:
        words = [sys.executable, "-c", connect, str(door.getsockname()[1])]
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as stranger:
            assert stranger.stdout is not None and stranger.stdout.readline() == b"here\n"
            with pytest.raises(RuntimeError, match=r"timed out; connections .*\(1 of user 65534\)"), naming_strangers():
                raise RuntimeError("timed out")
            stranger.communicate()
        with pytest.raises(RuntimeError, match="^timed out$"), naming_strangers():
            raise RuntimeError("timed out")
