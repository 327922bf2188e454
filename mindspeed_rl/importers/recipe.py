"""A run as another project describes it: one record that is written as keys and compared as numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from mindspeed_rl.importers.source_plan import SourcePlan

#: groups of a run file
ACTOR, RL, ENGINE = "megatron_training", "rl_config", "generate_config"
SAMPLING = f"{ENGINE}.sampling_config"

#: keys that options make up together in most projects; see `Option.makes`
BATCH = "n_samples_per_prompt mini_batch_size num_generations generation_batch_size global_batch_size micro_batch_size epochs"
CLIP = "clip_higher_enable clip_ratio_low clip_ratio_high clip_ratio_c"
ADVANTAGE = "adv_estimator advantage_whiten scale_rewards adv_epsilon"
KL = "init_kl_coef kl_penalty use_kl_in_reward kl_clamp kl_ctrl_type kl_target kl_horizon"
CORRECTION = " ".join(f"rollout_importance_sampling_{name}" for name in ("mode", "threshold", "threshold_min"))
LORA = "lora_target_modules lora_r lora_alpha lora_dropout"
OVERLONG = "overlong_buffer_enable overlong_buffer overlong_buffer_penalty_factor rollout_max_tokens"
PREDICTION = "mtp_num_layers mtp_loss_scaling_factor mtp_detach_heads"
#: value of a router's balancing in other projects -> here; "none" is nothing to a reader of scalars
BALANCING: dict[object, object] = {
    None: "none",
    **{name: name for name in ("none", "aux_loss", "seq_aux_loss", "sinkhorn", "softmax_topk", "noaux_tc")},
}
WARMUP = "lr_warmup_iters lr_warmup_fraction"


@dataclass(frozen=True)
class Batch:
    """How a batch is divided; its sizes are numbers of the plan.

    Attributes:
        micro: rows of one forward pass.
        group: responses of a prompt.
        iterations: passes over a rollout; None where the option has a key of its own.
        counts_completions: sizes are written in completions; None where that is needed, as a step has no whole groups.
    """

    micro: int | None = None
    group: int = 1
    iterations: int | None = None
    counts_completions: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Rate:
    """The learning rate of a role, in iterations of a run file; None where an option has the key.

    Attributes:
        group: group of the role.
        floor: at the end of the decay.
        decay: iterations until the floor.
        warmup: iterations of the warm-up, or `warmup_share` of the decay.
        start: at step 0 of a warm-up.
    """

    group: str = ACTOR
    peak: float
    style: str
    floor: float | None = None
    decay: int | None = None
    warmup: int | None = None
    warmup_share: float | None = None
    start: float | None = None
    clip_grad: float | None = None
    weight_decay: float | None = None


@dataclass(frozen=True)
class Adapters:
    """LoRA: layers of Megatron, and numbers that an adapter which training continues has itself."""

    targets: list[str]
    rank: float | None = None
    alpha: float | None = None
    dropout: float | None = None


@dataclass(frozen=True)
class Prediction:
    """Multi-token-prediction layers that train.

    Attributes:
        count: layers.
        factor: weight of their loss.
        detaches: their loss trains only them.
    """

    count: int
    factor: float
    detaches: bool


@dataclass(frozen=True)
class Correction:
    """A correction of the engine's log-probs: its mode here and the bounds of its weights.

    Attributes:
        floor: lower bound of a weight that is cut at `high`; there is none here.
    """

    mode: str
    high: float
    low: float | None = None
    floor: float = 0.0

    def __str__(self) -> str:
        return f"{self.mode} {self.high:g}{f', at least {self.floor:g}' if self.floor else ''}"


@dataclass(frozen=True, kw_only=True)
class Objective:
    """What an objective has besides the numbers of the plan; None where an option has the key.

    Attributes:
        loss_type: key of the loss, several of which have one formula.
        level: what the ratio is computed over.
        clip, clip_c: bounds of the ratio, and the dual one.
        estimator: key of the estimator where the plan has another name.
        epsilon: added to the standard deviation of rewards.
        whiten: advantages are whitened over the batch.
        kl_clamp: the estimator of the KL is clamped.
        kl_control: target and horizon of an adaptive coefficient.
        correction: correction of the rollout's log-probs.
    """

    loss_type: str | None = None
    level: str | None = None
    clip: tuple[float, float] | None = None
    clip_c: float | None = None
    estimator: str | None = None
    epsilon: float | None = None
    whiten: bool | None = None
    kl_clamp: bool | None = None
    kl_control: tuple[float, int] | None = None
    correction: Correction | None = None


@dataclass(frozen=True)
class Overlong:
    """A penalty that grows over the last `buffer` tokens before `limit`."""

    buffer: int
    factor: float
    limit: int


@dataclass(frozen=True, kw_only=True)
class Rewards:
    """What scores a response.

    Attributes:
        functions, weights: names here; no function switches the rules off.
        keys: keys of functions and weights.
        model, model_weight: a reward model.
        overlong: the penalty of long responses.
    """

    functions: list[str] = field(default_factory=list)
    weights: list[object] | None = None
    keys: tuple[str, str] = ("reward_funcs", "reward_weights")
    model: object = None
    model_weight: object = None
    overlong: Overlong | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Functions and models, sorted, as the plan has them."""
        return tuple(sorted([*self.functions, *([str(self.model)] if self.model else [])]))


