"""The scorer for programs: a table of solutions and tests in all four forms."""

import json

import pytest
from patience import patient

from mindspeed_rl.rewards.code import code, extract_program
from mindspeed_rl.rewards.samples import RewardSettings

SETTINGS = RewardSettings(reward_timeout_s=patient(10))
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
        (ADD.replace("a + b", "a + b\nimport sys; sys.exit(0)"), ASSERTS, 1.0),  # what it defined before is there
        (ADD.replace("a + b", "a + b\nexit(0)"), ASSERTS, 1.0),
        (ADD.replace("a + b", "a + b\nquit()"), ["x = add(1, 2)\nassert x == 3"], 1.0),
        (ECHO.replace("\n```", "\nexit()\n```"), SUMS, 1.0),
        (ECHO.replace("\n```", "\nquit(1)\n```"), SUMS, 0.0),
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


def test_names_that_leetcode_imports_are_there_without_an_import() -> None:
    solution = """```python
class Solution:
    def topK(self, words: List[str], k: Optional[int] = None) -> Dict[str, int]:
        counts = Counter(words)
        heap = [(-count, word) for word, count in counts.items()]
        heapify(heap)
        best = defaultdict(int)
        for _ in range(min(k, len(heap))):
            count, word = heappop(heap)
            best[word] = math.gcd(-count, 0)
        return best
```"""
    tests = {"inputs": [[["a", "b", "a"], 1]], "outputs": [{"a": 2}], "fn_name": "topK"}
    assert code(solution, SETTINGS, tests)["score"] == 1.0
    assert (
        code("```python\nprint(sum(Counter(input()).values()))\n```", SETTINGS, {"inputs": ["aab"], "outputs": ["3"]})["score"]
        == 1.0
    )


@pytest.mark.parametrize(
    ("tests", "share"),
    [
        ({"inputs": [[1.0, 3.0]], "outputs": [0.333333], "fn_name": "div"}, 0.0),
        ({"inputs": [[1.0, 3.0]], "outputs": [0.333333], "fn_name": "div", "tolerance": 1e-5}, 1.0),
        ({"inputs": [[1.0, 3.0]], "outputs": [0.3334], "fn_name": "div", "tolerance": 1e-5}, 0.0),
        ({"inputs": [[1e9, 3.0]], "outputs": [333333333.0], "fn_name": "div", "tolerance": 1e-5}, 1.0),
        (["assert abs(div(1, 3) - 0.333333) < 1e-5"], 1.0),
        (["import math\nassert math.isclose(div(1, 3), 0.333333, rel_tol=1e-5)"], 1.0),
        (["assert abs(div(1, 3) - 0.3334) < 1e-5"], 0.0),
    ],
)
def test_floats_are_equal_within_the_tolerance_that_the_tests_state(tests: object, share: float) -> None:
    assert code("```python\ndef div(a, b): return a / b\n```", SETTINGS, tests)["score"] == share


def test_printed_numbers_are_equal_within_the_tolerance_and_other_words_exactly() -> None:
    response = "```python\nprint('mean', 1 / 3)\n```"
    for output, share in (("mean 0.33333", 1.0), ("mean 0.3334", 0.0), ("Mean 0.33333", 0.0), ("mean 0.33333 1", 0.0)):
        assert code(response, SETTINGS, {"inputs": [""], "outputs": [output], "tolerance": 1e-5})["score"] == share
        assert code(response, SETTINGS, {"inputs": [""], "outputs": [output]})["score"] == 0.0


