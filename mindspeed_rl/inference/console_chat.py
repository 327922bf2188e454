"""A conversation on the console: a history of the newest turns, streamed answers, thoughts shown or hidden."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field

from mindspeed_rl.data.conversation import Conversation, MalformedRowError, assistant, user
from mindspeed_rl.inference.engine_interface import Engine, Request
from mindspeed_rl.inference.prompt_format import PromptFormat
from mindspeed_rl.inference.text_stream import IncrementalText, Kind, ThoughtSplitter
from mindspeed_rl.rollout.requests import Sampling, sample_seed

_QUIT_WORDS = ("q", "quit", "exit", "/q", "/quit", "/exit")
_CLEAR_WORDS = ("clear", "new", "/clear", "/new")
_HISTORY_WORD = "/history"
COMMANDS = ("/new", "/history", "/exit")
_ASK = "You >> "
_ANSWER_HEADER = "MindSpeed-RL:"


@dataclass
class History:
    """The conversation, and the part of it that a prompt contains.

    Attributes:
        max_turns: pairs of question and answer before a new question; the newest stay.
        max_prompt_tokens: a longer prompt loses further pairs, oldest first.
    """

    prompt_format: PromptFormat
    system: str | None
    max_turns: int
    max_prompt_tokens: int
    turns: list[tuple[str, str]] = field(default_factory=list)

    def prompt(self, question: str) -> list[int]:
        """Return the prompt of a question after the remembered turns; turns that do not fit are removed.

        Raises:
            MalformedRowError: the template cannot render the conversation.
            ValueError: the question alone is longer than a prompt may be.
        """
        self.turns = self.turns[max(0, len(self.turns) - self.max_turns) :]
        while True:
            messages = [message for earlier, answer in self.turns for message in (user(earlier), assistant(answer))]
            ids = self.prompt_format.encode([Conversation([*messages, user(question)], system=self.system)])[0]
            if len(ids) <= self.max_prompt_tokens:
                return ids
            if not self.turns:
                raise ValueError(
                    f"the question has {len(ids)} tokens with its template; at most {self.max_prompt_tokens} fit beside the "
                    "answer (--max-length, --max-new-tokens)"
                )
            self.turns.pop(0)

    def render(self) -> str:
        """Return the turns before the next question as text for the user."""
        turns = self.turns[max(0, len(self.turns) - self.max_turns) :]
        lines = [f"{_ASK}{question}\n{_ANSWER_HEADER} {answer}\n" for question, answer in turns]
        return "".join(lines) or "Nothing was said yet.\n"


def _stream_answer(
    engine: Engine, prompt_format: PromptFormat, prompt_ids: list[int], sampling: Sampling, seed: int
) -> Generator[tuple[Kind, str], None, None]:
    """Yield the answer in parts as they are generated, by kind; an empty part where nothing is generated for a while."""
    thinking = prompt_format.opens_thought(prompt_ids)
    text, splitter = IncrementalText(prompt_format.decoder), ThoughtSplitter(prompt_format.thought_marks, thinking=thinking)
    finish = None
    for delta in engine.stream([Request(prompt_ids, seed)], sampling):
        token_ids, finish = delta.token_ids, delta.finish
        if delta.finish == "stop" and token_ids and token_ids[-1] in sampling.stop_token_ids:
            token_ids = token_ids[:-1]
        if delta.from_tools:
            yield from splitter.add(text.finish())
            yield from splitter.finish()
            yield "tools", prompt_format.decode(token_ids)
            # the next turn starts as the first one did
            text = IncrementalText(prompt_format.decoder)
            splitter = ThoughtSplitter(prompt_format.thought_marks, thinking=thinking)
            continue
        parts = splitter.add(text.add(token_ids))
        yield from parts
        # an interrupt is handled only between parts
        if not parts:
            yield "answer", ""
    yield from splitter.add(text.finish())
    yield from splitter.finish()
    if finish == "length":
        yield "limit", ""


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
    """Chat until a quit word or the end of the input.

    Ctrl-C ends an answer; its text so far is remembered. At the prompt it ends the chat.

    Args:
        engine: that answers.
        history: of the conversation.
        sampling: of the answers.
        read: reads a line after a prompt; raises EOFError at the end of the input.
        write: shows text without adding anything.
        show_thinking: thoughts are shown.
        seed: of the run.
    """
    index = 0
    while True:
        try:
            question = read(_ASK).strip()
        except (EOFError, KeyboardInterrupt):
            write("\n")
            return
        if question.lower() in _QUIT_WORDS:
            return
        if question.lower() in _CLEAR_WORDS:
            history.turns = []
            write("The conversation starts anew.\n")
            continue
        if question.lower() == _HISTORY_WORD:
            write(history.render())
            continue
        if question.startswith("/") and question[1:].isalpha():
            write(f"{question} is no command; there are {', '.join(COMMANDS)}.\n")
            continue
        if not question:
            continue
        try:
            prompt_ids = history.prompt(question)
        # the template cannot render such a conversation: the next question would fail too
        except MalformedRowError:
            raise
        except ValueError as error:
            write(f"{error}\n")
            continue
        write(f"{_ANSWER_HEADER} ")
        answer = _show_answer(
            _stream_answer(engine, history.prompt_format, prompt_ids, sampling, sample_seed(seed, 0, index, 0)),
            write,
            show_thinking,
        )
        index += 1
        history.turns.append((question, answer))


def _show_answer(parts: Generator[tuple[Kind, str], None, None], write: Callable[[str], None], show_thinking: bool) -> str:
    """Write the parts as they come and return the last turn without thoughts."""
    answer = ""
    last: Kind = "answer"
    with _record_interrupts() as interrupts:
        for kind, text in parts:
            if kind == "answer":
                answer += text
            elif kind == "tools":
                answer = ""
            elif kind == "limit":
                write(" [cut by --max-new-tokens]")
            if text and (kind != "thought" or show_thinking):
                if kind != last:
                    write({"thought": "[thinking] ", "tools": "\n[tools] "}.get(kind, "\n[answer] "))
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
def _record_interrupts() -> Iterator[list[int]]:
    """Record Ctrl-C in a list, so that it does not interrupt an engine step."""
    interrupts: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, frame: interrupts.append(number))
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, handler)
