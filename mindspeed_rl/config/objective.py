"""The objective: every choice that makes up the loss, resolved once from catalogue and run file."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mindspeed_rl.catalogue import (
    ADVANTAGES,
    CORRECTIONS,
    KL_ESTIMATORS,
    LEVELS,
    NORMALIZERS,
    POLICY_LOSSES,
    STAGES,
)
from mindspeed_rl.catalogue.records import (
    AdvantageEstimator,
    Algorithm,
    Correction,
    KlEstimator,
    Level,
    Normalizer,
    PolicyLoss,
    Scale,
    find,
)
from mindspeed_rl.config.keys.rl import DistillationKeys, RLConfig

if TYPE_CHECKING:
    from mindspeed_rl.config.keys.generate import GenerateConfig
    from mindspeed_rl.config.run import RunConfig


#: loss modes over the teacher's most probable tokens -> divergence
_TOP_K_KINDS = {"forward_kl_topk": "forward_kl", "reverse_kl_topk": "reverse_kl", "jsd_topk": "jsd"}
#: entries of teacher_models that are roles of the run
ROLE_TEACHERS = ("actor", "ref")


@dataclass(frozen=True, kw_only=True)
class Distillation:
    """The term of the teachers, of keys in rl_config.distillation with the same names.

    Attributes:
        coef: weight of the divergence; 1 without task rewards.
        weights: weights of the divergences to the teachers that judge a row; one where a column chooses the teacher.
        estimator: estimator of a mode over sampled tokens; None over the teacher's most probable ones.
        teachers: folders of weights, addresses of servers, or roles of the run.
    """

    loss_mode: str
    topk: int
    topk_rest: str
    beta: float
    use_task_rewards: bool
    coef: float
    loss_max_clamp: float | None
    log_prob_min_clamp: float | None
    use_policy_gradient: bool
    weights: tuple[float, ...]
    estimator: KlEstimator | None
    teachers: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """Divergence over the teacher's most probable tokens."""
        return _TOP_K_KINDS[self.loss_mode]

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of the teachers that the loss reads."""
        return ("teacher_log_probs",) if self.estimator is not None else ("teacher_log_probs", "teacher_ids")

    @property
    def models(self) -> dict[str, str]:
        """Teachers with weights of their own: folder -> name of the role's model in `Run.models`."""
        folders = [one for one in dict.fromkeys(self.teachers) if one not in ROLE_TEACHERS and "://" not in one]
        return {folder: f"teacher_{index}" if index else "teacher" for index, folder in enumerate(folders)}

    @property
    def has_servers(self) -> bool:
        """True where the teachers are servers."""
        return any("://" in teacher for teacher in self.teachers)

    def describe(self) -> list[str]:
        """Return the lines of the plan page about the term."""
        names = {
            "forward_kl": "sum p (log p - log q)",
            "reverse_kl": "sum q (log q - log p)",
            "jsd": f"{self.beta:g} KL(p || m) + {1 - self.beta:g} KL(q || m), m = {self.beta:g} p + {1 - self.beta:g} q",
        }
        if self.estimator is not None:
            text = str(self.estimator.formula).replace("pi_ref", "p").replace("pi", "q") + " at sampled tokens"
        else:
            rest = "the rest lumped into one token" if self.topk_rest == "lump" else "the rest dropped"
            text = f"{names[self.kind]} over the teacher's {self.topk} most probable tokens, {rest}"
        if self.loss_max_clamp is not None:
            text += f", within +-{self.loss_max_clamp:g}"
        weights = " ".join(f"{weight:g}" for weight in self.weights)
        mean = "" if len(self.weights) == 1 else f" (mean over teachers, weights {weights})"
        lines = [f"distill     D = {text}{mean}; q the student, p the teacher"]
        if self.use_policy_gradient:
            lines.append(f"advantage   {'A' if self.use_task_rewards else '0'} - {self.coef:g} * D, D without gradient")
        elif not self.use_task_rewards:
            lines.append("distill     no policy term: rewards of the task do not train")
        return lines


