"""Forms of requests for turns: OpenAI's chat completions, completions and responses, and Anthropic's messages.

A form reads a request as messages in OpenAI's form, in which a mark (`data/content_marks.py`) stands for an image or a video
and `images` has both, and writes the turns that were sampled, as one object or as server-sent events. A turn is recorded whole:
events are written once it is complete. Sampling parameters of a request have no effect, because training
needs samples of the policy's distribution; parameters that would need something else are refused, and so are unknown ones,
each with a sentence.
"""

from __future__ import annotations

import json
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from mindspeed_rl import registry
from mindspeed_rl.bounds import show
from mindspeed_rl.data.content_marks import Medium, join_texts
from mindspeed_rl.data.images import is_embedded, make_video_reference
from mindspeed_rl.data.videos import VIDEO_PARTS
from mindspeed_rl.tools.interface import BrokenCall, JsonObject, ParsedTurn

#: parameters without effect: the run's sampling applies
_SAMPLING = "temperature top_p top_k min_p seed frequency_penalty presence_penalty repetition_penalty min_tokens"
#: parameters without effect: notes for a provider, or for a client that reads the tokens, which are always written
_NOTES = (
    "model user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention reasoning_effort "
    "verbosity prediction return_token_ids logprobs include_reasoning skip_special_tokens spaces_between_special_tokens "
    "request_id priority length_penalty"
)
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal", "reasoning_text", "summary_text")
_IMAGE_PARTS = ("image", "image_url", "input_image")
_WORDS = re.compile(r"\S+\s*|\s+")
#: turns of one request, as in OpenAI's interface; texts that end a turn, and the length of one; functions
_MAX_CHOICES, _MAX_STOPS, _MAX_STOP_LENGTH, _MAX_TOOLS = 128, 64, 1000, 1024
#: largest number of an integer parameter; no context is as long
_MAX_INTEGER = 2**31 - 1

#: parameter -> JSON types of its value, where null and what reads the parameter leave open what it is
_KINDS: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("stream", "parallel_tool_calls", "disable_parallel_tool_use", "include_usage"), (bool,)),
    **dict.fromkeys(("stream_options", "text", "output_config", "thinking", "reasoning", "context_management"), (dict,)),
    **dict.fromkeys(("previous_response_id", "truncation", "model", "user"), (str,)),
    **dict.fromkeys(("tool_choice", "response_format"), (str, dict)),
    **dict.fromkeys(("instructions", "system", "input"), (str, list)),
    **dict.fromkeys(("include", "modalities", "betas"), (list,)),
    **dict.fromkeys(_SAMPLING.split(), (int, float)),
}
_KIND_NAMES: Mapping[type, str] = {
    **{bool: "true or false", dict: "an object", str: "a text", list: "a list", int: "a number"},
    float: "a number",
}

#: an event of a stream: its name, "" for none, and its data
Event = tuple[str, JsonObject]


@dataclass(frozen=True)
class TurnRequest:
    """A request for the next turn.

    Attributes:
        messages: the client's full conversation, in OpenAI's form; empty for a completion of a text.
        tools: offered by the client, in OpenAI's form, and part of the prompt.
        max_tokens: limit of this turn; None for the run's limit.
        num_choices: turns that are sampled from the same context.
        stop: texts that end the turn.
        prompt: the text or the tokens to complete.
        max_calls: calls that the client accepts in the turn; None for any number, 0 where calls are text.
        stream, with_usage: the reply is a stream of events, and has an event with token counts.
        previous: id of the response that the messages continue.
        num_instructions: messages at the start that a later request does not continue.
        session: agent that sends it, of a program with several; "" for none.
    """

    messages: tuple[JsonObject, ...] = ()
    tools: tuple[JsonObject, ...] = ()
    max_tokens: int | None = None
    num_choices: int = 1
    stop: tuple[str, ...] = ()
    prompt: str | tuple[int, ...] | None = None
    max_calls: int | None = None
    stream: bool = False
    with_usage: bool = False
    previous: str = ""
    num_instructions: int = 0
    session: str = ""


@dataclass(frozen=True)
class ChatReply:
    """A sampled turn.

    Attributes:
        turn: parsed.
        ended: True for an end token or a stop text; False if the turn was truncated.
        prompt_ids, token_ids, log_probs: tokens that the model read and sampled, for clients that record them.
        stop: the text of the request that ended it.
        id: unique in the trajectory.
    """

    turn: ParsedTurn
    ended: bool
    prompt_ids: Sequence[int]
    token_ids: Sequence[int]
    log_probs: Sequence[float]
    stop: str | None = None
    id: str = "0"


