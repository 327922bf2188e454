"""Between the data plane's columns and the engine's rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mindspeed_rl.dataplane.columns import Batch
from mindspeed_rl.engine.batching import Rows

#: what a row's tokens are read from: the tokens of its sequences, and p1, r1, p2, r2 ... of prompts and responses
ROW_COLUMNS = ("input_ids", "sequence_lengths")


def to_rows(batch: Batch, columns: Sequence[str] = ()) -> Rows:
    """The engine's rows from data-plane columns.

    Args:
        batch: has ROW_COLUMNS.
        columns: of the batch that the loss reads.
    """
    sequences = [_pairs(lengths.tolist()) for lengths in batch["sequence_lengths"]]
    return Rows(
        input_ids=[ids.to(torch.int64) for ids in batch["input_ids"]],
        prompt_lengths=[parts[0][0] for parts in sequences],
        columns={name: list(batch[name]) for name in columns},
        sequences=sequences if any(len(parts) > 1 for parts in sequences) else None,
    )


def _pairs(lengths: Sequence[int]) -> list[tuple[int, int]]:
    return list(zip(lengths[::2], lengths[1::2], strict=True))


def whole_rows(sequences: Sequence[torch.Tensor]) -> Rows:
    """Rows of which the engine returns what it computes at the last token, and nothing else."""
    return Rows(
        input_ids=[ids.to(torch.int64) for ids in sequences],
        prompt_lengths=[len(ids) for ids in sequences],
        targets=[torch.zeros(1, dtype=torch.int64) for _ in sequences],
    )


def marked_rows(prompts: Sequence[torch.Tensor], texts: Sequence[torch.Tensor], mark: int) -> Rows:
    """Rows of which the engine returns what it computes from the first mark on; column `is_mark` says where marks are.

    Args:
        texts: what follows the prompts; each has a mark.
    """
    input_ids, lengths, masks = [], [], []
    for prompt, text in zip(prompts, texts):
        is_mark = text == mark
        first = int(is_mark.nonzero()[0])
        input_ids.append(torch.cat([prompt, text]).to(torch.int64))
        lengths.append(len(prompt) + first + 1)
        masks.append(is_mark[first:])
    targets = [torch.zeros(len(mask), dtype=torch.int64) for mask in masks]
    return Rows(input_ids, lengths, {"is_mark": masks}, targets)