@dataclass(frozen=True, kw_only=True)
class Objective:
    """The objective of a reinforcement learning run after every default has been decided; plain values, so it travels.

    Numbers have the names of their keys in rl_config.

    Attributes:
        loss_type, adv_estimator, kl_penalty, rollout_importance_sampling_mode: names of the records below.
        loss, advantage, kl, correction: their records; correction is None without one.
        level: what the ratio new / old is computed over.
        clip_ratio_low, clip_ratio_high: the ratio is clipped to 1 - low .. 1 + high, where the loss clips at all.
        max_response_length: maximum tokens of a response; None where the run file does not set it.
        group_size: responses of a prompt.
        kl_coef: coefficient of the KL the run starts with; for an adaptive one, `dataclasses.replace` gives that of a step.
        kl_place: where the KL to the reference goes; None with a coefficient of 0, or where the stage has no KL.
        distillation: the term of the teachers; None without any.
    """

    loss_type: str
    loss: PolicyLoss
    level: Level
    clip_ratio_low: float
    clip_ratio_high: float
    clip_ratio_c: float | None
    delta: float | None
    tau_pos: float
    tau_neg: float
    vespo_k_pos: float
    vespo_lambda_pos: float
    vespo_k_neg: float
    vespo_lambda_neg: float
    fipo_decay_rate: float
    fipo_clip_range: float
    fipo_clip_high_only: bool
    fipo_safety_threshold: float | None
    dro_beta: float
    clip_cov_ratio: float
    clip_cov_lb: float
    clip_cov_ub: float
    kl_cov_ratio: float
    ppo_kl_coef: float
    real_tau: float
    online_dpo_beta: float
    online_dpo_loss_type: str
    max_response_length: int | None
    entropy_coeff: float
    top_entropy_quantile: float
    off_policy_sequence_mask_delta: float | None
    overlong_filter: bool
    adv_estimator: str
    advantage: AdvantageEstimator
    group_size: int
    scale_rewards: Scale
    adv_epsilon: float
    gamma: float
    lam: float
    advantage_whiten: bool
    cliprange_value: float
    kl_penalty: str
    kl: KlEstimator
    kl_coef: float
    kl_place: Literal["loss", "reward"] | None
    kl_clamp: bool
    use_bias_correction_kl: bool
    kl_ctrl_type: Literal["fixed", "adaptive"]
    kl_target: float
    kl_horizon: int
    rollout_importance_sampling_mode: str | None
    correction: Correction | None
    rollout_importance_sampling_threshold: float
    rollout_importance_sampling_threshold_min: float | None
    log_rollout_offpolicy_metrics: bool
    distillation: Distillation | None = None

    @property
    def normalizer(self) -> Normalizer:
        """Divisor of the summed loss."""
        return self.loss.normalizer

    @property
    def kl_in_loss(self) -> float:
        """Coefficient of the KL in the loss; 0 where it is not there."""
        return self.kl_coef if self.kl_place == "loss" else 0.0

    @property
    def kl_in_reward(self) -> float:
        """Coefficient of the KL in the reward; 0 where it is not there."""
        return self.kl_coef if self.kl_place == "reward" else 0.0

    @property
    def needs(self) -> frozenset[str]:
        """Needs of all parts together: items of `catalogue.records.NEEDS`."""
        parts = (self.loss, self.advantage, self.kl, self.correction)
        needs = {need for part in parts if part is not None for need in part.needs}
        if self.kl_place is not None or (self.distillation is not None and "ref" in self.distillation.teachers):
            needs.add("reference")
        # the KL of a reward is that of the policy that sampled the response, before any update
        if self.kl_place == "reward":
            needs.add("old_log_probs")
        if self.masks_by_entropy:
            needs.add("entropies")
        return frozenset(needs)

    @property
    def needs_reference(self) -> bool:
        """True when reference log-probs are computed at all."""
        return "reference" in self.needs

    @property
    def loss_reads_reference(self) -> bool:
        """True when they reach the loss."""
        return self.kl_place == "loss" or "reference" in self.loss.needs

    @property
    def has_critic(self) -> bool:
        """True when a critic is trained with the actor."""
        return "values" in self.needs

    @property
    def masks_by_entropy(self) -> bool:
        """True when only tokens of high entropy enter the policy term."""
        return self.top_entropy_quantile < 1.0

    def needs_old_log_probs(self, *, on_policy: bool) -> bool:
        """Return True when log-probs and entropies of the policy at the start of the update are computed.

        Args:
            on_policy: each rollout makes one optimizer step, in which the old policy is the present one.
        """
        return not on_policy or not self.needs.isdisjoint(("old_log_probs", "entropies", "squared_probs"))

    @property
    def min_group_size(self) -> int:
        """Responses of a prompt that the advantage estimator compares at least."""
        while_ = self.advantage.groups_while
        return self.advantage.min_group_size if while_ is None or getattr(self, while_[0]) in while_[1] else 1

    def numbers(self) -> dict[str, Any]:
        """Return all settings as plain values, the records left out: what a formula is filled with."""
        values = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        settings = {name: value for name, value in values.items() if not isinstance(value, (Algorithm, Distillation))}
        derived = {"lower": 1 - self.clip_ratio_low, "upper": 1 + self.clip_ratio_high, "others": self.group_size - 1}
        return settings | derived


