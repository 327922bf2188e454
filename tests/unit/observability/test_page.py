"""The page holds what the run wrote, needs no network, and looks right in a browser."""

import json
import random
import re
import shutil
import subprocess

import pytest
from PIL import Image, ImageChops, ImageFilter
from plotly.offline import get_plotlyjs

from mindspeed_rl.cli import report, trace
from mindspeed_rl.observability.page import _collect_data, render, write_page
from mindspeed_rl.observability.run_files import read_run

CHROMIUM = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")


def write_run(folder, count, seed=0, samples=True):
    """A run folder with figures that a seed decides."""
    noise = random.Random(seed)
    folder.mkdir(parents=True)
    with (folder / "metrics.jsonl").open("w") as file:
        for i in range(count):
            part = i / max(count - 1, 1)
            record = {
                "iteration": i + 1,
                "grpo/score/mean": 0.2 + 0.6 * part + noise.gauss(0, 0.02),
                "acc_rewards/mean": 0.1 + 0.5 * part,
                "actor/entropy": 1 - 0.5 * part,
                "actor/grad_norm": 1.0 + noise.random(),
                "timing/all": 3.0,
                "timing/rollout": 2.0,
                "timing/update": 1.0,
                "my/own_metric": 7.0,
            }
            file.write(json.dumps(record) + "\n")
    if samples:
        tokens = {
            "ids": [5, 6, 7],
            "texts": ["3+4=", "</script><b>", "7"],
            "log_probs": [-0.1, -3.0, -0.5],
            "advantages": [1.0, 1.0, 1.0],
            "loss_mask": [True, False, True],
            "versions": [0, 0, 1],
            "sampled": [True, False, True],
        }
        sample = {
            "iteration": count,
            "prompt": "three and four </script><script>alert(1)</script>",
            "response": "".join(tokens["texts"]),
            "reward": 1.0,
            "parts": {"acc": 1.0},
            "advantage": 1.0,
            "extra": {"label": "7", "state": "ok"},
            "group": 0,
            "tokens": tokens,
        }
        lines = [json.dumps(sample | {"sample": number, "reward": float(number == 1)}) for number in range(3)]
        (folder / "completions.jsonl").write_text("\n".join(lines) + "\n")
    events = [{"pid": 0, "tid": 0, "name": "thread_name", "ph": "M", "args": {"name": "rank 0"}}]
    for i in range(count):
        for name, start in (("rollout", 0.0), ("update", 2.0)):
            event = {"pid": 0, "tid": 0, "name": name, "ph": "X", "ts": (3 * i + start) * 1e6, "dur": 1e6}
            events.append(event | {"args": {"iteration": i + 1}})
    (folder / "timeline.json").write_text("[\n" + ",\n".join(map(json.dumps, events)))
    report_json = {"title": "grpo_tiny", "outcome": "finished", "config_set": {"rl_config": {"epochs": 1}}}
    (folder / "report.json").write_text(json.dumps(report_json))
    return folder


def test_every_metric_stands_somewhere(tmp_path):
    data = _collect_data([read_run(write_run(tmp_path / "run", 5))])
    shown = {line["name"] for chart in [*data["charts"], *data["others"]] for line in chart["lines"]}
    assert {"grpo/score/mean", "acc_rewards/mean", "actor/entropy", "timing/update", "my/own_metric"} <= shown
    assert [chart["title"] for chart in data["others"]] == ["my/own_metric"]
    phases = next(chart for chart in data["charts"] if chart["kind"] == "stacked")
    assert {line["name"]: line["y"][0] for line in phases["lines"]} == {"timing/rollout": 2.0, "timing/update": 1.0}


def test_what_a_model_writes_cannot_become_markup(tmp_path):
    page = render([read_run(write_run(tmp_path / "run", 3))])
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S).group(1)
    assert "<" not in data and json.loads(data)["samples"][0]["prompt"].endswith("</script><script>alert(1)</script>")


