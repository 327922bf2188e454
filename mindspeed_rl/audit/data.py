"""The audit of a run's prompts: what would waste its rollouts, or make its figures look better than they are.

One pass over the data finds what a row shows by itself; duplicates are found after it, from the hashes of all rows.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_rl.audit.near_duplicates import NearDuplicates
from mindspeed_rl.audit.overlap import OverlapIndex
from mindspeed_rl.audit.pass_rates import COLUMN, PassRates
from mindspeed_rl.audit.report import AuditReport, Section
from mindspeed_rl.audit.rows import AuditRow, RowPart, fits
from mindspeed_rl.audit.texts import (
    FRAME_TEXTS,
    find_frame,
    find_language,
    hash_text,
    hash_words,
    normalise,
    strip_frame,
)
from mindspeed_rl.data.card import describe_lengths
from mindspeed_rl.data.prompts import fits_limit
from mindspeed_rl.files import replace_file
from mindspeed_rl.rewards.labels import find_trials, is_matchable
from mindspeed_rl.run import Run
from mindspeed_rl.scratch import scratch_folder
from mindspeed_rl.texts import SHOWN, cut_end

#: examples of a finding, and characters of one
_EXAMPLES = 3
#: different labels whose verdicts are remembered, and that are counted
_REMEMBERED_LABELS, _COUNTED_LABELS = 1 << 18, 1 << 16
#: share of the rows with a label from which its constant answer is a finding, and margin over the chance of one of few labels
_CONSTANT, _OVER_CHANCE = 0.4, 0.15
#: share of the rows from which a label in the prompt is the task's form, and no finding
_IN_FORM = 0.3
#: words and characters of a label that is found in a prompt without a word such as "answer" before it
_LONG_WORDS, _LONG_CHARS = 8, 40
#: share of max_prompt_length that the longest prompt should need
_USED_LENGTH = 0.25
_NO_LABEL = 0

#: what is before an answer that a prompt gives away, and after one that it only offers
_LEAD = re.compile(
    r"(?:(?:answer|solution|result)\s*(?:(?:is|are|was)\s*[:：]?|[:：=])|(?:答案|结果|解)\s*(?:[是为]\s*[:：]?|[:：=])|####|\\boxed\{)\s*[\"'“*$(]*$",
    re.IGNORECASE,
)
_CHOICE = re.compile(r"[\"'”*$)]*\s*(?:,|/|\bor\b|，|、|或|还是)", re.IGNORECASE)
_FINAL = re.compile(r"####\s*(.+?)\s*$")


@dataclass(frozen=True)
class Kind:
    """A kind of finding; its rows count against the bound, and are left out of a cleaned file.

    Attributes:
        title: what is wrong with a row, in a table.
        advice: what to change.
    """

    title: str
    advice: str


KINDS: dict[str, Kind] = {
    "malformed": Kind("cannot be read", "Mend the rows, or leave them out with actor_config.on_bad_row: skip."),
    "empty": Kind("empty prompt or label", "Leave the rows out: nothing can be learnt from them."),
    "too_long": Kind("left out for its length", "Raise rl_config.max_prompt_length, or shorten the prompts."),
    "cut": Kind(
        "cut to its last tokens", "Raise rl_config.max_prompt_length: a question without its beginning is another one."
    ),
    "label": Kind(
        "label that no response can match",
        "A label is the answer itself, in the form that rl_config.verifier_function compares with.",
    ),
    "answer": Kind("prompt gives the answer away", "Remove the answer from the prompt: the run learns to copy it."),
    "overlap": Kind(
        "overlaps with an evaluation prompt",
        "Leave the rows out: the evaluation would measure what was learnt by heart.",
    ),
    "duplicate": Kind("equal to an earlier prompt", "Keep one: a prompt that is there twice counts twice."),
    "conflict": Kind(
        "equal to an earlier prompt, with another label",
        "Find out which label is right: one of the two rewards a wrong answer.",
    ),
    "near_duplicate": Kind("nearly equal to an earlier prompt", "Keep one: the other teaches nothing new."),
}
#: reasons to leave out a row that are not faults: with samples of a model, and on request
DECIDED: dict[str, Kind] = {
    "never": Kind("no sample of the model is right", "Begin with easier prompts, or check the label."),
    "always": Kind("all samples of the model are right", "The model has learnt it already."),
}


@dataclass
class Finding:
    """Rows with one kind of fault.

    Attributes:
        count: number of them.
        examples: the first few, as sentences.
    """

    count: int = 0
    examples: list[str] = field(default_factory=list)

    def add(self, text: str) -> None:
        """Count a row."""
        self.count += 1
        if len(self.examples) < _EXAMPLES:
            self.examples.append(text)


@dataclass
class DataAudit:
    """Findings of an audit.

    Attributes:
        name: data_path.
        num_rows: rows that were read.
        findings: by kind.
        reasons: index of a row -> kind and detail of its first fault; such rows are left out of a cleaned file.
        constant: the most frequent label, its share of the rows with labels, and whether a constant answer earns too much.
        labels: a sentence about the labels.
        lengths: tokens of the prompts, [prompts] int32.
        languages: writing of the prompts -> number.
        notes: sentences about the data as a whole, which count against no bound.
        held_out: evaluation set -> number of its prompts.
        pass_rates: pass rates of the prompts from samples of a model; None without one.
    """

    name: str
    num_rows: int = 0
    findings: dict[str, Finding] = field(default_factory=dict)
    reasons: dict[int, tuple[str, str]] = field(default_factory=dict)
    constant: tuple[str, float, bool] | None = None
    labels: str = ""
    lengths: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    languages: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)
    held_out: dict[str, int] = field(default_factory=dict)
    pass_rates: PassRates | None = None

    def add(self, index: int, kind: str, row: str, detail: str) -> None:
        """Record a fault of a row; its first one is the reason to leave it out."""
        self.findings.setdefault(kind, Finding()).add(f"{row}: {detail}" if detail else row)
        self.reasons.setdefault(index, (kind, detail))

    @property
    def faulty_share(self) -> float:
        """Share of the rows with a fault."""
        return len(self.reasons) / max(1, self.num_rows)

    def describe(self, bound: float) -> AuditReport:
        """Return the audit as a report.

        Args:
            bound: largest share of rows with a fault.
        """
        share = f"{len(self.reasons):,} of {self.num_rows:,} rows have a fault ({self.faulty_share:.2%}; bound {bound:.2%})"
        wins = "; a constant answer wins" if self.constant is not None and self.constant[2] else ""
        shown = {kind: self.findings[kind] for kind in KINDS if kind in self.findings}
        faults = Section(
            "Rows with a fault",
            ("fault", "rows", "share", "example"),
            [
                (KINDS[kind].title, f"{one.count:,}", f"{one.count / self.num_rows:.2%}", "\n".join(one.examples))
                for kind, one in shown.items()
            ],
            empty="none",
        )
        facts = {
            "data": self.name,
            "evaluation": ", ".join(f"{name} ({count:,} prompts)" for name, count in self.held_out.items()) or "none",
            "lengths": describe_lengths(self.lengths),
            "labels": self.labels,
            "writing": ", ".join(f"{number:,} {name}" for name, number in self.languages.most_common()),
        }
        advice = [f"{KINDS[kind].title}: {KINDS[kind].advice}" for kind in shown]
        if wins:
            advice.append(
                "labels: balance the data, or ask for answers that are not one of few; a constant answer is the first that a"
                " run finds."
            )
        return AuditReport(
            f"audit of data: {self.name}",
            share + wins,
            not self.exceeds(bound),
            [
                Section("Data", ("", ""), [(name, text) for name, text in facts.items() if text]),
                faults,
                *([] if self.pass_rates is None else [self.pass_rates.describe()]),
                Section("Notes", ("",), [(note,) for note in self.notes]),
                Section("What to change", ("",), [(text,) for text in advice]),
            ],
        )

    def encode(self, bound: float) -> dict[str, object]:
        """Return the audit as plain values."""
        constant = None
        if self.constant is not None:
            constant = {"label": self.constant[0], "share": self.constant[1], "wins": self.constant[2]}
        return {
            "data": self.name,
            "rows": self.num_rows,
            "faulty_rows": len(self.reasons),
            "faulty_share": self.faulty_share,
            "bound": bound,
            "passes": not self.exceeds(bound),
            "findings": {kind: {"rows": one.count, "examples": one.examples} for kind, one in self.findings.items()},
            "constant_answer": constant,
            "writing": dict(self.languages),
            "evaluation": self.held_out,
            "notes": self.notes,
            **({} if self.pass_rates is None else {"pass_rates": self.pass_rates.encode()}),
        }

    def exceeds(self, bound: float) -> bool:
        """Return True where more than this share of the rows have a fault, or a constant answer wins."""
        return self.faulty_share > bound or self.constant is not None and self.constant[2]


class _Labels:
    """Labels of the rows: verdicts of the built-in verifiers, and how often each label is there."""

    def __init__(self, run: Run) -> None:
        self._trials = find_trials(run.rl.verifier_function if run.rl.rule_reward else [])
        self._verdicts: dict[int, str] = {}
        self._counts: Counter[str] = Counter()
        self._num_labels = 0

    def check(self, row: AuditRow) -> str:
        """Count the label of a row; return what is wrong with it, empty for nothing."""
        if row.label is None:
            return ""
        self._num_labels += 1
        self._counts[find_final(row.label)[: 2 * SHOWN]] += 1
        if len(self._counts) > _COUNTED_LABELS:  # lossy counting: a frequent label is never among the rarest
            self._counts = Counter(dict(self._counts.most_common(_COUNTED_LABELS // 2)))
        # other columns, such as tests, are read with the label
        if row.columns:
            return self._try(row)
        key = hash_text(row.label)
        if key not in self._verdicts:
            if len(self._verdicts) >= _REMEMBERED_LABELS:
                self._verdicts.clear()
            self._verdicts[key] = self._try(row)
        return self._verdicts[key]

    def _try(self, row: AuditRow) -> str:
        wrong = [name for name, trial in self._trials.items() if not is_matchable(trial, row.label, row.columns)]
        return f"{', '.join(wrong)}: {cut_end(row.label or '')!r}" if wrong else ""

    def describe(self) -> tuple[str, tuple[str, float, bool] | None]:
        """Return a sentence about the labels, and the most frequent one with its share."""
        if not self._num_labels:
            return "none", None
        label, count = self._counts.most_common(1)[0]
        share, different = count / self._num_labels, len(self._counts)
        chance = 1 / different
        # of two labels one is there half of the time; a single one is a constant without a choice
        wins = different > 1 and share >= max(_CONSTANT, chance + _OVER_CHANCE) or different == 1 and self._num_labels > 1
        many = "or more " if different >= _COUNTED_LABELS // 2 else ""
        text = f"{different:,} {many}different in {self._num_labels:,} rows"
        return f"{text}; always answering {cut_end(label, 40)!r} is right in {share:.1%}", (label, share, wins)


def audit_data(
    train: RowPart, held_out: Mapping[str, RowPart], run: Run, *, report: Callable[[str], None] = lambda _: None
) -> DataAudit:
    """Audit the prompts of a run; memory grows by 170 to 340 bytes for each row, and with the evaluation sets.

    Args:
        report: takes a line about what is done.

    Raises:
        ValueError: the data cannot be read at all, or a part has no row.
    """
    frame = find_frame([row.text for part in (train, *held_out.values()) for row in _first_prompts(part)])
    audit = DataAudit(train.stream.data_path)
    index = _index_held_out(held_out, frame, audit)
    labels = _Labels(run)
    given_away: list[tuple[int, str, str]] = []
    keys, label_keys, lengths = (_Numbers(kind) for kind in (np.uint64, np.uint64, np.int32))
    places = _Places()
    with scratch_folder("mindspeed-rl-audit-") as folder, contextlib.closing(NearDuplicates(folder)) as near:
        for number, row in train:
            audit.num_rows += 1
            if audit.num_rows % 100_000 == 0:
                report(f"{audit.num_rows:,} rows")
            if row.left_out:
                audit.add(number, "malformed" if row.detail else "empty", row.where, row.detail or row.left_out)
                continue
            lengths.append(len(row.tokens))
            question = strip_frame(row.text, frame)
            audit.languages[find_language(question)] += 1
            text = normalise(question)
            words = hash_words(text)
            _check_row(audit, number, row, labels, run)
            if index is not None and (found := index.find(words)) is not None:
                audit.add(number, "overlap", row.where, f"{found[1]:.0%} of {index.where(found[0])}: {cut_end(question)!r}")
            if detail := find_answer(question, row.label):
                given_away.append((number, row.where, detail))
            keys.append(hash_text(text))
            label_keys.append(_NO_LABEL if row.label is None else hash_text(normalise(row.label)))
            places.append(number, row)
            near.add(text, words)
        if not audit.num_rows:
            raise ValueError(f"megatron_training.{train.stream.key}: {train.stream.data_path} has no row")
        report(f"{audit.num_rows:,} rows read; comparing them")
        audit.lengths = lengths.values
        audit.labels, audit.constant = labels.describe()
        _add_given_away(audit, given_away, len(lengths.values))
        originals = near.find_originals()
    _add_duplicates(audit, places, keys.values, label_keys.values, originals)
    audit.notes += _describe_plan(audit, run)
    return audit


def _first_prompts(part: RowPart) -> Iterator[AuditRow]:
    return islice((row for _, row in part if not row.left_out), FRAME_TEXTS)


class _HeldOutIndex(OverlapIndex):
    """Evaluation prompts, with the place of each."""

    def __init__(self, places: Mapping[str, str]) -> None:
        super().__init__(places)
        self._places = list(places.values())

    def where(self, row: int) -> str:
        """Return file and row of an evaluation prompt."""
        return self._places[row]


def _index_held_out(held_out: Mapping[str, RowPart], frame: tuple[int, int], audit: DataAudit) -> _HeldOutIndex | None:
    places: dict[str, str] = {}
    for name, part in held_out.items():
        audit.held_out[name], left_out = 0, list[AuditRow]()
        for _, row in part:
            if row.left_out:
                left_out.append(row)
                continue
            audit.held_out[name] += 1
            places.setdefault(normalise(strip_frame(row.text, frame)), row.where)
        example = "".join(f"; {row.where}: {row.detail or row.left_out}" for row in left_out[:1])
        if not audit.held_out[name]:
            raise ValueError(f"megatron_training.{part.stream.key}: {part.stream.data_path} has no prompt{example}")
        if left_out:
            total = audit.held_out[name] + len(left_out)
            audit.notes.append(f"{len(left_out):,} of {total:,} rows of the evaluation set {name} are left out{example}")
    return _HeldOutIndex(places) if places else None


def _check_row(audit: DataAudit, number: int, row: AuditRow, labels: _Labels, run: Run) -> None:
    """Record what a row shows by itself."""
    if not fits(row, run):
        kind = "cut" if run.rl.long_prompts == "cut_left" else "too_long"
        audit.add(number, kind, row.where, f"{len(row.tokens)} tokens, max_prompt_length={run.rl.max_prompt_length}")
    if row.label is not None and not row.label.strip():
        audit.add(number, "empty", row.where, "empty label")
    if detail := labels.check(row):
        audit.add(number, "label", row.where, detail)


def find_final(label: str) -> str:
    """Return the answer of a label: what follows GSM8K's ####, else the label."""
    final = _FINAL.search(label)
    return final[1] if final else label.strip()


