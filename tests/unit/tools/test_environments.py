"""Environments of a user's own, and the endpoint that programs with a loop of their own talk to."""

import asyncio
import json

import openai
import pytest
from sample_environments import Later

from mindspeed_rl.tools.endpoint import ChatReply, ContextFullError, RecordingEndpoint
from mindspeed_rl.tools.environments import InvalidEnvironmentError, make_environment_factory
from mindspeed_rl.tools.interface import BrokenCall, ParsedTurn, ToolCall


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


# ---------------------------------------------------------------------- endpoint


class Recorded:
    """A trajectory whose model says what it is told to."""

    def __init__(self, *turns):
        self.turns, self.asked, self.speaking = list(turns), [], 0

    async def complete(self, messages, tools, max_tokens):
        self.asked.append((messages, tools, max_tokens))
        self.speaking += 1
        assert self.speaking == 1
        await asyncio.sleep(0)
        self.speaking -= 1
        if not self.turns:
            raise ContextFullError("12 tokens are used")
        turn = self.turns.pop(0)
        if isinstance(turn, Exception):
            raise turn
        return ChatReply(turn, True, [1, 2, 3], [4, 5], [-0.5, -0.25])


def talk(session, conversation):
    """Runs a conversation of OpenAI's own client with a trajectory."""

    async def run():
        endpoint = RecordingEndpoint("tiny")
        await endpoint.start()
        try:
            address = endpoint.open(session)
            async with openai.AsyncOpenAI(base_url=address, api_key="none", max_retries=0) as client:
                return await conversation(client, endpoint, address)
        finally:
            await endpoint.close()
            await endpoint.close()

    return asyncio.run(asyncio.wait_for(run(), 30))


def test_openais_client_talks_to_a_trajectory():
    call = ToolCall("add", {"a": 1, "s": "ü"}, "call00000")
    session = Recorded(ParsedTurn("Let me.", "hm", (call, BrokenCall("{", "x"))), ParsedTurn("3"))
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]

    async def conversation(client, endpoint, address):
        assert [model.id async for model in client.models.list()] == ["tiny"]
        said = [{"role": "user", "content": [{"type": "text", "text": "1 + "}, {"type": "text", "text": "2"}]}]
        first = await client.chat.completions.create(model="tiny", messages=said, tools=tools, max_tokens=7, temperature=0.3)
        said += [
            first.choices[0].message.model_dump(exclude_none=True),
            {"role": "tool", "content": "3", "tool_call_id": "call00000"},
        ]
        second = await client.chat.completions.create(model="tiny", messages=said)
        return first, second

    first, second = talk(session, conversation)
    (choice,) = first.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me.{")
    assert choice.message.reasoning_content == "hm"
    (made,) = choice.message.tool_calls
    assert (made.id, made.function.name, json.loads(made.function.arguments)) == ("call00000", "add", {"a": 1, "s": "ü"})
    assert choice.token_ids == [4, 5] and first.prompt_token_ids == [1, 2, 3]
    assert [token.logprob for token in choice.logprobs.content] == [-0.5, -0.25]
    assert (first.usage.prompt_tokens, first.usage.completion_tokens) == (3, 2)
    assert second.choices[0].finish_reason == "stop"
    assert session.asked[0] == ([{"role": "user", "content": "1 + 2"}], tools, 7)
    assert session.asked[1][0][-1]["content"] == "3" and session.asked[1][2] is None


def test_turns_of_one_trajectory_come_one_after_the_other_and_others_beside_them():
    session = Recorded(*[ParsedTurn(str(number)) for number in range(8)])

    async def conversation(client, endpoint, address):
        asked = [{"role": "user", "content": "x"}]
        made = await asyncio.gather(*(client.chat.completions.create(model="tiny", messages=asked) for _ in range(8)))
        return sorted(reply.choices[0].message.content for reply in made)

    assert talk(session, conversation) == [str(number) for number in range(8)]


def test_what_cannot_be_answered_is_told_in_openais_form():
    session = Recorded(ValueError("the template cannot write this"), RuntimeError("engine"))

    async def conversation(client, endpoint, address):
        said = [{"role": "user", "content": "x"}]
        picture = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
        found = []
        for words in ({}, {}, {}, {"n": 2}, {"stream": True}, {"messages": picture}, {"max_tokens": 0}, {"messages": []}):
            with pytest.raises(openai.APIStatusError) as raised:
                await client.chat.completions.create(**{"model": "tiny", "messages": said} | words)
            found.append((raised.value.status_code, raised.value.code, str(raised.value)))
        with pytest.raises(openai.NotFoundError):
            await client.embeddings.create(model="tiny", input="x")
        with pytest.raises(openai.NotFoundError):
            await client.with_options(base_url=address[:-8] + "XXXXX/v1").models.list()
        endpoint.remove(address)
        with pytest.raises(openai.NotFoundError, match="has ended"):
            await client.chat.completions.create(model="tiny", messages=said)
        return found

    found = talk(session, conversation)
    assert [status for status, _, _ in found] == [400, 500, 400, 400, 400, 400, 400, 400]
    assert "cannot write this" in found[0][2] and "engine" in found[1][2]
    assert found[2][1] == "context_length_exceeded" and "maximum context length" in found[2][2]
