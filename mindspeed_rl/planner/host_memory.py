"""Bytes of host memory, and of local disks, that a run takes for what leaves its devices, by phase.

A copy is pinned and stays for the whole run once it was made, so that the bytes of all models add up. A start has the weights
of a model that trains on the host while Megatron builds its buffers. A save copies what is on the devices before it writes,
and gathers the states of a distributed optimizer; without `async_save` one model after the other. Not counted: the processes
themselves (about a gigabyte a device), data, and pages of files that the system may drop.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from mindspeed_rl.planner.devices import GIB
from mindspeed_rl.planner.engine import Engine
from mindspeed_rl.planner.run_shape import Model, RunShape
from mindspeed_rl.planner.shapes import Elements, count_all_elements

#: bytes of tensors that an export to a Hugging Face folder gathers before it writes a file
EXPORT_SHARD = 5 * 10**9


#: bytes beside the gathered states while a distributed optimizer's are gathered, as a multiple of them: a part on each rank,
#: and one of the three (main weights and moments) twice as it arrives
_GATHERED = 1 + 2 / 3
#: bytes of a float32 weight and two moments, and of what reuse_fp32_param keeps of them
_JOINED, _SPLIT = 12, 10


@dataclass(frozen=True)
class HostPhase:
    """Host memory of a device in one phase.

    Attributes:
        name: "start", "iteration" or "save".
        owners: bytes by owner; of a save the mean over the ranks that have the same parameters.
    """

    name: str
    owners: dict[str, int]

    @property
    def total(self) -> int:
        """Bytes of all owners."""
        return sum(self.owners.values())


@dataclass(frozen=True)
class HostMemory:
    """Host memory beside the devices of a machine.

    Attributes:
        phases: phases of the device that needs most of it, in order.
        devices: devices of the run on a machine.
        disk: bytes of that device's file of optimizer states.
        checkpoint: bytes that a save writes, of the whole run.
        kept: checkpoints that stay besides the one that is written; None for all.
    """

    phases: tuple[HostPhase, ...]
    devices: int
    disk: int = 0
    checkpoint: int = 0
    kept: int | None = None

    @property
    def peak(self) -> HostPhase:
        """The phase with the most bytes."""
        return max(self.phases, key=lambda phase: phase.total)

    @property
    def owners(self) -> dict[str, int]:
        """Bytes by owner of the copies that stay."""
        return next(phase.owners for phase in self.phases if phase.name == "iteration")

    @property
    def total(self) -> int:
        """Most bytes of a machine."""
        return self.devices * self.peak.total

    def list_lines(self) -> Iterator[str]:
        """Yield the sentences about the most host memory and about disks."""
        if self.total:
            phase = self.peak
            many = f"; {self.total / GIB:.0f} GiB on a machine with {self.devices} of them" if self.devices > 1 else ""
            yield f"Host memory: {phase.total / GIB:.1f} GiB for a device in {phase.name}{many}"
        if self.disk:
            files = f"; {self.devices * self.disk / GIB:.0f} GiB on a machine with {self.devices} of them"
            yield f"Disk: {self.disk / GIB:.1f} GiB for a device in optimizer_offload_path{files if self.devices > 1 else ''}"
        if self.checkpoint:
            kept = "all are kept" if self.kept is None else f"{self.kept + 1} of them while one is written"
            yield f"Disk: {self.checkpoint / GIB:.1f} GiB for a checkpoint of the run in save; {kept}"


def plan_host_memory(run: RunShape, engine: Engine | None) -> HostMemory:
    """Compute the host memory of the devices that train."""
    copies: dict[str, int] = {}
    start = HostPhase("start", {})
    for name, model in {"": run.actor, **run.others}.items():
        if model.trains and model.config.use_distributed_optimizer and not model.config.lora_target_modules:
            moved = max(model.weights(elements) for elements in model.elements)
            start = max(start, HostPhase("start", {**copies, "weights to be placed": moved}), key=lambda phase: phase.total)
        for part, count in _count_copies(run, model).items():
            owner = f"{name} {part}" if name and model.trains else name or part
            copies[owner] = copies.get(owner, 0) + count
    averaged = _count_average(run)
    copies |= averaged | _count_waiting_adapters(run)
    start = max(start, HostPhase("start", dict(copies)), key=lambda phase: phase.total)
    sleeps = run.device.sleeps and run.generate is not None and run.generate.engine == "vllm"
    if engine is not None and not run.placement.disaggregated and sleeps:
        # sleep keeps what the next weight sync does not replace
        copies["rollout weights"] = engine.adapters + engine.draft
        if run.sends_changes:
            copies["rollout weights"] += engine.weights
    if engine is not None and run.is_elastic and sleeps:
        # its sleep keeps all weights
        copies["rollout weights"] = engine.weights + engine.adapters + engine.draft
    saved = [model for model in _list_saved(run) if model.config.save is not None]
    phases = [start, HostPhase("iteration", copies)]
    if saved:
        # weights that make room for the average while it is exported
        away = {"weights in place of the average": max(map(run.actor.weights, run.actor.elements)) if averaged else 0}
        phases.append(HostPhase("save", copies | _count_saving(saved) | away))
    phases = [HostPhase(phase.name, {owner: count for owner, count in phase.owners.items() if count}) for phase in phases]
    devices = -(-run.sizes.actor.num_npus // max(1, run.run.num_nodes))
    disk = sum(_count_file(model) for model in (run.actor, *run.others.values()))
    checkpoint = sum(_count_checkpoint(model) for model in saved)
    return HostMemory(tuple(phases), devices, disk, checkpoint, run.actor.config.keep_last)


def _count_average(run: RunShape) -> dict[str, int]:
    """Return the bytes of the moving average of the actor's weights, in float32, on its fullest stage; nothing without one."""
    rl, actor = run.cfg.rl_config, run.actor
    if run.generate is None or rl is None or not rl.ema_decay:
        return {}
    adapters = bool(actor.config.lora_target_modules)
    trained = (
        elements.dense_adapters + elements.expert_adapters if adapters else elements.dense + elements.expert
        for elements in actor.elements
    )
    return {"average of the weights": 4 * max(trained)}


