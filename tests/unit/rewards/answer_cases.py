r"""Labels of every type with answers that say the same and answers that say something else, built from their numbers.

Each maker draws numbers and writes down a label, equivalent answers and wrong ones from them, so what is right is known before
any comparison. `mutate` changes the text of any label in one place: a sign, a digit, an operator, a relation, a letter's size.
"""

# ruff: noqa: E501 (the answers of a case are a row)

import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

_GSM8K = Path(__file__).parents[2] / "data" / "gsm8k" / "sample.jsonl"


@dataclass(frozen=True)
class Case:
    """One label.

    Attributes:
        kind: type of the label.
        label: as a data set has it.
        right: (rewrite, answer) that must score 1.
        wrong: (mutation, answer) that must score 0.
    """

    kind: str
    label: str
    right: tuple[tuple[str, str], ...]
    wrong: tuple[tuple[str, str], ...]


Maker = Callable[[random.Random], Case]


def _case(kind: str, label: object, right: dict[str, object], wrong: dict[str, object]) -> Case:
    pairs = [tuple((name, str(answer)) for name, answer in group.items()) for group in (right, wrong)]
    return Case(kind, str(label), *pairs)


def _frac(value: Fraction, command: str = "frac") -> str:
    sign = "-" if value < 0 else ""
    return f"{sign}\\{command}{{{abs(value.numerator)}}}{{{value.denominator}}}"


def _signed(value: int, symbol: str, first: bool = False) -> str:
    """Return the term value * symbol with its sign."""
    if value == 0:
        return ""
    size = "" if abs(value) == 1 and symbol else abs(value)
    return f"{'-' if value < 0 else '' if first else '+'}{size}{symbol}"


def _digit(text: str, rng: random.Random) -> str:
    """Return the text with its last digit changed."""
    place = max(index for index, char in enumerate(text) if char.isdigit())
    return text[:place] + str((int(text[place]) + rng.randint(1, 8)) % 10) + text[place + 1 :]


def integer(rng: random.Random) -> Case:
    n = rng.choice([rng.randint(2, 99), rng.randint(1000, 9_999_999), 10 ** rng.randint(12, 30) + rng.randint(1, 999)])
    n *= rng.choice([1, 1, -1])
    right = {"blank": f" {n} ", "dollar": f"${n}$", "thousands": f"{n:,}", "point zero": f"{n}.0", "full width": _wide(str(n)),
             "named": f"x = {n}", "text": f"\\text{{{n}}}", "sum": f"{n - 3}+3", "LaTeX thousands": f"{n:,}".replace(",", "{,}")}  # fmt: skip
    wrong = {"sign": -n, "one more": n + 1, "digit": _digit(str(n), rng), "tenfold": 10 * n, "tenth": f"{n}.1", "doubled": f"{n}{abs(n)}",
             "variable": f"{n}x", "root": f"\\sqrt{{{abs(n)}}}", "other": f"{n}, {n + 1}", "inverse": f"\\frac{{1}}{{{n}}}",
             "factorial": f"{abs(n)}!!", "word": f"not {n}", "at most": f"at most {n}", "plus or minus": f"\\pm {abs(n)}"}  # fmt: skip
    return _case("integer", n, right, wrong)


def _wide(text: str) -> str:
    return "".join(chr(ord(char) + 0xFEE0) if char.isdigit() or char in "-+():,<>=" else char for char in text)


def decimal(rng: random.Random) -> Case:
    places = rng.randint(1, 4)
    value = Fraction(rng.randint(1, 99999) * 10 + rng.randint(1, 9), 10**places)
    text = f"{float(value):.{places}f}"
    right = {
        "zero": text + "0",
        "fraction": _frac(value),
        "slash": f"{value.numerator}/{value.denominator}",
        "dollar": f"${text}$",
    }
    wrong = {"sign": "-" + text, "digit": _digit(text, rng), "point": f"{float(value * 10):.{places}f}", "no point": text.replace(".", ""),
             "dropped": text[:-1] + "x", "added": text + "1", "percent of": f"{float(value * 10)}\\%"}  # fmt: skip
    return _case("decimal", text, right, wrong)


def fraction(rng: random.Random) -> Case:
    while (value := Fraction(rng.randint(-60, 60), rng.randint(3, 40))).denominator < 3 or abs(value.numerator) < 2:
        pass
    up, down = value.numerator, value.denominator
    right = {"dfrac": _frac(value, "dfrac"), "slash": f"{up}/{down}", "expanded": f"\\frac{{{2 * up}}}{{{2 * down}}}", "named": f"x={up}/{down}",
             "sum": f"{_frac(value + 1)}-1", "inner sign": f"\\frac{{{up}}}{{{down}}}", "blank": f"\\frac {{{up}}} {{{down}}}"}  # fmt: skip
    wrong = {"sign": _frac(-value), "upper": f"\\frac{{{up + 1}}}{{{down}}}", "lower": f"\\frac{{{up}}}{{{down + 1}}}", "decimal": f"{float(value):.3f}1",
             "inverse": _frac(1 / value), "upper alone": up, "product": f"{up} \\cdot {down}", "variable": f"{_frac(value)}x"}  # fmt: skip
    return _case("fraction", _frac(value), right, wrong)


def percent(rng: random.Random) -> Case:
    n = rng.choice([5, 15, 20, 37, 44, 68, 85, 96]) + rng.choice([0, 0.5])
    right = {"word": f"{n} percent", "sign": f"{n}%", "decimal": f"{n / 100:g}", "number": n, "full width": f"{n}％"}
    wrong = {
        "digit": f"{n + 1}\\%",
        "sign": f"-{n}\\%",
        "tenth": f"{n / 10:g}\\%",
        "hundredth": f"{n / 100:g}\\%",
        "number": n + 2,
    }
    return _case("percent", f"{n}\\%", right, wrong)


_UNITS = {
    "cm": ("mm", 10),
    "m": ("cm", 100),
    "km": ("m", 1000),
    "kg": ("g", 1000),
    "hours": ("minutes", 60),
    "feet": ("inches", 12),
}


