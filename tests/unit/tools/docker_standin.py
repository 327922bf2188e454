"""A stand-in for the commands docker, podman and apptainer, for tests without their daemon.

A container is a folder of this machine; what docker would refuse is refused: an unknown option, a missing image, a name that
is used, a container that is not there. `make_command` writes it as a program of that name; it keeps its state and a log of its
calls in the folder next to itself.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

#: options of the verbs that are used, with and without a value, from the manuals of docker 28 and podman 4; apptainer 1.3
OPTIONS: dict[str, tuple[set[str], set[str]]] = {
    "run": ({"--name", "--network", "--memory", "--pids-limit", "--workdir"}, {"--detach", "--rm", "--init"}),
    "exec": (set(), {"--interactive"}),
    "rm": (set(), {"--force"}),
    "rmi": (set(), {"--force"}),
    "commit": (set(), set()),
    "instance start": ({"--memory", "--network"}, {"--containall", "--writable-tmpfs", "--net"}),
    "instance stop": (set(), set()),
}
IMAGES = ("python:3.11", "docker://python:3.11")


def make_command(folder: Path, name: str) -> Path:
    """A program of this name in the folder."""
    program = folder / name
    program.write_text(
        f"#!{sys.executable} -S\nimport pathlib, runpy, sys\nmain = runpy.run_path({__file__!r})['main']\n"
        "sys.exit(main(pathlib.Path(__file__).resolve(), sys.argv[1:]))\n"
    )
    program.chmod(0o755)
    return program


def refuse(text: str, status: int = 125) -> None:
    print(f"Error: {text}", file=sys.stderr)
    sys.exit(status)


def read_options(verb: str, words: list[str]) -> dict[str, str | None]:
    """The options before the first other word; they are taken out of the words."""
    with_value, alone = OPTIONS[verb]
    found: dict[str, str | None] = {}
    while words and words[0].startswith("-"):
        name = words.pop(0)
        if name not in with_value | alone:
            refuse(f"unknown flag: {name}")
        found[name] = words.pop(0) if name in with_value else None
    return found


def main(program: Path, words: list[str]) -> int:
    root = program.parent
    with (root / "calls.jsonl").open("a") as log:
        log.write(json.dumps(words) + "\n")
    boxes, images = root / "boxes", root / "images"
    boxes.mkdir(exist_ok=True)
    images.mkdir(exist_ok=True)
    verb = " ".join([words.pop(0), *([words.pop(0)] if words[0] in ("start", "stop") else [])])
    if verb not in OPTIONS:
        refuse(f"unknown command {verb!r}")
    options = read_options(verb, words)
    if verb in ("run", "instance start"):
        image = words.pop(0)
        name = options.get("--name") or words.pop(0)
        if image not in IMAGES and not (images / image).is_dir():
            refuse(f"Unable to find image '{image}' locally")
        if (boxes / name).exists():
            refuse(f'the container name "/{name}" is already in use')
        if verb == "run" and (words[:1] != ["sleep"] or "--detach" not in options):
            refuse("the container would end at once")
        (boxes / name).mkdir()
        if (images / image).is_dir():
            shutil.copytree(images / image, boxes / name, dirs_exist_ok=True)
        print(name)
        return 0
    if verb == "rmi":
        shutil.rmtree(images / words[0])
        return 0
    box = boxes / words.pop(0).removeprefix("instance://")
    if not box.is_dir():
        refuse(f"No such container: {box.name}", 1)
    if verb == "commit":
        shutil.copytree(box, images / words[0])
    elif verb == "exec":
        # without --interactive, a container's process has no input
        stdin = None if "--interactive" in options or program.name == "apptainer" else subprocess.DEVNULL
        return run(words, box, stdin)
    else:
        shutil.rmtree(box)
    return 0


def run(words: Sequence[str], box: Path, stdin: int | None) -> int:
    return subprocess.run(
        words, cwd=box, stdin=stdin, check=False, env={"PATH": os.environ["PATH"], "HOME": str(box)}
    ).returncode
