"""Which versions belong together on Ascend, and what is known to break between them.

Sources: the installation pages and images of verl (2026-08), the version table of vllm-ascend, the metadata of the wheels.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class VersionLine:
    """One set of versions that was released to work together.

    Attributes:
        name: as in envs/: "main" or "fallback".
        cann, driver: lowest CANN toolkit and HDK (driver and firmware).
        packages: distribution name -> required version prefix.
        python: supported minor versions.
        advised: distribution name -> versions that the line was released with; others may work.
    """

    name: str
    cann: str
    driver: str
    packages: dict[str, str]
    python: tuple[tuple[int, int], ...]
    advised: dict[str, str]


LINES = (
    VersionLine(
        name="main",
        cann="9.1.0",
        driver="26.0",
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
        advised={"transformers": ">=5.5,<6", "numpy": "<2"},
    ),
    VersionLine(
        name="fallback",
        cann="9.0.0",
        driver="25.5",
        packages={
            "torch": "2.9.0",
            "torch-npu": "2.9.0",
            "vllm": "0.18.0",
            "vllm-ascend": "0.18.0",
            "triton-ascend": "3.2.0",
            "megatron-core": "0.16.1",
            "mindspeed": "0.16",
        },
        python=((3, 11),),
        advised={"transformers": ">=4.57,<5", "numpy": "<2"},
    ),
)


@dataclass(frozen=True)
class MegatronLine:
    """Releases of Megatron that the same adaptors serve.

    Attributes:
        releases: of megatron-core.
        branches: MindSpeed's, for the NPU.
        verified: where runs were tried.
    """

    name: str
    releases: tuple[str, ...]
    branches: tuple[str, ...]
    verified: str


#: MindSpeed's branches from 0.17 on leave the ground to MegatronAdaptor and TransformerEngineNPU, packages of their own that
#: no index has (README of core_r0.17.0); without them `import mindspeed` fails, so nothing of that line ran for the NPU
MEGATRON_LINES = (
    MegatronLine("first", ("0.16",), ("core_r0.16.0",), "on the CPU and on the simulated NPU"),
    MegatronLine("second", ("0.17", "0.18"), ("core_r0.17.0", "core_r0.18.0"), "on the CPU alone"),
)

#: packages every line needs, whatever their version
NEEDED = ("ray", "transformers", "hydra-core", "safetensors", "transferqueue")

#: lowest versions for weight transfer between processes on one device (inter-process memory)
IPC_DRIVER, IPC_CANN = "25.3", "8.3"


def line_for(installed: dict[str, str | None]) -> VersionLine:
    """The line that most of the installed packages belong to; the main line when none is installed."""

    def matches(line: VersionLine) -> int:
        return sum((installed.get(name) or "").startswith(version) for name, version in line.packages.items())

    return max(LINES, key=matches)


def release_of(version: str) -> str:
    """The first two numbers of a version."""
    return ".".join(version.split(".")[:2])


def megatron_line_for(version: str | None) -> MegatronLine | None:
    """The line that a version of megatron-core belongs to, None where there is none."""
    return next((line for line in MEGATRON_LINES if version and release_of(version) in line.releases), None)


def made_for(mindspeed: str) -> tuple[str, ...]:
    """Releases of megatron-core that a version of MindSpeed may be made for.

    Most branches have Megatron's number. Those for 0.17 and 0.18 still call themselves 0.12.1, as those for 0.12 do: the
    metadata does not tell one from another.
    """
    if mindspeed == "0.12.1":
        return ("0.12", *(release for line in MEGATRON_LINES[1:] for release in line.releases))
    return (release_of(mindspeed),)


def at_least(version: str, lowest: str) -> bool:
    """True when the numbers of a version like "9.1.0.RC1" are not below another's."""

    def numbers(text: str) -> list[int]:
        parts = []
        for part in text.split("."):
            digits = "".join(character for character in part if character.isdigit())
            if not part[:1].isdigit():
                break
            parts.append(int(digits))
        return parts

    mine, other = numbers(version), numbers(lowest)
    size = max(len(mine), len(other))
    return mine + [0] * (size - len(mine)) >= other + [0] * (size - len(other))
