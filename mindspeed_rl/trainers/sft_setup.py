"""The set-up of a supervised run: check the inputs, start the workers, build the trainer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mindspeed_rl.checkpoint.model_source import (
    check_weights,
    describe_fresh_head,
    lacks_score_head,
    load_tokenizer_of,
)
from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.config.errors import raise_together
from mindspeed_rl.config.keys.megatron import is_weight, read_split
from mindspeed_rl.data.datasets import StoredLogProbs
from mindspeed_rl.data.images import describe_images, read_first_grids
from mindspeed_rl.data.indexed import (
    UNPAIRED_COLUMNS,
    IndexedColumns,
    check_columns,
    check_sample_lengths,
    column_prefix,
    is_paired,
    list_packed_columns,
    read_index,
)
from mindspeed_rl.data.sources import has_files
from mindspeed_rl.data.tokenizer import check_tokenizer_files, check_tokens
from mindspeed_rl.observability.console import StartSteps
from mindspeed_rl.observability.trackers import find_trackers
from mindspeed_rl.run import Run
from mindspeed_rl.run.length import resolve_length
from mindspeed_rl.run.machine import describe_machine, list_machine_checks
from mindspeed_rl.run.models import check_outputs, list_source_checks, plan_models
from mindspeed_rl.run.paths import with_absolute_paths
from mindspeed_rl.run.phases import Phases
from mindspeed_rl.run.resume import ResumePoint, select_sound_checkpoint
from mindspeed_rl.run.rules.validation import missing_for_training
from mindspeed_rl.runtime.reports import DataSummary
from mindspeed_rl.trainers.run_logger import LogOutputs, RunLogger
from mindspeed_rl.trainers.supervised import SupervisedTrainer
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
        num_rows: rows that train, where train_epochs sets the length; None where train_iters does.
    """

    run: Run
    resume: ResumePoint
    num_devices: int
    summary: str
    num_rows: int | None
    images: str = ""


@dataclass(frozen=True)
class _SupervisedServices:
    """The workers of a run, ready to train.

    Attributes:
        resumed: the record of the checkpoint that the run resumes from; empty for a new run.
        has_held_out: there is something to evaluate on.
    """

    workers: RemoteGroup
    resumed: Mapping[str, Any]
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
    # raises where there is none
    check_tokens(load_tokenizer_of(config, source), config.tokenizer_name_or_path or source.hf_folder)
    _check_data(config, run.models["actor"].plan.model_config.vocab_size)
    num_rows = None if config.train_epochs is None else _count_rows(run.stage, config.data_path, config.split)
    if num_rows is not None:
        run = resolve_length(run, num_rows)
    if (ref := run.models.get("ref")) is not None:
        check_weights(ref.config, ref.source)
    if config.stage == "orm" and lacks_score_head(source):
        print(describe_fresh_head("reward model", source), flush=True)
    num_devices = run.plan.world_size
    for warning in describe_machine(run):
        print(f"warning: {warning}", flush=True)
    lines = [str(resume), f"starting {num_devices} workers on {run.platform} ..."]
    if num_rows is not None:
        lines.insert(0, f"{run.plan.train_iters} iterations are {config.train_epochs:g} passes over {num_rows} rows")
    rules, images = read_image_rules(run.models["actor"]), ""
    if rules is not None and isinstance(config.data_path, str):
        images = describe_images(rules, read_first_grids(config.data_path))
        lines.insert(0, images)
    return SupervisedInputs(with_absolute_paths(run), resume, num_devices, "\n".join(lines), num_rows, images)


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
    if run.config.actor_config.skip_train and not data.num_held_out:
        raise ValueError("megatron_training.skip_train: there is nothing to evaluate on; set eval_data_path or split.")
    return _SupervisedServices(workers, resumed, data.num_held_out > 0)


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
        inputs.run, services.workers, logger, termination, evaluates=services.has_held_out, start_iteration=start
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
    yield partial(_check_data, config)


#: columns that a stage reads; Megatron's dataset of stage pretrain has one file without columns
_COLUMNS = {
    "sft": ("input_ids", "attention_mask", "labels"),
    **dict.fromkeys(
        ("dpo", "simpo", "cpo", "orpo"), ("chosen_input_ids", "chosen_labels", "rejected_input_ids", "rejected_labels")
    ),
    "kto": UNPAIRED_COLUMNS,
    "orm": ("chosen_input_ids", "rejected_input_ids"),
    "prm": ("input_ids", "labels"),
}