_FAMILIES: tuple[tuple[dict[str, Any], type[Algorithm]], ...] = (
    (POLICY_LOSSES, PolicyLoss),
    (ADVANTAGES, AdvantageEstimator),
    (KL_ESTIMATORS, KlEstimator),
    (CORRECTIONS, Correction),
)


def _list_plugin_folders(rl: RLConfig) -> tuple[str, ...]:
    """Return the folders of plug-in modules in addition to sys.path: the working directory and those of plug-in files."""
    files = (Path(path).expanduser().resolve() for path in rl.external_plugins)
    # a console script has its folder on sys.path, not the working directory
    return tuple(dict.fromkeys((str(Path.cwd()), *(str(file.parent) for file in files))))


def named_estimator(rl: RLConfig) -> AdvantageEstimator:
    """Return the record that adv_estimator names, before another key may replace it."""
    return find(ADVANTAGES, AdvantageEstimator, rl.adv_estimator, _list_plugin_folders(rl))


def unusable_plugins(rl: RLConfig, stage: str) -> list[str]:
    """Return a sentence for each algorithm of the run file that does not exist, or whose formula cannot be filled in."""
    folders = _list_plugin_folders(rl)
    sentences, records = [], {}
    for table, kind in _FAMILIES:
        name = getattr(rl, kind.key)
        if name is None or name in table:
            continue
        try:
            records[kind] = find(table, kind, name, folders)
        except ValueError as error:
            sentences.append(str(error))
    # formulas are filled with the numbers of an objective, which needs every record
    if not sentences and records:
        numbers = build_objective(rl, stage).numbers()
        for kind, record in records.items():
            where = f"rl_config.{kind.key} is {getattr(rl, kind.key)!r}"
            named = {*(record.reads or ()), *record.bounds, *(choice.setting for choice in record.choices.values())}
            # a broken bound is reported by its key in rl_config, so there has to be one
            bounded = set(record.bounds) - {item.name for item in dataclasses.fields(rl)}
            if unknown := sorted((named - set(numbers)) | bounded):
                sentences.append(f"{where}: its record names {', '.join(unknown)}, no number of an objective")
                continue
            try:
                record.format_formula(numbers)
            except (KeyError, ValueError, TypeError) as error:
                sentences.append(f"{where}: its formula cannot be filled: {type(error).__name__} {error}")
    return sentences


