"""Router replay: tokens go to the experts that were chosen before, by the trainer or by the rollout engine.

The sequence that trains is then computed by the experts that drew it: arXiv:2510.11370 (R3), arXiv:2507.18071 (R2). Megatron's
`RouterReplay` is where a router asks; what it answers is decided here, because Megatron's own one keeps one list for all models
of a process and has to be told when a layer is recomputed.

Called by `TrainEngine`, which arms the routers of a chunk before it runs; calls nobody but Megatron's routers.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.router_replay import RouterReplay
from torch import Tensor

from mindspeed_rl.engine.batching import MicroBatch, Rows
from mindspeed_rl.engine.build import BuiltModel
from mindspeed_rl.engine.sequence_layout import runs


class _Router(RouterReplay):
    """What one router asks which experts a token goes to.

    A router is armed before each forward pass of its chunk. The call for which it was armed is the forward pass; any other one
    recomputes, in the order of the forward passes: Megatron's schedules go back through the micro-batches of a chunk in the
    order in which they went forward.

    Attributes:
        agreed, compared: experts of the replay that the router would have chosen as well, and all of them; on the device.
    """

    def __init__(self) -> None:
        # not Megatron's, which adds each to a list that outlives the model
        self.agreed: Tensor | None = None
        self.compared: Tensor | None = None
        self._armed: Tensor | None = None
        self._recorded: list[Tensor] | None = None
        self._again: deque[Tensor] = deque()

    def arm(self, experts: Tensor) -> None:
        """The next pass sends tokens there.

        Args:
            experts: [tokens, k]; -1 for tokens that go where the router sends them.
        """
        self._armed = experts

    def record(self, into: list[Tensor] | None) -> None:
        """Passes add the experts that are chosen, [tokens, k]; None ends it."""
        self._recorded = into

    def reset(self) -> None:
        """Nothing is replayed, and nothing is left of a pass."""
        self._armed = None
        self._again.clear()

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Scores and numbers of the experts of each token, [tokens, k] each; `scores` is [tokens, experts]."""
        assert default_compute_topk is not None
        values, own = default_compute_topk(scores, topk, num_groups, group_topk)
        if self._recorded is not None:
            self._recorded.append(own.detach())
        experts, self._armed = self._armed, None
        if experts is not None:
            self._again.append(experts)
            self._compare(own, experts)
        elif self._again:
            experts = self._again.popleft()
        else:
            return values, own
        chosen = torch.where(experts >= 0, experts.to(own.dtype), own)
        return scores.gather(1, chosen), chosen

    @torch.no_grad()
    def _compare(self, own: Tensor, experts: Tensor) -> None:
        known = experts >= 0
        same = (own[:, :, None] == experts[:, None, :]).any(1) & known
        # left on the device: reading a number would make the host wait in every layer
        agreed, compared = same.sum(), known.sum()
        self.agreed = agreed if self.agreed is None else self.agreed + agreed
        self.compared = compared if self.compared is None else self.compared + compared


@dataclass
class Recording:
    """What forward passes chose.

    Attributes:
        chosen: for each layer, [positions, k] of each micro-batch.
        micro_batches: in the order of the passes.
    """

    chosen: list[list[Tensor]]
    micro_batches: list[MicroBatch] = field(default_factory=list)


