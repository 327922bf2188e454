"""Handlers and chat templates: every entry has its interface and its place in the guide; one's own is one file."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path

import pytest
from byte_tokenizer import build_tokenizer

from mindspeed_rl.cli.preprocess import main
from mindspeed_rl.data import HANDLERS, handler_class
from mindspeed_rl.data.handlers.base import Handler
from mindspeed_rl.data.templates import _list_template_names, load_template

DOCS = Path(__file__).parents[3] / "docs"
PAGES = ["data.md", "zh/data.md"]
#: one file of the user's
HANDLER = '''
import numpy as np
from mindspeed_rl.data.conversation import MalformedRowError
from mindspeed_rl.data.handlers.base import Draft, EncodedRow, Handler
from mindspeed_rl.data.templates import Rendering, Turn

class Backwards(Handler):
    """Rows of word, learned from its end to its beginning."""

    columns = ("input_ids", "labels")
    needs_template = False
    default_map = {"word": "word"}

    def render(self, row):
        return Draft((Rendering((Turn((), (self.text_column(row, "word", required=True)[::-1],)),)),))

    def assemble(self, draft, encoded):
        ((_, target),) = encoded[0]
        return EncodedRow({"input_ids": np.array(target), "labels": np.array(target)})

class NoHandler:
    pass
'''


@pytest.mark.parametrize("name", HANDLERS)
def test_every_handler_has_the_interface(name: str) -> None:
    kind = handler_class(name)
    assert issubclass(kind, Handler) and not inspect.isabstract(kind)
    assert kind.__name__ == name and kind.__doc__
    assert kind.columns and (not kind.packed or kind.length_column in kind.columns)


@pytest.mark.parametrize("page", PAGES)
def test_the_guide_has_a_row_for_every_handler_and_no_other(page: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `?(\w+Handler)\b", text, re.MULTILINE)) == set(HANDLERS)


@pytest.mark.parametrize("page", PAGES)
def test_the_guide_names_every_template(page: str) -> None:
    words = set(re.findall(r"[\w-]+", (DOCS / page).read_text(encoding="utf-8")))
    assert [name for name in _list_template_names() if name not in words] == []


def run(tmp_path: Path, rows: list[dict[str, str]], tokenizer_folder: str, *flags: str) -> int:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["--input", str(tmp_path / "rows.jsonl"), "--tokenizer-name-or-path", tokenizer_folder]
    return main([*command, "--output-prefix", str(tmp_path / "out"), *flags])


def test_a_handler_of_ones_own_is_one_file(tmp_path, tokenizer_folder, read_columns, monkeypatch, capsys) -> None:
    (tmp_path / "my_handlers.py").write_text(HANDLER)
    monkeypatch.syspath_prepend(tmp_path)
    rows = [{"word": "abc"}, {"word": "né"}]
    assert run(tmp_path, rows, tokenizer_folder, "--handler-name", "my_handlers:Backwards") == 0
    ids = [build_tokenizer()(text, add_special_tokens=False)["input_ids"] for text in ("cba", "én")]
    assert read_columns(str(tmp_path / "out")) == {"input_ids": ids, "labels": ids}
    assert run(tmp_path, rows, tokenizer_folder, "--handler-name", "my_handlers:NoHandler") == 2
    assert "my_handlers:NoHandler is not a subclass of mindspeed_rl.data.handlers.base:Handler" in capsys.readouterr().err


def test_a_handler_is_one_line_in_the_registry(tmp_path, tokenizer_folder, read_columns, monkeypatch, capsys) -> None:
    (tmp_path / "my_handlers.py").write_text(HANDLER)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(HANDLERS, "BackwardsHandler", "my_handlers:Backwards")
    assert run(tmp_path, [{"word": "ab"}], tokenizer_folder, "--handler-name", "BackwardsHandler") == 0
    assert read_columns(str(tmp_path / "out"))["labels"] == [build_tokenizer()("ba", add_special_tokens=False)["input_ids"]]
    assert run(tmp_path, [{"word": "ab"}], tokenizer_folder, "--handler-name", "BackwardHandler") == 2
    assert "did you mean BackwardsHandler?" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "BackwardsHandler" in capsys.readouterr().out


def test_a_template_of_ones_own_is_one_entry_of_a_file(tmp_path, tokenizer_folder, read_columns) -> None:
    entry = {
        "name": "shout",
        "format_user": {"slots": ["Q! {{content}} A! "]},
        "format_assistant": {"slots": ["{{content}}", ["eos_token"]]},
    }
    path = tmp_path / "templates.json"
    path.write_text(json.dumps([entry]))
    words = ["--handler-name", "AlpacaStyleInstructionHandler", "--prompt-type", "shout", "--prompt-type-path", str(path)]
    assert run(tmp_path, [{"instruction": "1+1", "output": "2"}], tokenizer_folder, *words) == 0
    (row,) = read_columns(str(tmp_path / "out"))["input_ids"]
    assert build_tokenizer().decode(row) == "Q! 1+1 A! 2</s>"
    assert _list_template_names(path) == ["shout", "hf"]
    assert load_template("shout", path=path).name == "shout"
