r"""Scorer for programs: the last Python block after the thought, run against unit tests in the sandbox (`sandbox.py`).

Tests are the column `tests` if there is one, else the label; JSON text or values:

    ["assert f(1) == 2", ...]                               statements about the solution (MBPP)
    "def check(candidate): ..." with a column entry_point   one test program (HumanEval)
    {"inputs": ["1 2\n"], "outputs": ["3\n"]}               standard input and output
    {"inputs": [[1, 2]], "outputs": [3], "fn_name": "add"}  calls with arguments, as JSON values; also a method of `Solution`
    the same with "outputs": [[3]]                          each value in a list of its own (APPS, TACO)
    {"inputs": ["1\n2"], "outputs": ["3"], "fn_name": "add"} each argument and each value as JSON text (LiveCodeBench)

A dict may have "tolerance": numbers then count as equal if they differ by no more than it, relative to values above 1.

The expected output never enters the sandbox. The same holds for statements that compare results with literals, as most do
(`statements.py`). Others (`assert is_close(f(1), 2)`) run in the sandbox in another process than the solution (`harness.py`),
except tests that define classes, catch exceptions of the solution or pass functions to it, whose process the solution could
manipulate: use those only where the policy does not learn to cheat.
"""

from __future__ import annotations

import ast
import json
import math
import time
import warnings
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from mindspeed_rl.isolation import harness
from mindspeed_rl.isolation.sandbox import SandboxLimits, SandboxResult, available_isolation, run_python
from mindspeed_rl.rewards.samples import RewardSettings
from mindspeed_rl.rewards.statements import are_equal, read_comparisons
from mindspeed_rl.rewards.text_scores import list_code_blocks
from mindspeed_rl.thoughts import remove_thought

_TEST_LIMIT_S = 5.0
_TIMEOUT_FRACTION = 0.8  # slow code is wrong code; only a call that exceeds reward_timeout_s is a failed score
_PYTHON = ("python", "py", "python3", "python2", "python3.11", "ipython")
#: raised when text of a program cannot be parsed
_UNREADABLE = (ValueError, TypeError, RecursionError, MemoryError)


def code(
    response: str,
    settings: RewardSettings,
    label: object = None,
    tests: object = None,
    entry_point: str | None = None,
    prompt: str = "",
) -> dict[str, float | str]:
    """Return the fraction of passed tests as "score", "all_passed" (1.0 or 0.0) and "missing_isolation", if any is missing.

    Raises:
        ValueError: the tests have none of the forms above.
    """
    cases = read_tests(label if tests is None else tests)
    program = extract_program(remove_thought(response, prompt))
    if program is None:
        return {"score": 0.0, "all_passed": 0.0}
    deadline = time.monotonic() + _TIMEOUT_FRACTION * settings.reward_timeout_s
    if isinstance(cases, Mapping):
        passed, missing = _run_cases(program, cases, deadline)
    else:
        passed, missing = _run_statements(program, cases, entry_point, deadline)
    scores: dict[str, float | str] = {"score": sum(passed) / len(passed), "all_passed": float(all(passed))}
    return {**scores, "missing_isolation": ", ".join(missing)} if missing else scores


def warm_up() -> None:
    """Find the isolation that this machine offers, once: its workers are forked with the result."""
    available_isolation()


def extract_program(response: str) -> str | None:
    """Return the last block marked as Python, else the last unmarked one that is a program, and no output or value.

    A response without blocks is a program if it parses.
    """
    blocks = list_code_blocks(response)
    if not blocks:
        return response if response.strip() and _parse(response) is not None else None
    marked = [text for language, text in blocks if language in _PYTHON]
    unmarked = [text for language, text in blocks if not language]
    for text in reversed(unmarked if not marked else []):
        tree = _parse(text)
        if tree is not None and any(not isinstance(node, ast.Expr) or isinstance(node.value, ast.Call) for node in tree.body):
            return text
    return (marked or unmarked or [None])[-1]


