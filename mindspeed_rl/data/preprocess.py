"""The preprocessing run: plan chunks, encode them in workers, write columns in input order, pack, publish, report.

The files do not depend on the number of workers or parts: chunks come back in input order, and packing looks at all samples at
once. Everything is written in a hidden folder beside the target and renamed at the end, indexes last, so an interrupted run
leaves nothing that can be opened. With `--n-subs N` the work is cut into N consecutive parts; a repeated command keeps the
finished ones.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
from tqdm import tqdm

from mindspeed_rl.data import handler_class
from mindspeed_rl.data.handlers.base import Handler, HandlerSettings
from mindspeed_rl.data.indexed import IGNORE_INDEX, IndexedWriter, open_indexed, packed_prefix, pretrain_prefix
from mindspeed_rl.data.parts import PartWriter, join_parts, publish, work_folder
from mindspeed_rl.data.pool import ChunkResult, encode_chunks
from mindspeed_rl.data.sources import DEFAULT_CHUNK_SIZE, Chunk, ChunkSize, RowSource, open_source, read_chunk
from mindspeed_rl.data.summary import MALFORMED, Counts, format_summary, render_columns
from mindspeed_rl.data.templates import HfTemplate, Template, Thinking, load_template
from mindspeed_rl.data.tokenizer import load_tokenizer, set_eos_token

TOKENIZER_TYPES = ("PretrainedFromHF", "HuggingFaceTokenizer")
ON_BAD_ROW = ("error", "skip")
THINKING: tuple[Thinking, ...] = get_args(Thinking)

#: processes that any machine starts without a question; all of them are forked at once
_MOST_WORKERS = 64
#: settings of a handler that preprocessing makes itself, or leaves to the loading of raw prompts
_NOT_SAID = ("tokenizer", "template", "system_prompt", "tools")


@dataclass(frozen=True)
class PreprocessConfig:
    """Settings of a run, under the names of the flags and of the YAML keys."""

    input: str
    output_prefix: str
    handler_name: str = "GeneralPretrainHandler"
    tokenizer_type: str = "PretrainedFromHF"
    tokenizer_name_or_path: str | None = None
    tokenizer_not_use_fast: bool = False
    trust_remote_code: bool = False
    json_keys: Sequence[str] = ("text",)
    map_keys: Mapping[str, Any] | None = None
    dataset_additional_keys: Sequence[str] = ()
    prompt_type: str | None = None
    prompt_type_path: str | None = None
    enable_thinking: str = "none"
    reasoning_effort: str | None = None
    drop_thinking: bool | None = None
    append_eod: bool = False
    seq_length: int | None = None
    pad_to_multiple_of: int = 1
    pack: bool = False
    neat_pack: bool = False
    placeholder_token: str = "ки"
    reward_tokens: Sequence[str] = ()
    workers: int = 1
    n_subs: int = 1
    log_interval: int = 100
    on_bad_row: str = "error"
    cache_dir: str | None = None
    streaming: bool = False
    hf_datasets_params: Mapping[str, Any] | None = None
    dataset_dir: str | None = None
    interleave_probs: Sequence[float] = ()
    mix_strategy: str = "concat"
    max_samples: int | None = None
    seed: int = 1234

    def __post_init__(self) -> None:
        if self.tokenizer_type not in TOKENIZER_TYPES:
            raise ValueError(
                f"tokenizer_type={self.tokenizer_type!r} is not supported; use PretrainedFromHF with a tokenizer folder"
            )
        if not self.tokenizer_name_or_path:
            raise ValueError("tokenizer_name_or_path is missing; give the folder of the tokenizer")
        if self.neat_pack and not self.pack:
            raise ValueError("neat_pack needs pack; give both")
        if self.pack and self.seq_length is None:
            raise ValueError("pack needs seq_length, the length of a packed row")
        for name, allowed in (("on_bad_row", ON_BAD_ROW), ("enable_thinking", THINKING)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r} is unknown; allowed: {', '.join(allowed)}")
        for name in ("workers", "n_subs", "log_interval", "pad_to_multiple_of"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.workers > (most := max(_MOST_WORKERS, 2 * (os.cpu_count() or 1))):
            raise ValueError(f"workers={self.workers} must be at most {most} on this machine")
        for name in ("seq_length", "max_samples"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")


@dataclass
class Report:
    """Outcome of a run."""

    counts: Counts
    files: list[str]
    text: str
    lengths: np.ndarray = field(repr=False)


def _build_handler(config: PreprocessConfig) -> Handler:
    """Load the tokenizer and the template, and build the handler.

    Raises:
        ValueError: a setting that the handler cannot use, an unknown template, a missing tokenizer.
    """
    kind = handler_class(config.handler_name)
    forced = kind.forced_template
    if config.prompt_type is not None and not kind.needs_template:
        raise ValueError(
            f"prompt_type={config.prompt_type!r} has no meaning for {config.handler_name}, which writes plain text"
        )
    if forced is not None and config.prompt_type not in (None, forced):
        raise ValueError(f"{config.handler_name} always uses prompt_type={forced!r}; drop prompt_type={config.prompt_type!r}")
    if config.pack and not kind.can_pack:
        raise ValueError(f"pack has no meaning for {config.handler_name}; it is for supervised tuning")
    assert config.tokenizer_name_or_path is not None  # PreprocessConfig has checked it
    tokenizer = load_tokenizer(
        config.tokenizer_name_or_path, trust_remote_code=config.trust_remote_code, use_fast=not config.tokenizer_not_use_fast
    )
    template = None
    if kind.needs_template:
        template = load_template(
            config.prompt_type or forced or kind.default_template or "empty", tokenizer, path=config.prompt_type_path
        )
        if template.eos_token is not None:
            # before the handler is made, whose encoder keeps the number of the end token
            set_eos_token(tokenizer, template.eos_token)
        _check_reasoning(config, template)
    settings = {f.name: getattr(config, f.name) for f in fields(HandlerSettings) if f.name not in _NOT_SAID}
    return kind(HandlerSettings(tokenizer=tokenizer, template=template, **settings))


def _check_reasoning(config: PreprocessConfig, template: Template | HfTemplate) -> None:
    """Refuse settings that the template cannot honour; apply drop_thinking."""
    if config.enable_thinking == "true" and not template.can_think:
        raise ValueError(f"enable_thinking=true has no meaning for prompt_type={template.name!r}")
    if config.reasoning_effort is not None:
        if config.reasoning_effort not in template.efforts:
            allowed = ", ".join(template.efforts) or "none for this template"
            raise ValueError(
                f"reasoning_effort={config.reasoning_effort!r} with prompt_type={template.name!r}; allowed: {allowed}"
            )
        if config.enable_thinking != "true":
            raise ValueError("reasoning_effort needs enable_thinking=true")
    if config.drop_thinking is not None:
        if not isinstance(template, Template) or not template.can_think:
            raise ValueError(f"drop_thinking has no meaning for prompt_type={template.name!r}")
        template.drop_thinking = config.drop_thinking


class Progress:
    """A bar with rows/s, tokens/s and time left; without a terminal, a line every `log_interval` rows, but 5 s apart."""

    def __init__(self, total_weight: int | None, log_interval: int) -> None:
        self._total = total_weight
        self._interval = log_interval
        self._start = self._last = time.monotonic()
        self._logged_rows = 0
        self._done = 0
        self._rows = 0
        self._tokens = 0
        self._bar = tqdm(
            total=total_weight,
            disable=not sys.stderr.isatty(),
            bar_format="{percentage:3.0f}%|{bar:30}| {elapsed}<{remaining} {postfix}",
        )

    def add(self, result: ChunkResult) -> None:
        """Count one chunk."""
        self._rows += result.counts.rows_read
        self._tokens += result.counts.tokens
        self._done += result.weight
        now = time.monotonic()
        rate = f"{self._rows / (now - self._start + 1e-9):.0f} rows/s, {self._tokens / (now - self._start + 1e-9):.0f} tokens/s"
        if not self._bar.disable:
            self._bar.set_postfix_str(f"{self._rows} rows, {rate}", refresh=False)
            self._bar.update(result.weight)
        elif self._rows - self._logged_rows >= self._interval and now - self._last >= 5:
            self._logged_rows, self._last = self._rows, now
            left = ""
            if self._total and self._done:
                share = self._done / self._total
                left = f", {100 * share:.0f} %, {(now - self._start) * (1 - share) / share:.0f} s left"
            print(f"{self._rows} rows, {rate}{left}", file=sys.stderr, flush=True)

    def close(self) -> None:
        self._bar.close()


def _numbered_parts(chunks: Iterator[Chunk], total_weight: int | None, n_subs: int) -> Iterator[tuple[int, Chunk]]:
    """Give each chunk its part: consecutive runs of about equal weight (all in part 0 where the total is unknown)."""
    done = 0
    for chunk in chunks:
        part = min(n_subs - 1, done * n_subs // total_weight) if total_weight else 0
        yield part, chunk
        done += chunk.weight


def _final_names(config: PreprocessConfig, handler: Handler) -> dict[str, str]:
    """Column -> path without suffix of the finished files."""
    if handler.packed:
        return {name: packed_prefix(config.output_prefix, name) for name in handler.columns}
    return {name: pretrain_prefix(config.output_prefix, name) for name in handler.columns}


def run(config: PreprocessConfig, chunk_size: ChunkSize = DEFAULT_CHUNK_SIZE) -> Report:
    """Write the dataset and return the report.

    Args:
        chunk_size: what a worker takes at a time; the files do not depend on it.

    Raises:
        ValueError: wrong settings; a malformed row while on_bad_row is "error" (with file and row); nothing was kept.
    """
    started = time.monotonic()
    parent = Path(config.output_prefix).expanduser().parent
    if not parent.is_dir():
        raise ValueError(f"output_prefix={config.output_prefix!r}: the folder {str(parent)!r} does not exist")
    handler = _build_handler(config)
    source = _open_input(config, handler, chunk_size)
    for path in source.ignored:
        print(f"ignored (another format than the folder's other files): {path}", file=sys.stderr)
    names = _final_names(config, handler)
    total_weight = source.total_weight()
    # of a single part nothing is finished before all is
    resume = config.n_subs > 1
    fingerprint = _fingerprint(config, source)
    with work_folder(config.output_prefix, fingerprint, resume=resume) as work:
        counts, parts = _write_parts(config, handler, source, total_weight, work, names)
        if counts.rows_kept == 0:
            dropped = ", ".join(f"{reason}: {count}" for reason, count in counts.dropped.items())
            raise ValueError(
                f"no row of {config.input!r} was kept ({counts.rows_read} read; {dropped or 'the input is empty'})"
            )
        merged = {name: str(work / f"merged_{Path(prefix).name}") for name, prefix in names.items()}
        for name, prefix in merged.items():
            join_parts([f"{part}_{Path(names[name]).name}" for part in parts], prefix, move=config.n_subs == 1)
        first_column = open_indexed(merged[handler.length_column])
        lengths = np.array(first_column.sequence_lengths)
        packs = None
        if config.pack:
            merged, packs = _pack(config, handler, merged, lengths, work)
        written = {name: open_indexed(prefix) for name, prefix in merged.items()}
        sample = {name: dataset[0] for name, dataset in written.items()}
        first_sample = render_columns(handler.settings.tokenizer, sample)
        files = publish(merged, names)
    text = format_summary(
        counts, lengths, files=files, first_sample=first_sample, packs=packs, elapsed_s=time.monotonic() - started
    )
    return Report(counts, files, text, lengths)


def _open_input(config: PreprocessConfig, handler: Handler, chunk_size: ChunkSize = DEFAULT_CHUNK_SIZE) -> RowSource:
    """The rows to read: the handler's own choice (dataset names, for example), or what lies at `input`."""
    own = handler.open_source(config)
    if own is not None:
        return own
    source = open_source(
        config.input, cache_dir=config.cache_dir, streaming=config.streaming, dataset_options=config.hf_datasets_params
    )
    return replace(source, max_rows=config.max_samples, chunk_size=chunk_size)


