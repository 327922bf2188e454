"""The sdist makes the wheel, and the wheel in a clean environment runs what needs neither torch nor Ray."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
from pathlib import Path

import pytest
from patience import patient
from supervised_samples import save_tiny_model

from mindspeed_rl import __version__

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow
#: packages that each environment lacks; with prefixes of their further distributions
WITHOUT = {
    "plans": ("torch", "ray", "vllm", "megatron", "transformers", "mindspeed"),
    "files": ("ray", "vllm", "mindspeed"),
}


def build(folder: Path, function: str, target: Path) -> Path:
    """Call the build backend as pip does; return the file."""
    target.mkdir(exist_ok=True)
    code = f"from setuptools import build_meta; build_meta.{function}({str(target)!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=patient(300))
    assert done.returncode == 0, done.stderr[-3000:]
    (path,) = target.iterdir()
    return path


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel that is built of an sdist that is built of what git has."""
    work = tmp_path_factory.mktemp("build")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file() and not name.startswith(("tests/", "benchmarks/", "docs/")):
            (work / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, work / "tree" / name)
    sdist = build(work / "tree", "build_sdist", work / "sdist")
    with tarfile.open(sdist) as archive:
        names = archive.getnames()
        archive.extractall(work / "unpacked", filter="data")
    assert {"LICENSE", "NOTICE", "README.md", "configs/grpo_tiny_cpu.yaml"} <= {name.partition("/")[2] for name in names}
    (unpacked,) = (work / "unpacked").iterdir()
    return build(unpacked, "build_wheel", work / "wheel")


def install(wheel: Path, folder: Path, missing: tuple[str, ...]) -> dict[str, str]:
    """A new environment with the wheel, and other packages of this one but the missing; return its variables."""
    venv.create(folder, with_pip=False)
    words = [sys.executable, "-m", "pip", "--python", str(folder / "bin/python"), "install", "--no-deps", "--no-index", "-q"]
    subprocess.run([*words, str(wheel)], check=True, timeout=patient(300))
    others = folder / "others"
    others.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not path.name.lower().startswith((*missing, "__editable__")) and path.suffix != ".pth":
            (others / path.name).symlink_to(path)
    values = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return values | {"PATH": f"{folder / 'bin'}:{values['PATH']}", "PYTHONPATH": str(others), "OMP_NUM_THREADS": "1"}


def run(command: str, folder: Path, environment: dict[str, str]) -> str:
    done = subprocess.run(
        ["bash", "-ec", command], cwd=folder, env=environment, capture_output=True, text=True, timeout=patient(200)
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


def test_plans_need_neither_torch_nor_ray(wheel: Path, tmp_path: Path) -> None:
    environment = install(wheel, tmp_path / "env", WITHOUT["plans"])
    assert __version__ in run("mindspeed-rl --version", tmp_path, environment)
    where = run("python -c 'import mindspeed_rl; print(mindspeed_rl.__file__)'", tmp_path, environment)
    assert where.startswith(str(tmp_path))
    with pytest.raises(AssertionError, match="No module named 'torch'"):
        run("python -c 'import torch'", tmp_path, environment)
    assert "global_batch_size" in run("mindspeed-rl explain --config-name grpo_qwen25_7b_A3", tmp_path, environment)
    assert "GiB" in run("mindspeed-rl plan memory --config-name grpo_qwen25_7b_A3", tmp_path, environment)
    save_tiny_model(tmp_path / "model")
    (tmp_path / "run.yaml").write_text("defaults: [sft_tiny_cpu, _self_]\nmegatron_training: {load: model}\n")
    # a folder that exists is read as far as that goes without torch
    assert "sft" in run("mindspeed-rl explain --config run.yaml", tmp_path, environment)


def test_data_and_weights_need_neither_ray_nor_vllm(wheel: Path, tmp_path: Path) -> None:
    environment = install(wheel, tmp_path / "env", WITHOUT["files"])
    save_tiny_model(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text('{"instruction": "a", "input": "", "output": "b"}\n')
    preprocess = "mindspeed-rl preprocess --input rows.jsonl --output-prefix data/rows --tokenizer-name-or-path model"
    run(f"{preprocess} --handler-name AlpacaStyleInstructionHandler --prompt-type empty", tmp_path, environment)
    assert list((tmp_path / "data").glob("rows_packed_*.idx"))
    run("mindspeed-rl convert --load-dir model --save-dir mcore --target-tensor-parallel-size 2", tmp_path, environment)
    assert len(list((tmp_path / "mcore").rglob("model_optim_rng.pt"))) == 2
