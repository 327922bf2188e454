"""A run before its rules are checked: the keys that a run file leaves out, and every decision that follows from all of them."""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path
from typing import Any, cast

from mindspeed_rl.catalogue import CRITIC_ESTIMATOR, DEFAULT_CORRECTION
from mindspeed_rl.config.errors import ConfigError
from mindspeed_rl.config.keys.rl import Resource, RLConfig
from mindspeed_rl.config.loader import load_run_config
from mindspeed_rl.config.run import CRITIC_FOLDER, Derivation, PlatformName, RunConfig
from mindspeed_rl.config.threads import Threads, decide_threads
from mindspeed_rl.run.batch_sizes import read_sizes, rows_per_replica
from mindspeed_rl.run.deadlines import resolve_deadlines
from mindspeed_rl.run.objective import read_objective, unusable_plugins
from mindspeed_rl.run.placement import Placement, place
from mindspeed_rl.run.record import Run
from mindspeed_rl.run.rules.engine_limits import EngineRequest, engine_limits, engine_obstacles, lacks_model, read_engine_shape
from mindspeed_rl.run.rules.training_engine_rules import trains_other_family

#: devices of a rollout replica at most, which is MindSpeed-RL's fixed value
_MAX_TENSOR = 8
#: rollouts in which a filter of groups fills an iteration, where the run file sets no limit
_MAX_FILTERED_ROLLOUTS = 10
#: keys of a loop that a server does not have, whose clients do
_SERVER_ROLE: dict[str, Any] = {"global_batch_size": 1, "train_iters": 1}


def load_run(config_name: str, config_dir: str | Path | None = None, overrides: Iterable[str] = ()) -> Run:
    """Load a run file as a draft; for arguments and errors see `config.load_run_config` and `draft`."""
    return draft(load_run_config(config_name, config_dir, overrides))


def draft(cfg: RunConfig, num_nodes: int = 1, *, platform: str | None = None, folder: Path | None = None) -> Run:
    """Decide everything that follows from a run file, sound or not: rules, plan page and planner read it.

    Args:
        cfg: the run file.
        num_nodes: machines the devices are spread over.
        platform: name of the device kind where `cfg.platform` is "auto"; None leaves it open.
        folder: the run folder, in place of `cfg.run_dir`.

    Raises:
        ConfigError: an algorithm that the run file names does not exist or cannot be used.
        ValueError: there are no nodes.
    """
    if num_nodes < 1:
        raise ValueError(f"the number of nodes is {num_nodes}, but must be at least 1")
    cfg = _complete_server(cfg)
    if cfg.platform == "auto" and platform is not None:
        cfg = dataclasses.replace(cfg, platform=cast(PlatformName, platform))
    rl = cfg.rl_config
    # before anything is derived from the objective
    if rl is not None and not cfg.is_supervised and (unusable := unusable_plugins(rl, cfg.stage or "ray_grpo")):
        raise ConfigError(unusable)
    return decide(_derive(cfg), num_nodes, platform or cfg.platform, folder)


def decide(cfg: RunConfig, num_nodes: int, platform: str, folder: Path | None = None) -> Run:
    """Return the run of these keys as they are: `draft` after the keys that follow from others are derived."""
    placement = place(cfg)
    sizes = read_sizes(cfg, placement)
    if folder is None:
        default = f"{Path(cfg.config_name).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
        folder = Path(cfg.run_dir) if cfg.run_dir else Path("runs", default)
    return Run(
        config=cfg,
        placement=placement,
        sizes=None if sizes is None else dataclasses.replace(sizes, num_nodes=num_nodes),
        objective=read_objective(cfg),
        platform=platform,
        num_nodes=num_nodes,
        folder=folder.resolve(),
        deadlines=resolve_deadlines(cfg),
        threads=_plan_threads(cfg, placement, num_nodes),
    )


