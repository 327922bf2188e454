"""Gradings in a sandbox: a wrong solution gets 0.0 and a right one 1.0, whatever the model has left there before."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

from toolboxes import call, open_toolbox

WRONG, RIGHT = "def add(a, b):\n    return a - b\n", "def add(a, b):\n    return a + b\n"
ASSERTS = "import calc\nassert calc.add(2, 3) == 5\n"
UNITTEST = """import unittest, calc
class Test(unittest.TestCase):
    def test(self):
        self.assertEqual(calc.add(2, 3), 5)
if __name__ == "__main__":
    unittest.main()
"""
#: runs the solution in a process of its own, so that it cannot read the proof
PROVEN = """import subprocess, sys
found = subprocess.run([sys.executable, "-c", "import calc; print(calc.add(2, 3))"], capture_output=True, text=True).stdout
if found.strip() == "5": print("{proof}")
"""
PLAIN = (f"{sys.executable} tests.py", {"tests.py": ASSERTS})
NESTED = (f"{sys.executable} t/u/tests.py", {"t/u/tests.py": f"import sys\nsys.path.insert(0, '.')\n{ASSERTS}"})
SHELL = (f"test -f tests.py && {sys.executable} tests.py", {"tests.py": PROVEN})

#: what the model does -> grader, and rewards of the wrong and of the right solution
CASES: dict[str, tuple[str, Any, tuple[float, float]]] = {
    "nothing": ("true", PLAIN, (0.0, 1.0)),
    "nothing, unittest": ("true", (f"{sys.executable} -B ./tests.py -v", {"tests.py": UNITTEST}), (0.0, 1.0)),
    "nothing, the tests exit": ("true", (PLAIN[0], {"tests.py": f"{ASSERTS}raise SystemExit(0)\n"}), (0.0, 1.0)),
    "nothing, the tests fail": ("true", (PLAIN[0], {"tests.py": f"{ASSERTS}raise SystemExit(3)\n"}), (0.0, 0.0)),
    "nothing, a proof": ("true", SHELL, (0.0, 1.0)),
    "nothing, a proof in the command": ("true", ("grep -q + calc.py && echo {proof}", {}), (0.0, 1.0)),
    "nothing, no files": ("true", ("grep -q + calc.py", {}), (0.0, 1.0)),
    "os._exit": ("echo 'import os; os._exit(0)' >> calc.py", PLAIN, (0.0, 0.0)),
    "os._exit, unittest": ("echo 'import os; os._exit(0)' >> calc.py", (PLAIN[0], {"tests.py": UNITTEST}), (0.0, 0.0)),
    "os._exit, a proof": ("echo 'import os; os._exit(0)' >> calc.py", SHELL, (0.0, 0.0)),
    "SystemExit": ("echo 'raise SystemExit(0)' >> calc.py", PLAIN, (0.0, 0.0)),
    "sys.exit": ("echo 'import sys; sys.exit(0)' >> calc.py", PLAIN, (0.0, 0.0)),
    "an end by a thread": (
        "echo 'import os, threading, time; threading.Thread(target=os._exit, args=(0,)).start(); time.sleep(1)' >> calc.py",
        PLAIN,
        (0.0, 0.0),
    ),
    "another program": ("echo 'import os; os.execlp(\"true\", \"true\")' >> calc.py", PLAIN, (0.0, 0.0)),
    "other tests": ("echo pass > tests.py", PLAIN, (0.0, 1.0)),
    "tests that are read-only": ("echo pass > tests.py; chmod 400 tests.py", PLAIN, (0.0, 1.0)),
    "tests that are immutable": ("echo pass > tests.py; chattr +i tests.py", PLAIN, (0.0, 1.0)),
    "a folder in place of the tests": ("mkdir -p tests.py/a/b", PLAIN, (0.0, 1.0)),
    "an immutable folder in place of the tests": ("mkdir -p tests.py/a; chattr +i tests.py tests.py/a", PLAIN, (0.0, 1.0)),
    "a link in place of the tests": ("ln -s calc.py tests.py", PLAIN, (0.0, 1.0)),
    "a link to itself": ("ln -s tests.py tests.py", PLAIN, (0.0, 1.0)),
    "a link to a device": ("ln -s /dev/full tests.py", PLAIN, (0.0, 1.0)),
    "a pipe in place of the tests": ("mkfifo tests.py", PLAIN, (0.0, 1.0)),
    "a file in place of a folder": ("echo > t", NESTED, (0.0, 1.0)),
    "a pipe in place of a folder": ("mkdir t; mkfifo t/u", NESTED, (0.0, 1.0)),
    "a link in place of a folder": ("ln -s /etc t", NESTED, (0.0, 1.0)),
    "a dangling link in place of a folder": ("ln -s nowhere t", NESTED, (0.0, 1.0)),
    "folders without rights": ("mkdir -p t/u; chmod 0 t/u t; chmod 500 .", NESTED, (0.0, 1.0)),
    "an immutable place": ("chattr +i .", PLAIN, (0.0, 1.0)),
    "no files any more": ("rm -rf $HOME", PLAIN, (0.0, 0.0)),
}


def test_a_sample_gets_what_its_solution_deserves_whatever_is_in_its_sandbox(tmp_path: Path) -> None:
    async def grade(box: Any, command: str, grader: Any, solution: str) -> float | None:
        options = {"create_kwargs": {"files": {"calc.py": solution}}}
        options["calc_reward_kwargs"] = {"grader": grader[0], "files": grader[1]}
        tools = box.open({"tools_kwargs": {"run": options}})
        await tools.call([call("run", command=command)])
        return await tools.close()

    async def run() -> dict[str, tuple[float | None, float | None]]:
        entry = {"tool": "sandbox", "config": {"providers": ["local"]}, "limits": {"timeout_s": 30}}
        results = {}
        async with open_toolbox(tmp_path, entry) as box:
            names = list(CASES)
            for start in range(0, len(names), 6):
                some = names[start : start + 6]
                pairs = [(CASES[name][0], CASES[name][1], solution) for name in some for solution in (WRONG, RIGHT)]
                rewards = await asyncio.gather(*(grade(box, *pair) for pair in pairs))
                results |= dict(zip(some, zip(rewards[::2], rewards[1::2])))
        return results

    results = asyncio.run(run())
    assert results == {name: rewards for name, (_, _, rewards) in CASES.items()}


def test_files_of_a_row_that_no_sandbox_takes_and_a_provider_that_is_gone_give_no_reward(tmp_path: Path) -> None:
    async def grade(box: Any, path: str) -> float | None:
        grader = {"grader": "true", "files": {path: "x"}}
        return await box.open({"tools_kwargs": {"run": {"calc_reward_kwargs": grader}}}).close()

    async def run() -> list[float | None]:
        async with open_toolbox(tmp_path, {"tool": "sandbox", "config": {"providers": ["local"]}}) as box:
            rewards = [await grade(box, "a"), await grade(box, "../a")]
            (tool,) = box._tools
            tool._pool.offers.clear()
            return [*rewards, await grade(box, "a")]

    assert asyncio.run(run()) == [1.0, None, None]
