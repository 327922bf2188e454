"""Where the processes of a run stand is read from what they left, whether they work, are stopped, or are gone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from patience import patient

from mindspeed_rl.observability import heartbeat
from mindspeed_rl.observability.process_status import (
    _describe_last_collective,
    _describe_location,
    _match_collectives,
    collect_statuses,
    find_stalled_collectives,
    find_straggler,
    read_statuses,
    terminate_processes,
)

CHILD = """
import sys, time
from pathlib import Path
from mindspeed_rl.observability import heartbeat
heartbeat.start(Path(sys.argv[1]), sys.argv[2], interval_s=0.1)
with heartbeat.doing("update_actor"):
    print("up", flush=True)
    time.sleep(60)
"""


def child(folder: Path, name: str) -> subprocess.Popen[str]:
    """A process that is in a phase for a minute."""
    process = subprocess.Popen([sys.executable, "-c", CHILD, str(folder), name], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    return process


def test_working_stopped_and_ended_processes_are_distinguished(tmp_path: Path) -> None:
    processes = [child(tmp_path, f"worker {rank}") for rank in range(3)]
    try:
        processes[1].send_signal(signal.SIGSTOP)
        processes[2].kill()
        processes[2].wait()
        result = collect_statuses(tmp_path)
        assert [(item.name, item.state, item.doing) for item in result] == [
            ("worker 0", "works", "update_actor"),
            ("worker 1", "stopped", "update_actor"),
            ("worker 2", "dead", "update_actor"),
        ]
        assert [item.pid for item in result] == [process.pid for process in processes]
        assert "time.sleep" not in (tmp_path / "alive/worker_1.stacks").read_text()
        assert '  File "<string>", line 8 in <module>' in (tmp_path / "alive/worker_0.stacks").read_text()
        late = find_straggler(result, ["worker 0", "worker 1"])
        assert late is not None and str(late).startswith(
            f"worker 1 (process {processes[1].pid}) is stopped (SIGSTOP, or a debugger), in update_actor for "
        )
        assert terminate_processes(tmp_path, ["worker 1"]) == ["worker 1"]
        assert processes[1].wait(patient(5)) == -signal.SIGKILL
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_a_process_number_that_another_process_has_now_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "alive").mkdir()
    record = {"name": "worker 0", "pid": os.getpid(), "host": os.uname().nodename, "interval_s": 5.0, "beats": 3}
    path = tmp_path / "alive/worker_0.json"
    path.write_text(json.dumps({**record, "doing": "update_actor", "since": 0.0}))
    os.utime(path, (1.0, 1.0))  # written before this process was there
    (status,) = read_statuses(tmp_path)
    assert status.state == "dead"
    assert terminate_processes(tmp_path, ["worker 0"]) == []


def test_a_half_written_record_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "alive").mkdir()
    (tmp_path / "alive/worker_0.json").write_text('{"name": "wor')
    assert read_statuses(tmp_path) == [] and collect_statuses(tmp_path, patience_s=0.1) == []


def test_what_is_said_in_letters_beyond_ascii_stays_readable(tmp_path: Path) -> None:
    beat = heartbeat.start(tmp_path, "driver", interval_s=60.0)
    try:
        with heartbeat.doing("正在训练" * 200):
            (status,) = read_statuses(tmp_path)
    finally:
        beat.end()
    assert status.name == "driver" and status.doing.startswith("正在训练")


STACKS = """Thread 0x00007f1 (most recent call first):
  File "/x/mindspeed_rl/observability/heartbeat.py", line 90 in _beat
  File "/usr/lib/python3.11/threading.py", line 982 in run

Thread 0x00007f2 (most recent call first):
  File "/x/torch/distributed/distributed_c10d.py", line 3245 in all_reduce
  File "/x/mindspeed_rl/engine/train_engine.py", line 233 in train_step
  File "/x/mindspeed_rl/runtime/process.py", line 120 in call
  File "/x/ray/_private/worker.py", line 1000 in main_loop
"""


def test_the_place_is_the_innermost_line_of_ours_and_the_innermost_of_all() -> None:
    place = "at train_step (engine/train_engine.py:233), in all_reduce (distributed/distributed_c10d.py:3245)"
    assert _describe_location(STACKS) == place
    assert _describe_location("") == ""


def record(rank: int, *calls: tuple[str, int, bool], members: tuple[int, ...] = (0, 1, 2)) -> dict[str, Any]:
    """What a rank's recorder holds: (group, number, has ended) of its collectives, in order."""
    entries = [
        {
            "process_group": [group, "not read"],
            "collective_seq_id": number,
            "profiling_name": "gloo:all_reduce",
            "retired": ended,
            "is_p2p": False,
            "time_created_ns": 1000 * time + rank,
        }
        for time, (group, number, ended) in enumerate(calls)
    ]
    groups = {"0": {"name": "world", "ranks": list(members)}, "1": {"name": "TENSOR", "ranks": [0, 1]}}
    return {"rank": rank, "groups": groups, "entries": entries}


def test_the_rank_that_has_not_begun_what_others_wait_in_is_late() -> None:
    records = {
        0: record(0, ("0", 1, True), ("1", 1, True), ("0", 2, False)),
        1: record(1, ("0", 1, True), ("1", 1, True), ("0", 2, False)),
        2: record(2, ("0", 1, True)),
    }
    (collective,) = _match_collectives(records)
    assert str(collective) == "ranks 0, 1 wait in all_reduce number 2 of group world, which rank 2 has not begun"
    assert _describe_last_collective(records[0]) == "last collective: all_reduce number 2 of group world (not ended)"
    assert _describe_last_collective(records[2]) == "last collective: all_reduce number 1 of group world (ended)"


def test_a_rank_that_did_not_answer_is_late_by_what_the_others_know_of_the_group() -> None:
    (collective,) = _match_collectives({0: record(0, ("1", 1, True), ("1", 2, False))})
    assert (collective.group, collective.number, collective.waiting, collective.late) == ("TENSOR", 2, (0,), (1,))


def test_who_waits_for_somebody_who_waits_elsewhere_is_named_after_the_first_collective() -> None:
    records = {0: record(0, ("1", 1, False)), 1: record(1, ("0", 1, False)), 2: record(2)}
    assert [(collective.group, collective.waiting, collective.late) for collective in _match_collectives(records)] == [
        ("TENSOR", (0,), (1,)),
        ("world", (1,), (0, 2)),
    ]


def test_nobody_is_late_where_everything_has_ended() -> None:
    assert _match_collectives({0: record(0, ("0", 1, True)), 1: record(1, ("0", 1, True))}) == []
    assert find_stalled_collectives([]) == [] and _describe_last_collective({}) == ""


def test_the_torch_of_this_machine_records_what_is_read(single_process_world: None) -> None:
    import torch
    import torch.distributed as dist

    from mindspeed_rl import platform

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    group = dist.new_group([0], backend="gloo", group_desc="MINE")
    dist.all_reduce(torch.ones(2), group=group)
    held = platform.select("cpu").collective_record()
    assert held["rank"] == 0 and {"name": "MINE", "ranks": [0]} in held["groups"].values()
    end = time.monotonic() + patient(5)
    while "(ended)" not in _describe_last_collective(held) and time.monotonic() < end:
        held = platform.select("cpu").collective_record()
    assert _describe_last_collective(held) == "last collective: all_reduce number 1 of group MINE (ended)"
