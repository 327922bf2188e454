"""Package lists of the NPU environments. Needs nothing but Python; install.sh calls it before anything is installed.

python packages.py constraints LINE         versions of a line (main, fallback, cann85, simulated), with the recorded ones
python packages.py requirements LINE        what pip installs in one step, after vLLM without its requirements
python packages.py pinned LINE PACKAGE      the version of one package
python packages.py resolve LINE [--write]   resolve the list for every host of a line, with only wheels; needs a package index,
                                            an environment with torch (the suite's own is one) and python3.X for each Python
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
#: built or taken in other ways: vLLM and vllm-ascend without their requirements, triton-ascend from an index of its own
SEPARATE = ("vllm", "vllm-ascend", "triton-ascend")
#: dependencies without wheels, in pure Python: pip builds them with only setuptools
_SOURCES = ("antlr4-python3-runtime==4.9.3",)
#: imported by vLLM's setup.py, which pip does not isolate
_BUILDS_VLLM = ("setuptools-rust", "setuptools-scm", "setuptools<81", "packaging", "jinja2")
#: what `pip install --dry-run` runs as: markers are the host's, not this interpreter's
_PIP_OF_HOST = """
import json, sys
from pip._vendor.packaging import markers
own = markers.default_environment()
markers.default_environment = lambda: {**own, **json.loads(sys.argv[1])}
from pip._internal.cli.main import main
sys.exit(main(sys.argv[2:]))
"""


class Host(NamedTuple):
    """A kind of machine: its processor and its Python."""

    machine: str
    python: str


class Line(NamedTuple):
    """Hosts on which the wheels of a line can be installed.

    Attributes:
        glibc: minor number of the oldest glibc 2.x, from the tags of the wheels.
        machines, pythons: of the hosts.
        record: the line whose recorded versions are taken.
    """

    glibc: int
    machines: tuple[str, ...]
    pythons: tuple[str, ...]
    record: str

    @property
    def hosts(self) -> list[Host]:
        """Every combination of machine and Python."""
        return [Host(*pair) for pair in itertools.product(self.machines, self.pythons)]


_BOTH = ("aarch64", "x86_64")
LINES = {
    "main": Line(34, _BOTH, ("3.10", "3.11", "3.12"), "main"),  # the wheels of vllm-ascend are manylinux_2_34
    "fallback": Line(28, _BOTH, ("3.10", "3.11"), "fallback"),
    "cann85": Line(28, _BOTH, ("3.10", "3.11"), "fallback"),
    "simulated": Line(34, ("x86_64",), ("3.11",), "main"),
}


def name_of(requirement: str) -> str:
    """Return the normalised package name of a requirement line; "" where it has none."""
    match = re.match(r"\s*([A-Za-z0-9][\w.-]*)", requirement)
    return re.sub(r"[-_.]+", "-", match[1]).lower() if match else ""


def _layers(line: str) -> Iterator[list[str]]:
    """Yield the lines of a constraints file, then the lines of the file that it is laid over."""
    lines = (HERE / f"constraints-{line}.txt").read_text().splitlines()
    yield [entry for entry in lines if name_of(entry)]
    for base in (entry.removeprefix("# over: ") for entry in lines if entry.startswith("# over: ")):
        yield from _layers(base)


def constraints(line: str, *, recorded: bool = True) -> list[str]:
    """Return the constraints of a line: an exact version hides what lower layers and the record have of a package."""
    record = HERE / f"resolved-{LINES[line].record}.txt"
    layers = [*_layers(line), *([record.read_text().splitlines()] if recorded and record.is_file() else [])]
    pinned: set[str] = set()
    found: list[str] = []
    for layer in layers:
        kept = [entry.partition("#")[0].rstrip() for entry in layer if name_of(entry) and name_of(entry) not in pinned]
        found += kept
        pinned |= {name_of(entry) for entry in kept if "==" in entry}
    return found


def pinned_version(line: str, package: str) -> str:
    """Return the version of a package that a line pins."""
    return next(entry.partition("==")[2] for entry in constraints(line, recorded=False) if name_of(entry) == package)


def _replaced(line: str) -> set[str]:
    """Names whose version the line sets against vLLM's requirement."""
    return {name_of(entry) for layer in _layers(line) for entry in layer if "# replaces:" in entry}


