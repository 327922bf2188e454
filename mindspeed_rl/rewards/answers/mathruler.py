r"""Comparison of two answers with the results of mathruler's `grade_answer`, right or wrong, which verl and slime use.

There an answer is equal if the MATH data set's grader spells it as the label, or if a plain text of it is the label's, or if
sympy finds no difference between the elements of both texts. Here a parser of arithmetic reads these texts; none is evaluated.
"""

from __future__ import annotations

import contextlib
import re
import unicodedata
from typing import Any

import sympy

from mindspeed_rl.rewards.answers.expressions import MAX_ANSWER_LENGTH
from mindspeed_rl.rewards.answers.judge import CpuLimitError, cpu_limit

# The MATH data set's spelling

_MATH_REMOVED = ("\n", "\\!")
_MATH_REPLACED = (
    ("\\\\", "\\"), ("tfrac", "frac"), ("dfrac", "frac"), ("\\left", ""), ("\\right", ""), ("^{\\circ}", ""), ("^\\circ", ""),
    ("\\$", ""),
)  # fmt: skip
_WHOLE_FRACTION = re.compile(r"(0|-?[1-9]\d*)/(0|-?[1-9]\d*)")
_TEXT = re.compile(r"\\text\{(.+?)\}")


def spell_math(text: str) -> str:
    """Return an answer as the MATH data set's grader spells it.

    Raises:
        ValueError: it has several units.
        IndexError: a root or a fraction ends the text.
    """
    for part in _MATH_REMOVED:
        text = text.replace(part, "")
    for before, after in _MATH_REPLACED:
        text = text.replace(before, after)
    if "\\text{ " in text:
        text, _ = text.split("\\text{ ")
    text = text.replace("\\\\%", "").replace("\\%", "").replace(" .", " 0.").replace("{.", "{0.")
    if not text:
        return text
    text = f"0{text}" if text[0] == "." else text
    sides = text.split("=")
    if len(sides) == 2 and len(sides[0]) <= 2:
        text = sides[1]
    head, *roots = text.split("\\sqrt")
    text = head + "".join(f"\\sqrt{root}" if root[0] == "{" else f"\\sqrt{{{root[0]}}}{root[1:]}" for root in roots)
    text = _spell_fractions(text.replace(" ", ""))
    text = "\\frac{1}{2}" if text == "0.5" else text
    whole = _WHOLE_FRACTION.fullmatch(text)
    return text if whole is None else f"\\frac{{{whole[1]}}}{{{whole[2]}}}"


def _spell_fractions(text: str) -> str:
    r"""Return a text with braces around the two digits of `\frac12`; unchanged where a fraction has only one sign."""
    head, *fractions = text.split("\\frac")
    parts = [head]
    for fraction in fractions:
        if fraction[0] == "{":
            parts.append(fraction)
        elif len(fraction) == 1:
            return text
        elif fraction[1] == "{":
            parts.append(f"{{{fraction[0]}}}{fraction[1:]}")
        else:
            parts.append(f"{{{fraction[0]}}}{{{fraction[1]}}}{fraction[2:]}")
    return "\\frac".join(parts)


def _spell_stripped(answer: str) -> str:
    """Return the spelling of an answer without blanks and a text command around it; the answer itself where it has none."""
    answer = answer.strip()
    if match := re.match(r"^\\text\{(.+?)\}$", answer):
        answer = match[1].strip()
    try:
        return spell_math(answer)
    except (IndexError, ValueError):
        return answer


# Plain text of LaTeX

