"""Bytes of a device by owner and phase.

The phases are named as in `run/phases.py`, with the owners that are on the device in each: training state that the run file
offloads leaves before a weight sync and returns model by model; reference and critic are offloaded after their pass or update.

Bytes of activations are a model, not a count. For each token of a layer backward needs (arXiv:2205.05198, without dropout and
with attention that saves no scores): the inputs of both norms and of both first projections (4 hidden; divided by TP with
sequence parallelism), query, key, value and the output of attention (divided by TP), and three widths of the gated MLP
(divided by TP). An expert layer saves, for each token that its rank receives, the input of its expert and four of the expert's
widths. Recomputed layers save only their input. A vision tower saves as much for each patch of the images of a micro-batch
where it trains (`TowerCosts`); a frozen one has the bytes of one of its blocks at a time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import ClassVar

from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.config.device_limits import HEAD_ROWS
from mindspeed_rl.config.keys.megatron import parse_group_buffers
from mindspeed_rl.config.keys.serve import MAX_PASSES
from mindspeed_rl.config.run import RunConfig
from mindspeed_rl.hub import find_folder
from mindspeed_rl.models.costs import TowerCosts, cpu_cache_bytes, read_kv_bytes, read_weight_bytes
from mindspeed_rl.models.model_config import ModelConfig
from mindspeed_rl.models.plan import ModelPlan
from mindspeed_rl.planner.devices import Device
from mindspeed_rl.planner.engine import Engine, KvCache, plan_engine
from mindspeed_rl.planner.host_memory import HostMemory, plan_host_memory
from mindspeed_rl.planner.run_shape import Model, RunShape, read_shape
from mindspeed_rl.planner.shapes import Elements, count_all_elements, count_streamed_elements
from mindspeed_rl.run import Run
from mindspeed_rl.run.phases import Phases

_MIB = 1 << 20

#: the allocator's blocks are larger than the requested bytes, by this fraction of the transient ones
FRAGMENTATION = 0.05
#: buffers of a communicator: one to send, one to receive
HCCL_BUFFERS = 2
#: tokens of the busiest expert rank divided by the tokens of an even split: in one layer, and over the layers of a stage
EXPERT_IMBALANCE = 1.5
MEAN_EXPERT_IMBALANCE = 1.2


@dataclass(frozen=True)
class Phase:
    """The bytes on a device in one phase.

    Attributes:
        owners: bytes by owner, those that have any.
        MODEL_ERROR: modelled bytes may be off by this fraction either way; the others are counted.
        EXACT: owners whose bytes are counted, not modelled.
        FIXED: owners that no allocator of torch's counts.
    """

    MODEL_ERROR: ClassVar[float] = 0.25
    EXACT: ClassVar[tuple[str, ...]] = (
        *("weights", "gradients", "optimizer", "reference", "reward model", "critic", "teacher"),
        *(f"teacher_{index}" for index in range(1, 64)),
        *("rollout weights", "packed weights", "KV cache", "judge weights", "judge KV cache", "optimizer window"),
        *("client models", "embedding gradient", "gathered weights", "gradients of all ranks", "reduced gradients"),
    )
    FIXED: ClassVar[tuple[str, ...]] = ("driver", "runtime", "HCCL buffers")

    name: str
    owners: dict[str, int]

    @property
    def total(self) -> int:
        """Bytes of all owners."""
        return sum(self.owners.values())

    @property
    def range(self) -> tuple[int, int]:
        """Fewest and most bytes, as far as the model may be off."""
        error = Phase.MODEL_ERROR * sum(count for owner, count in self.owners.items() if owner not in Phase.EXACT)
        return int(self.total - error), int(self.total + error)


@dataclass(frozen=True)
class DeviceGroup:
    """Devices with equal bytes: a pipeline stage's, or a role's.

    Attributes:
        ranks: ranges of their ranks, as text.
        count: number of devices.
    """

    name: str
    ranks: str
    count: int
    phases: tuple[Phase, ...]

    @property
    def peak(self) -> Phase:
        """The phase with the most bytes."""
        return max(self.phases, key=lambda phase: phase.total)


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of every group of devices of a run.

    Attributes:
        capacity: bytes of a device.
        problems: sentences about what cannot work, whatever the bytes.
        host: host memory of a machine.
    """

    device: str
    capacity: int
    groups: tuple[DeviceGroup, ...]
    cache: KvCache | None = None
    problems: tuple[str, ...] = ()
    host: HostMemory | None = None

    @property
    def fullest(self) -> DeviceGroup:
        """The devices of the peak."""
        return max(self.groups, key=lambda group: group.peak.total)

    #: the capacity is above the range of the peak; in its upper half; in its lower half; below it
    VERDICTS: ClassVar[tuple[str, ...]] = ("fits", "tight", "over", "does not fit")

    @property
    def verdict(self) -> str:
        """One of VERDICTS."""
        phases = [phase for group in self.groups for phase in group.phases]
        low, high = max(phase.range[0] for phase in phases), max(phase.range[1] for phase in phases)
        if self.problems or low > self.capacity:
            return "does not fit"
        if high <= self.capacity:
            return "fits"
        return "tight" if self.fullest.peak.total <= self.capacity else "over"

    def only(self, *names: str) -> MemoryPlan:
        """Return the plan of only these phases."""
        groups = (replace(group, phases=tuple(phase for phase in group.phases if phase.name in names)) for group in self.groups)
        return replace(self, groups=tuple(group for group in groups if group.phases))

    def without(self, names: Iterable[str]) -> MemoryPlan:
        """Return the plan without these phases and without the problems of the engine."""
        left = {phase.name for group in self.groups for phase in group.phases} - set(names)
        return replace(self.only(*left), problems=())


