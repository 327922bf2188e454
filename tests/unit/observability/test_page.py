"""The page holds what the run wrote, needs no network, and looks right in a browser."""

import html
import json
import random
import re
import shutil
import subprocess

import pytest
from patience import patient
from PIL import Image, ImageChops, ImageFilter

from mindspeed_rl.cli import report, trace
from mindspeed_rl.observability.page import _collect_data, collect_figures, render, write_page
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
    own = page
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
    result, two = write_run(tmp_path / "first", 3), write_run(tmp_path / "second", 4, seed=1)
    output = tmp_path / "both.html"
    assert report.main([str(result), str(two), "-o", str(output)]) == 0
    assert "first · second" in output.read_text() and not list(tmp_path.glob(".*partial"))
    (tmp_path / "empty").mkdir()
    assert report.main([str(tmp_path / "empty")]) == 2
    assert report.main([str(tmp_path / "nowhere")]) == 2
    errors = capsys.readouterr().err
    assert "empty holds no run" in errors and "nowhere' does not exist" in errors


def write_evaluated_run(folder):
    """A run that collapses: an evaluation before it and three in it, two checkpoints, responses to three prompts."""
    folder = write_run(folder, 40, samples=False)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line |= {"rewards/total_mean": line["grpo/score/mean"], "actor/lr": 1e-3, "rollout/truncated_fraction": 0.0}
        line |= {"memory/peak_gib": 2.0, "memory/update_gib": 1.5, "memory/update/weights_gib": 0.5}
        line |= {"eval/accuracy": accuracy} if (accuracy := {10: 0.6, 20: 0.7, 40: 0.2}.get(line["iteration"])) else {}
    lines.insert(0, {"iteration": 0, "eval/accuracy": 0.1})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    rewards = {0: [0.0, 1.0, 0.0], 40: [0.0, 1.0, 1.0]}
    rows = [
        {"iteration": i, "index": k, "prompt": f"p{k}", "response": f"r{k}-{i}", "label": "7", "reward": reward}
        for i, values in rewards.items()
        for k, reward in enumerate(values)
    ]
    (folder / "examples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for iteration in (10, 40):
        (folder / "save" / f"iter_{iteration:07d}").mkdir(parents=True)
    path = folder / "report.json"
    actor = {"actor_config": {"save": str(folder / "save"), "save_hf": True}}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"planned_iterations": 40, "config": actor}))
    return folder


def test_one_sentence_says_what_was_learnt_and_which_checkpoint_to_take(tmp_path):
    folder = write_evaluated_run(tmp_path / "run")
    run = _collect_data([read_run(folder)])["runs"][0]
    sentence = "Accuracy on held-out prompts: 10.0% before training, 20.0% at iteration 40; best: 70.0% at iteration 20."
    # the checkpoint of iteration 20 is not kept
    command = f"Best of its checkpoints, iteration 10: mindspeed-rl chat --load {folder}/save/hf/iter_0000010"
    assert run["learnt"] == [sentence, command] and run["iterations"] == 40


def test_tiles_have_the_median_of_the_last_iterations(tmp_path):
    folder = write_evaluated_run(tmp_path / "run")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lines[-1]["timing/all"] = 900.0  # the last iteration was slow
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    tiles = {tile["label"]: tile["value"] for tile in _collect_data([read_run(folder)])["runs"][0]["tiles"]}
    assert tiles["seconds per iteration"] == "3.00" and tiles["accuracy, held out"] == "20.0%"


def test_charts_have_names_and_no_line_twice_and_none_is_empty(tmp_path):
    data = _collect_data([read_run(write_evaluated_run(tmp_path / "run"))])
    charts = {chart["title"]: chart["lines"] for chart in data["charts"]}
    assert [line["label"] for line in charts["Reward"]] == ["reward of the rollouts"]
    assert [line["label"] for line in charts["Reward by part"]] == ["acc"]
    assert charts["Accuracy on held-out prompts"][0]["x"] == [0, 10, 20, 40]
    assert "Truncated, failed" not in charts and "rollout/truncated_fraction" in {chart["title"] for chart in data["others"]}
    # what never changes is text, and takes no chart
    texts = [item["text"] for item in data["constants"]]
    assert texts == ["learning rate 0.001", "iteration 3 s", "memory peak 2, update 1.5 GiB"] and "Memory" not in charts
    assert [line["label"] for line in charts["Memory of an update by owner"]] == ["weights"]


def test_examples_are_pairs_of_which_the_improved_come_first(tmp_path):
    pairs = _collect_data([read_run(write_evaluated_run(tmp_path / "run"))])["examples"]
    assert [(pair["prompt"], pair["before"]["response"], pair["after"]["response"]) for pair in pairs] == [
        ("p2", "r2-0", "r2-40"), ("p0", "r0-0", "r0-40"), ("p1", "r1-0", "r1-40"),
    ]  # fmt: skip


