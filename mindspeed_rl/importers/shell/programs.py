"""What the few programs write whose output can be known from their words."""

from __future__ import annotations

import itertools
import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Literal

from mindspeed_rl.importers.shell.command import Command

#: programs that change a file in its place, with the option for it, and programs whose last word is what they write
_EDITORS = frozenset("sed gsed perl yq dasel crudini".split())
_IN_PLACE = re.compile(r"-[A-Za-z]*i|--in-?place")
_COPIES = frozenset("cp mv ln install rsync".split())
#: words in front of a command, programs that write or remove all their words, and options of others that name what they write
_FRONT = frozenset("sudo nohup command exec time".split())
_WHOLE = frozenset("tee rm unlink truncate".split())
_OF_OUTPUT = re.compile(r"-o|--out[\w-]*")
#: a file of options in the text of a Python program, and the calls that write one
_NAMED_FILE = re.compile(r"""["']([^"'\s]+\.(?:ya?ml|json))["']""")
_WRITES = re.compile(r"""["'][wa]\+?["']|write_text|dump|save\(""")
#: folders whose files are those of the machine that runs the script
_OF_MACHINE = ("/proc/", "/sys/", "/etc/", "/dev/null")
#: numbers that seq or braces may have
_MAX_COUNT = 10_000
#: a whole number of them; no counter of a script is longer
_NUMBER = r"-?\d{1,15}"
#: a form of printf that is followed: no width or precision of a script has four digits
_FORMAT = re.compile(r"%[-+ 0#]*\d{0,3}(?:\.\d{1,2})?[sdiuoxXfeEgGbqc]")
#: what a backslash means for echo and printf
_ESCAPE = r"\\(?:({octal})|x([0-9a-fA-F]{{1,2}})|u([0-9a-fA-F]{{1,4}})|(.))"
_OCTAL = {"echo": "0[0-7]{1,3}", "format": "[0-7]{1,3}", "%b": "0[0-7]{1,3}|[1-7][0-7]{0,2}"}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "e": "\x1b", "E": "\x1b", "f": "\f", "v": "\v", "\\": "\\"}
#: an expression that bc computes as the shell does, and the words of expr for which this is so
_OF_BC = re.compile(r"(?:[\d\s+*/%()<>-]|[<>=!]=)*")
_OF_EXPR = re.compile(rf"{_NUMBER}|[-+*/%()<>]|[<>=!]=")


def count(first: int, last: int, step: int) -> list[int]:
    """Return the whole numbers from the first to the last; none where they are too many, or the step leads away."""
    if not step or abs(last - first) // abs(step) >= _MAX_COUNT:
        return []
    return list(range(first, last + (1 if step > 0 else -1), step))


def list_braces(word: str) -> list[str]:
    """Return the words that {a,b} and {1..8..2} outside of quotes make of a word; another word as it is."""
    place = 0
    while place < len(word):
        end = _skip(word, place)
        if word[place] != "{" or end == place + 1:
            place = end
            continue
        parts = _split_alternatives(word[place + 1 : end - 1])
        if parts is not None:
            heads = [word[:place] + item for part in parts for item in list_braces(part)]
            tails = list_braces(word[end:])
            if len(heads) * len(tails) <= _MAX_COUNT:
                return [head + tail for head in heads for tail in tails]
        place += 1
    return [word]


def _skip(word: str, place: int) -> int:
    """Return the place after a quote, an expansion or braces with all that they hold; after one character otherwise."""
    char = word[place]
    if char == "\\":
        return place + 2
    if char in "'\"`":
        end = place + 1
        while end < len(word) and word[end] != char:
            end += 2 if char != "'" and word[end] == "\\" else 1
        return end + 1
    if char == "$" and word[place + 1 : place + 2] in ("{", "("):
        return _find_end(word, place + 1)
    return _find_end(word, place) if char in "{(" else place + 1


def _find_end(word: str, place: int) -> int:
    """Return the place after what a bracket holds; after the bracket where it has no end."""
    closing = {"{": "}", "(": ")"}[word[place]]
    end = place + 1
    while end < len(word):
        if word[end] == closing:
            return end + 1
        end = _skip(word, end)
    return place + 1


