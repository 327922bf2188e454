"""Stages dpo, simpo, cpo and orpo learn from pairs of a chosen and a rejected answer to one prompt, kto from single answers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from mindspeed_rl.algorithms.interfaces import LossInputs, LossOutput
from mindspeed_rl.algorithms.preference_losses import (
    DPOSettings,
    PreferenceBatch,
    SimPOSettings,
    UnpairedBatch,
    cpo_loss,
    dpo_loss,
    kto_loss,
    orpo_loss,
    simpo_loss,
)
from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.data.datasets import JudgedAnswer, PreferenceDataset, PreferencePair, UnpairedDataset
from mindspeed_rl.engine.batching import Rows
from mindspeed_rl.models.vision import PreparedImage
from mindspeed_rl.workers.stages.instruction import build_labelled_rows
from mindspeed_rl.workers.stages.stage import Stage

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: rows of a pair: the chosen one first
PAIR = 2


class Pairs(Stage[PreferencePair]):
    """Base class of the stages that learn from pairs."""

    unit = "pairs"

    def open(self, prefix: str | Path) -> PreferenceDataset:
        dataset = PreferenceDataset(prefix, seq_length=self.config.seq_length, image_rules=self.image_rules)
        self.num_too_long += dataset.num_too_long
        return dataset

    def images(self, items: Sequence[PreferencePair]) -> list[tuple[PreparedImage, ...]] | None:
        """Return the images of the rows of the pairs; None for a model of text."""
        return None if self.image_rules is None else [item.get("images", ()) for item in items for _ in range(PAIR)]


class _Preference(Pairs):
    """Base class of the stages that compare log-probs, summed over the answers."""

    def __init__(self, config: MegatronConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(config, tokenizer)
        self._compute_loss = self._choose_loss(config)

    @staticmethod
    @abstractmethod
    def _choose_loss(config: MegatronConfig) -> Callable[[PreferenceBatch], LossOutput]:
        """Return the loss of the stage with the numbers of its keys."""

    def rows(self, items: Sequence[PreferencePair]) -> Rows:
        sides = []
        for item in items:
            sides.append((item["chosen_input_ids"], item["chosen_labels"]))
            sides.append((item["rejected_input_ids"], item["rejected_labels"]))
        rows = build_labelled_rows(sides)
        return replace(rows, group_sizes=[PAIR] * len(items), images=self.images(items))

    def loss(self, inputs: LossInputs) -> LossOutput:
        """Return the loss from sums and lengths of the answers, and the reference's sums where the rows have them."""
        mask = inputs.columns["loss_mask"] & inputs.mask
        sums, lengths = torch.where(mask, inputs.outputs[0], 0.0).sum(1), mask.sum(1)
        ref = inputs.columns.get("ref_log_probs")
        batch = PreferenceBatch(
            *(sums[side::PAIR] for side in range(PAIR)),
            *(lengths[side::PAIR] for side in range(PAIR)),
            *(None if ref is None else ref[side::PAIR] for side in range(PAIR)),
        )
        return self._compute_loss(batch)


class DirectPreference(_Preference):
    """DPO, with a reference model."""

    needs_ref = True

    @staticmethod
    def _choose_loss(config: MegatronConfig) -> Callable[[PreferenceBatch], LossOutput]:
        return partial(dpo_loss, settings=DPOSettings.from_config(config))


class SimplePreference(_Preference):
    """SimPO, without one."""

    @staticmethod
    def _choose_loss(config: MegatronConfig) -> Callable[[PreferenceBatch], LossOutput]:
        return partial(simpo_loss, settings=SimPOSettings.from_config(config))


class ContrastivePreference(_Preference):
    """CPO: DPO without a reference, and a supervised loss on the chosen answer."""

    @staticmethod
    def _choose_loss(config: MegatronConfig) -> Callable[[PreferenceBatch], LossOutput]:
        return partial(cpo_loss, beta=config.cpo_beta, alpha=config.cpo_alpha)


class OddsRatioPreference(_Preference):
    """ORPO: supervised tuning on the chosen answer, and the odds of both answers compared."""

    @staticmethod
    def _choose_loss(config: MegatronConfig) -> Callable[[PreferenceBatch], LossOutput]:
        return partial(orpo_loss, weight=config.orpo_lambda)


class UnpairedPreference(Stage[JudgedAnswer]):
    """KTO: each answer is desirable or not, with a reference model."""

    unit = "answers"
    needs_ref = True

    def open(self, prefix: str | Path) -> UnpairedDataset:
        config = self.config
        dataset = UnpairedDataset(prefix, seq_length=config.seq_length, seed=config.seed, image_rules=self.image_rules)
        self.num_too_long += dataset.num_too_long
        return dataset

    def rows(self, items: Sequence[JudgedAnswer]) -> Rows:
        rows = build_labelled_rows([(item["input_ids"], item["labels"]) for item in items])
        desirable = [torch.tensor(item["desirable"]) for item in items]
        return replace(rows, columns={**rows.columns, "desirable": desirable}, images=self._images(items))

    def _images(self, items: Sequence[JudgedAnswer]) -> list[tuple[PreparedImage, ...]] | None:
        return None if self.image_rules is None else [item.get("images", ()) for item in items]

    def mismatched_rows(self, items: Sequence[JudgedAnswer]) -> Rows | None:
        if self.config.kto_loss_type != "kto":
            return None
        rows = build_labelled_rows([(item["mismatched_input_ids"], item["mismatched_labels"]) for item in items])
        return replace(rows, images=self._images(items))

    def loss(self, inputs: LossInputs) -> LossOutput:
        """Return the loss from the sums of policy and reference over the answers."""
        config, columns = self.config, inputs.columns
        sums = torch.where(columns["loss_mask"] & inputs.mask, inputs.outputs[0], 0.0).sum(1)
        batch = UnpairedBatch(sums, columns["ref_log_probs"], columns["desirable"], columns.get("kl"))
        weights = config.kto_desirable_weight, config.kto_undesirable_weight
        return kto_loss(batch, beta=config.kto_beta, desirable_weight=weights[0], undesirable_weight=weights[1])
