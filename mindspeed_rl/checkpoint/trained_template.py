"""Tokenizer, end token and chat template of a training, in the folders that it exports."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from mindspeed_rl.checkpoint.hf import copy_companions, set_end_token, write_json
from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.data.jinja_templates import renders_alike, write_jinja
from mindspeed_rl.data.templates import HF_TEMPLATE, PLAIN_TEMPLATE, Template, Thinking, find_end_token, load_template
from mindspeed_rl.data.tokenizer import load_tokenizer
from mindspeed_rl.files import read_json

#: files of a tokenizer and its chat template
_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt"),
    *("merges.txt", "tekken.json", "*.model", "*.tiktoken", "chat_template.jinja", "chat_template.json"),
)
_THINKING: dict[bool | None, Thinking] = {None: "none", True: "true", False: "false"}
_GENERATION, _TEMPLATE = "generation_config.json", "chat_template.jinja"
#: file of an exported folder: how the training rendered prompts, and what it started from
_RECORD = "mindspeed_rl.json"


@dataclass(frozen=True)
class TrainedTemplate:
    """Tokenizer, end token and chat template of a training.

    Attributes:
        base: HF folder of the model, whose files are exported where the training has no others.
        tokenizer: folder of the tokenizer; None where it is the base's.
        prompt_type, prompt_type_path: as in the run file.
        enable_thinking: the mode of thoughts in training, as in the run file.
    """

    base: Path
    tokenizer: Path | None
    prompt_type: str | None
    prompt_type_path: str
    enable_thinking: bool | None

    @classmethod
    def from_config(cls, config: MegatronConfig, base: Path) -> TrainedTemplate:
        """Build it from a role's keys."""
        named = None if config.tokenizer_name_or_path is None else Path(config.tokenizer_name_or_path).expanduser()
        differs = named is not None and named.is_dir() and named.resolve() != base.resolve()
        return cls(base, named if differs else None, config.prompt_type, config.prompt_type_path, config.enable_thinking)

    def write(self, folder: Path) -> None:
        """Write them into an HF folder, which has the base's files.

        Raises:
            ValueError: the tokenizer does not have the end token of the template.
        """
        if self.tokenizer is not None:
            for path in _list_files(folder):
                path.unlink()
            copy_tokenizer(self.tokenizer, folder)
        end = find_end_token(self.prompt_type, self.prompt_type_path)
        if end is None and self.tokenizer is not None:
            end = _read_end_token(folder)
        if end is not None:
            set_end_token(folder, end)
        self._write_chat_template(folder)
        self._write_record(folder)

    def _write_record(self, folder: Path) -> None:
        record: dict[str, object] = {"base_model": str(self.base)}
        if self.prompt_type is not None:
            # a template of another name is by now the tokenizer's own
            record["prompt_type"] = PLAIN_TEMPLATE if self.prompt_type == PLAIN_TEMPLATE else HF_TEMPLATE
        write_json(folder / _RECORD, record)

    def write_beside_adapter(self, folder: Path) -> None:
        """Write tokenizer and generation settings into the folder of an adapter, where they differ from the base's.

        Raises:
            ValueError: as for `write`.
        """
        with tempfile.TemporaryDirectory() as name:
            made = Path(name)
            copy_companions(self.base, made)
            self.write(made)
            written = {path.name: path.read_bytes() for path in (*_list_files(made), made / _GENERATION) if path.is_file()}
        here = {path.name: path.read_bytes() for path in (*_list_files(self.base), self.base / _GENERATION) if path.is_file()}
        if written != here:
            for file, content in written.items():
                (folder / file).write_bytes(content)
        self._write_record(folder)

    def _write_chat_template(self, folder: Path) -> None:
        if self.prompt_type in (None, HF_TEMPLATE) or not _list_files(folder):
            return
        path = self.prompt_type_path
        template = load_template(self.prompt_type, path=path if Path(path).is_file() else None)
        assert isinstance(template, Template)
        tokenizer = load_tokenizer(folder)
        if renders_alike(template, tokenizer) or (self.prompt_type == PLAIN_TEMPLATE and not tokenizer.chat_template):
            return
        text = write_jinja(template, _THINKING[self.enable_thinking])
        (folder / _TEMPLATE).write_text(text, encoding="utf-8")
        settings = read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").is_file() else {}
        if settings.pop("chat_template", None) is not None:
            write_json(folder / "tokenizer_config.json", settings)
        if (folder / "chat_template.json").is_file():  # a processor's
            write_json(folder / "chat_template.json", {"chat_template": text})


def read_trained_prompt_type(folder: Path) -> str | None:
    """Return the prompt_type by which an exported folder's model was trained; None where nothing is known of it.

    Raises:
        ValueError: the record of the folder is damaged.
    """
    if not (folder / _RECORD).is_file():
        return None
    name = read_json(folder / _RECORD).get("prompt_type")
    if name not in (None, PLAIN_TEMPLATE, HF_TEMPLATE):
        raise ValueError(f"{folder / _RECORD}: prompt_type is {name!r}, but must be {HF_TEMPLATE} or {PLAIN_TEMPLATE}")
    return name


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy the files of a tokenizer."""
    for path in _list_files(source):
        shutil.copyfile(path, target / path.name)


def copy_beside_adapter(source: Path, target: Path) -> None:
    """Copy tokenizer and generation settings of a checkpoint's folder into the folder of an adapter."""
    copy_tokenizer(source, target)
    if (source / _GENERATION).is_file():
        shutil.copyfile(source / _GENERATION, target / _GENERATION)


def replace_by_adapter(adapter: Path, target: Path) -> None:
    """Put what an adapter's folder has of tokenizer, chat template, generation settings and record in place of the base's."""
    names = {path.name for path in _list_files(adapter)}
    # a whole tokenizer, whose template may be elsewhere than the base's
    if "tokenizer_config.json" in names and len(names) > 1:
        for path in _list_files(target):
            path.unlink()
    copy_beside_adapter(adapter, target)
    if (adapter / _RECORD).is_file():
        shutil.copyfile(adapter / _RECORD, target / _RECORD)


def _list_files(folder: Path) -> list[Path]:
    """List the files of a folder's tokenizer."""
    names = (path for path in folder.iterdir() if any(fnmatch(path.name, pattern) for pattern in _TOKENIZER_FILES))
    return sorted(path for path in names if path.is_file())


def _read_end_token(folder: Path) -> str | None:
    """Return the end token of a folder's tokenizer where the model's settings do not have it."""
    path = folder / "tokenizer_config.json"
    named: Any = read_json(path).get("eos_token") if path.is_file() else None
    text = named.get("content") if isinstance(named, dict) else named
    if not isinstance(text, str):
        return None
    token_id = load_tokenizer(folder).convert_tokens_to_ids(text)
    config = read_json(folder / "config.json")
    generation = read_json(folder / _GENERATION) if (folder / _GENERATION).is_file() else {}
    stops = generation.get("eos_token_id", config.get("eos_token_id"))
    return None if token_id in (stops if isinstance(stops, list) else [stops]) else text
