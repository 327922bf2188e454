"""Python programs among the sources of an import, read by their syntax; nothing of them is executed."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping

from mindspeed_rl.importers.options import read_scalar

_OPERATORS: dict[type[ast.AST], Callable[[float, float], float]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Pow: operator.pow, ast.Mod: operator.mod,
}  # fmt: skip
#: largest exponent of a power that is computed
_LARGEST_EXPONENT = 64
#: attributes that a program may set without a change of what is trained
_PLAIN_ATTRIBUTES = frozenset("pad_token pad_token_id padding_side use_cache".split())
#: methods that change a list or mapping
_CHANGING = frozenset("update append extend insert pop remove clear setdefault".split())
#: functions of a parser whose results have the options of the command line
_PARSERS = ("parse_args_and_config", "parse_args_into_dataclasses", "parse_args")
#: options of the command line that have a default without their parser
_PARSED: dict[str, object] = {"dataset_train_split": "train", "dataset_test_split": "test", "dataset_config": None,
                              "dataset_streaming": False, "trust_remote_code": False}  # fmt: skip



class UnreadableError(Exception):
    """A value that only a run of the program has; its text."""


class Names:
    """The names of a program around one call, and the values that are bound to them.

    Attributes:
        bound: name -> line and value, in the order of the file; None for a value that cannot be read.
        modules: name -> module of an import.
        originals: name -> name of it in that module.
        parsed: names of results of a parser, which have the options of the command line.
        changed: attributes and functions that code sets: the line and its text.
        functions, classes: definitions of the program, by name.
        given: options of the command line.
        variables: values that the user gives, of options and of the environment.
    """

    def __init__(
        self, tree: ast.Module, call: ast.Call, given: Mapping[str, object], variables: Mapping[str, str]
    ) -> None:
        self.given, self.variables = given, variables
        self.bound: dict[str, list[tuple[int, ast.expr | None]]] = {}
        self.modules: dict[str, str] = {}
        self.originals: dict[str, str] = {}
        self.parsed: set[str] = set()
        self.changed: list[tuple[int, str]] = []
        functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
        self.functions = {node.name: node for node in functions}
        # the names of the function that has the call, and of the module
        around = [node for node in functions if any(inner is call for inner in ast.walk(node))]
        for function in around:
            for argument in (*function.args.args, *function.args.kwonlyargs):
                self._bind_unknown(argument.arg, function.lineno)
        for body in (tree.body, *(function.body for function in around)):
            self._bind_all(body, always=True)
        for values in self.bound.values():
            values.sort(key=lambda item: item[0])
        # another function may set it at any time
        shared = {name for node in ast.walk(tree) if isinstance(node, (ast.Global, ast.Nonlocal)) for name in node.names}
        for name in shared:
            self.bound[name] = [(0, None)]
        self.classes = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}

    def is_of(self, name: str, package: str) -> bool:
        """Return True for a name that the program takes from a package, and does not define itself."""
        own = name in self.functions or name in self.classes
        module = self.modules.get(name, package)
        is_other = ".experimental" in module and module != "trl.experimental.gkd"
        return not own and module.partition(".")[0] == package and not is_other

    def _bind_all(self, body: list[ast.stmt], *, always: bool) -> None:
        """Bind what statements set, which a branch or a loop may not do, or do again."""
        for node in body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                continue
            self._bind(node, always=always)
            is_main = isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)
            inner = always and (is_main or isinstance(node, (ast.With, ast.AsyncWith)))
            for name in ("body", "orelse", "finalbody"):
                self._bind_all(getattr(node, name, []), always=inner)
            for handler in getattr(node, "handlers", []):
                self._bind_all(handler.body, always=False)

    def _bind(self, node: ast.stmt, *, always: bool) -> None:
        if isinstance(node, ast.ImportFrom) and node.module:
            self.modules |= {alias.asname or alias.name: node.module for alias in node.names}
            self.originals |= {alias.asname or alias.name: alias.name for alias in node.names}
        pairs: list[tuple[ast.expr, ast.expr | None]] = []
        if isinstance(node, ast.Assign):
            pairs = [(target, node.value) for target in node.targets]
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            pairs = [(node.target, node.value)]
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, (ast.Name, ast.Attribute)):
            pairs = [(node.target, ast.BinOp(node.target, node.op, node.value, lineno=node.lineno, col_offset=0))]
        elif isinstance(node, ast.AugAssign):
            pairs = [(node.target, None)]
        elif isinstance(node, (ast.For, ast.AsyncFor)):
            pairs = [(node.target, None)]
        elif isinstance(node, (ast.With, ast.AsyncWith)):
            pairs = [(item.optional_vars, None) for item in node.items if item.optional_vars is not None]
        for target, value in pairs:
            self._bind_target(target, value if always else None, node.lineno)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            self._bind_call(node.value)

    def _bind_target(self, target: ast.expr, value: ast.expr | None, line: int) -> None:
        names = [item.id for item in ast.walk(target) if isinstance(item, ast.Name)]
        if value is not None and name_call(value) in _PARSERS:
            self.parsed |= set(names)
        elif isinstance(target, ast.Name):
            self.bound.setdefault(target.id, []).append((line, value))
        elif isinstance(target, ast.Attribute):
            text = ast.unparse(target)
            self.bound.setdefault(text, []).append((line, value))
            if target.attr not in _PLAIN_ATTRIBUTES:
                self.changed.append((line, text))
        elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts):
            for item, part in zip(target.elts, value.elts, strict=True):
                self._bind_target(item, part, line)
        elif isinstance(target, ast.Subscript) and ast.unparse(target.value) == "os.environ":
            self.bound.setdefault(ast.unparse(target), []).append((line, value))
        else:
            for name in names:
                self._bind_unknown(name, line)

    def _bind_call(self, call: ast.Call) -> None:
        """Bind what a method changes, and keep functions that set attributes or freeze weights."""
        name, function = name_call(call), call.func
        if isinstance(function, ast.Attribute) and name in _CHANGING and isinstance(function.value, ast.Name):
            self._bind_unknown(function.value.id, call.lineno)
        if name in ("setattr", "requires_grad_", "resize_token_embeddings", "add_tokens", "add_special_tokens"):
            self.changed.append((call.lineno, ast.unparse(call)[:80]))

    def _bind_unknown(self, name: str, line: int) -> None:
        self.bound.setdefault(name, []).append((line, None))

    def find(self, name: str, line: int) -> tuple[ast.expr, int] | None:
        """Return what a name is bound to above a line, with the line of the statement; None where it is not bound."""
        found = [(value, place) for place, value in self.bound.get(name, []) if place < line]
        if not found:
            return None
        value, place = found[-1]
        if value is None:
            raise UnreadableError(name)
        return value, place

    def follow(self, node: ast.expr, line: int) -> tuple[ast.expr, int]:
        """Return the expression behind names."""
        while isinstance(node, ast.Name) and node.id not in self.parsed and (found := self.find(node.id, line)) is not None:
            node, line = found
        return node, line

    # --- values

    def evaluate(self, node: ast.expr, line: int) -> object:
        """Return the value of an expression that is read above a line.

        Raises:
            UnreadableError: it is known only when the program runs.
        """
        node, line = self.follow(node, line)
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
            return [self.evaluate(item, line) for item in node.elts]
        if isinstance(node, ast.Dict) and all(node.keys):
            return {str(self.evaluate(key, line)): self.evaluate(value, line)
                    for key, value in zip(node.keys, node.values, strict=True) if key is not None}  # fmt: skip
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.Not)):
            value = self.evaluate(node.operand, line)
            return not value if isinstance(node.op, ast.Not) else -_as_number(value, node)
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            left, right = self.evaluate(node.left, line), self.evaluate(node.right, line)
            if isinstance(left, str) and isinstance(right, str) and isinstance(node.op, ast.Add):
                return left + right
            first, second = _as_number(left, node), _as_number(right, node)
            if isinstance(node.op, ast.Pow) and abs(second) > _LARGEST_EXPONENT:
                raise UnreadableError(ast.unparse(node))
            try:
                return _OPERATORS[type(node.op)](first, second)
            except (ArithmeticError, ValueError):
                raise UnreadableError(ast.unparse(node)) from None
        if isinstance(node, ast.JoinedStr):
            return "".join(str(self.evaluate(_drop_format(part), line)) for part in node.values)
        if isinstance(node, ast.Attribute):
            return self._read_attribute(node, line)
        if isinstance(node, ast.Call):
            return self._read_environment(node, line)
        raise UnreadableError(ast.unparse(node))

    def _read_attribute(self, node: ast.Attribute, line: int) -> object:
        text = ast.unparse(node)
        if (found := self.find(text, line)) is not None:
            return self.evaluate(*found)
        if isinstance(node.value, ast.Name) and node.value.id in self.parsed:
            return self._read_given(node.attr, text)
        if text.startswith(("torch.", "TaskType.")):
            return text
        raise UnreadableError(text)

    def _read_given(self, name: str, text: str) -> object:
        """Return an option of the command line, which the program's parser has read."""
        if name in self.variables:
            return read_scalar(self.variables[name])
        if name not in self.given and name not in _PARSED:
            raise UnreadableError(text)
        return self.given.get(name, _PARSED.get(name))

    def _read_environment(self, node: ast.Call, line: int) -> object:
        """Return a variable of the environment, or a number or text that is made of a value."""
        name = ast.unparse(node.func)
        if name in ("os.environ.get", "os.getenv", "environ.get", "getenv") and node.args:
            variable = str(self.evaluate(node.args[0], line))
            if variable in self.variables:
                return self.variables[variable]
            if (found := self.find(f"os.environ[{variable!r}]", line)) is not None:
                return self.evaluate(*found)
            return self.evaluate(node.args[1], line) if len(node.args) > 1 else None
        if name in ("int", "float", "str") and len(node.args) == 1:
            value = self.evaluate(node.args[0], line)
            try:
                return str(value) if name == "str" else int(str(value)) if name == "int" else float(str(value))
            except ValueError:
                raise UnreadableError(ast.unparse(node)) from None
        raise UnreadableError(ast.unparse(node))


def name_call(node: ast.expr) -> str:
    """Return the last name of a call; empty for something else."""
    if not isinstance(node, ast.Call):
        return ""
    return node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id if isinstance(node.func, ast.Name) else ""


def _drop_format(part: ast.expr) -> ast.expr:
    """Return the value of a part of an f-string that has no format."""
    return part.value if isinstance(part, ast.FormattedValue) and part.format_spec is None else part


def _as_number(value: object, node: ast.expr) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise UnreadableError(ast.unparse(node))
    return value


def is_program(text: str) -> bool:
    """Return True for the text of a Python program: it parses, and imports something or calls a function."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return any(isinstance(node, (ast.Import, ast.ImportFrom, ast.Call)) for node in ast.walk(tree))