def quantity(rng: random.Random) -> Case:
    unit, n = rng.choice(list(_UNITS)), rng.randint(2, 400)
    small, size = _UNITS[unit]
    right = {
        "converted": f"{n * size}\\text{{ {small}}}",
        "text": f"{n}\\text{{ {unit}}}",
        "mathrm": f"{n}\\,\\mathrm{{{unit}}}",
        "missing": n,
    }
    wrong = {"unit": f"{n} {small}", "other dimension": f"{n} L", "square": f"{n}\\text{{ {unit}}}^2", "digit": f"{n + 1} {unit}",
             "sign": f"-{n} {unit}", "wrong size": f"{n * size * 10} {small}", "tenth": f"{n / 10} {unit}"}  # fmt: skip
    return _case("quantity", f"{n} {unit}", right, wrong)


def counted(rng: random.Random) -> Case:
    n, (thing, other) = (
        rng.randint(2, 90),
        rng.choice([("apples", "pears"), ("cats", "dogs"), ("students", "teachers"), ("个", "只"), ("marbles", "coins")]),
    )
    right = {"text": f"{n}\\text{{ {thing}}}", "missing": n}
    wrong = {
        "unit": f"{n} {other}",
        "number": f"{n + 1} {thing}",
        "variable": f"{n} x",
        "power": f"{n}^2",
        "letter": f"{n} a b",
    }
    return _case("counted", f"{n} {thing}", right, wrong)


def money(rng: random.Random) -> Case:
    cents = rng.randint(101, 99999)
    text = f"{cents / 100:.2f}"
    right = {"plain": text, "word": f"{text} dollars", "escaped": f"\\${text}", "cents": f"{cents} cents"}
    wrong = {"currency": f"€{text}", "digit": f"\\${_digit(text, rng)}", "cents": f"{text} cents", "sign": f"-\\${text}"}
    return _case("money", f"\\${text}", right, wrong)


def power(rng: random.Random) -> Case:
    base, n = rng.randint(2, 9), rng.randint(20, 120)
    label, value = f"{base}^{{{n}}}-1", base**n - 1
    right = {
        "computed": value,
        "order": f"-1+{base}^{{{n}}}",
        "stars": f"{base}**{n}-1",
        "halves": f"{base}\\cdot {base}^{{{n - 1}}}-1",
    }
    wrong = {"sign": f"{base}^{{{n}}}+1", "exponent": f"{base}^{{{n + 1}}}-1", "computed": value + 1, "dropped": f"{base}^{{{n}}}",
             "base": f"{base + 1}^{{{n}}}-1", "product": f"{base}\\cdot{n}-1", "power of": f"{n}^{{{base}}}-1"}  # fmt: skip
    return _case("power", label, right, wrong)


def factorial(rng: random.Random) -> Case:
    n, k = rng.randint(8, 30), rng.randint(2, 5)
    value = _factorial(n)
    right = {"computed": value, "product": f"{n} \\cdot {n - 1}!", "thousands": f"{value:,}"}
    wrong = {
        "computed": value + 1,
        "less": value - 1,
        "other": f"{n + 1}!",
        "dropped": n,
        "divided": f"\\frac{{{n}!}}{{{k}}}",
        "plus": f"{n}!+1",
    }
    return _case("factorial", f"{n}!", right, wrong)


def _factorial(n: int) -> int:
    return n * _factorial(n - 1) if n > 1 else 1


def root(rng: random.Random) -> Case:
    a, b, r = rng.randint(1, 9), rng.randint(2, 9), rng.choice([2, 3, 5, 6, 7, 10, 11, 13])
    right = {"order": f"{b}\\sqrt{{{r}}}+{a}", "power": f"{a}+{b}\\cdot {r}^{{1/2}}", "under": f"{a}+\\sqrt{{{b * b * r}}}", "ascii": f"{a}+{b}*sqrt({r})",
             "sign": f"{a}+{b}√{r}", "decimal": f"{a + b * r**0.5:.8f}", "blank": f"{a} + {b} \\sqrt {{{r}}}"}  # fmt: skip
    wrong = {"minus": f"{a}-{b}\\sqrt{{{r}}}", "radicand": f"{a}+{b}\\sqrt{{{r + 12}}}", "factor": f"{a}+{b + 1}\\sqrt{{{r}}}", "dropped": f"{b}\\sqrt{{{r}}}",
             "no root": f"{a}+{b}\\cdot{r}", "decimal": f"{a + b * r**0.5 + 2e-6:.8f}", "short": f"{a + b * r**0.5:.2f}", "cube": f"{a}+{b}\\sqrt[3]{{{r}}}"}  # fmt: skip
    return _case("root", f"{a}+{b}\\sqrt{{{r}}}", right, wrong)


def with_pi(rng: random.Random) -> Case:
    a, b = rng.randint(2, 40), rng.choice([3, 7, 11, 13])
    label = f"\\frac{{{a * b + 1}\\pi}}{{{b}}}"
    right = {
        "factor": f"\\frac{{{a * b + 1}}}{{{b}}}\\pi",
        "ascii": f"{a * b + 1}*pi/{b}",
        "sign": f"{a * b + 1}π/{b}",
        "order": f"\\pi\\cdot\\frac{{{a * b + 1}}}{{{b}}}",
    }
    wrong = {"dropped": f"\\frac{{{a * b + 1}}}{{{b}}}", "square": f"\\frac{{{a * b + 1}\\pi^2}}{{{b}}}", "digit": f"\\frac{{{a * b + 2}\\pi}}{{{b}}}",
             "sign": f"-{label}", "lower": f"\\frac{{{a * b + 1}}}{{{b}\\pi}}", "degrees": f"{a * b + 1}^\\circ", "decimal": f"{(a * b + 1) * 3.14 / b:.2f}"}  # fmt: skip
    return _case("pi", label, right, wrong)


