"""Preference pairs, read by memory map."""

from __future__ import annotations

from pathlib import Path
from typing import TypedDict

import numpy as np

from mindspeed_rl.data.indexed import IndexedColumns


class PreferencePair(TypedDict):
    """One pair; each array is [tokens] int64. Labels are unshifted and hold IGNORE_INDEX on the whole prompt."""

    chosen_input_ids: np.ndarray
    chosen_labels: np.ndarray
    rejected_input_ids: np.ndarray
    rejected_labels: np.ndarray


class PreferenceDataset:
    """Rows of `<prefix>_packed_{chosen,rejected}_{input_ids,labels}_document`.

    Args:
        prefix: the --output-prefix of preprocessing.
        seq_length: pairs with a longer sample are left out; `num_too_long` counts them. None keeps all.
    """

    def __init__(self, prefix: str | Path, *, seq_length: int | None = None) -> None:
        sides = [(f"{side}_input_ids", f"{side}_labels") for side in ("chosen", "rejected")]
        self._rows = IndexedColumns(prefix, [name for pair in sides for name in pair], same_length=sides)
        lengths = np.maximum(self._rows.lengths("chosen_input_ids"), self._rows.lengths("rejected_input_ids"))
        limit = np.iinfo(np.int32).max if seq_length is None else seq_length
        self._kept = np.flatnonzero(lengths <= limit)
        self.num_too_long = len(lengths) - len(self._kept)

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, index: int) -> PreferencePair:
        row = int(self._kept[index])
        return PreferencePair(**{name: self._rows.row(row, name).astype(np.int64) for name in PreferencePair.__annotations__})
