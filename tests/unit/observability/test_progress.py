"""One readable line an iteration, on a terminal and in a pipe; what happens within an iteration, and its responses."""

import io
import logging
import sys
import threading
from pathlib import Path

import pytest
from patience import patient

from mindspeed_rl.observability import console, heartbeat
from mindspeed_rl.observability.completions import Completion
from mindspeed_rl.observability.console import IterationProgress, _format_metrics, format_completions, format_duration
from mindspeed_rl.observability.logging import set_up_logging

METRICS = {
    "timing/all": 0.312,
    "timing/rollout": 0.12,
    "timing/update": 0.1,
    "actor/pg_loss": 0.01234,
    "grpo/score/mean": 0.71,
    "rollout/log_probs_diff_max": 2.3e-6,
    "something/else": 4.0,
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_line_names_what_matters_and_where_the_time_went():
    assert _format_metrics(7, 250, METRICS, eta_s=62.0) == (
        "iteration   7/250 | reward 0.710 | loss 0.0123 | rollout_diff 2.3e-06 | 0.31 s (rollout 0.12, update 0.10) | 1:02 left"
    )


def test_the_seconds_of_an_iteration_name_every_phase_that_ran():
    timers = {"rollout": 4.0, "rule_reward": 1.5, "reference_model": 0.5, "adv": 0.25, "update": 2.0, "update_weights": 0.75}
    line = _format_metrics(1, 2, {"timing/all": 9.0} | {f"timing/{name}": seconds for name, seconds in timers.items()})
    assert line.endswith("9.00 s (rollout 4.00, reward 1.50, ref 0.50, adv 0.25, update 2.00, push 0.75)")


def test_a_pipe_gets_plain_lines_without_control_characters():
    pipe = io.StringIO()
    seconds = iter([0.0, 2.0, 4.0])
    with IterationProgress(2, stream=pipe, now_s=lambda: next(seconds)) as progress:
        progress.update(1, METRICS)
        progress.update(2, METRICS)
    lines = pipe.getvalue().splitlines()
    assert len(lines) == 2 and lines[0].endswith("| 0:02 left") and lines[1].endswith("update 0.10)")
    assert all(character.isprintable() for line in lines for character in line)


def test_a_terminal_gets_the_lines_and_a_bar():
    terminal = Terminal()
    with IterationProgress(2, "grpo", stream=terminal) as progress:
        progress.update(1, METRICS)
        progress.note("saved [checkpoint] 1")
    assert "reward 0.710" in terminal.getvalue() and "\x1b[" in terminal.getvalue() and "1/2" in terminal.getvalue()
    assert "saved [checkpoint] 1" in terminal.getvalue()


def test_fewer_lines_on_request_but_always_the_last_and_evaluations():
    pipe = io.StringIO()
    with IterationProgress(7, stream=pipe, every=3) as progress:
        for iteration in range(1, 8):
            progress.update(iteration, {"eval/accuracy": 0.5} if iteration == 4 else {})
    assert [line.split("/")[0] for line in pipe.getvalue().splitlines()] == [f"iteration {i}" for i in (3, 4, 6, 7)]


def test_a_resumed_run_estimates_from_its_own_iterations():
    pipe = io.StringIO()
    seconds = iter([0.0, 10.0])
    with IterationProgress(100, start=90, stream=pipe, now_s=lambda: next(seconds)) as progress:
        progress.update(91, {})
    assert pipe.getvalue() == "iteration  91/100 | 1:30 left\n"


def test_durations_read_as_clocks():
    assert [format_duration(s) for s in (0, 59.6, 61, 3725)] == ["0:00", "1:00", "1:01", "1:02:05"]


FULL = {name: 0.123456 for name, _, _ in console._COLUMNS} | {timer: 12.3 for timer, _ in console._PHASES}


@pytest.mark.parametrize("width", [60, 80, 100])
@pytest.mark.parametrize("metrics", [METRICS, FULL, {}, {"timing/all": 1.0}, {"eval/accuracy": 0.5, "timing/all": 3661.0}])
def test_an_iteration_takes_two_lines_of_a_terminal_at_most(width, metrics):
    lines = _format_metrics(12, 250, metrics, eta_s=3725.0, width=width).split("\n")
    assert len(lines) <= 2 and all(len(line) <= width for line in lines)
    assert lines[0].startswith("iteration  12/250") and "1:02:05 left" in lines[-1]
    if "timing/all" in metrics:
        assert f"{metrics['timing/all']:.2f} s" in lines[-1]


def test_the_longest_phases_stay_where_not_all_have_room():
    timers = {"rollout": 40.0, "rule_reward": 1.5, "reference_model": 0.5, "adv": 0.25, "update": 20.0, "update_weights": 7.5}
    metrics = FULL | {name: 0.01 for name, _ in console._PHASES} | {f"timing/{name}": value for name, value in timers.items()}
    line = _format_metrics(1, 2, metrics, width=80).split("\n")[1]
    assert all(text in line for text in ("rollout 40.00", "update 20.00", "push 7.50")) and "adv" not in line


def test_a_terminal_says_once_what_is_left_and_shows_what_happens():
    terminal, shown = Terminal(), threading.Event()

    def describe() -> str:
        shown.set()
        return "37 of 128 samples"

    with IterationProgress(9, "grpo", stream=terminal, activity=describe) as progress:
        progress.update(1, METRICS)
        assert shown.wait(patient(10))
        progress._bar.refresh()
    lines = terminal.getvalue()
    assert "37 of 128 samples" in lines
    assert " left" not in next(line for line in lines.splitlines() if "iteration 1/9" in line)


def test_a_warning_leaves_no_dead_bar_behind(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    before = logging.getLogger().handlers[:]
    try:
        set_up_logging(None)
        with IterationProgress(9, "grpo", stream=terminal):
            logging.getLogger("mindspeed_rl.x").warning("a judge is slow")
            # a stream of the bar's own, which clears the bar, writes the line and draws the bar anew below it
            assert sys.stderr is not terminal
        text = terminal.getvalue()
    finally:
        logging.getLogger().handlers[:] = before
    assert "\x1b[2K" in text[: text.index("a judge is slow")]


def test_counts_of_all_processes_are_added_up(tmp_path: Path, monkeypatch):
    assert heartbeat.describe_counts(tmp_path) == ""
    beats = [heartbeat._Heartbeat(tmp_path, f"worker {rank}", interval_s=60.0) for rank in (0, 1)]
    try:
        beats[0].set("generate")
        beats[0].count(3, 64, "samples", 100)
        beats[1].set("generate")
        beats[1].count(5, 64, "samples", 1000)
        assert heartbeat.describe_counts(tmp_path) == "8 of 128 samples, 1,100 tokens"
        for beat in beats:
            beat.set("update_actor")
        assert heartbeat.describe_counts(tmp_path) == ""
        monkeypatch.setattr(heartbeat, "current", beats[0])
        assert list(heartbeat.count_items("ab", "micro-batches")) == ["a", "b"]
        assert heartbeat.describe_counts(tmp_path) == "2 of 2 micro-batches"
        (tmp_path / "alive" / "worker_9.json").write_text('{"counted": [1')
        assert heartbeat.describe_counts(tmp_path) == "2 of 2 micro-batches"
    finally:
        for beat in beats:
            beat.end()


def complete(group: int, reward: float | None, response: str, **parts: float) -> Completion:
    return Completion(f"What is {group} + 2?", response, reward, parts, group=group)


def test_the_table_of_responses_begins_with_a_prompt_whose_rewards_differ():
    rows = [complete(0, 1.0, "same"), complete(0, 1.0, "same too")]
    rows += [complete(1, 0.0, "wrong\x1b[31m"), complete(1, 1.0, "right\n3")]
    lines = format_completions([*rows, complete(1, None, "no score")], 80).splitlines()
    assert lines[0] == "prompt: What is 1 + 2?"
    assert [line.split() for line in lines[1:] if "\u2500" not in line] == [
        ["reward", "response"], ["1", "right", "3"], ["0", "wrong\\x1b[31m"], ["-", "no", "score"],
    ]  # fmt: skip
    assert format_completions([], 80) == ""


def test_the_table_of_responses_has_parts_the_extremes_and_the_width_of_the_terminal():
    rows = [complete(0, float(i), f"response {i} " + "x" * 500, answer=i / 2, form=i / 2) for i in range(8)]
    text = format_completions(rows, 60)
    assert all(len(line) <= 60 for line in text.splitlines()[1:]) and "(4 of 8 responses)" in text
    assert [int(line.split()[0]) for line in text.splitlines() if "response " in line] == [7, 6, 1, 0]
    assert text.splitlines()[1].split() == ["reward", "answer", "form", "response"]
