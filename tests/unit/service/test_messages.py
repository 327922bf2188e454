"""Binary messages, against the `protobuf` library with descriptors of the published file."""

import struct

import numpy as np
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from mindspeed_rl.service import messages, protobuf
from mindspeed_rl.service.backend import CallError, PassResult, Sample, SampleResult

#: message -> fields: (number, name, type, message or "", repeats); types are FieldDescriptorProto's
_DOUBLE, _INT64, _INT32, _BOOL, _STRING, _MESSAGE, _BYTES, _UINT32 = 1, 3, 5, 8, 9, 11, 12, 13
_FILE = {
    "SparseCsr": [(1, "values", _BYTES), (2, "crow_indices", _BYTES), (3, "col_indices", _BYTES)],
    "Tensor": [(1, "dense", _BYTES), (2, "sparse_csr", "SparseCsr"), (3, "dtype", _INT32), (4, "shape", [_INT64])],
    "EncodedTextChunk": [(1, "tokens", _BYTES)],
    "ImageChunk": [(1, "data", _BYTES), (2, "format", _STRING)],
    "Chunk": [(1, "encoded_text", "EncodedTextChunk"), (2, "image", "ImageChunk")],
    "Datum": [(1, "model_input", ["Chunk"]), (2, "loss_fn_inputs", {"Tensor"})],
    "LossConfigValue": [(1, "number", _DOUBLE), (2, "text", _STRING)],
    "ForwardBackwardRequest": [
        (1, "model_id", _STRING),
        (2, "seq_id", _INT32),
        (3, "data", ["Datum"]),
        (4, "loss_fn", _STRING),
        (5, "loss_fn_config", {_DOUBLE}),
        (6, "forward_only", _BOOL),
        (7, "loss_fn_config_v2", {"LossConfigValue"}),
    ],
    "BatchedTensor": [(1, "data", _BYTES), (2, "offsets", _BYTES), (3, "dtype", _INT32), (4, "trailing_shape", [_INT64])],
    "ArrayRecord": [(1, "type_tag", _STRING), (2, "fields", {"BatchedTensor"}), (3, "num_datums", _INT64)],
    "ForwardBackwardOutput": [
        (1, "loss_fn_output_type", _STRING),
        (2, "loss_fn_outputs", ["ArrayRecord"]),
        (3, "metrics", {_DOUBLE}),
    ],
    "TopkLogprobs": [(1, "token_ids", _BYTES), (2, "logprobs", _BYTES), (3, "k", _UINT32), (4, "length", _UINT32)],
    "SampledSequence": [
        (1, "stop_reason", _INT32),
        (2, "tokens", _BYTES),
        (3, "logprobs", _BYTES),
        (4, "topk_sampled_logprobs", "TopkLogprobs"),
    ],
    "SampleResponse": [
        (1, "sequences", ["SampledSequence"]),
        (2, "prompt_logprobs", _BYTES),
        (3, "topk_prompt_logprobs", "TopkLogprobs"),
        (4, "prompt_cache_hit_tokens", _INT32),
        (5, "target_prompt_logprobs", "Tensor"),
    ],
}


def _build_library():
    file = descriptor_pb2.FileDescriptorProto(name="published.proto", package="t", syntax="proto3")

    def add(message, number, name, kind):
        repeats = isinstance(kind, list | set)
        if isinstance(kind, set):
            entry = message.nested_type.add(name=f"{name.title().replace('_', '')}Entry")
            entry.options.map_entry = True
            add(entry, 1, "key", _STRING)
            add(entry, 2, "value", next(iter(kind)))
            kind = f"{message.name}.{entry.name}"
        elif repeats:
            kind = kind[0]
        field = message.field.add(name=name, number=number, label=3 if repeats else 1)
        field.type = _MESSAGE if isinstance(kind, str) else kind
        if isinstance(kind, str):
            field.type_name = f".t.{kind}"

    for name, fields in _FILE.items():
        message = file.message_type.add(name=name)
        for number, field, kind in fields:
            add(message, number, field, kind)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"t.{name}")) for name in _FILE}


LIBRARY = _build_library()


def _request(**fields):
    request = LIBRARY["ForwardBackwardRequest"](model_id="m", seq_id=7, loss_fn="ppo", **fields)
    datum = request.data.add()
    datum.model_input.add().encoded_text.tokens = np.array([5, 6], np.int32).tobytes()
    datum.model_input.add().encoded_text.tokens = np.array([7], np.int32).tobytes()
    tensor = datum.loss_fn_inputs["target_tokens"]
    tensor.dense, tensor.dtype = np.array([1, -2, 1 << 40], np.int64).tobytes(), 2
    tensor.shape.append(3)
    return request