def polynomial(rng: random.Random) -> Case:
    x = rng.choice("xyztn")
    r, s = rng.sample([-7, -5, -4, -3, -2, 2, 3, 4, 5, 6, 8], 2)
    b, c = -(r + s), r * s
    label = f"{x}^2{_signed(b, x)}{_signed(c, '')}"
    factors = f"({x}{-r:+d})({x}{-s:+d})"
    right = {"factored": factors, "braces": label.replace("^2", "^{2}"), "order": f"{c}{_signed(b, x)}+{x}^2", "function": f"f({x})={label}",
             "stars": label.replace("^", "**"), "blanks": re.sub(r"([-+^{}])", r" \1 ", label.replace("^2", "^{2}"))}  # fmt: skip
    wrong = {"sign": f"{x}^2{_signed(b, x)}{_signed(-c, '')}", "exponent": label.replace("^2", "^3"), "name": label.replace(x, "w"), "value": c,
             "equation": f"{label}=0", "dropped": f"{x}^2{_signed(b, x) or '+1'}", "case": label.replace(x, x.upper()), "root": f"{x}={r}",
             "prime": label.replace(x, x + "'"), "factor": f"2({label})", "other factors": f"({x}{-r:+d})({x}{s:+d})"}  # fmt: skip
    return _case("polynomial", label, right, wrong)


def rational(rng: random.Random) -> Case:
    a, b = rng.sample(range(2, 12), 2)
    label = f"\\frac{{x+{a}}}{{x-{b}}}"
    right = {"slash": f"(x+{a})/(x-{b})", "dfrac": f"\\dfrac{{x+{a}}}{{x-{b}}}", "split": f"1+\\frac{{{a + b}}}{{x-{b}}}", "expanded": f"\\frac{{2x+{2 * a}}}{{2x-{2 * b}}}",
             "signs": f"\\frac{{-x-{a}}}{{{b}-x}}"}  # fmt: skip
    wrong = {"upper": f"\\frac{{x-{a}}}{{x-{b}}}", "lower": f"\\frac{{x+{a}}}{{x+{b}}}", "inverse": f"\\frac{{x-{b}}}{{x+{a}}}", "sign": f"-{label}",
             "name": f"\\frac{{y+{a}}}{{x-{b}}}", "no brackets": f"x+{a}/x-{b}", "product": f"(x+{a})(x-{b})", "capital": f"\\frac{{X+{a}}}{{x-{b}}}"}  # fmt: skip
    return _case("rational function", label, right, wrong)


def elementary(rng: random.Random) -> Case:
    a, b = rng.randint(2, 9), rng.randint(2, 9)
    label, right, wrong = rng.choice([
        (f"\\sin^2 ({a}x)+{b}", {"cosine": f"{b + 1}-\\cos^2({a}x)", "order": f"{b}+\\sin^{{2}}({a}x)"},
         {"cosine": f"\\cos^2({a}x)+{b}", "argument": f"\\sin^2({a + 1}x)+{b}", "square": f"\\sin({a}x^2)+{b}", "sign": f"\\sin^2({a}x)-{b}"}),
        (f"{a}\\ln {b}", {"power": f"\\ln({b}^{a})", "order": f"\\ln({b})\\cdot{a}"},
         {"argument": f"{a}\\ln {b + 1}", "sign": f"-{a}\\ln {b}", "factor": f"{a + 1}\\ln {b}", "sum": f"{a}+\\ln {b}", "dropped": f"\\ln {b}"}),
        (f"{a}e^{{-{b}x}}", {"lower": f"\\frac{{{a}}}{{e^{{{b}x}}}}", "exp": f"{a}\\exp(-{b}x)"},
         {"sign": f"{a}e^{{{b}x}}", "exponent": f"{a}e^{{-{b + 1}x}}", "minus": f"-{a}e^{{-{b}x}}", "dropped": f"{a}e^{{-{b}}}"}),
        (f"\\operatorname{{arsinh}}({a})-{b}", {"order": f"-{b}+\\operatorname{{arsinh}}({a})"},
         {"sign": f"\\operatorname{{arsinh}}({a})+{b}", "argument": f"\\operatorname{{arsinh}}({a + 1})-{b}", "name": f"\\operatorname{{artanh}}({a})-{b}"}),
        (f"\\operatorname{{Re}}(z)-{a}", {"order": f"-{a}+\\operatorname{{Re}}(z)"},
         {"sign": f"\\operatorname{{Re}}(z)+{a}", "name": f"\\operatorname{{Im}}(z)-{a}", "case": f"\\operatorname{{Re}}(Z)-{a}", "conjugate": f"\\operatorname{{Re}}(\\bar{{z}})-{a}"}),
    ])  # fmt: skip
    return _case("function", label, right, wrong)


def complex_number(rng: random.Random) -> Case:
    a, b = rng.randint(1, 20), rng.randint(2, 20)
    right = {"order": f"{b}i+{a}", "mathrm": f"{a}+{b}\\mathrm{{i}}", "blank": f"{a} + {b} i", "named": f"z={a}+{b}i"}
    wrong = {
        "conjugate": f"{a}-{b}i",
        "dropped": a,
        "no i": f"{a}+{b}",
        "swapped": f"{b}+{a}i" if a != b else "i",
        "negative": f"-{a}-{b}i",
        "i alone": f"{b}i",
        "pair": f"({a},{b})",
    }
    return _case("complex", f"{a}+{b}i", right, wrong)


