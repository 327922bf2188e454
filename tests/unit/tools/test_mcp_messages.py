"""Replies of MCP servers with one field changed: a call has a result or a problem, and the next one works."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest
from patience import patient
from toolboxes import call, open_toolbox

from mindspeed_rl.tools.interface import ToolReply

HERE = Path(__file__).parent


def entry(place: str, seed: int) -> dict[str, object]:
    env = {"PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])}
    server = {"command": sys.executable, "args": [str(HERE / "mutating_mcp_server.py"), place, str(seed)], "env": env}
    return {"mcp": {"servers": {"s": server}}, "limits": {"timeout_s": patient(2)}}


def try_calls(folder: Path, seeds: range, count: int) -> list[ToolReply]:
    """Replies to calls whose results are changed, twenty at a time at a server per seed; after each twenty, a sound one."""

    async def run(seed: int) -> list[ToolReply]:
        own = folder / str(seed)
        own.mkdir()
        async with open_toolbox(own, entry("call", seed)) as box:
            tools, replies = box.open({}), []
            for _ in range(count // 20):
                replies += await tools.call([call("changed")] * 20)
                (sound,) = await tools.call([call("sound")])
                assert sound.text == "ok\n[image]\n[resource]" and sound.problem is None
            return replies

    async def run_all() -> list[ToolReply]:
        return [reply for replies in await asyncio.gather(*map(run, seeds)) for reply in replies]

    return asyncio.run(asyncio.wait_for(run_all(), patient(300)))


def check_replies(replies: list[ToolReply]) -> None:
    for reply in replies:
        assert isinstance(reply.text, str) and len(reply.text) < 5000 and "Traceback" not in reply.text
        assert reply.problem in (None, "failed", "crashed", "timeout"), reply
    assert {reply.problem for reply in replies} >= {None, "failed"}


def try_servers(folder: Path, place: str, seeds: range) -> None:
    """Servers whose list of tools, or whose first reply, is changed: their tools work, or one sentence says why not."""
    refused = 0
    for seed in seeds:

        async def run(seed: int = seed) -> None:
            async with open_toolbox(folder, entry(place, seed)) as box:
                (reply,) = await box.open({}).call([call("sound")])
                assert reply.problem in (None, "bad_arguments", "failed", "unknown_tool"), reply

        try:
            asyncio.run(asyncio.wait_for(run(), patient(100)))
        except ValueError as error:
            refused += 1
            assert str(folder) in str(error) and len(str(error)) < 1000 and "\n" not in str(error), error
    assert refused


def test_a_changed_result_costs_its_call_only(tmp_path: Path) -> None:
    check_replies(try_calls(tmp_path, range(10, 25), 20))


@pytest.mark.slow
def test_other_changed_results_cost_their_calls_only(tmp_path: Path) -> None:
    check_replies(try_calls(tmp_path, range(2, 10), 100))


def test_changed_tools_of_a_server_are_used_or_refused_by_name(tmp_path: Path) -> None:
    try_servers(tmp_path, "list", range(8))


@pytest.mark.slow
@pytest.mark.parametrize("place", ["list", "start"])
def test_other_changed_servers_are_used_or_refused_by_name(tmp_path: Path, place: str) -> None:
    try_servers(tmp_path, place, range(100, 160))
