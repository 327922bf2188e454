"""Documents of pretraining with images: their tokens, what trains of them, and what is left out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from vision_folder import encode, make_folder

from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.data.card import describe_columns
from mindspeed_rl.data.datasets import IndexedColumns
from mindspeed_rl.data.forms import find_form
from mindspeed_rl.data.indexed import IGNORE_INDEX
from mindspeed_rl.data.preprocess import run
from mindspeed_rl.data.preprocess_config import PreprocessConfig
from mindspeed_rl.data.tokenizer import load_tokenizer
from mindspeed_rl.trainers.supervised_data import list_data_checks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    (folder / "image.png").write_bytes(encode(56, 84))  # 2 x 3 tokens of 28 pixels
    return make_folder(folder)


def write(path: Path, *rows: dict) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def prepare(folder: Path, tmp_path: Path, rows: list[dict], **keys: object) -> IndexedColumns:
    tmp_path.mkdir(exist_ok=True)
    data = write(tmp_path / "rows.jsonl", *rows)
    keys = {
        "handler_name": "ImageTextPretrainHandler",
        "tokenizer_name_or_path": str(folder),
        "image_folder": str(folder),
    } | keys
    run(PreprocessConfig(input=data, output_prefix=str(tmp_path / "set"), **keys))
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


def test_a_document_in_which_nothing_trains_is_counted_as_left_out(folder: Path, tmp_path: Path) -> None:
    picture = {"text": "<image>", "images": ["image.png"]}
    assert len(prepare(folder, tmp_path, [picture, {"text": "ab"}])) == 1
    with pytest.raises(ValueError, match="no row of .* was kept .*empty text: 1"):
        prepare(folder, tmp_path, [picture])
    assert len(prepare(folder, tmp_path, [picture], append_eod=True)) == 1  # the end token trains


def check(folder: Path, **keys: object) -> None:
    config = MegatronConfig(stage="pretrain", tokenizer_name_or_path=str(folder), **keys)
    for one in list_data_checks(config):
        one()


def test_stage_pretrain_takes_documents_and_no_samples(folder: Path, tmp_path: Path) -> None:
    prepare(folder, tmp_path, [{"text": "ab<image>", "images": ["image.png"]}])
    check(folder, data_path=str(tmp_path / "set"))
    row = {"instruction": "a <image>", "output": "b", "images": ["image.png"]}
    prepare(folder, tmp_path / "set", [row], handler_name="AlpacaStyleInstructionHandler")
    with pytest.raises(ValueError, match=r"data_path: .*set\.idx does not exist .*with _text_document"):
        check(folder, data_path=str(tmp_path / "set" / "set"))


def test_documents_with_images_are_neither_blended_nor_held_out_from_text(folder: Path, tmp_path: Path) -> None:
    prepare(folder, tmp_path, [{"text": "ab<image>", "images": ["image.png"]}])
    run(
        PreprocessConfig(
            input=write(tmp_path / "text.jsonl", {"text": "ab"}),
            output_prefix=str(tmp_path / "flat"),
            handler_name="GeneralPretrainHandler",
            tokenizer_name_or_path=str(folder),
        )
    )
    raw = {
        "images": write(tmp_path / "images.jsonl", {"text": "ab<image>", "images": ["image.png"]}),
        "text": str(tmp_path / "text.jsonl"),
    }
    prefix = {"images": str(tmp_path / "set"), "text": str(tmp_path / "flat_text_document")}
    for images in (raw["images"], prefix["images"]):
        check(folder, data_path=images, eval_data_path=images)
        for blend in ([images], [0.5, images, 0.5, images], [0.5, images, 0.5, raw["text"]]):
            with pytest.raises(ValueError, match="documents with images, which are not blended"):
                check(folder, data_path=blend)
        for text in (raw["text"], prefix["text"]):
            check(folder, data_path=[0.5, text, 0.5, text], eval_data_path=text)
            for data, held_out in ((images, text), (text, images)):
                with pytest.raises(ValueError, match="documents with images, and megatron_training.* documents of text only"):
                    check(folder, data_path=data, eval_data_path=held_out)


def test_the_form_of_a_corpus_of_text_is_not_that_of_a_count(folder: Path, tmp_path: Path) -> None:
    reading = find_form({"text": "ab", "images": 3}, "documents")
    assert reading is not None and reading.handler == "GeneralPretrainHandler"
    reading = find_form({"text": "ab", "images": ["image.png"]}, "documents")
    assert reading is not None and reading.handler == "ImageTextPretrainHandler"


def test_the_card_is_one_of_documents(folder: Path, tmp_path: Path) -> None:
    prepare(folder, tmp_path, [{"text": "ab<image>", "images": ["image.png"]}])
    card = describe_columns(tmp_path / "set", "sft", load_tokenizer(str(folder)))
    assert card["documents"] == "1" and "rows" not in card and "ends" not in card


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
