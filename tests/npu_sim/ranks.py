"""Runs a program once per rank on the simulated NPU and collects what each rank reports.

The ranks are forked off a process that has imported what the program imports before it reads its settings.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import runpy
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from fork_server import Forked, fork_server
from patience import patient
from ports import find_free_port

PROGRAMS = Path(__file__).parent / "programs"
_ENGINE = "mindspeed_rl.engine.train_engine"


def _import_device() -> None:
    importlib.import_module("torch_npu")  # after which the hook of `site` has simulated the device
    importlib.import_module("mindspeed_rl.platform")


def _import_on_cpu() -> None:
    from mindspeed_rl import adaptors, platform

    platform.select("cpu")
    adaptors.apply("train")
    importlib.import_module(_ENGINE)


def _import_alone() -> None:
    _import_device()
    from mindspeed_rl import platform

    platform.select("npu")
    importlib.import_module("without_mindspeed").install()
    importlib.import_module(_ENGINE)


def _import_mindspeed() -> None:
    """MindSpeed's adaptor and no more: Megatron comes after `repatch`, in the ranks, as it does on hardware."""
    _import_device()
    if "MINDSPEED_SRC" in os.environ:
        sys.path.insert(0, os.environ["MINDSPEED_SRC"])
    from mindspeed_rl import adaptors, platform

    platform.select("npu")
    adaptors.apply("train")


def _import_rollout() -> None:
    _import_device()
    from mindspeed_rl import adaptors, platform

    platform.select("npu")
    adaptors.apply("rollout")
    importlib.import_module("mindspeed_rl.rollout.vllm_engine")


@dataclass(frozen=True)
class _OnDevice:
    """Imports on a device of another kind: vllm-ascend reads it once."""

    soc: str
    prepare: Callable[[], None]

    def __call__(self) -> None:
        os.environ["NPU_SIM_SOC"] = self.soc
        self.prepare()


#: of programs that train, by their mode
_TRAINING: dict[str, Callable[[], None]] = {"cpu": _import_on_cpu, "npu": _import_alone, "mindspeed": _import_mindspeed}


#: of other programs
_ALONE: dict[str, Callable[[], None]] = {"rollout": _import_rollout, "experts_exchange": _import_rollout}


def _run(connection: Connection) -> None:
    """Is a rank: runs the program as Python would, with this environment."""
    program, environment, output = connection.recv()
    target = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(target, 1)
    os.dup2(target, 2)
    for name in [name for name in os.environ if name.startswith("NPU_SIM_")]:  # another test's
        del os.environ[name]
    os.environ.update(environment)
    sys.argv = [program]
    sys.path.insert(0, str(PROGRAMS))
    try:
        runpy.run_path(program, run_name="__main__")
    except BaseException:  # noqa: BLE001  (the test shows the end of the output)
        traceback.print_exc()


def run_ranks(program: str, world_size: int, settings: dict[str, Any] | None = None, *, timeout_s: float = 900) -> list[Any]:
    """Runs `programs/<program>.py` as `world_size` processes and returns their reports in rank order.

    The program reads its settings with `rank_settings()` and ends with `report(value)`.

    Raises:
        AssertionError: a rank failed or ran past the limit; the message holds the end of every rank's output;
            or files of communicators are left.
    """
    settings = settings or {}
    prepare = _TRAINING[settings["mode"]] if "mode" in settings else _ALONE.get(program, _import_device)
    if "NPU_SIM_SOC" in os.environ:
        prepare = _OnDevice(os.environ["NPU_SIM_SOC"], prepare)
    with tempfile.TemporaryDirectory(prefix="npu-sim-", dir="/dev/shm") as folder:
        common = {name: value for name, value in os.environ.items() if name.startswith("NPU_SIM_")} | {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(find_free_port()),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "NPU_SIM_RUN_DIR": folder,
            "NPU_SIM_REPORT_DIR": folder,
            "NPU_SIM_PROGRAM_SETTINGS": json.dumps(settings),
        }
        ranks = []
        for rank in range(world_size):
            ranks.append(fork_server(prepare).start(_run))
            environment = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            ranks[-1].connection.send((str(PROGRAMS / f"{program}.py"), environment, str(Path(folder) / f"rank{rank}.txt")))
        failure = _end(ranks, timeout_s)
        if failure:
            texts = [f"--- rank {rank} ---\n{_read_end(Path(folder) / f'rank{rank}.txt')}" for rank in range(world_size)]
            raise AssertionError(f"{program} with {world_size} rank(s): {failure}\n" + "\n".join(texts))
        left = [path.name for path in Path(folder).glob("npu_sim_*")]
        assert not left, f"{program} left files of its communicators: {left}"
        return [json.loads((Path(folder) / f"report{rank}.json").read_text()) for rank in range(world_size)]


def _read_end(path: Path) -> str:
    return path.read_text(errors="replace")[-3000:] if path.exists() else ""


def _end(ranks: list[Forked], timeout_s: float) -> str | None:
    """Waits for all ranks; when one fails, ends the others and says what happened."""
    running = {rank.connection: number for number, rank in enumerate(ranks)}
    deadline, failure = time.monotonic() + patient(timeout_s), None
    while running and failure is None:
        ended = wait(list(running), timeout=max(0.0, deadline - time.monotonic()))
        if not ended:
            failure = f"still running after {timeout_s:.0f} s"
        for connection in ended:  # closed with its process
            number = running.pop(connection)
            if code := ranks[number].join():
                failure = failure or f"rank {number} ended with code {code}"
    for rank in ranks:
        rank.kill()
        rank.join()
    return failure


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
