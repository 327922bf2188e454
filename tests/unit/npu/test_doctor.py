"""`mindspeed-rl doctor`: recorded logs, version lines, environments."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import pytest

from mindspeed_rl.cli import doctor
from mindspeed_rl.cli.doctor import checks, logs, stack, variables
from mindspeed_rl.cli.doctor.host_memory import check_host_memory
from mindspeed_rl.planner.host_memory import HostPhase
from mindspeed_rl.planner.machine_memory import read_machine_memory

LOGS = Path(__file__).parents[2] / "data" / "npu" / "logs"


def recorded(key: str) -> Path:
    return LOGS / f"{key}.txt"


@pytest.mark.parametrize("key", [message.key for message in logs._MESSAGES])
def test_every_known_failure_is_recognised_in_a_recorded_log(key: str) -> None:
    results = {finding.key for finding in logs._read_log(recorded(key))}
    assert results == {key}


def test_a_healthy_log_has_no_findings() -> None:
    assert logs._read_log(recorded("healthy")) == []


def test_the_rank_that_failed_first_is_reported_first() -> None:
    paths = [LOGS / f"job_rank{rank}.txt" for rank in range(3)]
    first, *others = logs.read_logs(paths)
    assert (first.key, Path(first.file).name) == ("out-of-memory", "job_rank2.txt")
    assert [Path(other.file).name for other in others] == ["job_rank1.txt", "job_rank0.txt"]
    assert others[1].count == 3


def test_an_error_code_of_torch_npu_is_spelled_out() -> None:
    assert logs._explain_error_code("x ERR01004 OPS") == "ERR01004: operators, invalid pointer"
    assert logs._explain_error_code("ERR02200 DIST") == "ERR02200: distributed, call to HCCL failed"
    assert logs._explain_error_code("ERR99999 UNKNOWN") is None


def test_log_mode_prints_cause_and_fix_and_exits_with_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["--log", str(recorded("nz-enabled"))]) == 1
    text = capsys.readouterr().out
    assert "cause: Weights are kept in the NZ layout" in text and "fix:   Set VLLM_ASCEND_ENABLE_NZ=0" in text


def test_json_output_can_be_read_back(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["--json", "--log", str(recorded("connect-timeout")), str(recorded("healthy"))]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    assert report["failures"][0]["key"] == "connect-timeout"
    assert report["failures"][0]["line_number"] == 2


def test_a_missing_log_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        doctor.main(["--log", "/nowhere/run.txt"])
    assert error.value.code == 2
    assert "/nowhere/run.txt cannot be read" in capsys.readouterr().err


def test_versions_are_compared_number_by_number() -> None:
    assert stack.at_least("9.1.0", "9.1.0") and stack.at_least("9.10.0", "9.2") and stack.at_least("26.0.rc1", "26.0")
    assert not stack.at_least("8.5.1", "9.0.0") and not stack.at_least("25.3", "25.5")


def test_the_line_is_chosen_by_the_majority_of_packages() -> None:
    fallback = {"torch": "2.9.0+cpu", "torch-npu": "2.9.0.post2", "vllm": "0.18.0", "vllm-ascend": "0.18.0"}
    assert stack.find_line(fallback).name == "fallback"
    assert stack.find_line({}).name == "main"


def test_a_post_release_of_torch_npu_belongs_to_another_cann() -> None:
    cann85 = {"torch": "2.9.0+cpu", "torch-npu": "2.9.0", "vllm": "0.18.0", "vllm-ascend": "0.18.0"}
    assert stack.find_line(cann85).name == "cann85"
    line = next(line for line in stack.LINES if line.name == "cann85")
    (finding,) = [item for item in checks.check_versions(line, {"torch-npu": "2.9.0.post2"}) if item.name == "torch-npu"]
    assert finding.status == "fail" and finding.fix == "the cann85 line has 2.9.0"
    main = {item.name: item.status for item in checks.check_versions(stack.LINES[0], {"vllm-ascend": "0.23.0.post1"})}
    assert main["vllm-ascend"] == "ok"  # the fixes of 0.23.0 for the same CANN


@pytest.mark.parametrize(("cann", "line"), [("9.1.0", "main"), ("9.2.0", "main"), ("9.0.0", "fallback"), ("8.5.1", "cann85")])
def test_on_a_bare_machine_cann_decides_the_line(cann: str, line: str, tmp_path: Path) -> None:
    (tmp_path / "version.cfg").write_text(f"version={cann}\n")
    assert doctor._examine("npu", "auto", {"ASCEND_HOME_PATH": str(tmp_path)}, probe_torch=False).line == line


@pytest.mark.parametrize(
    ("cann", "advice"),
    [
        ("8.5.1", "envs/npu_a2/install.sh --line cann85"),
        ("9.0.0", "envs/npu_a2/install.sh --line fallback"),
        ("8.3.RC2", "published for CANN 8.3.RC2: install CANN 9.1.0 with driver 26.0, or CANN 8.5 with driver 25.5"),
        ("8.2.RC1", "docs/ascend.md"),
    ],
)
def test_an_older_cann_is_told_its_line_or_the_upgrade(cann: str, advice: str, tmp_path: Path) -> None:
    (tmp_path / "version.cfg").write_text(f"version={cann}\n")
    (finding, _) = checks.check_cann(stack.LINES[0], {"ASCEND_HOME_PATH": str(tmp_path)})
    assert finding.status == "fail" and advice in finding.fix


@pytest.mark.parametrize(("cann", "status"), [("9.1.0", "ok"), ("9.1.0.B020", "ok"), ("9.2.0", "warn"), ("9.2.RC1", "warn")])
def test_a_newer_cann_than_the_lines_is_said_to_be_another(cann: str, status: str, tmp_path: Path) -> None:
    (tmp_path / "version.cfg").write_text(f"version={cann}\n")
    (finding, _) = checks.check_cann(stack.LINES[0], {"ASCEND_HOME_PATH": str(tmp_path)})
    assert finding.status == status
    assert ("released with 9.1.0; 9.2 belongs to vllm-ascend 0.30" in finding.fix) == (status == "warn")


@pytest.mark.slow
def test_a_package_that_an_entry_module_needs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "vllm_ascend" / "worker"
    folder.mkdir(parents=True)
    for file, code in (("../__init__", ""), ("__init__", ""), ("worker", "import package_that_is_missing.part")):
        (folder / f"{file}.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    results = {finding.name: finding for finding in checks.check_imports()}
    broken = results["vllm_ascend.worker.worker"]
    assert (broken.area, broken.status) == ("imports", "fail")
    assert "package_that_is_missing" in broken.text and "package_that_is_missing" in broken.fix and "install.sh" in broken.fix
    assert results["mindspeed_rl.workers.actor_worker"].status == "ok"


def test_a_glibc_older_than_the_wheels_is_a_warning_with_the_ways_out() -> None:
    (fits,) = checks.check_glibc(replace(stack.LINES[0], glibc="2.0"))
    (old,) = checks.check_glibc(replace(stack.LINES[0], glibc="9.99"))
    assert fits.status == "ok" and old.status == "warn"
    assert "--vllm-ascend source" in old.fix and "9.99" in old.fix


def test_a_package_of_another_version_fails_and_names_the_right_one() -> None:
    findings = checks.check_versions(stack.LINES[0], {"torch": "2.13.0+cpu", "torch-npu": "2.10.0.post4"})
    by_name = {finding.name: finding for finding in findings}
    assert by_name["torch"].status == "fail" and "2.10.0" in by_name["torch"].fix
    assert by_name["torch-npu"].status == "ok"
    assert by_name["vllm-ascend"].status == "absent"


def test_a_version_outside_the_advised_ones_is_a_warning_on_npu_machines_only() -> None:
    findings = checks.check_versions(stack.LINES[1], {"transformers": "5.10.4", "numpy": "1.26.4"})
    by_name = {finding.name: finding for finding in findings}
    assert by_name["transformers"].status == "warn" and ">=4.57,<5" in by_name["transformers"].fix
    assert by_name["numpy"].status == "ok"
    judged = doctor._judge(by_name["transformers"], "cpu", {})
    assert (judged.status, judged.fix) == ("ok", "")


def environment_problems(**environment: str) -> dict[str, str]:
    return {name: text for name, text, _ in variables.find_problems(environment)}


def test_half_a_cann_environment_is_reported(tmp_path: Path) -> None:
    for folder in ("runtime", "compiler"):
        (tmp_path / folder).mkdir()
    result = environment_problems(ASCEND_HOME_PATH=str(tmp_path))
    assert set(result) == {"ASCEND_OPP_PATH", "ATB_HOME_PATH"}
    whole = {"ASCEND_HOME_PATH": str(tmp_path), "ASCEND_OPP_PATH": str(tmp_path), "ATB_HOME_PATH": str(tmp_path)}
    assert environment_problems(**whole) == {}


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True"}, "PYTORCH_NPU_ALLOC_CONF"),
        ({"PYTORCH_NPU_ALLOC_CONF": "max_split_size_mb:64", "PYTORCH_ALLOC_CONF": "x"}, "PYTORCH_ALLOC_CONF"),
        ({"RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES": "0"}, "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES"),
        ({"VLLM_ASCEND_ENABLE_NZ": "1"}, "VLLM_ASCEND_ENABLE_NZ"),
        ({"HCCL_CONNECT_TIMEOUT": "1800", "HCCL_EXEC_TIMEOUT": "600"}, "HCCL_EXEC_TIMEOUT"),
        ({"HCCL_OP_EXPANSION_MODE": "AIV", "HCCL_EXEC_TIMEOUT": "3600"}, "HCCL_EXEC_TIMEOUT"),
        ({"TASK_QUEUE_ENABLE": "3"}, "TASK_QUEUE_ENABLE"),
        ({"INF_NAN_MODE_ENABLE": "0"}, "INF_NAN_MODE_ENABLE"),
        ({"HCCL_RDMA_TC": "130"}, "HCCL_RDMA_TC"),
        ({"HCCL_RDMA_RETRY_CNT": "8"}, "HCCL_RDMA_RETRY_CNT"),
        ({"HCCL_INTRA_ROCE_ENABLE": "1", "HCCL_INTRA_PCIE_ENABLE": "1"}, "HCCL_INTRA_ROCE_ENABLE"),
    ],
)
def test_a_harmful_variable_is_named(environment: dict[str, str], named: str) -> None:
    assert set(environment_problems(**environment)) == {named}


def test_a_misspelt_hccl_variable_is_named_with_the_nearest() -> None:
    result = environment_problems(HCCL_CONECT_TIMEOUT="1800", HCCL_RDMA_TC="132", HCCL_IF_IP="10.0.0.1")
    assert set(result) == {"HCCL_CONECT_TIMEOUT"} and "HCCL_CONNECT_TIMEOUT" in result["HCCL_CONECT_TIMEOUT"]


def test_a_cpu_machine_is_fine_and_hears_what_an_npu_machine_needs() -> None:
    report = doctor._examine("cpu", "main", {}, probe_torch=False)
    assert report.ok
    text = doctor._format_report(report)
    assert "CANN: not installed" in text and "CPU runs work without any of this" in text


def test_the_same_machine_judged_as_an_npu_machine_is_not() -> None:
    report = doctor._examine("npu", "main", {}, probe_torch=False)
    assert not report.ok
    assert {"torch-npu", "CANN", "/dev/davinci*"} <= {finding.name for finding in report.findings if finding.status == "fail"}


def test_the_doctor_does_not_import_torch_itself() -> None:
    code = "import sys, mindspeed_rl.cli.doctor; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_cann_version_is_read_from_the_toolkit(tmp_path: Path) -> None:
    (tmp_path / "version.cfg").write_text("# version: 1.0\nruntime_running_version=[9.1.0:9.1.0.B020]\n")
    assert checks.read_cann_version({"ASCEND_HOME_PATH": str(tmp_path)}) == "9.1.0.B020"


CHAIN = """2026-11-01 10:00:00,000 driver INFO start
Traceback (most recent call last):
  File "/work/plugin.py", line 7, in touchy
    raise ValueError("the examiner went home")
