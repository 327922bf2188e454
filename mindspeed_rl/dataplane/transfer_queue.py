"""The data plane on the `transferqueue` package: one controller, storage units on every node, ZMQ between them and the clients.

TransferQueue keeps the ready and consumed bits and the values; `_RowRules`, a sampler that runs inside its controller,
selects the rows of a request by the rules of our TransferDock. Properties of version 0.1.11 that shape this file:

- `init` waits forever when Ray has fewer logical CPUs than 1 + num_data_storage_units.
- A put with another dtype than the column is stored, but its ready bits are never set, without an error.
- With `polling_mode` an unserved request comes back empty at once; without it the controller serves no other one meanwhile.
- Its sockets are bound to the node's own address, without authentication: for trusted networks.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast
from uuid import uuid4

import ray
import torch
import transfer_queue
from omegaconf import OmegaConf
from tensordict import NonTensorStack, TensorDict
from transfer_queue.sampler import BaseSampler

from mindspeed_rl.dataplane.columns import Batch, Column, Ragged, describe_kind, pack
from mindspeed_rl.dataplane.transfer_dock import (
    DataPlaneAbortedError,
    Request,
    Users,
    check_indexes,
    check_name,
    check_put,
    check_sizes,
    find_producers,
)

_CONTROLLER = ("TransferQueueController", "transfer_queue")  # name and Ray namespace of its controller actor
_MIN_PAUSE_S, _MAX_PAUSE_S = 0.002, 0.05


class _Partition(Protocol):
    """TransferQueue's DataPartitionStatus, as far as it is used."""

    partition_id: str
    keys_mapping: dict[str, int]
    revert_keys_mapping: dict[int, str]
    field_name_mapping: dict[str, int]
    production_status: torch.Tensor


@dataclass
class _PartitionState:
    """Facts of a partition.

    Attributes:
        rises: a higher row has a higher global index.
        kinds: kind of the rows of each column that was put.
    """

    rises: bool
    kinds: dict[str, str] = field(default_factory=dict)


class _RowRules(BaseSampler):
    """Serve rows, and refuse puts, by the rules of the TransferDock; runs in TransferQueue's controller.

    A partition's keys are its row indexes. Only the controller's request thread calls this, so nothing here needs a lock.
    """

    def __init__(self, n_samples_per_prompt: int) -> None:
        super().__init__()
        self.n_samples_per_prompt = n_samples_per_prompt

    def sample(self, ready_indexes: list[int], batch_size: int, *args: object, **arguments: Any) -> tuple[list[int], list[int]]:
        """Return the rows served and consumed, as TransferQueue's global indexes; none when the request cannot be served.

        Args:
            ready_indexes: global indexes with all fields ready and not consumed by this consumer.
            batch_size: unused: always 0, which leaves the selection to this class.
            *args: unused.
            **arguments: `partition`, TransferQueue's DataPartitionStatus; `operation`, "get" or "check_put"; and its arguments:
                the fields of a `Request`, or kinds, rows and overwrite.
        """
        partition: _Partition = arguments.pop("partition")
        if arguments.pop("operation") == "check_put":
            self._check_put(partition, **arguments)
            return [], []
        request, capacity = Request(**arguments), len(partition.keys_mapping)
        rows: list[int] | None = None
        if request.indexes is not None:
            requested = check_indexes(request.indexes, capacity).tolist()
            if all(not _find_missing(partition, name, requested) for name in request.columns):
                rows = requested
        else:
            # the rows of a few indexes, not of all, are read where the numbers of both rise together
            available: Iterable[int] = (int(partition.revert_keys_mapping[index]) for index in sorted(ready_indexes))
            available = available if self._state_of(partition).rises else sorted(available)
            rows = request.select_rows(available, capacity, self.n_samples_per_prompt)
        indexes = [partition.keys_mapping[str(row)] for row in rows or ()]
        return indexes, indexes

    def _check_put(self, partition: _Partition, kinds: dict[str, str], rows: list[int], overwrite: bool) -> None:
        check_indexes(rows, len(partition.keys_mapping))
        column_kinds = self._state_of(partition).kinds
        for name, kind in kinds.items():
            missing = set(rows if overwrite else _find_missing(partition, name, rows))
            check_put(name, kind, column_kinds.get(name, kind), [row for row in rows if row not in missing])
        column_kinds.update(kinds)

    def _state_of(self, partition: _Partition) -> _PartitionState:
        # TransferQueue drops this entry together with the partition
        if partition.partition_id not in self._states:
            indexes = [partition.keys_mapping[str(row)] for row in range(len(partition.keys_mapping))]
            self._states[partition.partition_id] = _PartitionState(rises=indexes == sorted(indexes))
        return self._states[partition.partition_id]


