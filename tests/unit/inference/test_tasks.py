"""Benchmarks: how their files are read, what is asked, and that scores are counts."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from byte_tokenizer import TEST_DATA
from scripted_engine import ScriptedEngine
from transformers import PreTrainedTokenizerFast

from mindspeed_rl.inference.prompt_format import PromptFormat
from mindspeed_rl.inference.task_evaluation import (
    EvaluationSettings,
    TaskError,
    TaskScore,
    _count,
    _find_choice_tokens,
    prepare_task,
    run_task,
    summary_table,
)
from mindspeed_rl.inference.tasks import TASKS, load_task_class
from mindspeed_rl.inference.tasks.bbh import bbh_match
from mindspeed_rl.inference.tasks.task import Task, TaskOptions
from mindspeed_rl.rewards.scorer import import_scorer
from mindspeed_rl.rollout.requests import Sampling

SAMPLE = TEST_DATA / "gsm8k" / "sample.jsonl"
PLANETS = ["Which planet is nearest to the sun?", "Mercury", "Venus", "Earth", "Mars", "A"]
STARS = ["Which star is seen by day?", "Vega", "Sirius", "the Sun", "Rigel", "C"]


def open_task(name: str, path: Path, **options: Any) -> Task:
    return load_task_class(name)(path, TaskOptions(**options))


def settings(**changes: Any) -> EvaluationSettings:
    return EvaluationSettings(**{"sampling": Sampling(0.0, 1, ()), "max_model_len": 4096, **changes})


def evaluate(
    task: Task, engine: ScriptedEngine, script: list[str], template: str | None = None, **changes: Any
) -> tuple[Any, list[dict[str, Any]]]:
    prompt_format = PromptFormat(engine.tokenizer, template)
    engine.script = script
    used = settings(**changes)
    return run_task(engine, prepare_task(task, prompt_format, used), prompt_format, used)


def write_csv(path: Path, rows: list[list[str]], header: list[str] | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows(([header] if header else []) + rows)


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def mmlu(tmp_path: Path) -> Path:
    """Two subjects in the benchmark's own form: no header, dev beside test."""
    for subject, rows in {"astronomy": [PLANETS, STARS], "physics": [STARS]}.items():
        write_csv(tmp_path / "mmlu" / "test" / f"{subject}_test.csv", rows)
        write_csv(tmp_path / "mmlu" / "dev" / f"{subject}_dev.csv", [STARS, PLANETS])
    return tmp_path / "mmlu"


@pytest.fixture
def sums(tmp_path: Path) -> Task:
    """Three sums, scored by exact match."""
    rows = [{"question": f"{n}+{n}?", "label": str(2 * n)} for n in (2, 3, 4)]
    return open_task("jsonl", write_jsonl(tmp_path / "sums.jsonl", rows), scorer="exact_match")


# ---------------------------------------------------------------------- mathematics


def test_gsm8k_counts_right_answers(engine: ScriptedEngine) -> None:
    task = open_task("gsm8k", SAMPLE)
    right = ["16 - 7 = 9, 9 * 2 = 18.\n#### 18", "It takes 3 bolts.\nQuestion: more?", "#### 70,000", "no number"]
    score, records = evaluate(task, engine, right, max_samples=4)
    assert (score.right, score.total, score.solved, score.num_questions) == (3, 4, 3, 4)
    assert score.accuracy == 0.75
    assert [record["right"] for record in records] == [True, True, True, False]
    assert records[1]["response"] == "It takes 3 bolts."
    assert engine.asked[0].count("Question:") == 5
    assert engine.asked[0].endswith(
        "for $2 per fresh duck egg. How much in dollars does she make every day at the farmers' market?\nAnswer:"
    )


def test_the_projects_examples_are_right_by_the_projects_scorers() -> None:
    from mindspeed_rl.rewards.answers.extraction import extract_closed_boxed
    from mindspeed_rl.rewards.math_scores import gsm8k

    labels = {"gsm8k": [138, 41, 215, 600], "math": ["7", "\\frac{5}{14}", "54", "2"]}
    path = Path(load_task_class("gsm8k").__module__.replace(".", "/"))
    shots = json.loads((Path(__file__).parents[3] / path.parent / "shots.json").read_text(encoding="utf-8"))
    assert [gsm8k(shot["answer"], label) for shot, label in zip(shots["gsm8k"], labels["gsm8k"])] == [1.0] * 4
    assert [extract_closed_boxed(shot["answer"]) for shot in shots["math"]] == labels["math"]


