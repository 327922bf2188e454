"""Words and operators of a shell script."""

from __future__ import annotations

import re
from dataclasses import dataclass

from mindspeed_rl.config.errors import ConfigError

_OPERATORS = ("&&", "||", ";;&", ";;", ";&", "|&", "|", "&", ";", "(", ")", "\n")
_REDIRECTION = re.compile(r"(\d*|&|\{[A-Za-z_]\w*\})(<<<|<<-|<<|>>|>&|<&|<>|>\||>|<)")
#: beginnings of tokens for the input and the output of a command: a here-document, one whose text is expanded, a here-string
#: that is expanded as a word, the file that is read, and the file that is written
INPUT, EXPANDED_INPUT, INPUT_WORD, INPUT_FILE, OUTPUT = ("\1raw\1", "\1text\1", "\1word\1", "\1file\1", "\1out\1")


@dataclass(frozen=True)
class Token:
    """A word with its quotes, or an operator."""

    text: str
    line: int
    is_operator: bool = False


def read_tokens(text: str) -> list[Token]:
    """Return the words and operators of a script; here-documents and files that are written are words with a mark in front.

    Raises:
        ConfigError: a quote or a bracket is not closed.
    """
    return Reader(text).read_tokens()


class Reader:
    """A place in a script, from which words, quotes and brackets are read.

    Attributes:
        place: index of the next character.
        line: line number of that character, from 1.
    """

    def __init__(self, text: str, place: int = 0) -> None:
        self.text, self.place, self.line = text, place, 1
        self._tokens: list[Token] = []
        #: here-documents whose text begins after this line: name, index of their token, and whether it is without leading tabs
        self._documents: list[tuple[str, int, bool]] = []
        self._in_test = False

    def read_tokens(self) -> list[Token]:
        """Return the rest as tokens."""
        while self.place < len(self.text):
            if self.text.startswith("\\\n", self.place):
                self._skip(2)
            elif self.text[self.place] in " \t" or (self._in_test and self._continues_test()):
                self._skip(1)
            elif self.text[self.place] == "#":
                self._skip_line()
            else:
                self._read_token()
        # a document without a line after its command has no text
        return [token for token in self._tokens if token.text or token.is_operator]

    def _continues_test(self) -> bool:
        """Return whether a condition goes on behind the end of a line."""
        joins = self._tokens[-1].text in ("&&", "||", "(", "[[", "!")
        return self.text[self.place] == "\n" and (joins or self.text[self.place :].lstrip().startswith(("&&", "||", ")", "]]")))

    def _read_token(self) -> None:
        line = self.line
        if not self._in_test and self.text.startswith(("<(", ">("), self.place):
            self._tokens.append(Token(self._read_process(), line))
        elif not self._in_test and (match := _REDIRECTION.match(self.text, self.place)):
            self._read_redirection(match)
        elif not self._in_test and self.text.startswith("((", self.place):
            self._tokens.append(Token(f"({self.read_balanced('(', ')')})", line))
        elif operator := self._find_operator():
            self._skip(len(operator))
            self._tokens.append(Token(operator, line, is_operator=True))
            if operator == "\n":
                self._read_documents()
        else:
            word = self._read_word()
            self._in_test = word == "[[" or (self._in_test and word != "]]")
            self._tokens.append(Token(word, line))

    def _find_operator(self) -> str | None:
        found = next((item for item in _OPERATORS if self.text.startswith(item, self.place)), None)
        return None if self._in_test and found not in ("\n", ";") else found

    def _read_redirection(self, match: re.Match[str]) -> None:
        line = self.line
        self._skip(len(match.group()))
        target = self._read_target()
        prefix, sign = match.groups()
        if sign in ("<<", "<<-"):
            self._documents.append((target, len(self._tokens), sign == "<<-"))
            self._tokens.append(Token("", line))
        elif sign == "<<<":
            self._tokens.append(Token(INPUT_WORD + target, line))
        elif match.group() in ("<", "0<") and target:
            self._tokens.append(Token(INPUT_FILE + target, line))
        elif sign == ">&" and re.fullmatch(r"\d*-?", target):  # another output of the command
            if prefix in ("", "1") and target not in ("", "1"):
                self._tokens.append(Token(f"{OUTPUT}>& {target}", line))
        elif sign in (">", ">|", ">>", ">&") and target:
            way = ">>" if sign == ">>" else ">"
            self._tokens.append(Token(f"{OUTPUT}{way if prefix in ('', '1', '&') else '2>'} {target}", line))

    def _read_process(self) -> str:
        """Return `<(...)` or `>(...)`, a file that a command writes or reads."""
        start = self.place
        self._skip(1)
        self.read_balanced("(", ")")
        return self.text[start : self.place]

    def _read_documents(self) -> None:
        line = self.line - 1
        for target, index, is_indented in self._documents:
            name = target.strip("'\"\\")
            kind = INPUT if name != target else EXPANDED_INPUT
            self._tokens[index] = Token(kind + self._read_document(name, is_indented), line)
        self._documents = []

    def _read_document(self, name: str, is_indented: bool) -> str:
        """Return the text of a here-document with the end of its last line; without leading tabs for `<<-`."""
        lines = []
        while self.place < len(self.text):
            end = self.text.find("\n", self.place)
            line = self.text[self.place : len(self.text) if end < 0 else end]
            self._skip(len(line) + 1)
            line = line.lstrip("\t") if is_indented else line
            if line == name:
                break
            lines.append(f"{line}\n")
        return "".join(lines)

    def _read_target(self) -> str:
        while self.text[self.place : self.place + 1] in (" ", "\t"):
            self._skip(1)
        if self.text.startswith(("<(", ">("), self.place):
            return self._read_process()
        return self._read_word() if self.place < len(self.text) and self.text[self.place] not in "\n;&|" else ""

    def _read_word(self) -> str:
        start = self.place
        parts: list[str] = []
        while self.place < len(self.text):
            char = self.text[self.place]
            if self.text.startswith("\\\n", self.place):  # joins two lines, but for those within single quotes
                parts.append(self.text[start : self.place])
                self._skip(2)
                start = self.place
            elif char == "\\":
                self._skip(2)
            elif self.text.startswith("$'", self.place):
                self._skip(1)
                self.read_escaped()
            elif char in "'\"`":
                self.read_quoted(char)
            elif self._read_expansion():
                continue
            elif char == "(" and self.place > start and self.text[self.place - 1] == "=":
                self.read_balanced("(", ")")  # an array
            elif char in " \t\n;" or (char in "&|()<>" and not self._in_test):
                break
            else:
                self._skip(1)
        if self.place == start and not parts:
            self._skip(1)
        return "".join([*parts, self.text[start : self.place]])

    def _read_expansion(self) -> bool:
        """Skip `$(...)` or `${...}`; return False where there is none."""
        if not self.text.startswith(("$(", "${"), self.place):
            return False
        self._skip(1)
        opening = self.text[self.place]
        self.read_balanced(opening, ")" if opening == "(" else "}")
        return True

    def read_escaped(self) -> None:
        """Skip to the end of the quote of $'...', in which a backslash takes the meaning of the next character.

        Raises:
            ConfigError: it has no end.
        """
        first = self.line
        self._skip(1)
        while self.place < len(self.text):
            if self.text[self.place] == "'":
                return self._skip(1)
            self._skip(2 if self.text[self.place] == "\\" else 1)
        raise ConfigError([f"the command line cannot be read: No closing quotation (') of line {first}"])

    def read_quoted(self, quote: str) -> None:
        """Skip to the end of a quote.

        Raises:
            ConfigError: it has no end.
        """
        first = self.line
        self._skip(1)
        while self.place < len(self.text):
            char = self.text[self.place]
            if char == quote:
                return self._skip(1)
            if quote == '"' and self._read_expansion():
                continue
            self._skip(2 if char == "\\" and quote != "'" else 1)
        raise ConfigError([f"the command line cannot be read: No closing quotation ({quote}) of line {first}"])

    def read_balanced(self, opening: str, closing: str) -> str:
        """Skip to the end of a bracket, and return its inner text.

        Raises:
            ConfigError: it has no end.
        """
        first, depth, start = self.line, 0, self.place + len(opening)
        while self.place < len(self.text):
            char = self.text[self.place]
            if self.text.startswith(closing, self.place) and depth == 1:
                inner = self.text[start : self.place]
                self._skip(len(closing))
                return inner
            if char == "\\":
                self._skip(2)
            elif char in "'\"`" and not (char == "'" and opening == "{"):
                self.read_quoted(char)
            elif char == "#" and self.text[self.place - 1] in " \t\n" and opening == "(":
                self._skip_line()
            else:
                depth += (char == opening) - (char == closing)
                self._skip(1)
        raise ConfigError([f"the command line cannot be read: {opening} of line {first} is not closed"])

    def _skip(self, count: int) -> None:
        self.line += self.text.count("\n", self.place, self.place + count)
        self.place += count

    def _skip_line(self) -> None:
        end = self.text.find("\n", self.place)
        self._skip((len(self.text) if end < 0 else end) - self.place)
