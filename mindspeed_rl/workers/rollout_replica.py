"""The rollout engine of this rank: loads weights, generates the responses of its replica, releases its memory."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
import vllm
from safetensors.torch import load_file
from torch import Tensor, nn
from vllm import EngineArgs

from mindspeed_rl import platform
from mindspeed_rl.adaptors.engine_hooks import DERIVED
from mindspeed_rl.config.device_limits import engine_adapter_rank
from mindspeed_rl.config.quantized_formats import find_format
from mindspeed_rl.data.prompts import PromptItem
from mindspeed_rl.data.tokenizer import is_plain
from mindspeed_rl.dataplane.client import DataPlane
from mindspeed_rl.dataplane.columns import Batch
from mindspeed_rl.models.costs import kv_bytes_per_token
from mindspeed_rl.observability import heartbeat
from mindspeed_rl.observability.metrics import Metrics
from mindspeed_rl.resharding.adapters import ADAPTER_FILE, AdapterFolder, BaseLoader, find_differing_adapters
from mindspeed_rl.resharding.destinations import read_destinations
from mindspeed_rl.resharding.exchange import Exchange
from mindspeed_rl.resharding.proof import WeightDeliveryError
from mindspeed_rl.resharding.push import WeightPush
from mindspeed_rl.resharding.quantization import quantize_side, stored_dtypes
from mindspeed_rl.resharding.transfer import WeightSource
from mindspeed_rl.rollout.agents.loop import Task
from mindspeed_rl.rollout.arguments import EngineArguments
from mindspeed_rl.rollout.expert_counts import ExpertCounts
from mindspeed_rl.rollout.in_process import InProcessEngine
from mindspeed_rl.rollout.module_engine import ModuleEngine
from mindspeed_rl.rollout.opponents import name_engine_snapshot
from mindspeed_rl.rollout.protocol import Generated, LoadsWeights, PartialResponse
from mindspeed_rl.rollout.requests import EvaluationSampling, Sampling
from mindspeed_rl.rollout.step_engine import StepEngine
from mindspeed_rl.rollout.trajectory import Trajectory
from mindspeed_rl.rollout.vllm_engine import VllmEngine
from mindspeed_rl.run import Run
from mindspeed_rl.run.phases import Phases
from mindspeed_rl.runtime.reports import add_sync_bytes
from mindspeed_rl.scratch import scratch_folder
from mindspeed_rl.workers.agents import LengthOrder, build_agents, build_item_tasks, build_row_tasks, list_task_columns
from mindspeed_rl.workers.opponent_pool import OpponentPool
from mindspeed_rl.workers.responses import build_response_columns, build_sampling, compute_response_metrics, read_image_rules
from mindspeed_rl.workers.role_adapters import build_adapter_columns
from mindspeed_rl.workers.routing import build_routing_columns
from mindspeed_rl.workers.update_plan import split_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def _build_adapter_arguments(rank: int, count: int) -> dict[str, int | bool]:
    """Return the arguments with which vLLM's engine takes so many adapters of up to this rank at a time."""
    return {"enable_lora": True, "max_loras": count, "max_lora_rank": engine_adapter_rank(rank)}


def _build_routing_arguments(key: str) -> EngineArguments:
    """Return the arguments with which an engine reports the experts of each token.

    Args:
        key: key of the run file that needs it, for the error.

    Raises:
        ValueError: this vLLM cannot report them.
    """
    name = "enable_return_routed_experts"
    if name not in inspect.signature(EngineArgs).parameters:
        raise ValueError(f"{key} needs a vLLM that has {name}, from 0.21 on, and this is {vllm.__version__}.")
    return {name: True}


