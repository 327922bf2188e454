"""The shipped runtime environment and what each kind of process makes of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mindspeed_rl.cli.doctor import variables as doctor_variables
from mindspeed_rl.config import load_run_config
from mindspeed_rl.platform.cpu import CpuPlatform
from mindspeed_rl.platform.environment import adapt_environment, load_runtime_env
from mindspeed_rl.platform.npu import NpuPlatform
from mindspeed_rl.runtime import cluster

FILE = Path(__file__).parents[3] / "configs" / "envs" / "runtime_env.yaml"

#: variables that users of earlier runtime_env files know
KNOWN_TO_USERS = """
RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES TOKENIZERS_PARALLELISM NCCL_DEBUG PYTORCH_NPU_ALLOC_CONF HCCL_CONNECT_TIMEOUT
HCCL_EXEC_TIMEOUT HCCL_IF_BASE_PORT CUDA_DEVICE_MAX_CONNECTIONS HYDRA_FULL_ERROR VLLM_DP_SIZE HCCL_BUFFSIZE VLLM_USE_V1
VLLM_VERSION VLLM_ENABLE_GRAPH_MODE VLLM_ENABLE_MC2 VLLM_ENABLE_TOPK_OPTIMZE VLLM_ASCEND_ENABLE_TOPK_OPTIMIZE
VLLM_ASCEND_ACL_OP_INIT_MODE VLLM_ASCEND_ENABLE_NZ TASK_QUEUE_ENABLE CPU_AFFINITY_CONF LCAL_COMM_ID USING_LCCL_COM
GLOO_SOCKET_IFNAME TP_SOCKET_IFNAME HCCL_SOCKET_IFNAME HCCL_HOST_SOCKET_PORT_RANGE HCCL_NPU_SOCKET_PORT_RANGE
""".split()

#: further ones of CANN, torch_npu and vllm-ascend
KNOWN_TO_LIBRARIES = """
ASCEND_HOME_PATH ASCEND_OPP_PATH ATB_HOME_PATH LD_LIBRARY_PATH ASCEND_RT_VISIBLE_DEVICES TORCH_DEVICE_BACKEND_AUTOLOAD
ASCEND_LAUNCH_BLOCKING MULTI_STREAM_MEMORY_REUSE STREAMS_PER_DEVICE COMBINED_ENABLE NPU_ASD_ENABLE INF_NAN_MODE_ENABLE
HCCL_OP_EXPANSION_MODE HCCL_DETERMINISTIC HCCL_ALGO HCCL_WHITELIST_DISABLE HCCL_ASYNC_ERROR_HANDLING TORCH_HCCL_ZERO_COPY
TORCH_HCCL_TRACE_BUFFER_SIZE TORCH_HCCL_HEARTBEAT_TIMEOUT_SEC VLLM_WORKER_MULTIPROC_METHOD VLLM_SERVER_DEV_MODE
VLLM_BATCH_INVARIANT VLLM_DISABLE_COMPILE_CACHE VLLM_ASCEND_ENABLE_MATMUL_ALLREDUCE VLLM_ASCEND_ENABLE_FLASHCOMM1
VLLM_ASCEND_ENABLE_FUSED_MC2 VLLM_ASCEND_ENABLE_MLAPO VLLM_ASCEND_BALANCE_SCHEDULING ASCEND_GLOBAL_LOG_LEVEL
ASCEND_SLOG_PRINT_TO_STDOUT ASCEND_PROCESS_LOG_PATH HCCL_ENTRY_LOG_ENABLE OMP_NUM_THREADS TRANSFORMERS_VERBOSITY
""".split()


@pytest.mark.parametrize("name", [*KNOWN_TO_USERS, *KNOWN_TO_LIBRARIES])
def test_every_known_variable_is_in_the_file(name: str) -> None:
    assert re.search(rf"\b{name}\b", FILE.read_text())


@pytest.mark.parametrize("name", KNOWN_TO_LIBRARIES)
def test_the_doctor_knows_what_the_libraries_read(name: str) -> None:
    assert name in doctor_variables._NAMES


def test_every_variable_has_a_comment_in_both_languages() -> None:
    comment, last_was_comment, result = "", False, 0
    for line in FILE.read_text().splitlines():
        stripped = line.strip()
        if re.match(r"(# )?[A-Z][A-Z0-9_]+: '", stripped):
            assert re.search("[a-z]{3}", comment) and re.search("[\u4e00-\u9fff]", comment), stripped
            result += 1
            last_was_comment = False
        elif stripped.startswith("#"):
            comment = f"{comment} {stripped}" if last_was_comment else stripped
            last_was_comment = True
        else:
            comment, last_was_comment = "", False
    assert result > 50


def test_the_shipped_file_has_no_problem_once_it_is_fitted() -> None:
    environment = adapt_environment(load_runtime_env(FILE), "integrated", NpuPlatform())
    assert doctor_variables.find_problems(environment) == []


def test_expandable_segments_reach_trainers_only() -> None:
    variables = {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True,page_size:1g"}
    npu = NpuPlatform()
    assert adapt_environment(variables, "trainer", npu)["PYTORCH_NPU_ALLOC_CONF"] == "expandable_segments:True,page_size:1g"
    for kind in ("integrated", "rollout"):
        assert adapt_environment(variables, kind, npu)["PYTORCH_NPU_ALLOC_CONF"] == "page_size:1g"
    only = {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True"}
    assert "PYTORCH_NPU_ALLOC_CONF" not in adapt_environment(only, "rollout", npu)


def test_processes_that_share_a_device_get_port_ranges_unless_the_file_has_them() -> None:
    npu = NpuPlatform()
    assert adapt_environment({}, "trainer", npu, shares_device=True)["HCCL_HOST_SOCKET_PORT_RANGE"] == "auto"
    assert "HCCL_HOST_SOCKET_PORT_RANGE" not in adapt_environment({}, "trainer", npu)
    mine = {"HCCL_NPU_SOCKET_PORT_RANGE": "61000-61050"}
    assert adapt_environment(mine, "trainer", npu, shares_device=True)["HCCL_NPU_SOCKET_PORT_RANGE"] == "61000-61050"


def test_run_keys_win_over_the_file_and_the_platform_over_both() -> None:
    variables = {"HCCL_BUFFSIZE": "200", "VLLM_ASCEND_ENABLE_NZ": "1"}
    environment = adapt_environment(variables, "integrated", NpuPlatform(), hccl_buffer_mib=400, deterministic=True)
    assert environment["HCCL_BUFFSIZE"] == "400"
    assert environment["VLLM_ASCEND_ENABLE_NZ"] == "0" and environment["HCCL_DETERMINISTIC"] == "true"


def test_graph_capture_and_deterministic_mode_set_what_they_need() -> None:
    npu = NpuPlatform()
    fitted = adapt_environment(load_runtime_env(FILE), "integrated", npu, captures_graphs=True, deterministic=True)
    assert fitted["TASK_QUEUE_ENABLE"] == "1" and fitted["CLOSE_MATMUL_K_SHIFT"] == "1"
    eager = adapt_environment(load_runtime_env(FILE), "integrated", npu)
    assert eager["TASK_QUEUE_ENABLE"] == "2" and "CLOSE_MATMUL_K_SHIFT" not in eager
    assert adapt_environment({"TASK_QUEUE_ENABLE": "0"}, "rollout", npu, captures_graphs=True)["TASK_QUEUE_ENABLE"] == "0"
    with pytest.raises(ValueError, match="ASCEND_LAUNCH_BLOCKING.*enforce_eager"):
        adapt_environment({"ASCEND_LAUNCH_BLOCKING": "1"}, "rollout", npu, captures_graphs=True)


def test_processes_without_a_device_do_not_load_torch_npu() -> None:
    assert adapt_environment({}, "cpu", NpuPlatform())["TORCH_DEVICE_BACKEND_AUTOLOAD"] == "0"


def test_the_cpu_platform_takes_the_same_file() -> None:
    environment = adapt_environment(load_runtime_env(FILE), "integrated", CpuPlatform(), socket_ifname="lo")
    assert environment["GLOO_SOCKET_IFNAME"] == "lo" and "TORCH_DEVICE_BACKEND_AUTOLOAD" not in environment


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("env_vars:\n  TASK_QUEUE_ENABLE: true\n", "TASK_QUEUE_ENABLE: True is not text"),
        ("variables:\n  A: '1'\n", "expected one group 'env_vars'"),
        ("- A\n", "expected one group 'env_vars'"),
    ],
)
def test_a_file_of_another_form_is_refused(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "runtime_env.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=named):
        load_runtime_env(path)


def test_a_missing_file_names_the_key() -> None:
    with pytest.raises(ValueError, match="rl_config.runtime_env_path: /nowhere.yaml does not exist"):
        load_runtime_env("/nowhere.yaml")


@pytest.mark.parametrize(
    ("noset", "visible", "assigned", "index"),
    [("1", "", ["5"], 5), ("1", "4,5,6,7", ["6"], 2), ("", "6", ["6"], 0)],
)
def test_the_npu_that_ray_assigned_becomes_an_index_of_this_process(
    monkeypatch: pytest.MonkeyPatch, noset: str, visible: str, assigned: list[str], index: int
) -> None:
    monkeypatch.setenv("RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES", noset)
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", visible)
    assert NpuPlatform().device_id_for_ray(assigned) == index


def test_an_npu_outside_the_visible_ones_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES", "1")
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "0,1")
    with pytest.raises(ValueError, match="Ray assigned NPU 3"):
        NpuPlatform().device_id_for_ray(["3"])
    with pytest.raises(ValueError, match="assigned no NPU"):
        NpuPlatform().device_id_for_ray([])


def test_the_launcher_gives_npu_workers_the_fitted_file_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mindspeed_rl.config import load_run_config
    from mindspeed_rl.runtime import cluster

    monkeypatch.chdir(tmp_path)
    rl = cluster.build_worker_environment(load_run_config("grpo_qwen25_7b_A3"), "npu")
    assert "PYTORCH_NPU_ALLOC_CONF" not in rl and rl["HCCL_CONNECT_TIMEOUT"] == "1800"
    assert doctor_variables.find_problems({name: value for name, value in rl.items() if name in doctor_variables._NAMES}) == []
    supervised = cluster.build_worker_environment(load_run_config("dpo_qwen3_30b_a3b_A3"), "npu")
    assert supervised["PYTORCH_NPU_ALLOC_CONF"] == "expandable_segments:True"


def test_a_supervised_run_takes_its_file_from_the_same_key(tmp_path: Path) -> None:
    path = tmp_path / "runtime_env.yaml"
    path.write_text("env_vars:\n  MY_VARIABLE: 'here'\n  PYTORCH_NPU_ALLOC_CONF: 'expandable_segments:True'\n")
    overrides = ["platform=npu", f"+rl_config.runtime_env_path={path}", "megatron_training.npu_deterministic=true"]
    cfg = load_run_config("sft_tiny_cpu", None, overrides)
    environment = cluster.build_worker_environment(cfg, "npu")
    assert environment["MY_VARIABLE"] == "here" and environment["HCCL_DETERMINISTIC"] == "true"
    # a trainer without a rollout engine keeps what sleep mode could not live with
    assert environment["PYTORCH_NPU_ALLOC_CONF"] == "expandable_segments:True"


def test_a_local_cluster_has_the_logical_cpus_that_its_workers_ask_for() -> None:
    assert cluster._count_local_cpus(16, "npu", 8) >= 16 * 8 + 16
    assert cluster._count_local_cpus(4, "cpu", 8) < 4 * 8 + 16, "CPU workers ask for one each"
