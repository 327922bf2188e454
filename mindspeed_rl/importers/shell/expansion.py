"""Words of a shell script with their quotes, variables and arithmetic expanded."""

from __future__ import annotations

import fnmatch
import glob
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from mindspeed_rl.importers.shell.arithmetic import evaluate
from mindspeed_rl.importers.shell.command import list_unknown, make_mark
from mindspeed_rl.importers.shell.tokens import Reader, read_tokens
from mindspeed_rl.importers.shell.variables import NAME, Scope, list_items

_PARAMETER = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]")
_BRACES = re.compile(r"([#!]?)([A-Za-z_]\w*|[0-9@*]+)(?:\[([^\]]*)\])?(.*)", re.DOTALL)
_DEFAULT = re.compile(r"(:?)([-=+?])(.*)", re.DOTALL)
_ITEMS = re.compile(r":([^:]*)(?::([^:]*))?")
_QUOTED = re.compile(r"""['"\\]""")
#: quoted characters of a pattern, classes of characters by name, and alternatives, which are not followed
_UNREAD_PATTERN = re.compile(r"""\\[*?[]|["'][^"']*[*?]|\[\[:|[@+?!*]\([^()]*\)""")
_STEP = re.compile(r"\s*([A-Za-z_]\w*)\s*(?:(\+\+|--)|(<<|>>|[-+*/%&|^]?)=(?!=)(.*))\s*", re.DOTALL)
_STEP_BEFORE = re.compile(r"\s*(\+\+|--)\s*([A-Za-z_]\w*)\s*")
#: variables that an expression sets somewhere within it
_STEP_WITHIN = re.compile(
    r"([A-Za-z_]\w*)(?:\[[^]]*\])?\s*(?:\+\+|--|(?:<<|>>|[-+*/%&|^])?=(?!=))|(?:\+\+|--)\s*([A-Za-z_]\w*)"
)
#: what a backslash means in $'...'
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "e": "\x1b", "E": "\x1b", "f": "\f", "v": "\v"}
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{1,2})|u([0-9a-fA-F]{1,4})|U([0-9a-fA-F]{1,8})|([0-7]{1,3})|(.))", re.DOTALL)
#: characters that a backslash takes the meaning of within double quotes
_ESCAPED = ("$", "`", '"', "\\", "\n")
_ALL = ("@", "*")


@dataclass(frozen=True)
class _Expansion:
    """What stands in the place of a variable or a command.

    Attributes:
        kind: text is split at blanks unless it is quoted, a list has a word an item, words are split already.
        separator: what is between the items where they are one word.
    """

    items: list[str]
    kind: Literal["text", "list", "words"] = "text"
    separator: str = " "

    @classmethod
    def of_text(cls, text: str) -> _Expansion:
        return cls([text])


@dataclass
class _Words:
    """Words that grow from left to right.

    Attributes:
        splits: text that is not quoted is split.
        borders: characters at which it is; None for blanks.
        is_pattern: characters of a pattern that are quoted stand for themselves.
        current: parts of the last word; empty where there is none yet.
    """

    splits: bool
    borders: str | None
    is_pattern: bool = False
    done: list[str] = field(default_factory=list)
    current: list[str] = field(default_factory=list)

    def add_text(self, text: str, *, quoted: bool = True) -> None:
        self.current.append(glob.escape(text) if quoted and self.is_pattern else text)

    def add(self, expansion: _Expansion, *, quoted: bool) -> None:
        items, kind = expansion.items, expansion.kind
        if quoted and self.is_pattern:
            items = [glob.escape(item) for item in items]
        if kind != "list" and (quoted or not self.splits):
            self.current.append(expansion.separator.join(items))
            return
        if quoted or kind == "words" or not self.splits:
            for index, part in enumerate(items):
                if index:
                    self._close()
                self.current.append(part)
            return
        borders = " \t\n" if self.borders is None else self.borders
        for index, item in enumerate(items):
            if index or (item[:1].isspace() and item[0] in borders):
                self._close()
            for place, part in enumerate(split_fields(item, self.borders)):
                if place:
                    self._close()
                self.current.append(part)
            if item and item[-1] in borders:
                self._close()

    def _close(self) -> None:
        """End the last word, if there is one."""
        if self.current:
            self.done.append("".join(self.current))
            self.current = []

    def end(self) -> list[str]:
        return [*self.done, "".join(self.current)] if self.current else self.done


