"""compat/ on the PATH: commands of MindSpeed-RL and MindSpeed-LLM as they are written there start this suite."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from rlxf_run_files import write_rlxf_run_file

from mindspeed_rl.config import load_run_config
from mindspeed_rl.importers import upstream

ROOT = Path(__file__).parents[3]


def translate(command: str, nodes: upstream._Nodes | None = None) -> list[str] | None:
    script, *arguments = command.split()
    return upstream._translate(Path(script), arguments, nodes or upstream._Nodes())


@pytest.fixture(autouse=True)
def elsewhere_and_without_a_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(upstream, "_RAY_ADDRESS_FILE", tmp_path / "no_cluster")


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("cli/train_grpo.py", "train --config-name grpo_qwen25_7b_A3 --nodes 1"),
        ("cli/train_dapo.py --config-name dapo_qwen3_32b_A3", "train --config-name dapo_qwen3_32b_A3 --nodes 1"),
        ("cli/train_ppo.py --config-name=ppo_qwen25_32b_A3.yaml", "train --config-name ppo_qwen25_32b_A3 --nodes 1"),
        (
            "/old/cli/train_grpo.py --config-dir=/old/st/configs --config-name=mine rl_config.clip_ratio=0.1 hydra.run.dir=x",
            "train --config-name mine --config-dir /old/st/configs --nodes 1 rl_config.clip_ratio=0.1",
        ),
        ("cli/train_dpo.py --config-name dpo_qwen3_30b_a3b_A3", "train --config-name dpo_qwen3_30b_a3b_A3 --nodes 1"),
        ("cli/preprocess_data.py math_17k", "preprocess math_17k"),
        ("./preprocess_data.py --input x.parquet --workers 4", "preprocess --input x.parquet --workers 4"),
        ("convert_ckpt.py --model-type GPT --load-model-type hf", "convert --model-type GPT --load-model-type hf"),
    ],
)
def test_a_command_becomes_one_of_this_suite(command: str, expected: str) -> None:
    assert translate(command) == ["mindspeed-rl", *expected.split()]


@pytest.mark.parametrize("command", ["tools/preprocess_data.py --input x", "train.py --config-name x", "other/train_grpo.py"])
def test_other_programs_are_passed_on(command: str) -> None:
    assert translate(command) is None


def test_the_run_file_of_an_old_checkout_is_taken_before_ours(tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "grpo_qwen25_7b_A3.yaml").write_text("")
    command = translate(f"{tmp_path}/cli/train_grpo.py --config-name grpo_qwen25_7b_A3")
    assert command[1:6] == ["train", "--config-name", "grpo_qwen25_7b_A3", "--config-dir", str(tmp_path / "configs")]
    assert "--config-dir" not in translate(f"{tmp_path}/cli/train_grpo.py --config-name grpo_qwen3_8b_A3")


@pytest.mark.parametrize("name", list(upstream._RUNS_OF_LLM))
def test_a_run_of_ray_gpt_is_a_script_that_is_there(name: str) -> None:
    program, script, *rest = translate(f"ray_gpt.py --config-name {name} rl_config.clip_ratio=0.1")
    assert program == "bash" and Path(script).is_file() and rest == ["rl_config.clip_ratio=0.1"]


@pytest.mark.parametrize("place", ["configs/rlxf", "--config-dir", "--config-path"])
def test_ray_gpt_trains_with_the_run_file_of_the_user_where_there_is_one(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also under a name of a run of this suite; its numbers are the file's and the command's."""
    name, folder = "grpo_trainer_llama32_1b", tmp_path / ("configs/rlxf" if place == "configs/rlxf" else "mine")
    write_rlxf_run_file(folder, name)
    monkeypatch.chdir(tmp_path)
    flags = {"configs/rlxf": "", "--config-dir": "--config-dir mine", "--config-path": "--config-path mine"}[place]
    words = f"{tmp_path}/ray_gpt.py --config-name {name} {flags} training.train_iters=7"
    command = translate(words)
    assert command == ["mindspeed-rl", "train", "--config-name", f"imported/{name}.yaml", "--nodes", "1"]
    cfg = load_run_config(f"imported/{name}.yaml")
    assert (cfg.actor_config.train_iters, cfg.rl_config.n_samples_per_prompt, cfg.actor_config.lr) == (7, 4, 1e-6)


