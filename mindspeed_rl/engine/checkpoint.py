"""Training checkpoints: saved so that a killed save never looks finished, loaded under any layout.

A checkpoint is `<folder>/iter_0000010/` with Megatron's `torch_dist` files (weights and optimizer), `random/rank_*.safetensors`
and `run_state.json`; `<folder>/latest_checkpointed_iteration.txt` names the newest and moves last. With `lora_ckpt_filter`
it holds the adapters and their optimizer, without the base weights.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from mindspeed_rl.checkpoint.mcore import LATEST_NAME
from mindspeed_rl.checkpoint.megatron_source import SCORE_HEAD, has_score_head
from mindspeed_rl.engine import optimizer_state, random_state
from mindspeed_rl.engine.lora import LoraSettings, is_trained
from mindspeed_rl.engine.train_engine import TrainEngine

_log = logging.getLogger(__name__)


def iteration_folder(folder: str | Path, iteration: int) -> Path:
    """Where the checkpoint of an iteration lies."""
    return Path(folder, f"iter_{iteration:07d}")


def latest_iteration(folder: str | Path) -> int | None:
    """Iteration of the newest finished checkpoint, None when there is none.

    Raises:
        ValueError: the file that names it is damaged or names a folder that does not exist.
    """
    path = Path(folder, LATEST_NAME)
    if not path.is_file():
        return None
    text = path.read_text().strip()
    if not text.isdigit():
        raise ValueError(f"{path}: holds '{text[:40]}', not an iteration number.")
    if not iteration_folder(folder, int(text)).is_dir():
        raise ValueError(f"{path}: names iteration {text}, but {iteration_folder(folder, int(text))} does not exist.")
    return int(text)


class CheckpointSaver:
    """Writes checkpoints of one engine, in the background where asked; all methods are collective."""

    def __init__(self, engine: TrainEngine, folder: str | Path) -> None:
        self.engine = engine
        self.folder = Path(folder)
        self._queue = AsyncCallsQueue()

    def save(self, iteration: int, run_state: dict[str, Any]) -> None:
        """Saves, or starts to save with `async_save`; `run_state` is the trainer's own state, plain JSON values.

        An unfinished earlier save is completed first.
        """
        # checkpoints must be finished in order, because the last to finish is the one that is named newest
        self.finish()
        config = self.engine.config
        final = iteration_folder(self.folder, iteration)
        partial = final.with_name(final.name + ".partial")
        rank = dist.get_rank()
        if rank == 0:
            # what a killed save has left
            shutil.rmtree(partial, ignore_errors=True)
            (partial / "random").mkdir(parents=True)
        # no rank writes before rank 0 has made the folder
        dist.barrier()
        if not config.no_save_rng:
            save_file(random_state.capture(), partial / "random" / f"rank_{rank:05d}.safetensors")
        self.engine.offloader.onload(optimizer=True)  # a swapped optimizer leaves again after the next step
        lora = LoraSettings.from_config(config)
        adapters_only = lora is not None and config.lora_ckpt_filter
        parts = "adapters" if adapters_only else "all"
        state = _sharded_state(self.engine, parts, with_optimizer=not config.no_save_optim, is_loading=False)
        if rank == 0:
            record = {
                "iteration": iteration,
                "stage": config.stage,
                "world_size": dist.get_world_size(),
                "layout": _layout(self.engine),
                "noop_layers": list(self.engine.model.plan.layout.noop_layers),
                "bf16": config.bf16,
                "lora": None if lora is None else {**lora.record(), "with_base": not adapters_only},
                "scheduler": None
                if config.no_save_optim or self.engine.scheduler is None
                else self.engine.scheduler.state_dict(),
                "run_state": run_state,
            }
            (partial / "run_state.json").write_text(json.dumps(record, indent=1))
        finish = _finisher(self.folder, partial, final, iteration, config.keep_last)
        with _said_plainly(f"save: {partial} could not be written"):
            request = dist_checkpointing.save(state, str(partial), async_sharded_save=config.async_save)
        if request is None:
            finish()
        else:
            request.add_finalize_fn(finish)
            self._queue.schedule_async_request(request)

    def poll(self) -> None:
        """Completes a background save that has finished writing; call it once an iteration."""
        with _said_plainly(f"save: the checkpoint in {self.folder} could not be written"):
            self._queue.maybe_finalize_async_calls(blocking=False)

    def finish(self) -> None:
        """Completes a background save, waiting for it where it is still writing."""
        with _said_plainly(f"save: the checkpoint in {self.folder} could not be written"):
            self._queue.maybe_finalize_async_calls(blocking=True)


@contextlib.contextmanager
def _said_plainly(what: str) -> Iterator[None]:
    """Turns torch's CheckpointException, which is no Exception and would end the process, into an error with its cause.

    Raises:
        ValueError: the block failed on any rank.
    """
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        raise ValueError(f"{what}: rank {rank}: {type(cause).__name__}: {str(cause)[:500]}") from error


def _finisher(folder: Path, partial: Path, final: Path, iteration: int, keep_last: int | None) -> Callable[[], None]:
    def finish() -> None:
        dist.barrier()  # every rank has written everything
        if dist.get_rank() == 0:
            shutil.rmtree(final, ignore_errors=True)
            # renamed first, named newest after: a kill in between leaves the older checkpoint in force
            os.replace(partial, final)
            latest = folder / LATEST_NAME
            # replaced as a whole, so that nobody reads half a number
            temporary = latest.with_suffix(".tmp")
            temporary.write_text(str(iteration))
            os.replace(temporary, latest)
            if keep_last:
                # newer ones are of a run that was set back: not ours to count or to delete
                known = (path for path in folder.glob("iter_*") if path.is_dir() and path.name <= final.name)
                for path in sorted(path for path in known if path.suffix != ".partial")[:-keep_last]:
                    shutil.rmtree(path)
        # no rank goes on, perhaps to load, before the pointer has moved
        dist.barrier()

    return finish


def _sharded_state(
    engine: TrainEngine, parts: Literal["all", "adapters", "base"], *, with_optimizer: bool, is_loading: bool
) -> dict[str, Any]:
    """Megatron's sharded state of weights and, if asked, optimizer."""
    state: dict[str, Any] = {}
    for index, model in enumerate(engine.model.models):
        weights = model.sharded_state_dict()
        if parts != "all":
            # a score head belongs to what a LoRA run trains, and to any model that another one starts from
            wanted = is_trained if parts == "adapters" else _is_base
            weights = {name: value for name, value in weights.items() if wanted(name)}
        state[f"model{index}"] = weights
    if with_optimizer and engine.optimizer is not None:
        weights = state if len(engine.model.models) > 1 else {"model": state["model0"]}
        state["optimizer"] = optimizer_state.sharded_state(engine.optimizer, weights, is_loading=is_loading)
    return state


