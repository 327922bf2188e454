"""Real runs are struck by faults: each ends or recovers in time, names the failed process in one line and loses nothing.

The faults are in fault_table.py. Many strike one run, one after another, since starting is what takes long. For the same reason
workers are copies of a shared server, except in the runs of `OWN_SERVER` and where a service of the run itself is struck.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import resource
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from fault_run import LONG, RESTARTED, TOLERANT, TWO, FaultRun, culprit_line, note, strike, struck
from fault_table import (
    AROUND,
    DPO_WORKER,
    ENDED,
    FAULTS,
    LOST_NODE,
    OTHER_DISK,
    PPO_WORKER,
    RECOVERED,
    REFUSED,
    SERVED,
    SIGNALLED,
    SIGNALS,
    START_INTERRUPT,
    SURVIVED,
    UNNOTICED,
    Fault,
)
from grpo_command import FIGURES, ONE_PROCESS, finished
from patience import patient

from mindspeed_rl.runtime.cluster import _set_environment

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
SHORT_WAITS = [f"rl_config.deadlines.{name}={patient(seconds):.0f}" for name, seconds in (("log_probs", 20), ("save", 20))]
SHORT_WAITS += [f"rl_config.deadlines.data_plane={patient(15):.0f}", f"rl_config.wait_timeout_s={patient(60):.0f}"]


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
            note(fault, *strike(run, fault))
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


#: iterations of a run that is struck up to six times, five of them each; the schedule does not know how long it is
LENGTH = ["megatron_training.train_iters=40", "actor_config.lr_decay_style=constant"]
#: faults of the same run, one after another: -k FAULT chooses the run
RUNS = [RECOVERED[first::4] for first in range(4)]
#: faults whose run starts a fork server of its own: one is the end of each way in which it has to end, and a copy that is
#: stopped lasts as long as its server
OWN_SERVER = {
    *("end-worker-kill", "end-sigint", "end-sigterm-start", "end-driver-kill", "end-node-service-kill", "signal-all"),
    "data-plane-stop",
}


@pytest.fixture(scope="module")
def undisturbed(task: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The records of a run that nothing happens to."""
    return finished(task, tmp_path_factory.mktemp("undisturbed"), *TWO, *LENGTH).metrics


def differing(run: FaultRun, undisturbed: list[dict[str, Any]]) -> list[tuple[int, str]]:
    """Iterations and figures in which the run is not the undisturbed one."""
    pairs = zip(run.metrics, undisturbed, strict=True)
    return [(mine["iteration"], name) for mine, theirs in pairs for name in FIGURES if mine[name] != theirs[name]]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "faults",
    [pytest.param(faults, marks=pytest.mark.extra if number > 1 else ()) for number, faults in enumerate(RUNS)],
    ids=lambda faults: "+".join(fault.id for fault in faults),
)
def test_a_run_that_tolerates_faults_recovers_and_computes_what_an_undisturbed_one_does(
    task: Path, tmp_path: Path, undisturbed: list[dict[str, Any]], faults: list[Fault]
) -> None:
    results, shares = [], faults is not RUNS[0] and not OWN_SERVER & {fault.id for fault in faults}
    with struck(task, tmp_path, *TWO, *TOLERANT, *SHORT_WAITS, *LENGTH, shares=shares) as run:
        run.wait_until(lambda: run.metrics)
        for fault in faults:
            if fault.id == "worker-kill-start":  # a worker starts when one was lost
                run.arm(fault)
                results.append((fault, *strike_start(run, by_id(RECOVERED, "worker-kill-generate")[0], fault)))
            else:
                results.append((fault, *strike(run, fault)))
        ends_without_a_trace(run, 0, 120)
        assert differing(run, undisturbed) == []
    for fault, seconds, line in results:
        note(fault, seconds, line, equal=len(undisturbed))


