"""Runs a planned conversion, streaming, and proves its result.

Everything is written into a folder named ``*.partial`` beside the destination, job by job, straight to its place in the
files; the folder is renamed when all is written (and verified). A run that was interrupted continues where it stopped.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar, cast

import torch
from torch import Tensor

from mindspeed_rl.checkpoint import checksums
from mindspeed_rl.checkpoint.conversion_plan import Destination, Plan
from mindspeed_rl.checkpoint.hf import copy_companions, dtype_keys, mtp_keys, write_config
from mindspeed_rl.checkpoint.jobs import Group, Job, MegatronGroup, Report, Target, Transform, connect, same_bits
from mindspeed_rl.checkpoint.mcore import TRACKER_NAME
from mindspeed_rl.checkpoint.options import Progress
from mindspeed_rl.checkpoint.source import ModelOptions, Source, open_hf, open_megatron
from mindspeed_rl.config.model_metadata import HF_FILES
from mindspeed_rl.observability.folder_locks import hold_folders

_TASK_BYTES = 64 << 20  # work is handed out and recorded in pieces of about this size
_STATE_NAME = "conversion.json"
_DONE_NAME = "conversion.done"
_TRACKER_STAGING = TRACKER_NAME + ".partial"
_T = TypeVar("_T")
#: threads of a conversion without worker processes: while the kernel writes for one, and it lets one into a file at a time, the
#: other reads, and looks at what it has read
_THREADS = 2


def check_destination(destination: Destination) -> None:
    """Raise ValueError if something is at the destination that would be lost."""
    final = destination.final
    above = next(folder for folder in (destination.path, *destination.path.parents) if os.path.lexists(folder))
    if not above.is_dir():
        raise ValueError(f"{destination.path} cannot be made: {above} is not a folder")
    if destination.overwrite or not final.exists():
        return
    if not final.is_dir() or any(final.iterdir()):
        raise ValueError(f"{final} exists already; choose another --save-dir, or pass --overwrite to replace it")


def run_plan(
    plan: Plan, *, workers: int = 1, verify: bool = False, progress: Progress | None = None, task_bytes: int = _TASK_BYTES
) -> Path:
    """Write the checkpoint and give it its name; the folder that was made.

    After an error nothing is left, no empty folder either; after an interruption (Ctrl-C, kill) the next run with the same
    settings continues.

    Raises:
        ValueError: the disk is full, a source file is damaged, or (with ``verify``) the result differs from the source or
            holds NaN or infinities.
    """
    progress = progress or Progress()
    check_destination(plan.destination)
    staging = [plan.destination.staging, _companions_staging(plan), plan.destination.path / _TRACKER_STAGING]
    held = hold_folders({"--save-dir": plan.destination.path}, beside=plan.destination.kind == "hf")
    with nothing_left(plan.destination.path, plan.num_bytes, staging), held:
        _write(plan, workers, progress, task_bytes)
        if verify:
            _verify(plan, workers, progress, task_bytes)
        return _publish(plan)


@contextmanager
def nothing_left(path: Path, num_bytes: int, staging: Sequence[Path]) -> Iterator[None]:
    """Remove what a failed block has made: the staged files and the folders above them that were not there before.

    Args:
        path: the destination.
        num_bytes: what it needs.
        staging: what the block builds, beside the destination.

    Raises:
        ValueError: the block found the disk full.
    """
    new = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        yield
    except Exception as error:
        for made in staging:
            _remove(made)
        for folder in new:
            with suppress(OSError):  # there is something in it, or it was never made
                folder.rmdir()
        reason = _no_room(error)
        if reason is None:
            raise
        raise ValueError(f"{reason.format(path=path)}; the result needs {_amount(num_bytes)}") from error


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):  # it was never made, and the error that led here says more
            path.unlink()


_NO_ROOM = {
    errno.ENOSPC: "the disk of {path} is full",
    errno.EDQUOT: "the disk quota of {path} is used up",
    errno.EFBIG: "a file of {path} would exceed the largest size that is allowed here",
}


def _no_room(error: Exception) -> str | None:
    """Return the message for an error that means a lack of space; None for any other error."""
    if isinstance(error, OSError) and error.errno in _NO_ROOM:
        return _NO_ROOM[error.errno]
    # torch and safetensors write in their own languages, and report it in their own words
    words = str(error)
    said = next((number for number in _NO_ROOM if os.strerror(number) in words), None)
    if said is None and re.search(r"file write failed|unexpected pos", words):
        said = errno.ENOSPC
    return None if said is None else _NO_ROOM[said]


def _write(plan: Plan, workers: int, progress: Progress, task_bytes: int) -> None:
    staging = plan.destination.staging
    fingerprint = _fingerprint(plan, task_bytes)
    state = staging / _STATE_NAME
    # half a conversion of other options or files: its task numbers would mean other tensors
    if staging.exists() and not (state.is_file() and json.loads(state.read_text()).get("fingerprint") == fingerprint):
        shutil.rmtree(staging)
    fresh = not staging.exists()
    if fresh:
        # a resumed run has some of its bytes on the disk already, and would be told to need them again
        _check_space(plan)
        staging.mkdir(parents=True)
    targets = plan.create()
    if fresh:
        # only now: a run that was stopped while making files starts afresh
        state.write_text(json.dumps({"fingerprint": fingerprint}), encoding="utf-8")
    tasks = _tasks(_jobs(plan.source, targets), task_bytes)
    done_file = staging / _DONE_NAME
    done = set(map(int, done_file.read_text().split())) if done_file.is_file() else set()
    open_tasks = [(number, jobs) for number, jobs in enumerate(tasks) if number not in done]
    total = sum(job.num_bytes for jobs in tasks for job in jobs)
    progress.start("writing", total, total - sum(job.num_bytes for _, jobs in open_tasks for job in jobs))
    non_finite: set[str] = set()
    with done_file.open("a", encoding="utf-8") as log:
        for number, report in _execute(_run_jobs, open_tasks, (plan.transform,), workers):
            # flushed at once: a task that a kill leaves unsaid is written again, to the same places
            log.write(f"{number}\n")
            log.flush()
            non_finite.update(report.non_finite)
            progress.advance(report.num_bytes)
    progress.finish()
    if non_finite:
        progress.warn(f"{len(non_finite)} tensors hold NaN or infinities, the first {min(non_finite)!r}")


def _jobs(source: Source, targets: Sequence[Target]) -> list[Job]:
    def missing(name: str, target: Target) -> str:
        return f"{source.path} lacks {name!r}, which {target.name} is made of"

    jobs, _ = connect(source.groups, targets, source.equal, missing)
    return jobs


def _tasks(jobs: Sequence[Job], task_bytes: int) -> list[list[Job]]:
    # the same in every run of a plan: a resumed run knows finished tasks by their numbers
    tasks: list[list[Job]] = []
    filled = 0
    for job in jobs:
        if not tasks or filled + job.num_bytes > task_bytes:
            tasks.append([])
            filled = 0
        tasks[-1].append(job)
        filled += job.num_bytes
    return tasks


def _run_jobs(jobs: Sequence[Job], transform: Transform | None, threads: int = 1) -> Report:
    return sum(_each(jobs, lambda job: job.run(transform), threads), Report())


def _each(jobs: Sequence[Job], function: Callable[[Job], _T], threads: int) -> list[_T]:
    """Return the function's result for each job; several jobs run at once."""
    # they, and processes, share the cores: with threads of torch's in each they would hold each other up
    torch.set_num_threads(1)
    if threads == 1:
        return [function(job) for job in jobs]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(function, jobs))


