"""What trainers and workers hold: one client whatever the engine behind it. Clients pickle, so they travel to Ray workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, Protocol

import numpy as np
import ray
from ray.actor import ActorHandle
from ray.exceptions import RayTaskError

from mindspeed_rl.dataplane import ALIASES, DATA_STRATEGIES
from mindspeed_rl.dataplane.records import Batch, ColumnSpec, Ragged, pack
from mindspeed_rl.dataplane.rows import check_name
from mindspeed_rl.dataplane.transfer_dock import TransferDock
from mindspeed_rl.observability.metrics import Metrics

# Requests that may wait in the dock at the same time; each is a coroutine, not a thread.
MAX_WAITING_REQUESTS = 10_000


class DataPlane(Protocol):
    """Columns x rows handed to consumers; see `TransferDock` for what a row, a column and a consumer are."""

    def put(
        self,
        data: Mapping[str, Sequence[Any] | Ragged],
        indexes: Sequence[int],
        *,
        is_prompt: bool = False,
        overwrite: bool = False,
    ) -> None:
        """The cells are ready; see `TransferDock.put_experience`."""

    def get(
        self, consumer: str, columns: Sequence[str], count: int | None = None, *, timeout_s: float | None = None, **options: Any
    ) -> tuple[Batch, list[int]] | tuple[None, None]:
        """The next rows, marked as consumed.

        Args:
            consumer: who asks.
            columns: what must be ready.
            count: rows wanted; needed without indexes.
            timeout_s: waits this long in seconds for the rows; None: does not wait, and returns (None, None) instead.
            **options: the further fields of `records.Request`.

        Raises:
            ValueError: a wrong name, index or count.
            TimeoutError: the deadline passed; says who waited for what and who was to produce it.
            DataPlaneAborted: `abort` was called.
        """

    def reserve(self, consumer: str, columns: Sequence[str], count: int, **options: Any) -> list[int] | None:
        """Rows set aside for a later `get(indexes=rows)`; None when not enough are ready."""

    def all_consumed(self, consumer: str) -> bool:
        """True once the consumer was given every row."""

    def reset_consumed(self, consumer: str) -> None:
        """The consumer may be given every row once more."""

    def clear(self, num_prompts: int | None = None) -> None:
        """No rows are held; the next iteration has num_prompts prompts (as before when None)."""

    def status(self) -> dict[str, Any]:
        """Capacity, ready rows by column, consumed rows by consumer."""

    def abort(self, reason: str) -> None:
        """Everybody who waits, or asks until the next `clear`, gets `DataPlaneAborted`."""

    def update_metrics(self, metrics: Metrics) -> None:
        """Adds to the metrics of the iteration."""

    def get_metrics(self) -> Metrics:
        """The metrics added since the last call."""

    def close(self) -> None:
        """The engine is gone; call it once, on the driver."""


def make_data_plane(
    data_strategy: str,
    num_prompts: int,
    n_samples_per_prompt: int,
    *,
    columns: Mapping[str, ColumnSpec] | None = None,
    consumers: Sequence[str] | None = None,
    **engine_options: Any,
) -> DataPlane:
    """A data plane of `num_prompts * n_samples_per_prompt` rows, running on the Ray cluster this process is connected to.

    Args:
        data_strategy: td (also transfer_dock, dock) or tq (also transfer_queue, queue).
        num_prompts: prompts of an iteration.
        n_samples_per_prompt: rows a prompt.
        columns: every column; those of the RL loops when None. Add your own with `rl_columns() | {...}`.
        consumers: every consumer; those of the RL loops when None.
        **engine_options: tq only: num_storage_units, init_timeout_s.

    Raises:
        ValueError: unknown data_strategy or option.
    """
    strategy = ALIASES.get(data_strategy, data_strategy)
    check_name("data_strategy", strategy, DATA_STRATEGIES)
    module, name = DATA_STRATEGIES[strategy].split(":")
    engine = getattr(import_module(module), name)
    return engine.create(num_prompts, n_samples_per_prompt, columns=columns, consumers=consumers, **engine_options)


class TransferDockClient:
    """A `DataPlane` on a TransferDock actor."""

    def __init__(self, actor: ActorHandle) -> None:
        self._actor = actor

    @classmethod
    def create(
        cls,
        num_prompts: int,
        n_samples_per_prompt: int,
        *,
        columns: Mapping[str, ColumnSpec] | None = None,
        consumers: Sequence[str] | None = None,
    ) -> TransferDockClient:
        """Starts the actor. It asks for no CPU of its own, so it never competes with the workers for placement."""
        # wait_experience is a coroutine, which makes this an asyncio actor: all methods share one thread and need no lock.
        remote = ray.remote(num_cpus=0, max_concurrency=MAX_WAITING_REQUESTS)(TransferDock)
        return cls(remote.remote(num_prompts, n_samples_per_prompt, columns, consumers))

    def put(
        self,
        data: Mapping[str, Sequence[Any] | Ragged],
        indexes: Sequence[int],
        *,
        is_prompt: bool = False,
        overwrite: bool = False,
    ) -> None:
        packed = {name: pack(rows) for name, rows in data.items()}
        self._call("put_experience", packed, np.asarray(indexes, dtype=np.int64), is_prompt, overwrite)

    def get(
        self, consumer: str, columns: Sequence[str], count: int | None = None, *, timeout_s: float | None = None, **options: Any
    ) -> tuple[Batch, list[int]] | tuple[None, None]:
        if timeout_s is None:
            return self._call("get_experience", consumer, list(columns), count, **options)
        return self._call("wait_experience", consumer, list(columns), count, timeout_s=timeout_s, **options)

    def reserve(self, consumer: str, columns: Sequence[str], count: int, **options: Any) -> list[int] | None:
        return self._call("prefetch_request_index", consumer, list(columns), count, **options)

    def all_consumed(self, consumer: str) -> bool:
        return self._call("all_consumed", consumer)

    def reset_consumed(self, consumer: str) -> None:
        self._call("reset_consumed", consumer)

    def clear(self, num_prompts: int | None = None) -> None:
        self._call("clear", num_prompts)

    def status(self) -> dict[str, Any]:
        return self._call("status")

    def abort(self, reason: str) -> None:
        self._call("abort", reason)

    def update_metrics(self, metrics: Metrics) -> None:
        self._call("update_metrics", metrics)

    def get_metrics(self) -> Metrics:
        return self._call("get_metrics")

    def close(self) -> None:
        ray.kill(self._actor)

    def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        try:
            return ray.get(getattr(self._actor, method).remote(*args, **kwargs))
        except RayTaskError as error:
            # The dock's own sentence, without the actor's stack around it.
            raise error.cause from None
