"""The scorer for programs: a table of solutions and tests in all four forms."""

import json

import pytest

from mindspeed_rl.rewards.code import code, extract_program
from mindspeed_rl.rewards.samples import RewardSettings

SETTINGS = RewardSettings(reward_timeout_s=10.0)
ADD = "Here you are:\n```python\ndef add(a, b):\n    return a + b\n```\n"
ASSERTS = ["assert add(1, 2) == 3", "assert add('a', 'b') == 'ab'"]
ECHO = "```python\nn = int(input())\nprint(sum(map(int, input().split())))\n```"
SUMS = {"inputs": ["2\n1 2\n", "3\n1 2 3\n"], "outputs": ["3\n", "6"]}
CALLS = {"inputs": [[1, 2], ["a", "b"]], "outputs": [3, "ab"], "fn_name": "add"}


@pytest.mark.parametrize(
    ("response", "tests", "share"),
    [
        (ADD, ASSERTS, 1.0),
        (ADD, json.dumps(ASSERTS), 1.0),
        (ADD, ASSERTS[0], 1.0),
        (ADD.replace("a + b", "a - b"), ASSERTS, 0.0),
        (ADD.replace("a + b", "3"), ASSERTS, 0.5),
        ("first\n```python\nwrong\n```\nthen\n" + ADD, ASSERTS, 1.0),  # the last block counts
        ("```\n" + "def add(a, b): return a + b\n```", ASSERTS, 1.0),
        ("def add(a, b): return a + b", ASSERTS, 1.0),  # no fence, but a program
        ("def 加(a, b): return a + b\nadd = 加", ASSERTS, 1.0),
        ("I cannot do that.", ASSERTS, 0.0),
        ("```python\ndef add(a, b):\n    return a +", ASSERTS, 0.0),  # cut off
        ("", ASSERTS, 0.0),
        (ADD.replace("a + b", "a + b\nimport sys; sys.exit(0)"), ASSERTS, 0.0),  # leaves before the tests
        (ADD.replace("a + b", "a + b\nimport os; os._exit(0)"), ASSERTS, 0.0),
        (ADD.replace("a + b", "a + b\nprint('[1, 1]')"), ["assert add(1, 1) == 3"], 0.0),  # prints what the harness would
        (ECHO, SUMS, 1.0),
        (ECHO.replace("sum(", "max("), SUMS, 0.0),
        (ECHO.replace("print(", "print(3) if n == 2 else print(1 + "), SUMS, 0.5),
        ("```python\nraise SystemExit(1)\n```", {"inputs": [""], "outputs": [""]}, 0.0),
        (ADD, CALLS, 1.0),
        ("```python\nclass Solution:\n    def add(self, a, b):\n        return a + b\n```", json.dumps(CALLS), 1.0),
        ("```python\ndef add(a, b):\n    return (a, b)\n```", {"inputs": [[1, 2]], "outputs": [[1, 2]], "fn_name": "add"}, 1.0),
        ("```python\ndef sub(a, b):\n    return a - b\n```", CALLS, 0.0),
    ],
)
def test_the_score_is_the_share_of_tests_passed(response: str, tests: object, share: float) -> None:
    scores = code(response, SETTINGS, tests)
    assert scores["score"] == share and scores["all_passed"] == float(share == 1.0)


def test_a_test_program_with_an_entry_point_checks_the_candidate() -> None:
    check = "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(-1, 1) == 0\n"
    assert code(ADD, SETTINGS, tests=check, entry_point="add")["score"] == 1.0
    assert code(ADD.replace("a + b", "3"), SETTINGS, tests=check, entry_point="add")["score"] == 0.0


def test_a_program_that_never_ends_is_wrong_and_not_a_failed_score() -> None:
    slow = "```python\nwhile True: pass\n```"
    assert code(slow, RewardSettings(reward_timeout_s=0.5), SUMS)["score"] == 0.0


@pytest.mark.parametrize("tests", [{}, {"inputs": ["1"], "outputs": []}, [], [1, 2], 5, None])
def test_tests_of_no_known_form_are_an_error(tests: object) -> None:
    with pytest.raises(ValueError, match="code tests"):
        code(ADD, SETTINGS, tests)


def test_the_last_block_is_the_program() -> None:
    assert extract_program("```python\na = 1\n```\n```py\nb = 2\n```") == "b = 2\n"
    assert extract_program("just words") is None


#: a program that reads its own file for what it is compared with, and says that everything is right
CHEAT = """
import re
text = open(__file__).read()
class Anything:
    def __eq__(self, other): return True
def f(*_):
    found = re.findall(r"== *([0-9]+)", text)
    return int(found[0]) if found else Anything()
mark = re.findall(r"[0-9a-f]{32}", text)[-1]
print(mark + "[1, 1]")
import atexit
atexit.register(lambda: print(mark + "[1, 1]"))
"""


@pytest.mark.parametrize(
    ("tests", "entry_point"),
    [
        (["assert f(3) == 4711", "assert 8 == f(1)"], None),
        (["METADATA = {}\ndef check(candidate):\n    assert candidate(3) == 4711\n    assert candidate(1) == 8\n"], "f"),
    ],
)
def test_what_statements_expect_is_nowhere_in_the_sandbox(tests: list[str], entry_point: str | None) -> None:
    settings = RewardSettings()
    assert code(f"```python\n{CHEAT}```", settings, label=tests, entry_point=entry_point)["score"] == 0.0
    honest = "def f(x): return {3: 4711, 1: 8}[x]"
    assert code(f"```python\n{honest}\n```", settings, label=tests, entry_point=entry_point)["score"] == 1.0


@pytest.mark.parametrize(
    ("returned", "literal"),
    [
        ("__import__('collections').Counter('aab')", "{'a': 2, 'b': 1}"),
        ("__import__('decimal').Decimal('0.5')", "0.5"),
        ("__import__('fractions').Fraction(1, 2)", "0.5"),
        ("{(1, 2): {3}}", "{(1, 2): {3}}"),
        ("(1, [2, None, True], b'x', 1j)", "(1, [2, None, True], b'x', 1j)"),
        ("True", "1"),
        ("10 ** 400", str(10**400)),
        ("float('inf')", "1e999"),
        ("type('Name', (str,), {})('abc')", "'abc'"),
    ],
)
def test_values_that_equal_a_literal_in_python_equal_it_here(returned: str, literal: str) -> None:
    response = f"```python\ndef f(): return {returned}\n```"
    assert code(response, RewardSettings(), label=[f"assert f() == {literal}"])["score"] == 1.0


@pytest.mark.parametrize(
    ("returned", "literal"), [("[1, 2]", "(1, 2)"), ("'1'", "1"), ("float('nan')", "0.0"), ("{1: 2}", "{1: 3}"), ("f", "0")]
)
def test_values_that_do_not_equal_a_literal_do_not_here(returned: str, literal: str) -> None:
    response = f"```python\ndef f(): return {returned}\n```"
    assert code(response, RewardSettings(), label=[f"assert f() == {literal}"])["score"] == 0.0


def test_statements_that_do_more_than_compare_are_run_beside_those_that_compare() -> None:
    tests = ["assert f(1) == 2", "assert abs(f(2) - 3) < 1e-6", "x = f(3)\nassert x == 4", "assert f(4) == 6"]
    assert code("```python\ndef f(x): return x + 1\n```", RewardSettings(), label=tests)["score"] == 3 / 4