def split_fields(text: str, borders: str | None) -> list[str]:
    """Split a text as the shell splits words at the characters of IFS: blanks among them belong together."""
    if borders is None:
        return text.split()
    blanks, others = ("".join(char for char in borders if char.isspace() is kind) for kind in (True, False))
    text = text.strip(blanks) if blanks else text
    blank = f"[{re.escape(blanks)}]" if blanks else "(?!)"
    border = rf"{blank}*[{re.escape(others)}]{blank}*|{blank}+" if others else f"{blank}+"
    fields = re.split(border, text)
    return fields if fields[-1] else fields[:-1]


class Expander:
    """Expands words by the variables of a scope.

    Attributes:
        scope: which `${name=text}` and arithmetic may change.
    """

    def __init__(self, scope: Scope, substitute: Callable[[str], str], read_process: Callable[[str], str]) -> None:
        """Keep the scope.

        Args:
            substitute: returns the output of a command, or a mark.
            read_process: returns the name of the file that has the output of `<(command)`, or a mark.
        """
        self.scope, self._substitute, self._name_process = scope, substitute, read_process
        #: what is expanded stands in double quotes
        self._is_quoted = False
        #: beginning of an expansion -> function that reads it from a text; the longer ones first
        self._forms: tuple[tuple[str, Callable[[str, int, bool], tuple[_Expansion, int]]], ...] = (
            ("`", self._read_backquotes),
            ("$((", self._read_arithmetic),
            ("$[", self._read_old_arithmetic),
            ("$(", self._read_command),
            ("${", self._read_braces),
            ("$'", self._read_escapes),
        )

    def expand(
        self, word: str, *, splits: bool = True, blank_unset: bool = False, assigns: bool = False, is_pattern: bool = False
    ) -> list[str]:
        """Return the words that a word with quotes and variables becomes.

        Args:
            splits: text that is not quoted is split.
            blank_unset: an argument that is not given is empty.
            assigns: it is the value of a variable, in which a folder may begin after a colon too.
            is_pattern: quoted characters of a pattern stand for themselves.

        Raises:
            ValueError: a quote has no end.
        """
        outer, self._is_quoted = self._is_quoted, False
        name = NAME.match(word)
        assigned = name.end() if name is not None and word[name.end() : name.end() + 1] == "=" else None
        words, place = _Words(splits, self._read_borders(), is_pattern), 0
        while place < len(word):
            char = word[place]
            begins = place == 0 or place - 1 == assigned
            begins |= word[place - 1] == ":" and (assigns or assigned is not None)
            if char == "~" and begins and word[place + 1 : place + 2] in (("", "/", ":") if assigns else ("", "/")):
                home = self.scope.find("HOME")
                words.add_text(char if home is None else str(home))
                place += 1
            elif char == "\\":
                if word[place + 1 : place + 2] != "\n":  # which joins two lines
                    words.add_text(word[place + 1 : place + 2])
                place += 2
            elif char == "'":
                end = word.index("'", place + 1)
                words.add_text(word[place + 1 : end])
                place = end + 1
            elif char == '"':
                reader = Reader(word, place)
                reader.read_quoted('"')
                self._expand_quoted(word[place + 1 : reader.place - 1], words, blank_unset=blank_unset)
                place = reader.place
            elif word.startswith('$"', place):  # text that may be translated
                place += 1
            elif char in "$`":
                is_quote = word.startswith("$'", place)
                expansion, place = self._read_expansion(word, place, blank_unset)
                words.add(expansion, quoted=is_quote)
            elif place == 0 and word.startswith("<("):
                reader = Reader(word, 1)
                words.add_text(self._name_process(reader.read_balanced("(", ")")))
                place = reader.place
            else:
                words.add_text(char, quoted=False)
                place += 1
        self._is_quoted = outer
        return words.end()

    def expand_text(self, word: str, *, blank_unset: bool = False, assigns: bool = False, is_pattern: bool = False) -> str:
        """Return the text that a word becomes where it is not split."""
        return " ".join(self.expand(word, splits=False, blank_unset=blank_unset, assigns=assigns, is_pattern=is_pattern))

    def compute(self, text: str) -> str:
        """Return the value of an arithmetic expression of whole numbers; a mark where a variable is unknown."""
        text = self.expand_text(text)
        if "\0" not in text:
            text = NAME.sub(lambda match: self._read_number(match.group()), text)
        if unknown := list_unknown(text):
            return make_mark(*unknown[0])
        value = evaluate(text)
        return self.scope.mark_output() if value is None else value

    def _read_number(self, name: str) -> str:
        """Return the value of a variable within an expression."""
        text = self.scope.read(name) or "0"
        return text if text.isdigit() or list_unknown(text) else f"({text})"

    def step(self, text: str) -> str:
        """Follow an arithmetic expression that may set variables; return its value."""
        value = "0"
        for part in _split_steps(text):
            value = self._step(part)
        return value

    def _step(self, text: str) -> str:
        if match := _STEP_BEFORE.fullmatch(text):
            step, name = match.groups()
            value = self.compute(f"{name} {step[0]} 1")
        elif match := _STEP.fullmatch(text):
            name, step, sign, rest = match.groups()
            old = self.compute(name) if step else ""
            given = "" if step else self._step(rest)
            value = self.compute(f"{name} {step[0]} 1" if step else f"{name} {sign} ({given})" if sign else given)
            self.scope.set(name, value)
            return old if step else value
        else:
            changed = [first or second for first, second in _STEP_WITHIN.findall(text)]
            for name in changed:  # in an order that is not followed
                self.scope.set(name, self.scope.mark(name))
            return self.scope.mark_output() if changed else self.compute(text)
        self.scope.set(name, value)
        return value

    def _expand_quoted(self, text: str, words: _Words, *, blank_unset: bool) -> None:
        self._is_quoted = True
        self._expand_in_quotes(text, words, blank_unset=blank_unset)
        self._is_quoted = False

    def _expand_in_quotes(self, text: str, words: _Words, *, blank_unset: bool) -> None:
        place = 0
        if text[:1] == "$":
            expansion, place = self._read_expansion(text, place, blank_unset)
            if expansion.kind == "list" and not expansion.items and place == len(text):
                return  # an array without items gives no words; an empty string would be one
            words.add_text("")
            words.add(expansion, quoted=True)
        words.add_text("")
        while place < len(text):
            if text[place] == "\\" and text[place + 1 : place + 2] in _ESCAPED:
                words.add_text(text[place + 1].replace("\n", ""))
                place += 2
            elif text[place] in "$`":
                expansion, place = self._read_expansion(text, place, blank_unset)
                words.add(expansion, quoted=True)
            else:
                words.add_text(text[place])
                place += 1

    # --- forms of an expansion: each returns it and the place after it

    def _read_expansion(self, text: str, place: int, blank_unset: bool) -> tuple[_Expansion, int]:
        for beginning, read in self._forms:
            if text.startswith(beginning, place) and not (self._is_quoted and beginning == "$'"):
                return read(text, place, blank_unset)
        match = _PARAMETER.match(text, place + 1)
        if match is None:
            return _Expansion.of_text("$"), place + 1
        if match.group() in _ALL:
            return self._expand_items(self.scope.arguments, "@", "", "", joins=match.group() == "*"), match.end()
        return _Expansion.of_text(self.scope.read(match.group(), blank_unset=blank_unset)), match.end()

    def _read_backquotes(self, text: str, place: int, _: bool) -> tuple[_Expansion, int]:
        end = text.index("`", place + 1)
        return _Expansion.of_text(self._substitute(text[place + 1 : end])), end + 1

    def _read_arithmetic(self, text: str, place: int, _: bool) -> tuple[_Expansion, int]:
        reader = Reader(text, place + 1)
        return _Expansion.of_text(self.step(self.expand_text(reader.read_balanced("(", ")")[1:-1]))), reader.place

    def _read_old_arithmetic(self, text: str, place: int, _: bool) -> tuple[_Expansion, int]:
        reader = Reader(text, place + 1)
        return _Expansion.of_text(self.step(self.expand_text(reader.read_balanced("[", "]")))), reader.place

    def _read_command(self, text: str, place: int, _: bool) -> tuple[_Expansion, int]:
        reader = Reader(text, place + 1)
        return _Expansion.of_text(self._substitute(reader.read_balanced("(", ")"))), reader.place

    def _read_braces(self, text: str, place: int, blank_unset: bool) -> tuple[_Expansion, int]:
        reader = Reader(text, place + 1)
        return self._expand_braces(reader.read_balanced("{", "}"), blank_unset), reader.place

    def _read_escapes(self, text: str, place: int, _: bool) -> tuple[_Expansion, int]:
        reader = Reader(text, place + 1)
        reader.read_escaped()
        return _Expansion([_ESCAPE.sub(_read_escape, text[place + 2 : reader.place - 1])], "words"), reader.place

    # --- ${...}

    def _expand_braces(self, text: str, blank_unset: bool) -> _Expansion:
        match = _BRACES.match(text)
        if match is None:
            return _Expansion.of_text(self.scope.mark(text))
        flag, name, index, rest = match.groups()
        if name in _ALL:
            return self._expand_items(self.scope.arguments, name, flag, rest, joins=name == "*")
        value = self.scope.find(name)
        if isinstance(value, dict):
            if index in _ALL:
                entries = list(value) if flag == "!" else list(value.values())
                return _Expansion.of_text(str(len(entries))) if flag == "#" else _Expansion(entries, "list")
            value = value.get(" ".join(self.expand(index or "0")), "")
            flag = "" if flag == "!" else flag
        if index in _ALL:
            if value is None:
                items = [] if blank_unset else [self.scope.mark(name)]
                value = "".join(items)
            else:
                items = list_items(value) if not isinstance(value, dict) else []
                cut = None if _DEFAULT.match(rest) else _ITEMS.fullmatch(rest)
                if isinstance(value, list) and None in value and (flag == "!" or cut is not None):
                    return self._expand_sparse(value, cut)
            if flag and isinstance(value, str) and list_unknown(value):
                return _Expansion.of_text(value)  # it may have any number of items
            return self._expand_items(items, name, flag, rest, joins=index == "*")
        if isinstance(value, list):
            computed = self.compute(index or "0")
            if list_unknown(computed):
                return _Expansion.of_text(computed)
            place = int(computed)
            value = value[place] if -len(value) <= place < len(value) else None
            value = "" if value is None and not _DEFAULT.match(rest) else value
        return self._expand_value(value, name, flag, rest, blank_unset)

    def _expand_sparse(self, value: list[str | None], cut: re.Match[str] | None) -> _Expansion:
        """Return the indices of an array of which some have no item, or its items from an index on."""
        if cut is None:
            return _Expansion([str(place) for place, item in enumerate(value) if item is not None], "list")
        bounds = [None if bound is None else self.compute(bound.strip() or "0") for bound in cut.groups()]
        if unknown := [bound for bound in bounds if list_unknown(bound)]:
            return _Expansion([str(unknown[0])], "list")
        start = int(bounds[0] or 0) + (len(value) if int(bounds[0] or 0) < 0 else 0)
        items = [item for item in value[max(0, start) :] if item is not None] if start >= 0 else []
        return _Expansion(items[: None if bounds[1] is None else int(bounds[1])], "list")

    def _expand_items(self, items: list[str], name: str, flag: str, rest: str, *, joins: bool) -> _Expansion:
        """Return the items of an array, or their number; those that a slice leaves, or each with a change."""
        if flag == "#":
            return _Expansion.of_text(str(len(items)))
        if flag == "!":
            return _Expansion(list(map(str, range(len(items)))), "list")
        if default := _DEFAULT.match(rest):
            text = " ".join(items)
            chosen = self._choose_default(name, text if items else None, *default.groups())
            items = items if chosen == [text] else chosen
        elif cut := _ITEMS.fullmatch(rest):
            bounds = [None if bound is None else self.compute(bound.strip() or "0") for bound in cut.groups()]
            if unknown := [bound for bound in bounds if list_unknown(bound)]:
                items = [str(unknown[0])]
            else:
                # the first of the arguments is $1, and $0 is the script
                start, first = int(bounds[0] or 0), int(name in _ALL)
                start = max(0, start - first) if start >= 0 else len(items) + start
                items = items[start : None if bounds[1] is None else start + int(bounds[1])] if start >= 0 else []
        elif rest and rest[0] in "#%/^,":
            items = [" ".join(self._change(name, item, rest, blank_unset=True)) for item in items]
        elif rest:
            items = [self.scope.mark(name)]
        separator = " " if (borders := self._read_borders()) is None else borders[:1]
        return _Expansion(items, "text", separator) if joins else _Expansion(items, "list")

    def _read_borders(self) -> str | None:
        """Return the characters at which words are split, where the script sets them."""
        value = self.scope.find("IFS")
        return value if isinstance(value, str) and not list_unknown(value) else None

    def _expand_value(self, value: str | None, name: str, flag: str, rest: str, blank_unset: bool) -> _Expansion:
        if name in ("BASH_SOURCE", "0") and value is None:
            value = "./script.sh"
        if flag == "!":
            value = self.scope.read(str(value), blank_unset=blank_unset)
        if flag == "#":
            return _Expansion.of_text(str(len(self.scope.read(name, blank_unset=blank_unset) if value is None else value)))
        items = self._change(name, value, rest, blank_unset=blank_unset)
        return _Expansion(items, "words" if _DEFAULT.match(rest) and _QUOTED.search(rest) else "text")

    def _change(self, name: str, value: str | None, rest: str, *, blank_unset: bool) -> list[str]:
        """Return the words of `${name<rest>}`; several only for a default."""
        if default := _DEFAULT.match(rest):
            return self._choose_default(name, value, *default.groups())
        text = self.scope.read(name, blank_unset=blank_unset) if value is None else value
        if not rest or list_unknown(text):
            return [text]
        if _UNREAD_PATTERN.search(rest):
            return [self.scope.mark(name)]
        for pattern, change in _CHANGES:
            if match := pattern.fullmatch(rest):
                return [change(text, *(self.expand_text(group or "") for group in match.groups()))]
        return [self.scope.mark(name)]

    def _choose_default(self, name: str, value: str | None, colon: str, kind: str, text: str) -> list[str]:
        """Return the words of `${name:-text}` and its relatives."""
        is_set = value is not None and not (colon and value == "")
        if is_set and kind != "+":
            return [value or ""]
        if kind == "?":
            return [self.scope.mark(name)]
        if kind == "+" and not is_set:
            return []
        if kind == "=":
            self.scope.set(name, self.expand_text(text))
        if self._is_quoted:  # other quotes are characters there
            inner = "".join(re.findall(r'\\.|[^"\\]+', text, re.DOTALL))
            value = self.expand_text(f'"{inner}"')
            self._is_quoted = True
            return [value]
        if not _QUOTED.search(text):
            return [self.expand_text(text)]
        # quotes are taken off, and hold words together
        return [item for token in read_tokens(text) for item in self.expand(token.text)]


