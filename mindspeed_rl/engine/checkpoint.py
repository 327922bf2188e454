"""Training checkpoints: a killed save never looks finished, and a checkpoint loads under any layout.

A checkpoint is `<folder>/iter_0000010/` with Megatron's `torch_dist` files (weights and optimizer), `random/rank_*.safetensors`
and `run_state.json` and `checksums.json`; `<folder>/latest_checkpointed_iteration.txt` names the newest and is written last.
With `lora_ckpt_filter` it has the adapters and their optimizer, without the base weights.

Files of a failed save are removed, and its error names the cause on the disk. Where machines share no disk, each keeps the
files of its own ranks (`disks.py`).
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue, AsyncRequest
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from mindspeed_rl.adaptors.megatron_async_saves import keep_results_in_process
from mindspeed_rl.adaptors.megatron_loads import reading_with
from mindspeed_rl.checkpoint import checksums
from mindspeed_rl.checkpoint.dist import DistReader
from mindspeed_rl.checkpoint.mcore import TRACKER_NAME
from mindspeed_rl.checkpoint.megatron_source import SCORE_HEAD, has_score_head
from mindspeed_rl.checkpoint.newest import (
    BEST_ITERATION,
    IN_FLIGHT,
    IN_FLIGHT_STAGING,
    iterations,
    list_old,
    newest_checkpoint,
)
from mindspeed_rl.checkpoint.other_engine import check_engine, read_engine
from mindspeed_rl.checkpoint.torch_file import load_with_records
from mindspeed_rl.engine.disks import (
    RANDOM,
    CheckpointFiles,
    Disks,
    copy_small_files,
    failing_together,
    find_disks,
    find_missing_files,
    gather_objects,
    join_checksums,
    list_needed_files,
    raise_any_failure,
    share_small_files,
)
from mindspeed_rl.engine.interface import Engine, SavedState, StateFiles
from mindspeed_rl.engine.lora_layers import LoraSettings
from mindspeed_rl.engine.optimizer import reload_main_weights
from mindspeed_rl.engine.parallel import capture_rng_state, restore_rng_state
from mindspeed_rl.engine.saved_states import AVERAGE, ShardedFiller, list_files, open_saved_state
from mindspeed_rl.engine.train_engine import TrainEngine
from mindspeed_rl.engine.weights import Float32Weights
from mindspeed_rl.files import read_json

_log = logging.getLogger(__name__)

#: fix of a damaged checkpoint
_ADVICE = "load_previous: true resumes from the one before, load_iteration names another"
#: a disk is full when a probe of this size fails
_NEARLY_FULL_BYTES = 1 << 20


def iteration_folder(folder: str | Path, iteration: int) -> Path:
    """Return the folder of the checkpoint of an iteration."""
    return Path(folder, f"iter_{iteration:07d}")


def _find_newest_iteration(folder: str | Path) -> int | None:
    """Return the iteration of the newest finished checkpoint, None when there is none.

    Raises:
        ValueError: the file that names it is damaged, missing next to checkpoints, or names a folder that does not exist.
    """
    newest = newest_checkpoint(folder)
    if newest == "release":
        raise ValueError(f"{Path(folder, TRACKER_NAME)}: has 'release', not the number of an iteration.")
    return None if newest is None else int(newest)


class CheckpointSaver:
    """Writer of checkpoints of one engine, in the background with `async_save`; all methods are collective.

    Attributes:
        best: iteration of the checkpoint that `keep_best` keeps; None where there is none.
    """

    best: int | None = None

    def __init__(
        self, engine: Engine, folder: str | Path, files: StateFiles | None = None, *, adapters: Sequence[str] = ()
    ) -> None:
        """Prepare to save.

        Args:
            engine: whose state is saved.
            folder: takes the checkpoints.
            files: form of the state; None for Megatron's.
            adapters: names of the adapters that are saved into this folder and beside it; the first is the one in this folder.
        """
        self.engine = engine
        self._adapters = tuple(adapters)
        self._files = build_megatron_files(engine) if files is None else files
        self.folder = Path(folder)
        self._queue = AsyncCallsQueue()
        #: folder of the background save in progress
        self._partial: Path | None = None
        self._disks: Disks | None = None

    @property
    def disks(self) -> Disks:
        """Disks of the ranks; collective the first time.

        Raises:
            ValueError: a rank cannot write to the folder; on every rank.
        """
        if self._disks is None:
            try:
                self._disks = find_disks(self.folder)
            except ValueError as error:
                raise ValueError(f"save: {self.folder} could not be written: {error}.") from None
        return self._disks

    def save(
        self, iteration: int, run_state: Mapping[str, object], *, companions: Sequence[CheckpointSaver] | None = ()
    ) -> None:
        """Save, or start to save with `async_save`.

        An unfinished earlier save is completed first. What the driver has left in `<folder>/in_flight.partial` becomes a part
        of the checkpoint, so that both are there or neither.

        Args:
            iteration: after which a run resumes from it.
            run_state: the trainer's state, plain JSON values.
            companions: savers of checkpoints of this iteration that are complete before this one is, and whose old ones are
                removed after: a run that is killed at any time resumes from the newest of this saver. None for one of them.
        """
        # checkpoints must be finished in order, because the last one to finish is named newest
        self.finish()
        config = self.engine.config
        self._note_best(run_state)
        final = iteration_folder(self.folder, iteration)
        partial = final.with_name(final.name + ".partial")
        disks = self.disks
        with _removing_failed(partial, disks):
            self._make_folder(partial)
            request = self._build_request(partial)
            self._write_small_files(partial, iteration, run_state)
            request.add_finalize_fn(self._build_finisher(partial, final, iteration, companions))
            if not config.async_save:
                request.execute_sync()
        if config.async_save:
            self._partial = partial
            self._queue.schedule_async_request(request)

    def _make_folder(self, partial: Path) -> None:
        """Make the folder, empty: Megatron reports one with any file as a damaged checkpoint.

        Raises:
            ValueError: a rank could not make it; on every rank.
        """
        failure: str | None = None
        if self.disks.leads:
            try:
                # left by a killed save
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
            except OSError as error:
                failure = str(error)
        # no rank writes before its disk has the folder
        raise_any_failure(failure)

    def _write_small_files(self, partial: Path, iteration: int, run_state: Mapping[str, object]) -> None:
        """Write the states of the ranks' random generators and the record of the run.

        Raises:
            ValueError: a rank could not write its files; on every rank.
        """
        rank = dist.get_rank()
        failure: str | None = None
        try:
            if rank == 0:
                staged = self.folder / IN_FLIGHT_STAGING
                if staged.is_dir():
                    os.replace(staged, partial / IN_FLIGHT)
                (partial / "run_state.json").write_text(json.dumps(self._build_record(iteration, run_state), indent=1))
            if not self.engine.config.no_save_rng:
                random = partial / _get_random_name(rank)
                random.parent.mkdir(exist_ok=True)
                save_file(capture_rng_state(), random)
        except (OSError, SafetensorError) as error:
            failure = str(error)
        raise_any_failure(failure)

    def _build_record(self, iteration: int, run_state: Mapping[str, object]) -> dict[str, object]:
        """Return the content of run_state.json."""
        engine, config, scheduler = self.engine, self.engine.config, self.engine.scheduler
        lora = LoraSettings.from_config(config)
        adapters_only = lora is not None and config.lora_ckpt_filter
        return {
            "iteration": iteration,
            "stage": config.stage,
            "engine": self._files.name,
            "world_size": dist.get_world_size(),
            "bf16": config.bf16,
            "lora": None if lora is None else {**lora.record(), "with_base": not adapters_only},
            "adapters": list(self._adapters),
            "scheduler": None if scheduler is None or config.no_save_optim else scheduler.state_dict(),
            **self._files.describe(),
            "steps_per_iteration": engine.steps_per_iteration,
            "num_updates": engine.num_updates,
            "optimizer_steps": engine.optimizer_steps,
            "average": engine.average is not None,
            "checksums": True,
            "run_state": run_state,
        }

    def _build_request(self, partial: Path) -> AsyncRequest:
        """Return the request to write the state, in which each rank writes its own files and then their checksums."""
        config, rank = self.engine.config, dist.get_rank()
        self.engine.offloader.onload(optimizer=True)  # a swapped optimizer leaves again after the next step
        adapters_only = LoraSettings.from_config(config) is not None and config.lora_ckpt_filter
        subset, with_optimizer = "adapters" if adapters_only else "all", not config.no_save_optim
        request = self._files.save(partial, subset, with_optimizer=with_optimizer)
        if request.async_fn is None:  # nothing to write on this rank
            return request
        return request._replace(async_fn=functools.partial(_write_with_sums, request.async_fn, partial, rank))

    def _build_finisher(
        self, partial: Path, final: Path, iteration: int, companions: Sequence[CheckpointSaver] | None
    ) -> Callable[[], None]:
        disks = self.disks

        def finish() -> None:
            for saver in companions or ():
                saver.finish()
            dist.barrier()  # every rank has written everything
            join_checksums(disks, partial)
            copy_small_files(disks, partial)
            failure: str | None = None
            if disks.leads:
                try:
                    _publish(self.folder, partial, final, iteration)
                except OSError as error:
                    failure = f"{final}: {_find_disk_problem(partial) or error}"
            # no rank continues, perhaps to load, before the newest is named; nor waits for a rank that has failed
            raise_any_failure(failure)
            for saver in () if companions is None else (self, *companions):
                saver.remove_old(iteration)

        return finish

    def _note_best(self, run_state: Mapping[str, object]) -> None:
        """Note which checkpoint `keep_best` of the actor keeps; the other roles keep theirs, to resume with it."""
        best = run_state.get(BEST_ITERATION)
        self.best = best if isinstance(best, int) else None

    def remove_old(self, iteration: int, *, spare: int = 0) -> None:
        """Remove the checkpoints up to this iteration that `keep_last` leaves out, but for so many, and for the best one."""
        if not self.disks.leads:
            return
        keep_last = self.engine.config.keep_last
        for path in list_old(self.folder, iteration, keep_last + spare if keep_last else None, best=self.best):
            shutil.rmtree(path)

    def finish(self, *, wait: bool = True) -> None:
        """Complete a background save.

        Args:
            wait: for a save that is still writing; False leaves it, for a call in each iteration.
        """
        if self._partial is None:
            return
        with _removing_failed(self._partial, self.disks):
            if self._queue.maybe_finalize_async_calls(blocking=wait):
                self._partial = None


def _copy_from_host(entry: object) -> object:
    """Return an entry of a sharded state with a copy of its tensor, where that is in host memory."""
    if isinstance(entry, (ShardedTensor, ShardedTensorFactory)) and entry.data is not None and entry.data.device.type == "cpu":
        return replace(entry, data=entry.data.clone())
    return entry


def _get_random_name(rank: int) -> str:
    return f"{RANDOM}rank_{rank:05d}.safetensors"


def _write_with_sums(write: Callable[..., None], partial: Path, rank: int, *arguments: object) -> None:
    """Run Megatron's writer of this rank, in any process, and write the checksums of its files."""
    write(*arguments)
    names = {path.name for path in partial.glob(f"__{rank}_*.distcp")}
    names |= {name for name in [_get_random_name(rank)] if (partial / name).is_file()}
    # a full disk fails the save in the finisher, which computes missing checksums
    with contextlib.suppress(OSError):
        checksums.write_list(partial, rank, names)