def test_math_reads_the_label_from_the_solution_where_there_is_no_answer(engine: ScriptedEngine, tmp_path: Path) -> None:
    folder = tmp_path / "test" / "algebra"
    folder.mkdir(parents=True)
    for number, (problem, box) in enumerate([("1+1?", "2"), ("Half of one?", "\\frac{1}{2}")]):
        row = {"problem": problem, "solution": f"So \\boxed{{{box}}}.", "type": "Algebra"}
        (folder / f"{number}.json").write_text(json.dumps(row, indent=1))
    score, _ = evaluate(open_task("math", tmp_path), engine, ["\\boxed{2}", "\\boxed{0.5}"])
    assert (score.right, score.total) == (2, 2)
    assert score.groups == {"Algebra": [2, 2]}
    write_jsonl(tmp_path / "bad.jsonl", [{"problem": "p", "solution": "no box"}])
    with pytest.raises(ValueError, match="row 1: has no answer, and its solution no"):
        open_task("math", tmp_path / "bad.jsonl").questions()


def test_scored_is_what_follows_the_thought(engine: ScriptedEngine, sums: Task) -> None:
    script = ["<think>\n4\n</think>\n\n5", "<think>\n6", "<think>\n1\n</think>\n\n8"]
    score, records = evaluate(sums, engine, script, "qwen3")
    assert [record["right"] for record in records] == [False, False, True]
    assert records[0]["thought"] == "4\n" and records[0]["response"] == "5"
    assert records[1]["response"] == ""
    assert score.right == 1


def test_several_answers_to_a_question_are_averaged(engine: ScriptedEngine, sums: Task) -> None:
    sampling = Sampling(1.0, 1, ())
    score, _ = evaluate(sums, engine, ["4", "1", "4", "5"], sampling=sampling, num_return=2, max_samples=2)
    assert (score.right, score.total, score.solved, score.num_questions) == (1, 4, 1, 2)
    lines = summary_table([score], {"mmlu": "no data"}).splitlines()
    assert lines[0].split()[:2] == ["task", "accuracy"]
    assert lines[1].split()[:5] == ["jsonl", "25.00%", "1", "/", "4"]
    assert lines[2] == "mmlu  FAILED: no data"


def test_graded_scores_have_a_mean_next_to_the_share_of_right_answers() -> None:
    def table(*scores: float) -> list[str]:
        score = TaskScore("essay", generate_s=1.0)
        keys = {"group": "all", "finish_reason": "stop"}
        _count(score, [{**keys, "index": i, "score": value, "right": value >= 1.0} for i, value in enumerate(scores)])
        return [" ".join(line.split()) for line in summary_table([score], {}).splitlines()]

    header, row = summary_rows = table(0.25, 1.0)
    assert len(summary_rows) == 2 and header.startswith("task accuracy mean score right / total")
    assert row.startswith("essay 50.00% 0.6250 1 / 2")
    assert "mean score" not in table(0.0, 1.0)[0]


# ---------------------------------------------------------------------- choices


def test_mmlu_takes_the_allowed_letter_and_examples_of_the_same_subject(engine: ScriptedEngine, mmlu: Path) -> None:
    engine.ends = False
    score, records = evaluate(open_task("mmlu", mmlu, num_shots=2), engine, ["A", "B", "C"])
    assert score.groups == {"astronomy": [1, 2], "physics": [1, 1]}
    assert (score.right, score.total) == (2, 3)
    assert score.group_mean == pytest.approx(0.75)
    assert [record["response"] for record in records] == ["A", "B", "C"]
    letters = {engine.tokenizer(letter, add_special_tokens=False)["input_ids"][0] for letter in "ABCD"}
    assert all(set(request.allowed_ids) == letters and request.max_tokens == 1 for request in engine.requests)
    assert engine.asked[2] == (
        "Each question about physics has one right answer. Give its letter.\n\n"
        "Which star is seen by day?\nA. Vega\nB. Sirius\nC. the Sun\nD. Rigel\nAnswer: C\n\n"
        "Which planet is nearest to the sun?\nA. Mercury\nB. Venus\nC. Earth\nD. Mars\nAnswer: A\n\n"
        "Which star is seen by day?\nA. Vega\nB. Sirius\nC. the Sun\nD. Rigel\nAnswer:"
    )


