"""Stage sft: the mean negative log-prob of the labelled tokens, over plain rows or packs of samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.utils.data import Subset

from mindspeed_rl.algorithms.distillation import compute_divergence
from mindspeed_rl.algorithms.interfaces import LossInputs, LossOutput, PendingMetrics, masked_mean
from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.data.datasets import InstructionDataset, InstructionSample, StoredLogProbs
from mindspeed_rl.data.images import split_images
from mindspeed_rl.data.indexed import IGNORE_INDEX
from mindspeed_rl.data.tokenizer import hash_vocabulary
from mindspeed_rl.engine.batching import Rows
from mindspeed_rl.engine.head_outputs import TeacherDivergence
from mindspeed_rl.models.vision import PreparedImage
from mindspeed_rl.workers.stages.stage import Stage

if TYPE_CHECKING:
    from _typeshed import SupportsLenAndGetItem
    from transformers import PreTrainedTokenizerBase


def build_labelled_rows(samples: Sequence[tuple[np.ndarray, np.ndarray]]) -> Rows:
    """Return rows that predict the labelled tokens, without log-probs of the tokens before the first of them.

    Args:
        samples: (input_ids, labels) of each row, unshifted, IGNORE_INDEX on tokens that are not learnt.
    """
    input_ids, prompt_lengths, targets, masks = [], [], [], []
    for ids, labels in samples:
        # no token predicts the first one
        labelled = np.flatnonzero(labels[1:] != IGNORE_INDEX) + 1
        first = int(labelled[0]) if len(labelled) else len(ids)
        mask = torch.from_numpy(labels[first:] != IGNORE_INDEX)
        input_ids.append(torch.from_numpy(ids))
        prompt_lengths.append(first)
        # 0 on tokens that are not learnt: IGNORE_INDEX is not a token of the vocabulary
        targets.append(torch.from_numpy(labels[first:]) * mask)
        masks.append(mask)
    return Rows(input_ids, prompt_lengths, {"loss_mask": masks}, targets)


class Instruction(Stage[InstructionSample]):
    """Supervised tuning. With `reset_attention_mask` the samples of a pack see only themselves."""

    def __init__(self, config: MegatronConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(config, tokenizer)
        self.packed = config.reset_attention_mask
        check_resets(config.reset_position_ids, config.reset_attention_mask)
        self._has_teacher = config.sft_loss_type in ("forward_kl", "reverse_kl")
        if self._has_teacher:
            divergence = partial(_compute_divergence, kind=config.sft_loss_type, rest=config.teacher_topk_rest)
            self.outputs = TeacherDivergence(divergence)

    def open(self, prefix: str | Path) -> InstructionDataset:
        config = self.config
        return InstructionDataset(
            prefix,
            seq_length=config.seq_length,
            pad_id=self.tokenizer.pad_token_id,
            splits_packs=config.pack and config.reset_attention_mask and not config.neat_pack,
            image_rules=self.image_rules,
            teacher=self._open_teacher(prefix) if self._has_teacher else None,
        )

    def _open_teacher(self, prefix: str | Path) -> StoredLogProbs:
        """Open the stored log-probs of a teacher.

        Raises:
            ValueError: there are none, or they are of another tokenizer.
        """
        stored, ours = StoredLogProbs(prefix), hash_vocabulary(self.tokenizer.get_vocab())
        if stored.metadata["vocabulary"] != ours:
            raise ValueError(
                f"sft_loss_type: a teacher's log-probs for {prefix} are of vocabulary {stored.metadata['vocabulary']}, but the "
                f"tokenizer of this run has {ours}"
            )
        return stored

    def loss(self, inputs: LossInputs) -> LossOutput:
        """Return the loss of a micro-batch: the other stages' loss, or the divergence from a teacher, summed over tokens."""
        if not self._has_teacher:
            return super().loss(inputs)
        mask = inputs.columns["loss_mask"] & inputs.mask
        divergence, student, teacher = (torch.where(mask, values, 0.0) for values in inputs.outputs[2:])
        masses = {"student_mass": masked_mean(student, mask), "teacher_mass": masked_mean(teacher, mask)}
        return LossOutput(divergence.sum(), mask.sum(), PendingMetrics(masses))

    def count_cut(self, items: SupportsLenAndGetItem[InstructionSample]) -> tuple[int, int]:
        assert isinstance(items, Subset) and isinstance(items.dataset, InstructionDataset)  # as `datasets` returns them
        return items.dataset.count_cut(items.indices)

    def rows(self, items: Sequence[InstructionSample]) -> Rows:
        samples, group_sizes = [], []
        images: list[tuple[PreparedImage, ...]] = []
        for item in items:
            ends = np.cumsum(item["sample_lengths"]).tolist()
            cuts = list(zip([0, *ends], ends)) if self.config.reset_attention_mask else [(0, len(item["input_ids"]))]
            pack = [(item["input_ids"][first:end], item["labels"][first:end]) for first, end in cuts]
            learnt = [index for index, sample in enumerate(pack) if (sample[1][1:] != IGNORE_INDEX).any()] or [0]
            samples += [pack[index] for index in learnt]
            group_sizes.append(len(learnt))
            if self.image_rules is not None:
                split = split_images(item.get("images", ()), [ids for ids, _ in pack])
                images += [split[index] for index in learnt]
        rows = build_labelled_rows(samples)
        if self._has_teacher:
            rows = replace(rows, columns={**rows.columns, **_split_teachers(items, rows, group_sizes)})
        return replace(rows, group_sizes=group_sizes, images=images or None)


class Documents(Instruction):
    """Stage pretrain of documents with images: the loss is that of every token of their text."""

    unit = "documents"


def _compute_divergence(student: torch.Tensor, teacher: torch.Tensor, *, kind: str, rest: str) -> tuple[torch.Tensor, ...]:
    """Return the divergence [n], and the probability of the stored tokens under student and teacher."""
    masses = [values.detach().exp().sum(-1) for values in (student, teacher)]
    return compute_divergence(student, teacher, kind=kind, rest=rest), masses[0], masses[1]


def _split_teachers(
    items: Sequence[InstructionSample], rows: Rows, group_sizes: Sequence[int]
) -> dict[str, list[torch.Tensor]]:
    """Return the columns of the teacher, of each row that an item has become.

    Raises:
        ValueError: they were stored for rows of other lengths.
    """
    columns: dict[str, list[torch.Tensor]] = {"teacher_ids": [], "teacher_log_probs": []}
    lengths = rows.response_lengths
    for item, size in zip(items, group_sizes, strict=True):
        mine, lengths = lengths[:size], lengths[size:]
        for name, values in zip(columns, item["teacher"]):
            if len(values) != sum(mine):
                raise ValueError(
                    f"sft_loss_type: the teacher's log-probs of a row are of {len(values)} tokens, but it has {sum(mine)}: "
                    "they were written with another seq_length or other packs; write them again"
                )
            columns[name] += torch.from_numpy(values).split(mine)
    return columns


def check_resets(position_ids: bool, attention_mask: bool) -> None:
    """Check that positions restart where the attention does.

    Raises:
        ValueError: they do not.
    """
    if position_ids and not attention_mask:
        raise ValueError(
            "reset_position_ids: true needs reset_attention_mask: true; rotary positions are relative, so they restart "
            "where the attention does, and nowhere else."
        )
