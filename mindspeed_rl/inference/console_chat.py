"""A conversation on the console: a history of the newest turns, streamed answers, thoughts shown or hidden."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field

from mindspeed_rl.data.content_marks import IMAGE_MARK, VIDEO_MARK
from mindspeed_rl.data.conversation import Conversation, MalformedRowError, assistant, user
from mindspeed_rl.data.images import TAG, ImageReader, check_images, is_video, make_reference
from mindspeed_rl.data.videos import VIDEO_TAG
from mindspeed_rl.inference.engine_interface import Engine, Request
from mindspeed_rl.inference.prompt_format import PromptFormat
from mindspeed_rl.inference.text_stream import IncrementalText, Kind, ThoughtSplitter
from mindspeed_rl.rollout.requests import Sampling, sample_seed

_QUIT_WORDS = ("q", "quit", "exit", "/q", "/quit", "/exit")
_CLEAR_WORDS = ("clear", "new", "/clear", "/new")
_HISTORY_WORD, _IMAGE_WORD, _VIDEO_WORD = "/history", "/image", "/video"
COMMANDS = ("/new", "/history", "/image FILE", "/exit")
#: images, and videos, in the context of an answer
MAX_IMAGES = 8
_ASK = "You >> "
_ANSWER_HEADER = "MindSpeed-RL:"


@dataclass
class History:
    """The conversation, and the part of it that a prompt contains.

    Attributes:
        max_turns: pairs of question and answer before a new question; the newest stay.
        max_prompt_tokens: a longer prompt loses further pairs, oldest first.
        turns: questions and answers; IMAGE_MARK and VIDEO_MARK stand for an image and a video of a question.
        images: references of the images and videos of these questions, then of the next one.
    """

    prompt_format: PromptFormat
    system: str | None
    max_turns: int
    max_prompt_tokens: int
    turns: list[tuple[str, str]] = field(default_factory=list)
    images: list[str] = field(default_factory=list)

    def add_image(self, path: str) -> None:
        """Add an image to the next question.

        Raises:
            ValueError: it cannot be read, there are too many, or the model is one of text.
        """
        self._check_room()
        reference = make_reference(path)
        check_images([reference])
        self.images.append(reference)

    def add_video(self, path: str) -> None:
        """Add a video to the next question.

        Raises:
            ValueError: it cannot be read, there are too many, or the model reads none.
        """
        reader = self._check_room()
        self.images.append(reader.read_video(path))

    def _check_room(self) -> ImageReader:
        """Return the reader of images; ValueError without one, or where the next question has all it may have."""
        if self.prompt_format.image_reader is None:
            raise ValueError("this model reads only text: its config.json has no vision_config")
        if len(self.images) - sum(_count_marks(earlier) for earlier, _ in self.turns) == MAX_IMAGES:
            raise ValueError(f"a question may have at most {MAX_IMAGES} images")
        return self.prompt_format.image_reader

    def mark_images(self, question: str) -> str:
        """Return the question with a mark for each image and video that was added to it."""
        marked = sum(_count_marks(earlier) for earlier, _ in self.turns) + _count_marks(question)
        return "".join(VIDEO_MARK if is_video(one) else IMAGE_MARK for one in self.images[marked:]) + question

    def _forget(self, count: int) -> None:
        """Remove the oldest turns and their images."""
        del self.images[: sum(_count_marks(question) for question, _ in self.turns[:count])]
        del self.turns[:count]

    def prompt(self, question: str) -> list[int]:
        """Return the prompt of a question after the remembered turns; turns that do not fit are removed.

        Raises:
            MalformedRowError: the template cannot render the conversation.
            ValueError: the question itself is longer than a prompt may be.
        """
        self._forget(max(0, len(self.turns) - self.max_turns))
        while True:
            messages = [message for earlier, answer in self.turns for message in (user(earlier), assistant(answer))]
            conversation = Conversation([*messages, user(question)], system=self.system, images=tuple(self.images))
            ids = self.prompt_format.encode([conversation])[0]
            if len(ids) <= self.max_prompt_tokens and len(self.images) <= MAX_IMAGES:
                return ids
            if not self.turns:
                raise ValueError(
                    f"the question has {len(ids)} tokens with its template; at most {self.max_prompt_tokens} fit beside the "
                    "answer (--max-length, --max-new-tokens)"
                )
            self._forget(1)

    def render(self) -> str:
        """Return the turns before the next question as text for the user."""
        turns = self.turns[max(0, len(self.turns) - self.max_turns) :]
        lines = [f"{_ASK}{question}\n{_ANSWER_HEADER} {answer}\n" for question, answer in turns]
        text = "".join(lines).replace(IMAGE_MARK, TAG).replace(VIDEO_MARK, VIDEO_TAG)
        return text or "Nothing was said yet.\n"


def _count_marks(question: str) -> int:
    return question.count(IMAGE_MARK) + question.count(VIDEO_MARK)


def _stream_answer(
    engine: Engine, prompt_format: PromptFormat, request: Request, sampling: Sampling
) -> Generator[tuple[Kind, str], None, None]:
    """Yield the answer in parts as they are generated, by kind; an empty part where nothing is generated for a while."""
    thinking = prompt_format.opens_thought(request.prompt_ids)
    text, splitter = IncrementalText(prompt_format.decoder), ThoughtSplitter(prompt_format.thought_marks, thinking=thinking)
    finish = None
    for delta in engine.stream([request], sampling):
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
        history: past turns of the conversation.
        sampling: sampling parameters of the answers.
        read: reads a line after a prompt; raises EOFError at the end of the input.
        write: shows text without adding anything.
        show_thinking: thoughts are shown.
        seed: seed of the run.
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
            history.turns, history.images = [], []
            write("The conversation starts anew.\n")
            continue
        if question.lower() == _HISTORY_WORD:
            write(history.render())
            continue
        command, _, path = question.partition(" ")
        if command.lower() in (_IMAGE_WORD, _VIDEO_WORD) and path:
            add = history.add_image if command.lower() == _IMAGE_WORD else history.add_video
            try:
                add(path.strip())
                write(f"{path.strip()} belongs to the next question.\n")
            except ValueError as error:
                write(f"{error}\n")
            continue
        if question.startswith("/") and question[1:].isalpha():
            write(f"{question} is not a command; there are {', '.join(COMMANDS)}.\n")
            continue
        if not question:
            continue
        question = history.mark_images(question)
        try:
            prompt_ids = history.prompt(question)
        # the template cannot render such a conversation: the next question would fail too
        except MalformedRowError:
            raise
        except ValueError as error:
            write(f"{error}\n")
            continue
        write(f"{_ANSWER_HEADER} ")
        request = Request(prompt_ids, sample_seed(seed, 0, index, 0), images=tuple(history.images))
        answer = _show_answer(_stream_answer(engine, history.prompt_format, request, sampling), write, show_thinking)
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