class Form(ABC):
    """A form of requests and replies.

    Attributes:
        known: names of parameters that are read, or have no effect.
        refused: parameter -> reason; a value that switches it off is accepted.
        last: what ends a stream.
    """

    known: ClassVar[str]
    refused: ClassVar[Mapping[str, str]] = {}
    last: ClassVar[str] = ""

    def check_names(self, body: JsonObject) -> None:
        """Check the names of the parameters, and the JSON types of their values.

        Raises:
            ValueError: one is unknown or not available, or of another type.
        """
        known = {*self.known.split(), *_SAMPLING.split(), *_NOTES.split()}
        for name, value in body.items():
            if name in self.refused and value:
                raise ValueError(f"{name} is not available: {self.refused[name]}")
            if name not in known and name not in self.refused:
                raise ValueError(f"unknown parameter {name[:80]!r}{registry.did_you_mean(name[:80], known)}")
            _check_kind(value, name)

    @abstractmethod
    def parse(self, body: JsonObject) -> TurnRequest:
        """Read a request.

        Raises:
            ValueError: it is invalid, or has an option that is not supported.
        """

    @abstractmethod
    def write(self, request: TurnRequest, replies: Sequence[ChatReply], model: str) -> JsonObject:
        """Return the reply as one object."""

    @abstractmethod
    def write_events(self, request: TurnRequest, replies: Sequence[ChatReply], model: str) -> Iterator[Event]:
        """Yield the events of a stream."""

    def write_error(self, status: int, message: str, code: str | None) -> JsonObject:
        """Return an error; OpenAI's form."""
        kind = "invalid_request_error" if status < 500 else "server_error"
        return {"error": {"message": message, "type": kind, "param": None, "code": code}}


class _ChatCompletions(Form):
    known = "messages tools tool_choice parallel_tool_calls max_tokens max_completion_tokens n stop stream stream_options"
    known += " response_format modalities"
    last = "[DONE]"
    refused: ClassVar[Mapping[str, str]] = {
        "logit_bias": "it would change the distribution that is trained",
        "functions": "use tools",
        "function_call": "use tool_choice",
        "audio": "the model reads and writes text",
        "web_search_options": "there is no search; offer a tool",
        "top_logprobs": "only the sampled token has a log-prob",
        "chat_template_kwargs": "the run's chat template applies",
        "continue_final_message": "the model answers in turns of its own",
        "guided_json": "it would change the distribution that is trained",
    }

    def parse(self, body: JsonObject) -> TurnRequest:
        """See `Form`."""
        _check_format(body.get("response_format"), "response_format")
        if body.get("modalities") not in (None, ["text"]):
            raise ValueError(f"modalities is {show(body['modalities'])}, but the model writes text alone")
        messages = []
        for index, message in enumerate(_read_list(body, "messages", filled=True)):
            role, where = message.get("role"), f"messages[{index}]"
            if role not in ("system", "developer", "user", "assistant", "tool"):
                raise ValueError(f"{where}.role is {show(role)}, but must be system, developer, user, assistant or tool")
            kept: JsonObject = {
                name: _read_text(message[name], f"{where}.{name}") for name in ("tool_call_id", "name") if message.get(name)
            }
            if calls := _read_calls(message.get("tool_calls"), f"{where}.tool_calls"):
                kept["tool_calls"] = calls
            role = "system" if role == "developer" else role
            messages.append(kept | _read_message(role, message.get("content"), where))
        tools = _read_tools(body)
        for index, tool in enumerate(tools):
            if tool.get("type") != "function" or not isinstance(tool.get("function"), dict):
                raise ValueError(f"tools[{index}] must be a function with a name")
            _check_function(tool["function"], f"tools[{index}].function")
        limit = _read_integer(body, "max_completion_tokens")
        return TurnRequest(
            tuple(messages),
            tuple(tools),
            _read_integer(body, "max_tokens") if limit is None else limit,
            _read_integer(body, "n", _MAX_CHOICES) or 1,
            _read_stops(body, "stop"),
            max_calls=_read_choice(body.get("tool_choice"), parallel=body.get("parallel_tool_calls") is not False),
            stream=bool(body.get("stream")),
            with_usage=bool(_read_option(body, "stream_options", "include_usage")),
        )

    def write(self, request: TurnRequest, replies: Sequence[ChatReply], model: str) -> JsonObject:
        """See `Form`; tokens are written as vLLM does with return_token_ids."""
        choices = []
        for index, reply in enumerate(replies):
            scores = [
                {"token": f"token_id:{token}", "logprob": value, "bytes": None, "top_logprobs": []}
                for token, value in zip(reply.token_ids, reply.log_probs)
            ]
            choice = {"index": index, "message": write_message(reply.turn), "finish_reason": _name_finish(reply)}
            choices.append(choice | {"logprobs": {"content": scores}, "token_ids": list(reply.token_ids)})
        return {
            **_describe("chatcmpl-", "chat.completion", replies, model),
            "choices": choices,
            "prompt_token_ids": list(replies[0].prompt_ids),
            "usage": _count_tokens(replies),
        }

    def write_events(self, request: TurnRequest, replies: Sequence[ChatReply], model: str) -> Iterator[Event]:
        """See `Form`."""
        base = _describe("chatcmpl-", "chat.completion.chunk", replies, model)

        def delta(index: int, change: JsonObject, finish: str | None = None) -> Event:
            return "", base | {"choices": [{"index": index, "delta": change, "finish_reason": finish, "logprobs": None}]}

        for index, reply in enumerate(replies):
            message = write_message(reply.turn)
            yield delta(index, {"role": "assistant", "content": ""})
            for name in ("reasoning_content", "content"):
                yield from (delta(index, {name: words}) for words in _WORDS.findall(message.get(name, "")))
            for number, call in enumerate(message.get("tool_calls", ())):
                opened = call | {"index": number, "function": {"name": call["function"]["name"], "arguments": ""}}
                yield delta(index, {"tool_calls": [opened]})
                for words in _WORDS.findall(call["function"]["arguments"]):
                    yield delta(index, {"tool_calls": [{"index": number, "function": {"arguments": words}}]})
            yield delta(index, {}, _name_finish(reply))
        if request.with_usage:
            yield "", base | {"choices": [], "usage": _count_tokens(replies)}


