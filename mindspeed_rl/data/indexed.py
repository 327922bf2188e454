"""Megatron indexed datasets (`.bin` + `.idx`): written and read with megatron-core's own classes.

File names are the ones Megatron and MindSpeed users know: `<prefix>_<key>_document` for pretraining and
`<prefix>_packed_<column>_document` for every tuning and RL stage, packed or not. Tokens are int32, because labels hold -100.
"""

from __future__ import annotations

import gc
import os
import re
import struct
import warnings
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from mindspeed_rl.files import open_regular

if TYPE_CHECKING:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

#: ending of a column with the UTF-8 bytes of another one: no tokenizer gives every text back as it was
TEXT_BYTES = "_utf8"
IGNORE_INDEX = -100
#: column of a pack: the lengths of its samples
SAMPLE_LENGTHS = "sample_lengths"
#: columns of answers that are judged by themselves
UNPAIRED_COLUMNS = ("input_ids", "labels", "desirable")
SUFFIXES = (".bin", ".idx")
#: indexed columns of a dataset with images: encoded bytes of a row's images and a zero, and their number, bytes and grids
IMAGE_BYTES, IMAGE_SIZES = "images", "image_sizes"
#: column of documents with images, which tells them from samples: 1 for each row
DOCUMENTS = "documents"
#: tokens that are checked together, and how often at most
_CHECKED_TOKENS, _CHECKED_CHUNKS = 1 << 22, 256
#: types of tokens by their code in an index
_DTYPES = {1: "u1", 2: "i1", 3: "i2", 4: "i4", 5: "i8", 8: "u2"}
_COLUMN_FILE = re.compile(r"_packed_(?P<column>.+)_document\.idx$")


@contextmanager
def megatron_import() -> Iterator[None]:
    """Silence the warnings of megatron-core's import about packages that are not needed here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Transformer Engine and Apex are not installed", category=UserWarning)
        yield


def _megatron() -> ModuleType:
    """Import megatron-core's module, late: an adaptor may have to be applied before it."""
    from mindspeed_rl.adaptors import megatron_datasets  # imports torch

    with megatron_import():
        return megatron_datasets.indexed_dataset()


def column_type(column: str) -> type[np.uint8 | np.int32]:
    """Return the type of the values of a column."""
    return np.uint8 if column == IMAGE_BYTES else np.int32


def column_prefix(prefix: str | Path, column: str, *, packed: bool = True) -> str:
    """Return the path without suffix of a column; `packed` of a tuning or RL dataset, else of a text key of pretraining."""
    return f"{prefix}{'_packed' if packed else ''}_{column}_document"


class IndexedWriter:
    """Writer of one `.bin/.idx` pair; `close` writes the `.idx`, without which the `.bin` cannot be read."""

    def __init__(self, path_prefix: str | Path, column: str = "") -> None:
        """Open the `.bin`; a `column` of bytes has another type than one of tokens."""
        self._module = _megatron()
        self.path_prefix = str(path_prefix)
        self._builder: Any = self._module.IndexedDatasetBuilder(self.path_prefix + ".bin", dtype=column_type(column))
        # The builder keeps Python lists: about 100 bytes a row. These need 12.
        self._builder.sequence_lengths = array("i")
        self._builder.document_indices = array("q", [0])

    def add_documents(self, tokens: np.ndarray, lengths: Sequence[int]) -> None:
        """Append consecutive documents of one sequence each; `tokens` is their concatenation.

        The builder gets them as one document of many sequences, with one write, and then the end of each.
        """
        assert sum(lengths) == len(tokens), (sum(lengths), len(tokens))
        first = len(self._builder.sequence_lengths) + 1
        self._builder.add_document(tokens, lengths)
        # the end of the one document that the builder has added
        self._builder.document_indices.pop()
        self._builder.document_indices.extend(range(first, first + len(lengths)))

    def add_dataset(self, path_prefix: str | Path) -> None:
        """Append a full `.bin/.idx` pair."""
        # add_index runs a full garbage collection, 0.2 s with megatron-core loaded; freezing leaves it nothing to check.
        gc.freeze()
        try:
            self._builder.add_index(str(path_prefix))
        finally:
            gc.unfreeze()

    def close(self) -> None:
        """Write the index."""
        self._builder.finalize(self.path_prefix + ".idx")

    def abort(self) -> None:
        """Stop without an index; the `.bin` stays for the caller to remove."""
        self._builder.data_file.close()


