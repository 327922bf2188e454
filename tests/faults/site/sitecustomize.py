"""Faults on demand in the real processes of a run; first on PYTHONPATH, so that every interpreter of the run imports it.

`FAULTS` names a folder; a copy of a fork server has its run's folder. A file `<anything>.json` in it arms a fault; the process
that comes to the place first takes it (the file becomes `.taken`) and does what it says. One that "stays" strikes each time.
Without the variable nothing happens.

    {"place": "worker.update_actor", "rank": 1, "how": "kill"}

Places: see PLACES. How: kill, stop (SIGSTOP), hang (sleeps for ever), slow (for `seconds`), leak (`mib`), raise, exit; of a
step also "nan weight"; of a bucket drop, repeat, corrupt; of an address "take" (somebody else listens there); of an engine that
is built "eager" (it captures no graphs); of its rotary embedding "turn" (positions from `start` on are taken for others).
`counts` are added to counters of the machine.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.abc
import importlib.machinery
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

#: memory of this process that a leak keeps
KEPT: list[bytes] = []


def folder() -> Path | None:
    """The folder of armed faults, None outside a run that is struck."""
    name = os.environ.get("FAULTS")
    return Path(name) if name else None


def take(place: str, rank: int | None) -> dict[str, Any] | None:
    """The fault that is armed for this place, which is nobody else's from now on."""
    faults = folder()
    for path in faults.glob("*.json") if faults else ():
        try:
            fault = json.loads(path.read_text())
            if fault["place"] == place and fault.get("rank", rank) == rank:
                taken = path.with_suffix(".taken")
                if fault.get("stays"):
                    taken.touch()
                else:
                    path.rename(taken)
                return fault
        except (OSError, ValueError):
            continue
    return None


def commit(fault: dict[str, Any]) -> None:
    """What a process can do to itself."""
    how = fault["how"]
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "hang":
        time.sleep(3600)
    elif how == "slow":
        time.sleep(fault["seconds"])
    elif how == "exit":
        os._exit(7)
    elif how == "leak":
        KEPT.append(b"x" * (fault["mib"] << 20))
    elif how == "raise":
        raise ValueError("a fault on demand")


