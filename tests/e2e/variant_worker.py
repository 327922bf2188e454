"""A worker whose next run is another one with the same models; imported only in worker processes."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import numpy as np
import torch
from call_path import Call, watching

from mindspeed_rl.algorithms.policy_losses import policy_loss
from mindspeed_rl.dataplane.client import DataPlane
from mindspeed_rl.run import Run
from mindspeed_rl.workers.actor_worker import ActorWorker
from mindspeed_rl.workers.roles import Role


class VariantWorker(ActorWorker):
    """The methods beside a run's phases."""

    def restart(self, run: Run, plane: DataPlane) -> None:
        """The next run is this one, from the first weights and with fresh optimizers.

        The engine samples as the run file says; the trainer keeps the temperature that the models were built with, so that
        another one makes the two disagree.
        """
        self.run = run
        self.connect(plane)
        self.rollout.reconfigure(run, plane)
        cfg = run.config
        keys, engine = cfg.generate_config.sampling_config, self.rollout.engine
        engine.sampling = dataclasses.replace(engine.sampling, temperature=keys.temperature, max_tokens=keys.max_tokens)
        configs = {"actor": cfg.actor_config, "ref": cfg.ref_config, "critic": cfg.critic_config}
        for role in self._changing():
            if configs[role.name] is None:
                continue
            role.config = role.engine.config = configs[role.name]
            trains = role.trains
            role.offloader.onload(params=True, grads=trains, optimizer=trains)
            role.load_base(role.source)
            if trains:
                role.engine.start_training(run.plan.num_optimizer_steps)

    def _changing(self) -> list[Role]:
        roles = self.roles
        return [role for role in (roles.actor, roles.ref, roles.critic) if role is not None]

    def weights(self) -> dict[str, np.ndarray[Any, Any]]:
        """All weights of this rank's actor, reference and critic, each as one vector."""
        return {
            role.name: torch.cat([weight.value().flatten() for _, weight in sorted(role.stream.local_weights.items())])
            .detach()
            .numpy()
            .copy()
            for role in self._changing()
        }

    def num_steps(self) -> int:
        """Optimizer steps of the actor since the restart."""
        return self.roles.actor.engine.scheduler.num_steps

    def watch(self) -> None:
        """From now on the way to the policy loss is noted."""
        self._watching = contextlib.ExitStack()
        self._stacks = self._watching.enter_context(watching(policy_loss.__code__))

    def stacks(self) -> list[list[Call]]:
        """The ways that were noted, each outermost first; nothing more is noted."""
        self._watching.close()
        return self._stacks