def plan_memory(draft: Run, device: Device, *, shape: RunShape | None = None) -> MemoryPlan:
    """Compute the bytes of every device of a run.

    Args:
        shape: models of the run, where they are planned already.

    Raises:
        ValueError: sizes are missing, or a model's shape is not known or does not fit its layout; the role is named.
    """
    run = shape or read_shape(draft, device)
    engine = plan_engine(run)
    fixed = dict(zip(Phase.FIXED, (device.driver, device.runtime, _communicator_bytes(run)), strict=True))
    stages = run.actor.plan.layout.pp
    groups = [
        DeviceGroup(
            "all devices" if stages == 1 else f"stage {stage}",
            _format_ranks(run, stage, stages),
            run.sizes.actor.num_npus // stages,
            tuple(_plan_phases(run, engine, stage, fixed)),
        )
        for stage in range(stages)
    ]
    groups += _plan_dedicated(run, engine, fixed)
    host = plan_host_memory(run, engine)
    if engine is None:
        return MemoryPlan(device.name, device.memory, tuple(groups), host=host)
    problems = (engine.problem,) if engine.problem else ()
    return MemoryPlan(device.name, device.memory, tuple(groups), engine.cache, problems, host)


# ---------------------------------------------------------------------- phases


def _plan_phases(run: RunShape, engine: Engine | None, stage: int, fixed: dict[str, int]) -> list[Phase]:
    """Return the phases of an iteration in order, each with the bytes on a device of this pipeline stage."""
    stages = run.actor.plan.layout.pp
    actor, elements = run.actor, run.actor.elements[stage]
    weights = {"weights": actor.weights(elements)}
    state = {"gradients": actor.gradients(elements), "optimizer": actor.optimizer(elements)}
    others = {name: _ModelBytes.count(model, model.stage(stage, stages)) for name, model in run.others.items()}
    # a streamed model is on the device in its passes only
    totals = {name: 0 if run.others[name].is_streamed else count.total for name, count in others.items()}
    start = _plan_start(run, stage, fixed)
    activations = {"activations": _update_activations(run, actor, stage), "logits": _head(run, actor, stage, "update", True)}
    activations |= {"tower": _tower_bytes(run, actor, stage, "update", trains=True), **_sharded_update(run, actor, stage)}
    window = {"optimizer window": _step_window(run, actor, stage)}
    ends = (window, {"embedding gradient": _embedding_gradient(actor, stage)}, _last_reduction(run, actor, stage))
    if engine is None:
        moments = (activations, *ends, *_list_streamed_passes(run, stage))
        return [start, _fullest(Phases.UPDATE_ACTOR.memory, (fixed, weights, state, totals), *moments)]
    generate = run.generate
    assert generate is not None
    if run.cfg.serve_config is not None:
        num_models = run.cfg.serve_config.num_models
        models = {"client models": count_client_bytes(run) * num_models}
        # of full weights in Megatron's buffers; of adapters for each pass until it is added to its model's
        gradients = state["gradients"]
        if actor.config.lora_target_modules:
            gradients = 4 * count_client_elements(run) * min(MAX_PASSES, num_models)
        owners = (
            fixed,
            weights,
            {"gradients": gradients},
            models,
            _serving_bytes(engine),
            {"packed weights": engine.packed},
        )
        return [_fullest("serve", owners, {owner: count for owner, count in activations.items() if owner != "tower"})]
    resident = _resident_bytes(run, weights, state, others)
    # engines in the actor's workers, or elastic servers on their devices
    disaggregated = run.placement.disaggregated and not run.is_elastic
    serving = {} if disaggregated else _serving_bytes(engine)
    # packed weights exist from the first responses to the next weight sync, or to a release of the engine's memory
    generating = {} if disaggregated else {**serving, "packed weights": engine.packed}
    also = {} if run.device.sleeps or generate.offload_train_param else generating
    if generate.engine == "transformers":  # whose weights stay
        also = {"rollout weights": engine.weights}
    judge = {} if run.placement.layouts.get("judge", run.sizes.actor).dedicated else count_judge_bytes(run)
    # its processes are there in all phases, and without a sleep mode the engines too
    resident |= ({"judge process": run.device.runtime} if judge else {}) | ({} if run.device.sleeps else judge)
    if run.is_elastic:
        resident |= {"elastic process": run.device.runtime} | ({} if run.device.sleeps else serving)
    phases = [start, _make_phase(Phases.GENERATE.memory, fixed, resident, generating)]
    if judge:
        phases.append(_make_phase(Phases.JUDGE.memory, fixed, resident, judge, also))
    for name, model, transient in _list_passes(run, stage, weights):
        phases.append(_make_phase(name, fixed, resident, model, also, transient))
    if "critic" in others:
        critic = run.others["critic"]
        own_stage = stage * len(critic.elements) // stages
        update = {"activations": _update_activations(run, critic, own_stage)}
        update |= {"tower": _tower_bytes(run, critic, own_stage, "update", trains=True)}
        update |= _sharded_update(run, critic, own_stage)
        ends_of_critic = {"optimizer window": _step_window(run, critic, own_stage)}, _last_reduction(run, critic, own_stage)
        owners = (fixed, resident, weights, {"critic": totals["critic"]}, also)
        phases.append(_fullest(Phases.UPDATE_CRITIC.memory, owners, update, *ends_of_critic))
    owners = (fixed, resident, weights, state, also)
    phases.append(_fullest(Phases.UPDATE_ACTOR.memory, owners, activations, *ends))
    push = {"push buckets": _bucket_bytes(run), **({} if run.device.sleeps else serving)}
    if not disaggregated:
        push |= {"rollout weights": engine.weights, "engine adapters": engine.adapters, "draft model": engine.draft}
    # at its end the engine has its cache again, and training has left
    served = {} if disaggregated else {owner: count for owner, count in serving.items() if owner != "engine step"}
    phases.append(_fullest(Phases.PUSH_WEIGHTS.memory, (fixed, resident), {**weights, **push}, served))
    if actor.config.async_save:  # the engine is not offloaded, and all models are on the device together
        phases.append(_make_phase(Phases.SAVE.memory, fixed, weights, state, totals, serving))
    return phases


