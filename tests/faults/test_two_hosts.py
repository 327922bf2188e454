"""One run over two hosts: network namespaces with addresses of their own, which share the disk as the nodes of a cluster do."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from grpo_command import FIGURES, MARK, finished, marked, overrides, records, running
from patience import patient

PORT = 6766
#: tensor parallel inside a host, data parallel across
SPREAD = [
    "rl_config.actor_resource.num_npus=4",
    "actor_config.tensor_model_parallel_size=2",
    "generate_config.infer_tensor_parallel_size=2",
]


def ip(*words: object) -> None:
    subprocess.run(["ip", *map(str, words)], check=True, capture_output=True, text=True)


class Host:
    """A network namespace, in which launchers run."""

    def __init__(self, name: str, address: str, interface: str) -> None:
        self.name, self.address, self.interface = name, address, interface

    def launch(
        self, folder: Path, hosts: list[Host], mark: str, words: list[str], cpus: int, own: Path | None = None
    ) -> subprocess.Popen[str]:
        """The launcher of this host, which has so many logical CPUs for Ray.

        Args:
            own: what the host sees in the place of the folder, whose disk it does not share then.
        """
        flags = [
            "--nodes",
            "2",
            "--npus-per-node",
            "1",
            "--hosts",
            ",".join(host.address for host in hosts),
            "--cpus",
            str(cpus),
        ]
        flags += ["--socket-ifname", self.interface, "--port", str(PORT), "--timeout", "120"]
        command = [sys.executable, "-m", "mindspeed_rl.cli.main", "launch", *flags, "--", "train", "--nodes", "2", *words]
        if own is not None:  # `ip netns exec` gives its command mounts of its own too
            command = ["bash", "-c", f'mount --bind {own} {folder} && cd {folder} && exec "$@"', "-", *command]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        return subprocess.Popen(
            ["ip", "netns", "exec", self.name, *command],
            env={**environment, MARK: mark, "OMP_NUM_THREADS": "1"},
            cwd=folder,
            stdout=(folder / f"{self.name}.txt").open("w"),
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[Host]]:
    """Two hosts with a cable between them."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("needs root and the command ip (iproute2), to make hosts of network namespaces")
    tag = uuid.uuid4().hex[:6]
    made = [Host(f"msrl-{tag}-{number}", f"10.77.0.{number + 1}", f"ve{tag}{number}") for number in range(2)]
    try:
        for host in made:
            ip("netns", "add", host.name)
        here, there = ((host.interface, "netns", host.name) for host in made)
        ip("link", "add", *here, "type", "veth", "peer", *there)
        for host in made:
            ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", host.interface)
            ip("-n", host.name, "link", "set", host.interface, "up")
            ip("-n", host.name, "link", "set", "lo", "up")
        yield made
    finally:
        for host in made:
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "del", host.name)