@dataclass(frozen=True)
class Layout:
    """Split of a model over devices.

    Attributes:
        engine: "megatron", or one without tensor and pipeline parallelism: "fsdp", "veomni".
    """

    engine: str
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1

    @property
    def devices(self) -> int:
        """Devices that have one copy of the model; devices of experts are among them."""
        return self.tensor * self.pipeline * self.context


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Devices of the roles.

    Attributes:
        actor: devices that train.
        rollout: its own devices; None where it has the actor's.
        roles: role of a run file -> its own devices.
        mode: `trainer_mode` where rollouts run ahead.
    """

    actor: int
    rollout: int | None = None
    roles: Mapping[str, int] = field(default_factory=dict)
    mode: str | None = None


@dataclass(frozen=True, kw_only=True)
class Recipe(SourcePlan):
    """The numbers of a run, and what its run file needs besides; None where options of the table have all keys of a part.

    Attributes:
        placement, batch, rates, adapters, prediction, objective, rewarding: parts that several projects have.
        train_iters, train_epochs: the length of the run; one of them.
        keys: dotted key -> value of what one project has; None is left out.
        notes: key without its group -> the note of the options that make it up, or the reason of a key that no option makes up;
            a key whose name another group has too has the group in front.
        unread: options of the table that this program does not read.
        defaults: dotted key, value and reason of what no option sets; a key that an option has set stays.
        engine_folder: folder that the rollout engine loads; None: the model's folder.
    """

    placement: Placement | None = None
    batch: Batch | None = None
    rates: tuple[Rate, ...] = ()
    adapters: Adapters | None = None
    prediction: Prediction | None = None
    objective: Objective | None = None
    rewarding: Rewards | None = None
    train_iters: int | None = None
    train_epochs: float | None = None
    keys: Mapping[str, object] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)
    unread: tuple[str, ...] = ()
    defaults: tuple[tuple[str, object, str], ...] = ()
    engine_folder: str | None = None

    def complete(self) -> Recipe:
        """Return the record with the numbers of the plan that follow from its parts: prompts, KL, correction and rewards."""
        completions, batch, objective = self.rollout_completions, self.batch, self.objective
        correction = None if objective is None else objective.correction
        return replace(
            self,
            rollout_prompts=None if completions is None or batch is None else completions // batch.group,
            old_policy=self.old_policy or (None if completions is None else "actor"),
            kl_estimator=self.kl_estimator if self.kl_coef else None,
            kl_place=self.kl_place if self.kl_coef else None,
            importance_sampling=self.importance_sampling if correction is None else str(correction),
            rewards=() if self.rewarding is None else self.rewarding.names,
        )


def list_answer_defaults(column: str, reason: str) -> tuple[tuple[str, object, str], ...]:
    """Return `Recipe.defaults` of rows that are conversations in a column, whose last message is the answer."""
    return (
        (f"{ACTOR}.handler_name", "R1SharegptStyleInstructionHandler", reason),
        (f"{ACTOR}.map_keys.messages", column, reason),
        (f"{ACTOR}.map_keys.response", column, reason),
        (f"{ACTOR}.dataset_additional_keys", [column], reason),
    )
