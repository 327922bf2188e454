"""One readable line an iteration, on a terminal and in a pipe."""

import io

from mindspeed_rl.observability.console import IterationProgress, _format_metrics, format_duration

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
