r"""Scorer for programs: the last fenced block of the response, run against unit tests in the sandbox (`sandbox.py`).

Tests are the column `tests` if there is one, else the label; JSON text or values:

    ["assert f(1) == 2", ...]                               statements, run after the solution (MBPP)
    "def check(candidate): ..." with a column entry_point   one test program (HumanEval)
    {"inputs": ["1 2\n"], "outputs": ["3\n"]}               standard input and output
    {"inputs": [[1, 2]], "outputs": [3], "fn_name": "add"}  calls with arguments, as JSON values; also a method of `Solution`

The expected output never enters the sandbox. The same holds for statements that compare results with literals, as most do
(`statements.py`); others (`assert is_close(f(1), 2)`) run in the process of the solution, which could read them: use
them only where the policy does not learn to cheat, or convert them.
"""

from __future__ import annotations

import json
import math
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from mindspeed_rl.rewards.answers.statements import EVALUATION, are_equal, read_comparisons
from mindspeed_rl.rewards.samples import RewardSettings
from mindspeed_rl.rewards.sandbox import SandboxLimits, SandboxResult, run_python

_FENCE = re.compile(r"```(?:python|py|python3)?[ \t]*\r?\n(.*?)```", re.DOTALL | re.IGNORECASE)
_TEST_LIMIT_S = 5.0
_TIMEOUT_FRACTION = 0.8  # slow code is wrong code; only a call that exceeds reward_timeout_s is a failed score

_STATEMENTS = """
import json as _json, sys as _sys
_outcomes = []
for _test in _json.loads({tests}):
    try:
        exec(compile(_test, "test", "exec"), globals())
        _outcomes.append(1)
    except BaseException:
        _outcomes.append(0)
_sys.stdout.write({mark} + _json.dumps(_outcomes) + "\\n")
"""
_CALL = """
import json as _json, sys as _sys
_call = _json.loads({call})
_function = getattr(Solution(), _call["name"]) if "Solution" in globals() else globals()[_call["name"]]
_returned = _function(*_call["arguments"])
_sys.stdout.write({mark} + _json.dumps(_returned, default=list) + "\\n")
"""


def code(
    response: str, settings: RewardSettings, label: object = None, tests: object = None, entry_point: str | None = None
) -> dict[str, float | str]:
    """Return the fraction of passed tests as "score", "all_passed" (1.0 or 0.0) and "missing_isolation", if any is missing.

    Raises:
        ValueError: the tests have none of the forms above.
    """
    cases = _read_tests(label if tests is None else tests)
    program = extract_program(response)
    if program is None:
        return {"score": 0.0, "all_passed": 0.0}
    deadline = time.monotonic() + _TIMEOUT_FRACTION * settings.reward_timeout_s
    if isinstance(cases, Mapping):
        passed, missing = _run_cases(program, cases, deadline)
    else:
        passed, missing = _run_statements(program, cases, entry_point, deadline)
    scores: dict[str, float | str] = {"score": sum(passed) / len(passed), "all_passed": float(all(passed))}
    return {**scores, "missing_isolation": ", ".join(missing)} if missing else scores


def extract_program(response: str) -> str | None:
    """Return the last fenced Python block; a response without fences is a program if it compiles."""
    blocks = _FENCE.findall(response)
    if blocks:
        return blocks[-1]
    try:
        compile(response, "response", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        # null bytes raise ValueError, deep nesting RecursionError or MemoryError
        return None
    return response if response.strip() else None


def _read_tests(tests: object) -> Mapping[str, Any] | list[str]:
    if isinstance(tests, str):
        try:
            tests = json.loads(tests)
        except json.JSONDecodeError:
            tests = [tests]
    if isinstance(tests, Mapping):
        inputs, outputs = tests.get("inputs"), tests.get("outputs")
        if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs) or not inputs:
            raise ValueError("code tests need as many 'inputs' as 'outputs', at least one of each")
        return tests
    if isinstance(tests, Sequence) and tests and all(isinstance(test, str) and test.strip() for test in tests):
        return list(tests)
    raise ValueError(
        f"code tests must be statements or a dict of inputs and outputs, not {type(tests).__name__}: {str(tests)[:80]!r}"
    )