@dataclass(frozen=True)
class _Index:
    """Content of an `.idx`: the type of the tokens; for each row its tokens and its first byte."""

    dtype: np.dtype[Any]
    lengths: np.ndarray
    pointers: np.ndarray


def open_indexed(path_prefix: str | Path) -> IndexedDataset:
    """Memory-map one pair.

    Raises:
        ValueError: see `read_index`.
    """
    read_index(path_prefix)
    return _megatron().IndexedDataset(str(path_prefix), multimodal=False, mmap=True)


def read_index(path_prefix: str | Path) -> _Index:
    """Read the index of one pair and compare it with the size of both files, without torch or megatron-core.

    Raises:
        ValueError: a file of the pair is missing, empty, cut short, of another dataset, or not a Megatron index.
    """
    for suffix in SUFFIXES:
        if not os.path.isfile(f"{path_prefix}{suffix}"):
            raise ValueError(f"{path_prefix}{suffix} does not exist; a Megatron dataset is a .bin and an .idx of the same name")
    with open_regular(f"{path_prefix}.idx") as index:
        if index.read(9) != b"MMIDIDX\x00\x00":
            raise ValueError(
                f"{path_prefix}.idx is not a Megatron index (wrong first bytes); was the run that wrote it cut short?"
            )
        header = index.read(25)
    if (size := os.path.getsize(f"{path_prefix}.bin")) == 0:
        raise ValueError(f"{path_prefix}.bin is empty: the dataset holds no tokens")
    version, code, num_rows, num_documents = struct.unpack("<QBQQ", header.ljust(25, b"\0"))
    expected, found = 34 + 12 * num_rows + 8 * num_documents, os.path.getsize(f"{path_prefix}.idx")
    if version != 1 or code not in _DTYPES or found < expected:
        raise ValueError(
            f"{path_prefix}.idx is damaged: {found} bytes, version {version}, token type {code}, {num_rows} rows; "
            "write or copy the dataset again"
        )
    dtype = np.dtype(_DTYPES[code])
    lengths = np.memmap(f"{path_prefix}.idx", np.int32, "r", 34, (num_rows,)) if num_rows else np.empty(0, np.int32)
    pointers = (
        np.memmap(f"{path_prefix}.idx", np.int64, "r", 34 + 4 * num_rows, (num_rows,)) if num_rows else np.empty(0, np.int64)
    )
    # Megatron's reader asserts it, and reads documents past the last row otherwise
    documents = np.memmap(f"{path_prefix}.idx", np.int64, "r", 34 + 12 * num_rows, (num_documents,)) if num_documents else [-1]
    if documents[0] != 0 or documents[-1] != num_rows or (np.diff(documents) < 0).any():
        raise ValueError(f"{path_prefix}.idx is damaged: its documents do not match {num_rows} rows; write it again")
    ends = pointers + lengths.astype(np.int64) * dtype.itemsize
    needed = int(ends.max(initial=0))
    if needed != size or (lengths < 0).any() or (pointers < 0).any():
        row = f"; row {int(np.argmax(ends > size))} is the first that is not complete" if size < needed else ""
        raise ValueError(
            f"{path_prefix}.bin has {size} bytes and its .idx describes {needed}{row}; they are not of one run, or a copy was "
            "cut short: write or copy the dataset again"
        )
    return _Index(dtype, lengths, pointers)


