"""Comparison of the copies of one weight on different ranks, by fingerprints of their bits, every some optimizer steps.

Ranks have the same shard of a weight where data parallelism (and context parallelism) repeats the model, where a weight is not
split over tensor ranks (norms, routers, one of an adapter's two matrices), and where two pipeline stages have the embedding:
a tied head, layers that predict further tokens. Each rank moves its own copy, so a fault in a gradient's reduction, in an
optimizer or in a gather makes them differ, without an error and at first without an effect that anyone sees.

All ranks know the same table of shards. Each writes the fingerprints of what it has into it, and one all-reduce gives the
largest and the smallest of every row: they differ where copies do. The message does not grow with the number of ranks; who has
what is exchanged only for an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_rl import platform
from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.engine.built_model import BuiltModel
from mindspeed_rl.engine.lora import list_adapters, map_ops
from mindspeed_rl.engine.lora_layers import LORA_A, LORA_B
from mindspeed_rl.engine.part import EnginePart
from mindspeed_rl.engine.weights import list_local_weights, list_model_ops
from mindspeed_rl.models.weights import WeightOp
from mindspeed_rl.resharding.bit_sums import sum_groups
from mindspeed_rl.resharding.layouts import full_slice

#: fingerprint of a shard that a rank does not have, in the rows of the largest and of the inverted smallest
_ABSENT = torch.iinfo(torch.int64).min
#: weights, sides of one weight and ranks of one side that an error names
_NAMED_WEIGHTS, _NAMED_SIDES, _NAMED_RANKS = 5, 4, 8


class WeightCopyError(RuntimeError):
    """Ranks have different values of one weight."""


class _Shard(NamedTuple):
    """What is the same wherever it stands: copies of a weight are made of the same tensors of the same layer.

    Attributes:
        hf: names of the HF tensors.
        layer: index of the layer, or of the prediction layer; None outside of layers.
        matrix: matrix of the weight's adapter; empty for the weight.
        num_shards, shard: 1 and 0 where it is not split.
    """

    hf: tuple[str, ...]
    layer: int | None
    matrix: str
    num_shards: int
    shard: int

    def __str__(self) -> str:
        more = f" and {len(self.hf) - 1} more in one" if len(self.hf) > 1 else ""
        shard = f", shard {self.shard} of {self.num_shards}" if self.num_shards > 1 else ""
        return f"{self.hf[0]}{more}{f', {self.matrix}' if self.matrix else ''}{shard}"


def _is_split(op: WeightOp) -> bool:
    return any(split.dim is not None for split in op.splits)


class WeightCopies(EnginePart):
    """The comparison, for one model that trains."""

    def __init__(self, config: MegatronConfig, model: BuiltModel) -> None:
        """Compare all weights of a model, frozen ones too."""
        self._config, self._model = config, model
        self._rows = {shard: row for row, shard in enumerate(dict.fromkeys(self._list_shards()))}
        self._device = next(model.models[0].parameters()).device

    @classmethod
    def build(cls, config: MegatronConfig, model: BuiltModel) -> WeightCopies | None:
        """Build it where the run compares and the model trains."""
        return cls(config, model) if config.check_weight_copies_interval and model.ddp_chunks else None

    def end_step(self, num_updates: int) -> None:
        """Compare the copies, if it is time; collective over the training world.

        Raises:
            WeightCopyError: they differ; the same error on every rank.
        """
        if num_updates % self._config.check_weight_copies_interval:
            return
        if self._config.overlap_param_gather:  # where another step follows, they are not complete yet
            for chunk in self._model.ddp_chunks:
                chunk.start_param_sync(force_sync=True)
        held = list(self._list_held())
        sums = sum_groups([(full_slice(tuple(tensor.shape)), tensor)] for _, tensor in held).tolist()
        mine: dict[int, list[int]] = {}
        for (row, _), value in zip(held, sums, strict=True):
            mine.setdefault(row, []).append(value)
        table = torch.full((2, len(self._rows)), _ABSENT)
        for row, values in mine.items():
            table[0, row], table[1, row] = max(values), ~min(values)
        table = platform.current().to_device([table], self._device)[0]
        dist.all_reduce(table, op=dist.ReduceOp.MAX)
        largest, inverted = table.cpu()
        # of a row that no rank has, this is the smallest number against the largest
        differing = (largest > ~inverted).nonzero()[:, 0].tolist()
        if differing:
            self._raise(num_updates, differing, mine)

    def _list_shards(self) -> Iterator[_Shard]:
        """Yield every shard of the full model, on all ranks in the same order."""
        layout = self._model.plan.layout

        def list_of(op: WeightOp, matrix: str) -> Iterator[_Shard]:
            yield _Shard(op.hf, op.layer, matrix, 1, 0)
            count = layout.expert_tp_size if op.axis == "etp" else layout.tp
            yield from (_Shard(op.hf, op.layer, matrix, count, shard) for shard in range(count if _is_split(op) else 0))

        for op in list_model_ops(self._model):
            yield from list_of(op, "")
        if self._config.lora_target_modules:
            for op in map_ops(self._model).values():
                yield from list_of(op, LORA_A)
                yield from list_of(op, LORA_B)

    def _list_held(self) -> Iterator[tuple[int, Tensor]]:
        """Yield this rank's shards, [rows, columns] or [elements], with their rows of the table."""
        for weight in list_local_weights(self._model):
            op = weight.op
            shards = (weight.num_shards, weight.shard) if _is_split(op) else (1, 0)
            tensor = weight.tensor.flatten(1) if weight.tensor.dim() > 2 else weight.tensor
            yield self._rows[_Shard(op.hf, op.layer, "", *shards)], tensor
        for op, adapter in list_adapters(self._model):
            split = (adapter.group.size(), adapter.group.rank()) if _is_split(op) else (1, 0)
            of_a, of_b = (split, (1, 0)) if adapter.splits_input else ((1, 0), split)
            yield self._rows[_Shard(op.hf, op.layer, LORA_A, *of_a)], adapter.a
            yield self._rows[_Shard(op.hf, op.layer, LORA_B, *of_b)], adapter.b

    def _raise(self, num_updates: int, differing: Sequence[int], mine: Mapping[int, Sequence[int]]) -> None:
        """Raise the error, with the ranks on each side; collective over the training world."""
        named = differing[:_NAMED_WEIGHTS]
        everyone: list[dict[int, Sequence[int]]] = [{}] * dist.get_world_size()
        dist.all_gather_object(everyone, {row: mine[row] for row in named if row in mine})
        shards = list(self._rows)
        texts = []
        for row in named:
            sides: dict[int, list[int]] = {}
            for rank, values in enumerate(everyone):
                for value in dict.fromkeys(values.get(row, ())):
                    sides.setdefault(value, []).append(rank)
            by_size = sorted(sides.values(), key=lambda ranks: (-len(ranks), ranks))
            more = f" against {len(by_size) - _NAMED_SIDES} more values" if len(by_size) > _NAMED_SIDES else ""
            texts.append(f"{shards[row]}: {' against '.join(map(_name_ranks, by_size[:_NAMED_SIDES]))}{more}")
        more = f"; and {len(differing) - len(named)} more" if len(differing) > len(named) else ""
        raise WeightCopyError(
            f"after optimizer step {num_updates} ranks have different copies of a weight "
            f"(check_weight_copies_interval): {'; '.join(texts)}{more}"
        )


def _name_ranks(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - _NAMED_RANKS} more" if len(ranks) > _NAMED_RANKS else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:_NAMED_RANKS]))}{more}"
