"""Programs that ask for turns: what they say is told, what was drawn stays, and whatever they do ends no run."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_agent_loops import CALL, END, PROMPT, SAMPLING, TOKENIZER, Speaker, settings, told
from test_in_process import Stepped

from mindspeed_rl.data.templates import load_template
from mindspeed_rl.data.turns import ChatTurns
from mindspeed_rl.rollout.agents import load_agent_loop
from mindspeed_rl.rollout.agents.conversation import AgentConversation, TrajectoryLimits
from mindspeed_rl.rollout.agents.loop import AgentRunner, Task
from mindspeed_rl.rollout.agents.program import _TokenSession
from mindspeed_rl.rollout.in_process import InProcessEngine
from mindspeed_rl.rollout.requests import Completion
from mindspeed_rl.rollout.trajectory import Trajectory
from mindspeed_rl.tools.endpoint import ContextFullError

STANDIN = Path(__file__).parents[1] / "tools" / "verifiers_standin"
ALONE = ChatTurns(load_template("qwen"), TOKENIZER)
QUESTION = [{"role": "user", "content": "6 times 7?"}]
CALCULATOR = [
    {
        "type": "function",
        "function": {"name": "calculator", "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}}},
    }
]


@pytest.fixture
def with_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(STANDIN))


def played(folder: Path, rows: Sequence[dict[str, Any]], *texts: str, **more: Any) -> list[Trajectory]:
    """Episodes of the stand-in's environment beside each other, each with a speaker of its own."""
    file = folder / "guess.yaml"
    file.write_text(yaml.safe_dump({"environment": "verifiers:guess", "args": {"number": 2}, **more}))

    async def run() -> list[Trajectory]:
        agents = AgentRunner(load_agent_loop("environment")(settings(turns=ALONE, environment=str(file))))
        await agents.start()
        try:
            tasks = [Task(PROMPT, SAMPLING, 5, "2", row) for row in rows]
            return list(await asyncio.gather(*(agents.sample(Speaker(texts), task) for task in tasks)))
        finally:
            await agents.close()

    return asyncio.run(asyncio.wait_for(run(), 180))


def test_an_episode_is_a_trajectory_with_the_programs_reward(with_library: None, tmp_path: Path) -> None:
    found = played(tmp_path, [{"prompt": QUESTION, "example_id": number} for number in range(3)], "1", "2")
    for one in found:
        (sequence,) = one.sequences
        assert sequence.prompt_ids == ALONE.render(QUESTION)
        assert TOKENIZER.decode(one.token_ids[:2]) == "1<|im_end|>" and "No." in told(one)
        assert one.final_reward == 0.5 and one.finish == "stop" and not one.failure
        assert one.metrics == {"turns": 2.0, "environment_turns": 2.0}
        drawn = [token for token, is_drawn in zip(one.token_ids, one.sampled) if is_drawn]
        assert TOKENIZER.decode(drawn) == "1<|im_end|>2<|im_end|>"


def test_what_a_program_does_wrong_fails_its_own_sample(with_library: None, tmp_path: Path) -> None:
    (late,) = played(tmp_path, [{"prompt": "hang"}], "2", timeout_s=0.5)
    assert "the episode took longer than 0.5 s" in late.failure
    without, good = played(tmp_path, [{}, {"prompt": QUESTION}], "2")
    assert "no column 'prompt'" in without.failure and "dataset_additional_keys" in without.failure
    assert good.final_reward == 1.0 and not good.failure


class Stubborn(Stepped):
    """Stands where vLLM's engine does, and says 1 whatever it is told."""

    def check_prompt_length(self, num_tokens: int) -> None:
        pass

    def step(self) -> list[tuple[str, Completion]]:
        self.steps.append(len(self._running))
        ended = []
        for name, (*_, tokens) in list(self._running.items()):
            tokens.append(END if tokens else TOKENIZER.encode("1")[0])
            if len(tokens) == 2:
                ended.append((name, Completion(list(tokens), [-1.0, -1.0], truncated=False)))
                del self._running[name]
        return ended


