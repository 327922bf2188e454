"""Rollout and reference on devices of their own give the run that shared devices give, overlap, and outlive a server."""

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
from grpo_command import ONE_PROCESS, Command, finished, running
from measured_figures import select_computed
from patience import patient
from ports import find_free_port

SHARED = [*ONE_PROCESS, "actor_config.save=null", "rl_config.log_completions=true", "rl_config.log_completions_keep=1000"]
DISAGGREGATED = [
    "rl_config.use_integrated_worker=false",
    "rl_config.rollout_resource.num_npus=2",
    f"generate_config.vllm_server_timeout={patient(60):.0f}",
]
#: one response at a time on each server, so that rows become ready one after the other
IN_TURN = ["rl_config.blocking=false", "generate_config.max_num_seqs=1"]


def completions(command: Command) -> list[dict[str, Any]]:
    """Every response of the run, in order."""
    return [json.loads(line) for line in (command.folder / "run" / "completions.jsonl").read_text().splitlines()]


def intervals(command: Command, name: str) -> list[tuple[float, float]]:
    """(from, to) of every interval of this name in the run's timeline, in microseconds."""
    lines = (command.folder / "run" / "timeline.json").read_text().splitlines()
    events = [json.loads(line.rstrip(",")) for line in lines if line.startswith("{")]
    return [(event["ts"], event["ts"] + event["dur"]) for event in events if event["ph"] == "X" and event["name"] == name]


def common(first: list[tuple[float, float]], second: list[tuple[float, float]]) -> float:
    """Microseconds in which an interval of both runs."""
    return sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in first for b in second)


def engine_of(command: Command, number: int) -> psutil.Process:
    """vLLM's process of a rollout server."""
    log = str(command.folder / "run" / "logs" / f"server_{number}.log")
    for process in command.processes():
        words = " ".join(process.cmdline())
        if "EngineCore" in words and os.readlink(f"/proc/{process.pid}/fd/1") == log:
            return process
    raise AssertionError(f"no engine writes {log}")


@pytest.mark.slow
def test_where_a_role_is_changes_no_token_and_no_figure_and_phases_overlap(task: Path, tmp_path: Path) -> None:
    keys = [*SHARED, "megatron_training.train_iters=2", f"megatron_training.eval_data_path={task / 'heldout.jsonl'}"]
    reference = ["rl_config.reference_resource.num_npus=1", f"ref_config.load={task / 'model'}"]
    shared = finished(task, tmp_path / "shared", *keys)
    disaggregated = finished(task, tmp_path / "separate", *keys, *DISAGGREGATED, *reference, *IN_TURN)
    assert "1 for the reference and 2 for rollout servers of 1" in disaggregated.output
    ours, theirs = completions(disaggregated), completions(shared)
    assert len(ours) == len(theirs) == 64
    assert [row["response"] for row in ours] == [row["response"] for row in theirs]
    for metric, expected in zip(disaggregated.metrics, shared.metrics, strict=True):
        known = select_computed(expected)
        assert known["rollout/tokens"] > 0
        for name, value in known.items():
            # kernels round differently for other batch sizes
            assert select_computed(metric)[name] == pytest.approx(value, rel=1e-4, abs=2e-5), name
    # on one device the engine has everything already; two servers need all of it each
    assert {record["rollout/push_received_gib"] for record in shared.metrics} == {0.0}
    for record in disaggregated.metrics:
        assert record["rollout/push_received_gib"] == record["rollout/push_needed_gib"] > 0.0
    for phase in ("reference_model", "rule_reward"):
        assert common(intervals(shared, "rollout"), intervals(shared, phase)) == 0.0
        assert common(intervals(disaggregated, "rollout"), intervals(disaggregated, phase)) > 0.0


