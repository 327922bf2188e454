"""Calls of a local sandbox with arguments and files that a model may invent: a reply in time, nothing outside is touched."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
from patience import patient
from toolboxes import call, open_toolbox

from mindspeed_rl.tools.interface import ToolCall, ToolReply

#: things in the folder of a sample that are not plain files
SETUP = (
    "mkdir -p d/e; mkfifo fifo; ln -s /etc/passwd passwd; ln -s loop loop; ln -s /dev/zero zero; ln -s {outside} out; "
    "ln -s nothing gone; truncate -s 3G sparse; printf 'a\\nb\\n' > plain; printf '\\377\\376\\0' > bytes; ln plain hard; "
    "ln -s d dlink; echo x > 'a b'; echo x > -n; chmod 000 d/e; "
    "python3 -c \"import socket; socket.socket(socket.AF_UNIX).bind('sock')\""
)
NAMES = (
    *("fifo", "passwd", "loop", "zero", "out", "out/canary", "gone", "sparse", "plain", "bytes", "hard", "dlink/new", "sock"),
    *(
        "a b",
        "-n",
        "d",
        "d/e/x",
        "",
        ".",
        "..",
        "/",
        "~",
        "~root",
        "../x",
        "d/../../x",
        "./plain",
        "plain/",
        "plain/x",
        "//plain",
    ),
    *(
        "a\0b",
        "\ud800",
        "x" * 300,
        "d/" * 300 + "x",
        "/proc/self/environ",
        "/proc/1/mem",
        "/dev/stdin",
        "/etc/shadow",
        "new",
        "é",
    ),
    *("*", "$HOME", "`id`", "\n", "con", "{outside}/canary", "{outside}/new"),
)
TEXTS = ("", "a", "a\nb", "x" * 200_000, "\0", "\ud800", "\u202e", "\r\n", "é" * 1000, "$(id)", "`", "'\"")
COMMANDS = (
    *(
        "true",
        "false",
        "",
        "\0",
        "\ud800",
        "exit 300",
        "kill -9 $$",
        "cat plain",
        "cat < fifo &",
        "yes | head -c 300000",
        "x" * 200_000,
    ),
    *(
        "'",
        "((",
        "echo $(",
        "exec 1>&-; echo x",
        "exec 2>&1 >/dev/null; ls nothing",
        "trap '' TERM; true",
        "cd /; ls",
        "ulimit -v 1; ls",
    ),
    *(
        "printf '\\033[2J\\000\\377'",
        "rm -rf d/e",
        "mkdir -p d/e",
        "setsid sleep 9 >/dev/null 2>&1 &",
        "cat {outside}/canary > got",
    ),
)
ODD: tuple[Any, ...] = (None, True, 0, -1, 1.5, 10**30, [], ["x"], {}, {"a": 1})


def make_call(at: random.Random, outside: Path) -> ToolCall:
    """A call with arguments of the right types, now and then of others, or with one too many or too few."""

    def pick(values: tuple[str, ...]) -> Any:
        return at.choice(ODD) if at.random() < 0.05 else at.choice(values).replace("{outside}", str(outside))

    name = at.choice(("run", "read", "read", "write", "write", "edit", "nothing"))
    arguments: dict[str, Any] = {
        "run": lambda: {"command": pick(COMMANDS)},
        "read": lambda: {"path": pick(NAMES)},
        "write": lambda: {"path": pick(NAMES), "content": pick(TEXTS)},
        "edit": lambda: {"path": pick(NAMES), "old": pick(TEXTS), "new": pick(TEXTS)},
        "nothing": lambda: {},
    }[name]()
    if at.random() < 0.05:
        arguments[at.choice(("more", "", "path", "timeout"))] = at.choice(ODD)
    if arguments and at.random() < 0.05:
        arguments.pop(at.choice(list(arguments)))
    return call(name, arguments)


def try_calls(folder: Path, seed: int, count: int) -> list[tuple[ToolCall, ToolReply]]:
    at, outside, tools = random.Random(seed), folder / "outside", folder / "tools"
    outside.mkdir()
    tools.mkdir()
    (outside / "canary").write_text("as it was")
    entry = {"tool": "sandbox", "config": {"providers": ["local"]}, "limits": {"timeout_s": patient(4)}}

    async def run() -> list[tuple[ToolCall, ToolReply]]:
        async with open_toolbox(tools, entry) as box:
            results = []
            for _ in range(count // 50):
                session = box.open({})
                await session.call([call("run", command=SETUP.replace("{outside}", str(outside)))])
                for _ in range(50):
                    made = make_call(at, outside)
                    (reply,) = await session.call([made])
                    results.append((made, reply))
                (sound,) = await session.call([call("run", command="echo sound")])
                assert sound.text == "sound"
                await session.close()
            return results

    results = asyncio.run(asyncio.wait_for(run(), patient(60 + count)))
    assert [path.name for path in outside.iterdir()] == ["canary"] and (outside / "canary").read_text() == "as it was"
    return results


def check_calls(results: list[tuple[ToolCall, ToolReply]]) -> None:
    for made, reply in results:
        assert reply.problem in (None, "bad_arguments", "unknown_tool", "failed", "crashed"), (made, reply)
        # tracebacks are a command's; the limits are from docs/agents.md
        limit = 1 << 17 if made.name == "run" else 1 << 20
        assert len(reply.text) <= limit and (made.name == "run" or "Traceback" not in reply.text), (made, reply)
        # a file outside is neither shown nor written
        if made.name != "run":
            assert "root:" not in reply.text and "as it was" not in reply.text, (made, reply)
    assert {reply.problem for _, reply in results} >= {None, "failed", "unknown_tool"}


def test_calls_that_a_model_may_invent(tmp_path: Path) -> None:
    check_calls(try_calls(tmp_path, 1, 300))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 6))
def test_more_calls_that_a_model_may_invent(tmp_path: Path, seed: int) -> None:
    check_calls(try_calls(tmp_path, seed, 300))
