"""A device of the rollout trains once the rollout is ahead, and generates again once it falls behind."""

from __future__ import annotations

import json
import re
import shlex
import signal
from pathlib import Path
from typing import Any

import pytest
from grpo_command import Command, running
from measured_figures import select_computed
from patience import patient
from test_rollout_modes import IN_TURN, SERVER, iterations

PLUGIN = """
import time
from pathlib import Path
from mindspeed_rl.rewards import register

@register("slow_at_times")
def slow_at_times(response: str, label: str) -> float:
    flag = Path({flag!r})
    while flag.exists() and time.time() - flag.stat().st_mtime < {seconds}:
        time.sleep(0.1)
    return float(response.strip() == label)
"""
MOVED = r"elastic_training_devices: .*; the run resumes after iteration (\d+) with (.*)"
#: numbers that depend on how far the servers were
TIMED = {"rollout/ready_prompts", "rollout/in_flight_prompts", "rollout/queue_level"}


def keys(task: Path, folder: Path, flag: Path) -> list[str]:
    """Of a run in which prompts are taken in their order and new weights wait for responses: only the level takes time."""
    plugin = folder / "slow_at_times.py"
    plugin.write_text(PLUGIN.format(flag=str(flag), seconds=patient(30)))
    return [
        *SERVER,
        IN_TURN,
        "rl_config.rollout_resource.num_npus=2",
        "rl_config.trainer_mode=async",
        "rl_config.max_off_policy_threshold=1",
        "rl_config.max_off_policy_strategy=wait",
        "rl_config.partial_rollout=false",
        "rl_config.elastic_training_devices=1",
        # full with a prompt; the trainers wait for scores of 30 s
        "rl_config.elastic_training_high=0.1",
        "rl_config.elastic_training_wait=0.6",
        "rl_config.elastic_training_patience=1",
        "actor_config.lr_decay_style=constant",
        "actor_config.keep_last=null",
        "rl_config.verifier_function=[slow_at_times]",
        f"rl_config.external_plugins=[{plugin}]",
        # before the first iteration and after the last
        f"megatron_training.eval_sets={{few: '{task / 'heldout.jsonl'}#2'}}",
        "megatron_training.eval_interval=500",
        "megatron_training.eval_patience=1000",
    ]


def read_consumed(folder: Path, iterations: range) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in (folder / "run" / "consumed.jsonl").read_text().splitlines()]
    return [record for record in records if record["iteration"] in iterations]


def moves(run: Command) -> list[tuple[int, str]]:
    """(iteration, keys) of each move that the console names."""
    return [(int(iteration), changes) for iteration, changes in re.findall(MOVED, run.output)]


@pytest.mark.slow
@pytest.mark.extra
def test_two_servers_become_one_and_two_again_as_by_a_resume_by_hand(task: Path, tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    shared = keys(task, tmp_path, flag)
    with running(task, tmp_path / "run", *shared, iterations(500)) as run:
        run.wait_until(lambda: moves(run))
        start, changes = moves(run)[0]
        run.wait_until(lambda: len(run.metrics) >= start + 1)
        flag.touch()
        run.wait_until(lambda: len(moves(run)) == 2)
        end, by_run_file = moves(run)[1]
        flag.unlink(missing_ok=True)
        run.wait_until(lambda: len(run.metrics) >= end + 1)
        run.process.send_signal(signal.SIGTERM)
        assert run.wait(200) == 143, run.output[-4000:]
        assert run.leftovers() == []
    assert by_run_file == "the keys of its run file"
    assert "rl_config.actor_resource.num_npus=2 rl_config.rollout_resource.num_npus=1" in changes
    figures = {record["iteration"]: record for record in run.metrics}
    assert sorted(figures) == list(range(1, max(figures) + 1)) and end > start
    # the attempts after a move have not evaluated
    evaluated = json.loads((run.folder / "save" / "evaluations.json").read_text())["evaluations"]
    assert [iteration for iteration, _ in evaluated] == [0]
    # no prompt twice, none left out, no token too old
    last = max(figures)
    records = read_consumed(run.folder, range(1, last + 1))
    assert [prompt["prompt"] for record in records for prompt in record["prompts"]] == list(range(8 * last))
    for record in records:
        versions = [version for prompt in record["prompts"] for item in prompt["samples"] for version, _ in item["versions"]]
        assert {record["version"] - version for version in versions} <= {0, 1}
    # the iterations on the other division are, bit for bit, those of a resume by hand with the keys that the console names
    saved = [f"actor_config.load={run.folder / 'save'}", f"actor_config.load_iteration={start}"]
    with running(task, tmp_path / "hand", *shared, *saved, iterations(500), *shlex.split(changes)) as hand:
        hand.wait_until(lambda: len(hand.metrics) >= end - start)
        by_hand = hand.metrics[: end - start]
        hand.process.send_signal(signal.SIGTERM)
        hand.wait(200)
    assert [record["iteration"] for record in by_hand] == list(range(start + 1, end + 1))
    for theirs in by_hand:
        ours = select_computed(figures[theirs["iteration"]])
        computed = select_computed(theirs)
        names = (ours.keys() | computed.keys()) - TIMED
        assert {name: ours.get(name) for name in names} == {name: computed.get(name) for name in names}
    window = range(start + 1, end + 1)
    assert read_consumed(run.folder, window) == read_consumed(hand.folder, window)
