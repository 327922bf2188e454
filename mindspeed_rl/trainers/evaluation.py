"""Responses to held-out prompts, scored as the run scores its rollouts, and ReMax's baselines, which are made the same way."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from mindspeed_rl.data.prompts import PromptDataset, PromptItem
from mindspeed_rl.dataplane.client import DataPlane
from mindspeed_rl.dataplane.columns import objects
from mindspeed_rl.observability.metrics import Metrics
from mindspeed_rl.rewards.answers.extraction import extract_final_answer
from mindspeed_rl.rewards.sample_statistics import compute_majority, compute_pass_at
from mindspeed_rl.rewards.samples import RewardResult, RewardSample
from mindspeed_rl.rollout.requests import EvaluationSampling
from mindspeed_rl.rollout.trajectory import Trajectory
from mindspeed_rl.run import Run
from mindspeed_rl.runtime.reports import WorkerReport
from mindspeed_rl.thoughts import split_thought
from mindspeed_rl.trainers.model_rewards import ModelRewards, reward_totals
from mindspeed_rl.workers.fleet import Fleet
from mindspeed_rl.workers.reward_group import RewardGroup

ItemT = TypeVar("ItemT")

#: responses of an evaluation that are recorded
_NUM_EXAMPLES = 8


@dataclass(frozen=True)
class EvaluationSet:
    """Held-out prompts.

    Attributes:
        prefix: start of the names of its figures: eval, or eval/<name> for one of `eval_sets`.
        items: its prompts.
    """

    prefix: str
    items: Sequence[PromptItem]


def select_sets(run: Run, held_out: PromptDataset | None, eval_sets: Mapping[str, PromptDataset]) -> list[EvaluationSet]:
    """Return the sets of an evaluation, each with `eval_num_prompts` prompts at most."""
    limit = run.config.actor_config.eval_num_prompts
    sets = {} if held_out is None else {"eval": held_out}
    sets |= {f"eval/{name}": prompts for name, prompts in eval_sets.items()}
    return [
        EvaluationSet(prefix, [prompts[index] for index in range(min(len(prompts), limit or len(prompts)))])
        for prefix, prompts in sets.items()
    ]


def read_evaluation_sampling(run: Run) -> EvaluationSampling:
    """Return the sampling of held-out prompts that the run file asks for."""
    actor, rl = run.config.actor_config, run.config.rl_config
    temperature = actor.eval_temperature
    if temperature is None:
        temperature = 0.0 if rl is None or rl.eval_greedy else None
    return EvaluationSampling(temperature, actor.eval_n_samples, actor.eval_top_p, actor.eval_top_k)


def compute_figures(
    prefix: str,
    results: Sequence[RewardResult],
    lengths: Sequence[int],
    *,
    accuracy_of: str | None,
    num_samples: int = 1,
    votes: Sequence[str | None] = (),
) -> Metrics:
    """Return the figures of a set: reward, parts, accuracy, and with several responses to each prompt pass@k and maj@k.

    The accuracy is the fraction of responses with the full score. Responses without a score are in no mean, and counted in
    unscored; in pass@k and maj@k they are wrong, as in `mindspeed-rl evaluate`.

    Args:
        prefix: start of the names.
        results: results of all responses, those to a prompt adjacent.
        lengths: tokens of the responses.
        accuracy_of: reward function that tells right from wrong; None where none does.
        num_samples: responses to each prompt.
        votes: final answers of the responses; empty where answers cannot be compared.
    """
    metrics = Metrics()
    totals = [result.total for result in results if result.total is not None]
    if totals:
        metrics.add_mean(f"{prefix}/reward", math.fsum(totals), len(totals))
        metrics.add_mean(f"{prefix}/reward_std", statistics.pstdev(totals), 1)
    metrics.add_sum(f"{prefix}/prompts", len(results) // num_samples)
    metrics.add_sum(f"{prefix}/unscored", len(results) - len(totals))
    if accuracy_of is not None:
        # failed samples that count as zero are wrong
        judged = [r.parts.get(accuracy_of, 0.0) for r in results if accuracy_of in r.parts or r.failed and r.total is not None]
        if judged:
            metrics.add_mean(f"{prefix}/accuracy", sum(part >= 1.0 for part in judged), len(judged))
        if num_samples > 1 and results:
            right = [result.parts.get(accuracy_of, 0.0) >= 1.0 for result in results]
            groups = [right[start : start + num_samples] for start in range(0, len(right), num_samples)]
            for k, share in compute_pass_at(groups).items():
                metrics.add_last(f"{prefix}/pass@{k}", share)
            ballots = [votes[start : start + num_samples] for start in range(0, len(votes), num_samples)]
            if ballots and (majority := compute_majority(ballots, groups)) is not None:
                metrics.add_last(f"{prefix}/maj@{num_samples}", majority)
    for result in results:
        for name, value in result.parts.items():
            metrics.add_mean(f"{prefix}/{name}", float(value), 1)
    metrics.add_mean(f"{prefix}/response_length", sum(lengths), len(lengths))
    return metrics


def read_votes(samples: Iterable[RewardSample], accuracy_of: str | None, num_samples: int) -> list[str]:
    """Return the answers of responses as they count in a majority vote: the final ones after the thoughts.

    Empty where there is no vote: of one response to each prompt, of programs (no two are the same answer), and where no
    function tells right from wrong.

    Args:
        samples: the responses; they are read only for a vote.
        accuracy_of: reward function that tells right from wrong; None where none does.
        num_samples: responses to each prompt.
    """
    if num_samples == 1 or accuracy_of in (None, "code"):
        return []
    return [extract_final_answer(split_thought(sample.response, sample.prompt)[1].lstrip()) for sample in samples]


def interleave(shares: Sequence[Sequence[ItemT]], count: int) -> list[ItemT]:
    """Return the results of all requests in their order, of which replica i of n computed every n-th from i on."""
    return [shares[index % len(shares)][index // len(shares)] for index in range(count)]


class Evaluator:
    """Evaluate the weights that the rollout engine holds.

    Attributes:
        examples: prompts, responses and results of the last evaluation; the first few, always the same prompts.
    """

    examples: Sequence[tuple[PromptItem, list[int], RewardResult]] = ()

    def __init__(
        self,
        run: Run,
        sets: Sequence[EvaluationSet],
        actors: Fleet,
        rewards: RewardGroup,
        model_rewards: ModelRewards,
        read_sample: Callable[[PromptItem, Trajectory], RewardSample],
    ) -> None:
        """Take the sets.

        Args:
            read_sample: reads the response that reward functions read.
        """
        self._sets = sets
        self._actors, self._rewards, self._model_rewards = actors, rewards, model_rewards
        self._read_sample, self._sampling, self._seed = read_sample, read_evaluation_sampling(run), run.config.actor_config.seed

    def run(self) -> Metrics:
        """Return the figures of all sets; see `compute_figures`."""
        metrics = Metrics()
        for index, each in enumerate(self._sets):
            metrics.merge(self._evaluate(each, keeps_examples=not index))
        return metrics

    def _evaluate(self, each: EvaluationSet, *, keeps_examples: bool) -> Metrics:
        num_samples = self._sampling.num_samples
        items = [item for item in each.items for _ in range(num_samples)]
        trajectories = self.generate(each.items, self._sampling)
        responses = [trajectory.token_ids for trajectory in trajectories]
        results = self.score_trajectories(items, trajectories)
        if keeps_examples:
            first = slice(0, _NUM_EXAMPLES * num_samples, num_samples)
            self.examples = list(zip(items[first], responses[first], results[first]))
        name = next(iter(self._model_rewards.part_weights), "")
        accuracy_of = name if name in self._rewards.accuracies else None
        return compute_figures(
            each.prefix,
            results,
            [len(response) for response in responses],
            accuracy_of=accuracy_of,
            num_samples=num_samples,
            votes=read_votes(map(self._read_sample, items, trajectories), accuracy_of, num_samples),
        )

    def describe(self, metrics: Metrics) -> str:
        """Return one line for the console."""
        results, several = metrics.results(), self._sampling.num_samples
        samples = f", {several} samples each" if several > 1 else ""
        return "; ".join(_describe_set(each, results, f"{self._sampling.name}{samples}") for each in self._sets)

    def generate(self, items: Sequence[PromptItem], sampling: EvaluationSampling) -> list[Trajectory]:
        """Return the responses to the prompts by the run's agent loop, those to a prompt adjacent."""
        generated = self._actors.generate_responses(list(items), self._seed, sampling)
        replicas = [trajectories for trajectories in generated if trajectories is not None]
        return interleave(replicas, len(items) * sampling.num_samples)

    def score_trajectories(self, items: Sequence[PromptItem], trajectories: Sequence[Trajectory]) -> list[RewardResult]:
        """Return the rewards of responses to the prompts, as the run scores its rollouts, reward models included."""
        results = self._rewards.score_now(list(items), list(trajectories))
        return self._model_rewards.add(results, items, [trajectory.token_ids for trajectory in trajectories])

    def score(self, items: Sequence[PromptItem]) -> tuple[list[list[int]], list[RewardResult]]:
        """Return greedy responses to the prompts, and the results of the reward functions."""
        trajectories = self.generate(items, EvaluationSampling())
        results = self._rewards.score_now(list(items), trajectories)
        return [trajectory.token_ids for trajectory in trajectories], results