def test_examples_are_turns_in_a_chat(engine: ScriptedEngine, mmlu: Path) -> None:
    engine.ends = False
    evaluate(open_task("mmlu", mmlu / "test", num_shots=1), engine, ["A"] * 3, "qwen")
    assert engine.asked[0].count("<|im_start|>user") == 2
    assert "D. Rigel<|im_end|>\n<|im_start|>assistant\nC<|im_end|>" in engine.asked[0]


def test_a_missing_dev_split_is_an_error_that_says_what_to_do(mmlu: Path) -> None:
    (mmlu / "dev" / "physics_dev.csv").unlink()
    with pytest.raises(ValueError, match="no dev split with physics .* or pass --num-shots 0"):
        open_task("mmlu", mmlu, num_shots=2).questions()
    with pytest.raises(ValueError, match="--num-shots 5, but the dev split of astronomy has 2 examples"):
        open_task("mmlu", mmlu).questions()


def test_reasoning_reads_the_letter_from_the_whole_answer(engine: ScriptedEngine, mmlu: Path) -> None:
    script = ["It is Mercury, so the answer is (A).", "The answer is (B).", "The answer is C"]
    score, _ = evaluate(open_task("mmlu", mmlu, chain_of_thought=True), engine, script)
    assert (score.right, score.total) == (2, 3)
    assert not engine.requests[0].allowed_ids


def test_other_forms_of_choice_questions_are_read_alike(tmp_path: Path) -> None:
    header = ["", "Question", "A", "B", "C", "D", "Answer"]
    write_csv(tmp_path / "cmmlu" / "test" / "astronomy.csv", [["0", *PLANETS]], header)
    write_csv(tmp_path / "ceval" / "val" / "astronomy_val.csv", [["0", *PLANETS]], ["id", *header[1:]])
    table = pyarrow.Table.from_pylist([{"question": PLANETS[0], "subject": "astronomy", "choices": PLANETS[1:5], "answer": 0}])
    (tmp_path / "mmlu").mkdir()
    pyarrow.parquet.write_table(table, tmp_path / "mmlu" / "test-00000-of-00001.parquet")
    arc = {"question": PLANETS[0], "choices": {"text": PLANETS[1:5], "label": list("ABCD")}, "answerKey": "A"}
    write_jsonl(tmp_path / "arc" / "astronomy_test.jsonl", [arc])
    results = [
        open_task(name, tmp_path / folder, num_shots=0).questions()
        for name, folder in (("cmmlu", "cmmlu"), ("ceval", "ceval"), ("mmlu", "mmlu"), ("multiple_choice", "arc"))
    ]
    assert {(q.text, q.label, q.group, q.choices) for (q,) in results} == {
        (
            "Which planet is nearest to the sun?\nA. Mercury\nB. Venus\nC. Earth\nD. Mars",
            "A",
            "astronomy",
            ("A", "B", "C", "D"),
        )
    }


@pytest.mark.parametrize(
    ("cells", "error"),
    [([*PLANETS[:5], "E"], "row 1: the answer 'E' is none of A, B, C, D"), (PLANETS[:5], "row 1: 5 cells; expected 6")],
)
def test_a_malformed_choice_question_is_an_error_that_names_its_row(tmp_path: Path, cells: list[str], error: str) -> None:
    write_csv(tmp_path / "x_test.csv", [cells])
    with pytest.raises(ValueError, match=error):
        open_task("mmlu", tmp_path, num_shots=0).questions()


