"""A layout that was found, as a run file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mindspeed_rl.config.errors import suggest_name
from mindspeed_rl.config.run_files import project_configs
from mindspeed_rl.planner.chips import GIB
from mindspeed_rl.planner.fit import Found, Wanted
from mindspeed_rl.planner.text import seconds_range

#: what a user has to say, with a value that shows what is meant
_PLACES = (
    ("megatron_training", "data_path", "./dataset/deepscaler/data"),
    ("megatron_training", "dataset_additional_keys", ["labels"]),
    ("megatron_training", "tokenizer_name_or_path", "./models/{model}"),
    ("actor_config", "load", "./models/{model}"),
    ("actor_config", "save", "./ckpt/{model}"),
    ("actor_config", "finetune", True),
)


def read_block(name: str, config_dir: str | None) -> dict[str, Any]:
    """Return the keys of a model block.

    Raises:
        ValueError: there is no such block; the nearest name is given.
    """
    import yaml  # here, as in run_files: help and mistakes need no YAML

    folders = [Path(config_dir)] if config_dir is not None else [project_configs(), Path.cwd() / "configs", Path.cwd()]
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
    raise ValueError(f"--model: there is no model block {name!r}; {hint}.")


def run_file(wanted: Wanted, found: Found) -> str:
    """Return the run file's text; paths of data and weights are placeholders."""
    peak = found.memory.fullest.peak
    took = f"about {peak.total / GIB:.0f} GiB a die in phase {peak.name}, {seconds_range(found.time, found.time.total)} s an"
    lines = [
        f"# GRPO of {wanted.model} on {wanted.npus} dies of {found.memory.chip}, found by `mindspeed-rl plan fit`:",
        f"# {took} iteration. Paths of data and weights are placeholders.",
        "defaults:",
        f"  - model: [{wanted.model}]",
    ]
    tree = {name: dict(group) for name, group in found.tree.items() if isinstance(group, Mapping) and name != "model"}
    for group, key, value in _PLACES:
        tree[group][key] = value.format(model=wanted.model) if isinstance(value, str) else value
    lines += ["", f"platform: {found.tree['platform']}"]
    for name, group in tree.items():
        lines += ["", f"{name}:", *_lines(group, 1)]
    return "\n".join(lines) + "\n"


def _lines(group: Mapping[str, Any], depth: int) -> Iterator[str]:
    for name, value in group.items():
        if isinstance(value, Mapping):
            yield "  " * depth + f"{name}:"
            yield from _lines(value, depth + 1)
        else:
            # every JSON value is YAML, apart from numbers like 1e-06, which YAML reads as text without a point
            text = f"{value:.1e}" if isinstance(value, float) and 0 < value < 1e-3 else json.dumps(value)
            yield "  " * depth + f"{name}: {text}"
