"""The data plane on the `transferqueue` package: one controller, storage units on every node, ZMQ between them and the clients.

TransferQueue keeps the ready and consumed bits and the values; `RowRules`, a sampler that runs inside its controller, decides
which rows a request gets, so that the same rules hold as in our TransferDock. Facts about version 0.1.11 that shape this file:

- `init` waits for ever when Ray has fewer logical CPUs than 1 + num_data_storage_units.
- A put whose dtype differs from what the column holds is stored, but its ready bits are never set and nobody is told.
- With `polling_mode` an unserved request comes back empty at once; without it the controller serves nobody while it waits.
- Its sockets are bound to the node's own address, without authentication: for trusted networks.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast
from uuid import uuid4

import ray
import torch
import transfer_queue
from omegaconf import OmegaConf
from tensordict import NonTensorStack, TensorDict
from transfer_queue.sampler import BaseSampler

from mindspeed_rl.dataplane.columns import Batch, Column, Ragged, kind, pack
from mindspeed_rl.dataplane.transfer_dock import (
    DataPlaneAbortedError,
    Request,
    Users,
    check_kind,
    check_name,
    check_sizes,
    check_unwritten,
    describe_missing,
    producers,
    row_numbers,
    select_rows,
)

CONTROLLER = ("TransferQueueController", "transfer_queue")  # name and Ray namespace of its controller actor
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.002, 0.05


class RowRules(BaseSampler):
    """Runs in TransferQueue's controller: serves rows, and refuses puts, by the rules of the TransferDock.

    A partition's keys are its row numbers. Only the controller's request thread calls this, so nothing here needs a lock.
    """

    def __init__(self, n_samples_per_prompt: int) -> None:
        super().__init__()
        self.n_samples_per_prompt = n_samples_per_prompt

    def sample(self, ready_indexes: list[int], batch_size: int, *args: Any, **arguments: Any) -> tuple[list[int], list[int]]:
        """Rows served and consumed, as TransferQueue's global indexes; nothing when the request cannot be served.

        Args:
            ready_indexes: global indexes with all fields ready and not consumed by this consumer.
            batch_size: unused: always 0, so that TransferQueue leaves the decision to us.
            *args: unused.
            **arguments: `partition`, TransferQueue's DataPartitionStatus; `operation`, "get" or "check_put"; and what that
                takes: the fields of a `Request`, or kinds, rows and overwrite.
        """
        partition, operation = arguments.pop("partition"), arguments.pop("operation")
        if operation == "check_put":
            self._check_put(partition, **arguments)
            return [], []
        rows = self._serve(partition, ready_indexes, Request(**arguments))
        indexes = [partition.keys_mapping[str(row)] for row in rows or ()]
        return indexes, indexes

    def _serve(self, partition: Any, ready_indexes: list[int], request: Request) -> list[int] | None:
        capacity = len(partition.keys_mapping)
        if request.indexes is not None:
            rows = row_numbers(request.indexes, capacity).tolist()
            return rows if all(not _missing(partition, name, rows) for name in request.columns) else None
        available = [int(partition.revert_keys_mapping[index]) for index in ready_indexes]
        return select_rows(request, available, capacity, self.n_samples_per_prompt)

    def _check_put(self, partition: Any, kinds: dict[str, str], rows: list[int], overwrite: bool) -> None:
        row_numbers(rows, len(partition.keys_mapping))
        # TransferQueue drops this entry together with the partition
        held: dict[str, str] = self._states.setdefault(partition.partition_id, {})  # kinds of rows by column
        for name, put in kinds.items():
            check_kind(name, put, held.get(name, put))
            if not overwrite:
                missing = set(_missing(partition, name, rows))
                check_unwritten(name, [row for row in rows if row not in missing])
        held.update(kinds)


def _missing(partition: Any, name: str, rows: Sequence[int]) -> list[int]:
    """The rows whose cell in a column is not ready."""
    if name not in partition.field_name_mapping:
        return list(rows)
    ready = partition.production_status[:, partition.field_name_mapping[name]]
    return [row for row in rows if not ready[partition.keys_mapping[str(row)]]]


class TransferQueueClient:
    """A `DataPlane` on TransferQueue. One a Ray cluster: TransferQueue's actors have fixed names."""

    def __init__(self, partition: str, n_samples_per_prompt: int, users: Users) -> None:
        self._partition = partition
        self._n_samples_per_prompt = n_samples_per_prompt
        self._producer_of = producers(users)
        self._consumers = tuple(users)

    @classmethod
    def create(
        cls,
        num_prompts: int,
        n_samples_per_prompt: int,
        users: Users,
        *,
        num_storage_units: int = 2,
        init_timeout_s: float = 120.0,
    ) -> TransferQueueClient:
        """Starts TransferQueue's controller and storage units in the Ray cluster, and an empty partition in them.

        Args:
            num_prompts: prompts of an iteration.
            n_samples_per_prompt: rows a prompt.
            users: who puts and asks, by name, and the columns that each puts.
            num_storage_units: storage actors, one logical CPU each; spread over the nodes.
            init_timeout_s: deadline in seconds for the actors to start.

        Raises:
            ValueError: sizes below 1, a column that two users put, too few logical CPUs in the cluster, or TransferQueue runs
                there already.
            TimeoutError: the actors did not start in time.
        """
        check_sizes(num_prompts, n_samples_per_prompt)
        client = cls(f"rows-{uuid4().hex[:8]}", n_samples_per_prompt, users)
        _start_engine(n_samples_per_prompt, num_storage_units, init_timeout_s)
        client._make_rows(num_prompts)
        return client

    def put(self, data: Mapping[str, Sequence[Any] | Ragged], indexes: Sequence[int], *, overwrite: bool = False) -> None:
        """See `TransferDock.put`."""
        packed = {name: pack(entries) for name, entries in data.items()}
        for name, column in packed.items():
            check_name("column", name, self._producer_of)
            if len(column) != len(indexes):
                raise ValueError(f"Column '{name}' has {len(column)} entries for {len(indexes)} indexes.")
        rows = row_numbers(indexes, self._capacity()).tolist()
        kinds = {name: kind(column) for name, column in packed.items()}
        # any consumer's name will do: the answer has no rows, so none are marked as consumed
        self._ask([], self._consumers[0], "check_put", kinds=kinds, rows=rows, overwrite=overwrite)
        meta = _client().kv_retrieve_meta([str(row) for row in rows], self._partition)
        fields = {name: _to_field(column) for name, column in packed.items()}
        _client().put(TensorDict(fields, batch_size=len(rows)), meta)

    def get(
        self,
        consumer: str,
        columns: Sequence[str],
        count: int | None = None,
        *,
        indexes: Sequence[int] | None = None,
        timeout_s: float | None = None,
    ) -> tuple[Batch, list[int]] | tuple[None, None]:
        """See `DataPlane.get`. Waits by asking again, in pauses that grow to LONGEST_PAUSE_S."""
        check_name("consumer", consumer, self._consumers)
        for name in columns:
            check_name("column", name, self._producer_of)
        request = Request(consumer, tuple(columns), count, None if indexes is None else tuple(int(row) for row in indexes))
        deadline = time.monotonic() + (timeout_s or 0.0)
        pause_s = SHORTEST_PAUSE_S
        while not (meta := self._reserve(request)).size:
            if timeout_s is None:
                return None, None
            if time.monotonic() >= deadline:
                raise TimeoutError(f"'{consumer}' waited {timeout_s:g} s in vain. {self._describe_missing(request)}")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        data = _client().get_data(meta)
        return {name: _from_field(data[name]) for name in columns}, self._rows_of(meta.global_indexes)

    def clear(self, num_prompts: int) -> None:
        """See `DataPlane.clear`."""
        _client().clear_partition(self._partition)
        if self._aborted() is not None:
            _client().clear_partition(self._abort_partition)
        self._make_rows(num_prompts)

    def abort(self, reason: str) -> None:
        """See `DataPlane.abort`."""
        # The note is the only key of a partition of its own, so that it is there whole or not at all.
        _client().kv_retrieve_meta([reason], self._abort_partition, create=True)

    def close(self) -> None:
        """Ends TransferQueue's actors."""
        transfer_queue.close()

    # Inside

    @property
    def _abort_partition(self) -> str:
        return f"{self._partition}/abort"

    def _aborted(self) -> str | None:
        """The reason that `abort` was given since the last `clear`."""
        if self._abort_partition not in _client().get_partition_list():
            return None
        return next(iter(_client().kv_list(self._abort_partition)[self._abort_partition]), None)

    def _make_rows(self, num_prompts: int) -> None:
        keys = [str(row) for row in range(num_prompts * self._n_samples_per_prompt)]
        _client().kv_retrieve_meta(keys, self._partition, create=True)

    def _reserve(self, request: Request) -> Any:
        """TransferQueue's metadata of the rows that serve the request, marked as consumed; empty when not enough are ready."""
        if (reason := self._aborted()) is not None:
            raise DataPlaneAbortedError(reason)
        # What the controller receives must be plain lists.
        plain = {name: list(value) if isinstance(value, tuple) else value for name, value in vars(request).items()}
        return self._ask(list(request.columns), request.consumer, "get", **plain)

    def _ask(self, fields: list[str], task: str, operation: str, **arguments: Any) -> Any:
        """The answer of `RowRules` in the controller."""
        try:
            return _client().get_meta(
                data_fields=fields,
                batch_size=0,
                partition_id=self._partition,
                mode="fetch",
                task_name=task,
                sampling_config={"operation": operation, **arguments},
            )
        except RuntimeError as error:
            # The controller reports what a sampler raised as text.
            _, found, sentence = str(error).partition("failed: ValueError: ")
            if not found:
                raise
            raise ValueError(sentence) from None

    def _rows_of(self, global_indexes: Sequence[int]) -> list[int]:
        # TransferQueue declares metadata as the result, but returns what its docstring says
        keys = cast("list[str]", _client().kv_retrieve_keys(list(global_indexes), self._partition))
        return [int(key) for key in keys]

    def _capacity(self) -> int:
        return len(self._consumed(self._consumers[0]))

    def _consumed(self, consumer: str) -> torch.Tensor:
        """[rows] 1 where consumed, in the order of TransferQueue's global indexes."""
        _, status = _client().get_consumption_status(consumer, self._partition)
        if status is None:
            raise RuntimeError("TransferQueue holds no rows of this data plane: it was closed, or is being cleared.")
        return status

    def _missing_rows(self, name: str) -> list[int]:
        indexes, status = _client().get_production_status([name], self._partition)
        if indexes is None or status is None:
            return list(range(self._capacity()))
        unready = indexes[status[:, 0] == 0].tolist()
        return sorted(self._rows_of(unready)) if unready else []

    def _describe_missing(self, request: Request) -> str:
        rows = range(self._capacity()) if request.indexes is None else request.indexes
        missing = {name: [row for row in self._missing_rows(name) if row in set(rows)] for name in request.columns}
        num_consumed = int(self._consumed(request.consumer).sum())
        return describe_missing(request, self._producer_of, missing, len(rows), num_consumed)


