"""Commands of MindSpeed-RL and MindSpeed-LLM as they are written there; the scripts of `compat/` call this.

    export PATH=/path/to/mindspeed-rl/compat:$PATH
    bash examples/grpo/grpo_trainer_qwen25_7b.sh

`python` and `torchrun` are then programs that start this suite for the scripts of the table below, and pass on everything else.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from mindspeed_rl.cli.options import print_status, report_failure
from mindspeed_rl.importers.command import write_import

#: script -> run file without --config-name
_TRAINING = {
    "train_grpo.py": "grpo_qwen25_7b_A3",
    "train_dapo.py": "dapo_qwen25_32b_A3",
    "train_ppo.py": "ppo_qwen25_32b_A3",
    "train_dpo.py": "dpo_qwen3_30b_a3b_A3",
}
#: script that has other options here -> what to run in its place
_OTHER_SCRIPTS = {
    "pretrain_gpt.py": "examples/mcore/<model>/pretrain_*.sh",
    "posttrain_gpt.py": "examples/mcore/<model>/tune_*.sh, dpo_*.sh, train_orm_*.sh",
    "inference.py": "mindspeed-rl generate or mindspeed-rl chat (examples/mcore/<model>/generate_*.sh, chat_*.sh)",
    "evaluation.py": "mindspeed-rl evaluate",
    "eplb_generate_map_ds.py": "mindspeed-rl plan experts --counts FOLDER --devices N -o expert_map.json (docs/moe_rollout.md)",
}
#: run file of MindSpeed-LLM -> the script of this suite with the same run
_RUNS_OF_LLM = {
    "grpo_trainer_llama32_1b": "examples/mcore/llama32/grpo_llama32_1b.sh",
    "grpo_trainer_llama3_8b": "examples/mcore/llama3/grpo_llama3_8b.sh",
    "grpo_trainer_qwen25_7b": "examples/mcore/qwen25/grpo_qwen25_7b.sh",
    "grpo_trainer_qwen25_32b": "examples/mcore/qwen25/grpo_qwen25_32b.sh",
}
#: prints the address and the machines of the Ray cluster that runs on this machine
_CLUSTER = """
import json, os, ray
ray.init("auto", log_to_driver=False, logging_level="ERROR")
nodes = [node for node in ray.nodes() if node["Alive"]]
print(json.dumps([ray.get_runtime_context().gcs_address, len(nodes)]))
"""
#: a file that Ray writes when a cluster is started on a machine
_RAY_ADDRESS_FILE = Path("/tmp/ray/ray_current_cluster")


class _Nodes(NamedTuple):
    """Machines that `torchrun` was told of."""

    count: int = 1
    devices: int | None = None
    rank: str = "0"
    master: str = ""


def main(argv: list[str]) -> int:
    """Replace this process by the command of this suite, or by the program itself for scripts that are not upstream's."""
    program, *words = argv
    options, script, arguments = _split_command(words)
    is_torchrun = program == "torchrun" or options[:2] in (["-m", "torch.distributed.run"], ["-m", "torch.distributed.launch"])
    try:
        command = _translate(script, arguments, _read_nodes(options) if is_torchrun else _Nodes())
    except ValueError as error:
        return report_failure(error)
    if command is None:
        os.execvp(program, argv)
    _hide_other_package()
    print_status(f"{script.name}: {shlex.join(command)}")
    own = Path(sys.executable).with_name(command[0])
    os.execvp(own if own.is_file() else command[0], command)


def _split_command(words: list[str]) -> tuple[list[str], Path, list[str]]:
    """Return what stands before the script, the script and its arguments."""
    place = next(index for index, word in enumerate(words) if word.endswith(".py"))
    return words[:place], Path(words[place]), words[place + 1 :]


def _read_nodes(options: list[str]) -> _Nodes:
    """Return the machines of torchrun's options; others have no meaning without torchrun."""
    values: dict[str, str] = {}
    words = iter(options)
    for word in words:
        name, separator, value = word.lstrip("-").partition("=")
        values[name.replace("-", "_")] = value if separator else next(words, "")
    devices = values.get("nproc_per_node", "")
    count = values.get("nnodes", "1").rpartition(":")[2]
    if not count.isdigit():
        raise ValueError(f"torchrun --nnodes {count}: must be a number of machines")
    return _Nodes(
        int(count), int(devices) if devices.isdigit() else None, values.get("node_rank", "0"), values.get("master_addr", "")
    )


def _translate(script: Path, arguments: list[str], nodes: _Nodes) -> list[str] | None:
    """Return the command of this suite; None for a script that is not upstream's.

    Raises:
        ValueError: an option has no counterpart, or the script has none.
    """
    name, folder = script.name, script.parent.name
    if name == "ray_gpt.py":
        return _run_of_llm(script, arguments)
    if name in _TRAINING and folder in ("cli", ""):
        return _train(script, arguments, nodes)
    if name == "preprocess_data.py" and folder == "cli":
        return _preprocess_by_name(script, arguments)
    if name == "preprocess_data.py" and folder != "tools":
        return ["mindspeed-rl", "preprocess", *arguments]
    if name in ("convert_ckpt.py", "convert_ckpt_v2.py") and folder != "tools":
        return ["mindspeed-rl", "convert", *arguments]
    if name in _OTHER_SCRIPTS and folder in ("cli", ""):
        raise ValueError(f"{name} has other options here: use {_OTHER_SCRIPTS[name]}")
    return None


