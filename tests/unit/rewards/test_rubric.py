"""Rubrics: criteria with weights in the forms of published data, one request for all, and replies that judge them or do not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mindspeed_rl.rewards.judge import JudgeError, JudgeForm
from mindspeed_rl.rewards.rubric import (
    Criterion,
    RubricError,
    describe_criteria,
    read_rubric,
    read_verdicts,
    score_verdicts,
)
from mindspeed_rl.rewards.samples import RewardSample, RewardSettings

CRITERIA = (Criterion("names the capital", 5.0), Criterion("gives a year", 3.0), Criterion("invents a source", -4.0))


@pytest.mark.parametrize(
    "value",
    [
        # HealthBench
        [{"criterion": one.text, "points": one.weight, "tags": ["axis:accuracy"]} for one in CRITERIA],
        # Rubrics as Rewards
        [{"title": "t", "description": one.text, "weight": one.weight} for one in CRITERIA],
        {"rubrics": [{"criterion": one.text, "weight": one.weight} for one in CRITERIA]},
        json.dumps([{"text": f" {one.text} ", "score": one.weight} for one in CRITERIA]),
        json.dumps({"criteria": [{"question": one.text, "points": one.weight} for one in CRITERIA]}),
    ],
)
def test_published_forms_are_the_same_rubric(value: object) -> None:
    assert read_rubric(value, "row") == CRITERIA


def test_forms_of_nemo_gym_have_its_scores() -> None:
    """Inverse IF counts criteria; Finance Agent weighs by severity behind dealbreakers; VCQA counts what must be there."""
    inverse = read_rubric([{"id": "C1", "criteria": "three lines"}, {"id": "C2", "criteria": "no title"}], "row")
    assert score_verdicts(inverse, [True, False])["score"] == 1 / 2
    modifiers = [{"severity": 1.0}, {"severity": 2.0, "category": "must_pass"}, {"severity": 0.5, "category": "style"}, None]
    items = [{"operator": "o", "criteria": f"c{index}", "modifiers": each} for index, each in enumerate(modifiers)]
    finance = read_rubric(json.dumps(items), "row")
    assert score_verdicts(finance, [False, True, True, True])["score"] == (2 + 0.5 + 1) / 4.5
    assert score_verdicts(finance, [True, False, True, True])["score"] == 0.0
    assert "(2 points, required) c1" in describe_criteria(finance)
    vcqa = {"judge": [
        {"id": "1", "title": "Names the file.", "importance": "must have", "evidence_required": ["a.py", "b.py"]},
        {"id": "2", "title": "Shows the shape.", "importance": "Must Have ", "judge_kind": "rubric_only"},
        {"id": "3", "title": "Is short.", "importance": "good to have"},
        {"category": "must_have", "description": "Names the class."},
    ], "trace": [], "artifact": []}  # fmt: skip
    expected = "Names the file. (the answer must cite: a.py; b.py)", "Shows the shape.", "Names the class."
    assert read_rubric(vcqa, "row") == tuple(map(Criterion, expected))
    legal = read_rubric([{"id": "c", "title": "Dates", "match_criteria": "PASS if both dates are named"}], "row")
    assert legal == (Criterion("Dates: PASS if both dates are named"),)
    gdpval = read_rubric(json.dumps([{"score": 2, "criterion": "a", "required": None}, {"score": 5, "criterion": "b"}]), "row")
    assert score_verdicts(gdpval, [False, True])["score"] == 5 / 7


def test_scores_of_a_rubric_by_their_names() -> None:
    """MultiChallenge's modes: mean, all (min) and any (max) count each criterion once; a fault passes where it is not found."""
    table = {"weighted": [1.0, 0.625, 0.5, 0.0], "mean": [1.0, 2 / 3, 2 / 3, 0.0], "all": [1.0, 0, 0, 0], "any": [1.0, 1, 1, 0]}
    met = [True, True, False], [True, False, False], [True, True, True], [False, False, True]
    for rule, expected in table.items():
        assert [score_verdicts(CRITERIA, verdicts, rule)["score"] for verdicts in met] == expected