def interval(rng: random.Random) -> Case:
    a = rng.randint(-30, 20)
    b = a + rng.randint(2, 30)
    left, right_bracket = rng.choice("(["), rng.choice(")]")
    low, high = ("<" if left == "(" else "\\le"), ("<" if right_bracket == ")" else "\\le")
    label = f"{left}{a},{b}{right_bracket}"
    right = {"blank": f"{left}{a}, {b}{right_bracket}", "left": f"\\left{left}{a},{b}\\right{right_bracket}", "relation": f"{a} {low} x {high} {b}",
             "member": f"x\\in {label}", "full width": f"{left}{a}，{b}{right_bracket}", "reverse": f"{b} {high.replace('<', '>').replace('le', 'ge')} x {low.replace('<', '>').replace('le', 'ge')} {a}"}  # fmt: skip
    wrong = {"left bracket": f"{'[' if left == '(' else '('}{a},{b}{right_bracket}", "right bracket": f"{left}{a},{b}{']' if right_bracket == ')' else ')'}",
             "sign": f"{left}{-a if a else -1},{b}{right_bracket}", "end": f"{left}{a},{b + 1}{right_bracket}", "swapped": f"{left}{b},{a}{right_bracket}", "one end": b,
             "set": f"\\{{{a},{b}\\}}", "infinite": f"{left}{a},\\infty)"}  # fmt: skip
    return _case("interval", label, right, wrong)


def union(rng: random.Random) -> Case:
    a = rng.randint(-20, 20)
    b = a + rng.randint(1, 20)
    label = f"(-\\infty,{a})\\cup[{b},\\infty)"
    right = {
        "order": f"[{b},\\infty)\\cup(-\\infty,{a})",
        "relation": f"x<{a} \\text{{ or }} x\\ge {b}",
        "sign": f"(-∞,{a})∪[{b},+∞)",
        "blank": label.replace(",", ", ").replace("\\cup", " \\cup "),
    }
    wrong = {"bracket": f"(-\\infty,{a}]\\cup[{b},\\infty)", "end": f"(-\\infty,{a - 1})\\cup[{b},\\infty)", "dropped": f"(-\\infty,{a})", "between": f"({a},{b}]",
             "cap": label.replace("cup", "cap"), "infinity": f"(\\infty,{a})\\cup[{b},\\infty)", "sign": label.replace("-\\infty", "\\infty")}  # fmt: skip
    return _case("union", label, right, wrong)


def inequality(rng: random.Random) -> Case:
    a = rng.randint(2, 60)
    sign, opposite, strict = rng.choice([("\\ge", "\\le", ">"), ("\\le", "\\ge", "<"), (">", "<", "\\ge"), ("<", ">", "\\le")])
    text = f"x {sign} {a}"
    right = {
        "turned": f"{a} {opposite} x",
        "spelling": text.replace("\\ge", "\\geq").replace("\\le", "\\leqslant"),
        "unicode": text.replace("\\ge", "≥").replace("\\le", "≤"),
        "ascii": text.replace("\\ge", ">=").replace("\\le", "<="),
    }
    wrong = {
        "relation": f"x {opposite} {a}",
        "strict": f"x {strict} {a}",
        "equal": f"x = {a}",
        "number": a,
        "sign": f"x {sign} -{a}",
        "name": f"y {sign} {a}",
        "not equal": f"x \\ne {a}",
        "digit": f"x {sign} {a + 1}",
    }
    return _case("inequality", text, right, wrong)


def number_set(rng: random.Random) -> Case:
    values = rng.sample(range(-40, 90), rng.randint(2, 5))
    text = ",".join(map(str, values))
    turned = ", ".join(map(str, reversed(values)))
    right = {
        "order": f"\\{{{turned}\\}}",
        "no backslash": f"{{{text}}}",
        "left": f"\\left\\{{{text}\\right\\}}",
        "list": turned,
        "and": " and ".join(map(str, values)),
        "Chinese": "{" + "，".join(map(str, values)) + "}",
    }
    wrong = {"sign": f"\\{{{text.replace(str(values[0]), str(-values[0] or 7), 1)}\\}}", "dropped": f"\\{{{','.join(map(str, values[1:]))}\\}}", "doubled": f"\\{{{text},{values[0]}\\}}",
             "added": f"\\{{{text},99\\}}", "tuple": f"({text})", "one": values[-1], "sum": "+".join(map(str, values))}  # fmt: skip
    return _case("set", f"\\{{{text}\\}}", right, wrong)


def number_list(rng: random.Random) -> Case:
    values = rng.sample(range(-40, 90), rng.randint(2, 4))
    text = ", ".join(map(str, values))
    right = {
        "order": ", ".join(map(str, reversed(values))),
        "or": " \\text{ or } ".join(map(str, values)),
        "named": " or ".join(f"x={value}" for value in values),
        "dunhao": "、".join(map(str, values)),
        "set": f"\\{{{text}\\}}",
    }
    wrong = {"sign": text.replace(str(values[-1]), str(-values[-1] or 3)) if str(values[-1]) not in ", ".join(map(str, values[:-1])) else "0", "dropped": ", ".join(map(str, values[:-1])), "last": values[-1],
             "digit": ", ".join(map(str, [*values[:-1], values[-1] + 1])), "doubled": f"{text}, {values[0]}", "glued": text.replace(", ", "")}  # fmt: skip
    return _case("list", text, right, wrong)


def plus_or_minus(rng: random.Random) -> Case:
    a, b = rng.randint(1, 9), rng.choice([2, 3, 5, 7])
    right = {
        "list": f"{a}+\\sqrt{{{b}}}, {a}-\\sqrt{{{b}}}",
        "order": f"{a}-\\sqrt{{{b}}}, {a}+\\sqrt{{{b}}}",
        "named": f"x={a}\\pm\\sqrt{{{b}}}",
        "sign": f"{a} ± √{b}",
    }
    wrong = {
        "plus": f"{a}+\\sqrt{{{b}}}",
        "minus": f"{a}-\\sqrt{{{b}}}",
        "sign": f"-{a}\\pm\\sqrt{{{b}}}",
        "digit": f"{a}\\pm\\sqrt{{{b + 4}}}",
        "number": a,
    }
    return _case("plus or minus", f"{a}\\pm\\sqrt{{{b}}}", right, wrong)


