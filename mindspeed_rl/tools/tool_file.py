"""Reads tool files: the YAML form of MindSpeed-RL and verl, extended by functions, built-in tools and MCP servers.

    tools:
      - calculator                                # built in
      - my_package.tools:look_up                  # a function, its schema from type hints and docstring
      - class_name: my_package.tools.Weather      # a class with create, execute and release
        config: {...}
        tool_schema: {type: function, function: {...}}
        limits: {timeout_s: 30, retries: 0, max_parallel: 32}
      - mcp: {servers: {files: {command: my-server, args: []}}}

Reading imports nothing. All errors of a file are reported at once, each with its line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar, get_args

from mindspeed_rl import registry
from mindspeed_rl.config.errors import ConfigError
from mindspeed_rl.config.run_files import check_yaml
from mindspeed_rl.files import describe_missing
from mindspeed_rl.tools import FOREIGN_CLASSES, TOOLS
from mindspeed_rl.tools.class_tool import ClassTool
from mindspeed_rl.tools.interface import JsonObject
from mindspeed_rl.tools.mcp_servers import McpServers
from mindspeed_rl.tools.option_reader import OptionReader
from mindspeed_rl.tools.python_tool import FunctionTool
from mindspeed_rl.tools.running import RunIn
from mindspeed_rl.tools.tool import CallSettings, Config, Tool

_Kind = Literal["class", "function", "tool", "mcp"]
_MCP_CLASSES = "verl.tools.mcp_"
_MAX_TIMEOUT_S = 3600.0
_Input = TypeVar("_Input")
_Output = TypeVar("_Output")


@dataclass(frozen=True)
class _ToolEntry:
    """One entry of a tool file.

    Attributes:
        target: class, module:function or name of a built-in tool; "" for MCP servers.
        config: settings of the class or the built-in tool; the value of `mcp` for MCP servers.
        schema: as in the file, None without one.
        run_in: None for the tool's default.
        where: file, line and entry, the prefix of errors.
    """

    kind: _Kind
    target: str
    config: JsonObject
    schema: object
    run_in: RunIn | None
    settings: CallSettings = field(default_factory=CallSettings)
    where: str = ""


def read_tools(spec: str, timeout_s: float = CallSettings.timeout_s) -> list[_ToolEntry]:
    """Read the entries of a tool file, or of a list of names from a command line: "calculator,my_package:look_up".

    Args:
        timeout_s: default for calls.

    Raises:
        ConfigError: there is no such file, it is not YAML, or entries are wrong; one sentence for each error.
    """
    path = Path(spec)
    if not spec.endswith((".yaml", ".yml")) and not path.is_file():
        names = [(name.strip(), f"tool {name.strip()!r}") for name in spec.split(",")]
        return _collect_errors(lambda entry: _read_entry(*entry, timeout_s), names)
    import yaml

    if not path.is_file():
        raise ConfigError([f"tool_config_path: there is no file '{path}': {describe_missing(path)}"])
    check_yaml(path)
    text = path.read_text(encoding="utf-8")
    values, node = yaml.safe_load(text), yaml.compose(text, yaml.SafeLoader)
    tools = values.get("tools") if isinstance(values, Mapping) else None
    if not isinstance(tools, list) or not tools:
        raise ConfigError([f"{path}: a tool file has a list under 'tools'"])
    unknown = [str(key) for key in values if key != "tools"]
    if unknown:
        raise ConfigError([f"{path}: {', '.join(unknown)} unknown; a tool file has only 'tools'"])
    nodes = next(value for key, value in node.value if key.value == "tools").value
    lines = [entry.start_mark.line + 1 for entry in nodes]
    entries = [(entry, f"{path}:{line}: tools[{index}]") for index, (entry, line) in enumerate(zip(tools, lines))]
    return _collect_errors(lambda entry: _read_entry(*entry, timeout_s), entries)


def build_tools(entries: Sequence[_ToolEntry]) -> list[Tool]:
    """Import modules and create the tools of these entries, but start nothing.

    Raises:
        ConfigError: an entry names something that does not exist or does not match; one sentence for each error.
    """
    return _collect_errors(_build_tool, entries)


def _collect_errors(function: Callable[[_Input], _Output], items: Sequence[_Input]) -> list[_Output]:
    """Apply a function to every item; raise one ConfigError for all its ValueErrors."""
    results, errors = [], []
    for item in items:
        try:
            results.append(function(item))
        except ValueError as error:
            errors.append(str(error))
    if errors:
        raise ConfigError(errors)
    return results


def _choose_target(targets: Mapping[_Kind, object], where: str) -> tuple[_Kind, object]:
    """Return the kind and the target of an entry; a class of another project that is built in here is the built-in tool."""
    given = [(kind, target) for kind, target in targets.items() if target is not None]
    if len(given) != 1:
        actual = f"{' and '.join(kind for kind, _ in given)} together" if given else "none of them"
        raise ValueError(f"{where}: an entry has one of class_name, function, tool and mcp, not {actual}")
    kind, target = given[0]
    if kind == "class" and target in FOREIGN_CLASSES:
        return "tool", FOREIGN_CLASSES[str(target)]
    return kind, target


def _read_entry(value: object, where: str, timeout_s: float) -> _ToolEntry:
    if isinstance(value, str):
        value = {"function" if ":" in value else "tool": value}
    options = OptionReader(value, where)
    targets: dict[_Kind, object] = {
        "mcp": options.read("mcp"),
        "class": options.read_text("class_name"),
        "function": options.read_text("function"),
        "tool": options.read_text("tool"),
    }
    config, schema, run_in = options.read("config", {}), options.read("tool_schema"), options.read("run_in")
    limits = options.read("limits")
    options.reject_unknown()
    if targets["mcp"] is not None and str(targets["class"]).startswith(_MCP_CLASSES):
        targets["class"] = None  # the name of verl's client
    kind, target = _choose_target(targets, where)
    if not isinstance(config, Mapping):
        raise ValueError(f"{where}.config must be a mapping, not {type(config).__name__}")
    if run_in is not None and run_in not in get_args(RunIn):
        hint = registry.did_you_mean(run_in, get_args(RunIn))
        raise ValueError(f"{where}.run_in is {run_in!r}, but must be one of {', '.join(get_args(RunIn))}{hint}")
    if kind == "mcp":
        if not isinstance(target, Mapping):
            raise ValueError(f"{where}.mcp must be a mapping, not {type(target).__name__}")
        config, target = target, ""
    if kind == "tool" and target not in TOOLS:
        hint = registry.did_you_mean(target, TOOLS)
        raise ValueError(f"{where}: there is no built-in tool {target!r}{hint or '.'} There are {', '.join(TOOLS)}")
    if run_in is not None and kind in ("tool", "mcp"):
        raise ValueError(f"{where}.run_in is for functions and classes; {target or 'an MCP server'} decides for itself")
    if schema is not None and kind == "mcp":
        raise ValueError(f"{where}.tool_schema: MCP servers bring their own")
    settings = _read_settings(limits, config if kind == "tool" else {}, f"{where}.limits", timeout_s)
    return _ToolEntry(kind, str(target), dict(config), schema, run_in, settings, where)


def _read_settings(limits: object, config: Config, where: str, timeout_s: float) -> CallSettings:
    """Read the limits of an entry; MindSpeed-RL and verl have some in the configuration of tools that are built in here."""
    options = OptionReader(limits, where)
    timeout = config.get("default_timeout", config.get("timeout", timeout_s))
    configured = [value for key in ("num_workers", "rate_limit") if isinstance(value := config.get(key), int)]
    settings = CallSettings(
        timeout_s=options.read_float("timeout_s", timeout, 0.01, _MAX_TIMEOUT_S),
        retries=options.read_integer("retries", 0, 0, 20),
        max_parallel=options.read_integer("max_parallel", min(configured, default=CallSettings.max_parallel), 1, 4096),
    )
    options.reject_unknown()
    return settings


def _build_tool(entry: _ToolEntry) -> Tool:
    if entry.kind == "class":
        return ClassTool(entry.target, entry.config, entry.schema, entry.run_in, entry.settings, entry.where)
    if entry.kind == "function":
        OptionReader(entry.config, f"{entry.where}.config").reject_unknown()
        return FunctionTool(entry.target, entry.schema, entry.run_in, entry.settings, entry.where)
    if entry.kind == "mcp":
        return McpServers(entry.config, entry.settings, f"{entry.where}.mcp")
    tool_class = registry.load(TOOLS[entry.target], entry.where)
    return tool_class(entry.config, entry.schema, entry.settings, f"{entry.where}.config")
