"""The Ray cluster of a run, joined or started on this machine, and the environment of the processes on it."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray

from mindspeed_rl.adaptors import ray_services
from mindspeed_rl.config import RLConfig, RunConfig
from mindspeed_rl.config.model_metadata import VISION_VARIABLE
from mindspeed_rl.config.run_files import find_project_configs
from mindspeed_rl.config.threads import VARIABLE as THREADS_VARIABLE
from mindspeed_rl.observability.logging import build_quiet_environment
from mindspeed_rl.platform import environment, platform_class
from mindspeed_rl.redaction import hide_in_text
from mindspeed_rl.runtime.fork_server import build_worker_command, end_copies, find_server_process
from mindspeed_rl.scratch import scratch_folder

#: processes of Ray without which a cluster cannot continue, by name
_SERVICES = {"gcs_server": "control service", "raylet": "node service"}
#: state of the cluster that this process has started, while it runs; a process has one Ray
_services: list[tuple[str, psutil.Process]] = []
#: pid of a stopped control service -> when it was first seen so
_stopped_s: dict[int, float] = {}
#: longest wait for a connection to a node that may be gone
_PROBE_S = 2.0
#: half of the time after which Ray ends the processes of a control service that does not answer
_STOP_LIMIT_S = 30.0
#: a connection to a live server of Ray (gRPC) begins with these bytes and a frame of settings (type 4), RFC 9113
_HTTP2_START = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
#: logical CPUs of a cluster that we start, in addition to the workers': for data plane, rewards and the driver's tasks
_SPARE_CPUS = 16
#: relative to the working directory, or else to the parent of the project's run files
_DEFAULT_RUNTIME_ENV = RLConfig().runtime_env_path


def build_worker_environment(
    cfg: RunConfig, platform_name: str, num_nodes: int = 1, *, threads: int | None = None, attention: str | None = None
) -> dict[str, str]:
    """Return the environment of worker processes: quiet libraries, then the runtime_env file, adapted to a worker's models.

    Args:
        cfg: the run file.
        platform_name: name of the device kind.
        num_nodes: number of nodes of the run; names of network interfaces differ between nodes, so several nodes keep their
            own.
        threads: number of threads of a process that computes; None: the platform's default, for processes that do not.
        attention: kernel of the trainer's attention on the CPU; None: the process chooses.

    Raises:
        ValueError: the file is missing, malformed, or contradicts the installed vLLM.
    """
    platform = platform_class(platform_name)()
    quiet = build_quiet_environment(os.environ)
    if cfg.reads_images:
        quiet[VISION_VARIABLE] = "1"
    if cfg.exact_slices:
        quiet[environment.EXACT_VARIABLE] = str(cfg.exact_slices)
    if attention is not None:
        quiet[environment.ATTENTION_VARIABLE] = attention
    if platform_name == "cpu":
        variables = platform.worker_env() | ({} if threads is None else {THREADS_VARIABLE: str(threads)})
        return quiet | {
            name: value for name, value in variables.items() if num_nodes == 1 or name not in environment.INTERFACES
        }
    rl, supervised, generate = cfg.rl_config, cfg.is_supervised, cfg.generate_config
    if generate is not None and generate.infer_moe_token_dispatcher_type != "auto":
        quiet[environment.EXPERTS_EXCHANGE_VARIABLE] = generate.infer_moe_token_dispatcher_type
    config = cfg.megatron_training if supervised else cfg.actor_config
    path = Path(_DEFAULT_RUNTIME_ENV if rl is None else rl.runtime_env_path)
    if not path.is_file() and (project_file := find_project_configs().parent / path).is_file():
        path = project_file
    return quiet | environment.adapt_environment(
        environment.load_runtime_env(path),
        "trainer" if supervised else "integrated",
        platform,
        hccl_buffer_mib=None if rl is None else rl.hccl_buffersize,
        deterministic=config.npu_deterministic,
        captures_graphs=not supervised and generate is not None and not generate.enforce_eager,
    )


def build_runtime_env(env: Mapping[str, str]) -> dict[str, dict[str, str] | str]:
    """Return Ray's `runtime_env` of a process with these variables, forked where this machine has a fork server."""
    command = build_worker_command() if is_own_cluster() else None
    return {"env_vars": dict(env)} | ({} if command is None else {"py_executable": command})


def _count_local_cpus(num_devices: int, platform_name: str, cpus_per_device: float) -> int:
    """Return the logical CPUs of a cluster that we start: those that its workers reserve, and some for other processes."""
    reserved = num_devices * (1 if platform_class(platform_name).ray_resource is None else cpus_per_device)
    return max(os.cpu_count() or 1, math.ceil(reserved)) + _SPARE_CPUS


