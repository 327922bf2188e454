"""Raw data in chunks: parquet, arrow, json, jsonl, csv, txt, folders, patterns and lists of them, Hugging Face datasets.

The planning process splits the input into chunks and keeps a few of them at a time; workers read the rows of a chunk.
Line files are sent as byte ranges (compressed ones as bytes), tables as Arrow batches, so planning is cheap and memory does
not grow with the input.
"""

from __future__ import annotations

import contextlib
import csv
import glob
import io
import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from mindspeed_rl.data import strict_json
from mindspeed_rl.data.compressed import COMPRESSIONS, is_compressed, open_content, read_suffix
from mindspeed_rl.data.configurations import Configuration, find_repeated_shard, read_configurations
from mindspeed_rl.data.conversation import MalformedRowError, Row
from mindspeed_rl.data.short_floats import shorten_floats
from mindspeed_rl.data.strict_json import StrictDecoder
from mindspeed_rl.files import describe_foreign, describe_missing, open_regular
from mindspeed_rl.hub import HF, MS, fetch, parse_hub_name

_FORMATS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".txt": "txt",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
#: suffixes of files of text, which may be compressed
_TEXT_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".txt")
_READABLE = _FORMATS | {suffix + compression: _FORMATS[suffix] for suffix in _TEXT_SUFFIXES for compression in COMPRESSIONS}
#: files of spreadsheets, and what to do with them
_WORKBOOKS = (".xlsx", ".xls", ".xlsm", ".ods", ".numbers")
_SAVE_SHEET = (
    "it is a workbook: save the sheet as CSV (UTF-8), or in Python pandas.read_excel(...).to_json('rows.jsonl', lines=True,"
    " orient='records', force_ascii=False); look at cells such as 3/4 and 1-2 first, which may have become dates in the sheet"
)
#: names of configurations in a message
_MAX_NAMES = 12
_PATTERN = re.compile(r"[*?\[]")
_SPLITS = {"train": "train", "training": "train"} | dict.fromkeys(
    ("test", "testing", "validation", "valid", "val", "dev", "eval", "heldout"), "held out"
)
#: decodes bytes that are not UTF-8 to U+DC80 to U+DCFF, so that messages can name their row
_KEEP_BYTES = "surrogateescape"
_KEPT_BYTE = re.compile(r"[\udc80-\udcff]")
_NumberedRow = tuple[int, Row | MalformedRowError]


class ArrowRow(dict[str, Any]):
    """A row of an Arrow table, whose nested objects have every key of every row, null where their own row has none."""


def drop_nulls(value: Any) -> Any:
    """Return a value of an ArrowRow without the keys that may be Arrow's own; the content of a message may be null."""
    if isinstance(value, dict):
        return {
            key: drop_nulls(item) for key, item in value.items() if item is not None or key == "content" and "role" in value
        }
    return [drop_nulls(item) for item in value] if isinstance(value, list) else value


@dataclass(frozen=True)
class TaggedRow:
    """A row of a mixture: its dataset's index, and its file and row if the chunk does not have them."""

    tag: int
    row: object
    origin: str | None = None


@dataclass(frozen=True)
class Chunk:
    """A run of `num_rows` rows of one file.

    `first_row` counts from 1, `weight` is the chunk's part of `total_weight`; with a `tag` the rows are read as TaggedRow. The
    first `skip` rows are not read.
    """

    path: str
    kind: str
    first_row: int
    num_rows: int
    weight: int
    start: int = 0
    stop: int = 0
    payload: Any = None
    tag: int | None = None
    skip: int = 0


@dataclass(frozen=True)
class ChunkSize:
    """Size of a chunk: about `num_bytes` bytes of lines or tables, and at most `num_rows` rows of a table or an array."""

    num_bytes: int = 256 * 1024
    num_rows: int = 512


DEFAULT_CHUNK_SIZE = ChunkSize()