ValueError: the examiner went home

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "/work/train.py", line 9, in main
    run()
mindspeed_rl.runtime.futures.WorkerError: reward worker 0 raised ValueError
"""


def test_the_exception_a_run_ended_with_is_found_and_of_a_chain_the_first(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    log.write_text(CHAIN)
    (result,) = logs._read_log(log)
    assert (result.key, result.line, result.line_number) == ("exception", "ValueError: the examiner went home", 5)
    assert result.time == "2026-11-01 10:00:00.000"
    assert "/work/plugin.py:7, in touchy" in result.fix and result.cause.endswith("ValueError: the examiner went home")


def test_an_interrupted_run_has_no_failure(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    log.write_text('Traceback (most recent call last):\n  File "a.py", line 1, in f\nKeyboardInterrupt\n')
    assert logs._read_log(log) == []


def numa_nodes(folder: Path, *cpulists: str) -> Path:
    for number, cpulist in enumerate(cpulists):
        (folder / f"node{number}").mkdir(parents=True)
        (folder / f"node{number}" / "cpulist").write_text(f"{cpulist}\n")
    return folder


@pytest.mark.parametrize(
    ("allowed", "environment", "status", "words"),
    [
        (range(8), {}, "ok", "2 of 2 nodes"),
        (range(4), {}, "warn", "1 of 2 nodes"),  # a cpuset of one node
        (range(8), {"CPU_AFFINITY_CONF": "0"}, "warn", "CPU_AFFINITY_CONF is 0"),
        ([5], {"CPU_AFFINITY_CONF": "1"}, "warn", "1 of 2 nodes"),
    ],
)
def test_processors_of_every_numa_node_are_usable(
    allowed: Collection[int], environment: dict[str, str], status: str, words: str, tmp_path: Path
) -> None:
    # the last node has only memory
    finding = checks.check_numa(environment, numa_nodes(tmp_path, "0-3", "4-5,6-7", ""), set(allowed))
    assert finding.status == status and words in finding.text and bool(finding.fix) == (status == "warn")


def machine_files(root: Path, limit: str | None = None, file: str = "memory.max") -> Path:
    """Linux's files of a machine with 100 GiB, of which 50 are available."""
    (root / "proc").mkdir()
    gib = 2**20  # in KiB
    (root / "proc/meminfo").write_text(f"MemTotal: {100 * gib} kB\nMemFree: {9 * gib} kB\nMemAvailable: {50 * gib} kB\n")
    if limit is not None:
        (root / "sys/fs/cgroup" / file).parent.mkdir(parents=True)
        (root / "sys/fs/cgroup" / file).write_text(f"{limit}\n")
    return root


