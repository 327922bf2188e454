"""The rollout engine of this rank: takes weights, answers the prompts of its replica, gives its memory back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch import nn

from mindspeed_rl import platform
from mindspeed_rl.adaptors.engine_hooks import DERIVED
from mindspeed_rl.config import Run
from mindspeed_rl.data.prompts import PromptItem
from mindspeed_rl.dataplane.client import DataPlane
from mindspeed_rl.dataplane.columns import Batch
from mindspeed_rl.models.costs import kv_bytes_per_token
from mindspeed_rl.models.model_config import ModelConfig
from mindspeed_rl.models.plan import ModelSource
from mindspeed_rl.observability.metrics import Metrics
from mindspeed_rl.resharding.adapters import (
    AdapterFolder,
    BaseLoader,
    adapter_arguments,
    differing_adapters,
    held_adapters,
    sent_adapters,
)
from mindspeed_rl.resharding.destinations import read_destinations
from mindspeed_rl.resharding.exchange import world_exchange
from mindspeed_rl.resharding.proof import WeightDeliveryError
from mindspeed_rl.resharding.push import WeightPush
from mindspeed_rl.resharding.transfer import WeightStream
from mindspeed_rl.rollout.arguments import build_routing_arguments
from mindspeed_rl.rollout.expert_counts import ExpertCounts
from mindspeed_rl.rollout.in_process import InProcessEngine
from mindspeed_rl.rollout.loading import LoadsWeights
from mindspeed_rl.rollout.protocol import Generated, PartialResponse
from mindspeed_rl.rollout.trajectory import Trajectory
from mindspeed_rl.rollout.vllm_engine import VllmEngine
from mindspeed_rl.runtime.reports import add_bytes
from mindspeed_rl.workers.agents import TASK_COLUMNS, item_tasks, make_agents, row_tasks
from mindspeed_rl.workers.responses import response_columns, response_metrics, training_sampling
from mindspeed_rl.workers.routing import rollout_routing

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class RolloutReplica:
    """One rank's share of a rollout replica. Methods are collective over the ranks of the replica, and of all replicas that
    share experts with it; building and `load` over the whole world.

    Attributes:
        rank: of this process among all.
        layout: of the engines.
        replica, num_replicas: which rollout engine this rank belongs to.
        is_output: True on the rank that hands the replica's responses out.
    """

    def __init__(
        self,
        run: Run,
        plane: DataPlane | None,
        source: ModelSource,
        model_config: ModelConfig,
        tokenizer: PreTrainedTokenizerBase,
        run_id: str,
    ) -> None:
        """
        Args:
            plane: where `generate` finds its prompts; None where nobody calls it.
        """
        config = run.generate
        self.run = run
        sampling = training_sampling(config.sampling_config, source, tokenizer)
        self.dtype = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
        replays = run.rl.router_replay.mode == "R3"
        asks = (
            "rl_config.router_replay.mode (R3; R2 works with every one)" if replays else "generate_config.eplb_token_collects"
        )
        self.engine = VllmEngine(
            source.hf_folder,
            config,
            sampling,
            run_id=run_id,
            kv_bytes_per_token=kv_bytes_per_token(model_config, self.dtype.itemsize),
            engine_arguments={
                **(adapter_arguments(run.config.actor_config.lora_r) if config.lora_push == "adapter" else {}),
                **(build_routing_arguments(asks) if replays or config.eplb_token_collects else {}),
            },
        )
        # of the actor, whose pipeline stages each get the experts of their own layers
        self._plan = run.models["actor"].plan if replays else None
        self.rank, layout = dist.get_rank(), self.engine.layout
        self.layout = layout
        self.replica, replica_rank = divmod(self.rank, layout.tensor)
        self.num_replicas = layout.num_replicas
        self.is_output = replica_rank == 0
        group = _own_group(layout.replica_groups())
        self.host = InProcessEngine(self.engine, group, self.replica * layout.tensor)
        self._push: WeightPush | None = None
        self._model_config, self._tokenizer = model_config, tokenizer
        self.reconfigure(run, plane)

    def reconfigure(self, run: Run, plane: DataPlane | None) -> None:
        """Samples from now on are those of this run."""
        self.run, self.plane = run, plane
        self._expert_counts = self._make_expert_counts() if run.generate.eplb_token_collects and self.is_output else None
        self.agents = make_agents(run, self._tokenizer)
        self.host.run_without_steps(self.agents.start)

    def _make_expert_counts(self) -> ExpertCounts:
        model_config = self._model_config
        assert model_config.num_moe_experts is not None
        folder = Path(self.run.generate.eplb_token_save_path)
        return ExpertCounts(folder, self.rank, model_config.moe_layers, model_config.num_moe_experts)

    # ------------------------------------------------------------------ weights and memory

    def load(self, stream: WeightStream, version: int, adapters: AdapterFolder | None = None) -> int:
        """The engine holds the weights of the stream; returns how many parameters were proven to have arrived.

        Args:
            adapters: go beside the weights, which are those without them; None merges them.
        """
        self.engine.restore_weights()
        self.host.load(lambda model: self._write(model, stream, adapters is not None), version)
        assert self._push is not None
        model = self.engine.get_model()
        proven = self._push.prove(model).num_parameters
        if adapters is not None:
            adapters.write()
            self.engine.load_adapter(adapters.path, version)
            proven += self._prove_adapters(model, adapters)
        return proven

    def add_push(self, metrics: Metrics, adapters: AdapterFolder | None = None) -> None:
        """Adds what the last push brought to this rank."""
        assert self._push is not None
        # the first rank writes the folder, the others get it
        beside = 0 if adapters is None or not dist.get_rank() else adapters.num_bytes
        add_bytes(metrics, self._push.received_bytes + beside, self._push.needed_bytes + beside)

    def _write(self, model: nn.Module, stream: WeightStream, beside: bool) -> None:
        load = BaseLoader(model) if beside else cast(LoadsWeights, model).load_weights
        if self._push is None:  # the layouts do not change during a run
            config = self.run.generate
            trained = stream.base if beside else stream.trained
            self._push = WeightPush(
                replace(trained, bucket_bytes=config.update_weights_bucket_mb << 20),
                read_destinations(model, load, stream.shapes, self.dtype, skip=DERIVED),
                world_exchange(),
                replica=self._engine_number,
                derived=DERIVED,
                repacked=self.engine.find_repacked_parameters(model),
                # beside adapters the weights stay as they are
                delta=beside or config.update_weight_mode == "delta",
            )
        self._push.write(model, load)

    @property
    def _engine_number(self) -> int:
        return dist.get_rank() // (self.layout.tensor * self.layout.sharing)

    def _prove_adapters(self, model: nn.Module, adapters: AdapterFolder) -> int:
        """How many matrices of adapters the engine holds as they were trained: all of them.

        Raises:
            WeightDeliveryError: on every rank, where an engine holds others.
        """
        held = held_adapters(model)
        device = next(model.parameters()).device
        everyone = [json.loads(text) for text in world_exchange().gather(json.dumps([self._engine_number, held]), device)]
        sent = sent_adapters(adapters.tensors, adapters.scale, self.dtype)
        for number in {number for number, _ in everyone}:
            parts = [part for other, part in everyone if other == number]
            if wrong := differing_adapters(parts, sent):
                raise WeightDeliveryError(
                    f"weight push: {len(wrong)} adapters of the rollout engine differ from those trained: "
                    f"{', '.join(wrong[:5])}."
                )
        return 2 * len(held)  # an A and a B each

    def tensors_by_parameter(self) -> dict[str, tuple[str, ...]]:
        """The HF tensors that each parameter of this rank's engine is made of; none before the first load."""
        return {} if self._push is None else self._push.tensors_by_parameter()

    @property
    def swaps_memory(self) -> bool:
        """Memory is handed back and forth on devices, and on the CPU only when the run file offloads training weights."""
        return platform.current().engine_sleep or self.run.generate.offload_train_param

    # ------------------------------------------------------------------ responses

    def generate(self, draw: int) -> Metrics:
        """All rows of this replica have a response, each drawn with its own seed.

        Args:
            draw: number of the draw of prompts, a part of the seeds.
        """
        metrics = self.host.run(lambda: self._generate_all(draw)) or Metrics()
        if self._expert_counts is not None:
            self._expert_counts.finish(metrics)
        return metrics

    async def _generate_all(self, draw: int) -> Metrics:
        metrics = Metrics()
        for found in self._dispatches(draw):
            metrics.merge(await found)
        return metrics

    def _dispatches(self, draw: int) -> Iterator[Awaitable[Metrics]]:
        """The work on this replica's rows, a dispatch at a time; where they are known, all dispatches are worked on at once.

        Otherwise whoever is first takes the next rows, so that nobody holds more of them than it works on.
        """
        columns = list(TASK_COLUMNS if self.agents.reads_rows else TASK_COLUMNS[:1])
        size = self.run.plan.dispatch_sizes["actor_rollout_dispatch_size"]
        rl = self.run.rl
        assert self.plane is not None
        if rl.guarantee_order:
            share = self.run.plan.num_samples // self.num_replicas
            first = self.replica * share
            begun = []
            for start in range(first, first + share, size):
                rows = list(range(start, min(start + size, first + share)))
                batch = self.plane.get("actor_rollout", columns, indexes=rows, timeout_s=self.run.deadlines.rows_s)[0]
                begun.append(asyncio.ensure_future(self._generate_batch(draw, rows, batch)))
            yield from begun
            return
        while True:
            batch, rows = self.plane.get("actor_rollout", columns, size)
            if batch is None or rows is None:
                return
            yield self._generate_batch(draw, rows, batch)

    async def _generate_batch(self, draw: int, indexes: Sequence[int], batch: Batch) -> Metrics:
        tasks = row_tasks(self.run, batch, indexes, draw, self.engine.sampling)
        trajectories = await asyncio.gather(*(self.agents.sample(self.host, task) for task in tasks))
        assert self.plane is not None
        columns = response_columns(trajectories)
        if self._plan is not None:
            columns |= rollout_routing(self._plan, trajectories)
        if self._expert_counts is not None:
            self._expert_counts.add(trajectories)
        self.plane.put(columns, indexes)
        return response_metrics(trajectories)

    def continue_responses(self, pieces: Sequence[PartialResponse], num_tokens: int) -> list[Generated] | None:
        """Every num_replicas-th response from this replica's number on, with up to `num_tokens` tokens more.

        Those that may go on are "aborted". None on ranks that hand none out.
        """
        most = self.engine.sampling.max_tokens

        async def grown(piece: PartialResponse) -> Generated:
            kept = 0 if piece.partial is None else len(piece.partial.token_ids)
            limit = min(most, kept + num_tokens)
            sampling = replace(self.engine.sampling, max_tokens=limit)
            found = await self.host.generate(piece.prompt_ids, sampling, piece.seed, piece.partial)
            goes_on = found.finish == "length" and len(found.token_ids) == limit < most
            return replace(found, finish="aborted") if goes_on else found

        async def grown_all() -> list[Generated]:
            return list(await asyncio.gather(*(grown(piece) for piece in pieces[self.replica :: self.num_replicas])))

        return self.host.run(grown_all)

    def generate_responses(self, items: Sequence[PromptItem], seed: int, *, greedy: bool) -> list[Trajectory] | None:
        """Trajectories of every num_replicas-th prompt, from this replica's number on; None on ranks that hand none out.

        Args:
            greedy: temperature 0; otherwise the sampling of the training rollouts, with seeds of their own.
        """
        tasks = item_tasks(items, self.engine.sampling, seed, greedy=greedy)[self.replica :: self.num_replicas]

        async def answered() -> list[Trajectory]:
            found = await asyncio.gather(*(self.agents.sample(self.host, task) for task in tasks))
            # nobody trains on answers, and routing would be most of what travels
            return [one.drop_routing() for one in found]

        return self.host.run(answered)

    def close(self) -> None:
        """The tools hold nothing any more."""
        self.host.run_without_steps(self.agents.close)


def _own_group(groups: Sequence[Sequence[int]]) -> dist.ProcessGroup:
    """This rank's one of the groups; collective over the world."""
    # gloo on every platform: its messages are commands, which lie in host memory
    made = [dist.new_group(list(ranks), backend="gloo") for ranks in groups]
    (own,) = [group for ranks, group in zip(groups, made) if dist.get_rank() in ranks]
    assert isinstance(own, dist.ProcessGroup)  # a number for groups of others
    return own