def count_client_bytes(run: RunShape) -> int:
    """Return the bytes of a client's model of the largest rank: matrices, gradient, two moments and average in float32.

    A model of full weights has them of all weights, and the base's weights are kept in host memory, which the CPU's device is.
    """
    config = run.actor.config
    if not config.lora_target_modules:
        serve = run.cfg.serve_config
        copies = 4 + (serve is not None and serve.sampler_ema_decay > 0) + (not run.device.sleeps)
        return 4 * copies * sum(elements.parameters for elements in run.actor.elements)
    serve = run.cfg.serve_config
    copies = 4 + (serve is not None and serve.sampler_ema_decay > 0)
    return 4 * copies * count_client_elements(run)


def count_client_elements(run: RunShape) -> int:
    """Count the elements of the largest adapter of a client, the output layer's too; each rank has it in full."""
    config, plan = run.actor.config, run.actor.plan
    head = config.lora_r * (plan.model_config.hidden_size + plan.model_config.vocab_size)
    return count_all_elements(plan, config).dense_adapters + head


def _plan_start(run: RunShape, stage: int, fixed: dict[str, int]) -> Phase:
    """Return the fullest moment in which a model is built: one after the other, each beside what the earlier ones left.

    A model that trains has its gradients' buffer until its weights are in Megatron's, and its optimizer after that.
    """
    stages = run.actor.plan.layout.pp
    first = [name for name in ("reference", "critic") if name in run.others]
    built = [*first, *(name for name in run.others if name not in first)]  # teachers and the reward model
    fullest, resident = Phase("start", {}), dict(fixed)
    for name, model in {"": run.actor, **{name: run.others[name] for name in built}}.items():
        elements = model.stage(stage, stages)
        count = asdict(_ModelBytes.count(model, elements, stepped=False))
        if model.holding.is_sharded:  # whose gradients are there in an update only
            count["gradients"] = 0
        # a swapped optimizer leaves for the host once it is built
        built_optimizer = model.state(elements, stepped=False) if model.config.swap_optimizer else count["optimizer"]
        for moment in ({**count, "optimizer": 0}, {**count, "optimizer": built_optimizer, "gradients": 0}):
            phase = _make_phase("start", resident, _name_owners(name, moment))
            fullest = max(fullest, phase, key=lambda phase: phase.total)
        if not model.is_streamed:
            resident |= _name_owners(name, {part: size for part, size in count.items() if _stays(run, part)})
    return fullest


