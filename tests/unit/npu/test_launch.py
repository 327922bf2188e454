"""`mindspeed-rl launch`: who is who, what must agree, and (slow) real Ray nodes on this machine with made-up NPUs."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from patience import patient
from ports import find_free_port

from mindspeed_rl.cli import launch
from mindspeed_rl.cli.launch import _Fingerprint, _LaunchSettings


def settings(**changes: object) -> _LaunchSettings:
    values: dict[str, object] = {
        "nodes": 3, "npus_per_node": 16, "hosts": (), "master": "10.0.0.4", "node_rank": 0, "port": 6766, "timeout_s": 5.0,
        "socket_ifname": "", "cpus": None, "command": ("doctor",),
    }  # fmt: skip
    return _LaunchSettings(**{**values, **changes})  # type: ignore[arg-type]


def test_the_same_command_makes_a_head_here_and_a_worker_elsewhere() -> None:
    assert launch._find_node_rank((), "127.0.0.1", None) == 0
    assert launch._find_node_rank((), "192.0.2.200", None) is None
    assert launch._find_node_rank(("192.0.2.200", "127.0.0.1"), "192.0.2.200", None) == 1
    assert launch._find_node_rank(("192.0.2.200", "192.0.2.201"), "192.0.2.200", 1) == 1


def test_a_machine_outside_the_hosts_is_told_so() -> None:
    with pytest.raises(ValueError, match="none of 192.0.2.200, 192.0.2.201 is this machine"):
        launch._find_node_rank(("192.0.2.200", "192.0.2.201"), "192.0.2.200", None)


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["--nodes", "2", "--npus-per-node", "8", "--", "doctor"], "several nodes need --hosts"),
        (["--nodes", "2", "--npus-per-node", "8", "--hosts", "127.0.0.1", "--", "doctor"], "--hosts names 1 addresses"),
        (["--nodes", "1", "--npus-per-node", "8"], "nothing to run"),
    ],
)
def test_incomplete_arguments_are_refused(
    argv: list[str], complaint: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(SystemExit) as error:
        launch.parse(argv)
    assert error.value.code == 2 and complaint in capsys.readouterr().err


def test_everything_after_the_dashes_belongs_to_the_command() -> None:
    parsed = launch.parse(["--nodes", "1", "--npus-per-node", "8", "--", "train", "--config-name", "x", "--nodes", "9"])
    assert parsed.command == ("train", "--config-name", "x", "--nodes", "9") and parsed.nodes == 1


def test_missing_nodes_are_named_by_rank_and_host() -> None:
    hosts = ("10.0.0.4", "10.0.0.5", "10.0.0.6")
    assert (
        launch._describe_missing_nodes(settings(hosts=hosts), ["node 0 (10.0.0.4)", "node 2 (10.0.0.6)"]) == "node 1 (10.0.0.5)"
    )
    assert launch._describe_missing_nodes(settings(), ["node 0 (10.0.0.4)"]) == "node 1, node 2"
    unknown = launch._describe_missing_nodes(settings(), ["node 0 (10.0.0.4)", "node ? (10.0.0.9)"])
    assert unknown == "1 of 3 nodes; joined: node 0 (10.0.0.4), node ? (10.0.0.9)"


def test_nodes_that_differ_are_listed_one_difference_a_line() -> None:
    head = _Fingerprint({"torch": "2.10.0", "ray": "2.60.0"}, "aaaa")
    prints = {
        "node 0": head,
        "node 1": _Fingerprint({"torch": "2.9.0", "ray": "2.60.0"}, "aaaa"),
        "node 2": _Fingerprint(head.versions, "bbbb", ["/weights/qwen"]),
    }
    assert launch._compare_fingerprints(prints, "node 0") == [
        "node 1: torch 2.9.0, the head has 2.10.0",
        "node 2: the suite's code differs from the head's (bbbb instead of aaaa)",
        "node 2: /weights/qwen does not exist",
    ]


def test_a_fingerprint_knows_versions_code_and_missing_paths(tmp_path: Path) -> None:
    (tmp_path / "data_packed_input_ids_document.bin").touch()
    mine = launch._compute_fingerprint([str(tmp_path), f"{tmp_path}/data*", f"{tmp_path}/other*", f"{tmp_path}/none"])
    assert mine.missing_paths == [f"{tmp_path}/other*", f"{tmp_path}/none"]
    assert mine.versions["ray"][:1].isdigit() and mine.versions["torch_npu"] == "not installed"
    assert mine.code == launch._compute_fingerprint().code and len(mine.code) == 16


def test_a_run_files_weights_and_data_are_checked_on_all_nodes() -> None:
    paths = launch._list_run_paths(["train", "--config-name", "grpo_qwen25_7b_A3", "actor_config.load=/ckpt/qwen"])
    assert "/ckpt/qwen" in paths and any(path.endswith("*") for path in paths)
    assert launch._list_run_paths(["doctor", "--json"]) == []


def test_slices_and_data_of_the_hub_are_no_files_to_look_for() -> None:
    command = ["train", "--config-name", "grpo_qwen25_7b_A3"]
    sliced = launch._list_run_paths([*command, "megatron_training.data_path='/d/rows.jsonl[0:100]'"])
    assert "/d/rows.jsonl*" in sliced and not any("[" in path for path in sliced)
    data = ["megatron_training.data_path='hf://org/data#50'", "megatron_training.eval_data_path=/d/held"]
    hub = launch._list_run_paths([*command, *data])
    assert "/d/held*" in hub and not any("hf:" in path for path in hub)


def test_weights_of_a_mixture_are_no_files_either() -> None:
    assert list(launch._list_data_prefixes(["0.3", "/d/a", 0.7, "/d/b"])) == ["/d/a", "/d/b"]


def test_a_load_folder_that_the_run_will_write_is_not_asked_for(tmp_path: Path) -> None:
    later, now = tmp_path / "later", tmp_path / "now"
    now.mkdir()
    command = ["train", "--config-name", "grpo_qwen25_7b_A3", "actor_config.pretrained_checkpoint=/ckpt/qwen"]
    assert str(later) not in launch._list_run_paths([*command, f"actor_config.load={later}"])
    assert {str(now), "/ckpt/qwen"} <= set(launch._list_run_paths([*command, f"actor_config.load={now}"]))
    without = ["train", "--config-name", "grpo_qwen25_7b_A3", f"actor_config.load={later}"]
    assert str(later) in launch._list_run_paths(without), "nothing else gives weights"


def test_the_head_and_the_workers_start_ray_differently() -> None:
    head = launch._ray_command(settings(cpus=2), "/tmp/x")
    worker = launch._ray_command(settings(node_rank=2, hosts=("10.0.0.4", "10.0.0.5", "10.0.0.6")), "/tmp/x")
    assert {"--head", "--port=6766", "--node-ip-address=10.0.0.4", "--num-cpus=2", "--block"} <= set(head)
    assert {"--address=10.0.0.4:6766", "--node-ip-address=10.0.0.6", "--block"} <= set(worker) and "--head" not in worker
    assert '"NPU": 16' in " ".join(worker) and '"launch_rank_2": 1' in " ".join(worker)


def test_one_interface_name_reaches_all_three_libraries(tmp_path: Path) -> None:
    environment = launch._environment(settings(socket_ifname="eth7"), tmp_path / "done")
    assert {environment[f"{name}_SOCKET_IFNAME"] for name in ("HCCL", "GLOO", "TP")} == {"eth7"}


# ---------------------------------------------------------------- with Ray

PROGRAM = """
import os, sys, ray

