"""Raw data of supervised stages as an indexed dataset, made once per content: the cache next to the run folders.

A folder of the cache is named after a digest of everything that its tokens depend on: the contents of the data files, the
tokenizer and the template, the settings, the code of the handlers. It gets its name when all of its files are complete, so a
half-written one is never read; a file of another size than was written makes the folder be written again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import os
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mindspeed_rl.data import handler_class
from mindspeed_rl.data.images import ImageRules
from mindspeed_rl.data.preprocess import run
from mindspeed_rl.data.preprocess_config import PreprocessConfig
from mindspeed_rl.data.sources import Source
from mindspeed_rl.files import open_regular, read_json, write_file
from mindspeed_rl.folders import remove_folder
from mindspeed_rl.scratch import scratch_folder

#: settings on which no token depends
_IRRELEVANT = ("input", "output_prefix", "workers", "n_subs", "log_interval", "cache_dir", "tokenizer_name_or_path")
#: files of a model's folder that no tokenizer reads
_WEIGHTS = frozenset((".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack"))
#: size of the data from which several processes tokenize
_LARGE_BYTES = 16 << 20
_MAX_WORKERS = 16
_BLOCK_BYTES = 1 << 20
_RECORD = "prepared.json"


@dataclass(frozen=True)
class Prepared:
    """An indexed dataset in the cache.

    Attributes:
        prefix: its --output-prefix.
        is_new: it was written by this call.
        rows_read: rows of the raw data.
        rows_added: rows that earlier answers of conversations have added.
        dropped: rows that were left out, by reason.
    """

    prefix: Path
    is_new: bool
    rows_read: int
    rows_added: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)


def prepare(config: PreprocessConfig, source: Source, cache: Path, tokenizer_folder: Path) -> Prepared:
    """Return the indexed dataset of raw rows, from the cache where it is there.

    Args:
        config: settings; output_prefix is not read.
        source: rows of `config.input`.
        cache: folder of the cache, which need not exist.
        tokenizer_folder: folder with the files of the tokenizer.

    Raises:
        ValueError: see `preprocess.run`.
        OSError: the cache cannot be written.
    """
    folder = cache / f"{_name(config.input)}{_digest(config, source, tokenizer_folder)}"
    # rows name files of images, whose contents are not among what was digested
    may_reuse = ImageRules.read(tokenizer_folder) is None
    if may_reuse and (record := _read_record(folder)) is not None:
        return _from_record(folder, record, is_new=False)
    cache.mkdir(parents=True, exist_ok=True)
    large = sum(os.path.getsize(path) for path in source.paths if os.path.isfile(path)) >= _LARGE_BYTES
    workers = min(os.cpu_count() or 1, _MAX_WORKERS) if large else 1
    with scratch_folder(f".{folder.name[:12]}-", cache) as scratch:
        built = scratch / "built"
        built.mkdir()
        settings = dataclasses.replace(config, output_prefix=str(built / "data"), workers=workers)
        counts = run(settings, source=source).counts
        files = {file.name: file.stat().st_size for file in sorted(built.iterdir())}
        dropped = {reason: count for reason, count in counts.dropped.items() if count}
        record = {"files": files, "rows_read": counts.rows_read, "rows_added": counts.rows_added, "dropped": dropped}
        write_file(built / _RECORD, json.dumps(record | {"input": config.input}, indent=1) + "\n")
        if not may_reuse or _read_record(folder) is None:
            remove_folder(folder)
        try:
            os.rename(built, folder)
        except OSError:  # another process has written the same folder meanwhile
            if _read_record(folder) is None:
                raise
    return _from_record(folder, record, is_new=True)


def _name(location: str) -> str:
    """Return the beginning of a folder's name, by which people find it."""
    stem = re.sub(r"[^A-Za-z0-9_.-]", "", Path(location.partition(",")[0].partition("[")[0]).name.partition(".")[0])[:32]
    return f"{stem}-" if stem else ""


def _from_record(folder: Path, record: Mapping[str, object], *, is_new: bool) -> Prepared:
    rows_read, rows_added, dropped = record["rows_read"], record["rows_added"], record["dropped"]
    assert isinstance(rows_read, int) and isinstance(rows_added, int) and isinstance(dropped, Mapping)
    return Prepared(folder.absolute() / "data", is_new, rows_read, rows_added, dict(dropped))


def _read_record(folder: Path) -> dict[str, object] | None:
    """Return the record of a complete folder; None where it is missing, or a file has another size than was written."""
    try:
        record = read_json(folder / _RECORD)
        sizes = {name: (folder / name).stat().st_size for name in record["files"]}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return record if sizes == record["files"] and {"rows_read", "rows_added", "dropped"} <= record.keys() else None


def _digest(config: PreprocessConfig, source: Source, tokenizer_folder: Path) -> str:
    """Return a digest of all that the tokens depend on."""
    settings = {key: value for key, value in dataclasses.asdict(config).items() if key not in _IRRELEVANT}
    rows: list[object] = [source.format, source.skip_rows, source.max_rows, *_digest_rows(source)]
    parts = [settings, rows, _digest_folder(tokenizer_folder), _digest_code(config.handler_name)]
    if config.prompt_type_path:
        parts.append(_digest_files([Path(config.prompt_type_path)]))
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=list).encode()).hexdigest()[:32]


def _digest_rows(source: Source) -> list[object]:
    """Return digests of the files of a source, or of the tables of a dataset."""
    if source.dataset is None:
        return _digest_files(map(Path, source.paths))
    files = [Path(entry["filename"]) for entry in source.dataset.cache_files]
    # the fingerprint has the rows that were selected of the files
    named = [source.dataset._fingerprint, len(source.dataset)]
    return [*named, *_digest_files(files)] if files else [*named, list(source.paths)]


def _digest_folder(folder: Path) -> list[object]:
    """Return digests of the files of a tokenizer's folder, apart from weights."""
    files = sorted(file for file in folder.iterdir() if file.is_file() and file.suffix not in _WEIGHTS)
    return [[file.name, digest] for file, digest in zip(files, _digest_files(files), strict=True)]


def _digest_code(handler_name: str) -> list[object]:
    """Return digests of the code that turns rows into tokens: this package's, and the handler's file."""
    own = Path(__file__).parent
    files = sorted(file for pattern in ("*.py", "*.json") for file in own.rglob(pattern))
    module = sys.modules[handler_class(handler_name).__module__]
    return _digest_files([*files, Path(inspect.getsourcefile(module) or __file__)])


def _digest_files(files: Iterable[Path]) -> list[object]:
    digests: list[object] = []
    for path in files:
        digest = hashlib.sha256()
        with open_regular(path) as file:
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
        digests.append(digest.hexdigest())
    return digests