def _split_alternatives(text: str) -> list[str] | None:
    """Return what stands between the commas of braces, or their range; None for other braces, which stay as they are."""
    if (match := re.fullmatch(rf"({_NUMBER})\.\.({_NUMBER})(?:\.\.({_NUMBER}))?", text)) is not None:
        first, last = int(match.group(1)), int(match.group(2))
        step = abs(int(match.group(3) or 1)) or 1
        width = max(len(item) for item in match.groups()[:2]) if re.search(r"(^|\.)-?0\d", text) else 0
        return [str(item).zfill(width) for item in count(first, last, step if first <= last else -step)] or None
    match = re.fullmatch(rf"([A-Za-z])\.\.([A-Za-z])(?:\.\.({_NUMBER}))?", text)
    if match is not None and match[1].islower() == match[2].islower():
        first, last, step = ord(match[1]), ord(match[2]), abs(int(match[3] or 1)) or 1
        return list(map(chr, count(first, last, step if first <= last else -step))) or None
    parts, place, start = [], 0, 0
    while place < len(text):
        if text[place] == ",":
            parts.append(text[start:place])
            start = place + 1
        place = _skip(text, place)
    return [*parts, text[start:]] if parts else None


def _read_escapes(text: str, kind: Literal["echo", "format", "%b"]) -> str | None:
    """Return a text with the escapes of `echo -e`, a format of `printf` or its %b; None where it is not followed."""
    parts, place = [], 0
    for match in re.finditer(_ESCAPE.format(octal=_OCTAL[kind]), text, re.DOTALL):
        octal, byte, letter, char = match.groups()
        code = int(octal, 8) if octal else int(byte or letter, 16) if byte or letter else None
        if char == "c" or (code is not None and not 0 < code < 128 and not letter):
            return None  # it ends the text there, or is a part of a character
        quotes = kind == "format" and char in ("'", '"', "?")
        plain = char if quotes else _ESCAPES.get(char or "", match.group())
        parts += [text[place : match.start()], plain if code is None else chr(code)]
        place = match.end()
    return "".join([*parts, text[place:]])


def format_text(words: Sequence[str]) -> str | None:
    """Return what `printf` writes: its format for each group of its arguments; None where it is not followed."""
    template = _read_escapes(words[0].replace("%%", "%%\1") if words else "", "format")
    if template is None:
        return None
    parts = re.split(r"(%[^a-zA-Z%]*[a-zA-Z%]?)", template.replace("%%\1", "%%"))
    kinds = [part for part in parts[1::2] if part != "%%"]
    if not all(_FORMAT.fullmatch(part) for part in kinds):
        return None
    arguments, texts = list(words[1:]), []
    while True:
        for place, part in enumerate(parts):
            if place % 2 == 0 or part == "%%":
                texts.append("%" if part == "%%" else part)
                continue
            text = _format_one(part, arguments.pop(0) if arguments else "")
            if text is None:
                return None
            texts.append(text)
        if not arguments or not kinds:
            return "".join(texts)


def _format_one(form: str, word: str) -> str | None:
    """Return an argument in its form; None where it is not followed."""
    kind, plain = form[-1], form in ("%s", "%b", "%q", "%c")
    if "\0" in word and form != "%s":
        return None
    if kind == "s":
        return form % word
    if kind in "bqc":
        quoted = word if re.fullmatch(r"[\w./:@%+=-]+", word, re.ASCII) else None if word else "''"
        return None if not plain else _read_escapes(word, "%b") if kind == "b" else quoted if kind == "q" else word[:1]
    if kind in "diuoxX":
        number = _read_integer(word)
        return None if number is None or (number < 0 and kind in "uoxX") else form.replace("u", "d") % number
    if not re.fullmatch(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d{1,2})?|", word):
        return None
    number = float(word or 0)
    around = {form % value for value in (math.nextafter(number, -math.inf), number, math.nextafter(number, math.inf))}
    # the shell computes with more digits: where these do not decide, only a number that has none of them is known
    is_exact = Decimal(word or 0) == Decimal(number)
    return form % number if is_exact or len(around) == 1 else None