def test_a_request_that_the_library_writes_is_read():
    request = _request(forward_only=True)
    request.loss_fn_config["clip_low_threshold"] = 0.5
    request.loss_fn_config_v2["clip_low_threshold"].number = 0.5
    request.loss_fn_config_v2["mode"].text = "x"
    read = messages.read_pass_request(request.SerializeToString())
    assert (read.model_id, read.seq_id, read.loss_fn, read.forward_only) == ("m", 7, "ppo", True)
    assert read.config == {"clip_low_threshold": 0.5, "mode": "x"}
    assert read.num_tokens == 3
    (datum,) = read.read_data()
    assert list(datum.tokens) == [5, 6, 7]
    assert datum.inputs["target_tokens"].tolist() == [1, -2, 1 << 40]


def test_a_sparse_tensor_is_read_as_its_dense_form():
    tensor = LIBRARY["Tensor"](dtype=1, shape=[3, 3])
    tensor.sparse_csr.values = np.array([1.5, 2.0, -3.0], np.float32).tobytes()
    tensor.sparse_csr.crow_indices = np.array([0, 1, 1, 3], np.int64).tobytes()
    tensor.sparse_csr.col_indices = np.array([1, 0, 2], np.int64).tobytes()
    read = messages.read_tensor(protobuf.decode(messages._TENSOR, memoryview(tensor.SerializeToString())), "x")
    assert read.tolist() == [[0.0, 1.5, 0.0], [0.0, 0.0, 0.0], [2.0, 0.0, -3.0]]


def test_results_of_a_pass_are_read_by_the_library():
    outputs = ({"logprobs": np.array([-1, -2], np.float32)}, {"logprobs": np.array([-3], np.float32)})
    wide = ({"logprobs": np.array([[-1, -2], [-3, -4]], np.float32)},)
    written = messages.write_pass_result(PassResult(outputs + wide, {"loss:sum": 2.5, "zero:sum": 0.0}))
    read = LIBRARY["ForwardBackwardOutput"].FromString(written)
    assert dict(read.metrics) == {"loss:sum": 2.5, "zero:sum": 0.0}
    first, second = (record.fields["logprobs"] for record in read.loss_fn_outputs)
    assert [record.num_datums for record in read.loss_fn_outputs] == [2, 1]
    assert np.frombuffer(first.data, np.float32).tolist() == [-1, -2, -3]
    assert np.frombuffer(first.offsets, np.int64).tolist() == [0, 8, 12]
    assert (first.dtype, list(first.trailing_shape), list(second.trailing_shape)) == (1, [], [2])


def test_results_of_samples_are_read_by_the_library():
    sample = Sample((3, 4), (-0.5, -1.0), "length", (((3, -0.5), (9, -2.0)), ((4, -1.0),)))
    result = SampleResult(
        (sample, Sample((), (), "stop")),
        prompt_log_probs=(None, -1.0, -2.0),
        top_prompt_log_probs=(None, ((1, -1.0),), ((2, -2.0),)),
        target_log_probs=np.array([[-1.0, 0.0], [-3.0, -4.0]], np.float32),
    )
    targets = messages.Targets((2, 2), np.array([0, 1, 3]), np.array([0, 0, 1]))
    written = messages.write_sample_result(result, top_prompt=1, top_sample=2, last_n=1, targets=targets)
    read = LIBRARY["SampleResponse"].FromString(written)
    first, second = read.sequences
    assert np.frombuffer(first.tokens, np.int32).tolist() == [3, 4]
    assert np.frombuffer(first.logprobs, np.float32).tolist() == [-0.5, -1.0]
    assert (first.stop_reason, second.stop_reason) == (1, 0)
    top = first.topk_sampled_logprobs
    assert (top.k, top.length) == (2, 2)
    assert np.frombuffer(top.token_ids, np.int32).tolist() == [3, 9, 4, 0]
    assert np.frombuffer(top.logprobs, np.float32).tolist() == [-0.5, -2.0, -1.0, -99999.0]
    scores = np.frombuffer(read.prompt_logprobs, np.float32)
    assert np.isnan(scores[:2]).all() and scores[2] == -2.0, "only the last of the prompt's tokens was asked for"
    assert np.frombuffer(read.topk_prompt_logprobs.logprobs, np.float32).tolist() == [-99999.0, -99999.0, -2.0]
    csr = read.target_prompt_logprobs.sparse_csr
    assert np.frombuffer(csr.values, np.float32).tolist() == [-1.0, -3.0, -4.0]


