"""What a reward model reads and how its outputs become one score for a response: outcome and process reward models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.data.tokenizer import single_token
from mindspeed_rl.engine.batching import Rows
from mindspeed_rl.rewards.process import aggregate, mark_steps, split_steps
from mindspeed_rl.workers.rows import marked_rows, whole_rows


class Scoring(Protocol):
    """Of one kind of reward model.

    Attributes:
        head: what the model ends in: "reward" for a value head, "lm" for the vocabulary.
        choices: token ids whose logits are read, None for a value head.
    """

    head: Literal["lm", "reward"]
    choices: tuple[int, int] | None

    def rows(self, prompts: Sequence[Tensor], responses: Sequence[Tensor]) -> Rows:
        """What the model reads, a row for each response."""

    def scores(self, rows: Rows, outputs: tuple[list[Tensor], list[Tensor]]) -> list[float]:
        """One score a row, from what `TrainEngine.forward` returned for the rows."""


class OutcomeScoring:
    """A value head's number at the last token of prompt and response, as sequence classifiers of transformers give it."""

    head: Literal["lm", "reward"] = "reward"
    choices: tuple[int, int] | None = None

    def rows(self, prompts: Sequence[Tensor], responses: Sequence[Tensor]) -> Rows:
        return whole_rows([torch.cat([prompt, response]) for prompt, response in zip(prompts, responses)])

    def scores(self, rows: Rows, outputs: tuple[list[Tensor], list[Tensor]]) -> list[float]:
        return [float(value) for value in outputs[0]]


class ProcessScoring:
    """The probability of the good one of two judgement tokens behind every step, aggregated over the steps.

    The response is cut into steps at blank lines, and each is followed by `placeholder_token`, at which the model judges.
    """

    head: Literal["lm", "reward"] = "lm"

    def __init__(self, config: MegatronConfig, tokenizer: Any, aggregation: str) -> None:
        """
        Raises:
            ValueError: `reward_tokens` are not two, or they or the placeholder are not one token each.
        """
        if len(config.reward_tokens) != 2:
            raise ValueError(
                f"reward_config.reward_tokens: {config.reward_tokens} must be two tokens here: a good step's, then a bad one's."
            )
        self._tokenizer, self._aggregation, self._mark = tokenizer, aggregation, config.placeholder_token
        good, bad = (single_token(tokenizer, token, "reward_config.reward_tokens") for token in config.reward_tokens)
        self.choices: tuple[int, int] | None = (good, bad)
        self._mark_id = single_token(tokenizer, self._mark, "reward_config.placeholder_token")

    def rows(self, prompts: Sequence[Tensor], responses: Sequence[Tensor]) -> Rows:
        marked = []
        for response in responses:
            # a mark that the response itself contains would be judged as the end of a step
            text = self._tokenizer.decode(response.tolist(), skip_special_tokens=True).replace(self._mark, "")
            steps = split_steps(text) or [""]
            marked.append(torch.tensor(self._tokenizer.encode(mark_steps(steps, self._mark), add_special_tokens=False)))
        return marked_rows(prompts, marked, self._mark_id)

    def scores(self, rows: Rows, outputs: tuple[list[Tensor], list[Tensor]]) -> list[float]:
        judged = zip(*outputs, rows.columns["is_mark"])
        return [aggregate(torch.sigmoid(good - bad)[is_mark].tolist(), self._aggregation) for good, bad, is_mark in judged]


def make_scoring(config: MegatronConfig, tokenizer: Any, aggregation: str) -> Scoring:
    """A process reward model where `reward_tokens` say how it judges, an outcome reward model otherwise."""
    return ProcessScoring(config, tokenizer, aggregation) if config.reward_tokens else OutcomeScoring()