def around(kind: str, name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
    """The method with a fault before it."""

    def wrapped(self: Any, *arguments: Any, **named: Any) -> Any:
        fault = take(f"{kind}.{name}", getattr(self, "_rank", None))
        if fault is not None:
            commit(fault)
        return inner(self, *arguments, **named)

    return wrapped


def process_module(module: ModuleType) -> None:
    """Phases of device workers: the method that is called is the place; `rank` is the worker's."""
    inner, find = module.WorkerProcess.call, module.WorkerProcess.address

    def call(self: Any, method: str, *arguments: Any) -> Any:
        kind = self._settings.title.replace(" ", "_")
        fault = take(f"{kind}.{method}", self._rank)
        if fault is not None:
            with module.heartbeat.doing(method):  # the worker is in its phase when it is struck
                commit(fault)
        return inner(self, method, *arguments)

    def address(self: Any, is_private: bool | None = None) -> Any:
        if take("worker.address", self._rank) is None:
            return find(self, is_private)
        result = find(self, False)  # a port, as ranks of several machines have it
        self.thief = socket.create_server(result)
        return result

    module.WorkerProcess.call, module.WorkerProcess.address = call, address
    for name in ("prepare", "start"):
        setattr(module.WorkerProcess, name, around("worker", name, getattr(module.WorkerProcess, name)))


def reward_module(module: ModuleType) -> None:
    for name in ("score", "score_now", "check"):
        setattr(module.RewardWorker, name, around("reward_worker", name, getattr(module.RewardWorker, name)))


def dock_module(module: ModuleType) -> None:
    for name in ("put", "get", "clear"):
        setattr(module.TransferDock, name, around("data_plane", name, getattr(module.TransferDock, name)))


def loop_module(module: ModuleType) -> None:
    """The driver, between two phases."""
    inner = module.RLTrainer._compute_advantages
    module.RLTrainer._compute_advantages = around("driver", "advantages", inner)


def engine_module(module: ModuleType) -> None:
    """Numbers that are none: in the gradient, or in a weight behind the step."""
    inner = module.TrainEngine.train_step
    check = module.TrainEngine._check_step

    def train_step(self: Any, *arguments: Any, **named: Any) -> Any:
        fault = take("engine.train_step", None)
        if fault is not None:
            commit(fault)
        result = inner(self, *arguments, **named)
        if fault is not None and fault["how"] == "nan weight":
            next(self.model.models[0].parameters()).data.flatten()[0] = float("nan")
        return result

    def check_step(self: Any, *arguments: Any) -> Any:
        fault = take("engine.gradient", None)
        if fault is not None:
            next(p for p in self.model.models[0].parameters() if p.requires_grad).main_grad.flatten()[0] = float("nan")
        return check(self, *arguments)

    module.TrainEngine.train_step, module.TrainEngine._check_step = train_step, check_step
    passes_module(module)


def passes_module(module: ModuleType) -> None:
    """A forward pass of a worker; `rank` is that of its process."""
    inner = module.TrainEngine.forward

    def forward(self: Any, *arguments: Any, **named: Any) -> Any:
        import torch

        fault = take("engine.forward", torch.distributed.get_rank())
        if fault is not None:
            commit(fault)
        return inner(self, *arguments, **named)

    module.TrainEngine.forward = forward


def offload_module(module: ModuleType) -> None:
    """Copies of training state to the host."""
    module.Storages.free = around("storages", "free", module.Storages.free)


def host_module(module: ModuleType) -> None:
    """Counters of the driver's machine: each look adds `counts` to those that the system has."""
    inner, looks = module.HostLoad._sample, 0

    def sample(self: Any) -> Any:
        nonlocal looks
        result, fault = inner(self), take("host.sample", None)
        if fault is None:
            return result
        looks += 1
        return dataclasses.replace(result, **{name: getattr(result, name) + looks * n for name, n in fault["counts"].items()})

    module.HostLoad._sample = sample


def vllm_module(module: ModuleType) -> None:
    """The build of a rollout engine: vLLM captures no graphs, as it decides by itself for some models."""
    inner = module.LLM

    def build(**arguments: Any) -> Any:
        fault = take("engine.build", None)
        return inner(**arguments | ({} if fault is None else {"enforce_eager": True}))

    module.LLM = build


def rotary_module(module: ModuleType) -> None:
    """The position embedding of a rollout engine."""
    inner = module.RotaryEmbeddingBase._compute_cos_sin_cache

    def compute(self: Any) -> Any:
        cache, fault = inner(self), take("engine.rotary", None)
        if fault is not None:
            cache[fault["start"] :] = cache[fault["start"] :].roll(7, 0)
        return cache

    module.RotaryEmbeddingBase._compute_cos_sin_cache = compute


def server_module(module: ModuleType) -> None:
    """Calls of a rollout server; `rank` is its index."""
    inner = module.ServerProcess.call

    async def call(self: Any, name: str, arguments: Any) -> Any:
        fault = take(f"server.{name}", self._index)
        if fault is not None:
            commit(fault)
        return await inner(self, name, arguments)

    module.ServerProcess.call = call


def checkpoint_module(module: ModuleType) -> None:
    """The disk that a checkpoint is written to."""
    inner = module._write_with_sums

    @functools.wraps(inner)
    def write(*arguments: Any) -> Any:
        fault = take("disk.write", None)
        if fault is not None:
            commit(fault)
        return inner(*arguments)

    module._write_with_sums = write


def sources_module(module: ModuleType) -> None:
    """What a weight push reads for a bucket: not read, read twice, or changed."""
    inner = module.Sources.read

    def read(self: Any, name: str, box: Any, out: Any, copies: Any = None) -> None:
        fault = take("push.bucket", None)
        if fault is None or fault["how"] != "drop":
            inner(self, name, box, out)
        if fault is not None and fault["how"] == "drop":
            out.zero_()
        elif fault is not None and fault["how"] == "corrupt":
            out.view(-1)[0] += 1.0
        elif fault is not None:
            inner(self, name, box, out)

    module.Sources.read = read


PLACES: dict[str, Callable[[ModuleType], None]] = {
    "mindspeed_rl.runtime.process": process_module,
    "mindspeed_rl.workers.reward_group": reward_module,
    "mindspeed_rl.dataplane.transfer_dock": dock_module,
    "mindspeed_rl.trainers.rl": loop_module,
    "mindspeed_rl.engine.train_engine": engine_module,
    "mindspeed_rl.engine.checkpoint": checkpoint_module,
    "mindspeed_rl.engine.offload": offload_module,
    "mindspeed_rl.observability.host_load": host_module,
    "mindspeed_rl.resharding.transfer": sources_module,
    "mindspeed_rl.rollout.vllm_engine": vllm_module,
    "vllm.model_executor.layers.rotary_embedding.base": rotary_module,
    "mindspeed_rl.serving.server_process": server_module,
}


class _Loader(importlib.abc.Loader):
    def __init__(self, inner: Any, change: Callable[[ModuleType], None]) -> None:
        self._inner, self._change = inner, change

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        self._change(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in PLACES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, PLACES[name])
        return spec


_time = time.time


def jumped_time() -> float:
    """The clock, which jumps by the seconds in the folder's file `clock`."""
    try:
        with open(f"{os.environ['FAULTS']}/clock") as file:
            return _time() + float(file.read())
    except (KeyError, OSError, ValueError):
        return _time()


time.time = jumped_time
sys.meta_path.insert(0, _Finder())
