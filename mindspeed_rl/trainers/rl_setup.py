"""What a reinforcement-learning run is put together from."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mindspeed_rl.checkpoint.model_source import (
    ModelSource,
    check_critic_start,
    check_reward_start,
    check_weights,
    find_model,
    fresh_head_notice,
    lacks_score_head,
    rl_reference,
)
from mindspeed_rl.config import (
    ConfigError,
    MegatronConfig,
    Run,
    num_devices,
    own_critic_devices,
    own_reference_devices,
    own_reward_devices,
    own_rollout_devices,
    rollout_servers,
)
from mindspeed_rl.config.expert_map import check_expert_map
from mindspeed_rl.config.explain.effects import keys_without_effect
from mindspeed_rl.config.keys.megatron import split_shares
from mindspeed_rl.config.placement import RolloutLayout
from mindspeed_rl.data.prompts import PromptDataset, PromptSettings, check_prompt_files, open_prompts
from mindspeed_rl.data.tokenizer import check_tokenizer_files, load_tokenizer
from mindspeed_rl.dataplane import ALIASES as DATA_STRATEGY_ALIASES
from mindspeed_rl.dataplane.client import DataPlane, make_data_plane
from mindspeed_rl.models.model_config import ModelConfig
from mindspeed_rl.models.model_keys import reward_model_config
from mindspeed_rl.observability.console import IterationProgress, StartSteps
from mindspeed_rl.observability.trackers import Trackers
from mindspeed_rl.rewards.dry_run import dry_run_reward_functions
from mindspeed_rl.rewards.static_check import check_reward_functions
from mindspeed_rl.rollout import expert_counts
from mindspeed_rl.runtime.cluster import process_environment, worker_environment
from mindspeed_rl.trainers.advantages import ADVANTAGE_COLUMNS, Advantages
from mindspeed_rl.trainers.evaluation import Evaluator
from mindspeed_rl.trainers.greedy_baselines import GreedyBaselines, NoBaselines
from mindspeed_rl.trainers.model_plans import model_plans
from mindspeed_rl.trainers.model_rewards import ModelRewards, NoModelRewards
from mindspeed_rl.trainers.resume import find_resume_point, with_sound_checkpoint
from mindspeed_rl.trainers.rl import RLTrainer
from mindspeed_rl.trainers.rollout import PROMPT_COLUMNS, PromptLoader
from mindspeed_rl.trainers.rollout_logger import RolloutLogger
from mindspeed_rl.trainers.rollout_modes import make_rollout
from mindspeed_rl.trainers.schedule import Schedule
from mindspeed_rl.trainers.services import OwnEngine, Services
from mindspeed_rl.trainers.wrong_files import check_all
from mindspeed_rl.workers.agents import check_agents, check_tool_columns, tool_schemas
from mindspeed_rl.workers.apart import ServedActorGroup, make_actor_group
from mindspeed_rl.workers.columns import WORKER_COLUMNS, worker_columns
from mindspeed_rl.workers.groups import RewardModelGroup, ScoringGroup
from mindspeed_rl.workers.reward_group import RewardGroup

#: who uses the data plane in this loop, and the columns that each puts
DATA_PLANE_USERS = {
    "trainer": PROMPT_COLUMNS,
    **WORKER_COLUMNS,
    "dynamic_sampling": (),
    "compute_advantage": ADVANTAGE_COLUMNS,
    "metrics": (),
}


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What a run reads before anything is started.

    Attributes:
        held_out: None without evaluation.
    """

    tokenizer: Any
    tokenizer_path: str
    prompts: PromptDataset
    held_out: PromptDataset | None


