"""Runs whose rollout servers die again and again: standalone ones in every way, and a run's own every minute."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest
from fault_run import LONG, culprit_line, note, strike, struck
from fault_table import STANDALONE, Fault
from grpo_command import ONE_PROCESS, Command
from patience import patient
from ports import find_free_port

#: seconds that a server may take to start on a busy machine
START_S = 300.0
#: minutes of the run whose servers die every minute
SOAK_MINUTES = float(os.environ.get("SOAK_MINUTES", "2"))


class StandaloneServer:
    """A rollout server that a user has started, and starts again at the same port."""

    def __init__(self, task: Path, folder: Path) -> None:
        self.port, self._log = find_free_port(), folder / "server.log"
        folder.mkdir()
        words = ["--model", task / "model", "--dtype", "float32", "--max-model-len", "64", "--kv-cache-memory-gib", "0.05"]
        words += ["--port", self.port, "--platform", "cpu"]
        self._command = [sys.executable, "-m", "mindspeed_rl.cli.main", "rollout", *map(str, words)]
        self.start()

    def start(self) -> None:
        environment = {**os.environ, "MINDSPEED_RL_SERVER_TOKEN": "secret", "OMP_NUM_THREADS": "1"}
        with self._log.open("w") as log:
            self._process = subprocess.Popen(self._command, env=environment, stdout=log, stderr=log, start_new_session=True)

    def wait(self) -> None:
        deadline_s = time.monotonic() + START_S
        while "serving model" not in self._log.read_text():
            assert self._process.poll() is None and time.monotonic() < deadline_s, self._log.read_text()
            time.sleep(0.2)

    def signal(self, number: int) -> None:
        os.killpg(self._process.pid, number)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)
        self._process.wait()

    @property
    def version(self) -> int:
        """Of its weights."""
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/health", headers={"Authorization": "Bearer secret"})
        with urllib.request.urlopen(request, timeout=patient(30)) as answer:
            return json.loads(answer.read())["version"]


def by_id(name: str) -> Fault:
    (fault,) = [fault for fault in STANDALONE if fault.id == name]
    return fault


@pytest.mark.slow
def test_standalone_servers_die_hang_and_return_and_the_run_goes_on_until_none_is_left(task: Path, tmp_path: Path) -> None:
    servers = [StandaloneServer(task, tmp_path / f"server_{number}") for number in range(2)]
    (tmp_path / "token").write_text("secret\n")
    ports = ",".join(str(server.port) for server in servers)
    keys = ["generate_config.vllm_server_host=[127.0.0.1,127.0.0.1]", f"generate_config.vllm_server_port=[{ports}]"]
    keys += [f"generate_config.vllm_server_token_file={tmp_path / 'token'}", "generate_config.vllm_server_timeout=20"]
    try:
        for server in servers:
            server.wait()
        with struck(task, tmp_path / "run", *ONE_PROCESS, *keys, "actor_config.save=null", LONG) as run:
            run.wait_until(lambda: run.metrics)
            fault = by_id("standalone-kill")
            note(fault, *strike(run, fault, lambda run: servers[0].kill()))
            servers[0].start()
            servers[0].wait()
            back = len(run.output)
            run.wait_until(lambda: f"rollout server 127.0.0.1:{servers[0].port} is back" in run.output)
            fault = by_id("standalone-other-weights")
            begun = time.monotonic()
            servers[0].kill()
            servers[0].start()
            servers[0].wait()
            line = f"rollout server 127.0.0.1:{servers[0].port} is back"
            run.wait_until(lambda: line in run.output[back + len(line) :].split("taken out")[-1], fault.within_s)
            reached = run.metrics[-1]["iteration"]
            run.wait_until(lambda: servers[0].version > reached, fault.within_s)
            note(fault, time.monotonic() - begun, line)
            fault = by_id("standalone-stop")
            note(fault, *strike(run, fault, lambda run: servers[1].signal(signal.SIGSTOP)))
            servers[1].signal(signal.SIGCONT)
            line, said = f"rollout server 127.0.0.1:{servers[1].port} is back", len(run.output)
            run.wait_until(lambda: line in run.output[said:])
            result = run.iterations
            assert result == list(range(1, len(result) + 1))
            fault, begun = by_id("standalone-all"), time.monotonic()
            for server in servers:
                server.kill()
            assert run.wait(fault.within_s) == 1, run.output[-3000:]
            assert run.leftovers() == [] and "Traceback" not in run.output
            note(fault, time.monotonic() - begun, culprit_line(run.output, fault.said))
    finally:
        for server in servers:
            server.kill()


def engines(command: Command) -> list[psutil.Process]:
    """vLLM's processes of the run's own servers."""
    return [process for process in command.processes() if "EngineCore" in " ".join(process.cmdline())]


@pytest.mark.slow
@pytest.mark.timeout(SOAK_MINUTES * 60 + 900)
def test_an_asynchronous_run_outlives_servers_that_die_every_minute(task: Path, tmp_path: Path) -> None:
    """For SOAK_MINUTES of the environment; two servers, of which one is killed each minute, engine or whole process in turn."""
    keys = ["rl_config.use_integrated_worker=false", "rl_config.rollout_resource.num_npus=2", "actor_config.keep_last=2"]
    keys += ["rl_config.trainer_mode=async", "rl_config.max_off_policy_threshold=1", "rl_config.rollout_server_restarts=10000"]
    keys += ["generate_config.vllm_server_timeout=30", "megatron_training.save_interval=20"]
    with struck(task, tmp_path, *ONE_PROCESS, *keys, LONG) as run:
        run.wait_until(lambda: len(run.metrics) > 5)
        driver, kills = psutil.Process(run.process.pid), 0
        before: dict[str, Any] = {}
        end_s = time.monotonic() + SOAK_MINUTES * 60
        while time.monotonic() < end_s:
            reached = len(run.metrics)
            if not before and kills >= 2:
                before = {"files": driver.num_fds(), "threads": driver.num_threads(), "bytes": driver.memory_info().rss}
            alive = engines(run)
            if alive:
                victim = alive[kills % len(alive)]
                with contextlib.suppress(psutil.NoSuchProcess):
                    parent = victim.parent()
                    (victim if kills % 2 or parent is None else parent).kill()
                    kills += 1
            next_s = time.monotonic() + 60
            run.wait_until(lambda above=reached + 1, at_s=next_s: len(run.metrics) > above and time.monotonic() > at_s, 300)
        after = {"files": driver.num_fds(), "threads": driver.num_threads(), "bytes": driver.memory_info().rss}
        result = run.iterations
        assert result == list(range(1, len(result) + 1))
        assert run.output.count(" was taken out: ") >= kills - 1 and kills >= SOAK_MINUTES / 3 - 1
        stale = max(record.get("rollout/staleness_max", 0.0) for record in run.metrics)
        print(f"{kills} kills, {len(result)} iterations, tokens {stale:g} versions old at most, {before} -> {after}")
        assert stale <= 1
        if before:
            assert after["files"] < before["files"] + 40 and after["threads"] < before["threads"] + 20
            assert after["bytes"] < before["bytes"] + (300 << 20)
        run.process.terminate()
        assert run.wait(120) == 143, run.output[-3000:]
        assert run.leftovers() == [] and run.half_written() == []
