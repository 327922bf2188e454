"""The server of training as a service: one process with a backend, its tables, and the API over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import ipaddress
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from mindspeed_rl.observability.folder_locks import hold_folders
from mindspeed_rl.service.app import TinkerApp
from mindspeed_rl.service.backend import Backend, BrokenBackendError
from mindspeed_rl.service.doors import Keys, read_secret
from mindspeed_rl.service.hangs import note_hang
from mindspeed_rl.service.journal import SYNC_LIMIT_S
from mindspeed_rl.service.ledger import Limits
from mindspeed_rl.service.service import Service

_LOG = logging.getLogger(__name__)
#: of a stop, for requests that are being answered
_GRACE_S = 5
#: an idle connection of a client stays open so long
_KEEP_ALIVE_S = 75
#: connections at the same time; more are answered 503
_MAX_CONNECTIONS = 4096
#: a server that cannot go on has ended in this time, or its process ends where it is
_LAST_S = 90.0


@dataclass(frozen=True)
class ServerSettings:
    """Where and for whom a server works.

    Attributes:
        folder: journal, checkpoints and metrics.
        host: address.
        owners: owner of each API key; None takes any key, on this machine only.
        limits: what a key may use.
        price: price of an hour of the devices; 0 where none is known.
        sync_limit_s: seconds in which the disk has to take records of the journal.
    """

    folder: Path
    host: str
    owners: dict[str, str] | None
    limits: Limits
    price: float = 0.0
    sync_limit_s: float = SYNC_LIMIT_S


class _End:
    """The end of a server that cannot go on: once, by the signal that ends it otherwise, and in any case.

    Attributes:
        reason: why it ends; "" while it goes on.
        takes_signals: the server ends at a signal; before and afterwards one would kill the process.
    """

    def __init__(self) -> None:
        self.reason, self.takes_signals = "", False
        self._lock = threading.Lock()
        self._last = threading.Timer(_LAST_S, self._end_at_last)
        self._last.daemon = True

    def end(self, reason: str) -> None:
        """End the server, from any thread."""
        with self._lock:
            if self.reason:
                return
            self.reason = reason
            _LOG.error("%s; the server ends", reason)
            self._last.start()
            if self.takes_signals:
                os.kill(os.getpid(), signal.SIGTERM)

    def set_signals(self, *, takes: bool) -> None:
        """Say whether the server ends at a signal."""
        with self._lock:
            self.takes_signals = takes

    def close(self) -> None:
        """Let the process live: the server has ended."""
        self._last.cancel()

    @staticmethod
    def _end_at_last() -> None:
        """End a process whose disk, for example, answers none of what a server does at its end."""
        _LOG.error("the server has not ended in %g s; its process ends", _LAST_S)
        faulthandler.dump_traceback(file=2, all_threads=True)
        os._exit(1)


class _Server(uvicorn.Server):
    """Ends at a signal; uvicorn's own would raise the signal again, which ends the process before the backend has ended."""

    def __init__(self, config: uvicorn.Config, end: _End) -> None:
        super().__init__(config)
        self._end = end

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        for number in signals:
            loop.add_signal_handler(number, self.handle_exit, number, None)
        self._end.set_signals(takes=True)
        self.should_exit = bool(self._end.reason)
        try:
            yield
        finally:
            self._end.set_signals(takes=False)
            for number in signals:
                loop.remove_signal_handler(number)


def is_loopback(host: str) -> bool:
    """Return True for an address that only this machine reaches."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listen(host: str, port: int) -> socket.socket:
    """Return a bound socket: a port in use is an error before the model is loaded.

    Raises:
        ValueError: the address cannot be bound.
    """
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    # a server that has just ended leaves its port in TIME_WAIT for a minute
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except (OSError, OverflowError) as error:
        listening.close()
        raise ValueError(f"serve_config.host {host}, serve_config.port {port}: {error}") from None
    return listening


def serve(settings: ServerSettings, listening: socket.socket, open_backend: Callable[[], Backend]) -> int:
    """Serve until a signal; return 0 then, and 1 where the journal could not be written or a device was lost.

    Args:
        settings: where and for whom.
        listening: a bound socket.
        open_backend: loads the model; called once the folder is this server's.

    Raises:
        ValueError: keys are missing beyond this machine, or the folder is in use.
    """
    is_local = is_loopback(settings.host)
    if not is_local and settings.owners is None:
        raise ValueError(f"serve_config.host {settings.host} is reached from other machines: set serve_config.api_keys_file")
    with hold_folders({"serve_config.folder": settings.folder}):
        end = _End()
        asyncio.run(_serve(settings, listening, open_backend, end, is_local=is_local))
    end.close()
    return 1 if end.reason else 0


async def _serve(
    settings: ServerSettings, listening: socket.socket, open_backend: Callable[[], Backend], end: _End, *, is_local: bool
) -> None:
    backend = open_backend()

    def fail(error: OSError) -> None:
        end.end(f"the journal in {settings.folder} cannot be written: {error}")

    def give_up(error: BrokenBackendError) -> None:
        if error.requests:
            note_hang(settings.folder, error.requests, str(error))
        end.end(f"{error}; started again, it continues from {settings.folder}")

    backend.watch(give_up)
    service = None
    try:
        service = Service(
            backend,
            settings.folder,
            settings.limits,
            fail,
            has_local_clients=is_local,
            price=settings.price,
            sync_limit_s=settings.sync_limit_s,
        )
        keys = Keys(settings.owners, read_secret(settings.folder / "secret"), only_local=is_local)
        app = TinkerApp(service, keys, compresses=not is_local)
        service.start()
        host, port = listening.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        print(f"serving {service.offered.base_model} at http://{shown}:{port}; Ctrl-C ends it.", file=sys.stderr, flush=True)
        # h11: uvicorn's other implementation keeps headers of any length
        config = uvicorn.Config(
            app,
            http="h11",
            log_level="warning",
            access_log=False,
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=_GRACE_S,
            timeout_keep_alive=_KEEP_ALIVE_S,
            limit_concurrency=_MAX_CONNECTIONS,
        )
        await _Server(config, end).serve(sockets=[listening])
    finally:
        if service is not None:
            await service.close()
        await backend.close()
