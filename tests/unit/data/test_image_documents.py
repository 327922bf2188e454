"""Documents of pretraining with images: their tokens, what trains of them, and what is left out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from vision_folder import encode, make_folder

from mindspeed_rl.data.datasets import IndexedColumns
from mindspeed_rl.data.indexed import IGNORE_INDEX
from mindspeed_rl.data.preprocess import run
from mindspeed_rl.data.preprocess_config import PreprocessConfig
from mindspeed_rl.data.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    (folder / "image.png").write_bytes(encode(56, 84))  # 2 x 3 tokens of 28 pixels
    return make_folder(folder)


def prepare(folder: Path, tmp_path: Path, rows: list[dict], **keys: object) -> IndexedColumns:
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = {
        "handler_name": "ImageTextPretrainHandler",
        "tokenizer_name_or_path": str(folder),
        "image_folder": str(folder),
    } | keys
    run(PreprocessConfig(input=str(data), output_prefix=str(tmp_path / "set"), **keys))
    return IndexedColumns(tmp_path / "set", ["input_ids", "labels"])


def test_every_token_of_text_trains_and_none_of_an_image(folder: Path, tmp_path: Path) -> None:
    rows = [{"text": "ab<image>c<image>", "images": ["image.png", "image.png"]}, {"text": "de"}]
    columns = prepare(folder, tmp_path, rows, append_eod=True)
    tokenizer = load_tokenizer(str(folder))
    image = tokenizer.encode("<|vision_start|>" + "<|image_pad|>" * 6 + "<|vision_end|>", add_special_tokens=False)
    a, b, c, d, e = (tokenizer.convert_tokens_to_ids(letter) for letter in "abcde")
    end, left_out = tokenizer.eos_token_id, [IGNORE_INDEX] * len(image)
    assert columns.row(0, "input_ids").tolist() == [a, b, *image, c, *image, end]
    assert columns.row(0, "labels").tolist() == [a, b, *left_out, c, *left_out, end]
    assert columns.row(1, "input_ids").tolist() == columns.row(1, "labels").tolist() == [d, e, end]


def test_a_long_document_of_text_is_cut_and_one_with_an_image_is_left_out(folder: Path, tmp_path: Path) -> None:
    rows = [{"text": "abcdefghijkl"}, {"text": "ab<image>cde", "images": ["image.png"]}, {"text": "ab", "images": []}]
    columns = prepare(folder, tmp_path, rows, seq_length=9)
    assert [len(columns.row(index, "input_ids")) for index in range(len(columns))] == [9, 2]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "a", "images": ["image.png", "missing.png"]}, "missing.png"),
        ({"text": "a <image>", "images": []}, "1 times <image> in its text"),
        ({"words": "a"}, "has no column 'text'"),
        ({"text": 1.5, "images": ["image.png"]}, None),
    ],
)
def test_a_row_that_is_no_document_is_named(folder: Path, tmp_path: Path, row: dict, message: str | None) -> None:
    if message is None:  # numbers are text, as in other handlers
        assert len(prepare(folder, tmp_path, [row])) == 1
        return
    with pytest.raises(ValueError, match=message):
        prepare(folder, tmp_path, [row])
