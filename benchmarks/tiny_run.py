"""Runs of `grpo_tiny_cpu` with other keys, as the benchmarks make them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mindspeed_rl.observability.run_files import RunFiles, read_run

ROOT = Path(__file__).resolve().parents[1]


def train_command(keys: Mapping[str, Any], *words: str) -> list[str]:
    """The command line; `words` are further overrides."""
    command = [str(ROOT / ".venv/bin/mindspeed-rl"), "train", "--config-name", "grpo_tiny_cpu"]
    return [*command, *(f"{key}={value}" for key, value in keys.items()), *words]


def train(folder: Path, keys: Mapping[str, Any], *words: str, environment: Mapping[str, str]) -> RunFiles:
    """Runs until the end; what the run printed lies beside its folder.

    Raises:
        RuntimeError: it failed.
    """
    log = folder.with_name(f"{folder.name}.log")
    with log.open("w") as stream:
        command = train_command({"run_dir": folder, **keys}, *words)
        done = subprocess.run(command, env={**os.environ, **environment}, stdout=stream, stderr=stream)
    if done.returncode:
        raise failure(done.returncode, log)
    return read_run(folder)


def failure(code: int, log: Path) -> RuntimeError:
    """What a run that has not ended well is told as, with the end of its log."""
    return RuntimeError(f"the run ended with {code}: {log.read_text()[-3000:]}")
