"""Effects of the keys of a run file: those that differ from their defaults, that do nothing, or that cost time or results."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from mindspeed_rl.catalogue import ADVANTAGES, POLICY_LOSSES, STAGES
from mindspeed_rl.catalogue.objective import Objective
from mindspeed_rl.config.keys import ROLE_GROUPS, find_ignored
from mindspeed_rl.config.keys.diagnostics import MsprobeConfig, ProfilerConfig
from mindspeed_rl.config.keys.megatron import DROPOUT_KEYS, LEFT_OFF_FEATURES, MegatronConfig
from mindspeed_rl.config.keys.rl import RLConfig
from mindspeed_rl.config.keys.schema import Key, Needs, list_keys
from mindspeed_rl.config.run import CRITIC_FOLDER, RunConfig
from mindspeed_rl.run import Run
from mindspeed_rl.run.batch_sizes import Sizes
from mindspeed_rl.run.objective import named_estimator
from mindspeed_rl.run.rules.training_engine_rules import find_idle_reason, trains_other_family
from mindspeed_rl.run.rules.violation import format_value

#: rounds of generation above which a rollout is called slow
_MANY_ROUNDS = 4
#: learning rate of Adam above which a model is lost within a few steps
_HUGE_LR = 0.1
#: limits beyond which speculative decoding was slower, or not faster, in most measurements (docs/speculative.md)
_HIGH_TEMPERATURE, _SHORT_RESPONSE, _LARGE_BATCH = 1.0, 64, 32


def _list_groups(cfg: RunConfig) -> Iterator[tuple[str, object, frozenset[str]]]:
    """Yield (dotted name, dataclass, keys that were set) for every group of a run file."""
    names = ("megatron_training", *ROLE_GROUPS, "rl_config", "generate_config", "msprobe_config", "audit", "serve_config")
    for name in names:
        group = getattr(cfg, name)
        if group is not None and name in cfg.set_keys:
            yield name, group, cfg.set_keys[name]
    if cfg.rl_config is not None and "distillation" in cfg.set_keys.get("rl_config", ()):
        group = cfg.rl_config.distillation
        changed = {name for name, key in list_keys(type(group)).items() if getattr(group, name) != key.default}
        yield "rl_config.distillation", group, frozenset(changed)
    if cfg.generate_config is not None and "sampling_config" in cfg.set_keys:
        yield "generate_config.sampling_config", cfg.generate_config.sampling_config, cfg.set_keys["sampling_config"]
    if "profiler_config" in cfg.set_keys:
        yield "profiler_config.integrated", cfg.profiler_config.integrated, frozenset(list_keys(ProfilerConfig))


def find_changed_keys(cfg: RunConfig) -> dict[str, object]:
    """Return every key that the run file sets to another value than its default, by dotted name."""
    changed: dict[str, object] = {}
    for path, group, set_keys in _list_groups(cfg):
        for name, key in list_keys(type(group)).items():
            value = getattr(group, name)
            if name not in set_keys or name in ("sampling_config", "model") or value == key.default:
                continue
            if dataclasses.is_dataclass(value) and not isinstance(value, type):
                inner = dataclasses.asdict(value).items()
                default = dataclasses.asdict(type(value)())
                changed |= {f"{path}.{name}.{inner_name}": item for inner_name, item in inner if item != default[inner_name]}
            else:
                changed[f"{path}.{name}"] = value
    return changed | {path: value for path, value in cfg.ignored.items() if value != find_ignored(path).default}


#: keys of the profiler that a memory snapshot without a trace reads
_SNAPSHOT_KEYS = frozenset(
    "profile_memory_snapshot stage profile_save_path profile_step_start profile_step_end profile_ranks".split()
)


def find_keys_without_effect(run: Run) -> dict[str, str]:
    """Return every key that the run file sets although it does nothing in this run, by dotted name, each with the reason."""
    cfg = run.config
    reasons: dict[str, str] = {}
    for path, group, set_keys in _list_groups(cfg):
        # the shared group is read through the actor, which may complete it; config.json has the rest of a shape
        role = "actor_config" if path == "megatron_training" else path
        holder = cfg.with_shape(role) if role in ROLE_GROUPS else group
        for name, key in list_keys(type(group)).items():
            if name in set_keys and (reason := _find_reason(run, path, holder, name, key)):
                reasons[f"{path}.{name}"] = reason
    for path in cfg.ignored:
        no_rollout = cfg.is_supervised and path.startswith(("rl_config.", "generate_config."))
        reasons[path] = f"stage {cfg.stage} has no rollout" if no_rollout else find_ignored(path).reason[0]
    return reasons | {name: note for name, note in cfg.deprecated.items() if not note.startswith("read as ")}


def _find_reason(run: Run, path: str, holder: object, name: str, key: Key) -> str:
    """Return the reason why a key does nothing in this run; empty where it does something."""
    cfg = run.config
    if cfg.is_supervised and path.startswith(("rl_config", "generate_config")) and not key.supervised:
        return f"stage {cfg.stage} has no rollout"
    if key.no_effect is not None:
        return key.no_effect[0]
    if key.only_on and cfg.platform not in ("auto", *key.only_on):
        return f"platform is {cfg.platform}; the key matters on {' and '.join(key.only_on)} only"
    if key.needs is not None and (reason := _check_needs(holder, key.needs)):
        return reason
    if key.stages and cfg.stage not in key.stages:
        return f"stage is {cfg.stage}; the key belongs to {', '.join(key.stages)}"
    if isinstance(holder, ProfilerConfig):
        records = holder.profile or holder.profile_memory_snapshot and name in _SNAPSHOT_KEYS
        return "" if records or name == "profile" else "profile is false"
    if isinstance(holder, MsprobeConfig):
        return "" if name == "msprobe" else _find_dump_reason(run, holder, name)
    if isinstance(holder, MegatronConfig):
        return _find_training_reason(run, holder, name)
    return _find_rl_reason(run, name) if path == "rl_config" else ""


def _check_needs(group: object, needs: Needs) -> str:
    """Return the reason why the condition of a key does not hold; empty where it holds."""
    other, values = needs
    actual = getattr(group, other)
    if values == "set":
        if other == "num_experts":
            is_dense = isinstance(group, MegatronConfig) and (group.num_layers or group.num_attention_heads) is not None
            return "the model has no experts" if not actual and is_dense else ""
        return "" if actual else f"{other} is not set"
    holds = actual != 1 if values == "above 1" else actual in values or isinstance(actual, str) and ":" in actual
    return "" if holds else f"{other} is {format_value(actual)}"


def _find_dump_reason(run: Run, dumps: MsprobeConfig, name: str) -> str:
    cfg = run.config
    if not dumps.msprobe:
        return "msprobe is false"
    kinds = ("key_data_dump", "actor_train_dump", "actor_infer_dump", "reference_dump", "critic_train_dump")
    if name == "dump_format" and not any(getattr(dumps, kind) for kind in kinds):
        return "no tensors are dumped"
    if cfg.is_supervised:
        needs_rollout = name in ("actor_infer_dump", "reference_dump", "critic_train_dump")
        return f"stage {cfg.stage} has no rollout" if needs_rollout else ""
    if cfg.rl_config is None or name not in ("reference_dump", "critic_train_dump"):
        return ""
    objective = run.objective
    assert objective is not None
    if name == "reference_dump":
        return "" if objective.needs_ref else "no reference model is needed"
    return "" if objective.has_critic else f"adv_estimator is {cfg.rl_config.adv_estimator}"


def _find_training_reason(run: Run, role: MegatronConfig, name: str) -> str:
    cfg = run.config
    conditions = (
        (name == "num_npus" and not cfg.is_supervised, "rl_config.actor_resource.num_npus decides"),
        (name == "async_save" and role.save is None, "save is not set"),
        (
            name in DROPOUT_KEYS and not cfg.is_supervised and (cfg.rl_config is None or not cfg.rl_config.dropout_in_update),
            "rl_config.dropout_in_update is false: rollout, old log-probs and reference have no dropout either",
        ),
        (
            name in ("eval_interval", "eval_num_prompts") and not role.has_held_out_data,
            _HELD_OUT,
        ),
        (
            name in ("reset_attention_mask", "no_pad_to_seq_lengths") and not cfg.is_supervised,
            "rollouts keep their length, and packed ones always attend only to themselves",
        ),
        (name == "stream_ref_weights" and not run.has_ref, "there is no reference with weights of its own"),
        (name == "stream_ref_weights" and not cfg.ref_config.stream_ref_weights, "ref_config has it false"),
        (
            name == "moe_token_dispatcher_type" and role.moe_token_dispatcher_type == "alltoall_seq",
            "alltoall_seq is read as alltoall, which sends the same tokens",
        ),
    )
    return next((reason for is_idle, reason in conditions if is_idle), find_idle_reason(role, name))


@dataclass(frozen=True)
class _Idle:
    """A condition under which keys of rl_config do nothing.

    Attributes:
        keys: names of the keys, or the start of names with "*".
        when: the condition, of the run and the key.
        reason: the reason, with names of `_list_values` in braces.
    """

    keys: Iterable[str]
    when: Callable[[Run, str], object]
    reason: str

    def concerns(self, name: str) -> bool:
        """Return True for a key that the condition is about."""
        return any(name.startswith(key[:-1]) if key.endswith("*") else name == key for key in self.keys)


# keys that some policy loss, and that some advantage estimator reads
_LOSS_KEYS = frozenset().union(*(record.reads or () for record in POLICY_LOSSES.values()))
_ADVANTAGE_KEYS = frozenset().union(*(record.reads or () for record in ADVANTAGES.values()))
# keys that bound the ratio of new to old policy; these two select the clip ratios
_CLIP_KEYS = ("clip_ratio", "clip_higher_enable")
_KL_KEYS = ("kl_penalty", "kl_ctrl_type", "kl_horizon", "kl_target", "kl_clamp", "use_bias_correction_kl")
_REF_KEYS = ("sync_ref_model", "ref_model_sync_steps", "ref_model_mixup_alpha")
_LOSS, _ESTIMATOR = "loss_type is {loss_type}", "adv_estimator is {adv_estimator}"
_HELD_OUT = "eval_data_path is not set, and split holds nothing back"
_SERVED_JUDGE_KEYS = "judge_max_tokens judge_max_model_len judge_tensor_parallel_size judge_resource".split()

#: the first condition that holds is the reason
_IDLE = (
    _Idle(["beta"], lambda run, _: run.rl.num_generations is None, "without num_generations the coefficient is init_kl_coef"),
    _Idle(
        ["mini_batch_size"],
        lambda run, _: run.rl.num_generations is not None,
        "with num_generations global_batch_size is the optimizer step",
    ),
    _Idle(["clip_ratio"], lambda run, _: run.rl.clip_higher_enable, "clip_higher_enable is true"),
    _Idle(_CLIP_KEYS, lambda run, _: not (_reads(run, "clip_ratio_low") or _reads(run, "clip_ratio_high")), _LOSS),
    _Idle(_LOSS_KEYS, lambda run, name: not _reads(run, name), _LOSS),
    _Idle(
        _LOSS_KEYS.union(_CLIP_KEYS),
        lambda run, _: (
            run.sizes is not None
            and run.sizes.can_divide
            and run.sizes.on_policy
            and not _objective(run).reads_rollout_policy  # whose weights may be older, and whose kernels round otherwise
        ),
        "each rollout makes one optimizer step, in which the ratio is 1",
    ),
    _Idle(["token_level_loss"], lambda run, _: run.rl.loss_type is not None, "loss_type is set"),
    _Idle(["token_level_loss"], lambda run, _: STAGES[run.stage].sequence_loss_type is None, "stage is {stage}"),
    _Idle(_KL_KEYS, lambda run, _: _objective(run).kl_place is None, "{no_kl}"),
    _Idle(_REF_KEYS, lambda run, _: not _objective(run).needs_ref, "{no_kl}"),
    _Idle(["use_kl_in_reward"], lambda run, _: run.rl.use_kl_in_reward and not _objective(run).kl_in_reward, "{no_kl}"),
    _Idle(["use_bias_correction_kl"], lambda run, _: not _objective(run).kl_in_loss, "the KL is in the reward"),
    _Idle(["kl_clamp"], lambda run, _: _objective(run).kl.clamp is None, "kl_penalty is {kl_penalty}"),
    _Idle(["eval_greedy"], lambda run, _: not run.config.actor_config.has_held_out_data, _HELD_OUT),
    _Idle(["eval_greedy"], lambda run, _: run.config.actor_config.eval_temperature is not None, "eval_temperature is set"),
    _Idle(["init_kl_coef"], lambda run, _: run.rl.init_kl_coef and _objective(run).kl_place is None, "{no_kl}"),
    _Idle(["ref_*"], lambda run, _: not _objective(run).needs_ref, "no reference model is needed"),
    _Idle(["critic_*"], lambda run, _: not _objective(run).has_critic, _ESTIMATOR),
    _Idle(
        ["dynamic_sample"],
        lambda run, _: run.rl.dynamic_sample and _objective(run).advantage.group_signal == "none",
        f"{_ESTIMATOR}, whose advantages are not 0 where rewards are equal",
    ),
    _Idle(_ADVANTAGE_KEYS, lambda run, name: not named_estimator(run.rl).may_read(name), _ESTIMATOR),
    _Idle(["cosine_*"], lambda run, _: not _scores_by(run, "cosine"), "no reward function cosine"),
    _Idle(["repetition_*"], lambda run, _: not _scores_by(run, "repetition"), "no reward function repetition"),
    _Idle(["soft_*"], lambda run, _: not _scores_by(run, "soft_overlong"), "no reward function soft_overlong"),
    _Idle(
        ["judge_*"],
        lambda run, _: not (run.rl.judge_url or run.rl.served_judge),
        "neither judge_url nor judge_model is set",
    ),
    _Idle(["judge_vote", "judge_quorum"], lambda run, _: run.rl.num_judge_votes < 2, "each response has one vote"),
    _Idle(["judge_rubric_score"], lambda run, _: run.rl.judge_rubric is None, "judge_rubric is not set"),
    _Idle(_SERVED_JUDGE_KEYS, lambda run, _: run.rl.served_judge is None, "judge_url is set"),
    _Idle(
        ["reward_model_weight"],
        lambda run, _: run.rl.reward_model is None and run.config.reward_config is None,
        "there is no reward model",
    ),
    _Idle(
        ["process_reward_aggregation"],
        lambda run, _: run.config.reward_config is None or not run.config.reward_config.reward_tokens,
        "there is no process reward model (reward_config.reward_tokens)",
    ),
    _Idle(["verifier_timeout"], lambda run, _: run.rl.reward_timeout_s is not None, "reward_timeout_s is set"),
    _Idle(["verifier_parallel"], lambda run, _: run.rl.num_reward_workers is not None, "num_reward_workers is set"),
    _Idle(["verifier_function", "verifier_weight"], lambda run, _: run.rl.reward_funcs is not None, "reward_funcs is set"),
)


def _objective(run: Run) -> Objective:
    assert run.objective is not None
    return run.objective


def _reads(run: Run, name: str) -> bool:
    return _objective(run).loss.may_read(name)


def _scores_by(run: Run, function: str) -> bool:
    """Return True where the function scores, or the one with the scores of ms-swift's."""
    return run.rl.rule_reward and not {function, f"swift_{function}"}.isdisjoint(run.rl.verifier_function)


