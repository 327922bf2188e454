"""Binary messages of the API: the request of a pass, and the results of passes and samples.

The tables have the numbers of `tinker/proto/tinker_public.proto` (`tinker` 0.38). They are written here because a server runs
in the environment of a device, whose Python may be older than the SDK's, and whose versions of the SDK's packages are pinned.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mindspeed_rl.service import protobuf
from mindspeed_rl.service.backend import Array, CallError, Datum, PassResult, SampleResult, TopTokens
from mindspeed_rl.service.protobuf import BOOLEAN, BYTES, DOUBLE, INTEGER, PACKED, TEXT, Field, Message, Table, map_of

#: cells of one tensor, and of all tensors of a request: a sparse one may name any shape in a few bytes
_MAX_CELLS, _MAX_CELLS_OF_REQUEST = 1 << 24, 1 << 26
#: number of a type of values -> the type; bfloat16 is not sent
_DTYPES = {1: np.dtype("<f4"), 2: np.dtype("<i8"), 3: np.dtype("<i4")}
_FLOAT32, _STOP, _LENGTH = 1, 0, 1
#: cell of a position that has fewer tokens than were asked for, as the SDK reads it
_NO_TOKEN, _NO_LOG_PROB = 0, -99999.0

_CSR = Table("SparseCsr", {1: Field("values", BYTES), 2: Field("crow_indices", BYTES), 3: Field("col_indices", BYTES)})
_TENSOR = Table(
    "Tensor",
    {
        1: Field("dense", BYTES, is_optional=True),
        2: Field("sparse_csr", _CSR),
        3: Field("dtype", INTEGER),
        4: Field("shape", PACKED),
    },
)
_CHUNK = Table(
    "Chunk",
    {
        1: Field("encoded_text", Table("EncodedTextChunk", {1: Field("tokens", BYTES)})),
        2: Field("image", BYTES),
        3: Field("dmel", BYTES),
    },
)
_DATUM = Table(
    "Datum",
    {
        1: Field("model_input", _CHUNK, repeats=True),
        2: Field("loss_fn_inputs", map_of(_TENSOR), repeats=True),
        # where tokens came from; only a loss that is not offered reads it
        3: Field("model_input_spans", BYTES, repeats=True),
        4: Field("loss_fn_input_spans", BYTES, repeats=True),
    },
)
_CONFIG_VALUE = Table("LossConfigValue", {1: Field("number", DOUBLE), 2: Field("text", TEXT)})
_PASS_REQUEST = Table(
    "ForwardBackwardRequest",
    {
        1: Field("model_id", TEXT),
        2: Field("seq_id", INTEGER),
        3: Field("data", _DATUM, repeats=True),
        4: Field("loss_fn", TEXT),
        5: Field("loss_fn_config", map_of(DOUBLE), repeats=True),
        6: Field("forward_only", BOOLEAN),
        7: Field("loss_fn_config_v2", map_of(_CONFIG_VALUE), repeats=True),
    },
)
_BATCHED_TENSOR = Table(
    "BatchedTensor",
    {1: Field("data", BYTES), 2: Field("offsets", BYTES), 3: Field("dtype", INTEGER), 4: Field("trailing_shape", PACKED)},
)
_ARRAY_RECORD = Table(
    "ArrayRecord",
    {
        1: Field("type_tag", TEXT),
        2: Field("fields", map_of(_BATCHED_TENSOR), repeats=True),
        3: Field("num_datums", INTEGER),
    },
)
_PASS_RESULT = Table(
    "ForwardBackwardOutput",
    {
        1: Field("loss_fn_output_type", TEXT),
        2: Field("loss_fn_outputs", _ARRAY_RECORD, repeats=True),
        3: Field("metrics", map_of(DOUBLE), repeats=True),
    },
)
_TOP = Table(
    "TopkLogprobs",
    {1: Field("token_ids", BYTES), 2: Field("logprobs", BYTES), 3: Field("k", INTEGER), 4: Field("length", INTEGER)},
)
_SEQUENCE = Table(
    "SampledSequence",
    {
        1: Field("stop_reason", INTEGER),
        2: Field("tokens", BYTES),
        3: Field("logprobs", BYTES, is_optional=True),
        4: Field("topk_sampled_logprobs", _TOP),
    },
)
_SAMPLE_RESULT = Table(
    "SampleResponse",
    {
        1: Field("sequences", _SEQUENCE, repeats=True),
        2: Field("prompt_logprobs", BYTES, is_optional=True),
        3: Field("topk_prompt_logprobs", _TOP),
        4: Field("prompt_cache_hit_tokens", INTEGER),
        5: Field("target_prompt_logprobs", _TENSOR),
    },
)


@dataclass(frozen=True)
class PassRequest:
    """The request of a pass.

    Attributes:
        model_id: model.
        seq_id: place in the order of the model's requests.
        loss_fn: name of the loss.
        config: thresholds by name.
        forward_only: no gradient is added.
        data: messages of the data, which `read_data` reads.
    """

    model_id: str
    seq_id: int
    loss_fn: str
    config: Mapping[str, float]
    forward_only: bool
    data: Sequence[Message]

    @property
    def num_tokens(self) -> int:
        """Tokens of the data."""
        chunks = (chunk for datum in self.data for chunk in datum.get("model_input", ()))
        return sum(len(chunk["encoded_text"].get("tokens", b"")) // 4 for chunk in chunks if "encoded_text" in chunk)

    def make_digest(self) -> bytes:
        """Return a digest of the request, which does not depend on the order in which a client has written its maps."""
        digest = hashlib.sha256()
        _add_to_digest(digest, {**vars(self), "config": sorted(self.config.items())})
        return digest.digest()

    def read_data(self) -> list[Datum]:
        """Return the data.

        Raises:
            CallError: a datum has something that is not offered, or arrays that are none.
        """
        data, cells = [], 0
        for index, message in enumerate(self.data):
            where = f"data[{index}]"
            tokens = [_read_chunk(chunk, where) for chunk in message.get("model_input", ())]
            inputs = {}
            for name, tensor in protobuf.read_map(message.get("loss_fn_inputs", [])).items():
                inputs[name] = read_tensor(tensor, f"{where}.loss_fn_inputs.{name}")
                cells += inputs[name].size
                if cells > _MAX_CELLS_OF_REQUEST:
                    raise CallError(f"data: its arrays have more than {_MAX_CELLS_OF_REQUEST} cells; send fewer at once.")
            data.append(Datum(np.concatenate(tokens).tolist() if tokens else [], inputs))
        return data


def _add_to_digest(digest: hashlib._Hash, value: object) -> None:
    if isinstance(value, dict):
        for name in sorted(value):
            digest.update(f"{name}:".encode())
            _add_to_digest(digest, value[name])
    elif isinstance(value, list):
        digest.update(f"[{len(value)}]".encode())
        is_map = bool(value) and isinstance(value[0], dict) and "value" in value[0]
        for item in sorted(value, key=lambda entry: str(entry.get("key", ""))) if is_map else value:
            _add_to_digest(digest, item)
    elif isinstance(value, (bytes, memoryview)):
        digest.update(f"{len(value)}=".encode())
        digest.update(value)
    else:
        digest.update(f"{value!r};".encode())


def read_pass_request(body: bytes) -> PassRequest:
    """Read the request of a pass.

    Raises:
        ValueError: the body is no such message.
    """
    message = protobuf.decode(_PASS_REQUEST, memoryview(body))
    config = protobuf.read_map(message.get("loss_fn_config", []))
    for name, value in protobuf.read_map(message.get("loss_fn_config_v2", [])).items():
        config[name] = value["number"] if "number" in value else value.get("text", "")
    return PassRequest(
        model_id=message.get("model_id", ""),
        seq_id=message.get("seq_id", 0),
        loss_fn=message.get("loss_fn", ""),
        config=config,
        forward_only=message.get("forward_only", False),
        data=message.get("data", []),
    )


def _read_chunk(chunk: Message, where: str) -> npt.NDArray[np.int32]:
    if "encoded_text" not in chunk:
        kind = next(iter(chunk), "empty")
        raise CallError(f"{where}.model_input has a chunk '{kind}'; this server takes encoded_text, tokens of text.")
    data = chunk["encoded_text"].get("tokens", b"")
    if len(data) % 4:
        raise CallError(f"{where}.model_input has {len(data)} bytes of tokens, which are four bytes each.")
    return np.frombuffer(data, np.dtype("<i4"))


def read_tensor(tensor: Message, where: str) -> Array:
    """Return an array; cells that a sparse one does not list are 0.

    Raises:
        CallError: type, shape and bytes do not fit each other.
    """
    dtype = _DTYPES.get(tensor.get("dtype", 0))
    if dtype is None:
        raise CallError(f"{where} has values of type {tensor.get('dtype', 0)}; it can be 1 (float32), 2 (int64) or 3 (int32).")
    if "sparse_csr" in tensor:
        parts = tensor["sparse_csr"]
        values = _read_values(parts.get("values", b""), dtype, where)
        rows = _read_values(parts.get("crow_indices", b""), np.dtype("<i8"), where)
        columns = _read_values(parts.get("col_indices", b""), np.dtype("<i8"), where)
        return make_dense(values, tensor.get("shape"), rows, columns, where, fill=0)
    values = _read_values(tensor.get("dense", b""), dtype, where)
    shape = tensor.get("shape", [len(values)])
    if min(shape, default=0) < 0 or math.prod(shape) != len(values):
        raise CallError(f"{where} has the shape {shape} and {len(values)} values.")
    return values.reshape(shape)


def _read_values(data: bytes, dtype: np.dtype[Any], where: str) -> Array:
    if len(data) % dtype.itemsize:
        raise CallError(f"{where} has {len(data)} bytes, which are not values of {dtype.itemsize} bytes.")
    return np.frombuffer(data, dtype)


def make_dense(values: Array, shape: Sequence[int] | None, rows: Array, columns: Array, where: str, *, fill: float) -> Array:
    """Return the dense form of a sparse matrix (CSR).

    Args:
        values: values of the listed cells.
        shape: rows and columns.
        rows: first listed cell of each row, and their number.
        columns: column of each listed cell.
        fill: value of the other cells.

    Raises:
        CallError: they are no matrix, or one that is too large.
    """
    if shape is None or len(shape) != 2 or min(shape) < 0 or math.prod(shape) > _MAX_CELLS:
        raise CallError(f"{where} is sparse with the shape {shape}; it needs rows and columns, at most {_MAX_CELLS} cells.")
    counts = np.diff(rows)
    fits = len(rows) == shape[0] + 1 and rows[0] == 0 and rows[-1] == len(columns) == len(values) and (counts >= 0).all()
    if not fits or len(columns) and not 0 <= columns.min() <= columns.max() < shape[1]:
        raise CallError(f"{where} is sparse, but its row pointers, columns and values do not fit the shape {list(shape)}.")
    dense = np.full(shape, fill, values.dtype)
    dense[np.repeat(np.arange(shape[0]), counts), columns] = values
    return dense


def _float32(values: object) -> bytes:
    return np.asarray(values, "<f4").tobytes()


def write_pass_result(result: PassResult) -> bytes:
    """Write the results of a pass: a record for each stretch of data whose arrays have the same columns."""
    records: list[Message] = []
    first = 0
    while first < len(result.outputs):
        columns = _read_columns(result.outputs[first])
        last = first + 1
        while last < len(result.outputs) and _read_columns(result.outputs[last]) == columns:
            last += 1
        stretch = result.outputs[first:last]
        fields = [{"key": name, "value": _write_batch([output[name] for output in stretch])} for name in columns]
        records.append({"type_tag": "ArrayRecord", "fields": fields, "num_datums": last - first})
        first = last
    metrics = [{"key": name, "value": float(value)} for name, value in result.metrics.items()]
    message = {"loss_fn_output_type": "ArrayRecord", "loss_fn_outputs": records, "metrics": metrics}
    return protobuf.encode(_PASS_RESULT, message)


def _read_columns(output: Mapping[str, Array]) -> dict[str, tuple[int, ...]]:
    return {name: values.shape[1:] for name, values in output.items()}


def _write_batch(arrays: Sequence[Array]) -> Message:
    parts = [_float32(array) for array in arrays]
    offsets = np.cumsum([0, *map(len, parts)]).astype("<i8").tobytes()
    return {"data": b"".join(parts), "offsets": offsets, "dtype": _FLOAT32, "trailing_shape": list(arrays[0].shape[1:])}


@dataclass(frozen=True)
class Targets:
    """The layout in which log-probs of targets are returned: the request's layout.

    Attributes:
        shape: rows and columns.
        rows, columns: indexes of the listed cells of a sparse request; None for a dense one.
    """

    shape: tuple[int, int]
    rows: Array | None = None
    columns: Array | None = None

    def write(self, log_probs: Array) -> Message:
        """Write the log-probs [N - 1, K] of a request."""
        message: Message = {"dtype": _FLOAT32, "shape": list(self.shape)}
        if self.rows is None or self.columns is None:
            return message | {"dense": _float32(log_probs)}
        listed = log_probs[np.repeat(np.arange(self.shape[0]), np.diff(self.rows)), self.columns]
        indices = {"crow_indices": self.rows.astype("<i8").tobytes(), "col_indices": self.columns.astype("<i8").tobytes()}
        return message | {"sparse_csr": {"values": _float32(listed), **indices}}


def write_sample_result(
    result: SampleResult, *, top_prompt: int, top_sample: int, last_n: int | None, targets: Targets | None
) -> bytes:
    """Write the results of a sample.

    Args:
        top_prompt, top_sample: most probable tokens that were asked for at each token of the prompt, and of a sample.
        last_n: log-probs of the prompt are returned for as many tokens at its end; None for all.
        targets: layout of the log-probs of targets.
    """
    message: Message = {"sequences": []}
    for sample in result.samples:
        sequence: Message = {
            "stop_reason": _STOP if sample.stop_reason == "stop" else _LENGTH,
            "tokens": np.asarray(sample.tokens, "<i4").tobytes(),
            "logprobs": _float32(sample.log_probs),
        }
        if sample.top_log_probs is not None:
            sequence["topk_sampled_logprobs"] = _write_top(sample.top_log_probs, top_sample)
        message["sequences"].append(sequence)
    if result.prompt_log_probs is not None:
        skipped = 0 if last_n is None else len(result.prompt_log_probs) - last_n
        values = [math.nan if value is None else value for value in result.prompt_log_probs]
        message["prompt_logprobs"] = _float32([math.nan] * skipped + values[skipped:])
    if result.top_prompt_log_probs is not None:
        skipped = 0 if last_n is None else len(result.top_prompt_log_probs) - last_n
        message["topk_prompt_logprobs"] = _write_top([None] * skipped + list(result.top_prompt_log_probs[skipped:]), top_prompt)
    if targets is not None and result.target_log_probs is not None:
        message["target_prompt_logprobs"] = targets.write(result.target_log_probs)
    return protobuf.encode(_SAMPLE_RESULT, message)


def _write_top(positions: Sequence[TopTokens | None], count: int) -> Message:
    ids = np.full((len(positions), count), _NO_TOKEN, "<i4")
    log_probs = np.full((len(positions), count), _NO_LOG_PROB, "<f4")
    for index, tokens in enumerate(positions):
        for rank, (token, log_prob) in enumerate((tokens or ())[:count]):
            ids[index, rank], log_probs[index, rank] = token, log_prob
    return {"token_ids": ids.tobytes(), "logprobs": log_probs.tobytes(), "k": count, "length": len(positions)}