#: macro=sign
_PLAIN_SIGNS = (
    "circ=∘ le=≤ leq=≤ ge=≥ geq=≥ neq=≠ in=∈ emptyset=∅ pm=± div=÷ angle=∠ to=→ rightarrow=→ mid=| lvert=| rvert=| vert=| "
    "dots=… ldots=… cdots=⋯ cap=∩ lfloor=⌊ rfloor=⌋ lceil=⌈ rceil=⌉ langle=⟨ rangle=⟩ sum=∑ int=∫ prod=∏ oint=∮ cong=≅ "
    "equiv=≡ approx=≈ sim=∼ simeq=≃ perp=⊥ parallel=∥ forall=∀ exists=∃ subset=⊂ subseteq=⊆ supset=⊃ setminus=∖ nabla=∇ "
    "partial=∂ ell=ℓ square=□ Rightarrow=⇒ Leftrightarrow=⇔ leftarrow=← lnot=¬ wedge=∧ vee=∨ oplus=⊕ otimes=⊗ star=⋆ ast=∗ "
    "bullet=∙ notin=∉ ni=∋ propto=∝ mp=∓ aleph=ℵ hbar=ħ varnothing=∅ sqsubset=⊏ mapsto=↦ uparrow=↑ downarrow=↓ top=⊤ "
    "measuredangle=∡ vdots=⋮ ddots=⋱ therefore=∴ because=∵ dagger=† epsilon=ϵ varepsilon=ε vartheta=ϑ phi=ϕ varphi=φ "
    "varrho=ϱ varsigma=ς Lambda=Λ lambda=λ Vert=‖ lVert=‖ rVert=‖ ll=≪ gg=≫"
)
#: macros with a sign of their own
_SIGNS = {
    "pi": "pi", "infty": "inf", "cup": "U", "cdot": "*", "times": "*", "ne": "", "prime": "'", "quad": "  ", "qquad": "    ",
    "lbrace": "{", "rbrace": "}", "backslash": "\\", "inf": "inf", "sup": "sup",
} | {name: sign for name, _, sign in (pair.partition("=") for pair in _PLAIN_SIGNS.split())}  # fmt: skip
#: macros that write letters in another alphabet of Unicode -> its name
_ALPHABETS = {
    "mathbb": "DOUBLE-STRUCK", "mathcal": "SCRIPT", "mathbf": "BOLD", "mathfrak": "FRAKTUR", "mathsf": "SANS-SERIF",
    "mathtt": "MONOSPACE", "mathit": "ITALIC",
}  # fmt: skip
#: macros that put a mark on their argument
_MARKS = {"vec": "\u20d7", "hat": "\u0302", "bar": "\u0305", "tilde": "\u0303", "dot": "\u0307", "ddot": "\u0308"}
#: one sign after the backslash -> text
_ESCAPES = {",": " ", ";": " ", ":": " ", " ": " ", "!": "", "\\": "\n", "\n": " "}
_LIGATURES = (("---", "—"), ("--", "–"), ("``", "“"), ("''", "”"))
#: macros whose argument is dropped with them
_DROPPED_GROUPS = frozenset(("mbox", "hspace", "vspace", "label", "color", "textcolor", "xrightarrow"))
_COMMANDS = frozenset(("frac", "nicefrac", "sqrt"))
_FUNCTIONS = frozenset("sin cos tan cot sec csc ln log exp arcsin arccos arctan sinh cosh tanh min max gcd lim det".split())
_MATRICES = frozenset("pmatrix bmatrix matrix vmatrix array".split())
_LATEX = re.compile(r"\\([a-zA-Z]+)[ \t\n]*|\\(.)|([{}])|([^\\{}]+)", re.DOTALL)


#: macro, escape, brace or other text, of which one is there
_Token = tuple[str | None, str | None, str | None, str | None]


def _read_latex(text: str) -> str:
    """Return the plain text of LaTeX: a fraction a/b, a root sqrt(a), signs, and the content of other commands.

    Raises:
        ValueError: a brace is open, or a command has no argument.
    """
    tokens: list[_Token] = [(match[1], match[2], match[3], match[4]) for match in _LATEX.finditer(text)]
    parts: list[str] = []
    position = 0
    while position < len(tokens):
        part, position = _read_token(tokens, position)
        parts.append(part)
    return "".join(parts)