def _client() -> transfer_queue.TransferQueueClient:
    """This process's connection to TransferQueue, made on first use.

    Raises:
        RuntimeError: TransferQueue does not run in this Ray cluster (any more).
    """
    try:
        return transfer_queue.get_client()
    except AssertionError:  # how it says "not connected"
        pass
    if not _is_running():
        raise RuntimeError("The data plane is closed: no TransferQueue runs in this Ray cluster.")
    transfer_queue.init()  # connects to the running one
    return transfer_queue.get_client()


def _is_running() -> bool:
    try:
        ray.get_actor(CONTROLLER[0], namespace=CONTROLLER[1])
    except ValueError:
        return False
    return True


def _start_engine(n_samples_per_prompt: int, num_storage_units: int, init_timeout_s: float) -> None:
    if _is_running():
        raise ValueError(
            "TransferQueue runs in this Ray cluster already; close that data plane first, or use data_strategy td."
        )
    needed, present = 1 + num_storage_units, int(ray.cluster_resources().get("CPU", 0))
    if present < needed:
        raise ValueError(
            f"TransferQueue needs {needed} logical CPUs in Ray (controller and {num_storage_units} storage units); the cluster "
            f"has {present}. Start Ray with more, e.g. num_cpus={max(needed, 16)}, or use data_strategy td."
        )
    conf = OmegaConf.create(
        {
            "controller": {"polling_mode": True, "sampler": RowRules(n_samples_per_prompt)},
            "backend": {"SimpleStorage": {"num_data_storage_units": num_storage_units}},
        },
        flags={"allow_objects": True},  # OmegaConf refuses the sampler otherwise
    )
    failures: list[BaseException] = []

    def start() -> None:
        try:
            transfer_queue.init(conf)
        except Exception as error:  # handed to the caller below, who would not see it in this thread
            failures.append(error)

    # `init` has no deadline of its own, and must not keep the process alive
    starting = threading.Thread(target=start, daemon=True)
    starting.start()
    starting.join(init_timeout_s)
    if starting.is_alive():
        free = ray.available_resources().get("CPU", 0)
        # the controller, which comes first, would turn a later attempt away by its fixed name
        transfer_queue.close()
        raise TimeoutError(
            f"TransferQueue did not start within {init_timeout_s:g} s: it needs {needed} free logical CPUs; of {present} in "
            f"the cluster {free:g} are free. Start Ray with more, or use data_strategy td."
        )
    if failures:
        raise failures[0]


def _to_field(column: Column) -> torch.Tensor | NonTensorStack:
    if not isinstance(column, Ragged):
        # TransferQueue's own encoding would turn dataclasses into dicts and tuples into lists
        return NonTensorStack(*(pickle.dumps(entry) for entry in column))
    if column.offsets is None:
        return column.tensor()
    return torch.nested.nested_tensor_from_jagged(column.tensor(), torch.from_numpy(column.offsets))


def _from_field(field: Any) -> Column:
    if not isinstance(field, torch.Tensor):
        return [pickle.loads(entry) for entry in field]
    return pack(list(field.unbind())) if field.is_nested else pack(field)
