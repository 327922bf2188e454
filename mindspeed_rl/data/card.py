"""The data card of a run: rows, lengths, what was left out, labels, and two examples with their trained tokens marked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mindspeed_rl.data.indexed import DOCUMENTS, IGNORE_INDEX, IndexedColumns, open_indexed
from mindspeed_rl.data.summary import mark_text
from mindspeed_rl.texts import cut_middle

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from mindspeed_rl.data.prompts import PromptDataset

NUM_EXAMPLES = 2
#: rows, at equal distances, of which labels are counted
_COUNTED_ROWS = 2000
#: rows of which the last trained tokens are looked at
_CHECKED_ENDS = 64
#: characters of a text that are shown, and of each run of tokens that are alike
_SHOWN, _SHOWN_RUN = 600, 160
_INDENT = " " * 13


@dataclass(frozen=True)
class DataCard:
    """The card of one data set.

    Attributes:
        title: key of the run file, and its value.
        rows: what is known of it, by name; empty texts are not shown.
    """

    title: str
    rows: Mapping[str, str]

    def __str__(self) -> str:
        """Return the card as lines."""
        return "\n".join([self.title, *(f"  {name:<9}  {text}" for name, text in self.rows.items() if text)])

    def without_examples(self) -> DataCard:
        """Return the card of held-out data."""
        return DataCard(self.title, {name: text for name, text in self.rows.items() if not name.startswith("example")})


def describe_lengths(lengths: np.ndarray, limit: int | None = None) -> str:
    """Describe lengths in tokens: half, nine tenths, the longest, and how many reach a limit."""
    if not len(lengths):
        return ""
    half, p90 = (int(value) for value in np.percentile(lengths, [50, 90], method="higher"))
    text = f"half up to {half}, 90 % up to {p90}, longest {int(lengths.max())} tokens"
    over = 0 if limit is None else int((lengths > limit).sum())
    return text + (f"; {over} are longer than seq_length={limit}" if over else "")


def describe_dropped(rows_read: int, dropped: Mapping[str, int]) -> str:
    """Describe rows that are left out; empty where none is."""
    if not any(dropped.values()):
        return ""
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(dropped.items()) if count)
    return f"{sum(dropped.values())} of {rows_read} rows: {reasons}"


def _show(text: str, limit: int = _SHOWN) -> str:
    return cut_middle(text.replace("\n", "\\n"), limit)


def describe_columns(
    prefix: Path, stage: str, tokenizer: PreTrainedTokenizerBase, seq_length: int | None = None
) -> dict[str, str]:
    """Return the rows of the card of an indexed dataset.

    Args:
        prefix: --output-prefix of preprocessing; for stage pretrain the full prefix.
        seq_length: length at which the stage cuts or leaves out rows.
    """
    if stage == "pretrain":
        documents = open_indexed(prefix)
        lengths = np.array(documents.sequence_lengths)
        texts = [_mark(tokenizer, np.array(documents[index]), None) for index in range(min(NUM_EXAMPLES, len(documents)))]
        total = f"{int(lengths.sum(dtype=np.int64)):,}, all of them trained"
        return {"documents": f"{len(lengths):,}", "tokens": total, "lengths": describe_lengths(lengths)} | _number(texts)
    columns = IndexedColumns(prefix, [])
    sides = [name.removesuffix("input_ids") for name in columns.columns if name.endswith("input_ids")]
    sides.sort()  # chosen before rejected
    lengths = np.maximum.reduce([columns.lengths(f"{side}input_ids") for side in sides])
    unit = "documents" if DOCUMENTS in columns.columns else "rows"
    card = {unit: f"{len(columns):,}", "lengths": describe_lengths(lengths, seq_length)}
    labelled = [side for side in sides if f"{side}labels" in columns.columns]  # a reward model reads only the answers
    if labelled:
        card["trained"] = _count_trained(columns, labelled)
    has_answers = stage not in ("prm", "orm") and DOCUMENTS not in columns.columns
    if labelled and has_answers and not _has_ends(columns, labelled, tokenizer.eos_token_id):
        card["ends"] = (
            f"no answer ends with the end token {tokenizer.eos_token}: a model that learns them does not stop;"
            " the template of prompt_type, or append_eod, writes it"
        )
    if "desirable" in columns.columns:
        judged = [int(columns.row(index, "desirable")[0]) for index in _spread(len(columns))]
        card["labels"] = f"{100 * sum(judged) / len(judged):.0f} % desirable"
    examples = []
    for index in range(min(NUM_EXAMPLES, len(columns))):
        parts = [
            (
                side.rstrip("_"),
                _mark(
                    tokenizer,
                    columns.row(index, f"{side}input_ids"),
                    columns.row(index, f"{side}labels") if side in labelled else None,
                ),
            )
            for side in sides
        ]
        if "desirable" in columns.columns:
            parts.append(("desirable", str(bool(columns.row(index, "desirable")[0])).lower()))
        examples.append(f"\n{_INDENT}".join(f"{name}: {text}" if name else text for name, text in parts))
    return card | _number(examples)


def _spread(count: int) -> range:
    return range(0, count, max(1, -(-count // _COUNTED_ROWS)))


def _count_trained(columns: IndexedColumns, sides: Sequence[str]) -> str:
    """Describe the fraction of tokens with a label."""
    total = trained = untrained_rows = 0
    rows = _spread(len(columns))
    for index in rows:
        labels = [columns.row(index, f"{side}labels") for side in sides]
        count = sum(int((values != IGNORE_INDEX).sum()) for values in labels)
        total, trained = total + sum(map(len, labels)), trained + count
        untrained_rows += not count
    text = f"{100 * trained / max(total, 1):.0f} % of the tokens"
    return text + (f"; {untrained_rows} of {len(rows)} rows have no trained token" if untrained_rows else "")


def _has_ends(columns: IndexedColumns, sides: Sequence[str], eos_id: int) -> bool:
    """Return True where the last tokens of one of some rows are trained to be the end token, or a line break after it."""
    for index in list(_spread(len(columns)))[:_CHECKED_ENDS]:
        for side in sides:
            labels = columns.row(index, f"{side}labels")
            if eos_id in labels[labels != IGNORE_INDEX][-2:]:
                return True
    return False


def _mark(tokenizer: PreTrainedTokenizerBase, ids: np.ndarray, labels: np.ndarray | None) -> str:
    if labels is not None and len(labels) != len(ids):
        labels = None
    return _show(mark_text(tokenizer, ids, labels, limit=_SHOWN_RUN), 2 * _SHOWN)


def _number(texts: Iterable[str]) -> dict[str, str]:
    return {f"example {number}": text for number, text in enumerate(texts, start=1)}


def describe_prompts(prompts: PromptDataset, tokenizer: PreTrainedTokenizerBase, limit: int) -> dict[str, str]:
    """Return the rows of the card of prompts.

    Args:
        limit: max_prompt_length.
    """
    labels = [prompts[index]["label"] for index in _spread(len(prompts))]
    given = [label for label in labels if label is not None]
    different = len(set(given))
    described = "none; rewards and environments get no label"
    if given:
        described = f"{different} different ones in {len(given)} rows" + (
            " that were looked at" if len(given) < len(prompts) else ""
        )
    left_out = dict(prompts.dropped) | ({"too long": prompts.num_too_long} if prompts.num_too_long else {})
    columns = [name for name in prompts[0]["columns"] if name != "images"]
    examples = []
    for index in range(min(NUM_EXAMPLES, len(prompts))):
        item = prompts[index]
        text = _show(mark_text(tokenizer, item["prompt_ids"], None))
        label = "" if item["label"] is None else f"\n{_INDENT}label: {_show(item['label'], 200)}"
        examples.append(text + label)
    return {
        "rows": prompts.describe(),
        "lengths": f"{describe_lengths(prompts.lengths)} (max_prompt_length={limit})",
        "left out": describe_dropped(prompts.num_read, left_out),
        "labels": described,
        "columns": ", ".join(columns),
    } | _number(examples)
