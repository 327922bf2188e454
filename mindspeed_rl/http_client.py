"""The HTTP client of the package: direct requests (no proxies) with limits of time and size, and one rule for retries.

Each request names the function that reads its reply, so that nothing of a server is believed before it was checked.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

import aiohttp

from mindspeed_rl.redaction import hide_in_text

#: until a connection is open; afterwards the limit of the request counts
CONNECT_LIMIT_S = 30.0
#: statuses that pass: overload, limits, gateways
_TEMPORARY = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.5, 30.0
_Result = TypeVar("_Result")


class HttpError(Exception):
    """No usable reply. The text shows no password of an address.

    Attributes:
        late: it took longer than the request's limit.
    """

    def __init__(self, text: str, late: bool = False) -> None:
        super().__init__(hide_in_text(text))
        self.late = late


class _TooLargeError(HttpError):
    """A reply above the limit, which another attempt would not change."""


@dataclass(frozen=True)
class HttpReply:
    """A reply with any status.

    Attributes:
        retry_after: header of this name, "" without it.
    """

    status: int
    body: bytes
    retry_after: str = ""

    @property
    def is_temporary(self) -> bool:
        """True for a status that passes: overload, limits, gateways."""
        return self.status in _TEMPORARY

    @property
    def text(self) -> str:
        """The body as text."""
        return self.body.decode("utf-8", "replace")

    def read_json(self) -> Any:
        """Return the value of a body in JSON.

        Raises:
            ValueError: it is none, or nested too deeply.
        """
        try:
            return json.loads(self.body)
        except RecursionError:
            raise ValueError("lists or objects that are nested too deeply") from None


class HttpClient:
    """Requests in one event loop; its connections are opened with the first one.

    Args:
        max_bytes: limit of a reply.
        attempts: attempts for a request without a usable reply, or with a status that passes.
        headers: headers of all requests.
        follows_redirects: True for services that may have moved.
    """

    def __init__(
        self,
        max_bytes: int,
        *,
        attempts: int = 1,
        headers: Mapping[str, str] | None = None,
        follows_redirects: bool = False,
    ) -> None:
        self._max_bytes, self._attempts, self._follows_redirects = max_bytes, attempts, follows_redirects
        self._headers = dict(headers or {})
        self._session: aiohttp.ClientSession | None = None

    async def request(
        self,
        method: str,
        url: str,
        read: Callable[[HttpReply], _Result],
        *,
        timeout_s: float | None = None,
        headers: Mapping[str, str] | None = None,
        params: Mapping[str, str] | None = None,
        json: object = None,
        data: bytes | None = None,
        form: Sequence[tuple[str, str | bytes, str | None]] = (),
    ) -> _Result:
        """Send a request, again where that may help, and return what `read` makes of the reply.

        Args:
            read: checks and converts the reply, of whatever status; its ValueError is a reply that is not usable.
            timeout_s: limit of an attempt; None where the caller cancels.
            json, data, form: the body; a form has (name, value, file name or None) of each field.

        Raises:
            HttpError: no usable reply to any attempt.
        """
        limit = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_LIMIT_S)
        last = self._attempts - 1
        for attempt in range(self._attempts):
            wait_s = 0.0
            try:
                reply = await self._send(
                    method, url, timeout=limit, headers=headers, params=params, json=json, data=_build_form(form) or data
                )
                if not reply.is_temporary or attempt == last:
                    return read(reply)
                wait_s = _read_seconds(reply.retry_after)
            except (OSError, ValueError, aiohttp.ClientError, asyncio.TimeoutError, HttpError) as error:
                if attempt == last or isinstance(error, _TooLargeError):
                    raise error if isinstance(error, HttpError) else _convert(error) from error
            # random, so that requests that failed together are not repeated together
            await asyncio.sleep(max(wait_s, _FIRST_PAUSE_S * 2**attempt * random.uniform(0.5, 1.0)))
        raise AssertionError("the last attempt returns or raises")

    async def open_socket(self, url: str) -> WebSocket:
        """Open a WebSocket.

        Raises:
            HttpError: the server refuses it.
        """
        try:
            return WebSocket(await self._open_session().ws_connect(url, max_msg_size=self._max_bytes))
        except (OSError, aiohttp.ClientError, asyncio.TimeoutError) as error:
            raise _convert(error) from error

    async def close(self) -> None:
        """Close the connections; another request opens new ones."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def __aenter__(self) -> HttpClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _open_session(self) -> aiohttp.ClientSession:
        # not before the first request, because aiohttp ties a session to the running loop
        if self._session is None:
            self._session = aiohttp.ClientSession(headers=self._headers)
        return self._session

    async def _send(self, method: str, url: str, **options: Any) -> HttpReply:
        session = self._open_session()
        async with session.request(method, url, allow_redirects=self._follows_redirects, **options) as response:
            body = bytearray()
            if (response.content_length or 0) <= self._max_bytes:
                async for chunk in response.content.iter_any():
                    body += chunk
                    if len(body) > self._max_bytes:
                        break
                else:
                    return HttpReply(response.status, bytes(body), response.headers.get("Retry-After", ""))
            response.close()  # the rest is not read
            raise _TooLargeError(f"a reply of more than {self._max_bytes:,} bytes")


class WebSocket:
    """An open WebSocket with messages of text."""

    def __init__(self, connection: aiohttp.ClientWebSocketResponse[bool]) -> None:
        self._connection = connection

    @property
    def closed(self) -> bool:
        """True after either side has closed it."""
        return self._connection.closed

    async def send(self, text: str) -> None:
        """Send a message."""
        await self._connection.send_str(text)

    async def receive(self) -> str:
        """Return the next message.

        Raises:
            HttpError: the server has closed the connection, or sent something else.
        """
        message = await self._connection.receive()
        if message.type is not aiohttp.WSMsgType.TEXT:
            raise HttpError(f"a message of type {message.type.name}")
        return message.data

    async def close(self) -> None:
        """Close the connection."""
        await self._connection.close()


def _convert(error: Exception) -> HttpError:
    # a connection that does not open is not a late reply
    late = isinstance(error, asyncio.TimeoutError) and not isinstance(error, aiohttp.ClientError)
    return HttpError(f"{type(error).__name__}: {error}", late)


def _read_seconds(retry_after: str) -> float:
    """Return the seconds of a Retry-After, within reason; 0.0 for a date, of which few servers make use."""
    return min(float(retry_after), _MAX_PAUSE_S) if retry_after.isdecimal() else 0.0


def _build_form(fields: Sequence[tuple[str, str | bytes, str | None]]) -> aiohttp.FormData | None:
    if not fields:
        return None
    form = aiohttp.FormData()
    for name, value, file_name in fields:
        form.add_field(name, value, filename=file_name)
    return form