def _name_owners(name: str, parts: dict[str, int]) -> dict[str, int]:
    """Return the bytes of a model by owner: its parts are the actor's owners, and one owner of every other model."""
    return {name: sum(parts.values())} if name else parts


def _stays(run: RunShape, part: str) -> bool:
    """Return whether a part of a model stays on the device once the model is built; gradients begin with the first step."""
    offloaded = {"weights": False, "optimizer": False, "gradients": True}
    if run.generate is not None:
        offloaded |= {"weights": run.generate.offload_train_param, "optimizer": run.generate.offload_train_optimizer}
    return not offloaded[part]


def find_judge_folder(cfg: RunConfig) -> Path | None:
    """Return the folder of the judge that a run serves; None without one, and where its files are not all on this machine."""
    judge = None if cfg.rl_config is None else cfg.rl_config.served_judge
    folder = None if judge is None else find_folder(judge)
    is_here = folder is not None and (folder / "config.json").is_file() and read_weight_bytes(folder, 1) > 0
    return folder if is_here else None


def count_judge_bytes(run: RunShape) -> dict[str, int]:
    """Return the bytes of the engine of a judge on each of its devices; none without one whose files are on this machine."""
    device, folder = run.device, find_judge_folder(run.cfg)
    if folder is None or "judge" not in run.placement.layouts:
        return {}
    keys = run.cfg.read_judge_keys()
    weights = read_weight_bytes(folder, 2 if keys.dtype == "bfloat16" else 4) // keys.infer_tensor_parallel_size
    cache = cpu_cache_bytes(keys, read_kv_bytes(folder, keys.cache_itemsize))
    if device.sleeps:  # what the engine is given but its weights
        cache = max(0, int(keys.gpu_memory_utilization * device.memory) - weights)
    return {"judge weights": weights, "judge KV cache": cache}


def _serving_bytes(engine: Engine) -> dict[str, int]:
    return {
        "rollout weights": engine.weights,
        "engine adapters": engine.adapters,
        "draft model": engine.draft,
        "KV cache": engine.cache.room,
        "engine step": engine.step,
    }


def _plan_dedicated(run: RunShape, engine: Engine | None, fixed: dict[str, int]) -> list[DeviceGroup]:
    """Return the devices of rollout servers that the run starts itself, and of other roles with dedicated devices."""
    groups: list[DeviceGroup] = []
    count = run.placement.dedicated.get("rollout")
    if engine is not None and count is not None:
        serving = _serving_bytes(engine)
        generate = _make_phase(Phases.GENERATE.memory, fixed, serving, {"packed weights": engine.packed})
        push = _make_phase(Phases.PUSH_WEIGHTS.memory, fixed, serving, {"push buckets": _bucket_bytes(run)})
        groups.append(DeviceGroup("rollout", f"{count} of their own", count, (generate, push)))
    if (judges := run.placement.dedicated.get("judge")) and (judge := count_judge_bytes(run)):
        phase = _make_phase(Phases.JUDGE.memory, fixed, judge)
        groups.append(DeviceGroup("judge", f"{judges} of their own", judges, (phase,)))
    # all teachers share the devices of the first
    first, *others = [name for name in run.dedicated if name.startswith("teacher")] or [""]
    for name, model in run.dedicated.items():
        layout = model.plan.layout
        if name in others:
            continue
        for stage, elements in enumerate(model.elements):
            owners, logits = asdict(_ModelBytes.count(model, elements)), {"logits": _head(run, model, stage, "ref", False)}
            owners["weights"] = model.pass_weights(stage, len(model.elements))
            forward = {"activations": int(_compute_forward_bytes(model.config, model.plan, run.tokens("ref")))}
            forward |= {"tower": _tower_bytes(run, model, stage, "ref", trains=False), **_gathered(model, stage)}
            for other in others if name == first else ():
                more = run.dedicated[other]
                owners[other] = _ModelBytes.count(more, more.stage(stage, len(model.elements))).total
            phases = [_make_phase(f"{name} pass", fixed, owners, forward, logits)]
            if model.trains:
                update = {"activations": _update_activations(run, model, stage)}
                update |= {"tower": _tower_bytes(run, model, stage, "update", trains=True)}
                update |= _sharded_update(run, model, stage) | logits
                phases.append(_fullest(f"update {name}", (fixed, owners), update, _last_reduction(run, model, stage)))
            devices = model.dp * layout.tp
            label = name if layout.pp == 1 else f"{name} stage {stage}"
            groups.append(DeviceGroup(label, f"{devices} of its own", devices, tuple(phases)))
    return groups


