"""Raw data of supervised stages: recognized, tokenized as `preprocess` does, cached by content, and described."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from mindspeed_rl.cli.explain import main as explain
from mindspeed_rl.cli.main import main
from mindspeed_rl.cli.preprocess import main as preprocess
from mindspeed_rl.config import build_run_config
from mindspeed_rl.data.forms import FORMS, STAGE_KINDS, find_form
from mindspeed_rl.data.indexed import IndexedColumns, IndexedWriter, column_prefix, open_indexed
from mindspeed_rl.run.resolve import resolve
from mindspeed_rl.trainers.sft_setup import SupervisedInputs, check_supervised

Row = dict[str, Any]
ASK, REPLY, WORSE = "What is 2+2?", "It is 4.", "Who knows."


def chat(*texts: str) -> list[Row]:
    return [{"role": ("user", "assistant")[index % 2], "content": text} for index, text in enumerate(texts)]


def turns(*texts: str) -> list[Row]:
    return [{"from": ("human", "gpt")[index % 2], "value": text} for index, text in enumerate(texts)]


#: stage, row -> handler and map_keys that a user of `preprocess` would give
ROWS: dict[str, tuple[str, Row, str, Row | None]] = {
    "messages": ("sft", {"messages": chat(ASK, REPLY)}, "OpenAIInstructionHandler", None),
    "several turns": ("sft", {"messages": chat(ASK, REPLY, "And 3+3?", "6")}, "OpenAIInstructionHandler", None),
    "messages under another name": (
        "sft", {"conversations": chat(ASK, REPLY)}, "OpenAIInstructionHandler", {"messages": "conversations"}
    ),
    "sharegpt": ("sft", {"conversations": turns(ASK, REPLY)}, "SharegptStyleInstructionHandler", None),
    "alpaca": ("sft", {"instruction": ASK, "input": "", "output": REPLY}, "AlpacaStyleInstructionHandler", None),
    "alpaca without input": ("sft", {"instruction": ASK, "output": REPLY}, "AlpacaStyleInstructionHandler", None),
    "prompt and completion": (
        "sft", {"prompt": ASK, "completion": REPLY}, "AlpacaStyleInstructionHandler",
        {"prompt": "prompt", "query": "", "response": "completion"},
    ),
    "question and answer": (
        "sft", {"question": ASK, "answer": REPLY, "id": 3}, "AlpacaStyleInstructionHandler",
        {"prompt": "question", "query": "", "response": "answer"},
    ),
    "alpaca pairs": (
        "dpo", {"instruction": ASK, "input": "", "chosen": REPLY, "rejected": WORSE}, "AlpacaStylePairwiseHandler", None
    ),
    "prompt, chosen, rejected": (
        "dpo", {"prompt": ASK, "chosen": REPLY, "rejected": WORSE}, "AlpacaStylePairwiseHandler", {"prompt": "prompt"}
    ),
    "chat pairs": (
        "orm", {"prompt": chat(ASK), "chosen": chat(ASK, REPLY)[1:], "rejected": chat(ASK, WORSE)[1:]},
        "AlpacaStylePairwiseHandler", None,
    ),
    "implicit prompts": (
        "simpo", {"chosen": chat(ASK, REPLY), "rejected": chat(ASK, WORSE)}, "AlpacaStylePairwiseHandler", None
    ),
    "sharegpt pairs": (
        "cpo", {"conversations": turns(ASK), "chosen": turns(ASK, REPLY)[1], "rejected": turns(ASK, WORSE)[1]},
        "SharegptStylePairwiseHandler", None,
    ),
    "judged alpaca": (
        "kto", {"instruction": ASK, "output": REPLY, "label": True}, "AlpacaStyleUnpairedHandler", None
    ),
    "judged completion": (
        "kto", {"prompt": ASK, "completion": REPLY, "label": False}, "AlpacaStyleUnpairedHandler",
        {"prompt": "prompt", "response": "completion"},
    ),
    "pairs of kto": (
        "kto", {"instruction": ASK, "chosen": REPLY, "rejected": WORSE}, "AlpacaStylePairwiseHandler", None
    ),
    "documents": ("pretrain", {"text": f"{ASK} {REPLY}", "url": "x"}, "GeneralPretrainHandler", None),
    "documents under another name": ("pretrain", {"content": ASK}, "GeneralPretrainHandler", {"text": "content"}),
    "documents of conversations": ("pretrain", {"conversations": turns(ASK, REPLY)}, "SharegptPretrainHandler", None),
    "judged steps": ("prm", {"input": "2+2=4~ ", "value": ["+"]}, "AlpacaStyleProcessRewardHandler", None),
}  # fmt: skip
OTHER = {"instruction": "Say no.", "input": "", "output": "No.", "chosen": "No.", "rejected": "Yes."}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with one token per character and a chat template."""
    folder = tmp_path_factory.mktemp("raw")
    assert main(["new", str(folder / "task")]) == 0
    return folder / "task" / "model"


