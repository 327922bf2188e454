"""The base of benchmarks: questions with labels, and the scoring of answers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from mindspeed_rl.data.conversation import Conversation, Message, assistant, user
from mindspeed_rl.rewards import find
from mindspeed_rl.rewards.answers.extraction import extract_final_answer

#: fields of an instruction template
_TEMPLATE_NAMES = ("prompt", "question", "subject", "few_shot_examples", "fewshot_template")


@dataclass(frozen=True)
class TaskOptions:
    """Configured options of a task; None takes the task's default.

    Attributes:
        num_shots: worked examples before each question.
        chain_of_thought: the model reasons before it answers, where the task has both forms.
        scorer: name of a reward function that replaces the task's own.
        external_plugins: Python files that register it.
        max_new_tokens: limit of the answer's tokens.
        prompt_key, label_key: columns, for tasks with free columns.
        language: multiple choice: of the instruction; needlebench: of the needles. The data's own when None.
        alternative_prompt: multiple choice: the letter is read from an answer in words instead of the first token.
        instruction_template: text around the prompt; see `fill_template`.
        context_lengths: needlebench: tokens of the text.
        depths: needlebench: position of the needle, in percent of that text.
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
        text: text of the question.
        label: the right answer; one of `choices` where there are any.
        group: subject, for the table.
        instruction: once, before the first example.
        shots: examples, in order.
        cue: end of a plain prompt, such as "Answer:"; a chat has turns instead.
        choices: words of which the answer is one; it is then read from the first token, and no other token is allowed.
        columns: further columns, for the scorer.
        conversation: replaces text, instruction and shots.
        template: text around the prompt; see `fill_template`.
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
        """Return the prompt: turns in a chat, one text otherwise.

        Args:
            chat: a template separates the speakers.
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
            return Conversation([*messages, user(self._fill_template(texts[-1], ""))])
        cues = [f"{text}\n{self.cue}" if self.cue else text for text in texts]
        blocks = [f"{cue} {shot.answer}" for cue, shot in zip(cues, shots)] + [cues[-1]]
        full = "\n\n".join([self.instruction, *blocks] if self.instruction else blocks)
        return Conversation([user(self._fill_template(full, "\n\n".join(blocks[:-1])))])

    def _fill_template(self, prompt: str, examples: str) -> str:
        if not self.template:
            return prompt
        values = (prompt, self.text, self.group.replace("_", " "), examples, examples)
        return fill_template(self.template, dict(zip(_TEMPLATE_NAMES, values, strict=True)))


def fill_template(template: str, values: Mapping[str, str] | None = None) -> str:
    """Fill in the fields in braces; braces in the values stay as they are.

    Args:
        values: values of each field; None fills in nothing, to check the template.

    Raises:
        ValueError: it has another field, or neither the prompt nor the question.
    """
    values = dict.fromkeys(_TEMPLATE_NAMES, "") if values is None else values
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
        max_new_tokens: limit of the answer's tokens.
        default_shots: examples before each question.
        stop_strings: texts that end the answer of a model that only continues text.
    """

    name: ClassVar[str]
    scorer: str = "exact_match"
    max_new_tokens: int = 512
    default_shots: ClassVar[int] = 0
    stop_strings: tuple[str, ...] = ()

    def __init__(self, path: Path, options: TaskOptions) -> None:
        """Check the options; `questions` reads the data.

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
            # functions of a plug-in are registered only once the pool has loaded it
            if not options.external_plugins:
                find(options.scorer)
            self.scorer = options.scorer
        if options.max_new_tokens is not None:
            self.max_new_tokens = options.max_new_tokens

    def questions(self) -> list[Question]:
        """Return all questions, in the order of the data.

        Raises:
            ValueError: a file or a row does not have the form that the task needs.
        """
        raise NotImplementedError

    def response(self, question: Question, text: str) -> str:
        """Return the text to score, made of the generated text."""
        return text

    def vote(self, text: str) -> str | None:
        """Return the answer as it counts in a majority vote; None where answers cannot agree."""
        return extract_final_answer(text)

    def take_shots(self, shots: Sequence[Shot], where: str) -> tuple[Shot, ...]:
        """Return the first `num_shots` examples.

        Raises:
            ValueError: there are fewer.
        """
        if len(shots) < self.num_shots:
            raise ValueError(f"{self.name}: --num-shots {self.num_shots}, but {where} has {len(shots)} examples")
        return tuple(shots[: self.num_shots])
