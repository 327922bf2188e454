"""What a benchmark is: questions with labels, and how an answer is scored."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from mindspeed_rl.data.conversation import Conversation, Message, assistant, user
from mindspeed_rl.rewards import find
from mindspeed_rl.rewards.answers.extraction import extract_final_answer

#: what an instruction template may name
TEMPLATE_NAMES = ("prompt", "question", "subject", "few_shot_examples", "fewshot_template")


@dataclass(frozen=True)
class TaskOptions:
    """What the user says about a task; None takes the task's default.

    Attributes:
        num_shots: worked examples before each question.
        chain_of_thought: the model reasons before it answers, where the task knows both ways.
        scorer: name of a reward function, in place of the task's own.
        external_plugins: Python files that register it.
        max_new_tokens: longest answer.
        prompt_key, label_key: columns, for tasks with free columns.
        language: multiple choice: of the instruction; needlebench: of the needles. The data's own when None.
        alternative_prompt: multiple choice: the letter is read from an answer in words instead of the first token.
        instruction_template: the prompt is put into this text; see `templated`.
        context_lengths: needlebench: tokens of the text that is read.
        depths: needlebench: where the needle lies, in percent of that text.
    """

    num_shots: int | None = None
    chain_of_thought: bool = False
    scorer: str | None = None
    external_plugins: tuple[str, ...] = ()
    max_new_tokens: int | None = None
    prompt_key: str | None = None
    label_key: str | None = None
    language: Literal["en", "zh"] | None = None
    alternative_prompt: bool = False
    instruction_template: str | None = None
    context_lengths: tuple[int, ...] = ()
    depths: tuple[int, ...] = ()


@dataclass(frozen=True)
class Shot:
    """A worked example."""

    text: str
    answer: str


@dataclass(frozen=True)
class Question:
    """One item of a benchmark.

    Attributes:
        text: what is asked.
        label: the right answer; one of `choices` where there are any.
        group: subject, for the table.
        instruction: said once, before the first example.
        shots: examples, in order.
        cue: where a plain prompt breaks off for the answer, such as "Answer:"; a chat has turns instead.
        choices: words of which the answer is one; it is then read from the first token, no other token being allowed.
        columns: further columns, for the scorer.
        conversation: asks in place of text, instruction and shots.
        template: the prompt is put into it; see `templated`.
    """

    text: str
    label: Any
    group: str = ""
    instruction: str = ""
    shots: tuple[Shot, ...] = ()
    cue: str = ""
    choices: tuple[str, ...] = ()
    columns: dict[str, Any] = field(default_factory=dict)
    conversation: Conversation | None = None
    template: str = ""

    def as_conversation(self, *, chat: bool, num_shots: int | None = None) -> Conversation:
        """The prompt: turns in a chat, one text otherwise.

        Args:
            num_shots: only the last so many examples; None takes all.
        """
        if self.conversation is not None:
            return self.conversation
        shots = self.shots if num_shots is None else self.shots[len(self.shots) - num_shots :]
        texts = [shot.text for shot in shots] + [self.text]
        if chat:
            if self.instruction:
                texts[0] = f"{self.instruction}\n\n{texts[0]}"
            messages: list[Message] = []
            for shot, text in zip(shots, texts):
                messages += [user(text), assistant(shot.answer)]
            return Conversation([*messages, user(self._templated(texts[-1], ""))])
        cues = [f"{text}\n{self.cue}" if self.cue else text for text in texts]
        blocks = [f"{cue} {shot.answer}" for cue, shot in zip(cues, shots)] + [cues[-1]]
        whole = "\n\n".join([self.instruction, *blocks] if self.instruction else blocks)
        return Conversation([user(self._templated(whole, "\n\n".join(blocks[:-1])))])

    def _templated(self, prompt: str, examples: str) -> str:
        if not self.template:
            return prompt
        values = (prompt, self.text, self.group.replace("_", " "), examples, examples)
        return templated(self.template, dict(zip(TEMPLATE_NAMES, values, strict=True)))


def templated(template: str, values: Mapping[str, str]) -> str:
    """The template with the names in braces filled in; braces in the values stay as they are.

    Raises:
        ValueError: it names something else, or neither the prompt nor the question.
    """
    names = set(re.findall(r"{([a-z_]+)}", template))
    if unknown := names - set(values):
        raise ValueError(f"--instruction-template has {{{sorted(unknown)[0]}}}; known are {', '.join(values)}")
    if not names & {"prompt", "question"}:
        raise ValueError("--instruction-template needs {prompt} or {question}")
    return re.sub(r"{([a-z_]+)}", lambda match: values[match[1]], template)


class Task:
    """One benchmark on the user's data.

    Attributes:
        name: in tables.
        scorer: reward function of an answer; 1.0 or more is right. Not used for questions with choices.
        max_new_tokens: longest answer.
        default_shots: examples before each question.
        stop_strings: what ends the answer of a model that only continues text.
    """

    name: ClassVar[str]
    scorer: str = "exact_match"
    max_new_tokens: int = 512
    default_shots: ClassVar[int] = 0
    stop_strings: tuple[str, ...] = ()

    def __init__(self, path: Path, options: TaskOptions) -> None:
        """Checks the options; `questions` reads the data.

        Raises:
            ValueError: the path does not exist, or an option does not fit the task.
        """
        if not path.exists():
            raise ValueError(f"{self.name}: --task-data-path {path} does not exist")
        if options.num_shots is not None and options.num_shots < 0:
            raise ValueError(f"{self.name}: --num-shots is {options.num_shots}; it must be at least 0")
        self.path = path
        self.options = options
        self.num_shots = self.default_shots if options.num_shots is None else options.num_shots
        if options.scorer is not None:
            # what a plug-in registers is known only once the pool has loaded it
            if not options.external_plugins:
                find(options.scorer)
            self.scorer = options.scorer
        if options.max_new_tokens is not None:
            self.max_new_tokens = options.max_new_tokens

    def questions(self) -> list[Question]:
        """All questions, in the order of the data.

        Raises:
            ValueError: a file or a row is not as the task needs it.
        """
        raise NotImplementedError

    def response(self, question: Question, text: str) -> str:
        """What is scored, made of what was generated."""
        return text

    def vote(self, text: str) -> str | None:
        """What an answer is counted as in a majority vote; None where answers cannot agree."""
        return extract_final_answer(text)

    def some_shots(self, shots: Sequence[Shot], where: str) -> tuple[Shot, ...]:
        """The first `num_shots` examples.

        Raises:
            ValueError: there are not so many.
        """
        if len(shots) < self.num_shots:
            raise ValueError(f"{self.name}: --num-shots {self.num_shots}, but {where} has {len(shots)} examples")
        return tuple(shots[: self.num_shots])
