"""Published layouts: exact arrays from hand-written rows."""

import json

import pytest
from byte_tokenizer import build_tokenizer

from mindspeed_rl.cli.preprocess import main

BYTES = build_tokenizer()
HEAD = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{}\n\n### Response:\n"
)
LATER = "\n\n### Instruction:\n{}\n\n### Response:\n"


def ids(text):
    return BYTES(text, add_special_tokens=False)["input_ids"]


def labelled(*pieces):
    """(input_ids, labels) of (text, does it train) pieces."""
    tokens = [(ids(text), trains) for text, trains in pieces]
    return (
        [token for piece, _ in tokens for token in piece],
        [token if trains else -100 for piece, trains in tokens for token in piece],
    )


@pytest.fixture
def preprocess(tmp_path, tokenizer_folder, write_jsonl, read_columns, capsys):
    """Columns of rows that went through the command line, or the error where it failed."""

    def run(handler, rows, *flags, name="out"):
        prefix = str(tmp_path / name)
        command = ["--input", write_jsonl(rows), "--tokenizer-name-or-path", tokenizer_folder, "--output-prefix", prefix]
        code = main([*command, "--handler-name", handler, *flags])
        captured = capsys.readouterr()
        return captured.err if code else read_columns(prefix) | {"summary": captured.out}

    return run


def sft(columns):
    return list(zip(columns["input_ids"], columns["labels"], strict=True))


def test_the_general_handler_writes_the_alpaca_prompt_unless_another_is_named(preprocess):
    rows = [{"instruction": "Add", "input": "1 and 2", "output": "3"}]
    assert sft(preprocess("GeneralInstructionHandler", rows)) == [
        labelled((HEAD.format("Add\n1 and 2"), False), ("3</s>", True))
    ]
    other = preprocess("GeneralInstructionHandler", rows, "--prompt-type", "default", name="other")
    assert sft(other) == [labelled(("Human: Add\n1 and 2\nAssistant:", False), ("3</s>", True))]


def test_belle_trains_the_last_of_its_turns(preprocess):
    rows = [
        {"instruction": "Human:hi\nAssistant:hello\nHuman: more: Human rights\nAssistant:", "output": " yes "},
        {"instruction": "alone", "output": "a"},
    ]
    assert sft(preprocess("BelleMultiTurnInstructionHandler", rows)) == [
        labelled(
            (HEAD.format("hi"), False), ("hello</s>", False), (LATER.format("more: Human rights"), False), ("yes</s>", True)
        ),
        labelled((HEAD.format("alone"), False), ("a</s>", True)),
    ]


@pytest.mark.parametrize("handler", ["MOSSInstructionHandler", "MOSSMultiTurnHandler"])
def test_moss_trains_every_answer_and_leaves_its_marks_out(handler, preprocess):
    chat = {
        "turn_10": {"Human": "<|Human|>: c<eoh>\n", "MOSS": "<|MOSS|>: d<eom>\n"},
        "turn_2": {"Human": "<|Human|>: a<eoh>\n", "Inner Thoughts": "None", "MOSS": "<|MOSS|>: b<eom>\n"},
        "turn_3": None,
    }
    assert sft(preprocess(handler, [{"chat": chat}], "--prompt-type", "alpaca")) == [
        labelled((HEAD.format("a"), False), ("b</s>", True), (LATER.format("c"), False), ("d</s>", True))
    ]


def test_leetcode_asks_the_problem_and_answers_with_code_and_explanation(preprocess):
    rows = [{"code_with_problem": "# Two sums\n```python\nx\n```", "code_only": "x", "explanation_only": "Because."}]
    assert sft(preprocess("LeetcodePythonInstructionHandler", rows)) == [
        labelled((HEAD.format("# Two sums"), False), ("x\nBecause.</s>", True))
    ]


def test_stack_overflow_is_one_text(preprocess, tmp_path, read_columns, tokenizer_folder, write_jsonl):
    rows = [{"title": "how", "question_body": "Q", "answer_body": "A"}, {"title": "t", "question_body": "Q", "answer_body": ""}]
    prefix = str(tmp_path / "text")
    command = ["--input", write_jsonl(rows), "--tokenizer-name-or-path", tokenizer_folder, "--output-prefix", prefix]
    assert main([*command, "--handler-name", "StackOverflowPythonPretrainHandler"]) == 0
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    written = [list(map(int, document)) for document in IndexedDataset(f"{prefix}_text_document")]
    assert written == [BYTES("In python, how\n### Question:\nQ\n### Response:\nA\n")["input_ids"]]


def test_r1_sharegpt_keeps_the_turns_and_takes_the_last_answer_as_label(preprocess):
    talk = [
        {"from": "system", "value": "S"},
        {"from": "human", "value": "q1"},
        {"from": "gpt", "value": "a1"},
        {"from": "human", "value": "q2"},
        {"from": "gpt", "value": "42"},
    ]
    flags = ["--prompt-type", "default"]
    columns = preprocess("R1SharegptStyleInstructionHandler", [{"conversations": talk}], *flags)
    assert columns["input_ids"] == [ids("S\nHuman: q1\nAssistant:a1</s>\nHuman: q2\nAssistant:")]
    assert columns["labels"] == [ids("42")]
    rows = [{"conversations": talk[:-1], "answer": "7"}]
    columns = preprocess(
        "R1SharegptStyleInstructionHandler", rows, *flags, "--map-keys", json.dumps({"response": "answer"}), name="other"
    )
    assert columns["labels"] == [ids("7")]


@pytest.mark.parametrize(
    ("handler", "row", "problem"),
    [
        ("BelleMultiTurnInstructionHandler", {"instruction": "hm\nHuman: a", "output": "b"}, "text before the first"),
        ("MOSSInstructionHandler", {"chat": ["a"]}, "column 'chat' must be an object of turns, not list"),
        ("MOSSInstructionHandler", {"chat": {"turn_1": {"Human": "a"}}}, "turn_1 of column 'chat' needs the texts"),
        ("LeetcodePythonInstructionHandler", {"code_only": "x"}, "has no column 'code_with_problem'"),
        ("R1SharegptStyleInstructionHandler", {"conversations": [{"from": "gpt", "value": "A"}]}, "is not from the user"),
    ],
)
def test_a_row_of_another_form_is_an_error_that_says_what_is_missing(handler, row, problem, preprocess):
    assert problem in preprocess(handler, [row])