def build_objective(
    rl: RLConfig, stage: str, *, max_response_length: int | None = None, group_size: int | None = None
) -> Objective:
    """Return the objective of a group rl_config, sound or not: rules read it too.

    Args:
        stage: a key of `catalogue.STAGES`.
        max_response_length: maximum tokens that the rollout may sample for a response.
        group_size: responses of a prompt; default n_samples_per_prompt.

    Raises:
        ValueError: a stage without a reinforcement learning objective, an unknown algorithm or an unusable plug-in.
    """
    if stage not in STAGES:
        raise ValueError(f"stage {stage} has no reinforcement learning objective; {', '.join(STAGES)} have one")
    rule, folders = STAGES[stage], _list_plugin_folders(rl)
    loss_type = rl.loss_type
    if loss_type is None:
        # in a stage without a second loss token_level_loss does nothing
        loss_type = rule.loss_type if rl.token_level_loss else rule.sequence_loss_type or rule.loss_type
    loss = find(POLICY_LOSSES, PolicyLoss, loss_type, folders)
    adv_estimator, advantage = rl.adv_estimator, named_estimator(rl)
    if advantage.instead is not None and getattr(rl, advantage.instead[0]) == advantage.instead[1]:
        # ms-swift selects GDPO by scale_rewards
        adv_estimator = advantage.instead[2]
        advantage = ADVANTAGES[adv_estimator]
    mode = rl.rollout_importance_sampling_mode
    low, high = (rl.clip_ratio_low, rl.clip_ratio_high) if rl.clip_higher_enable else (rl.clip_ratio, rl.clip_ratio)
    kl_place: Literal["loss", "reward"] | None = "reward" if rl.use_kl_in_reward else "loss" if rule.kl_in_loss else None
    return Objective(
        loss_type=loss_type,
        loss=loss,
        level=rl.importance_sampling_level or loss.level,
        clip_ratio_low=low,
        clip_ratio_high=high,
        clip_ratio_c=rl.clip_ratio_c,
        delta=rl.delta,
        tau_pos=rl.tau_pos,
        tau_neg=rl.tau_neg,
        vespo_k_pos=rl.vespo_k_pos,
        vespo_lambda_pos=rl.vespo_lambda_pos,
        vespo_k_neg=rl.vespo_k_neg,
        vespo_lambda_neg=rl.vespo_lambda_neg,
        fipo_decay_rate=rl.fipo_decay_rate,
        fipo_clip_range=rl.fipo_clip_range,
        fipo_clip_high_only=rl.fipo_clip_high_only,
        fipo_safety_threshold=rl.fipo_safety_threshold,
        dro_beta=rl.dro_beta,
        clip_cov_ratio=rl.clip_cov_ratio,
        clip_cov_lb=rl.clip_cov_lb,
        clip_cov_ub=rl.clip_cov_ub,
        kl_cov_ratio=rl.kl_cov_ratio,
        ppo_kl_coef=rl.ppo_kl_coef,
        real_tau=rl.real_tau,
        online_dpo_beta=rl.online_dpo_beta,
        online_dpo_loss_type=rl.online_dpo_loss_type,
        max_response_length=max_response_length,
        entropy_coeff=rl.entropy_coeff,
        top_entropy_quantile=rl.top_entropy_quantile,
        off_policy_sequence_mask_delta=rl.off_policy_sequence_mask_delta,
        overlong_filter=rl.overlong_filter,
        adv_estimator=adv_estimator,
        advantage=advantage,
        group_size=rl.n_samples_per_prompt if group_size is None else group_size,
        scale_rewards=rl.scale_rewards,
        adv_epsilon=rl.adv_epsilon,
        gamma=rl.gamma,
        lam=rl.lam,
        advantage_whiten=rl.advantage_whiten,
        cliprange_value=rl.cliprange_value,
        kl_penalty=rl.kl_penalty,
        kl=find(KL_ESTIMATORS, KlEstimator, rl.kl_penalty, folders),
        kl_coef=rl.init_kl_coef,
        # with a coefficient of 0 no reference model is built
        kl_place=kl_place if rl.init_kl_coef else None,
        kl_clamp=rl.kl_clamp,
        use_bias_correction_kl=rl.use_bias_correction_kl,
        kl_ctrl_type=rl.kl_ctrl_type,
        kl_target=rl.kl_target,
        kl_horizon=rl.kl_horizon,
        rollout_importance_sampling_mode=mode,
        correction=None if mode is None else find(CORRECTIONS, Correction, mode, folders),
        rollout_importance_sampling_threshold=rl.rollout_importance_sampling_threshold,
        rollout_importance_sampling_threshold_min=rl.rollout_importance_sampling_threshold_min,
        log_rollout_offpolicy_metrics=rl.log_rollout_offpolicy_metrics,
        distillation=build_distillation(rl.distillation) if rl.distillation.enabled else None,
    )


