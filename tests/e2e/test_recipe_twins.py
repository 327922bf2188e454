"""The CPU twin of every recipe trains, and its curve stays inside of its band where one was measured."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from patience import patient

from mindspeed_rl.cli.recipe.record import CPU, Recipe, list_recipes
from mindspeed_rl.observability.run_files import read_run

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow
#: twins that `--all` trains, one of each kind of stage; `--extra` trains the others
FREQUENT = ("maths", "ppo", "sft_dpo", "distillation")


@pytest.mark.parametrize(
    "recipe",
    [pytest.param(recipe, marks=() if recipe.name in FREQUENT else pytest.mark.extra) for recipe in list_recipes()],
    ids=lambda recipe: recipe.name,
)
def test_a_twin_stays_inside_of_its_band(recipe: Recipe, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mindspeed_rl.cli.main", "recipe", "run", recipe.name],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=patient(460),
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    run = read_run(tmp_path / "runs/recipes" / recipe.name / "run")
    curve = recipe.find_curve(CPU)
    assert run.expected == curve
    if curve is None:
        return
    judgement = curve.judge(run.history)
    assert len(judgement.inside) == len(curve.windows), str(judgement)
    assert f"curve: {judgement}" in done.stdout
    assert "is inside its band up to iteration" in (run.folder / "report.md").read_text().replace("\\", "")
