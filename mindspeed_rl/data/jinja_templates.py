"""Chat templates of this package as Jinja: an exported model is prompted as it was trained, by any engine.

transformers writes with such a template the text of `Template.render`, for conversations of a system prompt, questions and
answers, with thoughts where the template has them. Tools have no form here: the exported template refuses them in one sentence,
as it refuses roles that do not alternate.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from mindspeed_rl.data.conversation import Conversation, MalformedRowError, assistant, user
from mindspeed_rl.data.messages import THOUGHT_KEYS
from mindspeed_rl.data.templates import Field, Format, HfTemplate, Template, Thinking, Token, join_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: conversations by which two templates are compared; each ends with a question, so that a prompt is written
_SAMPLES = (
    Conversation([user("What is 2 + 3?")]),
    Conversation([user("What is 2 + 3?")], system="Be brief."),
    Conversation([user("Hi"), assistant("Hello."), user("And 7 * 8?")]),
)
_INDEX = "(loop.index0 // 2)"


def write_jinja(template: Template, thinking: Thinking = "none") -> str:
    """Write a template as Jinja.

    Args:
        thinking: what holds where a request does not set `enable_thinking`: as in training.
    """
    lines = [
        "{%- if tools %}{{- raise_exception('this chat template was trained without tools') }}{%- endif %}",
        "{%- set turns = messages %}",
        f"{{%- set system = {_quote(template.default_system)} %}}",
        "{%- if messages and messages[0].role == 'system' %}",
        "{%- set system = messages[0].content or '' %}{%- set turns = messages[1:] %}",
        "{%- endif %}",
        *_write_start(template),
        *(_write_thinking(template, thinking) if template.can_think else ()),
        "{%- for message in turns %}",
        "{%- set content = message.content or '' %}",
        "{%- if content is not string %}{{- raise_exception('this chat template has texts only') }}{%- endif %}",
        "{%- if message.role != ('assistant' if loop.index0 % 2 else 'user') or message.tool_calls %}",
        "{{- raise_exception('messages of user and assistant must alternate, without tool calls, after a system prompt') }}",
        "{%- endif %}",
        "{%- if message.role == 'user' %}",
        *_write_question(template),
        "{%- else %}",
        *_write_answer(template),
        "{%- endif %}",
        "{%- endfor %}",
    ]
    return "\n".join(lines)


def renders_alike(template: Template, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return True where the tokenizer's own chat template writes the prompts that the template writes."""
    try:
        other = HfTemplate(tokenizer)
    except ValueError:
        return False
    names = {"bos_token": str(tokenizer.bos_token or ""), "eos_token": str(tokenizer.eos_token or "")}

    def write(by: Template | HfTemplate, conversation: Conversation) -> str:
        parts = [part for turn in by.render(conversation).turns for part in (*turn.source, *turn.target)]
        return join_text([Token(names.get(part.name, part.name)) if isinstance(part, Token) else part for part in parts])

    try:
        return all(write(template, conversation) == write(other, conversation) for conversation in _SAMPLES)
    except MalformedRowError:  # it refuses what the template writes
        return False


def _quote(text: str) -> str:
    """Return a text as a literal of Jinja."""
    return json.dumps(text)


def _write(parts: Format, content: str) -> str:
    """Return the output of slots, with an expression for their content."""
    return "{{- " + " ~ ".join(["''", *(_express(part, content) for part in parts.parts)]) + " }}"


def _express(part: str | Token | Field, content: str) -> str:
    if isinstance(part, Field):
        return {"content": content, "idx": _INDEX}[part.name]
    if isinstance(part, Token):
        return part.name if part.name in ("bos_token", "eos_token") else _quote(part.name)
    return _quote(part)


def _write_start(template: Template) -> list[str]:
    lines = [_write(template.prefix, "''")]
    if template.efforts:
        lines.append(f"{{%- set efforts = {json.dumps(template.efforts)} %}}")
        lines.append("{{- efforts.get(reasoning_effort, '') if reasoning_effort else '' }}")
    written = _write(template.system, "system")
    if template.system_in_user:
        written = "{%- set lead = " + written.removeprefix("{{- ").removesuffix(" }}") + " %}"
        lines.append("{%- set lead = '' %}")
    always = "true" if template.force_system else "system"
    return [*lines, f"{{%- if {always} %}}{written}{{%- endif %}}"]


