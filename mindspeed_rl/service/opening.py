"""The start of a service: run file, environment and adaptors, before Megatron and vLLM are imported.

On one device its engines are in this process; on several each device has a process, which Ray places.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed_rl import registry
from mindspeed_rl.config import RunConfig
from mindspeed_rl.importing import collecting_seldom
from mindspeed_rl.planner.machine_memory import read_machine_memory
from mindspeed_rl.platform.environment import EXACT_VARIABLE, HEAD_ADAPTERS_VARIABLE
from mindspeed_rl.service.hangs import HANG_FILE

if TYPE_CHECKING:
    from mindspeed_rl.run import Run
    from mindspeed_rl.service.backend import BrokenBackendError
    from mindspeed_rl.service.call_watch import CallWatch, WatchedTenants
    from mindspeed_rl.service.rank_group import TenantGroup
    from mindspeed_rl.service.tenants import Tenants

#: a process group of one process
_SINGLE_PROCESS = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}


def open_tenants(
    cfg: RunConfig, num_nodes: int = 1, hung: Callable[[BrokenBackendError], None] | None = None
) -> Tenants | WatchedTenants | TenantGroup:
    """Load the base model of a run file with `serve_config`, and build its engines.

    Args:
        cfg: the run file.
        num_nodes: machines that the devices are spread over.
        hung: called by a thread of a server once a call of the engines has passed its limit; None: calls have no limit.

    Raises:
        ValueError: the run file is wrong; all violations are named.
    """
    if cfg.serve_config is None:
        raise ValueError("serve_config: the run file has no such group, which a service needs")
    # by name: these import torch, which reads the environment
    run = registry.load("mindspeed_rl.run.models:resolve_run", "serve")(cfg, num_nodes)
    run = registry.load("mindspeed_rl.run.models:plan_models", "serve")(run)
    _check_tokenizer(run)
    if run.placement.num_devices > 1:
        _check_memory(run)
        group: type[TenantGroup] = registry.load("mindspeed_rl.service.rank_group:TenantGroup", "serve")
        return group(run)
    device = registry.load("mindspeed_rl.platform:select", "serve")(run.platform)
    process: Any = registry.load("mindspeed_rl.runtime.process:prepare_process", "serve")
    find_free_port: Any = registry.load("mindspeed_rl.runtime.process:find_free_port", "serve")
    for name, value in device.worker_env().items():
        os.environ.setdefault(name, value)
    os.environ.update(_SINGLE_PROCESS, MASTER_PORT=str(find_free_port("127.0.0.1")))
    os.environ[HEAD_ADAPTERS_VARIABLE] = "1"
    if cfg.exact_slices:
        os.environ[EXACT_VARIABLE] = str(cfg.exact_slices)
    if run.threads is not None:
        device.use_threads(run.threads.count)
    _check_memory(run)

    def load() -> Tenants:
        with collecting_seldom():
            process(("train", "rollout"), run.models["actor"].config)
            tenants: type[Tenants] = registry.load("mindspeed_rl.service.tenants:Tenants", "serve")
            return tenants(run, f"service-{os.getpid()}")

    if hung is None:
        return load()
    note = Path(cfg.serve_config.folder).expanduser().absolute() / HANG_FILE
    watch: CallWatch = registry.load("mindspeed_rl.service.call_watch:CallWatch", "serve")(run.deadlines, hung, note)
    watched: type[WatchedTenants] = registry.load("mindspeed_rl.service.call_watch:WatchedTenants", "serve")
    return watched(watch.run("the load of the base", 1, load, deadline="start"), watch)


def _check_tokenizer(run: Run) -> None:
    """Check the tokenizer of the base, which clients read their texts with, as `train` does; print what is worth reading.

    Raises:
        ValueError: it is not the model's.
    """
    base = run.models["actor"]
    # by name, as above
    load: Any = registry.load("mindspeed_rl.checkpoint.model_source:load_tokenizer_of", "serve")
    check: Any = registry.load("mindspeed_rl.data.tokenizer:check_tokenizer", "serve")
    folder = base.config.tokenizer_name_or_path or base.source.hf_folder
    for warning in check(load(base.config, base.source), run.vocab_sizes, folder):
        print(f"warning: {warning}", flush=True)


def _check_memory(run: Any) -> None:
    """Raise ConfigError where base, engine and the models of clients need more memory than is free on the device."""
    if run.platform == "cuda":  # of whose devices the planner has no figures
        return
    planned = registry.load("mindspeed_rl.planner.devices:find_device", "serve")(run)
    plan_server = registry.load("mindspeed_rl.planner.server:plan_server", "serve")
    if run.platform == "cpu":  # a device has the memory of its kind; the CPU what this machine has left
        planned = replace(planned, memory=read_machine_memory().available // run.placement.num_devices)
    plan_server(run, planned).check()
