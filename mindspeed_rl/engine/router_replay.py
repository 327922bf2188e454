"""Router replay: tokens go to the experts that the trainer or the rollout engine chose before.

A sequence is then trained on the experts that sampled it: arXiv:2510.11370 (R3), arXiv:2507.18071 (R2). `ExpertReplay` is what
every engine has of it; `engine/fsdp/replay.py` is the one of transformers' modules. Megatron's routers call `RouterReplay`. A
class here replaces it, because Megatron's keeps one list for all models of a process and does not recognize a recomputed layer.

`RoutedLayers` is a part of the engine whose rows have routing (`TrainEngine.add_part`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.router_replay import RouterReplay
from torch import Tensor

from mindspeed_rl.engine.batching import MicroBatch, Rows
from mindspeed_rl.engine.built_model import BuiltModel
from mindspeed_rl.engine.part import EnginePart
from mindspeed_rl.engine.pass_arguments import PassArguments
from mindspeed_rl.engine.sequence_layout import expand_ranges


class ReplayedRouter:
    """Replay of one router.

    Attributes:
        recorded: list that gets the chosen experts, [tokens, k], of every pass, if any.
        agreed, compared: replayed experts that the router would have chosen too, and all of them; on the device.
    """

    def __init__(self) -> None:
        self.agreed: Tensor | None = None
        self.compared: Tensor | None = None
        self.recorded: list[Tensor] | None = None

    def replace(self, default: Tensor, experts: Tensor | None, *, is_forward: bool) -> Tensor:
        """Return the experts of tokens, [tokens, k].

        Args:
            default: the router's own choice.
            experts: the choice that is replayed, -1 where the router's stays; None where all of them stay.
            is_forward: not a pass that is computed again.
        """
        if experts is None:
            return default
        if is_forward:
            self._compare(default, experts)
        return torch.where(experts >= 0, experts.to(default.dtype), default)

    @torch.no_grad()
    def _compare(self, default: Tensor, experts: Tensor) -> None:
        known = experts >= 0
        same = (default[:, :, None] == experts[:, None, :]).any(1) & known
        # on the device: reading a number would make the host wait in every layer
        agreed, compared = same.sum(), known.sum()
        self.agreed = agreed if self.agreed is None else self.agreed + agreed
        self.compared = compared if self.compared is None else self.compared + compared


class MegatronRouter(RouterReplay):
    """Replay of one of Megatron's routers.

    Attributes:
        replay: what it does.
    """

    def __init__(self) -> None:
        # not Megatron's, which adds each to a list that outlives the model
        self.replay = ReplayedRouter()
        self._passes = PassArguments[Tensor]()

    def arm(self, experts: Tensor) -> None:
        """Set the experts of the tokens in the next pass, [tokens, k], -1 where the router chooses."""
        self._passes.pending = experts

    def reset(self) -> None:
        """Stop the replay and forget passes."""
        self._passes.reset()

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return scores and indices of the experts of each token, [tokens, k] each; `scores` is [tokens, experts]."""
        assert default_compute_topk is not None
        values, default = default_compute_topk(scores, topk, num_groups, group_topk)
        if self.replay.recorded is not None:
            self.replay.recorded.append(default.detach())
        is_forward = self._passes.pending is not None
        experts = self._passes.take_any()
        if experts is None:
            return values, default
        chosen = self.replay.replace(default, experts, is_forward=is_forward)
        return scores.gather(1, chosen), chosen


@dataclass
class Recording:
    """Experts that forward passes chose.

    Attributes:
        chosen: for each layer, [positions, k] of each micro-batch.
        micro_batches: in the order of the passes.
    """

    chosen: list[list[Tensor]]
    micro_batches: list[MicroBatch] = field(default_factory=list)


