"""A run, resolved once: its run file and everything that follows from it, in one record that does not change."""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, cast

from mindspeed_rl.catalogue import CRITIC_ESTIMATOR, DEFAULT_CORRECTION
from mindspeed_rl.config.errors import ConfigError
from mindspeed_rl.config.keys.deadlines import Deadlines, FaultTolerance, resolve_deadlines
from mindspeed_rl.config.keys.generate import GenerateConfig
from mindspeed_rl.config.keys.rl import RLConfig
from mindspeed_rl.config.objective import Objective
from mindspeed_rl.config.placement import Placement
from mindspeed_rl.config.rules.engine_limits import EngineRequest, engine_limits, engine_obstacles, read_engine_shape
from mindspeed_rl.config.rules.validation import missing_for_training, unavailable, validate
from mindspeed_rl.config.run import CRITIC_FOLDER, Derivation, PlatformName, RunConfig
from mindspeed_rl.config.sizes import BatchPlan
from mindspeed_rl.config.threads import Threads, decide_threads

if TYPE_CHECKING:
    from mindspeed_rl.models.plan import RoleModel

#: devices of a rollout replica at most, which is MindSpeed-RL's fixed value
_MAX_TENSOR = 8
#: rollouts in which a filter of groups fills an iteration, where the run file sets no limit
_MAX_FILTERED_ROLLOUTS = 10


@dataclass(frozen=True)
class Run:
    """Everything that driver and workers read of a run.

    Attributes:
        config: the run file.
        plan: its derived numbers; `plan.world_size` counts the devices of the workers that this record is given to.
        placement: devices of every role of the whole run.
        objective: the loss; None in supervised stages.
        platform: name of the device kind, never "auto".
        num_nodes: machines the devices are spread over.
        folder: absolute path of the run folder, which need not exist yet.
        deadlines: limits of every wait.
        threads: number of threads of each worker; None where the libraries choose.
        models: the model of each role ("actor", "ref", "critic", "reward", "teacher", "teacher_1" ...), from
            `trainers.model_plans.plan_models`; empty before.
    """

    config: RunConfig
    plan: BatchPlan
    placement: Placement
    objective: Objective | None
    platform: str
    num_nodes: int
    folder: Path
    deadlines: Deadlines
    threads: int | None = None
    models: Mapping[str, RoleModel] = field(default_factory=dict)

    @property
    def fault_tolerance(self) -> FaultTolerance:
        """Keys of fault_tolerance; supervised stages have the defaults."""
        return FaultTolerance() if self.config.rl_config is None else self.config.rl_config.fault_tolerance

    @property
    def missing_keys(self) -> list[str]:
        """A sentence for each key that training needs and the run file leaves unset."""
        return missing_for_training(self.config)

    @property
    def stage(self) -> str:
        """The kind of training; ray_grpo where the run file has rl_config and names no stage."""
        assert self.config.stage is not None
        return self.config.stage

    @property
    def rl(self) -> RLConfig:
        """Keys of rl_config; for runs with rollouts."""
        assert self.config.rl_config is not None
        return self.config.rl_config

    @property
    def generate(self) -> GenerateConfig:
        """Keys of generate_config; for runs with rollouts."""
        assert self.config.generate_config is not None
        return self.config.generate_config


def resolve(cfg: RunConfig, num_nodes: int = 1, *, platform: str) -> Run:
    """Resolve a run file to a run, without its models.

    Args:
        platform: name of the device kind of this run, also where `cfg.platform` is "auto".

    Raises:
        ConfigError: the run file breaks a rule, or requests a feature that this version does not have.
        ValueError: the run has no length.
    """
    if cfg.platform == "auto":  # some values follow from the device kind, which is known only now
        cfg = derive(dataclasses.replace(cfg, platform=cast(PlatformName, platform)))
    plan = build_batch_plan(cfg, num_nodes)
    if missing := unavailable(cfg):
        raise ConfigError(missing)
    if not plan.train_iters and cfg.actor_config.train_epochs is None:
        epochs = "" if cfg.stage == "pretrain" else ", or set train_epochs"
        group, unit = ("megatron_training", "optimizer steps") if cfg.is_supervised else ("actor_config", "iterations")
        raise ValueError(f"{group}.train_iters: not set; say how many {unit} the run has{epochs}.")
    default = f"{Path(cfg.config_name).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    return Run(
        config=cfg,
        plan=plan,
        placement=cfg.placement,
        objective=cfg.objective,
        platform=platform,
        num_nodes=num_nodes,
        folder=(Path(cfg.run_dir) if cfg.run_dir else Path("runs", default)).resolve(),
        deadlines=resolve_deadlines(cfg),
        threads=None if (threads := plan_threads(cfg, num_nodes)) is None else threads.count,
    )


