"""The rollout engine of this rank: takes weights, answers the prompts of its replica, gives its memory back."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from mindspeed_rl import platform
from mindspeed_rl.adaptors.engine_hooks import DERIVED
from mindspeed_rl.config import Run
from mindspeed_rl.dataplane.client import DataPlane
from mindspeed_rl.models.network import Network
from mindspeed_rl.observability.metrics import Metrics
from mindspeed_rl.resharding.destinations import read_destinations
from mindspeed_rl.resharding.exchange import world_exchange
from mindspeed_rl.resharding.push import WeightPush
from mindspeed_rl.resharding.transfer import WeightStream
from mindspeed_rl.rollout.requests import GenerationRequest, Sampling
from mindspeed_rl.rollout.seeds import sample_seed
from mindspeed_rl.rollout.vllm_engine import LoadsWeights, VllmEngine
from mindspeed_rl.workers.model_source import ModelSource


class RolloutReplica:
    """One rank's share of a rollout replica. Methods are collective over the ranks of the replica, and of all replicas that
    share experts with it; building and `load` over the whole world.

    Attributes:
        replica, num_replicas: which rollout engine this rank belongs to.
        is_output: True on the rank that hands the replica's responses out.
    """

    def __init__(self, run: Run, plane: DataPlane, source: ModelSource, network: Network, eos_id: int, run_id: str) -> None:
        config = run.generate
        self.run, self.plane = run, plane
        keys = config.sampling_config
        sampling = Sampling(
            temperature=keys.temperature,
            max_tokens=keys.max_tokens,
            stop_token_ids=() if keys.ignore_eos else tuple(sorted({eos_id, *_generation_stops(source)})),
            top_p=keys.top_p,
            top_k=keys.top_k,
            min_p=keys.min_p,
        )
        self.dtype = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
        self.engine = VllmEngine(
            source.hf_folder,
            config,
            sampling,
            run_id=run_id,
            kv_bytes_per_token=2 * network.num_layers * network.num_query_groups * network.kv_channels * self.dtype.itemsize,
        )
        layout = self._layout = self.engine.layout
        self.replica, replica_rank = divmod(dist.get_rank(), layout.tensor)
        self.num_replicas = layout.num_replicas
        self.is_output = replica_rank == 0
        self._group = _own_group(layout.replica_groups())
        # None where the ranks of the replica are all that hold its experts
        self._expert_group = _own_group(layout.expert_groups()) if layout.in_step else None
        self._push: WeightPush | None = None

    # ------------------------------------------------------------------ weights and memory

    def load(self, stream: WeightStream, version: int) -> int:
        """The engine holds the weights of the stream; returns how many parameters were proven to have arrived."""
        self.engine.restore_weights()
        self.engine.write_weights(lambda model: self._write(model, stream), version)
        assert self._push is not None
        return self._push.prove(self.engine.read_model()).num_parameters

    def _write(self, model: nn.Module, stream: WeightStream) -> None:
        if self._push is None:  # the layouts do not change during a run
            load = cast(LoadsWeights, model).load_weights
            destinations = read_destinations(model, load, stream.shapes, self.dtype, skip=DERIVED)
            repacked = self.engine.repacked_parameters(model)
            bucket_bytes = self.run.generate.update_weights_bucket_mb << 20
            self._push = WeightPush(
                replace(stream.trained, bucket_bytes=bucket_bytes),
                destinations,
                world_exchange(),
                replica=dist.get_rank() // (self._layout.tensor * self._layout.sharing),
                derived=DERIVED,
                repacked=repacked,
                delta=self.run.generate.update_weight_mode == "delta",
            )
        self._push.write(model)

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
        metrics, batches = Metrics(), self._batches()
        while self._goes_on(dispatch := next(batches, None)):
            if dispatch is None:
                self.engine.generate([])  # other replicas need this one's experts for their dispatches
            else:
                metrics.merge(self._generate_batch(draw, *dispatch))
        return metrics

    def _goes_on(self, dispatch: Any) -> bool:
        """True while this replica or one that shares experts with it has a dispatch."""
        if self._expert_group is None:
            return dispatch is not None
        left = torch.tensor(int(dispatch is not None))
        dist.all_reduce(left, op=dist.ReduceOp.MAX, group=self._expert_group)
        return bool(left)

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
        dist.broadcast_object_list(box, src=self.replica * self._layout.tensor, group=self._group)
        return box[0]

    def _generate_batch(self, draw: int, indexes: Sequence[int], batch: Any) -> Metrics:
        group = self.run.plan.n_samples_per_prompt
        base = self.run.generate.sampling_config.seed
        seed = self.run.config.actor_config.seed if base is None else base
        prompts = [ids.to(torch.int64) for ids in batch["prompt_ids"]]
        requests = [
            GenerationRequest(ids.tolist(), sample_seed(seed, draw, row // group, row % group))
            for row, ids in zip(indexes, prompts)
        ]
        completions = self.engine.generate(requests)
        metrics = Metrics()
        if not self.is_output:
            return metrics
        responses = [torch.tensor(completion.token_ids, dtype=torch.int64) for completion in completions]
        self.plane.put(
            {
                "responses": responses,
                "rollout_log_probs": [torch.tensor(completion.log_probs) for completion in completions],
                "response_length": [len(response) for response in responses],
                "input_ids": [torch.cat([prompt, response]) for prompt, response in zip(prompts, responses)],
                "prompt_length": [len(prompt) for prompt in prompts],
                "truncated": [completion.truncated for completion in completions],
                "weight_version": [self.engine.weight_version] * len(responses),
            },
            indexes,
        )
        metrics.add_spread("response_length", [len(response) for response in responses])
        metrics.add_spread("prompt_length", [len(prompt) for prompt in prompts])
        metrics.add_mean(
            "rollout/truncated_fraction", sum(completion.truncated for completion in completions), len(completions)
        )
        metrics.add_sum("rollout/tokens", sum(len(response) for response in responses))
        return metrics

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
        completions = self.engine.generate(requests, sampling) if requests or self._layout.in_step else []
        return [completion.token_ids for completion in completions] if self.is_output else None


def _own_group(groups: Sequence[Sequence[int]]) -> dist.ProcessGroup:
    """This rank's one of the groups; collective over the world."""
    made = [dist.new_group(list(ranks), backend="gloo") for ranks in groups]
    (own,) = [group for ranks, group in zip(groups, made) if dist.get_rank() in ranks]
    assert isinstance(own, dist.ProcessGroup)  # a number for groups of others
    return own


def _generation_stops(source: ModelSource) -> list[int]:
    """End tokens that generation_config.json names."""
    path = source.hf_folder / "generation_config.json"
    stops = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
    return [] if stops is None else stops if isinstance(stops, list) else [stops]
