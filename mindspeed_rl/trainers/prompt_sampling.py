"""The order of prompts where it depends on their source, their difficulty, or on how often their responses pass.

Everything is a function of the seed and of what was observed, so a run that resumes samples as the uninterrupted one.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mindspeed_rl.config import RLConfig
from mindspeed_rl.data.datasets import BatchSampler
from mindspeed_rl.data.prompts import PromptDataset

#: assignments that are remembered, at least: more than the prompts that are on their way to training
_REMEMBERED = 4096
#: keys of levels, the last ones of a PromptOrder
_NUM_LEVEL_KEYS = 3


@dataclass(frozen=True)
class PromptOrder:
    """The keys of rl_config that set the order of prompts."""

    prompt_sources: list[str]
    prompt_source_weights: list[float]
    prompt_source_key: str
    prompt_curriculum: str | None
    prompt_replay_fraction: float | None
    prompt_replay_below: float
    prompt_skip_above: float | None
    prompt_skip_below: float | None
    prompt_pass_reward: float
    prompt_level_key: str | None
    prompt_level_pass_rate: float
    prompt_level_prompts: int

    @classmethod
    def from_config(cls, rl: RLConfig) -> PromptOrder:
        """Return the keys of a run file."""
        return cls(**{field.name: getattr(rl, field.name) for field in dataclasses.fields(cls)})

    def describe(self) -> list[int]:
        """Return a number that differs for other keys; nothing where none of them changes the order."""
        values = dataclasses.astuple(self)
        if self.prompt_level_key is None:
            values = values[:-_NUM_LEVEL_KEYS]  # as they were before there were levels
        is_set = self.prompt_sources or self.prompt_curriculum is not None or self.prompt_replay_fraction is not None
        is_set = is_set or self.prompt_skip_above is not None or self.prompt_skip_below is not None
        is_set = is_set or self.prompt_level_key is not None
        return [zlib.crc32(repr(values).encode())] if is_set else []


class _Stream:
    """The prompts of a source, again and again: the first pass from easy to hard where difficulties are known."""

    def __init__(self, rows: np.ndarray, easiness: np.ndarray | None, weight: float, *, seed: int, shuffle: bool) -> None:
        self.weight, self.position, self.num_taken = weight, 0, 0
        self._rows, self._easiness = rows, easiness
        self._sampler = BatchSampler(len(rows), seed=seed, shuffle=shuffle)
        self._order: tuple[int, np.ndarray] = (-1, rows)

    def next_row(self) -> int:
        """Return the next row, and move on."""
        epoch, place = divmod(self.position, len(self._rows))
        if self._order[0] != epoch:
            order = self._sampler.permute(epoch)
            if epoch == 0 and self._easiness is not None:
                order = order[np.argsort(-self._easiness[order], kind="stable")]
            self._order = epoch, self._rows[order]
        self.position += 1
        return int(self._order[1][place])


class _Levels:
    """The levels of prompts: those up to the highest open one train, and the next one opens when its prompts pass.

    Args:
        values: level of each row.
        pass_rate: mean of the pass rates of the last `window` prompts of the highest open level from which on the next opens.
    """

    def __init__(self, values: np.ndarray, pass_rate: float, window: int) -> None:
        self._steps, self._indexes = np.unique(values, return_inverse=True)
        self._pass_rate = pass_rate
        self._highest = 0
        self._rates: deque[float] = deque(maxlen=window)

    @property
    def num_open(self) -> int:
        """Number of open levels."""
        return self._highest + 1

    def is_open(self, row: int) -> bool:
        """Return True where the prompt of a row may be sampled."""
        return bool(self._indexes[row] <= self._highest)

    def are_open(self, rows: np.ndarray) -> bool:
        """Return True where one of these rows may be sampled."""
        return bool((self._indexes[rows] <= self._highest).any())

    def observe(self, row: int, rate: float) -> None:
        """Take note of a pass rate, and open the next level where it is time."""
        if self._indexes[row] != self._highest:
            return
        self._rates.append(rate)
        is_full = len(self._rates) == self._rates.maxlen
        if is_full and self.num_open < len(self._steps) and sum(self._rates) / len(self._rates) >= self._pass_rate:
            self._highest += 1
            self._rates.clear()

    def state_dict(self) -> dict[str, object]:
        """Return the state as plain values."""
        return {"highest": self._highest, "rates": list(self._rates)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken."""
        self._highest = state["highest"]
        self._rates = deque(state["rates"], maxlen=self._rates.maxlen)


