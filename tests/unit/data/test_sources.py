"""Files in all forms: compressed, by pattern, in lists, in folders of a hub; their columns and numbers."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mindspeed_rl.data import strict_json
from mindspeed_rl.data.prompts import PromptDataset, open_prompts
from mindspeed_rl.data.sources import ChunkSize, Source, open_hub, open_source, read_rows
from mindspeed_rl.data.tokenizer import load_tokenizer

ROWS = [{"question": f"how much is {number} é?", "answer": str(number)} for number in range(50)]
SMALL = ChunkSize(num_bytes=200, num_rows=7)


def compress_zstd(data: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as file:
        file.write(data)
    return sink.getvalue().to_pybytes()


COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": compress_zstd,
}
CONTENT = {
    ".jsonl": "".join(json.dumps(row) + "\n" for row in ROWS),
    ".ndjson": "\n".join(json.dumps(row) for row in ROWS),
    ".json": json.dumps(ROWS, indent=1),
    ".csv": pd.DataFrame(ROWS).to_csv(index=False),
}


def list_rows(source: Source) -> list[Any]:
    return [dict(row) for _, _, row in read_rows(replace(source, chunk_size=SMALL))]


@pytest.mark.parametrize("compression", ["", *COMPRESS])
@pytest.mark.parametrize("suffix", CONTENT)
def test_a_compressed_file_is_read_as_its_content(suffix: str, compression: str, tmp_path: Path) -> None:
    path = tmp_path / f"rows{suffix}{compression}"
    compress = COMPRESS.get(compression, bytes)
    text = CONTENT[suffix].encode()
    # programs that append write one stream after the other
    half = len(text) // 2
    path.write_bytes(compress(text[:half]) + compress(text[half:]))
    source = open_source(str(path))
    assert list_rows(source) == ROWS == list_rows(open_source(str(tmp_path)))
    assert [number for _, number, _ in read_rows(replace(source, chunk_size=SMALL))] == list(range(1, 51))
    assert len(list_rows(replace(source, max_rows=13))) == 13
    chunks = list(replace(source, chunk_size=SMALL).chunks())
    assert len(chunks) > 5 and sum(chunk.weight for chunk in chunks) == source.total_weight()


@pytest.mark.parametrize("compression", COMPRESS)
@pytest.mark.parametrize("suffix", CONTENT)
@pytest.mark.parametrize("is_cut", [True, False])
def test_a_compressed_file_that_is_cut_or_damaged_is_an_error(
    suffix: str, compression: str, is_cut: bool, tmp_path: Path
) -> None:
    path = tmp_path / f"rows{suffix}{compression}"
    data = COMPRESS[compression](CONTENT[suffix].encode())
    path.write_bytes(data[:-20] if is_cut else data[: len(data) // 2] + bytes(9) + data[len(data) // 2 + 9 :])
    with pytest.raises(ValueError, match=f"rows{suffix}{compression}.* is (damaged|not valid JSON)"):
        list(read_rows(open_source(str(path))))


def test_text_files_and_unknown_suffixes(tmp_path: Path) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress("one\n\ntwö\n".encode()))
    assert list_rows(open_source(str(tmp_path / "a.txt.gz"))) == [{"text": "one"}, {"text": ""}, {"text": "twö"}]
    for name in ("a.gz", "a.tar.gz", "a.parquet.gz", "a.jsonl.zip"):
        (tmp_path / name).write_bytes(b"x")
        with pytest.raises(ValueError, match=r"unknown format .*; known: .jsonl, .*, and .jsonl, .* with .gz, .* after it"):
            open_source(str(tmp_path / name))


def write_parts(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for number in range(3):
        (folder / f"part-{number}.jsonl").write_text(json.dumps({"a": number}) + "\n")


def test_patterns_and_lists_are_read_in_order(tmp_path: Path) -> None:
    write_parts(tmp_path / "deep")
    one, two, three = (str(tmp_path / "deep" / f"part-{number}.jsonl") for number in range(3))
    write_parts(tmp_path / "other")
    other = str(tmp_path / "other")
    cases = {
        f"{tmp_path}/deep/part-*.jsonl": [0, 1, 2],
        f"{tmp_path}/deep/part-[02].jsonl": [0, 2],
        f"{tmp_path}/deep/part-?.jsonl": [0, 1, 2],
        f"{tmp_path}/**/part-1.jsonl": [1, 1],
        f"{three},{one}": [2, 0],
        f"{three}, {one}, {two},": [2, 0, 1],
        f"{one},{other}": [0, 0, 1, 2],
        f"{two},{other}/part-[12]*": [1, 1, 2],
    }
    for location, expected in cases.items():
        assert [row["a"] for row in list_rows(open_source(location))] == expected, location


@pytest.mark.parametrize(
    ("location", "problem"),
    [
        ("{0}/none-*.jsonl", "matches no file"),
        ("{0}/part-0.jsonl,{0}/part-9.jsonl", "part-9.jsonl' does not exist"),
        ("{0}/part-0.jsonl,{0}/part-*.jsonl", r"has the file .*part-0.jsonl twice"),
        ("{0}/part-0.jsonl,{0}/a.csv", "mixes the formats csv, jsonl"),
        ("{0}/*", "mixes the formats csv, jsonl"),
        ("{0}/part-0.jsonl,{0}/saved", "is a list with a saved dataset"),
    ],
)
def test_lists_and_patterns_that_are_none_are_errors(location: str, problem: str, tmp_path: Path) -> None:
    from datasets import Dataset

    write_parts(tmp_path)
    (tmp_path / "a.csv").write_text("a\n1\n")
    Dataset.from_dict({"a": [1]}).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(ValueError, match=problem):
        open_source(location.format(tmp_path))


# ---------------------------------------------------------------------- configurations

CARD = """---
license: mit
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: main/test-*
- config_name: socratic
{default}  data_files:
  - split: train
    path: [socratic/train-*]