def _list_values(run: Run) -> dict[str, object]:
    """Return what the reasons of `_IDLE` name."""
    no_kl = "init_kl_coef is 0" if run.rl.init_kl_coef == 0 else f"stage {run.stage} has a KL term only with use_kl_in_reward"
    return {
        "stage": run.config.stage,
        "loss_type": _objective(run).loss_type,
        "adv_estimator": run.rl.adv_estimator,
        "kl_penalty": run.rl.kl_penalty,
        "no_kl": no_kl,
    }


def _find_rl_reason(run: Run, name: str) -> str:
    rl = run.rl
    if name == "use_tensorboard" and rl.use_tensorboard and rl.use_wandb and "tensorboard" not in rl.report_to:
        return "use_wandb is true"
    if run.config.is_supervised:
        return ""
    for idle in _IDLE:
        if idle.concerns(name) and idle.when(run, name):
            return idle.reason.format_map(_list_values(run))
    switch, value = named_estimator(rl).idle.get(name, ("", None))
    return f"{switch} is {value}" if switch and getattr(rl, switch) == value else ""


def describe_learning_rate(cfg: RunConfig) -> str:
    """Return the schedule of the learning rate in numbers; empty where none is set."""
    actor = cfg.actor_config
    if actor.lr is None:
        return ""
    iters = actor.lr_decay_iters or actor.train_iters
    span = "" if iters is None else f" at iteration {iters}"
    if actor.lr_decay_style == "constant":
        text = f"constant {actor.lr:g}"
    else:
        text = f"{actor.lr_decay_style} from {actor.lr:g} to {actor.min_lr:g}{span}"
    if actor.lr_warmup_fraction:
        text += f", after a warm-up from {actor.lr_warmup_init:g} over {actor.lr_warmup_fraction:.0%} of it"
    elif actor.lr_warmup_iters:
        text += f", after a warm-up from {actor.lr_warmup_init:g} over {actor.lr_warmup_iters} iteration(s)"
    if actor.optimizer == "muon":
        scale = {"spectral": "sqrt(max(rows, columns))", "unit_rms_norm": "sqrt(rows / columns)"}
        form = scale.get(actor.muon_scale_mode, "sqrt(max(1, rows / columns))")
        text += f"; muon: a matrix moves by {actor.muon_extra_scale_factor:g} {form} times the orthogonal part of its momentum"
    return text