def _find_missing(partition: _Partition, name: str, rows: Sequence[int]) -> list[int]:
    """Return the rows whose cell in a column is not ready."""
    if name not in partition.field_name_mapping:
        return list(rows)
    ready = partition.production_status[:, partition.field_name_mapping[name]]
    return [row for row in rows if not ready[partition.keys_mapping[str(row)]]]


class TransferQueueClient:
    """A `DataPlane` on TransferQueue. One a Ray cluster: TransferQueue's actors have fixed names."""

    def __init__(self, partition: str, n_samples_per_prompt: int, users: Users) -> None:
        self._partition, self._abort_partition = partition, f"{partition}/abort"
        self._n_samples_per_prompt = n_samples_per_prompt
        self._producers, self._consumers = find_producers(users), tuple(users)

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
        """Start TransferQueue's controller and storage units in the Ray cluster, and an empty partition in them.

        Args:
            num_prompts: prompts of an iteration.
            n_samples_per_prompt: rows a prompt.
            users: names of consumers and producers, with the columns that each puts.
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

    def put(self, data: Mapping[str, Sequence[object]], indexes: Sequence[int], *, overwrite: bool = False) -> None:
        """Put cells; see `TransferDock.put`."""
        packed = {name: pack(entries) for name, entries in data.items()}
        for name, column in packed.items():
            check_name("column", name, self._producers)
            if len(column) != len(indexes):
                raise ValueError(f"Column '{name}' has {len(column)} entries for {len(indexes)} indexes.")
        rows = check_indexes(indexes, len(self._consumed(self._consumers[0]))).tolist()
        kinds = {name: describe_kind(column) for name, column in packed.items()}
        # any consumer's name will do: the result has no rows, so none are marked as consumed
        self._call_rules([], self._consumers[0], "check_put", kinds=kinds, rows=rows, overwrite=overwrite)
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
        """Return the next rows, see `DataPlane.get`; request them again in pauses that grow to _MAX_PAUSE_S."""
        check_name("consumer", consumer, self._consumers)
        for name in columns:
            check_name("column", name, self._producers)
        request = Request(consumer, tuple(columns), count, None if indexes is None else tuple(int(row) for row in indexes))
        deadline_s = time.monotonic() + (timeout_s or 0.0)
        pause_s = _MIN_PAUSE_S
        while not (meta := self._reserve(request)).size:
            if timeout_s is None:
                return None, None
            if time.monotonic() >= deadline_s:
                raise TimeoutError(f"'{consumer}' waited {timeout_s:g} s in vain. {self._describe_missing(request)}")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)
        data = _client().get_data(meta)
        return {name: _from_field(data[name]) for name in columns}, self._read_rows(meta.global_indexes)

    def clear(self, num_prompts: int) -> None:
        """Drop all rows; see `DataPlane.clear`."""
        _client().clear_partition(self._partition)
        if self._abort_partition in _client().get_partition_list():
            _client().clear_partition(self._abort_partition)
        self._make_rows(num_prompts)

    def abort(self, reason: str) -> None:
        """End all requests; see `DataPlane.abort`."""
        # The reason is the only key of a partition of its own, so that it is there complete or not at all.
        _client().kv_retrieve_meta([reason], self._abort_partition, create=True)

    def close(self) -> None:
        """End TransferQueue's actors."""
        transfer_queue.close()

    def _make_rows(self, num_prompts: int) -> None:
        keys = [str(row) for row in range(num_prompts * self._n_samples_per_prompt)]
        _client().kv_retrieve_meta(keys, self._partition, create=True)

    def _reserve(self, request: Request) -> Any:
        """Return TransferQueue's metadata of the rows for a request, marked as consumed; empty when too few are ready."""
        if self._abort_partition in _client().get_partition_list():
            for reason in _client().kv_list(self._abort_partition)[self._abort_partition]:
                raise DataPlaneAbortedError(reason)
        # TransferQueue's messages take plain lists
        plain = {name: list(value) if isinstance(value, tuple) else value for name, value in vars(request).items()}
        return self._call_rules(list(request.columns), request.consumer, "get", **plain)

    def _call_rules(self, fields: list[str], task: str, operation: str, **arguments: object) -> Any:
        """Return the result of `_RowRules` in the controller."""
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
            # the controller reports the error of a sampler as text
            _, separator, message = str(error).partition("failed: ValueError: ")
            if not separator:
                raise
            raise ValueError(message) from None

    def _read_rows(self, global_indexes: Sequence[int]) -> list[int]:
        # TransferQueue declares metadata as the result, but returns the keys that its docstring names
        keys = cast("list[str]", _client().kv_retrieve_keys(list(global_indexes), self._partition))
        return [int(key) for key in keys]

    def _consumed(self, consumer: str) -> torch.Tensor:
        """Return [rows] 1 where consumed, in the order of TransferQueue's global indexes."""
        _, status = _client().get_consumption_status(consumer, self._partition)
        if status is None:
            raise RuntimeError("TransferQueue holds no rows of this data plane: it was closed, or is being cleared.")
        return status

    def _describe_missing(self, request: Request) -> str:
        """Return the rows that are not ready by column, with their producers."""
        consumed = self._consumed(request.consumer)
        requested = range(len(consumed)) if request.indexes is None else request.indexes
        missing: dict[str, list[int]] = {}
        for name in request.columns:
            indexes, status = _client().get_production_status([name], self._partition)
            unready = list(requested)
            if indexes is not None and status is not None:
                positions = indexes[status[:, 0] == 0].tolist()
                unready = sorted(set(self._read_rows(positions) if positions else []).intersection(requested))
            missing[name] = unready
        return request.describe_missing(self._producers, missing, len(requested), int(consumed.sum()))


