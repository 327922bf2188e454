"""Stages orm and prm: a score for an answer from pairs, a judgement of each step from placeholders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from mindspeed_rl.algorithms.interfaces import LossInputs, LossOutput
from mindspeed_rl.algorithms.preference_losses import pairwise_reward_loss, process_reward_loss
from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.data.datasets import PreferencePair, ProcessRewardDataset, ProcessRewardSample
from mindspeed_rl.data.indexed import IGNORE_INDEX
from mindspeed_rl.data.tokenizer import single_token
from mindspeed_rl.engine.batching import Rows
from mindspeed_rl.engine.head_outputs import ChoiceLogits
from mindspeed_rl.workers.stages.preference import PAIR, Pairs
from mindspeed_rl.workers.stages.stage import Stage

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class OutcomeReward(Pairs):
    """The value head's score on the last token of each answer."""

    head = "reward"

    def rows(self, items: Sequence[PreferencePair]) -> Rows:
        ids = [torch.from_numpy(side) for item in items for side in (item["chosen_input_ids"], item["rejected_input_ids"])]
        # the last token's position "predicts" the score; no token is after it
        unused = [torch.zeros(1, dtype=torch.int64)] * len(ids)
        sizes = [PAIR] * len(items)
        return Rows(ids, [len(row) for row in ids], targets=unused, group_sizes=sizes, images=self.images(items))

    def loss(self, inputs: LossInputs) -> LossOutput:
        scores = inputs.outputs[0][:, 0]
        return pairwise_reward_loss(scores[0::PAIR], scores[1::PAIR], centre=self.config.center_rewards_coefficient)


class ProcessReward(Stage[ProcessRewardSample]):
    """The model's own judgement at each placeholder: among `reward_tokens`, or among the full vocabulary without them."""

    unit = "solutions"

    def __init__(self, config: MegatronConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(config, tokenizer)
        self._choices = tuple(single_token(tokenizer, token, "reward_tokens") for token in config.reward_tokens or ())
        if self._choices:
            self.outputs = ChoiceLogits(self._choices)
            if len(set(self._choices)) < 2:
                raise ValueError(f"reward_tokens: {config.reward_tokens} must be at least two different tokens.")

    def open(self, prefix: str | Path) -> ProcessRewardDataset:
        dataset = ProcessRewardDataset(prefix, seq_length=self.config.seq_length)
        self.num_too_long += dataset.num_too_long
        return dataset

    def rows(self, items: Sequence[ProcessRewardSample]) -> Rows:
        input_ids, prompt_lengths, targets, masks = [], [], [], []
        for item in items:
            first = int(item["step_positions"][0]) if len(item["step_positions"]) else len(item["input_ids"]) - 1
            labels = item["labels"][first:]
            mask = labels != IGNORE_INDEX
            input_ids.append(torch.from_numpy(item["input_ids"]))
            prompt_lengths.append(first + 1)
            targets.append(torch.from_numpy(np.where(mask, self._find_judgements(labels, mask), 0)))
            masks.append(torch.from_numpy(mask))
        # targets are compared with the output at the placeholder itself: the row predicts one position past its last token
        return Rows(input_ids, prompt_lengths, {"loss_mask": masks, "judgements": targets}, targets)

    def _find_judgements(self, labels: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """Return labels as indexes into `reward_tokens`, or as token ids without them."""
        if not self._choices:
            return labels
        matches = labels[:, None] == np.array(self._choices)[None, :]
        wrong = labels[mask & ~matches.any(1)]
        if len(wrong):
            text = self.tokenizer.decode([int(wrong[0])])
            raise ValueError(f"reward_tokens: the data judges a step as {text!r}, none of {self.config.reward_tokens}.")
        return matches.argmax(1)

    def loss(self, inputs: LossInputs) -> LossOutput:
        if not self._choices:
            return super().loss(inputs)
        mask = inputs.columns["loss_mask"] & inputs.mask
        return process_reward_loss(torch.stack(inputs.outputs, dim=-1), inputs.columns["judgements"], mask)