def _parse(text: str) -> ast.Module | None:
    try:
        with warnings.catch_warnings():  # of invalid escapes, by the thousand
            warnings.simplefilter("ignore")
            return ast.parse(text)
    except (SyntaxError, *_UNREADABLE):
        # null bytes raise ValueError, deep nesting RecursionError or MemoryError
        return None


def read_tests(tests: object) -> Mapping[str, Any] | list[str]:
    """Return tests as a dict of inputs and outputs, or as statements.

    Raises:
        ValueError: they have none of the forms above.
    """
    if isinstance(tests, str):
        try:
            tests = json.loads(tests)
        except json.JSONDecodeError:
            tests = [tests]
    if isinstance(tests, Mapping):
        inputs, outputs = tests.get("inputs"), tests.get("outputs")
        if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs) or not inputs:
            raise ValueError("code tests need as many 'inputs' as 'outputs', at least one of each")
        tolerance = tests.get("tolerance") or 0.0
        if isinstance(tolerance, bool) or not isinstance(tolerance, (int, float)) or not 0 <= tolerance < 1:
            raise ValueError(f"code tests: 'tolerance' must be a number of at least 0 and below 1, not {tolerance!r}")
        if tests.get("fn_name") and all(isinstance(given, str) for given in inputs):
            return {**tests, **_read_json_lines(inputs, outputs)}
        return tests
    if isinstance(tests, Sequence) and tests and all(isinstance(test, str) and test.strip() for test in tests):
        return list(tests)
    raise ValueError(
        f"code tests must be statements or a dict of inputs and outputs, not {type(tests).__name__}: {str(tests)[:80]!r}"
    )


def _read_json_lines(inputs: list[str], outputs: list[Any]) -> dict[str, list[Any]]:
    """Return inputs and outputs of calls that are written as JSON text, one argument per line.

    Raises:
        ValueError: a text is not JSON.
    """
    try:
        arguments = [[json.loads(line) for line in given.split("\n") if line.strip()] for given in inputs]
        return {"inputs": arguments, "outputs": [json.loads(value) if isinstance(value, str) else value for value in outputs]}
    except ValueError as error:
        raise ValueError(
            f"code tests with 'fn_name' need inputs that are lists of arguments, or texts with one JSON value per line, and "
            f"outputs that are JSON text then: {error}"
        ) from error


def _run(script: str, stdin: bytes, deadline: float) -> SandboxResult | None:
    """Run within the time limits of the test and of the sample; None if no time is left."""
    remaining_s = min(_TEST_LIMIT_S, deadline - time.monotonic())
    if remaining_s <= 0:
        return None
    return run_python(script, stdin, SandboxLimits(wall_s=remaining_s, cpu_s=int(remaining_s) + 1))


@lru_cache(maxsize=1)
def _read_harness() -> str:
    return Path(harness.__file__).read_text(encoding="utf-8")


def _run_harness(program: str, deadline: float, **job: object) -> tuple[object, SandboxResult | None]:
    """Run a job of `harness.py`; return its result, None where it wrote none, and the result of the process."""
    source = program.encode("utf-8", "replace")
    result = _run(_read_harness(), len(source).to_bytes(8, "big") + source + json.dumps(job).encode(), deadline)
    return (None if result is None or result.timed_out else _parse_json(result.output)), result


def _parse_json(text: object) -> object:
    """Return the value of JSON that a program wrote; None for anything else."""
    try:
        return json.loads(text) if isinstance(text, (str, bytes)) else None
    except _UNREADABLE:
        return None


def _run_statements(
    program: str, tests: list[str], entry_point: str | None, deadline: float
) -> tuple[list[bool], Sequence[str]]:
    """Compare the tests that only compare here, run the others in the sandbox; one process for each kind."""
    compared = {index: pairs for index, test in enumerate(tests) if (pairs := read_comparisons(test, entry_point))}
    others = [index for index in range(len(tests)) if index not in compared]
    passed, missing = dict.fromkeys(range(len(tests)), False), set[str]()
    if compared:
        expressions = [expression for pairs in compared.values() for expression, _ in pairs]
        values, result = _run_harness(program, deadline, expressions=expressions)
        outputs = iter(_check_length(values, len(expressions)))
        for index, pairs in compared.items():
            # a list: `all` of a generator would stop early and leave values of this test to the next one
            passed[index] = all([are_equal(next(outputs), expected) for _, expected in pairs])
        missing |= set(result.missing if result else ())
    if others:
        run = [tests[index] + (f"\ncheck({entry_point})" if entry_point is not None else "") for index in others]
        outcomes, result = _run_harness(program, deadline, tests=run, entry_point=entry_point)
        passed |= {index: outcome == 1 for index, outcome in zip(others, _check_length(outcomes, len(run)))}
        missing |= set(result.missing if result else ())
    return list(passed.values()), sorted(missing)


