"""Benchmarks on an engine: prompts, answers, scores, and a table with all counts."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from mindspeed_rl.inference.engine_interface import Answer, Engine, Request, collect
from mindspeed_rl.inference.prompt_format import PromptFormat
from mindspeed_rl.inference.tasks.task import Question, Task
from mindspeed_rl.inference.text_stream import cut_at_stop
from mindspeed_rl.rewards.pool import RewardPool
from mindspeed_rl.rewards.sample_statistics import compute_majority, compute_pass_at
from mindspeed_rl.rewards.samples import RewardSample, RewardSettings
from mindspeed_rl.rollout.requests import Sampling, sample_seed

_SCORING_LIMIT_S = 30.0
_MAX_SCORING_WORKERS = 4


class TaskError(RuntimeError):
    """A task has no score; the message has the reason."""


@dataclass(frozen=True)
class EvaluationSettings:
    """Settings of all tasks.

    Attributes:
        sampling: temperature and cut-offs; its max_tokens is each task's own.
        num_return: answers to each question; the score is the mean over all of them.
        max_samples: limit of the questions of a task, spread over its subjects; None takes all.
        max_model_len: limit of the tokens of prompt and answer.
    """

    sampling: Sampling
    max_model_len: int
    num_return: int = 1
    max_samples: int | None = None
    seed: int = 1234


@dataclass(frozen=True)
class PreparedTask:
    """A task whose prompts fit the model.

    Attributes:
        prompts: tokens of each question.
        allowed: first token -> choice of each question; empty without choices.
        dropped_shots: examples that were left out because prompts were too long.
    """

    task: Task
    questions: list[Question]
    prompts: list[list[int]]
    allowed: list[dict[int, str]]
    dropped_shots: int

    @property
    def max_new_tokens(self) -> int:
        """1 where the answer is read from the first token."""
        return 1 if all(self.allowed) else self.task.max_new_tokens


@dataclass
class TaskScore:
    """Result of a task.

    Attributes:
        right, total: answers.
        groups: subject -> [right, total].
        solved: questions with at least one right answer, of `num_questions`.
        unscored: answers that the scorer could not score (counted as wrong), by reason.
        pass_at: number of answers k -> estimated fraction of questions that k answers solve; where there are several answers.
        majority: fraction of questions whose most frequent answer is right; None where answers cannot be compared.
        mean_score: mean score of all answers, where some score is neither 0 nor 1; an answer is right from a score of 1 on.
        cut_off: answers that the token limit ended.
        notes: further messages of scorers, such as missing isolation of the sandbox.
    """

    task: str
    right: int = 0
    total: int = 0
    num_questions: int = 0
    solved: int = 0
    groups: dict[str, list[int]] = field(default_factory=dict)
    unscored: dict[str, int] = field(default_factory=dict)
    pass_at: dict[int, float] = field(default_factory=dict)
    majority: float | None = None
    mean_score: float | None = None
    cut_off: int = 0
    dropped_shots: int = 0
    num_shots: int = 0
    tokens: int = 0
    generate_s: float = 0.0
    notes: list[str] = field(default_factory=list)

    @property
    def accuracy(self) -> float:
        """Fraction of right answers."""
        return self.right / self.total

    @property
    def group_mean(self) -> float:
        """Mean of the subjects' accuracies."""
        return sum(right / total for right, total in self.groups.values()) / len(self.groups)

    def group_table(self) -> str:
        """Return one line a subject, for tasks that have several."""
        width = max(map(len, self.groups))
        return "\n".join(
            f"  {name.ljust(width)}  {right / total:7.2%}  {right} / {total}"
            for name, (right, total) in sorted(self.groups.items())
        )

    def record(self) -> dict[str, Any]:
        """Return all fields, for JSON."""
        groups = {
            name: {"accuracy": right / total, "right": right, "total": total} for name, (right, total) in self.groups.items()
        }
        return {"accuracy": self.accuracy, "group_mean": self.group_mean, **asdict(self), "groups": groups}


def prepare_task(task: Task, prompt_format: PromptFormat, settings: EvaluationSettings) -> PreparedTask:
    """Read the task's data and build its prompts; where a prompt is too long, examples are left out, first ones first.

    Raises:
        ValueError: the data is not as the task needs it, or a prompt is too long even without examples.
    """
    template = task.options.instruction_template or ""
    questions = [replace(question, template=template) for question in _select_questions(task.questions(), settings.max_samples)]
    if not questions:
        raise ValueError(f"{task.name}: {task.path} has no questions")
    room = settings.max_model_len - (1 if all(question.choices for question in questions) else task.max_new_tokens)
    chat = prompt_format.is_chat
    prompts = prompt_format.encode([question.as_conversation(chat=chat) for question in questions])
    dropped = 0
    for row, question in enumerate(questions):
        num_shots = len(question.shots)
        while len(prompts[row]) > room and num_shots:
            num_shots, dropped = num_shots - 1, dropped + 1
            prompts[row] = prompt_format.encode([question.as_conversation(chat=chat, num_shots=num_shots)])[0]
        if len(prompts[row]) > room:
            raise ValueError(
                f"{task.name}: a question has {len(prompts[row])} tokens; {max(room, 0)} fit with the answer in "
                f"{settings.max_model_len} (--max-length, --max-new-tokens)"
            )
    first_tokens: dict[tuple[str, ...], dict[int, str]] = {}
    for question in questions:
        if question.choices and question.choices not in first_tokens:
            first_tokens[question.choices] = _find_choice_tokens(prompt_format, question.choices)
    allowed = [first_tokens.get(question.choices, {}) for question in questions]
    return PreparedTask(task, questions, prompts, allowed, dropped)


