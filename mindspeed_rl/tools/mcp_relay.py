"""Runs an MCP server and passes on its messages, up to limits: `python mcp_relay.py COMMAND ARGUMENT ...`.

A client parses a message in one go, in the event loop that keeps the deadlines of all samples, and copies an unfinished
line with every read. So a message that is too long, or has too many values, ends the server here, in a process of its own; the
client then sees that the server has ended. Standard input goes to the server directly. The file imports nothing of the package,
and starts quickly.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

#: bytes of a message, and commas and opening brackets in it
MAX_MESSAGE_BYTES, MAX_MARKS = 16 << 20, 300_000
_READ_BYTES = 1 << 18


def find_excess(message: bytes | bytearray) -> str | None:
    """Return the reason why a message is not passed on; None for one within the limits."""
    if len(message) > MAX_MESSAGE_BYTES:
        return f"a message of more than {MAX_MESSAGE_BYTES:,} bytes"
    if len(message) > MAX_MARKS and sum(message.count(mark) for mark in (b",", b"[", b"{")) > MAX_MARKS:
        return f"a message with more than {MAX_MARKS:,} values"
    return None


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
