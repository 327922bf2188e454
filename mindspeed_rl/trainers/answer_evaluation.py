"""Evaluation of supervised tuning by generation: answers to held-out prompts, scored by reward functions on the driver."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mindspeed_rl.config import ConfigError, RLConfig, SamplingConfig
from mindspeed_rl.data.prompts import PromptDataset, PromptSettings, check_prompt_files, open_prompts
from mindspeed_rl.observability.metrics import Metrics
from mindspeed_rl.rewards.dry_run import dry_run_reward_functions
from mindspeed_rl.rewards.pool import RewardPool
from mindspeed_rl.rewards.static_check import check_reward_functions
from mindspeed_rl.rollout.requests import sample_seed
from mindspeed_rl.run import Run
from mindspeed_rl.run.phases import Phases
from mindspeed_rl.runtime.reports import WorkerReport
from mindspeed_rl.trainers.evaluation import (
    EvaluationSet,
    compute_figures,
    interleave,
    read_evaluation_sampling,
    read_votes,
    select_sets,
)
from mindspeed_rl.workers.answer_requests import AnswerRequest, GeneratedAnswer
from mindspeed_rl.workers.remote_group import RemoteGroup
from mindspeed_rl.workers.responses import build_sampling
from mindspeed_rl.workers.reward_group import SampleReader

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def derive_answer_rewards(run: Run) -> RLConfig:
    """Return the keys of the reward functions of `eval_verifier`, with one pool of processes for this driver."""
    functions = run.config.actor_config.eval_verifier
    plugins = [] if run.config.rl_config is None else run.config.rl_config.external_plugins
    return RLConfig(
        verifier_function=list(functions),
        verifier_weight=[1.0] * len(functions),
        external_plugins=list(plugins),
        # failures are counted in eval/<name>/unscored
        reward_failure_limit=1.0,
    )


def load_answer_sets(run: Run, tokenizer: PreTrainedTokenizerBase) -> dict[str, PromptDataset]:
    """Open the prompts of `eval_sets`, read as the columns and the template of the run say.

    Raises:
        ValueError: data are missing or have another form, or a reward function cannot be loaded.
    """
    actor = run.config.actor_config
    sets: dict[str, PromptDataset] = {}
    if not actor.eval_sets:
        return sets
    _check_model(run)
    rewards = derive_answer_rewards(run)
    if violations := check_reward_functions(rewards) or dry_run_reward_functions(rewards, {}).violations:
        raise ConfigError(text.replace("rl_config.verifier_function", "megatron_training.eval_verifier") for text in violations)
    for name, path in actor.eval_sets.items():
        key = f"megatron_training.eval_sets.{name}"
        check_prompt_files(str(path), key)
        try:
            sets[name] = open_prompts(
                str(path),
                tokenizer,
                max_prompt_length=(actor.seq_length or 0) - actor.eval_max_tokens + 1,
                dataset_additional_keys=actor.dataset_additional_keys or None,
                settings=replace(PromptSettings.from_config(actor), is_text_only=run.config.is_text_only),
            )
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from error
        sets[name].check_token_ids(run.models["actor"].plan.model_config.vocab_size, key)
    return sets


def _check_model(run: Run) -> None:
    """Raise ValueError for a model whose cache of keys and values cannot answer."""
    actor, model = run.config.actor_config, run.models["actor"].plan.model_config
    sparse, key = model.sparse_attention, "megatron_training.eval_sets"
    if model.linear_attention is not None:
        raise ValueError(f"{key}: the cache of stage sft has no states of gated delta nets, which this model has")
    if sparse is not None and (actor.seq_length or 0) > sparse.topk:
        raise ValueError(
            f"{key}: the cache of stage sft has no keys of this model's indexer, so seq_length ({actor.seq_length}) can be up "
            f"to {sparse.topk} (index_topk of config.json), where all tokens are attended to"
        )
    if model.num_moe_experts is not None and actor.tensor_model_parallel_size > 1:
        raise ValueError(
            f"{key}: experts with tensor_model_parallel_size {actor.tensor_model_parallel_size} need sequence_parallel, which "
            "a pass over one token cannot have"
        )


class AnswerEvaluator:
    """Evaluate the model that trains on the sets of `eval_sets`.

    Args:
        run: the run.
        sets: prompts by name; empty for a run without such an evaluation.
        tokenizer: tokenizer of the model.
        pool: scores the answers; None where there are no sets.
        workers: generate.
    """

    def __init__(
        self,
        run: Run,
        sets: Mapping[str, PromptDataset],
        tokenizer: PreTrainedTokenizerBase,
        pool: RewardPool | None,
        workers: RemoteGroup,
    ) -> None:
        actor = run.config.actor_config
        self.sets: Sequence[EvaluationSet] = select_sets(run, None, sets)
        self._pool, self._workers, self._seed = pool, workers, actor.seed
        self._reader = SampleReader(tokenizer, "response", actor.eval_max_tokens)
        self._evaluation = read_evaluation_sampling(run)
        keys = SamplingConfig(max_tokens=actor.eval_max_tokens, temperature=1.0)
        folder = Path(run.models["actor"].source.hf_folder)
        self._sampling = self._evaluation.apply(build_sampling(keys, folder, tokenizer))
        self._first_function = next(iter(actor.eval_verifier), None)

    def run(self) -> tuple[Metrics, list[WorkerReport]]:
        """Return the figures of all sets, and the reports of the workers."""
        metrics, reports = Metrics(), list[WorkerReport]()
        for each in self.sets:
            figures, made = self._evaluate(each)
            metrics.merge(figures)
            reports += made
        return metrics, reports

    def _evaluate(self, each: EvaluationSet) -> tuple[Metrics, list[WorkerReport]]:
        assert self._pool is not None  # there are sets
        count = self._evaluation.num_samples
        items = [item for item in each.items for _ in range(count)]
        requests = [
            AnswerRequest(item["prompt_ids"], sample_seed(self._seed, 0, index // count, index % count))
            for index, item in enumerate(items)
        ]
        returned: list[tuple[WorkerReport, list[GeneratedAnswer] | None]] = self._workers.call(
            Phases.GENERATE_ANSWERS, requests, self._sampling
        )
        answers = interleave([answers for _, answers in returned if answers is not None], len(requests))
        samples = [
            self._reader.read(list(item["prompt_ids"]), answer.token_ids, item["label"], item["columns"], answer.truncated)
            for item, answer in zip(items, answers)
        ]
        results = self._pool.score(samples)
        accuracy_of = self._first_function if self._first_function in self._pool.accuracies else None
        figures = compute_figures(
            each.prefix,
            results,
            [len(answer.token_ids) for answer in answers],
            accuracy_of=accuracy_of,
            num_samples=count,
            votes=read_votes(samples, accuracy_of, count),
        )
        return figures, [report for report, _ in returned]