def vary(row: Row, number: int) -> Row:
    """The row with another question, so that no two prompts are equal."""
    return json.loads(json.dumps(row).replace("2+2", f"{number}+2"))


def card_of(inputs: SupervisedInputs) -> str:
    return "\n".join(map(str, inputs.cards))


def write(path: Path, rows: list[Row]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def check(model: Path, folder: Path, stage: str, data: object, **keys: object) -> SupervisedInputs:
    """The checked inputs of a run whose folder is folder/runs/own."""
    training = {
        "stage": stage,
        "bf16": False,
        "load": str(model),
        "finetune": True,
        "data_path": str(data) if isinstance(data, Path) else data,
        "global_batch_size": 2,
        "micro_batch_size": 2,
        "seq_length": 256,
        "train_iters": 2,
        "lr": 1e-3,
        **({"placeholder_token": "~"} if stage == "prm" else {}),
        **keys,
    }
    tree = {"platform": "cpu", "run_dir": str(folder / "runs" / "own"), "megatron_training": training}
    return check_supervised(resolve(build_run_config(tree, config_name="own"), platform="cpu"))


def files_of(prefix: str) -> dict[str, bytes]:
    path = Path(prefix)
    return {file.name.removeprefix(path.name): file.read_bytes() for file in path.parent.glob(f"{path.name}_*")}


@pytest.mark.parametrize("name", ROWS)
def test_raw_rows_become_the_files_that_preprocess_writes(name: str, model: Path, tmp_path: Path) -> None:
    stage, row, handler, map_keys = ROWS[name]
    data = write(tmp_path / "train.jsonl", [vary(row, number) for number in range(4)])
    template = {} if stage in ("pretrain", "prm") else {"prompt_type": "hf"}
    inputs = check(model, tmp_path, stage, data, **template)
    command = ["--input", str(data), "--output-prefix", str(tmp_path / "own"), "--handler-name", handler]
    command += ["--tokenizer-name-or-path", str(model), *(["--prompt-type", "hf"] if template else [])]
    command += ["--map-keys", json.dumps(map_keys)] if map_keys else []
    command += ["--placeholder-token", "~"] if stage == "prm" else []
    assert preprocess(command) == 0
    expected = files_of(str(tmp_path / "own"))
    found = files_of(str(inputs.run.data_config.data_path).removesuffix("_text_document"))
    assert found == expected and len(expected) >= 2
    assert handler in card_of(inputs) and "example 1" in card_of(inputs)
    assert inputs.run.config.actor_config.data_path == str(data)  # the run file stays as it is


def test_files_of_every_format_have_the_same_tokens(model: Path, tmp_path: Path) -> None:
    rows = [{"instruction": f"Count to {number}.", "input": "", "output": str(number)} for number in range(6)]
    table = pyarrow.Table.from_pylist(rows)
    write(tmp_path / "a.jsonl", rows)
    (tmp_path / "a.json").write_text(json.dumps(rows))
    for name, mark in (("a.csv", ","), ("b.csv", ";")):
        with open(tmp_path / name, "w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), delimiter=mark)
            writer.writeheader()
            writer.writerows(rows)
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    hub = tmp_path / "hub" / "data"
    hub.mkdir(parents=True)
    pyarrow.parquet.write_table(table, hub / "train-00000-of-00001.parquet")
    pyarrow.parquet.write_table(table.slice(0, 1), hub / "test-00000-of-00001.parquet")
    write(tmp_path / "c1.jsonl", rows[:2])
    write(tmp_path / "c2.jsonl", rows[2:])
    write(tmp_path / "more.jsonl", [{"instruction": "x", "output": "y"}, *rows, {"instruction": "x", "output": "y"}])
    places = ["a.jsonl", "a.json", "a.csv", "b.csv", "a.parquet", "saved", "hub", "more.jsonl[1:7]", "*1.jsonl,*2.jsonl"]
    places[-1] = f"{tmp_path}/c1.jsonl,{tmp_path}/c2.jsonl"
    contents = []
    for place in places:
        inputs = check(model, tmp_path, "sft", place if "," in place else f"{tmp_path}/{place}", prompt_type="hf")
        contents.append(files_of(str(inputs.run.data_config.data_path)))
    assert all(content == contents[0] for content in contents)


@pytest.mark.parametrize("kind", [kind for kind in FORMS if FORMS[kind]])
def test_every_form_has_a_row_that_is_recognized_as_no_earlier_form(kind: str) -> None:
    rows = [row for stage, row, _, _ in ROWS.values() if kind in STAGE_KINDS[stage]]
    assert any(find_form(row, kind) for row in rows)
    for row in rows:
        # a form of another kind takes no row for which this kind has a form, apart from documents, which take all
        reading = find_form(row, kind)
        assert reading is None or reading.handler in {form.handler for form in FORMS[kind]}


def test_columns_of_the_run_file_are_read(model: Path, tmp_path: Path) -> None:
    data = write(tmp_path / "q.jsonl", [{"frage": f"{number}?", "antwort": "ja"} for number in range(3)])
    inputs = check(model, tmp_path, "sft", data, map_keys={"prompt": "frage", "response": "antwort"})
    columns = IndexedColumns(str(inputs.run.data_config.data_path), ["input_ids", "labels"])
    trained = [int(label) for label in columns.row(0, "labels") if label != -100]
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    assert tokenizer.decode(trained, skip_special_tokens=True) == "ja"
    for row, names in (
        ({"frage": "1?", "answer": "ja"}, {"prompt": "frage"}),
        ({"prompt": "1?", "completion": "ja"}, {"query": ""}),
    ):
        reading = find_form(row, "samples", names)
        assert reading is not None and reading.columns == tuple(row)
        assert reading.map_keys == {"query": "", "response": list(row)[1], "prompt": list(row)[0]}
    assert find_form({"prompt": "1?", "completion": "ja"}, "samples", {"response": ""}) is None
    pairs = write(tmp_path / "p.jsonl", [{"frage": f"{number}?", "gut": "ja", "schlecht": "nein"} for number in range(3)])
    names = {"prompt": "frage", "chosen": "gut", "rejected": "schlecht"}
    assert "columns frage, gut, schlecht" in card_of(check(model, tmp_path, "dpo", pairs, map_keys=names))


WRONG: dict[str, tuple[str, Row, dict[str, object], list[str]]] = {
    "columns of no form": (
        "sft", {"frage": "1?", "antwort": "2"}, {}, ["row 1 has the columns frage, antwort", "map_keys", "{prompt: COLUMN"]
    ),
    "pairs for sft": (
        "sft", {"prompt": "1?", "chosen": "2", "rejected": "3"}, {},
        ["which are pairs for stage dpo", "stage sft learns from samples"],
    ),
    "answers for dpo": (
        "dpo", {"messages": chat(ASK, REPLY)}, {}, ["messages rows, which are samples for stage sft", "learns from pairs"]
    ),
    "handler of another stage": (
        "dpo", {"instruction": "1?", "chosen": "2", "rejected": "3"}, {"handler_name": "AlpacaStyleInstructionHandler"},
        ["handler_name: AlpacaStyleInstructionHandler reads samples, but stage dpo learns from pairs", "StylePairwiseHandler"],
    ),
    "handler of another form": (
        "sft", {"messages": chat(ASK, REPLY)}, {"handler_name": "AlpacaStyleInstructionHandler"},
        ["row 1: has no column 'instruction'", "messages rows", "are read by OpenAIInstructionHandler"],
    ),
    "handler of another form, bad rows left out": (
        "sft", {"messages": chat(ASK, REPLY)}, {"handler_name": "AlpacaStyleInstructionHandler", "on_bad_row": "skip"},
        ["no row of", "malformed", "are read by OpenAIInstructionHandler"],
    ),
    "a handler that reads the form by other columns": (
        "sft", {"question": "1?", "answer": "2"}, {"handler_name": "AlpacaStyleInstructionHandler"},
        ['are read by AlpacaStyleInstructionHandler with map_keys {"prompt": "question"'],
    ),
    "a column that is not there": (
        "sft", {"instruction": "1?", "output": "2"}, {"map_keys": {"prompt": "qestion"}}, ["which stage sft does not know"]
    ),
    "a system prompt of the run": (
        "sft", {"instruction": "1?", "output": "2"}, {"system_prompt": "Be kind."},
        ["system_prompt: rows of stage sft have their own"],
    ),
    "a teacher": (
        "sft", {"instruction": "1?", "output": "2"}, {"sft_loss_type": "forward_kl"}, ["is raw data", "teacher-log-probs"]
    ),
    "empty answers": ("sft", {"instruction": "1?", "output": " "}, {}, ["no row of", "empty answer: 2"]),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_data_that_a_stage_cannot_read_is_refused_with_what_would_be_right(name: str, model: Path, tmp_path: Path) -> None:
    stage, row, keys, words = WRONG[name]
    data = write(tmp_path / "train.jsonl", [row, row])
    with pytest.raises(ValueError) as error:
        check(model, tmp_path, stage, data, **keys)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize("content", ["", "\n\n", "[]"])
def test_a_file_without_rows_is_refused(content: str, model: Path, tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match="no row at all"):
        check(model, tmp_path, "sft", path)


def test_a_list_is_for_pretraining_alone(model: Path, tmp_path: Path) -> None:
    data = write(tmp_path / "train.jsonl", [{"instruction": "1?", "output": "2"}])
    with pytest.raises(ValueError, match="which only stage pretrain blends"):
        check(model, tmp_path, "sft", [str(data), str(data)])


def test_pairs_without_labels_are_described_for_a_reward_model(model: Path, tmp_path: Path) -> None:
    data = write(tmp_path / "pairs.jsonl", [{"prompt": f"{number}?", "chosen": "yes", "rejected": "no"} for number in range(4)])
    prefix = Path(str(check(model, tmp_path, "orm", data).run.data_config.data_path))
    for name in ("chosen", "rejected"):
        for suffix in (".bin", ".idx"):
            Path(f"{prefix}_packed_{name}_labels_document{suffix}").unlink()
    moved = tmp_path / "moved"
    prefix.parent.rename(moved)
    card = card_of(check(model, tmp_path, "orm", moved / prefix.name))
    assert "chosen: 0?yes" in card and "trained" not in card


# ---------------------------------------------------------------- cache


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write(tmp_path / "train.jsonl", [{"instruction": f"{number}?", "output": "yes"} for number in range(4)])


def cache_of(folder: Path) -> set[str]:
    return {path.name for path in (folder / "runs" / "prepared_data").iterdir()}


def test_the_cache_is_read_where_nothing_has_changed(model: Path, data: Path, tmp_path: Path) -> None:
    first = check(model, tmp_path, "sft", data)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*.bin")}
    os.utime(data)  # the content counts
    second = check(model, tmp_path, "sft", data, train_iters=5, seq_length=64)
    assert first.run.data_config.data_path == second.run.data_config.data_path
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*.bin")} == before
    assert "tokenized into" in card_of(first) and "as tokenized before in" in card_of(second)
    assert card_of(first).split("  rows ")[-1] == card_of(second).split("  rows ")[-1]


@pytest.mark.parametrize(
    ("stage", "answers", "words"),
    [
        ("sft", {"output": "1"}, "cuts off the trained tokens of"),
        ("dpo", {"chosen": "1", "rejected": "2"}, "leaves out|and are left out"),
    ],
)
def test_rows_that_seq_length_leaves_nothing_of_are_refused_before_workers_start(
    stage: str, answers: dict[str, str], words: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"instruction": f"{number} " * 30, **answers} for number in range(4)]
    data = write(tmp_path / "long.jsonl", rows)
    text = rf"seq_length=24 ({words}).* all 4 rows of data_path.*raise seq_length to \d+"
    with pytest.raises(ValueError, match=text) as error:
        check(model, tmp_path, stage, data, seq_length=24)
    # which keeps all of them
    check(model, tmp_path, stage, data, seq_length=int(str(error.value).rpartition(" ")[2]))
    assert not re.search(words, capsys.readouterr().out)
    # three of four: a warning; one of four: nothing
    for count in (3, 1):
        write(data, rows[:count] + [{"instruction": f"{number}", **answers} for number in range(4 - count)])
        check(model, tmp_path, stage, data, seq_length=24)
        shown = capsys.readouterr().out
        assert (re.search(rf"warning: .*{count} of 4 rows.*", shown) is not None) == (count == 3), shown
        assert (re.search(words, shown) is not None) == (count == 3), shown


def test_files_without_rows_are_refused_in_a_sentence(model: Path, tmp_path: Path) -> None:
    for name in ("chosen_input_ids", "chosen_labels", "rejected_input_ids", "rejected_labels"):
        IndexedWriter(column_prefix(tmp_path / "empty", name)).close()
    with pytest.raises(ValueError, match="is empty: the dataset holds no tokens"):
        check(model, tmp_path, "dpo", tmp_path / "empty", seq_length=24)


def test_another_content_of_the_same_size_and_time_is_tokenized_anew(model: Path, data: Path, tmp_path: Path) -> None:
    first = check(model, tmp_path, "sft", data)
    stat = data.stat()
    data.write_text(data.read_text().replace("yes", "sad"))
    os.utime(data, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    second = check(model, tmp_path, "sft", data)
    assert "⟦sad" in card_of(second) and "⟦yes" in card_of(first) and len(cache_of(tmp_path)) == 2


@pytest.mark.parametrize(
    "keys",
    [
        {"prompt_type": "hf"},
        {"append_eod": True},
        {"pack": True, "seq_length": 64},
        {"pack": True, "seq_length": 32},
        {"handler_name": "AlpacaStyleInstructionHandler", "map_keys": {"query": ""}},
    ],
)
def test_settings_that_change_tokens_have_their_own_cache(
    keys: dict[str, object], model: Path, data: Path, tmp_path: Path
) -> None:
    check(model, tmp_path, "sft", data)
    check(model, tmp_path, "sft", data, **keys)
    assert len(cache_of(tmp_path)) == 2


def test_files_of_tokenizer_and_handler_belong_to_the_key(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "model"
    shutil.copytree(model, own)
    check(own, tmp_path, "sft", data, prompt_type="hf")
    template = own / "chat_template.jinja"
    template.write_text(template.read_text().replace("{% else %}{{ message.content }}", "{% else %}{{ message.content }}!"))
    card = card_of(check(own, tmp_path, "sft", data, prompt_type="hf"))
    assert "0?!⟦yes" in card and len(cache_of(tmp_path)) == 2
    handler = tmp_path / "own_rows_handler.py"
    handler.write_text(
        "from mindspeed_rl.data.handlers.instruction import AlpacaStyleInstructionHandler\n\n\n"
        "class Own(AlpacaStyleInstructionHandler):\n    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    check(own, tmp_path, "sft", data, handler_name="own_rows_handler:Own")
    handler.write_text(handler.read_text() + "# changed\n")
    check(own, tmp_path, "sft", data, handler_name="own_rows_handler:Own")
    assert len(cache_of(tmp_path)) == 4


@pytest.mark.parametrize("damage", ["cut", "missing", "no record"])
def test_a_folder_that_is_not_complete_is_written_again(damage: str, model: Path, data: Path, tmp_path: Path) -> None:
    first = check(model, tmp_path, "sft", data)
    prefix = str(first.run.data_config.data_path)
    expected = files_of(prefix)
    file = Path(f"{prefix}_packed_labels_document.bin")
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-4])
    elif damage == "missing":
        file.unlink()
    else:
        (file.parent / "prepared.json").unlink()
    assert check(model, tmp_path, "sft", data).run.data_config.data_path == prefix
    assert files_of(prefix) == expected


def test_a_failed_preparation_leaves_nothing_that_is_read(model: Path, tmp_path: Path) -> None:
    data = write(tmp_path / "train.jsonl", [{"instruction": "1?", "output": "2"}, {"instruction": "1?", "output": ["2"]}])
    with pytest.raises(ValueError, match="row 2: column 'output' must be text"):
        check(model, tmp_path, "sft", data)
    assert cache_of(tmp_path) == set()


# ---------------------------------------------------------------- runs


def test_pretraining_blends_raw_data_with_weights_and_prefixes(model: Path, tmp_path: Path) -> None:
    raw = write(tmp_path / "a.jsonl", [{"text": "abc" * 20}] * 3)
    write(tmp_path / "b.jsonl", [{"text": "xyz" * 20}] * 3)
    command = ["--input", str(tmp_path / "b.jsonl"), "--output-prefix", str(tmp_path / "b"), "--append-eod"]
    assert preprocess([*command, "--handler-name", "GeneralPretrainHandler", "--tokenizer-name-or-path", str(model)]) == 0
    inputs = check(
        model, tmp_path, "pretrain", [0.3, str(raw), 0.7, str(tmp_path / "b_text_document")], seq_length=16, append_eod=True
    )
    path = inputs.run.data_config.data_path
    assert isinstance(path, list) and [path[0], path[2], path[3]] == [0.3, 0.7, str(tmp_path / "b_text_document")]
    assert len(open_indexed(str(path[1]))) == 3 and len(open_indexed(str(path[1]))[0]) == 61
    assert "documents  3" in card_of(inputs)


def test_explain_shows_the_card_and_train_epochs_count_raw_rows(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.yaml").write_text(
        f"platform: cpu\nrun_dir: runs/own\nmegatron_training: {{stage: sft, bf16: false, load: {model}, finetune: true, "
        "data_path: train.jsonl, split: '75,25,0', global_batch_size: 3, micro_batch_size: 3, seq_length: 64, train_epochs: 2, "
        "lr: 1.0e-3, lr_decay_style: constant, save: out, prompt_type: hf}\n"
    )
    assert explain(["--config", "own.yaml"]) == 0
    output = capsys.readouterr().out
    assert "2 iterations: 2 passes over 3 rows" in output
    overview = next(part for part in output.split("\n\n") if "  steps " in part)
    assert re.search(r"rows +4\n.*\n +steps +2 iterations of 3 rows", overview), overview
    for text in ("Alpaca rows (columns instruction, output)", "rows       4", "longest 6 tokens", "example 1  0?⟦yes<eos>⟧"):
        assert text in output, output
    assert explain(["--config", "own.yaml", "--validate"]) == 0
    assert capsys.readouterr().out == "valid\n"
    assert explain(["--config", "own.yaml", "megatron_training.prompt_type=null"]) == 0
    output = capsys.readouterr().out
    assert "no answer ends with the end token" in output and "prompt_type: hf writes the tokenizer's own" in output
    assert explain(["--config", "own.yaml", "megatron_training.prompt_type=null", "megatron_training.append_eod=true"]) == 0
    output = capsys.readouterr().out
    assert "no answer ends" not in output and "example 1  0?⟦yes<eos>⟧" in output


def test_a_mistyped_file_is_named_with_its_neighbour(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"did you mean 'train.jsonl'.*raw data"):
        check(model, tmp_path, "sft", "trian.jsonl")
