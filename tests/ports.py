"""Ports for the worlds that tests build on this machine."""

from __future__ import annotations

import contextlib
import random
import socket


def find_free_port() -> int:
    """A TCP port that nobody listens on, out of reach of outgoing connections, one of which could take it meanwhile."""
    for port in random.SystemRandom().sample(range(20000, 32000), 200):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("no free port")
