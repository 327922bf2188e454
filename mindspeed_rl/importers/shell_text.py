"""Commands of a shell script, read without executing any of it.

Assignments, arrays, expansions with defaults, arithmetic of whole numbers, `if`, `for` and `case` on known variables are
followed. A value that only the machine of the script knows stays in the words as a mark, and is requested by
`list_unknown` once it matters.
"""

from __future__ import annotations

import ast
import fnmatch
import operator
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

from mindspeed_rl.config.errors import ConfigError

_MARK = re.compile("\0([^\0@]*)@(\\d+)\0")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(?:\[([^\]=]+)\])?(\+?)=(.*)", re.DOTALL)
_OPERATORS = ("&&", "||", ";;", "|&", "|", "&", ";", "(", ")", "\n")
_REDIRECTION = re.compile(r"(?:\d*|&)(<<<|<<-|<<|>>|>&|<&|<>|>\||>|<)")
_OPEN_WORDS = frozenset(("if", "then", "elif", "else", "fi", "for", "do", "done", "while", "until", "case", "esac", "function"))
_DECLARING = frozenset(("export", "declare", "local", "readonly", "typeset"))
#: loops over more items than any script means
_MAX_ITEMS = 64
_MAX_DEPTH = 20


@dataclass(frozen=True)
class Command:
    """A command of a script after all expansions.

    Attributes:
        words: program and arguments; unknown values are marks in them.
        environment: exported variables and those in front of the command.
        line: of the script, from 1.
        uncertain: the condition that decides on the machine whether the command runs; empty where it always does.
        folder: of the script; None for a command alone.
        directory: that the script has changed to; empty where it has not.
        input: text of a here-document; None without one.
        loop: the loop and the run of it that the command is of, where others follow; empty outside of loops.
    """

    words: tuple[str, ...]
    environment: Mapping[str, str]
    line: int
    uncertain: str = ""
    folder: Path | None = None
    directory: str = ""
    input: str | None = None
    loop: str = ""


def list_unknown(text: object) -> list[tuple[str, int]]:
    """Return the variables that a value depends on and that the script does not set, each with its line."""
    if isinstance(text, list):
        return [item for entry in text for item in list_unknown(entry)]
    return [(name, int(line)) for name, line in _MARK.findall(text)] if isinstance(text, str) else []


def request_variables(unknown: list[tuple[str, int]]) -> ConfigError:
    """Return the error that requests the values of variables."""
    lines = dict(unknown)
    return ConfigError(
        f"line {line}: the value of {name} is not in the script; say it with --set {name}=VALUE" for name, line in lines.items()
    )


def _read_launcher_variables(words: Sequence[str]) -> dict[str, str]:
    """Return the variables that a launcher gives its command: `env NAME=VALUE`, `docker run -e NAME=VALUE` and the like."""
    found: list[str] = []
    for place, word in enumerate(words):
        name = Path(word).name
        if name == "env":
            rest = list(words[place + 1 :])
            while rest and (rest[0].startswith("-") or "=" in rest[0]):
                found.append(rest.pop(0))
                rest = rest[1:] if found[-1] in ("-u", "-C") else rest  # which have a word
        if name in _SHELLS or name.startswith("python") or name == "env":
            break  # what follows is of the command
        options = _VARIABLE_OPTIONS.get(name, ())
        for index, option in enumerate(words[place + 1 :], place + 1) if options else ():
            if Path(option).name in _SHELLS:
                break
            if option in options:
                found += words[index + 1 : index + 2]
            found += [option.partition("=")[2] for item in options if item.startswith("--") and option.startswith(f"{item}=")]
    pairs = [pair.partition("=") for item in found for pair in (item.split(",") if item.startswith("ALL,") else [item])]
    return {name: value for name, equals, value in pairs if equals and _NAME.fullmatch(name)}


def _name_condition(kind: str, line: int, unknown: Sequence[tuple[str, int]]) -> str:
    """Return the words for a condition or case, with the variables that decide it."""
    names = dict(unknown)
    asked = f" ({' '.join(f'--set {name}=VALUE' for name in names)})" if names else ""
    return f"the {kind} of line {line}{asked}"


def read_variable(environment: Mapping[str, str], name: str, default: str | None = None) -> str | None:
    """Return a variable of a command's environment.

    Raises:
        ConfigError: its value is not in the script.
    """
    value = environment.get(name, default)
    if unknown := list_unknown(value):
        raise request_variables(unknown)
    return value