class _Completions(Form):
    known = "prompt max_tokens n best_of stop stream stream_options"
    last = "[DONE]"
    refused: ClassVar[Mapping[str, str]] = {
        "echo": "the prompt is known to the client",
        "suffix": "the model continues texts",
        "logit_bias": "it would change the distribution that is trained",
    }

    def parse(self, body: JsonObject) -> TurnRequest:
        """See `Form`."""
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
            (prompt,) = prompt
        is_ids = isinstance(prompt, list) and bool(prompt) and all(type(token) is int for token in prompt)
        if not is_ids and not (isinstance(prompt, str) and prompt):
            raise ValueError("prompt must be one text, or one list of token ids")
        choices = _read_integer(body, "n", _MAX_CHOICES) or 1
        if (_read_integer(body, "best_of", _MAX_CHOICES) or choices) != choices:
            raise ValueError(f"best_of is {body['best_of']}, but each of the n turns is recorded")
        return TurnRequest(
            max_tokens=_read_integer(body, "max_tokens"),
            num_choices=choices,
            stop=_read_stops(body, "stop"),
            prompt=tuple(prompt) if isinstance(prompt, list) else prompt,
            stream=bool(body.get("stream")),
            with_usage=bool(_read_option(body, "stream_options", "include_usage")),
        )

    def write(self, request: TurnRequest, replies: Sequence[ChatReply], model: str) -> JsonObject:
        """See `Form`."""
        choices = []
        for index, reply in enumerate(replies):
            scores = {
                "tokens": [f"token_id:{token}" for token in reply.token_ids],
                "token_logprobs": list(reply.log_probs),
                "top_logprobs": None,
                "text_offset": [],
            }
            choice = {"index": index, "text": reply.turn.content, "finish_reason": _name_finish(reply), "logprobs": scores}
            choices.append(choice | {"token_ids": list(reply.token_ids), "prompt_token_ids": list(reply.prompt_ids)})
        described = _describe("cmpl-", "text_completion", replies, model)
        return described | {"choices": choices, "usage": _count_tokens(replies)}

    def write_events(self, request: TurnRequest, replies: Sequence[ChatReply], model: str) -> Iterator[Event]:
        """See `Form`."""
        base = _describe("cmpl-", "text_completion", replies, model)
        for index, reply in enumerate(replies):
            for words in [*_WORDS.findall(reply.turn.content), ""]:
                finish = None if words else _name_finish(reply)
                yield "", base | {"choices": [{"index": index, "text": words, "finish_reason": finish, "logprobs": None}]}
        if request.with_usage:
            yield "", base | {"choices": [], "usage": _count_tokens(replies)}


