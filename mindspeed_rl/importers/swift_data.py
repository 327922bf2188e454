"""Datasets of ms-swift: names and shares as keys, and what a user downloads, joins or preprocesses."""

from __future__ import annotations

import re
from pathlib import Path

from mindspeed_rl.config.errors import ConfigError
from mindspeed_rl.importers.options import SourceCommand, read_count, read_scalar
from mindspeed_rl.importers.recipe import ACTOR
from mindspeed_rl.importers.result import Import
from mindspeed_rl.importers.shell import read_variable
from mindspeed_rl.importers.swift_commands import MEGATRON, PAIRS, WITH_ROLLOUTS
from mindspeed_rl.importers.swift_rows import map_columns
from mindspeed_rl.importers.swift_sizes import read_length
from mindspeed_rl.importers.swift_templates import note_template, write_template
from mindspeed_rl.importers.translators import describe_preprocessing, name_prompts, name_tokens

#: dataset -> column of map_keys -> the column that ms-swift takes from it
_COLUMNS: dict[str, dict[str, str]] = {
    "AI-MO/NuminaMath-TIR": {"prompt": "problem", "response": "solution", "query": ""},
}
#: owners of datasets and models that only ModelScope has
_MODELSCOPE = frozenset("AI-ModelScope swift modelscope iic LLM-Research ZhipuAI speech_asr llm-wizard liucong".split())
VISION = re.compile(
    r"(?i)[-_/.](vl|omni|audio|tts|ocr)[-_/.\d]|[-_]vl$|[-_/](omni)$|qwen\d?(\.\d)?-?(vl|omni|audio)|internvl|llava|minicpm-v|"
    r"clevr_cogen|multimodal|latex_ocr|videochat|chartqa|geoqa|aishell|coco-en|mammoth-vl|rlaif-v"
)
#: models of images that there are, and data of images
IMAGES = re.compile(r"(?i)qwen-?(2\.5|3)-?vl|clevr_cogen|multimodal|latex_ocr|chartqa|geoqa|coco-en|mammoth-vl|rlaif-v")


def read_data(run: Import, command: SourceCommand, kind: str) -> tuple[dict[str, str], dict[str, str]]:
    """Return the keys of the data and their notes."""
    sampled = "the last rows; there a random sample"
    keys: dict[str, str] = {}
    notes, flags = {"split": sampled}, ""
    for variable, key in (("MAX_PIXELS", "max_pixels"), ("MIN_PIXELS", "min_pixels"), ("ROOT_IMAGE_DIR", "image_folder")):
        if (value := read_variable(command.environment, variable)) is not None:
            run.translate(variable, {f"{ACTOR}.{key}": value if key == "image_folder" else int(value)})
            flags += f" --{key.replace('_', '-')} {value}"
    side = 32 if re.search(r"(?i)qwen-?3(\.\d)?(-vl|-omni|-?\d)", command.text("model")) else 28
    for variable, key in (("IMAGE_MAX_TOKEN_NUM", "max_pixels"), ("IMAGE_MIN_TOKEN_NUM", "min_pixels")):
        if (value := read_variable(command.environment, variable)) is not None:
            pixels = read_count(variable, read_scalar(value)) * side**2
            run.translate(variable, {f"{ACTOR}.{key}": pixels}, f"tokens of {side} x {side} pixels")
            flags += f" --{key.replace('_', '-')} {pixels}"
    template = "" if kind in (*WITH_ROLLOUTS, "pt") else write_template(run, command, kind)
    for option, key in (("dataset", "data_path"), ("val_dataset", "eval_data_path")):
        if option == "dataset" or command.has(option):
            path = _find_data(command, option)
            keys[f"{ACTOR}.{key}"], notes[key] = path, _describe_data(run, command, kind, option, path, flags, template)
    fills = any("self-cognition" in item for item in command.list_texts("dataset"))
    for name, place in (("model_author", "AUTHOR"), ("model_name", "NAME")):
        words = " / ".join(command.list_texts(name))
        if fills and command.has(name):
            run.translate(f"--{name}", {}, f"write {words} for {{{{{place}}}}} in the rows of self-cognition before preprocess")
        run.note_given(name, "only self-cognition data has places for it")
    share = command.number("split_dataset_ratio", 0.0)
    counts = [item.rpartition("#")[2] for item in command.list_texts("dataset")]
    if share and kind in WITH_ROLLOUTS and all(count.isdigit() for count in counts):
        head, _, first = keys[f"{ACTOR}.data_path"].rpartition("[:")
        notes["eval_data_path"] = sampled
        keys[f"{ACTOR}.eval_data_path"] = f"{head}[{first.rstrip(']')}:{sum(int(count) for count in counts)}]"
    elif share:
        keys[f"{ACTOR}.split"] = f"{100 * (1 - share):g},{100 * share:g},0"
    return keys, notes


