"""Whole HF tensors from the training layout, on every rank, a bucket at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from mindspeed_rl.engine.build import BuiltModel
from mindspeed_rl.engine.weights import LocalWeight, local_weights, model_ops
from mindspeed_rl.models.weights import WeightOp
from mindspeed_rl.resharding.plan import Bucket, HeldWeight, plan_buckets

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class WeightStream:
    """Streams the model's weights, gathered, under their HF names; low-rank adapters are merged on the way.

    Peak memory is one gathered bucket. All methods are collective over the training world.
    """

    def __init__(self, model: BuiltModel, *, bucket_bytes: int = 512 << 20) -> None:
        """Plans the transfer once; the layout does not change during a run.

        Args:
            model: the trained model on this rank.
            bucket_bytes: most bytes of one rank's share of a bucket.
        """
        self._model = model
        self._weights: dict[str, LocalWeight] = {weight.op.mcore: weight for weight in local_weights(model)}
        self._ops: dict[str, WeightOp] = {op.mcore: op for op in model_ops(model)}
        self._copies = model.plan.architecture.hf_copies(model.plan.network)
        mine = [
            HeldWeight(name, tuple(w.tensor.shape), str(w.tensor.dtype).removeprefix("torch."))
            for name, w in self._weights.items()
        ]
        # a rank knows the shapes of its own stage and experts; all must plan alike
        everyone: list[list[HeldWeight]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, mine)
        held = {weight.name: weight for part in everyone for weight in part}
        self.buckets: list[Bucket] = plan_buckets(list(self._ops.values()), held, model.plan.layout, bucket_bytes=bucket_bytes)

    @property
    def ops(self) -> list[WeightOp]:
        """Every weight of the model, in forward order."""
        return list(self._ops.values())

    @property
    def copies(self) -> dict[str, str]:
        """HF tensors that repeat another one: copy -> owner."""
        return self._copies

    @property
    def local_weights(self) -> dict[str, LocalWeight]:
        """This rank's weights by global Megatron name."""
        return self._weights

    @torch.no_grad()
    def named_tensors(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """(HF name, whole tensor) of every weight; each rank sees all of them.

        Args:
            dtype: what floating-point parameters are cast to; None keeps the training dtype.
        """
        for bucket in self.buckets:
            shards = self._gather(bucket)
            for index, item in enumerate(bucket.items):
                yield from self._unpacked(bucket, index, item.names, shards, dtype)

    def _gather(self, bucket: Bucket) -> Tensor:
        """[group size, numel]: the flat buffer of each rank of the bucket's group, on every rank."""
        group = (
            parallel_state.get_tensor_model_parallel_group()
            if bucket.group == "tp"
            else parallel_state.get_expert_tensor_and_model_parallel_group()
        )
        pp_group = parallel_state.get_pipeline_model_parallel_group()
        assert group is not None and pp_group is not None  # by default Megatron asserts that a group was made
        size, rank = group.size(), group.rank()
        device = next(iter(self._weights.values())).tensor.device
        gathered = torch.empty(size, bucket.numel, dtype=_DTYPES[bucket.dtype], device=device)
        if parallel_state.get_pipeline_model_parallel_rank() == bucket.stage:
            mine = gathered[rank]
            for item in bucket.items:
                name = item.names[rank] if bucket.group == "expert" else item.names[0]
                mine[item.offset : item.offset + item.numel].copy_(self._weights[name].value().reshape(-1))
            if size > 1:
                # a copy, because `mine` is a row of the output, which the gather writes
                dist.all_gather_into_tensor(gathered.view(-1), mine.clone(), group=group)
        # all stages take part, whichever holds the bucket
        if pp_group.size() > 1:
            dist.broadcast(gathered, src=dist.get_global_rank(pp_group, bucket.stage), group=pp_group)
        return gathered

    def _unpacked(
        self, bucket: Bucket, index: int, names: tuple[str, ...], gathered: Tensor, dtype: torch.dtype | None
    ) -> Iterator[tuple[str, Tensor]]:
        """The HF tensors of one slot: of one parameter, or of one expert of each group of experts."""
        item = bucket.items[index]
        if self._ops[names[0]].buffer:
            dtype = None  # buffers keep their own type
        shards = [row[item.offset : item.offset + item.numel].view(item.shape) for row in gathered]
        if bucket.group == "tp":
            op = self._ops[names[0]]
            whole = all(split.dim is None for split in op.splits)
            tensors = op.shards_to_hf(shards[:1] if whole else shards)
        else:
            tp_size = self._model.plan.layout.expert_tp_size
            tensors: dict[str, Tensor] = {}
            # expert tensor ranks run fastest in the group, so an expert's shards are adjacent
            for first in range(0, len(shards), tp_size):
                op = self._ops[names[first]]
                tensors |= op.shards_to_hf(shards[first : first + tp_size])
        for name, tensor in tensors.items():
            if dtype is not None and tensor.is_floating_point():
                tensor = tensor.to(dtype)
            yield name, tensor.contiguous()
        for copy, owner in self._copies.items():
            if owner in tensors:
                yield copy, tensors[owner].to(dtype or tensors[owner].dtype)
