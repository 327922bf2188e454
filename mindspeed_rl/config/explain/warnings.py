"""What a sound run file may cost its user: time, or the result."""

from __future__ import annotations

from collections.abc import Iterator

from mindspeed_rl.config.keys.megatron import MegatronConfig
from mindspeed_rl.config.keys.turns import response_limit, response_limit_key
from mindspeed_rl.config.run import RunConfig

#: rounds of generation above which a rollout is called slow
_MANY_ROUNDS = 4


def learning_rate(cfg: RunConfig) -> str:
    """Return how the learning rate moves, in numbers; empty where none is set."""
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
    return text


def run_warnings(cfg: RunConfig) -> list[str]:
    """Return a sentence for each thing that costs time or results and that the run file may not have meant."""
    group = "megatron_training" if cfg.is_supervised else "actor_config"
    found = [*_kept(cfg.actor_config, group), *_schedule(cfg, group)]
    if not cfg.is_supervised and cfg.rl_config is not None and cfg.generate_config is not None:
        found += [*_mini_batch(cfg), *_room(cfg), *_rounds(cfg), *_old_tokens(cfg)]
    return found


def _kept(actor: MegatronConfig, group: str) -> Iterator[str]:
    if actor.save is None and not actor.skip_train:
        yield f"{group}.save is not set: the trained weights are lost when the run ends"


def _schedule(cfg: RunConfig, group: str) -> Iterator[str]:
    actor = cfg.actor_config
    written = cfg.set_keys.get(group, frozenset()) | cfg.set_keys.get("megatron_training", frozenset())
    decays = actor.lr_decay_style == "linear" and actor.min_lr == 0.0 and not actor.skip_train
    if actor.lr is not None and decays and not written & {"lr_decay_style", "min_lr"}:
        yield (
            f"{group}.lr_decay_style is not set: the learning rate falls linearly from {actor.lr:g} to 0 at the last "
            "iteration, where nothing is learnt any more; write constant, cosine or linear to choose"
        )


def _mini_batch(cfg: RunConfig) -> Iterator[str]:
    sizes = cfg.sizes
    if sizes is not None and sizes.counting == "prompts" and sizes.mini_batch_size > sizes.mini_batch_prompts:
        yield (
            f"rl_config.mini_batch_size ({sizes.mini_batch_size}) is more than the {sizes.mini_batch_prompts} prompts that an "
            f"iteration trains on: each pass over them makes one optimizer step of {sizes.mini_batch_prompts} prompts"
        )


def _room(cfg: RunConfig) -> Iterator[str]:
    rl, generate = cfg.rl_config, cfg.generate_config
    assert rl is not None and generate is not None
    prompt, response, longest = rl.max_prompt_length, response_limit(cfg), generate.max_model_len
    if prompt + response > longest >= prompt:
        behind = f"behind a prompt of more than {longest - response} tokens" if longest > response else "behind every prompt"
        yield (
            f"rl_config.max_prompt_length + {response_limit_key(cfg)} ({prompt} + {response} = "
            f"{prompt + response}) is more than generate_config.max_model_len ({longest}): a response {behind} ends where both "
            f"together have {longest}, and counts as truncated"
        )


def _rounds(cfg: RunConfig) -> Iterator[str]:
    sizes, at_once = cfg.sizes, cfg.generate_config.max_num_seqs if cfg.generate_config else 0
    if sizes is None or not sizes.can_divide or at_once < 1 or "max_num_seqs" not in cfg.set_keys.get("generate_config", frozenset()):
        return
    share = sizes.rollout_samples / sizes.rollout.dp_size
    if at_once < 32 and share / at_once > _MANY_ROUNDS:
        yield (
            f"generate_config.max_num_seqs is {at_once}: a replica generates its {float(share):g} responses {at_once} at a "
            "time, which is slow; leave the key out to have it derived"
        )


def _old_tokens(cfg: RunConfig) -> Iterator[str]:
    rl = cfg.rl_config
    if rl is None or rl.rollout_importance_sampling_mode is not None or rl.off_policy_token_limit == 0:
        return
    what = {
        "one_step_off": "rl_config.trainer_mode one_step_off",
        "async": f"rl_config.trainer_mode async with max_off_policy_threshold {rl.max_off_policy_threshold:g}",
        "sync": f"rl_config.partial_rollout_max_split {rl.partial_rollout_max_split}",
    }[rl.trainer_mode]
    if (rl.trainer_mode == "async" and rl.max_off_policy_threshold == 0) or (
        rl.trainer_mode == "sync" and rl.partial_rollout_max_split == 1
    ):
        return
    other = "" if rl.trainer_mode == "one_step_off" else ", or off_policy_token_limit: 0 to leave them out"
    yield (
        f"{what} trains on tokens of older weights as if they were new: set rl_config.rollout_importance_sampling_mode "
        f"(token_truncate, for example) to correct for it{other}"
    )