def _describe_data(run: Import, command: SourceCommand, kind: str, option: str, path: str, flags: str, template: str) -> str:
    """Return the note of the data: what to download, join or preprocess.

    Args:
        flags: options of preprocessing for images.
        template: those for the chat template.
    """
    names, has_rollouts = command.list_texts(option), kind in WITH_ROLLOUTS
    name, _, count = names[0].partition("#")
    if has_rollouts and any(":" in item.partition("#")[0] and item.count("/") == 1 for item in names):
        run.refuse(f"--{option} {' '.join(names)}", "a subset of a dataset: download it, and give its folder")
    notes = ["the first rows; there a random sample"] if count else []
    is_joined = len(names) > 1 and has_rollouts
    if is_joined:
        notes.append(f"a file with the rows of {', '.join(names)}")
    is_hub = name.count("/") == 1 and not Path(name).expanduser().exists()
    if is_hub and not is_joined and not path.startswith("hf://"):
        notes.append(f"a folder: modelscope download --dataset {name} --local_dir {name}")
    if not has_rollouts:
        form = "Pairwise" if kind in PAIRS else "Unpaired" if kind == "kto" else "Instruction"
        words = "" if kind == "pt" else f" --handler-name AlpacaStyle{form}Handler{template}{_write_length(command, kind)}"
        rows = f" --max-samples {count}" if count and len(names) == 1 else ""
        notes.append(describe_preprocessing(" + ".join(names), path, command.text("model"), f"{words}{rows}{flags}"))
        notes += [note] if (note := note_template(command)) and kind != "pt" else []
    else:
        for column, source in _COLUMNS.get(name, {}).items():
            run.add_default(f"{ACTOR}.map_keys.{column}", source, f"the column of {name}")
        if not command.has("columns"):
            map_columns(run, name)
    return "; ".join(notes)


def _write_length(command: SourceCommand, kind: str) -> str:
    """Return the options of preprocessing for long rows, which ms-swift leaves out, and for packs."""
    if kind == "sft" and command.flag("packing"):
        return f" --neat-pack --seq-length {read_length(command)}"
    # rows of fewer tokens than that are kept
    return f" --seq-length {read_length(command) + 1}" if command.has("max_length") else ""


def _find_data(command: SourceCommand, option: str = "dataset") -> str:
    """Return data_path here, or eval_data_path.

    Raises:
        ConfigError: there is none.
    """
    names = command.list_texts(option)
    if not names:
        raise ConfigError([f"the command names no data: --{option} is missing"])
    name, _, count = names[0].partition("#")
    if command.program.removeprefix(MEGATRON) not in WITH_ROLLOUTS:
        return name_tokens(name, others=len(names) > 1)
    rows, share = sum(int(item.rpartition("#")[2]) for item in names if "#" in item), command.number("split_dataset_ratio", 0.0)
    is_counted = all("#" in item for item in names)
    part = f"[:{round(rows * (1 - share))}]" if share and is_counted and option == "dataset" else ""
    if len(names) > 1:
        return f"./dataset/{Path(name).stem}_and_others.jsonl{part}"
    is_elsewhere = name.partition("/")[0] in _MODELSCOPE and not command.flag("use_hf")
    return (name if is_elsewhere else name_prompts(name)) + (part or (f"#{count}" if count else ""))
