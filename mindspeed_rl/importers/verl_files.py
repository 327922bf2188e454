"""Configuration files of verl: what Hydra composes of a file, its defaults list and the words of a command.

A release's own files are the defaults of the tables in `verl_options.py`, so they are named here and not read. Every other file
that a command or a defaults list names is read, or asked for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from mindspeed_rl.config.errors import ConfigError
from mindspeed_rl.importers.options import read_scalar
from mindspeed_rl.importers.shell import Command
from mindspeed_rl.importers.source_files import list_folders, load_yaml, refuse_changed

#: configurations of a release -> the engine that they have
_RELEASED = {
    "ppo_trainer": "",
    "ppo_megatron_trainer": "megatron",
    "sft_trainer": "",
    "sft_trainer_engine": "",
    "one_step_off_ppo_trainer": "",
    "one_step_off_ppo_megatron_trainer": "megatron",
    "fully_async_ppo_trainer": "",
    "fully_async_ppo_megatron_trainer": "megatron",
    # a recipe of earlier releases, which sets what main_ppo has now
    "dapo_trainer": "",
    "dapo_megatron_trainer": "megatron",
    "legacy_reward_impl": "",
}
#: groups of a release's configurations
_GROUPS = frozenset(
    "model_engine actor ref critic rollout model data reward reward_model algorithm distillation transfer_queue engine optim "
    "npu_profile profiler".split()
)
#: beginnings of the names in a group, and the engine that they are of
_ENGINES = {"dp": "dp", "megatron": "megatron", "torchtitan": "torchtitan", "veomni": "veomni", "fsdp": "dp"}
#: names in the groups of a release that are of no engine
_PLAIN = frozenset(
    "actor ref critic rollout hf_model legacy_data reward reward_model rollout_correction distillation transfer_queue "
    "npu_profile profiler automodel".split()
)
#: forms of Hydra's options of the command line -> their names
_OPTIONS = {"-cn": "config-name", "-cp": "config-path", "-cd": "config-dir", "-m": "multirun"}
_OPTIONS |= {f"--{name}": name for name in ("config-name", "config-path", "config-dir", "multirun")}
_KEY = re.compile(r"[+]*[A-Za-z_]\w*(\.[\w-]+)+=")
_GROUP_WORD = re.compile(r"[+]*([A-Za-z_][\w/]*)(?:@([\w.]+))?=(.*)", re.DOTALL)
_NULL = ("null", "None", "none", "")


def is_key(word: str) -> bool:
    """Return True for a word such as data.train_files=train.parquet."""
    return _KEY.match(word) is not None


@dataclass
class Composition:
    """The options of a command's files and words, which later ones win.

    Attributes:
        command: the command, whose folders relative paths start from.
        options: dotted name -> value.
        folders: where files of a defaults list are, the first first.
    """

    command: Command
    options: dict[str, object] = field(default_factory=dict)
    folders: list[Path] = field(default_factory=list)

    def set(self, name: str, value: object) -> None:
        """Set an option; a mapping sets those in it."""
        if isinstance(value, Mapping) and value:
            for key, item in value.items():
                if key != "_target_":
                    self.set(f"{name}.{key}", item)
        else:
            self.options[name] = read_scalar(value) if isinstance(value, str) else value

    # --- files

    def read_named(self, name: str, path: str | None, folder: str | None) -> None:
        """Read the configuration of --config-name, --config-path and --config-dir, or note that it is the release's."""
        stem = name.removesuffix(".yaml")
        for start in (path, folder):
            if start is not None:
                self.folders += _list_starts(self.command, start)
        found = self._find(stem)
        is_own = path is not None and Path(path).name != "config"
        if found is not None and (stem not in _RELEASED or is_own or folder is not None):
            self.read_file(found)
        elif stem in _RELEASED and not is_own:
            self._choose(_RELEASED[stem])
        else:
            where = " and ".join(text for text in (path, folder) if text is not None) or "verl's own folder"
            raise ConfigError(
                [f"--config-name {name}: its file {stem}.yaml in {where} is not here, and what it holds is part of the run; "
                 "run the import where that folder is, or write its path in --config-path"]
            )  # fmt: skip

    def read_file(self, path: Path, package: str = "") -> None:
        """Compose a file: the entries of its defaults list, and its own values where `_self_` stands, else after them."""
        content, header = load_yaml(path), re.match(r"#\s*@package\s+(\S+)", path.read_text(encoding="utf-8"))
        package = package if header is None else "" if header.group(1) == "_global_" else header.group(1)
        search = content.pop("hydra", None)
        if isinstance(search, Mapping):
            for place in search.get("searchpath") or []:
                if str(place).startswith("file://"):
                    self.folders += _list_starts(self.command, str(place).removeprefix("file://"))
        if path.parent not in self.folders:
            self.folders.insert(0, path.parent)
        entries = content.pop("defaults", None) or []
        if not isinstance(entries, list):
            raise ConfigError([f"{path}: defaults must be a list"])
        entries = entries if "_self_" in entries else [*entries, "_self_"]
        has_own = False
        for entry in entries:
            if entry == "_self_":
                has_own = True
                for name, value in content.items():
                    self.set(f"{package}.{name}" if package else name, value)
            elif isinstance(entry, str):
                self._enter(path, entry.lstrip("/"), package, after_self=has_own)
            elif isinstance(entry, Mapping):
                for group, names in entry.items():
                    self._enter_group(path, str(group), names, package, after_self=has_own)

    def _enter(self, path: Path, name: str, package: str, *, after_self: bool) -> None:
        stem, _, own = name.removesuffix(".yaml").partition("@")
        if (found := self._find(stem)) is not None and found != path:
            self.read_file(found, own or package)
        elif stem not in _RELEASED:
            raise ConfigError([f"{path}: its defaults list names {name}, and {stem}.yaml is not here"])
        elif after_self:
            raise ConfigError([f"{path}: {name} after _self_ overrides the values of the file; put _self_ last"])
        else:
            self._choose(_RELEASED[stem])

    def _enter_group(self, path: Path, text: str, names: object, package: str, *, after_self: bool) -> None:
        is_optional = text.startswith("optional ")
        text = text.removeprefix("optional ").removeprefix("override ").lstrip("/")
        if text.startswith("hydra"):
            return
        group, _, own = text.partition("@")
        for name in names if isinstance(names, list) else [names]:
            self.enter_group(group, own or ".".join(part for part in (package, group.replace("/", ".")) if part), name,
                             f"{path}: its defaults list", is_optional=is_optional, after_self=after_self)  # fmt: skip

    def enter_group(
        self, group: str, package: str, name: object, source: str, *, is_optional: bool = False, after_self: bool = False
    ) -> None:
        """Read the file that is chosen for a group, or note that it is the release's.

        Raises:
            ConfigError: it is neither here nor of a release.
        """
        if name is None or str(name) in _NULL:
            return
        stem = str(name).removesuffix(".yaml")
        if (found := self._find(f"{group}/{stem}")) is not None:
            self.read_file(found, "" if package == "_global_" else package)
        elif group in _GROUPS and (stem in _PLAIN or stem.startswith("${model_engine}")):
            self._refuse_late(source, f"{group}: {stem}", after_self=after_self)
        elif group in _GROUPS and (engine := _ENGINES.get(stem.partition("_")[0])) is not None:
            self._refuse_late(source, f"{group}: {stem}", after_self=after_self)
            if group in ("model_engine", "actor", "engine"):
                self._choose(engine)
        elif not is_optional:
            raise ConfigError([f"{source} names {group}: {stem}, and {group}/{stem}.yaml is not here"])

    def _refuse_late(self, source: str, entry: str, *, after_self: bool) -> None:
        if after_self:
            raise ConfigError([f"{source} names {entry} after _self_, which overrides the values of the file; put _self_ last"])

    def _find(self, stem: str) -> Path | None:
        found = (folder / f"{stem}.yaml" for folder in self.folders)
        file = next((path for path in found if path.is_file()), None)
        if file is not None:
            refuse_changed(self.command, file)
        return file

    def _choose(self, engine: str) -> None:
        if engine:
            self.options["model_engine"] = engine

    # --- words of a command

    def read_words(self, words: Sequence[str]) -> None:
        """Read Hydra's options and the overrides among the words after a program.

        Raises:
            ConfigError: a word has no meaning, or one that has no counterpart.
        """
        flags, overrides = _split(words)
        if flags.keys() & {"config-name", "config-path", "config-dir"}:
            self.read_named(flags.get("config-name", "ppo_trainer"), flags.get("config-path"), flags.get("config-dir"))
        if "multirun" in flags:
            raise ConfigError(["--multirun: several runs of one command; import one of them"])
        for word in overrides:
            self._override(word)

    def _override(self, word: str) -> None:
        if is_key(word):
            name, _, text = word.partition("=")
            # Hydra's + and ++ only mark a key as new
            self.options.pop(name.lstrip("+"), None)
            self.set(name.lstrip("+"), _parse_value(word, text))
        elif word.startswith("~") and len(word) > 1:
            name = word[1:].partition("=")[0]
            removed = [key for key in self.options if key == name or key.startswith(f"{name}.")]
            if not removed:
                raise ConfigError([f"{word}: a default of verl that the command takes away; not available here"])
            for key in removed:
                del self.options[key]
        elif match := _GROUP_WORD.fullmatch(word):
            group, package, text = match.groups()
            if group == "model_engine":
                self.options["model_engine"] = read_scalar(text)
            elif group.startswith("hydra/") or group == "hydra":
                return
            else:
                self.enter_group(group, package or group.replace("/", "."), read_scalar(text), f"the word {word}")
        else:
            raise ConfigError([f"{word!r} is not a key such as data.train_files=train.parquet, and no option of Hydra"])


