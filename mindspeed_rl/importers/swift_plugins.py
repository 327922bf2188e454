"""Python files of ms-swift's --external_plugins: what they register is read by its syntax, nothing of them is run."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from mindspeed_rl.importers.shell import Command
from mindspeed_rl.importers.source_files import find_file

#: variable by which the user gives rows that a file would make
ROWS = "dataset"
#: arguments of DatasetMeta that name a dataset
_NAMES = ("ms_dataset_id", "hf_dataset_id", "dataset_path", "dataset_name")
#: function of a file -> what it adds
_ADDS = {"register_model": "a model", "register_template": "a chat template"}
#: methods of ms-swift's own plug-in of a reward model, which give the score of its value head
_DEFAULT_PLUGIN = """
def __init__(self, model, template):
    self.model = model
    self.template: Template = template

def __call__(self, inputs, **kwargs):
    batched_inputs = [self.template.encode(deepcopy(infer_request)) for infer_request in inputs]
    reward_inputs = to_device(self.template.data_collator(batched_inputs), self.model.device)
    with torch.inference_mode():
        return self.model(**reward_inputs).logits[:, 0]
"""
_METHODS = {node.name: ast.dump(node) for node in ast.parse(_DEFAULT_PLUGIN).body if isinstance(node, ast.FunctionDef)}


def give_rows(command: Command, options: Mapping[str, object]) -> dict[str, object]:
    """Return the options with the file of the user in place of rows that a plug-in makes."""
    given = command.environment.get(ROWS)
    if given is None or not list_made_rows(command, options):
        return dict(options)
    return {**options, "dataset": given}


def list_made_rows(command: Command, options: Mapping[str, object]) -> list[str]:
    """Return the datasets of a command whose rows code of its files makes."""
    value = options.get("dataset")
    names = {str(name).partition("#")[0].partition(":")[0] for name in (value if isinstance(value, list) else [value])}
    found: set[str] = set()
    for tree in _read_files(command, options):
        for call in _find_calls(tree, "register_dataset"):
            own = [
                word.value.value
                for part in ast.walk(call)
                if isinstance(part, ast.Call)
                for word in part.keywords
                if word.arg in _NAMES and isinstance(word.value, ast.Constant) and isinstance(word.value.value, str)
            ]
            # a name that the syntax does not tell may be any of them
            found |= names & set(own) if own else names
    return sorted(found)


def list_additions(command: Command, options: Mapping[str, object]) -> list[str]:
    """Return what files add besides functions and classes that options name: models and chat templates."""
    trees = list(_read_files(command, options))
    return [text for name, text in _ADDS.items() if any(list(_find_calls(tree, name)) for tree in trees)]


def list_absent(command: Command, options: Mapping[str, object]) -> list[str]:
    """Return the files that are not on this machine."""
    return [name for name in _list_names(options) if find_file(command, name) is None]


def is_default_plugin(command: Command, options: Mapping[str, object], name: str) -> bool:
    """Return True for a plug-in of a reward model that gives the score of the model as ms-swift's own does."""
    for tree in _read_files(command, options):
        classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
        for node in tree.body:
            if isinstance(node, ast.Assign) and _is_entry(node, "rm_plugins", name) and isinstance(node.value, ast.Name):
                found = classes.get(node.value.id)
                return found is not None and _scores_as_default(found)
    return False


def _scores_as_default(found: ast.ClassDef) -> bool:
    bases = {ast.unparse(base) for base in found.bases}
    methods = {node.name: ast.dump(node) for node in found.body if isinstance(node, ast.FunctionDef)}
    others = [node for node in found.body if not isinstance(node, ast.FunctionDef) and not _is_text(node)]
    inherited = _METHODS if "DefaultRMPlugin" in bases else {}
    return not others and bases <= {"DefaultRMPlugin", "object"} and {**inherited, **methods} == _METHODS


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _is_entry(node: ast.Assign, table: str, name: str) -> bool:
    target = node.targets[0]
    return ast.unparse(target) == f"{table}[{name!r}]" and len(node.targets) == 1


def _find_calls(tree: ast.Module, name: str) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == name:
            yield node


def _read_files(command: Command, options: Mapping[str, object]) -> Iterator[ast.Module]:
    for name in _list_names(options):
        path = find_file(command, name)
        if path is not None and path.suffix == ".py":
            yield _parse(path)


def _parse(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_text(encoding="utf-8", errors="replace"))
    except SyntaxError:
        return ast.Module([], [])


def _list_names(options: Mapping[str, object]) -> Iterable[str]:
    value = options.get("external_plugins")
    return [str(name) for name in (value if isinstance(value, list) else [] if value is None else [value])]