@contextlib.contextmanager
def connect_cluster(
    num_devices: int,
    platform_name: str,
    *,
    cpus_per_device: float = 1,
    logs: Path | None = None,
    deadline_s: float = 120.0,
) -> Iterator[None]:
    """Connect to a Ray cluster that fits the run: the one of RAY_ADDRESS, or a local one that ends with the block.

    Args:
        num_devices: number of devices of the run.
        platform_name: name of the device kind.
        cpus_per_device: Ray CPUs that the workers reserve with each device. They count placements and bind no cores, so a
            local cluster has as many as are reserved.
        logs: folder for Ray's own logs of a local cluster when the block fails; they are removed otherwise.
        deadline_s: longest wait for the devices.

    Raises:
        TimeoutError: the cluster does not have the devices in time.
    """
    resource = platform_class(platform_name).ray_resource
    with contextlib.ExitStack() as stack:
        address, folder = os.environ.get("RAY_ADDRESS"), ""
        if not address:
            folder = stack.enter_context(_make_ray_folder(logs))
            stack.enter_context(_make_temporary_folder())
        # before the folders are removed
        stack.callback(ray.shutdown)
        stack.callback(_services.clear)
        if address:
            join_cluster(address)
        else:
            with _end_after(deadline_s, "Ray on this machine"):
                _start_ray(folder, _count_local_cpus(num_devices, platform_name, cpus_per_device), resource)
            children = [(child.name(), child) for child in psutil.Process().children(recursive=True)]
            _services.extend((f"{_SERVICES[name]} ({name})", child) for name, child in children if name in _SERVICES)
        resource, end_s = resource or "CPU", time.monotonic() + deadline_s
        while (present := ray.cluster_resources().get(resource, 0)) < num_devices:
            if time.monotonic() > end_s:
                raise TimeoutError(
                    f"the Ray cluster has {present:g} of the {num_devices} {resource} devices the run needs, after "
                    f"{deadline_s:.0f} s."
                )
            time.sleep(0.5)
        yield


def join_cluster(address: str, timeout_s: float = 30.0) -> None:
    """Connect to a running Ray cluster.

    Args:
        address: host:port of its head, or "auto" for the cluster of this machine.

    Raises:
        TimeoutError: the head does not answer.
    """
    end_s, host_port = time.monotonic() + timeout_s, address.removeprefix("ray://")
    host, _, port = host_port.rpartition(":")
    while port.isdecimal():  # "auto" names no head
        try:
            with socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s / 3) as head:
                if os.environ.get("RAY_USE_TLS", "0") == "1":
                    break
                head.sendall(_HTTP2_START)
                if head.recv(9)[3:4] == b"\x04":
                    break
                reason = "what answers there is not a server of Ray"
        except TimeoutError:
            reason = "no answer"
        except (OSError, OverflowError) as error:
            reason = str(error)
        if time.monotonic() > end_s:
            raise TimeoutError(
                f"RAY_ADDRESS: the head of the Ray cluster at {address} cannot be reached within {timeout_s:.0f} s ({reason}); "
                "start it, or unset RAY_ADDRESS for a cluster on this machine."
            )
        time.sleep(0.5)
    with _end_after(4 * timeout_s, f"the Ray cluster at RAY_ADDRESS {address}"):
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, configure_logging=False)


