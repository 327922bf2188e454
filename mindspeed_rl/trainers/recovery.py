"""A run whose worker dies or hangs goes on from its last checkpoint by itself, where `rl_config.fault_tolerance` says so."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ray.exceptions import RayError

from mindspeed_rl.checkpoint.newest import LATEST_NAME
from mindspeed_rl.config import MegatronConfig, Run
from mindspeed_rl.runtime.futures import WorkerFailed

#: what a fault of a process, a machine or Ray itself looks like to the driver
_FAULTS = (WorkerFailed, TimeoutError, RayError, ConnectionError)


class Recovery:
    """The attempts of a run:

    for run in recovery.attempts():
        with recovery.tolerated(), started(run) as trainer:
            trainer.fit()
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._begun = time.time() - 1.0  # file systems may count in whole seconds
        tolerance = run.fault_tolerance
        self._left = tolerance.max_restarts if tolerance.enabled else 0
        self._last: tuple[int, str] | None = None
        self._has_ended = False

    def attempts(self) -> Iterator[Run]:
        """The run, and again from its last checkpoint after each fault that was tolerated."""
        while not self._has_ended:
            yield self._run

    @contextlib.contextmanager
    def tolerated(self) -> Iterator[None]:
        """A fault in the block leads to another attempt.

        Raises:
            Exception: what was raised in the block, where no attempt is left, or where it came at the same place before.
        """
        try:
            yield
            self._has_ended = True
        except _FAULTS as error:
            iteration = newest_iteration(self._run, self._begun)
            failure = (iteration, str(error).partition("\n")[0])
            # what is wrong in the run itself comes again; deaths and hangs have the same words each time, but not twice in vain
            if not self._left or failure == self._last:
                raise
            self._left, self._last = self._left - 1, failure
            self._run = going_on(self._run, self._begun)
            where = f"after iteration {iteration}" if iteration else "from the beginning"
            said = f"rl_config.fault_tolerance: all workers were ended; the run goes on {where} ({self._left} restarts left)"
            print(f"error: {error}\n{said}", file=sys.stderr, flush=True)


def newest_iteration(run: Run, begun: float) -> int:
    """The last checkpoint that the run can go on from; 0 where it has none.

    Args:
        begun: when the run began, in the seconds of `time.time`; older checkpoints are none of it, unless it went on from them.
    """
    config = run.config.actor_config
    if config.save is None:
        return 0
    latest = Path(config.save, LATEST_NAME)
    if not latest.is_file() or (latest.stat().st_mtime < begun and not _goes_on(config)):
        return 0
    text = latest.read_text(encoding="utf-8").strip()
    return int(text) if text.isdecimal() else 0


def going_on(run: Run, begun: float) -> Run:
    """The run as a user would start it again; itself where the same command goes on, or where there is no checkpoint."""
    config, critic = run.config.actor_config, run.config.critic_config
    if _goes_on(config) or not newest_iteration(run, begun):
        return run
    changed: dict[str, Any] = {}
    for name in ("megatron_training", "actor_config", "ref_config"):
        role = getattr(run.config, name)
        if isinstance(role, MegatronConfig) and role.load == config.load:
            changed[name] = _from_its_save(role, config.save)
    if critic is not None and critic.save is not None:
        changed["critic_config"] = _from_its_save(critic, critic.save)
    return dataclasses.replace(run, config=dataclasses.replace(run.config, **changed))


def _goes_on(config: MegatronConfig) -> bool:
    """True when the same command finds its own checkpoints."""
    return (
        config.load is not None and config.save is not None and Path(config.load) == Path(config.save) and not config.finetune
    )


def _from_its_save(role: MegatronConfig, save: str | None) -> MegatronConfig:
    # what it started from is the reference, and the base weights below adapters
    base = role.pretrained_checkpoint or role.load
    return dataclasses.replace(role, load=save, load_iteration=None, finetune=False, pretrained_checkpoint=base)
