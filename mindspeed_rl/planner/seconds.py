"""Seconds of an iteration by phase: a roofline of the chip times named efficiencies (efficiency.py).

- A step of the engine takes the bytes of the weights it touches and of the keys and values of all active responses, or its
  operations where they take longer, and the host's work for each layer. Experts are touched as tokens choose them.
- A pass of the trainer takes its operations (`models/flops.py`), the pipeline's bubble, and the host's work for each
  micro-batch. Recomputed layers are computed once more. Its collectives (traffic.py) do not overlap with it.
- A push moves a rank's share of the engine's weights, offloading moves what the run file names, both ways.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache

from mindspeed_rl.config.objective import resolve_objective
from mindspeed_rl.config.run import RunConfig
from mindspeed_rl.config.sizes import own_rollout_devices, rollout_is_apart
from mindspeed_rl.config.turns import response_limit
from mindspeed_rl.models.architecture import Architecture
from mindspeed_rl.models.flops import ModelFlops
from mindspeed_rl.models.network import Network
from mindspeed_rl.planner.chips import Chip
from mindspeed_rl.planner.efficiency import EFFICIENCIES, Efficiency
from mindspeed_rl.planner.engine import engine_of
from mindspeed_rl.planner.lengths import Lengths
from mindspeed_rl.planner.run_shape import RunShape, read_shape
from mindspeed_rl.planner.traffic import pass_seconds, step_seconds

#: mean lengths where nobody says them: of the limit of responses, of that of prompts
MEAN_RESPONSE, MEAN_PROMPT = 0.5, 0.25
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
    mean_response: float | None = None,
    mean_prompt: float | None = None,
    efficiency: Efficiency | None = None,
    shape: RunShape | None = None,
) -> TimePlan:
    """Return the seconds of an iteration by phase.

    Args:
        mean_response, mean_prompt: tokens; half of max_tokens and a quarter of max_prompt_length where they are None.

    Raises:
        ValueError: as `plan_memory`, or a mean is above its limit.
    """
    run = shape or read_shape(cfg, chip, num_nodes)
    efficiency = efficiency or EFFICIENCIES[chip.name]
    if run.generate is None:
        return _supervised(run, efficiency)
    assert cfg.rl_config is not None
    limit = float(run.longest - min(cfg.rl_config.max_prompt_length, run.longest - 1))
    limit = min(float(response_limit(cfg)), max(limit, 1.0))
    mean = mean_response or MEAN_RESPONSE * limit
    prompt = mean_prompt or max(1.0, MEAN_PROMPT * cfg.rl_config.max_prompt_length)
    if not 0 < mean <= limit:
        raise ValueError(f"--mean-response: {mean:g} must be above 0 and at most max_tokens, {limit:g}.")
    lengths = Lengths(mean, limit)
    phases, parts = _phases(run, efficiency, lengths, prompt)
    tokens = run.sizes.rollout_samples * (mean + prompt)
    notes = (
        () if mean_response else (f"responses of {mean:.0f} tokens in the mean, half of the limit; --mean-response says it",)
    )
    own = own_rollout_devices(cfg)
    devices = run.sizes.actor.num_npus + (own or 0)
    overlaps = rollout_is_apart(cfg) and cfg.rl_config.trainer_mode != "sync"
    return TimePlan(chip.name, phases, parts, tokens, devices, efficiency, lengths, notes, overlaps=overlaps)


def _phases(
    run: RunShape, efficiency: Efficiency, lengths: Lengths, prompt: float
) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    cfg, sizes = run.cfg, run.sizes
    assert cfg.rl_config is not None
    parts = {"rollout": _rollout(run, efficiency, lengths, prompt)}
    phases = {"rollout": sum(parts["rollout"].values())}
    objective = resolve_objective(cfg)
    trainer = _Trainer(run, efficiency, lengths, prompt)
    if "reward model" in run.others:
        parts["reward_model"] = trainer.seconds(sizes.rollout_samples, 1.0)
    if objective.needs_reference:
        parts["reference_model"] = trainer.seconds(sizes.rollout_samples, 1.0)
    if objective.needs_old_log_probs(on_policy=sizes.steps_per_rollout * sizes.epochs == 1):
        parts["old_log_p"] = trainer.seconds(sizes.train_samples, 1.0)
    if "critic" in run.others:
        parts["critic_model"] = trainer.seconds(sizes.train_samples, 1.0)
        parts["update_critic"] = trainer.seconds(sizes.train_samples * sizes.epochs, trainer.update_passes)
    parts["update"] = trainer.seconds(sizes.train_samples * sizes.epochs, trainer.update_passes) | trainer.steps()
    moved = _moved(run)
    if moved:
        parts["offload"] = {"both ways": moved / (run.chip.host * efficiency.host)}
    engine = engine_of(run, [])
    assert engine is not None
    parts["resharding_to_infer"] = {"exchange": engine.weights / (run.chip.link * efficiency.push)}
    for name, found in parts.items():
        phases[name] = sum(found.values())
    return phases, parts


class _Trainer:
    """Passes of a model of the actor's size over sequences of these lengths."""

    def __init__(self, run: RunShape, efficiency: Efficiency, lengths: Lengths, prompt: float) -> None:
        self._run, self._efficiency = run, efficiency
        mean = lengths.mean + prompt
        square = lengths.mean_square + 2 * lengths.mean * prompt + prompt**2
        flops = _flops(run.actor.plan.architecture, run.actor.plan.network)
        self._operations = flops.per_token * mean + flops.per_squared_token * square
        self._mean = mean

    @property
    def update_passes(self) -> float:
        """An update in forward passes: forward, backward for two, and what is computed again."""
        config, layout = self._run.actor.config, self._run.actor.plan.layout
        if config.recompute_granularity != "full":
            return 3.0
        if config.recompute_method != "block":
            return 4.0
        share = (config.recompute_num_layers or 1) * layout.vpp / max(1, layout.num_slots // layout.pp)
        return 3.0 + min(1.0, share)

    def seconds(self, samples: float, passes: float) -> dict[str, float]:
        """Seconds by part."""
        run, layout = self._run, self._run.actor.plan.layout
        computing = samples * self._operations * passes / (run.sizes.actor.num_npus * run.chip.flops * self._efficiency.train)
        replicas = float(run.sizes.actor.dp_size)
        rows = max(1.0, run.tokens("update") / run.longest)
        if run.cfg.rl_config is not None and run.cfg.rl_config.use_dynamic_bsz:
            rows = max(1.0, run.tokens("update") / self._mean)
        batches = max(1.0, samples / replicas / rows)
        layers = layout.num_slots / layout.pp
        host = batches * layers * passes * self._efficiency.pass_s
        share = self._run.chip.link * self._efficiency.collective
        slow = self._run.chip.network * self._efficiency.collective
        talk = pass_seconds(run, samples / replicas * self._mean, link=share, network=slow) * passes
        bubble = (layout.pp - 1) / (batches * layout.vpp) * (computing + host + talk)
        return {"computing": computing, "collectives": talk, "host": host, "bubble": bubble}

    def steps(self) -> dict[str, float]:
        """Seconds of what comes once for each optimizer step: gradients are reduced, a swapped state comes and goes."""
        run = self._run
        count = float(run.sizes.steps_per_rollout * run.sizes.epochs) if run.generate is not None else 1.0
        share = run.chip.link * self._efficiency.collective
        slow = run.chip.network * self._efficiency.collective
        found = {"gradients": count * step_seconds(run, link=share, network=slow)}
        if run.actor.config.swap_optimizer:
            state = max(run.actor.state(held) for held in run.actor.elements)
            found["swapping"] = count * 2 * state / (run.chip.host * self._efficiency.host)
        return found


def _rollout(run: RunShape, efficiency: Efficiency, lengths: Lengths, prompt: float) -> dict[str, float]:
    """Prefill, decoding while the engine is full, and the long tail behind it; the replicas work side by side."""
    generate, engine = run.generate, engine_of(run, [])
    assert generate is not None and engine is not None
    replicas = float(run.sizes.rollout.dp_size)
    count = run.sizes.rollout_samples / replicas
    room = engine.cache.room / max(1.0, engine.cache.bytes_per_token * (lengths.mean + prompt))
    slots = max(1.0, min(float(generate.max_num_seqs), room, count))
    tensor, network = run.sizes.rollout.tensor, run.actor.plan.network
    flops = _flops(run.actor.plan.architecture, network)
    repeated = run.sizes.group_size if generate.enable_prefix_caching else 1
    prefill = count / repeated * prompt * flops.per_token / (tensor * run.chip.flops * efficiency.prefill)

    touched = _touched(run, engine.weights)
    host = network.num_layers * (efficiency.layer_s if generate.enforce_eager else efficiency.graph_layer_s)

    def step(active: float, context: float) -> float:
        moved = touched(active) + active * context * engine.cache.bytes_per_token
        computed = active * flops.per_token / tensor / run.chip.flops
        return max(moved / (run.chip.bandwidth * efficiency.bandwidth), computed / efficiency.prefill) + host

    # more responses than the engine holds: they follow one another until the last ones are in
    full = max(0.0, count - slots) * lengths.mean / slots * step(slots, prompt + lengths.mean / 2)
    longest = lengths.longest_of(run.sizes.rollout_samples)
    width = longest / _POINTS
    times = []
    for point in range(_POINTS):
        at = (point + 0.5) * width
        times.append((max(slots * lengths.above(at), 1.0), width * step(max(slots * lengths.above(at), 1.0), prompt + at)))
    busy = sum(seconds for active, seconds in times if active >= slots / 8)
    tail = sum(seconds for active, seconds in times if active < slots / 8)
    return {"prefill": prefill, "decoding": full + busy, "long tail": tail}


def _touched(run: RunShape, weights: int) -> Callable[[float], float]:
    """(responses under way in a replica) -> bytes of weights that a step reads on a rank."""
    network = run.actor.plan.network
    if not network.moe_layers:
        return lambda active: float(weights)
    generate = run.generate
    assert generate is not None and network.num_moe_experts is not None and network.moe_ffn_hidden_size is not None
    itemsize = 2 if generate.dtype == "bfloat16" else 4
    sharing = generate.infer_expert_parallel_size if generate.enable_expert_parallel else 1
    ranks = generate.infer_tensor_parallel_size * sharing
    experts = 3 * network.hidden_size * network.moe_ffn_hidden_size * network.num_moe_experts * len(network.moe_layers)
    share = experts * itemsize / ranks
    missed = 1.0 - network.moe_router_topk / network.num_moe_experts
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
    lengths = Lengths(length, length)
    trainer = _Trainer(run, efficiency, lengths, 0.0)
    samples = run.sizes.global_batch_size * run.tokens("update") / length / run.sizes.micro_batch_size
    passes = trainer.update_passes + (1.0 if "reference" in run.others else 0.0)
    parts = {"update": trainer.seconds(samples, passes) | trainer.steps()}
    note = f"sequences of {length:.0f} tokens, the longest"
    phases = {"update": sum(parts["update"].values())}
    return TimePlan(run.chip.name, phases, parts, samples * length, run.sizes.actor.num_npus, efficiency, lengths, (note,))


@lru_cache(maxsize=64)
def _flops(architecture: Architecture, network: Network) -> ModelFlops:
    return ModelFlops.of(architecture, network)


def calibrated(plan: TimePlan, factors: dict[str, float]) -> TimePlan:
    """The same with each phase as many times longer as it was in a run that was measured."""
    rest = factors.get("all", 1.0)
    phases = {name: seconds * factors.get(name, rest) for name, seconds in plan.phases.items()}
    parts = {
        name: {part: seconds * factors.get(name, rest) for part, seconds in found.items()} for name, found in plan.parts.items()
    }
    return replace(plan, phases=phases, parts=parts, factors=factors)
