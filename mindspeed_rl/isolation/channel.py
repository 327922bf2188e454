"""Framed msgpack messages over a stream socket: four bytes of length, then the message. Nothing is ever unpickled."""

from __future__ import annotations

import socket
import struct
from typing import Any

import msgpack

Message = dict[str, Any]
_HEADER = struct.Struct(">I")
_MAX_MESSAGE_BYTES = 1 << 30
#: 256 KiB each: sockets hold less than all of them
_READS = 16


class ChannelError(Exception):
    """The bytes are not a message: other code of the process has written to the connection, or changed msgpack."""


def _to_plain(value: object) -> object:
    """Convert numpy scalars and arrays (dataset columns) to plain Python, and other types that msgpack lacks to text."""
    if callable(to_list := getattr(value, "tolist", None)):
        return to_list()
    return list(value) if isinstance(value, (set, frozenset)) else str(value)


def pack(message: Message) -> bytes:
    """Return the message as a frame.

    Raises:
        ValueError: the message does not fit (an integer above 64 bits, endless nesting).
    """
    try:
        body = msgpack.packb(message, default=_to_plain, unicode_errors="surrogatepass")
    except (OverflowError, ValueError) as error:
        raise ValueError(f"cannot send to a worker process: {error}") from error
    assert body is not None  # only a Packer that collects its messages returns none
    return _HEADER.pack(len(body)) + body


def unpack(frame: bytes) -> Message:
    """Return the message of a frame.

    Raises:
        ChannelError: it is none.
    """
    return _decode(frame[_HEADER.size :])


def _decode(body: bytes) -> Message:
    try:
        message = msgpack.unpackb(body, strict_map_key=False, unicode_errors="surrogatepass")
    except (ValueError, RecursionError, msgpack.UnpackException) as error:
        raise ChannelError(f"{len(body)} bytes that msgpack cannot read: {type(error).__name__}") from None
    if not isinstance(message, dict):
        raise ChannelError(f"a message that is {type(message).__name__}")
    return message


class Channel:
    """One end of a connection. Blocking by default; `receive_ready` is for callers that select on `fileno()`.

    Attributes:
        unsent: bytes that `flush` has yet to send.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._buffer = bytearray()
        self.unsent = bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    def send(self, message: Message) -> None:
        """Send the message and block until the socket has accepted all of it."""
        self._socket.sendall(pack(message))

    def send_soon(self, frame: bytes) -> None:
        """Send the bytes that fit now and keep the rest for `flush` (for sockets in non-blocking mode)."""
        self.unsent += frame
        self.flush()

    def flush(self) -> None:
        """Send the unsent bytes that fit now. A dead peer is not an error here: the spawner reports its death."""
        while self.unsent:
            try:
                sent = self._socket.send(self.unsent, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except (BrokenPipeError, ConnectionResetError):
                self.unsent.clear()
                return
            del self.unsent[:sent]

    def receive(self) -> Message | None:
        """Wait for the next message and return it; None after the other side has closed."""
        while True:
            message = self._pop_message()
            if message is not None:
                return message
            data = self._socket.recv(1 << 16)
            if not data:
                return None
            self._buffer += data

    def receive_ready(self) -> tuple[list[Message], bool]:
        """Return messages that have arrived, without waiting, and False for a closed connection.

        Not more is read at a time than sockets hold, so that a peer which sends without end does not keep the caller here.

        Raises:
            ChannelError: the other side wrote something else.
        """
        alive = True
        for _ in range(_READS):
            try:
                data = self._socket.recv(1 << 18, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except ConnectionResetError:
                data = b""
            if not data:
                alive = False
                break
            self._buffer += data
        return self.receive_bytes(b""), alive

    def receive_bytes(self, data: bytes) -> list[Message]:
        """Add received bytes and return the messages that are complete now."""
        self._buffer += data
        messages = []
        while (message := self._pop_message()) is not None:
            messages.append(message)
        return messages

    def _pop_message(self) -> Message | None:
        if len(self._buffer) < _HEADER.size:
            return None
        (length,) = _HEADER.unpack_from(self._buffer)
        if length > _MAX_MESSAGE_BYTES:
            raise ChannelError(f"a message of {length} bytes")
        end = _HEADER.size + length
        if len(self._buffer) < end:
            return None
        message = _decode(bytes(self._buffer[_HEADER.size : end]))
        del self._buffer[:end]
        return message
