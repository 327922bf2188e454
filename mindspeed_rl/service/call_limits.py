"""How long the ranks of a service may take for a call: a rank that waits for ever in a collective keeps sending heartbeats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mindspeed_rl.config import Deadlines

#: calls that write checkpoints: they have the deadline of one
_SAVES = frozenset({"save_state", "export_adapter", "export_merged"})
#: calls that read or write folders: the disk decides, so that only the run's deadline is theirs. A step of samples may load the
#: full weights of another sampler
_ON_DISK = frozenset({"load_state", "make_sampler", "drop_sampler", "step_sampling", "step_tenants"})
#: seconds that any call may take
_MIN_LIMIT_S = 300.0
#: a call may take so many times what an earlier one lets expect
_GROWTH = 5.0


class CallLimits:
    """Limits of calls by the times of earlier ones.

    The first call of a kind, in which kernels are compiled, has `rl_config.deadlines.update`. A later one may take five times
    what the largest one so far lets expect for its tokens, but 300 s at least; a deadline that the run file sets stays.
    """

    def __init__(self, deadlines: Deadlines) -> None:
        """Take the run's deadlines."""
        self._deadlines = deadlines
        #: tokens and seconds of the largest call of each kind
        self._largest: dict[str, tuple[int, float]] = {}
        self._longest_s = 0.0

    def find(self, method: str, num_tokens: int = 1) -> Deadlines:
        """Return the run's deadlines with that of this call as `update`."""
        key = self.find_key(method)
        limit_s = self._deadlines.limit(key, self._longest_s)
        if key == "update" and method in self._largest and method not in _ON_DISK and "update" not in self._deadlines.fixed:
            tokens, seconds = self._largest[method]
            limit_s = min(limit_s, max(_MIN_LIMIT_S, _GROWTH * seconds * max(1.0, num_tokens / tokens)))
        return replace(self._deadlines, seconds={**self._deadlines.seconds, "update": limit_s})

    @staticmethod
    def find_key(method: str) -> str:
        """Return the key of `rl_config.deadlines` that a call has."""
        return "save" if method in _SAVES else "update"

    def note(self, method: str, num_tokens: int, seconds: float, results: Sequence[object] = ()) -> None:
        """Note the seconds of a call that has done all its work.

        Args:
            results: results of its parts; with an error among them nothing is noted, since that part has done no work.
        """
        if any(isinstance(result, Exception) for result in results):
            return
        self._longest_s = max(self._longest_s, seconds)
        tokens, longest_s = self._largest.get(method, (0, 0.0))
        if num_tokens > tokens:
            self._largest[method] = num_tokens, seconds
        else:
            self._largest[method] = tokens, max(longest_s, seconds)
