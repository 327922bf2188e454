"""Data sets of LLaMA-Factory: entries of `dataset_info.json`, and the words of preprocessing that they become."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mindspeed_rl import registry
from mindspeed_rl.config.errors import ConfigError
from mindspeed_rl.files import read_json
from mindspeed_rl.importers.options import Option, SourceCommand, each, part, refused, same, with_others
from mindspeed_rl.importers.result import Import
from mindspeed_rl.importers.shell import Command, is_switched_on
from mindspeed_rl.importers.source_files import require_file
from mindspeed_rl.importers.translators import describe_preprocessing, name_tokens

_BY_PREPROCESSING = "it is a word of preprocessing"
#: options of data, which MindSpeed-LLM's FSDP2 programs have from here
OPTIONS: dict[str, Option] = {
    **each("dataset dataset_dir", part("data_path")),
    "cutoff_len": part("seq_length"),
    "packing": part("pack", off="rows are not joined"),
    "neat_packing": part("neat_pack reset_attention_mask reset_position_ids", off="rows are not joined"),
    **each("mix_strategy interleave_probs", with_others("several data sets", off=_BY_PREPROCESSING, by_nature=True)),
    "max_samples": with_others("the first rows of each data set", off=_BY_PREPROCESSING, by_nature=True),
    "val_size": part("split", off="0: nothing is held back"),
    "tool_format": refused("another form of tools than the template's"),
    "ignore_pad_token_for_loss": same("padding has no part in the loss", True),
}
INFO_FILE = "dataset_info.json"
#: folder of dataset_info.json without an option
DATASET_DIR = "data"
#: beginning of a folder of the hub, and the variable of the user for its copy
_ON_HUB, _COPY = "REMOTE:", "DATASET_DIR"
#: stages whose rows are pairs
_PAIRED = ("rm", "dpo", "orpo", "simpo")
#: columns of a form without which a row is sound; an entry with `columns` switches off those that it does not name
_OPTIONAL = {"alpaca": ("query", "system", "history", "tools"), "sharegpt": ("system", "tools")}
_NAMED = {"alpaca": ("prompt", "query", "response", "history"), "sharegpt": ("messages",)}
_MEDIA = ("images", "videos", "audios")
#: keys of an entry that name its data elsewhere
_SOURCES = frozenset(("hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name"))
#: dataset_info.json writes messages of OpenAI's form as sharegpt with tags
_TAG_NAMES = ("role_tag", "content_tag", "user_tag", "assistant_tag", "observation_tag", "function_tag", "system_tag")


@dataclass(frozen=True)
class _Words:
    """A prompt type here, and further words of preprocessing.

    Attributes:
        prompt_type: with the same text.
        writes_tools: also of tools, their calls and results.
        thinks: the template has empty thoughts.
    """

    prompt_type: str
    writes_tools: bool = True
    thinks: bool = False


#: template there -> prompt type here with the same text; others take the chat template of the tokenizer
_TEMPLATES: dict[str, _Words] = {
    "empty": _Words("empty"),
    "deepseek": _Words("deepseek2"),
    "deepseek3": _Words("deepseek3"),
    "glm4": _Words("glm4"),
    "intern_s1": _Words("intern2"),
    "llama2": _Words("llama2"),
    "llama3": _Words("llama3", writes_tools=False),
    "qwen": _Words("qwen_lf"),
    "qwen3": _Words("qwen3", thinks=True),
    "qwen3_nothink": _Words("qwen3_nothink"),
    "qwen3_vl": _Words("qwen3", thinks=True),
    "qwen3_vl_nothink": _Words("qwen3_nothink"),
    "qwen3_5": _Words("qwen3", writes_tools=False, thinks=True),
    "qwen3_5_nothink": _Words("qwen3_nothink", writes_tools=False),
    "qwen3_6": _Words("qwen3", writes_tools=False, thinks=True),
}


@dataclass(frozen=True)
class _Entry:
    """An entry of dataset_info.json.

    Attributes:
        name: in the registry.
        value: as it is written.
        source: file or data set of the hub.
        form: "alpaca" or "sharegpt".
    """

    name: str
    value: Mapping[str, object]
    source: str
    form: str

    @property
    def columns(self) -> dict[str, str]:
        """Columns that the entry names; none where it leaves the defaults."""
        listed = self.value.get("columns")
        return {str(key): str(column) for key, column in listed.items() if column} if isinstance(listed, Mapping) else {}


def describe_data(
    run: Import, command: SourceCommand, source: Command, option: str, *, limited: bool = True, reads_images: bool = True
) -> tuple[str, str]:
    """Return the prefix of the data sets that an option names, and the command that writes it.

    Args:
        limited: max_samples holds for them.
        reads_images: images of rows train; otherwise the source leaves them out.

    Raises:
        ConfigError: there is none, the registry is not here, or an entry does not fit the stage.
    """
    value = command.get(option)
    inline = value if isinstance(value, Mapping) else None
    names = [_name_entry(inline)] if inline is not None else _list_names(value)
    if not names:
        raise ConfigError([f"the command names no data: {option} is missing"])
    stage, folder = command.program, _find_registry(source, command.text("dataset_dir", DATASET_DIR))
    entries = _read_entries(source, folder, names) if inline is None else [_build_entry(names[0], inline, folder)]
    modelscope = is_switched_on(source.environment, "USE_MODELSCOPE_HUB")
    for entry in entries:
        _check(run, entry, stage, modelscope=modelscope)
        if not reads_images and "images" in entry.columns:
            run.refuse(f"dataset {entry.name}", "images of its rows, which the source leaves out; leave them out of columns")
    path = name_tokens(names[0], others=len(names) > 1)
    if option != "dataset":
        path = f"{path.removesuffix('data')}eval"
    tokenizer = command.get("model_name_or_path")
    words = _write_template(run, command, entries)
    rows = f" --max-samples {command.count('max_samples', 1)}" if limited and command.get("max_samples") else ""
    if any(entry.value.get("num_samples") for entry in entries):
        run.translate(option, {}, "num_samples of the registry: the first rows, there a random sample")
    if stage == "pt":
        return f"{path}_{_find_text(run, entries)}_document", describe_preprocessing(
            _join_sources(run, option, entries, rows), path, tokenizer, f"{_write_documents(entries)}{rows}"
        )
    length = command.count("cutoff_len", 2048)
    if stage == "sft":
        mixing = _write_mixing(run, command, entries)
        packing = " --neat-pack" if command.flag("neat_packing") else " --pack" if command.flag("packing") else ""
        packing += f" --seq-length {length}" if packing else ""
        handler = f" --handler-name LlamaFactoryInstructionHandler --dataset-dir {shlex.quote(folder)}"
        handler += _write_images(command, folder, entries)
        written = describe_preprocessing(",".join(names), path, tokenizer, f"{handler}{words}{mixing}{packing}{rows}")
        if inline is not None:
            entry = json.dumps({names[0]: dict(inline)}, ensure_ascii=False)
            written += f", after {entry} is in {Path(folder, INFO_FILE)}"
        return path, written
    handler = f"{entries[0].form.capitalize()}Style{'Unpaired' if stage == 'kto' else 'Pairwise'}Handler"
    columns = [_map_columns(entry, stage) for entry in entries]
    if any(item != columns[0] for item in columns) or any(entry.form != entries[0].form for entry in entries):
        run.refuse(option, "data sets of several forms in one stage of preferences; bring them into one form")
    mapped = f" --map-keys {shlex.quote(json.dumps(columns[0]))}" if columns[0] else ""
    _write_mixing(run, command, entries)
    joined = _join_sources(run, option, entries, rows)
    images = _write_images(command, folder, entries)
    return path, describe_preprocessing(joined, path, tokenizer, f" --handler-name {handler}{mapped}{images}{words}{rows}")


def _list_names(value: object) -> list[str]:
    """Return the names of data sets, between commas or as a list."""
    listed = value if isinstance(value, list) else str(value).split(",") if value is not None else []
    return [str(item).strip() for item in listed if str(item).strip()]


def _find_registry(source: Command, folder: str) -> str:
    """Return the folder of the registry: of one on the hub, its copy that the user names.

    Raises:
        ConfigError: it is on the hub, and the user names no copy.
    """
    if not folder.startswith(_ON_HUB):
        return folder
    if copy := source.environment.get(_COPY):
        return copy
    raise ConfigError(
        [f"dataset_dir {folder}: the registry is on the hub; hf download --repo-type dataset {folder.removeprefix(_ON_HUB)} "
         f"--local-dir FOLDER, and --set {_COPY}=FOLDER"]
    )  # fmt: skip


def _read_entries(source: Command, folder: str, names: list[str]) -> list[_Entry]:
    """Return the entries of the names.

    Raises:
        ConfigError: the registry is not on this machine, cannot be read, or has no such name.
    """
    if folder == "ONLINE":
        return [_Entry(name, {"hf_hub_url": name}, name, "alpaca") for name in names]
    path = require_file(source, "dataset_dir", str(Path(folder, INFO_FILE)))
    try:
        info = read_json(path)
    except ValueError as error:
        raise ConfigError([f"dataset_dir {folder}: {path} cannot be read: {error}"]) from None
    entries = []
    for name in names:
        value = info.get(name)
        if not isinstance(value, Mapping):
            raise ConfigError([f"dataset {name} is not in {path}{registry.did_you_mean(name, info)}"])
        entries.append(_build_entry(name, value, folder))
    return entries


def _build_entry(name: str, value: Mapping[str, object], folder: str) -> _Entry:
    is_file = "file_name" in value and _SOURCES.isdisjoint(value)
    place = str(Path(folder, str(value["file_name"]))) if is_file else str(value.get("hf_hub_url", value.get("ms_hub_url")))
    form = str(value.get("formatting", "alpaca"))
    return _Entry(name, value, place, "sharegpt" if form == "openai" else form)


def _name_entry(value: Mapping[str, object]) -> str:
    """Return a name for an entry that a command has itself, by its file or its data set of the hub."""
    return Path(str(value.get("file_name", value.get("hf_hub_url", "data")))).stem


def _check(run: Import, entry: _Entry, stage: str, *, modelscope: bool) -> None:
    """Refuse what an entry has and preprocessing does not read; raise where LLaMA-Factory does."""
    value, place = entry.value, f"dataset {entry.name}"
    if entry.form not in _NAMED:
        raise ConfigError([f"{place}: formatting {entry.form} is unknown; alpaca, sharegpt and openai are known"])
    is_ranking = bool(value.get("ranking"))
    if is_ranking != (stage in _PAIRED):
        raise ConfigError([f"{place} {'is' if is_ranking else 'is not'} ranking data, which stage {stage} cannot train on"])
    if stage == "kto" and "kto_tag" not in entry.columns:
        raise ConfigError([f"{place} has no kto_tag in its columns, which stage kto reads"])
    readable = ("images",) if stage != "pt" and entry.columns.get("images") in ("images", "image") else ()
    if media := [name for name in _MEDIA if name in entry.columns and name not in readable]:
        reads = "documents are text" if stage == "pt" else "images in a column images or image are read"
        if stage != "pt" and "videos" in media:
            reads += ", and of videos LLaMA-Factory takes other frames and sizes than the model's processor (docs/vision.md)"
        run.refuse(place, f"{', '.join(media)} of its rows; {reads}")
    for key in ("script_url", "cloud_file_name", "folder"):
        if value.get(key):
            run.refuse(place, f"{key} {value[key]}; download the data, and name a file_name")
    has_modelscope = "ms_hub_url" in value and (modelscope or "hf_hub_url" not in value)
    if has_modelscope or ("file_name" not in value and "hf_hub_url" not in value and "script_url" not in value):
        name = value.get("ms_hub_url", value.get("om_hub_url", value.get("cloud_file_name")))
        run.refuse(place, f"data of another hub: modelscope download --dataset {name}, and name a file_name in {INFO_FILE}")
    if stage != "sft" and (value.get("subset") or value.get("split", "train") != "train"):
        run.refuse(place, "a subset or a split of a hub's data set: download it, and name a file_name")


def _write_template(run: Import, command: SourceCommand, entries: list[_Entry]) -> str:
    """Return the words of preprocessing that a template becomes, and note what becomes of it."""
    if command.program == "pt":
        return ""
    name = command.get("template")
    found = _TEMPLATES.get(str(name))
    if found is not None and not found.writes_tools and any("tools" in entry.columns for entry in entries):
        found = None
    if found is None:
        word, note = "hf", f"the chat template of the tokenizer; that {run.project}'s {name} has the same text is not checked"
    else:
        word, note = found.prompt_type, "the same text"
    words = f" --prompt-type {word}"
    thinking = command.get("enable_thinking", True)
    if found is not None and found.thinks:
        # an answer without a thought has an empty one, which trains where thinking is on
        words += f" --enable-thinking {'none' if thinking is None else str(bool(thinking)).lower()}"
        # LLaMA-Factory keeps the thoughts of earlier answers where they train
        keeps = command.program == "sft" or command.flag("preserve_thinking")
        words += f" --drop-thinking {str(not keeps).lower()}"
    elif found is None and command.has("enable_thinking"):
        words += f" --enable-thinking {'none' if thinking is None else str(bool(thinking)).lower()}"
    if system := command.text("default_system"):
        words += f" --system-prompt {shlex.quote(system)}"
    if command.has("template"):
        run.translate("template", {}, f"{words.strip()}: {note}")
    elif name is None:
        run.add_default("megatron_training.tokenizer_name_or_path", command.get("model_name_or_path"), note)
    return words


def _write_images(command: SourceCommand, folder: str, entries: list[_Entry]) -> str:
    """Return the words of images, if rows have any: their folder, and the areas between which LLaMA-Factory brings each."""
    if not any("images" in entry.columns for entry in entries):
        return ""
    place = shlex.quote(command.text("media_dir", folder))
    least, most = command.count("image_min_pixels", 32 * 32), command.count("image_max_pixels", 768 * 768)
    return f" --image-folder {place} --min-pixels {least} --max-pixels {most}"


def _write_mixing(run: Import, command: SourceCommand, entries: list[_Entry]) -> str:
    """Return the words of a mixture; one after the other is the default."""
    strategy, shares = command.text("mix_strategy", "concat"), command.get("interleave_probs")
    if strategy == "concat" or len(entries) == 1:
        return ""
    if command.program != "sft" or strategy not in ("interleave_under", "interleave_over"):
        run.refuse("mix_strategy", f"{strategy} in stage {command.program}; concat is, and in sft interleave_under and _over")
    listed = " ".join(_list_names(shares))
    probabilities = f" --interleave-probs {listed}" if listed else ""
    return f" --mix-strategy {strategy}{probabilities} --seed {int(command.number('seed', 42))}"


def _map_columns(entry: _Entry, stage: str) -> dict[str, object]:
    """Return map_keys of an entry for pairs, or for answers with a label."""
    columns = dict(entry.columns)
    if "kto_tag" in columns:
        columns["label"] = columns.pop("kto_tag")
    known = {*_NAMED[entry.form], "system", "tools", *(("label",) if stage == "kto" else ("chosen", "rejected"))}
    if stage != "kto":
        known.discard("response")
    mapped: dict[str, object] = {key: column for key, column in columns.items() if key in known}
    if columns:
        # a column that the entry does not name is not read there
        mapped |= {key: "" for key in _OPTIONAL[entry.form] if key not in columns}
    tags = entry.value.get("tags")
    if entry.form == "sharegpt" and isinstance(tags, Mapping):
        mapped["tags"] = {str(key): tag for key, tag in tags.items() if key in _TAG_NAMES}
    return mapped


def _join_sources(run: Import, option: str, entries: list[_Entry], rows: str) -> str:
    """Return the files of the entries as one input; each is read up to max_samples there, all of them together here."""
    if len(entries) > 1 and rows:
        run.refuse("max_samples", f"the first rows of each of several data sets in {option}; cut the files")
    return ",".join(entry.source for entry in entries)


def _find_text(run: Import, entries: list[_Entry]) -> str:
    """Return the column of the documents."""
    columns = {entry.columns.get("prompt", "") for entry in entries}
    if len(columns) != 1 or "" in columns or any(entry.form != "alpaca" or "query" in entry.columns for entry in entries):
        run.refuse(
            "dataset", "documents of several columns or messages in stage pt; write them into one column that prompt names"
        )
        return "text"
    return columns.pop()


def _write_documents(entries: list[_Entry]) -> str:
    column = entries[0].columns.get("prompt", "text")
    return f" --handler-name GeneralPretrainHandler --json-keys {column} --append-eod"