def build_distillation(keys: DistillationKeys) -> Distillation:
    """Return the term of the teachers."""
    weights = [1.0] if keys.teacher_keys else keys.teacher_weights or [1.0] * len(keys.teacher_models)
    total = sum(weights) or 1.0
    return Distillation(
        loss_mode=keys.loss_mode,
        topk=keys.topk,
        topk_rest=keys.topk_rest,
        beta=keys.beta,
        use_task_rewards=keys.use_task_rewards,
        coef=keys.distillation_loss_coef if keys.use_task_rewards else 1.0,
        loss_max_clamp=keys.loss_max_clamp,
        log_prob_min_clamp=keys.log_prob_min_clamp,
        use_policy_gradient=keys.use_policy_gradient,
        weights=tuple(weight / total for weight in weights) or (1.0,),
        estimator=None if keys.loss_mode in _TOP_K_KINDS else KL_ESTIMATORS[keys.loss_mode],
        teachers=tuple(keys.teacher_models),
    )


def formula(cfg: RunConfig) -> str:
    """Return the loss in use as readable lines with the run's numbers in them."""
    objective = cfg.objective
    if objective is None or cfg.rl_config is None:
        routers = _list_added_losses(cfg)
        terms = "".join(f" + {weight:g} * {name}" for name, (weight, _) in routers.items())
        return "\n".join([_supervised_formula(cfg) + terms, *(f"{name} = {text}" for name, (_, text) in routers.items())])
    numbers = objective.numbers()
    weight = "w * " if objective.correction is not None else ""
    length = "max_tokens" if objective.max_response_length is None else objective.max_response_length
    lines = [
        *_policy_lines(cfg.generate_config),
        f"advantage   A = {_text(objective.advantage, numbers)}",
        f"ratio       {LEVELS[objective.level]}",
        f"policy      L = {weight}{_text(objective.loss, numbers)}",
    ]
    if objective.correction is not None:
        mode, form = objective.rollout_importance_sampling_mode, _text(objective.correction, numbers)
        lines.append(f"weight      w = {mode}(pi_old / pi_rollout) = {form}, w_t that of a token")
    lines.append(f"aggregate   {NORMALIZERS[objective.normalizer].format(max_response_length=length)}")
    lines += _kl_lines(objective, numbers)
    term = objective.distillation
    lines += [] if term is None else term.describe()
    trains_policy = term is None or term.use_task_rewards or term.use_policy_gradient
    terms = "aggregate(L)" if trains_policy else ""
    if term is not None and not term.use_policy_gradient:
        terms += f"{' + ' if terms else ''}{term.coef:g} * aggregate(D)"
    if objective.kl_in_loss:
        terms += f" + {objective.kl_in_loss:g} * aggregate(KL)"
    if coefficient := objective.entropy_coeff:
        terms += f" {'-' if coefficient > 0 else '+'} {abs(coefficient):g} * aggregate(entropy)"
    routers = _list_added_losses(cfg)
    lines += [f"added       {name} = {text}" for name, (_, text) in routers.items()]
    lines.append(f"loss        {terms}{''.join(f' + {weight:g} * {name}' for name, (weight, _) in routers.items())}")
    lines += _masks(cfg.rl_config, objective)
    if objective.has_critic:
        lines.append(f"critic      mean of max((V-R)^2, (clip(V, V_old +- {objective.cliprange_value:g}) - R)^2) / 2")
    return "\n".join(lines)