@contextlib.contextmanager
def _removing_failed(partial: Path, disks: Disks) -> Iterator[None]:
    """Remove the files of a block that writes a checkpoint, when it fails.

    Raises:
        ValueError: the block failed on any rank; the message names the cause on the disk.
    """
    try:
        with _explaining_failures(f"save: {partial.with_suffix('')} could not be written"):
            try:
                yield
            except (OSError, RuntimeError, ValueError) as error:
                raise ValueError(f"save: {partial.with_suffix('')} could not be written: {str(error)[:500]}") from error
    except ValueError as error:
        text = _find_disk_problem(partial)
        if disks.leads:
            shutil.rmtree(partial, ignore_errors=True)
        if text is None:
            raise
        raise ValueError(f"save: {partial.with_suffix('')} could not be written: {text}") from error


def _find_disk_problem(partial: Path) -> str | None:
    """Return the problem of the disk or of a limit, None when there is room; torch reports "unexpected pos 704 vs 598"."""
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
def _explaining_failures(what: str) -> Iterator[None]:
    """Turn torch's CheckpointException, which is not an Exception and would end the process, into an error with its cause.

    Raises:
        ValueError: the block failed on any rank.
    """
    try:
        yield
    except CheckpointException as error:
        if not error.failures:  # on all ranks but the first
            raise ValueError(f"{what}: another rank has the cause.") from error
        rank, (cause, _) = min(error.failures.items())
        raise ValueError(f"{what}: rank {rank}: {type(cause).__name__}: {str(cause)[:500]}") from error


