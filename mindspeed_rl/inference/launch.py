"""Engines on several devices: one worker a device, started as for training; every tensor-parallel group is one engine."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from mindspeed_rl.config import MegatronConfig, RunConfig
from mindspeed_rl.inference.engine import EngineSettings, InferenceEngine
from mindspeed_rl.inference.requests import Engine, Piece, Request
from mindspeed_rl.rollout.records import Sampling
from mindspeed_rl.workers.worker import Worker

#: pieces that one call to the workers brings for each running request
_PIECES_PER_CALL = 8
_MOST_PIECES_PER_CALL = 4096


@dataclass(frozen=True)
class Devices:
    """What the launcher asks of a plan: how many workers there are, and on how many machines."""

    world_size: int
    num_nodes: int = 1


class InferenceWorker(Worker):
    """One rank's share of an engine."""

    def set_up(self, master: tuple[str, int], local_rank: int, settings: EngineSettings, run_id: str) -> dict[str, Any]:
        """Joins the others, builds the engine and loads its weights; collective over all workers."""
        self._take_place(master, local_rank)
        import torch.distributed as dist

        from mindspeed_rl import platform
        from mindspeed_rl.data.tokenizer import load_tokenizer
        from mindspeed_rl.inference.model_files import open_model

        device = platform.select(self.cfg.platform)
        device.set_device(local_rank)
        dist.init_process_group(device.collective_backend)
        tokenizer = load_tokenizer(settings.tokenizer, trust_remote_code=settings.trust_remote_code)
        self._engine = InferenceEngine(settings, open_model(settings.model), tokenizer, run_id=run_id)
        self._replica, self._replica_rank = divmod(self.rank, settings.tensor_parallel_size)
        self._num_replicas = settings.data_parallel_size
        self._pieces: Iterator[Piece] = iter(())
        self._settle()
        return {}

    def begin(self, requests: Sequence[Request], sampling: Sampling, stop_strings: Sequence[str]) -> None:
        """This replica's requests (every n-th from its number on) are under way."""
        self._pieces = self._engine.stream(requests[self._replica :: self._num_replicas], sampling, stop_strings)

    def take(self, count: int) -> list[Piece]:
        """The next pieces; fewer than `count` when all answers are through, none on ranks that do not hand results out.

        All ranks of a replica see the same pieces, so taking a fixed number keeps their engines in step.
        """
        pieces = list(itertools.islice(self._pieces, count))
        return pieces if self._replica_rank == 0 else []

    def cancel(self) -> None:
        """No request is under way any more."""
        self._pieces.close()

    def next_tokens(self, prompts: Sequence[list[int]], count: int) -> list[list[tuple[int, float]]]:
        """See `Engine.next_tokens`; every replica answers all."""
        return self._engine.next_tokens(prompts, count)


class EngineGroup:
    """Engines on workers, called together. Use `start_engine`."""

    def __init__(self, group: Any, num_replicas: int, tensor_parallel_size: int) -> None:
        self._group, self._num_replicas, self._tp = group, num_replicas, tensor_parallel_size

    def stream(self, requests: Sequence[Request], sampling: Sampling, stop_strings: Sequence[str] = ()) -> Iterator[Piece]:
        """See `Engine.stream`."""
        self._group.begin(list(requests), sampling, tuple(stop_strings))
        open_requests = set(range(len(requests)))
        try:
            while open_requests:
                count = min(_PIECES_PER_CALL * len(open_requests), _MOST_PIECES_PER_CALL) if len(requests) > 1 else 1
                taken = self._group.take(count)
                for replica in range(self._num_replicas):
                    for piece in taken[replica * self._tp]:
                        index = piece.index * self._num_replicas + replica
                        if piece.finish is not None:
                            open_requests.discard(index)
                        yield Piece(index, piece.token_ids, piece.log_probs, piece.finish)
        finally:
            if open_requests:
                self._group.cancel()

    def next_tokens(self, prompts: Sequence[list[int]], count: int) -> list[list[tuple[int, float]]]:
        """See `Engine.next_tokens`."""
        return self._group.next_tokens([list(ids) for ids in prompts], count)[0]

    def close(self) -> None:
        """Ends all workers."""
        self._group.close()


@contextlib.contextmanager
def engine_group(settings: EngineSettings, platform_name: str) -> Iterator[Engine]:
    """Engines on tensor_parallel_size x data_parallel_size devices, ready; they end with the block.

    Raises:
        WorkerFailed: a worker died or raised; its log lies in the folder that the message names.
        TimeoutError: there are not enough devices.
    """
    from mindspeed_rl.workers.launch import WorkerFailed, WorkerGroup, cluster

    role = MegatronConfig()
    cfg = RunConfig(
        config_name="inference",
        config_dir=".",
        platform=platform_name,
        megatron_training=role,
        actor_config=role,
        ref_config=role,
    )
    devices = Devices(settings.tensor_parallel_size * settings.data_parallel_size)
    run_dir = Path(mkdtemp(prefix="mindspeed-rl-inference-"))
    with cluster(devices.world_size, platform_name):
        group = WorkerGroup(InferenceWorker, cfg, devices, platform_name, run_dir)
        try:
            group.set_up(settings, uuid.uuid4().hex[:12])
            yield EngineGroup(group, settings.data_parallel_size, settings.tensor_parallel_size)
        except WorkerFailed as error:
            raise WorkerFailed(f"{error} Logs: {run_dir}/logs") from error
        finally:
            group.close()
    shutil.rmtree(run_dir)  # only a failure needs its logs
