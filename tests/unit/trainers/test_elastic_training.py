"""Devices of the rollout train while it is ahead; a move is the resume that a user would make by hand."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_recovery import run_with, save

from mindspeed_rl.config import MegatronConfig, load_run_config
from mindspeed_rl.run import Run
from mindspeed_rl.run.models import resolve_run
from mindspeed_rl.run.rules.validation import is_valid, validate
from mindspeed_rl.runtime.futures import WorkerError
from mindspeed_rl.trainers.admission import Hysteresis
from mindspeed_rl.trainers.best_evaluation import EvaluationProgress
from mindspeed_rl.trainers.group_sources import QUEUE_LEVEL
from mindspeed_rl.trainers.recovery import Recovery
from mindspeed_rl.trainers.rl import RLTrainer
from mindspeed_rl.trainers.schedule import Schedule
from mindspeed_rl.trainers.supervised import SupervisedTrainer
from mindspeed_rl.trainers.termination import DevicesMovedError, Terminated, Termination

KEYS = (
    "rl_config.use_integrated_worker=false",
    "rl_config.actor_resource.num_npus=1",
    "rl_config.rollout_resource.num_npus=3",
    "rl_config.trainer_mode=async",
    "rl_config.elastic_training_devices=1",
    "rl_config.elastic_training_patience=2",
    "actor_config.tensor_model_parallel_size=1",
    "actor_config.micro_batch_size=16",
    "actor_config.load=null",
    "model.tiny_qwen25.num_layers=4",
)
MOVED = ("rl_config.actor_resource.num_npus=2", "rl_config.rollout_resource.num_npus=2", "rl_config.elastic_training_devices=0")


def elastic(folder: Path, *changes: str) -> Run:
    words = [f"run_dir={folder / 'run'}", f"actor_config.save={folder / 'save'}", *KEYS, *changes]
    return resolve_run(load_run_config("grpo_tiny_cpu", None, words), 1)


def test_means_of_several_iterations_move_devices_and_of_twice_as_many_after_each_move_back() -> None:
    marks = Hysteresis(high=1.0, wait=0.2, patience=2)
    # means of two levels: 0.85, 0.85, 1.0; waits do not count yet
    assert [marks.add(level, 9.0, 10.0) for level in (1.0, 0.7, 1.0, 1.0)] == [False, False, False, True] and marks.is_moved
    # means of two waits, which may alternate: 0.15, 0.2 (the limit), 0.25: back; levels do not count now
    waits = [marks.add(3.0, waited_s, 10.0) for waited_s in (3.0, 0.0, 4.0, 1.0)]
    assert waits == [False, False, False, True] and not marks.is_moved
    # four iterations from now on, and eight after the next move back
    assert [marks.add(1.0, 0.0, 10.0) for _ in range(4)] == [False, False, False, True]
    assert [marks.add(0.0, 5.0, 10.0) for _ in range(4)] == [False, False, False, True]
    assert [marks.add(1.0, 0.0, 10.0) for _ in range(8)] == [False] * 7 + [True]


def test_devices_stay_where_iterations_are_faster_though_the_trainers_wait() -> None:
    marks = Hysteresis(high=1.0, wait=0.2, patience=2)
    assert [marks.add(1.0, 0.0, seconds) for seconds in (9.0, 11.0)] == [False, True]
    assert not any(marks.add(0.0, 9.0, seconds) for seconds in (9.9, 9.9, 10.0))
    assert marks.add(0.0, 9.0, 10.0) and not marks.is_moved


def play(recovery: Recovery, iteration: int, levels: list[tuple[float, float] | None]) -> Run:
    """The run of an attempt whose iterations have these levels and seconds of waits; it ends by the restart that follows."""
    run = next(recovery.attempts())
    termination = Termination()
    recovery.follow(termination)
    with recovery.retry_on_fault():
        for count, figures in enumerate(levels):
            results = {"timing/all": 10.0, "timing/rollout": 9.0}
            if figures is not None:
                results = {QUEUE_LEVEL: figures[0], "timing/all": 10.0, "timing/rollout": figures[1] / 2}
                results["timing/rollout_pause"] = figures[1] / 2
            for observer in recovery.observers:
                observer.on_figures(iteration + count, results)
            if termination.restart is not None:
                assert count == len(levels) - 1, "it moved too early"
                save(Path(run.config.actor_config.save or "").parent, iteration + count)
                raise termination.restart
    return run


def test_a_move_is_the_resume_that_a_user_would_make(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recovery = Recovery(elastic(tmp_path))
    first = play(recovery, 1, [None, (1.0, 0.0), (0.9, 0.0), (1.0, 0.0), (1.0, 0.0)])
    # what was before a move does not count after it, nor does the first iteration
    second = play(recovery, 6, [None, (1.0, 3.0), (1.0, 1.0), (1.0, 2.5), (0.0, 4.0)])
    third = play(recovery, 11, [None, (1.0, 0.0), (1.0, 0.0), (1.0, 0.0)])
    assert [(run.placement.world_size, run.placement.dedicated["rollout"]) for run in (first, second, third)] == [
        (1, 3),
        (2, 2),
        (1, 3),
    ]
    by_hand = elastic(tmp_path, *MOVED, f"actor_config.load={tmp_path / 'save'}")
    assert second.folder == first.folder == by_hand.folder
    assert second.placement == by_hand.placement and second.plan == by_hand.plan
    assert second.config.actor_config.load == str(tmp_path / "save")
    told = capsys.readouterr().err
    keys = " ".join(MOVED)
    assert "the rollout was ahead, so devices of it train; the run resumes after" in told
    assert f"the run resumes after iteration 5 with {keys}" in told
    assert "so devices of the rollout generate again; the run resumes after iteration 10 with the keys of its" in told


def test_a_fault_after_a_move_resumes_on_the_division_that_it_came_on(tmp_path: Path) -> None:
    recovery = Recovery(elastic(tmp_path, "rl_config.fault_tolerance.enabled=true"))
    play(recovery, 1, [None, (1.0, 0.0), (1.0, 0.0)])
    for iteration, error in ((4, WorkerError("gone")), (5, DevicesMovedError("the trainers waited"))):
        run = next(recovery.attempts())
        assert run.placement.world_size == 2
        with recovery.retry_on_fault():
            save(tmp_path, iteration)
            raise error
    assert next(recovery.attempts()).placement.world_size == 1


def test_a_signal_comes_before_a_move(tmp_path: Path) -> None:
    recovery, termination = Recovery(elastic(tmp_path)), Termination(grace_s=1000.0)
    recovery.follow(termination)
    with pytest.raises(Terminated, match="the run ended after an iteration"), termination.handled():
        termination.in_loop = True
        os.kill(os.getpid(), signal.SIGTERM)
        for iteration in (2, 3):
            recovery.observers[0].on_figures(iteration, {QUEUE_LEVEL: 1.0, "timing/all": 1.0})
        assert isinstance(termination.restart, DevicesMovedError) and termination.ends_loop
        termination.ends_early = True
        termination.raise_if_early()


def test_a_signal_while_an_attempt_winds_up_for_a_move_ends_the_run() -> None:
    termination = Termination(grace_s=1000.0)
    with pytest.raises(Terminated, match="the run ended after an iteration"):
        with termination.handled(), termination.explain_failures():
            termination.in_loop = True
            try:
                raise DevicesMovedError("the rollout was ahead")
            finally:
                os.kill(os.getpid(), signal.SIGTERM)


def test_a_save_or_an_evaluation_decides_nothing(tmp_path: Path) -> None:
    """Iterations of 10 s move devices, and they move back as these take 12 s, whenever one has 30 s more for something else."""

    def play_two(recovery: Recovery, seconds: float, waited_s: float, further: dict[str, float]) -> bool:
        termination = Termination()
        next(recovery.attempts())
        recovery.follow(termination)
        for iteration, extra in enumerate(({}, further), 2):
            all_s = seconds + sum(extra.values())
            results = {QUEUE_LEVEL: 1.0, "timing/all": all_s, "timing/rollout": waited_s, **extra}
            recovery.observers[0].on_figures(iteration, results)
        if termination.restart is not None:
            with recovery.retry_on_fault():
                raise termination.restart
        return termination.restart is not None

    for name in ("timing/save", "timing/evaluate", "timing/audit"):
        recovery = Recovery(elastic(tmp_path))
        assert play_two(recovery, 10.0, 0.0, {name: 30.0}), name
        assert not play_two(recovery, 8.0, 4.0, {name: 30.0}), name  # they are faster
        assert play_two(recovery, 12.0, 4.0, {}), name


def test_only_an_attempt_after_a_move_continues_where_all_was_done(tmp_path: Path) -> None:
    recovery = Recovery(elastic(tmp_path, "rl_config.fault_tolerance.enabled=true"))
    continues = []
    for error in (DevicesMovedError("ahead"), WorkerError("gone"), DevicesMovedError("behind"), None):
        next(recovery.attempts())
        with recovery.retry_on_fault():
            recovery.follow(termination := Termination())
            continues.append(termination.continues)
            if error is not None:
                raise error
    assert continues == [False, True, False, True]


def test_an_evaluation_that_ends_the_run_comes_before_a_move(tmp_path: Path) -> None:
    progress = EvaluationProgress(MegatronConfig(eval_target=0.5), print, start_iteration=0)
    termination = Termination()
    termination.restart = DevicesMovedError("the rollout was ahead")
    loop: Any = SimpleNamespace(
        termination=termination, progress=progress, schedule=Schedule(elastic(tmp_path, "actor_config.train_iters=9"))
    )
    progress.add(4, {"eval/accuracy": 0.6})
    assert progress.end_reason and not RLTrainer._ends_early(loop, 3) and not termination.ends_early
    loop = SimpleNamespace(termination=termination, progress=progress, train_iters=9)
    assert not SupervisedTrainer._ends_early(loop, 4) and not termination.ends_early


def test_equal_levels_at_the_limit_are_a_full_queue() -> None:
    # the sum of ten times 0.1 is less than 1 in floating point
    marks = Hysteresis(high=0.1, wait=0.2, patience=10)
    assert [marks.add(0.1, 0.0, 10.0) for _ in range(10)] == [False] * 9 + [True]


@pytest.mark.parametrize(
    ("changes", "rule", "words"),
    [
        (["actor_config.micro_batch_size=512"], "moved_", ["with these devices moved", "micro_batch_size (512)"]),
        (
            ["rl_config.actor_resource.num_npus=2", "actor_config.tensor_model_parallel_size=2"],
            "moved_actor_replicas",
            ["elastic_training_devices (1): with these devices moved, devices of the actor (3", "must be divisible"],
        ),
    ],
)
def test_the_other_division_keeps_the_rules_too(tmp_path: Path, changes: list[str], rule: str, words: list[str]) -> None:
    from mindspeed_rl.run.draft import draft

    words_of_run = [f"actor_config.save={tmp_path}", *KEYS, *changes]
    run = draft(load_run_config("grpo_tiny_cpu", None, words_of_run), platform="cpu")
    violations = validate(run)
    assert violations and not is_valid(run) and all(violation.rule.startswith("moved_") for violation in violations)
    assert any(item.rule.startswith(rule) and all(word in item.message for word in words) for item in violations)
    # without moves nothing is wrong
    words_of_run.append("rl_config.elastic_training_devices=0")
    still = draft(load_run_config("grpo_tiny_cpu", None, words_of_run), platform="cpu")
    assert validate(still) == [] and is_valid(still)


def test_a_run_without_the_key_is_followed_by_nothing(tmp_path: Path) -> None:
    assert not Recovery(run_with(tmp_path)).observers
