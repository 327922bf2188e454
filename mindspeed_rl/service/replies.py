"""Errors and times in the form of the API."""

from __future__ import annotations

import time
from typing import Literal

#: whose fault a failed operation is, in the API's words
Category = Literal["user", "server", "unknown"]


class RefusedError(Exception):
    """A request that is refused at once; its status says whether a client may send it again.

    The SDK sends requests with 408, 409, 429 and 5xx again, and ends with the text for others.

    Args:
        status: status of HTTP.
        text: what is wrong and what would be right.
    """

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class ServerEndsError(RefusedError):
    """A request that the end of the server has cut short: its client may send it again once the server is back."""

    def __init__(self) -> None:
        super().__init__(503, "the server ends; send the request again once it is back")


def write_time(seconds: float) -> str:
    """Write a time since the epoch as ISO 8601 in UTC."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + "+00:00"