def _is_base(name: str) -> bool:
    return ".lora_" not in name


def _layout(engine: TrainEngine) -> dict[str, int]:
    layout = engine.model.plan.layout
    return {"tp": layout.tp, "pp": layout.pp, "vpp": layout.vpp, "ep": layout.ep, "cp": engine.config.context_parallel_size}


def holds_base(folder: str | Path) -> bool:
    """False when the newest checkpoint was saved with `lora_ckpt_filter`: the base weights must come from elsewhere."""
    iteration = latest_iteration(folder)
    assert iteration is not None
    saved = json.loads((iteration_folder(folder, iteration) / "run_state.json").read_text())["lora"]
    return saved is None or saved["with_base"]


def _parts_to_load(
    lora: LoraSettings | None, saved: dict[str, Any] | None, path: Path, *, with_optimizer: bool
) -> Literal["all", "adapters", "base"]:
    """Which weights a checkpoint can give to a model with or without adapters.

    Raises:
        ValueError: the run and the checkpoint disagree about adapters.
    """
    if saved is None and lora is None:
        return "all"
    if saved is None:
        if with_optimizer:
            raise ValueError(
                f"load: {path} was saved without LoRA adapters; set finetune: true to start lora_target_modules from it."
            )
        return "base"
    mine = None if lora is None else lora.record()
    if mine != {name: value for name, value in saved.items() if name != "with_base"}:
        asked = "without lora_target_modules" if mine is None else f"with {_shown(mine)}"
        raise ValueError(f"load: {path} was trained with LoRA ({_shown(saved)}), this run is {asked}; keep the checkpoint's.")
    return "all" if saved["with_base"] else "adapters"


def _shown(record: dict[str, Any]) -> str:
    return f"lora_r {record['r']}, lora_alpha {record['alpha']}, lora_target_modules {' '.join(record['target_modules'])}"


def _load_schedule(scheduler: OptimizerParamScheduler, saved: dict[str, Any], path: Path) -> None:
    """Moves the schedule to where the saved one stood; its shape stays this run's."""
    mine = scheduler.state_dict()
    changed = [f"{name} {saved[name]} -> {mine[name]}" for name in saved if name != "num_steps" and saved[name] != mine[name]]
    if changed and dist.get_rank() == 0:
        _log.warning("load: the schedule of this run is not that of %s, and counts: %s.", path, ", ".join(changed))
    scheduler.num_steps = saved["num_steps"]
    # sets the learning rate that belongs to the restored position
    scheduler.step(increment=0)