def _count_waiting_adapters(run: RunShape) -> dict[str, int]:
    """Return the bytes of the roles' adapters that wait for their turn, with their optimizers, on the fullest stage."""
    rl, actor = run.cfg.rl_config, run.actor
    if run.generate is None or rl is None or len(rl.adapter_names) < 2:
        return {}
    sizes = (
        (elements.dense_adapters + elements.expert_adapters) * actor.itemsize + actor.state(elements)
        for elements in actor.elements
    )
    return {"adapters that wait": (len(rl.adapter_names) - 1) * max(sizes)}


def _list_saved(run: RunShape) -> list[Model]:
    """Return the models whose checkpoints a run writes, on the actor's devices."""
    rl = run.cfg.rl_config
    moves = run.generate is not None and rl is not None and rl.sync_ref_model
    others = {name: model for name, model in run.others.items() if model.trains or (name == "reference" and moves)}
    return [run.actor, *others.values()]


def _count_copies(run: RunShape, model: Model) -> dict[str, int]:
    """Return the bytes of a model's weights, optimizer and gradients that leave for the host, on its fullest stage."""
    generate, copies = run.generate, {"weights": 0, "optimizer": 0}
    copies["gradients"] = max(map(model.host_gradients, model.elements))
    if model.is_streamed or (generate is not None and generate.offload_train_param):
        copies["weights"] = max(model.weights(elements) for elements in model.elements)
    is_copied = model.config.swap_optimizer or (generate is not None and generate.offload_train_optimizer)
    is_filed = model.config.optimizer_offload_path is not None
    copies["optimizer"] = max(
        (model.state(elements) - model.offloaded(elements) if is_copied else 0) + (0 if is_filed else model.offloaded(elements))
        for elements in model.elements
    )
    return copies


