"""Runs inside the sandbox as a script: tests here, the program in a child process, which is called for values.

The child has neither the tests nor a descriptor of this process's input and output, so a program can read no expected value
and report no result: it can only return values, which the tests judge. Standard input has the length of the program in 8
bytes, the program, and one JSON object:

    {"expressions": [text, ...]}                values, each in a list, as `encode` writes them; null for one that raised
    {"call": name, "arguments": [...]}          the returned value as JSON text, tuples as lists; also a method of `Solution`
    {"tests": [text, ...], "entry_point": name} 1 or 0 for each test, in one namespace with the program's names

Standard output has the result as JSON. Arguments of calls are copies, and lists, dicts and sets that a call changed are changed
here too. Objects that are not plain values stay in the child: a test can call them and read their attributes, but they equal
only each other. A test that defines classes, catches exceptions of the program or passes functions runs in the child, which
then judges itself.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import json
import marshal
import operator
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

_MAX_REPLY_BYTES = 16 << 20
#: names that programs use without importing them, as on LeetCode; the child imports those that occur
_USUAL_NAMES = {
    "typing": "List Dict Set Tuple Optional Union Any Callable Iterable Iterator Generator Deque DefaultDict".split(),
    "collections": "Counter defaultdict deque OrderedDict namedtuple ChainMap".split(),
    "functools": "lru_cache cache reduce cmp_to_key partial wraps".split(),
    "itertools": "accumulate chain combinations permutations product groupby pairwise zip_longest islice count cycle".split(),
    "heapq": "heappush heappop heapify heapreplace heappushpop nlargest nsmallest".split(),
    "bisect": "bisect bisect_left bisect_right insort insort_left insort_right".split(),
    "math": "gcd lcm sqrt ceil floor inf comb perm factorial log log2 isqrt prod hypot pi".split(),
    "string": "ascii_lowercase ascii_uppercase ascii_letters digits".split(),
    "copy": ["deepcopy"],
}
_USUAL_MODULES = "math collections itertools functools heapq bisect string re random operator sys copy typing json".split()


def prepare_names(program: str) -> dict[str, object]:
    """Return the namespace of a program: `exit` and `quit`, which the option -S leaves out, and the usual names that occur."""
    words = set("".join(char if char.isalnum() or char == "_" else " " for char in program).split())
    names: dict[str, object] = {"__name__": "__main__", "__builtins__": builtins, "exit": sys.exit, "quit": sys.exit}
    for module, members in _USUAL_NAMES.items():
        for member in words.intersection(members):
            names[member] = getattr(importlib.import_module(module), member)
    if "asyncio" in words:
        _wake_event_loops_by_pipe()
    return names | {name: importlib.import_module(name) for name in words.intersection(_USUAL_MODULES)}


class _PipeEnd:
    """An end of a pipe with the methods of a socket that an event loop calls."""

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self._descriptor = descriptor

    def fileno(self) -> int:
        return self._descriptor

    def recv(self, size: int) -> bytes:
        return os.read(self._descriptor, size)

    def send(self, data: bytes) -> int:
        return os.write(self._descriptor, data)

    def close(self) -> None:
        os.close(self._descriptor)


def _wake_event_loops_by_pipe() -> None:
    """Let event loops wake themselves through a pipe: they take a pair of sockets, which the sandbox refuses."""
    loop_class = importlib.import_module("asyncio.selector_events").BaseSelectorEventLoop

    def make_self_pipe(loop: Any) -> None:
        loop._ssock, loop._csock = map(_PipeEnd, os.pipe())
        loop._internal_fds += 1
        loop._add_reader(loop._ssock.fileno(), loop._read_from_self)

    loop_class._make_self_pipe = make_self_pipe


class _Stopped(BaseException):
    """The program's process has ended, or wrote something that is not a reply."""


class _UnsendableError(Exception):
    """A test passes a function or an object of its own to the program."""


def _read(descriptor: int, size: int) -> bytes:
    parts = []
    while size > 0:
        part = os.read(descriptor, min(size, 1 << 20))
        if not part:
            raise _Stopped
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _read_message(descriptor: int) -> bytes:
    size = int.from_bytes(_read(descriptor, 8), "big")
    if size > _MAX_REPLY_BYTES:
        raise _Stopped
    return _read(descriptor, size)


def _write_message(descriptor: int, data: bytes) -> None:
    data = len(data).to_bytes(8, "big") + data
    while data:
        data = data[os.write(descriptor, data) :]


# The program's process

_objects: list[object] = []
#: what tests may do with objects: no comparison and no arithmetic, or a program could return one that equals everything
_SPECIAL: dict[str, Callable[..., object]] = {
    "__len__": len,
    "__iter__": iter,
    "__next__": next,
    "__bool__": bool,
    "__str__": str,
    "__repr__": repr,
    "__contains__": operator.contains,
    "__getitem__": operator.getitem,
    "__setitem__": operator.setitem,
    "__setattr__": setattr,
}