def find_answer(prompt: str, label: str | None) -> str:
    """Return how a prompt gives its label away; empty where it does not.

    It does where the label follows a word such as "answer is", or is a long text that the prompt has as a whole. A short label
    elsewhere, such as the 3 of "3 apples", is chance; one of several choices is the question.
    """
    if label is None:
        return ""
    answer = find_final(label)
    if not answer or answer[0] in "{[" or len(answer) > len(prompt):
        return ""
    place = prompt.find(answer)
    while place >= 0:
        end = place + len(answer)
        is_word = not (answer[-1].isalnum() and prompt[end : end + 1].isalnum() or re.match(r"[.,]\d", prompt[end : end + 2]))
        if is_word and _LEAD.search(prompt, max(0, place - 40), place) and not _CHOICE.match(prompt, end):
            return f"{cut_end(prompt[max(0, place - 40) : end])!r}"
        place = prompt.find(answer, place + 1)
    is_long = len(answer) >= _LONG_CHARS and len(answer.split()) >= _LONG_WORDS or len(answer) >= 2 * _LONG_CHARS
    return f"the whole label: {cut_end(answer)!r}" if is_long and answer in prompt else ""


def _add_given_away(audit: DataAudit, rows: list[tuple[int, str, str]], num_prompts: int) -> None:
    """Record prompts that give their answer away, unless so many do that it is the task: a text to copy from."""
    if num_prompts >= 20 and len(rows) >= _IN_FORM * num_prompts:
        audit.notes.append(
            f"{len(rows):,} of {num_prompts:,} prompts have their label in them, such as {rows[0][1]}: {rows[0][2]}. This is"
            " not a finding where the task is to find it there; otherwise the run learns to copy."
        )
        return
    for number, where, detail in rows:
        audit.add(number, "answer", where, detail)


