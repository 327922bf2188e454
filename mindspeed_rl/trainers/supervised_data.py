"""The data of a supervised run: prefixes of `preprocess`, or raw data tokenized into the cache; checked and described."""

from __future__ import annotations

import contextlib
import dataclasses
import io
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.config.keys.megatron import is_weight, read_split
from mindspeed_rl.data import handler_class
from mindspeed_rl.data.cache_folders import CACHE
from mindspeed_rl.data.card import DataCard, describe_columns, describe_dropped
from mindspeed_rl.data.datasets import InstructionDataset, StoredLogProbs
from mindspeed_rl.data.forms import STAGE_KINDS, Reading, choose_reading
from mindspeed_rl.data.images import ImageRules
from mindspeed_rl.data.indexed import (
    DOCUMENTS,
    UNPAIRED_COLUMNS,
    IndexedColumns,
    check_columns,
    check_sample_lengths,
    check_text_only,
    column_prefix,
    is_paired,
    list_packed_columns,
    read_index,
)
from mindspeed_rl.data.media_limits import MediaLimits
from mindspeed_rl.data.prepared import Prepared, prepare
from mindspeed_rl.data.preprocess_config import PreprocessConfig
from mindspeed_rl.data.prompts import HUBS, split_slice
from mindspeed_rl.data.sources import Source, has_files, open_data
from mindspeed_rl.data.templates import choose_thinking
from mindspeed_rl.files import describe_missing
from mindspeed_rl.run import Run

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: long rows whose labels are counted before the workers count all
_READ_ROWS = 1000
#: keys of data
_KEYS = ("data_path", "eval_data_path")
#: columns that a stage reads; Megatron's dataset of stage pretrain has one file without columns
_COLUMNS = {
    "sft": ("input_ids", "attention_mask", "labels"),
    **dict.fromkeys(
        ("dpo", "simpo", "cpo", "orpo"), ("chosen_input_ids", "chosen_labels", "rejected_input_ids", "rejected_labels")
    ),
    "kto": UNPAIRED_COLUMNS,
    "orm": ("chosen_input_ids", "rejected_input_ids"),
    "prm": ("input_ids", "labels"),
}


@dataclass(frozen=True)
class _RawData:
    """Raw data that a key names.

    Attributes:
        source: its rows.
        reading: how they are read.
    """

    source: Source
    reading: Reading


@dataclass(frozen=True)
class DataCards:
    """What is shown of the data at the start of a run.

    Attributes:
        cards: data cards, one of the training data and one of the held-out data.
        warnings: what is probably not as it was meant.
    """

    cards: tuple[DataCard, ...]
    warnings: tuple[str, ...] = ()


# ---------------------------------------------------------------------- check


def list_data_checks(config: MegatronConfig, *, is_text_only: bool = False) -> Iterator[Callable[[], object]]:
    """Yield a check of each file of data that the run file names: it is there, and the stage and the model can read it.

    Args:
        config: keys of the actor.
        is_text_only: its model is known, and sees no images.
    """
    assert config.stage is not None
    if config.data_path is None:
        yield partial(_refuse, f"megatron_training.data_path: not set; stage {config.stage} learns from it.")
    if isinstance(config.data_path, list) and config.stage != "pretrain":
        yield partial(
            _refuse,
            f"megatron_training.data_path: {config.data_path} is a list, which only stage pretrain blends; give one prefix, or"
            " raw files as a.jsonl,b.jsonl",
        )
        return
    for key, location in _list_locations(config):
        yield partial(_check_location, config, key, location, is_text_only=is_text_only)
    if config.stage == "pretrain":
        yield partial(_check_documents, config)


def _check_documents(config: MegatronConfig) -> None:
    """Raise ValueError for documents with images in a blend, or next to documents of text, which have other files."""
    locations = list(_list_locations(config))
    if len(locations) == 1 and not isinstance(config.data_path, list):
        return
    try:
        with_images = [one for one in locations if _has_image_documents(config, *one)]
    except ValueError:  # the check of the location names it
        return
    for key, location in with_images:
        if isinstance(getattr(config, key), list):
            raise ValueError(f"megatron_training.{key}: {location} has documents with images, which are not blended; give one")
    if with_images and (rest := [one for one in locations if one not in with_images]):
        (key, location), (other_key, other) = with_images[0], rest[0]
        raise ValueError(
            f"megatron_training.{key}: {location} has documents with images, and megatron_training.{other_key}: {other}"
            " documents of text only; give two data sets of one form (handler_name: ImageTextPretrainHandler reads rows of text"
            " as the former)"
        )


