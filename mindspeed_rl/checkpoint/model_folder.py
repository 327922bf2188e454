"""A copy of a Hugging Face folder under a name that is never a mixture of two models, or a part of one."""

from __future__ import annotations

import os
import shutil
from fnmatch import fnmatch
from pathlib import Path

#: files of a model and its tokenizer; others in a folder are not the model's
_MODEL_FILES = (
    *("config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json", "adapter_config.json"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt"),
    *("merges.txt", "tekken.json", "*.model", "*.tiktoken", "chat_template.jinja", "chat_template.json"),
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json", "mindspeed_rl.json"),
)
#: by these a reader knows that there is a model: they go first and come last
_MARKS = ("config.json", "adapter_config.json")


def copy_model(source: Path, target: Path) -> None:
    """Copy a model's folder; files of an earlier model in the target go, and other files stay.

    A target that is not there, or has nothing but a model, is replaced as a whole. In another one the files are replaced one by
    one, and it has no config.json meanwhile: a copy that is killed does not look complete.

    Raises:
        ValueError: the target is the source, or inside it.
        OSError: the disk does not take it; an earlier model is as before where the copy was not complete.
    """
    source, target = source.resolve(), target.resolve()
    if target == source or source in target.parents:
        raise ValueError(f"{target} is in the folder that is copied, {source}; choose another folder")
    partial, old = (target.with_name(f"{target.name}.{end}") for end in ("partial", "old.partial"))
    for left in (partial, old):  # by a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        shutil.copytree(source, partial)
        if not target.exists():
            os.replace(partial, target)
        elif all(_is_model_file(path) for path in target.iterdir()):
            _replace_folder(partial, target, old)
        else:
            _replace_files(partial, target)
    finally:
        for left in (partial, old):
            shutil.rmtree(left, ignore_errors=True)


def _is_model_file(path: Path) -> bool:
    return path.is_file() and any(fnmatch(path.name, pattern) for pattern in _MODEL_FILES)


def _replace_folder(made: Path, target: Path, old: Path) -> None:
    """Give a folder the name of another one, which gets `old`; after an error both have their names."""
    os.replace(target, old)
    try:
        os.replace(made, target)
    except OSError:
        os.replace(old, target)
        raise


def _replace_files(made: Path, target: Path) -> None:
    """Move the files of a folder into another one, in place of a model's files there."""
    earlier = [path for path in target.iterdir() if _is_model_file(path)]
    for path in sorted(earlier, key=lambda path: path.name not in _MARKS):
        path.unlink()
    for path in sorted(made.iterdir(), key=lambda path: path.name in _MARKS):
        if (target / path.name).is_dir():
            shutil.rmtree(target / path.name)
        os.replace(path, target / path.name)