def requirements(line: str, of_vllm: Iterable[str]) -> list[str]:
    """Return what one call of pip installs: requirements.txt, the requirements of vLLM, and the replaced ones.

    Args:
        of_vllm: lines of its metadata.
    """
    replaced = _replaced(line)
    own = [entry.partition("#")[0].rstrip() for entry in (HERE / "requirements.txt").read_text().splitlines()]
    theirs = [entry for entry in of_vllm if "extra ==" not in entry and name_of(entry) not in replaced]
    return [entry for entry in [*own, *theirs, *sorted(replaced)] if name_of(entry)]


def _source_of_vllm(version: str, into: Path) -> tuple[list[str], list[str]]:
    """Return the requirements and the build requirements of vLLM's sdist when it is built without a device."""
    environment = {**os.environ, "VLLM_TARGET_DEVICE": "empty", "VLLM_VERSION_OVERRIDE": version}
    environment["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    # what vLLM's setup.py imports, next to the packages of this environment, which may lack it
    build = into / "build"
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--target", str(build), *_BUILDS_VLLM], check=True)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(build), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-build-isolation", "--no-binary", "vllm"]
    subprocess.run([*command, "-d", str(into), f"vllm=={version}"], env=environment, check=True)
    with tarfile.open(next(into.glob("vllm-*.tar.gz"))) as archive:

        def read(name: str) -> str:
            file = archive.extractfile(f"vllm-{version}/{name}")
            assert file is not None
            return file.read().decode()

        common = [entry.partition("#")[0].strip() for entry in read("requirements/common.txt").splitlines()]
        table = re.search(r"(?ms)^\[build-system\].*?requires = \[(.*?)^\]", read("pyproject.toml"))
    assert table is not None
    return [entry for entry in common if name_of(entry)], re.findall(r'"([^"]+)"', table[1])


def _find_python(version: str) -> str:
    """Return an interpreter of this version that has pip, else this one: pip compares some packages with its own Python."""
    if sys.version_info[:2] == tuple(map(int, version.split("."))):
        return sys.executable
    python = shutil.which(f"python{version}")
    if python and subprocess.run([python, "-m", "pip", "--version"], capture_output=True).returncode == 0:
        return python
    print(f"no python{version} with pip is on PATH: {sys.executable} resolves for it, where pip may fail", file=sys.stderr)
    return sys.executable


def _add_cpu_build(version: str, into: Path) -> None:
    """Write a stand-in for torch's CPU build, which has an index of its own, with the requirements of the aarch64 wheel."""
    needs = ("filelock", "typing-extensions>=4.10", "sympy>=1.13.3", "networkx>=2.5.1", "jinja2", "fsspec>=0.8.5", "setuptools")
    folder = f"torch-{version}+cpu.dist-info"
    head = f"Metadata-Version: 2.1\nName: torch\nVersion: {version}+cpu\n"
    with zipfile.ZipFile(into / f"torch-{version}+cpu-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{folder}/METADATA", head + "".join(f"Requires-Dist: {need}\n" for need in needs))
        tags = "Root-Is-Purelib: true\nTag: py3-none-any\n"
        wheel.writestr(f"{folder}/WHEEL", f"Wheel-Version: 1.0\nGenerator: packages.py\n{tags}")
        wheel.writestr(f"{folder}/RECORD", "")


def _requirements_of_project() -> list[str]:
    """Return the requirements of this package with its extra "npu"."""
    import tomllib  # Python 3.11, as the environments that resolve have

    project = tomllib.loads((HERE.parents[1] / "pyproject.toml").read_text())["project"]
    return [*project["dependencies"], *project["optional-dependencies"]["npu"]]


