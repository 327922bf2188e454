"""The quickstart's picture shows what its run folder says."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "quickstart" / "plot_curve.py"


def test_the_curve_has_a_point_for_every_evaluation(tmp_path: Path) -> None:
    rows = [{"iteration": i, "grpo/score/mean": 0.5} for i in (1, 2, 3, 4)]
    rows[1]["eval/accuracy"] = 0.75
    rows[3]["eval/accuracy"] = 1.0
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "report.json").write_text(json.dumps({"results": {"eval/accuracy/first": 0.25}}))
    picture = tmp_path / "images" / "curve.svg"
    subprocess.run([sys.executable, str(SCRIPT), str(tmp_path), str(picture)], check=True)

    drawing = ElementTree.parse(picture).getroot()
    space = "{http://www.w3.org/2000/svg}"
    # x from 52 (iteration 0) to 700 (iteration 4), y from 256 (nothing) to 36 (all)
    circles = [(float(c.get("cx", "")), float(c.get("cy", ""))) for c in drawing.iter(f"{space}circle")]
    assert circles == [(52.0, 201.0), (376.0, 91.0), (700.0, 36.0)]
    reward = next(drawing.iter(f"{space}polyline")).get("points", "")
    assert re.findall(r"[\d.]+", reward) == ["214.0", "146.0", "376.0", "146.0", "538.0", "146.0", "700.0", "146.0"]
    assert {"25.0%", "100.0%"} <= {text.text for text in drawing.iter(f"{space}text")}
