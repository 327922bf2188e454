"""Supervised tuning: samples (padded) and packs, read by memory map."""

from __future__ import annotations

from pathlib import Path
from typing import TypedDict

import numpy as np

from mindspeed_rl.data.indexed import IGNORE_INDEX, IndexedColumns


class InstructionSample(TypedDict):
    """One row.

    input_ids, labels: [tokens] int64, padding cut off; labels are unshifted, IGNORE_INDEX where nothing is learnt.
    sample_lengths: [samples] int64, the lengths of the samples in a pack; they add up to `tokens`. One entry for a plain row.
    """

    input_ids: np.ndarray
    labels: np.ndarray
    sample_lengths: np.ndarray


class InstructionDataset:
    """Rows of `<prefix>_packed_{input_ids,attention_mask,labels}_document`.

    Where samples of a pack end is read from the attention mask of a neat pack (1,1,2,2,...,0); with `split_at_eos`, a plain
    pack is split after each end token that closes an answer. A row that is no pack is one sample either way.

    Args:
        prefix: the --output-prefix of preprocessing.
        seq_length: rows longer than this are cut at the end when read; None reads them whole.
        eos_id: the end token (of the template, where that replaces the tokenizer's); needed for `split_at_eos`.
        split_at_eos: keep the samples of a plain pack apart.
        pad_id: trailing tokens of this id without a label are padding and cut off; None keeps them.
    """

    def __init__(
        self,
        prefix: str | Path,
        *,
        seq_length: int | None = None,
        pad_id: int | None = None,
        eos_id: int | None = None,
        split_at_eos: bool = False,
    ) -> None:
        if split_at_eos and eos_id is None:
            raise ValueError("split_at_eos needs eos_id, the id of the end token")
        columns = ("input_ids", "attention_mask", "labels")
        self._rows = IndexedColumns(prefix, columns, same_length=[columns])
        self._seq_length = seq_length
        self._pad_id = pad_id
        self._eos_id = eos_id
        self._split_at_eos = split_at_eos

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def lengths(self) -> np.ndarray:
        """[rows] int32: stored tokens per row, padding included, without reading the rows."""
        return self._rows.lengths("input_ids")

    def __getitem__(self, index: int) -> InstructionSample:
        input_ids = self._rows.row(index, "input_ids").astype(np.int64)
        labels = self._rows.row(index, "labels").astype(np.int64)
        numbers = self._rows.row(index, "attention_mask")
        # a neat pack ends in padding (0) or in the number of its last sample; one sample that fills the row is no pack at all
        neat = bool(numbers[-1] != 1)
        used = np.flatnonzero((numbers != 0) & ((labels != IGNORE_INDEX) | (input_ids != self._pad_id) if not neat else True))
        end = int(used[-1]) + 1 if len(used) else 0
        if self._seq_length is not None:
            end = min(end, self._seq_length)
        input_ids, labels, numbers = input_ids[:end], labels[:end], numbers[:end]
        if neat:
            ends = np.append(np.flatnonzero(np.diff(numbers)) + 1, end)
        elif self._split_at_eos:
            ends = _ends_after_eos(input_ids, labels, self._eos_id)
        else:
            ends = np.array([end])
        return InstructionSample(input_ids=input_ids, labels=labels, sample_lengths=np.diff(ends, prepend=0).astype(np.int64))


def _ends_after_eos(input_ids: np.ndarray, labels: np.ndarray, eos_id: int | None) -> np.ndarray:
    """Ends of the pieces that close with a trained end token; what follows the last one is a piece too."""
    ends = np.flatnonzero((input_ids == eos_id) & (labels == eos_id)) + 1
    if not len(ends) or ends[-1] != len(input_ids):
        ends = np.append(ends, len(input_ids))
    return ends
