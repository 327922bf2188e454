"""The pictures of the guides are those that tools/draw_pictures.py draws from the package's data."""

from __future__ import annotations

import runpy
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]


def test_the_pictures_are_new(tmp_path: Path) -> None:
    runpy.run_path(str(ROOT / "tools/draw_pictures.py"))["main"](tmp_path)
    drawn = sorted(path.name for path in tmp_path.iterdir())
    assert len(drawn) == 8
    old = [name for name in drawn if (tmp_path / name).read_text() != (ROOT / "docs/images" / name).read_text()]
    assert old == [], "run python tools/draw_pictures.py"


def test_a_picture_has_its_title_and_texts() -> None:
    drawing = ElementTree.parse(ROOT / "docs/images/iteration.svg").getroot()
    texts = [node.text for node in drawing.iter("{http://www.w3.org/2000/svg}text")]
    assert {"generate", "update_actor", "push_weights"} <= {*texts}