def _list_added_losses(cfg: RunConfig) -> dict[str, tuple[float, str]]:
    """Return the losses of the actor's routers and prediction layers: name -> (weight, its form); none where it has neither."""
    train, losses = cfg.actor_config, {}
    if count := train.mtp_num_layers:
        detaches = train.mtp_detach_heads if train.mtp_detach_heads is not None else not cfg.is_supervised
        reach = "gradient to these layers alone" if detaches else "gradient to the model before them too"
        text = f"mean over {count} prediction layer(s) k of sum_t -log p_k(token t) / trained tokens; {reach}"
        losses["M"] = (train.mtp_loss_scaling_factor, text)
    if weight := train.dsa_indexer_loss_coeff:
        text = "sum over layers of KL(attention of all heads, scores of the indexer) over chosen tokens, mean over tokens"
        losses["I"] = (weight, f"{text}; gradient to the indexers alone")
    if not train.num_experts:
        return losses
    # where neither the run file nor the model's config.json has one, it is 0
    derived = cfg.derived.get("actor_config.moe_aux_loss_coeff")
    weight = train.moe_aux_loss_coeff if train.moe_aux_loss_coeff is not None else derived.value if derived else 0.0
    kind = train.moe_router_load_balancing_type
    if weight and kind in ("aux_loss", "seq_aux_loss"):
        part = "sequences" if kind == "seq_aux_loss" or train.seq_aux else "micro-batches, by tokens"
        losses["B"] = (float(weight), f"sum over layers with experts of {train.num_experts} sum_e f_e P_e, mean over {part}")
    if train.moe_z_loss_coeff:
        losses["Z"] = (train.moe_z_loss_coeff, "sum over layers with experts of (log sum_e exp(logit_e))^2, mean over tokens")
    return losses


def _policy_lines(generate: GenerateConfig | None) -> list[str]:
    """Return the distribution of all log-probs, which is the full one also where sampling leaves tokens out."""
    if generate is None:
        return []
    keys = generate.sampling_config
    neutral = {"top_k": keys.top_k < 1, "top_p": keys.top_p >= 1.0, "min_p": keys.min_p <= 0.0}
    neutral |= {"repetition_penalty": keys.repetition_penalty == 1.0}
    neutral |= {name: not getattr(keys, name) for name in ("presence_penalty", "frequency_penalty")}
    cuts = [f"{name} {getattr(keys, name):g}" for name, is_neutral in neutral.items() if not is_neutral]
    cuts += [f"structured_output ({', '.join(keys.structured_output)})"] if keys.structured_output else []
    # greedy sampling has no distribution of its own
    text = f"pi          softmax(logits{'' if keys.temperature in (0.0, 1.0) else f' / {keys.temperature:g}'}) over all tokens"
    text += ", in rollout engine and trainer"
    return [f"{text}; {' and '.join(cuts)} limit what is sampled, not pi" if cuts else text]


def _text(record: Algorithm, numbers: dict[str, Any]) -> str:
    """Return the record's formula, or its target where it has none."""
    text = record.format_formula(numbers)
    return f"{record.target} (brings no formula)" if text is None else text


def _kl_lines(objective: Objective, numbers: dict[str, Any]) -> list[str]:
    if objective.kl_place is None:
        return []
    text, limits = _text(objective.kl, numbers), objective.kl.clamp
    if objective.kl_clamp and limits is not None:
        text += f" (d within +-{limits[0]:g}, KL within +-{limits[1]:g})"
    if objective.kl_ctrl_type == "adaptive":
        text += f", adaptive towards {objective.kl_target:g} a token over {objective.kl_horizon} samples"
    if objective.kl_place == "reward":
        return [f"reward      r_t - {objective.kl_in_reward:g} * KL_t, KL = {text}"]
    return [f"KL          {'ratio x ' if objective.use_bias_correction_kl else ''}{text}"]


