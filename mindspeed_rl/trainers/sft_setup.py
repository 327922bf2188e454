"""What a supervised run is put together from."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from mindspeed_rl.checkpoint.model_source import (
    check_weights,
    find_model,
    fresh_head_notice,
    has_own_reference,
    lacks_score_head,
    load_tokenizer_of,
    reference_of,
)
from mindspeed_rl.config import MegatronConfig, Run
from mindspeed_rl.config.keys.megatron import is_weight
from mindspeed_rl.data.indexed import packed_columns
from mindspeed_rl.data.tokenizer import check_tokenizer_files
from mindspeed_rl.observability.console import IterationProgress, StartSteps
from mindspeed_rl.observability.trackers import Trackers
from mindspeed_rl.trainers.model_plans import model_plans
from mindspeed_rl.trainers.resume import find_resume_point, with_sound_checkpoint
from mindspeed_rl.trainers.supervised import SupervisedLogger, SupervisedTrainer
from mindspeed_rl.trainers.wrong_files import check_all
from mindspeed_rl.workers.groups import SupervisedGroup


class SupervisedParts:
    """A supervised run, put together piece by piece; see `start.started` for the order.

    Attributes:
        beginning: where the run begins.
        num_devices: of the workers.
        log_every: shows every so many iterations.
    """

    def __init__(self, run: Run) -> None:
        """Looks at everything that can be wrong in files and keys.

        Raises:
            ValueError: a key or file is wrong.
        """
        self._run = run = with_sound_checkpoint(run)
        config = run.config.actor_config
        check_all(_files(config))
        source = find_model(config, "megatron_training")
        model_plans(run, source)
        self.beginning = find_resume_point(run, source)
        for sentence in check_weights(config, source, is_scored=config.stage == "orm"):
            print(sentence, flush=True)
        load_tokenizer_of(config, source)  # raises where there is none
        check_data(config)
        if config.stage == "dpo" and has_own_reference(config):
            check_weights(*reference_of(config, source))
        if config.stage == "orm" and lacks_score_head(source):
            print(fresh_head_notice("reward model", source), flush=True)
        self.num_devices, self.log_every = run.plan.world_size, config.log_interval

    @property
    def run(self) -> Run:
        """The run, with its length."""
        return self._run

    def describe(self) -> str:
        """What is being started."""
        return f"{self.beginning}\nstarting {self.num_devices} workers on {self._run.platform} ..."

    def start(self, stack: contextlib.ExitStack, steps: StartSteps) -> Mapping[str, Any]:
        """The workers run until the stack is closed; returns the state of a resumed run, else nothing.

        Raises:
            ValueError: only an evaluation is asked for, but there is nothing to evaluate on.
        """
        self._workers = SupervisedGroup(self._run)
        stack.callback(self._workers.close)
        self._resumed = self._workers.set_up(steps)
        data = self._workers.data()
        print(data, flush=True)
        self._evaluates = data.num_held_out > 0
        if self._run.config.actor_config.skip_train and not self._evaluates:
            raise ValueError("megatron_training.skip_train: there is nothing to evaluate on; set eval_data_path or split.")
        return self._resumed

    def logger(self, trackers: Trackers, progress: IterationProgress) -> SupervisedLogger:
        """Where the figures of the run go."""
        self._logger = SupervisedLogger(self._run.folder, trackers, progress, self.num_devices)
        return self._logger

    def trainer(self) -> SupervisedTrainer:
        """The loop, on workers that were started, with the logger that was made."""
        start = self._resumed.get("iteration", 0)
        return SupervisedTrainer(self._run, self._workers, self._logger, evaluates=self._evaluates, start_iteration=start)


def _files(config: MegatronConfig) -> Iterator[Callable[[], object]]:
    """A look at each of the files that the run file names."""
    yield partial(find_model, config, "megatron_training")
    if config.tokenizer_name_or_path is not None:
        yield partial(check_tokenizer_files, config.tokenizer_name_or_path)
    yield partial(check_data, config)


#: columns a stage reads; Megatron's dataset of stage pretrain has one file without columns
_COLUMNS = {
    "sft": ("input_ids", "attention_mask", "labels"),
    **dict.fromkeys(("dpo", "simpo"), ("chosen_input_ids", "chosen_labels", "rejected_input_ids", "rejected_labels")),
    "orm": ("chosen_input_ids", "rejected_input_ids"),
    "prm": ("input_ids", "labels"),
}


def check_data(config: MegatronConfig) -> None:
    """Looks for the files that the workers will read; what is in them, the workers check.

    Raises:
        ValueError: data_path is not set, or a file or column that the stage needs does not exist.
    """
    assert config.stage is not None
    for key in ("data_path", "eval_data_path"):
        value = getattr(config, key)
        if value is None and key == "data_path":
            raise ValueError(f"megatron_training.data_path: not set; stage {config.stage} learns from it.")
        for prefix in [] if value is None else value if isinstance(value, list) else [value]:
            if config.stage == "pretrain":
                missing = [] if is_weight(prefix) or Path(f"{prefix}.idx").expanduser().is_file() else [f"{prefix}.idx"]
                hint = "give the whole prefix, with _text_document"
            else:
                found = packed_columns(Path(str(prefix)).expanduser())
                missing = [f"{prefix}_packed_{name}_document.idx" for name in _COLUMNS[config.stage] if name not in found]
                hint = f"found {', '.join(found) or 'no column at all'}; give the --output-prefix of preprocessing"
            if missing:
                raise ValueError(f"megatron_training.{key}: {missing[0]} does not exist ({hint}).")
