"""Jobs that save and load training checkpoints, and steps that go wrong."""

from __future__ import annotations

import importlib
import logging
import os
import resource
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from training_jobs import Setting, all_rows, engine_of, full_weights, my_rows, summary, weighted_loss

from mindspeed_rl.algorithms.interfaces import LossInputs, LossOutput
from mindspeed_rl.engine.batching import Rows
from mindspeed_rl.engine.checkpoint import CheckpointSaver, load_checkpoint
from mindspeed_rl.engine.interface import NonFiniteError


def save_then_train(
    setting: Setting, folder: str, before: int = 2, after: int = 3, source: str = "training_jobs"
) -> dict[str, Any]:
    """Trains `before` steps, saves, trains `after` more while a background save may still be writing, and reports those.

    Args:
        source: the module that has the rows.
    """
    with engine_of(setting) as engine:
        rows = my_rows(importlib.import_module(source).all_rows())
        for _ in range(before):
            engine.train_step(rows, setting.batching, weighted_loss)
        saver = CheckpointSaver(engine, folder)
        saver.save(before, {"consumed": 8 * before})
        results = [engine.train_step(rows, setting.batching, weighted_loss) for _ in range(after)]
        saver.finish(wait=False)
        saver.finish()
        return summary(results, full_weights(engine)) | {"random": torch.rand(3).tolist()}


def load_then_train(
    setting: Setting, folder: str, steps: int = 3, iteration: int | None = None, source: str = "training_jobs"
) -> dict[str, Any]:
    """Loads into an engine that has gone another way, trains and reports."""
    with engine_of(setting) as engine:
        rows = my_rows(importlib.import_module(source).all_rows())
        for _ in range(steps and 1):
            engine.train_step(rows, setting.batching, weighted_loss)
        torch.rand(17)
        loaded = load_checkpoint(engine, folder, iteration)
        results = [engine.train_step(rows, setting.batching, weighted_loss) for _ in range(steps)]
        report = summary(results, full_weights(engine)) | {"random": torch.rand(3).tolist()}
        return report | {"loaded": loaded}


def count_saved_states(setting: Setting) -> tuple[int, int]:
    """Numbers of the optimizer's states that this rank would save, and parameters of the model."""
    with engine_of(setting) as engine:
        engine.train_step(my_rows(all_rows()), setting.batching, weighted_loss)
        state: Any = engine.state("all", with_optimizer=True, is_loading=False)["optimizer"]
        tensors = [value for part in state.values() for states in part.values() for value in states.values()]
        parameters = sum(parameter.numel() for model in engine.model.models for parameter in model.parameters())
        return sum(tensor.data.numel() for tensor in tensors), parameters


def on_separate_disks(job: str, setting: Setting, folders: list[str], **settings: Any) -> Any:
    """A job of this module in which each rank sees another disk in the place of the folder."""
    return globals()[job](setting, folders[dist_rank()], **settings)


def dist_rank() -> int:
    """Of this process, also before its world is there."""
    return int(os.environ["RANK"])


def refusal(setting: Setting, folder: str) -> str:
    """What loading says that cannot be done."""
    with engine_of(setting) as engine:
        try:
            load_checkpoint(engine, folder)
        except ValueError as error:
            return str(error)
        return "nothing"


def save_many(setting: Setting, folder: str, iterations: list[int]) -> list[str]:
    """Saves the same state under several iteration numbers, one after the other; what Megatron warned of."""
    warnings: list[str] = []
    listener = logging.Handler(logging.WARNING)
    listener.emit = lambda record: warnings.append(record.getMessage())
    logger = logging.getLogger("megatron.core.dist_checkpointing")
    logger.addHandler(listener)
    try:
        with engine_of(setting) as engine:
            saver = CheckpointSaver(engine, folder)
            for iteration in iterations:
                saver.save(iteration, {})
            saver.finish()
    finally:
        logger.removeHandler(listener)
    return warnings


def save_under_a_limit(setting: Setting, folder: str, limit_bytes: int) -> str:
    """What saving says when no file may be larger than this."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with engine_of(setting) as engine:
        saver = CheckpointSaver(engine, folder)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, before[1]))
        try:
            saver.save(1, {})
            saver.finish()
        except ValueError as error:
            return str(error)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return "nothing"


def save_what_cannot_be_named(setting: Setting, folder: str) -> str:
    """What saving says on this rank when the newest checkpoint cannot be named, which only the first rank does."""
    with engine_of(setting) as engine:
        saver = CheckpointSaver(engine, folder)
        (Path(folder) / "latest_checkpointed_iteration.tmp").mkdir(exist_ok=True)
        try:
            saver.save(1, {})
            saver.finish()
        except ValueError as error:
            return str(error)
    return "nothing"


def killed_while_saving(setting: Setting, folder: str, iteration: int) -> None:
    """The last rank is killed as soon as the save of this iteration has begun."""

    def watch() -> None:
        while not list(Path(folder).glob(f"iter_{iteration:07d}*")):
            time.sleep(0.0005)
        os.kill(os.getpid(), signal.SIGKILL)

    with engine_of(setting) as engine:
        engine.train_step(my_rows(all_rows()), setting.batching, weighted_loss)
        if dist.get_rank() == dist.get_world_size() - 1:
            threading.Thread(target=watch, daemon=True).start()
        CheckpointSaver(engine, folder).save(iteration, {})


# ---------------------------------------------------------------- steps that go wrong


def numbered_rows() -> Rows:
    """This rank's rows, each with its number."""
    rows = my_rows(all_rows())
    return replace(rows, columns={**rows.columns, "number": [torch.tensor(number) for number in range(len(rows))]})


def broken_loss(inputs: LossInputs) -> LossOutput:
    """NaN where the micro-batch holds row 3 of its rank."""
    result = weighted_loss(inputs)
    bad = float("nan") if 3 in inputs.columns["number"] else 0.0
    return LossOutput(result.loss_sum + bad, result.count, result.metrics)


def broken_gradient(inputs: LossInputs) -> LossOutput:
    """A finite loss with an infinite gradient in the micro-batch with row 3."""
    result = weighted_loss(inputs)
    first = inputs.outputs[0][0, 0]
    bad = (first - first.detach()).sqrt() if 3 in inputs.columns["number"] else 0.0
    return LossOutput(result.loss_sum + bad, result.count, result.metrics)


def survive_a_broken_step(setting: Setting, kind: str) -> dict[str, Any]:
    """One good step, one that is not finite, four good ones; reports the good ones and what the broken one said."""
    with engine_of(setting) as engine:
        rows = numbered_rows()
        results = [engine.train_step(rows, setting.batching, weighted_loss)]
        before = full_weights(engine)
        try:
            engine.train_step(rows, setting.batching, {"loss": broken_loss, "gradient": broken_gradient}[kind])
            said = "nothing"
        except NonFiniteError as error:
            said = str(error)
        after = full_weights(engine)
        untouched = all(torch.equal(before[name], after[name]) for name in before)
        results += [engine.train_step(rows, setting.batching, weighted_loss) for _ in range(4)]
        return summary(results, full_weights(engine)) | {"said": said, "untouched": untouched}
