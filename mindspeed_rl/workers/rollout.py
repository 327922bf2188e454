"""The rollout engine of this rank: takes weights, answers the prompts of its replica, gives its memory back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from mindspeed_rl import platform
from mindspeed_rl.config import Run
from mindspeed_rl.dataplane.client import DataPlane
from mindspeed_rl.models.network import Network
from mindspeed_rl.observability.metrics import Metrics
from mindspeed_rl.resharding.proof import check_delivery, trained_sums
from mindspeed_rl.resharding.transfer import WeightStream
from mindspeed_rl.rollout.requests import GenerationRequest, Sampling
from mindspeed_rl.rollout.seeds import sample_seed
from mindspeed_rl.rollout.vllm_engine import VllmEngine
from mindspeed_rl.workers.model_source import ModelSource
from mindspeed_rl.workers.responses import response_columns, response_metrics, sampling_seed, training_sampling


class RolloutReplica:
    """One rank's share of a rollout replica. Methods are collective over the ranks of the replica; building and `load` over
    the whole world.

    Attributes:
        replica, num_replicas: which rollout engine this rank belongs to.
        is_output: True on the rank that hands the replica's responses out.
    """

    def __init__(self, run: Run, plane: DataPlane, source: ModelSource, network: Network, eos_id: int, run_id: str) -> None:
        config = run.generate
        self.run, self.plane = run, plane
        sampling = training_sampling(config.sampling_config, source, eos_id)
        self.dtype = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
        self._kv_heads = network.num_query_groups
        self.engine = VllmEngine(
            source.hf_folder,
            config,
            sampling,
            run_id=run_id,
            kv_bytes_per_token=kv_bytes_per_token(network, self.dtype),
        )
        self._tp_size = config.infer_tensor_parallel_size
        self.replica, replica_rank = divmod(dist.get_rank(), self._tp_size)
        self.num_replicas = dist.get_world_size() // self._tp_size
        self.is_output = replica_rank == 0
        replicas = [range(first, first + self._tp_size) for first in range(0, dist.get_world_size(), self._tp_size)]
        group = [dist.new_group(list(ranks), backend="gloo") for ranks in replicas][self.replica]
        assert isinstance(group, dist.ProcessGroup)  # a number for groups of others
        self._group = group

    # ------------------------------------------------------------------ weights and memory

    def load(self, stream: WeightStream, version: int) -> int:
        """The engine holds the weights of the stream; returns how many parameters were proven to have arrived."""
        self.engine.restore_weights()
        self.engine.load_weights(stream.named_tensors(self.dtype), version)
        trained = trained_sums(
            list(stream.local_weights.values()),
            stream.ops,
            self.dtype,
            owns_replica=parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0,
            owns_expert_replica=parallel_state.get_expert_data_parallel_rank() == 0,
        )
        for copy, owner in stream.copies.items():
            trained[copy] = trained[owner]
        proof = check_delivery(
            self.engine.read_model(), trained, infer_tp_size=self._tp_size, group=self._group, kv_heads=self._kv_heads
        )
        return proof.num_parameters

    @property
    def hands_memory_over(self) -> bool:
        """Memory is handed back and forth on devices, and on the CPU only when the run file offloads training weights."""
        return platform.current().engine_sleep or self.run.generate.offload_train_param

    # ------------------------------------------------------------------ responses

    def generate(self, draw: int) -> Metrics:
        """All rows of this replica have a response, each drawn with its own seed.

        Args:
            draw: number of the draw of prompts, a part of the seeds.
        """
        metrics = Metrics()
        for indexes, batch in self._batches():
            metrics.merge(self._generate_batch(draw, indexes, batch))
        return metrics

    def _batches(self) -> Iterator[tuple[list[int], Any]]:
        """This replica's rows, a dispatch at a time; fetched by its first rank and shared with the others."""
        columns, rl = ["prompt_ids"], self.run.rl
        size = self.run.plan.dispatch_sizes["actor_rollout_dispatch_size"]
        if rl.guarantee_order:
            share = self.run.plan.num_samples // self.num_replicas
            first = self.replica * share
            for start in range(first, first + share, size):
                rows = list(range(start, min(start + size, first + share)))
                batch = self._share(
                    lambda rows=rows: self.plane.get("actor_rollout", columns, indexes=rows, timeout_s=rl.wait_timeout_s)[0]
                )
                yield rows, batch
            return
        while True:
            batch, rows = self._share(lambda: self.plane.get("actor_rollout", columns, size))
            if batch is None:
                return
            yield rows, batch

    def _share(self, fetch: Callable[[], Any]) -> Any:
        """What `fetch` returns on the first rank of the replica, on all its ranks."""
        if self._group.size() == 1:
            return fetch()
        box = [fetch() if self.is_output else None]
        dist.broadcast_object_list(box, src=self.replica * self._tp_size, group=self._group)
        return box[0]

    def _generate_batch(self, draw: int, indexes: Sequence[int], batch: Any) -> Metrics:
        group = self.run.plan.n_samples_per_prompt
        seed = sampling_seed(self.run)
        prompts = [ids.to(torch.int64) for ids in batch["prompt_ids"]]
        requests = [
            GenerationRequest(ids.tolist(), sample_seed(seed, draw, row // group, row % group))
            for row, ids in zip(indexes, prompts)
        ]
        completions = self.engine.generate(requests)
        if not self.is_output:
            return Metrics()
        versions = [self.engine.weight_version] * len(completions)
        self.plane.put(response_columns(prompts, completions, versions), indexes)
        return response_metrics(prompts, completions)

    def answer(self, prompts: Sequence[list[int]], seed: int, *, greedy: bool) -> list[list[int]] | None:
        """Responses to every num_replicas-th prompt, starting with this replica's number; None on ranks that hand none out.

        Args:
            greedy: temperature 0; otherwise the sampling of the training rollouts, with seeds of their own.
        """
        sampling = self.engine.sampling
        if greedy:
            sampling = Sampling(temperature=0.0, max_tokens=sampling.max_tokens, stop_token_ids=sampling.stop_token_ids)
        requests = [
            GenerationRequest(list(prompts[number]), sample_seed(seed, number, 0, 0))
            for number in range(self.replica, len(prompts), self.num_replicas)
        ]
        completions = self.engine.generate(requests, sampling) if requests else []
        return [completion.token_ids for completion in completions] if self.is_output else None


def kv_bytes_per_token(network: Network, dtype: torch.dtype) -> int:
    """Of the whole model's KV cache."""
    return 2 * network.num_layers * network.num_query_groups * network.kv_channels * dtype.itemsize
