r"""Parser of formulas: from LaTeX or plain text, in the notation of `notation.normalize`, to a tree.

It reads arithmetic, powers, roots, factorials, binomials, absolute values, the usual functions, and symbols with indices,
primes and accents; letters next to each other multiply. Everything else (sums, integrals, limits, relations, words) is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache

#: characters of a formula, levels of brackets and powers, nodes of its tree
MAX_ANSWER_LENGTH = 1000
_MAX_DEPTH = 40


class UnreadableError(ValueError):
    """The text is not a formula, or one that this parser does not know."""


@dataclass(frozen=True, slots=True)
class Node:
    """One operation of a formula.

    Attributes:
        op: "number", "symbol", "+", "*", "/", "^", "!", or the name of a function.
        args: operands.
        value: value of a number.
        name: name of a symbol or an unknown function.
        digits: (significant digits, digits after the point) of a number written as a decimal; (0, 0) for other numbers.
    """

    op: str
    args: tuple[Node, ...] = ()
    value: Fraction = field(default=Fraction(0))
    name: str = ""
    digits: tuple[int, int] = (0, 0)

    def walk(self) -> Iterator[Node]:
        """Yield this node and all below it."""
        yield self
        for arg in self.args:
            yield from arg.walk()


FUNCTIONS = frozenset(
    "sin cos tan cot sec csc arcsin arccos arctan arccot sinh cosh tanh coth arsinh arcosh artanh arcsinh arccosh arctanh "
    "ln log exp gcd lcm max min".split()
)
_INVERSES = {"sin": "arcsin", "cos": "arccos", "tan": "arctan", "cot": "arccot"}
_SEVERAL_ARGUMENTS = frozenset(("gcd", "lcm", "max", "min"))
_SYMBOLS = frozenset(
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi pi rho sigma tau upsilon phi "
    "varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega infty ell hbar".split()
)
_ACCENTS = frozenset("bar hat tilde dot ddot overline widetilde check".split())

_NUMBER = re.compile(r"\d{1,3}(?:,\d{3})+(?:\.\d+)?(?!\d)|\d+\.?\d*|\.\d+")
_REPEATED = re.compile(r"\\(?:overline|bar|dot)\s*\{?\s*(\d+)\s*\}?(?:(\d*)\\dot\s*\{?\s*(\d)\s*\}?)?")
_MIXED = re.compile(r"\s*\\frac\s*(?:\{\s*(\d+)\s*\}|(\d))\s*(?:\{\s*(\d+)\s*\}|(\d))")
_COMMAND = re.compile(r"\\([A-Za-z]+)\s*")
_RUN = re.compile(r"[A-Za-z]+")
_INDEX = re.compile(r"_\s*(?:\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}|(\\[A-Za-z]+|\w))")
_MARKS = re.compile(r"(?:'|\^\s*\{?\s*(?:'|\\prime|\*|\\ast|\\top|\\dagger|\\perp)+\s*\}?)+")
_DERIVATIVE = re.compile(r"\\frac\s*\{\s*d\s*(\^2)?\s*([A-Za-z]?)\s*\}\s*\{\s*d\s*([A-Za-z])\s*(\^2)?\s*\}")
_TIMES = re.compile(r"\\cdot(?![A-Za-z])|\\times(?![A-Za-z])|\*|×")
_DEGREE = re.compile(r"\^\s*\{?\s*\\circ\s*\}?|°")
_SIGN = re.compile(r"[+-]")
_CLOSING = {"(": ")", "[": "]", "{": "}", r"\{": r"\}", r"\lfloor": r"\rfloor", r"\lceil": r"\rceil"}
_WORD_VOWEL = re.compile(r"[aeiouAEIOU]")
_ALPHABET = "abcdefghijklmnopqrstuvwxyz"


_SHORT_WORDS = frozenset("no up it is in of or at by if on to we an as".split())


def is_word(run: str) -> bool:
    """Return True for letters that form a word and not a product, as "abc", "xyz" or "mgh"."""
    if len(run) < 3:
        return run.lower() in _SHORT_WORDS
    return run.lower() not in _ALPHABET and _WORD_VOWEL.search(run) is not None and run not in FUNCTIONS


class _Parser:
    """A recursive descent over one text."""

    def __init__(self, text: str) -> None:
        self.text, self.position, self.depth, self.bars = text, 0, 0, 0

    def peek(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        while self.position < len(self.text) and self.text[self.position].isspace():
            self.position += 1
        return pattern.match(self.text, self.position)

    def take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        match = self.peek(pattern)
        if match is not None:
            self.position = match.end()
        return match

    def expect(self, token: str) -> None:
        if self.take(re.compile(re.escape(token))) is None:
            raise UnreadableError(f"{token} is missing")

    def sum(self) -> Node:
        """Parse terms with signs between them."""
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise UnreadableError("nested too deeply")
        terms = []
        sign = self.take(_SIGN)
        while True:
            term = self.product()
            terms.append(negate(term) if sign is not None and sign[0] == "-" else term)
            sign = self.take(_SIGN)
            if sign is None:
                break
        self.depth -= 1
        return terms[0] if len(terms) == 1 else Node("+", tuple(terms))

    def product(self) -> Node:
        """Parse factors; a blank or nothing between two factors multiplies, from left to right as / divides."""
        result = self.signed_power()
        while True:
            if self.take(_TIMES):
                result = Node("*", (result, self.signed_power()))
            elif self.take(_SLASH):
                result = Node("/", (result, self.signed_power()))
            elif self.starts_factor():
                result = Node("*", (result, self.power()))
            else:
                return result

    def signed_power(self) -> Node:
        """Parse a factor that may have a sign, as in 2 * -3."""
        sign = self.take(_SIGN)
        factor = self.power()
        return negate(factor) if sign is not None and sign[0] == "-" else factor

    def starts_factor(self) -> bool:
        """Return True before a factor that multiplies what is before it. Two numbers side by side do not multiply."""
        bar = self.peek(_BAR)
        if bar is not None:
            return not self.bars
        command = self.peek(_COMMAND)
        if command is not None:
            return command[1] not in _CLOSING_COMMANDS
        if self.peek(_DIGIT) is not None:  # (n - 2) 2^n, but not 2 2^n
            return self.text[: self.position].rstrip()[-1:] in (")", "}", "!")
        return self.peek(_FACTOR) is not None

    def power(self) -> Node:
        """Parse an atom with its factorials, degrees and exponents."""
        base = self.atom()
        while True:
            if self.take(_DEGREE):
                base = Node("*", (base, Node("degree")))
            elif self.take(_FACTORIAL):
                base = Node("!", (base,))
            elif self.take(_CARET):
                return Node("^", (base, self.exponent()))
            else:
                return base

    def exponent(self) -> Node:
        if self.peek(_GROUP):
            return self.argument()
        sign = self.take(_SIGN)
        atom = self.atom()
        if self.take(_CARET):  # a tower without braces is not LaTeX
            raise UnreadableError("double exponent")
        return negate(atom) if sign is not None and sign[0] == "-" else atom

    def argument(self) -> Node:
        """Parse what TeX takes as an argument: a group in braces, one digit, one letter or one command."""
        if self.take(_GROUP):
            inner = self.sum()
            self.expect("}")
            return inner
        digit = self.take(_ONE)
        if digit is None:
            return self.atom()
        return _number(digit[0]) if digit[0].isdigit() else Node("symbol", name=digit[0])

    def atom(self) -> Node:
        """Parse a number, a symbol, a bracket, a root, a fraction or a function."""
        number = self.take(_NUMBER)
        if number is not None:
            return self.finish_number(number[0])
        opening = self.take(_OPENING)
        if opening is not None:
            bars, self.bars = self.bars, 0
            inner = self.sum()
            self.bars = bars
            self.expect(_CLOSING[opening[0]])
            return Node("floor" if "floor" in opening[0] else "ceil", (inner,)) if len(opening[0]) > 2 else inner
        if self.take(_BAR):
            self.bars += 1
            inner = self.sum()
            self.bars -= 1
            self.expect("|")
            return Node("abs", (inner,))
        derivative = self.take(_DERIVATIVE)
        if derivative is not None:
            return Node("symbol", name=derivative[0].replace(" ", ""))
        command = self.take(_COMMAND)
        if command is not None:
            return self.finish_command(command[1])
        run = self.peek(_RUN)
        if run is None:
            raise UnreadableError("no operand")
        if len(run[0]) > 2 and is_word(run[0]):
            before, after = self.text[max(run.start() - 1, 0) : run.start()], self.text[run.end() : run.end() + 1]
            if before in " " and after in " ":
                raise UnreadableError("a word")
            self.position = run.end()  # letters that may be a word are one symbol: "silent" is not "listen"
            return self.finish_symbol(run[0])
        self.position = run.start() + 1
        return self.finish_symbol(run[0][0])

    def finish_number(self, digits: str) -> Node:
        digits = digits.replace(",", "")
        repeated = self.take(_REPEATED) if "." in digits else None
        if repeated is not None:
            places = len(digits) - digits.index(".") - 1
            period_digits = "".join(group or "" for group in repeated.groups())
            period = Fraction(int(period_digits), (10 ** len(period_digits) - 1) * 10**places)
            return Node("number", value=Fraction(f"0{digits}".rstrip(".")) + period)
        mixed = self.take(_MIXED) if digits.isdigit() else None
        if mixed is not None:
            top, bottom = (int(part) for part in mixed.groups() if part is not None)
            if not bottom:
                raise UnreadableError("division by zero")
            return Node("number", value=int(digits) + Fraction(top, bottom))
        if self.peek(_UNDERSCORE):
            raise UnreadableError("a number with an index")
        return _number(digits)

    def finish_symbol(self, name: str) -> Node:
        """Parse index, primes and other marks of a symbol, and the argument of f, or of a symbol at a number, as I(0)."""
        for _ in range(2):
            index = self.take(_INDEX)
            if index is not None:
                name += "_" + re.sub(r"[\s{}]", "", index[1] or index[2])
            marks = self.take(_MARKS)
            if marks is not None:
                name += re.sub(r"[\s{}^]", "", marks[0].replace("\\prime", "'"))
        if (name.startswith("f") and self.peek(_PARENTHESIS)) or self.peek(_AT_NUMBER):
            return Node("unknown", self.arguments(), name=name)
        return Node("symbol", name=name)

    def arguments(self) -> tuple[Node, ...]:
        self.expect("(")
        bars, self.bars = self.bars, 0
        items = [self.sum()]
        while self.take(_COMMA):
            items.append(self.sum())
        self.bars = bars
        self.expect(")")
        return tuple(items)

    def finish_command(self, name: str) -> Node:
        if name == "frac":
            return Node("/", (self.argument(), self.argument()))
        if name == "binom":
            return Node("binom", (self.argument(), self.argument()))
        if name == "sqrt":
            index = None
            if self.take(_BRACKET):
                index = self.sum()
                self.expect("]")
            return Node("root", (self.argument(), index or _number("2")))
        if name in ("sum", "prod"):
            return self.finish_sum(name)
        if name in _SYMBOLS:
            return self.finish_symbol("\\" + name)
        if name in _ACCENTS:
            inner = self.take(_ACCENTED)
            if inner is None:
                raise UnreadableError("accent of a formula")
            return self.finish_symbol(f"{'bar' if name == 'overline' else name} {inner[1] or inner[2]}")
        if name in FUNCTIONS or name == "function":
            return self.finish_function(name)
        raise UnreadableError(f"\\{name}")

    def finish_sum(self, name: str) -> Node:
        r"""Parse the limits and the term of \sum_{k=1}^{n}; sums without end, and of a_k, are refused."""
        lower = self.take(_LOWER)
        start = None if lower is None else parse_expression(lower[2])
        if lower is None or start is None or self.take(_CARET) is None:
            raise UnreadableError("sum without limits")
        end, term = self.exponent(), self.product()
        is_endless = any(part.name == "\\infty" for part in end.walk())
        if is_endless or re.search(rf"_(?:{lower[1]}|\{{[^{{}}=]*{lower[1]}[^{{}}=]*\}})", self.text):
            raise UnreadableError("sum without end, or of a sequence")
        return Node(name, (term, start, end), name=lower[1])

    def finish_function(self, name: str) -> Node:
        r"""Parse index, exponent and argument: \log_2 8, \sin^2 x, \sin 2x, \max(1, 2)."""
        op, unknown = name, ""
        if name == "function":
            inner = self.take(_ACCENTED)
            if inner is None:
                raise UnreadableError("operator without a name")
            op, unknown = "unknown", (inner[1] or inner[2]).strip()
        base = exponent = None
        if self.take(_UNDERSCORE):
            base = self.argument()
        if self.take(_CARET):
            exponent = self.exponent()
        if exponent is not None and exponent.op == "number" and exponent.value == -1:
            if name not in _INVERSES:
                raise UnreadableError("inverse function")
            op, exponent = _INVERSES[name], None
        if self.peek(_PARENTHESIS):
            arguments = self.arguments()
            if exponent is None and self.take(_CARET):
                exponent = self.exponent()
        elif name in _SEVERAL_ARGUMENTS:
            raise UnreadableError("arguments without brackets")
        else:
            arguments = (self.bare_argument(),)
        if len(arguments) > 1 and op != "unknown" and op not in _SEVERAL_ARGUMENTS:
            raise UnreadableError("too many arguments")
        if base is not None:
            if name != "log":
                raise UnreadableError("function with an index")
            arguments = (*arguments, base)
        node = Node(op, arguments, name=unknown)
        return node if exponent is None else Node("^", (node, exponent))

    def bare_argument(self) -> Node:
        r"""Parse the argument of a function without brackets: the factors up to a sign, a function or a bracket."""
        sign = self.take(_SIGN)
        argument = self.power()
        while not self.peek(_BAR) and not self.peek(_PARENTHESIS) and self.starts_factor():
            command = self.peek(_COMMAND)
            if command is not None and (command[1] in FUNCTIONS or command[1] == "function"):
                break
            argument = Node("*", (argument, self.power()))
        if self.peek(_SLASH) and re.match(r"\s*/\s*\d", self.text[self.position :]):  # \sin \pi/6
            self.take(_SLASH)
            argument = Node("/", (argument, self.power()))
        return negate(argument) if sign is not None and sign[0] == "-" else argument


_LOWER = re.compile(r"_\s*\{\s*([A-Za-z])\s*=\s*([^{}=,]*(?:\{[^{}]*\}[^{}=,]*)*)\}")
_SLASH, _BAR, _CARET = re.compile(r"/|\\div(?![A-Za-z])"), re.compile(r"\|"), re.compile(r"\^")
_FACTORIAL, _UNDERSCORE, _COMMA = re.compile(r"!(?!\s*!)"), re.compile("_"), re.compile(",")
_GROUP, _BRACKET, _PARENTHESIS = re.compile(r"\{"), re.compile(r"\["), re.compile(r"\(")
_ONE = re.compile(r"[0-9A-Za-z]")
_AT_NUMBER, _DIGIT = re.compile(r"(?<! )\(\s*-?\d+(?:\.\d+)?\s*\)"), re.compile(r"\d")
_ACCENTED = re.compile(r"\{\s*(\\?[A-Za-z]+)\s*\}|([A-Za-z])")
_OPENING = re.compile(r"\(|\[|\{|\\lfloor(?![A-Za-z])|\\lceil(?![A-Za-z])")
_FACTOR = re.compile(r"[A-Za-z({]|\[")
_CLOSING_COMMANDS = frozenset(("rfloor", "rceil", "cdot", "times", "div"))


def _number(digits: str) -> Node:
    point = digits.find(".")
    if point < 0 or point == len(digits) - 1:
        return Node("number", value=Fraction(int(digits.rstrip("."))))
    significant = len(digits.replace(".", "").lstrip("0"))
    return Node("number", value=Fraction(digits), digits=(significant, len(digits) - point - 1))


def negate(node: Node) -> Node:
    """Return the tree of the negative."""
    if node.op == "number":
        return Node("number", value=-node.value, digits=node.digits)
    return Node("*", (Node("number", value=Fraction(-1)), node))


@lru_cache(maxsize=4096)
def parse_expression(text: str) -> Node | None:
    """Return the tree of a formula; None for other text."""
    if len(text) > MAX_ANSWER_LENGTH:
        return None
    parser = _Parser(text)
    try:
        tree = parser.sum()
    except (UnreadableError, RecursionError):
        return None
    return tree if not text[parser.position :].strip() else None