def _read_token(tokens: list[_Token], position: int) -> tuple[str, int]:
    """Return the text of a token with its arguments, and the place after them."""
    macro, escape, brace, plain = tokens[position]
    position += 1
    if plain is not None:
        for signs, one in _LIGATURES:
            plain = plain.replace(signs, one)
        return plain, position
    if escape is not None:
        return _ESCAPES.get(escape, escape), position
    if brace == "{":
        parts: list[str] = []
        while position < len(tokens) and tokens[position][2] != "}":
            part, position = _read_token(tokens, position)
            parts.append(part)
        if position == len(tokens):
            raise ValueError("an open brace")
        return "".join(parts), position + 1
    if brace is not None:
        raise ValueError("a brace that is not open")
    assert macro is not None
    if macro in _COMMANDS:
        return _read_command(tokens, position, macro)
    if macro in _ALPHABETS or macro in _MARKS:
        content, position = _read_argument(tokens, position)
        mark = _MARKS.get(macro)
        return _write(content, _ALPHABETS[macro]) if mark is None else unicodedata.normalize("NFC", content + mark), position
    if macro in ("begin", "end"):
        name, position = _read_argument(tokens, position)
        if name not in _MATRICES:
            return "", position
        if macro == "begin" and name == "array":
            _, position = _read_argument(tokens, position)
        return ("[ " if macro == "begin" else " ]"), position
    if macro in _DROPPED_GROUPS:
        return "", _read_argument(tokens, position)[1]
    return _name_sign(macro), position


def _name_sign(macro: str) -> str:
    if macro in _SIGNS or macro in _FUNCTIONS:
        return _SIGNS.get(macro, macro)
    size = "CAPITAL" if macro[0].isupper() else "SMALL"
    try:
        return unicodedata.lookup(f"GREEK {size} LETTER {macro.upper()}")
    except KeyError:
        return ""  # its arguments stay as groups


def _write(text: str, alphabet: str) -> str:
    """Return a text in one of Unicode's mathematical alphabets; signs that it does not have stay."""

    def find(sign: str) -> str:
        kind = "CAPITAL" if sign.isupper() else "SMALL"
        # some letters were in Unicode before the alphabets
        old = "BLACK-LETTER" if alphabet == "FRAKTUR" else alphabet
        for name in (f"MATHEMATICAL {alphabet} {kind} {sign.upper()}", f"{old} {kind} {sign.upper()}"):
            with contextlib.suppress(KeyError):
                return unicodedata.lookup(name)
        return sign

    return "".join(find(sign) if sign.isascii() and sign.isalpha() else sign for sign in text)


def _read_command(tokens: list[_Token], position: int, macro: str) -> tuple[str, int]:
    r"""Return a fraction or a root with its arguments; `\sqrt[3]{8}` loses its degree there."""
    if macro != "sqrt":
        top, position = _read_argument(tokens, position)
        bottom, position = _read_argument(tokens, position)
        return f"{top}/{bottom}", position
    if position < len(tokens) and (plain := tokens[position][3]) is not None and plain.startswith("[") and "]" in plain:
        tokens[position] = (None, None, None, plain.partition("]")[2])
    content, position = _read_argument(tokens, position)
    return f"sqrt({content})", position


def _read_argument(tokens: list[_Token], position: int) -> tuple[str, int]:
    """Return the next group, or the next sign, whose token keeps what follows."""
    while position < len(tokens) and (plain := tokens[position][3]) is not None:
        if plain := plain.lstrip():
            tokens[position] = (None, None, None, plain[1:])
            return plain[0], position
        position += 1
    if position == len(tokens) or tokens[position][0] in _COMMANDS:
        raise ValueError("a command without its argument")
    return _read_token(tokens, position)


# Plain text of an answer

_UNITS = "degree cm centimeter meter mile second minute hour day week month year foot feet inch yard".split()
_POWERS = (("million", "*10^6"), ("billion", "*10^9"), ("trillion", "*10^12"))
_COMMA = re.compile(r"(\d),(\d\d\d)($|\D)")


def _drop_commas(text: str) -> str:
    """Return a text without the commas between thousands."""
    while (shorter := _COMMA.sub(r"\1\2\3", text)) != text:
        text = shorter
    return text


