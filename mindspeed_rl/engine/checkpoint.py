"""Training checkpoints: saved so that a killed save never looks finished, loaded under any layout.

A checkpoint is `<folder>/iter_0000010/` with Megatron's `torch_dist` files (weights and optimizer), `random/rank_*.safetensors`
and `run_state.json` and `checksums.json`; `<folder>/latest_checkpointed_iteration.txt` names the newest and moves last. With
`lora_ckpt_filter` it holds the adapters and their optimizer, without the base weights.

What a failed save has written is removed, and its error says in a sentence what the disk would not take. Where machines share
no disk, each keeps what its own ranks wrote (`disks.py`).
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import logging
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue, AsyncRequest
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from mindspeed_rl.checkpoint import checksums
from mindspeed_rl.checkpoint.mcore import LATEST_NAME
from mindspeed_rl.checkpoint.megatron_source import SCORE_HEAD, has_score_head
from mindspeed_rl.checkpoint.newest import newest_checkpoint
from mindspeed_rl.engine import optimizer_state, random_state
from mindspeed_rl.engine.disks import (
    RANDOM,
    Disks,
    Parts,
    all_succeeded,
    files_read,
    find_disks,
    find_parts,
    gathered,
    join_sums,
    settle_record,
    spread,
)
from mindspeed_rl.engine.lora import is_trained
from mindspeed_rl.engine.lora_layers import LoraSettings
from mindspeed_rl.engine.train_engine import TrainEngine

_log = logging.getLogger(__name__)

#: what can be done about a damaged checkpoint
_ADVICE = "load_previous: true goes on from the one before, load_iteration names another"
#: room that a save is told to lack when a probe of this size finds none
_NEARLY_FULL_BYTES = 1 << 20


def iteration_folder(folder: str | Path, iteration: int) -> Path:
    """Where the checkpoint of an iteration lies."""
    return Path(folder, f"iter_{iteration:07d}")


def latest_iteration(folder: str | Path) -> int | None:
    """Iteration of the newest finished checkpoint, None when there is none.

    Raises:
        ValueError: the file that names it is damaged, missing beside checkpoints, or names a folder that does not exist.
    """
    newest = newest_checkpoint(folder)
    if newest == "release":
        raise ValueError(f"{Path(folder, LATEST_NAME)}: holds 'release', not an iteration number.")
    return None if newest is None else int(newest)


class CheckpointSaver:
    """Writes checkpoints of one engine, in the background where asked; all methods are collective."""

    def __init__(self, engine: TrainEngine, folder: str | Path) -> None:
        self.engine = engine
        self.folder = Path(folder)
        self._queue = AsyncCallsQueue()
        #: of the background save that is under way
        self._partial: Path | None = None
        self._disks: Disks | None = None

    @property
    def disks(self) -> Disks:
        """Who shares a disk; collective the first time.

        Raises:
            ValueError: a rank cannot write to the folder; on every rank.
        """
        if self._disks is None:
            try:
                self._disks = find_disks(self.folder)
            except ValueError as error:
                raise ValueError(f"save: {self.folder} could not be written: {error}.") from None
        return self._disks

    def save(self, iteration: int, run_state: dict[str, Any]) -> None:
        """Saves, or starts to save with `async_save`; `run_state` is the trainer's own state, plain JSON values.

        An unfinished earlier save is completed first.
        """
        # checkpoints must be finished in order, because the last to finish is the one that is named newest
        self.finish()
        config = self.engine.config
        final = iteration_folder(self.folder, iteration)
        partial = final.with_name(final.name + ".partial")
        disks = self.disks
        with _written(partial, disks):
            self._begin(partial)
            request = self._request(partial)
            self._write_small(partial, iteration, run_state)
            request.add_finalize_fn(_finisher(disks, self.folder, partial, final, iteration, config.keep_last))
            if not config.async_save:
                request.execute_sync()
        if config.async_save:
            self._partial = partial
            self._queue.schedule_async_request(request)

    def _begin(self, partial: Path) -> None:
        """The folder is there and empty: Megatron takes one that holds anything for a damaged checkpoint, and says so.

        Raises:
            ValueError: a rank could not make it; on every rank.
        """
        failure: str | None = None
        if self.disks.leads:
            try:
                # what a killed save has left
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
            except OSError as error:
                failure = str(error)
        # no rank writes before its disk has the folder
        all_succeeded(failure)

    def _write_small(self, partial: Path, iteration: int, run_state: dict[str, Any]) -> None:
        """What is small: the ranks' random generators and the record of the run.

        Raises:
            ValueError: a rank could not write its part; on every rank.
        """
        rank = dist.get_rank()
        failure: str | None = None
        try:
            if rank == 0:
                (partial / "run_state.json").write_text(json.dumps(self._record(iteration, run_state), indent=1))
            if not self.engine.config.no_save_rng:
                random = partial / _random_name(rank)
                random.parent.mkdir(exist_ok=True)
                save_file(random_state.capture(), random)
        except (OSError, SafetensorError) as error:
            failure = str(error)
        all_succeeded(failure)

    def _record(self, iteration: int, run_state: dict[str, Any]) -> dict[str, Any]:
        """What run_state.json says."""
        engine, config = self.engine, self.engine.config
        lora = LoraSettings.from_config(config)
        adapters_only = lora is not None and config.lora_ckpt_filter
        has_schedule = not config.no_save_optim and engine.scheduler is not None
        return {
            "iteration": iteration,
            "stage": config.stage,
            "world_size": dist.get_world_size(),
            "layout": _layout(engine),
            "noop_layers": list(engine.model.plan.layout.noop_layers),
            "bf16": config.bf16,
            "lora": None if lora is None else {**lora.record(), "with_base": not adapters_only},
            "scheduler": engine.scheduler.state_dict() if has_schedule and engine.scheduler is not None else None,
            "checksums": True,
            "run_state": run_state,
        }

    def _request(self, partial: Path) -> AsyncRequest:
        """Megatron's files, still to be written: each rank writes its own and then their checksums."""
        config, rank = self.engine.config, dist.get_rank()
        self.engine.offloader.onload(optimizer=True)  # a swapped optimizer leaves again after the next step
        adapters_only = LoraSettings.from_config(config) is not None and config.lora_ckpt_filter
        state = _sharded_state(
            self.engine,
            "adapters" if adapters_only else "all",
            with_optimizer=not config.no_save_optim,
            is_loading=False,
        )
        request = dist_checkpointing.save(state, str(partial), async_sharded_save=True)
        assert request is not None  # of an asynchronous save, which `execute_sync` makes at once where that is wanted
        if request.async_fn is None:  # nothing to write on this rank
            return request
        return request._replace(async_fn=functools.partial(_write_with_sums, request.async_fn, partial, rank))

    def poll(self) -> None:
        """Completes a background save that has finished writing; call it once an iteration."""
        self._finalize(blocking=False)

    def finish(self) -> None:
        """Completes a background save, waiting for it where it is still writing."""
        self._finalize(blocking=True)

    def _finalize(self, *, blocking: bool) -> None:
        if self._partial is None:
            return
        with _written(self._partial, self.disks):
            if self._queue.maybe_finalize_async_calls(blocking=blocking):
                self._partial = None


