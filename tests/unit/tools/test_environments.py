"""Environments of a user's own."""

import asyncio
import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from aiohttp import web
from sample_environments import Later

from mindspeed_rl.tools.environments import InvalidEnvironmentError, make_environment_factory
from mindspeed_rl.tools.openenv import OpenEnvError


def test_an_environment_of_plain_methods_is_played():
    async def play():
        environment = make_environment_factory("sample_environments:Countdown")()
        said = await environment.reset({"from": 2})
        first = await environment.step([*said, {"role": "assistant", "content": "1"}])
        second = await environment.step([{"role": "assistant", "content": "5"}])
        await environment.close()
        return said, first, second

    said, first, second = asyncio.run(play())
    assert [message["role"] for message in said] == ["system", "user"]
    assert first == ([{"role": "user", "content": "go on"}], 1.0, False)
    assert second == ([], 0.0, True)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("nothing", "must return .messages, reward or None, done., not None"),
        ("pair", "must return .messages, reward or None, done."),
        ("reward", "the reward must be a number or None, not '1'"),
        ("done", "done must be True or False, not 1"),
        ("idle", "neither new messages nor the end"),
        ("robot", "a role of system, user, assistant, tool"),
        ("hang", "step took longer than 0.1 s"),
    ],
)
def test_what_an_environment_does_wrong_is_told(answer, said):
    async def play():
        environment = make_environment_factory("sample_environments:Later", timeout_s=0.1)()
        assert await environment.reset({}) == [{"role": "user", "content": "begin"}]
        assert (await environment.step([{"role": "assistant", "content": "text"}]))[0] == [{"role": "user", "content": "text"}]
        try:
            await environment.step([{"role": "assistant", "content": answer}])
        finally:
            await environment.close()

    closed = Later.closed
    with pytest.raises(InvalidEnvironmentError, match=said):
        asyncio.run(play())
    assert Later.closed == closed + 1


def test_a_blocking_environment_holds_up_nobody_else_and_its_own_errors_pass():
    async def play():
        ticks = 0

        async def tick():
            nonlocal ticks
            while True:
                await asyncio.sleep(0.01)
                ticks += 1

        ticking = asyncio.create_task(tick())
        await make_environment_factory("sample_environments:Sleepy")().reset({})
        ticking.cancel()
        assert ticks > 5
        with pytest.raises(InvalidEnvironmentError, match="reset took longer than 0.05 s"):
            await make_environment_factory("sample_environments:Sleepy", timeout_s=0.05)().reset({})
        with pytest.raises(KeyError, match="no key"):
            await make_environment_factory("sample_environments:Later")().step([{"role": "assistant", "content": "raise"}])

    asyncio.run(play())


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("sample_environments:Stepless", "has no step"),
        ("sample_environments:Nobody", "has no 'Nobody'"),
        ("sample_environments:asyncio", "cannot create an environment"),
        ("nowhere:X", "cannot import the module 'nowhere'"),
        ("Countdown", "not of the form"),
    ],
)
def test_a_wrong_environment_is_told_by_name(target, said):
    with pytest.raises(ValueError, match=said) as raised:
        make_environment_factory(target)
    assert str(raised.value).startswith("rl_config.environment")


# ---------------------------------------------------------------------- OpenEnv's protocol


async def countdown(request):
    """A session of OpenEnv's protocol: the model counts down from the row's number."""
    socket = web.WebSocketResponse()
    await socket.prepare(request)
    left = None
    async for message in socket:
        data = json.loads(message.data)
        if data["type"] == "close":
            break
        if data["type"] == "reset":
            left = data["data"]["start"]
        elif data["data"].get("say") is None or data["data"]["game"] != "down":
            await socket.send_json({"type": "error", "data": {"message": "Invalid message", "code": "VALIDATION_ERROR"}})
            continue
        right = data["type"] == "step" and data["data"]["say"] == str(left)
        left -= right
        reward = float(right) if data["type"] == "step" else None
        await socket.send_json(
            {"type": "observation", "data": {"observation": {"next": f"say {left}"}, "reward": reward, "done": left == 0}}
        )
    request.app["closed"].append(left)
    return socket