def _plan_threads(cfg: RunConfig, placement: Placement, num_nodes: int) -> Threads | None:
    """Return the threads of each worker; None on devices that compute themselves, whose libraries choose."""
    if cfg.platform != "cpu":
        return None
    num_workers = math.ceil(placement.num_devices / num_nodes)
    return decide_threads(cfg.actor_config.threads_per_worker, max(1, num_workers), os.environ)


def _derive(cfg: RunConfig) -> RunConfig:
    """Return the run file with the keys that follow from others: some that it leaves out, and the critic's folder."""
    if cfg.rl_config is None or cfg.is_supervised:
        return dataclasses.replace(cfg, derived={})
    derived = {f"rl_config.{name}": item for name, item in _derive_algorithm(cfg).items()}
    values = {name.removeprefix("rl_config."): item.value for name, item in derived.items()}
    folder = cfg.derived.get(CRITIC_FOLDER)
    cfg = dataclasses.replace(cfg, rl_config=dataclasses.replace(cfg.rl_config, **values), derived=derived)
    if cfg.generate_config is None:
        return cfg
    set_keys = cfg.set_keys.get("generate_config", frozenset())
    # in this order: a size follows from the engine, and the number of replicas from that
    for name, derivation_rule in _DERIVED.items():
        if name not in set_keys and (derivation := derivation_rule(cfg)) is not None:
            derived[f"generate_config.{name}"] = derivation
            assert cfg.generate_config is not None
            cfg = dataclasses.replace(cfg, generate_config=dataclasses.replace(cfg.generate_config, **{name: derivation.value}))
    return _separate_critic(dataclasses.replace(cfg, derived=derived), folder)


def _complete_server(cfg: RunConfig) -> RunConfig:
    """Return the run file of a server with the keys of a loop, which its clients have; others are as they are."""
    generate = cfg.generate_config
    if cfg.serve_config is None or generate is None:
        return cfg
    budget = cfg.serve_config.max_tokens_per_pass
    rl_keys: dict[str, Any] = {
        "n_samples_per_prompt": 2,
        "max_prompt_length": max(1, generate.max_model_len - 1),
        "use_remove_padding": True,
        "use_dynamic_bsz": True,
        **dict.fromkeys(("update_max_packing_token_size", "actor_max_packing_token_size"), budget),
    }
    role_keys = _SERVER_ROLE
    written = {name: cfg.set_keys.get(name, frozenset()) for name in ("rl_config", "generate_config", "actor_config")}
    written["actor_config"] |= cfg.set_keys.get("megatron_training", frozenset())
    rl = cfg.rl_config or RLConfig(actor_resource=Resource(num_npus=1))
    left = {name: value for name, value in rl_keys.items() if name not in written["rl_config"]}
    role = {name: value for name, value in role_keys.items() if name not in written["actor_config"]}
    if "lora_push" not in written["generate_config"] and cfg.actor_config.lora_target_modules:
        generate = dataclasses.replace(generate, lora_push="adapter")
    actor, shared = (dataclasses.replace(keys, **role) for keys in (cfg.actor_config, cfg.megatron_training))
    return dataclasses.replace(
        cfg,
        rl_config=dataclasses.replace(rl, **left),
        generate_config=generate,
        actor_config=actor,
        megatron_training=shared,
        ref_config=actor if cfg.ref_config is cfg.actor_config else dataclasses.replace(cfg.ref_config, **role),
    )


