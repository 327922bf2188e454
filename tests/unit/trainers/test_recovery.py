"""A run whose workers fail goes on from its last checkpoint, as often as it may and while that leads anywhere."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from mindspeed_rl.config import ConfigError, load_run_config
from mindspeed_rl.run import Run
from mindspeed_rl.run.resolve import resolve
from mindspeed_rl.run.resume import resume_from_save
from mindspeed_rl.runtime.cluster import LiveDevices
from mindspeed_rl.runtime.futures import WorkerError
from mindspeed_rl.trainers.recovery import Recovery
from mindspeed_rl.trainers.termination import DevicesReturnedError


def run_with(folder: Path, *changes: str) -> Run:
    cfg = load_run_config(
        "grpo_tiny_cpu",
        None,
        [
            f"run_dir={folder / 'run'}",
            f"actor_config.load={folder / 'model'}",
            f"actor_config.save={folder / 'save'}",
            *changes,
        ],
    )
    return resolve(cfg, platform="cpu")


def save(folder: Path, iteration: int) -> None:
    (folder / "save").mkdir(exist_ok=True)
    (folder / "save" / "latest_checkpointed_iteration.txt").write_text(str(iteration))


TOLERANT = ("rl_config.fault_tolerance.enabled=true", "rl_config.fault_tolerance.max_restarts=2")


def attempts(recovery: Recovery, failures: list[tuple[Path, int, Exception] | None]) -> list[Run]:
    """The attempts of a run that fails in these ways, each behind a checkpoint of an iteration."""
    runs = []
    for run, failure in zip(recovery.attempts(), failures):
        runs.append(run)
        with recovery.retry_on_fault():
            if failure is not None:
                folder, iteration, error = failure
                save(folder, iteration)
                raise error
    return runs


def test_it_goes_on_from_its_own_checkpoint_and_keeps_what_it_started_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_with(tmp_path, *TOLERANT)
    died = WorkerError("worker 0 failed in update_actor: its process died")
    first, second = attempts(Recovery(run), [(tmp_path, 3, died), None])
    assert first is run
    actor = second.config.actor_config
    assert (actor.load, actor.finetune, actor.pretrained_checkpoint) == (str(tmp_path / "save"), False, str(tmp_path / "model"))
    assert second.config.ref_config.pretrained_checkpoint == str(tmp_path / "model")
    assert dataclasses.replace(second, config=run.config) == run
    said = capsys.readouterr().err
    assert "worker 0 failed in update_actor: its process died" in said and "resumes after iteration 3 (1 restarts left)" in said


def test_without_leave_to_go_on_the_first_fault_ends_it(tmp_path: Path) -> None:
    with pytest.raises(WorkerError):
        attempts(Recovery(run_with(tmp_path)), [(tmp_path, 3, WorkerError("gone"))])


def test_it_gives_up_behind_the_last_restart(tmp_path: Path) -> None:
    faults = [(tmp_path, iteration, WorkerError("gone")) for iteration in (3, 4, 5)]
    with pytest.raises(WorkerError):
        attempts(Recovery(run_with(tmp_path, *TOLERANT)), faults)


def test_the_same_fault_at_the_same_iteration_is_not_tolerated_twice(tmp_path: Path) -> None:
    again = WorkerError("worker 0 failed in update_actor: ValueError: the prompt is too long")
    with pytest.raises(WorkerError):
        attempts(Recovery(run_with(tmp_path, *TOLERANT)), [(tmp_path, 3, again), (tmp_path, 3, again)])


def test_a_mistake_of_the_user_is_no_fault(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such file"):
        attempts(Recovery(run_with(tmp_path, *TOLERANT)), [(tmp_path, 3, ValueError("no such file"))])


def test_without_a_checkpoint_of_its_own_it_begins_anew(tmp_path: Path) -> None:
    run = run_with(tmp_path, *TOLERANT)
    assert resume_from_save(run, 0.0) is run
    save(tmp_path, 7)
    assert resume_from_save(run, 1e12) is run  # another run's, older than this one


def test_an_iteration_that_the_run_file_names_is_where_it_starts_and_not_where_it_resumes(tmp_path: Path) -> None:
    save(tmp_path, 7)
    own = (f"actor_config.load={tmp_path / 'save'}", "actor_config.load_iteration=5", "actor_config.finetune=false")
    run = run_with(tmp_path, *own)
    assert resume_from_save(run, 1e12) is run  # nothing was saved since it started there
    resumed = resume_from_save(run, 0.0).config.actor_config
    assert (resumed.load, resumed.load_iteration) == (str(tmp_path / "save"), None)


class Fitted:
    """Chooses a layout as the planner does, and records what it was asked for."""

    def __init__(self, run: Run) -> None:
        self.run, self.asked = run, list[tuple[int, int]]()

    def __call__(self, num_devices: int, num_nodes: int) -> tuple[Run, list[str]]:
        self.asked.append((num_devices, num_nodes))
        return self.run, [f"rl_config.actor_resource.num_npus={num_devices}"]


def test_on_the_devices_that_are_left_it_goes_on_and_takes_the_others_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = "actor_config.micro_batch_size=16"
    tolerance = "rl_config.fault_tolerance={enabled: true, shrink: true, shrink_wait_s: 7}"
    whole = run_with(tmp_path, tolerance, "rl_config.actor_resource.num_npus=4", small)
    fewer = run_with(tmp_path, tolerance, "rl_config.actor_resource.num_npus=2", small)
    waits, left = list[tuple[str, int, int, float]](), [LiveDevices(2, 1), LiveDevices(3, 1)]

    def wait(platform: str, count: int, nodes: int, timeout_s: float) -> LiveDevices:
        waits.append((platform, count, nodes, timeout_s))
        return left.pop(0)

    fitted = Fitted(fewer)
    recovery = Recovery(whole, fitted, wait=wait)
    watched = []

    def run_all() -> list[Run]:
        runs = []
        returned = DevicesReturnedError("all 4 devices are there again")
        failures = [WorkerError("its node has died"), returned, WorkerError("gone"), None]
        for iteration, (run, failure) in enumerate(zip(recovery.attempts(), failures), 3):
            runs.append(run)
            watched.append(len(recovery.observers))
            with recovery.retry_on_fault():
                save(tmp_path, iteration)
                if failure is not None:
                    raise failure
        return runs

    first, second, third, last = run_all()
    devices = [run.placement.num_devices for run in (first, second, third, last)]
    assert devices == [4, 2, 4, 2] and watched == [0, 1, 0, 1]
    assert waits == [("cpu", 4, 1, 7.0)] * 2 and fitted.asked == [(2, 1), (3, 1)]
    assert {run.config.actor_config.load for run in (second, third, last)} == {str(tmp_path / "save")}
    said = capsys.readouterr().err
    assert "2 of 4 devices on 1 of 1 node(s) are left after 7 s; the run resumes there with rl_config.actor_resource" in said
    assert "all 4 devices are there again; the run resumes after iteration 4 with its own layout" in said


def test_where_all_devices_come_back_in_time_it_keeps_its_layout(tmp_path: Path) -> None:
    devices = ("rl_config.actor_resource.num_npus=4", "actor_config.micro_batch_size=16")
    whole = run_with(tmp_path, "rl_config.fault_tolerance=shrink", *devices)
    for left in (LiveDevices(4, 1), None):
        fitted = Fitted(whole)
        recovery = Recovery(whole, fitted, wait=lambda *arguments, left=left: left)
        runs = attempts(recovery, [(tmp_path, 3, WorkerError("gone")), None])
        assert not fitted.asked and not recovery.observers and runs[1].placement == whole.placement


def test_shrink_is_written_as_a_word_and_needs_recovery(tmp_path: Path) -> None:
    tolerance = run_with(tmp_path, "rl_config.fault_tolerance=shrink").fault_tolerance
    assert (tolerance.enabled, tolerance.shrink) == (True, True)
    with pytest.raises(ConfigError, match="fault_tolerance.shrink .true. needs rl_config.fault_tolerance.enabled"):
        run_with(tmp_path, "rl_config.fault_tolerance.shrink=true")
    with pytest.raises(ConfigError, match="fault_tolerance is 'grow', but must be a group with the keys enabled"):
        run_with(tmp_path, "rl_config.fault_tolerance=grow")
