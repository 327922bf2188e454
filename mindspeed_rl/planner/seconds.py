"""Seconds of an iteration by phase: a roofline of the chip times named efficiencies (efficiency.py).

- A step of the engine takes the bytes of the weights it touches and of the keys and values of all active responses, or its
  operations where they take longer, and the host's work for each layer. Experts are touched as tokens choose them.
- A pass of the trainer takes its operations (`models/costs.py`), the pipeline's bubble, and the host's work for each
  micro-batch. Recomputed layers are computed once more. Its collectives (traffic.py) do not overlap with it.
- A push moves a rank's share of the engine's weights (or the adapters), offloading moves what the run file names, both ways.
- A model with dies of its own (reference, critic, reward model) makes its passes there, in its turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache

from mindspeed_rl.config.run import RunConfig
from mindspeed_rl.models.architecture import Architecture
from mindspeed_rl.models.costs import ModelFlops
from mindspeed_rl.models.model_config import ModelConfig
from mindspeed_rl.planner.chips import Chip
from mindspeed_rl.planner.efficiency import EFFICIENCIES, Efficiency
from mindspeed_rl.planner.engine import engine_of
from mindspeed_rl.planner.lengths import Lengths
from mindspeed_rl.planner.run_shape import Model, RunShape, read_shape
from mindspeed_rl.planner.samples import UNKNOWN, SampleMeans, Samples, expected_samples
from mindspeed_rl.planner.shapes import trained_adapters
from mindspeed_rl.planner.traffic import Links, pass_seconds, step_seconds

_POINTS = 48


@dataclass(frozen=True)
class TimePlan:
    """Seconds of a synchronous iteration.

    Attributes:
        phases: by name, in order.
        parts: what a phase is made of, by its name: prefill, decoding and its long tail, bubbles.
        tokens: prompt and response tokens of an iteration.
        overlaps: generation goes on while others train, on dies of its own.
        factors: measured seconds over those of the model, by phase, where a run calibrates it.
    """

    chip: str
    phases: dict[str, float]
    parts: dict[str, dict[str, float]]
    tokens: float
    devices: int
    efficiency: Efficiency
    lengths: Lengths
    notes: tuple[str, ...] = ()
    factors: dict[str, float] = field(default_factory=dict)
    overlaps: bool = False

    @property
    def total(self) -> float:
        """Seconds of all phases, one after the other; generation beside all others but the push where they overlap."""
        whole = sum(self.phases.values())
        if not self.overlaps:
            return whole
        push, rollout = self.phases["resharding_to_infer"], self.phases["rollout"]
        return max(rollout, whole - rollout - push) + push

    def bounds(self, seconds: float) -> tuple[float, float]:
        """Where these seconds are, two times of three."""
        return seconds / self.efficiency.spread, seconds * self.efficiency.spread


@dataclass(frozen=True)
class ModeTime:
    """An iteration in one trainer_mode.

    Attributes:
        share: of the devices that generate; 1.0 where all do both in turn.
        trainer_idle, engine_idle: share of the time in which they wait for the other side.
    """

    seconds: float
    share: float
    trainer_idle: float
    engine_idle: float


def plan_time(
    cfg: RunConfig,
    chip: Chip,
    num_nodes: int = 1,
    *,
    samples: SampleMeans = UNKNOWN,
    efficiency: Efficiency | None = None,
    shape: RunShape | None = None,
) -> TimePlan:
    """Return the seconds of an iteration by phase.

    Args:
        samples: what is known of the samples; the run file's limits say the rest.

    Raises:
        ValueError: as `plan_memory`, or a mean is above its limit.
    """
    run = shape or read_shape(cfg, chip, num_nodes)
    efficiency = efficiency or EFFICIENCIES[chip.name]
    if run.generate is None:
        return _supervised(run, efficiency)
    assert cfg.rl_config is not None
    drawn = expected_samples(cfg, samples)
    phases, parts = _phases(run, efficiency, drawn)
    return TimePlan(
        chip.name,
        phases,
        parts,
        tokens=run.sizes.rollout_samples * (drawn.lengths.mean + drawn.prompt),
        devices=cfg.placement.num_devices,
        efficiency=efficiency,
        lengths=drawn.lengths,
        notes=(*drawn.notes, *not_planned(cfg)),
        overlaps=cfg.placement.disaggregated and cfg.rl_config.trainer_mode != "sync",
    )


def not_planned(cfg: RunConfig) -> Iterator[str]:
    """What this run does that the seconds leave out."""
    rl, generate = cfg.rl_config, cfg.generate_config
    assert rl is not None and generate is not None
    if rl.fault_tolerance.enabled:
        yield "nothing breaks; a restart by fault_tolerance costs what was done since the last checkpoint"
    if not rl.blocking:
        yield "phases follow one another, though blocking: false lets some begin while rows come"
    if rl.partial_rollout_max_split > 1:
        yield "every response ends in its rollout, though partial_rollout_max_split lets long ones go on in the next"
    if generate.update_weight_mode == "delta":
        yield "a push carries all weights, though update_weight_mode: delta leaves out those that did not change"
    if rl.filter_groups_enable or rl.dynamic_sample:
        yield "no prompt is drawn again for those that are filtered out"


def _phases(run: RunShape, efficiency: Efficiency, drawn: Samples) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    cfg, sizes = run.cfg, run.sizes
    parts = {"rollout": _rollout(run, efficiency, drawn)}
    objective = cfg.objective
    assert objective is not None
    actor = _Passes(run, run.actor, efficiency, drawn)
    trained = sizes.train_samples * sizes.epochs

    def of(name: str) -> _Passes:
        model = run.role(name)
        return actor if model is None else _Passes(run, model, efficiency, drawn)

    if run.role("reward model") is not None:
        parts["reward_model"] = of("reward model").seconds(sizes.rollout_samples, 1.0)
    if objective.needs_reference:  # the actor itself where it shares its backbone
        parts["reference_model"] = of("reference").seconds(sizes.rollout_samples, 1.0)
    if objective.needs_old_log_probs(on_policy=sizes.on_policy):
        parts["old_log_p"] = actor.seconds(sizes.train_samples, 1.0)
    if run.role("critic") is not None:
        critic = of("critic")
        parts["critic_model"] = critic.seconds(sizes.train_samples, 1.0)
        parts["update_critic"] = critic.seconds(trained, critic.update_passes)
    parts["update"] = actor.seconds(trained, actor.update_passes) | actor.steps()
    if moved := _moved(run):
        parts["offload"] = {"both ways": moved / (run.chip.host * efficiency.host)}
    parts["resharding_to_infer"] = {"exchange": _pushed(run) / (run.chip.link * efficiency.push)}
    return {name: sum(found.values()) for name, found in parts.items()}, parts


class _Passes:
    """Passes of a model over sequences of these lengths, on the dies where it lies."""

    def __init__(self, run: RunShape, model: Model, efficiency: Efficiency, drawn: Samples) -> None:
        self._run, self._model, self._efficiency = run, model, efficiency
        self._links = Links.of(run.chip, efficiency.collective)
        self._mean, square = drawn.tokens - _shared(run, model, drawn), drawn.squared_tokens
        flops = _flops(model.plan.architecture, model.plan.model_config)
        self._operations = flops.per_token * self._mean + flops.per_squared_token * square

    @property
    def update_passes(self) -> float:
        """An update in forward passes: forward, backward for two, and what is computed again."""
        config, layout = self._model.config, self._model.plan.layout
        if config.recompute_granularity != "full":
            return 3.0
        if config.recompute_method != "block":
            return 4.0
        # Megatron counts the layers of a block anew in every virtual chunk
        share = (config.recompute_num_layers or 1) * layout.vpp / max(1, layout.num_slots // layout.pp)
        return 3.0 + min(1.0, share)

    def seconds(self, samples: float, passes: float) -> dict[str, float]:
        """Seconds by part."""
        run, model, layout = self._run, self._model, self._model.plan.layout
        computing = samples * self._operations * passes / (model.devices * run.chip.flops * self._efficiency.train)
        packs = run.cfg.rl_config is not None and run.cfg.rl_config.use_dynamic_bsz
        # a budget is filled with sequences as they are; without one every row is counted as the longest
        rows = max(1.0, run.tokens("update") / (self._mean if packs else run.longest))
        batches = max(1.0, samples / model.replicas / rows)
        host = batches * layout.num_slots / layout.pp * passes * self._efficiency.pass_s
        talk = pass_seconds(model, samples / model.replicas * self._mean, self._links) * passes
        # the interleaved schedule's share of idle time, arXiv:2104.04473
        bubble = (layout.pp - 1) / (batches * layout.vpp) * (computing + host + talk)
        return {"computing": computing, "collectives": talk, "host": host, "bubble": bubble}

    def steps(self) -> dict[str, float]:
        """Seconds of what comes once for each optimizer step: gradients are reduced, a swapped state comes and goes."""
        run, model = self._run, self._model
        count = float(run.sizes.steps_per_rollout * run.sizes.epochs) if run.generate is not None else 1.0
        found = {"gradients": count * step_seconds(model, self._links)}
        if model.config.swap_optimizer:
            state = max(model.state(held) for held in model.elements)
            # it comes before each step and leaves after it
            found["swapping"] = count * 2 * state / (run.chip.host * self._efficiency.host)
        return found


def _shared(run: RunShape, model: Model, drawn: Samples) -> float:
    """Tokens of a sample, in the mean, that another one of its prompt computes for it."""
    rl = run.cfg.rl_config
    if rl is None or not (rl.use_prefix_grouper and rl.use_remove_padding) or model.config.context_parallel_size > 1:
        return 0.0
    # in the same micro-batch, whose rows are of one prompt as far as they go
    together = min(rl.n_samples_per_prompt, max(1.0, run.tokens("update") / drawn.tokens))
    return max(0.0, drawn.prompt - 1) * (1 - 1 / together)


def _pushed(run: RunShape) -> int:
    """Bytes that a push brings to a rank of the rollout: its weights, or all adapters where they alone travel."""
    engine, actor = engine_of(run), run.actor
    assert engine is not None and run.generate is not None
    if run.generate.lora_push == "adapter":
        return trained_adapters(actor.plan, actor.config) * actor.itemsize
    return engine.weights


def _rollout(run: RunShape, efficiency: Efficiency, drawn: Samples) -> dict[str, float]:
    """Prefill, decoding while the engine is full, and the long tail behind it; the replicas work side by side.

    Tools: what comes back from them is counted as decoded. A sample that waits for one leaves its place to others, so that only
    the last ones are waited for.
    """
    generate, engine = run.generate, engine_of(run)
    assert generate is not None and engine is not None
    lengths, prompt = drawn.lengths, drawn.prompt
    replicas = float(run.sizes.rollout.dp_size)
    count = run.sizes.rollout_samples / replicas
    room = engine.cache.room / max(1.0, engine.cache.bytes_per_token * (lengths.mean + prompt))
    slots = max(1.0, min(float(generate.max_num_seqs), room, count))
    tensor, model_config = run.sizes.rollout.tensor, run.actor.plan.model_config
    flops = _flops(run.actor.plan.architecture, model_config)
    # the responses of a prompt are prefilled together: the first one's keys and values serve the others
    repeated = run.sizes.group_size if generate.enable_prefix_caching else 1
    # without a cache of prefixes every further turn computes all that came before it
    again = 0.0 if generate.enable_prefix_caching else (drawn.turns - 1) * (prompt + lengths.mean / 2)
    prefilled = count * (prompt / repeated + again)
    prefill = prefilled * flops.per_token / (tensor * run.chip.flops * efficiency.prefill)

    touched = _touched(run, engine.weights)
    host = model_config.num_layers * (efficiency.layer_s if generate.enforce_eager else efficiency.graph_layer_s)

    def step(active: float, context: float) -> float:
        moved = touched(active) + active * context * engine.cache.bytes_per_token
        computed = active * flops.per_token / tensor / run.chip.flops
        return max(moved / (run.chip.bandwidth * efficiency.bandwidth), computed / efficiency.prefill) + host

    # more responses than the engine holds: they follow one another until the last ones are in
    full = max(0.0, count - slots) * lengths.mean / slots * step(slots, prompt + lengths.mean / 2)
    busy = tail = 0.0
    width = lengths.longest_of(run.sizes.rollout_samples) / _POINTS
    for point in range(_POINTS):
        at = (point + 0.5) * width
        active = max(slots * lengths.above(at), 1.0)
        seconds = width * step(active, prompt + at)
        if active >= slots / 8:
            busy += seconds
        else:
            tail += seconds
    return {"prefill": prefill, "decoding": full + busy, "long tail": tail, "tools": drawn.tool_seconds}


def _touched(run: RunShape, weights: int) -> Callable[[float], float]:
    """(responses under way in a replica) -> bytes of weights that a step reads on a rank."""
    model_config = run.actor.plan.model_config
    if not model_config.moe_layers:
        return lambda active: float(weights)
    generate = run.generate
    assert generate is not None and model_config.num_moe_experts is not None and model_config.moe_ffn_hidden_size is not None
    itemsize = 2 if generate.dtype == "bfloat16" else 4
    sharing = generate.infer_expert_parallel_size if generate.enable_expert_parallel else 1
    ranks = generate.infer_tensor_parallel_size * sharing
    # three matrices an expert: gate, up and down
    experts = (
        3
        * model_config.hidden_size
        * model_config.moe_ffn_hidden_size
        * model_config.num_moe_experts
        * len(model_config.moe_layers)
    )
    share = experts * itemsize / ranks
    # each token is taken to choose its experts whatever others chose, and all alike
    missed = 1.0 - model_config.moe_router_topk / model_config.num_moe_experts
    return lambda active: weights - share + share * (1.0 - missed ** (active * sharing))


def _moved(run: RunShape) -> int:
    """Bytes a die of the fullest stage moves to the host and back in an iteration."""
    generate = run.generate
    assert generate is not None
    most = 0
    for stage, held in enumerate(run.actor.elements):
        moved = 0
        for model in (run.actor, *run.others.values()):
            own = held if model is run.actor else model.stage(stage, len(run.actor.elements))
            moved += model.weights(own) if generate.offload_train_param else 0
            moved += model.optimizer(own) if generate.offload_train_optimizer else 0
        most = max(most, moved)
    return 2 * most


def _supervised(run: RunShape, efficiency: Efficiency) -> TimePlan:
    length = float(run.longest)
    drawn = Samples(Lengths(length, length), prompt=0.0)
    actor = _Passes(run, run.actor, efficiency, drawn)
    samples = run.sizes.global_batch_size * run.tokens("update") / length / run.sizes.micro_batch_size
    # the reference makes one forward pass over the same samples
    passes = actor.update_passes + (1.0 if "reference" in run.others else 0.0)
    parts = {"update": actor.seconds(samples, passes) | actor.steps()}
    note = f"sequences of {length:.0f} tokens, the longest"
    phases = {"update": sum(parts["update"].values())}
    return TimePlan(
        run.chip.name, phases, parts, samples * length, run.sizes.actor.num_npus, efficiency, drawn.lengths, (note,)
    )


@lru_cache(maxsize=64)
def _flops(architecture: Architecture, model_config: ModelConfig) -> ModelFlops:
    return ModelFlops.count(architecture, model_config)


def calibrated(plan: TimePlan, factors: dict[str, float]) -> TimePlan:
    """The same with each phase as many times longer as it was in a run that was measured."""
    rest = factors.get("all", 1.0)
    phases = {name: seconds * factors.get(name, rest) for name, seconds in plan.phases.items()}
    parts = {
        name: {part: seconds * factors.get(name, rest) for part, seconds in found.items()} for name, found in plan.parts.items()
    }
    return replace(plan, phases=phases, parts=parts, factors=factors)
