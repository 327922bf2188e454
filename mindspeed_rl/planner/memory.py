"""Bytes of a die by owner and phase.

The phases are those of `workers/actor_worker.py`, with what each finds on the device: training state that the run file offloads
leaves before a push of weights and comes back model by model; reference and critic leave after their pass or update.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace

from mindspeed_rl.config.keys.generate import GenerateConfig
from mindspeed_rl.config.run import RunConfig
from mindspeed_rl.planner.activations import forward_bytes, head_bytes, stage_activations
from mindspeed_rl.planner.chips import Chip
from mindspeed_rl.planner.communicators import communicator_bytes
from mindspeed_rl.planner.engine import Engine, KvCache, engine_of
from mindspeed_rl.planner.run_shape import Model, RunShape, read_shape
from mindspeed_rl.planner.shapes import Elements

MIB = 1 << 20

#: what is modelled may be off by this share either way; the rest is counted
MODEL_ERROR = 0.25
#: the allocator's blocks are larger than what is asked of them, by this share of what comes and goes
FRAGMENTATION = 0.05
#: owners whose bytes are counted, not modelled
EXACT = (
    *("weights", "gradients", "optimizer", "reference", "reward model", "critic"),
    *("rollout weights", "packed weights", "KV cache"),
)
#: owners that no allocator of torch's counts
FIXED = ("driver", "runtime", "HCCL buffers")


#: what is said of a plan: it fits over the whole range of the peak; it fits as it is computed, and perhaps not; it does not as
#: it is computed, and perhaps does; it does not over the whole range
VERDICTS = ("fits", "tight", "over", "does not fit")


@dataclass(frozen=True)
class Phase:
    """What is on a die in one phase.

    Attributes:
        owners: bytes by owner, those that have any.
    """

    name: str
    owners: dict[str, int]

    @property
    def total(self) -> int:
        """Bytes of all owners."""
        return sum(self.owners.values())

    @property
    def range(self) -> tuple[int, int]:
        """Fewest and most bytes, as far as the model may be off."""
        modelled = sum(count for owner, count in self.owners.items() if owner not in EXACT)
        return int(self.total - MODEL_ERROR * modelled), int(self.total + MODEL_ERROR * modelled)


@dataclass(frozen=True)
class Dies:
    """Dies that hold equally much: those of a pipeline stage.

    Attributes:
        ranks: ranges of their numbers, as text.
        count: how many they are.
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
    """Bytes of every kind of die of a run.

    Attributes:
        capacity: bytes of a die.
        problems: what does not work out whatever fits.
    """

    chip: str
    capacity: int
    dies: tuple[Dies, ...]
    cache: KvCache | None = None
    problems: tuple[str, ...] = ()

    @property
    def fullest(self) -> Dies:
        """The dies of the peak."""
        return max(self.dies, key=lambda dies: dies.peak.total)

    @property
    def verdict(self) -> str:
        """One of VERDICTS, by where the capacity lies in the range of the peak."""
        phases = [phase for dies in self.dies for phase in dies.phases]
        low, high = max(phase.range[0] for phase in phases), max(phase.range[1] for phase in phases)
        if self.problems or low > self.capacity:
            return "does not fit"
        if high <= self.capacity:
            return "fits"
        return "tight" if self.fullest.peak.total <= self.capacity else "over"

    def only(self, *names: str) -> MemoryPlan:
        """The same for these phases alone."""
        dies = (replace(one, phases=tuple(phase for phase in one.phases if phase.name in names)) for one in self.dies)
        return replace(self, dies=tuple(one for one in dies if one.phases))

    def without(self, names: Iterable[str]) -> MemoryPlan:
        """The same without these phases and what only the engine lacks."""
        left = {phase.name for one in self.dies for phase in one.phases} - set(names)
        return replace(self.only(*left), problems=())


def plan_memory(cfg: RunConfig, chip: Chip, num_nodes: int = 1) -> MemoryPlan:
    """Return the bytes of every die of a run.

    Raises:
        ValueError: sizes are missing, or a model's shape is not known or does not fit its layout; the role is named.
    """
    run = read_shape(cfg, chip, num_nodes)
    engine = engine_of(run)
    dies = []
    stages = run.actor.plan.layout.pp
    for stage in range(stages):
        phases = _phases(run, engine, stage)
        dies.append(Dies(_stage_name(stage, stages), *_ranks(run, stage, stages), tuple(phases)))
    dies += _own_dies(run, engine)
    if engine is None:
        return MemoryPlan(chip.name, chip.memory, tuple(dies))
    return MemoryPlan(chip.name, chip.memory, tuple(dies), engine.cache, (engine.problem,) if engine.problem else ())