class RowSource(Protocol):
    """Interface of a source of rows."""

    @property
    def ignored(self) -> tuple[str, ...]:
        """Files of the folder that are not read."""
        ...

    @property
    def note(self) -> str | None:
        """A line for the user, about what is read."""
        ...

    def total_weight(self) -> int | None:
        """Return the sum of the chunks' weights; None where it cannot be known before reading."""
        ...

    def chunks(self) -> Iterator[Chunk]:
        """Yield every row once, in order."""
        ...

    def fingerprint(self) -> list[object]:
        """Return values that change when the input does."""
        ...


@dataclass(frozen=True)
class Source:
    """Files of one format (or a Hugging Face dataset), in the order in which they are read, from `skip_rows` to `max_rows`.

    Both count rows from 0, over all files (lines, in a line file). `note` tells which split was taken, where there are several.
    """

    format: str
    paths: tuple[str, ...]
    ignored: tuple[str, ...] = ()
    note: str | None = None
    dataset: Any = None
    max_rows: int | None = None
    skip_rows: int = 0
    chunk_size: ChunkSize = DEFAULT_CHUNK_SIZE

    def total_weight(self) -> int | None:
        """Return the sum of the chunks' weights (bytes or rows); None where it cannot be known before reading."""
        if self.format in ("jsonl", "json", "csv", "txt"):
            return sum(os.path.getsize(path) for path in self.paths)
        if self.format == "parquet":
            import pyarrow.parquet

            with _naming_damage(", ".join(self.paths[:1])):
                return sum(pyarrow.parquet.read_metadata(path).num_rows for path in self.paths)
        if self.format == "dataset":
            return len(self.dataset)
        if self.format == "arrow":
            return sum(batch.num_rows for path in self.paths for batch in _arrow_batches(path))
        return None

    def chunks(self) -> Iterator[Chunk]:
        """Yield every row once, in file order."""
        return _skip_rows(_limit_rows(self._all_chunks(), self.max_rows), self.skip_rows)

    def _all_chunks(self) -> Iterator[Chunk]:
        if self.format == "dataset":
            yield from _dataset_chunks(self.dataset, self.paths[0], self.chunk_size)
            return
        if self.format == "stream":
            yield from _stream_chunks(self.dataset, self.paths[0], self.chunk_size)
            return
        for path in self.paths:
            yield from _CHUNKERS[self.format](path, self.chunk_size)

    def fingerprint(self) -> list[object]:
        """Return names, sizes and times of the files, which change with the input."""
        stats = [(path, os.stat(path)) for path in self.paths if os.path.isfile(path)]
        return [[path, stat.st_size, stat.st_mtime_ns] for path, stat in stats] or list(self.paths)


def open_source(
    location: str, *, cache_dir: str | None = None, streaming: bool = False, dataset_options: Mapping[str, object] | None = None
) -> Source:
    """Open the data at `location`.

    It is a file, a folder of files, a configuration of a folder of a hub (folder/name), a folder from `save_to_disk`, a pattern
    of files, several of these separated by commas, or the name of a dataset on the hub. In a folder the most frequent data
    format is read, and of files named after splits the ones of `train`; the other files are listed in `ignored`.

    Raises:
        ValueError: nothing is there, the format is unknown, a folder holds two formats equally often, or several
            configurations.
    """
    path = Path(location).expanduser()
    # not Path's own tests, which raise where a list is longer than a path may be
    if os.path.isfile(path):
        return Source(_detect_format(path), (str(path),))
    if os.path.isdir(path):
        if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
            return _open_saved_dataset(path)
        return _open_folder(path)
    if (configuration := _find_configuration(path)) is not None:
        return _open_configuration(path.parent, configuration)
    if "," in location:
        parts = [part.strip() for part in location.split(",") if part.strip()]
        return _join_sources(location, [open_source(part) for part in parts])
    if _PATTERN.search(location):
        return _open_pattern(location)
    # a mistyped path must not become a request to the hub
    is_named = location.count("/") <= 1 and not location.startswith((".", "~", "/")) and not Path(location).suffix
    if is_named or location.startswith((HF, MS)):
        return open_hub(location, cache_dir, streaming, dataset_options or {})
    if os.path.exists(path):
        raise ValueError(f"input={location!r} is not a regular file")
    raise ValueError(f"input: {describe_missing(location)}")


