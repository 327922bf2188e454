"""Turns and calls of written samples of agents: as lines of a tree, and as spans in OpenTelemetry's file format."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mindspeed_rl import __version__
from mindspeed_rl.files import write_file

_MAX_TEXT = 80
#: kinds of spans in OTLP: work inside of a process, and a request to another one
_INTERNAL, _CLIENT = 1, 3
_OK, _ERROR = 1, 2

#: a line of completions.jsonl, which may have `events`
_Sample = Mapping[str, Any]


def describe_turns(sample: _Sample) -> list[tuple[int, str]]:
    """Return (depth, text) of each turn and call of a sample, as a tree in which a branch is deeper than what it leaves.

    Returns:
        Nothing for a sample without events.
    """
    events: Sequence[_Sample] = sample.get("events") or ()
    children: dict[int | None, list[int]] = {}
    for index, event in enumerate(events):
        children.setdefault(event["parent"], []).append(index)
    lines: list[tuple[int, str]] = []
    waiting = [(0, index) for index in reversed(children.get(None, []))]
    while waiting:
        depth, index = waiting.pop()
        lines.append((depth, _describe(sample, events[index], index)))
        following = children.get(index, [])
        turns = [child for child in following if events[child]["name"] == "model"]
        deeper = depth + (len(turns) > 1)
        waiting += [(deeper, child) for child in reversed(turns)]
        waiting += [(depth + 1, child) for child in reversed(following) if child not in turns]
    return lines


def _describe(sample: _Sample, event: _Sample, index: int) -> str:
    words = [f"{event['end_s'] - event['start_s']:.2f} s"]
    if event.get("reward") is not None:
        words.append(f"reward {event.get('reward'):.4g}")
    if event["name"] != "model":
        return ", ".join([f"call of {event['name']}", *words, *(["failed"] if event.get("failed") else [])])
    place, tokens = slice(event["start"], event["stop"]), sample.get("tokens")
    words.insert(0, f"turn {index}: {event['stop'] - event['start']} tokens")
    if tokens is not None:
        words[0] += f", {sum(tokens['loss_mask'][place])} of them train"
        text = " ".join("".join(tokens["texts"][place]).split())
        words.append(text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT - 3]}...")
    return ", ".join(words)


def write_spans(samples: Iterable[_Sample], path: Path) -> int:
    """Write samples as OTLP/JSON, which OpenTelemetry's collectors and viewers read; return the number of spans.

    A sample is a trace: a span for the sample, and below it one for each turn and call. Attributes have the names of
    OpenTelemetry's conventions for generative models, where one exists.
    """
    spans = [span for index, sample in enumerate(samples) for span in _list_spans(sample, index)]
    scope = {"scope": {"name": "mindspeed_rl", "version": __version__}, "spans": spans}
    resource = {"attributes": _write_attributes({"service.name": "mindspeed_rl"})}
    line = json.dumps({"resourceSpans": [{"resource": resource, "scopeSpans": [scope]}]}, ensure_ascii=False)
    write_file(path, f"{line}\n")
    return len(spans)


def _list_spans(sample: _Sample, index: int) -> Iterator[dict[str, Any]]:
    events: Sequence[_Sample] = sample.get("events") or ()
    if not events:
        return
    trace = hashlib.blake2b(f"{sample['iteration']}/{index}/{events[0]['start_s']}".encode(), digest_size=16).hexdigest()
    tokens, extra = sample.get("tokens"), sample.get("extra") or {}

    def build(
        number: int, name: str, kind: int, start_s: float, end_s: float, values: _Sample, failed: bool
    ) -> dict[str, Any]:
        return {
            "traceId": trace,
            "spanId": f"{number + 1:016x}",
            **({"parentSpanId": f"{1:016x}"} if number else {}),
            "name": name,
            "kind": kind,
            "startTimeUnixNano": str(int(start_s * 1e9)),
            "endTimeUnixNano": str(int(end_s * 1e9)),
            "attributes": _write_attributes(values),
            "status": {"code": _ERROR if failed else _OK},
        }

    first, last = min(event["start_s"] for event in events), max(event["end_s"] for event in events)
    error = str(extra.get("error") or "")
    own = {"iteration": sample["iteration"], "group": sample.get("group"), "sample": sample.get("sample")}
    own |= {"reward": sample.get("reward"), "advantage": sample.get("advantage"), "error": error or None}
    yield build(0, "sample", _INTERNAL, first, last, own, bool(error))
    for number, event in enumerate(events, 1):
        parent = None if event["parent"] is None else f"{event['parent'] + 2:016x}"
        values = {"reward": event.get("reward"), "follows": parent}
        if event["name"] == "model":
            place = slice(event["start"], event["stop"])
            values |= {"gen_ai.operation.name": "chat", "gen_ai.usage.output_tokens": event["stop"] - event["start"]}
            if tokens is not None:
                values |= {"tokens.trained": sum(tokens["loss_mask"][place]), "text": "".join(tokens["texts"][place])}
            yield build(number, "chat policy", _CLIENT, event["start_s"], event["end_s"], values, False)
        else:
            values |= {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": event["name"]}
            name = f"execute_tool {event['name']}"
            yield build(number, name, _INTERNAL, event["start_s"], event["end_s"], values, bool(event.get("failed")))


def _write_attributes(values: Mapping[str, object]) -> list[dict[str, Any]]:
    """Return attributes in OTLP's form; those without a value are left out."""
    attributes = []
    for name, value in values.items():
        if value is None:
            continue
        kind = "intValue" if isinstance(value, int) else "doubleValue" if isinstance(value, float) else "stringValue"
        attributes.append({"key": name, "value": {kind: str(value) if isinstance(value, int) else value}})
    return attributes
