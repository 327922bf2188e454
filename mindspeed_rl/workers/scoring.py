"""Outcome and process reward models: the rows that they read, and one score for a response from their outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.data.tokenizer import single_token
from mindspeed_rl.engine.batching import Rows
from mindspeed_rl.engine.head_outputs import ChoiceLogits, HeadOutputs
from mindspeed_rl.rewards.process_rewards import aggregate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class OutcomeScoring:
    """A value head's number at the last token of prompt and response, as sequence classifiers of transformers give it.

    Attributes:
        outputs: results of the head that are read, of a model without a value head.
    """

    outputs = HeadOutputs()

    def rows(self, prompts: Sequence[Tensor], responses: Sequence[Tensor]) -> Rows:
        """Return the rows that the model reads, one for each response."""
        input_ids = [torch.cat([prompt, response]).to(torch.int64) for prompt, response in zip(prompts, responses)]
        # the engine returns only the output at the last token of a row that is all prompt
        targets = [torch.zeros(1, dtype=torch.int64) for _ in input_ids]
        return Rows(input_ids, prompt_lengths=[len(ids) for ids in input_ids], targets=targets)

    def scores(self, rows: Rows, outputs: Sequence[list[Tensor]]) -> list[float]:
        """Return one score a row from the outputs of `TrainEngine.forward` for the rows."""
        return [float(value) for value in outputs[0]]


def _split_steps(response: str, separator: str = "\n\n") -> list[str]:
    """Split the response after each separator; blank steps join the step before. The steps concatenate to the response."""
    steps: list[str] = []
    chunks = response.split(separator)
    for index, chunk in enumerate(chunks):
        text = chunk + (separator if index < len(chunks) - 1 else "")
        if steps and not chunk.strip():
            steps[-1] += text
        elif text:
            steps.append(text)
    return steps


def _mark_steps(steps: Sequence[str], placeholder: str) -> str:
    """Return the input of a process reward model: each step is followed by the placeholder token at which it is scored."""
    return "".join(f"{step.rstrip()} {placeholder}\n" for step in steps)


class ProcessScoring(OutcomeScoring):
    """The probability of the good one of two judgement tokens after every step, aggregated over the steps.

    The response is cut into steps at blank lines, and each is followed by `placeholder_token`, at which the model judges.
    """

    def __init__(self, config: MegatronConfig, tokenizer: PreTrainedTokenizerBase, aggregation: str) -> None:
        """Look up the tokens.

        Args:
            config: configuration of the reward model.
            tokenizer: the actor's, whose ids the model reads.
            aggregation: name of the function that makes one score of the steps' scores.

        Raises:
            ValueError: `reward_tokens` are not two, or they or the placeholder are not one token each.
        """
        if len(config.reward_tokens) != 2:
            raise ValueError(
                f"reward_config.reward_tokens: {config.reward_tokens} must be two tokens here: a good step's, then a bad one's."
            )
        self._tokenizer, self._aggregation, self._mark = tokenizer, aggregation, config.placeholder_token
        good, bad = (single_token(tokenizer, token, "reward_config.reward_tokens") for token in config.reward_tokens)
        self.outputs = ChoiceLogits((good, bad))
        self._mark_id = single_token(tokenizer, self._mark, "reward_config.placeholder_token")

    def rows(self, prompts: Sequence[Tensor], responses: Sequence[Tensor]) -> Rows:
        """Return rows of which the engine computes outputs from the first mark on; column `is_mark` is True at the marks."""
        input_ids, lengths, masks = [], [], []
        for prompt, response in zip(prompts, responses):
            # a mark that the response itself contains would be judged as the end of a step
            text = self._tokenizer.decode(response.tolist(), skip_special_tokens=True)
            assert isinstance(text, str)  # a list for batches
            marked = _mark_steps(_split_steps(text.replace(self._mark, "")) or [""], self._mark)
            ids = torch.tensor(self._tokenizer.encode(marked, add_special_tokens=False))
            is_mark = ids == self._mark_id
            first = int(is_mark.nonzero()[0])
            input_ids.append(torch.cat([prompt, ids]).to(torch.int64))
            lengths.append(len(prompt) + first + 1)
            masks.append(is_mark[first:])
        targets = [torch.zeros(len(mask), dtype=torch.int64) for mask in masks]
        return Rows(input_ids, lengths, {"is_mark": masks}, targets)

    def scores(self, rows: Rows, outputs: Sequence[list[Tensor]]) -> list[float]:
        judged = zip(*outputs, rows.columns["is_mark"])
        return [aggregate(torch.sigmoid(good - bad)[is_mark].tolist(), self._aggregation) for good, bad, is_mark in judged]