def test_a_question_whose_expected_answer_is_no_says_so() -> None:
    """NeMo Gym's rubrics of MultiChallenge: a question passes by the answer under pass_criteria, which may be NO."""
    yes, no = {"question": "Is it short?", "pass_criteria": "YES"}, {"question": "Does it\nlie?", "pass_criteria": "no"}
    expected = Criterion("Is it short?"), Criterion("Does it lie? (met where the answer is no)", 2.0)
    assert read_rubric([yes, {**no, "weight": 2}], "row") == expected


def test_texts_alone_weigh_one_each() -> None:
    assert read_rubric(["a", "b"], "row") == (Criterion("a"), Criterion("b"))


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ("be kind", "a rubric is a list of criteria"),
        ([], "a rubric is a list of criteria"),
        ("[1, ", "no JSON"),
        ([3], "criterion 1: 3 is neither"),
        ([{"weight": 2}], "it has no text under criterion, description, text, question, criteria, match_criteria, but weight"),
        ([{"criterion": "a", "weight": "much"}], "criterion 1: its weight is 'much'"),
        ([{"criterion": "a", "weight": True}], "its weight is True"),
        ([{"criterion": "a", "weight": float("nan")}], "its weight is nan"),
        ([{"criterion": "a", "weight": 10**400}], "a number other than 0"),
        ([{"criterion": "a", "weight": 0}], "a number other than 0"),
        ([{"question": "a?", "pass_criteria": "MAYBE"}], "criterion 1: its pass_criteria is 'MAYBE'; it must be YES or NO"),
        ([{"question": "a?", "pass_criteria": False}], "its pass_criteria is False"),
        ([{"criterion": "a", "weight": -1}], "no criterion has a positive weight"),
        # forms of NeMo Gym that have another score, or that no judge of texts can read
        ("(Partial)\n 1. Guessed the solution", "one text: '(Partial)\\n 1. Guessed the solution'; a prompt of your own"),
        ("Criterion 1: states it\nLevels: A=20 B=10 C=0", "and this is one text"),
        ([{"question": "a?", "weight": -1}, {"question": "b?"}], "criterion 1: its weight under weight is -1, and this form"),
        ([{"criterion": "a", "score": 2}, {"criterion": "b", "score": -1}], "criterion 2: its weight under score is -1"),
        ([{"criteria": "a", "modifiers": {"severity": -2.0}}], "its weight under modifiers.severity is -2"),
        ([{"criteria": "a", "modifiers": {"severity": 0}}], "a number other than 0"),
        ([{"criteria": "a", "modifiers": "high"}], "its modifiers are 'high'"),
        ([{"criterion": "a", "score": 2, "weight": 3}], "it has several weights: weight 3, score 2"),
        ([{"title": "t", "match_criteria": "m", "deliverables": ["memo.docx"]}], "it judges files (['memo.docx']"),
        ([{"id": "C1", "criteria1": "a"}], "but id, criteria1"),
        ({"judge": [{"title": "a", "importance": "good to have"}]}, "none of its 1 criteria has the importance 'must have'"),
        ({"judge": [{"title": "a", "importance": "nice"}]}, "judge 1: its importance is 'nice'"),
        ({"judge": [{"title": "a"}]}, "judge 1: its importance is None"),
        ({"judge": [{"importance": "must have"}]}, "judge 1: it has no text under title or description"),
        ({"judge": "text"}, "a rubric is a list of criteria"),
        ({"judge": [{"title": "a", "importance": "must", "evidence_required": "x"}]}, "its evidence_required is 'x'"),
        ({"trace": []}, "under one of rubrics, rubric, criteria, judge, but it has trace"),
        ({"rubric": ["a"], "criteria": ["b"]}, "but it has rubric and criteria"),
        (["a"] * 257, "257 criteria; one request has at most 256"),
    ],
)
def test_another_form_is_refused_with_its_place(value: object, sentence: str) -> None:
    with pytest.raises(RubricError) as error:
        read_rubric(value, "row 3")
    assert sentence in str(error.value) and str(error.value).startswith("row 3")


