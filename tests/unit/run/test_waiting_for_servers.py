"""A run waits for its standalone servers before anything else, and explain refuses one that is not there."""

from __future__ import annotations

import dataclasses
import socket
import threading
from pathlib import Path

import pytest

from mindspeed_rl.config import load_run_config
from mindspeed_rl.run import Run, machine
from mindspeed_rl.run.resolve import resolve

CONFIGS = Path(__file__).parents[3] / "configs"


def run_with_server(port: int) -> Run:
    keys = ["generate_config.vllm_server_host=127.0.0.1", f"generate_config.vllm_server_port={port}"]
    return resolve(load_run_config("grpo_tiny_cpu", CONFIGS, [*keys, "rl_config.use_integrated_worker=false"]), platform="cpu")


def bind() -> socket.socket:
    server = socket.socket()
    server.bind(("127.0.0.1", 0))
    return server


def test_a_server_that_starts_late_is_waited_for(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(machine, "_RETRY_S", 0.05)
    with bind() as server:
        port = server.getsockname()[1]
        run = run_with_server(port)
        timer = threading.Timer(0.3, server.listen)
        timer.start()
        machine.wait_for_servers(run)
        timer.join()
    assert f"waiting for the rollout server at http://127.0.0.1:{port} (0 s)" in capsys.readouterr().out


def test_a_server_that_never_listens_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_RETRY_S", 0.01)
    with bind() as server:
        run = run_with_server(server.getsockname()[1])
        seconds = {**run.deadlines.seconds, "server": 0.05}
        run = dataclasses.replace(run, deadlines=dataclasses.replace(run.deadlines, seconds=seconds))
        with pytest.raises(ValueError, match=r"vllm_server_host: http://127.0.0.1:\d+ cannot be reached"):
            machine.wait_for_servers(run)
        checks = list(machine.list_machine_checks(run))
        with pytest.raises(ValueError, match="cannot be reached"):
            checks[-1]()