class Hold:
    def node(self):
        return ray.get_runtime_context().get_node_id()

    def interface(self):
        return os.environ.get("HCCL_SOCKET_IFNAME")

ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False)
hold = ray.remote(resources={"NPU": 1}, num_cpus=0)(Hold)
actors = [hold.remote() for _ in range(4)]
nodes = ray.get([actor.node.remote() for actor in actors])
interfaces = set(ray.get([actor.interface.remote() for actor in actors]))
ready = ray.wait([hold.remote().node.remote()], timeout=2)[0]
print("RESULT", sorted(nodes.count(node) for node in set(nodes)), interfaces, len(ready))
sys.exit(7)
"""


def start(rank: int, port: int, tmp_path: Path, *extra: str, sources: Path | None = None) -> subprocess.Popen:
    """A node's launcher, from other sources than this checkout's when told."""
    command = [sys.executable, "-c", "import sys; from mindspeed_rl.cli.launch import main; sys.exit(main(sys.argv[1:]))"]
    command += ["--nodes", "2", "--npus-per-node", "2", "--master-addr", "127.0.0.1", "--node-rank", str(rank)]
    command += [
        "--port",
        str(port),
        "--cpus",
        "2",
        "--socket-ifname",
        "lo",
        *extra,
        "--",
        "python",
        str(tmp_path / "program.py"),
    ]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    if sources is not None:
        environment["PYTHONPATH"] = str(sources)
    # not in the repository: Ray puts the driver's folder before everything else that its workers import from
    return subprocess.Popen(command, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def processes_with(text: str) -> list[int]:
    """Living processes that have a text in their command line."""
    results = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if text.encode() in (folder / "cmdline").read_bytes():
                results.append(int(folder.name))
    return results


@pytest.mark.slow
def test_two_ray_nodes_share_a_run_and_both_return_its_exit_code(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    port = find_free_port()
    processes = [start(rank, port, tmp_path, "--timeout", "90", "--check-path", str(tmp_path)) for rank in (1, 0)]
    worker, head = (process.communicate(timeout=patient(180))[0] for process in processes)
    assert "RESULT [2, 2] {'lo'} 0" in head, head + worker
    assert [process.returncode for process in processes] == [7, 7]


@pytest.mark.slow
def test_a_node_that_never_joins_is_named_and_ends_the_launch(tmp_path: Path) -> None:
    head = start(0, find_free_port(), tmp_path, "--timeout", "25")
    text = head.communicate(timeout=patient(120))[0]
    assert head.returncode == 1 and "after 25 s these nodes are missing: node 1." in text


@pytest.mark.slow
def test_a_path_that_a_node_does_not_see_ends_the_launch_everywhere(tmp_path: Path) -> None:
    port = find_free_port()
    processes = [start(rank, port, tmp_path, "--timeout", "90", "--check-path", f"{tmp_path}/weights") for rank in (1, 0)]
    worker, head = (process.communicate(timeout=patient(180))[0] for process in processes)
    assert f"{tmp_path}/weights does not exist" in head, head + worker
    assert [process.returncode for process in processes] == [1, 1]


@pytest.mark.slow
def test_a_node_with_other_sources_ends_the_launch_everywhere(tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(Path(launch.__file__).parents[1], other / "mindspeed_rl", ignore=shutil.ignore_patterns("__pycache__"))
    with open(other / "mindspeed_rl" / "trainers" / "rl.py", "a") as file:
        file.write("# edited on this node only\n")
    port = find_free_port()
    processes = [start(rank, port, tmp_path, "--timeout", "90", sources=sources) for rank, sources in ((1, other), (0, None))]
    worker, head = (process.communicate(timeout=patient(180))[0] for process in processes)
    assert re.search(r"node 1 \(.*\): the suite's code differs from the head's", head), head + worker
    assert [process.returncode for process in processes] == [1, 1]


@pytest.mark.slow
def test_a_head_that_is_ended_takes_its_cluster_along_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import time\nprint('running', flush=True)\ntime.sleep(600)\n")
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    port = find_free_port()
    worker, head = (start(rank, port, tmp_path, "--timeout", "90") for rank in (1, 0))
    try:
        assert any("running" in line for line in head.stdout)
        assert processes_with(str(tmp_path / "program.py")) and processes_with(f":{port}")
        head.send_signal(signal.SIGTERM)
        assert head.wait(patient(60)) == 143
        assert worker.wait(patient(90)) != 0
        assert processes_with(str(tmp_path / "program.py")) == [] and processes_with(f":{port}") == []
        assert bystander.poll() is None
    finally:
        for process in (bystander, worker, head):
            process.kill()
            process.wait()


def test_a_taken_port_is_named_with_a_free_one(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(launch.LaunchError, match=rf"port {port} of 127.0.0.1 is taken.*--port \d+ is free") as error:
            launch._head(settings(nodes=1, master="127.0.0.1", port=port), tmp_path)
    assert f"--port {port} " not in str(error.value)