def build_vllm(
    run: Run,
    sampling: Sampling,
    tokenizer: PreTrainedTokenizerBase,
    run_id: str,
    *,
    engine_class: type[VllmEngine] = VllmEngine,
    num_adapters: int | None = None,
) -> StepEngine:
    """Return vLLM's engine.

    Args:
        run: the resolved run.
        sampling: sampling parameters of the run.
        tokenizer: tokenizer of the actor.
        run_id: unique to the run and equal on all its ranks.
        engine_class: class of the engine.
        num_adapters: adapters that a step can compute together, where they are pushed as such; None for those of the run.
    """
    num_adapters = run.rl.num_engine_adapters if num_adapters is None else num_adapters
    config, actor = run.generate, run.models["actor"]
    replays = run.rl.router_replay.mode == "R3"
    key = "rl_config.router_replay.mode (R3; R2 works with every one)" if replays else "generate_config.eplb_token_collects"
    adapts = config.lora_push == "adapter"
    with _save_tokenizer(run, tokenizer) as folder:
        return engine_class(
            actor.source.hf_folder,
            config,
            sampling,
            run_id=run_id,
            kv_bytes_per_token=kv_bytes_per_token(actor.plan.model_config, config.cache_itemsize),
            image_rules=read_image_rules(actor),
            engine_arguments={
                **(_build_adapter_arguments(run.config.actor_config.lora_r, num_adapters) if adapts else {}),
                **(_build_routing_arguments(key) if replays or config.eplb_token_collects else {}),
                # read only where texts or a form end a response
                "tokenizer": folder,
                **({"skip_tokenizer_init": False} if run.rl.requests_have_texts else {}),
            },
        )


