"""Numbers in words: six, twenty-one, two thirds, 1.5 million; 十二, 二分之一, 百分之五十, 3万."""

from __future__ import annotations

import re
from fractions import Fraction

_ONES = {
    word: value
    for value, word in enumerate(
        "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen"
        " eighteen nineteen".split()
    )
}
_TENS = {word: 10 * digit for digit, word in enumerate("twenty thirty forty fifty sixty seventy eighty ninety".split(), 2)}
#: factors of the number before them
_SCALES = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
_PARTS = {"half": 2, "third": 3, "quarter": 4, "fourth": 4, "fifth": 5, "sixth": 6, "seventh": 7, "eighth": 8, "tenth": 10}
_PARTS |= {f"{word}s": denominator for word, denominator in _PARTS.items()} | {"halves": 2}
_ENGLISH = re.compile(r"[a-z]+(?:[ -][a-z]+)*")
#: longer texts are not numbers
_MAX_WORDS = 20

_NUMERAL_DIGITS = {char: digit for digit, char in enumerate("零一二三四五六七八九")} | {"两": 2, "〇": 0}
_SMALL = {"十": 10, "百": 100, "千": 1000}
_LARGE = {"万": 10**4, "亿": 10**8}
#: used after digits too, as in 1.5 million and 3万
SCALES = _SCALES | _LARGE
_NUMERAL = "[零〇一二两三四五六七八九十百千万亿]"
#: counted things; other characters after a numeral form a word, as in 三角形
_COUNTED = re.compile(
    r"\s*(?:[个只条张本名人次件位辆棵天周年月日岁元分倍种米克升秒度%]|厘米|毫米|千米|公里|千克|公斤|小时|分钟|平方米)?"
)
_CHINESE = re.compile(rf"(?![百千万亿](?!分之))(?:({_NUMERAL}{{1,20}})分之)?({_NUMERAL}{{1,20}})")
_DECIMAL = re.compile(rf"({_NUMERAL}{{1,20}})点([{''.join(_NUMERAL_DIGITS)}]{{1,20}})")


def read_words(text: str) -> tuple[Fraction, str] | None:
    """Return the longest number in words at the start of a text, and the rest of the text; None without one."""
    decimal = _DECIMAL.match(text)
    if decimal is not None and (whole := _read_chinese(decimal[1])) is not None:
        digits = "".join(str(_NUMERAL_DIGITS[char]) for char in decimal[2])
        return whole + Fraction(int(digits), 10 ** len(digits)), text[decimal.end() :]
    match = _CHINESE.match(text)
    if match is not None:
        below, above = (_read_chinese(part) if part else None for part in match.groups())
        rest = text[match.end() :]
        if above is None or (match[1] and not below) or not _COUNTED.fullmatch(rest):
            return None
        return Fraction(above, below or 1), rest
    match = _ENGLISH.match(text.lower())
    if match is None:
        return None
    words = list(re.finditer("[a-z]+", match[0]))[:_MAX_WORDS]
    for length in range(len(words), 0, -1):
        value = _read_english([word[0] for word in words[:length]])
        if value is not None:
            return value, text[words[length - 1].end() :]
    return None


def _read_english(words: list[str]) -> Fraction | None:
    """Return the number that all these words form; None for other words."""
    if words[0] == "half":  # half a dozen, half an hour: the hour is a unit
        halved = Fraction(1) if len(words) == 2 else _read_english(["one", *words[2:]])
        return None if len(words) == 1 or words[1] not in ("a", "an") or halved is None else halved / 2
    if len(words) > 1 and words[-1] in _PARTS:
        above = Fraction(1) if words[:-1] == ["a"] else _read_english(words[:-1])
        return None if above is None else above / _PARTS[words[-1]]
    if words[0] == "a" and len(words) > 1:
        words = ["one", *words[1:]]
    if words[0] in _SCALES:
        words = ["one", *words]
    if words[0] == "and" or words[-1] == "and":
        return None
    total = group = 0  # before and after the last scale of a thousand or more
    previous = 10**15  # each part is smaller than the one before it: "five six" is not a number
    for word in words:
        if word == "and":
            continue
        if word in _SCALES:
            size = _SCALES[word]
            if not group:
                return None
            if size == 100:
                group, previous = group * 100, 100
            else:
                total, group, previous = total + group * size, 0, 10**15
            continue
        value = _ONES.get(word, _TENS.get(word))
        if value is None or value >= previous:
            return None
        group += value
        previous = 10 if word in _TENS else 0
    return Fraction(total + group)


def _read_chinese(text: str) -> int | None:
    """Return the number that these numerals form; None if they form none."""
    if all(char in _NUMERAL_DIGITS for char in text):  # 二〇二三
        return int("".join(str(_NUMERAL_DIGITS[char]) for char in text))
    total = section = digit = 0
    for char in text:
        if char in _NUMERAL_DIGITS:
            digit = _NUMERAL_DIGITS[char]
        elif char in _SMALL:
            section += (digit or 1) * _SMALL[char]
            digit = 0
        else:
            total = (total + section + digit) * _LARGE[char]
            section = digit = 0
    return total + section + digit or None
