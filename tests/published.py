"""Run files of every origin, and the published models that they fit."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from mindspeed_rl.config.run_files import find_project_configs

DATA = Path(__file__).parent / "data"
#: config.json of published models, as far as it says their shape
MODELS: dict[str, dict[str, Any]] = {path.stem: json.loads(path.read_text()) for path in (DATA / "models").glob("*.json")}

#: model block, shipped or public -> the published models of its shape
FITTING = {
    "qwen25_0p5b": ["Qwen2.5-0.5B"],
    "qwen25_1p5b": ["Qwen2.5-1.5B"],
    "qwen25_7b": ["Qwen2.5-7B", "Qwen2.5-7B-Instruct", "Qwen2.5-Math-7B"],
    "qwen25_32b": ["Qwen2.5-32B", "Qwen2.5-32B-Instruct"],
    "qwen3_0p6b": ["Qwen3-0.6B"],
    "qwen3_8b": ["Qwen3-8B"],
    "qwen3_32b": ["Qwen3-32B"],
    "qwen3_30b_a3b": ["Qwen3-30B-A3B", "Qwen3-30B-A3B-Instruct-2507"],
    "plain_moe": ["Qwen3-30B-A3B", "Qwen3-30B-A3B-Instruct-2507"],
    "qwen25_vl_7b": ["Qwen2.5-VL-7B-Instruct"],
    "qwen3_vl_8b": ["Qwen3-VL-8B-Instruct"],
    "qwen35_4b": ["Qwen3.5-4B"],
    "qwen35_9b": ["Qwen3.5-9B"],
    "qwen35_27b": ["Qwen3.5-27B", "Qwen3.6-27B", "Qwen3.8-27B"],
    "qwen35_35b_a3b": ["Qwen3.5-35B-A3B", "Qwen3.6-35B-A3B"],
    "qwen35_122b_a10b": ["Qwen3.5-122B-A10B"],
    "qwen35_397b_a17b": ["Qwen3.5-397B-A17B"],
    "qwen3_vl_30b_a3b": ["Qwen3-VL-30B-A3B-Instruct"],
    "qwen3_235b_a22b": ["Qwen3-235B-A22B", "Qwen3-235B-A22B-Instruct-2507"],
    "deepseekv3_671b": ["DeepSeek-R1"],
    "latent": ["DeepSeek-R1"],
    "llama32-1b": ["Llama-3.2-1B"],
}


def _run_files(folder: Path) -> list[Path]:
    """YAML files with a group megatron_training; others in these folders are model blocks and settings of data and tools."""
    return [path for path in sorted(folder.rglob("*.yaml")) if "\nmegatron_training:" in f"\n{path.read_text()}"]


SHIPPED = [path for path in _run_files(find_project_configs()) if "tiny" not in path.stem]
OWN = _run_files(DATA / "run_files")
#: `PUBLIC_RUN_FILES=folder` adds all run files below a folder: MindSpeed-RL's branches, for example
PUBLIC = _run_files(Path(os.environ["PUBLIC_RUN_FILES"])) if "PUBLIC_RUN_FILES" in os.environ else []
ALL = [*SHIPPED, *OWN, *PUBLIC]


def name_of(path: Path) -> str:
    """Short, and different for files of different branches."""
    return "/".join(path.parts[-4:]) if path in PUBLIC else path.stem
