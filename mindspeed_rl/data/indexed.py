"""Megatron indexed datasets (`.bin` + `.idx`): written and read with megatron-core's own classes.

File names are the ones Megatron and MindSpeed users know: `<prefix>_<key>_document` for pretraining and
`<prefix>_packed_<column>_document` for every tuning and RL stage, packed or not. Tokens are int32, because labels hold -100.
"""

from __future__ import annotations

import gc
import os
import re
import warnings
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

IGNORE_INDEX = -100
SUFFIXES = (".bin", ".idx")
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


def column_prefix(prefix: str | Path, column: str, *, packed: bool = True) -> str:
    """Return the path without suffix of a column; `packed` of a tuning or RL dataset, else of a text key of pretraining."""
    return f"{prefix}{'_packed' if packed else ''}_{column}_document"


class IndexedWriter:
    """Writer of one `.bin/.idx` pair; `close` writes the `.idx`, without which the `.bin` cannot be read."""

    def __init__(self, path_prefix: str | Path) -> None:
        self._module = _megatron()
        self.path_prefix = str(path_prefix)
        self._builder: Any = self._module.IndexedDatasetBuilder(self.path_prefix + ".bin", dtype=np.int32)
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


def open_indexed(path_prefix: str | Path) -> IndexedDataset:
    """Memory-map one pair.

    Raises:
        ValueError: a file of the pair is missing, empty, or not a Megatron index.
    """
    for suffix in SUFFIXES:
        if not os.path.isfile(f"{path_prefix}{suffix}"):
            raise ValueError(f"{path_prefix}{suffix} does not exist; a Megatron dataset is a .bin and an .idx of the same name")
    with open(f"{path_prefix}.idx", "rb") as index:
        if index.read(9) != b"MMIDIDX\x00\x00":
            raise ValueError(
                f"{path_prefix}.idx is not a Megatron index (wrong first bytes); was the run that wrote it cut short?"
            )
    if os.path.getsize(f"{path_prefix}.bin") == 0:
        raise ValueError(f"{path_prefix}.bin is empty: the dataset holds no tokens")
    return _megatron().IndexedDataset(str(path_prefix), multimodal=False, mmap=True)


def list_packed_columns(prefix: str | Path) -> list[str]:
    """List the names of the columns under `<prefix>_packed_*_document.idx`, sorted."""
    prefix = Path(prefix)
    columns = []
    for path in prefix.parent.glob(f"{prefix.name}_packed_*_document.idx"):
        match = _COLUMN_FILE.fullmatch(path.name[len(prefix.name) :])
        if match:
            columns.append(match["column"])
    return sorted(columns)


class IndexedColumns:
    """The columns of one tuning or RL dataset, row by row.

    Args:
        prefix: the value of preprocessing's `--output-prefix`.
        required: columns that must exist.
        same_length: columns whose rows must be equally long (checked on the index alone).

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