def _select_questions(questions: list[Question], count: int | None) -> list[Question]:
    """Return the first questions of every subject in turn, `count` in all, in their own order."""
    if count is None or count >= len(questions):
        return questions
    groups: dict[str, list[int]] = {}
    for row, question in enumerate(questions):
        groups.setdefault(question.group, []).append(row)
    depth = max(map(len, groups.values()))
    turns = [rows[index] for index in range(depth) for rows in groups.values() if index < len(rows)]
    return [questions[row] for row in sorted(turns[:count])]


def _find_choice_tokens(prompt_format: PromptFormat, choices: Sequence[str]) -> dict[int, str]:
    """Return first token -> choice, with and without a blank before the word, where these differ for all choices.

    Raises:
        ValueError: in the tokenizer two choices start with the same token.
    """
    choice_by_token: dict[int, str] = {}
    # after a plain "Answer:" comes a word with its blank, a chat's turn starts without
    for blank in (" ", ""):
        firsts = [prompt_format.tokenizer(f"{blank}{choice}", add_special_tokens=False)["input_ids"][0] for choice in choices]
        if len(set(firsts)) == len(choices):
            choice_by_token |= dict(zip(firsts, choices))
    if not choice_by_token:
        raise ValueError(
            f"the tokenizer begins {' and '.join(choices)} with the same token; --chain-of-thought reads whole answers"
        )
    return choice_by_token


def _answer(
    engine: Engine, requests: Sequence[Request], are_choices: bool, sampling: Sampling, stops: Sequence[str]
) -> dict[int, Answer]:
    """Return answers by index of the request, for the requests for a choice or for the others."""
    indexes = [index for index, request in enumerate(requests) if bool(request.allowed_ids) == are_choices]
    if not indexes:
        return {}
    return dict(zip(indexes, collect(engine.stream([requests[index] for index in indexes], sampling, stops), len(indexes))))


