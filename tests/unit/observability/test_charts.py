"""The script that draws the charts of the report: ticks, bounds and sums, run by node where there is one."""

from __future__ import annotations

import json
import shutil
import subprocess
from importlib.resources import files
from typing import Any

import pytest
from patience import patient

NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="needs node: apt-get install nodejs")


def evaluate(*expressions: str) -> list[Any]:
    """Values of expressions, in which the functions of charts.js are known."""
    path = files("mindspeed_rl.observability.page").joinpath("charts.js")
    names = "linearTicks, logTicks, tickText, axisBounds, stack, nearest, average"
    code = f"const {{ {names} }} = require({json.dumps(str(path))});"
    code += f"console.log(JSON.stringify([{','.join(expressions)}]))"
    assert NODE is not None
    done = subprocess.run([NODE, "-e", code], capture_output=True, text=True, timeout=patient(60), check=True)
    return json.loads(done.stdout)


def test_ticks_are_round_and_within_the_bounds() -> None:
    assert evaluate("linearTicks(0, 1, 4)", "linearTicks(3, 97, 5)", "linearTicks(-0.001, 0.0021, 4)") == [
        [0, 0.5, 1],
        [20, 40, 60, 80],
        [-0.001, 0, 0.001, 0.002],
    ]


def test_logarithmic_ticks_are_powers_of_ten() -> None:
    assert evaluate("logTicks(2e-6, 3e-2, 4)", "logTicks(0.02, 0.9, 4)", "logTicks(2, 3, 4)", "logTicks(1e-12, 1, 4)") == [
        [1e-5, 1e-4, 1e-3, 1e-2],
        [0.02, 0.05, 0.1, 0.2, 0.5],
        [2, 2.5, 3],
        [1e-12, 1e-10, 1e-8, 1e-6, 1e-4, 1e-2, 1],
    ]


def test_texts_of_ticks_are_short() -> None:
    assert evaluate("[0, 0.5, 1200, 1e-5, 2.5e7, -0.25].map(tickText)") == [["0", "0.5", "1200", "1e-5", "2.5e7", "-0.25"]]


def test_a_constant_and_no_value_have_bounds() -> None:
    bounds = evaluate("axisBounds([3, 3], false, false)", "axisBounds([0], false, false)", "axisBounds([], false, false)")
    assert bounds == [[0, 6], [-1, 1], [0, 1]]
    assert evaluate("axisBounds([1e-3, 1e-3], true, false)", "axisBounds([2, 8], false, true)") == [[5e-4, 2e-3], [0, 8.32]]


def test_areas_are_sums_over_the_iterations_of_all() -> None:
    lines = [{"x": [1, 2, 3], "y": [1, 1, 1]}, {"x": [2, 3], "y": [5, 6]}]
    (stacked,) = evaluate(f"stack({json.dumps(lines)}).map((line) => [line.stackX, line.stackLow, line.stackHigh])")
    assert stacked == [[[1, 2, 3], [0, 0, 0], [1, 1, 1]], [[1, 2, 3], [1, 1, 1], [1, 6, 7]]]


def test_the_nearest_point_is_found() -> None:
    assert evaluate("[0, 1.4, 1.6, 9].map((x) => nearest([1, 2, 5], x))") == [[0, 0, 1, 2]]


def test_a_smooth_curve_has_the_mean_of_the_neighbours() -> None:
    assert evaluate("average([0, 0, 5, 0, 0])") == [[5 / 3, 5 / 4, 1, 5 / 4, 5 / 3]]