class RLParts:
    """A reinforcement-learning run, put together piece by piece; see `start.started` for the order.

    Attributes:
        beginning: where the run begins.
        num_devices: of the actors, and of a reward model that has its own.
        log_every: shows every so many iterations.
    """

    log_every = 1

    def __init__(self, run: Run) -> None:
        """Reads everything that can be wrong in files and keys.

        Raises:
            ValueError: a key or file is wrong.
        """
        # first: all that follows looks into the checkpoint that is meant
        run = with_sound_checkpoint(run)
        cfg, actor = run.config, run.config.actor_config
        check_all(_files(run))
        _check_rewards(run)
        source = find_model(actor, "actor_config")
        plans = model_plans(run, source)
        _check_expert_files(run, plans["actor_config"].model_config)
        tokenizer_path = str(Path(actor.tokenizer_name_or_path or source.hf_folder).expanduser())
        tokenizer = load_tokenizer(tokenizer_path, use_fast=not actor.tokenizer_not_use_fast)
        prompts, held_out = run_prompts(run, tokenizer)
        check_agents(run, tokenizer, prompts[0]["prompt_ids"])
        for part in filter(None, (prompts, held_out)):
            check_tool_columns(run.rl, tokenizer, part)
        self._inputs = Inputs(tokenizer, tokenizer_path, prompts, held_out)
        # before the beginning, which has to know how many iterations are left
        self._run = run = with_length(run, len(prompts))
        self.beginning = find_resume_point(run, source)
        _check_models(run, self._inputs, source, self.beginning.iteration or None)
        self._apart = own_reward_devices(cfg) or 0
        self.num_devices = num_devices(cfg)

    @property
    def run(self) -> Run:
        """The run, with its length."""
        return self._run

    def describe(self) -> str:
        """What is read, and what is being started."""
        beside = "".join(f" and {text}" for text in _apart(self._run))
        epochs = self._run.config.actor_config.train_epochs
        length = f"\n{self._run.plan.train_iters} iterations are {epochs:g} passes over them" if epochs else ""
        length += _missing_isolation(self._run)
        starting = f"starting {self._run.plan.world_size} workers{beside} on {self._run.platform} ..."
        return f"{self._inputs.prompts.describe()}{length}\n{self.beginning}\n{starting}"

    def start(self, stack: contextlib.ExitStack, steps: StartSteps) -> Mapping[str, Any]:
        """Data plane, rewards and workers run until the stack is closed; returns the state of a resumed run, else nothing."""
        run, inputs = self._run, self._inputs
        plane = open_data_plane(run)
        stack.callback(plane.close)  # runs last: workers use it until they end
        actors = make_actor_group(run, plane)
        stack.callback(actors.close)
        # they import their libraries while the reward functions are tried
        actors.prepare_workers()
        rewards = RewardGroup(run, plane, inputs.tokenizer_path)
        stack.callback(rewards.close)
        first = inputs.prompts[0]
        # before any model is built: a reward that cannot score is found in seconds
        rewards.check(first["prompt_ids"], first["label"], first["columns"])
        steps.done("the reward functions score a prompt")
        scorers: ScoringGroup = actors
        if self._apart:
            scorers = RewardModelGroup(run, plane)
            stack.callback(scorers.close)
            scorers.set_up(steps)
        engine = None
        if isinstance(actors, ServedActorGroup):
            engine = OwnEngine(
                actors.servers.pool, actors.agents, actors.sampling, actors.servers.loop, actors.keep_alive, actors.generating
            )
        self._services = Services(plane, actors, scorers, rewards, engine)
        self._resumed = actors.set_up(steps)
        return self._resumed

    def logger(self, trackers: Trackers, progress: IterationProgress) -> RolloutLogger:
        """Where the figures of the run go."""
        self._logger = RolloutLogger(self._run, trackers, progress, self._inputs.tokenizer)
        return self._logger

    def trainer(self) -> RLTrainer:
        """The loop, on workers that were started, with the logger that was made."""
        return assemble(self._run, self._services, self._inputs, self._logger, self._resumed)


def _files(run: Run) -> Iterator[Callable[[], object]]:
    """A look at each of the files that the run file names."""
    cfg, actor = run.config, run.config.actor_config
    yield partial(_check_reward_names, run)
    yield partial(find_model, actor, "actor_config")
    if actor.tokenizer_name_or_path is not None:
        yield partial(check_tokenizer_files, Path(actor.tokenizer_name_or_path).expanduser())
    for path in (actor.data_path, actor.eval_data_path):
        if isinstance(path, str):
            yield partial(check_prompt_files, path)
    if cfg.critic_config is not None:
        yield partial(find_model, cfg.critic_config, "critic_config")
    if (reward := reward_model_config(cfg)) is not None:
        yield partial(find_model, reward, "reward_config", "rl_config.reward_model" if run.rl.reward_model else None)


def _check_expert_files(run: Run, model_config: ModelConfig) -> None:
    generate = run.generate
    if generate.eplb_token_collects:
        expert_counts.check_folder(Path(generate.eplb_token_save_path), model_config)
    if generate.expert_map_path and "generate_config.expert_map_path" not in keys_without_effect(run.config):
        devices = RolloutLayout.from_config(generate, run.plan.world_size).expert_ranks
        check_expert_map(
            Path(generate.expert_map_path), len(model_config.moe_layers), model_config.num_moe_experts or 0, devices
        )


def count_prompts(run: Run) -> int:
    """How many prompts the run would train on.

    Raises:
        ValueError: data or tokenizer are not where the keys say, or not usable.
    """
    actor = run.config.actor_config
    folder = actor.tokenizer_name_or_path or find_model(actor, "actor_config").hf_folder
    if not Path(folder).expanduser().is_dir():  # nobody waits for a hub to hear of a plan
        raise ValueError(f"actor_config.tokenizer_name_or_path: {folder} is no folder on this machine.")
    tokenizer = load_tokenizer(Path(folder).expanduser(), use_fast=not actor.tokenizer_not_use_fast)
    train, _, _ = split_shares(actor.split)
    return len(open_run_prompts(run, actor.data_path, tokenizer, "data_path").part(0, train))