def point(rng: random.Random) -> Case:
    a, b, c = rng.sample(range(-20, 40), 3)
    right = {"left": f"\\left({a},{b},{c}\\right)", "blank": f"( {a} , {b} , {c} )", "langle": f"\\langle {a},{b},{c}\\rangle", "full width": f"（{a}，{b}，{c}）", "named": f"(x,y,z)=({a},{b},{c})",
             "values": f"x={a}, y={b}, z={c}", "column": f"\\begin{{pmatrix}}{a}\\\\{b}\\\\{c}\\end{{pmatrix}}"}  # fmt: skip
    wrong = {"swapped": f"({b},{a},{c})", "sign": f"({-a or 50},{b},{c})", "dropped": f"({a},{b})", "set": f"\\{{{a},{b},{c}\\}}", "doubled": f"({a},{b},{c},{c})", "bracket": f"[{a},{b},{c}]",
             "names": f"x={b}, y={a}, z={c}"}  # fmt: skip
    return _case("tuple", f"({a},{b},{c})", right, wrong)


_NAMES = [
    ("x", "y"),
    ("AB", "BC"),
    ("a_1", "a_2"),
    (r"\alpha", r"\beta"),
    ("f(1)", "f(2)"),
    ("P(A)", "P(B)"),
    ("max", "min"),
    (r"\angle A", r"\angle B"),
    ("S_{max}", "S_{min}"),
    ("R", "r"),
    ("Anna", "Ben"),
]


def named(rng: random.Random) -> Case:
    one, other = rng.choice(_NAMES)
    a, b = rng.sample(range(2, 60), 2)
    right = {
        "order": f"{other}={b}, {one}={a}",
        "blank": f"{one} = {a} , {other} = {b}",
        "and": f"{one}={a} \\text{{ and }} {other}={b}",
        "values": f"{a}, {b}",
        "semicolon": f"{one}={a}; {other}={b}",
    }
    wrong = {
        "swapped": f"{one}={b}, {other}={a}",
        "sign": f"{one}=-{a}, {other}={b}",
        "dropped": f"{one}={a}",
        "same name": f"{one}={a}, {one}={b}",
        "values": f"{b}, {a}",
        "digit": f"{one}={a}, {other}={b + 1}",
        "second": f"{other}={b}",
    }
    return _case("named values", f"{one}={a}, {other}={b}", right, wrong)


def value(rng: random.Random) -> Case:
    name, other = rng.choice(
        [
            ("x", "y"),
            ("n", "N"),
            ("a_5", "a_6"),
            ("f(2)", "f(3)"),
            ("AB", "AC"),
            (r"\theta", r"\phi"),
            ("k", "k'"),
            ("S_4", "T_4"),
        ]
    )
    n = rng.randint(2, 500)
    right = {"value": n, "blank": f"{name} = {n}", "dollar": f"${name}={n}$", "turned": f"{n}={name}"}
    wrong = {
        "name": f"{other}={n}",
        "value": f"{name}={n + 1}",
        "sign": f"{name}=-{n}",
        "relation": f"{name}<{n}",
        "not": f"{name}\\ne {n}",
        "number": n * 10,
        "list": f"{name}={n},{n + 1}",
    }
    return _case("named value", f"{name}={n}", right, wrong)


def line(rng: random.Random) -> Case:
    a, b, c = rng.randint(2, 9), rng.randint(2, 9), rng.randint(1, 30)
    right = {
        "zero": f"{a}x+{b}y-{c}=0",
        "turned": f"{c}={a}x+{b}y",
        "multiple": f"{2 * a}x+{2 * b}y={2 * c}",
        "order": f"{b}y+{a}x={c}",
        "solved": f"y=\\frac{{{c}-{a}x}}{{{b}}}",
    }
    wrong = {"right side": c, "zero": 0, "sign": f"{a}x-{b}y={c}", "constant": f"{a}x+{b}y={c + 1}", "left side": f"{a}x+{b}y", "swapped": f"{b}x+{a}y={c}" if a != b else f"x+y={c + 50}", "relation": f"{a}x+{b}y<{c}",
             "case": f"{a}X+{b}y={c}", "square": f"{a}x^2+{b}y={c}"}  # fmt: skip
    return _case("equation", f"{a}x+{b}y={c}", right, wrong)


def conic(rng: random.Random) -> Case:
    a, b = rng.sample([2, 3, 4, 5, 6, 7], 2)
    label = f"\\frac{{x^2}}{{{a * a}}}+\\frac{{y^2}}{{{b * b}}}=1"
    right = {
        "cleared": f"{b * b}x^2+{a * a}y^2={a * a * b * b}",
        "slash": f"x^2/{a * a}+y^2/{b * b}=1",
        "order": f"\\frac{{y^2}}{{{b * b}}}+\\frac{{x^2}}{{{a * a}}}=1",
        "squares": f"(x/{a})^2+(y/{b})^2=1",
    }
    wrong = {
        "right side": 1,
        "hyperbola": label.replace("+", "-"),
        "roots": f"\\frac{{x^2}}{{{a}}}+\\frac{{y^2}}{{{b}}}=1",
        "swapped": f"\\frac{{x^2}}{{{b * b}}}+\\frac{{y^2}}{{{a * a}}}=1",
        "constant": label.replace("=1", "=2"),
        "linear": label.replace("y^2", "y"),
    }
    return _case("conic", label, right, wrong)


def curve(rng: random.Random) -> Case:
    a, b = rng.randint(2, 9), rng.randint(1, 9)
    right = {
        "right side": f"{a}x+{b}",
        "function": f"f(x)={a}x+{b}",
        "zero": f"y-{a}x-{b}=0",
        "order": f"y={b}+{a}x",
        "turned": f"{a}x+{b}=y",
    }
    wrong = {
        "sign": f"y={a}x-{b}",
        "slope": f"y={a + 1}x+{b}",
        "name": f"x={a}y+{b}",
        "minus": f"y=-{a}x+{b}",
        "constant": b,
        "relation": f"y>{a}x+{b}",
        "prime": f"y'={a}x+{b}",
    }
    return _case("curve", f"y={a}x+{b}", right, wrong)


