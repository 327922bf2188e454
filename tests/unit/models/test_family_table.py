"""The table of families in docs/models.md has a row for each family, and cells only from test results."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from mindspeed_rl.models import ARCHITECTURES, find_architecture

ROOT = Path(__file__).parents[3]
_SPEC = importlib.util.spec_from_file_location("family_table", ROOT / "tests" / "dist" / "family_table.py")
family_table = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(family_table)


def test_every_text_family_has_a_row_in_both_languages() -> None:
    text = [name for name in ARCHITECTURES if not find_architecture(name).hf_classes[0].endswith("ForConditionalGeneration")]
    assert sorted(family_table.FAMILIES) == sorted(text)
    for page in (ROOT / "docs" / "models.md", ROOT / "docs" / "zh" / "models.md"):
        rows = page.read_text(encoding="utf-8").split(family_table.START)[1].split(family_table.END)[0].strip().splitlines()[2:]
        assert [row.split(" | ")[0].removeprefix("| ") for row in rows] == [row[0] for row in family_table.FAMILIES.values()]
        assert "**" not in "".join(rows)


def test_a_cell_is_what_its_test_did(tmp_path: Path) -> None:
    layout, trains = "tests.dist.test_families", "test_every_layout_trains_as_one_process_does"
    (tmp_path / "one.xml").write_text(
        "<testsuite>"
        f'<testcase classname="{layout}" name="{trains}[TP2 SP-glm4_moe]"/>'
        f'<testcase classname="{layout}" name="{trains}[PP2-glm4_moe]"><failure/></testcase>'
        f'<testcase classname="{layout}" name="{trains}[EP2-glm4_moe]"><skipped/></testcase>'
        '<testcase classname="tests.unit.checkpoint.test_round_trip" name="test_round_trip_is_bit_equal[glm4-moe-tp2-pp2]"/>'
        "</testsuite>"
    )
    ran = family_table.results([tmp_path / "one.xml"])
    convert, _, _, _, tensor, pipeline, _, experts, *_ = family_table.cells("glm4_moe", ran)
    assert (convert, tensor, pipeline, experts) == ("passed", "passed", "failed", "skipped")
    # another family's row whose name begins alike, a family without experts, and one with windows
    assert family_table.cells("glm4", ran)[0] == "skipped" and family_table.cells("glm4", ran)[7] == "none"
    assert family_table.cells("gemma3", ran)[6] == "refused"
