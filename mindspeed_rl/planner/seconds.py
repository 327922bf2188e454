"""Seconds of an iteration by phase: a roofline of the device times named efficiencies (efficiency.py).

- A step of the engine takes the bytes of the weights it reads and of the keys and values of all active responses, or its
  operations where they take longer, the host's work for each layer and each response, and the latency of its all-reduces.
  Experts are read as tokens choose them.
- A pass of the trainer takes its operations (`models/costs.py`), the bytes of its logits, the pipeline's bubble, and the host's
  work for each micro-batch. Recomputed layers are computed once more. Its collectives (bytes over the link of the group) do not
  overlap.
- A weight sync moves a rank's part of the engine's weights (or the adapters), offloading moves the configured state both ways.
- A vision tower computes the images of each prompt once a micro-batch, on every tensor rank of the first stage and before the
  others start; a frozen one once for log-probs and update together. The engine computes them once a prompt.
- A judge that the run serves reads prompt and response and writes half of its longest reply, as an engine of its own does; all
  its weights are read and computed in each step, whatever its architecture, and its prompt template counts nothing.
- A model on dedicated devices (reference, critic, reward model) makes its passes there, one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache

from mindspeed_rl.config.quantized_formats import QUANTIZED_FORMATS, find_format
from mindspeed_rl.config.run import RunConfig
from mindspeed_rl.files import read_json
from mindspeed_rl.models.architecture import Architecture
from mindspeed_rl.models.costs import ModelFlops, TowerCosts, read_kv_bytes
from mindspeed_rl.models.model_config import ModelConfig
from mindspeed_rl.planner.devices import Device
from mindspeed_rl.planner.efficiency import EFFICIENCIES, UNSEEN, Efficiency
from mindspeed_rl.planner.engine import plan_engine
from mindspeed_rl.planner.memory import count_judge_bytes, find_judge_folder
from mindspeed_rl.planner.run_shape import Model, RunShape, read_shape
from mindspeed_rl.planner.samples import Lengths, SampleMeans, Samples, assume_row_length, assume_samples
from mindspeed_rl.planner.shapes import count_all_elements, count_trained_adapters, list_grouped_ops
from mindspeed_rl.planner.step_costs import count_kernels
from mindspeed_rl.run import Run
from mindspeed_rl.run.batch_sizes import rows_per_replica
from mindspeed_rl.run.phases import Phases

_POINTS = 48
#: layers with adapters that are several products in the engine
_ADAPTED_PRODUCTS = {"linear_qkv": 3, "linear_fc1": 2}
#: kernels of an adapter of the trainer: two products, its scale, a sum
_ADAPTER_KERNELS = 4
#: queries that torch's kernel of attention takes at a time on the CPU, and the tokens of a row from which it takes more
_ATTENTION_BLOCK, _LONG_ROW = 32, 768
#: bytes that the disk of a machine reads or writes in a second
DISK = 3e9


@dataclass(frozen=True)
class TimePlan:
    """Seconds of a synchronous iteration.

    Attributes:
        phases: by name, in order.
        parts: seconds of the parts of a phase, by its name: prefill, decoding and its long tail, bubbles.
        tokens: prompt and response tokens of an iteration.
        overlaps: generation continues while the actor trains, on dedicated devices.
        prompt: mean tokens of a prompt; 0 in supervised stages.
        factors: measured seconds divided by the model's, by phase, where a run calibrates it.
    """

    device: str
    phases: dict[str, float]
    parts: dict[str, dict[str, float]]
    tokens: float
    devices: int
    efficiency: Efficiency
    lengths: Lengths
    notes: tuple[str, ...] = ()
    factors: dict[str, float] = field(default_factory=dict)
    overlaps: bool = False
    prompt: float = 0.0

    @property
    def total(self) -> float:
        """Seconds of all phases in sequence; where they overlap, of the longer side and the weight sync."""
        total = sum(self.phases.values())
        if not self.overlaps:
            return total
        push, rollout = self.phases[Phases.PUSH_WEIGHTS.timer], self.phases[Phases.GENERATE.timer]
        return max(rollout, total - rollout - push) + push

    def bounds(self, seconds: float, phase: str = "all") -> tuple[float, float]:
        """Return the bounds that contain these seconds of a phase, or of iterations, in two of three cases."""
        spread = self.efficiency.find_error(phase).spread
        return seconds / spread, seconds * spread

    def format_bounds(self, seconds: float, phase: str = "all") -> str:
        """Return these bounds as text, in two digits."""
        low, high = self.bounds(seconds, phase)
        return f"{format_number(low)} to {format_number(high)}"


def format_number(value: float) -> str:
    """Return a number in two digits: a prediction is not more exact."""
    text = f"{float(f'{value:.2g}'):f}"
    return text.rstrip("0").rstrip(".") if value < 10 else f"{float(f'{value:.2g}'):.0f}"


@dataclass(frozen=True)
class ModeTime:
    """An iteration in one trainer_mode.

    Attributes:
        rollout_fraction: fraction of the devices that generate; 1.0 where all do both in turn.
        trainer_idle, engine_idle: fraction of the time in which they wait for the other side.
    """

    seconds: float
    rollout_fraction: float
    trainer_idle: float
    engine_idle: float


def plan_time(
    draft: Run,
    device: Device,
    *,
    samples: SampleMeans | None = None,
    efficiency: Efficiency | None = None,
    shape: RunShape | None = None,
) -> TimePlan:
    """Compute the seconds of an iteration by phase.

    Args:
        draft: the run, sound or not.
        device: kind of the devices.
        samples: known means; the others are assumed from the run file's limits.
        efficiency: the one of the device and of the actor's engine by default.
        shape: models of the run, where they are planned already.

    Raises:
        ValueError: as `plan_memory`, or a mean is above its limit.
    """
    run, cfg = shape or read_shape(draft, device), draft.config
    efficiency = efficiency or EFFICIENCIES[device.name][run.actor.config.engine]
    if run.generate is None:
        if device.sleeps:
            efficiency = replace(efficiency, errors=UNSEEN)
        return _plan_supervised(run, efficiency, samples or SampleMeans())
    assert cfg.rl_config is not None
    assumed = assume_samples(cfg, samples or SampleMeans())
    parts = _plan_parts(run, efficiency, assumed)
    return TimePlan(
        device.name,
        {name: sum(seconds.values()) for name, seconds in parts.items()},
        parts,
        tokens=run.sizes.rollout_samples * assumed.tokens,
        devices=draft.placement.num_devices,
        efficiency=efficiency,
        lengths=assumed.lengths,
        notes=(*assumed.notes, *_list_image_notes(run, assumed), *_list_judge_notes(run), *_list_omissions(cfg)),
        overlaps=draft.placement.disaggregated and cfg.rl_config.trainer_mode != "sync",
        prompt=assumed.prompt,
    )


def _list_image_notes(run: RunShape, samples: Samples) -> Iterator[str]:
    if run.actor.config.language_model_only:
        yield "no vision tower, neither in the trainer nor in the engine (language_model_only)"
    if tokens := run.count_image_tokens(run.actor, samples.prompt):
        if run.generate is not None and run.generate.limit_mm_video_per_prompt:
            yield f"images and videos of {tokens:.0f} tokens in a prompt, all of the mean prompt"
        else:
            yield f"images of {tokens:.0f} tokens in a prompt, all that the mean prompt, max_pixels and their limit leave"


def _list_judge_notes(run: RunShape) -> Iterator[str]:
    rl = run.cfg.rl_config
    if rl is None or rl.served_judge is None:
        return
    if count_judge_bytes(run):
        yield f"a judge's replies of {rl.judge_max_tokens / 2:g} tokens in the mean, half of judge_max_tokens"
    else:
        yield f"no seconds of the judge: {rl.served_judge} is not on this machine, or not all of it"


def _list_omissions(cfg: RunConfig) -> Iterator[str]:
    """Yield a sentence for each feature of this run that the seconds leave out."""
    rl, generate = cfg.rl_config, cfg.generate_config
    assert rl is not None and generate is not None
    if rl.fault_tolerance.enabled:
        yield "no process fails; a restart by fault_tolerance costs the work since the last checkpoint"
    if not rl.blocking:
        yield "phases follow one another, though blocking: false lets some start as rows arrive"
    if rl.partial_rollout_max_split > 1:
        yield "every response ends in its rollout, though partial_rollout_max_split continues long ones in the next"
    if rl.elastic_rollout:
        yield "only the rollout's devices generate, though elastic_rollout lets the actor's help while an iteration waits"
    if rl.elastic_training_devices:
        yield "the devices stay as the run file divides them, though elastic_training_devices lets some of the rollout's train"
    if rl.opponents.roles:
        yield "all turns are the present weights', whose tokens train; those of opponents (opponents.share) do not"
    if rl.spare_samples_per_prompt and not rl.keep_spare_samples:
        yield "no sample is aborted, though spare_samples_per_prompt generates more of them than train"
    if generate.update_weight_mode == "delta":
        yield "a weight sync moves all weights, though update_weight_mode: delta leaves out those that did not change"
    if rl.filter_groups_enable or rl.dynamic_sample:
        yield "no prompt is sampled again for those that are filtered out"


def _plan_parts(run: RunShape, efficiency: Efficiency, samples: Samples) -> dict[str, dict[str, float]]:
    """Return the seconds of the parts of every phase, by phase in order."""
    sizes, objective = run.sizes, run.objective
    assert objective is not None
    parts = {Phases.GENERATE.timer: _plan_rollout(run, efficiency, samples)}
    actor = _Passes(run, run.actor, efficiency, samples)
    trained = sizes.train_samples * sizes.epochs
    # the actor is its own reference where they share a backbone
    reward, ref, critic = (
        None if model is None else _Passes(run, model, efficiency, samples)
        for model in (run.find_model("reward model"), run.find_model("reference"), run.find_model("critic"))
    )
    if reward is not None:
        parts[Phases.MODEL_REWARDS.timer] = reward.seconds(sizes.rollout_samples, 1.0, "ref")
    if judge := _plan_judge(run, efficiency, samples):
        parts[Phases.JUDGE.timer] = judge
    if objective.needs_ref:
        parts[Phases.REF_LOG_PROBS.timer] = (ref or actor).seconds(sizes.rollout_samples, 1.0, "ref")
        parts[Phases.REF_LOG_PROBS.timer] |= (ref or actor).tower_seconds(sizes.rollout_samples)
        parts[Phases.REF_LOG_PROBS.timer] |= (ref or actor).stream_seconds(sizes.rollout_samples)
    for name in run.teachers:
        model = run.find_model(name)
        assert model is not None
        judged = _Passes(run, model, efficiency, samples).seconds(sizes.rollout_samples, 1.0, "ref")
        before = parts.get(Phases.TEACHER_LOG_PROBS.timer, {})
        parts[Phases.TEACHER_LOG_PROBS.timer] = {part: value + before.get(part, 0.0) for part, value in judged.items()}
    if share := objective.old_log_probs_share(on_policy=sizes.on_policy):
        computed = share * sizes.train_samples
        parts[Phases.ACTOR_LOG_PROBS.timer] = actor.seconds(computed, 1.0, "actor") | actor.tower_seconds(computed)
    if critic is not None:
        parts[Phases.VALUES.timer] = critic.seconds(sizes.train_samples, 1.0, "actor")
        parts[Phases.VALUES.timer] |= critic.tower_seconds(sizes.train_samples)
        parts[Phases.UPDATE_CRITIC.timer] = critic.seconds(trained, critic.update_passes)
        parts[Phases.UPDATE_CRITIC.timer] |= critic.tower_seconds(trained, trains=True)
    parts[Phases.UPDATE_ACTOR.timer] = actor.seconds(trained, actor.update_passes) | actor.step_seconds()
    parts[Phases.UPDATE_ACTOR.timer] |= actor.tower_seconds(trained, trains=True)
    if moved := _offloaded_bytes(run):
        parts["offload"] = {"both ways": moved / (run.device.host * efficiency.host)}
    exchange = _pushed_bytes(run) / (run.device.link * efficiency.push)
    sends_all = run.generate is not None and run.generate.lora_push != "adapter"
    tensors = _count_tensors(run.actor.plan.architecture, run.actor.plan.model_config) if sends_all else 0
    # adapters are merged by as many kernels as their forward has
    merged = run.actor.plan.layout.num_slots * (_compare_trained_kernels(run.actor) - 1.0) if sends_all else 0.0
    parts[Phases.PUSH_WEIGHTS.timer] = {
        "exchange": exchange,
        "tensors": tensors * efficiency.push_tensor_s,
        "merging": merged / run.actor.plan.layout.pp * efficiency.pass_s,
        "wake-up": efficiency.push_s,
    }
    return parts


class _Passes:
    """Passes of a model over sequences of these lengths, on its devices."""

    def __init__(self, run: RunShape, model: Model, efficiency: Efficiency, samples: Samples) -> None:
        self._run, self._model, self._efficiency = run, model, efficiency
        self._mean = samples.tokens - _shared_tokens(run, model, samples)
        flops = _count_flops(model.plan.architecture, model.plan.model_config)
        # a shared backbone computes the reference without them
        self._adapted = _count_adapter_operations(model) * self._mean
        lengths, prompt = samples.lengths, samples.prompt
        squared = lengths.mean_square + 2 * lengths.mean * prompt + prompt**2  # mean of a sequence's squared tokens
        self._operations = flops.per_token * self._mean + flops.per_squared_token * squared
        self._tower = TowerCosts.count(model.plan.architecture, model.plan.model_config)
        # a row of a supervised stage is taken for one half images
        self._images = run.count_image_tokens(model, samples.prompt or samples.tokens / 2)
        self._has_features = False

    @property
    def update_passes(self) -> float:
        """An update in forward passes: forward, backward for two (for one where only adapters train), recomputed layers."""
        config, layout = self._model.config, self._model.plan.layout
        once = 2.0 if config.lora_target_modules else 3.0
        if config.recompute_granularity != "full":
            return once
        if config.recompute_method != "block":
            return once + 1.0
        # Megatron counts the layers of a block anew in every virtual chunk
        recomputed = (config.recompute_num_layers or 1) * layout.vpp / max(1, layout.num_slots // layout.pp)
        return once + min(1.0, recomputed)

    def seconds(self, samples: float, passes: float, use: str = "update") -> dict[str, float]:
        """Return the seconds of so many passes over so many samples, by part; the largest micro-batch depends on the use."""
        run, model, layout = self._run, self._model, self._model.plan.layout
        operations = self._operations + (0.0 if use == "ref" else self._adapted)
        computing = samples * operations * passes / (model.devices * run.device.flops * self._efficiency.train)
        # backward computes the softmax again
        logits = samples * self._logit_seconds * min(passes, 2.0)
        packs = run.cfg.rl_config is not None and run.cfg.rl_config.use_dynamic_bsz
        # a budget is filled with sequences of their length; without one every row has the maximum length
        rows = max(1.0, run.tokens(use) / (self._mean if packs else run.max_len))
        batches = max(1.0, samples / model.replicas / rows)
        kernels = 1.0 if use == "ref" else _compare_trained_kernels(model)
        launching = batches / layout.pp * passes * self._launch_seconds(kernels)
        launching += samples / model.replicas / layout.pp * self._attention_seconds(passes)
        # what the host takes longer than the device is waiting
        host = max(0.0, launching - computing - logits) if run.device.overlaps else launching
        talk = self._collective_seconds(samples / model.replicas * self._mean) * passes
        if model.holding.is_sharded:
            # layers are gathered while the one before computes: in forward, and again in backward
            gathered = batches * min(passes, 2.0) * self._gather_seconds()
            talk = max(0.0, gathered - computing - logits - host)
        # the interleaved schedule's fraction of idle time, arXiv:2104.04473
        bubble = (layout.pp - 1) / (batches * layout.vpp) * (computing + host + talk)
        return {
            "computing": computing,
            "logits": logits,
            "collectives": talk,
            "host": host,
            "bubble": bubble,
            "start": self._efficiency.phase_s,
        }

    @property
    def _logit_seconds(self) -> float:
        """Seconds in which the logits of a sample move through the memory of the last stage; none of a model with scores."""
        model, efficiency, device = self._model, self._efficiency, self._run.device
        if model.plan.model_config.head == "reward":
            return 0.0
        ranks = model.plan.layout.tp * model.replicas * model.config.context_parallel_size
        moved = self._mean * model.plan.model_config.padded_vocab_size / ranks * efficiency.logit_bytes
        return moved / (device.bandwidth * efficiency.bandwidth)

    def tower_seconds(self, samples: float, *, trains: bool = False) -> dict[str, float]:
        """Return the seconds of a vision tower in a pass over so many samples, or in an update; calls are in their order."""
        config, run = self._model.config, self._run
        is_frozen = config.freeze_vit and config.freeze_aligner
        if self._tower is None or is_frozen and self._has_features:
            return {}
        self._has_features = is_frozen
        rl = run.cfg.rl_config
        together = 1.0
        if rl is not None and run.generate is not None:
            together = max(1.0, min(float(rl.n_samples_per_prompt), run.tokens("update") / self._mean))
        passes = 3.0 if trains and not config.freeze_vit else 1.0
        operations = samples / together * passes * self._tower.forward(self._images, self._images)
        return {"tower": operations / (self._model.replicas * run.device.flops * self._efficiency.train)}

    def stream_seconds(self, samples: float) -> dict[str, float]:
        """Return the seconds in which passes over so many samples wait for the layers of a model in host memory."""
        run, model = self._run, self._model
        if not model.is_streamed:
            return {}
        batches = max(1.0, samples / model.replicas / max(1.0, run.tokens("ref") / self._mean))
        moved = batches * max(model.weights(elements) for elements in model.elements)
        # a layer arrives while the one before computes
        waits = moved / (run.device.host * self._efficiency.host) - sum(self.seconds(samples, 1.0, "ref").values())
        return {"layers from host memory": max(0.0, waits)}

    def _bytes_per_second(self, ranks: int) -> float:
        """Return the speed of a collective over so many neighbouring ranks: inside a node, or between nodes."""
        device = self._run.device
        return self._efficiency.collective * (device.link if ranks <= device.devices_per_node else device.network)

    def _launch_seconds(self, kernels: float) -> float:
        """Return the seconds in which the host launches the kernels of all layers, for one micro-batch and pass.

        A layer with experts takes longer with each expert of a rank, whose tokens are counted, split and sorted. Each
        collective of a layer has a latency, however few bytes it has.

        Args:
            kernels: of a layer, as a multiple of a layer's without adapters.
        """
        model, efficiency = self._model, self._efficiency
        layout, model_config = model.plan.layout, model.plan.model_config
        experts = len(model_config.moe_layers) * efficiency.expert_pass_s
        if model_config.moe_layers:
            experts *= layout.num_experts / layout.num_expert_groups
        return layout.num_slots * kernels * efficiency.pass_s + experts + self._count_collectives() * efficiency.collective_s

    def _attention_seconds(self, passes: float) -> float:
        """Return the seconds of attention of a sequence that are no operations: torch's kernel on the CPU takes short blocks.

        The run chooses the kernel by a trial when it starts; a draft is planned with the other one, which has no such cost.
        """
        model, chosen = self._model, self._run.run.attention
        if chosen is None or chosen.kernel != "torch" or self._mean >= _LONG_ROW:
            return 0.0
        if model.config.lora_target_modules and passes >= 2.0:
            passes += 1.0  # backward has no gradient of frozen weights, but all of attention's
        heads = model.plan.model_config.num_attention_heads / model.plan.layout.tp
        blocks = math.ceil(self._mean / _ATTENTION_BLOCK)
        return model.plan.layout.num_slots * heads * blocks * passes * self._efficiency.attention_s

    @property
    def _context_ranks(self) -> int:
        """Number of ranks that a sequence of the mean length is split over, as dynamic context parallelism chooses it."""
        config = self._model.config
        ranks = config.context_parallel_size
        if not config.has_dynamic_context:
            return ranks
        part = self._run.tokens("update") / ranks
        sizes = (size for size in range(config.min_dynamic_context_parallel_size, ranks) if ranks % size == 0)
        return next((size for size in sizes if self._mean <= size * part), ranks)

    def _count_collectives(self) -> int:
        """Count the collectives of a forward pass: tensor ranks after attention and MLP, context and experts both ways."""
        model, moe = self._model, len(self._model.plan.model_config.moe_layers)
        layout = model.plan.layout
        tensor = 0 if layout.tp == 1 else 4 if model.config.sequence_parallel else 2
        context = 2 if self._context_ranks > 1 else 0
        experts = 2 * moe if layout.num_experts and layout.num_expert_groups > 1 else 0
        return layout.num_slots * (tensor + context) + experts

    def _gather_seconds(self) -> float:
        """Return the seconds in which a rank receives the shards of all weights of the other ranks."""
        model = self._model
        moved = max(model.computed_weights(elements) for elements in model.elements) * (model.dp - 1) / model.dp
        return moved / self._bytes_per_second(model.devices)

    def _collective_seconds(self, tokens: float) -> float:
        """Return the seconds of collectives in a forward pass over this many tokens of a replica; backward takes twice that.

        Tensor parallelism gathers and scatters the hidden states twice a layer, context parallelism exchanges query, key, value
        and output, experts receive and return each token once for each expert that it chose, and a stage sends its output to
        the next.
        """
        model = self._model
        config, layout, model_config = model.config, model.plan.layout, model.plan.model_config
        tp, cp = layout.tp, config.context_parallel_size
        layers = layout.num_slots / layout.pp
        local = tokens / cp * model.itemsize
        hidden = local * model_config.hidden_size
        split = tp if config.sequence_parallel else 1
        seconds = 0.0
        if tp > 1:
            seconds += layers * 4 * hidden * (tp - 1) / tp / self._bytes_per_second(tp)
        if (split_over := self._context_ranks) > 1:
            heads = 2 * model_config.num_attention_heads + 2 * model_config.num_query_groups
            width = heads * model_config.kv_channels / tp
            exchanged = local * width * (split_over - 1) / split_over
            seconds += layers * exchanged / self._bytes_per_second(tp * split_over)
        groups = layout.num_expert_groups if layout.num_experts else 1
        if groups > 1:
            sent = 2 * hidden / split * model_config.moe_router_topk * (groups - 1) / groups
            moe = len(model_config.moe_layers) / layout.pp
            seconds += moe * sent / self._bytes_per_second(groups * layout.expert_tp_size)
        if layout.pp > 1:
            # in the usual order of ranks stages are the outermost axis, so the next one may be on another node
            seconds += layout.vpp * hidden / split / self._bytes_per_second(model.devices)
        return seconds

    def step_seconds(self) -> dict[str, float]:
        """Return the seconds of each optimizer step: gradients are reduced, swapped state is loaded and offloaded."""
        run, model = self._run, self._model
        count = float(run.sizes.steps_per_rollout * run.sizes.epochs) if run.generate is not None else 1.0
        gradients = 0.0
        if model.dp > 1:
            # an all-reduce moves its bytes twice: as a reduce-scatter and a gather, which the distributed optimizer separates;
            # an engine of shards gathers its weights in each pass
            gathers = model.config.use_distributed_optimizer and not model.holding.is_sharded
            splits = gathers or model.holding.is_sharded
            sent = (model.full_gradients(stage) + (model.weights(stage) if gathers else 0) for stage in model.elements)
            gradients = (1 if splits else 2) * max(sent) / self._bytes_per_second(model.devices)
        # offloaded gradients are reduced and copied to the host in every micro-batch; where the moments are on the device, they
        # are copied back once
        times = run.micro_batches if model.config.offload_gradients else 1
        back = 1 - model.config.optimizer_offload_fraction
        copied = (times + back) * max(map(model.host_gradients, model.elements)) / (run.device.host * self._efficiency.host)
        parts = {"gradients": count * (times * gradients + copied)}
        if model.config.swap_optimizer:
            state = max(model.state(elements) for elements in model.elements)
            # loaded before each step and offloaded after it
            parts["swapping"] = count * 2 * state / (run.device.host * self._efficiency.host)
        if model.config.optimizer_offload_fraction:
            parts["optimizer on the host"] = count * self._host_step_seconds()
        return parts

    def _host_step_seconds(self) -> float:
        """Return the seconds of a step of the share that the host updates: processors, link and disk work at the same time."""
        run, model = self._run, self._model
        share = model.config.optimizer_offload_fraction
        state = max(model.offloaded(elements) for elements in model.elements)
        # the gradients and weights of the numbers whose states are on this rank; an engine of shards has no others
        ranks = model.dp if model.config.use_distributed_optimizer and not model.holding.is_sharded else 1
        arrives = not model.config.offload_gradients  # gradients that are not on the host yet
        sizes = (arrives * model.gradients(elements) + model.weights(elements) for elements in model.elements)
        moved = max(sizes) * share / ranks
        seconds = [state / self._efficiency.host_adamw, moved / (run.device.host * self._efficiency.host)]
        if model.config.optimizer_offload_path is not None:
            devices = -(-model.devices // max(1, run.run.num_nodes))
            seconds.append(2 * state * devices / DISK)
        return max(seconds)


def _shared_tokens(run: RunShape, model: Model, samples: Samples) -> float:
    """Return the mean tokens of a sample that are computed with another sample of its prompt (prefix sharing)."""
    rl = run.cfg.rl_config
    if rl is None or not (rl.use_prefix_grouper and rl.use_remove_padding) or model.config.has_ring_attention:
        return 0.0
    if model.config.computes_by_module and not model.plan.architecture.packs:  # its rows are padded
        return 0.0
    # in the same micro-batch, whose rows are of one prompt as far as possible
    together = min(rl.n_samples_per_prompt, max(1.0, run.tokens("update") / samples.tokens))
    return max(0.0, samples.prompt - 1) * (1 - 1 / together)


def _pushed_bytes(run: RunShape) -> int:
    """Return the bytes that a weight sync brings to a rank of the rollout: its weights, or all adapters."""
    engine, actor = plan_engine(run), run.actor
    assert engine is not None and run.generate is not None
    if run.generate.lora_push == "adapter":
        return count_trained_adapters(actor.plan, actor.config) * actor.itemsize
    return engine.weights


@dataclass(frozen=True)
class _StepSeconds:
    """Seconds of a step of an engine.

    Attributes:
        kernels: kernels of a layer, as a multiple of a layer's without adapters.
        captured: responses of the largest captured graph; a step of more of them runs without graphs.
        reduces: all-reduces of a layer.
    """

    device: Device
    efficiency: Efficiency
    is_eager: bool
    kernels: float = 1.0
    captured: float = math.inf
    reduces: int = 0

    def compute(self, moved: float, operations: float, layers: int, active: float) -> float:
        """Compute the seconds of a step that reads so many bytes and makes so many operations on a rank.

        Without graphs the host launches kernels while the device works, and the slower of both counts. The kernels of a
        captured graph have gaps on the device, and its all-reduces a latency, which add up. After a step the host has work
        for each response.
        """
        device, efficiency = self.device, self.efficiency
        reading = moved / (device.bandwidth * efficiency.bandwidth)
        working = max(reading, operations / (device.flops * efficiency.prefill))
        after = active * efficiency.response_s
        if not self.is_eager and active <= self.captured:
            layer = self.kernels * efficiency.graph_layer_s + self.reduces * efficiency.graph_reduce_s
            return working + layers * layer + after
        launching = layers * self.kernels * efficiency.layer_s
        return (max(working, launching) if device.overlaps else working + launching) + after


def _plan_rollout(run: RunShape, efficiency: Efficiency, samples: Samples) -> dict[str, float]:
    """Return the seconds of prefill, of decoding while the engine is full, and of the long tail; replicas work in parallel.

    Results of tools count as decoded tokens. A sample that waits for a tool leaves its slot to others, so that only the last
    samples add waiting time.
    """
    generate, engine = run.generate, plan_engine(run)
    assert generate is not None and engine is not None
    lengths, prompt = samples.lengths, samples.prompt
    # those without a sample do not count
    count = float(rows_per_replica(run.sizes.rollout_samples, run.sizes.rollout.dp_size))
    room = engine.cache.room / max(1.0, engine.cache.bytes_per_token * (lengths.mean + prompt))
    slots = max(1.0, min(float(generate.max_num_seqs), room, count))
    tensor, model_config = run.sizes.rollout.tensor, run.actor.plan.model_config
    flops = _count_flops(run.actor.plan.architecture, model_config)
    # with prefix sharing the keys and values of a prompt serve all its responses
    repeated = run.sizes.group_size if generate.enable_prefix_caching else 1
    # without it every further turn computes all tokens before it
    again = 0.0 if generate.enable_prefix_caching else (samples.turns - 1) * (prompt + lengths.mean / 2)
    prefilled = count * (prompt / repeated + again)
    prefill = prefilled * flops.per_token / (tensor * run.device.flops * efficiency.prefill)
    if (tower := TowerCosts.count(run.actor.plan.architecture, model_config)) is not None:
        tokens = run.count_image_tokens(run.actor, prompt)
        seen = count / run.sizes.group_size * tower.forward(tokens, tokens)
        prefill += seen / (tensor * run.device.flops * efficiency.prefill)

    read_bytes = _read_bytes(run, engine.weights)
    captured = max(generate.cudagraph_capture_sizes or (math.inf,))
    reduces = 2 if tensor > 1 else 0
    step_seconds = _StepSeconds(run.device, efficiency, generate.enforce_eager, _compare_kernels(run), captured, reduces)

    def step(active: float, context: float) -> float:
        moved = read_bytes(active) + active * context * engine.cache.bytes_per_token
        return step_seconds.compute(moved, active * flops.per_token / tensor, model_config.num_layers, active)

    full, busy, tail = _decode(count, slots, lengths, prompt, lengths.max_of(run.sizes.rollout_samples), step)
    return {"prefill": prefill, "decoding": full + busy, "long tail": tail, "tools": samples.tool_seconds}


def _compare_kernels(run: RunShape) -> float:
    """Return the kernels of a layer of the engine, as a multiple of those without adapters.

    The engine has adapters of query, key and value, of gate and up; each adds two products.
    """
    generate, config = run.generate, run.actor.config
    if generate is None or generate.lora_push != "adapter" or not config.lora_target_modules:
        return 1.0
    products = sum(_ADAPTED_PRODUCTS.get(part, 1) for part in config.adapted_parts)
    return 1.0 + 2 * products / count_kernels(run.actor.plan.model_config, False)[0]


def _compare_trained_kernels(model: Model) -> float:
    """Return the kernels of a layer of the trainer, as a multiple of those without adapters."""
    if not (model.trains and model.config.lora_target_modules):
        return 1.0
    adapters = len(model.config.lora_target_modules)
    return 1.0 + _ADAPTER_KERNELS * adapters / count_kernels(model.plan.model_config, False)[0]


def _count_adapter_operations(model: Model) -> float:
    """Count the operations of the adapters of a model that trains, for a token; each chooses a part of the experts."""
    if not (model.trains and model.config.lora_target_modules):
        return 0.0
    elements, model_config = count_all_elements(model.plan, model.config), model.plan.model_config
    chosen = (model_config.moe_router_topk or 0) / (model_config.num_moe_experts or 1)
    return 2.0 * (elements.dense_adapters + chosen * elements.expert_adapters)


def _decode(
    count: float, slots: float, lengths: Lengths, prompt: float, longest: float, step: Callable[[float, float], float]
) -> tuple[float, float, float]:
    """Return the seconds in which an engine generates with all slots, with many and with few of them.

    Args:
        count: responses.
        slots: that are generated at once; the others wait until one is free.
        prompt: tokens before a response.
        longest: length of the last response.
        step: (active responses, tokens before the next one) -> seconds.
    """
    full = max(0.0, count - slots) * lengths.mean / slots * step(slots, prompt + lengths.mean / 2)
    busy = tail = 0.0
    width = longest / _POINTS
    for point in range(_POINTS):
        at = (point + 0.5) * width
        active = max(slots * lengths.above(at), 1.0)
        seconds = width * step(active, prompt + at)
        if active >= slots / 8:
            busy += seconds
        else:
            tail += seconds
    return full, busy, tail


def _plan_judge(run: RunShape, efficiency: Efficiency, samples: Samples) -> dict[str, float]:
    """Return the seconds of the replies of a judge that the run serves; none without one, or where its folder is elsewhere."""
    rl, device, owned, folder = run.cfg.rl_config, run.device, count_judge_bytes(run), find_judge_folder(run.cfg)
    if rl is None or folder is None or not owned:
        return {}
    keys = run.cfg.read_judge_keys()
    stored = read_json(folder / "config.json")
    layers, tensor = int((stored | stored.get("text_config", {}))["num_hidden_layers"]), keys.infer_tensor_parallel_size
    weights, token_bytes = owned["judge weights"], read_kv_bytes(folder, keys.cache_itemsize) / tensor
    flops = 2.0 * weights / (2 if keys.dtype == "bfloat16" else 4)  # of a rank: a product and a sum for each weight
    step_seconds = _StepSeconds(device, efficiency, keys.enforce_eager)
    replies, read = Lengths(rl.judge_max_tokens / 2, rl.judge_max_tokens), samples.tokens
    count = max(1.0, run.sizes.rollout_samples * tensor / run.placement.layouts["judge"].num_npus)
    room = owned["judge KV cache"] / max(1.0, token_bytes * (read + replies.mean))
    slots = max(1.0, min(float(keys.max_num_seqs), room, count))

    def step(active: float, context: float) -> float:
        return step_seconds.compute(weights + active * context * token_bytes, active * flops, layers, active)

    full, busy, tail = _decode(count, slots, replies, read, replies.max_of(run.sizes.rollout_samples), step)
    prefill = count * read * flops / (device.flops * efficiency.prefill)
    return {"prefill": prefill, "decoding": full + busy, "long tail": tail}


def _read_bytes(run: RunShape, weights: int) -> Callable[[float], float]:
    """Return (active responses of a replica) -> bytes of weights that a step reads on a rank."""
    model_config, generate = run.actor.plan.model_config, run.generate
    if not model_config.moe_layers:
        return lambda active: float(weights)
    assert generate is not None and model_config.num_moe_experts is not None and model_config.moe_ffn_hidden_size is not None
    itemsize = 2 if generate.dtype == "bfloat16" else 4
    sharing = generate.infer_expert_parallel_size if generate.enable_expert_parallel else 1
    ranks = generate.infer_tensor_parallel_size * sharing
    hidden, inner = model_config.hidden_size, model_config.moe_ffn_hidden_size
    matrices = [(inner, hidden), (inner, hidden), (hidden, inner)]  # gate, up and down
    expert = sum(itemsize * rows * columns for rows, columns in matrices)
    if generate.quantization is not None:
        expert = QUANTIZED_FORMATS[find_format(generate.quantization, run.device.kind)].count_bytes(matrices, itemsize)
    experts = expert * model_config.num_moe_experts * len(model_config.moe_layers) / ranks
    # assumed: each token chooses its experts independently of the others, all with the same probability
    missed = 1.0 - model_config.moe_router_topk / model_config.num_moe_experts
    return lambda active: weights - experts + experts * (1.0 - missed ** (active * sharing))


def _offloaded_bytes(run: RunShape) -> int:
    """Return the bytes that a device of the fullest stage moves to the host and back in an iteration."""
    generate, stages = run.generate, len(run.actor.elements)
    assert generate is not None
    largest = 0
    for stage in range(stages):
        moved = 0
        for model in (run.actor, *run.others.values()):
            elements = model.stage(stage, stages)
            moved += model.weights(elements) if generate.offload_train_param and not model.is_streamed else 0
            moved += model.optimizer(elements) if generate.offload_train_optimizer else 0
        largest = max(largest, moved)
    return 2 * largest


def _plan_supervised(run: RunShape, efficiency: Efficiency, known: SampleMeans) -> TimePlan:
    length, note = assume_row_length(run.cfg, run.max_len, int(run.sizes.micro_batch_size), known)
    assumed = Samples(Lengths(length, length), prompt=0.0)
    actor = _Passes(run, run.actor, efficiency, assumed)
    samples = run.sizes.global_batch_size * run.tokens("update") / run.max_len / run.sizes.micro_batch_size
    # the reference makes one forward pass over the same samples; a KL needs one of both models over other answers
    forwards = {"dpo": 1.0, "kto": 3.0 if run.cfg.actor_config.kto_loss_type == "kto" else 1.0}
    passes = actor.update_passes + forwards.get(run.cfg.stage or "", 0.0)
    parts = {Phases.UPDATE_ACTOR.timer: actor.seconds(samples, passes) | actor.step_seconds()}
    parts[Phases.UPDATE_ACTOR.timer] |= actor.tower_seconds(samples, trains=True)
    if (ref := run.find_model("reference")) is not None:
        parts[Phases.UPDATE_ACTOR.timer] |= _Passes(run, ref, efficiency, assumed).stream_seconds(samples)
    phases = {Phases.UPDATE_ACTOR.timer: sum(parts[Phases.UPDATE_ACTOR.timer].values())}
    return TimePlan(
        run.device.name,
        phases,
        parts,
        samples * length,
        run.sizes.actor.num_npus,
        efficiency,
        assumed.lengths,
        (note,),
    )


@lru_cache(maxsize=64)
def _count_tensors(architecture: Architecture, model_config: ModelConfig) -> int:
    """Count the tensors of a model's Hugging Face folder, which a weight sync brings one by one; each expert has its own."""
    return sum(len(op.hf) for op in list_grouped_ops(architecture, model_config) if not op.copy_of_tied)


@lru_cache(maxsize=64)
def _count_flops(architecture: Architecture, model_config: ModelConfig) -> ModelFlops:
    return ModelFlops.count(architecture, model_config)


def calibrate(plan: TimePlan, factors: dict[str, float]) -> TimePlan:
    """Return the plan with each phase as many times longer as it was in a run that was measured."""
    default = factors.get("all", 1.0)
    phases = {name: seconds * factors.get(name, default) for name, seconds in plan.phases.items()}
    parts = {
        name: {part: seconds * factors.get(name, default) for part, seconds in made.items()}
        for name, made in plan.parts.items()
    }
    return replace(plan, phases=phases, parts=parts, factors=factors)
