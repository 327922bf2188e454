"""Scores of models, added to the results of the reward functions, in the data plane or for given responses.

A reward model has a phase of the workers; a generative judge that the run serves has engines of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mindspeed_rl.config import SamplingConfig
from mindspeed_rl.data.content_marks import ContentMarks
from mindspeed_rl.data.encoding import TextEncoder
from mindspeed_rl.data.prompts import PromptItem
from mindspeed_rl.data.tokenizer import load_tokenizer
from mindspeed_rl.dataplane.client import DataPlane
from mindspeed_rl.dataplane.columns import Batch, objects, ragged
from mindspeed_rl.observability.metrics import Metrics
from mindspeed_rl.observability.timers import Timers
from mindspeed_rl.rewards.judge import JudgeError, JudgeForm, JudgeRequest, Opinion, Recent, Score
from mindspeed_rl.rewards.pool import RewardFailureError
from mindspeed_rl.rewards.samples import LARGEST_SCORE, RewardResult, RewardSample, RewardSettings
from mindspeed_rl.rewards.scorer import ScorerError, read_score
from mindspeed_rl.rewards.totals import JUDGE_PART, MODEL_PART
from mindspeed_rl.run.models import check_judge_folder
from mindspeed_rl.run.phases import Phases
from mindspeed_rl.runtime.reports import WorkerReport
from mindspeed_rl.workers.fleet import Fleet
from mindspeed_rl.workers.responses import build_sampling
from mindspeed_rl.workers.reward_group import SAMPLE_COLUMNS, SampleReader

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class _Judgement:
    """The score of a response by a model, and its named parts, or the reason why it has none."""

    score: float = math.nan
    parts: Mapping[str, float] = field(default_factory=dict)
    error: str = ""


def _add_judgements(
    results: Sequence[RewardResult],
    judgements: Sequence[_Judgement],
    *,
    part: str = MODEL_PART,
    weight: float = 1.0,
    failed_total: float | None = None,
) -> list[RewardResult]:
    """Return the results with a model's scores as an additional part; a row without rule scores has only this part.

    A failed sample stays failed; one without a judgement, or whose score or total is not a finite number in float32, fails.

    Args:
        part: name of the score in the results.
        weight: weight of the score in the total.
        failed_total: total of a sample that fails here.

    Raises:
        ValueError: not one judgement for each result.
    """
    if len(results) != len(judgements):
        raise ValueError(f"there are {len(results)} samples but {len(judgements)} scores of {part}")
    new_results = []
    for result, judged in zip(results, judgements):
        score, error = float(judged.score), judged.error
        # a row that the rules skipped has no total that could include its penalty
        base = result.penalty if result.total is None else result.total
        total = base + weight * score
        if result.failed:
            parts = {**result.parts, **({} if error else {part: score, **judged.parts})}
            new_results.append(replace(result, parts=parts))
        elif not error and abs(total) <= LARGEST_SCORE:
            new_results.append(RewardResult(total, {**result.parts, part: score, **judged.parts}, "ok", "", result.penalty))
        else:
            # a part that is not a number would reach the metrics
            error = error or f"its score {score:g}, or the total with it, is not a finite number in float32"
            kept = dict(result.parts)
            new_results.append(RewardResult(failed_total, kept, "failed", f"{part}: {error}", result.penalty))
    return new_results


class ServedJudge:
    """Requests to a generative judge that the run serves: the prompts of responses, and the votes in its replies.

    The form is the same as for a judge at an address (`rewards.judge`): template, parser, one request for equal ones, and
    several votes where it is asked several times.
    """

    def __init__(self, settings: RewardSettings, tokenizer: PreTrainedTokenizerBase) -> None:
        """Read the judge's files.

        Args:
            settings: settings of the run's rewards.
            tokenizer: tokenizer of the actor.

        Raises:
            ValueError: a file is missing or wrong; names its key.
        """
        assert settings.judge_model is not None
        folder = Path(settings.judge_model).expanduser()
        check_judge_folder(folder)
        self.weight, self._limit = settings.judge_weight, settings.reward_failure_limit
        self._form, self._failed_total = JudgeForm(settings), 0.0 if settings.reward_failure_policy == "zero" else None
        self._samples = SampleReader(tokenizer, settings.verifier_reads, settings.max_tokens)
        self._tokenizer = load_tokenizer(folder)
        if not self._tokenizer.chat_template:
            raise ValueError(f"rl_config.judge_model: the tokenizer of {folder} has no chat template, which requests need")
        self._encoder = TextEncoder(self._tokenizer)
        self._marks = ContentMarks(self._encoder.names, self._write("question5041"))
        keys = SamplingConfig(temperature=settings.judge_temperature, max_tokens=settings.judge_max_tokens)
        self._sampling = build_sampling(keys, folder, self._tokenizer)
        self._names = [folder.name] * settings.judge_repeats
        #: opinions of the last requests, by vote, which is the seed of the reply
        self._opinions = [Recent[Opinion]() for _ in self._names]

    def read_rows(self, batch: Batch) -> list[RewardSample]:
        """Return the samples of rows of the data plane."""
        return self._samples.read_rows(batch)

    def read_items(self, items: Sequence[PromptItem], responses: Sequence[list[int]]) -> list[RewardSample]:
        """Return the samples of responses to prompts."""
        pairs = zip(items, responses, strict=True)
        return [self._samples.read(item["prompt_ids"], ids, item["label"], item["columns"], False) for item, ids in pairs]

    def add_scores(
        self, fleet: Fleet, results: Sequence[RewardResult], samples: Sequence[RewardSample], *, in_rollout: bool
    ) -> tuple[list[RewardResult], Metrics]:
        """Return the results with the judge's scores, and the number of requests.

        Raises:
            RewardFailureError: more replies than `reward_failure_limit` allows have no score.
        """
        requests = [self._form.write_request(sample) for sample in samples]
        votes = [dict[JudgeRequest, Opinion | Exception](known) for known in self._opinions]
        new = [(vote, each) for vote, known in enumerate(votes) for each in dict.fromkeys(requests) if each not in known]
        encoded, seeds = [self._encode(each.text) for _, each in new], [vote for vote, _ in new]
        replies = fleet.generate_judgements(encoded, self._sampling, seeds, in_rollout=in_rollout) if new else []
        for (vote, request), reply in zip(new, replies, strict=True):
            if isinstance(reply, BaseException):
                votes[vote][request] = JudgeError(f"the judge takes no such request: {reply}")
                continue
            try:
                opinion = self._form.read_reply(request, self._decode(reply.token_ids))
            except Exception as error:  # noqa: BLE001 - any failure of a user's parser is a reply without a score
                votes[vote][request] = error
            else:
                votes[vote][request] = self._opinions[vote][request] = opinion
        judged = [self._judge(request, [known[request] for known in votes]) for request in requests]
        errors = [judgement.error for judgement in judged if judgement.error]
        if len(errors) > self._limit * len(judged):
            raise RewardFailureError(
                f"{len(errors)} of {len(judged)} responses have no score of the judge, more than "
                f"rl_config.reward_failure_limit={self._limit:g}; for example {errors[0]}"
            )
        metrics = Metrics()
        metrics.add_sum("judge/requests", len(new))
        lengths = [len(reply.token_ids) for reply in replies if not isinstance(reply, BaseException)]
        if lengths:
            metrics.add_spread("judge/reply_length", lengths)
        added = _add_judgements(results, judged, part=JUDGE_PART, weight=self.weight, failed_total=self._failed_total)
        return added, metrics

    def _judge(self, request: JudgeRequest, opinions: Sequence[Opinion | Exception]) -> _Judgement:
        try:
            return _read_judgement(self._form.decide(request, self._names, opinions))
        except JudgeError as error:
            return _Judgement(error=str(error))
        except Exception as error:  # noqa: BLE001 - of a user's parser
            return _Judgement(error=f"{type(error).__name__}: {error}")

    def _encode(self, text: str) -> list[int]:
        """Encode a request; a response in it cannot end the request's turn, nor write the beginning of the judge's."""
        return self._encoder.encode_hidden(self._write(self._marks.hide_text(text)))

    def _write(self, text: str) -> str:
        message = [{"role": "user", "content": text}]
        written = self._tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
        assert isinstance(written, str)  # ids with tokenize=True
        return written

    def _decode(self, token_ids: Sequence[int]) -> str:
        text = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        assert isinstance(text, str)
        return text


def _read_judgement(score: Score) -> _Judgement:
    try:
        found = None if score is None else read_score(score)
    except ScorerError as error:
        return _Judgement(error=f"judge_parser: {error}")
    if found is None:
        return _Judgement(error="judge_parser: it has no opinion")
    # as the parts of a reward function that returns a dict
    return _Judgement(found[0], {f"{JUDGE_PART}/{name}": value for name, value in found[1].items()})


@dataclass(frozen=True)
class ModelRewards:
    """Scores by models: a reward model, and a judge that the run serves.

    Attributes:
        fleet: workers and engines with the models; None where only functions score: nothing is added.
        plane: with the rows.
        weight: weight of the reward model's score in the total; None without one.
        timeout_s: longest wait for rows.
        part_weights: weight of each part of a reward, functions first.
        judge: None without one.
        in_rollout: the rollout engines have their memory, and need it afterwards.
    """

    fleet: Fleet | None
    plane: DataPlane
    weight: float | None
    timeout_s: float
    part_weights: Mapping[str, float] = field(default_factory=dict)
    judge: ServedJudge | None = None
    in_rollout: bool = False

    def run(self, num_rows: int) -> list[WorkerReport]:
        """Add the models' scores, as the last parts, to `rewards` and `reward_results` of the first rows."""
        if self.fleet is None:
            return []
        rows, reports, metrics = range(num_rows), list[WorkerReport](), Metrics()
        batch, _ = self.plane.get("judge_scores", ["reward_results"], indexes=rows, timeout_s=self.timeout_s)
        results = objects(batch["reward_results"])
        if self.weight is not None:
            reports = self.fleet.compute_model_rewards(num_rows)
            batch, _ = self.plane.get("reward_scores", ["rm_scores"], indexes=rows, timeout_s=self.timeout_s)
            scores = ragged(batch["rm_scores"]).tensor().tolist()
            results = _add_judgements(results, [_Judgement(score) for score in scores], weight=self.weight)
            metrics.add_spread("reward_model/score", scores)
        if self.judge is not None:
            timers = Timers(worker="judge")
            with timers(Phases.JUDGE.timer):
                batch, _ = self.plane.get(Phases.JUDGE.consumer, SAMPLE_COLUMNS, indexes=rows, timeout_s=self.timeout_s)
                samples = self.judge.read_rows(batch)
                results, added = self.judge.add_scores(self.fleet, results, samples, in_rollout=self.in_rollout)
            metrics.merge(added)
            reports.append(WorkerReport(intervals=timers.drain()))
        # the reward functions have filled these cells before
        self.plane.put({"rewards": reward_totals(results), "reward_results": results}, rows, overwrite=True)
        return [*reports, WorkerReport(metrics)]

    def add(
        self, results: Sequence[RewardResult], items: Sequence[PromptItem], responses: Sequence[list[int]]
    ) -> list[RewardResult]:
        """Return the results of given responses with the models' scores of each."""
        added = list(results)
        if self.fleet is None:
            return added
        if self.weight is not None:
            prompts = [list(item["prompt_ids"]) for item in items]
            replicas = [part for part in self.fleet.score(prompts, list(responses)) if part is not None]
            scores = [0.0] * len(prompts)
            for replica, part in enumerate(replicas):
                scores[replica :: len(replicas)] = part
            added = _add_judgements(added, [_Judgement(score) for score in scores], weight=self.weight)
        if self.judge is not None:
            samples = self.judge.read_items(items, responses)
            added, _ = self.judge.add_scores(self.fleet, added, samples, in_rollout=self.in_rollout)
        return added


def reward_totals(results: Sequence[RewardResult]) -> list[float]:
    """Return the column `rewards`: NaN without a score."""
    return [math.nan if result.total is None else result.total for result in results]