def has_files(location: str) -> bool:
    """Return True where the parts of a location for `open_source` are on this machine: files, folders, patterns of files."""
    path = Path(location).expanduser()
    if os.path.exists(path) or _find_configuration(path) is not None:
        return True
    if "," in location:
        return all(map(has_files, filter(None, map(str.strip, location.split(",")))))
    return bool(_PATTERN.search(location) and _list_matches(location))


def _list_matches(pattern: str) -> list[Path]:
    return sorted(Path(name) for name in glob.glob(os.path.expanduser(pattern), recursive=True) if os.path.isfile(name))


def _open_pattern(pattern: str) -> Source:
    files = _list_matches(pattern)
    if not files:
        raise ValueError(f"input={pattern!r} matches no file")
    return _join_sources(pattern, [Source(_detect_format(file), (str(file),)) for file in files])


def _join_sources(location: str, sources: Sequence[Source]) -> Source:
    """Return the files of several sources as one.

    Raises:
        ValueError: they have different formats, a file is there twice, or one is not made of files.
    """
    formats = sorted({source.format for source in sources})
    if any(source.dataset is not None for source in sources):
        raise ValueError(f"input={location!r} is a list with a saved dataset or one of the hub; list files and folders")
    paths = [path for source in sources for path in source.paths]
    if twice := [path for path, count in Counter(map(os.path.realpath, paths)).items() if count > 1]:
        raise ValueError(f"input={location!r} has the file {twice[0]} twice")
    if len(formats) != 1:
        raise ValueError(f"input={location!r} mixes the formats {', '.join(formats)}; preprocess each by itself")
    ignored = tuple(path for source in sources for path in source.ignored)
    return Source(formats[0], tuple(paths), ignored, "\n".join(source.note for source in sources if source.note) or None)


def _find_configuration(path: Path) -> Configuration | None:
    """Return the configuration that a path folder/name names; None where the folder declares none of this name."""
    return read_configurations(path.parent).get(path.name) if os.path.isdir(path.parent) else None


def _open_configuration(folder: Path, configuration: Configuration) -> Source:
    files, split = configuration.find_files(folder)
    source = _join_sources(str(folder), [Source(_detect_format(file), (str(file),)) for file in files if _is_data(file)])
    note = f"{folder}: the configuration {configuration.name} is taken" + (f", of it the split {split}" if split else "")
    return replace(source, note=note)


def _is_data(file: Path) -> bool:
    return read_suffix(file) in _READABLE


def _detect_format(path: Path) -> str:
    kind = _READABLE.get(read_suffix(path))
    if kind is None:
        advice = f"{_SAVE_SHEET}; " if read_suffix(path) in _WORKBOOKS else ""
        raise ValueError(
            f"input={str(path)!r} has the unknown format {read_suffix(path) or 'without suffix'!r}; {advice}known: "
            f"{', '.join(_FORMATS)}, and {', '.join(_TEXT_SUFFIXES)} with {', '.join(COMPRESSIONS)} after it"
        )
    # files with either suffix may have arrays or lines
    if kind in ("json", "jsonl"):
        return "json" if _starts_with_bracket(path) else "jsonl"
    return kind


def _starts_with_bracket(path: Path) -> bool:
    with open_content(path) as (file, _):
        while block := file.read(4096):
            text = block.lstrip(b" \t\r\n\xef\xbb\xbf")
            if text:
                return text.startswith(b"[")
    return False


