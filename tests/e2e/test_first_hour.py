"""The first hour of a stranger: what README and guides show is run as it is printed, but shorter.

With the tiny model that `mindspeed-rl new` makes, and with a real one, SmolLM2-135M-Instruct from the package index (`extra`).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from patience import patient
from shared_forks import shared

from mindspeed_rl.runtime.fork_server import RL, TRAINING

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
#: keys of a run that has two iterations in place of all
SHORT = "megatron_training.train_iters=2 megatron_training.save_interval=2 megatron_training.eval_interval=2"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment that is activated: `mindspeed-rl` and `python` are commands."""
    programs = tmp_path_factory.mktemp("bin")
    for name, words in (("python", ""), ("mindspeed-rl", "-m mindspeed_rl.cli.main")):
        (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable} {words} "$@"\n')
        (programs / name).chmod(0o755)
    values = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **shared(RL, TRAINING)}
    return values | {"PATH": f"{programs}:{Path(sys.executable).parent}:{values['PATH']}"}


def run(command: str, folder: Path, environment: dict[str, str], typed: str = "") -> str:
    done = subprocess.run(
        ["bash", "-ec", command], cwd=folder, env=environment, input=typed, capture_output=True, text=True, timeout=patient(900)
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def real_model(environment: dict[str, str]) -> Path:
    """SmolLM2-135M-Instruct as the examples make it; one that an example has made is taken."""
    run("bash examples/real_model/make_model.sh runs/first_hour", ROOT, environment)
    return ROOT / "runs" / "first_hour" / "model"


@pytest.fixture(scope="module", params=["tiny", pytest.param("real", marks=pytest.mark.extra)])
def task(request: pytest.FixtureRequest, environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the README's first commands, with a run in it."""
    home = tmp_path_factory.mktemp("home")
    start = next(text for language, text in blocks("README.md") if language == "bash" and "mindspeed-rl new" in text)
    lines = [line.partition("#")[0].strip() for line in start.splitlines()]
    new, train = (next(line for line in lines if line.startswith(f"mindspeed-rl {name}")) for name in ("new", "train"))
    if request.param == "real":
        folder = request.getfixturevalue("real_model")
        new = new.replace("mindspeed-rl new my_task", f"mindspeed-rl new my_task --model {folder}")
    run(f"{new} && {train} {SHORT} rl_config.log_completions=true", home, environment)
    if request.param == "real":  # the programs of the README name the folder of the task's own model
        (home / "my_task" / "model").symlink_to(folder)
    return home / "my_task"


def blocks(page: str) -> list[tuple[str, str]]:
    return BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))


def test_both_readmes_have_the_same_code() -> None:
    english, chinese = ([text for language, text in blocks(page) if language in ("python", "yaml")] for page in (
        "README.md", "README.zh.md",
    ))  # fmt: skip
    assert english[:2] == chinese[:2]
    assert all(len(re.findall(r"^\S", text, re.MULTILINE)) <= 10 for text in english[:2])


def test_ten_lines_of_python_train_and_answer(task: Path, environment: dict[str, str]) -> None:
    code = next(text for language, text in blocks("README.md") if language == "python")
    (task / "ten.py").write_text(code.replace("max_steps=60", "max_steps=2"))
    output = run("python ten.py", task, environment)
    assert "ten_python/report.html" in output.splitlines()[-1] and (task / "ten_python/run.yaml").is_file()


def test_ten_lines_of_yaml_train_the_same(task: Path, environment: dict[str, str]) -> None:
    text = next(text for language, text in blocks("README.md") if language == "yaml" and "# file: ten.yaml" in text)
    (task / "ten.yaml").write_text(text)
    run(f"mindspeed-rl train --config ten.yaml {SHORT}", task, environment)
    (metrics,) = (task / "runs").glob("ten-*/metrics.jsonl")
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [line["iteration"] for line in lines] == [1, 2] and (task / "ten/hf/latest/config.json").is_file()


#: command of a guide -> what runs here in its place: names of files and folders of the reader, and length
PLAYED = {
    "mindspeed-rl explain --config-name grpo_tiny_cpu": "mindspeed-rl explain --config run.yaml",
    "mindspeed-rl plan memory --config-name grpo_qwen25_7b_A3": "mindspeed-rl plan memory --config-name grpo_qwen25_7b_A3",
    "mindspeed-rl plan --config-name grpo_qwen3_8b_A3": "mindspeed-rl plan --config-name grpo_qwen3_8b_A3",
    "mindspeed-rl plan time --config-name grpo_qwen3_8b_A3 --mean-response 2500":
        "mindspeed-rl plan time --config-name grpo_qwen3_8b_A3 --mean-response 2500",
    "mindspeed-rl plan smallest --model qwen3_8b --chip A2 --prompt 1k --response 1k":
        "mindspeed-rl plan smallest --model qwen3_8b --chip A2 --prompt 1k --response 1k",
    "mindspeed-rl audit data --config-name grpo_tiny_cpu": "mindspeed-rl audit data --config run.yaml",
    "mindspeed-rl audit reward --config-name grpo_tiny_cpu": "mindspeed-rl audit reward --config run.yaml",
    "mindspeed-rl report runs/a": "mindspeed-rl report runs/my_task",
    "mindspeed-rl report runs/a --share": "mindspeed-rl report runs/my_task --share",
    "mindspeed-rl report runs/a --png slides": "mindspeed-rl report runs/my_task --png slides",
    "mindspeed-rl trace runs/a": "mindspeed-rl trace runs/my_task",
    "mindspeed-rl trace runs/a --iteration 40 --sample 3 --colour advantage --tokens":
        "mindspeed-rl trace runs/my_task --iteration 2 --sample 3 --colour advantage --tokens",
    'mindspeed-rl generate --load ckpt/hf --hf-chat-template --prompt "What is 2+2?"':
        'mindspeed-rl generate --load result/hf/latest --hf-chat-template --prompt "What is 2+2?" --max-new-tokens 4',
    "mindspeed-rl chat --load ckpt/hf --hf-chat-template":
        "printf 'hi\\nq\\n' | mindspeed-rl chat --load result/hf/latest --hf-chat-template --max-new-tokens 4",
    "mindspeed-rl diff train rollout --run runs/a":
        "mindspeed-rl diff train rollout --run runs/my_task --prompts 2 --tokens 4",
}  # fmt: skip


@pytest.mark.parametrize("command", PLAYED.values())
def test_a_command_of_a_guide_runs(command: str, task: Path, environment: dict[str, str]) -> None:
    assert run(command, task, environment).strip()
