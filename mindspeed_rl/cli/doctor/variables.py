"""Environment variables of the Ascend stack: meaning, typical value, consequence of a wrong one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from mindspeed_rl.registry import did_you_mean


@dataclass(frozen=True)
class _Variable:
    """One variable.

    Attributes:
        name: name of the variable.
        meaning: its effect.
        typical: value in this suite; "" when there is none.
        breaks: consequence of a wrong or missing value.
    """

    name: str
    meaning: str
    typical: str = ""
    breaks: str = ""


VARIABLES = (
    _Variable("ASCEND_HOME_PATH", "folder of the CANN toolkit; set_env.sh sets it", "", "CANN libraries are not found"),
    _Variable(
        "ASCEND_OPP_PATH", "operator package; set_env.sh sets it", "", "`import torch` fails when only ASCEND_HOME_PATH is set"
    ),
    _Variable(
        "LD_LIBRARY_PATH", "set_env.sh adds the libraries of CANN and of the driver", "", "lib*.so: cannot open shared object"
    ),
    _Variable("ATB_HOME_PATH", "ATB library of NNAL; nnal/atb/set_env.sh sets it", "", "vLLM finds no device (libatb.so)"),
    _Variable("ASCEND_RT_VISIBLE_DEVICES", "devices this process may use", "", "no device, or error 107001"),
    _Variable(
        "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES",
        "Ray does not change ASCEND_RT_VISIBLE_DEVICES; any value switches it on, 0 too",
        "1",
        "all ranks on die 0, or visibility narrowed twice",
    ),
    _Variable(
        "TORCH_DEVICE_BACKEND_AUTOLOAD", "0: `import torch` does not load torch_npu", "", "`import torch` fails on driver nodes"
    ),
    _Variable(
        "PYTORCH_NPU_ALLOC_CONF",
        "caching allocator; expandable_segments:True only in processes without a rollout engine",
        "",
        "sleep mode asserts; not together with max_split_size_mb or PYTORCH_ALLOC_CONF",
    ),
    _Variable("PYTORCH_ALLOC_CONF", "the same for every torch device", "", "refused beside PYTORCH_NPU_ALLOC_CONF"),
    _Variable(
        "TASK_QUEUE_ENABLE",
        "operator queue: 2 trains fastest, 1 with graph capture, 0 to debug",
        "2",
        "2 fails in graph capture",
    ),
    _Variable("ASCEND_LAUNCH_BLOCKING", "1: wait after every operator, to find the failing one", "", "slow; not with graphs"),
    _Variable("CPU_AFFINITY_CONF", "1 or 2: bind threads to cores near the device", "1", "slow; harmful in small cpusets"),
    _Variable("MULTI_STREAM_MEMORY_REUSE", "0 to 3: how memory is reused between streams", "", "value check at import"),
    _Variable("STREAMS_PER_DEVICE", "8 or 32", "", "value check at import"),
    _Variable("COMBINED_ENABLE", "1: join small non-contiguous operators", ""),
    _Variable("NPU_ASD_ENABLE", "0: no silent-error detection", ""),
    _Variable("INF_NAN_MODE_ENABLE", "1: infinities and NaN stay visible", "", "0 hides NaN"),
    _Variable(
        "HCCL_CONNECT_TIMEOUT", "seconds until peers must have connected (120 when unset)", "1800", "EI0006 while models load"
    ),
    _Variable("HCCL_EXEC_TIMEOUT", "seconds a collective may wait (1836 when unset); >= the one above", "3600", "EI0002"),
    _Variable(
        "HCCL_BUFFSIZE", "MiB of each of the two buffers of a communicator (200 when unset)", "256", "GiB of device memory"
    ),
    _Variable("HCCL_IF_BASE_PORT", "first of 16 ports", "12345", "port clash between jobs"),
    _Variable(
        "HCCL_HOST_SOCKET_PORT_RANGE",
        "port range of processes that share a device; auto",
        "",
        "bind failures; not with MC2 on A2",
    ),
    _Variable("HCCL_NPU_SOCKET_PORT_RANGE", "the same on the device side; auto", "", "bind failures"),
    _Variable("HCCL_SOCKET_IFNAME", "network interface of the node", "", "rendezvous hangs"),
    _Variable("GLOO_SOCKET_IFNAME", "the same for gloo", "", "rendezvous hangs"),
    _Variable("TP_SOCKET_IFNAME", "the same for torch RPC", "", "rendezvous hangs"),
    _Variable("HCCL_OP_EXPANSION_MODE", "AIV: collectives on the vector cores", "", "AIV caps HCCL_EXEC_TIMEOUT at 1091 s"),
    _Variable("HCCL_ALGO", "algorithm of collectives by level"),
    _Variable("HCCL_DETERMINISTIC", "true or strict: reproducible reductions", "", "runs differ in the last bits"),
    _Variable("CLOSE_MATMUL_K_SHIFT", "1: matrix products sum in one fixed order", "", "npu_deterministic sets it; slower"),
    _Variable("HCCL_RDMA_TC", "traffic class of the RDMA card, 0 to 255 by fours (132 when unset)", "", "no flow control"),
    _Variable("HCCL_RDMA_SL", "service level of the RDMA card, 0 to 7 (4 when unset)", "", "no flow control"),
    _Variable(
        "HCCL_RDMA_TIMEOUT", "retransmission after 4.096 us x 2 ** this, 5 to 20 (20 when unset)", "", "ERROR CQE when low"
    ),
    _Variable("HCCL_RDMA_RETRY_CNT", "retransmissions of the RDMA card, 1 to 7 (7 when unset)", "", "ERROR CQE when low"),
    _Variable(
        "HCCL_INTRA_ROCE_ENABLE", "1: RoCE instead of PCIe inside a server without HCCS between its halves", "", "slow groups"
    ),
    _Variable("HCCL_INTRA_PCIE_ENABLE", "1: PCIe inside such a server; excludes the one above", "", "refused by HCCL"),
    _Variable("HCCL_WHITELIST_DISABLE", "1: no whitelist of peers", "", "connections refused"),
    _Variable("HCCL_ASYNC_ERROR_HANDLING", "1: errors end the process", ""),
    _Variable("TORCH_HCCL_ZERO_COPY", "1: large tensors are sent without a copy"),
    _Variable("TORCH_HCCL_TRACE_BUFFER_SIZE", "collectives that the trace remembers; 0: no trace"),
    _Variable("TORCH_HCCL_HEARTBEAT_TIMEOUT_SEC", "seconds until a silent process counts as dead", "", "healthy processes end"),
    _Variable("HCCL_ENTRY_LOG_ENABLE", "1: a log line for every collective", "", "full disk"),
    _Variable(
        "CUDA_DEVICE_MAX_CONNECTIONS", "Megatron asserts 1 with tensor parallelism, on NPUs too", "1", "assertion at start"
    ),
    _Variable("VLLM_USE_V1", "1: the V1 engine (older vLLM only)", "1"),
    _Variable("VLLM_VERSION", "release of a vLLM installed from source", "", "InvalidVersion"),
    _Variable(
        "VLLM_ASCEND_ENABLE_NZ",
        "0: weights stay in the plain layout; from 0.27 on rl_config does it",
        "0",
        "wake_up and weight updates refuse to run",
    ),
    _Variable(
        "VLLM_ASCEND_ENABLE_FUSED_MC2",
        "must stay 0: it forces expert weights into NZ; not in 0.27 and later",
        "",
        "weight updates",
    ),
    _Variable("VLLM_ASCEND_ENABLE_MATMUL_ALLREDUCE", "1: fused product and reduction; not in 0.25 and later"),
    _Variable("VLLM_ASCEND_ENABLE_FLASHCOMM1", "1: sequence-parallel rollout; needs tensor, for MoE also expert parallelism"),
    _Variable(
        "VLLM_ASCEND_ENABLE_MLAPO",
        "must stay 0: fused start of latent attention, from copies of weights; not in 0.27 and later",
        "",
        "weight updates",
    ),
    _Variable("VLLM_ASCEND_BALANCE_SCHEDULING", "1: balanced scheduling between data-parallel engines; not in 0.27 and later"),
    _Variable("VLLM_ASCEND_ENABLE_TOPK_OPTIMIZE", "1: fused sampling cut-offs (older releases)", "1"),
    _Variable("VLLM_WORKER_MULTIPROC_METHOD", "spawn", "", "fork after device start"),
    _Variable("VLLM_BATCH_INVARIANT", "1: results independent of the batch (beta)", "", "slower; forces NZ off"),
    _Variable(
        "VLLM_SERVER_DEV_MODE", "1: endpoints for development", "", "anybody who reaches the server can change the engine"
    ),
    _Variable("VLLM_DISABLE_COMPILE_CACHE", "1: graphs are compiled anew"),
    _Variable("VLLM_DP_SIZE", "data-parallel size of the rollout; the suite derives it", "1"),
    _Variable("ASCEND_GLOBAL_LOG_LEVEL", "0 debug to 3 error", "3", "full disk"),
    _Variable("ASCEND_PROCESS_LOG_PATH", "folder of plogs", ""),
    _Variable("ASCEND_SLOG_PRINT_TO_STDOUT", "1: plogs on the screen too", "", "unreadable output"),
    _Variable("TRANSFORMERS_VERBOSITY", "error: no warnings"),
    _Variable("HYDRA_FULL_ERROR", "1: whole stack of configuration errors", "1"),
    _Variable("OMP_NUM_THREADS", "threads of one process; on the CPU unset: cores / workers"),
    _Variable("TOKENIZERS_PARALLELISM", "threads of tokenizers; warns after fork when true", "true"),
)

_SOURCE = "source the toolkit's set_env.sh"
_NAMES = frozenset(variable.name for variable in VARIABLES)
#: further variables of HCCL, which this suite neither sets nor explains: a name outside both is a misspelt one
_OTHER_HCCL = frozenset(
    "HCCL_BLOCKING_WAIT HCCL_CONCURRENT_ENABLE HCCL_DEBUG_CONFIG HCCL_DESYNC_DEBUG HCCL_DFS_CONFIG HCCL_DIAGNOSE_ENABLE "
    "HCCL_EVENT_TIMEOUT HCCL_IF_IP HCCL_INDEPENDENT_OP HCCL_INTER_HCCS_DISABLE HCCL_LOGIC_SUPERPOD_ID HCCL_MULTI_QP_THRESHOLD "
    "HCCL_NPU_NET_PROTOCOL HCCL_OP_RETRY_ENABLE HCCL_OP_RETRY_PARAMS HCCL_RDMA_PCIE_DIRECT_POST_NOSTRICT "
    "HCCL_RDMA_QPS_PER_CONNECTION HCCL_RDMA_QP_PORT_CONFIG_PATH HCCL_SOCKET_FAMILY HCCL_SO_PATH HCCL_TEST_USE_DEVS "
    "HCCL_WHITELIST_FILE HCCL_ZERO_COPY".split()
)
#: variable -> least and largest value, and the step between values
_RANGES = {
    "HCCL_RDMA_TC": range(0, 256, 4),
    "HCCL_RDMA_SL": range(8),
    "HCCL_RDMA_TIMEOUT": range(5, 25),
    "HCCL_RDMA_RETRY_CNT": range(1, 8),
}


def _number(environment: Mapping[str, str], name: str) -> int:
    """Return the value of a variable; -1 where it is not set or not a number."""
    value = environment.get(name, "")
    return int(value) if value.isdigit() else -1


def _is_expandable(environment: Mapping[str, str]) -> bool:
    return "expandable_segments:True" in environment.get("PYTORCH_NPU_ALLOC_CONF", "").replace(" ", "")


@dataclass(frozen=True)
class _Problem:
    """A combination of values that does harm.

    Attributes:
        variable: the variable to change.
        text: what is wrong, with values as {NAME}.
        fix: what to do.
        is_found: (environment) -> whether it has the problem.
    """

    variable: str
    text: str
    fix: str
    is_found: Callable[[Mapping[str, str]], object]


_PROBLEMS = (
    _Problem(
        "ASCEND_OPP_PATH",
        "is not set while ASCEND_HOME_PATH is: `import torch` will fail",
        _SOURCE,
        lambda env: env.get("ASCEND_HOME_PATH") and not env.get("ASCEND_OPP_PATH"),
    ),
    _Problem(
        "ATB_HOME_PATH",
        "is not set: vLLM will find no device",
        "source nnal/atb/set_env.sh",
        lambda env: env.get("ASCEND_HOME_PATH") and not env.get("ATB_HOME_PATH"),
    ),
    _Problem(
        "PYTORCH_NPU_ALLOC_CONF",
        "'{PYTORCH_NPU_ALLOC_CONF}' is exported to every process; the rollout engine's sleep mode asserts on it",
        "unset it; the suite sets it for the processes that may have it",
        _is_expandable,
    ),
    _Problem(
        "PYTORCH_NPU_ALLOC_CONF",
        "expandable_segments excludes the other two settings",
        "keep one of them",
        lambda env: (
            _is_expandable(env) and re.search("max_split_size_mb|garbage_collection_threshold", env["PYTORCH_NPU_ALLOC_CONF"])
        ),
    ),
    _Problem(
        "PYTORCH_ALLOC_CONF",
        "is set together with PYTORCH_NPU_ALLOC_CONF; torch_npu refuses both",
        "keep one of them",
        lambda env: env.get("PYTORCH_NPU_ALLOC_CONF") and env.get("PYTORCH_ALLOC_CONF"),
    ),
    _Problem(
        "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES",
        "Ray reads 0 as set: any text switches it on",
        "unset it or set 1",
        lambda env: env.get("RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES") == "0",
    ),
    _Problem(
        "VLLM_ASCEND_ENABLE_NZ",
        "{VLLM_ASCEND_ENABLE_NZ}: weights could not be updated",
        "set it to 0",
        lambda env: env.get("VLLM_ASCEND_ENABLE_NZ", "0") != "0",
    ),
    _Problem(
        "VLLM_ASCEND_ENABLE_FUSED_MC2",
        "{VLLM_ASCEND_ENABLE_FUSED_MC2}: weights could not be updated",
        "set it to 0",
        lambda env: env.get("VLLM_ASCEND_ENABLE_FUSED_MC2", "0") != "0",
    ),
    _Problem(
        "VLLM_ASCEND_ENABLE_MLAPO",
        "{VLLM_ASCEND_ENABLE_MLAPO}: weights of latent attention could not be updated",
        "set it to 0",
        lambda env: env.get("VLLM_ASCEND_ENABLE_MLAPO", "0") != "0",
    ),
    _Problem(
        "HCCL_EXEC_TIMEOUT",
        "{HCCL_EXEC_TIMEOUT} is below HCCL_CONNECT_TIMEOUT ({HCCL_CONNECT_TIMEOUT})",
        "raise it",
        lambda env: -1 < _number(env, "HCCL_EXEC_TIMEOUT") < _number(env, "HCCL_CONNECT_TIMEOUT"),
    ),
    _Problem(
        "HCCL_EXEC_TIMEOUT",
        "{HCCL_EXEC_TIMEOUT}: AIV mode caps it at 1091 s",
        "expect 1091, or leave AIV mode",
        lambda env: env.get("HCCL_OP_EXPANSION_MODE") == "AIV" and _number(env, "HCCL_EXEC_TIMEOUT") > 1091,
    ),
    _Problem("INF_NAN_MODE_ENABLE", "0 hides NaN and infinity", "unset it", lambda env: env.get("INF_NAN_MODE_ENABLE") == "0"),
    _Problem(
        "ASCEND_LAUNCH_BLOCKING",
        "1 waits after every operator",
        "unset it when you are done debugging",
        lambda env: env.get("ASCEND_LAUNCH_BLOCKING") == "1",
    ),
    _Problem(
        "HCCL_INTRA_ROCE_ENABLE",
        "1 while HCCL_INTRA_PCIE_ENABLE is 1; HCCL refuses both",
        "unset one",
        lambda env: env.get("HCCL_INTRA_ROCE_ENABLE") == env.get("HCCL_INTRA_PCIE_ENABLE") == "1",
    ),
    _Problem(
        "TASK_QUEUE_ENABLE",
        "{TASK_QUEUE_ENABLE} is not 0, 1 or 2",
        "use 2, or 1 with graph capture",
        lambda env: env.get("TASK_QUEUE_ENABLE", "2") not in ("0", "1", "2"),
    ),
)


def find_problems(environment: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """Return (variable, problem, fix) of an environment. Reads the file system for the toolkit's folders only."""
    known = [
        (problem.variable, problem.text.format_map(environment), problem.fix)
        for problem in _PROBLEMS
        if problem.is_found(environment)
    ]
    return [*known, *_find_missing_folders(environment), *_find_unknown_names(environment), *_find_wrong_numbers(environment)]


def _find_missing_folders(environment: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    home = environment.get("ASCEND_HOME_PATH")
    if not home:
        return
    for folder in (home, environment.get("ASCEND_OPP_PATH"), f"{home}/runtime", f"{home}/compiler"):
        if folder and not Path(folder).is_dir():
            yield "ASCEND_HOME_PATH", f"the folder {folder} does not exist", _SOURCE


def _find_unknown_names(environment: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    known = [name for name in _NAMES | _OTHER_HCCL if name.startswith("HCCL_")]
    for name in sorted(environment):
        if name.startswith("HCCL_") and name not in known:
            yield name, f"HCCL has no such variable{did_you_mean(name, known)}", "correct its name, or unset it"


def _find_wrong_numbers(environment: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    for name, values in _RANGES.items():
        if name in environment and _number(environment, name) not in values:
            step = f" in steps of {values.step}" if values.step > 1 else ""
            text = f"{environment[name]} is not a number from {values[0]} to {values[-1]}{step}"
            yield name, text, "correct or unset it"
