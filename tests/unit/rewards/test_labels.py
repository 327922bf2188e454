"""Labels that no response can match are found before a run starts."""

import pytest

from mindspeed_rl.rewards.labels import try_labels
from mindspeed_rl.rewards.math_scores import acc, accuracy

SOLUTION = "2+4=<<2+4=6>>6\n#### 6"


def _rows(labels: list[object], **columns: object) -> list[dict[str, object]]:
    return [{"label": label, "columns": columns} for label in labels]


def test_a_solution_of_gsm8k_is_its_last_number() -> None:
    for scorer in (acc, accuracy):
        assert scorer(r"\boxed{6}", SOLUTION) == 1.0
        assert scorer(r"\boxed{4}", SOLUTION) < 1.0


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        (
            "acc",
            ["6", r"\frac{1}{2}", "red", ["6", "six"], SOLUTION],
            ["<answer>6</answer>", "We add.\nSo 6.", '{"answer": 6}'],
        ),
        ("base_acc", ["6", "x^2"], [SOLUTION, "<answer>6</answer>", r"So \boxed{6}", '{"a": 1}']),
        ("math_17k_acc", ["34"], [SOLUTION]),
        ("accuracy", ["6", r"Adding gives $x=6$, so \boxed{6}.", "<answer>6</answer>"], []),
        ("multiple_choice", ["B", "(b)", "B) Paris", "<answer>B</answer>"], ["Paris", "1"]),
        ("gsm8k", ["6", SOLUTION, "$1,000"], ["six apples", "x"]),
        ("code", ['["assert f(1) == 2"]', {"inputs": ["1\n"], "outputs": ["1\n"]}], ['{"inputs": []}', 5]),
        ("exact_match", ["anything", SOLUTION], []),
        ("format", ["", SOLUTION], []),
    ],
)
def test_the_share_of_labels_that_cannot_be_matched_is_a_warning_and_above_a_half_an_error(
    name: str, good: list[object], bad: list[object]
) -> None:
    assert try_labels([name], _rows(good)) == ([], [])
    for label in bad:
        warnings, errors = try_labels([name], _rows([label, *[good[0]] * 3]))
        assert not errors and f"1 of 4 labels for {name}" in warnings[0] and "row 0" in warnings[0], label
        warnings, errors = try_labels([name], _rows([label, label, good[0]]))
        assert not warnings and f"2 of 3 labels for {name}" in errors[0], label


def test_rows_without_labels_and_functions_of_the_user_are_left_alone() -> None:
    assert try_labels(["acc", "my:function"], _rows([None, None])) == ([], [])
    assert try_labels(["code"], _rows([None], tests='["assert f(1) == 2"]')) == ([], [])
    assert try_labels(["code"], _rows([None], tests="5"))[1] != []