def _read_integer(word: str) -> int | None:
    match = re.fullmatch(r"([-+]?)(?:(0[xX][0-9a-fA-F]{1,15})|0([0-7]{0,20})|([1-9]\d{0,17})|)", word)
    if match is None or (match[1] and not any(match.groups()[1:]) and match[3] is None):
        return None
    value = int(match[2], 16) if match[2] else int(match[3] or "0", 8) if match[3] is not None else int(match[4] or "0")
    return -value if match[1] == "-" else value


def echo_text(words: Sequence[str]) -> str | None:
    """Return the text that `echo` writes; None where it is not followed."""
    flags = list(itertools.takewhile(re.compile(r"-[neE]+").fullmatch, words))
    letters, text = "".join(flags), " ".join(words[len(flags) :])
    said = _read_escapes(text, "echo") if letters.rfind("e") > letters.rfind("E") else text
    return said if said is None or "n" in letters else f"{said}\n"


def list_changed(name: str, words: Sequence[str], stdin: str | None) -> list[str]:
    """Return the files that a program changes or writes by their names among its words, or in the text of a Python program."""
    words = [name, *words]
    while len(words) > 1 and words[0].rpartition("/")[2] in _FRONT:
        words = words[1:]
    base, words = words[0].rpartition("/")[2], words[1:]
    named = [word for word in words if not word.startswith("-")]
    options = [(word.partition("=")[0], word.partition("=")[2]) for word in words if "=" in word]
    options += list(itertools.pairwise(words))
    found = [value for option, value in options if _OF_OUTPUT.fullmatch(option) and value and not value.startswith("-")]
    if base in _EDITORS:
        return found + (named if any(_IN_PLACE.match(word) for word in words) else [])
    if base in _WHOLE:
        return found + named
    if base == "wget":
        return found + [value for option, value in options if option == "-O"]
    if base in _COPIES and len(named) > 1:
        folder = named[-1].rstrip("/")
        moved = named[:-1] if base == "mv" else []
        return [*found, folder, *(f"{folder}/{word.rpartition('/')[2]}" for word in named[:-1]), *moved]
    if base.startswith("python"):
        text = stdin or next((text for option, text in itertools.pairwise(words) if option == "-c"), "")
        found += _NAMED_FILE.findall(text) if _WRITES.search(text) else []
    return found


@dataclass(frozen=True)
class _Pipe:
    """The commands of a substitution.

    Attributes:
        words: words of each command, without the `--` that ends its options.
        input: here-document of the first one.
        read: returns the text of a file; None where it is not here.
        compute: returns the value of an arithmetic expression.
    """

    words: list[list[str]]
    input: str | None
    read: Callable[[str], str | None]
    compute: Callable[[str], str]

    @property
    def arguments(self) -> list[str]:
        """Words of the first command behind its name."""
        return self.words[0][1:]


def read_output(
    commands: Sequence[Command], read: Callable[[str], str | None], compute: Callable[[str], str], directory: str
) -> str | None:
    """Return what commands write, with the end of the last line; None where only the machine of the script knows.

    Args:
        read: returns the text of a file that the script has written, or that is here; None for others.
        compute: returns the value of an arithmetic expression.
        directory: folder that the commands end in.
    """
    words = [_leave_out_dashes(list(command.words)) for command in commands]
    programs = tuple(item[0] for item in words)
    if programs in _OUTPUTS:
        return _OUTPUTS[programs](_Pipe(words, commands[0].input, read, compute))
    if programs[-1:] == ("pwd",) and all(item[0] in ("cd", "pushd", "popd") for item in words[:-1]):
        return f"{directory}\n"
    return None


def _leave_out_dashes(words: list[str]) -> list[str]:
    """Return the words of a command without the `--` that ends its options."""
    place = words.index("--") if "--" in words and words[0] != "echo" else 0
    is_end = place == 1 or (place and words[0] != "printf")
    return words[:place] + words[place + 1 :] if is_end else words


def _end_line(text: str | None) -> str | None:
    return None if text is None else f"{text}\n"


