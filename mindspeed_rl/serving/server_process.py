"""The process of a rollout server of a run: a Ray actor that owns vLLM's asynchronous engine on devices of its own."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import ray

from mindspeed_rl import platform
from mindspeed_rl.config import GenerateConfig
from mindspeed_rl.observability import heartbeat
from mindspeed_rl.observability.logging import redirect_output, set_up_logging
from mindspeed_rl.runtime.process import prepare_process


@dataclass(frozen=True)
class ServerSettings:
    """What is true of all servers of a run.

    Attributes:
        hf_folder: has config.json, and the tokenizer where other interfaces are served.
        generate: keys of the engines.
        full_distribution: no token is cut off when training responses are drawn.
        platform: name of the device kind.
        folder: of the run; takes run.log and logs/. None: nothing is written.
        with_tokenizer: the engine reads and writes text, for other interfaces than ours.
        load_weights: the engine begins with the folder's weights instead of waiting for a push.
        heartbeat_interval_s: between two signs of life.
    """

    hf_folder: str
    generate: GenerateConfig
    full_distribution: bool
    platform: str
    folder: Path | None
    with_tokenizer: bool = False
    load_weights: bool = False
    heartbeat_interval_s: float = 5.0


class ServerProcess:
    """An asynchronous Ray actor; nothing heavy is imported before `start`."""

    def __init__(self, settings: ServerSettings, number: int) -> None:
        self._settings, self._number = settings, number
        self._service: Any = None

    async def start(self) -> Mapping[str, Any]:
        """The engine is ready; what `RolloutService.describe` says."""
        settings, name = self._settings, f"server_{self._number}"
        if settings.folder is not None:
            redirect_output(settings.folder / "logs" / f"{name}.log")
            set_up_logging(settings.folder / "run.log", worker=f"server {self._number}", console=False)
            heartbeat.start(settings.folder, f"rollout server {self._number}", interval_s=settings.heartbeat_interval_s)
        device = platform.select(settings.platform)
        if device.visible_devices_env is not None and device.ray_resource is not None:
            # vLLM counts the devices that its processes see from 0
            assigned = ray.get_runtime_context().get_accelerator_ids().get(device.ray_resource, [])
            os.environ[device.visible_devices_env] = ",".join(assigned)
        prepare_process(("rollout",), None)
        self._service = import_module("mindspeed_rl.serving.async_engine").open_service(settings)
        segments = import_module("mindspeed_rl.adaptors.vllm_async")
        # this process ends by being killed, and all of its engine with it
        segments.unlink_segments(segments.QUEUES)
        if (beat := heartbeat.current()) is not None:
            beat.set("serving")
        return await self._service.describe()

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """See `RolloutService.call`."""
        return await self._service.call(name, arguments)
