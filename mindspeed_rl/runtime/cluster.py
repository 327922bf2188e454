"""The Ray cluster of a run: one that it joins, or a local one of its own; and the environment of the processes on it."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import psutil
import ray
from ray.actor import ActorHandle

from mindspeed_rl.adaptors import ray_services
from mindspeed_rl.config import RLConfig, RunConfig
from mindspeed_rl.config.run_files import project_configs
from mindspeed_rl.observability.logging import quiet_environment
from mindspeed_rl.platform import environment, platform_class
from mindspeed_rl.runtime.fork_server import build_worker_command
from mindspeed_rl.runtime.scratch import scratch_folder

#: name of the process that is Ray's control service
_HEAD = "gcs_server"
#: that of the cluster that this process has started, while it runs; Ray too is one a process
_heads: list[psutil.Process] = []
#: logical CPUs of a cluster we start ourselves, beside the workers': room for data plane, rewards and the driver's tasks
_SPARE_CPUS = 16
#: looked for from the working directory, then beside the project's run files
_DEFAULT_RUNTIME_ENV = RLConfig().runtime_env_path


def _runtime_env_file(path: str) -> Path:
    beside_project = project_configs().parent / path
    return beside_project if not Path(path).is_file() and beside_project.is_file() else Path(path)


def worker_environment(cfg: RunConfig, platform_name: str, num_nodes: int = 1) -> dict[str, str]:
    """Environment of the worker processes: quiet libraries, then the runtime_env file fitted to what a worker holds.

    Args:
        num_nodes: over which they are spread; network interfaces have other names elsewhere, so several nodes keep their own.

    Raises:
        ValueError: the file is missing, malformed, or contradicts the installed vLLM.
    """
    platform = platform_class(platform_name)()
    quiet = quiet_environment(os.environ)
    if platform_name == "cpu":
        own = platform.worker_env()
        return quiet | {name: value for name, value in own.items() if num_nodes == 1 or name not in environment.INTERFACES}
    rl, supervised = cfg.rl_config, cfg.is_supervised
    config = cfg.megatron_training if supervised else cfg.actor_config
    return quiet | environment.worker_environment(
        environment.load_runtime_env(_runtime_env_file(_DEFAULT_RUNTIME_ENV if rl is None else rl.runtime_env_path)),
        "trainer" if supervised else "integrated",
        platform,
        hccl_buffer_mib=None if rl is None else rl.hccl_buffersize,
        deterministic=config.npu_deterministic,
    )


def process_environment(env: Mapping[str, str]) -> dict[str, Any]:
    """Ray's `runtime_env` of a process with these variables; forked, where a fork server of this machine has all of them."""
    command = build_worker_command() if is_own_cluster() else None
    return {"env_vars": dict(env)} | ({} if command is None else {"py_executable": command})


def count_local_cpus(num_devices: int, platform_name: str, cpus_per_device: float) -> int:
    """Logical CPUs of a cluster of our own: as many as its workers ask for, and some for everything beside them."""
    wanted = num_devices * (1 if platform_class(platform_name).ray_resource is None else cpus_per_device)
    return max(os.cpu_count() or 1, math.ceil(wanted)) + _SPARE_CPUS


@contextlib.contextmanager
def cluster(
    num_devices: int,
    platform_name: str,
    *,
    cpus_per_device: float = 1,
    logs: Path | None = None,
    deadline_s: float = 120.0,
) -> Iterator[None]:
    """Connected to a Ray cluster with room for the run: the one RAY_ADDRESS names, or a local one that ends with the block.

    Args:
        cpus_per_device: Ray CPUs that the workers ask for beside each device. They count placements and bind no cores, so a
            local cluster has as many as are asked for.
        logs: where Ray's own logs of a local cluster are kept when the block fails; they are removed otherwise.

    Raises:
        TimeoutError: the devices do not show up in time.
    """
    owned = not os.environ.get("RAY_ADDRESS")
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(_ray_folder(logs)) if owned else ""
        if owned:
            stack.enter_context(_temporary_files())
        cpus = count_local_cpus(num_devices, platform_name, cpus_per_device)
        stack.enter_context(_connected(num_devices, platform_name, folder, cpus, deadline_s))
        yield