def strike_start(run: FaultRun, first: Fault, second: Fault) -> tuple[float, str]:
    """The first fault makes workers start, the second strikes one that does; as `strike`."""
    said, begun, reached = len(run.output), time.monotonic(), len(run.metrics)
    run.arm(first)
    run.wait_until_taken(second, 200.0)
    run.wait_until(lambda: len(run.metrics) > reached + 1, second.within_s)
    return time.monotonic() - begun, culprit_line(run.output[said:], second.said)


@pytest.mark.slow
def test_a_run_goes_on_when_a_node_of_its_cluster_is_lost(
    task: Path, tmp_path: Path, undisturbed: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three nodes on this machine: the driver's has no room for workers, each of the others has room for all of them."""
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(PLUGIN.parent), os.environ.get("PYTHONPATH", "")]))
    small = {"object_store_memory": 128 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **small})
    try:
        nodes = [cluster.add_node(num_cpus=2, object_store_memory=128 << 20) for _ in range(2)]
        with (
            _set_environment(RAY_ADDRESS=cluster.address),
            struck(task, tmp_path, *TWO, *TOLERANT, *SHORT_WAITS, *LENGTH) as run,
        ):
            run.wait_until(lambda: run.metrics)
            seconds, line = strike(run, LOST_NODE, lambda run: lose_node_of(run, cluster, nodes))
            ends_without_a_trace(run, 0, 120)
            assert not workers_in(tmp_path)
            assert differing(run, undisturbed) == []
            note(LOST_NODE, seconds, line, equal=len(undisturbed))
    finally:
        cluster.shutdown()


