"""The set-up of a reinforcement-learning run: read and check the inputs, start the services, build the trainer."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed_rl import registry
from mindspeed_rl.checkpoint.model_source import (
    check_weights,
    describe_fresh_head,
    lacks_score_head,
)
from mindspeed_rl.config import ConfigError
from mindspeed_rl.config.errors import raise_together
from mindspeed_rl.config.expert_map import check_expert_map
from mindspeed_rl.data.card import DataCard
from mindspeed_rl.data.images import describe_images, list_grids, prepare_images, read_references
from mindspeed_rl.data.indexed import check_columns, check_text_only, list_packed_columns
from mindspeed_rl.data.prompts import PromptDataset, check_prompt_files, split_slice
from mindspeed_rl.data.tokenizer import check_tokenizer, check_tokenizer_files, hash_vocabulary, load_tokenizer
from mindspeed_rl.dataplane import ALIASES as DATA_STRATEGY_ALIASES
from mindspeed_rl.dataplane.client import DataPlane, make_data_plane
from mindspeed_rl.files import read_json
from mindspeed_rl.models.costs import kv_bytes_per_token
from mindspeed_rl.observability.console import StartSteps
from mindspeed_rl.observability.trackers import find_trackers
from mindspeed_rl.rewards.dry_run import DryRun, Trial, dry_run_reward_functions
from mindspeed_rl.rewards.judge import JudgeForm
from mindspeed_rl.rewards.judge_trial import try_judges
from mindspeed_rl.rewards.labels import try_labels
from mindspeed_rl.rewards.pool import RewardPool
from mindspeed_rl.rewards.samples import RewardSample, RewardSettings
from mindspeed_rl.rewards.static_check import check_reward_functions
from mindspeed_rl.rewards.totals import read_part_weights
from mindspeed_rl.rollout.expert_counts import ExpertCounts
from mindspeed_rl.rollout.trajectory import make_trial_columns
from mindspeed_rl.run import Run
from mindspeed_rl.run.audit_rewards import derive_audit_rewards, derive_audit_settings
from mindspeed_rl.run.columns import list_worker_columns
from mindspeed_rl.run.explain.effects import find_keys_without_effect
from mindspeed_rl.run.length import resolve_length
from mindspeed_rl.run.machine import describe_machine, list_machine_checks
from mindspeed_rl.run.models import check_outputs, list_source_checks, plan_models
from mindspeed_rl.run.paths import with_absolute_paths
from mindspeed_rl.run.resume import ResumePoint, select_sound_checkpoint
from mindspeed_rl.run.rules.validation import missing_for_training
from mindspeed_rl.runtime.cluster import build_runtime_env, build_worker_environment
from mindspeed_rl.tools.environment_check import check_environment
from mindspeed_rl.tools.environments import open_environment, read_environment
from mindspeed_rl.trainers.advantages import Advantages
from mindspeed_rl.trainers.batch_records import batch_recorders
from mindspeed_rl.trainers.best_evaluation import EvaluationProgress
from mindspeed_rl.trainers.evaluation import Evaluator, GreedyBaselines, select_sets
from mindspeed_rl.trainers.mismatch import EngineMismatch
from mindspeed_rl.trainers.model_rewards import ModelRewards, ServedJudge
from mindspeed_rl.trainers.prompt_loader import (
    PromptLoader,
    describe_data,
    describe_order,
    describe_overlap,
    describe_prompts,
    list_prompt_paths,
    load_audit_prompts,
    load_eval_sets,
    load_prompts,
    name_prompt_key,
)
from mindspeed_rl.trainers.prompt_sampling import PromptOrder, build_prompt_sampler
from mindspeed_rl.trainers.reward_audit import (
    ResponseDiversity,
    RewardAuditor,
    open_audit_pool,
    select_audit_items,
)
from mindspeed_rl.trainers.rl import RLTrainer
from mindspeed_rl.trainers.rollout_logger import RolloutLogger
from mindspeed_rl.trainers.rollout_modes import build_rollout
from mindspeed_rl.trainers.run_logger import LogOutputs
from mindspeed_rl.trainers.schedule import Schedule
from mindspeed_rl.trainers.termination import Termination
from mindspeed_rl.workers.agents import check_agents, check_tool_columns
from mindspeed_rl.workers.fleet import Fleet
from mindspeed_rl.workers.responses import read_image_rules
from mindspeed_rl.workers.reward_group import RewardGroup, SampleReader
from mindspeed_rl.workers.teacher_servers import TeacherServers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_GIB = 1 << 30
#: users of the data plane in this loop, and the columns that each puts
DATA_PLANE_USERS = {
    "trainer": PromptLoader.COLUMNS,
    **list_worker_columns(),
    "dynamic_sampling": (),
    "compute_advantage": Advantages.COLUMNS,
    "metrics": (),
}


@dataclass(frozen=True)
class RLInputs:
    """The inputs of a run, read and checked before anything is started.

    Attributes:
        run: with its length.
        held_out: None without evaluation.
        num_devices: number of devices of all roles.
        summary: lines for the console.
        cards: descriptions of the prompts, and of the held-out ones.
        judge: requests to the judge that the run serves; None without one.
        images: a line with the tokens of images; empty for a model of text.
        eval_sets: further held-out prompts, by name.
        audit_prompts: prompts of the audit; None where it uses the evaluation's.
    """

    run: Run
    tokenizer: PreTrainedTokenizerBase
    tokenizer_path: str
    prompts: PromptDataset
    held_out: PromptDataset | None
    resume: ResumePoint
    num_devices: int
    summary: str
    cards: Sequence[DataCard]
    judge: ServedJudge | None = None
    images: str = ""
    eval_sets: Mapping[str, PromptDataset] = field(default_factory=dict)
    audit_prompts: PromptDataset | None = None


@dataclass(frozen=True)
class _Services:
    """Data plane and workers of a run, all of them running.

    Attributes:
        rewards: the reward functions.
        resumed: the record of the checkpoint that the run resumes from; empty for a new run.
        audit_pool: the stricter check of the audit; None for a run without one.
    """

    plane: DataPlane
    actors: Fleet
    rewards: RewardGroup
    resumed: Mapping[str, Any]
    audit_pool: RewardPool | None = None


# ---------------------------------------------------------------------- read and check


def check_rl(run: Run) -> RLInputs:
    """Read and check all files and keys of a run.

    Raises:
        ValueError: a key or file is wrong.
    """
    # first: all that follows reads the checkpoint that is selected here
    run = select_sound_checkpoint(run)
    actor = run.config.actor_config
    raise_together(_file_checks(run))
    env = build_worker_environment(run.config, run.platform)
    if violations := check_reward_functions(run.rl):
        raise ConfigError(violations)
    functions = dry_run_reward_functions(run.rl, env)
    if functions.violations:
        raise ConfigError(functions.violations)
    _check_audit(run, env)
    run = plan_models(run)
    resume = run.resume
    assert resume is not None
    _check_weights(run)
    _check_engine_files(run)
    _check_cache_room(run)
    tokenizer_path = str(Path(actor.tokenizer_name_or_path or run.models["actor"].source.hf_folder).expanduser())
    tokenizer = load_tokenizer(tokenizer_path, use_fast=not actor.tokenizer_not_use_fast)
    warnings = check_tokenizer(tokenizer, run.vocab_sizes, tokenizer_path)
    _check_tokenizers(run, tokenizer, tokenizer_path)
    for key, value in list_prompt_paths(run).items():
        path = split_slice(value)[0] if isinstance(value, str) else ""
        if path and list_packed_columns(path):
            check_columns(Path(path), run.models["actor"].plan.model_config.vocab_size, name_prompt_key(key))
    prompts, held_out = load_prompts(run, tokenizer)
    eval_sets, audit_prompts = load_eval_sets(run, tokenizer), load_audit_prompts(run, tokenizer)
    # raises where a column of the prompts is missing
    prompt_order = PromptOrder.from_config(run.rl)
    build_prompt_sampler(prompt_order, prompts, seed=actor.seed, shuffle=not actor.no_shuffle)
    check_agents(run, tokenizer, prompts[0]["prompt_ids"])
    warnings += _try_rewards(run, functions, env, prompts, tokenizer)
    overlaps = [line for each in (held_out, *eval_sets.values()) for line in describe_overlap(prompts, each)]
    warnings = [*describe_prompts(prompts, run.plan.num_prompts), *overlaps, *warnings]
    warnings += _describe_weights(run)
    for warning in [*describe_machine(run), *warnings]:
        print(f"warning: {warning}", flush=True)
    for dataset in filter(None, (prompts, held_out, *eval_sets.values(), audit_prompts)):
        dataset.check_token_ids(run.models["actor"].plan.model_config.vocab_size, "megatron_training.data_path")
        check_tool_columns(run.rl, tokenizer, dataset)
    described = describe_order(prompts, prompt_order, seed=actor.seed, shuffle=not actor.no_shuffle)
    order_change = resume.describe_order_change(described)
    done = resume.state.get("rollout_prompts", resume.iteration * run.plan.num_prompts)
    run = resolve_length(run, len(prompts), (resume.iteration, done))
    term = None if run.objective is None else run.objective.distillation
    if term is not None and term.has_servers:
        TeacherServers(term, run.rl.distillation, None, run.deadlines.rows_s).check(tokenizer, prompts[0]["prompt_ids"])
    judge = None
    if run.rl.served_judge is not None:
        judge = ServedJudge(RewardSettings.from_config(run.rl, max_tokens=run.config.response_limit), tokenizer)
    cards = describe_data(run, prompts, held_out, eval_sets, tokenizer)
    images = _describe_prompt_images(run, prompts)
    lines = [*map(str, cards), images, *_describe_iterations(run), str(resume), order_change]
    lines.append(f"starting {_describe_devices(run)} on {run.platform} ...")
    devices, summary = run.placement.num_devices, "\n".join(filter(None, lines))
    run = with_absolute_paths(run)
    return RLInputs(
        run,
        tokenizer,
        tokenizer_path,
        prompts,
        held_out,
        resume,
        devices,
        summary,
        cards,
        judge,
        images,
        eval_sets,
        audit_prompts,
    )


def _check_audit(run: Run, env: Mapping[str, str]) -> None:
    """Raise ConfigError where the stricter check of the audit cannot be loaded."""
    audit = run.config.audit
    if not audit.has_check:
        return
    rewards = derive_audit_rewards(run.rl, audit)
    if violations := check_reward_functions(rewards) or dry_run_reward_functions(rewards, env).violations:
        raise ConfigError(re.sub(r"rl_config\.(verifier_function|environment)", r"audit.\1", text) for text in violations)
    if audit.environment is not None:
        registry.search_folders(run.config.plugin_folders)
        try:
            check_environment(audit.environment, "audit.environment")
            open_environment(read_environment(audit.environment), rewards.external_plugins)
        except ValueError as error:
            raise ValueError(str(error).replace("rl_config.environment", "audit.environment")) from error
    if audit.judge_prompt is not None:
        JudgeForm(derive_audit_settings(run.rl, audit, max_tokens=run.config.response_limit))


def _try_rewards(
    run: Run, functions: DryRun, env: Mapping[str, str], prompts: PromptDataset, tokenizer: PreTrainedTokenizerBase
) -> list[str]:
    """Try the labels and, on the first prompt, the reward functions; return warnings.

    Raises:
        ConfigError: a label has another form, a column is missing, or a function fails.
    """
    rl, first = run.rl, prompts[0]
    warnings, errors = try_labels(rl.verifier_function if rl.rule_reward else [], prompts)
    columns = first["columns"] | (make_trial_columns() if rl.multi_turn_enable else {})
    if errors := functions.find_missing(first["label"], columns) or errors:
        raise ConfigError(errors)
    reader = SampleReader(tokenizer, rl.verifier_reads, run.config.response_limit)
    sample = reader.read_trial(first, multi_turn=rl.multi_turn_enable)
    if functions.required:
        trial = Trial(sample, RewardSettings.from_config(rl, max_tokens=run.config.response_limit))
        if violations := dry_run_reward_functions(rl, env, trial=trial).violations:
            raise ConfigError(violations)
    return [*warnings, *_try_judges(run, sample)]


def _try_judges(run: Run, sample: RewardSample) -> list[str]:
    """Ask the judges of the run, and that of its audit, about a response; return warnings.

    Raises:
        ValueError: judges that are needed give no score.
    """
    limit, warnings = run.config.response_limit, list[str]()
    if run.rl.judge_url is not None:
        warnings += try_judges(RewardSettings.from_config(run.rl, max_tokens=limit), sample)
    if run.config.audit.judge_url is not None:
        try:
            try_judges(derive_audit_settings(run.rl, run.config.audit, max_tokens=limit), sample)
        except ValueError as error:
            raise ValueError(re.sub(r"rl_config\.(judge_(?:url|prompt|parser))", r"audit.\1", str(error))) from error
    return warnings


def _describe_prompt_images(run: Run, prompts: PromptDataset) -> str:
    """Return a line with the tokens of the first prompts' images; empty for a model of text."""
    rules = read_image_rules(run.models["actor"])
    if rules is None:
        return ""
    rows = [read_references(prompts[index]["columns"]) for index in range(min(8, len(prompts)))]
    return describe_images(rules, [list_grids(prepare_images(rules, row)) for row in rows])