# ---------------------------------------------------------------------- phases


def _phases(run: RunShape, engine: Engine | None, stage: int) -> list[Phase]:
    """In the order of an iteration; each with what is on a die of this pipeline stage."""
    stages = run.actor.plan.layout.pp
    actor, held = run.actor, run.actor.elements[stage]
    fixed = _fixed(run)
    weights = {"weights": actor.weights(held)}
    state = {"gradients": actor.gradients(held), "optimizer": actor.optimizer(held)}
    extra = {name: _share(model, model.stage(stage, stages)) for name, model in run.others.items()}
    activations = {"activations": _update_activations(run, actor, stage), "logits": _head(run, actor, stage, "update", True)}
    everything = {name: share.total for name, share in extra.items()}
    # built beside one another
    fresh = {name: _share(model, model.stage(stage, stages), stepped=False).total for name, model in run.others.items()}
    start = _phase("start", fixed, weights, {**state, "optimizer": actor.optimizer(held, stepped=False)}, fresh)
    if engine is None:
        return [start, _phase("update", fixed, weights, state, everything, activations)]
    generate = run.generate
    assert generate is not None and run.cfg.rl_config is not None
    stays = _stays(generate, weights, state, extra)
    apart = run.cfg.placement.disaggregated
    serving = {} if apart else _serving(engine)
    generating = {} if apart else _generating(engine)
    beside = {} if run.chip.sleeps or generate.offload_train_param else generating
    phases = [start, _phase("generate", fixed, stays, generating)]
    objective = run.cfg.objective
    assert objective is not None
    for name in ("reward model", "reference", "critic"):
        if name in extra:
            use = "actor" if name == "critic" else "ref"
            passing = _pass(run, run.others[name], stage, use)
            phases.append(_phase(f"{name} pass", fixed, stays, {name: everything[name]}, beside, passing))
    if run.cfg.rl_config.share_backbone and objective.needs_reference:  # the actor without its adapters
        phases.append(_phase("reference pass", fixed, stays, weights, beside, _pass(run, actor, stage, "ref")))
    if objective.needs_old_log_probs(on_policy=run.sizes.on_policy):
        passing = _pass(run, actor, stage, "actor")
        phases.append(_phase("log-probs", fixed, stays, weights, beside, passing))
    if "critic" in extra:
        critic = run.others["critic"]
        first = {"activations": _update_activations(run, critic, stage * len(critic.elements) // stages)}
        phases.append(_phase("update critic", fixed, stays, weights, {"critic": everything["critic"]}, beside, first))
    phases.append(_phase("update", fixed, stays, weights, state, beside, activations))
    push = {"push buckets": _push_bytes(run), **({} if run.chip.sleeps else serving)}
    if not apart:
        push |= {"rollout weights": engine.weights, "engine adapters": engine.adapters}
    phases.append(_phase("update_weights", fixed, stays, weights, push))
    if actor.config.async_save:  # the engine stays where it is, and all models come at once
        phases.append(_phase("save", fixed, weights, state, everything, serving))
    return phases


def _fixed(run: RunShape) -> dict[str, int]:
    """What no phase changes."""
    return dict(zip(FIXED, (run.chip.driver, run.chip.runtime, communicator_bytes(run)), strict=True))


def _serving(engine: Engine) -> dict[str, int]:
    return {
        "rollout weights": engine.weights,
        "engine adapters": engine.adapters,
        "KV cache": engine.cache.room,
        "engine step": engine.step,
    }


def _generating(engine: Engine) -> dict[str, int]:
    """From the first responses to the next push of weights, or to a release of the engine's memory."""
    return {**_serving(engine), "packed weights": engine.packed}


def _own_dies(run: RunShape, engine: Engine | None) -> list[Dies]:
    """Dies of rollout servers that the run starts itself, and of roles with devices of their own."""
    found: list[Dies] = []
    fixed = _fixed(run)
    count = run.cfg.placement.dedicated.get("rollout")
    if engine is not None and count is not None:
        generate = _phase("generate", fixed, _generating(engine))
        push = _phase("update_weights", fixed, _serving(engine), {"push buckets": _push_bytes(run)})
        found.append(Dies("rollout", f"{count} of their own", count, (generate, push)))
    for name, model in run.apart.items():
        lie = model.plan.layout
        for stage, held in enumerate(model.elements):
            share, logits = asdict(_share(model, held)), {"logits": _head(run, model, stage, "ref", False)}
            forward = {"activations": int(forward_bytes(model.config, model.plan, run.tokens("ref")))}
            phases = [_phase(f"{name} pass", fixed, share, forward, logits)]
            if model.trains:
                update = {"activations": _update_activations(run, model, stage)}
                phases.append(_phase(f"update {name}", fixed, share, update, logits))
            group = name if lie.pp == 1 else f"{name} stage {stage}"
            dies = model.dp * lie.tp
            found.append(Dies(group, f"{dies} of its own", dies, tuple(phases)))
    return found


def _phase(name: str, *parts: dict[str, int]) -> Phase:
    """A phase in which all of these are on the die; what two of them name is there once."""
    owners: dict[str, int] = {}
    for part in parts:
        for owner, count in part.items():
            owners[owner] = max(owners.get(owner, 0), count)
    passing = sum(owners.get(owner, 0) for owner in ("activations", "logits", "engine step", "push buckets"))
    owners["fragmentation"] = int(FRAGMENTATION * passing)
    return Phase(name, {owner: count for owner, count in owners.items() if count})


@dataclass(frozen=True)
class _Share:
    """Bytes of a rank of a model beside the actor."""

    weights: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer


def _share(model: Model, held: Elements, *, stepped: bool = True) -> _Share:
    return _Share(model.weights(held), model.gradients(held), model.optimizer(held, stepped=stepped))


def _stays(
    generate: GenerateConfig, weights: dict[str, int], state: dict[str, int], extra: dict[str, _Share]
) -> dict[str, int]:
    """What of the training side is on the die while the engine generates."""
    on = {
        "weights": not generate.offload_train_param,
        "gradients": not generate.offload_train_grad,
        "optimizer": not generate.offload_train_optimizer,
    }
    stays = {owner: count for owner, count in {**weights, **state}.items() if on[owner]}
    for name, share in extra.items():
        stays[name] = sum(getattr(share, owner) for owner in on if on[owner])
    return stays


def _update_activations(run: RunShape, model: Model, stage: int) -> int:
    return int(stage_activations(model.config, model.plan, run.tokens("update"), run.micro_batches, stage))


def _head(run: RunShape, model: Model, stage: int, use: str, trains: bool) -> int:
    if stage != model.plan.layout.last_chunk[0]:
        return 0
    return int(head_bytes(model.config, model.plan.model_config, run.tokens(use), trains=trains))


def _pass(run: RunShape, model: Model, stage: int, use: str) -> dict[str, int]:
    own_stage = stage * len(model.elements) // run.actor.plan.layout.pp
    return {
        "activations": int(forward_bytes(model.config, model.plan, run.tokens(use))),
        "logits": _head(run, model, own_stage, use, False),
    }


def _push_bytes(run: RunShape) -> int:
    """One bucket on the way out and one on the way in, none larger than what a rank holds."""
    assert run.generate is not None
    share = max(run.actor.weights(held) for held in run.actor.elements)
    return 2 * min(run.generate.update_weights_bucket_mb * MIB, share)


# ---------------------------------------------------------------------- dies


def _stage_name(stage: int, stages: int) -> str:
    return "all dies" if stages == 1 else f"stage {stage}"


def _ranks(run: RunShape, stage: int, stages: int) -> tuple[str, int]:
    """Numbers of the dies of a stage: a block of them, or with use_tp_pp_dp_mapping one block a replica."""
    world = run.sizes.actor.num_npus
    count = world // stages
    if not run.actor.config.use_tp_pp_dp_mapping:
        return _block(stage * count, count), count
    inner = run.sizes.actor.tensor * run.sizes.actor.context
    starts = range(stage * inner, world, inner * stages)
    shown = ", ".join(_block(start, inner) for start in list(starts)[:3])
    return shown + (", ..." if len(starts) > 3 else ""), count


def _block(start: int, count: int) -> str:
    return str(start) if count == 1 else f"{start}-{start + count - 1}"
