"""Text of tool schemas and function calls in a conversation: one class a style, chosen by `tool_format`."""

from __future__ import annotations

import json
from collections.abc import Sequence

from mindspeed_rl import registry
from mindspeed_rl.data.conversation import JsonObject, ToolCall


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


class _ToolStyle:
    """A tool format. This one is for models that have none: `Action:` and `Action Input:` lines."""

    def schemas(self, tools: Sequence[JsonObject]) -> str:
        """Return the text that follows the system prompt."""
        functions = [tool.get("function", tool) for tool in tools]
        listing = "\n".join(_json(function) for function in functions)
        names = ", ".join(function["name"] for function in functions)
        return (
            f"\n\nThese tools can be called, one JSON schema a line:\n{listing}\n\n"
            "To call a tool, reply with these two lines and stop:\n"
            f"Action: <one of: {names}>\nAction Input: <its arguments as JSON>\n"
        )

    def calls(self, calls: Sequence[ToolCall]) -> str:
        """Return the text of the assistant's calls.

        Raises:
            ValueError: more calls in one turn than the format holds.
        """
        return "\n".join(f"Action: {call.name}\nAction Input: {_json(call.arguments)}" for call in calls)


class _QwenTools(_ToolStyle):
    """Qwen 2.5 and 3: schemas in <tools>, each call in <tool_call>, as in their chat templates."""

    def schemas(self, tools: Sequence[JsonObject]) -> str:
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


class _Glm4Tools(_ToolStyle):
    r"""GLM-4 and ChatGLM3: a Chinese tool section in the system turn, `name\narguments` as the call."""

    def schemas(self, tools: Sequence[JsonObject]) -> str:
        sections = []
        for tool in tools:
            function = tool.get("function", tool)
            body = json.dumps(function, ensure_ascii=False, indent=4)
            sections.append(f"\n\n## {function['name']}\n\n{body}\n在调用上述函数时，请使用 Json 格式表示调用的参数。")
        return "\n\n# 可用工具" + "".join(sections)

    def calls(self, calls: Sequence[ToolCall]) -> str:
        if len(calls) > 1:
            raise ValueError("GLM-4's tool format holds one call a turn")
        return f"{calls[0].name}\n{_json(calls[0].arguments)}"


class _Llama3Tools(_ToolStyle):
    """Llama 3.1: a JSON object `{"name": ..., "parameters": ...}` as the call; one a turn."""

    def schemas(self, tools: Sequence[JsonObject]) -> str:
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


class _Glm4MoeTools(_ToolStyle):
    """GLM-4.5: schemas in <tools>, arguments as <arg_key>/<arg_value> pairs."""

    def schemas(self, tools: Sequence[JsonObject]) -> str:
        listing = "\n".join(_json(tool) for tool in tools)
        return (
            # no blank line in front: this text is a separate turn (tools_before_system)
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


class _DeepSeek4Tools(_ToolStyle):
    """DeepSeek-V4: schemas after the system text, calls in DSML markup."""

    def schemas(self, tools: Sequence[JsonObject]) -> str:
        listing = "\n".join(_json(tool.get("function", tool)) for tool in tools)
        return (
            "\n\n## Tools\n\nYou have access to a set of tools to help answer the user's question. "
            'You can invoke tools by writing a "<｜DSML｜tool_calls>" block like the following:\n\n'
            '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="$TOOL_NAME">\n'
            '<｜DSML｜parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜parameter>\n...\n'
            '</｜DSML｜invoke>\n<｜DSML｜invoke name="$TOOL_NAME2">\n...\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>\n\n'
            'String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, '
            'arrays, objects), pass the value in JSON format and set `string="false"`.\n\n'
            "If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning "
            "inside <think>...</think> BEFORE any tool calls or final response.\n\n"
            "Otherwise, output directly after </think> with tool calls or final response.\n\n"
            f"### Available Tool Schemas\n\n{listing}\n\n"
            "You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.\n"
        )

    def calls(self, calls: Sequence[ToolCall]) -> str:
        blocks = []
        for call in calls:
            parameters = "\n".join(
                f'<｜DSML｜parameter name="{key}" string="{"true" if isinstance(value, str) else "false"}">'
                f"{value if isinstance(value, str) else _json(value)}</｜DSML｜parameter>"
                for key, value in call.arguments.items()
            )
            blocks.append(f'<｜DSML｜invoke name="{call.name}">\n{parameters}\n</｜DSML｜invoke>')
        return "\n\n<｜DSML｜tool_calls>\n" + "\n".join(blocks) + "\n</｜DSML｜tool_calls>"


_TOOL_STYLES: dict[str, _ToolStyle] = {
    "default": _ToolStyle(),
    "qwen": _QwenTools(),
    "qwen3": _QwenTools(),
    "glm4": _Glm4Tools(),
    "glm4_moe": _Glm4MoeTools(),
    "llama3": _Llama3Tools(),
    "deepseek4": _DeepSeek4Tools(),
}


def get_tool_style(name: str) -> _ToolStyle:
    """Look up a tool format.

    Raises:
        ValueError: unknown name.
    """
    if name not in _TOOL_STYLES:
        hint = registry.did_you_mean(name, _TOOL_STYLES)
        raise ValueError(f"tool_format={name!r} is unknown; there are {', '.join(_TOOL_STYLES)}{hint}")
    return _TOOL_STYLES[name]
