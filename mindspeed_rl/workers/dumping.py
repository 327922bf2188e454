"""Accuracy dumps of a worker's phases, in the iterations and of the roles that `msprobe_config` names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist
from megatron.core import parallel_state

from mindspeed_rl.config import MsprobeConfig
from mindspeed_rl.dumps.record import RECORDS, Record
from mindspeed_rl.engine.probe import ModelProbe
from mindspeed_rl.rollout.engine_probe import EngineProbe
from mindspeed_rl.run.phases import Phase, Phases
from mindspeed_rl.workers.device_worker import LossObserver
from mindspeed_rl.workers.roles import Role

if TYPE_CHECKING:  # it imports vLLM, and workers without a rollout dump too
    from mindspeed_rl.workers.rollout_replica import RolloutReplica


def _get_coordinates() -> tuple[dict[str, int], dict[str, int]]:
    """Return this rank's index on each axis of the training layout, and the number of ranks of each axis."""
    state = parallel_state
    indices = {
        "rank": dist.get_rank(),
        "tp": state.get_tensor_model_parallel_rank(),
        "pp": state.get_pipeline_model_parallel_rank(),
        "dp": state.get_data_parallel_rank(),
        "cp": state.get_context_parallel_rank(),
        "ep": state.get_expert_model_parallel_rank(),
    }
    sizes = {
        "rank": dist.get_world_size(),
        "tp": state.get_tensor_model_parallel_world_size(),
        "pp": state.get_pipeline_model_parallel_world_size(),
        "dp": state.get_data_parallel_world_size(),
        "cp": state.get_context_parallel_world_size(),
        "ep": state.get_expert_model_parallel_world_size(),
    }
    return indices, sizes


class PhaseDumps:
    """Dumps phases of one rank; it is a hook of `DeviceWorker`.

    A dump is in `<dump_path>/step_<iteration>/<role>_<phase>/rank_<rank>/`; iterations are counted from 0. Phases that a
    worker runs once in each iteration are counted here; the others pass the index of their iteration.
    """

    def __init__(self, config: MsprobeConfig, first_iteration: int) -> None:
        """Keep the settings.

        Args:
            config: the group of the run file.
            first_iteration: index of the first iteration of this process.
        """
        self._config, self._first = config, first_iteration
        self._runs: Counter[str] = Counter()

    @contextmanager
    def __call__(
        self, phase: Phase, target: Role | RolloutReplica | None, iteration: int | None
    ) -> Iterator[LossObserver | None]:
        """Dump what a block computes; yields the observer of its losses, None where nothing is dumped."""
        config, record, modules = self._config, None, False
        if phase == Phases.FINISH_ROLLOUT:
            # responses from now on belong to the next iteration
            self._runs["rollout"] += 1
        elif isinstance(target, Role):
            if phase in (Phases.UPDATE_ACTOR, Phases.TRAIN_STEP):
                modules = config.actor_train_dump
                record = self._record_model("actor", "update", modules or config.key_data_dump, iteration)
            elif phase == Phases.UPDATE_CRITIC:
                modules = config.critic_train_dump
                record = self._record_model("critic", "update", modules or config.key_data_dump, iteration)
            elif phase == Phases.REF_LOG_PROBS:
                modules = config.reference_dump
                record = self._record_model("reference", "forward", modules, iteration)
        elif target is not None and phase in (Phases.GENERATE, Phases.CONTINUE_RESPONSES) and config.actor_infer_dump:
            record = self._record_rollout(target)
        if record is None:
            yield None
        elif isinstance(target, Role):
            with ModelProbe(target.megatron, record, modules=modules).recording() as probe:
                yield probe
            record.write()
        elif target is not None:
            engine = target.engine.get_model()
            with EngineProbe(engine, record, config.token_range_start, config.token_range_end).recording():
                yield None
            record.write()

    def _record_model(self, role: str, phase: str, enabled: bool, iteration: int | None) -> Record | None:
        if iteration is None:
            iteration = self._first + self._runs[f"{role}_{phase}"]
            self._runs[f"{role}_{phase}"] += 1
        return self._record(iteration, role, phase, *_get_coordinates()) if enabled else None

    def _record_rollout(self, replica: RolloutReplica) -> Record | None:
        """Return the record of a rollout, or of one part where the responses of an iteration grow in several."""
        iteration = self._first + self._runs["rollout"]
        part = self._runs[f"rollout {iteration}"]
        self._runs[f"rollout {iteration}"] += 1
        tensor = replica.layout.tensor
        ranks = {"rank": replica.rank, "tp": replica.rank % tensor, "dp": replica.replica}
        sizes = {"rank": replica.num_replicas * tensor, "tp": tensor, "dp": replica.num_replicas}
        return self._record(iteration, "actor", f"rollout_{part}" if part else "rollout", ranks, sizes)

    def _record(self, iteration: int, role: str, phase: str, ranks: dict[str, int], sizes: dict[str, int]) -> Record | None:
        config = self._config
        if not (config.msprobe and config.step_start <= iteration <= config.step_end):
            return None
        max_bytes = int(config.max_dump_gib * 2**30)
        record = RECORDS[config.dump_format]
        return record(Path(config.dump_path), iteration, role, phase, ranks, sizes, config.task == "tensor", max_bytes)
