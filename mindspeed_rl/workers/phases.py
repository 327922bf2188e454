"""What a worker does in each phase of an iteration, on this rank's models and engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_rl import platform
from mindspeed_rl.config import BatchPlan, MegatronConfig, RunConfig
from mindspeed_rl.dataplane.client import DataPlane
from mindspeed_rl.observability.metrics import Metrics
from mindspeed_rl.observability.timers import Timers
from mindspeed_rl.workers.integrated import UpdateOrder
from mindspeed_rl.workers.model_source import ModelSource, find_model
from mindspeed_rl.workers.order import share_of
from mindspeed_rl.workers.world import join_world, prepare_process


class Phases:
    """The roles of this rank and the phases of an iteration. Every public method is collective over the workers."""

    def __init__(self, cfg: RunConfig, plan: BatchPlan, plane: DataPlane, timers: Timers, *, run_id: str) -> None:
        prepare_process(cfg)
        from mindspeed_rl.engine import parallel
        from mindspeed_rl.engine.build import plan_model

        self.cfg, self.plan, self.plane, self.timers = cfg, plan, plane, timers
        self.rl, self.generate_config = cfg.rl_config, cfg.generate_config
        source = find_model(cfg.actor_config, "actor_config")
        model_plan = plan_model(cfg.actor_config, source.hf_folder)
        join_world(cfg.actor_config, model_plan)
        self.control = parallel.ControlGroup()
        self.is_source, self.is_output = parallel.is_data_source(), parallel.is_output_source()
        from mindspeed_rl.data.tokenizer import load_tokenizer

        self.tokenizer = load_tokenizer(
            cfg.actor_config.tokenizer_name_or_path or source.hf_folder, use_fast=not cfg.actor_config.tokenizer_not_use_fast
        )
        self._build_roles(source, model_plan)
        self._build_rollout(source, model_plan, run_id)

    # ------------------------------------------------------------------ building

    def _build_roles(self, source: ModelSource, model_plan: Any) -> None:
        from mindspeed_rl.engine.build import plan_model
        from mindspeed_rl.workers.role import Role

        rl = self.rl
        shared = {
            "packed": rl.use_remove_padding,
            "pad_id": self.tokenizer.pad_token_id,
            "temperature": self.generate_config.sampling_config.temperature or 1.0,
        }
        actor_config = self.cfg.actor_config
        self.actor = Role(
            "actor", actor_config, model_plan, source, steps_per_iteration=self.plan.num_optimizer_steps, **shared
        )
        self.resumed = self.actor.resumed
        self.reference = None
        if _needs_reference(self.cfg) and not rl.share_backbone:
            config, ref_source = self._reference_source(source)
            plan = plan_model(config, ref_source.hf_folder)
            self.reference = Role("ref", config, plan, ref_source, steps_per_iteration=None, **shared)
        self.critic = None
        if rl.adv_estimator == "gae":
            config = self.cfg.critic_config
            if config is None:
                raise ValueError(
                    "critic_config: adv_estimator gae needs a critic; add the group with its load, lr and parallel sizes."
                )
            critic_source = find_model(config, "critic_config")
            plan = plan_model(config, critic_source.hf_folder, head="reward")
            self.critic = Role(
                "critic", config, plan, critic_source, steps_per_iteration=self.plan.num_optimizer_steps, **shared
            )

    def _reference_source(self, actor: ModelSource) -> tuple[MegatronConfig, ModelSource]:
        """The reference is what the run file says, else what the actor started from before any resume."""
        import copy

        config = copy.copy(self.cfg.ref_config)
        mode = self.rl.integrated_mode_config
        path = (mode.ref_model_load_path if mode else None) or config.pretrained_checkpoint or config.load
        config.load, config.pretrained_checkpoint, config.finetune = path, None, True
        config.lora_target_modules = None
        return config, find_model(config, "ref_config") if path != str(actor.weights) else actor

    def _build_rollout(self, source: ModelSource, model_plan: Any, run_id: str) -> None:
        from mindspeed_rl.rollout.records import Sampling
        from mindspeed_rl.rollout.vllm_engine import VllmEngine

        network, config = model_plan.network, self.generate_config
        keys = config.sampling_config
        stop = {self.tokenizer.eos_token_id, *_generation_stops(source)}
        sampling = Sampling(
            temperature=keys.temperature,
            max_tokens=keys.max_tokens,
            stop_token_ids=tuple(sorted(stop)),
            top_p=keys.top_p,
            top_k=keys.top_k,
            min_p=keys.min_p,
        )
        bytes_per_value = 2 if config.dtype == "bfloat16" else 4
        self.engine_dtype = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
        self.kv_heads = network.num_query_groups
        self.rollout = VllmEngine(
            source.hf_folder,
            config,
            sampling,
            run_id=run_id,
            kv_bytes_per_token=2 * network.num_layers * network.num_query_groups * network.kv_channels * bytes_per_value,
        )
        infer_tp = config.infer_tensor_parallel_size
        rank = dist.get_rank()
        self.replica, self.replica_rank = divmod(rank, infer_tp)
        self.num_replicas = dist.get_world_size() // infer_tp
        self.infer_group = None
        for first in range(0, dist.get_world_size(), infer_tp):
            group = dist.new_group(list(range(first, first + infer_tp)), backend="gloo")
            if first // infer_tp == self.replica:
                self.infer_group = group

    # ------------------------------------------------------------------ rollout

    def push_weights(self, version: int) -> Metrics:
        """Actor weights -> rollout engine, with proof; then training state leaves the device where the run file says so."""
        from megatron.core import parallel_state

        from mindspeed_rl.resharding.proof import check_delivery, trained_sums

        metrics = Metrics()
        with self.timers("resharding_to_infer"):
            self._onload_actor(params=True)
            self.rollout.restore_weights()
            stream = self.actor.stream
            self.rollout.load_weights(stream.named_tensors(self.engine_dtype), version)
            trained = trained_sums(
                list(stream.local_weights.values()),
                stream.ops,
                self.engine_dtype,
                owns_replica=parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0,
                owns_expert_replica=parallel_state.get_expert_data_parallel_rank() == 0,
            )
            for copy, owner in stream.copies.items():
                trained[copy] = trained[owner]
            proof = check_delivery(
                self.rollout.read_model(),
                trained,
                infer_tp_size=self.generate_config.infer_tensor_parallel_size,
                group=self.infer_group,
                kv_heads=self.kv_heads,
            )
            self._offload_all()
            self.rollout.restore_cache()
        metrics.add_min("rollout/proven_parameters", proof.num_parameters)
        metrics.add_max("rollout/weight_version", version)
        return metrics

    def _offload_all(self) -> None:
        config = self.generate_config
        parts = {
            "optimizer": config.offload_train_optimizer,
            "grads": config.offload_train_grad,
            "params": config.offload_train_param,
        }
        for role in (self.actor, self.critic):
            if role is not None:
                role.offloader.offload(**parts)
        if self.reference is not None:
            self.reference.offloader.offload(params=config.offload_train_param)

    def _onload_actor(self, *, params: bool = False, training: bool = False) -> None:
        self.actor.offloader.onload(params=params or training, grads=training, optimizer=training)

    def generate(self, iteration: int) -> Metrics:
        """Responses for all rows; then the engine's memory goes back to training where the device is short of it."""
        metrics = Metrics()
        with self.timers("rollout"):
            for indexes, batch in self._rollout_batches():
                metrics.merge(self._generate_batch(iteration, indexes, batch))
        if self._releases_engine:
            with self.timers("resharding_to_train"):
                self.rollout.release_memory()
        return metrics

    @property
    def _releases_engine(self) -> bool:
        """Memory is handed back and forth on devices, and on the CPU only when the run file offloads training weights."""
        return platform.current().engine_sleep or self.generate_config.offload_train_param

    def _rollout_batches(self) -> Iterator[tuple[list[int], Any]]:
        """This replica's rows, a dispatch at a time; fetched by its first rank and shared with the others."""
        columns = ["prompt_ids"]
        size = self.plan.dispatch_sizes["actor_rollout_dispatch_size"]
        if self.rl.guarantee_order:
            share = self.plan.num_samples // self.num_replicas
            first = self.replica * share
            for start in range(first, first + share, size):
                rows = list(range(start, min(start + size, first + share)))
                yield (
                    rows,
                    self._share(
                        lambda rows=rows: self.plane.get(
                            "actor_rollout", columns, indexes=rows, timeout_s=self.rl.wait_timeout_s
                        )[0]
                    ),
                )
            return
        while True:
            fetched = self._share(lambda: self.plane.get("actor_rollout", columns, size))
            if fetched[0] is None:
                return
            yield fetched[1], fetched[0]

    def _share(self, fetch: Any) -> Any:
        """What `fetch` returns on the first rank of the replica, on all its ranks."""
        if self.infer_group.size() == 1:
            return fetch()
        box = [fetch() if self.replica_rank == 0 else None]
        dist.broadcast_object_list(box, src=dist.get_rank() - self.replica_rank, group=self.infer_group)
        return box[0]

    def _generate_batch(self, iteration: int, indexes: Sequence[int], batch: Any) -> Metrics:
        from mindspeed_rl.rollout.records import GenerationRequest
        from mindspeed_rl.rollout.seeds import sample_seed

        group = self.plan.n_samples_per_prompt
        base = self.generate_config.sampling_config.seed
        seed = self.cfg.actor_config.seed if base is None else base
        prompts = [ids.to(torch.int64) for ids in batch["prompt_ids"]]
        requests = [
            GenerationRequest(ids.tolist(), sample_seed(seed, iteration, row // group, row % group))
            for row, ids in zip(indexes, prompts)
        ]
        completions = self.rollout.generate(requests)
        metrics = Metrics()
        if self.replica_rank != 0:
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
                "weight_version": [self.rollout.weight_version] * len(responses),
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

    def evaluate(self, prompts: Sequence[list[int]], seed: int) -> list[list[int]] | None:
        """Greedy responses to every num_replicas-th prompt, starting with this replica's number."""
        from mindspeed_rl.rollout.records import GenerationRequest, Sampling

        usual = self.rollout.sampling
        greedy = Sampling(temperature=0.0, max_tokens=usual.max_tokens, stop_token_ids=usual.stop_token_ids)
        requests = [GenerationRequest(list(ids), seed) for ids in prompts[self.replica :: self.num_replicas]]
        completions = self.rollout.generate(requests, greedy) if requests else []
        return [completion.token_ids for completion in completions] if self.replica_rank == 0 else None

    # ------------------------------------------------------------------ training

    def _fetch(self, consumer: str, columns: Sequence[str], rows: Sequence[int]) -> Any:
        """Rows of the data plane on every rank of this model replica; waits for rows that are not ready."""
        batch = None
        if self.is_source:
            batch = self.plane.get(consumer, list(columns), indexes=list(rows), timeout_s=self.rl.wait_timeout_s)[0]
        return self.control.broadcast(batch)

    def _batching(self, role: str) -> Any:
        """Micro-batch limits of "update", "actor" (log-probs) or "ref"."""
        from mindspeed_rl.engine.train_engine import MicroBatching

        rl = self.rl
        size = self.plan.micro_batch_size
        if role == "actor":
            size = rl.actor_forward_micro_batch_size or size
        elif role == "ref":
            size = rl.ref_forward_micro_batch_size or size
        if not rl.use_dynamic_bsz:
            return MicroBatching(size)
        return MicroBatching(size, getattr(rl, f"{role}_max_packing_token_size"), getattr(rl, f"{role}_dynamic_max_batch_size"))

    def _replica_rows(self, count: int) -> list[int]:
        from megatron.core import parallel_state

        return share_of(range(count), parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank())

    def compute_log_probs(self, role: str, count: int) -> Metrics:
        """Log-probs of the actor ("actor") or the reference ("ref") for this replica's rows."""
        if role == "actor":
            return self._forward(self.actor, "actor_log_prob", "old_log_p", "actor", ("old_log_probs", "entropies"), count)
        target = self.reference or self.actor
        with self._adapters_off() if self.rl.share_backbone else torch.no_grad():
            return self._forward(target, "ref_log_prob", "reference_model", "ref", ("ref_log_probs", None), count)

    def compute_values(self, count: int) -> Metrics:
        """The critic's value before each response token."""
        return self._forward(self.critic, "critic_compute_values", "critic_model", "actor", ("values", None), count)

    def _forward(self, role: Any, consumer: str, timer: str, limits: str, names: tuple[str, str | None], count: int) -> Metrics:
        with self.timers(timer):
            role.offloader.onload(params=True)
            rows = self._replica_rows(count)
            size = self.plan.dispatch_sizes["ref_dispatch_size" if role is self.reference else "actor_logprob_dispatch_size"]
            for start in range(0, len(rows), size):
                part = rows[start : start + size]
                batch = self._fetch(consumer, ["input_ids", "prompt_length"], part)
                output = role.engine.forward(self._rows(batch, {}), self._batching(limits))
                if self.is_output:
                    data: dict[str, list[Tensor]] = {names[0]: output[0]}
                    if names[1] is not None:
                        data[names[1]] = output[1]
                    self.plane.put(data, part)
            if role is self.reference:
                role.offloader.offload(params=self.generate_config.offload_train_param)
        return Metrics()

    def _adapters_off(self) -> Any:
        from mindspeed_rl.engine.lora import adapters_disabled

        return adapters_disabled(self.actor.model)

    def update_actor(self, order: UpdateOrder) -> Metrics:
        """All optimizer steps of the iteration on this replica's share of their rows."""
        from dataclasses import replace

        from mindspeed_rl.algorithms.policy_losses import PolicyLossSettings, policy_loss
        from mindspeed_rl.algorithms.records import PolicyBatch

        settings = PolicyLossSettings.from_config(
            self.rl, self.cfg.stage, max_response_length=self.generate_config.sampling_config.max_tokens
        )
        settings = replace(settings, kl_coef=order.kl_coef if order.use_ref_log_probs else 0.0)
        columns = {name: name for name in ("advantages", "rollout_log_probs", "scored_mask", "loss_mask")}
        if order.use_old_log_probs:
            columns["old_log_probs"] = "old_log_probs"
        if order.entropy_threshold is not None:
            columns["old_entropy"] = "entropies"
        if order.use_ref_log_probs:
            columns["ref_log_probs"] = "ref_log_probs"

        def loss(micro_batch: Any, log_probs: Tensor, entropy: Tensor | None) -> Any:
            values = micro_batch.columns
            return policy_loss(
                PolicyBatch(
                    log_probs=log_probs,
                    advantages=values["advantages"],
                    response_mask=values["scored_mask"] & micro_batch.response_mask,
                    loss_mask=values["loss_mask"] & micro_batch.response_mask,
                    old_log_probs=values.get("old_log_probs"),
                    ref_log_probs=values.get("ref_log_probs"),
                    rollout_log_probs=values["rollout_log_probs"],
                    entropy=entropy,
                    old_entropy=values.get("old_entropy"),
                    entropy_threshold=order.entropy_threshold,
                ),
                settings,
            )

        metrics = Metrics()
        with self.timers("update"):
            self._onload_actor(training=True)
            for rows in order.steps:
                batch = self._fetch("actor_train", ["input_ids", "prompt_length", *columns.values()], self._step_rows(rows))
                metrics.merge(self._step(self.actor, self._rows(batch, columns), loss, "actor"))
        return metrics

    def update_critic(self, steps: list[list[int]]) -> Metrics:
        """All steps of the critic on this replica's share of their rows."""
        from mindspeed_rl.algorithms.value_losses import value_loss

        columns = {"returns": "returns", "old_values": "values", "loss_mask": "loss_mask"}

        def loss(micro_batch: Any, values: Tensor, unused: Tensor | None) -> Any:
            given = micro_batch.columns
            mask = given["loss_mask"] & micro_batch.response_mask
            return value_loss(
                values, given["returns"], mask, old_values=given["old_values"], clip_range=self.rl.cliprange_value
            )

        metrics = Metrics()
        with self.timers("update_critic"):
            self.critic.offloader.onload(params=True, grads=True, optimizer=True)
            for rows in steps:
                batch = self._fetch("critic_train", ["input_ids", "prompt_length", *columns.values()], self._step_rows(rows))
                metrics.merge(self._step(self.critic, self._rows(batch, columns), loss, "critic"))
        return metrics

    def _rows(self, batch: Any, columns: dict[str, str]) -> Any:
        from mindspeed_rl.workers.rows import to_rows

        return to_rows(batch, columns)

    def _step_rows(self, rows: Sequence[int]) -> list[int]:
        """This replica's share of a step's rows, balanced by tokens where the run file asks for it."""
        from megatron.core import parallel_state

        size, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
        lengths = None
        if self.rl.use_dp_batch_balance and size > 1:
            batch = self._fetch("actor_train", ["prompt_length", "response_length"], rows)
            lengths = [int(p) + int(r) for p, r in zip(batch["prompt_length"], batch["response_length"])]
        return share_of(rows, size, rank, lengths)

    def _step(self, role: Any, rows: Any, loss: Any, name: str) -> Metrics:
        result = role.engine.step(rows, self._batching("update"), loss)
        metrics = Metrics()
        metrics.merge(result.metrics)
        if dist.get_rank() == 0:
            metrics.add_mean(f"{name}/grad_norm", result.grad_norm)
            metrics.add_last(f"{name}/lr", result.lr)
        return metrics

    @torch.no_grad()
    def sync_reference(self, alpha: float) -> Metrics:
        """ref <- alpha * actor + (1 - alpha) * ref, weight by weight; the actor's adapters are merged."""
        self._onload_actor(params=True)
        self.reference.offloader.onload(params=True)
        for name, weight in self.reference.stream.local_weights.items():
            weight.tensor.lerp_(self.actor.stream.local_weights[name].value(), alpha)
        return Metrics()

    # ------------------------------------------------------------------ saving

    def save(self, iteration: int, run_state: dict[str, Any]) -> Metrics:
        """Checkpoints of the actor and the critic."""
        with self.timers("save"):
            self._onload_actor(training=True)
            self.actor.save(iteration, run_state)
            if self.critic is not None:
                self.critic.offloader.onload(params=True, grads=True, optimizer=True)
                self.critic.save(iteration, run_state)
        return Metrics()

    def finish(self) -> Metrics:
        """Waits for background saves."""
        for role in (self.actor, self.critic):
            if role is not None:
                role.finish_saves()
        return Metrics()


def _needs_reference(cfg: RunConfig) -> bool:
    """True when the KL to a reference model enters loss or reward."""
    from mindspeed_rl.algorithms.kl import kl_coefficient

    return kl_coefficient(cfg.rl_config) != 0.0 and (cfg.stage == "ray_grpo" or cfg.rl_config.use_kl_in_reward)


def _generation_stops(source: ModelSource) -> list[int]:
    """End tokens that generation_config.json names."""
    import json

    path = source.hf_folder / "generation_config.json"
    stops = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
    return [] if stops is None else stops if isinstance(stops, list) else [stops]