class _Responses(Form):
    known = "input instructions tools tool_choice parallel_tool_calls max_output_tokens previous_response_id stream text"
    known += " truncation include reasoning stream_options"
    refused: ClassVar[Mapping[str, str]] = {
        "background": "a response is returned to the request that asks for it",
        "conversation": "send the items, or previous_response_id",
        "prompt": "there are no stored prompts",
        "max_tool_calls": "it counts calls of a provider's own tools, of which there are none",
        "top_logprobs": "only the sampled token has a log-prob",
        "context_management": "send the items that the model reads",
    }

    def parse(self, body: JsonObject) -> TurnRequest:
        """See `Form`."""
        _check_format(_read_option(body, "text", "format"), "text.format")
        if body.get("truncation") not in (None, "disabled"):
            raise ValueError(f"truncation is {show(body['truncation'])}, but a context that is too long is an error")
        given = body.get("input")
        items = [{"role": "user", "content": given}] if isinstance(given, str) else _read_list(body, "input", filled=True)
        messages: list[JsonObject] = []
        if body.get("instructions"):
            messages.append(_read_message("system", body["instructions"], "instructions"))
        num_instructions, is_open = len(messages), False  # the last message may get the calls after it
        for index, item in enumerate(items):
            where, kind = f"input[{index}]", item.get("type", "message")
            if kind == "reasoning":  # the tokens of the turn have it
                continue
            if kind == "function_call":
                function = {"name": item.get("name"), "arguments": item.get("arguments", "{}")}
                (call,) = _read_calls([{"id": item.get("call_id"), "type": "function", "function": function}], where)
                if not is_open:
                    messages.append({"role": "assistant", "content": ""})
                messages[-1].setdefault("tool_calls", []).append(call)
                is_open = True
                continue
            if kind == "function_call_output":
                name = _read_text(item.get("call_id"), f"{where}.call_id")
                messages.append({"tool_call_id": name} | _read_message("tool", item.get("output"), where))
            elif kind == "message" and item.get("role") in ("user", "assistant", "system", "developer"):
                role = "system" if item["role"] == "developer" else item["role"]
                messages.append(_read_message(role, item.get("content"), where))
            else:
                raise ValueError(
                    f"{where} is of type {show(kind)} and role {show(item.get('role'))}, but must be a message, a "
                    "function_call, a function_call_output or reasoning"
                )
            is_open = messages[-1]["role"] == "assistant"
        tools = []
        for index, tool in enumerate(_read_tools(body)):
            if tool.get("type") != "function" or not tool.get("name"):
                raise ValueError(
                    f"tools[{index}] is of type {show(tool.get('type'))}, but only functions with a name are available"
                )
            function = {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None}
            _check_function(function, f"tools[{index}]")
            tools.append({"type": "function", "function": function})
        return TurnRequest(
            tuple(messages),
            tuple(tools),
            _read_integer(body, "max_output_tokens"),
            max_calls=_read_choice(body.get("tool_choice"), parallel=body.get("parallel_tool_calls") is not False),
            stream=bool(body.get("stream")),
            previous=body.get("previous_response_id") or "",
            num_instructions=num_instructions,
        )

    def write(self, request: TurnRequest, replies: Sequence[ChatReply], model: str) -> JsonObject:
        """See `Form`."""
        (reply,) = replies
        message = write_message(reply.turn)
        output: list[JsonObject] = []
        if message.get("reasoning_content"):
            thought = {"type": "reasoning_text", "text": message["reasoning_content"]}
            output.append({"id": f"rs_{reply.id}", "type": "reasoning", "summary": [], "content": [thought]})
        if message["content"] or not message.get("tool_calls"):
            text = {"type": "output_text", "text": message["content"], "annotations": [], "logprobs": []}
            output.append({"id": f"msg_{reply.id}", "type": "message", "role": "assistant", "content": [text]})
        for index, call in enumerate(message.get("tool_calls", ())):
            names = {"id": f"fc_{reply.id}_{index}", "type": "function_call", "call_id": call["id"]}
            output.append(names | call["function"])
        status = "completed" if reply.ended else "incomplete"
        counts = _count_tokens(replies)
        return {
            "id": f"resp_{reply.id}",
            "object": "response",
            "created_at": int(time.time()),
            "status": status,
            "error": None,
            "incomplete_details": None if reply.ended else {"reason": "max_output_tokens"},
            "instructions": None,
            "max_output_tokens": request.max_tokens,
            "metadata": {},
            "model": model,
            "output": [item | {"status": status} for item in output],
            "parallel_tool_calls": request.max_calls is None,
            "previous_response_id": request.previous or None,
            "temperature": None,
            "text": {"format": {"type": "text"}},
            "tool_choice": "none" if request.max_calls == 0 else "auto",
            "tools": [{"type": "function", "parameters": None, "strict": None} | tool["function"] for tool in request.tools],
            "top_p": None,
            "usage": {
                "input_tokens": counts["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": counts["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": counts["total_tokens"],
            },
        }

    def write_events(self, request: TurnRequest, replies: Sequence[ChatReply], model: str) -> Iterator[Event]:
        """See `Form`."""
        full = self.write(request, replies, model)
        opened = full | {"status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
        events: list[Event] = [("response.created", {"response": opened}), ("response.in_progress", {"response": opened})]
        for index, item in enumerate(full["output"]):
            place = {"output_index": index, "item_id": item["id"]}
            kind = item["type"]
            empty = {"arguments": ""} if kind == "function_call" else {"content": []}
            added = item | {"status": "in_progress"} | empty
            events.append(("response.output_item.added", {"output_index": index, "item": added}))
            if kind == "function_call":
                name, text, final = "response.function_call_arguments", item["arguments"], {"arguments": item["arguments"]}
            else:
                (part,) = item["content"]
                name, text = f"response.{part['type']}", part["text"]
                place |= {"content_index": 0}
                final = {"text": text}
                if kind == "message":
                    events.append(("response.content_part.added", place | {"part": part | {"text": ""}}))
            also = {"logprobs": []} if kind == "message" else {"name": item["name"]} if kind == "function_call" else {}
            events += [(f"{name}.delta", place | also | {"delta": words}) for words in _WORDS.findall(text)]
            events.append((f"{name}.done", place | also | final))
            if kind == "message":
                events.append(("response.content_part.done", place | {"part": item["content"][0]}))
            events.append(("response.output_item.done", {"output_index": index, "item": item}))
        events.append((f"response.{full['status']}", {"response": full}))
        for number, (name, data) in enumerate(events):
            yield name, {"type": name, "sequence_number": number} | data


class _Messages(Form):
    known = "messages system tools tool_choice max_tokens stop_sequences stream thinking output_config betas cache_control"
    known += " context_management inference_geo"
    refused: ClassVar[Mapping[str, str]] = {
        "mcp_servers": "offer their tools",
        "container": "there is no container",
        "output_format": "it would change the distribution that is trained",
    }

    def parse(self, body: JsonObject) -> TurnRequest:
        """See `Form`."""
        messages: list[JsonObject] = []
        if body.get("system"):
            messages.append(_read_message("system", body["system"], "system"))
        for index, message in enumerate(_read_list(body, "messages", filled=True)):
            if message.get("role") not in ("user", "assistant", "system"):
                raise ValueError(f"messages[{index}].role is {show(message.get('role'))}, but must be user or assistant")
            messages += _read_blocks(message["role"], message.get("content"), f"messages[{index}]")
        tools = []
        for index, tool in enumerate(_read_tools(body)):
            if tool.get("type") not in (None, "custom") or not tool.get("name"):
                raise ValueError(f"tools[{index}] is of type {show(tool.get('type'))}, but only custom tools are available")
            parameters = tool.get("input_schema") or {"type": "object", "properties": {}}
            function = {"name": tool["name"], "description": tool.get("description") or "", "parameters": parameters}
            _check_function(function, f"tools[{index}]")
            tools.append({"type": "function", "function": function})
        if _read_option(body, "output_config", "format") is not None:
            raise ValueError("output_config.format is not available: it would change the distribution that is trained")
        choice = body.get("tool_choice") or {"type": "auto"}
        if not isinstance(choice, dict):
            raise ValueError(f"tool_choice is {show(choice)}, but must be an object with a type, such as auto")
        return TurnRequest(
            tuple(messages),
            tuple(tools),
            _read_integer(body, "max_tokens"),
            stop=_read_stops(body, "stop_sequences"),
            max_calls=_read_choice(
                choice.get("type"), parallel=not _read_option(body, "tool_choice", "disable_parallel_tool_use")
            ),
            stream=bool(body.get("stream")),
        )

    def write(self, request: TurnRequest, replies: Sequence[ChatReply], model: str) -> JsonObject:
        """See `Form`."""
        (reply,) = replies
        message = write_message(reply.turn)
        content: list[JsonObject] = []
        if message.get("reasoning_content"):
            content.append({"type": "thinking", "thinking": message["reasoning_content"], "signature": ""})
        if message["content"]:
            content.append({"type": "text", "text": message["content"], "citations": None})
        for call in message.get("tool_calls", ()):
            arguments = json.loads(call["function"]["arguments"])
            content.append({"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": arguments})
        reasons = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}
        counts = _count_tokens(replies)
        return {
            "id": f"msg_{reply.id}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": content,
            "stop_reason": "stop_sequence" if reply.stop is not None else reasons[_name_finish(reply)],
            "stop_sequence": reply.stop,
            "usage": {"input_tokens": counts["prompt_tokens"], "output_tokens": counts["completion_tokens"]},
        }

    def write_events(self, request: TurnRequest, replies: Sequence[ChatReply], model: str) -> Iterator[Event]:
        """See `Form`."""
        full = self.write(request, replies, model)
        opened = full | {
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": full["usage"] | {"output_tokens": 1},
        }
        events: list[Event] = [("message_start", {"message": opened})]
        for index, block in enumerate(full["content"]):
            if block["type"] == "tool_use":
                text, kind, name, empty = json.dumps(block["input"], ensure_ascii=False), "input_json_delta", "partial_json", {}
                start = block | {"input": empty}
            else:
                name = block["type"]
                text, kind = block[name], f"{name}_delta"
                start = block | {name: ""}
            events.append(("content_block_start", {"index": index, "content_block": start}))
            for words in _WORDS.findall(text):
                events.append(("content_block_delta", {"index": index, "delta": {"type": kind, name: words}}))
            events.append(("content_block_stop", {"index": index}))
        ends = {"stop_reason": full["stop_reason"], "stop_sequence": full["stop_sequence"]}
        events.append(("message_delta", {"delta": ends, "usage": {"output_tokens": full["usage"]["output_tokens"]}}))
        for name, data in [*events, ("message_stop", {})]:
            yield name, {"type": name} | data

    def write_error(self, status: int, message: str, code: str | None) -> JsonObject:
        """See `Form`."""
        kinds = {400: "invalid_request_error", 404: "not_found_error"}
        return {"type": "error", "error": {"type": kinds.get(status, "api_error"), "message": message}}


#: path after the base URL -> form
FORMS: Mapping[str, Form] = {
    "chat/completions": _ChatCompletions(),
    "completions": _Completions(),
    "responses": _Responses(),
    "messages": _Messages(),
}


def write_message(turn: ParsedTurn) -> JsonObject:
    """Return a turn of the model as a message in OpenAI's form."""
    # the client receives a broken call as text, and reports the error
    broken = "".join(call.text for call in turn.calls if isinstance(call, BrokenCall))
    message: JsonObject = {"role": "assistant", "content": turn.content + broken}
    if turn.reasoning is not None:
        message["reasoning_content"] = turn.reasoning
    calls = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
        }
        for call in turn.calls
        if not isinstance(call, BrokenCall)
    ]
    return message | ({"tool_calls": calls} if calls else {})