def _list_starts(command: Command, start: str) -> list[Path]:
    """Return the folders of a path that exist: from a working directory, or from the program's own folder as Hydra has it."""
    path = Path(start).expanduser()
    folders = [] if path.is_absolute() else list(list_folders(command))
    places = [*(folder / path for folder in folders), *(folder / "verl" / "trainer" / path for folder in folders)] or [path]
    return [place for place in places if place.is_dir() and not _is_released(place)]


def _is_released(folder: Path) -> bool:
    """Return True for the folder of a release's own configurations, which the tables have."""
    return (folder / "actor" / "dp_actor.yaml").is_file() or (folder / "_generated_ppo_trainer.yaml").is_file()


def _split(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return Hydra's options, and the words that override."""
    flags: dict[str, str] = {}
    overrides: list[str] = []
    rest = iter(words)
    for word in rest:
        name, equals, value = word.partition("=")
        if name in _OPTIONS:
            takes = _OPTIONS[name] != "multirun"
            flags[_OPTIONS[name]] = value if equals else next(rest, "") if takes else "true"
        elif word.startswith("-") and len(word) > 1:
            raise ConfigError([f"{word}: no option of Hydra that starts a training"])
        elif word.strip():
            overrides.append(word)
    return flags, overrides


def _parse_value(word: str, text: str) -> object:
    """Return the value of an override: YAML's reading, and Hydra's for mappings such as {a:1}.

    Raises:
        ConfigError: a mapping cannot be read.
    """
    if not text.startswith("{") or "\0" in text:
        return read_scalar(text)
    try:
        return OverridesParser.create().parse_override(word).value()
    except HydraException as error:
        raise ConfigError([f"{word}: its value cannot be read: {error}"]) from None


# ---------------------------------------------------------------------------------------------------------- interpolations

_INTERPOLATION = re.compile(r"\$\{([^${}]*)\}")


@dataclass
class References:
    """Values in place of references to other options, such as ${data.train_batch_size}.

    Attributes:
        options: dotted name -> value.
        environment: variables of the command.
        look_up: a name that no option has -> whether the release has it with a known value, and that value.
    """

    options: Mapping[str, object]
    environment: Mapping[str, str]
    look_up: Callable[[str], tuple[bool, object]]

    def resolve(self) -> dict[str, object]:
        """Return the options without references.

        Raises:
            ConfigError: a reference has no known value.
        """
        return {name: self._resolve(name, value, (name,)) for name, value in self.options.items()}

    def _resolve(self, name: str, value: object, seen: tuple[str, ...]) -> object:
        if isinstance(value, list):
            return [self._resolve(name, item, seen) for item in value]
        while isinstance(value, str) and (match := _INTERPOLATION.search(value)):
            found = self._find(name, match.group(1), seen)
            if match.group() == value:
                return found
            value = value.replace(match.group(), str(found))
        return value

    def _find(self, name: str, reference: str, seen: tuple[str, ...]) -> object:
        """Return the value of one reference of an option."""
        resolver, colon, arguments = reference.partition(":")
        target, *rest = [part.strip() for part in arguments.split(",")] if colon else [reference.strip()]
        if colon and resolver in ("oc.env", "env"):
            value = self.environment.get(target, rest[0] if rest else None)
            if value is None:
                raise ConfigError([f"{name}: the value of the variable {target} is not in the command; write its value"])
            return read_scalar(value)
        if colon and resolver != "oc.select":
            raise ConfigError([f"{name}=${{{reference}}}: write its value; only names of other options are followed"])
        dots = len(target) - len(target.lstrip("."))
        if dots:
            target = ".".join([*name.split(".")[:-dots], target.lstrip(".")])
        if target in seen:
            raise ConfigError([f"{name}: the values of {', '.join(seen)} refer to each other"])
        if target in self.options:
            return self._resolve(target, self.options[target], (*seen, target))
        is_known, value = self.look_up(target)
        if is_known:
            return value
        if rest:
            return read_scalar(rest[0])
        raise ConfigError([f"{name}=${{{reference}}}: {target} is not in the command; write its value"])