def _add_duplicates(audit: DataAudit, places: _Places, keys: np.ndarray, label_keys: np.ndarray, originals: np.ndarray) -> None:
    """Record prompts that were there before; all arrays are of prompts, [prompts]."""
    _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    exact, every = first[inverse], np.arange(len(keys))
    for index in np.flatnonzero((exact != every) | (originals != every)).tolist():
        is_exact = exact[index] != index
        original = int(exact[index] if is_exact else originals[index])
        kind = "near_duplicate" if not is_exact else "duplicate" if label_keys[index] == label_keys[original] else "conflict"
        audit.add(places.rows.values[index].item(), kind, places.where(index), f"as {places.where(original)}")


def _describe_plan(audit: DataAudit, run: Run) -> Iterator[str]:
    """Yield sentences about the data against the batch plan of the run."""
    kept = audit.lengths
    if run.rl.long_prompts != "cut_left":
        kept = kept[fits_limit(kept, run.rl.max_prompt_length, run.rl.long_prompts)]
    batch = 0 if run.sizes is None else run.sizes.rollout_prompts
    if 0 < len(kept) < batch:
        prompts = "1 prompt is" if len(kept) == 1 else f"{len(kept):,} prompts are"
        yield f"{prompts} fewer than the {batch} of a rollout (global_batch_size): each comes several times."
    longest = int(kept.max(initial=0))
    if longest and longest < _USED_LENGTH * run.rl.max_prompt_length:
        yield (
            f"The longest prompt has {longest} tokens, and rl_config.max_prompt_length is {run.rl.max_prompt_length}: a lower"
            " value leaves more memory to the responses."
        )
    main = [name for name, number in audit.languages.most_common() if number >= 0.01 * audit.languages.total()]
    others = {name: number for name, number in audit.languages.items() if name not in main}
    if others:
        listed = ", ".join(f"{number:,} in {name}" for name, number in others.items())
        yield f"A few prompts are written otherwise than the others ({' and '.join(main)}): {listed}."