def _split_steps(text: str) -> list[str]:
    """Return the parts of an arithmetic expression between the commas that stand in no bracket."""
    parts, depth = [""], 0
    for char in text:
        depth += (char in "([") - (char in ")]")
        if char == "," and not depth:
            parts.append("")
        else:
            parts[-1] += char
    return parts


def _read_escape(match: re.Match[str]) -> str:
    """Return the character of an escape in $'...'."""
    first, second, third, octal, char = match.groups()
    if code := first or second or third:
        return chr(min(int(code, 16), 0x10FFFF))
    return chr(int(octal, 8) % 256) if octal else _ESCAPES.get(char, char if char in "\\'\"?" else f"\\{char}")


def _cut(text: str, where: str, pattern: str) -> str:
    """Return a text without the prefix or suffix that a pattern matches; twice the sign for the longest one."""
    from_end, pattern = where[0] == "%", pattern.replace("[^", "[!")
    sizes = range(len(text), -1, -1) if len(where) == 2 else range(len(text) + 1)
    for size in sizes:
        part = text[len(text) - size :] if from_end else text[:size]
        if fnmatch.fnmatchcase(part, pattern):
            return text[: len(text) - size] if from_end else text[size:]
    return text


def _replace(text: str, where: str, old: str, new: str) -> str:
    """Return a text with the longest match of a pattern replaced, or all of them; # and % bind it to the start and the end."""
    if not old:  # before or after the text, or nowhere
        return {"/#": new + text, "/%": text + new}.get(where, text)
    # fnmatch's form of the pattern without its end, which is \\z or \\Z
    pattern = re.sub(r"\\[zZ]$", "", fnmatch.translate(old.replace("[^", "[!")))
    pattern = {"/#": rf"\A(?:{pattern})", "/%": rf"(?:{pattern})\Z"}.get(where, pattern)
    return re.sub(pattern, lambda _: new, text, count=0 if where == "//" else 1)


def _slice(text: str, start: str, length: str) -> str:
    return text[int(start) : int(start) + int(length) if length else None]


def _change_case(text: str, where: str) -> str:
    return text.upper() if where == "^^" else text.lower()


#: what follows the name in braces -> function of the text and the expanded groups
_CHANGES: tuple[tuple[re.Pattern[str], Callable[..., str]], ...] = (
    (re.compile(r"(%%|%|##|#)(.*)", re.DOTALL), _cut),
    (re.compile(r"(//|/[#%]|/)((?:\\.|[^/\\])*)/?(.*)", re.DOTALL), _replace),
    (re.compile(r":\s*(\d+)(?::(\d+))?"), _slice),
    (re.compile(r"(\^\^|,,)"), _change_case),
)