def _publish(folder: Path, partial: Path, final: Path, iteration: int) -> None:
    """Give a complete checkpoint its name, and name it newest after: a kill in between leaves an older one valid."""
    others = [saved for saved in iterations(folder) if saved != iteration]
    if final.is_dir():  # of a run that was restarted from an older one; nothing may name it while it is replaced
        if others:
            _name_newest(folder, max((saved for saved in others if saved < iteration), default=max(others)))
        else:
            (folder / TRACKER_NAME).unlink(missing_ok=True)
        os.replace(final, final.with_name(f"{final.name}.old.partial"))
    os.replace(partial, final)
    _name_newest(folder, iteration)
    for old in folder.glob("iter_*.old.partial"):
        shutil.rmtree(old)


def _name_newest(folder: Path, iteration: int) -> None:
    tracker = folder / TRACKER_NAME
    # replaced atomically, so that no reader gets half a number
    temporary = tracker.with_suffix(".tmp")
    temporary.write_text(str(iteration))
    os.replace(temporary, tracker)


def choose_checkpoint(folder: str | Path, iteration: int | None = None) -> tuple[int, Disks | None]:
    """Choose the same checkpoint on all ranks, and copy its small files to every disk; collective.

    Args:
        iteration: another checkpoint than the newest that rank 0 sees.

    Returns:
        Its iteration, and the disks of the ranks where files had to be copied.

    Raises:
        ValueError: no checkpoint is finished, or a disk cannot write the files.
    """
    failure: str | None = None
    if iteration is None and dist.get_rank() == 0:
        try:
            iteration = _find_newest_iteration(folder)
        except ValueError as error:
            failure = str(error)
    iteration, failure = gather_objects((iteration, failure))[0]
    if failure is not None:
        raise ValueError(failure)
    if iteration is None:
        raise ValueError(f"load: {folder} has no finished checkpoint (no {TRACKER_NAME}).")
    return iteration, share_small_files(Path(folder), iteration_folder(folder, iteration))