def _read_blocks(role: str, content: object, where: str) -> list[JsonObject]:
    """Read a message of Anthropic's form; the results of tools become messages of their own.

    Raises:
        ValueError: a block is unknown, or not supported.
    """
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list):
        raise ValueError(f"{where}.content must be a text or a list of blocks")
    messages: list[JsonObject] = []
    parts: list[object] = []
    calls: list[JsonObject] = []
    for index, block in enumerate(blocks):
        kind = block.get("type") if isinstance(block, dict) else None
        if kind in ("thinking", "redacted_thinking"):  # the tokens of the turn have it
            continue
        if kind == "tool_use" and role == "assistant":
            place = f"{where}.content[{index}]"
            function = {"name": block.get("name"), "arguments": block.get("input") or {}}
            (call,) = _read_calls([{"id": block.get("id"), "type": "function", "function": function}], place)
            calls.append(call)
        elif kind == "tool_result" and role == "user":
            if parts:
                messages.append(_read_message(role, parts, where))
                parts = []
            result = _read_message("tool", block.get("content"), f"{where}.content[{index}]")
            messages.append({"tool_call_id": _read_text(block.get("tool_use_id"), f"{where}.tool_use_id")} | result)
        else:
            parts.append(block)
    if parts or calls or not messages:
        messages.append(_read_message(role, parts, where) | ({"tool_calls": calls} if calls else {}))
    return messages


