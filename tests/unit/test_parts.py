"""The parts of `tests/run.sh --part K/N` are the whole suite, once, and about equally long."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import parts
import pytest

TESTS = Path(parts.__file__).parent


def _shares(environment: str, part: int, count: int, *, run: str) -> dict[str, str]:
    """File -> its share in a part, "0:1" for all of it."""
    arguments = parts.select(environment, part, count, run=run)
    result = dict.fromkeys((file for file in arguments if not file.startswith("--")), "0:1")
    for share in (argument.removeprefix("--share=") for argument in arguments if argument.startswith("--")):
        file, _, result[file] = share.rpartition("=")
    return result


@pytest.mark.parametrize("environment", parts.ENVIRONMENTS)
def test_files_that_run_together_have_different_names(environment: str) -> None:
    names = [Path(file).name for file in parts.list_files(environment)]  # pytest imports a file only by its name
    assert sorted(names) == sorted(set(names))


def test_every_test_file_is_in_an_environment_that_the_script_runs() -> None:
    listed = {file for name in parts.ENVIRONMENTS for file in parts.list_files(name)}
    assert listed == {path.relative_to(TESTS.parent).as_posix() for path in TESTS.rglob("test_*.py")}
    script = (TESTS / "run.sh").read_text()
    chosen = set(re.findall(r"run_environment ([a-z0-9_]+)\b(?!-)", script))
    (releases,) = re.findall(r"for release in (.*); do\n.*run_environment \"megatron-\$release\"", script)
    assert sorted(name for lane in parts._LANES for name in lane) == sorted(parts.ENVIRONMENTS)
    assert chosen | {f"megatron-{release}" for release in releases.split()} == parts.ENVIRONMENTS.keys()


@pytest.mark.parametrize("run", parts.RUNS)
@pytest.mark.parametrize("count", [1, 2, 4, 7])
def test_each_test_is_in_exactly_one_part(count: int, run: str) -> None:
    sizes = (1, 2, 3, 10, 97)
    for environment in parts.ENVIRONMENTS:
        times: dict[str, list[list[int]]] = defaultdict(lambda: [[0] * size for size in sizes])
        for part in range(1, count + 1):
            for file, share in _shares(environment, part, count, run=run).items():
                for of_size in times[file]:
                    for position in range(len(of_size)):
                        of_size[position] += parts.is_in_share(position, len(of_size), share)
        kinds = parts.list_kinds(environment, run)
        assert sorted(times) == [file for file in sorted(parts.list_files(environment)) if parts.has_kinds(file, kinds)]
        assert all(number == 1 for of_file in times.values() for of_size in of_file for number in of_size)


@pytest.mark.parametrize("run", parts.RUNS)
def test_parts_are_equally_long_by_what_files_took(run: str) -> None:
    measured = json.loads(parts.DURATIONS.read_text())
    seconds = []
    for part in range(1, 5):
        seconds.append(0.0)
        for environment in parts.ENVIRONMENTS:
            for file, share in _shares(environment, part, 4, run=run).items():
                low, high = map(float, share.split(":"))
                kinds = parts.list_kinds(environment, run)
                of_file = sum(measured[file][kind] for kind in kinds) if file in measured else 0.0
                seconds[-1] += of_file * (high - low)
    assert max(seconds) < 1.15 * min(seconds)


def test_pytest_runs_the_tests_of_a_share(tmp_path: Path) -> None:
    text = "import pytest\n@pytest.mark.parametrize('i', range(5))\ndef test_it(i): pass\n"
    (tmp_path / "test_it.py").write_text(text + "def test_other(): pass\n")
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "conftest", f"--rootdir={tmp_path}", "-p", "no:cacheprovider"]
    results: list[str] = []
    for share in ("0.0:0.42", "0.42:1.0"):
        words = [*command, "--collect-only", f"--share=test_it.py={share}", "test_it.py"]
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
        results.append(" ".join(line.partition("::")[2] for line in done.stdout.splitlines() if "::" in line))
    assert results == ["test_it[0] test_it[1] test_it[2]", "test_it[3] test_it[4] test_other"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--part", "5/4"], "--part is 5/4; it is K/N with 1 <= K <= N, as in --part 2/4."),
        (["--part=0/4"], "--part is 0/4; it is"),
        (["--all", "--part"], "--part is empty; it is"),
        (["--part", "1/2", "tests/unit"], "--part 1/2 is of the whole; with paths there are no parts."),
    ],
)
def test_a_part_that_there_is_not_is_refused_before_anything_runs(words: list[str], message: str) -> None:
    done = subprocess.run(["bash", TESTS / "run.sh", *words], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "") and message in done.stderr
