"""The set-up of a supervised run: check the inputs, start the workers, build the trainer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from mindspeed_rl.checkpoint.model_source import (
    check_weights,
    describe_fresh_head,
    lacks_score_head,
    load_tokenizer_of,
)
from mindspeed_rl.config.errors import raise_together
from mindspeed_rl.data.card import DataCard
from mindspeed_rl.data.images import describe_images, read_first_grids
from mindspeed_rl.data.prompts import PromptDataset
from mindspeed_rl.data.tokenizer import check_tokenizer, check_tokenizer_files
from mindspeed_rl.observability.console import StartSteps
from mindspeed_rl.observability.trackers import find_trackers
from mindspeed_rl.rewards.pool import RewardPool
from mindspeed_rl.run import Run
from mindspeed_rl.run.length import resolve_length
from mindspeed_rl.run.machine import describe_machine, list_machine_checks
from mindspeed_rl.run.models import check_outputs, list_source_checks, plan_models
from mindspeed_rl.run.paths import with_absolute_paths
from mindspeed_rl.run.phases import Phases
from mindspeed_rl.run.resume import ResumePoint, select_sound_checkpoint
from mindspeed_rl.run.rules.validation import missing_for_training
from mindspeed_rl.runtime.reports import DataSummary
from mindspeed_rl.trainers.answer_evaluation import AnswerEvaluator, derive_answer_rewards, load_answer_sets
from mindspeed_rl.trainers.run_logger import LogOutputs, RunLogger
from mindspeed_rl.trainers.supervised import SupervisedTrainer
from mindspeed_rl.trainers.supervised_data import count_rows, list_data_checks, prepare_data
from mindspeed_rl.trainers.termination import Termination
from mindspeed_rl.workers.remote_group import RemoteGroup, WorkerKind, start_group
from mindspeed_rl.workers.responses import read_image_rules

_SUPERVISED = WorkerKind(
    "mindspeed_rl.workers.supervised_worker:SupervisedWorker",
    saves=("actor_config",),
    built="the data are opened, the models are loaded",
)


@dataclass(frozen=True)
class SupervisedInputs:
    """The inputs of a run, checked before anything is started.

    Attributes:
        num_devices: number of devices of the workers.
        summary: lines for the console.
        images: a line with the tokens of images; empty for a model of text.
        eval_sets: prompts that an evaluation answers, by name.
        num_rows: rows that train, where train_epochs sets the length; None where train_iters does.
        cards: descriptions of the data, and of the held-out data.
    """

    run: Run
    resume: ResumePoint
    num_devices: int
    summary: str
    num_rows: int | None
    cards: Sequence[DataCard]
    images: str = ""
    eval_sets: Mapping[str, PromptDataset] = field(default_factory=dict)


@dataclass(frozen=True)
class _SupervisedServices:
    """The workers of a run, ready to train.

    Attributes:
        resumed: the record of the checkpoint that the run resumes from; empty for a new run.
        answers: evaluation by generation.
        has_held_out: there is something to evaluate on.
    """

    workers: RemoteGroup
    resumed: Mapping[str, Any]
    answers: AnswerEvaluator
    has_held_out: bool


def check_supervised(run: Run) -> SupervisedInputs:
    """Check all files and keys of a run.

    Raises:
        ValueError: a key or file is wrong.
    """
    run = select_sound_checkpoint(run)
    config = run.config.actor_config
    raise_together(_file_checks(run))
    run = plan_models(run)
    resume = run.resume
    assert resume is not None
    source = run.models["actor"].source
    for text in check_weights(config, source, is_scored=config.stage == "orm"):
        print(text, flush=True)
    tokenizer = load_tokenizer_of(config, source)  # raises where there is none
    tokenizer_path = config.tokenizer_name_or_path or source.hf_folder
    warnings = check_tokenizer(tokenizer, run.vocab_sizes, tokenizer_path)
    eval_sets = load_answer_sets(run, tokenizer)
    run, cards = prepare_data(run, tokenizer)
    num_rows = None if config.train_epochs is None else count_rows(run)
    if num_rows is not None:
        run = resolve_length(run, num_rows)
    if (ref := run.models.get("ref")) is not None:
        check_weights(ref.config, ref.source)
    if config.stage == "orm" and lacks_score_head(source):
        print(describe_fresh_head("reward model", source), flush=True)
    num_devices = run.plan.world_size
    for warning in (*warnings, *cards.warnings, *describe_machine(run)):
        print(f"warning: {warning}", flush=True)
    lines = [*map(str, cards.cards), str(resume), f"starting {num_devices} workers on {run.platform} ..."]
    if num_rows is not None:
        length = f"{run.plan.train_iters} iterations are {config.train_epochs:g} passes over {num_rows} rows"
        lines.insert(len(cards.cards), length)
    rules, images = read_image_rules(run.models["actor"]), ""
    if rules is not None and isinstance(path := run.data_config.data_path, str):
        images = describe_images(rules, read_first_grids(path))
        lines.insert(len(cards.cards), images)
    text = "\n".join(lines)
    return SupervisedInputs(with_absolute_paths(run), resume, num_devices, text, num_rows, cards.cards, images, eval_sets)


def start_workers(inputs: SupervisedInputs, stack: contextlib.ExitStack, steps: StartSteps) -> _SupervisedServices:
    """Start the workers; they run until the stack is closed.

    Raises:
        ValueError: only an evaluation is requested, but there is nothing to evaluate on.
    """
    run = inputs.run
    workers = start_group(_SUPERVISED, run, run.config.actor_config, run.plan.world_size)
    stack.callback(workers.close)
    workers.start_workers(run, steps=steps)
    resumed: Mapping[str, Any] = workers.call(Phases.RESUMED_STATE)[0]
    data: DataSummary = workers.call(Phases.DATA)[0]
    print(data, flush=True)
    if order_change := inputs.resume.describe_order_change(list(data.order)):
        print(order_change, flush=True)
    if data.num_without_label == data.num_train:
        length = run.config.actor_config.seq_length
        raise ValueError(f"megatron_training.seq_length: {length} cuts off the labels of all {data.num_train:,} {data.unit}.")
    if run.config.actor_config.skip_train and not data.num_held_out and not inputs.eval_sets:
        raise ValueError("megatron_training.skip_train: there is nothing to evaluate on; set eval_data_path or split.")
    pool = None
    if inputs.eval_sets:
        pool = RewardPool.from_config(derive_answer_rewards(run), max_tokens=run.config.actor_config.eval_max_tokens)
        stack.callback(pool.close)
    tokenizer = load_tokenizer_of(run.config.actor_config, run.models["actor"].source)
    answers = AnswerEvaluator(run, inputs.eval_sets, tokenizer, pool, workers)
    return _SupervisedServices(workers, resumed, answers, data.num_held_out > 0)


def _derive_throughput(results: Mapping[str, float], num_devices: int) -> dict[str, float]:
    """Return samples and tokens a second over all devices, and model operations a second and device.

    They cover only the update: saving and evaluating do not count.
    """
    seconds = results.get("timing/update", 0.0)
    if not seconds:
        return {}
    return {
        "train/samples_per_s": results["train/samples"] / seconds,
        "train/tokens_per_s": results["train/tokens"] / seconds,
        "train/tflops_per_device": results["train/model_tflop"] / seconds / num_devices,
    }


def build_supervised_trainer(
    inputs: SupervisedInputs, services: _SupervisedServices, outputs: LogOutputs, termination: Termination
) -> SupervisedTrainer:
    """Build the loop on workers that run."""
    logger = RunLogger(outputs, partial(_derive_throughput, num_devices=inputs.num_devices))
    start = services.resumed.get("iteration", 0)
    return SupervisedTrainer(
        inputs.run,
        services.workers,
        logger,
        termination,
        answers=services.answers,
        evaluates=services.has_held_out,
        start_iteration=start,
    )


def _file_checks(run: Run) -> Iterator[Callable[[], object]]:
    """Yield a check of each file that the run file names, and one of keys that it leaves unset."""
    config, rl = run.config.actor_config, run.config.rl_config
    yield partial(check_outputs, missing_for_training(run), {"run_dir": run.folder, "save": config.save})
    yield from list_machine_checks(run)
    yield partial(find_trackers, [] if rl is None else rl.tracker_names)
    yield from list_source_checks(run)
    if config.tokenizer_name_or_path is not None:
        yield partial(check_tokenizer_files, config.tokenizer_name_or_path)
    yield from list_data_checks(config, is_text_only=run.config.is_text_only)
