"""Conversations on the console."""

from __future__ import annotations

import os
import signal

import pytest
from scripted_engine import ScriptedEngine
from transformers import PreTrainedTokenizerFast

from mindspeed_rl.inference.console_chat import History, run_chat
from mindspeed_rl.inference.prompt_format import PromptFormat
from mindspeed_rl.rollout.requests import Sampling


def make_history(tokenizer: PreTrainedTokenizerFast, max_turns: int, max_prompt_tokens: int = 10_000) -> History:
    return History(PromptFormat(tokenizer, "qwen"), "S", max_turns, max_prompt_tokens)


def chat(engine: ScriptedEngine, history: History, lines: list[str], *, show_thinking: bool = False) -> str:
    """What appears on the console while these lines are typed; the input ends after them."""
    shown: list[str] = []
    waiting = iter(lines)

    def read(prompt: str) -> str:
        line = next(waiting, None)
        if line is None:
            raise EOFError
        return line

    stops = history.prompt_format.stop_token_ids
    run_chat(engine, history, Sampling(0.7, 64, stops), read=read, write=shown.append, show_thinking=show_thinking, seed=1)
    return "".join(shown)


def test_the_newest_turns_are_kept(tokenizer: PreTrainedTokenizerFast) -> None:
    history = make_history(tokenizer, max_turns=2)
    for number in range(5):
        history.turns.append((f"q{number}", f"a{number}"))
    ids = history.prompt("now")
    text = tokenizer.decode(ids)
    assert len(history.turns) == 2
    assert all(part in text for part in ("q3", "a3", "q4", "a4", "now"))
    assert not any(part in text for part in ("q0", "q1", "q2", "a2"))


def test_no_history_asks_each_question_alone(tokenizer: PreTrainedTokenizerFast) -> None:
    history = make_history(tokenizer, max_turns=0)
    history.turns.append(("q0", "a0"))
    ids = history.prompt("now")
    assert len(history.turns) == 0
    assert "q0" not in tokenizer.decode(ids)


def test_oldest_turns_go_first_when_the_prompt_is_too_long(tokenizer: PreTrainedTokenizerFast) -> None:
    history = make_history(tokenizer, max_turns=9)
    history.turns.append(("old" * 20, "x"))
    history.turns.append(("new", "y"))
    whole = len(history.prompt("now"))
    history.max_prompt_tokens = whole - 1
    ids = history.prompt("now")
    assert len(history.turns) == 1
    assert "new" in tokenizer.decode(ids) and "old" not in tokenizer.decode(ids)
    history.max_prompt_tokens = 5
    with pytest.raises(ValueError, match="at most 5 fit beside the answer"):
        history.prompt("now")


def test_answers_are_remembered_until_a_clear_word(tokenizer: PreTrainedTokenizerFast, engine: ScriptedEngine) -> None:
    engine.script = ["four", "six", "eight"]
    shown = chat(engine, make_history(tokenizer, 3), ["2+2?", "3+3?", "NEW", "4+4?"])
    assert "MindSpeed-RL: four\n" in shown and "MindSpeed-RL: eight\n" in shown
    assert "2+2?" in engine.asked[1] and "four" in engine.asked[1]
    assert "2+2?" not in engine.asked[2] and "six" not in engine.asked[2]


def test_slash_commands_start_anew_show_the_history_and_are_told_when_unknown(
    tokenizer: PreTrainedTokenizerFast, engine: ScriptedEngine
) -> None:
    engine.script = ["four", "home", "eight"]
    shown = chat(engine, make_history(tokenizer, 3), ["/history", "2+2?", "/history", "/help", "/etc/hosts?", "/new", "4+4?"])
    assert shown.startswith("Nothing was said yet.\n")
    assert "You >> 2+2?\nMindSpeed-RL: four\n" in shown
    assert "/help is not a command; there are /new, /history, /image FILE, /exit.\n" in shown
    assert "/etc/hosts?" in engine.asked[1] and "2+2?" not in engine.asked[2] and len(engine.asked) == 3


@pytest.mark.parametrize("word", ["q", "quit", "EXIT", " exit ", "/exit", "/quit"])
def test_quit_words_end_the_chat(tokenizer: PreTrainedTokenizerFast, engine: ScriptedEngine, word: str) -> None:
    chat(engine, make_history(tokenizer, 3), [word, "never asked"])
    assert engine.asked == []


def test_thoughts_are_hidden_or_shown_and_never_remembered(tokenizer: PreTrainedTokenizerFast, engine: ScriptedEngine) -> None:
    engine.script = ["<think>\nhm hm\n</think>\n\nfour", "<think>\nhm hm\n</think>\n\nfour", "ok"]
    hidden = chat(engine, make_history(tokenizer, 3), ["2+2?"])
    assert "hm" not in hidden and "MindSpeed-RL: four" in hidden
    history = make_history(tokenizer, 3)
    shown = chat(engine, history, ["2+2?", "sure?"], show_thinking=True)
    assert "[thinking] hm hm\n\n[answer] four" in shown
    assert history.turns == [("2+2?", "four"), ("sure?", "ok")]
    assert "hm" not in engine.asked[-1]


def test_a_question_that_is_too_long_is_refused_and_the_chat_goes_on(
    tokenizer: PreTrainedTokenizerFast, engine: ScriptedEngine
) -> None:
    engine.script = ["yes"]
    shown = chat(engine, make_history(tokenizer, 3, max_prompt_tokens=120), ["long" * 100, "ok?"])
    assert "the question has" in shown and "MindSpeed-RL: yes" in shown
    assert len(engine.asked) == 1


def test_an_answer_that_is_cut_says_so_and_is_remembered_without_the_note(
    tokenizer: PreTrainedTokenizerFast, engine: ScriptedEngine
) -> None:
    engine.script, engine.ends = ["half an"], False
    history = make_history(tokenizer, max_turns=3)
    assert "half an [cut by --max-new-tokens]\n" in chat(engine, history, ["go"])
    assert history.turns == [("go", "half an")]


def test_an_interrupt_ends_the_answer_and_keeps_what_there_is(
    tokenizer: PreTrainedTokenizerFast, engine: ScriptedEngine
) -> None:
    engine.script = ["one two three"]
    history = make_history(tokenizer, 3)
    seen: list[str] = []

    def write(text: str) -> None:
        seen.append(text)
        if text == " ":
            os.kill(os.getpid(), signal.SIGINT)

    questions = iter(["count", "q"])
    stops = history.prompt_format.stop_token_ids
    sampling = Sampling(0.7, 64, stops)
    run_chat(engine, history, sampling, read=lambda prompt: next(questions), write=write, show_thinking=False, seed=1)
    assert "".join(seen) == "MindSpeed-RL: one  [interrupted]\n"
    assert history.turns == [("count", "one")]