def encode(value: object) -> object:
    """Return a value as JSON with its type; one that equals a literal (a Counter, a Decimal) as the literal."""
    if value is None or isinstance(value, (bool, str)):
        return value if value is None or isinstance(value, bool) else str(value)
    for kind, number in ((int, int), (float, float)):
        if isinstance(value, kind):
            return number(value)
    if isinstance(value, complex):
        return ["complex", [value.real, value.imag]]
    if isinstance(value, (bytes, bytearray)):
        return ["bytes", list(value)]
    if isinstance(value, dict):
        return ["dict", [[encode(key), encode(item)] for key, item in value.items()]]
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            return [kind.__name__, [encode(item) for item in value]]
    if not isinstance(value, type) and hasattr(value, "as_integer_ratio"):
        return ["fraction", list(value.as_integer_ratio())]
    _objects.append(value)
    return ["object", len(_objects) - 1]


def _serve(program: str, requests: int, replies: int) -> NoReturn:
    """Run the program, then answer requests for its values until the tests have ended."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    names = prepare_names(program)
    try:
        exec(compile(program, "program.py", "exec", dont_inherit=True), names)
    except SystemExit:
        pass  # what it defined before is there
    except BaseException:  # noqa: BLE001 (the program is not ours)
        os._exit(1)
    while True:
        try:
            operation, *operands = marshal.loads(_read_message(requests))
        except _Stopped:
            os._exit(0)
        try:
            reply = _answer(names, operation, operands)
        except BaseException as error:  # noqa: BLE001 (the program is not ours)
            reply = {"raised": [kind.__name__ for kind in type(error).__mro__], "text": str(error.args[:1])[:1000]}
        try:
            data = json.dumps(reply).encode()
        except (ValueError, TypeError, RecursionError, MemoryError):
            data = b'{"raised": ["ValueError"]}'
        _write_message(replies, data)


def _answer(names: dict[str, Any], operation: str, operands: list[Any]) -> dict[str, object]:
    if operation == "value":
        return {"value": encode(eval(operands[0], names))}
    if operation == "json":
        name, arguments = operands
        function = getattr(names["Solution"](), name) if "Solution" in names else names[name]
        return {"value": json.dumps(function(*arguments), default=list)}
    if operation == "run":
        exec(compile(operands[0], "test.py", "exec", dont_inherit=True), names)
        return {"value": None}
    if operation == "equal":
        return {"value": bool(_objects[operands[0]] == _objects[operands[1]])}
    index, name, arguments, keywords = operands
    arguments = [_resolve(argument) for argument in arguments]
    if operation == "name":
        return {"value": encode(names[name])}
    if operation == "get":
        return {"value": encode(getattr(_objects[index], name))}
    function, instance = _objects[index], []
    if operation == "method":
        function, instance = (_SPECIAL[name], [function]) if name in _SPECIAL else (getattr(function, name), [])
    changeable = [argument for argument in arguments if isinstance(argument, (list, dict, set))]
    returned = encode(function(*instance, *arguments, **{key: _resolve(value) for key, value in keywords.items()}))
    return {"value": returned, "changed": [encode(argument) for argument in changeable]}


def _resolve(argument: object) -> object:
    """Return an argument of a call; an object of this process is (None, "object", its index)."""
    if isinstance(argument, tuple) and argument[:2] == (None, "object"):
        return _objects[argument[2]]
    return argument


# The tests' process

_channel: tuple[int, int] = (-1, -1)


def _request(operation: str, *operands: object) -> Any:
    """Request a value from the program's process; raise what the program raised, if Python has an exception of that name."""
    try:
        request = marshal.dumps([operation, *operands])
    except ValueError:
        raise _UnsendableError from None
    try:
        _write_message(_channel[0], request)
    except BrokenPipeError:
        raise _Stopped from None
    try:
        reply = json.loads(_read_message(_channel[1]))
        if "raised" in reply:
            kinds = [getattr(builtins, str(name), None) for name in reply["raised"]]
            kind = next(kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseException))
            error = kind(str(reply.get("text", "")))
        else:
            return _decode(reply["value"]), [_decode(value) for value in reply.get("changed", ())]
    except (ValueError, TypeError, KeyError, IndexError, RecursionError, StopIteration):
        raise _Stopped from None
    raise error if isinstance(error, Exception) else RuntimeError("the program ends itself")


