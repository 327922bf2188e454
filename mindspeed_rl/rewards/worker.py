"""A worker process: receives jobs from its socket, calls the scorers and sends each value immediately.

The pool measures the time and kills a worker when a call takes too long. The only timer here is the soft limit of async calls,
many of which share a worker and must not be killed together.

A job is {"op": "score", "functions": [indices], "samples": [fields]}: several functions, called in order for every sample, or
one function that scores a batch or is async. The replies are {"op": "value", "sample": i, "function": j,
"value": (parts, notes) | None, "state", "error"}, and finally {"op": "done"}.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from mindspeed_rl.isolation.channel import Channel, Message
from mindspeed_rl.isolation.process import describe, limit_memory
from mindspeed_rl.rewards import REWARDS, swift_plugins
from mindspeed_rl.rewards.samples import RewardSample, RewardSettings
from mindspeed_rl.rewards.scorer import Scorer, ScorerError, Value, import_scorer

_MAX_CHILDREN = 16
#: a line of a plug-in file in ms-swift's form
_IMPORTS_SWIFT = re.compile(r"^\s*(?:from|import)\s+swift\b", re.MULTILINE)


@dataclass(frozen=True)
class Kind:
    """Properties of a scorer by which the pool schedules its calls."""

    batched: bool
    is_async: bool
    timeout_s: float
    is_accuracy: bool


def run_worker(channel: Channel, setup: Message) -> None:
    """Load the scorers and run jobs until the pool closes the socket."""
    os.dup2(2, 1)  # what a function prints must not mix with the result of a command
    limit_memory(setup["memory_bytes"])
    try:
        worker = _Worker(channel, setup)
    except Exception as error:  # noqa: BLE001 (the user's modules may raise anything; the pool raises its own error)
        channel.send({"op": "broken", "error": str(error) if isinstance(error, ValueError) else describe(error)})
        return
    channel.send({"op": "ready", "functions": [vars(kind) for kind in worker.kinds]})
    while (job := channel.receive()) is not None:
        if not worker.serve(job):
            return


def load_plugin(path: str) -> None:
    """Run a plug-in file, once in each process, so that it registers its names.

    Raises:
        ValueError: no such file, or it raises.
    """
    if not Path(path).is_file():
        raise ValueError(f"external_plugins: there is no file '{path}'")
    if _IMPORTS_SWIFT.search(Path(path).read_text(encoding="utf-8", errors="replace")):
        swift_plugins.install()
    name = "reward_plugin_" + "".join(c if c.isalnum() else "_" for c in str(Path(path).resolve()))
    if name in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"external_plugins: '{path}' is not a Python file (*.py)")
    module = importlib.util.module_from_spec(spec)
    # before it runs, because dataclasses and pickle look up their module there
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ValueError(f"external_plugins: '{path}' fails to load: {describe(error, path)}") from error


class _Worker:
    """The scorers of this process."""

    def __init__(self, channel: Channel, setup: Message) -> None:
        self._channel = channel
        self._pid = os.getpid()
        self._settings = RewardSettings.from_message(setup["settings"])
        for path in self._settings.external_plugins:
            load_plugin(path)
        for name, target in setup["targets"].items():  # registered in the pool's process by a module that is not loaded here
            REWARDS.setdefault(name, target)
        self.scorers = [Scorer.build(name, import_scorer(name), self._settings) for name in setup["functions"]]
        self.kinds = [
            Kind(s.batched, s.is_async, s.timeout_s or self._settings.reward_timeout_s, s.is_accuracy) for s in self.scorers
        ]

    def serve(self, job: Message) -> bool:
        """Score one job; return False if this process must end: out of memory, or too many children."""
        samples = [RewardSample(**sample) for sample in job["samples"]]
        scorers = [(index, self.scorers[index]) for index in job["functions"]]
        healthy = True
        if scorers[0][1].batched:
            healthy = self._score_batch(*scorers[0], samples)
        elif scorers[0][1].is_async:
            asyncio.run(self._score_concurrently(*scorers[0], samples))
        else:
            # `all` stops at the first failure for which this process must end
            healthy = all(self._score_sample(*pair, row, sample) for row, sample in enumerate(samples) for pair in scorers)
        if os.getpid() != self._pid:
            os._exit(0)
        healthy = healthy and self._count_children() <= _MAX_CHILDREN
        self._channel.send({"op": "done", "healthy": healthy})
        return healthy

    def _score_sample(self, index: int, scorer: Scorer, row: int, sample: RewardSample) -> bool:
        try:
            value = scorer.to_values(scorer.call([sample], self._settings), 1)[0]
        except Exception as error:  # noqa: BLE001 (any exception of the user's code is a failed score)
            self._send(index, row, error=error)
            return not isinstance(error, MemoryError)
        self._send(index, row, value=value)
        return True

    def _score_batch(self, index: int, scorer: Scorer, samples: list[RewardSample]) -> bool:
        try:
            returned = scorer.call(samples, self._settings)
            if scorer.is_async:
                returned = asyncio.run(asyncio.wait_for(returned, None))
            values = scorer.to_values(returned, len(samples))
        except Exception as error:  # noqa: BLE001 (any exception of the user's code is a failed score)
            for row in range(len(samples)):
                self._send(index, row, error=error)
            return not isinstance(error, MemoryError)
        for row, value in enumerate(values):
            self._send(index, row, value=value)
        return True

    async def _score_concurrently(self, index: int, scorer: Scorer, samples: list[RewardSample]) -> None:
        async def score(row: int, sample: RewardSample) -> None:
            limit_s = self.kinds[index].timeout_s
            try:
                returned = await asyncio.wait_for(scorer.call([sample], self._settings), limit_s)
                value = scorer.to_values(returned, 1)[0]
            except asyncio.TimeoutError as late:  # of this limit, or of one that the function has set itself
                self._send(index, row, state="timeout", text=str(late) or f"took longer than {limit_s:g} s")
            except Exception as error:  # noqa: BLE001 (any exception of the user's code is a failed score)
                self._send(index, row, error=error)
            else:
                self._send(index, row, value=value)

        await asyncio.gather(*(score(row, sample) for row, sample in enumerate(samples)))

    def _send(
        self,
        function: int,
        row: int,
        *,
        value: Value | None = None,
        error: Exception | None = None,
        state: str = "ok",
        text: str = "",
    ) -> None:
        if os.getpid() != self._pid:  # the scorer forked: its copy of this process must not send anything
            os._exit(0)
        if isinstance(error, MemoryError):
            state, text = "memory", "ran out of memory (reward_memory_gib)"
        elif error is not None:
            state, text = "failed", str(error) if isinstance(error, ScorerError) else describe(error)
        self._channel.send({"op": "value", "function": function, "sample": row, "value": value, "state": state, "error": text})

    def _count_children(self) -> int:
        if sys.platform != "linux":
            return 0
        with open(f"/proc/self/task/{os.getpid()}/children") as listing:
            return len(listing.read().split())
