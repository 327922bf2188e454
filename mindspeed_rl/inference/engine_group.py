"""Engines on several devices: one worker a device, started as for training; every tensor-parallel group is one engine."""

from __future__ import annotations

import contextlib
import shutil
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import mkdtemp
from typing import ClassVar

from mindspeed_rl import adaptors
from mindspeed_rl.config import MegatronConfig, RunConfig
from mindspeed_rl.inference.engine_interface import Engine, Piece, Request
from mindspeed_rl.inference.model_files import EngineSettings
from mindspeed_rl.rollout.requests import Sampling
from mindspeed_rl.runtime.cluster import cluster, worker_environment
from mindspeed_rl.runtime.fork_server import INFERENCE, TRAINING, fork_server
from mindspeed_rl.runtime.futures import WorkerError
from mindspeed_rl.runtime.process import ProcessSettings
from mindspeed_rl.runtime.scratch import scratch_folder
from mindspeed_rl.workers.groups import WorkerGroup

#: pieces that one call to the workers brings for each running request
_PIECES_PER_CALL = 8
_MOST_PIECES_PER_CALL = 4096


class InferenceGroup(WorkerGroup):
    """The workers of vLLM engines; see `ReplicaWorker` for what the methods do."""

    target: ClassVar[str] = "mindspeed_rl.inference.replica_worker:InferenceWorker"
    adapted: ClassVar[tuple[adaptors.Scope, ...]] = ("rollout",)

    def __init__(self, num_devices: int, platform_name: str, folder: Path) -> None:
        """
        Args:
            folder: takes the logs.
        """
        role = MegatronConfig()
        settings = ProcessSettings(
            target=self.target,
            adapted=self.adapted,
            keys=role if "train" in self.adapted else None,
            platform=platform_name,
            world_size=num_devices,
            num_nodes=1,
            folder=folder,
        )
        cfg = RunConfig(
            config_name="inference",
            config_dir=".",
            megatron_training=role,
            actor_config=role,
            ref_config=role,
        )
        super().__init__(settings, worker_environment(cfg, platform_name))

    def begin(self, requests: Sequence[Request], sampling: Sampling, stop_strings: Sequence[str]) -> None:
        """The requests are under way, each replica's share of them."""
        self.wait("begin", [process.call.remote("begin", requests, sampling, stop_strings) for process in self.processes])

    def take(self, count: int) -> list[list[Piece]]:
        """The next pieces of each worker."""
        return self.wait("take", [process.call.remote("take", count) for process in self.processes])

    def cancel(self) -> None:
        """No request is under way any more."""
        self.wait("cancel", [process.call.remote("cancel") for process in self.processes])

    def next_tokens(self, prompts: Sequence[list[int]], count: int) -> list[list[tuple[int, float]]]:
        """See `Engine.next_tokens`."""
        # every replica answers all of them: one answer is taken
        return self.wait("next_tokens", [process.call.remote("next_tokens", prompts, count) for process in self.processes])[0]

    def score(self, sequences: Sequence[list[int]], starts: Sequence[int]) -> list[list[tuple[float, bool]]]:
        """See `Engine.score`."""
        return self.wait("score", [process.call.remote("score", sequences, starts) for process in self.processes])[0]


class MegatronInferenceGroup(InferenceGroup):
    """The workers of Megatron models that generate."""

    target = "mindspeed_rl.inference.replica_worker:MegatronInferenceWorker"
    adapted = ("train",)


class EngineGroup:
    """Engines on workers as one engine. Use `engine_group`."""

    def __init__(self, group: InferenceGroup, num_replicas: int, tensor_parallel_size: int) -> None:
        self._group, self._num_replicas, self._tp = group, num_replicas, tensor_parallel_size

    def stream(self, requests: Sequence[Request], sampling: Sampling, stop_strings: Sequence[str] = ()) -> Iterator[Piece]:
        """See `Engine.stream`."""
        self._group.begin(list(requests), sampling, tuple(stop_strings))
        open_requests = set(range(len(requests)))
        try:
            while open_requests:
                # a single answer is shown as it is drawn
                count = min(_PIECES_PER_CALL * len(open_requests), _MOST_PIECES_PER_CALL) if len(requests) > 1 else 1
                taken = self._group.take(count)
                for replica in range(self._num_replicas):
                    for piece in taken[replica * self._tp]:
                        # the inverse of `ReplicaWorker.begin`, which gives a replica every n-th request
                        index = piece.index * self._num_replicas + replica
                        if piece.finish is not None:
                            open_requests.discard(index)
                        yield Piece(index, piece.token_ids, piece.log_probs, piece.finish)
        finally:
            if open_requests:
                self._group.cancel()

    def next_tokens(self, prompts: Sequence[list[int]], count: int) -> list[list[tuple[int, float]]]:
        """See `Engine.next_tokens`."""
        return self._group.next_tokens([list(ids) for ids in prompts], count)

    def score(self, sequences: Sequence[list[int]], starts: Sequence[int]) -> list[list[tuple[float, bool]]]:
        """See `Engine.score`."""
        return self._group.score([list(ids) for ids in sequences], list(starts))

    def close(self) -> None:
        """Ends all workers."""
        self._group.close()


@contextlib.contextmanager
def engine_group(settings: EngineSettings, platform_name: str) -> Iterator[Engine]:
    """Engines on the devices that the settings say, ready; they end with the block.

    Raises:
        WorkerError: a worker died or raised; its log lies in the folder that the message names.
        TimeoutError: there are not enough devices.
    """
    num_devices = settings.num_devices
    kind, libraries = (MegatronInferenceGroup, TRAINING) if settings.kind == "megatron" else (InferenceGroup, INFERENCE)
    with (
        fork_server(platform_name, libraries),
        scratch_folder("mindspeed-rl-inference-") as folder,
        cluster(num_devices, platform_name),
    ):
        group = kind(num_devices, platform_name, folder)
        try:
            group.start_workers(settings, uuid.uuid4().hex[:12])
            yield EngineGroup(group, settings.data_parallel_size, settings.tensor_parallel_size)
        except WorkerError as error:
            logs = mkdtemp(prefix="mindspeed-rl-inference-logs-")  # only a failure needs them
            shutil.copytree(folder / "logs", logs, dirs_exist_ok=True)
            raise WorkerError(f"{error} Logs: {logs}") from error
        finally:
            group.close()