class _Numbers:
    """Numbers of one type that are appended, in a compact array."""

    def __init__(self, kind: Any) -> None:
        self._array, self._count = np.zeros(1 << 12, kind), 0

    def append(self, value: int) -> None:
        """Append a number."""
        if self._count == len(self._array):
            self._array = np.concatenate([self._array, np.zeros_like(self._array)])
        self._array[self._count] = value
        self._count += 1

    @property
    def values(self) -> np.ndarray:
        """All numbers."""
        return self._array[: self._count]


class _Places:
    """File and row of each prompt, and its index among all rows."""

    def __init__(self) -> None:
        self.rows = _Numbers(np.int64)
        self._numbers, self._files = _Numbers(np.int64), _Numbers(np.int32)
        self._paths: dict[str, int] = {}

    def append(self, index: int, row: AuditRow) -> None:
        """Append the place of a row, `index` among all rows."""
        self.rows.append(index)
        self._numbers.append(row.number)
        self._files.append(self._paths.setdefault(row.path, len(self._paths)))

    def where(self, prompt: int) -> str:
        """Return file and row of a prompt, for messages."""
        return f"{Path(list(self._paths)[self._files.values[prompt]]).name}, row {self._numbers.values[prompt]}"


def check_cleanable(train: RowPart, option: str = "--clean") -> None:
    """Raise ValueError for preprocessed data, whose rows cannot be written as they were."""
    if not train.stream.is_raw:
        raise ValueError(
            f"{option}: {train.stream.data_path} is preprocessed; audit the raw data that it was made of "
            "(megatron_training.data_path=FILE)"
        )


