"""Sums over the files of a Megatron checkpoint, of a run or of a conversion: `checksums.json` says what each must be.

So damage is found by file name. It is zlib's CRC-32, by ISA-L: 57 GB/s a core in the cache where zlib does 4, SHA-256 2 and
BLAKE2b 1.3, so reading decides. It finds accidents (inverted bits, truncation, another checkpoint's file); it does not sign.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from isal.isal_zlib import crc32

from mindspeed_rl.files import read_json

NAME = "checksums.json"
#: sums of the files of one rank, until they are joined: `<_PARTS>/rank_00003.json`
_PARTS = "checksums"
#: beside them, where machines that share no disk have written a checkpoint: which of its large files is on whose disk
SPREAD = "disks.json"
#: what is read at once; it stays in the processor's second cache
_BLOCK_BYTES = 256 << 10
#: what a thread sums at once; others run meanwhile
_PART_BYTES = 64 << 20
_THREADS = 4

#: file, relative to the folder of the checkpoint -> (bytes, CRC-32)
Sums = dict[str, tuple[int, int]]


class DamagedCheckpointError(ValueError):
    """A file of a checkpoint is missing, truncated, changed, or of another checkpoint; the message names it."""


def checksum(path: Path) -> tuple[int, int]:
    """Compute bytes and CRC-32 of a file."""
    (sums,) = _sums(path.parent, [path.name]).values()
    return sums


def combine(first: int, second: int, num_bytes: int) -> int:
    """Compute the CRC-32 of two consecutive parts from the CRC-32 of each.

    A CRC is a remainder of polynomials over GF(2), so what follows the first part multiplies its remainder by x^8 a byte.

    Args:
        num_bytes: size in bytes of the second part.
    """
    power, factor, exponent = _ONE, _BYTE, num_bytes
    while exponent:
        if exponent & 1:
            power = _product(power, factor)
        factor, exponent = _product(factor, factor), exponent >> 1
    return _product(power, first) ^ second


#: polynomials as CRC-32 writes them, the highest bit for x^0: the divisor without x^32, 1, and x^8
_DIVISOR, _ONE, _BYTE = 0xEDB88320, 1 << 31, 1 << 23


def _product(first: int, second: int) -> int:
    """Compute the remainder of the product of two polynomials of less than 32 coefficients."""
    product = 0
    while first:
        if first & _ONE:
            product ^= second
        first = first << 1 & 0xFFFFFFFF
        second = second >> 1 ^ (_DIVISOR if second & 1 else 0)
    return product


def write_list(folder: Path, rank: int, names: Iterable[str]) -> None:
    """Write the sums of these files to `checksums/rank_<rank>.json`."""
    path = folder / _PARTS / f"rank_{rank:05d}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(_sums(folder, sorted(names))), encoding="utf-8")


def take_lists(folder: Path) -> Sums:
    """Compute the sums of all files of the folder, with the sums in the ranks' lists, which are removed."""
    sums: Sums = {}
    for part in sorted((folder / _PARTS).glob("rank_*.json")):
        sums.update({name: (size, crc) for name, (size, crc) in json.loads(part.read_text(encoding="utf-8")).items()})
        part.unlink()
    if (folder / _PARTS).is_dir():
        (folder / _PARTS).rmdir()
    return sums | _sums(folder, sorted(_files(folder) - sums.keys()))


def write(folder: Path, sums: Mapping[str, tuple[int, int]]) -> None:
    """Write these sums to `checksums.json`."""
    (folder / NAME).write_text(json.dumps(dict(sorted(sums.items())), indent=0), encoding="utf-8")


def read(folder: Path) -> Sums | None:
    """Read the expected sums of the files; None for a checkpoint of a version that wrote no sums.

    Raises:
        DamagedCheckpointError: the list is missing or damaged.
    """
    path = folder / NAME
    if not path.is_file():
        # a list that was lost must not make a checkpoint pass for an old one
        if _promises_sums(folder):
            raise DamagedCheckpointError(f"{path} is missing; the files of this checkpoint cannot be verified")
        return None
    try:
        return {str(name): (int(size), int(crc)) for name, (size, crc) in read_json(path).items()}
    except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
        raise DamagedCheckpointError(f"{path} is damaged: {type(error).__name__}: {str(error)[:100]}") from None