def _execute(
    function: Callable[..., Report], tasks: Sequence[tuple[int, list[Job]]], extra: tuple[Transform | None], workers: int
) -> Iterator[tuple[int, Report]]:
    """Yield (task number, report) as tasks finish, in this process or in ``workers`` others."""
    if workers <= 1 or len(tasks) <= 1:
        for number, task in tasks:
            yield number, function(task, *extra, threads=_THREADS)
        return
    # a fork server imports torch once and has no threads that a fork could break
    context = get_context("forkserver")
    context.set_forkserver_preload(["mindspeed_rl.checkpoint.convert"])
    with ProcessPoolExecutor(min(workers, len(tasks)), mp_context=context) as pool:
        futures = {pool.submit(function, task, *extra): number for number, task in tasks}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BrokenProcessPool as error:
            raise ValueError("a worker process was killed (out of memory?); try again with fewer --workers") from error
        except BaseException:
            # tasks that still run write into the folder that is removed next
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def _check_space(plan: Plan) -> None:
    place = plan.destination.staging
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if plan.num_bytes > free:
        raise ValueError(f"{plan.destination.path} needs {_amount(plan.num_bytes)}; its disk has {_amount(free)} left")


def _amount(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 10**7 else f"{num_bytes / 1e3:.1f} kB"


def _fingerprint(plan: Plan, task_bytes: int) -> str:
    """Compute a value of source files, options and plan, which an interrupted run and its successor must share."""
    digest = hashlib.sha256(f"{task_bytes}\n".encode())
    # size and time stand for the content, which would take as long to read as the conversion does
    below = (path for folder in (plan.source.path, *plan.beside) for path in folder.rglob("*"))
    weights = (path for path in below if path.suffix in (".safetensors", ".pt", ".distcp"))
    for path in sorted(path for path in (*weights, *plan.beside) if path.is_file()):
        stat = path.stat()
        digest.update(f"{path}|{stat.st_size}|{stat.st_mtime_ns}\n".encode())
    # --overwrite changes nothing of what is written, and may be added for the second run
    digest.update(repr(replace(plan.destination, overwrite=False)).encode())
    adapters = [group.lora for group in plan.source.groups if isinstance(group, MegatronGroup)]
    digest.update(repr((plan.files, plan.transform, adapters, plan.settings)).encode())
    return digest.hexdigest()


def _publish(plan: Plan) -> Path:
    destination = plan.destination
    staging, final = destination.staging, destination.final
    companions = _companions_staging(plan)
    _write_companions(plan, companions)
    # before the checksums, which count every file in the folder
    for name in (_STATE_NAME, _DONE_NAME):
        (staging / name).unlink(missing_ok=True)
    if destination.kind == "hf":
        _replace_folder(staging, final)
        return final
    checksums.write(staging, checksums.take_lists(staging))
    # all that may find the disk full is written before the first rename
    (companions / TRACKER_NAME).write_text("1", encoding="utf-8")
    os.replace(companions / TRACKER_NAME, destination.path / _TRACKER_STAGING)
    _replace_folder(companions, destination.path / HF_FILES)
    _replace_folder(staging, final)
    # named newest last, so that a first checkpoint is not found before it is whole
    os.replace(destination.path / _TRACKER_STAGING, destination.path / TRACKER_NAME)
    return final


def _companions_staging(plan: Plan) -> Path:
    destination = plan.destination
    return destination.staging if destination.kind == "hf" else destination.path / (HF_FILES + ".partial")


def _replace_folder(made: Path, final: Path) -> None:
    # a folder that is not empty cannot be replaced in one step
    if final.exists():
        shutil.rmtree(final)
    os.replace(made, final)


def _write_companions(plan: Plan, folder: Path) -> None:
    config = dict(plan.source.hf_config)
    config |= mtp_keys(config, plan.source.model_config.mtp_num_layers)
    if plan.destination.dtype is not None:
        config |= dtype_keys(config, plan.destination.dtype)
    folder.mkdir(parents=True, exist_ok=True)
    if plan.source.companions is not None and plan.source.companions.resolve() != folder.resolve():
        copy_companions(plan.source.companions, folder)
    if plan.adapter is not None:
        # imports the tokenizers' library, which a conversion does without
        from mindspeed_rl.checkpoint.trained_template import replace_by_adapter

        replace_by_adapter(plan.adapter, folder)
    write_config(folder, config)


# ---------------------------------------------------------------------- proof


def _verify(plan: Plan, workers: int, progress: Progress, task_bytes: int) -> None:
    """Open the staged result as any reader would and compare every HF tensor with the source, bit for bit."""
    result = _open_result(plan)
    in_source = {name for group in plan.source.groups for name in group.hf}
    in_result = {name: group for group in result.groups for name in group.hf}
    lost = sorted(in_source - in_result.keys() - plan.source.equal.keys())
    if lost:
        raise ValueError(f"verification: {lost[0]} of the source is not in the result")
    for copy, owner in result.equal.items():
        if not same_bits(in_result[copy].load()[copy], in_result[owner].load()[owner]):
            raise ValueError(f"verification: {copy} differs from {owner} in the result")
    # copies that only the result has were held against their owners above
    compared = [_Expected(group) for group in result.groups if group.hf[0] in in_source or group.hf[0] not in result.equal]
    jobs = _jobs(plan.source, compared)
    tasks = list(enumerate(_tasks(jobs, task_bytes)))
    progress.start("verifying", sum(job.num_bytes for job in jobs), 0)
    for _, report in _execute(_check_jobs, tasks, (plan.transform,), workers):
        progress.advance(report.num_bytes)
    progress.finish()


def _open_result(plan: Plan) -> Source:
    staging, source = plan.destination.staging, plan.source
    options = ModelOptions(reward_head=source.model_config.head == "reward", mtp_num_layers=source.model_config.mtp_num_layers)
    if plan.destination.kind != "hf":
        return open_megatron(staging, replace(options, mtp_num_layers=None))
    # for the reader; `_publish` writes it again, over the companions and with the result's dtype
    write_config(staging, source.hf_config)
    return open_hf(staging, options)


@dataclass(frozen=True)
class _Expected:
    """A group of the result, seen as a target so that it is joined with the groups of the source it must equal."""

    group: Group

    @property
    def name(self) -> str:
        return ", ".join(self.group.hf)

    @property
    def hf(self) -> tuple[str, ...]:
        return self.group.hf

    @property
    def num_bytes(self) -> int:
        return self.group.num_bytes

    def write(self, tensors: Mapping[str, Tensor]) -> bool:
        raise AssertionError("a result is only read")


def _check_jobs(jobs: Sequence[Job], transform: Transform | None, threads: int = 1) -> Report:
    _each(jobs, lambda job: job.check([cast(_Expected, target).group for target in job.targets], transform), threads)
    return Report(sum(job.num_bytes for job in jobs))
