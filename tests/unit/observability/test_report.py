"""The report and the completions file hold what happened."""

import json

from mindspeed_rl.observability.completions import Completion, is_due
from mindspeed_rl.observability.history import History
from mindspeed_rl.observability.report import write_report
from mindspeed_rl.observability.run_files import read_lines
from mindspeed_rl.trainers.rollout_logger import _CompletionWriter


def test_the_report_sums_up_the_metrics_file(tmp_path):
    lines = [
        {"iteration": 0, "eval/accuracy": 0.125},
        {"iteration": 1, "grpo/score/mean": 0.25, "timing/all": 1.0, "timing/rollout": 0.5},
        {"iteration": 2, "grpo/score/mean": None, "timing/all": 3.0, "timing/rollout": 1.5},
        {"iteration": 3, "grpo/score/mean": 0.75, "timing/all": 2.0, "timing/rollout": 1.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    path = write_report(
        tmp_path,
        {"train_iters": 3, "seed": 1},
        title="grpo_tiny",
        results={"accuracy after": 0.91},
        config_set={"train_iters": 3},
    )
    text = path.read_text()
    assert "| grpo/score/mean | 0.25 | 0.75 | 0.5 | 0.25 | 0.75 |" in text
    assert "| rollout | 1.000 | 0:03 | 50% |" in text
    assert "| eval/accuracy/first | 0.125 |" in text
    assert "| accuracy after | 0.91 |" in text and "`train_iters=3`" in text and "seed" not in text
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["metrics"]["timing/all"] == {"first": 1.0, "last": 2.0, "mean": 2.0, "min": 1.0, "max": 3.0, "count": 3}
    assert report["iterations"] == 3 and report["versions"]["torch"] and report["config"] == {"train_iters": 3, "seed": 1}


def test_a_run_that_failed_before_its_first_iteration_still_gets_a_report(tmp_path):
    text = write_report(tmp_path / "run", {}, title="grpo", outcome="worker 1 died").read_text()
    assert "Outcome: worker 1 died. Iterations: 0." in text


def test_a_repeated_iteration_counts_once_and_its_records_join(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"iteration": 2, "a": 1}\n{"iteration": 1, "a": 5}\n{"iteration": 2, "a": 3, "eval/accuracy": 0.5}\n')
    history = History(read_lines(path))
    assert list(history.iterations) == [1, 2]
    points = {name: (list(series.x), list(series.y)) for name, series in history.series.items()}
    assert points == {"a": ([1, 2], [5.0, 3.0]), "eval/accuracy": ([2], [0.5])}


def test_completions_are_written_every_n_iterations(tmp_path):
    writer = _CompletionWriter(tmp_path / "completions.jsonl", interval=2, limit=1)
    completion = Completion("3+4=", "7", 1.0, {"acc": 1.0}, 0.5, {"label": "7"})
    for iteration in (1, 2, 3, 4):
        writer.write(iteration, [completion, completion])
    records = [json.loads(line) for line in (tmp_path / "completions.jsonl").read_text().splitlines()]
    assert [record["iteration"] for record in records] == [1, 2, 4]
    assert records[0] == {
        "iteration": 1, "prompt": "3+4=", "response": "7", "reward": 1.0,
        "parts": {"acc": 1.0}, "advantage": 0.5, "extra": {"label": "7"},
    }  # fmt: skip


def test_interval_zero_writes_nothing(tmp_path):
    writer = _CompletionWriter(tmp_path / "completions.jsonl", interval=0)
    assert not is_due(1, writer.interval)
    writer.write(1, [Completion("a", "b", 0.0)])
    assert not (tmp_path / "completions.jsonl").exists()
