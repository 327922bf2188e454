"""Inference engines on several devices: one worker a device, started as for training; a tensor-parallel group is an engine."""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import mkdtemp

from mindspeed_rl.config import MegatronConfig, RunConfig
from mindspeed_rl.config.model_metadata import VISION_VARIABLE
from mindspeed_rl.inference.engine_interface import Delta, Engine, Request
from mindspeed_rl.inference.model_files import EngineSettings
from mindspeed_rl.rollout.requests import Sampling
from mindspeed_rl.run.phases import Phases
from mindspeed_rl.runtime.cluster import build_worker_environment, connect_cluster
from mindspeed_rl.runtime.fork_server import INFERENCE, TRAINING, fork_server
from mindspeed_rl.runtime.futures import WorkerError
from mindspeed_rl.runtime.process import ProcessSettings
from mindspeed_rl.scratch import scratch_folder
from mindspeed_rl.workers.remote_group import RemoteGroup

#: deltas that one call to the workers returns for each running request
_DELTAS_PER_CALL = 8
_MAX_DELTAS_PER_CALL = 4096


def _start_workers(settings: EngineSettings, platform_name: str, folder: Path) -> RemoteGroup:
    """Place and start the workers of the engines.

    Args:
        settings: settings of the engines.
        platform_name: name of the device kind.
        folder: takes the logs.
    """
    megatron, role = settings.kind == "megatron", MegatronConfig()
    worker = "MegatronInferenceWorker" if megatron else "InferenceWorker"
    process_settings = ProcessSettings(
        target=f"mindspeed_rl.inference.replica_worker:{worker}",
        adapted=("train",) if megatron else ("rollout",),
        keys=role if megatron else None,
        platform=platform_name,
        world_size=settings.num_devices,
        num_nodes=1,
        folder=folder,
    )
    cfg = RunConfig(config_name="inference", config_dir=".", megatron_training=role, actor_config=role, ref_config=role)
    # nodes of a cluster that runs already have another environment
    vision = {name: os.environ[name] for name in (VISION_VARIABLE,) if name in os.environ}
    return RemoteGroup(process_settings, build_worker_environment(cfg, platform_name) | vision)


class _InferenceEngineGroup:
    """Engines on workers as one engine; built by `running_engine_group`."""

    def __init__(self, group: RemoteGroup, num_replicas: int, tensor_parallel_size: int) -> None:
        self._group, self._num_replicas, self._tp = group, num_replicas, tensor_parallel_size

    def stream(self, requests: Sequence[Request], sampling: Sampling, stop_strings: Sequence[str] = ()) -> Iterator[Delta]:
        """See `Engine.stream`."""
        self._group.call(Phases.ADD_REQUESTS, list(requests), sampling, tuple(stop_strings))
        open_requests = set(range(len(requests)))
        try:
            while open_requests:
                # a single answer is shown while it is generated
                count = min(_DELTAS_PER_CALL * len(open_requests), _MAX_DELTAS_PER_CALL) if len(requests) > 1 else 1
                deltas = self._group.call(Phases.TAKE_TOKENS, count)
                for replica in range(self._num_replicas):
                    for delta in deltas[replica * self._tp]:
                        # the inverse of `_ReplicaWorker.add_requests`, which gives a replica every n-th request
                        index = delta.index * self._num_replicas + replica
                        if delta.finish is not None:
                            open_requests.discard(index)
                        yield Delta(index, delta.token_ids, delta.log_probs, delta.finish)
        finally:
            if open_requests:
                self._group.call(Phases.CANCEL)

    def next_tokens(self, prompts: Sequence[list[int]], count: int) -> list[list[tuple[int, float]]]:
        """See `Engine.next_tokens`."""
        # every replica computes all of them: one result is taken
        return self._group.call(Phases.NEXT_TOKENS, [list(ids) for ids in prompts], count)[0]

    def score(self, sequences: Sequence[list[int]], starts: Sequence[int]) -> list[list[tuple[float, bool]]]:
        """See `Engine.score`."""
        return self._group.call(Phases.MODEL_SCORES, [list(ids) for ids in sequences], list(starts))[0]

    def close(self) -> None:
        """End all workers."""
        self._group.close()


@contextlib.contextmanager
def running_engine_group(settings: EngineSettings, platform_name: str) -> Iterator[Engine]:
    """Start engines on the configured devices; they end with the block.

    Raises:
        WorkerError: a worker died or raised; its log is in the folder that the message names.
        TimeoutError: there are not enough devices.
    """
    with (
        fork_server(platform_name, TRAINING if settings.kind == "megatron" else INFERENCE),
        scratch_folder("mindspeed-rl-inference-") as folder,
        connect_cluster(settings.num_devices, platform_name),
    ):
        group = _start_workers(settings, platform_name, folder)
        try:
            group.start_workers(settings, uuid.uuid4().hex[:12])
            yield _InferenceEngineGroup(group, settings.data_parallel_size, settings.tensor_parallel_size)
        except WorkerError as error:
            logs = mkdtemp(prefix="mindspeed-rl-inference-logs-")  # only a failure needs them
            shutil.copytree(folder / "logs", logs, dirs_exist_ok=True)
            raise WorkerError(f"{error} Logs: {logs}") from error
        finally:
            group.close()