@contextlib.contextmanager
def _end_after(timeout_s: float, name: str) -> Iterator[None]:
    """End this process when the block, which nothing can interrupt, takes longer; nothing of a run has started yet."""

    def end() -> None:
        text = f"error: {name} did not accept this process within {timeout_s:.0f} s; one of its processes hangs."
        print(text, file=sys.stderr, flush=True)
        os._exit(1)

    timer = threading.Timer(timeout_s, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextlib.contextmanager
def _make_ray_folder(logs: Path | None) -> Iterator[str]:
    """Make a temporary folder for a local Ray; copy its logs when the block fails."""
    # short: the paths of the Unix sockets in it may have 107 bytes
    short = Path("/tmp")
    # Ray opens its folder to all users, so it is in one that only this user can enter
    with scratch_folder("ray-", short if short.is_dir() else None) as private:
        folder = private / "r"
        folder.mkdir()
        try:
            yield str(folder)
        except BaseException:
            if logs is not None:
                with contextlib.suppress(OSError, shutil.Error):
                    for session in folder.glob("session_2*"):
                        shutil.copytree(
                            session / "logs", logs, dirs_exist_ok=True, ignore_dangling_symlinks=True, copy_function=_copy_log
                        )
                    print(f"Ray's logs are in {logs}", file=sys.stderr)
            raise


def _copy_log(source: str, target: str) -> None:
    """Copy a log without secrets: Ray writes the environment of a run into its own."""
    text = Path(source).read_text(encoding="utf-8", errors="backslashreplace")
    Path(target).write_text(hide_in_text(text), encoding="utf-8")


@contextlib.contextmanager
def _make_temporary_folder() -> Iterator[None]:
    """Give processes that Ray starts in the block a temporary folder that is removed with it, also for a killed process.

    Copies of the fork server that still start then are ended: they would try for a minute to reach the cluster.
    """
    # compiled kernels stay for later processes
    kernels = os.environ.get("TORCHINDUCTOR_CACHE_DIR", os.path.join(tempfile.gettempdir(), f"torchinductor_{os.getuid()}"))
    folders = contextlib.ExitStack()
    folder = str(folders.enter_context(scratch_folder("mindspeed-rl-")))
    try:
        with folders, _set_environment(TMPDIR=folder, TORCHINDUCTOR_CACHE_DIR=kernels):
            yield
    finally:
        end_copies(folder)


@contextlib.contextmanager
def _set_environment(**changes: str) -> Iterator[None]:
    """Set environment variables for processes that are started in the block."""
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


def _start_ray(folder: str, cpus: int, resource: str | None) -> None:
    """Start a local cluster with its files in `folder`."""
    fake_devices = os.environ.get("MINDSPEED_RL_FAKE_DEVICES")
    try:
        with ray_services.left_out():
            ray.init(
                log_to_driver=False,
                logging_level=logging.ERROR,
                configure_logging=False,
                num_cpus=cpus,
                include_dashboard=False,
                resources={resource: int(fake_devices)} if fake_devices and resource else None,
                object_store_memory=256 << 20,
                _temp_dir=folder,
            )
    except Exception as error:  # Ray has no class of its own for a start that takes too long
        if "timed out during startup" not in str(error):
            raise
        limit_s = ray_services.START_LIMIT_S
        raise TimeoutError(
            f"Ray did not start within {limit_s:g} s: the machine is overloaded, or Ray's processes end; see Ray's logs."
        ) from error


@dataclass(frozen=True)
class LiveDevices:
    """Devices of the nodes of a cluster that are alive.

    Attributes:
        count: devices of all nodes.
        nodes: nodes with any.
    """

    count: int
    nodes: int

    def are_enough(self, count: int, nodes: int) -> bool:
        """Return True where a run of so many devices on so many nodes can start."""
        return self.count >= count and self.nodes >= nodes


def count_live_devices(platform_name: str) -> LiveDevices:
    """Return the devices of the cluster that this process has joined, of nodes that can be reached.

    Ray takes up to a minute to notice that a node is gone.
    """
    resource = platform_class(platform_name).ray_resource or "CPU"
    nodes = (node for node in ray.nodes() if node["Alive"] and node["Resources"].get(resource, 0) >= 1)
    counts = [int(node["Resources"][resource]) for node in nodes if _is_reached(node)]
    return LiveDevices(sum(counts), len(counts))


def _is_reached(node: Mapping[str, Any]) -> bool:
    """Return True where Ray's service of a node accepts a connection."""
    with contextlib.suppress(OSError):
        socket.create_connection((node["NodeManagerAddress"], node["NodeManagerPort"]), timeout=_PROBE_S).close()
        return True
    return False


def wait_for_devices(platform_name: str, count: int, nodes: int, timeout_s: float) -> LiveDevices | None:
    """Return the devices of the cluster of RAY_ADDRESS, once a run of this size can start there, or after the time.

    Returns:
        None where this process starts its own cluster, which has no nodes to lose.

    Raises:
        TimeoutError: the head of the cluster does not answer.
    """
    address = os.environ.get("RAY_ADDRESS")
    if not address:
        return None
    end_s = time.monotonic() + timeout_s
    try:
        join_cluster(address)
        while not (live := count_live_devices(platform_name)).are_enough(count, nodes) and time.monotonic() < end_s:
            time.sleep(0.5)
        return live
    finally:
        ray.shutdown()


def is_own_cluster() -> bool:
    """Return True when this process has started its cluster: all of it is on this machine."""
    return bool(_services)


def find_dead_service() -> str:
    """Return the name of a process of this process's own cluster that is gone; empty while all of them run.

    Without its control service actors continue for a minute; then Ray ends this process, which cannot save or report anything
    any more. Without its node service they continue until one of them needs another process.
    """
    return next((name for name, service in _services if _read_state(service) in (None, psutil.STATUS_ZOMBIE)), "")


def find_stopped_services(*, resumes: bool = False) -> list[str]:
    """Return the names of processes of this process's own cluster, its fork server included, that a signal has stopped.

    Args:
        resumes: let them run on, so that the cluster can be ended: Ray would wait for them.
    """
    services = list(_services)
    if (pid := find_server_process()) is not None:
        with contextlib.suppress(psutil.NoSuchProcess):
            services.append(("fork server", psutil.Process(pid)))
    stopped = [item for item in services if _read_state(item[1]) in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)]
    for _, service in stopped if resumes else ():
        with contextlib.suppress(psutil.NoSuchProcess):
            service.resume()
    return [f"{name}, pid {service.pid}" for name, service in stopped]


def find_lasting_stop() -> str:
    """Return the control service of this process's own cluster, once a signal has stopped it for 30 s; empty before.

    After 60 s Ray ends this process, which cannot save or report anything any more.
    """
    for name, service in _services:
        if not name.startswith(_SERVICES["gcs_server"]):
            continue
        if _read_state(service) not in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
            _stopped_s.pop(service.pid, None)
        elif time.monotonic() - _stopped_s.setdefault(service.pid, time.monotonic()) >= _STOP_LIMIT_S:
            return f"{name}, pid {service.pid}"
    return ""


def _read_state(process: psutil.Process) -> str | None:
    try:
        return process.status() if process.is_running() else None
    except psutil.NoSuchProcess:
        return None
