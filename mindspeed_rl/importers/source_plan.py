"""The numbers of a run by which two projects are compared: what is computed, on how much, in which order of updates."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, TypeVar

from mindspeed_rl.catalogue.objective import Distillation
from mindspeed_rl.config.keys.megatron import MegatronConfig
from mindspeed_rl.run import Run
from mindspeed_rl.run.rules.violation import format_value

_Plan = TypeVar("_Plan", bound="SourcePlan")
_LossLevel = Literal["token", "sequence", "sequence_token"]
#: rollout at which the learning rate is compared, besides the first and the last
_LR_STEP = 10


@dataclass(frozen=True, kw_only=True)
class SourcePlan:
    """The plan of a run; None where the kind of training has no such number.

    The side of the other project comes from its own formulas and defaults, ours from the resolved run file. Names of losses,
    estimators and aggregations have the catalogue's names.

    Attributes:
        stage: as in megatron_training.stage.
        rollout_prompts, rollout_completions: counts of one rollout.
        step_samples: completions (supervised: samples, pairs) of one optimizer step.
        steps_per_rollout: optimizer steps on one rollout, over all its epochs; 1 in supervised stages.
        total_steps: optimizer steps of the run.
        lr_first, lr_10, lr_last: learning rate of the first optimizer step of the first rollout, the one with index 10 and
            the last one; in supervised stages each step is one.
        lr_warmup_steps: optimizer steps of the warm-up.
        loss: policy loss or supervised loss: a name of POLICY_LOSSES that has the formula ("grpo" for all clipped ones), or
            "cross_entropy", "sigmoid", "ranking" and the like.
        level: what the ratio is computed over.
        clip_low, clip_high, clip_c, delta: bounds of the ratio.
        aggregation: "token", "sequence", "constant" or "summed".
        kl_coef: 0 without a KL; `kl_estimator` and `kl_place` ("loss", "reward") are None then.
        beta: coefficient of a preference loss.
        advantage, advantage_scale: estimator, and its divisor: "group", "batch", "none", or None where it has none.
        entropy_coef: coefficient of the entropy bonus.
        gamma, lam: discounts; None for an estimator without them.
        value_clip: range of the critic's clipping; None without a critic.
        critic_lr: learning rate of the critic; None without one.
        divergence: from teachers, where only it is the loss; numbers of a policy loss train nothing then.
        old_policy: what the ratio's denominator is of, where samples are rolled out: "actor", the weights before the update,
            "rollout engine", its own log-probs, or "synced actor", the weights that the engine has last got.
        importance_sampling: correction of the rollout's log-probs and its threshold, as "token_truncate 2"; None without.
        prompt_length, response_length: limits in tokens; supervised stages have `sequence_length`.
        engine: what trains, where the project has several engines; no number of the update depends on it.
        tp, pp, cp, ep, dp: layout of the training; infer_tp of the rollout.
        weights: format of the trained weights and of the optimizer's state where it is not float32.
        lora_rank: 0 where all weights train.
        layers: forms of the model's layers that a command describes; here config.json of the model has them.
        routing: how tokens come to experts where a benchmark decides it instead of the router.
        sample_borders: where the samples of a row end if a benchmark decides it instead of the data.
        prediction_states: what the prediction layers read if it is something else than the states behind the last norm.
        packed_rows: how many rows a step has where packs of tokens are counted instead.
        documents: how samples are made of the documents of pretraining, if not of the joined text.
        row_order: order of the rows where it is none of chance.
        expert_capacity: tokens of an expert beyond which further ones are dropped.
        answer_term: average of the supervised term of a preference loss where it is not over single pairs.
        trained_tokens: tokens of supervised rows that train if they are not the answers' tokens.
        kl_average: average of the KL in the loss where it is not the policy loss's.
        sampled_steps: the steps whose responses the student samples, where others train on those of the data.
        adapter_start: weights of fresh adapters where they are not random A next to a B of zeros.
        adapter_form: what adapters are where they are not the products of LoRA, one for each layer.
        tower: what of a model of images trains next to adapters where it is not adapters of the tower.
        optimizer_state: what the moments of the optimizer are of where it is not the gradients themselves.
        embedding_noise: noise that is added to the embeddings of training.
        early_stop: what ends the run before its last step.
        reward_scale: what rewards are divided by before all else.
        trained_groups: groups of a prompt that train if it is not all of them.
        whitened_over: tokens that advantages are whitened over if it is not all tokens of the batch.
        advantage_bound: absolute value at which advantages are cut.
        value_average: average of the critic's loss if it is not the mean of the tokens.
        rejected_tokens: what becomes of tokens that the rollout's log-probs reject where they lose more than their policy term.
        rewards: names of reward functions and models, sorted.
        data: files or datasets, in order.
        model: the weights that are trained.
    """

    stage: str
    rollout_prompts: int | None = None
    rollout_completions: int | None = None
    step_samples: int
    steps_per_rollout: int = 1
    total_steps: int
    lr_first: float = 0.0
    lr_10: float = 0.0
    lr_last: float = 0.0
    lr_warmup_steps: int = 0
    loss: str
    level: _LossLevel | None = None
    clip_low: float | None = None
    clip_high: float | None = None
    clip_c: float | None = None
    delta: float | None = None
    aggregation: str | None = None
    kl_coef: float = 0.0
    kl_estimator: str | None = None
    kl_place: str | None = None
    beta: float | None = None
    advantage: str | None = None
    advantage_scale: str | None = None
    entropy_coef: float = 0.0
    gamma: float | None = None
    lam: float | None = None
    value_clip: float | None = None
    critic_lr: float | None = None
    divergence: str | None = None
    old_policy: str | None = None
    importance_sampling: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    prompt_length: int | None = None
    response_length: int | None = None
    sequence_length: int | None = None
    engine: str | None = None
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    dp: int = 1
    infer_tp: int | None = None
    weights: str | None = None
    lora_rank: int = 0
    weight_decay: float | None = None
    clip_grad: float | None = None
    layers: str | None = None
    routing: str | None = None
    sample_borders: str | None = None
    prediction_states: str | None = None
    packed_rows: str | None = None
    documents: str | None = None
    row_order: str | None = None
    expert_capacity: str | None = None
    answer_term: str | None = None
    trained_tokens: str | None = None
    kl_average: str | None = None
    sampled_steps: str | None = None
    adapter_start: str | None = None
    adapter_form: str | None = None
    tower: str | None = None
    optimizer_state: str | None = None
    embedding_noise: str | None = None
    early_stop: str | None = None
    reward_scale: str | None = None
    trained_groups: str | None = None
    whitened_over: str | None = None
    advantage_bound: str | None = None
    value_average: str | None = None
    rejected_tokens: str | None = None
    rewards: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
    model: str | None = None

    def follow(self: _Plan, schedule: Schedule) -> _Plan:
        """Return the plan with the learning rates of a schedule over its optimizer steps."""
        rates = schedule.over(self.total_steps, self.steps_per_rollout)
        first, tenth, last = rates.rates
        return dataclasses.replace(self, lr_first=first, lr_10=tenth, lr_last=last, lr_warmup_steps=rates.warmup)


#: value of `SourcePlan.old_policy` where the rollout engine's own log-probs are the old policy's
RECORDED_POLICY = "rollout engine"
#: what a run here always has -> its value, where another project says something else
_ALWAYS_HERE = {
    "layers": "as in config.json",
    "routing": "by the router",
    "sample_borders": "as in the data",
    "prediction_states": "behind the last norm",
    "packed_rows": "a fixed number",
    "documents": "joined, and the text is cut",
    "row_order": "by chance",
    "expert_capacity": "none, no token is dropped",
    "answer_term": "mean of the tokens of a pair",
    "trained_tokens": "the answers'",
    "kl_average": "the policy loss's",
    "adapter_start": "A by chance, B of zeros",
    "adapter_form": "LoRA",
    "tower": "adapters",
    "optimizer_state": "of the gradients",
    "embedding_noise": "none",
    "early_stop": "nothing",
    "reward_scale": "as they are scored",
    "trained_groups": "all",
    "whitened_over": "all tokens of the batch",
    "advantage_bound": "none",
    "value_average": "token",
    "rejected_tokens": "lose their policy term, and count in the mean",
    "weights": "float32",
}
#: numbers that only some projects have
_NAMED_BY_SOME = frozenset(("engine", "divergence"))

#: numbers of a policy loss, which do not matter where only the divergence from teachers trains
_OF_POLICY = tuple("loss level clip_low clip_high clip_c delta advantage advantage_scale old_policy gamma lam".split())

#: names of PLAN fields, which `--accept` takes
PLAN_NUMBERS = tuple(field.name for field in dataclasses.fields(SourcePlan))


@dataclass(frozen=True)
class Rates:
    """Learning rates of a run at its first rollout, the one with index 10 and its last one, and the steps of its warm-up."""

    rates: tuple[float, float, float]
    warmup: int


@dataclass(frozen=True)
class Schedule:
    """A learning rate over optimizer steps, counted from 0.

    Attributes:
        peak: after the warm-up.
        style: "constant", "linear", "cosine", "inverse-square-root" or "WSD".
        warmup: steps of the warm-up.
        start: at step 0 of a warm-up.
        floor: at the end of the decay.
        decay: steps until the floor, warm-up included.
    """

    peak: float
    style: str
    decay: int
    warmup: int = 0
    start: float = 0.0
    floor: float = 0.0

    def rate(self, step: int) -> float:
        """Return the learning rate of the step: Megatron-LM's formulas."""
        if self.warmup and step <= self.warmup:
            return self.start + (self.peak - self.start) * step / self.warmup
        if self.style == "constant":
            return self.peak
        if step > self.decay:
            return self.floor
        if self.style == "inverse-square-root":
            return max(self.floor, self.peak * math.sqrt(max(self.warmup, 1) / max(step, 1)))
        share = (step - self.warmup) / max(1, self.decay - self.warmup)
        if self.style == "cosine":
            left = (math.cos(math.pi * share) + 1) / 2
        elif self.style == "WSD":
            last = max(1, self.decay // 10)
            left = 1 - max(0, step - (self.decay - last)) / last
        else:
            left = 1 - share
        return self.floor + left * (self.peak - self.floor)

    def over(self, total: int, steps_per_rollout: int = 1) -> Rates:
        """Return the learning rates that a plan of so many steps has; see `SourcePlan`."""
        first_of_last = max(0, total - 1) // steps_per_rollout * steps_per_rollout
        tenth = min(_LR_STEP * steps_per_rollout, first_of_last)
        return Rates((self.rate(0), self.rate(tenth), self.rate(first_of_last)), self.warmup)


def read_schedule(actor: MegatronConfig, train_iters: int, steps_per_iteration: int) -> Schedule:
    """Return the learning rate of a run file's role; the keys count iterations."""
    decay = (actor.lr_decay_iters or train_iters) * steps_per_iteration
    fraction = actor.lr_warmup_fraction
    warmup = actor.lr_warmup_iters * steps_per_iteration if fraction is None else int(fraction * decay)
    return Schedule(actor.lr or 0.0, actor.lr_decay_style, decay, warmup, actor.lr_warmup_init, actor.min_lr)


def plan_run(run: Run, rows: int) -> SourcePlan:
    """Return the numbers of a sound run.

    Args:
        rows: rows of its data, which a length in epochs is counted over.
    """
    cfg, plan = run.config, run.plan
    actor, steps = cfg.actor_config, plan.num_optimizer_steps
    iters = plan.train_iters
    if actor.train_epochs is not None:
        iters = math.ceil(actor.train_epochs * rows / plan.num_prompts)
    total = (iters or 0) * steps
    data = actor.data_path if isinstance(actor.data_path, list) else [actor.data_path]
    # a supervised stage's lengths and loss, which a stage with rollouts replaces
    losses = {"dpo": actor.dpo_loss_type, "simpo": f"simpo_{actor.simpo_loss_type}", "kto": actor.kto_loss_type}
    losses |= {"orm": "ranking", "cpo": "cpo", "orpo": "orpo"}
    betas = {"dpo": actor.dpo_beta, "simpo": actor.simpo_beta, "kto": actor.kto_beta}
    betas |= {"cpo": actor.cpo_beta, "orpo": actor.orpo_lambda}
    shared = SourcePlan(
        stage=cfg.stage or "",
        step_samples=plan.mini_batch_size,
        steps_per_rollout=steps,
        total_steps=total,
        loss=losses.get(cfg.stage or "", "cross_entropy"),
        beta=betas.get(cfg.stage or ""),
        sequence_length=actor.seq_length,
        engine=actor.engine,
        tp=actor.tensor_model_parallel_size,
        pp=actor.pipeline_model_parallel_size,
        cp=actor.context_parallel_size,
        ep=actor.expert_model_parallel_size,
        dp=plan.dp_size,
        lora_rank=actor.lora_r if actor.lora_target_modules else 0,
        weight_decay=actor.weight_decay,
        clip_grad=actor.clip_grad,
        data=tuple(str(item) for item in data if item is not None),
        model=actor.base_model or actor.load,
    ).follow(read_schedule(actor, iters or 0, steps))
    return shared if run.objective is None else _plan_rollout(shared, run)


def _plan_rollout(shared: SourcePlan, run: Run) -> SourcePlan:
    """Return the plan of a run that learns from its own rollouts."""
    cfg, plan, objective = run.config, run.plan, run.objective
    rl, generate = cfg.rl_config, cfg.generate_config
    assert rl is not None and generate is not None and objective is not None
    sampling = generate.sampling_config
    # a plug-in's record may leave out which keys it reads
    reads, loss_reads = (record.reads or frozenset() for record in (objective.advantage, objective.loss))
    functions = (rl.verifier_function if rl.reward_funcs is None else rl.reward_funcs) if rl.rule_reward else []
    has_kl, critic = objective.kl_place is not None, cfg.critic_config if objective.has_critic else None
    correction = f"{objective.rollout_importance_sampling_mode} {objective.rollout_importance_sampling_threshold:g}"
    clip_forms = dict.fromkeys(("bnpo", "dapo", "dr_grpo", "gspo", "luspo"), "grpo")
    return dataclasses.replace(
        shared,
        rollout_prompts=plan.num_prompts,
        rollout_completions=plan.num_samples,
        loss=clip_forms.get(objective.loss_type, objective.loss_type),
        level=objective.level,
        clip_low=objective.clip_ratio_low if "clip_ratio_low" in loss_reads else None,
        clip_high=objective.clip_ratio_high if "clip_ratio_high" in loss_reads else None,
        clip_c=objective.clip_ratio_c,
        delta=objective.delta,
        aggregation=objective.normalizer,
        kl_coef=objective.kl_coef if has_kl else 0.0,
        kl_estimator=objective.kl_penalty if has_kl else None,
        kl_place=objective.kl_place,
        advantage=objective.adv_estimator,
        advantage_scale=objective.scale_rewards if "scale_rewards" in reads else None,
        entropy_coef=objective.entropy_coeff,
        gamma=objective.gamma if "gamma" in reads else None,
        lam=objective.lam if "lam" in reads else None,
        value_clip=None if critic is None else objective.cliprange_value,
        critic_lr=None if critic is None else critic.lr,
        divergence=_describe_divergence(objective.distillation),
        sampled_steps=_describe_sampled_steps(objective.distillation, sampling.temperature),
        old_policy=RECORDED_POLICY if objective.reads_rollout_policy else "actor",
        importance_sampling=None if objective.correction is None else correction,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        prompt_length=rl.max_prompt_length,
        response_length=cfg.response_limit,
        infer_tp=generate.infer_tensor_parallel_size,
        rewards=tuple(sorted([*functions, *([rl.reward_model] if rl.reward_model else [])])),
        beta=None,
        sequence_length=None,
    )


def _pair(there: SourcePlan, here: SourcePlan, name: str) -> tuple[object, object]:
    """Return a number of both plans; None for both where it does not matter, or holds here as everywhere."""
    first, second = getattr(there, name), _ALWAYS_HERE.get(name, getattr(here, name))
    is_silent = first is None and name in (*_NAMED_BY_SOME, *_ALWAYS_HERE)
    if is_silent or (there.divergence is not None and here.divergence is not None and name in _OF_POLICY):
        return None, None
    return first, second


def name_divergence(kind: str, beta: float, tokens: tuple[int, str] | None) -> str:
    """Return the text of a divergence from a teacher.

    Args:
        tokens: the teacher's most probable ones and what becomes of the rest; None for the whole vocabulary.
    """
    weight = f" {beta:g}" if kind == "jsd" else ""
    if tokens is None:
        return f"{kind}{weight} over the vocabulary"
    rests = {"drop": "the rest dropped", "lump": "the rest as one more", "renormalize": "renormalized"}
    return f"{kind}{weight} over {tokens[0]} tokens of the teacher, {rests[tokens[1]]}"


def name_sampled_steps(share: float, coefficient: float, temperature: float) -> str | None:
    """Return the text of a mixture of the student's responses and the data's; None where all are the student's.

    Args:
        share: probability of the student's, by step.
        coefficient: weight of the supervised loss on the data's.
        temperature: what that loss divides the logits by.
    """
    if share >= 1.0:
        return None
    supervised = f", with {coefficient:g} times the supervised loss at temperature {temperature:g}" if coefficient else ""
    return f"{share:.3g} of them by chance, the others are on the responses of the data{supervised}"


def _describe_sampled_steps(term: Distillation | None, temperature: float) -> str | None:
    return None if term is None else name_sampled_steps(term.on_policy_fraction, term.supervised_coef, temperature)


def _describe_divergence(term: Distillation | None) -> str | None:
    """Return the divergence of a run whose loss is nothing else; None for others."""
    if term is None or term.use_task_rewards or term.use_policy_gradient or term.estimator is not None:
        return None
    return name_divergence(term.kind, term.beta, (term.topk, term.topk_rest))


def find_differences(
    there: SourcePlan, here: SourcePlan, reasons: Mapping[str, str] = MappingProxyType({})
) -> dict[str, tuple[object, object]]:
    """Return the numbers that differ, with the value there and here.

    A warm-up that was rounded to a neighbouring rollout makes no difference, nor do learning rates that differ by it.

    Args:
        reasons: numbers that are chosen here, and change no update -> reason; they are left out.
    """
    peak = max(there.lr_first, there.lr_10, there.lr_last, here.lr_first, here.lr_10, here.lr_last)
    shift = abs(there.lr_warmup_steps - here.lr_warmup_steps)
    unit = max(there.steps_per_rollout, here.steps_per_rollout)
    # of the highest of these rates, not of the peak that the warm-up may not have reached
    slack = 1.5 * peak * unit / max(1, there.lr_warmup_steps) if 0 < shift <= unit else 0.0
    differences: dict[str, tuple[object, object]] = {}
    for name in PLAN_NUMBERS:
        first, second = _pair(there, here, name)
        if isinstance(first, (int, float)) and isinstance(second, (int, float)):
            is_rate = name.startswith("lr_") and name != "lr_warmup_steps"
            tolerance = max(slack, 1e-6 * peak) if is_rate else unit if name == "lr_warmup_steps" else 0.0
            equal = math.isclose(first, second, rel_tol=1e-6, abs_tol=tolerance)
        else:
            # a project without a limit of prompts: the importer notes the one that it sets
            equal = first == second or (name == "prompt_length" and first is None)
        if not equal and name not in reasons:
            differences[name] = (first, second)
    return differences


def render_plans(
    title: str,
    there: SourcePlan,
    here: SourcePlan,
    accepted: frozenset[str] = frozenset(),
    reasons: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Return a table of both plans, with the reasons of what is chosen; a number that neither has is left out."""
    differences = find_differences(there, here, reasons)
    rows = [("", title, "here", "")]
    for name in PLAN_NUMBERS:
        first, second = _pair(there, here, name)
        if (first, second) not in ((None, None), ((), ())):
            mark = "accepted" if name in accepted else "differs"
            mark = mark if name in differences else reasons.get(name, "") if first != second else ""
            rows.append((name, _format(first), _format(second), mark))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, [*widths, 0])).rstrip() for row in rows]
    return "\n".join(f"  {line}" for line in lines)


def _format(value: object) -> str:
    """Return a number as it is read: six digits at most."""
    if isinstance(value, float):
        return f"{value:.6g}"
    return ", ".join(str(item) for item in value) if isinstance(value, tuple) else format_value(value)
