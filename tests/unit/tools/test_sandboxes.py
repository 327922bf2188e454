"""Sandboxes: every provider does the same, one that fails is replaced, and nothing stays."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from docker_standin import make_command
from patience import patient
from sandbox_services import Services, serve
from toolboxes import call, open_toolbox

from mindspeed_rl.config.errors import ConfigError
from mindspeed_rl.tools.option_reader import OptionReader
from mindspeed_rl.tools.sandboxes import PROVIDERS, Provider, SandboxError, SandboxPool

SERVICES: dict[str, dict[str, Any]] = {
    "sandbox_fusion": {},
    "e2b": {"sandbox_url": "URL/{id}", "key_env": "TEST_SANDBOX_KEY"},
    "daytona": {"key_env": "TEST_SANDBOX_KEY"},
}


#: an interpreter with the clients that the services publish
CLIENTS = Path(sys.prefix, "sandboxes", "bin", "python")


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TEST_SANDBOX_KEY", "secret")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def with_provider(name: str, use: Callable[[Provider, Services], Awaitable[Any]], **options: Any) -> Any:
    """What `use` returns for a provider, next to the services."""

    async def run() -> Any:
        services = Services()
        async with serve(services) as url:
            if name in SERVICES:
                options.update({"url": url} | {key: str(value).replace("URL", url) for key, value in SERVICES[name].items()})
            provider = PROVIDERS[name](OptionReader(options, "here"), "here")
            await provider.open()
            try:
                return await use(provider, services)
            finally:
                await provider.close()

    return asyncio.run(asyncio.wait_for(run(), 120))


def find_containers() -> dict[str, Any]:
    """Options of a program that runs containers here and has the image; none where there is none."""
    for program in filter(shutil.which, ("docker", "podman")):
        inspect = [program, "image", "inspect", "python:3.11"]
        if subprocess.run(inspect, capture_output=True, timeout=60, check=False).returncode == 0:
            return {"program": program, "image": "python:3.11"}
    return {}


@pytest.mark.parametrize("name", ["local", *SERVICES, "container"])
def test_every_provider_runs_reads_writes_and_stops(name: str, tmp_path: Path) -> None:
    options = find_containers() if name == "container" else {}
    if name == "container" and not options:
        pytest.skip("no docker or podman here has the image python:3.11")

    async def use(provider: Provider, services: Services) -> list[Any]:
        sandbox, other = await asyncio.gather(provider.start(), provider.start())
        await sandbox.write("src/a b.py", "print('ü', 6 * 7)\n".encode())
        ran = await sandbox.run("python3 'src/a b.py' > out.txt; cat out.txt; echo wrong >&2; exit 3", 20.0)
        late = await sandbox.run("echo begun; sleep 60", 1.0)
        kept = await sandbox.run("ls; ls src", 20.0)
        with pytest.raises(SandboxError):
            await other.read("src/a b.py")
        found = [ran, late.status, kept.output.split("\n"), await sandbox.read("out.txt"), await sandbox.read("src/a b.py")]
        await sandbox.stop()
        await other.stop()
        return [*found, dict(services.folders)]

    ran, late, kept, out, source, left = with_provider(name, use, **options)
    assert ran.status == 3 and sorted(ran.output.split()) == ["42", "wrong", "ü"]
    assert late == 124 and [line for line in kept if line] == ["out.txt", "src", "a b.py"]
    assert out.decode() == "ü 42\n" and source.decode() == "print('ü', 6 * 7)\n"
    assert not left and not list(tmp_path.glob("sandbox-*"))


@pytest.mark.parametrize(
    "program", ["docker", *(pytest.param(name, marks=pytest.mark.slow) for name in ("podman", "apptainer"))]
)
def test_containers_are_started_used_and_removed_by_commands(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_command(tmp_path, program)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    image = "docker://python:3.11" if program == "apptainer" else "python:3.11"

    async def use(provider: Provider, services: Services) -> list[Any]:
        sandbox, other = await asyncio.gather(provider.start(), provider.start())
        await sandbox.write("src/a b.py", "print('ü', 6 * 7)\n".encode())
        ran = await sandbox.run("python3 'src/a b.py' > out.txt; cat out.txt; echo wrong >&2; exit 3", 20.0)
        late = await sandbox.run("echo begun; sleep 60", 1.0)
        with pytest.raises(SandboxError, match="'src/a b.py' cannot be read"):
            await other.read("src/a b.py")
        if program == "apptainer":
            with pytest.raises(SandboxError, match="apptainer has no snapshots"):
                await sandbox.snapshot()
        else:
            copy = await provider.start(await sandbox.snapshot())
            assert await copy.read("out.txt") == "ü 42\n".encode()
            await copy.stop()
        await sandbox.stop()
        with pytest.raises(SandboxError, match="cannot be written"):
            await sandbox.write("late.txt", b"")
        await other.stop()
        return [ran, late.status]

    ran, late = with_provider("container", use, program=program, image=image, memory_mib=512, lifetime_s=60)
    assert ran.status == 3 and sorted(ran.output.split()) == ["42", "wrong", "ü"] and late == 124
    assert not list((tmp_path / "boxes").iterdir()) and not list((tmp_path / "images").iterdir())
    started = json.loads((tmp_path / "calls.jsonl").read_text().splitlines()[0])
    limit = "512M" if program == "apptainer" else "512m"
    assert started[started.index("--memory") + 1] == limit and "none" in started
    with pytest.raises(SandboxError, match=f"{program} does not start python:0.*Unable to find image"):
        with_provider("container", lambda provider, _: provider.start(), program=program, image="python:0")


@pytest.mark.parametrize("name", ["local", "sandbox_fusion", "e2b", "daytona", "container"])
def test_a_snapshot_begins_another_sandbox_or_is_refused(name: str) -> None:
    async def use(provider: Provider, services: Services) -> tuple[bytes, bytes]:
        sandbox = await provider.start()
        await sandbox.write("a.txt", b"1")
        snapshot = await sandbox.snapshot()
        await sandbox.write("a.txt", b"2")
        other = await provider.start(snapshot)
        try:
            return await sandbox.read("a.txt"), await other.read("a.txt")
        finally:
            await sandbox.stop()
            await other.stop()

    if name == "daytona":
        with pytest.raises(SandboxError, match="has no snapshots"):
            with_provider(name, use)
    elif name == "container" and not find_containers():
        pytest.skip("no docker or podman here has the image python:3.11")
    else:
        assert with_provider(name, use, **(find_containers() if name == "container" else {})) == (b"2", b"1")


@pytest.mark.slow
@pytest.mark.skipif(not CLIENTS.exists(), reason="there is no Python with the services' clients here: bash envs/cpu/extras.sh")
def test_the_published_clients_send_what_the_providers_send() -> None:
    """The clients of E2B, Daytona and SandboxFusion work with the stand-in services, by the same requests."""

    async def use_clients() -> tuple[dict[str, Any], Services]:
        services = Services()
        async with serve(services) as url:
            process = await asyncio.create_subprocess_exec(
                str(CLIENTS), str(Path(__file__).with_name("service_clients.py")), url, stdout=asyncio.subprocess.PIPE
            )
            output, _ = await process.communicate()
            assert process.returncode == 0
            return json.loads(output), services

    async def use(provider: Provider, services: Services) -> list[tuple[str, str, tuple[str, ...]]]:
        sandbox = await provider.start()
        await sandbox.write("a.txt", b"one\n")
        await sandbox.run("cat a.txt", 20.0)
        await sandbox.read("a.txt")
        if type(sandbox).__name__ == "_E2bSandbox":
            await sandbox.snapshot()
        await sandbox.stop()
        return services.requests

    found, services = asyncio.run(asyncio.wait_for(use_clients(), 120))
    assert {tuple(one) for one in found.values()} == {(3, "one\nwrong\n", "one\n")} and not services.folders
    known: dict[tuple[str, str], set[str]] = {}
    for method, path, names in services.requests:
        known.setdefault((method, path), set()).update(names)
    # the client polls the state by another path, and downloads by one that can take several files
    own = {("GET", "/sandbox/{id}"), ("GET", "/proxy/{id}/files/download")}
    for name in SERVICES:
        for method, path, names in with_provider(name, use):
            # SandboxFusion's server reads the limit of memory; its published client does not have it
            own_names = set(names) - {"memory_limit_MB"}
            assert (method, path) in own or known[method, path] >= own_names, (name, method, path)


def test_a_local_command_has_limits_of_memory_and_no_network_and_leaves_no_process() -> None:
    async def use(provider: Provider, services: Services) -> list[Any]:
        sandbox = await provider.start()
        large = await sandbox.run("python3 -c 'bytearray(1 << 29)'", 30.0)
        net = await sandbox.run("cat /proc/net/dev | grep -v -e Inter -e face -e lo: | wc -l", 30.0)
        await sandbox.run("sleep 4321 & setsid sleep 4321 & echo", 30.0)
        with pytest.raises(SandboxError, match="outside of the sandbox"):
            await sandbox.read("../../etc/passwd")
        deadline = time.monotonic() + patient(10)
        while (left := subprocess.run(["pgrep", "-f", "sleep 4321"], capture_output=True, check=False).stdout) and (
            time.monotonic() < deadline
        ):
            await asyncio.sleep(0.1)
        await sandbox.stop()
        return [large, net, left]

    large, net, left = with_provider("local", use, memory_mib=256)
    assert large.status == 1 and "MemoryError" in large.output
    assert net.output.strip() == "0" or os.geteuid() != 0
    assert not left


def test_a_provider_that_fails_is_named_and_the_next_one_is_used(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> list[Any]:
        services = Services(has_v2=False)
        async with serve(services) as url:
            dead = {"provider": "daytona", "url": "http://127.0.0.1:9", "key_env": "TEST_SANDBOX_KEY"}
            e2b = {"provider": "e2b", "url": url, "sandbox_url": f"{url}/{{id}}", "key_env": "TEST_SANDBOX_KEY"}
            pool = SandboxPool.read([dead, e2b, "local"], 2, "here")
            await pool.start()
            try:
                used = await asyncio.gather(*(pool.acquire() for _ in range(3)))
                kinds = {type(sandbox).__name__ for sandbox in used}
                await asyncio.gather(*(pool.release(sandbox) for sandbox in used))
            finally:
                await pool.close()
            alone = SandboxPool.read([dead], 0, "here")
            with pytest.raises(
                SandboxError, match=r"no provider can start a sandbox: daytona: http://127.0.0.1:9/sandbox: Client"
            ):
                await alone.acquire()
            await alone.close()
            return [kinds, dict(services.folders), services.started]

    with caplog.at_level(logging.WARNING):
        kinds, left, started = asyncio.run(asyncio.wait_for(run(), 60))
    assert kinds == {"_E2bSandbox"} and not left and 3 <= started <= 7
    assert any("the sandbox provider daytona failed: http://127.0.0.1:9" in text for text in caplog.messages)


def test_a_failure_while_sandboxes_are_started_ahead_is_heard(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wrong(Provider):
        """A provider with a mistake in its code."""

        async def start(self, snapshot: str = "") -> Any:
            raise KeyError("lost")

    monkeypatch.setitem(PROVIDERS, "wrong", Wrong)

    async def run() -> None:
        pool = SandboxPool.read(["wrong"], 1, "here")
        await pool.start()
        await asyncio.sleep(0.01)
        await pool.close()

    with caplog.at_level(logging.ERROR):
        asyncio.run(run())
        gc.collect()
    assert caplog.messages == ["no sandbox is started ahead: KeyError: 'lost'"]


BROKEN = "def add(a, b):\n    return a - b\n"
TESTS = "from calc import add\nassert add(2, 3) == 5\n"


@pytest.mark.parametrize("fixes", [True, False])
def test_the_tool_reads_edits_runs_and_grades(tmp_path: Path, fixes: bool) -> None:
    entry = {
        "tool": "sandbox",
        "config": {
            "functions": ["read", "edit", "run"],
            "commands": {"run_tests": "python3 tests.py"},
            "setup": "git init -q . 2>/dev/null; test -f calc.py",
            "grader": "python3 tests.py",
            "warm": 1,
        },
    }
    row = {
        "create_kwargs": {"files": {"calc.py": BROKEN, "tests.py": TESTS}},
        "calc_reward_kwargs": {"files": {"tests.py": TESTS}},
    }

    async def run() -> tuple[list[Any], float | None, list[str]]:
        async with open_toolbox(tmp_path, entry) as box:
            tools = box.open({"tools_kwargs": dict.fromkeys(("run", "read"), row)})
            names = [schema["function"]["name"] for schema in tools.schemas]
            calls = [
                call("run_tests"),
                call("read", path="calc.py"),
                call("edit", path="calc.py", old="a / b", new="a + b"),
                *([call("edit", path="calc.py", old="a - b", new="a + b")] if fixes else []),
                call("run", command="echo 'assert True' > tests.py; ls"),
            ]
            return [await tools.call([one]) for one in calls], await tools.close(), names

    replies, reward, names = asyncio.run(asyncio.wait_for(run(), 60))
    texts = [reply.text for (reply,) in replies]
    assert names == ["run", "read", "edit", "run_tests"]
    assert "AssertionError" in texts[0] and "(exit status 1)" in texts[0] and texts[1].strip() == BROKEN.strip()
    assert replies[2][0].failed and "0 times in calc.py" in texts[2]
    # the tests that the model wrote do not count
    assert reward == float(fixes)


def test_a_sample_without_a_call_is_graded_too(tmp_path: Path) -> None:
    async def run() -> float | None:
        async with open_toolbox(tmp_path, {"tool": "sandbox", "config": {"grader": "test -f nothing"}}) as box:
            return await box.open({}).close()

    assert asyncio.run(asyncio.wait_for(run(), 60)) == 0.0


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"providers": ["dokcer"]}, "providers[0].provider is 'dokcer'"),
        ({"providers": [{"provider": "e2b", "key": "x"}]}, "providers[0].key (value 'x') is unknown"),
        ({"providers": [{"provider": "container"}]}, "providers[0] needs image"),
        ({"providers": [{"provider": "sandbox_fusion"}]}, "providers[0] needs url"),
        ({"functions": ["delete"]}, "the functions of a sandbox are run, read, write, edit"),
    ],
)
def test_a_wrong_sandbox_is_found_before_the_run(tmp_path: Path, config: dict[str, Any], said: str) -> None:
    async def run() -> None:
        async with open_toolbox(tmp_path, {"tool": "sandbox", "config": config}):
            pass

    with pytest.raises(ConfigError) as raised:
        asyncio.run(run())
    assert said in str(raised.value)


def test_the_interpreter_runs_at_the_server_that_its_entry_names(tmp_path: Path) -> None:
    async def run() -> list[str]:
        async with serve(Services()) as url:
            entry = {
                "tool": "code_interpreter",
                "config": {"sandbox_fusion_url": f"{url}/run_code"},
                "limits": {"timeout_s": 5},
            }
            async with open_toolbox(tmp_path, entry) as box:
                tools = box.open({})
                codes = ["import os\nx = 6\nprint(os.getpid())", "x * 7", "1 / 0", "while True: pass"]
                return [(await tools.call([call("code_interpreter", code=code)]))[0].text for code in codes]

    first, second, third, fourth = asyncio.run(asyncio.wait_for(run(), 60))
    assert first.isdigit() and second == "42" and "ZeroDivisionError" in third and "took longer than 5 s" in fourth
