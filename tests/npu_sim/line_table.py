"""How much of the NPU's own files ran on the simulator, and which lines never did.

    NPU_SIM_LINES=/tmp/lines tests/npu_sim/run.sh && python tests/npu_sim/line_table.py /tmp/lines [--write]

--write puts the table into docs/ascend.md and docs/zh/ascend.md. A line counts where a statement begins on it.
"""

from __future__ import annotations

import argparse
import ast
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).parent / "site"))

from line_record import MODULES, statements
from support_table import ROOT, write

START, END = "<!-- lines: start -->", "<!-- lines: end -->"
#: least share of a file
WANTED = 0.95


@dataclass(frozen=True)
class Ran:
    """Of one file.

    Attributes:
        path: from the root.
        lines: on which a statement begins.
        missed: those that never ran.
    """

    path: str
    lines: frozenset[int]
    missed: frozenset[int]

    @property
    def share(self) -> float:
        return 1.0 - len(self.missed) / len(self.lines)

    def spans(self) -> str:
        """The missed lines, neighbours among the lines that count as one span."""
        ordered, spans = sorted(self.lines), []
        for before, line in zip([0, *ordered], ordered):
            if line in self.missed:
                if spans and spans[-1][1] == before:
                    spans[-1] = (spans[-1][0], line)
                else:
                    spans.append((line, line))
        return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def read(folder: Path) -> list[Ran]:
    """What all processes told."""
    reached: dict[str, set[int]] = {}
    for text in (folder / "lines.txt").read_text().splitlines():
        module, line = text.split()
        reached.setdefault(module, set()).add(int(line))
    results = []
    for module in MODULES:
        path = f"{module.replace('.', '/')}.py"
        lines = frozenset(node.lineno for node in statements(ast.parse((ROOT / path).read_text())))
        results.append(Ran(path, lines, frozenset(lines - reached.get(module, set()))))
    return results


def table(result: list[Ran], chinese: bool) -> str:
    head = "| 文件 | 语句 | 执行过 | 从未执行的行 |" if chinese else "| File | Statements | Ran | Lines that never ran |"
    rows = [
        f"| `{coverage.path}` | {len(coverage.lines)} | {coverage.share:.1%} | {coverage.spans() or '-'} |"
        for coverage in result
    ]
    return "\n".join([head, "|---|---|---|---|", *rows])


def main() -> int:
    """0 when of every file enough ran."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    result = read(options.folder)
    print(table(result, chinese=False))
    if options.write:
        write(ROOT / "docs" / "ascend.md", table(result, chinese=False), START, END)
        write(ROOT / "docs" / "zh" / "ascend.md", table(result, chinese=True), START, END)
    return int(any(coverage.share < WANTED for coverage in result))


if __name__ == "__main__":
    sys.exit(main())
