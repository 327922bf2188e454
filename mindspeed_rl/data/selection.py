"""Data of the supervised stages from saved rollouts: the best responses, pairs of best and worst, or answers with a judgement.

Token ids come from the rollout: nothing is decoded and tokenized again.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from mindspeed_rl.algorithms.rollout_file import RolloutBatch
from mindspeed_rl.data.indexed import IGNORE_INDEX, UNPAIRED_COLUMNS, IndexedWriter, column_prefix, list_packed_columns

Kind = Literal["sft", "pairs", "unpaired"]
#: kind of data -> its columns
_COLUMNS: dict[str, tuple[str, ...]] = {
    "sft": ("input_ids", "attention_mask", "labels"),
    "pairs": ("chosen_input_ids", "chosen_labels", "rejected_input_ids", "rejected_labels"),
    "unpaired": UNPAIRED_COLUMNS,
}


@dataclass(frozen=True)
class SelectionSettings:
    """Settings of a selection, named as on the command line.

    Attributes:
        kind: `sft` takes the `best` responses of each prompt with a reward of at least `threshold`; `pairs` the best and the
            worst of each prompt, where their rewards differ by more than `margin`; `unpaired` all, judged by `threshold`.
        threshold: least reward of a good response; None takes any.
        best: responses of a prompt.
        margin: margin between the rewards of a pair; at 0 only equal rewards are left out.
        seq_length: longest sequence, in tokens; None takes any.
        keeps_duplicates: equal responses to a prompt count as often as they were sampled.
        keeps_truncated: responses that hit the length limit are taken.
        iterations: first and last iteration, counted from 1; None has no bound.
    """

    kind: Kind = "sft"
    threshold: float | None = None
    best: int = 1
    margin: float = 0.0
    seq_length: int | None = None
    keeps_duplicates: bool = False
    keeps_truncated: bool = False
    iterations: tuple[int | None, int | None] = (None, None)

    def __post_init__(self) -> None:
        if self.kind == "unpaired" and self.threshold is None:
            raise ValueError("--threshold: not set; answers of kind unpaired are desirable from this reward on")
        if self.best < 1 or self.margin < 0:
            raise ValueError(f"--best {self.best} must be at least 1 and --margin {self.margin:g} not negative")


@dataclass(frozen=True)
class _Response:
    """A response to a prompt.

    Attributes:
        input_ids, labels: [tokens] int32; labels are IGNORE_INDEX on what the actor did not sample.
        order: index over all rows that were read.
    """

    input_ids: np.ndarray
    labels: np.ndarray
    reward: float
    order: int


@dataclass
class SelectionSummary:
    """Counts of a selection.

    Attributes:
        dropped: reason -> responses that were not considered.
        num_rows: rows of the data that were written.
        rewards, selected_rewards: rewards of all responses that have one, and of the responses in the data.
    """

    num_files: int = 0
    num_prompts: int = 0
    num_rows: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    rewards: list[float] = field(default_factory=list)
    selected_rewards: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        """Return one line for the console, and one for each reason."""
        means = [f"{np.mean(values):.4g}" if values else "-" for values in (self.rewards, self.selected_rewards)]
        lines = [
            f"{self.num_rows} rows of {self.num_prompts} prompts in {self.num_files} rollouts; mean reward {means[1]} of those "
            f"kept, {means[0]} of all {len(self.rewards)} responses"
        ]
        return "\n".join([*lines, *(f"dropped, {reason}: {count}" for reason, count in sorted(self.dropped.items()))])


def find_rollout_files(folders: Sequence[Path], iterations: tuple[int | None, int | None]) -> list[Path]:
    """List the saved rollouts of runs, or of folders with such files, in the order of iterations.

    Raises:
        ValueError: a folder has none.
    """
    found: list[Path] = []
    first, last = iterations
    for folder in folders:
        inner = folder / "rollouts"
        files = sorted((inner if inner.is_dir() else folder).glob("iteration_*.safetensors"))
        if not files:
            raise ValueError(f"{folder} has no saved rollouts; a run writes them with rl_config.save_rollouts_interval: 1")
        for file in files:
            match = re.fullmatch(r"iteration_(\d+)", file.stem)
            if match and (first is None or int(match[1]) >= first) and (last is None or int(match[1]) <= last):
                found.append(file)
    if not found:
        raise ValueError(f"--iterations: no rollout of {', '.join(map(str, folders))} is from these iterations")
    return found


def _read_responses(
    path: Path, settings: SelectionSettings, summary: SelectionSummary
) -> Iterator[tuple[bytes, np.ndarray, np.ndarray, float]]:
    """Yield (prompt, input_ids, labels, reward) of each response that may be selected.

    Raises:
        ValueError: the file is of an earlier version, which does not have the lengths of its rows.
    """
    columns = RolloutBatch.load(path).columns
    missing = [name for name in ("input_ids", "prompt_lengths", "response_lengths", "lengths") if name not in columns]
    if missing:
        raise ValueError(f"{path} lacks the columns {', '.join(missing)}: it was written by an earlier version")
    ids, mask, rewards = (columns[name].numpy() for name in ("input_ids", "response_mask", "rewards"))
    prompts, responses, lengths = (columns[name].tolist() for name in ("prompt_lengths", "response_lengths", "lengths"))
    flags = {name: columns[name].tolist() if name in columns else None for name in ("scored", "truncated")}
    for row, reward in enumerate(rewards.tolist()):
        if not np.isfinite(reward) or (flags["scored"] is not None and not flags["scored"][row]):
            summary.dropped["no reward"] += 1
            continue
        summary.rewards.append(reward)
        reason = None
        if not settings.keeps_truncated and flags["truncated"] is not None and flags["truncated"][row]:
            reason = "truncated at the length limit"
        elif prompts[row] + responses[row] != lengths[row]:
            reason = "several sequences"
        elif settings.seq_length is not None and lengths[row] > settings.seq_length:
            reason = "longer than seq_length"
        elif not mask[row, : responses[row]].any():
            reason = "no sampled token"
        if reason is not None:
            summary.dropped[reason] += 1
            continue
        tokens = ids[row, : lengths[row]].astype(np.int32)
        labels = np.full_like(tokens, IGNORE_INDEX)
        sampled = mask[row, : responses[row]]
        labels[prompts[row] :][sampled] = tokens[prompts[row] :][sampled]
        yield tokens[: prompts[row]].tobytes(), tokens, labels, reward


def _group_responses(
    files: Iterable[Path], settings: SelectionSettings, summary: SelectionSummary
) -> dict[bytes, list[_Response]]:
    """Return the responses to each prompt, over all rollouts, best first; equal rewards in the order in which they came."""
    groups: dict[bytes, list[_Response]] = {}
    seen: set[tuple[bytes, bytes]] = set()
    order = 0
    for path in files:
        summary.num_files += 1
        for prompt, tokens, labels, reward in _read_responses(path, settings, summary):
            key = prompt, tokens.tobytes()
            if key in seen and not settings.keeps_duplicates:
                summary.dropped["equal to another response to the prompt"] += 1
                continue
            seen.add(key)
            groups.setdefault(prompt, []).append(_Response(tokens, labels, reward, order))
            order += 1
    return {prompt: sorted(group, key=lambda one: (-one.reward, one.order)) for prompt, group in groups.items()}


def _select(group: Sequence[_Response], settings: SelectionSettings) -> Iterator[tuple[_Response, ...]]:
    """Yield the responses of each row of the data; `group` is in falling order."""
    least = -np.inf if settings.threshold is None else settings.threshold
    if settings.kind == "sft":
        yield from ((response,) for response in group[: settings.best] if response.reward >= least)
    elif settings.kind == "unpaired":
        yield from ((response,) for response in group)
    elif group[0].reward >= least and group[0].reward - group[-1].reward > settings.margin:
        yield group[0], group[-1]


def _build_row(responses: tuple[_Response, ...], settings: SelectionSettings) -> Mapping[str, np.ndarray]:
    values = [array for response in responses for array in (response.input_ids, response.labels)]
    if settings.kind == "sft":
        values.insert(1, np.ones_like(values[0]))
    elif settings.kind == "unpaired":
        assert settings.threshold is not None  # checked by the settings
        values.append(np.array([responses[0].reward >= settings.threshold], dtype=np.int32))
    return dict(zip(_COLUMNS[settings.kind], values, strict=True))


def write_selection(folders: Sequence[Path], prefix: Path, settings: SelectionSettings) -> SelectionSummary:
    """Write `<prefix>_packed_<column>_document` of the responses that the settings select.

    Args:
        folders: run folders, or folders of saved rollouts.
        prefix: data_path of the run that learns from them.

    Raises:
        ValueError: nothing is selected, there is such data already, or a file is damaged or of an earlier version.
    """
    if existing := list_packed_columns(prefix):
        raise ValueError(f"--output-prefix: {prefix} has data already ({', '.join(existing)}); give another prefix")
    summary = SelectionSummary()
    groups = _group_responses(find_rollout_files(folders, settings.iterations), settings, summary)
    summary.num_prompts = len(groups)
    rows = [row for group in groups.values() for row in _select(group, settings)]
    if not rows:
        raise ValueError(f"no response is selected: {summary}")
    summary.num_rows = len(rows)
    summary.selected_rewards = [response.reward for row in rows for response in row]
    prefix.parent.mkdir(parents=True, exist_ok=True)
    writers = {name: IndexedWriter(column_prefix(prefix, name)) for name in _COLUMNS[settings.kind]}
    for row in rows:
        for name, values in _build_row(row, settings).items():
            writers[name].add_documents(values, [len(values)])
    for writer in writers.values():
        writer.close()
    return summary