def _calculate(text: str | None, compute: Callable[[str], str]) -> str | None:
    """Return the result of bc; None where it is not the shell's: powers, fractions and variables."""
    plain = text is not None and _OF_BC.fullmatch(text) and not re.search(r"\*\*|--|\+\+|<<|>>|\d\s+\d", text)
    return _end_line(compute((text or "").strip())) if plain else None


def _calculate_words(pipe: _Pipe) -> str | None:
    """Return the result of expr; None where it is not the shell's: texts and alternatives."""
    plain = all(_OF_EXPR.fullmatch(word) for word in pipe.arguments)
    numbers = [bool(re.fullmatch(_NUMBER, word)) for word in pipe.arguments]
    plain = plain and (True, True) not in itertools.pairwise(numbers)
    return _end_line(pipe.compute(" ".join(pipe.arguments))) if plain else None


def _calculate_said(pipe: _Pipe) -> str | None:
    if len(pipe.words[1]) > 1:
        return None
    return _calculate((echo_text if pipe.words[0][0] == "echo" else format_text)(pipe.arguments), pipe.compute)


def _read_files(pipe: _Pipe) -> str | None:
    if not pipe.arguments:
        return pipe.input
    name = pipe.arguments[0]
    if len(pipe.arguments) > 1 or name.startswith(("-", *_OF_MACHINE)):
        return None
    text = pipe.read(name)
    return text


def _leave_out_comments(pipe: _Pipe) -> str | None:
    """Return the lines of a file but for its comments: `grep -v '^#' FILE`."""
    *options, name = pipe.arguments or [""]
    if options not in (["-v", "^#"], ["-vE", "^#"], ["-Ev", "^#"]) or name.startswith(_OF_MACHINE):
        return None
    text = pipe.read(name)
    return None if text is None else "".join(f"{line}\n" for line in text.splitlines() if not line.startswith("#"))


def _read_base(pipe: _Pipe) -> str | None:
    words = pipe.arguments
    if words[:1] == ["-s"] and len(words) == 3:
        words = [words[2], words[1]]
    if not 1 <= len(words) <= 2 or words[0].startswith("-"):
        return None
    base = words[0].rstrip("/").rpartition("/")[2] or words[0][:1]
    shorter = base.removesuffix(words[1] if len(words) > 1 else "")
    return f"{shorter or base}\n"


def _read_folder(pipe: _Pipe) -> str | None:
    if len(pipe.arguments) != 1 or pipe.arguments[0].startswith("-"):
        return None
    path = pipe.arguments[0]
    head, slash, _ = path.rstrip("/").rpartition("/")
    return f"{head.rstrip('/') or ('/' if slash or path[:1] == '/' else '.')}\n"


def _count(pipe: _Pipe) -> str | None:
    """Return the lines of seq with whole numbers."""
    if not 1 <= len(pipe.arguments) <= 3 or not all(re.fullmatch(_NUMBER, word) for word in pipe.arguments):
        return None
    numbers = [int(word) for word in pipe.arguments]
    first, step, last = {1: (1, 1, numbers[0]), 2: (numbers[0], 1, numbers[-1])}.get(len(numbers), tuple(numbers))
    return "".join(f"{number}\n" for number in count(first, last, step))


def _read_date(pipe: _Pipe) -> str:
    formats = [word[1:] for word in pipe.arguments if word.startswith("+")]
    return time.strftime(formats[0] if formats else "%Y-%m-%d") + "\n"


#: programs of a pipe -> function that returns its output; None where it is not known
_OUTPUTS: dict[tuple[str, ...], Callable[[_Pipe], str | None]] = {
    ("printf",): lambda pipe: format_text(pipe.arguments),
    ("echo",): lambda pipe: echo_text(pipe.arguments),
    ("echo", "bc"): _calculate_said,
    ("printf", "bc"): _calculate_said,
    ("bc",): lambda pipe: None if pipe.arguments else _calculate(pipe.input, pipe.compute),
    ("cat",): _read_files,
    ("grep",): _leave_out_comments,
    ("expr",): _calculate_words,
    ("basename",): _read_base,
    ("dirname",): _read_folder,
    ("date",): _read_date,
    ("seq",): _count,
}
