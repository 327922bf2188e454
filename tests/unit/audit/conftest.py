"""A tokenizer of bytes and the command on run files of the tests."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from audited_rows import write_rows

from mindspeed_rl.cli.main import main

sys.path.insert(0, str(Path(__file__).parents[1] / "data"))

from byte_tokenizer import build_tokenizer

Row = dict[str, Any]


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def audit(tmp_path: Path, tokenizer_folder: str, capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, Any]]:
    """Run `mindspeed-rl audit` and return the exit code and the JSON that it prints, or its errors."""

    def run(kind: str, rows: Sequence[object], *options: str, held_out: Sequence[object] = ()) -> tuple[int, Any]:
        train = write_rows(tmp_path / "train.jsonl", rows)
        keys = {"data_path": train, "tokenizer_name_or_path": tokenizer_folder, "eval_data_path": "null"}
        if held_out:
            keys["eval_data_path"] = write_rows(tmp_path / "heldout.jsonl", held_out)
        overrides = [f"megatron_training.{name}={value}" for name, value in keys.items()]
        # options come last: the last value of a key counts
        words = ["rl_config.max_prompt_length=2000", *overrides, *(word for word in options if not word.startswith("-"))]
        flags = [word for word in options if word.startswith("-")]
        capfd.readouterr()
        code = main(["audit", kind, "--config-name", "grpo_tiny_cpu", "--json", *flags, *words])
        printed = capfd.readouterr()
        return code, json.loads(printed.out) if printed.out.startswith("{") else printed.err

    return run