def check_token_ids(path_prefix: str | Path, vocab_size: int, *, allows_ignored: bool) -> None:
    """Check that the stored ids are tokens of the model: all of them, or a billion spread over a larger dataset.

    Args:
        path_prefix: path prefix of the files.
        vocab_size: vocabulary size of the model.
        allows_ignored: the column is labels, which may be IGNORE_INDEX.

    Raises:
        ValueError: one is not (with file, row, position and id); see also `read_index`.
    """
    index = read_index(path_prefix)
    tokens = np.memmap(f"{path_prefix}.bin", index.dtype, "r")
    starts = np.arange(0, len(tokens), _CHECKED_TOKENS)
    for start in starts[:: -(-len(starts) // _CHECKED_CHUNKS)].tolist():
        ids = tokens[start : start + _CHECKED_TOKENS]
        # a mask is made where it is needed: most chunks need two passes of reading
        if ids.max() < vocab_size and (ids.min() >= 0 or allows_ignored and np.all((ids >= 0) | (ids == IGNORE_INDEX))):
            continue
        wrong = (ids >= vocab_size) | (ids < 0) & ~(allows_ignored & (ids == IGNORE_INDEX))
        position = start + int(np.argmax(wrong))
        firsts = index.pointers // index.dtype.itemsize
        row = int(np.argmax((firsts <= position) & (position < firsts + index.lengths)))
        raise ValueError(
            f"{path_prefix}.bin, row {row}, position {position - int(firsts[row])}: token id {int(tokens[position])} is not in "
            f"the model's vocabulary of {vocab_size}; was the dataset written with another tokenizer?"
        )


def check_columns(prefix: Path, vocab_size: int, key: str) -> None:
    """Check the files of a dataset, and that its columns of tokens hold ids of the model.

    Args:
        prefix: path prefix of a tuning or RL dataset, or the full prefix of a pretraining dataset.
        vocab_size: vocabulary size of the model.
        key: key of the run file that names it.

    Raises:
        ValueError: see `read_index` and `check_token_ids`.
    """
    names = list_packed_columns(prefix)
    paths = {name: column_prefix(prefix, name) for name in names} or {"": str(prefix)}
    for name, path in paths.items():
        try:
            if name in ("attention_mask", SAMPLE_LENGTHS, IMAGE_BYTES, IMAGE_SIZES, DOCUMENTS) or name.endswith(TEXT_BYTES):
                read_index(path)
            else:
                check_token_ids(path, vocab_size, allows_ignored=name.endswith("labels"))
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from error


def check_sample_lengths(prefix: str | Path) -> None:
    """Check that packs show where their samples begin: neat ones in the attention mask, others in a column.

    Args:
        prefix: path prefix of a tuning dataset.

    Raises:
        ValueError: they do not, or the lengths exceed a row.
    """
    path = column_prefix(prefix, SAMPLE_LENGTHS)
    rows = read_index(column_prefix(prefix, "attention_mask"))
    if not os.path.isfile(f"{path}.idx"):
        masks = np.memmap(f"{column_prefix(prefix, 'attention_mask')}.bin", rows.dtype, "r")
        last = (rows.pointers // rows.dtype.itemsize + rows.lengths - 1)[:16]
        if (masks[last] == 1).all():
            raise ValueError(
                f"data_path={str(prefix)!r} has no {path}.bin, so nothing shows where samples of a pack begin; run preprocess "
                "--pack again (or with --neat-pack, and set neat_pack: true), or set pack: false where a row is one sample"
            )
        return
    index = read_index(path)
    lengths = np.memmap(f"{path}.bin", index.dtype, "r")
    ends, firsts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]), index.pointers // index.dtype.itemsize
    if len(firsts) != len(rows.lengths) or (lengths < 0).any():
        raise ValueError(f"{path}.bin is of another dataset than its neighbours: {len(firsts)} rows for {len(rows.lengths)}")
    wrong = ends[firsts + index.lengths] - ends[firsts] > rows.lengths
    if wrong.any():
        row = int(np.argmax(wrong))
        found = lengths[firsts[row] :][: index.lengths[row]].tolist()
        raise ValueError(f"{path}.bin, row {row}: samples of {found[:8]} tokens in a row of {rows.lengths[row]}")


def list_packed_columns(prefix: str | Path) -> list[str]:
    """List the names of the columns under `<prefix>_packed_*_document.idx`, sorted."""
    prefix = Path(prefix)
    columns = []
    if not os.path.isdir(prefix.parent):  # False also where a list of files is longer than a path may be
        return columns
    for path in prefix.parent.glob(f"{prefix.name}_packed_*_document.idx"):
        match = _COLUMN_FILE.fullmatch(path.name[len(prefix.name) :])
        if match:
            columns.append(match["column"])
    return sorted(columns)


def check_text_only(prefix: str | Path, *, leaves_out_tower: bool = False) -> None:
    """Check that no row of a dataset has images, which a model of text, or one without its tower, would read as text.

    Args:
        prefix: the value of preprocessing's `--output-prefix`.
        leaves_out_tower: the model has a tower, and the run leaves it out.

    Raises:
        ValueError: a row has; see also `read_index`.
    """
    prefix = Path(prefix).expanduser()
    if not {IMAGE_BYTES, IMAGE_SIZES} <= {*list_packed_columns(prefix)}:
        return
    path = column_prefix(prefix, IMAGE_BYTES)
    has_images = read_index(path).lengths > 1  # a row of text has only the zero
    if has_images.any():
        raise ValueError(
            f"{path}.bin, row {int(np.argmax(has_images))}: has images or videos, as {int(has_images.sum())} rows have, which a"
            + (
                " model without its tower does not see (language_model_only: true); preprocess without such rows, or leave the"
                " key out"
                if leaves_out_tower
                else " model of text does not see; preprocess without such rows, with this model's tokenizer"
            )
        )


def is_paired(prefix: str | Path) -> bool:
    """Return True for a dataset of pairs, which has no column with judgements of single answers."""
    columns = list_packed_columns(Path(prefix).expanduser())
    return UNPAIRED_COLUMNS[-1] not in columns and "chosen_input_ids" in columns


class IndexedColumns:
    """The columns of one tuning or RL dataset, row by row.

    Args:
        prefix: the value of preprocessing's `--output-prefix`.
        required: columns that must exist.
        same_length: columns whose rows must be equally long (checked only on the index).

    Raises:
        ValueError: a column is missing, or the columns disagree about the number of rows or their lengths.
    """

    def __init__(self, prefix: str | Path, required: Iterable[str], *, same_length: Iterable[Iterable[str]] = ()) -> None:
        self.prefix = str(prefix)
        names = list_packed_columns(prefix)
        missing = sorted(set(required) - set(names))
        if missing:
            existing = ", ".join(names) if names else "no such files at all"
            raise ValueError(
                f"data_path={self.prefix!r} lacks {', '.join(f'{self.prefix}_packed_{m}_document.idx' for m in missing)}"
                f" (found: {existing}); give the --output-prefix of preprocessing, without _packed"
            )
        self.columns: Mapping[str, IndexedDataset] = {name: open_indexed(column_prefix(prefix, name)) for name in names}
        counts = {name: len(dataset) for name, dataset in self.columns.items()}
        if len(set(counts.values())) > 1:
            raise ValueError(f"the columns of {self.prefix!r} have different numbers of rows: {counts}; write them again")
        for group in same_length:
            first, *others = group
            for other in others:
                if other in self.columns and not np.array_equal(self.lengths(first), self.lengths(other)):
                    raise ValueError(f"columns {first} and {other} of {self.prefix!r} differ in length; write them again")

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def lengths(self, column: str) -> np.ndarray:
        """Return the tokens per row, [rows] int32, without reading the rows."""
        return np.array(self.columns[column].sequence_lengths)

    def row(self, index: int, column: str) -> np.ndarray:
        """Return a copy of a row, [tokens] int32: megatron-core unmaps the file under its arrays when the dataset is freed."""
        return np.array(self.columns[column][index])