---
# text
"""


def write_gsm8k(folder: Path, card: str | None) -> Path:
    for name in ("main", "socratic"):
        (folder / name).mkdir(parents=True)
        for split in ("train", "test"):
            table = pa.table({"text": [f"{name} {split}"]})
            pq.write_table(table, folder / name / f"{split}-00000-of-00001.parquet")
    if card is not None:
        (folder / "README.md").write_text(card)
    return folder


def read_texts(location: object) -> list[str]:
    return [row["text"] for row in list_rows(open_source(str(location)))]


def test_a_folder_with_several_configurations_needs_the_name_of_one(tmp_path: Path) -> None:
    folder = write_gsm8k(tmp_path / "gsm8k", CARD.format(default=""))
    with pytest.raises(ValueError, match=f"has the configurations main, socratic, .*; name one, such as {folder}/main"):
        open_source(str(folder))
    assert read_texts(folder / "main") == ["main train"]
    assert read_texts(folder / "socratic") == ["socratic train"]
    assert read_texts(f"{folder / 'main'},{folder / 'socratic'}") == ["main train", "socratic train"]


def test_the_default_configuration_is_taken_as_a_hub_takes_it(tmp_path: Path) -> None:
    folder = write_gsm8k(tmp_path / "gsm8k", CARD.format(default="  default: true\n"))
    assert read_texts(folder) == ["socratic train"]
    assert open_source(str(folder)).note == f"{folder}: the configuration socratic is taken"


def test_configurations_of_which_one_is_there_are_a_plain_folder(tmp_path: Path) -> None:
    folder = write_gsm8k(tmp_path / "gsm8k", CARD.format(default=""))
    for file in (folder / "socratic").iterdir():
        file.unlink()
    assert read_texts(folder) == ["main train"]


def test_a_dataset_of_a_hub_with_several_configurations_is_an_error_with_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gsm8k(tmp_path / "gsm8k", CARD.format(default=""))
    monkeypatch.chdir(tmp_path)  # datasets reads a folder of this name as it reads one of the hub
    with pytest.raises(ValueError, match=r"Config name is missing. Please pick one .*\['main', 'socratic'\]"):
        open_hub("gsm8k", cache_dir=str(tmp_path / "cache"))


@pytest.mark.parametrize("card", [None, "# text", "---\nconfigs: [\n---\n"])
def test_one_shard_in_two_folders_is_an_error_without_a_card(card: str | None, tmp_path: Path) -> None:
    folder = write_gsm8k(tmp_path / "gsm8k", card)
    with pytest.raises(ValueError, match=r"these are data sets of their own; give one of the folders, or both as"):
        open_source(str(folder))
    (folder / "dataset_infos.json").write_text(json.dumps({"main": {}, "socratic": {}}))
    with pytest.raises(ValueError, match="has the configurations main, socratic"):
        open_source(str(folder))


def test_configurations_in_one_folder_are_named_after_it(tmp_path: Path) -> None:
    card = "---\nconfigs:\n- config_name: en\n  data_files: data/en*.jsonl\n- config_name: fr\n  data_dir: data\n"
    card += "  data_files: {train: fr.jsonl, test: fr_test.jsonl}\n---\n"
    (tmp_path / "set" / "data").mkdir(parents=True)
    for name in ("en_1", "en_2", "fr", "fr_test"):
        (tmp_path / "set" / "data" / f"{name}.jsonl").write_text(json.dumps({"text": name}))
    (tmp_path / "set" / "README.md").write_text(card)
    assert read_texts(tmp_path / "set" / "en") == ["en_1", "en_2"]
    assert read_texts(tmp_path / "set" / "fr") == ["fr"]
    assert open_source(f"{tmp_path}/set/fr").note == f"{tmp_path}/set: the configuration fr is taken, of it the split train"
    with pytest.raises(ValueError, match="has the configurations en, fr"):
        open_source(str(tmp_path / "set"))
    with pytest.raises(ValueError, match="does not exist"):
        open_source(str(tmp_path / "set" / "de.jsonl"))


# ---------------------------------------------------------------------- columns


def write_arrow(path: Path, table: pa.Table) -> None:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)


WRITERS: dict[str, Callable[[Path, pa.Table], None]] = {
    ".parquet": lambda path, table: pq.write_table(table, path),
    ".arrow": write_arrow,
}


@pytest.mark.parametrize("suffix", WRITERS)
def test_a_column_or_a_nested_key_twice_is_an_error(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"a{suffix}"
    columns = [pa.array([[1]]), pa.array(["first"]), pa.array(["second"])]
    WRITERS[suffix](path, pa.Table.from_arrays(columns, names=["q", "a", "a"]))
    with pytest.raises(ValueError, match=f"a{suffix}' has the column 'a' twice, so one value would be lost"):
        list_rows(open_source(str(path)))
    if suffix == ".arrow":  # pyarrow's parquet refuses to write it
        twice = pa.StructArray.from_arrays([pa.array([1]), pa.array([2])], names=["k", "k"])
        WRITERS[suffix](path, pa.table({"x": pa.ListArray.from_arrays([0, 1], twice)}))
        with pytest.raises(ValueError, match="has the key 'k' of the column 'x' twice"):
            list_rows(open_source(str(path)))


@pytest.mark.parametrize("suffix", [".csv", ".csv.gz"])
def test_a_csv_column_twice_is_an_error(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"a{suffix}"
    path.write_bytes(COMPRESS.get(suffix[4:], bytes)(b"\xef\xbb\xbfq,a,a\n1,first,second\n"))
    with pytest.raises(ValueError, match="has the column 'a' twice"):
        list_rows(open_source(str(path)))


NUMBERS = [0.1, 1 / 3, 1e-10, 3.4e38, -2.5, 16777216.0]


@pytest.mark.parametrize("width", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("source", ["pandas", "nested", "dictionary", "saved", "stream"])
def test_a_number_is_the_shortest_decimal_of_its_width(source: str, width: type, tmp_path: Path) -> None:
    numbers = np.array([number if width != np.float16 else np.clip(number, -9, 9) for number in NUMBERS], width)
    # numpy writes the shortest decimal that is the same number of this width
    expected = [float(np.format_float_scientific(number, unique=True)) for number in numbers]
    flat = pa.array(numbers)
    nested = pa.array([{"deep": [{"x": number}, None], "none": None, "text": "t"} for number in numbers.tolist()])
    kind = pa.struct([("deep", pa.list_(pa.struct([("x", flat.type)]))), ("none", flat.type), ("text", pa.string())])
    if source == "pandas":
        pd.DataFrame({"x": numbers}).to_parquet(tmp_path / "a.parquet")
        found = [row["x"] for row in list_rows(open_source(str(tmp_path / "a.parquet")))]
    elif source == "nested":
        if width == np.float16:
            pytest.skip("Arrow casts no nested float16")
        write_arrow(tmp_path / "a.arrow", pa.table({"x": nested.cast(kind)}))
        rows = list_rows(open_source(str(tmp_path / "a.arrow")))
        assert all(row["x"]["deep"][1] is None and row["x"]["text"] == "t" for row in rows)
        found = [row["x"]["deep"][0]["x"] for row in rows]
    elif source == "dictionary":
        values = pa.DictionaryArray.from_arrays(pa.array(range(len(flat))), flat)
        pairs = pa.array([[("k", 1)]] * len(flat), pa.map_("string", "int8"))
        write_arrow(tmp_path / "a.arrow", pa.table({"x": values, "m": pairs}))
        found = [row["x"] for row in list_rows(open_source(str(tmp_path / "a.arrow")))]
    else:
        from datasets import Dataset

        dataset = Dataset(pa.table({"x": flat}))
        dataset.save_to_disk(str(tmp_path / "saved"))
        opened = open_source(str(tmp_path / "saved"))
        if source == "stream":
            opened = Source("stream", ("name",), dataset=dataset.to_iterable_dataset())
        found = [row["x"] for row in list_rows(opened)]
    assert found == expected


# ---------------------------------------------------------------------- JSON text in columns of verl

CHAT = [{"role": "system", "content": "S"}, {"role": "user", "content": "what is it?"}]
VERL = {"prompt": CHAT, "reward_model": {"ground_truth": "7", "style": "rule"}, "extra_info": {"index": 3}, "data_source": "d"}
KEYS = ("labels", "extra_info", "data_source")


def open_rows(path: Path | str, tokenizer_folder: str, **options: Any) -> PromptDataset:
    return open_prompts(path, load_tokenizer(tokenizer_folder), max_prompt_length=200, **options)


@pytest.mark.parametrize("texts", [("prompt",), ("reward_model",), ("extra_info",), ("prompt", "reward_model", "extra_info")])
@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_json_text_in_columns_of_verl_is_what_it_says(
    kind: str, texts: tuple[str, ...], tmp_path: Path, tokenizer_folder: str
) -> None:
    if kind == "csv" and len(texts) == 1:
        pytest.skip("CSV has all columns as text")
    plain, path = tmp_path / "plain.jsonl", tmp_path / f"rows.{kind}"
    plain.write_text(json.dumps(VERL))
    row = {name: json.dumps(value, indent=1) if name in texts else value for name, value in VERL.items()}
    if kind == "jsonl":
        path.write_text(json.dumps(row))
    else:
        frame = pd.DataFrame([row])
        frame.to_csv(path, index=False) if kind == "csv" else frame.to_parquet(path)
    expected = open_rows(plain, tokenizer_folder, dataset_additional_keys=KEYS)[0]
    found = open_rows(path, tokenizer_folder, dataset_additional_keys=KEYS)[0]
    assert expected["label"] == "7" and expected["columns"] == {"extra_info": {"index": 3}, "data_source": "d"}
    assert found == expected


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"prompt": str(CHAT)}, "row 1: column 'prompt' is the text of a list of messages, but not JSON"),
        ({"prompt": f"array({CHAT}, dtype=object)"}, "column 'prompt' is the text of a list of messages, but not JSON"),
        ({"reward_model": str(VERL["reward_model"])}, "column 'reward_model' is the text of an object, but not JSON"),
        ({"reward_model": '{"style": "rule"}'}, "column 'reward_model' has no ground_truth"),
        ({"reward_model": '{"ground_truth": "1", "ground_truth": "2"}'}, "the key 'ground_truth' stands twice"),
        ({"extra_info": "{'index': 3}"}, "column 'extra_info' is the text of an object, but not JSON"),
    ],
)
def test_a_text_of_verl_that_is_no_json_is_refused(
    change: dict[str, str], problem: str, tmp_path: Path, tokenizer_folder: str
) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(VERL | change))
    with pytest.raises(ValueError, match=problem):
        open_rows(tmp_path / "rows.jsonl", tokenizer_folder, dataset_additional_keys=KEYS)


def test_other_json_texts_are_questions_and_answers(tmp_path: Path, tokenizer_folder: str) -> None:
    path = tmp_path / "rows.jsonl"
    for question, label in (('[1, 2]: what is the sum? {"role": 1}', '{"sum": 3}'), ('{"a": [{"role": "x"}]}', "[{1}]")):
        path.write_text(json.dumps({"prompt": question, "labels": label}))
        prompts = open_rows(path, tokenizer_folder)
        assert load_tokenizer(tokenizer_folder).decode(prompts[0]["prompt_ids"]).strip() == question
        assert prompts[0]["label"] == label
    # a column of another name is an object where it has a ground_truth
    path.write_text(json.dumps({"prompt": "q", "labels": '{"ground_truth": {"target": ["a"]}}'}))
    assert strict_json.loads(str(open_rows(path, tokenizer_folder)[0]["label"])) == {"target": ["a"]}
    path.write_text(json.dumps({"instruction": json.dumps(CHAT), "output": "7"}))
    with pytest.raises(ValueError, match="is the text of chat messages, .* use Math17kAlpacaStyleInstructionHandler"):
        open_rows(path, tokenizer_folder)


def test_prompts_are_read_from_patterns_and_lists_with_slices(tmp_path: Path, tokenizer_folder: str) -> None:
    for number in range(3):
        (tmp_path / f"p{number}.jsonl").write_text(json.dumps({"prompt": f"q{number}", "labels": str(number)}) + "\n")
    for location, expected in (
        (f"{tmp_path}/p*.jsonl", ["0", "1", "2"]),
        (f"{tmp_path}/p*.jsonl[1:3]", ["1", "2"]),
        (f"{tmp_path}/p2.jsonl,{tmp_path}/p0.jsonl#1", ["2"]),
    ):
        prompts = open_rows(location, tokenizer_folder)
        assert [prompts[index]["label"] for index in range(len(prompts))] == expected
    many = [tmp_path / f"many_{number:0100}.jsonl" for number in range(60)]  # longer than a path may be
    for path in many:
        path.write_text(json.dumps({"prompt": "q", "labels": "1"}))
    assert len(open_rows(",".join(map(str, many)), tokenizer_folder)) == 60
    assert len(open_rows(",".join(map(str, many)) + "[:59]", tokenizer_folder)) == 59
    with pytest.raises(ValueError, match=r"is neither a raw file or folder, .* \(also data/\*.jsonl, or a.jsonl,b.jsonl\)"):
        open_rows(f"{tmp_path}/p8.jsonl,{tmp_path}/p9.jsonl", tokenizer_folder)
    with pytest.raises(ValueError, match=r"of the files with commas between them '.*p9.jsonl' does not exist"):
        open_rows(f"{tmp_path}/p0.jsonl,{tmp_path}/p9.jsonl", tokenizer_folder)