def _missing_isolation(run: Run) -> str:
    """The line that says what the sandbox of the reward `code` lacks on this machine; nothing where it is complete."""
    if "code" not in run.rl.verifier_function:
        return ""
    # a process of its own: the sandbox is only made by one without threads
    command = [sys.executable, "-m", "mindspeed_rl.rewards.sandbox"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120.0, check=False)
    missing = ", ".join(found.stdout.split()) if found.returncode == 0 else f"unknown: {found.stderr.strip()[-200:]}"
    return f"\nwarning: programs of the model run without isolation of: {missing} (docs/security.md)" if missing else ""


def _apart(run: Run) -> list[str]:
    """Who has devices of its own besides the actor."""
    cfg = run.config
    tensor = run.generate.infer_tensor_parallel_size
    counts = {
        "for the reward model": own_reward_devices(cfg),
        "for the reference": own_reference_devices(cfg),
        "for the critic": own_critic_devices(cfg),
        f"for rollout servers of {tensor}": own_rollout_devices(cfg),
    }
    found = [f"{count} {what}" for what, count in counts.items() if count]
    servers = rollout_servers(cfg)
    return found + ([f"{len(servers)} rollout server(s) elsewhere"] if servers else [])


def with_length(run: Run, num_prompts: int) -> Run:
    """The run with the iterations that its train_epochs mean for so many prompts; itself where it has train_iters."""
    epochs = run.config.actor_config.train_epochs
    if epochs is None:
        return run
    iters = math.ceil(epochs * num_prompts / run.plan.num_prompts)
    # the learning rate of each role follows its own train_iters
    roles = {
        name: dataclasses.replace(role, train_iters=iters)
        for name in ("megatron_training", "actor_config", "ref_config", "reward_config", "critic_config")
        if (role := getattr(run.config, name)) is not None
    }
    return dataclasses.replace(
        run, config=dataclasses.replace(run.config, **roles), plan=dataclasses.replace(run.plan, train_iters=iters)
    )


def _check_reward_names(run: Run) -> None:
    """Raises ConfigError for reward functions that do not exist."""
    if mistakes := check_reward_functions(run.rl):
        raise ConfigError(mistakes)


def _check_rewards(run: Run) -> None:
    """Raises ConfigError for reward functions that do not exist and plug-ins that do not load."""
    _check_reward_names(run)
    if mistakes := dry_run_reward_functions(run.rl, worker_environment(run.config, run.platform)):
        raise ConfigError(mistakes)


def _check_models(run: Run, inputs: Inputs, actor: ModelSource, goes_on_after: int | None) -> None:
    """Looks for the weights of every role, and says where the critic's head comes from.

    Raises:
        ValueError: weights are missing or of another kind, the critic begins otherwise than the actor, the reference cannot
            be taken from where the keys say, or the reward model cannot read the actor's tokens.
    """
    cfg = run.config
    assert run.objective is not None
    found = [(cfg.actor_config, actor, False)]
    # a shared backbone is the actor's own weights
    if run.objective.needs_reference and not run.rl.share_backbone:
        found.append((*rl_reference(run, actor, goes_on_after)[:2], False))
    if run.objective.has_critic and cfg.critic_config is not None:
        critic = find_model(cfg.critic_config, "critic_config")
        check_critic_start(cfg.critic_config, critic, goes_on_after)
        found.append((cfg.critic_config, critic, True))
        if lacks_score_head(critic):
            print(fresh_head_notice("critic", critic), flush=True)
    reward = reward_model_config(cfg)
    if reward is None:
        _check_weights(found)
        return
    source = find_model(reward, "reward_config", "rl_config.reward_model" if run.rl.reward_model else None)
    check_reward_start(reward, source)
    _check_weights([*found, (reward, source, not reward.reward_tokens)])
    folder = source.hf_folder
    # weights alone say nothing of the tokens that they read
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        return
    other = load_tokenizer(folder, use_fast=not cfg.actor_config.tokenizer_not_use_fast)
    if other.get_vocab() != inputs.tokenizer.get_vocab():
        raise ValueError(
            f"reward_config.load: the tokenizer of {folder} differs from the actor's ({inputs.tokenizer_path}), but the reward "
            "model reads the actor's token ids."
        )