class Launched:
    """The same run started on both hosts."""

    def __init__(
        self, task: Path, folder: Path, hosts: list[Host], *changes: str, cpus: int, disks: tuple[Path | None, Path | None]
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self._mark = folder, uuid.uuid4().hex
        words = ["--config-name", "grpo_tiny_cpu", *overrides(task, folder), *SPREAD, f"run_dir={folder}/run", *changes]
        each = list(zip(hosts, disks, strict=True))
        self._hosts, self._words, self._cpus = hosts, words, cpus
        self.launchers = [self._launch(host, own) for host, own in reversed(each)][::-1]

    def _launch(self, host: Host, own: Path | None) -> subprocess.Popen[str]:
        return host.launch(self.folder, self._hosts, self._mark, self._words, self._cpus, own)

    def lose(self, number: int) -> None:
        """Kill all of a host, from which nothing arrives any more."""
        host, launcher = self._hosts[number], psutil.Process(self.launchers[number].pid)
        ip("-n", host.name, "link", "set", host.interface, "down")
        for process in (*launcher.children(recursive=True), launcher):
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.launchers[number].wait()

    def launch_again(self, number: int) -> None:
        """Start the command again on a host that is back."""
        host = self._hosts[number]
        ip("-n", host.name, "link", "set", host.interface, "up")
        self.launchers[number] = self._launch(host, None)

    @property
    def output(self) -> str:
        """What both have said."""
        return "".join(f"--- {host.name}\n{(self.folder / host.name).with_suffix('.txt').read_text()}" for host in self._hosts)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Of the iterations so far."""
        return records(self.folder / "run")

    def wait(self, timeout_s: float = 400) -> list[int]:
        """The exit codes."""
        deadline = time.monotonic() + patient(timeout_s)
        for launcher in self.launchers:
            while launcher.poll() is None:
                assert time.monotonic() < deadline, self.output[-6000:]
                time.sleep(0.1)
        return [launcher.returncode for launcher in self.launchers]

    def wait_until(self, reached: Any, timeout_s: float = 400, but_not: int | None = None) -> None:
        """Returns once it is so.

        Args:
            but_not: a host that is lost.
        """
        deadline = time.monotonic() + patient(timeout_s)
        while not reached():
            alive = [launcher.poll() is None for place, launcher in enumerate(self.launchers) if place != but_not]
            assert all(alive), self.output[-6000:]
            assert time.monotonic() < deadline, self.output[-6000:]
            time.sleep(0.1)

    def leftovers(self) -> list[str]:
        """Processes that outlive the launchers."""
        deadline = time.monotonic() + patient(20)
        while (left := marked(self._mark)) and time.monotonic() < deadline:
            time.sleep(0.5)
        return [" ".join(process.cmdline())[:120] for process in left]

    def close(self) -> None:
        for process in marked(self._mark):
            with contextlib.suppress(psutil.Error):
                process.kill()
        for launcher in self.launchers:
            launcher.kill()
            launcher.wait()


@contextlib.contextmanager
def launched(
    task: Path,
    folder: Path,
    hosts: list[Host],
    *changes: str,
    cpus: int = 2,
    disks: tuple[Path | None, Path | None] = (None, None),
) -> Iterator[Launched]:
    run = Launched(task, folder, hosts, *changes, cpus=cpus, disks=disks)
    try:
        yield run
    finally:
        run.close()


@pytest.fixture(scope="module")
def whole(task: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The records of the run on one host."""
    return finished(task, tmp_path_factory.mktemp("one"), *SPREAD, "megatron_training.train_iters=2").metrics


@pytest.mark.slow
def test_a_run_over_two_hosts_equals_a_run_on_a_single_host(
    task: Path, tmp_path: Path, hosts: list[Host], whole: list[dict[str, Any]]
) -> None:
    """With the published data plane; the test below has the small one, and disks that are not shared."""
    keys = ["rl_config.data_strategy=tq", "megatron_training.train_iters=2"]
    with launched(task, tmp_path / "run", hosts, *keys, cpus=3) as run:  # processes of the data plane ask for some
        assert run.wait() == [0, 0], run.output[-6000:]
        assert run.leftovers() == []
    assert_same_figures(run, whole)


@pytest.mark.slow
def test_a_replica_over_two_hosts_equals_one_on_a_single_host(task: Path, tmp_path: Path, hosts: list[Host]) -> None:
    """Each host has one of the two tensor-parallel ranks of the trainer and of the only engine."""
    keys = ["rl_config.actor_resource.num_npus=2", "megatron_training.train_iters=2"]
    expected = finished(task, tmp_path / "one", *SPREAD, *keys).metrics
    with launched(task, tmp_path / "run", hosts, *keys, cpus=1) as run:
        assert run.wait() == [0, 0], run.output[-6000:]
        assert run.leftovers() == []
    assert_same_figures(run, expected)


def assert_same_figures(run: Launched, expected: list[dict[str, Any]]) -> None:
    for ours, theirs in zip(run.metrics, expected, strict=True):
        close = {name: pytest.approx(theirs[name], rel=1e-5, abs=1e-6) for name in FIGURES}
        assert {name: ours[name] for name in FIGURES} == close


@pytest.mark.slow
def test_hosts_that_share_no_disk_save_each_their_part_and_go_on(
    task: Path, tmp_path: Path, hosts: list[Host], whole: list[dict[str, Any]]
) -> None:
    there = tmp_path / "there"
    there.mkdir()
    folder = tmp_path / "run"
    for iterations in (1, 2):
        with launched(task, folder, hosts, f"megatron_training.train_iters={iterations}", disks=(None, there)) as run:
            assert run.wait() == [0, 0], run.output[-6000:]
            assert run.leftovers() == []
        assert "actor_config.save: " in run.output and "is on a disk of its own on " in run.output
    assert "resumes after iteration 1" in run.output
    assert_same_figures(run, whole)
    saved = {str(path.relative_to(place)) for place in (folder, there) for path in place.rglob("iter_0000002/random/*")}
    assert len(saved) == 4 and len(list(folder.rglob("iter_0000002/random/*"))) == 2


@pytest.mark.slow
def test_a_host_that_vanishes_is_named_and_the_other_ends(task: Path, tmp_path: Path, hosts: list[Host]) -> None:
    with launched(task, tmp_path / "run", hosts, "megatron_training.train_iters=500") as run:
        run.wait_until(lambda: run.metrics)
        ip("-n", hosts[1].name, "link", "set", hosts[1].interface, "down")
        try:
            codes = run.wait(240)
        finally:
            ip("-n", hosts[1].name, "link", "set", hosts[1].interface, "up")
        assert 0 not in codes
        assert f"its node {hosts[1].address} has died, or can no longer be reached" in run.output, run.output[-6000:]
        assert f"the head {hosts[0].address}:{PORT} was not reached for 60 s" in run.output, run.output[-6000:]
        assert run.leftovers() == []


@pytest.mark.slow
def test_a_run_goes_on_without_a_lost_host_and_takes_it_back(task: Path, tmp_path: Path, hosts: list[Host]) -> None:
    """The iterations on one host are, bit for bit, those of a resume by hand with the keys that the console names."""
    keys = ["megatron_training.train_iters=500", "actor_config.keep_last=null"]
    tolerance = "rl_config.fault_tolerance={enabled: true, shrink: true, shrink_wait_s: 5}"
    with launched(task, tmp_path / "run", hosts, *keys, tolerance) as run:
        run.wait_until(lambda: run.metrics)
        run.lose(1)
        run.wait_until(lambda: "the run resumes there with" in run.output, but_not=1)
        (iteration,) = re.findall(r"the run resumes after iteration (\d+)", run.output)
        start = int(iteration)
        run.wait_until(lambda: len(run.metrics) >= start + 2, but_not=1)
        run.launch_again(1)
        run.wait_until(lambda: "devices on 2 node(s) are there again" in run.output)
        (back,) = re.findall(r"are there again; the run resumes after iteration (\d+)", run.output)
        end = int(back)
        run.wait_until(lambda: len(run.metrics) >= end + 1)
        run.launchers[0].send_signal(signal.SIGTERM)
        run.wait()
        assert run.leftovers() == []
        on_one_host = run.metrics[start:end]
        (changes,) = re.findall(r"the run resumes there with (.*)", run.output)
    saved = [f"actor_config.load={tmp_path / 'run' / 'save'}", f"actor_config.load_iteration={start}"]
    with running(task, tmp_path / "hand", *SPREAD, *keys, *saved, *shlex.split(changes)) as command:
        command.wait_until(lambda: len(command.metrics) >= end - start)
        by_hand = command.metrics[: end - start]
    assert [item["iteration"] for item in by_hand] == [item["iteration"] for item in on_one_host]
    for ours, theirs in zip(on_one_host, by_hand, strict=True):
        assert {name: ours[name] for name in FIGURES} == {name: theirs[name] for name in FIGURES}