def test_rollouts_of_a_training_worker_are_played_one_after_the_other(with_library: None, tmp_path: Path) -> None:
    file = tmp_path / "guess.yaml"
    file.write_text(yaml.safe_dump({"environment": "verifiers:guess", "args": {"number": 2}}))
    stepped: Any = Stubborn()
    host = InProcessEngine(stepped)
    agents = AgentRunner(load_agent_loop("environment")(settings(turns=ALONE, environment=str(file))))
    host.run_without_steps(agents.start)

    async def rollout() -> list[Trajectory]:
        tasks = [Task(PROMPT, SAMPLING, seed, "2", {"prompt": QUESTION}) for seed in range(4)]
        return list(await asyncio.gather(*(agents.sample(host, task) for task in tasks)))

    for _ in range(2):
        found = host.run(rollout)
        assert found is not None
        # three turns, none of them right, and two tokens a turn
        assert [one.final_reward for one in found] == [pytest.approx(1 / 3)] * 4
        assert all(sum(one.sampled) == 6 and one.metrics["turns"] == 3 and not one.failure for one in found)
    host.run_without_steps(agents.close)
    host._loop.close()
    assert sum(stepped.steps) == 2 * 4 * 3 * 2 and all(stepped.steps)  # no step without work


def session_with(*texts: str, limits: TrajectoryLimits | None = None) -> tuple[_TokenSession, AgentConversation, Speaker]:
    engine = Speaker(texts)
    common = settings(turns=ALONE, **({} if limits is None else {"limits": limits}))
    conversation = AgentConversation(PROMPT, SAMPLING, 5, engine, common.turns, TOKENIZER, common.limits)
    return _TokenSession(conversation, common), conversation, engine


def test_what_a_client_writes_otherwise_changes_no_token() -> None:
    session, conversation, engine = session_with(f"Let me see.  {CALL}", " It is 42. ")

    async def talk() -> list[Any]:
        first = await session.complete(QUESTION, CALCULATOR, None)
        (call,) = first.turn.calls
        said = {
            "role": "assistant",
            "content": "Let me see.",
            # blanks in the arguments, and another id
            "tool_calls": [
                {"id": "x", "type": "function", "function": {"name": call.name, "arguments": '{"expression":  "6*7"}'}}
            ],
        }
        reply = {"role": "tool", "tool_call_id": "x", "content": "42"}
        return [first, await session.complete([*QUESTION, said, reply], CALCULATOR, None)]

    first, second = asyncio.run(talk())
    found = conversation.end()
    (sequence,) = found.sequences
    assert first.turn.content.strip() == "Let me see." and first.turn.calls[0].arguments == {"expression": "6*7"}
    assert engine.asked[1].startswith(engine.asked[0] + f"Let me see.  {CALL}<|im_end|>") and "42" in told(found)
    assert second.turn.content.strip() == "It is 42." and list(second.prompt_ids) == TOKENIZER.encode(engine.asked[1])
    # the prompt tells of the client's tools
    assert '"calculator"' in TOKENIZER.decode(list(sequence.prompt_ids))


def test_a_client_that_changes_what_was_said_begins_another_sequence() -> None:
    session, conversation, _ = session_with("41", "42")

    async def talk() -> None:
        await session.complete(QUESTION, [], None)
        changed = [{"role": "user", "content": "7 times 6?"}, {"role": "assistant", "content": "41"}, *QUESTION]
        await session.complete(changed, [], None)

    asyncio.run(talk())
    found = conversation.end()
    first, second = found.sequences
    assert first.segments[0].token_ids == (*TOKENIZER.encode("41"), END)
    assert "7 times 6?" in TOKENIZER.decode(list(second.prompt_ids)) and all(found.sampled)


def test_a_trajectory_without_room_and_a_turn_of_the_models_own_are_refused() -> None:
    session, conversation, _ = session_with("41", limits=TrajectoryLimits(100, 1000, 4000, max_turns=1))

    async def talk() -> None:
        with pytest.raises(ValueError, match="the last message is the model's"):
            await session.complete([*QUESTION, {"role": "assistant", "content": "4"}], [], None)
        cut = await session.complete(QUESTION, [], 1)
        assert not cut.ended and len(cut.token_ids) == 1
        with pytest.raises(ContextFullError):
            await session.complete([*QUESTION, {"role": "assistant", "content": "4"}, *QUESTION], [], None)

    asyncio.run(talk())
    assert conversation.end().finish == "length"


def test_a_turn_that_is_being_drawn_ends_with_its_episode() -> None:
    class Stuck(Speaker):
        async def generate(self, *arguments: Any, **words: Any) -> Any:
            await asyncio.sleep(600)

    common = settings(turns=ALONE)
    session = _TokenSession(AgentConversation(PROMPT, SAMPLING, 5, Stuck([]), ALONE, TOKENIZER, common.limits), common)

    async def talk() -> None:
        asked = asyncio.create_task(session.complete(QUESTION, [], None))
        await asyncio.sleep(0.01)
        await session.close()
        for again in (asked, session.complete(QUESTION, [], None)):
            with pytest.raises(ContextFullError, match="has ended"):
                await again

    asyncio.run(asyncio.wait_for(talk(), 10))
