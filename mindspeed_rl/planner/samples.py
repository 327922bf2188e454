"""Samples of a run, measured or assumed: lengths, turns, seconds in tools.

Lengths of responses are lognormal, truncated at the limit, as they are in published runs; no random numbers are drawn.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import NormalDist
from typing import ClassVar

from mindspeed_rl.config.run import RunConfig

#: default mean lengths, as fractions of the limits of responses and of prompts
_MEAN_RESPONSE, _MEAN_PROMPT = 0.5, 0.25
_NORMAL = NormalDist()


@dataclass(frozen=True)
class Lengths:
    """Response lengths in tokens.

    Attributes:
        mean: mean of the truncated lengths.
        limit: no response is longer.
        SIGMA: standard deviation of the logarithm of lengths.
    """

    SIGMA: ClassVar[float] = 0.8

    mean: float
    limit: float

    def above(self, length: float) -> float:
        """Return the fraction of responses that are longer than this."""
        if length >= self.limit:
            return 0.0
        if length <= 0 or self.mean >= self.limit:
            return 1.0
        return 1.0 - _NORMAL.cdf(math.log(length / _solve_median(self.mean, self.limit)) / Lengths.SIGMA)

    def max_of(self, count: float) -> float:
        """Return the typical length of the longest of so many responses."""
        if self.mean >= self.limit:
            return self.limit
        fraction = 1.0 - 1.0 / (count + 1.0)
        return min(self.limit, _solve_median(self.mean, self.limit) * math.exp(Lengths.SIGMA * _NORMAL.inv_cdf(fraction)))

    @property
    def mean_square(self) -> float:
        """Mean of the squared length."""
        if self.mean >= self.limit:
            return self.limit**2
        return _moment(_solve_median(self.mean, self.limit), self.limit, 2)


def _moment(median: float, limit: float, power: int) -> float:
    """Return the mean of min(length, limit) ** power."""
    z = math.log(limit / median) / Lengths.SIGMA
    untruncated = median**power * math.exp(power**2 * Lengths.SIGMA**2 / 2)
    return untruncated * _NORMAL.cdf(z - power * Lengths.SIGMA) + limit**power * (1.0 - _NORMAL.cdf(z))


@lru_cache(maxsize=1024)
def _solve_median(mean: float, limit: float) -> float:
    """Return the median at which lengths, truncated at the limit, have this mean."""
    low, high = mean * 1e-3, limit * 1e3
    for _ in range(80):
        middle = math.sqrt(low * high)
        if _moment(middle, limit, 1) < mean:
            low = middle
        else:
            high = middle
    return low


@dataclass(frozen=True)
class SampleMeans:
    """Known means of the samples; None where a mean is not known.

    Attributes:
        response, prompt: tokens; the response's over all turns. In supervised stages `response` is a whole sequence.
        turns: number of turns of the model.
        tool_seconds: that a sample waits for its tools or its environment, over all turns.
    """

    response: float | None = None
    prompt: float | None = None
    turns: float | None = None
    tool_seconds: float | None = None


@dataclass(frozen=True)
class Samples:
    """The samples that a plan assumes.

    Attributes:
        lengths: lengths of responses.
        prompt: mean tokens.
        notes: sentences about the assumed values.
    """

    lengths: Lengths
    prompt: float
    turns: float = 1.0
    tool_seconds: float = 0.0
    notes: tuple[str, ...] = ()

    @property
    def tokens(self) -> float:
        """Mean tokens of a sequence."""
        return self.lengths.mean + self.prompt


def max_response_len(cfg: RunConfig) -> float:
    """Return the maximum number of response tokens after a prompt of the maximum length."""
    rl, generate = cfg.rl_config, cfg.generate_config
    assert rl is not None and generate is not None
    return float(max(1, min(cfg.response_limit, generate.max_model_len - rl.max_prompt_length)))


def assume_samples(cfg: RunConfig, known: SampleMeans) -> Samples:
    """Return the samples of a run, with assumptions for the means that are not known.

    Raises:
        ValueError: a number is out of its bounds, or turns and tools are given for a run that has none.
    """
    rl = cfg.rl_config
    assert rl is not None
    notes, limit = [], max_response_len(cfg)
    mean = _MEAN_RESPONSE * limit if known.response is None else known.response
    if not 0 < mean <= limit:
        raise ValueError(f"--mean-response: {mean:g} must be above 0 and at most the longest response, {limit:g}.")
    if known.response is None:
        notes.append(f"responses of {mean:.0f} tokens in the mean, half of the limit; --mean-response sets it")
    prompt = max(1.0, _MEAN_PROMPT * rl.max_prompt_length) if known.prompt is None else known.prompt
    if not prompt > 0:
        raise ValueError(f"--mean-prompt: {prompt:g} must be above 0.")
    if known.prompt is None:
        notes.append(f"prompts of {prompt:.0f} tokens in the mean, a quarter of the limit; --mean-prompt sets it")
    turns, tool_seconds = known.turns or 1.0, known.tool_seconds or 0.0
    if rl.agent_loop_name == "single_turn":
        if known.turns not in (None, 1.0) or known.tool_seconds:
            raise ValueError("--mean-turns, --tool-seconds: the run file has no tools, environment or scheduler to wait for.")
    elif turns < 1 or tool_seconds < 0:
        raise ValueError(f"--mean-turns {turns:g} must be at least 1, --tool-seconds {tool_seconds:g} at least 0.")
    else:
        if known.turns is None:
            notes.append("one turn of the model in a sample; --mean-turns sets it")
        if known.tool_seconds is None:
            notes.append("tools and environments answer at once; --tool-seconds sets how long a sample waits for them")
    return Samples(Lengths(mean, limit), prompt, turns, tool_seconds, tuple(notes))


def assume_row_length(cfg: RunConfig, max_len: int, micro_batch_size: int, known: SampleMeans) -> tuple[float, str]:
    """Return the mean tokens that a sequence of a supervised stage costs, and a sentence about them.

    Where the data is on this machine and its sequences are not padded to seq_length, its index has their lengths; with padding,
    each costs as much as the longest of its micro-batch.

    Raises:
        ValueError: the known length is out of its bounds.
    """
    config = cfg.actor_config
    if known.response is not None:
        if not 0 < known.response <= max_len:
            bounds = f"must be above 0 and at most the longest sequence, {max_len}"
            raise ValueError(f"--mean-response: {known.response:g} {bounds}.")
        return known.response, f"sequences of {known.response:.0f} tokens in the mean"
    packs = config.reset_attention_mask or (cfg.rl_config is not None and cfg.rl_config.use_remove_padding)
    if cfg.stage == "pretrain" or not (packs or config.no_pad_to_seq_lengths) or not isinstance(config.data_path, str):
        return float(max_len), f"sequences of {max_len} tokens, the maximum; --mean-response sets their mean"
    from mindspeed_rl.data.indexed import column_prefix, read_index  # with numpy, which other plans do without

    column = "input_ids" if cfg.stage in ("sft", "prm") else "chosen_input_ids"
    try:
        lengths = read_index(column_prefix(Path(config.data_path).expanduser(), column)).lengths.clip(max=max_len)
    except (ValueError, OSError):  # the data is elsewhere, or training will refuse it
        return float(max_len), f"sequences of {max_len} tokens, the maximum; --mean-response sets their mean"
    count = 1 if packs else max(1, min(micro_batch_size, len(lengths)))
    mean = float(lengths[: len(lengths) // count * count].reshape(-1, count).max(axis=1).mean())
    return mean, f"sequences of {mean:.0f} tokens in the mean, by the index of data_path"
