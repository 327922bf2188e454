"""Outages of judges: a judge that does not reply is left alone for a while, so that it costs a run a bounded wait.

While it is left alone its votes are missing at once. One request after each pause finds out whether it replies again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

_LOG = logging.getLogger(__name__)
#: requests in a row without a reply from which a judge is left alone
_MISSED = 3
#: first and longest pause; each is twice the previous one
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 60.0, 1920.0


class Outage:
    """Count requests without a reply of a judge; all requests to it are reported here.

    A reply is whatever the server sends, also a refusal, but for a status of overload or of a gateway. A request without one
    counts where the judge has replied to no other request since it was sent: a busy judge that replies to some is not left
    alone.

    Args:
        name: name of the judge, for messages.
        clock: seconds since any time.
    """

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._name, self._clock = name, clock
        self._missed, self._reason = 0, ""
        self._replied_at = -float("inf")
        self._pause_s = _FIRST_PAUSE_S
        #: times at which it was left alone and is asked again; None while it is asked
        self._since: float | None = None
        self._again_at = 0.0

    @property
    def is_open(self) -> bool:
        """True while the judge is left alone."""
        return self._since is not None

    def start(self, limit_s: float) -> float | None:
        """Return the time at which a request is sent; None where the judge is left alone.

        Args:
            limit_s: longest time of the request; while the one that finds out whether the judge replies again is under way,
                no other one is sent.
        """
        now = self._clock()
        if self._since is not None:
            if now < self._again_at:
                return None
            self._again_at = now + limit_s
        return now

    def describe(self) -> str:
        """Return why a request is not sent."""
        wait_s = max(0.0, self._again_at - self._clock())
        return (
            f"not asked: it has not replied to the last {self._missed} requests ({self._reason}); the next attempt is in"
            f" {wait_s:.0f} s"
        )

    def record_reply(self) -> None:
        """Record a reply of the judge."""
        self._replied_at = now = self._clock()
        if self._since is not None:
            _LOG.warning("the judge %s replies again, after %.0f s without a reply", self._name, now - self._since)
        self._missed, self._since, self._pause_s = 0, None, _FIRST_PAUSE_S

    def record_failure(self, sent_at: float, reason: str) -> None:
        """Record a request without a reply.

        Args:
            sent_at: what `start` has returned.
            reason: what happened to it.
        """
        if sent_at < self._replied_at or self._since is not None and sent_at < self._since:
            return  # it replies to others, or the request was under way when the judge was left alone
        self._missed, self._reason = self._missed + 1, reason
        if self._missed < _MISSED:
            return
        now = self._clock()
        if self._since is None:
            self._since = now
            _LOG.warning(
                "the judge %s has not replied to %d requests in a row (%s): it is asked again after %.0f s, and after pauses of"
                " up to %.0f s as long as it does not reply; until then its votes are missing, and responses that need them"
                " have no score",
                self._name, self._missed, reason, self._pause_s, _LONGEST_PAUSE_S,
            )  # fmt: skip
        self._again_at = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