@pytest.mark.slow
def test_a_server_of_two_devices_answers_as_an_engine_of_one(task: Path, tmp_path: Path) -> None:
    keys = [*SHARED, "megatron_training.train_iters=3"]
    shared = finished(task, tmp_path / "shared", *keys)
    disaggregated = finished(task, tmp_path / "separate", *keys, *DISAGGREGATED, "generate_config.infer_tensor_parallel_size=2")
    assert "2 for rollout servers of 2" in disaggregated.output
    assert [row["response"] for row in completions(disaggregated)] == [row["response"] for row in completions(shared)]
    for metric, expected in zip(disaggregated.metrics, shared.metrics, strict=True):
        for name, value in select_computed(expected).items():
            # the two halves of a product round differently from the whole
            assert select_computed(metric)[name] == pytest.approx(value, rel=1e-4, abs=2e-5), name
        assert metric["rollout/log_probs_diff_max"] < 1e-4
        # each half needs its part of the weights, and holds nothing of them
        assert metric["rollout/push_received_gib"] == metric["rollout/push_needed_gib"] > 0.0


@pytest.mark.slow
def test_a_run_goes_on_without_a_server_that_was_killed(task: Path, tmp_path: Path) -> None:
    with running(task, tmp_path, *SHARED, *DISAGGREGATED, "megatron_training.train_iters=6") as command:
        command.wait_until(lambda: len(command.metrics) >= 1)
        os.kill(engine_of(command, 1).pid, signal.SIGKILL)
        assert command.wait(400) == 0, command.output[-4000:]
        assert len(command.metrics) == 6
        log = (command.folder / "run" / "run.log").read_text()
        assert "rollout server 1 was taken out" in log and "rollout server 1 is restarted (2 restarts left)" in log
        assert len(completions(command)) == 6 * 32
        assert not command.leftovers()


@pytest.mark.slow
def test_ctrl_c_ends_the_servers_too(task: Path, tmp_path: Path) -> None:
    with running(task, tmp_path, *SHARED, *DISAGGREGATED, "megatron_training.train_iters=100000") as command:
        command.wait_until(lambda: len(command.metrics) >= 1)
        command.interrupt()
        assert command.wait(60) == 130, command.output[-4000:]
        assert not command.leftovers()


@pytest.mark.slow
def test_a_run_generates_on_a_server_that_was_started_by_hand(task: Path, tmp_path: Path) -> None:
    port = find_free_port()
    words = ["--model", str(task / "model"), "--dtype", "float32", "--max-model-len", "64", "--kv-cache-memory-gib", "0.05"]
    environment = {**os.environ, "MINDSPEED_RL_SERVER_TOKEN": "secret", "OMP_NUM_THREADS": "1"}
    log = (tmp_path / "server.log").open("w+")
    command = [sys.executable, "-m", "mindspeed_rl.cli.main", "rollout", "--port", str(port), "--platform", "cpu", *words]
    server = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)

    def ask(path: str, body: dict[str, Any] | None = None, token: str = "secret") -> Any:
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data=data, headers=headers)
        with urllib.request.urlopen(request, timeout=patient(30)) as answer:
            return json.loads(answer.read())

    try:
        deadline = time.monotonic() + patient(300)
        while "serving model" not in (tmp_path / "server.log").read_text():
            assert server.poll() is None and time.monotonic() < deadline, (tmp_path / "server.log").read_text()
            time.sleep(0.5)
        assert ask("/health") == {"running": 0, "version": 0}
        assert ask("/v1/models")["data"][0]["id"] == "model"
        completion = ask("/v1/completions", {"model": "model", "prompt": [5, 6, 7], "max_tokens": 3, "temperature": 0})
        assert completion["usage"]["completion_tokens"] <= 3
        with pytest.raises(urllib.error.HTTPError, match="401"):
            ask("/v1/models", token="other")
        keys = [*SHARED, "megatron_training.train_iters=2", "generate_config.vllm_server_host=127.0.0.1"]
        token_file = tmp_path / "token"
        token_file.write_text("secret\n")
        keys += [f"generate_config.vllm_server_port={port}", f"generate_config.vllm_server_token_file={token_file}"]
        run = finished(task, tmp_path / "run", *keys)
        assert len(completions(run)) == 64 and "1 rollout server(s) elsewhere" in run.output
        assert ask("/health") == {"running": 0, "version": 2}
        server.send_signal(signal.SIGINT)
        assert server.wait(patient(60)) == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()
        log.close()