def _count_saving(saved: list[Model]) -> dict[str, int]:
    """Return the bytes that a save of these models has on the host besides the copies that stay."""
    staged = [_count_staged(model) for model in saved]
    # in the background all of them are written together
    together = sum if saved[0].config.async_save else max
    written = together(staged)
    exported = max(EXPORT_SHARD if model.config.save_hf else 0 for model in saved)
    return {"tensors of the save": written, "export": min(exported, max(_count_weights(model) for model in saved))}


def _count_staged(model: Model) -> int:
    """Return the bytes of a rank's tensors that are copied to the host before they are written, on the fullest stage.

    One of the ranks with the same parameters writes the weights and, with a distributed optimizer, the states of all.
    """
    only_adapters = bool(model.config.lora_target_modules) and model.config.lora_ckpt_filter
    staged = []
    for elements in model.elements:
        dense = replace(elements, expert=0, expert_adapters=0, matrices=0)
        expert = Elements(expert=elements.expert, expert_adapters=elements.expert_adapters)
        if only_adapters:
            dense, expert = (replace(part, dense=0, expert=0, buffers=0, frozen=0) for part in (dense, expert))
        parts = ((dense, model.dp), (expert, model.expert_dp))
        weights = sum(model.weights(part) // ranks for part, ranks in parts)
        has_states = model.trains and not model.config.no_save_optim
        states = [_count_staged_states(model, part, ranks) if has_states else 0 for part, ranks in parts]
        # the states of dense parameters and of experts are gathered one after the other, before weights are copied
        gathered = max(states) * _GATHERED if model.config.use_distributed_optimizer and not _is_copied_whole(model) else 0
        staged.append(sum(states) + int(max(weights, gathered)))
    return max(staged)


def _is_copied_whole(model: Model) -> bool:
    """Return True where the states of a distributed optimizer are copied from host memory without a gathering."""
    return model.config.swap_optimizer and model.dp == model.expert_dp == 1


def _count_staged_states(model: Model, elements: Elements, ranks: int) -> int:
    """Return the bytes of the optimizer's states that a save copies, of parameters that so many ranks have."""
    config, state = model.config, model.state(elements)
    if config.reuse_fp32_param:  # each rank puts its float32 weights together in host memory, and copies its moments
        state = state * _JOINED // _SPLIT
        return state + (state if config.use_distributed_optimizer else 0)
    if config.use_distributed_optimizer:  # gathered on one of the ranks, in host memory
        is_there = config.swap_optimizer and ranks == 1 and not config.async_save
        return 0 if is_there else state
    is_there = config.swap_optimizer and not config.async_save
    in_place = 0 if config.async_save else model.offloaded(elements)
    return 0 if is_there else (state - in_place) // ranks


def _count_weights(model: Model) -> int:
    return count_all_elements(model.plan, model.config).parameters * model.itemsize


def _count_checkpoint(model: Model) -> int:
    """Return the bytes of the files of a save: all weights, states of the optimizer, a Hugging Face folder."""
    config, elements = model.config, count_all_elements(model.plan, model.config)
    adapters = elements.dense_adapters + elements.expert_adapters
    only_adapters = bool(config.lora_target_modules) and config.lora_ckpt_filter
    exported = adapters * model.itemsize + (0 if only_adapters else _count_weights(model))
    # its weights that train are the float32 ones, which the other engine saves with the optimizer
    is_wide = model.holding.has_float32_weights and model.trains and config.bf16
    trained = adapters if config.lora_target_modules else elements.dense + elements.expert
    moments = 4 if config.optimizer_state_dtype == "bfloat16" else 8
    has_copy = config.bf16 and not model.holding.has_float32_weights
    bytes_each = moments + (4 if has_copy else 0) if model.trains and not config.no_save_optim else 0
    weights = exported + (2 * trained if is_wide else 0)
    muon = 4 * elements.matrices if config.optimizer == "muon" and bytes_each else 0
    return weights + trained * bytes_each - muon + (exported if config.save_hf else 0)


def _count_file(model: Model) -> int:
    """Return the bytes of the optimizer's states in a file, on the model's fullest stage."""
    is_filed = model.config.optimizer_offload_path is not None
    return max(model.offloaded(elements) for elements in model.elements) if is_filed else 0