def find_warnings(run: Run) -> list[str]:
    """Return a sentence for each setting of a sound run file that may cost time or results."""
    cfg = run.config
    warnings = [*_warn_about_training(cfg), *_warn_about_features(cfg), *_warn_about_idle_keys(run)]
    if not cfg.is_supervised and cfg.rl_config is not None and cfg.generate_config is not None:
        warnings += [*_warn_about_sizes(run), *_warn_about_old_tokens(cfg.rl_config), *_warn_about_drafts(cfg)]
    if trains_other_family(cfg):
        group = "megatron_training" if cfg.is_supervised else "actor_config"
        warnings.append(
            f"{group}.engine: the model is of no family of docs/models.md: transformers' module computes it, with padded rows "
            "where it takes no packed ones"
        )
    engine = cfg.derived.get("generate_config.engine")
    if engine is not None and engine.value == "transformers":
        warnings.append(f"generate_config.engine is transformers: {engine.source}")
    if folder := cfg.derived.get(CRITIC_FOLDER):
        warnings.append(f"{CRITIC_FOLDER}: {folder.source}; the checkpoints of the critic are in {folder.value}")
    return warnings


def _warn_about_training(cfg: RunConfig) -> Iterator[str]:
    actor, group = cfg.actor_config, "megatron_training" if cfg.is_supervised else "actor_config"
    if actor.skip_train:
        return
    if actor.save is None:
        yield f"{group}.save is not set: the trained weights are lost when the run ends"
    if actor.lr == 0:
        yield f"{group}.lr is 0: the weights stay as they are"
    elif actor.lr is not None and actor.lr >= _HUGE_LR and actor.optimizer == "adam":
        yield (
            f"{group}.lr is {actor.lr:g}: Adam moves each weight by about as much in a step, which ruins a trained model;"
            " usual are 1e-6 to 1e-4"
        )
    if actor.save is not None and actor.load is not None and (Path(actor.load).expanduser() / "config.json").is_file():
        if Path(actor.save).expanduser().resolve() == Path(actor.load).expanduser().resolve():
            yield (
                f"{group}.save and load are the same folder, {actor.load}: checkpoints are written among the files of the"
                " model, and the next run would start from the checkpoint; give save a folder of its own"
            )
    set_keys = cfg.set_keys.get(group, frozenset()) | cfg.set_keys.get("megatron_training", frozenset())
    decays = actor.lr_decay_style == "linear" and actor.min_lr == 0.0
    if actor.lr is not None and decays and not set_keys & {"lr_decay_style", "min_lr"}:
        yield (
            f"{group}.lr_decay_style is not set: the learning rate falls linearly from {actor.lr:g} to 0 at the last "
            "iteration, where nothing is learnt any more; write constant, cosine or linear to choose"
        )