def _has_image_documents(config: MegatronConfig, key: str, location: str) -> bool:
    """Return True for documents with images, raw or as a prefix."""
    assert config.stage is not None
    if _is_raw(config.stage, location):
        return handler_class(_open_raw(config, key, location).reading.handler).packed
    return _form_of(config.stage, Path(location).expanduser()) != config.stage


def _refuse(message: str) -> None:
    raise ValueError(message)


def _list_locations(config: MegatronConfig) -> Iterator[tuple[str, str]]:
    """Yield each prefix or raw file with its key."""
    for key in _KEYS:
        value = getattr(config, key)
        for item in value if isinstance(value, list) else [] if value is None else [value]:
            # the list of stage pretrain has weights between its prefixes
            if config.stage != "pretrain" or not is_weight(item):
                yield key, str(item)


def _check_location(config: MegatronConfig, key: str, location: str, *, is_text_only: bool) -> None:
    """Raise ValueError where a stage cannot read what is at a location."""
    stage = config.stage
    assert stage is not None
    if _is_raw(stage, location):
        raw = _open_raw(config, key, location)
        if config.system_prompt is not None:
            raise ValueError(
                f"megatron_training.system_prompt: rows of stage {stage} have their own, in a column or as a message; leave the"
                " key out"
            )
        if config.sft_loss_type in ("forward_kl", "reverse_kl") and stage == "sft":
            raise ValueError(
                f"megatron_training.{key}: {location} is raw data, but log-probs of a teacher (sft_loss_type:"
                f" {config.sft_loss_type}) are stored for a prefix: mindspeed-rl preprocess --input {location} --output-prefix"
                f" PREFIX --handler-name {raw.reading.handler} --tokenizer-name-or-path MODEL_FOLDER, then teacher-log-probs"
            )
        return
    path = Path(location).expanduser()
    stage = _form_of(stage, path)
    if is_text_only:
        try:
            check_text_only(path, leaves_out_tower=config.language_model_only)
        except ValueError as error:
            raise ValueError(f"megatron_training.{key}: {error}") from error
    if stage == "pretrain":
        missing, hint = [f"{location}.idx"], "give the whole prefix, with _text_document, or raw data"
        missing = [] if Path(f"{path}.idx").is_file() else missing
    else:
        columns = list_packed_columns(path)
        # both answers of a pair are judged by themselves, too
        stage = "dpo" if stage == "kto" and is_paired(path) else stage
        missing = [f"{location}_packed_{name}_document.idx" for name in _COLUMNS[stage] if name not in columns]
        hint = f"found {', '.join(columns)}; give the --output-prefix of preprocessing"
        if not columns:
            hint = f"{describe_missing(location)}; give raw data, hf://owner/name, or the --output-prefix of preprocessing"
    if missing:
        raise ValueError(f"megatron_training.{key}: {missing[0]} does not exist ({hint}).")


def _is_raw(stage: str, location: str) -> bool:
    """Return True for raw data, False for a prefix of an indexed dataset, or for nothing."""
    path, _, _ = split_slice(location)
    expanded = Path(path).expanduser()
    is_prefix = bool(list_packed_columns(expanded)) or stage == "pretrain" and Path(f"{expanded}.idx").is_file()
    return not is_prefix and (path.startswith(HUBS) or has_files(path))


def _form_of(stage: str, prefix: Path) -> str:
    """Return the stage with the columns of a dataset: documents with images have those of samples."""
    return "sft" if stage == "pretrain" and DOCUMENTS in list_packed_columns(prefix) else stage


def _open_raw(config: MegatronConfig, key: str, location: str) -> _RawData:
    """Open raw data, and find how it is read.

    Raises:
        ValueError: it cannot be opened, or no form of rows is recognized.
    """
    assert config.stage is not None
    path, start, stop = split_slice(location)
    try:
        opened = open_data(path)
    except ValueError as error:
        raise ValueError(f"megatron_training.{key}: {error}") from error
    source = dataclasses.replace(opened, skip_rows=start, max_rows=stop)
    return _RawData(source, choose_reading(config.stage, source, config.handler_name, _read_map(config), key))


def _read_map(config: MegatronConfig) -> dict[str, object] | None:
    if config.map_keys is None:
        return None
    return {name: column for name, column in dataclasses.asdict(config.map_keys).items() if column is not None}


# ---------------------------------------------------------------------- prepare


