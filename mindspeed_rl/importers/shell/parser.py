"""Commands and constructs of a shell script."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from mindspeed_rl.config.errors import ConfigError
from mindspeed_rl.importers.shell.tokens import Token, read_tokens

#: what ends a body of a case
_CASE_ENDS = (";;", ";&", ";;&")


@dataclass(frozen=True)
class Node:
    """A command or a construct.

    Attributes:
        kind: "simple", "if", "for", "while", "case", "function", "group" or "subshell".
        words: with their quotes.
        link: operator before it: ";", "&&", "||" or "|".
        parts: lists of nodes: for "if" conditions and bodies in turn, the last without a condition is else.
        patterns: patterns of "case", one list of patterns a body.
        redirections: of a construct, behind it; those of a command are among its words.
        place: index of its first word or operator, by which commands of one line differ.
        in_background: it runs in the background, in a shell of its own.
        ends: of "case", what follows each body: ";;", ";&" or ";;&"; of "while" and "until" the word itself.
    """

    kind: str
    line: int
    words: tuple[str, ...] = ()
    link: str = ";"
    parts: tuple[list[Node], ...] = ()
    patterns: tuple[tuple[str, ...], ...] = ()
    ends: tuple[str, ...] = ()
    redirections: tuple[str, ...] = ()
    in_background: bool = False
    place: int = 0


def parse(text: str) -> list[Node]:
    """Return the commands of a script.

    Raises:
        ConfigError: a quote or a bracket is not closed, or a construct has no end.
    """
    return _Parser(read_tokens(text.replace("\r\n", "\n"))).parse_list(())


def _put_in_background(nodes: list[Node]) -> None:
    """Put the last command and those that `&&`, `||` and `|` join with it into the background."""
    for place in range(len(nodes) - 1, -1, -1):
        nodes[place] = replace(nodes[place], in_background=True)
        if nodes[place].link == ";":
            return


@dataclass
class _Parser:
    """Builds nodes of tokens."""

    tokens: list[Token]
    place: int = 0

    def parse_list(self, ends: tuple[str, ...]) -> list[Node]:
        """Return the commands up to one of these words, which is not taken."""
        nodes: list[Node] = []
        link = ";"
        while self.place < len(self.tokens):
            token = self.tokens[self.place]
            if token.text in ends and (not token.is_operator or token.text in (")", *_CASE_ENDS)):
                return nodes
            if token.is_operator and token.text not in ("(",):
                self.place += 1
                if token.text == "&":
                    _put_in_background(nodes)
                link = token.text if token.text in ("&&", "||", "|") else link if token.text == "\n" and link != ";" else ";"
                continue
            start = self.place
            node = replace(self._parse_command(link), place=start)
            if node.kind != "simple":
                node = replace(node, redirections=tuple(self._take_redirections()))
            nodes.append(node)
            link = ";"
        if ends:
            raise ConfigError([f"the script ends before {' or '.join(ends)}"])
        return nodes

    def _parse_command(self, link: str) -> Node:
        word, line = self.tokens[self.place].text, self.tokens[self.place].line
        if word == "if":
            return Node("if", line, link=link, parts=tuple(self._parse_if()))
        if word == "for":
            self.place += 1
            words = self._take_words("do")
            self._skip_separators()
            return Node("for", line, words, link, (self._parse_body("do", "done"),))
        if word in ("while", "until"):
            self.place += 1
            condition = self.parse_list(("do",))
            return Node("while", line, (), link, (condition, self._parse_body("do", "done")), ends=(word,))
        if word == "case":
            return self._parse_case(link)
        if word == "{":
            return Node("group", line, (), link, (self._parse_body("{", "}"),))
        if word == "(":
            return Node("subshell", line, (), link, (self._parse_body("(", ")"),))
        if word == "function" or [item.text for item in self.tokens[self.place + 1 : self.place + 3]] == ["(", ")"]:
            return self._parse_function(link)
        return Node("simple", line, self._take_words(), link)

    def _take_redirections(self) -> Iterator[str]:
        while self.place < len(self.tokens) and self.tokens[self.place].text.startswith("\1"):
            self.place += 1
            yield self.tokens[self.place - 1].text

    def _parse_body(self, start: str, end: str) -> list[Node]:
        self._take(start)
        body = self.parse_list((end,))
        self._take(end)
        return body

    def _parse_function(self, link: str) -> Node:
        line = self.tokens[self.place].line
        self.place += 1 if self.tokens[self.place].text == "function" else 0
        name = self.tokens[self.place].text
        self.place += 1
        self.place += 2 if [item.text for item in self.tokens[self.place : self.place + 2]] == ["(", ")"] else 0
        while self.place < len(self.tokens) and self.tokens[self.place].text == "\n":
            self.place += 1
        if self.place >= len(self.tokens):
            raise ConfigError([f"line {line} of the script: the function {name} has no body"])
        body = self._parse_command(";")
        return Node("function", line, (name,), link, ([replace(body, redirections=tuple(self._take_redirections()))],))

    def _parse_if(self) -> Iterator[list[Node]]:
        while self.tokens[self.place].text in ("if", "elif"):
            self.place += 1
            yield self.parse_list(("then",))
            self._take("then")
            yield self.parse_list(("elif", "else", "fi"))
        if self.tokens[self.place].text == "else":
            self.place += 1
            yield self.parse_list(("fi",))
        self._take("fi")

    def _parse_case(self, link: str) -> Node:
        line = self.tokens[self.place].line
        self.place += 1
        subject = self.tokens[self.place].text
        self.place += 1
        self._skip_separators()
        self._take("in")
        self._skip_separators()
        bodies, patterns, ends = [], [], []
        while self.place < len(self.tokens) and self.tokens[self.place].text != "esac":
            names: list[str] = []
            while self.place < len(self.tokens) and self.tokens[self.place].text != ")":
                token = self.tokens[self.place]
                if token.text == "(" and names and names[-1][-1:] in ("@", "+", "?", "!", "*"):
                    raise ConfigError([f"line {token.line}: the pattern {names[-1]}(...) of a case is not read; "
                                       "write its alternatives one by one, as in a|b"])  # fmt: skip
                names += [] if token.is_operator else [token.text]
                self.place += 1
            self._take(")")
            patterns.append(tuple(names))
            bodies.append(self.parse_list((*_CASE_ENDS, "esac")))
            ends.append(self.tokens[self.place].text)
            if ends[-1] in _CASE_ENDS:
                self.place += 1
            self._skip_separators()
        self._take("esac")
        return Node("case", line, (subject,), link, tuple(bodies), tuple(patterns), tuple(ends))

    def _take_words(self, end: str = "") -> tuple[str, ...]:
        words = []
        while self.place < len(self.tokens) and not self.tokens[self.place].is_operator:
            if end and self.tokens[self.place].text == end:
                break
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