def _read_float(text: str) -> float | None:
    """Return what Python's float reads, if it is finite."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if abs(number) < float("inf") else None


def _read_whole(text: str) -> int | None:
    number = _read_float(text)
    return round(number) if number is not None and abs(number - round(number)) <= 1e-7 else None


def _spell_plain(answer: str) -> str:
    """Return an answer in lower case without blanks, braces, LaTeX and units; a whole number as an integer."""
    if match := re.match(r"^\\text\{(.+?)\}$", answer):
        answer = match[1]
    for part in ("\\%", "\\$", "$", "%"):
        answer = answer.replace(part, part[1:])
    answer = answer.replace(" or ", " , ").replace(" and ", " , ")
    for word, power in _POWERS:
        answer = answer.replace(word, power)
    for unit in _UNITS:
        answer = re.sub(rf"{unit}(es)?(s)? *(\^[0-9]+)?", "", answer)
    answer = re.sub(r"\^ *\\circ", "", answer)
    if answer and answer[0] == "{" and answer[-1] == "}":
        answer = answer[1:-1]
    answer = re.sub(r",\\! *", "", answer)
    if (whole := _read_whole(answer)) is not None:
        answer = str(whole)
    if "\\" in answer:
        answer = _convert_latex(answer)
    answer = re.sub("- *", "-", answer)
    answer = re.sub(r"([0-9]) +([0-9])", r"\1+\2", answer)  # mixed numbers are sums
    answer = answer.translate(str.maketrans("", "", " {}")).lower()
    if _read_whole(_drop_commas(answer)) is not None:
        number = _read_float(answer.replace(",", ""))
        answer = answer if number is None else str(int(number))
    return answer


def _convert_latex(answer: str) -> str:
    for name in ("\\tfrac", "\\dfrac"):
        answer = answer.replace(name, "\\frac")
    answer = answer.replace("\\frac", " \\frac")
    try:
        text = _read_latex(answer)
    except (ValueError, RecursionError):
        return answer
    for sign, name in (("√", "sqrt"), ("π", "pi"), ("∞", "inf"), ("∪", "U"), ("·", "*"), ("×", "*")):
        text = text.replace(sign, name)
    return text.strip()


# Comparison


def grade_mathruler(given: str, expected: str) -> bool:
    """Return True if mathruler's `grade_answer` takes the answer for the label."""
    if len(given) > MAX_ANSWER_LENGTH:
        return given.strip() == expected.strip()
    if _spell_stripped(given) == _spell_stripped(expected):
        return True
    first, second = _spell_plain(given), _spell_plain(expected)
    if first == second:
        return True
    if not first:
        return False
    given_parts, expected_parts = _split(first), _split(second)
    if len(expected_parts) > 1 and (second[0] != first[0] or second[-1] != first[-1]):
        return False
    if len(expected_parts) != len(given_parts):
        return False
    return all(_is_same(*pair) for pair in zip(given_parts, expected_parts)) and bool(expected_parts)


def _split(text: str) -> list[str]:
    """Return the elements of a tuple or an interval; a text of its own is one."""
    text = _drop_commas(text)
    if len(text) > 2 and text[0] in "()[]" and text[-1] in "()[]" and not set(text[1:-1]) & set("()[]"):
        return [element.strip() for element in text[1:-1].split(",")]
    return [text] if text else []


_FRACTION = re.compile(r"^-?[0-9]+.?/0*[1-9][0-9]*.?$")
#: powers by which mathruler expects a hang
_POWER = re.compile(r"\^\{|\^\(|\^[0-9]+\^|\^[0-9][0-9]+")


def _is_same(given: str, expected: str) -> bool:
    if _FRACTION.search(given) and _FRACTION.search(expected):
        return given == expected
    if (_read_whole(_drop_commas(given)) is None) != (_read_whole(_drop_commas(expected)) is None):
        return False
    difference = f"({expected})-({given})"
    letters = {sign for sign in difference.replace("sqrt", "").replace("frac", "") if sign.isalpha()}
    if len(letters) > 2 or _POWER.search(difference):
        return False
    try:
        with cpu_limit():
            # a name that is not a symbol in one answer may be one of sympy's
            return bool(sympy.simplify(_Parser(expected).read() - _Parser(given).read()) == 0)
    except (CpuLimitError, RecursionError):
        return False
    except Exception:  # noqa: BLE001 (sympy may fail in any way on arbitrary expressions, which then are not the same)
        return False


