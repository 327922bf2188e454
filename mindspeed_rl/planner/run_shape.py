"""The models of a run and how they lie over its dies: what memory and time are computed from."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from fractions import Fraction

from mindspeed_rl.config.keys.generate import GenerateConfig
from mindspeed_rl.config.keys.megatron import MegatronConfig
from mindspeed_rl.config.keys.rl import RLConfig
from mindspeed_rl.config.keys.turns import response_limit
from mindspeed_rl.config.placement import Layout
from mindspeed_rl.config.run import RunConfig
from mindspeed_rl.config.sizes import Sizes
from mindspeed_rl.models.plan import ModelPlan
from mindspeed_rl.planner.chips import Chip
from mindspeed_rl.planner.shapes import Elements, model_folder, role_plan, stage_elements


@dataclass(frozen=True)
class Model:
    """A role's model on its dies.

    Attributes:
        elements: of each pipeline stage.
        devices: dies that it lies on, the actor's or its own.
        dp, expert_dp: ranks that hold dense parameters, and experts, alike.
    """

    config: MegatronConfig
    plan: ModelPlan
    elements: list[Elements]
    devices: int
    dp: int
    expert_dp: int
    trains: bool

    @property
    def itemsize(self) -> int:
        return 2 if self.config.bf16 else 4

    @property
    def replicas(self) -> float:
        """That share the samples between them."""
        return self.dp / self.config.context_parallel_size

    def stage(self, stage: int, of: int) -> Elements:
        """Of the stage that lies where stage `stage` of `of` lies."""
        return self.elements[stage * len(self.elements) // of]

    def weights(self, held: Elements) -> int:
        count = held.parameters + held.dense_adapters + held.expert_adapters
        return count * self.itemsize + held.buffers * 4

    def _trained(self, held: Elements) -> tuple[int, int]:
        if self.config.lora_target_modules:
            return held.dense_adapters, held.expert_adapters
        return held.dense, held.expert

    def gradients(self, held: Elements) -> int:
        # gradients are summed in float32 whatever the weights are
        return 4 * sum(self._trained(held)) if self.trains else 0

    def optimizer(self, held: Elements, *, stepped: bool = True) -> int:
        """Two moments, and under bf16 the float32 weights; split over the ranks that hold a parameter alike.

        Args:
            stepped: the first step was made, which is when the moments come.
        """
        return 0 if self.config.swap_optimizer else self.state(held, stepped=stepped)

    def state(self, held: Elements, *, stepped: bool = True) -> int:
        """The same wherever it is."""
        if not self.trains:
            return 0
        # with reuse_fp32_param the bf16 weights, which are counted already, are half of the float32 ones
        each = (8 if stepped else 0) + (0 if not self.config.bf16 else 2 if self.config.reuse_fp32_param else 4)
        dense, expert = self._trained(held)
        if self.config.use_distributed_optimizer:
            dense, expert = -(-dense // self.dp), -(-expert // self.expert_dp)
        return each * (dense + expert)


def placed_model(config: MegatronConfig, devices: int, *, trains: bool, is_scored: bool = False) -> Model:
    """Return a role's model on so many dies.

    Raises:
        ValueError: its shape is not known, or does not fit its layout.
    """
    plan = role_plan(config, is_scored=is_scored)
    lie = Layout.from_config(config, devices)
    dp = max(1, devices // (lie.tensor * lie.pipeline))  # context-parallel ranks hold all parameters alike
    size, inner = config.expert_sizes
    expert_dp = max(1, devices // (size * inner * lie.pipeline))
    return Model(config, plan, stage_elements(plan, config), devices, dp, expert_dp, trains)


@dataclass(frozen=True)
class RunShape:
    """What the phases are computed from.

    Attributes:
        others: models on the actor's dies, by what they are called as owners.
        apart: models on dies of their own.
    """

    cfg: RunConfig
    sizes: Sizes
    chip: Chip
    actor: Model
    others: dict[str, Model] = field(default_factory=dict)
    apart: dict[str, Model] = field(default_factory=dict)

    def where(self, own: int | None) -> dict[str, Model]:
        """`apart` for a role with devices of its own, else `others`."""
        return self.others if own is None else self.apart

    def role(self, name: str) -> Model | None:
        """A model by its name as an owner, wherever it lies."""
        return self.others.get(name) or self.apart.get(name)

    @property
    def generate(self) -> GenerateConfig | None:
        return None if self.sizes.counting == "samples" else self.cfg.generate_config

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that trains."""
        rl, generate = self.cfg.rl_config, self.generate
        if rl is None or generate is None:
            return self.cfg.actor_config.seq_length or 4096
        return min(rl.max_prompt_length + response_limit(self.cfg), max(generate.max_model_len, 1))

    def tokens(self, use: str) -> float:
        """Tokens of the largest micro-batch of a pass: "update", "actor" or "ref"."""
        rl = self.cfg.rl_config
        rows = self.sizes.micro_batch_size
        if rl is None or self.generate is None:
            # chosen and rejected go through the model together
            pairs = 2 if self.cfg.stage in ("dpo", "simpo", "orm") else 1
            return pairs * rows * self.longest
        if rl.use_dynamic_bsz:
            return max(getattr(rl, f"{use}_max_packing_token_size"), self.longest)
        if use != "update":
            rows = getattr(rl, f"{use}_forward_micro_batch_size") or rows
        share = Fraction(self.sizes.step_samples) / Fraction(self.sizes.actor.dp_size)
        return min(rows, max(1.0, float(share))) * self.longest

    @property
    def micro_batches(self) -> int:
        """Of an optimizer step on one replica."""
        rl = self.cfg.rl_config
        if rl is not None and self.generate is not None and rl.use_dynamic_bsz:
            samples = Fraction(self.sizes.step_samples) / Fraction(self.sizes.actor.dp_size)
            return max(1, int(samples * self.longest / Fraction(self.tokens("update"))))
        return max(1, int(self.sizes.accumulation_steps))


