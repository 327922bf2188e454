"""Answers to a list of prompts: greedy, sampled, or by beam search."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mindspeed_rl.data import json_columns
from mindspeed_rl.data.content_marks import IMAGE_MARK
from mindspeed_rl.data.conversation import SOURCE_ROLES, Conversation, MalformedRowError, parse_tools, user
from mindspeed_rl.data.images import ImageReader
from mindspeed_rl.data.messages import openai_messages
from mindspeed_rl.files import replace_file
from mindspeed_rl.inference.beam_search import BeamSettings, beam_search
from mindspeed_rl.inference.engine_interface import Engine, Finish, Request, collect
from mindspeed_rl.inference.prompt_format import PromptFormat
from mindspeed_rl.inference.text_stream import cut_at_stop
from mindspeed_rl.rollout.requests import Sampling, sample_seed

Method = Literal["greedy", "do_sample", "beam_search", "beam_search_with_sampling"]

#: the names in upstream's code and in its documentation
METHODS: dict[str, Method] = {
    "greedy": "greedy",
    "greedy_search": "greedy",
    "do_sample": "do_sample",
    "sample": "do_sample",
    "greedy_search_with_sampling": "do_sample",
    "beam_search": "beam_search",
    "beam_search_with_sampling": "beam_search_with_sampling",
}


@dataclass(frozen=True)
class GenerationSettings:
    """Settings of the answers.

    Attributes:
        sampling: cut-offs, end tokens and the longest answer; its temperature is 0 for greedy and plain beam search.
        num_return: answers to each prompt.
        num_beams: beams, for the beam methods.
        length_penalty: see `BeamSettings`.
        stop_strings: texts that end an answer; they are removed.
        max_model_len: limit of the tokens of prompt and answer.
    """

    method: Method
    sampling: Sampling
    max_model_len: int
    num_return: int = 1
    num_beams: int = 2
    length_penalty: float = 1.0
    stop_strings: tuple[str, ...] = ()
    seed: int = 1234

    def __post_init__(self) -> None:
        limits = {"greedy": 1, "beam_search": self.num_beams, "beam_search_with_sampling": self.num_beams}
        limit = limits.get(self.method)
        if self.num_return < 1 or (limit is not None and self.num_return > limit):
            allowed = "at least 1" if limit is None else "1" if limit == 1 else f"between 1 and --num-beams {limit}"
            raise ValueError(f"--num-return {self.num_return}: {self.method} gives {allowed} answers to a prompt")
        if self.uses_beams and self.num_beams < 2:
            raise ValueError(f"--num-beams {self.num_beams}: {self.method} needs at least 2 beams")
        if self.uses_beams and self.stop_strings:
            raise ValueError(f"--stop: {self.method} ends sequences at tokens only; use --add-eos-token")
        if self.method == "beam_search_with_sampling":
            if self.sampling.top_k < 1:
                raise ValueError("--top-k -1: beam_search_with_sampling looks at the most likely tokens only; say how many")
            if self.sampling.temperature == 0 or self.sampling.min_p > 0:
                raise ValueError("beam_search_with_sampling needs a --temperature above 0, and knows no --min-p")
        if self.uses_beams and (changed := self.sampling.list_penalties()):
            raise ValueError(f"--{changed[0].replace('_', '-')}: {self.method} ranks sequences only by their log-probs")

    @property
    def uses_beams(self) -> bool:
        return self.method.startswith("beam")

    @property
    def max_log_probs(self) -> int:
        """Next tokens that the method requests from the engine."""
        if not self.uses_beams:
            return 1
        return max(2 * self.num_beams, self.sampling.top_k if self.method == "beam_search_with_sampling" else 0)


@dataclass(frozen=True)
class GeneratedAnswer:
    """One answer.

    Attributes:
        prompt, sample: indexes of the prompt and of its answer.
        num_tokens: with the end token.
        log_prob: log-prob of all its tokens under the model without temperature or cut-offs (of the beam, for beam methods: for
            sampling under the distribution with cut-offs).
    """

    prompt: int
    sample: int
    text: str
    num_tokens: int
    log_prob: float
    finish: Finish


def generate(
    engine: Engine,
    prompt_format: PromptFormat,
    prompts: Sequence[list[int]],
    settings: GenerationSettings,
    images: Sequence[tuple[str, ...]] = (),
) -> list[GeneratedAnswer]:
    """Return all answers, by prompt and sample.

    Args:
        engine: that answers.
        prompt_format: decodes the answers.
        prompts: token ids.
        settings: settings of the answers.
        images: references of the images of each prompt; empty where no prompt has any.

    Raises:
        ValueError: beams of a prompt with images.
    """
    if settings.uses_beams:
        if any(images):
            raise ValueError(f"--task {settings.method} reads only text, and a prompt has images; use greedy or do_sample")
        return [answer for index, ids in enumerate(prompts) for answer in _search(engine, prompt_format, index, ids, settings)]
    requests = [
        Request(
            ids,
            seed=sample_seed(settings.seed, 0, index, sample),
            max_tokens=min(settings.sampling.max_tokens, settings.max_model_len - len(ids)),
            images=images[index] if images else (),
        )
        for index, ids in enumerate(prompts)
        for sample in range(settings.num_return)
    ]
    # the full conversation is shown, where a benchmark takes the last turn
    answers = collect(engine.stream(requests, settings.sampling, settings.stop_strings), len(requests), earlier_turns=True)
    return [
        GeneratedAnswer(
            *divmod(row, settings.num_return),
            cut_at_stop(prompt_format.decode(answer.token_ids), settings.stop_strings),
            len(answer.token_ids),
            answer.log_prob,
            answer.finish,
        )
        for row, answer in enumerate(answers)
    ]


def _search(
    engine: Engine, prompt_format: PromptFormat, index: int, ids: list[int], settings: GenerationSettings
) -> Iterator[GeneratedAnswer]:
    sampling = settings.sampling
    sampled = settings.method == "beam_search_with_sampling"
    beams = beam_search(
        ids,
        engine.next_tokens,
        BeamSettings(
            settings.num_beams,
            min(sampling.max_tokens, settings.max_model_len - len(ids)),
            frozenset(sampling.stop_token_ids),
            settings.length_penalty,
            (sampling.temperature, sampling.top_k, sampling.top_p) if sampled else None,
            sample_seed(settings.seed, 0, index, 0),
        ),
    )
    for sample, beam in enumerate(beams[: settings.num_return]):
        text = prompt_format.decode(beam.token_ids)
        yield GeneratedAnswer(index, sample, text, len(beam.token_ids), beam.log_prob, "stop" if beam.finished else "length")


# ---------------------------------------------------------------------- prompts from files


def read_jsonl(
    lines: Iterable[str], where: str, prompt_key: str | None, image_folder: str | None = None
) -> list[tuple[Conversation, dict[str, Any]]]:
    """Read (conversation, row) of every line.

    A row has `messages` in OpenAI's form, or a text `prompt` (or `prompt_key`, `question`, or `instruction` with `input`). It
    may have images, in all forms of a dataset's.

    Args:
        lines: one row each.
        where: they are from, for messages.
        prompt_key: column of the prompt.
        image_folder: folder of relative paths; None: the working directory.

    Raises:
        ValueError: a line is not such a row; the message has its number.
    """
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise MalformedRowError(f"a row is a JSON object, not {type(row).__name__}")
            reader = ImageReader(None, IMAGE_MARK, image_folder)
            changed, references = reader.take(row, list(row))
            # without images the tag is text, as in a model of text
            conversation = read_conversation(changed if references else row, prompt_key)
            rows.append((reader.place(conversation, references) if references else conversation, row))
        except (json.JSONDecodeError, MalformedRowError) as error:
            raise ValueError(f"{where}, line {number}: {error}") from error
    if not rows:
        raise ValueError(f"{where} has no rows")
    return rows


def read_conversation(row: Mapping[str, Any], prompt_key: str | None = None) -> Conversation:
    """Read the conversation of a row.

    Raises:
        MalformedRowError: it has none of the known columns, or messages that do not end with a question.
    """
    keys = (prompt_key,) if prompt_key is not None else ("messages", "prompt", "question", "instruction")
    for key in keys:
        value = json_columns.read_messages(row.get(key), key)
        if isinstance(value, list):
            system, messages = openai_messages(value)
            break
        if isinstance(value, str) and (key != "messages" or key == prompt_key):
            extra = row.get("input") if key == "instruction" else None
            text = f"{value}\n{extra}" if isinstance(extra, str) and extra else value
            if not text.strip():
                raise MalformedRowError(f"the prompt (column {key}) is empty")
            system, messages = None, [user(text)]
            break
    else:
        names = (prompt_key,) if prompt_key is not None else keys[1:]
        raise MalformedRowError(
            f"the row has no text {' or '.join(map(str, names))} and no messages; it has {', '.join(row) or 'nothing'}"
        )
    own = row.get("system") if isinstance(row.get("system"), str) and row.get("system") else None
    if own is not None and system not in (None, own):
        raise MalformedRowError(f"two system prompts: {own[:60]!r} in column 'system', and {system!r} as a message")
    if row.get("history"):
        raise MalformedRowError("a column 'history', which is not read here; write the conversation as messages")
    conversation = Conversation(messages, own or system, parse_tools(row.get("tools")))
    _check_question(conversation)
    return conversation


def _check_question(conversation: Conversation) -> None:
    conversation.check_roles()
    first, last = conversation.messages[0], conversation.messages[-1]
    if first.role != "user":
        raise MalformedRowError("the first message is a tool's result, without a question before it")
    if last.role not in SOURCE_ROLES:
        raise MalformedRowError("the last message is from the assistant: there is nothing to answer")
    if not last.content.strip():
        raise MalformedRowError("the last message is empty: there is nothing to answer")


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write one JSON object a line; create the folders."""
    with replace_file(path, makes_folder=True) as partial, partial.open("w", encoding="utf-8", errors="surrogatepass") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
