"""`mindspeed-rl preprocess`: convert raw data to Megatron indexed datasets.

Settings come from flags, from a YAML file (`--config-name math_17k`, or the bare name), or from both; flags win.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, NoReturn

from omegaconf import OmegaConf

from mindspeed_rl import registry
from mindspeed_rl.cli.options import print_status, read_json_object
from mindspeed_rl.config.run_files import find_project_configs
from mindspeed_rl.data import HANDLERS
from mindspeed_rl.data.parts import merge
from mindspeed_rl.data.preprocess import run, show
from mindspeed_rl.data.preprocess_config import PreprocessConfig
from mindspeed_rl.data.sources import DEFAULT_CHUNK_SIZE, ChunkSize
from mindspeed_rl.observability.logging import clean_text

_CONFIG_DIR = Path("configs/datasets")
_MERGE_KEY = "merge_group_keys"


# Keys of commands and dataset files that have no effect here: type of the flag, and the allowed values (None: any).
_IGNORED_KEYS: dict[str, tuple[type, tuple[Any, ...] | None]] = {
    "dataset_impl": (str, ("mmap",)),
    "overwrite_cache": (bool, None),
    "make_vocab_size_divisible_by": (int, None),
    "pad_vocab_size_to": (int, None),
    "split_sentences": (bool, (False,)),
    "keep_newlines": (bool, None),
    "vocab_file": (str, ()),
    "merge_file": (str, ()),
    "tokenizer_model": (str, ()),
    "script_data_dir": (str, ()),
    "datasets": (str, ()),
    "data_obfuscation": (bool, (False,)),
    "obf_seed_content": (str, None),
}


def _true_or_false(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return text.lower() == "true"


class _Parser(argparse.ArgumentParser):
    """Argument parser whose errors are a line, without a page of options above it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (--help lists the options)\n")