@pytest.mark.parametrize(
    ("limit", "file", "expected"),
    [
        (None, "memory.max", (100, 50)),
        ("max", "memory.max", (100, 50)),
        (str(64 * 2**30), "memory.max", (64, 50)),
        (str(32 * 2**30), "memory/memory.limit_in_bytes", (32, 32)),
        ("9223372036854771712", "memory/memory.limit_in_bytes", (100, 50)),  # what version 1 has for none
    ],
)
def test_memory_of_a_machine_is_that_of_its_container(
    limit: str | None, file: str, expected: tuple[int, int], tmp_path: Path
) -> None:
    machine = read_machine_memory(machine_files(tmp_path, limit, file))
    assert (machine.total, machine.available) == tuple(gib * 2**30 for gib in expected)
    assert machine.source == ("/proc/meminfo" if expected[0] == 100 else f"/sys/fs/cgroup/{file}")


def test_what_a_container_uses_is_not_available(tmp_path: Path) -> None:
    root = machine_files(tmp_path, str(64 * 2**30), "memory.max")
    (root / "sys/fs/cgroup/memory.current").write_text(f"{44 * 2**30}\n")
    assert read_machine_memory(root).available == 20 * 2**30


def test_the_phases_of_a_run_that_a_machine_has_no_memory_for_are_named(tmp_path: Path) -> None:
    gib = 2**30
    start, iteration = HostPhase("start", {"weights": 10 * gib}), HostPhase("iteration", {"optimizer": 30 * gib})
    save = HostPhase("save", {"optimizer": 30 * gib, "tensors of the save": 40 * gib})
    # of two devices: 20, 60 and 140 GiB
    findings = check_host_memory([start, iteration, save], 2, read_machine_memory(machine_files(tmp_path)))
    assert {found.name: found.status for found in findings} == {"in start": "ok", "in iteration": "warn", "in save": "fail"}
    assert "60.0 GiB of 2 devices" in findings[1].text and "50.0 of 100.0 GiB are available" in findings[1].text
    assert "optimizer_offload_path" in findings[1].fix and "async_save" in findings[2].fix
    assert "140.0 GiB" in findings[2].text and "tensors of the save 80.0, optimizer 60.0" in findings[2].text
    (nothing,) = check_host_memory([HostPhase("iteration", {})], 2, read_machine_memory(tmp_path))
    assert nothing.status == "ok"


