"""Pass rates of a run's prompts from samples of a model: those that are never or always right teach nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

from mindspeed_rl.audit.report import Section
from mindspeed_rl.audit.rows import AuditRow, RowPart, is_prompt
from mindspeed_rl.inference.engine_interface import Engine, Request, collect
from mindspeed_rl.rewards.samples import RewardResult, RewardSample
from mindspeed_rl.rollout.requests import Sampling, sample_seed
from mindspeed_rl.run import Run

#: prompts whose samples are generated at once
_CHUNK = 64
_EXAMPLES, _SHOWN = 3, 160
#: column of the pass rate, as `rl_config.prompt_curriculum` names it
COLUMN = "pass_rate"


class Scorer(Protocol):
    """A pool of reward functions; see `rewards.pool.RewardPool`."""

    def score(self, samples: Sequence[RewardSample], timeout_s: float | None = None) -> list[RewardResult]:
        """Return the results of the samples, in their order."""
        ...


@dataclass
class PassRates:
    """Pass rates of prompts.

    Attributes:
        num_samples: samples of each prompt.
        rates: index of a row among all -> share of its samples that pass; rows without any score are not there.
        examples: the first prompts that are never right, with their labels and one response.
        num_unscored: prompts of which no sample has a score.
    """

    num_samples: int
    rates: dict[int, float] = field(default_factory=dict)
    examples: list[str] = field(default_factory=list)
    num_unscored: int = 0

    @property
    def never(self) -> set[int]:
        """Rows that no sample gets right."""
        return {row for row, rate in self.rates.items() if rate == 0.0}

    @property
    def always(self) -> set[int]:
        """Rows that all samples get right."""
        return {row for row, rate in self.rates.items() if rate == 1.0}

    def describe(self) -> Section:
        """Return a section of the report."""
        count = max(1, len(self.rates))
        rows = [
            ("prompts", f"{len(self.rates):,}, {self.num_samples} samples each"),
            ("mean pass rate", f"{math.fsum(self.rates.values()) / count:.3f}"),
            ("never right", f"{len(self.never):,} ({len(self.never) / count:.1%})"),
            ("always right", f"{len(self.always):,} ({len(self.always) / count:.1%})"),
        ]
        rows += [("no sample has a score", f"{self.num_unscored:,}")] if self.num_unscored else []
        rows += [("for example never right", text) for text in self.examples]
        return Section("Pass rates", ("", ""), rows)

    def encode(self) -> dict[str, object]:
        """Return the figures as plain values."""
        return {
            "prompts": len(self.rates),
            "samples": self.num_samples,
            "mean": math.fsum(self.rates.values()) / max(1, len(self.rates)),
            "never": len(self.never),
            "always": len(self.always),
            "unscored": self.num_unscored,
            "examples": self.examples,
        }


@dataclass(frozen=True)
class Sampler:
    """What samples of a prompt are made with.

    Attributes:
        engine: engine with the model.
        sampling: sampling of the run's rollouts.
        read_sample: reads the response that reward functions read, of a row, its token ids and whether it was cut off.
        decode: returns the text of a response that reward functions read.
        pool: reward functions of the run.
        pass_reward: total reward from which on a response passes.
        seed: seed of the run.
    """

    engine: Engine
    sampling: Sampling
    read_sample: Callable[[AuditRow, list[int], bool], RewardSample]
    decode: Callable[[list[int]], str]
    pool: Scorer
    pass_reward: float
    seed: int


def list_prompts(train: RowPart, run: Run, limit: int | None) -> Iterator[tuple[int, AuditRow]]:
    """Yield the prompts that the run trains on, with their indexes among all rows."""
    return islice(((index, row) for index, row in train if is_prompt(row, run)), limit)


def measure_pass_rates(
    prompts: Iterator[tuple[int, AuditRow]],
    sampler: Sampler,
    num_samples: int,
    *,
    report: Callable[[str], None] = lambda _: None,
) -> PassRates:
    """Measure the share of the samples of each prompt whose total reward passes; those without a score do not pass.

    Args:
        prompts: from `list_prompts`.
        num_samples: samples of each prompt.
        report: takes a line about what is done.
    """
    rates, done = PassRates(num_samples), 0
    while chunk := list(islice(prompts, _CHUNK)):
        requests = [
            Request(list(row.tokens), sample_seed(sampler.seed, 0, done + place, sample), label=row.label, columns=row.columns)
            for place, (_, row) in enumerate(chunk)
            for sample in range(num_samples)
        ]
        answers = collect(sampler.engine.stream(requests, sampler.sampling), len(requests))
        samples = [
            sampler.read_sample(chunk[index // num_samples][1], answer.token_ids, answer.finish == "length")
            for index, answer in enumerate(answers)
        ]
        results = sampler.pool.score(samples)
        for place, (index, row) in enumerate(chunk):
            mine = slice(place * num_samples, (place + 1) * num_samples)
            _add(rates, index, row, samples[mine], results[mine], sampler.pass_reward)
        done += len(chunk)
        report(f"{done:,} prompts have {num_samples} samples")
    return rates


def _add(
    rates: PassRates,
    index: int,
    row: AuditRow,
    samples: Sequence[RewardSample],
    results: Sequence[RewardResult],
    pass_reward: float,
) -> None:
    totals = [result.total for result in results]
    if all(total is None for total in totals):
        rates.num_unscored += 1
        return
    rate = sum(total is not None and total >= pass_reward for total in totals) / len(totals)
    rates.rates[index] = rate
    if rate == 0.0 and len(rates.examples) < _EXAMPLES:
        said = " ".join(samples[0].response.split())
        rates.examples.append(f"{row.where}, label {(row.label or '')[:_SHOWN]!r}: {said[:_SHOWN]!r}")