def _read_message(role: str, content: object, where: str) -> JsonObject:
    """Read a message; its parts are concatenated, with a mark for each of its `images`, of which some are videos.

    Raises:
        ValueError: it has something other than text, images and videos, or an image that the user or a tool did not send.
    """
    parts = [{"type": "text", "text": content or ""}] if content is None or isinstance(content, str) else content
    if not isinstance(parts, list):
        raise ValueError(f"{where}: a content is a text or a list of parts, not {type(content).__name__}")
    texts: list[str | Medium] = []
    images: list[str] = []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        text = (part.get("text") or part.get("refusal") or "") if isinstance(part, dict) else None
        if kind in _IMAGE_PARTS:
            images.append(_read_image(part, where))
            texts.append(Medium.IMAGE)
        elif kind in VIDEO_PARTS:
            images.append(_read_video(part, where))
            texts.append(Medium.VIDEO)
        elif kind not in _TEXT_PARTS or not isinstance(text, str):
            raise ValueError(f"{where}: a part of type {show(kind)} is unknown; there are text, images and videos")
        else:
            texts.append(text)
    if images and role not in ("user", "tool"):
        raise ValueError(
            f"{where}: an image or a video in a message of the role {role!r}, but the user and tools alone send them"
        )
    return {"role": role, "content": join_texts(texts)} | ({"images": images} if images else {})


