"""Traces of the phases that `profiler_config.integrated` names, on the ranks and in the iterations that it names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from mindspeed_rl import platform
from mindspeed_rl.config import ProfilerConfig
from mindspeed_rl.platform import ProfileSettings

_LEVELS: dict[str, Literal["none", "0", "1", "2"]] = {"level_none": "none", "level0": "0", "level1": "1", "level2": "2"}


class PhaseProfiler:
    """Profiles phases of one rank; does nothing where the run file does not ask for it.

    A trace lies in `<profile_save_path>/<phase>_<n>/rank_<rank>/`; n counts the runs of that phase in this process, from 1.
    """

    def __init__(self, config: ProfilerConfig, run_dir: Path, rank: int) -> None:
        """
        Args:
            run_dir: takes the traces, below `profile/`, when `profile_save_path` is empty.
        """
        self._config = config
        self._folder = Path(config.profile_save_path) if config.profile_save_path else run_dir / "profile"
        self._rank = rank
        self._runs: Counter[str] = Counter()
        self._phases = frozenset([config.stage] if isinstance(config.stage, str) else config.stage)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """The block is a run of this phase (one of config.diagnostics.PROFILER_STAGES)."""
        self._runs[phase] += 1
        if not self._records(phase):
            yield
            return
        folder = self._folder / f"{phase}_{self._runs[phase]}" / f"rank_{self._rank}"
        folder.mkdir(parents=True, exist_ok=True)
        with platform.current().profile(str(folder), self._settings()):
            yield

    def _records(self, phase: str) -> bool:
        config = self._config
        return (
            config.profile
            and bool(self._phases & {phase, "all"})
            and (config.profile_ranks == "all" or self._rank in config.profile_ranks)
            and config.profile_step_start <= self._runs[phase] < config.profile_step_end
        )

    def _settings(self) -> ProfileSettings:
        config = self._config
        return ProfileSettings(
            host=config.profile_with_cpu,
            device=config.profile_with_npu,
            memory=config.profile_with_memory,
            shapes=config.profile_record_shapes,
            stacks=config.profile_with_module,
            level=_LEVELS[config.profile_level],
            marks_only=config.mstx,
            export=config.profile_export_type,
            analyse=config.profile_analysis,
        )