def _warn_about_features(cfg: RunConfig) -> Iterator[str]:
    roles = {"megatron_training" if cfg.is_supervised else "actor_config": cfg.actor_config, "critic_config": cfg.critic_config}
    for group, role in roles.items() if cfg.platform in ("auto", "npu") else ():
        for name, reason in LEFT_OFF_FEATURES.items() if role is not None else ():
            if getattr(role, name):
                yield f"{group}.{name}: left off where MindSpeed trains, which changes only speed and memory: {reason}"


def _warn_about_idle_keys(run: Run) -> Iterator[str]:
    """Yield a sentence for each reason why keys of the algorithm do nothing, although they were set to a value of their own."""
    cfg = run.config
    changed, keys = find_changed_keys(cfg), dict[str, list[str]]()
    for name, reason in () if cfg.is_supervised else find_keys_without_effect(run).items():
        if name in changed and name.startswith("rl_config.") and name not in cfg.ignored:
            keys.setdefault(reason, []).append(name)
    for reason, names in keys.items():
        yield f"{', '.join(names)}: no effect in this run, because {reason}"


def _warn_about_idle_replicas(sizes: Sizes) -> Iterator[str]:
    """Yield a sentence for each role of which replicas have no work, because there are fewer samples than replicas."""
    if idle := sizes.idle_rollout_replicas:
        yield (
            f"{idle} of the {sizes.rollout.dp_size} rollout replicas are idle: a rollout has {sizes.rollout_samples} samples, "
            "one for each of the others"
        )
    if idle := sizes.idle_actor_replicas:
        yield (
            f"{idle} of the {sizes.actor.dp_size} data-parallel replicas of the actor are idle in the update: an optimizer "
            f"step has {sizes.step_samples} rows, one for each of the others"
        )


