"""Batches of a run as files: rollouts that `mindspeed-rl parity` replays, and the driver's part of an accuracy dump."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from mindspeed_rl.algorithms.rollout_file import RolloutBatch
from mindspeed_rl.config import MsprobeConfig, RLConfig
from mindspeed_rl.config.keys.schema import list_keys
from mindspeed_rl.dataplane.client import DataPlane
from mindspeed_rl.dataplane.columns import ragged
from mindspeed_rl.dumps.record import RECORDS
from mindspeed_rl.run import Run
from mindspeed_rl.trainers.advantages import TrainBatch

#: column of the rollout's file -> column of the data plane
_ROLLOUT_COLUMNS = {"log_probs": "old_log_probs", "rollout_log_probs": "rollout_log_probs", "entropy": "entropies"}
#: columns of a dump, in the order in which they are computed
_DUMP_COLUMNS = ("prompt_ids", "responses", "rollout_log_probs", "rewards")


def batch_recorders(run: Run, plane: DataPlane) -> Iterator[Callable[[TrainBatch], None]]:
    """Yield the functions that record the batches, as the run file sets them."""
    config = run.config.msprobe_config
    if config.msprobe and config.key_data_dump:
        yield _BatchDump(config, plane, run.rl.wait_timeout_s).on_batch
    if run.rl.save_rollouts_interval > 0:
        yield _RolloutFiles(run, plane).on_batch


@dataclass(frozen=True)
class _BatchDump:
    """Rows of the iterations that `msprobe_config` names."""

    config: MsprobeConfig
    plane: DataPlane
    timeout_s: float

    def on_batch(self, batch: TrainBatch) -> None:
        """Write the rows of this iteration where it is one of those."""
        config = self.config
        if not config.step_start <= batch.iteration <= config.step_end:
            return
        columns = [*_DUMP_COLUMNS]
        columns += ["old_log_probs"] if batch.has_old_log_probs else []
        columns += ["ref_log_probs"] if batch.has_ref_log_probs else []
        rows, _ = self.plane.get("metrics", columns, indexes=range(len(batch.advantages)), timeout_s=self.timeout_s)
        max_bytes = int(config.max_dump_gib * 2**30)
        with_tensors = config.task == "tensor"
        record = RECORDS[config.dump_format](
            Path(config.dump_path), batch.iteration, "driver", "data", {"rank": 0}, {"rank": 1}, with_tensors, max_bytes
        )
        for order, name in enumerate(columns):
            column = ragged(rows[name])
            if name == "rewards":
                record.add(name, order, column.tensor())
                continue
            width = max(len(row) for row in rows[name])
            record.add(name, order, column.pad(-1 if name in ("prompt_ids", "responses") else 0.0, width))
        record.add("advantages", len(columns), batch.advantages)
        record.add("loss_mask", len(columns) + 1, batch.loss_mask)
        record.write()


@dataclass(frozen=True)
class _RolloutFiles:
    """The batch of every `save_rollouts_interval`-th iteration, as it is before the update."""

    run: Run
    plane: DataPlane

    def on_batch(self, batch: TrainBatch) -> None:
        """Write the batch where it is due; the file has this iteration's KL coefficient in place of the run file's."""
        run, inputs = self.run, batch.inputs
        if batch.iteration % run.rl.save_rollouts_interval:
            return
        names = _ROLLOUT_COLUMNS | ({"ref_log_probs": "ref_log_probs"} if batch.has_ref_log_probs else {})
        count, width = inputs.response_mask.shape
        lengths = {"lengths": "input_ids", "prompt_lengths": "prompt_ids", "response_lengths": "responses"}
        columns = [*lengths.values(), "truncated", "weight_versions", *names.values()]
        rows, _ = self.plane.get("metrics", columns, indexes=range(count), timeout_s=run.deadlines.rows_s)
        tensors = {
            "input_ids": ragged(rows["input_ids"]).pad(0, max(len(ids) for ids in rows["input_ids"])),
            "response_mask": inputs.response_mask,
            "truncated": ragged(rows["truncated"]).tensor().bool(),
            "rewards": inputs.rewards,
            "scored": inputs.valid,
            "weight_versions": ragged(rows["weight_versions"]).pad(-1, width),
            **{name: ragged(rows[column]).pad(0.0, width) for name, column in names.items()},
            **{name: torch.tensor([len(row) for row in rows[column]]) for name, column in lengths.items()},
        }
        # before the filter of overlong responses, which parity applies itself
        if not torch.equal(batch.young_mask, inputs.response_mask):
            tensors["loss_mask"] = batch.young_mask
        tensors |= {
            name: value
            for name in ("values", "greedy_rewards", "reward_components", "squared_probs")
            if (value := getattr(inputs, name)) is not None
        }
        tensors |= {} if batch.marked is None else {"marked": batch.marked}
        path = run.folder / "rollouts" / f"iteration_{batch.iteration + 1:07d}.safetensors"
        keys = _changed_keys(run.rl) | {"init_kl_coef": batch.kl_coef}
        RolloutBatch(tensors, inputs.group_size, run.config.response_limit, run.stage, keys).save(path)


def _changed_keys(rl: RLConfig) -> dict[str, object]:
    """Return the keys of rl_config that differ from their defaults, without the aliases of others."""
    keys = {
        field.name: value
        for field in dataclasses.fields(rl)
        if not dataclasses.is_dataclass(value := getattr(rl, field.name)) and value != list_keys(RLConfig)[field.name].default
    }
    for alias in ("beta", "num_generations", "num_iterations", "reward_funcs", "reward_weights"):
        keys.pop(alias, None)
    return keys
