"""Checks of a run against this machine: its devices, its memory, and the servers that it names.

`train` and `explain` share them: a run that is valid starts its workers here.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from urllib.parse import urlsplit

import psutil

from mindspeed_rl.adaptors import npu_devices
from mindspeed_rl.config import RLConfig
from mindspeed_rl.platform import platform_class, resolve_name
from mindspeed_rl.redaction import hide_in_text
from mindspeed_rl.rewards.judge_addresses import list_judges
from mindspeed_rl.run import Run

_GIB = 1 << 30
#: longest wait for a server to take a connection
_CONNECT_S = 5.0
#: between two attempts to reach a server that is starting, and between two lines about it
_RETRY_S, _REPORT_S = 1.0, 10.0
#: variables that send requests elsewhere, where only the proxy knows what can be reached
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")


def list_machine_checks(run: Run) -> Iterator[Callable[[], object]]:
    """Yield a check of the device kind, of the memory that the run asks for, and of each server that it names."""
    yield partial(_check_platform, run)
    yield partial(_check_quantization, run)
    yield partial(_check_cache, run)
    yield partial(_check_offload_folder, run)
    if run.config.rl_config is not None and not run.config.is_supervised and run.rl.judge_url is not None:
        yield partial(check_judges, run.rl)  # the judges are asked once the data are read, which also warns
    for host, port in run.placement.servers:
        yield partial(check_server, f"http://{host}:{port}", "generate_config.vllm_server_host")


def _check_platform(run: Run) -> None:
    """Raise ValueError where this machine cannot have the devices; a cluster's devices may be on other machines."""
    kind = platform_class(run.platform)
    if kind.ray_resource is None or run.num_nodes > 1 or os.environ.get("RAY_ADDRESS"):
        return
    try:
        if kind.is_available():
            return
        reason = f"no such device is usable on this machine (it needs {kind.requirement})"
    except ImportError as error:
        reason = str(error)
    raise ValueError(
        f"platform: '{run.platform}' was requested, but {reason}; platform: {resolve_name('auto')} is usable here, and"
        " mindspeed-rl doctor shows what is missing"
    )


def _check_quantization(run: Run) -> None:
    """Raise ValueError where this machine's devices do not have the format of the engines."""
    generate = run.config.generate_config
    if generate is None or run.config.is_supervised or run.num_nodes > 1 or os.environ.get("RAY_ADDRESS"):
        return
    if run.platform == "npu" and generate.quantization is not None:
        npu_devices.check_quantization(generate.quantization, npu_devices.read_soc_number_in_subprocess)


def _check_cache(run: Run) -> None:
    """Raise ValueError where the KV caches of the engines of this machine are larger than its memory."""
    generate, engines = run.config.generate_config, run.placement.engines
    if run.platform != "cpu" or generate is None or engines is None or generate.kv_cache_memory_gib is None:
        return
    replicas = -(-engines.num_replicas // run.num_nodes)
    needed, total = replicas * generate.kv_cache_memory_gib, psutil.virtual_memory().total / _GIB
    if needed >= total:
        raise ValueError(
            f"generate_config.kv_cache_memory_gib: {generate.kv_cache_memory_gib:g} GiB x {replicas} (engines on this machine)"
            f" = {needed:g} GiB, and it has {total:.1f} GiB for everything; leave it out for a size that follows"
            " max_num_seqs and max_model_len"
        )


def _check_offload_folder(run: Run) -> None:
    """Raise ValueError where the optimizer's states cannot be in a file on this machine; other machines check their own."""
    cfg = run.config
    for role, config in {"actor_config": cfg.actor_config, "critic_config": cfg.critic_config}.items():
        folder = None if config is None or not config.optimizer_offload_fraction else config.optimizer_offload_path
        if folder is None or run.num_nodes > 1 or os.environ.get("RAY_ADDRESS"):
            continue
        if not os.path.isdir(folder):
            raise ValueError(
                f"{role}.optimizer_offload_path: {folder} is not a folder on this machine; make it on a local disk"
            )
        if not os.access(folder, os.W_OK | os.X_OK):
            raise ValueError(f"{role}.optimizer_offload_path: this user may not write to {folder}")


def check_server(url: str, key: str) -> None:
    """Check that a server takes connections.

    Args:
        key: where the user wrote the address.

    Raises:
        ValueError: nothing listens there, or the host is not known.
    """
    address = urlsplit(url)
    is_local = address.hostname in ("127.0.0.1", "localhost", "::1")
    if address.scheme not in ("http", "https") or not address.hostname:
        raise ValueError(f"{key} is '{hide_in_text(url)}'; it must look like http://host:port/v1")
    if not is_local and any(os.environ.get(name) for name in _PROXIES):
        return
    try:
        port = address.port or (443 if address.scheme == "https" else 80)
        with socket.create_connection((address.hostname, port), timeout=_CONNECT_S):
            return
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ValueError(f"{key}: {hide_in_text(url)} cannot be reached ({reason}); start the server before the run") from error


def check_judges(rl: RLConfig) -> list[str]:
    """Check that the judges take connections; return a sentence for each that cannot be reached and is not needed.

    Raises:
        ValueError: an address has another form, or fewer judges can be reached than the votes of a response need.
    """
    judges, errors = list_judges(rl.judge_url, rl.judge_model, rl.judge_panel), list[ValueError]()
    for judge in judges:
        try:
            check_server(judge.url, judge.where)
        except ValueError as error:
            errors.append(error)
    votes = rl.judge_repeats * (len(judges) - len(errors))
    if errors and votes < (rl.judge_repeats * len(judges) if rl.judge_quorum is None else rl.judge_quorum):
        raise errors[0]
    return [f"{error}; until then the other judges decide (rl_config.judge_quorum)" for error in errors]


def wait_for_servers(run: Run) -> None:
    """Wait until the standalone rollout servers of a run take connections; one listens when its engine is loaded.

    Raises:
        ValueError: one does not, within the deadline of a server.
    """
    for host, port in run.placement.servers:
        url, started_s = f"http://{host}:{port}", time.monotonic()
        said_s = -_REPORT_S
        while True:
            try:
                check_server(url, "generate_config.vllm_server_host")
                break
            except ValueError:
                waited_s = time.monotonic() - started_s
                if waited_s > run.deadlines.seconds["server"]:
                    raise
                if waited_s - said_s >= _REPORT_S:
                    print(f"waiting for the rollout server at {url} ({waited_s:.0f} s)", flush=True)
                    said_s = waited_s
                time.sleep(_RETRY_S)


def describe_machine(run: Run) -> list[str]:
    """Return a warning where the run can start here, but not as it was probably meant."""
    devices, cores = -(-run.placement.num_devices // run.num_nodes), os.cpu_count() or 1
    if run.platform != "cpu" or devices <= max(cores, 2):
        return []
    return [f"{devices} devices are processes that share the {cores} cores of this machine; {cores} or fewer are faster"]
