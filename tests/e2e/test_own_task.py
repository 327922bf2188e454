"""The guide "my own GRPO task" works as it is written: its files are written, its commands are run."""

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

from mindspeed_rl.runtime.fork_server import RL

ROOT = Path(__file__).resolve().parents[2]
GUIDE = ROOT / "docs/own_task.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[tuple[str, str]]:
    """(language, text) of every block."""
    return BLOCK.findall(page.read_text(encoding="utf-8"))


def test_both_languages_have_the_same_blocks() -> None:
    assert blocks(GUIDE) == blocks(ROOT / "docs/zh/own_task.md")


@pytest.mark.slow
def test_the_guide_leads_from_nothing_to_a_chat(tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, words in (("python", ""), ("mindspeed-rl", "-m mindspeed_rl.cli.main")):
        command = programs / name
        command.write_text(f'#!/bin/sh\nexec {sys.executable} {words} "$@"\n')
        command.chmod(0o755)
    environment = {**os.environ, "REPO": str(ROOT), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment |= shared(RL)
    environment["PATH"] = f"{programs}:{Path(sys.executable).parent}:{environment['PATH']}"
    work = tmp_path / "work"
    work.mkdir()
    output = ""
    for language, text in blocks(GUIDE):
        if language == "bash":
            done = subprocess.run(
                ["bash", "-ec", text], cwd=work, env=environment, capture_output=True, text=True, timeout=patient(400)
            )
            assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
            output = done.stdout
        else:
            name = re.match(r"# file: (\S+)", text)
            assert name is not None, text
            (work / name[1]).write_text(text)
    lines = [json.loads(line) for line in (work / "runs/own/metrics.jsonl").read_text().splitlines()]
    rewards = [line["rewards/total_mean"] for line in lines if line["iteration"]]
    assert len(rewards) == 40  # 20 epochs of 56 prompts, 28 an iteration
    assert rewards[0] < 0.2 and sum(rewards[-5:]) / 5 > rewards[0] + 0.2
    score = json.loads((work / "score.json").read_text())["tasks"]["jsonl"]
    assert score["total"] == 8 and 0 <= score["right"] <= 8
    assert sum(character.isdigit() for character in output) >= 2
