"""A run whose workers fail goes on from its last checkpoint, as often as it may and while that leads anywhere."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from mindspeed_rl.config import load_run_config
from mindspeed_rl.run import Run
from mindspeed_rl.run.resolve import resolve
from mindspeed_rl.run.resume import resume_from_save
from mindspeed_rl.runtime.futures import WorkerError
from mindspeed_rl.trainers.recovery import Recovery


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
