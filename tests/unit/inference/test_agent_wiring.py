"""Answers of several turns: generate, chat and evaluate see an engine, behind which an agent loop and its tools are."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from scripted_engine import ScriptedEngine
from transformers import PreTrainedTokenizerFast

from mindspeed_rl.data.conversation import Conversation, user
from mindspeed_rl.inference.agent_engine import AgentEngine, AgentSettings
from mindspeed_rl.inference.batch_generation import GenerationSettings, generate
from mindspeed_rl.inference.console_chat import History, run_chat
from mindspeed_rl.inference.engine_interface import Request, collect
from mindspeed_rl.inference.prompt_format import PromptFormat
from mindspeed_rl.rollout.requests import Sampling

CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "6*7"}}\n</tool_call>'
CALCULATOR = AgentSettings("calculator", None, None, None, None, None)


@pytest.fixture
def prompt_format(tokenizer: PreTrainedTokenizerFast) -> PromptFormat:
    return PromptFormat(tokenizer, "hf")


@pytest.fixture
def agents(prompt_format: PromptFormat, tokenizer: PreTrainedTokenizerFast) -> Iterator[AgentEngine]:
    engine = AgentEngine(CALCULATOR, prompt_format, 2000)
    yield engine.wrap(ScriptedEngine(tokenizer))
    engine.close()


def scripted(agents: AgentEngine, *script: str) -> ScriptedEngine:
    engine = agents._engine
    assert isinstance(engine, ScriptedEngine)
    engine.script = list(script)
    return engine


def asking(prompt_format: PromptFormat, text: str) -> list[int]:
    return prompt_format.encode([Conversation([user(text)])])[0]


def sampling(prompt_format: PromptFormat) -> Sampling:
    return Sampling(0.0, 300, prompt_format.stop_token_ids)


def test_prompts_tell_of_the_tools_and_the_answer_is_the_last_turn(agents: AgentEngine, prompt_format: PromptFormat) -> None:
    engine = scripted(agents, CALL, "It says 42.")
    prompt = asking(prompt_format, "6 times 7?")
    assert '"name": "calculator"' in prompt_format.tokenizer.decode(prompt)
    (answer,) = collect(agents.stream([Request(prompt, 5)], sampling(prompt_format)), 1)
    assert prompt_format.decode(answer.token_ids) == "It says 42."
    assert answer.finish == "stop" and answer.log_prob == -len(answer.token_ids)
    assert "<tool_response>\n42\n</tool_response>" in engine.asked[1]
    assert engine.requests[1].prompt_ids[: len(prompt)] == prompt


def test_many_answers_go_on_in_batches_each_with_its_own_reply(agents: AgentEngine, prompt_format: PromptFormat) -> None:
    engine = scripted(agents, CALL, "At once.", CALL.replace("6*7", "2*3"), "first", "third")
    prompts = [asking(prompt_format, text) for text in ("a", "b", "c")]
    result = generate(agents, prompt_format, prompts, GenerationSettings("greedy", sampling(prompt_format), 2000))
    assert [each.text.rsplit("\n", 1)[-1] for each in result] == ["first", "At once.", "third"]
    assert "\n42\n" in result[0].text and "\n6\n" in result[2].text and len(engine.asked) == 5


def test_a_chat_shows_what_tools_said_and_remembers_the_answer(agents: AgentEngine, prompt_format: PromptFormat) -> None:
    engine = scripted(agents, CALL, "It is 42.", "Yes.")
    typed = iter(["6 times 7?", "Sure?", "quit"])
    shown: list[str] = []
    history = History(prompt_format, None, 3, 1500)
    run_chat(
        agents,
        history,
        sampling(prompt_format),
        read=lambda _: next(typed),
        write=shown.append,
        show_thinking=False,
        seed=1,
    )
    text = "".join(shown)
    before, _, behind = text.partition("[tools] ")
    assert '"expression": "6*7"' in before and "42\n" in behind and "[answer] It is 42." in behind
    assert history.turns == [("6 times 7?", "It is 42."), ("Sure?", "Yes.")]
    assert (
        "It is 42." in engine.asked[2]
        and "<tool_response>" not in engine.asked[2].partition("Sure?")[0].partition("6 times")[2]
    )


def test_tokens_come_as_they_are_sampled(agents: AgentEngine, prompt_format: PromptFormat) -> None:
    engine = scripted(agents, CALL, "It says 42.")
    deltas = agents.stream([Request(asking(prompt_format, "6 times 7?"), 5)], sampling(prompt_format))
    begun = next(delta for delta in deltas if delta.token_ids)
    assert len(begun.token_ids) == 1 and begun.finish is None and len(engine.asked) == 1  # and the turn goes on
    left = [delta for delta in deltas if delta.token_ids]
    (told,) = [delta for delta in left if delta.from_tools]
    place = left.index(told)
    call = prompt_format.decode([token for delta in [begun, *left[:place]] for token in delta.token_ids])
    assert call == CALL and "42" in prompt_format.decode(told.token_ids)
    assert prompt_format.decode([token for delta in left[place + 1 :] for token in delta.token_ids]) == "It says 42."
    assert [delta.finish for delta in left].count("stop") == 1 and left[-1].finish == "stop"
    # what was read and drawn adds up to what the engine was asked with
    together = [
        *engine.requests[0].prompt_ids,
        *begun.token_ids,
        *(token for delta in left[: place + 1] for token in delta.token_ids),
    ]
    assert together == engine.requests[1].prompt_ids


async def sleepy() -> str:
    """Takes its time."""
    await asyncio.sleep(600)
    return "well"


def test_ctrl_c_ends_an_answer_whose_tool_hangs(prompt_format: PromptFormat, tokenizer: PreTrainedTokenizerFast) -> None:
    agents = AgentEngine(AgentSettings(f"{__name__}:sleepy", None, None, None, None, None), prompt_format, 2000)
    agents.wrap(ScriptedEngine(tokenizer))
    scripted(agents, '<tool_call>\n{"name": "sleepy", "arguments": {}}\n</tool_call>', "never asked")
    typed, shown = iter(["Go.", "quit"]), list[str]()
    pressed = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))

    def write(text: str) -> None:
        shown.append(text)
        if "sleepy" in "".join(shown) and not pressed.ident:
            pressed.start()

    begun = time.monotonic()
    history = History(prompt_format, None, 3, 1500)
    run_chat(agents, history, sampling(prompt_format), read=lambda _: next(typed), write=write, show_thinking=False, seed=1)
    agents.close()
    assert time.monotonic() - begun < 25 and "[interrupted]" in "".join(shown)
    assert len(history.turns) == 1


def test_a_tool_file_that_is_none_and_answers_of_one_token_are_told(
    agents: AgentEngine, prompt_format: PromptFormat, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    with pytest.raises(ValueError, match="none.yaml"):
        AgentEngine(AgentSettings(str(tmp_path / "none.yaml"), None, None, None, None, None), prompt_format, 100)
    with pytest.raises(ValueError, match="chat template"):
        AgentEngine(CALCULATOR, PromptFormat(tokenizer, None), 100)
    with pytest.raises(ValueError, match="plays its own rows"):
        AgentEngine(AgentSettings(None, None, None, None, "verifiers:guess", None), prompt_format, 100)
    with pytest.raises(ValueError, match="--stop"):
        next(iter(agents.stream([Request([1])], sampling(prompt_format), ["x"])))


def test_calls_are_read_as_the_template_has_them_written(tokenizer: PreTrainedTokenizerFast) -> None:
    prompt_format = PromptFormat(tokenizer, "qwen")  # it tells the model to write lines Action: and Action Input:
    agents = AgentEngine(CALCULATOR, prompt_format, 2000).wrap(ScriptedEngine(tokenizer))
    scripted(agents, 'Action: calculator\nAction Input: {"expression": "6*7"}', "42, then.")
    (answer,) = collect(agents.stream([Request(asking(prompt_format, "6 times 7?"))], sampling(prompt_format)), 1)
    assert prompt_format.decode(answer.token_ids) == "42, then."
    agents.close()


def test_an_environment_sees_the_row_of_a_question(
    prompt_format: PromptFormat, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "row_environment.py").write_text(
        "class Row:\n"
        "    def reset(self, task):\n"
        "        return [{'role': 'user', 'content': f\"{task['label']} {task['level']}\"}]\n"
        "    def step(self, messages):\n"
        "        return [], 1.0, True\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    settings = AgentSettings(None, None, None, None, "row_environment:Row", None)
    engine = AgentEngine(settings, prompt_format, 2000)
    try:
        inner = scripted(engine.wrap(ScriptedEngine(tokenizer)), "Done.")
        request = Request(asking(prompt_format, "a"), 5, label="17", columns={"level": "hard"})
        collect(engine.stream([request], sampling(prompt_format)), 1)
        assert "17 hard" in inner.asked[0]
    finally:
        engine.close()
