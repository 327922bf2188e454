"""How tool schemas and function calls are written into a conversation: one style a class, chosen by `tool_format`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from mindspeed_rl.data.conversation import ToolCall


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    return tool.get("function", tool)


class DefaultTools:
    """Plain text for models without a tool format of their own: `Action:` and `Action Input:` lines."""

    def schemas(self, tools: Sequence[dict[str, Any]]) -> str:
        """Text that follows the system prompt."""
        listing = "\n".join(_json(_function(tool)) for tool in tools)
        names = ", ".join(_function(tool)["name"] for tool in tools)
        return (
            f"\n\nThese tools can be called, one JSON schema a line:\n{listing}\n\n"
            f"To call a tool, reply with these two lines and stop:\nAction: <one of: {names}>\nAction Input: <its arguments as JSON>\n"
        )

    def calls(self, calls: Sequence[ToolCall]) -> str:
        """Text of the assistant's calls."""
        return "\n".join(f"Action: {call.name}\nAction Input: {_json(call.arguments)}" for call in calls)


class QwenTools:
    """Qwen 2.5 and 3: schemas in <tools>, each call in <tool_call>, as their own chat templates have it."""

    def schemas(self, tools: Sequence[dict[str, Any]]) -> str:
        listing = "\n".join(_json(tool) for tool in tools)
        return (
            "\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
            "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
            f"{listing}\n</tools>\n\n"
            "For each function call, return a json object with function name and arguments within "
            "<tool_call></tool_call> XML tags:\n"
            '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
        )

    def calls(self, calls: Sequence[ToolCall]) -> str:
        texts = (_json({"name": call.name, "arguments": call.arguments}) for call in calls)
        return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts)


class Glm4Tools:
    """GLM-4 and ChatGLM3: a Chinese tool section in the system turn, `name\\narguments` as the call."""

    def schemas(self, tools: Sequence[dict[str, Any]]) -> str:
        sections = []
        for tool in tools:
            function = _function(tool)
            body = json.dumps(function, ensure_ascii=False, indent=4)
            sections.append(f"\n\n## {function['name']}\n\n{body}\n在调用上述函数时，请使用 Json 格式表示调用的参数。")
        return "\n\n# 可用工具" + "".join(sections)

    def calls(self, calls: Sequence[ToolCall]) -> str:
        if len(calls) > 1:
            raise ValueError("GLM-4's tool format holds one call a turn")
        return f"{calls[0].name}\n{_json(calls[0].arguments)}"


class Llama3Tools:
    """Llama 3.1: a JSON object `{"name": ..., "parameters": ...}` as the call; one a turn."""

    def schemas(self, tools: Sequence[dict[str, Any]]) -> str:
        listing = "\n\n".join(json.dumps(tool, ensure_ascii=False, indent=4) for tool in tools)
        return (
            "\n\nYou have access to the following functions. To call a function, please respond with JSON for a function call. "
            'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}. '
            f"Do not use variables.\n\n{listing}\n\n"
        )

    def calls(self, calls: Sequence[ToolCall]) -> str:
        if len(calls) > 1:
            raise ValueError("Llama 3's tool format holds one call a turn")
        return _json({"name": calls[0].name, "parameters": calls[0].arguments})


class MistralTools:
    """Mistral v3 and later: schemas in [AVAILABLE_TOOLS] before the user's turn, calls in [TOOL_CALLS]."""

    def schemas(self, tools: Sequence[dict[str, Any]]) -> str:
        return f"[AVAILABLE_TOOLS] {_json(list(tools))}[/AVAILABLE_TOOLS]"

    def calls(self, calls: Sequence[ToolCall]) -> str:
        return "[TOOL_CALLS] " + _json([{"name": call.name, "arguments": call.arguments} for call in calls])


class Glm4MoeTools:
    """GLM-4.5: schemas in <tools>, arguments as <arg_key>/<arg_value> pairs."""

    def schemas(self, tools: Sequence[dict[str, Any]]) -> str:
        listing = "\n".join(_json(tool) for tool in tools)
        return (
            "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
            "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
            f"{listing}\n</tools>\n\n"
            "For each function call, output the function name and arguments within the following XML format:\n"
            "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value>{arg-value-1}</arg_value>\n"
            "<arg_key>{arg-key-2}</arg_key>\n<arg_value>{arg-value-2}</arg_value>\n...\n</tool_call>"
        )

    def calls(self, calls: Sequence[ToolCall]) -> str:
        texts = []
        for call in calls:
            pairs = "".join(
                f"<arg_key>{key}</arg_key>\n<arg_value>{value if isinstance(value, str) else _json(value)}</arg_value>\n"
                for key, value in call.arguments.items()
            )
            texts.append(f"<tool_call>{call.name}\n{pairs}</tool_call>")
        return "\n".join(texts)


TOOL_STYLES = {
    "default": DefaultTools(),
    "qwen": QwenTools(),
    "qwen3": QwenTools(),
    "glm4": Glm4Tools(),
    "glm4_moe": Glm4MoeTools(),
    "llama3": Llama3Tools(),
    "mistral": MistralTools(),
}


def tool_style(name: str) -> DefaultTools | QwenTools | Glm4Tools | Glm4MoeTools | Llama3Tools | MistralTools:
    """Look up a tool format.

    Raises:
        ValueError: unknown name.
    """
    if name not in TOOL_STYLES:
        near = get_close_matches(name, TOOL_STYLES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"tool_format={name!r} is unknown; there are {', '.join(TOOL_STYLES)}{hint}")
    return TOOL_STYLES[name]
