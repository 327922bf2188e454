"""Run files on disk: their location, limits of their YAML, and their composition with model blocks and overrides by Hydra."""

from __future__ import annotations

import contextlib
import copy
import os
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from mindspeed_rl.config.errors import ConfigError, suggest_name
from mindspeed_rl.config.keys import PATH_KEYS
from mindspeed_rl.config.keys.megatron import SUPERVISED_STAGES
from mindspeed_rl.config.keys.schema import normalize
from mindspeed_rl.files import read_regular

#: limits of file systems, less the suffix
_MAX_NAME_BYTES, _MAX_PATH_BYTES = 240, 4000
#: far beyond any run file
_MAX_BYTES, _MAX_DEPTH, _MAX_NODES, _MAX_TEXT, _MAX_CALLS = 1 << 20, 60, 100_000, 1 << 15, 1_000_000


def find_project_configs() -> Path:
    """Return the `configs/` folder: next to the package in a clone, below `share/` where a wheel is installed."""
    clone = Path(__file__).resolve().parents[2] / "configs"
    return clone if clone.is_dir() else Path(sysconfig.get_path("data"), "share", "mindspeed_rl", "configs")


def locate(config_name: str, config_dir: str | Path | None) -> tuple[Path, str]:
    """Return the folder and the bare name of a run file that exists.

    Raises:
        ConfigError: no such folder or file; the sentence names the most similar run file.
    """
    if config_dir is None and os.sep in config_name:
        config_dir, config_name = os.path.split(config_name)
    name = config_name.removesuffix(".yaml")
    if not name.isprintable() or not 0 < len(name.encode("utf-8", "replace")) <= _MAX_NAME_BYTES or "/" in name:
        raise ConfigError([f"--config-name {config_name[:60]!r} is not a name of a file"])
    if config_dir is not None and ("\0" in str(config_dir) or len(os.fsencode(config_dir)) > _MAX_PATH_BYTES):
        raise ConfigError([f"--config-dir {str(config_dir)[:60]!r} is not a name of a folder"])
    # a file of the user wins over a shipped one only where its suffix marks it as a file
    here = [Path.cwd()] if config_name.endswith(".yaml") else []
    everywhere = [*here, find_project_configs(), Path.cwd() / "configs", Path.cwd()]
    folders = [Path(config_dir)] if config_dir is not None else everywhere
    for folder in folders:
        if (folder / f"{name}.yaml").is_file():
            return folder.resolve(), name
    existing = [folder for folder in folders if folder.is_dir()]
    if not existing:
        raise ConfigError([f"the configuration folder {folders[0]} does not exist"])
    available = {path.stem: folder for folder in reversed(existing) for path in folder.glob("*.yaml")}
    likely = suggest_name(name.removesuffix(".yml"), sorted(available))
    if likely is None:
        hint = "; ".join(_list_run_files(existing))
    elif available[likely] == existing[0]:
        hint = f"the nearest name there is {likely}"
    else:
        hint = f"the nearest one is {available[likely] / likely}.yaml"
    shown = f"{name} (run files end in .yaml)" if name.endswith(".yml") else f"{name}.yaml"
    raise ConfigError([f"there is no run file {shown} in {existing[0]}; {hint}"])


def _list_run_files(folders: Sequence[Path]) -> Iterator[str]:
    """Yield a phrase per folder with the names of its run files; of the first, "it", also where it has none."""
    for index, folder in enumerate(dict.fromkeys(folder.resolve() for folder in folders)):
        names = sorted(path.stem for path in folder.glob("*.yaml"))
        if names or not index:
            yield f"{folder if index else 'it'} has {', '.join(names) or 'no run file'}"


def compose(directory: Path, name: str, overrides: list[str]) -> dict[str, Any]:
    """Return the composed run file as plain containers, with interpolations resolved.

    Raises:
        ConfigError: YAML that cannot be read, a model block or an override that Hydra rejects.
    """
    # imported here so that the package loads without Hydra
    import yaml
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException, MissingConfigException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    folders = tuple(dict.fromkeys((directory, find_project_configs())))
    _check_files(name, folders, overrides)
    items = [_force_override(item) for item in overrides]
    if directory != find_project_configs():
        items.append(f"hydra.searchpath=[{_quote(f'file://{find_project_configs()}')}]")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # Hydra asks for `_self_` in defaults; upstream's run files have none.
            with initialize_config_dir(version_base=None, config_dir=str(directory)):
                composed = hydra_compose(name, overrides=items)
        # Hydra composes a mapping with text as keys
        with _limit_calls():
            tree = cast("dict[str, Any]", OmegaConf.to_container(composed, resolve=True, throw_on_missing=True))
    except MissingConfigException as error:
        missing = (error.missing_cfg_file or "").removesuffix(".yaml")
        group, _, block = missing.rpartition("/")
        folders = (directory / group, find_project_configs() / group)
        available = sorted({path.stem for folder in folders for path in folder.glob("*.yaml")})
        likely = suggest_name(block, available)
        hint = f"the nearest name there is {likely}" if likely else f"known names are {', '.join(available) or 'none'}"
        raise ConfigError([f"defaults of {name}.yaml: {missing}.yaml does not exist in {directory}; {hint}"]) from error
    except RecursionError:
        raise ConfigError([f"{name}.yaml or an override is nested too deeply"]) from None
    except _TooManyCallsError:
        raise ConfigError([f"{name}.yaml or an override has ${{...}} that stand for too many values"]) from None
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError, TypeError, AssertionError) as error:
        text = (_join_lines(error) or type(error).__name__)[:500]
        named = [item for item in overrides if (key := item.partition("=")[0].strip("+~")) and key in text]
        where = f"override {named[0][:200]!r}" if named else f"{name}.yaml"
        raise ConfigError([f"{where} cannot be read: {text}"]) from error
    training = tree.get("megatron_training")
    stage = training.get("stage") if isinstance(training, dict) else None
    if tree.get("rl_config") is not None and tree.get("actor_config") is None and stage not in SUPERVISED_STAGES:
        raise ConfigError(["the group actor_config is missing or empty: it has the actor's load, lr and parallel sizes"])
    return tree


