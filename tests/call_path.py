"""The way from the command to the policy loss: as docs/architecture.md lists it, and as it is seen on the stack."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

#: (file below the project, function or Class.method)
Call = tuple[str, str]

ROOT = Path(__file__).parents[1]


def listed() -> list[Call]:
    """Each call in docs/architecture.md, in order."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    block = text.split("## From the command to the policy loss", 1)[1].split("```", 2)[1]
    lines = [line.split() for line in block.splitlines() if line.strip()[:1].isdigit()]
    return [(words[1], words[2]) for words in lines]


def frames_of_ours(frame: FrameType | None) -> list[Call]:
    """The package's frames below and including this one, outermost first; methods without their class.

    Comprehensions have frames of their own up to Python 3.11; they are not calls.
    """
    results = []
    package = str(ROOT / "mindspeed_rl")
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(package) and not code.co_name.startswith("<"):
            results.append((str(Path(code.co_filename).relative_to(ROOT)), code.co_name))
        frame = frame.f_back
    return results[::-1]


@contextmanager
def watching(code: CodeType, wanted: Callable[[FrameType], bool] = lambda frame: True) -> Iterator[list[list[Call]]]:
    """Collects `frames_of_ours` of every call of the function with this code in this thread that is wanted."""
    stacks: list[list[Call]] = []

    def look(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code is code and wanted(frame):
            stacks.append(frames_of_ours(frame))

    sys.setprofile(look)
    try:
        yield stacks
    finally:
        sys.setprofile(None)