def _fingerprint(config: PreprocessConfig, source: RowSource) -> str:
    # the files do not depend on these, so a repeated run may change them
    settings = {key: value for key, value in asdict(config).items() if key not in ("workers", "log_interval")}
    text = json.dumps([settings, source.fingerprint()], sort_keys=True, default=list, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _write_parts(
    config: PreprocessConfig,
    handler: Handler,
    source: RowSource,
    total_weight: int | None,
    work: Path,
    names: Mapping[str, str],
) -> tuple[Counts, list[str]]:
    """Write every part that is not there yet; return the counts and the parts' path prefixes in order."""
    total = Counts()
    parts = [str(work / f"{k:03d}_of_{config.n_subs - 1:03d}") for k in range(config.n_subs)]
    stamps = [Path(f"{part}.json") for part in parts]
    finished = {k: Counts.from_dict(json.loads(stamp.read_text())) for k, stamp in enumerate(stamps) if stamp.is_file()}
    # chunks are taken ahead of their results, which come back in the same order
    numbers: deque[int] = deque()

    def to_do() -> Iterator[Chunk]:
        for part, chunk in _numbered_parts(source.chunks(), total_weight, config.n_subs):
            if part not in finished:
                numbers.append(part)
                yield chunk

    progress = Progress(total_weight, config.log_interval)
    writer: PartWriter | None = None
    results = encode_chunks(handler, to_do(), workers=config.workers, on_bad_row=config.on_bad_row)
    try:
        for result in results:
            number = numbers.popleft()
            if writer is None or writer.number != number:
                if writer is not None:
                    finished[writer.number] = writer.close(stamps[writer.number])
                writer = PartWriter(number, {name: f"{parts[number]}_{Path(prefix).name}" for name, prefix in names.items()})
            if result.first_error is not None:
                raise ValueError(f"{result.first_error} (on_bad_row=skip leaves such rows out)")
            writer.add(result)
            progress.add(result)
        if writer is not None:
            finished[writer.number] = writer.close(stamps[writer.number])
            writer = None
    finally:
        # ends the workers where a row has stopped the run
        results.close()
        progress.close()
        if writer is not None:
            writer.abort()
    for number in sorted(finished):
        total.add(finished[number])
    # a part that kept no row has an empty .bin, which no reader takes
    return total, [parts[number] for number in sorted(finished) if finished[number].rows_kept]


def _greedy_packs(lengths: Sequence[int] | np.ndarray, capacity: int) -> list[list[int]]:
    """Return packs of sample indices: each pack repeatedly takes the longest sample that still fits.

    Samples of one length go in order of their index. Time is close to linear in the number of samples.

    Raises:
        ValueError: a sample is longer than the capacity.
    """
    waiting: dict[int, list[int]] = defaultdict(list)
    for index, length in enumerate(np.asarray(lengths).tolist()):
        if length > capacity:
            raise ValueError(f"sample {index} has {length} tokens, more than the capacity {capacity}")
        waiting[length].append(index)
    for indices in waiting.values():
        # samples are popped from the end, so the lowest index comes first
        indices.reverse()

    # largest[n]: the greatest length <= n that still has samples, by path halving; 0 when there is none.
    largest = list(range(capacity + 1))
    for length in range(1, capacity + 1):
        if length not in waiting:
            largest[length] = length - 1

    def find(length: int) -> int:
        while largest[length] != length:
            largest[length] = largest[largest[length]]
            length = largest[length]
        return length

    # empty samples get packs of their own, because length 0 means below that nothing is left
    packs: list[list[int]] = [[index] for index in reversed(waiting.pop(0, []))]
    while True:
        length = find(capacity)
        if length == 0:
            return packs
        pack = []
        room = capacity
        while length:
            pack.append(waiting[length].pop())
            if not waiting[length]:
                largest[length] = length - 1
            room -= length
            length = find(room)
        packs.append(pack)


def _pack_row(
    samples: Sequence[tuple[np.ndarray, np.ndarray]], seq_length: int, *, pad_id: int, neat: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return ([seq_length] input_ids, attention_mask, labels), int32.

    The attention mask of a neat pack holds 1 on the first sample, 2 on the second ... and 0 on padding; otherwise 1 everywhere.
    """
    input_ids = np.full(seq_length, pad_id, dtype=np.int32)
    labels = np.full(seq_length, IGNORE_INDEX, dtype=np.int32)
    attention_mask = np.zeros(seq_length, dtype=np.int32) if neat else np.ones(seq_length, dtype=np.int32)
    at = 0
    for number, (sample_ids, sample_labels) in enumerate(samples, start=1):
        end = at + len(sample_ids)
        input_ids[at:end] = sample_ids
        labels[at:end] = sample_labels
        if neat:
            attention_mask[at:end] = number
        at = end
    return input_ids, attention_mask, labels


def _pack(
    config: PreprocessConfig, handler: Handler, merged: Mapping[str, str], lengths: np.ndarray, work: Path
) -> tuple[dict[str, str], str]:
    """Write packs of the merged samples; return their path prefixes and a line for the report."""
    assert config.seq_length is not None
    # MindSpeed-LLM's capacity, so that packs come out alike
    packs = _greedy_packs(lengths, config.seq_length - 1)
    inputs, labels = open_indexed(merged["input_ids"]), open_indexed(merged["labels"])
    packed = {name: str(work / f"packed_{Path(prefix).name}") for name, prefix in merged.items()}
    writers = {name: IndexedWriter(prefix) for name, prefix in packed.items()}
    pad_id = handler.settings.tokenizer.pad_token_id
    for pack in packs:
        samples: Any = [(inputs[index], labels[index]) for index in pack]
        row = _pack_row(samples, config.seq_length, pad_id=pad_id, neat=config.neat_pack)
        for name, values in zip(("input_ids", "attention_mask", "labels"), row, strict=True):
            writers[name].add_documents(values, [len(values)])
    for writer in writers.values():
        writer.close()
    share = lengths.sum() / (len(packs) * config.seq_length)
    return packed, f"packs: {len(packs)} rows of {config.seq_length} tokens, {100 * share:.1f} % filled"


def show(config: PreprocessConfig, count: int) -> str:
    """Render the first `count` kept samples with trained tokens marked; nothing is written.

    Raises:
        ValueError: as `run`.
    """
    handler = _build_handler(config)
    lines = []
    shown = 0
    dropped: Counter[str] = Counter()
    for chunk in _open_input(config, handler).chunks():
        for number, row in read_chunk(chunk):
            batch = handler.encode([(number, row)])
            if batch.bad and config.on_bad_row == "error":
                raise ValueError(f"{chunk.path}, row {number}: {batch.bad[0][1]} (on_bad_row=skip leaves such rows out)")
            dropped.update(batch.dropped)
            dropped[MALFORMED] += len(batch.bad)
            for encoded in batch.rows:
                lines.append(f"--- {chunk.path}, row {number}{' (truncated)' if encoded.truncated else ''}")
                lines.append(render_columns(handler.settings.tokenizer, encoded.columns))
                shown += 1
                if shown == count:
                    return "\n".join(lines)
    reasons = ", ".join(f"{reason}: {number}" for reason, number in dropped.items() if number)
    lines.append(f"--- the input has no more usable rows{f' (dropped: {reasons})' if reasons else ''}")
    return "\n".join(lines)
