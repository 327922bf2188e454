"""Accuracy dumps of a worker's phases, in the iterations and of the roles that `msprobe_config` names."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from mindspeed_rl.config import MsprobeConfig
from mindspeed_rl.dumps.record import Record
from mindspeed_rl.engine.probe import ModelProbe, NoProbe, place
from mindspeed_rl.rollout.engine_probe import EngineProbe
from mindspeed_rl.workers.role import Role

if TYPE_CHECKING:  # it brings vLLM, and workers without a rollout dump too
    from mindspeed_rl.workers.rollout import RolloutReplica


class PhaseDumps:
    """Dumps phases of one rank; does nothing where the run file does not ask for it.

    A dump lies in `<dump_path>/step_<iteration>/<role>_<phase>/rank_<rank>/`; iterations are counted from 0. Phases that a
    worker runs once an iteration are counted here, so that they need not be told their iteration.
    """

    def __init__(self, config: MsprobeConfig, first: int) -> None:
        """
        Args:
            first: number of the first iteration of this process.
        """
        self._config, self._first = config, first
        self._runs: Counter[str] = Counter()

    def update(self, name: str, role: Role, step: int | None = None) -> contextlib.AbstractContextManager[NoProbe]:
        """The block is the update of this role ("actor" or "critic"); its losses are to be wrapped by what it yields.

        Args:
            step: the iteration; None where the role is updated once in each.
        """
        step = self._count(f"{name}_update") if step is None else step
        config = self._config
        modules = config.actor_train_dump if name == "actor" else config.critic_train_dump
        return self._of_model(step, name, "update", role, modules, losses=modules or config.key_data_dump)

    def reference(self, role: Role) -> contextlib.AbstractContextManager[NoProbe]:
        """The block is the reference's pass of an iteration."""
        wanted = self._config.reference_dump
        return self._of_model(self._count("reference"), "reference", "forward", role, wanted, losses=wanted)

    @contextlib.contextmanager
    def rollout(self, replica: RolloutReplica) -> Iterator[None]:
        """The block generates for an iteration, all or a part of it; `end_rollout` is called behind the last part."""
        step, config = self._first + self._runs["rollout"], self._config
        if not config.actor_infer_dump or not self._wants(step):
            yield
            return
        part = self._runs[f"rollout {step}"]
        self._runs[f"rollout {step}"] += 1
        tensor = replica.layout.tensor
        numbers = {"rank": replica.rank, "tp": replica.rank % tensor, "dp": replica.replica}
        sizes = {"rank": replica.num_replicas * tensor, "tp": tensor, "dp": replica.num_replicas}
        record = self._record(step, "actor", "rollout" if not part else f"rollout_{part}", numbers, sizes)
        probe = EngineProbe(replica.engine.read_model(), record, config.token_range_start, config.token_range_end)
        with probe.recording():
            yield
        record.write()

    def end_rollout(self) -> None:
        """What is generated from now on belongs to the next iteration."""
        self._runs["rollout"] += 1

    def _count(self, phase: str) -> int:
        self._runs[phase] += 1
        return self._first + self._runs[phase] - 1

    def _wants(self, step: int) -> bool:
        return self._config.msprobe and self._config.step_start <= step <= self._config.step_end

    @contextlib.contextmanager
    def _of_model(self, step: int, name: str, phase: str, role: Role, modules: bool, *, losses: bool) -> Iterator[NoProbe]:
        if not losses or not self._wants(step):
            yield NoProbe()
            return
        numbers, sizes = place()
        record = self._record(step, name, phase, numbers, sizes)
        with ModelProbe(role.engine, record, modules=modules).recording() as probe:
            yield probe
        record.write()

    def _record(self, step: int, role: str, phase: str, numbers: dict[str, int], sizes: dict[str, int]) -> Record:
        config = self._config
        most_bytes = int(config.max_dump_gib * 2**30)
        return Record(Path(config.dump_path), step, role, phase, numbers, sizes, config.task == "tensor", most_bytes)
