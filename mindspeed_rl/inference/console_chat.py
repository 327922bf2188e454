"""A conversation on the console: history that keeps the newest turns, streamed answers, thoughts shown or hidden."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field

from mindspeed_rl.data.conversation import BadRow, Conversation, assistant, user
from mindspeed_rl.inference.engine_interface import Engine, Request
from mindspeed_rl.inference.prompt_format import PromptFormat
from mindspeed_rl.inference.text_stream import IncrementalText, Kind, ThoughtSplitter
from mindspeed_rl.rollout.requests import Sampling, sample_seed

QUIT_WORDS = ("q", "quit", "exit", "/q", "/quit", "/exit")
CLEAR_WORDS = ("clear", "new", "/clear", "/new")
HISTORY_WORD = "/history"
COMMANDS = ("/new", "/history", "/exit")
ASK = "You >> "
ANSWER_HEADER = "MindSpeed-RL:"


@dataclass
class History:
    """What was said, and the part of it that the model is told.

    Attributes:
        max_turns: pairs of question and answer that a new question is asked with; the newest stay.
        max_prompt_tokens: a prompt above it loses further pairs, oldest first.
    """

    prompt_format: PromptFormat
    system: str | None
    max_turns: int
    max_prompt_tokens: int
    turns: list[tuple[str, str]] = field(default_factory=list)

    def prompt(self, question: str) -> list[int]:
        """The tokens that ask the question after the remembered turns; turns that do not fit are forgotten.

        Raises:
            BadRow: the template cannot write the conversation.
            ValueError: the question alone is longer than a prompt may be.
        """
        self.turns = self.turns[max(0, len(self.turns) - self.max_turns) :]
        while True:
            messages = [message for said, answer in self.turns for message in (user(said), assistant(answer))]
            ids = self.prompt_format.encode([Conversation([*messages, user(question)], system=self.system)])[0]
            if len(ids) <= self.max_prompt_tokens:
                return ids
            if not self.turns:
                raise ValueError(
                    f"the question has {len(ids)} tokens with its template; at most {self.max_prompt_tokens} fit beside the "
                    "answer (--max-length, --max-new-tokens)"
                )
            self.turns.pop(0)

    def add(self, question: str, answer: str) -> None:
        """Remembers a pair."""
        self.turns.append((question, answer))

    def told(self) -> str:
        """What the model will be told of, for reading."""
        kept = self.turns[max(0, len(self.turns) - self.max_turns) :]
        lines = [f"{ASK}{question}\n{ANSWER_HEADER} {answer}\n" for question, answer in kept]
        return "".join(lines) or "Nothing was said yet.\n"

    def clear(self) -> None:
        """Nothing was said."""
        self.turns = []


def stream_answer(
    engine: Engine, prompt_format: PromptFormat, prompt_ids: list[int], sampling: Sampling, seed: int
) -> Generator[tuple[Kind, str], None, None]:
    """The answer in parts as they are made, thoughts told apart; an empty part where nothing comes for a while."""
    thinking = prompt_format.opens_thought(prompt_ids)
    text, splitter = IncrementalText(prompt_format.decoder), ThoughtSplitter(prompt_format.thought_marks, thinking=thinking)
    for piece in engine.stream([Request(prompt_ids, seed)], sampling):
        token_ids = piece.token_ids
        if piece.finish == "stop" and token_ids and token_ids[-1] in sampling.stop_token_ids:
            token_ids = token_ids[:-1]
        if piece.aside:
            yield from splitter.feed(text.finish())
            yield from splitter.finish()
            yield "aside", prompt_format.decode(token_ids)
            # the next turn begins as the first one did
            text = IncrementalText(prompt_format.decoder)
            splitter = ThoughtSplitter(prompt_format.thought_marks, thinking=thinking)
            continue
        parts = splitter.feed(text.feed(token_ids))
        yield from parts
        # an interrupt is seen only between parts
        if not parts:
            yield "answer", ""
    yield from splitter.feed(text.finish())
    yield from splitter.finish()


def run_chat(
    engine: Engine,
    history: History,
    sampling: Sampling,
    *,
    read: Callable[[str], str],
    write: Callable[[str], None],
    show_thinking: bool,
    seed: int,
) -> None:
    """Talks until a quit word or the end of the input.

    Ctrl-C ends an answer; what there is of it is remembered. At the prompt it ends the chat.

    Args:
        read: asks for a line; raises EOFError at the end of the input.
        write: shows text without adding anything.
    """
    number = 0
    while True:
        try:
            question = read(ASK).strip()
        except (EOFError, KeyboardInterrupt):
            write("\n")
            return
        if question.lower() in QUIT_WORDS:
            return
        if question.lower() in CLEAR_WORDS:
            history.clear()
            write("The conversation starts anew.\n")
            continue
        if question.lower() == HISTORY_WORD:
            write(history.told())
            continue
        if question.startswith("/") and question[1:].isalpha():
            write(f"{question} is no command; there are {', '.join(COMMANDS)}.\n")
            continue
        if not question:
            continue
        try:
            prompt_ids = history.prompt(question)
        # the template cannot write such a conversation: the next question would fail alike
        except BadRow:
            raise
        except ValueError as error:
            write(f"{error}\n")
            continue
        write(f"{ANSWER_HEADER} ")
        answer = _show_answer(
            stream_answer(engine, history.prompt_format, prompt_ids, sampling, sample_seed(seed, 0, number, 0)),
            write,
            show_thinking,
        )
        number += 1
        history.add(question, answer)


def _show_answer(parts: Generator[tuple[Kind, str], None, None], write: Callable[[str], None], show_thinking: bool) -> str:
    """Writes the parts as they come and returns the last turn without thoughts."""
    answer = ""
    last: Kind = "answer"
    with _interrupts_noted() as interrupts:
        for kind, text in parts:
            if kind == "answer":
                answer += text
            elif kind == "aside":
                answer = ""
            if text and (kind != "thought" or show_thinking):
                if kind != last:
                    write({"thought": "[thinking] ", "aside": "\n[tools] "}.get(kind, "\n[answer] "))
                    last = kind
                write(text)
            if interrupts:
                write(" [interrupted]")
                break
    # ends the request in the engine
    parts.close()
    write("\n")
    return answer.strip()


@contextlib.contextmanager
def _interrupts_noted() -> Iterator[list[int]]:
    """Ctrl-C lands in the list instead of in the middle of an engine step."""
    noted: list[int] = []
    usual = signal.signal(signal.SIGINT, lambda number, frame: noted.append(number))
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, usual)
