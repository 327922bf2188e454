"""Clients of the data plane, one interface for every engine. Clients pickle, so they can be sent to Ray workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar, cast, overload

import numpy as np
import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from mindspeed_rl import registry
from mindspeed_rl.dataplane import ALIASES, DATA_STRATEGIES
from mindspeed_rl.dataplane.columns import Batch, pack
from mindspeed_rl.dataplane.transfer_dock import TransferDock, Users, check_name
from mindspeed_rl.observability import heartbeat

# Requests that may wait in the dock at the same time; each is a coroutine, not a thread.
_MAX_WAITING_REQUESTS = 10_000

#: longest wait for a result, in addition to the time that the requested rows may take
_RESULT_TIMEOUT_S = 120.0
#: the same for `abort`, which is called after a failure
_ABORT_TIMEOUT_S = 10.0

_Result = TypeVar("_Result")


class DataPlaneError(ConnectionError):
    """The data plane's process died, or does not answer."""


class DataPlane(Protocol):
    """Columns x rows served to consumers; see `TransferDock` for rows, columns and consumers."""

    def put(self, data: Mapping[str, Sequence[object]], indexes: Sequence[int], *, overwrite: bool = False) -> None:
        """Put cells and make them ready; see `TransferDock.put`."""

    @overload
    def get(
        self,
        consumer: str,
        columns: Sequence[str],
        count: int | None = None,
        *,
        indexes: Sequence[int] | None = None,
        timeout_s: float,
    ) -> tuple[Batch, list[int]]: ...

    @overload
    def get(
        self, consumer: str, columns: Sequence[str], count: int | None = None, *, indexes: Sequence[int] | None = None
    ) -> tuple[Batch, list[int]] | tuple[None, None]: ...

    def get(
        self,
        consumer: str,
        columns: Sequence[str],
        count: int | None = None,
        *,
        indexes: Sequence[int] | None = None,
        timeout_s: float | None = None,
    ) -> tuple[Batch, list[int]] | tuple[None, None]:
        """Return the next rows and mark them as consumed; see `TransferDock.get`.

        Args:
            consumer: its name.
            columns: must be ready.
            count: rows requested; needed without indexes.
            indexes: exactly these rows, in this order, whether consumed before or not.
            timeout_s: longest wait in seconds for the rows; None: no wait, and (None, None) instead.

        Raises:
            ValueError: a wrong name, index or count.
            TimeoutError: the deadline passed; names the consumer, the missing columns and their producers.
            DataPlaneAbortedError: `abort` was called.
        """

    def clear(self, num_prompts: int) -> None:
        """Drop all rows; the next iteration has num_prompts prompts."""

    def abort(self, reason: str) -> None:
        """Raise `DataPlaneAbortedError` in all requests until the next `clear`."""

    def close(self) -> None:
        """End the engine of all clients; call it once, on the driver."""


def make_data_plane(
    data_strategy: str, num_prompts: int, n_samples_per_prompt: int, users: Users, **engine_options: object
) -> DataPlane:
    """Start a data plane of `num_prompts * n_samples_per_prompt` rows on the Ray cluster of this process.

    Args:
        data_strategy: td (also transfer_dock, dock) or tq (also transfer_queue, queue).
        num_prompts: prompts of an iteration.
        n_samples_per_prompt: rows a prompt.
        users: names of consumers and producers, with the columns that each puts.
        **engine_options: td: result_timeout_s, in addition to the time that requested rows may take, and runtime_env, Ray's;
            tq: num_storage_units, init_timeout_s.

    Raises:
        ValueError: unknown data_strategy, or a column that two users put.
    """
    strategy = ALIASES.get(data_strategy, data_strategy)
    check_name("data_strategy", strategy, DATA_STRATEGIES)
    engine = registry.load(DATA_STRATEGIES[strategy], f"data_strategy '{strategy}'")
    return engine.create(num_prompts, n_samples_per_prompt, users, **engine_options)


class TransferDockClient:
    """A `DataPlane` on a TransferDock actor."""

    def __init__(self, actor: ActorHandle[TransferDock], result_timeout_s: float = _RESULT_TIMEOUT_S) -> None:
        self._actor, self._result_timeout_s = actor, result_timeout_s

    @classmethod
    def create(
        cls,
        num_prompts: int,
        n_samples_per_prompt: int,
        users: Users,
        *,
        result_timeout_s: float = _RESULT_TIMEOUT_S,
        runtime_env: Mapping[str, Any] | None = None,
    ) -> TransferDockClient:
        """Start the actor. It reserves no CPU, so it never competes with the workers for placement.

        Args:
            num_prompts: prompts of an iteration.
            n_samples_per_prompt: rows a prompt.
            users: names of consumers and producers, with the columns that each puts.
            result_timeout_s: longest wait for a result, in addition to the time that requested rows may take.
            runtime_env: Ray's, of the actor's process.
        """
        # `wait` is a coroutine, which makes this an asyncio actor: all methods share one thread and need no lock.
        options = {"num_cpus": 0, "max_concurrency": _MAX_WAITING_REQUESTS, "runtime_env": dict(runtime_env or {})}
        remote = ray.remote(TransferDock).options(**options)
        # Ray declares the actor's own class as a second kind of result, so that editors complete its methods.
        actor = cast("ActorHandle[TransferDock]", remote.remote(num_prompts, n_samples_per_prompt, users))
        return cls(actor, result_timeout_s)

    def put(self, data: Mapping[str, Sequence[object]], indexes: Sequence[int], *, overwrite: bool = False) -> None:
        packed = {name: pack(rows) for name, rows in data.items()}
        # an array is sent as one buffer, a list is pickled item by item
        self._fetch("put", self._actor.put.remote(packed, np.asarray(indexes, dtype=np.int64), overwrite))

    def get(
        self,
        consumer: str,
        columns: Sequence[str],
        count: int | None = None,
        *,
        indexes: Sequence[int] | None = None,
        timeout_s: float | None = None,
    ) -> tuple[Batch, list[int]] | tuple[None, None]:
        if timeout_s is None:
            return self._fetch("get", self._actor.get.remote(consumer, list(columns), count, indexes))
        rows = self._actor.wait.remote(consumer, list(columns), count, indexes, timeout_s=timeout_s)
        with heartbeat.doing(f"waiting for {', '.join(columns)} as {consumer}"):
            return self._fetch("get", rows, timeout_s)

    def clear(self, num_prompts: int) -> None:
        self._fetch("clear", self._actor.clear.remote(num_prompts))

    def abort(self, reason: str) -> None:
        ray.get(self._actor.abort.remote(reason), timeout=_ABORT_TIMEOUT_S)

    def close(self) -> None:
        ray.kill(self._actor)

    def _fetch(self, call: str, reference: ObjectRef[_Result], rows_s: float = 0.0) -> _Result:
        """Return the result of a call.

        Args:
            call: in messages.
            reference: the result.
            rows_s: time that the requested rows may take.

        Raises:
            DataPlaneError: the dock does not answer.
        """
        limit_s = self._result_timeout_s + rows_s
        try:
            return ray.get(reference, timeout=limit_s)
        except GetTimeoutError:
            raise DataPlaneError(
                f"the data plane has not answered a {call} for {limit_s:.0f} s (rl_config.deadlines.data_plane): its process "
                "is stopped, or its machine is out of reach."
            ) from None
        except RayActorError:
            raise DataPlaneError("the data plane's process died (the kernel may have killed it for memory).") from None
        except RayTaskError as error:
            # the dock's own error, without the actor's stack around it
            raise error.cause from None