def _describe_iterations(run: Run) -> Iterator[str]:
    """Yield a line for a length in epochs, and for programs of the model that are not isolated."""
    if epochs := run.config.actor_config.train_epochs:
        yield f"{run.plan.train_iters} iterations are {epochs:g} passes over them"
    if "code" in run.rl.verifier_function and (missing := _find_missing_isolation()):
        yield f"warning: programs of the model run without isolation of: {missing} (docs/security.md)"


def _file_checks(run: Run) -> Iterator[Callable[[], object]]:
    """Yield a check of each file that the run file names."""
    actor = run.config.actor_config

    def check_reward_names() -> None:
        if violations := check_reward_functions(run.rl):
            raise ConfigError(violations)

    yield check_reward_names
    yield from list_machine_checks(run)
    yield partial(check_outputs, missing_for_training(run), {"run_dir": run.folder, "save": actor.save})
    yield partial(find_trackers, run.rl.tracker_names)
    yield from list_source_checks(run)
    if actor.tokenizer_name_or_path is not None:
        yield partial(check_tokenizer_files, Path(actor.tokenizer_name_or_path).expanduser())
    for key, path in list_prompt_paths(run).items():
        if isinstance(path, str):
            yield partial(check_prompt_files, path, key)
            if run.config.is_text_only:
                yield partial(_check_text_only, path, key, leaves_out_tower=actor.language_model_only)
    if run.rl.judge_prompt is not None or run.rl.judge_rubric is not None:
        yield partial(JudgeForm, RewardSettings.from_config(run.rl, max_tokens=run.config.response_limit))


