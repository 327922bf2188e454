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
from dataclasses import asdict
from typing import Any
from uuid import uuid4

import numpy as np
import ray
import torch
import transfer_queue
from omegaconf import OmegaConf
from tensordict import NonTensorStack, TensorDict
from transfer_queue.sampler import BaseSampler

from mindspeed_rl.dataplane.records import (
    RL_CONSUMERS,
    Batch,
    Column,
    ColumnSpec,
    DataPlaneAborted,
    Ragged,
    Request,
    kind,
    pack,
    rl_columns,
    take,
)
from mindspeed_rl.dataplane.rows import (
    balanced_shares,
    check_count,
    check_kind,
    check_name,
    check_unwritten,
    describe_missing,
    row_numbers,
    select_rows,
)
from mindspeed_rl.observability.metrics import Metric, Metrics

CONTROLLER = ("TransferQueueController", "transfer_queue")  # name and Ray namespace of its controller actor
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.002, 0.05


class RowRules(BaseSampler):
    """Runs in TransferQueue's controller: serves rows, and refuses puts, by the rules of the TransferDock.

    A partition's keys are its row numbers. Only the controller's request thread calls this, so nothing here needs a lock.
    """

    def __init__(self, n_samples_per_prompt: int) -> None:
        super().__init__()
        self.n_samples_per_prompt = n_samples_per_prompt

    def sample(
        self, ready_indexes: list[int], batch_size: int, *args: Any, partition: Any, operation: str, **arguments: Any
    ) -> tuple[list[int], list[int]]:
        """Rows served and consumed, as TransferQueue's global indexes; nothing when the request cannot be served.

        Args:
            ready_indexes: global indexes with all fields ready and not consumed by this consumer.
            batch_size: unused: always 0, so that TransferQueue leaves the decision to us.
            *args: unused.
            partition: TransferQueue's DataPartitionStatus.
            operation: "get" (arguments: the fields of a `Request`), "check_put" (kinds, rows, overwrite) or "forget_shares"
                (consumer), for a consumer that starts over.
            **arguments: of the operation.
        """
        if operation == "check_put":
            self._check_put(partition, **arguments)
            return [], []
        if operation == "forget_shares":
            shares = self._shares(partition)
            for key in [key for key in shares if key[0] == arguments["consumer"]]:
                del shares[key]
            return [], []
        rows = self._select(partition, ready_indexes, Request(**arguments))
        indexes = [partition.keys_mapping[str(row)] for row in rows or ()]
        return indexes, indexes

    def _select(self, partition: Any, ready_indexes: list[int], request: Request) -> list[int] | None:
        capacity = len(partition.keys_mapping)
        if request.indexes is not None:
            rows = row_numbers(request.indexes, capacity).tolist()
            return rows if all(not _missing(partition, name, rows) for name in request.columns) else None
        check_count(request, capacity, self.n_samples_per_prompt)
        available = [int(partition.revert_keys_mapping[index]) for index in ready_indexes]
        group_size = self.n_samples_per_prompt if request.get_n_samples else 1
        if not request.use_batch_seqlen_balance:
            return select_rows(available, request.count, group_size=group_size, seed=request.seed)
        shares = self._shares(partition)
        key = (request.consumer, request.count, request.dp_size)
        if not shares.get(key):
            rows = select_rows(available, request.count * request.dp_size, group_size=group_size, seed=request.seed)
            if rows is None:
                return None
            lengths = {row: max(_length(partition, name, row) for name in request.columns) for row in rows}
            shares[key] = balanced_shares(lengths, request.dp_size, group_size=group_size)
        return shares[key].pop(0)

    def _check_put(self, partition: Any, kinds: dict[str, str], rows: list[int], overwrite: bool) -> None:
        row_numbers(rows, len(partition.keys_mapping))
        held = self._states.setdefault(partition.partition_id, {}).setdefault("kinds", {})
        for name, put in kinds.items():
            check_kind(name, put, held.get(name, put))
            if not overwrite:
                missing = set(_missing(partition, name, rows))
                check_unwritten(name, [row for row in rows if row not in missing])
        held.update(kinds)

    def _shares(self, partition: Any) -> dict[tuple[str, int, int], list[list[int]]]:
        """The shares dealt and not yet fetched, by consumer, count and dp_size."""
        return self._states.setdefault(partition.partition_id, {}).setdefault("shares", {})