def _open_folder(path: Path) -> Source:
    configurations = read_configurations(path)
    if len(configurations) > 1:
        return _open_configuration(path, _choose_configuration(path, configurations))
    files = _list_files(path)
    suffix = _choose_suffix(path, files)
    chosen = [file for file in files if read_suffix(file) == suffix]
    ignored = tuple(str(file) for file in files if read_suffix(file) != suffix)
    if (repeated := find_repeated_shard(chosen)) is not None:
        one, other = (str(file.parent) for file in repeated)
        raise ValueError(
            f"input={str(path)!r} has {repeated[0].name} in {one} and in {other}: these are data sets of their own; give one of"
            f" the folders, or both as {one},{other}"
        )
    formats = {_detect_format(file) for file in chosen}
    if len(formats) > 1:
        raise ValueError(f"input={str(path)!r} mixes JSON arrays and JSON lines; give each its own folder")
    splits = {file: _find_split(file.relative_to(path)) for file in chosen}
    train, others = ([file for file in chosen if (splits[file] == "train") == is_train] for is_train in (True, False))
    note = None
    if train and any(splits[file] for file in others):
        chosen = train
        ignored += tuple(map(str, others))
        note = f"{path}: the split train is taken ({len(train)} files), not {', '.join(file.name for file in others)}"
    return Source(formats.pop(), tuple(str(file) for file in chosen), ignored, note)


def _list_files(path: Path) -> list[Path]:
    """Return the files below a folder that are not hidden, sorted: the order of rglob is the file system's."""
    return sorted(
        file
        for file in path.rglob("*")
        # below the folder, which may be in ~/.cache
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(path).parts)
    )


def _choose_configuration(path: Path, configurations: Mapping[str, Configuration]) -> Configuration:
    """Return the configuration of a hub folder that is the default one.

    Raises:
        ValueError: none is.
    """
    default = next((one for one in configurations.values() if one.is_default), None)
    if default is not None:
        return default
    names = ", ".join(list(configurations)[:_MAX_NAMES]) + (" ..." if len(configurations) > _MAX_NAMES else "")
    raise ValueError(
        f"input={str(path)!r} has the configurations {names}, which are data sets of their own; name one, such as"
        f" {path / next(iter(configurations))}"
    )


def _choose_suffix(path: Path, files: Sequence[Path]) -> str:
    """Return the suffix that most files of data have.

    Raises:
        ValueError: no file has data, or two suffixes are equally frequent.
    """
    kinds = Counter(read_suffix(file) for file in files if _is_data(file))
    if not kinds:
        raise ValueError(f"input={str(path)!r} holds no {', '.join(_FORMATS)} files")
    (suffix, count), *others = kinds.most_common()
    if others and others[0][1] == count:
        raise ValueError(f"input={str(path)!r} holds as many {suffix} as {others[0][0]} files; give each format its own folder")
    return suffix


def _find_split(file: Path) -> str | None:
    """Return the split that the words of a path name, such as "train" for data/train-00000-of-00002.parquet; None for none."""
    words = [word for part in reversed(file.with_suffix("").parts) for word in re.split(r"[^a-z]+", part.lower())]
    return next((_SPLITS[word] for word in words if word in _SPLITS), None)


def _open_saved_dataset(path: Path) -> Source:
    from datasets import DatasetDict, load_from_disk

    try:
        loaded = load_from_disk(str(path), keep_in_memory=False)
    except Exception as error:
        raise ValueError(f"input={str(path)!r} is not a data set that datasets has saved, or damaged: {error!r}") from error
    note = None
    if isinstance(loaded, DatasetDict):
        if "train" not in loaded and len(loaded) != 1:
            splits = ", ".join(map(str, loaded))
            raise ValueError(f"input={str(path)!r} has the splits {splits}; give the folder of one of them")
        others = ", ".join(str(name) for name in loaded if name != "train")
        note = f"{path}: the split train is taken, not {others}" if "train" in loaded and others else None
        loaded = loaded["train"] if "train" in loaded else next(iter(loaded.values()))
    # tables are split and sent without conversion to Python objects
    return Source("dataset", (str(path),), note=note, dataset=loaded.with_format("arrow"))


def open_data(path: str) -> Source:
    """Open raw data by `open_hub` where it is written as of a hub, else by `open_source`."""
    return open_hub(path) if path.startswith((HF, MS)) else open_source(path)


