"""A rank of a service on several devices: its models and engines, and the calls that all ranks make together.

Importing this imports Megatron and vLLM: the process was prepared for both.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from mindspeed_rl.run import Run
from mindspeed_rl.service.backend import CallError, SampleResult
from mindspeed_rl.service.tenants import Tenants

_LOG = logging.getLogger(__name__)
#: end of a call on a rank: with a result, refused in a sentence for the caller, or failed
Outcome = tuple[Literal["done", "refused", "failed"], Any]


class RankWorker:
    """One rank. All methods are called on all ranks, in the same order."""

    def __init__(self, run: Run, run_id: str, *, rank: int) -> None:
        """Load the base, and build the engines.

        Args:
            run: a run file's run with `serve_config`, with its models planned.
            run_id: unique to the server and equal on all its ranks.
            rank: rank of this process.
        """
        self._tenants, self._rank = Tenants(run, run_id), rank

    def call_tenants(self, method: str, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Outcome:
        """Call a method of `Tenants`, or read one of its properties; only the first rank returns what it returns."""
        try:
            found = getattr(self._tenants, method)
            result = found(*arguments, **keywords) if callable(found) else found
        except CallError as error:
            return "refused", str(error)
        except Exception as error:  # noqa: BLE001  (the driver compares the ranks)
            _LOG.exception("%s failed", method)
            return "failed", f"{type(error).__name__}: {error}"
        return "done", result if self._rank == 0 else None

    def step_tenants(self, num_steps: int) -> tuple[Outcome, list[tuple[str, SampleResult | Exception]]]:
        """Compute steps of this rank's rollout engine until calls end; return them where this rank returns its results."""
        ended: list[tuple[str, SampleResult | Exception]] = []
        try:
            for _ in range(num_steps):
                if ended or not self._tenants.is_sampling:
                    break
                ended = self._tenants.step_sampling()
        except Exception as error:  # noqa: BLE001  (as above)
            _LOG.exception("a step of the rollout engine failed")
            return ("failed", f"{type(error).__name__}: {error}"), []
        return ("done", None), ended if self._tenants.is_output else []