class ExpertReplay:
    """Routers of this rank's model, which choose experts themselves unless a pass has rows with routing.

    Attributes:
        num_layers: layers with experts on this rank.
    """

    def __init__(self, routers: Sequence[ReplayedRouter], topk: int, *, sequence_parallel: bool) -> None:
        """Take the routers of the layers, in order.

        Args:
            routers: replay of each router.
            topk: experts per token.
            sequence_parallel: routers have this tensor rank's slice of the tokens.
        """
        self._routers, self._topk, self._sequence_parallel = routers, topk, sequence_parallel
        self.num_layers = len(routers)
        self._recording: Recording | None = None

    def take_agreement(self) -> tuple[int, int]:
        """Return (replayed experts that the routers would have chosen too, all of them) since the last call, on this rank."""
        agreed = compared = 0
        for router in self._routers:
            if router.compared is not None and router.agreed is not None:
                agreed, compared = agreed + int(router.agreed), compared + int(router.compared)
            router.agreed = router.compared = None
        return agreed, compared

    @contextlib.contextmanager
    def recording(self) -> Iterator[Recording]:
        """Record the experts that forward passes in the block choose."""
        self._recording = Recording([[] for _ in self._routers])
        for router, into in zip(self._routers, self._recording.chosen):
            router.recorded = into
        try:
            yield self._recording
        finally:
            self._recording = None
            for router in self._routers:
                router.recorded = None

    def gather_recording(self, recording: Recording, rows: Rows) -> list[Tensor]:
        """Return the recorded routing of rows, in the form of `Rows.routing`; collective over the pipeline stage."""
        lengths = torch.tensor(rows.lengths)
        starts = lengths.cumsum(0) - lengths

        def token_indices(micro_batch: MicroBatch) -> Tensor:
            """Return the indices of its rows' tokens among the tokens of all rows."""
            indexes = list(micro_batch.indexes)
            return expand_ranges(starts[indexes], [rows.lengths[i] for i in indexes])

        device = recording.chosen[0][0].device if recording.chosen else torch.device("cpu")
        # int32 for the sum below: gloo and NCCL have none of int16
        routing = torch.zeros(int(lengths.sum()), self.num_layers, self._topk, dtype=torch.int32, device=device)
        # where several ranks have a token, one contributes it
        if self._sequence_parallel or parallel_state.get_tensor_model_parallel_rank() == 0:
            for index, micro_batch in enumerate(recording.micro_batches):
                if micro_batch.is_filler:
                    continue
                indices = token_indices(micro_batch)
                tokens = self._local_positions(micro_batch.tokens)
                real = tokens >= 0
                positions, real = indices[tokens[real]].to(device), real.to(device)
                for layer, chosen in enumerate(recording.chosen):
                    routing[positions, layer] = chosen[index][real].to(torch.int32)
        group = parallel_state.get_tensor_and_context_parallel_group()
        assert group is not None
        if group.size() > 1 and routing.numel():
            # a position is filled by one rank and 0 on the others
            dist.all_reduce(routing, group=group)
        for micro_batch in recording.micro_batches:
            if micro_batch.packed is not None and micro_batch.packed.shared is not None:
                # with prefix sharing a prompt has the same routing in every row
                indices = token_indices(micro_batch)
                shared = micro_batch.packed.shared
                representatives = shared.computed[shared.representatives[: len(indices)]]
                routing[indices.to(device)] = routing[indices[representatives].to(device)]
        return list(routing.to(torch.int16).cpu().split(rows.lengths))

    # ------------------------------------------------------------------ shared

    def _record_pass(self, micro_batch: MicroBatch) -> None:
        """Note the micro-batch of the next forward pass, where passes are recorded."""
        if self._recording is not None:
            self._recording.micro_batches.append(micro_batch)

    def _local_positions(self, values: Tensor) -> Tensor:
        """Return the positions that routers see: this tensor rank's slice under sequence parallelism, else all."""
        if not self._sequence_parallel:
            return values
        size, rank = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
        return values.chunk(size)[rank]


class RoutedLayers(ExpertReplay, EnginePart):
    """The routers of Megatron's layers."""

    trains_only = False

    def __init__(self, model: BuiltModel) -> None:
        """Replace Megatron's replay in the routers of the model."""
        plan, pp_rank = model.plan, parallel_state.get_pipeline_model_parallel_rank()
        self._chunks: list[list[MegatronRouter]] = []
        for stage, (module, layers) in enumerate(zip(model.models, plan.routed_layers(pp_rank))):
            slots = plan.layout.chunk_layers(pp_rank, stage)
            decoder: Any = module.decoder  # attributes of Megatron's modules are not declared
            self._chunks.append([])
            for layer in layers:
                router = decoder.layers[slots.index(layer)].mlp.router
                router.router_replay = MegatronRouter()
                self._chunks[-1].append(router.router_replay)
        super().__init__(
            [router.replay for chunk in self._chunks for router in chunk],
            plan.model_config.moe_router_topk,
            sequence_parallel=bool(model.transformer_config.sequence_parallel),
        )

    def arm(self, chunk: int, micro_batch: MicroBatch) -> None:
        """Prepare this chunk's next forward pass, over the micro-batch."""
        if chunk == 0:
            self._record_pass(micro_batch)
        if micro_batch.routing is None:
            return
        first = sum(map(len, self._chunks[:chunk]))
        layers = self._local_positions(micro_batch.routing).unbind(1)[first : first + len(self._chunks[chunk])]
        for router, experts in zip(self._chunks[chunk], layers):
            router.arm(experts)

    def reset(self) -> None:
        """Clear the routers after a pass over all micro-batches, completed or failed."""
        for chunk in self._chunks:
            for router in chunk:
                router.reset()