def read_shape(cfg: RunConfig, chip: Chip, num_nodes: int) -> RunShape:
    """Return the models of a run, each where it lies.

    Raises:
        ValueError: sizes are missing, or a model's shape is not known or does not fit its layout; the role is named.
    """
    world, dedicated = cfg.placement.world_size, cfg.placement.dedicated
    if world is None or world < 1:
        raise ValueError("rl_config.actor_resource.num_npus: not set; say how many devices the run has.")

    def model(role: str, config: MegatronConfig, *, trains: bool, is_scored: bool = False, own: int | None = None) -> Model:
        try:
            return placed_model(config, own or world, trains=trains, is_scored=is_scored)
        except ValueError as error:
            raise ValueError(f"{role}: {error}") from error

    if cfg.sizes is None:
        raise ValueError("global_batch_size or the number of devices is not set")
    run = RunShape(
        cfg,
        replace(cfg.sizes, num_nodes=num_nodes),
        chip,
        model("actor_config", cfg.actor_config, trains=True, is_scored=cfg.stage == "orm"),
    )
    if cfg.rl_config is None or cfg.is_supervised:
        if cfg.stage == "dpo" and (cfg.actor_config.ref_model or not cfg.actor_config.lora_target_modules):
            run.others["reference"] = model("actor_config", _frozen(cfg.actor_config), trains=False)
        return run
    objective = cfg.objective
    assert objective is not None
    if objective.needs_reference and not cfg.rl_config.share_backbone:
        own = dedicated.get("ref")
        run.where(own)["reference"] = model("ref_config", _reference(cfg.ref_config, cfg.rl_config), trains=False, own=own)
    if objective.has_critic and cfg.critic_config is not None:
        own = dedicated.get("critic")
        run.where(own)["critic"] = model("critic_config", cfg.critic_config, trains=True, is_scored=True, own=own)
    if (reward := cfg.reward_model_keys) is not None:
        own = dedicated.get("reward")
        run.where(own)["reward model"] = model("reward_config", reward, trains=False, is_scored=True, own=own)
    return run


def _reference(config: MegatronConfig, rl: RLConfig) -> MegatronConfig:
    """Of the weights that are named for it, where they are here to look at; else of the group's shape."""
    config, mode = _frozen(config), rl.integrated_mode_config
    if mode is None or model_folder(mode.ref_model_load_path) is None:
        return config
    return replace(config.without_model_keys(), load=mode.ref_model_load_path)


def _frozen(config: MegatronConfig) -> MegatronConfig:
    """Without adapters, which only what trains has."""
    return replace(config, lora_target_modules=None)