def _random_name(rank: int) -> str:
    return f"{RANDOM}rank_{rank:05d}.safetensors"


def _write_with_sums(write: Callable[..., None], partial: Path, rank: int, *arguments: Any) -> None:
    """Runs Megatron's writer of this rank, in whatever process that is, and sums what it has written."""
    write(*arguments)
    names = {path.name for path in partial.glob(f"__{rank}_*.distcp")}
    names |= {name for name in [_random_name(rank)] if (partial / name).is_file()}
    # a disk that is full fails the save in the finisher, which sums what nobody has
    with contextlib.suppress(OSError):
        checksums.write_part(partial, rank, names)


@contextlib.contextmanager
def _written(partial: Path, disks: Disks) -> Iterator[None]:
    """A block that writes a checkpoint: when it fails, nothing is left of it.

    Raises:
        ValueError: the block failed on any rank, in words of what the disk would not take.
    """
    try:
        with _said_plainly(f"save: {partial.with_suffix('')} could not be written"):
            try:
                yield
            except (OSError, RuntimeError, ValueError) as error:
                raise ValueError(f"save: {partial.with_suffix('')} could not be written: {str(error)[:500]}") from error
    except ValueError as error:
        text = _of_the_disk(partial)
        if disks.leads:
            shutil.rmtree(partial, ignore_errors=True)
        if text is None:
            raise
        raise ValueError(f"save: {partial.with_suffix('')} could not be written: {text}") from error


def _of_the_disk(partial: Path) -> str | None:
    """What the disk or a limit would not take; None when there is room. torch says "unexpected pos 704 vs 598"."""
    if not partial.is_dir():
        return None
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    free = shutil.disk_usage(partial).free
    try:
        largest = max((path.stat().st_size for path in partial.rglob("*") if path.is_file()), default=0)
        if limit != resource.RLIM_INFINITY and largest + _NEARLY_FULL_BYTES > limit:
            return f"a file may have {limit} bytes here (ulimit -f), which is too little."
        probe = partial / "probe"
        with probe.open("wb") as file:
            file.write(bytes(_NEARLY_FULL_BYTES))
            file.flush()
            os.fsync(file.fileno())
        probe.unlink()
    except OSError as error:
        return f"{error.strerror} ({free >> 20} MiB are free)." if error.errno == errno.ENOSPC else f"{error.strerror}."
    return None


