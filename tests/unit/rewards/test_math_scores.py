"""Tables of (response, label, score) for the mathematical verifiers; the scores are written down by hand."""

import json
from pathlib import Path

import pytest

from mindspeed_rl.rewards.answers.extraction import extract_closed_boxed, extract_final_answer, extract_last_boxed
from mindspeed_rl.rewards.answers.grading import _normalize_hendrycks, grade, normalize_minerva
from mindspeed_rl.rewards.math_scores import (
    acc,
    acc_for_dapo,
    accuracy,
    base_acc,
    boxed_grade,
    gsm8k,
    gsm8k_flexible,
    math_verify_reward,
    retool_reward,
)

RIGHT, WRONG, NO_BOX = 1.0, -0.5, -1.0


@pytest.mark.parametrize(
    ("response", "label", "score"),
    [
        # spelling, numbers
        (r"\boxed{42}", "42", RIGHT),
        (r"\boxed{41}", "42", WRONG),
        (r"\boxed{ 42. }", "42", RIGHT),
        (r"\boxed{1,000}", "1000", RIGHT),
        (r"\boxed{1000}", "1,000", RIGHT),
        (r"\boxed{-7}", "-7.0", RIGHT),
        (r"\boxed{.5}", "0.5", RIGHT),
        (r"\boxed{3.141593}", "3.1416", RIGHT),  # rounds to the last digit of the label
        (r"\boxed{3.1416}", "3.14159", WRONG),
        (r"\boxed{3.15}", "3.14159", WRONG),
        (r"\boxed{1.50}", "1.5", RIGHT),
        # fractions
        (r"\boxed{\frac{1}{2}}", "0.5", RIGHT),
        (r"\boxed{\dfrac12}", "1/2", RIGHT),
        (r"\boxed{\tfrac{1}{2}}", r"\frac12", RIGHT),
        (r"\boxed{-\frac{3}{4}}", "-0.75", RIGHT),
        (r"\boxed{\frac{2}{4}}", "1/2", RIGHT),
        (r"\boxed{\frac{1}{3}}", "0.5", WRONG),
        (r"\boxed{3\frac{1}{2}}", "3.5", RIGHT),
        (r"\boxed{1/0}", "1", WRONG),
        (r"\boxed{\frac{\sqrt{3}}{2}}", r"\frac{\sqrt 3}{2}", RIGHT),
        # units, money, degrees, percent
        (r"\boxed{5\text{ cm}}", "5", RIGHT),
        (r"\boxed{5 \mathrm{cm}^2}", "5", RIGHT),
        (r"\boxed{18 dollars}", "18", RIGHT),
        (r"\boxed{\$18}", "18", RIGHT),
        (r"\boxed{90^\circ}", "90", RIGHT),
        (r"\boxed{90^{\circ}}", "90", RIGHT),
        (r"\boxed{3 米}", "3", RIGHT),
        (r"\boxed{50\%}", "50", RIGHT),
        (r"\boxed{50\%}", "0.5", RIGHT),
        (r"\boxed{0.5}", r"50\%", RIGHT),
        (r"\boxed{51\%}", "50", WRONG),
        # sets, tuples, intervals, matrices
        (r"\boxed{\{1,2\}}", r"\{2,1\}", RIGHT),
        (r"\boxed{\{1,3\}}", r"\{2,1\}", WRONG),
        (r"\boxed{(-1, 2)}", "(-1,2)", RIGHT),
        (r"\boxed{(2,-1)}", "(-1,2)", WRONG),
        (r"\boxed{\left( 3, \frac{\pi}{2} \right)}", r"(3,\frac{\pi}{2})", RIGHT),
        (r"\boxed{[1,2)}", "[1,2)", RIGHT),
        (r"\boxed{(1,2)}", "[1,2)", WRONG),
        (r"\boxed{x \in [1,2]}", "[1,2]", RIGHT),
        (r"\boxed{(1, \infty)}", r"(1,\infty)", RIGHT),
        (r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", RIGHT),
        (r"\boxed{\begin{pmatrix}1\\3\end{pmatrix}}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", WRONG),
        # algebra
        (r"\boxed{x^2+2x+1}", "(x+1)^2", RIGHT),
        (r"\boxed{x=5}", "5", RIGHT),
        (r"\boxed{2\sqrt{2}}", r"\sqrt{8}", RIGHT),
        (r"\boxed{6!}", "720", RIGHT),
        (r"\boxed{10^{10^{10}}}", "1", WRONG),  # is not worked out
        # choices and words
        (r"\boxed{B}", "B", RIGHT),
        (r"\boxed{(B)}", "B", RIGHT),
        (r"\boxed{\text{B}}", "B", RIGHT),
        (r"\boxed{C}", "B", WRONG),
        (r"\boxed{Evelyn}", r"\text{Evelyn}", RIGHT),
        # several boxes, nested braces, other turns, Chinese, truncated, empty
        (r"first \boxed{1}, no, \boxed{2}", "2", RIGHT),
        (r"first \boxed{1}, no, \boxed{2}", "1", WRONG),
        (r"\boxed{\frac{1}{1+\frac{1}{2}}}", "2/3", RIGHT),
        ("<|im_start|>user \\boxed{1}<|im_start|>assistant \\boxed{2}<|im_end|>\\boxed{3}", "2", RIGHT),
        (r"所以答案是 \boxed{3}。", "3", RIGHT),
        (r"\boxed{１２}", "12", RIGHT),
        (r"\boxed 5", "5", RIGHT),
        (r"so the sum is \boxed{12", "12", RIGHT),
        (r"so the sum is \boxed{1", "12", WRONG),
        (r"so the sum is \boxed{", "12", NO_BOX),
        (r"\boxed{}", "12", NO_BOX),
        ("the answer is 12", "12", NO_BOX),
        ("答案是12", "12", NO_BOX),
        ("", "12", NO_BOX),
    ],
)
def test_acc_is_1_for_right_minus_half_for_wrong_and_minus_1_without_a_box(response: str, label: str, score: float) -> None:
    assert acc(response, label) == score


@pytest.mark.parametrize(
    ("given", "wanted", "same"),
    [
        ("5", "5.0", True),
        ("1/2", "0.5", True),
        (r"\frac{1}{2}", "1/2", True),
        ("2/4", "1/2", False),  # a fraction must be reduced as the label is
        ("3", "2+1", False),  # an integer must be written as one
        ("x+1", "1+x", True),
        (r"2\sqrt{2}", r"\sqrt{8}", True),
        ("a+b+c", "c+b+a", False),  # three letters are not worked out
        ("(1,2)", "(1, 2)", True),
        ("[1,2]", "(1,2)", False),
        ("(1,2)", "(1,2,3)", False),
        ("(1/2,3)", "(0.5,3)", True),
        ("10 cm", "10", True),
        ("1,000", "1000", True),
        ("2 million", "2000000", False),  # 2*10^6: a power of one digit, but not written as an integer
        (r"\text{Yes}", "yes", True),
        ("0.333333", "1/3", False),  # the difference must be exactly zero
        (r"50\%", "50", True),
        ("x=3", "3", True),
        (r"90^\circ", "90", True),
        ("", "5", False),
    ],
)
def test_grade_follows_mathruler(given: str, wanted: str, same: bool) -> None:
    assert grade(given, wanted) is same


@pytest.mark.parametrize(
    ("answer", "normal_form"),
    [
        (r"\dfrac12", r"\frac{1}{2}"),
        ("1/2", r"\frac{1}{2}"),
        ("0.5", r"\frac{1}{2}"),
        (r"\sqrt3", r"\sqrt{3}"),
        ("x = 5", "5"),
        (r"5\text{ cm}", "5"),
        (".25 ", "0.25"),
        (r"\left(1, 2\right)", "(1,2)"),
    ],
)
def test_hendrycks_normal_form_spells_as_the_math_grader(answer: str, normal_form: str) -> None:
    assert _normalize_hendrycks(answer) == normal_form


THINK = "<think>why</think><answer>so {}</answer>"


@pytest.mark.parametrize(
    ("response", "label", "free", "framed"),
    [
        (r"\boxed{3}", "3", 1.0, 0.0),
        (THINK.format(r"\boxed{3}"), "3", 1.0, 1.0),
        (THINK.format(r"\boxed{4}"), "3", 0.0, 0.0),
        (THINK.format("3"), "3", 0.0, 0.0),
        (THINK.format(r"\boxed{\frac{1}{2}}"), "0.5", 1.0, 1.0),
        (THINK.format(r"\boxed{3}") + " more", "3", 1.0, 0.0),
        (r"\boxed{3", "3", 0.0, 0.0),  # a box that never closes is none
        (r"\boxed{1} \boxed{3}", "3", 1.0, 0.0),
        ("<think>嗯</think>\n<answer>答案是\\boxed{3}</answer>", "3", 1.0, 1.0),
        ("", "3", 0.0, 0.0),
    ],
)
def test_base_acc_wants_the_frame_that_the_17k_and_ppo_scores_do_without(
    response: str, label: str, free: float, framed: float
) -> None:
    assert boxed_grade(response, label) == free
    assert base_acc(response, label) == framed


@pytest.mark.parametrize(
    ("response", "label", "score"),
    [
        ("Answer: 42", "42", 1.0),
        ("answer : 7 dollars", "7", 1.0),
        ("Answer: 1\nAnswer: 2", "2", 1.0),
        ("Answer: 1\nAnswer: 2", "1", -1.0),
        ("Answer: x = 5", "5", 1.0),
        ("Answer: 1,234", "1234", 1.0),
        (r"Answer: $\frac12$", r"\frac{1}{2}", 1.0),
        (r"Answer: \boxed{3}", "3", 1.0),
        ("Answer: 0.5", "1/2", -1.0),  # spelling only
        ("Answer: 3" + " " * 300, "3", -1.0),  # outside the last 300 characters
        ("42", "42", -1.0),
        ("", "42", -1.0),
    ],
)
def test_acc_for_dapo_compares_the_spelling_after_the_last_answer(response: str, label: str, score: float) -> None:
    assert acc_for_dapo(response, label) == score


@pytest.mark.parametrize(
    ("answer", "normal_form"),
    [
        ("x = 7", "7"),
        ("$5$", "5"),
        ("so $5$ apples", "5"),
        (r"\sqrt2", "\\sqrt{2}"),
        (r"\text{Monday}", "Monday"),
        ("12 square inches", "12"),
        ("30^\\circ", "30"),
        ("a dog", "dog"),
    ],
)
def test_minerva_normal_form_drops_units_articles_and_latex_wrapping(answer: str, normal_form: str) -> None:
    assert normalize_minerva(answer) == normal_form


@pytest.mark.parametrize(
    ("response", "label", "score"),
    [
        (THINK.format(r"\boxed{\frac{1}{2}}"), "0.5", 1.0),
        (THINK.format(r"\boxed{(x+1)^2}"), "x^2+2x+1", 1.0),
        (THINK.format(r"\boxed{3}"), "4", 0.0),
        (r"\boxed{3}", "3", 0.0),
        ("", "3", 0.0),
    ],
)
def test_math_verify_reward_looks_at_the_format_first(response: str, label: str, score: float) -> None:
    assert math_verify_reward(response, label) == score


@pytest.mark.parametrize(
    ("response", "label", "calls", "score"),
    [
        (r"\boxed{3}", "3", 0, 1.0),
        (r"\boxed{3}", "3", 5, 1.0),
        (r"\boxed{4}", "3", 0, -1.0),
        (r"\boxed{4}", "3", 2, -0.8),
        (r"\boxed{4}", "3", 20, 0.0),
        (r"\boxed{3.0}", "3", 0, -1.0),  # strict: the very same text
        (r"\boxed{3}" + "." * 100, "3", 0, -1.0),  # outside the last 100 characters
        ("", "3", 1, -0.9),
    ],
)
def test_retool_reward_forgives_a_wrong_answer_a_tenth_for_each_call(
    response: str, label: str, calls: int, score: float
) -> None:
    assert retool_reward(response, label, calls) == pytest.approx(score)


@pytest.mark.parametrize(
    ("response", "solution", "score"),
    [
        (r"so \boxed{5}", "5", 1.0),
        (r"so \boxed{5}", r"thus $x = 5$", 1.0),
        ("<think>x</think><answer>5</answer>", "5", 1.0),
        ("<think>x</think><answer>5</answer>", "<answer>5</answer>", 1.0),
        (r"final answer is $\frac{1}{2}$", "0.5", 1.0),
        ("it is 5.", "5", 0.0),  # ms-swift looks for LaTeX unless there is an <answer>
        (r"so \boxed{6}", "5", 0.0),
        (r"so \boxed{5}", "", 0.0),
        (r"so \boxed{\sqrt{3}}", r"\sqrt{3}", 1.0),  # bare LaTeX, which math-verify by itself does not read
        (r"so \boxed{\{2, 1\}}", r"\{1, 2\}", 1.0),
        (r"so \boxed{2}", r"\{1, 2\}", 0.0),
        (r"so \boxed{(1,2]}", "(1,2]", 1.0),
        (r"so \boxed{[1,2]}", "(1,2]", 0.0),
        (r"so \boxed{\pm 2}", r"\pm 2", 1.0),
        (r"so \boxed{5\text{ cm}}", "5 cm", 1.0),
        (r"so \boxed{1000}", "1,000", 1.0),
        (r"so \boxed{\sqrt{2}}", r"\sqrt{3}", 0.0),
        ("", "5", 0.0),
    ],
)
def test_accuracy_is_1_or_0_as_in_ms_swift(response: str, solution: str, score: float) -> None:
    assert accuracy(response, solution) == score


@pytest.mark.parametrize(
    ("response", "label", "strict", "flexible"),
    [
        ("9 * 2 = 18\n#### 18", "9 * 2 = <<9*2=18>>18\n#### 18", 1.0, 1.0),
        ("#### $1,234", "1234", 1.0, 1.0),
        ("#### 18.00", "18", 1.0, 1.0),
        ("#### 19", "18", 0.0, 0.0),
        ("#### 1\n#### 18", "18", 1.0, 1.0),
        ("it is 18", "18", 0.0, 1.0),
        (r"\boxed{18}, which is 2 more than 16", "18", 0.0, 1.0),
        ("答案是 18 元", "18", 0.0, 1.0),
        ("-3", "#### -3", 0.0, 1.0),
        ("no idea", "18", 0.0, 0.0),
        ("", "18", 0.0, 0.0),
    ],
)
def test_gsm8k_wants_hashes_and_its_flexible_form_any_last_number(
    response: str, label: str, strict: float, flexible: float
) -> None:
    assert gsm8k(response, label) == strict
    assert gsm8k_flexible(response, label) == flexible


@pytest.mark.parametrize(
    ("text", "last", "closed"),
    [
        (r"\boxed{a}", "a", "a"),
        (r"\boxed{{a}{b}} and \boxed{c{d}e}", "c{d}e", "c{d}e"),
        (r"\fbox{a}", "a", None),
        (r"$\boxed 7$", "7", None),
        (r"\boxed{a{b}", "a{b}", None),
        ("none", None, None),
    ],
)
def test_boxes_are_read_with_their_nested_braces(text: str, last: str | None, closed: str | None) -> None:
    assert extract_last_boxed(text) == last
    assert extract_closed_boxed(text) == closed


def test_final_answer_falls_back_to_the_phrase_and_then_to_the_last_number() -> None:
    assert extract_final_answer("3 and 4. The answer is 7.\nBye 9") == "7"
    assert extract_final_answer("答案是7。") == "7"
    assert extract_final_answer("first 3, then 1,200") == "1200"
    assert extract_final_answer("nothing") == ""


def test_every_label_of_a_table_of_contest_answers_is_right_about_itself() -> None:
    """A label that its own verifier rejects could never be earned."""
    labels = json.loads((Path(__file__).parent / "contest_answers.json").read_text(encoding="utf-8"))
    rejected = [label for label in labels if acc(f"\\boxed{{{label}}}", label) != 1.0 or not grade(label, label)]
    assert len(labels) > 40 and not rejected