def test_boolq_answers_with_a_word_that_is_told_by_its_first_token(engine: ScriptedEngine, tmp_path: Path) -> None:
    rows = [
        {"passage": "Ice floats.", "question": f"does {thing} float?", "answer": thing == "ice"} for thing in ("ice", "lead")
    ]
    write_jsonl(tmp_path / "dev.jsonl", rows)
    write_jsonl(tmp_path / "train.jsonl", rows)
    engine.ends = False
    score, _ = evaluate(open_task("boolq", tmp_path, num_shots=1), engine, ["y", "y"])
    assert (score.right, score.total) == (1, 2)
    assert engine.asked[1].endswith("Answer: yes\n\nPassage: Ice floats.\nQuestion: does lead float?\nAnswer:")


def test_choices_that_start_with_the_same_token_cannot_be_distinguished(tokenizer: PreTrainedTokenizerFast) -> None:
    prompt_format = PromptFormat(tokenizer, None)
    assert set(_find_choice_tokens(prompt_format, ("yes", "no")).values()) == {"yes", "no"}
    with pytest.raises(ValueError, match="with the same token"):
        _find_choice_tokens(prompt_format, ("true", "too"))


# ---------------------------------------------------------------------- programs and the rest

PROMPT = 'import math\n\ndef area(r):\n    """Area of a circle."""\n'
TESTS = "def check(candidate):\n    assert abs(candidate(1) - 3.14159) < 1e-3\n"


@pytest.mark.parametrize("packed", [False, True])
def test_human_eval_runs_continuations_and_whole_functions(engine: ScriptedEngine, tmp_path: Path, packed: bool) -> None:
    row = {"task_id": "0", "prompt": PROMPT, "test": TESTS, "entry_point": "area"}
    lines = "".join(json.dumps(row) + "\n" for _ in range(4))
    path = tmp_path / ("h.jsonl.gz" if packed else "h.jsonl")
    if packed:
        path.write_bytes(gzip.compress(lines.encode()))
    else:
        path.write_text(lines)
    script = [
        "    return math.pi * r * r\n\ndef other():\n    pass",
        "Here:\n```python\ndef area(r):\n    return math.pi * r ** 2\n```\nDone.",
        "    return r\n",
        "```python\n    return math.pi * r * r\n```",
    ]
    score, records = evaluate(open_task("human_eval", path), engine, script, None if packed else "qwen")
    if packed:  # a base model stops at the next function; its fenced answers are cut too, so only the first can be right
        assert records[0]["right"] and not records[2]["right"]
        assert records[0]["response"] == "    return math.pi * r * r\n"
    else:
        assert [record["right"] for record in records] == [True, True, False, True]
    assert score.total == 4


@pytest.mark.parametrize(
    ("response", "label", "right"),
    [
        ("We see. So the answer is (B).", "(B)", 1.0),
        ("So the answer is B", "(B)", 1.0),
        ("So the answer is True.", "true", 1.0),
        ("The answer is 3. No, the answer is 4.", "4", 1.0),
        ("] ) }", "] ) }", 1.0),
        ("So the answer is (A).", "(B)", 0.0),
        ("", "yes", 0.0),
    ],
)
def test_bbh_compares_the_answer_stated_last(response: str, label: str, right: float) -> None:
    assert bbh_match(response, label) == right


def test_bbh_asks_with_the_benchmarks_own_prompts(engine: ScriptedEngine, tmp_path: Path) -> None:
    (tmp_path / "bbh").mkdir()
    content = {"canary": "x", "examples": [{"input": "not True is", "target": "False"}]}
    (tmp_path / "bbh" / "boolean_expressions.json").write_text(json.dumps(content, indent=2))
    with pytest.raises(ValueError, match="cot-prompts/boolean_expressions.txt is missing"):
        open_task("bbh", tmp_path).questions()
    (tmp_path / "cot-prompts").mkdir()
    (tmp_path / "cot-prompts" / "boolean_expressions.txt").write_text(
        "canary\n-----\nEvaluate.\n\nQ: True\nA: So the answer is True."
    )
    score, _ = evaluate(open_task("bbh", tmp_path), engine, ["So the answer is False.\n\nQ: again"])
    assert engine.asked[0] == (
        "Evaluate.\n\nQ: True\nA: So the answer is True.\n\nQ: not True is\nA: Let's think step by step."
    )
    assert (score.right, score.groups) == (1, {"boolean_expressions": [1, 1]})


