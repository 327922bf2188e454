"""Failures in log files of one or many ranks, earliest first, and the known failures of the Ascend stack with their fixes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path


@dataclass(frozen=True)
class _Message:
    """A known failure.

    Attributes:
        key: stable name, used in --json and in the documentation.
        pattern: regular expression that a log line matches.
        cause, fix: one or two sentences each.
    """

    key: str
    pattern: re.Pattern[str]
    cause: str
    fix: str


def _message(key: str, pattern: str, cause: str, fix: str) -> _Message:
    return _Message(key, re.compile(pattern), cause, fix)


#: in the order of matching: specific messages come before general ones
_MESSAGES = (
    _message(
        "cann-not-sourced",
        r"lib(hccl|ascendcl|acl_op_compiler|ge_runner|graph)\.so[^:]*: cannot open shared object",
        "The CANN libraries are not on the library path.",
        "Source the toolkit's set_env.sh in the shell that starts the program (envs/npu_a2/set_env.sh and "
        "envs/npu_a3/set_env.sh do).",
    ),
    _message(
        "backend-autoload",
        r"Failed to load the backend extension: torch_npu|ASCEND_OPP_PATH.*(not set|not exist|does not exist)",
        "`import torch` loads torch_npu by itself, and the CANN environment is missing or only half set; or torch_npu is "
        "installed on a machine without NPU.",
        "Source set_env.sh, or set TORCH_DEVICE_BACKEND_AUTOLOAD=0 on machines that only drive.",
    ),
    _message(
        "atb-not-sourced",
        r"libatb\.so|Failed to infer device type",
        "The ATB library of the NNAL package is not on the library path, so vLLM finds no device.",
        "Install Ascend NNAL and source nnal/atb/set_env.sh after the toolkit's set_env.sh.",
    ),
    _message(
        "two-accelerators",
        r"Two accelerators cannot be used at the same time",
        "torch is a CUDA build, and torch_npu accepts only one accelerator in a process.",
        "Install the CPU build: pip install torch==<version>+cpu (its `torch.version.cuda` is None).",
    ),
    _message(
        "torch-mismatch",
        r"undefined symbol.*(c10|at5|torch)|libtorch_npu\.so: undefined symbol|_C\.[\w-]*\.so: undefined symbol",
        "torch and torch_npu were built for different versions or C++ ABIs.",
        "Install the pair of one line of `mindspeed-rl doctor` (torch and torch_npu have the same first three numbers).",
    ),
    _message(
        "device-not-available",
        r"torch_npu detected, but NPU device is not available",
        "torch_npu is installed but this process sees no device.",
        "Check ASCEND_RT_VISIBLE_DEVICES, the driver (npu-smi info) and that the container got /dev/davinci*.",
    ),
    _message(
        "invalid-device",
        r"\b107001\b|Invalid device ID",
        "A device number is outside what this process sees, or the container lacks its device file.",
        "Check ASCEND_RT_VISIBLE_DEVICES and /dev/davinci*; with RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES=1 no "
        "one else may narrow it.",
    ),
    _message(
        "connect-timeout",
        r"EI0006|socket establish timeout|wait socket establish",
        "A rank waited for another one to connect until HCCL_CONNECT_TIMEOUT: the peer died, is still loading weights, "
        "or a firewall "
        "or another TLS setting is between them.",
        "Look at the earliest error of the other ranks; raise HCCL_CONNECT_TIMEOUT (1800); check HCCL_SOCKET_IFNAME "
        "and `hccn_tool -i N -tls -g`.",
    ),
    _message(
        "execution-timeout",
        r"EI0002|\b507048\b|\b507011\b|notify wait (time ?out|timeout)|event wait timeout",
        "A collective waited for a rank that died, that is slower than HCCL_EXEC_TIMEOUT allows, or that runs other "
        "collectives.",
        "Read the rank with the EARLIEST error first; raise HCCL_EXEC_TIMEOUT for long rollouts and checkpoints (AIV "
        "mode caps it at 1091 s).",
    ),
    _message(
        "port-bind",
        r"EJ\d{4}|bind.*(port|address).*(fail|in use)|(port|address).*already (in use|bound)|Address already in use",
        "Two processes share a device or node and want the same HCCL port.",
        "Set HCCL_HOST_SOCKET_PORT_RANGE=auto and HCCL_NPU_SOCKET_PORT_RANGE=auto, or another HCCL_IF_BASE_PORT for "
        "one of them.",
    ),
    _message(
        "sleep-pool",
        r"Expandable segments are not compatible with memory pool|expandable_segments:True.*camem",
        "The process of a rollout engine with sleep mode has expandable_segments in PYTORCH_NPU_ALLOC_CONF.",
        "Leave it unset in processes that hold a rollout engine; set it for trainers of their own process only.",
    ),
    _message(
        "nz-enabled",
        r"FRACTAL_NZ mode is enabled",
        "Weights are kept in the NZ layout, which cannot be updated in place.",
        "Set VLLM_ASCEND_ENABLE_NZ=0; with vllm-ascend 0.23 also additional_config weight_nz_mode: 0 (the suite sets both).",
    ),
    _message(
        "stream-resources",
        r"\b207008\b|EL0009|stream resource",
        "Graph capture used up the device's streams.",
        "Use enforce_eager: true, or few and small cudagraph_capture_sizes.",
    ),
    _message(
        "out-of-memory",
        r"NPU out of memory|\b207001\b|EL0004|Failed to allocate memory",
        "Device memory is used up. Every HCCL communicator holds two buffers of HCCL_BUFFSIZE MiB beside the model; a "
        "rollout engine "
        "may have kept memory after sleep.",
        "Count communicators x 2 x HCCL_BUFFSIZE, lower it or gpu_memory_utilization, switch on offload_train_*, "
        "recomputation or more parallelism.",
    ),
    _message(
        "operator-missing",
        r"aclnn\w+.*not in lib(opapi|aclnn_ops_train|aclnn_math)|aclnn\w+ .*not (found|implemented)",
        "CANN is older than torch_npu, or the operator package for this chip is not installed.",
        "Install the CANN version of the line that `mindspeed-rl doctor` shows, with its kernels package (A2: 910b, "
        "A3: 910_93, 950: 950).",
    ),
    _message(
        "vllm-version",
        r"InvalidVersion",
        "vLLM was installed from a source tree and has no release number.",
        "Set VLLM_VERSION to the release, for example 0.23.0.",
    ),
    _message(
        "mindspeed-too-old",
        r"KeyError:.*q_layernorm",
        "MindSpeed is older than Megatron-core and does not know this model's layers.",
        "Install MindSpeed from the branch core_r0.16.0.",
    ),
    _message(
        "attention-patched-twice",
        r"the patch of \w+ exist",
        "Two features replace the same Megatron function, usually two attention kernels.",
        "Switch one off: use_flash_attn excludes use_flash_attn_npu_batch_invariant.",
    ),
    _message(
        "core-timeout",
        r"\b507014\b|aicore timeout|AICore.*timeout",
        "A kernel ran longer than the device's watchdog allows.",
        "Read the operator's name in the plog; look for shapes that differ between ranks and for NaN loops; lower the batch.",
    ),
    _message(
        "core-exception",
        r"\b507015\b|aicore exception",
        "A kernel failed on the device: an index out of range, or memory that another kernel overwrote.",
        "Run once with ASCEND_LAUNCH_BLOCKING=1 so that the Python stack shows the operator; compare shapes and token "
        "ids with the vocabulary.",
    ),
    _message(
        "device-memory-fault",
        r"\b507053\b|\b507054\b|[Mm]ulti-?[Bb]it ECC",
        "The device's memory has a hardware fault.",
        "Take the device out of the run (ASCEND_RT_VISIBLE_DEVICES) and report it: `npu-smi info -t ecc -i N`.",
    ),
    _message(
        "acl-inner",
        r"\b507018\b|aicpu exception|ACL.*inner error",
        "An operator failed on the device, often on an index out of range.",
        "Run once with ASCEND_LAUNCH_BLOCKING=1: the Python stack then shows the operator.",
    ),
)

#: module and code of torch_npu's own errors, ERR<module><code>
_ERROR_MODULES = {"00": "PyTorch adapter", "01": "operators", "02": "distributed", "03": "graph", "04": "profiler"}
_ERROR_CODES = {
    "001": "invalid parameter",
    "002": "invalid type",
    "003": "invalid value",
    "004": "invalid pointer",
    "005": "internal error",
    "006": "memory error",
    "007": "feature not supported",
    "008": "not found",
    "009": "unavailable",
    "010": "system call failed",
    "011": "timeout",
    "012": "no permission",
    "100": "call to ACL failed",
    "200": "call to HCCL failed",
    "300": "call to GE failed",
}
_ERROR = re.compile(r"\bERR(\d{2})(\d{3})\b")


def _explain_error_code(line: str) -> str | None:
    """Return the meaning of an ERRxxyyy code of torch_npu in a log line, or None."""
    code = _ERROR.search(line)
    if code is None or code[1] not in _ERROR_MODULES:
        return None
    return f"{code[0]}: {_ERROR_MODULES[code[1]]}, {_ERROR_CODES.get(code[2], 'unknown code')}"


def match(line: str) -> _Message | None:
    """Return the first known message that matches a line."""
    return next((message for message in _MESSAGES if message.pattern.search(line)), None)


_TRACEBACK = "Traceback (most recent call last):"
_FRAME = re.compile(r'^\s*File "([^"]+)", line (\d+), in (.+)$')
_EXCEPTION = re.compile(r"^([A-Za-z_][\w.]*)(?:: (.*))?$")
_CHAINED = ("The above exception was the direct cause", "During handling of the above exception")
#: ends of a program that are not a failure
_INTENDED = ("KeyboardInterrupt", "SystemExit", "GeneratorExit")

_TIME = re.compile(r"(\d{4}-\d{2}-\d{2})[-T ](\d{2}:\d{2}:\d{2})(?:[.,](\d{3}))?")


@dataclass(frozen=True)
class LogFinding:
    """A known failure in a log, or an exception that a program ended with.

    Attributes:
        key, cause, fix: key of the message, its cause and the fix.
        file, line_number, line: its first occurrence.
        time: time stamp on or before that line, sortable, or "".
        count: lines that show it in that file.
        error_code: explanation of an ERRxxyyy code on the line, or None.
    """

    key: str
    cause: str
    fix: str
    file: str
    line_number: int
    line: str
    time: str
    count: int
    error_code: str | None


def _read_log(path: str | Path) -> list[LogFinding]:
    """Return the known failures of one file in order of appearance, then the exceptions that its tracebacks end with.

    Raises:
        ValueError: the file cannot be read.
    """
    try:
        text = Path(path).read_text(errors="replace")
    except OSError as error:
        raise ValueError(f"--log: {path} cannot be read ({error.strerror}).") from error
    first: dict[str, LogFinding] = {}
    lines = text.splitlines()
    time = ""
    for index, line in enumerate(lines, 1):
        stamp = _TIME.search(line)
        if stamp:
            time = f"{stamp[1]} {stamp[2]}.{stamp[3] or '000'}"
        message = match(line)
        if message is None:
            continue
        if message.key in first:
            seen = first[message.key]
            first[message.key] = replace(seen, count=seen.count + 1)
            continue
        first[message.key] = LogFinding(
            key=message.key,
            cause=message.cause,
            fix=message.fix,
            file=str(path),
            line_number=index,
            line=line.strip()[:300],
            time=time,
            count=1,
            error_code=_explain_error_code(line),
        )
    known = {finding.line for finding in first.values()}
    return [*first.values(), *(entry for entry in _find_exceptions(str(path), lines) if entry.line not in known)]


def _find_exceptions(path: str, lines: list[str]) -> list[LogFinding]:
    """Return the exceptions that tracebacks end with, each once; of a chain the first, which is the cause."""
    exceptions: dict[str, LogFinding] = {}
    time, frame, is_open, is_chained = "", "", False, False
    for index, line in enumerate(lines, 1):
        if stamp := _TIME.search(line):
            time = f"{stamp[1]} {stamp[2]}.{stamp[3] or '000'}"
        if _TRACEBACK in line:
            is_open, frame = True, ""
        elif line.startswith(_CHAINED):
            is_chained = True
        elif location := _FRAME.match(line) if is_open else None:
            frame = f"{location[1]}:{location[2]}, in {location[3]}"
        elif is_open and line[:1].strip() and (end := _EXCEPTION.match(line)):
            is_open, ends_chain, is_chained = False, is_chained, False
            if ends_chain or end[1].rpartition(".")[2] in _INTENDED:
                continue
            if line in exceptions:
                exceptions[line] = replace(exceptions[line], count=exceptions[line].count + 1)
                continue
            exceptions[line] = LogFinding(
                key="exception",
                cause=f"The program raised {end[1]}{f': {end[2]}' if end[2] else ''}"[:300],
                fix=f"It came from {frame}; the traceback that ends on line {index} has the calls.",
                file=path,
                line_number=index,
                line=line.strip()[:300],
                time=time,
                count=1,
                error_code=None,
            )
    return list(exceptions.values())


def read_logs(paths: Iterable[str | Path]) -> list[LogFinding]:
    """Return the failures of all files, the earliest first where lines have time stamps: later ones follow from it.

    Raises:
        ValueError: one of them is not a file.
    """
    paths = list(paths)
    for path in paths:  # a pipe would be read without end
        if Path(path).exists() and not Path(path).is_file():
            raise ValueError(f"--log {path} is not a plain file")
    findings = [finding for path in paths for finding in _read_log(path)]
    return sorted(findings, key=lambda finding: (finding.time == "", finding.time))
