"""Conditions and patterns of a shell script."""

from __future__ import annotations

import fnmatch
import itertools
import re

from mindspeed_rl.importers.shell.command import list_unknown
from mindspeed_rl.importers.shell.expansion import Expander

#: classes of characters by name, of ASCII, and alternatives in a pattern
_CLASSES = {"lower": "a-z", "upper": "A-Z", "alpha": "a-zA-Z", "digit": "0-9", "alnum": "a-zA-Z0-9", "xdigit": "0-9a-fA-F",
            "space": " \t\n\r\f\v", "blank": " \t"}  # fmt: skip
_CLASS = re.compile(r"\[:(\w+):\]")
_ALTERNATIVES = re.compile(r"(?<!\\)[@+?!*]\(")
#: brackets of a condition
_OPENING, _CLOSING = ("(", "\\("), (")", "\\)")
_COMPARISONS = {"-eq": "==", "-ne": "!=", "-lt": "<", "-le": "<=", "-gt": ">", "-ge": ">="}


class Conditions:
    """Reads conditions with an expander.

    Attributes:
        ignores_case: patterns do (shopt -s nocasematch).
    """

    def __init__(self, words: Expander) -> None:
        self._words = words
        self.ignores_case = False

    def test(self, words: list[str]) -> bool | None:
        """Return the status of `[`, `[[`, `test` or `((`; None where only the machine knows it."""
        if words[0].startswith("(("):
            value = self._words.step(words[0][2:-2])
            return None if list_unknown(value) else value != "0"
        end = {"[": "]", "[[": "]]"}.get(words[0])
        return self._test_words(list(words[1:-1] if words[-1] == end else words[1:]), has_patterns=words[0] == "[[")

    def _test_words(self, words: list[str], *, has_patterns: bool) -> bool | None:
        """Return the status of a condition; None where only the machine knows it.

        Args:
            has_patterns: the right side of a comparison is a pattern.
        """
        depths = list(itertools.accumulate((word in _OPENING) - (word in _CLOSING) for word in words))
        others = [word for word in words if word not in (*_OPENING, *_CLOSING) and "$" not in word]
        if "=~" not in words and any(word.startswith("(") or word.count(")") > word.count("(") for word in others):
            return None  # brackets that no blank divides from words
        if depths and (min(depths) < 0 or depths[-1]):
            return None
        if words and words[0] in _OPENING and words[-1] in _CLOSING and 0 not in depths[:-1]:
            return self._test_words(words[1:-1], has_patterns=has_patterns)
        for signs, decides in ((("||", "-o"), True), (("&&", "-a"), False)):
            found = (place for place, word in enumerate(words) if word in signs and not depths[place])
            place = next(found, None)
            if place is not None:
                sides = [self._test_words(part, has_patterns=has_patterns) for part in (words[:place], words[place + 1 :])]
                return decides if decides in sides else None if None in sides else not decides
        if words[:1] == ["!"]:
            status = self._test_words(words[1:], has_patterns=has_patterns)
            return None if status is None else not status
        compares = len(words) == 3 and words[1] in ("=", "==", "!=")
        is_pattern = [has_patterns and compares and place == 2 for place in range(len(words))]
        texts = [self._words.expand_text(word, blank_unset=True, is_pattern=kind) for word, kind in zip(words, is_pattern)]
        if len(texts) == 2 and texts[0] in ("-z", "-n"):
            return None if list_unknown(texts[1]) else (texts[1] == "") == (texts[0] == "-z")
        if any(list_unknown(text) for text in texts):
            return None
        if is_pattern[2:] == [True]:
            matches = None if _ALTERNATIVES.search(words[2]) else self.matches(texts[0], texts[2])
            return None if matches is None else matches == (texts[1] != "!=")
        if len(texts) == 3:
            return self._compare(*texts)
        return texts[0] != "" if len(texts) == 1 else None  # of two words it is a file test

    def _compare(self, first: str, comparison: str, second: str) -> bool | None:
        if comparison in ("=", "==", "!="):
            return (first == second) == (comparison != "!=")
        if comparison not in _COMPARISONS:
            return None
        value = self._words.compute(f"{first or 0} {_COMPARISONS[comparison]} {second or 0}")
        return None if list_unknown(value) else value == "1"

    def matches(self, text: str, pattern: str) -> bool | None:
        """Return whether a text matches a pattern; None where it is not followed."""
        classes = set(_CLASS.findall(pattern))
        if list_unknown(pattern) or (classes and not (text.isascii() and classes <= _CLASSES.keys() and not self.ignores_case)):
            return None
        pattern = _CLASS.sub(lambda match: _CLASSES[match[1]], pattern)
        if self.ignores_case:
            text, pattern = text.lower(), pattern.lower()
        return fnmatch.fnmatchcase(text, pattern.replace("[^", "[!"))