class _TooManyCallsError(BaseException):
    """A block that should be quick has no end; OmegaConf would wrap an Exception."""


@contextlib.contextmanager
def _limit_calls() -> Iterator[None]:
    """End a block after `_MAX_CALLS` calls of functions: OmegaConf has no limit for values that refer to others twice.

    A profiler switches the limit off: Python has only one profile function, and cProfile's cannot be restored.
    """
    count, before = 0, sys.getprofile()
    if before is not None:
        yield
        return

    def on_event(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += 1
        if count > _MAX_CALLS:
            sys.setprofile(None)
            raise _TooManyCallsError

    sys.setprofile(on_event)
    try:
        yield
    finally:
        sys.setprofile(None)


def _force_override(item: str) -> str:
    """Let "group.key=value" also add a key the file does not have; the schema decides whether the key exists.

    A path is taken as it is written, whatever its characters mean to Hydra; so is another value that Hydra cannot read.

    Raises:
        ConfigError: Hydra cannot read it even so.
    """
    import yaml
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    def read(text: str) -> str | None:
        try:
            return "several values" if parser.parse_override(text).is_sweep_override() else None
        except (HydraException, ValueError, AssertionError) as error:
            return _join_lines(error)

    parser = OverridesParser.create()
    key, equals, value = item.partition("=")
    if not key or not equals and not item.startswith("~"):
        raise ConfigError([f"override {item[:200]!r} is not of the form group.key=value"])
    if key != key.strip() or value != value.lstrip():
        near = f"{key.strip()}={value.strip()}"
        raise ConfigError([f"override {item[:200]!r} has blanks around the equals sign; write {near[:200]}"])
    keeps = item[0] in "+~" or key.startswith("hydra.") or key == "model" or "@" in key
    forced = item if keeps else f"++{item}"
    name, is_path = forced.partition("=")[0], key.rpartition(".")[2].replace("-", "_") in PATH_KEYS and ".deadlines." not in key
    problem, is_text = read(forced), bool(value) and value != "null" and value[0] not in "[{'\""
    if problem and value[:1] in ("[", "{"):
        with contextlib.suppress(yaml.YAMLError, ValueError, RecursionError):
            forced = f"{name}={_quote(yaml.safe_load(value))}"
            problem = read(forced)
    if is_text and (problem or is_path) or is_path and problem:
        forced = f"{name}={_quote(value)}"
        problem = read(forced)
    if problem:
        raise ConfigError([f"override {item[:200]!r} cannot be read: {problem.partition(' See https')[0]}"])
    return forced


def _quote(value: object) -> str:
    """Return a value in Hydra's grammar of overrides, with text in quotes."""
    if isinstance(value, list):
        return f"[{','.join(map(_quote, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{_quote(name)}:{_quote(item)}' for name, item in value.items())}}}"
    if not isinstance(value, str):
        return "null" if value is None else str(value).lower()
    # a backslash means itself except before a quote, which has one, and at the end
    escaped = re.sub(r"(\\*)'", r"\1\1\\'", value)
    return "'" + re.sub(r"(\\+)$", r"\1\1", escaped) + "'"


def _check_files(name: str, folders: tuple[Path, ...], overrides: Sequence[str] = ()) -> None:
    """Check the YAML of a run file, and of the files that its defaults or an override of `model` name.

    Args:
        name: run file, as a path below one of the folders without its suffix.
        folders: where Hydra looks for a name; the first that has it wins.

    Raises:
        ConfigError: `check_yaml` refuses a file, or the defaults of files name each other in a circle.
    """
    checked = set[str]()

    def check(name: str, parents: tuple[str, ...]) -> None:
        if name in parents:
            circle = " -> ".join(f"{each}.yaml" for each in (*parents[parents.index(name) :], name))
            raise ConfigError([f"defaults of {parents[0]}.yaml go in a circle: {circle}; remove one of these entries"])
        path = next((path for folder in folders if (path := folder / f"{name}.yaml").is_file()), None)
        if name in checked or path is None:  # composing reports a missing one
            return
        checked.add(name)
        check_yaml(path)
        for each in _read_defaults(path, os.path.dirname(name)):
            check(each, (*parents, name))

    for item in overrides:
        if item.lstrip("+").startswith("model="):
            for block in item.partition("=")[2].strip("[]").split(","):
                check(f"model/{block.strip()}", ())
    check(name, ())


def _read_defaults(path: Path, group: str) -> Iterator[str]:
    """Yield the names in the defaults of a file that lies in a group of run files; a name that begins with "/" has no group."""
    import yaml

    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError, RecursionError):  # composing reports it
        return
    defaults = tree.get("defaults") if isinstance(tree, dict) else None
    if not isinstance(defaults, list):  # composing reports it
        return
    for entry in defaults:
        for choice, names in entry.items() if isinstance(entry, dict) else [("", entry)]:
            # "override /model@package" is the choice "/model"
            choice = (str(choice).partition("@")[0].split() or [""])[-1]
            for name in names if isinstance(names, list) else [names]:
                yield os.path.join("/", group, choice, str(name).partition("@")[0]).lstrip("/")


