"""Every script below examples/mcore with DRY_RUN=1: it starts nothing, and what it would start is valid.

The scripts run with stand-ins for `mindspeed-rl` and `python` that write down their arguments; the arguments are then
checked in this process, so that a hundred scripts take seconds.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from mindspeed_rl.cli import explain
from mindspeed_rl.config import GenerateConfig, MegatronConfig, RLConfig

MCORE = Path(__file__).parents[3] / "examples" / "mcore"
SCRIPTS = sorted(MCORE.glob("*/*.sh"))
SIZES = {
    "qwen25": ["0point5b", "1point5b", "7b", "32b"],
    "qwen3": ["0point6b", "8b", "32b", "30b_a3b", "235b_a22b"],
    "llama32": ["1b"],
    "llama3": ["8b"],
    "mixtral": ["8x7b"],
    "deepseek3": ["671b"],
}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, list[list[str]]]:
    """Script -> command lines that it handed to tools."""
    folder = tmp_path_factory.mktemp("examples")
    tools = folder / "bin"
    tools.mkdir()
    for name in ("mindspeed-rl", "python"):
        tool = tools / name
        tool.write_text(f'#!/usr/bin/env bash\nprintf "%s\\0" {name} "$@" >> "$RECORD"; printf "\\n\\0" >> "$RECORD"\n')
        tool.chmod(0o755)
    results: dict[Path, list[list[str]]] = {}
    for script in SCRIPTS:
        record = folder / "record"
        record.write_bytes(b"")
        environment = {"PATH": f"{tools}:{os.environ['PATH']}", "DRY_RUN": "1", "RECORD": str(record), "HOME": str(folder)}
        ended = subprocess.run(["bash", str(script)], env=environment, cwd=folder, capture_output=True, text=True)
        assert ended.returncode == 0, f"{script}: {ended.stderr}"
        words = record.read_bytes().decode().split("\0")
        commands: list[list[str]] = [[]]
        for word in words:
            if word == "\n":
                commands.append([])
            elif word:
                commands[-1].append(word)
        results[script] = [command for command in commands if command]
    return results


@pytest.mark.parametrize("family", SIZES)
def test_every_model_has_every_script(family: str) -> None:
    names = {script.name for script in (MCORE / family).glob("*.sh")}
    for size in SIZES[family]:
        for pattern in (
            "ckpt_convert_{}_{}_hf2mcore.sh", "ckpt_convert_{}_{}_mcore2hf.sh", "pretrain_{}_{}_4k_ptd.sh",
            "tune_{}_{}_4k_full_ptd.sh", "tune_{}_{}_4k_lora_ptd.sh", "grpo_{}_{}.sh", "generate_{}_{}.sh", "chat_{}_{}.sh",
        ):  # fmt: skip
            assert pattern.format(family, size) in names
    for kind in ("pretrain", "instruction", "pairwise", "rl"):
        assert f"data_convert_{family}_{kind}.sh" in names
    assert {"dapo_qwen25_32b.sh", "ppo_qwen25_32b.sh"} <= names or family != "qwen25"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_what_a_dry_run_prints_is_valid(script: Path, recorded: dict[Path, list[list[str]]]) -> None:
    ((tool, *arguments),) = recorded[script]
    if tool == "mindspeed-rl":
        assert arguments[0] == "explain", "a dry run must not start anything"
        assert explain.main(arguments[1:]) == 0
    else:
        spec = importlib.util.spec_from_file_location("check_arguments", arguments[0])
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.check(arguments[1], arguments[2:])


def dry_run(script: Path, tmp_path: Path, arguments: Sequence[str] = (), **variables: str) -> str:
    """What a script would start; the explanation that follows is left out."""
    (tmp_path / "mindspeed-rl").write_text("#!/usr/bin/env bash\n")
    (tmp_path / "mindspeed-rl").chmod(0o755)
    environment = {**os.environ, "DRY_RUN": "1", **variables, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    return subprocess.run(["bash", str(script), *arguments], env=environment, capture_output=True, text=True, check=True).stdout


def test_several_nodes_go_through_launch(tmp_path: Path) -> None:
    script = MCORE / "qwen25" / "tune_qwen25_7b_4k_full_ptd.sh"
    text = dry_run(script, tmp_path, NNODES="2", NPUS_PER_NODE="8", HOSTS="10.0.0.4,10.0.0.5")
    assert text.startswith("mindspeed-rl launch --nodes 2 --npus-per-node 8 --hosts 10.0.0.4\\,10.0.0.5 -- train --config-dir")


def test_a_cluster_that_is_up_is_joined(tmp_path: Path) -> None:
    script = MCORE / "qwen25" / "grpo_qwen25_32b.sh"
    text = dry_run(script, tmp_path, NNODES="2", RAY_ADDRESS="10.0.0.4:6766")
    assert text.startswith("mindspeed-rl train --config-name grpo_qwen25_32b_A3 --nodes 2 ")


def test_a_cluster_by_hand_has_a_head_and_workers(tmp_path: Path) -> None:
    script = MCORE / "ray_cluster.sh"
    head = dry_run(script, tmp_path, MASTER_ADDR="127.0.0.1", NPUS_PER_NODE="8")
    assert "ray start --head --node-ip-address 127.0.0.1 --port 6766" in head and "NPU" in head
    worker = dry_run(script, tmp_path, MASTER_ADDR="192.0.2.77", NPUS_PER_NODE="8")
    assert "ray start --address 192.0.2.77:6766" in worker


@pytest.mark.parametrize("document", ["ascend.md", "zh/ascend.md"])
def test_what_the_guide_names_exists(document: str) -> None:
    root = MCORE.parents[1]
    text = (root / "docs" / document).read_text()
    named = set(re.findall(r"(?:examples|envs|configs|tools|tests)/[\w./]+\w(?![-*\w])", text))
    assert len(named) > 10 and sorted(path for path in named if not (root / path).exists()) == []
    scripts = set(re.findall(r"`((?:grpo|dapo|ppo)_\w+\.sh)`", text))
    assert scripts and scripts <= {script.name for script in SCRIPTS}
    keys = set(re.findall(r"\b(?:rl|generate|actor)_config\.\w+", text))
    groups = {"rl_config": RLConfig, "generate_config": GenerateConfig, "actor_config": MegatronConfig}
    for key in keys:
        group, _, name = key.partition(".")
        assert name in {field.name for field in dataclasses.fields(groups[group])}, key


def test_scripts_say_only_what_differs() -> None:
    for script in SCRIPTS:
        text = script.read_text()
        assert "common.sh" in text and "pkill" not in text and "ray start" not in text and "/usr/local/Ascend" not in text
        assert '"$@"' in text, f"{script}: what the user adds is lost"


def test_what_the_user_adds_comes_last(tmp_path: Path) -> None:
    script = MCORE / "qwen25" / "tune_qwen25_7b_4k_lora_ptd.sh"
    text = dry_run(script, tmp_path, arguments=["megatron_training.lr=3e-4"], TP="2", LORA_R="16")
    assert text.split()[-1] == "megatron_training.lr=3e-4"
    assert "megatron_training.tensor_model_parallel_size=2" in text and "megatron_training.lora_r=16" in text


@pytest.mark.parametrize(
    "script, variable",
    [("pretrain_qwen25_7b_4k_ptd", "TP"), ("grpo_qwen25_0point5b", "GBS"), ("chat_qwen25_7b", "MAX_NEW_TOKENS")],
)
def test_a_size_that_is_no_number_is_named(script: str, variable: str) -> None:
    environment = {**os.environ, "DRY_RUN": "1", variable: "four"}
    ended = subprocess.run(["bash", str(MCORE / "qwen25" / f"{script}.sh")], env=environment, capture_output=True, text=True)
    assert ended.returncode == 1 and ended.stdout == ""
    assert ended.stderr == f"{script}.sh: {variable} must be a whole number from 1, not 'four'\n"
