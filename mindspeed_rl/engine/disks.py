"""Checkpoints of machines that share no disk: each disk holds what its own ranks wrote, and the small files that all need.

At a load a disk gets from the others what its ranks read and it lacks, and keeps it. Nothing is fetched that no rank of the
disk reads: every other copy of a weight is written once, by one rank, and read by many.
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
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from torch.distributed.checkpoint import metadata as dcp

from mindspeed_rl.checkpoint import checksums
from mindspeed_rl.checkpoint.dist import METADATA_FILE, listed_chunks, read_metadata
from mindspeed_rl.checkpoint.mcore import LATEST_NAME
from mindspeed_rl.config.model_metadata import HF_FILES

#: a network's file system may show what was just written a little later elsewhere
_PATIENCE_S = 2.0
_BLOCK_BYTES = 16 << 20
#: what one rank wrote for itself; all other files of a checkpoint are small, and every disk has them
_OWN_FILES = (".distcp", ".safetensors")
#: below it lie the states of the ranks' random generators
RANDOM = "random/"

_T = TypeVar("_T")


def gathered(value: _T) -> list[_T]:
    """Every rank's value, by rank; collective."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def all_succeeded(failure: str | None) -> None:
    """Returns on every rank, or raises on every rank with what the first of them says; collective.

    Raises:
        ValueError: some rank failed.
    """
    for rank, text in enumerate(gathered(failure)):
        if text is not None:
            raise ValueError(f"rank {rank}: {text}")


@dataclass(frozen=True)
class Disks:
    """Which ranks see the same files.

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
        """Whether this rank does what is done once a disk."""
        return self.leader_of[dist.get_rank()] == dist.get_rank()

    @property
    def peers(self) -> list[int]:
        """The ranks of this rank's disk, in order."""
        mine = self.leader_of[dist.get_rank()]
        return [rank for rank, leader in enumerate(self.leader_of) if leader == mine]


def find_disks(folder: Path) -> Disks:
    """Which ranks see the same `folder`, which is made where it is missing; collective.

    Raises:
        ValueError: a rank cannot write there.
    """
    rank = dist.get_rank()
    tag = gathered(uuid.uuid4().hex)[0]
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
            all_succeeded(failure)
            for other, sees in enumerate(gathered(_appears(mark))):
                if sees and leader_of[other] is None:
                    leader_of[other] = leader
                elif sees:
                    # this disk is known already, and was slow to show the other mark
                    known = leader_of[other]
                    leader_of = [known if item == leader else item for item in leader_of]
                    leader_of[leader] = known
    finally:
        for mark in marks:
            with contextlib.suppress(OSError):
                mark.unlink()
    return Disks(tuple(leader for leader in leader_of if leader is not None))


def _appears(path: Path) -> bool:
    end = time.monotonic() + _PATIENCE_S
    while not path.exists():
        if time.monotonic() >= end:
            return False
        time.sleep(0.05)
    return True


def join_sums(disks: Disks, partial: Path) -> None:
    """Rank 0's disk has the sums of all files, and says which of them lie elsewhere; collective.

    Raises:
        ValueError: a rank cannot read its disk's, or rank 0 cannot write.
    """
    rank = dist.get_rank()
    own: checksums.Sums = {}
    failure: str | None = None
    try:
        own = checksums.take_parts(partial) if disks.leads else {}
    except (OSError, ValueError) as error:
        failure = f"{partial}: {error}"
    all_succeeded(failure)
    found = [(host, sums) for host, sums in gathered((socket.gethostname(), own)) if sums]
    if rank == 0:
        try:
            sums = {name: value for _, part in found for name, value in part.items()}
            if len(found) > 1:
                listed = [{"host": host, "files": sorted(filter(_is_own, part))} for host, part in found]
                listing = partial / checksums.SPREAD
                listing.write_text(json.dumps(listed, indent=0), encoding="utf-8")
                sums[listing.name] = checksums.checksum(listing)
            checksums.write(partial, sums)
        except OSError as error:
            failure = f"{partial}: {error}"
    all_succeeded(failure)


def _is_own(name: str) -> bool:
    return name.endswith(_OWN_FILES)


def spread(disks: Disks, folder: Path) -> None:
    """Every disk has the small files of this checkpoint, which rank 0 has; collective.

    Raises:
        ValueError: a rank cannot read or write them.
    """
    if len(disks.leaders) == 1:
        return
    _put_everywhere(disks, folder, lambda: _small_files(folder), source=0)


def _small_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file() and not _is_own(path.name)}


def _put_everywhere(disks: Disks, folder: Path, read: Callable[[], Mapping[str, bytes]], *, source: int) -> None:
    """Every disk has the files, by their names below the folder, that the rank `source` reads; collective."""
    rank = dist.get_rank()
    failure: str | None = None
    carried: list[Any] = [{}]
    try:
        carried = [read()] if rank == source else carried
    except OSError as error:
        failure = str(error)
    all_succeeded(failure)
    dist.broadcast_object_list(carried, src=source)
    if disks.leads and disks.leader_of[source] != rank:
        try:
            for name, content in carried[0].items():
                _replace(folder / name, content)
        except OSError as error:
            failure = str(error)
    all_succeeded(failure)


