"""What every sandbox and every provider of sandboxes offers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from mindspeed_rl.redaction import hide_in_text
from mindspeed_rl.tools.interface import Problem
from mindspeed_rl.tools.option_reader import OptionReader
from mindspeed_rl.tools.tool import ToolError

#: of a file that is read from a sandbox
MAX_FILE_BYTES = 16 << 20


class SandboxError(ToolError):
    """A sandbox or its provider failed; a command that fails is not such an error. The text shows no password of an address."""

    def __init__(self, text: str, problem: Problem = "failed") -> None:
        super().__init__(hide_in_text(text), problem)


@dataclass(frozen=True)
class CommandResult:
    """Result of a command in a sandbox.

    Attributes:
        status: exit status; 124 where it took too long.
        output: standard output and errors.
    """

    status: int
    output: str


class Sandbox(ABC):
    """One sandbox. Paths are relative to its working folder; each method raises `SandboxError` where the sandbox fails."""

    @abstractmethod
    async def run(self, command: str, timeout_s: float) -> CommandResult:
        """Run a shell command in the working folder."""

    @abstractmethod
    async def read(self, path: str) -> bytes:
        """Return the content of a regular file of at most `MAX_FILE_BYTES`."""

    @abstractmethod
    async def write(self, path: str, data: bytes) -> None:
        """Write a file, with its folders."""

    @abstractmethod
    async def stop(self) -> None:
        """End all processes and remove all files."""

    async def snapshot(self) -> str:
        """Keep the files, and return the name from which `Provider.start` begins another sandbox with them."""
        raise SandboxError(f"{type(self).__name__.strip('_')} has no snapshots")


class Provider(ABC):
    """Starts sandboxes of one kind.

    Attributes:
        memory_mib: memory of a command, or of the sandbox.
        lifetime_s: a sandbox ends at the latest after this time.
    """

    def __init__(self, options: OptionReader, where: str) -> None:
        """Read the options.

        Raises:
            ValueError: one is wrong.
        """
        self.memory_mib = options.read_integer("memory_mib", 2048, 16, 1 << 20)
        self.lifetime_s = options.read_float("lifetime_s", 3600.0, 1.0, 86400.0)

    async def open(self) -> None:  # noqa: B027  # most have nothing to prepare
        """Prepare what sandboxes share, before the first start.

        Raises:
            ValueError: it is impossible.
        """

    @abstractmethod
    async def start(self, snapshot: str = "") -> Sandbox:
        """Start a sandbox, from a snapshot where one is named.

        Raises:
            SandboxError: it does not start.
        """

    async def close(self) -> None:  # noqa: B027  # most have nothing to remove
        """Remove what sandboxes share."""