def _check_length(output: object, length: int) -> list[object]:
    """Return the list that a harness wrote; a list of None where it wrote no list of this length."""
    return output if isinstance(output, list) and len(output) == length else [None] * length


def _run_cases(program: str, cases: Mapping[str, Any], deadline: float) -> tuple[list[bool], Sequence[str]]:
    passed: list[bool] = []
    missing: Sequence[str] = ()
    name, tolerance = cases.get("fn_name"), float(cases.get("tolerance") or 0.0)
    # the program reads standard input, so it is part of the script
    script = _read_harness().rpartition("\nif __name__")[0]
    script += f"\nexec(compile({program!r}, 'program.py', 'exec', dont_inherit=True), prepare_names({program!r}))\n"
    outputs = cases["outputs"]
    # APPS and TACO write each value in a list: one of the two readings holds for all calls
    is_wrapped = bool(name) and all(isinstance(value, list) and len(value) == 1 for value in outputs)
    unwrapped: list[bool] = []
    for given, expected in zip(cases["inputs"], outputs):
        if name:
            returned, result = _run_harness(program, deadline, call=name, arguments=given)
            # through JSON, as the returned value is: tuples become lists, keys become strings
            wrote = isinstance(returned, str)
            passed.append(wrote and _is_close(_parse_json(returned), json.loads(json.dumps(expected)), tolerance))
            if is_wrapped:
                unwrapped.append(wrote and _is_close(_parse_json(returned), json.loads(json.dumps(expected[0])), tolerance))
        else:
            result = _run(script, _text(given).encode("utf-8", "replace"), deadline)
            output = result.output if result is not None and result.status == 0 and not result.timed_out else None
            passed.append(output is not None and _is_same_text(output.decode("utf-8", "replace"), _text(expected), tolerance))
        missing = result.missing if result else missing
    return max(passed, unwrapped, key=sum) if is_wrapped else passed, missing


def _is_close(value: object, expected: object, tolerance: float) -> bool:
    """Return True for equal JSON values; numbers may differ by the tolerance, relative to expected ones above 1."""
    try:
        if isinstance(value, list) and isinstance(expected, list):
            return len(value) == len(expected) and all(_is_close(a, b, tolerance) for a, b in zip(value, expected))
        if isinstance(value, dict) and isinstance(expected, dict):
            return value.keys() == expected.keys() and all(_is_close(value[key], expected[key], tolerance) for key in expected)
        if tolerance and isinstance(value, (int, float)) and isinstance(expected, (int, float)):
            return math.isclose(value, expected, rel_tol=0.0, abs_tol=tolerance * max(1.0, abs(expected)))
        return value == expected
    except (RecursionError, OverflowError):
        return False


def _text(value: object) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _is_same_text(output: str, expected: str, tolerance: float) -> bool:
    """Compare lines without trailing blanks and without empty lines at the end, as online judges do; or words, as numbers."""
    lines, wanted = ([line.rstrip() for line in text.rstrip().splitlines()] for text in (output, expected))
    if lines == wanted or not tolerance:
        return lines == wanted
    words, wanted = output.split(), expected.split()
    return len(words) == len(wanted) and all(
        word == other or _is_close(_number(word), _number(other), tolerance) and _number(other) is not None
        for word, other in zip(words, wanted)
    )


def _number(word: str) -> float | None:
    try:
        return float(word) if len(word) < 40 else None
    except ValueError:
        return None
