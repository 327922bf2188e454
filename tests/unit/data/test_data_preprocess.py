"""The run as a whole: independence of workers and parts, every input format, bad rows, interruptions, reports."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import yaml
from byte_tokenizer import TEST_DATA

from mindspeed_rl.cli.preprocess import _build_config, _load_dataset_config, main
from mindspeed_rl.data import HANDLERS
from mindspeed_rl.data.parts import _numbered_parts
from mindspeed_rl.data.sources import ChunkSize, open_source, read_rows
from mindspeed_rl.data.summary import _histogram

ROOT = Path(__file__).parents[3]
GSM8K = str(TEST_DATA / "gsm8k" / "sample.jsonl")
GSM8K_KEYS = '{"prompt":"question","query":"","response":"answer"}'


#: cuts the input finely, so that a small file makes many chunks
SMALL = ChunkSize(num_bytes=700, num_rows=3)


@pytest.fixture
def gsm8k(tmp_path, tokenizer_folder):
    """Preprocess the GSM8K sample with flags; return name -> bytes of the files written."""

    def run(*flags, name="out", source=GSM8K, chunk_size=SMALL):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        command = ["--input", source, "--tokenizer-name-or-path", tokenizer_folder, "--output-prefix", str(folder / "g")]
        command += ["--handler-name", "AlpacaStyleInstructionHandler", "--prompt-type", "qwen", "--map-keys", GSM8K_KEYS]
        assert main([*command, *flags], chunk_size=chunk_size) == 0
        return {file: (folder / file).read_bytes() for file in sorted(os.listdir(folder))}

    return run


PACK = ["--pack", "--seq-length", "1500"]


@pytest.mark.parametrize("mode", [[], PACK, [*PACK, "--neat-pack"]], ids=["plain", "pack", "neat"])
def test_files_do_not_depend_on_workers_and_parts(mode, gsm8k):
    one = gsm8k(*mode, name="one")
    assert sorted(one) == [
        f"g_packed_{column}_document.{suffix}"
        for column in ("attention_mask", "input_ids", "labels", *(["sample_lengths"] if mode else []))
        for suffix in ("bin", "idx")
    ]
    for flags in (["--workers", "3"], ["--n-subs", "4"], ["--workers", "2", "--n-subs", "7"], ["--n-subs", "100"]):
        assert gsm8k(*mode, *flags, name="-".join(flags)) == one
    assert gsm8k(*mode, name="usual", chunk_size=ChunkSize()) == one


def test_merging_parts_gives_the_file_of_the_whole(gsm8k, tmp_path, capsys):
    lines = Path(GSM8K).read_text(encoding="utf-8").splitlines(keepends=True)
    whole = gsm8k(name="whole")
    parts = tmp_path / "parts"
    parts.mkdir()
    for number, part in enumerate((lines[:11], lines[11:12], lines[12:])):
        source = tmp_path / f"part{number}.jsonl"
        source.write_text("".join(part), encoding="utf-8")
        for name, content in gsm8k(name=f"part{number}", source=str(source)).items():
            (parts / f"00{number}_{name}").write_bytes(content)
    (tmp_path / "merged").mkdir()
    keys = ["input_ids", "attention_mask", "labels"]
    assert main(["--input", str(parts), "--output-prefix", str(tmp_path / "merged" / "m"), "--merge-group-keys", *keys]) == 0
    for key in keys:
        for suffix in ("bin", "idx"):
            assert (tmp_path / "merged" / f"m_{key}.{suffix}").read_bytes() == whole[f"g_packed_{key}_document.{suffix}"]


def test_merging_with_a_missing_twin_or_key_is_an_error(gsm8k, tmp_path, capsys):
    gsm8k(name="out")
    (tmp_path / "out" / "g_packed_labels_document.idx").unlink()
    merge = ["--input", str(tmp_path / "out"), "--output-prefix", str(tmp_path / "m"), "--merge-group-keys"]
    assert main([*merge, "labels"]) == 2
    assert "g_packed_labels_document.idx does not exist" in capsys.readouterr().err
    assert main([*merge, "nothing"]) == 2
    assert "has 'nothing' in its name" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def rows_of(path):
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def in_every_format(tmp_path):
    """The GSM8K sample as each format, by name."""
    rows = rows_of(GSM8K)
    table = pa.Table.from_pylist(rows)
    (tmp_path / "array.json").write_text(json.dumps(rows, indent=2), encoding="utf-8")
    (tmp_path / "lines.json").write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    pyarrow.parquet.write_table(table, tmp_path / "table.parquet", row_group_size=7)
    table.to_pandas().to_csv(tmp_path / "table.csv", index=False)
    with pa.OSFile(str(tmp_path / "stream.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)
    with pa.OSFile(str(tmp_path / "file.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "README.md").write_text("not data")
    for number, part in enumerate((table.slice(0, 9), table.slice(9))):
        pyarrow.parquet.write_table(part, tmp_path / "folder" / f"part-{number}.parquet")
    from datasets import Dataset, DatasetDict

    dataset = Dataset(table)
    dataset.save_to_disk(str(tmp_path / "saved"))
    DatasetDict({"train": dataset, "test": dataset.select(range(2))}).save_to_disk(str(tmp_path / "saved_splits"))
    return tmp_path


FORMATS = [
    "array.json", "lines.json", "table.parquet", "table.csv", "stream.arrow", "file.arrow", "folder", "saved", "saved_splits",
]  # fmt: skip


def test_every_format_gives_the_same_files(in_every_format, gsm8k):
    wanted = gsm8k(name="jsonl")
    for number, name in enumerate(FORMATS):
        workers = "1" if number % 2 else "2"
        assert gsm8k("--workers", workers, name=f"from-{name}", source=str(in_every_format / name)) == wanted, name


def finely(path):
    return replace(open_source(str(path)), chunk_size=SMALL)


def test_rows_are_numbered_within_their_file(in_every_format):
    for name in ("array.json", "lines.json", "table.csv", "stream.arrow"):
        rows = list(read_rows(finely(in_every_format / name)))
        assert [number for _, number, _ in rows] == list(range(1, 41))
    numbers = [number for _, number, _ in read_rows(finely(in_every_format / "folder"))]
    assert numbers == [*range(1, 10), *range(1, 32)]


def test_weights_add_up_to_the_total(in_every_format):
    for name in FORMATS:
        source = finely(in_every_format / name)
        assert sum(chunk.weight for chunk in source.chunks()) == source.total_weight(), name


def test_a_text_file_has_one_document_a_line(tmp_path, tokenizer_folder):
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    (tmp_path / "a.txt").write_text("one\n\ntwo\n", encoding="utf-8")
    command = ["--input", str(tmp_path / "a.txt"), "--tokenizer-name-or-path", tokenizer_folder]
    assert main([*command, "--output-prefix", str(tmp_path / "t")]) == 0
    assert IndexedDataset(str(tmp_path / "t_text_document")).sequence_lengths.tolist() == [3, 3]


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.jsonl", '{"question": "Q", "answer": "A"}\n{"question": \n', "a.jsonl, row 2: is not valid JSON"),
        ("a.jsonl", '{"question": "Q", "answer": "A"}\n\n[1]\n', "a.jsonl, row 3: must be an object"),
        ("a.json", '[{"question": "Q", "answer": "A"}, {"question": ]', "a.json, row 2: is not valid JSON"),
        ("a.json", '[{"question": "Q", "answer": "A"}', "a.json, row 2: is not valid JSON (the array is not closed)"),
        ("a.json", '[{"question": "Q", "answer": "A"},, {"question": "Q"}]', "a.json, row 2: is not valid JSON"),
        ("a.json", '[{"question": "Q", "answer": "A"} {"question": "Q"}]', "row 2: is not valid JSON (expected a comma"),
        ("a.json", '[{"question": "Q", "answer": "A"},]', "a.json, row 2: is not valid JSON"),
        ("a.csv", "question,answer\nQ,A\nQ\n", "a.csv, row 2: has more or fewer fields than the header"),
        ("a.csv", "question,answer\nQ,A,B\n", "a.csv, row 1: has more or fewer fields than the header"),
        ("a.csv", "question,answer\nQ,A\nQ,caf\xe9\n", "a.csv, row 2: is not UTF-8 (byte 0xe9)"),
        (
            "a.json",
            '[{"question": "Q", "answer": "A"}, {"question": "Q", "answer": "caf\xe9"}]',
            "row 2: is not UTF-8 (byte 0xe9)",
        ),
        ("a.json", '[{"question": "Q", "answer": "A"}, \xff]', "a.json, row 2: is not valid JSON"),
        (
            "a.jsonl",
            '{"question": "Q", "answer": "A"}\n{"question": "caf\xe9"}\n',
            "a.jsonl, row 2: is not UTF-8 (byte",
        ),
    ],
)
def test_broken_files_name_the_row(name, content, problem, tmp_path, tokenizer_folder, capsys):
    (tmp_path / name).write_text(content, encoding="latin-1")
    command = ["--input", str(tmp_path / name), "--tokenizer-name-or-path", tokenizer_folder, "--prompt-type", "default"]
    command += ["--output-prefix", str(tmp_path / "o"), "--handler-name", "AlpacaStyleInstructionHandler"]
    assert main([*command, "--map-keys", GSM8K_KEYS]) == 2
    assert problem in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_sources_that_cannot_be_read_are_errors(tmp_path):
    (tmp_path / "a.xml").write_text("x")
    with pytest.raises(ValueError, match="unknown format '.xml'"):
        open_source(str(tmp_path / "a.xml"))
    with pytest.raises(ValueError, match="holds no .jsonl"):
        open_source(str(tmp_path))
    (tmp_path / "a.jsonl").write_text("{}")
    (tmp_path / "a.csv").write_text("a\n1")
    with pytest.raises(ValueError, match="holds as many .* files"):
        open_source(str(tmp_path))
    with pytest.raises(ValueError, match="does not exist"):
        open_source(str(tmp_path / "nothing.jsonl"))


def test_packs_hold_every_sample_once_and_neat_masks_count_them(gsm8k, tmp_path, read_columns):
    gsm8k(name="plain")
    plain = read_columns(str(tmp_path / "plain" / "g"))
    gsm8k(*PACK, "--neat-pack", name="neat")
    packed = read_columns(str(tmp_path / "neat" / "g"))
    found = []
    for input_ids, mask, labels in zip(packed["input_ids"], packed["attention_mask"], packed["labels"], strict=True):
        assert len(input_ids) == len(mask) == len(labels) == 1500
        for number in range(1, max(mask) + 1):
            places = [place for place, value in enumerate(mask) if value == number]
            assert places == list(range(places[0], places[-1] + 1))
            found.append(([input_ids[place] for place in places], [labels[place] for place in places]))
        assert all(labels[place] == -100 and input_ids[place] == 0 for place, value in enumerate(mask) if value == 0)
    assert sorted(found) == sorted(zip(plain["input_ids"], plain["labels"], strict=True))


def test_over_long_samples_are_dropped_or_cut_and_always_counted(gsm8k, tmp_path, read_columns, capsys):
    gsm8k(name="all")
    lengths = [len(row) for row in read_columns(str(tmp_path / "all" / "g"))["input_ids"]]
    limit = sorted(lengths)[20]
    capsys.readouterr()
    gsm8k("--seq-length", str(limit), name="short")
    assert f"dropped, too long: {sum(length >= limit for length in lengths)}" in capsys.readouterr().out
    kept = [len(row) for row in read_columns(str(tmp_path / "short" / "g"))["input_ids"]]
    assert kept == [length for length in lengths if length < limit]
    gsm8k("--seq-length", str(limit), "--pack", "--neat-pack", name="neat")
    summary = capsys.readouterr().out
    assert "dropped 0" in summary and f"truncated {sum(length >= limit for length in lengths)}" in summary


def test_the_summary_counts_and_shows_the_first_sample(gsm8k, tmp_path, read_columns, capsys):
    gsm8k()
    summary = capsys.readouterr().out
    columns = read_columns(str(tmp_path / "out" / "g"))
    tokens = sum(len(row) for row in columns["input_ids"])
    trained = sum(label != -100 for row in columns["labels"] for label in row)
    assert "rows read 40, kept 40, dropped 0, truncated 0" in summary
    assert f"tokens {tokens}, of them trained {trained}" in summary
    assert "<|im_start|>assistant\n⟦Janet sells 16 - 3 - 4 = <<16-3-4=9>>9 duck eggs" in summary
    assert "#### 18<|im_end|>⟧" in summary


UNSOUND = {
    "half of a surrogate pair": '{"instruction": "Q", "output": "a\\ud800b"}',
    "half of a surrogate pair, as bytes": b'{"instruction": "Q", "output": "a\xed\xa0\x80b"}',
    "half of a surrogate pair as a column's name": '{"instruction": "Q", "output": "A", "x\\uDFFF": 1}',
    "NaN": '{"instruction": "Q", "output": NaN}',
    "Infinity": '{"instruction": "Q", "output": -Infinity}',
    "more than a double": '{"instruction": "Q", "output": 1e999}',
    "a key twice": '{"instruction": "Q", "output": "A", "output": "B"}',
    "a key twice within": '{"instruction": "Q", "output": "A", "meta": [{"a": 1, "a": 1}]}',
    "more digits than Python reads": '{"instruction": "Q", "output": ' + "1" * 5000 + "}",
    "deeply nested": '{"instruction": "Q", "output": ' + "[" * 100_000 + "]" * 100_000 + "}",
}


@pytest.mark.parametrize("layout", ["lines", "array"])
@pytest.mark.parametrize("case", UNSOUND)
def test_an_unsound_json_row_is_named_and_can_be_skipped(case, layout, tmp_path, tokenizer_folder, capsys):
    if (case, layout) in (("half of a surrogate pair, as bytes", "array"), ("deeply nested", "array")):
        pytest.skip("an array that cannot be decoded has no further rows")
    sound = '{"instruction": "Q \\ud83d\\ude00", "output": "A"}'
    rows = [row.encode() if isinstance(row, str) else row for row in (sound, UNSOUND[case], sound)]
    source = tmp_path / "rows.json"
    source.write_bytes(b"\n".join(rows) if layout == "lines" else b"[" + b",\n".join(rows) + b"]")
    command = ["--input", str(source), "--tokenizer-name-or-path", tokenizer_folder, "--output-prefix", str(tmp_path / "out")]
    command += ["--handler-name", "AlpacaStyleInstructionHandler", "--prompt-type", "default"]
    assert main(command) == 2
    assert "rows.json, row 2: " in capsys.readouterr().err
    assert main([*command, "--on-bad-row", "skip"]) == 0
    printed = capsys.readouterr().out
    assert "rows read 3, kept 2" in printed and "rows.json, row 2: " in printed


@pytest.mark.parametrize(
    "column",
    [
        {"tools": '[{"name": "f", "name": "g"}]'},
        {"tools": ['{"name": ']},
        {"messages": '[{"role": "user", "content": "\\ud800"}, {"role": "assistant", "content": "A"}]'},
        {
            "messages": [
                {"role": "user", "content": "Q"},
                {"role": "assistant", "tool_calls": [{"name": "f", "arguments": '{"a": NaN}'}]},
            ]
        },
    ],
    ids=["a key twice", "broken", "half of a surrogate pair", "NaN"],
)
def test_json_within_a_row_is_read_as_strictly(column, tmp_path, tokenizer_folder, write_jsonl, capsys):
    row = {"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]}
    command = ["--input", write_jsonl([row, row | column]), "--tokenizer-name-or-path", tokenizer_folder]
    command += [
        "--output-prefix",
        str(tmp_path / "out"),
        "--handler-name",
        "OpenAIInstructionHandler",
        "--prompt-type",
        "qwen_lf",
    ]
    assert main(command) == 2
    assert "rows.jsonl, row 2: the " in capsys.readouterr().err
    assert main([*command, "--on-bad-row", "skip"]) == 0
    assert "kept 1" in capsys.readouterr().out


def test_a_row_that_the_tokenizers_template_cannot_write_is_named_and_can_be_skipped(
    tmp_path, chat_tokenizer_folder, write_jsonl, capsys
):
    rows = [{"instruction": "Q", "output": "A"}, {"instruction": "Q", "output": "A", "system": "S"}]
    command = ["--input", write_jsonl(rows), "--tokenizer-name-or-path", chat_tokenizer_folder("gemma2")]
    command += ["--output-prefix", str(tmp_path / "out"), "--handler-name", "AlpacaStyleInstructionHandler"]
    assert main([*command, "--prompt-type", "hf"]) == 2
    assert "rows.jsonl, row 2: the tokenizer's chat template refuses the conversation" in capsys.readouterr().err
    assert main([*command, "--prompt-type", "hf", "--on-bad-row", "skip"]) == 0
    assert "rows read 2, kept 1" in capsys.readouterr().out


def test_the_histogram_counts_every_row():
    text = _histogram(np.array([1, 2, 3, 100]))
    rows = [line.split() for line in text.splitlines()]
    assert sum(int(row[3]) for row in rows) == 4
    assert int(rows[0][0]) == 0 and int(rows[-1][2]) >= 100


def test_show_prints_samples_and_writes_nothing(tmp_path, tokenizer_folder, capsys):
    command = [
        "--input",
        GSM8K,
        "--tokenizer-name-or-path",
        tokenizer_folder,
        "--handler-name",
        "AlpacaStyleInstructionHandler",
    ]
    assert main([*command, "--prompt-type", "qwen", "--map-keys", GSM8K_KEYS, "--show", "2"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("--- ") == 2 and "row 2" in printed and "⟦It takes 2/2" in printed
    assert list(tmp_path.iterdir()) == []


def test_an_error_leaves_older_output_alone_and_nothing_else(gsm8k, tmp_path, tokenizer_folder, write_jsonl):
    before = gsm8k()
    broken = write_jsonl([{"question": "Q", "answer": "A"}, {"question": "Q"}])
    command = ["--input", broken, "--tokenizer-name-or-path", tokenizer_folder, "--output-prefix", str(tmp_path / "out" / "g")]
    command += ["--handler-name", "AlpacaStyleInstructionHandler", "--prompt-type", "qwen", "--map-keys", GSM8K_KEYS]
    assert main(command) == 2
    assert {file: (tmp_path / "out" / file).read_bytes() for file in sorted(os.listdir(tmp_path / "out"))} == before


#: a handler of the user's own that notes the rows it encodes and dies in the middle of the fourth part, once
MORTAL = """
import os, signal
from pathlib import Path
from mindspeed_rl.data.handlers.instruction import AlpacaStyleInstructionHandler

