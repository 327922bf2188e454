"""The audit of a run: a stricter check beside its reward on held-out prompts, and the diversity of its responses."""

from __future__ import annotations

import json
import logging
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mindspeed_rl.data.prompts import PromptDataset, PromptItem
from mindspeed_rl.dataplane.client import DataPlane
from mindspeed_rl.dataplane.columns import objects
from mindspeed_rl.observability.diversity import ONE_PATTERN, Diversity, measure_diversity, select_groups
from mindspeed_rl.observability.metrics import Metrics
from mindspeed_rl.observability.run_files import AUDIT
from mindspeed_rl.redaction import hide_in_record
from mindspeed_rl.rewards.pool import RewardPool
from mindspeed_rl.rewards.samples import RewardResult, RewardSample, select_reward_functions
from mindspeed_rl.rewards.totals import list_components, read_part_weights
from mindspeed_rl.rollout.requests import EvaluationSampling
from mindspeed_rl.rollout.trajectory import Trajectory
from mindspeed_rl.run import Run
from mindspeed_rl.run.audit_rewards import derive_audit_rewards, derive_audit_settings
from mindspeed_rl.thoughts import remove_thought
from mindspeed_rl.trainers.advantages import TrainBatch
from mindspeed_rl.trainers.evaluation import Evaluator

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_LOG = logging.getLogger(__name__)


def open_audit_pool(run: Run) -> RewardPool | None:
    """Open the pool of the stricter functions; None for a run without an audit."""
    if not run.config.audit.has_check:
        return None
    functions, weights = select_reward_functions(derive_audit_rewards(run.rl, run.config.audit))
    settings = derive_audit_settings(run.rl, run.config.audit, max_tokens=run.config.response_limit)
    return RewardPool(functions, weights, settings=settings)


@dataclass(frozen=True)
class _Audited:
    """A response with both scores, as shares of the full scores."""

    item: PromptItem
    sample: RewardSample
    earned: float
    audited: float

    @property
    def gap(self) -> float:
        return self.earned - self.audited


class RewardAuditor:
    """Score responses to held-out prompts with the run's reward and with the stricter check.

    Args:
        run: the run.
        items: prompts of the audit.
        pool: the stricter check; None for a run without one.
        evaluator: generates, and scores as the run does.
        read_sample: reads the response that reward functions read.
    """

    def __init__(
        self,
        run: Run,
        items: Sequence[PromptItem],
        pool: RewardPool | None,
        evaluator: Evaluator,
        read_sample: Callable[[PromptItem, Trajectory], RewardSample],
    ) -> None:
        self._keys, self._folder = run.config.audit, run.folder
        self._items, self._pool, self._evaluator, self._read_sample = items, pool, evaluator, read_sample
        self._last, self._timeout_s = run.plan.train_iters or 0, run.deadlines.seconds["rewards"]
        strict = derive_audit_rewards(run.rl, self._keys)
        self._earned = _Shares("the reward", "audit.full_score", read_part_weights(run.rl), self._keys.full_score)
        self._audited = _Shares("the stricter check", "audit.environment", dict(zip(*select_reward_functions(strict))))

    def is_due(self, iteration: int) -> bool:
        """Return True before the first iteration (0), every `interval` iterations, and after the last."""
        return self._pool is not None and (iteration % self._keys.interval == 0 or iteration == self._last)

    def run(self, iteration: int) -> Metrics:
        """Return audit/earned, audit/audited and audit/gap of the weights after this iteration, which is one where it is due.

        Both are shares of the full scores; responses that one of the two cannot score are counted in audit/unscored.
        """
        assert self._pool is not None  # else no audit is due
        metrics = Metrics()
        trajectories = self._evaluator.generate(self._items, EvaluationSampling(temperature=None))
        samples = [self._read_sample(item, trajectory) for item, trajectory in zip(self._items, trajectories)]
        earned = self._evaluator.score_trajectories(self._items, trajectories)
        audited = self._pool.score(samples, timeout_s=self._timeout_s)
        pairs = self._pair(samples, earned, audited)
        metrics.add_sum("audit/unscored", len(samples) - len(pairs))
        if pairs:
            gaps = [pair.gap for pair in pairs]
            error = statistics.stdev(gaps) / math.sqrt(len(gaps)) if len(gaps) > 1 else 0.0
            metrics.add_mean("audit/earned", math.fsum(pair.earned for pair in pairs), len(pairs))
            metrics.add_mean("audit/audited", math.fsum(pair.audited for pair in pairs), len(pairs))
            metrics.add_mean("audit/gap", math.fsum(gaps), len(gaps))
            metrics.add_last("audit/gap_error", error)
            self._record(iteration, pairs)
        return metrics

    def _pair(
        self, samples: Sequence[RewardSample], earned: Sequence[RewardResult], audited: Sequence[RewardResult]
    ) -> list[_Audited]:
        shares = zip(self._items, samples, self._earned.measure(earned), self._audited.measure(audited))
        return [
            _Audited(item, sample, ours, theirs)
            for item, sample, ours, theirs in shares
            if ours is not None and theirs is not None
        ]

    def _record(self, iteration: int, pairs: Sequence[_Audited]) -> None:
        """Append the responses that the reward overpays most to audit.jsonl."""
        worst = sorted(pairs, key=lambda pair: -pair.gap)[: self._keys.samples]
        with (self._folder / AUDIT).open("a", encoding="utf-8") as file:
            for pair in worst:
                record = {
                    "iteration": iteration,
                    "prompt": pair.sample.prompt,
                    "response": pair.sample.response,
                    "label": pair.item["label"],
                    "earned": pair.earned,
                    "audited": pair.audited,
                }
                file.write(json.dumps(hide_in_record(record), ensure_ascii=False, default=str) + "\n")


