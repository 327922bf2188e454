"""Programs that start others: the variables that they give them, and the scripts that they run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mindspeed_rl.importers.shell.command import list_unknown
from mindspeed_rl.importers.shell.variables import NAME

_SHELLS = frozenset(("bash", "sh", "zsh", "dash", "ksh"))
#: launcher -> its options that give the command a variable
_VARIABLE_OPTIONS = {
    **dict.fromkeys(("docker", "podman", "nerdctl", "nvidia-docker"), ("-e", "--env")),
    **dict.fromkeys(("mpirun", "mpiexec"), ("-x",)),
    "srun": ("--export",),
}
#: options of ssh that take a word
_SSH_WORDS = frozenset(f"-{letter}" for letter in "BbcDEeFIiJLlmOopQRSWw")
#: options of env that take a word
_ENV_WORDS = ("-u", "-C")


@dataclass(frozen=True)
class InnerScript:
    """A script that a command runs.

    Attributes:
        is_here: it runs on the machine of the command, and has its exported variables.
    """

    text: str
    arguments: list[str]
    is_here: bool


def _is_shell(word: str) -> bool:
    return Path(word).name in _SHELLS


def read_variables(words: Sequence[str]) -> dict[str, str]:
    """Return the variables that a launcher gives its command: `env NAME=VALUE`, `docker run -e NAME=VALUE` and the like."""
    found: list[str] = []
    for place, word in enumerate(words):
        name, rest = Path(word).name, words[place + 1 :]
        if name == "env":
            found += _list_env_words(list(rest))
        if _is_shell(word) or name.startswith("python") or name == "env":
            break  # what follows is of the command
        found += _list_option_words(_VARIABLE_OPTIONS.get(name, ()), rest)
    pairs = [pair.partition("=") for item in found for pair in (item.split(",") if item.startswith("ALL,") else [item])]
    return {name: value for name, equals, value in pairs if equals and NAME.fullmatch(name)}


def _list_env_words(rest: list[str]) -> Iterator[str]:
    while rest and (rest[0].startswith("-") or "=" in rest[0]):
        word = rest.pop(0)
        yield word
        if word in _ENV_WORDS:
            rest = rest[1:]


def _list_option_words(options: Sequence[str], rest: Sequence[str]) -> Iterator[str]:
    for index, word in enumerate(rest if options else ()):
        if _is_shell(word):
            return
        if word in options:
            yield from rest[index + 1 : index + 2]
        name, _, value = word.partition("=")
        if name in options and name.startswith("--") and "=" in word:
            yield value


def find_inner(words: Sequence[str], stdin: str | None, read_file: Callable[[str], str | None]) -> InnerScript | None:
    """Return the script that a command runs; None for other commands.

    That is the text of `bash -c`, a file, the input of a shell, or the command of ssh, whatever starts it.

    Args:
        read_file: returns the text of a file; None where it is not here.
    """
    shell = next((place for place, word in enumerate(words[:-1]) if _is_shell(word)), None)
    if shell is not None and _runs_text(words[shell + 1 :]):
        texts = [item for item in words[shell + 1 :] if not item.startswith("-")]
        return InnerScript(texts[0], texts[2:], shell == 0) if texts and not list_unknown(texts[0]) else None
    if words[0] == "ssh":
        return _find_remote(words, stdin)
    if _is_shell(words[-1]) and stdin is not None:
        return InnerScript(stdin, [], len(words) == 1)
    starts_shell = _is_shell(words[0])
    names = [word for word in words[1:] if not word.startswith("-")] if starts_shell else list(words)
    if names and (starts_shell or names[0].endswith(".sh")) and (text := read_file(names[0])) is not None:
        return InnerScript(text, names[1:], True)
    return None


def _runs_text(rest: Sequence[str]) -> bool:
    """Return True where a shell has `-c` among its first options."""
    flags = [item for item in rest if item.startswith("-")]
    return rest[0].startswith("-") and any("c" in flag for flag in flags[:3] if not flag.startswith("--"))


def _find_remote(words: Sequence[str], stdin: str | None) -> InnerScript | None:
    place = 1
    while place < len(words) and words[place].startswith("-"):
        place += 2 if words[place] in _SSH_WORDS else 1
    command = " ".join(words[place + 1 :]) or stdin
    return InnerScript(command, [], False) if command else None