HERE = Path(__file__).parent

class Mortal(AlpacaStyleInstructionHandler):
    def encode(self, rows):
        numbers = [number for number, _ in rows]
        if LAST_ROW in numbers and not (HERE / "died").exists():
            (HERE / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        with open(HERE / "encoded", "a") as file:
            file.writelines(f"{number}\\n" for number in numbers)
        return super().encode(rows)
"""
COMMAND = """
import sys
from mindspeed_rl.cli.preprocess import main
from mindspeed_rl.data.sources import ChunkSize
sys.exit(main(sys.argv[1:], chunk_size=ChunkSize(num_bytes=700)))
"""


def test_a_killed_run_leaves_no_file_that_looks_finished_and_parts_are_taken_up_again(gsm8k, tmp_path, tokenizer_folder):
    wanted = gsm8k(name="whole")
    folder, plugins = tmp_path / "killed", tmp_path / "plugins"
    folder.mkdir()
    plugins.mkdir()
    # the parts are fifths of the bytes: the fourth begins with the first chunk behind three fifths
    source = replace(open_source(GSM8K), chunk_size=ChunkSize(num_bytes=700))
    parts = [[], [], [], [], []]
    for part, chunk in _numbered_parts(source.chunks(), source.total_weight(), 5):
        parts[part] += range(chunk.first_row, chunk.first_row + chunk.num_rows)
    (plugins / "mortal.py").write_text(MORTAL.replace("LAST_ROW", str(parts[3][-1])))
    command = ["--input", GSM8K, "--tokenizer-name-or-path", tokenizer_folder, "--output-prefix", str(folder / "g")]
    command += ["--handler-name", "mortal:Mortal", "--prompt-type", "qwen", "--map-keys", GSM8K_KEYS, "--n-subs", "5"]
    environment = {**os.environ, "PYTHONPATH": f"{plugins}:{ROOT}"}

    def run():
        words = [sys.executable, "-c", COMMAND, *command]
        return subprocess.run(words, capture_output=True, text=True, env=environment, check=False)

    killed = run()
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert [path.name for path in folder.iterdir()] == [".g.incomplete"]
    stamps = sorted(path.name for path in (folder / ".g.incomplete").glob("*.json"))
    assert stamps == ["000_of_004.json", "001_of_004.json", "002_of_004.json"]
    (plugins / "encoded").unlink()
    finished = run()
    assert finished.returncode == 0, finished.stderr
    assert [int(line) for line in (plugins / "encoded").read_text().split()] == [*parts[3], *parts[4]]
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == wanted
    assert "rows read 40, kept 40" in finished.stdout


def test_another_runs_parts_are_not_taken_up(gsm8k, tmp_path):
    folder = tmp_path / "out"
    (folder / ".g.incomplete").mkdir(parents=True)
    (folder / ".g.incomplete" / "fingerprint").write_text("another")
    (folder / ".g.incomplete" / "000_of_001.json").write_text("{}")
    assert gsm8k("--n-subs", "2") == gsm8k(name="other")


def test_two_runs_cannot_write_the_same_files(gsm8k, tmp_path, tokenizer_folder, capsys):
    import fcntl

    folder = tmp_path / "out" / ".g.incomplete"
    folder.mkdir(parents=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        command = [
            "--input",
            GSM8K,
            "--tokenizer-name-or-path",
            tokenizer_folder,
            "--output-prefix",
            str(tmp_path / "out" / "g"),
        ]
        assert main([*command, "--json-keys", "question"]) == 2
    assert "is being written by another run" in capsys.readouterr().err


def test_the_shipped_dataset_configs_name_known_handlers_and_templates():
    from mindspeed_rl.data.templates import _list_template_names

    names = sorted(path.stem for path in (ROOT / "configs" / "datasets").glob("*.yaml"))
    assert {"deepscaler", "math_17k", "orca_rlhf"} <= set(names)
    for name in names:
        config = _build_config(_load_dataset_config(name, ROOT / "configs" / "datasets"))
        assert config.handler_name in HANDLERS and config.prompt_type in _list_template_names()


def test_a_config_file_and_flags_make_one_run(tmp_path, tokenizer_folder, write_jsonl, read_columns):
    rows = [{"prompt": [{"role": "user", "content": "1+1"}], "reward_model": {"ground_truth": "2"}}]
    shipped = yaml.safe_load((ROOT / "configs" / "datasets" / "math_17k.yaml").read_text())
    settings = {
        **shipped,
        "input": write_jsonl(rows),
        "tokenizer-name-or-path": tokenizer_folder,
        "output_prefix": str(tmp_path / "x"),
    }
    del settings["tokenizer_name_or_path"]
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(settings))
    assert main(["--config-name", "mine", "--config-dir", str(tmp_path), "--workers", "1"]) == 0
    by_flag = read_columns(str(tmp_path / "x"))
    assert main(["mine", "--config-dir", str(tmp_path), "--output-prefix", str(tmp_path / "y"), "--workers", "1"]) == 0
    assert read_columns(str(tmp_path / "y")) == by_flag
    assert [len(by_flag[name][0]) for name in ("input_ids", "labels")] == [3, 1]


def test_the_guides_three_commands_run(tmp_path, tokenizer_folder, write_jsonl):
    """Pretraining, tuning and RL prompts with the flags of the guide, unchanged but for paths and the number of processes."""
    os.makedirs(tmp_path / "web")
    pyarrow.parquet.write_table(pa.table({"text": ["one", "two"]}), tmp_path / "web" / "a.parquet")
    pretrain = f"""--input {tmp_path}/web/ --tokenizer-name-or-path {tokenizer_folder} --tokenizer-type PretrainedFromHF
        --handler-name GeneralPretrainHandler --cache-dir {tmp_path}/cache --output-prefix {tmp_path}/open-web-math
        --json-keys text --workers 2 --n-subs 16 --log-interval 1000"""
    assert main(pretrain.split()) == 0
    pyarrow.parquet.write_table(pa.table({"instruction": ["Q"], "input": ["i"], "output": ["A"]}), tmp_path / "alpaca.parquet")
    tune = f"""--input {tmp_path}/alpaca.parquet --tokenizer-name-or-path {tokenizer_folder} --output-prefix {tmp_path}/alpaca
        --workers 2 --log-interval 1000 --tokenizer-type PretrainedFromHF --handler-name AlpacaStyleInstructionHandler
        --prompt-type llama2"""
    assert main(tune.split()) == 0
    pyarrow.parquet.write_table(pa.table({"prompt": ["Q"]}), tmp_path / "prompts.parquet")
    prompts = f"""--input {tmp_path}/prompts.parquet --tokenizer-name-or-path {tokenizer_folder}
        --output-prefix {tmp_path}/descriptiveness --workers 2 --log-interval 1000 --tokenizer-type PretrainedFromHF
        --handler-name PPOAlpacaStyleInstructionHandler --prompt-type llama3 --map-keys"""
    keys = '{"prompt":"prompt", "query":"", "response": "prompt", "system":""}'
    assert main([*prompts.split(), keys]) == 0
    written = {path.name for path in tmp_path.iterdir() if path.suffix in (".bin", ".idx")}
    wanted = ["open-web-math_text", *(f"alpaca_packed_{c}" for c in ("input_ids", "attention_mask", "labels"))]
    wanted += [f"descriptiveness_packed_{c}" for c in ("input_ids", "attention_mask")]
    assert written == {f"{name}_document.{suffix}" for name in wanted for suffix in ("bin", "idx")}


@pytest.mark.parametrize("damage", ["garbage", "cut short"])
def test_an_arrow_file_that_is_none_or_damaged_is_one_clear_error(damage, tmp_path, tokenizer_folder, capsys):
    table, path = pa.Table.from_pylist(rows_of(GSM8K)), tmp_path / "rows.arrow"
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)
    content = path.read_bytes()
    path.write_bytes(bytes(range(7, 250)) * 5 if damage == "garbage" else content[: len(content) * 2 // 3])
    command = ["--input", path, "--tokenizer-name-or-path", tokenizer_folder, "--output-prefix", tmp_path / "o"]
    assert main([str(word) for word in command]) == 2
    said = capsys.readouterr().err
    assert f"'{path}' is {'not an Arrow file' if damage == 'garbage' else 'damaged'}: " in said
    assert not list(tmp_path.glob("o*"))


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--neat-pack"], "pack needs seq_length"),
        (["--pack"], "pack needs seq_length"),
        (["--workers", "0"], "workers=0 must be at least 1"),
        (["--workers", "100000"], "workers=100000 must be at most"),
        (["--split-sentences"], "split_sentences=True is not supported; allowed: False"),
        (["--vocab-file", "vocab.json"], "vocab_file='vocab.json' is not supported; leave it out"),
        (["--tokenizer-type", "GPT2BPETokenizer"], "tokenizer_type='GPT2BPETokenizer' is not supported"),
        (["--prompt-type", "qwen"], "prompt_type='qwen' has no meaning for GeneralPretrainHandler"),
        (["--system-prompt", "S"], "system_prompt has no meaning for GeneralPretrainHandler"),
        (["--pack", "--seq-length", "8"], "pack has no meaning for GeneralPretrainHandler"),
        (
            ["--handler-name", "AlpacaStyleInstructionHandler", "--enable-thinking", "true"],
            "enable_thinking=true has no meaning",
        ),
        (["--handler-name", "AlpacaStyleInstructionHandler", "--reasoning-effort", "max"], "allowed: none for this template"),
        (["--output-prefix", "/dev/null/x"], "the folder '/dev/null' cannot be made: "),
        (["--tokenizer-name-or-path", "/nonexistent"], "tokenizer_name_or_path='/nonexistent' is not a folder"),
        (["--handler-name", "LlamaFactoryInstructionHandler"], "needs dataset_dir"),
    ],
)
def test_wrong_settings_are_one_clear_error(flags, problem, tmp_path, tokenizer_folder, capsys):
    command = ["--input", GSM8K, "--tokenizer-name-or-path", tokenizer_folder, "--output-prefix", str(tmp_path / "o")]
    assert main([*command, *flags]) == 2
    error = capsys.readouterr().err
    assert problem in error and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_flags_of_other_suites_that_change_nothing_are_taken(tmp_path, tokenizer_folder, write_jsonl):
    rows = write_jsonl([{"text": "a"}])
    command = ["--input", rows, "--tokenizer-name-or-path", tokenizer_folder, "--output-prefix", str(tmp_path / "o")]
    settled = "--dataset-impl mmap --make-vocab-size-divisible-by 1 --pad-vocab-size-to 128 --overwrite-cache --keep-newlines"
    assert main([*command, *settled.split()]) == 0
    assert (tmp_path / "o_text_document.bin").is_file()


def test_unknown_config_keys_name_the_nearest(tmp_path):
    with pytest.raises(ValueError, match="'handler_nam' is not a key of a dataset config; did you mean 'handler_name'"):
        _build_config({"handler_nam": "x"})
    with pytest.raises(ValueError, match="input is missing"):
        _build_config({"output_prefix": "x"})
    with pytest.raises(ValueError, match="config_name='nothing': .* does not exist"):
        _load_dataset_config("nothing", tmp_path)


def test_preprocessing_of_nothing_usable_is_an_error(tmp_path, tokenizer_folder, write_jsonl, capsys):
    rows = write_jsonl([{"text": ""}])
    assert main(["--input", rows, "--tokenizer-name-or-path", tokenizer_folder, "--output-prefix", str(tmp_path / "o")]) == 2
    assert "no row of" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def test_max_samples_stops_after_so_many_rows(gsm8k, capsys):
    gsm8k("--max-samples", "7", "--workers", "2")
    assert "rows read 7, kept 7" in capsys.readouterr().out


def test_a_settings_file_in_the_current_folder_is_found_and_shipped_ones_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.yaml").write_text("input: mine.jsonl\n")
    (tmp_path / "gsm8k.yaml").write_text("input: mine_too.jsonl\n")
    assert _load_dataset_config("own.yaml") == _load_dataset_config("own") == {"input": "mine.jsonl"}
    assert _load_dataset_config("gsm8k.yaml") == {"input": "mine_too.jsonl"}
    assert "handler_name" in _load_dataset_config("gsm8k")  # a bare name is a shipped one first
    with pytest.raises(ValueError, match=r"config_name='nothing': nothing.yaml does not exist \(existing: .*gsm8k.*own"):
        _load_dataset_config("nothing")
