"""What the few programs write whose output can be known from their words."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mindspeed_rl.importers.shell.command import Command

#: programs that change a file in its place, with the option for it, and programs whose last word is what they write
_EDITORS = frozenset("sed gsed perl yq dasel crudini".split())
_IN_PLACE = re.compile(r"-[A-Za-z]*i|--in-?place")
_COPIES = frozenset("cp mv ln install rsync".split())
#: a file of options in the text of a Python program, and the calls that write one
_NAMED_FILE = re.compile(r"""["']([^"'\s]+\.(?:ya?ml|json))["']""")
_WRITES = re.compile(r"""["'][wa]\+?["']|write_text|dump|save\(""")
#: folders whose files are those of the machine that runs the script
_OF_MACHINE = ("/proc/", "/sys/", "/etc/", "/dev/null")
#: numbers that seq or braces may have
_MAX_COUNT = 10_000
#: a whole number of them; no counter of a script is longer
_NUMBER = r"-?\d{1,15}"
#: a width or precision of printf that is no format of a script, and would fill the memory
_ENDLESS = re.compile(r"%[-+ 0#]*(?:\d{5}|\d*\.\d{5})")


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
    if re.fullmatch(r"[A-Za-z]\.\.[A-Za-z]", text) and text[0].islower() == text[-1].islower():
        first, last = ord(text[0]), ord(text[-1])
        return list(map(chr, count(first, last, 1 if first <= last else -1))) or None
    parts, place, start = [], 0, 0
    while place < len(text):
        if text[place] == ",":
            parts.append(text[start:place])
            start = place + 1
        place = _skip(text, place)
    return [*parts, text[start:]] if parts else None


def format_text(words: Sequence[str]) -> str:
    """Return what `printf` writes: its format for each group of its arguments."""
    template = words[0].replace("\\n", "\n").replace("\\t", "\t") if words else ""
    parts = re.findall(r"%[-+ 0#]*\d*(?:\.\d+)?[sdifgeGxX%]", template)
    if _ENDLESS.search(template):
        return " ".join([template, *words[1:]])
    kinds = [item[-1] for item in parts if item[-1] != "%"]
    arguments, texts = list(words[1:]), []
    while True:
        taken = [arguments.pop(0) if arguments else "" for _ in kinds]
        try:
            given = [item if kind == "s" else float(item or 0) for item, kind in zip(taken, kinds)]
            texts.append(template % tuple(int(item) if kind in "dixX" else item for item, kind in zip(given, kinds)))
        except (TypeError, ValueError, OverflowError):
            texts.append(" ".join([template, *taken]))
        if not arguments or not kinds:
            return "".join(texts).rstrip("\n")


def list_said(words: Sequence[str]) -> list[str]:
    """Return the words that `echo` writes."""
    flags = list(itertools.takewhile(re.compile(r"-[neE]+").fullmatch, words))
    said = words[len(flags) :]
    return [word.replace("\\n", "\n").replace("\\t", "\t") for word in said] if "e" in "".join(flags) else list(said)


def list_changed(name: str, words: Sequence[str], stdin: str | None) -> list[str]:
    """Return the files that a program changes or writes by their names among its words, or in the text of a Python program."""
    base = name.rpartition("/")[2]
    named = [word for word in words if not word.startswith("-")]
    if base in _EDITORS:
        return named if any(_IN_PLACE.match(word) for word in words) else []
    if base in _COPIES and len(named) > 1:
        folder = named[-1].rstrip("/")
        return [folder, *(f"{folder}/{word.rpartition('/')[2]}" for word in named[:-1])]
    if base.startswith("python"):
        text = stdin or next((text for option, text in itertools.pairwise(words) if option == "-c"), "")
        return _NAMED_FILE.findall(text) if _WRITES.search(text) else []
    return []


@dataclass(frozen=True)
class _Pipe:
    """The commands of a substitution.

    Attributes:
        words: words of each command, without `--`.
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
    """Return what commands write into a pipe or a variable; None where only the machine of the script knows.

    Args:
        read: returns the text of a file that the script has written, or that is here; None for others.
        compute: returns the value of an arithmetic expression.
        directory: folder of the script.
    """
    words = [[word for word in command.words if word != "--"] for command in commands]
    programs = tuple(item[0] for item in words)
    if programs in _OUTPUTS:
        return _OUTPUTS[programs](_Pipe(words, commands[0].input, read, compute))
    if programs[-1:] == ("pwd",):
        return next((item[1] for item in words if item[0] == "cd" and len(item) > 1), directory)
    return None


def _calculate(pipe: _Pipe) -> str | None:
    said = list_said(pipe.arguments)
    is_fraction = any("scale" in word or "." in word for word in said)
    return None if is_fraction else pipe.compute(" ".join(said))


def _read_files(pipe: _Pipe) -> str | None:
    if not pipe.arguments:
        return pipe.input
    name = pipe.arguments[0]
    if len(pipe.arguments) > 1 or name.startswith(("-", *_OF_MACHINE)):
        return None
    text = pipe.read(name)
    return None if text is None else text.rstrip("\n")


def _leave_out_comments(pipe: _Pipe) -> str | None:
    """Return the lines of a file but for its comments: `grep -v '^#' FILE`."""
    *options, name = pipe.arguments or [""]
    if options not in (["-v", "^#"], ["-vE", "^#"], ["-Ev", "^#"]) or name.startswith(_OF_MACHINE):
        return None
    text = pipe.read(name)
    return None if text is None else "\n".join(line for line in text.splitlines() if not line.startswith("#"))


def _split_path(pipe: _Pipe) -> tuple[str, str]:
    head, _, tail = pipe.arguments[0].rstrip("/").rpartition("/")
    return head, tail


def _read_base(pipe: _Pipe) -> str | None:
    if not pipe.arguments:
        return None
    return _split_path(pipe)[1].removesuffix(pipe.arguments[1] if len(pipe.arguments) > 1 else "")


def _count(pipe: _Pipe) -> str | None:
    """Return the lines of seq with whole numbers."""
    if not 1 <= len(pipe.arguments) <= 3 or not all(re.fullmatch(_NUMBER, word) for word in pipe.arguments):
        return None
    numbers = [int(word) for word in pipe.arguments]
    first, step, last = {1: (1, 1, numbers[0]), 2: (numbers[0], 1, numbers[-1])}.get(len(numbers), tuple(numbers))
    return "\n".join(map(str, count(first, last, step)))


def _read_date(pipe: _Pipe) -> str:
    formats = [word[1:] for word in pipe.arguments if word.startswith("+")]
    return time.strftime(formats[0] if formats else "%Y-%m-%d")


#: programs of a pipe -> function that returns its output; None where it is not known
_OUTPUTS: dict[tuple[str, ...], Callable[[_Pipe], str | None]] = {
    ("printf",): lambda pipe: format_text(pipe.arguments),
    ("echo",): lambda pipe: " ".join(list_said(pipe.arguments)),
    ("echo", "bc"): _calculate,
    ("printf", "bc"): _calculate,
    ("bc",): lambda pipe: None if pipe.input is None else pipe.compute(pipe.input),
    ("cat",): _read_files,
    ("grep",): _leave_out_comments,
    ("expr",): lambda pipe: pipe.compute(" ".join(pipe.arguments)),
    ("basename",): _read_base,
    ("dirname",): lambda pipe: (_split_path(pipe)[0] or ".") if pipe.arguments else None,
    ("date",): _read_date,
    ("seq",): _count,
}
