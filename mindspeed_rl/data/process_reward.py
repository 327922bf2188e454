"""Process reward samples, read by memory map."""

from __future__ import annotations

from pathlib import Path
from typing import TypedDict

import numpy as np

from mindspeed_rl.data.indexed import IGNORE_INDEX, IndexedColumns


class ProcessRewardSample(TypedDict):
    """One solution.

    input_ids, labels: [tokens] int64; the label at each placeholder is its reward token, IGNORE_INDEX elsewhere. The model's
    output at the placeholder itself is compared with it: unlike in language modelling, nothing is shifted.
    step_positions: [steps] int64, where the placeholders are.
    """

    input_ids: np.ndarray
    labels: np.ndarray
    step_positions: np.ndarray


class ProcessRewardDataset:
    """Rows of `<prefix>_packed_{input_ids,labels}_document` that AlpacaStyleProcessRewardHandler wrote.

    Args:
        prefix: the --output-prefix of preprocessing.
        seq_length: longer samples are left out; `num_too_long` counts them. None keeps all.
    """

    def __init__(self, prefix: str | Path, *, seq_length: int | None = None) -> None:
        self._rows = IndexedColumns(prefix, ("input_ids", "labels"), same_length=[("input_ids", "labels")])
        lengths = self._rows.lengths("input_ids")
        limit = np.iinfo(np.int32).max if seq_length is None else seq_length
        self._kept = np.flatnonzero(lengths <= limit)
        self.num_too_long = len(lengths) - len(self._kept)

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, index: int) -> ProcessRewardSample:
        row = int(self._kept[index])
        labels = self._rows.row(row, "labels").astype(np.int64)
        return ProcessRewardSample(
            input_ids=self._rows.row(row, "input_ids").astype(np.int64),
            labels=labels,
            step_positions=np.flatnonzero(labels != IGNORE_INDEX),
        )
