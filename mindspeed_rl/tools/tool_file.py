"""Reading a tool file: MindSpeed-RL's and verl's YAML form, with functions, built-in tools and MCP servers beside classes.

    tools:
      - calculator                                # built in
      - my_package.tools:look_up                  # a function, its schema from type hints and docstring
      - class_name: my_package.tools.Weather      # a class with create, execute and release
        config: {...}
        tool_schema: {type: function, function: {...}}
        limits: {timeout_s: 30, retries: 0, max_parallel: 32}
      - mcp: {servers: {files: {command: my-server, args: []}}}

Reading imports nothing. All that is wrong with a file is told at once, each with its line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from mindspeed_rl import registry
from mindspeed_rl.config.errors import ConfigError
from mindspeed_rl.config.run_files import check_yaml
from mindspeed_rl.tools import FOREIGN_CLASSES, TOOLS
from mindspeed_rl.tools.class_tool import ClassTool
from mindspeed_rl.tools.mcp_servers import McpServers
from mindspeed_rl.tools.option_reader import OptionReader
from mindspeed_rl.tools.python_tool import FunctionTool
from mindspeed_rl.tools.running import RUN_IN, RunIn
from mindspeed_rl.tools.tool import CallSettings, Tool

Kind = Literal["class", "function", "tool", "mcp"]
_MCP_CLASSES = "verl.tools.mcp_"
_LONGEST_S = 3600.0


@dataclass(frozen=True)
class ToolEntry:
    """One entry of a tool file.

    Attributes:
        target: class, module:function or name of a built-in tool; "" for MCP servers.
        config: for the class or the built-in tool; for MCP what stands under `mcp`.
        schema: as it stands there, None for none.
        run_in: None for what fits the tool.
        where: file, line and entry, as errors begin.
    """

    kind: Kind
    target: str
    config: dict[str, Any]
    schema: Any
    run_in: RunIn | None
    settings: CallSettings = field(default_factory=CallSettings)
    where: str = ""


def read_tools(spec: str, timeout_s: float = CallSettings.timeout_s) -> list[ToolEntry]:
    """Return the entries of a tool file, or of a list of names as a command line has it: "calculator,my_package:look_up".

    Args:
        timeout_s: of a call, where the file says none.

    Raises:
        ConfigError: see `read_tool_file`.
    """
    if spec.endswith((".yaml", ".yml")) or Path(spec).is_file():
        return read_tool_file(Path(spec), timeout_s)
    return _entries([(name.strip(), f"tool {name.strip()!r}") for name in spec.split(",")], timeout_s)


def read_tool_file(path: Path, timeout_s: float = CallSettings.timeout_s) -> list[ToolEntry]:
    """Return the entries of a tool file.

    Args:
        timeout_s: see `read_tools`.

    Raises:
        ConfigError: there is no such file, it is no YAML, or entries are wrong; one sentence for each.
    """
    import yaml

    if not path.is_file():
        raise ConfigError([f"tool_config_path: there is no file '{path}'"])
    check_yaml(path)
    text = path.read_text(encoding="utf-8")
    values, node = yaml.safe_load(text), yaml.compose(text, yaml.SafeLoader)
    tools = values.get("tools") if isinstance(values, Mapping) else None
    if not isinstance(tools, list) or not tools:
        raise ConfigError([f"{path}: a tool file has a list under 'tools'"])
    unknown = [str(key) for key in values if key != "tools"]
    if unknown:
        raise ConfigError([f"{path}: {', '.join(unknown)} unknown; a tool file has 'tools' alone"])
    listed = next(value for key, value in node.value if key.value == "tools")
    lines = [entry.start_mark.line + 1 for entry in listed.value]
    return _entries([(entry, f"{path}:{line}: tools[{i}]") for i, (entry, line) in enumerate(zip(tools, lines))], timeout_s)


def _entries(values: Sequence[tuple[Any, str]], timeout_s: float) -> list[ToolEntry]:
    entries, errors = [], []
    for value, where in values:
        try:
            entries.append(_entry(value, where, timeout_s))
        except ValueError as error:
            errors.append(str(error))
    if errors:
        raise ConfigError(errors)
    return entries


def _entry(value: Any, where: str, timeout_s: float) -> ToolEntry:
    if isinstance(value, str):
        value = {"function" if ":" in value else "tool": value}
    options = OptionReader(value, where)
    targets: dict[Kind, Any] = {
        "mcp": options.take("mcp"),
        "class": options.text("class_name"),
        "function": options.text("function"),
        "tool": options.text("tool"),
    }
    config, schema, run_in = options.take("config", {}), options.take("tool_schema"), options.take("run_in")
    limits = options.take("limits")
    options.end()
    if targets["mcp"] is not None and str(targets["class"]).startswith(_MCP_CLASSES):
        targets["class"] = None  # verl names its client there
    given = [kind for kind, target in targets.items() if target is not None]
    if len(given) != 1:
        said = f"{' and '.join(given)} together" if given else "none of them"
        raise ValueError(f"{where}: an entry has one of class_name, function, tool and mcp, not {said}")
    if not isinstance(config, Mapping):
        raise ValueError(f"{where}.config must be a mapping, not {type(config).__name__}")
    if run_in is not None and run_in not in RUN_IN:
        hint = registry.did_you_mean(run_in, RUN_IN)
        raise ValueError(f"{where}.run_in is {run_in!r}, but must be one of {', '.join(RUN_IN)}{hint}")
    kind, target = given[0], targets[given[0]]
    if kind == "mcp":
        if not isinstance(target, Mapping):
            raise ValueError(f"{where}.mcp must be a mapping, not {type(target).__name__}")
        config, target = target, ""
    if kind == "class" and target in FOREIGN_CLASSES:
        kind, target = "tool", FOREIGN_CLASSES[target]
    if kind == "tool" and target not in TOOLS:
        hint = registry.did_you_mean(target, TOOLS)
        raise ValueError(f"{where}: there is no built-in tool {target!r}{hint or '.'} There are {', '.join(TOOLS)}")
    if run_in is not None and kind in ("tool", "mcp"):
        raise ValueError(f"{where}.run_in is for functions and classes; {target or 'an MCP server'} decides for itself")
    if schema is not None and kind == "mcp":
        raise ValueError(f"{where}.tool_schema: MCP servers bring their own")
    settings = _settings(limits, config if kind == "tool" else {}, f"{where}.limits", timeout_s)
    return ToolEntry(kind, str(target), dict(config), schema, run_in, settings, where)


def _settings(limits: Any, config: Mapping[str, Any], where: str, timeout_s: float) -> CallSettings:
    """Return the limits of an entry; MindSpeed-RL and verl write some into the configuration of what is built in here."""
    options = OptionReader(limits, where)
    timeout = config.get("default_timeout", config.get("timeout", timeout_s))
    named = [value for key in ("num_workers", "rate_limit") if isinstance(value := config.get(key), int)]
    workers = min(named, default=CallSettings.max_parallel)
    settings = CallSettings(
        timeout_s=options.number("timeout_s", timeout, 0.01, _LONGEST_S),
        retries=options.whole("retries", 0, 0, 20),
        max_parallel=options.whole("max_parallel", workers, 1, 4096),
    )
    options.end()
    return settings


def build_tools(entries: Sequence[ToolEntry]) -> list[Tool]:
    """Return the tools of these entries: modules are imported and classes made, but nothing is started.

    Raises:
        ConfigError: an entry names something that is not there or does not fit; one sentence for each.
    """
    made, errors = [], []
    for entry in entries:
        try:
            made.append(_MAKERS[entry.kind](entry))
        except ValueError as error:
            errors.append(str(error))
    if errors:
        raise ConfigError(errors)
    return made


def _class(entry: ToolEntry) -> Tool:
    return ClassTool(entry.target, entry.config, entry.schema, entry.run_in, entry.settings, entry.where)


def _function(entry: ToolEntry) -> Tool:
    OptionReader(entry.config, f"{entry.where}.config").end()
    return FunctionTool(entry.target, entry.schema, entry.run_in, entry.settings, entry.where)


def _built_in(entry: ToolEntry) -> Tool:
    kind = registry.load(TOOLS[entry.target], entry.where)
    return kind(entry.config, entry.schema, entry.settings, f"{entry.where}.config")


def _mcp(entry: ToolEntry) -> Tool:
    return McpServers(entry.config, entry.settings, f"{entry.where}.mcp")


_MAKERS: dict[Kind, Callable[[ToolEntry], Tool]] = {"class": _class, "function": _function, "tool": _built_in, "mcp": _mcp}