class RoutedLayers:
    """The routers of this rank's model. They route by themselves unless a pass has rows with routing."""

    def __init__(self, model: BuiltModel) -> None:
        """Takes the place of Megatron's replay in the routers of the model."""
        self._sequence_parallel = bool(model.transformer_config.sequence_parallel)
        plan, pp_rank = model.plan, parallel_state.get_pipeline_model_parallel_rank()
        self._chunks: list[list[_Router]] = []
        for stage, (module, layers) in enumerate(zip(model.models, plan.routed_layers(pp_rank))):
            numbers = plan.layout.chunk_layers(pp_rank, stage)
            decoder: Any = module.decoder
            self._chunks.append([])
            for layer in layers:
                router = decoder.layers[numbers.index(layer)].mlp.router
                router.router_replay = _Router()
                self._chunks[-1].append(router.router_replay)
        self.num_layers = sum(map(len, self._chunks))
        self._topk = plan.model_config.moe_router_topk
        self._recording: Recording | None = None

    def begin(self, chunk: int, micro_batch: MicroBatch) -> None:
        """The next forward pass of this chunk is that of the micro-batch."""
        if self._recording is not None and chunk == 0:
            self._recording.micro_batches.append(micro_batch)
        if micro_batch.routing is None:
            return
        first = sum(map(len, self._chunks[:chunk]))
        layers = self._own_part(micro_batch.routing).unbind(1)[first : first + len(self._chunks[chunk])]
        for router, experts in zip(self._chunks[chunk], layers):
            router.arm(experts)

    def reset(self) -> None:
        """A pass over all micro-batches is through, or has failed."""
        for router in self._routers():
            router.reset()

    def take_agreement(self) -> tuple[int, int]:
        """(experts of replayed tokens that the routers would have chosen as well, all of them) since the last call, here."""
        agreed = compared = 0
        for router in self._routers():
            if router.compared is not None and router.agreed is not None:
                agreed, compared = agreed + int(router.agreed), compared + int(router.compared)
            router.agreed = router.compared = None
        return agreed, compared

    @contextlib.contextmanager
    def recording(self) -> Iterator[Recording]:
        """Forward passes in the block leave the experts that they chose."""
        self._recording = Recording([[] for _ in self._routers()])
        for router, into in zip(self._routers(), self._recording.chosen):
            router.record(into)
        try:
            yield self._recording
        finally:
            self._recording = None
            for router in self._routers():
                router.record(None)

    def recorded_rows(self, recording: Recording, rows: Rows) -> list[Tensor]:
        """The routing of rows that were passed once, as `Rows.routing` has it; collective over the pipeline stage."""
        lengths = torch.tensor(rows.lengths)
        starts = lengths.cumsum(0) - lengths

        def numbers_of(micro_batch: MicroBatch) -> Tensor:
            """Of its rows' tokens, end to end, among those of all rows."""
            indexes = list(micro_batch.indexes)
            return runs(starts[indexes], [rows.lengths[i] for i in indexes])

        device = recording.chosen[0][0].device if recording.chosen else torch.device("cpu")
        # int32 for the sum below: gloo and NCCL have none of int16
        whole = torch.zeros(int(lengths.sum()), self.num_layers, self._topk, dtype=torch.int32, device=device)
        # where several ranks hold a token, one hands it in
        if self._sequence_parallel or parallel_state.get_tensor_model_parallel_rank() == 0:
            for number, micro_batch in enumerate(recording.micro_batches):
                if micro_batch.is_filler:
                    continue
                numbers = numbers_of(micro_batch)
                tokens = self._own_part(micro_batch.tokens)
                real = tokens >= 0
                places, real = numbers[tokens[real]].to(device), real.to(device)
                for layer, chosen in enumerate(recording.chosen):
                    whole[places, layer] = chosen[number][real].to(torch.int32)
        group = parallel_state.get_tensor_and_context_parallel_group()
        assert group is not None
        if group.size() > 1 and whole.numel():
            # a place is filled by one rank and 0 on the others
            dist.all_reduce(whole, group=group)
        for micro_batch in recording.micro_batches:
            if micro_batch.packed is not None and micro_batch.packed.shared is not None:
                # a prompt that was computed once went the same way in every row
                numbers = numbers_of(micro_batch)
                stand_ins = micro_batch.tokens[micro_batch.packed.shared.stand_ins[: len(numbers)]]
                whole[numbers.to(device)] = whole[numbers[stand_ins].to(device)]
        return list(whole.to(torch.int16).cpu().split(rows.lengths))

    # ------------------------------------------------------------------ shared

    def _routers(self) -> list[_Router]:
        return [router for chunk in self._chunks for router in chunk]

    def _own_part(self, values: Tensor) -> Tensor:
        """With sequence parallelism routers see this tensor rank's part of the positions."""
        if not self._sequence_parallel:
            return values
        size, rank = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
        return values.chunk(size)[rank]
