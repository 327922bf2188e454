"""The forms of raw rows that are recognized by their columns, and the handler that reads each for a kind of training."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from mindspeed_rl import registry
from mindspeed_rl.data import handler_class
from mindspeed_rl.data.conversation import Row
from mindspeed_rl.data.handlers.base import Handler
from mindspeed_rl.data.images import is_media
from mindspeed_rl.data.sources import RowSource, TaggedRow, read_rows

#: what a row is to a stage: a document, samples with answers, a pair of answers, one judged answer, or judged steps
Kind = Literal["documents", "samples", "pairs", "judged answers", "judged steps", "prompts"]

_PAIRS: tuple[Kind, ...] = ("pairs",)
#: stage -> kinds of rows that it learns from, the first one preferred
STAGE_KINDS: dict[str, tuple[Kind, ...]] = {
    "pretrain": ("documents",),
    "sft": ("samples",),
    **dict.fromkeys(("dpo", "simpo", "cpo", "orpo", "orm"), _PAIRS),
    "kto": ("judged answers", "pairs"),
    "prm": ("judged steps",),
}
#: kind -> base of its handlers
_BASES: dict[Kind, str] = {
    "documents": "pretrain:DocumentHandler",
    "samples": "instruction:InstructionHandler",
    "pairs": "pairwise:PairwiseHandler",
    "judged answers": "pairwise:UnpairedHandler",
    "judged steps": "process_reward:AlpacaStyleProcessRewardHandler",
    "prompts": "prompt:PromptHandler",
}


def _is_text(value: object) -> bool:
    return value is None or isinstance(value, (str, int, float)) and not isinstance(value, bool)


def _is_list_with(*keys: str) -> Callable[[object], bool]:
    """Return a test for a list of messages with these keys, or its JSON text."""

    def test(value: object) -> bool:
        if isinstance(value, str) and value.lstrip().startswith("["):
            try:
                value = json.loads(value)
            except ValueError:
                return False
        return (
            isinstance(value, (list, tuple))
            and bool(value)
            and all(isinstance(entry, Mapping) and any(key in entry for key in keys) for entry in value)
        )

    return test


def _is_judgement(value: object) -> bool:
    return str(value).lower() in ("true", "false", "1", "0")


_MESSAGES, _TURNS = _is_list_with("role"), _is_list_with("from")


def _is_answer(value: object) -> bool:
    return _is_text(value) and value is not None or isinstance(value, Mapping) or _MESSAGES(value) or _TURNS(value)


def _is_list_of_texts(value: object) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(entry, str) for entry in value)


@dataclass(frozen=True)
class Form:
    """A form of rows.

    Attributes:
        name: name of the form.
        handler: name of the handler that reads it.
        values: key of the handler's map -> test of the column's value; a row of the form has all of these columns.
        columns: columns by these keys, where they are not the handler's own.
    """

    name: str
    handler: str
    values: Mapping[str, Callable[[object], bool]]
    columns: Mapping[str, str] = field(default_factory=dict)


def _list_questions(handler: str, answer: Mapping[str, Callable[[object], bool]]) -> tuple[Form, ...]:
    """Return forms of a question and an answer by other names of the columns than Alpaca's."""
    names = (
        ("prompt", "completion"),
        ("prompt", "response"),
        ("question", "answer"),
        ("query", "response"),
        ("input", "output"),
    )
    return tuple(
        Form(f"{question} and {reply}", handler, answer, {"prompt": question, "query": "", "response": reply})
        for question, reply in names
    )


_TEXTS = {"prompt": _is_text, "response": _is_text}
_JUDGED_TEXTS = {**_TEXTS, "label": _is_judgement}
_PAIR = {"chosen": _is_answer, "rejected": _is_answer}