def name_dropped(path: Path) -> Path:
    """Return the file with the reasons next to a cleaned file."""
    return path.with_name(f"{path.stem}.dropped.jsonl")


def write_clean(
    audit: DataAudit,
    train: RowPart,
    path: Path,
    added: Mapping[int, Mapping[str, object]] | None = None,
    decided: Mapping[int, str] | None = None,
) -> tuple[int, int]:
    """Write the rows without a fault as JSON lines, and the others with their reasons to `<name>.dropped.jsonl`.

    Args:
        added: index of a row -> further columns of it.
        decided: index of a row -> kind of `DECIDED` for which it is left out too.

    Returns:
        Rows of both files.

    Raises:
        ValueError: the data are preprocessed, a part of a data set, or have a value that JSON has not.
        OSError: a file cannot be written.
    """
    check_cleanable(train)
    dropped_path = name_dropped(path)
    kept = dropped = 0
    reasons_of = {index: (kind, "") for index, kind in (decided or {}).items()} | audit.reasons
    with contextlib.ExitStack() as files:
        clean, reasons = (
            files.enter_context(files.enter_context(replace_file(file)).open("wb")) for file in (path, dropped_path)
        )
        for index, (file, number, row) in enumerate(train.stream.read_source_rows()):  # as the stream counts
            if index in reasons_of:
                kind, detail = reasons_of[index]
                line = {"file": file, "row": number, "reason": (KINDS | DECIDED)[kind].title, "detail": detail}
                reasons.write(encode_line(line, f"{file}, row {number}"))
                dropped += 1
            elif isinstance(row, Mapping):
                more = {} if added is None else added.get(index, {})
                clean.write(encode_line({**row, **more}, f"{file}, row {number}"))
                kept += 1
    return kept, dropped


