"""Configurations of a data set in a folder of a hub, as its README.md (or dataset_infos.json) declares them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_rl.files import read_json

_FRONT_MATTER = re.compile(r"\A---\s*\n(.*?)\n---\s*(?:\n|\Z)", re.DOTALL)
#: name of a file that is one of several of a split: train-00000-of-00002
_SHARD = re.compile(r"-\d{5}-of-\d{5}")


@dataclass(frozen=True)
class Configuration:
    """A part of a data set with columns of its own.

    Attributes:
        patterns: patterns of its files, relative to the folder, by split; "" for files that no split names.
        is_default: True for the one that a hub takes where none is named.
    """

    name: str
    patterns: Mapping[str, tuple[str, ...]]
    is_default: bool = False

    def find_files(self, folder: Path) -> tuple[list[Path], str | None]:
        """Return the files of the split train, or of the only one, and the name of that split where there are others.

        Raises:
            ValueError: there are several splits but no train, or a split has no file.
        """
        split = "train" if "train" in self.patterns else next(iter(self.patterns), "")
        if split != "train" and len(self.patterns) > 1:
            names = ", ".join(self.patterns)
            raise ValueError(f"input='{folder / self.name}' has the splits {names}, and no train; give the files of one")
        files = self.list_files(folder, split)
        if not files:
            patterns = ", ".join(self.patterns.get(split, ()))
            raise ValueError(f"input='{folder / self.name}': no file matches {patterns} of {folder / 'README.md'}")
        return files, split if len(self.patterns) > 1 else None

    def list_files(self, folder: Path, split: str | None = None) -> list[Path]:
        """Return the files of a split, or of all, in order of their names."""
        patterns = [pattern for name, some in self.patterns.items() if split in (None, name) for pattern in some]
        return sorted({file for pattern in patterns for file in folder.glob(pattern.lstrip("/")) if file.is_file()})


def read_configurations(folder: Path) -> dict[str, Configuration]:
    """Return the configurations of the data set in a folder that have files there, by name; none where it declares none."""
    entries = _read_card(folder).get("configs")
    declared = [_read_configuration(entry) for entry in (entries if isinstance(entries, list) else []) if _has_files(entry)]
    if not declared:  # older data sets have a folder for each
        declared = [Configuration(name, {"": (f"{name}/**/*",)}) for name in _read_infos(folder)]
    return {one.name: one for one in declared if one.list_files(folder)}


def find_repeated_shard(files: Iterable[Path]) -> tuple[Path, Path] | None:
    """Return two files of different folders that are the same part of a split, as files of two configurations are."""
    known: dict[str, Path] = {}
    for file in files:
        if _SHARD.search(file.name) and known.setdefault(file.name, file).parent != file.parent:
            return known[file.name], file
    return None


def _has_files(entry: object) -> bool:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("config_name"), str):
        return False
    return bool(entry.get("data_files") or entry.get("data_dir"))


def _read_configuration(entry: Mapping[str, Any]) -> Configuration:
    base = str(entry.get("data_dir") or "").strip("/")
    files: Any = entry.get("data_files") or "**/*"
    files = [{"split": split, "path": path} for split, path in files.items()] if isinstance(files, Mapping) else files
    patterns: dict[str, list[str]] = defaultdict(list)
    for item in files if isinstance(files, list) else [files]:
        split, paths = (item.get("split", ""), item.get("path")) if isinstance(item, Mapping) else ("", item)
        names = [str(path) for path in (paths if isinstance(paths, list) else [paths])]
        patterns[str(split)] += [f"{base}/{name}" if base else name for name in names]
    name = str(entry["config_name"])
    found = {split: tuple(paths) for split, paths in patterns.items()}
    return Configuration(name, found, is_default=entry.get("default") is True or name == "default")


def _read_card(folder: Path) -> Mapping[str, Any]:
    import yaml

    path = folder / "README.md"
    match = _FRONT_MATTER.match(path.read_text(encoding="utf-8", errors="replace")) if path.is_file() else None
    try:
        card = yaml.safe_load(match[1]) if match else None
    except yaml.YAMLError:
        return {}  # a text for readers, which need not be YAML
    return card if isinstance(card, Mapping) else {}


def _read_infos(folder: Path) -> Mapping[str, Any]:
    path = folder / "dataset_infos.json"
    try:
        infos = read_json(path) if path.is_file() else {}
    except ValueError:
        return {}
    return infos if isinstance(infos, Mapping) else {}
