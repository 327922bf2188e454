"""The folder of a saved model: its record, its matrices and AdamW's moments, and the same adapter as `peft` reads it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from mindspeed_rl.files import read_json, write_file
from mindspeed_rl.service.backend import AdapterSpec, CallError

#: files of a folder: record, tensors, PEFT folder
STATE, TENSORS, ADAPTER = "state.json", "state.safetensors", "adapter"
#: form of the folder
_FORM = 1


@dataclass(frozen=True)
class ModelRecord:
    """Record of a saved model.

    Attributes:
        spec: its adapter; None for full weights.
        base: name of the base model.
        num_steps: steps that it had made.
        has_optimizer: the moments are there.
    """

    spec: AdapterSpec | None
    base: str
    num_steps: int
    has_optimizer: bool

    def write(self, folder: Path) -> None:
        """Write it into a folder that is being built."""
        write_file(folder / STATE, json.dumps({"form": _FORM, **asdict(self)}, indent=2) + "\n")

    @classmethod
    def read(cls, folder: Path, base: str) -> ModelRecord:
        """Read it.

        Args:
            base: name of the base model that it has to be of.

        Raises:
            CallError: the folder has none, or one of another base or form.
        """
        if not (folder / STATE).is_file():
            raise CallError(f"{folder} is no saved model.")
        try:
            record = read_json(folder / STATE)
            form, spec = record.pop("form"), record.pop("spec")
            read = cls(None if spec is None else AdapterSpec(**spec), **record)
        except (KeyError, TypeError, ValueError) as error:
            raise CallError(f"{folder / STATE} cannot be read: {error}.") from error
        if form != _FORM:
            raise CallError(f"{folder} has another form ({form}) than this version reads ({_FORM}).")
        if read.base != base:
            raise CallError(f"{folder} is of the base {read.base}, not {base}.")
        return read


@contextlib.contextmanager
def building(folder: Path) -> Iterator[Path]:
    """Yield a folder to fill; it takes its name at the end, complete and on the disk, or is removed.

    Raises:
        CallError: something has the name already.
    """
    if folder.exists():
        raise CallError(f"{folder} exists already.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
        for path in [*partial.rglob("*"), partial]:
            _sync(path)
        os.rename(partial, folder)
        _sync(folder.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
