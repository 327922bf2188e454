"""Real runs are struck by faults: each ends or recovers in time, with the culprit in one line, nothing lost and nothing left.

The faults stand in fault_table.py. Many strike one run, one after the other, since starting is what takes long.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fault_run import EXACT, LONG, RESTARTED, TOLERANT, TWO, FaultRun, culprit_line, note, strike, struck
from fault_table import ENDED, FAULTS, RECOVERED, REFUSED, SURVIVED, Fault
from grpo_command import ONE_PROCESS, finished

PLUGIN = Path(__file__).parent / "site" / "faulty_reward.py"
REWARD = [
    "rl_config.verifier_function=[faulty]",
    f"rl_config.external_plugins=[{PLUGIN}]",
    "rl_config.reward_timeout_s=3",
    "rl_config.reward_memory_gib=1",
    "rl_config.reward_failure_limit=0.9",
    "rl_config.reward_failure_policy=retry",
    "rl_config.num_reward_workers=1",
]
SHORT_WAITS = ["rl_config.deadlines.log_probs=20", "rl_config.deadlines.data_plane=15", "rl_config.wait_timeout_s=60"]


def by_id(faults: list[Fault], *names: str) -> list[Fault]:
    known = {fault.id: fault for fault in faults}
    return [known[name] for name in names]


def ends_without_a_trace(run: FaultRun, code: int, within_s: float) -> None:
    """The command ends with this code, and nothing of it is left."""
    assert run.wait(within_s) == code, run.output[-3000:]
    assert run.leftovers() == [] and run.half_written() == []
    folders = [line for line in run.output.splitlines() if "/tmp/ray-" in line]
    assert not folders


def test_faults_have_names_of_their_own() -> None:
    assert len({fault.id for fault in FAULTS}) == len(FAULTS) >= 40


def test_a_killed_worker_and_rewards_that_hang_or_die_do_not_end_a_run(task: Path, tmp_path: Path) -> None:
    with struck(task, tmp_path, *ONE_PROCESS, *TOLERANT, *REWARD, LONG) as run:
        run.wait_until(lambda: run.metrics)
        for fault in by_id(SURVIVED, "reward-hang", "reward-worker-kill"):
            strike(run, fault)
        killed = by_id(ENDED, "end-worker-kill")[0]
        said = len(run.output)
        run.arm(killed)
        run.wait_until(lambda: RESTARTED in run.output[said:])
        culprit_line(run.output[said:], killed.said)
        reached = len(run.metrics)
        run.wait_until(lambda: len(run.metrics) > reached, 200)
        assert run.iterations == list(range(1, len(run.metrics) + 1))
        run.process.terminate()
        ends_without_a_trace(run, 143, 60)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(3))
def test_a_run_that_tolerates_faults_recovers_and_computes_what_an_undisturbed_one_does(
    task: Path, tmp_path: Path, part: int
) -> None:
    faults = RECOVERED[part::3]
    with struck(task, tmp_path / "struck", *TWO, *TOLERANT, *SHORT_WAITS, LONG, CONSTANT) as run:
        run.wait_until(lambda: run.metrics)
        for fault in faults:
            if fault.id == "worker-kill-start":  # a worker starts when one was lost
                run.arm(fault)
                fault_before = by_id(RECOVERED, "worker-kill-generate")[0]
                strike_start(run, fault_before, fault)
            else:
                strike(run, fault)
        run.process.terminate()
        ends_without_a_trace(run, 143, 60)
        found = run.metrics
    whole = finished(task, tmp_path / "whole", *TWO, f"megatron_training.train_iters={len(found)}", CONSTANT)
    differing = [
        (mine["iteration"], name)
        for mine, theirs in zip(found, whole.metrics, strict=True)
        for name in EXACT
        if mine[name] != theirs[name]
    ]
    assert differing == []


#: a schedule that does not know how long the run is
CONSTANT = "actor_config.lr_decay_style=constant"


def strike_start(run: FaultRun, first: Fault, second: Fault) -> None:
    """The first fault makes workers start, the second strikes one that does."""
    said, begun, reached = len(run.output), time.monotonic(), len(run.metrics)
    run.arm(first)
    run.wait_until_taken(second, 200.0)
    run.wait_until(lambda: len(run.metrics) > reached + 1, second.within_s)
    assert run.iterations == list(range(1, len(run.metrics) + 1))
    note(second, time.monotonic() - begun, culprit_line(run.output[said:], second.said))


@pytest.mark.slow
@pytest.mark.parametrize("role", ["reward process", "others"])
def test_what_can_be_replaced_ends_nothing(task: Path, tmp_path: Path, role: str) -> None:
    tracker = [f"rl_config.report_to=[{'faulty_reward:DownTracker'}]"]
    beats = ["rl_config.fault_tolerance.heartbeat_interval_s=1"]
    with struck(task, tmp_path, *ONE_PROCESS, *REWARD, *tracker, *beats, LONG) as run:
        run.wait_until(lambda: run.metrics)
        for fault in SURVIVED:
            if (fault.role == "reward process") != (role == "reward process"):
                continue
            if fault.id == "worker-pause":
                pause(run, fault)
            else:
                strike(run, fault)
        run.process.terminate()
        ends_without_a_trace(run, 143, 60)


def pause(run: FaultRun, fault: Fault) -> None:
    """A worker is stopped for three seconds, and nothing comes of it."""
    reached = len(run.metrics)
    run.arm(fault)
    run.wait_until_taken(fault)
    begun = time.monotonic()
    time.sleep(3)
    assert len(run.metrics) <= reached + 1
    run.worker(0).send_signal(signal.SIGCONT)
    run.wait_until(lambda: len(run.metrics) > reached + 1, fault.within_s)
    note(fault, time.monotonic() - begun, "")


def _signal(*numbers: int) -> Callable[[FaultRun], None]:
    def send(run: FaultRun) -> None:
        for number in numbers:
            os.killpg(run.process.pid, number) if number == signal.SIGINT else run.process.send_signal(number)
            time.sleep(0.3)

    return send


def _kill_head(run: FaultRun) -> None:
    (head,) = [process for process in run.processes() if "gcs_server" in " ".join(process.cmdline()[:1])]
    head.kill()


def _limit_files(run: FaultRun) -> None:
    for process in run.processes():
        if "ray::WorkerProcess" in " ".join(process.cmdline()):
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (4096, 4096))


#: what a test does itself, and the exit code that follows
DEEDS: dict[str, tuple[Callable[[FaultRun], None], int]] = {
    "end-sigint": (_signal(signal.SIGINT), 130),
    "end-sigint-twice": (_signal(signal.SIGINT, signal.SIGINT), 130),
    "end-sigterm": (_signal(signal.SIGTERM), 143),
    "end-sigterm-twice": (_signal(signal.SIGTERM, signal.SIGTERM), 143),
    "end-sigterm-start": (_signal(signal.SIGTERM), 143),
    "end-driver-kill": (_signal(signal.SIGKILL), -signal.SIGKILL),
    "end-head-kill": (_kill_head, 1),
    "end-full-disk": (_limit_files, 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", ENDED, ids=lambda fault: fault.id)
def test_what_cannot_be_tolerated_ends_the_command(task: Path, tmp_path: Path, fault: Fault) -> None:
    deadline = "rl_config.deadlines.generate=15"
    deed, code = DEEDS.get(fault.id, (lambda run: run.arm(fault), 1))
    with struck(task, tmp_path, *ONE_PROCESS, LONG, deadline) as run:
        if fault.id == "end-sigterm-start":
            run.wait_until(lambda: "starting 1 workers" in run.output)
        else:
            run.wait_until(lambda: run.metrics)
        begun = time.monotonic()
        deed(run)
        ends_without_a_trace(run, code, fault.within_s)
        seconds = time.monotonic() - begun
        assert "Traceback" not in run.output
        note(fault, seconds, culprit_line(run.output, fault.said))


def _damage(fault: Fault, save: Path) -> list[str]:
    """Damages the checkpoints; returns what is changed in the command."""
    latest = save / "latest_checkpointed_iteration.txt"
    newest = max(save.glob("iter_*"))
    weights = newest / "__0_0.distcp"
    if fault.id == "checkpoint-no-tracker":
        latest.unlink()
    elif fault.id == "checkpoint-absent-iteration":
        latest.write_text("99")
    elif fault.id == "checkpoint-garbage-tracker":
        latest.write_bytes(b"\xff\xfe12")
        latest.write_text("twelve")
    elif fault.id == "checkpoint-truncated":
        os.truncate(weights, weights.stat().st_size // 2)
    elif fault.id == "checkpoint-missing-file":
        weights.unlink()
    elif fault.id == "checkpoint-record":
        record = newest / "run_state.json"
        record.write_text(record.read_text()[:-5].rjust(len(record.read_text())))
    elif fault.id == "checkpoint-inverted":
        for folder in save.glob("iter_*"):
            data = bytearray((folder / "__0_0.distcp").read_bytes())
            data[100:164] = bytes(255 - byte for byte in data[100:164])
            (folder / "__0_0.distcp").write_bytes(data)
        return ["actor_config.load_previous=true"]
    elif fault.id == "run-folder-read-only":
        return ["run_dir=/proc/sys/a_run"]
    elif fault.id == "reward-unknown":
        return ["rl_config.verifier_function=[nope]"]
    return []


@pytest.fixture(scope="module")
def saved(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of two iterations."""
    folder = tmp_path_factory.mktemp("saved")
    finished(task, folder, *ONE_PROCESS, "megatron_training.train_iters=2")
    return folder / "save"


