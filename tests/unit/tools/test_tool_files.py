"""Tool files: their contents, and errors, which are reported before anything starts."""

import random
from pathlib import Path

import pytest
from toolboxes import COUNTER_SCHEMA, write_tool_file

from mindspeed_rl.config.errors import ConfigError
from mindspeed_rl.tools.schemas import validate_schema
from mindspeed_rl.tools.tool import CallSettings
from mindspeed_rl.tools.tool_file import build_tools, read_tools
from mindspeed_rl.tools.toolbox import truncate, truncate_characters

REPOSITORY = Path(__file__).parents[3]


def test_every_form_of_an_entry_is_read(tmp_path):
    file = write_tool_file(
        tmp_path,
        "calculator",
        "sample_tools:add",
        {"tool": "search", "config": {"retrieval_service_url": "http://x/y", "timeout": 7}},
        {
            "class_name": "sample_tools.Counter",
            "config": {"times": 1},
            "tool_schema": COUNTER_SCHEMA,
            "run_in": "process",
            "limits": {"timeout_s": 3, "retries": 1, "max_parallel": 4},
        },
        {"class_name": "verl.tools.mcp_search_tool.MCPSearchTool", "mcp": {"mcp_servers_config_path": "x.json"}},
    )
    entries = read_tools(str(file))
    assert [(entry.kind, entry.target) for entry in entries] == [
        ("tool", "calculator"),
        ("function", "sample_tools:add"),
        ("tool", "search"),
        ("class", "sample_tools.Counter"),
        ("mcp", ""),
    ]
    assert entries[2].settings.timeout_s == 7
    assert entries[3].settings == CallSettings(3, 1, 4) and entries[3].run_in == "process"
    assert entries[1].where == f"{file}:3: tools[1]"


def test_a_command_line_names_tools_or_a_file(tmp_path):
    assert [entry.target for entry in read_tools("calculator, sample_tools:add")] == ["calculator", "sample_tools:add"]
    assert [entry.target for entry in read_tools(str(write_tool_file(tmp_path, "finish")))] == ["finish"]
    with pytest.raises(ConfigError, match="tool 'calc'.*calculator"):
        read_tools("calc")


def test_the_shipped_tool_files_are_valid():
    files = sorted((REPOSITORY / "configs" / "tools").glob("*.yaml"))
    assert {file.name for file in files} >= {"retool_config.yaml", "search_tool_config.yaml", "tools_example.yaml"}
    for file in files:
        build_tools(read_tools(str(file)))


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("calculater", "no built-in tool 'calculater'; did you mean 'calculator'"),
        ({"class": "x.Y"}, "class .*unknown; did you mean 'class_name'"),
        ({"config": {}}, "one of class_name, function, tool and mcp, not none"),
        ({"tool": "finish", "function": "a:b"}, "function and tool together"),
        ({"tool": "finish", "limits": {"timeout": 3}}, "limits.timeout .*did you mean 'timeout_s'"),
        ({"tool": "finish", "limits": {"timeout_s": 0}}, "timeout_s is 0, but must be a number from 0.01"),
        ({"tool": "finish", "limits": {"retries": True}}, "retries is True"),
        ({"tool": "finish", "run_in": "thread"}, "run_in is for functions and classes"),
        ({"function": "sample_tools:add", "run_in": "treads"}, "run_in is 'treads'.*'thread'"),
        ({"mcp": {}, "tool_schema": {}}, "MCP servers bring their own"),
        (7, "tools.0. must be a mapping, not int"),
        ({"tool": "finish", "config": []}, "config must be a mapping, not list"),
    ],
)
def test_a_wrong_entry_is_told_with_file_and_line(tmp_path, entry, said):
    file = write_tool_file(tmp_path, entry)
    with pytest.raises(ConfigError, match=said) as raised:
        read_tools(str(file))
    assert str(raised.value).startswith(f"{file}:2: tools[0]")


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("sample_tools:ad", "the module 'sample_tools' has no 'ad'"),
        ("no_such_module:x", "cannot import the module 'no_such_module'"),
        ("sample_tools:FLAKY", "cannot be called"),
        ("sample_tools:undescribed", "no schema can be derived from the function"),
        ({"function": "sample_tools:add", "config": {"x": 1}}, "config.x .*unknown"),
        ({"function": "sample_tools:add", "run_in": "loop"}, "run_in is 'loop', but .* is not a coroutine function"),
        ({"function": "sample_tools:add_later", "run_in": "thread"}, "is a coroutine function"),
        ({"class_name": "sample_tools.Response"}, "has no create, execute, release"),
        ({"class_name": "sample_tools.Counter", "config": {}}, "cannot be created: AttributeError"),
        ({"class_name": "Counter"}, "not of the form"),
        ({"function": "sample_tools:add", "tool_schema": {"name": "a b"}}, "the name 'a b' must be"),
        ({"tool": "calculator", "config": {"digits": 3}}, "digits .*unknown"),
        ({"tool": "search"}, "search needs documents"),
        ({"tool": "search", "config": {"documents": "nowhere.jsonl"}}, "there is no file 'nowhere.jsonl'"),
        ({"tool": "search", "config": {"retrieval_service_url": "ftp://x"}}, "must look like http"),
        ({"tool": "code_interpreter", "config": {"memory_mib": 1}}, "memory_mib is 1, but must be a whole number from 64"),
        ({"tool": "code_interpreter", "tool_schema": {"name": "py", "parameters": {"type": "object"}}}, "a parameter 'code'"),
        ({"mcp": {"servers": {"x": {"command": "no-such-program"}}}}, "there is no program 'no-such-program'"),
        ({"mcp": {"servers": {"x": {"url": "localhost:1"}}}}, "must look like http"),
        ({"mcp": {"servers": {"x": {}}}}, "a command, which is started, or a url"),
        ({"mcp": {"servers": {"x": {"url": "http://h/", "headers": {"A": "${NO_SUCH}"}}}}}, "NO_SUCH is not set"),
        ({"mcp": {"servers": {"x": {"url": "http://h/"}}, "scope": "turn"}}, "must be one of run, trajectory"),
        ({"mcp": {"mcp_servers_config_path": "none.json"}}, "there is no file 'none.json'"),
        ({"mcp": {}}, "no servers"),
    ],
)
def test_a_tool_that_cannot_be_made_is_told_with_file_and_line(tmp_path, entry, said):
    file = write_tool_file(tmp_path, entry)
    with pytest.raises(ConfigError, match=said) as raised:
        build_tools(read_tools(str(file)))
    assert str(raised.value).startswith(f"{file}:2: tools[0]")


