"""`mindspeed-rl plan tune` on the CPU: the chosen layout is the measured best, and nothing of the pilots is left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from grpo_command import marked, overrides, records
from patience import patient
from shared_forks import shared

from mindspeed_rl.config.loader import load_run_config
from mindspeed_rl.runtime.fork_server import RL

pytestmark = pytest.mark.slow

SPACE = ["--vary", "actor_config.tensor_model_parallel_size=1,2", "--vary", "actor_config.micro_batch_size=8,16"]


def _start(task: Path, folder: Path, mark: str, *words: str) -> subprocess.Popen[str]:
    keys = [item for item in overrides(task, folder) if not item.startswith("actor_config.finetune")]
    command = [sys.executable, "-m", "mindspeed_rl.cli.main", "plan", "tune", "--config-name", "grpo_tiny_cpu", "--json"]
    return subprocess.Popen(
        [*command, *words, *keys],
        cwd=folder,
        env={**os.environ, "MINDSPEED_RL_TEST_RUN": mark, "OMP_NUM_THREADS": "1", **shared(RL)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def _finish(process: subprocess.Popen[str], mark: str) -> tuple[int, dict[str, Any], str]:
    try:
        output, errors = process.communicate(timeout=patient(400))
    finally:
        left = marked(mark)
        for one in left:
            with contextlib.suppress(psutil.Error):
                one.kill()
    assert not left, left
    return process.returncode, json.loads(output) if output.startswith("{") else {}, errors


def test_the_chosen_layout_is_the_measured_best_of_all_combinations(task: Path, tmp_path: Path) -> None:
    words = [*SPACE, "--keep", "kept", "-o", "tuned.yaml", "platform=auto"]
    code, made, errors = _finish(_start(task, tmp_path, "tune-best", *words), "tune-best")
    assert code == 0, errors
    pilots = made["pilots"]
    # all four combinations: the run file has TP2 and rows of 16 samples
    assert [pilot["outcome"] for pilot in pilots] == ["measured"] * 4 and made["not_tried"] == 0
    seconds = [pilot["seconds"][-1] for pilot in pilots]
    assert made["chosen"] == seconds.index(min(seconds)) and all(len(pilot["seconds"]) == 2 for pilot in pilots)
    # the records of the pilots' own folders, and the clock of their timelines, say the same
    runs = [tmp_path / "kept" / f"pilot_{index:02}" / "run" for index in range(1, 5)]
    measured = [records(run)[-1]["timing/all"] for run in runs]
    assert measured == seconds and [len(records(run)) for run in runs] == [2] * 4
    best = load_run_config(str(tmp_path / "tuned.yaml"), None, []).actor_config
    chosen = pilots[made["chosen"]]["values"]
    layout = {"tensor_model_parallel_size": 2, "micro_batch_size": 16}
    layout |= {name.removeprefix("actor_config."): value for name, value in chosen.items()}
    assert (best.tensor_model_parallel_size, best.micro_batch_size) == tuple(layout.values())
    assert best.save == str(tmp_path / "save")  # the run's own keys are as they were
    # the run's own folders were not touched
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", "tuned.yaml"]
    assert not any((run / "tensorboard").exists() for run in runs)


def test_a_pilot_that_fails_or_takes_too_long_is_an_entry(task: Path, tmp_path: Path) -> None:
    words = ["--vary", "generate_config.kv_cache_memory_gib=1e-9", "--pilot-minutes", str(patient(1.5))]
    code, made, errors = _finish(_start(task, tmp_path, "tune-entry", *words), "tune-entry")
    first, broken = made["pilots"]
    assert code == 0 and (first["outcome"], broken["outcome"]) == ("measured", "failed"), errors
    assert broken["detail"] and made["chosen"] == 0
    code, made, errors = _finish(_start(task, tmp_path, "tune-late", *SPACE, "--pilot-minutes", "0.05"), "tune-late")
    assert code == 1 and {pilot["outcome"] for pilot in made["pilots"]} == {"took too long"}, errors
    assert [path.name for path in tmp_path.iterdir()] == ["grpo_tiny_cpu_tuned.yaml"]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_search_ends_its_pilot_and_writes_nothing(task: Path, tmp_path: Path, signum: int) -> None:
    mark = f"tune-{int(signum)}"
    process = _start(task, tmp_path, mark, *SPACE, "--keep", "kept")
    deadline = time.monotonic() + patient(200)
    while not records(tmp_path / "kept" / "pilot_01" / "run"):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    os.kill(process.pid, signum)
    code, made, errors = _finish(process, mark)
    assert code == (130 if signum == signal.SIGINT else 143) and not made and "no run file was written" in errors
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