def _write_thinking(template: Template, thinking: Thinking) -> list[str]:
    """Write the setting, and the index of the last question, before which thoughts may be left out."""
    is_question = "message.role == 'user'"
    if template.tool_format == "qwen":
        text = "(message.content or '')"
        is_question += f" and not ({text}.startswith('<tool_response>') and {text}.endswith('</tool_response>'))"
    return [
        f"{{%- set thinking = '{thinking}' %}}",
        "{%- if enable_thinking is defined %}{%- set thinking = 'true' if enable_thinking else 'false' %}{%- endif %}",
        "{%- set last = namespace(question=0) %}",
        "{%- for message in turns %}",
        f"{{%- if {is_question} %}}{{%- set last.question = loop.index0 %}}{{%- endif %}}",
        "{%- endfor %}",
    ]


def _write_question(template: Template) -> list[str]:
    lines = []
    if template.separator.parts:
        lines.append("{%- if not loop.first %}" + _write(template.separator, "''") + "{%- endif %}")
    if template.system_in_user:
        lines.append("{%- if loop.first %}{%- set content = lead ~ content %}{%- endif %}")
    if template.thinking_off_suffix and template.can_think:
        suffix = _quote(template.thinking_off_suffix)
        lines += [
            f"{{%- if thinking == 'false' and not content.endswith({suffix}) %}}",
            f"{{%- set content = content ~ {suffix} %}}{{%- endif %}}",
        ]
    lines.append(_write(template.user, "content"))
    if template.can_think:
        # as the sources of training end
        empty, others = _quote(template.thought_empty), "''"
        if template.thought_in_source:
            others = f"({_quote(template.thought_words[0])} if thinking == 'true' else {empty})"
        lines.append(f"{{%- if loop.last %}}{{{{- {empty} if thinking == 'false' else {others} }}}}{{%- endif %}}")
    return lines


def _write_answer(template: Template) -> list[str]:
    lines = _write_thought(template) if template.can_think else []
    last, earlier = _write(template.assistant, "content"), _write(template.earlier, "content")
    return [*lines, last if last == earlier else f"{{%- if loop.last %}}{last}{{%- else %}}{earlier}{{%- endif %}}"]


def _write_thought(template: Template) -> list[str]:
    """Write the thought of an answer, from a key or its text, and leave the rest of its text in `content`."""
    keys = " or ".join(f"message.{key}" for key in THOUGHT_KEYS)
    lines = [f"{{%- set thought = {keys} or '' %}}", "{%- set found = false %}"]
    for first, last in template.thought_marks:
        opened, closed = _quote(first), _quote(last)
        lines += [
            f"{{%- if not found and {closed} in content %}}",
            f"{{%- set head = content.split({closed})[0] %}}",
            f"{{%- if head.lstrip().startswith({opened}) or (not thought and {opened} not in head) %}}",
            "{%- set found = true %}",
            f"{{%- set content = content[(head ~ {closed})|length:].lstrip('\\n') %}}",
            f"{{%- if head.lstrip().startswith({opened}) %}}",
            f"{{%- set head = head.lstrip()[{opened}|length:] %}}",
            "{%- endif %}",
            "{%- set thought = thought or head.strip('\\n') %}",
            "{%- endif %}{%- endif %}",
        ]
    empty = _quote(template.thought_empty)
    if template.drop_thinking:
        empty = f"({empty} if loop.last else {_quote(template.thought_earlier)})"
    mode = "('false' if loop.index0 < last.question else thinking)" if template.drop_thinking else "thinking"
    opening, closing = map(_quote, template.thought_words)
    lines += [
        f"{{%- set empty = {empty} %}}{{%- set mode = {mode} %}}",
        "{%- set is_empty = mode == 'false' or (not thought and (mode != 'true' or not empty)) %}",
    ]
    if template.strip_answers == "blanks":
        lines.append("{%- set thought = thought.strip() %}{%- set content = content.strip() %}")
    elif template.strip_answers:
        lines += [
            "{%- if not (is_empty and not empty) %}",
            "{%- set thought = thought.strip('\\n') %}{%- set content = content.lstrip('\\n') %}{%- endif %}",
        ]
    return [*lines, f"{{{{- empty if is_empty else {opening} ~ thought ~ {closing} }}}}"]