def test_jsonl_needs_a_scorer_that_exists(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", [{"question": "2+2?", "label": "4"}])
    with pytest.raises(ValueError, match="--scorer must name a reward function"):
        open_task("jsonl", path)
    with pytest.raises(ValueError, match="unknown reward function 'exact_mach'; did you mean 'exact_match'"):
        open_task("jsonl", path, scorer="exact_mach")


# ---------------------------------------------------------------------- around the tasks


def test_every_registered_task_has_a_class() -> None:
    assert all(issubclass(load_task_class(name), Task) for name in TASKS)
    with pytest.raises(ValueError, match="--task gsm8 is unknown; did you mean gsm8k"):
        load_task_class("gsm8")


def test_samples_are_spread_over_subjects(engine: ScriptedEngine, mmlu: Path) -> None:
    engine.ends = False
    score, _ = evaluate(open_task("mmlu", mmlu, num_shots=0), engine, ["A", "C"], max_samples=2)
    assert score.groups == {"astronomy": [1, 1], "physics": [1, 1]}


def test_examples_are_left_out_where_a_prompt_would_be_too_long(engine: ScriptedEngine, mmlu: Path) -> None:
    engine.ends = False
    score, _ = evaluate(open_task("mmlu", mmlu, num_shots=2), engine, ["A", "C", "C"], max_model_len=230)
    assert score.dropped_shots == 4  # each prompt has room for one of two or for none
    assert all(len(request.prompt_ids) < 230 for request in engine.requests)
    with pytest.raises(ValueError, match="fit with the answer in 100"):
        prepare_task(open_task("mmlu", mmlu, num_shots=2), PromptFormat(engine.tokenizer, None), settings(max_model_len=100))


def test_a_scorer_that_cannot_score_at_all_fails_the_task(engine: ScriptedEngine, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", [{"prompt": "p", "label": "l", "tests": 5}])
    with pytest.raises(TaskError, match="code could score no answer"):
        evaluate(open_task("jsonl", path, scorer="code"), engine, ["print(1)"])


# ---------------------------------------------------------------------- the registry

TASK = '''
from mindspeed_rl.inference.tasks.task import Question, Task
from mindspeed_rl.inference.tasks.files import read_data_rows

class Riddles(Task):
    """Rows of riddle and solution."""

    name = "riddles"
    scorer = "my_tasks:said"

    def questions(self):
        return [Question(text=row["riddle"], label=row["solution"], cue="It is") for _, row in read_data_rows(self.path)]

def said(response, label):
    return float(label in response)

class NoTask:
    pass
'''


@pytest.mark.parametrize("name", TASKS)
def test_every_task_has_the_interface(name: str, tmp_path: Path) -> None:
    kind = load_task_class(name)
    assert issubclass(kind, Task) and kind.questions is not Task.questions and kind.__doc__
    task = kind(tmp_path, TaskOptions(scorer="exact_match"))
    assert task.name in TASKS and task.scorer == "exact_match"
    assert callable(import_scorer(kind.scorer))


def test_a_task_of_ones_own_is_one_file_and_one_line(
    engine: ScriptedEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_tasks.py").write_text(TASK)
    monkeypatch.syspath_prepend(tmp_path)
    path = write_jsonl(
        tmp_path / "r.jsonl", [{"riddle": "White, falls?", "solution": "snow"}, {"riddle": "Wet?", "solution": "sea"}]
    )
    score, _ = evaluate(open_task("my_tasks:Riddles", path), engine, [" snow.", " rain."])
    assert engine.asked[0] == "White, falls?\nIt is"
    assert (score.task, score.right, score.total) == ("riddles", 1, 2)
    with pytest.raises(ValueError, match="my_tasks:NoTask is not a subclass of mindspeed_rl.inference.tasks.task:Task"):
        load_task_class("my_tasks:NoTask")
    monkeypatch.setitem(TASKS, "riddles", "my_tasks:Riddles")
    assert load_task_class("riddles") is load_task_class("my_tasks:Riddles")
    with pytest.raises(ValueError, match="--task ridles is unknown; did you mean riddles"):
        load_task_class("ridles")
