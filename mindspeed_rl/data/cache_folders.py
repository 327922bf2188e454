"""Folders of a cache, each made once per content.

A folder is named after a digest of everything that its files depend on. It gets its name when all of them are complete, so a
half-written one is never read; where a file has another size than was written, the folder is made again.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

from mindspeed_rl.data.sources import Source
from mindspeed_rl.files import open_regular, read_json, write_file
from mindspeed_rl.folders import remove_folder
from mindspeed_rl.scratch import scratch_folder

#: folder of the cache, next to the run folders
CACHE = "prepared_data"
#: files of a model's folder that no tokenizer reads
_WEIGHTS = frozenset((".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack"))
#: size of the data from which several processes tokenize
_LARGE_BYTES = 16 << 20
_MAX_WORKERS = 16
_BLOCK_BYTES = 1 << 20


def name_folder(location: str, parts: object) -> str:
    """Return the name of the folder of data at `location`: the beginning, by which people find it, and a digest of `parts`."""
    stem = re.sub(r"[^A-Za-z0-9_.-]", "", Path(location.partition(",")[0].partition("[")[0]).name.partition(".")[0])[:32]
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True, default=list).encode()).hexdigest()[:32]
    return f"{stem}-{digest}" if stem else digest


def count_bytes(source: Source) -> int:
    """Return the size of the files of a source; 0 for a dataset of a library."""
    return sum(os.path.getsize(path) for path in source.paths if os.path.isfile(path))


def choose_workers(source: Source) -> int:
    """Return the number of processes that tokenize a source."""
    return min(os.cpu_count() or 1, _MAX_WORKERS) if count_bytes(source) >= _LARGE_BYTES else 1


@contextmanager
def make_folder(folder: Path, record_name: str, record: dict[str, object]) -> Iterator[Path]:
    """Yield an empty folder, which becomes `folder` with all files that are written to it.

    Args:
        record_name: name of the file of `record`, which is read when the block has ended, and of the files' sizes.

    Raises:
        OSError: the cache cannot be written.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with scratch_folder(f".{folder.name[:12]}-", folder.parent) as scratch:
        built = scratch / "built"
        built.mkdir()
        yield built
        files = {file.name: file.stat().st_size for file in sorted(built.iterdir())}
        write_file(built / record_name, json.dumps({"files": files} | record, indent=1) + "\n")
        if read_record(folder, record_name, record.keys()) is None:
            remove_folder(folder)
        try:
            os.rename(built, folder)
        except OSError:  # another process has written the same folder meanwhile
            if read_record(folder, record_name, record.keys()) is None:
                raise


def read_record(folder: Path, name: str, keys: Iterable[str]) -> dict[str, object] | None:
    """Return the record of a complete folder; None where it is missing, or a file has another size than was written."""
    try:
        record = read_json(folder / name)
        sizes = {file: (folder / file).stat().st_size for file in record["files"]}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return record if sizes == record["files"] and set(keys) <= record.keys() else None


def digest_source(source: Source) -> list[object]:
    """Return digests of the rows of a source: of its files, or of the tables of a dataset."""
    taken: list[object] = [source.format, source.skip_rows, source.max_rows]
    if source.dataset is None:
        return taken + digest_files(map(Path, source.paths))
    files = [Path(entry["filename"]) for entry in source.dataset.cache_files]
    # the fingerprint has the rows that were selected of the files
    taken += [source.dataset._fingerprint, len(source.dataset)]
    return taken + (digest_files(files) if files else list(source.paths))


def digest_tokenizer(folder: Path) -> list[object]:
    """Return digests of the files of a tokenizer's folder, apart from weights."""
    files = sorted(file for file in folder.iterdir() if file.is_file() and file.suffix not in _WEIGHTS)
    return [[file.name, digest] for file, digest in zip(files, digest_files(files), strict=True)]


def digest_code(handler: type) -> list[object]:
    """Return digests of the code that turns rows into tokens: this package's, the handler's file, releases of libraries."""
    own = Path(__file__).parent
    files = sorted(file for pattern in ("*.py", "*.json") for file in own.rglob(pattern))
    module = sys.modules[handler.__module__]
    releases = [version(name) for name in ("transformers", "tokenizers", "jinja2")]
    return [*releases, *digest_files([*files, Path(inspect.getsourcefile(module) or __file__)])]


def digest_files(files: Iterable[Path]) -> list[object]:
    """Return a digest of each file's content."""
    digests: list[object] = []
    for path in files:
        digest = hashlib.sha256()
        with open_regular(path) as file:
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
        digests.append(digest.hexdigest())
    return digests
