"""Between the data plane's columns and the engine's rows."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from mindspeed_rl.dataplane.records import Batch
from mindspeed_rl.engine.batching import Rows


def to_rows(batch: Batch, columns: Mapping[str, str]) -> Rows:
    """The engine's rows from data-plane columns.

    Args:
        batch: has input_ids and prompt_length.
        columns: engine column -> data-plane column.
    """
    return Rows(
        input_ids=[ids.to(torch.int64) for ids in batch["input_ids"]],
        prompt_lengths=[int(length) for length in batch["prompt_length"]],
        columns={name: list(batch[source]) for name, source in columns.items()},
    )