def _find_wide_colon(text: str) -> str:
    """Return a phrase that names the first line whose key ends in a full-width colon; "" without one."""
    lines = enumerate(text.splitlines(), start=1)
    number = next((number for number, line in lines if re.match(r"\s*[\w.-]+\s*：", line)), None)
    return "" if number is None else f"; line {number} has a full-width colon (：): write : and a blank"


def _join_lines(error: Exception) -> str:
    return " ".join(line.strip() for line in str(error).splitlines() if line.strip())


def apply_values(tree: Mapping[str, Any], changes: Mapping[str, object]) -> dict[str, Any]:
    """Return a copy of a composed run file with other values of some keys, given by dotted name."""
    changed = {name: copy.deepcopy(value) for name, value in normalize(tree).items()}
    for key, value in changes.items():
        *groups, name = key.split(".")
        holder = changed
        for group in groups:
            inner = holder.get(group)
            holder[group] = holder = normalize(inner) if isinstance(inner, Mapping) else {}
        holder[name] = value
    return changed


def check_yaml(path: Path) -> None:
    """Check text, size and depth of a YAML file, and the values for which its aliases stand, before it is read.

    Raises:
        ConfigError: it is binary or of another encoding than UTF-8, too large, nested too deeply, or an alias bomb; or no YAML.
    """
    import yaml  # the package loads without it

    try:
        size = path.stat().st_size
        if not path.is_file() or size > _MAX_BYTES:
            raise ConfigError([f"{path} is not a run file: it has {size} bytes, more than {_MAX_BYTES}, or is not plain"])
        text = read_regular(path).decode("utf-8")
    except OSError as error:
        raise ConfigError([f"{path} cannot be read: {error.strerror}"]) from None
    except UnicodeDecodeError as error:
        where = f"byte {error.start} is 0x{error.object[error.start]:02x}"
        raise ConfigError([f"{path} is not UTF-8 text ({where}); save it as UTF-8"]) from None
    # sizes of the open collections, where an alias has the size of its anchor; and sizes by anchor
    open_sizes: list[int] = [0]
    open_anchors: list[str | None] = []
    anchored: dict[str, int] = {}
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            if isinstance(event, yaml.CollectionStartEvent):
                open_sizes.append(1)
                open_anchors.append(event.anchor)
            elif isinstance(event, yaml.CollectionEndEvent):
                size, anchor = open_sizes.pop(), open_anchors.pop()
                if anchor is not None:
                    anchored[anchor] = size
                open_sizes[-1] += size
            elif isinstance(event, yaml.AliasEvent):
                open_sizes[-1] += anchored.get(event.anchor, 1)
            elif isinstance(event, yaml.ScalarEvent):
                open_sizes[-1] += 1
                if len(event.value) > _MAX_TEXT:
                    raise ConfigError([f"{path} has a value of {len(event.value)} characters, more than {_MAX_TEXT}"])
                if event.anchor is not None:
                    anchored[event.anchor] = 1
            if len(open_sizes) > _MAX_DEPTH:
                raise ConfigError([f"{path} is nested more than {_MAX_DEPTH} levels deep"])
            if open_sizes[-1] > _MAX_NODES:
                raise ConfigError([f"{path} stands for more than {_MAX_NODES} values (aliases count as what they repeat)"])
    except ConfigError:
        raise
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError([f"{path} cannot be read: {_join_lines(error)[:500]}{_find_wide_colon(text)}"]) from None
    except RecursionError:
        raise ConfigError([f"{path} is nested too deeply"]) from None
