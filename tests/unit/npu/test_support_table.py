"""The support table of docs/ascend.md: every simulator test counts in a row, and both languages hold the same table."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[3]
SPEC = importlib.util.spec_from_file_location("support_table", ROOT / "tests" / "npu_sim" / "support_table.py")
support_table = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(support_table)

JUNIT = """<testsuites><testsuite>
<testcase classname="tests.npu_sim.test_engine" name="test_a[one]" />
<testcase classname="tests.npu_sim.test_engine" name="test_a[two]"><failure message="no" /></testcase>
<testcase classname="x.test_engine" name="test_b"><skipped message="why" /></testcase>
<testcase classname="x.test_engine" name="test_c" />
</testsuite></testsuites>"""


def table_lines(document: str) -> list[str]:
    """The rows between the markers."""
    text = (ROOT / "docs" / document).read_text()
    return text.split(support_table.START)[1].split(support_table.END)[0].strip().splitlines()[2:]


def test_every_simulator_test_counts_in_exactly_one_row() -> None:
    beginnings = [beginning for row in support_table.ROWS for beginning in row[2]]
    files = {path.stem for path in (ROOT / "tests" / "npu_sim").glob("test_*.py")}
    assert {name.split(".")[0] for name in support_table.tests()} == files
    for name in support_table.tests():
        assert sum(name.startswith(beginning) for beginning in beginnings) == 1, name


def test_a_row_is_as_good_as_its_worst_test(tmp_path: Path) -> None:
    (tmp_path / "results.xml").write_text(JUNIT)
    ran = support_table.results([tmp_path / "results.xml"])
    assert ran == {"test_engine.test_a": "failed", "test_engine.test_b": "skipped", "test_engine.test_c": "passed"}
    names = [*ran, "test_engine.test_d"]
    assert support_table.state_of(("test_engine.test_c",), names, ran, "failed") == "passed"
    assert support_table.state_of(("test_engine.test_b", "test_engine.test_c"), names, ran, "passed") == "skipped"
    assert support_table.state_of(("test_engine.",), names, ran, "passed") == "failed"


def test_a_row_keeps_its_state_where_some_of_its_tests_did_not_run() -> None:
    names, ran = ["test_engine.test_c", "test_engine.test_d", "test_other.test_e"], {"test_engine.test_c": "passed"}
    for before in ("passed", "skipped", "failed"):
        assert support_table.state_of(("test_engine.",), names, ran, before) == before
        assert support_table.state_of(("test_other.",), names, ran, before) == before
    for document, chinese in (("ascend.md", False), ("zh/ascend.md", True)):
        text = (ROOT / "docs" / document).read_text()
        table = text.split(support_table.START)[1].split(support_table.END)[0].strip()
        assert support_table.table({}, text, chinese) == table


def test_both_documents_hold_a_whole_table_that_never_claims_hardware() -> None:
    english, chinese = table_lines("ascend.md"), table_lines("zh/ascend.md")
    assert len(english) == len(chinese) == len(support_table.ROWS) + len(support_table.HARDWARE)
    assert all(line.endswith("| not verified on NPU |") for line in english)
    assert all(line.endswith("| 未在 NPU 上验证 |") for line in chinese)
    states = [("passed" in left, "模拟通过" in right) for left, right in zip(english, chinese)]
    assert all(left == right for left, right in states)
