"""The store at which the processes of a group meet."""

from __future__ import annotations

import datetime
import ipaddress
import socket

import torch.distributed as dist


def meeting_store(host: str, port: int, size: int, *, serves: bool, timeout_s: float) -> dist.TCPStore:
    """The store of a group of `size` processes, which the one that `serves` offers on this address.

    torch itself would listen on every interface of the machine, whatever the address is; an address of loopback is bound alone.

    Raises:
        OSError: the port is taken.
        Exception: nobody serves the store in time; torch's own words.
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
    """Descriptor of a listening socket, which its user closes; None where other machines have to reach the address."""
    try:
        if not ipaddress.ip_address(host).is_loopback:
            return None
    except ValueError:  # a name, which may mean either
        return None
    # all members knock at once
    listening = socket.create_server((host, port), backlog=1024)
    return listening.detach()
