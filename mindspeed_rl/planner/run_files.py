"""Model blocks that a search reads, and run files that it writes."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from mindspeed_rl.config.errors import suggest_name
from mindspeed_rl.config.keys.megatron import MegatronConfig
from mindspeed_rl.config.keys.model import ModelKeys
from mindspeed_rl.config.run_files import find_project_configs
from mindspeed_rl.models.model_keys import fill_model_keys
from mindspeed_rl.models.plan import read_model
from mindspeed_rl.planner.devices import GIB
from mindspeed_rl.planner.fit import FitRequest, FitResult

#: keys that a user has to set, each with an example value
_EXAMPLES = (
    ("megatron_training", "data_path", "./dataset/deepscaler/data"),
    ("megatron_training", "dataset_additional_keys", ["labels"]),
    ("megatron_training", "tokenizer_name_or_path", "./models/{model}"),
    ("actor_config", "load", "./models/{model}"),
    ("actor_config", "save", "./ckpt/{model}"),
    ("actor_config", "finetune", True),
)


def read_folder(folder: Path, engine: str = "megatron") -> dict[str, Any]:
    """Return the keys of a model block that describe the model of a folder.

    Args:
        engine: training engine of the layouts, which may have families of its own.

    Raises:
        ValueError: its config.json is of no supported model.
    """
    _, model_config, _ = read_model(folder, engine)
    config = MegatronConfig(num_layers=model_config.num_layers)
    filled = fill_model_keys(config, model_config, folder / "config.json", frozenset())
    defaults = MegatronConfig()
    values = {field.name: getattr(filled, field.name) for field in fields(ModelKeys)}
    return {name: value for name, value in values.items() if value is not None and value != getattr(defaults, name)}


def read_block(name: str, config_dir: str | None) -> dict[str, Any]:
    """Return the keys of a model block.

    Raises:
        ValueError: the block does not exist; the nearest name is given.
    """
    import yaml  # here, as in run_files: help and errors need no YAML

    folders = [Path(config_dir)] if config_dir is not None else [find_project_configs(), Path.cwd() / "configs", Path.cwd()]
    for folder in folders:
        path = folder / "model" / f"{name}.yaml"
        if path.is_file():
            block = yaml.safe_load(path.read_text(encoding="utf-8"))
            if not isinstance(block, dict) or not isinstance(block.get(name), dict):
                raise ValueError(f"--model: {path} has no block {name}.")
            return block[name]
    known = sorted(path.stem for folder in folders for path in (folder / "model").glob("*.yaml"))
    likely = suggest_name(name, known)
    hint = f"the nearest name is {likely}" if likely else f"known are {', '.join(known) or 'none'}"
    raise ValueError(f"--model: there is no model block {name!r}, and no folder with a config.json; {hint}.")


def format_run_file(request: FitRequest, result: FitResult) -> str:
    """Return a layout as the text of a run file; paths of data and weights are examples."""
    peak, time = result.memory.fullest.peak, result.time
    lines = [
        f"# GRPO of {request.model} on {request.npus} devices of {result.memory.device}, found by `mindspeed-rl plan fit`:",
        f"# about {peak.total / GIB:.0f} GiB a device in phase {peak.name}, {time.format_bounds(time.total)} s an iteration. "
        "Paths of data and weights are examples.",
        *(["defaults:", f"  - model: [{request.model}]"] if request.folder is None else []),
    ]
    tree = {name: dict(group) for name, group in result.tree.items() if isinstance(group, Mapping) and name != "model"}
    for group, key, value in _EXAMPLES:
        tree[group][key] = value.format(model=request.model) if isinstance(value, str) else value
    if request.folder is not None:
        tree["megatron_training"]["tokenizer_name_or_path"] = tree["actor_config"]["load"] = request.named or request.folder
    lines += ["", f"platform: {result.tree['platform']}"]
    for name, group in tree.items():
        lines += ["", f"{name}:", *_format_group(group, 1)]
    return "\n".join(lines) + "\n"


def format_groups(tree: Mapping[str, object]) -> Iterator[str]:
    """Yield the lines of a composed run file, one key a line."""
    yield from _format_group(tree, 0)


def _format_group(group: Mapping[str, object], depth: int) -> Iterator[str]:
    for name, value in group.items():
        if isinstance(value, Mapping):
            yield "  " * depth + f"{name}:"
            yield from _format_group(value, depth + 1)
        else:
            yield "  " * depth + f"{_format_name(name)}: {_format_value(value)}"


def _format_name(name: str) -> str:
    """Return a key as YAML, in quotes where it would be something else than text without them."""
    return name if re.fullmatch(r"[A-Za-z]+_[\w.-]*|model|platform|[a-z]{4,}", name) else json.dumps(name, ensure_ascii=False)


def _format_value(value: object) -> str:
    """Return a value as YAML: what JSON writes, except for numbers that YAML reads as text or not at all."""
    if isinstance(value, float):
        if not math.isfinite(value):
            return ".nan" if math.isnan(value) else f"{'-' if value < 0 else ''}.inf"
        text = repr(value)
        # YAML reads 1e-06 as text, and 1.0e-06 as a number
        return text if "e" not in text or "." in text else text.replace("e", ".0e")
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_format_value, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{json.dumps(str(name))}: {_format_value(item)}' for name, item in value.items())}}}"
    return json.dumps(value, ensure_ascii=False)