@pytest.mark.slow
def test_files_that_another_machine_does_not_see_end_the_command_before_models_are_built(task: Path, tmp_path: Path) -> None:
    from ray.cluster_utils import Cluster

    small = {"object_store_memory": 128 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **small})
    start = [Path(sys.executable).with_name("ray"), "start", "--address", cluster.address, "--num-cpus", "2", "--block"]
    # it sees an empty folder in the place of the model
    hidden = f"mount -t tmpfs none {task / 'model'} && exec {shlex.join(map(str, start))}"
    with _set_environment(PYTHONPATH=str(PLUGIN.parent), FAULTS=str(tmp_path / "none")):  # Ray imports what was injected
        node = subprocess.Popen(["unshare", "--mount", "bash", "-c", hidden], stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        with _set_environment(RAY_ADDRESS=cluster.address), struck(task, tmp_path, *TWO, LONG) as run:
            begun = time.monotonic()
            ends_without_a_trace(run, 2, OTHER_DISK.within_s)
            assert "libraries are loaded" not in run.output and "Traceback" not in run.output
            assert not workers_in(tmp_path) and not list(tmp_path.rglob(".shared-*"))
            note(OTHER_DISK, time.monotonic() - begun, culprit_line(run.output, OTHER_DISK.said))
    finally:
        node.terminate()
        node.wait(patient(60))
        cluster.shutdown()


def workers_in(folder: Path) -> list[psutil.Process]:
    """Device workers that write below this folder; workers of a cluster that the command did not start lack its mark."""
    results = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if "ray::WorkerProcess" in " ".join(process.cmdline()):
                if os.readlink(f"/proc/{process.pid}/fd/1").startswith(str(folder)):
                    results.append(process)
    return results


def lose_node_of(run: FaultRun, cluster: Any, nodes: list[Any]) -> None:
    """The node with the workers is gone from one moment to the next."""
    raylet = workers_in(run.folder)[0].parent()
    assert raylet is not None
    (node,) = [node for node in nodes if node.all_processes["raylet"][0].process.pid == raylet.pid]
    below = raylet.children(recursive=True)
    cluster.remove_node(node, allow_graceful=False)
    for process in below:
        with contextlib.suppress(psutil.Error):
            process.kill()


def lasting(task: Path, folder: Path, *changes: str, shares: bool = False) -> Iterator[FaultRun]:
    """A run of one worker that goes on until the caller is done with it, and then leaves nothing behind."""
    with struck(task, folder / "a", *ONE_PROCESS, *changes, LONG, shares=shares) as run:
        run.wait_until(lambda: run.metrics)
        yield run
        run.process.terminate()
        ends_without_a_trace(run, 143, 60)


@pytest.mark.slow
class TestSingleWorker:
    """A run of one worker; it ends behind its tests, so that it takes no time from others' tests."""

    @pytest.fixture(scope="class")
    def survivor(self, task: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultRun]:
        """A run of one worker whose faults end nothing; it leaves nothing behind."""
        tracker = [f"rl_config.report_to=[{'faulty_reward:DownTracker'}]"]
        beats = ["rl_config.fault_tolerance.heartbeat_interval_s=1"]
        yield from lasting(task, tmp_path_factory.mktemp("survivor"), *REWARD, *tracker, *beats, shares=True)

    @pytest.mark.parametrize("fault", SURVIVED, ids=lambda fault: fault.id)
    def test_what_can_be_replaced_or_waited_for_ends_nothing(self, survivor: FaultRun, fault: Fault) -> None:
        if fault.id == "worker-pause":
            pause(survivor, fault)
        else:
            note(fault, *strike(survivor, fault))


@pytest.mark.slow
class TestServers:
    """A run of one worker and two rollout servers; see `TestSingleWorker`."""

    @pytest.fixture(scope="class")
    def served(self, task: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultRun]:
        """A run of one worker and two rollout servers; it leaves nothing behind."""
        disaggregated = ["rl_config.use_integrated_worker=false", "rl_config.rollout_resource.num_npus=2"]
        silence = ["generate_config.vllm_server_timeout=20", "rl_config.fault_tolerance.heartbeat_interval_s=1"]
        yield from lasting(task, tmp_path_factory.mktemp("served"), *disaggregated, *silence, "actor_config.save=null")

    @pytest.mark.parametrize("fault", SERVED, ids=lambda fault: fault.id)
    def test_a_rollout_server_that_is_lost_or_slow_ends_nothing(self, served: FaultRun, fault: Fault) -> None:
        note(fault, *strike(served, fault))


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


def _kill_service(name: str) -> Callable[[FaultRun], None]:
    def kill(run: FaultRun) -> None:
        (service,) = [process for process in run.processes() if Path(process.cmdline()[0]).name == name]
        service.kill()

    return kill


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
    "end-head-kill": (_kill_service("gcs_server"), 1),
    "end-node-service-kill": (_kill_service("raylet"), 1),
    "end-node-service-stop": (lambda run: run.service("raylet").suspend(), 1),
    "end-full-disk": (_limit_files, 1),
    # each save takes more of it
    "end-full-tmpfs": (lambda run: None, 1),
    "end-full-run-folder": (lambda run: _fill(run.folder / "run"), 1),
}
#: tmpfs of so many bytes in the run's folder
SMALL_DISKS = {"end-full-tmpfs": ("save", 6 << 20), "end-full-run-folder": ("run", 6 << 20)}


