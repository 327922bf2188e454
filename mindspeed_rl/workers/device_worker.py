"""The base of all device workers: the context of a phase with its timer, memory ledger and hooks, and reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

from mindspeed_rl import platform, registry
from mindspeed_rl.algorithms.interfaces import LossInputs, LossOutput
from mindspeed_rl.config import ProfilerConfig
from mindspeed_rl.observability.metrics import Metrics
from mindspeed_rl.observability.timers import Timers
from mindspeed_rl.platform import ProfileSettings
from mindspeed_rl.run import Run
from mindspeed_rl.run.phases import Phase
from mindspeed_rl.runtime.device_memory import PhaseMemory
from mindspeed_rl.runtime.reports import WorkerReport

if TYPE_CHECKING:
    from mindspeed_rl.workers.roles import Role
    from mindspeed_rl.workers.rollout_replica import RolloutReplica

    _Target = Role | RolloutReplica | None
    #: something extra, such as a profiler, that gives the context of a phase; it takes the arguments of `DeviceWorker.phase`
    _PhaseHook = Callable[[Phase, _Target, int | None], AbstractContextManager["LossObserver | None"]]

_Result = TypeVar("_Result")
_Batch = TypeVar("_Batch")

_LEVELS: dict[str, Literal["none", "0", "1", "2"]] = {"level_none": "none", "level0": "0", "level1": "1", "level2": "2"}


class LossObserver(Protocol):
    """Sees inputs and results of losses; here it leaves the functions of a loss as they are."""

    def inputs(self, function: Callable[[LossInputs], _Result]) -> Callable[[LossInputs], _Result]:
        """Return the function in place of the one that makes a batch of the inputs."""
        return function

    def loss(self, function: Callable[[_Batch], LossOutput]) -> Callable[[_Batch], LossOutput]:
        """Return the function in place of the loss."""
        return function


class _NoObserver(LossObserver):
    """Observer of a run without dumps."""


class DeviceWorker:
    """One rank's models. Subclasses build them and have one method a phase; all are collective over the workers.

    Attributes:
        timers: name the rank in the intervals of a report.
        memory: ledger of the device's memory.
        hooks: surround every phase.
    """

    def __init__(self, run: Run, rank: int, name: str = "rank") -> None:
        self.run, self.rank = run, rank
        self.timers = Timers(worker=f"{name} {rank}")
        self.memory = PhaseMemory(self.resident_bytes, self.absent_bytes)
        self.hooks: list[_PhaseHook] = []

    def resident_bytes(self) -> Mapping[str, int]:
        """Return the bytes that are on the device now, by owner in the planner's words."""
        return {}

    def absent_bytes(self) -> int:
        """Return the bytes of a sleeping engine, which the device's allocator counts although they are not there."""
        return 0

    def add_hooks(self, first_iteration: int) -> None:
        """Make the hooks that the run file enables; a run without hooks imports none.

        Args:
            first_iteration: index of the first iteration of this process.
        """
        self.hooks = []
        profiler, dumps = self.run.config.profiler_config.integrated, self.run.config.msprobe_config
        if profiler.profile or profiler.profile_memory_snapshot:
            self.hooks.append(_PhaseProfiler(profiler, self.run.folder, self.rank))
        if dumps.msprobe:
            self.hooks.append(registry.load("mindspeed_rl.workers.dumping:PhaseDumps", "dumps")(dumps, first_iteration))

    @contextmanager
    def phase(
        self,
        phase: Phase,
        metrics: Metrics,
        target: _Target = None,
        iteration: int | None = None,
        *,
        timed: bool = True,
    ) -> Iterator[LossObserver]:
        """Run a block as a phase; yields the observer of its losses.

        Args:
            phase: the record of the phase.
            metrics: takes the memory of the phase.
            target: model or rollout engine that computes it.
            iteration: index of the iteration, from 0; None in a phase that runs once in each.
            timed: False where the block has intervals of its own, without its waits for rows.
        """
        observer: LossObserver = _NoObserver()
        with ExitStack() as stack:
            for hook in self.hooks:
                observer = stack.enter_context(hook(phase, target, iteration)) or observer
            if timed and phase.timer:
                stack.enter_context(self.timers(phase.timer))
            if phase.memory:
                stack.enter_context(self.memory(phase.memory, phase.transient, metrics))
            yield observer

    def _report(self, metrics: Metrics | None = None) -> WorkerReport:
        return WorkerReport(metrics or Metrics(), self.timers.drain())


class _PhaseProfiler:
    """Profiles phases of one rank: those that `profiler_config.integrated` names, on the ranks and in the runs that it names.

    A trace is in `<profile_save_path>/<stage>_<n>/rank_<rank>/`; n counts the runs of that phase in this process, from 1.
    """

    def __init__(self, config: ProfilerConfig, run_dir: Path, rank: int) -> None:
        """Keep the settings.

        Args:
            config: the group of the run file.
            run_dir: takes the traces, below `profile/`, when `profile_save_path` is empty.
            rank: rank of this process.
        """
        self._config, self._rank = config, rank
        self._folder = Path(config.profile_save_path) if config.profile_save_path else run_dir / "profile"
        self._runs: Counter[str] = Counter()
        self._stages = frozenset([config.stage] if isinstance(config.stage, str) else config.stage)

    @contextmanager
    def __call__(self, phase: Phase, target: object = None, iteration: int | None = None) -> Iterator[None]:
        """Run a block as one run of this phase."""
        stage, config = phase.profiler_stage, self._config
        self._runs[stage] += 1
        first = config.profile_step_start
        if (
            not stage
            or not self._stages & {stage, "all"}
            or not (config.profile_ranks == "all" or self._rank in config.profile_ranks)
            or not first - config.profile_warmup_steps <= self._runs[stage] < config.profile_step_end
        ):
            yield
            return
        warms_up = self._runs[stage] < first
        folder = self._folder / f"{stage}_{self._runs[stage]}" / f"rank_{self._rank}"
        if not warms_up:
            folder.mkdir(parents=True, exist_ok=True)
        settings = ProfileSettings(
            host=config.profile_with_cpu,
            device=config.profile_with_npu,
            memory=config.profile_with_memory,
            shapes=config.profile_record_shapes,
            stacks=config.profile_with_module,
            level=_LEVELS[config.profile_level],
            marks_only=config.mstx,
            export=config.profile_export_type,
            analyse=config.profile_analysis,
            core_counters=config.profile_aic_metrics,
            l2_cache=config.profile_l2_cache,
            discards=warms_up,
        )
        with ExitStack() as recorders:
            if config.profile:
                recorders.enter_context(platform.current().profile(str(folder), settings))
            if config.profile_memory_snapshot and not warms_up:
                recorders.enter_context(platform.current().record_allocations(folder / "memory_snapshot.pickle"))
            yield