def open_hub(
    name: str, cache_dir: str | None = None, streaming: bool = False, options: Mapping[str, object] | None = None
) -> Source:
    """Open a dataset of a hub, by default its split `train`.

    Args:
        name: [hf://|ms://]owner/name[/config][:split].
        options: further arguments of `datasets.load_dataset`.

    Raises:
        ValueError: no such dataset can be loaded.
    """
    from datasets import load_dataset

    hub, repo, config, split = _read_hub_path(name)
    arguments: dict[str, Any] = {"split": split or "train", **({"name": config} if config else {}), **(options or {})}
    if hub == MS:
        parsed = parse_hub_name(MS + repo)
        assert parsed is not None
        repo = str(fetch(parsed, "input", "dataset"))
    try:
        loaded = load_dataset(repo, cache_dir=cache_dir, streaming=streaming, **arguments)
    except (OSError, ValueError) as error:
        lines = (str(error).strip() or type(error).__name__).splitlines()
        # the second line has the names of the configurations, or of the splits
        reason = " ".join(lines[:2] if lines[0].startswith(("Config name is missing", "BuilderConfig")) else lines[:1])
        raise ValueError(f"input={name!r} is not a file or folder, and no dataset of that name loads: {reason}") from error
    if streaming:
        return Source("stream", (name,), dataset=loaded)
    return Source("dataset", (name,), dataset=loaded.with_format("arrow"))


def _read_hub_path(text: str) -> tuple[str, str, str | None, str | None]:
    """Return prefix of the hub, owner/name, configuration and split of a data set."""
    hub = next((prefix for prefix in (HF, MS) if text.startswith(prefix)), "")
    path, _, split = text.removeprefix(hub).partition(":")
    owner, *rest = path.split("/", 2)
    return hub, "/".join([owner, *rest[:1]]), "/".join(rest[1:]) or None, split or None


def _line_chunks(path: str, kind: str, size: ChunkSize) -> Iterator[Chunk]:
    row = 1
    start = position = 0
    packed = is_compressed(path)
    with open_content(path) as (file, raw):
        while block := file.read(size.num_bytes):
            # extended to the end of the line
            end = b"" if block.endswith(b"\n") else file.readline()
            lines = block.count(b"\n") + (not block.endswith(b"\n"))
            stop = start + len(block) + len(end)
            weight = raw.tell() - position if packed else stop - start
            yield Chunk(path, kind, row, lines, weight, start, stop, block + end if packed else None)
            row += lines
            start, position = stop, position + weight


def _array_chunks(path: str, size: ChunkSize) -> Iterator[Chunk]:
    rows: list[object] = []
    first = 1
    position = 0
    with open_content(path) as (content, raw):
        for value in _array_elements(io.TextIOWrapper(content, encoding="utf-8-sig", errors=_KEEP_BYTES), path):
            rows.append(value)
            # raw is ahead of the text layer, which only shifts the borders of chunks
            if len(rows) == size.num_rows or raw.tell() - position > size.num_bytes:
                yield Chunk(path, "rows", first, len(rows), raw.tell() - position, payload=rows)
                first, position, rows = first + len(rows), raw.tell(), []
        # may have no rows: with it the weights add up to total_weight
        yield Chunk(path, "rows", first, len(rows), os.path.getsize(path) - position, payload=rows)


