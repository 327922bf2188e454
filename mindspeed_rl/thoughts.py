"""Thoughts of reasoning models: the marks of each family, and the text after them. The only definition of both.

Most families write tags, with a prefix or a suffix of their own: <think>, <seed:think>, <think:opensource>, <mm:think>. The
others are in a table, from their chat templates and from the reasoning parsers of vLLM 0.32.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

#: a tag of a thought: (slash, prefix, name, suffix)
_TAG = re.compile(r"<(/?)((?:[A-Za-z0-9]+[:_|])*)(think|thinking|thought)((?:[:_][A-Za-z0-9]+)*)>")


def _find_last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    matches = deque(pattern.finditer(text), maxlen=1)
    return matches[0] if matches else None


@dataclass(frozen=True)
class ThoughtMarks:
    """The marks of a family.

    Attributes:
        opening, closing: marks of a thought.
        ending: text that ends the answer, "" for none.
        texts: (opening, closing) as the model writes them.
        tokens: tokens that the marks consist of; decoded text without them has no marks.
    """

    opening: re.Pattern[str]
    closing: re.Pattern[str]
    ending: re.Pattern[str] | None = None
    texts: tuple[str, str] = ("", "")
    tokens: tuple[str, ...] = ()

    def split(self, text: str, *, is_open: bool = False) -> tuple[str, str]:
        """Return (thought without its mark, text after it); it ends at the last closing mark, "" follows one without an end.

        Args:
            is_open: the prompt has opened the thought.
        """
        last = _find_last(self.closing, text)
        if last is None and not is_open and self.opening.search(text) is None:
            return "", text
        thought = self.opening.sub("", text if last is None else text[: last.start()], count=1).lstrip()
        return thought, "" if last is None else self.cut(text[last.end() :])

    def cut(self, text: str) -> str:
        """Return the text before the next thought, or before the end of the answer."""
        for pattern in filter(None, (self.opening, self.ending)):
            if (match := pattern.search(text)) is not None:
                text = text[: match.start()]
        return text


def build_marks(opening: str, closing: str) -> ThoughtMarks:
    """Return the family of two marks."""
    return ThoughtMarks(
        re.compile(re.escape(opening)), re.compile(re.escape(closing)), None, (opening, closing), (opening, closing)
    )


#: families without tags
_FAMILIES: dict[str, ThoughtMarks] = {
    "Magistral, Ministral": build_marks("[THINK]", "[/THINK]"),
    "Kimi-VL, Kimi-Dev": build_marks("◁think▷", "◁/think▷"),
    "Command A": ThoughtMarks(
        re.compile(r"<\|START_THINKING\|>"),
        re.compile(r"<\|END_THINKING\|>(?:\s*<\|START_RESPONSE\|>)?"),
        re.compile(r"<\|END_RESPONSE\|>"),
        ("<|START_THINKING|>", "<|END_THINKING|>"),
        ("<|START_THINKING|>", "<|END_THINKING|>"),
    ),
    "Apertus": build_marks("<|inner_prefix|>", "<|inner_suffix|>"),
    "PLaMo 3": build_marks("<|plamo:begin_think:plamo|>", "<|plamo:end_think:plamo|>"),
    "Gemma 4": ThoughtMarks(
        re.compile(r"<\|channel>(?:thought\n?)?"),
        re.compile(r"<channel\|>"),
        None,
        ("<|channel>thought\n", "<channel|>"),
        ("<|channel>", "<channel|>"),
    ),
    # every channel but `final` is one of thoughts, calls and preambles; the decoded text may lack the tokens between messages
    "gpt-oss": ThoughtMarks(
        re.compile(r"(?:(?:<\|end\|>)?<\|start\|>)?(?:assistant)?<\|channel\|>(?!\s*final)"),
        re.compile(
            r"(?:(?:<\|end\|>)?<\|start\|>)?(?:assistant)?<\|channel\|>\s*final[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>"
        ),
        re.compile(r"<\|(?:end|return|start|call)\|>"),
        ("<|channel|>analysis<|message|>", "assistant<|channel|>final<|message|>"),
        ("<|channel|>", "<|message|>"),
    ),
    "Kimi K3": ThoughtMarks(
        re.compile(r"<\|open\|>\s*think\s*<\|sep\|>"),
        re.compile(r"<\|close\|>\s*think\s*<\|sep\|>(?:\s*<\|open\|>\s*response\s*<\|sep\|>)?"),
        re.compile(r"<\|close\|>"),
        ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
        ("<|open|>", "<|close|>", "<|sep|>"),
    ),
    "Granite 3": ThoughtMarks(
        re.compile(r"Here(?:'s| is) my thought process:"),
        re.compile(r"Here(?:'s| is) my response:"),
        None,
        ("Here is my thought process:", "Here is my response:"),
    ),
}
_ANY = re.compile("|".join([_TAG.pattern, *(f"(?:{p.pattern})" for f in _FAMILIES.values() for p in (f.opening, f.closing))]))
#: marks are searched so far before the end of a prompt
_LONGEST_MARK = 128
#: families in one response; a text with more has no answer
_MAX_FAMILIES = 4
THINK = ThoughtMarks(re.compile("<think>"), re.compile("</think>"), None, ("<think>", "</think>"), ("<think>", "</think>"))
"""The marks of most families."""


def _read_mark(mark: re.Match[str]) -> ThoughtMarks:
    """Return the family of a mark."""
    tag = _TAG.fullmatch(mark[0])
    if tag is not None:
        name = "".join(tag.groups()[1:])
        return build_marks(f"<{name}>", f"</{name}>")
    return next(f for f in _FAMILIES.values() if f.opening.fullmatch(mark[0]) or f.closing.fullmatch(mark[0]))


def find_marks(text: str) -> ThoughtMarks | None:
    """Return the family of the first mark in a text; None for a text without marks."""
    mark = _ANY.search(text)
    return None if mark is None else _read_mark(mark)


def list_marks(text: str) -> list[ThoughtMarks]:
    """Return the families of the marks in a text, in order of their first marks."""
    families: dict[tuple[str, str], ThoughtMarks] = {}
    for mark in _ANY.finditer(text):
        marks = _read_mark(mark)
        families.setdefault(marks.texts, marks)
        if len(families) == _MAX_FAMILIES:
            break
    return list(families.values())


def find_opened(prompt: str) -> ThoughtMarks | None:
    """Return the family of the thought that a prompt opens at its end; None where it opens none."""
    tail = prompt.rstrip()[-_LONGEST_MARK:]
    last = _find_last(_ANY, tail)
    if last is None:
        return None
    marks = _read_mark(last)
    opening = marks.texts[0].rstrip()
    return marks if tail.endswith(opening) or (last.end() == len(tail) and marks.opening.fullmatch(last[0])) else None


def opens_thought(prompt: str) -> bool:
    """Return True if a prompt ends inside a thought, which it has opened at its end."""
    return find_opened(prompt) is not None


def ends_inside_thought(text: str) -> bool:
    """Return True if the last mark of a text opens a thought."""
    last = _find_last(_ANY, text)
    return last is not None and _read_mark(last).opening.fullmatch(last[0]) is not None


def closes_thought(text: str) -> bool:
    """Return True if a text contains the end of a thought."""
    return any(marks.closing.search(text) for marks in list_marks(text))


def split_thought(response: str, prompt: str = "") -> tuple[str, str]:
    """Return (thought, text after it) of a complete response; the text is "" if the response ends within the thought.

    The family comes from the thought that the prompt opened, else from the first mark. Thoughts of another family after it do
    not count either.

    Args:
        response: text of the model, with its marks.
        prompt: text before it; chat templates may open the thought at its end.
    """
    opened = find_opened(prompt)
    marks = opened or find_marks(response)
    if marks is None:
        return "", response
    thought, answer = marks.split(response, is_open=opened is not None)
    for _ in range(_MAX_FAMILIES):
        marks = find_marks(answer)
        if marks is None:
            return thought, answer
        answer = marks.split(answer)[1] if marks.closing.search(answer) else marks.cut(answer)
    return thought, ""


def remove_thought(response: str, prompt: str = "") -> str:
    """Return the part of a response after its thought, see `split_thought`."""
    return split_thought(response, prompt)[1]


def list_mark_tokens(tokens: Iterable[str]) -> frozenset[str]:
    """Return the tokens of a vocabulary that marks consist of: decoded text must keep them, special or not."""
    known = frozenset(tokens)
    kept = {token for token in known if _TAG.fullmatch(token)}
    return frozenset(kept.union(*(family.tokens for family in _FAMILIES.values() if known.issuperset(family.tokens))))


def find_template_marks(template: str, tokens: Iterable[str] = ()) -> ThoughtMarks:
    """Return the family of a chat template's text, else of its tokenizer's tokens, else <think>.

    Args:
        template: the text, in which names of tags and channels are.
        tokens: the tokenizer's added tokens.
    """
    kept = list_mark_tokens(tokens)
    by_tokens = [family for family in _FAMILIES.values() if family.tokens and kept.issuperset(family.tokens)]
    tags = [token for token in sorted(kept) if (match := _TAG.fullmatch(token)) is not None and not match[1]]
    return find_marks(template) or (find_marks(tags[0]) if tags else None) or next(iter(by_tokens), THINK)
