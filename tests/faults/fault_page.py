"""Writes docs/faults.md and its Chinese twin from the table of faults and the results of the last runs:

RECORD_FAULTS=1 python -m pytest tests/faults; python tests/faults/fault_page.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from fault_table import FAULTS, Fault

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).parent / "results.json"

_TEXT = {
    "en": """# Faults

What happens when something breaks. The tests in `tests/faults` strike real runs with each of these faults (a run of the tiny
model on two cores) and look at what comes of it: the run **goes on** as if nothing had happened, **recovers** (all workers are
ended, and the same command goes on from its last checkpoint by itself), **ends** with an exit code that is not 0, or is
**refused** before anything starts. In each case the process at fault is named in one line, no iteration is lost or written
twice, and no process, shared memory, log folder or half-written file is left. A run that recovered computes the very figures of one
that was not disturbed.

This page is made from the results (`python tests/faults/fault_page.py`). Seconds are those from the fault to the next
iteration that was complete, or to the end of the command; where a worker is lost, most of them are Python's imports.

| Fault | Who | Where | What comes of it | Seconds | The console says |
|---|---|---|---|---|---|
{rows}
{missing}{uncompared}
""",
    "zh": """# 故障

出了问题会怎样。`tests/faults` 中的测试把下列每一种故障施加到真实的运行上（两个核上的极小模型），并检查结果：运行 **继续**，
好像什么也没发生；**恢复**（全部 worker 结束，同一条命令自行从最后一个检查点继续）；**结束**，退出码不为 0；或在启动任何东西
之前被 **拒绝**。每种情况下，肇事者都用一行话指出，没有迭代丢失或重复写入，也不遗留进程、共享内存、日志目录或写了一半的文件。
恢复后的运行算出的数字与未受干扰的运行完全相同。

本页由结果生成（`python tests/faults/fault_page.py`）。秒数从故障发生算到下一次完整的迭代，或到命令结束；失去 worker 时大部分
是 Python 的导入时间。

| 故障 | 对象 | 位置 | 结果 | 秒 | 控制台显示 |
|---|---|---|---|---|---|
{rows}
{missing}{uncompared}
""",
}
_ENDS = {
    "en": {"goes on": "goes on", "recovers": "recovers", "ends": "ends", "refused": "refused"},
    "zh": {"goes on": "继续", "recovers": "恢复", "ends": "结束", "refused": "拒绝"},
}
_UNCOMPARED = {
    "en": "Recovered, but their figures have not been compared since the suite records that: {}.",
    "zh": "已恢复，但自从测试开始记录比较结果以来尚未比较过数字：{}。",
}
_MISSING = {"en": "Not run since the table last changed: {}.", "zh": "表格上次修改之后尚未运行：{}。"}


def page(language: Literal["en", "zh"]) -> str:
    """The page as it is to be."""
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    rows = "\n".join(_row(fault, results[fault.id], language) for fault in FAULTS if fault.id in results)
    left = [fault.id for fault in FAULTS if fault.id not in results]
    missing = "\n" + _MISSING[language].format(", ".join(f"`{name}`" for name in left)) if left else ""
    recovered = [fault.id for fault in FAULTS if fault.end == "recovers" and "equal" not in results.get(fault.id, {"equal": 0})]
    uncompared = "\n\n" + _UNCOMPARED[language].format(", ".join(f"`{name}`" for name in recovered)) if recovered else ""
    return _TEXT[language].format(rows=rows, missing=missing, uncompared=uncompared).rstrip("\n") + "\n"


def _row(fault: Fault, result: dict[str, float | str], language: str) -> str:
    said = str(result["said"]).replace("|", "\\|").replace("`", "'")
    shown = f"`{said}`" if said else ""
    return f"| {fault.how} | {fault.role} | {fault.phase} | {_ENDS[language][fault.end]} | {result['seconds']} | {shown} |"


if __name__ == "__main__":
    (ROOT / "docs" / "faults.md").write_text(page("en"), encoding="utf-8")
    (ROOT / "docs" / "zh" / "faults.md").write_text(page("zh"), encoding="utf-8")
