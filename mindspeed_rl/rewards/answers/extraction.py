r"""Extraction of the final answer from a response, and of the accepted answers from a label."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

_LAST_NUMBER = re.compile(r"-?\d*\.?\d+")
_ANSWER_PHRASES = ("he answer is", "final answer is", "答案是", "答案为", "答案：", "答案:")


_FILLER = r"\$|\s|\}|\\[,;! ]|\\q?quad|\\text\s*\{"
_BETWEEN = re.compile(rf"(?:{_FILLER})*(?:,|;|、|\band\b|\bor\b|和|或|与|及)(?:{_FILLER}|\band\b|\bor\b)*")


def join_last(text: str, spans: Sequence[tuple[int, int, str]]) -> str | None:
    """Return the last of several parts of a text, with those before it that only a comma, "and" or "or" separates from it.

    Args:
        text: contains the parts.
        spans: (start, end, content) of each part, in order.
    """
    if not spans:
        return None
    joined = [spans[-1][2]]
    for (_, end, content), (start, _, _) in zip(spans[-2::-1], spans[:0:-1]):
        if not _BETWEEN.fullmatch(text[end:start]):
            break
        joined.insert(0, content)
    return ", ".join(dict.fromkeys(joined))


def extract_boxed(text: str) -> str | None:
    r"""Return the content of the last box; of several boxes that only "and" or a comma separates, all contents."""
    last = extract_last_boxed(text)
    spans = []
    position = text.find("\\boxed{")
    while position >= 0 and len(spans) < _MAX_BOXES:
        closing = _find_closing_brace(text[position + len("\\boxed") :])
        if closing is None:
            return last
        end = position + len("\\boxed") + closing + 1
        spans.append((position, end, text[position + len("\\boxed{") : end - 1]))
        position = text.find("\\boxed{", end)
    return join_last(text, spans) if spans and spans[-1][2] == last else last


_MAX_BOXES = 64


def extract_last_boxed(text: str) -> str | None:
    r"""Return the content of the last `\boxed{...}` (`\fbox{...}`, `\boxed x`) with nested braces, None if there is none.

    A box without its closing brace, at the end of a truncated response, counts too.
    """
    start = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if start < 0:
        return None
    content = text[text.index("box", start) :].removeprefix("boxed").removeprefix("box")
    if not content.startswith("{"):
        return content.split("$")[0].strip()
    closing = _find_closing_brace(content)
    return content[1:] if closing is None else content[1:closing]


def extract_closed_boxed(text: str) -> str | None:
    r"""Return the content of the last `\boxed{...}`; None if there is none or its braces never close."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    content = text[start + len("\\boxed") :]
    closing = _find_closing_brace(content)
    return None if closing is None else content[1:closing]


def _find_closing_brace(text: str) -> int | None:
    depth, escaped = 0, False
    for position, char in enumerate(text):
        if not escaped:
            depth += (char == "{") - (char == "}")
            if depth == 0:
                return position
        escaped = char == "\\" and not escaped  # \{ of a set or a system is not a brace
    return None


def extract_final_answer(text: str) -> str:
    r"""Return the final answer: the last box, else the text after "the answer is", else the last number; "" if none."""
    boxed = extract_boxed(text)
    if boxed is not None:
        return boxed.strip()
    for phrase in _ANSWER_PHRASES:
        if phrase in text:
            return text.rsplit(phrase, 1)[1].strip().split("\n")[0].rstrip(".。").strip()
    return extract_last_number(text) or ""


def extract_last_number(text: str) -> str | None:
    """Return the last number in the text, thousands commas removed."""
    numbers = _LAST_NUMBER.findall(text.replace(",", ""))
    return numbers[-1] if numbers else None


def extract_tagged_answer(text: str) -> str | None:
    """Return the content of the first <answer>..</answer>, None if there is none."""
    start = text.find("<answer>") + len("<answer>")
    end = text.find("</answer>", start)
    return text[start:end].strip() if start >= len("<answer>") and end >= 0 else None


def list_accepted_answers(label: object) -> list[str]:
    """Return the answers that a label accepts: the items of a list, or of a JSON list of strings; else only the label.

    [1, 2] without quotes is an interval, one answer. A worked solution that ends with "#### 6", as in GSM8K, is 6.
    """
    return [_remove_solution(answer) for answer in _list_answers(label)]


def _remove_solution(answer: str) -> str:
    """Return the text after the last "####" of a solution, else the answer."""
    final = answer.rpartition("####")[2].strip()
    return final if "####" in answer and final and "\n" not in final else answer


def _list_answers(label: object) -> list[str]:
    if isinstance(label, str) and label.lstrip().startswith('["'):
        try:
            items = json.loads(label)
        except (ValueError, RecursionError):
            return [label]
        return items if isinstance(items, list) and items and all(isinstance(item, str) for item in items) else [label]
    return [str(item) for item in label] if isinstance(label, (list, tuple)) else [str(label)]
