"""One device's worker of a run that trains with Megatron and generates with vLLM: both share the device in time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path

from mindspeed_rl.adaptors import vllm_drafts
from mindspeed_rl.data.prompts import PromptItem
from mindspeed_rl.dataplane.client import DataPlane
from mindspeed_rl.observability.metrics import Metrics
from mindspeed_rl.resharding.adapters import AdapterFolder
from mindspeed_rl.rollout.protocol import Generated, PartialResponse
from mindspeed_rl.rollout.requests import EvaluationSampling
from mindspeed_rl.rollout.trajectory import Trajectory
from mindspeed_rl.run import Run
from mindspeed_rl.run.phases import Phases
from mindspeed_rl.runtime.reports import WorkerReport, add_drafts
from mindspeed_rl.workers.opponent_pool import OpponentPool
from mindspeed_rl.workers.rollout_replica import RolloutReplica
from mindspeed_rl.workers.trainer_worker import ActorPhases


class ActorWorker(ActorPhases):
    """Actor, reference, critic, reward model and rollout engine of one rank."""

    def __init__(self, run: Run, plane: DataPlane, run_id: str, *, rank: int) -> None:
        """Join the training world, build all roles and the rollout engine.

        Args:
            run: the resolved run.
            plane: where rows come from.
            run_id: unique to the run and equal on all its ranks.
            rank: rank of this process.
        """
        super().__init__(run, rank)
        # offloads the models: vLLM does not start on a device that has less free memory than its part
        self._build(plane)
        self.rollout = RolloutReplica(run, plane, self.tokenizer, run_id)
        self._adapters = self._build_adapter_folders() if run.generate.lora_push == "adapter" else {}
        if run.rl.opponents.roles:
            self.rollout.opponents = self._build_opponents()
        self.actor.restore_random()

    def _build_adapter_folders(self) -> dict[str, AdapterFolder]:
        """Return the folders of the adapters by their names in the engine, "" for the actor's only or first one."""
        adapters, base, turns = self.actor.require_adapters(), str(self.source.hf_folder), self.actor.turns
        if turns is None:
            return {"": AdapterFolder(adapters, base)}
        folders = {name: AdapterFolder(adapters, base, prepare=partial(turns.use, name)) for name in turns.names}
        return {"": folders.pop(turns.names[0]), **folders}

    def _build_opponents(self) -> dict[str, OpponentPool]:
        """Return the snapshots that the run has now, by the names of their adapters in the engine."""
        keys, save, names = self.run.rl.opponents, self.run.config.actor_config.save, self.run.rl.adapter_names or ("",)
        pools = {name: OpponentPool(keys, save, self.actor.engine.device, adapter=name) for name in names}
        if iteration := self.resumed_state().get("iteration", 0):
            for pool in pools.values():
                pool.restore(Path(self.source.weights), iteration)
        return {"": pools.pop(names[0]), **pools}

    def resident_bytes(self) -> Mapping[str, int]:
        """Return the bytes that are on the device now, by owner in the planner's words."""
        return {**super().resident_bytes(), **self.rollout.engine.resident_bytes()}

    def absent_bytes(self) -> int:
        """Return the bytes of a sleeping engine, which the device's allocator counts although they are not there."""
        return self.rollout.engine.absent_bytes()

    # ------------------------------------------------------------------ weights

    def push_weights(self, version: int, average: bool = False) -> WorkerReport:
        """Give the rollout engine the actor's weights, with proof; training state is offloaded as the run file sets it.

        Args:
            version: version of the weights.
            average: give it the moving average of the weights, for an evaluation.
        """
        metrics = Metrics()
        with self.phase(Phases.PUSH_WEIGHTS, metrics):
            num_proven = self._load_engine(version, average=average)
        self.memory.measure_residue("weight_sync", metrics)
        self.rollout.add_push(metrics, self._adapters.values())
        metrics.add_min("rollout/proven_parameters", num_proven)
        metrics.add_max("rollout/weight_version", version)
        return self._report(metrics)

    def _load_engine(self, version: int, *, average: bool = False) -> int:
        """Swap the device to the engine, with the actor's weights; returns how many parameters were proven to have arrived.

        Training state is offloaded before the engine's weights are loaded: a device may not have room for both.
        """
        # the actor's weights stay: they are sent to the engine
        self.offload_all(actor_weights=False)
        self.actor.offloader.onload(params=True)
        with self.memory.exchange():
            self.rollout.engine.restore_memory("weights")
        with self.actor.averaged() if average else nullcontext():
            num_proven = self.rollout.load(self.actor.stream, version, self._adapters, is_average=average)
        self.offload_all()
        # only now: the actor's weights were in the memory of the cache
        with self.memory.exchange():
            self.rollout.engine.restore_memory("cache")
        return num_proven

    # ------------------------------------------------------------------ responses

    def generate(self, rollout_index: int) -> WorkerReport:
        """Generate a response for each of this replica's rows."""
        metrics = Metrics()
        with self.phase(Phases.GENERATE, metrics, self.rollout):
            metrics.merge(self.rollout.generate(rollout_index))
        return self._report_generation(metrics)

    def continue_responses(
        self, responses: Sequence[PartialResponse], num_tokens: int
    ) -> tuple[WorkerReport, list[Generated] | None]:
        """Continue this replica's share of the responses; see `RolloutReplica.continue_responses`."""
        metrics = Metrics()
        with self.phase(Phases.CONTINUE_RESPONSES, metrics, self.rollout):
            continued = self.rollout.continue_responses(responses, num_tokens)
        return self._report_generation(metrics), continued

    def _report_generation(self, metrics: Metrics) -> WorkerReport:
        metrics.add_max("memory/generate_gib", self.memory.allocated_gib)
        add_drafts(metrics, *vllm_drafts.counts.take())
        return self._report(metrics)

    def finish_rollout(self) -> WorkerReport:
        """Give the engine's memory to training, where the device is short of it: this iteration's responses are complete."""
        swaps, metrics = self.rollout.swaps_memory, Metrics()
        with self.phase(Phases.FINISH_ROLLOUT, Metrics(), self.rollout, timed=swaps):
            if swaps:
                with self.memory.exchange():
                    self.rollout.engine.release_memory()
        self.memory.measure_residue("sleep" if swaps else "rollout", metrics)
        return self._report(metrics)

    def restore_rollout(self) -> WorkerReport:
        """Give the engine its memory and the weights that it had, after `finish_rollout` in the middle of a rollout."""
        metrics = Metrics()
        if self.rollout.swaps_memory:
            self._load_engine(self.rollout.engine.weight_version)
            self.memory.measure_residue("wake_up", metrics)
        return self._report(metrics)

    def generate_responses(
        self, items: Sequence[PromptItem], seed: int, evaluation: EvaluationSampling
    ) -> list[Trajectory] | None:
        """Generate this replica's share of the responses to prompts; see `RolloutReplica.generate_responses`."""
        responses = self.rollout.generate_responses(items, seed, evaluation)
        # they are no part of a rollout, whose drafts are counted next
        vllm_drafts.counts.take()
        return responses

    # ------------------------------------------------------------------ checkpoints

    def _save_roles(self, iteration: int, run_state: dict[str, object], *, release: bool = False) -> None:
        # background saves still read the state that would be offloaded
        if not self.rollout.swaps_memory or any(role.config.async_save for role in self._saved_roles()):
            super()._save_roles(iteration, run_state)
            return
        # the models need the engine's memory; the engine is loaded again at the end
        with self.memory.exchange():
            self.rollout.engine.release_memory()
        super()._save_roles(iteration, run_state, release=True)
        self._load_engine(self.rollout.engine.weight_version)

    def finish(self) -> WorkerReport:
        """Wait for background saves, and end the tools."""
        self.rollout.in_process.run_without_steps(self.rollout.agents.close)
        return super().finish()
