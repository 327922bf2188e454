"""Follows the commands of a shell script: variables, conditions, loops, functions and scripts that it runs."""

from __future__ import annotations

import enum
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from mindspeed_rl.config.errors import ConfigError
from mindspeed_rl.importers.shell.assignments import Assigner, read_assignment
from mindspeed_rl.importers.shell.command import Command, list_unknown, make_mark
from mindspeed_rl.importers.shell.conditions import Conditions
from mindspeed_rl.importers.shell.expansion import Expander, split_fields
from mindspeed_rl.importers.shell.launchers import InnerScript, find_inner, list_removed, read_variables
from mindspeed_rl.importers.shell.parser import Node, parse
from mindspeed_rl.importers.shell.programs import echo_text, format_text, list_braces, list_changed, read_output
from mindspeed_rl.importers.shell.tokens import INPUT, INPUT_FILE, INPUT_WORD, OUTPUT
from mindspeed_rl.importers.shell.variables import Scope, Variable

_FILE_READ = re.compile(r"\s*<\s*(\S+)\s*")
_DECLARING = frozenset(("export", "declare", "local", "readonly", "typeset"))
#: programs that are run to know something of the machine, and how they end says it
_QUESTIONS = frozenset(("grep egrep fgrep which type hash pgrep pidof lsof diff cmp ping nc curl getent id nvidia-smi "
                        "npu-smi rocm-smi lspci mountpoint systemctl").split())  # fmt: skip
#: files that are an output of the script
_OUTPUTS = ("/dev/stdout", "/dev/fd/1", "/dev/tty")
#: commands that read a file behind `<`; every other program reads it by itself
_READERS = frozenset(("read", "mapfile", "readarray", "cat", "bash", "sh", "zsh", "xargs", "tee"))
#: builtins that keep the text of what they write
_WRITERS = frozenset(("cat", "echo", "printf", "tee"))
#: loops over more items, and scripts that run more others, than any script means
_MAX_ITEMS = 64
_MAX_DEPTH = 20
#: runs of all loops of a script together
_MAX_ROUNDS = 10_000
#: larger files that a script adds to are logs
_MAX_BYTES = 2**20
#: folders above a script's which relative paths may start from, such as the root of its checkout
MAX_PARENTS = 6
#: options of `read`, `mapfile` and `readarray` that have a word
_READ_WORDS = {"read": "adinNptu", "mapfile": "dnOsuCc", "readarray": "dnOsuCc"}


def _split_line(line: str, borders: str | None, count: int) -> list[str] | None:
    """Return what `read` gives names, of which the last has the rest; None where the shell's rule is not followed."""
    borders = " \t\n" if borders is None else borders
    blanks = "".join(char for char in borders if char in " \t\n")
    others = "".join(char for char in borders if char not in " \t\n")
    blank = f"[{re.escape(blanks)}]*" if blanks else ""
    signs = [f"{blank}[{re.escape(others)}]{blank}"] if others else []
    border = re.compile("|".join([*signs, *([f"[{re.escape(blanks)}]+"] if blanks else [])]) or "(?!)")
    items, rest = [], line.lstrip(blanks) if blanks else line
    while len(items) < count - 1:
        found = border.search(rest)
        items.append(rest if found is None else rest[: found.start()])
        rest = "" if found is None else rest[found.end() :]
    rest = rest.rstrip(blanks) if blanks else rest
    return None if others and rest[-1:] and rest[-1] in others else [*items, rest]