def _read_image(part: JsonObject, where: str) -> str:
    """Return an image of OpenAI's or Anthropic's form as a data: URL.

    Raises:
        ValueError: it is not part of the request.
    """
    source, value = part.get("source"), part.get("image_url")
    url = value.get("url") if isinstance(value, dict) else value
    if isinstance(source, dict):
        is_data = source.get("type") == "base64"
        url = f"data:{source.get('media_type')};base64,{source.get('data')}" if is_data else source.get("url")
    url = "".join(url.split()) if isinstance(url, str) else ""
    if not is_embedded(url):
        raise ValueError(f"{where}: an image must be in the request, as base64 or a data: URL, not {url[:80]!r}")
    return url


def _read_video(part: JsonObject, where: str) -> str:
    """Return the reference of a video of OpenAI's form; it is decoded with the prompt.

    Raises:
        ValueError: it, or a frame of it, is not part of the request, or its settings are wrong.
    """
    value = next((part[name] for name in VIDEO_PARTS if part.get(name) is not None), None)
    source = value.get("url") if isinstance(value, dict) else value
    if isinstance(source, list):
        frames = [_read_image({"image_url": frame}, where) for frame in source]
        part = {**part, "type": "video", "video": frames}
    elif not isinstance(source, str) or not source.startswith("data:"):
        text = "a video must be in the request, as a data: URL or a list of such images"
        raise ValueError(f"{where}: {text}, not {show(source)}")
    try:
        return make_video_reference(part)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _read_list(body: JsonObject, name: str, *, filled: bool = False) -> list[JsonObject]:
    """Return a parameter that is a list of objects.

    Raises:
        ValueError: it is not, or is empty although it must be `filled`.
    """
    value = body.get(name) or []
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value) or (filled and not value):
        raise ValueError(f"{name} must be a list of objects{' with one at least' if filled else ''}")
    return value


def _read_tools(body: JsonObject) -> list[JsonObject]:
    """Return the functions of a request.

    Raises:
        ValueError: they are no list of objects, or too many.
    """
    tools = _read_list(body, "tools")
    if len(tools) > _MAX_TOOLS:
        raise ValueError(f"tools has {len(tools)} entries, but may have at most {_MAX_TOOLS}")
    return tools