def _check_text_only(path: str, key: str, *, leaves_out_tower: bool) -> None:
    try:
        check_text_only(split_slice(path)[0], leaves_out_tower=leaves_out_tower)
    except ValueError as error:
        raise ValueError(f"actor_config.{key}: {error}") from error


def _describe_weights(run: Run) -> list[str]:
    """Return a warning where nothing that scores has a weight."""
    rl = run.rl
    others = rl.multi_turn_enable or rl.distillation.enabled or run.config.reward_model_keys is not None
    if not rl.rule_reward or not rl.verifier_weight or any(rl.verifier_weight) or others:
        return []
    return ["all weights of rl_config.verifier_weight are 0: rewards are measured, and none trains"]


def _check_cache_room(run: Run) -> None:
    """Raise ValueError where the KV cache that the run file sets has no room for one sequence.

    Models with windows of attention keep less than all tokens; their engine checks its cache itself.
    """
    generate, model_config = run.generate, run.models["actor"].plan.model_config
    if run.platform != "cpu" or generate.kv_cache_memory_gib is None or model_config.sliding_window is not None:
        return
    token = kv_bytes_per_token(model_config, generate.cache_itemsize, generate.infer_tensor_parallel_size)
    needed = token * generate.max_model_len / _GIB
    if generate.kv_cache_memory_gib < needed:
        raise ValueError(
            f"generate_config.kv_cache_memory_gib: {generate.kv_cache_memory_gib:g} GiB, but one sequence of max_model_len="
            f"{generate.max_model_len} tokens takes {needed:.3g} GiB, and generation is fast with many at a time; leave the key"
            " out for a size that follows max_num_seqs"
        )


