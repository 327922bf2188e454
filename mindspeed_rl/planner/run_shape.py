"""The models of a run and their layouts on its devices: memory and time are computed from these."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from fractions import Fraction

from mindspeed_rl.catalogue.objective import Objective
from mindspeed_rl.config.device_limits import SPLIT_BUFFERS, SPLIT_WINDOW
from mindspeed_rl.config.keys.generate import GenerateConfig
from mindspeed_rl.config.keys.megatron import MegatronConfig
from mindspeed_rl.config.run import RunConfig
from mindspeed_rl.models.plan import ModelPlan
from mindspeed_rl.planner.devices import Device, list_device_obstacles
from mindspeed_rl.planner.shapes import (
    Elements,
    count_reduced_elements,
    count_stage_elements,
    count_streamed_elements,
    find_largest_parameters,
    find_model_folder,
    plan_role,
)
from mindspeed_rl.run import Run
from mindspeed_rl.run.batch_sizes import Sizes, rows_per_replica
from mindspeed_rl.run.placement import Layout, Placement
from mindspeed_rl.run.rules.training_engine_rules import check_model_form


@dataclass(frozen=True)
class Holding:
    """What a rank of a training engine has of each parameter at rest.

    Attributes:
        is_sharded: a part of every weight and gradient; the layer that computes is gathered.
        has_float32_weights: weights that train are float32, and the optimizer keeps no second copy of them.
    """

    is_sharded: bool = False
    has_float32_weights: bool = False


#: value of the key `engine` -> what its ranks have
_HOLDINGS = {"megatron": Holding(), "fsdp": Holding(is_sharded=True, has_float32_weights=True)}


@dataclass(frozen=True)
class Model:
    """A role's model on its devices.

    Attributes:
        elements: number of elements of each pipeline stage.
        devices: the actor's, or those dedicated to the role.
        dp, expert_dp: ranks that hold the same dense parameters, and the same experts.
        is_streamed: its weights are in host memory, from where each pass brings them layer by layer.
    """

    config: MegatronConfig
    plan: ModelPlan
    elements: list[Elements]
    devices: int
    dp: int
    expert_dp: int
    trains: bool
    is_streamed: bool = False
    holding: Holding = Holding()

    @classmethod
    def build(cls, config: MegatronConfig, devices: int, *, trains: bool, is_scored: bool = False) -> Model:
        """Plan a role's model on so many devices.

        Raises:
            ValueError: its shape is not known, or does not fit its layout.
        """
        if not trains:
            config = replace(config, mtp_num_layers=0)
        plan, layout = plan_role(config, is_scored=is_scored), Layout.from_config(config, devices)
        size, inner = config.expert_sizes
        return cls(
            config,
            plan,
            count_stage_elements(plan, config),
            devices,
            dp=max(1, devices // (layout.tensor * layout.pipeline)),  # context-parallel ranks hold all parameters
            expert_dp=max(1, devices // (size * inner * layout.pipeline)),
            trains=trains,
            holding=_HOLDINGS[config.engine],
        )

    @property
    def itemsize(self) -> int:
        """Bytes of a weight."""
        return 2 if self.config.bf16 else 4

    @property
    def replicas(self) -> float:
        """Replicas that the samples are split over."""
        return self.dp / self.config.context_parallel_size

    def stage(self, stage: int, stages: int) -> Elements:
        """Return the elements on the devices of stage `stage` of the actor's `stages`."""
        return self.elements[stage * len(self.elements) // stages]

    def weights(self, elements: Elements) -> int:
        """Return the bytes of weights, adapters and buffers."""
        trained = 4 if self.holding.has_float32_weights and self.trains else self.itemsize
        base = self.itemsize if self.config.lora_target_modules else trained
        adapters = elements.dense_adapters + elements.expert_adapters
        # a frozen tower is in the format that it is computed with
        size = (elements.parameters - elements.frozen) * base + elements.frozen * self.itemsize + adapters * trained
        return -(-size // self._shards) + elements.buffers * 4

    def computed_weights(self, elements: Elements) -> int:
        """Return the bytes of full weights in the format that they are computed with."""
        return self._count_weights(elements) * self.itemsize

    @staticmethod
    def _count_weights(elements: Elements) -> int:
        return elements.parameters + elements.dense_adapters + elements.expert_adapters

    @property
    def _shards(self) -> int:
        """Ranks that a weight or a gradient is divided over, besides the parts of tensor and expert parallelism."""
        return (self.config.fsdp_size or self.dp) if self.holding.is_sharded else 1

    def pass_weights(self, stage: int, stages: int) -> int:
        """Return the most bytes of the weights that a pass has at a time, on the devices of stage `stage` of the actor's."""
        if not self.is_streamed:
            return self.weights(self.stage(stage, stages))
        elements = count_streamed_elements(self.plan, self.config)
        return self.weights(elements[stage * len(elements) // stages])

    def _count_trained(self, elements: Elements) -> tuple[int, int]:
        if self.config.lora_target_modules:
            return elements.dense_adapters, elements.expert_adapters
        return elements.dense, elements.expert

    def _count_stepped(self, elements: Elements) -> int:
        """Count the parameters that the optimizer of a rank steps."""
        dense, expert = self._count_trained(elements)
        if self.holding.is_sharded:
            return -(-dense // self._shards) - (-expert // self._shards)
        if self.config.use_distributed_optimizer:
            return -(-dense // self.dp) - (-expert // self.expert_dp)
        return dense + expert

    def gradients(self, elements: Elements) -> int:
        """Return the bytes of the gradients on the device, which are summed in float32 unless the run file says otherwise."""
        if self.config.offload_gradients:  # those of the layer that is reduced, and of the one before
            elements = count_streamed_elements(self.plan, self.config)[0]
        return -(-self.full_gradients(elements) // self._shards)

    def host_gradients(self, elements: Elements) -> int:
        """Return the bytes of the gradients that are summed in host memory."""
        return -(-self.full_gradients(elements) // self._shards) if self.config.offload_gradients else 0

    def reduced_gradients(self) -> tuple[int, int]:
        """Return the bytes beside `gradients` of an engine of shards while it reduces a layer, and while it reduces all else.

        These are full gradients in the format of the backward pass, and the float32 input of the reduction. One rank has none:
        its input is the gradient.
        """
        if not self.holding.is_sharded or not self.trains:
            return 0, 0
        layer, ends, head = (sum(self._count_trained(part)) for part in count_reduced_elements(self.plan, self.config))
        reduced = self.itemsize + (4 if self.dp > 1 else 0)
        return layer * reduced + head * self.itemsize, ends * reduced

    def full_gradients(self, elements: Elements) -> int:
        """Return the bytes of the gradients before they are divided over ranks: while micro-batches add to them."""
        itemsize = 4 if self.config.grad_reduce_in_fp32 else self.itemsize
        return itemsize * sum(self._count_trained(elements)) if self.trains else 0

    def optimizer(self, elements: Elements, *, stepped: bool = True) -> int:
        """Return the bytes of the optimizer's state on the device; see `state`."""
        if self.config.swap_optimizer:
            return 0
        return self.state(elements, stepped=stepped) - self.offloaded(elements, stepped=stepped)

    def offloaded(self, elements: Elements, *, stepped: bool = True) -> int:
        """Return the bytes of the optimizer's state that the host's processors update, in host memory or in a file."""
        return int(self.config.optimizer_offload_fraction * self.state(elements, stepped=stepped))

    def split_buffers(self, elements: Elements) -> int:
        """Return the bytes of the buffers in which a step puts float32 weights together (`reuse_fp32_param`)."""
        if not (self.config.reuse_fp32_param and self.config.bf16 and self.trains):
            return 0
        return SPLIT_BUFFERS * min(SPLIT_WINDOW, self._count_stepped(elements))

    def swapped_at_once(self, stage: int, elements: Elements) -> int:
        """Return the bytes of a swapped optimizer that a step has on a device: a part, or the largest parameter.

        MindSpeed's step brings in a part when the one before has left, and no parameter by pieces.
        """
        state, (dense, expert) = self.state(elements), find_largest_parameters(self.plan, self.config, stage)
        trained = self._count_trained(elements)
        dense, expert = min(dense, -(-trained[0] // self.dp)), min(expert, -(-trained[1] // self.expert_dp))
        count = sum(-(-part // ranks) for part, ranks in zip(trained, (self.dp, self.expert_dp)))
        largest = 0 if self.config.lora_target_modules else max(dense, expert)
        return max(state // self.config.swap_optimizer_times, state * largest // max(1, count))

    def state(self, elements: Elements, *, stepped: bool = True) -> int:
        """Return the bytes of the optimizer's state, on the device or in host memory.

        These are two moments (one of Muon's matrices), and under bf16 the float32 weights, split over the ranks that hold the
        same parameters where the optimizer is distributed.

        Args:
            elements: number of elements of a rank.
            stepped: the first step, which creates the moments, was made.
        """
        if not self.trains:
            return 0
        # with reuse_fp32_param the bf16 weights, which are counted already, are one half of the float32 ones
        has_copy = self.config.bf16 and not self.holding.has_float32_weights
        moments = 4 if self.config.optimizer_state_dtype == "bfloat16" else 8
        bytes_each = (moments if stepped else 0) + (0 if not has_copy else 2 if self.config.reuse_fp32_param else 4)
        has_single_moment = self.config.optimizer == "muon" and stepped
        return bytes_each * self._count_stepped(elements) - (4 * elements.matrices if has_single_moment else 0)


@dataclass(frozen=True)
class RunShape:
    """Sizes and models from which the phases are computed.

    Attributes:
        run: the draft of a run, which has these sizes.
        others: models on the actor's devices, by their name as an owner of memory.
        dedicated: models on dedicated devices.
    """

    run: Run
    sizes: Sizes
    device: Device
    actor: Model
    others: dict[str, Model] = field(default_factory=dict)
    dedicated: dict[str, Model] = field(default_factory=dict)

    @property
    def cfg(self) -> RunConfig:
        """The run file."""
        return self.run.config

    @property
    def placement(self) -> Placement:
        """Devices of every role."""
        return self.run.placement

    @property
    def objective(self) -> Objective | None:
        """The loss; None in supervised stages."""
        return self.run.objective

    @property
    def teachers(self) -> list[str]:
        """Names of the teachers with weights of their own."""
        return [name for name in (*self.others, *self.dedicated) if name.startswith("teacher")]

    def find_model(self, name: str) -> Model | None:
        """Return a model by its name as an owner, on any devices."""
        return self.others.get(name) or self.dedicated.get(name)

    @property
    def generate(self) -> GenerateConfig | None:
        """Keys of the engine; None without rollouts."""
        return None if self.sizes.counting == "samples" else self.cfg.generate_config

    @property
    def sends_changes(self) -> bool:
        """True where a weight sync brings an engine only what has changed since the one before."""
        generate = self.generate
        return generate is not None and (generate.lora_push == "adapter" or generate.update_weight_mode == "delta")

    @property
    def is_elastic(self) -> bool:
        """True where servers on the actor's devices generate while an iteration waits."""
        return self.generate is not None and self.cfg.rl_config is not None and self.cfg.rl_config.elastic_rollout

    @property
    def max_len(self) -> int:
        """Maximum number of tokens of a sequence that trains."""
        rl, generate = self.cfg.rl_config, self.generate
        if rl is None or generate is None:
            return self.cfg.actor_config.seq_length or 4096
        return min(rl.max_prompt_length + self.cfg.response_limit, max(generate.max_model_len, 1))

    def tokens(self, use: str) -> float:
        """Return the tokens of the largest micro-batch of a pass: "update", "actor" or "ref"."""
        rl = self.cfg.rl_config
        rows = self.sizes.micro_batch_size
        if rl is None or self.generate is None:
            # chosen and rejected go through the model together
            pairs = 2 if self.cfg.stage in ("dpo", "simpo", "cpo", "orpo", "orm") else 1
            return pairs * rows * self.max_len
        if rl.use_dynamic_bsz:
            return max(getattr(rl, f"{use}_max_packing_token_size"), self.max_len)
        if use != "update":
            rows = getattr(rl, f"{use}_forward_micro_batch_size") or rows
        return min(rows, float(rows_per_replica(self.sizes.step_samples, self.sizes.actor.dp_size))) * self.max_len

    def count_image_tokens(self, model: Model, prompt: float | None = None) -> float:
        """Return the most tokens that images take in a row; 0 for a model of text.

        Args:
            model: model of any role.
            prompt: tokens in which the images are; None: the longest prompt, or row of a supervised stage.
        """
        vision, config, rl, generate = model.plan.model_config.vision, model.config, self.cfg.rl_config, self.generate
        if vision is None:
            return 0.0
        if rl is None or generate is None:
            return prompt or float(self.max_len)
        tokens = prompt or float(rl.max_prompt_length)
        if config.max_pixels is None or generate.limit_mm_video_per_prompt:  # which is a limit of images, not of videos
            return tokens
        max_tokens = config.max_pixels // (vision.patch_size * vision.merge_size) ** 2
        return min(tokens, float(generate.limit_mm_image_per_prompt * max_tokens))

    def count_batch_image_tokens(self, model: Model, use: str) -> float:
        """Return the tokens of different images in the largest micro-batch of a pass; see `tokens`."""
        rows = self.tokens(use) / self.max_len
        # the samples of a prompt, which are adjacent rows, have its images
        samples = 1.0 if self.generate is None else max(1.0, min(float(self.sizes.group_size), rows))
        return rows / samples * self.count_image_tokens(model)

    @property
    def micro_batches(self) -> int:
        """Micro-batches of an optimizer step on one replica."""
        rl = self.cfg.rl_config
        if rl is not None and self.generate is not None and rl.use_dynamic_bsz:
            samples = Fraction(rows_per_replica(self.sizes.step_samples, self.sizes.actor.dp_size))
            return max(1, int(samples * self.max_len / Fraction(self.tokens("update"))))
        return max(1, int(self.sizes.accumulation_steps))


def read_shape(run: Run, device: Device) -> RunShape:
    """Return the models of a run, each on its devices.

    Raises:
        ValueError: sizes are missing, or a model's shape is not known or does not fit its layout; the role is named. Or the
            device does not have the format of the engines.
    """
    cfg, objective, sizes = run.config, run.objective, run.sizes
    world, dedicated = run.placement.world_size, run.placement.dedicated
    if world is None or world < 1:
        raise ValueError("rl_config.actor_resource.num_npus: not set; say how many devices the run has.")

    def build(group: str, config: MegatronConfig, devices: int, *, trains: bool, is_scored: bool = False) -> Model:
        try:
            model = Model.build(config, devices, trains=trains, is_scored=is_scored)
            check_model_form(config, model.plan.architecture, model.plan.model_config)
            return model
        except ValueError as error:
            raise ValueError(f"{group}: {error}") from error

    actor = build("actor_config", cfg.actor_config, world, trains=True, is_scored=cfg.stage == "orm")
    if obstacles := list_device_obstacles(run, device, actor.plan):
        raise ValueError(obstacles[0])
    if sizes is None:
        raise ValueError("global_batch_size is not set")
    shape, rl = RunShape(run, sizes, device, actor), cfg.rl_config
    if objective is None or rl is None:
        if run.has_ref:
            frozen = replace(cfg.actor_config, lora_target_modules=None)
            ref = build("actor_config", frozen, world, trains=False)
            shape.others["reference"] = replace(ref, is_streamed=frozen.stream_ref_weights)
        return shape

    def add(
        name: str, role: str, config: MegatronConfig, *, trains: bool, is_scored: bool = True, is_streamed: bool = False
    ) -> None:
        devices = dedicated.get(role)
        models = shape.others if devices is None else shape.dedicated
        model = build(f"{role}_config", config, devices or world, trains=trains, is_scored=is_scored)
        models[name] = replace(model, is_streamed=is_streamed)

    if run.has_ref:
        # it has no adapters, and the weights that are configured for it where their folder is on this machine
        config, mode = replace(cfg.ref_config, lora_target_modules=None), rl.integrated_mode_config
        if mode is not None and find_model_folder(mode.ref_model_load_path) is not None:
            config = replace(config.without_model_keys(), load=mode.ref_model_load_path)
        add("reference", "ref", config, trains=False, is_scored=False, is_streamed=config.stream_ref_weights)
    if objective.has_critic and cfg.critic_config is not None:
        add("critic", "critic", cfg.critic_config, trains=True)
    for folder, name in () if objective.distillation is None else objective.distillation.models.items():
        add(name, "teacher", _read_teacher_keys(cfg, folder), trains=False, is_scored=False)
    if cfg.reward_model_keys is not None:
        add("reward model", "reward", cfg.reward_model_keys, trains=False)
    return shape


def _read_teacher_keys(cfg: RunConfig, folder: str) -> MegatronConfig:
    """Return the keys of a teacher; where its folder is not on this machine, with the shape that teacher_config states."""
    keys, stated = cfg.read_teacher_keys(folder), cfg.teacher_config
    states_shape = bool({"model", "num_layers"} & cfg.set_keys.get("teacher_config", frozenset()))
    if stated is None or not states_shape or find_model_folder(folder) is not None:
        return keys
    return replace(keys, num_layers=stated.num_layers, padded_vocab_size=stated.padded_vocab_size)
