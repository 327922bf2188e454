"""The Ray cluster of a run: a dead address is named in time, its folder is private, its processes are watched."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from patience import patient

from mindspeed_rl.runtime import cluster


def _listen() -> tuple[socket.socket, str]:
    server = socket.create_server(("127.0.0.1", 0))
    return server, f"127.0.0.1:{server.getsockname()[1]}"


def _closed_port() -> str:
    server, address = _listen()
    server.close()
    return address


def test_an_address_where_nothing_listens_is_named_in_time() -> None:
    address, start_s = _closed_port(), time.monotonic()
    with pytest.raises(
        TimeoutError, match=rf"RAY_ADDRESS: .* at {address} cannot be reached within 2 s \(.*refused.*unset RAY_ADDRESS"
    ):
        cluster.join_cluster(address, timeout_s=2)
    assert time.monotonic() - start_s < 8


def test_a_head_that_is_stopped_is_named_in_time() -> None:
    # the kernel takes connections of a process that a signal has stopped
    server, address = _listen()
    with server, pytest.raises(TimeoutError, match="no answer"):
        cluster.join_cluster(address, timeout_s=2)


def test_another_service_at_the_address_is_named() -> None:
    server, address = _listen()

    def answer() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            with connection:
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    threading.Thread(target=answer, daemon=True).start()
    with server, pytest.raises(TimeoutError, match="what answers there is not a server of Ray"):
        cluster.join_cluster(address, timeout_s=1)


def test_a_dead_address_ends_the_block_before_anything_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "no-such-host.invalid:6379")
    monkeypatch.setattr(cluster.join_cluster, "__defaults__", (1.0,))
    with pytest.raises(TimeoutError, match=r"RAY_ADDRESS: .*no-such-host.invalid:6379"), cluster.connect_cluster(1, "cpu"):
        raise AssertionError("the block has begun")


def test_a_block_that_nothing_can_interrupt_ends_the_process_by_name() -> None:
    program = (
        "import time; from mindspeed_rl.runtime.cluster import _end_after\n"
        "with _end_after(1.0, 'the Ray cluster at RAY_ADDRESS x'):\n    time.sleep(60)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=patient(50), check=False)
    assert done.returncode == 1 and "the Ray cluster at RAY_ADDRESS x did not accept this process within 1 s" in done.stderr


_CLUSTER = """
import os, psutil, signal, stat, sys, time
from pathlib import Path
from mindspeed_rl.runtime import cluster
with cluster.connect_cluster(1, "cpu"):
    import ray
    folder = Path(ray._private.worker._global_node.get_temp_dir_path())
    parents = [path for path in (folder, *folder.parents) if path not in (Path("/tmp"), Path("/"))]
    print("modes", [oct(stat.S_IMODE(path.stat().st_mode)) for path in parents], "owner", parents[-1].stat().st_uid, flush=True)
    print("healthy", repr(cluster.find_dead_service()), cluster.find_stopped_services(), flush=True)
    services = dict(cluster._services)
    raylet = services["node service (raylet)"]
    raylet.send_signal(signal.SIGSTOP); time.sleep(0.5)
    print("stopped", cluster.find_stopped_services() == [f"node service (raylet), pid {raylet.pid}"], flush=True)
    control = services["control service (gcs_server)"]
    control.send_signal(signal.SIGSTOP); time.sleep(0.2)
    soon = cluster.find_lasting_stop(); cluster._STOP_LIMIT_S = 0.0; late = cluster.find_lasting_stop()
    control.send_signal(signal.SIGCONT); time.sleep(0.2)
    names = soon, late, cluster.find_lasting_stop()
    print("control", names == ("", f"control service (gcs_server), pid {control.pid}", ""), flush=True)
    raylet.send_signal(signal.SIGCONT); raylet.kill(); time.sleep(0.5)
    print("dead", cluster.find_dead_service(), flush=True)
"""


def test_its_folder_is_private_and_a_lost_process_is_named() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run(
        [sys.executable, "-c", _CLUSTER], capture_output=True, text=True, timeout=patient(120), check=False, env=environment
    )
    lines = dict(line.split(" ", 1) for line in done.stdout.splitlines() if " " in line)
    assert lines["modes"].endswith(f"'0o700'] owner {os.getuid()}"), done.stdout + done.stderr
    assert lines["healthy"] == "'' []" and lines["stopped"] == "True" and lines["control"] == "True"
    assert lines["dead"] == "node service (raylet)", done.stdout + done.stderr


def test_a_process_imports_its_libraries_itself_where_the_fork_server_is_stopped(tmp_path: Path) -> None:
    (tmp_path / "paths.json").write_text("[]")
    (tmp_path / "script.py").write_text("print('ran', __name__)")
    # a stopped server has a socket, and the kernel takes connections to it
    with socket.socket(socket.AF_UNIX) as stopped:
        stopped.bind(str(tmp_path / "forks"))
        stopped.listen(4)
        program = (
            f"import sys; from mindspeed_rl.runtime import fork_client as client; client._ANSWER_S = 1\n"
            f"client.main({str(tmp_path / 'forks')!r}, {str(tmp_path / 'paths.json')!r}, [{str(tmp_path / 'script.py')!r}])"
        )
        # files: a connection that is never accepted keeps the descriptors open, so that pipes would not end
        with (tmp_path / "out").open("w") as out, (tmp_path / "err").open("w") as err:
            subprocess.run([sys.executable, "-c", program], stdout=out, stderr=err, timeout=patient(60), check=True)
    assert (tmp_path / "out").read_text() == "ran __main__\n"
    assert "the fork server does not answer within 1 s" in (tmp_path / "err").read_text()
