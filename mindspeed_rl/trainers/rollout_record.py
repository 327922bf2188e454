"""Rollout batches of a run as files that `mindspeed-rl parity` replays."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mindspeed_rl.algorithms.interfaces import AdvantageInputs
from mindspeed_rl.algorithms.rollout_file import RolloutBatch
from mindspeed_rl.config import RLConfig, Run, response_limit
from mindspeed_rl.config.keys.schema import default_of
from mindspeed_rl.dataplane.client import DataPlane
from mindspeed_rl.dataplane.columns import ragged

#: column of the file -> column of the data plane
_ALWAYS = {"log_probs": "old_log_probs", "rollout_log_probs": "rollout_log_probs", "entropy": "entropies"}


def save_rollout(
    path: Path,
    run: Run,
    plane: DataPlane,
    inputs: AdvantageInputs,
    loss_mask: Tensor,
    *,
    kl_coef: float,
    with_reference: bool,
) -> None:
    """Writes the batch of this iteration, as it stands before the update.

    Args:
        path: ends in .safetensors.
        inputs: what the advantages were made of.
        loss_mask: [B, R] bool; tokens that may train, before the filter of overlong responses.
        kl_coef: this iteration's coefficient; the file has it in place of the run file's.
        with_reference: rows have ref_log_probs.
    """
    names = _ALWAYS | ({"ref_log_probs": "ref_log_probs"} if with_reference else {})
    rows, width = inputs.response_mask.shape
    columns = ["input_ids", "truncated", "weight_versions", *names.values()]
    batch, _ = plane.get("metrics", columns, indexes=range(rows), timeout_s=run.deadlines.rows_s)
    longest = max(len(ids) for ids in batch["input_ids"])
    tensors = {
        "input_ids": ragged(batch["input_ids"]).padded(0, longest),
        "response_mask": inputs.response_mask,
        "truncated": ragged(batch["truncated"]).tensor().bool(),
        "rewards": inputs.rewards,
        "scored": inputs.valid,
        "weight_versions": ragged(batch["weight_versions"]).padded(-1, width),
        **{name: ragged(batch[column]).padded(0.0, width) for name, column in names.items()},
    }
    if not torch.equal(loss_mask, inputs.response_mask):
        tensors["loss_mask"] = loss_mask
    tensors |= {
        name: value
        for name in ("values", "greedy_rewards", "reward_components")
        if (value := getattr(inputs, name)) is not None
    }
    limit = response_limit(run.config)
    RolloutBatch(tensors, inputs.group_size, limit, run.stage, _keys(run.rl, kl_coef)).save(path)


def _keys(rl: RLConfig, kl_coef: float) -> dict[str, Any]:
    """Keys of rl_config that differ from their defaults; the KL coefficient and the group by their plain names."""
    keys = {
        field.name: value
        for field in dataclasses.fields(rl)
        if not dataclasses.is_dataclass(value := getattr(rl, field.name)) and value != default_of(field)
    }
    for other in ("beta", "num_generations", "num_iterations", "reward_funcs", "reward_weights"):
        keys.pop(other, None)
    return keys | {"init_kl_coef": kl_coef}