def matrix(rng: random.Random) -> Case:
    a, b, c, d = (rng.randint(2, 60) * rng.choice([1, -1]) for _ in range(4))
    wrap = {
        "array": lambda body: f"\\left[\\begin{{array}}{{rr}}{body}\\end{{array}}\\right]",
        "pmatrix": lambda body: f"\\begin{{pmatrix}}{body}\\end{{pmatrix}}",
        "bmatrix": lambda body: f"\\begin{{bmatrix}} {body} \\end{{bmatrix}}",
    }
    write = wrap[rng.choice(list(wrap))]
    body = f"{a} & {b} \\\\ {c} & {d}"
    right = {name: make(body) for name, make in wrap.items()} | {
        "blanks": write(body.replace(" ", "")),
        "nested": f"[[{a},{b}],[{c},{d}]]",
        "halves": write(f"\\frac{{{2 * a}}}{{2}} & {b} \\\\ {c} & {d}"),
    }
    wrong = {"sign": write(f"{-a} & {b} \\\\ {c} & {d}"), "transposed": write(f"{a} & {c} \\\\ {b} & {d}") if b != c else "0", "point": write(f"{a / 10} & {b} \\\\ {c} & {d}"), "dropped row": write(f"{a} & {b}"), "glued": write(f"{a}{abs(b)} & {c} \\\\ {d} & "),
             "determinant": f"\\begin{{vmatrix}}{body}\\end{{vmatrix}}", "last sign": write(f"{a} & {b} \\\\ {c} & {-d}"), "digit": write(f"{a} & {b} \\\\ {c + 1} & {d}"), "flat": f"{a},{b},{c},{d}"}  # fmt: skip
    return _case("matrix", write(body), right, wrong)


def system(rng: random.Random) -> Case:
    a, b = rng.sample(range(2, 40), 2)
    cases, array = (
        (lambda body: f"\\begin{{cases}}{body}\\end{{cases}}"),
        (lambda body: f"\\left\\{{\\begin{{array}}{{l}}{body}\\end{{array}}\\right."),
    )
    write = rng.choice([cases, array])
    right = {
        "cases": cases(f"x={a} \\\\ y={b}"),
        "array": array(f"x={a} \\\\ y={b}"),
        "order": write(f"y={b}\\\\x={a}"),
        "line": f"x={a}, y={b}",
        "point": f"({a}, {b})",
    }
    wrong = {
        "sign": write(f"x=-{a} \\\\ y={b}"),
        "swapped": write(f"x={b} \\\\ y={a}"),
        "point": write(f"x={a / 10} \\\\ y={b}"),
        "dropped": write(f"x={a}"),
        "glued": write(f"x={a}{b}"),
        "line": f"x={b}, y={a}",
    }
    return _case("system", write(f"x={a} \\\\ y={b}"), right, wrong)


def piecewise(rng: random.Random) -> Case:
    a, b = rng.sample(range(1, 20), 2)
    write = lambda *rows: "\\begin{cases}" + " \\\\ ".join(rows) + "\\end{cases}"  # noqa: E731
    up, down = f"x+{a} & x>{b}", f"x-{a} & x\\le {b}"
    right = {
        "order": write(down, up),
        "comma": write(up.replace(" &", ", &"), down.replace(" &", ", &")),
        "if": write(up.replace("& ", "& \\text{if } "), down.replace("& ", "& \\text{if } ")),
        "blanks": write(up, down).replace(" ", "").replace("\\le", "\\le "),
    }
    wrong = {
        "sign": write(up.replace("+", "-"), down),
        "both": write(up, down.replace("-", "+")),
        "conditions": write(f"x+{a} & x\\le {b}", f"x-{a} & x>{b}"),
        "relation": write(up.replace(">", "<"), down),
        "strict": write(up, down.replace("\\le", "<")),
        "dropped": write(up),
        "end": write(up, f"x-{a} & x\\le {b + 1}"),
    }
    return _case("piecewise", write(up, down), right, wrong)


def symbols(rng: random.Random) -> Case:
    label, right, wrong = rng.choice([
        (r"\frac{R}{r}", {"slash": "R/r"}, {"case": r"\frac{r}{R}", "same": r"\frac{r}{r}", "big": r"\frac{R}{R}", "prime": r"\frac{R'}{r}"}),
        (r"\pi(R^2-r^2)", {"expanded": r"\pi R^2-\pi r^2", "factors": r"\pi(R-r)(R+r)"}, {"case": r"\pi(r^2-R^2)", "sign": r"\pi(R^2+r^2)", "linear": r"\pi(R-r)^2"}),
        (r"\frac{1}{2}mv^2", {"over": r"\frac{mv^2}{2}", "decimal": "0.5mv^2"}, {"case": r"\frac12 Mv^2", "square": r"\frac12 m^2v", "dropped": r"\frac12 mv", "sign": r"-\frac12 mv^2"}),
        (r"\sqrt{\frac{2h}{g}}", {"split": r"\frac{\sqrt{2h}}{\sqrt{g}}", "ascii": "sqrt(2h/g)"}, {"inverse": r"\sqrt{\frac{2g}{h}}", "no root": r"\frac{2h}{g}", "factor": r"\sqrt{\frac{h}{g}}", "case": r"\sqrt{\frac{2H}{g}}"}),
        (r"\frac{abc}{ab+bc+ca}", {"order": r"\frac{abc}{ab+ac+bc}"}, {"sign": r"\frac{abc}{ab-bc+ca}", "square": r"\frac{abc}{ab+bc+ca^2}", "upper": r"\frac{ab}{ab+bc+ca}"}),
        (r"x_1^2+x_2^2", {"order": r"x_2^2+x_1^2", "braces": r"x_{1}^{2}+x_{2}^{2}"}, {"index": r"x_1^2+x_3^2", "sign": r"x_1^2-x_2^2", "no index": "x^2+x^2", "exponent": r"x_1^2+x_2^3"}),
        (r"\bar{z}+1", {"order": r"1+\bar{z}", "overline": r"\overline{z}+1"}, {"conjugate": "z+1", "sign": r"\bar{z}-1", "case": r"\bar{Z}+1"}),
        ("A^T", {"braces": "A^{T}"}, {"dropped": "A", "inverse": "A^{-1}", "other": "B^T", "case": "a^T"}),
        (r"f'(x)", {"blank": "f' (x)"}, {"dropped": "f(x)", "second": "f''(x)", "name": "g'(x)"}),
        (r"\Delta+\delta", {"order": r"\delta+\Delta"}, {"case": r"\delta+\delta", "sign": r"\Delta-\delta", "one": r"\Delta"}),
    ])  # fmt: skip
    return _case("symbols", label, right, wrong)