def _clear_head(model: nn.Module, weights: dict[str, Any]) -> None:
    """Adds a head whose values are 0 to the weights of a model chunk that has a head."""
    head = dict(model.named_parameters()).get(SCORE_HEAD)
    if head is not None:
        weights[SCORE_HEAD] = torch.zeros_like(head)


def load_checkpoint(engine: TrainEngine, folder: str | Path, iteration: int | None = None) -> dict[str, Any]:
    """Restores weights and, unless the run's keys say otherwise, optimizer, schedule and random generators; collective.

    The layout may differ from the one that saved. A checkpoint with adapters only leaves the base weights as they are; one
    without adapters leaves a model's fresh adapters as they are; one of a language model gives a critic or reward model a score
    head whose values are 0. Random generators are restored when world size and layout are the same.

    Args:
        engine: with its optimizer built, if it is to be restored.
        folder: holds `latest_checkpointed_iteration.txt`.
        iteration: another checkpoint than the newest.

    Returns:
        {"iteration": ..., "run_state": ..., "random_restored": bool}.

    Raises:
        ValueError: there is no finished checkpoint, or it lacks what is to be restored.
    """
    config = engine.config
    engine.offloader.onload(optimizer=True)
    if iteration is None:
        iteration = latest_iteration(folder)
    if iteration is None:
        raise ValueError(f"load: {folder} holds no finished checkpoint (no {LATEST_NAME}).")
    path = iteration_folder(folder, iteration)
    record_path = path / "run_state.json"
    if not record_path.is_file():
        raise ValueError(f"load: {path} has no run_state.json; it is not a checkpoint of this trainer.")
    record = json.loads(record_path.read_text())
    optimizer, scheduler = engine.optimizer, engine.scheduler
    with_optimizer = optimizer is not None and not (config.finetune or config.no_load_optim)
    if with_optimizer and record["scheduler"] is None:
        raise ValueError(f"load: {path} was saved without its optimizer; set no_load_optim or finetune.")
    if with_optimizer and record["bf16"] != config.bf16:
        saved = str(record["bf16"]).lower()
        raise ValueError(f"load: {path} was saved with bf16: {saved}; keep that, or set no_load_optim or finetune.")
    noop_layers = list(engine.model.plan.layout.noop_layers)
    if noop_layers != record["noop_layers"]:  # Megatron names the layers of such a model one by one, empty ones included
        raise ValueError(f"load: {path} was saved with noop_layers {record['noop_layers']}, this run has {noop_layers}.")
    parts = _parts_to_load(LoraSettings.from_config(config), record["lora"], path, with_optimizer=with_optimizer)
    fresh_head = engine.model.plan.network.head == "reward" and not has_score_head(Path(folder), iteration)
    if fresh_head and with_optimizer:
        raise ValueError(
            f"load: {path} is a language model's, without a score head to go on with; set finetune: true to start from its "
            "weights."
        )
    wanted = _sharded_state(engine, parts, with_optimizer=with_optimizer, is_loading=True)
    if fresh_head:
        for index in range(len(engine.model.models)):
            wanted[f"model{index}"].pop(SCORE_HEAD, None)
    with _said_plainly(f"load: {path} does not fit this run"):
        # a tuple comes only where keys may be missing
        state = cast(dict[str, Any], dist_checkpointing.load(wanted, str(path)))
    for index, model in enumerate(engine.model.models):
        if fresh_head and parts != "adapters":  # the head below adapters is that of the base weights
            _clear_head(model, state[f"model{index}"])
        model.load_state_dict(state[f"model{index}"], strict=parts == "all")
    if with_optimizer:
        assert optimizer is not None and scheduler is not None  # an engine that trains has both
        optimizer_state.load_state(optimizer, state["optimizer"], num_steps=record["scheduler"]["num_steps"])
        _load_schedule(scheduler, record["scheduler"], path)
    elif optimizer is not None:
        # its fp32 main weights are still copies of those from before the load
        optimizer.reload_model_params()
    random_restored = False
    if (
        not (config.finetune or config.no_load_rng)
        and record["world_size"] == dist.get_world_size()
        and record["layout"] == _layout(engine)
    ):
        states = path / "random" / f"rank_{dist.get_rank():05d}.safetensors"
        if states.is_file():
            random_state.restore(load_file(states))
            random_restored = True
    return {"iteration": record["iteration"], "run_state": record["run_state"], "random_restored": random_restored}