#: a number as Python's tokenizer cuts it (007 is 00 and 7), a name, a sign
_WORD = re.compile(
    r"([0-9]+\.[0-9]*(?:e[+-]?[0-9]+)?|\.[0-9]+(?:e[+-]?[0-9]+)?|[0-9]+e[+-]?[0-9]+|0+|[1-9][0-9]*)|([^\W\d]\w*)"
    r"|(\*\*|[-+*/^()!,])"
)
#: functions and numbers of sympy with a name of at most two letters besides sqrt
_NAMES = {"pi": sympy.pi, "sqrt": sympy.sqrt, "ln": sympy.ln, "re": sympy.re, "im": sympy.im}


#: a value of sympy, whose operators have no types
_Value = Any


class _Parser:
    """Arithmetic as sympy's parser reads it with implicit multiplication: `2x`, `3sqrt(2)`, `xy`, `x^2/2`."""

    def __init__(self, text: str) -> None:
        self.words: list[tuple[str, str]] = []
        position = 0
        while position < len(text):
            match = _WORD.match(text, position)
            if match is None:
                raise ValueError(f"no arithmetic: {text}")
            kind, word = ("number", "name", "sign")[(match.lastindex or 1) - 1], match[0]
            position = match.end()
            if kind == "name" and word not in _NAMES and text[position : position + 1] != "(":
                # the product of its letters and numbers
                self.words += [("number" if part.isdigit() else "name", part) for part in re.findall(r"\d+|.", word)]
            else:
                self.words.append((kind, word))
        self.place = 0

    def read(self) -> _Value:
        value = self._sum()
        if self.place != len(self.words):
            raise ValueError("more follows")
        return value

    def _take(self, *signs: str) -> str | None:
        if self.place < len(self.words) and self.words[self.place] in [("sign", sign) for sign in signs]:
            self.place += 1
            return self.words[self.place - 1][1]
        return None

    def _sum(self) -> _Value:
        value = self._product()
        while sign := self._take("+", "-"):
            other = self._product()
            value = value + other if sign == "+" else value - other
        return value

    def _product(self) -> _Value:
        value = self._signed()
        while True:
            if sign := self._take("*", "/"):
                other = self._signed()
                value = value * other if sign == "*" else value / other
            elif self.place < len(self.words) and (self.words[self.place][0] != "sign" or self.words[self.place][1] == "("):
                value = value * self._power()
            else:
                return value

    def _signed(self) -> _Value:
        if sign := self._take("+", "-"):
            value = self._signed()
            return -value if sign == "-" else value
        return self._power()

    def _power(self) -> _Value:
        value = self._atom()
        return value ** self._signed() if self._take("^", "**") else value

    def _atom(self) -> _Value:
        if self.place == len(self.words):
            raise ValueError("nothing follows")
        kind, word = self.words[self.place]
        self.place += 1
        if kind == "number":
            value = sympy.Integer(word) if word.isdigit() else sympy.Float(word)
        elif kind == "name":
            value = self._name(word)
        elif word == "(":
            value = self._sum()
            if self._take(")") is None:
                raise ValueError("an open bracket")
        else:
            raise ValueError(f"{word} is not a value")
        while self._take("!"):
            value = sympy.factorial(value)
        return value

    def _name(self, word: str) -> _Value:
        """Return a constant, a symbol, or a function with its arguments."""
        known = _NAMES.get(word)
        if not self._take("("):
            if callable(known):
                raise ValueError(f"{word} has no argument")
            return sympy.Symbol(word) if known is None else known
        arguments = [self._sum()]
        while self._take(","):
            arguments.append(self._sum())
        if self._take(")") is None:
            raise ValueError("an open bracket")
        return (known if callable(known) else sympy.Function(word))(*arguments)
