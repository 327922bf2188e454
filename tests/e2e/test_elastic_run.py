"""The trainers' devices generate while an iteration waits: one engine, two, and one again; no sample is lost or doubled."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import psutil
import pytest
from grpo_command import Command, finished, running
from safetensors import safe_open
from test_rollout_modes import IN_TURN, SERVER, consumed, iterations

#: devices of the trainer generate too while an iteration waits
HELPING = [
    "rl_config.trainer_mode=async",
    "rl_config.elastic_rollout=true",
    "rl_config.max_off_policy_threshold=1",
    # a response after the other, long enough that some move while they are generated
    IN_TURN,
    "generate_config.sampling_config.max_tokens=24",
    "generate_config.sampling_config.ignore_eos=true",
]
ELASTIC = [*SERVER, *HELPING]


def check_consumed(run: Command, count: int, bound: int = 1) -> list[dict[str, Any]]:
    """Each prompt trained once or is in the checkpoint, once; every token has a version that may train."""
    records = consumed(run)
    assert [record["iteration"] for record in records] == list(range(1, count + 1))
    for record in records:
        for sample in (sample for prompt in record["prompts"] for sample in prompt["samples"]):
            assert sum(tokens for _, tokens in sample["versions"]) == 24 and sample["finish"] == "length"
            versions = [version for version, _ in sample["versions"]]
            assert versions == sorted(versions)
            assert all(0 <= record["version"] - version <= bound for version in versions)
    taken = [prompt["prompt"] for record in records for prompt in record["prompts"]]
    assert len(taken) == 8 * count
    # of the last iteration; with threshold 0 nothing is under way then
    for saved in (run.folder / "save" / f"iter_{count:07d}" / "in_flight").glob("*.safetensors"):
        with safe_open(saved, "pt") as file:
            taken += [group["number"] for group in json.loads(file.metadata()["groups"])]
    assert sorted(taken) == list(range(len(taken)))
    return records


def generating(run: Command, worker: str) -> list[int]:
    """Iterations in which a server generated."""
    lines = (run.folder / "run" / "timeline.json").read_text().splitlines()
    events = [json.loads(line.rstrip(",")) for line in lines if line.startswith("{")]
    rows = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    return [event["args"]["iteration"] for event in events if event["name"] == "generate" and rows[event["tid"]] == worker]


@pytest.mark.slow
def test_one_engine_becomes_two_and_one_again_and_a_resumed_run_continues(task: Path, tmp_path: Path) -> None:
    run = finished(task, tmp_path, *ELASTIC, iterations(3))
    check_consumed(run, 3)
    log = (run.folder / "run" / "run.log").read_text()
    # nothing is ready before the first iteration, so its prompts come from both
    assert "iteration 1: the trainers' devices generate; 0 are ready" in log
    assert "iteration 1: the trainers' devices train" in log and "was taken out" not in log
    awake = [record["iteration"] for record in run.metrics if record["rollout/elastic_servers"] == 1]
    assert awake[0] == 1 and {record["rollout/servers"] for record in run.metrics} == {1}
    assert generating(run, "elastic server 0") == awake
    for record in run.metrics:
        assert ("timing/elastic_wake" in record) == ("timing/elastic_sleep" in record) == (record["iteration"] in awake)
    first = run.metrics[0]
    assert first["rollout/moved_requests"] > 0
    # tokens of both engines are of the weights that train on them, and so are their log-probs
    assert first["rollout/staleness_max"] == 0 and first["rollout/log_probs_diff_max"] < 1e-4
    second = finished(task, tmp_path, *ELASTIC, iterations(5))
    check_consumed(second, 5)
    assert all("rollout/elastic_servers" in record for record in second.metrics)
    assert not second.leftovers()


@pytest.mark.slow
def test_an_engine_that_is_killed_while_it_helps_loses_no_sample_and_is_replaced(task: Path, tmp_path: Path) -> None:
    # nothing is generated while the trainer trains, so each iteration begins with none ready
    keys = [*ELASTIC, "rl_config.max_off_policy_threshold=0"]
    with running(task, tmp_path, *keys, iterations(5)) as command:
        log = command.folder / "run" / "run.log"
        command.wait_until(lambda: log.is_file() and log.read_text().count("1 elastic servers have joined the rollout") == 2)
        engine_of(command, "elastic_server_0").kill()
        assert command.wait(400) == 0, command.output[-4000:]
        text = log.read_text()
        assert text.count("elastic server 0 was taken out") == 1
        assert "elastic server 0 is restarted (2 restarts left)" in text
        check_consumed(command, 5, bound=0)
        assert [record["rollout/elastic_servers"] for record in command.metrics] == [1] * 5
        assert generating(command, "elastic server 0")[-1] == 5
        assert not command.leftovers()


@pytest.mark.slow
@pytest.mark.extra
@pytest.mark.parametrize("killed", ["engine", "trainer"])
def test_a_process_that_is_killed_in_the_middle_of_a_move_loses_no_sample(task: Path, tmp_path: Path, killed: str) -> None:
    keys = [*ELASTIC, "rl_config.max_off_policy_threshold=0", "rl_config.fault_tolerance.enabled=true"]
    with running(task, tmp_path, *keys, iterations(4)) as command:
        log = command.folder / "run" / "run.log"
        moves = "the trainers' devices generate; "
        command.wait_until(lambda: log.is_file() and log.read_text().count(moves) == 2)
        # the trainers are leaving their devices, the engine is waking up or joins the group of the weight sync
        (engine_of(command, "elastic_server_0") if killed == "engine" else command.worker(0)).kill()
        assert command.wait(600) == 0, command.output[-4000:]
        text = log.read_text() + command.output
        if killed == "engine":
            assert log.read_text().count("elastic server 0 was taken out") == 1 and "the run resumes after" not in text
            assert "elastic server 0 is restarted (2 restarts left)" in text
        else:
            assert "the run resumes after iteration 1 (2 restarts left)" in text
        check_consumed(command, 4, bound=0)
        assert command.metrics[-1]["rollout/elastic_servers"] == 1
        assert not command.leftovers()


def engine_of(command: Command, name: str) -> psutil.Process:
    """vLLM's process of a server, which writes this log."""
    log = str(command.folder / "run" / "logs" / f"{name}.log")
    for process in command.processes():
        if "EngineCore" in " ".join(process.cmdline()) and os.readlink(f"/proc/{process.pid}/fd/1") == log:
            return process
    raise AssertionError(f"no engine writes {log}")
