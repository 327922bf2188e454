"""Environments of a user's own."""

import asyncio

import pytest
from sample_environments import Later

from mindspeed_rl.tools.environments import InvalidEnvironmentError, make_environment_factory


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