def _list_streamed_passes(run: RunShape, stage: int) -> Iterator[dict[str, int]]:
    """Yield the bytes of the passes of streamed models, which a supervised stage makes in its update."""
    for name, model in run.others.items():
        if model.is_streamed:
            weights = model.pass_weights(stage, run.actor.plan.layout.pp)
            yield {name: weights, **_pass_bytes(run, model, stage, "ref")}


def _list_passes(run: RunShape, stage: int, weights: dict[str, int]) -> Iterator[tuple[str, dict[str, int], dict[str, int]]]:
    """Yield (phase, bytes of its model, bytes that the pass needs) of the forward passes before an update, in order.

    Args:
        weights: the actor's.
    """
    objective, stages = run.objective, run.actor.plan.layout.pp
    assert run.cfg.rl_config is not None and objective is not None
    for name in ("reward model", "reference", *run.teachers, "critic"):
        if name in run.others:
            model = run.others[name]
            owned = replace(_ModelBytes.count(model, model.stage(stage, stages)), weights=model.pass_weights(stage, stages))
            yield f"{name} pass", {name: owned.total}, _pass_bytes(run, model, stage, "actor" if name == "critic" else "ref")
    if run.cfg.rl_config.share_backbone and objective.needs_ref:  # the actor without its adapters
        yield Phases.REF_LOG_PROBS.memory, weights, _pass_bytes(run, run.actor, stage, "ref")
    if objective.old_log_probs_share(on_policy=run.sizes.on_policy):
        yield Phases.ACTOR_LOG_PROBS.memory, weights, _pass_bytes(run, run.actor, stage, "actor")


def _make_phase(name: str, *parts: dict[str, int]) -> Phase:
    """Return a phase with all of these owners on the device; an owner of two parts counts once."""
    owners: dict[str, int] = {}
    for part in parts:
        for owner, count in part.items():
            owners[owner] = max(owners.get(owner, 0), count)
    transient = sum(owners.get(owner, 0) for owner in ("activations", "tower", "logits", "engine step", "push buckets"))
    owners["fragmentation"] = int(FRAGMENTATION * transient)
    return Phase(name, {owner: count for owner, count in owners.items() if count})


def _fullest(name: str, owners: tuple[dict[str, int], ...], *moments: dict[str, int]) -> Phase:
    """Return the fullest moment of a phase, of those that have these owners in common."""
    return max((_make_phase(name, *owners, moment) for moment in moments), key=lambda phase: phase.total)


def _step_window(run: RunShape, model: Model, stage: int) -> int:
    """Return the bytes that are on the device during an optimizer's step only, when activations are gone.

    These are a swapped optimizer, and the buffers in which float32 weights are put together.
    """
    elements = model.elements[stage]
    buffers = model.split_buffers(elements)
    if not model.config.swap_optimizer:
        return buffers
    # without MindSpeed's optimizer the whole state is loaded
    loads_parts = run.device.sleeps and not model.holding.is_sharded
    return buffers + (model.swapped_at_once(stage, elements) if loads_parts else model.state(elements))


def _embedding_gradient(model: Model, stage: int) -> int:
    """Return the bytes of the embedding's gradient before it is added to the others, at the end of backward."""
    config, layout, model_config = model.config, model.plan.layout, model.plan.model_config
    if stage != layout.first_chunk[0] or config.lora_target_modules:
        return 0
    return model_config.padded_vocab_size // layout.tp * model_config.hidden_size * model.itemsize


@dataclass(frozen=True)
class _ModelBytes:
    """Bytes of a rank of a model other than the actor."""

    weights: int
    gradients: int
    optimizer: int

    @classmethod
    def count(cls, model: Model, elements: Elements, *, stepped: bool = True) -> _ModelBytes:
        return cls(model.weights(elements), model.gradients(elements), model.optimizer(elements, stepped=stepped))

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer


def _resident_bytes(
    run: RunShape, weights: dict[str, int], state: dict[str, int], others: dict[str, _ModelBytes]
) -> dict[str, int]:
    """Return the bytes of the training side that are on the device while the engine generates."""
    assert run.generate is not None
    resident = {
        "weights": not run.generate.offload_train_param,
        "gradients": not run.generate.offload_train_grad,
        "optimizer": not run.generate.offload_train_optimizer,
    }
    owners = {
        owner: count
        for owner, count in {**weights, **state}.items()
        if resident[owner] and not (owner == "gradients" and run.actor.holding.is_sharded)
    }
    for name, count in others.items():
        model = run.others[name]
        stays = {owner: is_resident and not model.is_streamed for owner, is_resident in resident.items()}
        stays["gradients"] &= not model.holding.is_sharded
        owners[name] = sum(getattr(count, owner) for owner, is_resident in stays.items() if is_resident)
    return owners