def _check_engine_files(run: Run) -> None:
    """Check files of the rollout engine: maps and counts of experts, and the draft's vocabulary."""
    generate, model_config = run.generate, run.models["actor"].plan.model_config
    drafts = generate.drafts
    if drafts is not None and drafts["method"] == "draft_model":
        key, folder = "generate_config.speculative_config.model", Path(str(drafts["model"])).expanduser()
        size = read_json(folder / "config.json").get("vocab_size")
        if size != model_config.vocab_size:
            raise ValueError(
                f"{key}: the model in {folder} has {size} tokens and the policy {model_config.vocab_size}; a draft needs the "
                "policy's vocabulary"
            )
    if generate.eplb_token_collects:
        ExpertCounts.check_folder(Path(generate.eplb_token_save_path), model_config)
    if generate.expert_map_path and "generate_config.expert_map_path" not in find_keys_without_effect(run):
        assert run.placement.engines is not None  # every run with rollouts has them
        experts, devices = model_config.num_moe_experts or 0, run.placement.engines.expert_ranks
        check_expert_map(Path(generate.expert_map_path), len(model_config.moe_layers), experts, devices)


def _check_weights(run: Run) -> None:
    """Check the weights of every role, and report where the critic's head comes from.

    Raises:
        ValueError: weights are of another kind.
    """
    if (critic := run.models.get("critic")) is not None and lacks_score_head(critic.source):
        print(describe_fresh_head("critic", critic.source), flush=True)
    warnings = [
        text
        for role, model in run.models.items()
        for text in check_weights(
            model.config, model.source, is_scored=role == "critic" or role == "reward" and not model.config.reward_tokens
        )
    ]
    for text in dict.fromkeys(warnings):
        print(text, flush=True)


