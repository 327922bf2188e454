"""What trainers and workers hold: one client whatever the engine behind it. Clients pickle, so they travel to Ray workers."""

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
from mindspeed_rl.dataplane.columns import Batch, Ragged, pack
from mindspeed_rl.dataplane.transfer_dock import TransferDock, Users, check_name
from mindspeed_rl.observability import heartbeat

# Requests that may wait in the dock at the same time; each is a coroutine, not a thread.
MAX_WAITING_REQUESTS = 10_000

#: longest wait for an answer, beside what the rows asked for may take
ANSWER_TIMEOUT_S = 120.0
#: the same for the order to give up, which comes when something is wrong already
_ABORT_TIMEOUT_S = 10.0

Answer = TypeVar("Answer")


class DataPlaneError(ConnectionError):
    """The data plane's process died, or does not answer."""


class DataPlane(Protocol):
    """Columns x rows handed to consumers; see `TransferDock` for what a row, a column and a consumer are."""

    def put(self, data: Mapping[str, Sequence[Any] | Ragged], indexes: Sequence[int], *, overwrite: bool = False) -> None:
        """Puts cells and makes them ready; see `TransferDock.put`."""

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
        """The next rows, marked as consumed; see `TransferDock.get`.

        Args:
            consumer: who asks.
            columns: what must be ready.
            count: rows wanted; needed without indexes.
            indexes: exactly these rows, in this order, whether consumed before or not.
            timeout_s: waits this long in seconds for the rows; None: does not wait, and returns (None, None) instead.

        Raises:
            ValueError: a wrong name, index or count.
            TimeoutError: the deadline passed; says who waited for what and who was to produce it.
            DataPlaneAbortedError: `abort` was called.
        """

    def clear(self, num_prompts: int) -> None:
        """Drops all rows; the next iteration has num_prompts prompts."""

    def abort(self, reason: str) -> None:
        """Raises `DataPlaneAbortedError` in everybody who waits, or asks until the next `clear`."""

    def close(self) -> None:
        """Ends the engine behind all clients; call it once, on the driver."""


def make_data_plane(
    data_strategy: str, num_prompts: int, n_samples_per_prompt: int, users: Users, **engine_options: Any
) -> DataPlane:
    """A data plane of `num_prompts * n_samples_per_prompt` rows, running on the Ray cluster this process is connected to.

    Args:
        data_strategy: td (also transfer_dock, dock) or tq (also transfer_queue, queue).
        num_prompts: prompts of an iteration.
        n_samples_per_prompt: rows a prompt.
        users: who puts and asks, by name, and the columns that each puts.
        **engine_options: td: answer_timeout_s, of what the rows asked for may not explain, and runtime_env, Ray's; tq:
            num_storage_units, init_timeout_s.

    Raises:
        ValueError: unknown data_strategy, or a column that two users put.
    """
    strategy = ALIASES.get(data_strategy, data_strategy)
    check_name("data_strategy", strategy, DATA_STRATEGIES)
    engine = registry.load(DATA_STRATEGIES[strategy], f"data_strategy '{strategy}'")
    return engine.create(num_prompts, n_samples_per_prompt, users, **engine_options)


class TransferDockClient:
    """A `DataPlane` on a TransferDock actor."""

    def __init__(self, actor: ActorHandle[TransferDock], answer_timeout_s: float = ANSWER_TIMEOUT_S) -> None:
        self._actor, self._answer_timeout_s = actor, answer_timeout_s

    @classmethod
    def create(
        cls,
        num_prompts: int,
        n_samples_per_prompt: int,
        users: Users,
        *,
        answer_timeout_s: float = ANSWER_TIMEOUT_S,
        runtime_env: Mapping[str, Any] | None = None,
    ) -> TransferDockClient:
        """Starts the actor. It asks for no CPU of its own, so it never competes with the workers for placement.

        Args:
            runtime_env: Ray's, of the actor's process.
        """
        # `wait` is a coroutine, which makes this an asyncio actor: all methods share one thread and need no lock.
        options = {"num_cpus": 0, "max_concurrency": MAX_WAITING_REQUESTS, "runtime_env": dict(runtime_env or {})}
        remote = ray.remote(TransferDock).options(**options)
        # Ray declares the actor's own class as a second kind of result, so that editors complete its methods.
        actor = cast("ActorHandle[TransferDock]", remote.remote(num_prompts, n_samples_per_prompt, users))
        return cls(actor, answer_timeout_s)

    def put(self, data: Mapping[str, Sequence[Any] | Ragged], indexes: Sequence[int], *, overwrite: bool = False) -> None:
        packed = {name: pack(rows) for name, rows in data.items()}
        # an array is one buffer on the way, a list is pickled number by number
        self._answer("put", self._actor.put.remote(packed, np.asarray(indexes, dtype=np.int64), overwrite))

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
            return self._answer("get", self._actor.get.remote(consumer, list(columns), count, indexes))
        waiting = self._actor.wait.remote(consumer, list(columns), count, indexes, timeout_s=timeout_s)
        with heartbeat.doing(f"waiting for {', '.join(columns)} as {consumer}"):
            return self._answer("get", waiting, timeout_s)

    def clear(self, num_prompts: int) -> None:
        self._answer("clear", self._actor.clear.remote(num_prompts))

    def abort(self, reason: str) -> None:
        ray.get(self._actor.abort.remote(reason), timeout=_ABORT_TIMEOUT_S)

    def close(self) -> None:
        ray.kill(self._actor)

    def _answer(self, call: str, reference: ObjectRef[Answer], rows_s: float = 0.0) -> Answer:
        """What the dock answers.

        Args:
            rows_s: what it may take until the rows asked for are there.

        Raises:
            DataPlaneError: it does not answer any more.
        """
        limit_s = self._answer_timeout_s + rows_s
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
            # The dock's own sentence, without the actor's stack around it.
            raise error.cause from None