#: handler that preprocesses for a stage, and what follows the prefix in the names of its files
_HANDLERS = {
    "pretrain": "GeneralPretrainHandler",
    "sft": "AlpacaStyleInstructionHandler",
    **dict.fromkeys(("dpo", "simpo", "cpo", "orpo", "kto", "orm"), "AlpacaStylePairwiseHandler"),
    "prm": "AlpacaStyleProcessRewardHandler",
}
_SUFFIXES = {"pretrain": "_text_document"}


def _count_rows(stage: str, data_path: object, split: str | None) -> int:
    """Return the number of rows that train: the first share of split."""
    halves = 2 if stage == "kto" and is_paired(str(data_path)) else 1
    column = _COLUMNS["dpo" if halves == 2 else stage][0]
    num_rows = len(read_index(column_prefix(Path(str(data_path)).expanduser(), column)).lengths)
    return round(halves * num_rows * read_split(split)[0])


def _check_data(config: MegatronConfig, vocab_size: int | None = None) -> None:
    """Check the files that the workers will read.

    Args:
        config: configuration of the trained model.
        vocab_size: vocabulary size of the model, with which token ids are compared; None checks that the files exist and no
            more.

    Raises:
        ValueError: data_path is not set, or a file or column that the stage needs does not exist, or is damaged.
    """
    assert config.stage is not None
    for key in ("data_path", "eval_data_path"):
        value = getattr(config, key)
        if value is None and key == "data_path":
            raise ValueError(f"megatron_training.data_path: not set; stage {config.stage} learns from it.")
        if value is None:
            continue
        for prefix in value if isinstance(value, list) else [value]:
            # the list of stage pretrain has weights between its prefixes
            if config.stage != "pretrain" or not is_weight(prefix):
                _check_files(config.stage, key, prefix)
                if vocab_size is not None:
                    _check_content(config, key, Path(str(prefix)).expanduser(), vocab_size)


def _check_files(stage: str, key: str, prefix: object) -> None:
    """Raise ValueError where a file does not exist that a stage reads."""
    if stage == "pretrain":
        missing = [] if Path(f"{prefix}.idx").expanduser().is_file() else [f"{prefix}.idx"]
        hint = "give the whole prefix, with _text_document"
    else:
        columns = list_packed_columns(Path(str(prefix)).expanduser())
        # both answers of a pair are judged by themselves, too
        stage = "dpo" if stage == "kto" and is_paired(str(prefix)) else stage
        missing = [f"{prefix}_packed_{name}_document.idx" for name in _COLUMNS[stage] if name not in columns]
        hint = f"found {', '.join(columns) or 'no column at all'}; give the --output-prefix of preprocessing"
    if missing and has_files(str(prefix)):
        raise ValueError(
            f"megatron_training.{key}: {Path(str(prefix)).expanduser().absolute()} is raw data, and stage {stage} reads data"
            f" that is preprocessed: mindspeed-rl preprocess --input {prefix} --output-prefix PREFIX --handler-name"
            f" {_HANDLERS[stage]} --tokenizer-name-or-path MODEL_FOLDER, then megatron_training.{key}: PREFIX"
            f"{_SUFFIXES.get(stage, '')}"
        )
    if missing:
        raise ValueError(f"megatron_training.{key}: {missing[0]} does not exist ({hint}).")


def _check_content(config: MegatronConfig, key: str, path: Path, vocab_size: int) -> None:
    """Raise ValueError where the files hold what the stage cannot train on."""
    check_columns(path, vocab_size, f"megatron_training.{key}")
    if config.stage != "sft":
        return
    if config.sft_loss_type in ("forward_kl", "reverse_kl"):
        count, rows = StoredLogProbs(path).num_rows, len(IndexedColumns(path, ["input_ids"]))
        if count != rows:
            raise ValueError(f"sft_loss_type: log-probs of a teacher are of {count} rows, but {path} has {rows}")
    if config.pack and config.reset_attention_mask and not config.neat_pack:
        check_sample_lengths(path)