def prepare_data(run: Run, tokenizer: PreTrainedTokenizerBase) -> tuple[Run, DataCards]:
    """Tokenize raw data into the cache, check the contents of all data, and describe them.

    Returns:
        The run, of which `data_config` names prefixes; and the cards.

    Raises:
        ValueError: a row is malformed, none is left, or the data does not fit the stage or the model.
    """
    config, stage = run.config.actor_config, run.stage
    vocab_size = run.models["actor"].plan.model_config.vocab_size
    prefixes: dict[str, list[str | float]] = {}
    cards: list[DataCard] = []
    warnings: list[str] = []
    for key, location in _list_locations(config):
        prefix, card = Path(location).expanduser(), dict[str, str]()
        raw = _open_raw(config, key, location) if _is_raw(stage, location) else None
        if raw is not None:
            settings = _build_settings(run, raw, location, tokenizer)
            warnings += _warn_about_template(raw, settings, tokenizer)
            notes = io.StringIO()
            with contextlib.redirect_stderr(notes):
                prepared = _prepare(run, settings, raw, tokenizer)
            warnings += [line for line in notes.getvalue().splitlines() if line.startswith("ignored")]
            is_flat = not handler_class(raw.reading.handler).packed
            prefix = Path(f"{prepared.prefix}_text_document") if is_flat else prepared.prefix
            card = _describe_prepared(raw, prepared)
        _check_content(run, key, location, prefix, vocab_size, is_raw=raw is not None)
        warnings += _check_lengths(config, key, location, prefix, tokenizer.pad_token_id)
        prefixes.setdefault(key, []).append(str(prefix))
        card |= describe_columns(prefix, _form_of(stage, prefix), tokenizer, config.seq_length)
        described = DataCard(f"{key}: {location}", card)
        cards.append(described.without_examples() if key == "eval_data_path" else described)
    if any(_is_raw(stage, location) for _, location in _list_locations(config)):
        run = dataclasses.replace(run, prepared=_merge_weights(config, prefixes))
    return run, DataCards(tuple(cards), tuple(dict.fromkeys(warnings)))


def _merge_weights(config: MegatronConfig, prefixes: Mapping[str, list[str | float]]) -> dict[str, str | list[str | float]]:
    """Return the values of the keys of data with prefixes in place of locations."""
    merged: dict[str, str | list[str | float]] = {}
    for key, found in prefixes.items():
        value, rest = getattr(config, key), iter(found)
        if isinstance(value, list):
            merged[key] = [item if config.stage == "pretrain" and is_weight(item) else next(rest) for item in value]
        else:
            merged[key] = str(next(rest))
    return merged


def _prepare(run: Run, settings: PreprocessConfig, raw: _RawData, tokenizer: PreTrainedTokenizerBase) -> Prepared:
    folder = Path(tokenizer.name_or_path).expanduser()
    return prepare(settings, raw.source, run.folder.parent / CACHE, folder)


def _build_settings(run: Run, raw: _RawData, location: str, tokenizer: PreTrainedTokenizerBase) -> PreprocessConfig:
    """Return the settings of `preprocess` for raw data of a run."""
    config = run.config.actor_config
    kind = handler_class(raw.reading.handler)
    packs = config.pack and kind.can_pack
    has_images = ImageRules.read(tokenizer.name_or_path, MediaLimits.from_keys(config)) is not None
    templates = config.prompt_type_path
    return PreprocessConfig(
        input=location,
        output_prefix="",
        handler_name=raw.reading.handler,
        tokenizer_name_or_path=tokenizer.name_or_path,
        tokenizer_not_use_fast=config.tokenizer_not_use_fast,
        map_keys=raw.reading.map_keys,
        prompt_type=config.prompt_type if kind.needs_template else None,
        # without such a file the built-in templates are read
        prompt_type_path=templates if kind.needs_template and templates and Path(templates).is_file() else None,
        enable_thinking=choose_thinking(config.enable_thinking, config.chat_template_kwargs),
        chat_template_kwargs=config.chat_template_kwargs if kind.needs_template else None,
        append_eod=config.append_eod and run.stage != "prm",
        # otherwise the stage cuts or leaves out long rows, as of a prefix
        seq_length=config.seq_length if packs or has_images else None,
        pack=packs,
        neat_pack=packs and config.neat_pack,
        placeholder_token=config.placeholder_token,
        reward_tokens=config.reward_tokens,
        on_bad_row=config.on_bad_row,
        dataset_additional_keys=config.dataset_additional_keys,
        image_folder=config.image_folder,
        **asdict(MediaLimits.from_keys(config)),
    )