@pytest.mark.slow
@pytest.mark.parametrize("fault", REFUSED, ids=lambda fault: fault.id)
def test_what_is_wrong_before_the_start_is_said_before_the_start(task: Path, tmp_path: Path, saved: Path, fault: Fault) -> None:
    shutil.copytree(saved, tmp_path / "save")
    changes = _damage(fault, tmp_path / "save")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "save").rglob("*")}
    begun = time.monotonic()
    with struck(task, tmp_path, *ONE_PROCESS, LONG, *changes) as run:
        ends_without_a_trace(run, 2, fault.within_s)
        assert "starting" not in run.output and "Traceback" not in run.output
        note(fault, time.monotonic() - begun, culprit_line(run.output, fault.said))
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "save").rglob("*")} == before


@pytest.mark.slow
def test_two_runs_on_one_machine_do_not_know_of_each_other(task: Path, tmp_path: Path) -> None:
    length = "megatron_training.train_iters=3"
    with (
        struck(task, tmp_path / "one", *ONE_PROCESS, length) as one,
        struck(task, tmp_path / "two", *ONE_PROCESS, length) as two,
    ):
        for run in (one, two):
            assert run.wait(400) == 0, run.output[-3000:]
        for run in (one, two):
            assert run.leftovers() == []
        same = [[record[name] for name in EXACT] for record in one.metrics]
        assert same == [[record[name] for name in EXACT] for record in two.metrics]


def test_every_fault_of_the_table_has_a_result_and_the_pages_show_it() -> None:
    from fault_page import page

    results = json.loads((Path(__file__).parent / "results.json").read_text())
    assert set(results) <= {fault.id for fault in FAULTS}
    docs = Path(__file__).parents[2] / "docs"
    assert (docs / "faults.md").read_text() == page("en") and (docs / "zh" / "faults.md").read_text() == page("zh")