def has_base_weights(folder: str | Path, iteration: int | None = None) -> bool:
    """Return False when the checkpoint was saved with `lora_ckpt_filter`: the base weights must come from elsewhere.

    Args:
        iteration: another checkpoint than the newest.
    """
    if iteration is None:
        iteration = _find_newest_iteration(folder)
    assert iteration is not None
    saved = read_json(iteration_folder(folder, iteration) / "run_state.json")["lora"]
    return saved is None or saved["with_base"]


def _choose_subset(
    lora: LoraSettings | None, saved: dict[str, Any] | None, path: Path, *, with_optimizer: bool
) -> Literal["all", "adapters", "base"]:
    """Return the weights that a checkpoint has for a model with or without adapters.

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
        ours = "without lora_target_modules" if mine is None else f"with {_describe(mine)}"
        raise ValueError(f"load: {path} was trained with LoRA ({_describe(saved)}), this run is {ours}; keep the checkpoint's.")
    return "all" if saved["with_base"] else "adapters"


def _describe(record: dict[str, Any]) -> str:
    return f"lora_r {record['r']}, lora_alpha {record['alpha']}, lora_target_modules {' '.join(record['target_modules'])}"


def _add_zero_head(model: nn.Module, weights: ShardedStateDict) -> None:
    """Add a head whose values are 0 to the weights of a model chunk that has a head."""
    head = dict(model.named_parameters()).get(SCORE_HEAD)
    if head is not None:
        weights[SCORE_HEAD] = torch.zeros_like(head)


def verify_files(path: Path, advice: str, files: CheckpointFiles | None = None) -> bool:
    """Verify the checksums of all files, of which each rank reads some; collective.

    Args:
        advice: the fix of a damaged one, for the error.
        files: files of each disk, where they differ.

    Returns:
        False where the checkpoint has no checksums.

    Raises:
        ValueError: naming the damaged file, on every rank.
    """
    failure, has_sums, rank = None, False, dist.get_rank()
    peers = list(range(dist.get_world_size())) if files is None else files.disks.peers
    leave_out = () if files is None else files.absent[rank]
    try:
        has_sums = checksums.verify(path, shard=peers.index(rank), num_shards=len(peers), leave_out=leave_out)
    except (OSError, checksums.DamagedCheckpointError) as error:
        failure = str(error)
    for text in gather_objects(failure):
        if text is not None:
            raise ValueError(f"load: {text}; {advice}.")
    return has_sums


def load_checkpoint(
    engine: Engine, folder: str | Path, iteration: int | None = None, files: StateFiles | None = None
) -> dict[str, Any]:
    """Restore weights and, unless the run's keys exclude them, optimizer, schedule and random generators; collective.

    The layout may differ from the one that saved. A checkpoint with only adapters leaves the base weights unchanged; one
    without adapters leaves a model's initial adapters unchanged; one of a language model gives a critic or reward model a score
    head whose values are 0. Random generators are restored when world size and layout are the same.

    Args:
        engine: with its optimizer built, if that is restored.
        folder: has `latest_checkpointed_iteration.txt`.
        iteration: another checkpoint than the newest.
        files: form of the state; None for Megatron's.

    Returns:
        {"iteration": ..., "run_state": ..., "random_restored": bool}.

    Raises:
        ValueError: no checkpoint is finished, or it lacks a state that is restored.
    """
    config, files = engine.config, build_megatron_files(engine) if files is None else files
    engine.offloader.onload(optimizer=True)
    iteration, disks = choose_checkpoint(folder, iteration)
    path = iteration_folder(folder, iteration)
    record, missing = _open_checkpoint(Path(folder), path, disks)
    with_optimizer = engine.scheduler is not None and not (config.finetune or config.no_load_optim)
    _check_record(engine, files, record, path, with_optimizer=with_optimizer)
    subset = _choose_subset(LoraSettings.from_config(config), record["lora"], path, with_optimizer=with_optimizer)
    # checkpoints of earlier versions do not say it
    with_average = engine.average is not None and not config.finetune and record.get("average", False)
    fresh_head = engine.plan.model_config.head == "reward" and not has_score_head(Path(folder), iteration)
    if fresh_head and with_optimizer:
        raise ValueError(
            f"load: {path} is a language model's, without a score head to resume with; set finetune: true to start from its "
            "weights."
        )
    random = _get_random_name(dist.get_rank())
    restores_random = _fits_generators(engine, files, record) and (missing is None or not missing.lost)
    if missing is not None and missing.lost and dist.get_rank() == 0:
        _log.warning("load: no machine has %s; random generators start anew.", path / min(missing.lost))

    def fetch(list_needed: Callable[[], set[str]]) -> None:
        if missing is not None:
            missing.fetch(list_needed() | ({random} if restores_random else set()))

    if read_engine(record) == files.name:
        with _explaining_failures(f"load: {path} does not fit this run"):
            files.restore(
                path,
                record,
                subset,
                with_optimizer=with_optimizer,
                with_average=with_average,
                fresh_head=fresh_head,
                fetch=fetch,
            )
    else:
        fetch(lambda: list_files(path))
        has_head, saved_by = engine.plan.model_config.head == "reward" and not fresh_head, read_engine(record)
        try:
            with failing_together():
                saved = open_saved_state(saved_by, path, engine.plan, has_score_head=has_head)
            files.adopt(saved, record, with_optimizer=with_optimizer, with_average=with_average)
        except ValueError as error:
            raise ValueError(f"load: {path} does not fit this run (engine: {saved_by} saved it): {error}") from error
    if engine.average is not None and not with_average:
        engine.average.reset()
    random_restored = restores_random and (path / random).is_file()
    if random_restored:
        restore_rng_state(load_file(path / random))
    return {"iteration": record["iteration"], "run_state": record["run_state"], "random_restored": random_restored}


def _open_checkpoint(folder: Path, path: Path, disks: Disks | None) -> tuple[dict[str, Any], CheckpointFiles | None]:
    """Return the record of a checkpoint whose files are whole, and those that not every disk has; collective."""
    record = path / "run_state.json"
    if not record.is_file():
        raise ValueError(f"load: {path} has no run_state.json; it is not a checkpoint of this trainer.")
    try:
        files = find_missing_files(folder, path, disks)
    except ValueError as error:
        raise ValueError(f"load: {error}; {_ADVICE}.") from None
    if not verify_files(path, _ADVICE, files) and dist.get_rank() == 0:
        _log.warning("load: %s is of a version without %s; its files are not verified.", path, checksums.NAME)
    return read_json(record), files


def _check_record(engine: Engine, files: StateFiles, record: Mapping[str, Any], path: Path, *, with_optimizer: bool) -> None:
    """Raise ValueError where a checkpoint lacks a state that is restored, or has it in another form."""
    check_engine(engine.config, record, path.parent)
    if with_optimizer and record["scheduler"] is None:
        raise ValueError(f"load: {path} was saved without its optimizer; set no_load_optim or finetune.")
    if with_optimizer and record["bf16"] != engine.config.bf16:
        saved = str(record["bf16"]).lower()
        raise ValueError(f"load: {path} was saved with bf16: {saved}; keep that, or set no_load_optim or finetune.")
    if read_engine(record) == files.name:
        files.check(record, path)


def _fits_generators(engine: Engine, files: StateFiles, record: Mapping[str, Any]) -> bool:
    """Return whether the states of random generators are restored: only for as many ranks in the same layout."""
    if engine.config.finetune or engine.config.no_load_rng:
        return False
    return record["world_size"] == dist.get_world_size() and record["layout"] == files.describe()["layout"]


# ---------------------------------------------------------------------- the state of Megatron's engine


class MegatronFiles:
    """The state of Megatron's engine, as its `torch_dist` checkpoints have it; see `interface.StateFiles`."""

    name = "megatron"

    def __init__(self, engine: TrainEngine) -> None:
        self._engine = engine

    def describe(self) -> dict[str, Any]:
        """Return the layout."""
        layout, cp = self._engine.plan.layout, self._engine.config.context_parallel_size
        sizes = {"tp": layout.tp, "pp": layout.pp, "vpp": layout.vpp, "ep": layout.ep, "cp": cp}
        return {"layout": sizes, "noop_layers": list(layout.noop_layers)}

    def check(self, record: Mapping[str, Any], path: Path) -> None:
        """Raise ValueError where a checkpoint names its layers in another way."""
        noop_layers = list(self._engine.plan.layout.noop_layers)
        if noop_layers != record["noop_layers"]:  # Megatron names the layers of such a model one by one, empty ones included
            raise ValueError(f"load: {path} was saved with noop_layers {record['noop_layers']}, this run has {noop_layers}.")

    def adopt(self, saved: SavedState, record: Mapping[str, Any], *, with_optimizer: bool, with_average: bool) -> None:
        """Take the state of a checkpoint that another engine wrote.

        Raises:
            ValueError: it lacks a tensor.
        """
        engine = self._engine
        with failing_together():
            engine.load(saved.open_weights())
        if isinstance(engine.stored_weights, Float32Weights):
            engine.stored_weights = Float32Weights(engine.model)
        filler = ShardedFiller(saved, engine.plan)
        sharded = engine.state("all", with_optimizer=with_optimizer, is_loading=True, with_average=with_average)
        if with_average:
            with failing_together():
                average = filler.fill({name: part for name, part in sharded.items() if name.startswith(AVERAGE)})
            engine.load_average(average)
        if with_optimizer:
            with failing_together():  # the first data-parallel rank alone may have the parts
                optimizer = filler.fill(sharded["optimizer"])
            engine.load_optimizer({"optimizer": optimizer}, record)
        elif engine.optimizer is not None:
            reload_main_weights(engine.optimizer)

    def save(self, folder: Path, subset: Literal["all", "adapters", "base"], *, with_optimizer: bool) -> AsyncRequest:
        """Return Megatron's request."""
        config = self._engine.config
        state = self._engine.state(subset, with_optimizer=with_optimizer, is_loading=False, with_average=True)
        if config.async_save and config.swap_optimizer:  # whose next step changes what is in host memory
            dict_list_map_inplace(_copy_from_host, cast(Any, state))
        with contextlib.nullcontext() if config.async_save else keep_results_in_process():
            request = dist_checkpointing.save(state, str(folder), async_sharded_save=True)
        assert request is not None  # of an asynchronous save, which `execute_sync` can run at once
        return request

    def restore(
        self,
        path: Path,
        record: Mapping[str, Any],
        subset: Literal["all", "adapters", "base"],
        *,
        with_optimizer: bool,
        with_average: bool,
        fresh_head: bool,
        fetch: Callable[[Callable[[], set[str]]], None],
    ) -> None:
        """Take the state of a checkpoint."""
        engine = self._engine
        sharded = engine.state(subset, with_optimizer=with_optimizer, is_loading=True, with_average=with_average)
        if fresh_head:
            for index in range(len(engine.model.models)):
                sharded[f"model{index}"].pop(SCORE_HEAD, None)
        fetch(lambda: list_needed_files(path, sharded))
        load_common = functools.partial(load_with_records, as_tensors=True)
        with reading_with(DistReader, load_common):
            # a tuple is returned only where keys may be missing
            state = cast(ShardedStateDict, dist_checkpointing.load(sharded, str(path)))
        if fresh_head and subset != "adapters":  # adapters have the head of the base weights
            for index, model in enumerate(engine.model.models):
                _add_zero_head(model, state[f"model{index}"])
        engine.load_weights(state, strict=subset == "all")
        if with_average:
            engine.load_average(state)
        if with_optimizer:
            engine.load_optimizer(state, record)
        elif engine.optimizer is not None:
            # its fp32 main weights are still copies of those from before the load
            reload_main_weights(engine.optimizer)


def build_megatron_files(engine: Engine) -> StateFiles:
    """Return the files of Megatron's engine."""
    assert isinstance(engine, TrainEngine)
    return MegatronFiles(engine)
