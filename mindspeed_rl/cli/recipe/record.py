"""A recipe: a folder of `recipes/` with run files of a task for several machines, its data, and the expected curve."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import Any

from mindspeed_rl import registry
from mindspeed_rl.config.run_files import check_yaml, find_project_configs
from mindspeed_rl.data.conversation import MalformedRowError
from mindspeed_rl.data.prompts import open_rows
from mindspeed_rl.data.sources import read_rows
from mindspeed_rl.files import read_json, write_file
from mindspeed_rl.observability.expected_curve import ExpectedCurve

#: machines that a recipe has run files for, in the order of tables; the CPU runs the twin
MACHINES = ("A2", "A3", "950DT", "cpu")
CPU = "cpu"
PLANNED, TWIN_CURVE = "planned.json", "cpu_curve.json"
_FIELDS = ("title", "about", "published", "stages", "data", "curve", "twin")


@dataclass(frozen=True)
class _Rows:
    """Rows of a file that are made of the rows of a data set.

    Attributes:
        rows: data set, as data_path of a run file names it.
        columns: column -> text in which $name is a column of the data set.
        edits: column of the data set -> pairs of a regular expression and its replacement.
    """

    rows: str
    columns: Mapping[str, str]
    edits: Mapping[str, Sequence[tuple[str, str]]] = field(default_factory=dict)

    def convert(self, row: Mapping[str, Any]) -> dict[str, str]:
        """Return a row of the file.

        Raises:
            ValueError: the data set lacks a column.
        """
        values = {name: str(value) for name, value in row.items()}
        for name, pairs in self.edits.items():
            for pattern, replacement in pairs:
                values[name] = re.sub(pattern, replacement, values.get(name, ""))
        try:
            return {name: Template(text).substitute(values) for name, text in self.columns.items()}
        except KeyError as error:
            raise ValueError(f"{self.rows} has no column {error}; it has {', '.join(row)}") from None


@dataclass(frozen=True)
class Recipe:
    """A recipe.

    Attributes:
        folder: folder of its files.
        title: what it trains, in a line.
        about: what it is for, and when to take it.
        published: what is published of such a run on NPUs, and where.
        stages: names of the stages, each with a run file of its own; empty for one without a name.
        data: path -> rows of a file that `recipe data` writes.
        curve: expected on NPUs in the last stage; None where no curve is published in figures.
        twin: command that makes model and data of the CPU twin in {folder}.
    """

    folder: Path
    title: str
    about: str
    published: str
    twin: str
    stages: tuple[str, ...] = ()
    data: Mapping[str, Sequence[_Rows]] = field(default_factory=dict)
    curve: ExpectedCurve | None = None

    @property
    def name(self) -> str:
        """The name of its folder."""
        return self.folder.name

    @property
    def machines(self) -> tuple[str, ...]:
        """Machines with run files."""
        return tuple(machine for machine in MACHINES if self.list_run_files(machine)[-1].is_file())

    def list_run_files(self, machine: str) -> tuple[Path, ...]:
        """Return the run files of the stages, in order."""
        names = [f"{machine}_{stage}" for stage in self.stages] or [machine]
        return tuple(self.folder / f"{name}.yaml" for name in names)

    def find_curve(self, machine: str) -> ExpectedCurve | None:
        """Return the curve that is expected of the last stage on a machine; None without one."""
        if machine != CPU:
            return self.curve
        path = self.folder / TWIN_CURVE
        return ExpectedCurve.parse(read_json(path)) if path.is_file() else None

    def read_planned(self) -> dict[str, Any]:
        """Return the planned figures by run file, as `recipe plan` has written them; empty before."""
        path = self.folder / PLANNED
        return read_json(path) if path.is_file() else {}

    def split_twin(self, folder: Path) -> list[str]:
        """Return the words of the command that makes model and data of the twin."""
        return [word.format(folder=folder) for word in shlex.split(self.twin)]

    def write_data(self) -> list[Path]:
        """Write the files of `data` below the working directory; return those that were not there.

        Raises:
            ValueError: a data set cannot be read, or lacks a column.
        """
        written = []
        for name, parts in self.data.items():
            path = Path(name)
            if path.exists():
                continue
            lines = [json.dumps(row, ensure_ascii=False) + "\n" for part in parts for row in _convert_all(part)]
            write_file(path, "".join(lines), makes_folder=True)
            written.append(path)
        return written


def _convert_all(part: _Rows) -> list[dict[str, str]]:
    rows = []
    for file, number, row in read_rows(open_rows(part.rows)):
        if isinstance(row, MalformedRowError) or not isinstance(row, Mapping):
            raise ValueError(f"{file}, row {number}: {row if isinstance(row, MalformedRowError) else 'not an object'}")
        rows.append(part.convert(row))
    return rows


def find_recipes() -> Path:
    """Return the `recipes/` folder next to the package."""
    return find_project_configs().with_name("recipes")


def list_recipes(folder: Path | None = None) -> list[Recipe]:
    """Return all recipes, by name."""
    return [_read_recipe(path.parent) for path in sorted((folder or find_recipes()).glob("*/recipe.yaml"))]


def load_recipe(name: str) -> Recipe:
    """Return the recipe with a name, or in a folder.

    Raises:
        ValueError: there is none; the sentence names the most similar one.
    """
    folders = [Path(name).expanduser()] if "/" in name else [find_recipes() / name, Path("recipes") / name]
    found = next((folder for folder in folders if (folder / "recipe.yaml").is_file()), None)
    if found is not None:
        return _read_recipe(found.resolve())
    names = [recipe.name for recipe in list_recipes()]
    near = registry.find_similar(name, names)
    hint = f"did you mean '{near}'?" if near else f"there are {', '.join(names)}"
    raise ValueError(f"there is no recipe '{name}'; {hint}")


def _read_recipe(folder: Path) -> Recipe:
    """Read the file of a recipe.

    Raises:
        ValueError: the file has a mistake; the sentence names it.
    """
    import yaml  # the list of commands does without it

    path = folder / "recipe.yaml"
    check_yaml(path)
    tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(tree, Mapping):
        raise ValueError(f"{path} is not a group of keys")
    if unknown := [name for name in tree if name not in _FIELDS]:
        near = registry.find_similar(str(unknown[0]), _FIELDS)
        hint = f"did you mean {near}?" if near else f"they are {', '.join(_FIELDS)}"
        raise ValueError(f"{path}: {unknown[0]} is not a field; {hint}")
    texts = {name: tree.get(name) for name in ("title", "about", "published", "twin")}
    for name, text in texts.items():
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"{path}: {name} is {text!r}, but must be a text")
    try:
        data = {str(name): [_Rows(**part) for part in parts] for name, parts in (tree.get("data") or {}).items()}
        curve = None if tree.get("curve") is None else ExpectedCurve.parse(tree["curve"])
    except (TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None
    return Recipe(
        folder,
        **{name: " ".join(str(text).split()) for name, text in texts.items()},
        stages=tuple(map(str, tree.get("stages") or ())),
        data=data,
        curve=curve,
    )
