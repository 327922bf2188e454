"""Runs an MCP server and passes on its messages, up to limits: `python mcp_relay.py COMMAND ARGUMENT ...`.

A client parses a message in one go, in the event loop that keeps the deadlines of all samples, and copies an unfinished
line with every read. So a message that is too long, or has too many values, ends the server here, in a process of its own; the
client then sees that the server has ended. Standard input goes to the server directly. The file imports nothing of the package,
and starts quickly.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable

#: bytes of a message, values in it, and levels of lists and objects, of which the client reads no more
MAX_MESSAGE_BYTES, MAX_VALUES, MAX_DEPTH = 16 << 20, 20_000, 190
#: commas and brackets, some of which may be in texts
_MAX_MARKS = 2_000_000
_READ_BYTES = 1 << 18


def find_excess(message: bytes | bytearray) -> str | None:
    """Return the reason why a message is not passed on; None for one within the limits."""
    if len(message) > MAX_MESSAGE_BYTES:
        return f"a message of more than {MAX_MESSAGE_BYTES:,} bytes"
    num_marks = sum(message.count(mark) for mark in (b",", b"[", b"{"))
    if num_marks <= MAX_DEPTH:
        return None
    if num_marks > _MAX_MARKS:
        return f"a message with more than {MAX_VALUES:,} values"
    try:
        level: list[object] = [json.loads(message)]
    except RecursionError:
        return f"a message nested more than {MAX_DEPTH} deep"
    except ValueError:
        return None  # other output of the server, which the client ignores
    num_values = 0
    for _ in range(MAX_DEPTH):
        level = [item for value in level for item in _list_items(value)]
        num_values += len(level)
        if num_values > MAX_VALUES:
            return f"a message with more than {MAX_VALUES:,} values"
        if not level:
            return None
    return f"a message nested more than {MAX_DEPTH} deep"


def _list_items(value: object) -> Iterable[object]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _relay(source: int, target: int) -> str | None:
    """Pass on complete messages until the source ends; return the reason if it ended at a limit."""
    line = bytearray()
    while data := os.read(source, _READ_BYTES):
        start = len(line)
        line += data
        end = line.rfind(b"\n", start) + 1
        lines = line[:end].split(b"\n")[:-1] if end else []
        for complete in lines:
            if reason := find_excess(complete):
                return reason
        ready = memoryview(bytes(line[:end]))
        del line[:end]
        while ready:
            ready = ready[os.write(target, ready) :]
        if len(line) > MAX_MESSAGE_BYTES:
            return find_excess(line)
    return None


def main(command: list[str]) -> int:
    """Run the server; return its status, or 1 at a limit."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        server = subprocess.Popen(command, stdout=subprocess.PIPE)
    except OSError as error:
        print(f"{command[0]} does not start: {error}", file=sys.stderr)
        return 127
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)  # the server reads the client's end
    assert server.stdout is not None  # a pipe
    reason = _relay(server.stdout.fileno(), 1)
    if reason is None:
        os.close(1)
        return server.wait()
    print(f"the MCP server {command[0]} sent {reason} and was ended", file=sys.stderr)
    server.kill()
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
