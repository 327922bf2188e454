"""Checkpoints of machines that share no disk: each disk has the files of its own ranks, and the small files that all need.

At a load a disk gets from the others the files that its ranks read and it lacks, and keeps them. No other files are copied:
each copy of a weight is written once, by one rank, and read by many.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedStateDict, ShardedTensor, ShardedTensorFactory
from torch.distributed.checkpoint import metadata as dcp

from mindspeed_rl.checkpoint import checksums
from mindspeed_rl.checkpoint.dist import COMMON_STATE, METADATA_FILE, listed_chunks, read_metadata
from mindspeed_rl.checkpoint.mcore import TRACKER_NAME
from mindspeed_rl.config.model_metadata import HF_FILES
from mindspeed_rl.files import write_file

#: a file on a network file system may appear a little later on other machines
_PATIENCE_S = 2.0
_BLOCK_BYTES = 16 << 20
#: files of one rank; all other files of a checkpoint are small, and every disk has them
_RANK_FILES = (".distcp", ".safetensors")
#: folder of the states of the ranks' random generators
RANDOM = "random/"

_T = TypeVar("_T")


def gather_objects(value: _T) -> list[_T]:
    """Return every rank's value, by rank; collective."""
    values = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def raise_any_failure(failure: str | None) -> None:
    """Raise the first rank's failure on every rank, if any rank has one; collective.

    Raises:
        ValueError: some rank failed.
    """
    for rank, text in enumerate(gather_objects(failure)):
        if text is not None:
            raise ValueError(f"rank {rank}: {text}")


@contextlib.contextmanager
def failing_together() -> Iterator[None]:
    """Raise the ValueError of a block on every rank, if it has one on any; collective at the end of the block.

    Raises:
        ValueError: the block failed on some rank.
    """
    failure: str | None = None
    try:
        yield
    except ValueError as error:
        failure = str(error)
    raise_any_failure(failure)


@dataclass(frozen=True)
class Disks:
    """Disks of the ranks: those on one disk see the same files.

    Attributes:
        leader_of: for every rank the first rank that sees the same folder.
    """

    leader_of: tuple[int, ...]

    @property
    def leaders(self) -> list[int]:
        """One rank of each disk, in order; rank 0 is one."""
        return sorted(set(self.leader_of))

    @property
    def leads(self) -> bool:
        """True on the rank that does the work of its disk."""
        return self.leader_of[dist.get_rank()] == dist.get_rank()

    @property
    def peers(self) -> list[int]:
        """Ranks of this rank's disk, in order."""
        mine = self.leader_of[dist.get_rank()]
        return [rank for rank, leader in enumerate(self.leader_of) if leader == mine]


def find_disks(folder: Path) -> Disks:
    """Find the ranks that see the same `folder`, which is made where it is missing; collective.

    Raises:
        ValueError: a rank cannot write there.
    """
    rank = dist.get_rank()
    tag = gather_objects(uuid.uuid4().hex)[0]
    leader_of: list[int | None] = [None] * dist.get_world_size()
    marks: list[Path] = []
    try:
        while None in leader_of:
            leader = leader_of.index(None)
            mark = folder / f".disk-{tag}-{leader}"
            failure = None
            if rank == leader:
                try:
                    folder.mkdir(parents=True, exist_ok=True)
                    mark.touch()
                    marks.append(mark)
                except OSError as error:
                    failure = str(error.strerror)
            raise_any_failure(failure)
            for other, sees in enumerate(gather_objects(_wait_for(mark))):
                if sees and leader_of[other] is None:
                    leader_of[other] = leader
                elif sees:
                    # this disk is known already, and showed the other mark late
                    known = leader_of[other]
                    leader_of = [known if item == leader else item for item in leader_of]
                    leader_of[leader] = known
    finally:
        for mark in marks:
            with contextlib.suppress(OSError):
                mark.unlink()
    return Disks(tuple(leader for leader in leader_of if leader is not None))


def _wait_for(path: Path) -> bool:
    end = time.monotonic() + _PATIENCE_S
    while not path.exists():
        if time.monotonic() >= end:
            return False
        time.sleep(0.05)
    return True


def join_checksums(disks: Disks, partial: Path) -> None:
    """Write the checksums of all files on rank 0's disk, and the list of those on other disks; collective.

    Raises:
        ValueError: a rank cannot read the lists of its disk, or rank 0 cannot write.
    """
    rank = dist.get_rank()
    local: checksums.Sums = {}
    failure: str | None = None
    try:
        local = checksums.take_lists(partial) if disks.leads else {}
    except (OSError, ValueError) as error:
        failure = f"{partial}: {error}"
    raise_any_failure(failure)
    lists = [(host, sums) for host, sums in gather_objects((socket.gethostname(), local)) if sums]
    if rank == 0:
        try:
            sums = {name: value for _, sums_of_host in lists for name, value in sums_of_host.items()}
            if len(lists) > 1:
                files = [sorted(name for name in names if name.endswith(_RANK_FILES)) for _, names in lists]
                listed = [{"host": host, "files": names} for (host, _), names in zip(lists, files)]
                listing = partial / checksums.SPREAD
                listing.write_text(json.dumps(listed, indent=0), encoding="utf-8")
                sums[listing.name] = checksums.checksum(listing)
            checksums.write(partial, sums)
        except OSError as error:
            failure = f"{partial}: {error}"
    raise_any_failure(failure)