#: kind -> its forms; the first that a row has is taken
FORMS: dict[Kind, tuple[Form, ...]] = {
    "documents": (
        Form("text with images", "ImageTextPretrainHandler", {"text": _is_text, "images": is_media}),
        Form("text with videos", "ImageTextPretrainHandler", {"text": _is_text, "videos": is_media}),
        Form("text", "GeneralPretrainHandler", {"text": _is_text}),
        Form("content", "GeneralPretrainHandler", {"text": _is_text}, {"text": "content"}),
        Form("ShareGPT", "SharegptPretrainHandler", {"messages": _TURNS}),
        Form("messages", "SharegptPretrainHandler", {"messages": _MESSAGES}, {"messages": "messages"}),
        Form("Alpaca", "AlpacaPretrainHandler", _TEXTS),
    ),
    "samples": (
        Form("messages", "OpenAIInstructionHandler", {"messages": _MESSAGES}),
        Form("messages", "OpenAIInstructionHandler", {"messages": _MESSAGES}, {"messages": "conversations"}),
        Form("ShareGPT", "SharegptStyleInstructionHandler", {"messages": _TURNS}),
        Form("ShareGPT", "SharegptStyleInstructionHandler", {"messages": _TURNS}, {"messages": "messages"}),
        Form("Alpaca", "AlpacaStyleInstructionHandler", _TEXTS),
        *_list_questions("AlpacaStyleInstructionHandler", _TEXTS),
    ),
    "pairs": (
        Form("ShareGPT pairs", "SharegptStylePairwiseHandler", {"messages": _TURNS, **_PAIR}),
        Form("Alpaca pairs", "AlpacaStylePairwiseHandler", {"prompt": _is_answer, **_PAIR}),
        *(
            Form(f"{name}, chosen and rejected", "AlpacaStylePairwiseHandler", {"prompt": test, **_PAIR}, {"prompt": name})
            for name, test in (("prompt", _is_answer), ("question", _is_answer), ("messages", _MESSAGES))
        ),
        Form("chosen and rejected conversations", "AlpacaStylePairwiseHandler", dict.fromkeys(_PAIR, _MESSAGES)),
    ),
    "judged answers": (
        Form("ShareGPT with a label", "SharegptStyleUnpairedHandler", {"messages": _TURNS, "label": _is_judgement}),
        Form("Alpaca with a label", "AlpacaStyleUnpairedHandler", _JUDGED_TEXTS),
        Form(
            "prompt, completion and label",
            "AlpacaStyleUnpairedHandler",
            {"prompt": _is_answer, "response": _is_answer, "label": _is_judgement},
            {"prompt": "prompt", "response": "completion"},
        ),
        *_list_questions("AlpacaStyleUnpairedHandler", _JUDGED_TEXTS),
    ),
    "judged steps": (
        Form("input and value", "AlpacaStyleProcessRewardHandler", {"prompt": _is_text, "response": _is_list_of_texts}),
    ),
    "prompts": (),
}  # fmt: skip


@dataclass(frozen=True)
class Reading:
    """How raw rows are read.

    Attributes:
        handler: name of the handler.
        map_keys: columns by the handler's names; None for its own.
        form: name of the form; empty where the user names the handler.
        columns: columns by which the form is recognized.
    """

    handler: str
    map_keys: Mapping[str, object] | None = None
    form: str = ""
    columns: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Describe the reading for the user."""
        rows = f"{self.form} rows (columns {', '.join(self.columns)})" if self.form else "rows"
        return f"{rows}, read by {self.handler}"


def find_form(row: Row, kind: Kind, map_keys: Mapping[str, object] | None = None) -> Reading | None:
    """Return how rows of a kind are read that have the columns of this one; None where no form is known.

    Args:
        map_keys: columns that the user has named.
    """
    for form in FORMS[kind]:
        known = handler_class(form.handler).default_map or dict.fromkeys(form.values)
        if not set(map_keys or ()) <= known.keys():
            continue
        named = {**form.columns, **(map_keys or {})}
        names = {key: named.get(key) or ("" if key in named else known[key] or key) for key in form.values}
        if all(name in row and form.values[key](row[name]) for key, name in names.items()):
            return Reading(form.handler, named or None, form.name, tuple(map(str, names.values())))
    return None


def kind_of(handler: type[Handler]) -> Kind | None:
    """Return the kind of rows that a handler reads; None for a user's own."""
    for kind, target in _BASES.items():
        if issubclass(handler, registry.load(f"mindspeed_rl.data.handlers.{target}", kind)):
            return kind
    return None