def test_scores_are_those_counted_by_hand() -> None:
    # (5 + 3) / 8, 5 / 8, (5 + 3 - 4) / 8, and never below 0
    met = [([True, True, False], 1.0), ([True, False, False], 0.625), ([True, True, True], 0.5), ([False, False, True], 0.0)]
    for verdicts, expected in met:
        assert score_verdicts(CRITERIA, verdicts) == {"score": expected, "met": sum(verdicts) / 3}


def test_the_last_object_of_a_reply_counts() -> None:
    reply = 'The answer says {"1": true, "2": true}. I find: {"1": false, "2": true}'
    assert read_verdicts(reply, 2) == [False, True]
    assert read_verdicts('```json\n{"2": false,\n "1": true}\n```', 2) == [True, False]


NO_VERDICTS = [
    "",
    "All met.",
    '{"1": true}',
    '{"1": true, "2": 1}',
    '{"1": true, "2": true, "3": true}',
    '{"1": "yes", "2": false}',
    "{{{",
]


@pytest.mark.parametrize("reply", NO_VERDICTS)
def test_a_reply_that_judges_other_criteria_is_no_score(reply: str) -> None:
    with pytest.raises(RubricError, match="criteria 1 to 2"):
        read_verdicts(reply, 2)


def sample(**columns: Any) -> RewardSample:
    return RewardSample(prompt="Which city?", response="Paris, 987.", label="Paris", columns=columns)


def test_one_request_has_all_criteria_and_its_reply_is_scored() -> None:
    form = JudgeForm(RewardSettings(judge_rubric="extra_info.rubrics"))
    rubric = [{"criterion": one.text, "points": one.weight} for one in CRITERIA]
    request = form.write_request(sample(extra_info={"rubrics": rubric}))
    text = request.text
    assert "1. (5 points) names the capital" in text and "3. (-4 points) invents a source" in text and "Paris, 987." in text
    assert '{"1": true, "2": false}' in text
    opinion = form.read_reply(request, 'Fine. {"1": true, "2": false, "3": false}')
    assert opinion.score == {"score": 0.625, "met": pytest.approx(1 / 3)}
    with pytest.raises(JudgeError, match="criteria 1 to 3"):
        form.read_reply(request, "Score: 9")


def test_equal_texts_with_other_weights_are_other_requests() -> None:
    form = JudgeForm(RewardSettings(judge_rubric="rubric"))
    light, heavy = (form.write_request(sample(rubric=[{"text": "a", "weight": w}, "b"])) for w in (1, 9))
    reply = '{"1": true, "2": false}'
    assert (form.read_reply(light, reply).score, form.read_reply(heavy, reply).score) == (
        {"score": 0.5, "met": 0.5},
        {"score": 0.9, "met": 0.5},
    )


def test_a_file_holds_for_all_rows_and_a_missing_column_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rubric.json"
    path.write_text(json.dumps({"rubrics": ["is polite"]}))
    assert "1. (1 points) is polite" in JudgeForm(RewardSettings(judge_rubric=str(path))).write_request(sample()).text
    with pytest.raises(JudgeError, match="no column rubric; its columns are level"):
        JudgeForm(RewardSettings(judge_rubric="rubric")).write_request(sample(level=1))
    with pytest.raises(ValueError, match="judge_rubric: there is no file"):
        JudgeForm(RewardSettings(judge_rubric=str(tmp_path / "none.json")))


def test_a_template_without_the_criteria_or_a_parser_of_its_own_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "prompt.txt"
    path.write_text("Judge {response}")
    with pytest.raises(ValueError, match="does not mention {criteria}"):
        JudgeForm(RewardSettings(judge_rubric="rubric", judge_prompt=str(path)))
    with pytest.raises(ValueError, match="judge_parser"):
        JudgeForm(RewardSettings(judge_rubric="rubric", judge_parser="mindspeed_rl.rewards.judge:mean_of_parts"))