def run_prompts(run: Run, tokenizer: Any) -> tuple[PromptDataset, PromptDataset | None]:
    """Those that train, and those of the evaluations: a dataset of their own, or what `split` holds back."""
    actor = run.config.actor_config
    tools = tool_schemas(run.rl, tokenizer)
    whole = open_run_prompts(run, actor.data_path, tokenizer, "data_path", tools)
    train, validation, _ = split_shares(actor.split)
    prompts = whole if train == 1 else whole.part(0, train)
    if actor.eval_data_path:
        return prompts, open_run_prompts(run, actor.eval_data_path, tokenizer, "eval_data_path", tools)
    return prompts, whole.part(train, train + validation) if validation > 0 else None


def _check_weights(roles: list[tuple[MegatronConfig, ModelSource, bool]]) -> None:
    """Raises ValueError where weights are not those of their config.json; says what is left out of them."""
    said = [sentence for config, source, is_scored in roles for sentence in check_weights(config, source, is_scored=is_scored)]
    for sentence in dict.fromkeys(said):
        print(sentence, flush=True)


def open_run_prompts(run: Run, path: Any, tokenizer: Any, key: str, tools: Sequence[Mapping[str, Any]] = ()) -> PromptDataset:
    """The prompts at `path`, the value of `actor_config.<key>`, read as the run file says.

    Args:
        tools: schemas that raw prompts tell of; prompts of `mindspeed-rl preprocess` have what was told there.
    """
    if not isinstance(path, str):
        raise ValueError(f"actor_config.{key}: {path!r} must be one prefix or file of prompts.")
    actor = run.config.actor_config
    return open_prompts(
        path,
        tokenizer,
        max_prompt_length=run.rl.max_prompt_length,
        dataset_additional_keys=actor.dataset_additional_keys or None,
        settings=dataclasses.replace(_raw_prompts(actor), tools=tuple(tools)),
    )


def _raw_prompts(actor: MegatronConfig) -> PromptSettings:
    """How prompts that were not preprocessed are read."""
    columns = None
    if actor.map_keys is not None:
        columns = {name: column for name, column in dataclasses.asdict(actor.map_keys).items() if column is not None}
    return PromptSettings(
        prompt_type=actor.prompt_type,
        prompt_type_path=_existing(actor.prompt_type_path),
        map_keys=columns,
        handler_name=actor.handler_name,
        enable_thinking="none" if actor.enable_thinking is None else "true" if actor.enable_thinking else "false",
        on_bad_row=actor.on_bad_row,
        system_prompt=actor.system_prompt,
    )


def _existing(path: str | None) -> str | None:
    """The template file of the run file when there is one; the built-in templates otherwise."""
    return path if path and Path(path).is_file() else None


def open_data_plane(run: Run) -> DataPlane:
    """The data plane that the run file asks for, for the users of this loop."""
    rl, plan = run.rl, run.plan
    options: dict[str, Any]
    if DATA_STRATEGY_ALIASES.get(rl.data_strategy, rl.data_strategy) == "tq":  # its sockets have limits of their own
        options = {"num_storage_units": rl.transfer_queue_data_shard_num}
    else:
        options = {"answer_timeout_s": run.deadlines.seconds["data_plane"], "runtime_env": process_environment({})}
    users = {**DATA_PLANE_USERS, **worker_columns(run.config)}
    return make_data_plane(rl.data_strategy, plan.num_prompts, plan.n_samples_per_prompt, users, **options)


def assemble(run: Run, services: Services, inputs: Inputs, logger: RolloutLogger, resumed: Mapping[str, Any]) -> RLTrainer:
    """The loop of this run file on workers that are set up.

    Args:
        resumed: what `ActorGroup.set_up` returned.
    """
    cfg, actor, plane = run.config, run.config.actor_config, services.plane
    model_rewards = NoModelRewards() if reward_model_config(cfg) is None else ModelRewards(run, services.scorers, plane)
    evaluator = Evaluator(run, inputs.held_out, services, model_rewards)
    schedule = Schedule(run)
    baselines: GreedyBaselines | NoBaselines = NoBaselines()
    if "greedy_baseline" in schedule.objective.needs:
        baselines = GreedyBaselines(run, plane, evaluator, model_rewards)
    feed = PromptLoader(inputs.prompts, plane, run.plan, seed=actor.seed, shuffle=not actor.no_shuffle)
    rollout, to_add = make_rollout(run, services, feed, model_rewards)
    if resumed:
        schedule.load_state_dict(resumed["run_state"])
        rollout.load_state_dict(resumed["run_state"]["rollout"])
    advantages = Advantages(run, plane, logger, baselines, schedule)
    start = resumed.get("iteration", 0)
    return RLTrainer(services.actors, rollout, baselines, to_add, advantages, evaluator, schedule, logger, start)
