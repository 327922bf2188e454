"""What an import makes: the run file in the making, and a note about each option of the command."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from mindspeed_rl.config.run_files import apply_values
from mindspeed_rl.importers.source_plan import SourcePlan, render_plans
from mindspeed_rl.run.rules.violation import format_value

#: keys of megatron_training that belong only to the actor: a critic has its own
_ACTOR_KEYS = ("load", "save", "finetune", "lr")
#: rows over which a length in epochs is compared where their number is not known; most batch sizes divide it, so that what a
#: project does with an incomplete last batch does not matter
ASSUMED_ROWS = 430_080


@dataclass(frozen=True)
class ImportSettings:
    """Choices of the user for an import.

    Attributes:
        devices: devices of the run, where the command does not say them.
        variables: values of variables of the script.
        rewards: names of the reward functions that exist.
        allow_unknown: leave out options that no table has, instead of refusing them.
        accepted: names of plan numbers that may differ.
        rows: rows of the data, which a length in epochs is compared over.
        folder: folder of the script; files that it sources are read there.
    """

    devices: int | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    rewards: Collection[str] = ()
    allow_unknown: bool = False
    accepted: frozenset[str] = frozenset()
    rows: int = ASSUMED_ROWS
    folder: Path | None = None

    @property
    def knows_rows(self) -> bool:
        """True where the user says how many rows the data has."""
        return self.rows != ASSUMED_ROWS


@dataclass
class Import:
    """A run file in the making.

    Attributes:
        project: the project of the command, such as "ms-swift".
        settings: choices of the user.
        prefix: prefix of an option as it is written.
        options: the command's options.
        tree: the run file, groups and keys.
        translated: option as it was written -> its keys here.
        same: option -> the reason why nothing has to be set for it.
        without_effect: option -> the reason why it changes nothing here.
        refused: option -> the feature that is not available.
        added: key -> the reason why it is there although no option sets it.
        reasons: number of the plan that may differ -> the reason, which is shown next to it.
        plans: the numbers of the command and of the run file; None for a command that does not train.
        memory: sentences about a layout that does not fit; empty where it fits, or config.json is elsewhere.
        next_command: the command that the run file is for.
    """

    project: str
    settings: ImportSettings = field(default_factory=ImportSettings)
    prefix: str = ""
    options: Mapping[str, object] = field(default_factory=dict)
    tree: dict[str, dict[str, object]] = field(default_factory=dict)
    translated: dict[str, str] = field(default_factory=dict)
    same: dict[str, str] = field(default_factory=dict)
    without_effect: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    added: dict[str, str] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    plans: tuple[SourcePlan, SourcePlan] | None = None
    memory: str = ""
    next_command: str = "mindspeed-rl explain --config-name"
    _sources: dict[str, tuple[dict[str, object], str]] = field(default_factory=dict)

    def set(self, path: str, value: object) -> None:
        """Set the dotted key to the value."""
        self.tree = apply_values(self.tree, {_place(path): value})

    def get(self, path: str) -> object:
        """Return the value of a dotted key; None where it is not set."""
        value: object = self.tree
        for name in _place(path).split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        return value

    def translate(self, option: str, values: Mapping[str, object], note: str = "") -> None:
        """Set the dotted keys that an option becomes; without any, only the note says what becomes of it."""
        for path, value in values.items():
            self.set(path, value)
        self._sources[option] = dict(values), note
        self.translated[option] = _describe(values, note)

    def put(self, names: str, values: Mapping[str, object], note: str = "") -> None:
        """Set keys that options make up, under the first one that the command has, or as defaults of the project.

        Args:
            names: names of the options, between blanks.
        """
        given = self.list_given(names)
        if not given:
            for path, value in values.items():
                self.add_default(path, value, note or f"the default of {self.project}")
            return
        self.translate(given[0], values, note)
        self.translated |= dict.fromkeys(given[1:], f"see {given[0]}")

    def has_any(self, names: str) -> bool:
        """Return True where the command has one of the options."""
        return any(name in self.options for name in names.split())

    def list_given(self, names: str) -> list[str]:
        """Return the options that the command has, as they are written."""
        return [self.prefix + name for name in names.split() if name in self.options]

    def note_given(self, names: str, reason: str, *, changes_nothing: bool = True) -> None:
        """Note why no key is set for the options that the command has and that have no note yet."""
        for option in self.list_given(names):
            if reason and not self.is_noted(option):
                self.note(option, reason, changes_nothing=changes_nothing)

    def is_noted(self, option: str) -> bool:
        """Return True where it is said what becomes of an option."""
        return any(option in notes for notes in (self.translated, self.same, self.without_effect, self.refused))

    def take(self, path: str, note: str) -> object:
        """Remove a key from the run file, as it is said elsewhere, and return its value; None where it is not set.

        Args:
            note: what becomes of the options that set it.
        """
        value = self.get(path)
        group, _, name = _place(path).partition(".")
        self.tree.get(group, {}).pop(name, None)
        for option, (values, _) in self._sources.items():
            if value is not None and any(item == path or item.startswith(f"{path}.") for item in values):
                self._sources[option] = {}, note
                self.translated[option] = note
        if value is not None:
            self.added.pop(_place(path), None)
        return value

    def find_option(self, key: str) -> str | None:
        """Return the option, as it was written, that sets a dotted key of the run file; None where none does."""
        found = (option for option, (values, _) in self._sources.items() if key in map(_place, values))
        return next(found, None)

    def name_dropped(self) -> None:
        """Name the keys that options set and that are not in the run file after all, as nothing in it reads them."""
        for option, (values, note) in self._sources.items():
            dropped = [path for path, value in values.items() if value is not None and self.get(path) is None]
            if not dropped or option not in self.translated:
                continue
            kept = {path: value for path, value in values.items() if path not in dropped}
            reason = f"nothing in this run reads {', '.join(map(_place, dropped))}"
            if kept:
                self.translated[option] = f"{_describe(kept, note)}; {reason}"
            else:
                del self.translated[option]
                self.without_effect.setdefault(option, reason)

    def note(self, option: str, reason: str, *, changes_nothing: bool = True) -> None:
        """Note why no key is set for an option: it has no effect here, or is the same by nature."""
        (self.without_effect if changes_nothing else self.same)[option] = reason

    def refuse(self, option: str, feature: str) -> None:
        """Note that an option needs a feature that is not available."""
        self.refused[option] = feature

    def add_default(self, path: str, value: object, reason: str) -> None:
        """Set a key that no option sets; keep it where one does."""
        if self.get(path) is None:
            self.set(path, value)
            self.added[_place(path)] = f"{format_value(value)}, {reason}"

    def leave_unset(self, path: str, reason: str) -> None:
        """Note why a key stays as it is where no option sets it."""
        self.added[_place(path)] = f"not set, {reason}"

    def render(self, command: str) -> str:
        """Return the text of the run file, after comments with its command and with the options that have no key."""
        lines = [line.strip() for line in command.replace("\\\n", "\n").splitlines() if line.strip()]
        head = [f"# From {self.project}:", *(f"#   {line}" for line in lines)]
        head += [f"# without effect here: {option}: {reason}" for option, reason in self.without_effect.items()]
        head += [f"# {line}" for line in self.memory.splitlines()]
        body = yaml.safe_dump(self.tree, sort_keys=False, allow_unicode=True, width=120)
        return "\n".join(head) + "\n" + body

    def summarize(self) -> str:
        """Return a table of all options, and of both plans, for a terminal."""
        parts = []
        for title, rows in (
            (f"Options of {self.project} and their keys", self.translated),
            ("Options that hold here by nature", self.same),
            ("Options without effect here", self.without_effect),
            ("Keys that no option sets", self.added),
        ):
            if rows:
                width = min(max(len(name) for name in rows), 44)
                parts.append(f"{title}\n" + "\n".join(f"  {name:<{width}}  {text}" for name, text in rows.items()))
        if self.plans is not None:
            table = render_plans(self.project, *self.plans, accepted=self.settings.accepted, reasons=self.reasons)
            parts.append(f"Plan, over {self.settings.rows} rows of data where it depends on them\n{table}")
        return "\n\n".join([*parts, self.memory] if self.memory else parts)


def _describe(values: Mapping[str, object], note: str) -> str:
    """Return the keys that an option becomes with their values; without any, the note."""
    text = ", ".join(f"{_place(path)}: {format_value(value)}" for path, value in values.items())
    return f"{text} ({note})" if text and note else text or note


def _place(path: str) -> str:
    """Return the dotted name of a key in the run file."""
    group, _, name = path.partition(".")
    return f"actor_config.{name}" if group == "megatron_training" and name in _ACTOR_KEYS else path
