"""The functions for programs do what the commands do: in a notebook's event loop, with a function of the notebook as reward."""

from __future__ import annotations

import asyncio
import json
import os
import re
import runpy
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
import transformers
from shared_forks import shared
from test_own_task import GUIDE, ROOT, blocks

import mindspeed_rl
from mindspeed_rl import Run, explain, train
from mindspeed_rl.runtime.fork_server import RL


@pytest.fixture
def own_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files of the guide "my own GRPO task"."""
    monkeypatch.chdir(tmp_path)
    subprocess.run([sys.executable, ROOT / "examples/quickstart/make_task.py", "start"], check=True, capture_output=True)
    for _, text in blocks(GUIDE):
        name = re.match(r"# file: (\S+)", text)
        if name is not None:
            Path(name[1]).write_text(text)
    runpy.run_path("prompts.py")
    return tmp_path / "own.yaml"


def test_a_function_of_a_notebook_is_the_reward_and_another_ends_the_run(
    own_yaml: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"OMP_NUM_THREADS": "1", **shared(RL)}.items():
        monkeypatch.setenv(name, value)
    letters, seen = "abcdefgh", {}

    def early_letters(response: str, label: str) -> float:
        assert label == "digits"
        return sum(character in letters for character in response) / max(len(response), 1)

    def watch(iteration: int, metrics: Mapping[str, float]) -> bool:
        seen[iteration] = metrics
        return iteration < 2

    async def cell() -> mindspeed_rl.Result:
        # a notebook runs its cells inside of a loop
        keys = {"rl_config.log_completions": True, "actor_config.sigterm_grace_s": 60.0}
        return train(Run.load(own_yaml, keys), reward=early_letters, on_iteration=watch)

    environment = dict(os.environ)
    result = asyncio.run(cell())
    assert dict(os.environ) == environment
    assert result.ended_early and result.folder == own_yaml.parent / "runs/own" and result.report.is_file()
    assert [line["iteration"] for line in result.metrics] == [1, 2]
    assert list(seen) == [0, 1, 2] and seen[2]["rewards/total_mean"] == result.metrics[1]["rewards/total_mean"]
    lines = [json.loads(line) for line in (result.folder / "completions.jsonl").read_text(encoding="utf-8").splitlines()]
    first = [line for line in lines if line["iteration"] == 1 and not line.get("evaluation")]
    # the file shows special tokens, which a reward function does not see
    texts = [re.sub("<(unk|eos|pad)>", "", line["response"]) for line in first]
    assert first and [line["reward"] for line in first] == pytest.approx([early_letters(text, "digits") for text in texts])
    assert result.checkpoint == Path("result") and result.model is not None and result.model.name == "iter_0000002"
    transformers.AutoModelForCausalLM.from_pretrained(result.model)


def test_what_is_wrong_is_raised_before_anything_starts(own_yaml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="actor_config.lrr .* is not a known key; the nearest known key is actor_config.lr"):
        Run.load(own_yaml, {"actor_config.lrr": 1e-5})
    run = Run.load(own_yaml, {"rl_config.external_plugins": [], "rl_config.verifier_function": ["accuracy"]})
    assert explain(run)["valid"] and "28" in capsys.readouterr().out
    assert run.explain(shows=False)["errors"] == [] and not capsys.readouterr().out
    with pytest.raises(ValueError, match="reward: 'accuracy' is the name of another reward function"):
        train(run, reward=type("accuracy", (), {"__call__": lambda self, response, label: 1.0})())
    lock = threading.Lock()

    def scorer(response: str, label: str) -> float:
        return float(lock.locked())

    with pytest.raises(ValueError, match="reward: scorer cannot be sent to another process: cannot pickle"):
        train(run, reward=scorer)
    with pytest.raises(ValueError, match="stage sft has no reward functions"):
        train(Run.load("sft_tiny_cpu"), reward="accuracy")
    with pytest.raises(ValueError, match="unknown reward function 'acuracy'; did you mean 'accuracy'"):
        train(run, reward=["acuracy"])
    assert not Path("runs/own").exists()


@pytest.mark.slow
def test_the_notebook_runs_from_its_first_cell_to_its_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **shared(RL)}.items():
        monkeypatch.setenv(name, value)
    content = json.loads((ROOT / "examples/notebook.ipynb").read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in content["cells"] if cell["cell_type"] == "code"]
    names: dict[str, object] = {"__name__": "__main__"}

    async def run_all() -> None:
        for cell in cells:
            exec(compile(cell, "<cell>", "exec"), names)

    asyncio.run(run_all())
    result = names["result"]
    assert isinstance(result, mindspeed_rl.Result) and len(result.metrics) == 4 and result.model is not None