def choice(rng: random.Random) -> Case:
    a, b = rng.sample("ABCDE", 2)
    right = {
        "brackets": f"({a})",
        "text": f"\\text{{({a})}}",
        "point": f"{a}.",
        "option": f"Option {a}",
        "bold": f"\\textbf{{{a}}}",
        "with text": f"{a}. 42",
    }
    wrong = {
        "other": b,
        "both": f"{a}, {b}",
        "or": f"{a} or {b}",
        "with text": f"{b}. 42",
        "small": a.lower() + "x",
        "glued": a + b,
    }
    return _case("choice", a, right, wrong)


def choices(rng: random.Random) -> Case:
    letters = sorted(rng.sample("ABCDE", 3))
    right = {
        "glued": "".join(letters),
        "comma": ", ".join(letters),
        "and": f"{letters[0]}, {letters[1]} and {letters[2]}",
        "order": "、".join(reversed(letters)),
    }
    other = next(letter for letter in "ABCDE" if letter not in letters)
    wrong = {
        "dropped": "、".join(letters[:2]),
        "one": letters[0],
        "other": "、".join([*letters[:2], other]),
        "all": "、".join("ABCDE"),
        "or": " or ".join(letters),
    }
    return _case("choices", "、".join(letters), right, wrong)


def words(rng: random.Random) -> Case:
    a, b = rng.randint(2, 40), rng.randint(41, 90)
    label, right, wrong = rng.choice([
        (f"f(x)=x+{a} \\text{{ for all }} x", {"plain": f"f(x) = x+{a} for all x", "dollars": f"$f(x)=x+{a}$ for all $x$"}, {"sign": f"f(x)=x-{a} \\text{{ for all }} x", "number": f"f(x)=x+{b} for all x", "words": f"f(x)=x+{a} \\text{{ for some }} x"}),
        (f"\\text{{between }} -{a} \\text{{ and }} {b}", {"plain": f"between -{a} and {b}"}, {"sign": f"between {a} and {b}", "number": f"between -{a} and {b + 1}", "dropped": f"-{a}"}),
        (f"\\text{{at most }} {a}/{b}", {"frac": f"\\text{{at most }} \\frac{{{a}}}{{{b}}}"}, {"word": f"at least {a}/{b}", "glued": f"at most {a}{b}", "number": f"{a}/{b}", "sign": f"at most -{a}/{b}"}),
        (f"\\text{{all integers }} n \\ge {a}", {"plain": f"all integers n ≥ {a}"}, {"relation": f"all integers n \\le {a}", "strict": f"all integers n > {a}", "number": f"all integers n \\ge {b}", "other": f"all reals n \\ge {a}"}),
        (f"\\text{{divisible by }} {a}^2", {"braces": f"divisible by {a}^{{2}}"}, {"glued": f"divisible by {a}2", "exponent": f"divisible by {a}^3", "not": f"not divisible by {a}^2"}),
        (f"n^2+{a} \\text{{ where n is odd}}", {"plain": f"n^2+{a} where n is odd"}, {"sign": f"n^2-{a} where n is odd", "even": f"n^2+{a} where n is even"}),
        ("Evelyn", {"small": "evelyn", "text": r"\text{Evelyn}", "stop": "Evelyn."}, {"other": "Evelin", "more": "Evelyn Smith", "not": "not Evelyn", "anagram": "nylevE"}),
        ("increasing", {"case": "Increasing", "text": r"\text{increasing}"}, {"other": "decreasing", "not": "not increasing", "more": "increasing on (0,1)"}),
        ("yes", {"case": "Yes", "text": r"\text{Yes}"}, {"no": "no", "not": "not yes", "letters": "sey"}),
        ("北京", {"text": r"\text{北京}", "stop": "北京。"}, {"other": "南京", "more": "北京市南", "turned": "京北"}),
    ])  # fmt: skip
    return _case("words", label, right, wrong)


def ratio(rng: random.Random) -> Case:
    a, b = rng.choice([(2, 3), (3, 4), (5, 2), (7, 4), (5, 9)])
    right = {
        "blank": f"{a} : {b}",
        "multiple": f"{2 * a}:{2 * b}",
        "full width": f"{a}：{b}",
        "fraction": f"\\frac{{{a}}}{{{b}}}",
        "to": f"{a} to {b}",
    }
    wrong = {
        "turned": f"{b}:{a}",
        "part": f"{a}:{b + 6}",
        "third": f"{a}:{b}:{a}",
        "sum": a + b,
        "decimal": f"{a}.{b}",
        "sign": f"-{a}:{b}",
    }
    return _case("ratio", f"{a}:{b}", right, wrong)


def date(rng: random.Random) -> Case:
    year, month, day = rng.randint(1900, 2030), rng.randint(1, 12), rng.randint(1, 28)
    label, right, wrong = rng.choice([
        (f"{year}-{month:02}-{day:02}", {"slash": f"{year}/{month}/{day}", "Chinese": f"{year}年{month}月{day}日"}, {"sum": year - month - day, "day": f"{year}-{month:02}-{day % 28 + 1:02}", "year": f"{year + 1}-{month:02}-{day:02}"}),
        (f"{day}-{day + 9}", {"blank": f"{day} - {day + 9}"}, {"difference": -9, "end": f"{day}-{day + 8}", "turned": f"{day + 9}-{day}"}),
        (f"{month}:{30 + day:02}", {"dollar": f"${month}:{30 + day:02}$"}, {"minute": f"{month}:{29 + day:02}", "hour": f"{month + 1}:{30 + day:02}", "quotient": f"\\frac{{{month}}}{{{30 + day}}}"}),
        (f"{month}:{30 + day:02} p.m.", {"letters": f"{month}:{30 + day:02} PM", "missing": f"{month}:{30 + day:02}"}, {"half": f"{month}:{30 + day:02} a.m.", "minute": f"{month}:{29 + day:02} p.m."}),
    ])  # fmt: skip
    return _case("date", label, right, wrong)


