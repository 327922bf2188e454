"""What models, programs and services send is bounded before it is worked on."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
from toolboxes import call, open_toolbox

from mindspeed_rl.isolation.variables import expand_variables, select_variables
from mindspeed_rl.tools.argument_checks import ArgumentChecks
from mindspeed_rl.tools.commands import run_command
from mindspeed_rl.tools.mcp_relay import find_excess
from mindspeed_rl.tools.sandbox_interface import SandboxError
from mindspeed_rl.tools.schemas import ArgumentSchema, find_problem, validate_schema
from mindspeed_rl.tools.service_replies import parse_object, read_field, read_name, read_process_events
from mindspeed_rl.tools.tool import ToolError

NEST = "import os, time\nfor _ in range(600): os.mkdir('d'); os.chdir('d')\ntime.sleep(9)"
ENV = {"PATH": os.environ["PATH"]}


def run(command: str, folder: Path, **more: Any) -> dict[str, Any]:
    return json.loads(run_command(["/bin/sh", "-c", command], str(folder), ENV, 20.0, **more).text)


def test_the_end_of_an_output_stays_and_the_rest_is_counted(tmp_path: Path) -> None:
    code = f"{sys.executable} -c \"print('x' * 3_000_000, 'end'); import sys; print('short', file=sys.stderr)\""
    ended = run(code, tmp_path)
    dropped = 3_000_005 - (1 << 16)  # with a space, the word and a line break
    assert ended["output"].startswith(f"(the first {dropped:,} bytes of the output are left out)\nxxx")
    assert ended["output"].endswith("x end\n") and ended["errors"] == "short\n" and ended["status"] == 0
    assert run("echo a; echo b >&2; exit 3", tmp_path, merge=True) == {"status": 3, "output": "a\nb\n", "errors": ""}


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("i=0; while :; do i=$((i+1)); head -c 2000000 /dev/zero > f$i; done", "its files take more than 8 MiB"),
        (f'{sys.executable} -c "{NEST}"', "folders are nested more than 500 deep"),
    ],
    ids=["bytes", "depth"],
)
def test_a_command_that_fills_the_disk_is_ended_by_name(command: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ToolError, match=reason):
        run(command, tmp_path, disk_bytes=8 << 20)
    # what is there may be removed
    assert run("rm -rf f* d; ls", tmp_path, disk_bytes=1 << 20)["output"] == ""


def test_one_file_ends_at_the_room_of_all(tmp_path: Path) -> None:
    ended = run("head -c 50000000 /dev/zero > f; stat -c %s f", tmp_path, disk_bytes=4 << 20)
    assert int(ended["output"].split()[-1]) <= 4 << 20


def test_commands_get_the_variables_of_a_list_and_those_that_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = "AWS_SECRET_ACCESS_KEY DATABASE_URL http_proxy HTTPS_PROXY WANDB_API_KEY HF_TOKEN PGPASSWORD NETRC COOKIE".split()
    for name in secrets:
        monkeypatch.setenv(name, "planted")
    selected = select_variables(os.environ)
    assert "planted" not in selected.values() and selected["PATH"] == os.environ["PATH"]
    assert expand_variables({"A": "x-${HF_TOKEN}"}, "here") == {"A": "x-planted"}
    with pytest.raises(ValueError, match=r"here\.A: the environment variable NO_SUCH_ONE is not set"):
        expand_variables({"A": "${NO_SUCH_ONE}"}, "here")


def test_a_sandbox_has_no_secret_of_the_run_in_its_own_environment_or_that_of_its_parents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLANTED_TOKEN", "planted-secret")
    grandparent = "/proc/$(ps -o ppid= -p $PPID | tr -d ' ')/environ"
    look = f"env; cat /proc/$PPID/environ {grandparent} | tr '\\0' '\\n'"

    async def use() -> list[str]:
        texts = []
        for more in ({}, {"env": {"GIVEN": "${PLANTED_TOKEN}"}}):
            entry = {"tool": "sandbox", "config": {"providers": [{"provider": "local", **more}]}}
            async with open_toolbox(tmp_path, entry) as box:
                tools = box.open({})
                texts.append((await tools.call([call("run", command=look)]))[0].text)
                await tools.close()
        return texts

    plain, given = asyncio.run(use())
    assert "PATH=" in plain and "planted-secret" not in plain
    assert given.count("planted-secret") == 1 and "GIVEN=planted-secret" in given


def frame(value: object, flags: int = 0) -> bytes:
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    return struct.pack(">BI", flags, len(body)) + body


def data(text: bytes) -> bytes:
    return frame({"event": {"data": {"stdout": base64.b64encode(text).decode()}}})


END = frame({"event": {"end": {"exitCode": 3}}}) + frame({}, 2)


def test_events_of_a_command_are_joined() -> None:
    assert read_process_events(data(b"a") + frame({}) + data(b"b") + END, "here") == (3, b"ab")
    late = frame({"error": {"code": "deadline_exceeded"}}, 2)
    assert read_process_events(data(b"a") + late, "here") == (None, b"a")
    assert read_process_events(data(b"x" * 3000) * 2000 + END, "here") == (3, b"x" * 6_000_000)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "ended before the command"),
        (b"\0\0", "ends within a frame"),
        (b"\0\xff\xff\xff\xff{}", "ends within a frame"),
        (frame(b"abc"), "is not JSON"),
        (frame([]), "is not an object"),
        (frame({"event": []}), r"event is '\[\]', but must be an object"),
        (frame({"event": {"data": []}}) + END, r"data is '\[\]'|ended"),
        (frame({"event": {"data": {"stdout": 3}}}) + END, "stdout is '3', but must be a text"),
        (frame({"event": {"data": {"stdout": "@@@"}}}) + END, "is not base64"),
        (frame({"event": {"end": {"exitCode": "x"}}}), "exitCode is 'x', but must be a whole number"),
        (frame({"event": {"end": {"exitCode": True}}}), "must be a whole number"),
        (frame({"event": {"end": []}}), "end is"),
        (frame({"error": "boom"}, 2), "error is 'boom'"),
        (frame({"error": {"message": "no"}}, 2), "here: no"),
        (frame(b"[" * 100_000), "nested too deeply"),
        (frame(b"{}") * 250_001, "more than 250,000 frames"),
    ],
)
def test_malformed_events_are_one_sentence(body: bytes, reason: str) -> None:
    with pytest.raises(SandboxError, match=reason):
        read_process_events(body, "here")


@pytest.mark.parametrize("value", [None, 3, [], "", "../a", "a@b", "a b", "a//b", "x" * 300, "a\n"])
def test_names_of_sandboxes_are_plain(value: object) -> None:
    with pytest.raises(SandboxError, match="the reply of here: id is"):
        read_name({"id": value}, "id", "here")
    assert read_name({"id": "i-1_a.b:c"}, "id", "here") == "i-1_a.b:c"


def test_replies_with_too_many_values_are_not_parsed_and_passwords_not_shown() -> None:
    with pytest.raises(SandboxError, match="more than 2,000,000 values"):
        parse_object(b'{"a": [' + b"0," * 2_500_000 + b"0]}", "here")
    with pytest.raises(SandboxError) as raised:
        read_field({}, "id", str, "http://user:pass@host/a?api_key=abc&b=1")
    assert "pass" not in str(raised.value) and "abc" not in str(raised.value) and "@host/a" in str(raised.value)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (b'{"a": 1}', None),
        (b"a line of a log [" + b"[" * 500, None),
        (json.dumps({"text": ",[{" * 100_000}).encode(), None),
        (json.dumps({"values": list(range(19_000))}).encode(), None),
        (json.dumps({"values": list(range(20_001))}).encode(), "more than 20,000 values"),
        (b'{"a":' * 189 + b"1" + b"}" * 189, None),
        (b'{"a":' * 300 + b"1" + b"}" * 300, "nested more than 190 deep"),
        (b"[" * 100_000, "nested more than 190 deep"),
        (b"x" * ((16 << 20) + 1), "more than 16,777,216 bytes"),
        (b"0," * 2_100_000, "more than 20,000 values"),
    ],
)
def test_messages_of_an_mcp_server_have_limits(message: bytes, reason: str | None) -> None:
    found = find_excess(message)
    assert found is None if reason is None else found is not None and reason in found


def function(parameters: dict[str, Any]) -> dict[str, Any]:
    return {"name": "f", "parameters": {"type": "object", **parameters}}


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        ({"properties": {"a": {"$ref": "http://127.0.0.1:9/x"}}}, "must not leave the schema"),
        ({"properties": {"a": {"description": "x" * 300_000}}}, "as JSON, but at most 262,144 fit"),
        ({"properties": {"a": {"type": "nothing"}}}, "are not a JSON schema"),
        ({"properties": {"a": {"pattern": "a{99999999999}"}}}, "are not a JSON schema"),
    ],
)
def test_schemas_that_cannot_be_used_are_refused(parameters: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        validate_schema(function(parameters), "here")
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(80):
        deep = {"type": "object", "properties": {"a": deep}}
    with pytest.raises(ValueError, match="nested more than 64 deep"):
        validate_schema(function({"properties": {"a": deep}}), "here")


def test_checks_are_quick_only_without_costly_keywords_and_for_few_values() -> None:
    plain = ArgumentSchema(validate_schema(function({"properties": {"a": {"type": "array"}}}), "here"))
    assert plain.is_quick({"a": [1, 2]}) and not plain.is_quick({"a": list(range(20_000))})
    for keyword in ({"pattern": "a"}, {"$ref": "#/properties/b"}, {"uniqueItems": True}):
        costly = ArgumentSchema(validate_schema(function({"properties": {"a": keyword, "b": {}}}), "here"))
        assert costly.is_costly and not costly.is_quick({})
    assert find_problem(function({"properties": {"a": {"$ref": "#/no"}}})["parameters"], {"a": 1}) is not None
    endless = {"type": "object", "properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"$ref": "#/$defs/b"}}}
    assert find_problem(endless, {"a": 1}) == "the arguments are nested too deeply"
    assert "cannot be checked" in (find_problem({"properties": {"a": {"multipleOf": 0.1}}}, {"a": 10**400}) or "")
    assert "not a regular expression" in (find_problem({"properties": {"a": {"pattern": "("}}}, {"a": "x"}) or "")


def test_a_pattern_without_end_costs_its_call_only() -> None:
    schema = function({"properties": {"a": {"type": "string", "pattern": "^(a+)+$"}}, "required": ["a"]})

    async def use() -> list[str | None]:
        checks, parsed = ArgumentChecks(), ArgumentSchema(validate_schema(schema, "here"))
        await checks.start()
        try:
            texts = ["aaa", "b", "a" * 60 + "!"]
            return list(await asyncio.gather(*(checks.find_problem(parsed, {"a": text}, 2.0) for text in texts)))
        finally:
            await checks.close()

    fine, wrong, endless = asyncio.run(use())
    assert fine is None and wrong == "argument a: 'b' does not match '^(a+)+$'"
    assert endless is not None and "the check took longer than 2 s and was ended" in endless