def select_audit_items(
    run: Run, audit_prompts: PromptDataset | None, held_out: PromptDataset | None, eval_sets: Mapping[str, PromptDataset]
) -> list[PromptItem]:
    """Return the prompts of the audit: its own, else the evaluation's."""
    if not run.config.audit.has_check:
        return []
    prompts = next(each for each in (audit_prompts, held_out, *eval_sets.values()) if each is not None)
    return [prompts[index] for index in range(min(len(prompts), run.config.audit.num_prompts))]


class _Shares:
    """Totals as shares of the full score: the total where each part with a positive weight gives 1, or what the run file says.

    Args:
        subject: what gives the totals, for a warning.
        key: key that is to be changed where a total is above the full score.
        weights: weights of the parts.
        full_score: largest total; None for the sum of the positive weights of the parts that there are.
    """

    def __init__(self, subject: str, key: str, weights: Mapping[str, float], full_score: float | None = None) -> None:
        self._subject, self._key, self._weights, self._full_score = subject, key, weights, full_score
        self._is_warned = False

    def measure(self, results: Sequence[RewardResult]) -> list[float | None]:
        """Return the share of each total, at most 1; None without a total. A larger total is warned of once."""
        full = self._full_score
        if full is None:
            # rewards of environments and models are parts only where some response has them
            weights, _ = list_components(self._weights, results)
            full = math.fsum(weight for weight in weights if weight > 0) or 1.0
        totals = [result.total for result in results]
        largest = max((total for total in totals if total is not None), default=0.0)
        if largest > full * (1 + 1e-6) and not self._is_warned:
            self._is_warned = True
            _LOG.warning(
                "audit: a response has %g of %s, more than its full score %g, and counts as 1; see %s",
                largest, self._subject, full, self._key,
            )  # fmt: skip
        return [None if total is None else min(total / full, 1.0) for total in totals]


class ResponseDiversity:
    """Measure the diversity of the responses of each iteration; an observer of the batches."""

    def __init__(self, run: Run, plane: DataPlane, tokenizer: PreTrainedTokenizerBase, note: Callable[[str], None]) -> None:
        self._note, self._is_noted = note, False
        self._limit = run.config.audit.diversity_responses
        self._group_size, self._timeout_s = run.plan.n_samples_per_prompt, run.deadlines.rows_s
        self._plane, self._tokenizer = plane, tokenizer
        self._last: Diversity | None = None

    def on_batch(self, batch: TrainBatch) -> None:
        """Measure the responses of some groups of the batch."""
        count = len(batch.advantages) // self._group_size
        if not self._limit or not count:
            return
        chosen = select_groups(count, self._group_size, self._limit)
        indexes = [index * self._group_size + sample for index in chosen for sample in range(self._group_size)]
        columns = ["prompt_ids", "responses", "labels"]
        rows, _ = self._plane.get("metrics", columns, indexes=indexes, timeout_s=self._timeout_s)
        decode = self._tokenizer.batch_decode
        firsts = range(0, len(indexes), self._group_size)
        prompts = decode([rows["prompt_ids"][first].tolist() for first in firsts], skip_special_tokens=True)
        texts = decode([ids.tolist() for ids in rows["responses"]], skip_special_tokens=True)
        responses = [remove_thought(text) or text for text in texts]
        groups = [(prompt, responses[first : first + self._group_size]) for prompt, first in zip(prompts, firsts)]
        labels = objects(rows["labels"])
        self._last = measured = measure_diversity(groups, [labels[first] for first in firsts])
        if measured.pattern_share >= ONE_PATTERN and not self._is_noted:
            self._is_noted = True
            self._note(f"{measured.pattern_share:.0%} of the responses have one pattern: {measured.pattern!r}")

    def list_figures(self) -> dict[str, float]:
        """Return the figures of the batch that was measured last."""
        if (measured := self._last) is None:
            return {}
        return {
            "diversity/sentences_per_prompt": measured.per_prompt,
            "diversity/sentences": measured.sentences,
            "diversity/bigrams": measured.bigrams,
            "diversity/trigrams": measured.trigrams,
            "diversity/pattern_share": measured.pattern_share,
        }
