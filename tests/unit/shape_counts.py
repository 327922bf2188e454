"""Counts of the package's shape, from the syntax trees alone: nothing is imported or run."""

from __future__ import annotations

import ast
import re
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef

#: classes of the run's record and records around it, the groups in it, and the names under which objects keep it
_RECORD_TYPES = frozenset(
    "Run RunConfig MegatronConfig RLConfig GenerateConfig SamplingConfig ProfilerConfig ProfilerGroups MsprobeConfig RLInputs "
    "SupervisedInputs SupervisedServices".split()
)
_GROUPS = frozenset(
    "config rl generate megatron_training actor_config ref_config reward_config critic_config vit_config rl_config "
    "generate_config profiler_config msprobe_config sampling_config".split()
)
_RECORD_ATTRIBUTES = frozenset(("run", "_run", "cfg", "_cfg"))
#: these copy the record or look at it, they do not pass it on
_COPIES = frozenset(
    "dataclasses.replace replace dataclasses.asdict asdict dataclasses.fields fields isinstance getattr len id".split()
)
_QUESTION = re.compile(r"(What|Who|Whoever|Whose|Where|Which|Whether|Those|How|When|Why|That|Whatever)\b")


@dataclass(frozen=True)
class Source:
    """A file of the package: its path below the package, its lines and its tree."""

    path: Path
    lines: list[str]
    tree: ast.Module

    @property
    def functions(self) -> Iterator[Function]:
        """Functions and methods, nested ones too."""
        return (node for node in ast.walk(self.tree) if isinstance(node, Function))


def read_sources(package: Path) -> list[Source]:
    """Return all files of a package, by path."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(package.rglob("*.py"))}
    return [Source(path.relative_to(package), text.splitlines(), ast.parse(text)) for path, text in texts.items()]


def share_of_short_bodies(sources: list[Source]) -> float:
    """Return the share of functions whose body without its docstring spans one or two lines."""
    spans = [_body_span(function) for source in sources for function in source.functions]
    return sum(span <= 2 for span in spans) / len(spans)


def _body_span(function: Function) -> int:
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def public_names(sources: list[Source]) -> int:
    """Return the number of functions, classes and names at the top of modules without a leading underscore."""
    count = 0
    for source in sources:
        for node in source.tree.body:
            if isinstance(node, (*Function.__args__, ast.ClassDef)):
                count += not node.name.startswith("_")
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                count += sum(isinstance(target, ast.Name) and not target.id.startswith("_") for target in targets)
    return count


def uses_of_any(sources: list[Source]) -> int:
    """Return how often `Any` is written, imports apart."""
    return sum(isinstance(node, ast.Name) and node.id == "Any" for source in sources for node in ast.walk(source.tree))


def share_of_question_docstrings(sources: list[Source]) -> float:
    """Return the share of docstrings that begin with What, Who, Where and the like."""
    documented = (ast.Module, ast.ClassDef, *Function.__args__)
    texts = [
        text
        for source in sources
        for node in ast.walk(source.tree)
        if isinstance(node, documented) and (text := ast.get_docstring(node)) is not None
    ]
    return sum(_QUESTION.match(text) is not None for text in texts) / len(texts)


def named_things(source: Source) -> Iterator[tuple[str, int]]:
    """Yield name and line of the file, its classes, functions, parameters and attributes."""
    yield source.path.stem if source.path.stem != "__init__" else source.path.parent.name, 0
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ClassDef):
            yield node.name, node.lineno
        elif isinstance(node, Function):
            yield node.name, node.lineno
            arguments = node.args
            yield from ((each.arg, node.lineno) for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs))
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, node.lineno


def words_of(name: str) -> set[str]:
    """Return the lower-case words of an identifier."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+", name)}