def test_the_digest_of_a_request_does_not_depend_on_the_order_of_its_maps():
    digests = set()
    for names in (["a", "b", "c"], ["c", "b", "a"]):
        request = _request()
        for name in names:
            request.loss_fn_config[name] = len(name)
            request.data[0].loss_fn_inputs[name].dense = name.encode() * 4
        digests.add(messages.read_pass_request(request.SerializeToString()).make_digest())
    request.data[0].loss_fn_inputs["a"].dense = b"zzzz"
    other = messages.read_pass_request(request.SerializeToString()).make_digest()
    assert len(digests) == 1 and other not in digests


_GOOD = _request().SerializeToString()


def _nest(numbers, content):
    """Return the content as bytes of nested fields."""
    for number in reversed(numbers):
        size = b""
        count = len(content)
        while count > 127:
            size, count = size + bytes([count & 127 | 128]), count >> 7
        content = bytes([number << 3 | 2]) + size + bytes([count]) + content
    return content


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (_GOOD[:-3], "bytes, but"),
        (b"\x80", "ends within a number"),
        (b"\xff" * 11, "more than 64 bits"),
        (_GOOD + bytes([9 << 3 | 0, 1]), "no field 9"),
        (b"\x0a\x02\xff\xfe", "not UTF-8"),
        (b"\x08\x01", "model_id has the wire type 0"),
        (b"\x0b", "wire type 3"),
        (b"\x2a\x03\x0a\x01a", "has no value"),
    ],
)
def test_a_body_that_is_no_request_is_refused(body, text):
    with pytest.raises(ValueError, match=text):
        messages.read_pass_request(body)


def test_every_cut_of_a_request_is_read_or_refused():
    for end in range(len(_GOOD)):
        try:
            messages.read_pass_request(_GOOD[:end]).read_data()
        except (ValueError, CallError):
            pass


def _tensor(**fields):
    request = _request()
    tensor = request.data[0].loss_fn_inputs["target_tokens"]
    tensor.Clear()
    for name, value in fields.items():
        if name == "csr":
            for part, array in zip(("values", "crow_indices", "col_indices"), value):
                setattr(tensor.sparse_csr, part, np.array(array, np.int64).tobytes())
        elif name == "shape":
            tensor.shape.extend(value)
        else:
            setattr(tensor, name, value)
    return messages.read_pass_request(request.SerializeToString())


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"dense": b"1234", "dtype": 4}, "type 4"),
        ({"dense": b"12345", "dtype": 1}, "not values of 4 bytes"),
        ({"dense": b"1234", "dtype": 1, "shape": [2]}, r"shape \[2\] and 1 values"),
        ({"dense": struct.pack("<f", 1.0), "dtype": 1, "shape": [-1, -1]}, "shape"),
        ({"dtype": 2, "csr": ([1], [0, 1], [0]), "shape": [1 << 40, 1 << 40]}, "at most"),
        ({"dtype": 2, "csr": ([1], [0, 1], [5]), "shape": [1, 3]}, "do not fit"),
        ({"dtype": 2, "csr": ([1], [0, 1], [-1]), "shape": [1, 3]}, "do not fit"),
        ({"dtype": 2, "csr": ([1, 2], [0, 2, 1], [0, 1]), "shape": [2, 3]}, "do not fit"),
        ({"dtype": 2, "csr": ([1], [0], [0]), "shape": [1, 3]}, "do not fit"),
        ({"dtype": 2, "csr": ([1], [0, 1], [0])}, "needs rows and columns"),
    ],
)
def test_a_tensor_that_is_none_is_the_fault_of_its_sender(fields, text):
    with pytest.raises(CallError, match=text):
        _tensor(**fields).read_data()


def test_a_chunk_that_is_no_text_is_refused_by_its_name():
    request = _request()
    request.data[0].model_input.add().image.data = b"png"
    with pytest.raises(CallError, match="chunk 'image'"):
        messages.read_pass_request(request.SerializeToString()).read_data()


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"\x1a\x00" * 300_000, "more than 262144 fields"),  # data without anything, two bytes each
        (b"\x1a\x04\x12\x02\x0a\x00" * 100_000, "more than 262144 fields"),
        # target_tokens with a shape of 70,000 ones
        (_nest([3, 2, 2, 4], b"\x01" * 70_000), "has 70000 bytes; it has at most 65536"),
    ],
)
def test_a_message_that_would_take_long_to_read_is_refused(body, text):
    with pytest.raises(ValueError, match=text):
        messages.read_pass_request(body)