def _check_function(function: JsonObject, where: str) -> None:
    """Check a function that the client offers.

    Raises:
        ValueError: it has no name, or a description or parameters of another type.
    """
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise ValueError(f"{where}: name is {show(name)}, but a function has a name that is a text")
    for key, kind in (("description", str), ("parameters", dict)):
        if not isinstance(function.get(key), (kind, type(None))):
            raise ValueError(f"{where}: {key} is {show(function[key])}, but must be {_KIND_NAMES[kind]}")


def _read_calls(value: object, where: str) -> list[JsonObject]:
    """Return the calls of a message of the model, in OpenAI's form; their arguments become JSON text.

    Raises:
        ValueError: one is no function with a name and arguments.
    """
    if value is None:
        return []
    if not isinstance(value, list):
        raise ValueError(f"{where} is {show(value)}, but must be a list of calls")
    calls = []
    for index, call in enumerate(value):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(f"{where}: call {index} must have a function with a name and arguments")
        arguments = function.get("arguments")
        if not isinstance(arguments, (str, dict, type(None))):
            raise ValueError(f"{where}: arguments of call {index} are {show(arguments)}, but must be JSON text or an object")
        text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
        name = {} if call.get("id") is None else {"id": _read_text(call["id"], f"{where}: id of call {index}")}
        calls.append({**call, **name, "type": "function", "function": {**function, "arguments": text}})
    return calls


def _read_text(value: object, where: str) -> str | None:
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{where} is {show(value)}, but must be a text")
    return value


def _read_option(body: JsonObject, name: str, option: str) -> object:
    """Return an entry of a parameter that is an object; None without it.

    Raises:
        ValueError: the parameter, or the entry, is of another type.
    """
    _check_kind(body.get(name), name)
    value = body[name].get(option) if isinstance(body.get(name), dict) else None
    _check_kind(value, option)
    return value


def _check_kind(value: object, name: str) -> None:
    """Raise ValueError where a parameter has a value of another type than it may have."""
    kinds = _KINDS.get(name)
    is_other = kinds is not None and (not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds))
    if kinds is not None and value is not None and is_other:
        names = " or ".join(dict.fromkeys(_KIND_NAMES[kind] for kind in kinds))
        raise ValueError(f"{name} is {show(value)}, but must be {names}")


def _read_integer(body: JsonObject, name: str, largest: int = _MAX_INTEGER) -> int | None:
    value = body.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= largest):
        raise ValueError(f"{name} is {show(value)}, but must be a whole number from 1 to {largest}")
    return value


def _read_stops(body: JsonObject, name: str) -> tuple[str, ...]:
    value = body.get(name)
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise ValueError(f"{name} is {show(value)}, but must be a text or a list of texts, none of them empty")
    if len(stops) > _MAX_STOPS or any(len(stop) > _MAX_STOP_LENGTH for stop in stops):
        raise ValueError(f"{name} may have at most {_MAX_STOPS} texts of at most {_MAX_STOP_LENGTH} characters")
    return tuple(stops)


def _read_choice(choice: object, *, parallel: bool) -> int | None:
    """Return the calls that a client accepts in a turn; None for any number.

    Raises:
        ValueError: the client demands a call.
    """
    if choice not in (None, "auto", "none"):
        raise ValueError(
            f"tool_choice is {show(choice)}, but a forced call would change the distribution that is trained; use auto"
        )
    return 0 if choice == "none" else None if parallel else 1


def _check_format(value: object, where: str) -> None:
    kind = value.get("type") if isinstance(value, dict) else value
    if kind not in (None, "text"):
        reason = "a forced format would change the distribution that is trained; use text"
        raise ValueError(f"{where} is {show(kind)}, but {reason}")


def _name_finish(reply: ChatReply) -> str:
    has_calls = any(not isinstance(call, BrokenCall) for call in reply.turn.calls)
    return "length" if not reply.ended else "tool_calls" if has_calls else "stop"


def _describe(prefix: str, kind: str, replies: Sequence[ChatReply], model: str) -> JsonObject:
    return {"id": f"{prefix}{replies[0].id}", "object": kind, "created": int(time.time()), "model": model}


def _count_tokens(replies: Sequence[ChatReply]) -> JsonObject:
    counts = {
        "prompt_tokens": len(replies[0].prompt_ids),
        "completion_tokens": sum(len(reply.token_ids) for reply in replies),
    }
    return counts | {"total_tokens": sum(counts.values())}