@contextlib.contextmanager
def _said_plainly(what: str) -> Iterator[None]:
    """Turns torch's CheckpointException, which is no Exception and would end the process, into an error with its cause.

    Raises:
        ValueError: the block failed on any rank.
    """
    try:
        yield
    except CheckpointException as error:
        if not error.failures:  # on all ranks but the first
            raise ValueError(f"{what}: another rank says why.") from error
        rank, (cause, _) = min(error.failures.items())
        raise ValueError(f"{what}: rank {rank}: {type(cause).__name__}: {str(cause)[:500]}") from error


def _finisher(
    disks: Disks, folder: Path, partial: Path, final: Path, iteration: int, keep_last: int | None
) -> Callable[[], None]:
    def publish() -> None:
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

    def finish() -> None:
        dist.barrier()  # every rank has written everything
        join_sums(disks, partial)
        spread(disks, partial)
        failure: str | None = None
        if disks.leads:
            try:
                publish()
            except OSError as error:
                failure = f"{final}: {_of_the_disk(partial) or error}"
        # no rank goes on, perhaps to load, before the pointer has moved; nor waits for a rank that has failed
        all_succeeded(failure)

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


def settle(folder: str | Path, iteration: int | None = None) -> tuple[int, Disks | None]:
    """Which checkpoint all ranks mean, of which every disk has the small files now; collective.

    Args:
        iteration: another checkpoint than the newest that rank 0 sees.

    Returns:
        Its iteration, and who shares a disk where that had to be found out.

    Raises:
        ValueError: there is no finished checkpoint, or a disk does not take what it lacks.
    """
    failure: str | None = None
    if iteration is None and dist.get_rank() == 0:
        try:
            iteration = latest_iteration(folder)
        except ValueError as error:
            failure = str(error)
    iteration, failure = gathered((iteration, failure))[0]
    if failure is not None:
        raise ValueError(failure)
    if iteration is None:
        raise ValueError(f"load: {folder} holds no finished checkpoint (no {LATEST_NAME}).")
    return iteration, settle_record(Path(folder), iteration_folder(folder, iteration))


def holds_base(folder: str | Path, iteration: int | None = None) -> bool:
    """False when the checkpoint was saved with `lora_ckpt_filter`: the base weights must come from elsewhere.

    Args:
        iteration: another checkpoint than the newest.
    """
    if iteration is None:
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


def verify_files(path: Path, advice: str, parts: Parts | None = None) -> bool:
    """The files are those that were written: each rank reads its share of them; collective.

    Args:
        advice: what the user may do about a damaged one.
        parts: what the disks hold, where they hold different files.

    Returns:
        False where the checkpoint has no checksums.

    Raises:
        ValueError: naming the damaged file, on every rank.
    """
    failure, has_sums, rank = None, False, dist.get_rank()
    peers = list(range(dist.get_world_size())) if parts is None else parts.disks.peers
    leave_out = () if parts is None else parts.absent[rank]
    try:
        has_sums = checksums.verify(path, share=peers.index(rank), num_shares=len(peers), leave_out=leave_out)
    except (OSError, checksums.DamagedCheckpoint) as error:
        failure = str(error)
    for text in gathered(failure):
        if text is not None:
            raise ValueError(f"load: {text}; {advice}.")
    return has_sums


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
    iteration, disks = settle(folder, iteration)
    path = iteration_folder(folder, iteration)
    record_path = path / "run_state.json"
    if not record_path.is_file():
        raise ValueError(f"load: {path} has no run_state.json; it is not a checkpoint of this trainer.")
    try:
        parts_here = find_parts(Path(folder), path, disks)
    except ValueError as error:
        raise ValueError(f"load: {error}; {_ADVICE}.") from None
    if not verify_files(path, _ADVICE, parts_here) and dist.get_rank() == 0:
        _log.warning("load: %s is of a version that wrote no %s; its files are not verified.", path, checksums.NAME)
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
    fresh_head = engine.model.plan.model_config.head == "reward" and not has_score_head(Path(folder), iteration)
    if fresh_head and with_optimizer:
        raise ValueError(
            f"load: {path} is a language model's, without a score head to go on with; set finetune: true to start from its "
            "weights."
        )
    wanted = _sharded_state(engine, parts, with_optimizer=with_optimizer, is_loading=True)
    if fresh_head:
        for index in range(len(engine.model.models)):
            wanted[f"model{index}"].pop(SCORE_HEAD, None)
    states = path / _random_name(dist.get_rank())
    restores_random = (
        not (config.finetune or config.no_load_rng)
        and record["world_size"] == dist.get_world_size()
        and record["layout"] == _layout(engine)
        and not (parts_here is not None and parts_here.lost)
    )
    if parts_here is not None:
        if parts_here.lost and dist.get_rank() == 0:
            _log.warning("load: no machine has %s; random generators start anew.", path / min(parts_here.lost))
        parts_here.fetch(files_read(path, wanted) | ({_random_name(dist.get_rank())} if restores_random else set()))
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
    random_restored = restores_random and states.is_file()
    if random_restored:
        random_state.restore(load_file(states))
    return {"iteration": record["iteration"], "run_state": record["run_state"], "random_restored": random_restored}
