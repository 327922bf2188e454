"""The preprocessing run: plan chunks, encode them in workers, write columns in input order, pack, publish, report.

The files do not depend on the number of workers or parts: chunks come back in input order, and packing looks at all samples at
once. Everything is written in a hidden folder next to the target and renamed at the end, indexes last, so an interrupted run
leaves nothing that can be opened. With `--n-subs N` the work is cut into N consecutive parts; a repeated command keeps the
finished ones.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_rl.data import handler_class
from mindspeed_rl.data.conversation import DropReason
from mindspeed_rl.data.forms import describe_right_handler, read_first_row
from mindspeed_rl.data.handlers.base import Handler, HandlerSettings
from mindspeed_rl.data.images import ImageReader, ImageRules, join_image_columns
from mindspeed_rl.data.indexed import (
    IGNORE_INDEX,
    IMAGE_BYTES,
    IMAGE_SIZES,
    SAMPLE_LENGTHS,
    SUFFIXES,
    IndexedWriter,
    column_prefix,
    open_indexed,
)
from mindspeed_rl.data.media_limits import MediaLimits
from mindspeed_rl.data.parts import join_parts, make_folder, publish, work_folder, write_parts
from mindspeed_rl.data.preprocess_config import PreprocessConfig
from mindspeed_rl.data.sources import DEFAULT_CHUNK_SIZE, ChunkSize, RowSource, open_source, read_chunk
from mindspeed_rl.data.summary import Counts, format_summary, render_columns
from mindspeed_rl.data.templates import HfTemplate, Template, load_template
from mindspeed_rl.data.tokenizer import check_tokens, load_tokenizer, set_eos_token

#: settings of a handler that preprocessing makes itself, or leaves to the loading of raw prompts
_OTHER_SETTINGS = ("tokenizer", "template", "tools", "images", "is_text_only")


@dataclass
class PreprocessReport:
    """Outcome of a run."""

    counts: Counts
    files: list[str]
    text: str
    lengths: np.ndarray = field(repr=False)


def _check_meanings(config: PreprocessConfig, kind: type[Handler]) -> None:
    """Raise ValueError for a setting that the handler does not read."""
    if config.prompt_type is not None and not kind.needs_template:
        raise ValueError(
            f"prompt_type={config.prompt_type!r} has no meaning for {config.handler_name}, which writes plain text"
        )
    for name in ("chat_template_kwargs", "system_prompt"):
        if getattr(config, name) and not kind.needs_template:
            raise ValueError(f"{name} has no meaning for {config.handler_name}, which writes plain text")
    forced = kind.forced_template
    if forced is not None and config.prompt_type not in (None, forced):
        raise ValueError(f"{config.handler_name} always uses prompt_type={forced!r}; drop prompt_type={config.prompt_type!r}")
    if config.pack and not kind.can_pack:
        raise ValueError(f"pack has no meaning for {config.handler_name}; it is for supervised tuning")


def _build_handler(config: PreprocessConfig) -> Handler:
    """Load the tokenizer and the template, and build the handler.

    Raises:
        ValueError: a setting that the handler cannot use, an unknown template, a missing tokenizer.
    """
    kind = handler_class(config.handler_name)
    _check_meanings(config, kind)
    assert config.tokenizer_name_or_path is not None  # PreprocessConfig has checked it
    tokenizer = load_tokenizer(
        config.tokenizer_name_or_path, trust_remote_code=config.trust_remote_code, use_fast=not config.tokenizer_not_use_fast
    )
    check_tokens(tokenizer, config.tokenizer_name_or_path)
    template = None
    if kind.needs_template:
        template = load_template(
            config.prompt_type or kind.forced_template or kind.default_template or "empty",
            tokenizer,
            path=config.prompt_type_path,
            arguments=config.chat_template_kwargs,
        )
        if template.eos_token is not None:
            # before the handler is built: its encoder keeps the id of the end token
            set_eos_token(tokenizer, template.eos_token)
        _check_reasoning(config, template)
    settings = {f.name: getattr(config, f.name) for f in fields(HandlerSettings) if f.name not in _OTHER_SETTINGS}
    images = None
    rules = ImageRules.read(config.tokenizer_name_or_path, MediaLimits.from_keys(config))
    if rules is not None:
        images = ImageReader.build(rules, tokenizer, config.image_folder)
    if config.image_folder is not None and not (rules and kind.can_read_images):
        other = "language_model_only leaves out the tower" if config.language_model_only else ""
        other = other or "tokenizer_name_or_path has no model with images"
        reason = f"{config.handler_name} reads none" if rules else other
        raise ValueError(f"image_folder={config.image_folder!r} has no meaning: {reason}")
    given: dict[str, Any] = {"template": template, "images": images, "is_text_only": rules is None}
    return kind(HandlerSettings(tokenizer=tokenizer, **given, **settings))


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


def run(
    config: PreprocessConfig, chunk_size: ChunkSize = DEFAULT_CHUNK_SIZE, source: RowSource | None = None
) -> PreprocessReport:
    """Write the dataset and return the report.

    Args:
        chunk_size: rows that a worker encodes at a time; the files do not depend on it.
        source: rows in place of those at `input`.

    Raises:
        ValueError: wrong settings; a malformed row while on_bad_row is "error" (with file and row); no row was kept.
    """
    started = time.monotonic()
    handler = _build_handler(config)
    source = source or _open_input(config, handler, chunk_size)
    for path in source.ignored:
        print(f"ignored (of another format or split than the files that are read): {path}", file=sys.stderr)
    if source.note:
        print(source.note, file=sys.stderr)
    make_folder(config.output_prefix)
    names = {name: column_prefix(config.output_prefix, name, packed=handler.packed) for name in handler.columns}
    total_weight = source.total_weight()
    # a single part is complete only at the end, so there is nothing to resume from
    resume = config.n_subs > 1
    fingerprint = _fingerprint(config, source)
    with work_folder(config.output_prefix, fingerprint, resume=resume) as work:
        try:
            counts, parts = write_parts(config, handler, source, total_weight, work, names)
        except ValueError as error:
            raise ValueError(f"{error}{_find_hint(config, handler, source)}") from error
        if counts.rows_kept == 0:
            dropped = ", ".join(f"{reason}: {count}" for reason, count in counts.dropped.items())
            raise ValueError(
                f"no row of {config.input!r} was kept ({counts.rows_read} read; {dropped or 'the input is empty'})"
                f"{_find_hint(config, handler, source)}"
            )
        merged = {name: str(work / f"merged_{Path(prefix).name}") for name, prefix in names.items()}
        for name, prefix in merged.items():
            files = [f"{part}_{Path(names[name]).name}" for part in parts]
            join_parts(files, prefix, move=config.n_subs == 1, column=name)
        first_column = open_indexed(merged[handler.length_column])
        lengths = np.array(first_column.sequence_lengths)
        packs = None
        if config.pack:
            merged, packs = _pack(config, handler, merged, lengths, work)
            names[SAMPLE_LENGTHS] = column_prefix(config.output_prefix, SAMPLE_LENGTHS)
        written = {name: open_indexed(prefix) for name, prefix in merged.items() if name not in (SAMPLE_LENGTHS, IMAGE_BYTES)}
        sample = {name: np.asarray(dataset[0]) for name, dataset in written.items()}
        first_sample = render_columns(handler.settings.tokenizer, sample)
        files = publish(merged, names)
        if not config.pack and handler.packed:  # of an earlier run, and not of these rows
            for suffix in SUFFIXES:
                Path(column_prefix(config.output_prefix, SAMPLE_LENGTHS) + suffix).unlink(missing_ok=True)
    text = format_summary(
        counts, lengths, files=files, first_sample=first_sample, packs=packs, elapsed_s=time.monotonic() - started
    )
    return PreprocessReport(counts, files, text, lengths)


def _find_hint(config: PreprocessConfig, handler: Handler, source: RowSource) -> str:
    """Return a phrase that names the handler for rows which this one refuses; empty where it reads the first one."""
    if handler.open_source(config) is not None:  # it has chosen its rows itself
        return ""
    first = read_first_row(source)
    return "" if first is None else describe_right_handler(handler, first[1])


def _open_input(config: PreprocessConfig, handler: Handler, chunk_size: ChunkSize = DEFAULT_CHUNK_SIZE) -> RowSource:
    """Open the rows: those the handler chooses (dataset names, for example), or those at `input`."""
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
    # MindSpeed-LLM's capacity, so that the packs are equal
    packs = _greedy_packs(lengths, config.seq_length - 1)
    inputs, labels = open_indexed(merged["input_ids"]), open_indexed(merged["labels"])
    columns = {**merged, SAMPLE_LENGTHS: column_prefix(config.output_prefix, SAMPLE_LENGTHS)}
    packed = {name: str(work / f"packed_{Path(prefix).name}") for name, prefix in columns.items()}
    writers = {name: IndexedWriter(prefix, name) for name, prefix in packed.items()}
    images = {name: open_indexed(merged[name]) for name in (IMAGE_BYTES, IMAGE_SIZES) if name in merged}
    pad_id = handler.settings.tokenizer.pad_token_id
    for pack in packs:
        samples = [(np.asarray(inputs[index]), np.asarray(labels[index])) for index in pack]
        row = _pack_row(samples, config.seq_length, pad_id=pad_id, neat=config.neat_pack)
        # MindSpeed-LLM's columns, and one more: its packs do not show where their samples begin
        row += (np.array([len(ids) for ids, _ in samples], dtype=np.int32),)
        for name, values in zip(("input_ids", "attention_mask", "labels", SAMPLE_LENGTHS), row, strict=True):
            writers[name].add_documents(values, [len(values)])
        if images:
            rows = [[np.asarray(images[name][index]) for index in pack] for name in (IMAGE_BYTES, IMAGE_SIZES)]
            for name, values in zip((IMAGE_BYTES, IMAGE_SIZES), join_image_columns(*rows)):
                writers[name].add_documents(values, [len(values)])
    for writer in writers.values():
        writer.close()
    filled = lengths.sum() / (len(packs) * config.seq_length)
    return packed, f"packs: {len(packs)} rows of {config.seq_length} tokens, {100 * filled:.1f} % filled"


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
                hint = describe_right_handler(handler, row) if isinstance(row, Mapping) else ""
                advice = hint or " (on_bad_row=skip leaves such rows out)"
                raise ValueError(f"{chunk.path}, row {number}: {batch.bad[0][1]}{advice}")
            dropped.update(batch.dropped)
            dropped[DropReason.MALFORMED] += len(batch.bad)
            for encoded in batch.rows:
                lines.append(f"--- {chunk.path}, row {number}{' (truncated)' if encoded.truncated else ''}")
                lines.append(render_columns(handler.settings.tokenizer, encoded.columns))
                shown += 1
                if shown == count:
                    return "\n".join(lines)
    reasons = ", ".join(f"{reason}: {number}" for reason, number in dropped.items() if number)
    lines.append(f"--- the input has no more usable rows{f' (dropped: {reasons})' if reasons else ''}")
    return "\n".join(lines)