def _warn_about_template(raw: _RawData, settings: PreprocessConfig, tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """Yield a warning where rows are joined without the marks of the tokenizer's own chat template."""
    kind = handler_class(raw.reading.handler)
    has_default = kind.forced_template or kind.default_template
    if kind.needs_template and settings.prompt_type is None and not has_default and tokenizer.chat_template:
        yield (
            "megatron_training.prompt_type is not set: questions and answers are joined without the marks of a chat template;"
            " prompt_type: hf writes the tokenizer's own"
        )


def _describe_prepared(raw: _RawData, prepared: Prepared) -> dict[str, str]:
    state = "tokenized into" if prepared.is_new else "as tokenized before in"
    return {
        "read as": str(raw.reading) + (f"; {raw.source.note}" if raw.source.note else ""),
        "cache": f"{state} {prepared.prefix.parent}",
        "left out": describe_dropped(prepared.rows_read, prepared.dropped),
    }


def _check_content(run: Run, key: str, location: str, prefix: Path, vocab_size: int, *, is_raw: bool) -> None:
    """Raise ValueError where the files hold what the stage cannot train on."""
    config = run.config.actor_config
    try:
        check_columns(prefix, vocab_size, f"megatron_training.{key}")
    except ValueError as error:
        if not is_raw:
            raise
        raise ValueError(
            f"megatron_training.{key}: {location}: the tokenizer writes token ids that the model's vocabulary of {vocab_size}"
            f" does not have; give the tokenizer of the model (tokenizer_name_or_path): {error}"
        ) from error
    if config.stage != "sft":
        return
    if config.sft_loss_type in ("forward_kl", "reverse_kl"):
        count, rows = StoredLogProbs(prefix).num_rows, len(IndexedColumns(prefix, ["input_ids"]))
        if count != rows:
            raise ValueError(f"sft_loss_type: log-probs of a teacher are of {count} rows, but {prefix} has {rows}")
    if config.pack and config.reset_attention_mask and not config.neat_pack:
        check_sample_lengths(prefix)


def _check_lengths(config: MegatronConfig, key: str, location: str, prefix: Path, pad_id: int | None) -> Iterator[str]:
    """Yield a warning where seq_length leaves out more rows than it leaves.

    Stage sft cuts long rows at the end, the others leave them out.

    Raises:
        ValueError: nothing is left to train, or to evaluate on.
    """
    limit, stage = config.seq_length, _form_of(str(config.stage), prefix)
    if stage == "pretrain" or limit is None:
        return
    columns = IndexedColumns(prefix, [])
    lengths = np.maximum.reduce([columns.lengths(name) for name in columns.columns if name.endswith("input_ids")])
    if not len(lengths):
        return
    num_long = int((lengths > limit).sum())
    where, longest = f"megatron_training.seq_length={limit}", int(lengths.max())
    advice = f"the shortest has {int(lengths.min()):,} tokens, the longest {longest:,}: raise seq_length to {longest}"
    if stage == "sft":
        long = np.flatnonzero(lengths > limit)
        rows = InstructionDataset(prefix, seq_length=limit, pad_id=pad_id)
        some = long[:: max(1, len(long) // _READ_ROWS)]
        emptied = rows.count_cut(some)[1] / max(1, len(some))
        source = f"of {key} ({location}); {advice}"
        if emptied == 1 and num_long == len(lengths) and rows.count_cut(long)[1] == num_long:
            raise ValueError(f"{where} cuts off the trained tokens of all {num_long:,} rows {source}")
        if (count := round(emptied * num_long)) > len(lengths) - count:
            yield f"{where} cuts off the trained tokens of about {count:,} of {len(lengths):,} rows {source}"
        return
    if num_long == len(lengths):
        raise ValueError(f"{where} leaves out all {num_long:,} rows of {key} ({location}): {advice}")
    if num_long > len(lengths) - num_long:
        yield f"{num_long:,} of {len(lengths):,} rows of {key} are longer than {where} and are left out: {advice}"


def count_rows(run: Run) -> int:
    """Return the number of rows that train: the first share of split."""
    config = run.data_config
    prefix = Path(str(config.data_path)).expanduser()
    halves = 2 if run.stage == "kto" and is_paired(prefix) else 1
    column = _COLUMNS["dpo" if halves == 2 else run.stage][0]
    num_rows = len(read_index(column_prefix(prefix, column)).lengths)
    return round(halves * num_rows * read_split(config.split)[0])


assert set(STAGE_KINDS) == {"pretrain", *_COLUMNS}
