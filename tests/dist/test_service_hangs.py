"""A server with one process in which a call hangs: it ends by itself, and started again it loses nothing."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from patience import patient
from service_server import running
from test_service_lost_ranks import Hang, Server

pytestmark = [pytest.mark.slow, pytest.mark.extra]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    limit_s = patient(4)
    server = Server(tmp_path_factory.mktemp("service_hangs"), 1, deadlines={"update": limit_s, "save": limit_s})
    server.program = [str(Path(__file__).with_name("service_hang_program.py"))]
    with running(server):
        yield server


def open_trained(server: Server) -> str:
    model = server.open_model()
    server.fetch(server.run_pass(model, 1, [5, 6, 7], [6, 7, 8])[1])
    assert server.fetch(server.step(model, 2))["metrics"]["step:max"] == 1
    return model


def wait_for_end(server: Server, code: int, call: str, deadline: str) -> str:
    """Return the log of a server that ends by itself because of a call."""
    start_s = time.monotonic()
    assert server.process is not None
    assert server.process.wait(patient(150)) == code, server.read_log()
    print(f"{call}: the server ended after {time.monotonic() - start_s:.1f} s")
    log = server.read_log()
    assert f"{call} has not ended in" in log and f"(rl_config.deadlines.{deadline})" in log
    return log


def test_a_disk_that_does_not_answer_ends_the_server_and_the_save_is_done_after_the_restart(server: Server) -> None:
    """The call waits as Python does, so that the rest of the server still runs."""
    model = open_trained(server)
    (server.folder / "stuck").touch()
    future = server.post("save_weights", {"model_id": model, "seq_id": 3, "path": "kept"})
    log = wait_for_end(server, 1, "save_state", "save")
    assert "started again, it continues from" in log
    assert "in wait_for_disk" in log  # the stacks
    (server.folder / "stuck").unlink()
    server.start()
    assert server.fetch(future)["path"] == f"tinker://{model}/weights/kept"
    assert server.fetch(server.step(model, 4))["metrics"]["step:max"] == 2


def test_a_call_that_keeps_pythons_lock_has_the_server_killed_and_is_done_after_the_restart(server: Server) -> None:
    """A library reads a file that nobody writes: no thread of the server runs."""
    hang = Hang(server, open_trained(server), "state.safetensors")
    log = wait_for_end(server, -signal.SIGKILL, "load_state", "update")
    assert "does not end by itself; it is killed" in log
    assert "in load_file" in log  # the stacks
    hang.end_after_a_restart()
