"""What a worker process of vLLM's can do besides vLLM's own: take weights from a group that it shares with trainers.

vLLM imports this in every worker of a server (`worker_extension_cls`), before the model is built, and mixes the class into its
worker. Arguments and results are JSON: nothing is unpickled.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from typing import Any

import psutil
import torch

from mindspeed_rl import adaptors, platform
from mindspeed_rl.adaptors.engine_hooks import DERIVED
from mindspeed_rl.resharding.destinations import Destinations, read_destinations
from mindspeed_rl.resharding.disaggregated import ServedModel, WeightSyncGroup, build_engine_push
from mindspeed_rl.resharding.push import WeightPush
from mindspeed_rl.resharding.rendezvous import DeliveryReport, Rendezvous

#: process that owns the engine, and when it began; the workers do not outlive it
OWNER_VARIABLE = "MINDSPEED_RL_ENGINE_OWNER"
#: name of the device kind
PLATFORM_VARIABLE = "MINDSPEED_RL_ENGINE_PLATFORM"
_LOOK_EVERY_S = 1.0
#: of Linux' prctl
_PARENT_DEATH_SIGNAL = 1


def owner_of_engines() -> str:
    """The value of `OWNER_VARIABLE` for engines that this process owns."""
    return f"{os.getpid()} {psutil.Process().create_time()}"


def _is_alive(owner: str) -> bool:
    pid, begun = owner.split()
    try:
        return abs(psutil.Process(int(pid)).create_time() - float(begun)) < 1.0
    except psutil.NoSuchProcess:
        return False


def _end_with(owner: str) -> None:
    """Ends this process, and vLLM's process between it and the owner, as soon as the owner is gone, however it went."""
    parent = os.getppid()
    while _is_alive(owner) and os.getppid() == parent:
        time.sleep(_LOOK_EVERY_S)
    if os.getppid() == parent and str(parent) != owner.split()[0]:
        os.kill(parent, signal.SIGKILL)
    os._exit(1)  # sys.exit would end this thread alone


def _prepare() -> None:
    if name := os.environ.get(PLATFORM_VARIABLE):
        platform.select(name)
    adaptors.apply("rollout")
    if owner := os.environ.get(OWNER_VARIABLE):
        if str(os.getppid()) == owner.split()[0]:
            # a process that was stopped cannot watch; the kernel ends it with its parent
            ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        threading.Thread(target=_end_with, args=(owner,), name="owner-watch", daemon=True).start()


_prepare()


class EngineExtension:
    """Mixed into vLLM's worker, whose `model_runner`, `model_config`, `device` and `rank` it uses."""

    model_runner: Any
    model_config: Any
    device: torch.device
    rank: int

    def weights_join(self, meeting: str, first_rank: int) -> None:
        """This worker is a member of a new group; it leaves the one that it was in.

        Args:
            meeting: a `Rendezvous` as JSON.
            first_rank: of this engine's workers in the group.
        """
        self.weights_leave()
        self._weights_group: WeightSyncGroup | None = WeightSyncGroup(Rendezvous.from_json(meeting), first_rank + self.rank)
        self._weights_replica = first_rank

    def weights_leave(self) -> None:
        """This worker is in no group."""
        # vLLM mixes the class into its worker, so there is no constructor of ours that could have set it
        group, self._weights_group = getattr(self, "_weights_group", None), None
        self._weights_push: WeightPush | None = None
        if group is not None:
            group.close()

    def weights_receive(self) -> str:
        """The model holds what the trainers of the group sent; a `DeliveryReport` as JSON.

        Raises:
            Exception: that is not so. The group is left then, so that nobody waits for this worker.
        """
        group = getattr(self, "_weights_group", None)
        if group is None:
            raise RuntimeError("this server is in no group of trainers; join one first.")
        try:
            return self._take_weights(group)
        except Exception:
            self.weights_leave()
            raise

    def _take_weights(self, group: WeightSyncGroup) -> str:
        if not hasattr(self, "_weights_hooks"):
            self._weights_hooks = adaptors.engine_hooks()
        model, hooks = self.model_runner.model, self._weights_hooks
        hooks.before_load(model)
        if self._weights_push is None:
            self._weights_push = build_engine_push(
                group, self._read_destinations, replica=self._weights_replica, derived=DERIVED, device=self.device
            )
        self._weights_push.write(model)
        hooks.after_load(model)
        push, proof = self._weights_push, self._weights_push.compare(model)
        differing = list(proof.differing.get(self._weights_replica, ()))
        return DeliveryReport(proof.num_parameters, differing, push.received_bytes, push.needed_bytes).to_json()

    def _read_destinations(self, served: ServedModel) -> tuple[Destinations, set[str]]:
        """Where the engine puts what; it is asked again only for another model."""
        model = self.model_runner.model
        known: Destinations | None = getattr(self, "_weights_destinations", None)
        if known is None or known.shapes != served.shapes:
            known = read_destinations(model, model.load_weights, served.shapes, self.model_config.dtype, skip=DERIVED)
            self._weights_destinations = known
        return known, self._weights_hooks.repacked(model)
