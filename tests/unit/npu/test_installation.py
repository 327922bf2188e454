"""envs/npu_common: versions of the lines, their recorded resolution, and what the installer refuses before it installs."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import tomllib
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from mindspeed_rl.cli.doctor import stack

ROOT = Path(__file__).parents[3]
COMMON = ROOT / "envs" / "npu_common"


def load_packages() -> ModuleType:
    spec = importlib.util.spec_from_file_location("packages", COMMON / "packages.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules["packages"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


packages = load_packages()
HOSTS = [(line, host) for line in ("main", "fallback", "cann85") for host in packages.LINES[line].hosts]


def recorded(line: str, host: tuple[str, str]) -> dict[str, str]:
    """Versions that a host gets, as pip reads the constraints."""
    markers = {"platform_machine": host[0], "python_version": host[1], "python_full_version": f"{host[1]}.9"}
    results = {}
    for entry in packages.constraints(line):
        version, _, marker = entry.partition(";")
        if "==" in version and (not marker.strip() or Marker(marker.strip()).evaluate(markers)):
            results[packages.name_of(version)] = version.partition("==")[2].strip()
    return results


@pytest.mark.parametrize("line", stack.LINES, ids=lambda line: line.name)
def test_the_doctor_compares_with_the_versions_that_are_installed(line: stack.VersionLine) -> None:
    for name, expected in line.packages.items():
        if name != "mindspeed":  # a branch of a repository
            assert stack.has_version(name, packages.pinned_version(line.name, name), expected)
    versions = {f"{major}.{minor}" for major, minor in line.python}
    assert set(packages.LINES[line.name].pythons) == versions
    assert f"2.{packages.LINES[line.name].glibc}" == line.glibc


@pytest.mark.parametrize(("line", "host"), HOSTS, ids=lambda value: value if isinstance(value, str) else "-".join(value))
def test_every_host_of_a_line_has_a_recorded_version_of_every_requirement(line: str, host: tuple[str, str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*packages.requirements(line, ()), *project["dependencies"], *project["optional-dependencies"]["npu"]]
    versions = recorded(line, host)
    for requirement in map(Requirement, wanted):
        version = versions[packages.name_of(requirement.name)]
        assert requirement.specifier.contains(version, prereleases=True), requirement
    for entry in packages.constraints(line, recorded=False):
        limit = Requirement(entry)
        name = packages.name_of(limit.name)
        if name not in packages.SEPARATE:
            assert limit.specifier.contains(versions[name], prereleases=True), entry


@pytest.mark.parametrize(("line", "host"), HOSTS, ids=lambda value: value if isinstance(value, str) else "-".join(value))
def test_numpy_and_opencv_fit_each_other(line: str, host: tuple[str, str]) -> None:
    # opencv from 4.13 on is built for numpy 2, and vllm-ascend 0.18 excludes numpy 2
    versions = recorded(line, host)
    numpy_2, new_opencv = versions["numpy"] >= "2", SpecifierSet(">=4.13").contains(versions["opencv-python-headless"])
    assert numpy_2 == new_opencv == (line == "main")
    assert {"scipy", "torchvision", "setuptools-rust" if line == "main" else "setuptools-scm"} <= set(versions)


def test_an_exact_version_hides_those_of_lower_layers() -> None:
    simulated, cann85 = packages.constraints("simulated"), packages.constraints("cann85")
    for lines, entry in ((simulated, "torch==2.13.0"), (simulated, "torch_npu==2.13.0"), (cann85, "torch_npu==2.9.0")):
        assert [other for other in lines if packages.name_of(other) == packages.name_of(entry)] == [entry]
    main = packages.constraints("main")
    assert [entry for entry in simulated if entry.startswith(("vllm", "transformers"))] == [
        entry for entry in main if entry.startswith(("vllm", "transformers"))
    ]


def test_a_record_has_a_marker_where_hosts_differ_alone() -> None:
    hosts = [packages.Host(machine, python) for machine in ("aarch64", "x86_64") for python in ("3.10", "3.11")]
    torch = {"aarch64": "2", "x86_64": "2+cpu"}
    resolved = {host: {"same": "1", "by-python": host.python, "torch": torch[host.machine]} for host in hosts}
    resolved[hosts[0]]["alone"] = "4"
    assert packages.record(resolved) == [
        'alone==4; python_version == "3.10" and platform_machine == "aarch64"',
        'by-python==3.10; python_version == "3.10"',
        'by-python==3.11; python_version == "3.11"',
        "same==1",
        "torch==2",
    ]


def install(
    tmp_path: Path, *arguments: str, cann: str = "9.1.0", glibc: str = "2.39", python: str = "/no/python"
) -> tuple[int, str]:
    """Start the installer on a machine with this CANN and this C library."""
    home, atb, tools = tmp_path / "toolkit", tmp_path / "nnal" / "atb", tmp_path / "bin"
    for folder in (home, atb, tools, tmp_path / "cann"):
        folder.mkdir(parents=True)
    (tmp_path / "cann" / "set_env.sh").write_text(f"export ASCEND_HOME_PATH={home}\n")
    (atb / "set_env.sh").write_text("")
    (home / "version.cfg").write_text(f"# version: 1.0\nruntime_running_version=[{cann}:{cann}.B020]\n")
    (tools / "getconf").write_text(f"#!/bin/sh\necho glibc {glibc}\n")
    (tools / "getconf").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "ASCEND_ROOT": str(tmp_path), "PYTHON": python}
    command = ["bash", str(COMMON / "install.sh"), "--chip", "a2", "--venv", str(tmp_path / "venv"), *arguments]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert not (tmp_path / "venv").exists()
    return ended.returncode, ended.stderr


@pytest.mark.parametrize(
    ("cann", "line"), [("9.1.0", "main"), ("9.2.0", "main"), ("9.0.0", "fallback"), ("8.5.1", "cann85"), ("10.0.0", "main")]
)
def test_the_installer_takes_the_line_of_the_cann_that_is_there(cann: str, line: str, tmp_path: Path) -> None:
    status, text = install(tmp_path, cann=cann)  # ends at the Python that is not there
    assert status == 1 and f"the line '{line}' needs Python 3.1" in text


@pytest.mark.parametrize("cann", ["8.3.RC2", "8.2.RC1"])
def test_an_older_cann_ends_with_the_upgrade(cann: str, tmp_path: Path) -> None:
    status, text = install(tmp_path, cann=cann)
    assert status == 1 and f"CANN {cann[:3]} is too old" in text
    assert "CANN 9.1.0 with driver 26.0.rc1" in text and "CANN 8.5.1 with driver 25.5" in text


def test_an_older_glibc_is_refused_with_the_lines_that_run_on_it(tmp_path: Path) -> None:
    environment = {"glibc": "2.28"}
    status, text = install(tmp_path / "a", "--python-of-test", **environment)
    assert (status, text.strip()) == (2, "install.sh: unknown argument '--python-of-test'")
    for folder, arguments, expected in (
        ("b", ("--line", "main"), "--line cann85"),
        ("c", ("--line", "main", "--vllm-ascend", "source"), "needs Python"),  # torch_npu's wheels run on 2.28
        ("d", ("--line", "cann85"), "needs Python"),
    ):
        status, text = install(tmp_path / folder, *arguments, **environment)
        assert status == 1 and expected in text, text
    status, text = install(tmp_path / "e", "--line", "cann85", glibc="2.27")
    assert status == 1 and "torch_npu's wheels need 2.28" in text


def test_a_newer_cann_than_the_lines_is_said_to_be_another(tmp_path: Path) -> None:
    _, text = install(tmp_path / "a", cann="9.2.0")
    assert "CANN 9.2 belongs to vllm-ascend 0.30; the line main was released with CANN 9.1.0" in text
    _, text = install(tmp_path / "b", cann="9.1.0")
    assert "vllm-ascend 0.30" not in text


def test_ascend_950_has_one_line(tmp_path: Path) -> None:
    status, text = install(tmp_path / "a", "--chip", "a5")
    assert status == 1 and "the line 'main' needs Python" in text
    status, text = install(tmp_path / "b", "--chip", "a5", cann="9.0.0")
    assert status == 1 and "Ascend 950 needs the line main with CANN 9.1.0 or newer, not 'fallback'" in text


def test_a_folder_for_machines_without_a_network_is_made_for_one_kind_of_machine(tmp_path: Path) -> None:
    folder = tmp_path / "wheelhouse"
    status, text = install(tmp_path / "a", "--download", str(folder), "--offline", str(folder))
    assert status == 1 and "--download and --offline are the two halves of one installation" in text
    chosen = {"python": sys.executable}
    status, text = install(tmp_path / "b", "--offline", str(folder), **chosen)
    assert status == 1 and f"'{folder}' is not a folder that install.sh --download has filled to its end" in text
    folder.mkdir()
    (folder / "made-for").write_text("line main, chip a3, aarch64, Python 3.10\n")
    status, text = install(tmp_path / "c", "--offline", str(folder), **chosen)
    mine = f"line main, chip a2, {platform.machine()}, Python 3.{sys.version_info.minor}"
    assert status == 1 and f"is made for line main, chip a3, aarch64, Python 3.10; this machine has {mine}." in text


def test_a_line_that_does_not_exist_is_a_usage_error(tmp_path: Path) -> None:
    status, text = install(tmp_path, "--line", "newest")
    assert status == 2 and "--line must be main, fallback or cann85, not 'newest'" in text


def write_package(folder: Path, name: str, requires: str = "") -> Path:
    """A package of one module, as sources."""
    folder = folder / name
    folder.mkdir(parents=True)
    (folder / f"{name}.py").write_text("")
    keys = {"name": name, "version": "1.0", "py_modules": [name], "install_requires": requires.split()}
    (folder / "setup.py").write_text(f"import setuptools\nsetuptools.setup(**{keys})\n")
    return folder


def test_a_folder_or_an_sdist_is_taken_in_place_of_a_clone(tmp_path: Path) -> None:
    """VLLM_ASCEND_SRC and its like: without a network; an earlier copy is gone, and a machine that collects keeps one too."""
    folder = write_package(tmp_path, "given")
    subprocess.run([sys.executable, "setup.py", "-q", "sdist", "-d", str(tmp_path)], cwd=folder, check=True)
    sdist = next(tmp_path.glob("given-*.tar.gz"))
    (folder / "setup.py").chmod(0o444)
    function = re.search(r"(?ms)^checkout\(\) \{.*?^\}", (COMMON / "install.sh").read_text())
    assert function is not None
    places = [tmp_path / "sources", tmp_path / "download" / "src"]
    for place in places:
        place.mkdir(parents=True)
    head = f"set -euo pipefail\nsources={places[0]} download={places[1].parent}\n{function[0]}\n"
    for copy in (folder, sdist):
        (places[0] / "given").mkdir(exist_ok=True)
        (places[0] / "given" / "stale.py").write_text("")
        script = f"{head}checkout given https://given.invalid/given.git v1.0 {copy}"
        ended = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stderr
        for place in places:
            assert (place / "given" / "given.py").is_file() and not (place / "given" / "stale.py").exists()
            assert os.access(place / "given" / "setup.py", os.W_OK)


@pytest.mark.slow
def test_what_a_machine_with_a_network_collects_is_installed_on_one_without(tmp_path: Path) -> None:
    """The two halves of each step: an index with a wheel and with sources, then only the folder that the first half filled."""
    index, filled = tmp_path / "index", tmp_path / "wheels"
    filled.mkdir()
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(index)]
    subprocess.run([*pip, str(write_package(tmp_path, "needed_one"))], check=True)
    built = write_package(tmp_path, "built_one", "needed_one")
    subprocess.run([sys.executable, "setup.py", "-q", "sdist", "-d", str(index)], cwd=built, check=True)
    text = (COMMON / "install.sh").read_text()
    functions = "\n".join(re.findall(r"(?ms)^pip_(?:quietly|install)\(\) \{.*?^\}", text))
    results = []
    for half in ("download", "offline"):
        folder = tmp_path / half
        lines = [
            "set -euo pipefail",
            f"python={sys.executable} wheels={filled} download='' offline=''",
            f"{half}={tmp_path}",
            functions,
            "pip_install --no-deps --no-build-isolation --no-binary=built_one built_one==1.0",
            "pip_install --upgrade built_one",
            "$python -c 'import built_one, needed_one; print(built_one.__file__)'",
        ]
        variables = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_TARGET": str(folder), "PYTHONPATH": str(folder)}
        variables |= {"PIP_FIND_LINKS": str(index)} if half == "download" else {}
        ended = subprocess.run(
            ["bash", "-c", "\n".join(lines)], capture_output=True, text=True, env={**os.environ, **variables}, check=False
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        results.append(ended.stdout.splitlines()[-1].startswith(str(folder)))
    assert results == [True, True]
    assert {path.name.partition("-")[0] for path in filled.iterdir()} == {"built_one", "needed_one"}