def test_all_mistakes_of_a_file_are_told_at_once(tmp_path):
    with pytest.raises(ConfigError) as raised:
        read_tools(str(write_tool_file(tmp_path, "a", "calculator", "b")))
    assert len(raised.value.errors) == 2


@pytest.mark.parametrize("text", ["", "- calculator", "tools: []", "tools: {}", "tools: [finish]\nmore: 1", "tools: [", "\x00"])
def test_a_file_that_is_no_tool_file_is_told(tmp_path, text):
    file = tmp_path / "tools.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match="tools.yaml"):
        read_tools(str(file))
    with pytest.raises(ConfigError, match="there is no file"):
        read_tools(str(tmp_path / "other.yaml"))


@pytest.mark.parametrize(
    "schema",
    [
        None,
        {"function": 3},
        {"type": "function", "function": {"description": "no name"}},
        {"name": "x" * 65},
        {"name": "x", "parameters": {"type": "array"}},
        {"name": "x", "parameters": {"type": "object", "properties": {"a": {"type": "txt"}}}},
    ],
)
def test_a_schema_that_is_none_is_told(schema):
    with pytest.raises(ValueError, match="here"):
        validate_schema(schema, "here")


def test_a_cut_text_has_as_many_tokens_as_it_may_and_no_more():
    def count(text):  # words, and a blank is half of one: cuts fall anywhere
        return -(-len(text.split(" ")) // 1) + text.count("y")

    rng = random.Random(0)
    for _ in range(300):
        text = "".join(rng.choice("ab y") for _ in range(rng.randrange(60)))
        limit, side = rng.randrange(1, 12), rng.choice(["left", "right", "middle"])
        shown = truncate(text, limit, side, count)
        assert shown == text if count(text) <= limit else count(shown) <= limit
        if side == "left" and shown != text:
            assert text.startswith(shown.removesuffix("...(truncated)"))
        if side == "right" and shown != text:
            assert text.endswith(shown.removeprefix("(truncated)..."))
    assert truncate("abc", 0, "left", count) == "abc"
    assert truncate("x" * 10, 3, "middle", len) == "xxx"  # no room for the mark


def test_a_reply_keeps_as_many_characters_as_verl_keeps() -> None:
    text = "".join(str(index % 10) for index in range(300))
    # verl's tool_agent_loop.py: half of the length of each side, and the mark comes on top of it; the names of ours are the
    # sides that are kept
    assert truncate_characters(text, 256, "middle") == text[:128] + "...(truncated)..." + text[-128:]
    assert truncate_characters(text, 7, "middle") == "012...(truncated)...789"
    assert truncate_characters(text, 5, "left") == "01234...(truncated)"
    assert truncate_characters(text, 5, "right") == "(truncated)...56789"
    assert truncate_characters(text, 300, "middle") == truncate_characters(text, 0, "left") == text
    assert truncate_characters("回复很长很长", 4, "middle") == "回复...(truncated)...很长"


def test_the_run_s_deadline_counts_where_the_file_says_none(tmp_path: Path) -> None:
    path = tmp_path / "tools.yaml"
    path.write_text("tools:\n  - calculator\n  - {tool: finish, limits: {timeout_s: 3}}\n")
    assert [entry.settings.timeout_s for entry in read_tools(str(path), 45.0)] == [45.0, 3.0]
    assert [entry.settings.timeout_s for entry in read_tools("calculator,finish", 45.0)] == [45.0, 45.0]