def _update_activations(run: RunShape, model: Model, stage: int) -> int:
    return int(_compute_stage_activations(model.config, model.plan, run.tokens("update"), run.micro_batches, stage))


def _head(run: RunShape, model: Model, stage: int, use: str, trains: bool) -> int:
    if stage != model.plan.layout.last_chunk[0]:
        return 0
    return int(compute_head_bytes(model.config, model.plan.model_config, run.tokens(use), trains=trains))


def _pass_bytes(run: RunShape, model: Model, stage: int, use: str) -> dict[str, int]:
    model_stage = stage * len(model.elements) // run.actor.plan.layout.pp
    return {
        "activations": int(_compute_forward_bytes(model.config, model.plan, run.tokens(use))),
        "tower": _tower_bytes(run, model, model_stage, use, trains=False),
        "logits": _head(run, model, model_stage, use, False),
        **_gathered(model, model_stage),
    }


def _gathered(model: Model, stage: int) -> dict[str, int]:
    """Return the bytes of the weights that a rank of an engine of shards has in full during a pass.

    These are what is in no layer, the layer that computes and the next one, which arrives meanwhile.
    """
    if not model.holding.is_sharded:
        return {}
    return {"gathered weights": model.computed_weights(count_streamed_elements(model.plan, model.config)[stage])}


def _sharded_update(run: RunShape, model: Model, stage: int) -> dict[str, int]:
    """Return what an update has in addition in an engine of shards: gathered weights, and gradients before they are divided."""
    if not model.holding.is_sharded:
        return {}
    elements = model.elements[stage]
    # gradients of micro-batches are added on each rank, and divided over the ranks in the last one layer by layer
    adds_up = run.micro_batches > 1 and not model.config.offload_gradients
    sums = model.full_gradients(elements) - model.gradients(elements) if adds_up else 0
    return {**_gathered(model, stage), "gradients of all ranks": sums, "reduced gradients": model.reduced_gradients()[0]}


def _last_reduction(run: RunShape, model: Model, stage: int) -> dict[str, int]:
    """Return the same at the end of a backward pass: embedding, tower and head are reduced last, when nothing else is there."""
    more = _sharded_update(run, model, stage)
    return more and {**more, "gathered weights": 0, "reduced gradients": model.reduced_gradients()[1]}


def _tower_bytes(run: RunShape, model: Model, stage: int, use: str, *, trains: bool) -> int:
    """Return the bytes of a vision tower's pass over the images of a micro-batch, on the first stage."""
    config, layout = model.config, model.plan.layout
    costs = TowerCosts.count(model.plan.architecture, model.plan.model_config)
    if costs is None or stage != layout.first_chunk[0]:
        return 0
    # one block at a time where nothing is saved for it; a micro-batch on its way keeps what is
    blocks, in_flight = 1, 1
    if trains and model.trains and not config.freeze_vit:
        blocks, in_flight = costs.depth, min(run.micro_batches, layout.pp)
    numbers = (costs.block * blocks + costs.ends) * run.count_batch_image_tokens(model, use)
    return int(numbers * in_flight * model.itemsize)


def _bucket_bytes(run: RunShape) -> int:
    """Return the bytes of a bucket to send and one to receive, none larger than a rank's weights."""
    assert run.generate is not None
    weights = max(run.actor.weights(elements) for elements in run.actor.elements)
    return 2 * min(run.generate.update_weights_bucket_mb * _MIB, weights)


# ---------------------------------------------------------------------- communicators and ranks


def hccl_buffer_mib(cfg: RunConfig) -> int:
    """Return the size of a communicator's buffer; HCCL's default in stages without the key."""
    return 200 if cfg.rl_config is None else cfg.rl_config.hccl_buffersize


def _communicator_bytes(run: RunShape) -> int:
    """Return the bytes of the communicators of a device of the actor; none without HCCL.

    Raises:
        ValueError: hccl_group_buffer is none of Megatron's groups with its MiB.
    """
    config, layout = run.actor.config, run.sizes.actor
    if not run.device.sleeps or layout.num_npus == 1:
        return 0
    expert, inner = config.expert_sizes
    groups = {
        "world": layout.num_npus,
        "tp": layout.tensor,
        "cp": layout.context,
        "pp": layout.pipeline,
        "dp_cp": run.actor.dp,
        "mp": layout.tensor * layout.pipeline,
    }
    if config.num_experts:
        groups |= {"ep": expert, "tp_ep_mp": expert * inner, "ep_dp": run.actor.expert_dp}
    placement = run.placement
    if run.generate is not None and placement.disaggregated:
        groups["push"] = layout.num_npus + run.sizes.rollout.num_npus
    elif run.generate is not None and placement.engines is not None:
        groups |= {"rollout tp": placement.engines.tensor, "rollout ep": placement.engines.expert_ranks}
    size, sizes = hccl_buffer_mib(run.cfg), parse_group_buffers(config.hccl_group_buffer)
    return sum(HCCL_BUFFERS * sizes.get(name, size) * _MIB for name, ranks in groups.items() if ranks > 1)


