"""Tools of a real MCP server, over stdio and over HTTP on loopback."""

import asyncio
import base64
import contextlib
import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from patience import patient
from toolboxes import call, open_toolbox

from mindspeed_rl.tools.toolbox import CallLimits

SERVER = str(Path(__file__).with_name("sample_mcp_server.py"))
STDIO = {"command": sys.executable, "args": [SERVER]}


def entry(server, **more):
    limits = {"timeout_s": more.pop("timeout_s", 20), "retries": more.pop("retries", 0)}
    return {"mcp": {"servers": {"sample": server}, **more}, "limits": limits}


def children():
    return {process.pid for process in psutil.Process().children(recursive=True)}


@contextlib.contextmanager
def http_server():
    """The address of a server that listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, SERVER, str(port)], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + patient(60)
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.kill()
        process.wait()


async def check_answers(box):
    tools = box.open({})
    assert {schema["function"]["name"] for schema in tools.schemas} >= {"add", "remember", "fail", "wait", "die"}
    replies = await tools.call(
        [
            call("add", a=2, b=3),
            call("add", a="x", b=3),
            call("fail"),
            call("draw"),
            call("remember", word="a"),
        ]
    )
    assert [reply.problem for reply in replies] == [None, "bad_arguments", "failed", None, None]
    assert replies[0].text == "5" and "fail" in replies[2].text and replies[3].text == "[image]"
    assert replies[3].images == (f"data:image/png;base64,{base64.b64encode(b'no picture').decode()}",)
    (late,) = await box.open({}).call([call("remember", word="b")])
    assert late.text == "a b"  # one server for all


def test_a_server_over_stdio_answers_and_ends_with_the_box(tmp_path):
    before = children()

    async def run():
        async with open_toolbox(tmp_path, entry(STDIO), limits=CallLimits(max_response_tokens=40)) as box:
            await check_answers(box)
            (much,) = await box.open({}).call([call("speak")])
            assert much.text == "begin" + "x" * 7 + "...(truncated)..." + "x" * 8 + "end"

    asyncio.run(asyncio.wait_for(run(), 60))
    assert children() == before


@pytest.mark.slow
def test_a_server_over_http_answers_and_hears_its_token(tmp_path):
    async def run(url):
        async with open_toolbox(tmp_path, entry({"url": url, "headers": {"X-Test": "1"}, "auth_token": "t"})) as box:
            await check_answers(box)

    with http_server() as url:
        asyncio.run(asyncio.wait_for(run(url), 60))


def test_a_late_server_and_one_that_dies_cost_their_call_only(tmp_path):
    async def run():
        async with open_toolbox(tmp_path, entry(STDIO, timeout_s=1.0)) as box:
            tools = box.open({})
            late, beside = await tools.call([call("wait"), call("add", a=1, b=1)])
            (dead,) = await tools.call([call("die")])
            (again,) = await tools.call([call("add", a=2, b=2)])  # a new one
            asked = asyncio.create_task(tools.call([call("wait")]))
            await asyncio.sleep(0.05)
            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked
            (after,) = await box.open({}).call([call("add", a=3, b=3)])
            return late, beside, dead, again, after

    before = children()
    late, beside, dead, again, after = asyncio.run(asyncio.wait_for(run(), 60))
    assert (late.problem, dead.problem) == ("timeout", "crashed")
    assert [beside.text, again.text, after.text] == ["2", "4", "6"]
    assert children() == before


def test_a_server_that_stops_replying_costs_one_limit_and_is_started_again(tmp_path):
    async def run():
        async with open_toolbox(tmp_path, entry(STDIO, timeout_s=1.0)) as box:
            tools = box.open({})
            (hung,) = await tools.call([call("hang")])
            (again,) = await tools.call([call("add", a=2, b=2)])
            (late,) = await tools.call([call("wait")])
            (word,) = await tools.call([call("remember", word="a")])
            (kept,) = await tools.call([call("remember", word="b")])
            return hung, again, late, word, kept

    hung, again, late, word, kept = asyncio.run(asyncio.wait_for(run(), 60))
    assert (hung.problem, late.problem) == ("timeout", "timeout")
    assert (again.text, word.text, kept.text) == ("4", "a", "a b")


@pytest.mark.slow
def test_a_trajectory_may_have_a_server_of_its_own(tmp_path):
    path = tmp_path / "mcp_server.json"
    path.write_text(json.dumps({"mcpServers": {"sample": {**STDIO, "prefix": "my_"}}}))
    described = {
        "class_name": "verl.tools.mcp_search_tool.MCPSearchTool",
        "mcp": {"mcp_servers_config_path": str(path), "tool_selected_list": ["my_remember"], "scope": "trajectory"},
    }

    async def run():
        async with open_toolbox(tmp_path, described) as box:
            assert children() == before  # nothing runs until a trajectory calls
            one, two = box.open({}), box.open({})
            texts = []
            for tools, word in ((one, "a"), (two, "b"), (one, "c")):
                (reply,) = await tools.call([call("my_remember", word=word)])
                texts.append(reply.text)
            (unknown,) = await one.call([call("add", a=1, b=1)])
            during = children()
            await one.close()
            ended = children()
            return texts, unknown, during, ended

    before = children()
    texts, unknown, during, ended = asyncio.run(asyncio.wait_for(run(), 60))
    assert texts == ["a", "b", "a c"] and unknown.problem == "unknown_tool"
    # each server has the process that checks its messages
    assert (len(during - before), len(ended - before)) == (4, 2)
    assert children() == before


@pytest.mark.parametrize(
    ("server", "more", "said"),
    [
        ({"command": sys.executable, "args": ["-c", "raise SystemExit(1)"]}, {}, "cannot be reached"),
        ({"command": sys.executable, "args": ["-c", "print('no JSON')"]}, {}, "cannot be reached"),
        ({"url": "http://127.0.0.1:9/mcp"}, {}, "cannot be reached"),
        (STDIO, {"tool_selected_list": ["ad"]}, "no server has the tool 'ad'; did you mean 'add'"),
    ],
)
def test_a_server_that_cannot_be_used_is_told_before_any_call(tmp_path, server, more, said):
    async def run():
        async with open_toolbox(tmp_path, entry(server, **more)):
            pass

    before = children()
    with pytest.raises(ValueError, match=said):
        asyncio.run(asyncio.wait_for(run(), 60))
    assert children() == before


@pytest.mark.slow
def test_two_servers_with_the_same_tool_need_a_prefix(tmp_path):
    async def run():
        async with open_toolbox(tmp_path, {"mcp": {"servers": {"one": STDIO, "two": STDIO}, "tool_selected_list": ["add"]}}):
            pass

    with pytest.raises(ValueError, match="one and two both have the tool 'add'; give one a prefix"):
        asyncio.run(asyncio.wait_for(run(), 60))
