"""Callbacks see the figures and samples of each iteration in order, and can end the run; a notebook shows text as text."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from mindspeed_rl.objects import NotebookProgress, SFTConfig, TrainerCallback, TrainerState
from mindspeed_rl.objects.callbacks import CallbackObserver, render_progress
from mindspeed_rl.objects.trainers import _with_messages
from mindspeed_rl.observability.completions import Completion
from mindspeed_rl.observability.observer import AttemptObserver

SAMPLES = [Completion("2 + 2", "<b>4</b>", 1.0, group=0), Completion("2 + 2", "five", 0.0, group=0)]


class Recorder(TrainerCallback):
    def __init__(self) -> None:
        self.events: list[tuple[str, object]] = []

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **further: Any) -> None:
        self.events.append(("begin", state.max_steps))

    def on_samples(self, args: Any, state: Any, control: Any, *, samples: Sequence[Completion], **further: Any) -> None:
        self.events.append(("samples", [sample.reward for sample in samples]))

    def on_log(self, args: Any, state: Any, control: Any, *, logs: Mapping[str, float], **further: Any) -> None:
        self.events.append(("log", logs["train/loss"]))

    def on_evaluate(self, args: Any, state: Any, control: Any, *, metrics: Mapping[str, float], **further: Any) -> None:
        self.events.append(("evaluate", dict(metrics)))

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **further: Any) -> None:
        self.events.append(("step", state.global_step))
        control.should_training_stop = state.global_step == 2

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **further: Any) -> None:
        self.events.append(("end", len(state.log_history)))


def test_events_come_in_order_and_a_callback_ends_the_run() -> None:
    recorder, state, ended = Recorder(), TrainerState(), list[int]()
    observer = CallbackObserver([recorder], SFTConfig(), state)
    observer.end = lambda: ended.append(state.global_step)
    observer.on_start()
    observer.on_loop(5)
    observer.on_figures(0, {"train/loss": 3.0, "eval/loss": 4.0})
    observer.on_samples(1, SAMPLES)
    observer.on_figures(1, {"train/loss": 2.0})
    observer.on_figures(2, {"train/loss": 1.0, "eval/loss": 2.0})
    observer.close()
    assert recorder.events == [
        ("begin", 5),
        ("log", 3.0),
        ("evaluate", {"eval/loss": 4.0}),
        ("samples", [1.0, 0.0]),
        ("log", 2.0),
        ("step", 1),
        ("log", 1.0),
        ("evaluate", {"eval/loss": 2.0}),
        ("step", 2),
        ("end", 3),
    ]
    assert ended == [2] and observer.has_ended
    assert [line["iteration"] for line in state.log_history] == [0, 1, 2] and state.samples == SAMPLES


def test_a_run_of_several_attempts_begins_and_ends_once() -> None:
    recorder = Recorder()
    attempts = AttemptObserver(CallbackObserver([recorder], SFTConfig(), TrainerState()))
    attempts.end()  # no attempt has begun
    for iteration in (1, 2):
        attempts.on_start()
        attempts.on_loop(5)
        attempts.on_figures(iteration, {"train/loss": 2.0})
        attempts.close()
    attempts.end()
    assert [event for event, _ in recorder.events] == ["begin", "log", "step", "log", "step", "end"]


def test_a_notebook_shows_the_same_place_anew_and_texts_as_text() -> None:
    pages: list[str] = []
    progress, state = NotebookProgress(pages.append), TrainerState(max_steps=4)
    observer = CallbackObserver([progress], SFTConfig(), state)
    observer.on_loop(4)
    observer.on_samples(1, SAMPLES)
    observer.on_figures(1, {"rewards/total_mean": 0.5, "other": 1.0})
    assert len(pages) == 2 and pages[-1] == render_progress(state)
    assert "value='1' max='4'" in pages[-1] and "<td>0.5</td>" in pages[-1] and "other" not in pages[-1]
    assert "&lt;b&gt;4&lt;/b&gt;" in pages[-1] and "<b>" not in pages[-1]


def test_responses_to_messages_are_messages_as_in_trl() -> None:
    def lengths(completions: list[list[dict[str, str]]], **columns: Any) -> list[float]:
        return [float(len(completion[0]["content"])) for completion in completions]

    async def later(completions: list[list[dict[str, str]]]) -> list[str]:
        return [completion[0]["role"] for completion in completions]

    assert _with_messages(lengths)(completions=["ab", "c"], answer=["x", "y"]) == [2.0, 1.0]
    assert asyncio.run(_with_messages(later)(completions=["ab"])) == ["assistant"]
    assert _with_messages(lengths).__name__ == "lengths"
