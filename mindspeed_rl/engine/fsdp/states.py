"""AdamW over shards with less memory: moments in bfloat16, or for a share of the parameters off the device, or gradients there.

Moments in bfloat16: an update is computed in float32, a slice at a time, and its moments are then rounded up or down by chance,
so that their means are the exact ones. Rounded to nearest, the second moment would stay where it is: a step changes it by a
thousandth, and neighbours in bfloat16 are 1/256 apart. The noise comes from the seed, the step and the parameter, so that a run
repeats, and resumes, bit by bit.

Moments off the device: the host updates them, as with Megatron (`engine/offloaded_optimizer.py`), from gradients that arrive in
slices. The parameters are the same ones on every rank.

Gradients in host memory (`gradients.py`): those of moments on the device come there a slice at a time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.engine.fsdp.gradients import StepGradients
from mindspeed_rl.engine.fsdp.lora import get_rows
from mindspeed_rl.engine.fsdp.model import ShardedModel
from mindspeed_rl.engine.gradient_sums import copy_rounded
from mindspeed_rl.engine.inner_optimizer import step_adamw
from mindspeed_rl.engine.offloaded_optimizer import SLICE, OffloadedOptimizer, choose_offloaded

#: moments of AdamW, by their names in torch
MOMENTS = ("exp_avg", "exp_avg_sq")


class LeanAdamW(torch.optim.AdamW):
    """AdamW of which some moments are in bfloat16 or off the device, or whose gradients are.

    Attributes:
        num_steps: updates so far.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        model: ShardedModel,
        config: MegatronConfig,
        gradients: StepGradients,
        **settings: Any,
    ) -> None:
        """Take the parameters of a model.

        Args:
            groups: parameter groups of AdamW.
            model: the model on this rank.
            config: keys of the role.
            gradients: gradients of each step.
            settings: arguments of AdamW.

        Raises:
            ValueError: the folder for the states cannot hold them.
        """
        super().__init__(groups, **settings)
        self.num_steps = 0
        self._seed, self._shard = config.seed, dist.get_rank() % model.shards
        self._is_half = config.optimizer_state_dtype == "bfloat16"
        self._gradients = gradients
        #: the parameters are updated one after the other, a slice at a time
        self._by_slice = self._is_half or config.offload_gradients
        trained = list(model.list_trained().values())
        self._indices: dict[Tensor, int] = {parameter: index for index, parameter in enumerate(trained)}
        #: this rank's rows of the parameters whose moments are off the device
        self._rows = {
            parameter: get_rows(parameter) for parameter in choose_offloaded(trained, config.optimizer_offload_fraction)
        }
        # its own groups, which take the rates of these before each step
        members = [[self._rows[item] for item in group["params"] if item in self._rows] for group in self.param_groups]
        self._host: OffloadedOptimizer | None = None
        if self._rows:
            inner = torch.optim.AdamW([{"params": rows} for rows in members], lr=settings["lr"])
            self._host = OffloadedOptimizer(inner, {}, list(self._rows.values()), config.optimizer_offload_path)
        self._host_mesh: DeviceMesh | None = None

    @torch.no_grad()
    def init_moments(self, num_steps: int) -> None:
        """Give each parameter its moments where it has none, and set the number of updates so far."""
        self.num_steps = num_steps
        for parameter in (item for group in self.param_groups for item in group["params"] if item not in self._rows):
            for name in MOMENTS:
                if name not in self.state[parameter]:
                    self.state[parameter][name] = torch.zeros_like(parameter, dtype=self._dtype)
            if not self._by_slice:
                self.state[parameter]["step"] = torch.tensor(float(num_steps), device=parameter.device)

    def list_states(self) -> dict[Tensor, dict[str, DTensor]]:
        """Return the moments of each parameter; a change of their content is a change of the moments."""
        states = {parameter: {name: state[name] for name in MOMENTS} for parameter, state in self.state.items()}
        if self._host is None:
            return states
        with self._host.on_host():
            mapped = {parameter: dict(self._host.state[rows]) for parameter, rows in self._rows.items()}
        return states | {
            parameter: {name: self._wrap(parameter, moment) for name, moment in moments.items()}
            for parameter, moments in mapped.items()
        }

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Make one update from the gradients of the step."""
        assert closure is None
        found = {item: self._gradients.find_rows(item) for group in self.param_groups for item in group["params"]}
        gradients = {parameter: rows for parameter, rows in found.items() if rows is not None}
        self.num_steps += 1
        if self._by_slice:
            for group in self.param_groups:
                for parameter in (item for item in group["params"] if item in gradients and item not in self._rows):
                    self._step_by_slice(parameter, gradients[parameter], group)
        else:
            for parameter in self._rows:
                parameter.grad = None
            super().step()
        self._step_on_host(gradients)
        return None

    @property
    def _dtype(self) -> torch.dtype:
        return torch.bfloat16 if self._is_half else torch.float32

    def _step_by_slice(self, parameter: Tensor, gradient: Tensor, group: Mapping[str, Any]) -> None:
        """Update a parameter whose moments are on the device.

        Args:
            gradient: this rank's rows, on the device or the host.
        """
        state = self.state[parameter]
        for name in MOMENTS:
            if name not in state:
                state[name] = torch.zeros_like(parameter, dtype=self._dtype)
        moments = [get_rows(state[name]).view(-1) for name in MOMENTS]
        weight, slope = get_rows(parameter).view(-1), gradient.reshape(-1)
        seed = derive_noise_seed(self._seed, self.num_steps, self._indices[parameter], self._shard)
        generator = torch.Generator(weight.device).manual_seed(seed) if self._is_half else None
        for start in range(0, weight.numel(), SLICE):
            part = slice(start, start + SLICE)
            exact = [moment[part].float() for moment in moments]  # the moments themselves in float32
            arrived = slope[part].to(weight.device, non_blocking=True)
            step_adamw([weight[part]], [arrived], [exact[0]], [exact[1]], group, self.num_steps)
            for moment, values in zip(moments, exact):
                if generator is not None:
                    copy_rounded(moment[part], values, generator)

    def _step_on_host(self, gradients: Mapping[Tensor, Tensor]) -> None:
        """Update the parameters whose moments are off the device."""
        if self._host is None:
            return
        for parameter, rows in self._rows.items():
            # the first forward pass gives the rows of some parameters other memory
            rows.data = get_rows(parameter)
        self._host.gradients = {rows: gradients[item].contiguous() for item, rows in self._rows.items() if item in gradients}
        for outer, inner in zip(self.param_groups, self._host.param_groups):
            counted = {"step": self.num_steps - 1}  # this step is counted there
            inner |= {name: value for name, value in outer.items() if name != "params"} | counted
        self._host.step()
        self._host.gradients = {}

    def _wrap(self, parameter: Tensor, rows: Tensor) -> DTensor:
        """Return rows in host memory as a part of a tensor that is divided as a parameter is."""
        weight = cast(DTensor, parameter.detach())
        mesh = weight.device_mesh
        if mesh.device_type != "cpu":
            if self._host_mesh is None:
                self._host_mesh = DeviceMesh("cpu", mesh.mesh, mesh_dim_names=mesh.mesh_dim_names)
            mesh = self._host_mesh
        return DTensor.from_local(rows, mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride())


def derive_noise_seed(seed: int, step: int, index: int, shard: int) -> int:
    """Return the seed of the noise that rounds the moments of a parameter in a step, below 2**63.

    Args:
        seed: of the run.
        index: of the parameter.
        shard: which rows of it; replicas of a shard have the same noise, so that they stay equal.
    """
    digest = hashlib.sha256(f"{seed} {step} {index} {shard}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
