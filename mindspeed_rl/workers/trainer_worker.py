"""One device's worker of a run whose responses come from servers on other devices: it trains, and sends them the weights."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch.distributed as dist

from mindspeed_rl.checkpoint.model_source import ModelSource
from mindspeed_rl.dataplane.client import DataPlane
from mindspeed_rl.models.model_config import ModelConfig
from mindspeed_rl.observability.metrics import Metrics
from mindspeed_rl.resharding.disaggregated import WeightSyncGroup, build_trainer_push
from mindspeed_rl.resharding.push import WeightPush
from mindspeed_rl.resharding.rendezvous import Rendezvous
from mindspeed_rl.runtime.reports import WorkerReport
from mindspeed_rl.workers.actor_worker import ActorWorker

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TrainerWorker(ActorWorker):
    """Actor and the roles that share its device; no rollout engine."""

    def _open_rollout(
        self, plane: DataPlane, source: ModelSource, model_config: ModelConfig, tokenizer: PreTrainedTokenizerBase, run_id: str
    ) -> None:
        self._group: WeightSyncGroup | None = None
        self._push: WeightPush | None = None

    def _close_rollout(self) -> None:
        pass

    def join_servers(self, meeting: Rendezvous) -> None:
        """This rank is a member of a new group with the servers' workers; the group before is left."""
        self.leave_servers()
        self._group = WeightSyncGroup(meeting, dist.get_rank())

    def leave_servers(self) -> None:
        """The group with the servers' workers is left."""
        # the plan goes too: it is of the members of this group
        group, self._group, self._push = self._group, None, None
        if group is not None:
            group.close()

    def send_weights(self, version: int) -> WorkerReport:
        """The servers of the group get the actor's weights, and hear what they must hold.

        Raises:
            Exception: the group broke; torch's own words. It is left then, so that nobody waits for this rank.
        """
        actor, generate, metrics = self.roles.actor, self.run.generate, Metrics()
        assert self._group is not None, "the servers are met before weights are sent"
        with self.timers("resharding_to_infer"), self.memory("update_weights", "push buckets", metrics):
            actor.offloader.onload(params=True)
            try:
                if self._push is None:
                    trained = replace(actor.stream.trained, bucket_bytes=generate.update_weights_bucket_mb << 20)
                    self._push = build_trainer_push(self._group, trained, delta=generate.update_weight_mode == "delta")
                self._push.write(None)
                self._push.compare(None)
            except Exception:
                self.leave_servers()
                raise
            finally:
                self._offload_all()
        return self._report(metrics)

    def _engine_bytes(self) -> dict[str, int]:
        return {}  # the engines have devices of their own

    @property
    def _shares_memory(self) -> bool:
        return False

    def finish_rollout(self) -> WorkerReport:
        """Nothing is to be handed over: the engines have devices of their own."""
        return self._report()
