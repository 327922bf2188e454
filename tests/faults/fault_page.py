"""Write docs/faults.md and docs/zh/faults.md from the table of faults and the results of the last runs:

RECORD_FAULTS=1 python -m pytest tests/faults; python tests/faults/fault_page.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from fault_table import FAULTS, Fault

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).parent / "results.json"
#: what was sent through each door by the scripts of an audit; counted by hand, and not run with the tests
DOORS = Path(__file__).parent / "doors.json"

_TEXT = {
    "en": """# Faults

This page lists what happens when a process, a disk, a checkpoint or a reward function fails. The tests in `tests/faults`
inject each of these faults into real runs (the tiny model on two cores) and check the result. The run **continues** as if
nothing had happened, **recovers** (all workers are stopped, and the same command resumes automatically from its last
checkpoint), **ends** with an exit code other than 0, or is **refused** before anything starts. In each case one line names the
failed process, no iteration is lost or written twice, and no process, shared memory, log folder or partial file is left. A
recovered run computes exactly the figures of a run without the fault.

This page is generated from the results (`python tests/faults/fault_page.py`). Seconds are measured from the fault to the next
complete iteration, or to the end of the command. If a worker is lost, most of this time is spent on Python imports. Console
lines come from the last recorded run.

| Fault | Process | Phase | Result | Seconds | Console line |
|---|---|---|---|---|---|
{rows}
{missing}{uncompared}
""",
    "zh": """# 故障

本页列出进程、磁盘、检查点或奖励函数出现故障时的结果。`tests/faults` 中的测试把每一种故障注入真实的运行（两个核上的微型模型），
并检查结果：运行 **继续**，不受影响；**恢复**（停止全部 worker，同一条命令自动从最近的检查点断点续训）；**结束**，退出码不为
0；或在启动之前被 **拒绝**。每种情况下都用一行信息指出出错的进程，没有迭代丢失或重复写入，也不遗留进程、共享内存、日志目录或
不完整的文件。恢复后的运行与没有故障的运行数值完全相同。

本页由测试结果生成（`python tests/faults/fault_page.py`）。秒数从故障发生算到下一次完整的迭代，或到命令结束；worker 丢失时大
部分时间用于 Python 导入。控制台信息取自最近一次记录的运行。

| 故障 | 进程 | 阶段 | 结果 | 秒 | 控制台信息 |
|---|---|---|---|---|---|
{rows}
{missing}{uncompared}
""",
}
_DOORS = {
    "en": """
## What comes through doors

Broken input from models, programs, servers and files: how many cases were tried in November 2026, and how many ended as they
should (one sentence, within the time limit, the fault only the sample's, the server's or the file's). The unit tests of each
door have the kinds of these cases, not all of them.

| Door | Cases | Right |
|---|---|---|
{rows}
""",
    "zh": """
## 来自外部的输入

来自模型、程序、服务与文件的异常输入：2026 年 11 月试过的用例数，以及结果正确的数目（在时限内给出一句说明，只影响该样本、
该服务或该文件）。各入口的单元测试覆盖这些用例的种类，而不是全部用例。

| 入口 | 用例 | 正确 |
|---|---|---|
{rows}
""",
}
_ENDS = {
    "en": {"goes on": "continues", "recovers": "recovers", "ends": "ends", "refused": "refused"},
    "zh": {"goes on": "继续", "recovers": "恢复", "ends": "结束", "refused": "拒绝"},
}
_UNCOMPARED = {
    "en": "Recovered, but the figures have not been compared since the tests record the comparison: {}.",
    "zh": "已恢复，但测试开始记录比较结果之后尚未比较数值：{}。",
}
_MISSING = {"en": "Not run since the last change of the table: {}.", "zh": "表格最近一次修改之后尚未运行：{}。"}


def page(language: Literal["en", "zh"]) -> str:
    """Return the page in a language."""
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    rows = "\n".join(_row(fault, results[fault.id], language) for fault in FAULTS if fault.id in results)
    left = [fault.id for fault in FAULTS if fault.id not in results]
    missing = "\n" + _MISSING[language].format(", ".join(f"`{name}`" for name in left)) if left else ""
    recovered = [fault.id for fault in FAULTS if fault.end == "recovers" and "equal" not in results.get(fault.id, {"equal": 0})]
    uncompared = "\n\n" + _UNCOMPARED[language].format(", ".join(f"`{name}`" for name in recovered)) if recovered else ""
    text = _TEXT[language].format(rows=rows, missing=missing, uncompared=uncompared).rstrip("\n") + "\n"
    doors = (
        f"| {door[language]} | {door['tried']:,} | {door['right']:,} |"
        for door in json.loads(DOORS.read_text(encoding="utf-8"))
    )
    return text + _DOORS[language].format(rows="\n".join(doors))


def _row(fault: Fault, result: dict[str, float | str], language: str) -> str:
    said = str(result["said"]).replace("|", "\\|").replace("`", "'")
    shown = f"`{said}`" if said else ""
    return f"| {fault.how} | {fault.role} | {fault.phase} | {_ENDS[language][fault.end]} | {result['seconds']} | {shown} |"


if __name__ == "__main__":
    (ROOT / "docs" / "faults.md").write_text(page("en"), encoding="utf-8")
    (ROOT / "docs" / "zh" / "faults.md").write_text(page("zh"), encoding="utf-8")