#: programs that try to pass whatever the tests are
FORGERIES = {
    "equal to everything": """
class Anything:
    __eq__ = __lt__ = __le__ = __gt__ = lambda self, other: True
    __sub__ = __rsub__ = __abs__ = lambda self, *_: self
    __hash__ = lambda self: 3
def f(*_): return Anything()
""",
    "own builtins": """
import builtins
abs = builtins.abs = lambda x: 0
builtins.all = lambda x: True
def f(*_): return -1
""",
    "own modules": """
import math, sys
class Liar: isclose = staticmethod(lambda *a, **k: True)
math.isclose = Liar.isclose
sys.modules['math'] = math = Liar
def f(*_): return -1
""",
    "writes to every descriptor": """
import os
for descriptor in range(64):
    for text in (b'[1, 1, 1]\\n', len(b'[1, 1, 1]').to_bytes(8, 'big') + b'[1, 1, 1]'):
        try:
            os.write(descriptor, text)
        except OSError:
            pass
def f(*_): return -1
""",
    "looks for the tests": """
import gc, os, sys
def wanted(): return "".join(("47110", "815077"))
found = [str(thing) for thing in gc.get_objects()]
for descriptor in range(64):
    try:
        os.lseek(descriptor, 0, 0)
        found.append(str(os.read(descriptor, 1 << 20)))
    except OSError:
        pass
def f(x):
    frame = sys._getframe()
    while frame:
        found.append(str(frame.f_locals) + str(frame.f_globals))
        frame = frame.f_back
    return int(wanted()) if any(wanted() in text for text in found) else -1
""",
    "ends well": "import os\ndef f(*_): os._exit(0)",
    "ends at once": "import os\nos._exit(0)",
    "forks": "import os\ndef f(*_): os.fork(); return -1",
    "kills its parent": "import os, signal\ndef f(*_): os.kill(os.getppid(), signal.SIGTERM); return -1",
}


@pytest.mark.parametrize("program", FORGERIES.values(), ids=FORGERIES)
def test_a_program_cannot_forge_the_result_of_any_test(program: str) -> None:
    tests = [
        "import math\nassert math.isclose(f(3), 47110815077)",
        "assert abs(f(3) - 47110815077) < 1e-6",
        "def check(c):\n    for x in [3]:\n        assert c(x) == 47110815077, 'differs'\ncheck(f)",
        "assert all(f(x) == 47110815077 for x in [3, 3])",
        "assert f(3) == 47110815077",
    ]
    assert code(f"```python\n{program}\n```", SETTINGS, label=tests)["score"] == 0.0
    assert code("```python\ndef f(x): return 47110815077\n```", SETTINGS, label=tests)["score"] == 1.0


#: results that are expensive or impossible to read
RESULTS = {
    "deep": "x = []\nfor _ in range(100000): x = [x]\nreturn x",
    "deep but readable": "x = []\nfor _ in range(300): x = [x]\nreturn x",
    "huge integer": "return 1 << 20000000",
    "long integer": "return 10 ** 4400",
    "many": "return list(range(10 ** 6))",
    "long text": "return 'x' * (50 << 20)",
    "colliding": "return {k * (2 ** 61 - 1) for k in range(30000)}",
    "surrogate": "return '\\ud800'",
    "huge fraction": "class F:\n  def as_integer_ratio(self): return ('1e99999999', 1)\nreturn F()",
    "own codec": "class L(list):\n  def __iter__(self): return iter(['fraction', ['1e9999999']])\nreturn L()",
    "cycle": "x = []; x.append(x); return x",
    "generator": "return (x for x in iter(int, 1))",
    "not a number": "return float('nan')",
}


@pytest.mark.parametrize("body", RESULTS.values(), ids=RESULTS)
def test_a_result_that_cannot_be_read_is_wrong_and_not_a_failed_score(body: str) -> None:
    lines = "\n".join(f"  {line}" for line in body.split("\n"))
    response = f"```python\nimport sys\nsys.setrecursionlimit(10 ** 6)\ndef f(x):\n{lines}\n```"
    assert (
        code(response, RewardSettings(reward_timeout_s=2.0), label=["assert f(3) == 4711", "assert abs(f(3) - 4711) < 1"])[
            "score"
        ]
        == 0.0
    )
    assert (
        code(response, RewardSettings(reward_timeout_s=1.0), {"inputs": [[3]], "outputs": [4711], "fn_name": "f"})["score"]
        == 0.0
    )


@pytest.mark.parametrize(
    "text",
    [
        "(" * 100_000,
        "-" * 200_000 + "1",
        "x" + ".y" * 100_000,
        "[" * 90 + "]" * 90,
        "\x00",
        "\ud800",
        "1" * 10_000,
        "a=" * 50_000 + "1",
    ],
)
def test_a_program_that_no_parser_likes_is_wrong_and_not_a_failed_score(text: str) -> None:
    for response in (text, f"```python\n{text}\n```", f"```\n{text}\n```"):
        assert code(response, SETTINGS, label=["assert f(3) == 4711"])["score"] == 0.0