def _check_tokenizers(run: Run, tokenizer: PreTrainedTokenizerBase, tokenizer_path: str) -> None:
    """Check that the reward model and the teachers have the actor's tokenizer.

    Raises:
        ValueError: one of them cannot read the actor's tokens.
    """
    readers = {"reward": "reward_config.load"}
    if run.objective is not None and run.objective.distillation is not None:
        readers |= dict.fromkeys(run.objective.distillation.models.values(), "rl_config.distillation.teacher_models")
    for role, key in readers.items():
        folder = None if role not in run.models else run.models[role].source.hf_folder
        # a folder with only weights has no tokens to compare
        if folder is None or not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
            continue
        other = load_tokenizer(folder, use_fast=not run.config.actor_config.tokenizer_not_use_fast)
        theirs, ours = other.get_vocab(), tokenizer.get_vocab()
        if theirs != ours:
            model = "reward model" if role == "reward" else "teacher"
            reason = (
                "the same texts have other ids, which are not mapped"
                if theirs.keys() == ours.keys()
                else (f"{len(theirs.keys() ^ ours.keys())} tokens are only in one of them")
            )
            raise ValueError(
                f"{key}: the tokenizer of {folder} differs from the actor's ({tokenizer_path}), but the {model} reads the "
                f"actor's token ids: vocabulary {hash_vocabulary(theirs)} and {hash_vocabulary(ours)}; {reason}."
            )


def _find_missing_isolation() -> str:
    """Return what the sandbox of the reward `code` lacks on this machine; empty where it is complete."""
    # in a separate process: the sandbox is only made by a process without threads
    command = [sys.executable, "-m", "mindspeed_rl.isolation.sandbox"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120.0, check=False)
    return ", ".join(result.stdout.split()) if result.returncode == 0 else f"unknown: {result.stderr.strip()[-200:]}"


def _describe_devices(run: Run) -> str:
    """Return the number of workers, and the devices that are dedicated to other roles than the actor."""
    purposes = {
        "reward": "the reward model",
        "ref": "the reference",
        "critic": "the critic",
        "teacher": "the teachers",
        "judge": "the judge",
        "rollout": f"rollout servers of {run.generate.infer_tensor_parallel_size}",
    }
    parts = [f"{run.plan.world_size} workers"]
    parts += [f"{count} for {purposes[role]}" for role, count in run.placement.dedicated.items() if count]
    servers = run.placement.servers
    return " and ".join([*parts, *([f"{len(servers)} rollout server(s) elsewhere"] if servers else [])])


# ---------------------------------------------------------------------- start