def write_pass_rates(rates: PassRates, train: RowPart, path: Path) -> int:
    """Write the rows that have a pass rate as JSON lines, with it as a column; return their number.

    Raises:
        ValueError: the data are preprocessed, or a row has a value that JSON has not.
        OSError: the file cannot be written.
    """
    count = 0
    with replace_file(path) as partial, partial.open("wb") as file:
        for index, (source, number, row) in enumerate(train.stream.read_source_rows()):
            if index not in rates.rates or not isinstance(row, Mapping):
                continue
            if COLUMN in row:
                raise ValueError(f"--pass-rates: {source}, row {number} has a column {COLUMN} of its own; rename it")
            line = {**row, COLUMN: rates.rates[index]}
            file.write(encode_line(line, f"{source}, row {number}", "--pass-rates"))
            count += 1
    return count


def encode_line(row: Mapping[str, object], where: str, option: str = "--clean") -> bytes:
    """Return a row as a line of JSON.

    Raises:
        ValueError: it has a value that JSON has not; the message names the row and the option of the file.
    """
    try:
        return json.dumps(row, ensure_ascii=False, allow_nan=False).encode() + b"\n"
    except UnicodeEncodeError:  # half of a character, which only JSON's escapes can write
        return json.dumps(row, allow_nan=False).encode() + b"\n"
    except (TypeError, ValueError) as error:
        raise ValueError(f"{option}: {where} cannot be written as JSON: {error}") from error
