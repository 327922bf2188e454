"""Every option of a pinned release has a record, and no record is of an option that the release does not have."""

from __future__ import annotations

from pathlib import Path

import pytest

from mindspeed_rl.config.keys import ROLE_GROUPS
from mindspeed_rl.importers.command import PROJECTS
from mindspeed_rl.importers.options import UNSET, Option
from mindspeed_rl.run.explain.key_reference import _TOP, _list_entries

LISTS = Path(__file__).parents[2] / "data" / "options"
TABLES = [(project, program) for project in PROJECTS.values() for program in project.tables]
NAMES = [f"{project.name}-{program}" for project, program in TABLES]
KEYS = {entry.path for entry in _list_entries()}


def read_list(name: str) -> set[str]:
    lines = (LISTS / f"{name}.txt").read_text().splitlines()
    assert lines[0].startswith("# "), "the first line says where the list is from"
    return set(lines[1:])


@pytest.mark.parametrize(("project", "program"), TABLES, ids=NAMES)
def test_every_option_of_the_release_is_classified_and_no_other(project, program) -> None:
    own = f"{project.name}-{project.version}-{program}"
    listed = read_list(own if (LISTS / f"{own}.txt").exists() else f"{project.name}-{project.version}")
    table = set(project.tables[program])
    assert listed - table == set(), "options without a record"
    assert table - listed == set(), "records of options that the release does not have"


@pytest.mark.parametrize(("project", "program"), TABLES, ids=NAMES)
def test_every_record_says_what_becomes_of_its_option(project, program) -> None:
    for name, option in project.tables[program].items():
        assert isinstance(option, Option), name
        if option.kind == "mapped":
            assert option.keys or option.text, f"{name}: no key and no formula"
        else:
            assert option.text, f"{name}: no reason"
        for key in option.keys:
            group, _, last = key.rpartition(".")
            shared = f"megatron_training.{last}" if group in ROLE_GROUPS else key
            holder = key.rsplit(".", 1)[0]
            assert shared in KEYS or key in _TOP or holder in KEYS, f"{name}: there is no key {key}"
        if option.values and option.default is not UNSET:
            assert option.default in option.values, name


@pytest.mark.parametrize(("project", "program"), TABLES, ids=NAMES)
def test_every_record_that_makes_up_keys_names_keys_that_there_are(project, program) -> None:
    names = {path.partition(".")[2] for path in KEYS} | KEYS
    roles = {f"{group}.{path.rpartition('.')[2]}" for group in ROLE_GROUPS for path in KEYS}
    for name, option in project.tables[program].items():
        for key in option.makes.split():
            assert key in names | roles or key.rpartition(".")[0] in names, f"{name}: there is no key {key}"