def _format_ranks(run: RunShape, stage: int, stages: int) -> str:
    """Return the ranks of a stage as text: one range, or with use_tp_pp_dp_mapping one range a replica."""
    layout = run.sizes.actor
    if run.actor.config.use_tp_pp_dp_mapping:
        count = layout.tensor * layout.context
        starts = range(stage * count, layout.num_npus, count * stages)
    else:
        count = layout.num_npus // stages
        starts = range(stage * count, stage * count + 1)
    ranges = [str(start) if count == 1 else f"{start}-{start + count - 1}" for start in starts[:3]]
    return ", ".join(ranges) + (", ..." if len(starts) > 3 else "")


@dataclass(frozen=True)
class _LayerBytes:
    """Bytes of a layer.

    Attributes:
        saved: for backward of a micro-batch, in a layer that is not recomputed.
        input: saved by a recomputed layer.
        index: bytes of the tokens that its indexer chooses, which the layers after it keep until backward.
        again: outputs of norms and of latent attention's projections that only its own backward pass has, computed again.
    """

    saved: float
    input: float
    index: float
    again: float = 0.0


def compute_layer_bytes(config: MegatronConfig, model_config: ModelConfig, tokens: float, layer: int) -> _LayerBytes:
    """Compute the bytes of a layer for this many tokens of a replica."""
    tp, itemsize = config.tensor_model_parallel_size, 2 if config.bf16 else 4
    tokens /= config.context_parallel_size
    hidden = model_config.hidden_size / (tp if config.sequence_parallel else 1)
    heads, sparse, linear = model_config.num_attention_heads, model_config.sparse_attention, model_config.linear_attention
    # each context-parallel rank has the activations of all tokens
    index = 0.0 if sparse is None else config.context_parallel_size * sparse.count_saved(itemsize)
    is_linear = linear is not None and layer in linear.layers
    if is_linear and not model_config.multi_latent_attention:
        attention = linear.count_saved(itemsize) / tp
    else:
        attention = _count_attention(model_config, tp)
    if model_config.multi_latent_attention and layer not in model_config.layers_without_indexer:
        attention += index
    recomputed = set(config.recompute_modules or ["core_attn"]) if config.recompute_granularity == "selective" else set()
    statistics = heads / tp * 64 / itemsize  # the running maximum and sum of fused attention, eight float32 each
    mlp = _count_mlp(config, model_config, recomputed, has_experts=layer in model_config.moe_layers)
    saved = 4 * hidden + attention + statistics + mlp
    if "core_attn" in recomputed and not is_linear:
        saved -= heads * model_config.kv_channels / tp  # its output
    again = 2 * hidden if "layernorm" in recomputed else 0.0
    if "mla_up_proj" in recomputed and model_config.multi_latent_attention:
        queries = heads * model_config.kv_channels
        again += (2 * queries + heads * (model_config.v_head_dim or model_config.kv_channels)) / tp
    kept = index if layer + 1 in model_config.layers_without_indexer else 0.0
    numbers = saved - again, hidden, kept, again
    return _LayerBytes(*(number * tokens * itemsize for number in numbers))


def _count_attention(model_config: ModelConfig, tp: int) -> float:
    """Return the elements of a token that softmax attention saves for backward."""
    heads, groups, width = model_config.num_attention_heads, model_config.num_query_groups, model_config.kv_channels
    if model_config.multi_latent_attention:
        values = heads * (model_config.v_head_dim or width)
        ranks = (model_config.q_lora_rank or 0) + (model_config.kv_lora_rank or 0)
        return (2 * heads * width + 2 * values) / tp + 2 * ranks
    elements = 2 * heads + 2 * groups
    if model_config.attention_output_gate:
        elements += 2 * heads
    if model_config.qk_layernorm:
        elements += heads + groups
    return elements * width / tp


def _count_mlp(config: MegatronConfig, model_config: ModelConfig, recomputed: Collection[str], *, has_experts: bool) -> float:
    """Return the elements of a token that the MLP or the experts of a layer save for backward, their input excluded."""
    tp = config.tensor_model_parallel_size
    widths = 2 if config.recompute_activation_function or not {"moe_act", "mlp"}.isdisjoint(recomputed) else 3
    if not has_experts:
        return 0 if "mlp" in recomputed else widths * model_config.ffn_hidden_size / tp
    # an expert rank receives its part of the replica's tokens
    _, inner = config.expert_sizes
    assert model_config.moe_ffn_hidden_size is not None
    expert = model_config.hidden_size
    if "moe" not in recomputed:
        expert += (widths + 1) * model_config.moe_ffn_hidden_size / inner
    routed = model_config.moe_router_topk * inner / (tp if config.sequence_parallel else 1) * expert
    return routed + widths * (model_config.moe_shared_expert_intermediate_size or 0) / tp


