"""The first day of a stranger: an empty folder, a task, a run that is interrupted and resumed, and the trained model in use."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import transformers
from patience import patient
from shared_forks import shared

from mindspeed_rl.cli.new import _KINDS
from mindspeed_rl.runtime.fork_server import RL, TRAINING

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 15 * 60

pytestmark = pytest.mark.slow


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """An environment in which `mindspeed-rl` is a command."""
    command = tmp_path / "bin" / "mindspeed-rl"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m mindspeed_rl.cli.main "$@"\n')
    command.chmod(0o755)
    values = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **shared(RL, TRAINING)}
    return values | {"PATH": f"{command.parent}:{values['PATH']}"}


def run(command: str, folder: Path, environment: dict[str, str], *, typed: str = "", status: int = 0) -> str:
    words = ["bash", "-c", command]
    done = subprocess.run(
        words, cwd=folder, env=environment, input=typed, capture_output=True, text=True, timeout=patient(600), check=False
    )
    assert done.returncode == status, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def commands(folder: Path) -> dict[str, str]:
    """The commands of the README that `new` has written, by name."""
    block = re.search(r"```bash\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    assert block is not None
    return {line.split()[1]: line for line in block[1].splitlines()}


def iterations(folder: Path) -> list[int]:
    path = folder / "runs/first/metrics.jsonl"
    lines = path.read_text().splitlines() if path.is_file() else []
    return [iteration for line in lines if (iteration := json.loads(line)["iteration"])]


def test_a_first_day_from_an_empty_folder_to_an_exported_model(tmp_path: Path, environment: dict[str, str]) -> None:
    start = time.monotonic()
    home = tmp_path / "home"
    home.mkdir()
    printed = run("mindspeed-rl new first --kind format", home, environment)
    assert "cd first" in printed
    work = home / "first"
    steps = commands(work)
    for line in steps.values():
        assert line in printed
    assert "valid" in run(steps["explain"], work, environment)

    # short: 12 iterations of 16 prompts in place of 60, saved every 3
    keys = "megatron_training.train_iters=12 megatron_training.save_interval=3 megatron_training.eval_interval=4"
    train = f"exec {steps['train']} {keys}"
    with (work / "console.txt").open("w") as console:
        process = subprocess.Popen(["bash", "-c", train], cwd=work, env=environment, stdout=console, stderr=console, text=True)
        while len(iterations(work)) < 4 and process.poll() is None:
            time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        code = process.wait(timeout=patient(120))
    text = (work / "console.txt").read_text()
    assert code == 130, text[-3000:]
    assert "resume" in text
    before = iterations(work)
    run(train.removeprefix("exec "), work, environment)
    after = iterations(work)
    assert after == list(range(1, 13)) and 4 <= len(before) < 12

    with subprocess.Popen(
        ["mindspeed-rl", "watch", "runs/first", "--port", "0"], cwd=work, env=environment, stdout=subprocess.PIPE, text=True
    ) as watching:
        try:
            assert watching.stdout is not None
            address = next(match for line in watching.stdout if (match := re.search(r"http://([\d.]+):(\d+)", line)))
            connection = http.client.HTTPConnection(address[1], int(address[2]), timeout=patient(60))
            connection.request("GET", "/")
            page = connection.getresponse().read().decode()
            assert "<html" in page and "first" in page
        finally:
            watching.send_signal(signal.SIGINT)
            watching.wait(timeout=patient(60))

    score = run(f"{steps['evaluate']} --output score.json", work, environment)
    assert "jsonl" in score and json.loads((work / "score.json").read_text())["tasks"]["jsonl"]["total"] == 24
    answer = run(steps["chat"], work, environment, typed="Describe a cat at home as a JSON object with the key answer.\nq\n")
    assert "MindSpeed-RL:" in answer
    # the result is an ordinary folder, and so is what the converter makes of the checkpoint
    export = "mindspeed-rl convert --load-model-type mg --save-model-type hf --load-dir result --save-dir exported"
    run(export, work, environment)
    folders = (work / "result/hf/latest", work / "exported")
    trained, exported = (transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in folders)
    assert trained.keys() == exported.keys() and all((trained[name] == exported[name]).all() for name in trained)
    assert time.monotonic() - start < LIMIT_S


@pytest.mark.parametrize("kind", [kind for kind in _KINDS if kind != "format"])
def test_every_kind_of_new_task_trains(kind: str, tmp_path: Path, environment: dict[str, str]) -> None:
    run(f"mindspeed-rl new task --kind {kind}", tmp_path, environment)
    work = tmp_path / "task"
    block = re.search(r"```bash\n(.*?)```", (work / "README.md").read_text(), re.DOTALL)
    assert block is not None
    for line in block[1].splitlines():
        command = line.split()[1]
        if command in ("explain", "chat"):  # the same for every kind: the test above runs them
            continue
        if command == "train":
            line += " megatron_training.train_iters=2 megatron_training.save_interval=2 megatron_training.eval_interval=2"
        run(line, work, environment)
    lines = [json.loads(line) for line in (work / "runs/task/metrics.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines if line["iteration"]] == [1, 2]
    assert (work / "result/hf/latest/model.safetensors").is_file()
