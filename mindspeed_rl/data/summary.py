"""Report of a preprocessing run: counts, a length histogram as text, and samples with their trained tokens marked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from mindspeed_rl.data.indexed import DOCUMENTS, IGNORE_INDEX, IMAGE_BYTES, IMAGE_SIZES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: columns of marks and bytes
_UNSHOWN = ("attention_mask", IMAGE_BYTES, DOCUMENTS)


@dataclass
class Counts:
    """Counts of the rows of a part or of the full input; `bad_rows` holds the first messages."""

    max_bad_rows: ClassVar[int] = 10

    rows_read: int = 0
    rows_kept: int = 0
    rows_truncated: int = 0
    rows_added: int = 0
    tokens: int = 0
    tokens_trained: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    bad_rows: list[str] = field(default_factory=list)

    def add(self, other: Counts) -> None:
        """Add another part's counts."""
        self.rows_read += other.rows_read
        self.rows_kept += other.rows_kept
        self.rows_truncated += other.rows_truncated
        self.rows_added += other.rows_added
        self.tokens += other.tokens
        self.tokens_trained += other.tokens_trained
        self.dropped.update(other.dropped)
        self.bad_rows = (self.bad_rows + other.bad_rows)[: self.max_bad_rows]


def _histogram(lengths: np.ndarray, *, width: int = 40, bins: int = 10) -> str:
    """Draw the rows per range of token lengths, as lines of bars; the ranges are equal, with round bounds."""
    if len(lengths) == 0:
        return "  (no rows)"
    max_len = int(lengths.max())
    step = max(1, -(-(max_len + 1) // bins))
    magnitude = 10 ** max(0, len(str(step)) - 2)
    step = -(-step // magnitude) * magnitude
    counts = np.bincount(np.asarray(lengths, dtype=np.int64) // step, minlength=max_len // step + 1)
    lines = []
    for index, count in enumerate(counts.tolist()):
        bar = "#" * (round(width * count / counts.max()) or (1 if count else 0))
        lines.append(f"  {index * step:>7} - {(index + 1) * step - 1:>7}  {count:>9}  {bar}".rstrip())
    return "\n".join(lines)


def _format_lengths(lengths: np.ndarray) -> str:
    """Format mean, percentiles and extremes of the lengths in one line."""
    if len(lengths) == 0:
        return "lengths: none"
    # "higher": lengths that occur, not numbers between two of them
    p50, p90, p99 = (int(value) for value in np.percentile(lengths, [50, 90, 99], method="higher"))
    return f"lengths: mean {lengths.mean():.1f}, p50 {p50}, p90 {p90}, p99 {p99}, max {int(lengths.max())} tokens"


def mark_text(
    tokenizer: PreTrainedTokenizerBase,
    input_ids: Sequence[int] | np.ndarray,
    labels: Sequence[int] | np.ndarray | None,
    *,
    limit: int | None = None,
) -> str:
    """Decode a sample with every run of trained tokens between ⟦ and ⟧; without labels nothing is marked.

    Args:
        limit: characters of each run; its middle is left out beyond them.
    """
    ids = [int(token) for token in input_ids]
    if labels is None:
        return str(tokenizer.decode(ids, skip_special_tokens=False))
    text: list[str] = []
    start = 0
    trained = [int(label) != IGNORE_INDEX for label in labels]
    while start < len(ids):
        stop = start
        while stop < len(ids) and trained[stop] == trained[start]:
            stop += 1
        run = str(tokenizer.decode(ids[start:stop], skip_special_tokens=False))
        if limit is not None and len(run) > limit:
            run = f"{run[: limit // 2]} [...] {run[-limit // 2 :]}"
        text.append(f"⟦{run}⟧" if trained[start] else run)
        start = stop
    return "".join(text)


def render_columns(tokenizer: PreTrainedTokenizerBase, columns: Mapping[str, np.ndarray | list[int]]) -> str:
    """Render one sample, all its columns: pairs of (input_ids, labels) with marks, other columns as plain text."""
    parts = []
    for name, tokens in columns.items():
        # other columns hold no tokens, or the same text once more
        if name in _UNSHOWN or name.endswith("_utf8") and name.removesuffix("_utf8") in columns:
            continue
        if name == IMAGE_SIZES:
            sizes = np.reshape(tokens[1:], (-1, 4))
            # the time of a video is negative
            grids = ", ".join(f"{f'{-time} times ' if time < 0 else ''}{rows} x {columns}" for _, time, rows, columns in sizes)
            parts.append(f"[images: {int(tokens[0])}{f'; patches {grids}' if grids else ''}]")
            continue
        labels = None
        if name.endswith("input_ids"):
            labels = columns.get(name.replace("input_ids", "labels"))
            if labels is not None and len(labels) != len(tokens):
                labels = None
        elif name.endswith("labels") and len(tokens) == len(columns.get(name.replace("labels", "input_ids"), ())):
            continue
        parts.append(f"[{name}: {len(tokens)} tokens]\n{mark_text(tokenizer, tokens, labels)}")
    return "\n".join(parts)


def format_summary(
    counts: Counts, lengths: np.ndarray, *, files: Sequence[str], first_sample: str | None, packs: str | None, elapsed_s: float
) -> str:
    """Format the report at the end of a run."""
    dropped = sum(counts.dropped.values())
    lines = [
        f"rows read {counts.rows_read}, kept {counts.rows_kept}, dropped {dropped}, truncated {counts.rows_truncated}",
        *([f"  added, earlier answers as rows of their own: {counts.rows_added}"] if counts.rows_added else []),
        *(f"  dropped, {reason}: {count}" for reason, count in sorted(counts.dropped.items())),
        *(f"  {row}" for row in counts.bad_rows),
        f"tokens {counts.tokens}, of them trained {counts.tokens_trained}",
        _format_lengths(lengths),
        _histogram(lengths),
    ]
    if packs:
        lines.append(packs)
    if elapsed_s > 0:
        lines.append(f"{elapsed_s:.1f} s: {counts.rows_read / elapsed_s:.0f} rows/s, {counts.tokens / elapsed_s:.0f} tokens/s")
    if first_sample is not None:
        lines += ["first sample (trained tokens between ⟦ and ⟧):", first_sample]
    lines += ["written:", *(f"  {name}" for name in files)]
    return "\n".join(lines)