def resolve(line: str, hosts: Sequence[Host], *, recorded: bool) -> dict[Host, dict[str, str]]:
    """Return package -> version for each host, with only wheels.

    Raises:
        CalledProcessError: pip finds no solution; it has printed why.
    """
    glibc, found = LINES[line].glibc, {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        of_vllm, builds = _source_of_vllm(pinned_version(line, "vllm"), folder)
        subprocess.run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", scratch, *_SOURCES], check=True)
        wanted = [*requirements(line, of_vllm), *_requirements_of_project()]
        wanted += [need for need in builds if name_of(need) != "torch"]
        (folder / "requirements").write_text("\n".join(wanted))
        limits = [entry for entry in constraints(line, recorded=recorded) if name_of(entry) not in SEPARATE]
        for host in hosts:
            if host.machine == "x86_64":
                torch = pinned_version(line, "torch")
                _add_cpu_build(torch, folder)
                limits = [f"torch=={torch}+cpu", *(entry for entry in limits if name_of(entry) != "torch")]
            (folder / "constraints").write_text("\n".join(limits))
            platforms = [f"manylinux_2_{minor}_{host.machine}" for minor in range(glibc, 4, -1)]
            platforms += [f"manylinux{alias}_{host.machine}" for alias in ("2014", "2010", "1")]
            markers = {
                "platform_machine": host.machine, "python_version": host.python, "python_full_version": f"{host.python}.9",
            }  # fmt: skip
            report = folder / "report.json"
            command = [_find_python(host.python), "-c", _PIP_OF_HOST, json.dumps(markers), "install", "-q", "--dry-run"]
            command += ["--ignore-installed", "--use-feature", "fast-deps", "--only-binary", ":all:"]
            command += ["--target", str(folder / "none")]
            command += ["--find-links", scratch, "--report", str(report)]
            command += ["--python-version", host.python, "--implementation", "cp"]
            command += [word for platform in platforms for word in ("--platform", platform)]
            command += ["-r", str(folder / "requirements"), "-c", str(folder / "constraints")]
            print(f"{line}: {host.machine}, Python {host.python}", file=sys.stderr)
            subprocess.run(command, check=True)
            items = [item["metadata"] for item in json.loads(report.read_text())["install"]]
            found[host] = dict(sorted((name_of(item["name"]), item["version"]) for item in items))
    return found


def record(resolved: dict[Host, dict[str, str]]) -> list[str]:
    """Return constraints that give every host its versions, with a marker where hosts differ."""
    lines = []
    for name in sorted(set().union(*resolved.values())):
        found: dict[str, set[Host]] = {}
        for host, versions in resolved.items():
            if name in versions:
                found.setdefault(versions[name].removesuffix("+cpu"), set()).add(host)
        for version, hosts in sorted(found.items()):
            parts = []
            for python in sorted({host.python for host in hosts}, key=lambda text: int(text.partition(".")[2])):
                machines = sorted(host.machine for host in hosts if host.python == python)
                if len(machines) == sum(host.python == python for host in resolved):
                    parts.append(f'python_version == "{python}"')
                else:
                    parts += [f'python_version == "{python}" and platform_machine == "{machine}"' for machine in machines]
            lines.append(f"{name}=={version}" + ("" if len(hosts) == len(resolved) else "; " + " or ".join(parts)))
    return lines


def main() -> None:
    """Print or record one of the lists."""
    parser = argparse.ArgumentParser(description="Package lists of the NPU environments.")
    parser.add_argument("what", choices=("constraints", "requirements", "resolve", "pinned"))
    parser.add_argument("line", choices=tuple(LINES))
    parser.add_argument("package", nargs="?", help="of pinned")
    parser.add_argument("--latest", action="store_true", help="constraints: without the recorded versions")
    parser.add_argument("--write", action="store_true", help="resolve: anew, and record the result")
    arguments = parser.parse_args()
    line = arguments.line
    if arguments.what == "constraints":
        print(*constraints(line, recorded=not arguments.latest), sep="\n")
    elif arguments.what == "pinned":
        print(pinned_version(line, arguments.package))
    elif arguments.what == "requirements":
        print(*requirements(line, importlib.metadata.requires("vllm") or ()), sep="\n")
    else:
        try:
            resolved = resolve(line, LINES[line].hosts, recorded=not arguments.write)
        except subprocess.CalledProcessError:
            sys.exit(f"packages.py: pip failed for line {line}, as it says; each host needs its own Python with pip on PATH")
        if arguments.write:
            head = f"# {line}: what `packages.py resolve {line} --write` found for every host of the line"
            (HERE / f"resolved-{line}.txt").write_text("\n".join([head, *record(resolved)]) + "\n")


if __name__ == "__main__":
    main()