def test_torchrun_over_several_machines_becomes_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "before")
    monkeypatch.setenv("NODE_RANK", "before")
    words = "--nproc_per_node 16 --nnodes 2 --node_rank 1 --master_addr 10.0.0.4 --master_port 6005".split()
    command = translate("cli/train_dpo.py --config-name x", upstream._read_nodes(words))
    assert command == "mindspeed-rl launch --nodes 2 --npus-per-node 16 -- train --config-name x --nodes 2".split()
    assert (os.environ["MASTER_ADDR"], os.environ["NODE_RANK"]) == ("10.0.0.4", "1")
    alone = upstream._read_nodes(["--nproc-per-node=8", "--nnodes=1"])
    assert translate("cli/train_dpo.py", alone)[:2] == ["mindspeed-rl", "train"]


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("cli/train_grpo.py --multirun a=1,2", "--multirun is not known"),
        ("ray_gpt.py --config-name mine", "no run of this suite has this name; known are grpo_trainer_llama32_1b"),
        ("ray_gpt.py --config-name mine", "there is no configs/rlxf/mine.yaml"),
        ("pretrain_gpt.py --num-layers 2", "pretrain_gpt.py has other options here: use examples/mcore/<model>/pretrain_*.sh"),
        ("cli/eplb_generate_map_ds.py --num_gpus 8", "mindspeed-rl plan experts"),
    ],
)
def test_what_has_no_counterpart_is_refused_with_what_to_run(command: str, text: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        translate(command)
    assert text in str(caught.value)


def run_script(folder: Path, text: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a shell script with compat/ first on the PATH."""
    (folder / "run.sh").write_text(text)
    path = f"{ROOT / 'compat'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, **variables}
    return subprocess.run(["bash", "run.sh"], cwd=folder, env=environment, capture_output=True, text=True)


def test_an_unchanged_script_starts_this_suite_with_its_own_run_file(tmp_path: Path) -> None:
    for folder in ("cli", "configs"):
        (tmp_path / folder).mkdir()
    (tmp_path / "cli" / "train_grpo.py").write_text("raise SystemExit('the old program ran')\n")
    (tmp_path / "configs" / "mine.yaml").write_text("megatron_training: {lrr: 1}\nactor_config: {}\nrl_config: {}\n")
    ended = run_script(tmp_path, 'YAML=${1:-mine}\npython cli/train_grpo.py --config-name $YAML 2>&1 | tee training.log\n')
    assert "train_grpo.py: mindspeed-rl train --config-name mine" in ended.stdout and "megatron_training.lrr" in ended.stdout
    assert "the old program ran" not in ended.stdout
    assert (tmp_path / "training.log").read_text() == ended.stdout


def test_other_uses_of_python_stay_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("import shutil, sys\nprint(sys.argv[1:], shutil.which('python'))\n")
    commands = ("python own.py a 'b c'", "python -c 'print(1 + 1)'", "python3 -m this > /dev/null && echo passed")
    ended = run_script(tmp_path, "\n".join(commands))
    assert ended.stdout.splitlines() == [f"['a', 'b c'] {Path(sys.executable).parent / 'python'}", "2", "passed"]


def test_a_package_of_the_old_checkout_does_not_hide_ours(tmp_path: Path) -> None:
    package = tmp_path / "mindspeed_rl"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('the old package was imported')\n")
    ended = run_script(tmp_path, "cd /\npython /somewhere/convert_ckpt.py --help\n", PYTHONPATH=str(tmp_path))
    assert ended.returncode == 0 and "--target-tensor-parallel-size" in ended.stdout, ended.stderr
    refused = run_script(tmp_path, "python cli/train_grpo.py\n")
    assert refused.returncode == 2 and "rename the folder" in refused.stderr