class PromptSampler:
    """Assign a row of the dataset to each index of a prompt, in the order of indexes.

    Sources get their shares to within one prompt at any time. A prompt with a pass rate outside of `prompt_skip_below` to
    `prompt_skip_above` is passed over once, and then tried again. A fraction of the indexes replays prompts with a pass rate
    below `prompt_replay_below`, each once for every time that it was measured. Prompts of a level that is not open yet wait.
    """

    def __init__(self, order: PromptOrder, prompts: PromptDataset, *, seed: int, shuffle: bool) -> None:
        """Read the columns of the prompts.

        Raises:
            ValueError: a prompt has no such column, a source without a weight or a pass rate that is not a number.
        """
        self._keys, self._num_rows = order, len(prompts)
        easiness = None
        if (column := order.prompt_curriculum) is not None:
            easiness = _read_numbers(prompts, "prompt_curriculum", column, "pass rate")
        self._levels: _Levels | None = None
        if (column := order.prompt_level_key) is not None:
            values = _read_numbers(prompts, "prompt_level_key", column, "level")
            self._levels = _Levels(values, order.prompt_level_pass_rate, order.prompt_level_prompts)
        names = np.array([_read_source(order, prompts, index) for index in range(len(prompts))])
        pairs = zip(order.prompt_sources, order.prompt_source_weights, strict=True) if order.prompt_sources else [("", 1.0)]
        self._streams = []
        for name, weight in pairs:
            rows = np.flatnonzero(names == name)
            if not len(rows):
                raise ValueError(f"rl_config.prompt_sources: no prompt has {name!r} in column {order.prompt_source_key}.")
            if self._levels is not None and not self._levels.are_open(rows):
                raise ValueError(f"rl_config.prompt_level_key: source {name!r} has no prompt of the lowest level.")
            values = None if easiness is None else easiness[rows]
            # the order within a source does not depend on the others
            mixed = seed if not name else seed + zlib.crc32(name.encode())
            self._streams.append(_Stream(rows, values, weight, seed=mixed, shuffle=shuffle))
        self._total_weight = sum(stream.weight for stream in self._streams)
        self._next = 0
        self._assigned: dict[int, int] = {}
        self._rates: dict[int, float] = {}
        self._hard: dict[int, None] = {}  # in the order in which they were measured
        self._counts = {"replayed": 0, "skipped": 0}

    def row(self, index: int) -> int:
        """Return the row of an index: the next one, or one of those before it."""
        while self._next <= index:
            self._assigned[self._next] = self._take()
            self._assigned.pop(self._next - max(_REMEMBERED, 2 * self._num_rows), None)
            self._next += 1
        return self._assigned[index]

    def _take(self) -> int:
        fraction = self._keys.prompt_replay_fraction or 0.0
        if self._hard and math.floor((self._next + 1) * fraction) > math.floor(self._next * fraction):
            row = next(iter(self._hard))
            self._counts["replayed"] += 1
        else:
            taken = sum(stream.num_taken for stream in self._streams) + 1
            # the source that is farthest below its share
            lags = [stream.weight / self._total_weight * taken - stream.num_taken for stream in self._streams]
            stream = self._streams[lags.index(max(lags))]
            row = self._next_row(stream)
            stream.num_taken += 1
        self._hard.pop(row, None)
        return row

    def _next_row(self, stream: _Stream) -> int:
        """Return the next row of a source that is neither skipped nor of a level that is not open."""
        while True:
            row = stream.next_row()
            if self._levels is not None and not self._levels.is_open(row):
                continue
            if not self._is_skipped(row):
                return row
            self._counts["skipped"] += 1
            del self._rates[row]

    def _is_skipped(self, row: int) -> bool:
        low, high = self._keys.prompt_skip_below, self._keys.prompt_skip_above
        rate = self._rates.get(row)
        return rate is not None and ((low is not None and rate <= low) or (high is not None and rate >= high))

    def observe(self, indexes: Sequence[int], rewards: Sequence[Sequence[float]]) -> None:
        """Take note of the total rewards of the responses to these prompts; NaN where a response has none."""
        for index, values in zip(indexes, rewards, strict=True):
            scored = [value >= self._keys.prompt_pass_reward for value in values if not math.isnan(value)]
            row = self._assigned.get(index)
            if row is None or not scored:
                continue
            rate = self._rates[row] = sum(scored) / len(scored)
            if self._levels is not None:
                self._levels.observe(row, rate)
            self._hard.pop(row, None)
            if self._keys.prompt_replay_fraction and rate < self._keys.prompt_replay_below:
                self._hard[row] = None

    def count(self) -> dict[str, int]:
        """Return how many prompts were replayed and passed over since the last call, and how many wait to be replayed.

        With levels also how many are open.
        """
        counts = self._counts | {"hard": len(self._hard)}
        if self._levels is not None:
            counts["open_levels"] = self._levels.num_open
        self._counts = dict.fromkeys(self._counts, 0)
        return counts

    def state_dict(self) -> dict[str, object]:
        """Return the state as plain values."""
        levels = {} if self._levels is None else {"levels": self._levels.state_dict()}
        return levels | {
            "next": self._next,
            "streams": [[stream.position, stream.num_taken] for stream in self._streams],
            "assigned": [list(pair) for pair in self._assigned.items()],
            "rates": [list(pair) for pair in self._rates.items()],
            "hard": list(self._hard),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken."""
        self._next = state["next"]
        for stream, (position, taken) in zip(self._streams, state["streams"], strict=True):
            stream.position, stream.num_taken = position, taken
        self._assigned, self._rates = dict(state["assigned"]), dict(state["rates"])
        self._hard = dict.fromkeys(state["hard"])
        if self._levels is not None:
            self._levels.load_state_dict(state["levels"])


def build_prompt_sampler(order: PromptOrder, prompts: PromptDataset, *, seed: int, shuffle: bool) -> PromptSampler | None:
    """Build the sampler that the run file asks for; None for prompts in the order of the dataset or shuffled.

    Raises:
        ValueError: see `PromptSampler`.
    """
    return PromptSampler(order, prompts, seed=seed, shuffle=shuffle) if order.describe() else None


def _read_source(order: PromptOrder, prompts: PromptDataset, index: int) -> str:
    if not order.prompt_sources:
        return ""
    value = str(prompts[index]["columns"].get(order.prompt_source_key))
    if value not in order.prompt_sources:
        raise ValueError(
            f"rl_config.prompt_sources: {prompts.where(index)} has {value!r} in column {order.prompt_source_key}, which is "
            f"none of {', '.join(order.prompt_sources)}; add it, and make the column one of "
            "megatron_training.dataset_additional_keys."
        )
    return value


def _read_numbers(prompts: PromptDataset, key: str, column: str, meaning: str) -> np.ndarray:
    """Return the numbers in a column.

    Raises:
        ValueError: a row has none; the message has the key and the meaning of its numbers.
    """
    return np.array([_read_number(prompts, index, key, column, meaning) for index in range(len(prompts))])


def _read_number(prompts: PromptDataset, index: int, key: str, column: str, meaning: str) -> float:
    value = prompts[index]["columns"].get(column)
    try:
        number = float(str(value))
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(
            f"rl_config.{key}: {prompts.where(index)} has {value!r} in column {column}, but a {meaning} is a "
            "number; the column must be one of megatron_training.dataset_additional_keys."
        )
    return number
