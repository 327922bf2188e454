"""The rendezvous of a process group: its store, and the wait for all members, which any of them or an observer may end.

Processes of one machine and one user meet in a file in a folder that nobody else can open: torch's store over TCP asks nobody
for a secret, so any user of the machine could read its keys, set others and fill its memory. Its address has the path of the
file as host, and port 0. Processes of several machines, and servers that another command has started, meet over TCP.
"""

from __future__ import annotations

import collections
import contextlib
import datetime
import ipaddress
import logging
import os
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch.distributed as dist

_LOG = logging.getLogger(__name__)
#: wait for a group after which connections of other users are looked for
_STRANGERS_S = 30.0
#: state of a listening socket in /proc/net/tcp
_LISTENING = "0A"


def count_strangers(tables: Iterable[str], inodes: set[str], uid: int) -> dict[int, int]:
    """Return how many connections to listening sockets of this process other users of this machine have, by user id.

    Args:
        tables: contents of /proc/net/tcp and /proc/net/tcp6.
        inodes: inodes of the sockets of this process.
        uid: user id of this process.
    """
    rows = [line.split() for table in tables for line in table.splitlines()[1:]]
    sockets = [(row[1], row[2], row[3], int(row[7]), row[9]) for row in rows if len(row) > 9]
    ports = {local.rpartition(":")[2] for local, _, state, _, inode in sockets if state == _LISTENING and inode in inodes}
    users = [
        user
        for _, remote, state, user, inode in sockets
        # a socket without an inode has been closed, and then belongs to root
        if state != _LISTENING and inode != "0" and user != uid and remote.rpartition(":")[2] in ports
    ]
    return dict(collections.Counter(users))


def describe_strangers() -> str:
    """Describe connections of other users to this process, which gloo cannot tell from ranks; empty without any."""
    tables, inodes = list[str](), set[str]()
    with contextlib.suppress(OSError):
        tables = [path.read_text() for path in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")) if path.exists()]
        for link in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/self/fd/{link}")
                inodes |= {target[len("socket:[") : -1]} if target.startswith("socket:[") else set()
    found = count_strangers(tables, inodes, os.getuid())
    users = ", ".join(f"{count} of user {user}" for user, count in sorted(found.items()))
    if not users:
        return ""
    return (
        f"connections to this process from other users of this machine may hold the group up ({users}): gloo asks for no "
        "secret, so run in a container or a network namespace of your own (docs/security.md)"
    )


@contextlib.contextmanager
def naming_strangers() -> Iterator[None]:
    """Name connections of other users where the groups that the block makes take long, or fail."""

    def warn() -> None:
        if text := describe_strangers():
            _LOG.warning("the group is not complete after %g s; %s", _STRANGERS_S, text)

    timer = threading.Timer(_STRANGERS_S, warn)
    timer.daemon = True
    timer.start()
    try:
        yield
    except RuntimeError as error:
        text = describe_strangers()
        if not text:
            raise
        raise type(error)(f"{error}; {text}") from error
    finally:
        timer.cancel()


def open_store(host: str, port: int, size: int, *, serves: bool, timeout_s: float) -> dist.Store:
    """Open the store of a group of `size` processes; over TCP the process with `serves` hosts it on this address.

    torch itself would listen on every interface of the machine, whatever the address is; of loopback only itself is bound.

    Args:
        host: name or address, or path of a file.

    Raises:
        OSError: the port is taken.
        torch.distributed.DistError: no process serves the store in time.
    """
    if os.path.isabs(host):
        store = dist.FileStore(host)
        store.set_timeout(datetime.timedelta(seconds=timeout_s))
        return store
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


#: text of the error of members that wait for one that has failed
GIVEN_UP = "rendezvous given up"
_FAILED, _POLL_S = "failed", 0.05


def reach(host: str, port: int, limit_s: float) -> None:
    """Wait until the store can be reached; a file can at once.

    Raises:
        ConnectionError: it could not in this time. Its text has none of the words of a lost peer.
    """
    deadline = time.monotonic() + limit_s
    while not os.path.isabs(host):
        try:
            socket.create_connection((host, port), max(1.0, deadline - time.monotonic())).close()
            return
        except OSError:
            if time.monotonic() >= deadline:
                raise ConnectionError(
                    f"found no way to {host}:{port}, where trainers wait, in {limit_s:g} s: is the port open?"
                ) from None
            time.sleep(_POLL_S)


def meet(store: dist.Store, rank: int, size: int, limit_s: float) -> None:
    """Wait for all members; collective.

    Raises:
        RuntimeError: one has given up, or did not come in this time; the text has the reason, or the missing ranks.
    """
    try:
        reason = _wait_for_members(store, rank, size, limit_s)
    except RuntimeError as error:  # of a file no narrower class
        raise RuntimeError(f"{GIVEN_UP}: its store has ended") from error
    if reason:
        time.sleep(10 * _POLL_S)  # the store may be this process's: others read the reason first
        raise RuntimeError(f"{GIVEN_UP}: {reason}")


def _wait_for_members(store: dist.Store, rank: int, size: int, limit_s: float) -> str:
    """Wait for all members; return the reason of one that has given up."""
    deadline = time.monotonic() + limit_s
    store.set(f"here/{rank}", "")
    while not store.check([f"here/{other}" for other in range(size)]):
        if not store.check([_FAILED]) and time.monotonic() >= deadline:
            missing = ", ".join(str(other) for other in range(size) if not store.check([f"here/{other}"]))
            store.set(_FAILED, f"ranks {missing} of {size} did not come within {limit_s:g} s")
        if store.check([_FAILED]):
            return store.get(_FAILED).decode()
        time.sleep(_POLL_S)
    return ""


def give_up(host: str, port: int, name: str, reason: str) -> None:
    """End the wait of all members of this name in the store, where it can be reached; by a process that is not a member."""
    try:
        reach(host, port, 0.0)
        store = open_store(host, port, 1, serves=False, timeout_s=5.0)
        dist.PrefixStore(name, store).set(_FAILED, reason)
    except (OSError, RuntimeError):
        return  # the members have no store either


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