def _client() -> transfer_queue.TransferQueueClient:
    """Return this process's connection to TransferQueue, made on first use.

    Raises:
        RuntimeError: TransferQueue does not run in this Ray cluster (any more).
    """
    try:
        return transfer_queue.get_client()
    except AssertionError:  # not connected
        pass
    if not _is_running():
        raise RuntimeError("The data plane is closed: no TransferQueue runs in this Ray cluster.")
    transfer_queue.init()  # connects to the running one
    return transfer_queue.get_client()


def _is_running() -> bool:
    try:
        ray.get_actor(_CONTROLLER[0], namespace=_CONTROLLER[1])
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
            "controller": {"polling_mode": True, "sampler": _RowRules(n_samples_per_prompt)},
            "backend": {"SimpleStorage": {"num_data_storage_units": num_storage_units}},
        },
        flags={"allow_objects": True},  # OmegaConf refuses the sampler otherwise
    )
    failures: list[BaseException] = []

    def start() -> None:
        try:
            transfer_queue.init(conf)
        except BaseException as error:  # noqa: BLE001 - raised below, in the caller's thread
            failures.append(error)

    # `init` has no deadline of its own, and must not keep the process alive
    starting = threading.Thread(target=start, daemon=True)
    starting.start()
    starting.join(init_timeout_s)
    if starting.is_alive():
        free = ray.available_resources().get("CPU", 0)
        # the controller, which starts first, would block a later attempt by its fixed name
        transfer_queue.close()
        raise TimeoutError(
            f"TransferQueue did not start within {init_timeout_s:g} s: it needs {needed} free logical CPUs; of {present} in "
            f"the cluster {free:g} are free. Start Ray with more, or use data_strategy td."
        )
    if failures:
        raise failures[0]


def _to_field(column: Column) -> torch.Tensor | NonTensorStack:
    if not isinstance(column, Ragged):
        # TransferQueue's own encoding would convert dataclasses to dicts and tuples to lists
        return NonTensorStack(*(pickle.dumps(entry) for entry in column))
    if column.offsets is None:
        return column.tensor()
    return torch.nested.nested_tensor_from_jagged(column.tensor(), torch.from_numpy(column.offsets))


def _from_field(field: Any) -> Column:
    if not isinstance(field, torch.Tensor):
        return [pickle.loads(entry) for entry in field]
    return pack(list(field.unbind())) if field.is_nested else pack(field)
