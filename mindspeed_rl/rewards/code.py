r"""Scorer for programs: the last fenced block of the response, run against unit tests in the sandbox (`sandbox.py`).

Tests are the label, or the column `tests` if there is one; as JSON text or as values:

    ["assert f(1) == 2", ...]                               statements, run after the solution (MBPP)
    "def check(candidate): ..." with a column entry_point   one test program (HumanEval)
    {"inputs": ["1 2\n"], "outputs": ["3\n"]}               standard input and output
    {"inputs": [[1, 2]], "outputs": [3], "fn_name": "add"}  calls with arguments, as JSON values; also a method of `Solution`

The expected output never enters the sandbox. Of statements this is true of those that compare results with literals, as most do
(`statements.py`); others (`assert is_close(f(1), 2)`) run in the process of the solution, which could look for them: only use
them where the policy does not learn to cheat, or convert them.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from mindspeed_rl.rewards.answers.statements import EVALUATION, are_equal, comparisons
from mindspeed_rl.rewards.samples import RewardSettings
from mindspeed_rl.rewards.sandbox import SandboxLimits, SandboxResult, run_python

_FENCE = re.compile(r"```(?:python|py|python3)?[ \t]*\r?\n(.*?)```", re.DOTALL | re.IGNORECASE)
_TEST_LIMIT_S = 5.0
_SHARE_OF_TIMEOUT = 0.8  # slow code is wrong code; only what outlasts reward_timeout_s would count as a failed score

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
    response: str, settings: RewardSettings, label: Any = None, tests: Any = None, entry_point: str | None = None
) -> dict[str, float | str]:
    """Return the share of tests passed as "score", "all_passed" 1.0 or 0.0, and what isolation was missing, if any.

    Raises:
        ValueError: the tests have none of the forms above.
    """
    cases = _read_tests(label if tests is None else tests)
    program = extract_program(response)
    if program is None:
        return {"score": 0.0, "all_passed": 0.0}
    deadline = time.monotonic() + _SHARE_OF_TIMEOUT * settings.reward_timeout_s
    if isinstance(cases, Mapping):
        passed, missing = _run_cases(program, cases, deadline)
    else:
        passed, missing = _run_statements(program, cases, entry_point, deadline)
    scores: dict[str, float | str] = {"score": sum(passed) / len(passed), "all_passed": float(all(passed))}
    return {**scores, "missing_isolation": ", ".join(missing)} if missing else scores


def extract_program(response: str) -> str | None:
    """Return the last fenced Python block; a response without fences is a program if it parses as one."""
    blocks = _FENCE.findall(response)
    if blocks:
        return blocks[-1]
    try:
        compile(response, "response", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        # null bytes and deep nesting raise the others
        return None
    return response if response.strip() else None


def _read_tests(tests: Any) -> Mapping[str, Any] | list[str]:
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
    """Run within the test's and the sample's time; None if there is none left."""
    left_s = min(_TEST_LIMIT_S, deadline - time.monotonic())
    if left_s <= 0:
        return None
    return run_python(program, stdin.encode("utf-8", "replace"), SandboxLimits(wall_s=left_s, cpu_s=int(left_s) + 1))


def _run_statements(
    program: str, tests: list[str], entry_point: str | None, deadline: float
) -> tuple[list[bool], Sequence[str]]:
    """Tests that only compare are compared here, the others are run; each kind in one process."""
    compared = {number: found for number, test in enumerate(tests) if (found := comparisons(test, entry_point))}
    others = [number for number in range(len(tests)) if number not in compared]
    passed, missing = dict.fromkeys(range(len(tests)), False), set[str]()
    if compared:
        flat = [item for found in compared.values() for item in found]
        values, result = _answer(program, EVALUATION, deadline, expressions=[expression for expression, _ in flat])
        written = iter(_list_of(values, len(flat)))
        for number, found in compared.items():
            passed[number] = all([are_equal(next(written), wanted) for _, wanted in found])  # a list: each takes its own value
        missing |= set(result.missing if result else ())
    if others:
        run = [tests[number] + (f"\ncheck({entry_point})" if entry_point is not None else "") for number in others]
        outcomes, result = _answer(program, _STATEMENTS, deadline, tests=run)
        passed |= {number: outcome == 1 for number, outcome in zip(others, _list_of(outcomes, len(run)))}
        missing |= set(result.missing if result else ())
    return list(passed.values()), sorted(missing)


def _answer(program: str, harness: str, deadline: float, **values: Any) -> tuple[Any, SandboxResult | None]:
    """What a harness behind the program wrote, and how the process ended; see `_after_mark`.

    Args:
        values: for the places in the harness of these names, as JSON.
    """
    mark = secrets.token_hex(16)
    literals = {name: repr(json.dumps(value)) for name, value in values.items()}
    result = _run(f"{program}\n{harness.format(mark=repr(mark), **literals)}", "", deadline)
    return _after_mark(result, mark), result


def _list_of(written: Any, length: int) -> list[Any]:
    """Return the list that a harness wrote; as many times None where it wrote none of this length."""
    return written if isinstance(written, list) and len(written) == length else [None] * length


def _run_cases(program: str, cases: Mapping[str, Any], deadline: float) -> tuple[list[bool], Sequence[str]]:
    passed: list[bool] = []
    missing: Sequence[str] = ()
    name = cases.get("fn_name")
    for given, wanted in zip(cases["inputs"], cases["outputs"]):
        if name:
            returned, result = _answer(program, _CALL, deadline, call={"name": name, "arguments": given})
            # through JSON as what comes back: tuples are lists, keys are texts
            passed.append(returned == json.loads(json.dumps(wanted)))
        else:
            result = _run(program, _text(given), deadline)
            output = result.output if result is not None and result.status == 0 and not result.timed_out else None
            passed.append(output is not None and _lines(output.decode("utf-8", "replace")) == _lines(_text(wanted)))
        missing = result.missing if result else missing
    return passed, missing


def _after_mark(result: SandboxResult | None, mark: str) -> Any:
    """Return the JSON value that the harness wrote after its mark; NaN, which equals nothing, if it did not get there."""
    if result is None or result.timed_out:
        return float("nan")
    _, found, rest = result.output.decode("utf-8", "replace").rpartition(mark)
    if not found:
        return float("nan")
    try:
        return json.loads(rest.splitlines()[0])
    except (ValueError, IndexError):
        return float("nan")


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _lines(text: str) -> list[str]:
    """Return the lines without trailing blanks and without empty lines at the end: how online judges compare."""
    return [line.rstrip() for line in text.rstrip().splitlines()]