def test_an_environment_of_openenvs_protocol_has_a_session_for_each_sample():
    async def play(url, closed):
        args = {"action": "say", "constants": {"game": "down"}, "observation": "next", "reset": ["start"], "system": "Count."}
        make = make_environment_factory(f"openenv:{url}", args)
        first, second = make(), make()
        said = [await first.reset({"start": 2}), await second.reset({"start": 1})]
        for environment, text in ((second, "1"), (first, "3"), (first, "2"), (first, "1")):
            said.append(await environment.step([{"role": "assistant", "content": text}]))
        await first.close()
        await second.close()
        whole = make_environment_factory(f"openenv:{url}/ws", {"action": "", "reset": ["start"]})()
        said.append(await whole.reset({"start": 5}))
        said.append(await whole.step([{"role": "assistant", "content": "5"}]))
        with pytest.raises(OpenEnvError, match="replied to step: .*Invalid message"):
            await whole.step([{"role": "assistant", "content": '{"game": "down"}'}])
        await whole.close()
        with pytest.raises(OpenEnvError, match="no column start"):
            lost = make()
            try:
                await lost.reset({})
            finally:
                await lost.close()
        return said

    async def run():
        app = web.Application()
        app["closed"] = []
        app.router.add_get("/ws", countdown)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            return await play(f"http://127.0.0.1:{runner.addresses[0][1]}", app["closed"]), app["closed"]
        finally:
            await runner.cleanup()

    said, closed = asyncio.run(asyncio.wait_for(run(), 30))
    system = {"role": "system", "content": "Count."}
    assert said[:2] == [[system, {"role": "user", "content": f"say {start}"}] for start in (2, 1)]
    assert said[2:6] == [
        ([], 1.0, True),
        ([{"role": "user", "content": "say 2"}], 0.0, False),
        ([{"role": "user", "content": "say 1"}], 1.0, False),
        ([], 1.0, True),
    ]
    assert (
        said[6] == [{"role": "user", "content": '{"next": "say 5"}'}] and "must be one JSON object" in said[7][0][0]["content"]
    )
    assert sorted(closed, key=str) == [0, 0, 5, None]
    with pytest.raises(ValueError, match="must look like openenv:http://host:port, with args of action, constants"):
        make_environment_factory("openenv:localhost:8000")


OPENENV = Path(sys.prefix, "openenv", "bin", "python")
#: an environment of the library, served by the library
ECHO = """
import sys
import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

class Say(Action):
    message: str

class Heard(Observation):
    echoed: str = ""

class Echo(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._state = State(episode_id="", step_count=0)

    def reset(self, seed=None, episode_id=None, **words):
        self._state = State(episode_id=episode_id or "", step_count=0)
        return Heard(echoed=f"seed {seed}", done=False, reward=None)

    def step(self, action, timeout_s=None, **words):
        self._state.step_count += 1
        return Heard(echoed=action.message, done=self._state.step_count == 2, reward=float(len(action.message)))

    @property
    def state(self):
        return self._state

uvicorn.run(create_fastapi_app(Echo, Say, Heard, max_concurrent_envs=4), port=int(sys.argv[1]), log_level="warning")
"""


@pytest.mark.slow
@pytest.mark.skipif(not OPENENV.exists(), reason="there is no Python with openenv-core here: bash envs/cpu/extras.sh")
def test_an_environment_of_the_openenv_library_is_played(tmp_path):
    (tmp_path / "echo.py").write_text(ECHO)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([OPENENV, tmp_path / "echo.py", str(port)])

    async def run():
        environments = []
        for seed in (3, 4):
            for _ in range(300):
                environment = make_environment_factory(
                    f"openenv:http://127.0.0.1:{port}", {"observation": "echoed", "reset": ["seed"]}
                )()
                try:
                    environments.append((environment, await environment.reset({"seed": seed})))
                    break
                except OpenEnvError:
                    await environment.close()
                    await asyncio.sleep(0.2)
        played = [[said] for _, said in environments]
        for text in ("ab", "c"):
            for (environment, _), found in zip(environments, played):
                found.append(await environment.step([{"role": "assistant", "content": text}]))
        for environment, _ in environments:
            await environment.close()
        return played

    try:
        played = asyncio.run(asyncio.wait_for(run(), 90))
    finally:
        server.kill()
        server.wait()
    for seed, found in zip((3, 4), played, strict=True):
        assert found == [
            [{"role": "user", "content": f"seed {seed}"}],
            ([{"role": "user", "content": "ab"}], 2.0, False),
            ([], 1.0, True),
        ]