def _derive_algorithm(cfg: RunConfig) -> dict[str, Derivation]:
    """Return the keys of rl_config that follow from the stage, from the clip ratios and from the filter of groups."""
    rl, set_keys, derived = cfg.rl_config, cfg.set_keys.get("rl_config", frozenset()), dict[str, Derivation]()
    assert rl is not None
    if cfg.stage == "ray_ppo" and "adv_estimator" not in set_keys:
        derived["adv_estimator"] = Derivation(CRITIC_ESTIMATOR, "stage ray_ppo, which trains a critic")
    bounds = [name for name in ("clip_ratio_low", "clip_ratio_high") if name in set_keys]
    if bounds and "clip_higher_enable" not in set_keys:
        derived["clip_higher_enable"] = Derivation(True, f"{' and '.join(bounds)}, which it lets act")
        for name in {"clip_ratio_low", "clip_ratio_high"}.difference(bounds):
            derived[name] = Derivation(rl.clip_ratio, f"clip_ratio {rl.clip_ratio:g}")
    derived |= _derive_passes(cfg, set_keys)
    generate, mismatch = cfg.generate_config, "rollout_importance_sampling_mode"
    is_quantized = generate is not None and generate.quantization is not None
    # a ratio to the engine's own log-probs corrects for it already
    if is_quantized and mismatch not in set_keys and rl.old_log_probs == "trainer":
        assert generate is not None
        source = f"generate_config.quantization {generate.quantization}: the engine samples from a slightly different policy"
        derived[mismatch] = Derivation(DEFAULT_CORRECTION, source)
    if not rl.filter_groups_enable:
        return derived
    functions, sizes = rl.verifier_function, read_sizes(cfg, place(cfg))
    if functions and "filter_groups_metric" not in set_keys and "acc" not in functions:
        derived["filter_groups_metric"] = Derivation(functions[0], "the first reward function")
    if sizes is not None and sizes.can_divide and (prompts := sizes.rollout_prompts) == int(prompts):
        if "filter_groups_train_batch_size" not in set_keys:
            derived["filter_groups_train_batch_size"] = Derivation(int(prompts), f"the {prompts} prompts of a rollout")
        if "filter_groups_max_batches" not in set_keys:
            source = "a limit that stops a run whose groups never vary"
            derived["filter_groups_max_batches"] = Derivation(_MAX_FILTERED_ROLLOUTS, source)
    return derived


def _derive_passes(cfg: RunConfig, set_keys: frozenset[str]) -> dict[str, Derivation]:
    """Return the keys that leave out work of a pass and change no number: padding, and what several samples begin with."""
    rl, derived = cfg.rl_config, dict[str, Derivation]()
    assert rl is not None
    if packs := rl.use_remove_padding or "use_remove_padding" not in set_keys:
        derived["use_remove_padding"] = Derivation(True, "the update is the same without padding")
    if obstacle := "prompts are padded" if not packs else _find_prefix_obstacle(cfg):
        derived["use_prefix_grouper"] = Derivation(False, obstacle)
    else:
        derived["use_prefix_grouper"] = Derivation(True, "the update is the same with what samples begin with computed once")
    return {name: item for name, item in derived.items() if name not in set_keys}


def _find_prefix_obstacle(cfg: RunConfig) -> str | None:
    """Return why samples of a micro-batch cannot share what they begin with, or have nothing in common; None where they can."""
    rl, actor = cfg.rl_config, cfg.actor_config
    assert rl is not None
    if actor.has_ring_attention:
        return "ring attention passes on slices of every sequence"
    if actor.has_dynamic_context:
        return "samples of a prompt that differ in length take different context-parallel sizes"
    if actor.mtp_num_layers:
        return "prediction layers read the token after a prompt, which differs between its samples"
    if rl.dropout_in_update:
        return "each sample has dropout of its own"
    if rl.use_dynamic_bsz and (objective := read_objective(cfg)) is not None and objective.loss.compares_group:
        return "loss_type compares the responses of a prompt, which a token budget may separate"
    return None if rl.n_samples_per_prompt > 1 or rl.multi_turn_enable else "a prompt has one sample"