def _describe_set(each: EvaluationSet, results: Mapping[str, float], sampling: str) -> str:
    """Return the figures of a set in words."""
    prefix, name = each.prefix, each.prefix.removeprefix("eval").removeprefix("/")
    if f"{prefix}/accuracy" in results:
        shown = f"accuracy {results[f'{prefix}/accuracy']:.1%}"
    elif f"{prefix}/reward" in results:
        shown = f"mean reward {results[f'{prefix}/reward']:.3f}"
    else:
        shown = "responses have no score"
    shares = {
        key.removeprefix(f"{prefix}/"): value
        for key, value in results.items()
        if key.startswith((f"{prefix}/pass@", f"{prefix}/maj@"))
    }
    shown += "".join(f", {key} {value:.1%}" for key, value in list(shares.items())[1:])  # pass@1 is the accuracy
    unscored = f", {results[f'{prefix}/unscored']:.0f} without a score" if results[f"{prefix}/unscored"] else ""
    return f"held-out {name + ' ' if name else ''}{shown} on {len(each.items)} prompts ({sampling}{unscored})"


class GreedyBaselines:
    """ReMax's baselines: the reward of the greedy response to each prompt of the batch (arXiv:2310.10505).

    `generate` needs the rollout engine, `rewards` does not: between the two the device may be given to training. Estimators
    that need no baselines have none: then `generate` does nothing.
    """

    def __init__(self, run: Run, plane: DataPlane, evaluator: Evaluator, model_rewards: ModelRewards) -> None:
        self._plan, self._timeout_s = run.plan, run.deadlines.rows_s
        self._is_needed = run.objective is not None and "greedy_baseline" in run.objective.needs
        self._plane, self._evaluator, self._model_rewards = plane, evaluator, model_rewards

    def generate(self) -> list[WorkerReport]:
        """Generate a greedy response to each prompt of the batch, scored by the reward functions."""
        if not self._is_needed:
            return []
        group, count = self._plan.n_samples_per_prompt, self._plan.num_train_samples
        batch, _ = self._plane.get(
            "compute_advantage", ["prompt_ids", "labels", "extra"], indexes=range(0, count, group), timeout_s=self._timeout_s
        )
        self._items = [
            PromptItem(prompt_ids=ids.tolist(), label=label, columns=columns)
            for ids, label, columns in zip(batch["prompt_ids"], objects(batch["labels"]), objects(batch["extra"]))
        ]
        self._responses, self._results = self._evaluator.score(self._items)
        metrics = Metrics()
        metrics.add_spread("remax/greedy_length", [len(response) for response in self._responses])
        return [WorkerReport(metrics)]

    def rewards(self) -> torch.Tensor:
        """Return [rows] the reward of the greedy response to each row's prompt; NaN where it has no score."""
        results = self._model_rewards.add(self._results, self._items, self._responses)
        return torch.tensor(reward_totals(results)).repeat_interleave(self._plan.n_samples_per_prompt)
