"""Runs a program once per rank on the simulated NPU and collects what each rank reports."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from patience import patient
from ports import find_free_port

PROGRAMS = Path(__file__).parent / "programs"


def run_ranks(program: str, world_size: int, settings: dict[str, Any] | None = None, *, timeout_s: float = 900) -> list[Any]:
    """Runs `programs/<program>.py` as `world_size` processes and returns their reports in rank order.

    The program reads its settings with `rank_settings()` and ends with `report(value)`.

    Raises:
        AssertionError: a rank failed or ran past the limit; the message holds the end of every rank's output;
            or files of communicators are left.
    """
    with tempfile.TemporaryDirectory(prefix="npu-sim-", dir="/dev/shm") as folder:
        common = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(find_free_port()),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "NPU_SIM_RUN_DIR": folder,
            "NPU_SIM_REPORT_DIR": folder,
            "NPU_SIM_PROGRAM_SETTINGS": json.dumps(settings or {}),
            "PYTHONPATH": os.pathsep.join([str(PROGRAMS), os.environ.get("PYTHONPATH", "")]),
        }
        processes, outputs = [], []
        for rank in range(world_size):
            output = open(Path(folder) / f"rank{rank}.txt", "w+")
            env = {**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            command = [sys.executable, str(PROGRAMS / f"{program}.py")]
            processes.append(subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT))
            outputs.append(output)
        failure = wait_for_all(processes, timeout_s)
        if failure:
            texts = []
            for rank, output in enumerate(outputs):
                output.seek(0)
                texts.append(f"--- rank {rank} ---\n{output.read()[-3000:]}")
            raise AssertionError(f"{program} with {world_size} rank(s): {failure}\n" + "\n".join(texts))
        left = [path.name for path in Path(folder).glob("npu_sim_*")]
        assert not left, f"{program} left files of its communicators: {left}"
        return [json.loads((Path(folder) / f"report{rank}.json").read_text()) for rank in range(world_size)]


def wait_for_all(processes: list[subprocess.Popen], timeout_s: float) -> str | None:
    """Waits for all processes; when one fails, ends the others and says what happened."""
    deadline = time.monotonic() + patient(timeout_s)
    failure = None
    while failure is None and any(process.poll() is None for process in processes):
        failed = [rank for rank, process in enumerate(processes) if process.poll() not in (None, 0)]
        if failed:
            failure = f"rank {failed[0]} ended with code {processes[failed[0]].returncode}"
        elif time.monotonic() > deadline:
            failure = f"still running after {timeout_s:.0f} s"
        else:
            time.sleep(0.05)
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.wait()
    failed = [rank for rank, process in enumerate(processes) if process.returncode != 0]
    return failure or (f"rank {failed[0]} ended with code {processes[failed[0]].returncode}" if failed else None)


def rank_settings() -> dict[str, Any]:
    """What the test passed to `run_ranks`; called inside a program."""
    return json.loads(os.environ["NPU_SIM_PROGRAM_SETTINGS"])


def report(value: Any) -> None:
    """Hands a JSON value back to the test and ends the process without torch_npu's slow teardown."""
    path = Path(os.environ["NPU_SIM_REPORT_DIR"]) / f"report{os.environ['RANK']}.json"
    path.write_text(json.dumps(value))
    for child in multiprocessing.active_children():  # the checkpoint writer's: nobody would end them
        child.kill()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