def start_services(inputs: RLInputs, stack: contextlib.ExitStack, steps: StartSteps) -> _Services:
    """Start data plane, rewards and workers; they run until the stack is closed."""
    run = inputs.run
    files = [("images.bin", inputs.prompts), ("held_out_images.bin", inputs.held_out)]
    files += [(f"held_out_images_{index}.bin", prompts) for index, prompts in enumerate(inputs.eval_sets.values())]
    for name, prompts in files:
        if prompts is not None:
            prompts.store_images(run.folder / name)
    plane = _open_data_plane(run)
    stack.callback(plane.close)  # runs last: workers use it until they end
    actors = Fleet(run, plane)
    stack.callback(actors.close)
    # they import their libraries while the reward functions are tried
    actors.prepare_workers()
    rewards = RewardGroup(run, plane, inputs.tokenizer_path)
    stack.callback(rewards.close)
    # before any model is built: a reward that cannot score is found in seconds
    rewards.check(inputs.prompts[0])
    if (audit_pool := open_audit_pool(run)) is not None:
        stack.callback(audit_pool.close)
    steps.done("the reward functions score a prompt")
    return _Services(plane, actors, rewards, actors.set_up(steps), audit_pool)


def _open_data_plane(run: Run) -> DataPlane:
    """Open the data plane that the run file asks for, for the users of this loop."""
    rl, plan = run.rl, run.plan
    options: dict[str, Any]
    if DATA_STRATEGY_ALIASES.get(rl.data_strategy, rl.data_strategy) == "tq":  # its sockets have their timeouts
        options = {"num_storage_units": rl.transfer_queue_data_shard_num}
    else:
        options = {"result_timeout_s": run.deadlines.seconds["data_plane"], "runtime_env": build_runtime_env({})}
    users = {**DATA_PLANE_USERS, **list_worker_columns(run.config, images=run.config.reads_images)}
    return make_data_plane(rl.data_strategy, plan.num_prompts, plan.n_samples_per_prompt, users, **options)


# ---------------------------------------------------------------------- build


def build_trainer(inputs: RLInputs, services: _Services, outputs: LogOutputs, termination: Termination) -> RLTrainer:
    """Build the loop on services that run."""
    run, plane, resumed = inputs.run, services.plane, services.resumed
    actor, rl = run.config.actor_config, run.rl
    actors, timeout_s = services.actors, run.deadlines.rows_s
    weight = rl.reward_model_weight if "reward" in run.models else None
    scorers = None if weight is None and inputs.judge is None else actors
    no_rewards = ModelRewards(None, plane, None, timeout_s, read_part_weights(rl))
    model_rewards = replace(no_rewards, fleet=scorers, weight=weight, judge=inputs.judge)
    rewards_in_rollout = replace(model_rewards, in_rollout=True)
    reader = SampleReader(inputs.tokenizer, rl.verifier_reads, run.config.response_limit)
    sets = select_sets(run, inputs.held_out, inputs.eval_sets)
    evaluator = Evaluator(run, sets, actors, services.rewards, rewards_in_rollout, reader.read_trajectory)
    items = select_audit_items(run, inputs.audit_prompts, inputs.held_out, inputs.eval_sets)
    auditor = RewardAuditor(run, items, services.audit_pool, evaluator, reader.read_with_turns)
    schedule = Schedule(run)
    baselines = GreedyBaselines(run, plane, evaluator, model_rewards)
    order = PromptOrder.from_config(rl)
    loader = PromptLoader(inputs.prompts, plane, run.plan, order, seed=actor.seed, shuffle=not actor.no_shuffle)
    # a filter on the total reward needs the model's scores of every rollout; one on a reward function leaves the reward model
    # only the accepted groups
    is_scored_early = rl.dynamic_sample and not rl.filter_groups_enable
    early, late = (rewards_in_rollout, no_rewards) if is_scored_early else (no_rewards, model_rewards)
    rollout = build_rollout(run, plane, actors, services.rewards, loader, schedule.admission, early)
    if resumed:
        schedule.load_state_dict(resumed["run_state"])
        rollout.load_state_dict(resumed["run_state"]["rollout"], inputs.resume)
    diversity = ResponseDiversity(run, plane, inputs.tokenizer, outputs.progress.note)
    logger = RolloutLogger(run, outputs, plane, inputs.tokenizer, diversity.list_figures)
    start = resumed.get("iteration", 0)
    mismatch = EngineMismatch(run, plane, schedule, start_iteration=start)
    observers = [loader.on_batch, logger.on_batch, diversity.on_batch, mismatch.on_batch, *batch_recorders(run, plane)]
    advantages = Advantages(run, plane, baselines, schedule, observers)
    return RLTrainer(
        actors,
        rollout,
        baselines,
        late,
        advantages,
        mismatch,
        evaluator,
        EvaluationProgress(actor, logger.note, start_iteration=start),
        auditor,
        schedule,
        logger,
        termination,
        start,
    )