def _promises_sums(folder: Path) -> bool:
    """Return whether the checkpoint's record promises checksums."""
    try:
        record = read_json(folder / "run_state.json")
    except (OSError, ValueError):
        return False
    return isinstance(record, dict) and bool(record.get("checksums"))


def absent(folder: Path) -> frozenset[str]:
    """Return the listed files that are missing; none for a checkpoint without sums, or whose list is damaged."""
    try:
        return frozenset(name for name in read(folder) or () if not (folder / name).is_file())
    except DamagedCheckpointError:
        return frozenset()


def elsewhere(folder: Path) -> frozenset[str]:
    """Return the files that are missing here and may be on the disk of another machine that has written this checkpoint."""
    return absent(folder) if (folder / SPREAD).is_file() else frozenset()


def check_sizes(folder: Path, sums: Mapping[str, tuple[int, int]], leave_out: Collection[str] = ()) -> None:
    """Check that every listed file has its size and no other weight file is there; reads no file.

    Args:
        leave_out: files on other disks.

    Raises:
        DamagedCheckpointError: naming the first that is not.
    """
    for name, (size, _) in sums.items():
        if name in leave_out:
            continue
        path = folder / name
        if not path.is_file():
            hint = "; machines without a shared disk wrote this checkpoint: copy the folders of all of them into one"
            raise DamagedCheckpointError(f"{path} is missing" + (hint if (folder / SPREAD).is_file() else ""))
        actual = path.stat().st_size
        if actual != size:
            raise DamagedCheckpointError(f"{path} has {actual} bytes, but was written with {size}")
    for name in sorted(_files(folder) - sums.keys() - {NAME}):
        # what a loader would read; a note next to it does no harm
        if name.endswith((".distcp", ".pt", ".safetensors")):
            raise DamagedCheckpointError(f"{folder / name} is not a file of this checkpoint ({NAME} does not know it)")


def verify(
    folder: Path,
    *,
    shard: int = 0,
    num_shards: int = 1,
    only: Callable[[str], bool] | None = None,
    leave_out: Collection[str] = (),
) -> bool:
    """Check the files against their sums; return False for a checkpoint of a version that wrote no sums.

    Args:
        shard, num_shards: read every `num_shards`-th file from index `shard` on; the ranks of a node divide the work.
        only: selects the files to check; all when None.
        leave_out: files on other disks.

    Raises:
        DamagedCheckpointError: naming the file.
    """
    sums = read(folder)
    if sums is None:
        return False
    if only is not None:
        sums = {name: value for name, value in sums.items() if only(name)}
    else:
        check_sizes(folder, sums, leave_out)
    mine = sorted(sums.keys() - set(leave_out))[shard::num_shards]
    for name, actual in _sums(folder, mine).items():
        if actual[1] != sums[name][1]:
            raise DamagedCheckpointError(
                f"{folder / name} is damaged: its checksum is {actual[1]:08x}, not {sums[name][1]:08x}"
            )
    return True


def _sums(folder: Path, names: Iterable[str]) -> Sums:
    sizes = {name: (folder / name).stat().st_size for name in names}
    # also of one large file, each core sums a part
    parts = [(name, start) for name, size in sizes.items() for start in range(0, size, _PART_BYTES)]
    sums: Sums = dict.fromkeys(sizes, (0, 0))
    if not parts:
        return sums
    with ThreadPoolExecutor(min(_THREADS, len(parts))) as pool:
        for (name, _), (count, crc) in zip(parts, pool.map(lambda part: _sum_part(folder / part[0], part[1]), parts)):
            size, before = sums[name]
            sums[name] = size + count, combine(before, crc, count)
    return sums


def _sum_part(path: Path, start: int) -> tuple[int, int]:
    """Compute bytes and CRC-32 of the part from this byte on, read in blocks."""
    end, position, crc = start + _PART_BYTES, start, 0
    block = memoryview(bytearray(_BLOCK_BYTES))
    descriptor = os.open(path, os.O_RDONLY)
    try:
        while position < end and (count := os.preadv(descriptor, [block[: end - position]], position)):
            position, crc = position + count, crc32(block[:count], crc)
    finally:
        os.close(descriptor)
    return position - start, crc


def _files(folder: Path) -> set[str]:
    """Return all files below the folder, relative to it."""
    paths = set()
    for root, _, names in os.walk(folder):
        paths |= {os.path.relpath(os.path.join(root, name), folder) for name in names}
    return paths
