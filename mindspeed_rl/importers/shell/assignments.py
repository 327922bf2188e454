"""Assignments and declarations of a shell script."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace

from mindspeed_rl.config.errors import ConfigError
from mindspeed_rl.importers.shell.command import list_unknown, name_outputs
from mindspeed_rl.importers.shell.expansion import Expander
from mindspeed_rl.importers.shell.programs import list_braces
from mindspeed_rl.importers.shell.tokens import Reader, read_tokens
from mindspeed_rl.importers.shell.variables import NAME, Scope, Variable

_ASSIGNED = re.compile(r"(\+?)=(.*)", re.DOTALL)
_TARGET = re.compile(r"([A-Za-z_]\w*)(?:\[(.+)\])?", re.DOTALL)
_PAIR = re.compile(r"""\[((?:"[^"]*"|'[^']*'|[^]])*)\]\+?=(.*)""", re.DOTALL)
#: text that stands for a value which the user writes, such as "your model ckpt path"
_PLACEHOLDER = re.compile(r"<?your(?:[ _-][\w.]+){1,6}>?")
#: index of an array beyond which no script has items
_LARGEST_INDEX = 10_000


@dataclass(frozen=True)
class Assignment:
    """`name=text`, `name+=text` or `name[index]=text`, with its quotes."""

    name: str
    index: str | None
    adds: bool
    text: str


def read_assignment(word: str) -> Assignment | None:
    """Return the assignment that a word is; None for another word."""
    name = NAME.match(word)
    if name is None:
        return None
    place, index = name.end(), None
    if word[place : place + 1] == "[":
        reader = Reader(word, place)
        try:
            index = reader.read_balanced("[", "]")
        except ConfigError:
            return None
        place = reader.place
    match = _ASSIGNED.fullmatch(word, place)
    return None if match is None or index == "" else Assignment(name.group(), index, bool(match[1]), match[2])


class Assigner:
    """Sets the variables of a scope, whose values an expander reads."""

    def __init__(self, scope: Scope, words: Expander) -> None:
        self._scope, self._words = scope, words

    def store(self, target: str, value: str | list[str | None]) -> None:
        """Set a variable, or an item of an array, that a builtin has the name of."""
        match = _TARGET.fullmatch(target)
        if match is None:
            return
        name, index = match.groups()
        if index is None:
            self._scope.set(name, value)
        else:
            self.assign(Assignment(name, index, False, shlex.quote(value) if isinstance(value, str) else ""))

    def declare(self, words: list[str], hidden: dict[str, Variable | None] | None) -> None:
        """Follow a declaration.

        Args:
            words: with the command's name.
            hidden: name -> value before it, of the names that the running function has declared; None outside of functions.
        """
        flags = "".join(word for word in words[1:] if word.startswith(("-", "+")) and "=" not in word)
        is_local = words[0] in ("local", "declare", "typeset") and "g" not in flags
        listed = [(word, self._expand_declared(word, flags)) for word in self._list_declared(words[1:])]
        for word, match in listed:
            name = word if match is None else match.name
            if hidden is not None and is_local and NAME.fullmatch(name) and name not in hidden:
                hidden[name] = self._scope.variables.get(name)
                if match is None:
                    self._scope.variables.pop(name, None)
            if "A" in flags and not word.startswith("-"):
                self._scope.variables.setdefault(word.partition("=")[0], {})
            for letter, kept in (("l", self._scope.lower), ("u", self._scope.upper)):
                if letter in flags and words[0] != "export" and NAME.fullmatch(name):
                    kept.add(name)
            if "i" in flags and NAME.fullmatch(name):
                self._scope.whole.add(name)
            if "n" in flags and words[0] != "export" and NAME.fullmatch(name):
                if match is not None:  # another name of a variable
                    self._scope.references[name] = self._words.expand_text(match.text)
                continue
            if match is not None:
                self.assign(match)
            if "+x" in flags or (words[0] == "export" and "n" in flags):
                self._scope.exported.discard(name)
            elif (words[0] == "export" or "x" in flags) and NAME.fullmatch(name):
                self._scope.exported.add(name)

    def _expand_declared(self, word: str, flags: str) -> Assignment | None:
        """Return the assignment of a declaration, whose text is expanded before any variable of it is set."""
        match = read_assignment(word)
        is_array = match is not None and match.text.startswith("(") and match.text.endswith(")")
        if match is None or match.index is not None or is_array or "n" in flags:
            return match
        return replace(match, text=shlex.quote(self._read_text(match.name, match.text)))

    def _list_declared(self, words: list[str]) -> Iterator[str]:
        """Yield the assignments and names of a declaration, of which an expansion may make several.

        Raises:
            ConfigError: only the machine knows the names.
        """
        for word in words:
            if read_assignment(word) is not None or not re.search(r"[$`\"'\\]", word):
                yield word
                continue
            for text in self._words.expand(word):
                name, equals, value = text.partition("=")
                if list_unknown(name):
                    raise ConfigError([f"line {self._scope.line}: the names of these variables are not in the script; "
                                       "write them as NAME=VALUE"])  # fmt: skip
                yield f"{name}={shlex.quote(value)}" if equals else text

    def assign(self, assignment: Assignment) -> None:
        """Set the variable, or the item of an array, of an assignment."""
        name, index, text = self._scope.resolve(assignment.name), assignment.index, assignment.text
        plus = assignment.adds
        if name in self._scope.known:
            return
        old = self._scope.variables.get(name)
        if isinstance(old, dict):
            value: Variable = self._read_map(old, index, text, adds=plus)
        elif text.startswith("(") and text.endswith(")"):
            value = [*(old if isinstance(old, list) else [old] if old else [])] if plus else []
            for word in [token.text for token in read_tokens(text[1:-1]) if not token.is_operator]:
                if (item := re.match(r"\[([^]]*)\]=", word)) is not None:
                    value = self._change_item(value, item[1], word[item.end() :], adds=False)
                else:
                    value += [part for piece in list_braces(word) for part in self._words.expand(piece)]
        elif index is not None:
            value = self._change_item(old if isinstance(old, list) else [old] if old else [], index, text, adds=plus)
        else:
            value = self._read_text(name, text)
            if name in self._scope.whole:
                value = self._words.compute(f"{old or 0} + ({value})" if plus else value)
            elif plus and isinstance(old, list):
                value = [(old[0] or "") + value, *old[1:]] if old else [value]
            elif plus and isinstance(old, str):
                value = old + value
            if isinstance(value, str) and name in self._scope.lower | self._scope.upper and not list_unknown(value):
                value = value.lower() if name in self._scope.lower else value.upper()
        self._scope.set(name, value)

    def _read_map(self, old: dict[str, str], index: str | None, text: str, *, adds: bool) -> dict[str, str]:
        if index is None:
            words = [token.text for token in read_tokens(text.removeprefix("(").removesuffix(")")) if not token.is_operator]
            pairs = [(pair[1], pair[2]) for word in words if (pair := _PAIR.fullmatch(word)) is not None]
        else:
            pairs = [(index, text)]
        read = {" ".join(self._words.expand(key)): self._words.expand_text(item) for key, item in pairs}
        return {**old, **read} if adds or index is not None else read

    def _change_item(self, old: list[str | None], index: str, text: str, *, adds: bool) -> list[str | None]:
        computed = self._words.compute(index)
        if list_unknown(computed) or not -len(old) <= int(computed) < _LARGEST_INDEX:
            return [self._scope.mark_output()]  # which item it is only the machine knows
        place = int(computed) if int(computed) >= 0 else len(old) + int(computed)
        items = [*old, *[None] * (place + 1 - len(old))]
        items[place] = ((items[place] or "") if adds else "") + self._words.expand_text(text)
        return items

    def _read_text(self, name: str, text: str) -> str:
        value = self._words.expand_text(text, assigns=True)
        if _PLACEHOLDER.fullmatch(value):
            value = self._scope.mark(name)
        # the output of a program is requested by the name of the variable that takes it
        return name_outputs(value, name)
