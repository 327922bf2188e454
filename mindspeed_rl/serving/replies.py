"""The check of a rollout server's replies: the one place that reads them, so that the pool works with nothing else.

`call_server` checks what a reply says by itself; `ResponseLimits` compares the tokens of a response with its request.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

from mindspeed_rl.resharding.rendezvous import DeliveryReport
from mindspeed_rl.rollout.protocol import GrowingResponse
from mindspeed_rl.serving.rollout_service import FINISHES, ResponseChunk

#: above it nothing is a count, a number of bytes or the number of an event
_MAX_COUNT = 1 << 53
#: ids of an engine are 32-bit integers
MAX_TOKEN_ID = (1 << 31) - 1
#: workers of a server; the members of a weight sync are counted from it
_MAX_WORKERS = 4096
#: vLLM's log-probs are x - logsumexp(x) in float32: half a unit in the last place of logits up to 2^13 is 0.0005
_MAX_LOG_PROB = 1e-3
#: longest name, error or kind that a server gives
_MAX_TEXT = 1 << 20
#: characters of a wrong value that a message shows
_SHOWN = 80


class ReplyError(ValueError):
    """A reply that no server of this package gives; the text has the field, its value and what would be right."""


class ServerClient(Protocol):
    """A client of one rollout server.

    Attributes:
        name: used in messages.
    """

    name: str

    async def call(self, name: str, **arguments: object) -> Any:
        """Return the result of a call of `RolloutService`, unchecked: `call_server` checks it.

        Raises:
            Exception: the server cannot be reached, or the call failed there.
        """
        ...


@dataclass(frozen=True)
class NextTokens:
    """An event: the next tokens of a response.

    Attributes:
        number: number of the event.
        key: key of the request.
    """

    number: int
    key: str
    chunk: ResponseChunk


@dataclass(frozen=True)
class Failure:
    """An event: an error.

    Attributes:
        number, key: as in `NextTokens`.
        error: the server's text.
        of_request: the request is invalid; else the server has failed.
    """

    number: int
    key: str
    error: str
    of_request: bool


@dataclass(frozen=True)
class News:
    """The result of `RolloutService.news`."""

    events: list[NextTokens | Failure]
    version: int


@dataclass(frozen=True)
class Health:
    """The result of `RolloutService.health`."""

    running: int
    version: int


@dataclass(frozen=True)
class ServerMetadata:
    """The result of `RolloutService.describe`.

    Attributes:
        num_workers: members of a group of a weight sync.
        quantization: None: not quantized.
        log_probs: kind of the log-probs; None from servers of earlier releases.
        version: version of the weights; -1: none yet.
        images: the fewest and the most pixels of an image, and the most images of a prompt; None for a model of text.
        videos: the most videos of a prompt; None from servers of earlier releases.
        video_pixels: fewest and most pixels of a video, as the processor counts them; None for a model without videos.
    """

    num_workers: int
    dtype: str
    max_model_len: int
    version: int
    quantization: str | None = None
    log_probs: str | None = None
    images: list[int] | None = None
    videos: int | None = None
    video_pixels: list[int] | None = None


# ---------------------------------------------------------------- fields


@dataclass(frozen=True)
class _Kind:
    """A kind of values.

    Attributes:
        text: name of the kind in messages.
        holds: returns True for such a value.
    """

    text: str
    holds: Callable[[Any], bool]


def _integer(low: int, high: int, text: str) -> _Kind:
    # a bool is an int for isinstance
    return _Kind(text, lambda value: type(value) is int and low <= value <= high)


def _is_list_of(kind: _Kind) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(kind.holds, value))


def _is_none(value: object) -> bool:
    return value is None


_TEXT = _Kind("a text", lambda value: isinstance(value, str) and len(value) <= _MAX_TEXT)
_COUNT = _integer(0, _MAX_COUNT, "a number from 0")
_POSITIVE = _integer(1, _MAX_COUNT, "a number from 1")
_VERSION = _integer(-1, _MAX_COUNT, "a version, from -1")
_WORKERS = _integer(1, _MAX_WORKERS, f"a number of workers from 1 to {_MAX_WORKERS}")
_NOTHING = _Kind("null", _is_none)
_OPTIONAL_TEXT = _Kind("a text or null", lambda value: value is None or _TEXT.holds(value))
_TEXTS = _Kind("a list of texts", _is_list_of(_TEXT))
_LIST = _Kind("a list", lambda value: isinstance(value, list))
_IDS = _Kind(f"a list of token ids from 0 to {MAX_TOKEN_ID}", _is_list_of(_integer(0, MAX_TOKEN_ID, "")))
_LOG_PROBS = _Kind(
    "a list of log-probs, finite and at most 0",
    lambda value: (
        isinstance(value, list)
        and set(map(type, value)) <= {int, float}
        # no comparison holds for NaN
        and all(-sys.float_info.max <= item <= _MAX_LOG_PROB for item in value)
    ),
)
_FINISH = _Kind(f"null, {', '.join(FINISHES)}", lambda value: value is None or (isinstance(value, str) and value in FINISHES))
_FAULT = _Kind("request or server", lambda value: isinstance(value, str) and value in ("request", "server"))
_DRAFTS = _Kind("three numbers from 0", lambda value: _is_list_of(_COUNT)(value) and len(value) == 3)
_VIDEOS = _Kind("a number from 0, or null", lambda value: value is None or _COUNT.holds(value))
_VIDEO_PIXELS = _Kind(
    "two numbers from 0, or null", lambda value: value is None or (_is_list_of(_COUNT)(value) and len(value) == 2)
)
_IMAGES = _Kind("three numbers from 0, or null", lambda value: value is None or _DRAFTS.holds(value))

_NEWS = {"events": _LIST, "version": _VERSION}
_EVENT = {"number": _POSITIVE, "key": _TEXT}
_TOKENS = {"token_ids": _IDS, "log_probs": _LOG_PROBS, "version": _VERSION, "finish": _FINISH}
_ERROR = {"error": _TEXT, "kind": _FAULT}
_HEALTH = {"running": _COUNT, "version": _VERSION}
_METADATA = {"num_workers": _WORKERS, "dtype": _TEXT, "max_model_len": _POSITIVE, "version": _VERSION}
#: fields that servers of earlier releases do not have
_NEWER_METADATA = {"quantization": _OPTIONAL_TEXT, "log_probs": _OPTIONAL_TEXT, "images": _IMAGES, "videos": _VIDEOS}
_NEWER_METADATA |= {"video_pixels": _VIDEO_PIXELS}
_REPORT = {
    "num_parameters": _POSITIVE,
    "differing": _TEXTS,
    "received_bytes": _COUNT,
    "needed_bytes": _COUNT,
    "drafts": _DRAFTS,
}


def _show(value: object) -> str:
    """Return the beginning of a value's text, without making the whole text of a long one."""
    if isinstance(value, list):
        # not the lists in it: a server may nest them as deeply as it likes
        shown = ["..." if isinstance(item, list) else _show(item) for item in value[:3]]
        return f"[{', '.join(shown)}{', ...' if len(value) > 3 else ''}]"
    if isinstance(value, dict):
        return f"an object of {len(value)} fields"
    if type(value) is int and abs(value) > _MAX_COUNT:
        return f"a number of {value.bit_length()} bits"
    text = repr(value[:_SHOWN]) if isinstance(value, str) else repr(value)
    return text[:_SHOWN]