def test_tests_use_objects_change_lists_and_catch_exceptions_of_a_program() -> None:
    program = """
class Stack:
    def __init__(self): self.items = []
    def push(self, item): self.items.append(item)
    def pop(self):
        if not self.items: raise IndexError("empty")
        return self.items.pop()
    def __len__(self): return len(self.items)
class Odd(Exception): pass
def raises(): raise Odd("x")
def sort(values): values.sort()
def apply(function, value): return function(value)
def numbers():
    yield from (1, 2, 3)
"""
    tests = [
        "s = Stack()\ns.push(1)\ns.push([2, 'a'])\nassert len(s) == 2 and s.pop() == [2, 'a'] and s.items == [1]",
        "s = Stack()\ntry:\n    s.pop()\n    assert False\nexcept IndexError as error:\n    assert 'empty' in str(error)",
        "try:\n    raises()\n    assert False\nexcept Odd:\n    pass",
        "values = [3, 1, 2]\nsort(values)\nassert values == [1, 2, 3]",
        "assert apply(lambda x: x + 1, 3) == 4",
        "assert list(numbers()) == [1, 2, 3]",
        "assert isinstance(Stack().items, list)",
        "assert Stack() != Stack()",
    ]
    for test in tests:
        assert code(f"```python\n{program}```", SETTINGS, label=[test])["score"] == 1.0, test


SUM = "```python\ndef add(a, b): return a + b\n```"
METHOD = "```python\nclass Solution:\n    def add(self, a, b): return a + b\n```"


@pytest.mark.parametrize(
    ("response", "tests", "score"),
    [
        (SUM, {"inputs": [[1, 2], [5, 7]], "outputs": [[3], [12]], "fn_name": "add"}, 1.0),
        (SUM, {"inputs": [[1, 2], [5, 7]], "outputs": [[3], [13]], "fn_name": "add"}, 0.5),
        (SUM, {"inputs": [[[1], [2]]], "outputs": [[1, 2]], "fn_name": "add"}, 1.0),
        (SUM, {"inputs": [[[1], []]], "outputs": [[1]], "fn_name": "add"}, 1.0),
        (SUM, {"inputs": [[1, 2], [5, 7]], "outputs": [[3], 12], "fn_name": "add"}, 0.5),
        (METHOD, {"inputs": ["1\n2", "5\n7"], "outputs": ["3", "12"], "fn_name": "add"}, 1.0),
        (METHOD, {"inputs": ["1\n2", "5\n7"], "outputs": ["3", "13"], "fn_name": "add"}, 0.5),
        (METHOD, {"inputs": ['"a"\n"b"', "[1]\n[2]\n"], "outputs": ['"ab"', "[1, 2]"], "fn_name": "add"}, 1.0),
    ],
)
def test_calls_in_the_forms_of_apps_taco_and_livecodebench(response: str, tests: dict, score: float) -> None:
    assert code(response, RewardSettings(), tests=tests)["score"] == score


def test_text_of_arguments_that_is_no_json_is_refused() -> None:
    with pytest.raises(ValueError, match="one JSON value per line"):
        code(SUM, RewardSettings(), tests={"inputs": ["a b"], "outputs": ["3"], "fn_name": "add"})


@pytest.mark.parametrize(
    "body",
    [
        "def add(a, b): return asyncio.run(f(a, b))",
        "def add(a, b): return asyncio.new_event_loop().run_until_complete(f(a, b))",
        "async def g(a, b): return sum(await asyncio.gather(f(a, 0), f(0, b)))\ndef add(a, b): return asyncio.run(g(a, b))",
        "async def g(a, b): return await asyncio.to_thread(lambda: a + b)\ndef add(a, b): return asyncio.run(g(a, b))",
    ],
)
def test_programs_may_use_an_event_loop(body: str) -> None:
    text = f"```python\nimport asyncio\nasync def f(a, b):\n    await asyncio.sleep(0.001)\n    return a + b\n{body}\n```"
    assert code(text, RewardSettings(), tests=["assert add(1, 2) == 3", "assert add(2, 2) == 4"])["score"] == 1.0
    assert code(text, RewardSettings(), tests=["assert add(1, 2) == 4"])["score"] == 0.0