def make_parser() -> argparse.ArgumentParser:
    """Build the argument parser."""
    parser = _Parser(
        prog="mindspeed-rl preprocess",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", nargs="?", help="name of a YAML file in the config folder")
    parser.add_argument("--config-name", "--config", dest="config_name", help="the same, as a flag")
    parser.add_argument("--config-dir", default=None, help=f"folder of the YAML files (default: {_CONFIG_DIR})")
    parser.add_argument("--show", type=int, metavar="N", help="print N samples with trained tokens marked, write nothing")
    for add_group in (_add_data, _add_text, _add_work, _add_ignored):
        add_group(parser)
    return parser


def _add_data(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("data").add_argument
    forms = "parquet, json, jsonl, csv, txt, arrow"
    add("--input", help=f"file, folder, pattern or comma-separated list ({forms}), saved dataset, or dataset name")
    add("--output-prefix", help="path and first part of the written files' names")
    add("--handler-name", help=f"{'; '.join(HANDLERS)}; or module:Class of your own")
    add("--map-keys", type=read_json_object, help='JSON object: the handler\'s name of a column -> yours; "" switches it off')
    add("--json-keys", nargs="+", help="text columns for pretraining")
    add("--dataset-additional-keys", nargs="*", help="columns kept with the prompt (RL)")
    add("--max-samples", type=int, help="stop after this many rows")
    add("--on-bad-row", choices=PreprocessConfig.choices["on_bad_row"], help="action on a malformed row")
    add("--cache-dir", help="cache for dataset names")
    add("--streaming", action="store_true", default=None, help="stream a dataset name instead of downloading all of it")
    add("--hf-datasets-params", type=read_json_object, help="JSON object of further load_dataset arguments (split, name ...)")
    add("--image-folder", help="folder of images that rows name by relative paths (default: the working directory)")
    add("--min-pixels", type=int, help="smaller images are enlarged to this area (default: the model's)")
    add("--max-pixels", type=int, help="larger images are reduced to this area (default: the model's)")
    add("--video-fps", type=float, help="frames of a video that are sampled in a second (default: the model's)")
    add("--video-min-frames", type=int, help="fewest frames of a video that are sampled (default: the model's)")
    add("--video-max-frames", type=int, help="most frames of a video that are sampled (default: the model's)")
    add("--video-min-pixels", type=int, help="smaller frames are enlarged to this area (default: the model's)")
    add("--video-max-pixels", type=int, help="larger frames are reduced to this area (default: the model's)")
    add("--dataset-dir", help="folder of dataset_info.json (LlamaFactoryInstructionHandler)")
    add("--interleave-probs", type=float, nargs="+", help="fraction of each dataset")
    add("--mix-strategy", choices=PreprocessConfig.choices["mix_strategy"])
    add("--seed", type=int, help="for interleaving")


def _add_text(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("tokens").add_argument
    add("--tokenizer-type", help=" or ".join(PreprocessConfig.choices["tokenizer_type"]))
    add("--tokenizer-name-or-path")
    add("--tokenizer-not-use-fast", action="store_true", default=None)
    add("--trust-remote-code", action="store_true", default=None, help="run code that comes with the tokenizer")
    add("--prompt-type", help="chat template; hf is the tokenizer's own")
    add("--prompt-type-path", help="template file of your own")
    add("--enable-thinking", choices=PreprocessConfig.choices["enable_thinking"])
    add("--chat-template-kwargs", type=read_json_object, help="JSON object of arguments of the tokenizer's template (hf)")
    add("--reasoning-effort", help="effort text of the template (deepseek4: high, max)")
    add("--drop-thinking", type=_true_or_false, help="leave out thoughts before the last question (default: the template's)")
    add("--system-prompt", help="system prompt of every row that has none")
    add("--append-eod", action="store_true", default=None, help="end token after each document, and each sample without one")
    add("--seq-length", type=int, help="longer samples are dropped; the length of a packed row")
    add("--pad-to-multiple-of", type=int)
    add("--pack", action="store_true", default=None, help="several samples in a row")
    add("--neat-pack", action="store_true", default=None, help="--pack, with samples separated by the attention mask")
    add("--placeholder-token", help="end of a step (process reward)")
    add("--reward-tokens", nargs="*", help="allowed verdicts (process reward)")


def _add_work(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("work").add_argument
    add("--workers", type=int, help="processes that tokenize")
    add("--n-subs", type=int, help="cut the work into parts; a repeated command keeps the finished ones")
    add("--log-interval", type=int, help="rows between progress lines without a terminal")
    add("--merge-group-keys", nargs="+", help="only join the pairs in --input whose names contain each key")


def _add_ignored(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("accepted for compatibility, without effect").add_argument
    for name, (kind, allowed) in _IGNORED_KEYS.items():
        only = None if allowed is None else f"only {', '.join(map(str, allowed))}" if allowed else "refused"
        flag = f"--{name.replace('_', '-')}"
        if kind is bool:
            add(flag, action="store_true", default=None, help=only)
        else:
            add(flag, type=kind, help=only)


def _load_dataset_config(name: str, config_dir: str | Path | None = None) -> dict[str, Any]:
    """Read a dataset YAML file; hyphens in keys become underscores.

    Raises:
        ValueError: no such file (the message lists the existing ones), or not a mapping.
    """
    file = name if name.endswith((".yaml", ".yml")) else f"{name}.yaml"
    shipped = find_project_configs() / "datasets"
    if config_dir is not None:
        folders = [Path(config_dir)]
    else:
        # as for run files: a file of the user has priority over a shipped one only where the name ends in .yaml
        folders = [*([Path()] if file == name else []), shipped, _CONFIG_DIR, Path()]
    path = next((folder / file for folder in folders if (folder / file).is_file()), None)
    if path is None:
        existing = ", ".join(sorted({file.stem for folder in folders for file in folder.glob("*.yaml")})) or "none"
        raise ValueError(f"config_name={name!r}: {folders[-1] / file} does not exist (existing: {existing})")
    values = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold keys and values")
    return {str(key).replace("-", "_"): value for key, value in values.items()}


def _build_config(values: dict[str, Any]) -> PreprocessConfig:
    """Build a PreprocessConfig from settings.

    Raises:
        ValueError: a key is unknown (the message has a suggestion), missing, or has a wrong value.
    """
    known = {field.name: field for field in fields(PreprocessConfig)}
    settings = {}
    for key, value in values.items():
        if key in _IGNORED_KEYS:
            _, allowed = _IGNORED_KEYS[key]
            if allowed is not None and value is not None and value not in allowed:
                hint = f"allowed: {', '.join(map(str, allowed))}" if allowed else "leave it out"
                raise ValueError(f"{key}={value!r} is not supported; {hint}")
            continue
        if key not in known:
            hint = registry.did_you_mean(key, known) or f" (known: {', '.join(known)})"
            raise ValueError(f"{key!r} is not a key of a dataset config{hint}")
        if key == "enable_thinking" and isinstance(value, bool):
            value = "true" if value else "false"
        if value is not None:
            settings[key] = value
    for name, field in known.items():
        if field.default is MISSING and name not in settings:
            raise ValueError(f"{name} is missing; give --{name.replace('_', '-')}, or the key in the YAML file")
    return PreprocessConfig(**settings)


def main(argv: Sequence[str] | None = None, *, chunk_size: ChunkSize = DEFAULT_CHUNK_SIZE) -> int:
    """Run the command; return 0, or 2 after a user's error, whose message goes to stderr.

    Args:
        chunk_size: rows that a worker encodes at a time; the written files do not depend on it.
    """
    arguments = vars(make_parser().parse_args(argv))
    name = arguments.pop("config_name") or arguments["config"]
    arguments.pop("config")
    config_dir = arguments.pop("config_dir")
    count = arguments.pop("show")
    try:
        values = _load_dataset_config(name, config_dir) if name else {}
        values.update({key: value for key, value in arguments.items() if value is not None})
        keys = values.pop(_MERGE_KEY, None)
        if keys:
            for required in ("input", "output_prefix"):
                if required not in values:
                    raise ValueError(f"{required} is missing; merge_group_keys needs it")
            print("written:", *merge(values["input"], values["output_prefix"], keys), sep="\n  ")
            return 0
        if count is not None:
            values.setdefault("output_prefix", "")
            print(clean_text(show(_build_config(values), count)))
            return 0
        print(clean_text(run(_build_config(values), chunk_size).text))
    except (ValueError, OSError) as error:
        print_status(f"error: {error}")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
