"""Framed msgpack messages over a stream socket: four bytes of length, then the message. Nothing is ever unpickled."""

from __future__ import annotations

import socket
import struct
from typing import Any

import msgpack

_HEADER = struct.Struct(">I")


def _plain(value: Any) -> Any:
    """Numpy scalars and arrays (dataset columns) as plain Python; whatever else msgpack does not know, as text."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, (set, frozenset)):
        return list(value)
    return str(value)


def pack(message: dict[str, Any]) -> bytes:
    """Return the frame that carries the message.

    Raises:
        ValueError: the message does not fit (an integer above 64 bits, a nesting without end).
    """
    try:
        body = msgpack.packb(message, default=_plain, unicode_errors="surrogatepass")
    except (OverflowError, ValueError) as error:
        raise ValueError(f"cannot send to a reward worker: {error}") from error
    assert body is not None  # only a Packer that collects its messages returns none
    return _HEADER.pack(len(body)) + body


class Channel:
    """One end of a conversation. Blocking by default; `receive_ready` serves callers that select on `fileno()`."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._received = bytearray()
        self._unsent = bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def send(self, message: dict[str, Any]) -> None:
        """Send the whole message, waiting for the other side to take it."""
        self._socket.sendall(pack(message))

    def send_soon(self, frame: bytes) -> None:
        """Send what fits now and keeps the rest for `flush` (for sockets in non-blocking mode)."""
        self._unsent += frame
        self.flush()

    def flush(self) -> None:
        """Send what fits of the rest. A dead peer is not an error here: whoever watches the process reports it."""
        while self._unsent:
            try:
                sent = self._socket.send(self._unsent, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except (BrokenPipeError, ConnectionResetError):
                self._unsent.clear()
                return
            del self._unsent[:sent]

    def receive(self) -> dict[str, Any] | None:
        """Return the next message, waiting for it; None once the other side is gone."""
        while True:
            message = self._next()
            if message is not None:
                return message
            data = self._socket.recv(1 << 16)
            if not data:
                return None
            self._received += data

    def receive_ready(self) -> tuple[list[dict[str, Any]], bool]:
        """Return the messages that are here without waiting, and whether the other side still lives."""
        alive = True
        while True:
            try:
                data = self._socket.recv(1 << 18, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except ConnectionResetError:
                data = b""
            if not data:
                alive = False
                break
            self._received += data
        return self.take(b""), alive

    def take(self, data: bytes) -> list[dict[str, Any]]:
        """Return the messages that these received bytes complete."""
        self._received += data
        messages = []
        while (message := self._next()) is not None:
            messages.append(message)
        return messages

    def _next(self) -> dict[str, Any] | None:
        if len(self._received) < _HEADER.size:
            return None
        (length,) = _HEADER.unpack_from(self._received)
        end = _HEADER.size + length
        if len(self._received) < end:
            return None
        message = msgpack.unpackb(
            bytes(self._received[_HEADER.size : end]), strict_map_key=False, unicode_errors="surrogatepass"
        )
        del self._received[:end]
        return message