def based(rng: random.Random) -> Case:
    n, base = rng.randint(20, 200), rng.choice([2, 3, 5, 8])
    digits, rest = "", n
    while rest:
        digits, rest = str(rest % base) + digits, rest // base
    right = {
        "braces": f"{digits}_{{{base}}}",
        "brackets": f"({digits})_{base}",
        "word": f"{digits} base {base}",
        "missing": digits,
        "decimal": f"{n}_{{10}}",
    }
    wrong = {
        "base": f"{digits}_{{{base + 4}}}",
        "digit": f"1{digits}_{base}",
        "value": n + 1,
        "value with base": f"{n + 1}_{{10}}",
        "negative": f"-{digits}",
    }
    return _case("base", f"{digits}_{base}", right, wrong)


def chinese(rng: random.Random) -> Case:
    n, m = rng.randint(11, 19), rng.randint(2, 9)
    label, right, wrong = rng.choice([
        (f"{n}", {"numeral": "十" + "一二三四五六七八九"[n - 11], "unit": f"{n}个", "full width": _wide(str(n))}, {"numeral": "二十" + "一二三四五六七八九"[n - 11], "scale": f"{n}万", "negative": f"负{n}"}),
        (f"{n}℃", {"LaTeX": f"{n}^\\circ C", "missing": n, "degree": f"{n}°C"}, {"fahrenheit": f"{n}°F", "digit": f"{n + 1}℃", "sign": f"-{n}℃"}),
        ("①③", {"dunhao": "①、③", "comma": "①,③", "turned": "③①"}, {"one": "①", "other": "①②", "all": "①②③"}),
        (f"{n}米", {"English": f"{n} m", "LaTeX": f"{n}\\text{{米}}", "centimetre": f"{n * 100}厘米"}, {"unit": f"{n}厘米", "digit": f"{n + 1}米", "mass": f"{n}千克"}),
        (f"（-∞，{n}）", {"LaTeX": f"(-\\infty,{n})", "relation": f"x＜{n}"}, {"bracket": f"(-\\infty,{n}]", "turned": f"x＞{n}", "end": f"（-∞，{n + 1}）"}),
        (f"x＝{n}或x＝-{m}", {"list": f"{n}, -{m}", "order": f"x=-{m} 或 x={n}"}, {"sign": f"x=-{n}或x={m}", "one": f"x={n}", "digit": f"x={n}或x=-{m + 1}"}),
        (f"百分之{'一二三四五六七八九'[m - 1]}十", {"percent": f"{m * 10}%", "decimal": f"{m / 10}"}, {"digit": f"{m * 10 + 1}%", "tenth": f"{m}%"}),
    ])  # fmt: skip
    return _case("Chinese", label, right, wrong)


MAKERS: tuple[Maker, ...] = (
    integer, decimal, fraction, percent, quantity, counted, money, power, factorial, root, with_pi, polynomial, rational, elementary,
    complex_number, interval, union, inequality, number_set, number_list, plus_or_minus, point, named, value, line, conic, curve,
    matrix, system, piecewise, symbols, choice, choices, words, ratio, date, based, chinese,
)  # fmt: skip


def make_cases(per_kind: int, seed: int = 48) -> list[Case]:
    """Return so many cases of each type, and the cases of GSM8K's labels."""
    rng = random.Random(seed)
    made = [maker(rng) for maker in MAKERS for _ in range(per_kind)]
    return made + [case for row in _GSM8K.read_text(encoding="utf-8").splitlines() for case in [_grade_school(json.loads(row))]]


def _grade_school(row: dict[str, str]) -> Case:
    number = row["answer"].split("####")[1].strip()
    n = int(number.replace(",", ""))
    right = {"dollars": f"\\${n}", "point zero": f"{n}.00", "named": f"x = {n}", "thousands": f"{n:,}"}
    return _case(
        "GSM8K", number, right, {"more": n + 1, "tenfold": n * 10, "sign": -n, "half": f"{n / 2}", "doubled": f"{n}{n}"}
    )


_CHANGES: tuple[tuple[str, re.Pattern[str], Callable[[re.Match[str]], str]], ...] = (
    ("sign", re.compile(r"(?<![-\w}])-(?=[\d\\a-zA-Z(])"), lambda match: ""),
    ("operator", re.compile(r"(?<=[\w})])\+(?=[\w\\({])"), lambda match: "-"),
    ("operator", re.compile(r"(?<=[\w})])-(?=[\w\\({])"), lambda match: "+"),
    ("digit", re.compile(r"\d"), lambda match: str((int(match[0]) + 3) % 10)),
    ("exponent", re.compile(r"\^2|\^\{2\}"), lambda match: "^3"),
    ("relation", re.compile(r"<|\\le(?![a-z])"), lambda match: ">"),
    ("relation", re.compile(r">|\\ge(?![a-z])"), lambda match: "<"),
    ("relation", re.compile("="), lambda match: "\\ne "),
    ("prime", re.compile(r"(?<![A-Za-z\\])[a-hk-z](?![A-Za-z'{.])"), lambda match: match[0] + "'"),
    ("case", re.compile(r"(?<![A-Za-z\\])[a-z](?![A-Za-z'{.])"), lambda match: match[0].upper()),
)


def mutate(label: str) -> Iterator[tuple[str, str]]:
    """Yield (mutation, answer) for every place of a label where one sign, digit, operator, relation or letter changes."""
    for name, pattern, change in _CHANGES:
        for match in pattern.finditer(label):
            if not label[: match.start()].endswith("{array}{"):  # the columns of an array
                yield name, label[: match.start()] + change(match) + label[match.end() :]
