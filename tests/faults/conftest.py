"""What the fault suite shares with the end-to-end tests: their task and their command."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from patience import patient

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the tests' task: model/, train.jsonl, heldout.jsonl."""
    from tiny_task import make_task

    return make_task(tmp_path_factory.mktemp("task"))


@pytest.fixture(scope="session")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's folder: a random model, and data of the supervised stages."""
    folder, scripts = tmp_path_factory.mktemp("quickstart"), Path(__file__).parents[2] / "examples" / "quickstart"
    tokenizer = ["--tokenizer-type", "PretrainedFromHF", "--tokenizer-name-or-path", folder / "model", "--prompt-type", "hf"]
    commands: list[list[str | Path]] = [[scripts / f"{name}.py", folder] for name in ("make_task", "make_stage_data")]
    for name, handler in (("sft", "AlpacaStyleInstructionHandler"), ("pairs", "AlpacaStylePairwiseHandler")):
        files = ["--input", folder / "raw" / f"{name}.jsonl", "--output-prefix", folder / "data" / name]
        train = ["-m", "mindspeed_rl.cli.main", "preprocess", *tokenizer, *files, "--handler-name", handler, "--workers", "1"]
        commands.append(train)
    (folder / "data").mkdir()
    for command in commands:
        subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL, timeout=patient(300))
    return folder