def _decode(data: Any) -> Any:
    if not isinstance(data, list):
        return data
    kind, content = data
    if kind == "object":
        return _Remote(int(content))
    if kind == "dict":
        return {_decode(key): _decode(item) for key, item in content}
    if kind in ("list", "tuple", "set", "frozenset"):
        return getattr(builtins, kind)([_decode(item) for item in content])
    if kind == "bytes":
        return bytes(list(content))
    if kind == "complex":
        return complex(*map(float, content))
    from fractions import Fraction

    return Fraction(*[number for number in content if isinstance(number, int)])


class _Remote:
    """An object of the program's process."""

    def __init__(self, index: int) -> None:
        self.__dict__["_index"] = index

    def __call__(self, *arguments: object, **keywords: object) -> Any:
        return _call("call", self, "", arguments, keywords)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _request("get", self._index, name, [], {})[0]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Remote) and _request("equal", self._index, other._index)[0] is True

    def __hash__(self) -> int:
        return hash(self._index)


def _forward(name: str) -> Callable[..., Any]:
    def method(self: _Remote, *arguments: object) -> Any:
        return _call("method", self, name, arguments, {})

    return method


# no comparison and no arithmetic: a program could return an object that equals everything
for (
    _name
) in "__len__ __getitem__ __setitem__ __iter__ __next__ __contains__ __str__ __repr__ __bool__ __enter__ __exit__".split():
    setattr(_Remote, _name, _forward(_name))


def _call(operation: str, remote: _Remote, name: str, arguments: tuple[object, ...], keywords: dict[str, object]) -> Any:
    """Call an object of the program; changes of lists, dicts and sets among the arguments are made here too."""

    def send(argument: object) -> object:
        return (None, "object", argument._index) if isinstance(argument, _Remote) else argument

    sent = {key: send(value) for key, value in keywords.items()}
    returned, changed = _request(operation, remote._index, name, [send(argument) for argument in arguments], sent)
    for argument, value in zip([a for a in arguments if isinstance(a, (list, dict, set))], changed):
        if type(value) is type(argument) and value != argument:
            argument.clear()
            argument.extend(value) if isinstance(argument, list) else argument.update(value)
    return returned


class _Names(dict[str, Any]):
    """The namespace of the tests: their own names, the standard library, and the names of the program."""

    entry_point: str | None = None

    def __missing__(self, name: str) -> Any:
        if name != self.entry_point:
            if hasattr(builtins, name):
                raise KeyError(name)
            if name in sys.stdlib_module_names:
                self[name] = importlib.import_module(name)
                return self[name]
        return _request("name", 0, name, [], {})[0]


def _must_run_in_program(test: str) -> bool:
    """Return True for a test that defines classes or catches exceptions that Python does not have."""
    for node in ast.walk(ast.parse(test)):
        if isinstance(node, ast.ClassDef):
            return True
        if isinstance(node, ast.ExceptHandler) and node.type is not None:
            caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            if not all(isinstance(kind, ast.Name) and hasattr(builtins, kind.id) for kind in caught):
                return True
    return False


def _run_test(test: str, names: _Names) -> int:
    try:
        if _must_run_in_program(test):
            _request("run", test)
        else:
            try:
                exec(compile(test, "test.py", "exec", dont_inherit=True), names)
            except _UnsendableError:
                _request("run", test)
    except (Exception, SystemExit):  # noqa: BLE001 (any exception means that the test is not passed)
        return 0
    return 1


def _evaluate(expression: str) -> object:
    """Return the encoded value in a list, None if the program raised. It is relayed as it is, and judged outside."""
    try:
        _write_message(_channel[0], marshal.dumps(("value", expression)))
        reply = json.loads(_read_message(_channel[1]))
        return [reply["value"]] if "value" in reply else None
    except (BrokenPipeError, ValueError, TypeError, KeyError, RecursionError):
        return None


def _main() -> None:
    global _channel
    program = _read(0, int.from_bytes(_read(0, 8), "big")).decode("utf-8", "replace")
    requests, replies = os.pipe(), os.pipe()
    if os.fork() == 0:
        os.close(requests[1])
        os.close(replies[0])
        _serve(program, requests[0], replies[1])
    # only now: the child must not have the tests in its memory
    os.close(requests[0])
    os.close(replies[1])
    _channel = (requests[1], replies[0])
    with open(0, "rb", closefd=False) as rest:
        job = json.loads(rest.read())
    results: Any = None
    outcomes: list[object] = [None] * len(job.get("expressions") or job.get("tests") or ())
    try:
        if "call" in job:
            results = _request("json", job["call"], job["arguments"])[0]
        else:
            results = outcomes
            names = _Names(__name__="tests")
            names.entry_point = job.get("entry_point")
            for index in range(len(outcomes)):
                outcomes[index] = (
                    _evaluate(job["expressions"][index]) if "expressions" in job else _run_test(job["tests"][index], names)
                )
    except (_Stopped, Exception):  # noqa: BLE001 (the program's exceptions; what has no result yet has failed)
        pass
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    _main()