def _read_hydra(script: str, arguments: list[str]) -> tuple[dict[str, str], list[str]]:
    """Return the flags of a Hydra command line by their long names, and its overrides."""
    flags: dict[str, str] = {}
    overrides: list[str] = []
    words = iter(arguments)
    for word in words:
        if not word.startswith("-"):
            if not word.lstrip("+~").startswith("hydra."):  # Hydra's own folders and logs, which this suite does not have
                overrides.append(word)
            continue
        flag, separator, value = word.partition("=")
        name = {"-cn": "--config-name", "-cd": "--config-dir", "-cp": "--config-path"}.get(flag, flag)
        if name not in ("--config-name", "--config-dir", "--config-path"):
            raise ValueError(f"{script}: {flag} is not known; --config-name, --config-dir, --config-path and key=value are")
        flags[name] = value if separator else next(words, "")
    return flags, overrides


def _run_of_llm(script: Path, arguments: list[str]) -> list[str]:
    """Return the command that trains with a run file of MindSpeed-LLM, which is imported first: its keys are others.

    Without the file, the script of this suite with the run of that name.
    """
    flags, overrides = _read_hydra("ray_gpt.py", arguments)
    name = flags.get("--config-name", "").removesuffix(".yaml")
    folder = script.parent / "configs" / "rlxf"
    if "--config-path" in flags:
        folder = script.parent / flags["--config-path"]
    elif "--config-dir" in flags:
        folder = Path(flags["--config-dir"])
    if name and (folder / f"{name}.yaml").is_file():
        words = ["python", "ray_gpt.py", "--config-name", name, "--config-dir", str(folder), *overrides]
        path, _ = write_import("mindspeed-llm", shlex.join(words), Path("imported", f"{name}.yaml"), may_replace=True)
        return ["mindspeed-rl", "train", "--config-name", str(path), "--nodes", str(_join_cluster())]
    if name not in _RUNS_OF_LLM:
        known = ", ".join(_RUNS_OF_LLM)
        raise ValueError(
            f"ray_gpt.py --config-name {name}: there is no {folder / f'{name}.yaml'}, and no run of this suite has this name; "
            f"known are {known}"
        )
    own = Path(__file__).resolve().parents[2] / _RUNS_OF_LLM[name]
    if not own.is_file():
        raise ValueError(f"ray_gpt.py --config-name {name}: {own} does not exist; install the suite from its checkout")
    return ["bash", str(own), *overrides]


def _train(script: Path, arguments: list[str], nodes: _Nodes) -> list[str]:
    """Return the command that trains with the run file of a Hydra command line."""
    flags, overrides = _read_hydra(script.name, arguments)
    name = flags.get("--config-name", _TRAINING[script.name]).removesuffix(".yaml")
    configs = script.parent.parent / "configs"
    directory = flags.get("--config-dir", "")
    if "--config-path" in flags:
        directory = str(script.parent / flags["--config-path"])
    elif not directory and (configs / f"{name}.yaml").is_file():
        directory = str(configs)
    machines = _join_cluster() if nodes.count == 1 else nodes.count
    command = ["train", "--config-name", name, *(["--config-dir", directory] if directory else []), "--nodes", str(machines)]
    command += overrides
    if nodes.count == 1 or os.environ.get("RAY_ADDRESS"):
        return ["mindspeed-rl", *command]
    if nodes.devices is None or not nodes.master:
        raise ValueError("torchrun on several machines: --nproc_per_node and --master_addr must be given")
    os.environ.update(MASTER_ADDR=nodes.master, NODE_RANK=nodes.rank)
    return ["mindspeed-rl", "launch", "--nodes", str(nodes.count), "--npus-per-node", str(nodes.devices), "--", *command]


def _preprocess_by_name(script: Path, arguments: list[str]) -> list[str]:
    """Return the command for a dataset file, whose paths are relative to the root of its checkout."""
    root = script.resolve().parent.parent
    folder = root / "configs" / "datasets"
    if arguments and (folder / f"{arguments[0].removesuffix('.yaml')}.yaml").is_file():
        os.chdir(root)
        return ["mindspeed-rl", "preprocess", *arguments, "--config-dir", str(folder)]
    return ["mindspeed-rl", "preprocess", *arguments]


def _join_cluster() -> int:
    """Name the Ray cluster that a script has started to the run, and return the number of its machines; 1 without one."""
    if not os.environ.get("RAY_ADDRESS") and not _RAY_ADDRESS_FILE.is_file():
        return 1
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    probe = subprocess.run([sys.executable, "-I", "-c", _CLUSTER], env=environment, capture_output=True, text=True)
    if probe.returncode != 0:
        return 1  # the file is of a cluster that has ended: the run starts its own
    address, count = json.loads(probe.stdout.splitlines()[-1])
    os.environ["RAY_ADDRESS"] = address
    return count


def _hide_other_package() -> None:
    """Take folders with another package of our name off PYTHONPATH, as an old checkout is.

    Raises:
        SystemExit: the working directory has one, which Ray would give to the workers.
    """
    own = Path(__file__).resolve().parents[1]

    def is_other(folder: Path) -> bool:
        package = folder / own.name / "__init__.py"
        return package.is_file() and package.resolve().parent != own

    path = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder and not is_other(Path(folder))]
    os.environ["PYTHONPATH"] = os.pathsep.join(path)
    if is_other(Path.cwd()):
        print_status(
            f"error: {Path.cwd() / own.name} is another package of this name, and Ray would import it in the workers; rename "
            f"the folder (git mv {own.name} {own.name}.old): the scripts need only cli/, configs/ and examples/"
        )
        raise SystemExit(2)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
