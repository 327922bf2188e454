"""The Python program of an AReaL run, by its syntax: which trainer, workflow, reward function and data it names."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

from mindspeed_rl.config.errors import ConfigError

#: trainer of a program -> table of options
TRAINERS = {"PPOTrainer": "ppo", "SFTTrainer": "sft", "DPOTrainer": "dpo", "RWTrainer": "rw"}
_CONFIGURATIONS = ("PPOConfig", "GRPOConfig", "SFTConfig", "DPOConfig", "RWConfig")
#: the workflow of one response to a prompt
SINGLE_TURN = "areal.workflow.rlvr.RLVRWorkflow"
#: functions of the workflow that change a prompt
_PROMPTS = ("get_input_ids_fn", "data_extract_prompt_fn")


@dataclass(frozen=True)
class Program:
    """A program that starts a trainer.

    Attributes:
        kind: table of options of its trainer.
        workflow: that plays samples, as text; empty without one.
        reward: function that scores, as text; empty without one.
        enable_thinking: argument of the chat template.
        filters: function that chooses groups; empty without one.
        own_prompts: prompts or rows are made by functions of the program.
    """

    kind: str
    workflow: str = ""
    reward: str = ""
    enable_thinking: bool = False
    filters: str = ""
    own_prompts: bool = False

    @classmethod
    def from_file(cls, path: Path) -> Program | None:
        """Read a program; None where it starts no trainer of AReaL.

        Raises:
            ConfigError: it is not Python, or an argument of the trainer is code.
        """
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, ValueError, RecursionError) as error:
            raise ConfigError([f"{path.name} is not a Python program: {error}"]) from None
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        kinds = [TRAINERS[name] for node in calls if (name := _name(node.func)) in TRAINERS]
        if not kinds:
            return None
        _refuse_changes(tree, path)
        trains = [node for node in calls if _name(node.func) == "train" and node.keywords]
        arguments = _keywords(trains[0]) if trains else {}
        bound = {
            target.id: node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        settings = _read_mapping(arguments.get("workflow_kwargs"), bound, path)
        if other := sorted(arguments.keys() & {"total_epochs"}):
            raise ConfigError([f"{path.name}: train({other[0]}=...) is not read; write it into the file"])
        sampling = settings.get("gconfig")
        if sampling is not None and not ast.unparse(sampling).endswith("config.gconfig"):
            raise ConfigError([f"{path.name}, line {sampling.lineno}: gconfig={ast.unparse(sampling)} changes the sampling of "
                               "the file; write it into the file"])  # fmt: skip
        makes_rows = not any(_name(node.func) == "get_custom_dataset" for node in calls)
        thinking = settings.get("enable_thinking", ast.Constant(value=False))
        if not isinstance(thinking, ast.Constant):
            raise ConfigError([f"{path.name}, line {thinking.lineno}: enable_thinking is code; write true or false"])
        return cls(
            kinds[0],
            _read_text(arguments.get("workflow"), bound),
            _read_text(settings.get("reward_fn"), bound),
            bool(thinking.value),
            _read_text(arguments.get("dynamic_filter_fn"), bound),
            makes_rows or any(name in settings for name in _PROMPTS),
        )


def _refuse_changes(tree: ast.Module, path: Path) -> None:
    """Refuse a configuration that code changes after it is read, or whose class is the program's own.

    Raises:
        ConfigError: it does either.
    """
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and _name(node.value.func) == "load_expr_config":
            names |= {item.id for item in ast.walk(node.targets[0]) if isinstance(item, ast.Name)}
            own = [_name(item) for item in node.value.args[1:2] if _name(item) not in _CONFIGURATIONS]
            if own and SINGLE_TURN in path.read_text(encoding="utf-8"):
                raise ConfigError([f"{path.name}, line {node.lineno}: not available here: {own[0]}, its own configuration"])
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AugAssign) else []
        for target in targets:
            root: ast.expr = target
            while isinstance(root, (ast.Attribute, ast.Subscript)):
                root = root.value
            if root is not target and isinstance(root, ast.Name) and root.id in {*names, "workflow_kwargs"}:
                text = f"{path.name}, line {target.lineno}: {ast.unparse(target)} is set by code"
                raise ConfigError([f"{text}; write it into the file"])


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _keywords(call: ast.Call) -> dict[str, ast.expr]:
    return {item.arg: item.value for item in call.keywords if item.arg is not None}


def _read_mapping(node: ast.expr | None, bound: dict[str, ast.expr], path: Path) -> dict[str, ast.expr]:
    """Return the entries of a mapping that a program writes, or that a name of it has.

    Raises:
        ConfigError: it is other code.
    """
    if isinstance(node, ast.Name):
        node = bound.get(node.id, node)
    if node is None or (isinstance(node, ast.Constant) and node.value is None):
        return {}
    if isinstance(node, ast.Call) and _name(node.func) == "dict" and not node.args and all(item.arg for item in node.keywords):
        return _keywords(node)
    if isinstance(node, ast.Dict) and all(isinstance(key, ast.Constant) for key in node.keys):
        return {str(key.value): value for key, value in zip(node.keys, node.values) if isinstance(key, ast.Constant)}
    raise ConfigError([f"{path.name}, line {node.lineno}: workflow_kwargs is code, and only a mapping can be read"])


def _read_text(node: ast.expr | None, bound: dict[str, ast.expr]) -> str:
    """Return a text that a program writes, or the text of other code; empty for None."""
    if isinstance(node, ast.Name):
        node = bound.get(node.id, node)
    if node is None or (isinstance(node, ast.Constant) and node.value is None):
        return ""
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ast.unparse(node)


def find_program(path: Path, kind: str) -> list[Path]:
    """Return the programs next to a file that may start it: the one of its name, or all of its kind."""
    programs = [other for other in sorted(path.parent.glob("*.py")) if _starts(other, kind)]
    return [other for other in programs if other.stem == path.stem] or programs


def _starts(path: Path, kind: str) -> bool:
    try:
        program = Program.from_file(path)
    except ConfigError:
        return True  # asked about by name
    return program is not None and program.kind == kind
