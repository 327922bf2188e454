"""The rendezvous store of a process group."""

from __future__ import annotations

import datetime
import ipaddress
import socket

import torch.distributed as dist


def open_store(host: str, port: int, size: int, *, serves: bool, timeout_s: float) -> dist.TCPStore:
    """Open the store of a group of `size` processes; the process with `serves` hosts it on this address.

    torch itself would listen on every interface of the machine, whatever the address is; a loopback address is bound alone.

    Raises:
        OSError: the port is taken.
        torch.distributed.DistError: no process serves the store in time.
    """
    listening = _listen_on_loopback(host, port) if serves else None
    return dist.TCPStore(
        host,
        port,
        size,
        serves,
        timeout=datetime.timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listening,
        use_libuv=True,
    )


def _listen_on_loopback(host: str, port: int) -> int | None:
    """Return the descriptor of a listening socket, which the store closes; None for addresses of other kinds."""
    try:
        if not ipaddress.ip_address(host).is_loopback:
            return None
    except ValueError:  # a name, which may mean either
        return None
    # all members connect at once
    listening = socket.create_server((host, port), backlog=1024)
    return listening.detach()