def read_first_row(source: RowSource) -> tuple[str, Row] | None:
    """Return the place and the content of the first row that is an object; None without one."""
    for path, number, row in read_rows(source):
        row = row.row if isinstance(row, TaggedRow) else row
        if isinstance(row, Mapping):
            return f"{path}, row {number}", row
    return None


def choose_reading(
    stage: str, source: RowSource, handler_name: str | None, map_keys: Mapping[str, object] | None, key: str
) -> Reading:
    """Return how a stage reads the rows of a source: by the handler that the user names, else by the columns of the first.

    Args:
        key: key of the run file that names the data.

    Raises:
        ValueError: the data is empty; the handler writes data of another stage; or no form is recognized.
    """
    first = read_first_row(source)
    if first is None:
        raise ValueError(f"megatron_training.{key}: the data has no row at all, not one line with columns")
    where, row = first
    kinds = STAGE_KINDS[stage]
    found = next((reading for kind in kinds if (reading := find_form(row, kind, map_keys)) is not None), None)
    if handler_name is not None:
        kind = kind_of(handler_class(handler_name))
        if kind is not None and kind not in kinds:
            hint = f"; {where} has {found}" if found else ""
            raise ValueError(
                f"megatron_training.handler_name: {handler_name} reads {kind}, but stage {stage} learns from"
                f" {' or '.join(kinds)}{hint}"
            )
        return Reading(handler_name, map_keys)
    if found is not None:
        return found
    names = ", ".join(map(str, row))
    other = _find_other_kind(row, map_keys, kinds)
    if other is not None:
        kind, reading = other
        stages = ", ".join(name for name, known in STAGE_KINDS.items() if kind in known)
        raise ValueError(
            f"megatron_training.{key}: {where} has the columns {names}: {reading.form} rows, which are {kind} for"
            f" stage {stages}; stage {stage} learns from {' or '.join(kinds)}"
        )
    forms = "; ".join(dict.fromkeys(_describe_form(form) for kind in kinds for form in FORMS[kind]))
    raise ValueError(
        f"megatron_training.{key}: {where} has the columns {names}, which stage {stage} does not know. Known are {forms}. Name"
        f" yours in megatron_training.map_keys, such as {_suggest_map(kinds[0])}, or the handler in handler_name"
    )


def _find_other_kind(row: Row, map_keys: Mapping[str, object] | None, kinds: tuple[Kind, ...]) -> tuple[Kind, Reading] | None:
    """Return another kind of which the row is, with its reading; documents could be made of all."""
    for kind in FORMS:
        if kind not in (*kinds, "documents") and (reading := find_form(row, kind, map_keys)) is not None:
            return kind, reading
    return None


def _describe_form(form: Form) -> str:
    known = handler_class(form.handler).default_map
    return " + ".join(str(form.columns.get(key) or known.get(key) or key) for key in form.values)


def _suggest_map(kind: Kind) -> str:
    form = FORMS[kind][-1]
    return "{" + ", ".join(f"{key}: COLUMN" for key in form.values) + "}"


def describe_right_handler(handler: Handler, row: Row) -> str:
    """Return a phrase that names the handler for a row which this one refuses; empty where it reads it, or none is known."""
    batch, kind = handler.encode([(1, row)]), kind_of(type(handler))
    reading = find_form(row, kind) if batch.bad and kind is not None else None
    if reading is None or handler_class(reading.handler) is type(handler) and not reading.map_keys:
        return ""
    columns = f" with map_keys {json.dumps(reading.map_keys)}" if reading.map_keys else ""
    return f"; {reading.form} rows are read by {reading.handler}{columns}"
