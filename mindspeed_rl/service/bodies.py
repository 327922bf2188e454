"""JSON bodies of the API: a table per request, and a reader that refuses what the table does not have.

A body with a key that is not known here is refused, as the published service does: the client would believe that it was read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mindspeed_rl import registry
from mindspeed_rl.bounds import check_depth, is_number, show
from mindspeed_rl.data.strict_json import StrictDecoder
from mindspeed_rl.service.backend import AdamParams, AdapterSpec, Array, CallError, SampleCall
from mindspeed_rl.service.journal import pack_value
from mindspeed_rl.service.messages import Targets, make_dense
from mindspeed_rl.service.replies import RefusedError

JsonObject = dict[str, Any]
_MAX_TEXT, _MAX_METADATA = 4096, 1 << 16
_INT64 = range(-(1 << 63), 1 << 63)


def read_json(body: bytes) -> JsonObject:
    """Read the JSON object of a body; an empty one is an empty object.

    Raises:
        RefusedError: it is none.
    """
    try:
        value = StrictDecoder().loads(body.decode("utf-8")) if body else {}
        check_depth(value, "the body")
    except UnicodeDecodeError as error:
        raise RefusedError(400, f"a body is JSON in UTF-8, and byte {error.start} is none") from None
    except ValueError as error:
        raise RefusedError(400, f"a body is a JSON object, but this is none: {error}") from None
    if not isinstance(value, dict):
        raise RefusedError(400, f"a body is a JSON object, not {type(value).__name__}")
    return value


def _read_text(value: object) -> str:
    if not isinstance(value, str) or len(value) > _MAX_TEXT:
        raise ValueError(f"a text of at most {_MAX_TEXT} characters")
    return value


def _read_integer(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value not in _INT64:
        raise ValueError("an integer of 64 bits")
    return value


def _read_number(value: object) -> float:
    if not is_number(value):
        raise ValueError("a finite number of at most 3.4e38")
    return float(value)


def _read_flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


def _read_object(value: object) -> JsonObject:
    if not isinstance(value, dict):
        raise ValueError("an object")
    return value


def _read_metadata(value: object) -> JsonObject:
    metadata = _read_object(value)
    try:
        is_short = len(pack_value(metadata)) <= _MAX_METADATA
    except (OverflowError, ValueError):  # an integer of more than 64 bits, and half a character
        is_short = False
    if not is_short:
        raise ValueError(f"an object of at most {_MAX_METADATA} bytes, with integers of 64 bits")
    return metadata


def _read_list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError("a list")
    return value


def _read_texts(value: object) -> list[str]:
    return [_read_text(item) for item in _read_list(value)]


def _read_stop(value: object) -> str | list[Any]:
    if isinstance(value, str):
        return _read_text(value)
    if isinstance(value, list) and (all(isinstance(item, str) for item in value) or all(type(item) is int for item in value)):
        return value
    raise ValueError("a text, a list of texts, or a list of token ids")


#: the value of a key that a body must have
_REQUIRED = object()


@dataclass(frozen=True)
class _Key:
    """A key of a body: its reader, which raises ValueError with what is expected, and its default."""

    read: Callable[[object], Any]
    default: object = _REQUIRED


_Form = Mapping[str, _Key]
_TEXT, _MAYBE_TEXT = _Key(_read_text), _Key(_read_text, None)
_INTEGER, _MAYBE_INTEGER = _Key(_read_integer), _Key(_read_integer, None)
_METADATA = _Key(_read_metadata, None)
_OPTIMIZER = _Key(_read_object, None)
_SEQUENCED: _Form = {"model_id": _TEXT, "seq_id": _INTEGER}
_KEPT: _Form = {"ttl_seconds": _MAYBE_INTEGER, "user_metadata": _METADATA}
_TENSOR: _Form = {
    "data": _Key(_read_list),
    "dtype": _TEXT,
    "shape": _Key(_read_list, None),
    "sparse_crow_indices": _Key(_read_list, None),
    "sparse_col_indices": _Key(_read_list, None),
}
_LORA: _Form = {
    "rank": _INTEGER,
    "seed": _MAYBE_INTEGER,
    "train_unembed": _Key(_read_flag, True),
    "train_mlp": _Key(_read_flag, True),
    "train_attn": _Key(_read_flag, True),
}
_ADAM: _Form = {name: _Key(_read_number, default) for name, default in vars(AdamParams()).items()}
_SAMPLING: _Form = {
    "max_tokens": _MAYBE_INTEGER,
    "seed": _MAYBE_INTEGER,
    "stop": _Key(_read_stop, None),
    "temperature": _Key(_read_number, 1.0),
    "top_k": _Key(_read_integer, -1),
    "top_p": _Key(_read_number, 1.0),
}
#: the object `target` of retrieve_futures
FUTURES_TARGET: _Form = {"sampling_session_id": _TEXT, "cloned_sampler_id": _Key(_read_integer, 0)}
#: request -> keys of its body
FORMS: Mapping[str, _Form] = {
    "client/config": {"sdk_version": _MAYBE_TEXT},
    "client/dynamic_config": {"sdk_version": _MAYBE_TEXT},
    "auth/token": {},
    "create_session": {
        "tags": _Key(_read_texts, ()),
        "user_metadata": _METADATA,
        "sdk_version": _Key(_read_text, ""),
        "project_id": _MAYBE_TEXT,
        "display_name": _MAYBE_TEXT,
    },
    "session_heartbeat": {"session_id": _TEXT},
    "finish": {"reason": _Key(_read_object), "detail": _MAYBE_TEXT},
    "create_model": {
        "session_id": _TEXT,
        "model_seq_id": _INTEGER,
        "base_model": _TEXT,
        "user_metadata": _METADATA,
        "lora_config": _Key(_read_object, None),
        "optimizer_config": _OPTIMIZER,
    },
    "get_info": {"model_id": _TEXT},
    "unload_model": {"model_id": _TEXT},
    "optim_step": {**_SEQUENCED, "adam_params": _Key(_read_object, None), "optimizer_params": _Key(_read_object, None)},
    "save_weights": {**_SEQUENCED, **_KEPT, "path": _MAYBE_TEXT, "overwrite": _Key(_read_flag, False)},
    "save_weights_for_sampler": {
        **_SEQUENCED,
        **_KEPT,
        "path": _MAYBE_TEXT,
        "sampling_session_seq_id": _MAYBE_INTEGER,
        "kind": _Key(_read_text, "snapshot"),
    },
    "save_weights_external": {
        **_SEQUENCED,
        "path": _TEXT,
        "ttl_seconds": _MAYBE_INTEGER,
        "age_encryption_recipients": _Key(_read_texts, None),
    },
    "load_weights": {
        "model_id": _MAYBE_TEXT,
        "seq_id": _MAYBE_INTEGER,
        "session_id": _MAYBE_TEXT,
        "model_seq_id": _MAYBE_INTEGER,
        "base_model": _MAYBE_TEXT,
        "user_metadata": _METADATA,
        "path": _TEXT,
        "optimizer": _Key(_read_flag),
        "optimizer_config": _OPTIMIZER,
        "weights_access_token": _MAYBE_TEXT,
    },
    "create_sampling_session": {
        "session_id": _TEXT,
        "sampling_session_seq_id": _INTEGER,
        "base_model": _MAYBE_TEXT,
        "model_path": _MAYBE_TEXT,
    },
    "join_sampling_session": {"sampling_session_id": _TEXT},
    "asample": {
        "num_samples": _Key(_read_integer, 1),
        "prompt": _Key(_read_object),
        "sampling_params": _Key(_read_object),
        "base_model": _MAYBE_TEXT,
        "model_path": _MAYBE_TEXT,
        "sampling_session_id": _MAYBE_TEXT,
        "seq_id": _MAYBE_INTEGER,
        "prompt_logprobs": _Key(_read_flag, False),
        "topk_prompt_logprobs": _Key(_read_integer, 0),
        "topk_sample_logprobs": _Key(_read_integer, 0),
        "target_prompt_logprobs": _Key(_read_object, None),
        "prompt_alt_tokens_k": _Key(_read_integer, 0),
        "prompt_logprobs_last_n": _MAYBE_INTEGER,
        "record_stability_info": _Key(_read_flag, False),
    },
    "retrieve_future": {"request_id": _TEXT, "allow_metadata_only": _Key(_read_flag, False)},
    "retrieve_futures": {
        "target": _Key(_read_object),
        "prev_cursor": _Key(_read_integer, 0),
        "timeout": _Key(_read_number, None),
        "retrieved_request_ids": _Key(_read_texts, ()),
    },
    "cancel_future": {"request_id": _TEXT},
    "weights_info": {"tinker_path": _TEXT},
    "ttl": {"ttl_seconds": _MAYBE_INTEGER},
}


def read_form(form: _Form, value: Mapping[str, object], where: str, kind: str | None = None) -> JsonObject:
    """Return the values of all keys of a form.

    Args:
        where: name of the object in messages.
        kind: the value that the key "type" has where there is one.

    Raises:
        CallError: a key is unknown, missing, or has a wrong value.
    """
    read: JsonObject = {}
    for name in value:
        if name in form or name == "type" and value[name] in (kind, None):
            continue
        if name == "type" and kind is not None:
            raise CallError(f"{where}.type is {show(value[name])}; it should be '{kind}'.")
        near = registry.find_similar(str(name), form)
        hint = f"did you mean '{near}'?" if near else f"it has {', '.join(form) or 'none'}."
        raise CallError(f"{where} has no key {show(name)}; {hint}")
    for name, key in form.items():
        given = value.get(name)
        if given is None:
            if key.default is _REQUIRED:
                raise CallError(f"{where}: '{name}' is missing.")
            read[name] = key.default
            continue
        try:
            read[name] = key.read(given)
        except ValueError as error:
            raise CallError(f"{where}.{name} is {show(given)}; expected {error}.") from None
    return read


def read_body(name: str, value: Mapping[str, object]) -> JsonObject:
    """Return the values of the body of a request.

    Raises:
        CallError: a key is unknown, missing, or has a wrong value.
    """
    return read_form(FORMS[name], value, name, kind={"asample": "sample"}.get(name, name))


def read_adapter(value: JsonObject | None) -> AdapterSpec | None:
    """Return the adapter of `lora_config`."""
    return None if value is None else AdapterSpec(**read_form(_LORA, value, "lora_config"))


def check_optimizer(value: JsonObject | None) -> None:
    """Raise CallError for an optimizer that is not offered."""
    if value is not None and value != {"type": "adamw"}:
        raise CallError(f"optimizer_config: {show(value)} is not offered; it can be {{'type': 'adamw'}}.")


def read_adam(body: JsonObject) -> AdamParams:
    """Return the parameters of a step.

    Raises:
        CallError: they are another optimizer's, or wrong.
    """
    other = body["optimizer_params"]
    if body["adam_params"] is None or other is not None:
        raise CallError(f"optimizer_params {show(other)}: only adam_params (AdamW) are offered.")
    return AdamParams(**read_form(_ADAM, body["adam_params"], "adam_params"))


def read_prompt(value: JsonObject) -> list[int]:
    """Return the token ids of a model input.

    Raises:
        CallError: it has something else than text.
    """
    tokens: list[int] = []
    for index, chunk in enumerate(read_form({"chunks": _Key(_read_list)}, value, "prompt")["chunks"]):
        kind = chunk.get("type", "encoded_text") if isinstance(chunk, dict) else type(chunk).__name__
        if kind != "encoded_text":
            raise CallError(f"prompt.chunks[{index}] is of type {show(kind)}; this server takes encoded_text, tokens of text.")
        part = read_form({"tokens": _Key(_read_list)}, chunk, f"prompt.chunks[{index}]", kind="encoded_text")["tokens"]
        if set(map(type, part)) - {int}:
            raise CallError(f"prompt.chunks[{index}].tokens: token ids are whole numbers.")
        tokens += part
    if any(not -(1 << 31) <= token < 1 << 31 for token in tokens):
        raise CallError("prompt: a token id does not fit into 32 bits.")
    return tokens


@dataclass(frozen=True)
class SampleRequest:
    """A request for samples: the call, and how its result is written.

    Attributes:
        call: what is sampled.
        top_prompt, top_sample, last_n, targets: as `write_sample_result` takes them.
    """

    call: SampleCall
    top_prompt: int
    top_sample: int
    last_n: int | None
    targets: Targets | None


def read_sample(body: JsonObject) -> SampleRequest:
    """Return what a body of `asample` asks for.

    Raises:
        CallError: something is wrong, or not offered.
    """
    params = read_form(_SAMPLING, body["sampling_params"], "sampling_params")
    if body["prompt_alt_tokens_k"]:
        raise CallError("prompt_alt_tokens_k is not offered; topk_prompt_logprobs and target_prompt_logprobs are.")
    if body["record_stability_info"]:
        raise CallError("record_stability_info is not offered, nor is the loss stable_reinforce, which needs it.")
    stop = params["stop"]
    stops = [stop] if isinstance(stop, str) else list(stop or ())
    prompt, last_n = read_prompt(body["prompt"]), body["prompt_logprobs_last_n"]
    if last_n is not None and not (body["prompt_logprobs"] and 1 <= last_n <= len(prompt) - 1):
        raise CallError(f"prompt_logprobs_last_n: {last_n} is not from 1 to {len(prompt) - 1}, together with prompt_logprobs.")
    targets, layout = _read_targets(body["target_prompt_logprobs"], len(prompt))
    call = SampleCall(
        prompt=prompt,
        max_tokens=params["max_tokens"],
        num_samples=body["num_samples"],
        seed=params["seed"],
        temperature=params["temperature"],
        top_k=params["top_k"],
        top_p=params["top_p"],
        ends_at_eos=stop is None,
        stop_tokens=tuple(item for item in stops if isinstance(item, int)),
        stop_strings=tuple(item for item in stops if isinstance(item, str)),
        prompt_log_probs=body["prompt_logprobs"],
        top_prompt_log_probs=body["topk_prompt_logprobs"],
        top_log_probs=body["topk_sample_logprobs"],
        target_log_probs=targets,
    )
    return SampleRequest(call, body["topk_prompt_logprobs"], body["topk_sample_logprobs"], last_n, layout)


def _read_targets(value: JsonObject | None, num_tokens: int) -> tuple[Array | None, Targets | None]:
    """Return the ids [N - 1, K] whose log-probs are returned, -1 for none, and their layout."""
    if value is None:
        return None, None
    where = "target_prompt_logprobs"
    tensor = read_form(_TENSOR, value, where)
    indices = [tensor[f"sparse_{name}_indices"] or [] for name in ("crow", "col")]
    shape, lists = tensor["shape"], [tensor["data"], tensor["shape"] or [], *indices]
    if tensor["dtype"] != "int64" or any(set(map(type, items)) - {int} for items in lists):
        raise CallError(f"{where} is an int64 tensor of token ids with its shape.")
    if shape is None or len(shape) != 2 or shape[0] != num_tokens - 1 or shape[1] < 1:
        raise CallError(f"{where} has the shape {show(shape)}; expected [{num_tokens - 1}, K].")
    try:
        values, rows, columns = (np.asarray(items, np.int64) for items in (lists[0], lists[2], lists[3]))
    except OverflowError:
        raise CallError(f"{where} has a number that does not fit into 64 bits.") from None
    if tensor["sparse_crow_indices"] is None:
        if len(values) != shape[0] * shape[1]:
            raise CallError(f"{where} has the shape {shape} and {len(values)} values.")
        return values.reshape(shape), Targets((shape[0], shape[1]))
    return make_dense(values, shape, rows, columns, where, fill=-1), Targets((shape[0], shape[1]), rows, columns)