def copy_small_files(disks: Disks, folder: Path) -> None:
    """Copy the small files of this checkpoint from rank 0's disk to all others; collective.

    Raises:
        ValueError: a rank cannot read or write them.
    """
    if len(disks.leaders) == 1:
        return
    _copy_everywhere(disks, folder, lambda: _read_small_files(folder), source=0)


def _read_small_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file() and not path.name.endswith(_RANK_FILES)}


def _copy_everywhere(disks: Disks, folder: Path, read: Callable[[], Mapping[str, bytes]], *, source: int) -> None:
    """Write the files that the rank `source` reads, by their names in the folder, on all other disks; collective."""
    rank = dist.get_rank()
    failure: str | None = None
    content_by_name: list[Mapping[str, bytes]] = [{}]
    try:
        content_by_name = [read()] if rank == source else content_by_name
    except OSError as error:
        failure = str(error)
    raise_any_failure(failure)
    dist.broadcast_object_list(content_by_name, src=source)
    if disks.leads and disks.leader_of[source] != rank:
        try:
            for name, content in content_by_name[0].items():
                write_file(folder / name, content, makes_folder=True)
        except OSError as error:
            failure = str(error)
    raise_any_failure(failure)


def share_small_files(folder: Path, path: Path) -> Disks | None:
    """Copy the small files of a checkpoint to disks without them, such as a replaced machine's; collective.

    Args:
        folder: folder of the checkpoints.
        path: folder of this checkpoint.

    Returns:
        The disks of the ranks, None where every rank has the checkpoint already.
    """
    has = gather_objects((path / checksums.NAME).is_file())
    if all(has) or not any(has):
        return None
    disks = find_disks(folder)

    def read() -> dict[str, bytes]:
        companions = folder / HF_FILES
        others = [folder / TRACKER_NAME, *(companions.iterdir() if companions.is_dir() else ())]
        files = {f"{path.name}/{name}": content for name, content in _read_small_files(path).items()}
        return files | {str(file.relative_to(folder)): file.read_bytes() for file in others if file.is_file()}

    _copy_everywhere(disks, folder, read, source=has.index(True))
    return disks


@dataclass(frozen=True)
class CheckpointFiles:
    """Files of a checkpoint that are not on every disk.

    Attributes:
        absent: for every rank the files that it does not see.
        lost: those that no machine has; a run resumes without them.
    """

    path: Path
    disks: Disks
    absent: Sequence[frozenset[str]]
    lost: frozenset[str] = frozenset()

    def fetch(self, needed: Iterable[str]) -> None:
        """Copy these files to this rank's disk; collective.

        Raises:
            ValueError: a file cannot be read, arrives damaged, or cannot be written; on every rank.
        """
        sums = checksums.read(self.path)
        assert sums is not None  # absent files are known from the checksums
        mine = self.absent[dist.get_rank()]
        readers: dict[str, set[int]] = {}
        for rank, names in enumerate(gather_objects(sorted(mine & set(needed)))):
            for name in names:
                readers.setdefault(name, set()).add(self.disks.leader_of[rank])
        # files go through the hosts' memory, with every device backend
        group = cast(dist.ProcessGroup, dist.new_group(backend="gloo"))
        failures: list[str] = []
        try:
            for name in sorted(readers):
                source = next(rank for rank, names in enumerate(self.absent) if name not in names)
                problem = self._move(name, sums[name], source, sorted(readers[name]), group)
                failures += [] if problem is None else [problem]
        finally:
            dist.destroy_process_group(group)
        raise_any_failure(failures[0] if failures else None)

    def _move(
        self, name: str, expected: tuple[int, int], source: int, readers: Sequence[int], group: dist.ProcessGroup
    ) -> str | None:
        """Copy one file from a rank to those that lead other disks; return the problem of this rank, if any."""
        rank = dist.get_rank()
        if rank == source:
            return _send(self.path / name, expected[0], readers, group)
        return _receive(self.path / name, expected, source, group) if rank in readers else None


def _blocks(size: int) -> Iterator[int]:
    for start in range(0, size, _BLOCK_BYTES):
        yield min(_BLOCK_BYTES, size - start)