def test_the_page_asks_for_nothing_outside_itself(tmp_path):
    page = render([read_run(write_run(tmp_path / "run", 3))])
    own = page.replace(get_plotlyjs(), "")
    assert not re.search(r"(src|href)\s*=\s*[\"']?(https?:)?//", own) and "@import" not in own and "url(" not in own


def test_many_iterations_make_no_large_page(tmp_path):
    few = len(render([read_run(write_run(tmp_path / "few", 1))]))
    many = len(render([read_run(write_run(tmp_path / "many", 10_000))]))
    assert many - few < 1_500_000


def test_a_run_that_was_killed_while_writing_still_has_a_page(tmp_path):
    folder = write_run(tmp_path / "run", 3)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 4, "grpo/sc')
    (folder / "report.json").unlink()
    data = _collect_data([read_run(folder)])
    assert data["runs"][0]["outcome"] == "running" and data["runs"][0]["iterations"] == 3


def test_the_command_compares_runs_and_names_what_is_no_run(tmp_path, capsys):
    one, two = write_run(tmp_path / "first", 3), write_run(tmp_path / "second", 4, seed=1)
    output = tmp_path / "both.html"
    assert report.main([str(one), str(two), "-o", str(output)]) == 0
    assert "first · second" in output.read_text() and not list(tmp_path.glob(".*partial"))
    (tmp_path / "empty").mkdir()
    assert report.main([str(tmp_path / "empty")]) == 2
    assert report.main([str(tmp_path / "nowhere")]) == 2
    errors = capsys.readouterr().err
    assert "empty holds no run" in errors and "nowhere is not a folder" in errors


def test_trace_shows_a_sample_and_says_which_there_are(tmp_path, capsys):
    folder = str(write_run(tmp_path / "run", 3))
    assert trace.main([folder, "--sample", "1", "--tokens"]) == 0
    shown = capsys.readouterr().out
    assert "three and four" in shown and "3+4=</script><b>7" in shown and "reward 1 (acc 1)" in shown and "-3" in shown
    assert trace.main([folder, "--sample", "9"]) == 2
    assert trace.main([folder, "--iteration", "1"]) == 2
    assert trace.main([folder, "--sample", "1", "--colour", "weight"]) == 2
    errors = capsys.readouterr().err
    assert "samples 0 to 2" in errors and "--iteration 1 was not written; there are 3" in errors and "weights" in errors


def browse(page, *options):
    always = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=8000"]
    command = [CHROMIUM, *always, *options, f"file://{page}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


@needs_browser
def test_a_browser_draws_every_chart_and_every_token(tmp_path):
    page = write_page(tmp_path / "report.html", [read_run(write_run(tmp_path / "run", 40))])
    dom = browse(page, "--window-size=1300,900", "--dump-dom")
    body = dom[dom.index("<body") :]
    assert body.count('class="main-svg"') >= 2 * 7  # reward, parts, entropy, norm, phases, iteration, timeline: two layers each
    assert "3+4=" in body and "not sampled: 1 tokens" in body
    assert "<b>alert" not in body and body.count('class="response') >= 3


@needs_browser
@pytest.mark.parametrize(("name", "size"), [("wide", (1300, 1500)), ("phone", (500, 1500))])
def test_the_page_looks_as_it_did(tmp_path, name, size, request):
    """Compared after blurring, so that another font or browser version passes and a chart that is gone does not."""
    page = write_page(tmp_path / "report.html", [read_run(write_run(tmp_path / "run", 40))])
    picture = tmp_path / "page.png"
    browse(page, f"--window-size={size[0]},{size[1]}", f"--screenshot={picture}")
    seen = Image.open(picture).convert("L").filter(ImageFilter.GaussianBlur(12)).resize((size[0] // 10, size[1] // 10))
    kept = request.path.parents[2] / "data" / "report" / f"{name}.png"
    wanted = Image.open(kept).convert("L")
    assert seen.size == wanted.size
    difference = ImageChops.difference(seen, wanted)
    far = sum(count for value, count in enumerate(difference.histogram()) if value > 40)
    assert far < 0.03 * seen.width * seen.height
