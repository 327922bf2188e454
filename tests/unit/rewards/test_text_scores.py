"""Tables for exact match and multiple choice."""

import pytest

from mindspeed_rl.rewards.text_scores import exact_match, multiple_choice


@pytest.mark.parametrize(
    ("response", "label", "score"),
    [("42", "42", 1.0), (" 42\n", "42", 1.0), ("42", 42, 1.0), ("42.0", "42", 0.0), ("", "42", 0.0), ("四十二", "四十二", 1.0)],
)
def test_exact_match_ignores_blanks_around_the_text_only(response: str, label: object, score: float) -> None:
    assert exact_match(response, label) == score


@pytest.mark.parametrize(
    ("response", "label", "score"),
    [
        ("The answer is B.", "B", 1.0),
        ("The answer is (B)", "B", 1.0),
        ("The correct option is C, since ...", "C", 1.0),
        ("**Answer: D**", "D", 1.0),
        (r"\boxed{A}", "A", 1.0),
        (r"\boxed{\text{B}}", "B", 1.0),
        (r"\boxed{B. Paris}", "B", 1.0),
        ("<answer>(B)</answer>", "B", 1.0),
        ("The answer is A. No, the answer is B.", "B", 1.0),
        ("I think A is wrong, so C", "C", 1.0),
        ("A good guess is D", "D", 1.0),
        ("Answer: A, C", "AC", 1.0),
        (r"\boxed{ABD}", "A,B,D", 1.0),
        (r"\boxed{AB}", "ABD", 0.0),
        ("答案是C", "C", 1.0),
        ("故选：D", "D", 1.0),
        ("答案：【B】", "B", 1.0),
        ("选 BA", "AB", 1.0),
        ("答案是（AC）。", "AC", 1.0),
        ("the answer is a number", "A", 0.0),
        ("I don't know", "I", 0.0),
        ("The answer is B", "A", 0.0),
        ("", "A", 0.0),
    ],
)
def test_multiple_choice_reads_the_letters_a_response_settles_on(response: str, label: str, score: float) -> None:
    assert multiple_choice(response, label) == score
