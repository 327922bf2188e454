"""Option sets of public examples, by the name of the file: imported with an equal plan, or refused by the feature's name.

A file of tests/data/import_cases has the cases of a project: `file` of the example and `command` with its options; `set`
(variables), `devices` and `rows` as on the command line; `accept` (numbers that differ, and are named) or `refused` (a part of
the error). The tables of docs/importing.md and docs/zh/importing.md count them; WRITE_IMPORT_TABLES=1 writes both.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
from collections import Counter
from pathlib import Path

import pytest
import yaml

from mindspeed_rl.config import ConfigError
from mindspeed_rl.importers.command import PROJECTS
from mindspeed_rl.importers.importer import import_command
from mindspeed_rl.importers.result import ASSUMED_ROWS, ImportSettings
from mindspeed_rl.importers.source_plan import find_differences
from mindspeed_rl.rewards import REWARDS

ROOT = Path(__file__).parents[3]
FILES = sorted((ROOT / "tests" / "data" / "import_cases").glob("*.yaml"))
LISTS = {path.stem: yaml.safe_load(path.read_text()) for path in FILES}
CASES = [(content["project"], case) for content in LISTS.values() for case in content["cases"]]
PAGES = ("importing.md", "zh/importing.md")


def settings(case: dict, accepted: list[str]) -> ImportSettings:
    variables = {name: str(value) for name, value in case.get("set", {}).items()}
    rows = case.get("rows", ASSUMED_ROWS)
    return ImportSettings(
        devices=case.get("devices"), variables=variables, rewards=REWARDS, accepted=frozenset(accepted), rows=rows
    )


def judge(project: str, case: dict) -> str:
    """Import a case, and return what became of it: the name of its column."""
    accepted = case.get("accept", [])
    if "refused" in case:
        with pytest.raises(ConfigError) as caught:
            import_command(PROJECTS[project], case["command"], settings(case, accepted))
        assert case["refused"] in str(caught.value)
        return "refused"
    run = import_command(PROJECTS[project], case["command"], settings(case, accepted))
    if run.plans is None:
        return "exact"
    assert sorted(find_differences(*run.plans, run.reasons)) == sorted(accepted)
    return "accepted" if accepted else "exact"


@pytest.mark.parametrize(("project", "case"), CASES, ids=[f"{project}-{case['file']}" for project, case in CASES])
def test_an_example_has_an_equal_plan_or_is_refused_by_the_name_of_the_feature(project: str, case: dict) -> None:
    judge(project, case)


@pytest.mark.parametrize("page", PAGES)
def test_the_page_counts_the_cases(page: str) -> None:
    rows = []
    for content in LISTS.values():
        kinds = Counter(
            "refused" if "refused" in case else "accepted" if "accept" in case else "exact" for case in content["cases"]
        )
        project = PROJECTS[content["project"]]
        counts = [len(content["cases"]), kinds["exact"], kinds["accepted"], kinds["refused"]]
        rows.append(f"| {project.title} {project.version} | {' | '.join(str(count) for count in counts)} |")
    path = ROOT / "docs" / page
    text = path.read_text()
    if os.environ.get("WRITE_IMPORT_TABLES"):
        text = re.sub(r"(\| --- \| ---: .*\n)(?:\|.*\n)+", lambda match: match.group(1) + "\n".join(rows) + "\n", text)
        path.write_text(text)
    found = re.search(r"\| --- \| ---: .*\n((?:\|.*\n)+)", text)
    assert found is not None and found.group(1).splitlines() == rows, "write the tables with WRITE_IMPORT_TABLES=1"


def test_damaged_commands_are_refused_and_raise_nothing_else() -> None:
    chance = random.Random(7)
    values = ["", "-1", "0", "1e-6", "true", "None", "x", "[1,2]", '{"a":1}', "99999999", "3.5", "'", "--y"]
    for _ in range(120):
        project, case = chance.choice(CASES)
        words = case["command"].split()
        place = chance.randrange(1, len(words))
        if chance.random() < 0.3:
            words += [f"--{chance.choice([*next(iter(PROJECTS[project].tables.values()))])}", chance.choice(values)]
        else:
            words[place : place + chance.randrange(2)] = [chance.choice(values)]
        with contextlib.suppress(ConfigError):
            import_command(PROJECTS[project], " ".join(words), settings(case, []))