def plan_threads(cfg: RunConfig, num_nodes: int) -> Threads | None:
    """Return the threads of each worker; None on devices that compute themselves, whose libraries choose."""
    if cfg.platform != "cpu":
        return None
    num_workers = math.ceil(cfg.placement.num_devices / num_nodes)
    return decide_threads(cfg.actor_config.threads_per_worker, max(1, num_workers), os.environ)


def build_batch_plan(cfg: RunConfig, num_nodes: int = 1) -> BatchPlan:
    """Build the derived numbers of a run.

    Raises:
        ConfigError: the run breaks a rule of `validate`; every broken rule is named.
    """
    if violations := validate(cfg, num_nodes):
        raise ConfigError(str(violation) for violation in violations)
    assert cfg.sizes is not None  # a rule requires what it depends on
    return BatchPlan.from_sizes(dataclasses.replace(cfg.sizes, num_nodes=num_nodes), cfg.actor_config.train_iters)


def derive(cfg: RunConfig) -> RunConfig:
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
    # in this order: the number of replicas follows from the first
    for name, derivation_rule in _DERIVED.items():
        if name not in set_keys and (derivation := derivation_rule(cfg)) is not None:
            derived[f"generate_config.{name}"] = derivation
            assert cfg.generate_config is not None
            cfg = dataclasses.replace(cfg, generate_config=dataclasses.replace(cfg.generate_config, **{name: derivation.value}))
    return _separate_critic(dataclasses.replace(cfg, derived=derived), folder)


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
    generate, mismatch = cfg.generate_config, "rollout_importance_sampling_mode"
    if generate is not None and generate.quantization is not None and mismatch not in set_keys:
        source = f"generate_config.quantization {generate.quantization}: the engine samples from a slightly different policy"
        derived[mismatch] = Derivation(DEFAULT_CORRECTION, source)
    if not rl.filter_groups_enable:
        return derived
    functions, sizes = rl.verifier_function, cfg.sizes
    if functions and "filter_groups_metric" not in set_keys and "acc" not in functions:
        derived["filter_groups_metric"] = Derivation(functions[0], "the first reward function")
    if sizes is not None and sizes.can_divide and (prompts := sizes.rollout_prompts) == int(prompts):
        if "filter_groups_train_batch_size" not in set_keys:
            derived["filter_groups_train_batch_size"] = Derivation(int(prompts), f"the {prompts} prompts of a rollout")
        if "filter_groups_max_batches" not in set_keys:
            source = "a limit that stops a run whose groups never vary"
            derived["filter_groups_max_batches"] = Derivation(_MAX_FILTERED_ROLLOUTS, source)
    return derived


def _separate_critic(cfg: RunConfig, earlier: Derivation | None) -> RunConfig:
    """Return the run with a folder for the critic's checkpoints where it has the actor's: two in one overwrite each other.

    Args:
        earlier: what an earlier call chose.
    """
    actor, critic = cfg.actor_config, cfg.critic_config
    if critic is None or cfg.objective is None or not cfg.objective.has_critic:
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


def _derive_tensor_size(cfg: RunConfig) -> Derivation | None:
    placement, actor = cfg.placement, cfg.actor_config
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
    sizes = cfg.sizes
    if sizes is None or not sizes.can_divide:
        return None
    responses = Fraction(sizes.rollout_samples) / Fraction(sizes.rollout.dp_size)
    if responses < 1:
        return None
    limit = engine_limits(cfg.platform).sequences  # beyond this a device gains little, and memory for them runs out
    value = min(-(-responses.numerator // responses.denominator), limit)
    bound = f", at most {limit}" if value == limit else ""
    source = f"{sizes.rollout_samples} responses of a rollout over {sizes.rollout.dp_size} replica(s){bound}"
    return Derivation(value, source)


_DERIVED = {
    "infer_tensor_parallel_size": _derive_tensor_size,
    "max_model_len": _derive_length,
    "max_num_seqs": _derive_sequences,
}
