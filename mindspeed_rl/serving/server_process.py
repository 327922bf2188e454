"""The process of a server of a run: a Ray actor with vLLM's asynchronous engine, for rollouts or for a judge."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import ray

from mindspeed_rl import platform
from mindspeed_rl.config import GenerateConfig
from mindspeed_rl.data.images import ImageRules
from mindspeed_rl.data.media_limits import NO_LIMITS, MediaLimits
from mindspeed_rl.observability import heartbeat
from mindspeed_rl.observability.logging import redirect_output, set_up_logging
from mindspeed_rl.run.placement import RolloutLayout
from mindspeed_rl.runtime.process import prepare_process
from mindspeed_rl.serving.rollout_service import RolloutService, ServedEngine

#: the distribution of the log-probs that a server reports; servers of earlier releases report none, or others
_LOG_PROBS = "the full distribution at the request's temperature"


@dataclass(frozen=True)
class ServerSettings:
    """The settings of all servers of a run.

    Attributes:
        hf_folder: has config.json, and the tokenizer where no other folder has it.
        generate: keys of the engines.
        platform: name of the device kind.
        folder: run folder, for run.log and logs/; None without such files.
        with_tokenizer: the engine reads and writes text: other interfaces than ours do, and requests that end by texts.
        tokenizer: folder of the tokenizer; None: the folder of the weights.
        load_weights: the engine loads the folder's weights instead of waiting for a weight sync.
        heartbeat_interval_s: between two heartbeats.
        limits: limits of images and videos.
        title: title of the servers in messages, before their index.
        exact_slices: as `RunConfig` has them.
        sleeps: the engine is offloaded between its phases: others use its devices in them.
    """

    hf_folder: str
    generate: GenerateConfig
    platform: str
    folder: Path | None
    with_tokenizer: bool = False
    tokenizer: str | None = None
    load_weights: bool = False
    heartbeat_interval_s: float = 5.0
    limits: MediaLimits = NO_LIMITS
    title: str = "rollout server"
    exact_slices: int = 0
    sleeps: bool = False


def describe_log_probs(exact_slices: int) -> str:
    """Return the kind of a server's log-probs, which must be the run's; `exact_slices` as in the settings."""
    return f"{_LOG_PROBS}, exact in {exact_slices} slices" if exact_slices else _LOG_PROBS


def build_service(settings: ServerSettings, engine: ServedEngine) -> RolloutService:
    """Build the service of a server.

    Args:
        settings: settings of the server.
        engine: which other interfaces may share.
    """
    generate = settings.generate
    rules = ImageRules.read(settings.hf_folder, settings.limits)
    # read by `replies.read_metadata`
    metadata = {
        "num_workers": RolloutLayout.from_server(generate).world_size,
        "dtype": generate.dtype,
        "quantization": generate.quantization,
        "max_model_len": generate.max_model_len,
        "log_probs": describe_log_probs(settings.exact_slices),
        "images": rules and [rules.min_pixels, rules.max_pixels, generate.limit_mm_image_per_prompt],
        "videos": generate.limit_mm_video_per_prompt,
        "video_pixels": rules and rules.video and [rules.video.min_pixels, rules.video.max_pixels],
    }
    return RolloutService(engine, metadata)


class ServerProcess:
    """An asynchronous Ray actor; nothing heavy is imported before `start`."""

    _service: RolloutService

    def __init__(self, settings: ServerSettings, index: int, devices: Sequence[str] | None = None) -> None:
        """Keep the settings.

        Args:
            settings: settings of all servers.
            index: index of this one.
            devices: ids of devices that it shares with other processes; None: those that Ray assigns to it.
        """
        self._settings, self._index, self._devices = settings, index, devices

    async def start(self) -> dict[str, object]:
        """Start the engine; return the result of `RolloutService.describe`."""
        settings, title = self._settings, f"{self._settings.title} {self._index}"
        name = title.removeprefix("rollout ").replace(" ", "_")
        if settings.folder is not None:
            redirect_output(settings.folder / "logs" / f"{name}.log")
            set_up_logging(settings.folder / "run.log", worker=name.replace("_", " "), console=False)
            heartbeat.start(settings.folder, title, interval_s=settings.heartbeat_interval_s)
        device = platform.select(settings.platform)
        if device.visible_devices_env is not None and device.ray_resource is not None:
            # vLLM counts the devices that its processes see from 0
            assigned = ray.get_runtime_context().get_accelerator_ids().get(device.ray_resource, [])
            os.environ[device.visible_devices_env] = ",".join(assigned if self._devices is None else self._devices)
        prepare_process(("rollout",), None)
        self._service = build_service(settings, import_module("mindspeed_rl.serving.async_engine").build_engine(settings))
        segments = import_module("mindspeed_rl.adaptors.vllm_async")
        # this process ends by being killed, with all processes of its engine
        segments.unlink_segments(segments.QUEUES)
        if (beat := heartbeat.current) is not None:
            beat.set("serving")
        return await self._service.describe()

    async def call(self, name: str, arguments: Mapping[str, object]) -> Any:
        """Return the result of a call; see `RolloutService.call`."""
        return await self._service.call(name, arguments)