def _separate_critic(cfg: RunConfig, earlier: Derivation | None) -> RunConfig:
    """Return the run with a folder for the critic's checkpoints where it has the actor's: two in one overwrite each other.

    Args:
        earlier: what an earlier call chose.
    """
    actor, critic = cfg.actor_config, cfg.critic_config
    objective = read_objective(cfg)
    if critic is None or objective is None or not objective.has_critic:
        return cfg
    if earlier is None and actor.save and critic.save:
        # a link, or another spelling, is the same folder
        folders = {os.path.realpath(os.path.expanduser(save)) for save in (actor.save, critic.save)}
        if len(folders) == 1:
            earlier = Derivation(os.path.join(critic.save.rstrip("/"), "critic"), f"{critic.save} is the actor's folder")
    if earlier is None:
        return cfg
    critic = dataclasses.replace(critic, save=str(earlier.value))
    return dataclasses.replace(cfg, critic_config=critic, derived={**cfg.derived, CRITIC_FOLDER: earlier})


def _derive_engine(cfg: RunConfig) -> Derivation | None:
    # standalone servers and servers of the run are vLLM's
    if place(cfg).disaggregated:
        return None
    lacking = lacks_model(read_engine_shape(cfg), cfg.platform)
    reason = f"vLLM has no {lacking} on {cfg.platform}" if lacking else ""
    if not reason and cfg.platform == "cpu" and trains_other_family(cfg):
        reason = "the model is of no family of docs/models.md, and vLLM's CPU build was not tried with it"
    if not reason:
        return None
    return Derivation("transformers", f"{reason}; transformers' own module generates, a response at a time: slow")


def _derive_tensor_size(cfg: RunConfig) -> Derivation | None:
    placement, actor = place(cfg), cfg.actor_config
    if cfg.generate_config is not None and cfg.generate_config.engine == "transformers":
        return Derivation(1, "engine is transformers, which has a full model on each device")
    if placement.servers:
        return Derivation(1, "it is the business of the servers that vllm_server_host names")
    split = actor.tensor_model_parallel_size * actor.pipeline_model_parallel_size
    dedicated = placement.dedicated.get("rollout")
    world = dedicated or placement.world_size or split  # a run whose devices are not set yet has as many
    if world < 1 or split < 1:
        return None
    shape, limit = read_engine_shape(cfg), min(split, _MAX_TENSOR)
    sizes = [size for size in range(limit, 0, -1) if world % size == 0]
    size = next(size for size in sizes if not any(engine_obstacles(shape, EngineRequest(size, 0, "", ""), "")))
    rollout = f"{split} device(s), and {world} generate" if dedicated else f"{split} of the {world} device(s)"
    return Derivation(size, f"the actor's weights lie on {rollout}")


def _derive_length(cfg: RunConfig) -> Derivation:
    assert cfg.rl_config is not None
    prompt, response = cfg.rl_config.max_prompt_length, cfg.response_limit
    needed, seq_length = prompt + response, cfg.actor_config.seq_length or 0
    source = f"max_prompt_length {prompt} + {cfg.response_limit_key.rpartition('.')[2]} {response}"
    return Derivation(needed, source) if needed >= seq_length else Derivation(seq_length, f"seq_length {seq_length}")


def _derive_sequences(cfg: RunConfig) -> Derivation | None:
    sizes = read_sizes(cfg, place(cfg))
    if sizes is None or not sizes.can_divide:
        return None
    responses = Fraction(rows_per_replica(sizes.rollout_samples, sizes.rollout.dp_size))
    limit = engine_limits(cfg.platform).sequences  # beyond this a device gains little, and memory for them runs out
    value = min(-(-responses.numerator // responses.denominator), limit)
    bound = f", at most {limit}" if value == limit else ""
    source = f"{sizes.rollout_samples} responses of a rollout over {sizes.rollout.dp_size} replica(s){bound}"
    return Derivation(value, source)


_DERIVED = {
    "engine": _derive_engine,
    "infer_tensor_parallel_size": _derive_tensor_size,
    "max_model_len": _derive_length,
    "max_num_seqs": _derive_sequences,
}
