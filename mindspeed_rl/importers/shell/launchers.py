"""Programs that start others: the variables that they give them, and the scripts that they run."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

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
_ENV_WORDS = ("-u", "-C", "--unset", "--chdir")
#: options of a shell that take a word
_SHELL_WORDS = ("--rcfile", "--init-file")
#: programs that start the words behind their options on the same machine, with the variables of the script
_STARTERS: Final = frozenset(
    "exec nohup command builtin sudo env time setsid nice ionice stdbuf timeout taskset numactl srun mpirun mpiexec".split()
)
#: programs that start them in a container or on another machine
_ELSEWHERE: Final = frozenset("docker podman nerdctl nvidia-docker kubectl pdsh".split())
_BETWEEN_COMMANDS = re.compile(r"[;&|(){}\n]+")
#: programs whose words are their own
_PROGRAMS: Final = ("python", "torchrun", "accelerate", "deepspeed")


@dataclass(frozen=True)
class InnerScript:
    """A script that a command runs.

    Attributes:
        is_here: it runs on the machine of the command, and has its exported variables.
        name: of its file; empty where the command has its text.
        zero: its $0; empty for the usual one.
    """

    text: str
    arguments: list[str]
    is_here: bool
    name: str = ""
    zero: str = ""


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


def list_removed(words: Sequence[str], names: Iterable[str]) -> set[str]:
    """Return those of the exported names that `env -i` and `env -u NAME` keep from a command."""
    place = next((place for place, word in enumerate(words) if Path(word).name == "env"), len(words))
    options: list[str] = []
    for word in words[place + 1 :]:
        if not (word.startswith("-") or (options and options[-1] in _ENV_WORDS) or "=" in word):
            break
        options.append(word)
    if {"-", "-i", "--ignore-environment"} & set(options):
        return set(names)
    joined = {word.removeprefix("--unset=") for word in options if word.startswith("--unset=")}
    return joined | {name for option, name in zip(options, options[1:]) if option in ("-u", "--unset")}


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
    if shell is not None:
        options, rest = _split_options(words[shell + 1 :])
        if any("c" in option for option in options if not option.startswith("--")):
            starts_here = shell == 0 or Path(words[0]).name in _STARTERS
            zero = "".join(rest[1:2])
            return InnerScript(rest[0], rest[2:], starts_here, zero=zero) if rest and _names_commands(rest[0]) else None
        if stdin is not None and any("s" in option for option in options if not option.startswith("--")):
            return InnerScript(stdin, rest, shell == 0)
    if words[0] == "ssh":
        return _find_remote(words, stdin)
    if _is_shell(words[-1]) and stdin is not None:
        return InnerScript(stdin, [], len(words) == 1)
    call = find_call(words)
    if call is None or (text := read_file(call[0])) is None:
        return None
    is_script = call[0].endswith(".sh") or call[1] or (text.startswith("#!") and "sh" in text.partition("\n")[0])
    return InnerScript(text, call[2], Path(words[0]).name not in _ELSEWHERE, call[0]) if is_script else None


def _names_commands(text: str) -> bool:
    """Return True for a text in which unknown values are words of commands, and none begins one, which may be anything."""
    return not any(list_unknown(command.split()[0]) for command in _BETWEEN_COMMANDS.split(text) if command.strip())


def find_call(words: Sequence[str]) -> tuple[str, bool, list[str]] | None:
    """Return the file of a script that a command runs, whether a shell reads it, and its arguments; None for other commands.

    A file that no shell reads is one whose name ends with .sh, or the path of a command, which may be any program.
    """
    first = Path(words[0]).name
    starts = first in _STARTERS or first in _ELSEWHERE
    for place, word in enumerate(words if starts else words[:1]):
        if Path(word).name.startswith(_PROGRAMS):
            return None
        if _is_shell(word):
            options, rest = _split_options(words[place + 1 :])
            has_text = any("c" in option for option in options if not option.startswith("--"))
            return (rest[0], True, rest[1:]) if rest and not has_text else None
        is_first = place == 0 or Path(words[place - 1]).name in _STARTERS
        if word.endswith(".sh") or (is_first and word.startswith(("./", "../"))):
            return word, False, list(words[place + 1 :])
    return None


def _split_options(rest: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the options of a shell, and what follows them: a script or a text, and its arguments."""
    place = 0
    while place < len(rest) and rest[place].startswith(("-", "+")) and rest[place] not in ("-", "--"):
        option = rest[place]
        # -o and -O, also at the end of several letters, take a word
        place += 2 if option in _SHELL_WORDS or (not option.startswith("--") and option[-1] in "oO") else 1
    return list(rest[:place]), list(rest[place + (list(rest[place : place + 1]) == ["--"]) :])


def _find_remote(words: Sequence[str], stdin: str | None) -> InnerScript | None:
    place = 1
    while place < len(words) and words[place].startswith("-"):
        place += 2 if words[place] in _SSH_WORDS else 1
    command = " ".join(words[place + 1 :]) or stdin
    return InnerScript(command, [], False) if command else None