def _warn_about_sizes(run: Run) -> Iterator[str]:
    cfg, sizes = run.config, run.sizes
    rl, generate = cfg.rl_config, cfg.generate_config
    assert rl is not None and generate is not None
    if generate.sampling_config.temperature == 0 and rl.n_samples_per_prompt > 1:
        yield (
            f"generate_config.sampling_config.temperature is 0: the {rl.n_samples_per_prompt} responses to a prompt are the"
            " same, so their rewards do not differ and nothing is learnt; usual is 1.0"
        )
    if sizes is not None and sizes.can_divide:
        yield from _warn_about_idle_replicas(sizes)
    if sizes is not None and sizes.counting == "prompts" and sizes.mini_batch_size > sizes.mini_batch_prompts:
        yield (
            f"rl_config.mini_batch_size ({sizes.mini_batch_size}) is more than the {sizes.mini_batch_prompts} prompts that an "
            f"iteration trains on: each pass over them makes one optimizer step of {sizes.mini_batch_prompts} prompts"
        )
    prompt, response, limit = rl.max_prompt_length, cfg.response_limit, generate.max_model_len
    if prompt + response > limit >= prompt:
        after = f"after a prompt of more than {limit - response} tokens" if limit > response else "after every prompt"
        yield (
            f"rl_config.max_prompt_length + {cfg.response_limit_key} ({prompt} + {response} = "
            f"{prompt + response}) is more than generate_config.max_model_len ({limit}): a response {after} ends where both "
            f"together have {limit}, and counts as truncated"
        )
    at_once, is_set = generate.max_num_seqs, "max_num_seqs" in cfg.set_keys.get("generate_config", frozenset())
    if sizes is None or not sizes.can_divide or not 1 <= at_once < 32 or not is_set:
        return
    samples = float(sizes.rollout_samples / sizes.rollout.dp_size)
    if samples / at_once > _MANY_ROUNDS:
        yield (
            f"generate_config.max_num_seqs is {at_once}: a replica generates its {samples:g} responses {at_once} at a "
            "time, which is slow; leave the key out to have it derived"
        )


