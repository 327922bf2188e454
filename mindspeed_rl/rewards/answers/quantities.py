r"""Numbers in answers: 1,000; 3e5; 3\times10^5; 3\frac12; 50\%; \$18; 5 cm; six.

A `_Quantity` is exact: a decimal keeps its number of digits, because 1.732 is not \sqrt{3} and 99.99 is not 100.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

#: longer literals are never answers, and CPython does not parse integers above 4,300 digits
MAX_LITERAL_LENGTH = 400
#: a decimal with at least this many significant digits may be the rounding of another decimal
_ROUNDED_DIGITS = 4
#: a decimal with at least this many digits after the point may be the rounding of a fraction
_FRACTION_DECIMALS = 6

# Numbers in words: six, twenty-one, two thirds; 十二, 二分之一, 百分之五十.

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
#: longer texts are no numbers
_MAX_WORDS = 20

_NUMERAL_DIGITS = {char: digit for digit, char in enumerate("零一二三四五六七八九")} | {"两": 2, "〇": 0}
_SMALL = {"十": 10, "百": 100, "千": 1000}
_LARGE = {"万": 10**4, "亿": 10**8}
#: used after digits too, as in 1.5 million and 3万
_ALL_SCALES = _SCALES | _LARGE
_NUMERAL = "[零〇一二两三四五六七八九十百千万亿]"
#: counted things; other characters after a numeral form a word, as in 三角形
_COUNTED = re.compile(
    r"\s*(?:[个只条张本名人次件位辆棵天周年月日岁元分倍种米克升秒度%]|厘米|毫米|千米|公里|千克|公斤|小时|分钟|平方米)?"
)
_CHINESE = re.compile(rf"(?![百千万亿](?!分之))(?:({_NUMERAL}{{1,20}})分之)?({_NUMERAL}{{1,20}})")


def _read_words(text: str) -> tuple[Fraction, str] | None:
    """Return the longest number in words at the start of a text, and the rest of the text; None without one."""
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
    previous = 10**15  # each part is smaller than the one before it: "five six" is no number
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


# Numbers in digits

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d{1,3}(?: \d{3})+|\d+)"
_EXPONENT = r"(?:[eE]([+-]?\d{1,3})|\s*(?:\\times|\\cdot|×|\*)\s*10\s*\^\s*(?:\{\s*([+-]?\s*\d{1,3})\s*\}|(\d)))"
_DECIMAL = re.compile(rf"({_DIGITS})?(?:\.(\d*))?{_EXPONENT}?")
_REPEATING = re.compile(r"(\d*)\.(\d*)\\(?:overline|bar|dot)\s*\{?\s*(\d+)\s*\}?")
_POWER_OF_TEN = re.compile(r"10\s*\^\s*(?:\{\s*([+-]?\d{1,3})\s*\}|(\d))")
_PART = r"(?:\{\s*([+-]?\d+)\s*\}|(\d))"
_FRACTION = re.compile(rf"(?:(\d+)\s*)?\\?frac\s*{_PART}\s*{_PART}|(?:(\d+)\s+)?(\d+)\s*/\s*(\d+)")

#: dimension and size of units; other names are ignored
_UNITS: dict[str, tuple[str, Fraction]] = {}
for _dimension, _sizes in {
    "length": {
        "mm millimeter millimetre 毫米": "1/1000", "cm centimeter centimetre 厘米": "1/100", "m meter metre 米": "1",
        "km kilometer kilometre 千米 公里": "1000", "in inch inches": "0.0254", "ft foot feet": "0.3048", "yd yard": "0.9144",
        "mile mi": "1609.344",
    },
    "time": {
        "s sec second 秒": "1", "min minute 分钟": "60", "h hr hour 小时": "3600", "day 天": "86400", "week 周": "604800",
    },
    "mass": {"mg milligram": "1/1000", "g gram 克": "1", "kg kilogram 千克 公斤": "1000", "lb pound": "453.59237"},
    "volume": {"ml milliliter millilitre 毫升": "1/1000", "l liter litre 升": "1"},
    "money": {"cent 分": "1/100", "dollar": "1"},
    "yuan": {"yuan 元": "1"},
    "angle": {"degree deg 度": "1"},
    "arc": {"rad radian 弧度": "1"},
}.items():  # fmt: skip
    for _names, _size in _sizes.items():
        for _name in _names.split():
            _UNITS[_name] = (_dimension, Fraction(_size))
            if _name.isascii() and len(_name) > 2:
                _UNITS[f"{_name}s"] = _UNITS[_name]

_SPEEDS = {"mph": "mile/h", "kph": "km/h", "kmh": "km/h"}

_WORD = r"[A-Za-z\u4e00-\u9fff]+\.?"
_UNIT = re.compile(
    rf"\s*((?:(?:square|cubic|sq|cu)\.?\s+)?{_WORD}(?:[\s/]+(?:per\s+)?{_WORD})*)\s*(?:\^\s*\{{?\s*([23])\s*\}}?)?"
)


@dataclass(frozen=True)
class _Quantity:
    """A number with its percent sign and unit.

    Attributes:
        value: without percent sign and unit.
        decimals: digits after the point; None for integers and fractions.
        percent: True with a percent sign.
        unit: (dimension, size in the dimension's base unit); None without a known unit.
    """

    value: Fraction
    decimals: int | None = None
    percent: bool = False
    unit: tuple[str, Fraction] | None = None


def read_quantity(text: str) -> _Quantity | None:
    """Return the quantity of an answer without delimiters, None if it is none."""
    text = text.strip()
    if not text or len(text) > MAX_LITERAL_LENGTH:
        return None
    return _read_one(text) or _read_sum(text)


_TERM = re.compile(r"\s*(?:(?:,|and)\s+)?(\d+(?:\.\d+)?|\d+\s*/\s*\d+)\s*([A-Za-z]+|[\u4e00-\u9fff]+)\.?")
_MAX_TERMS = 4


def _read_sum(text: str) -> _Quantity | None:
    """Return the sum of 1 hour 30 minutes, 5 ft 6 in: units of one dimension in decreasing order."""
    terms, position = [], 0
    while (match := _TERM.match(text, position)) is not None and len(terms) < _MAX_TERMS:
        digits, unit = _read_digits(match[1]), _read_unit(match[2], None)
        if digits is None or unit is None or (terms and (unit[0] != terms[-1][1][0] or unit[1] >= terms[-1][1][1])):
            return None
        terms.append((digits[0], unit))
        position = match.end()
    if len(terms) < 2 or text[position:].strip():
        return None
    smallest = terms[-1][1]
    return _Quantity(sum((value * unit[1] for value, unit in terms), Fraction(0)) / smallest[1], None, False, smallest)


_WITH_UNIT = re.compile(
    r"(.*?\S)\s+((?:(?:square|cubic|sq|cu)\.?\s+)?[A-Za-z]{2,}(?:\s*/\s*[A-Za-z]+)?)\s*(?:\^\s*\{?\s*([23])\s*\}?)?", re.DOTALL
)
_UNNAMED_UNIT = re.compile(r"(?i)(?:(?:square|cubic|sq|cu)\.?\s+)?units?")


def split_unit(text: str) -> tuple[str, tuple[str, Fraction] | None]:
    r"""Return (formula, unit) of an answer that ends with a unit of two letters or more; (the answer, None) without one.

    Single letters are usually variables: 2\pi h is no time.
    """
    match = _WITH_UNIT.fullmatch(text)
    if match is None or match[2] == "in":
        return text, None
    if _UNNAMED_UNIT.fullmatch(match[2]):
        return match[1], None
    unit = _read_unit(match[2], match[3])
    return (text, None) if unit is None else (match[1], unit)


def _read_one(text: str) -> _Quantity | None:
    """Return the quantity of a text with one number and at most one unit; None for other text."""
    sign, rest = 1, text
    minus = _MINUS.match(text)
    if minus is not None:
        sign, rest = -1, text[minus.end() :]
    elif rest[0] in "+-−":
        sign, rest = (-1 if rest[0] != "+" else 1), rest[1:].lstrip()
    money = None
    if rest[:1] in ("$", "¥", "￥", "€", "£"):
        money, rest = ("money" if rest[0] == "$" else rest[0], Fraction(1)), rest[1:].lstrip()
    parsed = _read_number(rest)
    if parsed is None:
        return None
    value, decimals, tail = parsed
    percent = False
    if (match := re.match(r"\s*(?:\\?%|percent\b)", tail)) is not None:
        percent, tail = True, tail[match.end() :]
    unit = money
    if tail.strip():
        match = _UNIT.fullmatch(tail)
        # a letter directly after the digits is a variable: 5m is five times m
        if match is None or (len(match[1]) == 1 and match[1].isascii() and not tail[:1].isspace()):
            return None
        unit = _read_unit(match[1], match[2]) or money
    return _Quantity(sign * value, decimals, percent, unit)


_MINUS = re.compile(r"(?i)(?:negative|minus)\s+|负")
_SCALE = re.compile(rf"\s*({'|'.join(_ALL_SCALES)})(?![A-Za-z])")


def _read_number(text: str) -> tuple[Fraction, int | None, str] | None:
    """Return (value, digits after the point, rest of the text) of the number at the start of the text."""
    in_words = _read_words(text)
    if in_words is not None:
        return in_words[0], None, in_words[1]
    parsed = _read_digits(text)
    scale = None if parsed is None else _SCALE.match(parsed[2])
    if parsed is None or scale is None:
        return parsed
    return parsed[0] * _ALL_SCALES[scale[1]], None, parsed[2][scale.end() :]  # 1.5 million is no decimal


def _read_digits(text: str) -> tuple[Fraction, int | None, str] | None:
    """Return the same as `_read_number`, for a number that starts with a digit, a point or a fraction."""
    match = _FRACTION.match(text)
    if match is not None:
        integer, top, bottom = _split_fraction(match)
        return None if bottom == 0 else (integer + Fraction(top, bottom), None, text[match.end() :])
    match = _POWER_OF_TEN.match(text)
    if match is not None:
        return Fraction(10) ** int(match[1] or match[2]), None, text[match.end() :]
    match = _REPEATING.match(text)
    if match is not None:
        integer, fixed, repeated = match.groups()
        period = Fraction(int(repeated), (10 ** len(repeated) - 1) * 10 ** len(fixed))
        return Fraction(f"{integer or 0}.{fixed or 0}") + period, None, text[match.end() :]
    match = _DECIMAL.match(text)
    if match is not None and (match[1] or match[2]):
        exponent = int(next((part for part in match.groups()[2:] if part), "0").replace(" ", ""))
        digits = re.sub(r"[, ]", "", match[1] or "0")
        value = Fraction(f"{digits}.{match[2]}" if match[2] else digits) * Fraction(10) ** exponent
        decimals = max(len(match[2]) - exponent, 0) if match[2] else None
        return value, decimals or None, text[match.end() :]
    return None


def _split_fraction(match: re.Match[str]) -> tuple[int, int, int]:
    """Return integer part, numerator and denominator of a match of `_FRACTION`."""
    integer, *parts = match.groups()
    numbers = [int(part) for part in parts[:4] if part is not None]
    if not numbers:
        integer, numbers = parts[4], [int(part) for part in parts[5:] if part is not None]
    return int(integer or 0), numbers[0], numbers[1]


def _read_unit(name: str, power: str | None) -> tuple[str, Fraction] | None:
    """Return (dimension, size) of a unit, or of a quotient of two; None for an unknown name."""
    above, per, below = re.sub(r"\s+per\s+|\s*/\s*", "/", _SPEEDS.get(name.lower(), name)).partition("/")
    if per:
        over, under = _read_unit(above, None), _read_unit(below, power)
        return None if over is None or under is None else (f"{over[0]}/{under[0]}", over[1] / under[1])
    words = name.lower().replace(".", "").split()
    exponent = int(power or 1)
    if words[0] in ("square", "sq", "cubic", "cu"):
        exponent, words = (2 if words[0] in ("square", "sq") else 3), words[1:]
    if len(words) != 1 or words[0] not in _UNITS:
        return None
    dimension, size = _UNITS[words[0]]
    return f"{dimension}^{exponent}", size**exponent


def is_same_quantity(a: _Quantity, b: _Quantity) -> bool:
    """Return True for numbers that are equal exactly, as percentages, in units of one dimension, or by rounding."""
    if a.unit is not None and b.unit is not None:
        if a.unit[0].removesuffix("^1") != b.unit[0].removesuffix("^1"):
            return False
        if a.unit[1] != b.unit[1]:
            return a.value * a.unit[1] == b.value * b.unit[1]
    scales = [Fraction(1)]
    if a.percent != b.percent:
        # 50% may mean 50 or 0.5
        scales.append(Fraction(1, 100) if a.percent else Fraction(100))
    return any(_is_same_value(a, scale, b) for scale in scales)


def _is_same_value(a: _Quantity, scale: Fraction, b: _Quantity) -> bool:
    x, y = a.value * scale, b.value
    if x == y:
        return True
    if scale != 1:
        return False
    if a.decimals is None or b.decimals is None:
        exact, decimal, decimals = (x, y, b.decimals) if a.decimals is None else (y, x, a.decimals)
        if decimals is None:
            return False
        return exact.denominator != 1 and decimals >= _FRACTION_DECIMALS and _rounds_to(exact, decimal, decimals)
    if a.decimals == b.decimals or x.denominator == 1 or y.denominator == 1:
        return False
    longer, shorter, decimals = (x, y, b.decimals) if a.decimals > b.decimals else (y, x, a.decimals)
    return len(str(abs(shorter.numerator * 10**decimals // shorter.denominator))) >= _ROUNDED_DIGITS and _rounds_to(
        longer, shorter, decimals
    )


_BASED = re.compile(r"\(?\s*([0-9A-F]+)\s*\)?_\s*(?:\{\s*(\d{1,2})\s*\}|(\d))")


def compare_based(given: str, expected: str) -> bool | None:
    """Compare numbers with their base, as 1010_2; None unless one has it. Without a second base the digits decide."""
    first, second = (_BASED.fullmatch(text.strip()) for text in (given, expected))
    # letters with an index are a name, unless the other answer is a number
    if not any(match is not None and re.search(r"\d", match[1]) for match in (first, second)):
        return None
    digits = [match[1] if match else text.strip() for match, text in ((first, given), (second, expected))]
    if first is None or second is None:
        return digits[0].lstrip("0") == digits[1].lstrip("0")
    try:
        values = [int(match[1], int(match[2] or match[3])) for match in (first, second)]
    except ValueError:  # a digit that the base does not have: a name with an index
        return None
    return values[0] == values[1]


def _rounds_to(value: Fraction, rounded: Fraction, decimals: int) -> bool:
    return abs(value - rounded) <= Fraction(1, 2 * 10**decimals)