@contextlib.contextmanager
def _save_tokenizer(run: Run, tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """Yield a folder from which vLLM loads this tokenizer while it builds its engine.

    In a model's folder transformers takes the tokenizer class of the model type, which decodes a tokenizer of your own in
    another way than its tokenizer.json. A folder without config.json has no model type.
    """
    sampling, serves = run.generate.sampling_config, run.config.serve_config is not None
    reads = bool(sampling.stop or sampling.structured_output or run.rl.requests_have_texts or serves)
    if not reads or not is_plain(tokenizer):
        yield tokenizer.name_or_path
        return
    with scratch_folder("mindspeed-rl-tokenizer-") as folder:
        tokenizer.save_pretrained(str(folder))
        yield str(folder)


def _build_module(run: Run, sampling: Sampling, tokenizer: PreTrainedTokenizerBase, run_id: str) -> StepEngine:
    return ModuleEngine(run.models["actor"].source.hf_folder, run.generate, sampling, world_size=dist.get_world_size())


#: builds an engine; collective over the world
EngineBuilder = Callable[[Run, Sampling, "PreTrainedTokenizerBase", str], StepEngine]
#: value of `generate_config.engine` -> its builder
ENGINES: dict[str, EngineBuilder] = {
    "vllm": build_vllm,
    "transformers": _build_module,
}


class RolloutReplica:
    """One rank's share of a rollout replica.

    Methods are collective over the ranks of the replica, and of all replicas that share experts with it; building and `load`
    over the world.

    Attributes:
        rank: rank of this process among all.
        layout: layout of the engines.
        replica: index of the rollout engine that this rank belongs to.
        num_replicas: rollout engines of the run.
        order: in which the samples of a dispatch start.
        is_output: True on the rank that returns the replica's responses.
        push: the way of the weights to this rank's engine; None before the first `load`.
        opponents: snapshots that play roles of the environment, by their adapter's name in the engine; empty where none do.
        swaps_memory: True where engine and training take turns in memory: on devices, and on the CPU only when the run file
            offloads training weights.
    """

    def __init__(
        self,
        run: Run,
        plane: DataPlane | None,
        tokenizer: PreTrainedTokenizerBase,
        run_id: str,
        *,
        build: EngineBuilder | None = None,
    ) -> None:
        """Build the engine.

        Args:
            run: the resolved run.
            plane: where `generate` takes its prompts; None where it is not called.
            tokenizer: tokenizer of the actor.
            run_id: unique to the run and equal on all its ranks.
            build: builds the engine; None for the one of `generate_config.engine`.
        """
        config, actor = run.generate, run.models["actor"]
        sampling = build_sampling(config.sampling_config, actor.source.hf_folder, tokenizer)
        self.dtype = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
        self.engine = (build or ENGINES[config.engine])(run, sampling, tokenizer, run_id)
        drafts = config.drafts or {}
        self.engine.syncs_drafts = drafts.get("method") == "mtp" and actor.plan.model_config.mtp_num_layers > 0
        # each of the actor's pipeline stages gets the experts of its own layers
        self._plan = actor.plan if run.rl.router_replay.mode == "R3" else None
        self._model_config, self._tokenizer = actor.plan.model_config, tokenizer
        self.rank, self.layout = dist.get_rank(), self.engine.layout
        self.replica, replica_rank = divmod(self.rank, self.layout.tensor)
        self.num_replicas, self.is_output = self.layout.num_replicas, replica_rank == 0
        # replicas that share experts are one engine for the weights
        self._weights_index = self.rank // (self.layout.tensor * self.layout.sharing)
        group = _make_group(self.layout.replica_groups())
        self.in_process = InProcessEngine(self.engine, group, self.replica * self.layout.tensor)
        self.push: WeightPush | None = None
        self.opponents: Mapping[str, OpponentPool] = {}
        self.reconfigure(run, plane)

    def reconfigure(self, run: Run, plane: DataPlane | None) -> None:
        """Generate the samples of this run from now on."""
        self.run, self.plane, config = run, plane, run.generate
        self.swaps_memory = platform.current().engine_sleep or config.offload_train_param
        self._num_started = self._num_done = self._num_tokens = 0
        self._expert_counts: ExpertCounts | None = None
        if config.eplb_token_collects and self.is_output:
            model_config = self._model_config
            assert model_config.num_moe_experts is not None
            folder = Path(config.eplb_token_save_path)
            self._expert_counts = ExpertCounts(folder, self.rank, model_config.moe_layers, model_config.num_moe_experts)
        self.agents, self.order = build_agents(run, self._tokenizer), LengthOrder(longest_first=run.rl.longest_first)
        self.in_process.run_without_steps(self.agents.start)

    # ------------------------------------------------------------------ weights

    def load(
        self,
        stream: WeightSource,
        version: int,
        adapters: Mapping[str, AdapterFolder] | None = None,
        *,
        base_only: bool = False,
        is_average: bool = False,
    ) -> int:
        """Load the weights of the stream into the engine; returns how many parameters were proven to have arrived.

        Args:
            stream: stream of the actor's weights.
            version: version of the weights.
            adapters: are loaded next to the weights, which are those without them, by their names in the engine, "" for the
                actor's own; none merge it.
            base_only: the weights are those without adapters, which come later and one by one.
            is_average: they are a moving average of that version, which is no opponent.
        """
        self.engine.restore_memory("weights")
        self.in_process.load(lambda model: self._write(model, stream, base_only or bool(adapters)), version)
        assert self.push is not None
        model = self.engine.get_model()
        num_proven = self.push.prove(model, self.engine.hooks.unpack(model)).num_parameters
        self.engine.list_replaced = self._list_replaced
        return num_proven + (self._load_adapters(model, adapters, version, is_average=is_average) if adapters else 0)

    def _list_replaced(self, model: nn.Module) -> list[Tensor]:
        """Return the tensors that the next weight sync writes."""
        assert self.push is not None
        return self.push.list_replaced(model, self.engine.hooks.unpack(model))

    def _load_adapters(self, model: nn.Module, adapters: Mapping[str, AdapterFolder], version: int, *, is_average: bool) -> int:
        """Give the engine these adapters and the opponents' snapshots; return how many matrices it was proven to have."""
        for folder in adapters.values():
            folder.write()
        if not is_average:
            for name, pool in self.opponents.items():
                pool.take(version, adapters[name])
        own = {name: folder.path for name, folder in adapters.items() if name}
        past = {
            name_engine_snapshot(each, name): folder
            for name, pool in self.opponents.items()
            for each, folder in pool.folders.items()
        }
        self.engine.load_adapter(adapters[""].path, version)
        self.engine.load_named_adapters({**own, **past}, changed=own)
        scale = adapters[""].scale
        tensors = {name: folder.tensors for name, folder in adapters.items()}
        tensors |= {name: load_file(folder / ADAPTER_FILE) for name, folder in past.items()}
        return sum(self._prove_adapters(model, matrices, scale, name) for name, matrices in tensors.items())

    def add_push(self, metrics: Metrics, adapters: Collection[AdapterFolder] = ()) -> None:
        """Add the bytes that the last weight sync brought to this rank."""
        assert self.push is not None
        # the first rank writes the folders, the others receive them
        folder_bytes = sum(folder.num_bytes for folder in adapters) if self.rank else 0
        add_sync_bytes(metrics, self.push.received_bytes + folder_bytes, self.push.needed_bytes + folder_bytes)

    def _write(self, model: nn.Module, stream: WeightSource, base_only: bool) -> None:
        load = BaseLoader(model) if base_only else cast(LoadsWeights, model).load_weights
        if self.push is None:  # the layouts do not change during a run
            config = self.run.generate
            trained = stream.with_predictions if self.engine.syncs_drafts else stream.trained
            trained = stream.base if base_only else trained
            if config.quantization is not None:
                trained = quantize_side(trained, find_format(config.quantization, self.run.platform))
            stored = stored_dtypes(trained.quantized, trained.quantization)
            self.push = WeightPush(
                replace(trained, bucket_bytes=config.update_weights_bucket_mb << 20),
                read_destinations(model, load, trained.shapes, self.dtype, skip=DERIVED, stored=stored),
                Exchange.from_world(),
                replica=self._weights_index,
                derived=DERIVED,
                # next to adapters the weights do not change
                delta=base_only or config.update_weight_mode == "delta",
            )
        self.push.write(model, load)

    def _prove_adapters(self, model: nn.Module, tensors: Mapping[str, Tensor], scale: float, name: str = "") -> int:
        """Return how many matrices of an adapter the engine has, all of them as they were trained.

        Args:
            tensors: tensors of the adapter's file.
            scale: factor of B A.
            name: its name in the engine.

        Raises:
            WeightDeliveryError: on every rank, where an engine has others.
        """
        tp = self.layout.tensor
        mine, count = find_differing_adapters(
            model, tensors, scale, self.dtype, rank=self.rank % tp, num_ranks=tp, slot=self.engine.find_adapter_slot(name)
        )
        device = next(model.parameters()).device
        reports = [json.loads(text) for text in Exchange.from_world().all_gather(json.dumps(mine), device)]
        if wrong := list(dict.fromkeys(name for report in reports for name in report)):
            raise WeightDeliveryError(
                f"weight push: {len(wrong)} adapters of the rollout engine differ from those trained: {', '.join(wrong[:5])}."
            )
        return count

    # ------------------------------------------------------------------ responses

    def generate(self, rollout_index: int) -> Metrics:
        """Generate a response for all rows of this replica, each sampled with a seed of its own.

        Args:
            rollout_index: index of the rollout in the run, a part of the seeds.
        """
        metrics = self.in_process.run(lambda: self._generate_all(rollout_index)) or Metrics()
        if self._expert_counts is not None:
            self._expert_counts.finish(metrics)
        return metrics

    async def _generate_all(self, rollout_index: int) -> Metrics:
        metrics = Metrics()
        self._num_started = self._num_done = self._num_tokens = 0
        for batch in self._dispatches(rollout_index):
            metrics.merge(await batch)
        if not self._num_started:
            metrics.add_sum("rollout/idle_replicas", 1)
        return metrics

    def _dispatches(self, rollout_index: int) -> Iterator[Awaitable[Metrics]]:
        """Yield the work on this replica's rows, a dispatch at a time; in a guaranteed order all dispatches start at once.

        In any order the replica that is first takes the next rows, so that no replica has more of them than it works on.
        """
        run, plane = self.run, self.plane
        assert plane is not None
        columns = list_task_columns(run, self.agents)
        size = run.plan.dispatch_sizes[Phases.GENERATE.dispatch_key]
        if run.rl.guarantee_order:
            mine = split_rows(range(run.plan.num_samples), self.num_replicas, self.replica)
            started = []
            for start in range(0, len(mine), size):
                rows = mine[start : start + size]
                batch = plane.get(Phases.GENERATE.consumer, columns, indexes=rows, timeout_s=run.deadlines.rows_s)[0]
                started.append(asyncio.ensure_future(self._generate_batch(rollout_index, rows, batch)))
            yield from started
            return
        while True:
            batch, rows = plane.get(Phases.GENERATE.consumer, columns, size)
            if batch is None or rows is None:
                return
            yield self._generate_batch(rollout_index, rows, batch)

    async def _generate_batch(self, rollout_index: int, indexes: Sequence[int], batch: Batch) -> Metrics:
        tasks = build_row_tasks(self.run, batch, indexes, rollout_index, self.engine.sampling, self._list_snapshots())
        order = self.order.arrange(tasks)
        self._num_started += len(tasks)
        started = {index: asyncio.ensure_future(self._sample(tasks[index])) for index in order}
        trajectories = await asyncio.gather(*(started[index] for index in range(len(tasks))))
        self.order.note(tasks, [len(trajectory.token_ids) for trajectory in trajectories])
        assert self.plane is not None
        columns = build_response_columns(trajectories, with_images=self.engine.image_rules is not None)
        if self._plan is not None:
            columns |= build_routing_columns(self._plan, trajectories)
        if self.run.rl.adapter_names:
            columns |= build_adapter_columns(self.run.rl, trajectories)
        if self._expert_counts is not None:
            self._expert_counts.add(trajectories)
        self.plane.put(columns, indexes)
        metrics = compute_response_metrics(trajectories)
        if self.engine.fell_back_to_eager:
            metrics.add_max("rollout/eager", 1.0)
        return metrics

    def _list_snapshots(self) -> tuple[int, ...]:
        # of each adapter there are the same
        return self.opponents[""].versions if self.opponents else ()

    async def _sample(self, task: Task) -> Trajectory:
        """Generate a response, and show that it is done."""
        trajectory = await self.agents.sample(self.in_process, task)
        self._num_done += 1
        self._num_tokens += len(trajectory.token_ids)
        heartbeat.count(self._num_done, self._num_started, "samples", self._num_tokens)
        return trajectory

    def continue_responses(self, responses: Sequence[PartialResponse], num_tokens: int) -> list[Generated] | None:
        """Continue every n-th response, from this replica's index on, by up to `num_tokens` tokens.

        Returns:
            The responses; those that may be continued are "aborted". None on ranks that return no results.
        """
        max_tokens = self.engine.sampling.max_tokens

        async def continue_response(response: PartialResponse) -> Generated:
            length = 0 if response.partial is None else len(response.partial.token_ids)
            limit = min(max_tokens, length + num_tokens)
            sampling = replace(self.engine.sampling, max_tokens=limit, images=response.images)
            generated = await self.in_process.generate(response.prompt_ids, sampling, response.seed, response.partial)
            is_partial = generated.finish == "length" and len(generated.token_ids) == limit < max_tokens
            return replace(generated, finish="aborted") if is_partial else generated

        async def continue_all() -> list[Generated]:
            return list(await asyncio.gather(*map(continue_response, responses[self.replica :: self.num_replicas])))

        return self.in_process.run(continue_all)

    def generate_responses(
        self, items: Sequence[PromptItem], seed: int, evaluation: EvaluationSampling
    ) -> list[Trajectory] | None:
        """Generate every n-th response, from this replica's index on; None on ranks that return no results.

        Args:
            items: the prompts.
            seed: the seeds of the samples are derived from it.
            evaluation: temperature and number of responses to each prompt.
        """
        tasks = build_item_tasks(
            items, self.engine.sampling, seed, evaluation, self.run.rl.opponents, self._list_snapshots()
        )[self.replica :: self.num_replicas]

        async def generate_all() -> list[Trajectory]:
            trajectories = await asyncio.gather(*(self.agents.sample(self.in_process, task) for task in tasks))
            # no update reads these, and routing would be most of the transfer
            return [trajectory.drop_routing() for trajectory in trajectories]

        return self.in_process.run(generate_all)


def _make_group(groups: Sequence[Sequence[int]]) -> dist.ProcessGroup:
    """Return the group of this rank; collective over the world."""
    # gloo on every platform: its messages are commands, which are in host memory
    made = [dist.new_group(list(ranks), backend="gloo") for ranks in groups]
    (own,) = [group for ranks, group in zip(groups, made) if dist.get_rank() in ranks]
    assert isinstance(own, dist.ProcessGroup)  # an int for groups of others
    return own
