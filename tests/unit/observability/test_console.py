"""The plan before a run and the summary behind it; a bar that a real terminal sees moving."""

import os
import pty
import select
import subprocess
import sys
from pathlib import Path

from observed_config import CPU_RUN
from patience import patient

from mindspeed_rl.config import build_run_config
from mindspeed_rl.observability.console import format_summary, format_table
from mindspeed_rl.observability.history import History
from mindspeed_rl.run.resolve import resolve
from mindspeed_rl.trainers.launch import _plan_rows

RECORDS = [
    {
        "iteration": 1,
        "grpo/score/mean": 0.25,
        "actor/pg_loss": 0.5,
        "memory/peak_gib": 1.5,
        "timing/all": 2.0,
        "e2e_tps": 1000.0,
    },
    {
        "iteration": 2,
        "grpo/score/mean": 0.5,
        "actor/pg_loss": None,
        "memory/peak_gib": 2.25,
        "timing/all": 4.0,
        "e2e_tps": 2000.0,
    },
]


#: with an evaluation before the first iteration, and one after each
EVALUATED = [{"iteration": 0, "eval/accuracy": 0.125}, *({**r, "eval/accuracy": 0.5 / r["iteration"]} for r in RECORDS)]


def test_the_summary_has_iterations_time_figures_memory_speed_and_the_report():
    said = format_summary(
        History(EVALUATED),
        outcome="finished",
        seconds=75.0,
        planned=2,
        report=Path("r/report.html"),
    )
    assert said.splitlines() == [
        "finished:",
        "  iterations          2 of 2 in 1:15",
        "  accuracy, held out  25.0% (first 12.5%, best 50.0% at iteration 1)",
        "  reward              0.500 (first 0.250)",
        "  loss                0.5000",
        "  memory              2.25 GiB at most, of the worker that has most",
        "  speed               3.00 s per iteration, 1,500 tokens/s and device",
        "  report              r/report.html",
    ]


def test_a_run_that_failed_early_has_a_summary_too():
    said = format_summary(History(), outcome="failed: ValueError: x", seconds=3.0, planned=None, report=Path("report.html"))
    assert said.splitlines() == ["failed:", "  iterations  0 in 0:03", "  report      report.html"]


def test_rows_without_a_text_are_left_out():
    assert format_table("plan", {"a": "1", "long": "", "bb": "2"}) == "plan\n  a   1\n  bb  2"


def test_the_plan_says_what_is_trained_on_what_and_in_which_sizes(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    rows = _plan_rows(resolve(build_run_config(CPU_RUN), platform="cpu"), 2)
    assert rows["stage"] == "ray_grpo" and rows["length"] == "10 iterations"
    assert rows["devices"] == "2 x cpu on 1 node(s), TP 2, fp32, 3 thread(s) each"
    assert rows["rollout"] == "4 prompts x 8 responses, at most 16 tokens, temperature 0.5"
    assert rows["update"] == "2 optimizer step(s) of 16 responses, micro-batches of 4"
    assert (rows["rewards"], rows["learning rate"], rows["saves to"]) == ("exact_match", "0.001, linear", "nowhere")


PROGRAM = """
from mindspeed_rl.observability.console import IterationProgress
with IterationProgress(40, "grpo", every=40) as progress:
    for iteration in range(1, 41):
        progress.update(iteration, {"timing/all": 0.1})
"""


def test_on_a_terminal_a_single_bar_is_overwritten():
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "30"}
    child = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=theirs, stderr=subprocess.STDOUT, env=environment)
    os.close(theirs)
    seen = b""
    try:
        while select.select([ours], [], [], 60)[0]:
            try:
                part = os.read(ours, 65536)
            except OSError:  # the other end is closed
                break
            if not part:
                break
            seen += part
        assert child.wait(patient(60)) == 0
    finally:
        child.kill()
        os.close(ours)
    text = seen.decode()
    assert "grpo" in text and "/40" in text and "\x1b[2K" in text  # the line of the bar is cleared and written again
    assert text.count("iteration 40/40") == 1 and text.count("\n") < 20
