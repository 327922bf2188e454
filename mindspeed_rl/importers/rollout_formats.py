"""Format of a rollout engine's matrices in other projects: by an option, a description of them, or the model's folder."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from mindspeed_rl.files import read_json
from mindspeed_rl.importers.recipe import ENGINE, Recipe
from mindspeed_rl.importers.result import Import
from mindspeed_rl.models.quantized_names import is_quantized

FORMAT_KEY = f"{ENGINE}.quantization"
#: name of a format in vLLM with vllm-ascend, and in SGLang, which quantizes activations too -> the key's value
VLLM_FORMATS: Mapping[object, str] = {"int8": "int8", "ascend": "int8", "mxfp8": "mxfp8"}
SGLANG_FORMATS: Mapping[object, str] = {"w8a8_int8": "int8", "mxfp8": "mxfp8"}
_UNSET = (None, "", "null", "None")
_FROM_FOLDER = "weights from a folder that is quantized already"
#: names of formats that only resemble the key's values -> the difference
_OTHER_FORMATS = {
    "modelopt_mxfp8": f"{_FROM_FOLDER}; mxfp8 quantizes the trained weights",
    "w4afp8": "int4 weights with activations in fp8; w4a8 has int8 activations",
    "w4a8": "int4 weights whose blocks and scales the engine chooses; w4a8 has a scale per 32 elements of a row (NPUs: 256)",
    "qoq": f"{_FROM_FOLDER}, with a zero point per block; w4a8 has none",
    "experts_int8": "int8 weights of experts with activations in dtype; int8 quantizes activations, and attention and MLP too",
    "int8_per_channel_weight_only": "int8 weights with activations in dtype; int8 quantizes both",
}
#: name of a Hugging Face folder whose weights are quantized, in the words of their publishers
_QUANTIZED_FOLDER = re.compile(r"(?i)[-_](mxfp8|fp8|int4|int8|nvfp4|mxfp4|w4a16|awq|gptq)([-_]hf)?$")


def set_rollout_format(run: Import, option: str, value: object, *, formats: Mapping[object, str] = VLLM_FORMATS) -> None:
    """Set the format of the engine's matrices, by its name in the project's engine; refuse others by name."""
    if value in _UNSET:
        run.note(option, "the engine has the format of dtype")
    elif isinstance(value, str) and value in formats:
        run.translate(option, {FORMAT_KEY: formats[value]}, "quantized at each weight sync")
    elif isinstance(value, str) and value in _OTHER_FORMATS:
        run.refuse(option, f"a rollout engine in {value}: {_OTHER_FORMATS[value]}")
    else:
        *others, last = map(str, formats)
        names = f"{', '.join(others)} and {last} are" if others else f"{last} is"
        cache = ", and for only keys and values kv_cache_dtype: fp8_e4m3" if "fp8" in str(value) else ""
        run.refuse(option, f"a rollout engine in {value}; {names} available, quantized at each weight sync{cache}")


def check_quantized_layers(run: Import, option: str, value: object, *, matrices: str) -> None:
    """Accept a description of ModelSlim whose quantized matrices are those of `generate_config.quantization`.

    Args:
        matrices: format of the matrices, such as W8A8_MXFP8.
    """
    switch = f"{option.rpartition('.')[0]}.quantization"
    if run.options.get(switch.removeprefix(run.prefix)) in _UNSET:
        return run.note(option, "it is read with quantization")
    if not value:
        return run.note(option, "the folder of the model describes its matrices")
    try:
        described = {name: str(kind) for name, kind in read_json(str(value)).items() if name.endswith(".weight")}
    except ValueError as error:
        return run.refuse(option, f"a rollout engine whose matrices a file describes: {error}")
    quantized = {name for name, kind in described.items() if kind != "FLOAT"}
    here = {name for name in described if is_quantized(name)}
    if others := sorted({described[name] for name in quantized} - {matrices}):
        return run.refuse(option, f"matrices in {', '.join(others)}; {matrices} is available")
    if not quantized:
        return run.refuse(option, f"a description without a matrix in {matrices}")
    for names, text in (
        (here - quantized, "that stay in dtype there and are quantized here"),
        (quantized - here, "that are quantized there and stay in dtype here"),
    ):
        if names:
            return run.refuse(option, f"{len(names)} matrices {text}, such as {min(names)}")
    return run.note(option, f"its matrices are those that {FORMAT_KEY} has in {matrices}")


def find_folder_format(folder: str) -> str:
    """Return the format of a Hugging Face folder by its config.json, or by its name where it is elsewhere; "" for none."""
    path = Path(folder).expanduser()
    if (path / "config.json").is_file():
        with contextlib.suppress(ValueError):  # explain names a file that is broken
            found = read_json(path / "config.json").get("quantization_config")
            if not isinstance(found, Mapping) or not found:
                return ""
            return str(found.get("quant_method") or f"a format without quant_method ({', '.join(map(str, found))})")
    named = _QUANTIZED_FOLDER.search(path.name)
    return named[1].lower() if named else ""


def remove_format(name: str) -> str:
    """Return the name of a folder without the formats at its end."""
    while named := _QUANTIZED_FOLDER.search(name):
        name = name[: named.start()]
    return name


def compare_folder_format(run: Import, recipe: Recipe) -> Recipe:
    """Return the run with the format that its rollout engine reads in the model's folder, as vLLM and SGLang do.

    A format that no key of the run has is a number of the plan, `weights`.
    """
    folder = recipe.engine_folder or recipe.model
    if recipe.rollout_completions is None or not folder or not (found := find_folder_format(folder)):
        return recipe
    defaults = {path: value for path, value, _ in recipe.defaults}
    chosen = run.get(FORMAT_KEY)
    if chosen is not None and chosen != found:
        run.refuse(folder, f"two formats of the rollout engine: the folder is in {found}, and an option says {chosen}")
    if found in (chosen, defaults.get(FORMAT_KEY)):
        return recipe
    form = f"rollouts in {found}, which {Path(folder).name} has"
    return replace(recipe, weights=" and ".join(filter(None, (recipe.weights, form))))
