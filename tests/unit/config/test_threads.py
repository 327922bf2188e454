"""Threads of a worker: a key, the user's environment, or the cores of the machine divided among its workers."""

from __future__ import annotations

from pathlib import Path

import pytest
from sample_runs import prompt_level

from mindspeed_rl.config.threads import count_cores, decide_threads
from mindspeed_rl.run.resolve import resolve


def machine(folder: Path, siblings: list[str], files: dict[str, str]) -> tuple[Path, Path]:
    for index, text in enumerate(siblings):
        path = folder / "cpu" / f"cpu{index}" / "topology" / "thread_siblings_list"
        path.parent.mkdir(parents=True)
        path.write_text(f"{text}\n")
    for name, text in files.items():
        path = folder / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return folder / "cpu", folder / "cgroup"


def test_second_hyper_threads_are_no_cores(tmp_path):
    topology, cgroups = machine(tmp_path, ["0,4", "1,5", "2,6", "3,7", "0,4", "1,5", "2,6", "3,7"], {})
    assert count_cores(topology, cgroups, frozenset(range(8))) == 4
    assert count_cores(topology, cgroups, frozenset({0, 4, 1})) == 2


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "max 100000"}, 8),
        ({"cpu.max": "250000 100000"}, 2),
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
        ({"cpu/cpu.cfs_quota_us": "400000", "cpu/cpu.cfs_period_us": "100000"}, 4),
    ],
)
def test_a_container_has_the_cores_of_its_quota(tmp_path, files, cores):
    topology, cgroups = machine(tmp_path, [str(index) for index in range(8)], files)
    assert count_cores(topology, cgroups, frozenset(range(8))) == cores


def test_a_machine_without_these_files_has_a_core_for_each_processor(tmp_path):
    assert count_cores(tmp_path, tmp_path, frozenset(range(3))) == 3


def test_the_key_precedes_the_environment_and_that_the_cores():
    assert decide_threads(3, 2, {"OMP_NUM_THREADS": "7"}).count == 3
    assert decide_threads(None, 2, {"OMP_NUM_THREADS": "7"}).count == 7
    assert decide_threads(None, 2, {"OMP_NUM_THREADS": "4,2"}).count == 4
    cores = count_cores()
    assert decide_threads(None, 1, {}).count == cores
    assert decide_threads(None, cores, {"OMP_NUM_THREADS": "many"}).count == 1
    assert decide_threads(None, 10 * cores, {}).count == 1


@pytest.mark.parametrize(("platform", "nodes", "threads"), [("cpu", 1, 1), ("cpu", 2, 3), ("npu", 1, None)])
def test_a_run_divides_the_cores_among_the_workers_of_a_machine(monkeypatch, platform, nodes, threads):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("mindspeed_rl.config.threads.count_cores", lambda: 24)
    run = prompt_level(16, megatron_training={"train_iters": 3})
    result = resolve(run.config, nodes, platform=platform).threads
    assert (result and result.count) == threads
