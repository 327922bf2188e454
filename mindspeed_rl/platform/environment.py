"""The environment of worker processes: variables of the run, adapted to the kind of process and its platform."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import yaml

from mindspeed_rl.platform.base import Platform

#: contents of a process: a training engine, a rollout engine, both in one (integrated), or neither
_ProcessKind = Literal["integrated", "trainer", "rollout", "cpu"]

_ALLOCATOR = "PYTORCH_NPU_ALLOC_CONF"
#: trainer and rollout engine of this process compute log-probs that are equal bit for bit (`rl_config.exact_log_probs`), and
#: add up over tensor-parallel ranks in so many slices
EXACT_VARIABLE = "MINDSPEED_RL_EXACT_LOG_PROBS"
#: the rollout engine of this process takes adapters of the output layer
HEAD_ADAPTERS_VARIABLE = "MINDSPEED_RL_HEAD_ADAPTERS"
#: `generate_config.infer_moe_token_dispatcher_type`, where it is not vllm-ascend's own choice
EXPERTS_EXCHANGE_VARIABLE = "MINDSPEED_RL_EXPERTS_EXCHANGE"
#: file in which the ranks of one machine meet, in place of MASTER_ADDR and MASTER_PORT
STORE_VARIABLE = "MINDSPEED_RL_STORE"
#: kernel of the trainer's attention on the CPU, by the driver's trial (`adaptors.cpu_attention`)
ATTENTION_VARIABLE = "MINDSPEED_RL_CPU_ATTENTION"
#: variables that name the network interface, of each library that has one
INTERFACES = ("HCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


def load_runtime_env(path: str | Path) -> dict[str, str]:
    """Load the variables of a runtime_env file.

    Raises:
        ValueError: the file is missing, has another form, or a value is neither text nor a number.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"rl_config.runtime_env_path: {path} does not exist.")
    content = yaml.safe_load(path.read_text()) or {}
    if not isinstance(content, dict) or set(content) != {"env_vars"} or not isinstance(content["env_vars"] or {}, dict):
        raise ValueError(f"{path}: expected one group 'env_vars' with a variable on each line.")
    variables: dict[str, str] = {}
    for name, value in (content["env_vars"] or {}).items():
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            raise ValueError(f"{path}: {name}: {value!r} is not text; put the value in quotes.")
        variables[str(name)] = str(value)
    return variables


def adapt_environment(
    variables: Mapping[str, str],
    kind: _ProcessKind,
    platform: Platform,
    *,
    shares_device: bool = False,
    hccl_buffer_mib: int | None = None,
    deterministic: bool = False,
    captures_graphs: bool = False,
    socket_ifname: str | None = None,
) -> dict[str, str]:
    """Build the environment of one worker process.

    Args:
        variables: from `load_runtime_env`.
        kind: contents of the process.
        platform: its device kind; its required variables override the file.
        shares_device: another process of the run works on the same device.
        hccl_buffer_mib: `rl_config.hccl_buffersize`.
        deterministic: `npu_deterministic`.
        captures_graphs: the rollout engine of the process captures graphs (`enforce_eager: false`).
        socket_ifname: network interface for all communication between nodes.

    Raises:
        ValueError: the file contradicts the installed vLLM, or excludes the graphs that the run file asks for.
    """
    environment = {**variables, **platform.worker_env()}
    if kind in ("integrated", "rollout"):
        _fit_rollout(environment)
    if platform.name == "npu":
        _check_vllm_version(environment)
        if hccl_buffer_mib is not None:
            environment["HCCL_BUFFSIZE"] = str(hccl_buffer_mib)
        if shares_device:
            for name in ("HCCL_HOST_SOCKET_PORT_RANGE", "HCCL_NPU_SOCKET_PORT_RANGE"):
                # both processes would listen on the same default port of the device
                environment.setdefault(name, "auto")
        if deterministic:
            environment.setdefault("HCCL_DETERMINISTIC", "true")
            # shifts along the summed axis of a matrix product change the order of its sums
            environment.setdefault("CLOSE_MATMUL_K_SHIFT", "1")
        if captures_graphs:
            if environment.get("ASCEND_LAUNCH_BLOCKING") == "1":
                raise ValueError(
                    "ASCEND_LAUNCH_BLOCKING: '1' in the runtime environment, but enforce_eager: false captures graphs, which "
                    "cannot wait after each operator; remove the variable or set enforce_eager: true."
                )
            if environment.get("TASK_QUEUE_ENABLE", "2") == "2":
                environment["TASK_QUEUE_ENABLE"] = "1"  # 2 fails in a capture
        if kind == "cpu":
            # `import torch` would load torch_npu, which a process without a device has no use for
            environment["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    if socket_ifname:
        environment |= dict.fromkeys(INTERFACES, socket_ifname)
    return environment


def _fit_rollout(environment: dict[str, str]) -> None:
    """Remove expandable segments: the memory pool of the engine's sleep mode asserts that they are off."""
    settings = [part for part in environment.get(_ALLOCATOR, "").split(",") if part and "expandable_segments" not in part]
    if settings:
        environment[_ALLOCATOR] = ",".join(settings)
    else:
        environment.pop(_ALLOCATOR, None)


def _check_vllm_version(environment: Mapping[str, str]) -> None:
    """Raise ValueError where VLLM_VERSION, by which vllm-ascend chooses its code, differs from the installed release."""
    configured = environment.get("VLLM_VERSION")
    if configured is None:
        return
    try:
        installed = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return
    if installed[:1].isdigit() and installed.split("+")[0].split(".")[:2] != configured.split(".")[:2]:
        raise ValueError(
            f"VLLM_VERSION: '{configured}' in the runtime environment, but vllm {installed} is installed; remove the line."
        )