def _missing(partition: Any, name: str, rows: Sequence[int]) -> list[int]:
    """The rows whose cell in a column is not ready."""
    if name not in partition.field_name_mapping:
        return list(rows)
    ready = partition.production_status[:, partition.field_name_mapping[name]]
    return [row for row in rows if not ready[partition.keys_mapping[str(row)]]]


def _length(partition: Any, name: str, row: int) -> int:
    """Values in a cell, from TransferQueue's record of shapes; 1 for scalars and objects."""
    field = partition.field_metadata[name]
    shape = field.per_sample_shapes.get(partition.keys_mapping[str(row)], field.shape)
    return int(np.prod(shape)) if shape else 1


class TransferQueueClient:
    """A `DataPlane` on TransferQueue. One a Ray cluster: TransferQueue's actors have fixed names."""

    def __init__(
        self, partition: str, n_samples_per_prompt: int, columns: Mapping[str, ColumnSpec], consumers: Sequence[str]
    ) -> None:
        self._partition = partition
        self._n_samples_per_prompt = n_samples_per_prompt
        self._columns = dict(columns)
        self._consumers = tuple(consumers)

    @classmethod
    def create(
        cls,
        num_prompts: int,
        n_samples_per_prompt: int,
        *,
        columns: Mapping[str, ColumnSpec] | None = None,
        consumers: Sequence[str] | None = None,
        num_storage_units: int = 2,
        init_timeout_s: float = 120.0,
    ) -> TransferQueueClient:
        """Starts TransferQueue's controller and storage units in the Ray cluster, and an empty partition in them.

        Args:
            num_prompts: prompts of an iteration.
            n_samples_per_prompt: rows a prompt.
            columns: every column; those of the RL loops when None.
            consumers: every consumer; those of the RL loops when None.
            num_storage_units: storage actors, one logical CPU each; spread over the nodes.
            init_timeout_s: deadline in seconds for the actors to start.

        Raises:
            ValueError: sizes below 1, too few logical CPUs in the cluster, or TransferQueue runs there already.
            TimeoutError: the actors did not start in time.
        """
        if num_prompts < 1 or n_samples_per_prompt < 1:
            raise ValueError(
                f"A data plane needs at least one prompt and one sample a prompt; got num_prompts={num_prompts}, "
                f"n_samples_per_prompt={n_samples_per_prompt}."
            )
        _start_engine(n_samples_per_prompt, num_storage_units, init_timeout_s)
        columns = columns if columns is not None else rl_columns()
        consumers = consumers if consumers is not None else RL_CONSUMERS
        client = cls(f"rows-{uuid4().hex[:8]}", n_samples_per_prompt, columns, consumers)
        client._make_rows(num_prompts * n_samples_per_prompt)
        return client

    def put(
        self,
        data: Mapping[str, Sequence[Any] | Ragged],
        indexes: Sequence[int],
        *,
        is_prompt: bool = False,
        overwrite: bool = False,
    ) -> None:
        """See `TransferDock.put_experience`."""
        packed = {name: pack(entries) for name, entries in data.items()}
        for name, column in packed.items():
            check_name("column", name, self._columns)
            if len(column) != len(indexes):
                raise ValueError(f"Column '{name}' has {len(column)} entries for {len(indexes)} indexes.")
        n = self._n_samples_per_prompt
        rows = row_numbers(indexes, self._capacity(), n if is_prompt else None).tolist()
        if is_prompt:
            places = np.repeat(np.arange(len(indexes)), n)
            packed = {name: take(column, places) for name, column in packed.items()}
        kinds = {name: kind(column) for name, column in packed.items()}
        self._ask([], "check_put", kinds=kinds, rows=rows, overwrite=overwrite)
        meta = _client().kv_retrieve_meta([str(row) for row in rows], self._partition)
        fields = {name: _to_field(column) for name, column in packed.items()}
        _client().put(TensorDict(fields, batch_size=len(rows)), meta)

    def get(
        self,
        consumer: str,
        columns: Sequence[str],
        count: int | None = None,
        *,
        timeout_s: float | None = None,
        **options: Any,
    ) -> tuple[Batch, list[int]] | tuple[None, None]:
        """See `DataPlane.get`. Waits by asking again, in pauses that grow to LONGEST_PAUSE_S."""
        request = Request(consumer, tuple(columns), count, **options)
        deadline = time.monotonic() + (timeout_s or 0.0)
        pause_s = SHORTEST_PAUSE_S
        while (meta := self._reserve(request)) is None:
            if timeout_s is None:
                return None, None
            if time.monotonic() >= deadline:
                raise TimeoutError(f"'{consumer}' waited {timeout_s:g} s in vain. {self._describe_missing(request)}")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        rows = self._rows_of(meta)
        batch = self._fetch(meta, request.columns)
        for name in request.optional_columns:
            batch[name] = self._fetch_ready(name, rows)
        return batch, rows

    def reserve(self, consumer: str, columns: Sequence[str], count: int, **options: Any) -> list[int] | None:
        """See `DataPlane.reserve`."""
        meta = self._reserve(Request(consumer, tuple(columns), count, **options))
        return None if meta is None else self._rows_of(meta)

    def all_consumed(self, consumer: str) -> bool:
        """See `DataPlane.all_consumed`."""
        check_name("consumer", consumer, self._consumers)
        return bool(self._consumed(consumer).all())

    def reset_consumed(self, consumer: str) -> None:
        """See `DataPlane.reset_consumed`."""
        check_name("consumer", consumer, self._consumers)
        self._ask([], "forget_shares", consumer=consumer)
        _client().reset_consumption(self._partition, consumer)

    def clear(self, num_prompts: int | None = None) -> None:
        """See `DataPlane.clear`."""
        capacity = self._capacity() if num_prompts is None else num_prompts * self._n_samples_per_prompt
        _client().clear_partition(self._partition)
        self._clear_notes("abort")
        self._make_rows(capacity)

    def status(self) -> dict[str, Any]:
        """See `DataPlane.status`; requests that wait are not known here."""
        ready = {name: self._capacity() - len(self._missing_rows(name)) for name in self._columns}
        consumed = {name: int(self._consumed(name).sum()) for name in self._consumers}
        return {
            "capacity": self._capacity(),
            "ready": {name: count for name, count in ready.items() if count},
            "consumed": {name: count for name, count in consumed.items() if count},
        }

    def abort(self, reason: str) -> None:
        """See `DataPlane.abort`."""
        self._note("abort", {"reason": reason})

    def update_metrics(self, metrics: Metrics) -> None:
        """See `DataPlane.update_metrics`."""
        self._note("metrics", {name: asdict(metric) for name, metric in metrics.items()})

    def get_metrics(self) -> Metrics:
        """See `DataPlane.get_metrics`."""
        total = Metrics()
        for note in self._notes("metrics"):
            total.merge({name: Metric(**metric) for name, metric in note.items()})
        self._clear_notes("metrics")
        return total

    def close(self) -> None:
        """TransferQueue's actors are gone."""
        transfer_queue.close()

    # Inside

    def _make_rows(self, capacity: int) -> None:
        _client().kv_retrieve_meta([str(row) for row in range(capacity)], self._partition, create=True)

    def _reserve(self, request: Request) -> Any | None:
        """TransferQueue's metadata of the rows that serve the request, marked as consumed; None when not enough are ready."""
        check_name("consumer", request.consumer, self._consumers)
        for name in (*request.columns, *request.optional_columns):
            check_name("column", name, self._columns)
        for note in self._notes("abort"):
            raise DataPlaneAborted(note["reason"])
        plain = asdict(request) | {
            "indexes": None if request.indexes is None else [int(index) for index in request.indexes],
            "optional_columns": list(request.optional_columns),
            "columns": list(request.columns),
        }
        meta = self._ask(list(request.columns), "get", **plain)
        return meta if meta.size else None

    def _ask(self, fields: list[str], operation: str, **arguments: Any) -> Any:
        """The answer of `RowRules` in the controller."""
        try:
            return _client().get_meta(
                data_fields=fields,
                batch_size=0,
                partition_id=self._partition,
                mode="fetch",
                task_name=arguments.get("consumer", "trainer"),
                sampling_config={"operation": operation, **arguments},
            )
        except RuntimeError as error:
            # The controller reports what a sampler raised as text.
            _, found, sentence = str(error).partition("failed: ValueError: ")
            if not found:
                raise
            raise ValueError(sentence) from None

    def _rows_of(self, meta: Any) -> list[int]:
        return [int(key) for key in _client().kv_retrieve_keys(list(meta.global_indexes), self._partition)]

    def _fetch(self, meta: Any, columns: Sequence[str]) -> Batch:
        data = _client().get_data(meta)
        return {name: _from_field(data[name]) for name in columns}

    def _fetch_ready(self, name: str, rows: list[int]) -> Column:
        missing = set(self._missing_rows(name))
        ready = [row for row in rows if row not in missing]
        if not ready:
            return [None] * len(rows)
        meta = _client().kv_retrieve_meta([str(row) for row in ready], self._partition).select_fields([name])
        column = self._fetch(meta, [name])[name]
        if len(ready) == len(rows):
            return column
        entries = iter(column)
        return [None if row in missing else next(entries) for row in rows]

    def _capacity(self) -> int:
        return len(self._consumed("trainer"))

    def _consumed(self, consumer: str) -> torch.Tensor:
        """[rows] 1 where consumed, in the order of TransferQueue's global indexes."""
        _, status = _client().get_consumption_status(consumer, self._partition)
        if status is None:
            raise RuntimeError("TransferQueue holds no rows of this data plane: it was closed, or is being cleared.")
        return status

    def _missing_rows(self, name: str) -> list[int]:
        indexes, status = _client().get_production_status([name], self._partition)
        if indexes is None:
            return list(range(self._capacity()))
        unready = indexes[status[:, 0] == 0].tolist()
        return sorted(int(row) for row in _client().kv_retrieve_keys(unready, self._partition)) if unready else []

    def _describe_missing(self, request: Request) -> str:
        rows = list(range(self._capacity())) if request.indexes is None else [int(row) for row in request.indexes]
        missing = {name: [row for row in self._missing_rows(name) if row in set(rows)] for name in request.columns}
        return describe_missing(request, self._columns, missing, len(rows), int(self._consumed(request.consumer).sum()))

    # Small records beside the rows live as tags in partitions of their own.

    def _note(self, topic: str, tag: dict[str, Any]) -> None:
        meta = _client().kv_retrieve_meta([uuid4().hex], f"{self._partition}/{topic}", create=True)
        meta.update_custom_meta([tag])
        _client().set_custom_meta(meta)

    def _notes(self, topic: str) -> list[dict[str, Any]]:
        partition = f"{self._partition}/{topic}"
        if partition not in _client().get_partition_list():
            return []
        return list(_client().kv_list(partition)[partition].values())

    def _clear_notes(self, topic: str) -> None:
        partition = f"{self._partition}/{topic}"
        if partition in _client().get_partition_list():
            _client().clear_partition(partition)


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
        flags={"allow_objects": True},
    )
    failures: list[BaseException] = []

    def start() -> None:
        try:
            transfer_queue.init(conf)
        except Exception as error:  # handed to the caller below, who would not see it in this thread
            failures.append(error)

    starting = threading.Thread(target=start, daemon=True)
    starting.start()
    starting.join(init_timeout_s)
    if starting.is_alive():
        free = ray.available_resources().get("CPU", 0)
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