def _run(program: str, stdin: str, deadline: float) -> SandboxResult | None:
    """Run within the time limits of the test and of the sample; None if no time is left."""
    remaining_s = min(_TEST_LIMIT_S, deadline - time.monotonic())
    if remaining_s <= 0:
        return None
    return run_python(program, stdin.encode("utf-8", "replace"), SandboxLimits(wall_s=remaining_s, cpu_s=int(remaining_s) + 1))


def _run_statements(
    program: str, tests: list[str], entry_point: str | None, deadline: float
) -> tuple[list[bool], Sequence[str]]:
    """Compare the tests that only compare here, run the others in the sandbox; one process for each kind."""
    compared = {index: pairs for index, test in enumerate(tests) if (pairs := read_comparisons(test, entry_point))}
    others = [index for index in range(len(tests)) if index not in compared]
    passed, missing = dict.fromkeys(range(len(tests)), False), set[str]()
    if compared:
        expressions = [expression for pairs in compared.values() for expression, _ in pairs]
        values, result = _run_harness(program, EVALUATION, deadline, expressions=expressions)
        outputs = iter(_check_length(values, len(expressions)))
        for index, pairs in compared.items():
            # a list: `all` of a generator would stop early and leave values of this test to the next one
            passed[index] = all([are_equal(next(outputs), expected) for _, expected in pairs])
        missing |= set(result.missing if result else ())
    if others:
        run = [tests[index] + (f"\ncheck({entry_point})" if entry_point is not None else "") for index in others]
        outcomes, result = _run_harness(program, _STATEMENTS, deadline, tests=run)
        passed |= {index: outcome == 1 for index, outcome in zip(others, _check_length(outcomes, len(run)))}
        missing |= set(result.missing if result else ())
    return list(passed.values()), sorted(missing)


def _run_harness(program: str, harness: str, deadline: float, **values: object) -> tuple[object, SandboxResult | None]:
    """Run a program followed by a harness; return the JSON value that the harness wrote, and the result of the process.

    The value is NaN, which equals nothing, where the harness wrote none.

    Args:
        values: replace the fields of these names in the harness, as JSON.
    """
    mark = secrets.token_hex(16)
    literals = {name: repr(json.dumps(value)) for name, value in values.items()}
    result = _run(f"{program}\n{harness.format(mark=repr(mark), **literals)}", "", deadline)
    if result is None or result.timed_out:
        return math.nan, result
    _, separator, output = result.output.decode("utf-8", "replace").rpartition(mark)
    try:
        return (json.loads(output.splitlines()[0]) if separator else math.nan), result
    except (ValueError, IndexError):
        return math.nan, result


def _check_length(output: object, length: int) -> list[object]:
    """Return the list that a harness wrote; a list of None where it wrote no list of this length."""
    return output if isinstance(output, list) and len(output) == length else [None] * length


def _run_cases(program: str, cases: Mapping[str, Any], deadline: float) -> tuple[list[bool], Sequence[str]]:
    passed: list[bool] = []
    missing: Sequence[str] = ()
    name = cases.get("fn_name")
    for given, expected in zip(cases["inputs"], cases["outputs"]):
        if name:
            returned, result = _run_harness(program, _CALL, deadline, call={"name": name, "arguments": given})
            # through JSON, as the returned value is: tuples become lists, keys become strings
            passed.append(returned == json.loads(json.dumps(expected)))
        else:
            result = _run(program, _text(given), deadline)
            output = result.output if result is not None and result.status == 0 and not result.timed_out else None
            passed.append(output is not None and _lines(output.decode("utf-8", "replace")) == _lines(_text(expected)))
        missing = result.missing if result else missing
    return passed, missing


def _text(value: object) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _lines(text: str) -> list[str]:
    """Return the lines without trailing blanks and without empty lines at the end, as online judges compare."""
    return [line.rstrip() for line in text.rstrip().splitlines()]