def run_task(
    engine: Engine, prepared: PreparedTask, prompt_format: PromptFormat, settings: EvaluationSettings
) -> tuple[TaskScore, list[dict[str, Any]]]:
    """Return the score, and one record for each answer.

    Raises:
        TaskError: no answer could be scored.
    """
    task = prepared.task
    # the most likely token is the same in every sample
    num_return = 1 if all(prepared.allowed) else settings.num_return
    requests = [
        Request(
            prompt,
            seed=sample_seed(settings.seed, 0, row, sample),
            allowed_ids=tuple(allowed),
            max_tokens=1 if allowed else min(task.max_new_tokens, settings.max_model_len - len(prompt)),
            label=str(question.label),
            columns=question.columns,
        )
        for row, (question, prompt, allowed) in enumerate(zip(prepared.questions, prepared.prompts, prepared.allowed))
        for sample in range(num_return)
    ]
    # a chat ends its turn itself; a model that continues text would continue with a question of its own
    stops = () if prompt_format.is_chat else task.stop_strings
    start = time.perf_counter()
    # the first token of a choice is the most likely one, whatever the sampling of other answers
    answers = _answer(engine, requests, True, Sampling(0.0, task.max_new_tokens, ()), stops)
    answers |= _answer(engine, requests, False, settings.sampling, stops)
    seconds = time.perf_counter() - start
    score = TaskScore(
        task.name,
        num_questions=len(prepared.questions),
        dropped_shots=prepared.dropped_shots,
        num_shots=task.num_shots,
        tokens=sum(len(answer.token_ids) for answer in answers.values()),
        generate_s=seconds,
    )
    records = [
        _build_record(prepared, prompt_format, row // num_return, answer, stops) for row, answer in sorted(answers.items())
    ]
    _score(prepared, score, records)
    _count(score, records)
    if num_return > 1:
        _add_statistics(score, task, records, num_return)
    return score, records


def _build_record(
    prepared: PreparedTask, prompt_format: PromptFormat, row: int, answer: Answer, stops: Sequence[str]
) -> dict[str, Any]:
    """Return an answer with its question; the scoring adds `right`."""
    question, allowed = prepared.questions[row], prepared.allowed[row]
    common = {
        "task": prepared.task.name,
        "group": question.group,
        "index": row,
        "prompt": prompt_format.tokenizer.decode(prepared.prompts[row], skip_special_tokens=False),
        "label": question.label,
        "response_tokens": len(answer.token_ids),
    }
    if allowed:
        return {**common, "response": allowed[answer.token_ids[0]], "finish_reason": "stop"}
    text = cut_at_stop(prompt_format.decode(answer.token_ids), stops)
    thought, after = prompt_format.split_thought(text, prepared.prompts[row])
    text = text if after == text else after.lstrip()
    return {**common, **({"thought": thought} if thought else {}), "response": text, "finish_reason": answer.finish}


def _score(prepared: PreparedTask, score: TaskScore, records: list[dict[str, Any]]) -> None:
    """Set `right` (and `error`) of every record."""
    open_records = []
    for record in records:
        if prepared.allowed[record["index"]]:
            record["right"] = record["response"] == prepared.questions[record["index"]].label
        else:
            open_records.append(record)
    if not open_records:
        return
    task = prepared.task
    samples = []
    for record in open_records:
        question = prepared.questions[record["index"]]
        samples.append(
            RewardSample(
                prompt=question.text,
                response=task.response(question, record["response"]),
                label=question.label,
                columns=question.columns,
                truncated=record["finish_reason"] == "length",
            )
        )
    workers = min(_MAX_SCORING_WORKERS, os.cpu_count() or 1, len(samples))
    settings = RewardSettings(
        max_tokens=max(task.max_new_tokens, 1),
        reward_timeout_s=_SCORING_LIMIT_S,
        num_reward_workers=workers,
        # no fraction of failures ends it: they are counted, and shown with the score
        reward_failure_limit=1.0,
        external_plugins=task.options.external_plugins,
    )
    with RewardPool([task.scorer], settings=settings) as pool:
        results = pool.score(samples)
    notes: dict[str, None] = {}
    for record, result in zip(open_records, results):
        record["score"] = result.parts.get(task.scorer, 0.0)
        record["right"] = record["score"] >= 1.0
        if result.failed:
            score.unscored[result.state] = score.unscored.get(result.state, 0) + 1
            record["error"] = result.error
        notes |= {f"{name.rpartition('/')[2]}: {text}": None for name, text in result.notes.items()}
    score.notes = list(notes)
    if all(result.failed for result in results):
        raise TaskError(f"{task.name}: {task.scorer} could score no answer; for example {results[0].error}")


def _add_statistics(score: TaskScore, task: Task, records: list[dict[str, Any]], num_return: int) -> None:
    """Set pass@k for k = 1, 2, 4 ... and the majority vote, over `num_return` answers to each question."""
    groups = [records[start : start + num_return] for start in range(0, len(records), num_return)]
    right = [[bool(record["right"]) for record in group] for group in groups]
    score.pass_at = compute_pass_at(right)
    score.majority = compute_majority([[task.vote(record["response"]) for record in group] for group in groups], right)


def _count(score: TaskScore, records: list[dict[str, Any]]) -> None:
    solved: set[int] = set()
    for record in records:
        group = score.groups.setdefault(record["group"], [0, 0])
        group[0] += record["right"]
        group[1] += 1
        score.right += record["right"]
        score.total += 1
        score.cut_off += record["finish_reason"] == "length"
        if record["right"]:
            solved.add(record["index"])
    score.solved = len(solved)
    graded = [float(record.get("score", record["right"])) for record in records]
    if not set(graded) <= {0.0, 1.0}:
        score.mean_score = math.fsum(graded) / len(graded)


# ---------------------------------------------------------------------- tables


def summary_table(scores: Sequence[TaskScore], failures: dict[str, str]) -> str:
    """Return one line a task: accuracy, mean of graded scores where there are some, counts, failures."""
    is_graded = any(score.mean_score is not None for score in scores)
    counts = ("right / total", "subjects", "subject mean", "cut off", "unscored", "tokens/s")
    header = ("task", "accuracy", *(["mean score"] if is_graded else []), *counts)
    lines = [
        (
            score.task,
            f"{score.accuracy:.2%}",
            *(["" if score.mean_score is None else f"{score.mean_score:.4f}"] if is_graded else []),
            f"{score.right} / {score.total}",
            str(len(score.groups)),
            f"{score.group_mean:.2%}",
            str(score.cut_off),
            str(sum(score.unscored.values())),
            f"{score.tokens / score.generate_s:.0f}",
        )
        for score in scores
    ]
    widths = [max(map(len, cells)) for cells in zip(header, *lines)]

    def row(cells: Sequence[str]) -> str:
        first = cells[0].ljust(widths[0])
        return "  ".join([first, *(cell.rjust(width) for cell, width in zip(cells[1:], widths[1:]))]).rstrip()

    table = [row(header), *map(row, lines)]
    return "\n".join([*table, *(f"{name}  FAILED: {reason}" for name, reason in failures.items())])