def _array_elements(file: io.TextIOWrapper, path: str) -> Iterator[object]:
    """Decode the elements of a JSON array one by one, reading only as far as needed."""
    decoder = StrictDecoder()
    whitespace = " \t\r\n"
    block = 1 << 17
    buffer = file.read(block)
    at = buffer.index("[") + 1
    count = 0
    commas = 0  # every element except the first follows one
    size = block
    while True:
        while at < len(buffer) and (buffer[at] in whitespace or (buffer[at] == "," and commas < count)):
            commas += buffer[at] == ","
            at += 1
        if at < len(buffer):
            if buffer[at] == "]" and commas < max(count, 1):
                return
            try:
                if commas < count:
                    raise json.JSONDecodeError("expected a comma", buffer, at)
                start = at
                value, at, violation = decoder.raw_decode(buffer, at)
                count += 1
                size = block
                if violation is not None:
                    byte = _find_invalid_byte(buffer[start:at])
                    yield MalformedRowError(
                        f"is not valid JSON ({violation})"
                        if byte is None
                        else f"is not UTF-8 (byte {byte:#04x}): save the file as UTF-8"
                    )
                else:
                    yield value
                continue
            except json.JSONDecodeError as error:
                problem = str(error)
        else:
            problem = "the array is not closed"
        more = file.read(size)
        if not more:
            raise ValueError(f"{path}, row {count + 1}: is not valid JSON ({problem})")
        # a partial element is decoded again from its start; doubling keeps the time of a huge one linear
        buffer, at, size = buffer[at:] + more, 0, size * 2


def _csv_chunks(path: str, size: ChunkSize) -> Iterator[Chunk]:
    # the default of 128 KiB raises at a long field
    csv.field_size_limit(1 << 30)
    rows: list[object] = []
    first = 1
    position = 0
    with open_content(path) as (content, raw):
        # newline "": the csv module handles line ends inside quotes
        text = io.TextIOWrapper(content, encoding="utf-8-sig", errors=_KEEP_BYTES, newline="")
        header = text.readline()
        if (foreign := describe_foreign(header.encode(errors=_KEEP_BYTES))) is not None:
            raise ValueError(f"'{path}' is {foreign}")
        reader = csv.DictReader(itertools.chain([header], text), delimiter=find_separator(header))
        _check_names(path, reader.fieldnames or ())
        for number, row in enumerate(reader, start=1):
            rows.append(_csv_row(row))
            if len(rows) == size.num_rows or raw.tell() - position > size.num_bytes:
                yield Chunk(path, "rows", first, len(rows), raw.tell() - position, payload=rows)
                first, position, rows = number + 1, raw.tell(), []
        yield Chunk(path, "rows", first, len(rows), os.path.getsize(path) - position, payload=rows)


def find_separator(header: str) -> str:
    """Return the separator of a CSV file by its first line: a comma where it has one, else a semicolon or a tab."""
    return next((mark for mark in ",;\t" if mark in header), ",")


def _check_names(path: str, names: Sequence[str], where: str = "") -> None:
    """Raise ValueError if a name of a column (or of a key of the objects in the column `where`) is there twice."""
    name = next((name for name, count in Counter(names).items() if count > 1), None)
    if name is not None:
        text = f"the key {name!r} of the column {where!r}" if where else f"the column {name!r}"
        raise ValueError(f"'{path}' has {text} twice, so one value would be lost; rename or remove one of them")


def _check_schema(path: str, schema: Any) -> None:
    """Raise ValueError if an Arrow schema has a column, or a key of a nested object, twice."""
    _check_names(path, schema.names)
    waiting = [(field.name, field.type) for field in schema]
    while waiting:
        name, kind = waiting.pop()
        kind = getattr(kind, "storage_type", kind)
        children = [kind.field(index) for index in range(kind.num_fields)]
        if str(kind).startswith("struct"):
            _check_names(path, [child.name for child in children], name)
        waiting += [(name, child.type) for child in children]


def _csv_row(row: Row) -> Row | MalformedRowError:
    # DictReader puts surplus fields under None, and None where fields are missing
    if None in row or None in row.values():
        return MalformedRowError("has more or fewer fields than the header")
    byte = next((byte for value in row.values() if (byte := _find_invalid_byte(value)) is not None), None)
    return row if byte is None else MalformedRowError(f"is not UTF-8 (byte {byte:#04x}): save the file as UTF-8")


def _find_invalid_byte(text: str) -> int | None:
    """Return the first byte that is not part of a UTF-8 character, in text read with `_KEEP_BYTES`."""
    match = None if text.isascii() else _KEPT_BYTE.search(text)
    return None if match is None else ord(match.group()) - 0xDC00


