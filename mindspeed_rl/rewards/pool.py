"""A pool of worker processes that score responses; one that hangs, crashes or uses too much memory does not stop the run.

Why not a library (benchmarks/reward_pool.py): pebble 5.2.3 leaves processes behind (a scorer's child; all if it is killed) and
breaks if an idle worker dies; loky 3.7.0 loses the batch to a segfault; Ray 2.60 starts 10 times slower; none limits the memory
of child processes.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Sequence
from types import TracebackType

from mindspeed_rl.config.keys.rl import RLConfig
from mindspeed_rl.loop_thread import LoopThread
from mindspeed_rl.rewards import REWARDS, find
from mindspeed_rl.rewards.dispatcher import Batch, Dispatcher
from mindspeed_rl.rewards.samples import RewardResult, RewardSample, RewardSettings, select_reward_functions

_FAILURE_WINDOW, _FAILURE_MIN_SAMPLES = 1024, 64
_log = logging.getLogger(__name__)


class RewardFailureError(RuntimeError):
    """More samples failed than `reward_failure_limit` allows."""


class RewardPool:
    """Score samples with several functions and add the scores up.

    Use it as a context manager or call `close`. It works in any process and needs neither Ray nor a device; it is not
    thread-safe. Its processes end with the process that created it, even if that is killed.

    Args:
        functions: names in `REWARDS`, `module:function`, or names that a file in `settings.external_plugins` registers.
        weights: one for each function; 1.0 each if not given.
        settings: limits, policy and the parameters of built-in scorers.

    Attributes:
        counters: since the start: samples, each kind of failure, retries, workers_replaced; logged by `close`.

    Raises:
        ValueError: an unknown function, a plug-in that does not load, or not one weight for each function.
    """

    def __init__(self, functions: Sequence[str], weights: Sequence[float] | None = None, *, settings: RewardSettings) -> None:
        self.functions = list(functions)
        self.weights = [1.0] * len(functions) if weights is None else [float(weight) for weight in weights]
        if len(self.weights) != len(functions):
            raise ValueError(f"{len(functions)} reward functions ({', '.join(functions)}) but {len(self.weights)} weights")
        if len(set(functions)) < len(functions):
            raise ValueError(f"a reward function is named twice: {', '.join(functions)}")
        self.settings = settings
        self.counters: Counter[str] = Counter()
        self._recent: deque[bool] = deque(maxlen=_FAILURE_WINDOW)
        self._is_closed = False
        self._dispatcher = Dispatcher(functions, _resolve_targets(functions, settings), settings, self.counters)
        # callers block, and may have a running event loop of their own
        self._loop = LoopThread("reward-pool")
        try:
            self._loop.run(self._dispatcher.start())
        except BaseException:
            self.close()
            raise

    @classmethod
    def from_config(cls, rl: RLConfig, *, max_tokens: int) -> RewardPool:
        """Return the pool that `rl_config` configures; `max_tokens` is the generation limit."""
        functions, weights = select_reward_functions(rl)
        return cls(functions, weights, settings=RewardSettings.from_config(rl, max_tokens=max_tokens))

    def score(self, samples: Sequence[RewardSample], timeout_s: float | None = None) -> list[RewardResult]:
        """Return the results of the samples, in their order.

        Raises:
            RewardFailureError: failures are above `reward_failure_limit`.
            TimeoutError: `timeout_s` seconds were not enough for all of them; the pool may be used again.
            RuntimeError: the pool itself is broken or closed.
        """
        batch = Batch(list(samples))
        self._run(batch, timeout_s)
        results = [batch.result(row, self.functions, self.weights, self.settings) for row in range(len(batch.samples))]
        self._count_failures(results)
        return results

    def check(self, sample: RewardSample) -> RewardResult:
        """Score one sample before training starts and return its result; raise failures instead of counting them.

        Raises:
            ValueError: a function cannot score the sample.
        """
        batch = Batch([sample])
        self._run(batch, None)
        for (_, function), (state, text) in sorted(batch.failures.items()):
            raise ValueError(
                f"reward function '{self.functions[function]}' cannot score a sample of the dataset ({state}): {text}"
            )
        return batch.result(0, self.functions, self.weights, self.settings)

    @property
    def accuracies(self) -> list[str]:
        """Names of the functions that judge whether an answer is right; available after workers have loaded them."""
        return [name for name, kind in zip(self.functions, self._dispatcher.kinds) if kind.is_accuracy]

    def close(self) -> None:
        """End every process of the pool; may be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        self._loop.run(self._dispatcher.close())
        self._loop.close()
        if self.counters:
            _log.info("reward pool: %s", ", ".join(f"{count} {what}" for what, count in self.counters.items()))

    def _run(self, batch: Batch, timeout_s: float | None) -> None:
        if self._is_closed:
            raise RuntimeError("the reward pool is closed")
        self._loop.run(self._dispatcher.run(batch, timeout_s))

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _count_failures(self, results: list[RewardResult]) -> None:
        failures = [result for result in results if result.failed]
        self.counters["samples"] += len(results)
        self.counters.update(result.state for result in failures)
        self._recent.extend(result.failed for result in results)
        rate = sum(self._recent) / max(1, len(self._recent))
        # the rate of few samples means little, unless all samples of a batch failed
        enough = len(self._recent) >= _FAILURE_MIN_SAMPLES or len(failures) == len(results)
        if failures and enough and rate > self.settings.reward_failure_limit:
            states = ", ".join(f"{count} {state}" for state, count in Counter(r.state for r in failures).most_common())
            raise RewardFailureError(
                f"{rate:.0%} of the last {len(self._recent)} samples have no reward, more than rl_config.reward_failure_limit="
                f"{self.settings.reward_failure_limit:g}; in this batch: {states}; "
                f"for example {failures[0].error}"
            )


def _resolve_targets(functions: Sequence[str], settings: RewardSettings) -> dict[str, str]:
    """Return `module:function` for every function that can be resolved before the plug-ins are loaded.

    Raises:
        ValueError: unknown name and no plug-in that may define it, or a function that another process cannot import.
    """
    targets = {}
    for name in functions:
        if name not in REWARDS and settings.external_plugins and ":" not in name:
            continue  # a plug-in may define it; the worker raises if none does
        entry = find(name)
        if isinstance(entry, str):
            targets[name] = entry
            continue
        if entry.__module__ == "__main__" or "<" in entry.__qualname__:
            raise ValueError(
                f"reward function '{name}' is {entry.__module__}.{entry.__qualname__}, which a worker process cannot import; "
                "put it into a module and name it module:function, or into a file given by external_plugins"
            )
        targets[name] = f"{entry.__module__}:{entry.__qualname__}"
    return targets
