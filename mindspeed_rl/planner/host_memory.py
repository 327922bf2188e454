"""Bytes of host memory, and of local disks, that a run takes for what leaves its devices.

A copy is pinned and stays for the whole run once it was made, so the bytes of all owners add up. Not counted: the processes
themselves (about a gigabyte a device), data, and checkpoints that are on their way to a disk.
"""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_rl.planner.devices import GIB
from mindspeed_rl.planner.engine import Engine
from mindspeed_rl.planner.run_shape import Model, RunShape


@dataclass(frozen=True)
class HostMemory:
    """Host memory beside the devices of a machine.

    Attributes:
        owners: bytes by owner, for the device that needs most of it.
        devices: devices of the run on a machine.
        disk: bytes of the files of that device.
    """

    owners: dict[str, int]
    devices: int
    disk: int = 0

    @property
    def total(self) -> int:
        """Bytes of a machine."""
        return self.devices * sum(self.owners.values())

    def format(self) -> str:
        """Return the bytes as a line of text."""
        parts = ", ".join(f"{owner} {count / GIB:.1f}" for owner, count in self.owners.items())
        together = f"; {self.total / GIB:.0f} GiB on a machine with {self.devices} of them" if self.devices > 1 else ""
        lines = [f"Host memory: {sum(self.owners.values()) / GIB:.1f} GiB for a device ({parts}){together}"] if parts else []
        if self.disk:
            files = f"; {self.devices * self.disk / GIB:.0f} GiB on a machine with {self.devices} of them"
            lines.append(
                f"Disk: {self.disk / GIB:.1f} GiB for a device in optimizer_offload_path{files if self.devices > 1 else ''}"
            )
        return "\n".join(lines)


def plan_host_memory(run: RunShape, engine: Engine | None) -> HostMemory:
    """Compute the host memory of the devices that train."""
    owners: dict[str, int] = {}
    for name, model in {"": run.actor, **run.others}.items():
        for part, count in _count_copies(run, model).items():
            owner = f"{name} {part}" if name and model.trains else name or part
            owners[owner] = owners.get(owner, 0) + count
    if engine is not None and not run.placement.disaggregated and run.device.sleeps:
        # sleep keeps what the next weight sync does not replace
        owners["rollout weights"] = engine.adapters + engine.draft
        if run.sends_changes:
            owners["rollout weights"] += engine.weights
    devices = -(-run.sizes.actor.num_npus // max(1, run.run.num_nodes))
    disk = sum(_count_file(model) for model in (run.actor, *run.others.values()))
    return HostMemory({owner: count for owner, count in owners.items() if count}, devices, disk)


def _count_copies(run: RunShape, model: Model) -> dict[str, int]:
    """Return the bytes of a model's weights and optimizer that are copied to the host, on its fullest stage."""
    generate, copies = run.generate, {"weights": 0, "optimizer": 0}
    if model.is_streamed or (generate is not None and generate.offload_train_param):
        copies["weights"] = max(model.weights(elements) for elements in model.elements)
    is_copied = model.config.swap_optimizer or (generate is not None and generate.offload_train_optimizer)
    is_filed = model.config.optimizer_offload_path is not None
    copies["optimizer"] = max(
        (model.state(elements) - model.offloaded(elements) if is_copied else 0) + (0 if is_filed else model.offloaded(elements))
        for elements in model.elements
    )
    return copies


def _count_file(model: Model) -> int:
    """Return the bytes of the optimizer's states in a file, on the model's fullest stage."""
    is_filed = model.config.optimizer_offload_path is not None
    return max(model.offloaded(elements) for elements in model.elements) if is_filed else 0