def test_the_doctor_compares_a_run_file_with_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    code = doctor.main(["--config-name", "grpo_qwen3_8b_A2_1die", "actor_config.save=null", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert [item["name"] for item in report["findings"]] == ["in start", "in iteration"]
    # 8.19e9 parameters of twelve bytes, the actor and the reference in two each
    assert all("122.1 GiB of 1 device (optimizer 91.5, weights 15.3, reference 15.3)" in i["text"] for i in report["findings"])
    assert code == int(not report["ok"])
    with pytest.raises(SystemExit):
        doctor.main(["actor_config.save=null"])
    assert "overrides go with --config-name FILE" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        doctor.main(["--config-name", "grpo_qwen3_8b_A2_1die", "actor_config.sav=null"])
    assert "sav" in capsys.readouterr().err


def test_processes_of_a_cpu_run_are_in_the_memory_of_the_host(capsys: pytest.CaptureFixture[str]) -> None:
    doctor.main(["--config-name", "grpo_tiny_cpu", "--json"])
    names = [item["name"] for item in json.loads(capsys.readouterr().out)["findings"]]
    assert names[:-1] == ["in start", "in save"] and names[-1].endswith(", the processes")


def test_set_env_preloads_jemalloc_where_it_is_unless_told_otherwise(tmp_path: Path) -> None:
    for folder in ("ascend-toolkit", "nnal/atb", "bin"):
        (tmp_path / folder).mkdir(parents=True)
    for folder in ("ascend-toolkit", "nnal/atb"):
        (tmp_path / folder / "set_env.sh").write_text("")
    tool = tmp_path / "bin" / "ldconfig"
    tool.write_text("#!/bin/sh\necho '\tlibjemalloc.so.2 (libc6,AArch64) => /usr/lib/libjemalloc.so.2'\n")
    tool.chmod(0o755)
    script = Path(__file__).parents[3] / "envs" / "npu_common" / "set_env.sh"

    def preloaded(**more: str) -> str:
        environment = {"PATH": f"{tool.parent}:/usr/bin:/bin", "ASCEND_ROOT": str(tmp_path), **more}
        command = ["bash", "-euc", f'source "{script}" && printf "%s" "${{LD_PRELOAD:-}}"']
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    assert preloaded() == "/usr/lib/libjemalloc.so.2"
    assert preloaded(MINDSPEED_RL_JEMALLOC="0") == ""
    tool.write_text("#!/bin/sh\n")
    assert preloaded() == ""
