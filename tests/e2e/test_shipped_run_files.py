"""Every shipped run file for the CPU trains from where its user stands: behind the quickstart, in the folder of the clone.

Nothing of a run file is changed but its length, by the one override that the guides name for it, and a limit of DAPO.
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

from mindspeed_rl.config.loader import load_run_config
from mindspeed_rl.config.run_files import find_project_configs
from mindspeed_rl.runtime.fork_server import RL, TRAINING

ROOT = Path(__file__).resolve().parents[2]
ITERATIONS = 2
#: shipped script -> its line at which a run file of this list begins
ENDS = {
    "quickstart.sh": 'echo "== 4/5',
    "supervised_stages.sh": "for stage in",
    "agent.sh": 'echo "== 3/4',
    "swe_tiny.sh": 'echo "== 3/4',
    "vision.sh": 'echo "== 3/4',
    "distill.sh": 'echo "== 2/3',
}
#: iterations of supervised training ahead of a run file: but for DAPO, no run file here needs what it teaches
SHORT = {"quickstart.sh": 20}
#: behind so short a training fewer groups vary than DAPO expects
KNOWS_LESS = {"dapo_tiny_cpu": " rl_config.filter_groups_max_batches=40"}


def run_files() -> list[str]:
    """Names of the run files whose platform is the CPU; the others need devices that this machine does not have."""
    names = sorted(path.stem for path in find_project_configs().glob("*.yaml"))
    return [name for name in names if load_run_config(name).platform == "cpu"]


def steps(script: str) -> str:
    """The commands of a shipped script behind its installation, with short training, up to where a run file here begins."""
    text, result, _ = (ROOT / "examples" / script).read_text(encoding="utf-8").partition(f"\n{ENDS[script]}")
    assert result
    text = re.sub(r" megatron_training\.(train_iters|save_interval)=\S+", "", text[text.index("WORK=") :])
    count = SHORT.get(script, 4)
    short = f"megatron_training.train_iters={count} megatron_training.save_interval={count // 2}"
    return re.sub(r"(mindspeed-rl train --config-name \S+)", rf"\1 {short}", text)


def command(words: str, folder: Path, timeout: float) -> subprocess.CompletedProcess[str]:
    """Runs shell words in a folder that looks like the clone."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **shared(RL, TRAINING)}
    environment["PATH"] = f"{folder / 'bin'}:{Path(sys.executable).parent}:{environment['PATH']}"
    done = subprocess.run(["bash", "-euc", words], cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what quickstart and agent example leave behind before they reinforce, and the data of all stages."""
    folder = tmp_path_factory.mktemp("clone")
    (folder / "bin").mkdir()
    (folder / "examples").symlink_to(ROOT / "examples")
    for name, words in (("python", ""), ("mindspeed-rl", "-m mindspeed_rl.cli.main")):
        program = folder / "bin" / name
        program.write_text(f'#!/bin/sh\nexec {sys.executable} {words} "$@"\n')
        program.chmod(0o755)
    (folder / "configs").symlink_to(ROOT / "configs")  # run files name the tool files of the clone
    for script in ENDS:
        command(steps(script), folder, patient(600))
    return folder


def test_every_tiny_run_file_is_for_the_cpu() -> None:
    assert run_files() == sorted(path.stem for path in find_project_configs().glob("*_tiny*_cpu.yaml"))


@pytest.mark.slow
@pytest.mark.parametrize("name", run_files())
def test_it_trains_as_it_is_shipped(clone: Path, name: str) -> None:
    group = "megatron_training" if load_run_config(name).is_supervised else "actor_config"
    words = f"mindspeed-rl train --config-name {name} run_dir=runs/{name} {group}.train_iters={ITERATIONS}"
    done = command(words + KNOWS_LESS.get(name, ""), clone, patient(500))
    assert "starts from the weights of" in done.stdout and f"finished: {clone / 'runs' / name}" in done.stdout
    report = json.loads((clone / "runs" / name / "report.json").read_text())
    assert report["outcome"] == "finished"