def read_script(text: str, known: Mapping[str, str] | None = None, folder: Path | None = None) -> list[Command]:
    """Return the commands that a script runs, in order.

    Args:
        known: values of variables, which assignments of the script do not change.
        folder: of the script; files that it sources are read where they are there.

    Raises:
        ConfigError: a quote or a bracket is not closed, or a construct has no end.
    """
    reader = _Interpreter(dict(known or {}), folder)
    try:
        reader.run(_Parser(_Reader(text.replace("\r\n", "\n")).read_tokens()).parse_list(()))
    except (IndexError, ValueError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError([f"line {reader.line} cannot be read as a shell script"]) from None
    return _leave_first_runs(reader.commands)


def _leave_first_runs(commands: list[Command]) -> list[Command]:
    """Return the commands without those that a further run of a loop has at the same line."""
    kept: list[Command] = []
    looped: set[int] = set()
    for command in commands:
        if command.loop and command.line in looped:
            continue
        looped |= {command.line} if command.loop else set()
        kept.append(command)
    return kept


# ------------------------------------------------------------------------------------------------------------------ tokens


@dataclass(frozen=True)
class _Token:
    """A word with its quotes, or an operator."""

    text: str
    line: int
    is_operator: bool = False


#: beginnings of tokens for the input and the output of a command: a here-document, one whose text is expanded, a here-string
#: that is expanded as a word, and the file that is written
_INPUT, _EXPANDED_INPUT, _INPUT_WORD, _OUTPUT = ("\1raw\1", "\1text\1", "\1word\1", "\1out\1")


class _Reader:
    """Splits a script into words and operators; here-documents and files that are written are words with a mark in front."""

    def __init__(self, text: str) -> None:
        self.text, self.place, self.line = text, 0, 1

    def read_tokens(self) -> list[_Token]:
        tokens: list[_Token] = []
        documents: list[tuple[str, int]] = []
        brackets = False
        while self.place < len(self.text):
            rest, line = self.text[self.place : self.place + 2], self.line
            if rest == "\\\n":
                self._skip(2)
            elif rest[0] in " \t":
                self._skip(1)
            elif rest[0] == "#":
                self._skip_line()
            elif match := (None if brackets else _REDIRECTION.match(self.text, self.place)):
                self._skip(len(match.group()))
                target = self._read_target()
                if match.group(1) in ("<<", "<<-"):
                    documents.append((target, len(tokens)))
                    tokens.append(_Token("", line))
                elif match.group(1) == "<<<":
                    tokens.append(_Token(_INPUT_WORD + target, line))
                elif match.group() in (">", ">>") and target:
                    tokens.append(_Token(f"{_OUTPUT}{match.group()} {target}", line))
            elif not brackets and self.text.startswith("((", self.place):
                tokens.append(_Token(f"({self._read_balanced('(', ')')})", line))
            elif (found := next((item for item in _OPERATORS if self.text.startswith(item, self.place)), None)) and not (
                brackets and found not in ("\n", ";")
            ):
                self._skip(len(found))
                tokens.append(_Token(found, line, is_operator=True))
                for target, place in documents if found == "\n" else ():
                    name = target.strip("'\"\\")
                    kind = _INPUT if name != target else _EXPANDED_INPUT
                    tokens[place] = _Token(kind + self._read_document(name), line)
                documents = [] if found == "\n" else documents
            else:
                word = self._read_word(in_test=brackets)
                brackets = word == "[[" or (brackets and word != "]]")
                tokens.append(_Token(word, line))
        # a document without a line after its command has no text
        return [token for token in tokens if token.text or token.is_operator]

    def _skip(self, count: int) -> None:
        self.line += self.text.count("\n", self.place, self.place + count)
        self.place += count

    def _skip_line(self) -> None:
        end = self.text.find("\n", self.place)
        self._skip((len(self.text) if end < 0 else end) - self.place)

    def _read_document(self, name: str) -> str:
        lines = []
        while self.place < len(self.text):
            end = self.text.find("\n", self.place)
            line = self.text[self.place : len(self.text) if end < 0 else end]
            self._skip(len(line) + 1)
            if line.strip("\t ") == name:
                break
            lines.append(line)
        return "\n".join(lines)

    def _read_target(self) -> str:
        while self.text[self.place : self.place + 1] in (" ", "\t"):
            self._skip(1)
        return self._read_word() if self.place < len(self.text) and self.text[self.place] not in "\n;&|" else ""

    def _read_word(self, *, in_test: bool = False) -> str:
        start = self.place
        while self.place < len(self.text):
            char = self.text[self.place]
            if char == "\\":
                self._skip(2)
            elif char in "'\"`":
                self._read_quoted(char)
            elif self.text.startswith(("$(", "${"), self.place):
                self._skip(1)
                self._read_balanced(char := self.text[self.place], ")" if char == "(" else "}")
            elif char == "(" and self.place > start and self.text[self.place - 1] == "=":
                self._read_balanced("(", ")")  # an array
            elif char in " \t\n;" or (char in "&|()<>" and not in_test):
                break
            else:
                self._skip(1)
        if self.place == start:
            self._skip(1)
        return self.text[start : self.place].replace("\\\n", "")

    def _read_quoted(self, quote: str) -> None:
        first = self.line
        self._skip(1)
        while self.place < len(self.text):
            char = self.text[self.place]
            if char == quote:
                return self._skip(1)
            if char == "\\" and quote != "'":
                self._skip(1)
            elif quote == '"' and self.text.startswith(("$(", "${"), self.place):
                self._skip(1)
                self._read_balanced(inner := self.text[self.place], ")" if inner == "(" else "}")
                continue
            self._skip(1)
        raise ConfigError([f"the command line cannot be read: No closing quotation ({quote}) of line {first}"])

    def _read_balanced(self, opening: str, closing: str) -> str:
        """Skip to the end of a bracket, and return its inner text."""
        first, depth, start = self.line, 0, self.place + len(opening)
        while self.place < len(self.text):
            char = self.text[self.place]
            if self.text.startswith(closing, self.place) and depth == 1:
                inner = self.text[start : self.place]
                self._skip(len(closing))
                return inner
            if char == "\\":
                self._skip(2)
                continue
            if char in "'\"`" and not (char == "'" and opening == "{"):
                self._read_quoted(char)
                continue
            if char == "#" and self.text[self.place - 1] in " \t\n" and opening == "(":
                self._skip_line()
                continue
            if self.text.startswith(opening, self.place):
                depth += 1
                self._skip(len(opening))
                continue
            depth -= char == closing
            self._skip(1)
        raise ConfigError([f"the command line cannot be read: {opening} of line {first} is not closed"])


# ------------------------------------------------------------------------------------------------------------------ parser


@dataclass(frozen=True)
class _Node:
    """A command or a construct.

    Attributes:
        kind: "simple", "if", "for", "while", "case", "function" or "group".
        words: with their quotes.
        link: operator before it: ";", "&&", "||" or "|".
        parts: lists of nodes: for "if" conditions and bodies in turn, the last without a condition is else.
        patterns: of "case", one list of patterns a body.
    """

    kind: str
    line: int
    words: tuple[str, ...] = ()
    link: str = ";"
    parts: tuple[list[_Node], ...] = ()
    patterns: tuple[tuple[str, ...], ...] = ()


@dataclass
class _Parser:
    """Builds nodes of tokens."""

    tokens: list[_Token]
    place: int = 0

    def parse_list(self, ends: tuple[str, ...]) -> list[_Node]:
        """Return the commands up to one of these words, which is not taken."""
        nodes: list[_Node] = []
        link = ";"
        while self.place < len(self.tokens):
            token = self.tokens[self.place]
            if token.text in ends and (not token.is_operator or token.text in (")", ";;")):
                return nodes
            if token.is_operator and token.text not in ("(",):
                self.place += 1
                link = token.text if token.text in ("&&", "||", "|") else link if token.text == "\n" and link != ";" else ";"
                continue
            nodes.append(self._parse_command(link))
            link = ";"
        if ends:
            raise ConfigError([f"the script ends before {' or '.join(ends)}"])
        return nodes

    def _parse_command(self, link: str) -> _Node:
        token = self.tokens[self.place]
        word, line = token.text, token.line
        following = self.tokens[self.place + 1 : self.place + 3]
        if word == "if":
            return _Node("if", line, link=link, parts=tuple(self._parse_if()))
        if word in ("for", "while", "until"):
            self.place += 1
            words = self._take_words() if word == "for" else ()
            condition = [] if word == "for" else self.parse_list(("do",))
            if word == "for":
                self._skip_separators()
            self._take("do")
            body = self.parse_list(("done",))
            self._take("done")
            return _Node("for" if word == "for" else "while", line, words, link, (condition, body))
        if word == "case":
            return self._parse_case(link)
        if word in ("{", "("):
            self.place += 1
            end = "}" if word == "{" else ")"
            body = self.parse_list((end,))
            self._take(end)
            return _Node("group", line, (word,), link, (body,))
        if word == "function" or [item.text for item in following] == ["(", ")"]:
            self.place += 1 if word == "function" else 0
            name = self.tokens[self.place].text
            self.place += 1
            while self.place < len(self.tokens) and self.tokens[self.place].text in ("(", ")", "\n"):
                self.place += 1
            return _Node("function", line, (name,), link, ([self._parse_command(";")],))
        return _Node("simple", line, self._take_words(), link)

    def _parse_if(self) -> Iterator[list[_Node]]:
        while self.tokens[self.place].text in ("if", "elif"):
            self.place += 1
            yield self.parse_list(("then",))
            self._take("then")
            yield self.parse_list(("elif", "else", "fi"))
        if self.tokens[self.place].text == "else":
            self.place += 1
            yield self.parse_list(("fi",))
        self._take("fi")

    def _parse_case(self, link: str) -> _Node:
        line = self.tokens[self.place].line
        self.place += 1
        subject = self.tokens[self.place].text
        self.place += 1
        self._skip_separators()
        self._take("in")
        self._skip_separators()
        bodies, patterns = [], []
        while self.place < len(self.tokens) and self.tokens[self.place].text != "esac":
            names: list[str] = []
            while self.place < len(self.tokens) and self.tokens[self.place].text != ")":
                token = self.tokens[self.place]
                names += [] if token.is_operator else [token.text]
                self.place += 1
            self._take(")")
            patterns.append(tuple(names))
            bodies.append(self.parse_list((";;", "esac")))
            if self.place < len(self.tokens) and self.tokens[self.place].text == ";;":
                self.place += 1
            self._skip_separators()
        self._take("esac")
        return _Node("case", line, (subject,), link, tuple(bodies), tuple(patterns))

    def _take_words(self) -> tuple[str, ...]:
        words = []
        while self.place < len(self.tokens) and not self.tokens[self.place].is_operator:
            words.append(self.tokens[self.place].text)
            self.place += 1
        if not words:
            self.place += 1
        return tuple(words)

    def _skip_separators(self) -> None:
        while self.place < len(self.tokens) and self.tokens[self.place].text in ("\n", ";"):
            self.place += 1

    def _take(self, word: str) -> None:
        if self.place >= len(self.tokens) or self.tokens[self.place].text != word:
            line = self.tokens[min(self.place, len(self.tokens) - 1)].line
            raise ConfigError([f"line {line} of the script: {word!r} is missing"])
        self.place += 1


# ------------------------------------------------------------------------------------------------------------- interpreter

_Variable = str | list[str] | dict[str, str]
#: text is split at blanks unless it is quoted, a list has a word an item, words are split already
_Expansion = Literal["text", "list", "words"]
_DEFAULT = re.compile(r"(:?)([-=+?])(.*)", re.DOTALL)
#: text that stands for a value which the user writes, such as "your model ckpt path"
_PLACEHOLDER = re.compile(r"<?your(?:[ _-]\w+){1,6}>?")
_QUOTED = re.compile(r"""['"\\]""")
_ARITHMETIC: dict[type[ast.operator] | type[ast.cmpop] | type[ast.boolop], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Mod: operator.mod,
    ast.FloorDiv: operator.floordiv,
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.And: lambda a, b: int(bool(a and b)), ast.Or: lambda a, b: int(bool(a or b)),
    ast.LShift: operator.lshift, ast.RShift: operator.rshift,
}  # fmt: skip
#: launcher -> its options that give the command a variable
_VARIABLE_OPTIONS = {
    **dict.fromkeys(("docker", "podman", "nerdctl", "nvidia-docker"), ("-e", "--env")),
    **dict.fromkeys(("mpirun", "mpiexec"), ("-x",)),
    "srun": ("--export",),
}
_SHELLS = frozenset(("bash", "sh", "zsh", "dash", "ksh"))
#: options of ssh that take a word
_SSH_WORDS = frozenset(f"-{letter}" for letter in "BbcDEeFIiJLlmOopQRSWw")
_STEP = re.compile(r"\s*([A-Za-z_]\w*)\s*(?:(\+\+|--)|([-+*/%]?)=(?!=)(.*))\s*", re.DOTALL)
_COMPARISONS = {"-eq": "==", "-ne": "!=", "-lt": "<", "-le": "<=", "-gt": ">", "-ge": ">="}


@dataclass
class _Interpreter:
    """Follows the variables of a script, and collects its commands."""

    known: dict[str, str]
    folder: Path | None = None
    variables: dict[str, _Variable] = field(default_factory=dict)
    exported: set[str] = field(default_factory=set)
    functions: dict[str, list[_Node]] = field(default_factory=dict)
    commands: list[Command] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    inner_runs: list[int] = field(default_factory=lambda: [0])
    uncertain: str = ""
    loop: str = ""
    directory: str = ""
    line: int = 1
    depth: int = 0

    # --- statements

    def run(self, nodes: list[_Node]) -> bool | None:
        """Follow the commands; return the status of the last one: None where only the machine knows it."""
        status: bool | None = True
        for node in nodes:
            if (node.link == "&&" and status is False) or (node.link == "||" and status is True):
                continue
            if node.link in ("&&", "||") and status is None:
                self._run_uncertain([[node]], f"line {node.line}")
                continue
            self.line = node.line
            status = self._run_node(node)
        return status

    def _run_node(self, node: _Node) -> bool | None:
        if node.kind == "if":
            return self._run_if(node)
        if node.kind == "for":
            return self._run_for(node)
        if node.kind == "while":
            # its body depends on what changes while it runs
            self._run_uncertain([node.parts[1]], f"the loop of line {node.line}")
            return True
        if node.kind == "case":
            return self._run_case(node)
        if node.kind == "function":
            self.functions[node.words[0]] = node.parts[0]
            return True
        if node.kind == "group":
            return self._run_subshell(node.parts[0]) if node.words == ("(",) else self.run(node.parts[0])
        return self._run_simple(node)

    def _run_subshell(self, nodes: list[_Node]) -> bool | None:
        """Follow commands in brackets, whose folder, variables and functions end with them."""
        outer = self.directory, dict(self.variables), set(self.exported), dict(self.functions)
        status = self.run(nodes)
        self.directory, self.variables, self.exported, self.functions = outer
        return status

    def _run_if(self, node: _Node) -> bool | None:
        parts = list(node.parts)
        while len(parts) >= 2:
            count = len(self.commands)
            status = self.run(parts[0])
            if status is None or len(self.commands) > count:  # only the machine knows how a program ends
                bodies = parts[1::2] + ([parts[-1]] if len(parts) % 2 else [[]])
                words = [word for part in parts[0] for word in part.words]
                unknown = [item for word in words for text in self.expand(word) for item in list_unknown(text)]
                self._run_uncertain(bodies, _name_condition("condition", node.line, unknown), unknown)
                return True
            if status:
                return self.run(parts[1])
            parts = parts[2:]
        return self.run(parts[0]) if parts else True

    def _run_for(self, node: _Node) -> bool | None:
        name, *words = node.words
        if name.startswith("(("):
            self._run_uncertain([node.parts[1]], f"the loop of line {node.line}")
            return True
        items = [item for word in words[1:] for item in self.expand(word)]
        if name in self.known:  # each run would have the value of the user
            items = items[:1]
        outer = self.loop
        for index, item in enumerate(items[:_MAX_ITEMS]):
            if len(items) > 1 and not outer:
                runs = f"run {index + 1} of {len(items)} of the loop over {name} in line {node.line}: {name}={item}"
                self.loop = f"{runs}; --set {name}=VALUE imports another"
            self.variables[name] = item
            self.run(node.parts[1])
        self.loop = outer
        return True

    def _run_case(self, node: _Node) -> bool | None:
        value = " ".join(self.expand(node.words[0]))
        if unknown := list_unknown(value):
            self._run_uncertain([*node.parts, []], _name_condition("case", node.line, unknown), unknown)
            return True
        for patterns, body in zip(node.patterns, node.parts):
            if any(fnmatch.fnmatchcase(value, " ".join(self.expand(pattern))) for pattern in patterns):
                return self.run(body)
        return True

    def _run_uncertain(self, bodies: list[list[_Node]], condition: str, causes: Sequence[tuple[str, int]] = ()) -> None:
        """Follow every body; variables that they leave with different values are unknown after them.

        Args:
            causes: unknown variables of the condition: their values are requested, not those that follow from them.
        """
        before, outer = dict(self.variables), self.uncertain
        results = []
        for body in bodies:
            self.variables, self.uncertain = dict(before), outer or condition
            self.run(body)
            results.append(self.variables)
        self.uncertain = outer
        if len(bodies) == 1:
            results.append(before)
        names = {name for result in results for name in result}
        equal = {name for name in names if all(result.get(name) == results[0].get(name) for result in results)}
        cause = "".join(f"\0{name}@{line}\0" for name, line in causes[:1])
        self.variables = {name: results[0][name] if name in equal else cause or self._mark(name) for name in names}

    def _run_simple(self, node: _Node) -> bool | None:
        words = [word for word in node.words if not word.startswith("\1")]
        stdin, output = self._read_redirections([word for word in node.words if word.startswith("\1")])
        assignments = []
        if words[:1] == ["time"]:  # a word of the shell, before variables of the command
            words = words[2:] if words[1:2] == ["-p"] else words[1:]
        while words and (match := _ASSIGNMENT.fullmatch(words[0])):
            assignments.append(match)
            words.pop(0)
        if not words:
            for match in assignments:
                self._assign(match)
            return True
        if words[0] in ("[", "[[", "test") or words[0].startswith("(("):
            return self._test(words)
        if words[0] in _DECLARING:
            return self._declare(words)
        expanded = [item for word in words for item in self.expand(word)]
        if not expanded:
            return True
        name = expanded[0]
        if name in ("true", ":", "false"):
            return name != "false"
        if name in self.functions and self.depth < _MAX_DEPTH:
            return self._call(name, expanded[1:])
        if name in ("source", ".") and len(expanded) > 1 and self.folder is not None and self.depth < _MAX_DEPTH:
            path = self.folder / expanded[1]
            # a file that is not here, such as a virtual environment of that machine, sets what the script may request
            if not list_unknown(expanded[1]) and path.is_file():
                text = path.read_text(encoding="utf-8")
                # with words behind it they are its arguments, without any it has the script's
                follow = partial(self._include, text)
                return self._with_arguments(expanded[2:], follow) if len(expanded) > 2 else follow()
        if (status := self._run_builtin(name, expanded[1:], stdin, output)) is not None:
            return status
        if self.depth < _MAX_DEPTH and (inner := self._find_inner(expanded, stdin)) is not None:
            text, arguments, keeps = inner
            front = {match.group(1): " ".join(self.expand(match.group(4))) for match in assignments}
            front |= _read_launcher_variables(expanded)
            return self._run_inner(text, arguments, front, keeps=keeps)
        if name == "shift":
            rest = self.variables.get("@", [])
            items = list(rest)[int(expanded[1]) if expanded[1:] and expanded[1].isdigit() else 1 :]
            self._set_arguments(items)
            return True
        if name == "unset":
            for item in expanded[1:]:
                self.variables.pop(item, None)
            return True
        front = {match.group(1): " ".join(self.expand(match.group(4))) for match in assignments}
        front |= _read_launcher_variables(expanded)
        exported = {key: self._value(key) for key in sorted(self.exported) if key in self.variables or key in self.known}
        environment = {**exported, **{key: self.known.get(key, value) for key, value in front.items()}}
        if name == "cd" and len(expanded) > 1 and not list_unknown(expanded[1]) and not expanded[1].startswith("-"):
            self.directory = str(Path(self.directory, expanded[1]))
        self.commands.append(
            Command(
                tuple(expanded), environment, node.line, self.uncertain, self.folder, self.directory, stdin, self.loop
            )  # fmt: skip
        )
        return True

    def _read_redirections(self, marked: list[str]) -> tuple[str | None, tuple[str, str] | None]:
        """Return the text that a command reads, and how and where it writes; None where it has no such redirection."""
        stdin: str | None = None
        output: tuple[str, str] | None = None
        for word in marked:
            kind, text = word[: word.index("\1", 1) + 1], word[word.index("\1", 1) + 1 :]
            if kind == _OUTPUT:
                way, _, target = text.partition(" ")
                output = way, " ".join(self.expand(target, splits=False))
            elif kind == _INPUT:
                stdin = text
            elif kind == _INPUT_WORD:
                stdin = " ".join(self.expand(text, splits=False))
            else:
                # as in double quotes, but that a quote is one like any other character
                quoted = re.sub(r'(\\*)"', lambda match: f'{match.group(1) * 2}\\"', text)
                try:
                    stdin = " ".join(self.expand(f'"{quoted}"', splits=False))
                except ConfigError:  # what bash cannot expand either matters only where something reads it
                    stdin = text
        return stdin, output

    def _run_builtin(self, name: str, words: list[str], stdin: str | None, output: tuple[str, str] | None) -> bool | None:
        """Follow a command that sets variables or writes a file; return its status, None for other commands."""
        if name == "set" and "--" in words[:1]:
            self._set_arguments(words[1:])
        elif name == "let":
            for word in words:
                self._step(word)
        elif name == "printf" and words[:1] == ["-v"] and len(words) > 2:
            self.variables[words[1]] = _format(words[2:])
        elif name in ("read", "mapfile", "readarray") and stdin is not None:
            self._read_input(name, words, stdin)
        elif name == "eval" and self.depth < _MAX_DEPTH:
            return bool(self._include(" ".join(words)))
        elif name in ("cat", "tee", "echo", "printf"):
            named = next((word for word in words if not word.startswith("-")), None) if name == "tee" else None
            way, target = output or ("", named) if stdin is not None or name != "tee" else ("", None)
            if target is None or (name == "cat" and (words or stdin is None)):
                return None
            said = [word for word in words if word not in ("-n", "-e")]
            text = stdin or "" if name in ("cat", "tee") else " ".join(said) if name == "echo" else _format(said)
            target = os.path.normpath(target)
            self.files[target] = f"{self.files.get(target, '')}{text}\n" if way == ">>" else f"{text}\n"
        else:
            return None
        return True

    def _read_input(self, name: str, words: list[str], stdin: str) -> None:
        """Set the variables of `read`, `mapfile` and `readarray`."""
        takes = {"-d", "-n", "-N", "-p", "-t", "-u", "-i"} - ({"-t"} if name != "read" else set())
        names, options, place = [], [], 0
        while place < len(words):
            options += [words[place]] if words[place].startswith("-") else []
            names += [words[place]] if not words[place].startswith("-") else []
            place += 2 if words[place][:1] == "-" and words[place][-1:] in {item[-1] for item in takes} else 1
        letters = "".join(option[1:] for option in options)
        if name != "read":
            self.variables[(names or ["MAPFILE"])[0]] = stdin.splitlines()
            return
        text = stdin if "d" in letters else stdin.partition("\n")[0]
        if "a" in letters and names:
            self.variables[names[0]] = text.split()
            return
        names = names or ["REPLY"]
        items = text.split(None, len(names) - 1) if len(names) > 1 else [text.strip()]
        self.variables |= dict(zip(names, [*items, *[""] * len(names)]))

    def _find_inner(self, words: list[str], stdin: str | None) -> tuple[str, list[str], bool] | None:
        """Return the script that a command runs, its arguments, and whether it is on this machine; None for other commands.

        That is the text of `bash -c`, a file, the input of a shell, or the command of ssh, whatever starts it.
        """
        for place, word in enumerate(words[:-1]):
            if Path(word).name in _SHELLS:
                rest = words[place + 1 :]
                flags = [item for item in rest if item.startswith("-")]
                if rest[0].startswith("-") and any("c" in flag for flag in flags[:3] if not flag.startswith("--")):
                    texts = [item for item in rest if not item.startswith("-")]
                    return (texts[0], texts[2:], place == 0) if texts and not list_unknown(texts[0]) else None
                break
        if words[0] == "ssh":
            place = 1
            while place < len(words) and words[place].startswith("-"):
                place += 2 if words[place] in _SSH_WORDS else 1
            command = " ".join(words[place + 1 :]) or stdin
            return (command, [], False) if command else None
        if Path(words[-1]).name in _SHELLS and stdin is not None:
            return stdin, [], len(words) == 1
        is_shell = Path(words[0]).name in _SHELLS
        names = [word for word in words[1:] if not word.startswith("-")] if is_shell else words
        if names and (is_shell or names[0].endswith(".sh")) and (text := self._read_file(names[0])) is not None:
            return text, names[1:], True
        return None

    def _read_file(self, name: str) -> str | None:
        """Return the text of a file that the script has written, or that is next to it; None where it is not here."""
        if os.path.normpath(name) in self.files:
            return self.files[os.path.normpath(name)]
        if list_unknown(name) or self.folder is None:
            return None
        path = self.folder / self.directory / name
        try:
            return path.read_text(encoding="utf-8") if path.is_file() else None
        except (OSError, ValueError):
            return None

    def _run_inner(self, text: str, arguments: list[str], front: Mapping[str, str], *, keeps: bool) -> bool:
        """Follow a script that a command runs.

        Args:
            front: variables in front of the command.
            keeps: it is on this machine, and has the exported variables.
        """
        self.inner_runs[0] += 1
        if self.inner_runs[0] > _MAX_ITEMS:
            raise ConfigError([f"line {self.line}: the script runs more than {_MAX_ITEMS} others"])
        exported = {key: self.variables[key] for key in self.exported if key in self.variables} if keeps else {}
        inner = _Interpreter(
            self.known, self.folder, {**exported, **front}, set(exported) | set(front), files=self.files,
            inner_runs=self.inner_runs, uncertain=self.uncertain, loop=self.loop,
            directory=self.directory if keeps else "", depth=self.depth + 1,
        )  # fmt: skip
        inner._set_arguments(arguments)
        inner.run(_Parser(_Reader(text.replace("\r\n", "\n")).read_tokens()).parse_list(()))
        # lines of its own text say nothing in this script
        self.commands += [replace(command, line=self.line) for command in inner.commands]
        return True

    def _step(self, text: str) -> str:
        """Follow an arithmetic expression that may set a variable; return its value."""
        match = _STEP.fullmatch(text)
        if match is None:
            return self._compute(text)
        name, step, sign, rest = match.groups()
        expression = f"{name} {step[0]} 1" if step else f"{name} {sign} ({rest})" if sign else rest
        value = self._compute(expression)
        if name not in self.known:
            self.variables[name] = value
        return value

    def _include(self, text: str) -> bool | None:
        """Follow the commands of a sourced file."""
        self.depth += 1
        status = self.run(_Parser(_Reader(text.replace("\r\n", "\n")).read_tokens()).parse_list(()))
        self.depth -= 1
        return status

    def _call(self, name: str, arguments: list[str]) -> bool | None:
        return self._with_arguments(arguments, partial(self._run_function, name))

    def _run_function(self, name: str) -> bool | None:
        self.depth += 1
        status = self.run(self.functions[name])
        self.depth -= 1
        return status

    def _with_arguments(self, arguments: list[str], follow: Callable[[], bool | None]) -> bool | None:
        """Follow what has arguments of its own; those of the script are as before afterwards."""
        outer = {key: self.variables.get(key) for key in ("@", "*", "#", *map(str, range(1, 10)))}
        self._set_arguments(arguments)
        status = follow()
        for key, value in outer.items():
            self.variables.pop(key, None)
            if value is not None:
                self.variables[key] = value
        return status

    def _set_arguments(self, arguments: list[str]) -> None:
        for index in range(1, 10):
            self.variables.pop(str(index), None)
        self.variables |= {"@": arguments, "*": arguments, "#": str(len(arguments))}
        self.variables |= {str(index): item for index, item in enumerate(arguments, 1)}

    def _declare(self, words: list[str]) -> bool:
        maps = any(word.startswith("-") and "A" in word for word in words[1:])
        for word in words[1:]:
            match = _ASSIGNMENT.fullmatch(word)
            if maps and not word.startswith("-"):
                self.variables.setdefault(word.partition("=")[0], {})
            name = word if match is None else match.group(1)
            if match is not None:
                self._assign(match)
            if words[0] == "export" and _NAME.fullmatch(name):
                self.exported.add(name)
        return True

    def _assign(self, match: re.Match[str]) -> None:
        name, index, plus, text = match.groups()
        if name in self.known:
            return
        old = self.variables.get(name)
        value: _Variable
        if isinstance(old, dict):
            pairs = re.findall(r"\[([^\]]*)\]=((?:\"[^\"]*\"|'[^']*'|[^\s)])*)", text) if index is None else [(index, text)]
            read = {" ".join(self.expand(key)): " ".join(self.expand(item, splits=False)) for key, item in pairs}
            value = {**old, **read} if plus or index is not None else read
        elif text.startswith("(") and text.endswith(")"):
            tokens = _Reader(text[1:-1]).read_tokens()
            value = [item for token in tokens if not token.is_operator for item in self.expand(token.text)]
            if plus:
                value = [*(old if isinstance(old, list) else [old] if old else []), *value]
        elif index is not None:
            items = list(old) if isinstance(old, list) else []
            place = int(index) if index.isdigit() else 0
            items += [""] * (place + 1 - len(items))
            items[place] = " ".join(self.expand(text))
            value = items
        else:
            value = " ".join(self.expand(text, splits=False))
            if _PLACEHOLDER.fullmatch(value):
                value = self._mark(name)
            # the output of a program is requested by the name of the variable that takes it
            value = re.sub("\0line_\\d+@", f"\0{name}@", value)
            if plus and isinstance(old, list):
                value = [old[0] + value, *old[1:]] if old else [value]
            elif plus and isinstance(old, str):
                value = old + value
        self.variables[name] = value

    # --- conditions

    def _test(self, words: list[str]) -> bool | None:
        if words[0].startswith("(("):
            value = self._step(words[0][2:-2])
            return None if list_unknown(value) else value != "0"
        stripped = [word for word in words[1:] if word not in ("]", "]]")]
        return self._test_words(stripped)

    def _test_words(self, words: list[str]) -> bool | None:
        for separators, is_or in ((("||", "-o"), True), (("&&", "-a"), False)):
            for separator in separators:
                if separator in words:
                    place = words.index(separator)
                    sides = [self._test_words(words[:place]), self._test_words(words[place + 1 :])]
                    if is_or:
                        return True if True in sides else None if None in sides else False
                    return False if False in sides else None if None in sides else True
        if words[:1] == ["!"]:
            status = self._test_words(words[1:])
            return None if status is None else not status
        texts = [" ".join(self.expand(word, splits=False, blank_unset=True)) for word in words]
        if len(texts) == 2 and texts[0] in ("-z", "-n"):
            return None if list_unknown(texts[1]) else (texts[1] == "") == (texts[0] == "-z")
        if any(list_unknown(text) for text in texts) or (texts and texts[0].startswith("-") and len(texts) == 2):
            return None  # a file test, or a value that only the machine knows
        if len(texts) == 1:
            return texts[0] != ""
        if len(texts) == 3:
            first, comparison, second = texts
            if comparison in ("=", "=="):
                return fnmatch.fnmatchcase(first, second)
            if comparison == "!=":
                return not fnmatch.fnmatchcase(first, second)
            if comparison in _COMPARISONS:
                value = self._compute(f"{first or 0} {_COMPARISONS[comparison]} {second or 0}")
                return None if list_unknown(value) else value == "1"
        return None

    # --- expansions

    def expand(self, word: str, *, splits: bool = True, blank_unset: bool = False) -> list[str]:
        """Return the words that a word with quotes and variables becomes."""
        words: list[str] = []
        current: list[str] = []  # empty: there is no word yet
        place = 0

        def add(items: list[str], kind: _Expansion, *, quoted: bool) -> None:
            if kind != "list" and (quoted or not splits):
                current.append(" ".join(items))
                return
            parts = items if quoted or kind == "words" else [part for item in items for part in item.split()]
            for index, part in enumerate(parts):
                if index:
                    words.append("".join(current))
                    current.clear()
                current.append(part)

        while place < len(word):
            char = word[place]
            if char == "\\":
                current.append(word[place + 1 : place + 2])
                place += 2
            elif char == "'":
                end = word.index("'", place + 1)
                current.append(word[place + 1 : end])
                place = end + 1
            elif char == '"':
                end = self._find_quote(word, place + 1)
                inner, position = word[place + 1 : end], 0
                current.append("")
                while position < len(inner):
                    if inner[position] == "\\" and inner[position + 1 : position + 2] in ("$", "`", '"', "\\", "\n"):
                        current.append(inner[position + 1].replace("\n", ""))
                        position += 2
                    elif inner[position] in "$`":
                        items, kind, position = self._expand_dollar(inner, position, blank_unset=blank_unset)
                        add(items, kind, quoted=True)
                    else:
                        current.append(inner[position])
                        position += 1
                place = end + 1
            elif char in "$`":
                items, kind, place = self._expand_dollar(word, place, blank_unset=blank_unset)
                add(items, kind, quoted=False)
            else:
                current.append(char)
                place += 1
        return [*words, "".join(current)] if current else words

    def _find_quote(self, word: str, place: int) -> int:
        reader = _Reader(word)
        reader.place = place - 1
        reader._read_quoted('"')
        return reader.place - 1

    def _expand_dollar(self, text: str, place: int, *, blank_unset: bool) -> tuple[list[str], _Expansion, int]:
        """Return the words of an expansion, their kind, and the place after it."""
        reader = _Reader(text)
        if text[place] == "`":
            end = text.index("`", place + 1)
            return [self._substitute(text[place + 1 : end])], "text", end + 1
        reader.place = place + 1
        if text.startswith("$((", place):
            inner = reader._read_balanced("(", ")")
            return [self._compute(inner[1:-1])], "text", reader.place
        if text.startswith("$(", place):
            return [self._substitute(reader._read_balanced("(", ")"))], "text", reader.place
        if text.startswith("${", place):
            items, kind = self._expand_braces(reader._read_balanced("{", "}"), blank_unset=blank_unset)
            return items, kind, reader.place
        if text.startswith("$'", place):
            end = text.index("'", place + 2)
            return [text[place + 2 : end].replace("\\n", "\n").replace("\\t", "\t")], "words", end + 1
        match = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]").match(text, place + 1)
        if match is None:
            return ["$"], "text", place + 1
        name = match.group()
        if name in ("@", "*"):
            return list(self.variables.get("@", [])), "list", match.end()
        return [self._value(name, blank_unset=blank_unset)], "text", match.end()

    def _change_items(self, name: str, items: list[str], rest: str) -> list[str]:
        """Return the items of an array that a slice leaves, or with the change that an expansion makes in each."""
        if cut := re.fullmatch(r":\s*(\d+|\$\w+)(?::\s*(\d+|\$\w+))?", rest):
            bounds = [self._compute(bound) if bound else None for bound in cut.groups()]
            if any(list_unknown(bound) for bound in bounds):
                return [str(next(bound for bound in bounds if list_unknown(bound)))]
            # the first of the arguments is $1, and $0 is the script
            start = max(0, int(bounds[0] or 0) - (name in ("@", "*")))
            return items[start : None if bounds[1] is None else start + int(bounds[1])]
        if rest and rest[0] in "#%/^,":
            return [" ".join(self._modify(name, item, rest, blank_unset=True)) for item in items]
        return items

    def _expand_braces(self, text: str, *, blank_unset: bool) -> tuple[list[str], _Expansion]:
        match = re.match(r"([#!]?)([A-Za-z_]\w*|[0-9@*]+)(?:\[([^\]]*)\])?(.*)", text, re.DOTALL)
        if match is None:
            return [self._mark(text)], "text"
        flag, name, index, rest = match.groups()
        value: _Variable | None = self.known.get(name, self.variables.get(name))
        if name in ("@", "*"):
            value, index = self.variables.get("@", []), "@"
        if isinstance(value, dict):
            if index in ("@", "*"):
                entries = list(value) if flag == "!" else list(value.values())
                return ([str(len(entries))], "text") if flag == "#" else (entries, "list")
            value = value.get(" ".join(self.expand(index or "0")), "")
            flag = "" if flag == "!" else flag
        if index in ("@", "*"):
            items = value if isinstance(value, list) else [] if value is None and blank_unset else None
            items = ([self._mark(name)] if value is None else [str(value)]) if items is None else items
            if flag == "#":
                return [str(len(items))], "text"
            items = self._change_items(name, items, rest)
            return (items, "list") if index == "@" else ([" ".join(items)], "text")
        if isinstance(value, list):
            computed = self._compute(index or "0")
            if list_unknown(computed):
                return [computed], "text"
            place = int(computed)
            value = value[place] if -len(value) <= place < len(value) else ""
        if name in ("BASH_SOURCE", "0") and value is None:
            value = "script.sh"
        if flag == "!":
            value = self._value(str(value), blank_unset=blank_unset)
        if flag == "#":
            return [str(len(self._value(name, blank_unset=blank_unset) if value is None else value))], "text"
        items = self._modify(name, value, rest, blank_unset=blank_unset)
        return items, "words" if _DEFAULT.match(rest) and _QUOTED.search(rest) else "text"

    def _modify(self, name: str, value: str | None, rest: str, *, blank_unset: bool) -> list[str]:
        """Return the words of `${name<rest>}`; several only for a default."""
        default = _DEFAULT.match(rest)
        if default is not None:
            colon, kind, text = default.groups()
            is_set = value is not None and not (colon and value == "")
            if is_set and kind != "+":
                return [value or ""]
            if kind == "?":
                return [self._mark(name)]
            if kind == "+" and not is_set:
                return []
            if kind == "=" and name not in self.known:
                self.variables[name] = " ".join(self.expand(text, splits=False))
            if not _QUOTED.search(text):
                return [" ".join(self.expand(text, splits=False))]
            # quotes are taken off, and hold words together
            return [item for token in _Reader(text).read_tokens() for item in self.expand(token.text)]
        text = self._value(name, blank_unset=blank_unset) if value is None else value
        if not rest or list_unknown(text):
            return [text]
        if change := re.match(r"(%%|%|##|#)(.*)", rest, re.DOTALL):
            pattern = " ".join(self.expand(change.group(2), splits=False))
            return [_cut(text, pattern, from_end=change.group(1)[0] == "%", longest=len(change.group(1)) == 2)]
        if change := re.match(r"(//?)([^/]*)/?(.*)", rest, re.DOTALL):
            old, new = (" ".join(self.expand(item, splits=False)) for item in change.groups()[1:])
            return [text.replace(old, new) if change.group(1) == "//" else text.replace(old, new, 1)]
        if change := re.fullmatch(r":\s*(\d+)(?::(\d+))?", rest):
            start, length = int(change.group(1)), change.group(2)
            return [text[start:] if length is None else text[start : start + int(length)]]
        if rest in ("^^", ",,"):
            return [text.upper() if rest == "^^" else text.lower()]
        return [self._mark(name)]

    def _value(self, name: str, *, blank_unset: bool = False) -> str:
        value = self.known.get(name, self.variables.get(name))
        if isinstance(value, list):
            return value[0] if value else ""
        if isinstance(value, dict):
            return value.get("0", "")
        if value is None:
            special = {"0": "script.sh", "#": "0", "?": "0", "$": "1", "!": "1", "-": ""}
            return special[name] if name in special else "" if blank_unset and name.isdigit() else self._mark(name)
        return value

    def _mark(self, name: str) -> str:
        return f"\0{name}@{self.line}\0"

    def _substitute(self, text: str) -> str:
        """Return the output of the few commands that can be known; a mark named after the line for others."""
        inner = _Interpreter(self.known, self.folder, dict(self.variables), line=self.line, depth=self.depth + 1)
        if self.depth >= _MAX_DEPTH:
            return self._mark(f"line_{self.line}")
        nodes = _Parser(_Reader(text).read_tokens()).parse_list(())
        if not nodes:
            return ""  # a comment
        inner.run(nodes)
        words = [[word for word in command.words if word != "--"] for command in inner.commands]
        programs = [item[0] for item in words]
        if len(words) == 1 and programs[0] == "printf":
            return _format(words[0][1:])
        if programs[:1] in (["echo"], ["printf"]) and programs[1:] in ([], ["bc"]):
            said = [word for word in words[0][1:] if word not in ("-n", "-e")]
            if programs[1:] and any("scale" in word or "." in word for word in said):
                return self._mark(f"line_{self.line}")
            return self._compute(" ".join(said)) if programs[1:] else " ".join(said)
        if programs == ["bc"] and inner.commands[0].input is not None:
            return self._compute(inner.commands[0].input)
        if programs == ["cat"] and len(words[0]) == 1 and inner.commands[0].input is not None:
            return inner.commands[0].input
        if programs == ["cat"] and len(words[0]) == 2 and (path := os.path.normpath(words[0][1])) in self.files:
            return self.files[path].rstrip("\n")
        if len(words) == 1 and programs[0] == "expr":
            return self._compute(" ".join(words[0][1:]))
        if len(words) == 1 and programs[0] in ("basename", "dirname") and len(words[0]) > 1:
            head, _, tail = words[0][1].rstrip("/").rpartition("/")
            return (head or ".") if programs[0] == "dirname" else tail.removesuffix(words[0][2] if len(words[0]) > 2 else "")
        if len(words) == 1 and programs[0] == "date":
            formats = [word[1:] for word in words[0][1:] if word.startswith("+")]
            return time.strftime(formats[0] if formats else "%Y-%m-%d")
        if programs[-1:] == ["pwd"]:
            return next((item[1] for item in words if item[0] == "cd" and len(item) > 1), self._value("PWD"))
        return self._mark(f"line_{self.line}")

    def _compute(self, text: str) -> str:
        """Return the value of an arithmetic expression of whole numbers; a mark where a variable is unknown."""
        text = " ".join(self.expand(text, splits=False))
        text = _NAME.sub(lambda match: self._value(match.group()) or "0", text) if "\0" not in text else text
        if unknown := list_unknown(text):
            return f"\0{unknown[0][0]}@{unknown[0][1]}\0"
        if choice := re.fullmatch(r"([^?]*)\?([^:]*):(.*)", text, re.DOTALL):
            text = "({1}) if ({0}) else ({2})".format(*choice.groups())
        python = text.replace("&&", " and ").replace("||", " or ").replace("/", "//").strip()
        try:
            return str(int(_evaluate(ast.parse(python or "0", mode="eval").body)))
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
            return self._mark(f"line_{self.line}")


