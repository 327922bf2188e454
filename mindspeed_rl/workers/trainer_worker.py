"""One device's worker of a run whose responses come from servers on other devices: it trains, and sends them the weights."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_rl.dataplane.client import DataPlane
from mindspeed_rl.models.network import Network
from mindspeed_rl.resharding.server_sums import trained_sums
from mindspeed_rl.resharding.spanning import Meeting, SpanningGroup, send
from mindspeed_rl.workers.actor_worker import ActorWorker
from mindspeed_rl.workers.model_source import ModelSource
from mindspeed_rl.workers.reports import WorkerReport

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TrainerWorker(ActorWorker):
    """Actor and the roles that share its device; no rollout engine."""

    def _open_rollout(
        self, plane: DataPlane, source: ModelSource, network: Network, tokenizer: PreTrainedTokenizerBase, run_id: str
    ) -> None:
        self._group: SpanningGroup | None = None
        self._dtype = torch.bfloat16 if self.run.generate.dtype == "bfloat16" else torch.float32

    def _close_rollout(self) -> None:
        pass

    def join_servers(self, meeting: Meeting) -> None:
        """The first rank is a member of a new group with the servers' workers; the group before is left."""
        self.leave_servers()
        if dist.get_rank() == 0:
            self._group = SpanningGroup(meeting, 0)

    def leave_servers(self) -> None:
        """The group with the servers' workers is left."""
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def send_weights(self, version: int) -> tuple[dict[str, int], WorkerReport]:
        """The servers of the group get the actor's weights; the sums that they must hold.

        Raises:
            Exception: the group broke; torch's own words. All ranks have done their part of the collectives then.
        """
        actor = self.roles.actor
        with self.timers("resharding_to_infer"):
            actor.offloader.onload(params=True)
            named = actor.stream.named_tensors(self._dtype)
            try:
                if self._group is not None:
                    send(self._group, named)
            finally:
                _drain(named)  # the gathers are collective over the trainers, whatever became of the servers
            trained = trained_sums(actor.model, self._dtype)
            self._offload_all()
        return trained, self._report()

    @property
    def _shares_memory(self) -> bool:
        return False

    def finish_rollout(self) -> WorkerReport:
        """Nothing is to be handed over: the engines have devices of their own."""
        return self._report()


def _drain(named: Iterator[tuple[str, Tensor]]) -> None:
    collections.deque(named, maxlen=0)
