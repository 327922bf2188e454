"""AGIEval, needles in long texts, several answers to a question, upstream's flags that shape a prompt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from scripted_engine import ScriptedEngine
from test_tasks import evaluate, open_task, settings, write_jsonl
from transformers import PreTrainedTokenizerFast

from mindspeed_rl.cli.evaluate import main
from mindspeed_rl.inference.prompt_format import PromptFormat
from mindspeed_rl.inference.task_evaluation import prepare_task
from mindspeed_rl.inference.tasks.agieval import score as agieval_score
from mindspeed_rl.inference.tasks.needlebench import score
from mindspeed_rl.inference.tasks.task import fill_template
from mindspeed_rl.rewards.sample_statistics import estimate_pass_at
from mindspeed_rl.rollout.requests import Sampling

AGIEVAL: list[dict[str, Any]] = [
    {
        "passage": "Ann is older than Ben.",
        "question": "Who is older?",
        "options": ["(A)Ann", "(B)Ben"],
        "label": "A",
        "answer": None,
    },
    {"passage": None, "question": "哪些是偶数？", "options": ["A. 2", "B. 3", "C. 4"], "label": ["A", "C"]},
    {"passage": "", "question": "1/2 + 1/2 = ?", "options": None, "label": None, "answer": "1"},
]


@pytest.fixture
def agieval(tmp_path: Path) -> Path:
    for name, row in zip(("lsat-ar", "gaokao-physics", "math"), AGIEVAL):
        write_jsonl(tmp_path / "v1" / f"{name}.jsonl", [row])
    return tmp_path / "v1"


def test_agieval_reads_letters_and_final_answers(engine: ScriptedEngine, agieval: Path) -> None:
    # files in order of their names: gaokao-physics, lsat-ar, math; what is a choice is asked first
    script = ["A", "答案是（AC）", "It is 1. The answer is 1."]
    result, records = evaluate(open_task("agieval", agieval), engine, script, sampling=Sampling(0.7, 64, ()))
    assert [record["right"] for record in records] == [True, True, True] and result.groups["lsat-ar"] == [1, 1]
    assert engine.asked[0].endswith("Ann is older than Ben.\nWho is older?\nA. Ann\nB. Ben\nAnswer:")
    assert engine.asked[1].startswith("下面的选择题可能有多个正确选项")
    assert engine.requests[0].max_tokens == 1 and engine.requests[2].max_tokens > 1
    assert engine.temperatures == [0.0, 0.7, 0.7]  # a choice is the most likely one


@pytest.mark.parametrize(
    ("response", "label", "has_options", "right"),
    [
        ("The answer is (B).", "B", True, 1.0),
        ("The answer is A, C", "AC", True, 1.0),
        ("The answer is A", "AC", True, 0.0),
        ("The answer is $0.5$", "\\frac{1}{2}", False, 1.0),
        ("no idea", "1", False, 0.0),
    ],
)
def test_agieval_scores_sets_of_letters_and_mathematics(response: str, label: str, has_options: bool, right: float) -> None:
    assert agieval_score(response, label, has_options) == right


def test_agieval_refuses_a_label_that_is_no_option(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", [{"question": "q", "options": ["a", "b"], "label": "D"}])
    with pytest.raises(ValueError, match=r"x.jsonl, row 1: the label 'D' is none of A, B"):
        open_task("agieval", path).questions()


@pytest.fixture
def needles(tmp_path: Path) -> Path:
    write_jsonl(
        tmp_path / "long" / "needles.jsonl",
        [
            {"needle": "The key lies under the mat.", "retrieval_question": "Where is the key?", "keyword": "under the mat"},
            {"needle": "钥匙在花盆里。", "retrieval_question": "钥匙在哪里？", "arg2": "花盆里", "language": "Chinese"},
        ],
    )
    write_jsonl(tmp_path / "long" / "essays.jsonl", [{"text": f"Sentence {n} says little. " * 5} for n in range(9)])
    return tmp_path / "long"


def test_needles_lie_at_their_depth_of_a_text_of_the_length(needles: Path) -> None:
    task = open_task("needlebench", needles, context_lengths=(50, 200), depths=(0, 50, 100), language="en")
    asked = task.questions()
    assert [question.group for question in asked] == [
        f"{length} tokens, {depth} %" for length in (50, 200) for depth in (0, 50, 100)
    ]
    for question, length, depth in zip(asked, (50, 50, 50, 200, 200, 200), (0, 50, 100) * 2):
        text, _, last = question.text.partition("\n\nWhere is the key?")
        assert last == "" and text.count("The key lies under the mat.") == 1 and question.label == "under the mat"
        assert abs(len(text) - 4 * length) <= 4  # four characters a token; line ends around the needle
        place = text.index("The key") / max(1, len(text) - len("The key lies under the mat."))
        assert abs(place - depth / 100) <= 30 / len(text) + 0.02 * (depth == 50) and (depth != 0 or place == 0)
        before = text[: text.index("The key")].rstrip()
        assert depth == 100 or not before or before.endswith(".")  # never within a sentence
    assert [question.text for question in task.questions()] == [question.text for question in asked]


def test_a_needle_is_found_where_its_words_are_said(engine: ScriptedEngine, needles: Path) -> None:
    task = open_task("needlebench", needles, context_lengths=(100,), depths=(50,))
    result, _ = evaluate(task, engine, ["It is Under the  mat!", "在桌上"], max_model_len=4096)
    assert (result.right, result.total) == (1, 2) and engine.asked[1].endswith("钥匙在哪里？\n答案：")
    assert score("UNDER\nthe mat", "under the mat") == 1.0 and score("the mat", "under the mat") == 0.0


def test_a_folder_without_needles_or_texts_is_an_error(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "needles.jsonl", [{"needle": "n", "question": "q", "answer": "a"}])
    with pytest.raises(ValueError, match="must hold needles.jsonl and files with a column 'text'"):
        open_task("needlebench", tmp_path).questions()


# ---------------------------------------------------------------------- several answers


def test_pass_at_k_is_the_chance_that_one_of_k_is_right() -> None:
    assert estimate_pass_at(4, 1, 1) == 0.25 and estimate_pass_at(4, 1, 4) == 1.0 and estimate_pass_at(4, 0, 2) == 0.0
    # of the six pairs of four answers with two right ones, one pair has none
    assert estimate_pass_at(4, 2, 2) == pytest.approx(5 / 6)


def test_several_answers_have_pass_at_k_and_a_majority_vote(engine: ScriptedEngine, tmp_path: Path) -> None:
    rows = [{"question": "2+2?", "label": "4"}, {"question": "3+3?", "label": "6"}]
    task = open_task("jsonl", write_jsonl(tmp_path / "q.jsonl", rows), scorer="exact_match")
    script = ["4", "5", "4", "6", "7", "7"]  # the first question's vote is 4, the second's 7
    result, _ = evaluate(task, engine, script, sampling=Sampling(1.0, 1, ()), num_return=3)
    assert result.majority == 0.5
    assert result.pass_at == {1: pytest.approx(0.5), 2: pytest.approx((1 + 2 / 3) / 2), 3: 1.0}
    assert json.loads(json.dumps(result.record()))["majority"] == 0.5


def test_one_answer_has_neither(engine: ScriptedEngine, tmp_path: Path) -> None:
    task = open_task("jsonl", write_jsonl(tmp_path / "q.jsonl", [{"question": "q", "label": "4"}]), scorer="exact_match")
    result, _ = evaluate(task, engine, ["4"])
    assert result.pass_at == {} and result.majority is None


# ---------------------------------------------------------------------- flags of upstream


CHOICE = {"question": "Which is even?", "A": "1", "B": "2", "answer": "B"}


def plain(tokenizer: PreTrainedTokenizerFast, path: Path, **options: Any) -> str:
    task = open_task("multiple_choice", path, **options)
    return tokenizer.decode(prepare_task(task, PromptFormat(tokenizer, None), settings()).prompts[0])


def test_the_language_of_the_instruction_can_be_chosen(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "maths_test.jsonl", [CHOICE])
    assert plain(tokenizer, path, language="en").endswith("B. 2\nAnswer:")
    assert plain(tokenizer, path, language="zh").endswith("B. 2\n答案：")


def test_the_alternative_prompt_reads_the_letter_from_words(engine: ScriptedEngine, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "maths_test.jsonl", [CHOICE])
    result, records = evaluate(open_task("multiple_choice", path, alternative_prompt=True), engine, ["The answer is B."])
    assert result.right == 1 and records[0]["response"] == "The answer is B." and engine.requests[0].max_tokens > 1


def test_an_instruction_template_is_put_around_the_prompt(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "maths_test.jsonl", [CHOICE])
    assert (
        plain(tokenizer, path, instruction_template="On {subject}:\n{question}\n>")
        == "On maths:\nWhich is even?\nA. 1\nB. 2\n>"
    )
    assert plain(tokenizer, path, instruction_template="{prompt}") == plain(tokenizer, path)
    assert fill_template("{question}", {"question": "{prompt}", "prompt": "p"}) == "{prompt}"


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--instruction-template", "{quest}"], "--instruction-template has {quest}; known are prompt, question, subject"),
        (["--instruction-template", "say"], "needs {prompt} or {question}"),
        (["--depths", "50"], "--depths is for --task needlebench"),
        (["--alternative-prompt", "--chain-of-thought"], "are two ways to answer"),
    ],
)
def test_wrong_flags_are_errors_before_a_model_is_read(flags: list[str], sentence: str, tmp_path: Path, capsys: Any) -> None:
    path = write_jsonl(tmp_path / "q_test.jsonl", [CHOICE])
    assert main(["--load", str(tmp_path), "--task", "multiple_choice", "--task-data-path", str(path), *flags]) == 2
    assert sentence in capsys.readouterr().err
