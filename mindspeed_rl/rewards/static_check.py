"""Static check of a run file's reward functions: reads the user's files without running them."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from mindspeed_rl.config.keys.rl import RLConfig
from mindspeed_rl.files import describe_missing
from mindspeed_rl.rewards import REWARDS, find

#: package of plug-in files in ms-swift's form; `swift_plugins` has what they import
_SWIFT = "swift"
#: key -> registry of such files that has its names
_REGISTRIES = {"multi_turn_scheduler": "multi_turns", "environment": "envs"}


def check_reward_functions(rl: RLConfig) -> list[str]:
    """Return a sentence for each plug-in file that is not valid Python and each reward function that nothing defines.

    Where a plug-in may register names that cannot be read from its source, unknown names are accepted here.
    """
    named = _list_named(rl)
    if not rl.rule_reward and not named:
        return []
    violations: list[str] = []
    plugins = _PluginNames()
    for path in rl.external_plugins:
        try:
            plugins.read(Path(path).expanduser())
        except ValueError as error:
            violations.append(f"rl_config.external_plugins: {error}")
    for key, (name, registry) in named.items() if not violations else ():
        known = plugins.entries.get(registry, [])
        if name not in known:
            have = f"they have {', '.join(known)}" if known else "none has any"
            violations.append(
                f"rl_config.{key}: '{name}' is neither module:Class nor in {registry} of a file in external_plugins; {have}"
            )
    if not violations and rl.rule_reward:
        for name in rl.verifier_function:
            if problem := _find_problem(name, plugins):
                violations.append(f"rl_config.verifier_function: {problem}")
    return violations


def _list_named(rl: RLConfig) -> dict[str, tuple[str, str]]:
    """Return keys whose value is a name in a registry of plug-in files, each with the name and the registry."""
    found = {key: (getattr(rl, key), registry) for key, registry in _REGISTRIES.items() if rl.multi_turn_enable}
    return {key: item for key, item in found.items() if item[0] is not None and not re.search(r":|\.ya?ml$", item[0])}


def _find_problem(name: str, plugins: _PluginNames) -> str | None:
    if name in REWARDS or name in plugins.names:
        return None
    if ":" in name:
        package = name.partition(":")[0].partition(".")[0]
        return None if _exists(package) else f"'{name}': there is no module '{package}' in sys.path or the working directory"
    if not plugins.complete:
        return None
    if (file := plugins.functions.get(name)) is not None:
        return f"'{name}' is a function of {file} that is not registered: write @register(\"{name}\") above it"
    try:
        find(name, plugins.names)
    except ValueError as error:
        return str(error)
    return None


@dataclass
class _PluginNames:
    """Names that plug-ins register.

    Attributes:
        names: names of reward functions.
        entries: registry of ms-swift -> names of its schedulers or environments.
        complete: False if they may register names that are not in their source.
        functions: names of functions and classes in the files, each with its file.
    """

    names: list[str] = field(default_factory=list)
    entries: dict[str, list[str]] = field(default_factory=dict)
    complete: bool = True
    functions: dict[str, Path] = field(default_factory=dict)

    def read(self, path: Path) -> None:
        """Add a plug-in's names.

        Raises:
            ValueError: no such file, no valid Python, or it imports a missing module; the message has the line.
        """
        if path.is_dir():
            raise ValueError(f"'{path}' is a folder ({path.absolute()}); name a Python file in it (*.py)")
        if not path.is_file():
            raise ValueError(f"there is no file '{path}': {describe_missing(path)}")
        if path.suffix != ".py":
            raise ValueError(f"'{path}' is not a Python file (*.py)")
        try:
            tree = ast.parse(path.read_bytes(), filename=str(path))
        except SyntaxError as error:
            raise ValueError(f"'{path}', line {error.lineno}: {type(error).__name__}: {error.msg}") from error
        except ValueError as error:  # null bytes
            raise ValueError(f"'{path}': {error}") from error
        for line, package in _list_required_imports(tree):
            is_known = package == _SWIFT or package in sys.stdlib_module_names
            if not (is_known or _contains(path.parent, package) or _exists(package)):
                raise ValueError(f"'{path}', line {line}: there is no module '{package}'")
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                self.functions[node.name] = path
        for name in _find_registered_names(tree):
            if name is None:
                self.complete = False
            else:
                self.names.append(name)
        for registry in _REGISTRIES.values():
            found = [name for name in _find_entries(tree, registry) if name is not None]
            self.entries.setdefault(registry, []).extend(found)
        self.complete &= not any(_is_local(package, path) for package in _list_imports(tree))


def _find_entries(tree: ast.Module, registry: str) -> Iterator[str | None]:
    """Yield the names in `registry[...]`; None for a computed name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and _last_name(node.value) == registry:
            yield _text(node.slice)
        elif isinstance(node, ast.Attribute) and _last_name(node.value) == registry and node.attr in ("update", "setdefault"):
            yield None


def _find_registered_names(tree: ast.Module) -> Iterator[str | None]:
    """Yield the names in `register(...)`, `REWARDS[...] = ...` and ms-swift's `orms[...] = ...`; None for a computed name."""
    yield from _find_entries(tree, "orms")
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _last_name(node.func) == "register":
            yield _text(node.args[0] if node.args else next((item.value for item in node.keywords), None))
        elif isinstance(node, ast.Subscript) and _last_name(node.value) == "REWARDS":
            yield _text(node.slice)
        elif isinstance(node, ast.Attribute) and _last_name(node.value) == "REWARDS":
            yield None  # REWARDS.update(...)
        elif isinstance(node, ast.alias) and node.name == "register" and node.asname is not None:
            yield None


def _last_name(node: ast.expr) -> str | None:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else None


def _text(node: ast.expr | None) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _list_imports(tree: ast.Module) -> Iterator[str]:
    """Yield the top-level packages that a file imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.partition(".")[0]


def _list_required_imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield (line, top-level package) of the imports outside of functions, `try` and `if`, which must not fail."""
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom) and not getattr(node, "level", 0):
            yield from ((node.lineno, package) for package in _list_imports(ast.Module([node], [])))


def _is_local(package: str, path: Path) -> bool:
    """Return True for a module of the user, which may register names as well."""
    return package not in sys.stdlib_module_names and any(_contains(folder, package) for folder in (path.parent, Path.cwd()))


def _exists(package: str) -> bool:
    return _contains(Path.cwd(), package) or importlib.util.find_spec(package) is not None


def _contains(folder: Path, package: str) -> bool:
    return package != "mindspeed_rl" and ((folder / f"{package}.py").is_file() or (folder / package).is_dir())
