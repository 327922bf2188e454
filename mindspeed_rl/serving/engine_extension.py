"""The extension of vLLM's worker processes that receives weights from a group with the trainers.

vLLM imports this in every worker of a server (`worker_extension_cls`), before the model is built, and mixes the class into its
worker. Arguments and results are JSON: nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import time
from typing import Any

import psutil
import torch

from mindspeed_rl import adaptors, platform
from mindspeed_rl.adaptors import vllm_drafts
from mindspeed_rl.adaptors.engine_hooks import DERIVED
from mindspeed_rl.adaptors.vllm_async import find_worker_index
from mindspeed_rl.resharding.destinations import Destinations, read_destinations
from mindspeed_rl.resharding.disaggregated import ServedModel, WeightSyncGroup
from mindspeed_rl.resharding.push import WeightPush
from mindspeed_rl.resharding.quantization import stored_dtypes
from mindspeed_rl.resharding.rendezvous import DeliveryReport, Rendezvous

#: process that owns the engine, and its start time; the workers end with it
OWNER_VARIABLE = "MINDSPEED_RL_ENGINE_OWNER"
#: name of the device kind
PLATFORM_VARIABLE = "MINDSPEED_RL_ENGINE_PLATFORM"
_CHECK_S = 1.0
#: option of Linux' prctl
_PARENT_DEATH_SIGNAL = 1


def _end_with(owner: str) -> None:
    """End this process, and vLLM's process between it and the owner, once the owner is gone, however it ended."""
    pid, start_s = owner.split()
    parent = os.getppid()

    def is_alive() -> bool:
        try:
            return abs(psutil.Process(int(pid)).create_time() - float(start_s)) < 1.0
        except psutil.NoSuchProcess:
            return False

    while is_alive() and os.getppid() == parent:
        time.sleep(_CHECK_S)
    if os.getppid() == parent and str(parent) != pid:
        os.kill(parent, signal.SIGKILL)
    os._exit(1)  # sys.exit would end only this thread


def _prepare() -> None:
    if name := os.environ.get(PLATFORM_VARIABLE):
        platform.select(name)
    adaptors.apply("rollout")
    adaptors.engine_hooks().patch_libraries()
    if owner := os.environ.get(OWNER_VARIABLE):
        if str(os.getppid()) == owner.split()[0]:
            # a stopped process cannot watch; the kernel ends it with its parent
            ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        threading.Thread(target=_end_with, args=(owner,), name="owner-watch", daemon=True).start()


_prepare()


class EngineExtension:
    """Mixed into vLLM's worker, whose `vllm_config`, `model_runner`, `model_config`, `device` and `rank` it uses."""

    model_runner: Any
    model_config: Any
    device: torch.device
    rank: int

    def weights_join(self, rendezvous: str, first_rank: int) -> None:
        """Join a new group after leaving the last one.

        Args:
            rendezvous: a `Rendezvous` as JSON.
            first_rank: first rank of this engine's workers in the group.
        """
        self.weights_leave()
        rank = first_rank + find_worker_index(self)
        self._weights_group: WeightSyncGroup | None = WeightSyncGroup(Rendezvous.from_json(rendezvous), rank)
        self._weights_replica = first_rank

    def weights_leave(self) -> None:
        """Leave the group."""
        # vLLM mixes the class into its worker, so no constructor of ours has set it
        group, self._weights_group = getattr(self, "_weights_group", None), None
        self._weights_push: WeightPush | None = None
        if group is not None:
            group.close()

    def weights_receive(self) -> str:
        """Receive the weights from the group's trainers; return a `DeliveryReport` as JSON.

        On any failure the group is left, so that no member waits for this worker.
        """
        group = getattr(self, "_weights_group", None)
        if group is None:
            raise RuntimeError("this server is in no group of trainers; join one first.")
        if not hasattr(self, "_weights_hooks"):
            self._weights_hooks = adaptors.engine_hooks()
        hooks, push = self._weights_hooks, self._weights_push
        with contextlib.ExitStack() as unless_received:
            unless_received.callback(self.weights_leave)
            if push is not None:
                hooks.before_load(self._weights_model)
            else:  # which reads the model, prepared for a load
                push = self._weights_push = group.build_engine_push(
                    self._read_destinations, replica=self._weights_replica, derived=DERIVED, device=self.device
                )
            model = self._weights_model
            push.write(model)
            hooks.after_load(model)
            proof = push.compare(model, hooks.unpack(model))
            unless_received.pop_all()
        differing = list(proof.differing.get(self._weights_replica, ()))
        drafts = vllm_drafts.counts.take()
        if self.rank:  # the workers of an engine sample the same tokens
            drafts = (0, 0, 0)
        report = DeliveryReport(proof.num_parameters, differing, push.received_bytes, push.needed_bytes, list(drafts))
        return report.to_json()

    def _read_destinations(self, served: ServedModel) -> Destinations:
        """Return the destinations of the engine's parameters; they are read again only for another model."""
        policy, left_out = self.model_runner.model, set(served.predicted)
        # without drafts of them, or without weights for them, only the policy is loaded
        model: Any = vllm_drafts.join_drafts(policy, self.model_runner) if left_out else policy
        shapes = {name: shape for name, shape in served.shapes.items() if model is not policy or name not in left_out}
        self._weights_model = model
        self._weights_hooks.before_load(model)
        known: Destinations | None = getattr(self, "_weights_destinations", None)
        if known is None or known.shapes != shapes:
            known = read_destinations(
                model,
                model.load_weights,
                shapes,
                self.model_config.dtype,
                skip=DERIVED,
                stored=stored_dtypes(served.quantized, served.quantization),
            )
            self._weights_destinations = known
        return known