@contextlib.contextmanager
def _ray_folder(logs: Path | None) -> Iterator[str]:
    """A temporary folder for a local Ray; gone with the block, but for the logs of one that fails."""
    # short, and below the system's own: the paths of the Unix sockets in it may have 107 bytes
    short = Path("/tmp")
    with scratch_folder("ray-", short if short.is_dir() else None) as folder:
        try:
            yield str(folder)
        except BaseException:
            if logs is not None:
                with contextlib.suppress(OSError, shutil.Error):
                    for session in folder.glob("session_2*"):
                        shutil.copytree(session / "logs", logs, dirs_exist_ok=True, ignore_dangling_symlinks=True)
                    print(f"Ray's logs are in {logs}", file=sys.stderr)
            raise


@contextlib.contextmanager
def _temporary_files() -> Iterator[None]:
    """Processes that Ray starts in the block have a temporary folder that goes with it: what a killed one leaves, goes too."""
    # compiled kernels are kept where later processes find them
    kernels = os.environ.get("TORCHINDUCTOR_CACHE_DIR", os.path.join(tempfile.gettempdir(), f"torchinductor_{os.getuid()}"))
    with scratch_folder("mindspeed-rl-") as folder:
        with set_environment(TMPDIR=str(folder), TORCHINDUCTOR_CACHE_DIR=kernels):
            yield


@contextlib.contextmanager
def set_environment(**changes: str) -> Iterator[None]:
    """The variables have these values in what is started in the block."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _connected(num_devices: int, platform_name: str, folder: str, cpus: int, deadline_s: float) -> Iterator[None]:
    """Ray runs in `folder` with so many CPUs, or, where that is empty, is the cluster that RAY_ADDRESS names."""
    resource = platform_class(platform_name).ray_resource
    if folder:
        extra: dict[str, Any] = {"num_cpus": cpus, "include_dashboard": False}
        if os.environ.get("MINDSPEED_RL_FAKE_DEVICES") and resource:
            extra["resources"] = {resource: int(os.environ["MINDSPEED_RL_FAKE_DEVICES"])}
        extra["object_store_memory"] = 256 << 20
        extra["_temp_dir"] = folder
        try:
            with ray_services.left_out():
                ray.init(log_to_driver=False, logging_level=logging.ERROR, configure_logging=False, **extra)
        except Exception as error:  # Ray has no class of its own for it
            if "timed out during startup" not in str(error):
                raise
            ray.shutdown()
            raise TimeoutError(
                "Ray did not start within the 30 s that it gives itself: the machine is overloaded, or Ray's processes end; "
                "see Ray's logs."
            ) from error
    else:
        ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False, logging_level=logging.ERROR, configure_logging=False)
    try:
        if folder:
            _heads.extend(child for child in psutil.Process().children(recursive=True) if child.name() == _HEAD)
        _wait_for_devices(resource or "CPU", num_devices, deadline_s)
        yield
    finally:
        _heads.clear()
        ray.shutdown()


def is_own_cluster() -> bool:
    """True when this process has started its cluster: all of it is on this machine."""
    return bool(_heads)


def is_head_dead() -> bool:
    """True when the control service of this process's own cluster has died.

    Actors go on for a minute without it; then Ray ends this process, without a chance to say or save anything.
    """
    return any(not head.is_running() or head.status() == psutil.STATUS_ZOMBIE for head in _heads)


def _wait_for_devices(resource: str, wanted: int, deadline_s: float) -> None:
    end = time.monotonic() + deadline_s
    while True:
        found = ray.cluster_resources().get(resource, 0)
        if found >= wanted:
            return
        if time.monotonic() > end:
            raise TimeoutError(
                f"the Ray cluster has {found:g} of the {wanted} {resource} devices the run needs, after {deadline_s:.0f} s."
            )
        time.sleep(0.5)


Actor = TypeVar("Actor")


def actor_handle(created: ActorHandle[Actor] | type[Actor]) -> ActorHandle[Actor]:
    """What `remote` of an actor class returned; Ray declares the class too, for editors that complete names of methods."""
    return cast("ActorHandle[Actor]", created)