class Walk:
    """The calls that pass on the run's record (a Run, a RunConfig or one of its groups), reached from some functions.

    Workers begin a walk too, since the driver starts them by name. Callees are looked up by imports; a method of an object
    whose class is not in sight stands for all methods of that name that take the record. Once a class is built with the
    record, all its methods are walked.

    Attributes:
        calls: module:line of each.
    """

    def __init__(self, sources: list[Source], package: str, starts: str) -> None:
        """
        Args:
            starts: the module whose public functions begin the walk.
        """
        self._imports: dict[str, dict[str, str]] = defaultdict(dict)
        self._functions: dict[str, tuple[str, Function, str]] = {}
        self._methods: dict[str, list[str]] = defaultdict(list)
        self._classes: set[str] = set()
        self._modules: set[str] = set()
        for source in sources:
            self._index(source, package)
        first = [
            name
            for name, (module, function, owner) in self._functions.items()
            if (module == starts and not owner and not function.name.startswith("_"))
            or (owner.endswith("Worker") and function.name == "__init__" and _record_parameters(function))
        ]
        self.calls = self._follow(first)

    def _index(self, source: Source, package: str) -> None:
        module = ".".join((package, *source.path.with_suffix("").parts)).removesuffix(".__init__")
        self._modules.add(module)
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(package):
                self._imports[module] |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        for node in source.tree.body:
            if isinstance(node, Function):
                self._functions[f"{module}.{node.name}"] = (module, node, "")
            elif isinstance(node, ast.ClassDef):
                self._classes.add(f"{module}.{node.name}")
                for member in node.body:
                    if isinstance(member, Function):
                        name = f"{module}.{node.name}.{member.name}"
                        self._functions[name] = (module, member, node.name)
                        self._methods[member.name].append(name)

    def _follow(self, starts: list[str]) -> list[str]:
        calls, seen, queue = [], set(starts), deque(starts)
        while queue:
            module, function, owner = self._functions[queue.popleft()]
            reached = []
            for call in _passing_calls(function):
                calls.append(f"{module}:{call.lineno}")
                reached += self._callees(module, owner, call.func)
            if function.name in ("__init__", "__post_init__"):
                reached += [name for name in self._functions if name.startswith(f"{module}.{owner}.")]
            for name in dict.fromkeys(reached):
                if name not in seen:
                    seen.add(name)
                    queue.append(name)
        return calls

    def _callees(self, module: str, owner: str, called: ast.expr) -> list[str]:
        if isinstance(called, ast.Call):  # ray.remote(Class).options(...)(...)
            called = called.func
        if isinstance(called, ast.Name):
            return self._defined(f"{module}.{called.id}") or self._defined(self._imports[module].get(called.id, ""))
        if not isinstance(called, ast.Attribute):
            return []
        if isinstance(called.value, ast.Name):
            held = self._resolved(self._imports[module].get(called.value.id, f"{module}.{called.value.id}"))
            if held in self._modules:
                return self._defined(f"{held}.{called.attr}")
            own = f"{module}.{owner}" if called.value.id in ("self", "cls") else held
            if f"{own}.{called.attr}" in self._functions:
                return [f"{own}.{called.attr}"]
        return [name for name in self._methods[called.attr] if _record_parameters(self._functions[name][1])]

    def _defined(self, name: str) -> list[str]:
        """Return the function of this name, or what builds the class of this name."""
        name = self._resolved(name)
        builders = [f"{name}.__init__", f"{name}.__post_init__"] if name in self._classes else [name]
        return [each for each in builders if each in self._functions]

    def _resolved(self, name: str) -> str:
        """Return where a name is defined, behind the imports that hand it on."""
        for _ in range(8):
            module, _, last = name.rpartition(".")
            if name in self._functions or name in self._classes or name in self._modules or last not in self._imports[module]:
                break
            name = self._imports[module][last]
        return name


def _record_parameters(function: Function) -> set[str]:
    arguments = (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
    return {each.arg for each in arguments if each.annotation is not None and _names_record(each.annotation)}


def _names_record(annotation: ast.expr) -> bool:
    names = [node.id for node in ast.walk(annotation) if isinstance(node, ast.Name)]
    names += [node.value for node in ast.walk(annotation) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return not _RECORD_TYPES.isdisjoint(names)


def _passing_calls(function: Function) -> list[ast.Call]:
    """Return the calls in a function that have the run's record, or a group of it, among their arguments."""
    names = _record_parameters(function)

    def is_record(node: ast.expr) -> bool:
        if isinstance(node, ast.Name):
            return node.id in names or node.id == "inputs"  # the records of a set-up, also where they have no annotation
        if isinstance(node, ast.Call):
            return ast.unparse(node.func).endswith("replace") and bool(node.args) and is_record(node.args[0])
        if not isinstance(node, ast.Attribute):
            return False
        if isinstance(node.value, ast.Name) and node.value.id == "self":
            return node.attr in _RECORD_ATTRIBUTES
        return node.attr in _RECORD_ATTRIBUTES or (node.attr in _GROUPS and is_record(node.value))

    for _ in range(2):  # what is assigned from what was assigned
        for node in ast.walk(function):
            if isinstance(node, ast.NamedExpr) and is_record(node.value):
                names.add(node.target.id)
            for target in node.targets if isinstance(node, ast.Assign) else ():
                pairs = [(target, node.value)]
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    pairs = list(zip(target.elts, node.value.elts))
                names |= {each.id for each, value in pairs if isinstance(each, ast.Name) and is_record(value)}
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call) and ast.unparse(node.func) not in _COPIES]
    return [
        call
        for call in calls
        if any(
            is_record(argument.value if isinstance(argument, ast.Starred) else argument)
            for argument in (*call.args, *(keyword.value for keyword in call.keywords))
        )
    ]