def _table_chunks(path: str, first_row: int, table: Any, size: ChunkSize) -> Iterator[Chunk]:
    """Split an Arrow table or record batch into chunks of bytes, because a pickled slice includes its full table."""
    import pyarrow

    with _naming_damage(path):
        table.validate(full=True)  # offsets of damaged files lead anywhere
    _check_schema(path, table.schema)
    rows = max(1, min(size.num_rows, table.num_rows * size.num_bytes // max(table.nbytes, 1)))
    for start in range(0, table.num_rows, rows):
        part = table.slice(start, rows)
        sink = pyarrow.BufferOutputStream()
        with pyarrow.ipc.new_stream(sink, table.schema) as writer:
            writer.write(part)
        count = part.num_rows
        yield Chunk(path, "table", first_row + start, count, count, payload=sink.getvalue().to_pybytes())


def _parquet_chunks(path: str, size: ChunkSize) -> Iterator[Chunk]:
    import pyarrow.parquet

    row = 1
    with _naming_damage(path), pyarrow.parquet.ParquetFile(path, pre_buffer=False) as file:
        _check_schema(path, file.schema_arrow)
        for batch in file.iter_batches(batch_size=size.num_rows, use_threads=False):
            yield from _table_chunks(path, row, batch, size)
            row += batch.num_rows


@contextlib.contextmanager
def _naming_damage(path: str) -> Iterator[None]:
    """Raise ValueError with the file's name where Arrow cannot read it."""
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, MemoryError, OSError, OverflowError, UnicodeDecodeError) as error:
        raise ValueError(f"'{path}' is damaged: {error or type(error).__name__}") from error


def _arrow_batches(path: str) -> Iterator[Any]:
    """Yield the record batches of an Arrow file in stream or file format, by memory map.

    Raises:
        ValueError: it is neither, or damaged.
    """
    import pyarrow

    broken = (pyarrow.ArrowException, OSError)  # Arrow reports some damage as an OSError
    with pyarrow.memory_map(path) as memory:
        try:
            batches = iter(pyarrow.ipc.open_stream(memory))
        except broken:
            memory.seek(0)
            try:
                file = pyarrow.ipc.open_file(memory)
            except broken as error:
                raise ValueError(f"'{path}' is not an Arrow file: {error}") from None
            batches = (file.get_batch(index) for index in range(file.num_record_batches))
        while True:
            try:
                batch = next(batches, None)
            except broken as error:
                raise ValueError(f"'{path}' is damaged: {error}") from None
            if batch is None:
                return
            yield batch


def _arrow_chunks(path: str, size: ChunkSize) -> Iterator[Chunk]:
    row = 1
    for batch in _arrow_batches(path):
        yield from _table_chunks(path, row, batch, size)
        row += batch.num_rows


def _dataset_chunks(dataset: Any, name: str, size: ChunkSize) -> Iterator[Chunk]:
    row = 1
    for table in dataset.iter(batch_size=size.num_rows):
        yield from _table_chunks(name, row, table, size)
        row += table.num_rows


def _stream_chunks(dataset: Any, name: str, size: ChunkSize) -> Iterator[Chunk]:
    rows: list[object] = []
    first = 1
    schema = None if dataset.features is None else dataset.features.arrow_schema
    for value in dataset:
        rows += [value] if schema is None else shorten_floats([value], schema)
        if len(rows) == size.num_rows:
            yield Chunk(name, "rows", first, len(rows), len(rows), payload=rows)
            first, rows = first + len(rows), []
    yield Chunk(name, "rows", first, len(rows), len(rows), payload=rows)


_CHUNKERS: dict[str, Callable[[str, ChunkSize], Iterator[Chunk]]] = {
    "jsonl": lambda path, size: _line_chunks(path, "jsonl", size),
    "txt": lambda path, size: _line_chunks(path, "txt", size),
    "json": _array_chunks,
    "csv": _csv_chunks,
    "parquet": _parquet_chunks,
    "arrow": _arrow_chunks,
}


def read_chunk(chunk: Chunk) -> list[tuple[int, Any]]:
    """Read the rows of a chunk with their row numbers; a line that is not JSON is a MalformedRowError, an empty one skipped."""
    rows = [(number, row) for number, row in _chunk_rows(chunk) if number - chunk.first_row >= chunk.skip]
    return rows if chunk.tag is None else [(number, TaggedRow(chunk.tag, row)) for number, row in rows]


def _chunk_rows(chunk: Chunk) -> list[_NumberedRow]:
    if chunk.kind == "rows":
        return list(enumerate(chunk.payload[: chunk.num_rows], start=chunk.first_row))
    if chunk.kind == "table":
        import pyarrow

        table = pyarrow.ipc.open_stream(chunk.payload).read_all()
        rows = map(ArrowRow, shorten_floats(table.slice(0, chunk.num_rows).to_pylist(), table.schema))
        return list(enumerate(rows, start=chunk.first_row))
    # not splitlines, which cuts at a lone \r too: rows are counted by \n
    lines = _read_content(chunk).split(b"\n")
    if not lines[-1]:
        lines.pop()
    # `_limit_rows` cuts a chunk only by its number of rows
    rows = list(enumerate(lines[: chunk.num_rows], start=chunk.first_row))
    if chunk.kind == "txt":
        return [(number, _text_row(line)) for number, line in rows]
    return [(number, _json_row(line)) for number, line in rows if line.strip()]


def _read_content(chunk: Chunk) -> bytes:
    if chunk.payload is not None:
        return chunk.payload
    with open_regular(chunk.path) as file:
        file.seek(chunk.start)
        return file.read(chunk.stop - chunk.start)


def _text_row(line: bytes) -> Row | MalformedRowError:
    try:
        # a file's first line may begin with a byte order mark
        return {"text": line.decode("utf-8-sig").rstrip("\r")}
    except UnicodeDecodeError as error:
        return MalformedRowError(f"is {describe_foreign(line) or f'not UTF-8 ({error}): save the file as UTF-8'}")


def _json_row(line: bytes) -> Row | MalformedRowError:
    try:
        return strict_json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        return MalformedRowError(f"is {describe_foreign(line) or f'not UTF-8 (byte {byte:#04x}): save the file as UTF-8'}")
    except ValueError as error:
        advice = next((f"; {text}" for test, text in _JSON_ADVICE if test(line.strip())), "")
        return MalformedRowError(f"is {describe_foreign(line) or f'not valid JSON ({error}){advice}'}")


#: test of a line that is not JSON, and what to change
_JSON_ADVICE: tuple[tuple[Callable[[bytes], bool], str], ...] = (
    (lambda line: line.endswith(b"},"), "remove the comma after the row: JSON lines have none"),
    (lambda line: re.match(rb"\{\s*'", line) is not None, "it has single quotes, as Python prints them (json.dumps)"),
    (lambda line: line[:1] == b"{" and not line.endswith(b"}"), "a row must be on one line (json.dumps)"),
)


def _limit_rows(chunks: Iterator[Chunk], max_rows: int | None) -> Iterator[Chunk]:
    """Yield the chunks of the first `max_rows` rows (lines, in a line file); the last chunk is cut."""
    left = max_rows
    for chunk in chunks:
        if left is None:
            yield chunk
            continue
        if left <= 0:
            return
        yield chunk if chunk.num_rows <= left else replace(chunk, num_rows=left)
        left -= chunk.num_rows


def _skip_rows(chunks: Iterator[Chunk], count: int) -> Iterator[Chunk]:
    """Yield the chunks without their first `count` rows."""
    for chunk in chunks:
        if count < chunk.num_rows:
            yield replace(chunk, skip=count)
        count = max(0, count - chunk.num_rows)


def read_rows(source: RowSource) -> Iterator[tuple[str, int, Row | MalformedRowError]]:
    """Yield (path, row number, row) of everything, in this process."""
    for chunk in source.chunks():
        for number, row in read_chunk(chunk):
            yield chunk.path, number, row
