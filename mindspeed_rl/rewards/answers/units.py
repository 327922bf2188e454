"""Units of quantities: their dimensions and sizes. A unit outside the table is a dimension of its own, named by its words."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

_TABLE: dict[str, tuple[dict[str, int], Fraction]] = {}
for _dimensions, _sizes in {
    "length": {
        "nm": "1e-9", "mm millimeter millimetre 毫米": "1/1000", "cm centimeter centimetre 厘米": "1/100", "dm 分米": "1/10",
        "m meter metre 米": "1", "km kilometer kilometre 千米 公里": "1000", "in inch inches": "0.0254",
        "ft foot feet": "0.3048", "yd yard": "0.9144", "mile mi": "1609.344",
    },
    "length2": {"hectare ha 公顷": "10000", "acre": "4046.8564224"},
    "time": {
        "ms": "1/1000", "s sec second 秒": "1", "min minute 分钟": "60", "h hr hrs hour 小时": "3600", "day 天 日": "86400",
        "week 周": "604800",
    },
    "month": {"month 月 个月": "1", "yr yrs year 年": "12"},
    "mass": {
        "mg milligram": "1/1000", "g gram 克": "1", "kg kilogram 千克 公斤": "1000", "lb lbs pound": "453.59237",
        "ounce oz": "28.349523125", "ton tonne 吨": "1000000",
    },
    "length3": {"ml milliliter millilitre 毫升": "1e-6", "l L liter litre 升": "1/1000", "gallon": "0.003785411784"},
    "dollar": {"cent": "1/100", "dollar usd 美元": "1"},
    "yuan": {"分": "1/100", "角": "1/10", "yuan rmb 元 人民币": "1"},
    "euro": {"euro eur 欧元": "1"},
    "sterling": {"£": "1"},
    "angle": {"degree deg 度": "1"},
    "arc": {"rad radian 弧度": "1"},
    "celsius": {"celsius 摄氏度": "1"},
    "fahrenheit": {"fahrenheit": "1"},
    "current": {"ampere amp": "1", "ma": "1/1000"},
    "charge": {"coulomb": "1"},
    "temperature": {"kelvin": "1"},
    "voltage": {"volt": "1"},
    "energy": {"joule": "1", "kJ": "1000"},
    "power": {"watt": "1", "kW": "1000"},
    "force": {"newton": "1", "kN": "1000"},
    "frequency": {"hertz Hz": "1", "kHz": "1000"},
}.items():  # fmt: skip
    _base = {_dimensions.rstrip("23"): int(_dimensions[-1]) if _dimensions[-1].isdigit() else 1}
    for _names, _size in _sizes.items():
        for _name in _names.split():
            _TABLE[_name if len(_name) == 1 else _name.lower()] = (_base, Fraction(_size))
_SPEEDS = {"mph": "mile/h", "kph": "km/h", "kmh": "km/h"}
_CURRENCIES = {"$": "dollar", "¥": "yuan", "￥": "yuan", "€": "euro", "£": "£"}
#: letters that are a unit after a number and a blank, and their quotients; other single letters are variables
_LETTERS = frozenset("msghlL")
_LETTER_QUOTIENTS = frozenset(("m/s", "m/h", "g/l", "g/L", "l/s", "l/h", "L/s", "L/h", "g/h"))
#: words that change the value of the number before them, or say something about it
_NO_UNITS = frozenset(
    "and or not but nor is are was were be wrong right false true correct incorrect factorial squared cubed percent percentage "
    "dozen hundred thousand million billion trillion half halves third thirds quarter quarters fifth fifths tenth tenths plus "
    "minus lakh crore myriad gross inverse reciprocal negated opposite below under above short times over divided mod "
    "modulo root more less least most than approximately about base where when for all any each "
    "only exactly infinity pi negative positive even odd prime unknown none nothing maximum minimum max min to the".split()
)

#: what is counted in word problems, and what may follow a unit (years old): in the singular
_NOUNS = frozenset(" ".join(json.loads(Path(__file__).with_name("nouns.json").read_text(encoding="utf-8"))).split())
#: measure words
_COUNTED = re.compile(
    "[个只条张本名人次件位辆棵根块片朵颗粒头匹双对套台架艘座栋间层排行列组班页字"
    "句段篇题道场局步圈圆角边面点线项株桶"
    "盒箱袋瓶杯碗包支枝筐篮串捆斤两亩尺寸里户家所门节课封份幅副把扇顶床匙勺滴团堆束轮届级学平立种岁倍][\u4e00-\u9fff]{0,4}"
)

_POWER = r"(?:\s*\^\s*(?:\{\s*(-?\d)\s*\}|(-?\d)))?"
_FACTOR = re.compile(rf"(?:(square|sq|cubic|cu)\.?\s+|(平方|立方))?([A-Za-zµ']+|[\u4e00-\u9fff]+|£){_POWER}\.?")
_START = re.compile(r"(?<![A-Za-z\\_^{])[A-Za-zµ]|(?<![\u4e00-\u9fff])[\u4e00-\u9fff]")
_DEGREES = re.compile(r"(.*\S)\s*(?:\^\s*(?:\\circ|\{\s*\\circ\s*\})|°)", re.DOTALL)
_FUNCTION = re.compile(r"\\(?:arc)?(?:sin|cos|tan|cot|sec|csc)")
_LITERAL = re.compile(
    r"[+-]?\s*(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d*)?(?:\\overline\{\d+\})?(?:\s*\\cdot\s*10\^\s*(?:\{-?\d+\}|\d))?"
    r"(?:\s*\\frac\s*(?:\{\d+\}|\d)\s*(?:\{\d+\}|\d)|\s*/\s*\d+)?\s*"
)
_UNNAMED = re.compile(r"(?i)(?:(?:square|cubic|sq|cu)\.?\s+)?units?(?:\s*\^\s*\{?\s*[23]\s*\}?)?\.?")


@dataclass(frozen=True)
class Unit:
    """A unit.

    Attributes:
        dimensions: (name, exponent), sorted by name.
        size: in base units of these dimensions.
        is_plain: its words are units of the table or nouns that are counted; an answer may have it where the label has none.
    """

    dimensions: tuple[tuple[str, int], ...]
    size: Fraction
    is_plain: bool = field(default=True, compare=False)


def read_currency(symbol: str) -> Unit:
    """Return the unit of a currency symbol."""
    return Unit(((_CURRENCIES[symbol] if symbol != "£" else "sterling", 1),), Fraction(1))


def split_unit(text: str) -> tuple[str, Unit | None]:
    r"""Return (formula, unit) of an answer that ends with a unit; (the answer, None) without one.

    A unit outside the table, or of a single letter, needs a number before it: 2\pi h is not a time, and 5 x no unit.
    """
    degrees = _DEGREES.fullmatch(text)
    if degrees is not None:
        return (text, None) if _FUNCTION.search(degrees[1]) else (degrees[1], Unit((("angle", 1),), Fraction(1)))
    for match in _START.finditer(text):
        formula, tail = text[: match.start()].rstrip(), text[match.start() :].strip()
        if not formula:
            continue
        is_literal = any(char.isdigit() for char in formula) and _LITERAL.fullmatch(formula) is not None
        glued = text[match.start() - 1].isascii() and not text[match.start() - 1].isspace() and tail[0].isascii()
        if _UNNAMED.fullmatch(tail) and not glued:
            return formula, None
        unit = read_unit(tail, allows_words=is_literal and not glued)
        if unit is not None:
            return formula, unit
    return text, None


def read_unit(text: str, *, allows_words: bool) -> Unit | None:
    """Return the unit that a text is; None for other text.

    Args:
        allows_words: names outside the table, and single letters, count as well.
    """
    text = _SPEEDS.get(text.lower(), text)
    parts = re.split(r"\s*/\s*|\s+per\s+|每", text.strip())
    if len(parts) > 3:
        return None
    letters = re.sub(r"\s+|\^\s*\{?\d\}?", "", text)
    if len(letters) == 1 and letters.isascii() and not (allows_words and letters in _LETTERS):
        return None
    if len(parts) > 1 and max(map(len, letters.split("/"))) == 1 and letters not in _LETTER_QUOTIENTS and letters.isascii():
        return None
    dimensions: dict[str, int] = {}
    size = Fraction(1)
    is_plain = True
    for index, part in enumerate(parts):
        factors = _read_factors(part, allows_words)
        if factors is None:
            return None
        for base, factor_size, words in factors:
            is_plain &= not words or any(word in _NOUNS or _COUNTED.fullmatch(word) for word in words)
            for name, exponent in base.items():
                dimensions[name] = dimensions.get(name, 0) + (exponent if index == 0 else -exponent)
            size = size * factor_size if index == 0 else size / factor_size
    return Unit(tuple(sorted((name, exponent) for name, exponent in dimensions.items() if exponent)), size, is_plain)


def _read_factors(part: str, allows_words: bool) -> list[tuple[dict[str, int], Fraction, list[str]]] | None:
    """Return (dimensions, size, words outside the table) of each factor of a product of units; None for other text."""
    factors: list[tuple[dict[str, int], Fraction, list[str]]] = []
    words: list[str] = []
    position = 0
    while position < len(part):
        match = _FACTOR.match(part, position)
        if match is None:
            return None
        english, chinese, name, *powers = match.groups()
        power = int(next((power for power in powers if power), 1))
        power = {"sq": 2, "cu": 3, "平方": 2, "立方": 3}.get(chinese or (english or "")[:2], power)
        known = _TABLE.get(name) if len(name) == 1 else _TABLE.get(name.lower()) or _TABLE.get(_singular(name))
        if known is not None and not words:
            factors.append(({base: power * exponent for base, exponent in known[0].items()}, known[1] ** power, []))
        elif not allows_words or name.lower() in _NO_UNITS or (name.isascii() and len(name) < 3 and name != "of"):
            return None
        else:
            words.append(_singular(name))
        position = match.end()
        separator = re.compile(r"\s*(?:\\cdot(?![A-Za-z])|\*|·)\s*|\s+|-|$").match(part, position)
        if separator is None and part[position - 1].isascii():
            return None
        position = position if separator is None else separator.end()
    if words:
        factors.append(({" ".join(words): 1}, Fraction(1), words))
    return factors or None


def _singular(word: str) -> str:
    word = word.lower()
    if word.endswith("ies") and len(word) > 4:
        return word[:-3] + "y"
    if re.search(r"(?:s|x|z|ch|sh)es$", word):
        return word[:-2]
    return word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word
