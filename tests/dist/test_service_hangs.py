"""A server with one process in which a call hangs: it ends by itself, and started again it loses nothing."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest
from patience import patient
from test_service_lost_ranks import Hang, Server

pytestmark = [pytest.mark.slow, pytest.mark.extra]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    deadlines = {"update": patient(8)}
    server = Server(tmp_path_factory.mktemp("service_hangs"), 1, deadlines=deadlines)
    server.start()
    yield server
    assert server.process is not None
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(patient(90)) == 0, server.read_log()


@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        # read by Python, which other threads of the server do not notice
        ("state.json", 1, "started again, it continues from"),
        # read by a library that keeps Python's lock: no thread of the server runs
        ("state.safetensors", -signal.SIGKILL, "does not end by itself; it is killed"),
    ],
)
def test_a_call_that_hangs_ends_the_server_and_is_done_after_the_restart(
    server: Server, name: str, code: int, said: str
) -> None:
    model = server.open_model()
    server.fetch(server.run_pass(model, 1, [5, 6, 7], [6, 7, 8])[1])
    server.fetch(server.step(model, 2))
    hang, start_s = Hang(server, model, name), time.monotonic()
    assert server.process is not None
    assert server.process.wait(patient(120)) == code, server.read_log()
    print(f"{name}: the server ended after {time.monotonic() - start_s:.1f} s")
    log = server.read_log()
    assert "load_state has not ended in" in log and "(rl_config.deadlines.update)" in log and said in log
    assert "in load_state" in log  # the stacks
    hang.end_after_a_restart()