def _replace(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_bytes(content)
    os.replace(temporary, path)


def settle_record(folder: Path, path: Path) -> Disks | None:
    """Every disk has the small files of a checkpoint, as one of a machine that took another's place need not; collective.

    Args:
        folder: of the checkpoints.
        path: of this one.

    Returns:
        Who shares a disk, None where every rank saw the checkpoint from the start.
    """
    has = gathered((path / checksums.NAME).is_file())
    if all(has) or not any(has):
        return None
    disks = find_disks(folder)

    def read() -> dict[str, bytes]:
        companions = folder / HF_FILES
        beside = [folder / LATEST_NAME, *(companions.iterdir() if companions.is_dir() else ())]
        files = {f"{path.name}/{name}": content for name, content in _small_files(path).items()}
        return files | {str(file.relative_to(folder)): file.read_bytes() for file in beside if file.is_file()}

    _put_everywhere(disks, folder, read, source=has.index(True))
    return disks


@dataclass(frozen=True)
class Parts:
    """What the disks hold of a checkpoint.

    Attributes:
        absent: for every rank the files that it does not see.
        lost: those that no machine has; a run goes on without them.
    """

    path: Path
    disks: Disks
    absent: Sequence[frozenset[str]]
    lost: frozenset[str] = frozenset()

    def fetch(self, needed: Iterable[str]) -> None:
        """This rank's disk has these files; collective.

        Raises:
            ValueError: a file cannot be read, arrives damaged, or cannot be written; on every rank.
        """
        sums = checksums.read(self.path)
        assert sums is not None  # a checkpoint without sums does not tell what is absent
        mine = self.absent[dist.get_rank()]
        wanted: dict[str, set[int]] = {}
        for rank, names in enumerate(gathered(sorted(mine & set(needed)))):
            for name in names:
                wanted.setdefault(name, set()).add(self.disks.leader_of[rank])
        # files go through the hosts' memory, whatever the devices talk by
        group = cast(dist.ProcessGroup, dist.new_group(backend="gloo"))
        failures: list[str] = []
        try:
            for name in sorted(wanted):
                source = next(rank for rank, names in enumerate(self.absent) if name not in names)
                problem = self._move(name, sums[name], source, sorted(wanted[name]), group)
                failures += [] if problem is None else [problem]
        finally:
            dist.destroy_process_group(group)
        all_succeeded(failures[0] if failures else None)

    def _move(
        self, name: str, expected: tuple[int, int], source: int, readers: Sequence[int], group: dist.ProcessGroup
    ) -> str | None:
        """One file goes from a rank to those that lead other disks; returns what went wrong on this rank."""
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
            # sent also when it could not be read: the others wait for it, and find its sum to be wrong
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


def find_parts(folder: Path, path: Path, disks: Disks | None) -> Parts | None:
    """What the disks hold of a checkpoint; None where every rank sees all of it, or it does not say what belongs to it.

    Collective.

    Args:
        folder: of the checkpoints.
        path: of this one.
        disks: who shares one, where that is known.

    Raises:
        ValueError: no machine has one of its files, and it is more than a random generator's state.
    """
    absent = gathered(checksums.absent(path))
    if not any(absent):
        return None
    lost = frozenset.intersection(*absent)
    disks = disks or find_disks(folder)
    apart = len(disks.leaders) > 1
    needed = [name for name in sorted(lost) if not (apart and name.startswith(RANDOM))]
    if needed:
        machines = f" on every one of {len(disks.leaders)} disks; {_writer(path, needed[0])}" if apart else ""
        raise ValueError(f"{path / needed[0]} is missing{machines}")
    return Parts(path, disks, absent, lost)


def _writer(path: Path, name: str) -> str:
    """Which machine has written a file."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        for part in json.loads((path / checksums.SPREAD).read_text(encoding="utf-8")):
            if name in part["files"]:
                return f"{part['host']} has written it"
    return "nobody says which machine has written it"


def files_read(path: Path, wanted: Mapping[str, Any]) -> set[str]:
    """The files of a checkpoint that hold what Megatron's sharded state asks for on this rank."""
    metadata = read_metadata(path / METADATA_FILE)
    boxes: dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
    objects: set[str] = set()
    for item in _sharded(wanted):
        if isinstance(item, ShardedTensor):
            size = (1,) * item.prepend_axis_num + tuple(item.local_shape)
            boxes.setdefault(item.key, []).append((tuple(item.global_offset), size))
        else:
            # with the number of its shard; Megatron also knows files of before, without
            objects |= {item.unique_key} if item.unique_key in metadata.state_dict_metadata else {item.key}
    found: set[str] = set()
    for index, info in metadata.storage_data.items():
        if isinstance(metadata.state_dict_metadata.get(index.fqn), dcp.TensorStorageMetadata):
            continue
        if index.fqn in objects or index.fqn.partition("/")[0] in objects:
            found.add(os.path.basename(info.relative_path))
    chunks = listed_chunks(path, metadata)
    for key, wanted_boxes in boxes.items():
        for chunk in chunks.get(key, ()):
            if any(_overlap(chunk.offsets, chunk.sizes, *box) for box in wanted_boxes):
                found.add(os.path.basename(chunk.path))
    return found


def _sharded(state: Mapping[str, Any]) -> Iterator[ShardedTensor | ShardedObject]:
    for value in nested_values(dict(state)):
        if isinstance(value, ShardedTensorFactory):
            yield from _sharded({"": value.build()})
        elif isinstance(value, (ShardedTensor, ShardedObject)):
            yield value


def _overlap(first: Sequence[int], first_size: Sequence[int], second: Sequence[int], second_size: Sequence[int]) -> bool:
    if len(first) != len(second) or len(first_size) != len(second_size):
        return True  # saved in another form: rather too much than too little
    return all(a < b + n and b < a + m for a, m, b, n in zip(first, first_size, second, second_size, strict=True))