def _fill(folder: Path) -> None:
    """Nothing more fits on this disk."""
    with contextlib.suppress(OSError), (folder / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


@contextlib.contextmanager
def small_disk(fault: Fault, folder: Path) -> Iterator[None]:
    """The run's folder has the small disk that the fault needs."""
    if fault.id not in SMALL_DISKS:
        yield
        return
    name, size = SMALL_DISKS[fault.id]
    place = folder / name
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {mounted.stderr.decode().strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", str(place)], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ENDED, ids=lambda fault: fault.id)
def test_what_cannot_be_tolerated_ends_the_command(task: Path, tmp_path: Path, fault: Fault) -> None:
    deadline = f"rl_config.deadlines.generate={patient(15):.0f}"
    deed, code = DEEDS.get(fault.id, (lambda run: run.arm(fault), 1))
    shares = fault.id not in OWN_SERVER
    with small_disk(fault, tmp_path), struck(task, tmp_path, *ONE_PROCESS, LONG, deadline, shares=shares) as run:
        if fault.phase == "set_up":
            run.wait_until(lambda: "starting 1 workers" in run.output)
        else:
            run.wait_until(lambda: run.metrics)
        begun = time.monotonic()
        deed(run)
        ends_without_a_trace(run, code, fault.within_s)
        seconds = time.monotonic() - begun
        assert "Traceback" not in run.output
        note(fault, seconds, culprit_line(run.output, fault.said))


@pytest.mark.parametrize(
    "fault",
    [fault if fault.id == "signal-all" else pytest.param(fault, marks=pytest.mark.slow) for fault in SIGNALS],
    ids=lambda fault: fault.id,
)
def test_a_signal_ends_the_command_when_the_iteration_is_saved(
    request: pytest.FixtureRequest, tmp_path: Path, fault: Fault
) -> None:
    stage, name, signalled = SIGNALLED[fault.id]
    task = request.getfixturevalue("quickstart" if stage in ("sft", "dpo") else "task")
    signum = signal.Signals[name]
    changes = [LONG, "megatron_training.save_interval=100000", *(ONE_PROCESS if stage in ("grpo", "ppo") else [])]
    shares = stage in ("grpo", "ppo") and fault.id not in OWN_SERVER
    with struck(task, tmp_path, *changes, stage=stage, shares=shares) as run:
        run.wait_until(lambda: len(run.metrics) > 1)
        begun = time.monotonic()
        if signalled == "all":
            run.signal_all(signum)
        else:
            run.process.send_signal(signum)
            if signalled == "group":  # as GNU timeout does
                os.killpg(run.process.pid, signum)
        ends_without_a_trace(run, 128 + signum, fault.within_s)
        seconds, last = time.monotonic() - begun, run.metrics[-1]["iteration"]
        assert "Traceback" not in run.output and "***" not in run.output
        assert (tmp_path / "save" / "latest_checkpointed_iteration.txt").read_text().strip() == str(last)
        if stage == "ppo":
            assert (tmp_path / "critic" / "latest_checkpointed_iteration.txt").read_text().strip() == str(last)
        note(fault, seconds, culprit_line(run.output, f"{fault.said} {last}[ ,]"))


@pytest.mark.slow
def test_ctrl_c_before_anything_runs_ends_the_command_without_a_traceback(task: Path, tmp_path: Path) -> None:
    for index, wait_s in enumerate((0.5, 1.0, 2.0)):
        with struck(task, tmp_path / str(index), LONG) as run:
            time.sleep(wait_s)
            begun = time.monotonic()
            run.interrupt()
            assert run.wait(START_INTERRUPT.within_s) in (130, -signal.SIGINT)
            assert "Traceback" not in run.output and run.leftovers() == []
            if wait_s == 0.5:
                note(START_INTERRUPT, time.monotonic() - begun, culprit_line(run.output, START_INTERRUPT.said))


def _stop(process: psutil.Process, seconds: float) -> None:
    process.suspend()
    time.sleep(seconds)
    process.resume()


def _stop_until_restart(run: FaultRun) -> None:
    said = len(run.output)
    run.service("gcs_server").suspend()
    run.wait_until(lambda: RESTARTED in run.output[said:], 90.0)
    reached = len(run.metrics)
    run.wait_until(lambda: len(run.metrics) > reached + 1, 90.0)


#: how the unnoticing run is struck
STRIKES: dict[str, Callable[[FaultRun], object]] = {
    "driver-stop": lambda run: _stop(psutil.Process(run.process.pid), 20.0),
    "clock-forward": lambda run: (run.faults / "clock").write_text("86400"),
    "clock-back": lambda run: (run.faults / "clock").write_text("-86400"),
    "node-service-stop": lambda run: _stop(run.service("raylet"), 10.0),
    "head-stop": lambda run: _stop(run.service("gcs_server"), 10.0),
    "head-stop-long": _stop_until_restart,
}


@pytest.mark.slow
class TestStopsAndClock:
    """A run of one worker that is restarted where a process is taken for lost; see `TestSingleWorker`."""

    @pytest.fixture(scope="class")
    def unnoticing(self, task: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultRun]:
        """A run of one worker that is restarted where a process is taken for lost; it leaves nothing behind."""
        yield from lasting(task, tmp_path_factory.mktemp("unnoticing"), *TOLERANT)

    @pytest.mark.parametrize("fault", UNNOTICED, ids=lambda fault: fault.id)
    def test_a_stop_or_a_jump_of_the_clock_ends_nothing(self, unnoticing: FaultRun, fault: Fault) -> None:
        def deed(run: FaultRun) -> None:
            STRIKES[fault.id](run)

        note(fault, *strike(unnoticing, fault, deed))


@pytest.mark.slow
def test_a_reader_of_the_output_that_ends_does_not_end_the_run(task: Path, tmp_path: Path) -> None:
    fault, head = by_id(AROUND, "output-closed")[0], ("bash", "-c", 'set -o pipefail; "$@" 2>&1 | head -3', "run")
    begun = time.monotonic()
    with struck(task, tmp_path, *ONE_PROCESS, "megatron_training.train_iters=3", wrap=head, shares=True) as run:
        ends_without_a_trace(run, 0, fault.within_s)
        assert len(run.output.splitlines()) == 3 and run.iterations == [1, 2, 3]
    note(fault, time.monotonic() - begun, "")


@pytest.mark.slow
def test_another_ray_cluster_of_the_machine_is_left_alone(task: Path, tmp_path: Path) -> None:
    """The other one is what `ray start --head` makes, with its address where Ray looks for it; other tests do not see it."""
    fault, mark = by_id(AROUND, "other-cluster")[0], f"OTHER_CLUSTER={tmp_path}"
    ray = f"{shlex.quote(str(Path(sys.executable).with_name('ray')))} start --head --num-cpus 1 --object-store-memory 80000000"
    other = f"env -u MINDSPEED_RL_TEST_RUN -u FAULTS {mark} {ray} --include-dashboard false --disable-usage-stats >&2"
    private = f'mkdir -p /tmp/ray && mount -t tmpfs none /tmp/ray && {other} && exec "$@"'
    begun = time.monotonic()
    try:
        with struck(
            task,
            tmp_path,
            *ONE_PROCESS,
            "megatron_training.train_iters=3",
            wrap=("unshare", "-m", "bash", "-c", private, "run"),
            shares=True,
        ) as run:
            ends_without_a_trace(run, 0, fault.within_s)
            assert run.iterations == [1, 2, 3] and "Ray runtime started" in run.output
        names = {process.name() for process in _with(mark)}
        assert {"gcs_server", "raylet"} <= names
        note(fault, time.monotonic() - begun, "")
    finally:
        for process in _with(mark):
            process.kill()


def _with(variable: str) -> list[psutil.Process]:
    """Processes whose environment has this variable, `NAME=value`."""
    name, _, value = variable.partition("=")
    results = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(name) == value:
                results.append(process)
    return results


@pytest.mark.slow
def test_ppo_recovers_from_a_killed_worker_with_the_figures_of_an_undisturbed_run(task: Path, tmp_path: Path) -> None:
    length = ["megatron_training.train_iters=6", "actor_config.lr_decay_style=constant", *ONE_PROCESS]
    with struck(task, tmp_path / "whole", *length, stage="ppo", shares=True) as run:
        ends_without_a_trace(run, 0, 400)
        undisturbed = run.metrics
    with struck(task, tmp_path / "struck", *length, *TOLERANT, stage="ppo") as run:
        run.wait_until(lambda: run.metrics)
        seconds, line = strike(run, PPO_WORKER)
        ends_without_a_trace(run, 0, 120)
        names = ("critic/score/mean", "critic/vf_loss", "actor/pg_loss", "actor/grad_norm", "response_length/mean")
        ours, theirs = ([[record[name] for name in names] for record in records] for records in (run.metrics, undisturbed))
        assert ours == theirs
        note(PPO_WORKER, seconds, line, equal=len(undisturbed))


@pytest.mark.slow
def test_a_killed_worker_ends_dpo(quickstart: Path, tmp_path: Path) -> None:
    with struck(quickstart, tmp_path, LONG, stage="dpo") as run:
        run.wait_until(lambda: run.metrics)
        begun = time.monotonic()
        run.arm(DPO_WORKER)
        ends_without_a_trace(run, 1, DPO_WORKER.within_s)
        assert "Traceback" not in run.output
        note(DPO_WORKER, time.monotonic() - begun, culprit_line(run.output, DPO_WORKER.said))


def _damage(fault: Fault, save: Path) -> list[str]:
    """Damages the checkpoints; returns what is changed in the command."""
    tracker = save / "latest_checkpointed_iteration.txt"
    newest = max(save.glob("iter_*"))
    weights = newest / "__0_0.distcp"
    if fault.id == "checkpoint-no-tracker":
        tracker.unlink()
    elif fault.id == "checkpoint-absent-iteration":
        tracker.write_text("99")
    elif fault.id == "checkpoint-garbage-tracker":
        tracker.write_bytes(b"\xff\xfe12")
        tracker.write_text("twelve")
    elif fault.id == "checkpoint-truncated":
        os.truncate(weights, weights.stat().st_size // 2)
    elif fault.id == "checkpoint-missing-file":
        weights.unlink()
    elif fault.id == "checkpoint-record":
        record = newest / "run_state.json"
        record.write_text(record.read_text()[:-5].rjust(len(record.read_text())))
    elif fault.id == "checkpoint-code":
        index = newest / ".metadata"  # of the same size, which is checked first
        index.write_bytes(b"cos\nsystem\n(S'false'\ntR.".ljust(index.stat().st_size))
    elif fault.id == "checkpoint-inverted":
        for folder in save.glob("iter_*"):
            data = bytearray((folder / "__0_0.distcp").read_bytes())
            data[100:164] = bytes(255 - byte for byte in data[100:164])
            (folder / "__0_0.distcp").write_bytes(data)
        return ["actor_config.load_previous=true"]
    elif fault.id == "checkpoints-in-use":
        lock = os.open(save / ".lock", os.O_RDWR | os.O_CREAT)  # to the end of the tests' process
        fcntl.flock(lock, fcntl.LOCK_EX)
        holder = {"host": socket.gethostname(), "pid": os.getpid(), "started": "", "command": "train", "since": "12:00:00"}
        os.write(lock, json.dumps(holder).encode())
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
        struck(task, tmp_path / "one", *ONE_PROCESS, length) as single,
        struck(task, tmp_path / "two", *ONE_PROCESS, length) as two,
    ):
        for run in (single, two):
            assert run.wait(400) == 0, run.output[-3000:]
        for run in (single, two):
            assert run.leftovers() == []
        same = [[record[name] for name in FIGURES] for record in single.metrics]
        assert same == [[record[name] for name in FIGURES] for record in two.metrics]


def test_every_fault_of_the_table_has_a_result_and_the_pages_show_it() -> None:
    from fault_page import page

    results = json.loads((Path(__file__).parent / "results.json").read_text())
    assert set(results) <= {fault.id for fault in FAULTS}
    docs = Path(__file__).parents[2] / "docs"
    assert (docs / "faults.md").read_text() == page("en") and (docs / "zh" / "faults.md").read_text() == page("zh")
