"""`launch --write`: files that fit the schedulers' published schemas, and commands in them that `launch` itself takes."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from mindspeed_rl.cli import launch
from mindspeed_rl.cli.launch import _LaunchSettings
from mindspeed_rl.cli.launch_files import _find_machine

SCHEMAS = Path(__file__).resolve().parents[2] / "data" / "schedulers"
#: 256 devices: 16 nodes of A3
RUN = "grpo_deepseek_r1_671b_A3"
KUBERNETES = ["--mount", "/data:/data", "--mount", "claim:/models", "--queue", "team"]
MORE = {"volcano": KUBERNETES, "rayjob": KUBERNETES, "docker-compose": ["--mount", "/data:/data"]}


def write(folder: Path, kind: str, *words: str, run: str = RUN, machine: str = "a3") -> str:
    path = folder / "job"
    assert launch.main(["--write", kind, run, "--machine", machine, "-o", str(path), *words]) == 0
    return path.read_text()


@pytest.mark.parametrize("kind", MORE)
@pytest.mark.parametrize("more", [True, False])
def test_a_file_has_only_fields_of_the_published_schema(kind: str, more: bool, tmp_path: Path) -> None:
    words = [*MORE[kind], "--socket-ifname", "eth0"] if more else ["--no-token"]
    schema = json.loads((SCHEMAS / f"{kind}.json").read_text())
    content = yaml.safe_load(write(tmp_path, kind, *words))
    jsonschema.Draft202012Validator(schema).validate(content)
    wrong = json.loads(json.dumps(content).replace('"image"', '"imgae"'))
    assert not jsonschema.Draft202012Validator(schema).is_valid(wrong)


def pods(content: dict[str, Any]) -> list[tuple[int, dict[str, Any]]]:
    """(number, specification) of the pods of a job."""
    if content["kind"] == "Job":
        return [(task["replicas"], task["template"]["spec"]) for task in content["spec"]["tasks"]]
    cluster = content["spec"]["rayClusterSpec"]
    groups = [(1, cluster["headGroupSpec"]), *((group["replicas"], group) for group in cluster.get("workerGroupSpecs", ()))]
    return [(count, group["template"]["spec"]) for count, group in groups]


@pytest.mark.parametrize("kind", ["volcano", "rayjob"])
def test_pods_have_the_devices_of_the_placement_and_what_hccl_needs(kind: str, tmp_path: Path) -> None:
    resource = "huawei.com/ascend-1980"
    content = yaml.safe_load(write(tmp_path, kind, "--device-resource", resource, "--shm-gib", "128", "--retries", "5"))
    assert sum(count for count, _ in pods(content)) == 16
    for _, pod in pods(content):
        (container,) = pod["containers"]
        assert container["resources"] == {"requests": {resource: "16"}, "limits": {resource: "16"}}
        assert pod["hostNetwork"] and pod["dnsPolicy"] == "ClusterFirstWithHostNet"
        folders = {mount["mountPath"] for mount in container["volumeMounts"]}
        assert {"/dev/shm", "/etc/hccn.conf", "/usr/local/Ascend/driver"} <= folders
        assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "128Gi"}} in pod["volumes"]
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
        assert {"name": "BASH_ENV", "value": "/opt/mindspeed-rl/envs/npu_a3/set_env.sh"} in container["env"]
    assert content["spec"]["maxRetry" if kind == "volcano" else "backoffLimit"] == 5


def test_a_run_on_part_of_a_node_asks_for_that_part(tmp_path: Path) -> None:
    content = yaml.safe_load(write(tmp_path, "volcano", run="grpo_qwen3_30b_a3b_A3_8dies"))
    ((count, pod),) = pods(content)
    assert count == 1 and pod["containers"][0]["resources"]["limits"] == {"huawei.com/Ascend910": "8"}
    one = yaml.safe_load(write(tmp_path, "docker-compose", run="grpo_qwen3_8b_A2_1die", machine="a2"))
    devices = one["services"]["node"]["devices"]
    assert [device for device in devices if device.startswith("/dev/davinci") and device[12:].isdigit()] == ["/dev/davinci0"]


PROGRAMS = {
    "mindspeed-rl": 'for word in "$@"; do printf "%s\\n" "$word"; done > "$OUT"',
    "scontrol": "echo localhost",
    "srun": '[ "$1" = --kill-on-bad-exit=1 ] || exit 9; shift; exec "$@"',
}


def run_shell(folder: Path, script: str, **variables: str) -> _LaunchSettings:
    """The settings that `launch` reads from the command that a script starts; programs of the cluster are stand-ins."""
    programs = folder / "programs"
    programs.mkdir()
    for name, text in PROGRAMS.items():
        (programs / name).write_text(f"#!/bin/bash\n{text}\n")
        (programs / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "OUT": str(folder / "words"), **variables}
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    command, *words = (folder / "words").read_text().splitlines()
    assert command == "launch"
    if "--token-file" in words:
        place = words.index("--token-file") + 1
        assert words[place] in ("/run/mindspeed-rl/token", "/run/secrets/token") or words[place].startswith(str(folder))
        (folder / "token").write_text("secret")
        words[place] = str(folder / "token")
    return launch.parse(words)


OVERRIDE = 'actor_config.data_path="it\'s a $file"'
TRAIN = ("train", "--config-name", RUN, "--nodes", "16", OVERRIDE)


def check(settings: _LaunchSettings, rank: int) -> None:
    assert settings.command == TRAIN and settings.node_rank == rank and settings.socket_ifname == "eth0"
    assert (settings.nodes, settings.npus_per_node, settings.master) == (16, 16, "127.0.0.1")


def test_a_pod_of_volcano_starts_its_node(tmp_path: Path) -> None:
    content = yaml.safe_load(write(tmp_path, "volcano", OVERRIDE, "--socket-ifname", "eth0"))
    ((_, pod),) = pods(content)
    bash, option, script = pod["containers"][0]["command"]
    assert (bash, option) == ("/bin/bash", "-c")
    check(run_shell(tmp_path, script, VC_NODE_HOSTS="localhost,other", VC_TASK_INDEX="3"), 3)


def test_a_slurm_script_starts_its_nodes(tmp_path: Path) -> None:
    script = write(tmp_path, "slurm", OVERRIDE, "--socket-ifname", "eth0", "--queue", "npu", "--time", "1-00:00:00")
    settings = {line[len("#SBATCH --") :] for line in script.splitlines() if line.startswith("#SBATCH --")}
    assert {"nodes=16", "ntasks-per-node=1", "gres=npu:16", "partition=npu", "time=1-00:00:00", "signal=TERM@120"} <= settings
    (tmp_path / "envs/npu_a3").mkdir(parents=True)
    (tmp_path / "envs/npu_a3/set_env.sh").write_text("export SOURCED=1\n")
    variables = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": "7", "SLURM_NODEID": "0"}
    check(run_shell(tmp_path, script, **variables), 0)
    assert not (tmp_path / ".token-7").exists()


def test_a_service_of_compose_starts_its_node(tmp_path: Path) -> None:
    content = yaml.safe_load(write(tmp_path, "docker-compose", OVERRIDE, "--socket-ifname", "eth0"))
    bash, option, script = content["services"]["node"]["command"]
    # as compose fills in variables
    values = {"NODE_RANK": "2"}
    script = re.sub(
        r"\$\$|\$\{(\w+):-([^}]*)\}", lambda match: values.get(match[1], match[2]) if match[1] else "$", script
    )
    check(run_shell(tmp_path, script), 2)
    assert content["services"]["node"]["restart"] == "on-failure:3" and content["services"]["node"]["network_mode"] == "host"


def test_the_run_file_may_be_an_option(tmp_path: Path) -> None:
    plain = write(tmp_path, "slurm", "actor_config.lr=1e-6")
    for flag in ("--config", "--config-name"):
        words = ["--write", "slurm", "actor_config.lr=1e-6", flag, RUN, "--machine", "a3", "-o", str(tmp_path / "other")]
        assert launch.main(words) == 0 and (tmp_path / "other").read_text() == plain


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--write", "volcano", RUN, "--machine", "cpu"], "--machine cpu does not suit"),
        (["--write", "volcano", "grpo_tiny_cpu", "--machine", "a3"], "--machine a3 does not suit"),
        (["--write", "volcano", RUN, "--machine", "a3", "--nodes", "2"], "fewer than the 256"),
        (["--write", "slurm", RUN, "--machine", "a3", "--mount", "/a:/b"], "without containers"),
        (["--write", "volcano", RUN, "--machine", "a3", "--mount", "a:b"], "expected /folder/of/host:/folder"),
        (["--write", "rayjob", RUN, "--machine", "a3", "--time", "1"], "--time belongs to slurm"),
        (["--write", "volcano", RUN, "other", "--machine", "a3"], "'other' is not key=value"),
        (["--write", "volcano", "--machine", "a3"], "there is no run file"),
        (["--write", "nomad", RUN, "--machine", "a3"], "nomad"),
        (["--write", "volcano", RUN, "--machine", "a3", "actor_config.lrr=1"], "lrr"),
        (["--write", "volcano", RUN, "--machine", "a3", "actor_config.micro_batch_size=7"], "micro_batch_size"),
    ],
)
def test_what_cannot_be_written_is_refused(
    words: list[str], error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch.main([*words, "-o", str(tmp_path / "job")]) == 2
    printed = capsys.readouterr().err
    assert error in printed and all(line.startswith("error: ") for line in printed.splitlines()), printed
    assert not (tmp_path / "job").exists()


@pytest.mark.parametrize("kind", ["volcano", "rayjob", "slurm", "docker-compose"])
def test_the_machine_is_that_of_the_run_files_name_where_none_is_given(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for run, machine in (("grpo_qwen3_8b_A3", "a3"), ("grpo_qwen3_8b_950DT", "a5"), ("grpo_qwen3_8b_A2_1die", "a2")):
        assert launch.main(["--write", kind, run, "--no-token", "-o", str(tmp_path / "found")]) == 0
        assert f"machines: {machine}, which the name of the run file has (--machine)\n" in capsys.readouterr().err
        assert (tmp_path / "found").read_text() == write(tmp_path, kind, "--no-token", run=run, machine=machine)
        capsys.readouterr()


def test_a_run_on_cpus_needs_no_machine_and_a_name_without_one_is_asked_for_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch.main(["--write", "docker-compose", "grpo_tiny_cpu", "-o", str(tmp_path / "job")]) == 0
    assert "machines" not in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"--machine is missing, and the name mine has none: a2 \(8 devices\), a3 \(16"):
        _find_machine("npu", "folder_A3/mine.yaml")
    with pytest.raises(ValueError, match="the name A2_or_A3 has none"):
        _find_machine("npu", "A2_or_A3.yaml")