def read_script(text: str, known: Mapping[str, str] | None = None, folder: Path | None = None) -> list[Command]:
    """Return the commands that a script runs, in order.

    Args:
        known: values of variables, which assignments of the script do not change.
        folder: folder of the script; files that it sources are read where they are there.

    Raises:
        ConfigError: a quote or a bracket is not closed, or a construct has no end.
    """
    interpreter = _Interpreter(Scope(dict(known or {})), folder)
    try:
        interpreter.run(parse(text))
    except (IndexError, ValueError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError([f"line {interpreter.scope.line} cannot be read as a shell script"]) from None
    return _leave_first_runs(interpreter.commands)


def _leave_first_runs(commands: list[Command]) -> list[Command]:
    """Return the commands without those that a further run of a loop has at the same place."""
    kept: list[Command] = []
    looped: set[tuple[int, ...]] = set()
    for command in commands:
        place = (command.line, *command.inner, *command.places)
        if command.loop and place in looped:
            continue
        looped |= {place} if command.loop else set()
        kept.append(command)
    return kept


def _name_condition(kind: str, line: int, unknown: Sequence[tuple[str, int]]) -> str:
    """Return the words for a condition or case, with the variables that decide it."""
    names = dict(unknown)
    asked = f" ({' '.join(f'--set {name}=VALUE' for name in names)})" if names else ""
    return f"the {kind} of line {line}{asked}"


class _Kind(enum.Enum):
    """What a command is that no builtin of the shell follows."""

    PROGRAM = enum.auto()


@dataclass(frozen=True)
class _Call:
    """A simple command after expansion.

    Attributes:
        words: words of the command without its name.
        assignments: in front of it.
        stdin: text that it reads; None without a redirection.
        output: how (`>` or `>>`) and where it writes; None without a redirection.
    """

    name: str
    words: list[str]
    line: int
    assignments: Mapping[str, str]
    stdin: str | None
    output: tuple[str, str] | None


@dataclass
class _Interpreter:
    """Follows the variables of a script, and collects its commands.

    Attributes:
        files: path -> text of those that the script has written.
        changed: path -> line, of those that it has written or changed, also by programs.
        inner_runs: number of scripts that were run, of this one and those around it together.
        rounds: number of runs of their loops.
        uncertain, loop, directory: what the commands that follow get, see `Command`.
        depth: depth of functions, files and scripts within one another.
        doubts: number of uncertain branches around what runs; `returns` and `breaks` have it for the function and the loop.
        leaves: "exit", "return", "break" or "continue" while it is followed.
        num_loops: loops that "break" or "continue" is about, from the inner one.
        hidden: for each function that runs, the values of the names that it has declared.
        outer_folders: folders of the scripts around this one, from which its relative paths may start too.
        folders: those that `popd` goes back to, with their PWD.
        place: of the command that runs, in its text.
        is_lost: which folder the script has changed to only the machine knows.
        code: how the last command that failed has ended.
        substituted: how the last command whose output is taken has ended.
        piped: what the command before `|` writes; None where only the machine knows it.
    """

    scope: Scope
    folder: Path | None = None
    functions: dict[str, list[Node]] = field(default_factory=dict)
    commands: list[Command] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    changed: dict[str, int] = field(default_factory=dict)
    inner_runs: list[int] = field(default_factory=lambda: [0])
    rounds: list[int] = field(default_factory=lambda: [0])
    uncertain: str = ""
    loop: str = ""
    directory: str = ""
    depth: int = 0
    doubts: int = 0
    returns: int | None = None
    breaks: int | None = None
    leaves: str = ""
    num_loops: int = 1
    hidden: list[dict[str, Variable | None]] = field(default_factory=list)
    outer_folders: tuple[Path, ...] = ()
    folders: list[tuple[str, str | None]] = field(default_factory=list)
    is_lost: bool = False
    place: int = 0
    code: str = "1"
    substituted: bool | None = True
    piped: str | None = None

    def __post_init__(self) -> None:
        self.words = Expander(self.scope, self._substitute, self._name_process)
        self.assigner, self.conditions = Assigner(self.scope, self.words), Conditions(self.words)

    # --- statements

    def run(self, nodes: list[Node]) -> bool | None:
        """Follow the commands; return the status of the last one: None where only the machine knows it."""
        status: bool | None = True
        start = 0
        for index, node in enumerate(nodes):
            if self.leaves:
                break
            if (node.link == "&&" and status is False) or (node.link == "||" and status is True):
                continue
            if node.link in ("&&", "||") and status is None:
                self._run_uncertain([[replace(node, link=";")]], f"line {node.line}")
                self.scope.variables["?"] = self.scope.mark_output()
                continue
            self.scope.line, self.place = node.line, node.place
            is_piped = node.link == "|"
            pipes = index + 1 < len(nodes) and nodes[index + 1].link == "|"
            start = start if is_piped else len(self.commands)
            if is_piped or pipes:  # each of them runs in a shell of its own
                status = self._run_piped(node, start if is_piped else None)
            elif node.in_background:
                with self._own_shell():
                    status = self._run_node(node)
            else:
                status = self._run_node(node)
            self.scope.variables["?"] = self.code if status is False else "0" if status else self.scope.mark_output()
        return status

    def _run_node(self, node: Node) -> bool | None:
        """Follow a command or a construct, with the files that the construct writes."""
        count = len(self.commands)
        status = _NODES[node.kind](self, node)
        if node.kind == "function":  # its redirections are those of its calls
            return status
        for word in node.redirections:
            if word.startswith(OUTPUT):
                way, _, target = word.removeprefix(OUTPUT).partition(" ")
                said = [read_output([command], self._read_file, self.words.compute, "") for command in self.commands[count:]]
                is_known = way in (">", ">>") and not any(command.uncertain for command in self.commands[count:])
                text = "".join(item or "" for item in said) if is_known and None not in said else None
                self._write_file((way, self.words.expand_text(target)), text)
        return status

    def _run_piped(self, node: Node, start: int | None) -> bool | None:
        """Follow a command of a pipe.

        Args:
            start: number of the commands before the pipe; None for its first command.
        """
        before = self.commands[start:] if start is not None else []
        text = read_output(before, self._read_file, self.words.compute, "") if before else None
        outer, self.piped = self.piped, text
        with self._own_shell():
            status = self._run_node(node)
        if before and text is not None and self.piped is None:  # it has read what those before it write
            del self.commands[start : (start or 0) + len(before)]
        self.piped = outer
        return status

    def _run_group(self, node: Node) -> bool | None:
        return self.run(node.parts[0])

    def _run_subshell(self, node: Node) -> bool | None:
        """Follow commands in brackets, whose folder, variables and functions end with them."""
        with self._own_shell():
            return self.run(node.parts[0])

    @contextmanager
    def _own_shell(self) -> Iterator[None]:
        scope = self.scope
        variables, exported, functions = dict(scope.variables), set(scope.exported), dict(self.functions)
        outer = self.directory, list(self.folders), scope.moved, scope.exports_all, self.conditions.ignores_case
        yield
        self.directory, self.folders, scope.moved, scope.exports_all, self.conditions.ignores_case = outer
        scope.variables, scope.exported, self.functions = variables, exported, functions
        self.leaves = ""

    def _run_if(self, node: Node) -> bool | None:
        parts = list(node.parts)
        while len(parts) >= 2:
            count = len(self.commands)
            status = self.run(parts[0])
            if status is None or len(self.commands) > count:  # only the machine knows how a program ends
                bodies = parts[1::2] + ([parts[-1]] if len(parts) % 2 else [[]])
                words = [word for part in parts[0] for word in part.words]
                unknown = [item for word in words for text in self.words.expand(word) for item in list_unknown(text)]
                self._run_uncertain(bodies, _name_condition("condition", node.line, unknown), unknown)
                return True
            if status:
                return self.run(parts[1])
            parts = parts[2:]
        return self.run(parts[0]) if parts else True

    def _run_for(self, node: Node) -> bool | None:
        name, *words = node.words
        if name.startswith("(("):
            return self._run_while(node)
        if not words:  # over the arguments
            words = ["in", '"$@"']
        items = [item for word in words[1:] for part in list_braces(word) for item in self.words.expand(part)]
        if name in self.scope.known:  # each run would have the value of the user
            items = items[:1]
        if len(items) > _MAX_ITEMS:  # what it leaves depends on all of its runs
            self.scope.set(name, self.scope.mark(name))
            self._run_uncertain([node.parts[0]], f"the loop of line {node.line}")
            return True
        outer, breaks = self.loop, self.breaks
        self.breaks = self.doubts
        for index, item in enumerate(items):
            if len(items) > 1 and not outer:
                runs = f"run {index + 1} of {len(items)} of the loop over {name} in line {node.line}: {name}={item}"
                self.loop = f"{runs}; --set {name}=VALUE imports another"
            self.scope.variables[name] = item
            self._count_round(node)
            self.run(node.parts[0])
            if self.leaves == "continue" and self.num_loops == 1:
                self.leaves = ""
            if self.leaves:
                break
        self._leave_loop(outer, breaks)
        return True

    def _count_round(self, node: Node) -> None:
        self.rounds[0] += 1
        if self.rounds[0] > _MAX_ROUNDS:
            raise ConfigError([f"line {node.line}: the loops of the script have more than {_MAX_ROUNDS:,} runs; import its "
                               "command alone"])  # fmt: skip

    def _leave_loop(self, outer: str, breaks: int | None) -> None:
        self.loop, self.breaks = outer, breaks
        if self.leaves in ("break", "continue"):
            self.num_loops -= 1
            if not self.num_loops or breaks != self.doubts:
                self.leaves = ""

    def _run_while(self, node: Node) -> bool | None:
        """Follow a loop as long as its condition is known."""
        step = ""
        if node.kind == "for":
            first, condition, step = node.words[0].removeprefix("((").removesuffix("))").split(";")
            self.words.step(first)
            head = [Node("simple", node.line, (f"(({condition.strip() or 1}))",))]
            body = [*node.parts[0], Node("simple", node.line, (f"(({step.strip() or 1}))",))]
        else:
            head, body = node.parts
        outer, breaks = self.loop, self.breaks
        for index in range(_MAX_ITEMS + 1):
            before = {**self.scope.variables, "?": "0"}
            count = len(self.commands)
            status = self.run(head)
            if status is None or len(self.commands) > count or index == _MAX_ITEMS:
                # its body depends on what changes while it runs
                self.scope.variables = before
                self._run_uncertain([body], f"the loop of line {node.line}")
                break
            if status == (node.ends[:1] == ("until",)):
                break
            self.breaks = self.doubts
            if not outer:
                self.loop = f"run {index + 1} of the loop of line {node.line}"
            self._count_round(node)
            self.run(node.parts[-1])
            if self.leaves == "continue" and self.num_loops == 1:
                self.leaves = ""
            if self.leaves:
                break
            if step:
                self.words.step(step)
            if {**self.scope.variables, "?": "0"} == before:  # each further run is the same
                break
        self._leave_loop(outer, breaks)
        return True

    def _run_case(self, node: Node) -> bool | None:
        value = " ".join(self.words.expand(node.words[0]))
        if unknown := list_unknown(value):
            self._run_uncertain([*node.parts, []], _name_condition("case", node.line, unknown), unknown)
            return True
        falls, status = False, True
        for place, (patterns, body, end) in enumerate(zip(node.patterns, node.parts, node.ends)):
            matches = [self.conditions.matches(value, self.words.expand_text(pattern, is_pattern=True)) for pattern in patterns]
            if not falls and True not in matches and None in matches:
                self._run_uncertain([*node.parts[place:], []], _name_condition("case", node.line, []))
                return True
            if falls or True in matches:
                status = self.run(body)
                falls = end == ";&"
                if end not in (";&", ";;&"):
                    break
        return status

    def _keep_function(self, node: Node) -> bool | None:
        self.functions[node.words[0]] = node.parts[0]
        return True

    def _run_uncertain(self, bodies: list[list[Node]], condition: str, causes: Sequence[tuple[str, int]] = ()) -> None:
        """Follow every body; variables that they leave with different values are unknown after them.

        Args:
            causes: unknown variables of the condition: their values are requested, not those that follow from them.
        """
        before, outer = dict(self.scope.variables), self.uncertain
        folder, folders = self.scope.moved, set()
        results = []
        self.doubts += 1
        for body in bodies:
            self.scope.variables, self.uncertain = dict(before), outer or condition
            self.run(body)
            results.append(self.scope.variables)
            folders.add(self.scope.moved)
            self.scope.moved = folder
        folders |= {folder} if len(bodies) == 1 else set()
        self.scope.moved = folders.pop() if len(folders) == 1 else self.scope.mark_folder()
        self.uncertain = outer
        self.doubts -= 1
        if len(bodies) == 1:
            results.append(before)
        names = {name for result in results for name in result}
        equal = {name for name in names if all(result.get(name) == results[0].get(name) for result in results)}
        cause = "".join(make_mark(*item) for item in causes[:1])
        self.scope.variables = {name: results[0][name] if name in equal else cause or self.scope.mark(name) for name in names}

    # --- simple commands

    def _run_simple(self, node: Node) -> bool | None:
        words = [word for word in node.words if not word.startswith("\1")]
        marked = [word for word in node.words if word.startswith("\1")]
        if words[:1] == ["time"]:  # a word of the shell, before variables of the command
            words = words[2:] if words[1:2] == ["-p"] else words[1:]
        if words[:1] == ["!"] and len(words) > 1:
            rest = list(node.words)
            rest.remove("!")
            status = self._run_simple(replace(node, words=tuple(rest)))
            self.code = "1"
            return None if status is None else not status
        assignments = []
        while words and (assignment := read_assignment(words[0])):
            assignments.append(assignment)
            words.pop(0)
        if not words:
            self.substituted = True
            for assignment in assignments:
                self.assigner.assign(assignment)
            for way, target in self._list_outputs(marked):
                self._write_file((way, target), "")
            return self.substituted
        self.code = "1"
        if words[0] in ("[", "[[", "test") or words[0].startswith("(("):
            return self.conditions.test(words)
        if words[0] in _DECLARING:
            self.assigner.declare(words, self.hidden[-1] if self.hidden else None)
            return True
        expanded = [item for word in words for part in list_braces(word) for item in self.words.expand(part)]
        if not expanded:
            return True
        front: dict[str, str] = {}
        for item in assignments:  # each of them sees those before it
            with self._front(front):
                front[item.name] = self.words.expand_text(item.text, assigns=True)
        stdin, output = self._read_redirections(marked, expanded)
        return self._run_call(_Call(expanded[0], expanded[1:], node.line, front, stdin, output))

    def _run_call(self, call: _Call) -> bool | None:
        is_shallow = self.depth < _MAX_DEPTH
        count = len(self.commands)
        if call.name in self.functions and is_shallow:
            with self._deeper(call.words), self._own_names(), self._front(call.assignments):
                status: bool | None | _Kind = self._run_body(self.functions[call.name])
        elif call.name in _STATUSES:
            status = _STATUSES[call.name]
        elif call.name in _BUILTINS:
            with self._front(call.assignments if call.name in ("eval", "source", ".") else {}):
                status = _BUILTINS[call.name](self, call)
            if status is not _Kind.PROGRAM and call.name in _WRITERS:
                return status  # they keep the text of what they write
        else:
            status = _Kind.PROGRAM
        if status is _Kind.PROGRAM:
            status = self._run_program(call, is_shallow=is_shallow)
        self._note_changes(call, self.commands[count:])
        return status

    @contextmanager
    def _front(self, assignments: Mapping[str, str]) -> Iterator[None]:
        """Give a function the variables in front of its call, as long as it runs."""
        scope = self.scope
        before = {name: scope.variables.get(name) for name in assignments}
        added = set(assignments) - scope.exported
        for name, value in assignments.items():
            scope.set(name, value)
        scope.exported |= added
        yield
        scope.exported -= added
        for name, value in before.items():
            scope.variables.pop(name, None)
            if value is not None:
                scope.variables[name] = value

    def _run_program(self, call: _Call, *, is_shallow: bool) -> bool | None:
        expanded, place = [call.name, *call.words], self.place
        front = {**call.assignments, **read_variables(expanded)}
        if is_shallow and (inner := find_inner(expanded, call.stdin, self._read_file)) is not None:
            status: bool | None = self._run_inner(inner, front)
            self._end_by_exec(call)
            return status
        if Path(call.name).name == "xargs":
            # one call with all words of its input; with options they may be several
            plain = call.stdin is not None and not list_unknown(call.stdin) and not "".join(call.words[:1]).startswith("-")
            given = shlex.split(call.stdin or "") if plain else [self.scope.mark_output()]
            expanded = [*((call.words or ["echo"]) if plain else expanded), *given]
        exported = self.scope.list_exported()
        removed = list_removed(expanded, exported)
        kept = {key: value for key, value in exported.items() if key not in removed}
        environment = kept | {key: self.scope.known.get(key, value) for key, value in front.items()}
        self.commands.append(
            Command(
                tuple(expanded), environment, call.line, self.uncertain, self.folder, self.directory, call.stdin, self.loop,
                places=(place,),
                changed={name: (line, self.files.get(name)) for name, line in self.changed.items()},
            )  # fmt: skip
        )
        self._end_by_exec(call)
        asks = call.name in _QUESTIONS or (call.name == "command" and call.words[:1] in (["-v"], ["-V"]))
        return None if asks else True

    def _end_by_exec(self, call: _Call) -> None:
        """End the script with a command that takes its place."""
        if call.name == "exec" and call.words and not self.doubts and not self.uncertain:
            self.leaves = "exit"

    def _read_redirections(self, marked: list[str], words: list[str]) -> tuple[str | None, tuple[str, str] | None]:
        """Return the text that a command reads, and how and where it writes; None where it has no such redirection."""
        reads = any(Path(word).name in _READERS for word in (words[0], words[-1])) or "-s" in words
        stdin = self.piped if reads else None
        self.piped = None if reads else self.piped
        output: tuple[str, str] | None = None
        for way, target in self._list_outputs(marked):
            if output is not None or way == "2>":
                self._write_file((output or (way, target)) if way != "2>" else (way, target), None if way == "2>" else "")
            output = output if way == "2>" else (way, target) if target not in _OUTPUTS else None
        for word in marked:
            kind, text = word[: word.index("\1", 1) + 1], word[word.index("\1", 1) + 1 :]
            if kind == OUTPUT:
                continue
            if kind == INPUT:
                stdin = text
            elif kind == INPUT_WORD:
                stdin = f"{self.words.expand_text(text)}\n"
            elif kind == INPUT_FILE:
                content = self._read_file(self.words.expand_text(text)) if reads else None
                stdin = (self.scope.mark_output() if content is None else content) if reads else stdin
            else:
                # as in double quotes, but that a quote is one like any other character
                quoted = re.sub(r'(\\*)"', lambda match: f'{match.group(1) * 2}\\"', text)
                try:
                    stdin = self.words.expand_text(f'"{quoted}"')
                except ConfigError:  # what bash cannot expand either matters only where something reads it
                    stdin = text
        return stdin, output

    def _list_outputs(self, marked: list[str]) -> Iterator[tuple[str, str]]:
        """Yield how and where a command writes."""
        for word in marked:
            if word.startswith(OUTPUT):
                way, _, target = word.removeprefix(OUTPUT).partition(" ")
                yield way, self.words.expand_text(target)

    def _note_changes(self, call: _Call, commands: list[Command]) -> None:
        """Keep the names of the files that a command writes or changes, and the text of those that are known."""
        keeps = call.name == "tee" and call.stdin is not None  # it has written its text
        for name in [] if keeps else list_changed(call.name, call.words, call.stdin):
            self._write_file((">", name), "" if Path(call.name).name in ("rm", "unlink") else None)
        if call.output is not None:
            is_known = len(commands) == 1 and not commands[0].uncertain and call.output[0] != ">&"
            text = read_output(commands, self._read_file, self.words.compute, self.scope.read("PWD")) if is_known else None
            self._write_file(call.output, "" if text is None and call.name in (":", "true", "false") else text)

    def _name_file(self, name: str) -> str:
        """Return the path of a file from the folder that the script begins in."""
        path, start = os.path.normpath(os.path.join(self.directory, name)), self.scope.known.get("PWD", "")
        return path.removeprefix(f"{start}/") if start else path

    def _read_file(self, name: str) -> str | None:
        """Return the text of a file that the script has written, or that is here; None for others."""
        if self._name_file(name) in self.files:
            return self.files[self._name_file(name)]
        if self._name_file(name) in self.changed:
            return None  # a program has written it
        path = self._find_file(name)
        try:
            return None if path is None else path.read_text(encoding="utf-8")
        except (OSError, ValueError):
            return None

    def _find_file(self, name: str) -> Path | None:
        """Return a file by the path that the script has for it; None where it is not here.

        A relative path starts in the folder that the command runs in, which may be the script's, that of a script around it,
        the working directory, or one above the script's, such as the root of a checkout.
        """
        if list_unknown(name) or not name:
            return None
        folder = (self.folder or Path()).resolve()
        bases = [self.folder or Path(), *self.outer_folders, Path(), *list(folder.parents)[:MAX_PARENTS]]
        places = [base / self.directory / name for base in bases] + [base / name for base in bases]
        try:
            return next((path for path in places if path.is_file()), None)
        except (OSError, ValueError):  # a name that no file can have
            return None

    def _run_inner(self, script: InnerScript, front: Mapping[str, str]) -> bool:
        """Follow a script that a command runs.

        Args:
            front: variables in front of the command.
        """
        self.inner_runs[0] += 1
        place = self.place
        if self.inner_runs[0] > _MAX_ITEMS:
            raise ConfigError([f"line {self.scope.line}: the script runs more than {_MAX_ITEMS} others"])
        here, scope = script.is_here, self.scope
        path = None if not script.name or self._name_file(script.name) in self.files else self._find_file(script.name)
        folders = (self.folder or Path(), *self.outer_folders)
        exported = {key: scope.variables[key] for key in scope.exported if key in scope.variables} if here else {}
        inner = _Interpreter(
            Scope(scope.known, {**exported, **front}, set(exported) | set(front)),
            self.folder if path is None else path.parent, files=self.files, changed=self.changed,
            inner_runs=self.inner_runs, rounds=self.rounds, uncertain=self.uncertain, loop=self.loop,
            directory=self.directory if here else "", depth=self.depth + 1,
            outer_folders=self.outer_folders if path is None else folders,
        )  # fmt: skip
        inner.scope.moved = scope.moved if here else None
        inner.scope.set_arguments(script.arguments)
        if zero := script.zero or script.name:
            inner.scope.variables["0"] = zero
        inner.run(parse(script.text))
        # lines of its own text say nothing in this script
        self.commands += [
            replace(command, line=scope.line, inner=(command.line, *command.inner), places=(place, *command.places))
            for command in inner.commands
        ]
        return True

    @contextmanager
    def _deeper(self, arguments: list[str] | None = None) -> Iterator[None]:
        """Follow what a function or another file has; its arguments, if it has any, take the place of the script's."""
        kept = None if arguments is None else self.scope.keep_arguments()
        if arguments is not None:
            self.scope.set_arguments(arguments)
        self.depth += 1
        yield
        self.depth -= 1
        if kept is not None:
            self.scope.restore_arguments(kept)

    def _run_body(self, nodes: list[Node]) -> bool | None:
        """Follow a function or a file that is read into the script, both of which `return` ends."""
        outer = self.returns, self.breaks
        self.returns, self.breaks = self.doubts, None
        status = self.run(nodes)
        self.returns, self.breaks = outer
        self.leaves = "" if self.leaves == "return" else self.leaves
        return status

    def _leave(self, call: _Call) -> bool | None | _Kind:
        """Follow `exit`, `return`, `break` and `continue` where nothing uncertain decides about them.

        An exit with an error is what a wrong call of the script meets.
        """
        status = next(iter(call.words), self.scope.read("?") if call.name in ("exit", "return") else "0")
        status = "0" if not call.words and list_unknown(status) else status
        self.code = status if status.isdigit() else "1"
        level = {"exit": 0 if status == "0" else None, "return": self.returns}.get(call.name, self.breaks)
        if level == self.doubts and not (call.name == "exit" and self.uncertain):
            self.leaves = call.name
            self.num_loops = max(1, int(status)) if status.isdigit() else 1
        if call.name in ("break", "continue"):
            return True
        return {"0": True}.get(status, None if list_unknown(status) else False)

    @contextmanager
    def _own_names(self) -> Iterator[None]:
        """Give the names that a function declares their former values when it ends."""
        self.hidden.append({})
        yield
        for name, value in self.hidden.pop().items():
            self.scope.references.pop(name, None)
            self.scope.variables.pop(name, None)
            if value is not None:
                self.scope.variables[name] = value

    # --- builtins: each returns a status, or PROGRAM where it leaves the command to those that follow programs

    def _source(self, call: _Call) -> bool | None | _Kind:
        if not call.words or self.depth >= _MAX_DEPTH or list_unknown(call.words[0]):
            return _Kind.PROGRAM
        if call.words[0] in ("/dev/stdin", "/dev/fd/0", "-") and call.stdin is not None:
            text, path = call.stdin, None
        else:
            text, path = self._read_file(call.words[0]), self._find_file(call.words[0])
        if text is None:  # such as a virtual environment of that machine: it sets what the script may request
            return _Kind.PROGRAM
        outer = self.folder, self.outer_folders
        if path is not None:
            self.folder, self.outer_folders = path.parent, (self.folder or Path(), *self.outer_folders)
        # with words behind it they are its arguments, without any it has the script's
        with self._deeper(call.words[1:] or None):
            status = self._run_body(parse(text))
        self.folder, self.outer_folders = outer
        return status

    def _eval(self, call: _Call) -> bool | None | _Kind:
        if self.depth >= _MAX_DEPTH:
            return _Kind.PROGRAM
        with self._deeper():
            return self.run(parse(" ".join(call.words)))

    def _set(self, call: _Call) -> bool | None | _Kind:
        words, names = list(call.words), []
        while words and re.fullmatch(r"[-+][A-Za-z]+", words[0]):
            option = words.pop(0)
            names.append(option[0] + (words.pop(0) if option[-1] == "o" and words else ""))
            names += [option[0] + letter for letter in option[1:]]
        if "-a" in names or "-allexport" in names:
            self.scope.exports_all = True
        if "+a" in names or "+allexport" in names:
            self.scope.exports_all = False
        if words and words != ["-"]:
            self.scope.set_arguments(words[words[0] == "--" :])
        return True

    def _set_shell(self, call: _Call) -> bool | None | _Kind:
        """Follow `shopt`, of which one option changes what is compared."""
        if "nocasematch" in call.words:
            self.conditions.ignores_case = "-s" in call.words
        return True

    def _get_options(self, call: _Call) -> bool | None | _Kind:
        """Follow `getopts`, which ends at once where there are no arguments."""
        if len(call.words) < 2:
            return None
        if not self.scope.arguments:
            return False
        for name in (call.words[1], "OPTARG"):
            self.scope.set(name, self.scope.mark(name))
        return None

    def _shift(self, call: _Call) -> bool | None | _Kind:
        count = int(call.words[0]) if call.words and call.words[0].isdigit() else 1
        self.scope.set_arguments(self.scope.arguments[count:])
        return True

    def _unset(self, call: _Call) -> bool | None | _Kind:
        for word in call.words:
            name, bracket, index = word.removesuffix("]").partition("[")
            value = self.scope.variables.get(self.scope.resolve(name))
            if not bracket:
                if "-f" in call.words or (value is None and name not in self.scope.exported):
                    self.functions.pop(name, None)
                    continue
                self.scope.variables.pop(self.scope.resolve(name), None)
                self.scope.exported.discard(name)
            elif isinstance(value, dict):  # a new one: another branch may have this one
                removed = index.strip("'\"")
                self.scope.variables[name] = {key: item for key, item in value.items() if key != removed}
            elif isinstance(value, list) and (place := self.words.compute(index)).lstrip("-").isdigit():
                if -len(value) <= int(place) < len(value):
                    items = list(value)
                    items[int(place)] = None
                    while items and items[-1] is None:
                        items.pop()
                    self.scope.variables[self.scope.resolve(name)] = items
        return True

    def _let(self, call: _Call) -> bool | None | _Kind:
        for word in call.words:
            self.words.step(word)
        return True

    def _change_directory(self, call: _Call) -> bool | None | _Kind:
        """Follow `cd`, `pushd` and `popd`."""
        here = self.directory, self.scope.moved
        names = [word for word in call.words if not re.fullmatch(r"-[LPe@n]+|--", word)]
        if call.name == "popd":
            is_known = self.folders and not names
            self.directory, self.scope.moved = self.folders.pop() if is_known else ("", self.scope.mark_folder())
            return _Kind.PROGRAM
        if call.name == "pushd":
            self.folders.append(here)
        name = names[0] if names else self.scope.read("HOME") if call.name == "cd" else "-"
        if name == "-" or (call.name == "pushd" and re.fullmatch(r"[-+]\d+", name)):
            self.scope.moved = self.scope.mark_folder()
            self.is_lost = True
        elif unknown := list_unknown(name):
            self.scope.moved = make_mark(*unknown[0])
            self.is_lost = True
        else:
            start = self.scope.read("PWD")
            is_known = name.startswith("/") or not list_unknown(start)
            self.scope.moved = os.path.normpath(os.path.join(start, name)) if is_known else self.scope.mark("PWD")
            self.directory = str(Path(self.directory, name))
            self.is_lost &= not name.startswith("/")
        return _Kind.PROGRAM  # `$(cd FOLDER && pwd)` reads it

    def _read(self, call: _Call) -> bool | None | _Kind:
        """Set the variables of `read`, `mapfile` and `readarray`."""
        options: dict[str, str] = {}
        words = list(call.words)
        while words and words[0].startswith("-") and len(words[0]) > 1:
            option = words.pop(0)
            if option == "--":
                break
            for place, letter in enumerate(option[1:], 1):
                options[letter] = ""
                if letter in _READ_WORDS[call.name]:
                    options[letter] = option[place + 1 :] or (words.pop(0) if words else "")
                    break
        if "a" in options and call.name == "read":
            words = [options["a"]]
        names = words or ["REPLY" if call.name == "read" else "MAPFILE"]
        given = self._split_input(call, options, len(names))
        if given is None:
            for name in names:
                self.assigner.store(name, self.scope.mark(name))
            return None
        if call.name != "read" or "a" in options:
            self.assigner.store(names[0], list(given))
        else:
            for name, item in zip(names, given):
                self.assigner.store(name, item)
        return True if call.name != "read" else "d" not in options and "\n" in (call.stdin or "")

    def _split_input(self, call: _Call, options: Mapping[str, str], count: int) -> list[str] | None:
        """Return the values that `read` and its relatives give a number of names; None for forms that are not followed."""
        text, letters = call.stdin, options.keys()
        if text is None or list_unknown(text) or options.get("d", ""):
            return None
        if call.name != "read":
            lines = text.splitlines(keepends=True) if letters <= {"t"} else None
            return [line.removesuffix("\n") for line in lines] if lines is not None and "t" in letters else lines
        borders = call.assignments.get("IFS", self.scope.find("IFS"))
        if not letters <= set("rdaps") or ("r" not in letters and "\\" in text) or isinstance(borders, (list, dict)):
            return None
        if borders is not None and list_unknown(borders):
            return None
        line = text if "d" in letters else text.partition("\n")[0]
        if "a" in letters:
            return split_fields(line, borders) if borders != "" else [line]
        if not call.words or "REPLY" in call.words or not any(not word.startswith("-") for word in call.words):
            return [line]  # REPLY has the line as it is
        return _split_line(line, borders, count)

    def _cat(self, call: _Call) -> bool | None | _Kind:
        if call.words or call.stdin is None:
            return _Kind.PROGRAM
        return self._write_file(call.output, call.stdin)

    def _tee(self, call: _Call) -> bool | None | _Kind:
        if call.stdin is None:
            return _Kind.PROGRAM
        way = ">>" if "-a" in call.words or "--append" in call.words else ">"
        for target in call.words:
            if not target.startswith("-"):
                self._write_file((way, target), call.stdin)
        return self._write_file(call.output, call.stdin)

    def _echo(self, call: _Call) -> bool | None | _Kind:
        return self._write_file(call.output, echo_text(call.words))

    def _printf(self, call: _Call) -> bool | None | _Kind:
        words = call.words[call.words[:1] == ["--"] :]
        if words[:1] == ["-v"] and len(words) > 2:
            text = format_text(words[2 + (words[2] == "--") :])
            self.assigner.store(words[1], self.scope.mark(words[1].partition("[")[0]) if text is None else text)
            return True
        return self._write_file(call.output, format_text(words))

    def _write_file(self, output: tuple[str, str] | None, text: str | None) -> bool | None | _Kind:
        """Keep the text of a file; what goes elsewhere is left to the one who reads it.

        Args:
            text: None where only the machine knows it.
        """
        if output is None:
            return _Kind.PROGRAM
        way, target = output
        if way == ">&" or target.startswith("/dev/"):
            return True
        name = self._name_file(target)
        if way == ">>" and text is not None:
            path = None if name in self.changed else self._find_file(target)
            if path is not None and path.stat().st_size > _MAX_BYTES:
                return True  # no script or file of options
            before = self.files.get(name, None if name in self.changed else "")
            before = before if path is None else path.read_text(encoding="utf-8", errors="replace")
            text = None if before is None else before + text
        if text is None or self.uncertain:
            self.files.pop(name, None)
        else:
            self.files[name] = text
        self.changed[name] = self.scope.line
        return True

    # --- outputs of commands

    def _substitute(self, text: str) -> str:
        """Return the output of the few commands that can be known; a mark named after the line for others."""
        if self.depth >= _MAX_DEPTH:
            return self.scope.mark_output()
        if file := _FILE_READ.fullmatch(text):
            content = self._read_file(self.words.expand_text(file[1]))
            return self.scope.mark_output() if content is None else content.rstrip("\n")
        nodes = parse(text)
        if not nodes:
            return ""  # a comment
        scope = Scope(
            self.scope.known, dict(self.scope.variables), references=self.scope.references, moved=self.scope.moved,
            line=self.scope.line,
        )  # fmt: skip
        inner = _Interpreter(
            scope, self.folder, dict(self.functions), files=self.files, changed=self.changed, rounds=self.rounds,
            directory=self.directory, depth=self.depth + 1,
        )
        self.substituted = inner.run(nodes)
        self.code = inner.code
        if not inner.commands:
            return ""
        if any(command.uncertain for command in inner.commands):
            return self.scope.mark_output()
        # from the folder that the script begins in, a path from there serves as well
        is_near = self.scope.moved is None and inner.directory and not inner.is_lost
        here = os.path.normpath(inner.directory) if is_near else scope.read("PWD")
        output = read_output(inner.commands, inner._read_file, self.words.compute, here)
        return self.scope.mark_output() if output is None else output.rstrip("\n")

    def _name_process(self, text: str) -> str:
        """Return the name of the file that has the output of `<(command)`; a mark where only the machine knows it."""
        output = self._substitute(text)
        if list_unknown(output):
            return output
        name = f"/dev/fd/{63 - sum(name.startswith('/dev/fd/') for name in self.files)}"
        self.files[name] = f"{output}\n" if output else ""
        return name


_STATUSES = {"true": True, ":": True, "false": False}
_NODES: dict[str, Callable[[_Interpreter, Node], bool | None]] = {
    "simple": _Interpreter._run_simple,
    "if": _Interpreter._run_if,
    "for": _Interpreter._run_for,
    "while": _Interpreter._run_while,
    "case": _Interpreter._run_case,
    "function": _Interpreter._keep_function,
    "group": _Interpreter._run_group,
    "subshell": _Interpreter._run_subshell,
}
_BUILTINS: dict[str, Callable[[_Interpreter, _Call], bool | None | _Kind]] = {
    "source": _Interpreter._source,
    ".": _Interpreter._source,
    "eval": _Interpreter._eval,
    "set": _Interpreter._set,
    "shift": _Interpreter._shift,
    "unset": _Interpreter._unset,
    **dict.fromkeys(("exit", "return", "break", "continue"), _Interpreter._leave),
    "let": _Interpreter._let,
    **dict.fromkeys(("cd", "pushd", "popd"), _Interpreter._change_directory),
    **dict.fromkeys(("read", "mapfile", "readarray"), _Interpreter._read),
    "shopt": _Interpreter._set_shell,
    "getopts": _Interpreter._get_options,
    "cat": _Interpreter._cat,
    "tee": _Interpreter._tee,
    "echo": _Interpreter._echo,
    "printf": _Interpreter._printf,
}