def _check_object(value: object, subject: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ReplyError(f"{subject} is {_show(value)}, not an object")
    return value


def _read_fields(
    value: object, subject: str, kinds: Mapping[str, _Kind], optional: Mapping[str, _Kind] | None = None
) -> dict[str, Any]:
    """Return the fields of these kinds; others are left out, as newer servers may have them.

    Raises:
        ReplyError: one is missing, or of another kind.
    """
    fields, present = _check_object(value, subject), dict(kinds)
    present |= {name: kind for name, kind in (optional or {}).items() if name in fields}
    for name, kind in present.items():
        if name not in fields:
            raise ReplyError(f"{subject} has no {name}")
        if not kind.holds(fields[name]):
            raise ReplyError(f"{subject} has {name} {_show(fields[name])}, not {kind.text}")
    return {name: fields[name] for name in present}


# ---------------------------------------------------------------- replies


def _read_nothing(value: object) -> None:
    if not _NOTHING.holds(value):
        raise ReplyError(f"its reply is {_show(value)}, not null")


def _read_event(value: object) -> NextTokens | Failure:
    number, key = _read_fields(value, "an event", _EVENT).values()
    subject = f"event {number}"
    if "error" in _check_object(value, subject):
        error, kind = _read_fields(value, subject, _ERROR).values()
        return Failure(number, key, error, kind == "request")
    ids, log_probs, version, finish = _read_fields(value, subject, _TOKENS).values()
    if len(ids) != len(log_probs):
        raise ReplyError(f"{subject} has {len(log_probs)} log-probs for {len(ids)} tokens")
    return NextTokens(number, key, ResponseChunk(tuple(ids), tuple(log_probs), version, finish))


def _read_news(value: object) -> News:
    fields = _read_fields(value, "its news", _NEWS, {"running": _COUNT})
    return News([_read_event(event) for event in fields["events"]], fields["version"])


def _read_report(text: object) -> DeliveryReport:
    if not isinstance(text, str):
        raise ReplyError(f"a report of its weight sync is {_show(text)}, not a text")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise ReplyError(f"a report of its weight sync is {_show(text)}, not JSON") from None
    return DeliveryReport(**_read_fields(value, "a report of its weight sync", _REPORT))


def _read_reports(value: object) -> list[DeliveryReport]:
    if not isinstance(value, list):
        raise ReplyError(f"its weight sync returns {_show(value)}, not a list of reports")
    return [_read_report(text) for text in value]


def read_metadata(value: object) -> ServerMetadata:
    """Read the result of `RolloutService.describe`.

    Raises:
        ReplyError: it is none.
    """
    return ServerMetadata(**_read_fields(value, "its description", _METADATA, _NEWER_METADATA))


def _read_health(value: object) -> Health:
    return Health(**_read_fields(value, "its health", _HEALTH))


def _read_files(value: object) -> list[str]:
    if not _TEXTS.holds(value):
        raise ReplyError(f"its list of missing files is {_show(value)}, not {_TEXTS.text}")
    return cast("list[str]", value)


#: call of `RolloutService` -> function that reads its result
READERS: Mapping[str, Callable[[object], Any]] = {
    "describe": read_metadata,
    "health": _read_health,
    "list_missing": _read_files,
    "news": _read_news,
    "receive": _read_reports,
    **dict.fromkeys(("submit", "drop", "pause", "resume", "join", "leave", "sleep", "wake"), _read_nothing),
}


async def call_server(server: ServerClient, call: str, arguments: Mapping[str, object]) -> Any:
    """Return the checked result of a call: what its function in `READERS` makes of the reply.

    Raises:
        ReplyError: the reply is wrong.
        Exception: as `ServerClient.call`.
    """
    return READERS[call](await server.call(call, **arguments))


# ---------------------------------------------------------------- responses


@dataclass(frozen=True)
class ResponseLimits:
    """Limits of the tokens that a request may get.

    Attributes:
        vocab_size: tokens of the model.
        newest_version: newest version of the weights.
    """

    vocab_size: int
    newest_version: int

    def extend(self, response: GrowingResponse, chunk: ResponseChunk, max_tokens: int) -> None:
        """Add the tokens of the chunk to the response.

        Args:
            response: the tokens that have arrived.
            max_tokens: tokens that the request may have.

        Raises:
            ReplyError: these tokens cannot be the response's; none was added.
        """
        ids, count = chunk.token_ids, len(response.token_ids) + len(chunk.token_ids)
        if ids and max(ids) >= self.vocab_size:
            raise ReplyError(f"it sent token {max(ids)}, and the vocabulary has {self.vocab_size} tokens")
        if count > max_tokens:
            raise ReplyError(f"it sent {count} tokens of a response of at most {max_tokens}")
        if not 0 <= chunk.version <= self.newest_version:
            raise ReplyError(f"it sent tokens of weights of version {chunk.version}, and the newest is {self.newest_version}")
        if chunk.finish in ("stop", "length") and not count:
            raise ReplyError(f"it ended a response by '{chunk.finish}' without a token")
        response.add(ids, chunk.log_probs, chunk.version, chunk.finish)