def test_a_shared_report_has_the_figures_and_nothing_of_the_user(tmp_path, capsys):
    folder = write_run(tmp_path / "secret_folder", 30)
    (folder / "examples.jsonl").write_text(json.dumps({"iteration": 0, "index": 0, "prompt": "secret prompt"}) + "\n")
    own = {
        "megatron_training": {"stage": "ray_grpo", "load": "/secret/m", "data_path": ["secret.jsonl"], "global_batch_size": 64},
        "rl_config": {"verifier_function": ["gsm8k"], "judge_url": "secret", "wandb_project": "secret", "loss_type": "dapo"},
        "generate_config": {"vllm_server_host": "secret", "sampling_config": {"temperature": 0.7, "stop": ["a secret"]}},
        "run_dir": "runs/secret",
    }
    values = {"title": "secret_task", "outcome": "failed: /secret/file", "config_set": own, "config": own}
    values["versions"] = {"torch": "2"}
    (folder / "report.json").write_text(json.dumps(values))
    assert report.main([str(folder), "--share"]) == 0
    page = (folder / "share.html").read_text()
    assert "secret" not in page and "three and four" not in page and str(tmp_path) not in page
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.S).group(1))
    assert data["runs"][0]["config"] == {
        "megatron_training": {"stage": "ray_grpo", "global_batch_size": 64},
        "rl_config": {"verifier_function": ["gsm8k"], "loss_type": "dapo"},
        "generate_config": {"sampling_config": {"temperature": 0.7}},
    }
    assert data["runs"][0]["outcome"] == "failed" and data["runs"][0]["versions"] == {"torch": "2"}
    assert {chart["title"] for chart in data["charts"]} >= {"Reward", "Gradient norm", "Phases of an iteration"}


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
    return subprocess.run(command, capture_output=True, text=True, timeout=patient(120), check=True).stdout


@needs_browser
def test_a_browser_renders_every_chart_and_every_token(tmp_path):
    page = write_page(tmp_path / "report.html", [read_run(write_run(tmp_path / "run", 40))])
    dom = browse(page, "--window-size=1300,900", "--dump-dom")
    body = dom[dom.index("<body") :]
    assert body.count("<svg") == 7  # reward, parts, entropy, norm, phases, timeline, and one of the other metrics
    assert "3+4=" in body and "not sampled: 1 tokens" in body
    assert "<b>alert" not in body and body.count('class="response') >= 3


#: writes into the page which cards overlap or are cut, and the texts of constants
PROBE = """
<script>
addEventListener("load", () => setTimeout(() => {
  const nodes = [...document.querySelectorAll(".card, .tile, .alert, h1, h2")];
  const boxes = nodes.map((node) => [node, node.getBoundingClientRect()]);
  const faults = [];
  for (const [a, p] of boxes) {
    if (p.right > innerWidth + 1) faults.push("cut: " + a.textContent.slice(0, 30));
    for (const [b, q] of boxes) {
      const meet = p.left < q.right - 1 && q.left < p.right - 1 && p.top < q.bottom - 1 && q.top < p.bottom - 1;
      if (meet && !a.contains(b) && !b.contains(a)) faults.push("overlap: " + a.textContent.slice(0, 30));
    }
  }
  const constants = [...document.querySelectorAll(".constants")].map((node) => node.textContent);
  document.title = JSON.stringify({ faults, constants, theme: document.documentElement.dataset.theme });
}, 1500));
</script>
"""


@needs_browser
@pytest.mark.parametrize(("width", "theme"), [(1300, "light"), (1300, "dark"), (500, "light")])
def test_nothing_overlaps_and_a_constant_is_a_line_of_text(tmp_path, width, theme):
    page = write_page(tmp_path / "report.html", [read_run(write_evaluated_run(tmp_path / "run"))])
    page.write_text(page.read_text().replace("</body>", PROBE + "</body>"))
    options = ["--blink-settings=preferredColorScheme=0"] if theme == "dark" else []
    dom = browse(page, f"--window-size={width},900", "--dump-dom", *options)
    content = json.loads(html.unescape(re.search(r"<title>(.*?)</title>", dom, re.S).group(1)))
    constants = ["constant: learning rate 0.001", "constant: iteration 3 s · memory peak 2, update 1.5 GiB"]
    assert content["faults"] == [] and content["theme"] == theme
    assert content["constants"][0] == constants[0] and content["constants"][1].startswith(constants[1])


@needs_browser
def test_a_page_that_follows_a_run_adds_new_points(tmp_path):
    folder = write_run(tmp_path / "run", 40, samples=False)
    page = write_page(tmp_path / "report.html", [read_run(folder)])
    with (folder / "metrics.jsonl").open("a") as file:
        last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
        file.write(json.dumps(last | {"iteration": 41, "grpo/score/mean": 0.99}) + "\n")
    fresh = json.dumps(collect_figures([read_run(folder)])).replace("<", "\\u003c")
    script = f"""<script>addEventListener("load", () => setTimeout(() => {{
      refresh({fresh});
      const line = document.querySelector(".chart").chart.lines.at(-1);
      document.title = JSON.stringify([line.x.at(-1), line.y.at(-1)]);
    }}, 1000));</script></body>"""
    page.write_text(page.read_text().replace("</body>", script))
    dom = browse(page, "--window-size=1300,900", "--dump-dom")
    assert json.loads(html.unescape(re.search(r"<title>(.*?)</title>", dom, re.S).group(1))) == [41, 0.99]
    assert "41 iterations" in dom


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


def test_each_chart_is_a_picture_too(tmp_path, capsys):
    folder = write_run(tmp_path / "run", 30, samples=False)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for index, line in enumerate(lines):
        line["rollout/log_probs_diff_max"] = 0.0 if index == 3 else 10.0 ** -(index % 5)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert report.main([str(folder), "--png", str(tmp_path / "slides")]) == 0
    names = {path.name for path in (tmp_path / "slides").iterdir()}
    assert {"reward.png", "entropy.png", "trainer_against_rollout.png", "phases_of_an_iteration.png"} <= names
    assert all(Image.open(tmp_path / "slides" / name).size == (1200, 640) for name in names)
    assert "reward.png" in capsys.readouterr().out