def _masks(rl: RLConfig, objective: Objective) -> list[str]:
    lines = []
    if objective.off_policy_sequence_mask_delta is not None:
        lines.append(
            "mask        sequences with A < 0 and mean(log pi_old - log pi) > "
            f"{objective.off_policy_sequence_mask_delta:g} are left out"
        )
    if objective.masks_by_entropy:
        fraction = f"{objective.top_entropy_quantile:.0%}"
        lines.append(f"mask        only the {fraction} of tokens with the highest entropy enter the policy term")
    if objective.overlong_filter:
        lines.append("mask        truncated responses are left out")
    if rl.filter_groups_enable:
        lines.append(f"filter      groups whose {rl.filter_groups_metric} does not vary are replaced")
    signal = {"total": "reward does not vary", "parts": "rewards vary in no function"}.get(objective.advantage.group_signal)
    if rl.dynamic_sample and signal:
        lines.append(f"filter      groups whose {signal} are replaced")
    return lines


def _kto_formula(cfg: RunConfig) -> str:
    train = cfg.actor_config
    up, down = (f"{weight:g} * " for weight in (train.kto_desirable_weight, train.kto_undesirable_weight))
    kl, note = " - KL", "\nKL = max(0, mean over the global batch of log pi - log ref of answers to other prompts)"
    if train.kto_loss_type != "kto":
        kl = note = ""
    margin = f"m = {train.kto_beta:g} * (log pi(answer) - log ref(answer){kl})"
    return f"{margin}\nloss = {up}(1 - sigmoid(m)) where the answer is desirable, {down}(1 - sigmoid(-m)) where not{note}"


def _supervised_formula(cfg: RunConfig) -> str:
    train = cfg.actor_config
    z = "z = (log pi(chosen) - log pi(rejected)) - (log ref(chosen) - log ref(rejected))"
    beta, eps = f"{train.dpo_beta:g}", train.dpo_label_smoothing
    # explain shows the formula of a run file with a dpo_beta of 0, which is out of bounds, too
    half = f"{1 / (2 * train.dpo_beta):g}" if train.dpo_beta else "inf"
    preference = {
        "sigmoid": f"loss = -{1 - eps:g} * log sigmoid({beta} z) - {eps:g} * log sigmoid(-{beta} z)",
        "hinge": f"loss = max(0, 1 - {beta} z)",
        "ipo": f"loss = (z - {half})^2, log-probabilities averaged over tokens",
    }
    gamma = f"{train.gamma_beta_ratio * train.simpo_beta:g}"
    margin = f"m = {train.simpo_beta:g} * (mean log pi(chosen) - mean log pi(rejected)) - {gamma}"
    simpo = {"sigmoid": "loss = -log sigmoid(m)", "hinge": "loss = max(0, 1 - m)"}
    forms = {
        "dpo": f"{z}\n{preference[train.dpo_loss_type]}",
        "simpo": f"{margin}\n{simpo[train.simpo_loss_type]}",
        "cpo": f"loss = -log sigmoid({train.cpo_beta:g} * (log pi(chosen) - log pi(rejected))) + {train.cpo_alpha:g} * "
        "(-mean log pi(chosen))",
        "orpo": f"loss = -log p(chosen) + {train.orpo_lambda:g} * (-log sigmoid(log odds(chosen) - log odds(rejected))), "
        "odds = p / (1 - p), log p the mean log pi",
        "kto": _kto_formula(cfg),
        "orm": "loss = -log sigmoid(score(chosen) - score(rejected))",
        "prm": "loss = cross entropy of the reward token at each placeholder",
    }
    weight = "sg[pi(token)] * " if cfg.stage == "sft" and train.sft_loss_type == "dft" else ""
    if cfg.stage == "sft" and train.sft_loss_type in _TOP_K_KINDS.values():
        rest = "lumped into one token" if train.teacher_topk_rest == "lump" else "dropped"
        sums = {"forward_kl": "p (log p - log pi)", "reverse_kl": "pi (log pi - log p)"}
        return (
            f"loss = mean over all trained tokens of the global batch of sum {sums[train.sft_loss_type]} over the teacher's "
            f"stored tokens, p the teacher, the rest {rest}"
        )
    text = forms.get(cfg.stage or "", f"loss = mean over all trained tokens of the global batch of {weight}-log pi(token)")
    if cfg.stage in ("dpo", "simpo") and train.pref_ftx:
        text += f" + {train.pref_ftx:g} * (-log pi(chosen))"
    return text