def _evaluate(node: ast.expr) -> int:
    """Return the value of an expression of whole numbers.

    Raises:
        ValueError: it has another kind of part, or a number of absurd size.
    """
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd, ast.Not)):
        value = _evaluate(node.operand)
        return -value if isinstance(node.op, ast.USub) else int(not value) if isinstance(node.op, ast.Not) else value
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        first, second = _evaluate(node.left), _evaluate(node.right)
        if isinstance(node.op, ast.LShift) and second > 64:
            raise ValueError("too large")
        return _ARITHMETIC[type(node.op)](first, second)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        first, second = _evaluate(node.left), _evaluate(node.right)
        if abs(second) > 64:
            raise ValueError("too large")
        return int(first**second)
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _ARITHMETIC:
        return int(_ARITHMETIC[type(node.ops[0])](_evaluate(node.left), _evaluate(node.comparators[0])))
    if isinstance(node, ast.BoolOp):
        values = [bool(_evaluate(item)) for item in node.values]
        return int(all(values) if isinstance(node.op, ast.And) else any(values))
    if isinstance(node, ast.IfExp):
        return _evaluate(node.body if _evaluate(node.test) else node.orelse)
    raise ValueError("no whole number")


def _format(words: list[str]) -> str:
    """Return what `printf` writes: its format for each group of its arguments."""
    template = words[0].replace("\\n", "\n").replace("\\t", "\t") if words else ""
    parts = re.findall(r"%[-+ 0#]*\d*(?:\.\d+)?[sdifgeGxX%]", template)
    kinds = [item[-1] for item in parts if item[-1] != "%"]
    arguments, texts = list(words[1:]), []
    while True:
        taken = [arguments.pop(0) if arguments else "" for _ in kinds]
        try:
            given = [item if kind == "s" else float(item or 0) for item, kind in zip(taken, kinds)]
            texts.append(template % tuple(int(item) if kind in "dixX" else item for item, kind in zip(given, kinds)))
        except (TypeError, ValueError):
            texts.append(" ".join([template, *taken]))
        if not arguments or not kinds:
            return "".join(texts).rstrip("\n")


def _cut(text: str, pattern: str, *, from_end: bool, longest: bool) -> str:
    """Return a text without the prefix or suffix that a pattern matches."""
    sizes = range(len(text), -1, -1) if longest else range(len(text) + 1)
    for size in sizes:
        part = text[len(text) - size :] if from_end else text[:size]
        if fnmatch.fnmatchcase(part, pattern):
            return text[: len(text) - size] if from_end else text[size:]
    return text


# ------------------------------------------------------------------------------------------------------------------ values


def read_flags(words: list[str] | tuple[str, ...]) -> tuple[dict[str, list[str]], list[str]]:
    """Return the words of each `--name value ...` or `--name=value`, hyphens as underscores, and the words before the first.

    The last one of several of a name wins, as argparse has it.
    """
    options: dict[str, list[str]] = {}
    leading: list[str] = []
    name = ""
    for word in words:
        if re.match(r"--?[A-Za-z]", word):
            name, equals, value = word.lstrip("-").partition("=")
            name = name.replace("-", "_")
            options[name] = [value] if equals else []
        elif word.strip() and not name:
            leading.append(word)
        elif word.strip():
            options[name].append(word)
    return options, leading