def _warn_about_drafts(cfg: RunConfig) -> Iterator[str]:
    """Yield a sentence for each reason why speculative decoding will not pay, or was not verified."""
    generate, key = cfg.generate_config, "generate_config.speculative_config"
    drafts = None if generate is None else generate.drafts
    if generate is None or drafts is None:
        return
    temperature, tokens = generate.sampling_config.temperature, generate.sampling_config.max_tokens
    if temperature > _HIGH_TEMPERATURE:
        yield f"{key} will hardly pay at temperature {temperature:g}: few draft tokens are what is sampled"
    if tokens < _SHORT_RESPONSE:
        yield f"{key} will hardly pay with at most {tokens} tokens a response: drafts repeat what was generated before"
    at_once = generate.max_num_seqs
    if at_once > _LARGE_BATCH:
        yield (
            f"{key} will hardly pay while {at_once} responses are generated at once: a step is then as slow as its tokens are "
            "many, draft tokens that are not kept included; it pays in the tail, when few are left"
        )
    method, trains = drafts["method"], cfg.actor_config.mtp_num_layers > 0
    if method in ("eagle", "eagle3"):
        yield f"{key}.method {method}: the draft's weights stay as in its folder, so fewer are kept as the policy learns"
    if method == "mtp" and not trains:
        yield f"{key}.method mtp: its layers stay as in the folder; megatron_training.mtp_num_layers trains and sends them"


def _warn_about_old_tokens(rl: RLConfig) -> Iterator[str]:
    is_corrected = rl.rollout_importance_sampling_mode is not None or rl.old_log_probs == "rollout"
    if is_corrected or rl.off_policy_token_limit == 0:
        return
    key, is_off_policy = {
        "one_step_off": ("trainer_mode one_step_off", True),
        "async": (
            f"trainer_mode async with max_off_policy_threshold {rl.max_off_policy_threshold:g}",
            rl.max_off_policy_threshold != 0,
        ),
        "sync": (f"partial_rollout_max_split {rl.partial_rollout_max_split}", rl.partial_rollout_max_split != 1),
    }[rl.trainer_mode]
    other = "" if rl.trainer_mode == "one_step_off" else ", or off_policy_token_limit: 0 to leave them out"
    if is_off_policy:
        yield (
            f"rl_config.{key} trains on tokens of older weights as if they were new: set "
            f"rl_config.rollout_importance_sampling_mode (token_truncate, for example) to correct for it{other}"
        )