def _send(path: Path, size: int, readers: Sequence[int], group: dist.ProcessGroup) -> str | None:
    problem: str | None = None
    with contextlib.ExitStack() as opened:
        file = None
        try:
            file = opened.enter_context(path.open("rb"))
        except OSError as error:
            problem = str(error)
        for length in _blocks(size):
            block = bytearray(length)
            try:
                if file is not None and file.readinto(block) != length:
                    problem = problem or f"{path} is shorter than {size} bytes"
            except OSError as error:
                problem = problem or str(error)
            # sent even when it could not be read: the others wait for it, and detect the wrong checksum
            content = torch.frombuffer(block, dtype=torch.uint8)
            for reader in readers:
                dist.send(content, reader, group=group)
    return problem


def _receive(path: Path, expected: tuple[int, int], source: int, group: dist.ProcessGroup) -> str | None:
    size, crc = expected
    temporary = path.with_name(f"{path.name}.tmp")
    problem: str | None = None
    total = 0
    with contextlib.ExitStack() as opened:
        file = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = opened.enter_context(temporary.open("wb"))
        except OSError as error:
            problem = str(error)
        for length in _blocks(size):
            block = torch.empty(length, dtype=torch.uint8)
            dist.recv(block, source, group=group)
            content = block.numpy().data
            total = checksums.crc32(content, total)
            try:
                if file is not None and problem is None:
                    file.write(content)
            except OSError as error:
                problem = str(error)
    if problem is None and total != crc:
        problem = f"{path} did not arrive from rank {source} as it was written"
    with contextlib.suppress(OSError):
        if problem is None:
            os.replace(temporary, path)
        else:
            temporary.unlink(missing_ok=True)
    return problem


def find_missing_files(folder: Path, path: Path, disks: Disks | None) -> CheckpointFiles | None:
    """Find the files of a checkpoint that are not on every disk; None without any, or without checksums.

    Collective.

    Args:
        folder: folder of the checkpoints.
        path: folder of this checkpoint.
        disks: disks of the ranks, where they are known.

    Raises:
        ValueError: no machine has one of its files, and it is more than a random generator's state.
    """
    absent = gather_objects(checksums.absent(path))
    if not any(absent):
        return None
    lost = frozenset.intersection(*absent)
    disks = disks or find_disks(folder)
    several = len(disks.leaders) > 1
    needed = [name for name in sorted(lost) if not (several and name.startswith(RANDOM))]
    if needed:
        machines = f" on every one of {len(disks.leaders)} disks; {_describe_writer(path, needed[0])}" if several else ""
        raise ValueError(f"{path / needed[0]} is missing{machines}")
    return CheckpointFiles(path, disks, absent, lost)


def _describe_writer(path: Path, name: str) -> str:
    """Return the machine that has written a file, for an error."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        for machine in json.loads((path / checksums.SPREAD).read_text(encoding="utf-8")):
            if name in machine["files"]:
                return f"{machine['host']} has written it"
    return "the machine that has written it is unknown"


def list_needed_files(path: Path, sharded: ShardedStateDict) -> set[str]:
    """Return the files of a checkpoint that have the tensors and objects of Megatron's sharded state on this rank."""
    metadata = read_metadata(path / METADATA_FILE)
    slices: dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
    objects = {COMMON_STATE}
    for item in _list_sharded(sharded):
        if isinstance(item, ShardedTensor):
            size = (1,) * item.prepend_axis_num + tuple(item.local_shape)
            slices.setdefault(item.key, []).append((tuple(item.global_offset), size))
        else:
            # with the index of its shard; earlier files of Megatron have none
            objects |= {item.unique_key} if item.unique_key in metadata.state_dict_metadata else {item.key}
    files: set[str] = set()
    for index, info in metadata.storage_data.items():
        if isinstance(metadata.state_dict_metadata.get(index.fqn), dcp.TensorStorageMetadata):
            continue
        if index.fqn in objects or index.fqn.partition("/")[0] in objects:
            files.add(os.path.basename(info.relative_path))
    chunks = listed_chunks(path, metadata)
    for key, needed in slices.items():
        for chunk in chunks.get(key, ()):
            if any(_overlap(chunk.offsets, chunk.sizes, *tensor_slice) for tensor_slice in needed):
                files.add(os.path.basename(chunk.path))
    return files


def _list_sharded(state: ShardedStateDict) -> Iterator[ShardedTensor | ShardedObject]:
    for value in nested_values(dict(state)):
        if isinstance(value, ShardedTensorFactory):
            yield from _list_sharded({"": value.build()})
        elif isinstance(value, (ShardedTensor, ShardedObject)):
            yield value


def _overlap(first: Sequence[int], first_size: Sequence[int], second: Sequence[int], second_size: Sequence[int]) -> bool:
    if len(first) != len(second) or len(first_size) != len(second_size):
        return True  # saved in another form: too many files rather than too few
    return all(a < b + n and b < a + m for a, m, b, n in zip(first, first_size, second, second_size, strict=True))