def _compute_stage_activations(config: MegatronConfig, plan: ModelPlan, tokens: float, micro_batches: int, stage: int) -> float:
    """Compute the bytes on a device of a stage at the fullest moment of an update.

    Args:
        config: keys of the role.
        plan: plan of the model.
        tokens: number of tokens of a micro-batch of one replica.
        micro_batches: number of micro-batches of an optimizer step on one replica; the schedule limits how many of them a
            stage has in flight.
        stage: index of the pipeline stage.
    """
    layout, model_config = plan.layout, plan.model_config
    total, working = 0.0, 0.0
    for chunk in range(layout.vpp):
        for index, layer in enumerate(layout.chunk_layers(stage, chunk)):
            if layer is None:
                continue
            moe = layer in model_config.moe_layers
            layer_bytes = compute_layer_bytes(config, model_config, tokens, layer)
            is_uneven = moe and layout.num_expert_groups > 1
            working = max(working, layer_bytes.saved * (EXPERT_IMBALANCE if is_uneven else 1.0) + layer_bytes.again)
            saved = layer_bytes.saved * (MEAN_EXPERT_IMBALANCE if is_uneven else 1.0)
            if config.recompute_granularity == "full":
                num_layers = config.recompute_num_layers or 1
                if config.recompute_method != "block":
                    saved = layer_bytes.input / num_layers + layer_bytes.index
                elif index < num_layers:
                    saved = layer_bytes.input + layer_bytes.index
            total += saved
    if layout.pp == 1:
        in_flight = 1.0
    elif layout.vpp == 1:
        in_flight = min(micro_batches, layout.pp - stage)
    else:  # the interleaved schedule warms up by chunks
        warm = (layout.pp - stage - 1) * 2 + (layout.vpp - 1) * layout.pp + 1
        in_flight = min(micro_batches * layout.vpp, warm) / layout.vpp
    return total * in_flight + working


def _compute_forward_bytes(config: MegatronConfig, plan: ModelPlan, tokens: float) -> float:
    """Compute the bytes of a forward pass without backward: the largest layer and its input."""
    moe = bool(plan.model_config.moe_layers)
    layers = plan.model_config.moe_layers or range(plan.model_config.num_layers)
    largest = max(
        (compute_layer_bytes(config, plan.model_config, tokens, layer) for layer in layers), key=lambda layer: layer.saved
    )
    return largest.saved * (EXPERT_IMBALANCE if moe and plan.layout.num_expert_groups > 1 else 1.0) + largest.input


def compute_head_bytes(config: MegatronConfig, model_config: ModelConfig, tokens: float, *, trains: bool) -> float:
    """Compute the bytes of the head: logits of a chunk of tokens and of the vocabulary, and in training the head's gradient."""
    itemsize = 2 if config.bf16 else 4
    rows = model_config.padded_vocab_size / config.tensor_model_parallel_size
    tokens /= config.context_parallel_size
    hidden = tokens * model_config.hidden_size * itemsize * (2 if trains else 1)
    if model_config.head == "reward":
        # scores are in float32, of this rank's part of the hidden dimension
        return hidden + (4 * hidden / itemsize / config.tensor_model_parallel_size if config.bf16 else 0.0)
    chunk_tokens, chunk_rows = min(config.loss_chunk_size, tokens), min(config.loss_vocab_chunk_size or rows, rows)
    chunk = chunk_tokens * chunk_rows
    # forward: product in the model's format, float32 logits, shifted ones, their exponentials; backward: two more of them
    logits = chunk * (itemsize + 4 * (5 if trains else 3))
    if config.fp32_lm_head and config.bf16:
        # no product in the model's format, but rows of the head in float32
        logits += min(HEAD_ROWS, chunk_rows) * model_config.hidden_size * 4 - chunk * itemsize
    if trains and chunk_rows < rows:  # the hidden states' gradient, which chunks of the vocabulary add up
        hidden += 4 * chunk_tokens * model_config.hidden_size
    gradient = 0.0
    if trains and not config.lora_target_modules:
        # a product of some rows, or the sum of all in float32 and its rounded form
        product, summed = min(HEAD_ROWS, chunk_rows) * itemsize, rows * (4 + itemsize)
        gradient = model_config.hidden_size * (product if config.adds_head_to_main_grad else summed)
    return hidden + logits + gradient
